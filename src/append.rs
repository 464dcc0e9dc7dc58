//! What an admitted write does to the log in memory, under the tail lock.
//!
//! One job: ops → one frame behind the last one, marks raised, index pointed at it. What is appended is
//! above `visible`: nobody sees it yet (D3). Nothing here fails: space was reserved before.
//!
//! Read next: `commit.rs`, which puts it on the disk.

use crate::admit::{Change, ChangeKind, Fence, Write};
use crate::engine::{
    Active, Engine, FenceView, Filled, KeyspaceState, Released, StateMove, Tail, Version, Work,
};
use crate::error::{Error, Result};
use crate::fence::{self, FenceState};
use crate::format::frame::{BodySum, FRAME_HEADER_BYTES};
use crate::format::header::SEAL_BYTES;
use crate::format::op::{self, MAX_OVERHEAD, NUMBERED_OVERHEAD, Site, varint_len};
use crate::format::salt::Salt;
use crate::format::{FRAME_ALIGN, HEADER_BYTES};
use crate::index::share_a_tag;
use crate::lease::FenceId;
use crate::log::guard::Pins;
use crate::log::image::{Appender, Image};
use crate::log::pool::{Need, Spare};
use crate::log::scan::Table;
use crate::log::segment::{Body, Segment, Segments};
use crate::log::usage::{Usage, Weight};
use crate::look_up::SIDE_BY_SIDE;
use crate::op::{Class, Kind, Links, Op};
use crate::options::{MAX_SEGMENT_BYTES, Scope, Tokens};
use crate::sync::{Arc, Ordering};
use crate::types::{Location, Lsn, MAX_BATCH_BYTES, SegmentId};
use crossbeam_epoch::Guard;

/// The room that a frame needs in a segment: itself, its share of the key table, and the seal.
pub(crate) fn room(frame_bytes: usize, ops: usize) -> u32 {
    ends(frame_bytes + ops * Table::ENTRY_BYTES as usize)
}

/// With what stands around a frame and its share of the key table.
fn ends(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX).saturating_add(SEAL_BYTES as u32 + 2 * FRAME_ALIGN)
}

/// The most bytes that `ops` with so many bytes of keys and values take as a frame.
pub(crate) fn frame_bytes(ops: usize, payload: usize) -> usize {
    FRAME_HEADER_BYTES + ops * MAX_OVERHEAD + payload
}

impl Write<'_> {
    /// The room that it needs in a segment, as long as no operation was ever numbered. What is asked for is lost at
    /// the end of a segment that it does not fit, so it is not much more than what will be written.
    pub fn plain_room(&self) -> u32 {
        let (mut frame, mut table) = (FRAME_HEADER_BYTES, Table::ENTRY_BYTES as usize);
        for change in self.changes {
            let sets_fence = change.kind == ChangeKind::Raise || change.keyspace.options.scope != Scope::Key;
            let token = self.fences[change.fence].token.get();
            let (key, value) = (change.key.len(), change.value.len());
            let op = op::most_bytes(change.keyspace.id, token, key, value, sets_fence);
            frame += op;
            // An entry is how far it is from one op to the next.
            table += varint_len(op as u64);
            if self.is_apart(change) {
                let name = self.fences[change.fence].name.len();
                let mark = op::most_bytes(change.keyspace.id, token, name, 0, true) + NUMBERED_OVERHEAD;
                frame += mark;
                table += varint_len(mark as u64);
            }
        }
        ends(frame + table)
    }

    /// Whether the state of the fence needs an op of its own beside this change: one that stood under two names of one
    /// tag could be taken for the other in the index, and a mark be lost there.
    pub fn is_apart(&self, change: &Change<'_>) -> bool {
        change.kind != ChangeKind::Raise
            && change.keyspace.options.scope != Scope::Key
            && share_a_tag(change.hash, self.fences[change.fence].hashes.own)
    }

    /// More than the `plain` room where operations are numbered: that may be so only when it is appended, and it has
    /// to be asked again.
    pub fn room(&self, plain: u32) -> u32 {
        let numbers = |fence: &Fence<'_>| fence.keyspace.numbers_operations();
        let is_numbered = self.operation.is_some() || self.fences.iter().any(numbers);
        // An entry of the key table may be longer too.
        let more = if is_numbered { self.changes.len() * (NUMBERED_OVERHEAD + 1) } else { 0 };
        plain.saturating_add(more as u32)
    }
}

