//! Every way a call can fail, each saying what to do now.

use crate::types::{Excerpt, Lsn, Mark, OperationId, OwnerId, Token};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

/// The result of every call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was not done, and what to do now.
///
/// [`Error::is_retryable`] says whether the same call can succeed later without anything else
/// changing hands; [`Error::outcome`] says whether it may have been applied.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mark has passed this token: by a newer holder, a raise (of the fence, or of the floor of its
    /// keyspace), a break, or the folding of marks whose leases are over. Stop: retrying cannot help. Acquire
    /// again if the work is still yours to do.
    #[error(
        "token {token} is fenced: the mark of {} is {mark}; stop, or acquire again{}",
        Place(keyspace, fence),
        last_operation.ending()
    )]
    Fenced {
        /// What was presented.
        token: Token,
        /// What stands.
        mark: Mark,
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The fence, printable; empty for the floor of the keyspace.
        fence: Excerpt,
        /// What is known of the last operation written under the presented token.
        last_operation: LastOperation,
    },
    /// The token was never granted for this fence. Acquire a lease on this fence, or create the
    /// keyspace with [`Tokens::External`](crate::Tokens::External) if tokens come from elsewhere.
    #[error(
        "token {token} was not granted for {} (its mark is {mark}): acquire a lease on this fence, \
         or create the keyspace with `Tokens::External`",
        Place(keyspace, fence)
    )]
    UnknownToken {
        /// What was presented.
        token: Token,
        /// What stands (0: none yet).
        mark: Mark,
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The fence, printable; empty for the floor of the keyspace.
        fence: Excerpt,
    },
    /// An external token is further above the highest one of the keyspace than the keyspace's cap
    /// allows. Check the source; if the jump is right, `raise_all` with the token admits it.
    #[error(
        "token {token} jumps more than {cap} above {highest}, the highest that keyspace {keyspace} has admitted: \
         check its source, or raise_all with it"
    )]
    TokenJump {
        /// What was presented.
        token: Token,
        /// The highest token the keyspace has admitted.
        highest: Mark,
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The most a token may exceed it.
        cap: u64,
    },
    /// The token counter is at its maximum: no lease can be granted any more. Writes under
    /// tokens that were granted go on; move to a new store.
    #[error("the token counter is at its maximum: no more leases can be granted by this store")]
    TokensExhausted,
    /// The operation id is below the last one of this fence and token: this operation may or may not
    /// have been applied earlier, and is not executed now. Number operations upwards.
    #[error(
        "operation {operation} is older than {last}, the last one of this fence and token; it was not executed now"
    )]
    StaleOperation {
        /// What was presented.
        operation: OperationId,
        /// The last one committed.
        last: OperationId,
    },
    /// This operation was committed before, at `lsn`. Treat it as done.
    #[error("this operation was already committed, at lsn {lsn}")]
    Duplicate {
        /// Where it was committed.
        lsn: Lsn,
    },
    /// The keyspace came from a restored copy. Tell it the present value of its token source with
    /// `raise_all`, then write.
    #[error(
        "keyspace {keyspace:?} was restored: call raise_all with the present value of its token source first"
    )]
    NeedsFloor {
        /// The keyspace.
        keyspace: String,
    },
    /// A condition of the batch does not hold. Read again, decide again.
    #[error("condition on key {key} of keyspace {keyspace} does not hold: found {found}")]
    Conflict {
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The key, printable.
        key: Excerpt,
        /// What stands there.
        found: Found,
    },
    /// Someone holds the lease. Wait `remaining`, or for their release.
    #[error("the lease on {} is held by {owner}{}", Place(keyspace, fence), Hold(remaining, *by_asker))]
    Held {
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The fence, printable.
        fence: Excerpt,
        /// Who holds it, or is the next to.
        owner: OwnerId,
        /// It is the very owner who asks.
        by_asker: bool,
        /// Time left unless renewed; `None` for a lease without an end.
        remaining: Option<Duration>,
    },
    /// This grant is not the live one of its fence: it was released, broken, taken over, or never
    /// made. Acquire again.
    #[error("the lease with token {token} on {} is not held: acquire again", Place(keyspace, fence))]
    NotHeld {
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The fence, printable.
        fence: Excerpt,
        /// The token of the grant that was asked for.
        token: Token,
    },
    /// The lease ran out. Acquire again.
    #[error("the lease with token {token} on {} has expired: acquire again", Place(keyspace, fence))]
    Expired {
        /// The keyspace, printable.
        keyspace: Excerpt,
        /// The fence, printable.
        fence: Excerpt,
        /// The token of the grant.
        token: Token,
    },
    /// The wait was over first. Nothing was done.
    #[error("timed out after {after:?}")]
    Timeout {
        /// The wait that was asked for.
        after: Duration,
    },
    /// The arguments cannot be right. Fix the call.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// A key, value or batch above its limit. Split it.
    #[error("{what} of {size} bytes is above the limit of {limit} bytes")]
    TooLarge {
        /// Which thing.
        what: &'static str,
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The disk is full. Nothing was applied; free space and the next write succeeds.
    #[error("no space left in {dir} for another segment of {bytes} bytes: free space, then write again")]
    NoSpace {
        /// The directory.
        dir: String,
        /// What was needed.
        bytes: u64,
    },
    /// Another handle has the directory open. Close it, or use that one.
    #[error("{dir} is open already, in this process or another: close that first")]
    Locked {
        /// The directory.
        dir: String,
    },
    /// The store was opened read-only.
    #[error("the store is open read-only")]
    ReadOnly,
    /// Bytes on disk are not what was written. Nothing was changed. Restore a checkpoint, or take the
    /// directory to a copy and salvage it there.
    #[error("corrupt: {file} at offset {offset}: {what}; the files were left as they are")]
    Corrupt {
        /// The file.
        file: String,
        /// The byte in it.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// A token was seen elsewhere that this store has not granted: it is an older copy, and would grant it a
    /// second time. Open the newest copy. Where that is lost, [`restore`](crate::restore) this one into a new
    /// directory, which moves its counter past everything.
    #[error(
        "this store has granted tokens up to {counter}, and {seen} was seen elsewhere: it is an older copy; open \
         the newest one, or restore this one into a new directory"
    )]
    OlderCopy {
        /// The highest token that the store has granted (0: none yet).
        counter: Mark,
        /// What was seen: see [`Options::must_have_granted`](crate::Options::must_have_granted).
        seen: Token,
    },
    /// The directory was written by a newer format. Upgrade this crate.
    #[error("{file} has format version {found}, this build reads up to {supported}: upgrade tidewall")]
    UpgradeRequired {
        /// The file.
        file: String,
        /// Its version.
        found: u32,
        /// The newest this build reads.
        supported: u32,
    },
    /// The disk failed while the answer was being made durable: the call may or may not have been
    /// applied. Reopen the store and look (an [`OperationId`] makes the retry exact).
    #[error("the outcome is unknown: {cause}; reopen the store and look")]
    Indeterminate {
        /// What the disk said.
        cause: Cause,
    },
    /// A write or sync failed earlier; nothing is acknowledged any more. Reopen the store: drop or
    /// [close](crate::Db::close) this one, open it again, and make every [`Keyspace`](crate::Keyspace) anew, for
    /// those of before belong to the old opening.
    #[error("the store is poisoned by an earlier failure: {cause}; reopen it")]
    Poisoned {
        /// What the disk said.
        cause: Cause,
    },
    /// More bytes are in flight than allowed. Wait for an earlier commit.
    #[error("{in_flight} bytes are in flight, the limit is {limit}: wait for an earlier commit")]
    Busy {
        /// Bytes appended and not yet durable.
        in_flight: u64,
        /// The bound.
        limit: u64,
    },
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// The file system failed a call that is not part of a commit. Nothing was applied.
    #[error("{context}: {cause}")]
    Io {
        /// What was being done, to what.
        context: String,
        /// What the file system said.
        cause: Cause,
    },
}

impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

/// Whether a failed call may have been applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// Certainly not applied.
    NotApplied,
    /// Applied, at an earlier call ([`Error::Duplicate`]).
    Applied,
    /// Unknown until the store is reopened and read.
    Unknown,
}

impl Error {
    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Error::InvalidArgument(what.into())
    }

    pub(crate) fn io(context: impl Into<String>, cause: io::Error) -> Self {
        Error::Io { context: context.into(), cause: Cause::from(cause) }
    }

    pub(crate) fn corrupt(file: impl Into<String>, offset: u64, what: impl Into<String>) -> Self {
        Error::Corrupt { file: file.into(), offset, what: what.into() }
    }

    /// Whether the same call may succeed later with nothing else changed: the disk has space again,
    /// the other holder is done, earlier commits have finished.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Error::Held { .. }
                | Error::Timeout { .. }
                | Error::NoSpace { .. }
                | Error::Locked { .. }
                | Error::Busy { .. }
        )
    }

    /// What the file system said, where it is behind this error. It stands in the message already, so it is not
    /// handed out as a [`source`](std::error::Error::source) too: a chain of errors prints it once.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            Error::Indeterminate { cause } | Error::Poisoned { cause } | Error::Io { cause, .. } => {
                Some(cause)
            }
            _ => None,
        }
    }

    /// Whether the failed call may have been applied.
    pub fn outcome(&self) -> Outcome {
        match self {
            Error::Indeterminate { .. } | Error::StaleOperation { .. } => Outcome::Unknown,
            Error::Duplicate { .. } => Outcome::Applied,
            _ => Outcome::NotApplied,
        }
    }
}

