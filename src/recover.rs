//! Opening a store: from the files to the state they prove.
//!
//! One job: put the segments in the order they were written, adopt what is whole of the last one, and
//! replay every op. Promises R1–R4: the state before the crash, cut at a frame at or behind `durable`;
//! only the newest tail may be torn; any other damage is named and the files are left as they are.
//!
//! Nothing is written before everything was read and found sound. Read next: `log/scan.rs`, which tells
//! a torn tail from damage.

use crate::commit::{seal_bytes, sealed_short_bytes};
use crate::error::{Error, Result};
use crate::format::header::{End, Listed, SEAL_BYTES, Seal, SegmentHeader, StoreBlock};
use crate::format::salt::Salt;
use crate::format::{HEADER_BYTES, name};
use crate::log::guard::Pins;
use crate::log::list::List;
use crate::log::pool::Spare;
use crate::log::scan::{Scanned, Start, Table, evidence, has_frames, scan, written_len};
use crate::log::segment::{Body, Segment};
use crate::options::{Options, Progress};
use crate::read_ahead::{Loaded, read_ahead};
use crate::replay::Replay;
use crate::storage::{Access, File, Mapping, Storage};
use crate::sync::Arc;
use crate::types::{Lsn, SegmentId};
use std::io;

/// What opening found, beside the data: handed out by [`Db::report`](crate::Db::report).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenReport {
    /// Segments that held frames.
    pub segments: u32,
    /// Ops replayed.
    pub ops: u64,
    /// Bytes of the newest segment that a crash had left unfinished, and that were cut: at most.
    pub cut_bytes: u64,
    /// Frames that a read-only open left out, because nothing proves that they were durable.
    pub unproven_frames: u32,
    /// Damage that cost nothing but time: caches that were read around, a copy that was repaired.
    pub warnings: Vec<String>,
}

/// What a store was when it was last closed, or killed.
pub(crate) struct Recovered {
    pub list: List,
    pub replay: Replay,
    pub spares: Vec<Spare>,
    /// How the last segment with frames ended.
    pub before: End,
    pub next: Lsn,
    pub report: OpenReport,
}

/// A listed segment that was begun: its header is on the disk.
struct Begun {
    listed: Listed,
    file: Arc<dyn File>,
    salt: Salt,
    header: SegmentHeader,
    checksum: u32,
    seal: Option<Seal>,
}

/// A listed segment as found.
enum Found {
    Begun(Begun),
    /// Perhaps with whole frames of another life, which follow this lsn.
    Empty(Spare, Option<Lsn>),
}

/// An empty segment with frames of another life, and the lsn that they follow.
type Stray = Option<(SegmentId, Lsn)>;

/// Brings the store in `storage` back: the whole of opening.
pub(crate) fn recover(storage: &Arc<dyn Storage>, options: &Options, list: List) -> Result<Recovered> {
    let mut report = OpenReport::default();
    check_unlisted(&**storage, list.block())?;
    let (mut begun, mut spares, stray) = find_segments(&**storage, list.block(), options)?;
    begun.sort_by_key(|segment| segment.header.before.lsn);
    check_chain(list.block(), &begun)?;
    let newest = read_newest(list.block(), begun.last(), &mut report)?;
    if matches!(&newest, Some(newest) if newest.scanned.frames == 0) {
        // Begun, and nothing of it arrived: its next life starts from nothing.
        if let Some(Begun { listed, file, .. }) = begun.pop() {
            spares.push(Spare { listed, file });
        }
    }
    let mut replay = Replay::new(list.block());
    let mut loaded = Vec::with_capacity(begun.len());
    for (at, segment) in begun.iter().enumerate() {
        let is_newest = at + 1 == begun.len();
        let tail = newest.as_ref().filter(|newest| is_newest && newest.scanned.frames > 0);
        loaded.push(load_segment(segment, tail, options, &mut report)?);
    }
    loaded.iter().try_for_each(|loaded| replay.keyspaces(loaded))?;
    read_ahead(&loaded, replay.seed, options.background, |batch| {
        let segment = &loaded[batch.segment];
        if batch.begins {
            if let Some(callback) = &options.progress {
                callback(Progress {
                    segments_done: batch.segment as u32,
                    segments_all: begun.len() as u32,
                    ops: report.ops,
                });
            }
            replay.begin(segment);
        }
        report.ops += replay.batch(segment, batch)?;
        Ok(())
    })?;
    let before = loaded.last().map_or(End::default(), |loaded| loaded.end);
    drop(loaded);
    for segment in &begun {
        replay.usage.seal(segment.listed.segment, segment.listed.bytes);
    }
    let whole = newest.as_ref().map_or(before.lsn, |newest| newest.scanned.next.before());
    if let Some((segment, lsn)) = stray
        && lsn >= whole
    {
        // Whoever wrote them had replayed the log up to here, and drawn a life that STORE does not know.
        let what = format!("it is older than the frames in {}", name::segment(segment));
        return Err(Error::corrupt(name::STORE, 0, what));
    }
    options.check_counter(replay.counter())?;
    report.segments = begun.len() as u32;
    let mut recovered = Recovered { list, replay, spares, before, next: before.lsn.next(), report };
    if !options.read_only {
        let newest = begun.last().zip(newest.as_ref().filter(|newest| newest.scanned.frames > 0));
        let adopted = adopt(&recovered, newest)?;
        if let Some((segment, bytes)) = adopted {
            recovered.replay.usage.seal(segment, bytes);
        }
        begin_incarnation(&**storage, &mut recovered, adopted, options)?;
    }
    recovered.replay.settle(options.read_mode)?;
    Ok(recovered)
}

