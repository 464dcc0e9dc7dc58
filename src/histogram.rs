//! How long, how many: numbers counted in buckets, so that percentiles can be read at any time.
//!
//! One job: record without a lock, and summarise. A bucket is an eighth of a power of two wide, so what a
//! percentile says is at most an eighth above what was recorded. Recording is three relaxed additions to
//! words that nothing else waits for.

use crate::sync::{AtomicU64, Ordering};
use std::fmt;

/// Each power of two is divided into so many buckets, as a power of two.
const FINE_BITS: u32 = 3;
const FINE: u64 = 1 << FINE_BITS;
const BUCKETS: usize = ((u64::BITS - FINE_BITS + 1) << FINE_BITS) as usize;

/// Counts of numbers of any size; 4 KiB.
pub(crate) struct Histogram {
    buckets: Box<[AtomicU64]>,
    sum: AtomicU64,
    max: AtomicU64,
}

/// What a histogram says, since the store was opened. All zero before anything was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// How many were recorded.
    pub count: u64,
    /// The sum of all.
    pub sum: u64,
    /// Half of them were at or below this; as every percentile, it is up to an eighth too high.
    pub p50: u64,
    /// Nine of ten were at or below this.
    pub p90: u64,
    /// 99 of 100 were at or below this.
    pub p99: u64,
    /// 999 of 1 000 were at or below this.
    pub p999: u64,
    /// The largest, exactly.
    pub max: u64,
}

impl Summary {
    /// The sum divided by the count; 0 before anything was recorded.
    pub fn mean(&self) -> u64 {
        self.sum.checked_div(self.count).unwrap_or(0)
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    /// Counts a number.
    pub fn record(&self, number: u64) {
        if let Some(bucket) = self.buckets.get(bucket_of(number)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.sum.fetch_add(number, Ordering::Relaxed);
        self.max.fetch_max(number, Ordering::Relaxed);
    }

    /// What was recorded so far. Whoever records meanwhile may be in one part of it and not in another.
    pub fn summary(&self) -> Summary {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        let count = counts.iter().sum();
        let max = self.max.load(Ordering::Relaxed);
        let at = |per_mille: u64| {
            let rank = (u128::from(count) * u128::from(per_mille)).div_ceil(1000) as u64;
            let mut seen = 0;
            let found = counts.iter().position(|&in_bucket| {
                seen += in_bucket;
                seen >= rank && in_bucket > 0
            });
            found.map_or(0, |bucket| last_of(bucket).min(max))
        };
        let sum = self.sum.load(Ordering::Relaxed);
        Summary { count, sum, p50: at(500), p90: at(900), p99: at(990), p999: at(999), max }
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.summary().fmt(f)
    }
}

fn bucket_of(number: u64) -> usize {
    if number < FINE {
        return number as usize;
    }
    let coarse = number.ilog2() - FINE_BITS;
    let fine = (number >> coarse) & (FINE - 1);
    ((coarse as usize + 1) << FINE_BITS) + fine as usize
}

/// The largest number that falls into a bucket.
fn last_of(bucket: usize) -> u64 {
    let (coarse, fine) = ((bucket >> FINE_BITS) as u32, bucket as u64 & (FINE - 1));
    match coarse.checked_sub(1) {
        None => fine,
        Some(coarse) => ((FINE + fine) << coarse) + ((1 << coarse) - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_falls_into_one_bucket_that_is_an_eighth_wide() {
        let mut numbers: Vec<u64> = (0..2000).collect();
        for bits in 0..64 {
            numbers.extend([(1u64 << bits) - 1, 1 << bits, (1u64 << bits).saturating_add(1)]);
        }
        numbers.push(u64::MAX);
        for number in numbers {
            let bucket = bucket_of(number);
            assert!(bucket < BUCKETS, "{number}");
            let last = last_of(bucket);
            assert!(last >= number && last - number <= number / FINE, "{number} is said to be {last}");
            assert!(bucket == 0 || last_of(bucket - 1) < number, "{number}");
        }
    }

    #[test]
    fn percentiles_are_those_of_what_was_recorded() {
        let histogram = Histogram::default();
        assert_eq!(histogram.summary(), Summary::default());
        for number in 1..=1000 {
            histogram.record(number);
        }
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.sum, summary.mean(), summary.max), (1000, 500_500, 500, 1000));
        for (said, exact) in [(summary.p50, 500), (summary.p90, 900), (summary.p99, 990), (summary.p999, 999)]
        {
            assert!(said >= exact && said <= exact + exact / FINE, "{said} for {exact}");
        }
        let one = Histogram::default();
        one.record(77);
        assert_eq!((one.summary().p50, one.summary().p999, one.summary().max), (77, 77, 77));
    }
}
