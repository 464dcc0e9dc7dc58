//! Space comes back: on a full disk, in steady use, and from ids that were used once.

use crate::store::{Sim, secs, token};
use crate::{FILL, external, floor_of, key};
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use tidewall::storage::{CallKind, Fault, SimDisk};
use tidewall::{Db, Error, Options};

fn used(disk: &SimDisk) -> u64 {
    disk.file_names().iter().map(|name| disk.read_file(name).unwrap().len() as u64).sum()
}

/// Writes different keys until the disk is full; says how many there are.
fn fill(db: &Db, bytes: usize) -> u32 {
    let rows = external(db, "rows");
    for n in 0u32.. {
        match rows.put(token(1), &n.to_be_bytes(), &vec![n as u8; bytes]) {
            Ok(_) => {}
            Err(Error::NoSpace { .. }) => return n,
            Err(other) => panic!("a full disk was answered {other:?}"),
        }
    }
    unreachable!()
}

/// What must be possible on a full disk: delete, compact, write again, as often as one likes.
fn make_room(db: &Db, count: u32, bytes: usize) {
    let rows = external(db, "rows");
    assert_eq!(rows.iter().count() as u32, count);
    for n in (0..count).filter(|n| n % 2 == 0) {
        rows.delete(token(1), &n.to_be_bytes()).expect("deletes need no space of their own");
    }
    let compacted = db.compact().expect("compaction gives back more than it takes");
    assert!(compacted.segments > 0, "{compacted:?}");
    for n in 0..count / 4 {
        rows.put(token(2), &n.to_be_bytes(), &vec![9; bytes]).expect("there is room again");
    }
    for n in 0..count {
        let value = rows.get(&n.to_be_bytes()).unwrap();
        match (n < count / 4, n % 2) {
            (true, _) => assert_eq!(value.unwrap().bytes(), vec![9; bytes]),
            (false, 0) => assert_eq!(value, None),
            (false, _) => assert_eq!(value.unwrap().bytes(), vec![n as u8; bytes]),
        }
    }
}

#[test]
fn deletes_and_compaction_free_a_full_simulated_disk() {
    for restarted in [false, true] {
        let sim = Sim::new();
        let mut db = sim.open();
        sim.disk.set_budget(Some(used(&sim.disk) + 40 * (16 << 10)));
        let count = fill(&db, 900);
        if restarted {
            db = sim.reopen(db);
            external(&db, "rows").get(b"x").unwrap();
        }
        make_room(&db, count, 900);
        let count = count_of(&db);
        let more = fill_behind(&db, count);
        assert!(more > 0, "what was freed can be used");
        let db = sim.reopen(db);
        assert_eq!(count_of(&db), count + more);
    }
}

fn count_of(db: &Db) -> u32 {
    external(db, "rows").iter().count() as u32
}

fn fill_behind(db: &Db, _: u32) -> u32 {
    let rows = external(db, "rows");
    for n in 0..u32::MAX {
        match rows.put(token(3), format!("more {n}").as_bytes(), &FILL) {
            Ok(_) => {}
            Err(Error::NoSpace { .. }) => return n,
            Err(other) => panic!("a full disk was answered {other:?}"),
        }
    }
    unreachable!()
}

/// A write on a full disk finds its room by itself where there is anything to give back.
#[test]
fn a_write_on_a_full_disk_gives_back_what_is_dead() {
    let sim = Sim::new();
    let db = sim.open();
    sim.disk.set_budget(Some(used(&sim.disk) + 30 * (16 << 10)));
    let count = fill(&db, 900);
    let rows = external(&db, "rows");
    for n in 0..count / 5 {
        rows.delete(token(1), &n.to_be_bytes()).unwrap();
    }
    for n in 0..count / 10 {
        rows.put(token(1), format!("new {n}").as_bytes(), &FILL)
            .unwrap_or_else(|error| panic!("{n}: {error}"));
    }
}

/// What is carried at once fits a spare: on a full disk there will be no larger one.
#[test]
fn what_is_carried_on_a_full_disk_fits_its_spares() {
    for every in 2..6 {
        let sim = Sim::new();
        let db = sim.open();
        sim.disk.set_budget(Some(used(&sim.disk) + 40 * (16 << 10)));
        let count = fill(&db, FILL.len());
        let rows = external(&db, "rows");
        for n in (0..count).step_by(every) {
            rows.delete(token(1), &n.to_be_bytes()).unwrap();
        }
        let compacted = db.compact().unwrap();
        assert!(compacted.segments as usize > 30 / every, "one of {every}: {compacted:?}");
    }
}

