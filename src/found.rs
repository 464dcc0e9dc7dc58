//! Segments as they are found on the disk: begun or empty, sealed or not, and their key tables.
//!
//! One job: read what stands at the two ends of a listed file, and say what it is. Damage that an empty segment
//! or a damaged header could hide is named here; that the segments follow each other is for `recover.rs`.
//!
//! Read next: `recover.rs`.

use crate::error::{Error, Result};
use crate::format::header::{End, Listed, Seal, SegmentHeader, SpareBlock, StoreBlock};
use crate::format::salt::Salt;
use crate::format::{HEADER_BYTES, name};
use crate::index_file::Known;
use crate::log::guard::Pins;
use crate::log::pool::Spare;
use crate::log::scan::{Start, Table, has_frames, holds_frame, scan};
use crate::log::segment::{Body, Segment, read_seal, read_table};
use crate::options::Options;
use crate::storage::{Access, File, Mapping, Storage};
use crate::sync::Arc;
use crate::types::{Lsn, SegmentId};
use std::io;

/// A listed segment that was begun: its header is on the disk.
pub(crate) struct Begun {
    pub listed: Listed,
    pub file: Arc<dyn File>,
    pub salt: Salt,
    pub header: SegmentHeader,
    pub checksum: u32,
    pub seal: Option<Seal>,
}

/// A listed segment as found.
enum Found {
    Begun(Begun),
    /// Perhaps with whole frames of another life, which follow this lsn.
    Empty(Spare, Option<Lsn>),
}

/// An empty segment with frames of another life, and the lsn that they follow.
pub(crate) type Stray = Option<(SegmentId, Lsn)>;

/// Opens every listed file and tells those that were begun from those that are empty.
pub(crate) fn find_segments(
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
            check_empty(&head, listed, block, &file_name)?;
            // Frames wait for their header to be durable: a header that never was one has none behind it.
            if may_hide_frames(&head) && holds_frame(&file.map(len).map_err(failed)?, salt, listed.segment) {
                return Err(Error::corrupt(file_name, 0, "the header of a segment with frames is damaged"));
            }
            let follows = frames_of_another_life(&*file, len, &head, &file_name)?;
            Ok(Found::Empty(Spare { listed: *listed, file }, follows))
        }
    }
}

/// A file that is empty in its listed life may hold an earlier one, but nothing that belongs elsewhere.
fn check_empty(head: &[u8], listed: &Listed, block: &StoreBlock, file_name: &str) -> Result<()> {
    if is_foreign(head, listed.segment, |id| block.is_kin(id)) {
        return Err(Error::corrupt(file_name, 0, "another file lies in the place of this segment"));
    }
    if is_blanked(head, listed) {
        return Err(Error::corrupt(file_name, 0, BLANKED));
    }
    Ok(())
}

/// Whether a file begins as a whole file does that is not this segment. What a store had of spares is the spare of
/// one that came of it, and says still whose it was.
pub(crate) fn is_foreign(head: &[u8], segment: SegmentId, is_kin: impl Fn(&[u8; 16]) -> bool) -> bool {
    let begun = SegmentHeader::decode_any(head).map(|(header, _)| (header.store_id, header.segment));
    let spare = SpareBlock::decode(head).map(|spare| (spare.store_id, spare.segment));
    StoreBlock::is_one(head) || begun.or(spare).is_some_and(|(id, is)| is != segment || !is_kin(&id))
}

/// What is said of a segment that is blanked.
pub(crate) const BLANKED: &str = "what was in it is gone: it begins neither as a spare nor as a segment";

/// Whether a segment that was listed with the mark of a spare in front has neither that nor a header any more, nor
/// anything that a tear makes of the two: so nobody knows whether there were frames.
pub(crate) fn is_blanked(head: &[u8], listed: &Listed) -> bool {
    listed.is_marked && !SpareBlock::was_marked(head)
}

/// Whether what stands in place of a header, which is none, may have been one: then frames may lie behind it.
pub(crate) fn may_hide_frames(head: &[u8]) -> bool {
    let is_untouched = head.iter().all(|&byte| byte == 0) || SpareBlock::decode(head).is_some();
    !is_untouched && SegmentHeader::decode_any(head).is_none()
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

pub(crate) fn table_of(segment: &Begun, warnings: &mut Vec<String>) -> Result<(End, Table, u64)> {
    let file_name = name::segment(segment.listed.segment);
    let seal = segment.seal.ok_or_else(|| Error::corrupt(&file_name, 0, "the seal is damaged"))?;
    let len = segment.file.len().map_err(|e| segment.failed(e))?.min(segment.listed.bytes as u64);
    let table = read_table(&*segment.file, len, segment.salt, &seal).map_err(|e| segment.failed(e))?;
    if let Some(table) = table {
        return Ok((seal.end, table, seal.counter));
    }
    warnings.push(format!("{file_name}: the key table is damaged; the segment was scanned"));
    let scanned = scan(&load(segment, len as usize)?, &segment.start());
    if scanned.end != seal.end.offset || scanned.checksum != seal.end.checksum {
        return Err(Error::corrupt(file_name, scanned.end as u64, "a frame of a sealed segment is damaged"));
    }
    Ok((seal.end, scanned.table, seal.counter))
}

/// The bytes of a segment for the time of the recovery.
pub(crate) fn load(segment: &Begun, len: usize) -> Result<Mapping> {
    segment.file.map(len).map_err(|e| segment.failed(e))
}

impl Begun {
    /// A segment of a store that is open, which is sealed.
    pub fn sealed(listed: Listed, segment: &Segment) -> Result<Self> {
        let file_name = name::segment(listed.segment);
        let failed = |e| Error::io(format!("reading {file_name}"), e);
        let file = segment.file.clone();
        let mut head = vec![0; HEADER_BYTES as usize];
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        let (header, checksum) = SegmentHeader::decode(&head, segment.salt, &file_name)?
            .ok_or_else(|| Error::corrupt(&file_name, 0, "the header of a sealed segment is damaged"))?;
        let len = file.len().map_err(failed)?.min(listed.bytes as u64) as usize;
        let seal = read_seal(&*file, len, segment.salt).map_err(failed)?;
        Ok(Begun { listed, file, salt: segment.salt, header, checksum, seal })
    }

    /// What an index file is held against.
    pub fn known(&self) -> Known {
        (self.listed, self.header.before.lsn, self.seal.map(|seal| seal.end))
    }

    pub fn failed(&self, e: io::Error) -> Error {
        Error::io(format!("reading {}", name::segment(self.listed.segment)), e)
    }

    /// As it is read from the file.
    pub fn form(&self) -> Segment {
        let end = self.seal.map_or(0, |seal| seal.end.offset);
        Segment {
            id: self.listed.segment,
            salt: self.salt,
            file: self.file.clone(),
            body: Body::Pread(end),
            pins: Pins::new(),
        }
    }

    pub fn start(&self) -> Start {
        Start {
            segment: self.listed.segment,
            salt: self.salt,
            checksum: self.checksum,
            lsn: self.header.before.lsn.next(),
        }
    }
}
