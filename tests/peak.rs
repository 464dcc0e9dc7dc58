//! How much memory is held at once, counted while the disk is read.

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tidewall::storage::{Access, File, Mapping, SimDisk, Storage};
use tidewall::{KeyspaceOptions, Options, ReadMode, Token, Tokens};

#[global_allocator]
static MEMORY: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const SEGMENT_BYTES: u32 = 1 << 20;

fn held() -> usize {
    let stats = MEMORY.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// A disk that notes what is held while much is read at once.
#[derive(Clone, Debug)]
struct Watched(SimDisk, Arc<AtomicUsize>);

impl Storage for Watched {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        self.0.lock(name)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(WatchedFile(self.0.open(name, access)?, self.1.clone())))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.0.sync_dir()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

#[derive(Debug)]
struct WatchedFile(Arc<dyn File>, Arc<AtomicUsize>);

impl File for WatchedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if buf.len() > SEGMENT_BYTES as usize / 2 {
            self.1.fetch_max(held(), Ordering::Relaxed);
        }
        self.0.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.0.write_at(buf, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn map(&self, len: usize) -> io::Result<Mapping> {
        self.0.map(len)
    }
}

/// With positioned reads a compaction that was asked for held all segments with dead versions in memory, for each of its
/// rounds: of a store of a terabyte nearly all of it.
#[test]
fn a_compaction_holds_few_segments_at_once() {
    const SEGMENTS: usize = 40;
    let peak = Arc::new(AtomicUsize::new(0));
    let options = Options::new().storage(Watched(SimDisk::new(), peak.clone())).without_threads();
    let options = options.read_mode(ReadMode::Pread).segment_bytes(SEGMENT_BYTES).compaction(false);
    let db = options.open("sim").unwrap();
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    let one = Token::new(1).unwrap();
    let value = vec![7; SEGMENT_BYTES as usize / 10];
    for n in 0..SEGMENTS as u32 * 9 {
        // A third of each segment is needed no more: versions that came later, and what was deleted.
        rows.put(one, &n.to_be_bytes(), &value).unwrap();
        if n % 3 == 0 {
            rows.delete(one, &n.to_be_bytes()).unwrap();
        }
    }
    peak.store(0, Ordering::Relaxed);
    let before = held();
    assert!(db.compact().unwrap().segments > 10);
    let most = peak.load(Ordering::Relaxed).saturating_sub(before) / SEGMENT_BYTES as usize;
    assert!(most > 0 && most < SEGMENTS / 4, "{most} segments at once");
}
