//! What can happen, and where it is done.
//!
//! Workers are no processes here: every token ever handed out may be presented at any time, which is the
//! strongest form of "it pauses, and wakes up late".
//!
//! Read next: `leases.rs`, `writes.rs`, `compaction.rs` and `disk.rs` for what each action does, and
//! `observer.rs` for what must never be.

use crate::mistakes::{Mistake, Violation};
use crate::rules::{Answer, Model, Source};
use crate::state::{FENCES, Kind, State, TOKENS};

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

/// The state behind an action, and what whoever did it is told once the state is durable.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub state: State,
    pub answer: Answer,
}

pub(crate) type Step = Result<Option<Taken>, Violation>;

pub(crate) fn went(state: State, answer: Answer) -> Step {
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

    pub(crate) fn spaces(&self) -> impl Iterator<Item = usize> + use<> {
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
            Action::Checkpoint => self.checkpoint(*s),
            Action::Restore => self.restore(s),
        };
        match step {
            Ok(Some(taken)) if taken.state != *s => went(self.observe(taken.state)?, taken.answer),
            step => step,
        }
    }
}
