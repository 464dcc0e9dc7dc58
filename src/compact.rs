//! Giving space back: what is needed of a segment is carried to the end of the log, then the segment goes.
//!
//! ```text
//!  choose   the segments that hold the least of what is needed                    log/usage.rs
//!  fold     marks that nobody needs become one floor, durable first               fold.rs
//!  carry    what is needed, under its own lsn, to the end of the log; synced      carry.rs
//!  retire   once `visible` and every snapshot have passed that: out of STORE      log/recycle.rs
//!  reclaim  once nobody reads it: a spare again, or removed
//! ```
//!
//! Promises C1 to C4: places change and nothing else; a segment goes only when nobody needs it; a crash at
//! any step leaves the old segment listed, or all that was needed of it durable elsewhere. One round at a
//! time, behind one lock.
//!
//! Read next: `carry.rs`, what is needed and what is not.

use crate::append::{frame_bytes, room};
use crate::carry::Victim;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::events;
use crate::format::HEADER_BYTES;
use crate::log::pool::Need;
use crate::log::scan::Table;
use crate::log::segment::Segment;
use crate::log::usage::Used;
use crate::space::Compactor;
use crate::sync::{Arc, Ordering, thread};
use crate::types::{Lsn, SegmentId};
use std::ops::ControlFlow;
use std::time::Duration;

/// What one compaction did; from [`Db::compact`](crate::Db::compact).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Segments that were retired.
    pub segments: u32,
    /// Bytes that they took on disk.
    pub bytes: u64,
    /// Segments that hold nothing needed now, and wait for older snapshots to be dropped.
    pub waiting: u32,
}

/// Who gives space back, and so how much garbage is enough for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    /// Somebody who needs the space, be there ever so little.
    InNeed,
    /// A write that finds no spare, and rather gives space back than take more.
    Writer,
    /// The compactor.
    Background,
}

/// The deletes that may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Deletes {
    /// Those of the oldest segment that is not all needed.
    Oldest,
    /// All that no other segment holds an older version for: costs a look at every version there is.
    LookedUp,
}

/// So much may be garbage, in percent of what is needed, before space is given back; in small stores so many bytes
/// instead, or segments where their size is given: the more garbage there may be, the less is carried for it.
const GARBAGE_PERCENT: u64 = 43;
const GARBAGE_BYTES: u64 = 32 << 20;
const GARBAGE_SEGMENTS: u64 = 4;
/// A segment is not worth a round unless this share of it comes back, in percent.
const WORTH_PERCENT: u64 = 15;
/// Segments of one round: more cost fewer syncs, and hold back more space meanwhile.
const ROUND: usize = 16;
/// Bytes of the segments of a round that is asked for: the rest of the log is read once for each.
const READ_AT_ONCE: u64 = 1 << 30;
/// So long a write waits for the round of another before it takes more space: one that sleeps through its lease
/// is fenced, and a lease that lasts holds the floor of its keyspace back.
const SHORT_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// So many segments cut short, by opens and checkpoints, are made one.
const SHORT_ONES: usize = 16;

impl Engine {
    /// Whether there is so much garbage that it is time to give space back.
    pub fn is_littered(&self, who: Who) -> bool {
        let (garbage, much) = self.garbage_and_much(who);
        garbage > much
    }

    /// The bytes in nobody's use, and how many there may be.
    fn garbage_and_much(&self, who: Who) -> (u64, u64) {
        let segment = self.pool.usual_bytes() as u64;
        let (garbage, live) = {
            let tail = self.tail.lock();
            (tail.usage.garbage(), tail.usage.live())
        };
        let share = live * GARBAGE_PERCENT / 100;
        let few =
            if self.options.segment_bytes.is_none() { GARBAGE_BYTES } else { GARBAGE_SEGMENTS * segment };
        let much = match who {
            Who::InNeed => 0,
            // Where space is no concern the compactor has a thread of its own for that.
            Who::Writer if share < few && self.options.background => 2 * few,
            Who::Writer => share.max(few) / 8 * 7,
            Who::Background => share.max(few),
        };
        (garbage, much)
    }

    /// How long a write waits for the round of another: the longer, the further compaction has fallen behind.
    fn patience(&self) -> Duration {
        let (garbage, much) = self.garbage_and_much(Who::Background);
        (SHORT_WAIT * (garbage / much.max(1)) as u32).clamp(SHORT_WAIT, LONGEST_WAIT)
    }

    /// One round, if one is worth it; says whether it freed anything.
    ///
    /// # Errors
    /// No room to carry anything, a failed disk, or damage: the segment that holds it is left alone.
    pub fn compact_some(&self, who: Who) -> Result<bool> {
        self.compact_once(&mut self.compactor.lock(), who)
    }

    fn compact_once(&self, compactor: &mut Compactor, who: Who) -> Result<bool> {
        self.check_open()?;
        let freed = self.retire_drained(compactor, who)?;
        if compactor.drained.is_some() {
            return Ok(freed);
        }
        let (chosen, deletes) = match self.is_time_to_look(compactor) {
            true => (self.choose_carried(), Deletes::LookedUp),
            false => (self.choose(who), Deletes::Oldest),
        };
        Ok(self.round(compactor, &self.affordable(&chosen), deletes, who)? || freed)
    }

    /// Gives back all space that can be had now.
    ///
    /// # Errors
    /// As [`Engine::compact_some`].
    pub fn compact_all(&self) -> Result<Compacted> {
        let compacted = self.compact_rest(&mut self.compactor.lock())?;
        self.trim()?;
        Ok(compacted)
    }

    fn compact_rest(&self, compactor: &mut Compactor) -> Result<Compacted> {
        self.check_open()?;
        let before = self.counters.retired.load(Ordering::Relaxed);
        let bytes_before = self.counters.retired_bytes.load(Ordering::Relaxed);
        self.seal_active()?;
        // What waited for a snapshot may go by now.
        self.retire_drained(compactor, Who::InNeed)?;
        let mut all = self.choose_all();
        let most = self.pool.usual_bytes() as u64;
        while compactor.drained.is_none() && !all.is_empty() {
            let count = first_within(&all, most);
            let first: Vec<Used> = all.drain(..count).collect();
            self.round(compactor, &self.affordable(&first), Deletes::LookedUp, Who::InNeed)?;
        }
        Ok(Compacted {
            segments: (self.counters.retired.load(Ordering::Relaxed) - before) as u32,
            bytes: self.counters.retired_bytes.load(Ordering::Relaxed) - bytes_before,
            waiting: compactor.drained.as_ref().map_or(0, |(segments, _)| segments.len() as u32),
        })
    }

    /// Gives back what is larger than the store needs by now: spares, and the index file.
    fn trim(&self) -> Result<()> {
        let trimmed = self.pool.trim().map_err(|e| Error::io("writing STORE", e));
        self.check_list();
        trimmed?;
        if self.options.background {
            self.pool_bell.ring();
            self.index_bell.ring();
        } else {
            self.refresh_index_if_due(false);
        }
        Ok(())
    }

    /// The segments that can be compacted, in the order of the log.
    fn choosable(&self) -> Vec<Used> {
        let is_choosable = |used: &Used| used.sealed.is_some() && !used.is_damaged;
        let mut all: Vec<Used> = self.tail.lock().usage.iter().copied().filter(is_choosable).collect();
        all.sort_by_key(|used| used.order);
        all
    }

    /// The segments of which the least is needed, while there is enough garbage.
    fn choose(&self, who: Who) -> Vec<Used> {
        let usual = self.pool.usual_bytes() as u64;
        let mut all = self.choosable();
        let short = |used: &Used| used.sealed.is_some_and(|bytes| (bytes as u64) < usual / 4);
        if all.iter().filter(|used| short(used)).count() >= SHORT_ONES {
            all.retain(short);
        } else if !self.is_littered(who) {
            return Vec::new();
        } else {
            all.retain(|used| used.garbage() * 100 >= used.filled * WORTH_PERCENT);
        }
        // The least carried for what comes back.
        let cost = |used: &Used| used.live * 1000 / used.sealed.unwrap_or(1).max(1) as u64;
        all.sort_by_key(cost);
        let mut live = 0;
        let enough = all.iter().position(|used| {
            live += used.live;
            live > 2 * usual
        });
        all.truncate(enough.map_or(ROUND, |at| (at + 1).min(ROUND)));
        // In the order of the log, for the sake of deletes; but the dearest last, which may be left half done.
        let certain = all.len().saturating_sub(1);
        all[..certain].sort_by_key(|used| used.order);
        all
    }

