//! `verify` finds every kind of damage, all of it at once, says where, changes nothing, and never contradicts
//! what opening does.

mod copies;
mod dump;
mod store;

use copies::{begin, files, jobs, live, more, rows};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use store::{Sim, token};
use tidewall::storage::{CallKind, Crash, Fault as DiskFault, SimDisk};
use tidewall::{Error, FaultKind, Options, Report, Restore, Verify, verify};

fn check(disk: &SimDisk) -> Report {
    let before = disk.image_hash();
    let report = Verify::new().run_on(disk.clone()).expect("damage is no error");
    assert_eq!(disk.image_hash(), before, "verify changed the files");
    report
}

/// A closed store of a few segments.
fn closed() -> SimDisk {
    let (disk, db) = begin(1);
    jobs(&db).put(token(2), b"2/large", &[7; 3000]).unwrap();
    db.close().unwrap();
    disk.crash(Crash::None, 0)
}

/// Its segments, oldest first, without the spares.
fn segments(disk: &SimDisk) -> Vec<String> {
    let begun =
        |name: &String| name.ends_with(".seg") && disk.read_file(name).unwrap().starts_with(b"TIDEWALL");
    disk.file_names().into_iter().filter(begun).collect()
}

fn len(disk: &SimDisk, name: &str) -> u64 {
    disk.read_file(name).unwrap().len() as u64
}

/// Where a run of bytes lies in a file.
fn find(disk: &SimDisk, name: &str, needle: &[u8]) -> u64 {
    let bytes = disk.read_file(name).unwrap();
    bytes.windows(needle.len()).position(|window| window == needle).expect("it is there") as u64
}

#[test]
fn sound_stores_are_sound() {
    let disk = closed();
    let report = check(&disk);
    assert!(report.is_sound() && report.opens() && report.notes.is_empty(), "{report:?}");
    assert_eq!((report.counter.get(), report.is_checkpoint), (2, false));
    assert_eq!(report.segments as usize, segments(&disk).len());
    let db = Sim::on(disk.kill()).open();
    assert_eq!(report.lsn, db.last_lsn());
    assert_eq!(report.ops, db.report().ops);
    assert_eq!(report.segments, db.report().segments);
    assert!(report.frames >= report.ops && report.bytes > 40_000);

    // Killed, with a tail, and with a tail that is torn.
    let (disk, db) = begin(1);
    let report = check(&disk.crash(Crash::None, 0));
    assert!(report.is_sound() && report.notes.is_empty(), "{report:?}");
    assert_eq!(report.lsn, db.last_lsn());
    let torn = disk.crash(Crash::None, 0);
    let newest = segments(&torn).pop().unwrap();
    let last = find(&torn, &newest, b"2/a") + 4;
    torn.flip_bit(&newest, last, 0);
    let report = check(&torn);
    assert!(report.is_sound(), "{report:?}");
    assert_eq!(report.lsn.get(), db.last_lsn().get() - 1);
    assert!(report.notes[0].contains("unfinished"), "{report:?}");

    // A checkpoint, a restored store, its child, and an empty one.
    db.checkpoint_into(disk.dir("copy")).unwrap();
    let report = check(&disk.dir("copy"));
    assert!(report.is_sound() && report.is_checkpoint, "{report:?}");
    let made = Restore::new().deterministic(3).run_on(disk.dir("copy"), disk.dir("new")).unwrap();
    let report = check(&disk.dir("new"));
    assert!(report.is_sound() && !report.is_checkpoint, "{report:?}");
    assert_eq!((report.counter, report.lsn), (made.counter, made.lsn));
    Restore::new().deterministic(4).run_on(disk.dir("new"), disk.dir("third")).unwrap();
    assert!(check(&disk.dir("third")).is_sound());
    Sim::on(disk.dir("empty")).open().close().unwrap();
    assert!(check(&disk.dir("empty")).is_sound());
}

