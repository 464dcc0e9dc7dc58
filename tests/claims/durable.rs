//! D1–D5 and R1–R4: what an answer means, and what is there afterwards.

use crate::store::{Sim, op, secs, text, token};
use tidewall::storage::{CallKind, Crash, Fault, SimDisk, SyncFailure};
use tidewall::*;

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

fn jobs(db: &Db) -> Keyspace {
    db.keyspace("jobs", KeyspaceOptions::new()).unwrap()
}

const POLICIES: [Crash; 9] = [
    Crash::None,
    Crash::All,
    Crash::Subset { percent: 50 },
    Crash::Prefix,
    Crash::Suffix,
    Crash::Reverse,
    Crash::OneMissing,
    Crash::OnePresent,
    Crash::Torn { bytes: true },
];

#[test]
fn d1_r1_what_was_acknowledged_survives_every_kind_of_power_cut() {
    let sim = Sim::new();
    let db = sim.open();
    let rows_ = rows(&db);
    for n in 0..100u64 {
        rows_.put(token(n + 1), &n.to_be_bytes(), &vec![n as u8; 50 * (n as usize % 30)]).unwrap();
        rows_.delete(token(n + 1), &(n / 2).to_be_bytes()).unwrap();
        let unacknowledged = rows_.submit_put(token(n + 1), b"extra", &n.to_be_bytes()).unwrap();
        for policy in POLICIES {
            let after = Sim::on(sim.disk.crash(policy, n));
            let db = after.options().deterministic(1_000 + n).open("sim").unwrap();
            let rows = rows(&db);
            let expected = (n / 2 + 1..=n).map(u64::to_be_bytes);
            let found = rows.range(..b"extra").map(|item| item.unwrap().0);
            assert!(found.eq(expected.map(|key| key.to_vec())), "{policy:?} after {n}");
            assert!(rows.mark(&n.to_be_bytes()).unwrap().unwrap().get() == n + 1);
        }
        unacknowledged.wait().unwrap();
    }
}

#[test]
fn d2_of_a_batch_cut_off_by_the_power_everything_is_there_or_nothing() {
    for policy in POLICIES {
        for seed in 0..40 {
            let sim = Sim::new();
            let db = sim.open();
            let ks = rows(&db);
            ks.put(token(1), b"before", b"x").unwrap();
            let mut batch = db.batch();
            for n in 0..20u8 {
                batch.put(&ks, token(2), &[n], &[n; 300]).unwrap();
            }
            // The power goes at some call of the commit.
            sim.disk.stop_at(sim.disk.calls() + seed % 2);
            assert_err!(batch.commit(), Error::Indeterminate { .. });
            let after = Sim::on(sim.disk.crash(policy, seed));
            let db = after.options().deterministic(99).open("sim").unwrap();
            let ks = rows(&db);
            let found = ks.iter().count();
            assert!(found == 1 || found == 21, "{found} with {policy:?} and seed {seed}");
            assert_eq!(ks.mark(&[7]).unwrap().is_some(), found == 21);
        }
    }
}

#[test]
fn d3_what_is_not_durable_is_not_seen() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let first = ks.submit_put(token(3), b"a", b"1").unwrap();
    assert!(!first.is_done());
    let view = db.snapshot();
    assert_eq!((ks.get(b"a").unwrap(), ks.mark(b"a").unwrap(), ks.iter().count()), (None, None, 0));
    let second = ks.submit_put(token(4), b"a", b"2").unwrap();
    let (first, second) = (first.wait().unwrap(), second.wait().unwrap());
    assert!(first < second);
    assert_eq!(text(ks.get(b"a").unwrap()).as_deref(), Some("2"));
    assert_eq!(view.get(&ks, b"a").unwrap(), None);
}

