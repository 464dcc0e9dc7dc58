//! The whole engine under random schedules on a simulated disk, with a power cut as one more event.
//!
//! Its locks, its sleeping and its waking are those of shuttle here (`src/sync.rs`), and so is the lock of the
//! disk: what a schedule decides is who goes on at each of them, storage calls included. Atomics are those of
//! the machine: their orders are for `tests/loom.rs`. Every history is held to the witness
//! (`tests/support/witness.rs`). Most schedules are of a store without threads, whose writers commit for
//! themselves; a tenth is of one with all its threads, on segments that are full of garbage.
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test --release --features testkit --lib -- durably_linearizable readers_beside
//! TIDEWALL_SCHEDULES=1000000 RUSTFLAGS="--cfg shuttle" cargo test --release --features testkit --lib -- durably_linearizable readers_beside
//! ```

#[path = "../support/witness.rs"]
mod witness;

mod readers;

use crate::clock::Clock;
use crate::storage::{CallKind, Crash, Fault, SimDisk, SyncFailure};
use crate::{
    Db, Error, Expect, Found, Keyspace, KeyspaceOptions, ManualClock, Options, Outcome, ReadMode, Token,
    Tokens, Value,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner, thread};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use witness::{Ask, Event, History, Told, Valued};

const THREADS: u64 = 3;
const CALLS: u64 = 3;
/// Keys of external tokens, and one whose tokens are granted.
const KEYS: u8 = 2;
const JOB: u8 = KEYS;
/// Writes from before, of which only the last of each key is needed.
const GARBAGE: u64 = 24;

const CRASHES: [Crash; 6] = [
    Crash::None,
    Crash::All,
    Crash::Subset { percent: 50 },
    Crash::Prefix,
    Crash::Suffix,
    Crash::Torn { bytes: true },
];

/// What all schedules of a kind came to.
#[derive(Default)]
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
    retired: AtomicU64,
    indexes: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn any(n: u64) -> u64 {
    thread_rng().gen_range(0..n)
}

/// The time of a run, in which leases end.
#[derive(Debug)]
struct RunClock;

impl Clock for RunClock {
    fn now(&self) -> u64 {
        crate::sync::time::now()
    }
}

/// A store under test.
#[derive(Clone, Copy)]
struct Kind {
    tally: &'static Tally,
    /// Its own threads run, and compaction.
    threads: bool,
    mode: ReadMode,
    value_bytes: usize,
}

impl Kind {
    fn open(self, disk: &SimDisk, seed: u64) -> Db {
        let options = Options::new().storage(disk.clone()).deterministic(seed).segment_bytes(16 << 10);
        let options = options.read_mode(self.mode);
        let options = match self.threads {
            true => options.clock(RunClock).index_every(8),
            false => options.clock(ManualClock::new()).without_threads().compaction(false),
        };
        options.open("sim").expect("it opens, after a crash too")
    }

    /// The value of a token.
    fn value(self, token: u64) -> Vec<u8> {
        token.to_be_bytes().repeat(self.value_bytes / 8)
    }
}

fn keyspaces(db: &Db) -> (Keyspace, Keyspace) {
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    (rows, db.keyspace("jobs", KeyspaceOptions::new()).unwrap())
}

