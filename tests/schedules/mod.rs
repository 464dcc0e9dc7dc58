//! The whole engine under random schedules on a simulated disk, with a power cut as one more event.
//!
//! Its locks, its sleeping and its waking are those of shuttle here (`src/sync.rs`), and so is the lock of the
//! disk: what a schedule decides is who goes on at each of them, storage calls included. Atomics are those of
//! the machine: their orders are for `tests/loom.rs`. Writers commit for themselves, as in a store without
//! threads. Every history is held to the witness (`tests/support/witness.rs`).
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test --release --features testkit --lib schedules
//! TIDEWALL_SCHEDULES=1000000 RUSTFLAGS="--cfg shuttle" cargo test --release --features testkit --lib schedules
//! ```

#[path = "../support/witness.rs"]
mod witness;

use crate::storage::{CallKind, Crash, Fault, SimDisk, SyncFailure};
use crate::{
    Db, Error, Expect, Found, Keyspace, KeyspaceOptions, ManualClock, Options, Outcome, Token, Tokens,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner, thread};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use witness::{Ask, Event, History, Told, Valued};

const THREADS: u64 = 3;
const CALLS: u64 = 3;
/// Keys of external tokens, and one whose tokens are granted.
const KEYS: u8 = 2;
const JOB: u8 = KEYS;

const CRASHES: [Crash; 6] = [
    Crash::None,
    Crash::All,
    Crash::Subset { percent: 50 },
    Crash::Prefix,
    Crash::Suffix,
    Crash::Torn { bytes: true },
];

/// What all schedules came to.
struct Tally {
    schedules: AtomicU64,
    cut: AtomicU64,
    done: AtomicU64,
    refused: AtomicU64,
    conflicts: AtomicU64,
    reads: AtomicU64,
    grants: AtomicU64,
    unknown: AtomicU64,
    compactions: AtomicU64,
}

static TALLY: Tally = Tally {
    schedules: AtomicU64::new(0),
    cut: AtomicU64::new(0),
    done: AtomicU64::new(0),
    refused: AtomicU64::new(0),
    conflicts: AtomicU64::new(0),
    reads: AtomicU64::new(0),
    grants: AtomicU64::new(0),
    unknown: AtomicU64::new(0),
    compactions: AtomicU64::new(0),
};

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn any(n: u64) -> u64 {
    thread_rng().gen_range(0..n)
}

fn open(disk: &SimDisk, seed: u64) -> Db {
    let options = Options::new().storage(disk.clone()).clock(ManualClock::new()).deterministic(seed);
    let options = options.without_threads().compaction(false).segment_bytes(16 << 10);
    options.open("sim").expect("it opens, after a crash too")
}

fn keyspaces(db: &Db) -> (Keyspace, Keyspace) {
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    (rows, db.keyspace("jobs", KeyspaceOptions::new()).unwrap())
}

/// Asks the store, and says what it was told.
fn ask(db: &Db, ask: Ask) -> Told {
    let (rows, jobs) = keyspaces(db);
    let of = |number| Token::new(number).unwrap();
    let told = match ask {
        Ask::Put { key, token } => rows.put(of(token), &[key], &token.to_be_bytes()),
        Ask::PutIfAbsent { key, token } => {
            rows.put_if(of(token), &[key], &token.to_be_bytes(), Expect::Absent)
        }
        Ask::Get { key } => {
            count(&TALLY.reads);
            let value = rows.get(&[key]).expect("reads go on");
            return Told::Value(value.map(|value| {
                let token = value.mark().get();
                assert_eq!(value.bytes(), token.to_be_bytes(), "a value of another write");
                Valued { token, lsn: value.lsn().get() }
            }));
        }
        Ask::Mark { key } => {
            count(&TALLY.reads);
            return Told::Mark(rows.mark(&[key]).expect("reads go on").map_or(0, |mark| mark.get()));
        }
        Ask::Acquire { key } => match jobs.lease(&[key]).acquire() {
            Ok(lease) => {
                count(&TALLY.grants);
                return Told::Granted { token: lease.token().get() };
            }
            Err(error) => Err(error),
        },
    };
    match told {
        Ok(lsn) => {
            count(&TALLY.done);
            Told::Done { lsn: lsn.get() }
        }
        Err(Error::Fenced { mark, .. }) => {
            count(&TALLY.refused);
            Told::Fenced { mark: mark.get() }
        }
        Err(Error::Conflict { found: Found::Present(lsn), .. }) => {
            count(&TALLY.conflicts);
            Told::Conflict { lsn: lsn.get() }
        }
        Err(error) if error.outcome() == Outcome::Unknown => {
            count(&TALLY.unknown);
            Told::Unknown
        }
        Err(Error::Held { .. } | Error::Poisoned { .. } | Error::Io { .. }) => Told::Not,
        Err(error) => panic!("{ask:?} was answered {error:?}"),
    }
}