/// D4: each refusal is given only when what it rests on is on the disk, so a power cut right behind it
/// cannot take its ground away.
#[test]
fn d4_a_refusal_stands_on_what_survives_a_power_cut() {
    type Refused = fn(&Db, &Keyspace) -> Error;
    let refusals: [(Refused, &str); 6] = [
        (|_, ks| ks.put(token(4), b"a", b"x").unwrap_err(), "Fenced"),
        (|_, ks| ks.raise(token(4), b"a").unwrap_err(), "Fenced"),
        (|_, ks| ks.put_if(token(5), b"a", b"x", Expect::Absent).unwrap_err(), "Conflict"),
        (|_, ks| ks.put_operation(token(5), op(7), b"a", b"x").unwrap_err(), "Duplicate"),
        (|_, ks| ks.delete_operation(token(5), op(6), b"a").unwrap_err(), "StaleOperation"),
        (|_, ks| ks.put(token(500), b"b", b"x").unwrap_err(), "TokenJump"),
    ];
    for (refused, name) in refusals {
        let mut sim = Sim::new();
        let options = KeyspaceOptions::new().tokens(Tokens::External).token_jump_cap(100);
        let db = sim.open();
        let ks = db.keyspace("k", options).unwrap();
        let mut batch = db.batch();
        batch.put(&ks, token(5), b"a", b"1").unwrap().operation(op(7));
        let submitted = batch.submit().unwrap();
        let error = refused(&db, &ks);
        assert!(format!("{error:?}").starts_with(name), "{error:?}");
        let after = sim.power_cut();
        let ks = after.keyspace("k", options).unwrap();
        let again = refused(&after, &ks);
        assert!(format!("{again:?}").starts_with(name), "{name} before, and after a power cut {again:?}");
        drop(submitted);
    }
}

#[test]
fn d4_an_answer_whose_ground_was_lost_is_indeterminate_and_not_a_refusal() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(1), b"a", b"1").unwrap();
    let submitted = ks.submit_put(token(5), b"a", b"2").unwrap();
    sim.disk.fail(Fault::new(CallKind::SyncData, std::io::ErrorKind::Other));
    let error = ks.put(token(4), b"a", b"late").unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_err!(Err::<(), _>(error), Error::Indeterminate { .. });
    assert_err!(submitted.wait(), Error::Indeterminate { .. });
    assert_eq!(sim.disk.faults_fired(), 1);
}

/// Found by a campaign (seed 53): a token was no jump because of another that was appended and not durable, and then the
/// condition of its write did not hold. After a crash it would have been a jump.
#[test]
fn d4_a_conflict_rests_on_what_let_its_token_pass() {
    let sim = Sim::new();
    let db = sim.open();
    let capped = KeyspaceOptions::new().tokens(Tokens::External).token_jump_cap(4);
    let capped = db.keyspace("capped", capped).unwrap();
    capped.put(token(2), b"a", b"1").unwrap();
    let refused = |number| {
        let mut batch = db.batch();
        batch.put(&capped, token(number), b"c", b"").unwrap();
        batch.expect(&capped, b"nothing", Expect::Present).unwrap().submit().unwrap()
    };
    let submitted = capped.submit_put(token(6), b"b", b"2").unwrap();
    let answer = refused(10);
    assert!(!answer.is_done() && !submitted.is_done(), "neither is durable");
    assert_err!(answer.wait(), Error::Conflict { .. });
    assert!(submitted.is_done(), "what the refusal rests on went first");
    let submitted = capped.submit_put(token(7), b"d", b"3").unwrap();
    sim.disk.fail(Fault::new(CallKind::SyncData, std::io::ErrorKind::Other));
    assert_err!(refused(11).wait(), Error::Indeterminate { .. });
    assert_err!(submitted.wait(), Error::Indeterminate { .. });
}

/// A floor whose sync failed may be gone after a reopen: nobody is told that it fenced him.
#[test]
fn d4_a_floor_whose_sync_failed_fences_nobody() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(5), b"a", b"1").unwrap();
    sim.disk.fail(Fault::new(CallKind::SyncData, std::io::ErrorKind::Other));
    assert_err!(ks.raise_all(token(9)), Error::Indeterminate { .. });
    assert_err!(ks.put(token(6), b"a", b"x"), Error::Poisoned { .. });
    assert_err!(ks.put(token(4), b"a", b"x"), Error::Fenced { mark, .. } if mark == token(5));
    assert_eq!(ks.mark(b"a").unwrap(), Some(token(5).into()));
    assert_eq!(ks.floor(), None);
}