#[test]
fn golden_directories_are_sound() {
    for (shape, dump) in [
        ("scopes", include_str!("data/v1/scopes.txt")),
        ("external", include_str!("data/v1/external.txt")),
        ("torn", include_str!("data/v1/torn.txt")),
        ("closed", include_str!("data/v1/closed.txt")),
    ] {
        let disk = SimDisk::new();
        for (name, bytes) in dump::parse(dump) {
            disk.write_file(&name, &bytes);
        }
        let report = check(&disk);
        assert!(report.is_sound(), "{shape}: {report:?}");
        assert_eq!(report.notes.len(), usize::from(shape == "torn"), "{shape}: {report:?}");
    }
}

#[test]
fn a_store_that_is_open_is_locked() {
    let (disk, db) = begin(1);
    store_is_locked(&disk);
    db.close().unwrap();
    check(&disk);
}

fn store_is_locked(disk: &SimDisk) {
    assert_err!(Verify::new().run_on(disk.clone()), Error::Locked { .. });
}

#[test]
fn a_directory_without_a_store_is_an_error() {
    assert_err!(Verify::new().run_on(SimDisk::new()), Error::Io { .. });
    let disk = SimDisk::new();
    disk.write_file("notes.txt", b"not a store");
    assert_err!(Verify::new().run_on(disk), Error::Io { .. });
    assert_err!(verify("/no/such/directory"), Error::Io { .. });
    let disk = closed();
    let mut store = disk.read_file("STORE").unwrap();
    store[8] = 9;
    let sum = crc32(&store[..12]);
    store[12..16].copy_from_slice(&sum.to_le_bytes());
    disk.write_file("STORE", &store);
    assert_err!(Verify::new().run_on(disk), Error::UpgradeRequired { found: 9, .. });
}

/// The checksum of `docs/format.md`, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ byte as u32, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 })
    })
}

/// One kind of damage: what it is called, where, and how it is done.
type Damage = (FaultKind, String, u64, Box<dyn Fn(&SimDisk)>);

fn damages(disk: &SimDisk) -> Vec<Damage> {
    let names = segments(disk);
    assert!(names.len() >= 4, "{names:?}");
    let mut damages: Vec<Damage> = Vec::new();
    let mut flip = |kind, name: &str, says: u64, at: u64| {
        let file = name.to_owned();
        damages.push((kind, name.to_owned(), says, Box::new(move |disk| disk.flip_bit(&file, at, 3))));
    };
    flip(FaultKind::StoreCopy, "STORE", 16384, 16384 + 60);
    // An op in the first segment, a frame's header in the second, the key table of the third, a value and the
    // seal in the last one.
    let at = find(disk, &names[0], b"1/\x02");
    flip(FaultKind::Op, &names[0], 0, at);
    flip(FaultKind::Frame, &names[1], 4096, 4096 + 6);
    let third = len(disk, &names[2]);
    flip(FaultKind::KeyTable, &names[2], third - 64, third - 66);
    let last =
        names.iter().rfind(|name| disk.read_file(name).unwrap().windows(64).any(|window| window == [7; 64]));
    let last = last.unwrap();
    let value = find(disk, last, &[7; 512]);
    flip(FaultKind::Value, last, 0, value + 700);
    damages
}

