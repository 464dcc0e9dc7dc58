//! One segment as readers see it, and the table of all of them.
//!
//! One job: from a place to the op that lies there. The active segment is read from its memory image, a
//! sealed one from its map (or with positioned reads). An op of a sealed segment is verified every
//! time it is read: what was right when it was written may rot later (assumption A8).
//!
//! Read next: `pool.rs`, where segments come from.

use super::guard::Pins;
use super::image::Image;
use super::scan::{Start, Table, scan};
use crate::error::{Error, Result};
use crate::format::frame::LSN_AT;
use crate::format::header::{SEAL_BYTES, Seal, SegmentHeader};
use crate::format::op::{self, BadOp, Head};
use crate::format::salt::Salt;
use crate::format::{HEADER_BYTES, name};
use crate::index::Place;
use crate::op::{Kind, Op};
use crate::storage::{File, Mapping};
use crate::sync::{Arc, Mutex, may_switch};
use crate::types::{Location, Lsn, SegmentId};
use crossbeam_epoch::{Atomic, Guard, Owned, Shared};
use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// Where the bytes of a segment are read from.
#[derive(Debug)]
pub(crate) enum Body {
    /// Being written: the image holds everything appended.
    Image(Arc<Image>),
    /// Sealed, through a map of everything up to the end of its frames.
    Map(Mapping),
    /// Sealed, with positioned reads up to this offset.
    Pread(u32),
}

/// A segment in one of its forms; replaced in the table when it is sealed.
#[derive(Debug)]
pub(crate) struct Segment {
    pub id: SegmentId,
    pub salt: Salt,
    pub file: Arc<dyn File>,
    pub body: Body,
    /// Values that were handed out and point into this form. Once it is replaced by another form, no new
    /// ones do.
    pub pins: Pins,
}

/// The bytes of an op, borrowed from the segment or read for the purpose.
pub(crate) enum Bytes<'a> {
    Borrowed(&'a [u8]),
    Owned(Vec<u8>),
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Borrowed(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// A segment that a value points into.
#[derive(Debug)]
pub(crate) struct Pinned(Arc<Segment>);

impl Pinned {
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    pub fn segment(&self) -> &Segment {
        &self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // The memory or map goes with the last `Arc`; the count is for whoever wants to reuse the file.
        self.0.pins.unpin();
    }
}

/// An op found in the log.
pub(crate) struct Found<B> {
    pub at: Location,
    /// The op's own lsn, which orders time: for a moved op not the one of its frame.
    pub lsn: Lsn,
    pub head: Head,
    pub bytes: B,
}

/// One to keep for a while.
pub(crate) type OpRef<'a> = Found<Bytes<'a>>;
/// One to look at where it is: it is not copied, which costs more than finding it.
pub(crate) type OpView<'a> = Found<&'a [u8]>;

/// What a refusal needs to know of an op, and a write that follows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Glance {
    pub at: Location,
    pub token: u64,
    pub lsn: Lsn,
    pub kind: Kind,
    pub is_numbered: bool,
    pub is_moved: bool,
    /// It changes the state of a fence.
    pub is_state: bool,
    /// The bytes that it takes.
    pub len: u32,
}

impl<B: Deref<Target = [u8]>> Found<B> {
    pub fn op(&self) -> Op<'_> {
        self.head.op(&self.bytes)
    }

    pub fn glance(&self) -> Glance {
        Glance {
            at: self.at,
            token: self.head.token,
            lsn: self.lsn,
            kind: self.head.kind,
            is_numbered: self.head.is_numbered(),
            is_moved: self.head.is_moved(),
            is_state: self.head.fence().is_some(),
            len: self.head.len(),
        }
    }

    #[inline(always)]
    pub fn key(&self) -> &[u8] {
        &self.bytes[self.head.key()]
    }

    #[inline(always)]
    pub fn value(&self) -> &[u8] {
        &self.bytes[self.head.value()]
    }
}

impl<B> fmt::Debug for Found<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Found").field("at", &self.at).field("lsn", &self.lsn).finish_non_exhaustive()
    }
}

/// Bytes read at first with positioned reads; enough for nearly every head and small value.
const FIRST_READ_BYTES: usize = 1024;

impl Segment {
    /// Where an op lies.
    pub fn location(&self, offset: u32) -> Location {
        Location { segment: self.id, offset }
    }