/// D5, and turso 2091, redb 299: the marks of what was acknowledged stand, whatever the failed sync left.
#[test]
fn d5_after_a_failed_sync_nothing_is_acknowledged_until_the_store_is_reopened() {
    for failure in [SyncFailure::KeepNew, SyncFailure::RevertOld, SyncFailure::KeepPart { seed: 3 }] {
        let sim = Sim::new();
        let db = sim.open();
        let (ks, jobs_) = (rows(&db), jobs(&db));
        let lease = jobs_.lease(b"j").ttl(secs(10)).acquire().unwrap();
        ks.raise_all(token(3)).unwrap();
        ks.put(token(5), b"a", b"durable").unwrap();
        let pending = ks.submit_put(token(6), b"b", b"pending").unwrap();
        sim.disk.set_sync_failure(failure);
        sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
        assert!(!pending.is_done());
        assert_err!(ks.put(token(6), b"a", b"lost?"), Error::Indeterminate { .. });
        assert!(pending.is_done(), "the answer is there: nobody will ever know");
        assert_err!(pending.wait(), Error::Indeterminate { .. });
        assert!(matches!(db.health(), Health::Poisoned(cause) if cause.raw_os_error() == Some(5)));
        // The disk is fine again; the store is not.
        assert_err!(ks.put(token(7), b"a", b"x"), Error::Poisoned { .. });
        assert_err!(ks.submit_put(token(7), b"a", b"x"), Error::Poisoned { .. });
        assert_err!(ks.delete(token(7), b"a"), Error::Poisoned { .. });
        assert_err!(ks.raise_all(token(7)), Error::Poisoned { .. });
        assert_err!(ks.put(token(4), b"a", b"x"), Error::Fenced { .. });
        let fenced = db.stats().fenced;
        assert_err!(ks.raise_all(token(2)), Error::Fenced { .. });
        assert_eq!(db.stats().fenced, fenced + 1);
        assert_err!(jobs_.lease(b"k").acquire(), Error::Poisoned { .. });
        assert_err!(lease.renew(), Error::Poisoned { .. });
        assert_err!(db.advance_tokens(token(9)), Error::Poisoned { .. });
        assert_err!(db.keyspace("new", KeyspaceOptions::new()), Error::Poisoned { .. });
        assert_eq!(text(ks.get(b"a").unwrap()).as_deref(), Some("durable"));
        assert_eq!(ks.iter().count(), 1);
        assert_err!(db.close(), Error::Poisoned { .. });
        let db = sim.open();
        let ks = rows(&db);
        assert!(db.health().is_healthy());
        let seen = text(ks.get(b"a").unwrap());
        assert!(matches!(seen.as_deref(), Some("durable" | "lost?")), "{seen:?}");
        assert!(ks.mark(b"a").unwrap().unwrap().get() >= 5);
        ks.put(token(7), b"a", b"healed").unwrap();
        // What was found after the failure is on the disk for certain, also behind a power cut.
        let after = Sim::on(sim.disk.crash(Crash::None, 1));
        let db = after.options().deterministic(77).open("sim").unwrap();
        assert_eq!(text(rows(&db).get(b"a").unwrap()).as_deref(), Some("healed"));
    }
}

/// A close answers what nobody waited for, whether or not the disk takes it.
#[test]
fn d5_a_close_leaves_no_commit_without_an_answer() {
    for fails in [false, true] {
        let sim = Sim::new();
        let db = sim.open();
        let ks = rows(&db);
        let pending = ks.submit_put(token(1), b"a", b"pending").unwrap();
        assert!(!pending.is_done());
        if fails {
            sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
        }
        assert_eq!(db.close().is_err(), fails);
        assert!(pending.is_done());
        assert_eq!(pending.wait().is_err(), fails);
    }
}

/// RocksDB 11643: where space is given out late, a full disk shows in the sync; then nobody knows what was written.
#[test]
fn d5_a_full_disk_in_a_sync_poisons() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(1), b"a", b"durable").unwrap();
    sim.disk.fail(Fault::new(CallKind::SyncData, std::io::ErrorKind::StorageFull));
    assert_err!(ks.put(token(1), b"a", b"lost?"), Error::Indeterminate { .. });
    assert_err!(ks.put(token(1), b"b", b"x"), Error::Poisoned { .. });
    assert!(matches!(db.health(), Health::Poisoned(_)));
    assert_eq!(text(ks.get(b"a").unwrap()).as_deref(), Some("durable"));
    drop((ks, db));
    rows(&sim.open()).put(token(1), b"b", b"healed").unwrap();
}

