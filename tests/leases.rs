//! Leases through the public API: waiting, losing, slots, keeping alive, restart, operators, clocks.
//!
//! Time is a clock moved by hand, so a test waits for nothing but other threads; the few that are about real
//! time poll with a deadline.

#![cfg(feature = "sim")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use support::{block_on, counting_waker, eventually, ms, open_sim, poll_once, prefixes, sim, store};
use tidewall::storage::SimDisk;
use tidewall::{
    Ending, Error, Expect, KeyspaceOptions, ManualClock, OpId, Options, OwnerId, Require, Token, Tokens, Ttl,
};

// Waiting.

#[test]
fn waiters_are_served_in_the_order_they_came() {
    let store = store();
    let first = store.jobs.lease(b"f").acquire().unwrap();
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for n in 0..8 {
            let (jobs, order) = (&store.jobs, order.clone());
            scope.spawn(move || {
                let lease = jobs.lease(b"f").wait(ms(1000)).acquire().unwrap();
                order.lock().unwrap().push((n, lease.token()));
            });
            eventually(|| store.db.stats().waiting == n + 1);
        }
        first.release().unwrap();
    });
    let order = order.lock().unwrap();
    assert!(order.iter().map(|(n, _)| *n).eq(0..8), "{order:?}");
    assert!(order.iter().map(|(_, token)| token.get()).eq(2..10), "no token is burnt: {order:?}");
    let stats = store.db.stats();
    assert_eq!((stats.hand_overs, stats.grants, stats.waiting), (8, 9, 0));
}

#[test]
fn nobody_who_comes_later_overtakes_a_waiter() {
    let store = store();
    let first = store.jobs.lease(b"f").acquire().unwrap();
    let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    first.release().unwrap();
    let late = store.jobs.lease(b"f").try_acquire();
    assert!(matches!(late, Err(Error::Held { .. })), "{late:?}");
    assert_eq!(block_on(waiting).unwrap().token().get(), 2);
}

#[test]
fn a_waiter_returns_at_its_own_deadline_and_never_gets_the_grant() {
    let store = store();
    let _held = store.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.jobs.lease(b"f").wait(ms(50)).acquire());
        eventually(|| store.db.stats().waiting == 1);
        store.clock.advance(ms(49));
        assert_eq!(store.db.stats().waiting, 1);
        store.clock.advance(ms(1));
        let answer = waiting.join().unwrap();
        assert!(matches!(answer, Err(Error::Timeout { after }) if after == ms(50)), "{answer:?}");
    });
    assert_eq!(store.jobs.mark(b"f").unwrap().unwrap().get(), 1, "no token is burnt");
}

#[test]
fn the_ttl_of_a_waiter_counts_from_its_grant() {
    let store = store();
    let first = store.jobs.lease(b"f").ttl(ms(500)).acquire().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.jobs.lease(b"f").ttl(ms(100)).wait(ms(1000)).acquire().unwrap());
        eventually(|| store.db.stats().waiting == 1);
        store.clock.advance(ms(400));
        first.release().unwrap();
        assert_eq!(waiting.join().unwrap().remaining(), ms(100));
    });
}

#[test]
fn expiry_break_and_raise_hand_over_at_once() {
    type End = fn(&support::Store);
    let ends: [(&str, End); 4] = [
        ("expiry", |store| store.clock.advance(ms(100))),
        ("break", |store| assert!(store.jobs.break_lease(b"f", "test").unwrap().is_some())),
        ("raise", |store| {
            let other = store.jobs.lease(b"other").acquire().unwrap();
            store.jobs.raise(other.token(), b"f").unwrap();
        }),
        ("raise_all", |store| {
            let other = store.jobs.lease(b"other").acquire().unwrap();
            store.jobs.raise_all(other.token()).unwrap();
        }),
    ];
    for (name, end) in ends {
        let store = store();
        let first = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| store.jobs.lease(b"f").wait(ms(1000)).acquire().unwrap());
            eventually(|| store.db.stats().waiting == 1);
            end(&store);
            let next = waiting.join().unwrap();
            assert!(next.is_live() && !first.is_live(), "{name}");
            let late = store.jobs.put(first.token(), b"f", b"late");
            assert!(matches!(late, Err(Error::Fenced { .. })), "{name}: {late:?}");
            store.jobs.put(next.token(), b"f", b"mine").unwrap();
        });
    }
}

