//! Directories written by each released version of the format, opened for ever.
//!
//! `tests/data/v<n>/<shape>.txt` spells out the files of one directory (see `dump/mod.rs`). Each was written once, by a
//! build of its time: `TIDEWALL_WRITE_GOLDEN=1 cargo test --features testkit --test golden` adds those that are missing and
//! overwrites none. Version 1 is frozen: these bytes are final, and a new shape gets a new name.

mod dump;

#[cfg(feature = "testkit")]
use std::io::Write;
use std::path::Path;
use tidewall::{Db, Error, KeyspaceOptions, OperationId, Scope, Token, Tokens};

#[cfg(feature = "testkit")]
use tidewall::{Options, OwnerId, Restore, storage::SimDisk};

const ZEROS: [u8; 2000] = [0; 2000];

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn key() -> KeyspaceOptions {
    KeyspaceOptions::new()
}

fn prefix() -> KeyspaceOptions {
    KeyspaceOptions::new().scope(Scope::Prefix(b'/'))
}

fn whole() -> KeyspaceOptions {
    KeyspaceOptions::new().scope(Scope::Keyspace)
}

fn external() -> KeyspaceOptions {
    KeyspaceOptions::new().tokens(Tokens::External).token_jump_cap(1000)
}

/// The shapes of version 1, and the CRC-32 of their files.
const FROZEN: [(&str, &str, u32); 8] = [
    ("closed", include_str!("data/v1/closed.txt"), 0x8a34d88a),
    ("compacted", include_str!("data/v1/compacted.txt"), 0x76a3de6c),
    ("external", include_str!("data/v1/external.txt"), 0xfa4beec8),
    ("indexed", include_str!("data/v1/indexed.txt"), 0x7e36539d),
    ("marked", include_str!("data/v1/marked.txt"), 0x621b6139),
    ("restored", include_str!("data/v1/restored.txt"), 0x4f9922b9),
    ("scopes", include_str!("data/v1/scopes.txt"), 0x10dd8639),
    ("torn", include_str!("data/v1/torn.txt"), 0x95e9905d),
];

#[test]
fn frozen_bytes_never_change() {
    for (shape, text, sum) in FROZEN {
        let mut bytes = Vec::new();
        for (name, file) in dump::parse(text) {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(&file);
        }
        assert_eq!(crc32fast::hash(&bytes), sum, "{shape} of version 1 is not what it was");
    }
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/v1");
    let mut there: Vec<_> = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name()).collect();
    there.sort();
    assert_eq!(
        there,
        FROZEN.map(|(shape, ..)| std::ffi::OsString::from(format!("{shape}.txt"))),
        "each file is listed here"
    );
}

/// Calls `check` on a directory as it was written, and once more on what the first open made of it.
fn open_twice(dump: &str, check: impl Fn(&Db)) {
    let scratch = tempfile::tempdir().unwrap();
    for (name, bytes) in dump::parse(dump) {
        std::fs::write(scratch.path().join(name), bytes).unwrap();
    }
    read_only(scratch.path());
    for _ in 0..2 {
        let db = tidewall::Options::new().must_exist().open(scratch.path()).unwrap();
        assert!(db.report().warnings.is_empty(), "{:?}", db.report().warnings);
        check(&db);
        db.close().unwrap();
    }
}

/// A read-only open succeeds, and leaves every byte as it is.
fn read_only(dir: &Path) {
    let bytes = || {
        let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|path| !path.ends_with("LOCK"));
        files.sort();
        files.into_iter().map(|path| (std::fs::read(&path).unwrap(), path)).collect::<Vec<_>>()
    };
    let before = bytes();
    drop(tidewall::Options::new().read_only().open(dir).unwrap());
    assert!(before == bytes(), "a read-only open changed the files");
}