    /// The op at `offset`, its head verified unless it was never on a disk.
    pub fn op(&self, offset: u32) -> Result<OpRef<'_>> {
        match self.readable() {
            Ok((bytes, verify)) => {
                let found = self.parse(Bytes::Borrowed(bytes), offset, verify);
                found.map_err(|bad| self.corrupt(offset, bad.0))
            }
            Err(end) => self.op_by_reading(offset, end),
        }
    }

    /// Shows the op at `offset`, as [`Segment::op`] would answer it.
    #[inline(always)]
    pub fn look<T>(&self, offset: u32, look: impl FnOnce(&OpView<'_>) -> Result<T>) -> Result<T> {
        let read;
        let found = match self.readable() {
            Ok((bytes, verify)) => {
                self.parse(bytes, offset, verify).map_err(|bad| self.corrupt(offset, bad.0))?
            }
            Err(end) => {
                read = self.op_by_reading(offset, end)?;
                Found { at: read.at, lsn: read.lsn, head: read.head.clone(), bytes: &*read.bytes }
            }
        };
        // In one place, so that it comes to stand in line, and what was found stays in registers.
        look(&found)
    }

    /// The op at `offset`, as [`Segment::op`] would answer it. `None`: there is none that can be shown without a system
    /// call.
    #[inline(always)]
    pub fn view(&self, offset: u32) -> Option<OpView<'_>> {
        let (bytes, verify) = self.readable().ok()?;
        self.parse(bytes, offset, verify).ok()
    }

    /// All bytes, and whether they have been on a disk; else how far they are to be read from there.
    #[inline(always)]
    fn readable(&self) -> Result<(&[u8], bool), u32> {
        match &self.body {
            Body::Image(image) => Ok((image.bytes(), false)),
            Body::Map(map) => Ok((map, true)),
            Body::Pread(end) => Err(*end),
        }
    }

    /// Everything readable without a system call: empty where values are read with positioned reads.
    pub fn bytes(&self) -> &[u8] {
        self.readable().map_or(&[], |(bytes, _)| bytes)
    }

    /// Where the ops of a sealed segment lie, which takes at most so many bytes; `None` when its seal or its key table is
    /// damaged, and where it is cheaper to read all of it than each op by itself.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn table(&self, most: u32) -> Result<Option<Table>> {
        if !matches!(self.body, Body::Map(_)) {
            return Ok(None);
        }
        let read = || {
            let len = self.file.len()?.min(most.into());
            let seal = read_seal(&*self.file, len as usize, self.salt)?;
            seal.map_or(Ok(None), |seal| read_table(&*self.file, len, self.salt, &seal))
        };
        read().map_err(|e| Error::io(format!("reading {}", name::segment(self.id)), e))
    }

    /// Every byte up to the end of the frames of a sealed segment, each proven right, and where its ops lie.
    ///
    /// # Errors
    /// Damage: what does not verify is never carried elsewhere.
    pub fn prove(self: &Arc<Self>) -> Result<(Arc<Segment>, Table)> {
        let segment = match &self.body {
            Body::Pread(end) => {
                let mut bytes = vec![0; *end as usize];
                let read = self.file.read_exact_at(&mut bytes, 0);
                read.map_err(|e| Error::io(format!("reading {}", name::segment(self.id)), e))?;
                Arc::new(Segment {
                    id: self.id,
                    salt: self.salt,
                    file: self.file.clone(),
                    body: Body::Map(Mapping::from_bytes(bytes)),
                    pins: Pins::new(),
                })
            }
            _ => self.clone(),
        };
        let bytes = segment.bytes();
        let file = name::segment(self.id);
        let Some((header, checksum)) = SegmentHeader::decode(bytes, self.salt, &file)? else {
            return Err(self.corrupt(0, "the header of the segment is damaged"));
        };
        let start = Start { segment: self.id, salt: self.salt, checksum, lsn: header.before.lsn.next() };
        let scanned = scan(bytes, &start);
        if scanned.end as usize != bytes.len() {
            return Err(self.corrupt(scanned.end, "a frame of a sealed segment is damaged"));
        }
        Ok((segment, scanned.table))
    }

    /// Keeps the bytes of this form for a value; `None` when they cannot be borrowed, or when another form
    /// is about to replace this one.
    pub fn pin(self: &Arc<Self>) -> Option<Pinned> {
        if matches!(self.body, Body::Pread(_)) { None } else { self.hold() }
    }

    /// Keeps the bytes of the file as they are, however this form reads them; `None` when it is about to go.
    pub fn hold(self: &Arc<Self>) -> Option<Pinned> {
        self.pins.try_pin().then(|| Pinned(self.clone()))
    }

    /// Verifies the value of an op as well, when it is a large one.
    pub fn check_value<B: Deref<Target = [u8]>>(&self, found: &Found<B>) -> Result<()> {
        if matches!(self.body, Body::Image(_)) || found.head.verify_value(&found.bytes) {
            return Ok(());
        }
        Err(self.corrupt(found.at.offset, "a value does not match its checksum"))
    }

    #[cold]
    #[inline(never)]
    pub fn corrupt(&self, offset: u32, what: &str) -> Error {
        Error::corrupt(name::segment(self.id), offset as u64, what)
    }

    /// `bytes` are those of the segment. Inlined, for what is found is a dozen words: see [`Segment::look`].
    #[inline(always)]
    fn parse<B>(&self, bytes: B, offset: u32, verify: bool) -> Result<Found<B>, BadOp>
    where
        B: Deref<Target = [u8]>,
    {
        let start = offset as usize;
        if start > bytes.len() {
            return Err(BadOp("a place behind the end of the segment"));
        }
        let head = op::decode(&bytes, start, self.id, offset)?;
        let frame = offset.checked_sub(head.back).filter(|&frame| frame >= HEADER_BYTES);
        let lsn = frame
            .and_then(|frame| bytes.get(frame as usize + LSN_AT..)?.first_chunk::<8>())
            .map(|lsn| Lsn::new(u64::from_le_bytes(*lsn)))
            .ok_or(BadOp("an op outside of a frame"))?;
        if verify && !head.verify_head(&bytes, self.salt, offset, lsn) {
            return Err(BadOp("an op does not match its checksum"));
        }
        let lsn = head.moved_lsn(&bytes).unwrap_or(lsn);
        Ok(Found { at: self.location(offset), lsn, head, bytes })
    }

    fn op_by_reading(&self, offset: u32, end: u32) -> Result<OpRef<'static>> {
        let failed = |e| Error::io(format!("reading {}", name::segment(self.id)), e);
        if offset < HEADER_BYTES || offset >= end {
            return Err(self.corrupt(offset, "a place behind the end of the segment"));
        }
        let mut bytes = vec![0; FIRST_READ_BYTES.min((end - offset) as usize)];
        self.file.read_exact_at(&mut bytes, offset as u64).map_err(failed)?;
        let head = loop {
            match op::decode(&bytes, 0, self.id, offset) {
                Ok(head) => break head,
                Err(_) if bytes.len() < (end - offset) as usize => {
                    // Doubling reads a large value in a few steps and never more than its segment.
                    let more = (bytes.len() * 4).min((end - offset) as usize);
                    let have = bytes.len();
                    bytes.resize(more, 0);
                    self.file
                        .read_exact_at(&mut bytes[have..], (offset as usize + have) as u64)
                        .map_err(failed)?;
                }
                Err(bad) => return Err(self.corrupt(offset, bad.0)),
            }
        };
        let frame = offset
            .checked_sub(head.back)
            .filter(|&frame| frame >= HEADER_BYTES)
            .ok_or_else(|| self.corrupt(offset, "an op outside of a frame"))?;
        let mut lsn = [0; 8];
        self.file.read_exact_at(&mut lsn, frame as u64 + LSN_AT as u64).map_err(failed)?;
        let lsn = Lsn::new(u64::from_le_bytes(lsn));
        if !head.verify_head(&bytes, self.salt, offset, lsn) {
            return Err(self.corrupt(offset, "an op does not match its checksum"));
        }
        bytes.truncate(head.end());
        let lsn = head.moved_lsn(&bytes).unwrap_or(lsn);
        Ok(Found { at: self.location(offset), lsn, head, bytes: Bytes::Owned(bytes) })
    }
}

