//! Leases through the public API: waiting, losing, handing over.
//!
//! Time is a clock moved by hand, so a test waits for nothing but other threads; the few that are about real
//! time poll with a deadline.

#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{Store, block_on, counting_waker, eventually, ms, open_sim, poll_once, sim, store};
use std::sync::Arc;
use std::task::Poll;
use std::thread;
use std::time::Duration;
use tidewall::storage::SimDisk;
use tidewall::{
    Clock, Ending, Error, Expect, Keyspace, KeyspaceOptions, ManualClock, OperationId, Options, OwnerId,
    Raised, Require, Token, Ttl,
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

/// A clock that jumps without telling anybody, as a suspended machine's does.
#[derive(Debug)]
struct Silent(ManualClock);

impl Clock for Silent {
    fn now(&self) -> u64 {
        self.0.now()
    }
}

#[test]
fn a_release_after_the_deadline_of_a_waiter_gives_it_nothing() {
    // Nobody has told the store that the time is over, so the release is the first thing it hears of.
    let clock = ManualClock::new();
    let options = Options::new().storage(SimDisk::new()).clock(Silent(clock.clone()));
    let db = options.open("sim").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    for n in 0..20 {
        let held = jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
        let mut waiting = Box::pin(jobs.lease(b"f").wait(ms(50)).acquire_async());
        assert!(poll_once(waiting.as_mut()).is_pending());
        assert_eq!(db.stats().waiting, 1);
        clock.advance(ms(50));
        held.release().unwrap();
        let answer = block_on(waiting);
        assert!(matches!(answer, Err(Error::Timeout { .. })), "{answer:?}");
        assert_eq!(jobs.mark(b"f").unwrap().unwrap().get(), n + 1, "no token is burnt");
    }
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
    type End = fn(&leasekit::Store);
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

/// It was queued up behind those who waited, for what it held itself; or was told that the first of them held it.
#[test]
fn who_holds_the_fence_is_told_so_also_while_others_wait_for_it() {
    let store = store();
    let owner = OwnerId::new(7);
    let _held = store.jobs.lease(b"f").owner(owner).acquire().unwrap();
    let mut other = Box::pin(store.jobs.lease(b"f").wait(ms(60_000)).acquire_async());
    assert!(poll_once(other.as_mut()).is_pending());
    for wait in [ms(0), ms(1000)] {
        let mut again = Box::pin(store.jobs.lease(b"f").owner(owner).wait(wait).acquire_async());
        let again = poll_once(again.as_mut());
        assert!(
            matches!(again, Poll::Ready(Err(Error::Held { owner: by, by_asker: true, .. })) if by == owner),
            "{again:?}"
        );
    }
}

/// The fence was free, and nobody got it before the delay was over: neither who waited nor, behind it, a newcomer.
#[test]
fn a_raise_over_what_keeps_a_fence_hands_it_over_at_once() {
    type Raise = fn(&Keyspace, Token) -> Raised;
    let raises: [Raise; 3] = [
        |jobs, token| jobs.raise(token, b"f").unwrap(),
        |jobs, token| jobs.raise_all(token).unwrap(),
        |jobs, token| jobs.raise_all_past(token).unwrap(),
    ];
    for raise in raises {
        let store = store();
        let broken = store.jobs.lease(b"f").lock_delay(ms(15_000)).acquire().unwrap();
        store.jobs.break_lease(b"f", "stuck").unwrap();
        drop(broken);
        let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(60_000)).acquire_async());
        assert!(poll_once(waiting.as_mut()).is_pending());
        let newer = store.jobs.lease(b"newer").acquire().unwrap().token();
        assert!(matches!(raise(&store.jobs, newer), Raised::Now(_)));
        assert!(block_on(waiting).unwrap().token() > newer);
    }
}