#[test]
fn a_cancelled_waiter_leaves_nothing_behind_at_any_point() {
    let store = store();
    let first = store.jobs.lease(b"f").acquire().unwrap();
    // Before it is polled, and while it waits.
    drop(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    let mut queued = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    let mut next = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    let waker = counting_waker();
    assert!(waker.poll(queued.as_mut()).is_pending());
    assert!(poll_once(next.as_mut()).is_pending());
    assert_eq!(store.db.stats().waiting, 2);
    // After its grant was appended: that ends at once, and the next one gets the fence.
    first.release().unwrap();
    eventually(|| waker.count() > 0);
    drop(queued);
    let lease = block_on(next).unwrap();
    assert!(lease.is_live());
    assert_eq!(lease.token().get(), 3);
    let stats = store.db.stats();
    assert_eq!(stats.waiting, 0);
    // Once more, of a grant that is on its way to the disk.
    let mut direct = Box::pin(store.jobs.lease(b"g").acquire_async());
    let _ = poll_once(direct.as_mut());
    drop(direct);
    assert!(store.jobs.lease(b"g").wait(ms(1000)).acquire().unwrap().is_live());
}

#[test]
fn a_store_without_threads_answers_held_at_once() {
    let disk = SimDisk::new();
    let db = Options::new().storage(disk).without_threads().open("sim").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let lease = jobs.lease(b"f").acquire().unwrap();
    assert!(matches!(jobs.lease(b"f").wait(ms(1000)).acquire(), Err(Error::Held { .. })));
    let asynchronous = block_on(jobs.lease(b"f").wait(ms(1000)).acquire_async());
    assert!(matches!(asynchronous, Err(Error::Held { .. })), "{asynchronous:?}");
    assert!(matches!(lease.keep_alive(ms(1000)), Err(Error::InvalidArgument(_))));
    assert_eq!(block_on(jobs.lease(b"g").acquire_async()).unwrap().token().get(), 2);
}

#[test]
fn the_owner_that_holds_the_fence_is_told_so_and_does_not_wait_for_itself() {
    let store = store();
    let owner = OwnerId::new(7);
    let _held = store.jobs.lease(b"f").owner(owner).acquire().unwrap();
    for wait in [ms(0), ms(1000)] {
        let again = store.jobs.lease(b"f").owner(owner).wait(wait).acquire();
        assert!(matches!(again, Err(Error::Held { owner: by, .. }) if by == owner), "{again:?}");
    }
}

#[test]
fn closing_the_store_wakes_everybody_who_waits() {
    let store = store();
    let held = store.jobs.lease(b"f").acquire().unwrap();
    let lost = held.lost();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.jobs.lease(b"f").wait(ms(1000)).acquire());
        let watching = scope.spawn(|| lost.wait());
        eventually(|| store.db.stats().waiting == 1 && store.db.stats().watched_leases == 1);
        store.db.clone().close().unwrap();
        assert!(matches!(waiting.join().unwrap(), Err(Error::Closed)));
        assert_eq!(watching.join().unwrap(), Ending::Closed);
    });
    assert!(matches!(store.jobs.lease(b"f").wait(ms(1000)).acquire(), Err(Error::Closed)));
}

// Losing.

#[test]
fn a_holder_hears_of_each_kind_of_end() {
    let store = store();
    let lease = |key: &[u8]| store.jobs.lease(key).ttl(ms(100)).acquire().unwrap();
    let (released, dropped, broken, raised) = (lease(b"a"), lease(b"b"), lease(b"c"), lease(b"d"));
    let lost = [released.lost(), dropped.lost(), broken.lost(), raised.lost()];
    let expired = lease(b"e");
    let lost_by_time = expired.lost();
    released.release().unwrap();
    drop(dropped);
    store.jobs.break_lease(b"c", "test").unwrap();
    store.jobs.raise(expired.token(), b"d").unwrap();
    let endings = lost.map(|lost| lost.wait());
    assert_eq!(endings, [Ending::Released, Ending::Released, Ending::Broken, Ending::Overtaken]);
    let watching = thread::spawn(move || lost_by_time.wait());
    store.clock.advance(ms(100));
    assert_eq!(watching.join().unwrap(), Ending::Expired);
    for lease in [&broken, &raised, &expired] {
        assert!(!lease.is_live() && lease.remaining().is_zero() && lease.renew().is_err());
    }
}

#[test]
fn a_holder_that_renews_is_not_told_that_it_lost() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    let mut lost = Box::pin(lease.lost());
    for _ in 0..20 {
        assert!(poll_once(lost.as_mut()).is_pending());
        store.clock.advance(ms(60));
        lease.renew().unwrap();
    }
    assert!(lease.is_live());
}

#[test]
fn losing_is_told_within_ten_milliseconds() {
    // Real time. Other processes share the machine, so the best of several counts.
    let dir = tempfile::tempdir().unwrap();
    let db = tidewall::Db::open(dir.path().join("data")).unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let mut late: Vec<_> = (0..20)
        .map(|_| {
            // The fence stays taken a little longer than its holder believes.
            let lease = jobs.lease(b"f").ttl(ms(30)).wait(ms(5000)).acquire().unwrap();
            let lost = lease.lost();
            let end = std::time::Instant::now() + lease.remaining();
            assert_eq!(lost.wait(), Ending::Expired);
            let now = std::time::Instant::now();
            assert!(now + ms(1) >= end, "not before it is over");
            now.saturating_duration_since(end)
        })
        .collect();
    late.sort_unstable();
    println!("told after: median {:?}, most {:?}", late[10], late[19]);
    assert!(late[10] <= ms(10), "{late:?}");
}

#[test]
fn ensure_renews_only_when_it_must() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    lease.ensure(ms(100)).unwrap();
    assert_eq!(store.db.stats().renewals, 0);
    store.clock.advance(ms(50));
    lease.ensure(ms(50)).unwrap();
    assert_eq!(store.db.stats().renewals, 0);
    lease.ensure(ms(51)).unwrap();
    assert_eq!((store.db.stats().renewals, lease.remaining()), (1, ms(100)));
    assert!(matches!(lease.ensure(ms(101)), Err(Error::InvalidArgument(_))));
    store.clock.advance(ms(100));
    assert!(matches!(lease.ensure(ms(1)), Err(Error::Expired { .. })));
    assert!(matches!(lease.ensure(ms(0)), Err(Error::Expired { .. })));
}

