//! Wakers are foreign code: whatever one does in the thread that calls it, nobody waits for ever.
#![cfg(feature = "testkit")]

#[path = "support/gate.rs"]
mod gate;
#[path = "support/watched.rs"]
mod watched;

use gate::Gate;
use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;
use tidewall::storage::Storage;
use tidewall::{Commit, Db, Error, Keyspace, KeyspaceOptions, Options, Token, Tokens};
use watched::{Watch, Watched};

/// Longer than anything takes here.
const LONG: Duration = Duration::from_secs(10);
/// So that who was started before has come to where it waits.
const SHORT: Duration = Duration::from_millis(50);

/// Does something once, in whatever thread wakes it.
struct Does(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Does {
    fn wake(self: Arc<Self>) {
        let does = self.0.lock().unwrap().take();
        if let Some(does) = does {
            does();
        }
    }
}

fn on_wake(does: impl FnOnce() + Send + 'static) -> Waker {
    Waker::from(Arc::new(Does(Mutex::new(Some(Box::new(does))))))
}

/// Has `does` done when the commit is durable, or is known not to be.
fn park(commit: Commit, does: impl FnOnce() + Send + 'static) {
    assert!(pin!(commit).poll(&mut Context::from_waker(&on_wake(does))).is_pending());
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn open(storage: impl Storage) -> (Db, Keyspace) {
    let db = Options::new().storage(storage).segment_bytes(16 << 10).open("sim").unwrap();
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    // Else a write may have to make one, behind a gate that is shut.
    while db.stats().spares < 3 {
        thread::yield_now();
    }
    (db, rows)
}

fn say<T>(told: &Sender<T>) -> impl FnOnce(T) + use<T> {
    let told = told.clone();
    move |said| told.send(said).unwrap()
}

/// What is told. Who waits for ever would do so too while this unwinds.
fn hear<T>(told: &Receiver<T>, what: &str) -> T {
    told.recv_timeout(LONG).unwrap_or_else(|_| {
        eprintln!("{what} waits for ever");
        std::process::exit(1)
    })
}

/// The commit lock was given back, but not the compactor's: whoever wanted that in a waker waited for itself.
#[test]
fn a_waker_may_compact_while_another_thread_does() {
    let gate = Gate::default();
    let (db, rows) = open(Watched::by(&gate));
    let (told, heard) = channel();
    gate.shut();
    let first = rows.submit_put(token(1), b"key", b"first").unwrap();
    thread::sleep(SHORT);
    let (other, done) = (db.clone(), say(&told));
    thread::spawn(move || done(other.compact().is_ok()));
    thread::sleep(SHORT);
    let (other, done) = (db.clone(), say(&told));
    park(rows.submit_put(token(1), b"key", b"second").unwrap(), move || done(other.compact().is_ok()));
    gate.open_up();
    assert!(hear(&heard, "a compaction") && hear(&heard, "another one"));
    first.wait().unwrap();
}

/// Who made a keyspace waited for the committer thread, which came for the same lock in a waker.
#[test]
fn a_waker_may_make_a_keyspace_while_another_thread_does() {
    let gate = Gate::default();
    let (db, rows) = open(Watched::by(&gate));
    let (told, heard) = channel();
    gate.shut();
    let make = |name: &'static str| {
        let (db, done) = (db.clone(), say(&told));
        move || done(db.keyspace(name, KeyspaceOptions::new()).is_ok())
    };
    park(rows.submit_put(token(1), b"key", b"value").unwrap(), make("one"));
    thread::sleep(SHORT);
    thread::spawn(make("other"));
    thread::sleep(SHORT);
    gate.open_up();
    assert!(hear(&heard, "a keyspace") && hear(&heard, "another one"));
}

/// Syncs take so long that whatever waits for one does so most of the time.
#[derive(Clone, Debug)]
struct Slow;

impl Watch for Slow {
    fn before_sync(&self) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// The last handle may go in a waker. The thread that made the commits then waited for the compactor, and that one for
/// the next commit.
#[test]
fn a_waker_may_close_a_store_that_is_being_compacted() {
    for round in 0..25u8 {
        let (db, rows) = open(Watched::by(&Slow));
        for n in 0..200u8 {
            drop(rows.submit_put(token(1), &[n % 16, b'-'], &[n; 1500]).unwrap());
        }
        thread::sleep(Duration::from_millis(u64::from(round)));
        let (told, heard) = channel();
        let done = say(&told);
        park(rows.submit_put(token(1), b"key", b"last").unwrap(), move || done(db.close()));
        hear(&heard, "closing").unwrap();
        assert!(matches!(rows.get(b"key"), Err(Error::Closed)));
    }
}

/// Closing waited for the committer thread with the list of threads locked, to which the first request for a lease adds
/// one.
#[test]
fn a_waker_may_ask_for_the_first_lease_while_the_store_is_closed() {
    let gate = Gate::default();
    let (db, rows) = open(Watched::by(&gate));
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let ((told, heard), (begun, begins)) = (channel(), channel());
    let (done, begin) = (say(&told), say(&begun));
    gate.shut();
    park(rows.submit_put(token(1), b"key", b"value").unwrap(), move || {
        begin(());
        thread::sleep(SHORT);
        let lease = pin!(jobs.lease(b"job").acquire_async()).poll(&mut Context::from_waker(Waker::noop()));
        done(matches!(lease, Poll::Ready(Err(Error::Closed))));
    });
    gate.open_up();
    hear(&begins, "the waker");
    let done = say(&told);
    thread::spawn(move || done(db.close().is_ok()));
    assert!(hear(&heard, "a lease or the close") && hear(&heard, "the close or a lease"));
}

/// A waker that panicked took the thread of the commits with it, and who was to be woken after it was not.
#[test]
fn a_waker_that_panics_keeps_nobody_else_asleep() {
    let gate = Gate::default();
    let (_db, rows) = open(Watched::by(&gate));
    let (told, heard) = channel();
    gate.shut();
    let first = rows.submit_put(token(1), b"key", b"first").unwrap();
    thread::sleep(SHORT);
    // These two are one group.
    park(rows.submit_put(token(1), b"key", b"second").unwrap(), || panic!("as a waker of the test is to"));
    let done = say(&told);
    park(rows.submit_put(token(1), b"key", b"third").unwrap(), move || done(()));
    gate.open_up();
    hear(&heard, "the other task");
    first.wait().unwrap();
    rows.put(token(1), b"key", b"fourth").unwrap();
}
