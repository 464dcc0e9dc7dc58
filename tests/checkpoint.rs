//! Copies of a store that runs, and stores made of them: at one lsn, sharing nothing that is written, and
//! repeating nothing that the original did, wherever the power goes.

mod copies;
mod store;

use copies::{CRASHES, begin, check_made, contents, files, jobs, live, more, open_new, read_only, rows};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use store::{Sim, text, token};
use tidewall::storage::{CallKind, Crash, Fault, SimDisk};
use tidewall::{
    Db, Error, Inspection, KeyspaceOptions, Options, Restore, Restored, Salvage, Token, Tokens, Verify,
};

const COPY: &str = "copy";
const NEW: &str = "new";

fn restore(disk: &SimDisk, seed: u64) -> tidewall::Result<Restored> {
    Restore::new().deterministic(seed).run_on(disk.dir(COPY), disk.dir(NEW))
}

#[test]
fn a_checkpoint_is_the_store_at_one_lsn_and_stays_so() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    let then = contents(&db);
    let made = db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    assert_eq!((made.lsn, made.copied), (db.last_lsn(), 0));
    assert!(made.linked >= 3, "{made:?}");
    let before = files(&sim.disk.dir(COPY));
    let seen = read_only(&sim.disk.dir(COPY)).unwrap();
    assert_eq!((contents(&seen), seen.last_lsn()), (then.clone(), made.lsn));

    // The store goes on, is closed and opened: nothing of the copy is written.
    more(&db);
    rows(&db).put(token(600), b"later", b"x").unwrap();
    let db = sim.reopen(db);
    more(&db);
    assert_ne!(contents(&db), then);
    assert_eq!(files(&sim.disk.dir(COPY)), before);
    assert_eq!(contents(&read_only(&sim.disk.dir(COPY)).unwrap()), then);
    // Nor by a store that was killed right behind the cut, when that is where its log ends.
    let db = sim.reopen(db);
    let made = db.checkpoint_into(sim.disk.dir("second")).unwrap();
    let before = files(&sim.disk.dir("second"));
    let killed = Sim::on(sim.disk.kill());
    let db = killed.open();
    assert_eq!(db.last_lsn(), made.lsn);
    more(&db);
    assert_eq!(files(&killed.disk.dir("second")), before);
}

#[test]
fn a_checkpoint_does_not_open_for_writing() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    let before = files(&sim.disk.dir(COPY));
    let error = Options::new().storage(sim.disk.dir(COPY)).open("copy").unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument(what) if what.contains("tidewall::restore")), "{error}");
    assert_eq!(files(&sim.disk.dir(COPY)), before);
    let seen = read_only(&sim.disk.dir(COPY)).unwrap();
    assert_err!(jobs(&seen).put(token(1), b"1/x", b"y"), Error::ReadOnly);
    assert_err!(seen.checkpoint_into(sim.disk.dir("third")), Error::ReadOnly);
}

#[test]
fn a_checkpoint_of_an_empty_store_and_one_after_the_other() {
    let sim = Sim::new();
    let db = sim.open();
    let made = db.checkpoint_into(sim.disk.dir("empty")).unwrap();
    assert_eq!((made.lsn.get(), made.linked, made.copied), (0, 0, 0));
    assert!(read_only(&sim.disk.dir("empty")).unwrap().keyspaces().is_empty());
    live(&db);
    let first = db.checkpoint_into(sim.disk.dir("a")).unwrap();
    let second = db.checkpoint_into(sim.disk.dir("b")).unwrap();
    assert_eq!(first, second, "nothing was written in between");
    assert_err!(db.checkpoint_into(sim.disk.dir("a")), Error::InvalidArgument(_));
    assert_err!(db.checkpoint_into(sim.disk.clone()), Error::InvalidArgument(_));
    assert_eq!(contents(&read_only(&sim.disk.dir("a")).unwrap()), contents(&db));
    assert_eq!(contents(&read_only(&sim.disk.dir("b")).unwrap()), contents(&db));
}

#[test]
fn where_no_link_can_be_made_segments_are_copied() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    let other = SimDisk::new();
    let made = db.checkpoint_into(other.clone()).unwrap();
    assert!(made.copied >= 3 && made.linked == 0, "{made:?}");
    let bytes: usize = files(&other).iter().filter(|(name, _)| *name != "STORE").map(|(_, b)| b.len()).sum();
    assert_eq!(made.copied_bytes, bytes as u64);
    let other = other.crash(Crash::None, 1);
    assert_eq!(contents(&read_only(&other).unwrap()), contents(&db));
    sim.disk.fail(Fault::new(CallKind::Link, ErrorKind::TooManyLinks));
    let mixed = db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    assert_eq!((mixed.copied, mixed.linked), (1, made.copied - 1));
}

