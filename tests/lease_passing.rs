//! Who gives a lease back hands it over: by itself, without the disk, and to nobody who has left.
#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{block_on, eventually, ms, poll_once, store};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Instant;
use tidewall::storage::{CallKind, Fault, SimDisk};
use tidewall::{Error, KeyspaceOptions, Options};

/// A task that takes its time to be woken, and so holds up the thread that wakes it.
#[derive(Default)]
struct Sluggish {
    is_called: AtomicBool,
    may_go: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Sluggish {
    fn wake(self: Arc<Self>) {
        self.is_called.store(true, Ordering::Release);
        let mut may_go = self.may_go.lock().unwrap();
        while !*may_go {
            may_go = self.changed.wait(may_go).unwrap();
        }
    }
}

/// Lets it go, also when an assertion fails: the store waits for its thread.
struct LetGo(Arc<Sluggish>);

impl Drop for LetGo {
    fn drop(&mut self) {
        *self.0.may_go.lock().unwrap() = true;
        self.0.changed.notify_all();
    }
}

#[test]
fn a_release_hands_over_while_the_thread_of_the_leases_stands_still() {
    let store = store();
    let other = store.jobs.lease(b"other").ttl(ms(10)).acquire().unwrap();
    let held = store.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
    let mut lost = Box::pin(other.lost());
    let let_go = LetGo(Arc::default());
    let waker = Waker::from(let_go.0.clone());
    assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    store.clock.advance(ms(10));
    eventually(|| let_go.0.is_called.load(Ordering::Acquire));
    // A queue of two: the first is served by the release of the holder, the second by that of the first.
    let mut first = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    let mut second = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    assert!(poll_once(first.as_mut()).is_pending());
    assert!(poll_once(second.as_mut()).is_pending());
    let mut release = Some(held);
    for (waiting, token) in [(&mut first, 3), (&mut second, 4)] {
        release.take().unwrap().release().unwrap();
        let end = Instant::now() + ms(60_000);
        let lease = loop {
            if let Poll::Ready(lease) = poll_once(waiting.as_mut()) {
                break lease.unwrap();
            }
            assert!(Instant::now() < end, "it was never handed over");
            thread::yield_now();
        };
        assert_eq!(lease.token().get(), token, "no token is burnt");
        release = Some(lease);
    }
    drop(let_go);
}

/// A fence that ran out belongs to who waits for it, also before anybody has come to handing it over.
#[test]
fn nobody_overtakes_a_waiter_while_the_thread_of_the_leases_stands_still() {
    let store = store();
    let other = store.jobs.lease(b"other").ttl(ms(10)).acquire().unwrap();
    let held = store.jobs.lease(b"f").ttl(ms(20)).acquire().unwrap();
    let mut waiting = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
    assert!(poll_once(waiting.as_mut()).is_pending());
    let mut lost = Box::pin(other.lost());
    let let_go = LetGo(Arc::default());
    let waker = Waker::from(let_go.0.clone());
    assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    store.clock.advance(ms(10));
    eventually(|| let_go.0.is_called.load(Ordering::Acquire));
    store.clock.advance(ms(20));
    assert!(!held.is_live());
    let late = store.jobs.lease(b"f").try_acquire();
    assert!(matches!(late, Err(Error::Held { .. })), "{late:?}");
    drop(let_go);
    assert_eq!(block_on(waiting).unwrap().token().get(), 3, "no token is burnt");
}

#[test]
fn a_waiter_that_leaves_while_the_lease_is_given_back_takes_it_from_nobody() {
    let store = store();
    for round in 0..300 {
        let held = store.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
        let mut leaving = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
        let mut staying = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
        assert!(poll_once(leaving.as_mut()).is_pending());
        assert!(poll_once(staying.as_mut()).is_pending());
        thread::scope(|scope| {
            scope.spawn(move || {
                (0..round % 7).for_each(|_| thread::yield_now());
                drop(leaving);
            });
            held.release().unwrap();
        });
        let lease = block_on(staying).unwrap();
        assert!(lease.is_live());
        assert_eq!(store.db.stats().waiting, 0);
    }
    assert_eq!(store.db.stats().watched_leases, 0);
}

#[test]
fn a_lease_given_back_beside_the_deadline_of_its_waiter_goes_to_it_or_to_the_next_one() {
    let store = store();
    for _ in 0..200 {
        let held = store.jobs.lease(b"f").ttl(ms(10_000)).acquire().unwrap();
        let mut late = Box::pin(store.jobs.lease(b"f").wait(ms(50)).acquire_async());
        let mut next = Box::pin(store.jobs.lease(b"f").wait(ms(1000)).acquire_async());
        assert!(poll_once(late.as_mut()).is_pending());
        assert!(poll_once(next.as_mut()).is_pending());
        let before = held.token();
        let late = thread::scope(|scope| {
            scope.spawn(|| store.clock.advance(ms(50)));
            held.release().unwrap();
            block_on(late)
        });
        match late {
            Ok(lease) => assert_eq!(lease.token().get(), before.get() + 1),
            Err(error) => assert!(matches!(error, Error::Timeout { .. }), "{error}"),
        }
        assert!(block_on(next).unwrap().token() > before);
        assert_eq!(store.db.stats().waiting, 0);
    }
}

#[test]
fn who_is_granted_by_a_release_on_a_failed_disk_is_told_so() {
    let store = store();
    let held = store.jobs.lease(b"f").acquire().unwrap();
    let company = store.jobs.lease(b"g").acquire().unwrap();
    let waiting = |key: &'static [u8]| Box::pin(store.jobs.lease(key).wait(ms(1000)).acquire_async());
    let (mut first, mut second) = (waiting(b"f"), waiting(b"g"));
    assert!(poll_once(first.as_mut()).is_pending());
    assert!(poll_once(second.as_mut()).is_pending());
    store.disk.fail(Fault::new(CallKind::SyncData, io::ErrorKind::Other).forever());
    // Appended by the release, which does not hear of the disk; what waits for the sync does.
    held.release().unwrap();
    company.release().unwrap();
    for waiting in [first, second] {
        let answer = block_on(waiting);
        assert!(matches!(answer, Err(Error::Indeterminate { .. } | Error::Poisoned { .. })), "{answer:?}");
    }
    assert_eq!(store.db.stats().waiting, 0);
}

#[test]
fn leases_are_handed_over_also_where_a_segment_ends() {
    // Releases make no segments: where the room is at its end, the thread of the leases goes on.
    let options = Options::new().segment_bytes(tidewall::MIN_SEGMENT_BYTES).storage(SimDisk::new());
    let db = options.open("sim").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let mut held = jobs.lease(b"f").acquire().unwrap();
    let before = db.stats().disk_bytes;
    for round in 0..1000 {
        let mut next = Box::pin(jobs.lease(b"f").wait(ms(60_000)).acquire_async());
        assert!(poll_once(next.as_mut()).is_pending());
        held.release().unwrap();
        held = block_on(next).unwrap();
        assert_eq!(held.token().get(), round + 2);
    }
    assert!(db.stats().disk_bytes > before, "several segments were filled");
    assert_eq!(db.stats().hand_overs, 1000);
}
