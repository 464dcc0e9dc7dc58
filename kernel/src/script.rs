//! What the worker does, step by step, and what a store must hold after each.
//!
//! One step is in flight at a time. So a store that was cut off after `n` answers holds exactly what `n` steps made, or
//! `n + 1`, and the model of that is a few maps.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::Path;
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Lease, Options, Outcome, Scope, Token, Tokens};

/// One change, or a step of upkeep that changes nothing to be seen.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Put(u8, u16),
    Delete(u8),
    Batch([u8; 3]),
    Raise(u8),
    RaiseAll,
    Acquire(u8),
    PutJob(u8),
    Release,
    Compact,
    Reopen,
}

const ROWS: u8 = 12;
const JOBS: u8 = 4;

/// The steps that a seed stands for.
pub fn steps(seed: u64, count: usize) -> Vec<Step> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut steps = Vec::new();
    while steps.len() < count {
        let key = random.u8(0..ROWS);
        match random.u8(0..24) {
            0..9 => steps.push(Step::Put(key, random.u16(1..4000))),
            9..12 => steps.push(Step::Delete(key)),
            12..15 => steps.push(Step::Batch([key, random.u8(0..ROWS), random.u8(0..ROWS)])),
            15 => steps.push(Step::Raise(key)),
            16 => steps.push(Step::RaiseAll),
            17..21 => {
                let job = key % JOBS;
                steps.extend([Step::Acquire(job), Step::PutJob(job), Step::Release]);
            }
            21..23 => steps.push(Step::Compact),
            _ => steps.push(Step::Reopen),
        }
    }
    steps
}

fn row(key: u8) -> Vec<u8> {
    format!("row-{key}").into_bytes()
}

fn job(key: u8) -> Vec<u8> {
    format!("job-{key}/result").into_bytes()
}

fn fence(key: u8) -> Vec<u8> {
    format!("job-{key}/").into_bytes()
}

/// The token of the step at this place, in the keyspace of external tokens.
fn token_at(place: usize) -> Token {
    Token::new(place as u64 + 1).expect("small")
}

fn value_at(place: usize, len: u16) -> Vec<u8> {
    (0..len as usize).map(|n| (n * 7 + place) as u8).collect()
}

/// All that can be seen of a store: each key with its value and its mark.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct State(BTreeMap<Vec<u8>, (Option<Vec<u8>>, u64)>);

impl State {
    /// What the first `count` steps make.
    pub fn after(steps: &[Step], count: usize) -> State {
        let mut state = State::default();
        (0..ROWS).map(row).chain((0..JOBS).map(job)).for_each(|key| {
            state.0.insert(key, (None, 0));
        });
        let (mut floor, mut counter) = (0, 0);
        for (place, step) in steps.iter().enumerate().take(count) {
            let token = token_at(place).get();
            match *step {
                Step::Put(key, len) => state.set(row(key), Some(value_at(place, len)), token),
                Step::Delete(key) => state.set(row(key), None, token),
                Step::Batch(keys) => {
                    keys.iter().for_each(|&key| state.set(row(key), Some(value_at(place, 40)), token));
                }
                Step::Raise(key) => state.raise(row(key), token),
                Step::RaiseAll => floor = token,
                Step::Acquire(key) => {
                    counter += 1;
                    state.raise(job(key), counter);
                }
                Step::PutJob(key) => state.set(job(key), Some(value_at(place, 20)), counter),
                Step::Release | Step::Compact | Step::Reopen => {}
            }
        }
        for key in (0..ROWS).map(row) {
            state.raise(key, floor);
        }
        state
    }

    fn set(&mut self, key: Vec<u8>, value: Option<Vec<u8>>, mark: u64) {
        self.0.insert(key, (value, mark));
    }

    fn raise(&mut self, key: Vec<u8>, mark: u64) {
        let known = self.0.entry(key).or_default();
        known.1 = known.1.max(mark);
    }