/// Opens every listed file and tells those that were begun from those that are empty.
fn find_segments(
    storage: &dyn Storage,
    block: &StoreBlock,
    options: &Options,
) -> Result<(Vec<Begun>, Vec<Spare>, Stray)> {
    let (mut begun, mut spares, mut stray) = (Vec::new(), Vec::new(), None::<(SegmentId, Lsn)>);
    for listed in &block.segments {
        match find_segment(storage, block, listed, options)? {
            Found::Begun(segment) => begun.push(segment),
            Found::Empty(spare, follows) => {
                let follows = follows.map(|lsn| (spare.listed.segment, lsn));
                stray = [stray, follows].into_iter().flatten().max_by_key(|&(_, lsn)| lsn);
                spares.push(spare);
            }
        }
    }
    Ok((begun, spares, stray))
}

fn find_segment(
    storage: &dyn Storage,
    block: &StoreBlock,
    listed: &Listed,
    options: &Options,
) -> Result<Found> {
    let file_name = name::segment(listed.segment);
    let failed = |e: io::Error| Error::io(format!("reading {file_name}"), e);
    let access = if options.read_only { Access::Read } else { Access::Write };
    let file = match storage.open(&file_name, access) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(Error::corrupt(file_name, 0, "the segment is listed in STORE and missing"));
        }
        Err(e) => return Err(Error::io(format!("opening {file_name}"), e)),
    };
    let origin =
        block.origin_id(listed).ok_or_else(|| Error::corrupt(name::STORE, 0, "an unknown origin"))?;
    let salt = Salt::new(origin, listed.segment, listed.life);
    let len = file.len().map_err(failed)?.min(listed.bytes as u64) as usize;
    let mut head = vec![0; len.min(HEADER_BYTES as usize + 64)];
    file.read_exact_at(&mut head, 0).map_err(failed)?;
    let header = SegmentHeader::decode(&head, salt, &file_name)?;
    let seal = read_seal(&*file, len, salt).map_err(failed)?;
    if len < listed.bytes as usize && seal.is_none() {
        return Err(Error::corrupt(file_name, len as u64, "the file is cut"));
    }
    match header {
        Some((header, checksum)) => {
            Ok(Found::Begun(Begun { listed: *listed, file, salt, header, checksum, seal }))
        }
        None if has_frames(&head, salt) || seal.is_some() => {
            Err(Error::corrupt(file_name, 0, "the header of a segment with frames is damaged"))
        }
        None => {
            check_empty(&head, listed, origin, &file_name)?;
            // Frames wait for their header to be durable: a header that never was one has none behind it.
            let torn = head.iter().any(|&byte| byte != 0) && SegmentHeader::decode_any(&head).is_none();
            if torn && evidence(&file.map(len).map_err(failed)?, salt, HEADER_BYTES, Lsn::ZERO).is_some() {
                return Err(Error::corrupt(file_name, 0, "the header of a segment with frames is damaged"));
            }
            let follows = frames_of_another_life(&*file, len, &head, &file_name)?;
            Ok(Found::Empty(Spare { listed: *listed, file }, follows))
        }
    }
}

