//! A store seen from outside, beside whoever has it open.
//!
//! One job: checked reads of `STORE` and of segments, without the lock and without a write. Another process may
//! be writing: what is not whole at first is read again, and only what stays so is called damaged. Decides
//! nothing; what a store *is* says only an open.
//!
//! Read next: `log/scan.rs`, which tells a torn tail from damage.

use crate::error::{Error, Result};
use crate::format::frame::{FRAME_HEADER_BYTES, FrameHeader};
use crate::format::header::{Listed, SEAL_BYTES, Seal, SegmentHeader, StoreBlock};
use crate::format::salt::Salt;
use crate::format::{FORMAT_VERSION, HEADER_BYTES, name, op};
use crate::found::{BLANKED, is_blanked};
use crate::index_file::IndexFile;
use crate::log::list::List;
use crate::log::scan::{Start, Table, frame_end, scan};
use crate::op::{GrantValue, KeyspaceValue, Kind, Op};
use crate::options::KeyspaceOptions;
use crate::storage::{Access, Disk, Storage};
use crate::sync::Arc;
use crate::types::{Lsn, Mark, OperationId, OwnerId, SegmentId, Ttl};
use std::io;
use std::path::Path;

/// How often what is not whole is read again before it is called damaged: a writer may be in the middle of it.
const TRIES: usize = 5;

/// A store seen from outside: what `STORE` says, and on request what the segments hold.
///
/// Works beside a process that has the store open, and takes no lock. So each answer is as of when it was
/// read, and two of them need not fit together.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path().join("data");
/// let db = tidewall::Db::open(&dir)?;
/// let seen = tidewall::Inspection::of(&dir)?;
/// for segment in seen.segments()? {
///     println!("{segment:?}");
/// }
/// # db.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Inspection {
    storage: Arc<dyn Storage>,
    block: StoreBlock,
    one_copy: bool,
}

/// A segment as listed, and as its header and seal say.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SegmentInfo {
    /// Its number, which is in the name of its file and never used again.
    pub segment: u32,
    /// Bytes on disk, as listed.
    pub bytes: u64,
    /// What is in it.
    pub state: SegmentState,
}

/// The index file that `STORE` names: what the next open begins with.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct IndexInfo {
    /// The name of the file.
    pub file: String,
    /// Bytes on disk; 0 if it is of no use.
    pub bytes: u64,
    /// The lsn up to which it holds the state.
    pub through: Lsn,
    /// Ops behind that, which the next open replays.
    pub ops_behind: u64,
    /// Why the next open has to read the whole log instead, as far as the head of the file tells.
    pub trouble: Option<String>,
}

/// What is in a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SegmentState {
    /// Nothing yet: a spare.
    Empty,
    /// Frames, the first of them with this lsn; more may follow.
    Open {
        /// The lsn of the first frame.
        first: Lsn,
        /// The token counter when it was begun.
        counter: u64,
    },
    /// Frames that are closed off by a seal.
    Sealed {
        /// The lsn of the first frame.
        first: Lsn,
        /// The lsn of the last frame.
        last: Lsn,
        /// How many frames.
        frames: u32,
        /// The bytes up to the end of the frames.
        end: u32,
        /// The token counter when it was sealed.
        counter: u64,
    },
    /// Neither of these, and why.
    Damaged(String),
}

/// The frames of one segment, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SegmentLog {
    /// The number of the segment.
    pub segment: u32,
    /// Every whole frame.
    pub frames: Vec<LogFrame>,
    /// The byte behind the last whole frame.
    pub end: u32,
    /// What is wrong behind it, if anything: else the log goes on there, or ends.
    pub damage: Option<String>,
}

/// One frame: what was made durable together or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LogFrame {
    /// Where it begins in the segment.
    pub offset: u32,
    /// Bytes, its header included.
    pub bytes: u32,
    /// Its place in the order.
    pub lsn: Lsn,
    /// Everything up to here was durable when it was written.
    pub durable: Lsn,
    /// What it holds; nothing in an idle frame.
    pub ops: Vec<LogOp>,
}

/// One op of a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LogOp {
    /// Where it begins in the segment.
    pub offset: u32,
    /// When it happened: the frame's lsn, or an earlier one if it was carried here.
    pub lsn: Lsn,
    /// The number of its keyspace, from 1; 0 where it has none. Keyspaces are numbered as they are created.
    pub keyspace: u16,
    /// The token it was written under; 0 where it has none. To look at, not to write with.
    pub mark: Mark,
    /// The numbered operation that was the last one of its fence and token, where that is recorded.
    pub operation: Option<OperationId>,
    /// What it did.
    pub what: LogChange,
}

