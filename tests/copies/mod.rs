//! What the tests of copies share: a life of a store, what it shows, and what must hold of every store that
//! was made of another one.
#![allow(dead_code)]

use crate::assert_err;
use crate::store::{op, secs, token};
use std::collections::BTreeMap;
use tidewall::storage::{Crash, SimDisk};
use tidewall::{
    Db, Error, Keyspace, KeyspaceOptions, LastOperation, Lsn, Mark, Options, OwnerId, Restored, Salvaged,
    Scope, Token, Tokens, Ttl,
};

pub fn jobs(db: &Db) -> Keyspace {
    db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).expect("jobs")
}

pub fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).expect("rows")
}

/// Every key with its value, of every keyspace.
pub fn contents(db: &Db) -> BTreeMap<(String, Vec<u8>), Vec<u8>> {
    let mut all = BTreeMap::new();
    for (name, options) in db.keyspaces() {
        for item in db.keyspace(&name, options).unwrap().iter() {
            let (key, value) = item.unwrap();
            all.insert((name.clone(), key), value.to_vec());
        }
    }
    all
}

/// The files of one directory.
pub fn files(disk: &SimDisk) -> BTreeMap<String, Vec<u8>> {
    let names = disk.file_names().into_iter().filter(|name| name != "LOCK");
    names.map(|name| (name.clone(), disk.read_file(&name).unwrap())).collect()
}

pub fn read_only(disk: &SimDisk) -> tidewall::Result<Db> {
    Options::new().storage(disk.clone()).read_only().open("sim")
}

/// Opens what a restore made, with a seed of its own.
pub fn open_new(disk: &SimDisk, seed: u64) -> tidewall::Result<Db> {
    let options = Options::new().storage(disk.clone()).must_exist().without_threads();
    options.deterministic(seed).segment_bytes(16 << 10).lease_grace(secs(60)).open("new")
}

/// A few segments' worth of a life: tokens up to 3 in jobs, external ones up to 500.
pub fn live(db: &Db) -> Token {
    let (jobs, rows) = (jobs(db), rows(db));
    let first = jobs.lease(b"1/").owner(OwnerId::new(7)).ttl(secs(60)).acquire().unwrap();
    for n in 0..30u8 {
        jobs.put(first.token(), &[b'1', b'/', n], &[n; 900]).unwrap();
        rows.put(token(500), &[n], &[n; 300]).unwrap();
    }
    jobs.put_operation(first.token(), op(9), b"1/numbered", b"x").unwrap();
    jobs.delete(first.token(), b"1/\x03").unwrap();
    rows.raise_all(token(400)).unwrap();
    std::mem::forget(first);
    let second = jobs.lease(b"2/").ttl(Ttl::INFINITE).acquire().unwrap();
    let token = second.token();
    jobs.put(token, b"2/a", b"two").unwrap();
    std::mem::forget(second);
    token
}

/// The store goes on: another segment or two.
pub fn more(db: &Db) {
    let fence = format!("more-{}/", db.last_lsn());
    let lease = jobs(db).lease(fence.as_bytes()).ttl(secs(60)).acquire().unwrap();
    for n in 0..20u8 {
        jobs(db).put(lease.token(), &[fence.as_bytes(), &[n]].concat(), &[n; 900]).unwrap();
    }
}

pub fn begin(seed: u64) -> (SimDisk, Db) {
    let disk = SimDisk::new();
    let options = Options::new().storage(disk.clone()).deterministic(seed).without_threads();
    let db = options.segment_bytes(16 << 10).open("sim").unwrap();
    live(&db);
    (disk, db)
}

pub const CRASHES: [Crash; 5] =
    [Crash::None, Crash::All, Crash::Subset { percent: 50 }, Crash::Prefix, Crash::Torn { bytes: true }];

/// What a restore or a salvage said that it made.
pub struct Made {
    pub counter: Mark,
    pub lsn: Lsn,
    pub need_floor: Vec<String>,
}

impl From<&Restored> for Made {
    fn from(made: &Restored) -> Self {
        Made { counter: made.counter, lsn: made.lsn, need_floor: made.need_floor.clone() }
    }
}

impl From<&Salvaged> for Made {
    fn from(made: &Salvaged) -> Self {
        Made { counter: made.counter, lsn: made.lsn, need_floor: made.need_floor.clone() }
    }
}

/// Everything that must hold of a store made of a [`live`] one, in which tokens up to `known` were there to be
/// read, and which granted them up to `granted`.
pub fn check_made(db: &Db, made: impl Into<Made>, known: u64, granted: u64) {
    let (jobs, made) = (jobs(db), made.into());
    assert!(made.counter.get() >= known + (1 << 32));
    for old in 1..=granted {
        for key in [&b"1/x"[..], b"2/x", b"never/x"] {
            match jobs.put(token(old), key, b"late") {
                Err(Error::Fenced { mark, last_operation, .. }) => {
                    assert_eq!((mark, last_operation), (made.counter, LastOperation::Unknown));
                }
                other => panic!("token {old} on {key:?}: {other:?}"),
            }
            assert_err!(jobs.raise(token(old), key), Error::Fenced { .. });
        }
        assert_err!(jobs.raise_all(token(old)), Error::Fenced { .. });
        assert_err!(jobs.put_operation(token(old), op(9), b"1/numbered", b"x"), Error::Fenced { .. });
    }
    // What stands at the counter itself was perhaps granted; what is above it, never.
    let counter = token(made.counter.get());
    assert_err!(jobs.put(counter, b"1/x", b"late"), Error::Fenced { .. });
    assert_err!(jobs.put(token(counter.get() + 1), b"1/x", b"early"), Error::UnknownToken { .. });
    assert!(jobs.holders(b"").unwrap().is_empty(), "leases are over");
    let resumed = jobs.lease(b"1/").owner(OwnerId::new(7)).resume(token(1)).try_acquire();
    match resumed {
        Ok(lease) => assert!(lease.token() > counter),
        Err(error) => assert!(!matches!(error, Error::Held { .. }), "{error}"),
    }
    let lease = jobs.lease(b"2/").acquire().unwrap();
    assert!(lease.token() > counter);
    let lsn = jobs.put(lease.token(), b"2/new", b"new").unwrap();
    assert!(lsn > made.lsn && made.lsn.get() > 1 << 32);

    let rows = rows(db);
    assert_eq!(made.need_floor, ["rows"]);
    assert_err!(rows.put(token(1000), b"r", b"x"), Error::NeedsFloor { .. });
    assert_err!(rows.delete(token(500), b"\x01"), Error::NeedsFloor { .. });
    assert_err!(rows.raise(token(1000), b"r"), Error::NeedsFloor { .. });
    assert_err!(rows.retire_below(token(1000)), Error::NeedsFloor { .. });
    let external = KeyspaceOptions::new().tokens(Tokens::External);
    let later = db.keyspace("later", external).unwrap();
    assert_err!(later.put(token(1), b"a", b"x"), Error::NeedsFloor { .. });
    later.raise_all(token(3)).unwrap();
    assert_err!(later.put(token(2), b"a", b"x"), Error::Fenced { .. });
    later.put(token(3), b"a", b"x").unwrap();
    assert_err!(rows.raise_all(token(399)), Error::Fenced { .. });
    rows.raise_all(token(600)).unwrap();
    assert_err!(rows.put(token(599), b"\x01", b"x"), Error::Fenced { .. });
    rows.put(token(600), b"\x01", b"x").unwrap();
}