/// Compaction gives up segments that a checkpoint has names for: they are removed, never written again. What it
/// leaves is sound, is a checkpoint's and a restore's source like any other, and keeps every mark.
#[test]
fn compaction_writes_nothing_that_a_checkpoint_holds() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    for _ in 0..3 {
        more(&db);
    }
    db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    let (before, then) = (files(&sim.disk.dir(COPY)), contents(&db));
    let mut again = 0;
    for round in 0..10u8 {
        for (name, key) in then.keys().filter(|(_, key)| !key.starts_with(b"more")) {
            match name.as_str() {
                "rows" => rows(&db).put(token(500), key, &[round; 200]).unwrap(),
                _ => match jobs(&db).delete(token(if key[0] == b'1' { 1 } else { 2 }), key) {
                    Ok(lsn) => lsn,
                    Err(error) => panic!("{key:?}: {error}"),
                },
            };
        }
        again += db.compact().unwrap().segments;
    }
    assert!(again >= 5, "{again} segments were given up");
    assert_eq!(files(&sim.disk.dir(COPY)), before);
    assert_eq!(contents(&read_only(&sim.disk.dir(COPY)).unwrap()), then);
    let restored = restore(&sim.disk, 5).unwrap();
    check_made(&open_new(&sim.disk.dir(NEW), 6).unwrap(), &restored, 2, 5);

    let now = contents(&db);
    db.checkpoint_into(sim.disk.dir("second")).unwrap();
    let report = Verify::new().run_on(sim.disk.dir("second")).unwrap();
    assert!(report.is_sound(), "{report:?}");
    db.close().unwrap();
    let report = Verify::new().run_on(sim.disk.clone()).unwrap();
    assert!(report.is_sound(), "{report:?}");
    assert_eq!(contents(&read_only(&sim.disk.dir("second")).unwrap()), now);
    let restored =
        Restore::new().deterministic(7).run_on(sim.disk.dir("second"), sim.disk.dir("third")).unwrap();
    let third = open_new(&sim.disk.dir("third"), 8).unwrap();
    assert_eq!(contents(&third), now);
    third.compact().unwrap();
    assert_eq!(contents(&third), now);
    check_made(&third, &restored, 2, 5);
    third.compact().unwrap();
    third.close().unwrap();
    let report = Verify::new().run_on(sim.disk.dir("third")).unwrap();
    assert!(report.is_sound(), "{report:?}");
    let salvaged = Salvage::new().deterministic(9).run_on(sim.disk.clone(), sim.disk.dir("fourth")).unwrap();
    assert!(salvaged.faults.is_empty());
    assert_eq!(contents(&open_new(&sim.disk.dir("fourth"), 10).unwrap()), now);
}