/// What an op did.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LogChange {
    /// A keyspace was created, or told that it needs a floor.
    Keyspace {
        /// Its name.
        name: String,
        /// Its options.
        options: KeyspaceOptions,
        /// It takes no writes until `raise_all` tells it the present value of its token source.
        needs_floor: bool,
    },
    /// A value was written.
    Put {
        /// The key.
        key: Vec<u8>,
        /// The value.
        value: Vec<u8>,
    },
    /// A key was deleted.
    Delete {
        /// The key.
        key: Vec<u8>,
    },
    /// A lease was granted.
    Grant {
        /// On which fence.
        fence: Vec<u8>,
        /// To whom.
        owner: OwnerId,
        /// For how long.
        ttl: Ttl,
    },
    /// A lease was given back.
    Release {
        /// On which fence.
        fence: Vec<u8>,
    },
    /// A mark was raised without a value.
    Raise {
        /// Of which fence.
        fence: Vec<u8>,
        /// Why, where a lease was broken.
        reason: Vec<u8>,
    },
    /// The floor of the keyspace was raised.
    Floor {
        /// The token itself is fenced as well.
        is_exclusive: bool,
    },
    /// The token counter was moved up.
    Counter,
    /// A kind of op that cannot be shown, because its value is not as its kind asks.
    Unreadable,
}

impl Inspection {
    /// Looks at the store in `dir`. Takes no lock and changes nothing.
    ///
    /// # Errors
    /// [`Error::Io`]: there is no store, or it cannot be read. [`Error::Corrupt`]: both copies of `STORE` are
    /// damaged. [`Error::UpgradeRequired`]: it is newer than this crate.
    pub fn of(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let failed = |e| Error::io(format!("opening the directory {}", dir.display()), e);
        Self::in_storage(Arc::new(Disk::existing(dir).map_err(failed)?))
    }

    /// Looks at the store in a storage that is no directory of this machine.
    ///
    /// # Errors
    /// As [`Inspection::of`].
    pub fn in_storage(storage: Arc<dyn Storage>) -> Result<Self> {
        let missing = || {
            let what = format!("opening the store in {}", storage.describe());
            Error::io(what, io::Error::new(io::ErrorKind::NotFound, "there is no file STORE"))
        };
        let load = || List::load(storage.clone(), Access::Read);
        let (list, damage) =
            whole(load, |loaded| matches!(loaded, Ok(Some((_, damage))) if !damage.one_copy))?
                .ok_or_else(missing)?;
        let block = list.block().clone();
        Ok(Inspection { storage, block, one_copy: damage.one_copy })
    }

    /// Where it is.
    pub fn dir(&self) -> String {
        self.storage.describe()
    }

    /// The version of the format.
    pub fn format_version(&self) -> u32 {
        FORMAT_VERSION
    }

    /// What tells this store from every other; drawn when it was created.
    pub fn store_id(&self) -> u128 {
        u128::from_le_bytes(self.block.store_id)
    }

    /// The ids of the stores that this one was restored from, the nearest first.
    pub fn ancestors(&self) -> Vec<u128> {
        self.block.ancestors.iter().rev().map(|id| u128::from_le_bytes(*id)).collect()
    }

    /// What tells this opening of the store from every other; drawn at each open for writing.
    pub fn incarnation(&self) -> u64 {
        self.block.incarnation
    }

    /// How often `STORE` was written.
    pub fn generation(&self) -> u64 {
        self.block.generation
    }

    /// Whether it is a checkpoint, which opens read-only or through a restore.
    pub fn is_checkpoint(&self) -> bool {
        self.block.is_checkpoint
    }

    /// Whether one of the two copies of `STORE` is damaged; the next open for writing repairs it.
    pub fn has_damaged_copy(&self) -> bool {
        self.one_copy
    }

    /// The figures that the process which has the store open has published, as JSON: see
    /// [`Options::publish_stats`](crate::Options::publish_stats). `None` where there are none. They may be
    /// left over from a process that was killed: compare their `incarnation`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn published_stats(&self) -> Result<Option<String>> {
        let failed = |e| Error::io(format!("reading {}", name::STATS), e);
        let file = match self.storage.open(name::STATS, Access::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let mut text = vec![0; file.len().map_err(failed)? as usize];
        file.read_exact_at(&mut text, 0).map_err(failed)?;
        Ok(String::from_utf8(text).ok())
    }

