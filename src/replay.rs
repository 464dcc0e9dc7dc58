//! The ops of the log, applied one by one to an empty state.
//!
//! One job: from what recovery found whole to the index, the marks, the floors, the counter. Decides
//! nothing: what is in the log was admitted once. It checks one thing again, on another road: marks rise
//! along the log (F2); a log in which one falls is damaged.
//!
//! Read next: `engine.rs`, which takes the state over.

use crate::commit::sealed_form;
use crate::engine::KeyspaceState;
use crate::error::{Error, Result};
use crate::fence::Floor;
use crate::format::header::{End, Seal, StoreBlock};
use crate::format::index::{IndexHead, IndexedKeyspace, IndexedSegment};
use crate::format::name;
use crate::grace::Recorded;
use crate::index::{Slots, SlotsWriter, name_hash, slots};
use crate::log::segment::{OpRef, Segment, Segments};
use crate::log::usage::{Usage, Used, Weight};
use crate::look_up::is_named;
use crate::op::{Class, GrantValue, KeyspaceValue, Kind, check_keyspace_name};
use crate::options::{ReadMode, Scope, Tokens};
use crate::read_ahead::{Batch, Loaded, Read};
use crate::sync::Arc;
use crate::types::{KeyspaceId, Location, Lsn, SegmentId};
use crossbeam_epoch::Guard;
use std::collections::BTreeMap;

/// The state so far.
pub(crate) struct Replay {
    pub seed: u64,
    pub slots: Arc<Slots>,
    pub writer: SlotsWriter,
    pub segments: Segments,
    pub keyspaces: Vec<Arc<KeyspaceState>>,
    /// Others that there are, where only a part of the log is replayed: the op that creates one of them may have been
    /// carried behind that part.
    pub known: Vec<Arc<KeyspaceState>>,
    /// Segments that follow a lower lsn than this are in the index file that this began with.
    pub covers: Lsn,
    /// Leases that nobody has released, as far as the log goes.
    pub recorded: Recorded,
    pub usage: Usage,
    counter: u64,
    forms: Vec<(Arc<Segment>, u32)>,
    /// The op that last said whether a keyspace needs a floor.
    floor_asked: BTreeMap<KeyspaceId, Lsn>,
}

impl Replay {
    pub fn new(block: &StoreBlock) -> Self {
        let (slots, writer) = slots();
        Replay {
            seed: seed_of(&block.store_id),
            slots,
            writer,
            segments: Segments::new(),
            keyspaces: Vec::new(),
            known: Vec::new(),
            covers: Lsn::ZERO,
            recorded: Recorded::new(block.incarnation),
            usage: Usage::default(),
            counter: 0,
            forms: Vec::new(),
            floor_asked: BTreeMap::new(),
        }
    }

    /// The state that an index file holds. Of the segments in it only those count that `is_there`: the ops of the
    /// others were carried behind it, or are needed no more.
    pub fn on(
        block: &StoreBlock,
        head: IndexHead,
        (slots, writer): (Arc<Slots>, SlotsWriter),
        is_there: impl Fn(SegmentId) -> bool,
    ) -> Self {
        let mut replay =
            Replay { slots, writer, covers: head.bound.lsn, counter: head.counter, ..Replay::new(block) };
        for keyspace in head.keyspaces {
            let IndexedKeyspace { id, name, value, floors: [raised, folded], highest, .. } = keyspace;
            let state = KeyspaceState::new(id, name, value.options, value.needs_floor);
            for (floor, lsn) in
                [(Floor { raised: raised.0, folded: 0 }, raised.1), (Floor::folded(folded.0), folded.1)]
            {
                state.raise_floor(floor, lsn);
                state.publish_floor(floor);
            }
            state.admitted(highest);
            if keyspace.names_fences {
                state.note_fence();
            }
            if keyspace.numbers_operations {
                state.note_numbered();
            }
            // What was carried behind the index may be older. That it needs none its floor has told, if it ever needed one.
            let told = if value.needs_floor { head.bound.lsn } else { raised.1.max(folded.1) };
            replay.floor_asked.insert(id, told);
            replay.keyspaces.push(Arc::new(state));
        }
        for grant in head.grants.iter().filter(|grant| is_there(grant.at.segment)) {
            replay.recorded.grant(grant.keyspace, &grant.fence, grant.token, grant.value, grant.at);
        }
        for segment in &head.segments {
            let id = SegmentId(segment.end.segment);
            if is_there(id) {
                let IndexedSegment { ops, filled, live, carried, keys, dead, .. } = *segment;
                replay.usage.put_back(Used { ops, filled, live, carried, keys, dead, ..Used::new(id) });
            }
        }
        replay
    }

