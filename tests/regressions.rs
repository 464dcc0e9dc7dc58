//! Bugs that were found, each with its story.

use tidewall::storage::SimDisk;
use tidewall::{Error, KeyspaceOptions, ManualClock, Options, Token};

fn sim(disk: &SimDisk) -> Options {
    Options::new()
        .storage(disk.clone())
        .clock(ManualClock::new())
        .deterministic(7)
        .without_threads()
        .segment_bytes(16 << 10)
}

/// Room is made for a write before it is judged. When the very first one was refused, closing tried to seal
/// a segment that had no header yet, and panicked.
#[test]
fn a_refused_first_write_leaves_nothing_to_seal() {
    let disk = SimDisk::new();
    let db = sim(&disk).open("sim").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    db.close().unwrap();
    let db = sim(&disk).open("sim").unwrap();
    let refused = jobs.put(Token::new(9).unwrap(), b"key", b"value");
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let refused = jobs.put(Token::new(9).unwrap(), b"key", b"value");
    assert!(matches!(refused, Err(Error::UnknownToken { .. })), "{refused:?}");
    db.close().unwrap();
    sim(&disk).open("sim").unwrap().close().unwrap();
}
