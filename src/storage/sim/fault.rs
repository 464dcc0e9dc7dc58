//! Errors on demand: which call fails, how, and what it does before it fails.

use super::SimDisk;
use super::crash::Rng;
use std::io;

/// One kind of call of the seam.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum CallKind {
    /// Every call.
    Any,
    /// [`Storage::lock`](crate::storage::Storage::lock).
    Lock,
    /// [`Storage::open`](crate::storage::Storage::open).
    Open,
    /// [`Storage::list`](crate::storage::Storage::list).
    List,
    /// [`Storage::remove`](crate::storage::Storage::remove).
    Remove,
    /// [`Storage::rename`](crate::storage::Storage::rename).
    Rename,
    /// [`Storage::sync_dir`](crate::storage::Storage::sync_dir).
    SyncDir,
    /// [`File::read_at`](crate::storage::File::read_at).
    ReadAt,
    /// [`File::write_at`](crate::storage::File::write_at).
    WriteAt,
    /// [`File::sync_data`](crate::storage::File::sync_data).
    SyncData,
    /// [`File::len`](crate::storage::File::len).
    Len,
    /// [`File::set_len`](crate::storage::File::set_len).
    SetLen,
    /// [`File::map`](crate::storage::File::map).
    Map,
    /// [`Storage::link`](crate::storage::Storage::link).
    Link,
    /// [`File::is_shared`](crate::storage::File::is_shared).
    IsShared,
}

impl CallKind {
    /// Every kind but [`CallKind::Any`].
    pub const ALL: [CallKind; 14] = [
        CallKind::Lock,
        CallKind::Open,
        CallKind::List,
        CallKind::Remove,
        CallKind::Rename,
        CallKind::SyncDir,
        CallKind::ReadAt,
        CallKind::WriteAt,
        CallKind::SyncData,
        CallKind::Len,
        CallKind::SetLen,
        CallKind::Map,
        CallKind::Link,
        CallKind::IsShared,
    ];
}

/// An error to be answered by a call to come.
///
/// Unless told otherwise it hits the next matching call, once, and the call has no effect.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "a fault does nothing until it is given to `SimDisk::fail`"]
pub struct Fault {
    call: CallKind,
    error: FaultError,
    nth: u64,
    forever: bool,
    partial: usize,
    name: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FaultError {
    Kind(io::ErrorKind),
    Errno(i32),
}

impl Fault {
    /// A fault with an error of this kind.
    pub fn new(call: CallKind, kind: io::ErrorKind) -> Self {
        Fault { call, error: FaultError::Kind(kind), nth: 0, forever: false, partial: 0, name: None }
    }

    /// A fault with the operating system's error of this number.
    pub fn errno(call: CallKind, errno: i32) -> Self {
        Fault { error: FaultError::Errno(errno), ..Fault::new(call, io::ErrorKind::Other) }
    }

    /// Lets `nth` matching calls pass first, counted from [`SimDisk::fail`] on.
    pub fn nth(mut self, nth: u64) -> Self {
        self.nth = nth;
        self
    }

    /// Hits every matching call from then on, not only one.
    pub fn forever(mut self) -> Self {
        self.forever = true;
        self
    }

    /// Before a `write_at` fails, this many of its bytes are written. No meaning for other calls.
    pub fn partial(mut self, bytes: usize) -> Self {
        self.partial = bytes;
        self
    }

