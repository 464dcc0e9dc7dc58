//! Power cuts at every storage call of many lives, and behind one failure.

use crate::lives::{live, new_disk};
use crate::sites::{Observed, Site, Sites};
use crate::support::driver::History;
use crate::support::judge::{CRASHES, Judge, SYNC_FAILURES, Tally, count};
use crate::support::{Rng, Trying};
use crate::{for_seeds, number};
use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tidewall::Options;
use tidewall::storage::{CallKind, Crash, Fault, SimDisk};

/// Up to so many un-synced sectors, all of their subsets are tried.
const FEW: usize = 4;
/// Images of each policy that leaves something to chance, and of tears within a sector: at any byte.
const DRAWN: u64 = 6;
const TORN: u64 = 48;

/// Every image that is made of one interrupted life.
pub fn images(disk: &SimDisk, rng: &mut Rng, mut each: impl FnMut(SimDisk)) {
    each(disk.kill());
    each(disk.crash(Crash::None, 0));
    each(disk.crash(Crash::All, 0));
    let sectors = disk.pending_sectors();
    if sectors <= FEW {
        for kept in 0..1 << sectors {
            for (lengths, dirs) in [(false, false), (false, true), (true, false), (true, true)] {
                each(disk.crash_exact(kept, lengths, dirs));
            }
        }
    }
    for crash in &CRASHES[2..] {
        let drawn = match crash {
            Crash::Torn { bytes: true } if sectors > 0 => TORN,
            _ => DRAWN,
        };
        for _ in 0..drawn {
            each(disk.crash(*crash, rng.next()));
        }
    }
}

#[test]
fn every_call_is_the_last_and_fails() {
    let wanted = number("TIDEWALL_CAMPAIGN");
    let target = wanted.unwrap_or(10_000);
    let (tally, sites) = (Tally::default(), Sites::default());
    let began = Instant::now();
    for_seeds(
        |_| tally.distinct.load(Ordering::Relaxed) >= target,
        |seed| Campaign::new(seed, &tally, &sites).run(),
    );
    let seconds = began.elapsed().as_secs_f64();
    let distinct = tally.distinct.load(Ordering::Relaxed);
    let missed = sites.missed();
    tally.print("campaign");
    println!("{distinct} distinct images in {seconds:.1} s, {:.0} a second", distinct as f64 / seconds);
    assert!(distinct >= target, "{distinct} images of {target}");
    if wanted.is_some() {
        assert!(missed.is_empty(), "missed:\n{}", missed.join("\n"));
    }
}

struct Campaign<'a> {
    seed: u64,
    tally: &'a Tally,
    sites: &'a Sites,
    judge: Judge<'a>,
}

impl<'a> Campaign<'a> {
    fn new(seed: u64, tally: &'a Tally, sites: &'a Sites) -> Self {
        let mut judge = Judge::new(seed, tally);
        (judge.goes_on, judge.is_cut_off) = (4, 1);
        Campaign { seed, tally, sites, judge }
    }