/// A grant that was overtaken on its way had the waiter begin again, whatever the time was.
#[test]
fn a_wait_that_begins_again_ends_at_its_first_deadline() {
    let store = store();
    let held = store.jobs.lease(b"f").acquire().unwrap();
    let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(100)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    held.release().unwrap();
    let newer = store.jobs.lease(b"newer").acquire().unwrap();
    assert_eq!(newer.token().get(), 3, "the waiter was granted the second one");
    store.jobs.raise(newer.token(), b"f").unwrap();
    store.clock.advance(ms(100));
    let waited = block_on(waiting);
    assert!(matches!(waited, Err(Error::Timeout { after }) if after == ms(100)), "{waited:?}");
    assert_eq!(store.jobs.lease(b"f").acquire().unwrap().token().get(), 4, "no token is burnt");
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

/// The next process may grant anew what is held here: a lease is over with its store.
#[test]
fn a_lease_is_over_when_its_store_is_closed() {
    let Store { db, jobs, .. } = store();
    let (lease, watched) = (jobs.lease(b"f").acquire().unwrap(), jobs.lease(b"g").acquire().unwrap());
    let lost = watched.lost();
    assert!(lease.is_live());
    db.close().unwrap();
    assert!(!lease.is_live() && lease.remaining().is_zero());
    assert!(lease.renew().is_err());
    assert_eq!(lost.wait(), Ending::Closed);
}

// Holders elsewhere.

#[test]
fn a_detached_lease_is_its_remote_holders_and_leaks_nothing() {
    let kept = Arc::new(());
    let (disk, clock, held) = (SimDisk::new(), ManualClock::new(), kept.clone());
    // Lives as long as the store does in memory.
    let options = Options::new().progress(move |_| assert!(Arc::strong_count(&held) > 0));
    let (db, jobs) = open_sim(&disk, &clock, options);
    let lease = jobs.lease(b"f").ttl(ms(1000)).acquire().unwrap();
    let lost = lease.lost();
    let (token, owner) = lease.detach();
    assert_eq!(db.stats().releases, 0);
    let holder = jobs.holders(b"f").unwrap().remove(0);
    assert_eq!((holder.token, holder.owner, holder.is_live), (token, owner, true));
    assert!(matches!(jobs.lease(b"f").try_acquire(), Err(Error::Held { .. })));
    clock.advance(ms(900));
    assert!(jobs.renew(b"f", token, owner).unwrap() > ms(900));
    clock.advance(ms(900));
    jobs.put(token, b"f", b"by the remote holder").unwrap();
    assert!(matches!(jobs.release(b"f", token, OwnerId::new(1)), Err(Error::NotHeld { .. })));
    jobs.release(b"f", token, owner).unwrap();
    assert_eq!(lost.wait(), Ending::Released);
    assert!(jobs.lease(b"f").try_acquire().unwrap().token() > token);
    drop((db, jobs));
    assert_eq!(Arc::strong_count(&kept), 1, "the store is still in memory");
}

#[test]
fn a_detached_lease_is_no_longer_kept_alive() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(90)).acquire().unwrap();
    lease.keep_alive(ms(1_000_000)).unwrap();
    assert_eq!(store.db.stats().watched_leases, 1);
    lease.detach();
    assert_eq!(store.db.stats().watched_leases, 0);
    store.clock.advance(ms(60));
    assert!(matches!(store.jobs.lease(b"f").try_acquire(), Err(Error::Held { .. })));
    store.clock.advance(ms(60));
    drop(store.jobs.lease(b"f").try_acquire().unwrap());
    assert_eq!(store.db.stats().renewals, 1, "by keep_alive itself");
}

/// Who asked before the end is woken by it, and need not ask again.
#[test]
fn who_watches_before_the_end_is_woken_by_each_kind_of_it() {
    let store = store();
    let end: [fn(&tidewall::Keyspace, tidewall::Lease); 4] = [
        |_, lease| lease.release().unwrap(),
        |_, lease| drop(lease),
        |jobs, lease| {
            jobs.break_lease(b"f", "test").unwrap();
            std::mem::forget(lease);
        },
        |jobs, lease| {
            let newer = jobs.lease(b"newer").acquire().unwrap();
            jobs.raise(newer.token(), b"f").unwrap();
            std::mem::forget(lease);
        },
    ];
    for (n, end) in end.into_iter().enumerate() {
        let lease = store.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
        let mut lost = Box::pin(lease.lost());
        let waker = counting_waker();
        assert!(waker.poll(lost.as_mut()).is_pending());
        end(&store.jobs, lease);
        let begun = std::time::Instant::now();
        while waker.count() == 0 {
            assert!(begun.elapsed() < ms(10_000), "end {n} is told to nobody");
            thread::yield_now();
        }
        assert!(waker.poll(lost.as_mut()).is_ready());
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

/// It was 584 years from the start of the clock.
#[test]
fn renewing_what_has_no_end_says_so() {
    let store = store();
    let (token, owner) = store.jobs.lease(b"f").ttl(Ttl::INFINITE).acquire().unwrap().detach();
    assert_eq!(store.jobs.renew(b"f", token, owner).unwrap(), Duration::MAX);
    let (token, owner) = store.jobs.lease(b"g").ttl(Ttl::MAX).acquire().unwrap().detach();
    assert_eq!(store.jobs.renew(b"g", token, owner).unwrap(), Ttl::MAX);
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
        batch.operation(OperationId::new(op)).require(require);
        batch.expect(&store.jobs, b"none", Expect::Present).unwrap();
        batch.commit()
    };
    let done = |token: Token, op: u64, require: Require| {
        let mut batch = store.db.batch();
        batch.put(&store.jobs, token, b"f", b"value").unwrap();
        batch.operation(OperationId::new(op)).require(require);
        batch.commit()
    };
    done(lease.token(), 5, Require::Live).unwrap();
    store.clock.advance(ms(100));
    done(lease.token(), 6, Require::Newest).unwrap();
    // The order of the checks: token, operation, liveness, conditions.
    let unknown = Token::new(99).unwrap();
    assert!(matches!(put(unknown, 7, Require::Live), Err(Error::UnknownToken { .. })));
    assert!(matches!(put(lease.token(), 6, Require::Live), Err(Error::Duplicate { .. })));
    assert!(matches!(put(lease.token(), 5, Require::Live), Err(Error::StaleOperation { .. })));
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