    /// Whether so much was written since that deletes and marks carried on are worth another look.
    fn is_time_to_look(&self, compactor: &mut Compactor) -> bool {
        let (carried, live, garbage) = {
            let tail = self.tail.lock();
            (tail.usage.carried(), tail.usage.live(), tail.usage.garbage())
        };
        let appended = self.appended_bytes.load(Ordering::Relaxed);
        let is_much = carried > (live / 8).max(self.pool.usual_bytes() as u64);
        // A look reads the whole log: as much is to be written in between.
        let is_time = is_much && appended - compactor.looked_at >= (4 * carried).max(live + garbage);
        if is_time {
            compactor.looked_at = appended;
        }
        is_time
    }

    fn choose_carried(&self) -> Vec<Used> {
        let mut all = self.choosable();
        all.retain(|used| used.carried * 4 > used.sealed.unwrap_or(0) as u64);
        all.truncate(ROUND);
        all
    }

    /// All of which something may come back. The oldest first: then a delete finds what it covers gone.
    fn choose_all(&self) -> Vec<Used> {
        let mut all = self.choosable();
        all.retain(|used| used.garbage() * 16 > used.filled || used.carried > 0);
        all
    }

    /// Those of the chosen whose needed ops fit the spares there are, when there will be no others: on a full
    /// disk half a round would take the room and give nothing back. If none does, the first is tried.
    fn affordable(&self, chosen: &[Used]) -> Vec<SegmentId> {
        let filled: u64 = chosen.iter().map(|used| used.filled).sum();
        let mut room = self.pool.room_at_hand();
        let live: u64 = chosen.iter().map(|used| used.live).sum();
        // While the disk has room a guess is enough: what is missing is made. A full one is asked for more.
        let is_guess_good = self.pool.trouble().is_none() && live / 4 * 5 <= room;
        let is_enough = !self.pool.is_low() || is_guess_good || filled <= room || self.pool.add_spare();
        let mut afforded = Vec::with_capacity(chosen.len());
        for used in chosen {
            // One that cannot be read is left to the round, which leaves it alone from then on.
            let needed = if is_enough { 0 } else { self.needed_bytes(used.id).unwrap_or(0) };
            if needed <= room {
                room -= needed;
                afforded.push(used.id);
            }
        }
        if afforded.is_empty() {
            afforded.extend(chosen.first().map(|used| used.id));
        }
        afforded
    }

    fn needed_bytes(&self, id: SegmentId) -> Result<u64> {
        let Some(victim) = self.prove(id)? else { return Ok(0) };
        victim.ops().try_fold(0, |sum, op| {
            let op = op?;
            let bytes = op.head.len() as u64 + u64::from(Table::ENTRY_BYTES);
            Ok(if self.may_be_needed(&op) { sum + bytes } else { sum })
        })
    }

    /// One round: see the top of this file. Says whether it freed anything.
    fn round(
        &self,
        compactor: &mut Compactor,
        chosen: &[SegmentId],
        deletes: Deletes,
        who: Who,
    ) -> Result<bool> {
        // What is carried fills what it is carried to: so the last one may be left half done, and its deletes
        // wait for the next round. Where deletes are carried, which do not count as needed, more than one may be left.
        let limit = match deletes {
            Deletes::Oldest => self.pool.usual_bytes() as u64 / 16 * 28,
            Deletes::LookedUp => u64::MAX,
        };
        let victims = self.victims(chosen)?;
        if victims.is_empty() {
            return Ok(false);
        }
        self.fold(&victims)?;
        let needed = match deletes {
            Deletes::Oldest => None,
            Deletes::LookedUp => match self.needed_deletes(&victims, &self.others(chosen)) {
                Ok(needed) => Some(needed),
                // What a damaged segment holds is not known: as many deletes stay as without a look.
                Err(Error::Corrupt { .. }) => None,
                Err(error) => return Err(error),
            },
        };
        let (done, deletes) = self.carry(&victims, needed.as_ref(), limit)?;
        let end = self.sync_behind()?;
        let ids: Vec<SegmentId> = victims.iter().take(done).map(Victim::id).collect();
        self.drop_deletes(&deletes, &ids);
        // The victims go here: the round would wait for itself, and writers for what goes with them.
        let stay: Vec<_> =
            victims.into_iter().skip(done).map(|victim| (victim.id(), victim.buried)).collect();
        stay.into_iter().for_each(|(id, buried)| self.tail.lock().usage.give_back_buried(id, buried));
        compactor.drained = Some((ids, end));
        self.retire_drained(compactor, who)
    }

    /// The chosen segments, proven. One that is damaged is left alone from now on: it is for `verify` and
    /// `salvage`, and reading it says so too.
    fn victims(&self, chosen: &[SegmentId]) -> Result<Vec<Victim>> {
        let mut victims = Vec::with_capacity(chosen.len());
        for (at, &id) in chosen.iter().enumerate() {
            match self.victim(id) {
                Ok(Some(victim)) => {
                    // Upholds C3: of the others only those count that are done when this one is.
                    let is_oldest = self.is_oldest(id, &chosen[..at]);
                    victims.push(Victim { is_oldest, ..victim })
                }
                Ok(None) => {}
                Err(error) => {
                    if let Some(used) = self.tail.lock().usage.of(id) {
                        used.is_damaged = true;
                    }
                    return Err(error);
                }
            }
        }
        Ok(victims)
    }

    /// Whether all that is older than a segment, and does not go before it or with it, is needed: then no delete in
    /// it covers anything there.
    fn is_oldest(&self, id: SegmentId, chosen: &[SegmentId]) -> bool {
        let mut tail = self.tail.lock();
        let Some(order) = tail.usage.of(id).map(|used| used.order) else { return false };
        let older = tail.usage.iter().filter(|used| used.order < order && !chosen.contains(&used.id));
        older.fold(0, |dead, used| dead + used.dead) == 0
    }

    /// All other sealed segments that hold a version which is not the newest.
    fn others(&self, chosen: &[SegmentId]) -> Vec<SegmentId> {
        let tail = self.tail.lock();
        let others = tail.usage.iter().filter(|used| used.dead > 0 && used.sealed.is_some());
        others.map(|used| used.id).filter(|id| !chosen.contains(id)).collect()
    }

    /// Makes everything durable that was carried, then a frame that says so, behind the victims. Without it the
    /// newest group would hold what is proven by nothing and is nowhere else; and what holds the newest lsn and
    /// the counter is never retired.
    fn sync_behind(&self) -> Result<Lsn> {
        self.commit_quietly(&mut self.committer.lock())?;
        let (lsn, group) = self.with_room(room(frame_bytes(0, 0), 0), Need::Compaction, |tail| {
            self.append_idle(tail, true);
            (tail.last(), tail.group_of(tail.last()))
        })?;
        self.wait_behind_locks(lsn, group)?;
        Ok(lsn)
    }

    /// Strikes out what is drained and needed by no reader any more. Upholds C2 and C3.
    fn retire_drained(&self, compactor: &mut Compactor, who: Who) -> Result<bool> {
        let seen_by_all = self.snapshots.oldest(self.progress.durable());
        let mut freed = false;
        if let Some((segments, _)) = compactor.drained.as_ref().filter(|(_, end)| *end <= seen_by_all) {
            let listed = self.pool.retire(segments).map_err(|e| Error::io("writing STORE", e));
            self.check_list();
            for listed in listed? {
                self.counters.retired.fetch_add(1, Ordering::Relaxed);
                self.counters.retired_bytes.fetch_add(listed.bytes as u64, Ordering::Relaxed);
                events::retired(&self.dir, listed.segment.0, listed.bytes);
                self.tail.lock().usage.forget(listed.segment);
                if let Some(segment) = self.segments.remove(listed.segment) {
                    compactor.retired.push((listed, segment));
                }
            }
            compactor.drained = None;
            freed = true;
        }
        self.reclaim(compactor, who);
        Ok(freed)
    }

    /// Uses again, or removes, the files of retired segments that nobody reads any more.
    fn reclaim(&self, compactor: &mut Compactor, who: Who) {
        const TRIES: usize = 50;
        // What may be garbage and is not: spares in its place save writing zeros for others. None of it for who
        // needs the space itself.
        let (garbage, much) = self.garbage_and_much(if who == Who::InNeed { who } else { Who::Background });
        let room = much.saturating_sub(garbage);
        let mut free = Vec::new();
        for (listed, segment) in std::mem::take(&mut compactor.retired) {
            if segment.pins.pinned() > 0 {
                // A value points into it, and nothing else will. Removed, its bytes stay for as long as that value.
                self.pool.remove(listed);
                continue;
            }
            if self.options.entropy.is_seeded() && !self.options.background {
                // One thread, which is here: what an epoch still holds, nobody reads.
                free.push((listed, segment.file.clone()));
                continue;
            }
            let unread = (0..TRIES).try_fold(segment, |segment, _| match Arc::try_unwrap(segment) {
                Ok(Segment { file, .. }) => ControlFlow::Break(file),
                Err(read) => {
                    crossbeam_epoch::pin().flush();
                    thread::yield_now();
                    ControlFlow::Continue(read)
                }
            });
            match unread {
                ControlFlow::Break(file) => free.push((listed, file)),
                ControlFlow::Continue(read) if self.options.background => {
                    compactor.retired.push((listed, read));
                }
                // Without threads nobody comes back to it.
                ControlFlow::Continue(_) => self.pool.remove(listed),
            }
        }
        // A spare less is made by `provide` when it is missed.
        drop(self.pool.recycle(free, room));
        self.check_list();
    }