/// Adopting a tail that only the cache holds is cut off at every call: no seal comes back without its frames.
#[test]
fn r1_a_store_opens_after_the_power_goes_while_a_tail_is_adopted() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(1), b"a", b"durable").unwrap();
    let pending: Vec<_> = (0..5u8).map(|n| ks.submit_put(token(1), &[n], &[n; 2000]).unwrap()).collect();
    sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
    assert_err!(ks.put(token(1), b"b", b"in the cache"), Error::Indeterminate { .. });
    drop(pending);
    let killed = sim.disk.kill();
    let calls = {
        let image = killed.kill();
        let before = image.calls();
        Sim::on(image.clone()).options().deterministic(5).open("sim").unwrap();
        before..image.calls()
    };
    for call in calls {
        let image = killed.kill();
        image.stop_at(call);
        drop(Sim::on(image.clone()).options().deterministic(5).open("sim"));
        for seed in 0..20 {
            for policy in [Crash::Subset { percent: 50 }, Crash::OneMissing, Crash::Reverse] {
                let after = Sim::on(image.crash(policy, seed));
                let db = after.options().deterministic(6).open("sim");
                let db = db.unwrap_or_else(|error| panic!("call {call}, seed {seed}, {policy:?}: {error}"));
                assert!(rows(&db).contains_key(b"a").unwrap());
            }
        }
    }
}

/// Who may not write cannot put on the disk what only the cache holds, and so does not show it.
#[test]
fn r1_a_read_only_open_shows_only_what_is_proven() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(1), b"a", b"durable").unwrap();
    sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
    assert_err!(ks.put(token(1), b"b", b"in the cache"), Error::Indeterminate { .. });
    let image = Sim::on(sim.disk.kill());
    let seen = image.options().read_only().deterministic(5).open("sim").unwrap();
    assert_eq!(seen.report().unproven_frames, 1);
    let keys = rows(&seen);
    assert!(keys.contains_key(b"a").unwrap());
    assert!(!keys.contains_key(b"b").unwrap(), "the power may go, and it with it");
    drop((keys, seen));
    assert!(rows(&image.options().deterministic(6).open("sim").unwrap()).contains_key(b"b").unwrap());
}

/// R4 and redb 299: bytes which only the cache holds are put on the disk before an answer rests on them.
#[test]
fn r1_what_an_open_shows_survives_a_power_cut_right_behind_it() {
    for failure in [SyncFailure::KeepNew, SyncFailure::RevertOld, SyncFailure::KeepPart { seed: 3 }] {
        let sim = Sim::new();
        let db = sim.open();
        let ks = rows(&db);
        ks.put(token(1), b"a", b"1").unwrap();
        sim.disk.set_sync_failure(failure);
        sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
        assert_err!(ks.put(token(2), b"a", b"2"), Error::Indeterminate { .. });
        drop((ks, db));
        let killed = Sim::on(sim.disk.kill());
        let db = killed.options().deterministic(50).open("sim").unwrap();
        let shown = text(rows(&db).get(b"a").unwrap());
        let cut = Sim::on(killed.disk.crash(Crash::None, 0));
        let db = cut.options().deterministic(60).open("sim").unwrap();
        assert_eq!(text(rows(&db).get(b"a").unwrap()), shown, "{failure:?}");
    }
}

