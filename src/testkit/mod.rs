#![doc = include_str!("../../docs/testkit.links")]
#![doc = include_str!("../../docs/testkit.md")]
//!
//! Read next: `history.rs`, what makes a write late; `failpoints.rs`, how a worker is made to stop.

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod codecs;
mod failpoints;
mod history;

pub use failpoints::{Failpoints, Pause};
pub use history::{Checked, History, LateWrite, Write};

pub use crate::clock::ManualClock;
pub use crate::storage::{CallKind, Crash, Fault, SimDisk, SyncFailure};
