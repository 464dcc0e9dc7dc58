//! C4: a mark is dropped only under a durable floor, and that floor is below every lease that is live or may be.

use crate::store::{Sim, secs, token};
use crate::{churn, external, floor_of, keep, key, prefix, use_once, whole};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use tidewall::{Error, KeyspaceOptions, LastOperation, Options, Raised, Scope, Ttl};

#[test]
fn marks_that_nobody_needs_become_a_floor_below_what_is_held() {
    let mut sim = Sim::new();
    let db = sim.open();
    for ks in [key(&db, "keys"), prefix(&db, "jobs")] {
        use_once(&ks, "before", 20);
        let held = ks.lease(b"held/").ttl(Ttl::INFINITE).acquire().unwrap();
        let number = held.token().get();
        use_once(&ks, "after", 20);
        churn(&db);
        db.compact().unwrap();
        let floor = ks.floor().expect("twenty marks were folded");
        assert!(floor.is_folded);
        assert_eq!(floor.mark.get(), number - 1, "exactly the largest mark that it replaces");
        assert!(db.stats().held_back_marks >= 20, "{:?}", db.stats());
        ks.put(held.token(), b"held/", b"still mine").unwrap();
        // A token equal to the floor is fenced on every fence: nobody knows any more which one it was for.
        let equal = token(number - 1);
        assert_err!(
            ks.put(equal, b"before-3/x", b"late"),
            Error::Fenced { last_operation: LastOperation::Unknown, .. }
        );
        assert_err!(ks.put(equal, b"never seen/", b"late"), Error::Fenced { .. });
        assert_err!(ks.raise(equal, b"other/"), Error::Fenced { .. });
        // Marks above it are still their own.
        assert_eq!(ks.mark(b"after-19/x").unwrap().unwrap().get(), number + 20);
        // A later grant is above it, on an old fence too.
        let again = ks.lease(b"before-3/x").acquire().unwrap();
        ks.put(again.token(), b"before-3/x", b"new").unwrap();

        held.release().unwrap();
        again.release().unwrap();
        churn(&db);
        db.compact().unwrap();
        churn(&db);
        db.compact().unwrap();
        assert!(floor_of(&ks) >= number + 20, "{:?}", ks.floor());
        assert_eq!(db.stats().held_back_marks, 0);
        // A fence with a key keeps its own mark, under the floor or not.
        assert_eq!(ks.get(b"before-3/x").unwrap().unwrap().bytes(), b"new");
        assert!(floor_of(&ks) <= ks.mark(b"before-3/x").unwrap().unwrap().get());
    }
    drop(db);
    let db = sim.power_cut();
    for ks in [key(&db, "keys"), prefix(&db, "jobs")] {
        assert!(ks.floor().unwrap().is_folded);
        assert_err!(ks.put(token(floor_of(&ks)), b"before-3/y", b"late"), Error::Fenced { .. });
    }
}

/// Until the ttl of a grant from before an open is certainly over, its holder may be at work: also when the store was
/// compacted in the meantime, and when the grant itself was carried.
#[test]
fn a_grant_from_before_an_open_pins_the_floor_for_its_ttl() {
    for carried in [false, true] {
        for clean in [false, true] {
            let mut sim = Sim::new();
            let db = sim.open();
            let jobs = prefix(&db, "jobs");
            let lease = keep(jobs.lease(b"held/").ttl(secs(100)).acquire().unwrap());
            jobs.put(token(lease), b"held/x", b"before").unwrap();
            jobs.delete(token(lease), b"held/x").unwrap();
            use_once(&jobs, "once", 30);
            if carried {
                churn(&db);
                db.compact().unwrap();
                assert!(floor_of(&jobs) < lease);
            }
            drop(jobs);
            let db = if clean { sim.reopen(db) } else { sim.power_cut() };
            let jobs = prefix(&db, "jobs");
            for _ in 0..3 {
                use_once(&jobs, "then", 30);
                churn(&db);
                db.compact().unwrap();
                assert!(floor_of(&jobs) < lease, "{:?} over {lease}, carried {carried}", jobs.floor());
                jobs.put(token(lease), b"held/x", b"it does not know of the restart").unwrap();
                jobs.delete(token(lease), b"held/x").unwrap();
            }
            sim.clock.advance(secs(99));
            churn(&db);
            db.compact().unwrap();
            assert!(floor_of(&jobs) < lease);
            sim.clock.advance(secs(1));
            churn(&db);
            db.compact().unwrap();
            churn(&db);
            db.compact().unwrap();
            assert!(floor_of(&jobs) >= lease, "{:?}: nothing pins it any more", jobs.floor());
            assert_err!(jobs.put(token(lease), b"held/x", b"late"), Error::Fenced { .. });
        }
    }
}

