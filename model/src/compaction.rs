//! What is dropped, and what is carried on: marks under a floor, ops of drained segments.

use crate::actions::{Step, went};
use crate::mistakes::Mistake;
use crate::rules::{Answer, Model, Source};
use crate::state::{FENCES, Kind, Op, Own, PLACES, State};

impl Model {
    // Folding.

    /// An outer keyspace folds only below what its user states: here, below the newest token of its source.
    pub(crate) fn is_source_ready_to_fold(&self, s: &State, space: usize, token: u8) -> bool {
        self.source(space) == Source::Store || token < s.issued || self.is(Mistake::ExternalTokensFoldFreely)
    }

    pub(crate) fn is_foldable(&self, s: &State, fence: usize) -> bool {
        s.appended.own[fence].mark != 0 && !self.holds_value(fence, s.ops()) && !s.is_taken(fence)
    }

    /// To exactly the largest mark it replaces, and below every grant of the keyspace that counts.
    pub(crate) fn fold(&self, mut s: State, space: usize, token: u8) -> Step {
        let fences = || self.fences().filter(|&fence| self.space(fence) == space);
        let replaces =
            fences().any(|fence| self.is_foldable(&s, fence) && s.appended.own[fence].mark == token);
        let is_below =
            |grants: &[u8; FENCES]| fences().all(|fence| grants[fence] == 0 || token < grants[fence]);
        let is_below_live = is_below(&s.live) || self.is(Mistake::FoldsAboveALiveLease);
        let is_below_kept = is_below(&s.kept) || self.is(Mistake::FoldsAboveAGraceHolder);
        let is_allowed = replaces && is_below_live && is_below_kept && is_below(&s.pending);
        if !is_allowed || token <= s.appended.folded[space] || s.needs_floor(space) {
            return Ok(None);
        }
        let own = Own { lsn: s.next, mark: token, ..Own::default() };
        match self.append(&mut s, Kind::Folded, space, own) {
            Some(()) => went(s, Answer::Done),
            None => Ok(None),
        }
    }

    pub(crate) fn forget(&self, mut s: State, fence: usize) -> Step {
        let own = s.appended.own[fence];
        let is_durable = own == s.published.own[fence];
        let floors = if self.is(Mistake::FoldsBeforeTheFloorIsDurable) { &s.appended } else { &s.published };
        if !self.is_foldable(&s, fence) || !is_durable || own.mark > floors.folded[self.space(fence)] {
            return Ok(None);
        }
        s.appended.own[fence] = Own::default();
        s.published.own[fence] = Own::default();
        went(s, Answer::Done)
    }

    // Segments.

    /// Up to which mark a keyspace has folded, as far as compaction may rely on it.
    pub fn folded(&self, s: &State, space: usize) -> u8 {
        match self.is(Mistake::FoldsBeforeTheFloorIsDurable) {
            true => s.appended.folded[space],
            false => {
                let floors = s.durable_ops().iter().filter(|op| op.is(Kind::Folded, space));
                floors.map(|op| op.own.mark).max().unwrap_or(0)
            }
        }
    }

    /// As what an op of a sealed segment must go on, if it must; `None`: it is dead. Rests on what is
    /// durable, since what is not may yet be lost.
    pub fn needed_as(&self, s: &State, at: usize) -> Option<Kind> {
        let (op, of) = (&s.log[at], s.log[at].of as usize);
        let durable = s.durable_ops();
        if op.is_floor() {
            let newer = durable.iter().any(|other| other.is(op.kind, of) && other.own.mark > op.own.mark);
            return (!newer).then_some(op.kind);
        }
        let elsewhere = |wanted: &dyn Fn(&Op) -> bool| {
            s.ops().iter().any(|other| other.of == op.of && other.segment != op.segment && wanted(other))
        };
        if op.kind == Kind::Release {
            let is_named = elsewhere(&|other| other.kind == Kind::Grant && other.own.mark == op.own.mark);
            return is_named.then_some(Kind::Release);
        }
        let is_newest_version = op.is_version() && self.version(of, durable) / 2 == op.own.lsn;
        if is_newest_version && op.kind == Kind::Put {
            return Some(Kind::Put);
        }
        let hides_older = is_newest_version
            && !self.is(Mistake::TombstoneDroppedEarly)
            && match self.is(Mistake::TombstoneIgnoresCopiesOnTheirWay) {
                false => elsewhere(&|other| other.is_version() && other.own.lsn < op.own.lsn),
                true => durable.iter().any(|other| {
                    other.of == op.of
                        && other.segment != op.segment
                        && other.is_version()
                        && other.own.lsn < op.own.lsn
                }),
            };
        if hides_older {
            return Some(Kind::Delete);
        }
        if op.kind == Kind::Grant && self.is_unreleased(s, op) {
            return Some(if self.is(Mistake::UnreleasedGrantBecomesAMark) {
                Kind::Mark
            } else {
                Kind::Grant
            });
        }
        let newest = durable.iter().filter(|other| other.sets_fence() && other.of == op.of);
        let is_state = newest.map(|other| other.own.lsn).max() == Some(op.own.lsn);
        let is_folded = op.own.mark <= self.folded(s, self.space(of));
        let goes_with_value = op.kind == Kind::Delete && self.is(Mistake::MarkGoesWithItsValue);
        (is_state && !is_folded && !goes_with_value).then_some(Kind::Mark)
    }