/// A fence, in a message. The one without a name stands for the whole keyspace: it is its only fence, or its floor.
struct Place<'a>(&'a Excerpt, &'a Excerpt);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place(keyspace, fence) = self;
        if fence.bytes().is_empty() {
            return write!(f, "the whole keyspace {keyspace}");
        }
        write!(f, "{fence} in keyspace {keyspace}")
    }
}

/// Until when a lease is held, and whether by the one who asks.
struct Hold<'a>(&'a Option<Duration>, bool);

impl fmt::Display for Hold<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hold(remaining, by_asker) = self;
        if *by_asker {
            f.write_str(", who asks for it,")?;
        }
        match remaining {
            Some(time) => write!(f, " for another {time:.1?}"),
            None => f.write_str(" without an end"),
        }
    }
}

/// What a fenced writer is told of its last operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum LastOperation {
    /// The last operation with an [`OperationId`] committed under the presented token.
    Committed(OperationId),
    /// No operation with an [`OperationId`] was committed under the presented token.
    Nothing,
    /// Too long ago: the store no longer knows.
    Unknown,
}

impl LastOperation {
    /// The end of a message. Most writers number nothing, and are told nothing of it.
    fn ending(&self) -> String {
        match self {
            LastOperation::Committed(_) => format!(" ({self})"),
            LastOperation::Nothing | LastOperation::Unknown => String::new(),
        }
    }
}

impl fmt::Display for LastOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LastOperation::Committed(last) => write!(f, "the last operation committed under it is {last}"),
            LastOperation::Nothing => f.write_str("no numbered operation was committed under it"),
            LastOperation::Unknown => f.write_str("what was committed under it is no longer known"),
        }
    }
}

/// What a failed condition found in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Found {
    /// The key is absent.
    Absent,
    /// The key is present, last written at this lsn.
    Present(Lsn),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Absent => f.write_str("no value"),
            Found::Present(lsn) => write!(f, "a value of lsn {lsn}"),
        }
    }
}

/// The failure of the file system behind an error; cheap to clone.
#[derive(Clone)]
pub struct Cause(Arc<io::Error>);

impl Cause {
    /// The kind of the failure.
    pub fn kind(&self) -> io::ErrorKind {
        self.0.kind()
    }

    /// The operating system's number for it, if it came from there.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.raw_os_error()
    }
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        Cause(Arc::new(error))
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Cause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its own message is this one's already.
        self.0.source()
    }
}
