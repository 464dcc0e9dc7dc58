//! Any operations, any crash, four times over: opening succeeds, what was acknowledged is there, marks are not
//! below what was answered, and no stale token is admitted.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use support::rows::{Model, Op, policy, run};
use support::{contents, open, rows};
use tidewall::storage::{Crash, SimDisk};

#[derive(Arbitrary, Debug)]
struct Round {
    ops: Vec<Op>,
    /// After so many storage calls the power goes.
    calls: u16,
    policy: u8,
    seed: u16,
}

fuzz_target!(|rounds: Vec<Round>| {
    let mut disk = SimDisk::new();
    let mut model = Model::default();
    for (n, round) in rounds.iter().take(4).enumerate() {
        disk.stop_at(disk.calls() + round.calls as u64);
        if let Ok(db) = open(&disk, n as u64) {
            run(&db, &mut model, &round.ops);
        }
        disk = disk.crash(policy(round.policy), round.seed as u64);
        let db = open(&disk, 1000 + n as u64).expect("a crash of any kind opens again by itself");
        model.check(&rows(&db).expect("the keyspace is there, or is made"));
        contents(&db).expect("everything reads");
        db.close().expect("closes");
        // What recovery has shown stays.
        disk = disk.crash(Crash::None, 0);
        let again = open(&disk, 2000 + n as u64).expect("opens again");
        model.check(&rows(&again).expect("there"));
        again.close().expect("closes");
        disk = disk.kill();
    }
});
