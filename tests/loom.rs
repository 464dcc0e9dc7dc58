//! The lock-free kernels under every interleaving of a few threads.
//!
//! The sources of the crate are compiled here once more, with `crate::sync` made of loom's primitives.
//! Loom runs a model again and again, with each order of events the memory model allows (at most
//! three preemptions), and fails on a deadlock, which is how a lost wake-up shows, on a data race, and on
//! an assertion.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --test loom
//! ```
#![cfg(loom)]
// The models use a part of each file.
#![allow(dead_code)]

#[path = "../src/error.rs"]
mod error;
#[path = "../src/group_commit.rs"]
mod group_commit;
#[path = "../src/log/guard.rs"]
mod guard;
#[path = "../src/lease.rs"]
mod lease;
#[path = "../src/types.rs"]
mod types;

use group_commit::{Doorbell, Heard, NotDurable, Progress, Sleeper, WakerSlot};
use guard::Pins;
use lease::{Bell, Ending, FenceId, Grant, RenewError, Terms};
use loom::cell::UnsafeCell;
use loom::thread;
use std::task::{Context, Poll, Wake, Waker};
use sync::{Arc, Condvar, Mutex};
use types::{KeyspaceId, Lsn, OwnerId, Token, Ttl};

/// `src/sync.rs` on loom: the part of it that the kernels use.
mod sync {
    use std::collections::HashMap;
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    pub(crate) use crossbeam_utils::CachePadded;
    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a loom::sync::Mutex<T>,
        /// Empty only while a condition variable sleeps with it.
        held: Option<loom::sync::MutexGuard<'a, T>>,
    }

    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard { mutex: &self.0, held: Some(self.0.lock().unwrap()) }
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.held.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.held.as_mut().unwrap()
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Condvar(loom::sync::Condvar::new())
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.held = Some(self.0.wait(guard.held.take().unwrap()).unwrap());
        }

        /// Loom has no time: here it is always over, so no wake-up helps; in `wait` it never is.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _timeout: Duration) {
            drop(guard.held.take());
            guard.held = Some(guard.mutex.lock().unwrap());
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    loom::lazy_static! {
        /// The kernel's side of a futex: under one lock, a queue of sleepers for each word.
        static ref FUTEXES: loom::sync::Mutex<HashMap<usize, Vec<Arc<loom::sync::Condvar>>>> =
            loom::sync::Mutex::new(HashMap::new());
    }

    pub(crate) fn wait_on(word: &AtomicU32, expected: u32) {
        let mut queues = FUTEXES.lock().unwrap();
        // The lock orders this load after the store of anyone who came to wake before.
        if word.load(Ordering::Relaxed) == expected {
            let sleeper = Arc::new(loom::sync::Condvar::new());
            queues.entry(address(word)).or_default().push(sleeper.clone());
            drop(sleeper.wait(queues).unwrap());
        }
    }

    pub(crate) fn wake_all(word: &AtomicU32) {
        let mut queues = FUTEXES.lock().unwrap();
        for sleeper in queues.remove(&address(word)).unwrap_or_default() {
            sleeper.notify_one();
        }
    }

    pub(crate) fn move_all(word: &AtomicU32, expected: u32, other: &AtomicU32) {
        let mut queues = FUTEXES.lock().unwrap();
        if word.load(Ordering::Relaxed) == expected {
            let sleepers = queues.remove(&address(word)).unwrap_or_default();
            queues.entry(address(other)).or_default().extend(sleepers);
        }
    }

    fn address(word: &AtomicU32) -> usize {
        std::ptr::from_ref(word).addr()
    }
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Bytes without any lock: loom fails when a read and a write of them are not ordered.
struct Bytes(UnsafeCell<u32>);

// SAFETY: deliberately not: whether all accesses are ordered is what the models find out, and loom checks
// each of them before it is made.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn new() -> Self {
        Bytes(UnsafeCell::new(0))
    }

    fn read(&self) -> u32 {
        // SAFETY: loom has checked that no write is concurrent.
        self.0.with(|bytes| unsafe { *bytes })
    }

    fn write(&self, value: u32) {
        // SAFETY: loom has checked that no other access is concurrent.
        self.0.with_mut(|bytes| unsafe { *bytes = value });
    }
}

