//! Whatever is handed to the store: keys, batches, options, directories. Nothing panics, each error names
//! what is wrong, and what is not the store's own stays as it is.

#[macro_use]
mod store;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use store::{Sim, text, token};
use tidewall::storage::Crash;
use tidewall::*;

fn external() -> KeyspaceOptions {
    KeyspaceOptions::new().tokens(Tokens::External)
}

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", external()).unwrap()
}

#[test]
fn a_key_has_from_1_to_65536_bytes() {
    let sim = Sim::new();
    let db = sim.open();
    let (ks, jobs) = (rows(&db), db.keyspace("jobs", KeyspaceOptions::new()).unwrap());
    let t = token(1);
    let (longest, too_long) = (vec![7; MAX_KEY_BYTES], vec![7; MAX_KEY_BYTES + 1]);
    assert_eq!(longest.len(), 65_536);
    type Call = fn(&Db, &Keyspace, Token, &[u8]) -> Result<()>;
    let calls: [Call; 13] = [
        |_, ks, t, key| ks.put(t, key, b"").map(drop),
        |_, ks, t, key| ks.put_operation(t, OperationId::new(1), key, b"").map(drop),
        |_, ks, t, key| ks.put_if(t, key, b"", Expect::Present).map(drop),
        |_, ks, t, key| ks.delete(t, key).map(drop),
        |_, ks, t, key| ks.submit_put(t, key, b"").map(drop),
        |_, ks, t, key| ks.try_submit_put(t, key, b"").map(drop),
        |_, ks, t, key| ks.submit_delete(t, key).map(drop),
        |_, ks, t, key| ks.raise(t, key).map(drop),
        |_, ks, _, key| ks.mark(key).map(drop),
        |db, ks, t, key| db.batch().put(ks, t, key, b"").map(drop),
        |db, ks, t, key| db.batch().delete(ks, t, key).map(drop),
        |db, ks, t, key| db.batch().raise(ks, t, key).map(drop),
        |db, ks, _, key| db.batch().expect(ks, key, Expect::Absent).map(drop),
    ];
    for call in calls {
        assert_err!(call(&db, &ks, t, b""), Error::InvalidArgument(_));
        assert_err!(
            call(&db, &ks, t, &too_long),
            Error::TooLarge { what: "a key", size: 65_537, limit: 65_536 }
        );
    }
    assert_err!(jobs.lease(b"").acquire(), Error::InvalidArgument(_));
    assert_err!(jobs.lease(&too_long).acquire(), Error::TooLarge { .. });
    assert_err!(jobs.renew(b"", t, OwnerId::new(1)), Error::InvalidArgument(_));
    assert_err!(jobs.release(&too_long, t, OwnerId::new(1)), Error::TooLarge { .. });
    assert_eq!(ks.get(b"").unwrap(), None);
    assert_eq!(ks.get(&too_long).unwrap(), None);
    ks.put(t, &longest, b"longest").unwrap();
    let lease = jobs.lease(&longest).acquire().unwrap();
    jobs.put(lease.token(), &longest, b"longest").unwrap();
    let db = sim.reopen(db);
    for ks in [rows(&db), db.keyspace("jobs", KeyspaceOptions::new()).unwrap()] {
        assert_eq!(text(ks.get(&longest).unwrap()).as_deref(), Some("longest"));
        assert_eq!(ks.iter().next().unwrap().unwrap().0, longest);
    }
    // The name of the one fence of a keyspace is empty, and that is a name.
    let one = db.keyspace("one", KeyspaceOptions::new().scope(Scope::Keyspace)).unwrap();
    let lease = one.lease(b"").acquire().unwrap();
    one.raise(lease.token(), b"").unwrap();
    assert_eq!(one.mark(b"").unwrap(), Some(lease.token().into()));
    assert_err!(one.put(lease.token(), b"", b""), Error::InvalidArgument(_));
}

