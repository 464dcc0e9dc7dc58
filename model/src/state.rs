//! One moment of the protocol: what is on the disk, what is in memory, what the world has been told.
//!
//! Plain bytes, so that a state is hashed and compared as such. Nothing here decides anything.
//!
//! Read next: `rules.rs`.

use zerocopy::{Immutable, IntoBytes};

/// The most fences, keyspaces, ops in the log, and tokens (one more than the highest) of any search.
pub const FENCES: usize = 3;
pub const SPACES: usize = 2;
pub const PLACES: usize = 12;
pub const TOKENS: usize = 14;

/// What an op of the log does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, IntoBytes, Immutable)]
#[repr(u8)]
pub enum Kind {
    #[default]
    Grant,
    Release,
    Put,
    Delete,
    /// A mark without a value: a raise, a broken lease, or what compaction leaves of a dead value.
    Mark,
    /// A floor raised by `raise_all`: it admits its own token.
    Raised,
    /// A floor raised by folding: it does not.
    Folded,
}

/// What the log knows of a fence; each op that sets it carries all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct Own {
    /// Of the op that set it; 0: the fence has none.
    pub lsn: u8,
    pub mark: u8,
    /// The last numbered operation under `mark`, and where it was committed.
    pub op: u8,
    pub op_lsn: u8,
    /// The newest token below `mark` under which one was committed, and the last of it.
    pub was: u8,
    pub was_op: u8,
}

/// One op of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct Op {
    pub kind: Kind,
    /// Its fence; of a floor, its keyspace.
    pub of: u8,
    pub segment: u8,
    /// Of a grant: the incarnation that made it.
    pub life: u8,
    /// Carried here by compaction, under its own lsn.
    pub moved: bool,
    /// Its lsn and token, and the state of its fence behind it.
    pub own: Own,
}

impl Op {
    pub fn sets_fence(&self) -> bool {
        matches!(self.kind, Kind::Grant | Kind::Put | Kind::Delete | Kind::Mark)
    }

    pub fn is_version(&self) -> bool {
        matches!(self.kind, Kind::Put | Kind::Delete)
    }

    pub fn is_floor(&self) -> bool {
        matches!(self.kind, Kind::Raised | Kind::Folded)
    }

    /// Whether it is of this kind and fence (or keyspace).
    pub fn is(&self, kind: Kind, of: usize) -> bool {
        self.kind == kind && self.of as usize == of
    }
}

/// The marks, as far as some place in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct Marks {
    pub own: [Own; FENCES],
    /// The floor of each keyspace that `raise_all` has raised, and the one that folding has.
    pub raised: [u8; SPACES],
    pub folded: [u8; SPACES],
}

/// What the world knows of a token on a fence: the last operation committed under it in the two low bits,
/// and these.
pub const OP_BITS: u8 = 3;
pub const HANDED: u8 = 4;
pub const CARRIED: u8 = 8;
pub const LOST: u8 = 16;

/// All of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct State {
    // On the disk: the log, of which so many ops are and so many are synced; the highest lsn that was ever
    // durable (segment headers and seals name it); of keyspaces that need a floor, the lsn from which on one
    // counts.
    pub log: [Op; PLACES],
    pub len: u8,
    pub durable: u8,
    pub top: u8,
    pub asked_at: [u8; SPACES],
    // A checkpoint.
    pub copy: [Op; PLACES],
    pub copy_len: u8,
    pub copied: bool,

    // In memory.
    pub visible: u8,
    pub next: u8,
    pub segment: u8,
    pub life: u8,
    pub counter: u8,
    pub appended: Marks,
    pub published: Marks,
    // The grant of each fence, if there is one: live; appended and not handed out; of the incarnation before,
    // in its grace. And what only a mistake leaves: over, and still renewable.
    pub live: [u8; FENCES],
    pub pending: [u8; FENCES],
    pub kept: [u8; FENCES],
    pub stray: [u8; FENCES],

    // Outside: what was handed out and committed under each token; the highest mark and the newest version
    // that anybody can have seen; the highest mark before a restore; the newest token of an outer source.
    pub told: [[u8; TOKENS]; FENCES],
    pub seen: [u8; FENCES],
    pub seen_version: [u8; FENCES],
    pub lost: [u8; FENCES],
    pub issued: u8,
    pub restored: bool,

    // What was done, against the bounds.
    pub grants: u8,
    pub appends: u8,
    pub crashes: u8,
    pub moves: u8,
    pub raises: u8,
}

