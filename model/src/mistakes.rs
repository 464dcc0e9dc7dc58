//! The mistakes that the search must find: each is a line of `rules.rs`, or of what an action does, done otherwise.
//!
//! Each comes with the smallest part of the protocol in which it shows, and with what the shortest
//! counterexample ends in.

use crate::rules::{Bounds, EXTERNAL, Layout, Model, NOTHING, ONE_FENCE, ONE_KEYSPACE, SLOTS, TWO_KEYSPACES};

/// What somebody has done wrong, here or elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    // Marks and floors.
    OwnMarkWinsOverFloor,
    FoldingFloorAdmitsItsToken,
    FoldsAboveALiveLease,
    FoldsAboveAGraceHolder,
    FoldsBeforeTheFloorIsDurable,
    OneFloorForAllKeyspaces,
    RaisedFloorHidesFolding,
    DeleteForgetsTheMark,
    HigherTokenIsAdmitted,
    // What an answer rests on.
    RefusesOnAnUndurableMark,
    DuplicateOfAnUndurableOp,
    ReadsWhatIsNotDurable,
    AdoptedTailIsNotSynced,
    // Leases and tokens.
    GrantRaisesNoMark,
    HandsOutBeforeDurable,
    ExpiryRaisesTheMark,
    RaiseLeavesLeasesLive,
    ReleasedTokenIsGrantedAgain,
    TakeOverLeavesTheOldGrant,
    BreakRaisesNoMark,
    CounterIgnoresFloors,
    CounterFromGrantsOnly,
    // Operation numbers.
    OpForgottenByARaise,
    OpForgottenOnCompaction,
    PredecessorForgottenOnCompaction,
    // Compaction.
    MarkGoesWithItsValue,
    TombstoneDroppedEarly,
    TombstoneIgnoresCopiesOnTheirWay,
    NewestPlaceWins,
    MovedOpGetsANewLsn,
    RetiresBeforeCopiesAreDurable,
    RetiresOpByOp,
    UnreleasedGrantBecomesAMark,
    // Checkpoint and restore.
    RestoreWithoutBump,
    BumpEqualsWhatWasGranted,
    RestoreWithoutFloors,
    RestoreBumpsMarksOnly,
    RestoreBumpsExternalTokens,
    RestoreLeavesExternalTokensOpen,
    ExternalTokensFoldFreely,
    // Slots.
    SlotsShareTheMarkOfTheirKey,
    SlotsAboveNAreNotCounted,
}

/// Why a state, or a step into it, must never be.
pub type Violation = &'static str;

/// A mistake, where to look for it, and what is found.
#[derive(Clone, Copy, Debug)]
pub struct Seeded {
    pub mistake: Mistake,
    pub layout: Layout,
    pub bounds: Bounds,
    pub violation: Violation,
}

impl Seeded {
    pub fn model(&self) -> Model {
        Model { layout: self.layout, bounds: self.bounds, mistake: Some(self.mistake) }
    }
}

pub const MARK_FELL: Violation = "F2, D4: a mark that was seen has gone down";
pub const LATE_WRITE: Violation = "F3: a LATE WRITE is accepted: a newer token is out on this fence";
pub const BELOW_SEEN: Violation = "F3: a LATE WRITE is accepted: its fence was seen with a higher mark";
pub const BEHIND_GRANT: Violation = "F3: a lower write stands behind a newer grant";
pub const LOST_TOKEN: Violation = "F2: a token of before the restore is admitted";
pub const STRANGE_TOKEN: Violation = "F1: a token that was never granted for this fence is admitted";
pub const BELOW_TOKEN: Violation = "F4: a token is out, and the durable mark is below it";
pub const TOKEN_TWICE: Violation = "L2: a token is handed out twice";
pub const TOKEN_FELL: Violation = "L2: the tokens of a fence go down";
pub const TWO_HOLDERS: Violation = "L1: two live leases on one fence";
pub const TOO_MANY_SLOTS: Violation = "L1: more than n slots are held";
pub const REVIVED: Violation = "L4: a lease that was over lives again";
pub const HOLDER_FENCED: Violation = "L5: the holder of a live lease is fenced";
pub const NOT_BROKEN: Violation = "F4: what was broken is not fenced";
pub const GRACE_FENCED: Violation = "C4: a holder in grace is fenced";
pub const GRACE_LOST: Violation = "C3: the holder of a live lease finds no grace after a crash";
pub const VERSION_FELL: Violation = "D1, D4, C3: a version that was seen is gone, or an older one is back";
pub const OP_TWICE: Violation = "D1: an operation is executed a second time";
pub const LIE: Violation = "D4: a writer is told of its last operation what is not true";
pub const LOCKED_OUT: Violation = "F2: the rightful owner of an outer keyspace is locked out";

const MARKS: Bounds = Bounds {
    grants: 3,
    appends: 6,
    crashes: 1,
    deletes: true,
    folds: true,
    raises: 1,
    raise_alls: true,
    ..NOTHING
};
const HARM: Bounds = Bounds { late_writes_only: true, ..MARKS };
const OPS: Bounds = Bounds { ops: 2, grants: 2, ..MARKS };
const LOG: Bounds = Bounds { grants: 2, appends: 5, segments: 3, moves: 2, raises: 0, ..MARKS };
/// Segments are retired, and nothing is carried.
const DROPS: Bounds = Bounds { appends: 4, moves: 0, late_writes_only: true, ..LOG };
const COPY: Bounds = Bounds { checkpoint: true, appends: 5, late_writes_only: true, ..MARKS };
const OUTER: Bounds = Bounds { issues: 2, grants: 1, checkpoint: true, appends: 5, ..MARKS };

