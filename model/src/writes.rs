//! Writes and raises, admitted or refused.

use crate::actions::{Step, went};
use crate::mistakes::{
    BEHIND_GRANT, BELOW_SEEN, LATE_WRITE, LIE, LOST_TOKEN, Mistake, OP_TWICE, STRANGE_TOKEN, Violation,
};
use crate::rules::{Answer, Intent, LastOperation, Model, Source};
use crate::state::{CARRIED, HANDED, Kind, LOST, Own, State};

impl Model {
    pub(crate) fn write(&self, s: &State, fence: usize, token: u8, op: u8, kind: Kind) -> Step {
        let intent = Intent::Write { op };
        if kind == Kind::Delete && !self.holds_value(fence, s.ops()) {
            return Ok(None);
        }
        if let Some(refusal) = self.judge(s, &s.appended, fence, token, intent) {
            return self.refuse(s, fence, token, intent, refusal);
        }
        self.check_admitted(s, fence, token, op)?;
        let mut next = *s;
        let own = self.admit(&s.appended.own[fence], token, op, s.next);
        match self.append(&mut next, kind, fence, own) {
            Some(()) => {
                self.end_below(&mut next, fence, token);
                went(next, Answer::Done)
            }
            None => Ok(None),
        }
    }

    /// A refusal that rests on what is not durable waits; then it is judged again.
    pub(crate) fn refuse(&self, s: &State, fence: usize, token: u8, intent: Intent, refusal: Answer) -> Step {
        let mut next = *s;
        let answer = match self.judge(s, &s.published, fence, token, intent) {
            Some(durable) => durable,
            None => match refusal {
                Answer::Fenced { mark, .. } if self.is(Mistake::RefusesOnAnUndurableMark) => {
                    next.seen[fence] = next.seen[fence].max(mark);
                    return went(next, refusal);
                }
                Answer::Duplicate { .. } if self.is(Mistake::DuplicateOfAnUndurableOp) => {
                    let Intent::Write { op } = intent else { return went(next, refusal) };
                    next.note_committed(fence, token, op);
                    return went(next, refusal);
                }
                _ => return went(next, refusal),
            },
        };
        // The answer is given: is it the truth?
        let committed = s.committed(fence, token);
        let is_true = match (answer, intent) {
            _ if s.restored => true,
            (Answer::Fenced { last_operation: LastOperation::Committed(op), .. }, _) => op == committed,
            (Answer::Fenced { last_operation: LastOperation::Nothing, .. }, _) => committed == 0,
            (Answer::Duplicate { .. }, Intent::Write { op }) => op <= committed,
            (Answer::StaleOperation { last }, _) => last == committed,
            _ => true,
        };
        match is_true {
            true => went(next, answer),
            false => Err(LIE),
        }
    }

    /// No write that gets here may be a late one.
    pub(crate) fn check_admitted(&self, s: &State, fence: usize, token: u8, op: u8) -> Result<(), Violation> {
        let is_ours = self.source(self.space(fence)) == Source::Store;
        if token < s.newest_handed_out(fence) && is_ours {
            return Err(LATE_WRITE);
        }
        if token < s.seen[fence].max(s.lost[fence]) {
            return Err(BELOW_SEEN);
        }
        if s.ops()
            .iter()
            .any(|op| op.is(Kind::Grant, fence) && op.own.mark > token && !self.bounds.late_writes_only)
        {
            return Err(BEHIND_GRANT);
        }
        if s.has(fence, token, LOST) {
            return Err(LOST_TOKEN);
        }
        if is_ours && !s.restored && !s.has(fence, token, HANDED | CARRIED) {
            return Err(STRANGE_TOKEN);
        }
        if op != 0 && op <= s.committed(fence, token) {
            return Err(OP_TWICE);
        }
        Ok(())
    }

    pub(crate) fn raise(&self, s: &State, fence: usize, token: u8) -> Step {
        if let Some(refusal) = self.judge(s, &s.appended, fence, token, Intent::Raise) {
            return self.refuse(s, fence, token, Intent::Raise, refusal);
        }
        let own = s.appended.own[fence];
        if own.mark == token {
            return went(*s, Answer::Already);
        }
        let mut next = *s;
        let mut raised = self.admit(&own, token, 0, s.next);
        if self.is(Mistake::OpForgottenByARaise) {
            (raised.was, raised.was_op) = (own.mark, 0);
        }
        let Some(()) = self.append(&mut next, Kind::Mark, fence, raised) else { return Ok(None) };
        next.raises += 1;
        next.told[fence][token as usize] |= CARRIED;
        self.end_below(&mut next, fence, token);
        went(next, Answer::Done)
    }

    pub(crate) fn raise_all(&self, s: &State, space: usize, token: u8) -> Step {
        let marks = &s.appended;
        let (raised, folded) = (marks.raised[space], marks.folded[space]);
        // After a restore whoever gives an outer keyspace its floor tells the present value of its source.
        if s.needs_floor(space) && token != s.issued {
            return Ok(None);
        }
        if token < raised || token <= folded {
            return went(
                *s,
                Answer::Fenced { mark: raised.max(folded), last_operation: LastOperation::Unknown },
            );
        }
        if self.source(space) == Source::Store && token > s.counter {
            return went(*s, Answer::UnknownToken);
        }
        if token == raised && !s.needs_floor(space) {
            return went(*s, Answer::Already);
        }
        let mut next = *s;
        let own = Own { lsn: s.next, mark: token, ..Own::default() };
        let Some(()) = self.append(&mut next, Kind::Raised, space, own) else { return Ok(None) };
        next.raises += 1;
        for fence in self.fences().filter(|&fence| self.space(fence) == space) {
            next.told[fence][token as usize] |= CARRIED;
            self.end_below(&mut next, fence, token);
        }
        went(next, Answer::Done)
    }
}