/// Rocksdb 919 and others: a full disk is not a broken one.
#[test]
fn a_full_disk_refuses_puts_only_and_freed_space_heals_it() {
    let sim = Sim::new();
    let db = sim.open();
    let (ks, jobs_) = (rows(&db), jobs(&db));
    let used: usize = sim.disk.file_names().iter().map(|name| sim.disk.read_file(name).unwrap().len()).sum();
    sim.disk.set_budget(Some(used as u64 + (40 << 10)));
    let mut written = 0u32;
    let error = loop {
        match ks.put(token(1), &written.to_be_bytes(), &[7; 1000]) {
            Ok(_) => written += 1,
            Err(error) => break error,
        }
    };
    assert!(error.is_retryable());
    assert_eq!(error.outcome(), Outcome::NotApplied);
    assert_err!(Err::<(), _>(error), Error::NoSpace { .. });
    let health = db.health();
    assert!(health.is_writable());
    let Health::Degraded(warnings) = &health else { panic!("{health}") };
    assert!(matches!(warnings[..], [Warning::NoSpace(bytes)] if bytes > 0), "{health}");
    assert_eq!(ks.iter().count() as u32, written);
    // What frees space or keeps the fences working goes on.
    ks.delete(token(1), &0u32.to_be_bytes()).unwrap();
    ks.raise(token(2), &1u32.to_be_bytes()).unwrap();
    let lease = jobs_.lease(b"j").acquire().unwrap();
    jobs_.raise_all(lease.token()).unwrap();
    assert_err!(ks.put(token(2), &1u32.to_be_bytes(), &[7; 1000]), Error::NoSpace { .. });
    sim.disk.set_budget(None);
    ks.put(token(2), &1u32.to_be_bytes(), &[8; 1000]).unwrap();
    assert!(db.health().is_healthy(), "{}", db.health());
    let db = sim.reopen(db);
    assert_eq!(rows(&db).iter().count() as u32, written - 1);
}

/// RocksDB 919: when puts have taken all that they may, and nothing fits the active segment any more, there is
/// still room for deletes that fill a segment of their own.
#[test]
fn a_disk_that_puts_have_filled_to_the_brim_takes_deletes_raises_and_grants() {
    let sim = Sim::new();
    let db = sim.open();
    let (ks, jobs_) = (rows(&db), jobs(&db));
    let used: usize = sim.disk.file_names().iter().map(|name| sim.disk.read_file(name).unwrap().len()).sum();
    sim.disk.set_budget(Some(used as u64 + (70 << 10)));
    let mut keys: Vec<Vec<u8>> = Vec::new();
    for (key_bytes, value_bytes) in [(600, 1000), (600, 200), (600, 1), (1, 1)] {
        loop {
            let key = [&keys.len().to_be_bytes()[..], &vec![b'k'; key_bytes]].concat();
            if ks.put(token(1), &key, &vec![7; value_bytes]).is_err() {
                break;
            }
            keys.push(key);
        }
    }
    assert_err!(ks.put(token(1), b"one more key", b""), Error::NoSpace { .. });
    // A put is one also beside a delete.
    let mut both = db.batch();
    both.delete(&ks, token(1), &keys[0]).unwrap().put(&ks, token(1), b"one more key", &[7; 1000]).unwrap();
    assert_err!(both.commit(), Error::NoSpace { .. });
    for (n, key) in keys.iter().enumerate() {
        let deleted = ks.delete(token(1), key);
        deleted.unwrap_or_else(|error| panic!("delete {n} of {}: {error}", keys.len()));
        ks.raise(token(2), key).unwrap();
    }
    let lease = jobs_.lease(b"j").acquire().unwrap();
    jobs_.raise_all(lease.token()).unwrap();
    assert_eq!(ks.iter().count(), 0);
}

/// Of the list as well: whether it is on the disk is not known after a failed sync, and nothing may rest on it.
#[test]
fn d5_a_failed_sync_of_the_list_poisons() {
    let sim = Sim::new();
    // Opened again, for the list was made under another name.
    let db = sim.reopen(sim.open());
    let ks = rows(&db);
    ks.put(token(1), b"first", b"").unwrap();
    sim.disk.fail(Fault::errno(CallKind::SyncData, 5).on("STORE"));
    let mut written = 0u32;
    while ks.put(token(1), &written.to_be_bytes(), &[7; 900]).is_ok() {
        written += 1;
        assert!(written < 1000, "no segment was listed");
    }
    assert_eq!(sim.disk.faults_fired(), 1);
    assert_err!(ks.put(token(1), b"x", b""), Error::Poisoned { .. });
    assert!(matches!(db.health(), Health::Poisoned(_)));
    drop((ks, db));
    assert_eq!(rows(&sim.open()).iter().count() as u32, written + 1);
}

/// Raft-engine 344, redb 620.
#[test]
fn a_store_opens_on_a_full_disk() {
    let mut sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    for n in 0..60u32 {
        ks.put(token(1), &n.to_be_bytes(), &[7; 900]).unwrap();
    }
    drop((ks, db));
    sim.disk = sim.disk.crash(Crash::All, 3);
    sim.disk.set_budget(Some(0));
    let db = sim.open();
    assert_eq!(rows(&db).iter().count(), 60);
    rows(&db).delete(token(1), &0u32.to_be_bytes()).unwrap();
    db.close().unwrap();
    let db = sim.options().read_only().open("sim").unwrap();
    assert_eq!(rows(&db).iter().count(), 59);
}