/// With a grace an open keeps the fence itself as well, for its holder to come back, and not for longer than the lease.
#[test]
fn a_fence_that_an_open_keeps_pins_the_floor_until_its_lease_is_over() {
    let sim = Sim::new();
    let open = || sim.options().lease_grace(secs(60)).open("sim").unwrap();
    let db = open();
    let lease = keep(prefix(&db, "jobs").lease(b"held/").ttl(secs(60)).acquire().unwrap());
    db.close().unwrap();
    let db = open();
    let jobs = prefix(&db, "jobs");
    use_once(&jobs, "once", 5);
    churn(&db);
    db.compact().unwrap();
    assert_eq!((jobs.holders(b"").unwrap().len(), floor_of(&jobs)), (1, 0));
    sim.clock.advance(secs(200));
    churn(&db);
    db.compact().unwrap();
    assert!(floor_of(&jobs) >= lease + 5, "{:?}", jobs.floor());
}

/// Somebody else has the fence now, so the one from before the open pins nothing.
#[test]
fn a_superseded_grant_from_before_an_open_pins_nothing() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = prefix(&db, "jobs");
    let lease = keep(jobs.lease(b"held/").ttl(secs(1_000)).acquire().unwrap());
    drop(jobs);
    let db = sim.reopen(db);
    let jobs = prefix(&db, "jobs");
    jobs.lease(b"held/").acquire().unwrap().release().unwrap();
    use_once(&jobs, "once", 30);
    churn(&db);
    db.compact().unwrap();
    churn(&db);
    db.compact().unwrap();
    assert!(floor_of(&jobs) > lease + 20, "{:?}", jobs.floor());
}

#[test]
fn a_lease_that_ran_out_is_not_renewed_above_the_floor() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = prefix(&db, "jobs");
    let lease = jobs.lease(b"held/").ttl(secs(10)).acquire().unwrap();
    use_once(&jobs, "once", 30);
    sim.clock.advance(secs(11));
    churn(&db);
    db.compact().unwrap();
    assert!(floor_of(&jobs) > lease.token().get());
    assert!(!lease.is_live());
    assert!(lease.renew().is_err());
    // A clock that goes back does not bring it back.
    sim.clock.set(0);
    assert!(lease.renew().is_err());
    assert_err!(jobs.put(lease.token(), b"held/", b"late"), Error::Fenced { .. });
}

#[test]
fn a_keyspace_of_external_tokens_folds_only_where_its_user_says() {
    let mut sim = Sim::new();
    let mut db = sim.open();
    for (at, scope) in [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace].into_iter().enumerate() {
        let open = |db: &tidewall::Db| {
            let options = KeyspaceOptions::new().scope(scope).tokens(tidewall::Tokens::External);
            db.keyspace(&format!("rows-{at}"), options).unwrap()
        };
        let rows = open(&db);
        for n in 0..40u64 {
            let key = format!("{n}/x");
            let number = if scope == Scope::Keyspace { 139 } else { 100 + n };
            rows.put(token(number), key.as_bytes(), b"x").unwrap();
            rows.delete(token(number), key.as_bytes()).unwrap();
        }
        drop(rows);
        for _ in 0..3 {
            churn(&db);
            db.compact().unwrap();
            assert_eq!(open(&db).floor(), None, "{scope:?}");
            let mark = open(&db).mark(b"39/x").unwrap().unwrap().get();
            assert_eq!(mark, 139);
            if scope != Scope::Keyspace {
                assert_eq!(open(&db).mark(b"7/x").unwrap().unwrap().get(), 107, "{scope:?}");
            }
            db = sim.power_cut();
        }
        let rows = open(&db);
        assert_eq!(rows.retire_below(token(121)).unwrap(), Raised::Now(db.last_lsn()));
        let last = db.last_lsn();
        assert_eq!(rows.retire_below(token(121)).unwrap(), Raised::Already);
        assert_eq!(db.last_lsn(), last);
        churn(&db);
        db.compact().unwrap();
        assert_eq!(floor_of(&rows), 120);
        assert_eq!(rows.mark(b"39/x").unwrap().unwrap().get(), 139, "above it: still there");
        assert_err!(rows.put(token(120), b"7/x", b"late"), Error::Fenced { .. });
        if scope != Scope::Keyspace {
            rows.put(token(121), b"7/x", b"new").unwrap();
            assert_err!(rows.put(token(120), b"7/x", b"late"), Error::Fenced { .. });
        }
    }
}