/// A file that is empty in its listed life may hold an earlier one, but nothing that belongs elsewhere.
fn check_empty(head: &[u8], listed: &Listed, store_id: &[u8; 16], file_name: &str) -> Result<()> {
    let foreign = SegmentHeader::decode_any(head)
        .is_some_and(|(header, _)| header.segment != listed.segment || header.store_id != *store_id);
    if foreign || StoreBlock::is_one(head) {
        return Err(Error::corrupt(file_name, 0, "another file lies in the place of this segment"));
    }
    Ok(())
}

/// The lsn that whole frames of another life follow, if there are any.
fn frames_of_another_life(file: &dyn File, len: usize, head: &[u8], file_name: &str) -> Result<Option<Lsn>> {
    let Some((header, salt)) = SegmentHeader::decode_any(head) else { return Ok(None) };
    if !has_frames(head, salt) {
        return Ok(None);
    }
    let map = file.map(len).map_err(|e| Error::io(format!("reading {file_name}"), e))?;
    let lsn = header.before.lsn;
    let checksum = SegmentHeader::decode(head, salt, file_name)?.map_or(0, |(_, checksum)| checksum);
    let frames = scan(&map, &Start { segment: header.segment, salt, checksum, lsn: lsn.next() }).frames;
    Ok((frames > 0).then_some(lsn))
}

/// A segment gets frames only once it is listed, and its id is never used again. One with an id that
/// `STORE` has yet to give away is newer than it: then `STORE` is an old copy, and what it does not list
/// may have held the highest marks.
pub(crate) fn check_unlisted(storage: &dyn Storage, block: &StoreBlock) -> Result<()> {
    let names = storage.list().map_err(|e| Error::io(format!("listing {}", storage.describe()), e))?;
    for file_name in names {
        let newer = name::parse_segment(&file_name).is_some_and(|id| id.0 >= block.next_segment);
        if newer && begins_like(storage, &file_name, |head| SegmentHeader::belongs_to(head, &block.store_id))
        {
            let what = format!("it is older than {file_name}, which it does not know");
            return Err(Error::corrupt(name::STORE, 0, what));
        }
    }
    Ok(())
}

pub(crate) fn read_seal(file: &dyn File, len: usize, salt: Salt) -> io::Result<Option<Seal>> {
    let Some(offset) = len.checked_sub(SEAL_BYTES) else { return Ok(None) };
    let mut bytes = [0; SEAL_BYTES];
    file.read_exact_at(&mut bytes, offset as u64)?;
    Ok(Seal::decode(&bytes, salt, offset as u32))
}

/// Every segment but the last is sealed, and the next one's header names exactly that seal. Upholds R2.
fn check_chain(block: &StoreBlock, begun: &[Begun]) -> Result<()> {
    let is_listed = |id: u32| id != 0 && block.segments.iter().any(|listed| listed.segment.0 == id);
    for (at, segment) in begun.iter().enumerate() {
        let before = &segment.header.before;
        let previous = at.checked_sub(1).map(|at| &begun[at]);
        if let Some(previous) = previous {
            let file = name::segment(previous.listed.segment);
            let Some(seal) = previous.seal else {
                return Err(Error::corrupt(file, previous.listed.bytes as u64, "the seal is damaged"));
            };
            if seal.end == *before {
                continue;
            }
        }
        // What it names may have been retired; what is listed must be the one before.
        if is_listed(before.segment) {
            let what = format!("it follows segment {:06}, which is not as it says", before.segment);
            return Err(Error::corrupt(name::segment(segment.listed.segment), 0, what));
        }
    }
    if is_listed(block.sealed_through)
        && !begun
            .iter()
            .any(|segment| segment.listed.segment.0 == block.sealed_through && segment.seal.is_some())
    {
        let file = name::segment(SegmentId(block.sealed_through));
        return Err(Error::corrupt(
            file,
            0,
            "STORE says that the segment was sealed, and its seal is damaged",
        ));
    }
    Ok(())
}

/// The newest segment, when its end is not proven by anything that came later.
struct Newest {
    /// A copy: the file is about to be written and cut, so it is not mapped yet.
    bytes: Vec<u8>,
    scanned: Scanned,
}

