//! What a lease costs its holder. No other engine here has one, so the yardstick is the clock that it must read.

use crate::machine::{Weather, boot_clock, coarse_clock};
use crate::results::Row;
use crate::store::Res;
use crate::workloads::Cell;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use tidewall::{Db, KeyspaceOptions};

/// All take turns, so that what is compared has seen the same machine; the best turn counts.
const TURNS: usize = 20;
const CALLS: u32 = 200_000;
const SYNCED_CALLS: u32 = 50;

/// Nanoseconds a call.
struct Best(f64);

impl Best {
    fn time(&mut self, calls: u32, mut once: impl FnMut()) {
        let start = Instant::now();
        for _ in 0..calls {
            once();
        }
        self.0 = self.0.min(start.elapsed().as_nanos() as f64 / calls as f64);
    }
}

pub fn run(cell: &Cell, dir: &Path) -> Res<Vec<Row>> {
    let db = Db::open(dir)?;
    let jobs = db.keyspace("jobs", KeyspaceOptions::new())?;
    let lease = jobs.lease(b"job").ttl(Duration::from_secs(3600)).acquire()?;
    let counter = quanta::Clock::new();
    let weather = Weather::now();

    let mut best = [const { Best(f64::MAX) }; 7];
    let [boot, coarse, raw, live, renew, put, acquire] = &mut best;
    for _ in 0..TURNS {
        boot.time(CALLS, || {
            black_box(boot_clock());
        });
        coarse.time(CALLS, || {
            black_box(coarse_clock());
        });
        raw.time(CALLS, || {
            black_box(counter.raw());
        });
        live.time(CALLS, || {
            black_box(black_box(&lease).is_live());
        });
        renew.time(CALLS, || black_box(&lease).renew().expect("it is live"));
        put.time(SYNCED_CALLS, || {
            jobs.put(lease.token(), b"job", b"value").expect("the newest token");
        });
        acquire.time(SYNCED_CALLS, || {
            let other = jobs.lease(b"other").acquire().expect("the fence is free");
            other.release().expect("it is live");
        });
    }
    let names = [
        "a clock: CLOCK_BOOTTIME",
        "a clock: CLOCK_MONOTONIC_COARSE",
        "a clock: the processor's counter",
        "is_live",
        "renew",
        "a durable put",
        "acquire and release",
    ];
    let rows = names.iter().zip(best).map(|(name, best)| {
        let mut row = Row { engine: (*name).to_owned(), ..cell.row() };
        row.note("ns", best.0);
        row.note("hop_ns", weather.hop_ns);
        row
    });
    Ok(rows.collect())
}