/// Asks the store, and says what it was told. Values are held on to.
fn ask(db: &Db, kind: Kind, ask: Ask, held: &mut Vec<Value>) -> Told {
    let (rows, jobs) = keyspaces(db);
    let of = |number| Token::new(number).unwrap();
    let told = match ask {
        Ask::Put { key, token } => rows.put(of(token), &[key], &kind.value(token)),
        Ask::PutIfAbsent { key, token } => rows.put_if(of(token), &[key], &kind.value(token), Expect::Absent),
        Ask::Get { key } => {
            count(&kind.tally.reads);
            let value = match rows.get(&[key]) {
                Ok(value) => value,
                Err(error) => return not_read(kind, &error),
            };
            held.extend(value.clone());
            return Told::Value(value.map(|value| {
                let token = value.token().get();
                assert_eq!(value.bytes(), kind.value(token), "a value of another write");
                Valued { token, lsn: value.lsn().get() }
            }));
        }
        Ask::Mark { key } => {
            count(&kind.tally.reads);
            return match rows.mark(&[key]) {
                Ok(mark) => Told::Mark(mark.map_or(0, |mark| mark.get())),
                Err(error) => not_read(kind, &error),
            };
        }
        Ask::Acquire { key } => match jobs.lease(&[key]).acquire() {
            Ok(lease) => {
                count(&kind.tally.grants);
                return Told::Granted { token: lease.token().get() };
            }
            Err(error) => Err(error),
        },
    };
    match told {
        Ok(lsn) => {
            count(&kind.tally.done);
            Told::Done { lsn: lsn.get() }
        }
        Err(Error::Fenced { mark, .. }) => {
            count(&kind.tally.refused);
            Told::Fenced { mark: mark.get() }
        }
        Err(Error::Conflict { found: Found::Present(lsn), .. }) => {
            count(&kind.tally.conflicts);
            Told::Conflict { lsn: lsn.get() }
        }
        Err(error) if error.outcome() == Outcome::Unknown => {
            count(&kind.tally.unknown);
            Told::Unknown
        }
        Err(Error::Held { .. } | Error::Poisoned { .. } | Error::Io { .. }) => Told::Not,
        Err(error) => panic!("{ask:?} was answered {error:?}"),
    }
}

/// Reads go on, unless the disk has to be asked.
fn not_read(kind: Kind, error: &Error) -> Told {
    assert!(kind.mode == ReadMode::Pread && matches!(error, Error::Io { .. }), "{error:?}");
    Told::Not
}

fn draw(thread: u64, nth: u64) -> Ask {
    let key = any(u64::from(KEYS)) as u8;
    // Each token of a history is another.
    let token = 101 + any(4) * 100 + thread * 10 + nth;
    match any(8) {
        0..=2 => Ask::Put { key, token },
        3 => Ask::PutIfAbsent { key, token },
        4..=5 => Ask::Get { key },
        6 => Ask::Mark { key },
        _ => Ask::Acquire { key: JOB },
    }
}

type Events = Arc<Mutex<Vec<Event>>>;

/// Notes when something is asked, and what is told.
#[derive(Clone, Default)]
struct Recorder {
    time: Arc<AtomicU64>,
    events: Events,
}

impl Recorder {
    fn now(&self) -> u64 {
        self.time.fetch_add(1, Ordering::SeqCst)
    }

    fn ask(&self, db: &Db, kind: Kind, asked: Ask, held: &mut Vec<Value>) {
        let began = self.now();
        let told = ask(db, kind, asked, held);
        let ended = if told == Told::Unknown { u64::MAX } else { self.now() };
        self.events.lock().unwrap().push(Event { began, ended, ask: asked, told });
    }
}