/// Scans the last segment frame by frame, unless `STORE` says that it was sealed durably.
fn read_newest(block: &StoreBlock, last: Option<&Begun>, report: &mut OpenReport) -> Result<Option<Newest>> {
    let Some(last) = last else { return Ok(None) };
    if last.seal.is_some() && block.sealed_through == last.listed.segment.0 {
        return Ok(None);
    }
    let len = last.file.len().map_err(|e| last.failed(e))?.min(last.listed.bytes as u64);
    let mut bytes = vec![0; len as usize];
    last.file.read_exact_at(&mut bytes, 0).map_err(|e| last.failed(e))?;
    let scanned = scan(&bytes, &last.start());
    if let Some(evidence) = scanned.damage {
        let what = format!("a frame is damaged: the one at {evidence} proves that it was durable");
        return Err(Error::corrupt(name::segment(last.listed.segment), scanned.end as u64, what));
    }
    if let Some(seal) = last.seal {
        // Sealed, and the word of it did not reach STORE: all of its frames were synced before.
        if seal.end.offset != scanned.end || seal.end.checksum != scanned.checksum {
            return Err(Error::corrupt(
                name::segment(last.listed.segment),
                scanned.end as u64,
                "a frame of a sealed segment is damaged",
            ));
        }
    } else {
        report.cut_bytes = written_len(&bytes[scanned.end as usize..]) as u64;
    }
    Ok(Some(Newest { bytes, scanned }))
}

/// What is to be replayed of a segment, by its key table, or by a scan where there is none to believe.
fn load_segment(
    segment: &Begun,
    tail: Option<&Newest>,
    options: &Options,
    report: &mut OpenReport,
) -> Result<Loaded> {
    let (end, table, counter) = match tail {
        Some(newest) => proven_part(segment, newest, options, report),
        None => table_of(segment, report)?,
    };
    let map = match tail {
        Some(newest) => Mapping::from_bytes(newest.bytes[..end.offset as usize].to_vec()),
        None => load(segment, end.offset as usize)?,
    };
    let form = Segment {
        id: segment.listed.segment,
        salt: segment.salt,
        file: segment.file.clone(),
        body: Body::Map(map),
        pins: Pins::new(),
    };
    Ok(Loaded { segment: Arc::new(form), table, end, counter: segment.header.counter.max(counter) })
}

/// All whole frames of the newest segment; for a read-only open, which cannot rewrite them, those that
/// later frames prove.
fn proven_part(
    segment: &Begun,
    newest: &Newest,
    options: &Options,
    report: &mut OpenReport,
) -> (End, Table, u64) {
    let scanned = &newest.scanned;
    let whole = End {
        segment: segment.listed.segment.0,
        offset: scanned.end,
        checksum: scanned.checksum,
        lsn: Lsn::new(scanned.next.get() - 1),
    };
    if !options.read_only || segment.seal.is_some() || scanned.unproven == scanned.end {
        return (whole, scanned.table.clone(), 0);
    }
    let proven = scan(&newest.bytes[..scanned.unproven as usize], &segment.start());
    report.unproven_frames = scanned.frames - proven.frames;
    let end =
        End { offset: proven.end, checksum: proven.checksum, lsn: Lsn::new(proven.next.get() - 1), ..whole };
    (end, proven.table, 0)
}

fn table_of(segment: &Begun, report: &mut OpenReport) -> Result<(End, Table, u64)> {
    let file_name = name::segment(segment.listed.segment);
    let seal = segment.seal.ok_or_else(|| Error::corrupt(&file_name, 0, "the seal is damaged"))?;
    let len = segment.file.len().map_err(|e| segment.failed(e))?.min(segment.listed.bytes as u64);
    if let Some(offset) = len.checked_sub(SEAL_BYTES as u64 + seal.table_len as u64) {
        let mut table = vec![0; seal.table_len as usize];
        segment.file.read_exact_at(&mut table, offset).map_err(|e| segment.failed(e))?;
        if segment.salt.checksum(offset as u32, &[&table]) == seal.table_checksum {
            return Ok((seal.end, Table::from_bytes(table, seal.keyspaces), seal.counter));
        }
    }
    report.warnings.push(format!("{file_name}: the key table is damaged; the segment was scanned"));
    let scanned = scan(&load(segment, len as usize)?, &segment.start());
    if scanned.end != seal.end.offset || scanned.checksum != seal.end.checksum {
        return Err(Error::corrupt(file_name, scanned.end as u64, "a frame of a sealed segment is damaged"));
    }
    Ok((seal.end, scanned.table, seal.counter))
}

