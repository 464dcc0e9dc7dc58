//! Every storage call of many small lives is the last one: what comes back is a prefix that holds all
//! that was acknowledged, and a store that goes on.
//!
//! `TIDEWALL_CRASH_SEEDS=n` runs n times as many seeds, `TIDEWALL_CRASH_SEED=n` begins at another one, and
//! `TIDEWALL_CRASH_TRACE=1` prints every call.

mod support;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use support::Trying;
use support::driver::{Driver, History};
use support::judge::{CRASHES, Judge, Tally, count};
use support::model::KEYS;
use support::shown::{is_index, open, shown};
use tidewall::storage::{CallKind, Crash, Fault, SimDisk, SyncFailure};
use tidewall::{Db, Error, Health, Keyspace, KeyspaceOptions, ManualClock, Token, Tokens};

const CALLS: u32 = 60;

/// Runs `test` for so many seeds, or for as many as the environment says, on all processors.
fn for_seeds(usual: u64, test: impl Fn(u64) + Sync) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("TIDEWALL_CRASH_SEED").unwrap_or(1);
    let count = number("TIDEWALL_CRASH_SEEDS").map_or(usual, |times| usual * times);
    let next = AtomicU64::new(first);
    let workers = thread::available_parallelism().map_or(2, |n| n.get());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                // One failure ends them all.
                let _all = Trying(|| {
                    next.store(u64::MAX / 2, Ordering::Relaxed);
                    "see above; TIDEWALL_CRASH_SEED begins at a seed".to_owned()
                });
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        break;
                    }
                    test(seed);
                }
            });
        }
    });
}

/// One life of a store on a new disk. `None`: it could not be opened.
fn live(seed: u64, prepare: impl FnOnce(&SimDisk)) -> (SimDisk, Option<Driver>) {
    let disk = SimDisk::new();
    if seed.is_multiple_of(3) {
        disk.early_write_back(seed);
    }
    prepare(&disk);
    let mut driver = Driver::open(&disk, &History::new(), seed << 20).ok();
    if let Some(driver) = &mut driver {
        driver.run(CALLS);
    }
    (disk, driver)
}

fn history_of(driver: Option<Driver>) -> History {
    driver.map_or_else(History::new, Driver::into_history)
}

fn segments(disk: &SimDisk) -> BTreeMap<String, Vec<u8>> {
    let names = disk.file_names().into_iter().filter(|name| name.ends_with(".seg"));
    names.map(|name| (name.clone(), disk.read_file(&name).unwrap())).collect()
}

#[test]
fn every_call_may_be_the_last() {
    let tally = Tally::default();
    let covered: Vec<AtomicU64> = CallKind::ALL.iter().map(|_| AtomicU64::new(0)).collect();
    for_seeds(8, |seed| {
        let mut judge = Judge::new(seed, &tally);
        let (disk, driver) = live(seed, |_| {});
        let _trying = Trying(|| format!("the life of seed {seed}, uncut"));
        let mut driver = driver.expect("a new store opens");
        driver.check();
        let calls = disk.calls();
        for (kind, covered) in CallKind::ALL.into_iter().zip(&covered) {
            covered.fetch_add(disk.calls_of(kind), Ordering::Relaxed);
        }
        judge.judge(&disk.kill(), &driver.into_history(), 3);
        for call in 0..calls {
            let _trying = Trying(move || format!("seed {seed}, power off at call {call}"));
            let (disk, driver) = live(seed, |disk| disk.stop_at(call));
            count(&tally.lives);
            assert!(disk.is_stopped());
            let history = history_of(driver);
            for (at, crash) in CRASHES.into_iter().enumerate() {
                let cut = seed << 32 | call << 8 | at as u64;
                let _trying = Trying(move || format!(" {crash:?} with seed {cut}"));
                judge.judge(&disk.crash(crash, cut), &history, 3);
            }
            let _trying = Trying(|| " killed".to_owned());
            judge.judge(&disk.kill(), &history, 3);
        }
    });
    tally.print("power cuts");
    let kinds = CallKind::ALL.iter().zip(&covered);
    let kinds: Vec<_> =
        kinds.map(|(kind, calls)| format!("{kind:?} {}", calls.load(Ordering::Relaxed))).collect();
    println!("calls that were the last one: {}", kinds.join(", "));
}

