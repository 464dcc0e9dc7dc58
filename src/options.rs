//! What can be chosen when a store or a keyspace is opened, with each default.

use crate::clock::{Clock, Time};
use crate::entropy::Entropy;
use crate::error::{Error, Result};
use crate::storage::Storage;
use crate::sync::Arc;
use crate::types::{Mark, Token};
use std::fmt;
use std::time::Duration;

/// The smallest segment, in bytes (16 KiB).
pub const MIN_SEGMENT_BYTES: u32 = 16 << 10;
/// The largest segment, in bytes (64 MiB).
pub const MAX_SEGMENT_BYTES: u32 = 64 << 20;

/// How often figures can be published.
const PUBLISH_MIN: Duration = Duration::from_millis(10);
const PUBLISH_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest that a thread yields before it sleeps.
const YIELD_MAX: Duration = Duration::from_millis(10);

/// Which keys share one fence. Fixed when the keyspace is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[non_exhaustive]
pub enum Scope {
    /// Each key is a fence of its own. The default.
    #[default]
    Key,
    /// All keys up to and including the first such byte share a fence: with `b'/'`, `7/a` and `7/b`
    /// belong to the fence `7/`. A key without the byte is a fence of its own, and a lease on it
    /// guards that key alone.
    Prefix(u8),
    /// All keys of the keyspace share one fence, whose name is `b""`.
    Keyspace,
}

impl Scope {
    /// The fence of a key: always a prefix of it. Upholds F1: the one rule, structural and fixed.
    pub(crate) fn fence_len(self, key: &[u8]) -> usize {
        match self {
            Scope::Key => key.len(),
            Scope::Prefix(delimiter) => {
                key.iter().position(|&b| b == delimiter).map_or(key.len(), |at| at + 1)
            }
            Scope::Keyspace => 0,
        }
    }
}

/// Where the tokens of a keyspace come from. Fixed when the keyspace is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[non_exhaustive]
pub enum Tokens {
    /// This store's leases issue them. The default.
    #[default]
    Store,
    /// Something else issues them: an etcd revision, a ZooKeeper zxid, a database sequence. The
    /// store only enforces them.
    External,
}

/// The options of a keyspace, kept with it for ever.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct KeyspaceOptions {
    pub(crate) scope: Scope,
    pub(crate) tokens: Tokens,
    pub(crate) jump_cap: Option<u64>,
}

impl KeyspaceOptions {
    /// One fence per key, tokens issued by this store, no cap on jumps.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which keys share a fence. Default: [`Scope::Key`].
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    /// Where tokens come from. Default: [`Tokens::Store`].
    pub fn tokens(mut self, tokens: Tokens) -> Self {
        self.tokens = tokens;
        self
    }

    /// For external tokens: a token more than `cap` above the highest one the keyspace has admitted
    /// is refused as [`Error::TokenJump`], because one garbled number would lock everybody out for
    /// ever. [`raise_all`](crate::Keyspace::raise_all) is exempt, and so is the *first* token of a keyspace, which
    /// has nothing to be measured against: call `raise_all` with the source's present value right after creating
    /// the keyspace. Default: no cap.
    pub fn token_jump_cap(mut self, cap: u64) -> Self {
        self.jump_cap = Some(cap);
        self
    }

    /// The scope.
    pub fn get_scope(&self) -> Scope {
        self.scope
    }

    /// The source of tokens.
    pub fn get_tokens(&self) -> Tokens {
        self.tokens
    }

    /// The cap on jumps.
    pub fn get_token_jump_cap(&self) -> Option<u64> {
        self.jump_cap
    }

    pub(crate) fn check(&self) -> Result<()> {
        match (self.tokens, self.jump_cap) {
            (Tokens::Store, Some(_)) => Err(Error::invalid(
                "a token jump cap needs external tokens: tokens issued by the store never jump",
            )),
            (_, Some(0)) => Err(Error::invalid("a token jump cap of 0 would refuse every new token")),
            _ => Ok(()),
        }
    }

