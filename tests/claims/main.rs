//! The numbered invariants of the design, each by name, through the public API.
//!
//! | | claimed in |
//! |---|---|
//! | F1–F4 fences, tokens, operation numbers, batches | `fences.rs` |
//! | which raise fences whom | `raises.rs` |
//! | L1–L5 leases | `leases.rs` |
//! | D1–D5 durability, R1–R4 recovery | `durable.rs` |
//! | S1, S2 snapshots and iterators | `snapshots.rs` |
//! | F2, L1, L2, D1, S1 under threads | `threads.rs` |
//!
//! Elsewhere: C1–C4 and folded marks in `tests/compact`, copies in `tests/checkpoint.rs`, waiters and slots in
//! `tests/lease_passing.rs` and `tests/lease_slots.rs`.

#[path = "../store/mod.rs"]
#[macro_use]
mod store;

mod durable;
mod fences;
#[path = "../support/gate.rs"]
mod gate;
mod leases;
mod raises;
mod snapshots;
mod threads;
#[path = "../support/watched.rs"]
mod watched;
