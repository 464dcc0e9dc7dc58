//! Reading a whole store and believing none of it: what `verify` reports, and what salvage may keep.
//!
//! One job: list every fault there is, with its place, and hand out what is proven by its own checksum. Opening
//! stops at the first fault; this goes on behind it. It reads with positioned reads, so that a bad sector is a
//! fault like any other, and never writes.
//!
//! Read next: `survey.rs`, the files; `walk.rs`, one segment; `verify.rs`, what must hold between ops.

use crate::types::{Lsn, Mark};
use std::fmt;

mod survey;
mod walk;
mod verify;

pub(crate) use survey::{Survey, Surveyed, survey};
pub use verify::{Verify, verify};
pub(crate) use walk::{Intact, walk};

/// Something in the files of a store that is not as it was written, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// What kind of thing is wrong.
    pub kind: FaultKind,
    /// The file.
    pub file: String,
    /// The byte in it.
    pub offset: u64,
    /// The lsn of what is damaged there, where it is known.
    pub lsn: Option<Lsn>,
    /// What is wrong, in words.
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at offset {}", self.file, self.offset)?;
        if let Some(lsn) = self.lsn {
            write!(f, ", lsn {lsn}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// The kinds of [`Fault`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum FaultKind {
    /// One copy of the list of segments is damaged; the other one counts, and the next open repairs it.
    StoreCopy,
    /// The list of segments is missing, damaged in both copies, or older than the segments.
    Store,
    /// A listed segment is missing.
    Missing,
    /// The file system cannot read these bytes.
    Unreadable,
    /// A file is shorter than it was.
    Cut,
    /// The header of a segment.
    Header,
    /// A frame: its header, or how it follows the one before.
    Frame,
    /// An op, its key and small value included.
    Op,
    /// A large value. Its op, and so its mark, is intact.
    Value,
    /// A key table; opening reads the segment instead.
    KeyTable,
    /// The index file; opening reads the log instead.
    Index,
    /// The seal of a segment.
    Seal,
    /// Segments do not follow each other as they say.
    Chain,
    /// An op leads to one of another name, or of a later time.
    Link,
    /// A mark falls along the log.
    Mark,
    /// A file lies in the place of another one.
    Foreign,
}

impl FaultKind {
    /// Whether a store with faults of this kind alone opens, as whole as it was.
    pub fn is_harmless(self) -> bool {
        matches!(self, FaultKind::StoreCopy | FaultKind::KeyTable | FaultKind::Index)
    }
}

/// What [`verify`] found.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Everything that is not as it was written, segment by segment.
    pub faults: Vec<Fault>,
    /// What is as it should be and worth knowing: the unfinished tail of a crash, files of somebody else.
    pub notes: Vec<String>,
    /// Whether the directory is a checkpoint.
    pub is_checkpoint: bool,
    /// Segments that held frames.
    pub segments: u32,
    /// Whole frames.
    pub frames: u64,
    /// Intact ops.
    pub ops: u64,
    /// Bytes read.
    pub bytes: u64,
    /// The newest lsn.
    pub lsn: Lsn,
    /// The highest token granted.
    pub counter: Mark,
}

impl Report {
    /// Whether everything is as it was written.
    pub fn is_sound(&self) -> bool {
        self.faults.is_empty()
    }

    /// Whether the store opens as whole as it was: it has no fault but those that opening reads around.
    pub fn opens(&self) -> bool {
        self.faults.iter().all(|fault| fault.kind.is_harmless())
    }
}

/// Faults as they are found.
#[derive(Debug, Default)]
pub(crate) struct Faults(pub Vec<Fault>);

impl Faults {
    pub fn add(
        &mut self,
        kind: FaultKind,
        file: &str,
        offset: u64,
        lsn: Option<Lsn>,
        what: impl Into<String>,
    ) {
        self.0.push(Fault { kind, file: file.to_owned(), offset, lsn, what: what.into() });
    }
}