    /// Every listed segment, in the order of the log, the empty ones last.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::UpgradeRequired`]. Damage is in the [`SegmentState`].
    pub fn segments(&self) -> Result<Vec<SegmentInfo>> {
        let mut infos = Vec::new();
        for listed in &self.block.segments {
            let state = whole(
                || self.state(listed),
                |state| matches!(state, Ok(state) if !matches!(state, SegmentState::Damaged(_))),
            )?;
            infos.push(SegmentInfo { segment: listed.segment.0, bytes: listed.bytes as u64, state });
        }
        infos.sort_by_key(|info| match &info.state {
            SegmentState::Open { first, .. } | SegmentState::Sealed { first, .. } => {
                (0, *first, info.segment)
            }
            SegmentState::Damaged(_) => (1, Lsn::ZERO, info.segment),
            SegmentState::Empty => (2, Lsn::ZERO, info.segment),
        });
        Ok(infos)
    }

    /// The index file, if there is one. Reads its head, and every segment behind it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::UpgradeRequired`]. Damage of the file is in [`IndexInfo::trouble`].
    pub fn index(&self) -> Result<Option<IndexInfo>> {
        let through = self.block.index;
        let Some(found) = IndexFile::open(&*self.storage, &self.block) else { return Ok(None) };
        let (bytes, trouble) = found.map_or_else(|why| (0, Some(why)), |file| (file.len(), None));
        let behind = self.block.segments.iter().map(|listed| self.ops_behind(listed, through));
        let ops_behind = behind.sum::<Result<u64>>()?;
        Ok(Some(IndexInfo { file: name::index(through), bytes, through, ops_behind, trouble }))
    }

    /// The ops of a segment that was begun behind `lsn`.
    fn ops_behind(&self, listed: &Listed, lsn: Lsn) -> Result<u64> {
        let salt = self.salt(listed)?;
        let Some(head) = self.read(listed, |len| len.min(HEADER_BYTES as usize))? else { return Ok(0) };
        let header = SegmentHeader::decode(&head.bytes, salt, &head.name)?;
        let Some((header, checksum)) = header.filter(|(header, _)| header.before.lsn >= lsn) else {
            return Ok(0);
        };
        let Some(file) = self.read(listed, |len| len)? else { return Ok(0) };
        let start = Start { segment: listed.segment, salt, checksum, lsn: header.before.lsn.next() };
        Ok(Table::offsets(scan(&file.bytes, &start).table.bytes()).count() as u64)
    }

    /// The frames of a segment, up to the first one that is not whole. Reads all of it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: `STORE` lists no such segment. [`Error::Corrupt`]: it is missing.
    /// [`Error::Io`], [`Error::UpgradeRequired`].
    pub fn log(&self, segment: u32) -> Result<SegmentLog> {
        let listed = self.block.segments.iter().find(|listed| listed.segment.0 == segment);
        let listed = listed.ok_or_else(|| Error::invalid(format!("the store has no segment {segment}")))?;
        whole(|| self.frames(listed), |log| matches!(log, Ok(log) if log.damage.is_none()))
    }

    fn state(&self, listed: &Listed) -> Result<SegmentState> {
        let Some(file) = self.read(listed, |len| len.min(HEADER_BYTES as usize))? else {
            return Ok(SegmentState::Damaged("the file is missing".to_owned()));
        };
        let salt = self.salt(listed)?;
        let Some((header, _)) = SegmentHeader::decode(&file.bytes, salt, &file.name)? else {
            return Ok(match is_blanked(&file.bytes, listed) {
                true => SegmentState::Damaged(BLANKED.to_owned()),
                false => SegmentState::Empty,
            });
        };
        let first = header.before.lsn.next();
        Ok(match file.seal(salt)? {
            Some(seal) => SegmentState::Sealed {
                first,
                last: seal.end.lsn,
                frames: seal.frames,
                end: seal.end.offset,
                counter: seal.counter,
            },
            None if file.len < listed.bytes as usize => SegmentState::Damaged("the file is cut".to_owned()),
            None => SegmentState::Open { first, counter: header.counter },
        })
    }

    fn frames(&self, listed: &Listed) -> Result<SegmentLog> {
        let segment = listed.segment;
        let mut log = SegmentLog { segment: segment.0, frames: Vec::new(), end: HEADER_BYTES, damage: None };
        let Some(file) = self.read(listed, |len| len)? else {
            return Err(Error::corrupt(name::segment(segment), 0, "the segment is listed and missing"));
        };
        let salt = self.salt(listed)?;
        let Some((header, checksum)) = SegmentHeader::decode(&file.bytes, salt, &file.name)? else {
            return Ok(log);
        };
        let start = Start { segment, salt, checksum, lsn: header.before.lsn.next() };
        let scanned = scan(&file.bytes, &start);
        log.end = scanned.end;
        log.damage = match (scanned.damage, file.seal(salt)?) {
            (Some(later), _) => {
                Some(format!("a frame is damaged: the one at {later} proves that it was durable"))
            }
            (None, Some(seal)) if (seal.end.offset, seal.end.checksum) != (scanned.end, scanned.checksum) => {
                Some("the frames do not end as the seal says".to_owned())
            }
            _ => None,
        };
        let mut offset = HEADER_BYTES;
        while offset < scanned.end
            && let Some((header, _)) = FrameHeader::decode(&file.bytes[offset as usize..], salt, offset)
        {
            log.frames.push(frame(&file.bytes, segment, offset, &header));
            offset = frame_end(offset, header.body_len);
        }
        Ok(log)
    }

