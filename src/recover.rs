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
use crate::format::header::{End, SegmentHeader, SpareBlock, StoreBlock};
use crate::format::{HEADER_BYTES, name};
use crate::found::{Begun, find_segments, load, table_of};
use crate::index_file::{IndexFile, Known, is_ours as is_ours_as_index, replay_on};
use crate::log::list::List;
use crate::log::pool::Spare;
use crate::log::scan::{Scanned, Table, scan, written_len};
use crate::log::segment::{Body, Segment};
use crate::options::{Options, Progress};
use crate::read_ahead::{Loaded, read_ahead};
use crate::replay::Replay;
use crate::storage::{Access, Mapping, Storage};
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
    /// What the index file takes, if it was of use.
    pub index_bytes: u64,
}

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
    let mut tail = newest.as_ref().filter(|newest| newest.scanned.frames > 0);
    let (mut replay, index_bytes) = begin_replay(&**storage, list.block(), &begun, options, &mut report);
    let behind = replay.covers;
    let mut loaded = Vec::with_capacity(begun.len());
    for (at, segment) in begun.iter().enumerate() {
        let tail = if at + 1 == begun.len() { tail.take() } else { None };
        match segment.seal.filter(|_| segment.header.before.lsn < behind) {
            Some(seal) => replay.keep(segment.form(), seal, tail.is_some(), options.read_mode)?,
            None => loaded.push(load_segment(segment, tail, options, &mut report)?),
        }
    }
    loaded.iter().try_for_each(|loaded| replay.keyspaces(loaded))?;
    read_ahead(&loaded, replay.seed, options.background, |batch| {
        let segment = &loaded[batch.segment];
        if batch.begins {
            if let Some(callback) = &options.progress {
                callback(Progress {
                    segments_done: (begun.len() - loaded.len() + batch.segment) as u32,
                    segments_all: begun.len() as u32,
                    ops: report.ops,
                });
            }
            replay.begin(segment);
        }
        report.ops += replay.batch(segment, batch)?;
        Ok(())
    })?;
    let covered = begun.last().and_then(|segment| segment.seal).map_or(End::default(), |seal| seal.end);
    let before = loaded.last().map_or(covered, |loaded| loaded.end);
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
    let mut recovered =
        Recovered { list, replay, spares, before, next: before.lsn.next(), report, index_bytes };
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

/// An empty state, or the one that the index file holds, if that is sound and bound to this very log.
fn begin_replay(
    storage: &dyn Storage,
    block: &StoreBlock,
    begun: &[Begun],
    options: &Options,
    report: &mut OpenReport,
) -> (Replay, u64) {
    let found: Vec<Known> = begun.iter().map(Begun::known).collect();
    let on = |file: IndexFile| {
        let bytes = file.len();
        Ok((replay_on(file, block, &found, options.background)?, bytes))
    };
    match IndexFile::open(storage, block).map(|file| file.and_then(on)) {
        Some(Ok(begun)) => return begun,
        Some(Err(why)) => {
            let file_name = name::index(block.index);
            report.warnings.push(format!("{file_name}: {why}; the log was read instead"));
        }
        None => {}
    }
    (Replay::new(block), 0)
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
        None => table_of(segment, &mut report.warnings)?,
    };
    let map = match tail {
        Some(newest) => Mapping::from_bytes(newest.bytes[..end.offset as usize].to_vec()),
        None => load(segment, end.offset as usize)?,
    };
    let form = Segment { body: Body::Map(map), ..segment.form() };
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
    let is_indexed = recovered.index_bytes > 0;
    let named = name::index(recovered.list.block().index);
    recovered
        .list
        .update(|block| {
            block.incarnation_before = block.incarnation;
            block.incarnation = incarnation;
            block.sealed_through = sealed;
            if !is_indexed {
                block.index = Lsn::ZERO;
            }
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
    remove_unlisted(storage, recovered.list.block(), &named)
}

/// Files that a crash left between being made and being listed, or struck out and not yet removed.
/// Nothing is removed that this store did not make. The index file that is `given_up` was its own: it was named.
fn remove_unlisted(storage: &dyn Storage, block: &StoreBlock, given_up: &str) -> Result<()> {
    let failed = |e| Error::io(format!("listing {}", storage.describe()), e);
    for file_name in storage.list().map_err(failed)? {
        let ours = match name::parse_segment(&file_name) {
            Some(id) if block.segments.iter().all(|listed| listed.segment != id) => {
                is_ours(storage, &file_name, id, block)
            }
            Some(_) => false,
            None if name::parse_index(&file_name).is_some_and(|at| at != block.index) => {
                file_name == given_up || is_ours_as_index(storage, &file_name, &block.store_id)
            }
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

/// What a restore took over says still whose it was, and was listed once: so its id was given away.
fn is_ours(storage: &dyn Storage, file_name: &str, id: SegmentId, block: &StoreBlock) -> bool {
    let is_whose =
        |store: &[u8; 16]| block.store_id == *store || block.is_kin(store) && id.0 < block.next_segment;
    begins_like(storage, file_name, |head| {
        head.iter().all(|&byte| byte == 0) || SpareBlock::may_be(head, is_whose)
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
