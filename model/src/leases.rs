//! Leases: granted, handed out, over.

use crate::actions::{Step, went};
use crate::mistakes::{
    Mistake, NOT_BROKEN, REVIVED, TOKEN_FELL, TOKEN_TWICE, TOO_MANY_SLOTS, TWO_HOLDERS, Violation,
};
use crate::rules::{Answer, Model};
use crate::state::{FENCES, HANDED, Kind, Marks, Op, Own, State};

impl Model {
    pub(crate) fn grant(&self, mut s: State, fence: usize) -> Step {
        if s.grants >= self.bounds.grants {
            return Ok(None);
        }
        let own = s.appended.own[fence];
        if self.is(Mistake::ReleasedTokenIsGrantedAgain) && s.has(fence, own.mark, HANDED) {
            self.hand_out(&mut s, fence, own.mark)?;
            return went(s, Answer::Granted(own.mark));
        }
        let token = s.counter + 1;
        let lsn = s.next;
        let Some(()) = self.append(&mut s, Kind::Grant, fence, self.admit(&own, token, 0, lsn)) else {
            return Ok(None);
        };
        s.counter = token;
        s.grants += 1;
        if self.is(Mistake::SlotsShareTheMarkOfTheirKey) {
            let own = s.appended.own[fence];
            s.appended.own = [own; FENCES];
        }
        match self.is(Mistake::HandsOutBeforeDurable) {
            true => self.hand_out(&mut s, fence, token)?,
            false => s.pending[fence] = token,
        }
        went(s, Answer::Granted(token))
    }

    pub(crate) fn acquire_slot(&self, s: &State, slots: usize) -> Step {
        let counted = if self.is(Mistake::SlotsAboveNAreNotCounted) { slots } else { FENCES };
        let taken = self.fences().take(counted).filter(|&fence| s.is_taken(fence)).count();
        let free = self.fences().take(slots).find(|&fence| !s.is_taken(fence));
        match free {
            Some(fence) if taken < slots => {
                if self.fences().filter(|&fence| s.is_taken(fence)).count() >= slots {
                    return Err(TOO_MANY_SLOTS);
                }
                self.grant(*s, fence)
            }
            _ => went(*s, Answer::Held),
        }
    }

    pub(crate) fn hand_out(&self, s: &mut State, fence: usize, token: u8) -> Result<(), Violation> {
        if s.is_handed_out(token) {
            return Err(TOKEN_TWICE);
        }
        if s.newest_handed_out(fence) > token {
            return Err(TOKEN_FELL);
        }
        s.told[fence][token as usize] |= HANDED;
        s.live[fence] = token;
        Ok(())
    }

    pub(crate) fn release(&self, mut s: State, fence: usize) -> Step {
        let token = std::mem::take(&mut s.live[fence]);
        let own = Own { lsn: s.next, mark: token, ..Own::default() };
        match self.append(&mut s, Kind::Release, fence, own) {
            Some(()) => went(s, Answer::Done),
            None => Ok(None),
        }
    }

    pub(crate) fn expire(&self, mut s: State, fence: usize) -> Step {
        let token = std::mem::take(&mut s.live[fence]);
        if self.is(Mistake::ExpiryRaisesTheMark) {
            for marks in [&mut s.appended, &mut s.published] {
                marks.own[fence].mark = marks.own[fence].mark.max(token + 1);
            }
        }
        if self.is(Mistake::TakeOverLeavesTheOldGrant) {
            s.stray[fence] = token;
        }
        went(s, Answer::Done)
    }

    pub(crate) fn renew(&self, s: &State, fence: usize) -> Step {
        match s.live[fence] {
            0 => Err(REVIVED),
            _ => Err(TWO_HOLDERS),
        }
    }

    pub(crate) fn break_lease(&self, mut s: State, fence: usize) -> Step {
        let token = s.counter + 1;
        let broken = s.live[fence].max(s.kept[fence]);
        let own = match self.is(Mistake::BreakRaisesNoMark) {
            true => s.appended.own[fence],
            false => self.admit(&s.appended.own[fence], token, 0, s.next),
        };
        let own = Own { lsn: s.next, ..own };
        let Some(()) = self.append(&mut s, Kind::Mark, fence, own) else { return Ok(None) };
        s.counter = token;
        (s.live[fence], s.kept[fence]) = (0, 0);
        if !self.is_fenced(&s.appended, fence, broken) {
            return Err(NOT_BROKEN);
        }
        went(s, Answer::Done)
    }

    /// A mark that has passed a token ends its lease, and takes the fence from a holder in grace.
    pub(crate) fn end_below(&self, s: &mut State, fence: usize, token: u8) {
        if self.is(Mistake::RaiseLeavesLeasesLive) {
            return;
        }
        for each in [&mut s.live[fence], &mut s.pending[fence], &mut s.kept[fence]] {
            if *each < token {
                *each = 0;
            }
        }
    }

    /// The grant of the incarnation just before that an open keeps a fence for.
    pub fn kept(&self, ops: &[Op], marks: &Marks, fence: usize, before: u8) -> u8 {
        if !self.bounds.grace {
            return 0;
        }
        let grants = ops.iter().filter(|op| op.is(Kind::Grant, fence));
        let Some(newest) = grants.max_by_key(|op| op.own.mark) else { return 0 };
        let token = newest.own.mark;
        let is_released = ops.iter().any(|op| op.is(Kind::Release, fence) && op.own.mark == token);
        let is_kept = newest.life == before && !is_released && !self.is_fenced(marks, fence, token);
        if is_kept { token } else { 0 }
    }
}
