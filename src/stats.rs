//! What a store has done so far, as numbers.

use crate::error::{Cause, Error};
use crate::histogram::{Histogram, Summary};
use crate::sync::{AtomicU64, CachePadded, Ordering};
use std::fmt;
use std::sync::atomic;

/// Counters inside of the engine.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Groups made durable: one sync each.
    pub commits: AtomicU64,
    /// Writes made durable or on their way.
    pub writes: AtomicU64,
    /// Groups that were not idle: how long their first write waited, and how many writes they held.
    pub commit_nanos: Histogram,
    pub sync_nanos: Histogram,
    pub group_writes: Histogram,
    /// Refused writes, each in one of these.
    pub fenced: Spread,
    pub unknown_tokens: AtomicU64,
    pub conflicts: AtomicU64,
    pub duplicates: AtomicU64,
    pub other_refusals: AtomicU64,
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
    /// Bytes of frames written.
    pub written: AtomicU64,
    /// Bytes of headers, key tables and seals written.
    pub sealing: AtomicU64,
    /// Bytes of frames in which compaction carried what was needed.
    pub carried: AtomicU64,
    /// Deletes that compaction dropped.
    pub dropped: AtomicU64,
    /// Floors raised over marks that nobody needed.
    pub folds: AtomicU64,
    /// Marks that the last round which met any could not fold.
    pub held_back: AtomicU64,
    pub retired: AtomicU64,
    pub retired_bytes: AtomicU64,
}

/// A counter that many threads raise at once and few read: each thread has one cache line of it nearly for
/// itself.
#[derive(Debug, Default)]
pub(crate) struct Spread([CachePadded<AtomicU64>; LINES]);

const LINES: usize = 8;
static THREADS: atomic::AtomicUsize = atomic::AtomicUsize::new(0);
thread_local! {
    static LINE: usize = THREADS.fetch_add(1, Ordering::Relaxed) % LINES;
}

impl Spread {
    pub fn add_one(&self) {
        // A thread that is ending has no line of its own any more.
        let line = LINE.try_with(|line| *line).unwrap_or(0);
        self.0[line].fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.iter().map(|line| line.load(Ordering::Relaxed)).sum()
    }
}

