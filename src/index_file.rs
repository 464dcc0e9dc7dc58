//! The index file: what replay makes of the log up to one place, so that the next open begins there.
//!
//! One job: bytes of a file to tables and back. The file is a cache: `STORE` names the one that counts, and
//! whatever is the matter with it costs a scan and a warning. It is read into memory and every byte of it is
//! verified before anything is believed, for a mark that is missed would let a late writer in.
//!
//! Read next: `recover.rs`, which begins there; `refresh.rs`, which writes it.

use crate::format::header::{End, Listed, StoreBlock};
use crate::format::index::{INDEX_START_BYTES, IndexHead, IndexedSegment, IndexedTable};
use crate::format::name;
use crate::index::{SLAB_TABLES, SavedTable, Slots, saved_slots};
use crate::log::segment::Segments;
use crate::replay::Replay;
use crate::storage::{Access, File, Storage};
use crate::sync::{Arc, AtomicUsize, Ordering};
use crate::types::{Lsn, SegmentId};
use std::collections::HashSet;
use std::io;
use std::thread;

/// Below this many bytes of tables, threads cost more than they save.
const MIN_SHARED_BYTES: u64 = 256 << 10;
/// Tables read at once: they stay in the cache until they are loaded.
const READ_TABLES: usize = 16;
/// More than this many threads wait for memory.
const MAX_THREADS: usize = 4;
/// Bytes written and synced at once: the syncs of the log come in between.
const WRITE_BYTES: usize = 1 << 20;
/// Enough to tell whose a file is.
const HEAD_BYTES: u64 = 512;

/// Why an index file is not used, for people.
pub(crate) type Unusable = String;

/// An index file whose head was read and verified.
pub(crate) struct IndexFile {
    pub head: IndexHead,
    file: Arc<dyn File>,
    /// Where the tables begin.
    tables_at: u64,
}

impl IndexFile {
    /// Opens the one that `STORE` names, if it names one.
    pub fn open(storage: &dyn Storage, block: &StoreBlock) -> Option<Result<Self, Unusable>> {
        (block.index > Lsn::ZERO).then(|| Self::try_open(storage, block))
    }