#[test]
fn a_live_requirement_refuses_a_holder_whose_time_is_over_before_anybody_else_came() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    let put = |token: Token, op: u64, require: Require| {
        let mut batch = store.db.batch();
        batch.put(&store.jobs, token, b"f", b"value").unwrap();
        batch.op(OpId::new(op)).require(require);
        batch.expect(&store.jobs, b"none", Expect::Present).unwrap();
        batch.commit()
    };
    let done = |token: Token, op: u64, require: Require| {
        let mut batch = store.db.batch();
        batch.put(&store.jobs, token, b"f", b"value").unwrap();
        batch.op(OpId::new(op)).require(require);
        batch.commit()
    };
    done(lease.token(), 5, Require::Live).unwrap();
    store.clock.advance(ms(100));
    done(lease.token(), 6, Require::Newest).unwrap();
    // The order of the checks: token, operation, liveness, conditions.
    let unknown = Token::new(99).unwrap();
    assert!(matches!(put(unknown, 7, Require::Live), Err(Error::UnknownToken { .. })));
    assert!(matches!(put(lease.token(), 6, Require::Live), Err(Error::Duplicate { .. })));
    assert!(matches!(put(lease.token(), 5, Require::Live), Err(Error::StaleOp { .. })));
    assert!(matches!(put(lease.token(), 7, Require::Live), Err(Error::Expired { .. })));
    assert!(matches!(put(lease.token(), 7, Require::Newest), Err(Error::Conflict { .. })));
    let next = store.jobs.lease(b"f").acquire().unwrap();
    assert!(matches!(put(lease.token(), 7, Require::Live), Err(Error::Fenced { .. })));
    done(next.token(), 1, Require::Live).unwrap();
}

// Hand-off.

#[test]
fn a_successor_holds_its_lease_only_when_its_grant_is_durable() {
    let sim = sim();
    let first = sim.jobs.lease(b"f").acquire().unwrap();
    let old = first.token();
    first.release().unwrap();
    let second = sim.jobs.lease(b"f").acquire().unwrap();
    // A power cut right after: the old token is fenced in what is left.
    let disk = sim.disk.crash(tidewall::storage::Crash::None, 0);
    let (db, jobs) = open_sim(&disk, &ManualClock::new(), Options::new());
    let late = jobs.put(old, b"f", b"late");
    assert!(matches!(late, Err(Error::Fenced { .. })), "{late:?}");
    let third = jobs.lease(b"f").acquire().unwrap();
    assert!(third.token() > second.token(), "a token is granted once");
    drop((third, db));
}

#[test]
fn a_hand_over_to_a_waiter_is_one_sync() {
    let store = store();
    let mut held = store.jobs.lease(b"f").acquire().unwrap();
    let before = store.db.stats();
    for _ in 0..50 {
        let mut next = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
        assert!(poll_once(next.as_mut()).is_pending());
        held.release().unwrap();
        held = block_on(next).unwrap();
    }
    let after = store.db.stats();
    let commits = after.commits - before.commits;
    // An idle frame now and then may come in between.
    assert!((50..60).contains(&commits), "{commits} syncs for 50 hand-overs");
    assert_eq!(after.hand_overs - before.hand_overs, 50);
}

#[test]
fn a_grant_overtaken_on_its_way_is_never_handed_out() {
    let sim = sim();
    let carrier = sim.jobs.lease(b"carrier").acquire().unwrap();
    for _ in 0..20 {
        let mut pending = Box::pin(sim.jobs.lease(b"f").acquire_async());
        let first = poll_once(pending.as_mut());
        // Its token is below the next one, which is carried to its fence.
        let newer = sim.jobs.lease(b"newer").acquire().unwrap();
        sim.jobs.raise(newer.token(), b"f").unwrap();
        let got = match first {
            std::task::Poll::Ready(lease) => lease.unwrap(),
            std::task::Poll::Pending => block_on(pending).unwrap(),
        };
        if got.is_live() {
            assert!(got.token() > newer.token(), "what is handed out is above the mark");
            sim.jobs.put(got.token(), b"f", b"mine").unwrap();
        } else {
            assert!(got.token() < newer.token());
        }
    }
    drop(carrier);
}

// Slots.

#[test]
fn as_many_slots_are_held_as_there_are_and_each_holder_writes() {
    let store = prefixes();
    let n = 5;
    let leases: Vec<_> =
        (0..n).map(|_| store.jobs.lease(b"user").slots(n).ttl(ms(100)).acquire().unwrap()).collect();
    for (index, lease) in leases.iter().enumerate() {
        assert_eq!(lease.prefix(), format!("user.{index}/").as_bytes());
        store.jobs.put(lease.token(), &[lease.prefix(), b"at"].concat(), b"0").unwrap();
    }
    let full = store.jobs.lease(b"user").slots(n).acquire();
    assert!(matches!(full, Err(Error::Held { remaining: Some(left), .. }) if left <= ms(100)), "{full:?}");
    let mut leases = leases;
    let old = leases.remove(2);
    let (old_token, prefix) = (old.token(), old.prefix().to_vec());
    old.release().unwrap();
    let new = store.jobs.lease(b"user").slots(n).acquire().unwrap();
    assert_eq!(new.prefix(), prefix, "the lowest free slot is used again");
    let late = store.jobs.put(old_token, &[&prefix[..], b"at"].concat(), b"late");
    assert!(matches!(late, Err(Error::Fenced { .. })), "{late:?}");
    for lease in leases.iter().chain([&new]) {
        store.jobs.put(lease.token(), &[lease.prefix(), b"at"].concat(), b"1").unwrap();
    }
}

