//! Where every lock, atomic and thread primitive of the crate comes from.
//!
//! The lock-free kernels (`group_commit`, `lease`, `log/guard`) import from here and nothing else,
//! so `tests/loom.rs` can compile the same files against loom's primitives and explore every
//! interleaving of them. `tests/schedules` does so with the whole engine: there the locks, sleeping and
//! waking, and the threads, are those of shuttle.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

pub(crate) use crossbeam_utils::CachePadded;

#[cfg(not(all(test, shuttle)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::thread;

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::thread;
#[cfg(all(test, shuttle))]
pub(crate) use shuttled::{
    Condvar, Mutex, MutexGuard, RwLock, may_switch, move_all, time, wait_on, wake_all,
};

#[cfg(all(test, shuttle))]
#[path = "../tests/support/shuttled.rs"]
mod shuttled;

/// Between two looks that another thread may come between, without a lock: a place where a schedule may choose
/// to let one. It is nothing but in those tests.
#[cfg(not(all(test, shuttle)))]
#[inline(always)]
pub(crate) fn may_switch() {}

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
pub(crate) fn move_all(word: &AtomicU32, expected: u32, other: &AtomicU32) {
    if !crate::storage::requeue(word, expected, other) {
        wake_all(word);
    }
}
