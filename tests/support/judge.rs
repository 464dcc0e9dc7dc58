//! Recovers what a crash left, and holds it against all that is known: I1 to I7 and I9.
//!
//! Each image is told by its hash and judged once. Whatever is the same for many images is done once: those
//! of one life are recovered with one seed, so that what differs in a torn tail alone is the same afterwards.

use super::driver::{Driver, History};
use super::shown::{Shown, is_index, keyspaces, open, open_reading, probe, shown, without_index};
use super::{Rng, Trying};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use tidewall::storage::{CallKind, Crash, Fault, SimDisk, SyncFailure};
use tidewall::{Error, ManualClock, Options, ReadMode};

pub const CRASHES: [Crash; 11] = [
    Crash::None,
    Crash::All,
    Crash::Subset { percent: 50 },
    Crash::Subset { percent: 90 },
    Crash::Prefix,
    Crash::Suffix,
    Crash::Reverse,
    Crash::OneMissing,
    Crash::OnePresent,
    Crash::Torn { bytes: true },
    Crash::Torn { bytes: false },
];

pub const SYNC_FAILURES: [SyncFailure; 3] =
    [SyncFailure::KeepNew, SyncFailure::RevertOld, SyncFailure::KeepPart { seed: 5 }];

/// How much was tried, over all seeds.
#[derive(Default, Debug)]
pub struct Tally {
    pub lives: AtomicU64,
    /// Images recovered and judged.
    pub images: AtomicU64,
    /// Of these, how many differ: no two by the same hash.
    pub distinct: AtomicU64,
    /// Images that were made again and had been judged before.
    pub again: AtomicU64,
    pub in_recovery: AtomicU64,
    pub deepest: AtomicU64,
    pub went_on: AtomicU64,
}

pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Tally {
    pub fn print(&self, what: &str) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        println!(
            "{what}: {} lives, {} distinct images recovered ({} times), {} of them cut off in a recovery (up to {} \
             deep), {} went on",
            get(&self.lives),
            get(&self.distinct),
            get(&self.images),
            get(&self.in_recovery),
            get(&self.deepest),
            get(&self.went_on)
        );
    }
}

/// The judge of one seed. The store's id is drawn from the seed, so no image of one seed is one of another,
/// but for those from before there was a store: they do not count.
pub struct Judge<'a> {
    tally: &'a Tally,
    seed: u64,
    rng: Rng,
    /// Images, and images with what is known of their past.
    images: HashSet<u64>,
    judged: HashSet<(u64, u64, usize)>,
    /// Recovered stores that were recovered once more.
    settled: HashSet<u64>,
    /// Asked to watch a recovery that is about to be cut off at each of its calls; what it gives is told each of
    /// them, and whether that call is to fail rather than be the last one, and decides.
    pub observe: Option<Box<Observe<'a>>>,
    /// In percent: how often a judged store goes on and is cut off again, and how often its recovery is.
    pub goes_on: u64,
    pub is_cut_off: u64,
}

pub type Observe<'a> = dyn Fn(&SimDisk) -> Box<dyn Fn(u64, bool) -> bool + 'a> + 'a;

const DEEPEST: u32 = 3;

impl<'a> Judge<'a> {
    pub fn new(seed: u64, tally: &'a Tally) -> Self {
        Judge {
            tally,
            seed,
            rng: Rng(seed ^ 0x006a_7564_6765),
            images: HashSet::new(),
            judged: HashSet::new(),
            settled: HashSet::new(),
            observe: None,
            goes_on: 12,
            is_cut_off: 4,
        }
    }

    /// A life is never recovered with its own random bits.
    fn seed_at(&self, depth: u32) -> u64 {
        self.seed << 8 | u64::from(depth) << 1 | 1
    }

