//! Time, for leases only.
//!
//! One job: say how many nanoseconds have passed. Safety never depends on the answer: the fence
//! refuses an old token by its number, whatever any clock says. A clock that stands still keeps a
//! dead holder's lease alive for longer, and one that runs ahead ends a lease early; neither lets
//! a fenced writer through.
//!
//! Read next: `lease.rs`, the only rules that compare two answers of a clock.

use crate::sync::Arc;
use std::fmt;

#[cfg(any(test, feature = "testkit", fuzzing))]
use crate::sync::{AtomicU64, Mutex, Ordering};
#[cfg(any(test, feature = "testkit", fuzzing))]
use std::time::Duration;

/// The first instant any clock of this module answers: smaller numbers are free to mean something
/// else in a word that holds an instant.
const FIRST: u64 = 16;

/// A source of instants.
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// Nanoseconds since an arbitrary start, never below 16, and never less than an earlier answer.
    ///
    /// Instants of two clocks, or of two runs of the process, must not be compared. It is asked under locks of the
    /// store, by every thread: it takes no time, and calls no store.
    fn now(&self) -> u64;

    /// Asks to be called after each jump of the clock that the time of the machine does not show; the answer
    /// says whether to go on calling. For clocks moved by hand: it makes waiters and timers look at once.
    ///
    /// Nothing rests on it: by default nobody is called, and a jump is noticed within a quarter of a second.
    fn watch(&self, changed: Box<dyn Fn() -> bool + Send + Sync>) {
        drop(changed);
    }
}

/// The clock of the operating system: the one a store uses unless it is given another.
///
/// * Linux: `CLOCK_BOOTTIME`. The clock behind [`std::time::Instant`], `CLOCK_MONOTONIC`, stands
///   still while the machine is suspended, so a laptop closed for a night would wake up with every
///   lease as young as it was.
/// * Windows: [`std::time::Instant`], which counts sleep and hibernation.
/// * macOS and iOS: [`std::time::Instant`], which does not count sleep: a lease lasts longer by the
///   time asleep.
/// * Elsewhere: [`std::time::Instant`]; whether suspend counts is up to the system.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct SystemClock;

impl SystemClock {
    /// The one there is; all values of this type tell the same time.
    pub const fn new() -> Self {
        SystemClock
    }
}

impl Clock for SystemClock {
    fn now(&self) -> u64 {
        since_start().max(FIRST)
    }
}

/// The clock of a store. The usual one is called directly: `is_live` is little more than this call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Time(Option<Arc<dyn Clock>>);

impl Time {
    pub fn of(clock: impl Clock) -> Self {
        Time(Some(Arc::new(clock)))
    }

    #[inline]
    pub fn now(&self) -> u64 {
        match &self.0 {
            None => SystemClock.now(),
            Some(clock) => clock.now(),
        }
    }

    /// See [`Clock::watch`].
    pub fn watch(&self, changed: Box<dyn Fn() -> bool + Send + Sync>) {
        match &self.0 {
            None => SystemClock.watch(changed),
            Some(clock) => clock.watch(changed),
        }
    }
}

// A schedule decides about time as well.
#[cfg(all(test, shuttle))]
use crate::sync::time::tick as since_start;

#[cfg(all(target_os = "linux", not(all(test, shuttle))))]
#[allow(unsafe_code)]
fn since_start() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live, exclusively borrowed timespec, which is all that the call
    // writes to.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    assert_eq!(answer, 0, "CLOCK_BOOTTIME exists since Linux 2.6.39");
    // Both parts are non-negative: the kernel refuses a time namespace that starts below zero.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(not(any(target_os = "linux", all(test, shuttle))))]
#[expect(clippy::disallowed_methods, reason = "this module is where time comes from")]
fn since_start() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;

    // One start for the process, so that instants of all values of `SystemClock` compare.
    static START: OnceLock<Instant> = OnceLock::new();
    FIRST + START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// A clock that moves only when told to, for tests. Clones are handles on the same clock.