/// What a value or batch may be at most is found out by asking, and is so to the byte.
#[test]
fn a_value_at_the_limit_is_written_and_one_byte_more_is_refused_in_the_call_that_adds_it() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let ks = rows(&db);
    let mut value = vec![0xAB; MAX_BATCH_BYTES];
    let Err(Error::TooLarge { size, limit, what }) = ks.put(token(1), b"k", &value) else {
        panic!("it fits")
    };
    assert_eq!(limit, MAX_BATCH_BYTES);
    assert!(what.contains("value"), "{what}");
    value.truncate(limit - (size - value.len()));
    let mut batch = db.batch();
    batch.put(&ks, token(1), b"small", b"first").unwrap();
    let refused = batch.put(&ks, token(1), b"k", &value).map(drop);
    assert_err!(refused, Error::TooLarge { size, .. } if size > MAX_BATCH_BYTES);
    assert_eq!(batch.len(), 1, "the batch is as it was");
    batch.commit().unwrap();
    ks.put(token(1), b"k", &value).unwrap();
    value.push(0);
    assert_err!(ks.put(token(1), b"k", &value), Error::TooLarge { size, .. } if size == MAX_BATCH_BYTES + 1);
    value.pop();
    db.close().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    assert!(rows(&db).get(b"k").unwrap().unwrap().bytes() == value);
    assert_eq!(text(rows(&db).get(b"small").unwrap()).as_deref(), Some("first"));
}

/// Small ops are mostly bookkeeping; however many, they fit a segment of the largest size.
#[test]
fn the_largest_batch_of_the_smallest_ops_fits_the_largest_segment() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let ks = db.keyspace("one", external().scope(Scope::Keyspace)).unwrap();
    let mut batch = db.batch();
    while batch.len() < 1_000_000 {
        let n = batch.len() as u32;
        match batch.delete(&ks, token(1), &n.to_be_bytes()[1..]) {
            Ok(_) => {}
            Err(Error::TooLarge { .. }) => break,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!((100_000..1_000_000).contains(&batch.len()), "{}", batch.len());
    batch.commit().unwrap();
    for file in fs::read_dir(dir.path().join("d")).unwrap() {
        let file = file.unwrap();
        let bytes = file.metadata().unwrap().len();
        assert!(bytes <= MAX_SEGMENT_BYTES as u64, "{:?} of {bytes} bytes", file.file_name());
    }
}

#[test]
fn conditions_count_towards_the_limit_of_a_batch() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let mut batch = db.batch();
    let key = vec![1; MAX_KEY_BYTES];
    let added = (0..2000).take_while(|_| match batch.expect(&ks, &key, Expect::Absent) {
        Ok(_) => true,
        Err(Error::TooLarge { .. }) => false,
        Err(other) => panic!("{other:?}"),
    });
    assert!((900..1024).contains(&added.count()));
}

#[test]
fn a_keyspace_is_named_in_255_bytes_without_control_characters() {
    let sim = Sim::new();
    let db = sim.open();
    let long = "ä".repeat(128);
    for name in ["", "a\0b", "a\nb", "\u{7f}", "\u{85}"] {
        assert_err!(db.keyspace(name, external()), Error::InvalidArgument(_));
    }
    assert_err!(db.keyspace(&long, external()), Error::TooLarge { size: 256, limit: 255, .. });
    assert!(db.keyspaces().is_empty());
    let names = [&long[..254], "/", "..", " ", "STORE", "000001.seg", "日本"];
    for name in names {
        db.keyspace(name, external()).unwrap().put(token(1), b"k", name.as_bytes()).unwrap();
    }
    let db = sim.reopen(db);
    assert!(db.keyspaces().iter().map(|(name, _)| &name[..]).eq(names));
    for name in names {
        let ks = db.keyspace(name, external()).unwrap();
        assert_eq!(text(ks.get(b"k").unwrap()).as_deref(), Some(name));
    }
}

