//! What is intact of a damaged store is kept, what is not is listed, and nothing that the damaged store may have
//! granted or admitted can happen again.

mod copies;
mod store;

use copies::{begin, check_made, contents, files, jobs, live, more, open_new, rows};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use store::{Sim, op, token};
use tidewall::storage::{Crash, SimDisk};
use tidewall::{
    Db, Error, FaultKind, KeyspaceOptions, OperationId, Salvage, Salvaged, Tokens, Verify, salvage,
};

const NEW: &str = "new";

type Contents = BTreeMap<(String, Vec<u8>), Vec<u8>>;

/// Salvages, checks that the source stayed and that what was made is sound, and opens it.
fn rescue(disk: &SimDisk) -> (Salvaged, Db) {
    let before = files(disk);
    let found = Verify::new().run_on(disk.clone()).unwrap();
    let made = Salvage::new().deterministic(5).run_on(disk.clone(), disk.dir(NEW)).unwrap();
    assert_eq!(files(disk), before, "the source stays");
    let places = |faults: &[tidewall::Fault]| -> BTreeSet<(String, u64)> {
        faults.iter().map(|fault| (fault.file.clone(), fault.offset)).collect()
    };
    // What `verify` finds between ops is no reason to leave one of them out.
    let unlisted: Vec<_> = found
        .faults
        .iter()
        .filter(|fault| {
            !matches!(fault.kind, FaultKind::Link | FaultKind::Mark | FaultKind::Op)
                && !places(&made.faults).contains(&(fault.file.clone(), fault.offset))
        })
        .collect();
    assert!(unlisted.is_empty(), "{unlisted:?}");
    let report = Verify::new().run_on(disk.dir(NEW)).unwrap();
    assert!(report.is_sound() && report.notes.is_empty(), "{report:?}");
    assert_eq!((report.counter, report.lsn), (made.counter, made.lsn));
    let db = open_new(&disk.dir(NEW), 6).unwrap();
    assert_eq!(contents(&db).len() as u64, made.keys);
    assert_eq!(db.keyspaces().len(), made.keyspaces as usize);
    (made, db)
}

fn segments(disk: &SimDisk) -> Vec<String> {
    let begun =
        |name: &String| name.ends_with(".seg") && disk.read_file(name).unwrap().starts_with(b"TIDEWALL");
    disk.file_names().into_iter().filter(begun).collect()
}

fn find(disk: &SimDisk, name: &str, needle: &[u8]) -> u64 {
    let bytes = disk.read_file(name).unwrap();
    bytes.windows(needle.len()).position(|window| window == needle).expect("it is there") as u64
}

/// A closed store, and what it shows.
fn closed() -> (SimDisk, Contents) {
    let (disk, db) = begin(1);
    let then = contents(&db);
    db.close().unwrap();
    (disk.crash(Crash::None, 0), then)
}

fn key(name: &str, key: &[u8]) -> (String, Vec<u8>) {
    (name.to_owned(), key.to_vec())
}

#[test]
fn of_an_intact_store_everything_is_kept() {
    let (closed, then) = closed();
    let (disk, db) = begin(1);
    db.checkpoint_into(disk.dir("copy")).unwrap();
    for disk in [closed, disk.crash(Crash::None, 0), disk.dir("copy")] {
        let (made, new) = rescue(&disk);
        assert!(made.faults.is_empty() && made.notes.is_empty(), "{made:?}");
        assert_eq!(contents(&new), then);
        check_made(&new, &made, 2, 2);
        new.close().unwrap();
        // It is a store like any other.
        let new = open_new(&disk.dir(NEW), 7).unwrap();
        more(&new);
        new.close().unwrap();
        assert!(Verify::new().run_on(disk.dir(NEW)).unwrap().is_sound());
    }
}

