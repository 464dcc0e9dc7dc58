//! An index file changes how long an open takes, and nothing else: with it, without it, or with a damaged one
//! the store is the same.
//!
//! Power cuts at every call that writes one are in `tests/crash.rs`, flipped bits of all files in
//! `tests/damage.rs`.

mod support;

use std::io::ErrorKind;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use support::driver::{Driver, History};
use support::shown::{Shown, is_index, keyspaces, options_of_sim, shown, without_index};
use support::{Rng, Trying};
use tidewall::storage::{CallKind, Crash, Fault, SimDisk};
use tidewall::{
    Db, FaultKind, Keyspace, KeyspaceOptions, ManualClock, Options, OwnerId, Scope, Token, Tokens, Verify,
};

/// Its second bit is clear: index files are written.
const SEED: u64 = 1 << 20;

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn index_of(disk: &SimDisk) -> Option<String> {
    let names: Vec<_> = disk.file_names().into_iter().filter(|name| is_index(name)).collect();
    assert!(names.len() <= 1, "one index file is enough: {names:?}");
    names.into_iter().next()
}

fn open(disk: &SimDisk, seed: u64) -> Db {
    let options = options_of_sim(disk, &ManualClock::new(), seed).lease_grace(Duration::from_secs(5));
    options.open("sim").expect("the store opens")
}

/// All that can be asked of a store without changing it, then who gets what lease.
#[derive(PartialEq, Debug)]
struct Everything {
    shown: Vec<Shown>,
    rest: Vec<String>,
}

fn everything(db: &Db) -> Everything {
    let stats = db.stats();
    let mut rest = vec![format!(
        "lsn {} keys {} live {} garbage {} leases {} segments {}",
        db.last_lsn(),
        stats.keys,
        stats.live_bytes,
        stats.garbage_bytes,
        stats.leases,
        stats.segments
    )];
    let shown = shown(db).unwrap();
    for space in keyspaces(db) {
        rest.push(format!("{} {:?} {:?}", space.name(), space.floor(), space.holders(b"").unwrap()));
    }
    for space in keyspaces(db) {
        for key in [&b"a"[..], b"a/1", b"b/2", b"other"] {
            rest.push(format!("{:?}", space.put(token(1), key, b"late")));
            let lease = space.lease(key).owner(OwnerId::new(999)).try_acquire();
            rest.push(format!("{:?}", lease.map(|lease| lease.token())));
        }
    }
    Everything { shown, rest }
}

fn same_as_a_scan(image: &SimDisk, seed: u64) -> Db {
    let db = open(&image.kill(), seed);
    let scanned = open(&without_index(image), seed);
    assert_eq!(everything(&db), everything(&scanned));
    db
}

/// Lives of all kinds of calls, cut off or closed again and again.
#[test]
fn an_index_file_and_a_scan_give_the_same_state() {
    let (mut used, mut spared) = (0, 0);
    for seed in 1..=60u64 {
        let mut rng = Rng(seed);
        let mut disk = SimDisk::new();
        let mut history = History::new();
        for life in 0..4u64 {
            let _trying = Trying(move || format!("seed {seed}, life {life}"));
            let mut driver = Driver::open(&disk, &history, seed << 20 | life << 8).expect("it opens");
            driver.run(50);
            let db = driver.db.clone();
            let is_closed = rng.chance(40);
            if is_closed {
                db.close().unwrap();
            }
            history = driver.into_history();
            // Leases of before an open are over for the driver.
            history.held.clear();
            disk =
                if is_closed { disk.kill() } else { disk.crash(Crash::Subset { percent: 50 }, rng.next()) };
            let db = same_as_a_scan(&disk, seed << 20 | life << 8 | 16);
            let scanned = open(&without_index(&disk), seed << 20 | 1 << 16);
            // One that was removed may be back after the crash.
            if disk.file_names().iter().any(|name| is_index(name)) {
                assert!(db.report().warnings.is_empty(), "{:?}", db.report().warnings);
                assert_eq!(scanned.report().warnings.len(), 1, "{:?}", scanned.report().warnings);
                used += 1;
                spared += scanned.report().ops - db.report().ops;
            }
        }
    }
    println!("{used} index files spared the replay of {spared} ops");
    assert!(used > 100 && spared > 5000, "{used} index files spared {spared} ops");
}

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

