//! Stores that give space back all the time and by themselves: some hundred keys in small segments, the power cut in
//! the middle of a round of compaction, a disk that is full now and then, snapshots and values held over it all.
//!
//! Compaction takes lsns of its own, so this model knows none: what comes back must be one of its states, from the last
//! that was acknowledged to the last that was asked for.

use crate::support::judge::{CRASHES, SYNC_FAILURES};
use crate::support::shown::without_index;
use crate::support::{Rng, Trying};
use crate::{for_seeds, number};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidewall::storage::{CallKind, Fault, SimDisk};
use tidewall::{
    Commit, Db, Error, Keyspace, KeyspaceOptions, Lease, ManualClock, OperationId, Options, Outcome,
    ReadMode, Restore, Result, Scope, Snapshot, Token, Tokens, Value, Verify,
};

/// Keyspaces in the order of their creation, and of how many fences their keys are, with so many keys each.
const SPACES: [(&str, Scope, Tokens, u64, u64); 4] = [
    ("rows", Scope::Key, Tokens::External, 80, 1),
    ("docs", Scope::Prefix(b'/'), Tokens::External, 12, 6),
    ("jobs", Scope::Prefix(b'/'), Tokens::Store, 8, 4),
    ("cells", Scope::Key, Tokens::Store, 16, 1),
];
const SEGMENT_BYTES: u32 = 16 << 10;
const LIVES: u32 = 12;
const MOST_OPS: u32 = 500;
const TTL: Duration = Duration::from_secs(10);

type Key = (usize, Vec<u8>);

/// What a user sees. A value is told by the number of the write that made it, and its length.
#[derive(Clone, Default, PartialEq, Debug)]
struct State {
    values: BTreeMap<Key, (u64, usize)>,
    marks: BTreeMap<Key, u64>,
    floors: [u64; SPACES.len()],
    /// The last numbered operation of each fence, if its mark is the token of that still.
    operations: BTreeMap<Key, u64>,
}

impl State {
    fn mark(&self, at: &Key) -> u64 {
        self.marks.get(at).copied().unwrap_or(0).max(self.floors[at.0])
    }

    fn admit(&mut self, fence: Key, token: u64, operation: Option<u64>) {
        if self.marks.insert(fence.clone(), token) != Some(token) {
            self.operations.remove(&fence);
        }
        self.operations.extend(operation.map(|number| (fence, number)));
    }

    fn apply(&mut self, change: &Change) {
        self.admit((change.key.0, fence_of(&change.key)), change.token, None);
        match change.value {
            Some(value) => drop(self.values.insert(change.key.clone(), value)),
            None => drop(self.values.remove(&change.key)),
        }
    }
}

#[derive(Clone, Debug)]
struct Change {
    key: Key,
    token: u64,
    value: Option<(u64, usize)>,
}

fn fence_of((space, key): &Key) -> Vec<u8> {
    match SPACES[*space].1 {
        Scope::Prefix(byte) => key[..=key.iter().position(|&b| b == byte).unwrap()].to_vec(),
        _ => key.clone(),
    }
}