/// Writers never stop; each of their batches is there whole, and everything up to the lsn is. Segments are sealed
/// all the time, also between the cut and its writing.
#[test]
fn checkpoints_beside_writers_are_consistent() {
    let scratch = tempfile::tempdir().unwrap();
    let db = Options::new().segment_bytes(16 << 10).open(scratch.path().join("data")).unwrap();
    let rows = rows(&db);
    let stop = AtomicBool::new(false);
    let written = Mutex::new(BTreeMap::new());
    thread::scope(|scope| {
        for writer in 0..3u8 {
            let (db, rows, stop, written) = (&db, &rows, &stop, &written);
            scope.spawn(move || {
                let mut n = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    let mut batch = db.batch();
                    for half in [b"left", b"rite"] {
                        batch
                            .put(rows, token(1), &[&[writer], &half[..]].concat(), &n.to_le_bytes())
                            .unwrap();
                        batch
                            .put(rows, token(1), &[&[writer], &half[..], b"pad"].concat(), &[0; 3000])
                            .unwrap();
                    }
                    let lsn = batch.commit().unwrap();
                    written.lock().unwrap().insert((writer, n), lsn);
                }
            });
        }
        for round in 0..6 {
            while written.lock().unwrap().len() < 30 * (round + 1) {
                thread::yield_now();
            }
            let copy = scratch.path().join(format!("copy-{round}"));
            let made = db.checkpoint(&copy).unwrap();
            let seen = Options::new().read_only().open(&copy).unwrap();
            assert_eq!(seen.last_lsn(), made.lsn);
            let seen = self::rows(&seen);
            for writer in 0..3u8 {
                let get = |half: &[u8]| {
                    let value = seen.get(&[&[writer], half].concat()).unwrap()?;
                    Some(u64::from_le_bytes(value.as_ref().try_into().unwrap()))
                };
                let n = get(b"left");
                assert_eq!(n, get(b"rite"));
                let written = written.lock().unwrap();
                if let Some(next) = written.get(&(writer, n.unwrap_or(0) + 1)) {
                    assert!(*next > made.lsn, "a batch at or below the lsn is missing");
                }
                if let Some(lsn) = n.and_then(|n| written.get(&(writer, n))) {
                    assert!(*lsn <= made.lsn, "a batch behind the lsn is there");
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Whether a directory opens for writing, as a store that was there before.
fn opens(disk: &SimDisk) -> Option<Db> {
    open_new(disk, 99).ok()
}

#[test]
fn the_power_goes_at_every_call_of_a_checkpoint() {
    let (disk, db) = begin(1);
    let from = disk.calls();
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    let (calls, then) = (disk.calls() - from, contents(&db));
    let (mut whole, mut nothing) = (0, 0);
    for call in 0..=calls {
        let (disk, db) = begin(1);
        disk.stop_at(from + call);
        let made = db.checkpoint_into(disk.dir(COPY));
        assert_eq!(made.is_ok(), call == calls);
        for (seed, crash) in (0..).zip(CRASHES) {
            let after = disk.crash(crash, seed + 10 * call);
            match read_only(&after.dir(COPY)) {
                Ok(seen) => {
                    assert_eq!(contents(&seen), then, "call {call}, {crash:?}");
                    whole += 1;
                }
                Err(_) => {
                    assert!(made.is_err(), "a finished checkpoint is there, {crash:?}");
                    nothing += 1;
                }
            }
            assert!(opens(&after.dir(COPY)).is_none());
            let sim = Sim::on(after);
            let again = sim.options().must_exist().deterministic(77).open("sim").unwrap();
            assert_eq!(contents(&again), then, "the store itself: call {call}, {crash:?}");
            more(&again);
        }
    }
    assert!(whole > 5 && nothing > 50, "{whole} whole, {nothing} nothing");
}

#[test]
fn an_error_at_any_call_of_a_checkpoint_leaves_nothing_behind() {
    let (disk, db) = begin(1);
    let from = disk.calls();
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    let (calls, then) = (disk.calls() - from, contents(&db));
    let mut went_on = 0;
    for call in 0..calls {
        let (disk, db) = begin(1);
        disk.fail(Fault::new(CallKind::Any, ErrorKind::Other).nth(call));
        let made = db.checkpoint_into(disk.dir(COPY));
        assert_eq!(disk.faults_fired(), 1);
        if made.is_ok() {
            // A link that could not be made, and what is tried in vain.
            assert_eq!(contents(&read_only(&disk.dir(COPY)).unwrap()), then);
        } else {
            assert_eq!(disk.dir(COPY).file_names(), [""; 0], "call {call}");
        }
        assert_eq!(contents(&db), then);
        if db.health().is_healthy() {
            went_on += 1;
            more(&db);
            // What the log was cut to is durable, whether or not the list could be told.
            let after =
                Sim::on(disk.crash(Crash::None, call)).options().deterministic(56).open("sim").unwrap();
            assert_eq!(contents(&after), contents(&db));
            db.checkpoint_into(disk.dir("again")).unwrap();
            assert_eq!(contents(&read_only(&disk.dir("again")).unwrap()), contents(&db));
        }
        drop(db);
        assert!(
            contents(&Sim::on(disk.kill()).options().deterministic(55).open("sim").unwrap()).len()
                >= then.len()
        );
    }
    assert!(went_on > 10, "{went_on} of {calls}");
}

#[test]
fn a_full_disk_stops_a_checkpoint_and_nothing_else() {
    for linked in [true, false] {
        let (disk, db) = begin(1);
        let other = if linked { disk.dir(COPY) } else { SimDisk::new() };
        let used: usize = files(&disk).values().map(Vec::len).sum();
        other.set_budget(Some(if linked { used as u64 + 20_000 } else { 50_000 }));
        assert_err!(db.checkpoint_into(other.clone()), Error::NoSpace { .. });
        assert_eq!(other.file_names(), [""; 0]);
        assert!(db.health().is_healthy());
        jobs(&db).delete(token(1), b"1/\x04").unwrap();
        other.set_budget(None);
        more(&db);
        db.checkpoint_into(other.clone()).unwrap();
        assert_eq!(contents(&read_only(&other).unwrap()), contents(&db));
    }
}

// Restoring.

#[test]
fn nothing_that_the_original_did_can_happen_again() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    let then = contents(&db);
    db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    for n in 0..20u8 {
        let lease = jobs(&db).lease(&[b'5', n]).acquire().unwrap();
        jobs(&db).put(lease.token(), &[b'5', n], b"after").unwrap();
    }
    let copy = files(&sim.disk.dir(COPY));
    let restored = restore(&sim.disk, 5).unwrap();
    assert_eq!(files(&sim.disk.dir(COPY)), copy, "the copy stays");
    let new = open_new(&sim.disk.dir(NEW), 6).unwrap();
    assert_eq!(new.last_lsn(), restored.lsn);
    assert!(new.report().warnings.is_empty());
    assert_eq!(contents(&new), then);
    check_made(&new, &restored, 2, 22);
    // And after another reopening, with the grace of the incarnation before.
    let now = contents(&new);
    new.close().unwrap();
    let new = open_new(&sim.disk.dir(NEW), 7).unwrap();
    assert_eq!(contents(&new), now);
    assert_err!(jobs(&new).put(token(22), b"1/x", b"late"), Error::Fenced { .. });
    rows(&new).put(token(600), b"\x02", b"x").unwrap();
    new.close().unwrap();
    // The new store's writes reached neither the copy nor the original.
    assert_eq!(files(&sim.disk.dir(COPY)), copy);
    more(&sim.reopen(db));

    // A copy of the copy's child: ancestors add up, and so do the bumps.
    let again = Restore::new().deterministic(8).run_on(sim.disk.dir(NEW), sim.disk.dir("third")).unwrap();
    assert!(again.counter.get() > restored.counter.get() + (1 << 32));
    assert_eq!(again.need_floor, ["rows", "later"]);
    let third = open_new(&sim.disk.dir("third"), 9).unwrap();
    assert_eq!(contents(&third), now.into_iter().chain(contents(&third)).collect());
    assert_err!(jobs(&third).put(token(restored.counter.get() + 1), b"2/x", b"late"), Error::Fenced { .. });
}

#[test]
fn a_keyspace_that_was_restored_closed_stays_closed_until_it_is_told() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    restore(&sim.disk, 5).unwrap();
    let mut new = open_new(&sim.disk.dir(NEW), 6).unwrap();
    let external = KeyspaceOptions::new().tokens(Tokens::External);
    new.keyspace("later", external).unwrap();
    for seed in 7..9 {
        assert_err!(rows(&new).put(token(1000), b"r", b"x"), Error::NeedsFloor { .. });
        let later = new.keyspace("later", external).unwrap();
        assert_err!(later.put(token(1), b"a", b"x"), Error::NeedsFloor { .. });
        new.close().unwrap();
        new = open_new(&sim.disk.dir(NEW), seed).unwrap();
    }
    rows(&new).raise_all(token(500)).unwrap();
    new.close().unwrap();
    let new = open_new(&sim.disk.dir(NEW), 10).unwrap();
    rows(&new).put(token(500), b"r", b"x").unwrap();
    new.checkpoint_into(sim.disk.dir("of a child")).unwrap();
    assert_eq!(contents(&read_only(&sim.disk.dir("of a child")).unwrap()), contents(&new));
}

/// A store that was killed is as good a source: what was acknowledged is there, proven or not.
#[test]
fn a_plain_directory_is_restored_as_well() {
    for closed in [true, false] {
        let sim = Sim::new();
        let db = sim.open();
        live(&db);
        let then = contents(&db);
        assert_err!(Restore::new().run_on(sim.disk.clone(), sim.disk.dir(NEW)), Error::Locked { .. });
        assert_eq!(sim.disk.dir(NEW).file_names(), [""; 0], "an error leaves nothing");
        if closed {
            db.close().unwrap();
        }
        let disk = sim.disk.crash(Crash::None, 3);
        let before = files(&disk);
        let restored = Restore::new().deterministic(5).run_on(disk.clone(), disk.dir(NEW)).unwrap();
        assert!(restored.linked > 0 && restored.copied > 0, "{restored:?}");
        assert_eq!(files(&disk), before, "the source stays");
        let new = open_new(&disk.dir(NEW), 6).unwrap();
        assert_eq!(contents(&new), then);
        check_made(&new, &restored, 2, 2);
        new.close().unwrap();
        assert_eq!(files(&disk), before, "and so it does when the new store goes on");
        // And the other way round: the source goes on, and the new store does not change.
        let new = files(&disk.dir(NEW));
        more(&Sim::on(disk.clone()).options().deterministic(8).open("sim").unwrap());
        assert_eq!(files(&disk.dir(NEW)), new);
    }
}

#[test]
fn the_power_goes_at_every_call_of_a_restore() {
    let (disk, db) = begin(1);
    let then = contents(&db);
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    drop(db);
    let whole = disk.crash(Crash::None, 0);
    for (from, name) in [(COPY, "checkpoint"), ("", "plain")] {
        let source = |disk: &SimDisk| if from.is_empty() { disk.clone() } else { disk.dir(from) };
        let run = |disk: &SimDisk| Restore::new().deterministic(5).run_on(source(disk), disk.dir(NEW));
        let tried = whole.crash(Crash::None, 0);
        let restored = run(&tried).unwrap();
        let (mut opened, mut nothing) = (0, 0);
        for call in 0..=tried.calls() {
            let disk = whole.crash(Crash::None, 0);
            let before = files(&source(&disk));
            disk.stop_at(call);
            let done = run(&disk).is_ok();
            assert_eq!(done, call == tried.calls());
            for (seed, crash) in (0..).zip(CRASHES) {
                let after = disk.crash(crash, seed + 10 * call);
                assert_eq!(files(&source(&after)), before, "{name}: the source stays");
                match opens(&after.dir(NEW)) {
                    Some(new) => {
                        assert_eq!(contents(&new), then, "{name}, call {call}, {crash:?}");
                        check_made(&new, &restored, 2, 2);
                        opened += 1;
                    }
                    None => {
                        assert!(!done, "{name}: a finished restore is there, {crash:?}");
                        nothing += 1;
                    }
                }
                // Whatever was left there is in nobody's way once it is removed.
                let third = after.dir("third");
                let restored = Restore::new().deterministic(6).run_on(source(&after), third.clone()).unwrap();
                check_made(&open_new(&third, 7).unwrap(), &restored, 2, 2);
            }
        }
        assert!(opened >= 5 && nothing > 100, "{name}: {opened} opened, {nothing} did not");
    }
}

/// A directory that an interrupted restore left says so, and is no new store.
#[test]
fn what_an_interrupted_restore_left_is_named() {
    let (disk, db) = begin(1);
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    disk.fail(Fault::new(CallKind::Rename, ErrorKind::Other).on(format!("{NEW}/STORE.part")));
    disk.fail(Fault::new(CallKind::Remove, ErrorKind::Other).forever().on(format!("{NEW}/STORE.part")));
    assert_err!(restore(&disk, 5), Error::Io { .. });
    disk.clear_faults();
    let error = Options::new().storage(disk.dir(NEW)).open("new").unwrap_err();
    assert!(matches!(&error, Error::Corrupt { what, .. } if what.contains("interrupted")), "{error}");
    assert_err!(restore(&disk, 6), Error::InvalidArgument(_));
    for name in disk.dir(NEW).file_names() {
        disk.dir(NEW).remove_file(&name);
    }
    restore(&disk, 7).unwrap();
}

#[test]
fn an_error_at_any_call_of_a_restore_leaves_nothing_that_opens() {
    let (disk, db) = begin(1);
    let then = contents(&db);
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    drop(db);
    let whole = disk.crash(Crash::None, 0);
    let tried = whole.crash(Crash::None, 0);
    restore(&tried, 5).unwrap();
    for call in 0..tried.calls() {
        let disk = whole.crash(Crash::None, 0);
        let before = files(&disk.dir(COPY));
        disk.fail(Fault::new(CallKind::Any, ErrorKind::Other).nth(call));
        match restore(&disk, 5) {
            Ok(_) => assert_eq!(contents(&open_new(&disk.dir(NEW), 6).unwrap()), then),
            Err(_) => {
                let left: Vec<_> = disk.dir(NEW).file_names();
                assert!(left.iter().all(|name| name == "LOCK"), "call {call} left {left:?}");
                restore(&disk, 7).unwrap();
                assert_eq!(contents(&open_new(&disk.dir(NEW), 8).unwrap()), then);
            }
        }
        assert_eq!(files(&disk.dir(COPY)), before);
    }
}

#[test]
fn damaged_copies_are_named_and_leave_nothing() {
    let (disk, db) = begin(1);
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    drop(db);
    let copy = disk.dir(COPY);
    let name = copy.file_names().into_iter().find(|name| name.ends_with(".seg")).unwrap();
    let len = copy.read_file(&name).unwrap().len() as u64;
    for (what, damage) in [
        ("seal", Box::new(|copy: &SimDisk| copy.flip_bit(&name, len - 30, 1)) as Box<dyn Fn(&SimDisk)>),
        ("op", Box::new(|copy| copy.flip_bit(&name, 4096 + 28 + 10, 1))),
        ("header", Box::new(|copy| copy.flip_bit(&name, 40, 1))),
        ("cut", Box::new(|copy| copy.truncate(&name, len - 1))),
        ("missing", Box::new(|copy| copy.remove_file(&name))),
        (
            "STORE",
            Box::new(|copy| {
                copy.flip_bit("STORE", 30, 1);
                copy.flip_bit("STORE", 16384 + 30, 1);
            }),
        ),
    ] {
        let disk = disk.kill();
        damage(&disk.dir(COPY));
        assert_err!(restore(&disk, 5), Error::Corrupt { .. });
        assert_eq!(disk.dir(NEW).file_names(), ["LOCK"], "{what}");
    }
}

#[test]
fn bad_requests_are_refused_with_a_reason() {
    let (disk, db) = begin(1);
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    db.advance_tokens(token(1 << 62)).unwrap();
    db.checkpoint_into(disk.dir("high")).unwrap();
    assert_err!(Restore::new().bump(0).run_on(disk.dir(COPY), disk.dir(NEW)), Error::InvalidArgument(_));
    assert_err!(Restore::new().run_on(disk.dir("nothing"), disk.dir(NEW)), Error::Io { .. });
    assert_err!(Restore::new().bump(1 << 62).run_on(disk.dir("high"), disk.dir(NEW)), Error::TokensExhausted);
    assert_err!(Restore::new().bump(u64::MAX).run_on(disk.dir(COPY), disk.dir(NEW)), Error::TokensExhausted);
    // The rest of the token space, to the last token.
    let last = (i64::MAX as u64) - (1 << 62);
    let restored =
        Restore::new().deterministic(4).bump(last).run_on(disk.dir("high"), disk.dir(NEW)).unwrap();
    assert_eq!(restored.counter.get(), Token::MAX.get());
    let new = open_new(&disk.dir(NEW), 5).unwrap();
    assert_err!(jobs(&new).lease(b"1/").acquire(), Error::TokensExhausted);
}

#[test]
fn progress_is_told_for_each_segment() {
    let (disk, db) = begin(1);
    let made = db.checkpoint_into(disk.dir(COPY)).unwrap();
    let (calls, last) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU64::new(0)));
    let (count, ops) = (calls.clone(), last.clone());
    Restore::new()
        .progress(move |progress| {
            assert!(progress.segments_done < progress.segments_all);
            count.fetch_add(1, Ordering::Relaxed);
            ops.fetch_max(progress.ops, Ordering::Relaxed);
        })
        .run_on(disk.dir(COPY), disk.dir(NEW))
        .unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 2 * made.linked);
    assert!(last.load(Ordering::Relaxed) > 10);
}

