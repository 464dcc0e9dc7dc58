//! Readers beside a compaction that gives back the segments in which they are (C2): a look-up that finds the place of
//! an op, and then its segment gone, looks again; a file is used again when nobody reads it any more.

use super::{count, keyspaces, wanted};
use crate::storage::SimDisk;
use crate::{Keyspace, ManualClock, Options, ReadMode, Token};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner, thread};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const KEYS: u8 = 2;
const FILLER: u8 = KEYS;
const READERS: u8 = 2;
const READS: u8 = 6;

static RETIRED: AtomicU64 = AtomicU64::new(0);
static READ: AtomicU64 = AtomicU64::new(0);

/// Values of more than one read, all of one number.
fn value(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(600)
}

/// Asserts that a key has a value, whole and not older than one that was seen before.
fn read(rows: &Keyspace, key: u8, seen: &mut [u64]) {
    let found = rows.get(&[key]).expect("nothing is damaged").expect("a key that always has a value");
    let number = found.token().get();
    assert_eq!(found.bytes(), value(number), "the bytes of something else");
    let before = std::mem::replace(&mut seen[usize::from(key)], number);
    assert!(number >= before, "key {key} was {before}, and is {number}");
    count(&READ);
}

fn run(mode: ReadMode) {
    let options = Options::new().storage(SimDisk::new()).clock(ManualClock::new()).read_mode(mode);
    // Not from a seed: the files of such a store are used again at once, for nobody reads beside it.
    let options = options.without_threads().compaction(false).segment_bytes(16 << 10);
    let db = options.open("sim").unwrap();
    let (rows, _) = keyspaces(&db);
    let put = move |rows: &Keyspace, key: u8, number: u64| {
        rows.put(Token::new(number).unwrap(), &[key], &value(number)).unwrap();
    };
    // Each key in a segment of which nothing else is needed.
    for number in 1..=9 {
        let key = if number % 4 == 1 { (number / 4) as u8 % KEYS } else { FILLER };
        put(&rows, key, number);
    }
    let readers = (0..READERS).map(|reader| {
        let rows = rows.clone();
        thread::spawn(move || {
            let mut seen = [0; KEYS as usize];
            (0..READS).for_each(|n| read(&rows, (reader + n) % KEYS, &mut seen));
        })
    });
    let mut threads: Vec<_> = readers.collect();
    threads.push(thread::spawn({
        let (db, rows) = (db.clone(), rows.clone());
        move || {
            for number in 20..24 {
                put(&rows, number as u8 % KEYS, number);
                RETIRED.fetch_add(u64::from(db.compact().unwrap().segments), Ordering::Relaxed);
                // The files that were given back are written again.
                (0..4).for_each(|n| put(&rows, FILLER, 10 * number + n));
            }
        }
    }));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn readers_beside_a_compaction_see_neither_less_nor_older() {
    let wanted = wanted() / 10;
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(wanted / 2)), Box::new(PctScheduler::new(3, wanted - wanted / 2))];
    let schedules = Arc::new(AtomicU64::new(0));
    for scheduler in schedulers {
        let schedules = schedules.clone();
        Runner::new(scheduler, config.clone()).run(move || {
            let odd = schedules.fetch_add(1, Ordering::Relaxed) % 2 == 1;
            run(if odd { ReadMode::Pread } else { ReadMode::Map });
        });
    }
    let (read, retired) = (READ.load(Ordering::Relaxed), RETIRED.load(Ordering::Relaxed));
    println!("{wanted} schedules of {read} reads beside compactions that gave {retired} segments back");
    assert!(retired > wanted as u64);
}