impl Counters {
    /// Counts a refused write.
    pub fn refuse(&self, error: &Error) {
        let counter = match error {
            Error::Fenced { .. } => return self.fenced.add_one(),
            Error::UnknownToken { .. } => &self.unknown_tokens,
            Error::Conflict { .. } => &self.conflicts,
            Error::Duplicate { .. } => &self.duplicates,
            _ => &self.other_refusals,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// What a store has done since it was opened, and how large it is; taken by
/// [`Db::stats`](crate::Db::stats). Sizes are as of now; nothing here is one moment for all of it.
///
/// [`Stats::figures`] lists all of it by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Groups made durable, each with one write and one sync.
    pub commits: u64,
    /// Writes (batches, puts, deletes, raises) appended.
    pub writes: u64,
    /// From the append of a group's first write until the group was durable, in nanoseconds: the longest that
    /// any write of the group waited. Once per group.
    pub commit_nanos: Summary,
    /// A sync of the log, in nanoseconds. Once per sync.
    pub sync_nanos: Summary,
    /// Frames in a group: writes and grants, and now and then an idle one. Once per group.
    pub group_writes: Summary,
    /// Writes refused: the sum of the next five.
    pub refused: u64,
    /// Refused as [`Error::Fenced`](crate::Error::Fenced).
    pub fenced: u64,
    /// Refused as [`Error::UnknownToken`](crate::Error::UnknownToken).
    pub unknown_tokens: u64,
    /// Refused as [`Error::Conflict`](crate::Error::Conflict).
    pub conflicts: u64,
    /// Retries recognised by their [`OperationId`](crate::OperationId).
    pub duplicates: u64,
    /// Refused for another reason: a stale operation, a lease that is over, a jump of external tokens.
    pub other_refusals: u64,
    /// Leases granted.
    pub grants: u64,
    /// Of these, taken over from a holder whose lease had run out.
    pub takeovers: u64,
    /// Leases renewed.
    pub renewals: u64,
    /// Of the renewals, those that came in the last fifth of the time to live: see [`Stats::ttl_hint`].
    pub late_renewals: u64,
    /// Leases released by their holders.
    pub releases: u64,
    /// Leases that were found to have run out.
    pub expiries: u64,
    /// Leases broken by [`Keyspace::break_lease`](crate::Keyspace::break_lease).
    pub breaks: u64,
    /// Leases refused: held by somebody else, or the wait for them was over.
    pub lease_refusals: u64,
    /// Leases handed to somebody who waited.
    pub hand_overs: u64,
    /// From the store's noticing that a fence is free to its next holder's having it, durably: on average,
    /// in nanoseconds.
    pub hand_over_nanos_mean: u64,
    /// The longest of these times.
    pub hand_over_nanos_max: u64,
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
    /// Marks that nobody needs, of those that compaction came across last, and that it could not fold: a lease
    /// of the same keyspace with a lower token is not over. Long leases belong in a keyspace of their own.
    pub held_back_marks: u64,
    /// Who waits for a lease now.
    pub waiting: u64,
    /// Grants whose holder wants to hear of the end, or that are kept alive.
    pub watched_leases: u64,
    /// Grants in the table of leases, live or not yet swept.
    pub leases: u64,
    /// Keyspaces.
    pub keyspaces: u64,
    /// Keys that have a value.
    pub keys: u64,
    /// Bytes of heap that the index of names takes.
    pub index_bytes: u64,
    /// Segments on disk, spares included.
    pub segments: u64,
    /// Of these, the spares: empty, and ready to be written.
    pub spares: u64,
    /// Bytes of all segments on disk, spares included, and of the index file.
    pub disk_bytes: u64,
    /// Bytes of what is needed in the log: the newest version of each key, and states carried on. After an open that
    /// read all of the log, also older states that a folded floor covers, until compaction comes by.
    pub live_bytes: u64,
    /// Bytes of what is not needed any more, and not yet given back.
    pub garbage_bytes: u64,
    /// Bytes written to all files: frames, what surrounds them, the zeros of new segments, the list,
    /// and index files.
    pub disk_written_bytes: u64,
    /// Values above 4 KiB that were handed out and point into a segment as it is now (being written, or
    /// sealed).
    pub pinned_values: u64,
    /// Bytes of the segments that such values point into: while they do, these are not reused.
    pub pinned_bytes: u64,
    /// Snapshots that are open.
    pub snapshots: u64,
    /// How many frames the oldest open snapshot lies behind the newest one; 0 when none is open.
    pub snapshot_lag: u64,
}

/// One figure of [`Stats`], by name.
///
/// The end of the name is its unit: `_bytes`, `_nanos` (also before `_mean` and `_max`); else it is a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figure {
    /// The name of the field.
    pub name: &'static str,
    /// What it says.
    pub reading: Reading,
}

/// What kind of figure, and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reading {
    /// Only grows, from 0 at the open.
    Counter(u64),
    /// Goes up and down.
    Gauge(u64),
    /// Many numbers, summarised.
    Summary(Summary),
}

impl Counters {
    pub fn copy(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let fenced = self.fenced.get();
        let refusals = [&self.unknown_tokens, &self.conflicts, &self.duplicates, &self.other_refusals];
        Stats {
            commits: read(&self.commits),
            writes: read(&self.writes),
            commit_nanos: self.commit_nanos.summary(),
            sync_nanos: self.sync_nanos.summary(),
            group_writes: self.group_writes.summary(),
            refused: fenced + refusals.into_iter().map(read).sum::<u64>(),
            fenced,
            unknown_tokens: read(&self.unknown_tokens),
            conflicts: read(&self.conflicts),
            duplicates: read(&self.duplicates),
            other_refusals: read(&self.other_refusals),
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
            disk_written_bytes: read(&self.written) + read(&self.sealing),
            carried_bytes: read(&self.carried),
            retired_segments: read(&self.retired),
            dropped_deletes: read(&self.dropped),
            folds: read(&self.folds),
            held_back_marks: read(&self.held_back),
            ..Stats::default()
        }
    }
}

