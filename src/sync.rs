//! Where every lock, atomic and thread primitive of the crate comes from.
//!
//! The lock-free kernels (`group_commit`, `lease`, `log/guard`) import from here and nothing else,
//! so `tests/loom.rs` can compile the same files against loom's primitives and explore every
//! interleaving of them. `tests/schedules` does so with the whole engine: there the locks, and sleeping
//! and waking, are those of shuttle.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

pub(crate) use crossbeam_utils::CachePadded;

#[cfg(not(all(test, shuttle)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

#[cfg(all(test, shuttle))]
pub(crate) use shuttled::{Condvar, Mutex, MutexGuard, RwLock, move_all, wait_on, wake_all};

#[cfg(all(test, shuttle))]
#[path = "../tests/support/shuttled.rs"]
mod shuttled;

/// Sleeps while `word` holds `expected`; may also wake for no reason.
#[cfg(not(all(test, shuttle)))]
pub(crate) fn wait_on(word: &AtomicU32, expected: u32) {
    atomic_wait::wait(word, expected);
}

/// Wakes every thread that sleeps on `word`: one system call for all of them.
#[cfg(not(all(test, shuttle)))]
pub(crate) fn wake_all(word: &AtomicU32) {
    atomic_wait::wake_all(word);
}

/// Has every thread that sleeps on `word` sleep on `other` instead, if `word` holds `expected`; where the
/// system cannot do that, it wakes them.
#[cfg(not(all(test, shuttle)))]
#[allow(unsafe_code)]
pub(crate) fn move_all(word: &AtomicU32, expected: u32, other: &AtomicU32) {
    #[cfg(target_os = "linux")]
    {
        // None is woken, all are moved. Private, as the waits are.
        let (wake, most) = (0u32, i32::MAX as usize);
        let operation = libc::FUTEX_CMP_REQUEUE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: both words live during the call, which reads the first one and otherwise takes them for names
        // of queues.
        let moved = unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), operation, wake, most, other.as_ptr(), expected)
        };
        if moved >= 0 {
            return;
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (expected, other);
    wake_all(word);
}