    fn try_open(storage: &dyn Storage, block: &StoreBlock) -> Result<Self, Unusable> {
        let file_name = name::index(block.index);
        let file = storage.open(&file_name, Access::Read).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => "it is missing".to_owned(),
            _ => e.to_string(),
        })?;
        let len = file.len().map_err(|e| e.to_string())?;
        let start = read(&*file, 0, len.min(INDEX_START_BYTES as u64))?;
        let head_len = match IndexHead::len(&start, &file_name) {
            Ok(head_len) => head_len.filter(|&head_len| head_len <= len).ok_or("its head is damaged")?,
            Err(_) => return Err("it is of another version".to_owned()),
        };
        let head = IndexHead::decode(&read(&*file, 0, head_len)?).ok_or("its head is damaged")?;
        if head.store_id != block.store_id || head.bound.lsn != block.index {
            return Err("it belongs to another store or place".to_owned());
        }
        if len - head_len < bytes_of(&head.tables) {
            return Err("it is cut".to_owned());
        }
        Ok(IndexFile { head, file, tables_at: head_len })
    }

    /// Bytes of the whole file.
    pub fn len(&self) -> u64 {
        self.tables_at + bytes_of(&self.head.tables)
    }

    /// Which of the segments it was made of are there. Each that is there and in front of its place must be one of
    /// them, and have ended as it says.
    pub fn check_segments(&self, found: &[Known]) -> Result<Vec<bool>, Unusable> {
        let mut there = vec![false; self.head.segments.len()];
        for (listed, _, end) in found.iter().filter(|(_, before, _)| *before < self.head.bound.lsn) {
            let same = |known: &IndexedSegment| known.life == listed.life && Some(known.end) == *end;
            let at = self.head.segments.iter().position(same);
            let at = at.ok_or_else(|| format!("{} is not as it says", name::segment(listed.segment)))?;
            there[at] = true;
        }
        Ok(there)
    }

    /// Reads and verifies all tables, without the entries in segments that `kept` does not hold, if not all are there.
    pub fn tables(&self, may_start_threads: bool, kept: Option<&Bits>) -> Result<Vec<SavedTable>, Unusable> {
        let mut at = self.tables_at;
        let pieces = self.head.tables.chunks(SLAB_TABLES).map(|tables| {
            let from = at;
            at += bytes_of(tables);
            Piece { from, tables }
        });
        let pieces: Vec<_> = pieces.collect();
        let cores = || thread::available_parallelism().map_or(1, |all| all.get());
        let is_large = may_start_threads && self.len() - self.tables_at >= MIN_SHARED_BYTES;
        let threads = if is_large { cores().min(MAX_THREADS) } else { 1 };
        let next = AtomicUsize::new(0);
        // Whoever is free takes the next piece.
        let work = || {
            let (mut loaded, mut buffer) = (Vec::new(), Vec::new());
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let Some(piece) = pieces.get(n) else { return Ok(loaded) };
                loaded.push((n, self.load(piece, &mut buffer, kept)?));
            }
        };
        let mut loaded = if threads > 1 { on_threads(threads, work)? } else { work()? };
        loaded.sort_unstable_by_key(|&(n, _)| n);
        Ok(loaded.into_iter().flat_map(|(_, tables)| tables).collect())
    }

    fn load(
        &self,
        piece: &Piece<'_>,
        buffer: &mut Vec<u8>,
        kept: Option<&Bits>,
    ) -> Result<Vec<SavedTable>, Unusable> {
        let mut loaded = SavedTable::many(piece.tables.len()).map_err(|e| e.to_string())?;
        let mut from = piece.from;
        let mut places = loaded.iter_mut();
        for tables in piece.tables.chunks(READ_TABLES) {
            buffer.resize(bytes_of(tables) as usize, 0);
            self.file.read_exact_at(buffer, from).map_err(|e| e.to_string())?;
            let mut rest = &buffer[..];
            for (table, place) in tables.iter().zip(&mut places) {
                let (bytes, behind) = rest.split_at(table.bytes as usize);
                if crc32fast::hash(bytes) != table.checksum {
                    return Err(format!("it is damaged behind byte {from}"));
                }
                let made = place.load(u32::from(table.depth), bytes);
                made.ok_or_else(|| format!("it makes no sense behind byte {from}"))?;
                if let Some(kept) = kept {
                    place.keep(|slot| kept.holds(slot));
                }
                from += bytes.len() as u64;
                rest = behind;
            }
        }
        Ok(loaded)
    }
}

/// Tables that one thread reads, and where they begin.
struct Piece<'a> {
    from: u64,
    tables: &'a [IndexedTable],
}

fn bytes_of(tables: &[IndexedTable]) -> u64 {
    tables.iter().map(|table| u64::from(table.bytes)).sum()
}

/// What all of these threads make by the same work; this one is the first of them.
#[expect(clippy::disallowed_methods, reason = "threads that end before opening does, and not in simulations")]
fn on_threads<T: Send>(
    threads: usize,
    work: impl Fn() -> Result<Vec<T>, Unusable> + Sync,
) -> Result<Vec<T>, Unusable> {
    thread::scope(|scope| {
        let begin = |_| thread::Builder::new().name("tidewall-read".to_owned()).spawn_scoped(scope, &work);
        // One that cannot be started leaves its part to the others.
        let others: Vec<_> = (1..threads).filter_map(|n| begin(n).ok()).collect();
        let mut all = work()?;
        for thread in others {
            all.extend(thread.join().map_err(|_| "reading it panicked")??);
        }
        Ok(all)
    })
}

fn read(file: &dyn File, from: u64, len: u64) -> Result<Vec<u8>, Unusable> {
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, from).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// A segment that is there, the lsn in front of it, and how it ended, if it is sealed.
pub(crate) type Known = (Listed, Lsn, Option<End>);

