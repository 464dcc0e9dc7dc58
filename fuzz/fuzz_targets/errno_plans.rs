//! Any operations while any calls of the disk fail, with any errno, once or for ever, with or without effect, on a
//! disk that may be full: nothing panics, nothing acknowledged is lost, what is said not to have happened has not
//! happened; and once the faults are over the store opens, whether its process was killed or the power cut.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use support::rows::{Model, Op, policy, run};
use support::{contents, open, rows};
use tidewall::storage::{CallKind, Fault, SimDisk, SyncFailure};

#[derive(Arbitrary, Debug)]
struct Plan {
    call: u8,
    errno: u8,
    nth: u8,
    forever: bool,
    partial: u16,
}

#[derive(Arbitrary, Debug)]
struct Round {
    plans: Vec<Plan>,
    ops: Vec<Op>,
    sync_failure: u8,
    /// Bytes that are free, in units of 256; none is a disk without an end.
    room: Option<u8>,
    short_transfers: bool,
    /// Whether the faults begin before the store is opened.
    while_opening: bool,
    /// `None` is a kill: the page cache survives.
    power_cut: Option<u8>,
    seed: u16,
}

// What Linux says of files: EIO, ENOSPC, EDQUOT, EFBIG, EROFS, EACCES, EPERM, EINTR, EAGAIN, EMFILE, ENFILE,
// ENOMEM, ENOENT, EEXIST, EMLINK, EBADF, EINVAL, ENODEV, ESTALE, ETIMEDOUT.
const ERRNOS: [i32; 20] = [5, 28, 122, 27, 30, 13, 1, 4, 11, 24, 23, 12, 2, 17, 31, 9, 22, 19, 116, 110];

fuzz_target!(|rounds: Vec<Round>| {
    let mut disk = SimDisk::new();
    let mut model = Model::default();
    for (n, round) in rounds.iter().take(3).enumerate() {
        if round.while_opening {
            plan(&disk, round);
        }
        if let Ok(db) = open(&disk, n as u64) {
            if !round.while_opening {
                plan(&disk, round);
            }
            run(&db, &mut model, &round.ops);
        }
        disk = match round.power_cut {
            Some(number) => disk.crash(policy(number), round.seed as u64),
            None => disk.kill(),
        };
        let db = open(&disk, 1000 + n as u64).expect("opens when the faults are over");
        model.check(&rows(&db).expect("the keyspace is there, or is made"));
        contents(&db).expect("everything reads");
        db.close().expect("closes");
        disk = disk.kill();
    }
});

fn plan(disk: &SimDisk, round: &Round) {
    for plan in round.plans.iter().take(4) {
        let call = CallKind::ALL[plan.call as usize % CallKind::ALL.len()];
        let errno = ERRNOS[plan.errno as usize % ERRNOS.len()];
        // A call that is to be repeated when interrupted is repeated for ever if that never ends.
        let forever = plan.forever && !(errno == 4 || errno == 11);
        let fault = Fault::errno(call, errno).nth(plan.nth as u64).partial(plan.partial as usize);
        disk.fail(if forever { fault.forever() } else { fault });
    }
    disk.set_sync_failure(match round.sync_failure % 3 {
        0 => SyncFailure::KeepNew,
        1 => SyncFailure::RevertOld,
        _ => SyncFailure::KeepPart { seed: round.seed as u64 },
    });
    if let Some(room) = round.room {
        let used: usize =
            disk.file_names().iter().filter_map(|name| disk.read_file(name)).map(|f| f.len()).sum();
        disk.set_budget(Some(used as u64 + room as u64 * 256));
    }
    if round.short_transfers {
        disk.short_transfers(round.seed as u64);
    }
}