/// What a batch of `ops` takes of a segment at most: its frame and its share of the key table.
pub(crate) fn batch_bytes(ops: usize, payload: usize) -> usize {
    frame_bytes(ops, payload) + ops * Table::ENTRY_BYTES as usize
}

/// The largest batch fits the largest segment, so no place in a segment is beyond what the index can name.
const _: () = assert!(
    MAX_BATCH_BYTES + (HEADER_BYTES + SEAL_BYTES as u32 + 2 * FRAME_ALIGN) as usize
        <= MAX_SEGMENT_BYTES as usize
);

/// A frame being put together behind the last one.
pub(crate) struct Frame<'t> {
    scratch: &'t mut Vec<u8>,
    table: &'t mut Table,
    salt: Salt,
    segment: SegmentId,
    offset: u32,
    lsn: Lsn,
    sum: BodySum,
    usage: &'t mut Usage,
}

impl<'t> Frame<'t> {
    pub fn begin(tail: &'t mut Tail) -> Self {
        let Tail { active, scratch, usage, next: lsn, .. } = tail;
        let active = active.as_mut().expect("reserved before");
        scratch.clear();
        scratch.resize(FRAME_HEADER_BYTES, 0);
        Frame {
            scratch,
            salt: active.segment.salt,
            segment: active.segment.id,
            offset: active.appender.end(),
            table: &mut active.table,
            lsn: *lsn,
            sum: BodySum::default(),
            usage,
        }
    }

    pub fn push(&mut self, op: &Op<'_>, value_checksum: Option<u32>) -> (Location, Weight) {
        let before = self.scratch.len() as u32;
        let offset = self.offset + before;
        let site = Site { salt: self.salt, segment: self.segment, offset, frame: self.offset, lsn: self.lsn };
        let checksum = op::encode(op, &site, value_checksum, self.scratch);
        self.sum.add(checksum);
        self.table.push(offset, op.kind);
        let bytes = self.scratch.len() as u32 - before;
        let weight = Weight::new(op.kind, op.links.moved.is_some(), bytes);
        self.usage.fill(self.segment, 1, bytes);
        (Location { segment: self.segment, offset }, weight)
    }

    /// Fills in what is known now; the rest of the header is the committer's.
    pub fn finish(self) {
        let body = (self.scratch.len() - FRAME_HEADER_BYTES) as u32;
        self.scratch[4..8].copy_from_slice(&body.to_le_bytes());
        self.scratch[8..16].copy_from_slice(&self.lsn.get().to_le_bytes());
        self.scratch[24..28].copy_from_slice(&self.sum.finish().to_le_bytes());
        let aligned = self.scratch.len().next_multiple_of(FRAME_ALIGN as usize);
        self.scratch.resize(aligned, 0);
    }
}

impl Engine {
    /// Sees to it that a frame fits behind the last one, taking a spare where the active segment is
    /// full. `false`: there is no spare for this need; the caller makes one, without the lock.
    ///
    /// # Errors
    /// There is no memory for a segment's image.
    pub fn reserve(&self, tail: &mut Tail, room: u32, need: Need) -> Result<bool> {
        if tail.active.as_ref().is_some_and(|active| active.fits(room)) {
            return Ok(true);
        }
        let Some(spare) = self.pool.take(HEADER_BYTES + room, need) else { return Ok(false) };
        if self.pool.is_low() {
            self.pool_bell.ring();
        }
        let (image, appender) = match self.images.take(spare.listed.bytes, HEADER_BYTES) {
            Ok(made) => made,
            Err(e) => {
                self.pool.give_back(spare);
                return Err(Error::io("asking for the memory of a segment", e));
            }
        };
        self.retire_active(tail);
        tail.usage.begin(spare.listed.segment);
        tail.active = Some(self.activate(spare, image, appender, tail.counter));
        Ok(true)
    }