fn draw(thread: u64, nth: u64) -> Ask {
    let key = any(u64::from(KEYS)) as u8;
    // Each token of a history is another.
    let token = 1 + any(4) * 100 + thread * 10 + nth;
    match any(8) {
        0..=2 => Ask::Put { key, token },
        3 => Ask::PutIfAbsent { key, token },
        4..=5 => Ask::Get { key },
        6 => Ask::Mark { key },
        _ => Ask::Acquire { key: JOB },
    }
}

/// One schedule: some threads, perhaps a compaction, a failing sync or a power cut, and a recovery.
fn run() {
    count(&TALLY.schedules);
    let disk = SimDisk::new();
    let db = open(&disk, 2);
    keyspaces(&db);
    let base = db.last_lsn().get();
    match any(8) {
        0 => {}
        1 => {
            disk.set_sync_failure(if any(2) == 0 { SyncFailure::KeepNew } else { SyncFailure::RevertOld });
            disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other).nth(any(6)));
        }
        _ => disk.stop_at(disk.calls() + any(24)),
    }
    let (time, events) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let now = |time: &AtomicU64| time.fetch_add(1, Ordering::SeqCst);
    let mut threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (db, time, events) = (db.clone(), time.clone(), events.clone());
            thread::spawn(move || {
                for nth in 0..CALLS {
                    let asked = draw(thread, nth);
                    let began = now(&time);
                    let told = ask(&db, asked);
                    let ended = if told == Told::Unknown { u64::MAX } else { now(&time) };
                    events.lock().unwrap().push(Event { began, ended, ask: asked, told });
                }
            })
        })
        .collect();
    if any(3) == 0 {
        let db = db.clone();
        threads.push(thread::spawn(move || {
            count(&TALLY.compactions);
            // Whatever comes of it, nothing may be lost.
            drop(db.compact());
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    if disk.is_stopped() {
        count(&TALLY.cut);
    }
    let image = match any(4) {
        0 => disk.kill(),
        _ => disk.crash(CRASHES[any(CRASHES.len() as u64) as usize], any(u64::MAX)),
    };
    drop(db);
    let db = open(&image, 4);
    let (rows, jobs) = keyspaces(&db);
    let events = events.lock().unwrap().clone();
    let granted = events.iter().filter_map(|event| match event.told {
        Told::Granted { token } => Some(token),
        _ => None,
    });
    let granted = granted.max().unwrap_or(0);
    let came_back = (0..KEYS).map(|key| {
        let value = rows.get(&[key]).unwrap().map(|value| (value.mark().get(), value.lsn().get()));
        let mark = rows.mark(&[key]).unwrap().map_or(0, |mark| mark.get());
        (key, (value.map(|(token, lsn)| Valued { token, lsn }), mark))
    });
    let came_back = came_back.collect();
    let history = History { events, base, came_back, last_lsn: db.last_lsn().get() };
    if let Err(wrong) = witness::check(&history) {
        panic!("{wrong}\n{history:#?}");
    }
    let next = jobs.lease(&[JOB + 1]).acquire().expect("grants go on after a recovery").token().get();
    assert!(next > granted, "token {next} was granted after {granted}");
}

/// Both ways to draw a schedule, half each.
#[test]
fn every_history_is_durably_linearizable() {
    let wanted =
        std::env::var("TIDEWALL_SCHEDULES").map_or(20_000, |n| n.parse().expect("a number of schedules"));
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(wanted / 2)), Box::new(PctScheduler::new(4, wanted - wanted / 2))];
    for scheduler in schedulers {
        Runner::new(scheduler, config.clone()).run(run);
    }
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{} schedules, {} cut off: {} writes, {} refused, {} conflicts, {} reads, {} grants, {} answers unknown, {} \
         compactions",
        get(&TALLY.schedules),
        get(&TALLY.cut),
        get(&TALLY.done),
        get(&TALLY.refused),
        get(&TALLY.conflicts),
        get(&TALLY.reads),
        get(&TALLY.grants),
        get(&TALLY.unknown),
        get(&TALLY.compactions)
    );
    assert!(get(&TALLY.schedules) >= wanted as u64);
    let all = [&TALLY.cut, &TALLY.done, &TALLY.refused, &TALLY.conflicts, &TALLY.grants, &TALLY.unknown];
    assert!(all.iter().all(|counter| get(counter) > wanted as u64 / 100), "something hardly ever happened");
}