/// One life that ends with a close; the history is that of before it.
fn live_and_close(seed: u64, prepare: impl FnOnce(&SimDisk)) -> (SimDisk, History, tidewall::Result<()>) {
    let (disk, driver) = live(seed, |_| {});
    let driver = driver.expect("a new store opens");
    prepare(&disk);
    let closed = driver.db.clone().close();
    (disk, driver.into_history(), closed)
}

#[test]
fn every_call_of_a_close_may_be_the_last_or_fail() {
    let tally = Tally::default();
    let without = AtomicU64::new(0);
    for_seeds(12, |seed| {
        let (disk, history, closed) = live_and_close(seed, |_| {});
        closed.expect("it closes");
        assert!(disk.file_names().iter().any(|name| is_index(name)), "an index file is written");
        let mut judge = Judge::new(seed, &tally);
        judge.judge(&disk.kill(), &history, 1);
        let (before, driver) = live(seed, |_| {});
        let before = before.calls();
        drop(driver);
        for call in before..disk.calls() {
            let _trying = Trying(move || format!("seed {seed}, power off at call {call}, in the close"));
            count(&tally.lives);
            let (disk, history, _) = live_and_close(seed, |disk| disk.stop_at(call));
            for (at, crash) in CRASHES.into_iter().enumerate() {
                let cut = seed << 32 | call << 8 | at as u64;
                judge.judge(&disk.crash(crash, cut), &history, 1);
            }
            for kind in [ErrorKind::StorageFull, ErrorKind::Other] {
                let _trying =
                    Trying(move || format!("seed {seed}, call {call} of the close fails: {kind:?}"));
                let fault = Fault::new(CallKind::Any, kind).nth(call - before).partial(700);
                let (disk, history, closed) = live_and_close(seed, |disk| disk.fail(fault));
                if closed.is_ok() && !disk.file_names().iter().any(|name| is_index(name)) {
                    count(&without);
                }
                judge.judge(&disk.crash(Crash::None, 0), &history, 1);
            }
        }
    });
    tally.print("closes");
    assert!(without.into_inner() > 0, "a close goes without an index file where none can be written");
}

/// Where only few sectors are un-synced, a power cut may leave any of their subsets: here all of them.
#[test]
fn every_subset_of_few_sectors_may_survive() {
    const FEW: usize = 6;
    let tally = Tally::default();
    for_seeds(3, |seed| {
        let mut judge = Judge::new(seed, &tally);
        let (disk, driver) = live(seed, |_| {});
        drop(driver);
        for call in 0..disk.calls() {
            let (disk, driver) = live(seed, |disk| disk.stop_at(call));
            count(&tally.lives);
            let history = history_of(driver);
            let sectors = disk.pending_sectors();
            if !(1..=FEW).contains(&sectors) {
                continue;
            }
            for kept in 0..1 << sectors {
                for rest in [false, true] {
                    let _trying = Trying(move || format!("seed {seed}, call {call}, kept {kept:b}, {rest}"));
                    let image = disk.crash_exact(kept, rest, rest);
                    judge.judge(&image, &history, 0);
                }
            }
        }
    });
    tally.print("subsets");
}

#[test]
fn a_failed_sync_acknowledges_nothing_and_reopening_heals() {
    let tally = Tally::default();
    for_seeds(6, |seed| {
        let mut judge = Judge::new(seed, &tally);
        let (disk, driver) = live(seed, |_| {});
        drop(driver);
        let syncs = disk.calls_of(CallKind::SyncData);
        for sync in 0..syncs {
            for failure in
                [SyncFailure::KeepNew, SyncFailure::RevertOld, SyncFailure::KeepPart { seed: sync }]
            {
                let _trying = Trying(move || format!("seed {seed}, sync {sync} fails with {failure:?}"));
                count(&tally.lives);
                let (disk, driver) = live(seed, |disk| {
                    disk.set_sync_failure(failure);
                    disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other).nth(sync));
                });
                let images = [disk.kill(), disk.crash(Crash::None, 0), disk.crash(CRASHES[2], sync)];
                let history = history_of(driver);
                for (at, image) in images.iter().enumerate() {
                    let _trying = Trying(move || format!(" image {at}"));
                    judge.judge(image, &history, 2);
                }
            }
        }
    });
    tally.print("failed syncs");
}