    /// Whether something waits for a reader to leave.
    pub fn compaction_waits(&self) -> bool {
        let compactor = self.compactor.lock();
        compactor.drained.is_some() || !compactor.retired.is_empty()
    }

    /// Seals the active segment, so that it can be compacted or linked as well.
    pub fn seal_active(&self) -> Result<()> {
        self.retire_active(&mut self.tail.lock());
        self.commit_quietly(&mut self.committer.lock())
    }

    /// For a write that found no spare: gives space back where the store takes too much, else makes one.
    ///
    /// Many may ask at once. One of them works; the others wait for that, and then look again: if each did a
    /// round of its own, the last would wait for all of them. None waits long, and none twice (`waits`): then the store takes more.
    pub fn make_room(&self, room: u32, need: Need, waits: bool) -> Result<()> {
        let may_compact = need != Need::Compaction && self.options.compaction;
        let gives_back = waits && may_compact && self.is_littered(Who::Writer);
        if gives_back && self.compact_for_room(room, need, Who::Writer)? {
            return Ok(());
        }
        if !self.options.background && need != Need::Compaction {
            self.refresh_index_if_due(false);
        }
        let provide = || {
            let provided = self.pool.provide(HEADER_BYTES + room, need);
            self.check_list();
            provided
        };
        match provide() {
            // The disk is full: what is no longer needed makes room.
            Err(Error::NoSpace { .. }) if may_compact => {
                if self.compact_for_room(room, need, Who::InNeed)? {
                    return Ok(());
                }
                // What was given back may be enough for one that is larger than those were.
                provide()
            }
            provided => provided,
        }
    }

    /// Whether there is room now, after a round if need be. Why a round gave nothing back is for whoever asks
    /// for compaction itself, unless nothing can be written any more.
    fn compact_for_room(&self, room: u32, need: Need, who: Who) -> Result<bool> {
        // On a full disk there is nothing else to wait for.
        let compactor = match who {
            Who::InNeed => Some(self.compactor.lock()),
            _ => self.compactor.try_lock_for(self.patience()),
        };
        let Some(mut compactor) = compactor else { return Ok(false) };
        while !self.has_room(room, need) {
            let freed = self.compact_once(&mut compactor, who);
            self.note_compaction(&freed);
            match freed {
                Err(error) if self.cause.get().is_some() => return Err(error),
                // With more to be had on a full disk.
                Ok(true) if who == Who::InNeed => {}
                _ => return Ok(self.has_room(room, need)),
            }
        }
        Ok(true)
    }

    fn has_room(&self, room: u32, need: Need) -> bool {
        let fits = self.tail.lock().active.as_ref().is_some_and(|active| active.fits(room));
        fits || self.pool.has_spare(HEADER_BYTES + room, need)
    }
}

