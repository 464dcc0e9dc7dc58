//! What happens to a store, told to the subscribers of `tracing`; nothing without that feature.
//!
//! One job: each event once, with its level and fields. The target of all of them is `tidewall`. Events come
//! from inside of the store, under its locks: a subscriber must not call the store it hears of, nor wait for
//! somebody who does.
#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use crate::error::Error;
use std::fmt::Display;

macro_rules! event {
    ($level:ident, $($fields:tt)*) => {
        #[cfg(feature = "tracing")]
        tracing::$level!(target: "tidewall", $($fields)*);
    };
}

/// A store was opened, and what there was to read.
pub(crate) fn opened(dir: &str, segments: u32, ops: u64, cut_bytes: u64, unproven_frames: u32) {
    event!(info, dir, segments, ops, cut_bytes, unproven_frames, "opened");
}

/// Something was wrong that cost nothing but time.
pub(crate) fn warned(dir: &str, what: &str) {
    event!(warn, dir, what, "read around damage");
}

pub(crate) fn unindexed(dir: &str, error: &Error) {
    event!(warn, dir, %error, "no index file was written; the next open reads more of the log");
}

pub(crate) fn closed(dir: &str) {
    event!(info, dir, "closed");
}

/// Nothing is acknowledged any more.
pub(crate) fn poisoned(dir: &str, cause: &dyn Display) {
    event!(error, dir, cause = %cause, "poisoned");
}

pub(crate) fn sealed(dir: &str, segment: u32, frames: u32, end: u32) {
    event!(debug, dir, segment, frames, end, "sealed a segment");
}

pub(crate) fn spare_made(dir: impl Fn() -> String, segment: u32, bytes: u32) {
    event!(debug, dir = dir(), segment, bytes, "made a spare segment");
}

/// A spare segment could not be made.
pub(crate) fn spare_failed(error: &Error) {
    match error {
        Error::NoSpace { dir, bytes } => {
            event!(warn, dir, bytes, "no space for a spare segment");
        }
        error => {
            event!(warn, error = %error, "no spare segment could be made");
        }
    }
}

/// A round of compaction in the background failed.
pub(crate) fn not_compacting(dir: &str, error: &Error) {
    event!(warn, dir, error = %error, "space could not be given back");
}

pub(crate) fn retired(dir: &str, segment: u32, bytes: u32) {
    event!(debug, dir, segment, bytes, "retired a segment");
}

pub(crate) fn keyspace_created(dir: &str, keyspace: &str) {
    event!(info, dir, keyspace, "created a keyspace");
}

pub(crate) fn lease_broken(dir: &str, keyspace: &str, fence: &[u8], token: u64, reason: &[u8]) {
    event!(
        warn,
        dir,
        keyspace,
        fence = %fence.escape_ascii(),
        token,
        reason = %String::from_utf8_lossy(reason),
        "broke a lease"
    );
}

/// The file of figures could not be written.
pub(crate) fn unpublished(dir: &str, error: &dyn Display) {
    event!(warn, dir, error = %error, "the figures could not be published");
}
