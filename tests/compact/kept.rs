//! What compaction keeps of leases, and of keyspaces that wait for a floor.

use crate::store::{Sim, op, secs, token};
use crate::{churn, external, keep, key, prefix, use_once};
use std::io::ErrorKind;
use tidewall::storage::{CallKind, Fault, SimDisk};
use tidewall::{Db, Error, LastOperation, OwnerId, Restore, Ttl};

fn owner() -> OwnerId {
    OwnerId::new(77)
}

#[test]
fn a_grant_that_nobody_gave_back_keeps_its_fence_for_its_holder() {
    let sim = Sim::new();
    let db = sim.open();
    for ks in [key(&db, "keys"), prefix(&db, "jobs")] {
        let held = token(keep(ks.lease(b"k/").owner(owner()).ttl(secs(50)).acquire().unwrap()));
        // The state of the fence is that of a later op now, and yet the grant is still one.
        ks.put_operation(held, op(1), b"k/", b"x").unwrap();
        ks.raise(held, b"k/").unwrap();
        let free = ks.lease(b"free/").owner(owner()).ttl(secs(50)).acquire().unwrap();
        ks.put_operation(free.token(), op(1), b"free/", b"x").unwrap();
        free.release().unwrap();
    }
    for _ in 0..3 {
        churn(&db);
        assert!(db.compact().unwrap().segments > 0);
    }
    for (name, first) in [("keys", 1), ("jobs", 3)] {
        let fork = sim.fork();
        let db = fork.options().lease_grace(secs(60)).open("sim").unwrap();
        let ks = if name == "keys" { key(&db, name) } else { prefix(&db, name) };
        drop(ks.lease(b"free/").try_acquire().expect("what was given back does not come back"));
        assert_err!(ks.lease(b"k/").try_acquire(), Error::Held { owner: found, .. } if found == owner());
        // Also after further rounds in this life.
        churn(&db);
        db.compact().unwrap();
        assert_err!(ks.lease(b"k/").try_acquire(), Error::Held { .. });
        let resumed = ks.lease(b"k/").owner(owner()).resume(token(first)).try_acquire().unwrap();
        assert!(resumed.token().get() > first);
        // The grace is over with the ttl: the next one gets it.
        let fork = sim.fork();
        let db = fork.options().lease_grace(secs(60)).open("sim").unwrap();
        let ks = if name == "keys" { key(&db, name) } else { prefix(&db, name) };
        fork.clock.advance(secs(51));
        drop(ks.lease(b"k/").try_acquire().expect("the grace is over"));
    }
}

/// The record that a lease was given back may be carried in front of, or behind, the grant itself.
#[test]
fn what_was_given_back_does_not_come_back_in_any_order() {
    for order in 0..16 {
        let sim = Sim::new();
        let db = sim.open();
        let rows = external(&db, "rows");
        let cold = |n: u8, count: u8| {
            for m in 0..count {
                rows.put(token(1), &[n, m], &crate::FILL).unwrap();
            }
        };
        if order & 1 == 1 {
            cold(1, 14);
        }
        let keys = |db: &Db| if order & 4 == 4 { key(db, "keys") } else { prefix(db, "jobs") };
        let lease = keys(&db).lease(b"k").owner(owner()).ttl(secs(50)).acquire().unwrap();
        if order & 8 == 8 {
            keys(&db).put_operation(lease.token(), op(1), b"k", b"x").unwrap();
        }
        if order & 2 == 2 {
            cold(2, 14);
        }
        churn(&db);
        db.compact().unwrap();
        lease.release().unwrap();
        for _ in 0..4 {
            churn(&db);
            db.compact().unwrap();
            let db = sim.fork().options().lease_grace(secs(60)).open("sim").unwrap();
            drop(keys(&db).lease(b"k").try_acquire().expect("it was given back"));
        }
        // Once more, by a life that knows of it only from the log.
        let db = sim.reopen(db);
        for _ in 0..3 {
            churn(&db);
            db.compact().unwrap();
            let db = sim.fork().options().lease_grace(secs(60)).open("sim").unwrap();
            drop(keys(&db).lease(b"k").try_acquire().expect("it was given back"));
        }
    }
}