#[test]
fn v1_scopes_opens() {
    open_twice(include_str!("data/v1/scopes.txt"), |db| {
        let (keys, jobs, log) = (
            db.keyspace("keys", key()).unwrap(),
            db.keyspace("jobs", prefix()).unwrap(),
            db.keyspace("log", whole()).unwrap(),
        );
        assert_eq!(keys.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
        assert_eq!(keys.mark(b"a").unwrap().unwrap().get(), 1);
        assert_eq!(jobs.iter().count(), 11);
        assert_eq!(jobs.get(b"7/3").unwrap().as_deref(), Some(&ZEROS[..]));
        assert_eq!(jobs.get(b"7/x").unwrap().unwrap().token().get(), 2);
        assert_eq!(jobs.mark(b"7/").unwrap().unwrap().get(), 3);
        assert!(matches!(jobs.put(token(2), b"7/x", b"late"), Err(Error::Fenced { .. })));
        assert!(matches!(log.put(token(3), b"x", b"late"), Err(Error::Fenced { .. })), "the floor");
        assert_eq!(log.mark(b"").unwrap().unwrap().get(), 4);
        assert_eq!(log.get(b"entry").unwrap().as_deref(), Some(&b"first"[..]));
        let again = jobs.put_operation(token(3), OperationId::new(5), b"7/y", b"numbered");
        assert!(matches!(again, Err(Error::Duplicate { .. })), "{again:?}");
    });
}

#[test]
fn v1_external_opens() {
    open_twice(include_str!("data/v1/external.txt"), |db| {
        let rows = db.keyspace("rows", external()).unwrap();
        let keys: Vec<_> = rows.iter().map(|item| item.unwrap().0).collect();
        assert_eq!(keys, [b"b", b"c"]);
        assert_eq!(rows.mark(b"a").unwrap().unwrap().get(), 1_000_007, "a mark outlives its value");
        assert!(matches!(rows.put(token(1_000_006), b"a", b"late"), Err(Error::Fenced { .. })));
        assert!(matches!(rows.put(token(2_000_000), b"a", b"far"), Err(Error::TokenJump { .. })));
        assert_eq!(rows.get(b"c").unwrap().unwrap().len(), 600);
    });
}

#[test]
fn v1_torn_opens_without_its_tail() {
    open_twice(include_str!("data/v1/torn.txt"), |db| {
        let rows = db.keyspace("rows", external()).unwrap();
        assert_eq!(db.last_lsn().get(), 3);
        assert_eq!(rows.get(b"a").unwrap().as_deref(), Some(&b"whole"[..]));
        assert_eq!(rows.get(b"b").unwrap().as_deref(), Some(&b"whole"[..]));
        assert_eq!(rows.get(b"c").unwrap(), None);
        assert_eq!(rows.mark(b"c").unwrap(), None);
    });
}

#[test]
fn v1_closed_opens() {
    open_twice(include_str!("data/v1/closed.txt"), |db| {
        assert_eq!(db.report().cut_bytes, 0);
        let jobs = db.keyspace("jobs", prefix()).unwrap();
        assert_eq!(jobs.get(b"1/a").unwrap().as_deref(), Some(&b"kept"[..]));
        assert!(jobs.get(b"1/b").unwrap().is_none());
        let next = jobs.lease(b"2/").acquire().unwrap();
        assert!(next.token().get() > 5000, "the counter was moved up: {:?}", next.token());
    });
}

#[test]
fn v1_compacted_opens() {
    open_twice(include_str!("data/v1/compacted.txt"), |db| {
        let (keys, jobs) = (db.keyspace("keys", key()).unwrap(), db.keyspace("jobs", prefix()).unwrap());
        let floor = keys.floor().expect("marks were folded");
        assert!(floor.is_folded);
        assert_eq!(floor.mark.get(), 12);
        assert!(
            matches!(keys.put(token(12), b"once-3", b"late"), Err(Error::Fenced { .. })),
            "it is exclusive"
        );
        assert_eq!(keys.get(b"kept").unwrap().as_deref(), Some(&ZEROS[..]));
        assert_eq!(jobs.floor(), None, "a lease pins it");
        assert_eq!(jobs.mark(b"7/").unwrap().unwrap().get(), 14, "a mark outlives its values");
        assert!(jobs.get(b"7/gone").unwrap().is_none());
        let again = jobs.put_operation(token(14), OperationId::new(5), b"7/gone", b"numbered");
        assert!(matches!(again, Err(Error::Duplicate { .. })), "{again:?}");
        let rows = db.keyspace("rows", external()).unwrap();
        assert!(rows.get(b"a").unwrap().is_none());
        assert_eq!(rows.mark(b"a").unwrap().unwrap().get(), 1_000_007);
        assert_eq!(rows.iter().count(), 6);
        assert!(jobs.lease(b"9/").acquire().unwrap().token().get() > 5_000, "the counter is carried");
    });
}

/// Spares made and spares used again, each with its mark; and what compaction left, as in an older list without marks.
#[test]
fn v1_marked_opens() {
    let marked = include_str!("data/v1/marked.txt");
    let starts = |dump: &str| -> Vec<Vec<u8>> {
        let files = dump::parse(dump).into_iter().filter(|(name, _)| name.ends_with(".seg"));
        files.map(|(_, bytes)| bytes[..8].to_vec()).collect()
    };
    assert!(starts(marked).contains(&b"TIDEFREE".to_vec()));
    assert!(!starts(include_str!("data/v1/compacted.txt")).contains(&b"TIDEFREE".to_vec()));
    open_twice(marked, |db| {
        let keys = db.keyspace("keys", key()).unwrap();
        assert_eq!(keys.get(b"kept").unwrap().as_deref(), Some(&ZEROS[..]));
        assert!(keys.floor().is_some());
    });
}

/// Closed with an index file in front of its last segments, which the open begins with.
#[test]
fn v1_indexed_opens() {
    let indexed = include_str!("data/v1/indexed.txt");
    assert!(dump::parse(indexed).keys().any(|name| name.starts_with("INDEX-")));
    open_twice(indexed, |db| {
        // Without the index file there is a warning, and all of the log to replay.
        assert_eq!(db.report().ops, 37, "the index file counts");
        let (keys, jobs) = (db.keyspace("keys", key()).unwrap(), db.keyspace("jobs", prefix()).unwrap());
        let rows = db.keyspace("rows", external()).unwrap();
        assert_eq!(keys.iter().count(), 20);
        assert_eq!(keys.get(b"key-7").unwrap().as_deref(), Some(&ZEROS[..]));
        assert!(keys.get(b"key-20").unwrap().is_none());
        assert_eq!(jobs.mark(b"7/").unwrap().unwrap().get(), 22);
        let again = jobs.put_operation(token(22), OperationId::new(5), b"7/y", b"numbered");
        assert!(matches!(again, Err(Error::Duplicate { .. })), "{again:?}");
        assert_eq!(rows.floor().unwrap().mark.get(), 500);
        assert!(matches!(rows.put(token(499), b"a", b"late"), Err(Error::Fenced { .. })));
    });
}

/// Made of a checkpoint: an id of its own, segments of its ancestor, and a counter that went on.
#[test]
fn v1_restored_opens() {
    open_twice(include_str!("data/v1/restored.txt"), |db| {
        let (jobs, rows) = (db.keyspace("jobs", prefix()).unwrap(), db.keyspace("rows", external()).unwrap());
        assert_eq!(jobs.get(b"7/a").unwrap().as_deref(), Some(&b"copied"[..]));
        assert!(matches!(jobs.put(token(1), b"7/a", b"late"), Err(Error::Fenced { .. })), "of the original");
        assert_eq!(jobs.get(b"7/b").unwrap().as_deref(), Some(&b"written since"[..]));
        assert!(jobs.lease(b"8/").acquire().unwrap().token().get() > 1 << 32);
        assert_eq!(rows.get(b"a").unwrap().as_deref(), Some(&b"copied"[..]));
        assert!(matches!(rows.put(token(9), b"a", b"x"), Err(Error::NeedsFloor { .. })));
    });
}

/// What is on the disk after `write`: while the store is open, as a killed process leaves it, unless
/// `write` closes it.
#[cfg(feature = "testkit")]
fn written(write: impl FnOnce(Db)) -> dump::Files {
    let disk = SimDisk::new();
    let db = options(&disk).open("golden").unwrap();
    let killed = db.clone();
    write(db);
    let left = disk.kill();
    drop(killed);
    files(&left)
}

#[cfg(feature = "testkit")]
fn options(disk: &SimDisk) -> Options {
    Options::new().storage(disk.clone()).deterministic(1).without_threads().segment_bytes(16 << 10)
}

#[cfg(feature = "testkit")]
fn files(left: &SimDisk) -> dump::Files {
    let stored = left.file_names().into_iter().filter(|name| name != "LOCK");
    stored.map(|name| (name.clone(), left.read_file(&name).unwrap())).collect()
}

#[cfg(feature = "testkit")]
#[test]
fn golden_directories_are_written_once() {
    let scopes = written(|db| {
        let (keys, jobs, log) = (
            db.keyspace("keys", key()).unwrap(),
            db.keyspace("jobs", prefix()).unwrap(),
            db.keyspace("log", whole()).unwrap(),
        );
        let a = keys.lease(b"a").owner(OwnerId::new(1)).acquire().unwrap();
        keys.put(a.token(), b"a", b"1").unwrap();
        let seven = jobs.lease(b"7/").owner(OwnerId::new(2)).acquire().unwrap();
        for i in 0..9 {
            jobs.put(seven.token(), format!("7/{i}").as_bytes(), &ZEROS).unwrap();
        }
        jobs.put(seven.token(), b"7/x", b"y").unwrap();
        seven.release().unwrap();
        let next = jobs.lease(b"7/").owner(OwnerId::new(3)).acquire().unwrap();
        jobs.put_operation(next.token(), OperationId::new(5), b"7/y", b"numbered").unwrap();
        let all = log.lease(b"").owner(OwnerId::new(4)).acquire().unwrap();
        log.put(all.token(), b"entry", b"first").unwrap();
        log.raise_all(all.token()).unwrap();
    });
    let external_tokens = written(|db| {
        let rows = db.keyspace("rows", external()).unwrap();
        for key in [b"a", b"b", b"c"] {
            rows.put(token(1_000_000), key, b"first").unwrap();
        }
        rows.put(token(1_000_007), b"c", &ZEROS[..600]).unwrap();
        rows.delete(token(1_000_007), b"a").unwrap();
    });
    let mut torn = written(|db| {
        let rows = db.keyspace("rows", external()).unwrap();
        for key in [b"a", b"b", b"c"] {
            rows.put(token(7), key, b"whole").unwrap();
        }
    });
    let segment = torn.get_mut("000001.seg").unwrap();
    let end = segment.iter().rposition(|&byte| byte != 0).unwrap();
    segment[end - 3..].fill(0);
    let closed = written(|db| {
        let jobs = db.keyspace("jobs", prefix()).unwrap();
        let lease = jobs.lease(b"1/").owner(OwnerId::new(1)).acquire().unwrap();
        jobs.put(lease.token(), b"1/a", b"kept").unwrap();
        jobs.put(lease.token(), b"1/b", b"deleted").unwrap();
        jobs.delete(lease.token(), b"1/b").unwrap();
        db.advance_tokens(token(5000)).unwrap();
        std::mem::forget(lease); // held when the store closes
        db.close().unwrap();
    });
    // Marks folded into a floor, and ops that were carried: puts, a delete, a numbered mark, a grant, the keyspaces,
    // the counter.
    let compacted = written(|db| {
        let (keys, jobs) = (db.keyspace("keys", key()).unwrap(), db.keyspace("jobs", prefix()).unwrap());
        let rows = db.keyspace("rows", external()).unwrap();
        for n in 0..12 {
            let name = format!("once-{n}");
            let lease = keys.lease(name.as_bytes()).owner(OwnerId::new(n)).acquire().unwrap();
            keys.put(lease.token(), name.as_bytes(), &ZEROS[..600]).unwrap();
            keys.delete(lease.token(), name.as_bytes()).unwrap();
            lease.release().unwrap();
        }
        let lease = keys.lease(b"kept").owner(OwnerId::new(20)).acquire().unwrap();
        keys.put(lease.token(), b"kept", &ZEROS).unwrap();
        let held = jobs.lease(b"7/").owner(OwnerId::new(21)).acquire().unwrap();
        jobs.put_operation(held.token(), OperationId::new(5), b"7/gone", b"numbered").unwrap();
        jobs.delete(held.token(), b"7/gone").unwrap();
        db.advance_tokens(token(5_000)).unwrap();
        for n in 0..6u8 {
            rows.put(token(1_000_000), &[n], &ZEROS).unwrap();
            if n == 2 {
                rows.put(token(1_000_000), b"a", b"x").unwrap();
            }
        }
        rows.delete(token(1_000_007), b"a").unwrap();
        let compacted = db.compact().unwrap();
        assert!(compacted.segments > 0, "{compacted:?}");
        std::mem::forget((lease, held));
    });
    let shapes = [
        ("indexed", files(&indexed())),
        ("restored", files(&restored())),
        ("marked", compacted.clone()),
        ("compacted", compacted),
        ("scopes", scopes),
        ("external", external_tokens),
        ("torn", torn),
        ("closed", closed),
    ];
    for (shape, files) in shapes {
        let text = dump::write(&files);
        dump::assert_same(&dump::parse(&text), &files);
        if std::env::var_os("TIDEWALL_WRITE_GOLDEN").is_some() {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/v1");
            std::fs::create_dir_all(&dir).unwrap();
            // One that is there stays as it is.
            if let Ok(mut file) = std::fs::File::create_new(dir.join(format!("{shape}.txt"))) {
                file.write_all(text.as_bytes()).unwrap();
            }
        }
    }
}

/// Values of several segments, marks, a numbered operation and a floor, closed.
#[cfg(feature = "testkit")]
fn indexed() -> SimDisk {
    let disk = SimDisk::new();
    let db = options(&disk).index_every(40).open("golden").unwrap();
    let (keys, jobs) = (db.keyspace("keys", key()).unwrap(), db.keyspace("jobs", prefix()).unwrap());
    let rows = db.keyspace("rows", external()).unwrap();
    for n in 0..21 {
        let name = format!("key-{n}");
        let lease = keys.lease(name.as_bytes()).owner(OwnerId::new(n)).acquire().unwrap();
        keys.put(lease.token(), name.as_bytes(), &ZEROS).unwrap();
        if n == 20 {
            keys.delete(lease.token(), name.as_bytes()).unwrap();
        }
        lease.release().unwrap();
    }
    let held = jobs.lease(b"7/").owner(OwnerId::new(50)).acquire().unwrap();
    jobs.put_operation(held.token(), OperationId::new(5), b"7/x", b"numbered").unwrap();
    rows.put(token(400), b"a", b"external").unwrap();
    rows.raise_all(token(500)).unwrap();
    std::mem::forget(held);
    db.close().unwrap();
    disk
}

/// A checkpoint restored, and written to since.
#[cfg(feature = "testkit")]
fn restored() -> SimDisk {
    let disk = SimDisk::new();
    let db = options(&disk).open("golden").unwrap();
    let (jobs, rows) = (db.keyspace("jobs", prefix()).unwrap(), db.keyspace("rows", external()).unwrap());
    let lease = jobs.lease(b"7/").owner(OwnerId::new(1)).acquire().unwrap();
    jobs.put(lease.token(), b"7/a", b"copied").unwrap();
    rows.put(token(9), b"a", b"copied").unwrap();
    db.checkpoint_into(disk.dir("copy")).unwrap();
    let new = disk.dir("new");
    Restore::new().deterministic(2).run_on(disk.dir("copy"), new.clone()).unwrap();
    let db = options(&new).open("golden").unwrap();
    let jobs = db.keyspace("jobs", prefix()).unwrap();
    let next = jobs.lease(b"7/").owner(OwnerId::new(2)).acquire().unwrap();
    jobs.put(next.token(), b"7/b", b"written since").unwrap();
    std::mem::forget((lease, next));
    db.close().unwrap();
    new
}