    /// The active segment makes way: the committer will seal it. One that was taken for a write which was
    /// then refused holds no frame, and a seal without one would prove nothing: it is a spare again.
    pub fn retire_active(&self, tail: &mut Tail) {
        let Some(active) = tail.active.take() else { return };
        if active.frames == 0 {
            let file = active.segment.file.clone();
            tail.usage.forget(active.segment.id);
            return self.pool.give_back(Spare { listed: active.listed, file });
        }
        tail.filled.push_back(Filled {
            end: active.appender.end(),
            segment: active.segment,
            image: active.image,
            listed: active.listed,
            counter_before: active.counter,
            counter: tail.counter,
            table: active.table,
            frames: active.frames,
            last: Lsn::new(tail.next.get() - 1),
            short: false,
        });
    }

    fn activate(&self, spare: Spare, image: Arc<Image>, appender: Appender, counter: u64) -> Active {
        let Spare { listed, file } = spare;
        let segment = Arc::new(Segment {
            id: listed.segment,
            salt: Salt::new(&self.store_id, listed.segment, listed.life),
            file,
            body: Body::Image(image.clone()),
            pins: Pins::new(),
        });
        self.segments.set(segment.clone());
        Active { segment, image, appender, listed, counter, table: Table::default(), frames: 0 }
    }

    /// Appends an admitted write as one frame. Upholds F2 and D2.
    pub fn append_write(
        &self,
        tail: &mut Tail,
        work: &mut Work,
        write: &Write<'_>,
        guard: &Guard,
    ) -> Result<Lsn> {
        // Everything that can fail is looked up first.
        self.find_versions(work, write, guard)?;
        let lsn = tail.next;
        if write.operation.is_some() {
            write.fences.iter().for_each(|fence| fence.keyspace.note_numbered());
        }
        work.carriers.clear();
        work.carriers.resize(write.fences.len(), None);
        work.places.clear();
        let mut frame = Frame::begin(tail);
        for (change, version) in write.changes.iter().zip(&work.versions) {
            let fence = &write.fences[change.fence];
            let view = &work.views[change.fence];
            let carrier = &mut work.carriers[change.fence];
            let state = fence::admit(&view.state, fence.token, write.operation, lsn);
            let sets = sets_fence(change, view, &state, carrier.is_some());
            let before = carrier.or(view.at);
            let (keyspace, token) = (change.keyspace.id, fence.token.get());
            let apart = (sets && write.is_apart(change)).then(|| {
                let FenceState { last, predecessor, .. } = state;
                let links = Links { fence: Some(before), last, predecessor, ..Links::default() };
                frame
                    .push(&Op { kind: Kind::Mark, keyspace, token, key: fence.name, value: b"", links }, None)
                    .0
            });
            let carries = sets && apart.is_none();
            let shows = carries || change.keyspace.options.scope == Scope::Key;
            let links = Links {
                previous: version.map(|version| version.at),
                fence: carries.then_some(before),
                last: state.last.filter(|_| shows),
                predecessor: state.predecessor.filter(|_| shows),
                moved: None,
            };
            let op =
                Op { kind: change.kind.op(), keyspace, token, key: change.key, value: change.value, links };
            let (at, weight) = frame.push(&op, change.value_checksum);
            let moved = sets.then_some(StateMove { from: before, to: apart.unwrap_or(at) });
            work.places.push((at, weight, moved));
            if let Some(moved) = moved {
                *carrier = Some(moved.to);
            }
        }
        frame.finish();
        self.close_frame(tail);
        self.point_write(tail, work, write, lsn, guard);
        Ok(lsn)
    }

    fn find_versions(&self, work: &mut Work, write: &Write<'_>, guard: &Guard) -> Result<()> {
        work.versions.clear();
        for change in write.changes {
            work.versions.push(match change.kind {
                ChangeKind::Raise => None,
                // Judging the fence has found the key already: it is the fence.
                _ if change.keyspace.options.scope == Scope::Key => work.views[change.fence].version,
                _ => self
                    .newest(change.keyspace, Class::Key, change.key, change.hash, guard)?
                    .map(|op| Version::of(&op)),
            });
        }
        Ok(())
    }