/// What a full disk gives back for a value larger than every segment so far is not kept as spares too small for it.
#[test]
fn a_write_larger_than_every_segment_finds_room_on_a_full_disk() {
    let sim = Sim::new();
    let options = Options::new().storage(sim.disk.clone()).without_threads().deterministic(1);
    let db = options.open("sim").unwrap();
    sim.disk.set_budget(Some(20 << 20));
    let rows = external(&db, "rows");
    // Garbage, all but one value, and less of it than a store without need may have.
    for n in 0..160u8 {
        rows.put(token(1), b"key", &[n; 100 << 10]).unwrap();
    }
    assert_eq!(db.stats().retired_segments, 0);
    rows.put(token(1), b"large", &[9; 9 << 20]).expect("there is room for it, once the rest is given back");
    assert!(db.stats().retired_segments > 8);
    assert_eq!(rows.get(b"key").unwrap().unwrap().bytes(), [159; 100 << 10]);
    assert_eq!(rows.get(b"large").unwrap().unwrap().len(), 9 << 20);
}

/// In steady use the files of a round are used again, instead of being removed and made of zeros anew; and together
/// with the garbage they take no more than garbage may.
#[test]
fn in_steady_use_files_are_used_again() {
    const MOST_GARBAGE: u64 = 32 << 20;
    let sim = Sim::new();
    let options = Options::new().storage(sim.disk.clone()).without_threads().deterministic(1);
    let db = options.open("sim").unwrap();
    let rows = external(&db, "rows");
    let write = |count: u32| {
        let mut most = 0;
        for n in 0..count {
            rows.put(token(1), &(n.wrapping_mul(2_654_435_761) % 64).to_be_bytes(), &[n as u8; 60_000])
                .unwrap();
            most = most.max(db.stats().disk_bytes);
        }
        most
    };
    let most = write(1_500);
    let before = db.stats();
    let most = most.max(write(1_500));
    let now = db.stats();
    let extra =
        (now.disk_written_bytes - before.disk_written_bytes) - (now.written_bytes - before.written_bytes);
    println!("{most} bytes at most; {extra} written beside the log; {} retired", now.retired_segments);
    assert!(now.retired_segments > 60, "{now:?}");
    assert!(extra < 4 << 20, "{extra} bytes of zeros, headers and lists for 90 MB of log");
    assert!(
        most < now.live_bytes + MOST_GARBAGE + (9 << 20),
        "{most} bytes on disk, {} live",
        now.live_bytes
    );
    assert_eq!(used(&sim.disk) - sim.disk.read_file("STORE").unwrap().len() as u64, now.disk_bytes);
}

/// One of several files cannot be renamed: the others are used again, and what the store takes is counted right.
#[test]
fn a_rename_that_fails_costs_one_file() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db, "rows");
    let segments = |disk: &SimDisk| -> u64 {
        let names = disk.file_names().into_iter().filter(|name| name.ends_with(".seg"));
        names.map(|name| disk.read_file(&name).unwrap().len() as u64).sum()
    };
    for round in 0..60u8 {
        if round % 3 == 0 {
            sim.disk.fail(Fault::new(CallKind::Rename, ErrorKind::Other));
        }
        for n in 0..40u8 {
            rows.put(token(1), &[n], &[round; 900]).unwrap();
        }
        let stats = db.stats();
        assert_eq!(segments(&sim.disk), stats.disk_bytes, "{round}: {stats:?}");
    }
    assert!(db.stats().retired_segments > 60);
    let db = sim.reopen(db);
    assert_eq!(
        external(&db, "rows").iter().filter(|item| item.as_ref().unwrap().1.bytes() == [59; 900]).count(),
        40
    );
}

#[test]
fn overwriting_for_ever_stays_bounded() {
    for threads in [false, true] {
        let sim = Sim::new();
        let db = if threads { sim.open_threaded() } else { sim.open() };
        let rows = external(&db, "rows");
        let keys = if threads { 1_600 } else { 400u32 };
        let write = |round: u32| {
            for n in 0..keys {
                let n =
                    if round == 0 { n } else { (n.wrapping_mul(2_654_435_761).wrapping_add(round)) % keys };
                let commit = rows.submit_put(token(1), &n.to_be_bytes(), &[round as u8; 900]).unwrap();
                if n % 50 == 0 {
                    commit.wait().unwrap();
                }
            }
        };
        write(0);
        let (mut most, mut before) = (0, db.stats());
        for round in 1..30 {
            write(round);
            let now = db.stats();
            if round > 5 {
                most = most.max(now.disk_bytes * 100 / now.live_bytes);
            }
            if round == 5 {
                before = now;
            }
        }
        let now = db.stats();
        let carried = now.carried_bytes - before.carried_bytes;
        let written = now.written_bytes - before.written_bytes;
        let amplified = written * 100 / (written - carried);
        println!("at most {most} percent of the live bytes on disk, {amplified} percent written");
        // Small stores hold more: the spares are two segments, and the least garbage worth a round is four.
        assert!(most <= 250, "{most} percent of the live bytes on disk");
        assert!(amplified <= 260, "{amplified} percent written");
        assert!(now.retired_segments > 100, "{now:?}");
        assert_eq!(rows.iter().count() as u32, keys);
    }
}

