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
    pub late_renewals: AtomicU64,
    pub lease_refusals: AtomicU64,
    pub breaks: AtomicU64,
    pub hand_overs: AtomicU64,
    pub hand_over_nanos: AtomicU64,
    pub hand_over_nanos_max: AtomicU64,
    pub releases: AtomicU64,
    pub duplicates: AtomicU64,
    /// Bytes of frames written.
    pub written: AtomicU64,
    /// Bytes of frames in which compaction carried what was needed.
    pub carried: AtomicU64,
    /// Deletes that compaction dropped.
    pub dropped: AtomicU64,
    /// Floors raised over marks that nobody needed.
    pub folds: AtomicU64,
    pub retired: AtomicU64,
    pub retired_bytes: AtomicU64,
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
    /// Leases that were found to have run out.
    pub expiries: u64,
    /// Leases broken by [`Keyspace::break_lease`](crate::Keyspace::break_lease).
    pub breaks: u64,
    /// Leases refused: held by somebody else, or the wait for them was over.
    pub lease_refusals: u64,
    /// Of the renewals, those that came in the last fifth of the time to live: see [`Stats::ttl_hint`].
    pub late_renewals: u64,
    /// Leases handed to somebody who waited.
    pub hand_overs: u64,
    /// From the store's noticing that a fence is free to its next holder's having it, durably: on average,
    /// in nanoseconds.
    pub hand_over_nanos_mean: u64,
    /// The longest of these times.
    pub hand_over_nanos_max: u64,
    /// Who waits for a lease now.
    pub waiting: u64,
    /// Grants whose end somebody wants to hear of, or that are kept alive.
    pub watched_leases: u64,
    /// Bytes of frames written to the log, those of compaction included.
    pub written_bytes: u64,
    /// Of these, written by compaction.
    pub carried_bytes: u64,
    /// Segments retired by compaction.
    pub retired_segments: u64,
    /// Deletes that compaction dropped, as nothing older was left of their keys.
    pub dropped_deletes: u64,
    /// Times that marks were folded into a floor.
    pub folds: u64,
    /// Bytes of what is needed in the log: the newest version of each key, and states carried on.
    pub live_bytes: u64,
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
            breaks: read(&self.breaks),
            lease_refusals: read(&self.lease_refusals),
            late_renewals: read(&self.late_renewals),
            hand_overs: read(&self.hand_overs),
            hand_over_nanos_mean: read(&self.hand_over_nanos)
                .checked_div(read(&self.hand_overs))
                .unwrap_or(0),
            hand_over_nanos_max: read(&self.hand_over_nanos_max),
            written_bytes: read(&self.written),
            carried_bytes: read(&self.carried),
            retired_segments: read(&self.retired),
            dropped_deletes: read(&self.dropped),
            folds: read(&self.folds),
            ..Stats::default()
        }
    }
}

/// Below so many renewals a share of them says nothing.
const HINT_MIN: u64 = 100;

impl Stats {
    /// A sentence when holders renew dangerously late: a pause of a fifth of the ttl would have cost them
    /// their leases.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// if let Some(hint) = db.stats().ttl_hint() {
    ///     eprintln!("{hint}");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ttl_hint(&self) -> Option<String> {
        let percent = (self.late_renewals * 100).checked_div(self.renewals)?;
        (self.renewals >= HINT_MIN && percent > 0).then(|| {
            format!(
                "TTL too short: {percent} % of renewals came in the last fifth of it; renew at a third of the TTL, \
                 or choose a longer one"
            )
        })
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