    fn run(&mut self) {
        let (sites, seed) = (self.sites, self.seed);
        let observe = move |disk: &SimDisk| -> Box<dyn Fn(u64, bool) -> bool + 'a> {
            let observed = Observed::of(disk);
            Box::new(move |call, fails| {
                let Some(site) = observed.at(call) else { return fails };
                // What few recoveries do is tried both ways when one does.
                let seen = sites.get(site);
                let fails = (fails || seen.failed == 0) && seen.cut > 0;
                sites.note(Some(site), |counts| match fails {
                    true => counts.failed += 1,
                    false => (counts.cut, counts.images) = (counts.cut + 1, counts.images + 2),
                });
                fails
            })
        };
        self.judge.observe = Some(Box::new(observe));
        let disk = new_disk(seed);
        let observed = Observed::of(&disk);
        let (history, killed) = live(&disk, seed);
        let calls = observed.calls();
        (0..calls).for_each(|call| sites.note(observed.at(call), |counts| counts.calls += 1));
        self.judge.judge(&killed, &history, 3);
        let mut before = None;
        self.look(&killed);
        for call in 0..calls {
            // Behind a call that only reads the disk is as it was before.
            let is_new = call == 0 || observed.may_change(call - 1);
            if is_new || (call + seed).is_multiple_of(8) {
                self.cut(observed.at(call), call, None, &mut before);
            }
            // Failures take longer, for each may lead elsewhere: a part of them in each seed.
            if (call + seed).is_multiple_of(8) {
                self.fail(observed.at(call), call);
            }
        }
    }

    /// A read-only open in which the power goes, or a call fails, writes nothing all the same.
    fn look(&mut self, image: &SimDisk) {
        let hash = image.image_hash();
        let open = |disk: &SimDisk| {
            let options = Options::new().storage(disk.clone()).read_only().without_threads();
            let opened = options.open("sim").is_ok();
            assert_eq!(disk.image_hash(), hash, "a read-only open wrote");
            opened
        };
        let disk = image.kill();
        let observed = Observed::of(&disk);
        assert!(open(&disk), "it opens to read");
        for call in 0..observed.calls() {
            let disk = image.kill();
            disk.stop_at(call);
            open(&disk);
            let disk = image.kill();
            disk.fail(Fault::new(CallKind::Any, ErrorKind::Other).nth(call));
            open(&disk);
            self.sites.note(observed.at(call), |counts| {
                (counts.cut, counts.images, counts.failed) =
                    (counts.cut + 1, counts.images + 1, counts.failed + 1);
            });
        }
    }

    /// The power goes at one call, perhaps long after another one failed.
    fn cut(
        &mut self,
        site: Option<Site>,
        call: u64,
        failed: Option<u64>,
        before: &mut Option<(u64, usize, u64, usize)>,
    ) {
        let seed = self.seed;
        let _trying =
            Trying(move || format!("seed {seed}, power off at call {call}, failed before: {failed:?}"));
        let disk = new_disk(seed);
        if let Some(failed) = failed {
            self.plan(&disk, failed);
        }
        disk.stop_at(call);
        let (history, _) = live(&disk, seed);
        count(&self.tally.lives);
        assert!(disk.is_stopped());
        let mut judged = 0;
        // Many calls only read: there the images are those of the call before.
        let state = (disk.image_hash(), disk.pending_sectors(), history.durable, history.states.len());
        if before.replace(state) == Some(state) {
            self.judge.judge(&disk.kill(), &history, 3);
            judged = 1;
        } else {
            let judge = &mut self.judge;
            let mut rng = Rng(seed << 32 ^ call << 12 ^ failed.map_or(0, |failed| failed + 1));
            images(&disk, &mut rng, |image| {
                judge.judge(&image, &history, 3);
                judged += 1;
            });
        }
        self.sites
            .note(site, |counts| (counts.cut, counts.images) = (counts.cut + 1, counts.images + judged));
    }

    fn plan(&self, disk: &SimDisk, call: u64) {
        let mut rng = Rng(self.seed ^ call);
        disk.set_sync_failure(*rng.pick(&SYNC_FAILURES));
        let kind = *rng.pick(&[ErrorKind::StorageFull, ErrorKind::Other]);
        disk.fail(Fault::new(CallKind::Any, kind).nth(call).partial(rng.below(3000) as usize));
    }

    /// One call fails. Who calls the disk because of that only may be cut off, and may fail, too.
    fn fail(&mut self, site: Option<Site>, call: u64) {
        let seed = self.seed;
        let _trying = Trying(move || format!("seed {seed}, call {call} fails"));
        let disk = new_disk(seed);
        self.plan(&disk, call);
        let observed = Observed::of(&disk);
        let (history, killed) = live(&disk, seed);
        self.sites.note(site, |counts| counts.failed += 1);
        self.judge_failed(&killed, &disk, &history);
        for (later, site) in observed.all().into_iter().enumerate().skip(call as usize + 1) {
            let Some(site) = site else { continue };
            let later = later as u64;
            let seen = self.sites.get(site);
            if seen.cut == 0 {
                self.cut(Some(site), later, Some(call), &mut None);
            }
            if seen.failed == 0 {
                let disk = new_disk(seed);
                self.plan(&disk, call);
                disk.fail(Fault::new(CallKind::Any, ErrorKind::Other).nth(later));
                let (history, killed) = live(&disk, seed);
                self.sites.note(Some(site), |counts| counts.failed += 1);
                self.judge_failed(&killed, &disk, &history);
            }
        }
    }

    fn judge_failed(&mut self, killed: &SimDisk, disk: &SimDisk, history: &History) {
        let cut = disk.crash(Crash::None, 0);
        self.judge.judge(killed, history, 2);
        self.judge.judge(&cut, history, 2);
        self.judge.judge(&disk.crash(Crash::Subset { percent: 50 }, self.seed), history, 2);
    }
}
