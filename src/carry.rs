//! What becomes of an op whose segment is to go.
//!
//! One job: tell what is still needed from what is not, and carry the first to the end of the log under its
//! own lsn and token. Promises C1 (only places change) and C4, its half: a mark is dropped only where a
//! durable floor was folded over it.
//!
//! | op | is carried while |
//! |---|---|
//! | put, delete | it is the newest version of its key; a delete goes when no segment holds an older version of the key, no snapshot sees one, and its mark is kept elsewhere or folded |
//! | grant, mark; a put or delete that set a mark | it is the state of its fence, and no folded floor covers its token. Where the value is gone, as a mark; a grant whose lease is over, too |
//! | grant | its lease is not over, whatever set the state of the fence since: the next open keeps the fence for it |
//! | release | its token is the mark of its fence: the grant may lie anywhere in the log |
//! | floor, counter | it is the highest |
//! | keyspace | always |
//!
//! Read next: `compact.rs`.

use crate::append::{Frame, frame_bytes, room};
use crate::engine::{Engine, KeyspaceState, Tail, When};
use crate::error::Result;
use crate::fence::Floor;
use crate::format::HEADER_BYTES;
use crate::log::pool::Need;
use crate::log::scan::Table;
use crate::log::segment::{OpRef, Segment, Segments};
use crate::log::usage::Weight;
use crate::op::{Class, Kind, Links, Op};
use crate::options::Scope;
use crate::sync::{Arc, Ordering};
use crate::types::{Location, Lsn, SegmentId};
use crossbeam_epoch::Guard;
use std::collections::HashSet;

/// A segment that is being compacted, all of it proven that may be needed.
pub(crate) struct Victim {
    pub segment: Arc<Segment>,
    pub table: Table,
    /// The offsets of ops that nobody needs, in order: they are passed over.
    pub buried: Vec<u32>,
    /// No older segment holds a version that one of its deletes covers.
    pub is_oldest: bool,
}

impl Victim {
    pub fn id(&self) -> SegmentId {
        self.segment.id
    }

    /// All ops but the buried ones.
    pub fn ops(&self) -> impl Iterator<Item = Result<OpRef<'_>>> {
        let mut buried = self.buried.iter().copied().peekable();
        let mut is_buried = move |offset| {
            while buried.next_if(|&before| before < offset).is_some() {}
            buried.peek() == Some(&offset)
        };
        let offsets = Table::offsets(self.table.bytes());
        offsets.filter(move |offset| !offset.is_some_and(&mut is_buried)).map(|offset| match offset {
            Some(offset) => self.segment.op(offset),
            None => Err(self.segment.corrupt(0, "the key table points nowhere")),
        })
    }

    /// Verifies them: what does not verify is never carried elsewhere.
    ///
    /// # Errors
    /// Damage.
    pub fn verify(&self) -> Result<()> {
        self.ops().try_for_each(|op| self.segment.check_value(&op?))
    }
}

/// The room that a frame of so many ops needs, which took so many bytes where they lie: carried, each has its own
/// lsn as well, and its link back is longer.
fn chunk_room(ops: usize, bytes: usize) -> u32 {
    const MORE: usize = 10 + 8;
    room(frame_bytes(0, bytes + ops * MORE), ops)
}

/// The fence whose state an op may be.
pub(crate) fn state_name<'k>(keyspace: &KeyspaceState, op: &'k OpRef<'_>) -> Option<&'k [u8]> {
    match op.head.kind {
        Kind::Grant | Kind::Mark => Some(op.key()),
        Kind::Put | Kind::Delete if op.head.fence().is_some() => Some(keyspace.fence_of(op.key())),
        _ => None,
    }
}

/// What an op is needed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// It never was that, or something newer is.
    None,
    Keep,
    /// It is the newest, and nobody needs to know any more.
    Drop,
}

