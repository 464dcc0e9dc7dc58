//! How much of each segment is still needed.
//!
//! One job: count, for each segment that was begun, the bytes of ops that are the newest of their name,
//! and the versions that are not. Compaction chooses by the first; whether a delete may go is
//! answered by the second. Promises that a segment without dead versions holds none that a delete covers.
//!
//! | op | counts as needed |
//! |---|---|
//! | put | until a newer version of its key is appended |
//! | delete, mark | not where it was written (by the time its segment is compacted it may go), but where compaction carried it, until it is superseded |
//! | others | as these, until compaction looks at them again: nothing else tells that they may go |
//!
//! What is carried anew each time and counted as garbage would be carried for ever.
//!
//! Read next: `compact.rs`.

use super::segment::Segments;
use crate::format::op::Head;
use crate::op::Kind;
use crate::types::{Location, SegmentId};

/// One segment that was begun and not retired.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub id: SegmentId,
    /// Its place in the order of the log: later ones have higher numbers.
    pub order: u64,
    /// All ops, needed or not, and their bytes.
    pub ops: u64,
    pub filled: u64,
    /// Bytes of ops that are needed.
    pub live: u64,
    /// Of these, all but puts: what compaction carried here.
    pub carried: u64,
    /// Values that are the newest version of their key.
    pub keys: u64,
    /// Versions of keys that are not the newest.
    pub dead: u64,
    /// What the file takes, once it is sealed.
    pub sealed: Option<u32>,
    /// It cannot be read, so that nothing can be carried out of it.
    pub is_damaged: bool,
}

impl Used {
    /// A segment without ops.
    pub fn new(id: SegmentId) -> Self {
        Used {
            id,
            order: 0,
            ops: 0,
            filled: 0,
            live: 0,
            carried: 0,
            keys: 0,
            dead: 0,
            sealed: None,
            is_damaged: false,
        }
    }

    /// Bytes of ops that are not needed. What headers and unused room take is not counted: carrying the rest
    /// elsewhere would take as much there.
    pub fn garbage(&self) -> u64 {
        self.filled.saturating_sub(self.live)
    }
}

/// The segments of a store, by their slots.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    segments: Vec<Option<Used>>,
    begun: u64,
    filled: u64,
    live: u64,
    carried: u64,
    keys: u64,
    ops: u64,
    /// The last segment, by its order, that the index file covers, and how many of all ops are covered.
    covered: u64,
    covered_ops: u64,
    /// By slot too: the offsets of ops that nobody needs, as far as that was seen.
    buried: Vec<Vec<u32>>,
}

/// What an op counts for while it is the newest of its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Weight {
    bytes: u32,
    is_carried: bool,
}

impl Weight {
    pub fn new(kind: Kind, is_moved: bool, bytes: u32) -> Self {
        match kind {
            Kind::Put => Weight { bytes, is_carried: false },
            _ if is_moved => Weight { bytes, is_carried: true },
            _ => Weight::default(),
        }
    }

    pub fn of(head: &Head) -> Self {
        Weight::new(head.kind, head.is_moved(), head.len())
    }

    /// As the state of its fence: a put is weighed as a version of its key, and a grant, which is carried while it is
    /// held and whatever set the state since, by itself.
    pub fn as_state(head: &Head) -> Self {
        if head.kind == Kind::Mark { Weight::of(head) } else { Weight::default() }
    }
}

impl Usage {
    /// A segment gets its first op.
    pub fn begin(&mut self, id: SegmentId) {
        let slot = Segments::slot(id) as usize;
        if self.segments.len() <= slot {
            self.segments.resize(slot + 1, None);
            self.buried.resize(slot + 1, Vec::new());
        }
        self.begun += 1;
        self.segments[slot] = Some(Used { order: self.begun, ..Used::new(id) });
    }

    /// A segment that an index file covers, as it was counted there.
    pub fn put_back(&mut self, used: Used) {
        self.begin(used.id);
        let order = self.begun;
        self.segments[Segments::slot(used.id) as usize] = Some(Used { order, ..used });
        self.filled += used.filled;
        self.live += used.live;
        self.carried += used.carried;
        self.keys += used.keys;
        self.ops += used.ops;
        self.covered = order;
        self.covered_ops += used.ops;
    }

    /// An index file covers everything up to this segment.
    pub fn cover(&mut self, id: SegmentId) {
        let Some(order) = self.get(id).map(|used| used.order) else { return };
        self.covered = order;
        self.covered_ops = self.iter().filter(|used| used.order <= order).map(|used| used.ops).sum();
    }

