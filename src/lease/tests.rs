use super::*;

const MS: u64 = 1_000_000;
const OWNER: OwnerId = OwnerId::new(7);

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn fence() -> FenceId {
    FenceId::new(KeyspaceId(1), b"f")
}

fn terms(ttl: Ttl) -> Terms {
    Terms { owner: OWNER, ttl, delay: 0 }
}

fn grant_at(number: u64, now: u64) -> Grant {
    let ttl = Ttl::new(Duration::from_millis(10)).unwrap();
    Grant::pending(fence(), token(number), terms(ttl), Lsn::new(number), now, &Arc::new(Bell::new()))
}

fn grant(number: u64) -> Grant {
    grant_at(number, MS)
}

/// A grant of 10 ms, live since `now`.
fn live(number: u64, now: u64) -> Arc<Grant> {
    let grant = grant_at(number, now);
    assert!(grant.enable(now));
    Arc::new(grant)
}

fn renew(grant: &Grant, now: u64) -> Result<u64, RenewError> {
    grant.renew(now, u64::MAX).map(|renewed| renewed.until)
}

#[test]
fn a_pending_grant_is_held_by_nobody_and_does_not_expire() {
    let grant = grant(1);
    assert!(grant.is_pending());
    assert!(!grant.is_live(16));
    assert!(!grant.is_held(2 * MS));
    assert!(!grant.is_ended());
    assert!(!grant.end_if_expired(u64::MAX));
    assert_eq!(renew(&grant, 16), Err(RenewError::Pending));
    assert_eq!(grant.remaining(16), Some(Duration::from_millis(10)));
    assert_eq!((grant.token(), grant.owner()), (token(1), OWNER));
    assert_eq!(grant.ttl().duration(), Some(Duration::from_millis(10)));
}

#[test]
fn a_grant_ended_while_pending_is_not_handed_out() {
    let grant = grant(1);
    assert!(grant.end(Ending::Released));
    assert!(!grant.enable(16));
    assert!(!grant.is_live(16));
}

#[test]
fn a_grant_is_enabled_once() {
    let grant = live(1, MS);
    assert!(!grant.enable(100 * MS));
    assert_eq!(grant.remaining(MS), Some(Duration::from_millis(10)));
}

#[test]
fn a_live_grant_is_live_until_just_before_its_deadline() {
    let grant = live(1, MS);
    assert!(grant.is_live(11 * MS - 1));
    assert!(!grant.is_live(11 * MS));
    assert_eq!(grant.remaining(11 * MS - 1), Some(Duration::from_nanos(1)));
    assert_eq!(grant.remaining(20 * MS), Some(Duration::ZERO));
    assert!(!grant.is_ended());
}

#[test]
fn renewing_moves_the_deadline_and_never_back() {
    let grant = live(1, 5 * MS);
    assert_eq!(renew(&grant, 9 * MS), Ok(19 * MS));
    assert_eq!(renew(&grant, 6 * MS), Ok(19 * MS));
    assert_eq!(grant.remaining(9 * MS), Some(Duration::from_millis(10)));
}

#[test]
fn renewing_at_the_deadline_is_too_late_for_ever() {
    let grant = live(1, MS);
    assert_eq!(renew(&grant, 11 * MS), Err(RenewError::Expired));
    assert!(grant.is_ended());
    assert_eq!(renew(&grant, 2 * MS), Err(RenewError::Ended));
    assert!(!grant.is_live(2 * MS));
    assert!(!grant.enable(2 * MS));
}

#[test]
fn an_ended_grant_is_ended_by_one_call() {
    let grant = live(1, MS);
    assert!(grant.end(Ending::Released));
    assert!(!grant.end(Ending::Released));
    assert!(!grant.end_if_expired(u64::MAX));
    assert_eq!(renew(&grant, 2 * MS), Err(RenewError::Ended));
    assert_eq!(grant.remaining(2 * MS), Some(Duration::ZERO));
}

#[test]
fn only_an_expired_grant_is_ended_for_expiry() {
    let grant = live(1, MS);
    assert!(!grant.end_if_expired(11 * MS - 1));
    assert!(grant.is_live(MS));
    assert!(grant.end_if_expired(11 * MS));
    assert!(!grant.end_if_expired(11 * MS));
}