const fn seeded(mistake: Mistake, layout: Layout, bounds: Bounds, violation: Violation) -> Seeded {
    Seeded { mistake, layout, bounds, violation }
}

/// All of them.
pub const SEEDED: [Seeded; 42] = {
    use Mistake::*;
    [
        seeded(OwnMarkWinsOverFloor, ONE_FENCE, DROPS, LATE_WRITE),
        seeded(FoldingFloorAdmitsItsToken, ONE_KEYSPACE, MARKS, STRANGE_TOKEN),
        seeded(FoldsAboveALiveLease, ONE_KEYSPACE, MARKS, HOLDER_FENCED),
        seeded(
            FoldsAboveAGraceHolder,
            ONE_KEYSPACE,
            Bounds { grace: true, releases: true, ..MARKS },
            GRACE_FENCED,
        ),
        seeded(FoldsBeforeTheFloorIsDurable, ONE_FENCE, DROPS, TOKEN_TWICE),
        seeded(OneFloorForAllKeyspaces, TWO_KEYSPACES, MARKS, HOLDER_FENCED),
        seeded(RaisedFloorHidesFolding, ONE_FENCE, Bounds { ops: 1, crashes: 0, ..OPS }, LIE),
        seeded(DeleteForgetsTheMark, ONE_KEYSPACE, MARKS, MARK_FELL),
        seeded(HigherTokenIsAdmitted, ONE_KEYSPACE, MARKS, STRANGE_TOKEN),
        seeded(RefusesOnAnUndurableMark, ONE_KEYSPACE, MARKS, MARK_FELL),
        seeded(DuplicateOfAnUndurableOp, ONE_KEYSPACE, OPS, OP_TWICE),
        seeded(ReadsWhatIsNotDurable, ONE_KEYSPACE, MARKS, VERSION_FELL),
        seeded(AdoptedTailIsNotSynced, ONE_KEYSPACE, Bounds { crashes: 2, ..MARKS }, MARK_FELL),
        seeded(GrantRaisesNoMark, ONE_FENCE, HARM, LATE_WRITE),
        seeded(HandsOutBeforeDurable, ONE_KEYSPACE, HARM, TOKEN_TWICE),
        seeded(ExpiryRaisesTheMark, ONE_KEYSPACE, MARKS, MARK_FELL),
        seeded(RaiseLeavesLeasesLive, ONE_KEYSPACE, MARKS, HOLDER_FENCED),
        seeded(ReleasedTokenIsGrantedAgain, ONE_KEYSPACE, MARKS, TOKEN_TWICE),
        seeded(TakeOverLeavesTheOldGrant, ONE_KEYSPACE, MARKS, REVIVED),
        seeded(BreakRaisesNoMark, ONE_KEYSPACE, Bounds { breaks: true, ..MARKS }, NOT_BROKEN),
        seeded(CounterIgnoresFloors, TWO_KEYSPACES, DROPS, STRANGE_TOKEN),
        seeded(CounterFromGrantsOnly, ONE_KEYSPACE, LOG, TOKEN_TWICE),
        seeded(OpForgottenByARaise, ONE_KEYSPACE, Bounds { raises: 2, ..OPS }, LIE),
        seeded(OpForgottenOnCompaction, ONE_FENCE, Bounds { ops: 1, ..LOG }, OP_TWICE),
        seeded(PredecessorForgottenOnCompaction, ONE_FENCE, Bounds { ops: 1, ..LOG }, LIE),
        seeded(MarkGoesWithItsValue, ONE_KEYSPACE, LOG, MARK_FELL),
        seeded(TombstoneDroppedEarly, ONE_FENCE, LOG, VERSION_FELL),
        seeded(TombstoneIgnoresCopiesOnTheirWay, ONE_FENCE, Bounds { segments: 4, ..LOG }, VERSION_FELL),
        seeded(NewestPlaceWins, ONE_KEYSPACE, LOG, VERSION_FELL),
        seeded(MovedOpGetsANewLsn, ONE_KEYSPACE, LOG, VERSION_FELL),
        seeded(RetiresBeforeCopiesAreDurable, ONE_KEYSPACE, LOG, VERSION_FELL),
        seeded(RetiresOpByOp, ONE_FENCE, LOG, VERSION_FELL),
        seeded(
            UnreleasedGrantBecomesAMark,
            ONE_FENCE,
            Bounds { grace: true, releases: true, ..LOG },
            GRACE_LOST,
        ),
        seeded(RestoreWithoutBump, ONE_KEYSPACE, COPY, LOST_TOKEN),
        seeded(BumpEqualsWhatWasGranted, ONE_KEYSPACE, COPY, LOST_TOKEN),
        seeded(RestoreWithoutFloors, ONE_KEYSPACE, COPY, LOST_TOKEN),
        seeded(RestoreBumpsMarksOnly, ONE_KEYSPACE, COPY, LOST_TOKEN),
        seeded(RestoreBumpsExternalTokens, EXTERNAL, OUTER, LOCKED_OUT),
        seeded(RestoreLeavesExternalTokensOpen, EXTERNAL, OUTER, BELOW_SEEN),
        seeded(ExternalTokensFoldFreely, EXTERNAL, OUTER, LOCKED_OUT),
        seeded(SlotsShareTheMarkOfTheirKey, SLOTS, MARKS, STRANGE_TOKEN),
        seeded(SlotsAboveNAreNotCounted, SLOTS, MARKS, TOO_MANY_SLOTS),
    ]
};