    /// Points the names at what was appended. Readers follow the links back until it is visible.
    fn point_write(&self, tail: &mut Tail, work: &Work, write: &Write<'_>, lsn: Lsn, guard: &Guard) {
        let places = write.changes.iter().zip(&work.versions).zip(&work.places);
        for (n, ((change, version), &(at, weight, moved))) in places.enumerate() {
            if n.is_multiple_of(SIDE_BY_SIDE) && write.changes.len() > 1 {
                let next = write.changes[n..].iter().take(SIDE_BY_SIDE);
                self.slots.touch(next.map(|change| change.hash), guard);
            }
            let fence = &write.fences[change.fence];
            if change.kind != ChangeKind::Raise {
                point(tail, change.hash, version.map(|version| version.at), at);
                if let Some(version) = version {
                    tail.usage.remove(version.at, version.weight);
                    if version.is_state {
                        tail.usage.bury(version.at);
                    } else {
                        tail.usage.bury_whole(version.at);
                    }
                }
                self.note_presence(tail, change, version.is_some_and(|version| version.is_put), lsn);
            }
            if let Some(StateMove { from: before, to }) = moved {
                change.keyspace.note_fence();
                point(tail, fence.hashes.own, before, to);
                let view = &work.views[change.fence];
                if let Some(before) = before.filter(|_| before == view.at) {
                    tail.usage.remove(before, view.weight);
                }
            }
            tail.usage.add(at, weight);
            change.keyspace.admitted(fence.token.get());
        }
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        // Upholds L5: a lease is over when the mark of its fence has passed its token.
        for (fence, view) in write.fences.iter().zip(&work.views) {
            // A keyspace whose tokens come from elsewhere grants none.
            let has_leases = fence.keyspace.options.tokens == Tokens::Store;
            if has_leases
                && fence.token.get() > view.state.mark
                && self.leases.end_fence_below(fence.keyspace.id, fence.name, fence.token)
            {
                // What was over before, and kept its fence for a while, reports nothing.
                self.visit_queues(&FenceId::new(fence.keyspace.id, fence.name));
            }
        }
    }

    /// Appends one op that names a fence: a grant. Upholds F4: the mark is up before anyone holds it.
    pub fn append_fence_op(
        &self,
        tail: &mut Tail,
        keyspace: &KeyspaceState,
        op: &Op<'_>,
        hash: u64,
        old: &FenceView,
    ) -> (Lsn, Location) {
        let (lsn, at, weight) = self.append_op(tail, op);
        keyspace.note_fence();
        point(tail, hash, old.at, at);
        tail.usage.add(at, weight);
        if let Some(at) = old.at {
            tail.usage.remove(at, old.weight);
        }
        keyspace.admitted(op.token);
        (lsn, at)
    }

    /// Raises the floor of a keyspace. The leases below it are the caller's to end (L5).
    pub fn append_floor(&self, tail: &mut Tail, keyspace: &Arc<KeyspaceState>, floor: fence::Floor) -> Lsn {
        let op = Op {
            kind: Kind::Floor,
            keyspace: keyspace.id,
            token: floor.mark(),
            key: b"",
            value: &[(floor.folded > 0) as u8],
            links: Links::default(),
        };
        let (lsn, ..) = self.append_op(tail, &op);
        keyspace.raise_floor(floor, lsn);
        keyspace.admitted(floor.mark());
        tail.floors.push((keyspace.clone(), floor));
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        lsn
    }

    /// Appends a frame of one op that the index does not know.
    pub fn append_op(&self, tail: &mut Tail, op: &Op<'_>) -> (Lsn, Location, Weight) {
        let lsn = tail.next;
        let mut frame = Frame::begin(tail);
        let (at, weight) = frame.push(op, None);
        frame.finish();
        self.close_frame(tail);
        (lsn, at, weight)
    }