#[test]
fn a_grant_without_an_end_is_only_ended_by_hand() {
    let grant =
        Grant::pending(fence(), token(1), terms(Ttl::INFINITE), Lsn::new(1), MS, &Arc::new(Bell::new()));
    assert!(grant.enable(MS));
    assert!(grant.is_live(u64::MAX));
    assert!(!grant.end_if_expired(u64::MAX));
    assert_eq!(renew(&grant, u64::MAX), Ok(FOREVER));
    assert_eq!(grant.remaining(MS), None);
    assert!(grant.end(Ending::Released));
}

#[test]
fn a_bounded_grant_at_the_end_of_time_is_still_bounded() {
    let grant = Grant::pending(
        fence(),
        token(1),
        terms(Ttl::new(Ttl::MAX).unwrap()),
        Lsn::new(1),
        u64::MAX - 100,
        &Arc::new(Bell::new()),
    );
    assert!(grant.enable(u64::MAX - 100));
    assert!(grant.is_live(u64::MAX - 100));
    assert!(grant.remaining(u64::MAX - 100).is_some());
    assert!(grant.end_if_expired(u64::MAX));
}

#[test]
fn the_holder_stops_believing_before_the_table_does() {
    let grant = grant_at(1, MS);
    assert!(grant.enable(3 * MS));
    assert!(grant.is_live(12 * MS));
    assert!(!grant.is_held(11 * MS) && !grant.is_held(12 * MS));
    assert_eq!(renew(&grant, 11 * MS), Err(RenewError::Expired));
    // Nobody else gets it before the table's own deadline.
    assert_eq!(grant.free_at(), Some(13 * MS));
    assert!(!grant.is_free(13 * MS - 1));
    assert!(grant.is_free(13 * MS));
}

/// Instants in the word are rounded, and never in favour of who comes next.
#[test]
fn the_table_never_lets_go_before_the_holder_stops() {
    for now in MS..MS + 40 {
        let grant = grant_at(1, now);
        assert!(grant.enable(now));
        let until = grant.held_until();
        assert_eq!(until, now + 10 * MS);
        assert!(grant.is_live(until - 1) && grant.is_held(until - 1), "{now}");
        assert!(!grant.end_if_expired(until - 1), "{now}");
        let renewed = grant.renew(now + 1, u64::MAX).unwrap();
        assert!(renewed.until >= grant.held_until());
        assert!(grant.is_live(grant.held_until() - 1), "{now}");
    }
}

#[test]
fn a_delay_follows_an_expiry_and_a_break_but_not_a_release() {
    let delayed = || {
        let terms = Terms { delay: 5 * MS, ..terms(Ttl::new(Duration::from_millis(10)).unwrap()) };
        let grant = Grant::pending(fence(), token(1), terms, Lsn::new(1), MS, &Arc::new(Bell::new()));
        assert!(grant.enable(MS));
        grant
    };
    let (expired, broken, released) = (delayed(), delayed(), delayed());
    assert!(expired.end_if_expired(12 * MS));
    assert_eq!((expired.free_at(), expired.ending()), (Some(16 * MS), Some(Ending::Expired)));
    assert!(broken.end_broken(2 * MS));
    assert_eq!((broken.free_at(), broken.ending()), (Some(7 * MS), Some(Ending::Broken)));
    assert!(released.end(Ending::Released));
    assert_eq!((released.free_at(), released.ending()), (Some(0), Some(Ending::Released)));
}

#[test]
fn a_renewal_goes_no_further_than_its_limit() {
    let grant = live(1, MS);
    assert_eq!(grant.renew(5 * MS, 12 * MS), Ok(Renewed { until: 12 * MS, is_late: false }));
    assert_eq!(grant.renew(6 * MS, 12 * MS), Ok(Renewed { until: 12 * MS, is_late: false }));
    assert_eq!(grant.renew(11 * MS, u64::MAX), Ok(Renewed { until: 21 * MS, is_late: true }));
}

