//! One life of a store: it is made, used, closed, opened again, used, and killed.

use crate::support::driver::{Driver, History};
use tidewall::ReadMode;
use tidewall::storage::SimDisk;

const CALLS: u32 = 45;

/// Runs a life on `disk` as far as the disk lets it, and gives what is known of it, and the disk as it is when
/// the process is killed at the end.
pub fn live(disk: &SimDisk, seed: u64) -> (History, SimDisk) {
    let mut history = History::new();
    for opens in 0..2 {
        let mode = if seed & 1 == opens { ReadMode::Map } else { ReadMode::Pread };
        // With larger segments in the second life of every fourth seed (`open_reading`).
        let larger = opens * u64::from(seed.is_multiple_of(4)) * 4;
        let lives = seed << 20 | (opens + larger) << 10;
        let Ok(mut driver) = Driver::open_reading(disk, &history, lives, mode, lives) else { break };
        driver.upkeep = 12;
        driver.run(CALLS);
        // Leases are still held: that is for the next life to respect.
        let is_over = opens == 1 || driver.db.clone().close().is_err();
        let killed = disk.kill();
        history = driver.into_history();
        if is_over {
            return (history, killed);
        }
    }
    (history, disk.kill())
}

pub fn new_disk(seed: u64) -> SimDisk {
    let disk = SimDisk::new();
    if seed.is_multiple_of(3) {
        disk.early_write_back(seed);
    }
    disk
}