    /// Appends the releases that wait, and (when `idle`) at least an empty frame: either carries the
    /// evidence that everything before it is durable. Does nothing when the active segment is full.
    pub fn append_idle(&self, tail: &mut Tail, idle: bool) {
        const MOST: usize = 64;
        let fits = |count, payload| {
            let room = room(frame_bytes(count, payload), count);
            tail.active.as_ref().is_some_and(|active| active.fits(room))
        };
        if !fits(0, 0) {
            return;
        }
        let mut releases: Vec<Released> = Vec::new();
        let mut payload = 0;
        while releases.len() < MOST
            && let Some(released) = self.released.pop()
        {
            if !fits(releases.len() + 1, payload + released.fence.name.len()) {
                // It rides with a later group.
                self.released.push(released);
                break;
            }
            // The grant of the next holder, which is in the log already, says that this one is over.
            if self.leases.remove_released(released.keyspace.id, &released.fence.name, released.token) {
                payload += released.fence.name.len();
                releases.push(released);
            }
        }
        if releases.is_empty() && !idle {
            return;
        }
        let mut frame = Frame::begin(tail);
        for released in &releases {
            let op = Op {
                kind: Kind::Release,
                keyspace: released.keyspace.id,
                token: released.token.get(),
                key: &released.fence.name,
                value: b"",
                links: Links::default(),
            };
            frame.push(&op, None);
        }
        frame.finish();
        self.close_frame(tail);
        tail.idle = idle;
    }

    /// The frame in `scratch` takes its place in the order.
    pub fn close_frame(&self, tail: &mut Tail) {
        let active = tail.active.as_mut().expect("a frame was begun in it");
        active.appender.append(&tail.scratch);
        active.frames += 1;
        debug_assert!(active.fits(SEAL_BYTES as u32), "what was reserved is enough");
        if tail.next == tail.group_start {
            tail.group_since = self.options.clock.now();
        }
        tail.next = tail.next.next();
        tail.idle = false;
        self.appended_bytes.fetch_add(tail.scratch.len() as u64, Ordering::Relaxed);
        self.sweep_vanished(tail);
    }

    /// The ordered set is touched only when a key appears or vanishes.
    fn note_presence(&self, tail: &mut Tail, change: &Change<'_>, was_present: bool, lsn: Lsn) {
        match change.kind {
            ChangeKind::Put if !was_present => {
                change.keyspace.keys.insert(change.key);
            }
            ChangeKind::Delete if was_present => {
                tail.vanished.push_back((lsn, change.keyspace.clone(), change.key.into()));
            }
            _ => {}
        }
    }

    /// Takes keys out of the ordered set that no reader can see any more: deleted at or below
    /// `visible` and every snapshot, and not written again since. A few at a time. Upholds S2.
    fn sweep_vanished(&self, tail: &mut Tail) {
        const AT_ONCE: usize = 4;
        for _ in 0..AT_ONCE {
            if tail.vanished.is_empty() {
                return;
            }
            let seen_by_all = self.snapshots.oldest(self.progress.durable());
            match tail.vanished.front() {
                Some((lsn, ..)) if *lsn <= seen_by_all => {}
                _ => return,
            }
            let Some((lsn, keyspace, key)) = tail.vanished.pop_front() else { return };
            let guard = crossbeam_epoch::pin();
            let hash = self.hash(&keyspace, Class::Key, &key);
            // A key that cannot be read stays: scans will then name the damage.
            if let Ok(Some(newest)) = self.newest(&keyspace, Class::Key, &key, hash, &guard)
                && newest.lsn == lsn
            {
                keyspace.keys.remove(&key);
            }
        }
    }
}

/// Whether this change carries the new state of its fence: the first one of the write, if there is a
/// new state. In `Scope::Key` every version carries it, and only raises are found under the fence.
fn sets_fence(change: &Change<'_>, view: &FenceView, state: &FenceState, carried: bool) -> bool {
    let changed = state.mark != view.state.mark || state.last != view.state.last;
    match change.kind {
        ChangeKind::Raise => true,
        _ => changed && !carried && change.keyspace.options.scope != Scope::Key,
    }
}

/// Points a name at its newest op.
fn point(tail: &mut Tail, hash: u64, old: Option<Location>, new: Location) {
    let place = Segments::place(new);
    let replaced = old.is_some_and(|old| tail.slots.replace(hash, Segments::place(old), place));
    if !replaced {
        tail.slots.insert(hash, place);
    }
}