    /// Matches only calls on the file of this name: for a file's calls the name it was opened by,
    /// for a rename the old name. `list` and `sync_dir` have no name.
    pub fn on(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }
}

/// What a `sync_data` that fails does to the un-synced bytes (assumption A5). In every case they
/// count as clean from then on: a later sync that succeeds does not write them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[non_exhaustive]
pub enum SyncFailure {
    /// Nothing reached the medium, and reads go on to see the new bytes and length (ext4, XFS).
    ///
    /// A later write into the same sector writes all of the sector, lost bytes included.
    #[default]
    KeepNew,
    /// Nothing reached the medium, and reads see the old bytes and length.
    RevertOld,
    /// A random part reached the medium, and reads go on to see the new bytes.
    KeepPart {
        /// Decides which part.
        seed: u64,
    },
}

/// Why a call is refused before it does its work.
pub(super) struct Refusal {
    pub error: io::Error,
    /// Refused by a planned fault, which may leave something behind; the rest never do.
    pub planned: bool,
    /// The bytes that a write leaves behind.
    pub partial: usize,
}

impl Refusal {
    pub fn plain(error: io::Error) -> Self {
        Refusal { error, planned: false, partial: 0 }
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        refusal.error
    }
}

/// Everything that may make a call fail or fall short.
#[derive(Default)]
pub(super) struct Faults {
    planned: Vec<Fault>,
    fired: u64,
    short: Option<Rng>,
    interrupt: Option<Rng>,
    pub sync_failure: SyncFailure,
}

impl Faults {
    /// Counts a call against all planned faults; the first that is due refuses it.
    pub fn check(&mut self, call: CallKind, name: &str) -> Result<(), Refusal> {
        let transfer = matches!(call, CallKind::ReadAt | CallKind::WriteAt);
        if transfer && self.interrupt.as_mut().is_some_and(|rng| rng.below(4) == 0) {
            return Err(Refusal::plain(io::ErrorKind::Interrupted.into()));
        }
        let mut due = None;
        for (position, fault) in self.planned.iter_mut().enumerate() {
            let same_call = fault.call == CallKind::Any || fault.call == call;
            if same_call && fault.name.as_deref().is_none_or(|only| only == name) {
                if fault.nth > 0 {
                    fault.nth -= 1;
                } else if due.is_none() {
                    due = Some(position);
                }
            }
        }
        let Some(position) = due else { return Ok(()) };
        self.fired += 1;
        let forever = self.planned[position].forever;
        let fault = if forever { self.planned[position].clone() } else { self.planned.remove(position) };
        let error = match fault.error {
            FaultError::Kind(kind) => io::Error::new(kind, "a planned fault"),
            FaultError::Errno(errno) => io::Error::from_raw_os_error(errno),
        };
        Err(Refusal { error, planned: true, partial: fault.partial })
    }

    /// How many of `len` bytes a transfer moves.
    pub fn shorten(&mut self, len: usize) -> usize {
        if let Some(rng) = &mut self.short
            && len > 1
            && rng.below(3) == 0
        {
            return 1 + rng.below(len as u64 - 1) as usize;
        }
        len
    }
}

/// Faults.
impl SimDisk {
    /// Plans a fault. Several may be planned; the earliest planned of those due wins.
    pub fn fail(&self, fault: Fault) {
        self.lock_inner().faults.planned.push(fault);
    }

    /// Forgets all planned faults, short transfers and interruptions.
    pub fn clear_faults(&self) {
        let faults = &mut self.lock_inner().faults;
        (faults.planned, faults.short, faults.interrupt) = (Vec::new(), None, None);
    }

    /// How many calls were refused by planned faults: a test that plans one can see that it hit.
    pub fn faults_fired(&self) -> u64 {
        self.lock_inner().faults.fired
    }

    /// What a failed `sync_data` does; [`SyncFailure::KeepNew`] unless set.
    pub fn set_sync_failure(&self, failure: SyncFailure) {
        self.lock_inner().faults.sync_failure = failure;
    }

    /// From now on a third of all reads and writes of more than one byte move fewer than asked.
    pub fn short_transfers(&self, seed: u64) {
        self.lock_inner().faults.short = Some(Rng::new(seed));
    }

    /// From now on a quarter of all reads and writes fail with [`io::ErrorKind::Interrupted`].
    pub fn interruptions(&self, seed: u64) {
        self.lock_inner().faults.interrupt = Some(Rng::new(seed));
    }
}