    /// What a store holds.
    pub fn of(store: &Store) -> Result<State, Error> {
        let mut state = State::default();
        let rows = (0..ROWS).map(|key| (&store.rows, row(key)));
        for (keyspace, key) in rows.chain((0..JOBS).map(|key| (&store.jobs, job(key)))) {
            let value = keyspace.get(&key)?.map(|value| value.to_vec());
            let mark = keyspace.mark(&key)?.map_or(0, |mark| mark.get());
            state.0.insert(key, (value, mark));
        }
        Ok(state)
    }
}

/// A store with the two keyspaces of the script.
pub struct Store {
    pub db: Db,
    rows: Keyspace,
    jobs: Keyspace,
}

impl Store {
    /// `threads`: with the threads of a service, or with everything in the calls, so that two runs are the same.
    pub fn open(dir: &Path, threads: bool) -> Result<Store, Error> {
        let options = Options::new().segment_bytes(32 << 10);
        let options = if threads { options } else { options.without_threads() };
        let db = options.open(dir)?;
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
        let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/')))?;
        Ok(Store { db, rows, jobs })
    }

    fn step(&self, place: usize, step: Step, lease: &mut Option<Lease>) -> Result<(), Error> {
        let token = token_at(place);
        match step {
            Step::Put(key, len) => self.rows.put(token, &row(key), &value_at(place, len)).map(drop),
            Step::Delete(key) => self.rows.delete(token, &row(key)).map(drop),
            Step::Batch(keys) => {
                let mut batch = self.db.batch();
                for key in keys {
                    batch.put(&self.rows, token, &row(key), &value_at(place, 40))?;
                }
                batch.commit().map(drop)
            }
            Step::Raise(key) => self.rows.raise(token, &row(key)).map(drop),
            Step::RaiseAll => self.rows.raise_all(token).map(drop),
            Step::Acquire(key) => {
                *lease = Some(self.jobs.lease(&fence(key)).acquire()?);
                Ok(())
            }
            Step::PutJob(key) => match lease {
                Some(lease) => self.jobs.put(lease.token(), &job(key), &value_at(place, 20)).map(drop),
                None => Ok(()),
            },
            Step::Release => lease.take().map_or(Ok(()), Lease::release),
            Step::Compact => self.db.compact().map(drop),
            Step::Reopen => Ok(()),
        }
    }
}

/// How a worker's run ended, as the last line that it prints.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ended {
    /// All steps were answered with `Ok`.
    Whole,
    /// A step was answered with an error; whether it is said not to have happened.
    Refused { what: String, not_applied: bool },
    /// It did not live to tell.
    Killed,
}

impl Ended {
    pub fn parse(output: &str) -> Ended {
        match output.lines().rev().find_map(|line| line.split_once(": ")) {
            Some(("whole", _)) => Ended::Whole,
            Some(("not applied", what)) => Ended::Refused { what: what.to_owned(), not_applied: true },
            Some(("unknown", what)) => Ended::Refused { what: what.to_owned(), not_applied: false },
            _ => Ended::Killed,
        }
    }
}

/// Runs the script in `dir`, with the number of answered steps in the file `acks`; stops at the first error, and
/// then looks at what must still be right.
pub fn work(dir: &Path, acks: &Path, steps: &[Step], threads: bool) -> Result<Ended, String> {
    let mut acks = match File::options().write(true).open(acks) {
        Ok(acks) => acks,
        // One of the failing calls; nothing has begun.
        Err(error) => return Ok(Ended::Refused { what: format!("acks: {error}"), not_applied: true }),
    };
    let refused = |error: &Error| Ended::Refused {
        what: format!("{error:?}"),
        not_applied: error.outcome() == Outcome::NotApplied,
    };
    let mut store = match Store::open(dir, threads) {
        Ok(store) => store,
        Err(error) => return Ok(refused(&error)),
    };
    let mut lease = None;
    for (place, &step) in steps.iter().enumerate() {
        let answer = match step {
            Step::Reopen => {
                let closed = store.db.clone().close();
                drop(store);
                match closed.and_then(|()| Store::open(dir, threads)) {
                    Ok(opened) => store = opened,
                    Err(error) => return Ok(refused(&error)),
                }
                Ok(())
            }
            step => store.step(place, step, &mut lease),
        };
        if let Err(error) = answer {
            after_error(&store, steps, place, &error)?;
            // The disk is as it is: nothing is released or closed.
            std::mem::forget(lease);
            return Ok(refused(&error));
        }
        // By calls that the store does not make, so that none of them is hit in its place.
        let count = (place as u64 + 1).to_le_bytes();
        acks.rewind().and_then(|()| acks.write_all(&count)).map_err(|e| format!("acks: {e}"))?;
    }
    Ok(Ended::Whole)
}