/// A release is for the grant that set the mark; of earlier ones nobody asks any more, nor of the grants themselves.
#[test]
fn of_many_grants_and_releases_of_a_fence_the_last_are_kept() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = prefix(&db, "jobs");
    // Pins the floor.
    keep(jobs.lease(b"held/").ttl(Ttl::INFINITE).acquire().unwrap());
    let rows = external(&db, "rows");
    for _ in 0..1_000 {
        jobs.lease(b"k/").acquire().unwrap().release().unwrap();
        // The release rides with it.
        rows.put(token(1), b"row", b"x").unwrap();
    }
    keep(jobs.lease(b"k/").acquire().unwrap());
    churn(&db);
    let before = db.stats().carried_bytes;
    db.compact().unwrap();
    let carried = db.stats().carried_bytes - before;
    // The three values of the churn among them.
    assert!((2_700..6_000).contains(&carried), "{carried} bytes");
}

/// Nobody gave it back, so the next open would wait for it once more.
#[test]
fn a_grant_whose_lease_ran_out_is_carried_as_a_mark() {
    let sim = Sim::new();
    let db = sim.open();
    for ks in [key(&db, "keys"), prefix(&db, "jobs")] {
        // Pins the floor.
        keep(ks.lease(b"held/").ttl(Ttl::INFINITE).acquire().unwrap());
        keep(ks.lease(b"k/").ttl(secs(50)).acquire().unwrap());
    }
    sim.clock.advance(secs(51));
    churn(&db);
    db.compact().unwrap();
    let db = sim.fork().options().lease_grace(secs(60)).open("sim").unwrap();
    for ks in [key(&db, "keys"), prefix(&db, "jobs")] {
        drop(ks.lease(b"k/").try_acquire().expect("it was over"));
        assert_err!(ks.lease(b"held/").try_acquire(), Error::Held { .. });
    }
}

#[test]
fn a_lease_without_an_end_stays_listed_until_it_is_broken() {
    let mut sim = Sim::new();
    let mut db = sim.open();
    let lease = keep(key(&db, "keys").lease(b"k").owner(owner()).ttl(Ttl::INFINITE).acquire().unwrap());
    for round in 0..5 {
        let keys = key(&db, "keys");
        use_once(&keys, "once", 30);
        churn(&db);
        db.compact().unwrap();
        assert!(crate::floor_of(&keys) < lease, "round {round}: a floor over a lease without an end");
        let holders = keys.holders(b"").unwrap();
        assert_eq!(holders.len(), 1, "round {round}");
        assert_eq!(holders[0].token.get(), lease);
        db = if round % 2 == 0 { sim.power_cut() } else { sim.reopen(db) };
    }
    let keys = key(&db, "keys");
    keys.break_lease(b"k", "gone").unwrap().expect("it was held");
    churn(&db);
    db.compact().unwrap();
    churn(&db);
    db.compact().unwrap();
    assert!(crate::floor_of(&keys) > lease, "nothing pins the floor any more");
    let db = sim.power_cut();
    assert!(key(&db, "keys").holders(b"").unwrap().is_empty());
}