fn jobs(db: &Db) -> Keyspace {
    db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap()
}

/// A few segments of keys, some deleted; marks, a lease, a floor.
fn fill(db: &Db) {
    let (rows, jobs) = (rows(db), jobs(db));
    for n in 0..60u32 {
        rows.put(token(1 + u64::from(n) % 3), &n.to_be_bytes(), &[7; 700]).unwrap();
    }
    for n in (0..60u32).step_by(7) {
        rows.delete(token(9), &n.to_be_bytes()).unwrap();
    }
    let lease = jobs.lease(b"7/").owner(OwnerId::new(5)).acquire().unwrap();
    jobs.put(lease.token(), b"7/a", b"draft").unwrap();
    std::mem::forget(lease);
    jobs.raise_all(jobs.lease(b"8/").acquire().unwrap().token()).unwrap();
}

/// What the two keyspaces hold: keys with their values' lengths, marks, holders.
fn held(db: &Db) -> Vec<String> {
    let (rows, jobs) = (rows(db), jobs(db));
    let mut all = vec![format!("{:?} {:?} {}", jobs.floor(), jobs.holders(b"").unwrap(), db.stats().keys)];
    for space in [&rows, &jobs] {
        all.extend(space.iter().map(|item| format!("{:?}", item.unwrap())));
    }
    all.extend((0..60u32).map(|n| format!("{:?}", rows.mark(&n.to_be_bytes()).unwrap())));
    all.push(format!("{:?}", jobs.mark(b"7/").unwrap()));
    all
}

fn closed() -> SimDisk {
    let disk = SimDisk::new();
    let db = open(&disk, SEED);
    fill(&db);
    db.close().unwrap();
    disk.kill()
}

#[test]
fn a_damaged_index_file_costs_a_warning_and_nothing_else() {
    let disk = closed();
    let name = index_of(&disk).expect("a close writes one");
    let want = held(&open(&without_index(&disk), SEED));
    assert_eq!(held(&open(&disk.kill(), SEED)), want);
    let bytes = disk.read_file(&name).unwrap();
    let check = |damaged: SimDisk, what: String| {
        let read_only = Options::new().storage(damaged.kill()).read_only().open("sim").unwrap();
        let db = open(&damaged, SEED);
        for db in [&read_only, &db] {
            let warnings = &db.report().warnings;
            assert!(warnings.len() == 1 && warnings[0].starts_with(&name), "{what}: {warnings:?}");
            assert!(db.report().ops > 60, "{what}: {} ops", db.report().ops);
        }
        assert_eq!(held(&db), want, "{what}");
        assert_eq!(index_of(&damaged), None, "{what}: it is of no use any more");
    };
    for at in 0..bytes.len() {
        let damaged = disk.kill();
        damaged.flip_bit(&name, at as u64, (at % 8) as u8);
        check(damaged, format!("bit {} of byte {at} of {} flipped", at % 8, bytes.len()));
    }
    for len in (0..bytes.len()).step_by(13) {
        let damaged = disk.kill();
        damaged.truncate(&name, len as u64);
        check(damaged, format!("cut to {len} of {} bytes", bytes.len()));
    }
    check(without_index(&disk), "missing".to_owned());
}

