//! The protocol of tidewall, searched exhaustively within bounds.
//!
//! A small model of what the engine does with marks, floors, grants, releases, operation numbers, folding,
//! compaction, crashes, checkpoints and restores. A breadth-first search visits every state it can get into
//! and finds that no late write is accepted, no token handed out twice, no mark or version that was seen goes
//! back; and that each of forty-two mistakes in the rules leads to such a state.
//!
//! What it leaves out: bytes, threads, the index, conditions, batches of several fences. They have tests of
//! their own. `tests/engine.rs` holds the engine to the model: the same actions through both.
//!
//! ```
//! use tidewall_model::mistakes::{LATE_WRITE, Mistake};
//! use tidewall_model::rules::{Bounds, Model, NOTHING, ONE_FENCE};
//! use tidewall_model::search::search;
//!
//! let bounds = Bounds { grants: 2, appends: 4, late_writes_only: true, ..NOTHING };
//! let right = Model { layout: ONE_FENCE, bounds, mistake: None };
//! assert!(search(&right, 1_000_000).complete);
//!
//! let wrong = Model { mistake: Some(Mistake::GrantRaisesNoMark), ..right };
//! let found = search(&wrong, 1_000_000).counterexample.expect("a late write");
//! assert_eq!(found.violation, LATE_WRITE);
//! println!("{}", found.story(&wrong));
//! ```

// The order to read in.
pub mod state;
pub mod rules;
pub mod actions;
mod leases;
mod writes;
mod compaction;
mod disk;
mod observer;
pub mod search;
pub mod searches;
pub mod mistakes;
pub mod trace;
