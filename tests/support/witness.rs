//! Durable linearizability, decided by a witness: the lsn.
//!
//! A history is what some threads asked one fence at a time, when, and what they were told; at its end the power
//! went, and everything was read back. It is good when all answers can be put into one order that respects time,
//! in which each follows from those before it, and what came back is a prefix of that order that holds every
//! answer given. To find such an order is hard in general; here the store names it: writes are ordered by their
//! lsns, and whatever changes nothing stands behind the lowest lsn that explains it (FAULTS: the lsn witness).
//!
//! [`search`] decides the same by trying every order: for small histories, to see that the witness is right.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};

/// What was asked. Every token of a history is another, and so is every value: it is the token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// A value under a token.
    Put {
        key: u8,
        token: u64,
    },
    /// The same, if the key has no value.
    PutIfAbsent {
        key: u8,
        token: u64,
    },
    Get {
        key: u8,
    },
    Mark {
        key: u8,
    },
    /// A grant, whose token is the store's choice.
    Acquire {
        key: u8,
    },
}

/// What was answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    Done {
        lsn: u64,
    },
    Granted {
        token: u64,
    },
    /// The token is below this mark.
    Fenced {
        mark: u64,
    },
    /// The key has a value, of this lsn.
    Conflict {
        lsn: u64,
    },
    Value(Option<Valued>),
    Mark(u64),
    /// Perhaps it is done, perhaps not.
    Unknown,
    /// It is not done, for a reason that says nothing about the state.
    Not,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Valued {
    pub token: u64,
    pub lsn: u64,
}

/// One call: when it began and ended, in steps of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    pub began: u64,
    pub ended: u64,
    pub ask: Ask,
    pub told: Told,
}

#[derive(Clone, Debug, Default)]
pub struct History {
    pub events: Vec<Event>,
    /// The newest lsn when it began.
    pub base: u64,
    /// Value and mark of each key, and the newest lsn, as they came back.
    pub came_back: BTreeMap<u8, (Option<Valued>, u64)>,
    pub last_lsn: u64,
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Key {
    value: Option<Valued>,
    mark: u64,
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct State {
    keys: BTreeMap<u8, Key>,
    /// The token granted last: the next one is one more.
    counter: u64,
}

impl Ask {
    fn key(&self) -> u8 {
        match *self {
            Ask::Put { key, .. }
            | Ask::PutIfAbsent { key, .. }
            | Ask::Get { key }
            | Ask::Mark { key }
            | Ask::Acquire { key } => key,
        }
    }

    fn changes(&self) -> bool {
        !matches!(self, Ask::Get { .. } | Ask::Mark { .. })
    }
}

/// Does it at `lsn`, if that is what happens in this state.
fn change(state: &mut State, event: &Event, lsn: u64) -> bool {
    let next = state.counter + 1;
    let key = state.keys.entry(event.ask.key()).or_default();
    match event.ask {
        Ask::Put { token, .. } if token >= key.mark => {
            (key.value, key.mark) = (Some(Valued { token, lsn }), token);
            true
        }
        Ask::PutIfAbsent { token, .. } if token >= key.mark && key.value.is_none() => {
            (key.value, key.mark) = (Some(Valued { token, lsn }), token);
            true
        }
        Ask::Acquire { .. } if is_open(event) || event.told == (Told::Granted { token: next }) => {
            (state.counter, key.mark) = (next, next);
            true
        }
        _ => false,
    }
}

/// Whether an answer that changes nothing is the one of this state.
fn explains(state: &State, event: &Event) -> bool {
    let key = state.keys.get(&event.ask.key()).cloned().unwrap_or_default();
    match (event.ask, event.told) {
        (Ask::Put { token, .. } | Ask::PutIfAbsent { token, .. }, Told::Fenced { mark }) => {
            token < key.mark && mark == key.mark
        }
        (Ask::PutIfAbsent { token, .. }, Told::Conflict { lsn }) => {
            token >= key.mark && key.value.is_some_and(|value| value.lsn == lsn)
        }
        (Ask::Get { .. }, Told::Value(value)) => value == key.value,
        (Ask::Mark { .. }, Told::Mark(mark)) => mark == key.mark,
        _ => false,
    }
}

fn is_open(event: &Event) -> bool {
    event.told == Told::Unknown
}

/// The lsn of a grant is not told: it is that of the write the history gives it.
fn is_done(event: &Event) -> bool {
    matches!(event.told, Told::Done { .. } | Told::Granted { .. })
}

/// Checks a history by its lsns; says what is wrong with it.
pub fn check(history: &History) -> Result<(), String> {
    let told: BTreeMap<u64, usize> = history
        .events
        .iter()
        .enumerate()
        .filter_map(|(at, event)| match event.told {
            Told::Done { lsn } => Some((lsn, at)),
            _ => None,
        })
        .collect();
    let done = history.events.iter().filter(|event| matches!(event.told, Told::Done { .. })).count();
    if told.len() < done {
        return Err("two writes have one lsn".into());
    }
    // Who has no lsn of his own gets one that nobody has: there are few of both.
    let open: Vec<usize> = (0..history.events.len())
        .filter(|&at| {
            let event = &history.events[at];
            event.ask.changes() && (is_open(event) || matches!(event.told, Told::Granted { .. }))
        })
        .collect();
    let free: Vec<u64> =
        (history.base + 1..=history.last_lsn).filter(|lsn| !told.contains_key(lsn)).collect();
    let mut why = String::from("no order was tried");
    if place(history, &open, &free, told, &mut why) { Ok(()) } else { Err(why) }
}

/// Gives those without an lsn one that is free, in every way, until one holds.
fn place(
    history: &History,
    open: &[usize],
    free: &[u64],
    order: BTreeMap<u64, usize>,
    why: &mut String,
) -> bool {
    let Some((&first, rest)) = open.split_first() else {
        return match check_order(history, &order) {
            Ok(()) => true,
            Err(wrong) => {
                *why = wrong;
                false
            }
        };
    };
    let event = &history.events[first];
    for (at, &lsn) in free.iter().enumerate() {
        if !fits(history, &order, event, lsn) {
            continue;
        }
        let left: Vec<u64> =
            free.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, &lsn)| lsn).collect();
        let mut order = order.clone();
        order.insert(lsn, first);
        if place(history, rest, &left, order, why) {
            return true;
        }
    }
    // Or it never happened, if nobody was told that it did.
    is_open(event) && place(history, rest, free, order, why)
}