/// One schedule: some threads, perhaps a compaction, a failing sync or a power cut, and a recovery.
fn run(kind: Kind) {
    count(&kind.tally.schedules);
    let disk = SimDisk::new();
    let alone = Kind { threads: false, ..kind };
    let db = alone.open(&disk, 2);
    keyspaces(&db);
    let base = db.last_lsn().get();
    let recorder = Recorder::default();
    let (db, timer) = if kind.threads {
        // Three of four segments hold nothing that is needed: it is time to give them back.
        for n in 0..GARBAGE {
            recorder.ask(&db, alone, Ask::Put { key: (n % 2) as u8, token: 1 + n }, &mut Vec::new());
        }
        db.close().unwrap();
        (kind.open(&disk, 3), Some(thread::spawn(crate::sync::time::run)))
    } else {
        (db, None)
    };
    match any(8) {
        0 => {}
        1 => {
            disk.set_sync_failure(if any(2) == 0 { SyncFailure::KeepNew } else { SyncFailure::RevertOld });
            disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other).nth(any(6)));
        }
        _ => disk.stop_at(disk.calls() + any(if kind.threads { 400 } else { 24 })),
    }
    let mut threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (db, recorder) = (db.clone(), recorder.clone());
            thread::spawn(move || {
                let mut held = Vec::new();
                (0..CALLS).for_each(|nth| recorder.ask(&db, kind, draw(thread, nth), &mut held));
                for value in held {
                    assert_eq!(value.bytes(), kind.value(value.token().get()), "a value has changed");
                }
            })
        })
        .collect();
    if any(3) == 0 {
        let db = db.clone();
        threads.push(thread::spawn(move || {
            count(&kind.tally.compactions);
            // Whatever comes of it, nothing may be lost.
            drop(db.compact());
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    if disk.is_stopped() {
        count(&kind.tally.cut);
    }
    let image = match any(4) {
        0 => disk.kill(),
        _ => disk.crash(CRASHES[any(CRASHES.len() as u64) as usize], any(u64::MAX)),
    };
    kind.tally.retired.fetch_add(db.stats().retired_segments, Ordering::Relaxed);
    kind.tally
        .indexes
        .fetch_add(u64::from(db.shared.engine.index.written.load(Ordering::Relaxed) > 0), Ordering::Relaxed);
    drop(db);
    if let Some(timer) = timer {
        crate::sync::time::end();
        timer.join().unwrap();
    }
    let db = alone.open(&image, 4);
    let (rows, jobs) = keyspaces(&db);
    let events = recorder.events.lock().unwrap().clone();
    let granted = events.iter().filter_map(|event| match event.told {
        Told::Granted { token } => Some(token),
        _ => None,
    });
    let granted = granted.max().unwrap_or(0);
    let came_back = (0..KEYS).map(|key| {
        let value = rows.get(&[key]).unwrap().map(|value| (value.token().get(), value.lsn().get()));
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

/// Both ways to draw a schedule, half each, beside each other; then says what they came to.
fn run_all(wanted: usize, tally: &'static Tally, run: fn(&'static Tally)) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(wanted / 2)), Box::new(PctScheduler::new(4, wanted - wanted / 2))];
    std::thread::scope(|scope| {
        for scheduler in schedulers {
            let config = config.clone();
            scope.spawn(move || Runner::new(scheduler, config).run(move || run(tally)));
        }
    });
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{} schedules, {} cut off: {} writes, {} refused, {} conflicts, {} reads, {} grants, {} answers unknown, {} \
         compactions, {} segments retired, {} stores with an index file",
        get(&tally.schedules),
        get(&tally.cut),
        get(&tally.done),
        get(&tally.refused),
        get(&tally.conflicts),
        get(&tally.reads),
        get(&tally.grants),
        get(&tally.unknown),
        get(&tally.compactions),
        get(&tally.retired),
        get(&tally.indexes)
    );
    assert!(get(&tally.schedules) >= wanted as u64);
    let all = [&tally.cut, &tally.done, &tally.refused, &tally.conflicts, &tally.grants, &tally.unknown];
    assert!(all.iter().all(|counter| get(counter) > wanted as u64 / 100), "something hardly ever happened");
}

fn wanted() -> usize {
    std::env::var("TIDEWALL_SCHEDULES").map_or(20_000, |n| n.parse().expect("a number of schedules"))
}

#[test]
fn every_history_is_durably_linearizable() {
    static TALLY: LazyLock<Tally> = LazyLock::new(Tally::default);
    run_all(wanted(), &TALLY, |tally| {
        run(Kind { tally, threads: false, mode: ReadMode::Map, value_bytes: 8 })
    });
}

#[test]
fn with_all_threads_every_history_is_durably_linearizable() {
    static TALLY: LazyLock<Tally> = LazyLock::new(Tally::default);
    run_all(wanted() / 10, &TALLY, |tally| {
        let mode = if any(2) == 0 { ReadMode::Map } else { ReadMode::Pread };
        run(Kind { tally, threads: true, mode, value_bytes: 4800 });
    });
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert!(get(&TALLY.retired) > get(&TALLY.schedules), "compaction hardly ever ran");
    assert!(get(&TALLY.indexes) > get(&TALLY.schedules) / 10, "index files were hardly ever written");
}