/// The seal at the end of a file of `len` bytes; `None` when none verifies.
pub(crate) fn read_seal(file: &dyn File, len: usize, salt: Salt) -> io::Result<Option<Seal>> {
    let Some(offset) = len.checked_sub(SEAL_BYTES) else { return Ok(None) };
    let mut bytes = [0; SEAL_BYTES];
    file.read_exact_at(&mut bytes, offset as u64)?;
    Ok(Seal::decode(&bytes, salt, offset as u32))
}

/// The key table in front of the seal of a file of `len` bytes; `None` when it is not as the seal says.
pub(crate) fn read_table(file: &dyn File, len: u64, salt: Salt, seal: &Seal) -> io::Result<Option<Table>> {
    let Some(offset) = len.checked_sub(SEAL_BYTES as u64 + seal.table_len as u64) else { return Ok(None) };
    let mut table = vec![0; seal.table_len as usize];
    file.read_exact_at(&mut table, offset)?;
    let is_right = salt.checksum(offset as u32, &[&table]) == seal.table_checksum;
    Ok(is_right.then(|| Table::from_bytes(table, seal.keyspaces)))
}

const PAGE: usize = 512;
const SLOTS: usize = 1 << crate::index::SEGMENT_BITS;

type Page = Box<[Atomic<Arc<Segment>>]>;

/// All segments that readers may ask for, by the low bits of their ids. Two segments in the table
/// never share these bits: the list does not hand out an id whose slot is taken.
pub(crate) struct Segments {
    pages: Box<[OnceLock<Page>]>,
    /// Orders changes; readers take no lock.
    writer: Mutex<()>,
}

impl Segments {
    pub fn new() -> Self {
        Segments { pages: (0..SLOTS / PAGE).map(|_| OnceLock::new()).collect(), writer: Mutex::new(()) }
    }

