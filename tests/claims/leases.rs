//! L1–L5, and where tokens come from.

use crate::store::{Sim, ms, op, secs, token};
use std::time::Duration;
use tidewall::storage::Crash;
use tidewall::*;

fn keys(db: &Db) -> Keyspace {
    db.keyspace("k", KeyspaceOptions::new()).unwrap()
}

#[test]
fn l1_a_held_lease_names_its_owner_and_how_long_it_is_held() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").owner(OwnerId::new(7)).ttl(secs(10)).acquire().unwrap();
    sim.clock.advance(secs(3));
    let held = ks.lease(b"a").owner(OwnerId::new(8)).acquire().unwrap_err();
    assert!(held.is_retryable());
    assert!(held.to_string().contains("held by 00000000000000000000000000000007 for another"), "{held}");
    assert_err!(Err::<(), _>(held), Error::Held { owner, remaining, .. }
        if owner == OwnerId::new(7) && remaining == Some(secs(7)));
    assert_eq!(lease.remaining(), secs(7));
    // The same owner is no exception: never a second grant.
    assert_err!(ks.lease(b"a").owner(OwnerId::new(7)).acquire(), Error::Held { owner, .. } if owner == lease.owner());
    assert_eq!(db.stats().grants, 1);
    let endless = ks.lease(b"b").ttl(Ttl::INFINITE).acquire().unwrap();
    assert_err!(ks.lease(b"b").try_acquire(), Error::Held { remaining: None, .. });
    drop(endless);
}

#[test]
fn l1_a_refused_acquire_burns_no_token() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").acquire().unwrap();
    for _ in 0..10 {
        assert_err!(ks.lease(b"a").acquire(), Error::Held { .. });
    }
    assert_eq!(ks.lease(b"b").acquire().unwrap().token().get(), lease.token().get() + 1);
}

/// L2: across closes, power cuts of every kind, and kills. Pd 6698, cases of double grants.
#[test]
fn l2_tokens_strictly_increase_across_reopening_and_power_cuts() {
    let policies = [Crash::None, Crash::All, Crash::Prefix, Crash::OneMissing, Crash::Torn { bytes: true }];
    let mut sim = Sim::new();
    let mut last = 0;
    for round in 0..60u64 {
        let db = sim.open();
        let ks = keys(&db);
        for key in [&b"a"[..], b"b"] {
            let lease = ks.lease(key).acquire().expect("reopening ends every lease");
            assert!(lease.token().get() > last, "{} after {last}", lease.token());
            last = lease.token().get();
            if round % 3 == 0 {
                ks.put(lease.token(), key, &[1; 900]).unwrap();
            }
            std::mem::forget(lease);
        }
        match round % 7 {
            0 => db.close().unwrap(),
            1 => sim.disk = sim.disk.kill(),
            n => sim.disk = sim.disk.crash(policies[n as usize - 2], round),
        }
    }
    assert!(last >= 120);
}

#[test]
fn l2_the_counter_is_above_every_token_that_a_raise_carried() {
    let mut sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    db.advance_tokens(token(500)).unwrap();
    ks.raise_all(token(500)).unwrap();
    let db = sim.power_cut();
    assert_eq!(keys(&db).lease(b"a").acquire().unwrap().token(), token(501));
}

/// Kafka 21506: the widths where counters break elsewhere.
#[test]
fn l2_the_counter_crosses_the_usual_widths_and_ends_at_its_maximum() {
    for past in [(1u64 << 31) - 2, (1 << 32) - 2, (1 << 53) - 2] {
        let mut sim = Sim::new();
        let db = sim.open();
        db.advance_tokens(token(past)).unwrap();
        let mut last = past;
        for round in 0..6 {
            let db = if round % 2 == 0 { sim.power_cut() } else { sim.open() };
            let ks = keys(&db);
            let lease = ks.lease(b"a").acquire().unwrap();
            assert_eq!(lease.token().get(), last + 1);
            last += 1;
            ks.put(lease.token(), b"a", b"x").unwrap();
            assert_eq!(ks.mark(b"a").unwrap().unwrap().get(), last);
            assert_eq!(ks.get(b"a").unwrap().unwrap().token().get(), last);
            drop(lease);
            db.close().unwrap();
        }
    }
}

#[test]
fn l2_an_exhausted_counter_grants_nothing_and_writes_go_on() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    db.advance_tokens(token(Token::MAX.get() - 3)).unwrap();
    for left in [2, 1, 0] {
        assert_eq!(ks.lease(b"a").acquire().unwrap().token().get(), Token::MAX.get() - left);
    }
    let db = sim.reopen(db);
    let ks = keys(&db);
    assert_err!(ks.lease(b"a").acquire(), Error::TokensExhausted);
    assert_err!(ks.lease(b"b").acquire(), Error::TokensExhausted);
    ks.put(Token::MAX, b"a", b"goes on").unwrap();
    ks.raise(Token::MAX, b"b").unwrap();
    ks.put(Token::MAX, b"b", b"goes on").unwrap();
    ks.raise_all(Token::MAX).unwrap();
    ks.put(Token::MAX, b"c", b"goes on").unwrap();
    db.advance_tokens(Token::MAX).unwrap();
    let db = sim.reopen(db);
    assert_eq!(keys(&db).iter().count(), 3);
}

