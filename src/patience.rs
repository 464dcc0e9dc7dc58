//! How a thread waits for what is nearly done: it yields for a while before it sleeps.
//!
//! One job: decide whether, and for how long. A thread that sleeps has to be woken, and that takes as long as a fast
//! sync: a processor without work falls asleep with it, and on a virtual machine the host has to be called for each.
//! Who yields is there when the wait is over, and holds up nobody who has something to do. Promises to stop
//! where that does not pay: when most waits are longer than the limit (a slow disk), and while others want the
//! processors. The idea is the adaptive yield of RocksDB's write thread.
//!
//! Nothing rests on it: who comes back from here asks again, and sleeps.
//!
//! Read next: `commit.rs`, where writers wait.

use crate::clock::{Clock, SystemClock};
use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, thread};
use std::time::Duration;

/// So many yield at a time: with more, they take turns so slowly that to be woken is faster.
const MOST: u32 = 64;
/// Who yielded, and was away for so long, made way for somebody with much to do...
const LONG_NANOS: u64 = 1_000_000;
/// ... and then nobody yields for so long, and twice as long if that happens again soon, up to this.
const REST_NANOS: u64 = 20_000_000;
const LONGEST_REST_NANOS: u64 = 64 * REST_NANOS;
/// A score when every wait ends within the limit, and one that is not worth it.
const ALL: u32 = 1024;
const FEW: u32 = ALL / 4;
/// What the newest wait counts: one part of so many.
const WEIGHT: u32 = 64;
/// Where it does not pay, one of so many waits tries whether it does by now.
const TRY_EVERY: u32 = 256;

/// The waits of one kind, and what came of yielding. Relaxed throughout: these are guesses, and a lost update costs
/// nothing.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: u64,
    yielding: CachePadded<AtomicU32>,
    /// The part of `ALL` that ended within the limit, the newest counting most.
    score: CachePadded<AtomicU32>,
    waits: AtomicU32,
    /// Nobody yields until then, and for how long that was.
    rests_until: AtomicU64,
    rest: AtomicU64,
}

impl Patience {
    /// For waits that are worth yielding for so long; zero: for none.
    pub fn new(limit: Duration) -> Self {
        // A schedule of a test is to end: it knows no time.
        let limit = if cfg!(all(test, shuttle)) { Duration::ZERO } else { limit };
        Patience {
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            yielding: CachePadded::new(AtomicU32::new(0)),
            score: CachePadded::new(AtomicU32::new(ALL)),
            waits: AtomicU32::new(0),
            rests_until: AtomicU64::new(0),
            rest: AtomicU64::new(REST_NANOS),
        }
    }

    /// Yields until `is_over`, or until it is time to sleep.
    pub fn wait(&self, is_over: impl FnMut() -> bool) {
        // Not the clock of the leases: that one may stand still.
        self.wait_by(is_over, || SystemClock.now(), thread::yield_now);
    }

    fn wait_by(&self, is_over: impl FnMut() -> bool, mut now: impl FnMut() -> u64, make_way: impl FnMut()) {
        if self.limit == 0 {
            return;
        }
        let begun = now();
        let pays = self.score.load(Ordering::Relaxed) >= FEW
            || self.waits.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRY_EVERY);
        if !pays || begun < self.rests_until.load(Ordering::Relaxed) {
            return;
        }
        if self.yielding.fetch_add(1, Ordering::Relaxed) < MOST {
            self.yield_until(is_over, begun, now, make_way);
        }
        self.yielding.fetch_sub(1, Ordering::Relaxed);
    }

    fn yield_until(
        &self,
        mut is_over: impl FnMut() -> bool,
        begun: u64,
        mut now: impl FnMut() -> u64,
        mut make_way: impl FnMut(),
    ) {
        let mut last = begun;
        let is_in_time = loop {
            if is_over() {
                break true;
            }
            make_way();
            let now = now();
            if now.saturating_sub(last) >= LONG_NANOS {
                return self.rest_from(now);
            }
            if now.saturating_sub(begun) >= self.limit {
                break false;
            }
            last = now;
        };
        let score = self.score.load(Ordering::Relaxed);
        let score = if is_in_time { score + (ALL - score) / WEIGHT } else { score - score / WEIGHT };
        self.score.store(score, Ordering::Relaxed);
    }

    /// Others want the processors: now and then (a compaction), or all the time.
    fn rest_from(&self, now: u64) {
        let (before, rest) = (self.rests_until.load(Ordering::Relaxed), self.rest.load(Ordering::Relaxed));
        if now < before {
            return;
        }
        let is_soon = now - before < 4 * rest;
        let rest = if is_soon { (2 * rest).min(LONGEST_REST_NANOS) } else { REST_NANOS };
        self.rest.store(rest, Ordering::Relaxed);
        self.rests_until.store(now + rest, Ordering::Relaxed);
    }
}

