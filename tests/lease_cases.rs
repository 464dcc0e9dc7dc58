//! The ways in which leases, locks and fences are known to go wrong elsewhere, and what stands here for each.
//!
//! Each row names a public report, its symptom, and either the test that would fail if it happened here, or why
//! it cannot. That the tests exist is itself tested.
#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{eventually, ms, open_sim, poll_once, sim, store};
use std::io;
use std::thread;
use std::time::Duration;
use tidewall::storage::{CallKind, Fault};
use tidewall::{Error, Options, OwnerId, Token, Ttl};

enum Here {
    /// The test of this name.
    Test(&'static str),
    /// It cannot happen, because of this.
    Never(&'static str),
}

use Here::{Never, Test};

const CASES: &[(&str, &str, Here)] = &[
    // Expiry, revival, restart.
    ("etcd#9888", "leases renewed for ever by elections", Test("ten_reopens_within_one_ttl_prolong_nothing")),
    ("etcd#9395", "the TTL restarts with the server", Test("reopening_ends_every_lease_without_grace")),
    (
        "etcd#15247",
        "a leader stuck in a sync still acknowledges",
        Test("nothing_that_needs_the_disk_is_answered_while_it_stands_still"),
    ),
    (
        "MetaStore#49",
        "replay gives expired leases fresh TTLs",
        Test("reopening_ends_every_lease_without_grace"),
    ),
    (
        "etcd#14019",
        "expiry lost in a full channel",
        Test("a_great_many_leases_expiring_together_delay_nobody_else"),
    ),
    ("rustfs#5939", "ttl 0 never expires", Test("a_ttl_of_zero_is_refused_and_no_end_is_asked_for_by_name")),
    ("consul#1290", "a restarted watcher ends sessions", Test("dropping_those_who_watch_ends_no_lease")),
    (
        "ShedLock#27",
        "deleted lock state wedges the next acquire",
        Test("a_lease_taken_away_from_outside_wedges_nobody"),
    ),
    // Renewal.
    (
        "redisson#5697",
        "the watchdog stops silently",
        Test("starving_the_callers_threads_loses_no_kept_lease"),
    ),
    (
        "redisson#3712",
        "no renewal after a second acquire by one thread",
        Test("keeping_alive_belongs_to_the_grant_not_to_the_thread"),
    ),
    (
        "dynamodb-lock-client#116",
        "a heartbeat after the release revives it",
        Test("keeping_alive_ends_with_the_lease_however_that_ends"),
    ),
    (
        "dynamolock#280",
        "a renewal whose answer was lost fails the next",
        Test("renewing_twice_is_as_good_as_once"),
    ),
    ("etcd#11886", "above 25 000 leases keep-alives stop", Test("a_hundred_thousand_leases_are_kept_alive")),
    ("etcdv3#87", "keeping an unknown lease alive says Ok", Test("what_was_never_granted_is_not_renewed")),
    ("fountain#2346", "a default epoch makes a lease", Test("what_was_never_granted_is_not_renewed")),
    (
        "etcd#17470",
        "a lease outlives its client object",
        Test("keeping_alive_ends_with_the_lease_however_that_ends"),
    ),
    (
        "redisson#3521",
        "the watchdog keeps a dead holder's lock",
        Test("a_lease_is_kept_alive_up_to_its_longest_hold_and_not_beyond"),
    ),
    // Loss not noticed.
    (
        "consul#18271",
        "loss unnoticed while packets are dropped",
        Never("is_live compares a deadline in memory with a local clock"),
    ),
    ("consul#9788", "told 90 s after the loss", Test("losing_is_told_within_ten_milliseconds")),
    ("etcd#6127", "no way to hear of the loss", Test("a_holder_hears_of_each_kind_of_end")),
    (
        "curator#727",
        "the holder goes on after the loss",
        Test("a_frozen_process_loses_its_lease_to_a_clock_that_goes_on"),
    ),
    (
        "consul#4902",
        "after a loss the handle says it is held",
        Test("after_a_loss_the_same_request_acquires_again"),
    ),
    (
        "client-go#1187",
        "told of a loss though never leader",
        Never("only a Lease, which exists from its grant on, has a Lost"),
    ),
    // Ownership.
    (
        "ShedLock#74",
        "a late unlock frees the successor's lock",
        Test("of_three_parties_only_the_holder_touches_the_lease"),
    ),
    (
        "platform#4476",
        "a stale takeover, then an unlink of the new lease",
        Test("of_three_parties_only_the_holder_touches_the_lease"),
    ),
    (
        "curator#1193",
        "a failed release leaves two opinions",
        Test("a_release_on_a_failed_disk_leaves_one_opinion"),
    ),
    (
        "eventstore#176",
        "one owner keeps its token over an expiry",
        Test("one_owner_gets_a_new_token_with_each_grant"),
    ),
    (
        "bull#308",
        "one token for a whole queue",
        Never("a token is of one fence; a job is a key or prefix of its own"),
    ),
    ("kubernetes#77585", "the identity is a host name", Test("owners_are_random_unless_chosen")),
    // Double grant.
    (
        "ai-memory-mcp#2328",
        "check, then write: both acquire",
        Test("at_most_one_of_many_threads_holds_a_fence_at_a_time_in_memory"),
    ),
    (
        "caplets#222",
        "a token from a read outside of the transaction",
        Test("at_most_one_of_many_threads_holds_a_fence_at_a_time_on_a_disk"),
    ),
    (
        "nats.rs#1301",
        "create after delete: two say Ok",
        Test("at_most_one_of_many_threads_holds_a_fence_at_a_time_in_memory"),
    ),
    ("ShedLock#231", "the clocks of two nodes differ", Never("one clock decides, the store's")),
    (
        "etcd#19597",
        "a dead waiter goes on waiting",
        Test("a_waiter_returns_at_its_own_deadline_and_never_gets_the_grant"),
    ),
    (
        "hazelcast#17260",
        "an unsafe mode nobody asked for",
        Never("there is no mode in which a grant is not durable"),
    ),
    (
        "cockroach#101836",
        "two leases overlap",
        Test("a_successor_holds_its_lease_only_when_its_grant_is_durable"),
    ),
    (
        "client-go#728",
        "released while guarded code runs",
        Never("release consumes the guard, and the token is fenced by the next grant"),
    ),
    ("patroni#2787", "a stale primary wins after a stall", Test("expiry_break_and_raise_hand_over_at_once")),
    // Tokens and marks.
    (
        "cosmos-db-design-patterns#91",
        "a row's TTL resets the token",
        Never("nothing but a power of deletion over files lowers a mark (F2); expiry touches none"),
    ),
    (
        "redisson#6510",
        "25 million token keys for ever",
        Test("a_refused_acquire_burns_no_token_and_leaves_nothing"),
    ),
    (
        "slatedb#352",
        "acknowledged after the fence was collected",
        Never("marks outlive their values (F2); compaction has tests of its own"),
    ),
    (
        "slatedb#271",
        "two writers open at once",
        Never("the directory is locked; storage tests open it twice"),
    ),
    ("lance#6699", "the same hole, documented", Never("as slatedb#352")),
    (
        "bookkeeper#4462",
        "written after the ledger was deleted",
        Never("deleting a key keeps the mark of its fence; the table of mutators shows it"),
    ),
    (
        "bookkeeper#4812",
        "replaced disks accept writes",
        Never("every checksum covers the store id; a missing STORE refuses to open"),
    ),
    (
        "oxia#87",
        "the epoch is not persisted",
        Test("a_successor_holds_its_lease_only_when_its_grant_is_durable"),
    ),
    ("golem#3845", "deleting the record drops the mark", Never("as bookkeeper#4462")),
    ("celld#158", "an epoch is used again", Test("tokens_around_every_power_that_hides_a_bug")),
    (
        "etcd#16028",
        "a restore rewinds revisions",
        Never("restore moves the counter and floors up (docs of restore)"),
    ),
    (
        "pd#6698",
        "timestamps fall back after a restart",
        Test("acknowledged_writes_and_tokens_survive_sigkill"),
    ),
    ("pd#940", "tokens of wall-clock time stick in the future", Never("a token is a counter")),
    ("KAFKA-20090", "stuck at the last epoch", Test("exhausted_tokens_are_said_to_be_and_writes_go_on")),
    ("KAFKA-7190", "producer state dropped with retention", Never("as slatedb#352")),
    ("hazelcast#17436", "counters gone after a restart", Never("Options::must_exist; a store is its files")),
    (
        "dynamodb-lock-client#1",
        "the version cannot fence",
        Never("OwnerId and Token are two types without a conversion"),
    ),
    // Enforcement gaps.
    (
        "temporal#12016",
        "a predecessor's range clean-up deletes the successor's row",
        Never("delete_prefix takes a token and checks each fence; the table of mutators shows it"),
    ),
    (
        "mycelium#96",
        "the write reads the current token again",
        Never("no public call but acquire returns a Token; what shows a mark returns a Mark"),
    ),
    ("bookkeeper#2143", "fenced: null", Test("a_refusal_says_what_to_do")),
    ("reddb#1913", "the error loses the epoch", Test("a_refusal_says_what_to_do")),
    (
        "redpanda#23131",
        "an expired transaction's requests pass",
        Test("a_live_requirement_refuses_a_holder_whose_time_is_over_before_anybody_else_came"),
    ),
    // Cancellation, drop, async.
    (
        "rustfs#2795",
        "a cancelled waiter stays in the count",
        Test("a_cancelled_waiter_leaves_nothing_behind_at_any_point"),
    ),
    ("rslock#30", "dropping does nothing", Test("a_holder_hears_of_each_kind_of_end")),
    // Herd, operators, clocks.
    (
        "etcd#8097",
        "thousands of leases expire at once",
        Test("a_great_many_leases_expiring_together_delay_nobody_else"),
    ),
    ("terraform#17535", "whose lock is it?", Test("holders_are_listed_with_what_an_operator_asks_for")),
    (
        "consul#4508",
        "a delay of zero becomes the default",
        Test("a_lock_delay_is_honoured_after_a_loss_and_not_after_a_release_and_zero_is_zero"),
    ),
    (
        "rust#87906",
        "time asleep is not counted",
        Test("a_suspended_machine_wakes_up_to_leases_that_are_over"),
    ),
];

#[test]
fn each_case_has_its_test_or_its_reason() {
    let sources = [
        include_str!("leases.rs"),
        include_str!("lease_keeping.rs"),
        include_str!("lease_slots.rs"),
        include_str!("lease_slow.rs"),
        include_str!("lease_crowd.rs"),
        include_str!("lease_cases.rs"),
        include_str!("kill.rs"),
    ];
    for (report, symptom, here) in CASES {
        match here {
            Test(name) => {
                let declared = format!("#[test]\nfn {name}()");
                let found = sources.iter().any(|source| source.contains(&declared));
                assert!(found, "{report} ({symptom}): there is no test {name}");
            }
            Never(reason) => assert!(!reason.is_empty(), "{report}"),
        }
    }
}

#[test]
fn a_ttl_of_zero_is_refused_and_no_end_is_asked_for_by_name() {
    let store = store();
    for ttl in [ms(0), std::time::Duration::from_micros(999), Ttl::MAX + ms(1)] {
        assert!(
            matches!(store.jobs.lease(b"f").ttl(ttl).acquire(), Err(Error::InvalidArgument(_))),
            "{ttl:?}"
        );
    }
    let lease = store.jobs.lease(b"f").ttl(Ttl::INFINITE).acquire().unwrap();
    store.clock.advance(Ttl::MAX);
    assert!(lease.is_live());
}

#[test]
fn dropping_those_who_watch_ends_no_lease() {
    let store = store();
    let lease = store.jobs.lease(b"f").acquire().unwrap();
    for _ in 0..10 {
        let mut lost = Box::pin(lease.lost());
        let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
        assert!(poll_once(lost.as_mut()).is_pending() && poll_once(waiting.as_mut()).is_pending());
    }
    lease.renew().unwrap();
    assert!(lease.is_live());
    assert_eq!(store.db.stats().waiting, 0);
    lease.release().unwrap();
    eventually(|| store.db.stats().watched_leases == 0);
}

#[test]
fn a_lease_taken_away_from_outside_wedges_nobody() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(Ttl::INFINITE).acquire().unwrap();
    let other = store.jobs.lease(b"other").acquire().unwrap();
    store.jobs.put(lease.token(), b"f", b"x").unwrap();
    store.jobs.delete(lease.token(), b"f").unwrap();
    store.jobs.raise_all(other.token()).unwrap();
    let next = store.jobs.lease(b"f").acquire().unwrap();
    assert!(next.is_live() && !lease.is_live());
    assert!(lease.release().is_err());
    assert!(next.is_live());
}

#[test]
fn keeping_alive_belongs_to_the_grant_not_to_the_thread() {
    let store = store();
    let first = store.jobs.lease(b"f").ttl(ms(90)).acquire().unwrap();
    first.keep_alive(ms(100)).unwrap();
    store.clock.advance(ms(200));
    let second = store.jobs.lease(b"f").ttl(ms(90)).wait(ms(1000)).acquire().unwrap();
    second.keep_alive(ms(100_000)).unwrap();
    drop(first);
    for _ in 0..20 {
        let renewals = store.db.stats().renewals;
        store.clock.advance(ms(40));
        eventually(|| store.db.stats().renewals > renewals);
        assert!(second.is_live());
    }
}

#[test]
fn renewing_twice_is_as_good_as_once() {
    let store = store();
    let lease = store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    let (token, owner) = (lease.token(), lease.owner());
    for _ in 0..3 {
        store.clock.advance(ms(50));
        assert_eq!(store.jobs.renew(b"f", token, owner).unwrap(), ms(100));
        assert_eq!(store.jobs.renew(b"f", token, owner).unwrap(), ms(100));
    }
    assert_eq!((lease.token(), lease.owner(), lease.remaining()), (token, owner, ms(100)));
}

#[test]
fn a_hundred_thousand_leases_are_kept_alive() {
    let store = store();
    let many = leasekit::rounds(10_000);
    let leases: Vec<_> = (0..many)
        .map(|n| {
            let lease = store.jobs.lease(&n.to_be_bytes()).ttl(ms(9000)).acquire().unwrap();
            lease.keep_alive(ms(1_000_000)).unwrap();
            lease
        })
        .collect();
    let mut renewals = store.db.stats().renewals;
    for _ in 0..5 {
        store.clock.advance(ms(3300));
        renewals += many;
        eventually(|| store.db.stats().renewals >= renewals);
    }
    assert!(leases.iter().all(|lease| lease.is_live()));
    assert_eq!(store.db.stats().expiries, 0);
}

#[test]
fn what_was_never_granted_is_not_renewed() {
    let store = store();
    let lease = store.jobs.lease(b"f").acquire().unwrap();
    let (owner, no_one) = (lease.owner(), OwnerId::new(0));
    assert!(Token::new(0).is_err());
    for (key, token, owner) in [
        (&b"g"[..], lease.token(), owner),
        (b"f", lease.token(), no_one),
        (b"f", Token::new(99).unwrap(), owner),
    ] {
        assert!(matches!(store.jobs.renew(key, token, owner), Err(Error::NotHeld { .. })), "{key:?} {token}");
        assert!(
            matches!(store.jobs.release(key, token, owner), Err(Error::NotHeld { .. })),
            "{key:?} {token}"
        );
    }
    assert!(lease.is_live());
}

#[test]
fn after_a_loss_the_same_request_acquires_again() {
    let store = store();
    let request = store.jobs.lease(b"f").ttl(ms(100));
    let first = request.clone().acquire().unwrap();
    store.clock.advance(ms(100));
    let second = request.acquire().unwrap();
    assert!(second.is_live() && !first.is_live() && second.token() > first.token());
}

#[test]
fn of_three_parties_only_the_holder_touches_the_lease() {
    let store = store();
    let lease = || store.jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    let first = lease();
    store.clock.advance(ms(100));
    let second = lease();
    store.clock.advance(ms(100));
    let third = lease();
    for (token, owner) in [(first.token(), first.owner()), (second.token(), second.owner())] {
        assert!(matches!(store.jobs.release(b"f", token, owner), Err(Error::NotHeld { .. })));
        assert!(matches!(store.jobs.renew(b"f", token, owner), Err(Error::NotHeld { .. })));
        // With the holder's own token, but not its owner id.
        assert!(matches!(store.jobs.release(b"f", third.token(), owner), Err(Error::NotHeld { .. })));
        assert!(matches!(store.jobs.put(token, b"f", b"late"), Err(Error::Fenced { .. })));
    }
    assert!(matches!(first.release(), Err(Error::NotHeld { .. })));
    drop(second);
    assert!(third.is_live() && third.remaining() == ms(100));
}

#[test]
fn a_release_on_a_failed_disk_leaves_one_opinion() {
    let sim = sim();
    let lease = sim.jobs.lease(b"f").acquire().unwrap();
    let token = lease.token();
    sim.disk.fail(Fault::new(CallKind::SyncData, io::ErrorKind::Other).forever());
    assert!(matches!(sim.jobs.put(token, b"f", b"x"), Err(Error::Indeterminate { .. })));
    let mut waiting = Box::pin(sim.jobs.lease(b"g").wait(ms(1000)).acquire_async());
    assert!(matches!(poll_once(waiting.as_mut()), std::task::Poll::Ready(Err(Error::Poisoned { .. }))));
    lease.release().unwrap();
    assert!(sim.jobs.holders(b"").unwrap().is_empty());
    assert!(matches!(sim.jobs.lease(b"f").acquire(), Err(Error::Poisoned { .. })));
    // What is on the disk decides after the next open, and the token is not granted again.
    let (_, jobs) = open_sim(&sim.disk.crash(tidewall::storage::Crash::None, 0), &sim.clock, Options::new());
    assert!(jobs.lease(b"f").acquire().unwrap().token() > token);
}

#[test]
fn waiters_of_a_store_that_is_poisoned_learn_so() {
    let sim = sim();
    let lease = sim.jobs.lease(b"f").acquire().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| sim.jobs.lease(b"f").wait(ms(1000)).acquire());
        eventually(|| sim.db.stats().waiting == 1);
        sim.disk.fail(Fault::new(CallKind::SyncData, io::ErrorKind::Other).forever());
        assert!(sim.jobs.put(lease.token(), b"f", b"x").is_err());
        let answer = waiting.join().unwrap();
        assert!(matches!(answer, Err(Error::Indeterminate { .. } | Error::Poisoned { .. })), "{answer:?}");
    });
    assert!(matches!(lease.renew(), Err(Error::Poisoned { .. })), "live leases run out");
}

