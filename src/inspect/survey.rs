//! Which files there are, which of them are segments of the store, and in which order they were written.

use super::{FaultKind, Faults};
use crate::error::{Error, Result};
use crate::format::frame::FrameHeader;
use crate::format::header::{Listed, Seal, SegmentHeader, SpareBlock, StoreBlock};
use crate::format::salt::Salt;
use crate::format::{HEADER_BYTES, name};
use crate::found::{BLANKED, is_blanked, is_foreign, may_hide_frames};
use crate::index::saved_slots;
use crate::index_file::{IndexFile, Known};
use crate::log::list::second_copy;
use crate::log::scan::{Start, has_frames, holds_frame, scan};
use crate::log::segment::read_seal;
use crate::storage::{Access, File, Storage};
use crate::sync::Arc;
use crate::types::{Lsn, SegmentId};
use std::io;

/// Where a segment's header names the one before.
const BEFORE_AT: u64 = 56;

/// The files of a store, as far as they can be told without reading frames.
#[derive(Debug)]
pub(crate) struct Survey {
    /// What STORE says, if it says anything.
    pub block: Option<StoreBlock>,
    /// The segments that were begun, in the order in which they were written.
    pub segments: Vec<Surveyed>,
    pub faults: Faults,
    pub notes: Vec<String>,
    pub bytes: u64,
    /// Frames of a life that STORE does not know, and the lsn they follow.
    stray: Option<(SegmentId, Lsn)>,
}

/// A segment that was begun.
#[derive(Debug)]
pub(crate) struct Surveyed {
    pub id: SegmentId,
    pub name: String,
    pub file: Arc<dyn File>,
    pub len: usize,
    pub salt: Salt,
    pub store_id: [u8; 16],
    /// The header and its checksum, unless it is damaged.
    pub header: Option<(SegmentHeader, u32)>,
    pub seal: Option<Seal>,
    /// The lsn in front of the first frame.
    pub follows: Lsn,
    /// Nothing was written behind it.
    pub is_last: bool,
}

/// Looks at every file of the store.
///
/// # Errors
/// There is no store; it is of a newer format; the directory cannot be read.
pub(crate) fn survey(storage: &dyn Storage) -> Result<Survey> {
    let dir = storage.describe();
    let names = storage.list().map_err(|e| Error::io(format!("listing {dir}"), e))?;
    let mut survey = Survey {
        block: None,
        segments: Vec::new(),
        faults: Faults::default(),
        notes: Vec::new(),
        bytes: 0,
        stray: None,
    };
    let has_segments = names.iter().any(|file| name::parse_segment(file).is_some());
    if !has_segments && !names.iter().any(|file| file == name::STORE) {
        let missing =
            io::Error::new(io::ErrorKind::NotFound, "there is no store (no file STORE, and no segment)");
        return Err(Error::io(format!("looking for a store in {dir}"), missing));
    }
    survey.read_store(storage)?;
    match survey.block.clone() {
        Some(block) => {
            for listed in &block.segments {
                survey.listed(storage, &block, listed)?;
            }
            survey.unlisted(storage, &block, &names);
            survey.index(storage, &block);
        }
        None => survey.guess(storage, &names)?,
    }
    survey.segments.sort_by_key(|segment| segment.follows);
    if let Some(last) = survey.segments.last_mut() {
        last.is_last = true;
    }
    survey.check_chain();
    Ok(survey)
}

impl Survey {
    /// The lsn that every whole frame is at or below has been read: what STORE does not know is newer or not.
    pub fn check_stray(&mut self, last: Lsn) {
        if let Some((segment, lsn)) = self.stray
            && lsn >= last
        {
            let what = format!("it is older than the frames in {}", name::segment(segment));
            self.faults.add(FaultKind::Store, name::STORE, 0, None, what);
        }
    }

