use tidewall::*;

#[cfg(feature = "testkit")]
#[path = "support/watched.rs"]
mod watched;

/// Each change and each recognised retry is in the counters once.
#[test]
fn writes_and_recognised_retries_are_counted() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let db = Db::open(dir.path().join("data"))?;
    let jobs = db.keyspace("jobs", KeyspaceOptions::new())?;
    let lease = jobs.lease(b"a").acquire()?;
    let token = lease.token();
    let before = db.stats();
    jobs.put_operation(token, OperationId::new(1), b"a", b"1")?;
    assert!(matches!(
        jobs.put_operation(token, OperationId::new(1), b"a", b"1"),
        Err(Error::Duplicate { .. })
    ));
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

/// What the store says of its disk, beside what the disk says.
#[cfg(feature = "testkit")]
mod disk {
    use crate::watched::{Watch, Watched};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;
    use tidewall::storage::{CallKind, SimDisk};
    use tidewall::*;

    /// Every byte that is written to a file is counted: of frames, headers, seals, spares, lists and index files.
    #[test]
    fn what_is_written_is_what_the_disk_was_given() -> Result<()> {
        let given = Given::default();
        let options = Options::new().storage(Watched::by(&given)).clock(ManualClock::new()).deterministic(1);
        let db = options.without_threads().segment_bytes(16 << 10).index_every(20).open("sim")?;
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
        let given = || given.0.load(Ordering::Relaxed);
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

    /// The bytes that a disk was given.
    #[derive(Clone, Debug, Default)]
    struct Given(Arc<AtomicU64>);

    impl Watch for Given {
        fn after_write(&self, bytes: usize) {
            self.0.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}