#[test]
fn an_index_file_of_another_place_or_store_is_not_believed() {
    let disk = SimDisk::new();
    let db = open(&disk, SEED);
    fill(&db);
    db.close().unwrap();
    let early = disk.kill();
    let db = open(&disk, SEED + 8);
    rows(&db).put(token(9), b"new", b"value").unwrap();
    rows(&db).delete(token(9), &1u32.to_be_bytes()).unwrap();
    db.close().unwrap();
    let name = index_of(&disk).unwrap();
    let want = held(&open(&without_index(&disk), SEED));
    let old = early.read_file(&index_of(&early).unwrap()).unwrap();

    // The same history in another store, whose places are the same but for its id.
    let other = SimDisk::new();
    for seed in [2, 3] {
        let db = open(&other, seed << 20);
        if seed == 2 {
            fill(&db);
        } else {
            rows(&db).put(token(9), b"new", b"value").unwrap();
            rows(&db).delete(token(9), &1u32.to_be_bytes()).unwrap();
        }
        db.close().unwrap();
    }
    assert_eq!(index_of(&other).as_ref(), Some(&name));
    let others = other.read_file(&name).unwrap();
    for (bytes, what) in [(old, "an older one"), (others, "another store's"), (Vec::new(), "nothing")] {
        let damaged = disk.kill();
        damaged.write_file(&name, &bytes);
        let db = open(&damaged, SEED);
        assert_eq!((db.report().warnings.len(), held(&db)), (1, want.clone()), "{what}");
    }

    // Segments as they were before, under a list and an index that know more: nothing hides that.
    let mixed = early.kill();
    for file in ["STORE", &name] {
        mixed.write_file(file, &disk.read_file(file).unwrap());
    }
    let opened = options_of_sim(&mixed, &ManualClock::new(), SEED).open("sim");
    assert!(opened.is_err(), "an older log under a newer list: {opened:?}");

    // All of an older copy, beside an index file that only a newer one names: it is nobody's, and goes.
    let older = early.kill();
    older.write_file(&name, &disk.read_file(&name).unwrap());
    let before = held(&open(&without_index(&early), SEED));
    let db = open(&older, SEED);
    assert_eq!((db.report().warnings.len(), held(&db)), (0, before));
    assert_eq!(index_of(&older), index_of(&early));
}

#[test]
fn a_clean_open_and_close_leave_the_files_as_they_were() {
    let disk = closed();
    let files = |disk: &SimDisk| {
        let names = disk.file_names().into_iter().filter(|name| name != "STORE");
        names.map(|name| (disk.read_file(&name).unwrap(), name)).collect::<Vec<_>>()
    };
    let before = files(&disk);
    for life in 1..4 {
        let db = open(&disk, SEED + 16 * life);
        assert_eq!(db.report().ops, 0);
        assert_eq!(rows(&db).get(&1u32.to_be_bytes()).unwrap().map(|value| value.len()), Some(700));
        db.close().unwrap();
        assert!(files(&disk) == before, "life {life}");
    }
}

#[test]
fn whatever_fails_while_one_is_written_is_nobodys_error() {
    let disk = SimDisk::new();
    let db = open(&disk, SEED);
    fill(&db);
    let name = {
        let closed = disk.kill();
        open(&closed, SEED + 8).close().unwrap();
        index_of(&closed).expect("a close writes one")
    };
    // As it is now, without a close.
    let disk = disk.kill();
    drop(db);
    for kind in [CallKind::Open, CallKind::WriteAt, CallKind::SyncData] {
        for error in [ErrorKind::StorageFull, ErrorKind::Other] {
            let full = disk.kill();
            let db = open(&full, SEED + 8);
            full.fail(Fault::new(kind, error).on(&name).forever());
            db.close().unwrap_or_else(|e| panic!("{kind:?} {error:?}: {e}"));
            assert!(full.faults_fired() > 0, "{kind:?} {error:?}");
            full.clear_faults();
            assert_eq!(index_of(&full).filter(|left| *left == name), None, "{kind:?} {error:?}");
            let want = held(&open(&without_index(&disk), SEED));
            // But for the leases: those were of the run before that.
            assert_eq!(held(&open(&full, SEED + 16))[1..], want[1..], "{kind:?} {error:?}");
        }
    }
}

