//! What the fuzz targets share: a store on a simulated disk, and all that can be read from it.

pub mod rows;

use std::collections::BTreeMap;
use tidewall::storage::SimDisk;
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, ManualClock, Options, Scope, Token, Tokens};

pub const SEGMENT_BYTES: u32 = 16 << 10;

pub fn open(disk: &SimDisk, seed: u64) -> Result<Db, Error> {
    Options::new()
        .storage(disk.clone())
        .clock(ManualClock::new())
        .deterministic(seed)
        .without_threads()
        .segment_bytes(SEGMENT_BYTES)
        .open("fuzz")
}

pub fn open_read_only(disk: &SimDisk) -> Result<Db, Error> {
    Options::new().storage(disk.clone()).clock(ManualClock::new()).without_threads().read_only().open("fuzz")
}

pub fn rows(db: &Db) -> Result<Keyspace, Error> {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))
}

pub fn jobs(db: &Db) -> Result<Keyspace, Error> {
    db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/')))
}

pub fn token(number: u64) -> Token {
    Token::new(number).expect("in range")
}

/// Every key with its value and mark.
pub type Contents = BTreeMap<(String, Vec<u8>), (Vec<u8>, u64)>;

/// All that a store holds, and the first thing that could not be read.
pub fn contents(db: &Db) -> Result<Contents, Error> {
    let mut all = Contents::new();
    for (name, options) in db.keyspaces() {
        let keyspace = db.keyspace(&name, options)?;
        for item in keyspace.iter() {
            let (key, value) = item?;
            let mark = keyspace.mark(&key)?.map_or(0, |mark| mark.get());
            assert!(mark >= value.token().get(), "a mark below the token of a value");
            assert_eq!(keyspace.get(&key)?.as_deref(), Some(&*value), "a scan and a look-up differ");
            all.insert((name.clone(), key), (value.to_vec(), mark));
        }
    }
    Ok(all)
}

/// A store with a little of everything: two segments and more, both kinds of tokens, deletes, a lease.
pub fn sample(seed: u64) -> (SimDisk, Contents) {
    let disk = SimDisk::new();
    let db = open(&disk, seed).expect("a new store opens");
    let (rows, jobs) = (rows(&db).expect("rows"), jobs(&db).expect("jobs"));
    let lease = jobs.lease(b"7/").acquire().expect("free");
    for n in 0..90u64 {
        let key = [b'k', (n % 23) as u8];
        rows.put(token(1 + n / 10), &key, &vec![n as u8; 300 + n as usize]).expect("accepted");
        if n % 7 == 0 {
            rows.delete(token(1 + n / 10), &key).expect("accepted");
        }
    }
    jobs.put(lease.token(), b"7/result", b"done").expect("accepted");
    rows.raise_all(token(10)).expect("rises");
    let contents = contents(&db).expect("reads");
    db.close().expect("closes");
    (disk, contents)
}
