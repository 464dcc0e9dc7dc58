//! The log on the disk: appended, synced, cut by a crash, copied, restored.

use crate::actions::{Step, went};
use crate::mistakes::{GRACE_LOST, Mistake};
use crate::rules::{Answer, Model, Source};
use crate::state::{FENCES, HANDED, Kind, LOST, OP_BITS, Op, Own, PLACES, State, TOKENS};

impl Model {
    /// Appends an op; `None`: beyond the bounds.
    pub(crate) fn append(&self, s: &mut State, kind: Kind, of: usize, own: Own) -> Option<()> {
        if s.appends >= self.bounds.appends || s.len as usize >= PLACES || own.mark as usize >= TOKENS {
            return None;
        }
        // Memory knows no tail that is not on the disk by now: the next sync covers it.
        s.durable = s.durable.max(s.visible);
        let life = if kind == Kind::Grant { s.life } else { 0 };
        let op = Op { kind, of: of as u8, segment: s.segment, life, moved: false, own };
        s.log[s.len as usize] = op;
        s.len += 1;
        s.next += 1;
        s.appends += 1;
        self.apply(&mut s.appended, &op);
        Some(())
    }

    pub(crate) fn sync(&self, mut s: State, to: u8) -> Step {
        for at in s.visible as usize..to as usize {
            let op = s.log[at];
            if !op.moved {
                self.apply(&mut s.published, &op);
            }
            note_durable(&mut s, &op);
        }
        (s.visible, s.durable) = (to, to);
        for fence in self.fences() {
            let token = s.pending[fence];
            let is_granted = |op: &Op| op.is(Kind::Grant, fence) && op.own.mark == token && op.life == s.life;
            if token == 0 || !s.durable_ops().iter().any(is_granted) {
                continue;
            }
            s.pending[fence] = 0;
            // Overtaken on its way by a higher mark: the token is burnt.
            if !self.is_fenced(&s.appended, fence, token) || self.is(Mistake::RaiseLeavesLeasesLive) {
                self.hand_out(&mut s, fence, token)?;
            }
        }
        went(s, Answer::Done)
    }

    pub(crate) fn crash(&self, mut s: State, keep: u8, killed: bool) -> Step {
        let before = s;
        s.log[keep as usize..].fill(Op::default());
        s.len = keep;
        if !killed {
            s.durable = keep;
        }
        s.crashes += 1;
        self.open(&mut s);
        for fence in self.fences() {
            let held = before.live[fence];
            if self.bounds.grace && held != 0 && s.kept[fence] != held {
                return Err(GRACE_LOST);
            }
        }
        went(s, Answer::Done)
    }

    /// Replays the log. What it adopts is synced before anybody is answered; it begins a segment of its own.
    pub(crate) fn open(&self, s: &mut State) {
        let ops = *s;
        let marks = self.replay(ops.ops());
        (s.appended, s.published) = (marks, marks);
        s.counter = self.replay_counter(ops.ops());
        s.visible = s.len;
        if !self.is(Mistake::AdoptedTailIsNotSynced) {
            s.durable = s.len;
        }
        ops.ops().iter().for_each(|op| note_durable(s, op));
        s.next = s.top + 1;
        (s.live, s.pending, s.stray) = ([0; FENCES], [0; FENCES], [0; FENCES]);
        for fence in self.fences() {
            s.kept[fence] = self.kept(ops.ops(), &marks, fence, s.life);
        }
        s.life += 1;
        if self.bounds.segments > 1 && ops.ops().iter().any(|op| op.segment == s.segment) {
            s.segment += 1;
        }
    }

    // A copy, and what a restore makes of it.

    pub(crate) fn checkpoint(&self, mut s: State) -> Step {
        let mut copy = [Op::default(); PLACES];
        copy[..s.durable as usize].copy_from_slice(s.durable_ops());
        (s.copy, s.copy_len, s.copied) = (copy, s.durable, true);
        went(s, Answer::Done)
    }