impl Active {
    pub fn fits(&self, room: u32) -> bool {
        let used = self.appender.end() + self.table.len();
        used.saturating_add(room) <= self.appender.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admit::Require;
    use crate::batch::large_checksum;
    use crate::db::Db;
    use crate::keyspace::Keyspace;
    use crate::options::{KeyspaceOptions, Options};
    use crate::storage::{Access, File, SimDisk, Storage};
    use crate::types::{OperationId, Token};
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::{fmt, io};

    /// A change that is to be made: in which keyspace, to which key, with a value of how many bytes.
    type Wanted = (ChangeKind, usize, Vec<u8>, usize);

    /// A keyspace of each scope.
    fn spaces(db: &Db) -> Vec<Keyspace> {
        [("key", Scope::Key), ("prefix", Scope::Prefix(b'/')), ("whole", Scope::Keyspace)]
            .map(|(name, scope)| {
                db.keyspace(name, KeyspaceOptions::new().tokens(Tokens::External).scope(scope)).unwrap()
            })
            .into()
    }

    fn options(disk: impl Storage, segment_bytes: u32) -> Options {
        Options::new().storage(disk).without_threads().deterministic(1).segment_bytes(segment_bytes)
    }

    fn used(tail: &Tail) -> u32 {
        let active = tail.active.as_ref().unwrap();
        active.appender.end() + active.table.len()
    }

    /// Makes the changes as one write, as [`Engine::begin`] does: how many bytes of room were reserved for it, without
    /// the seal, and how many it took. `between` happens when the room is known.
    fn take_room(
        db: &Db,
        spaces: &[Keyspace],
        (token, operation): (u64, Option<u64>),
        wanted: &[Wanted],
        between: impl FnOnce(&Write<'_>),
    ) -> (u32, u32) {
        let engine = &db.shared.engine;
        let (mut changes, mut fences, mut known) = (Vec::new(), Vec::<Fence<'_>>::new(), BTreeSet::new());
        let values: Vec<_> = wanted.iter().map(|(.., value)| vec![7; *value]).collect();
        for ((kind, space, key, _), value) in wanted.iter().zip(&values) {
            let (keyspace, raises) = (&spaces[*space].state, *kind == ChangeKind::Raise);
            if !known.insert((keyspace.id.0, raises, key)) {
                continue;
            }
            let name = if raises { key } else { keyspace.fence_of(key) };
            let same = |fence: &Fence<'_>| fence.keyspace.id == keyspace.id && fence.name == name;
            let fence = fences.iter().position(same).unwrap_or_else(|| {
                let (hashes, token) = (engine.fence_hashes(keyspace, name), Token::new(token).unwrap());
                fences.push(Fence { keyspace, name, hashes, token, raises });
                fences.len() - 1
            });
            fences[fence].raises |= raises;
            let hash = engine.hash(keyspace, Class::Key, key);
            let value_checksum = large_checksum(value);
            changes.push(Change { kind: *kind, keyspace, key, value, hash, value_checksum, fence });
        }
        let write = Write {
            changes: &changes,
            fences: &fences,
            conditions: &[],
            operation: operation.map(OperationId::new),
            require: Require::Newest,
            seen: &[],
        };
        let (plain, mut between) = (write.plain_room(), Some(between));
        loop {
            let room = write.room(plain);
            if let Some(between) = between.take() {
                between(&write);
            }
            let appended = engine.with_room(room, Need::Ordinary, |tail| {
                if write.room(plain) > room {
                    return None;
                }
                let before = used(tail);
                let judged = engine.judge_and_append(tail, &write);
                Some((engine.answer(tail, judged), used(tail) - before))
            });
            if let Some((answer, taken)) = appended.unwrap() {
                engine.settle(answer).unwrap();
                return (room - SEAL_BYTES as u32, taken);
            }
        }
    }

    fn wanted() -> impl Strategy<Value = Wanted> {
        let kind = prop_oneof![
            4 => Just(ChangeKind::Put),
            1 => Just(ChangeKind::Delete),
            1 => Just(ChangeKind::Raise)
        ];
        let bytes = prop_oneof![0..20usize, 100..140usize, 500..530usize, 2000..2010usize];
        let padding = prop_oneof![4 => Just(0), 1 => 118..132usize, 1 => Just(400)];
        (kind, 0..3usize, 0..40u8, padding, bytes).prop_map(|(kind, space, name, padding, bytes)| {
            let mut key = vec![b'a' + name % 4, b'/', name];
            key.resize(3 + padding, b'x');
            (kind, space, key, if kind == ChangeKind::Put { bytes } else { 0 })
        })
    }

    /// What comes to a number from one write to the next.
    fn more() -> impl Strategy<Value = u64> {
        prop_oneof![4 => 0..3u64, 1 => (0..59u32).prop_map(|bits| 1 << bits)]
    }

    #[derive(Clone, Debug)]
    struct Step {
        wanted: Vec<Wanted>,
        token: u64,
        operation: u64,
        is_numbered: bool,
        is_overtaken: bool,
    }

    fn step() -> impl Strategy<Value = Step> {
        let count = prop_oneof![1..4usize, 1..80usize];
        let wanted = count.prop_flat_map(|count| prop::collection::vec(wanted(), count));
        (wanted, more(), more(), prop::bool::weighted(0.15), prop::bool::weighted(0.1)).prop_map(
            |(wanted, token, operation, is_numbered, is_overtaken)| Step {
                wanted,
                token,
                operation,
                is_numbered,
                is_overtaken,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_write_takes_more_than_was_reserved(
            segment_bytes in prop_oneof![Just(16 << 10), Just(1u32 << 20)],
            steps in prop::collection::vec(step(), 1..24),
        ) {
            let db = options(SimDisk::new(), segment_bytes).open("sim").unwrap();
            let spaces = spaces(&db);
            let (mut token, mut operation) = (1, 1);
            for step in &steps {
                token = (token + step.token).min(i64::MAX as u64);
                operation += 2 + step.operation;
                let numbers = (token, step.is_numbered.then_some(operation));
                let (room, taken) = take_room(&db, &spaces, numbers, &step.wanted, |write| {
                    if step.is_overtaken {
                        let operation = Some(OperationId::new(operation - 1));
                        let engine = &db.shared.engine;
                        engine.settle(engine.begin(&Write { operation, ..*write }).unwrap()).unwrap();
                    }
                });
                prop_assert!(taken <= room, "{} of {}: {:?}", taken, room, step);
            }
        }
    }

    /// An op that stood under both would lie in the index as one word twice. Where the two names share a line as well,
    /// the next put of the key moved the entry of the fence, and its mark was not found any more.
    #[test]
    fn a_key_and_a_fence_of_one_tag_are_never_named_by_one_op() {
        let disk = SimDisk::new();
        let open = || options(disk.clone(), 16 << 10).open("sim").unwrap();
        let db = open();
        let rows = spaces(&db).swap_remove(1);
        let engine = db.shared.engine.clone();
        let hashes = |name: &str| {
            let key = [name, "/key"].concat();
            let (name, key) = (&key.as_bytes()[..=name.len()], key.as_bytes());
            (engine.hash(&rows.state, Class::Fence, name), engine.hash(&rows.state, Class::Key, key))
        };
        // Found by trying one after the other.
        let twin = "155f8d";
        assert!(share_a_tag(hashes(twin).0, hashes(twin).1));
        let key = [twin, "/key"].concat().into_bytes();
        let others = |db: &Db| {
            let rows = spaces(db).swap_remove(1);
            for n in 0..60u8 {
                rows.put(Token::new(1).unwrap(), &[b'o', n % 3], &[n; 900]).unwrap();
            }
            db.compact().unwrap();
        };
        let check = |db: &Db, mark: u64, value: Option<&[u8]>| {
            let (engine, rows) = (&db.shared.engine, spaces(db).swap_remove(1));
            let (guard, (fence, of_key)) = (crossbeam_epoch::pin(), hashes(twin));
            let name = &key[..=twin.len()];
            let state = engine.newest(&rows.state, Class::Fence, name, fence, &guard).unwrap().unwrap();
            assert_eq!(state.head.token, mark);
            let version = engine.newest(&rows.state, Class::Key, &key, of_key, &guard).unwrap();
            assert!(version.is_none_or(|op| op.at != state.at && op.head.fence().is_none()));
            assert_eq!(rows.get(&key).unwrap().as_deref(), value);
            assert_eq!(rows.mark(&key).unwrap().unwrap().get(), mark);
        };
        let token = |number| Token::new(number).unwrap();
        rows.put(token(5), &key, b"one").unwrap();
        check(&db, 5, Some(b"one"));
        rows.put(token(5), &key, b"two").unwrap();
        let mut batch = db.batch();
        batch.put(&rows, token(6), &[&key[..=twin.len()], b"first"].concat(), b"").unwrap();
        batch.put(&rows, token(6), &key, b"three").unwrap();
        batch.commit().unwrap();
        rows.put_operation(token(7), OperationId::new(3), &key, b"four").unwrap();
        let again = rows.put_operation(token(7), OperationId::new(3), &key, b"four");
        assert!(matches!(again, Err(Error::Duplicate { .. })), "{again:?}");
        check(&db, 7, Some(b"four"));
        others(&db);
        check(&db, 7, Some(b"four"));
        rows.delete(token(8), &key).unwrap();
        rows.put(token(8), &key, b"five").unwrap();
        assert_eq!(rows.delete_prefix(token(9), &key[..2]).unwrap().keys, 2);
        check(&db, 9, None);
        others(&db);
        check(&db, 9, None);
        db.close().unwrap();
        let db = open();
        check(&db, 9, None);
        assert!(matches!(spaces(&db)[1].put(token(8), &key, b""), Err(Error::Fenced { .. })));
    }

    /// Every number takes its most bytes, and both links are far.
    #[test]
    fn the_longest_write_takes_what_is_reserved_for_it() {
        let db = options(SimDisk::new(), 16 << 10).open("sim").unwrap();
        let spaces = spaces(&db);
        let put = |n: u8, value| (ChangeKind::Put, 1, vec![n, b'/'], value);
        let before: Vec<_> = (48..248).map(|n| put(n, 1)).collect();
        let (room, taken) = take_room(&db, &spaces, (1, None), &before, |_| {});
        assert!(taken <= room);
        // Behind the first one, it is 4 bytes back to the start of the frame.
        let longest: Vec<_> = (48..248).map(|n| put(n, if n == 48 { 3 << 20 } else { 600 })).collect();
        let (room, taken) = take_room(&db, &spaces, (i64::MAX as u64, None), &longest, |_| {});
        assert!(taken <= room && room - taken < 20, "{taken} of {room}");
    }

    type Hook = Box<dyn FnOnce() + Send>;

    /// Does something before it next creates a file.
    #[derive(Clone)]
    struct Hooked(SimDisk, Arc<std::sync::Mutex<Option<Hook>>>);

    impl fmt::Debug for Hooked {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_tuple("Hooked").field(&self.0).finish_non_exhaustive()
        }
    }

    impl Storage for Hooked {
        fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
            self.0.lock(name)
        }

        fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
            if access == Access::Create
                && let Some(hook) = self.1.lock().unwrap().take()
            {
                hook();
            }
            self.0.open(name, access)
        }

        fn list(&self) -> io::Result<Vec<String>> {
            self.0.list()
        }

        fn remove(&self, name: &str) -> io::Result<()> {
            self.0.remove(name)
        }

        fn rename(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.rename(from, to)
        }

        fn sync_dir(&self) -> io::Result<()> {
            self.0.sync_dir()
        }

        fn describe(&self) -> String {
            self.0.describe()
        }
    }

    /// While a segment of just the right size is made for a write, the first numbered operation comes: what the write
    /// then has to say of it is more than there is room for.
    #[test]
    fn a_write_asks_for_its_room_again_once_operations_are_numbered() {
        let hooked = Hooked(SimDisk::new(), Arc::default());
        let db = options(hooked.clone(), 64 << 10).open("sim").unwrap();
        let rows = &spaces(&db)[0];
        let token = 1 << 62;
        let batch = |token, value: &[u8]| {
            let mut batch = db.batch();
            for n in 0..500u16 {
                batch.put(rows, Token::new(token).unwrap(), &n.to_le_bytes(), value).unwrap();
            }
            batch
        };
        let mut first = batch(token, b"");
        first.operation(OperationId::new(u64::MAX));
        *hooked.1.lock().unwrap() = Some(Box::new(move || drop(first.submit().unwrap())));
        let lsn = batch(token + 1, &[7; 200]).commit().unwrap();
        assert!(hooked.1.lock().unwrap().is_none());
        assert_eq!(rows.get(&7u16.to_le_bytes()).unwrap().unwrap().lsn(), lsn);
    }
}
