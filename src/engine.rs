//! The store in memory: what is appended, what is durable, and how a name is found in the log.
//!
//! One job: hold the state that the verbs (`commit`, `recover`, `grant`) work on, and answer "what is
//! the newest version of this name at or below that lsn?".
//!
//! Lock order: the compactor → what leaves the list (`Pool::retiring`) → commit lock → list of the pool →
//! tail lock → a waiter → spares, lease table, queues, watches, key sets, snapshots.
//! The tail lock is never held across a write or a sync. Readers take none of them.
//!
//! Read next: `commit.rs`.

use crate::error::{Cause, Error, Result};
use crate::events;
use crate::fence::{FenceState, Floor, is_fenced, last_op, mark};
use crate::format::header::{End, Listed};
use crate::format::op::Head;
use crate::group_commit::{Doorbell, Progress};
use crate::index::{Slots, SlotsWriter, name_hash};
use crate::lease::Bell;
use crate::lease_table::LeaseTable;
use crate::log::image::{Appender, Image, Images};
use crate::log::pool::Pool;
use crate::log::scan::Table;
use crate::log::segment::{Glance, OpRef, Segment, Segments};
use crate::log::usage::{Usage, Weight};
use crate::op::{Class, Kind};
use crate::options::{Options, Scope};
use crate::snapshot::Snapshots;
pub(crate) use crate::space::KeyspaceState;
use crate::space::{Afterlife, Compactor, Indexed};
use crate::stats::Counters;
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, RwLock};
use crate::types::{Excerpt, KeyspaceId, Location, Lsn, Token};
use crate::waiters::Waiters;
use crate::watches::Watches;
use crossbeam_epoch::Guard;
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
    /// Where each change came to lie, what it counts for; and what its fence linked to, if it carries the
    /// state.
    pub places: Vec<(Location, Weight, Option<Option<Location>>)>,
}

/// The newest version of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Version {
    pub at: Location,
    pub is_put: bool,
    pub weight: Weight,
}