///
/// ```
/// # #[cfg(feature = "testkit")] {
/// use std::time::Duration;
/// use tidewall::{Clock, ManualClock};
///
/// let clock = ManualClock::new();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(3));
/// assert_eq!(clock.now() - before, 3_000_000_000);
/// # }
/// ```
#[cfg(any(test, feature = "testkit", fuzzing))]
#[derive(Clone)]
pub struct ManualClock(Arc<Hand>);

#[cfg(any(test, feature = "testkit", fuzzing))]
struct Hand {
    now: AtomicU64,
    watchers: Mutex<Vec<Box<dyn Fn() -> bool + Send + Sync>>>,
}

#[cfg(any(test, feature = "testkit", fuzzing))]
impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.now()).finish()
    }
}

#[cfg(any(test, feature = "testkit", fuzzing))]
impl ManualClock {
    /// A clock that stands at one second.
    pub fn new() -> Self {
        ManualClock(Arc::new(Hand { now: AtomicU64::new(1_000_000_000), watchers: Mutex::new(Vec::new()) }))
    }

    /// Moves the clock forwards; it stops at the largest instant.
    pub fn advance(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: the clock is one word, and orders nothing but itself.
        self.0.now.update(Ordering::Relaxed, Ordering::Relaxed, |now| now.saturating_add(by));
        self.tell();
    }

    /// Puts the clock at an instant, also an earlier one: a clock that breaks its promise, to show
    /// that safety does not rest on it. Instants below 16 become 16.
    pub fn set(&self, nanos: u64) {
        self.0.now.store(nanos.max(FIRST), Ordering::Relaxed);
        self.tell();
    }

    fn tell(&self) {
        self.0.watchers.lock().retain(|changed| changed());
    }
}

#[cfg(any(test, feature = "testkit", fuzzing))]
impl Default for ManualClock {
    fn default() -> Self {
        ManualClock::new()
    }
}

#[cfg(any(test, feature = "testkit", fuzzing))]
impl Clock for ManualClock {
    fn now(&self) -> u64 {
        self.0.now.load(Ordering::Relaxed)
    }

    fn watch(&self, changed: Box<dyn Fn() -> bool + Send + Sync>) {
        self.0.watchers.lock().push(changed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_clock_never_goes_back_nor_answers_a_sentinel() {
        let mut last = SystemClock.now();
        assert!(last >= FIRST);
        for _ in 0..10_000 {
            let now = SystemClock.now();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn system_clock_moves() {
        let start = SystemClock.now();
        assert!((0..10_000_000).any(|_| SystemClock.now() > start));
    }

    #[test]
    fn a_store_asks_the_clock_it_was_given_and_else_the_systems() {
        let clock = ManualClock::new();
        let given = Time::of(clock.clone());
        clock.set(77);
        assert_eq!(given.now(), 77);
        let before = SystemClock.now();
        let usual = Time::default().now();
        assert!(before <= usual && usual <= SystemClock.now());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn system_clock_counts_from_boot_with_suspend() {
        // The first number of /proc/uptime is read off the same clock, in hundredths of a second.
        let uptime = || {
            let text = std::fs::read_to_string("/proc/uptime").unwrap();
            text.split(' ').next().unwrap().parse::<f64>().unwrap()
        };
        let (before, now, after) = (uptime(), SystemClock.now() as f64 / 1e9, uptime());
        assert!(before - 0.02 <= now, "{before} {now}");
        assert!(now <= after + 0.02, "{now} {after}");
    }

    #[test]
    fn manual_clock_moves_only_when_told_and_for_every_handle() {
        let clock = ManualClock::new();
        let other = clock.clone();
        let before = clock.now();
        assert_eq!(clock.now(), before);
        other.advance(Duration::from_millis(5));
        assert_eq!(clock.now(), before + 5_000_000);
    }

    #[test]
    fn manual_clock_may_be_set_back_but_never_to_a_sentinel() {
        let clock = ManualClock::new();
        clock.set(20);
        assert_eq!(clock.now(), 20);
        clock.set(0);
        assert_eq!(clock.now(), FIRST);
        clock.advance(Duration::MAX);
        assert_eq!(clock.now(), u64::MAX);
    }
}