#[test]
fn a_keyspace_opened_with_other_options_names_each_difference() {
    let sim = Sim::new();
    let db = sim.open();
    db.keyspace("a", external().token_jump_cap(9).scope(Scope::Prefix(b'/'))).unwrap();
    let db = sim.reopen(db);
    let error = db.keyspace("a", KeyspaceOptions::new()).unwrap_err().to_string();
    for part in [
        "\"a\"",
        "scope is Prefix(47), not Key",
        "tokens are External, not Store",
        "cap is Some(9), not None",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_err!(
        db.keyspace("a", external().token_jump_cap(9).scope(Scope::Prefix(b'.'))),
        Error::InvalidArgument(_)
    );
    let options = db.keyspaces()[0].1;
    assert_eq!((options.get_scope(), options.get_tokens()), (Scope::Prefix(b'/'), Tokens::External));
    assert_eq!(options.get_token_jump_cap(), Some(9));
    db.keyspace("a", options).unwrap();
    assert_err!(db.keyspace("b", KeyspaceOptions::new().token_jump_cap(9)), Error::InvalidArgument(_));
    assert_err!(db.keyspace("b", external().token_jump_cap(0)), Error::InvalidArgument(_));
    assert_eq!(db.keyspaces().len(), 1);
}

#[test]
fn a_segment_size_outside_of_its_bounds_is_refused_before_anything_is_made() {
    for bytes in [0, MIN_SEGMENT_BYTES - 1, MAX_SEGMENT_BYTES + 1, u32::MAX] {
        let sim = Sim::new();
        assert_err!(sim.options().segment_bytes(bytes).open("sim"), Error::InvalidArgument(_));
        assert!(sim.disk.file_names().is_empty());
    }
}

fn is_io(error: &Error, kind: std::io::ErrorKind) -> bool {
    matches!(error, Error::Io { cause, .. } if cause.kind() == kind)
}

#[test]
fn a_directory_that_is_none_is_named() {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"mine").unwrap();
    let orphan = dir.path().join("missing").join("d");
    for (path, kind) in [(&file, NotADirectory), (&file.join("d"), NotADirectory), (&orphan, NotFound)] {
        let error = Db::open(path).unwrap_err();
        assert!(is_io(&error, kind), "{error:?}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    assert!(!orphan.parent().unwrap().exists());
    for options in [Options::new(), Options::new().must_exist(), Options::new().read_only()] {
        let error = options.open("").unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument(what) if what.contains("path of the store is empty")),
            "{error}"
        );
    }
}

#[test]
fn what_the_file_system_said_stands_once_in_a_chain_of_errors() {
    let dir = tempfile::tempdir().unwrap();
    let error = Db::open(dir.path().join("missing").join("d")).unwrap_err();
    let cause = error.cause().expect("the file system said no").clone();
    assert_eq!(cause.kind(), std::io::ErrorKind::NotFound);
    let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    let chain: Vec<_> = chain.map(|error| error.to_string()).collect();
    assert_eq!(chain.join(": ").matches(&cause.to_string()).count(), 1, "{chain:?}");
}

#[test]
fn a_store_that_must_exist_is_not_made_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    for options in [Options::new().must_exist(), Options::new().read_only()] {
        for path in [&missing, &empty] {
            let error = options.clone().open(path).unwrap_err();
            assert!(is_io(&error, std::io::ErrorKind::NotFound), "{error:?}");
        }
        let error = options.clone().open(&empty).unwrap_err().to_string();
        assert!(error.ends_with("there is no store (no file STORE)"), "{error}");
        assert!(!missing.exists());
        assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
    }
    rows(&Db::open(&empty).unwrap()).put(token(1), b"a", b"x").unwrap();
    Options::new().must_exist().open(&empty).unwrap();
    // Celld 158: segments without their STORE are no new store.
    fs::remove_file(empty.join("STORE")).unwrap();
    for options in [Options::new(), Options::new().must_exist(), Options::new().read_only()] {
        let error = options.open(&empty).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { file, .. } if file == "STORE"), "{error:?}");
    }
}

#[test]
fn a_read_only_medium_is_read_and_not_written() {
    let sim = Sim::new();
    let db = sim.open();
    rows(&db).put(token(1), b"a", b"x").unwrap();
    db.close().unwrap();
    sim.disk.set_read_only(true);
    let error = sim.options().open("sim").unwrap_err();
    assert!(is_io(&error, std::io::ErrorKind::ReadOnlyFilesystem), "{error:?}");
    let db = sim.options().read_only().open("sim").unwrap();
    assert_eq!(text(rows(&db).get(b"a").unwrap()).as_deref(), Some("x"));
    drop(db);
    sim.disk.set_read_only(false);
    sim.open();
}

