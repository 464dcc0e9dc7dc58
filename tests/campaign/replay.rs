//! One seed is one run: the same calls of the disk, byte for byte, on one thread.

use crate::lives::{live, new_disk};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tidewall::storage::SimDisk;
use tidewall::{KeyspaceOptions, ManualClock, Options, Token, Tokens};

#[test]
fn a_seed_gives_the_same_calls_twice() {
    const SEEDS: u64 = 40;
    let mut all = std::collections::BTreeSet::new();
    for seed in 1..=SEEDS {
        let trace = || {
            let disk = new_disk(seed);
            live(&disk, seed);
            (disk.calls(), disk.trace_hash(), disk.image_hash())
        };
        let first = trace();
        assert_eq!(first, trace(), "seed {seed}");
        all.insert(first);
    }
    assert_eq!(all.len() as u64, SEEDS, "two seeds are one run");
    println!("{SEEDS} seeds, each run twice: the same trace of all calls, another one for each seed");
}

/// Opens a store, and says how many threads of the library there were meanwhile.
#[cfg(target_os = "linux")]
fn threads_of_an_open(disk: &SimDisk, options: Options) -> u64 {
    let most = Arc::new(AtomicU64::new(0));
    let seen = most.clone();
    let count = move || {
        let names = std::fs::read_dir("/proc/self/task")
            .unwrap()
            .map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
        names.filter(|name| name.starts_with("tidewall")).count() as u64
    };
    let options = options.storage(disk.clone()).clock(ManualClock::new());
    let options = options.progress(move |_| {
        seen.fetch_max(count(), Ordering::Relaxed);
    });
    options.open("sim").unwrap();
    most.load(Ordering::Relaxed)
}

#[test]
#[cfg(target_os = "linux")]
fn a_recovery_of_a_simulation_starts_no_thread() {
    let disk = SimDisk::new();
    // Without an index file, which would spare the reading.
    let options = Options::new().storage(disk.clone()).deterministic(1).without_threads();
    let db = options.index_every(u64::MAX).open("sim").unwrap();
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    // As many as are worth other threads where there may be some.
    for n in 0..60u64 {
        let mut batch = db.batch();
        for m in 0..400u64 {
            batch.put(&rows, Token::new(1).unwrap(), &(n * 400 + m).to_be_bytes(), b"value").unwrap();
        }
        batch.commit().unwrap();
    }
    drop(rows);
    db.close().unwrap();
    let alone = threads_of_an_open(&disk.kill(), Options::new().deterministic(2).without_threads());
    assert_eq!(alone, 0);
    let usual = threads_of_an_open(&disk.kill(), Options::new().deterministic(3));
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    assert!(usual > 0 || cores == 1, "no thread was seen where there are some");
}