#[test]
fn fewer_slots_evict_nobody_and_grant_nothing_until_there_is_room() {
    let store = prefixes();
    let mut leases: Vec<_> = (0..4).map(|_| store.jobs.lease(b"u").slots(4).acquire().unwrap()).collect();
    // Slots 1 and 3 are left.
    drop((leases.remove(0), leases.remove(1)));
    assert!(matches!(store.jobs.lease(b"u").slots(2).acquire(), Err(Error::Held { .. })));
    for lease in &leases {
        store.jobs.put(lease.token(), &[lease.prefix(), b"at"].concat(), b"still").unwrap();
    }
    drop(leases.pop());
    let lease = store.jobs.lease(b"u").slots(2).acquire().unwrap();
    assert_eq!(lease.prefix(), b"u.0/");
    assert!(matches!(store.jobs.lease(b"u").slots(2).acquire(), Err(Error::Held { .. })));
    assert_eq!(store.jobs.lease(b"u").slots(3).acquire().unwrap().prefix(), b"u.2/");
    assert_eq!(store.jobs.lease(b"v").slots(1).acquire().unwrap().prefix(), b"v.0/", "another key");
}

#[test]
fn waiters_for_slots_are_served_as_slots_become_free() {
    let store = prefixes();
    let held: Vec<_> =
        (0..3).map(|_| store.jobs.lease(b"u").slots(3).ttl(ms(100)).acquire().unwrap()).collect();
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..6)
            .map(|n| {
                let waiter = scope.spawn(|| {
                    let lease =
                        store.jobs.lease(b"u").slots(3).ttl(ms(1000)).wait(ms(5000)).acquire().unwrap();
                    let prefix = lease.prefix().to_vec();
                    store.jobs.put(lease.token(), &[&prefix[..], b"at"].concat(), b"x").unwrap();
                    lease.release().unwrap();
                    prefix
                });
                eventually(|| store.db.stats().waiting == n + 1);
                waiter
            })
            .collect();
        store.clock.advance(ms(100));
        for waiter in waiters {
            let prefix = waiter.join().unwrap();
            assert!([&b"u.0/"[..], b"u.1/", b"u.2/"].contains(&&prefix[..]));
        }
    });
    assert!(held.iter().all(|lease| !lease.is_live()));
    assert_eq!(store.db.stats().waiting, 0);
}

#[test]
fn slots_that_cannot_be_are_refused() {
    let store = store();
    assert!(matches!(store.jobs.lease(b"u").slots(2).acquire(), Err(Error::InvalidArgument(_))));
    let store = prefixes();
    for (key, n) in [(&b"u/x"[..], 2), (b"u", 0), (b"u", tidewall::MAX_SLOTS + 1), (b"", 1)] {
        assert!(
            matches!(store.jobs.lease(key).slots(n).acquire(), Err(Error::InvalidArgument(_))),
            "{key:?} {n}"
        );
    }
}

// Keeping alive.

#[test]
fn a_lease_is_kept_alive_up_to_its_longest_hold_and_not_beyond() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(90)).acquire().unwrap();
    let lost = lease.lost();
    lease.keep_alive(ms(1000)).unwrap();
    let watching = thread::spawn(move || lost.wait());
    for step in 1..100 {
        let renewals = store.db.stats().renewals;
        store.clock.advance(ms(10));
        // At least once in any half of a ttl, and until the end.
        if step % 4 == 0 && step * 10 < 900 {
            eventually(|| store.db.stats().renewals > renewals || lease.remaining() > ms(45));
            assert!(lease.is_live(), "after {step} steps");
        }
    }
    store.clock.advance(ms(11));
    assert_eq!(watching.join().unwrap(), Ending::Expired);
    assert!(store.jobs.lease(b"f").acquire().is_ok());
}

#[test]
fn keeping_alive_ends_with_the_lease_however_that_ends() {
    let store = store();
    let lease = |key: &[u8]| {
        let lease = store.jobs.lease(key).ttl(ms(90)).acquire().unwrap();
        lease.keep_alive(ms(100_000)).unwrap();
        lease
    };
    lease(b"a").release().unwrap();
    drop(lease(b"b"));
    let broken = lease(b"c");
    store.jobs.break_lease(b"c", "test").unwrap();
    eventually(|| store.db.stats().watched_leases == 0);
    let renewals = store.db.stats().renewals;
    for _ in 0..20 {
        store.clock.advance(ms(30));
    }
    for key in [b"a", b"b", b"c"] {
        assert!(store.jobs.lease(key).acquire().is_ok());
    }
    assert_eq!(store.db.stats().renewals, renewals);
    assert!(matches!(broken.keep_alive(ms(1)), Err(Error::NotHeld { .. } | Error::Expired { .. })));
    let for_ever = store.jobs.lease(b"d").ttl(Ttl::INFINITE).acquire().unwrap();
    assert!(matches!(for_ever.keep_alive(ms(1)), Err(Error::InvalidArgument(_))));
}

#[test]
fn starving_the_callers_threads_loses_no_kept_lease() {
    // Real time: many threads spin while nobody but the store renews.
    let dir = tempfile::tempdir().unwrap();
    let db = tidewall::Db::open(dir.path().join("data")).unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let lease = jobs.lease(b"f").ttl(ms(900)).acquire().unwrap();
    lease.keep_alive(ms(60_000)).unwrap();
    let end = std::time::Instant::now() + ms(2000);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| while std::time::Instant::now() < end {});
        }
    });
    assert!(lease.is_live());
    assert!(db.stats().renewals >= 2);
}