/// For a real one the permissions do not bind root, and so this takes a directory that nobody can write.
#[cfg(target_os = "linux")]
#[test]
fn a_directory_that_cannot_be_written_is_an_error_of_the_file_system() {
    let error = Db::open("/proc/self/tidewall").unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
}

#[test]
fn a_full_disk_at_creation_says_no_space_and_is_tried_again() {
    for budget in [0, 1000, 20 << 10, 40 << 10] {
        let sim = Sim::new();
        sim.disk.set_budget(Some(budget));
        let made = sim.options().open("sim").and_then(|db| rows_or(&db)?.put(token(1), b"a", b"x").map(drop));
        assert_err!(made, Error::NoSpace { .. });
        sim.disk.set_budget(None);
        rows(&sim.open()).put(token(1), b"a", b"x").unwrap();
    }
}

fn rows_or(db: &Db) -> Result<Keyspace> {
    db.keyspace("rows", external())
}

#[test]
fn a_read_only_open_writes_nothing_and_refuses_every_change() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(5), b"a", b"x").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    for (policy, close) in [(Crash::None, false), (Crash::All, false), (Crash::All, true)] {
        let left = Sim::on(sim.disk.crash(policy, 1));
        if close {
            left.options().deterministic(9).open("sim").unwrap().close().unwrap();
        }
        let before = left.disk.image_hash();
        let db = left.options().read_only().open("sim").unwrap();
        let found = db.keyspaces();
        if found.is_empty() {
            // Nothing proves the tail, so it is left out, and the report says so.
            assert!(db.report().unproven_frames > 0, "{:?}", db.report());
        }
        for (name, options) in found {
            let ks = db.keyspace(&name, options).unwrap();
            assert_err!(ks.raise_all(token(9)), Error::ReadOnly);
            assert_err!(ks.put(token(9), b"a", b"y"), Error::ReadOnly);
            assert_err!(ks.delete_prefix(token(9), b""), Error::ReadOnly);
            if options.get_tokens() == Tokens::Store {
                assert_err!(ks.lease(b"a").acquire(), Error::ReadOnly);
            }
        }
        assert_err!(db.keyspace("new", KeyspaceOptions::new()), Error::ReadOnly);
        assert_err!(db.advance_tokens(token(5)), Error::ReadOnly);
        if close {
            assert_eq!(text(rows(&db).get(b"a").unwrap()).as_deref(), Some("x"));
        }
        db.close().unwrap();
        assert_eq!(left.disk.image_hash(), before, "{policy:?}");
    }
    drop(jobs);
}

#[test]
fn a_keyspace_is_opened_without_its_options_and_never_created_so() {
    let mut sim = Sim::new();
    let db = sim.open();
    let options = external().scope(Scope::Prefix(b'/')).token_jump_cap(7);
    db.keyspace("rows", options).unwrap().put(token(5), b"a/1", b"x").unwrap();
    let before = db.last_lsn();
    for missing in ["", "row", "rowss", "\0"] {
        assert!(db.open_keyspace(missing).unwrap().is_none());
    }
    assert_eq!((db.last_lsn(), db.keyspaces().len()), (before, 1));
    drop(db);
    let db = sim.power_cut();
    let ks = db.open_keyspace("rows").unwrap().unwrap();
    assert_eq!((ks.options(), ks.name()), (options, "rows"));
    ks.put(token(5), b"a/1", b"y").unwrap();
    assert_eq!(text(db.keyspace("rows", options).unwrap().get(b"a/1").unwrap()).as_deref(), Some("y"));
}