// The primitives of shuttle do not run outside of its models.
#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    const LIMIT: Duration = Duration::from_micros(500);

    /// How often a wait yields that is over after so many yields, each of so many nanoseconds.
    fn yields(patience: &Patience, over: u64, nanos: u64, time: &Cell<u64>) -> u64 {
        let count = Cell::new(0);
        let make_way = || {
            count.set(count.get() + 1);
            time.set(time.get() + nanos);
        };
        patience.wait_by(|| count.get() >= over, || time.get(), make_way);
        assert_eq!(patience.yielding.load(Ordering::Relaxed), 0);
        count.get()
    }

    #[test]
    fn a_wait_yields_until_it_is_over_or_its_limit_is_reached() {
        let time = Cell::new(16);
        let patience = Patience::new(LIMIT);
        assert_eq!(yields(&patience, 0, 1000, &time), 0);
        assert_eq!(yields(&patience, 30, 1000, &time), 30);
        assert_eq!(yields(&patience, 501, 1000, &time), 500);
        assert_eq!(yields(&Patience::new(Duration::ZERO), 30, 1000, &time), 0);
        // As the store does it: how long a yield takes there is up to the machine.
        let mut asked = 0;
        Patience::new(LIMIT).wait(|| {
            asked += 1;
            asked == 3
        });
        assert!((1..=3).contains(&asked), "{asked}");
    }

    #[test]
    fn a_slow_disk_ends_it_until_it_is_fast_again() {
        let time = Cell::new(16);
        let patience = Patience::new(LIMIT);
        let slow = (0..1000).filter(|_| yields(&patience, u64::MAX, 1000, &time) > 0).count();
        assert!((20..120).contains(&slow), "{slow} of 1000 waits yielded in vain");
        let fast = (0..10_000).filter(|_| yields(&patience, 5, 1000, &time) > 0).count();
        assert!(fast > 5000, "{fast}");
        assert_eq!((0..100).map(|_| yields(&patience, 5, 1000, &time)).sum::<u64>(), 500);
    }

    #[test]
    fn it_rests_while_others_want_the_processors() {
        let time = Cell::new(16);
        let patience = Patience::new(LIMIT);
        time.set(10 * REST_NANOS);
        let rest = || {
            assert_eq!(yields(&patience, 5, 3_000_000, &time), 1, "away for 3 ms");
            let begun = time.get();
            while yields(&patience, 5, 1000, &time) == 0 {
                time.set(time.get() + REST_NANOS / 10);
            }
            (time.get() - begun) / REST_NANOS
        };
        assert_eq!(rest(), 1);
        // They go on and on.
        assert_eq!([rest(), rest(), rest()], [2, 4, 8]);
        assert_eq!((0..9).map(|_| rest()).max(), Some(64));
        time.set(time.get() + 4 * LONGEST_REST_NANOS);
        assert_eq!(rest(), 1);
    }

    #[test]
    fn not_all_yield_at_a_time() {
        fn nest(patience: &Patience, depth: u32, deepest: &Cell<u32>) {
            let mut entered = false;
            let is_over = || {
                if !std::mem::replace(&mut entered, true) {
                    deepest.set(depth + 1);
                    nest(patience, depth + 1, deepest);
                }
                true
            };
            patience.wait_by(is_over, || 16, || {});
        }
        let deepest = Cell::new(0);
        nest(&Patience::new(LIMIT), 0, &deepest);
        assert_eq!(deepest.get(), MOST);
    }
}