// Restart.

#[test]
fn reopening_ends_every_lease_without_grace() {
    let sim = sim();
    let lease = sim.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
    let token = lease.token();
    std::mem::forget(lease);
    let (_, jobs) = sim.reopen(Options::new());
    assert!(jobs.holders(b"").is_empty());
    assert!(matches!(jobs.renew(b"f", token, OwnerId::new(0)), Err(Error::NotHeld { .. })));
    assert!(jobs.lease(b"f").acquire().unwrap().token() > token);
}

#[test]
fn grace_keeps_a_fence_for_its_recorded_holder_who_gets_a_new_grant() {
    let sim = sim();
    let owner = OwnerId::new(7);
    let lease = sim.jobs.lease(b"f").owner(owner).ttl(ms(500)).acquire().unwrap();
    let released = sim.jobs.lease(b"released").acquire().unwrap();
    let (token, superseded) = (lease.token(), sim.jobs.lease(b"s").owner(owner).acquire().unwrap());
    let superseded_token = superseded.token();
    released.release().unwrap();
    std::mem::forget(superseded);
    sim.jobs.break_lease(b"s", "test").unwrap();
    std::mem::forget(lease);
    let (db, jobs) = sim.reopen(Options::new().lease_grace(ms(200)));
    assert!(jobs.lease(b"released").acquire().is_ok());
    assert!(jobs.lease(b"s").acquire().is_ok(), "its mark has passed it");
    let held = jobs.lease(b"f").acquire();
    let left = Some(ms(200));
    assert!(
        matches!(held, Err(Error::Held { owner: by, remaining, .. }) if by == owner && remaining == left)
    );
    let holders = jobs.holders(b"f");
    assert_eq!((holders.len(), holders[0].is_live, holders[0].token), (1, false, token));
    // The old token alone, the owner alone, and another token are not enough.
    for (as_owner, with) in [(OwnerId::new(8), token), (owner, superseded_token)] {
        let refused = jobs.lease(b"f").owner(as_owner).resume(with).acquire();
        assert!(matches!(refused, Err(Error::Held { .. })), "{refused:?}");
    }
    assert!(matches!(jobs.renew(b"f", token, owner), Err(Error::NotHeld { .. })), "grace is no lease");
    // Others wait; the holder overtakes them.
    let mut waiting = Box::pin(jobs.lease(b"f").wait(ms(10_000)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    let resumed = jobs.lease(b"f").owner(owner).resume(token).acquire().unwrap();
    assert!(resumed.token() > token);
    assert!(matches!(jobs.put(token, b"f", b"old"), Err(Error::Fenced { .. })));
    resumed.release().unwrap();
    assert!(block_on(waiting).unwrap().is_live());
    drop(db);
}

#[test]
fn grace_lasts_as_long_as_it_says_and_no_longer_than_the_ttl() {
    for (grace, ttl, kept) in [(200, 500, 200), (500, 200, 200)] {
        let sim = sim();
        std::mem::forget(sim.jobs.lease(b"f").ttl(ms(ttl)).acquire().unwrap());
        let (db, jobs) = sim.reopen(Options::new().lease_grace(ms(grace)));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| jobs.lease(b"f").wait(ms(10_000)).acquire().unwrap());
            eventually(|| db.stats().waiting == 1);
            sim.clock.advance(ms(kept - 1));
            assert!(matches!(jobs.lease(b"f").try_acquire(), Err(Error::Held { .. })));
            assert_eq!(db.stats().waiting, 1);
            sim.clock.advance(ms(1));
            assert!(waiting.join().unwrap().is_live());
        });
    }
}

#[test]
fn ten_reopens_within_one_ttl_prolong_nothing() {
    let sim = sim();
    std::mem::forget(sim.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap());
    let mut disk = sim.disk.crash(tidewall::storage::Crash::None, 0);
    for round in 0..10 {
        let (db, jobs) = open_sim(&disk, &sim.clock, Options::new().lease_grace(ms(10_000)));
        assert_eq!(jobs.holders(b"f").len(), usize::from(round == 0), "round {round}");
        if round == 9 {
            assert!(jobs.lease(b"f").try_acquire().is_ok());
        }
        drop((db, jobs));
        disk = disk.crash(tidewall::storage::Crash::None, 0);
    }
}

#[test]
fn a_lease_without_an_end_from_before_stays_listed_and_can_be_broken() {
    let sim = sim();
    let owner = OwnerId::new(7);
    let lease = sim.jobs.lease(b"f").owner(owner).ttl(Ttl::INFINITE).acquire().unwrap();
    let token = lease.token();
    std::mem::forget(lease);
    let mut disk = sim.disk.crash(tidewall::storage::Crash::None, 0);
    for _ in 0..3 {
        let (db, jobs) = open_sim(&disk, &sim.clock, Options::new());
        let holders = jobs.holders(b"");
        assert_eq!(holders.len(), 1);
        assert_eq!((holders[0].owner, holders[0].token, holders[0].is_live), (owner, token, false));
        drop((db, jobs));
        disk = disk.crash(tidewall::storage::Crash::None, 0);
    }
    let (_db, jobs) = open_sim(&disk, &sim.clock, Options::new());
    jobs.put(token, b"f", b"still the newest token").unwrap();
    let broken = jobs.break_lease(b"f", "gone for good").unwrap().unwrap();
    assert_eq!((broken.token, broken.owner), (token, owner));
    assert!(matches!(jobs.put(token, b"f", b"late"), Err(Error::Fenced { .. })));
    assert!(jobs.holders(b"").is_empty());
    assert_eq!(jobs.break_lease(b"f", "again").unwrap(), None);
}

