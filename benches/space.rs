//! What steady overwriting costs: 100 000 values of 1 KiB, overwritten 20 times over in batches of 1 000.
//!
//! Prints the most bytes that all files took, beside the bytes of keys and values that are needed; the bytes
//! written, zeros of new segments and all, beside those of the user; and how long a durable put of one value takes while compaction runs,
//! beside the same without. A plain program: nothing here repeats itself often enough for criterion.
//! `TIDEWALL_ROUNDS` sets how often (default 20).

mod support;

use std::path::Path;
use std::time::{Duration, Instant};
use support::{Random, dir, external, key, token};
use tidewall::{Db, Keyspace, Options};

const KEYS: u64 = 100_000;
const VALUE: usize = 1024;
const BATCH: usize = 1_000;

fn main() {
    let rounds = std::env::var("TIDEWALL_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    let dir = dir();
    let path = dir.path().join("data");
    let db = Db::open(&path).expect("opens");
    let rows = db.keyspace("rows", external()).expect("opens");
    let mut random = Random(17);
    for first in (0..KEYS).step_by(BATCH) {
        put_batch(&db, &rows, first..first + BATCH as u64, &mut random);
    }
    let live = KEYS * (16 + VALUE as u64);
    let (mut peak, mut spent, mut overwritten) = (0, Duration::ZERO, 0);
    let before = db.stats().disk_written_bytes;
    while overwritten < rounds * KEYS {
        let mut keys = std::collections::BTreeSet::new();
        while keys.len() < BATCH {
            keys.insert(random.below(KEYS));
        }
        let start = Instant::now();
        put_batch(&db, &rows, keys.into_iter(), &mut random);
        spent += start.elapsed();
        overwritten += BATCH as u64;
        peak = peak.max(disk_bytes(&path));
    }
    let stats = db.stats();
    let user = overwritten * (16 + VALUE as u64);
    println!("overwritten {overwritten} values at {:.0}/s", overwritten as f64 / spent.as_secs_f64());
    println!(
        "disk at most / live      {:.3}  (now {:.3})",
        ratio(peak, live),
        ratio(disk_bytes(&path), live)
    );
    let written = stats.disk_written_bytes - before;
    println!(
        "written / user bytes     {:.3}  (of which carried {:.3})",
        ratio(written, user),
        ratio(stats.carried_bytes, user)
    );
    println!(
        "needed, garbage / live   {:.3}, {:.3}",
        ratio(stats.live_bytes, live),
        ratio(stats.garbage_bytes, live)
    );
    println!("segments, spares         {}, {}", stats.segments, stats.spares);
    println!("segments retired         {}", stats.retired_segments);
    rows_latency(&db, &rows, &mut random, "while compaction runs");
    db.close().expect("closes");

    let db = Options::new().compaction(false).open(&path).expect("opens");
    let rows = db.keyspace("rows", external()).expect("opens");
    rows_latency(&db, &rows, &mut random, "without compaction");
}

fn put_batch(db: &Db, rows: &Keyspace, keys: impl Iterator<Item = u64>, random: &mut Random) {
    let mut batch = db.batch();
    let mut value = [0; VALUE];
    for n in keys {
        value[..8].copy_from_slice(&random.below(u64::MAX).to_le_bytes());
        batch.put(rows, token(1), &key(n), &value).expect("fits");
    }
    batch.commit().expect("commits");
}

/// Durable puts from one thread, enough that compaction has work all the time.
fn rows_latency(db: &Db, rows: &Keyspace, random: &mut Random, what: &str) {
    const PUTS: usize = 40_000;
    let retired = db.stats().retired_segments;
    let mut times = Vec::with_capacity(PUTS);
    for _ in 0..PUTS {
        let start = Instant::now();
        rows.put(token(1), &key(random.below(KEYS)), &[5; VALUE]).expect("commits");
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let at = |share: f64| times[(times.len() as f64 * share) as usize].as_micros();
    println!(
        "durable put {what:<22} p50 {} µs, p99 {} µs, p99.9 {} µs; segments retired {}",
        at(0.5),
        at(0.99),
        at(0.999),
        db.stats().retired_segments - retired
    );
}

fn ratio(a: u64, b: u64) -> f64 {
    a as f64 / b as f64
}

/// What all files of the store take.
fn disk_bytes(path: &Path) -> u64 {
    let files = std::fs::read_dir(path).expect("there").flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}