    /// Judges an image. With some `depth` left it goes on now and then, and is cut off again: in its next life,
    /// or in this recovery.
    pub fn judge(&mut self, image: &SimDisk, history: &History, depth: u32) {
        let hash = image.image_hash();
        if !self.judged.insert((hash, history.durable, history.states.len())) {
            return count(&self.tally.again);
        }
        if image.file_names().iter().any(|name| name == "STORE") && self.images.insert(hash) {
            count(&self.tally.distinct);
        }
        count(&self.tally.images);
        // What becomes of an image follows from it and the seed, not from what was judged before it.
        self.rng = Rng(self.seed ^ hash.rotate_left(depth) ^ history.durable);
        let seed = self.seed_at(depth);
        let _trying =
            Trying(move || format!("  image {hash:016x} recovered with seed {seed}, {depth} more deep"));
        let is_cut_off = depth > 0 && self.rng.chance(self.is_cut_off);
        let untouched = is_cut_off.then(|| image.kill());
        let goes_on = depth > 0 && self.rng.chance(self.goes_on);
        let from_outside = self.rng.chance(10).then(|| looked_at(image, hash)).flatten();
        let mode = if hash.is_multiple_of(2) { ReadMode::Map } else { ReadMode::Pread };
        let is_indexed = self.rng.chance(25) && image.file_names().iter().any(|name| is_index(name));
        let unindexed = is_indexed.then(|| without_index(image));
        let opened = Driver::open_reading(image, history, seed, mode, self.rng.next());
        let mut driver = opened.unwrap_or_else(|e| panic!("a crash must open by itself (I7): {e}"));
        let calls = image.calls();
        let lsn = driver.db.last_lsn().get();
        let newest = history.states.last().unwrap().lsn.max(history.durable);
        assert!(lsn >= history.durable, "lsn {} was seen, {lsn} came back (I1)", history.durable);
        assert!(
            lsn <= newest + 1 || history.was_compacting,
            "lsn {lsn} was never appended, {newest} was the last"
        );
        driver.check();
        if let Some((proven, seen)) = from_outside {
            assert!(proven <= lsn, "lsn {proven} was proven, {lsn} came back");
            check_seen(&seen, &history.at(proven).shown());
        }
        // With the floor that a compaction may have raised.
        let model = driver.history.at(lsn).clone();

        if let Some(unindexed) = unindexed {
            let scanned = open_reading(&unindexed, &ManualClock::new(), seed, mode).expect("so does a scan");
            let seen = (scanned.last_lsn().get(), shown(&scanned).unwrap());
            assert_eq!(seen, (lsn, model.shown()), "an index file changes what is seen");
            let (by_scan, by_index) = (scanned.stats(), driver.db.stats());
            assert_eq!(by_scan.keys, by_index.keys, "an index file changes how many keys there are");
            // Under a folded floor an older state may be all that is left of a fence: the scan cannot know.
            let may_be_folded = keyspaces(&scanned).iter().any(|keyspace| keyspace.floor().is_some());
            let is_same = by_scan.live_bytes == by_index.live_bytes;
            assert!(
                is_same || may_be_folded && by_scan.live_bytes > by_index.live_bytes,
                "an index file changes what is counted: {} bytes instead of {}",
                by_index.live_bytes,
                by_scan.live_bytes
            );
        }

        // What it shows survives another cut at once, and the next open finds nothing to repair. Where that is
        // the same as after another image, all of this was done.
        let again = image.crash(Crash::None, 0);
        if self.settled.insert(again.image_hash() ^ lsn.wrapping_mul(0x9e37_79b9_7f4a_7c15)) || goes_on {
            probe(&driver.db, &model);
            let before = again.kill();
            let second = open(&again, &ManualClock::new(), seed ^ 1 << 7).expect("what was recovered opens");
            assert_eq!(second.last_lsn().get(), lsn, "the adopted tail was not made durable");
            assert_eq!(shown(&second).unwrap(), model.shown(), "recovering twice is not recovering once");
            assert_eq!(second.report().cut_bytes, 0, "a recovered store has no tail to cut");
            let names = again.file_names();
            let known = before.file_names();
            assert!(
                names.iter().all(|name| known.contains(name)),
                "the second open made files (I9): {names:?}"
            );
            for name in names.iter().filter(|name| name.ends_with(".seg")) {
                assert!(again.has_same_file(&before, name), "the second open changed {name} (I5)");
            }
            driver.check_grant();
        }

        let mut rng = self.rng.clone();
        if goes_on {
            count(&self.tally.went_on);
            driver.upkeep = 10;
            driver.run(25);
            driver.check();
            let crash = *rng.pick(&CRASHES);
            let next = if rng.chance(20) { image.kill() } else { image.crash(crash, rng.next()) };
            let history = driver.into_history();
            self.judge(&next, &history, depth - 1);
        }
        if let Some(untouched) = untouched {
            self.cut_off(&untouched, (calls, mode), history, &model.shown(), depth);
        }
    }