// Older copies.

#[test]
fn a_store_that_has_not_granted_what_was_seen_is_refused() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    db.close().unwrap();
    let old = sim.disk.kill();
    let db = sim.open();
    let seen = jobs(&db).lease(b"9/").acquire().unwrap().token();
    db.close().unwrap();
    sim.options().must_have_granted(seen).open("sim").unwrap().close().unwrap();

    let before = files(&old);
    let error = Sim::on(old.clone()).options().must_have_granted(seen).open("sim").unwrap_err();
    assert!(matches!(error, Error::OlderCopy { counter, seen: said } if counter.get() == 2 && said == seen));
    assert!(error.to_string().contains("restore"), "{error}");
    assert!(!error.is_retryable());
    assert_eq!(files(&old), before, "nothing was changed");
    // An empty directory has granted nothing, and becomes no store.
    let empty = SimDisk::new();
    assert_err!(
        Sim::on(empty.clone()).options().must_have_granted(seen).open("sim"),
        Error::OlderCopy { .. }
    );
    assert!(files(&empty).is_empty());
    // Restored with what was seen, the old copy is a store that may be opened.
    let far = token(1 << 50);
    let restore = Restore::new().deterministic(5).advance_tokens(far);
    let restored = restore.run_on(sim.disk.dir(COPY), sim.disk.dir(NEW)).unwrap();
    assert_eq!(restored.counter.get(), (1 << 50) + (1 << 32));
    let options = Options::new().storage(sim.disk.dir(NEW)).must_have_granted(far);
    assert_eq!(
        jobs(&options.open("new").unwrap()).lease(b"1/").acquire().unwrap().token().get(),
        (1 << 50) + (1 << 32) + 1
    );
}