fn filled(puts: u32) -> Sim {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    for n in 0..puts {
        ks.put(token(n as u64 + 1), &n.to_be_bytes(), &vec![n as u8; 100 + 13 * n as usize % 700]).unwrap();
    }
    db.close().unwrap();
    sim
}

/// R2: damage in the middle is named and nothing is touched; tikv 14304, rocksdb 7701.
#[test]
fn r2_damage_to_a_sealed_segment_is_named_and_the_files_are_left_alone() {
    let sim = filled(80);
    let first = sim.disk.read_file("000001.seg").unwrap();
    let mut named = 0;
    for offset in (4096..first.len() as u64).step_by(37) {
        let hurt = Sim::on(sim.disk.crash(Crash::None, 0));
        hurt.disk.flip_bit("000001.seg", offset, 3);
        let before = hurt.disk.image_hash();
        let answer = hurt.options().deterministic(5).open("sim").and_then(|db| {
            let found = rows(&db).iter().map(|item| item.map(|(key, value)| (key, value.into_vec())));
            found.collect::<Result<Vec<_>>>()
        });
        match answer {
            Ok(found) => assert_eq!(found.len(), 80, "a byte of padding or of a cache, at {offset}"),
            Err(Error::Corrupt { file, .. }) => {
                assert_eq!(file, "000001.seg");
                named += 1;
                // Found while opening: nothing was written.
                if hurt.options().deterministic(6).open("sim").is_err() {
                    assert_eq!(hurt.disk.image_hash(), before, "at {offset}");
                }
            }
            Err(other) => panic!("{other:?} at {offset}"),
        }
    }
    assert!(named > 100, "{named}");
}

#[test]
fn r2_a_missing_or_cut_segment_is_named() {
    let sim = filled(80);
    let segments: Vec<_> = sim.disk.file_names().into_iter().filter(|name| name.ends_with(".seg")).collect();
    assert!(segments.len() >= 4, "{segments:?}");
    for name in &segments[..3] {
        let hurt = Sim::on(sim.disk.crash(Crash::None, 0));
        hurt.disk.remove_file(name);
        let error = hurt.options().deterministic(5).open("sim").unwrap_err();
        assert!(matches!(&error, Error::Corrupt { file, .. } if file == name), "{error:?}");
        for len in [0, 1, 4095, 4096, 5000] {
            let hurt = Sim::on(sim.disk.crash(Crash::None, 0));
            hurt.disk.truncate(name, len);
            assert_err!(hurt.options().deterministic(5).open("sim"), Error::Corrupt { .. });
        }
    }
}

/// Garnet 2150: an old copy of the list knows fewer segments, and nothing of the marks in the others.
#[test]
fn r2_a_list_from_before_a_segment_was_made_is_named() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let fill = |from: u32| {
        (from..from + 40).for_each(|n| {
            ks.put(token(1), &n.to_be_bytes(), &[7; 900]).unwrap();
        })
    };
    fill(0);
    let old = sim.disk.read_file("STORE").unwrap();
    fill(40);
    let image = sim.disk.kill();
    image.write_file("STORE", &old);
    let before = image.image_hash();
    assert_err!(Sim::on(image.clone()).options().deterministic(5).open("sim"), Error::Corrupt { file, .. } if file == "STORE");
    assert_eq!(image.image_hash(), before, "the files are left alone");
}

/// A store at rest says that its last group was durable: from then on damage to it is named, not cut off.
#[test]
fn r2_the_last_group_of_a_store_at_rest_is_proven() {
    let sim = Sim::new();
    let db = sim.open_threaded();
    let lsn = rows(&db).put(token(1), b"last", &[b'L'; 300]).unwrap();
    let begun = std::time::Instant::now();
    // The frame that says so takes an lsn.
    while db.last_lsn() <= lsn {
        assert!(begun.elapsed() < secs(20), "a store at rest writes no evidence");
        std::thread::yield_now();
    }
    let image = sim.disk.kill();
    let is_there = |name: &String| image.read_file(name).is_some_and(|bytes| find(&bytes).is_some());
    fn find(bytes: &[u8]) -> Option<usize> {
        bytes.windows(300).position(|bytes| bytes == [b'L'; 300])
    }
    let name = image.file_names().into_iter().find(is_there).expect("the value lies in a segment");
    let offset = find(&image.read_file(&name).unwrap()).unwrap();
    image.flip_bit(&name, offset as u64, 0);
    assert_err!(Sim::on(image).options().deterministic(5).open("sim"), Error::Corrupt { file, .. } if file == name);
}

