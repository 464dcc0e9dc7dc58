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
