//! The protocol holds within the small bounds, and every seeded mistake is found.

use tidewall_model::actions::Action;
use tidewall_model::mistakes::{Mistake, SEEDED};
use tidewall_model::rules::Model;
use tidewall_model::search::{Counterexample, Found, search};
use tidewall_model::searches::SEARCHES;

const LIMIT: usize = 20_000_000;

fn say(name: &str, found: &Found) {
    println!("{name}: {} states in {:.2} s", found.states, found.time.as_secs_f64());
}

/// And no part of it is left out: each kind of action has led somewhere in one search or another.
#[test]
fn the_protocol_holds() {
    let mut taken = [0; Action::NAMES.len()];
    for part in &SEARCHES {
        let model = part.model(part.small);
        let found = search(&model, LIMIT);
        say(part.name, &found);
        let story = found.counterexample.as_ref().map(|wrong| wrong.story(&model));
        assert_eq!(story, None, "{}:\n{}", part.name, story.as_deref().unwrap_or_default());
        assert!(found.complete, "{}: {} states are beyond the limit", part.name, found.states);
        taken.iter_mut().zip(found.taken).for_each(|(sum, more)| *sum += more);
    }
    let unused: Vec<_> = Action::NAMES.iter().zip(taken).filter(|(_, times)| *times == 0).collect();
    assert_eq!(unused, [(&"renew", 0)], "only a mistake leaves something to renew");
}

#[test]
fn every_seeded_mistake_is_found() {
    for (number, seeded) in SEEDED.iter().enumerate() {
        // The compiler knows no list of all mistakes; their order is the one of their declaration.
        assert_eq!(seeded.mistake as usize, number, "each mistake is seeded once");
        let found = search(&seeded.model(), LIMIT);
        say(&format!("{:?}", seeded.mistake), &found);
        let wrong = found.counterexample.unwrap_or_else(|| panic!("{:?} is not found", seeded.mistake));
        assert_eq!(wrong.violation, seeded.violation, "{}", wrong.story(&seeded.model()));
        walk(&seeded.model(), &wrong);
    }
    assert_eq!(Mistake::SlotsAboveNAreNotCounted as usize + 1, SEEDED.len(), "none is left out");
}

/// A counterexample is a way that can be gone, step by step, up to the last one.
fn walk(model: &Model, wrong: &Counterexample) {
    for pair in wrong.steps.windows(2) {
        let [(before, action), (after, _)] = pair else { unreachable!("two of them") };
        let taken = model.take(before, *action).expect("no violation yet").expect("it can happen").state;
        assert!(taken == *after || taken.swapped() == *after, "{:?}: {action:?}", model.mistake);
    }
    let (last, action) = wrong.steps.last().expect("a step");
    assert_eq!(model.take(last, *action).err(), Some(wrong.violation));
}