/// What was opened before a close is of no use after it: the files may be another process's by then.
#[test]
fn a_closed_store_says_so_to_every_call() {
    let sim = Sim::new();
    let db = sim.open();
    let (ks, jobs) = (rows(&db), db.keyspace("jobs", KeyspaceOptions::new()).unwrap());
    for n in 0..100u8 {
        ks.put(token(5), &[n], b"x").unwrap();
    }
    let lease = jobs.lease(b"j").acquire().unwrap();
    let (old, mut begun) = (db.snapshot(), ks.iter());
    begun.next().unwrap().unwrap();
    begun.next_back().unwrap().unwrap();
    db.clone().close().unwrap();

    assert_err!(db.keyspace("rows", external()), Error::Closed);
    assert_err!(db.keyspace("new", external()), Error::Closed);
    assert_err!(db.open_keyspace("rows"), Error::Closed);
    for snapshot in [old, db.snapshot()] {
        assert_err!(snapshot.get(&ks, &[1]), Error::Closed);
        assert_err!(snapshot.contains_key(&ks, &[1]), Error::Closed);
        assert_err!(snapshot.iter(&ks).next().unwrap(), Error::Closed);
    }
    for mut iter in [begun, ks.iter(), ks.prefix(&[1]), ks.range(..)] {
        assert_err!(iter.next().unwrap(), Error::Closed);
        assert_err!(iter.next_back().unwrap(), Error::Closed);
        assert_err!(iter.next_with(|_, _| ()).unwrap(), Error::Closed);
        assert_err!(iter.next_back_with(|_, _| ()).unwrap(), Error::Closed);
    }
    assert_err!(ks.get(&[1]), Error::Closed);
    assert_err!(ks.get_with(&[1], <[u8]>::len), Error::Closed);
    assert_err!(ks.contains_key(&[1]), Error::Closed);
    assert_err!(ks.mark(&[1]), Error::Closed);
    assert_err!(db.highest_token(), Error::Closed);
    assert_err!(jobs.holders(b""), Error::Closed);
    assert_err!(ks.put(token(5), &[1], b"y"), Error::Closed);
    assert_err!(ks.submit_put(token(5), &[1], b"y"), Error::Closed);
    assert_err!(ks.try_submit_put(token(5), &[1], b"y"), Error::Closed);
    assert_err!(ks.delete_prefix(token(5), b""), Error::Closed);
    assert_err!(ks.raise(token(5), &[1]), Error::Closed);
    assert_err!(ks.raise_all(token(5)), Error::Closed);
    assert_err!(ks.retire_below(token(5)), Error::Closed);
    let mut batch = db.batch();
    batch.put(&ks, token(5), &[1], b"y").unwrap();
    assert_err!(batch.commit(), Error::Closed);
    assert_err!(db.advance_tokens(token(5)), Error::Closed);
    assert_err!(db.compact(), Error::Closed);
    assert_err!(db.checkpoint("copy"), Error::Closed);
    assert_err!(jobs.lease(b"k").acquire(), Error::Closed);
    assert_err!(jobs.renew(b"j", lease.token(), lease.owner()), Error::Closed);
    assert_err!(jobs.release(b"j", lease.token(), lease.owner()), Error::Closed);
    assert_err!(jobs.break_lease(b"j", "closed"), Error::Closed);
    assert_err!(lease.renew(), Error::Closed);
    assert_err!(db.clone().close(), Error::Closed);
    // That it is fenced is known for certain, and stays true.
    assert_err!(ks.put(token(4), &[1], b"y"), Error::Fenced { .. });
    assert!(matches!(db.health(), Health::Closed) && db.last_lsn().get() > 100);
}