/// Below so many renewals a share of them says nothing.
const HINT_MIN: u64 = 100;

impl Stats {
    /// Every figure with its name, in the order of the fields.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// for figure in db.stats().figures() {
    ///     println!("{} {:?}", figure.name, figure.reading);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn figures(&self) -> Vec<Figure> {
        let counter = |name, value| Figure { name, reading: Reading::Counter(value) };
        let gauge = |name, value| Figure { name, reading: Reading::Gauge(value) };
        let summary = |name, value| Figure { name, reading: Reading::Summary(value) };
        // Field by field, so that a new one does not compile before it has its row here.
        let Stats {
            commits,
            writes,
            commit_nanos,
            sync_nanos,
            group_writes,
            refused,
            fenced,
            unknown_tokens,
            conflicts,
            duplicates,
            other_refusals,
            grants,
            takeovers,
            renewals,
            late_renewals,
            releases,
            expiries,
            breaks,
            lease_refusals,
            hand_overs,
            hand_over_nanos_mean,
            hand_over_nanos_max,
            written_bytes,
            carried_bytes,
            retired_segments,
            dropped_deletes,
            folds,
            held_back_marks,
            waiting,
            watched_leases,
            leases,
            keyspaces,
            keys,
            index_bytes,
            segments,
            spares,
            disk_bytes,
            live_bytes,
            garbage_bytes,
            disk_written_bytes,
            pinned_values,
            pinned_bytes,
            snapshots,
            snapshot_lag,
        } = *self;
        vec![
            counter("commits", commits),
            counter("writes", writes),
            summary("commit_nanos", commit_nanos),
            summary("sync_nanos", sync_nanos),
            summary("group_writes", group_writes),
            counter("refused", refused),
            counter("fenced", fenced),
            counter("unknown_tokens", unknown_tokens),
            counter("conflicts", conflicts),
            counter("duplicates", duplicates),
            counter("other_refusals", other_refusals),
            counter("grants", grants),
            counter("takeovers", takeovers),
            counter("renewals", renewals),
            counter("late_renewals", late_renewals),
            counter("releases", releases),
            counter("expiries", expiries),
            counter("breaks", breaks),
            counter("lease_refusals", lease_refusals),
            counter("hand_overs", hand_overs),
            gauge("hand_over_nanos_mean", hand_over_nanos_mean),
            gauge("hand_over_nanos_max", hand_over_nanos_max),
            counter("written_bytes", written_bytes),
            counter("carried_bytes", carried_bytes),
            counter("retired_segments", retired_segments),
            counter("dropped_deletes", dropped_deletes),
            counter("folds", folds),
            gauge("held_back_marks", held_back_marks),
            gauge("waiting", waiting),
            gauge("watched_leases", watched_leases),
            gauge("leases", leases),
            gauge("keyspaces", keyspaces),
            gauge("keys", keys),
            gauge("index_bytes", index_bytes),
            gauge("segments", segments),
            gauge("spares", spares),
            gauge("disk_bytes", disk_bytes),
            gauge("live_bytes", live_bytes),
            gauge("garbage_bytes", garbage_bytes),
            counter("disk_written_bytes", disk_written_bytes),
            gauge("pinned_values", pinned_values),
            gauge("pinned_bytes", pinned_bytes),
            gauge("snapshots", snapshots),
            gauge("snapshot_lag", snapshot_lag),
        ]
    }

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