impl Version {
    pub fn of(op: &OpRef<'_>) -> Self {
        Version { at: op.at, is_put: op.head.kind == Kind::Put, weight: Weight::of(&op.head) }
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
    pub fence: Box<[u8]>,
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
    pub keyspaces: RwLock<Vec<Arc<KeyspaceState>>>,
    pub progress: Progress,
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

impl Engine {
    pub fn hash(&self, keyspace: &KeyspaceState, class: Class, name: &[u8]) -> u64 {
        name_hash(self.seed, keyspace.id.0, class as u8, name)
    }

    /// The newest op under a name, durable or not.
    pub fn newest<'g>(
        &self,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        hash: u64,
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>> {
        self.find_newest(hash, guard, |segment, offset| {
            let found = segment.op(offset)?;
            Ok(is_named(&found, keyspace, class, name).then_some(found))
        })
    }

    /// A little of the newest op under a name, durable or not.
    fn glance(
        &self,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        hash: u64,
        guard: &Guard,
    ) -> Result<Option<Glance>> {
        self.find_newest(hash, guard, |segment, offset| {
            segment.glance(offset, |head, key| is_head_named(head, key, keyspace, class, name))
        })
    }

    #[inline(always)]
    fn find_newest<'g, T>(
        &self,
        hash: u64,
        guard: &'g Guard,
        probe: impl Fn(&'g Segment, u32) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        loop {
            let mut is_gone = false;
            let found = self.slots.find(hash, guard, |place| -> Result<_> {
                let Some(segment) = self.segments.get(place.segment, guard) else {
                    is_gone = true;
                    return Ok(None);
                };
                probe(segment, place.offset)
            })?;
            // Between the look at the slot and the look at the segment the op was carried elsewhere and its
            // segment retired: the slot names the new place by now.
            if found.is_some() || !is_gone {
                return Ok(found);
            }
        }
    }

    /// Follows links back until an op is old enough.
    fn back_to<'g>(
        &self,
        mut found: Option<OpRef<'g>>,
        when: When,
        link: impl Fn(&OpRef<'g>) -> Option<Location>,
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>> {
        let lsn = match when {
            When::Appended => return Ok(found),
            When::Visible => self.progress.durable(),
            When::At(lsn) => lsn,
        };
        while let Some(op) = &found
            && op.lsn > lsn
        {
            let Some(at) = link(op) else { return Ok(None) };
            let before = self.segments.op(at, guard)?;
            // A segment goes only when what came after its ops is visible: then that is the answer. A
            // snapshot keeps the segments that it needs.
            if before.is_none() && when == When::Visible && op.lsn <= self.progress.durable() {
                return Ok(found);
            }
            found = before;
        }
        Ok(found)
    }

    /// The version of a key: a put, a delete, or nothing. Upholds S1.
    pub fn version<'g>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        hash: u64,
        when: When,
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>> {
        let newest = self.newest(keyspace, Class::Key, key, hash, guard)?;
        self.back_to(newest, when, |op| op.head.previous(), guard)
    }

    /// What stands at a fence.
    ///
    /// In `Scope::Key` the versions of the key carry the state of its fence too, so a fence costs
    /// nothing beside its key; whichever op is newer has it.
    pub fn fence(
        &self,
        keyspace: &KeyspaceState,
        name: &[u8],
        hash: u64,
        when: When,
        guard: &Guard,
    ) -> Result<FenceView> {
        let newest = if keyspace.names_fences() {
            self.newest(keyspace, Class::Fence, name, hash, guard)?
        } else {
            None
        };
        let at = newest.as_ref().map(|op| op.at);
        let weight = newest.as_ref().map_or(Weight::default(), |op| Weight::as_state(&op.head));
        let own = self.back_to(newest, when, |op| op.head.fence().flatten(), guard)?;
        let mut view = FenceView {
            state: own.as_ref().map_or(FenceState::default(), state_of),
            at,
            weight,
            version: None,
        };
        if keyspace.options.scope == Scope::Key {
            let key_hash = self.hash(keyspace, Class::Key, name);
            if let Some(version) = self.version(keyspace, name, key_hash, when, guard)? {
                view.version = Some(Version::of(&version));
                if version.lsn > view.state.lsn {
                    view.state = state_of(&version);
                }
            }
        }
        let floor = match when {
            When::Appended => keyspace.floor_appended(),
            _ => keyspace.floor_durable(),
        };
        // It may be older than one that is forgotten: who believed it would take that for never done.
        if view.state.mark <= floor.folded {
            view.state = FenceState::default();
        }
        Ok(view)
    }

    /// A little of the op that carries the newest state of a fence, found as [`Engine::fence`] does.
    fn glance_at_fence(
        &self,
        keyspace: &KeyspaceState,
        name: &[u8],
        hash: u64,
        guard: &Guard,
    ) -> Result<Glance> {
        let mut seen = Glance::default();
        if keyspace.names_fences() {
            seen = self.glance(keyspace, Class::Fence, name, hash, guard)?.unwrap_or_default();
        }
        if keyspace.options.scope == Scope::Key {
            let key_hash = self.hash(keyspace, Class::Key, name);
            let version = self.glance(keyspace, Class::Key, name, key_hash, guard)?;
            seen = version.filter(|version| version.lsn > seen.lsn).unwrap_or(seen);
        }
        Ok(seen)
    }

    /// The refusal that needs no lock: the durable mark alone is above the token.
    ///
    /// The own mark is read before the floor: folding raises the floor before it drops own marks.
    pub fn check_early(&self, keyspace: &KeyspaceState, fence: &[u8], hash: u64, token: Token) -> Result<()> {
        let guard = crossbeam_epoch::pin();
        let durable = self.progress.durable();
        let seen = self.glance_at_fence(keyspace, fence, hash, &guard)?;
        if !is_fenced(token, seen.token, keyspace.floor_appended()) {
            return Ok(());
        }
        let state = if seen.lsn > durable || seen.is_numbered {
            self.fence(keyspace, fence, hash, When::Visible, &guard)?.state
        } else {
            FenceState { mark: seen.token, lsn: seen.lsn, ..FenceState::default() }
        };
        let floor = keyspace.floor_durable();
        if is_fenced(token, state.mark, floor) {
            self.counters.fenced.fetch_add(1, Ordering::Relaxed);
            return Err(fenced(token, fence, &state, floor));
        }
        Ok(())
    }

    /// Answers `Poisoned` or `Closed` where nothing may be written any more.
    pub fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
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
        drop(self.progress.poison());
        self.bell.nudge();
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

/// The state that an op leaves its fence in.
pub(crate) fn state_of(op: &OpRef<'_>) -> FenceState {
    let links = op.head.links(&op.bytes);
    FenceState { mark: op.head.token, lsn: op.lsn, last: links.last, predecessor: links.predecessor }
}

/// Whether an op stands under a name: as a version of a key, or as the state of a fence.
pub(crate) fn is_named(found: &OpRef<'_>, keyspace: &KeyspaceState, class: Class, name: &[u8]) -> bool {
    is_head_named(&found.head, found.key(), keyspace, class, name)
}

#[inline]
fn is_head_named(head: &Head, key: &[u8], keyspace: &KeyspaceState, class: Class, name: &[u8]) -> bool {
    if head.keyspace != keyspace.id {
        return false;
    }
    match (class, head.kind) {
        (Class::Key, kind) => kind.is_value() && key == name,
        (Class::Fence, Kind::Grant | Kind::Mark) => key == name,
        (Class::Fence, kind) => kind.is_value() && head.fence().is_some() && keyspace.fence_of(key) == name,
    }
}

/// The refusal, with what the loser wants to know.
pub(crate) fn fenced(token: Token, fence: &[u8], own: &FenceState, floor: Floor) -> Error {
    Error::Fenced {
        token,
        mark: mark(own.mark, floor),
        fence: Excerpt::new(fence),
        last_op: last_op(token, own, floor),
    }
}