#[test]
fn a_damaged_version_gives_way_to_an_older_one_and_is_listed() {
    let (disk, db) = begin(1);
    let jobs = jobs(&db);
    let two = token(2);
    jobs.put(two, b"2/a", b"newer-of-a").unwrap();
    jobs.put(two, b"2/b", &[8; 2000]).unwrap();
    jobs.put(two, b"2/c", b"value-of-c").unwrap();
    jobs.delete(two, b"2/c").unwrap();
    jobs.put(two, b"2/c", b"newer-of-c").unwrap();
    db.close().unwrap();
    let disk = disk.crash(Crash::None, 0);
    for needle in [&b"newer-of-a"[..], &[8; 2000], b"newer-of-c"] {
        let name = segments(&disk)
            .into_iter()
            .find(|name| disk.read_file(name).unwrap().windows(needle.len()).any(|window| window == needle));
        let name = name.unwrap();
        let at = find(&disk, &name, needle);
        disk.flip_bit(&name, at + 1, 0);
    }
    let (made, new) = rescue(&disk);
    let kinds: Vec<_> = made.faults.iter().map(|fault| fault.kind).collect();
    assert_eq!(kinds, [FaultKind::Op, FaultKind::Value, FaultKind::Op], "{made:?}");
    assert!(made.faults[1].what.contains("2/b"), "{made:?}");
    let kept = contents(&new);
    assert_eq!(kept[&key("jobs", b"2/a")], b"two", "the one before");
    assert_eq!(kept.get(&key("jobs", b"2/b")), None, "there was none before");
    assert_eq!(kept.get(&key("jobs", b"2/c")), None, "before it was deleted");
    check_made(&new, &made, 2, 2);
}

#[test]
fn whole_frames_and_segments_may_be_gone() {
    let (disk, then) = closed();
    for damage in 0..6 {
        let disk = disk.kill();
        let names = segments(&disk);
        let len = disk.read_file(&names[1]).unwrap().len() as u64;
        match damage {
            0 => disk.flip_bit(&names[1], 4096 + 9, 1),
            1 => disk.remove_file(&names[1]),
            2 => disk.truncate(&names[1], 9000),
            3 => disk.flip_bit(&names[1], 20, 1),
            4 => disk.flip_bit(&names[1], len - 20, 1),
            _ => disk.write_file(&names[1], &vec![0xA5; len as usize]),
        }
        let (made, new) = rescue(&disk);
        assert!(!made.faults.is_empty(), "{damage}");
        let kept = contents(&new);
        assert!(
            kept.iter()
                .all(|(key, value)| then.get(key) == Some(value) || *key == self::key("jobs", b"1/\x03")),
            "{damage}"
        );
        let all = [3, 4].contains(&damage);
        assert!(if all { kept == then } else { kept.len() < then.len() && kept.len() > then.len() / 3 });
        if damage == 0 {
            assert!(kept.len() + 1 >= then.len(), "one frame is lost, and what is behind it is not");
        }
        check_made(&new, &made, 1, 2);
    }
}

/// Headers and seals carry the counter too: tokens whose grants cannot be read are not granted again.
#[test]
fn the_counter_is_read_where_no_grant_is() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = db.keyspace("keys", KeyspaceOptions::new()).unwrap();
    let tokens: Vec<_> = (0..20).map(|_| ks.lease(b"k").acquire().unwrap().token()).collect();
    // Behind the grants, so that all of them are within what is damaged.
    rows(&db).put(token(1), b"filler", &[0; 400]).unwrap();
    drop(ks);
    db.close().unwrap();
    let disk = &sim.disk;
    for name in segments(disk) {
        let len = disk.read_file(&name).unwrap().len();
        for offset in (4096..len - 300).step_by(24) {
            disk.flip_bit(&name, offset as u64, 1);
        }
    }
    let made = Salvage::new().bump(1).deterministic(5).run_on(disk.clone(), disk.dir(NEW)).unwrap();
    assert_eq!(made.keyspaces, 0, "nothing else was to be read");
    assert_eq!(made.counter.get(), tokens[19].get() + 1);
}

#[test]
fn without_store_what_proves_itself_is_kept() {
    let (disk, then) = closed();
    for damage in 0..2 {
        let disk = disk.kill();
        match damage {
            0 => disk.remove_file("STORE"),
            _ => [60, 16384 + 60].into_iter().for_each(|at| disk.flip_bit("STORE", at, 0)),
        }
        disk.write_file("000077.seg", &[0x11; 5000]);
        let (made, new) = rescue(&disk);
        assert_eq!(contents(&new), then);
        assert_eq!(made.faults[0].kind, FaultKind::Store);
        assert_eq!(made.faults.len(), 2, "{made:?}");
        check_made(&new, &made, 2, 2);
    }
    // A segment of another store is told from the store's own.
    let disk = disk.kill();
    let (other, _) = begin(2);
    let stranger = other.read_file("000001.seg").unwrap();
    disk.write_file("000078.seg", &stranger);
    disk.remove_file("STORE");
    let (made, new) = rescue(&disk);
    assert_eq!(contents(&new), then);
    assert!(made.faults.iter().any(|fault| fault.file == "000078.seg"), "{made:?}");
}