#[test]
fn a_watched_grant_reports_its_end_and_no_other_does() {
    let bell = Arc::new(Bell::new());
    let ttl = Ttl::new(Duration::from_millis(10)).unwrap();
    let grants = [1, 2].map(|n| Grant::pending(fence(), token(n), terms(ttl), Lsn::new(n), MS, &bell));
    assert!(grants[1].watch());
    for grant in &grants {
        assert!(grant.enable(MS));
    }
    assert!(grants[1].renew(2 * MS, u64::MAX).is_ok());
    for grant in &grants {
        assert!(grant.end(Ending::Released));
        assert!(!grant.watch());
    }
    assert_eq!(bell.take(), [Over { token: token(2), fence: fence() }]);
}

#[test]
fn a_release_leaves_it_to_the_caller_to_tell_who_watches() {
    let bell = Arc::new(Bell::new());
    let ttl = Ttl::new(Duration::from_millis(10)).unwrap();
    for watched in [false, true] {
        let grant = Grant::pending(fence(), token(1), terms(ttl), Lsn::new(1), MS, &bell);
        assert!(grant.enable(MS));
        if watched {
            assert!(grant.watch());
        }
        assert_eq!(grant.release(), Some(watched));
        assert_eq!((grant.ending(), grant.is_free(MS)), (Some(Ending::Released), true));
        assert_eq!((grant.release(), grant.watch()), (None, false));
    }
    assert!(bell.take().is_empty());
}

#[test]
fn a_recorded_grant_is_over_and_keeps_its_fence_for_a_while() {
    let bell = Arc::new(Bell::new());
    let grant = Grant::recorded(fence(), token(1), terms(Ttl::INFINITE), MS, 9 * MS, &bell);
    assert!(grant.is_ended() && !grant.is_live(MS));
    assert!(!grant.enable(MS));
    assert_eq!(renew(&grant, 2 * MS), Err(RenewError::Ended));
    assert_eq!(grant.remaining(2 * MS), Some(Duration::from_millis(7)));
    assert!(!grant.is_free(8 * MS) && grant.is_free(9 * MS));
}

#[test]
fn a_grant_is_pending_until_it_is_live_or_ended_watched_or_not() {
    for watched in [false, true] {
        let (enabled, ended) = (grant(1), grant(2));
        for grant in [&enabled, &ended] {
            assert!(!watched || grant.watch());
            assert!(grant.is_pending());
        }
        assert!(enabled.enable(MS) && !enabled.is_pending());
        assert!(ended.end(Ending::Overtaken) && !ended.is_pending());
    }
}

#[test]
fn a_grant_without_an_end_is_never_due() {
    let grant =
        Grant::pending(fence(), token(1), terms(Ttl::INFINITE), Lsn::ZERO, MS, &Arc::new(Bell::new()));
    assert!(grant.enable(MS));
    assert_eq!(grant.look_at(MS), None);
    let bounded = live(2, MS);
    assert_eq!(bounded.look_at(2 * MS), Some(11 * MS));
    // Nobody may come to enable it.
    assert_eq!(grant_at(3, MS).look_at(5 * MS), Some(15 * MS));
}

#[test]
fn a_holder_that_stops_believing_is_over_before_its_fence_is_free() {
    let grant = grant_at(1, MS);
    assert!(grant.enable(3 * MS));
    assert!(!grant.end_if_not_held(11 * MS - 1));
    assert!(grant.end_if_not_held(11 * MS));
    assert_eq!((grant.ending(), grant.free_at()), (Some(Ending::Expired), Some(13 * MS)));
}

#[test]
fn only_grants_that_ran_out_are_counted_as_such() {
    let bell = Arc::new(Bell::new());
    let ttl = Ttl::new(Duration::from_millis(10)).unwrap();
    let live = |number| {
        let grant = Grant::pending(fence(), token(number), terms(ttl), Lsn::ZERO, MS, &bell);
        assert!(grant.enable(MS));
        grant
    };
    assert!(live(1).end(Ending::Released) && live(2).end_broken(MS) && live(3).end(Ending::Overtaken));
    assert_eq!(bell.expired(), 0);
    for number in 4..=6 {
        assert!(live(number).end_if_expired(20 * MS));
    }
    assert_eq!(bell.expired(), 3);
}