    /// How many ops the next open has to replay.
    pub fn uncovered(&self) -> u64 {
        self.ops - self.covered_ops
    }

    /// Ops lie in a segment, needed or not.
    pub fn fill(&mut self, id: SegmentId, ops: u64, bytes: u32) {
        if let Some(used) = self.of(id) {
            used.ops += ops;
            used.filled += bytes as u64;
            self.filled += bytes as u64;
            self.ops += ops;
        }
    }

    /// An op is the newest of its name.
    pub fn add(&mut self, at: Location, weight: Weight) {
        self.change(at, weight, u64::wrapping_add);
    }

    /// It is not any more.
    pub fn remove(&mut self, at: Location, weight: Weight) {
        self.change(at, weight, u64::wrapping_sub);
    }

    /// A version of a key is not the newest any more, or never was.
    pub fn bury(&mut self, at: Location) {
        if let Some(used) = self.of(at.segment) {
            used.dead += 1;
        }
    }

    /// As [`Usage::bury`], of one that is the state of no fence: nobody needs it any more, so compaction need not
    /// look at it.
    pub fn bury_whole(&mut self, at: Location) {
        self.bury(at);
        if self.get(at.segment).is_some() {
            self.buried[Segments::slot(at.segment) as usize].push(at.offset);
        }
    }

    /// The ops of a segment that were buried whole, in no order. A hint: any of them may be missing.
    pub fn take_buried(&mut self, id: SegmentId) -> Vec<u32> {
        let is_there = self.get(id).is_some();
        let buried = self.buried.get_mut(Segments::slot(id) as usize).filter(|_| is_there);
        buried.map(std::mem::take).unwrap_or_default()
    }

    /// Gives back what was taken of a segment that stays.
    pub fn give_back_buried(&mut self, id: SegmentId, taken: Vec<u32>) {
        if self.get(id).is_some() {
            self.buried[Segments::slot(id) as usize].extend(taken);
        }
    }

    fn change(&mut self, at: Location, weight: Weight, step: fn(u64, u64) -> u64) {
        if weight.bytes == 0 {
            return;
        }
        let carried = if weight.is_carried { weight.bytes as u64 } else { 0 };
        // A segment that is gone took what it counted with it.
        let keys = u64::from(!weight.is_carried);
        let Some(used) = self.of(at.segment) else { return };
        used.live = step(used.live, weight.bytes as u64);
        used.carried = step(used.carried, carried);
        used.keys = step(used.keys, keys);
        self.live = step(self.live, weight.bytes as u64);
        self.carried = step(self.carried, carried);
        self.keys = step(self.keys, keys);
    }

    pub fn get(&self, id: SegmentId) -> Option<&Used> {
        let used = self.segments.get(Segments::slot(id) as usize)?.as_ref()?;
        (used.id == id).then_some(used)
    }

    pub fn of(&mut self, id: SegmentId) -> Option<&mut Used> {
        let used = self.segments.get_mut(Segments::slot(id) as usize)?.as_mut()?;
        (used.id == id).then_some(used)
    }

    /// The segment is sealed and takes so many bytes.
    pub fn seal(&mut self, id: SegmentId, bytes: u32) {
        if let Some(used) = self.of(id) {
            used.sealed = Some(bytes);
        }
    }

    /// The segment is retired.
    pub fn forget(&mut self, id: SegmentId) {
        let Some(used) = self.of(id).copied() else { return };
        self.filled -= used.filled;
        self.live = self.live.wrapping_sub(used.live);
        self.carried = self.carried.wrapping_sub(used.carried);
        self.keys = self.keys.wrapping_sub(used.keys);
        self.ops -= used.ops;
        if used.order <= self.covered {
            self.covered_ops -= used.ops;
        }
        self.segments[Segments::slot(id) as usize] = None;
        self.buried[Segments::slot(id) as usize] = Vec::new();
    }

    /// Bytes needed in all segments.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Bytes of ops that are not.
    pub fn garbage(&self) -> u64 {
        self.filled.saturating_sub(self.live)
    }

    /// Of the needed ones, all but puts: what compaction carried.
    pub fn carried(&self) -> u64 {
        self.carried
    }

    /// Keys that have a value.
    pub fn keys(&self) -> u64 {
        self.keys
    }