    /// The slot of a segment in the table, and in the places of the index.
    pub fn slot(id: SegmentId) -> u32 {
        id.0 % SLOTS as u32
    }

    /// The place of a location, for the index.
    pub fn place(at: Location) -> Place {
        Place { segment: Self::slot(at.segment), offset: at.offset }
    }

    /// The segment in `slot`.
    #[inline]
    pub fn get<'g>(&self, slot: u32, guard: &'g Guard) -> Option<&'g Arc<Segment>> {
        may_switch();
        let page = self.pages.get(slot as usize / PAGE)?.get()?;
        let shared = page[slot as usize % PAGE].load(Ordering::Acquire, guard);
        deref(shared)
    }

    /// The op at `at`, or `None` when its segment is gone: then nobody needs it any more.
    pub fn op<'g>(&self, at: Location, guard: &'g Guard) -> Result<Option<OpRef<'g>>> {
        self.of(at.segment, guard).map(|segment| segment.op(at.offset)).transpose()
    }

    /// The segment of this id and no other in its slot: an id is never given twice.
    pub fn of<'g>(&self, id: SegmentId, guard: &'g Guard) -> Option<&'g Arc<Segment>> {
        self.get(Self::slot(id), guard).filter(|segment| segment.id == id)
    }

    /// Puts a segment into its slot, in place of its earlier form.
    pub fn set(&self, segment: Arc<Segment>) {
        self.swap(Self::slot(segment.id), Some(segment));
    }

    /// Takes a segment out of the table, and answers it: once nobody else holds it, nobody reads it.
    pub fn remove(&self, id: SegmentId) -> Option<Arc<Segment>> {
        let guard = crossbeam_epoch::pin();
        let segment = self.get(Self::slot(id), &guard).filter(|segment| segment.id == id)?.clone();
        self.swap(Self::slot(id), None);
        Some(segment)
    }

    fn swap(&self, slot: u32, segment: Option<Arc<Segment>>) {
        let slot = slot as usize;
        let page = self.pages[slot / PAGE].get_or_init(|| (0..PAGE).map(|_| Atomic::null()).collect());
        let _writer = self.writer.lock();
        let guard = crossbeam_epoch::pin();
        let old = match segment {
            Some(segment) => page[slot % PAGE].swap(Owned::new(segment), Ordering::AcqRel, &guard),
            None => page[slot % PAGE].swap(Shared::null(), Ordering::AcqRel, &guard),
        };
        if let Some(old) = deref(old) {
            old.pins.retire();
        }
        retire(old, &guard);
        // Else it would wait for sixty-three more, with its memory or map.
        guard.flush();
    }
}

impl Segments {
    /// How many values point into segments now, and the bytes of those segments.
    pub fn pinned(&self) -> (usize, u64) {
        let guard = crossbeam_epoch::pin();
        (0..SLOTS as u32)
            .step_by(PAGE)
            .filter(|&first| self.pages[first as usize / PAGE].get().is_some())
            .flat_map(|first| first..first + PAGE as u32)
            .filter_map(|slot| self.get(slot, &guard))
            .map(|segment| (segment.pins.pinned(), segment.bytes().len() as u64))
            .filter(|&(pins, _)| pins > 0)
            .fold((0, 0), |(pins, bytes), segment| (pins + segment.0, bytes + segment.1))
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        for page in self.pages.iter_mut() {
            for slot in page.take().into_iter().flatten() {
                drop(take(slot));
            }
        }
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Segments")
    }
}

use epoch::{deref, retire, take};

/// The two places where epochs need unsafe code.
#[allow(unsafe_code)]
mod epoch {
    use super::Segment;
    use crate::sync::Arc;
    use crossbeam_epoch::{Atomic, Guard, Shared};

    /// The value of a slot that nobody else can reach any more.
    pub(super) fn take(slot: Atomic<Arc<Segment>>) -> Option<Arc<Segment>> {
        // SAFETY: the slot is owned, so no other thread can load from it; the pointer is null or came from
        // `Owned`, and it is taken once.
        unsafe { slot.try_into_owned() }.map(|owned| *owned.into_box())
    }

    pub(super) fn deref<'g>(shared: Shared<'g, Arc<Segment>>) -> Option<&'g Arc<Segment>> {
        // SAFETY: values enter the table through `Owned`, so the pointer is null or valid; a value that
        // leaves the table is freed by `retire`, after every guard of this epoch is gone.
        unsafe { shared.as_ref() }
    }

    pub(super) fn retire(old: Shared<'_, Arc<Segment>>, guard: &Guard) {
        if !old.is_null() {
            // SAFETY: `old` was swapped out of the table under the writer's lock, or by the only owner in
            // `drop`, so it is retired once and no new reader can reach it.
            unsafe { guard.defer_destroy(old) }
        }
    }
}