/// A plain copy has the identity of its original, and nothing tells the two apart while each goes on in its own
/// directory. What is noticed: files of the one among those of the other, and a token that it has not granted.
#[test]
fn a_plain_copy_that_went_its_own_way_is_noticed_where_it_can_be() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    db.close().unwrap();
    let copy = Sim::on(sim.disk.kill());
    let go_on = |sim: &Sim, seed: u64, times: u32| {
        let db = sim.options().deterministic(seed).open("sim").unwrap();
        (0..times).for_each(|_| more(&db));
        let token = jobs(&db).lease(b"9/").acquire().unwrap().token();
        db.close().unwrap();
        token
    };
    let (one, two) = (go_on(&sim, 100, 4), go_on(&copy, 200, 2));
    assert!(two < one);
    let refused = copy.options().must_have_granted(one).deterministic(300).open("sim");
    assert_err!(refused, Error::OlderCopy { .. });
    let mut mixed = 0;
    for (name, bytes) in files(&copy.disk) {
        let disk = sim.disk.kill();
        if disk.read_file(&name).as_ref() == Some(&bytes) {
            continue;
        }
        disk.write_file(&name, &bytes);
        assert_err!(Sim::on(disk).options().deterministic(400).open("sim"), Error::Corrupt { .. });
        mixed += 1;
    }
    assert!(mixed >= 3, "{mixed}");
}