    /// What differs from the options a keyspace was created with, as a sentence.
    pub(crate) fn difference(&self, created: &Self) -> Option<String> {
        let mut parts = Vec::new();
        if self.scope != created.scope {
            parts.push(format!("scope is {:?}, not {:?}", created.scope, self.scope));
        }
        if self.tokens != created.tokens {
            parts.push(format!("tokens are {:?}, not {:?}", created.tokens, self.tokens));
        }
        if self.jump_cap != created.jump_cap {
            parts.push(format!("token jump cap is {:?}, not {:?}", created.jump_cap, self.jump_cap));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// How sealed segments are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// Through a read-only memory map. The default, and the fastest; an unreadable sector is a SIGBUS.
    #[default]
    Map,
    /// With positioned reads: a system call or two per look-up, and an unreadable sector is an
    /// [`Error::Io`].
    Pread,
}

/// What an open has done so far; handed to the callback of [`Options::progress`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Progress {
    /// Segments read so far.
    pub segments_done: u32,
    /// Segments to read in all.
    pub segments_all: u32,
    /// Ops replayed so far.
    pub ops: u64,
}

type ProgressFn = Arc<dyn Fn(Progress) + Send + Sync>;

/// The options of a store.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// let db = tidewall::Options::new().in_flight_bytes(8 << 20).open(dir.path().join("data"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Options {
    pub(crate) segment_bytes: Option<u32>,
    pub(crate) in_flight_bytes: u64,
    pub(crate) read_mode: ReadMode,
    pub(crate) read_only: bool,
    pub(crate) must_exist: bool,
    pub(crate) background: bool,
    pub(crate) idle_seal: bool,
    pub(crate) clock: Time,
    pub(crate) storage: Option<Arc<dyn Storage>>,
    pub(crate) progress: Option<ProgressFn>,
    pub(crate) entropy: Entropy,
    pub(crate) lease_grace: Duration,
    pub(crate) publish_stats: Option<Duration>,
    pub(crate) must_have_granted: Option<Token>,
    pub(crate) compaction: bool,
    pub(crate) index_every: Option<u64>,
    pub(crate) yield_for: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            segment_bytes: None,
            in_flight_bytes: 64 << 20,
            read_mode: ReadMode::Map,
            read_only: false,
            must_exist: false,
            background: true,
            idle_seal: true,
            clock: Time::default(),
            storage: None,
            progress: None,
            entropy: Entropy::System,
            lease_grace: Duration::ZERO,
            publish_stats: None,
            must_have_granted: None,
            compaction: true,
            index_every: None,
            yield_for: Duration::from_micros(500),
        }
    }
}

impl Options {
    /// Durable, mapped, with background threads.
    pub fn new() -> Self {
        Self::default()
    }

    /// The size of new segments, from [`MIN_SEGMENT_BYTES`] to [`MAX_SEGMENT_BYTES`]. Default: about
    /// 1/96 of the store or half of that, between 1 and 64 MiB.
    pub fn segment_bytes(mut self, bytes: u32) -> Self {
        self.segment_bytes = Some(bytes);
        self
    }

    /// How many bytes may be appended and not yet durable before `submit` waits and `try_submit`
    /// answers [`Error::Busy`]. Default: 64 MiB; at least one batch is always let through.
    pub fn in_flight_bytes(mut self, bytes: u64) -> Self {
        self.in_flight_bytes = bytes;
        self
    }