/// The state in an index file, without what lies in segments that are gone.
///
/// # Errors
/// Why it is of no use here.
pub(crate) fn replay_on(
    file: IndexFile,
    block: &StoreBlock,
    found: &[Known],
    may_start_threads: bool,
) -> Result<Replay, Unusable> {
    let there = file.check_segments(found)?;
    let gone = |at: usize| SegmentId(file.head.segments[at].end.segment);
    let mut gone = (0..there.len()).filter(|&at| !there[at]).map(gone).peekable();
    let all = gone.peek().is_none();
    // Entries name the slot of a segment. In that of one that is gone there must be no other.
    let slots: HashSet<u32> = block.segments.iter().map(|listed| Segments::slot(listed.segment)).collect();
    if gone.any(|id| slots.contains(&Segments::slot(id))) {
        return Err("too many segments were begun since".to_owned());
    }
    let ids: HashSet<SegmentId> = (0..there.len())
        .filter(|&at| there[at])
        .map(|at| SegmentId(file.head.segments[at].end.segment))
        .collect();
    let kept = Bits::of(ids.iter().map(|&id| Segments::slot(id)));
    let tables = file.tables(may_start_threads, Some(&kept).filter(|_| !all))?;
    let slots = saved_slots(tables).ok_or("its tables are not one index")?;
    Ok(Replay::on(block, file.head, slots, |id| ids.contains(&id)))
}

/// A set of small numbers that is asked very often.
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    fn of(numbers: impl Iterator<Item = u32>) -> Self {
        let mut bits = Vec::new();
        for number in numbers {
            let word = number as usize / 64;
            bits.resize(bits.len().max(word + 1), 0);
            bits[word] |= 1 << (number % 64);
        }
        Bits(bits)
    }

    fn holds(&self, number: u32) -> bool {
        self.0.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }
}

/// Writes the file of this head and these tables, synced and named in its synced directory; answers its length.
/// It counts once `STORE` names it.
///
/// # Errors
/// The failure of the disk; nothing is left of the file, as far as that can be done.
pub(crate) fn write(storage: &dyn Storage, mut head: IndexHead, slots: &Slots) -> io::Result<u64> {
    let file_name = name::index(head.bound.lsn);
    // One that an earlier attempt left: it was never named. Somebody else's stays, and this fails.
    if is_ours(storage, &file_name, &head.store_id) {
        storage.remove(&file_name)?;
    }
    slots.save(|depth, bytes| {
        let (depth, len) = (depth as u8, bytes.len() as u32);
        head.tables.push(IndexedTable { depth, bytes: len, checksum: crc32fast::hash(bytes) });
    });
    let written = try_write(storage, &file_name, &head, slots);
    if written.is_err() {
        // What cannot be removed now goes at the next open.
        let _ = storage.remove(&file_name);
    }
    written
}

/// Whether a file is an index of this store, or was to become one: only then may it be removed.
pub(crate) fn is_ours(storage: &dyn Storage, file_name: &str, store_id: &[u8; 16]) -> bool {
    let Ok(file) = storage.open(file_name, Access::Read) else { return false };
    let head = file.len().map_err(|e| e.to_string()).and_then(|len| read(&*file, 0, len.min(HEAD_BYTES)));
    head.is_ok_and(|head| head.iter().all(|&byte| byte == 0) || IndexHead::belongs_to(&head, store_id))
}