/// What becomes of one op.
struct Fate<'a> {
    op: &'a OpRef<'a>,
    /// As a version of its key, and the hash of that.
    version: (Role, u64),
    /// As the state of its fence, and the hash of that.
    state: (Role, u64),
    /// What it is written as, if it is carried.
    carried: Option<Op<'a>>,
}

/// At least so many bytes are carried in one frame: they ride with a group, whose writers wait for them.
const CHUNK_BYTES: u32 = 32 << 10;

/// An op with its segment.
type Found<'a> = (&'a Victim, OpRef<'a>);

/// Deletes that need not stay, with the hashes of their keys.
type Deletes = Vec<(u64, Location)>;

impl Engine {
    /// A segment with what may be needed of it proven. What was superseded is not even read, where the key table
    /// is there to tell the one from the other.
    pub fn victim(&self, id: SegmentId) -> Result<Option<Victim>> {
        let (taken, mut buried) = {
            let mut tail = self.tail.lock();
            (tail.usage.get(id).and_then(|used| used.sealed), tail.usage.take_buried(id))
        };
        let segment = self.segment(id);
        let table = match (&segment, taken) {
            (Some(segment), Some(taken)) => segment.table(taken)?,
            _ => None,
        };
        let (Some(segment), Some(table)) = (segment, table) else { return self.prove(id) };
        buried.sort_unstable();
        let victim = Victim { segment, table, buried, is_oldest: false };
        debug_assert!(self.is_nothing_missed(&victim));
        victim.verify()?;
        Ok(Some(victim))
    }

    /// Whether nobody needs what a victim passes over, as far as that can be read.
    fn is_nothing_missed(&self, victim: &Victim) -> bool {
        let mut ops = victim.buried.iter().filter_map(|&offset| victim.segment.op(offset).ok());
        ops.all(|op| !self.may_be_needed(&op))
    }

    /// A segment with every byte of it proven.
    pub fn prove(&self, id: SegmentId) -> Result<Option<Victim>> {
        let proven = self.segment(id).map(|segment| segment.prove()).transpose()?;
        Ok(proven.map(|(segment, table)| Victim { segment, table, buried: Vec::new(), is_oldest: false }))
    }

    pub fn segment(&self, id: SegmentId) -> Option<Arc<Segment>> {
        let guard = crossbeam_epoch::pin();
        self.segments.of(id, &guard).cloned()
    }

    /// Carries what is needed of segments to the end of the log. `needed`: the hashes of keys whose delete
    /// must stay, if that was looked up; else only the oldest segment lets its deletes go. Stops behind the frame
    /// that makes it `limit` bytes; answers how many segments hold nothing needed any more, but for deletes that may
    /// go with them.
    pub fn carry(
        &self,
        victims: &[Victim],
        needed: Option<&HashSet<u64>>,
        limit: u64,
    ) -> Result<(usize, Deletes)> {
        // As much at once as users write at once: where they write batches that fill a segment, so does this,
        // for in what is left behind a smaller frame no batch would find room.
        // But never more than the spares of a full disk hold.
        let least = CHUNK_BYTES.min(self.pool.usual_bytes() / 4);
        let most = self.pool.asked_bytes().saturating_sub(2 * HEADER_BYTES).max(least);
        let mut chunk: Vec<Found<'_>> = Vec::new();
        let (mut taken, mut carried, mut deletes) = (0, 0, Deletes::new());
        let mut unnamed = HashSet::new();
        for (at, victim) in victims.iter().enumerate() {
            for op in victim.ops() {
                let op = op?;
                if !self.may_be_needed(&op) {
                    continue;
                }
                // A round that was cut short has left copies: of an op that no name leads to, one is enough.
                let is_unnamed =
                    !matches!(op.head.kind, Kind::Put | Kind::Delete | Kind::Mark) && !self.is_named(&op);
                if is_unnamed && !unnamed.insert((op.head.kind, op.head.keyspace, op.lsn, op.key().to_vec()))
                {
                    continue;
                }
                victim.segment.check_value(&op)?;
                let bytes = op.head.len() as usize;
                if !chunk.is_empty() && chunk_room(chunk.len() + 1, taken + bytes) > most {
                    self.carry_chunk(&chunk, taken, needed, &mut deletes)?;
                    carried += taken as u64;
                    if carried >= limit {
                        return Ok((at, deletes));
                    }
                    chunk.clear();
                    taken = 0;
                }
                taken += bytes;
                chunk.push((victim, op));
            }
        }
        self.carry_chunk(&chunk, taken, needed, &mut deletes)?;
        Ok((victims.len(), deletes))
    }

