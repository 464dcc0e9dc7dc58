//! Random bits: the only place they come from.

use crate::error::{Error, Result};
#[cfg(any(test, feature = "testkit", fuzzing))]
use crate::sync::{Arc, AtomicU64, Ordering};
use std::cell::RefCell;
use std::io;

/// Where a store takes its random bits from.
#[derive(Clone, Debug, Default)]
pub(crate) enum Entropy {
    /// The operating system: no earlier life, store or owner had them.
    #[default]
    System,
    /// A sequence that a seed determines, for simulations.
    #[cfg(any(test, feature = "testkit", fuzzing))]
    Seeded(Arc<AtomicU64>),
}

impl Entropy {
    /// Whether it belongs to a simulation, in which everything happens in one thread.
    pub fn is_seeded(&self) -> bool {
        !matches!(self, Entropy::System)
    }

    #[cfg(any(test, feature = "testkit", fuzzing))]
    pub fn seeded(seed: u64) -> Self {
        Entropy::Seeded(Arc::new(AtomicU64::new(seed)))
    }

    #[expect(clippy::disallowed_methods, reason = "this module is where random bits come from")]
    pub fn u64(&self) -> Result<u64> {
        match self {
            Entropy::System => getrandom::u64().map_err(no_bits),
            #[cfg(any(test, feature = "testkit", fuzzing))]
            Entropy::Seeded(state) => Ok(split_mix(state.fetch_add(GOLDEN, Ordering::Relaxed))),
        }
    }

    pub fn u128(&self) -> Result<u128> {
        Ok((self.u64()? as u128) << 64 | self.u64()? as u128)
    }

    /// The same for names that need not be secret: each thread asks the system for many at a time, since
    /// asking costs about as much as appending a grant.
    pub fn name(&self) -> Result<u128> {
        match self {
            Entropy::System => NAMES.with(|names| names.borrow_mut().next()),
            #[cfg(any(test, feature = "testkit", fuzzing))]
            Entropy::Seeded(_) => self.u128(),
        }
    }
}

thread_local! {
    static NAMES: RefCell<Names> = const { RefCell::new(Names { bytes: [0; NAME_BYTES * 32], used: NAME_BYTES * 32 }) };
}

const NAME_BYTES: usize = 16;

/// Random bits that were drawn and not used yet.
struct Names {
    bytes: [u8; NAME_BYTES * 32],
    used: usize,
}

impl Names {
    #[expect(clippy::disallowed_methods, reason = "this module is where random bits come from")]
    fn next(&mut self) -> Result<u128> {
        if self.used == self.bytes.len() {
            getrandom::fill(&mut self.bytes).map_err(no_bits)?;
            self.used = 0;
        }
        let name =
            self.bytes[self.used..].first_chunk::<NAME_BYTES>().map_or(0, |name| u128::from_le_bytes(*name));
        self.used += NAME_BYTES;
        Ok(name)
    }
}

fn no_bits(error: getrandom::Error) -> Error {
    Error::io("asking the system for random bits", io::Error::other(error))
}

#[cfg(any(test, feature = "testkit", fuzzing))]
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[cfg(any(test, feature = "testkit", fuzzing))]
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
    fn no_name_is_drawn_twice_in_any_thread() {
        let draw = || (0..200).map(|_| Entropy::System.name().unwrap()).collect::<Vec<_>>();
        let mut names = draw();
        names.extend(std::thread::scope(|scope| scope.spawn(draw).join().unwrap()));
        assert_eq!(names.into_iter().collect::<std::collections::HashSet<_>>().len(), 400);
    }

    #[test]
    fn one_seed_gives_one_sequence_without_repetition() {
        let (a, b) = (Entropy::seeded(7), Entropy::seeded(7));
        let drawn: Vec<_> = (0..1000).map(|_| a.u64().unwrap()).collect();
        assert!(drawn.iter().all(|&n| n == b.u64().unwrap()));
        assert_eq!(drawn.iter().collect::<std::collections::HashSet<_>>().len(), 1000);
    }
}
