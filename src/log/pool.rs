//! Where segments come from: spare ones, made of zeros and listed ahead of need.
//!
//! Promises that a spare reads as zeros, was synced, named in its synced directory and listed in
//! `STORE` before anyone gets it, and that two of them are kept back for what must go on when the
//! disk is full: deletes, raises, grants, floors. Never runs on the path of a write that finds a spare.
//!
//! Read next: `engine.rs`, which takes spares under the tail lock.

use super::list::List;
use super::segment::Segments;
use crate::entropy::Entropy;
use crate::error::{Error, Result};
use crate::events;
use crate::format::header::{Listed, SpareBlock, StoreBlock};
use crate::format::{HEADER_BYTES, name};
use crate::index::SEGMENT_BITS;
use crate::options::{MAX_SEGMENT_BYTES, Options};
use crate::storage::{Access, File, Storage, is_full};
use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering};
use crate::types::{Lsn, SegmentId};
use std::io;

/// Spares that only privileged ops may take.
pub(super) const RESERVE: usize = 2;
/// A store is kept in about so many segments, or twice as many.
const SEGMENTS: u64 = 96;
const MIN_FOLLOWING_BYTES: u64 = 1 << 20;
/// Groups from here on are a bulk load: its segments are not written with zeros first.
const BULK_BYTES: u64 = 256 << 10;
/// As many as the table of segments has slots, and a place in the index can tell apart.
const MAX_SEGMENTS: usize = 1 << SEGMENT_BITS;
/// So many names in a row may be taken by files that are not this store's.
const OTHERS_FILES_MAX: u32 = 10_000;

/// Who asks for a spare.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Need {
    /// Puts: they leave the reserve alone.
    Ordinary,
    /// What frees space or keeps the fences working: all but one.
    Privileged,
    /// Compaction, which gives back more than it takes.
    Compaction,
}

impl Need {
    fn keeps_back(self) -> usize {
        match self {
            Need::Ordinary => RESERVE,
            Need::Privileged => 1,
            Need::Compaction => 0,
        }
    }
}

/// An empty, listed segment.
#[derive(Debug)]
pub(crate) struct Spare {
    pub listed: Listed,
    pub file: Arc<dyn File>,
}

/// The spares of a store, and its list. Lock order: `list`, then `ready`; the tail lock is taken
/// before `ready` and never before `list`.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(super) storage: Arc<dyn Storage>,
    /// Held across the making of a segment.
    pub(super) list: Mutex<List>,
    /// Held while segments are struck out of the list and their pins retired, and by a checkpoint from
    /// before its cut until it holds every segment that it takes. Taken before every other lock.
    pub retiring: Mutex<()>,
    pub(super) ready: Mutex<Vec<Spare>>,
    fixed_bytes: Option<u32>,
    asked: Asked,
    pub(super) entropy: Entropy,
    /// Segments from this id on are of this opening.
    pub(super) first_own: SegmentId,
    /// Bytes of all listed segments, so that asking for them never waits for a segment in the making.
    listed_bytes: AtomicU64,
    /// Bytes of segments that are struck out of the list, and whose files are still there.
    pub(super) retired_bytes: AtomicU64,
    /// Bytes of zeros and marks written, and of the list.
    pub(super) zeros: AtomicU64,
    list_written: AtomicU64,
    /// How many segments are listed.
    segments: AtomicU64,
    /// The mean of what the last groups wrote.
    group_bytes: AtomicU64,
    /// Why the last attempt to make a segment failed, until one succeeds.
    trouble: Mutex<Option<Error>>,
}

/// What was asked for lately: spares that are too small for the batches of a store are of no use to it.
#[derive(Debug, Default)]
struct Asked {
    bytes: AtomicU32,
    /// How many more times less may be asked for until that counts.
    patience: AtomicU32,
}

impl Asked {
    const PATIENCE: u32 = 16;
    const GRAIN: u32 = 64 << 10;

    fn note(&self, bytes: u32) {
        let patience = self.patience.load(Ordering::Relaxed);
        let is_less = bytes < self.bytes.load(Ordering::Relaxed);
        if is_less && patience > 0 {
            self.patience.store(patience - 1, Ordering::Relaxed);
        } else {
            self.bytes.store(bytes, Ordering::Relaxed);
            self.patience.store(Self::PATIENCE, Ordering::Relaxed);
        }
    }

