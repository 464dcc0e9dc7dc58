use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidewall::storage::{Access, CallKind, File, Mapping, SimDisk, Storage};
use tidewall::*;

/// Each change and each recognised retry is in the counters once.
#[test]
fn writes_and_recognised_retries_are_counted() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let db = Db::open(dir.path().join("data"))?;
    let jobs = db.keyspace("jobs", KeyspaceOptions::new())?;
    let lease = jobs.lease(b"a").acquire()?;
    let token = lease.token();
    let before = db.stats();
    jobs.put_op(token, OpId::new(1), b"a", b"1")?;
    assert!(matches!(jobs.put_op(token, OpId::new(1), b"a", b"1"), Err(Error::Duplicate { .. })));
    let mut batch = db.batch();
    batch.put(&jobs, token, b"a", b"2")?;
    batch.commit()?;
    jobs.delete(token, b"a")?;
    jobs.raise_all(token)?;
    let after = db.stats();
    assert_eq!(after.writes - before.writes, 4);
    assert_eq!(after.duplicates - before.duplicates, 1);
    assert_eq!(after.refused - before.refused, 1);
    Ok(())
}

/// The header of a segment is written as well as its frames.
#[test]
fn what_surrounds_frames_is_counted_as_written() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let db = Db::open(dir.path().join("data"))?;
    let before = db.stats();
    db.keyspace("jobs", KeyspaceOptions::new())?;
    let after = db.stats();
    let frames = after.written_bytes - before.written_bytes;
    assert!(frames > 0);
    assert!(after.disk_written_bytes - before.disk_written_bytes >= frames + 4096, "{after:?}");
    Ok(())
}

/// Every byte that is written to a file is counted: of frames, headers, seals, spares, lists and index files.
#[test]
fn what_is_written_is_what_the_disk_was_given() -> Result<()> {
    let disk = Counting::default();
    let options = Options::new().storage(disk.clone()).clock(ManualClock::new()).deterministic(1);
    let db = options.without_threads().segment_bytes(16 << 10).index_every(20).open("sim")?;
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    let given = || disk.given.load(Ordering::Relaxed);
    let (stats, before) = (db.stats(), given());
    for n in 0..100u8 {
        rows.put(Token::new(1)?, &[n % 5], &[n; 900])?;
        assert_eq!(db.stats().disk_written_bytes - stats.disk_written_bytes, given() - before, "put {n}");
    }
    assert!(given() - before > 200_000);
    Ok(())
}

/// A disk on which every sync takes five milliseconds.
#[test]
fn the_time_of_a_sync_is_that_of_the_disk() -> Result<()> {
    const SYNC: Duration = Duration::from_millis(5);
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let options = Options::new().storage(disk.clone()).clock(clock.clone()).without_threads();
    let db = options.open("sim")?;
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    let before = db.stats();
    disk.observe(move |_, kind| {
        if kind == CallKind::SyncData {
            clock.advance(SYNC);
        }
    });
    rows.put(Token::new(1)?, b"a", b"v")?;
    let after = db.stats();
    let took = after.sync_nanos.sum - before.sync_nanos.sum;
    assert_eq!(u128::from(took), SYNC.as_nanos());
    assert_eq!(
        after.commit_nanos.sum - before.commit_nanos.sum,
        took,
        "a commit is its sync, where time stands still else"
    );
    Ok(())
}

/// Counts the bytes that it is given.
#[derive(Clone, Debug, Default)]
struct Counting {
    disk: SimDisk,
    given: Arc<AtomicU64>,
}

impl Storage for Counting {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        self.disk.lock(name)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(CountingFile { file: self.disk.open(name, access)?, given: self.given.clone() }))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.disk.sync_dir()
    }

    fn describe(&self) -> String {
        "a disk that counts".to_owned()
    }
}

#[derive(Debug)]
struct CountingFile {
    file: Arc<dyn File>,
    given: Arc<AtomicU64>,
}

impl File for CountingFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let written = self.file.write_at(buf, offset)?;
        self.given.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn map(&self, len: usize) -> io::Result<Mapping> {
        self.file.map(len)
    }
}
