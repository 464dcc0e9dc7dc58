//! Keys, values, and threads that do one thing for a while.

use crate::machine::{Counters, Weather};
use crate::results::Row;
use fastrand::Rng;
use hdrhistogram::Histogram;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const KEY_BYTES: usize = 16;
pub const VALUE_BYTES: usize = 100;
/// Neighbours in the order of the keys that share a prefix.
pub const PREFIX_KEYS: u64 = 100;

/// The key of a number below 10¹¹. Its first eleven bytes are a prefix that it shares with 99 others.
pub fn key(number: u64) -> [u8; KEY_BYTES] {
    let mut key = *b"t000000000/00000";
    let (mut group, mut member) = (number / PREFIX_KEYS, number % PREFIX_KEYS);
    for place in (1..10).rev() {
        key[place] = b'0' + (group % 10) as u8;
        group /= 10;
    }
    for place in (11..16).rev() {
        key[place] = b'0' + (member % 10) as u8;
        member /= 10;
    }
    key
}

/// The prefix of the keys from `100 * group` on.
pub fn prefix(group: u64) -> [u8; 11] {
    *key(group * PREFIX_KEYS).first_chunk().expect("a key is longer")
}

pub fn value(random: &mut Rng) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    random.fill(&mut value);
    value
}

/// Of nanoseconds, within one per cent.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000_000, 2).expect("the bounds are in order")
}

pub fn nanoseconds(start: Instant) -> u64 {
    start.elapsed().as_nanos() as u64
}

/// Which of the two kinds of operation of a workload it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    First,
    Second,
}

/// What was counted while the clock ran.
pub struct Measured {
    pub count: [u64; 2],
    pub time: [Histogram<u64>; 2],
    pub seconds: f64,
    pub used: Counters,
}

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// How long, and how many of the operations are timed.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    pub threads: usize,
    pub warm_up: Duration,
    pub time: Duration,
    /// Every how many-th operation is timed.
    pub sample: u64,
    /// Where the data lie.
    pub dir: &'a Path,
}

/// Calls `once` on every thread, over and over.
pub fn repeat(plan: Plan<'_>, once: impl Fn(&mut Rng) -> Class + Sync) -> Measured {
    let phase = AtomicU8::new(WARM_UP);
    let barrier = Barrier::new(plan.threads + 1);
    let work = |thread: usize| {
        let mut random = Rng::with_seed(1000 + thread as u64);
        let mut time = [histogram(), histogram()];
        let mut count = [0; 2];
        barrier.wait();
        for turn in 0.. {
            let start = (turn % plan.sample == 0).then(Instant::now);
            let class = once(&mut random) as usize;
            let took = start.map(nanoseconds);
            match phase.load(Ordering::Relaxed) {
                MEASURE => {
                    count[class] += 1;
                    if let Some(took) = took {
                        time[class].saturating_record(took);
                    }
                }
                STOP => break,
                _ => {}
            }
        }
        (count, time)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads)
            .map(|thread| {
                let builder = std::thread::Builder::new().stack_size(1 << 20);
                builder.spawn_scoped(scope, move_ref(&work, thread)).expect("a thread starts")
            })
            .collect();
        barrier.wait();
        let (seconds, used) = watch(&plan, &phase);
        let mut measured = Measured { count: [0; 2], time: [histogram(), histogram()], seconds, used };
        for thread in threads {
            let (count, time) = thread.join().expect("the engine does not panic");
            for class in 0..2 {
                measured.count[class] += count[class];
                measured.time[class].add(&time[class]).expect("the same bounds");
            }
        }
        measured
    })
}

fn move_ref<T>(work: &(impl Fn(usize) -> T + Sync), thread: usize) -> impl FnOnce() -> T + Send + '_ {
    move || work(thread)
}

fn watch(plan: &Plan<'_>, phase: &AtomicU8) -> (f64, Counters) {
    std::thread::sleep(plan.warm_up);
    let before = Counters::now(plan.dir);
    let start = Instant::now();
    phase.store(MEASURE, Ordering::Relaxed);
    std::thread::sleep(plan.time);
    phase.store(STOP, Ordering::Relaxed);
    (start.elapsed().as_secs_f64(), Counters::now(plan.dir).since(&before))
}

/// What a pipeline is told: whether to go on, and when something is durable.
pub struct Stream<'a> {
    phase: &'a AtomicU8,
    done: &'a AtomicU64,
}

impl Stream<'_> {
    pub fn goes_on(&self) -> bool {
        self.phase.load(Ordering::Relaxed) != STOP
    }

    pub fn count_one(&self) {
        if self.phase.load(Ordering::Relaxed) == MEASURE {
            // The thread's own line: no other writes it.
            self.done.store(self.done.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }
}

/// Calls `run` once on every thread, which runs until its stream ends.
pub fn stream(plan: Plan<'_>, run: impl Fn(Stream<'_>, &mut Rng) + Sync) -> Measured {
    #[repr(align(128))]
    #[derive(Default)]
    struct Line(AtomicU64);

    let phase = AtomicU8::new(WARM_UP);
    let done: Vec<Line> = std::iter::repeat_with(Line::default).take(plan.threads).collect();
    std::thread::scope(|scope| {
        for (thread, done) in done.iter().enumerate() {
            let (run, phase) = (&run, &phase);
            scope.spawn(move || {
                run(Stream { phase, done: &done.0 }, &mut Rng::with_seed(1000 + thread as u64));
            });
        }
        let (seconds, used) = watch(&plan, &phase);
        let count = done.iter().map(|line| line.0.load(Ordering::Relaxed)).sum();
        Measured { count: [count, 0], time: [histogram(), histogram()], seconds, used }
    })
}

impl Measured {
    /// Writes what was measured into a row.
    pub fn note(&self, row: &mut Row, weather: &Weather) {
        let count = (self.count[0] + self.count[1]).max(1) as f64;
        let used = &self.used;
        row.note("ops_per_s", count / self.seconds);
        if !self.time[0].is_empty() {
            row.note("p50_ns", self.time[0].value_at_quantile(0.5) as f64);
            row.note("p99_ns", self.time[0].value_at_quantile(0.99) as f64);
            row.note("p999_ns", self.time[0].value_at_quantile(0.999) as f64);
            row.note("max_ns", self.time[0].max() as f64);
        }
        row.note("device_bytes_per_op", used.device_bytes as f64 / count);
        row.note("device_writes_per_op", used.device_writes as f64 / count);
        row.note("flushes_per_op", used.device_flushes as f64 / count);
        row.note("device_mb_per_s", used.device_bytes as f64 / self.seconds / 1e6);
        row.note("process_bytes_per_op", used.process_bytes as f64 / count);
        row.note("cpu_us_per_op", used.cpu_us as f64 / count);
        row.note("cores", used.cpu_us as f64 / 1e6 / self.seconds);
        row.note("switches_per_op", used.switches as f64 / count);
        row.note("others_cores", used.others_us as f64 / 1e6 / self.seconds);
        row.note("hop_ns", weather.hop_ns);
        row.note("wake_us", weather.wake_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_starts_with_the_prefix_of_its_group() {
        assert_eq!(&key(98_765_432_156), b"t987654321/00056");
        assert_eq!(&key(123_456), b"t000001234/00056");
        assert_eq!(&prefix(1234), b"t000001234/");
        assert!(key(123_456).starts_with(&prefix(1234)));
    }
}