    /// How sealed segments are read. Default: [`ReadMode::Map`].
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.read_mode = mode;
        self
    }

    /// Opens without writing a byte: serves what is proven to be durable, begins no incarnation.
    /// Default: off.
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Refuses to create a new store: a wrong or emptied directory is an error, because a store
    /// without its marks would let every old writer in. Default: off.
    pub fn must_exist(mut self) -> Self {
        self.must_exist = true;
        self
    }

    /// Runs without any thread of its own: whoever waits for a commit makes it, and segments are
    /// prepared by whoever needs one. Deterministic, for simulations. Default: threads run.
    pub fn without_threads(mut self) -> Self {
        self.background = false;
        self.idle_seal = false;
        self
    }

    /// Draws the ids of the store, its lives and its owners from a seed, so that a simulation can be
    /// repeated bit for bit. Never for real data: two stores of one seed would take each other's bytes
    /// for their own.
    #[cfg(any(test, feature = "testkit", fuzzing))]
    pub fn deterministic(mut self, seed: u64) -> Self {
        self.entropy = Entropy::seeded(seed);
        self
    }

    /// Writes an index file as soon as so many ops lie behind the last one, so that a simulation of a few ops has
    /// some. Default: as many as make an open slow.
    #[cfg(any(test, feature = "testkit", fuzzing))]
    pub fn index_every(mut self, ops: u64) -> Self {
        self.index_every = Some(ops);
        self
    }

    /// The clock that leases are measured by. Default: [`SystemClock`](crate::SystemClock).
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Time::of(clock);
        self
    }

    /// How long after an open, and at most for its ttl, the fence of a lease that was held before is kept for
    /// its holder, who presents its owner and old token to
    /// [`LeaseRequest::resume`](crate::LeaseRequest::resume) and gets a new lease; others wait, or see
    /// [`Error::Held`]. Default: zero, so that reopening ends every lease and its fence is free at once.
    ///
    /// Grace is a delay, never authority. Only leases of the run just before count, so opening again and
    /// again prolongs nothing; and as releases are not synced, a fence released right before a crash may be
    /// kept as well.
    pub fn lease_grace(mut self, time: Duration) -> Self {
        self.lease_grace = time;
        self
    }

    /// Writes what [`Db::stats`](crate::Db::stats) and [`Db::health`](crate::Db::health) say into the file
    /// `STATS` of the directory, every so often, from 10 ms to a day: for `tidewall stats --watch` and others
    /// who look from outside. Default: off.
    ///
    /// The file is replaced as a whole, never synced, and read by nobody in here: the store does not depend on
    /// it. It is removed when the store is closed; one left by a crash is replaced by the next open that
    /// publishes.
    pub fn publish_stats(mut self, interval: Duration) -> Self {
        self.publish_stats = Some(interval);
        self
    }

    /// A token of this store that was seen elsewhere: in another system that keeps the highest one, perhaps. A
    /// store that has not granted that far is an older copy, and opening it answers [`Error::OlderCopy`] before
    /// anything is changed; so does a directory without a store. Default: none.
    ///
    /// It is the only way to notice a plain copy of the directory that is opened instead of the original, or
    /// beside it: the two have the same identity, and each would grant the same tokens. Copies are made with
    /// [`Db::checkpoint`](crate::Db::checkpoint) and become stores through [`restore`](crate::restore).
    pub fn must_have_granted(mut self, token: Token) -> Self {
        self.must_have_granted = Some(token);
        self
    }

    /// Another place to keep the files than a directory of this machine; see
    /// [`storage`](crate::storage). The path given to [`Options::open`] is then only a name.
    pub fn storage(mut self, storage: impl Storage) -> Self {
        self.storage = Some(Arc::new(storage));
        self
    }

    /// Whether space is given back as the store is written to. Default: yes. Without it only
    /// [`Db::compact`](crate::Db::compact) does so.
    pub fn compaction(mut self, on: bool) -> Self {
        self.compaction = on;
        self
    }

    /// How long a thread that waits for a commit, or for a lease, yields its processor again and again before it
    /// sleeps; at most 10 ms. Default: 500 µs. Zero: it sleeps at once.
    ///
    /// To be woken takes tens of microseconds where processors have nothing else to do, most of all on a virtual
    /// machine; who yields is there when the sync is done. It costs processor time that nobody else asks for: a
    /// store with a few busy writers keeps processors awake that would have slept during its syncs. The store stops by
    /// itself where most syncs take longer than this, and for a while whenever other threads want the
    /// processors. Futures never yield.
    pub fn yield_for(mut self, time: Duration) -> Self {
        self.yield_for = time;
        self
    }

    /// Called while the store is being opened, once per segment.
    pub fn progress(mut self, callback: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Arc::new(callback));
        self
    }

    /// Whether a store with this counter is one that has seen `must_have_granted`.
    pub(crate) fn check_counter(&self, counter: u64) -> Result<()> {
        match self.must_have_granted {
            Some(seen) if counter < seen.get() => {
                Err(Error::OlderCopy { counter: Mark::from_number(counter), seen })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if let Some(interval) = self.publish_stats {
            if !(PUBLISH_MIN..=PUBLISH_MAX).contains(&interval) {
                return Err(Error::invalid(format!(
                    "figures published every {interval:?}: not between {PUBLISH_MIN:?} and {PUBLISH_MAX:?}"
                )));
            }
            if self.read_only || !self.background {
                return Err(Error::invalid("figures are published by a thread of a store open for writing"));
            }
        }
        if self.yield_for > YIELD_MAX {
            return Err(Error::invalid(format!(
                "a yield_for of {:?}: at most {YIELD_MAX:?}, for who waits longer than that had better sleep",
                self.yield_for
            )));
        }
        match self.segment_bytes {
            Some(bytes) if !(MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&bytes) => {
                Err(Error::invalid(format!(
                    "segment_bytes of {bytes} is not between {MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES}"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("segment_bytes", &self.segment_bytes)
            .field("in_flight_bytes", &self.in_flight_bytes)
            .field("read_mode", &self.read_mode)
            .field("read_only", &self.read_only)
            .field("must_exist", &self.must_exist)
            .field("background", &self.background)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F1: a key's fence follows from its bytes alone.
    #[test]
    fn each_key_has_exactly_one_fence() {
        let cases: &[(Scope, &[u8], &[u8])] = &[
            (Scope::Key, b"7/a", b"7/a"),
            (Scope::Prefix(b'/'), b"7/a", b"7/"),
            (Scope::Prefix(b'/'), b"7/a/b", b"7/"),
            (Scope::Prefix(b'/'), b"7/", b"7/"),
            (Scope::Prefix(b'/'), b"7", b"7"),
            (Scope::Prefix(b'/'), b"/", b"/"),
            (Scope::Prefix(0), b"a\0b", b"a\0"),
            (Scope::Keyspace, b"7/a", b""),
        ];
        for &(scope, key, fence) in cases {
            assert_eq!(&key[..scope.fence_len(key)], fence, "{scope:?} {key:?}");
            // The fence of a fence's own name is that fence, so a name can stand for its keys.
            assert_eq!(scope.fence_len(fence), fence.len(), "{scope:?} {fence:?}");
        }
    }

    #[test]
    fn a_difference_of_options_is_named() {
        let created = KeyspaceOptions::new().scope(Scope::Prefix(b'/'));
        let asked = KeyspaceOptions::new().tokens(Tokens::External);
        let said = asked.difference(&created).expect("they differ");
        assert!(said.contains("scope is Prefix(47), not Key"), "{said}");
        assert!(said.contains("tokens are Store, not External"), "{said}");
        assert_eq!(created.difference(&created), None);
    }
}