/// Segments of the index file's time are gone: what was in them lies behind it, or is needed no more.
#[test]
fn what_compaction_moved_since_is_found_where_it_is() {
    for removes in [false, true] {
        let disk = SimDisk::new();
        let db = open(&disk, SEED);
        fill(&db);
        // Whole segments of what nobody touches any more: these stay.
        for n in 0..60u32 {
            rows(&db).put(token(1), &(1000 + n).to_be_bytes(), &[8; 700]).unwrap();
        }
        db.close().unwrap();
        let index = index_of(&disk);
        // No further index file.
        let db =
            options_of_sim(&disk, &ManualClock::new(), SEED + 16).index_every(u64::MAX).open("sim").unwrap();
        let rows = rows(&db);
        for n in 30..60u32 {
            if removes {
                rows.delete(token(10), &n.to_be_bytes()).unwrap();
            } else {
                rows.put(token(10), &n.to_be_bytes(), b"short").unwrap();
            }
        }
        let retired = db.compact().unwrap().segments;
        assert!(retired >= 1, "{retired} segments retired");
        let want = held(&db);
        let image = disk.kill();
        assert_eq!(index_of(&image), index);
        let counts = |db: &Db| (db.stats().keys, db.stats().live_bytes, db.stats().garbage_bytes);
        let (again, scanned) = (open(&image.kill(), SEED + 32), open(&without_index(&image), SEED + 32));
        assert_eq!(held(&again), held(&scanned));
        assert_eq!(counts(&again), counts(&scanned));
        assert!(again.report().ops < scanned.report().ops);
        let again = open(&image, SEED + 32);
        assert!(again.report().warnings.is_empty(), "{:?}", again.report().warnings);
        let but_holders = |held: Vec<String>| held[1..].to_vec();
        assert_eq!(but_holders(held(&again)), but_holders(want));
    }
}

#[test]
fn copies_do_without() {
    let disk = closed();
    let db = open(&disk, SEED + 16);
    let want = held(&db);
    let copy = SimDisk::new();
    db.checkpoint_into(copy.clone()).unwrap();
    assert_eq!(index_of(&copy), None);
    let read = Options::new().storage(copy.clone()).read_only().open("sim").unwrap();
    assert!(read.report().warnings.is_empty(), "{:?}", read.report().warnings);
    assert_eq!(held(&read)[1..], want[1..]);
}

#[test]
fn what_is_found_beside_it_is_removed_if_it_is_ours() {
    let disk = closed();
    let name = index_of(&disk).unwrap();
    let bytes = disk.read_file(&name).unwrap();
    disk.write_file("INDEX-7", &bytes);
    disk.write_file("INDEX-8", &[0; 700]);
    disk.write_file("INDEX-9", b"a note of somebody");
    disk.write_file("INDEX-old", &bytes);
    drop(open(&disk, SEED));
    let mut left: Vec<_> = disk.file_names().into_iter().filter(|name| is_index(name)).collect();
    left.sort();
    let mut want = vec!["INDEX-9".to_owned(), "INDEX-old".to_owned(), name];
    want.sort();
    assert_eq!(left, want);
}

#[test]
fn verify_looks_at_every_byte_of_it() {
    let disk = closed();
    let name = index_of(&disk).unwrap();
    assert!(Verify::new().run_on(disk.kill()).unwrap().is_sound());
    let len = disk.read_file(&name).unwrap().len();
    for at in (0..len).step_by(101) {
        let damaged = disk.kill();
        damaged.flip_bit(&name, at as u64, 3);
        let report = Verify::new().run_on(damaged).unwrap();
        let kinds: Vec<_> = report.faults.iter().map(|fault| (fault.kind, fault.file.as_str())).collect();
        assert_eq!(kinds, [(FaultKind::Index, name.as_str())], "byte {at}");
        assert!(report.opens(), "byte {at}");
    }
    let report = Verify::new().run_on(without_index(&disk)).unwrap();
    assert_eq!(report.faults.len(), 1);
    assert!(report.opens());
}