    fn read_store(&mut self, storage: &dyn Storage) -> Result<()> {
        let file = match storage.open(name::STORE, Access::Read) {
            Ok(file) => file,
            Err(e) => {
                let what = match e.kind() {
                    io::ErrorKind::NotFound => "it is missing, and segments are there".to_owned(),
                    _ => e.to_string(),
                };
                self.faults.add(FaultKind::Store, name::STORE, 0, None, what);
                return Ok(());
            }
        };
        let len = file.len().map_err(|e| Error::io("reading STORE", e))? as usize;
        let bytes = self.read(&*file, name::STORE, len);
        let first = StoreBlock::decode(&bytes)?;
        let second = second_copy(&bytes)?;
        if first.is_none() != second.is_none() {
            let at = if first.is_none() { 0 } else { (bytes.len() / 2).next_power_of_two() as u64 };
            let what = "one copy of the list of segments is damaged";
            self.faults.add(FaultKind::StoreCopy, name::STORE, at, None, what);
        }
        let both = first.into_iter().chain(second.map(|(_, block)| block));
        self.block = both.max_by_key(|block| block.generation);
        if self.block.is_none() {
            let what = "both copies of the list of segments are damaged";
            self.faults.add(FaultKind::Store, name::STORE, 0, None, what);
        }
        Ok(())
    }