    /// The state so far as an index file holds it, but for the tables: `segments` with their lives and ends.
    pub fn head(&self, store_id: [u8; 16], bound: End, segments: &[(u64, End)]) -> IndexHead {
        let segments = segments.iter().map(|&(life, end)| {
            let id = SegmentId(end.segment);
            let used = self.usage.get(id).copied().unwrap_or(Used::new(id));
            let Used { ops, filled, live, carried, keys, dead, .. } = used;
            IndexedSegment { life, end, ops, filled, live, carried, keys, dead }
        });
        let keyspaces = self.keyspaces.iter().map(|keyspace| IndexedKeyspace {
            id: keyspace.id,
            name: keyspace.name.clone(),
            value: KeyspaceValue { options: keyspace.options, needs_floor: keyspace.needs_floor() },
            floors: keyspace.floors(),
            highest: keyspace.highest(),
            names_fences: keyspace.names_fences(),
            numbers_operations: keyspace.numbers_operations(),
        });
        IndexHead {
            store_id,
            bound,
            counter: self.counter,
            segments: segments.collect(),
            keyspaces: keyspaces.collect(),
            grants: self.recorded.iter().collect(),
            tables: Vec::new(),
        }
    }

    /// A segment that the index file covers: nothing of it is replayed, but links lead into it. It gets the form
    /// that readers use at once, unless it `is_to_be_cut`.
    pub fn keep(&mut self, segment: Segment, seal: Seal, is_to_be_cut: bool, mode: ReadMode) -> Result<()> {
        self.counter = self.counter.max(seal.counter);
        if is_to_be_cut {
            let segment = Arc::new(segment);
            self.segments.set(segment.clone());
            self.forms.push((segment, seal.end.offset));
            return Ok(());
        }
        self.set_form(&segment, seal.end.offset, mode)
    }

    /// The same for a segment in the form that it has elsewhere.
    pub fn share(&mut self, segment: Arc<Segment>) {
        self.segments.set(segment);
    }

    fn set_form(&self, segment: &Segment, end: u32, mode: ReadMode) -> Result<()> {
        let form = sealed_form(segment, end, mode)
            .map_err(|e| Error::io(format!("mapping {}", name::segment(segment.id)), e))?;
        self.segments.set(Arc::new(form));
        Ok(())
    }

    /// The highest token granted, and none admitted from this store's leases is above it.
    pub fn counter(&self) -> u64 {
        self.counter
    }

    /// Creates the keyspaces that a segment lists, before the ops of any segment are replayed: compaction may
    /// have carried the op that creates one behind ops that need it.
    pub fn keyspaces(&mut self, loaded: &Loaded) -> Result<()> {
        if loaded.table.keyspaces() == 0 {
            return Ok(());
        }
        for offset in loaded.offsets() {
            let offset = offset?;
            let op = loaded.segment.op(offset)?;
            if op.head.kind == Kind::Keyspace {
                self.keyspace(&op).map_err(|wrong| wrong.or(&loaded.segment, offset))?;
            }
        }
        Ok(())
    }

    /// A segment whose ops come next.
    pub fn begin(&mut self, loaded: &Loaded) {
        self.counter = self.counter.max(loaded.counter);
        self.segments.set(loaded.segment.clone());
        self.forms.push((loaded.segment.clone(), loaded.end.offset));
        self.usage.begin(loaded.segment.id);
    }

    /// Replays a batch of the ops of the segment that was begun last; says how many.
    pub fn batch(&mut self, loaded: &Loaded, batch: Batch<'_>) -> Result<u64> {
        // Once a batch, so that what a growing index retires can be freed.
        let guard = crossbeam_epoch::pin();
        // The cache misses of a batch at once, instead of one after the other.
        self.slots.touch(batch.ops.iter().map(|read| read.hash), &guard);
        let bytes = batch.ops.iter().map(|read| read.op.head.len()).sum();
        self.usage.fill(loaded.segment.id, batch.ops.len() as u64, bytes);
        for Read { op, hash } in &batch.ops {
            self.apply(op, *hash, &guard).map_err(|wrong| wrong.or(&loaded.segment, op.at.offset))?;
        }
        batch.failed.map_or(Ok(batch.ops.len() as u64), Err)
    }

    /// Gives every segment the form that readers use. The keys are put in order when somebody asks for them.
    pub fn settle(&mut self, mode: ReadMode) -> Result<()> {
        self.keyspaces.iter().for_each(|keyspace| keyspace.keys.postpone());
        for (segment, end) in std::mem::take(&mut self.forms) {
            self.set_form(&segment, end, mode)?;
        }
        Ok(())
    }

