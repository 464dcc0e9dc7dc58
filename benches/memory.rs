//! What a key costs in memory, and how long the index pauses while it grows.
//!
//! Prints the heap that the look-ups take a key (as [`Stats::index_bytes`](tidewall::Stats) counts it) and what
//! the rest takes, nearly all of it the keys in order for scans; then the longest single submits, none of which
//! waited for the disk: those that found too much in flight are asked again. A plain program, for its figures are
//! sums. `KEYS` sets how many keys (default 1 000 000), each of 16 bytes with a value of 100.

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
    let (mut longest, mut over) = ([Duration::ZERO; 5], 0);
    for n in 0..keys {
        // Spread over the whole order, as hashes or random ids are.
        let key = key(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let took = loop {
            let start = Instant::now();
            match rows.try_submit_put(token(1), &key, &VALUE) {
                Ok(_) => break start.elapsed(),
                Err(Error::Busy { .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        over += u64::from(took > Duration::from_millis(10));
        if took > longest[0] {
            longest[0] = took;
            longest.sort();
        }
    }
    rows.put(token(1), b"the last of them", &VALUE).expect("durable, and all before it");
    let used = heap.change();
    let heap = used.bytes_allocated.saturating_sub(used.bytes_deallocated) as u64;
    let stats = db.stats();
    println!("{} keys of 16 bytes", stats.keys);
    println!("heap a key, look-ups     {:.1} bytes", stats.index_bytes as f64 / keys as f64);
    println!("heap a key, all else     {:.1} bytes", heap.saturating_sub(stats.index_bytes) as f64 / keys as f64);
    longest.reverse();
    println!("longest submits          {longest:.1?}; {over} above 10 ms");
}
