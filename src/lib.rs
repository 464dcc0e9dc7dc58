#![doc = include_str!("../README.md")]
//!
//! # In this documentation
//!
//! * [`Db`]: open a store, see how it fares, close it. [`Options`]: what can be chosen.
//! * [`Keyspace`]: every way to write, each fenced, and to read. [`Batch`]: several changes as one.
//! * [`Lease`], from [`Keyspace::lease`]: where a [`Token`] comes from.
//! * [`Snapshot`] and [`Iter`]: everything as it was at one [`Lsn`].
//! * [`Inspection`]: a store seen from outside, beside whoever has it open.
//! * [`Db::checkpoint`] and [`restore`]: copies. [`verify`] and [`salvage`]: damage.
//! * [`Commit`]: a write on its way, as a future or to wait for.
//! * [`Error`]: what went wrong, and what to do now.
//! * [`storage`]: the seam to the disk, and what is assumed of one. `testkit`, behind the feature of that name:
//!   what a test of your own service needs.
//!
//! Three numbers are never confused, and no conversion leads from one to another: a [`Token`] fences, an
//! [`OwnerId`] names the holder of a lease, an [`OperationId`] makes the retry of one operation exact.
#![deny(unsafe_code)]
#![warn(missing_docs)]
// Clocks, threads, files and random bits have their own modules; `clippy.toml` lists what is banned elsewhere.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// The order to read in: a module uses only what is declared above it (`tests/tidy.rs`).

// Ground: words, errors, the seam to the disk.
mod types;
mod error;
mod sync;
mod clock;
mod patience;
mod entropy;
mod events;
mod histogram;
pub mod storage;
mod options;
// Rules: pure. No files, no clock reads, no threads.
mod fence;
mod slots;
mod group_commit;
mod lease;
mod lease_table;
mod waiter;
mod waiters;
mod watches;
mod op;
mod index;
// Bytes: they never decide whether something is allowed.
mod format;
mod log;
// Engine: the verbs, and the locks.
mod stats;
mod snapshot;
mod space;
mod engine;
mod look_up;
mod key_order;
mod admit;
mod append;
mod commit;
mod carry;
mod fold;
mod compact;
mod grant;
mod hand_over;
mod grace;
mod read_ahead;
mod replay;
mod index_file;
mod found;
mod recover;
mod refresh;
// Front: what a user types.
mod observe;
mod db;
mod walk;
mod view;
mod batch;
mod keyspace;
mod floor;
mod block;
mod guard;
mod acquire;
mod request;
mod oversee;
mod outside;
// Beside the store: what its files hold, and copies of it.
mod inspect;
mod backup;
#[cfg(any(test, feature = "testkit", fuzzing))]
pub mod testkit;

pub use acquire::Acquire;
pub use admit::{Expect, Require};
pub use backup::{Checkpoint, Restore, Restored, Salvage, Salvaged, restore, salvage};
pub use batch::Batch;
#[cfg(any(test, feature = "testkit", fuzzing))]
pub use clock::ManualClock;
pub use clock::{Clock, SystemClock};
pub use compact::Compacted;
pub use db::{Commit, Db};
pub use error::{Cause, Error, Found, LastOperation, Outcome, Result};
pub use floor::Floor;
pub use guard::{Lease, Lost};
pub use histogram::Summary;
pub use inspect::{Fault, FaultKind, Report, Verify, verify};
pub use keyspace::{Deleted, Keyspace, Raised};
pub use lease::Ending;
pub use options::{
    KeyspaceOptions, MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, Options, Progress, ReadMode, Scope, Tokens,
};
pub use outside::{IndexInfo, Inspection, LogChange, LogFrame, LogOp, SegmentInfo, SegmentLog, SegmentState};
pub use oversee::{Broken, Holder};
pub use recover::OpenReport;
pub use request::LeaseRequest;
pub use slots::MAX_SLOTS;
pub use snapshot::Value;
pub use stats::{Figure, Health, Reading, Stats, Warning};
pub use types::{
    Excerpt, Lsn, MAX_BATCH_BYTES, MAX_KEY_BYTES, MAX_KEYSPACES, MAX_NAME_BYTES, Mark, OperationId, OwnerId,
    Token, Ttl,
};
pub use view::{Iter, KeyRange, Snapshot};

pub mod guide {
    //! Leases: a guide, from the paused worker on.
    //!
    // Where the links of the page lead to here. Of two definitions the first counts: those at the end of the page lead to
    // the sources, for whoever reads it as a file.
    #![doc = include_str!("../docs/leases.links")]
    #![doc = include_str!("../docs/leases.md")]
}

#[cfg(all(test, shuttle))]
#[path = "../tests/schedules/mod.rs"]
mod tests;