#[test]
fn a_ttl_is_from_one_millisecond_on_or_infinite_by_name() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    for ttl in [Duration::ZERO, Duration::from_micros(999), Ttl::MAX + ms(1), Duration::MAX] {
        assert_err!(ks.lease(b"a").ttl(ttl).acquire(), Error::InvalidArgument(_));
    }
    assert_eq!(db.stats().grants, 0);
    let endless = ks.lease(b"a").ttl(Ttl::INFINITE).acquire().unwrap();
    sim.clock.set(u64::MAX - 1);
    assert!(endless.is_live());
    assert_eq!(endless.remaining(), Duration::MAX);
    endless.renew().unwrap();
    endless.release().unwrap();
    sim.clock.set(1_000_000_000);
    assert!(ks.lease(b"a").ttl(Ttl::new(Ttl::MAX).unwrap()).acquire().unwrap().is_live());
}

/// L3: a sync that takes long shortens the holder's time, not the table's.
#[test]
fn l3_an_expired_lease_is_over_for_its_holder_first() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").ttl(secs(10)).acquire().unwrap();
    sim.clock.advance(secs(10) - Duration::from_nanos(1));
    assert!(lease.is_live());
    assert_err!(ks.lease(b"a").acquire(), Error::Held { .. });
    sim.clock.advance(Duration::from_nanos(1));
    assert!(!lease.is_live());
    assert_eq!(lease.remaining(), Duration::ZERO);
}

#[test]
fn expiry_alone_fences_nobody() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").ttl(ms(1)).acquire().unwrap();
    sim.clock.advance(secs(100));
    ks.put(lease.token(), b"a", b"nobody came").unwrap();
    let new = ks.lease(b"a").acquire().unwrap();
    assert_err!(ks.put(lease.token(), b"a", b"late"), Error::Fenced { mark, .. } if mark == new.token());
    assert_eq!(db.stats().takeovers, 1);
}

#[test]
fn l4_a_renewal_after_expiry_fails_for_ever() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").ttl(secs(10)).acquire().unwrap();
    sim.clock.advance(secs(9));
    lease.renew().unwrap();
    assert_eq!(lease.remaining(), secs(10));
    sim.clock.advance(secs(10));
    assert_err!(lease.renew(), Error::Expired { .. });
    assert_err!(ks.renew(b"a", lease.token(), lease.owner()), Error::NotHeld { .. });
    // Not even under a clock that breaks its promise.
    sim.clock.set(1_000_000_000);
    assert!(lease.renew().is_err());
    assert!(!lease.is_live());
    assert_err!(lease.release(), Error::NotHeld { .. });
    assert_eq!(db.stats().renewals, 1);
}

#[test]
fn l4_a_remote_holder_renews_and_releases_by_key_token_and_owner() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = db.keyspace("p", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
    let me = OwnerId::new(1);
    let lease = ks.lease(b"a/").owner(me).ttl(secs(10)).acquire().unwrap();
    let token_ = lease.token();
    std::mem::forget(lease);
    sim.clock.advance(secs(5));
    assert_eq!(ks.renew(b"a/any key of it", token_, me).unwrap(), secs(10));
    assert_eq!(ks.renew(b"a/", token_, me).unwrap(), secs(10), "renewing twice is renewing once");
    for (key, token_, owner) in
        [(&b"b/"[..], token_, me), (b"a/", token(token_.get() + 1), me), (b"a/", token_, OwnerId::new(2))]
    {
        assert_err!(ks.renew(key, token_, owner), Error::NotHeld { .. });
        assert_err!(ks.release(key, token_, owner), Error::NotHeld { .. });
    }
    assert_err!(ks.lease(b"a/").acquire(), Error::Held { .. });
    ks.release(b"a/", token_, me).unwrap();
    assert_err!(ks.release(b"a/", token_, me), Error::NotHeld { .. });
    assert_err!(ks.renew(b"a/", token_, me), Error::NotHeld { .. });
    assert!(ks.lease(b"a/").acquire().unwrap().token() > token_);
}

/// ShedLock 74, dashpay 4476.
#[test]
fn l4_a_release_by_an_old_holder_leaves_its_successors_alone() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let me = OwnerId::new(1);
    let first = ks.lease(b"a").owner(me).ttl(secs(1)).acquire().unwrap();
    sim.clock.advance(secs(2));
    let second = ks.lease(b"a").owner(me).ttl(secs(1)).acquire().unwrap();
    sim.clock.advance(secs(2));
    let third = ks.lease(b"a").owner(me).ttl(secs(100)).acquire().unwrap();
    assert!(first.token() < second.token() && second.token() < third.token());
    assert_err!(ks.release(b"a", first.token(), me), Error::NotHeld { .. });
    assert_err!(first.release(), Error::NotHeld { .. });
    assert_err!(second.renew(), Error::Expired { .. } | Error::NotHeld { .. });
    drop(second);
    assert!(third.is_live());
    assert_err!(ks.lease(b"a").acquire(), Error::Held { .. });
    ks.put(third.token(), b"a", b"mine").unwrap();
}