// Operators.

#[test]
fn holders_are_listed_with_what_an_operator_asks_for() {
    let store = prefixes();
    let owner = OwnerId::new(7);
    let a = store.jobs.lease(b"a/x").owner(owner).ttl(ms(100)).acquire().unwrap();
    let _b = store.jobs.lease(b"b/").ttl(Ttl::INFINITE).acquire().unwrap();
    let _slot = store.jobs.lease(b"u").slots(1).acquire().unwrap();
    let mut waiting = Box::pin(store.jobs.lease(b"u").slots(1).wait(ms(1000)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    store.clock.advance(ms(30));
    let all = store.jobs.holders(b"");
    let fences: Vec<_> = all.iter().map(|holder| &holder.fence[..]).collect();
    assert_eq!(fences, [&b"a/"[..], b"b/", b"u.0/"]);
    assert_eq!((all[0].owner, all[0].token, all[0].is_live), (owner, a.token(), true));
    assert_eq!((all[0].age, all[0].remaining, all[0].waiting), (ms(30), Some(ms(70)), 0));
    assert_eq!((all[1].remaining, all[2].waiting), (None, 1));
    assert_eq!(store.jobs.holders(b"b").len(), 1);
    store.clock.advance(ms(70));
    assert!(store.jobs.holders(b"a").is_empty(), "its time is over");
}

#[test]
fn breaking_fences_the_holder_at_once_and_durably() {
    let sim = sim();
    let lease = sim.jobs.lease(b"f").acquire().unwrap();
    let broken = sim.jobs.break_lease(b"f", "drill").unwrap().unwrap();
    assert_eq!((broken.token, broken.owner, &broken.reason[..]), (lease.token(), lease.owner(), "drill"));
    assert!(broken.mark > lease.token().into());
    assert_eq!(sim.jobs.mark(b"f").unwrap(), Some(broken.mark));
    assert!(matches!(sim.jobs.put(lease.token(), b"f", b"late"), Err(Error::Fenced { .. })));
    assert!(matches!(lease.renew(), Err(Error::NotHeld { .. })));
    assert_eq!(sim.jobs.break_lease(b"f", "again").unwrap(), None);
    assert_eq!(sim.jobs.break_lease(b"never", "none").unwrap(), None);
    let next = sim.jobs.lease(b"f").acquire().unwrap();
    assert!(matches!(lease.release(), Err(Error::NotHeld { .. })));
    assert!(next.is_live(), "a broken holder's late release touches nobody");
    let token = next.token();
    let (_, jobs) = sim.reopen(Options::new());
    assert!(jobs.lease(b"f").acquire().unwrap().token() > token);
    assert_eq!(sim.db.stats().breaks, 1);
}

#[test]
fn a_lock_delay_is_honoured_after_a_loss_and_not_after_a_release_and_zero_is_zero() {
    let store = store();
    let delayed = |key: &[u8]| store.jobs.lease(key).ttl(ms(100)).lock_delay(ms(50)).acquire().unwrap();
    let (_expired, broken, released) = (delayed(b"expired"), delayed(b"broken"), delayed(b"released"));
    released.release().unwrap();
    assert!(store.jobs.lease(b"released").acquire().is_ok());
    let plain = store.jobs.lease(b"plain").acquire().unwrap();
    store.jobs.break_lease(b"plain", "test").unwrap();
    assert!(store.jobs.lease(b"plain").acquire().is_ok(), "no delay was asked for");
    store.jobs.break_lease(b"broken", "test").unwrap();
    let held = store.jobs.lease(b"broken").acquire();
    assert!(matches!(held, Err(Error::Held { remaining: Some(left), .. }) if left == ms(50)), "{held:?}");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.jobs.lease(b"broken").wait(ms(1000)).acquire().unwrap());
        eventually(|| store.db.stats().waiting == 1);
        store.clock.advance(ms(50));
        assert!(waiting.join().unwrap().is_live());
        let waiting = scope.spawn(|| store.jobs.lease(b"expired").wait(ms(1000)).acquire().unwrap());
        eventually(|| store.db.stats().waiting == 1);
        store.clock.advance(ms(50));
        let held = store.jobs.lease(b"expired").try_acquire();
        assert!(matches!(held, Err(Error::Held { .. })), "{held:?}");
        assert_eq!(store.db.stats().waiting, 1);
        store.clock.advance(ms(50));
        assert!(waiting.join().unwrap().is_live());
    });
    drop((plain, broken));
}

#[test]
fn late_renewals_are_counted_and_hinted_at() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    for n in 0..200 {
        store.clock.advance(if n % 4 == 0 { ms(90) } else { ms(30) });
        lease.renew().unwrap();
    }
    let stats = store.db.stats();
    assert_eq!((stats.renewals, stats.late_renewals), (200, 50));
    assert!(stats.ttl_hint().unwrap().contains("25 % of renewals came in the last fifth"));
    assert_eq!(self::store().db.stats().ttl_hint(), None);
}

