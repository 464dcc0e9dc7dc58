//! What the tests of leases share: stores on a simulated disk with a clock moved by hand, and futures polled
//! by hand.
#![allow(dead_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};
use tidewall::storage::{Crash, SimDisk};
use tidewall::{Db, Keyspace, KeyspaceOptions, ManualClock, Options, Scope};

/// A store whose clock moves only when told to.
pub struct Store {
    pub db: Db,
    pub jobs: Keyspace,
    pub clock: ManualClock,
    pub disk: SimDisk,
}

/// Each key a fence.
pub fn store() -> Store {
    open(KeyspaceOptions::new())
}

/// The same; for tests that look at its disk.
pub fn sim() -> Store {
    store()
}

/// Each prefix up to a slash a fence.
pub fn prefixes() -> Store {
    open(KeyspaceOptions::new().scope(Scope::Prefix(b'/')))
}

fn open(options: KeyspaceOptions) -> Store {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let db = Options::new().storage(disk.clone()).clock(clock.clone()).open("sim").expect("opens");
    let jobs = db.keyspace("jobs", options).expect("opens");
    Store { db, jobs, clock, disk }
}

pub fn open_sim(disk: &SimDisk, clock: &ManualClock, options: Options) -> (Db, Keyspace) {
    let db = options.storage(disk.clone()).clock(clock.clone()).open("sim").expect("opens");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).expect("opens");
    (db, jobs)
}

impl Store {
    /// What is left after a kill, opened again: everything that was written, releases included once they
    /// were.
    pub fn reopen(&self, options: Options) -> (Db, Keyspace) {
        let syncs = self.db.stats().commits;
        // Releases ride with the next commit.
        let rider = self.db.keyspace("rider", KeyspaceOptions::new()).expect("opens");
        std::mem::forget(rider.lease(b"rider").acquire().expect("free"));
        assert!(self.db.stats().commits > syncs);
        open_sim(&self.disk.crash(Crash::All, 0), &self.clock, options)
    }
}

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// How many rounds a long test runs: `TIDEWALL_ROUNDS` times so many.
pub fn rounds(default: u64) -> u64 {
    let factor = std::env::var("TIDEWALL_ROUNDS").ok().and_then(|factor| factor.parse::<u64>().ok());
    default * factor.unwrap_or(1)
}

/// Waits for another thread to have done something, and fails when it does not.
#[track_caller]
pub fn eventually(done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "it never happened");
        thread::yield_now();
    }
}

pub fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return answer;
        }
        thread::park();
    }
}

/// A waker that counts.
pub struct Counting(Arc<Count>);

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

pub fn counting_waker() -> Counting {
    Counting(Arc::new(Count(AtomicUsize::new(0))))
}

impl Counting {
    pub fn count(&self) -> usize {
        self.0.0.load(Ordering::Acquire)
    }

    pub fn poll<F: Future>(&self, future: Pin<&mut F>) -> Poll<F::Output> {
        let waker = Waker::from(self.0.clone());
        future.poll(&mut Context::from_waker(&waker))
    }
}