#[test]
fn every_kind_of_damage_is_found_and_all_of_them_together() {
    let sound = closed();
    let clean = check(&sound);
    let all = sound.kill();
    let mut expected = BTreeSet::new();
    for (kind, name, says, damage) in damages(&sound) {
        let disk = sound.kill();
        damage(&disk);
        damage(&all);
        let report = check(&disk);
        let found: Vec<_> = report.faults.iter().map(|fault| (fault.kind, &fault.file)).collect();
        assert_eq!(found, [(kind, &name)], "{report:?}");
        if says > 0 {
            assert_eq!(report.faults[0].offset, says, "{report:?}");
        }
        assert!(report.faults[0].to_string().contains(&name));
        assert_eq!(report.faults[0].lsn.is_some(), !kind.is_harmless(), "{report:?}");
        assert_eq!(report.opens(), kind.is_harmless());
        assert!(report.ops + 3 > clean.ops, "what lies behind is read: {report:?}");
        expected.insert((format!("{kind:?}"), name));
    }
    let report = check(&all);
    let found: BTreeSet<_> =
        report.faults.iter().map(|fault| (format!("{:?}", fault.kind), fault.file.clone())).collect();
    assert_eq!(found, expected, "{report:?}");
    assert!(!report.is_sound() && !report.opens());
}

#[test]
fn what_is_wrong_with_whole_files_is_found() {
    let sound = closed();
    let names = segments(&sound);
    let kinds = |disk: &SimDisk| -> BTreeSet<(String, String)> {
        let faults = check(disk).faults;
        faults.iter().map(|fault| (format!("{:?}", fault.kind), fault.file.clone())).collect()
    };
    let has = |disk: &SimDisk, kind: FaultKind, name: &str| {
        let found = kinds(disk);
        assert!(found.contains(&(format!("{kind:?}"), name.to_owned())), "{kind:?} {name}: {found:?}");
    };
    let disk = sound.kill();
    disk.remove_file(&names[1]);
    has(&disk, FaultKind::Missing, &names[1]);
    has(&disk, FaultKind::Chain, &names[2]);
    let disk = sound.kill();
    disk.truncate(&names[1], len(&sound, &names[1]) - 1);
    has(&disk, FaultKind::Cut, &names[1]);
    has(&disk, FaultKind::Seal, &names[1]);
    let disk = sound.kill();
    disk.flip_bit(&names[1], 44, 0);
    has(&disk, FaultKind::Header, &names[1]);
    for (at, last) in [(1, false), (names.len() - 1, true)] {
        let disk = sound.kill();
        disk.flip_bit(&names[at], len(&sound, &names[at]) - 20, 0);
        has(&disk, FaultKind::Seal, &names[at]);
        assert_eq!(at + 1 == names.len(), last);
    }
    let disk = sound.kill();
    disk.write_file(&names[1], &vec![0; len(&sound, &names[1]) as usize]);
    has(&disk, FaultKind::Chain, &names[2]);
    let disk = sound.kill();
    disk.write_file(&names[1], &disk.read_file(&names[0]).unwrap());
    has(&disk, FaultKind::Foreign, &names[1]);
    let disk = sound.kill();
    disk.remove_file("STORE");
    assert_eq!(kinds(&disk), BTreeSet::from([("Store".into(), "STORE".into())]), "the rest proves itself");
    let disk = sound.kill();
    disk.flip_bit("STORE", 60, 0);
    disk.flip_bit("STORE", 16384 + 60, 0);
    has(&disk, FaultKind::Store, "STORE");
    // A list that is older than the segments.
    let old = sound.read_file("STORE").unwrap();
    let sim = Sim::on(sound.kill());
    let db = sim.open();
    for _ in 0..4 {
        more(&db);
    }
    db.close().unwrap();
    assert!(check(&sim.disk).is_sound());
    sim.disk.write_file("STORE", &old);
    has(&sim.disk, FaultKind::Store, "STORE");
    // What nobody listed is a note, not a fault.
    let disk = sound.kill();
    disk.write_file("000099.seg", b"mine");
    disk.write_file("notes.txt", b"mine");
    let report = check(&disk);
    assert!(report.is_sound() && report.notes.len() == 1, "{report:?}");
}