#[test]
fn any_call_may_fail_once() {
    let tally = Tally::default();
    let hit = AtomicU64::new(0);
    for_seeds(4, |seed| {
        let mut judge = Judge::new(seed, &tally);
        let (disk, driver) = live(seed, |_| {});
        drop(driver);
        let calls = disk.calls();
        let faults = [
            (ErrorKind::StorageFull, 0),
            (ErrorKind::Other, 0),
            (ErrorKind::Other, 700),
            (ErrorKind::StorageFull, 5000),
        ];
        for call in 0..calls {
            for (kind, partial) in faults {
                let _trying = Trying(move || {
                    format!("seed {seed}, call {call} fails with {kind:?} after {partial} bytes")
                });
                count(&tally.lives);
                let fault = Fault::new(CallKind::Any, kind).nth(call).partial(partial);
                let (disk, driver) = live(seed, |disk| disk.fail(fault));
                hit.fetch_add(disk.faults_fired(), Ordering::Relaxed);
                let images = [disk.kill(), disk.crash(Crash::None, 0), disk.crash(CRASHES[2], call)];
                let history = history_of(driver);
                for (n, image) in images.iter().enumerate() {
                    let _trying = Trying(move || format!(" image {n}"));
                    judge.judge(image, &history, 1);
                }
            }
        }
    });
    tally.print("failed calls");
    println!("faults that hit: {}", hit.into_inner());
}

#[test]
fn short_and_interrupted_transfers_change_nothing() {
    for_seeds(20, |seed| {
        let _trying = Trying(move || format!("seed {seed}"));
        let (plain, driver) = live(seed, |_| {});
        let expected = history_of(driver);
        let (disk, driver) = live(seed, |disk| {
            disk.short_transfers(seed);
            disk.interruptions(seed);
        });
        let history = history_of(driver);
        assert_eq!(history.durable, expected.durable);
        assert_eq!(history.at(history.durable).shown(), expected.at(expected.durable).shown());
        assert_eq!(disk.image_hash(), plain.image_hash());
    });
}

#[test]
fn one_seed_gives_one_life() {
    for_seeds(20, |seed| {
        let trace = |_| {
            let (disk, driver) = live(seed, |_| {});
            drop(driver);
            (disk.trace_hash(), disk.image_hash())
        };
        assert_eq!(trace(0), trace(1), "seed {seed}");
    });
}

#[test]
fn a_clean_close_leaves_nothing_to_repair() {
    for_seeds(40, |seed| {
        let _trying = Trying(move || format!("seed {seed}"));
        let (disk, driver) = live(seed, |_| {});
        let mut driver = driver.expect("a new store opens");
        let db = driver.db.clone();
        driver.check();
        db.close().expect("a healthy store closes");
        let history = driver.into_history();
        let before = segments(&disk);
        let image = disk.crash(Crash::None, seed);
        let again = open(&image, &ManualClock::new(), seed).expect("it opens");
        assert_eq!(again.report().cut_bytes, 0);
        assert!(again.report().warnings.is_empty(), "{:?}", again.report().warnings);
        assert!(again.last_lsn().get() >= history.durable);
        assert_eq!(shown(&again).unwrap(), history.at(again.last_lsn().get()).shown());
        drop(again);
        let after = segments(&image);
        for (name, bytes) in &before {
            let at = after.get(name).map(|now| bytes.iter().zip(now).position(|(a, b)| a != b));
            assert!(after.get(name) == Some(bytes), "{name} of {} bytes was changed at {at:?}", bytes.len());
        }
    });
}

