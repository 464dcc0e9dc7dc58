//! The campaign: a million crashes in minutes, and as many more as there is time for.
//!
//! ```text
//! cargo test --release --features testkit --test campaign -- --nocapture --test-threads 1
//! ```
//!
//! Whoever runs all tests gets a small part of it. `TIDEWALL_CAMPAIGN=1000000` asks for so many distinct
//! images; then the run fails unless every line of the engine that calls the disk was the last one, and
//! failed, at least once. `TIDEWALL_CAMPAIGN_SEED=n` begins at another seed. `TIDEWALL_CAMPAIGN_BUSY=n` asks for so many
//! stores that compact all the time, each with twelve lives.

#[path = "../support/mod.rs"]
mod support;

mod busy;
mod errors;
mod lives;
mod power;
mod replay;
mod sites;
mod small;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use support::Trying;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// Runs `test` for one seed after the other on all processors, until it says that it is enough.
fn for_seeds(is_enough: impl Fn(u64) -> bool + Sync, test: impl Fn(u64) + Sync) {
    let first = number("TIDEWALL_CAMPAIGN_SEED").unwrap_or(1);
    let next = AtomicU64::new(first);
    let workers = thread::available_parallelism().map_or(2, |n| n.get());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                // One failure ends them all.
                let _all = Trying(|| {
                    next.store(u64::MAX / 2, Ordering::Relaxed);
                    "see above; TIDEWALL_CAMPAIGN_SEED begins at a seed".to_owned()
                });
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= u64::MAX / 2 || is_enough(seed - first) {
                        break;
                    }
                    test(seed);
                }
            });
        }
    });
}