/// Fjall 135: what other programs leave in a directory.
#[cfg(unix)]
#[test]
fn foreign_files_are_ignored_and_never_deleted() {
    use std::os::unix::ffi::OsStrExt;
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("d");
    let target = outer.path().join("target");
    fs::write(&target, b"elsewhere").unwrap();
    let small = || Options::new().segment_bytes(MIN_SEGMENT_BYTES);
    drop(small().open(&dir).unwrap());
    let files =
        [".DS_Store", "a.tmp", "STORE.tmp", "INDEX-1.tmp", "000001.seg.tmp", "0000009.seg", "9.seg", "seg"];
    for name in files {
        fs::write(dir.join(name), name).unwrap();
    }
    let odd = dir.join(std::ffi::OsStr::from_bytes(b"not \xff utf-8.seg"));
    fs::write(&odd, b"odd").unwrap();
    fs::create_dir(dir.join("lost+found")).unwrap();
    // Under the names of segments still to come, too.
    fs::create_dir(dir.join("000005.seg")).unwrap();
    std::os::unix::fs::symlink(&target, dir.join("000006.seg")).unwrap();
    std::os::unix::fs::symlink(outer.path().join("nowhere"), dir.join("000007.seg")).unwrap();
    for round in 0..3u64 {
        let db = small().open(&dir).unwrap();
        let ks = rows(&db);
        for n in 0..60u32 {
            ks.put(token(round + 1), &n.to_be_bytes(), &[n as u8; 900]).unwrap();
        }
        assert_eq!(ks.iter().count(), 60);
        if round % 2 == 0 {
            db.close().unwrap();
        }
    }
    for name in files {
        assert_eq!(fs::read(dir.join(name)).unwrap(), name.as_bytes());
    }
    assert_eq!(fs::read(&odd).unwrap(), b"odd");
    assert!(dir.join("lost+found").is_dir() && dir.join("000005.seg").is_dir());
    assert_eq!(fs::read(dir.join("000006.seg")).unwrap(), b"elsewhere");
    assert!(fs::symlink_metadata(dir.join("000007.seg")).unwrap().is_symlink());
}

#[test]
fn a_segment_of_another_store_is_ignored_and_never_deleted() {
    let (sim, other) = (Sim::new(), Sim::new());
    let db = other.options().deterministic(777).open("sim").unwrap();
    rows(&db).put(token(9), b"secret", b"of the other").unwrap();
    db.close().unwrap();
    let foreign = other.disk.read_file("000001.seg").unwrap();
    sim.open().close().unwrap();
    let names: Vec<String> = (4..40).step_by(3).map(|n| format!("{n:06}.seg")).collect();
    let names: Vec<_> = names.into_iter().filter(|name| sim.disk.read_file(name).is_none()).collect();
    for name in &names {
        sim.disk.write_file(name, &foreign);
    }
    for round in 0..3 {
        let db = sim.open();
        let ks = rows(&db);
        for n in 0..150u32 {
            ks.put(token(1), &n.to_be_bytes(), &[round; 700]).unwrap();
        }
        assert_eq!(ks.iter().count(), 150);
        assert_eq!(ks.get(b"secret").unwrap(), None);
        db.close().unwrap();
    }
    for name in &names {
        assert!(sim.disk.read_file(name).as_deref() == Some(&foreign[..]), "{name} is not the store's");
    }
}

/// A version of the format that this build does not know, with a checksum that is right.
fn make_future(preamble: &mut [u8]) {
    preamble[8..12].copy_from_slice(&2u32.to_le_bytes());
    let checksum = crc32fast::hash(&preamble[..12]);
    preamble[12..16].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn a_format_from_the_future_asks_for_an_upgrade_and_touches_nothing() {
    let sim = Sim::new();
    let db = sim.open();
    rows(&db).put(token(1), b"a", b"x").unwrap();
    db.close().unwrap();
    for name in ["STORE", "000001.seg"] {
        let future = Sim::on(sim.disk.crash(Crash::None, 0));
        let mut bytes = future.disk.read_file(name).unwrap();
        let copies: Vec<usize> = match name {
            "STORE" => vec![0, bytes.len() / 2],
            _ => vec![0],
        };
        for at in copies {
            assert_eq!(bytes[at..at + 4], *b"TIDE", "{name} at {at}");
            make_future(&mut bytes[at..at + 16]);
        }
        future.disk.write_file(name, &bytes);
        let before = future.disk.image_hash();
        for options in [future.options(), future.options().read_only()] {
            let error = options.open("sim").unwrap_err();
            assert!(error.to_string().contains("upgrade tidewall"), "{error}");
            assert!(
                matches!(&error, Error::UpgradeRequired { file, found: 2, supported: 1 } if file == name)
            );
        }
        assert_eq!(future.disk.image_hash(), before);
    }
}

#[test]
fn a_second_open_in_the_same_process_is_locked_and_the_first_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d");
    let db = Db::open(&path).unwrap();
    let ks = rows(&db);
    for options in [Options::new(), Options::new().read_only(), Options::new().must_exist()] {
        let error = options.open(&path).unwrap_err();
        assert!(error.is_retryable());
        assert!(error.to_string().contains(&path.file_name().unwrap().to_string_lossy()[..]), "{error}");
        assert_err!(Err::<(), _>(error), Error::Locked { .. });
        ks.put(token(1), b"a", b"x").unwrap();
    }
    // The same directory by another name.
    #[cfg(unix)]
    {
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_err!(Db::open(&link), Error::Locked { .. });
    }
    drop(db);
    // A keyspace is a handle too.
    assert_err!(Db::open(&path), Error::Locked { .. });
    drop(ks);
    Db::open(&path).unwrap();
}