/// The creation of a keyspace is damaged: without its scope nobody knows which fence guards what.
#[test]
fn a_keyspace_that_cannot_be_read_is_lost_and_said_to_be() {
    let (disk, then) = closed();
    let name = &segments(&disk)[0];
    let at = find(&disk, name, b"jobs");
    disk.flip_bit(name, at, 0);
    let (made, new) = rescue(&disk);
    assert!(made.faults.iter().any(|fault| fault.what.contains("creation")), "{made:?}");
    let kept: Contents = then.into_iter().filter(|((name, _), _)| name == "rows").collect();
    assert_eq!(contents(&new), kept);
    assert_eq!((made.keyspaces, made.need_floor.clone()), (1, vec!["rows".to_owned()]));
    // Made anew, it starts behind everything that was granted.
    let lease = jobs(&new).lease(b"1/").acquire().unwrap();
    assert!(lease.token().get() > 1 << 32);
}

#[test]
fn marks_and_last_operations_of_external_keyspaces_are_kept() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = rows(&db);
    let spaces = KeyspaceOptions::new().tokens(Tokens::External).scope(tidewall::Scope::Prefix(b'/'));
    let spaces_of = |db: &Db| db.keyspace("spaces", spaces).unwrap();
    rows.put_operation(token(50), op(3), b"a", b"1").unwrap();
    rows.raise(token(60), b"a").unwrap();
    rows.put(token(70), b"b", b"2").unwrap();
    rows.delete(token(71), b"b").unwrap();
    spaces_of(&db).put_operation(token(40), op(8), b"x/1", b"3").unwrap();
    spaces_of(&db).put(token(40), b"x/2", b"4").unwrap();
    spaces_of(&db).raise_all(token(30)).unwrap();
    db.close().unwrap();
    let (made, new) = rescue(&sim.disk);
    assert!(made.faults.is_empty(), "{made:?}");
    assert_eq!(made.need_floor, ["rows", "spaces"]);
    let (rows, spaces) = (copies::rows(&new), spaces_of(&new));
    let marks = |new: &Db| {
        let (rows, spaces) = (copies::rows(new), spaces_of(new));
        let of = |mark: Option<tidewall::Mark>| mark.map(|mark| mark.get());
        [
            of(rows.mark(b"a").unwrap()),
            of(rows.mark(b"b").unwrap()),
            of(spaces.mark(b"x/").unwrap()),
            of(spaces.mark(b"y/").unwrap()),
        ]
    };
    assert_eq!(marks(&new), [Some(60), Some(71), Some(40), Some(30)]);
    assert_err!(spaces.raise_all(token(29)), Error::Fenced { .. });
    spaces.raise_all(token(30)).unwrap();
    rows.raise_all(token(50)).unwrap();
    assert_err!(rows.put(token(59), b"a", b"late"), Error::Fenced { .. });
    assert_err!(rows.put(token(70), b"b", b"late"), Error::Fenced { .. });
    assert_err!(spaces.put(token(39), b"x/3", b"late"), Error::Fenced { .. });
    assert_err!(spaces.put_operation(token(40), op(8), b"x/1", b"3"), Error::Duplicate { .. });
    let before = rows.put(token(50), b"a", b"late").unwrap_err();
    assert!(
        matches!(before, Error::Fenced { last_operation: tidewall::LastOperation::Committed(last), .. } if last == OperationId::new(3))
    );
    rows.put(token(60), b"a", b"go on").unwrap();
    new.close().unwrap();
    assert_eq!(marks(&open_new(&sim.disk.dir(NEW), 9).unwrap()), [Some(60), Some(71), Some(40), Some(30)]);
}

/// Behind a damaged op the others of its frame are found through the key table.
#[test]
fn of_a_batch_with_a_damaged_change_the_others_are_kept() {
    let (disk, db) = begin(1);
    let mut batch = db.batch();
    for key in [b"2/one", b"2/two", b"2/six"] {
        batch.put(&jobs(&db), token(2), key, b"of a batch").unwrap();
    }
    batch.commit().unwrap();
    let mut then = contents(&db);
    db.close().unwrap();
    let disk = disk.crash(Crash::None, 0);
    let name = segments(&disk).pop().unwrap();
    disk.flip_bit(&name, find(&disk, &name, b"2/one"), 0);
    let (made, new) = rescue(&disk);
    assert_eq!(made.faults.len(), 1, "{made:?}");
    then.remove(&key("jobs", b"2/one"));
    assert_eq!(contents(&new), then);
}

