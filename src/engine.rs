//! The store in memory: what is appended, and what is durable.
//!
//! One job: hold the state that the verbs (`commit`, `recover`, `grant`) work on.
//!
//! Lock order: the compactor → what leaves the list (`Pool::retiring`) → commit lock → list of the pool →
//! tail lock → a waiter → spares, lease table, queues, watches, key sets, snapshots.
//! The tail lock is never held across a write or a sync. Readers take none of them.
//!
//! Read next: `look_up.rs`, how a name is found; `commit.rs`.

use crate::error::{Cause, Error, Result};
use crate::events;
use crate::fence::{FenceState, Floor};
use crate::format::header::{End, Listed};
use crate::group_commit::{Doorbell, Due, Progress};
use crate::index::{Slots, SlotsWriter};
use crate::lease::{Bell, FenceId};
use crate::lease_table::LeaseTable;
use crate::log::image::{Appender, Image, Images};
use crate::log::pool::Pool;
use crate::log::scan::Table;
use crate::log::segment::{Glance, OpRef, Segment, Segments};
use crate::log::usage::{Usage, Weight};
use crate::op::Kind;
use crate::options::Options;
use crate::patience::Patience;
use crate::snapshot::Snapshots;
pub(crate) use crate::space::KeyspaceState;
use crate::space::{Afterlife, Compactor, Indexed};
use crate::stats::Counters;
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, RwLock};
use crate::types::{KeyspaceId, Location, Lsn, Token};
use crate::waiters::Waiters;
use crate::watches::Watches;
use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::fmt;
use std::sync::OnceLock;

/// The end of the log in memory, behind the tail lock.
pub(crate) struct Tail {
    pub slots: SlotsWriter,
    pub usage: Usage,
    pub active: Option<Active>,
    /// Full segments whose frames or seal are not on the disk yet, oldest first.
    pub filled: VecDeque<Filled>,
    /// The lsn of the next frame.
    pub next: Lsn,
    /// The highest token granted, and no token admitted from this store's leases is above it.
    pub counter: u64,
    /// The group being gathered, and its first lsn.
    pub group: u32,
    pub group_start: Lsn,
    /// When that was appended, by the clock of the leases: for the figures only.
    pub group_since: u64,
    /// Floors appended in the group being gathered.
    pub floors: Vec<(Arc<KeyspaceState>, Floor)>,
    /// Deleted keys that may leave the ordered set once nobody can see them.
    pub vanished: VecDeque<(Lsn, Arc<KeyspaceState>, Box<[u8]>)>,
    /// The last frame was an idle one: nothing behind it needs evidence.
    pub idle: bool,
    /// Reused from frame to frame.
    pub scratch: Vec<u8>,
    pub work: Work,
}

/// What is found and made while one write is judged and appended; kept for its memory.
#[derive(Default)]
pub(crate) struct Work {
    /// What stands at each fence of the write.
    pub views: Vec<FenceView>,
    /// The version before each change.
    pub versions: Vec<Option<Version>>,
    /// The op that carries the new state of each fence.
    pub carriers: Vec<Option<Location>>,
    /// Where each change came to lie, what it counts for, and what it does to the state of its fence.
    pub places: Vec<(Location, Weight, Option<StateMove>)>,
}

/// What carried the state of a fence, and what does now.
#[derive(Clone, Copy)]
pub(crate) struct StateMove {
    pub from: Option<Location>,
    pub to: Location,
}

/// The newest version of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Version {
    pub at: Location,
    pub is_put: bool,
    /// The op sets the state of a fence as well.
    pub is_state: bool,
    pub weight: Weight,
}

impl Version {
    pub fn of(op: &OpRef<'_>) -> Self {
        Version {
            at: op.at,
            is_put: op.head.kind == Kind::Put,
            is_state: op.head.fence().is_some(),
            weight: Weight::of(&op.head),
        }
    }

