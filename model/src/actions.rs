//! What can happen, and what it does to a state.
//!
//! Workers are no processes here: every token ever handed out may be presented at any time, which is the
//! strongest form of "it pauses, and wakes up late". The observer never sleeps: what the store *could* answer
//! in a state counts as answered, so a later state that contradicts it is a violation.
//!
//! Read next: `search.rs`.

use crate::mistakes::{
    BEHIND_GRANT, BELOW_SEEN, BELOW_TOKEN, GRACE_FENCED, GRACE_LOST, HOLDER_FENCED, LATE_WRITE, LIE,
    LOCKED_OUT, LOST_TOKEN, MARK_FELL, Mistake, NOT_BROKEN, OP_TWICE, REVIVED, STRANGE_TOKEN, TOKEN_FELL,
    TOKEN_TWICE, TOO_MANY_SLOTS, TWO_HOLDERS, VERSION_FELL,
};
use crate::rules::{Answer, Intent, LastOp, Model, Source};
use crate::state::{CARRIED, FENCES, HANDED, Kind, LOST, OP_BITS, Op, Own, PLACES, State, TOKENS};

/// One thing that happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Somebody asks for a lease; of the slots of the one key, for the lowest free one of `slots`.
    Acquire {
        fence: usize,
    },
    AcquireSlot {
        slots: usize,
    },
    /// The holder from before the open asks, with its owner and old token.
    Resume {
        fence: usize,
    },
    Release {
        fence: usize,
    },
    Expire {
        fence: usize,
    },
    /// The grace after an open is over.
    GraceEnds,
    /// Who lost a lease to another one renews it.
    Renew {
        fence: usize,
    },
    Put {
        fence: usize,
        token: u8,
        op: u8,
    },
    Delete {
        fence: usize,
        token: u8,
        op: u8,
    },
    Raise {
        fence: usize,
        token: u8,
    },
    RaiseAll {
        space: usize,
        token: u8,
    },
    Break {
        fence: usize,
    },
    /// An outer source issues its next token.
    Issue,
    /// The floor of a keyspace is raised to the largest mark that it is to replace.
    Fold {
        space: usize,
        token: u8,
    },
    /// An own mark under a folding floor is dropped from memory.
    Forget {
        fence: usize,
    },
    /// The log is durable up to a place, and the answers that rest on it go out.
    Sync {
        to: u8,
    },
    /// The active segment is sealed.
    Rotate,
    /// Compaction carries a live op of a sealed segment to the end of the log.
    Move {
        at: usize,
    },
    /// A drained segment leaves the list, in one write of STORE.
    Retire {
        segment: u8,
    },
    /// Of what is not synced so many ops survive; killed, they survive in memory only. Then it is opened.
    Crash {
        keep: u8,
        killed: bool,
    },
    Checkpoint,
    /// The store is lost, and the checkpoint restored.
    Restore,
}

impl Action {
    /// Each kind of action once, in the order of `number`; the last is only ever done by mistake.
    pub const NAMES: [&str; 22] = [
        "acquire",
        "acquire a slot",
        "resume",
        "release",
        "expire",
        "grace ends",
        "put",
        "delete",
        "raise",
        "raise all",
        "break",
        "issue",
        "fold",
        "forget",
        "sync",
        "rotate",
        "move",
        "retire",
        "crash",
        "checkpoint",
        "restore",
        "renew",
    ];

    pub fn number(self) -> usize {
        match self {
            Action::Acquire { .. } => 0,
            Action::AcquireSlot { .. } => 1,
            Action::Resume { .. } => 2,
            Action::Release { .. } => 3,
            Action::Expire { .. } => 4,
            Action::GraceEnds => 5,
            Action::Put { .. } => 6,
            Action::Delete { .. } => 7,
            Action::Raise { .. } => 8,
            Action::RaiseAll { .. } => 9,
            Action::Break { .. } => 10,
            Action::Issue => 11,
            Action::Fold { .. } => 12,
            Action::Forget { .. } => 13,
            Action::Sync { .. } => 14,
            Action::Rotate => 15,
            Action::Move { .. } => 16,
            Action::Retire { .. } => 17,
            Action::Crash { .. } => 18,
            Action::Checkpoint => 19,
            Action::Restore => 20,
            Action::Renew { .. } => 21,
        }
    }
}