const CHILD: &str = "TIDEWALL_TEST_CHILD";

/// Not a test of its own: what the next one runs in another process.
#[test]
fn child_holds_the_store_until_its_input_ends() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    match Db::open(Path::new(&path)) {
        Ok(db) => {
            rows(&db).put(token(2), b"child", b"was here").unwrap();
            println!("\nchild: opened");
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).unwrap();
        }
        Err(Error::Locked { .. }) => println!("\nchild: locked"),
        Err(other) => println!("\nchild: {other:?}"),
    }
}

/// A child has the open files of its parent until its own program begins, locks too. Held while one begins, and by
/// who opens right after a drop.
static BEGINS: Mutex<()> = Mutex::new(());

/// Runs the test above in another process, and says what it found. Its output is read on until it ends.
fn child(path: &Path) -> (std::process::Child, String, impl Iterator<Item = String>) {
    let begins = BEGINS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_holds_the_store_until_its_input_ends", "--nocapture", "--test-threads=1"])
        .env(CHILD, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(begins);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(std::result::Result::ok);
    let said = lines.find_map(|line| line.strip_prefix("child: ").map(String::from));
    (child, said.expect("the child says what it found"), lines)
}

#[test]
fn a_second_process_is_locked_out_and_one_that_is_killed_leaves_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d");
    let db = Db::open(&path).unwrap();
    let ks = rows(&db);
    let (mut locked_out, said, rest) = child(&path);
    assert_eq!(said, "locked");
    rest.for_each(drop);
    assert!(locked_out.wait().unwrap().success());
    ks.put(token(1), b"a", b"x").unwrap();
    drop((db, ks));
    let (mut holder, said, _rest) = child(&path);
    assert_eq!(said, "opened");
    assert_err!(Db::open(&path), Error::Locked { .. });
    assert_err!(Options::new().read_only().open(&path), Error::Locked { .. });
    holder.kill().unwrap();
    holder.wait().unwrap();
    let db = Db::open(&path).unwrap();
    assert_eq!(text(rows(&db).get(b"child").unwrap()).as_deref(), Some("was here"));
}

/// Bitcask 163, 167, 43: the lock is the operating system's; what the file says means nothing.
#[test]
fn a_lock_file_with_any_content_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d");
    drop(Db::open(&path).unwrap());
    for content in [&b""[..], b"12345\n", b"\0\xff garbage", &[b'x'; 10_000]] {
        fs::write(path.join("LOCK"), content).unwrap();
        drop(Db::open(&path).unwrap());
        assert_eq!(fs::read(path.join("LOCK")).unwrap(), content);
    }
    fs::remove_file(path.join("LOCK")).unwrap();
    drop(Db::open(&path).unwrap());
}

/// Beads 2933: whoever removes a lock file lets one process lock the old file and another the new one.
#[test]
fn the_lock_file_stays_when_the_store_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d");
    let db = Db::open(&path).unwrap();
    let waits = fs::File::open(path.join("LOCK")).unwrap();
    db.close().unwrap();
    assert!(path.join("LOCK").exists());
    // Who had opened the file before holds the lock that the next one asks for.
    waits.try_lock().unwrap();
    assert_err!(Db::open(&path), Error::Locked { .. });
    drop(waits);
    Db::open(&path).unwrap();
}