/// Nobody sorts the keys before the first scan: writers go on meanwhile, and nothing is missed.
#[test]
fn keys_are_put_in_order_while_others_write() {
    const KEYS: u32 = 6000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let db = Db::open(&path).unwrap();
    let space = rows(&db);
    for n in 0..KEYS {
        drop(space.submit_put(token(1), &n.to_be_bytes(), b"v").unwrap());
    }
    db.close().unwrap();
    for round in 0..5u32 {
        let db = Db::open(&path).unwrap();
        assert_eq!(db.report().ops, 0, "the index file covers all");
        let space = rows(&db);
        let before: Vec<u32> = if round == 0 { (0..KEYS).collect() } else { Vec::new() };
        let snapshot = db.snapshot();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for n in 0..400u32 {
                    let n = n * 7 % KEYS;
                    space.delete(token(1), &n.to_be_bytes()).unwrap();
                    space.put(token(1), &(KEYS + n).to_be_bytes(), b"w").unwrap();
                    space.put(token(1), &n.to_be_bytes(), b"x").unwrap();
                    if n.is_multiple_of(2) {
                        space.delete(token(1), &(KEYS + n).to_be_bytes()).unwrap();
                    }
                }
            });
            let seen: Vec<u32> = snapshot
                .iter(&space)
                .map(|item| u32::from_be_bytes(item.unwrap().0.try_into().unwrap()))
                .collect();
            if round == 0 {
                assert_eq!(seen, before);
            }
            writer.join().unwrap();
        });
        drop(snapshot);
        let odd = (0..400u32).map(|n| n * 7 % KEYS).filter(|n| n % 2 == 1).map(|n| KEYS + n);
        let mut want: Vec<u32> = (0..KEYS).chain(odd).collect();
        want.sort_unstable();
        let seen: Vec<u32> =
            space.iter().map(|item| u32::from_be_bytes(item.unwrap().0.try_into().unwrap())).collect();
        assert_eq!(seen, want, "round {round}");
        assert_eq!(db.stats().keys, want.len() as u64);
        // The next open is to find an index file that covers all: enough ops for a close to write one.
        for n in 0..5000u32 {
            drop(space.submit_put(token(1), &(n % KEYS).to_be_bytes(), b"v").unwrap());
        }
        db.close().unwrap();
    }
}

/// The store's own thread is told of every segment that is sealed, also once it sleeps without an end.
#[test]
fn an_index_file_is_written_while_the_store_is_open() {
    let disk = SimDisk::new();
    let db = Options::new()
        .storage(disk.clone())
        .segment_bytes(16 << 10)
        .compaction(false)
        .index_every(1)
        .open("sim")
        .unwrap();
    let space = rows(&db);
    let mut last = None;
    for round in 0..3u8 {
        for n in 0..25u8 {
            space.put(token(1), &[round, n], &[n; 900]).unwrap();
        }
        // The one before may still be there beside it.
        let newest = || disk.file_names().into_iter().filter(|name| is_index(name)).max();
        while newest() <= last {
            std::thread::yield_now();
        }
        last = newest();
    }
}

/// A disk on which the first who makes an index file waits until the other is done.
mod parked {
    use super::is_index;
    use std::io;
    use std::sync::{Arc, Barrier};
    use tidewall::storage::{Access, File, SimDisk, Storage};

    #[derive(Clone, Debug)]
    pub struct Parked {
        pub disk: SimDisk,
        /// Whoever is named so waits here twice.
        pub gate: Arc<Barrier>,
    }

    impl Storage for Parked {
        fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
            self.disk.lock(name)
        }

        fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
            if is_index(name) && access == Access::Create && std::thread::current().name() == Some("parked") {
                self.gate.wait();
                self.gate.wait();
            }
            self.disk.open(name, access)
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
            self.disk.describe()
        }
    }
}

/// In a store without threads two callers came to write one at the same time: the second found the name taken, by the
/// one that counted, and removed it.
#[test]
fn two_who_write_one_do_not_remove_it() {
    let disk = SimDisk::new();
    let gate = Arc::new(Barrier::new(2));
    let storage = parked::Parked { disk: disk.clone(), gate: gate.clone() };
    let options = options_of_sim(&disk, &ManualClock::new(), SEED).storage(storage);
    let db = options.open("sim").unwrap();
    let space = rows(&db);
    // As many as leave the spares that there are unused, so that no writer makes one.
    for n in 0..20u8 {
        space.put(token(1), &[n], &[n; 900]).unwrap();
    }
    let other = db.clone();
    let parked =
        std::thread::Builder::new().name("parked".to_owned()).spawn(move || other.compact().unwrap());
    gate.wait();
    db.compact().unwrap();
    gate.wait();
    parked.unwrap().join().unwrap();
    drop(space);
    db.close().unwrap();
    assert_eq!(open(&disk, SEED + 4).report().warnings, [""; 0]);
}