/// In the newest segment of a store that was killed, what later frames prove is damage, and what lies behind it
/// is kept.
#[test]
fn damage_in_the_newest_segment_is_told_from_its_end() {
    let (disk, db) = begin(1);
    for n in 0..4 {
        jobs(&db).put(token(2), &[b'2', b'/', n], b"new").unwrap();
    }
    let mut then = contents(&db);
    let disk = disk.crash(Crash::None, 0);
    let newest = segments(&disk).pop().unwrap();
    disk.flip_bit(&newest, find(&disk, &newest, b"2/\x01new"), 0);
    let (made, new) = rescue(&disk);
    assert_eq!(made.faults.len(), 1, "{made:?}");
    assert_eq!((made.faults[0].kind, &made.faults[0].file), (FaultKind::Op, &newest));
    then.remove(&key("jobs", b"2/\x01"));
    assert_eq!(contents(&new), then);
}

/// Of a torn tail nothing is kept that an open would not keep.
#[test]
fn nothing_behind_a_torn_tail_is_read() {
    let (disk, db) = begin(1);
    let then = contents(&db);
    for n in 0..8 {
        drop(rows(&db).submit_put(token(500), &[b'z', n], b"in flight").unwrap());
    }
    rows(&db).put(token(500), b"zz", b"the last one").unwrap();
    let disk = disk.crash(Crash::None, 0);
    let newest = segments(&disk).pop().unwrap();
    let torn = find(&disk, &newest, b"z\x03");
    disk.flip_bit(&newest, torn, 0);
    let opened = contents(&Sim::on(disk.kill()).options().deterministic(77).open("sim").unwrap());
    let (made, new) = rescue(&disk);
    assert!(made.faults.is_empty() && made.notes.len() == 1, "{made:?}");
    assert_eq!(contents(&new), opened);
    assert_eq!(contents(&new).len(), then.len() + 3);
}

/// Whatever is damaged: each key has a value that was once written to it, and no old token gets in.
#[test]
fn random_damage_never_brings_back_a_writer_or_makes_up_a_value() {
    let (disk, db) = begin(1);
    let mut written: BTreeMap<(String, Vec<u8>), BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut note = |db: &Db| {
        for (key, value) in contents(db) {
            written.entry(key).or_default().insert(value);
        }
    };
    note(&db);
    for round in 0..3u8 {
        for n in 0..30u8 {
            jobs(&db).put(token(1), &[b'1', b'/', n], &[round + 100; 400]).unwrap();
        }
        note(&db);
    }
    written.entry(key("jobs", b"1/\x03")).or_default().insert(vec![3; 900]);
    db.close().unwrap();
    let sound = disk.crash(Crash::None, 0);
    let names: Vec<_> = sound.file_names().into_iter().filter(|name| name != "LOCK").collect();
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    let (mut kept_all, mut kept_some) = (0, 0);
    for round in 0..150 {
        let disk = sound.kill();
        for _ in 0..1 + round % 6 {
            let name = &names[random(names.len() as u64) as usize];
            let len = disk.read_file(name).map_or(0, |bytes| bytes.len() as u64);
            match random(12) {
                0 if len > 0 => disk.truncate(name, random(len)),
                _ if len == 0 => {}
                1 => {
                    let mut bytes = disk.read_file(name).unwrap();
                    let at = random(len) as usize;
                    bytes[at..].iter_mut().take(3000).for_each(|byte| *byte = 0x5A);
                    disk.write_file(name, &bytes);
                }
                _ => disk.flip_bit(name, random(len), random(8) as u8),
            }
        }
        let made = match Salvage::new().deterministic(round).run_on(disk.clone(), disk.dir(NEW)) {
            Ok(made) => made,
            Err(error) => panic!("round {round}: {error}"),
        };
        assert!(Verify::new().run_on(disk.dir(NEW)).unwrap().is_sound());
        let new = open_new(&disk.dir(NEW), 6).unwrap();
        let kept = contents(&new);
        for (key, value) in &kept {
            assert!(written[key].contains(value), "round {round}: {key:?} was never {value:?}");
        }
        for old in 1..=2 {
            assert_err!(
                jobs(&new).put(token(old), b"1/x", b"late"),
                Error::Fenced { .. } | Error::UnknownToken { .. }
            );
        }
        assert!(jobs(&new).lease(b"1/").acquire().unwrap().token().get() > 1 << 32);
        assert_err!(rows(&new).put(token(1000), b"r", b"x"), Error::NeedsFloor { .. });
        assert!(made.counter.get() >= 1 << 32);
        match kept.len() == written.len() - 1 {
            true => kept_all += 1,
            false => kept_some += 1,
        }
    }
    assert!(kept_all > 10 && kept_some > 10, "{kept_all} {kept_some}");
}

