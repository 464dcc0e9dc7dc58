//! Breadth first, so that a counterexample is as short as it can be.
//!
//! A state is remembered as a hash of 64 bits, with that of the state it came from; the way to a violation is
//! found again by walking those. Two states of one hash would be taken for one: at ten million states the odds
//! are three in a million. It runs on two threads, and answers the same on one.

use crate::actions::Action;
use crate::mistakes::Violation;
use crate::rules::Model;
use crate::state::State;
use nohash_hasher::IntMap;
use std::collections::hash_map::Entry;
use std::thread;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// From the hash of a state to the hash of the one before it.
type Seen = IntMap<u64, u64>;

const THREADS: usize = 2;
/// States whose successors are kept at a time before doubles are struck out: this bounds the memory.
const AT_ONCE: usize = 200_000;

/// What a search has found.
#[derive(Debug)]
pub struct Found {
    pub states: usize,
    pub depth: usize,
    pub time: Duration,
    /// How often each kind of action has led on, by its number.
    pub taken: [u64; Action::NAMES.len()],
    /// Every state within the bounds was visited.
    pub complete: bool,
    pub counterexample: Option<Counterexample>,
}

/// The shortest way to a state that must never be.
#[derive(Debug)]
pub struct Counterexample {
    pub steps: Vec<(State, Action)>,
    pub violation: Violation,
}

fn hash(s: &State) -> u64 {
    rapidhash::v3::rapidhash_v3(s.as_bytes())
}

/// The state that stands for this one and its mirror image, and its hash.
fn canonical(model: &Model, s: State) -> (u64, State) {
    if model.is_symmetric() {
        let swapped = s.swapped();
        if swapped.as_bytes() < s.as_bytes() {
            return (hash(&swapped), swapped);
        }
    }
    (hash(&s), s)
}

fn shard(hash: u64) -> usize {
    hash as usize % THREADS
}

/// A state, its hash, and the hash of the one before.
type Fresh = (u64, u64, State);

/// What one thread makes of its part of the front.
#[derive(Default)]
struct Part {
    fresh: [Vec<Fresh>; THREADS],
    taken: [u64; Action::NAMES.len()],
    wrong: Option<(u64, State, Action, Violation)>,
}

fn expand(model: &Model, states: &[(u64, State)], seen: &[Seen]) -> Part {
    let mut part = Part::default();
    let mut actions = Vec::new();
    for (from, s) in states {
        model.actions(s, &mut actions);
        for &action in &actions {
            match model.take(s, action) {
                Ok(Some(taken)) if taken.state != *s => {
                    part.taken[action.number()] += 1;
                    let (hash, next) = canonical(model, taken.state);
                    if !seen[shard(hash)].contains_key(&hash) {
                        part.fresh[shard(hash)].push((hash, *from, next));
                    }
                }
                Ok(_) => {}
                Err(violation) => {
                    part.wrong = part.wrong.or(Some((*from, *s, action, violation)));
                }
            }
        }
    }
    part
}

/// Searches every state within the bounds, or `limit` of them.
pub fn search(model: &Model, limit: usize) -> Found {
    let start = Instant::now();
    let mut seen: [Seen; THREADS] = Default::default();
    let (first, state) = canonical(model, State::default());
    seen[shard(first)].insert(first, 0);
    let mut front = vec![(first, state)];
    let (mut depth, mut wrong) = (0, None);
    let mut taken = [0; Action::NAMES.len()];
    let count = |seen: &[Seen]| seen.iter().map(|part| part.len()).sum::<usize>();
    while !front.is_empty() && wrong.is_none() && count(&seen) < limit {
        depth += 1;
        let mut next = Vec::new();
        for block in front.chunks(AT_ONCE) {
            let parts: Vec<Part> = thread::scope(|scope| {
                let share = block.len().div_ceil(THREADS);
                let seen = &seen;
                let workers: Vec<_> = block
                    .chunks(share)
                    .map(|states| scope.spawn(move || expand(model, states, seen)))
                    .collect();
                workers.into_iter().map(|worker| worker.join().expect("a search does not panic")).collect()
            });
            for part in &parts {
                taken.iter_mut().zip(part.taken).for_each(|(sum, more)| *sum += more);
            }
            wrong = wrong.or_else(|| parts.iter().find_map(|part| part.wrong));
            let parts = &parts;
            let news: Vec<Vec<(u64, State)>> = thread::scope(|scope| {
                let workers: Vec<_> = seen
                    .iter_mut()
                    .enumerate()
                    .map(|(shard, seen)| scope.spawn(move || strike_out_doubles(parts, shard, seen)))
                    .collect();
                workers.into_iter().map(|worker| worker.join().expect("a table does not panic")).collect()
            });
            next.extend(news.into_iter().flatten());
            if wrong.is_some() {
                break;
            }
        }
        front = next;
    }
    let counterexample = wrong.map(|(hash, state, action, violation)| {
        let mut steps = way(model, &seen, hash);
        steps.push((state, action));
        Counterexample { steps, violation }
    });
    Found {
        states: count(&seen),
        depth,
        time: start.elapsed(),
        taken,
        complete: front.is_empty() && counterexample.is_none(),
        counterexample,
    }
}

fn strike_out_doubles(parts: &[Part], shard: usize, seen: &mut Seen) -> Vec<(u64, State)> {
    let mut fresh = Vec::new();
    for &(hash, from, state) in parts.iter().flat_map(|part| &part.fresh[shard]) {
        if let Entry::Vacant(place) = seen.entry(hash) {
            place.insert(from);
            fresh.push((hash, state));
        }
    }
    fresh
}

/// The steps from the first state to the one with this hash, found again by their hashes.
fn way(model: &Model, seen: &[Seen], last: u64) -> Vec<(State, Action)> {
    let mut hashes = vec![last];
    while let Some(&before) = seen[shard(hashes[hashes.len() - 1])].get(&hashes[hashes.len() - 1]) {
        hashes.push(before);
    }
    let mut steps = Vec::new();
    let (_, mut state) = canonical(model, State::default());
    let mut actions = Vec::new();
    // The first is 0, which stands for nothing, and the second the state all begin with.
    for &wanted in hashes.iter().rev().skip(2) {
        model.actions(&state, &mut actions);
        let step = actions.iter().find_map(|&action| {
            let taken = model.take(&state, action).ok()??;
            let (hash, next) = canonical(model, taken.state);
            (hash == wanted).then_some((action, next))
        });
        let (action, next) = step.expect("each state of the way came from the one before");
        steps.push((state, action));
        state = next;
    }
    steps
}