/// Why a state, or a step into it, must never be.
pub type Violation = &'static str;

/// The state behind an action, and what whoever did it is told once the state is durable.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub state: State,
    pub answer: Answer,
}

type Step = Result<Option<Taken>, Violation>;

fn went(state: State, answer: Answer) -> Step {
    Ok(Some(Taken { state, answer }))
}

impl Model {
    /// What can be tried in a state, refusals included.
    pub fn actions(&self, s: &State, out: &mut Vec<Action>) {
        out.clear();
        let b = &self.bounds;
        self.attempts(s, out);
        for fence in self.fences() {
            if s.kept[fence] != 0 {
                out.push(Action::Resume { fence });
            }
            if s.live[fence] != 0 {
                out.push(Action::Expire { fence });
                if b.releases {
                    out.push(Action::Release { fence });
                }
            }
            if b.breaks && (s.live[fence] != 0 || s.kept[fence] != 0) {
                out.push(Action::Break { fence });
            }
            if s.stray[fence] != 0 {
                out.push(Action::Renew { fence });
            }
            if b.folds {
                let own = s.appended.own[fence].mark;
                if own != 0 && self.is_source_ready_to_fold(s, self.space(fence), own) {
                    out.push(Action::Fold { space: self.space(fence), token: own });
                }
                out.push(Action::Forget { fence });
            }
        }
        if s.kept != [0; FENCES] {
            out.push(Action::GraceEnds);
        }
        if s.issued < b.issues {
            out.push(Action::Issue);
        }
        out.extend((s.visible + 1..=s.len).map(|to| Action::Sync { to }));
        if s.segment + 1 < b.segments {
            out.push(Action::Rotate);
        }
        if b.segments > 1 {
            out.extend((0..s.durable as usize).map(|at| Action::Move { at }));
            out.extend((0..s.segment).map(|segment| Action::Retire { segment }));
        }
        if s.crashes < b.crashes {
            for keep in s.durable..=s.len {
                out.push(Action::Crash { keep, killed: false });
                if self.is(Mistake::AdoptedTailIsNotSynced) && keep > s.durable {
                    out.push(Action::Crash { keep, killed: true });
                }
            }
        }
        if b.checkpoint && !s.restored {
            out.push(if s.copied { Action::Restore } else { Action::Checkpoint });
        }
    }

    /// What writers and operators can try: with any token that was ever handed out.
    fn attempts(&self, s: &State, out: &mut Vec<Action>) {
        let b = &self.bounds;
        let handed_out = |token: &u8| s.is_handed_out(*token);
        for fence in self.fences() {
            let space = self.space(fence);
            let is_external = self.source(space) == Source::External;
            if !is_external && !self.layout.slots {
                out.push(Action::Acquire { fence });
            }
            let presented = (1..TOKENS as u8)
                .filter(|token| if is_external { *token <= s.issued } else { handed_out(token) });
            for token in presented {
                for op in 0..=b.ops {
                    out.push(Action::Put { fence, token, op });
                    if b.deletes {
                        out.push(Action::Delete { fence, token, op });
                    }
                }
                if s.raises < b.raises {
                    out.push(Action::Raise { fence, token });
                }
            }
        }
        if self.layout.slots {
            out.extend((1..=self.layout.fences.len()).map(|slots| Action::AcquireSlot { slots }));
        }
        if s.raises < b.raises && b.raise_alls {
            for space in self.spaces() {
                let is_external = self.source(space) == Source::External;
                let tokens = (1..TOKENS as u8)
                    .filter(|token| if is_external { *token <= s.issued } else { handed_out(token) });
                out.extend(tokens.map(|token| Action::RaiseAll { space, token }));
            }
        }
    }

    fn spaces(&self) -> impl Iterator<Item = usize> + use<> {
        0..=self.layout.fences.iter().copied().max().unwrap_or(0)
    }