#[test]
fn bytes_that_cannot_be_read_are_a_fault_and_the_rest_is_read() {
    let disk = closed();
    let name = &segments(&disk)[1];
    disk.fail(DiskFault::new(CallKind::ReadAt, ErrorKind::Other).on(name.clone()).nth(2));
    assert!(check(&disk).is_sound(), "a second try answered");
    disk.fail(DiskFault::new(CallKind::ReadAt, ErrorKind::Other).on(name.clone()).nth(2));
    disk.fail(DiskFault::new(CallKind::ReadAt, ErrorKind::Other).on(name.clone()).nth(4));
    disk.fail(DiskFault::new(CallKind::ReadAt, ErrorKind::Other).on(name.clone()).nth(5));
    let report = check(&disk);
    assert_eq!(disk.faults_fired(), 4);
    let unreadable: Vec<_> = report.faults.iter().filter(|f| f.kind == FaultKind::Unreadable).collect();
    assert_eq!(unreadable.len(), 1, "one run of bytes: {report:?}");
    assert_eq!((unreadable[0].offset, &unreadable[0].file), (4096, name));
    assert!(report.faults.iter().all(|fault| fault.file == *name), "{report:?}");
    assert!(!report.opens());
    disk.clear_faults();
    assert!(check(&disk).is_sound());
}

#[test]
fn progress_is_told_for_each_segment() {
    let disk = closed();
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let verify = Verify::new().progress(move |progress| {
        assert_eq!(progress.segments_done, count.fetch_add(1, Ordering::Relaxed));
    });
    let report = verify.run_on(disk).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), report.segments);
}

/// Everything a store shows is read, through maps.
fn opens_whole(disk: &SimDisk) -> Result<(), Error> {
    let db =
        Options::new().storage(disk.clone()).must_exist().without_threads().deterministic(9).open("sim")?;
    for (name, options) in db.keyspaces() {
        for item in db.keyspace(&name, options)?.iter() {
            item?;
        }
    }
    Ok(())
}

/// A flipped bit, anywhere: `verify` and opening agree about it. Opening reads no superseded value and does
/// not care how a segment looks that it does not need; so it may open where there is a fault, never the other
/// way round.
#[test]
fn verify_never_contradicts_opening() {
    for (disk, killed) in [(closed(), false), (begin(1).0.crash(Crash::None, 0), true)] {
        let (mut refused, mut harmless, mut hidden) = (0, 0, 0);
        for (name, bytes) in files(&disk) {
            let mut at = 0;
            while at < bytes.len() {
                // Dense where there is something, thin in zeros.
                let step = if bytes[at..].iter().take(64).all(|&byte| byte == 0) { 509 } else { 13 };
                let damaged = disk.kill();
                damaged.flip_bit(&name, at as u64, (at % 8) as u8);
                let report = check(&damaged);
                match opens_whole(&damaged) {
                    Err(error) => {
                        assert!(!report.opens(), "{name} at {at}: {error}, and {report:?}");
                        refused += 1;
                    }
                    Ok(()) if report.opens() => harmless += 1,
                    Ok(()) => {
                        hidden += 1;
                        assert!(
                            killed
                                || report.faults.iter().all(|fault| {
                                    matches!(fault.kind, FaultKind::Value | FaultKind::Op | FaultKind::Frame)
                                }),
                            "{name} at {at}: it opens, and {report:?}"
                        );
                    }
                }
                at += step;
            }
        }
        println!("{refused} refused, {harmless} harmless, {hidden} found by verify alone");
        assert!(refused > 500 && harmless > 50);
    }
}

#[test]
fn on_a_real_disk() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("data");
    let db = Options::new().segment_bytes(16 << 10).open(&dir).unwrap();
    live(&db);
    assert_err!(verify(&dir), Error::Locked { .. });
    rows(&db).put(token(700), b"last", b"x").unwrap();
    db.close().unwrap();
    let report = verify(&dir).unwrap();
    assert!(report.is_sound(), "{report:?}");
    let path = dir.join("000001.seg");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let report = verify(&dir).unwrap();
    assert_eq!(report.faults.len(), 1, "{report:?}");
    assert_eq!(report.faults[0].file, "000001.seg");
}