/// Two checkpoints into one directory: one of them is whole, and the other takes nothing of it away.
#[test]
fn of_two_checkpoints_into_one_directory_one_is_whole() {
    for round in 0..20 {
        let (disk, db) = begin(round);
        let made: Vec<bool> = thread::scope(|scope| {
            let both = [0, 1].map(|_| scope.spawn(|| db.checkpoint_into(disk.dir(COPY)).is_ok()));
            both.into_iter().map(|made| made.join().unwrap()).collect()
        });
        assert!(made.iter().filter(|&&made| made).count() <= 1, "{made:?}");
        if made.contains(&true) {
            assert_eq!(contents(&read_only(&disk.dir(COPY)).unwrap()), contents(&db));
        } else {
            assert_err!(read_only(&disk.dir(COPY)), Error::Io { .. } | Error::Corrupt { .. });
        }
    }
}

// On a real disk.

fn hashes(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    named
        .filter(|(name, _)| name != "LOCK")
        .map(|(name, path)| (name, std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn on_a_real_disk() {
    let scratch = tempfile::tempdir().unwrap();
    let [data, copy, new] = ["data", "copy", "new"].map(|name| scratch.path().join(name));
    let db = Options::new().segment_bytes(16 << 10).open(&data).unwrap();
    live(&db);
    let then = contents(&db);
    let made = db.checkpoint(&copy).unwrap();
    assert!(made.linked > 0 && made.copied == 0, "{made:?}");
    assert_err!(db.checkpoint(&copy), Error::InvalidArgument(_));
    assert_err!(db.checkpoint(&data), Error::InvalidArgument(_));
    assert_err!(db.checkpoint(scratch.path().join("no/parent")), Error::Io { .. });
    let before = hashes(&copy);
    more(&db);
    db.close().unwrap();
    assert_eq!(hashes(&copy), before);
    assert_err!(Db::open(&copy), Error::InvalidArgument(_));
    assert_err!(tidewall::restore(&copy, &copy), Error::InvalidArgument(_));
    assert_err!(tidewall::restore(scratch.path().join("none"), &new), Error::Io { .. });
    assert!(!new.exists(), "a directory that was made for nothing is gone");
    let restored = tidewall::restore(&copy, &new).unwrap();
    assert!(restored.linked > 0, "{restored:?}");
    let db = Db::open(&new).unwrap();
    assert_eq!(contents(&db), then);
    check_made(&db, &restored, 2, 3);
    db.close().unwrap();
    assert_eq!(hashes(&copy), before);
    assert_eq!(text(jobs(&Db::open(&new).unwrap()).get(b"2/a").unwrap()).as_deref(), Some("two"));
}

/// A failed restore into a directory of its own making takes the directory away again.
#[cfg(unix)]
#[test]
fn copies_that_may_not_be_written_are_copied() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = tempfile::tempdir().unwrap();
    let [data, copy, new] = ["data", "copy", "new"].map(|name| scratch.path().join(name));
    let db = Options::new().segment_bytes(16 << 10).open(&data).unwrap();
    live(&db);
    let then = contents(&db);
    db.checkpoint(&copy).unwrap();
    db.close().unwrap();
    for entry in std::fs::read_dir(&copy).unwrap() {
        let path = entry.unwrap().path();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o444)).unwrap();
    }
    let restored = tidewall::restore(&copy, &new).unwrap();
    assert_eq!(contents(&Db::open(&new).unwrap()), then);
    check_made(&Db::open(&new).unwrap(), &restored, 2, 2);
    // Damage is found before anything opens.
    let damaged = scratch.path().join("damaged");
    std::fs::create_dir(&damaged).unwrap();
    for (name, mut bytes) in hashes(&copy) {
        if name.ends_with(".seg") {
            bytes[4096 + 40] ^= 1;
        }
        std::fs::write(damaged.join(name), bytes).unwrap();
    }
    let third = scratch.path().join("third");
    assert_err!(tidewall::restore(&damaged, &third), Error::Corrupt { .. });
    assert!(!third.exists());
}

