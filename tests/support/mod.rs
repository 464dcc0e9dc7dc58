//! What the simulations share: a model of the store in plain maps, and the driver that asks the store
//! and the model the same things.
//!
//! The lsn is the witness: a write is compared with the model at its own lsn, a refusal or a read with
//! the model at some lsn that was durable when the answer was given. After a crash the whole store is
//! compared with the model at the lsn that was recovered, which must not be below any that was seen.
//!
//! Read first: `model.rs`, what the store promises in two hundred lines.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod driver;
pub mod judge;
pub mod model;
pub mod shown;

/// SplitMix64: small, seeded, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

/// Says what was being tried when an assertion fails anywhere below.
pub struct Trying<F: Fn() -> String>(pub F);

impl<F: Fn() -> String> Drop for Trying<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to reproduce: {}", (self.0)());
        }
    }
}
