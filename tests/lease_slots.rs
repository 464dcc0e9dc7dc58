//! Slots, and leases kept alive by the store.
#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{block_on, eventually, ms, poll_once, prefixes, store};
use std::thread;
use tidewall::{Ending, Error, KeyspaceOptions, Ttl};

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

/// One slot of two is free, and the first in the queue wants the only one: what keeps it keeps nobody else.
#[test]
fn who_leaves_a_queue_for_slots_keeps_nobody_who_asked_for_more() {
    for is_late in [false, true] {
        let store = prefixes();
        let slots = |n| store.jobs.lease(b"u").slots(n).ttl(Ttl::INFINITE);
        let (held, stays) = (slots(2).acquire().unwrap(), slots(2).acquire().unwrap());
        let mut fewer = Box::pin(slots(1).wait(ms(50)).acquire_async());
        let mut same = Box::pin(slots(1).wait(ms(50)).acquire_async());
        let mut more = Box::pin(slots(2).wait(ms(1000)).acquire_async());
        assert!(poll_once(fewer.as_mut()).is_pending());
        assert!(poll_once(same.as_mut()).is_pending());
        assert!(poll_once(more.as_mut()).is_pending());
        held.release().unwrap();
        if is_late {
            store.clock.advance(ms(50));
            assert!(matches!(block_on(fewer), Err(Error::Timeout { .. })));
            assert!(matches!(block_on(same), Err(Error::Timeout { .. })));
        } else {
            drop((fewer, same));
        }
        eventually(|| store.db.stats().waiting == 0);
        assert_eq!(block_on(more).unwrap().prefix(), b"u.0/", "left late: {is_late}");
        assert!(stays.is_live());
    }
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

/// Redisson 3521: no renewal promises more than what was asked for.
#[test]
fn a_lease_is_never_renewed_beyond_its_longest_hold() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(90)).acquire().unwrap();
    lease.keep_alive(ms(200)).unwrap();
    let mut renewals = store.db.stats().renewals;
    for step in 1..=16u64 {
        store.clock.advance(ms(10));
        if step % 4 == 0 {
            eventually(|| store.db.stats().renewals > renewals);
            renewals = store.db.stats().renewals;
        }
        assert!(ms(10 * step) + lease.remaining() <= ms(200), "after {step} steps");
    }
}

/// A ttl is the least that a lease lasts: a shorter hold would be promised, and not kept.
#[test]
fn a_longest_hold_below_the_ttl_is_refused_and_changes_nothing() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
    let refused = lease.keep_alive(ms(9_999)).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
    for said in ["9.999s", "10s", "shorter ttl"] {
        assert!(refused.to_string().contains(said), "{refused}");
    }
    assert_eq!((store.db.stats().renewals, store.db.stats().watched_leases), (0, 0));
    lease.keep_alive(ms(10_000)).unwrap();
    store.clock.advance(ms(10_000));
    assert!(!lease.is_live());
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
    assert!(matches!(broken.keep_alive(ms(90)), Err(Error::NotHeld { .. } | Error::Expired { .. })));
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