/// A store in small: how far it is durable, and what each lsn wrote.
struct Store {
    progress: Progress,
    written: [Bytes; 2],
}

impl Store {
    fn new() -> Arc<Self> {
        Arc::new(Store { progress: Progress::new(Lsn::ZERO), written: [Bytes::new(), Bytes::new()] })
    }

    /// Commits group `n`, which is lsn `n`, counted from 1.
    fn commit(&self, n: u32) {
        self.written[n as usize - 1].write(n);
        drop(self.progress.publish(Lsn::new(n.into()), n, u64::from(n) * 10));
    }

    fn check(&self, n: u32) {
        assert!(self.progress.durable() >= Lsn::new(n.into()));
        assert_eq!(self.written[n as usize - 1].read(), n);
    }
}

/// Starts a thread of the model on a share of `shared`.
fn spawn<T: Send + Sync + 'static, R: 'static>(
    shared: &Arc<T>,
    run: impl FnOnce(&T) -> R + 'static,
) -> thread::JoinHandle<R> {
    let shared = shared.clone();
    thread::spawn(move || run(&shared))
}

#[test]
fn a_waiter_returns_after_the_publish_and_sees_what_it_wrote() {
    explore(|| {
        let store = Store::new();
        let waiter = spawn(&store, |store| {
            assert_eq!(store.progress.wait(Lsn::new(1), 1), Ok(()));
            store.check(1);
        });
        store.commit(1);
        waiter.join().unwrap();
    });
}