    /// The size of a spare that is `share` by the size of the store: not much more for one large batch.
    fn at_least(&self, share: u32) -> u32 {
        let asked = self.bytes.load(Ordering::Relaxed).next_multiple_of(Self::GRAIN);
        if asked <= share.saturating_mul(4) { asked.max(share) } else { share }
    }
}

impl Pool {
    pub fn new(storage: Arc<dyn Storage>, list: List, ready: Vec<Spare>, options: &Options) -> Self {
        let listed_bytes = AtomicU64::new(listed_bytes(&list));
        let segments = AtomicU64::new(list.block().segments.len() as u64);
        let first_own = SegmentId(list.block().next_segment);
        Pool {
            storage,
            list: Mutex::new(list),
            retiring: Mutex::new(()),
            ready: Mutex::new(ready),
            fixed_bytes: options.segment_bytes,
            asked: Asked::default(),
            entropy: options.entropy.clone(),
            first_own,
            listed_bytes,
            retired_bytes: AtomicU64::new(0),
            zeros: AtomicU64::new(0),
            list_written: AtomicU64::new(0),
            segments,
            group_bytes: AtomicU64::new(0),
            trouble: Mutex::new(None),
        }
    }

    /// A spare of at least `bytes`, if there is one for this need. Quick: called under the tail lock.
    pub fn take(&self, bytes: u32, need: Need) -> Option<Spare> {
        self.asked.note(bytes);
        let mut ready = self.ready.lock();
        if ready.len() <= need.keeps_back() {
            return None;
        }
        let at = ready.iter().position(|spare| spare.listed.bytes >= bytes)?;
        Some(ready.remove(at))
    }

    /// Whether [`Pool::take`] finds one.
    pub fn has_spare(&self, bytes: u32, need: Need) -> bool {
        let ready = self.ready.lock();
        ready.len() > need.keeps_back() && ready.iter().any(|spare| spare.listed.bytes >= bytes)
    }

    /// Takes back a spare in which nothing was written. Quick: called under the tail lock.
    pub fn give_back(&self, spare: Spare) {
        self.ready.lock().push(spare);
    }

    /// Whether [`Pool::refill`] has something to do.
    pub fn is_low(&self) -> bool {
        self.ready.lock().len() <= RESERVE
    }

    /// Bytes of frames that surely fit the spares there are, though what is behind the last frame of each
    /// is lost.
    pub fn room_at_hand(&self) -> u64 {
        let usable = |spare: &Spare| u64::from(spare.listed.bytes.saturating_sub(HEADER_BYTES)) * 5 / 8;
        self.ready.lock().iter().map(usable).sum()
    }

    /// Makes one more spare, if the disk has room for it.
    pub fn add_spare(&self) -> bool {
        let mut list = self.list.lock();
        let bytes = self.following_bytes(&list);
        self.make(&mut list, bytes).is_ok()
    }

    /// Makes spares until one is there beyond the reserve.
    pub fn refill(&self) -> Result<()> {
        let mut list = self.list.lock();
        while self.is_low() {
            let bytes = self.following_bytes(&list);
            self.make(&mut list, bytes)?;
        }
        Ok(())
    }

    /// Sees to it that [`Pool::take`] finds a spare of `bytes`, making one where it must.
    pub fn provide(&self, bytes: u32, need: Need) -> Result<()> {
        let mut list = self.list.lock();
        let usual = self.following_bytes(&list);
        loop {
            let (enough, fits) = {
                let ready = self.ready.lock();
                let fits = ready.iter().any(|spare| spare.listed.bytes >= bytes);
                (ready.len() > need.keeps_back(), fits)
            };
            if enough && fits {
                return Ok(());
            }
            let wanted = if enough || !fits { bytes.next_multiple_of(4096).max(usual) } else { usual };
            self.make(&mut list, wanted)?;
        }
    }

    /// Segments follow the size of the store, so that a small store is small.
    pub(super) fn following_bytes(&self, list: &List) -> u32 {
        self.fixed_bytes.unwrap_or_else(|| {
            let share = listed_bytes(list) / SEGMENTS;
            let rounded = share.checked_ilog2().map_or(0, |bits| 1 << bits);
            let share = rounded.clamp(MIN_FOLLOWING_BYTES, MAX_SEGMENT_BYTES as u64) as u32;
            self.asked.at_least(share)
        })
    }

