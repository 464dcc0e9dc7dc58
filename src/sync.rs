//! Where every lock, atomic and thread primitive of the crate comes from.
//!
//! The lock-free kernels (`group_commit`, `lease`, `log/guard`) import from here and nothing else,
//! so `tests/loom.rs` can compile the same files against loom's primitives and explore every
//! interleaving of them.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

pub(crate) use crossbeam_utils::CachePadded;
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

/// Sleeps while `word` holds `expected`; may also wake for no reason.
pub(crate) fn wait_on(word: &AtomicU32, expected: u32) {
    atomic_wait::wait(word, expected);
}

/// Wakes every thread that sleeps on `word`: one system call for all of them.
pub(crate) fn wake_all(word: &AtomicU32) {
    atomic_wait::wake_all(word);
}