    /// One action in one state; `None`: it cannot happen there, or lies beyond the bounds.
    pub fn take(&self, s: &State, action: Action) -> Step {
        let step = match action {
            Action::Acquire { fence } if s.is_taken(fence) => went(*s, Answer::Held),
            Action::Acquire { fence } => self.grant(*s, fence),
            Action::AcquireSlot { slots } => self.acquire_slot(s, slots),
            Action::Resume { fence } => {
                let mut next = *s;
                next.kept[fence] = 0;
                self.grant(next, fence)
            }
            Action::Release { fence } => self.release(*s, fence),
            Action::Expire { fence } => self.expire(*s, fence),
            Action::GraceEnds => went(State { kept: [0; FENCES], ..*s }, Answer::Done),
            Action::Renew { fence } => self.renew(s, fence),
            Action::Put { fence, token, op } => self.write(s, fence, token, op, Kind::Put),
            Action::Delete { fence, token, op } => self.write(s, fence, token, op, Kind::Delete),
            Action::Raise { fence, token } => self.raise(s, fence, token),
            Action::RaiseAll { space, token } => self.raise_all(s, space, token),
            Action::Break { fence } => self.break_lease(*s, fence),
            Action::Issue => went(State { issued: s.issued + 1, ..*s }, Answer::Done),
            Action::Fold { space, token } => self.fold(*s, space, token),
            Action::Forget { fence } => self.forget(*s, fence),
            Action::Sync { to } => self.sync(*s, to),
            Action::Rotate => {
                let has_ops = s.ops().iter().any(|op| op.segment == s.segment);
                if has_ops { went(State { segment: s.segment + 1, ..*s }, Answer::Done) } else { Ok(None) }
            }
            Action::Move { at } => self.carry(*s, at),
            Action::Retire { segment } => self.retire(*s, segment),
            Action::Crash { keep, killed } => self.crash(*s, keep, killed),
            Action::Checkpoint => {
                let mut next = *s;
                next.copy = [Op::default(); PLACES];
                next.copy[..s.durable as usize].copy_from_slice(s.durable_ops());
                (next.copy_len, next.copied) = (s.durable, true);
                went(next, Answer::Done)
            }
            Action::Restore => self.restore(s),
        };
        match step {
            Ok(Some(taken)) if taken.state != *s => went(self.observe(taken.state)?, taken.answer),
            step => step,
        }
    }

    /// Appends an op; `None`: beyond the bounds.
    fn append(&self, s: &mut State, kind: Kind, of: usize, own: Own) -> Option<()> {
        if s.appends >= self.bounds.appends || s.len as usize >= PLACES || own.mark as usize >= TOKENS {
            return None;
        }
        // Memory knows no tail that is not on the disk by now: the next sync covers it.
        s.durable = s.durable.max(s.visible);
        let op = Op { kind, of: of as u8, segment: s.segment, life: 0, moved: false, own };
        let life = if kind == Kind::Grant { s.life } else { 0 };
        s.log[s.len as usize] = Op { life, ..op };
        s.len += 1;
        s.next += 1;
        s.appends += 1;
        self.apply(&mut s.appended, &op);
        Some(())
    }

    /// A mark that has passed a token ends its lease, and takes the fence from a holder in grace.
    fn end_below(&self, s: &mut State, fence: usize, token: u8) {
        if self.is(Mistake::RaiseLeavesLeasesLive) {
            return;
        }
        for each in [&mut s.live[fence], &mut s.pending[fence], &mut s.kept[fence]] {
            if *each < token {
                *each = 0;
            }
        }
    }

    // Leases.