/// What a store that has failed a step still owes: reads of what was acknowledged, and refusals that rest on it.
fn after_error(store: &Store, steps: &[Step], place: usize, error: &Error) -> Result<(), String> {
    let expected = State::after(steps, place);
    let seen = State::of(store).map_err(|e| format!("after {error}, a read: {e}"))?;
    if seen != expected && (error.outcome() == Outcome::NotApplied || seen != State::after(steps, place + 1))
    {
        return Err(format!("after {error} at step {place} {:?}: reads show something else", steps[place]));
    }
    for (key, (_, mark)) in expected.0.iter().filter(|(key, (_, mark))| key.starts_with(b"row") && *mark > 1)
    {
        let late = store.rows.put(Token::new(mark - 1).expect("not 0"), key, b"late");
        if !matches!(late, Err(Error::Fenced { .. })) {
            return Err(format!("after {error}: a late write got {late:?}"));
        }
    }
    Ok(())
}

/// Opens what a worker left behind and holds it to its answers: exactly what `acked` steps made, or, unless
/// `exact`, one more. Answers how many those were.
pub fn check(dir: &Path, steps: &[Step], acked: usize, exact: bool) -> Result<usize, String> {
    let open = |what: &str| Store::open(dir, false).map_err(|e| format!("{what}: {e}"));
    let store = open("opening")?;
    let seen = State::of(&store).map_err(|e| format!("reading: {e}"))?;
    let last = if exact { acked } else { acked + 1 };
    let Some(found) = (acked..=last).find(|&count| State::after(steps, count) == seen) else {
        return Err(format!(
            "{acked} steps were answered, and the store holds something else: {}",
            differences(&seen, &State::after(steps, acked))
        ));
    };
    drop(store);
    // What was shown once stays, and opening twice is opening once.
    let store = open("opening again")?;
    if State::of(&store).map_err(|e| format!("reading again: {e}"))? != seen {
        return Err("a second opening shows something else".to_owned());
    }
    let mut highest = 0;
    for (key, (_, mark)) in &seen.0 {
        let is_row = key.starts_with(b"row");
        if *mark > 1 {
            let keyspace = if is_row { &store.rows } else { &store.jobs };
            let late = keyspace.put(Token::new(mark - 1).expect("not 0"), key, b"late");
            if !matches!(late, Err(Error::Fenced { .. })) {
                return Err(format!("a late write to {} got {late:?}", key.escape_ascii()));
            }
        }
        highest = if is_row { highest } else { highest.max(*mark) };
    }
    let lease = store.jobs.lease(b"job-0/").acquire().map_err(|e| format!("a lease: {e}"))?;
    if lease.token().get() <= highest {
        return Err(format!("token {} was granted again", lease.token()));
    }
    store.rows.put(token_at(steps.len() + 1), &row(0), b"on it goes").map_err(|e| format!("a write: {e}"))?;
    Ok(found)
}

/// All that a store shows, in one line.
pub fn look(dir: &Path) -> Result<String, String> {
    let store = Store::open(dir, false).map_err(|e| format!("opening: {e}"))?;
    State::of(&store).map(|state| format!("{:?}", state.0)).map_err(|e| format!("reading: {e}"))
}

fn differences(seen: &State, expected: &State) -> String {
    let mut out = String::new();
    for (key, (value, mark)) in &seen.0 {
        let (wanted, least) = &expected.0[key];
        if value != wanted || mark != least {
            let len = |value: &Option<Vec<u8>>| {
                value.as_ref().map_or("none".to_owned(), |v| format!("{} bytes", v.len()))
            };
            out += &format!(
                "{}: {} at {mark}, not {} at {least}; ",
                key.escape_ascii(),
                len(value),
                len(wanted)
            );
        }
    }
    out
}