    /// The copy as a store of its own: the counter is above every token that can have been granted since, and
    /// whatever was granted before is fenced, on fences too that the copy has never seen.
    pub(crate) fn restore(&self, s: &State) -> Step {
        let mut next = State { log: s.copy, len: s.copy_len, durable: s.copy_len, top: s.next, ..*s };
        (next.copy, next.copy_len, next.copied) = ([Op::default(); PLACES], 0, false);
        let more = u8::from(!self.is(Mistake::BumpEqualsWhatWasGranted));
        let bump = if self.is(Mistake::RestoreWithoutBump) { 0 } else { self.bounds.grants + more };
        let counter = self.replay_counter(next.ops()) + bump;
        for space in self.spaces() {
            let shut_off = match self.source(space) {
                Source::Store => self.shut_off_granted(&mut next, space, counter, bump),
                Source::External => self.shut_off_external(&mut next, space, bump),
            };
            if shut_off.is_none() {
                return Ok(None);
            }
        }
        next.durable = next.len;
        self.open(&mut next);
        // Copied grants are of no incarnation that has just been.
        next.kept = [0; FENCES];
        next.counter = counter;
        self.lose_the_timeline(&mut next);
        went(next, Answer::Done)
    }

    fn shut_off_granted(&self, s: &mut State, space: usize, counter: u8, bump: u8) -> Option<()> {
        if self.is(Mistake::RestoreWithoutFloors) {
            return Some(());
        }
        if !self.is(Mistake::RestoreBumpsMarksOnly) {
            let admits = self.is(Mistake::BumpEqualsWhatWasGranted) || self.is(Mistake::RestoreWithoutBump);
            return append_restored(s, if admits { Kind::Raised } else { Kind::Folded }, space, counter);
        }
        let marks = self.replay(s.ops());
        let mut seen =
            self.fences().filter(|&fence| self.space(fence) == space && marks.own[fence].mark != 0);
        seen.try_for_each(|fence| append_restored(s, Kind::Mark, fence, marks.own[fence].mark + bump))
    }

    /// Outer tokens are not ours to bump: the keyspace waits for the present value of its source.
    fn shut_off_external(&self, s: &mut State, space: usize, bump: u8) -> Option<()> {
        match self.mistake {
            Some(Mistake::RestoreLeavesExternalTokensOpen) => Some(()),
            Some(Mistake::RestoreBumpsExternalTokens) => {
                let marks = self.replay(s.ops());
                let of_space = self.fences().filter(|&fence| self.space(fence) == space);
                let highest = of_space.map(|fence| self.mark(&marks, fence)).max().unwrap_or(0);
                append_restored(s, Kind::Raised, space, highest + bump)
            }
            _ => {
                s.asked_at[space] = s.top + 1;
                Some(())
            }
        }
    }

    /// The world keeps what it was told; what it saw of values, operations and outer marks is gone.
    fn lose_the_timeline(&self, s: &mut State) {
        s.restored = true;
        s.seen_version = [0; FENCES];
        for fence in self.fences() {
            let is_ours = self.source(self.space(fence)) == Source::Store;
            for told in &mut s.told[fence] {
                *told &= !OP_BITS;
                if is_ours && *told & HANDED != 0 {
                    *told |= LOST;
                }
            }
            s.lost[fence] = s.seen[fence];
            if !is_ours {
                s.seen[fence] = 0;
            }
        }
    }
}

/// What a restore writes behind the copy; `None`: beyond the bounds.
fn append_restored(s: &mut State, kind: Kind, of: usize, token: u8) -> Option<()> {
    if s.len as usize >= PLACES || token as usize >= TOKENS {
        return None;
    }
    let own = Own { lsn: s.top, mark: token, ..Own::default() };
    s.log[s.len as usize] = Op { kind, of: of as u8, segment: s.segment, own, ..Op::default() };
    s.len += 1;
    Some(())
}

/// What is durable was committed, whoever has heard of it.
fn note_durable(s: &mut State, op: &Op) {
    s.top = s.top.max(op.own.lsn);
    let own = op.own;
    if op.is_version() && own.op_lsn == own.lsn && own.op != 0 {
        s.note_committed(op.of as usize, own.mark, own.op);
    }
}