    /// Every segment that was begun.
    pub fn iter(&self) -> impl Iterator<Item = &Used> {
        self.segments.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(segment: u32) -> Location {
        Location { segment: SegmentId(segment), offset: 5000 }
    }

    #[test]
    fn what_is_counted_in_goes_out_again_and_a_retired_segment_takes_its_share() {
        let mut usage = Usage::default();
        let put = Weight { bytes: 100, is_carried: false };
        let mark = Weight { bytes: 30, is_carried: true };
        usage.begin(SegmentId(1));
        usage.begin(SegmentId(2));
        usage.add(at(1), put);
        usage.add(at(2), put);
        usage.add(at(2), mark);
        usage.remove(at(1), put);
        usage.bury(at(1));
        usage.seal(SegmentId(1), 4096);
        usage.fill(SegmentId(1), 1, 100);
        usage.fill(SegmentId(2), 2, 150);
        assert_eq!((usage.garbage(), usage.get(SegmentId(2)).unwrap().garbage()), (120, 20));
        assert_eq!((usage.live(), usage.carried(), usage.keys()), (130, 30, 1));
        let first = *usage.of(SegmentId(1)).unwrap();
        assert_eq!((first.live, first.dead, first.garbage()), (0, 1, 100));
        usage.forget(SegmentId(2));
        assert_eq!((usage.live(), usage.carried(), usage.garbage()), (0, 0, 100));
        usage.remove(at(2), mark);
        assert_eq!(usage.live(), 0, "what is gone is not counted twice");
        assert!(first.order < 2 && usage.iter().count() == 1);
        let second = Used { ops: 3, filled: 130, live: 130, carried: 30, keys: 1, ..Used::new(SegmentId(2)) };
        usage.put_back(second);
        assert_eq!((usage.live(), usage.carried(), usage.garbage(), usage.keys()), (130, 30, 100, 1));
        assert!(usage.of(SegmentId(2)).unwrap().order > first.order);
    }

    #[test]
    fn what_has_no_value_counts_where_it_was_carried() {
        let whole = Weight { bytes: 30, is_carried: false };
        for (kind, written, carried) in [
            (Kind::Put, whole, whole),
            (Kind::Delete, Weight::default(), Weight { is_carried: true, ..whole }),
            (Kind::Grant, Weight::default(), Weight { is_carried: true, ..whole }),
            (Kind::Mark, Weight::default(), Weight { is_carried: true, ..whole }),
            (Kind::Release, Weight::default(), Weight { is_carried: true, ..whole }),
            (Kind::Floor, Weight::default(), Weight { is_carried: true, ..whole }),
        ] {
            let weights = [false, true].map(|is_moved| Weight::new(kind, is_moved, 30));
            assert_eq!(weights, [written, carried], "{kind:?}");
        }
    }

    #[test]
    fn what_is_buried_is_told_until_its_segment_goes() {
        let mut usage = Usage::default();
        usage.begin(SegmentId(1));
        usage.bury(at(1));
        assert_eq!(usage.take_buried(SegmentId(1)), [], "it may be the state of a fence");
        usage.bury_whole(at(1));
        usage.bury_whole(at(9));
        assert_eq!(usage.of(SegmentId(1)).unwrap().dead, 2);
        let taken = usage.take_buried(SegmentId(1));
        assert_eq!((&taken[..], usage.take_buried(SegmentId(1)).len()), (&[5000][..], 0));
        usage.bury_whole(Location { offset: 6000, ..at(1) });
        usage.give_back_buried(SegmentId(1), taken.clone());
        usage.give_back_buried(SegmentId(9), taken.clone());
        assert_eq!(usage.take_buried(SegmentId(1)), [6000, 5000]);
        assert_eq!(usage.take_buried(SegmentId(9)), []);
        usage.give_back_buried(SegmentId(1), taken);
        usage.forget(SegmentId(1));
        usage.begin(SegmentId(1));
        assert_eq!(usage.take_buried(SegmentId(1)), []);
        usage.bury_whole(at(1));
        let before = SegmentId(1 + (1 << crate::index::SEGMENT_BITS));
        assert_eq!(
            (usage.take_buried(before).len(), usage.take_buried(SegmentId(1)).len()),
            (0, 1),
            "of one slot"
        );
    }

    #[test]
    fn what_an_index_file_covers_is_not_counted_for_the_next_open() {
        let mut usage = Usage::default();
        usage.put_back(Used { ops: 3, ..Used::new(SegmentId(2)) });
        usage.begin(SegmentId(3));
        usage.fill(SegmentId(3), 4, 10);
        assert_eq!(usage.uncovered(), 4);
        usage.forget(SegmentId(2));
        assert_eq!(usage.uncovered(), 4, "what is covered and gone counts for nothing");
        usage.cover(SegmentId(3));
        usage.fill(SegmentId(3), 2, 10);
        assert_eq!(usage.uncovered(), 2);
    }
}
