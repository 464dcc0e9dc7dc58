//! The engine does what the model does: the same random actions through both, compaction and copies among them.
//!
//! `TIDEWALL_SEQUENCES` for more of them than the default, `TIDEWALL_SEED` for a single one.

mod driver;

use driver::{Counts, Difference, Driver};
use tidewall::Scope;
use tidewall_model::mistakes::Mistake;
use tidewall_model::rules::{
    Bounds, EXTERNAL, Layout, Model, NOTHING, ONE_FENCE, ONE_KEYSPACE, SLOTS, THREE_FENCES, TWO_KEYSPACES,
};

/// Twelve ops fit the log of the model; attempts that are refused take no place in it.
const ALL: Bounds = Bounds {
    grants: 8,
    appends: 12,
    crashes: 3,
    ops: 3,
    deletes: true,
    raises: 4,
    raise_alls: true,
    breaks: true,
    releases: true,
    grace: true,
    ..NOTHING
};
/// And what compaction and copies do; tokens that fit behind a restore.
const KEPT: Bounds = Bounds { folds: true, segments: 200, moves: 200, crashes: 6, ..ALL };
const COPIED: Bounds = Bounds { checkpoint: true, grants: 6, breaks: false, ..KEPT };
const STEPS: usize = 60;
const PREFIX: Scope = Scope::Prefix(b'/');

/// The fences of the model in each form that the engine has for them.
const SETTINGS: [(Layout, Scope, Bounds); 20] = [
    (ONE_KEYSPACE, Scope::Key, ALL),
    (ONE_KEYSPACE, PREFIX, ALL),
    (ONE_KEYSPACE, PREFIX, Bounds { grace: false, crashes: 8, ..ALL }),
    (ONE_FENCE, Scope::Keyspace, ALL),
    (TWO_KEYSPACES, Scope::Keyspace, ALL),
    (TWO_KEYSPACES, Scope::Key, ALL),
    (THREE_FENCES, PREFIX, ALL),
    (EXTERNAL, Scope::Key, Bounds { issues: 6, ..ALL }),
    (EXTERNAL, PREFIX, Bounds { issues: 6, ..ALL }),
    (SLOTS, PREFIX, ALL),
    (ONE_KEYSPACE, Scope::Key, KEPT),
    (ONE_KEYSPACE, PREFIX, KEPT),
    (ONE_KEYSPACE, PREFIX, Bounds { grace: false, ..KEPT }),
    (ONE_FENCE, Scope::Keyspace, KEPT),
    (THREE_FENCES, PREFIX, KEPT),
    (EXTERNAL, Scope::Key, Bounds { issues: 6, ..KEPT }),
    (SLOTS, PREFIX, KEPT),
    (ONE_KEYSPACE, Scope::Key, COPIED),
    (TWO_KEYSPACES, PREFIX, COPIED),
    (EXTERNAL, PREFIX, Bounds { issues: 6, ..COPIED }),
];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Runs one sequence; the seed decides its setting and everything else.
fn run(seed: u64, mistake: Option<Mistake>, counts: &mut Counts) -> Result<(), Difference> {
    let (layout, scope, bounds) = SETTINGS[seed as usize % SETTINGS.len()];
    let model = Model { layout, bounds, mistake };
    let ran = Driver::new(model, scope, seed, counts).run(STEPS);
    ran.map_err(|what| format!("TIDEWALL_SEED={seed}, {layout:?}, {scope:?}: {what}"))
}

#[test]
fn the_engine_does_what_the_model_does() {
    let mut counts = Counts::default();
    let seeds = match number("TIDEWALL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TIDEWALL_SEQUENCES").unwrap_or(3_000),
    };
    let is_whole = seeds.end - seeds.start >= 1_000;
    for seed in seeds {
        if let Err(what) = run(seed, None, &mut counts) {
            panic!("{what}");
        }
    }
    println!("actions: {:?}\nanswers: {:?}\ncrashes: {:?}", counts.actions, counts.answers, counts.crashes);
    if is_whole {
        // Of each kind there is enough for a difference to show.
        for (counts, kinds) in [(&counts.actions, 20), (&counts.answers, 13), (&counts.crashes, 3)] {
            assert_eq!(counts.values().filter(|times| **times >= 20).count(), kinds, "{counts:?}");
        }
    }
}

/// A model that is wrong comes apart from the engine: so would an engine that is.
#[test]
fn a_mistaken_model_comes_apart_from_the_engine() {
    for mistake in [
        Mistake::OwnMarkWinsOverFloor,
        Mistake::ExpiryRaisesTheMark,
        Mistake::CounterFromGrantsOnly,
        Mistake::OpForgottenByARaise,
        Mistake::SlotsShareTheMarkOfTheirKey,
        Mistake::RaisedFloorHidesFolding,
        Mistake::FoldingFloorAdmitsItsToken,
        Mistake::OneFloorForAllKeyspaces,
        Mistake::UnreleasedGrantBecomesAMark,
        Mistake::OpForgottenOnCompaction,
        Mistake::PredecessorForgottenOnCompaction,
        Mistake::RestoreWithoutFloors,
        Mistake::RestoreLeavesExternalTokensOpen,
    ] {
        let differences = (0..2000).filter_map(|seed| run(seed, Some(mistake), &mut Counts::default()).err());
        let mut between_the_two = differences.filter(|what| what.contains("the engine says"));
        assert!(between_the_two.next().is_some(), "{mistake:?} makes no difference");
    }
}