fn bytes_of((write, len): (u64, usize)) -> Vec<u8> {
    write
        .to_le_bytes()
        .iter()
        .copied()
        .cycle()
        .enumerate()
        .map(|(at, b)| b ^ (at >> 3) as u8)
        .take(len)
        .collect()
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

struct Life {
    disk: SimDisk,
    db: Db,
    clock: ManualClock,
    rng: Rng,
    spaces: Vec<Keyspace>,
    /// From the last one that was acknowledged on.
    states: VecDeque<Arc<State>>,
    pending: VecDeque<Commit>,
    leases: BTreeMap<Key, Lease>,
    snapshots: Vec<(Snapshot, Arc<State>)>,
    values: Vec<(Value, (u64, usize))>,
    writes: u64,
    highest: u64,
    is_over: bool,
    full_for: u32,
}

impl Life {
    fn open(disk: &SimDisk, state: &State, seed: u64, writes: u64, highest: u64) -> Result<Life> {
        let clock = ManualClock::new();
        let db = options(disk, &clock, seed).open("sim")?;
        // Nobody of a life before is at work any more.
        clock.advance(4 * TTL);
        let mut life = Life {
            disk: disk.clone(),
            clock,
            rng: Rng(seed),
            spaces: Vec::new(),
            states: VecDeque::from([Arc::new(state.clone())]),
            pending: VecDeque::new(),
            leases: BTreeMap::new(),
            snapshots: Vec::new(),
            values: Vec::new(),
            writes,
            highest,
            is_over: false,
            full_for: 0,
            db,
        };
        for (name, scope, tokens, ..) in SPACES {
            let options = KeyspaceOptions::new().scope(scope).tokens(tokens);
            life.spaces.push(life.db.keyspace(name, options)?);
        }
        Ok(life)
    }

    /// A copy of the store as it is now, made one of its own: it grants on behind all that was ever granted.
    fn restore(&mut self, seed: u64) -> Result<(SimDisk, u64)> {
        let (copy, into) = (self.disk.dir("copy"), self.disk.dir("new"));
        self.db.checkpoint_into(copy.clone())?;
        let restored = Restore::new().deterministic(seed).run_on(copy, into.clone())?;
        assert_eq!(restored.need_floor.len(), 2, "tokens that come from elsewhere");
        let disk = SimDisk::new();
        into.file_names().iter().for_each(|name| disk.write_file(name, &into.read_file(name).unwrap()));
        Ok((disk, restored.counter.get()))
    }

    /// Shuts out whoever wrote to the store of which this is a copy.
    fn raise_floors(&mut self) {
        let mut next = State::clone(self.newest());
        for space in 0..2 {
            let marks = next.marks.iter().filter(|(at, _)| at.0 == space).map(|(_, &mark)| mark);
            let number = marks.max().max(Some(next.floors[space])).unwrap() + 1;
            let late = self.spaces[space].put(token(number - 1), b"00/", b"late");
            assert!(matches!(late, Err(Error::NeedsFloor { .. })), "{late:?}");
            self.spaces[space].raise_all(token(number)).unwrap();
            next.floors[space] = number;
        }
        self.states = VecDeque::from([Arc::new(next)]);
    }

    fn newest(&self) -> &Arc<State> {
        self.states.back().unwrap()
    }

    fn run(&mut self) {
        for _ in 0..MOST_OPS {
            if self.is_over {
                return;
            }
            self.step();
        }
        self.settle();
    }

    fn step(&mut self) {
        if self.full_for > 0 {
            self.full_for -= 1;
            if self.full_for == 0 {
                self.disk.set_budget(None);
            }
        }
        match self.rng.below(100) {
            0..=49 => {
                let change = self.change();
                self.write(&[change]);
            }
            50..=57 => {
                let changes: Vec<Change> = (0..2 + self.rng.below(10)).map(|_| self.change()).collect();
                self.write(&changes);
            }
            58..=60 => self.delete_prefix(),
            61..=63 => self.raise(),
            64 => self.raise_all(),
            65..=76 => self.acquire(),
            77..=81 => {
                let held: Vec<Key> = self.leases.keys().cloned().collect();
                if !held.is_empty() {
                    let lease = self.leases.remove(self.rng.pick(&held));
                    drop(lease);
                }
            }
            82 => {
                self.clock.advance(TTL * 2);
                self.leases.clear();
            }
            83..=85 => self.stale(),
            86..=88 => {
                if self.snapshots.len() < 3 && !self.is_over {
                    self.settle();
                    if !self.is_over {
                        self.snapshots.push((self.db.snapshot(), self.newest().clone()));
                    }
                }
            }
            89..=92 => {
                if !self.snapshots.is_empty() {
                    let at = self.rng.below(self.snapshots.len() as u64) as usize;
                    let (snapshot, state) = self.snapshots.swap_remove(at);
                    let seen = shown(&self.spaces, &|space| Box::new(snapshot.iter(space)));
                    self.compare(seen, &state, "a snapshot");
                }
            }
            93 => {
                let at = self.key();
                self.settle();
                if self.is_over {
                    return;
                }
                let value = self.spaces[at.0].get(&at.1);
                let expected = self.newest().values.get(&at).copied();
                match value {
                    Ok(value) => {
                        assert_eq!(
                            value.as_ref().map(|value| value.bytes()),
                            expected.map(bytes_of).as_deref()
                        );
                        self.values.extend(value.zip(expected));
                    }
                    Err(error) => self.fail(&error),
                }
            }
            94 => {
                for (value, expected) in self.values.drain(..) {
                    assert_eq!(value.bytes(), bytes_of(expected), "a value that is held changed");
                }
            }
            95 => {
                let compacted = self.db.compact();
                self.pending_done();
                if let Err(error) = compacted {
                    self.fail(&error);
                }
            }
            96 => {
                self.full_for = 1 + self.rng.below(30) as u32;
                let used: usize = self
                    .disk
                    .file_names()
                    .iter()
                    .filter_map(|name| self.disk.read_file(name))
                    .map(|b| b.len())
                    .sum();
                self.disk.set_budget(Some(used as u64 + self.rng.below(3 * u64::from(SEGMENT_BYTES))));
            }
            97 => self.settle(),
            _ => {
                self.settle();
                if !self.is_over {
                    let seen = shown(&self.spaces, &|space| Box::new(space.iter()));
                    let state = self.newest().clone();
                    self.compare(seen, &state, "the store");
                    let keys = self.db.stats().keys;
                    assert_eq!(keys, state.values.len() as u64, "keys are counted wrong");
                }
            }
        }
    }

    fn compare(&mut self, seen: Result<BTreeMap<Key, Vec<u8>>>, state: &State, what: &str) {
        match seen {
            Ok(seen) => assert_same(&seen, state, what),
            Err(error) => self.fail(&error),
        }
    }

    /// An answer that is no refusal: the disk has failed, or is full.
    fn fail(&mut self, error: &Error) {
        match error {
            Error::NoSpace { .. } if !self.disk.is_stopped() => {
                assert!(self.is_wrong(), "there is room: {error:?}");
            }
            _ => {
                assert!(self.is_wrong(), "nothing is wrong: {error:?}");
                self.is_over = true;
            }
        }
    }

    fn is_wrong(&self) -> bool {
        self.disk.is_stopped() || self.full_for > 0 || self.disk.faults_fired() > 0
    }

    fn key(&mut self) -> Key {
        let space = *self.rng.pick(&[0, 0, 0, 1, 1, 1, 2, 2, 3]);
        let (.., fences, keys) = SPACES[space];
        let fence = self.rng.below(fences);
        let key = match SPACES[space].1 {
            Scope::Prefix(_) => format!("{fence:02}/{:02}", self.rng.below(keys)),
            _ => format!("{fence:03}"),
        };
        (space, key.into_bytes())
    }

    /// A key and a token that is good there. Where the store grants them, of a lease that is held.
    fn place(&mut self) -> (Key, u64) {
        loop {
            let key = self.key();
            let fence = (key.0, fence_of(&key));
            if SPACES[key.0].2 == Tokens::Store {
                let Some(lease) = self.leases.get(&fence).filter(|lease| lease.is_live()) else { continue };
                let number = lease.token().get();
                return (key, number);
            }
            let more = u64::from(self.rng.chance(10)) * self.rng.below(3);
            let number = (self.newest().mark(&fence) + more).max(1);
            return (key, number);
        }
    }

    fn change(&mut self) -> Change {
        let (key, token) = self.place();
        self.writes += 1;
        let len = match self.rng.below(100) {
            0..=59 => self.rng.below(100),
            60..=89 => 200 + self.rng.below(600),
            90..=98 => 1000 + self.rng.below(3000),
            _ => 5000 + self.rng.below(3000),
        };
        let value = (!self.rng.chance(25)).then_some((self.writes, len as usize));
        Change { key, token, value }
    }

    fn write(&mut self, changes: &[Change]) {
        let mut next = State::clone(self.newest());
        // One token a fence, the highest that was drawn.
        let mut changes = changes.to_vec();
        let mut tokens = BTreeMap::new();
        for change in &changes {
            let token = tokens.entry((change.key.0, fence_of(&change.key))).or_insert(0);
            *token = change.token.max(*token);
        }
        for change in &mut changes {
            change.token = tokens[&(change.key.0, fence_of(&change.key))];
            next.apply(change);
        }
        let operation = self.rng.chance(10).then(|| {
            let fences = changes.iter().map(|change| (change.key.0, fence_of(&change.key)));
            let last = fences.clone().filter_map(|fence| next.operations.get(&fence).copied()).max();
            let number = last.unwrap_or(0) + 1;
            next.operations.extend(fences.map(|fence| (fence, number)));
            number
        });
        let submits = self.rng.chance(40);
        let (space, at) = (&self.spaces[changes[0].key.0], token(changes[0].token));
        let key = &changes[0].key.1;
        let submitted = match (&changes[..], changes[0].value) {
            _ if operation.is_some() => self.batch(&changes, operation).and_then(|batch| batch.submit()),
            ([_], Some(value)) => space.submit_put(at, key, &bytes_of(value)),
            ([_], None) => space.submit_delete(at, key),
            _ => self.batch(&changes, None).and_then(|batch| batch.submit()),
        };
        // What was not even appended says so at once.
        let submitted = match submitted {
            Ok(commit) if commit.is_done() => match commit.wait() {
                Ok(_) => panic!("durable before anybody waited"),
                Err(error) => Err(error),
            },
            submitted => submitted,
        };
        match submitted {
            Ok(commit) => {
                self.states.push_back(Arc::new(next));
                self.pending.push_back(commit);
                if !submits {
                    self.settle();
                }
            }
            Err(error) => self.failed_write(next, &error),
        }
    }

    fn batch(&self, changes: &[Change], operation: Option<u64>) -> Result<tidewall::Batch> {
        let mut batch = self.db.batch();
        for change in changes {
            let (space, token) = (&self.spaces[change.key.0], token(change.token));
            match change.value {
                Some(value) => batch.put(space, token, &change.key.1, &bytes_of(value))?,
                None => batch.delete(space, token, &change.key.1)?,
            };
        }
        operation.map(|number| batch.operation(OperationId::new(number)));
        Ok(batch)
    }

    fn failed_write(&mut self, next: State, error: &Error) {
        if error.outcome() == Outcome::Unknown {
            self.states.push_back(Arc::new(next));
        }
        self.fail(error);
    }

    /// What was acknowledged of the submitted: a state for each.
    fn pending_done(&mut self) {
        while self.pending.front().is_some_and(Commit::is_done) {
            match self.pending.pop_front().unwrap().wait() {
                Ok(_) => drop(self.states.pop_front()),
                Err(error) => {
                    self.is_over = true;
                    self.fail(&error);
                }
            }
            if self.is_over {
                return;
            }
        }
    }

    /// Waits for all that was submitted.
    fn settle(&mut self) {
        while let Some(commit) = self.pending.pop_front() {
            match commit.wait() {
                Ok(_) => drop(self.states.pop_front()),
                Err(error) => {
                    // It and all behind it: nobody knows.
                    assert_eq!(error.outcome(), Outcome::Unknown, "{error:?}");
                    self.pending.clear();
                    self.is_over = true;
                    return self.fail(&error);
                }
            }
        }
        // What was asked for and refused, or is not certain, leaves its states until the end.
        if !self.is_over {
            assert_eq!(self.states.len(), 1);
        }
    }

    fn delete_prefix(&mut self) {
        self.settle();
        if self.is_over {
            return;
        }
        let (key, number) = self.place();
        // All keys of one fence, or one key.
        let prefix = fence_of(&key);
        let mut next = State::clone(self.newest());
        let doomed: Vec<Key> =
            next.values.keys().filter(|at| at.0 == key.0 && at.1.starts_with(&prefix)).cloned().collect();
        for key in &doomed {
            next.apply(&Change { key: key.clone(), token: number, value: None });
        }
        match self.spaces[key.0].delete_prefix(token(number), &prefix) {
            Ok(deleted) => {
                assert_eq!(deleted.keys, doomed.len());
                self.states = VecDeque::from([Arc::new(next)]);
            }
            Err(error) => self.failed_write(next, &error),
        }
    }

    fn raise(&mut self) {
        self.settle();
        if self.is_over {
            return;
        }
        let (key, number) = self.place();
        let fence = (key.0, fence_of(&key));
        let mut next = State::clone(self.newest());
        next.admit(fence, number, None);
        match self.spaces[key.0].raise(token(number), &key.1) {
            Ok(_) => self.states = VecDeque::from([Arc::new(next)]),
            Err(error) => self.failed_write(next, &error),
        }
    }

    fn raise_all(&mut self) {
        self.settle();
        if self.is_over {
            return;
        }
        let space = self.rng.below(2) as usize;
        let mut next = State::clone(self.newest());
        let number = next.floors[space] + 1;
        next.floors[space] = number;
        match self.spaces[space].raise_all(token(number)) {
            Ok(_) => self.states = VecDeque::from([Arc::new(next)]),
            Err(error) => self.failed_write(next, &error),
        }
    }

    fn acquire(&mut self) {
        let key = loop {
            let key = self.key();
            if SPACES[key.0].2 == Tokens::Store {
                break key;
            }
        };
        let fence = (key.0, fence_of(&key));
        self.settle();
        if self.is_over {
            return;
        }
        let mut next = State::clone(self.newest());
        let is_held = self.leases.get(&fence).is_some_and(Lease::is_live);
        match self.spaces[key.0].lease(&key.1).ttl(TTL).acquire() {
            Ok(lease) => {
                assert!(!is_held, "{fence:?} was held");
                let number = lease.token().get();
                assert!(number > self.highest, "token {number} was handed out after {}", self.highest);
                self.highest = number;
                next.admit(fence.clone(), number, None);
                self.states = VecDeque::from([Arc::new(next)]);
                self.leases.insert(fence, lease);
            }
            Err(Error::Held { .. }) => assert!(is_held, "{fence:?} is held by nobody"),
            Err(error) => {
                if error.outcome() == Outcome::Unknown {
                    next.admit(fence, self.highest + 1, None);
                    self.states.push_back(Arc::new(next));
                }
                self.fail(&error);
            }
        }
    }

    /// A writer who was fenced long ago.
    fn stale(&mut self) {
        let (key, _) = self.place();
        let number = self.newest().mark(&(key.0, fence_of(&key)));
        if number > 1 {
            let late = self.spaces[key.0].put(token(number - 1), &key.1, b"late");
            self.pending_done();
            match late {
                Err(Error::Fenced { mark, .. }) => assert!(mark.get() >= number),
                Err(error) if self.is_wrong() => self.fail(&error),
                late => panic!("token {} on {key:?}: {late:?}", number - 1),
            }
        }
    }
}

fn options(disk: &SimDisk, clock: &ManualClock, seed: u64) -> Options {
    let mut rng = Rng(seed ^ 0x0b05);
    let mode = if rng.chance(50) { ReadMode::Map } else { ReadMode::Pread };
    Options::new()
        .storage(disk.clone())
        .clock(clock.clone())
        .deterministic(seed)
        .without_threads()
        .read_mode(mode)
        .segment_bytes(SEGMENT_BYTES << *rng.pick(&[0, 0, 0, 1, 2]))
        .lease_grace(Duration::ZERO)
        .index_every(*rng.pick(&[1, 50, u64::MAX]))
}

type Items<'a> = Box<dyn DoubleEndedIterator<Item = Result<(Vec<u8>, Value)>> + 'a>;

/// All values, read forwards and backwards.
fn shown<'a>(
    spaces: &'a [Keyspace],
    iter: &dyn Fn(&'a Keyspace) -> Items<'a>,
) -> Result<BTreeMap<Key, Vec<u8>>> {
    let mut all = BTreeMap::new();
    for (space, keyspace) in spaces.iter().enumerate() {
        let read = |item: Result<(Vec<u8>, Value)>| item.map(|(key, value)| ((space, key), value.into_vec()));
        let forwards: Vec<(Key, Vec<u8>)> = iter(keyspace).map(read).collect::<Result<_>>()?;
        let mut backwards: Vec<(Key, Vec<u8>)> = iter(keyspace).rev().map(read).collect::<Result<_>>()?;
        backwards.reverse();
        assert!(forwards == backwards, "a scan backwards differs");
        all.extend(forwards);
    }
    Ok(all)
}

fn assert_same(seen: &BTreeMap<Key, Vec<u8>>, state: &State, what: &str) {
    let differs = |(at, expected): (&Key, &(u64, usize))| seen.get(at) != Some(&bytes_of(*expected));
    if let Some((at, expected)) = state.values.iter().find(|&value| differs(value)) {
        panic!("{what} shows {:?} of {at:?}, not {expected:?}", seen.get(at).map(|v| (v.len(), v.get(..8))));
    }
    if let Some(at) = seen.keys().find(|&at| !state.values.contains_key(at)) {
        panic!("{what} shows {at:?}, which was deleted");
    }
}

/// Opens what a crash left and finds the state that it is, with the marks that it shows.
fn judge(
    image: &SimDisk,
    states: &VecDeque<Arc<State>>,
    highest: u64,
    is_restored: bool,
    seed: u64,
) -> State {
    let (disk, unindexed) = (image.kill(), without_index(&image.kill()));
    let seen = opened(&disk, seed);
    assert!(seen == opened(&unindexed, seed), "an index file changes what is seen");
    let differences = |state: &State| {
        let mut found = Vec::new();
        let values = state.values.keys().chain(seen.0.keys()).collect::<BTreeSet<_>>();
        for at in values {
            let (expected, shown) = (state.values.get(at), seen.0.get(at));
            if expected.copied().map(bytes_of).as_ref() != shown {
                let shown = shown.map(|value| (value.len(), value.get(..8)));
                found.push(format!("{at:?}: {shown:?} instead of {expected:?}"));
            }
        }
        for (at, &mark) in &state.marks {
            let (mark, shown) = (mark.max(state.floors[at.0]), seen.1.get(at).copied().unwrap_or(0));
            // Folding may have raised it.
            let is_folded = SPACES[at.0].2 == Tokens::Store && (mark..=highest + 1).contains(&shown);
            if mark != shown && !is_folded {
                found.push(format!("the mark of {at:?}: {shown} instead of {mark}"));
            }
        }
        // A restored keyspace of external tokens answers nothing before it is told its floor.
        if found.is_empty() && !is_restored {
            found.extend(unknown_operations(&image.kill(), state, seed));
        }
        found
    };
    let mut all = Vec::new();
    let is_it = |state: &&Arc<State>| {
        let found = differences(state);
        let is_it = found.is_empty();
        all.push(found);
        is_it
    };
    let state = states.iter().find(is_it);
    let mut state =
        State::clone(state.unwrap_or_else(|| panic!("what came back is none of the states:\n{all:#?}")));
    for (at, mark) in seen.1 {
        if SPACES[at.0].2 == Tokens::Store && state.mark(&at) != mark {
            state.operations.remove(&at);
            state.marks.insert(at, mark);
        }
    }
    state
}

/// The last operations of fences that are not known when they are tried once more.
fn unknown_operations(disk: &SimDisk, state: &State, seed: u64) -> Vec<String> {
    let db = options(disk, &ManualClock::new(), seed).open("sim").unwrap();
    let mut unknown = Vec::new();
    for ((space, fence), &number) in &state.operations {
        let mark = state.marks[&(*space, fence.clone())];
        // What is below a floor is fenced by that; and marks of the store's own tokens may have been folded.
        if SPACES[*space].2 == Tokens::Store || state.floors[*space] > mark {
            continue;
        }
        let (name, scope, tokens, ..) = SPACES[*space];
        let keyspace = db.keyspace(name, KeyspaceOptions::new().scope(scope).tokens(tokens)).unwrap();
        let again = keyspace.put_operation(token(mark), OperationId::new(number), fence, b"again");
        if !matches!(again, Err(Error::Duplicate { .. })) {
            unknown.push(format!("operation {number} on {fence:?} of {name}: {again:?}"));
        }
    }
    unknown
}

type Seen = (BTreeMap<Key, Vec<u8>>, BTreeMap<Key, u64>);

fn opened(disk: &SimDisk, seed: u64) -> Seen {
    let db = options(disk, &ManualClock::new(), seed).open("sim").expect("a crash opens by itself");
    let spaces: Vec<Keyspace> =
        db.keyspaces().iter().map(|(name, options)| db.keyspace(name, *options).unwrap()).collect();
    let values = shown(&spaces, &|space| Box::new(space.iter())).unwrap();
    assert_eq!(db.stats().keys, values.len() as u64, "keys are counted wrong");
    let mut marks = BTreeMap::new();
    for (space, keyspace) in spaces.iter().enumerate() {
        let (.., fences, _) = SPACES[space];
        for fence in 0..fences {
            let name = match SPACES[space].1 {
                Scope::Prefix(_) => format!("{fence:02}/"),
                _ => format!("{fence:03}"),
            };
            if let Some(mark) = keyspace.mark(name.as_bytes()).unwrap() {
                marks.insert((space, name.into_bytes()), mark.get());
            }
        }
    }
    drop(spaces);
    db.close().unwrap();
    let report = Verify::new().run_on(disk.clone()).unwrap();
    assert!(report.is_sound(), "{report:?}");
    (values, marks)
}

#[test]
fn a_store_that_compacts_all_the_time_brings_back_what_it_answered() {
    let wanted = number("TIDEWALL_CAMPAIGN_BUSY").unwrap_or(12);
    let (rounds, ops, restored) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    for_seeds(
        |done| done >= wanted,
        |seed| {
            let mut disk = SimDisk::new();
            let mut state = State::default();
            let (mut writes, mut highest, mut is_restored) = (0, 0, false);
            for life in 0..LIVES {
                let lives = seed << 8 | u64::from(life);
                let _trying = Trying(move || format!("busy seed {seed}, life {life}"));
                let mut rng = Rng(lives ^ 0x1f3);
                if rng.chance(30) {
                    disk.early_write_back(lives);
                }
                let mut run = Life::open(&disk, &state, lives, writes, highest).expect("it opens");
                if std::mem::take(&mut is_restored) {
                    run.raise_floors();
                }
                // Most lives end in a call to the disk.
                let ends = rng.chance(85);
                if rng.chance(20) {
                    disk.set_sync_failure(*rng.pick(&SYNC_FAILURES));
                    let kind = *rng.pick(&[ErrorKind::StorageFull, ErrorKind::Other]);
                    let nth = rng.below(1500);
                    disk.fail(Fault::new(CallKind::Any, kind).nth(nth).partial(rng.below(3000) as usize));
                } else if ends {
                    disk.stop_at(disk.calls() + rng.below(1500));
                }
                run.run();
                rounds.fetch_add(run.db.stats().retired_segments, Ordering::Relaxed);
                ops.fetch_add(run.writes - writes, Ordering::Relaxed);
                (writes, highest) = (run.writes, run.highest);
                for (value, expected) in run.values.drain(..) {
                    assert_eq!(value.bytes(), bytes_of(expected), "a value that is held changed");
                }
                if !ends && disk.faults_fired() == 0 && rng.chance(50) {
                    disk.clear_faults();
                    disk.set_budget(None);
                    run.settle();
                    let (copy, counter) = run.restore(lives).expect("it is restored");
                    let states = std::mem::take(&mut run.states);
                    state = judge(&copy, &states, counter, true, lives);
                    (disk, highest, is_restored) = (copy, counter, true);
                    restored.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let states = std::mem::take(&mut run.states);
                if !ends && rng.chance(50) {
                    run.snapshots.clear();
                    run.leases.clear();
                    run.spaces.clear();
                    let _ = run.db.clone().close();
                }
                let mut next = None;
                for n in 0..4 {
                    let image = match n {
                        0 => disk.kill(),
                        _ => disk.crash(*rng.pick(&CRASHES), rng.next()),
                    };
                    image.set_budget(None);
                    let judged = judge(&image, &states, highest, false, lives << 4 | n);
                    if next.is_none() || rng.chance(40) {
                        next = Some((image, judged));
                    }
                }
                drop(run);
                (disk, state) = next.unwrap();
            }
        },
    );
    println!("{ops:?} writes, {rounds:?} segments retired, {restored:?} stores restored");
}