#[test]
fn what_happens_to_leases_is_counted() {
    let store = store();
    let a = store.jobs.lease(b"a").ttl(ms(100)).acquire().unwrap();
    let _b = store.jobs.lease(b"b").ttl(ms(100)).acquire().unwrap();
    assert!(store.jobs.lease(b"a").acquire().is_err());
    a.renew().unwrap();
    a.release().unwrap();
    store.clock.advance(ms(100));
    let _c = store.jobs.lease(b"b").acquire().unwrap();
    let stats = store.db.stats();
    let counted = (stats.grants, stats.renewals, stats.releases, stats.lease_refusals, stats.takeovers);
    assert_eq!(counted, (3, 1, 1, 1, 1));
    assert_eq!(stats.expiries, 1);
}

// Clocks.

#[test]
fn no_movement_of_the_clock_lets_a_fenced_writer_through() {
    let store = store();
    let start = 1_000_000_000;
    let moves: [(&str, fn(&ManualClock)); 4] = [
        ("stands still", |_| {}),
        ("jumps ahead", |clock| clock.advance(ms(3_600_000))),
        ("jumps back", |clock| clock.set(20)),
        ("stands at its end", |clock| clock.set(u64::MAX)),
    ];
    for (name, move_clock) in moves {
        store.clock.set(start);
        let old = store.jobs.lease(name.as_bytes()).ttl(ms(100)).acquire().unwrap();
        move_clock(&store.clock);
        store.jobs.break_lease(name.as_bytes(), name).unwrap();
        let new = store.jobs.lease(name.as_bytes()).acquire().unwrap();
        for clock in [20, start, u64::MAX] {
            store.clock.set(clock);
            let late = store.jobs.put(old.token(), name.as_bytes(), b"late");
            assert!(matches!(late, Err(Error::Fenced { .. })), "{name}: {late:?}");
            assert!(old.renew().is_err() && !old.is_live(), "{name}");
            store.jobs.put(new.token(), name.as_bytes(), b"mine").unwrap();
        }
    }
}

#[test]
fn a_clock_that_goes_back_revives_nothing_that_was_said_to_be_over() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    let lost = lease.lost();
    let before = 1_000_000_000;
    store.clock.advance(ms(100));
    assert_eq!(lost.wait(), Ending::Expired);
    store.clock.set(before);
    assert!(!lease.is_live());
    assert!(matches!(lease.renew(), Err(Error::Expired { .. })));
    // The same without anybody having been told: asking for it is enough.
    let lease = store.jobs.lease(b"g").ttl(ms(100)).acquire().unwrap();
    store.clock.advance(ms(100));
    assert!(matches!(lease.renew(), Err(Error::Expired { .. })));
    store.clock.set(before);
    assert!(!lease.is_live());
}

#[test]
fn a_suspended_machine_wakes_up_to_leases_that_are_over() {
    // The clock counts the time asleep; nobody announces the jump before somebody asks.
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(1000)).acquire().unwrap();
    lease.keep_alive(ms(3_600_000)).unwrap();
    store.clock.advance(ms(8 * 3_600_000));
    assert!(!lease.is_live());
    let next = store.jobs.lease(b"f").acquire().unwrap();
    assert!(matches!(store.jobs.put(lease.token(), b"f", b"late"), Err(Error::Fenced { .. })));
    assert!(next.is_live());
}

#[test]
fn a_frozen_process_loses_its_lease_to_a_clock_that_goes_on() {
    let store = store();
    let frozen = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    store.jobs.put(frozen.token(), b"f", b"before").unwrap();
    store.clock.advance(ms(5000));
    let next = store.jobs.lease(b"f").acquire().unwrap();
    let (late, renewed) = (store.jobs.put(frozen.token(), b"f", b"after"), frozen.renew());
    assert!(matches!(late, Err(Error::Fenced { .. })), "{late:?}");
    assert!(renewed.is_err() && frozen.release().is_err());
    assert!(next.is_live());
}

#[test]
fn a_clock_that_stands_still_still_lets_others_be_broken_and_handed_over() {
    let store = store();
    let first = store.jobs.lease(b"f").ttl(ms(1)).acquire().unwrap();
    assert!(matches!(store.jobs.lease(b"f").acquire(), Err(Error::Held { .. })));
    let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(1)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    store.jobs.break_lease(b"f", "the clock stands").unwrap();
    assert!(block_on(waiting).unwrap().is_live());
    drop(first);
}

// Numbers.

#[test]
fn tokens_around_every_power_that_hides_a_bug() {
    for around in [1u64 << 31, 1 << 32, 1 << 53, i64::MAX as u64 - 8] {
        let sim = sim();
        let before = sim.jobs.lease(b"f").acquire().unwrap();
        let old = before.token();
        before.release().unwrap();
        sim.db.advance_tokens(Token::new(around - 3).unwrap()).unwrap();
        for n in 0..6 {
            let lease = sim.jobs.lease(b"f").acquire().unwrap();
            assert_eq!(lease.token().get(), around - 2 + n);
            sim.jobs.put(lease.token(), b"f", b"x").unwrap();
            assert!(matches!(sim.jobs.put(old, b"f", b"late"), Err(Error::Fenced { .. })));
            lease.release().unwrap();
        }
        let (_, jobs) = sim.reopen(Options::new());
        // One was granted on the way to the next open.
        assert_eq!(jobs.lease(b"f").acquire().unwrap().token().get(), around + 5);
    }
}