    pub fn seen(op: &Glance) -> Self {
        let weight = Weight::new(op.kind, op.is_moved, op.len);
        Version { at: op.at, is_put: op.kind == Kind::Put, is_state: op.is_state, weight }
    }
}

/// The segment being appended to.
pub(crate) struct Active {
    pub segment: Arc<Segment>,
    pub image: Arc<Image>,
    pub appender: Appender,
    pub listed: Listed,
    pub counter: u64,
    pub table: Table,
    pub frames: u32,
}

/// A segment that no frame will be appended to any more.
pub(crate) struct Filled {
    pub segment: Arc<Segment>,
    pub image: Arc<Image>,
    pub listed: Listed,
    pub counter_before: u64,
    pub counter: u64,
    pub table: Table,
    pub frames: u32,
    pub end: u32,
    pub last: Lsn,
    /// Sealed before it was full: it ends, and is cut, where its frames end.
    pub short: bool,
}

/// How far the log is on disk, behind the commit lock.
pub(crate) struct Committer {
    pub cursor: Option<Cursor>,
    /// How the last sealed segment ended: the next header names it.
    pub before: End,
    pub durable: Lsn,
    /// Who waited for durability when the last group was on the disk: those it held, and those who came meanwhile.
    pub company: u64,
    /// Frames with their checksums filled in, on their way to the disk.
    pub staging: Vec<u8>,
}

/// The place behind the last frame on disk.
pub(crate) struct Cursor {
    pub segment: Arc<Segment>,
    pub offset: u32,
    /// The checksum that the next frame must name.
    pub checksum: u32,
}

/// A lease that was given back without a lock; its `Release` op rides with the next group.
pub(crate) struct Released {
    pub keyspace: Arc<KeyspaceState>,
    pub fence: FenceId,
    pub token: Token,
}

/// Everything that readers, writers and background threads share.
pub(crate) struct Engine {
    pub dir: String,
    pub options: Options,
    pub store_id: [u8; 16],
    pub incarnation: u64,
    /// Came from a copy: it has ancestors.
    pub restored: bool,
    /// Of the hashes of names: differs from store to store, so nobody can aim at the index.
    pub seed: u64,
    pub slots: Arc<Slots>,
    pub segments: Segments,
    pub images: Images,
    /// Of those who wait for a commit, and of those who wait for a lease.
    pub patience: Patience,
    pub lease_patience: Patience,
    pub keyspaces: RwLock<Vec<Arc<KeyspaceState>>>,
    pub progress: Progress,
    /// Tasks that are due, and became so behind a lock: for the committer thread to wake. A leaf, but for the wakers of
    /// commits.
    pub overdue: Mutex<Vec<Due>>,
    pub tail: Mutex<Tail>,
    pub committer: Mutex<Committer>,
    pub pool: Pool,
    pub leases: LeaseTable,
    /// What wakes the thread of the leases, and why.
    pub bell: Arc<Bell>,
    pub waiters: Waiters,
    pub watches: Watches,
    pub released: SegQueue<Released>,
    pub snapshots: Snapshots,
    /// Rung when the committer thread has work.
    pub doorbell: Doorbell,
    /// Rung when spares run low.
    pub pool_bell: Doorbell,
    /// Rung when the thread that publishes figures is to stop.
    pub publish_bell: Doorbell,
    /// Rung when a segment was sealed.
    pub compact_bell: Doorbell,
    /// Rung when a segment was sealed, for whoever writes index files.
    pub index_bell: Doorbell,
    pub index: Indexed,
    /// One round of compaction at a time.
    pub compactor: Mutex<Compactor>,
    /// Grants from before the open whose holders may still be at work.
    pub afterlives: Mutex<Vec<Afterlife>>,
    /// Why the last round of compaction in the background failed, if it did.
    pub compaction_trouble: Mutex<Option<Error>>,
    /// Who waits for durability right now: blocking callers, and those who were just granted what they waited
    /// for.
    pub waiting: AtomicUsize,
    /// The last frame proves all before it, and the committer sleeps until it is rung.
    pub quiet: AtomicBool,
    /// Bytes appended so far; how many of them are durable, `progress` knows.
    pub appended_bytes: AtomicU64,
    pub cause: OnceLock<Cause>,
    pub closed: AtomicBool,
    pub counters: Counters,
    /// What opening had to read around.
    pub warnings: Vec<String>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// As of when somebody looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum When {
    /// Everything appended, durable or not: for who judges under the tail lock.
    Appended,
    /// What is durable now.
    Visible,
    /// What was durable at an lsn that a snapshot pins.
    At(Lsn),
}