/// Nobody holds the fence any more, and its mark is the highest: while there is a key in it, whoever wrote that may go on.
#[test]
fn a_fence_with_a_key_keeps_its_mark_and_folds_once_the_key_is_gone() {
    let sim = Sim::new();
    let db = sim.open();
    let spaces: [(_, &[u8]); 3] =
        [(key(&db, "keys"), b"kept/x"), (prefix(&db, "jobs"), b"kept/"), (whole(&db, "all"), b"")];
    for (ks, fence) in spaces {
        let lease = ks.lease(fence).acquire().unwrap();
        let token = lease.token();
        ks.put(token, b"kept/x", b"value").unwrap();
        lease.release().unwrap();
        for _ in 0..2 {
            churn(&db);
            db.compact().unwrap();
            assert_eq!(ks.floor(), None, "{}", ks.name());
            ks.put(token, b"kept/x", b"again").unwrap();
        }
        ks.delete(token, b"kept/x").unwrap();
        churn(&db);
        db.compact().unwrap();
        assert_eq!(floor_of(&ks), token.get(), "{}", ks.name());
    }
}

/// A floor let the token in, so nothing but the versions of the key ever carried its mark.
#[test]
fn a_mark_that_only_a_delete_carries_folds() {
    let sim = Sim::new();
    let db = sim.open();
    let keys = key(&db, "keys");
    let boss = key(&db, "other").lease(b"boss").acquire().unwrap();
    keys.raise_all(boss.token()).unwrap();
    keys.put(boss.token(), b"new", b"value").unwrap();
    keys.delete(boss.token(), b"new").unwrap();
    churn(&db);
    db.compact().unwrap();
    assert_eq!(keys.floor().unwrap().forgotten, Some(boss.token().into()));
}

/// Of one batch neither the mark nor the delete is the later one, and both have its token.
#[test]
fn a_mark_and_a_delete_of_one_batch_fold() {
    let sim = Sim::new();
    let db = sim.open();
    let keys = key(&db, "keys");
    let lease = keys.lease(b"job").acquire().unwrap();
    let token = lease.token();
    keys.put(token, b"job", b"value").unwrap();
    let mut batch = db.batch();
    batch.raise(&keys, token, b"job").unwrap().delete(&keys, token, b"job").unwrap().commit().unwrap();
    lease.release().unwrap();
    churn(&db);
    db.compact().unwrap();
    assert_eq!(floor_of(&keys), token.get());
}

/// One fence for the whole keyspace: its mark folds when it is empty, and a lease on it holds it.
#[test]
fn the_one_fence_of_a_keyspace_folds_like_others() {
    let mut sim = Sim::new();
    let db = sim.open();
    let all = whole(&db, "all");
    let lease = all.lease(b"").ttl(secs(10)).acquire().unwrap();
    all.put(lease.token(), b"a", b"x").unwrap();
    churn(&db);
    db.compact().unwrap();
    assert_eq!(all.floor(), None, "it holds a key, and is held");
    all.delete(lease.token(), b"a").unwrap();
    churn(&db);
    db.compact().unwrap();
    assert_eq!(all.floor(), None, "it is held");
    lease.release().unwrap();
    for _ in 0..3 {
        churn(&db);
        db.compact().unwrap();
    }
    assert_eq!(floor_of(&all), 1);
    drop((all, db));
    let db = sim.power_cut();
    let all = whole(&db, "all");
    assert_err!(all.put(token(1), b"a", b"late"), Error::Fenced { .. });
    assert_eq!(all.lease(b"").acquire().unwrap().token().get(), 2);
}