/// A restored keyspace of external tokens admits nothing until it is told the present token; that it was told is in
/// a floor, that it has to be told in the op that created it again.
#[test]
fn a_closed_keyspace_stays_as_it_is() {
    for floor_before in [false, true] {
        let sim = Sim::new();
        let db = sim.open();
        let rows = external(&db, "rows");
        rows.put(token(7), b"row", b"x").unwrap();
        if floor_before {
            rows.raise_all(token(7)).unwrap();
        }
        db.checkpoint_into(sim.disk.dir("copy")).unwrap();
        Restore::new().deterministic(5).run_on(sim.disk.dir("copy"), sim.disk.dir("new")).unwrap();
        let new = Sim::on(sim.disk.dir("new"));
        let mut db = new.options().deterministic(1_234).open("sim").unwrap();
        let shut =
            |db: &Db| assert_err!(external(db, "rows").put(token(8), b"row", b"y"), Error::NeedsFloor { .. });
        shut(&db);
        let work = |db: &Db| {
            let keys = key(db, "keys");
            for _ in 0..3 {
                use_once(&keys, "once", 60);
                db.compact().unwrap();
            }
        };
        work(&db);
        shut(&db);
        drop(db);
        db = new.options().deterministic(1_235).open("sim").unwrap();
        shut(&db);
        work(&db);
        shut(&db);
        // The floor may be the one it had before, and yet the keyspace needed it.
        external(&db, "rows").raise_all(token(7)).unwrap();
        external(&db, "rows").put(token(8), b"row", b"y").unwrap();
        for round in 0..3 {
            work(&db);
            external(&db, "rows").put(token(8), b"row", b"y").unwrap();
            drop(db);
            db = new.options().deterministic(500 + round).open("sim").unwrap();
            let again = external(&db, "rows").put(token(8), b"row", b"y");
            assert!(again.is_ok(), "{again:?} in round {round}, floor before: {floor_before}");
        }
    }
}

/// What a dropped state knew of operations is not known any more: never "nothing was committed".
#[test]
fn a_loser_is_not_told_that_nothing_was_committed_when_nobody_knows() {
    for folded in [false, true] {
        let sim = Sim::new();
        let db = sim.open();
        let jobs = prefix(&db, "jobs");
        let first = jobs.lease(b"k/").acquire().unwrap();
        jobs.put_operation(first.token(), op(3), b"k/x", b"x").unwrap();
        jobs.delete(first.token(), b"k/x").unwrap();
        let was = first.token();
        first.release().unwrap();
        if folded {
            use_once(&jobs, "once", 3);
            churn(&db);
            db.compact().unwrap();
            assert!(jobs.floor().unwrap().is_folded);
        }
        let cut = jobs.lease(b"cut/").acquire().unwrap();
        jobs.raise_all(cut.token()).unwrap();
        churn(&db);
        db.compact().unwrap();
        let next = jobs.lease(b"k/").acquire().unwrap();
        jobs.put(next.token(), b"k/x", b"new").unwrap();
        let late = jobs.put(was, b"k/x", b"late");
        // Folded before the floor was raised on purpose, or under it: the state of the fence is gone.
        assert_err!(late, Error::Fenced { last_operation: LastOperation::Unknown, .. });
    }
}

/// A round that was cut short leaves what it carried in two places. The next one carried both, so that each crash
/// doubled the ops that no name leads to: keyspaces, floors, the counter, releases, and grants of leases that are not over.
#[test]
fn rounds_that_are_cut_short_leave_no_more_copies_each_time() {
    let sim = Sim::new();
    let db = sim.open();
    key(&db, "keys").lease(b"a").ttl(Ttl::INFINITE).acquire().unwrap().release().unwrap();
    external(&db, "rows").raise_all(token(1)).unwrap();
    keep(key(&db, "keys").lease(b"held").ttl(Ttl::INFINITE).acquire().unwrap());
    db.advance_tokens(token(1_000)).unwrap();
    db.close().unwrap();
    let mut disk = sim.disk;
    let mut live = Vec::new();
    for round in 0..8 {
        let open = |disk: &SimDisk| {
            let db = Sim::on(disk.clone()).options().deterministic(round).open("sim").unwrap();
            churn(&db);
            db
        };
        // The last write to the list is the one that lets the old segments go.
        let mut failing = (0..12).filter_map(|nth| {
            let disk = disk.kill();
            let db = open(&disk);
            disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::Other).on("STORE").nth(nth));
            db.compact().is_err().then(|| disk.kill())
        });
        disk = failing.next_back().expect("it writes to the list");
        live.push(open(&disk.kill()).stats().live_bytes);
    }
    assert!(live[7] <= live[2] + 8 * 200, "{live:?}");
}