/// After 10^7 ids a store of a few bytes took 1021 MiB: spares of the size it had once.
#[test]
fn a_store_that_has_shrunk_takes_little_again() {
    let sim = Sim::new();
    let options = Options::new().storage(sim.disk.clone()).without_threads().deterministic(1);
    let db = options.open("sim").unwrap();
    let rows = external(&db, "rows");
    for n in 0..10_000u32 {
        rows.submit_put(token(1), &n.to_be_bytes(), &[7; 20 << 10]).map(drop).unwrap();
    }
    for n in 0..10_000u32 {
        rows.submit_delete(token(1), &n.to_be_bytes()).map(drop).unwrap();
    }
    let large = db.stats();
    assert!(large.disk_bytes > 200 << 20, "{large:?}");
    db.compact().unwrap();
    let small = db.stats();
    println!("{} bytes on disk, then {}; {} spares", large.disk_bytes, small.disk_bytes, small.spares);
    assert!(small.disk_bytes <= 16 << 20 && (2..=3).contains(&small.spares), "{small:?}");
    rows.put(token(1), b"key", &[7; 3 << 20]).expect("larger than a spare");
    drop(rows);
    db.close().unwrap();
}

/// Job ids that are used once and never again leave nothing: not in the index, not on the disk, not in the time of
/// the next open. A leader in another keyspace has token 1 all the while, and is never fenced.
#[test]
fn ids_used_once_cost_nothing_when_they_are_gone() {
    const IDS: u32 = 100_000;
    let sim = Sim::new();
    let db = sim.options().segment_bytes(1 << 20).open("sim").unwrap();
    let leader = key(&db, "leaders").lease(b"leader").ttl(secs(30)).acquire().unwrap();
    assert_eq!(leader.token().get(), 1);
    let jobs = key(&db, "jobs");
    let empty = db.stats();
    let mut most = 0;
    for n in 0..IDS {
        let name = format!("job-{n:08}");
        let lease = jobs.lease(name.as_bytes()).acquire().unwrap();
        jobs.put(lease.token(), name.as_bytes(), b"done").unwrap();
        jobs.delete(lease.token(), name.as_bytes()).unwrap();
        lease.release().unwrap();
        if n % 1_000 == 0 {
            leader.renew().unwrap();
            key(&db, "leaders").put(leader.token(), b"state", &n.to_be_bytes()).expect_err("another fence");
            key(&db, "leaders").put(leader.token(), b"leader", &n.to_be_bytes()).unwrap();
            sim.clock.advance(secs(5));
            most = most.max(db.stats().disk_bytes);
        }
    }
    for _ in 0..3 {
        db.compact().unwrap();
    }
    let stats = db.stats();
    println!(
        "{IDS} ids: {} bytes on disk at most, {} then; index {} bytes, {} when empty",
        most, stats.disk_bytes, stats.index_bytes, empty.index_bytes
    );
    assert!(stats.index_bytes <= empty.index_bytes + (256 << 10), "{stats:?}");
    // The active segment and the spares.
    assert!(stats.disk_bytes <= 8 << 20, "{stats:?}");
    assert_eq!((stats.keys, stats.live_bytes < 4_096), (1, true), "{stats:?}");
    assert!(floor_of(&jobs) > u64::from(IDS) - 1_000, "{:?}", jobs.floor());
    leader.renew().unwrap();
    key(&db, "leaders").put(leader.token(), b"leader", b"last").expect("it was never fenced");
    drop((leader, jobs));
    let db = sim.reopen(db);
    assert!(db.stats().index_bytes <= empty.index_bytes + (256 << 10));
    assert_err!(key(&db, "jobs").put(token(5), b"job-00000003", b"late"), Error::Fenced { .. });
}

/// A file system of 32 MB in a file, mounted through a loop device: a full disk as it really is. Needs to be root.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn new() -> Option<Tiny> {
        let dir = tempfile::tempdir().unwrap();
        let run = |program: &str, args: &[&str]| {
            let done = Command::new(program).args(args).current_dir(dir.path()).output();
            done.is_ok_and(|done| done.status.success())
        };
        std::fs::create_dir(dir.path().join("fs")).unwrap();
        let image = std::fs::File::create(dir.path().join("image")).unwrap();
        image.set_len(32 << 20).unwrap();
        let made = run("mkfs.ext4", &["-q", "-F", "-m", "0", "image"])
            && run("mount", &["-o", "loop", "image", "fs"]);
        made.then_some(Tiny(dir))
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("fs/store")
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        // Whoever failed in between may still have files open.
        drop(Command::new("umount").arg("-l").arg(self.0.path().join("fs")).status());
    }
}

