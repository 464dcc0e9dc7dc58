//! Leases through the public API: restarts, operators, clocks, and the numbers at the edges.
#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{block_on, eventually, ms, open_sim, poll_once, prefixes, sim, store};
use std::thread;
use std::time::Duration;
use tidewall::storage::SimDisk;
use tidewall::{Ending, Error, KeyspaceOptions, ManualClock, Options, OwnerId, Token, Tokens, Ttl};

// Restart.

#[test]
fn reopening_ends_every_lease_without_grace() {
    let sim = sim();
    let lease = sim.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
    let token = lease.token();
    std::mem::forget(lease);
    let (_, jobs) = sim.reopen(Options::new());
    assert!(jobs.holders(b"").unwrap().is_empty());
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
    let holders = jobs.holders(b"f").unwrap();
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
        assert_eq!(jobs.holders(b"f").unwrap().len(), usize::from(round == 0), "round {round}");
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
    for round in 0..3 {
        let (db, jobs) = open_sim(&disk, &sim.clock, Options::new().lease_grace(ms(200)));
        let holders = jobs.holders(b"").unwrap();
        assert_eq!(holders.len(), 1);
        // Grace is for the run just before, also for what has no end.
        assert_eq!(holders[0].remaining, Some(ms(if round == 0 { 200 } else { 0 })));
        assert_eq!((holders[0].owner, holders[0].token, holders[0].is_live), (owner, token, false));
        drop((db, jobs));
        disk = disk.crash(tidewall::storage::Crash::None, 0);
    }
    let (_db, jobs) = open_sim(&disk, &sim.clock, Options::new());
    jobs.put(token, b"f", b"still the newest token").unwrap();
    let broken = jobs.break_lease(b"f", "gone for good").unwrap().unwrap();
    assert_eq!((broken.token, broken.owner), (token, owner));
    assert!(matches!(jobs.put(token, b"f", b"late"), Err(Error::Fenced { .. })));
    assert!(jobs.holders(b"").unwrap().is_empty());
    assert_eq!(jobs.break_lease(b"f", "again").unwrap(), None);
}

// Operators.

/// It burnt a token, and said that it broke what nobody kept any more.
#[test]
fn a_lease_from_before_is_broken_only_as_long_as_it_keeps_its_fence() {
    for (later, is_kept) in [(ms(499), true), (ms(500), false)] {
        let store = store();
        let lease = store.jobs.lease(b"f").ttl(ms(1000)).acquire().unwrap();
        let token = lease.token();
        std::mem::forget(lease);
        let (db, jobs) = store.reopen(Options::new().lease_grace(ms(500)));
        let before = db.highest_token().unwrap();
        store.clock.advance(later);
        assert_eq!(jobs.holders(b"").unwrap().iter().filter(|of| of.fence == b"f").count(), is_kept.into());
        let broken = jobs.break_lease(b"f", "gone").unwrap();
        assert_eq!(broken.map(|broken| broken.token), is_kept.then_some(token));
        assert_eq!(db.highest_token().unwrap() == before, !is_kept);
    }
}

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
    let all = store.jobs.holders(b"").unwrap();
    let fences: Vec<_> = all.iter().map(|holder| &holder.fence[..]).collect();
    assert_eq!(fences, [&b"a/"[..], b"b/", b"u.0/"]);
    assert_eq!((all[0].owner, all[0].token, all[0].is_live), (owner, a.token(), true));
    assert_eq!((all[0].age, all[0].remaining, all[0].waiting), (ms(30), Some(ms(70)), 0));
    assert_eq!((all[1].remaining, all[2].waiting), (None, 1));
    assert_eq!(store.jobs.holders(b"b").unwrap().len(), 1);
    store.clock.advance(ms(70));
    assert!(store.jobs.holders(b"a").unwrap().is_empty(), "its time is over");
}

#[test]
fn breaking_fences_the_holder_at_once_and_durably() {
    let sim = sim();
    let lease = sim.jobs.lease(b"f").acquire().unwrap();
    let broken = sim.jobs.break_lease(b"f", "drill").unwrap().unwrap();
    assert_eq!((broken.token, broken.owner, &broken.reason[..]), (lease.token(), lease.owner(), "drill"));
    assert!(broken.mark > lease.token());
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
    type Move = fn(&ManualClock);
    let moves: [(&str, Move); 4] = [
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
    assert!(rows.holders(b"").unwrap().is_empty());
    assert_eq!(rows.break_lease(b"f", "none").unwrap(), None);
}

/// The thread of the leases looks at a queue when its fence may be free; it needs room only when it is.
#[test]
fn a_waiter_hears_nothing_of_a_full_disk_while_its_fence_is_held() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let (db, jobs) = open_sim(&disk, &clock, Options::new().segment_bytes(16 << 10));
    let held = jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    let used = disk.file_names().iter().map(|name| disk.read_file(name).unwrap().len() as u64).sum();
    disk.set_budget(Some(used));
    let full = (0u64..).find_map(|n| match jobs.lease(&n.to_be_bytes()).ttl(Ttl::INFINITE).acquire() {
        Ok(lease) => {
            lease.detach();
            None
        }
        Err(error) => Some(error),
    });
    assert!(matches!(full, Some(Error::NoSpace { .. })), "{full:?}");
    let mut waiting = Box::pin(jobs.lease(b"f").wait(ms(10_000)).acquire_async());
    for _ in 0..10 {
        assert!(poll_once(waiting.as_mut()).is_pending());
        clock.advance(ms(60));
        held.renew().unwrap();
        (0..1000).for_each(|_| thread::yield_now());
    }
    assert!(poll_once(waiting.as_mut()).is_pending());
    assert_eq!(db.stats().waiting, 1);
}