/// Whether time and tokens allow this place.
fn fits(history: &History, order: &BTreeMap<u64, usize>, event: &Event, lsn: u64) -> bool {
    order.iter().all(|(&other, &at)| {
        let at = &history.events[at];
        (at.ended >= event.began || other < lsn) && (event.ended >= at.began || lsn < other)
    })
}

/// Checks one order of the writes: by lsn, and with everything else behind the lowest lsn that explains it.
fn check_order(history: &History, order: &BTreeMap<u64, usize>) -> Result<(), String> {
    let mut states: BTreeMap<u64, State> = BTreeMap::from([(history.base, State::default())]);
    let mut state = State::default();
    for (&lsn, &at) in order {
        let event = &history.events[at];
        if lsn > history.last_lsn && !is_open(event) {
            return Err(format!("{event:?} was answered and is lost: {} came back", history.last_lsn));
        }
        if !change(&mut state, event, lsn) {
            return Err(format!("{event:?} cannot happen at lsn {lsn} in {state:?}"));
        }
        states.insert(lsn, state.clone());
    }
    for (key, came) in &history.came_back {
        let known = state.keys.get(key).cloned().unwrap_or_default();
        if (known.value, known.mark) != *came {
            return Err(format!("key {key} came back as {came:?}, it was {known:?}"));
        }
    }
    let lsn_of: BTreeMap<usize, u64> = order.iter().map(|(&lsn, &at)| (at, lsn)).collect();
    // In the order in which they began, each behind all that had ended before it began.
    let mut by_time: Vec<usize> = (0..history.events.len()).collect();
    by_time.sort_by_key(|&at| history.events[at].began);
    let mut placed: Vec<(u64, u64)> = Vec::new();
    for at in by_time {
        let event = &history.events[at];
        let behind = placed.iter().filter(|(ended, _)| *ended < event.began).map(|(_, lsn)| *lsn).max();
        let behind = behind.unwrap_or(history.base);
        let place = match lsn_of.get(&at) {
            Some(&lsn) if lsn > behind => lsn,
            Some(&lsn) => {
                return Err(format!("{event:?} at lsn {lsn}, although {behind} was seen before it"));
            }
            None if is_open(event) || event.told == Told::Not => continue,
            None => {
                let ahead = lsn_of.iter().filter(|(other, _)| history.events[**other].began > event.ended);
                let ahead = ahead.map(|(_, lsn)| *lsn).min().unwrap_or(u64::MAX);
                let from = states.range(..=behind).next_back().map_or(history.base, |(lsn, _)| *lsn);
                let explained = states.range(from..ahead).find(|(_, state)| explains(state, event));
                let Some((&lsn, _)) = explained else {
                    return Err(format!("{event:?} is explained by no state from lsn {behind} to {ahead}"));
                };
                lsn.max(behind)
            }
        };
        placed.push((event.ended, place));
    }
    Ok(())
}

/// Whether some order of all events is right, found by trying every one.
pub fn search(history: &History) -> bool {
    let all: BTreeSet<usize> =
        (0..history.events.len()).filter(|&at| history.events[at].told != Told::Not).collect();
    step(history, &all, &State::default(), history.base)
}

fn step(history: &History, left: &BTreeSet<usize>, state: &State, lsn: u64) -> bool {
    let is_over = left.iter().all(|&at| is_open(&history.events[at]));
    let is_back = || {
        let known = |key| state.keys.get(key).cloned().unwrap_or_default();
        history.came_back.iter().all(|(key, came)| (known(key).value, known(key).mark) == *came)
    };
    if is_over && is_back() {
        return true;
    }
    let first_end = left.iter().map(|&at| history.events[at]).filter(|event| !is_open(event));
    let first_end = first_end.map(|event| event.ended).min().unwrap_or(u64::MAX);
    left.iter().any(|&at| {
        let event = &history.events[at];
        if event.began > first_end {
            return false;
        }
        let mut rest = left.clone();
        rest.remove(&at);
        if !is_done(event) && !is_open(event) {
            return explains(state, event) && step(history, &rest, state, lsn);
        }
        // Its own lsn, or any of the free ones behind the last.
        let told: BTreeSet<u64> = history
            .events
            .iter()
            .filter_map(|event| match event.told {
                Told::Done { lsn } => Some(lsn),
                _ => None,
            })
            .collect();
        let lsns: Vec<u64> = match event.told {
            Told::Done { lsn } => vec![lsn],
            _ => (lsn + 1..=history.last_lsn).filter(|lsn| !told.contains(lsn)).collect(),
        };
        event.ask.changes()
            && lsns.into_iter().filter(|&own| own > lsn && own <= history.last_lsn).any(|own| {
                let mut next = state.clone();
                change(&mut next, event, own) && step(history, &rest, &next, own)
            })
    })
}