#[test]
fn dropping_a_lease_releases_it_at_once_and_without_io() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").ttl(Ttl::INFINITE).acquire().unwrap();
    let calls = sim.disk.calls();
    drop(lease);
    assert_eq!(sim.disk.calls(), calls);
    let lease = ks.lease(b"a").acquire().unwrap();
    assert_eq!(lease.token().get(), 2);
    let renewed = sim.disk.calls();
    lease.renew().unwrap();
    lease.release().unwrap();
    assert_eq!(sim.disk.calls(), renewed);
    assert_eq!((db.stats().releases, db.stats().renewals), (2, 1));
}

#[test]
fn l5_a_mark_above_its_token_ends_a_lease_whatever_raised_it() {
    type Raise = fn(&Db, &Keyspace, Token);
    let raises: [Raise; 3] = [
        |_, ks, token| assert_ne!(ks.raise(token, b"a").unwrap(), Raised::Already),
        |_, ks, token| assert_ne!(ks.raise_all(token).unwrap(), Raised::Already),
        |db, ks, token| {
            let mut batch = db.batch();
            batch.raise(ks, token, b"a").unwrap().put(ks, token, b"a", b"x").unwrap();
            batch.commit().unwrap();
        },
    ];
    for raise in raises {
        let sim = Sim::new();
        let db = sim.open();
        let ks = keys(&db);
        let lease = ks.lease(b"a").ttl(Ttl::INFINITE).acquire().unwrap();
        let bystander = db.keyspace("o", KeyspaceOptions::new()).unwrap();
        let bystander = bystander.lease(b"a").acquire().unwrap();
        let above = ks.lease(b"b").acquire().unwrap();
        raise(&db, &ks, above.token());
        assert!(!lease.is_live());
        assert_eq!(lease.remaining(), Duration::ZERO);
        assert_err!(lease.renew(), Error::NotHeld { .. });
        assert_err!(ks.renew(b"a", lease.token(), lease.owner()), Error::NotHeld { .. });
        assert_err!(ks.put(lease.token(), b"a", b"late"), Error::Fenced { .. });
        assert!(bystander.is_live());
        assert!(above.is_live(), "its token is not below the mark");
        let next = ks.lease(b"a").acquire().expect("the fence is free");
        assert!(next.token() > above.token());
        assert_err!(lease.release(), Error::NotHeld { .. });
        assert!(next.is_live());
    }
}

/// L5: the own mark only knows grants; a floor that does not reach the token leaves the lease alone.
#[test]
fn l5_a_floor_at_or_below_its_token_leaves_a_lease_alone() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let (low, high) = (ks.lease(b"a").acquire().unwrap(), ks.lease(b"b").acquire().unwrap());
    ks.raise_all(low.token()).unwrap();
    assert!(low.is_live() && high.is_live());
    ks.raise_all(high.token()).unwrap();
    assert!(!low.is_live() && high.is_live());
    high.renew().unwrap();
}

#[test]
fn reopening_ends_every_lease_and_keeps_every_mark() {
    let mut sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let lease = ks.lease(b"a").owner(OwnerId::new(1)).ttl(Ttl::INFINITE).acquire().unwrap();
    ks.put_operation(lease.token(), op(1), b"a", b"x").unwrap();
    let db = sim.power_cut();
    let ks = keys(&db);
    // Without an end and never released: it stays in the list of holders, and is over all the same.
    assert_eq!(db.stats().leases, 1);
    assert_err!(ks.renew(b"a", lease.token(), OwnerId::new(1)), Error::NotHeld { .. });
    ks.put(lease.token(), b"a", b"its token still writes").unwrap();
    let next = ks.lease(b"a").acquire().unwrap();
    assert_eq!(next.predecessor(), Some((lease.token(), op(1))));
    assert_err!(ks.put(lease.token(), b"a", b"late"), Error::Fenced { .. });
}

#[test]
fn a_keyspace_of_external_tokens_grants_no_leases() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    assert_err!(rows.lease(b"a").acquire(), Error::InvalidArgument(_));
    assert_err!(rows.lease(b"a").try_acquire(), Error::InvalidArgument(_));
    assert_eq!(rows.mark(b"a").unwrap(), None);
    // Their numbers do not move the counter of the store.
    rows.put(Token::MAX, b"a", b"").unwrap();
    assert_eq!(keys(&db).lease(b"a").acquire().unwrap().token(), token(1));
}

/// Every grant's token is its own: one owner that comes back gets a new one.
#[test]
fn l2_the_same_owner_gets_a_new_token_with_every_grant() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = keys(&db);
    let mut last = None;
    for _ in 0..20 {
        let lease = ks.lease(b"a").owner(OwnerId::new(1)).acquire().unwrap();
        assert!(Some(lease.token()) > last);
        last = Some(lease.token());
    }
}
