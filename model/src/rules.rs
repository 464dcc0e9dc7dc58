//! The rules of the store, as plainly as they can be said; and the place of each mistake in them.
//!
//! What may write where, what a log means, and what compaction may leave behind. Nothing here changes a
//! state.
//!
//! Read next: `actions.rs`.

use crate::mistakes::Mistake;
use crate::state::{FENCES, Kind, Marks, Op, Own, SPACES, State};

/// Where the tokens of a keyspace come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Store,
    External,
}

/// Which fences there are: the keyspace of each, the source of each keyspace; whether the fences are the
/// slots of one key.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub fences: &'static [usize],
    pub sources: [Source; SPACES],
    pub slots: bool,
}

const STORE: [Source; SPACES] = [Source::Store; SPACES];
pub const ONE_FENCE: Layout = Layout { fences: &[0], sources: STORE, slots: false };
pub const ONE_KEYSPACE: Layout = Layout { fences: &[0, 0], sources: STORE, slots: false };
pub const TWO_KEYSPACES: Layout = Layout { fences: &[0, 1], sources: STORE, slots: false };
pub const THREE_FENCES: Layout = Layout { fences: &[0, 0, 1], sources: STORE, slots: false };
pub const EXTERNAL: Layout =
    Layout { fences: &[0, 1], sources: [Source::Store, Source::External], slots: false };
pub const SLOTS: Layout = Layout { fences: &[0, 0], sources: STORE, slots: true };

/// How far a search goes; 0 and `false` leave an action out.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub grants: u8,
    pub appends: u8,
    pub crashes: u8,
    /// Operation numbers from 1 to this, at most 3.
    pub ops: u8,
    pub deletes: bool,
    pub folds: bool,
    pub raises: u8,
    pub raise_alls: bool,
    pub breaks: bool,
    /// A release has its record in the log.
    pub releases: bool,
    pub grace: bool,
    /// With more than one, segments are sealed, drained and retired.
    pub segments: u8,
    pub moves: u8,
    pub checkpoint: bool,
    /// Tokens of an outer source.
    pub issues: u8,
    /// Whatever is answered is believed, and only what is admitted is looked at: the harm that a mistake does
    /// in the end, and not the first thing that somebody could notice of it.
    pub late_writes_only: bool,
}

pub const NOTHING: Bounds = Bounds {
    grants: 0,
    appends: 0,
    crashes: 0,
    ops: 0,
    deletes: false,
    folds: false,
    raises: 0,
    raise_alls: false,
    breaks: false,
    releases: false,
    grace: false,
    segments: 1,
    moves: 0,
    checkpoint: false,
    issues: 0,
    late_writes_only: false,
};

/// What is searched.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub layout: Layout,
    pub bounds: Bounds,
    pub mistake: Option<Mistake>,
}

/// What is known of the last operation under a token that is fenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LastOperation {
    Committed(u8),
    Nothing,
    Unknown,
}

/// What a writer is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Accepted; said when it is durable.
    Done,
    /// It was so before, durably.
    Already,
    Granted(u8),
    Fenced {
        mark: u8,
        last_operation: LastOperation,
    },
    UnknownToken,
    NeedsFloor,
    Duplicate {
        lsn: u8,
    },
    StaleOperation {
        last: u8,
    },
    Held,
}

/// What a writer asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Intent {
    Write { op: u8 },
    Raise,
}

impl Model {
    pub fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    pub fn fences(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.layout.fences.len()
    }

    pub fn space(&self, fence: usize) -> usize {
        self.layout.fences[fence]
    }

    /// The two fences of one keyspace can be exchanged; slots cannot, for the lowest free one is given.
    pub fn is_symmetric(&self) -> bool {
        matches!(self.layout.fences, [one, other] if one == other) && !self.layout.slots
    }

    pub fn source(&self, space: usize) -> Source {
        self.layout.sources[space]
    }

    /// The floors that count for a keyspace: of `raise_all`, and of folding.
    fn floors(&self, marks: &Marks, space: usize) -> (u8, u8) {
        let (raised, mut folded) = (marks.raised[space], marks.folded[space]);
        if self.is(Mistake::OneFloorForAllKeyspaces) {
            folded = marks.folded[0].max(marks.folded[1]);
        }
        (raised, folded)
    }

    /// The mark of a fence: the larger of its own and the floors.
    pub fn mark(&self, marks: &Marks, fence: usize) -> u8 {
        let own = marks.own[fence].mark;
        let (raised, folded) = self.floors(marks, self.space(fence));
        match self.is(Mistake::OwnMarkWinsOverFloor) && own > 0 {
            true => own,
            false => own.max(raised).max(folded),
        }
    }

    /// A lower token is fenced; so is one equal to a floor of folding, for it belongs to a fence whose mark
    /// is gone.
    pub fn is_fenced(&self, marks: &Marks, fence: usize, token: u8) -> bool {
        let (_, folded) = self.floors(marks, self.space(fence));
        let is_folded = token <= folded
            && !self.is(Mistake::FoldingFloorAdmitsItsToken)
            && !(self.is(Mistake::OwnMarkWinsOverFloor) && marks.own[fence].mark > 0);
        token < self.mark(marks, fence) || is_folded
    }

