use std::time::Duration;
use tidewall::{Db, Error, Expect, KeyspaceOptions, OperationId, Scope};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let db = Db::open("data")?; // one directory, made where there is none; durable by default
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/')))?;
    // Worker a takes job 7: its token is durable before it has it.
    let a = jobs.lease(b"7/").ttl(Duration::from_millis(50)).acquire()?;
    jobs.put(a.token(), b"7/result", b"draft")?;
    std::thread::sleep(Duration::from_millis(80)); // a pauses, and its lease runs out

    // Worker b takes over.
    let b = jobs.lease(b"7/").ttl(Duration::from_secs(10)).acquire()?;

    // a wakes up and writes. It cannot know that it is late; the store does.
    match jobs.put(a.token(), b"7/result", b"late") {
        Err(Error::Fenced { token, mark, .. }) => assert!(token < mark),
        other => unreachable!("{other:?}"),
    }

    // All or nothing, across keys and keyspaces; numbered, so that a retry is recognised.
    let mut batch = db.batch();
    batch.expect(&jobs, b"7/result", Expect::Present)?;
    batch.put(&jobs, b.token(), b"7/result", b"done")?;
    batch.put(&jobs, b.token(), b"7/log", b"by b")?;
    batch.operation(OperationId::new(1));
    batch.commit()?;
    let value = jobs.get(b"7/result")?.expect("just written");
    assert_eq!((value.bytes(), value.token()), (&b"done"[..], b.token()));
    for item in jobs.prefix(b"7/") {
        let (key, value) = item?;
        println!("{} = {}", key.escape_ascii(), value.escape_ascii());
    }
    b.release()?;
    Ok(db.close()?)
}