#[test]
fn one_owner_gets_a_new_token_with_each_grant() {
    let store = store();
    let owner = OwnerId::new(7);
    let mut last = None;
    for n in 0..10 {
        let lease = store.jobs.lease(b"f").owner(owner).ttl(ms(100)).acquire().unwrap();
        assert!(Some(lease.token()) > last);
        last = Some(lease.token());
        if n % 2 == 0 { store.clock.advance(ms(100)) } else { lease.release().unwrap() }
    }
}

#[test]
fn owners_are_random_unless_chosen() {
    let store = store();
    let owners: std::collections::BTreeSet<_> =
        (0..100u64).map(|n| store.jobs.lease(&n.to_be_bytes()).acquire().unwrap().owner()).collect();
    assert_eq!(owners.len(), 100);
}

#[test]
fn a_refusal_says_what_to_do() {
    let store = store();
    let old = store.jobs.lease(b"f").acquire().unwrap();
    store.jobs.break_lease(b"f", "test").unwrap();
    let new = store.jobs.lease(b"f").acquire().unwrap();
    let fenced = store.jobs.put(old.token(), b"f", b"late").unwrap_err().to_string();
    assert_eq!(
        fenced,
        "token 1 is fenced: the mark of \"f\" in keyspace \"jobs\" is 3; stop, or acquire again"
    );
    store.clock.advance(Duration::from_nanos(77_698));
    let held = store.jobs.lease(b"f").acquire().unwrap_err().to_string();
    let said =
        format!("the lease on \"f\" in keyspace \"jobs\" is held by {} for another 10.0s", new.owner());
    assert_eq!(held, said);
    let held = store.jobs.lease(b"f").owner(new.owner()).acquire().unwrap_err().to_string();
    assert!(held.ends_with(", who asks for it, for another 10.0s"), "{held}");
    let _for_ever = store.jobs.lease(b"g").ttl(Ttl::INFINITE).acquire().unwrap();
    let held = store.jobs.lease(b"g").acquire().unwrap_err().to_string();
    assert!(held.ends_with(" without an end"), "{held}");
    let (token, owner) = (new.token(), new.owner());
    store.clock.advance(ms(10_000));
    let over = store.jobs.renew(b"f", token, owner).unwrap_err().to_string();
    assert_eq!(over, "the lease with token 3 on \"f\" in keyspace \"jobs\" has expired: acquire again");
    let over = store.jobs.renew(b"f", token, owner).unwrap_err().to_string();
    assert_eq!(over, "the lease with token 3 on \"f\" in keyspace \"jobs\" is not held: acquire again");
}