/// What stands at a fence, and where.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FenceView {
    pub state: FenceState,
    /// The op found under the fence's own name: what the next one links to.
    pub at: Option<Location>,
    /// What that one counts for as a state.
    pub weight: Weight,
    /// In `Scope::Key`, the newest version of the key that the fence is.
    pub version: Option<Version>,
}

/// Under which hashes the state of a fence is found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FenceHashes {
    /// Of its name, as a fence.
    pub own: u64,
    /// In `Scope::Key`, of the key that it is; else it means nothing.
    pub key: u64,
}

impl Engine {
    /// Answers `Closed` where nothing may be read any more: the files may be somebody else's by now.
    pub fn check_readable(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// Answers `Poisoned` or `Closed` where nothing may be written any more.
    pub fn check_open(&self) -> Result<()> {
        self.check_readable()?;
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        match self.cause.get() {
            Some(cause) => Err(Error::Poisoned { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Upholds D5: from here on nothing is acknowledged.
    pub fn poison(&self, cause: std::io::Error) {
        self.cause.get_or_init(|| {
            events::poisoned(&self.dir, &cause);
            Cause::from(cause)
        });
        self.fail_waiting();
        self.bell.nudge();
    }

    /// Nobody who waits for a commit waits any longer; the tasks among them are overdue.
    pub fn fail_waiting(&self) {
        // With the lock held: who has come second and locks it behind this finds what the first has found.
        let mut overdue = self.overdue.lock();
        overdue.extend(Some(self.progress.poison()).filter(|due| !due.is_empty()));
        drop(overdue);
        self.doorbell.ring();
    }

    /// Has these tasks woken by the committer thread: wakers are foreign code, and the caller holds a lock.
    pub fn wake_later(&self, due: Due) {
        if !due.is_empty() {
            self.overdue.lock().push(due);
            self.doorbell.ring();
        }
    }

    /// Wakes those. By whoever holds no lock.
    pub fn wake_overdue(&self) {
        let due = std::mem::take(&mut *self.overdue.lock());
        drop(due);
    }

    pub fn keyspace_by_id(&self, id: KeyspaceId) -> Option<Arc<KeyspaceState>> {
        self.keyspaces.read().iter().find(|keyspace| keyspace.id == id).cloned()
    }

    pub fn keyspace_by_name(&self, name: &str) -> Option<Arc<KeyspaceState>> {
        self.keyspaces.read().iter().find(|keyspace| keyspace.name == name).cloned()
    }
}

/// A panic in the middle of an append or a commit must not leave the others waiting for ever, nor let
/// anything rest on what is half done.
pub(crate) struct PoisonOnPanic<'e> {
    engine: &'e Engine,
    /// A write made while its thread unwinds from a panic of the user's is a write like any other.
    before: bool,
}

impl<'e> PoisonOnPanic<'e> {
    pub fn new(engine: &'e Engine) -> Self {
        PoisonOnPanic { engine, before: std::thread::panicking() }
    }
}

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.before {
            self.engine.poison(std::io::Error::other("the store panicked"));
        }
    }
}

impl Tail {
    /// The lsn of the newest frame.
    pub fn last(&self) -> Lsn {
        Lsn::new(self.next.get() - 1)
    }

    /// The group that makes `lsn` durable: the one being gathered, or the one on its way.
    pub fn group_of(&self, lsn: Lsn) -> u32 {
        if lsn >= self.group_start { self.group } else { self.group.wrapping_sub(1) }
    }
}