/// Who renews in time is never fenced by a floor, whatever folds meanwhile; who was told that its lease is over is
/// never told otherwise. The clock jumps so that every other renewal comes about when the time is up.
#[test]
fn renewals_race_with_folding() {
    let sim = Sim::new();
    let db = Options::new()
        .storage(sim.disk.clone())
        .clock(sim.clock.clone())
        .segment_bytes(16 << 10)
        .compaction(false)
        .open("sim")
        .unwrap();
    let jobs = prefix(&db, "jobs");
    let stop = AtomicBool::new(false);
    let (mut renewed, mut lost) = (0u32, 0u32);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                use_once(&jobs, &format!("once-{n}"), 20);
                db.compact().unwrap();
            }
        });
        let _stop = StopOnDrop(&stop);
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_millis(2_500) {
            let lease = jobs.lease(b"held/").ttl(secs(10)).acquire().unwrap();
            for round in 0..4 {
                // In the last round the time is up, while the compaction may be asking whether it is.
                sim.clock.advance(std::time::Duration::from_millis(if round < 3 { 9_990 } else { 10_001 }));
                match lease.renew() {
                    Ok(()) => {
                        renewed += 1;
                        let put = jobs.put(lease.token(), b"held/x", b"mine");
                        assert!(put.is_ok(), "renewed and then {put:?}");
                        jobs.delete(lease.token(), b"held/x").unwrap();
                    }
                    Err(_) => {
                        lost += 1;
                        assert!(!lease.is_live() && lease.renew().is_err());
                        break;
                    }
                }
            }
        }
    });
    assert!(renewed > 20 && db.stats().folds > 5, "{renewed} renewed, {lost} lost, {:?}", db.stats());
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The floor is on the disk before a mark under it is forgotten: a failed sync at any call of the compaction lets
/// nobody in.
#[test]
fn a_mark_is_not_dropped_before_its_floor_is_durable() {
    use tidewall::storage::{CallKind, Crash, Fault};
    let prepared = || {
        let sim = Sim::new();
        let db = sim.open();
        let jobs = prefix(&db, "jobs");
        use_once(&jobs, "once", 30);
        churn(&db);
        (sim, db)
    };
    let (sim, db) = prepared();
    let before = sim.disk.calls_of(CallKind::SyncData);
    db.compact().unwrap();
    let syncs = sim.disk.calls_of(CallKind::SyncData) - before;
    for sync in 0..syncs {
        let (sim, db) = prepared();
        let seen: Vec<_> = (0..30).map(|n| mark(&db, n)).collect();
        sim.disk.fail(Fault::new(CallKind::SyncData, std::io::ErrorKind::Other).nth(sync));
        let failed = db.compact();
        assert_eq!(sim.disk.faults_fired(), 1, "sync {sync}");
        // What is seen now, of a store that may be poisoned, and what comes back, is never lower.
        let now: Vec<_> = (0..30).map(|n| mark(&db, n)).collect();
        assert!(now.iter().zip(&seen).all(|(now, seen)| now >= seen), "sync {sync}: {failed:?}");
        for image in [sim.disk.crash(Crash::None, 1), sim.disk.kill()] {
            let db = Sim::on(image).options().deterministic(77_000 + sync).open("sim").unwrap();
            let then: Vec<_> = (0..30).map(|n| mark(&db, n)).collect();
            assert!(
                then.iter().zip(&now).all(|(then, now)| then >= now),
                "sync {sync}: {now:?}, then {then:?}"
            );
        }
    }
    assert!(syncs > 5);

    fn mark(db: &tidewall::Db, n: u32) -> u64 {
        prefix(db, "jobs").mark(format!("once-{n}/").as_bytes()).unwrap().map_or(0, |mark| mark.get())
    }
}

/// Marks of one keyspace fold, however long a leader of another one stays.
#[test]
fn a_long_lease_pins_only_its_own_keyspace() {
    let sim = Sim::new();
    let db = sim.open();
    let leader = key(&db, "leaders").lease(b"leader").ttl(secs(10)).acquire().unwrap();
    assert_eq!(leader.token().get(), 1);
    let jobs = key(&db, "jobs");
    use_once(&jobs, "once", 40);
    let rows = external(&db, "rows");
    rows.put(token(3), b"row", b"x").unwrap();
    churn(&db);
    db.compact().unwrap();
    churn(&db);
    db.compact().unwrap();
    assert!(floor_of(&jobs) >= 40, "{:?}", jobs.floor());
    assert_eq!(key(&db, "leaders").floor(), None);
    leader.renew().unwrap();
    key(&db, "leaders").put(leader.token(), b"leader", b"still").unwrap();
}