impl Default for State {
    fn default() -> Self {
        let zeros = [0; FENCES];
        State {
            log: [Op::default(); PLACES],
            len: 0,
            durable: 0,
            top: 0,
            asked_at: [0; SPACES],
            copy: [Op::default(); PLACES],
            copy_len: 0,
            copied: false,
            visible: 0,
            next: 1,
            segment: 0,
            life: 1,
            counter: 0,
            appended: Marks::default(),
            published: Marks::default(),
            live: zeros,
            pending: zeros,
            kept: zeros,
            stray: zeros,
            told: [[0; TOKENS]; FENCES],
            seen: zeros,
            seen_version: zeros,
            lost: zeros,
            issued: 0,
            restored: false,
            grants: 0,
            appends: 0,
            crashes: 0,
            moves: 0,
            raises: 0,
        }
    }
}

impl State {
    pub fn ops(&self) -> &[Op] {
        &self.log[..self.len as usize]
    }

    pub fn durable_ops(&self) -> &[Op] {
        &self.log[..self.durable as usize]
    }

    pub fn visible_ops(&self) -> &[Op] {
        &self.log[..self.visible as usize]
    }

    /// Whether a restored keyspace waits to be told the present value of its source.
    pub fn needs_floor(&self, space: usize) -> bool {
        let at = self.asked_at[space];
        at != 0 && !self.ops().iter().any(|op| op.is(Kind::Raised, space) && op.own.lsn >= at)
    }

    /// Whether a grant is in the way of another one.
    pub fn is_taken(&self, fence: usize) -> bool {
        self.live[fence] != 0 || self.pending[fence] != 0 || self.kept[fence] != 0
    }

    /// The last numbered operation that was durably committed under `token`.
    pub fn committed(&self, fence: usize, token: u8) -> u8 {
        self.told[fence][token as usize] & OP_BITS
    }

    pub fn note_committed(&mut self, fence: usize, token: u8, op: u8) {
        let told = &mut self.told[fence][token as usize];
        *told = *told & !OP_BITS | (*told & OP_BITS).max(op);
    }

    pub fn has(&self, fence: usize, token: u8, what: u8) -> bool {
        self.told[fence][token as usize] & what != 0
    }

    /// Whether `token` was handed out, for whatever fence.
    pub fn is_handed_out(&self, token: u8) -> bool {
        (0..FENCES).any(|fence| self.has(fence, token, HANDED))
    }

    /// The newest token handed out for a fence.
    pub fn newest_handed_out(&self, fence: usize) -> u8 {
        (0..TOKENS as u8).rev().find(|&token| self.has(fence, token, HANDED)).unwrap_or(0)
    }

    /// The same with the first two fences exchanged.
    pub fn swapped(&self) -> State {
        let mut swapped = *self;
        for op in swapped.log.iter_mut().chain(&mut swapped.copy) {
            // An empty place is a grant of nothing.
            if !op.is_floor() && op.of < 2 && op.own.lsn != 0 {
                op.of ^= 1;
            }
        }
        let State { appended, published, live, pending, kept, stray, seen, seen_version, lost, .. } =
            &mut swapped;
        appended.own.swap(0, 1);
        published.own.swap(0, 1);
        for each in [live, pending, kept, stray, seen, seen_version, lost] {
            each.swap(0, 1);
        }
        swapped.told.swap(0, 1);
        swapped
    }
}
