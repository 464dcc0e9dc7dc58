//! Every storage call of a life fails with every error there is, once or for ever.

use crate::lives::{live, new_disk};
use crate::sites::Observed;
use crate::support::judge::{Judge, SYNC_FAILURES, Tally, count};
use crate::support::{Rng, Trying};
use crate::{for_seeds, number};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tidewall::storage::{CallKind, Crash, Fault, SimDisk};

/// What a disk, a file system or a limit of the process may answer. Not among them: that a file is there or
/// not, which is an answer; and an interruption for ever, which is none.
const ERRNOS: [(&str, i32); 16] = [
    ("EPERM", 1),
    ("EIO", 5),
    ("ENXIO", 6),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EACCES", 13),
    ("EBUSY", 16),
    ("ENODEV", 19),
    ("EINVAL", 22),
    ("ENFILE", 23),
    ("EMFILE", 24),
    ("EFBIG", 27),
    ("ENOSPC", 28),
    ("EROFS", 30),
    ("ESTALE", 116),
    ("EDQUOT", 122),
];

#[derive(Clone, Copy, Debug)]
enum Lasts {
    Once,
    /// This kind of call fails from then on.
    ForThisCall,
    /// Every call does.
    ForAll,
}

#[test]
fn every_call_fails_with_every_error() {
    let seeds = number("TIDEWALL_CAMPAIGN_ERRORS").unwrap_or(0);
    let (tally, began) = (Tally::default(), Instant::now());
    let failed: Mutex<BTreeMap<(CallKind, &str), u64>> = Mutex::default();
    for_seeds(
        // Some of a life's errors, or all of so many lives.
        |nth| nth >= seeds.max(2),
        |seed| {
            let mut judge = Judge::new(seed, &tally);
            (judge.goes_on, judge.is_cut_off) = (2, 0);
            let mut rng = Rng(seed);
            let disk = new_disk(seed);
            let observed = Observed::of(&disk);
            live(&disk, seed);
            for call in 0..observed.calls() {
                let kind = observed.kind(call).expect("it was made");
                for (name, errno) in ERRNOS {
                    for lasts in [Lasts::Once, Lasts::ForThisCall, Lasts::ForAll] {
                        // Without a number of lives a part of them.
                        if seeds == 0 && rng.below(40) > 0 {
                            continue;
                        }
                        let _trying =
                            Trying(move || format!("seed {seed}, call {call} fails with {name}, {lasts:?}"));
                        let disk = new_disk(seed);
                        disk.set_sync_failure(*rng.pick(&SYNC_FAILURES));
                        plan(&disk, &observed, call, kind, errno, lasts, rng.below(3000) as usize);
                        let (history, killed) = live(&disk, seed);
                        count(&tally.lives);
                        assert!(disk.faults_fired() > 0, "it did not fail");
                        *failed.lock().unwrap().entry((kind, name)).or_default() += 1;
                        let part = disk.crash(Crash::Subset { percent: 50 }, rng.next());
                        for image in [&killed, &disk.crash(Crash::None, 0), &part] {
                            judge.judge(image, &history, 1);
                        }
                    }
                }
            }
        },
    );
    let failed = failed.into_inner().unwrap();
    println!(
        "{} failing calls ({} kinds of call by {} errors), {} images judged in {:.1} s",
        tally.lives.load(Ordering::Relaxed),
        CallKind::ALL.iter().filter(|&&kind| failed.keys().any(|(failed, _)| *failed == kind)).count(),
        ERRNOS.len(),
        tally.images.load(Ordering::Relaxed),
        began.elapsed().as_secs_f64()
    );
    if seeds > 0 {
        for kind in CallKind::ALL {
            for (name, _) in ERRNOS {
                assert!(failed.contains_key(&(kind, name)), "no {kind:?} failed with {name}");
            }
        }
    }
}

fn plan(
    disk: &SimDisk,
    observed: &Observed,
    call: u64,
    kind: CallKind,
    errno: i32,
    lasts: Lasts,
    partial: usize,
) {
    let of_kind = (0..call).filter(|&before| observed.kind(before) == Some(kind)).count() as u64;
    let fault = match lasts {
        Lasts::Once => Fault::errno(CallKind::Any, errno).nth(call),
        Lasts::ForThisCall => Fault::errno(kind, errno).nth(of_kind).forever(),
        Lasts::ForAll => Fault::errno(CallKind::Any, errno).nth(call).forever(),
    };
    disk.fail(fault.partial(partial));
}
