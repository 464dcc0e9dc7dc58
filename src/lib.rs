//! An embeddable fencing key-value store.
#![deny(unsafe_code)]

// Ground.
mod types;
mod error;
mod sync;
mod clock;
pub mod storage;
// Rules: pure, no files, no clock reads, no threads.
mod lease;
mod index;
mod group_commit;

pub use error::{Cause, Error, Found, LastOp, Outcome, Result};
pub use types::{
    Lsn, MAX_BATCH_BYTES, MAX_KEY_BYTES, MAX_KEYSPACES, MAX_NAME_BYTES, Mark, OpId, OwnerId, Token, Ttl,
};
