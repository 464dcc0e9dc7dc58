//! Every sequence of a few calls, every crash point of it, every subset of what is un-synced then.
//!
//! What goes wrong mostly goes wrong in a few steps; so all of few steps are tried, from a small alphabet.

use crate::for_seeds;
use crate::number;
use crate::support::driver::{Driver, History};
use crate::support::judge::{Judge, Tally, count};
use crate::support::model::Call;
use crate::support::{Trying, model};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tidewall::ReadMode;
use tidewall::storage::SimDisk;

/// Above so many un-synced sectors only some of their subsets are tried.
const FEW: usize = 12;

/// The steps that sequences are made of.
const STEPS: [Step; 12] = [
    Step::Put(1),
    Step::Put(2),
    Step::PutLarge,
    Step::Submit,
    Step::Delete,
    Step::Batch,
    Step::Raise,
    Step::RaiseAll,
    Step::Acquire,
    Step::Compact,
    Step::Checkpoint,
    Step::Reopen,
];

#[derive(Clone, Copy, Debug)]
enum Step {
    /// With this token: below the mark it is refused.
    Put(u64),
    /// More than the rest of a segment, so that the log goes on in another.
    PutLarge,
    /// Appended, and not waited for: it goes to the disk with what comes next.
    Submit,
    Delete,
    Batch,
    Raise,
    RaiseAll,
    Acquire,
    Compact,
    Checkpoint,
    Reopen,
}

/// The keyspaces of external tokens, and of the store's own.
const ROWS: usize = 2;
const KEYS_SPACE: usize = 0;

fn change(kind: model::Kind, token: u64, key: &'static [u8], bytes: usize) -> model::Change {
    model::Change { kind, space: ROWS, token, key, value: vec![token as u8; bytes].into() }
}

fn write(changes: Vec<model::Change>) -> Call {
    Call::Write { changes, expect: Vec::new(), op: None }
}

impl Step {
    fn take(self, driver: &mut Driver) {
        use model::Kind::{Delete, Put};
        match self {
            Step::Put(token) => driver.ask(write(vec![change(Put, token, b"c", 40)])),
            Step::PutLarge => driver.ask(write(vec![change(Put, 2, b"d", 9000)])),
            Step::Submit => driver.submit(write(vec![change(Put, 2, b"a/2", 700)])),
            Step::Delete => driver.ask(write(vec![change(Delete, 2, b"c", 0)])),
            Step::Batch => driver.ask(write(vec![change(Put, 2, b"a/1", 30), change(Put, 3, b"c", 30)])),
            Step::Raise => driver.ask(Call::Raise { space: ROWS, token: 4, key: b"d" }),
            Step::RaiseAll => driver.ask(Call::RaiseAll { space: ROWS, token: 2 }),
            Step::Acquire => driver.acquire(KEYS_SPACE, b"c"),
            Step::Compact => driver.compact(),
            Step::Checkpoint => driver.checkpoint(),
            Step::Reopen => unreachable!("see `live`"),
        }
    }
}

/// What taking some steps came to.
struct Lived {
    disk: SimDisk,
    history: History,
    /// The first call of the last step, and how many there were.
    last: u64,
    calls: u64,
}

/// Takes the steps, from a store with some keyspaces and a value.
fn live(base: &SimDisk, known: &History, steps: &[Step], stop_at: Option<u64>) -> Lived {
    let disk = base.kill();
    if let Some(call) = stop_at {
        disk.stop_at(call);
    }
    let (mut history, mut opens, mut last) = (known.clone(), 2, 0);
    let mut opened = open(&disk, &history, opens);
    for (at, step) in steps.iter().enumerate() {
        if at > 0 {
            last = disk.calls();
        }
        let Some(driver) = &mut opened else { break };
        if matches!(step, Step::Reopen) {
            let closed = driver.db.clone().close();
            history = opened.take().expect("it is open").into_history();
            if closed.is_err() {
                break;
            }
            opens += 2;
            opened = open(&disk, &history, opens);
        } else {
            step.take(driver);
        }
    }
    let calls = disk.calls();
    // Not what dropping the store does.
    let disk = if stop_at.is_some() { disk } else { disk.kill() };
    if let Some(driver) = opened {
        history = driver.into_history();
    }
    Lived { disk, history, last, calls }
}

fn open(disk: &SimDisk, history: &History, seed: u64) -> Option<Driver> {
    Driver::open_reading(disk, history, seed << 12, ReadMode::Map, seed).ok()
}

/// Every image of a disk: all subsets where they are few enough, and each length and directory operation.
fn every_image(disk: &SimDisk, mut each: impl FnMut(SimDisk)) {
    each(disk.kill());
    let sectors = disk.pending_sectors();
    let most = 1u64 << sectors.min(FEW);
    for kept in 0..most {
        for (lengths, dirs) in [(false, false), (false, true), (true, false), (true, true)] {
            if sectors <= FEW {
                each(disk.crash_exact(kept, lengths, dirs));
            }
        }
    }
    if sectors > FEW {
        for seed in 0..4 {
            crate::support::judge::CRASHES.iter().for_each(|&crash| each(disk.crash(crash, seed)));
        }
    }
}

#[test]
fn every_short_sequence_survives_every_crash() {
    let deepest = number("TIDEWALL_CAMPAIGN_STEPS").unwrap_or(2) as u32;
    let base = SimDisk::new();
    let mut driver = Driver::open_reading(&base, &History::new(), 1, ReadMode::Map, 1).unwrap();
    (0..4).for_each(|_| driver.ask(Call::Create));
    driver.ask(write(vec![change(model::Kind::Put, 1, b"b/1", 10)]));
    let base = base.crash(tidewall::storage::Crash::All, 0);
    let known = driver.into_history();
    let (tally, began) = (Tally::default(), Instant::now());
    let all = STEPS.len() as u64;
    let sequences: u64 = (1..=deepest).map(|len| all.pow(len)).sum();
    for_seeds(
        |nth| nth >= sequences,
        |seed| {
            let (mut nth, mut len) = (seed - number("TIDEWALL_CAMPAIGN_SEED").unwrap_or(1), 1);
            while nth >= all.pow(len) {
                (nth, len) = (nth - all.pow(len), len + 1);
            }
            let steps: Vec<Step> = (0..len).map(|at| STEPS[(nth / all.pow(at) % all) as usize]).collect();
            let said = Arc::new(format!("{steps:?}"));
            let mut judge = Judge::new(9, &tally);
            (judge.goes_on, judge.is_cut_off) = (0, 0);
            let Lived { disk, history, last, calls } = live(&base, &known, &steps, None);
            judge.judge(&disk, &history, 0);
            // Where the steps before the last one are cut off is for the sequence without the last one.
            for call in last..calls {
                let said = said.clone();
                let _trying = Trying(move || format!("{said}, power off at call {call}"));
                let Lived { disk, history, .. } = live(&base, &known, &steps, Some(call));
                count(&tally.lives);
                every_image(&disk, |image| judge.judge(&image, &history, 0));
            }
        },
    );
    let images = tally.images.load(Ordering::Relaxed);
    println!(
        "every sequence of up to {deepest} of {all} steps: {sequences}, cut off at {} calls, {images} images judged \
         in {:.1} s",
        tally.lives.load(Ordering::Relaxed),
        began.elapsed().as_secs_f64()
    );
    assert!(images > sequences * 5);
}