    /// Lets go of deletes whose segment is among those that go now. Upholds C3: not before all that these cover is
    /// sure to go as well, for what a round that fails has let go of the next one would not carry.
    pub fn drop_deletes(&self, deletes: &Deletes, segments: &[SegmentId]) {
        for &(hash, at) in deletes.iter().filter(|(_, at)| segments.contains(&at.segment)) {
            // Read in front of the lock. A key that cannot be read stays in its order: it has no value.
            let guard = crossbeam_epoch::pin();
            let op = self.segments.op(at, &guard).ok().flatten();
            let mut tail = self.tail.lock();
            if !tail.slots.remove(hash, Segments::place(at)) {
                // Written anew meanwhile.
                continue;
            }
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
            if let Some(op) = op
                && let Some(keyspace) = self.keyspace_by_id(op.head.keyspace)
            {
                tail.usage.remove(at, Weight::of(&op.head));
                keyspace.keys.remove(op.key());
            }
        }
    }

    /// Without a lock: what is not needed now never will be.
    pub fn may_be_needed(&self, op: &OpRef<'_>) -> bool {
        let Some(keyspace) = self.keyspace_by_id(op.head.keyspace) else { return true };
        match op.head.kind {
            Kind::Put | Kind::Delete | Kind::Grant | Kind::Mark => {
                self.is_held(&keyspace, op.head.kind, op.key(), op.head.token) || self.is_named(op)
            }
            _ => true,
        }
    }

    /// Whether a name leads to this very op.
    fn is_named(&self, op: &OpRef<'_>) -> bool {
        let Some(keyspace) = self.keyspace_by_id(op.head.keyspace) else { return false };
        let guard = crossbeam_epoch::pin();
        let place = Segments::place(op.at);
        let stands = |class, name: &[u8]| self.slots.holds(self.hash(&keyspace, class, name), place, &guard);
        op.head.kind.is_value() && stands(Class::Key, op.key())
            || state_name(&keyspace, op).is_some_and(|name| stands(Class::Fence, name))
    }

