//! One call of the kernel that no crate makes.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;

/// Has every thread that sleeps on `word` sleep on `other` instead, if `word` holds `expected`. `false`: the
/// system cannot do that, or it was not so.
pub(crate) fn requeue(word: &AtomicU32, expected: u32, other: &AtomicU32) -> bool {
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
        moved >= 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (word, expected, other);
        false
    }
}