    fn salt(&self, listed: &Listed) -> Result<Salt> {
        let origin = self.block.origin_id(listed);
        let origin = origin.ok_or_else(|| Error::corrupt(name::STORE, 0, "an unknown origin"))?;
        Ok(Salt::new(origin, listed.segment, listed.life))
    }

    /// Reads the front of a segment, and its end; `None` when there is no such file.
    fn read(&self, listed: &Listed, front: impl Fn(usize) -> usize) -> Result<Option<SegmentFile>> {
        let name = name::segment(listed.segment);
        let read = || -> io::Result<SegmentFile> {
            let file = self.storage.open(&name, Access::Read)?;
            let len = file.len()?.min(listed.bytes as u64) as usize;
            let mut bytes = vec![0; front(len)];
            file.read_exact_at(&mut bytes, 0)?;
            let mut end = vec![0; len.min(SEAL_BYTES)];
            let at = len - end.len();
            file.read_exact_at(&mut end, at as u64)?;
            Ok(SegmentFile { name: name.clone(), bytes, end, len })
        };
        match read() {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(format!("reading {name}"), e)),
        }
    }
}

/// What was read of a segment.
struct SegmentFile {
    name: String,
    bytes: Vec<u8>,
    end: Vec<u8>,
    len: usize,
}

impl SegmentFile {
    fn seal(&self, salt: Salt) -> Result<Option<Seal>> {
        Ok(Seal::decode(&self.end, salt, (self.len - self.end.len()) as u32))
    }
}

/// Reads again while it is not whole, for a writer may be in the middle of it.
fn whole<T>(read: impl Fn() -> Result<T>, is_whole: impl Fn(&Result<T>) -> bool) -> Result<T> {
    let mut answer = read();
    for _ in 1..TRIES {
        if is_whole(&answer) {
            break;
        }
        answer = read();
    }
    answer
}

/// A frame that was found whole.
fn frame(bytes: &[u8], segment: SegmentId, offset: u32, header: &FrameHeader) -> LogFrame {
    let from = offset as usize + FRAME_HEADER_BYTES;
    let to = from + header.body_len as usize;
    let mut ops = Vec::new();
    let mut at = from;
    while at < to
        && let Ok(head) = op::decode(&bytes[..to], at, segment, at as u32)
    {
        let op = head.op(bytes);
        let lsn = op.links.moved.unwrap_or(header.lsn);
        ops.push(LogOp {
            offset: at as u32,
            lsn,
            keyspace: op.keyspace.0,
            mark: Mark::from_number(op.token),
            operation: op.links.last.filter(|&(_, of)| of == lsn).map(|(last, _)| last),
            what: change(&op).unwrap_or(LogChange::Unreadable),
        });
        at = head.end();
    }
    LogFrame {
        offset,
        bytes: frame_end(offset, header.body_len) - offset,
        lsn: header.lsn,
        durable: header.durable,
        ops,
    }
}

fn change(op: &Op<'_>) -> Option<LogChange> {
    let name = op.key.to_vec();
    Some(match op.kind {
        Kind::Keyspace => {
            let KeyspaceValue { options, needs_floor } = KeyspaceValue::decode(op.value)?;
            LogChange::Keyspace { name: String::from_utf8(name).ok()?, options, needs_floor }
        }
        Kind::Put => LogChange::Put { key: name, value: op.value.to_vec() },
        Kind::Delete => LogChange::Delete { key: name },
        Kind::Grant => {
            let GrantValue { owner, ttl, .. } = GrantValue::decode(op.value)?;
            LogChange::Grant { fence: name, owner, ttl }
        }
        Kind::Release => LogChange::Release { fence: name },
        Kind::Mark => LogChange::Raise { fence: name, reason: op.value.to_vec() },
        Kind::Floor => LogChange::Floor { is_exclusive: op.value == [1] },
        Kind::Counter => LogChange::Counter,
    })
}