    /// The rule of every writer; `None`: go on.
    pub fn judge(&self, s: &State, marks: &Marks, fence: usize, token: u8, intent: Intent) -> Option<Answer> {
        let (own, mark, space) = (&marks.own[fence], self.mark(marks, fence), self.space(fence));
        if self.is_fenced(marks, fence, token) {
            return Some(self.fenced(marks, fence, token));
        }
        if s.needs_floor(space) {
            return Some(Answer::NeedsFloor);
        }
        let is_admitted = match (self.source(space), intent) {
            (Source::External, _) => true,
            (Source::Store, Intent::Raise) => token <= s.counter,
            (Source::Store, _) if self.is(Mistake::HigherTokenIsAdmitted) => token <= s.counter,
            (Source::Store, _) if self.is(Mistake::GrantRaisesNoMark) => token <= s.counter,
            (Source::Store, Intent::Write { .. }) => token == mark,
        };
        if !is_admitted {
            return Some(Answer::UnknownToken);
        }
        match intent {
            Intent::Write { op } if op != 0 && own.mark == token && own.op != 0 && op <= own.op => {
                Some(match op == own.op {
                    true => Answer::Duplicate { lsn: own.op_lsn },
                    false => Answer::StaleOperation { last: own.op },
                })
            }
            _ => None,
        }
    }

    pub fn fenced(&self, marks: &Marks, fence: usize, token: u8) -> Answer {
        Answer::Fenced {
            mark: self.mark(marks, fence),
            last_operation: self.last_operation(marks, fence, token),
        }
    }

    fn last_operation(&self, marks: &Marks, fence: usize, token: u8) -> LastOperation {
        let (own, space) = (&marks.own[fence], self.space(fence));
        let (raised, folded) = self.floors(marks, space);
        // What a folded mark knew went with it, and a higher floor does not bring it back.
        let is_forgotten = !(self.is(Mistake::RaisedFloorHidesFolding) && raised > folded);
        match token {
            _ if token <= folded && is_forgotten => LastOperation::Unknown,
            _ if own.mark == 0 => LastOperation::Unknown,
            _ if token == own.mark && own.op == 0 => LastOperation::Nothing,
            _ if token == own.mark => LastOperation::Committed(own.op),
            _ if token == own.was => LastOperation::Committed(own.was_op),
            _ if token < own.was => LastOperation::Unknown,
            _ => LastOperation::Nothing,
        }
    }

    /// The state of a fence behind an admitted op.
    pub fn admit(&self, own: &Own, token: u8, op: u8, lsn: u8) -> Own {
        let mut now = Own { lsn, mark: token, ..*own };
        if token != own.mark {
            if own.op != 0 {
                (now.was, now.was_op) = (own.mark, own.op);
            }
            (now.op, now.op_lsn) = (0, 0);
        }
        if op != 0 {
            (now.op, now.op_lsn) = (op, lsn);
        }
        now
    }

    /// What an op means for the marks. Newest lsn wins, never newest place.
    pub fn apply(&self, marks: &mut Marks, op: &Op) {
        let of = op.of as usize;
        match op.kind {
            Kind::Release => {}
            Kind::Raised => marks.raised[of] = marks.raised[of].max(op.own.mark),
            Kind::Folded => marks.folded[of] = marks.folded[of].max(op.own.mark),
            Kind::Grant if self.is(Mistake::GrantRaisesNoMark) => {}
            Kind::Delete if self.is(Mistake::DeleteForgetsTheMark) => marks.own[of] = Own::default(),
            _ if op.own.lsn >= marks.own[of].lsn || self.is(Mistake::NewestPlaceWins) => {
                marks.own[of] = op.own
            }
            _ => {}
        }
    }

    pub fn replay(&self, ops: &[Op]) -> Marks {
        let mut marks = Marks::default();
        ops.iter().for_each(|op| self.apply(&mut marks, op));
        marks
    }

    /// The counter of a log: the maximum over everything that names a token this store has issued.
    pub fn replay_counter(&self, ops: &[Op]) -> u8 {
        let issued = ops.iter().filter(|op| {
            let space = if op.is_floor() { op.of as usize } else { self.space(op.of as usize) };
            self.source(space) == Source::Store
        });
        let counted = issued.filter(|op| match self.mistake {
            Some(Mistake::CounterIgnoresFloors) => !op.is_floor(),
            Some(Mistake::CounterFromGrantsOnly) => op.kind == Kind::Grant,
            _ => true,
        });
        counted.map(|op| op.own.mark).max().unwrap_or(0)
    }

    /// The newest version of a fence's key: twice its lsn, and one more for a value; 0: none is known.
    pub fn version(&self, fence: usize, ops: &[Op]) -> u8 {
        let versions = ops.iter().filter(|op| op.is_version() && op.of as usize == fence);
        let mut numbers = versions.map(|op| op.own.lsn * 2 + u8::from(op.kind == Kind::Put));
        if self.is(Mistake::NewestPlaceWins) { numbers.next_back() } else { numbers.max() }.unwrap_or(0)
    }

    pub fn holds_value(&self, fence: usize, ops: &[Op]) -> bool {
        self.version(fence, ops) % 2 == 1
    }
}

const _: () = assert!(THREE_FENCES.fences.len() <= FENCES);