/// Sled 1234, 1289: dropping joins the threads and lets go of the lock.
#[test]
fn a_store_is_opened_at_once_after_it_was_dropped() {
    let _no_child = BEGINS.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d");
    for n in 0..200u64 {
        let db = Options::new().segment_bytes(MIN_SEGMENT_BYTES).open(&path).unwrap();
        if n % 10 == 0 {
            rows(&db).put(token(n + 1), b"a", &n.to_le_bytes()).unwrap();
        }
    }
}

/// On a simulated disk, because a thousand lives are some ten thousand syncs; 100 on a real one.
#[test]
fn a_thousand_lives_of_one_put_each_stay_small() {
    let _no_child = BEGINS.lock().unwrap_or_else(PoisonError::into_inner);
    let sim = Sim::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d");
    let one_life = |n: u64, open: &dyn Fn() -> Db| {
        let db = open();
        let ks = rows(&db);
        assert_eq!(
            ks.get(b"a").unwrap().map(Value::into_vec),
            n.checked_sub(1).map(|n| n.to_le_bytes().to_vec())
        );
        ks.put(token(n + 1), b"a", &n.to_le_bytes()).unwrap();
        if n.is_multiple_of(2) {
            drop(ks);
            db.close().unwrap();
        }
    };
    for n in 0..100 {
        one_life(n, &|| Db::open(&path).unwrap());
    }
    let lens = fs::read_dir(&path).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
    assert!(lens.sum::<u64>() < 16 << 20);
    for n in 0..1000 {
        one_life(n, &|| {
            let options = Options::new().storage(sim.disk.clone()).deterministic(n + 1);
            options.without_threads().open("sim").unwrap()
        });
    }
    let lens = sim.disk.file_names().into_iter().map(|name| sim.disk.read_file(&name).unwrap().len());
    let bytes: usize = lens.sum();
    assert!(bytes < 16 << 20, "{bytes} bytes");
    assert!(sim.open().stats().disk_bytes < 16 << 20);
}

/// Both ways of reading give the same answers, whatever the sizes and whichever segment is asked.
#[test]
fn positioned_reads_and_maps_give_the_same_answers() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = db.keyspace("p", external().scope(Scope::Prefix(b'/'))).unwrap();
    for n in 0..200usize {
        let key = [&[b'a' + (n % 7) as u8, b'/'][..], &vec![n as u8; 1 + n * 37 % 2000]].concat();
        ks.put_operation(
            token(1 + n as u64),
            OperationId::new(1 + n as u64),
            &key,
            &vec![n as u8; n * n % 9000],
        )
        .unwrap();
        if n % 6 == 0 {
            ks.delete(token(1 + n as u64), &key).unwrap();
        }
    }
    db.close().unwrap();
    let read = |mode| {
        let db = sim.options().read_mode(mode).read_only().open("sim").unwrap();
        let ks = db.keyspace("p", external().scope(Scope::Prefix(b'/'))).unwrap();
        let all: Vec<(Vec<u8>, Value)> = ks.iter().map(Result::unwrap).collect();
        for (key, value) in &all {
            assert_eq!(ks.get(key).unwrap().as_ref(), Some(value));
            assert_eq!(ks.get_with(key, <[u8]>::to_vec).unwrap().as_deref(), Some(value.bytes()));
            assert!(ks.contains_key(key).unwrap());
        }
        let back: Vec<_> = ks.prefix(b"c/").rev().map(Result::unwrap).collect();
        let marks: Vec<_> = (b'a'..b'i').map(|first| ks.mark(&[first, b'/']).unwrap()).collect();
        (all, back, marks)
    };
    let (mapped, pread) = (read(ReadMode::Map), read(ReadMode::Pread));
    assert!(mapped.0.len() > 100);
    assert!(mapped == pread);
}