/// Makes the newest segment's frames durable for certain (after a failed sync the cache may hold what
/// the disk does not), seals it where they end, and cuts it there; answers its length. Upholds R1 and R4.
fn adopt(recovered: &Recovered, newest: Option<(&Begun, &Newest)>) -> Result<Option<(SegmentId, u32)>> {
    let Some((segment, Newest { bytes, scanned })) = newest else { return Ok(None) };
    let failed = |e| segment.failed(e);
    let (header, _) = segment.header.encode(segment.salt);
    segment.file.write_all_at(&header, 0).map_err(failed)?;
    let from = scanned.unproven as usize;
    segment.file.write_all_at(&bytes[from..scanned.end as usize], from as u64).map_err(failed)?;
    // The seal proves the frames: never the one without the others.
    segment.file.sync_data().map_err(failed)?;
    let table = &scanned.table;
    let len = sealed_short_bytes(scanned.end, table);
    if len > segment.listed.bytes {
        let file = name::segment(segment.listed.segment);
        return Err(Error::corrupt(file, scanned.end as u64, "the frames leave no room for the seal"));
    }
    let counter = recovered.replay.counter();
    let seal = seal_bytes(segment.salt, recovered.before, scanned.frames, counter, table, scanned.end);
    segment.file.write_all_at(&seal, scanned.end as u64).map_err(failed)?;
    segment.file.sync_data().map_err(failed)?;
    segment.file.set_len(len as u64).map_err(failed)?;
    segment.file.sync_data().map_err(failed)?;
    Ok(Some((segment.listed.segment, len)))
}

/// Draws a new incarnation, gives every empty segment a new life (so that no frame of an earlier one
/// can ever be glued on), and removes what was made and never listed.
fn begin_incarnation(
    storage: &dyn Storage,
    recovered: &mut Recovered,
    adopted: Option<(SegmentId, u32)>,
    options: &Options,
) -> Result<()> {
    let incarnation = options.entropy.u64()?;
    for spare in &mut recovered.spares {
        spare.listed.life = options.entropy.u64()?;
        spare.listed.origin = 0;
    }
    let (spares, sealed) = (&recovered.spares, recovered.before.segment);
    recovered
        .list
        .update(|block| {
            block.incarnation_before = block.incarnation;
            block.incarnation = incarnation;
            block.sealed_through = sealed;
            if let Some((segment, bytes)) = adopted {
                block.set_bytes(segment, bytes);
            }
            for listed in &mut block.segments {
                if let Some(spare) = spares.iter().find(|spare| spare.listed.segment == listed.segment) {
                    *listed = spare.listed;
                }
            }
        })
        .map_err(|e| Error::io("writing STORE", e))?;
    remove_unlisted(storage, recovered.list.block())
}

/// Files that a crash left between being made and being listed, or struck out and not yet removed.
/// Nothing is removed that this store did not make.
fn remove_unlisted(storage: &dyn Storage, block: &StoreBlock) -> Result<()> {
    let failed = |e| Error::io(format!("listing {}", storage.describe()), e);
    for file_name in storage.list().map_err(failed)? {
        let ours = match name::parse_segment(&file_name) {
            Some(id) if block.segments.iter().all(|listed| listed.segment != id) => {
                is_ours(storage, &file_name, &block.store_id)
            }
            Some(_) => false,
            None => file_name == name::STORE_NEW,
        };
        if ours {
            // What cannot be removed now is in nobody's way.
            let _ = storage.remove(&file_name);
        }
    }
    // Always: a larger STORE may have got its name just before a kill, and that name not be durable yet.
    storage.sync_dir().map_err(failed)
}

fn is_ours(storage: &dyn Storage, file_name: &str, store_id: &[u8; 16]) -> bool {
    begins_like(storage, file_name, |head| {
        head.iter().all(|&byte| byte == 0) || SegmentHeader::belongs_to(head, store_id)
    })
}

fn begins_like(storage: &dyn Storage, file_name: &str, is_it: impl FnOnce(&[u8]) -> bool) -> bool {
    let read = || -> io::Result<Vec<u8>> {
        let file = storage.open(file_name, Access::Read)?;
        let mut head = vec![0; file.len()?.min(HEADER_BYTES as u64) as usize];
        file.read_exact_at(&mut head, 0)?;
        Ok(head)
    };
    read().is_ok_and(|head| is_it(&head))
}

/// The bytes of a segment for the time of the recovery.
fn load(segment: &Begun, len: usize) -> Result<Mapping> {
    segment.file.map(len).map_err(|e| segment.failed(e))
}

impl Begun {
    fn failed(&self, e: io::Error) -> Error {
        Error::io(format!("reading {}", name::segment(self.listed.segment)), e)
    }

    fn start(&self) -> Start {
        Start {
            segment: self.listed.segment,
            salt: self.salt,
            checksum: self.checksum,
            lsn: self.header.before.lsn.next(),
        }
    }
}