    fn carry_chunk(
        &self,
        ops: &[Found<'_>],
        bytes: usize,
        needed: Option<&HashSet<u64>>,
        deletes: &mut Deletes,
    ) -> Result<()> {
        if ops.is_empty() {
            return Ok(());
        }
        let room = chunk_room(ops.len(), bytes);
        let (lsn, group) = self.with_room(room, Need::Compaction, |tail| -> Result<_> {
            let guard = crossbeam_epoch::pin();
            // Nobody will look further back than this any more.
            let seen_by_all = self.snapshots.oldest(self.progress.durable());
            let fates: Result<Vec<Fate<'_>>> = ops
                .iter()
                .map(|(victim, op)| self.fate(tail, op, victim.is_oldest, needed, seen_by_all, &guard))
                .collect();
            self.settle_fates(tail, fates?, deletes);
            Ok((tail.last(), tail.group_of(tail.last())))
        })??;
        // One chunk after the other, so that what is carried never crowds out what is written.
        self.wait_behind_locks(lsn, group)
    }

    fn fate<'a>(
        &self,
        tail: &Tail,
        op: &'a OpRef<'a>,
        is_oldest: bool,
        needed: Option<&HashSet<u64>>,
        seen_by_all: Lsn,
        guard: &Guard,
    ) -> Result<Fate<'a>> {
        let keyspace = self.keyspace_by_id(op.head.keyspace);
        let mut fate = Fate { op, version: (Role::None, 0), state: (Role::None, 0), carried: None };
        let whole = Op { links: Links { moved: Some(op.lsn), ..op.head.links(&op.bytes) }, ..op.op() };
        let Some(keyspace) = keyspace else {
            // The counter belongs to none; and one is known only once the op that creates it is durable.
            let is_needed = op.head.kind != Kind::Counter || op.head.token >= tail.counter;
            fate.carried = is_needed.then_some(whole);
            return Ok(fate);
        };
        let place = Segments::place(op.at);
        let is_covered = op.head.token <= keyspace.floor_durable().folded;
        match op.head.kind {
            Kind::Keyspace => fate.carried = Some(whole),
            // See above.
            Kind::Counter => {}
            Kind::Floor => {
                let floor = Floor::of(op.head.token, op.value());
                fate.carried = keyspace.holds_floor(floor, op.lsn).then_some(whole);
            }
            Kind::Release => {
                let hashes = self.fence_hashes(&keyspace, op.key());
                let state = self.fence(&keyspace, op.key(), hashes, When::Appended, guard)?.state;
                let is_needed = state.mark == op.head.token && !is_covered;
                fate.carried = is_needed.then_some(whole);
            }
            Kind::Put | Kind::Delete | Kind::Grant | Kind::Mark => {
                if let Some(name) = state_name(&keyspace, op) {
                    let hash = self.hash(&keyspace, Class::Fence, name);
                    if self.slots.holds(hash, place, guard) {
                        fate.state = (if is_covered { Role::Drop } else { Role::Keep }, hash);
                    }
                }
                if op.head.kind.is_value() {
                    let hash = self.hash(&keyspace, Class::Key, op.key());
                    if self.slots.holds(hash, place, guard) {
                        let may_go = op.head.kind == Kind::Delete
                            && op.lsn <= seen_by_all
                            && (is_oldest || needed.is_some_and(|needed| !needed.contains(&hash)))
                            // In `Scope::Key` the version is the state as well.
                            && (keyspace.options.scope != Scope::Key || is_covered);
                        fate.version = (if may_go { Role::Drop } else { Role::Keep }, hash);
                    }
                }
                fate.carried = self.carried(&fate, &keyspace, whole, seen_by_all);
            }
        }
        Ok(fate)
    }

    /// The op as it is carried: with the links that somebody may still follow, and as a mark where nothing
    /// but that is needed.
    fn carried<'a>(
        &self,
        fate: &Fate<'a>,
        keyspace: &KeyspaceState,
        whole: Op<'a>,
        seen_by_all: Lsn,
    ) -> Option<Op<'a>> {
        let is_version = fate.version.0 == Role::Keep;
        let is_state = fate.state.0 == Role::Keep;
        let is_held = self.is_held(keyspace, whole.kind, whole.key, whole.token);
        if !is_version && !is_state && !is_held {
            return None;
        }
        let knows = is_state || keyspace.options.scope == Scope::Key;
        let links = Links {
            previous: whole.links.previous.filter(|_| is_version && fate.op.lsn > seen_by_all),
            // A grant always has one; replay finds it superseded where it is not the state.
            fence: (is_state || is_held)
                .then(|| whole.links.fence.flatten().filter(|_| fate.op.lsn > seen_by_all)),
            last: whole.links.last.filter(|_| knows),
            predecessor: whole.links.predecessor.filter(|_| knows),
            moved: whole.links.moved,
        };
        Some(match whole.kind {
            Kind::Put | Kind::Delete if !is_version => {
                Op { kind: Kind::Mark, key: keyspace.fence_of(whole.key), value: b"", links, ..whole }
            }
            Kind::Grant if !is_held => Op { kind: Kind::Mark, value: b"", links, ..whole },
            _ => Op { links, ..whole },
        })
    }

    /// Whether an op is the grant of a lease that is not over, or of one from before the open.
    fn is_held(&self, keyspace: &KeyspaceState, kind: Kind, fence: &[u8], token: u64) -> bool {
        kind == Kind::Grant
            && self.leases.current(keyspace.id, fence).is_some_and(|grant| {
                grant.token().get() == token && (!grant.is_ended() || grant.is_recorded())
            })
    }

    /// Appends what is carried as one frame, points the names at it, and forgets what is dropped; deletes that may go
    /// are noted.
    fn settle_fates(&self, tail: &mut Tail, fates: Vec<Fate<'_>>, deletes: &mut Deletes) {
        let mut frame = Frame::begin(tail);
        let mut places = Vec::with_capacity(fates.len());
        for fate in &fates {
            let value_checksum = fate.op.head.value_checksum();
            let checksum = value_checksum.filter(|_| fate.carried.is_some_and(|op| !op.value.is_empty()));
            places.push(fate.carried.map(|op| frame.push(&op, checksum)));
        }
        frame.finish();
        if places.iter().any(Option::is_some) {
            self.counters.carried.fetch_add(tail.scratch.len() as u64, Ordering::Relaxed);
            self.close_frame(tail);
        }
        for (fate, place) in fates.iter().zip(places) {
            self.point_carried(tail, fate, place);
            if fate.version.0 == Role::Drop {
                deletes.push((fate.version.1, fate.op.at));
            }
        }
    }

    fn point_carried(&self, tail: &mut Tail, fate: &Fate<'_>, place: Option<(Location, Weight)>) {
        let Fate { op, version, state, .. } = fate;
        let old = Segments::place(op.at);
        let new = place.map(|(new, _)| Segments::place(new));
        for ((role, hash), is_version) in [(version, true), (state, false)] {
            let found = match (role, new) {
                (Role::Keep, Some(new)) => tail.slots.replace(*hash, old, new),
                // See `drop_deletes`.
                (Role::Drop, _) if is_version => true,
                (Role::None, _) => true,
                _ => tail.slots.remove(*hash, old),
            };
            debug_assert!(found, "it stood there under this lock");
        }
        match (version.0, state.0) {
            (Role::Keep, _) => {
                tail.usage.remove(op.at, Weight::of(&op.head));
                tail.usage.bury(op.at);
            }
            (Role::None, Role::Keep | Role::Drop) => tail.usage.remove(op.at, Weight::as_state(&op.head)),
            _ => {}
        }
        if let Some((new, weight)) = place {
            tail.usage.add(new, weight);
        }
    }

    /// The hashes of keys that are deleted in `victims` and have an older version in one of the segments that stay. Of
    /// these one at a time is held: with positioned reads that is all of its bytes.
    pub fn needed_deletes(&self, victims: &[Victim], others: &[SegmentId]) -> Result<HashSet<u64>> {
        let mut deleted = HashSet::new();
        for victim in victims {
            self.each_version(victim, |kind, hash| {
                if kind == Kind::Delete {
                    deleted.insert(hash);
                }
            })?;
        }
        let mut needed = HashSet::new();
        for &id in others {
            let Some(other) = self.prove(id)? else { continue };
            self.each_version(&other, |_, hash| {
                if deleted.contains(&hash) {
                    needed.insert(hash);
                }
            })?;
        }
        Ok(needed)
    }

    fn each_version(&self, segment: &Victim, mut each: impl FnMut(Kind, u64)) -> Result<()> {
        for op in segment.ops() {
            let op = op?;
            if op.head.kind.is_value()
                && let Some(keyspace) = self.keyspace_by_id(op.head.keyspace)
            {
                each(op.head.kind, self.hash(&keyspace, Class::Key, op.key()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_op_that_is_carried_has_room_for_its_lsn_and_a_longer_link() {
        let frame = |ops: usize| chunk_room(ops, 50 * ops) - chunk_room(0, 0);
        assert_eq!(frame(1_000), 1_000 * (50 + 10 + 8 + Table::ENTRY_BYTES));
    }
}