    fn apply(&mut self, op: &OpRef<'_>, hash: u64, guard: &Guard) -> Result<(), Wrong> {
        if !matches!(op.head.kind, Kind::Put | Kind::Delete | Kind::Mark) {
            // Whatever a name leads to.
            self.usage.add(op.at, Weight::of(&op.head));
        }
        if op.head.kind == Kind::Keyspace {
            return self.keyspace(op);
        }
        if op.head.kind == Kind::Counter {
            self.counter = self.counter.max(op.head.token);
            return Ok(());
        }
        let keyspace = self
            .keyspace_of(op.head.keyspace)
            .ok_or(Wrong::What("an op of a keyspace that was never created"))?;
        let value = op.value();
        if op.head.is_numbered() {
            keyspace.note_numbered();
        }
        if op.head.kind != Kind::Release {
            keyspace.admitted(op.head.token);
            if keyspace.options.tokens == Tokens::Store {
                self.counter = self.counter.max(op.head.token);
            }
        }
        match op.head.kind {
            Kind::Put | Kind::Delete => return self.version(op, hash, &keyspace, guard),
            Kind::Grant => {
                let value = GrantValue::decode(value).ok_or(Wrong::What("a grant without an owner"))?;
                self.fence(op, &keyspace, op.key(), hash, guard)?;
                self.recorded.grant(keyspace.id, op.key(), op.head.token, value, op.at);
            }
            Kind::Mark => self.fence(op, &keyspace, op.key(), hash, guard)?,
            Kind::Floor => {
                let floor = Floor::of(op.head.token, value);
                keyspace.raise_floor(floor, op.lsn);
                keyspace.publish_floor(floor);
                self.set_needs_floor(&keyspace, false, op.lsn);
            }
            // Leases end with the incarnation that granted them.
            Kind::Release => self.recorded.release(keyspace.id, op.key(), op.head.token),
            Kind::Keyspace | Kind::Counter => {}
        }
        Ok(())
    }

    fn keyspace_of(&mut self, id: KeyspaceId) -> Option<Arc<KeyspaceState>> {
        let at = self.keyspaces.binary_search_by_key(&id, |keyspace| keyspace.id).or_else(|at| {
            let known = self.known.iter().find(|keyspace| keyspace.id == id).ok_or(())?;
            let state = KeyspaceState::new(id, known.name.clone(), known.options, false);
            self.keyspaces.insert(at, Arc::new(state));
            Ok::<_, ()>(at)
        });
        Some(self.keyspaces[at.ok()?].clone())
    }

    fn keyspace(&mut self, op: &OpRef<'_>) -> Result<(), Wrong> {
        let value =
            KeyspaceValue::decode(op.value()).ok_or(Wrong::What("a keyspace with unknown options"))?;
        let name = std::str::from_utf8(op.key()).ok().filter(|name| check_keyspace_name(name).is_ok());
        let name = name.ok_or(Wrong::What("a keyspace with an impossible name"))?;
        let id = op.head.keyspace;
        let keyspace = match self.keyspaces.binary_search_by_key(&id, |keyspace| keyspace.id) {
            Ok(at) => self.keyspaces[at].clone(),
            Err(at) => {
                let state = KeyspaceState::new(id, name.to_owned(), value.options, value.needs_floor);
                self.keyspaces.insert(at, Arc::new(state));
                self.keyspaces[at].clone()
            }
        };
        if keyspace.name != name || keyspace.options != value.options {
            return Err(Wrong::What("a keyspace created twice, with other options"));
        }
        self.set_needs_floor(&keyspace, value.needs_floor, op.lsn);
        Ok(())
    }

    /// Whether a keyspace needs a floor is told by the newest op that says so, wherever it lies.
    fn set_needs_floor(&mut self, keyspace: &KeyspaceState, needs_floor: bool, lsn: Lsn) {
        let told = self.floor_asked.entry(keyspace.id).or_default();
        if *told <= lsn {
            *told = lsn;
            keyspace.set_needs_floor(needs_floor);
        }
    }