    fn listed(&mut self, storage: &dyn Storage, block: &StoreBlock, listed: &Listed) -> Result<()> {
        let file_name = name::segment(listed.segment);
        let Some(origin) = block.origin_id(listed).copied() else {
            self.faults.add(FaultKind::Store, name::STORE, 0, None, "a segment of an unknown origin");
            return Ok(());
        };
        let file = match storage.open(&file_name, Access::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.faults.add(FaultKind::Missing, &file_name, 0, None, "it is listed in STORE and missing");
                return Ok(());
            }
            Err(e) => {
                self.faults.add(FaultKind::Unreadable, &file_name, 0, None, e.to_string());
                return Ok(());
            }
        };
        let salt = Salt::new(&origin, listed.segment, listed.life);
        let whole = listed.bytes as usize;
        let begun = self.segment(file.clone(), &file_name, listed.segment, origin, salt, whole)?;
        if begun.is_none() && is_blanked(&self.head(&*file, &file_name), listed) {
            self.faults.add(FaultKind::Header, &file_name, 0, None, BLANKED);
        }
        self.segments.extend(begun);
        Ok(())
    }

    /// Tells a segment that was begun from one that is empty. `whole` is its length when it was made.
    fn segment(
        &mut self,
        file: Arc<dyn File>,
        file_name: &str,
        id: SegmentId,
        store_id: [u8; 16],
        salt: Salt,
        whole: usize,
    ) -> Result<Option<Surveyed>> {
        let len = file.len().map_err(|e| Error::io(format!("reading {file_name}"), e))?;
        let len = len.min(whole as u64) as usize;
        let head = self.read(&*file, file_name, len.min(HEADER_BYTES as usize + 64));
        let header = SegmentHeader::decode(&head, salt, file_name)?;
        let seal = read_seal(&*file, len, salt).ok().flatten();
        if len < whole && seal.is_none() {
            self.faults.add(FaultKind::Cut, file_name, len as u64, None, "the file is cut");
        }
        if header.is_none() {
            let frames = has_frames(&head, salt) || seal.is_some();
            if !frames && !self.lost_header(&*file, file_name, &head, len, (salt, id)) {
                self.check_empty(&*file, file_name, &head, len, id, &store_id)?;
                return Ok(None);
            }
            let what = "the header of a segment with frames is damaged";
            self.faults.add(FaultKind::Header, file_name, 0, None, what);
        }
        let first = head.get(HEADER_BYTES as usize..);
        let first = first.and_then(|bytes| FrameHeader::decode(bytes, salt, HEADER_BYTES));
        let follows = match (header, first, seal) {
            (Some((header, _)), ..) => header.before.lsn,
            (_, Some((frame, _)), _) => frame.lsn.before(),
            (_, _, Some(seal)) => seal.end.lsn,
            _ => Lsn::ZERO,
        };
        let name = file_name.to_owned();
        Ok(Some(Surveyed { id, name, file, len, salt, store_id, header, seal, follows, is_last: false }))
    }

    /// Whether frames lie somewhere behind a header that is neither zeros nor one.
    fn lost_header(
        &mut self,
        file: &dyn File,
        file_name: &str,
        head: &[u8],
        len: usize,
        (salt, segment): (Salt, SegmentId),
    ) -> bool {
        may_hide_frames(head) && holds_frame(&self.read(file, file_name, len), salt, segment)
    }

    /// A file without frames of its listed life may hold those of an earlier one, and nothing else.
    fn check_empty(
        &mut self,
        file: &dyn File,
        file_name: &str,
        head: &[u8],
        len: usize,
        id: SegmentId,
        store_id: &[u8; 16],
    ) -> Result<()> {
        let block = self.block.as_ref();
        if is_foreign(head, id, |kin| kin == store_id || block.is_some_and(|block| block.is_kin(kin))) {
            let what = "another file lies in the place of this segment";
            self.faults.add(FaultKind::Foreign, file_name, 0, None, what);
            return Ok(());
        }
        let other = SegmentHeader::decode_any(head).filter(|(_, salt)| has_frames(head, *salt));
        let Some((header, salt)) = other else { return Ok(()) };
        let checksum = SegmentHeader::decode(head, salt, file_name)?.map_or(0, |(_, checksum)| checksum);
        let lsn = header.before.lsn;
        let start = Start { segment: id, salt, checksum, lsn: lsn.next() };
        if scan(&self.read(file, file_name, len), &start).frames > 0 {
            self.stray = self.stray.max(Some((id, lsn)));
        }
        Ok(())
    }

    /// Every byte of the index file, and whether it is one of these segments.
    fn index(&mut self, storage: &dyn Storage, block: &StoreBlock) {
        let Some(file) = IndexFile::open(storage, block) else { return };
        let known = self.segments.iter().filter_map(|segment| {
            let (header, _) = segment.header?;
            let listed = *block.segments.iter().find(|listed| listed.segment == segment.id)?;
            // One without a seal is a fault, or behind the index.
            Some((listed, header.before.lsn, Some(segment.seal?.end)))
        });
        let known: Vec<Known> = known.collect();
        let checked = file.and_then(|file| {
            self.bytes += file.len();
            file.check_segments(&known)?;
            let tables = file.tables(false, None)?;
            saved_slots(tables).map(drop).ok_or("its tables are not one index".to_owned())
        });
        if let Err(what) = checked {
            self.faults.add(FaultKind::Index, &name::index(block.index), 0, None, what);
        }
    }

    /// Segments that STORE does not list: newer than it, left over, or somebody else's.
    fn unlisted(&mut self, storage: &dyn Storage, block: &StoreBlock, names: &[String]) {
        for file_name in names {
            let Some(id) = name::parse_segment(file_name) else { continue };
            if block.segments.iter().any(|listed| listed.segment == id) {
                continue;
            }
            let ours = storage.open(file_name, Access::Read).is_ok_and(|file| {
                let head = self.head(&*file, file_name);
                SegmentHeader::belongs_to(&head, &block.store_id)
            });
            if ours && id.0 >= block.next_segment {
                let what = format!("it is older than {file_name}, which it does not know");
                self.faults.add(FaultKind::Store, name::STORE, 0, None, what);
            } else {
                self.notes.push(format!("{file_name} is not listed, and so no part of the store"));
            }
        }
    }

    /// Without STORE: every segment whose header proves itself, of the store that wrote last.
    fn guess(&mut self, storage: &dyn Storage, names: &[String]) -> Result<()> {
        for file_name in names {
            let Some(id) = name::parse_segment(file_name) else { continue };
            let Ok(file) = storage.open(file_name, Access::Read) else { continue };
            let head = self.head(&*file, file_name);
            match SegmentHeader::decode_any(&head).filter(|(header, _)| header.segment == id) {
                Some((header, salt)) => {
                    // Sealed short, it is shorter than it was made; nobody knows which lengths were meant.
                    let len = file.len().map_err(|e| Error::io(format!("reading {file_name}"), e))?;
                    let whole = len.min(header.bytes as u64) as usize;
                    let store_id = header.store_id;
                    let segment = self.segment(file, file_name, id, store_id, salt, whole)?;
                    self.segments.extend(segment);
                }
                None if head.iter().all(|&byte| byte == 0) || SpareBlock::decode(&head).is_some() => {}
                None => {
                    let what = "without STORE, only its header could prove what it is";
                    self.faults.add(FaultKind::Header, file_name, 0, None, what);
                }
            }
        }
        let newest = self.segments.iter().max_by_key(|segment| segment.follows);
        let Some(store_id) = newest.map(|segment| segment.store_id) else { return Ok(()) };
        let (ours, others) = std::mem::take(&mut self.segments)
            .into_iter()
            .partition(|segment: &Surveyed| segment.store_id == store_id);
        self.segments = ours;
        for other in others {
            let what = "of another store, or of an ancestor that only STORE knew";
            self.faults.add(FaultKind::Foreign, &other.name, 0, None, what);
        }
        Ok(())
    }

    /// Every segment but the last is sealed, and the next one names exactly that seal.
    fn check_chain(&mut self) {
        let listed: Vec<u32> = match &self.block {
            Some(block) => block.segments.iter().map(|listed| listed.segment.0).collect(),
            None => self.segments.iter().map(|segment| segment.id.0).collect(),
        };
        for (at, segment) in self.segments.iter().enumerate() {
            let before = at.checked_sub(1).map(|at| &self.segments[at]);
            if let Some(before) = before
                && before.seal.is_none()
            {
                let at = before.len as u64;
                self.faults.add(FaultKind::Seal, &before.name, at, None, "the seal is damaged");
                continue;
            }
            let Some((header, _)) = &segment.header else { continue };
            let named = header.before.segment;
            let follows = before.and_then(|before| before.seal).is_some_and(|seal| seal.end == header.before);
            // What it names may have been retired; what is listed must be the one before.
            if !follows && listed.contains(&named) {
                let what = format!("it follows segment {named:06}, which is not as it says");
                self.faults.add(FaultKind::Chain, &segment.name, BEFORE_AT, None, what);
            }
        }
        let Some(block) = &self.block else { return };
        let last = SegmentId(block.sealed_through);
        let sealed = self.segments.iter().any(|segment| segment.id == last && segment.seal.is_some());
        if listed.contains(&last.0) && !sealed {
            let what = "STORE says that the segment was sealed, and its seal is damaged";
            self.faults.add(FaultKind::Seal, &name::segment(last), 0, None, what);
        }
    }

    /// The first block of a file, or less.
    fn head(&mut self, file: &dyn File, file_name: &str) -> Vec<u8> {
        let len = file.len().unwrap_or_default().min(HEADER_BYTES as u64);
        self.read(file, file_name, len as usize)
    }

    /// The bytes of a file, zeros in place of what cannot be read.
    pub fn read(&mut self, file: &dyn File, file_name: &str, len: usize) -> Vec<u8> {
        const STEP: usize = 1 << 20;
        const BLOCK: usize = 4096;
        let mut bytes = vec![0; len];
        self.bytes += len as u64;
        let mut bad_until = 0;
        for (step, part) in bytes.chunks_mut(STEP).enumerate() {
            if file.read_exact_at(part, (step * STEP) as u64).is_ok() {
                continue;
            }
            for (block, part) in part.chunks_mut(BLOCK).enumerate() {
                let at = step * STEP + block * BLOCK;
                let Err(e) = file.read_exact_at(part, at as u64) else { continue };
                part.fill(0);
                if at != bad_until || at == 0 {
                    self.faults.add(FaultKind::Unreadable, file_name, at as u64, None, e.to_string());
                }
                bad_until = at + part.len();
            }
        }
        bytes
    }
}