/// A list longer than a sector can be torn in the middle; one of its two copies is always whole.
#[test]
fn a_list_of_many_segments_survives_every_cut() {
    const SEGMENTS: usize = 40;
    let disk = SimDisk::new();
    let space = rows(&open(&disk, &ManualClock::new(), 1).unwrap());
    for n in 0..SEGMENTS {
        space.put(token(2), KEYS[n % 7], &[n as u8; 11_000]).unwrap();
    }
    let base = disk.kill();
    let go_on = |disk: &SimDisk| -> Option<u64> {
        let db = open(disk, &ManualClock::new(), 2).ok()?;
        for n in 0..4 {
            rows(&db).put(token(3), b"c", &[n; 11_000]).ok()?;
        }
        Some(disk.calls())
    };
    let calls = go_on(&base.kill()).expect("nothing fails");
    let mut images = 0;
    for call in 0..calls {
        let disk = base.kill();
        disk.stop_at(call);
        assert_eq!(go_on(&disk), None);
        for seed in 0..4 {
            for crash in CRASHES {
                let image = disk.crash(crash, seed);
                let _trying = Trying(move || format!("power off at call {call}, {crash:?} with seed {seed}"));
                let db = open(&image, &ManualClock::new(), 3).expect("a crash must open by itself");
                assert_eq!(rows(&db).iter().count(), 7);
                images += 1;
            }
        }
    }
    println!("lists of {SEGMENTS} segments: {images} images recovered");
}

// A full disk.

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn used(disk: &SimDisk) -> u64 {
    disk.file_names().iter().map(|name| disk.read_file(name).unwrap().len() as u64).sum()
}

/// Writes more than a segment holds, so that the reserve is there.
fn begin(space: &Keyspace) {
    for n in 0..20 {
        space.put(token(2), KEYS[n % 7], &[n as u8; 900]).unwrap();
    }
}

/// Fills the store with what is needed until a put is refused; says how many puts were admitted.
fn fill(space: &Keyspace) -> u64 {
    for n in 0u64.. {
        match space.put(token(2), &n.to_be_bytes(), &[n as u8; 900]) {
            Ok(_) => {}
            Err(Error::NoSpace { .. }) => return n,
            Err(other) => panic!("a full disk was answered {other:?}"),
        }
    }
    unreachable!()
}

#[test]
fn a_full_disk_refuses_puts_and_nothing_else() {
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), 1).unwrap();
    let space = rows(&db);
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    begin(&space);
    disk.set_budget(Some(used(&disk)));
    let before = db.last_lsn();
    let admitted = fill(&space);
    assert_eq!(db.last_lsn().get(), before.get() + admitted);
    assert!(matches!(db.health(), Health::Degraded(_)), "it is full, and no more than that");

    // From the reserve: fences go on working, and space can be freed.
    assert!(matches!(space.put(token(1), b"a/1", b"late"), Err(Error::Fenced { .. })));
    space.get(b"a/1").unwrap().expect("reads go on");
    let lease = jobs.lease(b"job").acquire().expect("grants go on");
    jobs.raise(lease.token(), b"other").unwrap();
    space.delete(token(2), b"a/1").unwrap();
    space.raise(token(3), b"a/2").unwrap();
    space.raise_all(token(4)).unwrap();
    assert!(matches!(space.put(token(4), b"a/2", &[0; 900]), Err(Error::NoSpace { .. })));
    assert!(matches!(space.put(token(3), b"a/2", b"late"), Err(Error::Fenced { .. })));

    // It heals by itself once there is space.
    disk.set_budget(None);
    space.put(token(4), b"a/2", &[1; 900]).expect("space was freed");
    drop((lease, space, jobs));
    db.close().unwrap();
    let db = open(&disk.crash(Crash::None, 0), &ManualClock::new(), 2).unwrap();
    assert_eq!(rows(&db).get(b"a/2").unwrap().unwrap().bytes(), &[1; 900]);
    assert_eq!(rows(&db).get(b"a/1").unwrap().map(|value| value.into_vec()), None);
}