    fn make(&self, list: &mut List, bytes: u32) -> Result<()> {
        let made = self.try_make(list, bytes);
        *self.trouble.lock() = made.as_ref().err().inspect(|error| events::spare_failed(error)).cloned();
        made
    }

    fn try_make(&self, list: &mut List, bytes: u32) -> Result<()> {
        list.make_room().map_err(|e| self.explain(e, bytes))?;
        let life = self.entropy.u64()?;
        let full = |e| self.explain(e, bytes);
        let mut id = free_id(list, list.block().next_segment).map_err(full)?;
        let mut others = 0;
        let begun = loop {
            match self.storage.open(&name::segment(id), Access::Create) {
                // Opening removed what was this store's own: whose it is is not known, so it stays.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    if others == OTHERS_FILES_MAX {
                        return Err(self.explain(e, bytes));
                    }
                    others += 1;
                    id = free_id(list, id.0 + 1).map_err(full)?;
                }
                begun => break begun,
            }
        };
        let file = match begun.and_then(|file| self.prepare(file, bytes, spare_block(list, id))) {
            Ok(file) => file,
            Err(e) => {
                // Never listed, so nothing rests on it; what cannot be removed now goes at the next open.
                let _ = self.storage.remove(&name::segment(id));
                return Err(self.explain(e, bytes));
            }
        };
        let listed = Listed { segment: id, bytes, life, origin: 0, is_marked: true };
        let update = list.update(|block| {
            block.next_segment = id.0 + 1;
            block.segments.push(listed);
        });
        // After a failure the list may name it all the same: the file stays.
        update.map_err(|e| self.explain(e, bytes))?;
        self.note_list(list);
        events::spare_made(|| self.storage.describe(), id.0, bytes);
        self.ready.lock().push(Spare { listed, file });
        Ok(())
    }

    /// Notes how many bytes were made durable at once.
    pub fn note_group(&self, bytes: u64) {
        let before = self.group_bytes.load(Ordering::Relaxed);
        self.group_bytes.store(before - before / 8 + bytes / 8, Ordering::Relaxed);
    }

    /// Whether so much is written at once that writing it twice costs more than what a sync of a file that was
    /// only reserved costs on top.
    fn is_bulk(&self, segment_bytes: u32) -> bool {
        self.group_bytes.load(Ordering::Relaxed) >= BULK_BYTES.min(segment_bytes as u64 / 4)
    }

    fn prepare(&self, file: Arc<dyn File>, bytes: u32, mark: Vec<u8>) -> io::Result<Arc<dyn File>> {
        let is_reserved = self.is_bulk(bytes) && file.reserve(bytes as u64)?;
        if !is_reserved {
            file.write_zeros(bytes as u64)?;
            self.zeros.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        // Before it is listed, and with the same sync: from then on zeros in front of it are damage.
        file.write_all_at(&mark, 0)?;
        file.sync_data()?;
        self.storage.sync_dir()?;
        self.zeros.fetch_add(mark.len() as u64, Ordering::Relaxed);
        Ok(file)
    }

    fn explain(&self, e: io::Error, bytes: u32) -> Error {
        if is_full(&e) {
            return Error::NoSpace { dir: self.storage.describe(), bytes: bytes as u64 };
        }
        Error::io(format!("preparing a segment in {}", self.storage.describe()), e)
    }

    /// Writes into the list that the log is sealed through `segment`, unless it says so; and, where it was
    /// sealed short, the length it was cut to.
    pub fn note_sealed(&self, segment: u32, short: Option<u32>) -> io::Result<()> {
        let mut list = self.list.lock();
        if list.block().sealed_through == segment {
            return Ok(());
        }
        list.update(|block| {
            block.sealed_through = segment;
            if let Some(bytes) = short {
                block.set_bytes(SegmentId(segment), bytes);
            }
        })?;
        self.note_list(&list);
        Ok(())
    }

    /// Names the index file that counts from here on.
    pub fn note_index(&self, at: Lsn) -> io::Result<()> {
        let mut list = self.list.lock();
        list.update(|block| block.index = at)?;
        self.note_list(&list);
        Ok(())
    }

    /// What is asked for often and quickly of a list that has changed.
    pub(super) fn note_list(&self, list: &List) {
        self.list_written.store(list.written, Ordering::Relaxed);
        self.listed_bytes.store(listed_bytes(list), Ordering::Relaxed);
        self.segments.store(list.block().segments.len() as u64, Ordering::Relaxed);
    }

    /// What the list says now.
    pub fn block(&self) -> StoreBlock {
        self.list.lock().block().clone()
    }

    /// The directory.
    pub fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// Lets go of the directory, once who is at the list is done. Whoever was on the way to it changes nothing: it may
    /// be somebody else's by then.
    pub fn close(&self) {
        self.list.lock().close();
    }

    /// Gives a store in the making its name: from here on it opens.
    pub fn publish(&self) -> io::Result<()> {
        self.list.lock().publish()
    }

    /// Whether the list on disk is known.
    ///
    /// # Errors
    /// An earlier sync of it failed.
    pub fn check_list(&self) -> io::Result<()> {
        self.list.lock().check()
    }

    /// Every byte the store takes on disk in segments.
    pub fn disk_bytes(&self) -> u64 {
        self.listed_bytes.load(Ordering::Relaxed) + self.retired_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of zeros and marks written, and of the list.
    pub fn written_bytes(&self) -> u64 {
        self.zeros.load(Ordering::Relaxed) + self.list_written.load(Ordering::Relaxed)
    }

    /// What was asked of a spare lately.
    pub fn asked_bytes(&self) -> u32 {
        self.asked.bytes.load(Ordering::Relaxed).min(self.usual_bytes())
    }

    /// What the next segment will take.
    pub fn usual_bytes(&self) -> u32 {
        self.following_bytes(&self.list.lock())
    }

    /// How many segments are listed, and how many of them are spares.
    pub fn segments(&self) -> (u64, u64) {
        (self.segments.load(Ordering::Relaxed), self.ready.lock().len() as u64)
    }

    /// Why the last attempt to make a segment failed, if it did.
    pub fn trouble(&self) -> Option<Error> {
        self.trouble.lock().clone()
    }
}

fn listed_bytes(list: &List) -> u64 {
    list.block().segments.iter().map(|listed| listed.bytes as u64).sum()
}

pub(super) fn spare_block(list: &List, segment: SegmentId) -> Vec<u8> {
    SpareBlock { store_id: list.block().store_id, segment }.encode()
}

/// The next id, `from` the first that was never used, whose slot in the table of segments no listed
/// segment holds.
///
/// # Errors
/// As a full disk: all slots are taken, or there are no more ids.
pub(super) fn free_id(list: &List, from: u32) -> io::Result<SegmentId> {
    let segments = &list.block().segments;
    let is_free =
        |id: &SegmentId| segments.iter().all(|listed| Segments::slot(listed.segment) != Segments::slot(*id));
    let mut ids = (from..u32::MAX).take(MAX_SEGMENTS).map(SegmentId);
    let free = if segments.len() < MAX_SEGMENTS { ids.find(is_free) } else { None };
    free.ok_or_else(|| io::ErrorKind::StorageFull.into())
}

// Loom's locks do not work outside of its models.
#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::storage::SimDisk;

    /// The search for a free slot never ended, with the list locked.
    #[test]
    fn a_store_of_as_many_segments_as_there_are_slots_is_full() {
        let disk = Arc::new(SimDisk::new());
        let listed =
            |n| Listed { segment: SegmentId(n), bytes: 1 << 20, life: 0, origin: 0, is_marked: true };
        for (count, is_full) in [(MAX_SEGMENTS as u32 - 1, false), (MAX_SEGMENTS as u32, true)] {
            let block = StoreBlock {
                generation: 1,
                store_id: [1; 16],
                ancestors: Vec::new(),
                incarnation: 1,
                incarnation_before: 0,
                next_segment: count + 1,
                sealed_through: 0,
                is_checkpoint: false,
                segments: (1..=count).map(listed).collect(),
                index: Lsn::ZERO,
            };
            let list = List::create(disk.clone(), block).unwrap();
            let pool = Pool::new(disk.clone(), list, Vec::new(), &Options::new().segment_bytes(16 << 10));
            assert_eq!(pool.add_spare(), !is_full);
            assert_eq!(matches!(pool.trouble(), Some(Error::NoSpace { .. })), is_full);
        }
    }
}
