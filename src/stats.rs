//! What a store has done so far, as numbers.

use crate::sync::{AtomicU64, Ordering};
use std::fmt;

/// Counters inside of the engine.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Groups made durable: one sync each.
    pub commits: AtomicU64,
    /// Writes made durable or on their way.
    pub writes: AtomicU64,
    pub refused: AtomicU64,
    pub grants: AtomicU64,
    pub takeovers: AtomicU64,
    pub renewals: AtomicU64,
    pub releases: AtomicU64,
    pub duplicates: AtomicU64,
    /// Bytes of frames written.
    pub written: AtomicU64,
}

/// A copy of the counters, taken by [`Db::stats`](crate::Db::stats). Counts since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Groups made durable, each with one write and one sync.
    pub commits: u64,
    /// Writes (batches, puts, deletes, raises) appended.
    pub writes: u64,
    /// Writes refused: fenced, unknown tokens, conflicts, duplicates.
    pub refused: u64,
    /// Retries recognised by their [`OpId`](crate::OpId).
    pub duplicates: u64,
    /// Leases granted.
    pub grants: u64,
    /// Of these, taken over from a holder whose lease had run out.
    pub takeovers: u64,
    /// Leases renewed.
    pub renewals: u64,
    /// Leases released by their holders.
    pub releases: u64,
    /// Bytes of frames written to the log.
    pub written_bytes: u64,
    /// Bytes of all segments on disk, spares included.
    pub disk_bytes: u64,
    /// Bytes of heap that the index of names takes.
    pub index_bytes: u64,
    /// Keys that the ordered sets hold.
    pub keys: u64,
    /// Grants in the table of leases, live or not yet swept.
    pub leases: u64,
    /// Values above 4 KiB that were handed out and point into a segment as it is now (being written, or
    /// sealed).
    pub pinned_values: u64,
    /// Snapshots that are open.
    pub snapshots: u64,
}

impl Counters {
    pub fn copy(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            commits: read(&self.commits),
            writes: read(&self.writes),
            refused: read(&self.refused),
            duplicates: read(&self.duplicates),
            grants: read(&self.grants),
            takeovers: read(&self.takeovers),
            renewals: read(&self.renewals),
            releases: read(&self.releases),
            written_bytes: read(&self.written),
            ..Stats::default()
        }
    }
}

/// Whether a store still acknowledges writes; given by [`Db::health`](crate::Db::health).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Health {
    /// Everything works.
    Healthy,
    /// A write or sync failed: nothing is acknowledged until the store is reopened. Reads go on.
    Poisoned(crate::error::Cause),
    /// The store was closed.
    Closed,
}

impl Health {
    /// Whether everything works.
    pub fn is_healthy(&self) -> bool {
        matches!(self, Health::Healthy)
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Health::Healthy => f.write_str("healthy"),
            Health::Poisoned(cause) => write!(f, "poisoned: {cause}"),
            Health::Closed => f.write_str("closed"),
        }
    }
}