    /// A version of a key: found under the key, and where it changed its fence, under that too.
    fn version(
        &mut self,
        op: &OpRef<'_>,
        hash: u64,
        keyspace: &KeyspaceState,
        guard: &Guard,
    ) -> Result<(), Wrong> {
        let key = op.key();
        match self.enter(op, keyspace, (Class::Key, key, hash), op.head.previous(), guard)? {
            Entered::Newest(before) => {
                if keyspace.options.scope == Scope::Key {
                    check_rise(op.head.token, before.as_ref())?;
                }
                self.usage.add(op.at, Weight::of(&op.head));
                if let Some(before) = before {
                    self.usage.remove(before.at, before.weight);
                    self.usage.bury(before.at);
                }
            }
            Entered::Superseded => self.usage.bury(op.at),
        }
        if op.head.fence().is_some() {
            let fence = keyspace.fence_of(key);
            let hash = name_hash(self.seed, keyspace.id.0, Class::Fence as u8, fence);
            self.fence(op, keyspace, fence, hash, guard)?;
        }
        Ok(())
    }

    fn fence(
        &mut self,
        op: &OpRef<'_>,
        keyspace: &KeyspaceState,
        name: &[u8],
        hash: u64,
        guard: &Guard,
    ) -> Result<(), Wrong> {
        let Some(link) = op.head.fence() else { return Err(Wrong::What("a fence op without its link")) };
        keyspace.note_fence();
        if let Entered::Newest(before) = self.enter(op, keyspace, (Class::Fence, name, hash), link, guard)? {
            check_rise(op.head.token, before.as_ref())?;
            self.usage.add(op.at, Weight::as_state(&op.head));
            if let Some(before) = before {
                self.usage.remove(before.at, before.state_weight);
            }
        }
        Ok(())
    }

    /// Points a name at `op`, unless a newer op stands there: the newest lsn wins, never the newest place.
    fn enter(
        &mut self,
        op: &OpRef<'_>,
        keyspace: &KeyspaceState,
        (class, name, hash): (Class, &[u8], u64),
        link: Option<Location>,
        guard: &Guard,
    ) -> Result<Entered, Wrong> {
        let place = Segments::place(op.at);
        // What was carried names what stood there when it was first written.
        let link = link.filter(|_| !op.head.is_moved());
        let linked = match link {
            Some(at) => self.segments.op(at, guard).map_err(Wrong::Error)?,
            None => None,
        };
        if let Some(found) = &linked {
            if !is_named(found, keyspace, class, name) || found.lsn > op.lsn {
                return Err(Wrong::What("a link to an op of another name"));
            }
            if self.writer.replace(hash, Segments::place(found.at), place) {
                return Ok(Entered::Newest(Some(Before::of(found))));
            }
        }
        // The op before may have been carried elsewhere, or have gone with its segment.
        let found = self.slots.find(hash, guard, |place| {
            let Some(segment) = self.segments.get(place.segment, guard) else { return Ok(None) };
            let found = segment.op(place.offset)?;
            Ok(is_named(&found, keyspace, class, name).then(|| (found.lsn, Before::of(&found))))
        });
        match found.map_err(Wrong::Error)? {
            Some((lsn, _)) if lsn > op.lsn => Ok(Entered::Superseded),
            Some((_, before)) => {
                self.writer.replace(hash, Segments::place(before.at), place);
                Ok(Entered::Newest(Some(before)))
            }
            None => {
                self.writer.insert(hash, place);
                Ok(Entered::Newest(None))
            }
        }
    }
}

/// What became of an op that was entered under a name.
enum Entered {
    /// It is the newest one, in place of another.
    Newest(Option<Before>),
    Superseded,
}

/// The op that stood under a name before.
struct Before {
    at: Location,
    mark: u64,
    weight: Weight,
    state_weight: Weight,
}

impl Before {
    fn of(op: &OpRef<'_>) -> Self {
        Before {
            at: op.at,
            mark: op.head.token,
            weight: Weight::of(&op.head),
            state_weight: Weight::as_state(&op.head),
        }
    }
}

/// Marks rise along the log. Upholds F2, on a second road.
fn check_rise(token: u64, before: Option<&Before>) -> Result<(), Wrong> {
    match before {
        Some(before) if before.mark > token => Err(Wrong::What("a mark falls along the log")),
        _ => Ok(()),
    }
}

/// The seed of a store's hashes.
pub(crate) fn seed_of(store_id: &[u8; 16]) -> u64 {
    let (low, high) = store_id.split_at(8);
    let half = |bytes: &[u8]| bytes.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    half(low) ^ half(high).rotate_left(32)
}

/// What is wrong with an op.
enum Wrong {
    What(&'static str),
    Error(Error),
}

impl Wrong {
    fn or(self, segment: &Segment, offset: u32) -> Error {
        match self {
            Wrong::What(what) => segment.corrupt(offset, what),
            Wrong::Error(error) => error,
        }
    }
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Replay")
    }
}