#[test]
fn two_waiters_of_one_group_both_return() {
    explore(|| {
        let store = Store::new();
        let wait = |store: &Store| {
            assert_eq!(store.progress.wait(Lsn::new(1), 1), Ok(()));
            store.check(1);
        };
        let waiters = [spawn(&store, wait), spawn(&store, wait)];
        store.commit(1);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn waiters_of_two_groups_each_return_after_their_own() {
    explore(|| {
        let store = Store::new();
        let waiters = [1, 2].map(|n: u32| {
            spawn(&store, move |store| {
                assert_eq!(store.progress.wait(Lsn::new(n.into()), n), Ok(()));
                store.check(n);
            })
        });
        store.commit(1);
        store.commit(2);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn groups_that_share_a_word_lose_no_waiter() {
    explore(|| {
        let store = Store::new();
        let waiters = [(1, 1), (2, 5)].map(|(n, group): (u32, u32)| {
            spawn(&store, move |store| {
                assert_eq!(store.progress.wait(Lsn::new(n.into()), group), Ok(()));
                store.check(n);
            })
        });
        store.written[0].write(1);
        drop(store.progress.publish(Lsn::new(1), 1, 10));
        store.written[1].write(2);
        drop(store.progress.publish(Lsn::new(2), 5, 20));
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn poison_wakes_the_waiter_of_what_is_not_durable() {
    explore(|| {
        let store = Store::new();
        let waiter = spawn(&store, |store| {
            assert_eq!(store.progress.wait(Lsn::new(1), 1), Err(NotDurable));
        });
        drop(store.progress.poison());
        waiter.join().unwrap();
    });
}

#[test]
fn what_was_published_before_the_poison_is_never_called_lost() {
    explore(|| {
        let store = Store::new();
        let waiters = [1, 2].map(|n: u32| {
            spawn(&store, move |store| {
                let outcome = store.progress.wait(Lsn::new(n.into()), n);
                assert_eq!(outcome, if n == 1 { Ok(()) } else { Err(NotDurable) });
            })
        });
        store.commit(1);
        drop(store.progress.poison());
        store.commit(2);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

/// One who sleeps until somebody appends its grant, and then with the group of that.
struct Served {
    store: Arc<Store>,
    sleeper: Sleeper,
}

impl Served {
    fn new(store: &Arc<Store>) -> Arc<Self> {
        Arc::new(Served { store: store.clone(), sleeper: Sleeper::new() })
    }

    fn wait(&self, n: u32) -> Result<(), NotDurable> {
        self.sleeper.sleep();
        self.store.progress.wait(Lsn::new(n.into()), n)
    }

    fn serve(&self, n: u32) {
        if self.sleeper.call() {
            self.store.progress.take_over(&self.sleeper, Lsn::new(n.into()), n);
        }
    }
}

#[test]
fn who_is_taken_over_wakes_with_the_group() {
    explore(|| {
        let store = Store::new();
        let served = Served::new(&store);
        let sleeper = spawn(&served, |served| {
            assert_eq!(served.wait(1), Ok(()));
            served.store.check(1);
        });
        let server = spawn(&served, |served| served.serve(1));
        store.commit(1);
        server.join().unwrap();
        sleeper.join().unwrap();
    });
}

#[test]
fn who_is_taken_over_wakes_beside_those_who_slept_there_before() {
    explore(|| {
        let store = Store::new();
        let served = Served::new(&store);
        let sleeper = spawn(&served, |served| assert_eq!(served.wait(1), Ok(())));
        let other = spawn(&store, |store| assert_eq!(store.progress.wait(Lsn::new(1), 1), Ok(())));
        served.serve(1);
        store.commit(1);
        other.join().unwrap();
        sleeper.join().unwrap();
    });
}

#[test]
fn who_is_taken_over_learns_of_the_poison() {
    explore(|| {
        let store = Store::new();
        let served = Served::new(&store);
        let sleeper = spawn(&served, |served| assert_eq!(served.wait(1), Err(NotDurable)));
        let server = spawn(&served, |served| served.serve(1));
        drop(store.progress.poison());
        server.join().unwrap();
        sleeper.join().unwrap();
    });
}

/// A task that sleeps until it is woken.
struct Task {
    woken: Mutex<bool>,
    condvar: Condvar,
}

impl Wake for Task {
    fn wake(self: std::sync::Arc<Self>) {
        *self.woken.lock() = true;
        self.condvar.notify_one();
    }
}

fn block_on_poll(progress: &Progress, lsn: Lsn) -> Result<(), NotDurable> {
    let mut slot = WakerSlot::default();
    loop {
        let task = std::sync::Arc::new(Task { woken: Mutex::new(false), condvar: Condvar::new() });
        let waker = Waker::from(task.clone());
        if let Poll::Ready(outcome) = progress.poll(lsn, &mut slot, &mut Context::from_waker(&waker)) {
            return outcome;
        }
        let mut woken = task.woken.lock();
        while !*woken {
            task.condvar.wait(&mut woken);
        }
    }
}

#[test]
fn a_polled_commit_is_woken_by_the_publish() {
    explore(|| {
        let store = Store::new();
        let task = spawn(&store, |store| {
            assert_eq!(block_on_poll(&store.progress, Lsn::new(1)), Ok(()));
            store.check(1);
        });
        store.commit(1);
        task.join().unwrap();
    });
}

#[test]
fn a_polled_commit_is_woken_by_the_poison() {
    explore(|| {
        let store = Store::new();
        let task = spawn(&store, |store| {
            assert_eq!(block_on_poll(&store.progress, Lsn::new(1)), Err(NotDurable));
        });
        drop(store.progress.poison());
        task.join().unwrap();
    });
}

#[test]
fn a_writer_without_room_gets_it_from_the_publish_or_the_poison() {
    explore(|| {
        let store = Store::new();
        let writer = spawn(&store, |store| {
            store.progress.wait_for_room(20, 0);
            store.progress.bytes_in_flight(20) == 0 || store.progress.is_poisoned()
        });
        let failure = spawn(&store, |store| drop(store.progress.poison()));
        store.commit(1);
        assert!(writer.join().unwrap());
        failure.join().unwrap();
    });
    explore(|| {
        let store = Store::new();
        let writer = spawn(&store, |store| store.progress.wait_for_room(20, 0));
        store.commit(1);
        store.commit(2);
        writer.join().unwrap();
    });
}

#[test]
fn every_ring_is_heard() {
    struct Desk {
        bell: Doorbell,
        work: Mutex<u32>,
    }
    explore(|| {
        let desk = Arc::new(Desk { bell: Doorbell::new(), work: Mutex::new(0) });
        let ringers = [(); 2].map(|()| {
            spawn(&desk, |desk| {
                *desk.work.lock() += 1;
                desk.bell.ring();
            })
        });
        let mut done = 0;
        while done < 2 {
            assert_eq!(desk.bell.listen(None), Heard::Rung);
            done += std::mem::take(&mut *desk.work.lock());
        }
        for ringer in ringers {
            ringer.join().unwrap();
        }
    });
}

#[test]
fn a_ring_at_the_end_of_the_time_is_kept_for_the_next_listening() {
    explore(|| {
        let bell = Arc::new(Doorbell::new());
        let ringer = spawn(&bell, Doorbell::ring);
        if bell.listen(Some(std::time::Duration::ZERO)) == Heard::TimedOut {
            assert_eq!(bell.listen(None), Heard::Rung);
        }
        ringer.join().unwrap();
    });
}

const MS: u64 = 1_000_000;

fn fence() -> FenceId {
    FenceId::new(KeyspaceId(1), b"f")
}

/// A grant of 10 ms.
fn pending() -> Grant {
    let ttl = Ttl::new(std::time::Duration::from_millis(10)).unwrap();
    let terms = Terms { owner: OwnerId::new(1), ttl, delay: 0 };
    Grant::pending(fence(), Token::new(1).unwrap(), terms, Lsn::new(1), MS, &Arc::new(Bell::new()))
}

fn renew(grant: &Grant, now: u64) -> Result<u64, RenewError> {
    grant.renew(now, u64::MAX).map(|renewed| renewed.until)
}

/// The same with the bell that it reports to.
fn held_with_bell() -> (Arc<Fence>, Arc<Bell>) {
    let bell = Arc::new(Bell::new());
    let ttl = Ttl::new(std::time::Duration::from_millis(10)).unwrap();
    let terms = Terms { owner: OwnerId::new(1), ttl, delay: 0 };
    let grant = Grant::pending(fence(), Token::new(1).unwrap(), terms, Lsn::new(1), MS, &bell);
    (Arc::new(Fence { grant, handed_over: Bytes::new() }), bell)
}

/// A fence held until 11 ms, and the proof of what happened to it.
struct Fence {
    grant: Grant,
    /// What the ender did before; who sees the grant ended may read it.
    handed_over: Bytes,
}

fn held() -> Arc<Fence> {
    let grant = pending();
    assert!(grant.enable(MS));
    Arc::new(Fence { grant, handed_over: Bytes::new() })
}

#[test]
fn a_renewal_and_a_take_over_never_both_succeed() {
    explore(|| {
        let fence = held();
        // Its clock says 5 ms, and then it was paused: others are at 12 ms meanwhile.
        let holder = spawn(&fence, |fence| renew(&fence.grant, 5 * MS));
        let rival = spawn(&fence, |fence| fence.grant.end_if_expired(12 * MS));
        let ended = fence.grant.end_if_expired(12 * MS);
        let renewed = holder.join().unwrap();
        let ended = u8::from(ended) + u8::from(rival.join().unwrap());
        match renewed {
            Ok(deadline) => {
                assert_eq!((deadline, ended), (15 * MS, 0));
                assert!(fence.grant.is_live(12 * MS));
            }
            Err(error) => {
                assert_eq!((error, ended), (RenewError::Ended, 1));
                assert!(fence.grant.is_ended());
            }
        }
    });
}

#[test]
fn an_ended_grant_is_ended_once_and_never_renewed() {
    explore(|| {
        let fence = held();
        let holder = spawn(&fence, |fence| {
            let first = renew(&fence.grant, 5 * MS);
            let second = renew(&fence.grant, 6 * MS);
            assert!(first.is_ok() || second.is_err(), "revived");
        });
        let rival = spawn(&fence, |fence| fence.grant.end_if_expired(16 * MS));
        let broken = fence.grant.end(Ending::Released);
        holder.join().unwrap();
        assert!(fence.grant.is_ended());
        assert_ne!(broken, rival.join().unwrap(), "exactly one ended it");
        assert_eq!(renew(&fence.grant, 7 * MS), Err(RenewError::Ended));
    });
}

#[test]
fn a_holder_told_of_the_end_sees_what_came_before_it() {
    explore(|| {
        let fence = held();
        let holder = spawn(&fence, |fence| {
            if renew(&fence.grant, 5 * MS) == Err(RenewError::Ended) {
                fence.handed_over.read();
            }
        });
        fence.handed_over.write(1);
        assert!(fence.grant.end(Ending::Released));
        holder.join().unwrap();
    });
}

#[test]
fn two_late_renewals_and_an_end_have_one_ender() {
    explore(|| {
        let fence = held();
        let late = |fence: &Fence| renew(&fence.grant, 12 * MS);
        let holders = [spawn(&fence, late), spawn(&fence, late)];
        let mut enders = u8::from(fence.grant.end(Ending::Released));
        for holder in holders {
            match holder.join().unwrap() {
                Err(RenewError::Expired) => enders += 1,
                other => assert_eq!(other, Err(RenewError::Ended)),
            }
        }
        assert_eq!(enders, 1);
    });
}

#[test]
fn concurrent_renewals_keep_the_later_deadline() {
    explore(|| {
        let fence = held();
        let early = spawn(&fence, |fence| renew(&fence.grant, 5 * MS));
        let late = spawn(&fence, |fence| renew(&fence.grant, 8 * MS));
        let (early, late) = (early.join().unwrap().unwrap(), late.join().unwrap().unwrap());
        assert!(early == 15 * MS || early == 18 * MS);
        assert_eq!(late, 18 * MS);
        assert!(fence.grant.is_live(18 * MS - 1));
    });
}

#[test]
fn a_grant_overtaken_while_pending_is_over_whoever_comes_first() {
    explore(|| {
        let fence = Arc::new(Fence { grant: pending(), handed_over: Bytes::new() });
        let committer = spawn(&fence, |fence| {
            let handed_out = fence.grant.enable(MS);
            if !handed_out {
                fence.handed_over.read();
            }
            handed_out
        });
        fence.handed_over.write(1);
        assert!(fence.grant.end(Ending::Released));
        committer.join().unwrap();
        assert!(fence.grant.is_ended());
        assert!(!fence.grant.is_live(MS));
        assert!(!fence.grant.enable(MS));
    });
}

#[test]
fn who_watches_before_the_end_is_told_of_it_and_who_comes_later_knows() {
    explore(|| {
        let (fence, bell) = held_with_bell();
        assert!(fence.grant.enable(MS));
        let waiter = spawn(&fence, |fence| fence.grant.watch());
        let holder = spawn(&fence, |fence| renew(&fence.grant, 5 * MS).is_ok());
        assert!(fence.grant.end(Ending::Released));
        holder.join().unwrap();
        let told = !bell.take().is_empty();
        assert_eq!(waiter.join().unwrap(), told);
    });
}

#[test]
fn a_renewal_loses_no_watch() {
    explore(|| {
        let (fence, bell) = held_with_bell();
        assert!(fence.grant.enable(MS));
        let waiter = spawn(&fence, |fence| assert!(fence.grant.watch()));
        assert_eq!(renew(&fence.grant, 5 * MS), Ok(15 * MS));
        waiter.join().unwrap();
        assert!(fence.grant.end_if_expired(16 * MS));
        assert_eq!(bell.take().len(), 1);
    });
}

#[test]
fn who_watches_a_grant_on_its_way_is_told_of_its_end() {
    explore(|| {
        let (fence, bell) = held_with_bell();
        let committer = spawn(&fence, |fence| fence.grant.enable(MS));
        let breaker = spawn(&fence, |fence| fence.grant.end_broken(2 * MS));
        let watched = fence.grant.watch();
        committer.join().unwrap();
        assert!(breaker.join().unwrap());
        assert_eq!(watched, !bell.take().is_empty());
        assert!(!fence.grant.is_live(MS));
    });
}

#[test]
fn of_a_release_a_break_and_an_expiry_one_ends_the_grant_and_says_why() {
    explore(|| {
        let fence = held();
        let holder = spawn(&fence, |fence| fence.grant.end(Ending::Released));
        let operator = spawn(&fence, |fence| fence.grant.end_broken(12 * MS));
        let expired = fence.grant.end_if_expired(12 * MS);
        let (released, broken) = (holder.join().unwrap(), operator.join().unwrap());
        let ended = [released, broken, expired];
        assert_eq!(ended.iter().filter(|ended| **ended).count(), 1);
        let endings = [Ending::Released, Ending::Broken, Ending::Expired];
        let first = ended.iter().position(|ended| *ended).unwrap();
        assert_eq!(fence.grant.ending(), Some(endings[first]));
    });
}

#[test]
fn a_report_wakes_the_thread_that_looks() {
    explore(|| {
        let (fence, bell) = held_with_bell();
        assert!(fence.grant.watch());
        let breaker = spawn(&fence, |fence| assert!(fence.grant.end_broken(MS)));
        let mut told = bell.take();
        while told.is_empty() {
            bell.doorbell.listen(None);
            told = bell.take();
        }
        breaker.join().unwrap();
        assert_eq!(fence.grant.ending(), Some(Ending::Broken));
    });
}

#[test]
fn who_watches_before_a_release_is_the_releasers_to_tell() {
    explore(|| {
        let (fence, bell) = held_with_bell();
        assert!(fence.grant.enable(MS));
        let waiter = spawn(&fence, |fence| fence.grant.watch());
        let holder = spawn(&fence, |fence| renew(&fence.grant, 5 * MS).is_ok());
        let told = fence.grant.release();
        holder.join().unwrap();
        assert_eq!(told, Some(waiter.join().unwrap()));
        assert!(bell.take().is_empty(), "told twice");
    });
}

#[test]
fn of_a_release_and_a_break_one_ends_the_grant_and_only_a_break_is_reported() {
    explore(|| {
        let (fence, bell) = held_with_bell();
        assert!(fence.grant.enable(MS) && fence.grant.watch());
        let operator = spawn(&fence, |fence| fence.grant.end_broken(MS));
        let released = fence.grant.release();
        let broken = operator.join().unwrap();
        assert_eq!(released, (!broken).then_some(true));
        assert_eq!(!bell.take().is_empty(), broken);
    });
}

#[test]
fn who_adds_something_due_wakes_the_thread_unless_it_looks_by_then() {
    explore(|| {
        let bell = Arc::new(Bell::new());
        let due = Arc::new(sync::Mutex::new(vec![7]));
        let adding = {
            let (bell, due) = (bell.clone(), due.clone());
            loom::thread::spawn(move || {
                due.lock().push(5);
                bell.look_by(5);
                due.lock().push(9);
                bell.look_by(9);
            })
        };
        // Sleeps for what it found first, and must not sleep over anything that is due earlier.
        loop {
            bell.plan();
            drop(bell.take());
            let first = due.lock().iter().copied().min().unwrap();
            if first == 5 {
                break;
            }
            bell.planned(first);
            bell.doorbell.listen(None);
        }
        adding.join().unwrap();
    });
}

/// A segment that whoever may free it overwrites.
struct Segment {
    pins: Pins,
    bytes: Bytes,
}

impl Segment {
    fn read(&self) -> bool {
        self.pins.try_pin() && {
            assert_eq!(self.bytes.read(), 0, "read after it was freed");
            let last = self.pins.unpin();
            self.free_if(last)
        }
    }

    fn free_if(&self, now: bool) -> bool {
        if now {
            self.bytes.write(u32::MAX);
            assert!(!self.pins.try_pin(), "pinned after it was freed");
        }
        now
    }
}

#[test]
fn a_retired_segment_is_freed_once_and_read_by_nobody_after() {
    explore(|| {
        let segment = Arc::new(Segment { pins: Pins::new(), bytes: Bytes::new() });
        let readers = [spawn(&segment, Segment::read), spawn(&segment, Segment::read)];
        let mut freed = u8::from(segment.free_if(segment.pins.retire()));
        for reader in readers {
            freed += u8::from(reader.join().unwrap());
        }
        assert_eq!(freed, 1);
    });
}

#[test]
fn of_two_who_retire_a_segment_at_most_one_frees_it() {
    explore(|| {
        let segment = Arc::new(Segment { pins: Pins::new(), bytes: Bytes::new() });
        let reader = spawn(&segment, Segment::read);
        let rival = spawn(&segment, |segment| segment.free_if(segment.pins.retire()));
        let mut freed = u8::from(segment.free_if(segment.pins.retire()));
        freed += u8::from(reader.join().unwrap());
        freed += u8::from(rival.join().unwrap());
        assert_eq!(freed, 1);
    });
}