    /// Whether the next open has to keep the fence of this grant for its holder.
    fn is_unreleased(&self, s: &State, grant: &Op) -> bool {
        let durable = s.durable_ops();
        let token = grant.own.mark;
        let is_over = durable.iter().any(|op| {
            op.of == grant.of && op.own.mark == token && op.kind == Kind::Release
                || op.of == grant.of && op.sets_fence() && op.own.mark > token
        });
        let of = grant.of as usize;
        self.bounds.grace && grant.life == s.life && !is_over && !self.is_fenced(&s.published, of, token)
    }

    /// Whether every op of a segment is dead, or stands durably in another one.
    pub fn is_drained(&self, s: &State, segment: u8) -> bool {
        let copies = if self.is(Mistake::RetiresBeforeCopiesAreDurable) { s.ops() } else { s.durable_ops() };
        let carried = |kind: Kind, op: &Op| {
            copies.iter().any(|copy| {
                copy.segment != segment && copy.kind == kind && copy.of == op.of && copy.own.lsn == op.own.lsn
                    || self.is(Mistake::MovedOpGetsANewLsn) && copy.moved && copy.of == op.of
            })
        };
        let mut ops = s.ops().iter().enumerate().filter(|(_, op)| op.segment == segment);
        ops.all(|(at, op)| self.needed_as(s, at).is_none_or(|kind| carried(kind, op)))
    }

    pub(crate) fn carry(&self, mut s: State, at: usize) -> Step {
        let op = s.log[at];
        let is_sealed = op.segment < s.segment;
        let is_carried = |copy: &Op| {
            copy.segment > op.segment && copy.moved && copy.of == op.of && copy.own.lsn == op.own.lsn
        };
        if !is_sealed || s.moves >= self.bounds.moves || s.ops().iter().any(is_carried) {
            return Ok(None);
        }
        let Some(kind) = self.needed_as(&s, at) else { return Ok(None) };
        if s.len as usize >= PLACES {
            return Ok(None);
        }
        let mut copy = Op { kind, segment: s.segment, moved: true, ..op };
        if self.is(Mistake::MovedOpGetsANewLsn) {
            copy.own.lsn = s.next;
            s.next += 1;
        }
        if kind == Kind::Mark && self.is(Mistake::OpForgottenOnCompaction) {
            (copy.own.op, copy.own.op_lsn) = (0, 0);
        }
        if kind == Kind::Mark && self.is(Mistake::PredecessorForgottenOnCompaction) {
            (copy.own.was, copy.own.was_op) = (0, 0);
        }
        s.log[s.len as usize] = copy;
        s.len += 1;
        s.moves += 1;
        went(s, Answer::Done)
    }

    pub(crate) fn retire(&self, mut s: State, segment: u8) -> Step {
        let last = s.ops().iter().rposition(|op| op.segment == segment).map(|at| s.log[at].own.lsn);
        let op_by_op = self.is(Mistake::RetiresOpByOp);
        let is_here = |op: &Op| op.segment == segment && (!op_by_op || Some(op.own.lsn) == last);
        let synced = s.durable_ops().iter().filter(|op| is_here(op)).count();
        if synced == 0
            || synced != s.ops().iter().filter(|op| is_here(op)).count()
            || !self.is_drained(&s, segment)
        {
            return Ok(None);
        }
        let mut left = [Op::default(); PLACES];
        let kept = s.ops().iter().filter(|op| !is_here(op));
        left.iter_mut().zip(kept).for_each(|(place, op)| *place = *op);
        let visible = s.visible_ops().iter().filter(|op| is_here(op)).count() as u8;
        s.log = left;
        s.len -= synced as u8;
        s.durable -= synced as u8;
        s.visible -= visible;
        went(s, Answer::Done)
    }
}