#[test]
fn the_power_goes_during_a_salvage() {
    let (disk, then) = closed();
    let tried = disk.kill();
    let from = tried.calls();
    let made = Salvage::new().deterministic(5).run_on(tried.clone(), tried.dir(NEW)).unwrap();
    let calls = tried.calls() - from;
    let mut nothing = 0;
    for call in (0..=calls).step_by(3).chain([calls]) {
        let disk = disk.crash(Crash::None, 0);
        disk.stop_at(call);
        let done = Salvage::new().deterministic(5).run_on(disk.clone(), disk.dir(NEW)).is_ok();
        assert_eq!(done, call == calls);
        for crash in copies::CRASHES {
            let after = disk.crash(crash, call);
            match open_new(&after.dir(NEW), 8) {
                Ok(new) => {
                    assert_eq!(contents(&new), then);
                    check_made(&new, &made, 2, 2);
                }
                Err(_) => {
                    assert!(!done);
                    nothing += 1;
                }
            }
        }
    }
    assert!(nothing > 50, "{nothing}");
}

#[test]
fn bad_requests_are_refused_with_a_reason() {
    let (disk, db) = begin(1);
    let new = || disk.dir(NEW);
    assert_err!(Salvage::new().run_on(disk.clone(), new()), Error::Locked { .. });
    db.close().unwrap();
    assert_err!(Salvage::new().bump(0).run_on(disk.clone(), new()), Error::InvalidArgument(_));
    assert_err!(Salvage::new().bump(u64::MAX).run_on(disk.clone(), new()), Error::TokensExhausted);
    assert_err!(Salvage::new().run_on(disk.dir("nothing"), new()), Error::Io { .. });
    assert_err!(Salvage::new().run_on(disk.clone(), disk.clone()), Error::InvalidArgument(_));
    let small = SimDisk::new();
    small.set_budget(Some(60_000));
    assert_err!(Salvage::new().run_on(disk.clone(), small.clone()), Error::NoSpace { .. });
    assert!(small.file_names().iter().all(|name| name == "LOCK"));
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let far = Salvage::new().advance_tokens(token(1 << 50)).progress(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let made = far.run_on(disk.clone(), new()).unwrap();
    assert_eq!(made.counter.get(), (1 << 50) + (1 << 32));
    assert_eq!(calls.load(Ordering::Relaxed) as usize, 2 * segments(&disk).len());
}

#[test]
fn on_a_real_disk() {
    let scratch = tempfile::tempdir().unwrap();
    let [data, new, third] = ["data", "new", "third"].map(|name| scratch.path().join(name));
    let db = tidewall::Options::new().segment_bytes(16 << 10).open(&data).unwrap();
    live(&db);
    let then = contents(&db);
    db.close().unwrap();
    std::fs::remove_file(data.join("STORE")).unwrap();
    let made = salvage(&data, &new).unwrap();
    let db = Db::open(&new).unwrap();
    assert_eq!(contents(&db), then);
    check_made(&db, &made, 2, 2);
    drop(db);
    assert_err!(salvage(&data, &new), Error::InvalidArgument(_));
    assert_err!(salvage(scratch.path(), &third), Error::Io { .. });
    assert!(!third.exists());
}

/// The op that creates a keyspace may be all that there is of it.
#[test]
fn a_keyspace_in_which_nothing_was_written_is_kept() {
    let made: [(&str, KeyspaceOptions); 3] = [
        ("empty", KeyspaceOptions::new()),
        ("empty rows", KeyspaceOptions::new().tokens(Tokens::External)),
        ("empty jobs", KeyspaceOptions::new().scope(tidewall::Scope::Prefix(b'/'))),
    ];
    for (is_closed, has_list) in [(true, true), (false, true), (true, false), (false, false)] {
        let (disk, db) = begin(1);
        made.iter().for_each(|(name, options)| drop(db.keyspace(name, *options).unwrap()));
        let before = db.keyspaces();
        if is_closed {
            db.close().unwrap();
        }
        let disk = disk.crash(Crash::None, 0);
        if !has_list {
            disk.remove_file("STORE");
        }
        let (salvaged, new) = rescue(&disk);
        assert_eq!(salvaged.keyspaces as usize, before.len());
        assert_eq!(new.keyspaces(), before);
        new.compact().unwrap();
        new.close().unwrap();
        let new = open_new(&disk.dir(NEW), 7).unwrap();
        assert_eq!(new.keyspaces(), before, "closed {is_closed}, with its list {has_list}");
    }
}
