//! Random bits: the only place they come from.

use crate::error::{Error, Result};
#[cfg(any(test, feature = "sim", fuzzing))]
use crate::sync::{Arc, AtomicU64, Ordering};
use std::io;

/// Where a store takes its random bits from.
#[derive(Clone, Debug, Default)]
pub(crate) enum Entropy {
    /// The operating system: no earlier life, store or owner had them.
    #[default]
    System,
    /// A sequence that a seed determines, for simulations.
    #[cfg(any(test, feature = "sim", fuzzing))]
    Seeded(Arc<AtomicU64>),
}

impl Entropy {
    /// Whether it belongs to a simulation, in which everything happens in one thread.
    pub fn is_seeded(&self) -> bool {
        !matches!(self, Entropy::System)
    }

    #[cfg(any(test, feature = "sim", fuzzing))]
    pub fn seeded(seed: u64) -> Self {
        Entropy::Seeded(Arc::new(AtomicU64::new(seed)))
    }

    #[expect(clippy::disallowed_methods, reason = "this module is where random bits come from")]
    pub fn u64(&self) -> Result<u64> {
        match self {
            Entropy::System => getrandom::u64()
                .map_err(|e| Error::io("asking the system for random bits", io::Error::other(e))),
            #[cfg(any(test, feature = "sim", fuzzing))]
            Entropy::Seeded(state) => Ok(split_mix(state.fetch_add(GOLDEN, Ordering::Relaxed))),
        }
    }

    pub fn u128(&self) -> Result<u128> {
        Ok((self.u64()? as u128) << 64 | self.u64()? as u128)
    }
}

#[cfg(any(test, feature = "sim", fuzzing))]
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[cfg(any(test, feature = "sim", fuzzing))]
fn split_mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_gives_one_sequence_without_repetition() {
        let (a, b) = (Entropy::seeded(7), Entropy::seeded(7));
        let drawn: Vec<_> = (0..1000).map(|_| a.u64().unwrap()).collect();
        assert!(drawn.iter().all(|&n| n == b.u64().unwrap()));
        assert_eq!(drawn.iter().collect::<std::collections::HashSet<_>>().len(), 1000);
    }
}