/// R3: bytes of another store, life or place never verify.
#[test]
fn r3_a_segment_of_another_store_in_place_of_ones_own_is_refused() {
    let (sim, other) = (filled(40), Sim::new());
    let options = other.options().deterministic(424_242);
    let db = options.open("sim").unwrap();
    let ks = rows(&db);
    for n in 0..40u32 {
        ks.put(token(100), &n.to_be_bytes(), &[9; 400]).unwrap();
    }
    db.close().unwrap();
    let foreign = other.disk.read_file("000001.seg").unwrap();
    sim.disk.write_file("000001.seg", &foreign);
    assert_err!(sim.options().open("sim"), Error::Corrupt { .. });
    // Nor a segment under the name of another of the same store.
    let sim = filled(80);
    let second = sim.disk.read_file("000002.seg").unwrap();
    sim.disk.write_file("000001.seg", &second);
    assert_err!(sim.options().open("sim"), Error::Corrupt { .. });
}

#[test]
fn r4_opening_twice_is_opening_once() {
    let mut sim = filled(30);
    let db = sim.open();
    rows(&db).put(token(100), b"tail", b"x").unwrap();
    drop(db);
    let seen = |db: &Db| rows(db).iter().map(Result::unwrap).collect::<Vec<_>>();
    let first = seen(&sim.power_cut());
    assert_eq!(first.len(), 31);
    let segments = |disk: &SimDisk| {
        let names = disk.file_names().into_iter().filter(|name| name.ends_with(".seg"));
        names.map(|name| (disk.read_file(&name), name)).collect::<Vec<_>>()
    };
    let files = segments(&sim.disk);
    for _ in 0..3 {
        assert_eq!(seen(&sim.power_cut()), first);
        assert_eq!(segments(&sim.disk), files, "an open without a write changes no segment");
    }
    let db = sim.power_cut();
    db.close().unwrap();
    assert_eq!(segments(&sim.disk), files, "nor does a close");
}

/// R1: a list of segments of which only one copy was written names a segment that must then be there.
#[test]
fn r1_a_store_opens_after_any_failure_of_the_disk_while_a_segment_was_made() {
    for (call, file) in [(CallKind::WriteAt, "STORE"), (CallKind::SyncData, "STORE"), (CallKind::WriteAt, "")]
    {
        for nth in 0..4 {
            let sim = Sim::new();
            // Opened again, for STORE was made under another name.
            let db = sim.reopen(sim.open());
            let ks = rows(&db);
            let fault = Fault::errno(call, 5).nth(nth);
            let fault = if file.is_empty() { fault } else { fault.on(file) };
            sim.disk.fail(fault.clone());
            let mut written = 0u32;
            let error = loop {
                // A second copy of the list that fails is repaired by the next change: nobody need hear of it.
                if written == 200 {
                    break None;
                }
                match ks.put(token(1), &written.to_be_bytes(), &[1; 900]) {
                    Ok(_) => written += 1,
                    Err(error) => break Some(error),
                }
            };
            assert!(sim.disk.faults_fired() > 0, "{fault:?} never hits");
            let expected = matches!(
                error,
                None | Some(Error::Io { .. } | Error::Indeterminate { .. } | Error::Poisoned { .. })
            );
            assert!(expected, "{error:?}");
            drop((ks, db));
            for disk in [sim.disk.kill(), sim.disk.crash(Crash::None, 0), sim.disk.crash(Crash::All, 0)] {
                let left = Sim::on(disk);
                let db = left.options().deterministic(500).open("sim").unwrap();
                let found = rows(&db).iter().count() as u32;
                assert!(found == written || found == written + 1, "{found} of {written}");
            }
        }
    }
}