    /// The recovery of an image fails at each of its calls, or ends there.
    fn cut_off(
        &mut self,
        image: &SimDisk,
        (calls, mode): (u64, ReadMode),
        history: &History,
        shown_whole: &[Shown],
        depth: u32,
    ) {
        let mut rng = Rng(self.seed ^ image.image_hash() ^ u64::from(depth));
        self.tally.deepest.fetch_max(u64::from(DEEPEST + 1 - depth), Ordering::Relaxed);
        // Two opens later nobody waits for the holders of before.
        let history = &History { held: Vec::new(), ..history.clone() };
        let seed = self.seed_at(depth) ^ 1 << 6;
        let note = self.observe.as_ref().map(|observe| {
            let disk = image.kill();
            let note = observe(&disk);
            open_reading(&disk, &ManualClock::new(), seed, mode).expect("it opened before");
            note
        });
        for call in 0..calls {
            let disk = image.kill();
            // The power goes, or one call of the recovery fails and perhaps nobody need care.
            let fails = rng.chance(40);
            let fails = note.as_ref().map_or(fails, |note| note(call, fails));
            if !fails {
                disk.stop_at(call);
            } else {
                disk.set_sync_failure(*rng.pick(&SYNC_FAILURES));
                let kind = *rng.pick(&[ErrorKind::StorageFull, ErrorKind::Other]);
                let partial = rng.below(3000) as usize;
                disk.fail(Fault::new(CallKind::Any, kind).nth(call).partial(partial));
            }
            let opened = open_reading(&disk, &ManualClock::new(), seed, mode);
            disk.clear_faults();
            if let Ok(db) = opened
                && !disk.is_stopped()
            {
                assert_eq!(shown(&db).unwrap(), shown_whole, "opened in spite of a fault");
            }
            let _trying = Trying(move || format!("  call {call} of the recovery fails or is the last"));
            for _ in 0..2 {
                let crash = *rng.pick(&CRASHES);
                let next = if rng.chance(20) { disk.kill() } else { disk.crash(crash, rng.next()) };
                count(&self.tally.in_recovery);
                self.judge(&next, history, depth - 1);
            }
        }
    }
}

/// What a read-only open shows, which writes nothing. `None`: there is no store yet.
fn looked_at(image: &SimDisk, hash: u64) -> Option<(u64, Vec<Shown>)> {
    let disk = image.kill();
    let opened = Options::new().storage(disk.clone()).read_only().without_threads().open("sim");
    assert_eq!(disk.image_hash(), hash, "a read-only open wrote");
    match opened {
        Ok(db) => Some((db.last_lsn().get(), shown(&db).expect("it is whole"))),
        Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("a crash must open by itself, also to read: {error}"),
    }
}

/// A state that a read-only open shows, against the model. Folding may have raised marks on the way to it.
fn check_seen(seen: &[Shown], expected: &[Shown]) {
    assert_eq!(seen.len(), expected.len(), "a read-only open shows other keyspaces");
    for (seen, expected) in seen.iter().zip(expected) {
        assert_eq!(seen.values, expected.values, "a read-only open shows other values");
        for (seen, expected) in seen.marks.iter().zip(&expected.marks) {
            assert!(seen >= expected, "a read-only open shows a mark of {seen:?} instead of {expected:?}");
        }
    }
}
