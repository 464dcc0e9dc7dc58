//! What a key costs in memory, and how long the index pauses while it grows.
//!
//! Prints the heap that the look-ups take a key (as [`Stats::index_bytes`](tidewall::Stats) counts it), what the rest
//! takes, and what the first scan adds, which puts the keys in order; then the longest single submits, in processor time
//! (so that neither the disk nor other programs count) and by the clock; one that found too much in flight is asked
//! again. A plain program, for its figures are sums. `KEYS` sets how many keys (default 1 000 000), each of 16 bytes
//! with a value of 100.

mod support;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;
use std::thread;
use std::time::{Duration, Instant};
use support::{VALUE, dir, external, key, token};
use tidewall::{Db, Error};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() {
    let keys: u64 = std::env::var("KEYS").map_or(1_000_000, |keys| keys.parse().expect("KEYS is a number"));
    let dir = dir();
    let db = Db::open(dir.path().join("data")).expect("opens");
    let rows = db.keyspace("rows", external()).expect("opens");
    let heap = Region::new(HEAP);
    let (mut spent, mut passed) = (Longest::default(), Longest::default());
    for n in 0..keys {
        // Spread over the whole order, as hashes or random ids are.
        let key = key(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        loop {
            let (start, spent_before) = (Instant::now(), processor_time());
            let put = rows.try_submit_put(token(1), &key, &VALUE);
            match put {
                Ok(_) => {
                    spent.note(processor_time() - spent_before);
                    passed.note(start.elapsed());
                    break;
                }
                Err(Error::Busy { .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }
    rows.put(token(1), b"the last of them", &VALUE).expect("durable, and all before it");
    let used = heap.change();
    let heap = used.bytes_allocated.saturating_sub(used.bytes_deallocated) as u64;
    let stats = db.stats();
    println!("{} keys of 16 bytes", stats.keys);
    println!("heap a key, look-ups     {:.1} bytes", stats.index_bytes as f64 / keys as f64);
    println!(
        "heap a key, all else     {:.1} bytes",
        heap.saturating_sub(stats.index_bytes) as f64 / keys as f64
    );
    let unordered = Region::new(HEAP);
    assert_eq!(rows.iter().count() as u64, keys + 1);
    let ordered = unordered.change();
    let ordered = ordered.bytes_allocated.saturating_sub(ordered.bytes_deallocated) as u64;
    println!("heap a key, once scanned {:.1} bytes more", ordered as f64 / keys as f64);
    println!("longest submits          {spent} of processor time; {passed} by the clock");
}

#[derive(Default)]
struct Longest {
    /// The shortest of them first.
    times: [Duration; 3],
    /// How many took more than 10 ms.
    long: u64,
}

impl Longest {
    fn note(&mut self, took: Duration) {
        self.long += u64::from(took > Duration::from_millis(10));
        if took > self.times[0] {
            self.times[0] = took;
            self.times.sort();
        }
    }
}

impl std::fmt::Display for Longest {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [third, second, first] = self.times;
        write!(to, "{first:.1?}, {second:.1?}, {third:.1?} ({} above 10 ms)", self.long)
    }
}

/// What this thread has computed so far.
#[cfg(unix)]
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that the call fills in.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(answer, 0, "the clock of this thread is there");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(not(unix))]
fn processor_time() -> Duration {
    Duration::ZERO
}