#[test]
fn a_store_opens_with_no_free_byte() {
    for clean in [true, false] {
        let disk = SimDisk::new();
        let db = open(&disk, &ManualClock::new(), 1).unwrap();
        let space = rows(&db);
        begin(&space);
        disk.set_budget(Some(used(&disk)));
        fill(&space);
        let image = if clean {
            drop(space);
            db.close().unwrap();
            disk.kill()
        } else {
            disk.crash(Crash::None, 0)
        };
        image.set_budget(Some(0));
        let db = open(&image, &ManualClock::new(), 2).expect("opening needs no space");
        let space = rows(&db);
        assert!(matches!(space.put(token(1), b"a/1", b"late"), Err(Error::Fenced { .. })));
        space.delete(token(2), b"a/2").expect("the reserve is still there");
        space.raise(token(5), b"a/1").unwrap();
        let read_only = image.kill();
        drop((space, db));
        read_only.set_read_only(true);
        tidewall::Options::new().storage(read_only).read_only().open("sim").expect("so does reading");
    }
}

// What an open makes of what a crash left.

/// A store in which a frame was written and not synced when its process was killed.
fn killed_before_a_sync() -> SimDisk {
    let disk = SimDisk::new();
    let space = rows(&open(&disk, &ManualClock::new(), 2).unwrap());
    space.put(token(2), b"a/1", &[1; 900]).unwrap();
    disk.stop_at(disk.calls() + 1);
    assert!(space.put(token(3), b"a/2", &[2; 3000]).is_err());
    let killed = disk.kill();
    assert!(killed.pending_sectors() > 4, "the frame is written");
    killed
}

/// The seal that a recovery writes proves the frames that it found: never the one without the others.
#[test]
fn the_seal_of_a_recovery_never_outlives_the_frames() {
    let base = killed_before_a_sync();
    let recovered = base.kill();
    open(&recovered, &ManualClock::new(), 3).expect("nothing fails");
    for call in 0..recovered.calls() {
        let disk = base.kill();
        disk.stop_at(call);
        assert!(open(&disk, &ManualClock::new(), 3).is_err());
        for (crash, seed) in CRASHES.into_iter().flat_map(|crash| (0..8).map(move |seed| (crash, seed))) {
            let image = disk.crash(crash, seed);
            let _trying = Trying(move || format!("power off at call {call}, {crash:?} with seed {seed}"));
            let db = open(&image, &ManualClock::new(), 6).expect("a crash must open by itself");
            assert_eq!(rows(&db).get(b"a/1").unwrap().unwrap().bytes(), &[1; 900]);
        }
    }
}

#[test]
fn a_torn_tail_is_told_and_cut_and_its_room_is_given_back() {
    const TORN: usize = 100;
    let disk = killed_before_a_sync();
    let mut bytes = disk.read_file("000001.seg").unwrap();
    let end = bytes.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    bytes[end + 8..end + 8 + TORN].fill(0xaa);
    disk.write_file("000001.seg", &bytes);
    let segment_bytes = || segments(&disk).values().map(|bytes| bytes.len() as u64).sum::<u64>();
    let before = segment_bytes();
    // Without index files, which count as well.
    for (seed, cut) in [(3, TORN as u64..=TORN as u64 + 8), (6, 0..=0)] {
        let db = open(&disk, &ManualClock::new(), seed).unwrap();
        assert!(cut.contains(&db.report().cut_bytes), "{:?}", db.report());
        assert!(segment_bytes() < before && segments(&disk)["000001.seg"].len() < end + 200);
        assert_eq!(db.stats().disk_bytes, segment_bytes());
    }
}

/// A file that was made and not yet listed when the process was killed, or struck out and not yet removed.
#[test]
fn what_the_list_does_not_name_is_removed() {
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), 2).unwrap();
    begin(&rows(&db));
    drop(db);
    let marked = segments(&disk).into_values().find(|bytes| bytes[4096..].iter().all(|&byte| byte == 0));
    let marked = marked.expect("there is a spare");
    assert!(marked[..4096].iter().any(|&byte| byte != 0), "it says whose it is");
    let whole = segments(&disk).len();
    disk.write_file("000077.seg", &vec![0; 16 << 10]);
    disk.write_file("000078.seg", &marked);
    open(&disk, &ManualClock::new(), 3).unwrap();
    assert_eq!(segments(&disk).len(), whole, "{:?}", disk.file_names());
}