fn try_write(storage: &dyn Storage, file_name: &str, head: &IndexHead, slots: &Slots) -> io::Result<u64> {
    let file = storage.open(file_name, Access::Create)?;
    let mut buffer = head.encode();
    let mut at = 0;
    let mut written = Ok(());
    slots.save(|_, bytes| {
        buffer.extend_from_slice(bytes);
        if written.is_ok() && buffer.len() >= WRITE_BYTES {
            written = file.write_all_at(&buffer, at).and_then(|()| file.sync_data());
            at += buffer.len() as u64;
            buffer.clear();
        }
    });
    written?;
    file.write_all_at(&buffer, at)?;
    file.sync_data()?;
    storage.sync_dir()?;
    Ok(at + buffer.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Db;
    use crate::log::list::List;
    use crate::options::{KeyspaceOptions, Options, Tokens};
    use crate::storage::SimDisk;
    use crate::types::Token;

    /// A closed store of some segments.
    fn store() -> (SimDisk, StoreBlock) {
        let disk = SimDisk::new();
        let options = Options::new().storage(disk.clone()).without_threads().deterministic(1).index_every(1);
        let db: Db = options.segment_bytes(16 << 10).open("sim").unwrap();
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        for n in 0..60u32 {
            rows.put(Token::new(1).unwrap(), &n.to_be_bytes(), &[7; 700]).unwrap();
        }
        db.close().unwrap();
        let (list, _) = List::load(Arc::new(disk.clone()), Access::Read).unwrap().unwrap();
        (disk, list.block().clone())
    }

    fn open(disk: &SimDisk, block: &StoreBlock) -> IndexFile {
        IndexFile::open(disk, block).unwrap().unwrap()
    }

    /// The segments as they are.
    fn known(file: &IndexFile, block: &StoreBlock) -> Vec<Known> {
        let mut before = Lsn::ZERO;
        let known = file.head.segments.iter().map(|segment| {
            let id = SegmentId(segment.end.segment);
            let listed = *block.segments.iter().find(|listed| listed.segment == id).unwrap();
            (listed, std::mem::replace(&mut before, segment.end.lsn), Some(segment.end))
        });
        known.collect()
    }

    #[test]
    fn each_segment_in_front_of_its_place_must_be_as_it_says() {
        let (disk, block) = store();
        let file = open(&disk, &block);
        let all = known(&file, &block);
        assert!(all.len() > 2);
        assert_eq!(file.check_segments(&all), Ok(vec![true; all.len()]));
        let changes: [fn(&mut Known); 5] = [
            |(listed, ..)| listed.life ^= 1,
            |(.., end)| end.as_mut().unwrap().checksum ^= 1,
            |(.., end)| end.as_mut().unwrap().offset += 4,
            |(.., end)| end.as_mut().unwrap().segment += 99,
            |(.., end)| *end = None,
        ];
        for change in changes {
            let mut found = all.clone();
            change(&mut found[1]);
            assert!(file.check_segments(&found).is_err(), "{:?}", found[1]);
        }
        // What follows its place is not its business.
        let mut found = all;
        found[1].1 = file.head.bound.lsn;
        found[1].0.life ^= 1;
        assert!(file.check_segments(&found).is_ok());
    }

    #[test]
    fn what_lies_in_segments_that_are_gone_is_left_out() {
        let (disk, mut block) = store();
        let mut found = known(&open(&disk, &block), &block);
        let entries = |replay: &Replay| {
            let mut segments = Vec::new();
            replay.slots.each_place(&crossbeam_epoch::pin(), |place| segments.push(place.segment));
            segments
        };
        let whole = replay_on(open(&disk, &block), &block, &found, false).unwrap();
        let slot = Segments::slot(found[1].0.segment);
        assert_eq!(entries(&whole).len(), 60);
        let there = entries(&whole).iter().filter(|&&segment| segment == slot).count();
        assert!(there > 10);
        let (gone, ..) = found.remove(1);
        block.segments.retain(|listed| listed.segment != gone.segment);
        let left = replay_on(open(&disk, &block), &block, &found, false).unwrap();
        assert_eq!(entries(&left).len(), 60 - there);
        assert!(!entries(&left).contains(&slot));
        assert_eq!(left.usage.keys(), 60 - there as u64);
        // Another segment in the slot of one that is gone: its entries are not to be told apart any more.
        let other = SegmentId(gone.segment.0 + (1 << crate::index::SEGMENT_BITS));
        block.segments.push(Listed { segment: other, ..gone });
        assert!(replay_on(open(&disk, &block), &block, &found, false).is_err());
    }

    #[test]
    fn threads_change_nothing_about_what_is_read() {
        let (disk, block) = store();
        let mut file = open(&disk, &block);
        let (one, from) = (file.head.tables[0], file.tables_at);
        // The same table over and over: many pieces, each of which says which it is.
        let tables = [one];
        let pieces: Vec<_> = (0..100).map(|_| Piece { from, tables: &tables }).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let (mut loaded, mut buffer) = (Vec::new(), Vec::new());
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                loaded.extend(file.load(piece, &mut buffer, None)?);
            }
            Ok(loaded)
        };
        assert_eq!(on_threads(3, work).unwrap().len(), 100);
        next.store(0, Ordering::Relaxed);
        disk.flip_bit(&name::index(block.index), from + 700, 1);
        assert!(on_threads(3, work).is_err());
        file.head.tables = vec![one; 1000];
        assert!(file.tables(true, None).is_err());
    }
}