fn open_real(path: &Path) -> Db {
    Options::new().segment_bytes(256 << 10).open(path).unwrap()
}

#[test]
fn deletes_and_compaction_free_a_full_file_system() {
    let Some(tiny) = Tiny::new() else {
        eprintln!("SKIPPED: no loop device can be mounted here, so a really full disk was not tried");
        return;
    };
    let db = open_real(&tiny.path());
    let count = fill(&db, 9_000);
    assert!(count > 1_000, "{count} values on 32 MB");
    make_room(&db, count, 9_000);
    let mut count = count_of(&db);
    count += fill_behind(&db, count);
    drop(db);
    // After a restart on the full disk as well.
    let db = open_real(&tiny.path());
    assert_eq!(count_of(&db), count);
    let rows = external(&db, "rows");
    let all: Vec<_> = rows.iter().map(|item| item.unwrap().0).collect();
    for key in all.iter().filter(|key| key.len() == 4) {
        rows.delete(token(2), key).unwrap();
    }
    assert!(db.compact().unwrap().segments > 0);
    for n in 0..500u32 {
        rows.put(token(4), &n.to_be_bytes(), &[1; 9_000]).expect("there is room again");
    }
    drop(rows);
    db.close().unwrap();
}

/// How many segments are given back by writes that leave no garbage.
fn given_back_at_rest(db: &Db) -> u64 {
    for _ in 0..4 {
        db.compact().unwrap();
    }
    let before = db.stats().retired_segments;
    let rows = external(db, "rest");
    for n in 0..200u32 {
        rows.put(token(1), &n.to_be_bytes(), &FILL).unwrap();
    }
    db.stats().retired_segments - before
}

/// What is carried and counts as garbage is carried again and again: a store at rest was rewritten for ever.
#[test]
fn what_is_carried_each_time_is_not_taken_for_garbage() {
    for restarted in [false, true] {
        let sim = Sim::new();
        let mut db = sim.open();
        for n in 0..4000 {
            external(&db, &format!("keyspace-{n:08}"));
        }
        let jobs = key(&db, "jobs");
        for n in 0..2000u32 {
            let name = format!("job-{n:08}").into_bytes();
            let lease = jobs.lease(&name).acquire().unwrap();
            jobs.put(lease.token(), &name, b"").unwrap();
            lease.release().unwrap();
        }
        drop(jobs);
        if restarted {
            db.compact().unwrap();
            db = sim.reopen(db);
        }
        let segments = given_back_at_rest(&db);
        assert!(segments < 4, "{segments} segments, {:?}", db.stats());
    }
}

/// A write on a full disk compacts as long as that gives something back. A segment with a few keyspaces in it, which
/// every round wrote anew, was given back each time.
#[test]
fn a_full_disk_with_many_keyspaces_is_full() {
    let sim = Sim::new();
    let db = sim.open();
    for n in 0..400 {
        external(&db, &format!("keyspace-{n:08}"));
    }
    sim.disk.set_budget(Some(used(&sim.disk) + 30 * (16 << 10)));
    assert!(fill(&db, 900) > 100);
}

/// On a full disk what a round needs is counted first. A segment that could not be read then ended each of them.
#[test]
fn a_damaged_segment_keeps_no_space_back_on_a_full_disk() {
    let sim = Sim::new();
    let db = sim.open();
    sim.disk.set_budget(Some(used(&sim.disk) + 30 * (16 << 10)));
    let count = fill(&db, 900);
    let rows = external(&db, "rows");
    for n in (0..count).filter(|n| n % 2 == 0) {
        rows.delete(token(1), &n.to_be_bytes()).unwrap();
    }
    drop(rows);
    db.close().unwrap();
    let value = [3; 900];
    let damaged = sim.disk.file_names().into_iter().any(|name| {
        let bytes = sim.disk.read_file(&name).unwrap();
        let at = bytes.windows(value.len()).position(|bytes| bytes == value);
        at.inspect(|&at| sim.disk.flip_bit(&name, at as u64 + 100, 0)).is_some()
    });
    assert!(damaged);
    let db = sim.open();
    let rows = external(&db, "rows");
    let mut failed = 0;
    for _ in 0..4 {
        failed += db.compact().is_err() as u32;
    }
    assert_eq!(failed, 1, "it is told once, and left alone from then on");
    for n in 0..count / 4 {
        rows.put(token(2), &(count + n).to_be_bytes(), &FILL).expect("there is room again");
    }
    assert_err!(rows.get(&3u32.to_be_bytes()), Error::Corrupt { .. });
}