/// A write of `STORE` failed behind the seal of a first attempt, and so nobody noted how long the sealed file was: every
/// later copy of it wanted bytes that it did not have.
#[test]
fn a_segment_of_a_checkpoint_that_failed_is_copied_by_the_next() {
    let sim = Sim::new();
    let db = sim.open();
    live(&db);
    sim.disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::Other).on("STORE.new"));
    assert_err!(db.checkpoint_into(sim.disk.dir(COPY)), Error::Io { .. });
    sim.disk.fail(Fault::new(CallKind::Link, ErrorKind::Other).forever());
    let made = db.checkpoint_into(sim.disk.dir(COPY)).unwrap();
    assert!(made.linked == 0 && made.copied > 0, "{made:?}");
    assert_eq!(contents(&read_only(&sim.disk.dir(COPY)).unwrap()), contents(&db));
}

/// They were listed as `STORE` has them, the other way round.
#[test]
fn the_ancestors_of_a_store_are_seen_the_nearest_first() {
    let sim = Sim::new();
    live(&sim.open());
    let disk = sim.disk.kill();
    let child = |from: SimDisk, seed| {
        Restore::new().deterministic(seed).run_on(from, disk.dir(&format!("child {seed}"))).unwrap();
        disk.dir(&format!("child {seed}"))
    };
    let first = child(disk.clone(), 5);
    let second = child(first.clone(), 6);
    let seen = |disk: &SimDisk| Inspection::in_storage(Arc::new(disk.clone())).unwrap();
    assert_eq!(seen(&second).ancestors(), [seen(&first).store_id(), seen(&disk).store_id()]);
}