    fn grant(&self, mut s: State, fence: usize) -> Step {
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

    fn acquire_slot(&self, s: &State, slots: usize) -> Step {
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

    fn hand_out(&self, s: &mut State, fence: usize, token: u8) -> Result<(), Violation> {
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

    fn release(&self, mut s: State, fence: usize) -> Step {
        let token = std::mem::take(&mut s.live[fence]);
        let own = Own { lsn: s.next, mark: token, ..Own::default() };
        match self.append(&mut s, Kind::Release, fence, own) {
            Some(()) => went(s, Answer::Done),
            None => Ok(None),
        }
    }

    fn expire(&self, mut s: State, fence: usize) -> Step {
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

    fn renew(&self, s: &State, fence: usize) -> Step {
        match s.live[fence] {
            0 => Err(REVIVED),
            _ => Err(TWO_HOLDERS),
        }
    }

    fn break_lease(&self, mut s: State, fence: usize) -> Step {
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

    // Writes.

    fn write(&self, s: &State, fence: usize, token: u8, op: u8, kind: Kind) -> Step {
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
    fn refuse(&self, s: &State, fence: usize, token: u8, intent: Intent, refusal: Answer) -> Step {
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
            (Answer::Fenced { last_op: LastOp::Committed(op), .. }, _) => op == committed,
            (Answer::Fenced { last_op: LastOp::Nothing, .. }, _) => committed == 0,
            (Answer::Duplicate { .. }, Intent::Write { op }) => op <= committed,
            (Answer::StaleOp { last }, _) => last == committed,
            _ => true,
        };
        match is_true {
            true => went(next, answer),
            false => Err(LIE),
        }
    }

    /// No write that gets here may be a late one.
    fn check_admitted(&self, s: &State, fence: usize, token: u8, op: u8) -> Result<(), Violation> {
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

    fn raise(&self, s: &State, fence: usize, token: u8) -> Step {
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

    fn raise_all(&self, s: &State, space: usize, token: u8) -> Step {
        let marks = &s.appended;
        let (raised, folded) = (marks.raised[space], marks.folded[space]);
        // After a restore whoever opens an outer keyspace again tells it the present value of its source.
        if s.is_closed(space) && token != s.issued {
            return Ok(None);
        }
        if token < raised || token <= folded {
            return went(*s, Answer::Fenced { mark: raised.max(folded), last_op: LastOp::Unknown });
        }
        if self.source(space) == Source::Store && token > s.counter {
            return went(*s, Answer::UnknownToken);
        }
        if token == raised && !s.is_closed(space) {
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

    // Folding.

    /// An outer keyspace folds only below what its user states: here, below the newest token of its source.
    fn is_source_ready_to_fold(&self, s: &State, space: usize, token: u8) -> bool {
        self.source(space) == Source::Store || token < s.issued || self.is(Mistake::ExternalTokensFoldFreely)
    }

    fn is_foldable(&self, s: &State, fence: usize) -> bool {
        s.appended.own[fence].mark != 0 && !self.holds_value(fence, s.ops()) && !s.is_taken(fence)
    }

    /// To exactly the largest mark it replaces, and below every grant of the keyspace that counts.
    fn fold(&self, mut s: State, space: usize, token: u8) -> Step {
        let fences = || self.fences().filter(|&fence| self.space(fence) == space);
        let replaces =
            fences().any(|fence| self.is_foldable(&s, fence) && s.appended.own[fence].mark == token);
        let is_below =
            |grants: &[u8; FENCES]| fences().all(|fence| grants[fence] == 0 || token < grants[fence]);
        let is_below_live = is_below(&s.live) || self.is(Mistake::FoldsAboveALiveLease);
        let is_below_kept = is_below(&s.kept) || self.is(Mistake::FoldsAboveAGraceHolder);
        let is_allowed = replaces && is_below_live && is_below_kept && is_below(&s.pending);
        if !is_allowed || token <= s.appended.folded[space] || s.is_closed(space) {
            return Ok(None);
        }
        let own = Own { lsn: s.next, mark: token, ..Own::default() };
        match self.append(&mut s, Kind::Folded, space, own) {
            Some(()) => went(s, Answer::Done),
            None => Ok(None),
        }
    }

    fn forget(&self, mut s: State, fence: usize) -> Step {
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

    // The disk.

    fn sync(&self, mut s: State, to: u8) -> Step {
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

    fn carry(&self, mut s: State, at: usize) -> Step {
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

    fn retire(&self, mut s: State, segment: u8) -> Step {
        let is_here = |op: &Op| op.segment == segment;
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

    fn crash(&self, mut s: State, keep: u8, killed: bool) -> Step {
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
    fn open(&self, s: &mut State) {
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

    fn restore(&self, s: &State) -> Step {
        let mut next = State { log: s.copy, len: s.copy_len, durable: s.copy_len, ..*s };
        (next.copy, next.copy_len, next.copied) = ([Op::default(); PLACES], 0, false);
        next.restored = true;
        let more = u8::from(!self.is(Mistake::BumpEqualsWhatWasGranted));
        let bump = if self.is(Mistake::RestoreWithoutBump) { 0 } else { self.bounds.grants + more };
        let counter = self.replay_counter(next.ops()) + bump;
        let old = self.replay(next.ops());
        let mut append = |kind, of: usize, mark: u8, state: Own| {
            let op = Op {
                kind,
                of: of as u8,
                segment: s.segment,
                own: Own { lsn: s.next, mark, ..state },
                ..Op::default()
            };
            if next.len as usize >= PLACES || mark as usize >= TOKENS {
                return None;
            }
            next.log[next.len as usize] = op;
            next.len += 1;
            Some(())
        };
        for space in self.spaces() {
            let done = match (self.source(space), self.mistake) {
                (Source::Store, Some(Mistake::RestoreWithoutFloors)) => Some(()),
                (Source::Store, Some(Mistake::RestoreBumpsMarksOnly)) => {
                    let mut own =
                        self.fences().filter(|&fence| self.space(fence) == space && old.own[fence].mark != 0);
                    own.try_for_each(|fence| {
                        append(Kind::Mark, fence, old.own[fence].mark + bump, Own::default())
                    })
                }
                (Source::Store, _) => append(Kind::Raised, space, counter, Own::default()),
                (Source::External, Some(Mistake::RestoreBumpsExternalTokens)) => {
                    let highest = self.fences().filter(|&fence| self.space(fence) == space);
                    let highest = highest.map(|fence| self.mark(&old, fence)).max().unwrap_or(0);
                    append(Kind::Raised, space, highest + bump, Own::default())
                }
                (Source::External, _) => Some(()),
            };
            if done.is_none() {
                return Ok(None);
            }
            let leaves_open = self.is(Mistake::RestoreLeavesExternalTokensOpen)
                || self.is(Mistake::RestoreBumpsExternalTokens);
            if self.source(space) == Source::External && !leaves_open {
                next.closed_at[space] = s.next + 1;
            }
        }
        next.durable = next.len;
        next.top = s.next;
        for fence in self.fences() {
            let is_ours = self.source(self.space(fence)) == Source::Store;
            for told in &mut next.told[fence] {
                let was_handed_out = *told & HANDED != 0;
                *told &= !OP_BITS;
                if was_handed_out && is_ours {
                    *told |= LOST;
                }
            }
            next.lost[fence] = s.seen[fence];
            if !is_ours {
                next.seen[fence] = 0;
            }
        }
        next.seen_version = [0; FENCES];
        self.open(&mut next);
        next.kept = [0; FENCES];
        next.counter = counter;
        went(next, Answer::Done)
    }

    // The observer.

    /// What the world could be told now, against what it was told before.
    fn observe(&self, mut s: State) -> Result<State, Violation> {
        if self.bounds.late_writes_only {
            return Ok(s);
        }
        for fence in self.fences() {
            let mark = self.mark(&s.published, fence);
            let space = self.space(fence);
            if mark < s.seen[fence] {
                return Err(MARK_FELL);
            }
            s.seen[fence] = mark;
            let read = if self.is(Mistake::ReadsWhatIsNotDurable) { s.ops() } else { s.visible_ops() };
            let version = self.version(fence, read);
            let is_forgotten_delete = version == 0 && s.seen_version[fence] % 2 == 0;
            if version < s.seen_version[fence] && !is_forgotten_delete {
                return Err(VERSION_FELL);
            }
            s.seen_version[fence] = s.seen_version[fence].max(version);
            if s.live[fence] != 0 && self.is_fenced(&s.appended, fence, s.live[fence]) {
                return Err(HOLDER_FENCED);
            }
            if s.kept[fence] != 0 && self.is_fenced(&s.appended, fence, s.kept[fence]) {
                return Err(GRACE_FENCED);
            }
            let is_ours = self.source(space) == Source::Store;
            if is_ours && !s.restored && mark < s.newest_handed_out(fence) {
                return Err(BELOW_TOKEN);
            }
            let newest = s.issued;
            if !is_ours && newest != 0 && self.is_fenced(&s.appended, fence, newest) {
                return Err(LOCKED_OUT);
            }
        }
        Ok(s)
    }
}

/// What is durable now was committed, whoever heard of it.
fn note_durable(s: &mut State, op: &Op) {
    s.top = s.top.max(op.own.lsn);
    let own = op.own;
    if op.is_version() && own.op_lsn == own.lsn && own.op != 0 {
        s.note_committed(op.of as usize, own.mark, own.op);
    }
}