#[cfg(feature = "metrics")]
impl Stats {
    /// Hands every figure to the recorder of the `metrics` facade, labelled `store`. Call it as often as figures
    /// are wanted, once a scrape or every few seconds; without a recorder it does nothing.
    ///
    /// The name of a metric is that of the field behind `tidewall_`. Times are in seconds: `commit_nanos` is
    /// `tidewall_commit_seconds`. Counters end in `_total`. A [`Summary`] is gauges: one for each percentile,
    /// labelled `quantile` (`0.5`, `0.9`, `0.99`, `0.999`, and `1`, the largest), a counter with
    /// `_count` and a gauge with `_sum` behind the name.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// db.stats().publish_metrics("jobs");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn publish_metrics(&self, store: &str) {
        let label = || ("store", store.to_owned());
        for figure in self.figures() {
            let (name, scale) = match figure.name.split_once("_nanos") {
                Some((before, after)) => (format!("tidewall_{before}_seconds{after}"), 1e-9),
                None => (format!("tidewall_{}", figure.name), 1.0),
            };
            match figure.reading {
                Reading::Counter(count) => {
                    metrics::counter!(format!("{name}_total"), &[label()]).absolute(count)
                }
                Reading::Gauge(value) => metrics::gauge!(name, &[label()]).set(value as f64 * scale),
                Reading::Summary(summary) => {
                    for (quantile, value) in [
                        ("0.5", summary.p50),
                        ("0.9", summary.p90),
                        ("0.99", summary.p99),
                        ("0.999", summary.p999),
                        ("1", summary.max),
                    ] {
                        let labels = [label(), ("quantile", quantile.to_owned())];
                        metrics::gauge!(name.clone(), &labels).set(value as f64 * scale);
                    }
                    metrics::counter!(format!("{name}_count"), &[label()]).absolute(summary.count);
                    // A counter of whole numbers cannot hold seconds.
                    metrics::gauge!(format!("{name}_sum"), &[label()]).set(summary.sum as f64 * scale);
                }
            }
        }
    }
}

/// Whether a store still acknowledges writes, and what an operator should look at; given by
/// [`Db::health`](crate::Db::health).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Health {
    /// Everything works.
    Healthy,
    /// Writes are acknowledged, so far; something is to be looked at.
    Degraded(Vec<Warning>),
    /// A write or sync failed: nothing is acknowledged until the store is reopened. Reads go on.
    Poisoned(Cause),
    /// The store was closed.
    Closed,
}

impl Health {
    /// Whether everything works, and nothing is to be looked at.
    pub fn is_healthy(&self) -> bool {
        matches!(self, Health::Healthy)
    }

    /// Whether writes are still acknowledged.
    pub fn is_writable(&self) -> bool {
        matches!(self, Health::Healthy | Health::Degraded(_))
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Health::Healthy => f.write_str("healthy"),
            Health::Degraded(warnings) => {
                f.write_str("degraded")?;
                warnings
                    .iter()
                    .zip([": "].into_iter().chain(std::iter::repeat("; ")))
                    .try_for_each(|(warning, between)| write!(f, "{between}{warning}"))
            }
            Health::Poisoned(cause) => write!(f, "poisoned: {cause}"),
            Health::Closed => f.write_str("closed"),
        }
    }
}

/// What an operator should look at in a store that works; part of [`Health`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Warning {
    /// The last attempt to prepare a segment of so many bytes found the disk full. Free space: writes go on
    /// into the segments that are there, puts first answer [`Error::NoSpace`](crate::Error::NoSpace).
    NoSpace(u64),
    /// The last attempt to prepare a segment failed: writes go on into those that are there.
    NoSpares(Error),
    /// The last round of compaction in the background failed, for another reason than a full disk: space is not
    /// given back. Damage in a segment is one: see [`Error::Corrupt`](crate::Error::Corrupt).
    NotCompacting(Error),
    /// Opening found damage that cost nothing but time: a copy of `STORE` that was repaired, a key table that
    /// was read around. The disk may be failing.
    ReadAround(String),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::NoSpace(bytes) => write!(f, "no space for another segment of {bytes} bytes"),
            Warning::NoSpares(error) => write!(f, "no segment could be prepared: {error}"),
            Warning::NotCompacting(error) => write!(f, "space is not given back: {error}"),
            Warning::ReadAround(what) => write!(f, "read around damage: {what}"),
        }
    }
}