/// How many of the first hold no more than `most` bytes that are needed, and few enough in all to be read at
/// once: at least one.
fn first_within(all: &[Used], most: u64) -> usize {
    let sums = all.iter().scan((0, 0), |(live, filled), used| {
        *live += used.live;
        *filled += used.filled;
        Some((*live, *filled))
    });
    sums.take_while(|&(live, filled)| live <= most && filled <= READ_AT_ONCE).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Db;
    use crate::keyspace::Keyspace;
    use crate::log::usage::Weight;
    use crate::op::Kind;
    use crate::options::{KeyspaceOptions, Options, Scope, Tokens};
    use crate::storage::{CallKind, Fault, SimDisk};
    use crate::types::{Location, Token};
    use std::io::ErrorKind;

    #[test]
    fn who_waited_for_a_round_of_another_does_none_of_its_own() {
        let options = Options::new().storage(SimDisk::new()).without_threads();
        let db = options.deterministic(1).segment_bytes(16 << 10).open("sim").unwrap();
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        let engine = &db.shared.engine;
        let mut n = 0u32;
        while !engine.is_littered(Who::Writer) || !engine.has_room(100, Need::Ordinary) {
            rows.put(Token::new(1).unwrap(), b"key", &[n as u8; 900]).unwrap();
            n += 1;
            assert!(n < 10_000, "garbage and room never met");
        }
        let retired = engine.counters.retired.load(Ordering::Relaxed);
        engine.make_room(100, Need::Ordinary, true).unwrap();
        assert_eq!(engine.counters.retired.load(Ordering::Relaxed), retired);
        // The same garbage is worth a round to one that finds no room.
        assert!(engine.compact_some(Who::Writer).unwrap());
    }

    /// Sealed, of the size of the store below, without anything needed.
    fn sealed(id: u32) -> Used {
        Used { filled: 10_000, sealed: Some(16 << 10), ..Used::new(SegmentId(id)) }
    }

    /// A store whose segments are said to be these.
    fn store_of(segments: &[Used]) -> Db {
        let options = Options::new().storage(SimDisk::new()).without_threads().deterministic(1);
        let db = options.segment_bytes(16 << 10).compaction(false).open("sim").unwrap();
        let mut tail = db.shared.engine.tail.lock();
        segments.iter().for_each(|&used| tail.usage.put_back(used));
        drop(tail);
        db
    }

    fn ids(chosen: &[Used]) -> Vec<u32> {
        chosen.iter().map(|used| used.id.0).collect()
    }

    #[test]
    fn how_much_may_be_garbage_is_a_share_of_what_is_needed_and_more_in_small_stores() {
        let limits = |live, filled| {
            let db = store_of(&[Used { live, filled, ..sealed(2) }]);
            let limit = |who| db.shared.engine.garbage_and_much(who);
            let (garbage, in_need) = limit(Who::InNeed);
            (garbage, [in_need, limit(Who::Writer).1, limit(Who::Background).1])
        };
        assert_eq!(limits(1_000_000, 1_500_000), (500_000, [0, 376_250, 430_000]));
        assert_eq!(limits(10_000, 15_000), (5_000, [0, 57_344, 65_536]), "four segments");
        let with_threads = Options::new().storage(SimDisk::new()).open("sim").unwrap();
        assert_eq!(with_threads.shared.engine.garbage_and_much(Who::Writer), (0, 64 << 20));
        assert_eq!(with_threads.shared.engine.garbage_and_much(Who::Background), (0, 32 << 20));

        let is_littered =
            |filled| store_of(&[Used { filled, ..sealed(2) }]).shared.engine.is_littered(Who::Background);
        assert_eq!([is_littered(65_536), is_littered(65_537)], [false, true]);
        let patience =
            |filled| store_of(&[Used { filled, ..sealed(2) }]).shared.engine.patience().as_millis();
        assert_eq!([0, 131_071, 131_072, 1 << 20].map(patience), [250, 250, 500, 1_000]);
    }

    #[test]
    fn segments_are_chosen_by_what_is_carried_for_what_comes_back() {
        let choose = |who, segments: &[Used]| ids(&store_of(segments).shared.engine.choose(who));
        let of = |id, live| Used { live, ..sealed(id) };
        let unsealed = Used { sealed: None, ..sealed(9) };
        let done = Used { is_damaged: true, ..sealed(8) };
        let small = Used { live: 1_000, sealed: Some(5_000), ..sealed(7) };
        // Of the others one is just worth it, and one is not.
        let some = [unsealed, done, of(6, 8_501), of(5, 8_500), small, of(4, 2_000), of(3, 0), of(2, 2_000)];
        // In the order of the log, but for the dearest.
        assert_eq!(choose(Who::InNeed, &some), [7, 4, 3, 2, 5]);
        assert_eq!(choose(Who::Background, &some), [], "too little garbage");
        // The dearest is not the one with the most in it.
        let cut_short = Used { live: 1_000, sealed: Some(2_000), filled: 2_000, ..sealed(3) };
        assert_eq!(choose(Who::InNeed, &[cut_short, of(2, 4_000)]), [2, 3]);
        // As many as fill two segments, or sixteen.
        let eight: Vec<Used> = (2..10).map(|id| Used { filled: 20_000, ..of(id, 8_192) }).collect();
        assert_eq!(choose(Who::InNeed, &eight), [2, 3, 4, 5, 6]);
        let many: Vec<Used> = (2..30).map(sealed).collect();
        assert_eq!(choose(Who::InNeed, &many).len(), ROUND);
        // Those that were cut short are made one, with garbage or without.
        let short = |count: u32, bytes| -> Vec<Used> {
            (2..2 + count)
                .map(|id| Used { live: 2_000, filled: 2_000, sealed: Some(bytes), ..sealed(id) })
                .collect()
        };
        let with_others = [&short(16, 4_095)[..], &[of(40, 0)]].concat();
        assert_eq!(choose(Who::Background, &with_others), (2..18).collect::<Vec<u32>>());
        assert_eq!(choose(Who::Background, &short(15, 4_095)), []);
        assert_eq!(choose(Who::Background, &short(16, 4_096)), []);
    }

    #[test]
    fn what_was_carried_is_looked_at_again_when_as_much_was_written() {
        let is_time = |live, filled, carried, appended| {
            let db = store_of(&[Used { live, filled, carried, ..sealed(2) }]);
            let mut compactor = Compactor::default();
            let mut ask = |appended| {
                db.shared.engine.appended_bytes.store(appended, Ordering::Relaxed);
                db.shared.engine.is_time_to_look(&mut compactor)
            };
            [ask(appended - 1), ask(appended), ask(2 * appended - 1), ask(2 * appended)]
        };
        let at_this_much = [false, true, false, true];
        assert_eq!(is_time(20_000, 30_000, 20_000, 80_000), at_this_much, "four times what was carried");
        assert_eq!(is_time(20_000, 100_000, 20_000, 100_000), at_this_much, "the whole log");
        assert_eq!(is_time(20_000, 30_000, 16_384, 1 << 30), [false; 4], "no more than a segment");
        assert_eq!(is_time(800_000, 800_000, 100_000, 1 << 30), [false; 4], "no more than an eighth");
        assert_eq!(is_time(800_000, 800_000, 100_001, 800_000), at_this_much);

        let of = |id, carried| Used { live: carried, carried, ..sealed(id) };
        let db = store_of(&[of(4, 9_000), of(2, 4_096), of(3, 4_097), Used { sealed: None, ..of(5, 9_000) }]);
        assert_eq!(ids(&db.shared.engine.choose_carried()), [4, 3]);
        let many: Vec<Used> = (2..30).map(|id| of(id, 9_000)).collect();
        assert_eq!(store_of(&many).shared.engine.choose_carried().len(), ROUND);
    }

    #[test]
    fn a_round_that_is_asked_for_takes_the_first_that_fit() {
        let of = |live, filled| Used { live, filled, ..sealed(2) };
        let all = [of(40, 50), of(60, 70), of(1, 1)];
        assert_eq!([10, 99, 100, 101].map(|most| first_within(&all, most)), [1, 1, 2, 3]);
        let large = [of(1, READ_AT_ONCE - 1), of(1, 1), of(1, 1)];
        assert_eq!(first_within(&large, 100), 2);
    }

    #[test]
    fn a_delete_may_go_where_no_older_segment_has_a_version_to_cover() {
        let db =
            store_of(&[sealed(2), Used { dead: 1, ..sealed(4) }, sealed(3), Used { dead: 1, ..sealed(5) }]);
        let is_oldest = |id, chosen: &[u32]| {
            let chosen: Vec<SegmentId> = chosen.iter().map(|&id| SegmentId(id)).collect();
            db.shared.engine.is_oldest(SegmentId(id), &chosen)
        };
        assert!(is_oldest(2, &[]) && is_oldest(4, &[]), "its own versions go with it");
        assert!(!is_oldest(3, &[]) && !is_oldest(3, &[2]) && !is_oldest(5, &[]));
        assert!(is_oldest(3, &[4]) && is_oldest(5, &[4]), "what is chosen goes too");
        assert!(!is_oldest(6, &[]), "it is gone");
    }

    #[test]
    fn all_of_which_something_may_come_back_is_chosen_when_it_is_asked_for() {
        let of = |id, live, carried| Used { live, carried, ..sealed(id) };
        let damaged = Used { is_damaged: true, ..sealed(7) };
        let all =
            [of(4, 9_374, 0), of(6, 0, 0), damaged, of(3, 9_375, 0), of(2, 10_000, 1), of(5, 10_000, 0)];
        let db = store_of(&[&all[..], &[Used { sealed: None, ..sealed(8) }]].concat());
        assert_eq!(ids(&db.shared.engine.choose_all()), [4, 6, 2], "in the order of the log");
    }

    /// A store in which nothing is compacted but by the test.
    fn store_on(disk: &SimDisk) -> (Db, Keyspace) {
        let db = without_threads(disk).compaction(false).open("sim").unwrap();
        let rows = external(&db);
        (db, rows)
    }

    fn external(db: &Db) -> Keyspace {
        db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
    }

    /// Puts so many keys of a name, and answers the segment, which holds nothing else.
    fn segment_of(db: &Db, name: u8, count: u8, bytes: usize) -> SegmentId {
        let engine = &db.shared.engine;
        engine.seal_active().unwrap();
        let rows = external(db);
        for n in 0..count {
            rows.put(Token::new(1).unwrap(), &[name, n], &vec![n; bytes]).unwrap();
        }
        let id = engine.tail.lock().active.as_ref().unwrap().segment.id;
        engine.seal_active().unwrap();
        id
    }

    fn used(disk: &SimDisk) -> u64 {
        disk.file_names().iter().map(|name| disk.read_file(name).unwrap().len() as u64).sum()
    }

    fn round(engine: &Engine, chosen: &[SegmentId], who: Who) -> bool {
        engine.round(&mut engine.compactor.lock(), chosen, Deletes::Oldest, who).unwrap()
    }

    #[test]
    fn what_is_needed_of_a_segment_is_counted() {
        let (db, _rows) = store_on(&SimDisk::new());
        let engine = &db.shared.engine;
        let id = segment_of(&db, b'a', 10, 900);
        let filled = engine.tail.lock().usage.get(id).unwrap().filled;
        let all = filled + 10 * u64::from(Table::ENTRY_BYTES);
        assert_eq!(engine.needed_bytes(id).unwrap(), all);
        segment_of(&db, b'a', 5, 900);
        assert_eq!(engine.needed_bytes(id).unwrap(), all / 2);
    }

    /// Where the spares are few it is counted what a round needs, or seen to it that there is one more.
    #[test]
    fn a_round_takes_what_fits_the_spares_where_there_may_be_no_more() {
        let disk = SimDisk::new();
        let (db, _rows) = store_on(&disk);
        let engine = &db.shared.engine;
        let few = || {
            while !engine.pool.is_low() {
                engine.pool.take(0, Need::Compaction).unwrap();
            }
        };
        let made = |live, filled| {
            let (_, before) = engine.pool.segments();
            let afforded = engine.affordable(&[Used { live, filled, ..sealed(1_000) }]);
            assert_eq!(afforded, [SegmentId(1_000)]);
            engine.pool.segments().1 - before
        };
        engine.pool.refill().unwrap();
        assert_eq!(made(1 << 30, 1 << 30), 0);
        few();
        let room = 2 * ((12 << 10) / 8 * 5);
        assert_eq!(engine.pool.room_at_hand(), room);
        assert_eq!(made(room / 5 * 4, 1 << 30), 0, "a guess");
        assert_eq!(made(room / 5 * 4 + 4, 1 << 30), 1, "no guess");
        few();
        let is_full = |is_full: bool| disk.set_budget(is_full.then(|| used(&disk)));
        is_full(true);
        assert!(!engine.pool.add_spare());
        is_full(false);
        assert_eq!(made(0, room), 0, "on a full disk it is certain");
        assert_eq!(made(0, room + 1), 1, "and no guess is good");

        // What is carried of the first two fills the spares to the last byte.
        let first = segment_of(&db, b'a', 12, 900);
        let probe = segment_of(&db, b'b', 1, 1_000);
        let needed = |id| engine.needed_bytes(id).unwrap();
        let rest = (room - needed(first) - (needed(probe) - 1_000)) as usize;
        let second = segment_of(&db, b'c', 1, rest);
        assert_eq!(needed(first) + needed(second), room);
        let more = [b'd', b'e'].map(|name| segment_of(&db, name, 12, 900));
        let afford = |chosen: &[SegmentId]| {
            let tail = engine.tail.lock();
            let chosen: Vec<Used> = chosen.iter().map(|id| *tail.usage.get(*id).unwrap()).collect();
            drop(tail);
            engine.affordable(&chosen)
        };
        engine.pool.refill().unwrap();
        assert_eq!(afford(&[first, more[0], more[1]]), [first, more[0], more[1]], "there are spares enough");
        few();
        is_full(true);
        assert!(!engine.pool.add_spare() && engine.pool.room_at_hand() == room);
        assert_eq!(afford(&[first, second, probe]), [first, second]);
        assert_eq!(afford(&[probe, first, second]), [probe, first]);
        while engine.pool.take(0, Need::Compaction).is_some() {}
        assert_eq!(afford(&[probe, first]), [probe], "the first is tried");
        assert_eq!(engine.affordable(&[]), []);
    }

    /// A frame that no spare holds would need a larger segment, for which there is no room.
    #[test]
    fn what_is_carried_at_once_fits_a_spare_of_a_full_disk() {
        let disk = SimDisk::new();
        let (db, _rows) = store_on(&disk);
        let engine = &db.shared.engine;
        let both = [b'a', b'b'].map(|name| segment_of(&db, name, 8, 900));
        take_spares(engine, Need::Ordinary);
        disk.set_budget(Some(used(&disk)));
        assert!(engine.needed_bytes(both[0]).unwrap() * 2 > 12 << 10);
        assert!(round(engine, &both, Who::InNeed));
        assert!(both.iter().all(|id| engine.segment(*id).is_none()));
    }

    #[test]
    fn where_deletes_are_looked_up_other_segments_are_read_that_may_hold_what_they_cover() {
        let (db, rows) = store_on(&SimDisk::new());
        let engine = &db.shared.engine;
        let dead = segment_of(&db, b'a', 2, 100);
        let needed = segment_of(&db, b'b', 2, 100);
        let also = segment_of(&db, b'a', 2, 100);
        for _ in 0..2 {
            rows.put(Token::new(1).unwrap(), b"a\0", b"value").unwrap();
        }
        assert_eq!(engine.others(&[]), [dead, also]);
        assert_eq!(engine.others(&[dead, needed]), [also]);
    }

    #[test]
    fn there_is_no_further_round_before_the_last_one_is_seen_by_all() {
        let (db, rows) = store_on(&SimDisk::new());
        let engine = &db.shared.engine;
        let fill = |name| segment_of(&db, name, 12, 900);
        let fill_twice = |name| [fill(name), fill(name)][0];
        let compact = || engine.compact_some(Who::InNeed).unwrap();
        let waits = || engine.compaction_waits();
        let before = db.last_lsn();
        assert!(!compact() && !waits() && db.last_lsn() == before, "there is nothing to be had");
        let first = fill_twice(b'a');
        let view = db.snapshot();
        assert!(!compact() && waits() && engine.segment(first).is_some());
        let second = fill_twice(b'b');
        let (before, stats) = (db.last_lsn(), db.stats());
        assert!(!compact() && db.last_lsn() == before, "a round while another waits");
        let asked = db.compact().unwrap();
        // With it that of the op which created the keyspace.
        assert_eq!((asked.segments, asked.bytes, asked.waiting), (0, 0, 2));
        assert!(engine.segment(second).is_some() && db.stats().retired_segments == stats.retired_segments);
        drop(view);
        assert!(compact() && !waits(), "both");
        for id in [first, second] {
            assert!(engine.segment(id).is_none() && engine.tail.lock().usage.get(id).is_none());
        }
        assert!(!compact(), "what is gone is no garbage");

        // What was drained goes, and there is nothing else.
        fill_twice(b'c');
        let view = db.snapshot();
        assert!(!compact() && waits());
        drop(view);
        assert!(compact() && !compact());
        fill_twice(b'c');
        let view = db.snapshot();
        assert!(!compact() && waits());
        drop(view);
        assert!(db.compact().unwrap().segments > 0 && !waits());

        // And what was asked for says how much that was.
        fill_twice(b'd');
        rows.put(Token::new(1).unwrap(), b"key", b"value").unwrap();
        let before = db.stats();
        let asked = db.compact().unwrap();
        let after = db.stats();
        assert!(asked.segments > 0 && asked.waiting == 0);
        assert_eq!(u64::from(asked.segments), after.retired_segments - before.retired_segments);
        assert_eq!(asked.bytes, u64::from(asked.segments) * (16 << 10));
    }

    #[test]
    fn a_store_that_may_not_be_written_is_not_compacted() {
        let disk = SimDisk::new();
        let (db, _rows) = store_on(&disk);
        segment_of(&db, b'a', 12, 900);
        segment_of(&db, b'a', 12, 900);
        let image = disk.kill();
        let read_only = Options::new().storage(image).read_only().open("sim").unwrap();
        let engine = &read_only.shared.engine;
        assert!(matches!(engine.compact_some(Who::InNeed), Err(Error::ReadOnly)));
        assert!(matches!(engine.compact_all(), Err(Error::ReadOnly)));
        let engine = &db.shared.engine;
        let view = db.snapshot();
        assert!(!engine.compact_some(Who::InNeed).unwrap() && engine.compaction_waits());
        drop(view);
        engine.poison(std::io::Error::other("a failed sync"));
        assert!(matches!(engine.compact_some(Who::InNeed), Err(Error::Poisoned { .. })));
        assert!(matches!(engine.compact_all(), Err(Error::Poisoned { .. })));
        assert!(engine.compaction_waits(), "what was drained is still there");
    }

    /// What supersedes something in a segment that goes may not be what nothing proves: damaged, it would be taken for a
    /// torn tail, and what it superseded would be gone.
    #[test]
    fn what_superseded_is_proven_before_the_segment_goes() {
        let disk = SimDisk::new();
        let (db, rows) = store_on(&disk);
        let engine = &db.shared.engine;
        // Nothing is carried, which would be synced before.
        let id = segment_of(&db, b'a', 1, 900);
        let submitted = rows.submit_put(Token::new(2).unwrap(), b"a\0", b"new").unwrap();
        assert!(round(engine, &[id], Who::Background) && engine.segment(id).is_none());
        drop(submitted);
        let read_only = Options::new().storage(disk.kill()).read_only().open("sim").unwrap();
        let value = external(&read_only).get(b"a\0").unwrap().expect("it was put, and put anew");
        assert_eq!(&*value, b"new");
    }

    /// One whose list was opened by its name: faults are planned by that.
    fn opened_again(disk: &SimDisk) -> (Db, Keyspace) {
        store_on(disk).0.close().unwrap();
        store_on(disk)
    }

    /// A list that could not be synced is known by nobody, whatever of it was being written.
    #[test]
    fn a_list_that_cannot_be_synced_ends_the_writing() {
        for gives_back in [false, true] {
            let failed = (0..)
                .take_while(|&sync| {
                    let disk = SimDisk::new();
                    let (db, rows) = opened_again(&disk);
                    let engine = &db.shared.engine;
                    let all: Vec<SegmentId> = (0..10).map(|_| segment_of(&db, b'a', 12, 900)).collect();
                    while gives_back && engine.pool.segments().1 < 4 {
                        assert!(engine.pool.add_spare());
                    }
                    disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other).on("STORE").nth(sync));
                    let done = match gives_back {
                        false => engine
                            .round(&mut engine.compactor.lock(), &all, Deletes::Oldest, Who::InNeed)
                            .map(drop),
                        true => engine.trim(),
                    };
                    let fired = disk.faults_fired() > 0;
                    assert!(!fired || engine.cause.get().is_some(), "sync {sync}: {done:?}");
                    assert!(!fired || rows.put(Token::new(1).unwrap(), b"key", b"value").is_err());
                    fired
                })
                .count();
            assert!(failed >= if gives_back { 2 } else { 4 }, "{failed}");
        }
    }

    #[test]
    fn a_spare_that_cannot_be_given_back_is_told() {
        let disk = SimDisk::new();
        let (db, _rows) = opened_again(&disk);
        let engine = &db.shared.engine;
        (0..4).for_each(|_| assert!(engine.pool.add_spare()));
        disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::Other).on("STORE"));
        assert!(matches!(engine.trim(), Err(Error::Io { .. })));
        assert!(engine.cause.get().is_none(), "nothing is unknown");
        engine.trim().unwrap();
        assert_eq!(engine.pool.segments().1, 3);
    }

    #[test]
    fn an_index_file_follows_a_compaction_without_threads() {
        let disk = SimDisk::new();
        let options = Options::new().storage(disk.clone()).without_threads().deterministic(1).index_every(1);
        let db = options.segment_bytes(16 << 10).compaction(false).open("sim").unwrap();
        external(&db).put(Token::new(1).unwrap(), b"key", b"value").unwrap();
        let is_indexed = || disk.file_names().iter().any(|name| name.starts_with("INDEX"));
        assert!(!is_indexed());
        db.compact().unwrap();
        assert!(is_indexed());
    }

    /// As many are spares afterwards as garbage might be, beside those that are always kept; for who needs the space
    /// itself, those alone.
    #[test]
    fn files_are_used_again_as_far_as_there_might_be_garbage() {
        for (who, spares) in [(Who::Background, 9), (Who::Writer, 9), (Who::InNeed, 6)] {
            let disk = SimDisk::new();
            let (db, _rows) = store_on(&disk);
            let engine = &db.shared.engine;
            let all: Vec<SegmentId> = (0..14).map(|_| segment_of(&db, b'a', 12, 900)).collect();
            let (garbage, _) = engine.garbage_and_much(who);
            assert!(round(engine, &all[1..13], who));
            let (left, _) = engine.garbage_and_much(who);
            assert!(left < garbage && (8_193..16_384).contains(&left), "{left}");
            assert_eq!(engine.pool.segments().1, spares, "{who:?}");
        }
    }

    /// An epoch that somebody stands in holds the memory of a segment back. Where there is one thread, and no clock but
    /// the test's, that is nobody who reads; elsewhere its file is not written before it is known.
    #[test]
    fn the_file_of_a_segment_is_used_again_once_nobody_reads_it() {
        let options = || Options::new().storage(SimDisk::new()).segment_bytes(16 << 10).compaction(false);
        let opened = [
            ("seeded", options().without_threads().deterministic(1)),
            ("without threads", options().without_threads()),
            ("with threads", options()),
            ("seeded, with threads", options().deterministic(1)),
        ];
        for (name, options) in opened {
            let disk = SimDisk::new();
            let db = options.storage(disk.clone()).open("sim").unwrap();
            let engine = &db.shared.engine;
            let [first, second, third] = [0; 3].map(|_| segment_of(&db, b'a', 1, 9_000));
            let is_there = |id: SegmentId| disk.file_names().contains(&crate::format::name::segment(id));
            let next = || engine.pool.block().next_segment;
            (0..4).for_each(|_| assert!(engine.pool.add_spare()));
            let before = next();
            let reader = crossbeam_epoch::pin();
            assert!(round(engine, &[first], Who::Background));
            let waits = engine.compaction_waits();
            match name {
                "seeded" => assert!(!waits && !is_there(first) && next() == before + 1, "used again"),
                "without threads" => assert!(!waits && !is_there(first) && next() == before, "removed"),
                _ => assert!(waits && is_there(first), "{name}: it waits"),
            }
            drop(reader);
            // Others, in tests beside this one, stand in their epochs only for a while.
            for tries in 0.. {
                if !engine.compaction_waits() {
                    break;
                }
                thread::yield_now();
                engine.compact_some(Who::Background).unwrap();
                assert!(tries < 10_000, "nobody comes back to it");
            }
            assert!(!is_there(first), "{name}");
            // Nothing is written where a value points to, and nothing waits for it.
            let value = external(&db).get(b"a\0").unwrap().unwrap();
            let before = next();
            assert!(round(engine, &[second, third], Who::Background));
            assert!(!is_there(third) && next() <= before + 1, "{name}");
            assert_eq!(*value, [0; 9_000]);
        }
    }

    /// So many segments without anything needed, of which nothing was given back; the first but for one key. And no room
    /// in the active segment, nor a spare that an ordinary write may take.
    fn dead_segments(db: &Db, count: u8) -> Vec<SegmentId> {
        let engine = &db.shared.engine;
        // With so much that is needed no garbage is too much.
        let (large, before) = (SegmentId(1_000), engine.counters.retired.load(Ordering::Relaxed));
        {
            let usage = &mut engine.tail.lock().usage;
            usage.begin(large);
            usage.fill(large, 1, 1 << 30);
            usage.add(Location { segment: large, offset: 0 }, Weight::new(Kind::Put, false, 1 << 30));
        }
        let dead = (0..count).map(|n| segment_of(db, b'a', if n == 0 { 12 } else { 11 }, 900)).collect();
        segment_of(db, b'a', 11, 900);
        engine.tail.lock().usage.forget(large);
        assert_eq!(engine.counters.retired.load(Ordering::Relaxed), before);
        take_spares(engine, Need::Ordinary);
        dead
    }

    fn take_spares(engine: &Engine, need: Need) {
        engine.seal_active().unwrap();
        while engine.pool.take(0, need).is_some() {}
        assert!(!engine.has_room(100, need));
    }

    fn without_threads(disk: &SimDisk) -> Options {
        Options::new().storage(disk.clone()).without_threads().deterministic(1).segment_bytes(16 << 10)
    }

    #[test]
    fn there_is_room_in_the_active_segment_or_a_spare() {
        let (db, rows) = store_on(&SimDisk::new());
        let engine = &db.shared.engine;
        engine.pool.refill().unwrap();
        engine.seal_active().unwrap();
        let has_room = |room: u32| engine.has_room(room, Need::Ordinary);
        assert!(has_room(12 << 10) && !has_room((12 << 10) + 1), "a spare");
        rows.put(Token::new(1).unwrap(), b"key", b"value").unwrap();
        while engine.pool.take(0, Need::Ordinary).is_some() {}
        assert!(has_room(11 << 10) && !has_room(12 << 10), "what is left of the active segment");
        assert!(engine.has_room(12 << 10, Need::Privileged), "the reserve");
        engine.seal_active().unwrap();
        assert!(!has_room(1));
    }

    #[test]
    fn a_write_without_room_waits_for_one_round_where_there_is_much_garbage() {
        let db = without_threads(&SimDisk::new()).open("sim").unwrap();
        let engine = &db.shared.engine;
        dead_segments(&db, 28);
        assert!(engine.is_littered(Who::Writer));
        let retired = || engine.counters.retired.load(Ordering::Relaxed);
        engine.make_room(100, Need::Ordinary, false).unwrap();
        assert!(engine.has_room(100, Need::Ordinary) && retired() == 0, "it waited before");
        take_spares(engine, Need::Compaction);
        engine.make_room(100, Need::Compaction, true).unwrap();
        assert!(
            engine.has_room(100, Need::Compaction) && retired() == 0,
            "compaction waits for none of its own"
        );
        take_spares(engine, Need::Ordinary);
        // Nothing that is used again is large enough for it.
        engine.make_room(20 << 10, Need::Ordinary, true).unwrap();
        assert!(engine.has_room(20 << 10, Need::Ordinary));
        assert_eq!(retired(), ROUND as u64);
        take_spares(engine, Need::Ordinary);
        engine.make_room(100, Need::Ordinary, true).unwrap();
        assert!(engine.has_room(100, Need::Ordinary) && retired() >= 28);
        // There is not so much garbage any more.
        let before = retired();
        take_spares(engine, Need::Ordinary);
        engine.make_room(100, Need::Ordinary, true).unwrap();
        assert!(engine.has_room(100, Need::Ordinary) && retired() == before);
    }

    #[test]
    fn on_a_full_disk_a_write_gets_what_can_be_given_back() {
        let disk = SimDisk::new();
        let db = without_threads(&disk).open("sim").unwrap();
        let engine = &db.shared.engine;
        let retired = || engine.counters.retired.load(Ordering::Relaxed);
        // One segment comes back for the one that the round takes: the rest of that is all there is.
        let one = dead_segments(&db, 1);
        disk.set_budget(Some(used(&disk)));
        engine.make_room(100, Need::Ordinary, false).unwrap();
        assert!(engine.has_room(100, Need::Ordinary) && engine.segment(one[0]).is_none());
        assert!(!engine.pool.has_spare(0, Need::Ordinary));
        // Nothing is left.
        db.compact().unwrap();
        take_spares(engine, Need::Ordinary);
        disk.set_budget(Some(used(&disk)));
        let before = retired();
        let refused = engine.make_room(100, Need::Ordinary, true);
        assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
        assert_eq!(retired(), before);
        // All there is, for one that is larger than each.
        disk.set_budget(None);
        let many = dead_segments(&db, 28);
        disk.set_budget(Some(used(&disk)));
        engine.make_room(20 << 10, Need::Ordinary, false).unwrap();
        assert!(engine.has_room(20 << 10, Need::Ordinary));
        assert!(many.iter().all(|id| engine.segment(*id).is_none()));
    }

    #[test]
    fn a_store_that_is_not_to_compact_does_not_for_a_write() {
        let disk = SimDisk::new();
        let (db, _rows) = store_on(&disk);
        let engine = &db.shared.engine;
        dead_segments(&db, 10);
        assert!(engine.is_littered(Who::Writer));
        engine.make_room(100, Need::Ordinary, true).unwrap();
        take_spares(engine, Need::Ordinary);
        disk.set_budget(Some(used(&disk)));
        assert!(matches!(engine.make_room(100, Need::Ordinary, true), Err(Error::NoSpace { .. })));
        assert_eq!(engine.counters.retired.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn why_a_round_for_a_write_failed_is_told_by_the_health() {
        let disk = SimDisk::new();
        let db = without_threads(&disk).open("sim").unwrap();
        let dead = dead_segments(&db, 8);
        db.close().unwrap();
        let file = crate::format::name::segment(dead[0]);
        let bytes = disk.read_file(&file).unwrap();
        let at = bytes.windows(900).position(|bytes| bytes == [11; 900]).unwrap();
        disk.flip_bit(&file, at as u64 + 100, 0);
        let db = without_threads(&disk).open("sim").unwrap();
        let engine = &db.shared.engine;
        take_spares(engine, Need::Ordinary);
        assert!(engine.is_littered(Who::Writer));
        engine.make_room(100, Need::Ordinary, true).unwrap();
        assert!(engine.has_room(100, Need::Ordinary) && engine.segment(dead[0]).is_some());
        assert!(matches!(&*engine.compaction_trouble.lock(), Some(Error::Corrupt { .. })));

        // But where nothing can be written any more, that is what the write is told.
        let disk = SimDisk::new();
        let db = without_threads(&disk).open("sim").unwrap();
        let engine = &db.shared.engine;
        dead_segments(&db, 8);
        disk.set_budget(Some(used(&disk)));
        disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other));
        let refused = engine.make_room(100, Need::Ordinary, false);
        assert!(engine.cause.get().is_some() && disk.faults_fired() == 1);
        assert!(matches!(refused, Err(Error::Poisoned { .. } | Error::Indeterminate { .. })), "{refused:?}");
    }

    #[test]
    fn what_is_due_without_threads_is_done_by_who_needs_a_spare() {
        let disk = SimDisk::new();
        let open = || without_threads(&disk).index_every(1).compaction(false).open("sim").unwrap();
        open().close().unwrap();
        let db = open();
        let engine = &db.shared.engine;
        let newest = || disk.file_names().into_iter().filter(|name| name.starts_with("INDEX")).max();
        let before = newest();
        segment_of(&db, b'a', 1, 100);
        take_spares(engine, Need::Compaction);
        engine.make_room(100, Need::Compaction, true).unwrap();
        assert_eq!(newest(), before, "not in the middle of a round");
        engine.make_room(100, Need::Ordinary, true).unwrap();
        assert_ne!(newest(), before);
        take_spares(engine, Need::Ordinary);
        disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other).on("STORE"));
        assert!(engine.make_room(100, Need::Ordinary, true).is_err());
        assert!(engine.cause.get().is_some(), "nobody knows what is listed");
    }

    /// What was superseded is not read, so it may rot; what may be needed is not let go of when it has.
    #[test]
    fn only_what_may_be_needed_has_to_verify() {
        for (rotten, is_needed) in [(&b"superseded"[..], false), (b"still there", true)] {
            let disk = SimDisk::new();
            let options = Options::new().storage(disk.clone()).without_threads().deterministic(1);
            let db = options.segment_bytes(16 << 10).compaction(false).open("sim").unwrap();
            let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
            let token = Token::new(1).unwrap();
            // The last of them was superseded first.
            for key in [&b"superseded"[..], b"too", b"still there", b"too", b"superseded"] {
                rows.put(token, key, b"value").unwrap();
            }
            let engine = &db.shared.engine;
            let segment = engine.tail.lock().active.as_ref().unwrap().segment.id;
            let file = crate::format::name::segment(segment);
            let bytes = disk.read_file(&file).unwrap();
            let at = bytes.windows(rotten.len()).position(|bytes| bytes == rotten).unwrap();
            disk.flip_bit(&file, at as u64, 0);
            engine.seal_active().unwrap();
            for _ in 0..2 {
                let round =
                    engine.round(&mut engine.compactor.lock(), &[segment], Deletes::Oldest, Who::Background);
                assert_eq!(round.is_err(), is_needed, "{round:?}");
                if is_needed {
                    let is_damaged = engine.tail.lock().usage.of(segment).unwrap().is_damaged;
                    assert!(is_damaged && engine.segment(segment).is_some(), "left alone");
                } else {
                    assert!(engine.segment(segment).is_none());
                    assert_eq!(&*rows.get(b"still there").unwrap().unwrap(), b"value");
                    break;
                }
            }
        }
    }

    /// A round may end within a victim. The next one passes over the same ops.
    #[test]
    fn what_was_superseded_is_known_to_the_next_round_as_well() {
        let options = Options::new().storage(SimDisk::new()).without_threads().deterministic(1);
        let db = options.segment_bytes(16 << 10).compaction(false).open("sim").unwrap();
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        let engine = &db.shared.engine;
        let mut segments = Vec::new();
        for part in 0..4 {
            for n in 0..20u8 {
                for _ in 0..1 + n % 5 / 4 {
                    rows.put(Token::new(1).unwrap(), &[part, n], &[7; 400]).unwrap();
                }
            }
            segments.push(engine.tail.lock().active.as_ref().unwrap().segment.id);
            engine.seal_active().unwrap();
        }
        let buried = |id| {
            let mut tail = engine.tail.lock();
            let taken = tail.usage.take_buried(id);
            tail.usage.give_back_buried(id, taken.clone());
            taken
        };
        let before: Vec<_> = segments.iter().map(|&id| buried(id)).collect();
        assert!(before.iter().all(|buried| buried.len() == 4), "{before:?}");
        engine.round(&mut engine.compactor.lock(), &segments, Deletes::Oldest, Who::Background).unwrap();
        let stay: Vec<_> =
            segments.iter().zip(before).filter(|(id, _)| engine.segment(**id).is_some()).collect();
        assert!(!stay.is_empty() && stay.len() < segments.len(), "the round ended within: {stay:?}");
        for (&id, before) in stay {
            let after = buried(id);
            assert!(before.iter().all(|offset| after.contains(offset)));
            // What was carried is an older version here now, which a delete elsewhere covers.
            let used = *engine.tail.lock().usage.get(id).unwrap();
            assert_eq!((used.keys + used.dead, used.live > 0), (24, used.keys > 0), "{used:?}");
        }
    }

    /// Between the sync of the op that creates a keyspace and its place among the others, a round of another thread
    /// took that op for an old counter and dropped it: the keyspace was gone at the next open, or the store damaged.
    #[test]
    fn the_op_of_a_keyspace_that_is_being_created_is_carried() {
        let disk = SimDisk::new();
        let open = |seed| {
            let options = Options::new().storage(disk.clone()).without_threads().deterministic(seed);
            options.segment_bytes(16 << 10).open("sim").unwrap()
        };
        let db = open(1);
        let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
        jobs.lease(b"job").acquire().unwrap().release().unwrap();
        db.keyspace("created", KeyspaceOptions::new()).unwrap();
        let keyspaces = &db.shared.engine.keyspaces;
        let created = keyspaces.write().pop().unwrap();
        assert!(db.compact().unwrap().segments > 0);
        keyspaces.write().push(created);
        let created = db.keyspace("created", KeyspaceOptions::new()).unwrap();
        let lease = created.lease(b"key").acquire().unwrap();
        created.put(lease.token(), b"key", b"value").unwrap();
        drop((lease, jobs, created));
        db.close().unwrap();
        let created = open(2).open_keyspace("created").unwrap().unwrap();
        assert_eq!(&*created.get(b"key").unwrap().unwrap(), b"value");
    }

    /// Carried releases counted as garbage, so that where a lease held the marks of many fences back, each round carried
    /// what the one before had carried, for ever.
    #[test]
    fn compaction_comes_to_an_end_where_marks_and_releases_must_stay() {
        let db = store_of(&[]);
        let engine = &db.shared.engine;
        let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
        let held = jobs.lease(b"held").acquire().unwrap();
        for n in 0..5_000u32 {
            jobs.lease(&n.to_be_bytes()).acquire().unwrap().release().unwrap();
        }
        // Of two in a row one may be a look at what was carried that finds nothing sealed.
        let round = || engine.compact_some(Who::Background).unwrap();
        let rounds = (0..200).take_while(|_| round() || round()).count();
        assert!((5..100).contains(&rounds), "{rounds} rounds, {:?}", db.stats());
        assert!(!engine.is_littered(Who::Background), "what is gone is no garbage");
        held.release().unwrap();
    }

    #[test]
    fn what_is_carried_again_counts_once_though_its_segment_waits_for_a_reader() {
        let db = store_of(&[]);
        let engine = &db.shared.engine;
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        let token = Token::new(1).unwrap();
        let round = || {
            let id = engine.tail.lock().active.as_ref().unwrap().segment.id;
            engine.seal_active().unwrap();
            engine.round(&mut engine.compactor.lock(), &[id], Deletes::Oldest, Who::Background).unwrap();
            engine.tail.lock().usage.carried()
        };
        for n in 0..50u8 {
            rows.raise(token, &[n]).unwrap();
        }
        let once = round();
        let view = db.snapshot();
        rows.put(token, b"key", b"value").unwrap();
        let twice = round();
        assert!(once > 50 * 10 && engine.compaction_waits());
        assert!((once..once + 50).contains(&twice), "{once}, then {twice}");
        drop(view);
    }

    #[test]
    fn a_delete_goes_in_the_oldest_segment_or_where_a_look_finds_nothing_that_it_covers() {
        for deletes in [Deletes::Oldest, Deletes::LookedUp] {
            let db = store_of(&[]);
            let engine = &db.shared.engine;
            let options = KeyspaceOptions::new().tokens(Tokens::External).scope(Scope::Prefix(b'/'));
            let rows = db.keyspace("rows", options).unwrap();
            let token = Token::new(1).unwrap();
            let seal = || {
                let id = engine.tail.lock().active.as_ref().unwrap().segment.id;
                engine.seal_active().unwrap();
                id
            };
            rows.put(token, b"other", b"value").unwrap();
            let first = seal();
            rows.put(token, b"gone", b"value").unwrap();
            rows.delete(token, b"gone").unwrap();
            let second = seal();
            // An older version in the first, which no delete covers.
            rows.put(token, b"other", b"value").unwrap();
            let third = seal();
            let chosen = if deletes == Deletes::Oldest { vec![first, second, third] } else { vec![second] };
            engine.round(&mut engine.compactor.lock(), &chosen, deletes, Who::Background).unwrap();
            assert_eq!(engine.counters.dropped.load(Ordering::Relaxed), 1, "{deletes:?}");
        }
        // Alone in its round, and perhaps left half done, a segment lets its deletes go all the same.
        let db = store_of(&[]);
        let options = KeyspaceOptions::new().tokens(Tokens::External).scope(Scope::Prefix(b'/'));
        let rows = db.keyspace("rows", options).unwrap();
        rows.put(Token::new(1).unwrap(), b"gone", b"value").unwrap();
        rows.delete(Token::new(1).unwrap(), b"gone").unwrap();
        let engine = &db.shared.engine;
        let id = engine.tail.lock().active.as_ref().unwrap().segment.id;
        engine.seal_active().unwrap();
        assert!(round(engine, &[id], Who::Background));
        assert_eq!(engine.counters.dropped.load(Ordering::Relaxed), 1);
    }

    /// A scan counted 47 bytes more than an index file in one image of a campaign: the newest state of a fence was
    /// folded and gone with its segment, and an older one, carried once while its lease was held, still there.
    #[test]
    fn what_a_scan_finds_under_a_folded_floor_counts_until_its_segment_goes() {
        let disk = SimDisk::new();
        let open = |disk: &SimDisk| {
            let options = Options::new().storage(disk.clone()).without_threads().deterministic(1);
            options.segment_bytes(16 << 10).index_every(1).compaction(false).open("sim").unwrap()
        };
        let active = |db: &Db| db.shared.engine.tail.lock().active.as_ref().unwrap().segment.id;
        let round = |db: &Db, segment| {
            let engine = &db.shared.engine;
            engine.seal_active().unwrap();
            engine.round(&mut engine.compactor.lock(), &[segment], Deletes::Oldest, Who::Background).unwrap();
        };
        let db = open(&disk);
        let rows = db.keyspace("rows", KeyspaceOptions::new()).unwrap();
        let held = rows.lease(b"name").acquire().unwrap();
        round(&db, active(&db));
        let older = active(&db);
        db.shared.engine.seal_active().unwrap();
        held.release().unwrap();
        rows.lease(b"name").acquire().unwrap().release().unwrap();
        let newer = active(&db);
        assert_ne!(older, newer);
        db.close().unwrap();
        let db = open(&disk);
        round(&db, newer);
        let floor = db.keyspace("rows", KeyspaceOptions::new()).unwrap().floor().unwrap();
        assert!(floor.is_folded && floor.mark.get() == 2, "{floor:?}");

        let image = disk.kill();
        let unindexed = image.kill();
        let names = unindexed.file_names();
        names.iter().filter(|name| name.starts_with("INDEX")).for_each(|name| unindexed.remove_file(name));
        let (by_index, by_scan) = (open(&image), open(&unindexed));
        assert!(by_index.report().warnings.is_empty() && !by_scan.report().warnings.is_empty());
        let live = |db: &Db| db.stats().live_bytes;
        assert_eq!(live(&by_scan), live(&by_index));
        for db in [&by_index, &by_scan] {
            round(db, older);
        }
        assert_eq!(live(&by_scan), live(&by_index));
    }

    /// A round that found no room in its middle had let go of deletes already; the next one carried none of them, and
    /// gave their segment back, while what they cover was still there.
    #[test]
    fn a_round_that_fails_keeps_the_deletes_it_had_let_go() {
        let disk = SimDisk::new();
        let open = |disk: &SimDisk, seed| {
            let options = Options::new().storage(disk.clone()).without_threads().deterministic(seed);
            let db = options.segment_bytes(16 << 10).compaction(false).open("sim").unwrap();
            let options = KeyspaceOptions::new().tokens(Tokens::External).scope(Scope::Prefix(b'/'));
            let rows = db.keyspace("rows", options).unwrap();
            (db, rows)
        };
        let token = Token::new(1).unwrap();
        let (db, rows) = open(&disk, 1);
        let engine = &db.shared.engine;
        let sealed = || {
            let id = engine.tail.lock().active.as_ref().unwrap().segment.id;
            engine.seal_active().unwrap();
            id
        };
        let keys: Vec<[u8; 3]> = (0..200).map(|n| [b'7', b'/', n]).collect();
        for key in &keys {
            rows.put(token, key, b"before").unwrap();
        }
        let covered = sealed();
        for key in &keys {
            rows.delete(token, key).unwrap();
        }
        let deletes = sealed();
        let mut chosen = vec![covered, deletes];
        for n in 0..6u8 {
            for m in 0..12 {
                rows.put(token, &[b'8', b'/', n, m], &[7; 900]).unwrap();
            }
            chosen.push(sealed());
        }
        let used = |name: &String| disk.read_file(name).unwrap().len() as u64;
        disk.set_budget(Some(disk.file_names().iter().map(used).sum()));
        let round = |chosen: &[SegmentId]| {
            engine.round(&mut engine.compactor.lock(), chosen, Deletes::LookedUp, Who::InNeed)
        };
        let failed = round(&chosen);
        assert!(matches!(failed, Err(Error::NoSpace { .. })), "{failed:?}");
        disk.set_budget(None);
        assert!(round(&[deletes]).unwrap());
        let image = disk.kill();
        let (db, rows) = open(&image, 2);
        assert_eq!(rows.prefix(b"7/").count(), 0);
        // Once what they cover goes as well, they do.
        db.compact().unwrap();
        assert_eq!(db.stats().dropped_deletes, 200);
        assert_eq!(open(&image.kill(), 3).1.prefix(b"7/").count(), 0);
    }

    /// A write that was waiting for a round of somebody else when the store was closed made a spare afterwards, and
    /// wrote its list over that of whoever had the directory by then.
    #[test]
    fn who_comes_too_late_for_a_close_touches_nothing() {
        let disk = SimDisk::new();
        let open = |disk: &SimDisk, seed| {
            let options = Options::new().storage(disk.clone()).without_threads().deterministic(seed);
            let db = options.segment_bytes(16 << 10).open("sim").unwrap();
            let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
            (db, rows)
        };
        let token = Token::new(1).unwrap();
        let (db, rows) = open(&disk, 1);
        for n in 0..40u8 {
            rows.put(token, &[n % 3], &[7; 900]).unwrap();
        }
        let engine = db.shared.engine.clone();
        let sealed = engine.tail.lock().usage.iter().find(|used| used.sealed.is_some()).unwrap().id;
        db.close().unwrap();
        let (db, rows) = open(&disk, 2);
        rows.put(token, b"key", b"acknowledged").unwrap();
        let files = || -> Vec<_> {
            disk.file_names().into_iter().map(|name| (disk.read_file(&name), name)).collect()
        };
        let before = files();
        // Each as it would go on behind a look whether the store is open.
        let late = [
            engine.make_room(20 << 10, Need::Ordinary, false).err(),
            engine.pool.refill().err().or_else(|| engine.pool.trim().err().map(|e| Error::io("", e))),
            engine.pool.retire(&[sealed]).err().map(|e| Error::io("", e)),
            engine.pool.note_index(Lsn::new(1)).err().map(|e| Error::io("", e)),
        ];
        assert!(files() == before, "{late:?}");
        let (_db, rows) = open(&disk.kill(), 3);
        assert_eq!(&*rows.get(b"key").unwrap().expect("it was acknowledged"), b"acknowledged");
        drop(db);
    }
}