/// Of a store of many ops a restore writes an index file beside the segments. Where it failed behind that, the file was
/// left, and the next attempt was told that the directory is not empty.
#[test]
fn a_restore_of_many_ops_that_fails_leaves_nothing() {
    let disk = SimDisk::new();
    let options = || Options::new().storage(disk.clone()).without_threads().segment_bytes(4 << 20);
    let db = options().deterministic(1).open("sim").unwrap();
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    for n in 0..31u32 {
        let mut batch = db.batch();
        for key in 0..10_000 {
            batch.put(&rows, token(1), &(n * 10_000 + key).to_be_bytes(), b"").unwrap();
        }
        batch.commit().unwrap();
    }
    db.checkpoint_into(disk.dir(COPY)).unwrap();
    disk.fail(Fault::new(CallKind::Rename, ErrorKind::Other).on(format!("{NEW}/STORE.part")));
    assert_err!(restore(&disk, 5), Error::Io { .. });
    assert_eq!(disk.dir(NEW).file_names(), ["LOCK"]);
    restore(&disk, 6).unwrap();
    let new = open_new(&disk.dir(NEW), 7).unwrap();
    assert_eq!(new.report().warnings, [""; 0]);
    assert!(new.report().ops < 100, "the index file is of use: {:?}", new.report());
}