#[test]
fn exhausted_tokens_are_said_to_be_and_writes_go_on() {
    let store = store();
    store.db.advance_tokens(Token::new(i64::MAX as u64 - 1).unwrap()).unwrap();
    let last = store.jobs.lease(b"f").acquire().unwrap();
    assert_eq!(last.token(), Token::MAX);
    assert!(matches!(store.jobs.lease(b"g").acquire(), Err(Error::TokensExhausted)));
    assert!(matches!(store.jobs.break_lease(b"f", "none left"), Err(Error::TokensExhausted)));
    assert!(last.is_live());
    let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    store.jobs.put(last.token(), b"f", b"goes on").unwrap();
    last.release().unwrap();
    assert!(matches!(block_on(waiting), Err(Error::TokensExhausted)));
    assert_eq!(store.db.stats().waiting, 0);
}

#[test]
fn a_refused_acquire_burns_no_token_and_leaves_nothing() {
    let store = store();
    let held = store.jobs.lease(b"f").acquire().unwrap();
    for _ in 0..1000 {
        assert!(store.jobs.lease(b"f").acquire().is_err());
        assert!(store.jobs.lease(b"f").ttl(Duration::ZERO).acquire().is_err());
        assert!(store.jobs.lease(b"").acquire().is_err());
        let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
        assert!(poll_once(waiting.as_mut()).is_pending());
    }
    let stats = store.db.stats();
    assert_eq!((stats.waiting, stats.leases), (0, 1));
    assert!(stats.watched_leases <= 1);
    assert_eq!(store.jobs.lease(b"g").acquire().unwrap().token().get(), held.token().get() + 1);
}

#[test]
fn a_keyspace_of_external_tokens_grants_nothing() {
    let store = store();
    let rows = store.db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    assert!(matches!(rows.lease(b"f").acquire(), Err(Error::InvalidArgument(_))));
    assert!(matches!(block_on(rows.lease(b"f").acquire_async()), Err(Error::InvalidArgument(_))));
    assert!(rows.holders(b"").is_empty());
    assert_eq!(rows.break_lease(b"f", "none").unwrap(), None);
}

// All at once.

#[test]
fn at_most_one_of_many_threads_holds_a_fence_at_a_time_in_memory() {
    let sim = sim();
    contend(&sim.db, &sim.jobs, support::rounds(100_000));
}

#[test]
fn at_most_one_of_many_threads_holds_a_fence_at_a_time_on_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let db = tidewall::Db::open(dir.path().join("data")).unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    contend(&db, &jobs, support::rounds(10_000));
}

/// 64 threads acquire and release the leases of four fences, some waiting, some only trying.
fn contend(db: &tidewall::Db, jobs: &tidewall::Keyspace, rounds: u64) {
    const FENCES: usize = 4;
    let inside: [AtomicUsize; FENCES] = Default::default();
    let newest: [AtomicU64; FENCES] = Default::default();
    let done = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..64u64 {
            let (inside, newest, done) = (&inside, &newest, &done);
            scope.spawn(move || {
                let mut n = thread;
                while done.load(Ordering::Relaxed) < rounds {
                    n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let fence = (n >> 33) as usize % FENCES;
                    let key = [b'a' + fence as u8];
                    let request = jobs.lease(&key).ttl(Duration::from_secs(600)).wait(ms(600_000));
                    let answer = if n >> 40 & 3 == 0 { request.try_acquire() } else { request.acquire() };
                    let lease = match answer {
                        Ok(lease) => lease,
                        Err(Error::Held { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    assert_eq!(inside[fence].fetch_add(1, Ordering::SeqCst), 0, "two hold {key:?}");
                    let token = lease.token().get();
                    assert!(newest[fence].fetch_max(token, Ordering::SeqCst) < token, "token {token} twice");
                    inside[fence].fetch_sub(1, Ordering::SeqCst);
                    done.fetch_add(1, Ordering::Relaxed);
                    if n >> 50 & 1 == 0 { lease.release().unwrap() } else { drop(lease) }
                }
            });
        }
    });
    let stats = db.stats();
    assert_eq!(stats.waiting, 0);
    assert!(stats.grants >= rounds && stats.expiries == 0, "{stats:?}");
    println!(
        "{} grants, {} hand-overs of {} ns, {} syncs",
        stats.grants, stats.hand_overs, stats.hand_over_nanos_mean, stats.commits
    );
}

#[test]
fn a_great_many_leases_expiring_together_delay_nobody_else() {
    let sim = sim();
    let many = support::rounds(20_000);
    for n in 0..many {
        std::mem::forget(sim.jobs.lease(&n.to_be_bytes()).ttl(ms(1000)).acquire().unwrap());
    }
    let other = sim.jobs.lease(b"other").ttl(ms(1_000_000)).acquire().unwrap();
    assert!(sim.db.stats().leases >= many);
    sim.clock.advance(ms(1000));
    let mut took: Vec<_> = (0..many)
        .map(|n| {
            let start = std::time::Instant::now();
            other.renew().unwrap();
            sim.jobs
                .lease(&[b"new".as_slice(), &n.to_be_bytes()].concat())
                .acquire()
                .unwrap()
                .release()
                .unwrap();
            start.elapsed()
        })
        .collect();
    took.sort_unstable();
    let (p50, p99) = (took[took.len() / 2], took[took.len() * 99 / 100]);
    println!("acquire, renew and release beside {many} expiries: p50 {p50:?}, p99 {p99:?}");
    assert!(p99 < ms(20), "p50 {p50:?}, p99 {p99:?}");
    assert!(sim.db.stats().leases < many / 2, "they are swept: {}", sim.db.stats().leases);
}
