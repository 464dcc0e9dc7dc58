//! Asks the store and the model the same things, and holds the one to the other.

use super::Rng;
use super::model::{CAP, CAPPED, Call, Change, KEYS, Kind, Model, SPACES, Said, fence_of, options};
use super::shown::{check_failure, done, keyspaces, open_reading, say, shown};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tidewall::storage::SimDisk;
use tidewall::{
    Commit, Db, Error, Expect, Keyspace, Lease, Lsn, ManualClock, OperationId, Outcome, OwnerId, Raised,
    ReadMode, Scope, Token, Tokens,
};

/// What is known of the past of a store: enough to judge what a recovery brings back.
#[derive(Clone)]
pub struct History {
    /// The model behind each lsn that may have been reached, in order. Lsns between belong to records
    /// that change nothing a user sees.
    pub states: Vec<Arc<Model>>,
    /// Some answer rested on this lsn.
    pub durable: u64,
    /// The highest token that was handed out.
    pub token: u64,
    /// Leases that were live at the end: space, fence, token. Their holders may still be at work.
    pub held: Vec<(usize, &'static [u8], u64)>,
    /// A compaction was cut off: it may have appended any number of frames.
    pub was_compacting: bool,
}

impl History {
    pub fn new() -> Self {
        History {
            states: vec![Arc::default()],
            durable: 0,
            token: 0,
            held: Vec::new(),
            was_compacting: false,
        }
    }

    /// The state as of an lsn.
    pub fn at(&self, lsn: u64) -> &Model {
        &self.states[self.states.partition_point(|state| state.lsn <= lsn) - 1]
    }
}

/// A submitted write and what the model says to it.
struct Pending {
    call: Call,
    commit: Commit,
    /// Durable when it was submitted.
    before: u64,
    /// Appended under this lsn, if the model admitted it.
    lsn: Option<u64>,
}

/// A store that is open on a simulated disk, beside its model.
pub struct Driver {
    pub disk: SimDisk,
    pub db: Db,
    pub history: History,
    pub clock: ManualClock,
    rng: Rng,
    /// The state with everything appended.
    model: Model,
    spaces: Vec<Keyspace>,
    leases: BTreeMap<(usize, &'static [u8]), Lease>,
    pending: Vec<Pending>,
    /// Calls that the disk failed, and which were answered so.
    pub failed: u32,
    /// So many calls of a hundred are for upkeep: compaction, and now and then a checkpoint.
    pub upkeep: u64,
    checkpoints: u32,
    trace: bool,
}

impl Driver {
    /// Opens a store and takes over where `history` ends: at the lsn that was recovered.
    pub fn open(disk: &SimDisk, history: &History, seed: u64) -> tidewall::Result<Self> {
        let mode = if seed.is_multiple_of(2) { ReadMode::Map } else { ReadMode::Pread };
        Self::open_reading(disk, history, seed, mode, seed)
    }

    /// As [`Driver::open`], with its calls drawn from another seed than the lives of the store.
    pub fn open_reading(
        disk: &SimDisk,
        history: &History,
        seed: u64,
        mode: ReadMode,
        calls: u64,
    ) -> tidewall::Result<Self> {
        let clock = ManualClock::new();
        let db = open_reading(disk, &clock, seed, mode)?;
        let lsn = db.last_lsn().get();
        let model = Model { lsn, ..history.at(lsn).clone() };
        let mut driver = Driver {
            disk: disk.clone(),
            spaces: keyspaces(&db),
            db,
            history: History {
                states: Vec::new(),
                durable: lsn,
                token: history.token,
                held: history.held.clone(),
                was_compacting: false,
            },
            clock,
            rng: Rng(calls),
            model,
            leases: BTreeMap::new(),
            pending: Vec::new(),
            failed: 0,
            upkeep: 3,
            checkpoints: 0,
            trace: is_traced(),
        };
        if driver.trace {
            eprintln!("opened at lsn {lsn}, held before: {:?}", driver.history.held);
        }
        driver.adopt_folds();
        driver.history.states.push(Arc::new(driver.model.clone()));
        Ok(driver)
    }

    /// Compaction may have folded marks into a floor: never over a lease that is live or may be. C4.
    fn adopt_folds(&mut self) {
        for (at, ks) in self.spaces.iter().enumerate() {
            let Some(floor) = ks.floor().filter(|floor| floor.is_folded) else { continue };
            let floor = floor.mark.get();
            let space = &self.model.spaces[at];
            if (floor, true) <= (space.floor, space.folded) {
                continue;
            }
            assert_eq!(SPACES[at].2, Tokens::Store, "{} is folded by its user only", ks.name());
            assert!(floor <= self.model.counter, "a floor of {floor} above the counter");
            let live = self.leases.iter().filter(|(_, lease)| lease.is_live());
            let live = live.map(|(&(space, fence), lease)| (space, fence, lease.token().get()));
            for (space, fence, token) in live.chain(self.history.held.iter().copied()) {
                let is_current = space == at && self.model.mark(at, fence) == Some(token);
                assert!(
                    !is_current || floor < token,
                    "a floor of {floor} in {at} over {token} on {fence:?}, which is held"
                );
            }
            let space = &mut self.model.spaces[at];
            (space.floor, space.folded) = (floor, true);
        }
    }

    /// Changes places, and perhaps folds marks; waits for all that was appended.
    pub fn compact(&mut self) {
        let result = self.db.compact();
        if self.trace {
            eprintln!("compacted: {result:?}");
        }
        if let Err(error) = &result {
            check_failure(error);
            self.failed += 1;
            self.history.was_compacting = true;
        }
        self.catch_up();
        self.model.compacted = true;
        self.adopt_folds();
        self.append(self.model.clone());
    }

    /// Links all that is sealed into another directory of the disk: those files are never written again.
    pub fn checkpoint(&mut self) {
        self.checkpoints += 1;
        let result = self.db.checkpoint_into(self.disk.dir(&format!("copy-{}", self.checkpoints)));
        if self.trace {
            eprintln!("checkpoint: {result:?}");
        }
        match &result {
            Ok(_) => {}
            // One of a life before.
            Err(Error::InvalidArgument(_)) => {}
            Err(error) => {
                check_failure(error);
                self.failed += 1;
            }
        }
        self.catch_up();
    }

    /// Makes some random calls, then waits for what was submitted. Stops early once the store is poisoned,
    /// and checks that it behaves so.
    pub fn run(&mut self, calls: u32) {
        for _ in 0..calls {
            if !is_healthy(&self.db) {
                break;
            }
            self.step();
        }
        while !self.pending.is_empty() {
            self.wait_for_one();
        }
        if !is_healthy(&self.db) {
            self.check_poisoned();
        }
    }

    fn step(&mut self) {
        if self.model.spaces.len() < 3 || (self.model.spaces.len() < SPACES.len() && self.rng.chance(12)) {
            return self.ask(Call::Create);
        }
        if self.rng.chance(self.upkeep) {
            return if self.upkeep > 3 && self.rng.chance(20) { self.checkpoint() } else { self.compact() };
        }
        match self.rng.below(97) + 3 {
            0..=44 => {
                let call = self.write();
                if self.rng.chance(50) { self.submit(call) } else { self.ask(call) }
            }
            45..=60 => self.wait_for_one(),
            61..=64 => {
                let (space, key) = self.place(None);
                let token = self.token(space, key);
                let prefix = *self.rng.pick(&[&b"a/"[..], b"b", b"", b"c", b"unused"]);
                self.ask(Call::DeletePrefix { space, token, prefix });
            }
            65..=69 => {
                let (space, key) = self.place(None);
                let token = self.other_token(space, key);
                self.ask(Call::Raise { space, token, key });
            }
            70..=71 => {
                let (space, key) = self.place(None);
                let token = self.other_token(space, key);
                self.ask(Call::RaiseAll { space, token });
            }
            72 => {
                let token = self.model.counter + self.rng.below(20) + 1;
                self.ask(Call::Advance { token });
            }
            73..=86 => {
                let (space, key) = self.place(Some(Tokens::Store));
                self.acquire(space, key);
            }
            87..=89 => {
                let held = self.leases.keys().next().copied();
                if let Some(lease) = held.and_then(|at| self.leases.remove(&at)) {
                    drop(lease);
                }
            }
            90 => {
                self.clock.advance(Duration::from_secs(16));
                // No lease of the life before was for longer.
                self.history.held.clear();
            }
            91..=95 => {
                let (space, key) = self.place(None);
                self.ask(Call::Get { space, key });
            }
            _ => {
                let (space, key) = self.place(None);
                self.ask(Call::Mark { space, key });
            }
        }
    }

    fn place(&mut self, tokens: Option<Tokens>) -> (usize, &'static [u8]) {
        let spaces: Vec<usize> = (0..self.model.spaces.len())
            .filter(|&at| tokens.is_none_or(|tokens| SPACES[at].2 == tokens))
            .collect();
        (*self.rng.pick(&spaces), KEYS[self.rng.below(KEYS.len() as u64 - 1) as usize])
    }

    /// Mostly the token that is good here; sometimes one below, sometimes one above.
    fn token(&mut self, space: usize, key: &'static [u8]) -> u64 {
        let mark = self.model.mark(space, key).unwrap_or(0);
        match self.rng.below(100) {
            0..=9 => mark.saturating_sub(1),
            10..=14 => mark + 1 + self.rng.below(3),
            15..=34 if SPACES[space].2 == Tokens::External => mark + 1 + self.rng.below(5),
            35..=36 if space == CAPPED => mark + CAP + 5,
            _ => mark,
        }
        .max(1)
    }

    /// A token to raise with: as above, or one that was granted for another fence.
    fn other_token(&mut self, space: usize, key: &'static [u8]) -> u64 {
        match self.rng.below(3) {
            0 => self.token(space, key),
            1 if SPACES[space].2 == Tokens::Store => self.model.counter.max(1),
            _ => self.model.mark(space, key).unwrap_or(0) + 1,
        }
    }

    fn value(&mut self) -> Arc<[u8]> {
        let len = match self.rng.below(100) {
            0..=49 => self.rng.below(60),
            50..=69 => 400 + self.rng.below(300),
            70..=89 => 1000 + self.rng.below(1500),
            90..=97 => 4000 + self.rng.below(1500),
            _ => 11_500 + self.rng.below(6000),
        };
        let byte = self.rng.next() as u8;
        (0..len).map(|at| byte.wrapping_add(at as u8)).collect()
    }

    fn change(&mut self) -> Change {
        let (space, key) = self.place(None);
        let token = self.token(space, key);
        let kind = match self.rng.below(10) {
            0..=6 => Kind::Put,
            7..=8 => Kind::Delete,
            _ => Kind::Raise,
        };
        let value = if kind == Kind::Put { self.value() } else { Arc::default() };
        let key = if kind == Kind::Raise { fence_of(space, key) } else { key };
        Change { kind, space, token, key, value }
    }

    fn write(&mut self) -> Call {
        let mut changes: Vec<Change> = Vec::new();
        let count = if self.rng.chance(70) { 1 } else { 2 + self.rng.below(4) };
        for _ in 0..count {
            let mut change = self.change();
            let fence = fence_of(change.space, change.key);
            let same = changes.iter().find(|c| c.space == change.space && fence_of(c.space, c.key) == fence);
            if let Some(same) = same
                && self.rng.chance(90)
            {
                change.token = same.token;
            }
            changes.push(change);
        }
        let mut expect = Vec::new();
        if self.rng.chance(25) {
            let (space, key) = self.place(None);
            let key = if count == 1 { changes[0].key } else { key };
            let space = if count == 1 { changes[0].space } else { space };
            let now = self.model.spaces[space].values.get(key).map(|&(_, _, lsn)| Lsn::new(lsn));
            let wanted = match (self.rng.below(4), now) {
                (0, _) => Expect::Absent,
                (1, _) => Expect::Present,
                (_, Some(lsn)) => Expect::Version(lsn),
                _ => Expect::Absent,
            };
            if !key.is_empty() {
                expect.push((space, key, wanted));
            }
        }
        let op = self.rng.chance(35).then(|| {
            let change = &changes[0];
            let fence = fence_of(change.space, change.key);
            let last = self.model.spaces[change.space].fences.get(fence).and_then(|fence| fence.last);
            (last.map_or(0, |(op, _)| op) + self.rng.below(3)).max(1)
        });
        Call::Write { changes, expect, op }
    }

    // What the store says.

    fn token_of(number: u64) -> Token {
        Token::new(number).expect("in range")
    }

    /// A single change goes the short way, several as a batch.
    fn single(&self, call: &Call) -> Option<tidewall::Result<Said>> {
        let Call::Write { changes, expect, op } = call else { return None };
        let [Change { kind, space, token, key, value }] = &changes[..] else { return None };
        let (space, token) = (&self.spaces[*space], Self::token_of(*token));
        let answer = match (kind, op, &expect[..]) {
            (Kind::Put, None, []) => space.put(token, key, value),
            (Kind::Put, Some(op), []) => space.put_operation(token, OperationId::new(*op), key, value),
            (Kind::Put, None, [(_, _, expect)]) => space.put_if(token, key, value, *expect),
            (Kind::Delete, None, []) => space.delete(token, key),
            (Kind::Delete, Some(op), []) => space.delete_operation(token, OperationId::new(*op), key),
            (Kind::Delete, None, [(_, _, expect)]) => space.delete_if(token, key, *expect),
            _ => return None,
        };
        Some(answer.map(done))
    }

    fn batch(&self, call: &Call) -> tidewall::Result<tidewall::Batch> {
        let Call::Write { changes, expect, op } = call else { unreachable!() };
        let mut batch = self.db.batch();
        for Change { kind, space, token, key, value } in changes {
            let (space, token) = (&self.spaces[*space], Self::token_of(*token));
            match kind {
                Kind::Put => batch.put(space, token, key, value)?,
                Kind::Delete => batch.delete(space, token, key)?,
                Kind::Raise => batch.raise(space, token, key)?,
            };
        }
        for (space, key, expect) in expect {
            batch.expect(&self.spaces[*space], key, *expect)?;
        }
        op.map(|op| batch.operation(OperationId::new(op)));
        Ok(batch)
    }

    fn perform(&mut self, call: &Call) -> tidewall::Result<Said> {
        let raised = |raised| match raised {
            Raised::Now(lsn) => done(lsn),
            _ => Said::Already,
        };
        match call {
            Call::Create => {
                let at = self.spaces.len();
                self.spaces.push(self.db.keyspace(SPACES[at].0, options(at))?);
                Ok(Said::Ok)
            }
            Call::Write { .. } => match self.single(call) {
                Some(said) => said,
                None => self.batch(call)?.commit().map(done),
            },
            Call::DeletePrefix { space, token, prefix } => {
                let deleted = self.spaces[*space].delete_prefix(Self::token_of(*token), prefix)?;
                Ok(Said::Deleted(deleted.keys))
            }
            Call::Raise { space, token, key } => {
                self.spaces[*space].raise(Self::token_of(*token), key).map(raised)
            }
            Call::RaiseAll { space, token } => {
                self.spaces[*space].raise_all(Self::token_of(*token)).map(raised)
            }
            Call::Advance { token } => self.db.advance_tokens(Self::token_of(*token)).map(|()| Said::Ok),
            Call::Acquire { .. } => unreachable!("see `acquire`"),
            Call::Get { space, key } => {
                let value = self.spaces[*space].get(key)?;
                Ok(Said::Value(value.map(|v| (v.bytes().into(), v.token().get(), v.lsn().get()))))
            }
            Call::Mark { space, key } => {
                Ok(Said::Mark(self.spaces[*space].mark(key)?.map(|mark| mark.get())))
            }
        }
    }

    // What is held against it.

    /// The model with a call applied, and the lsn it took, if it was admitted.
    fn predict(&mut self, call: &Call) -> (Model, Vec<Said>, Option<u64>) {
        self.catch_up();
        let mut next = self.model.clone();
        let said = next.answer(call);
        let lsn = (next.lsn > self.model.lsn).then_some(next.lsn);
        (next, said, lsn)
    }

    /// Records of released leases ride with the groups and take an lsn each.
    fn catch_up(&mut self) -> u64 {
        let durable = self.db.last_lsn().get();
        self.model.lsn = self.model.lsn.max(durable);
        self.history.durable = self.history.durable.max(durable);
        durable
    }

    fn append(&mut self, next: Model) {
        self.history.states.push(Arc::new(next.clone()));
        self.model = next;
    }

    pub fn ask(&mut self, call: Call) {
        let before = self.db.last_lsn().get();
        let (next, expected, lsn) = self.predict(&call);
        let result = self.perform(&call);
        if let Err(error) = &result {
            check_failure(error);
        }
        let unknown = result.as_ref().is_err_and(|error| error.outcome() == Outcome::Unknown);
        self.judge(&call, before, next, expected, lsn, say(result), unknown);
    }

    #[allow(clippy::too_many_arguments, reason = "one answer and all that is known of it")]
    fn judge(
        &mut self,
        call: &Call,
        before: u64,
        next: Model,
        expected: Vec<Said>,
        lsn: Option<u64>,
        said: Said,
        unknown: bool,
    ) {
        if self.trace {
            eprintln!("{call:?}\n    at {lsn:?}: {said:?}");
        }
        match (&said, lsn) {
            (Said::Failed(_), lsn) => {
                self.failed += 1;
                // It may have been appended, or certainly not: both are believed, and checked later.
                if unknown && lsn.is_some() {
                    self.append(next);
                }
            }
            (said, Some(lsn)) if expected.contains(said) => {
                assert!(self.db.last_lsn().get() >= lsn, "{call:?} was acknowledged and is not durable");
                self.append(next);
            }
            (said, _) => self.explain(call, before, said),
        }
        self.catch_up();
    }

    /// An answer that changes nothing must be the one of a state that was durable when it was given, and
    /// no older than what was known when it was asked for (D4).
    fn explain(&self, call: &Call, before: u64, said: &Said) {
        let after = self.db.last_lsn().get();
        let from = self.history.states.partition_point(|state| state.lsn <= before) - 1;
        let states = self.history.states[from..].iter().take_while(|state| state.lsn <= after);
        let mut answers = states.map(|state| {
            let mut state = Model::clone(state);
            let lsn = state.lsn;
            let answers = state.answer(call);
            // What was done cannot be an answer that changes nothing.
            if state.lsn > lsn { Vec::new() } else { answers }
        });
        assert!(
            answers.any(|answers| answers.contains(said)),
            "{call:?} was answered {said:?}, which no state from lsn {before} to {after}, the durable one, \
             explains; the newest appended is {:?}",
            self.model.clone().answer(call)
        );
    }

    pub fn submit(&mut self, call: Call) {
        let before = self.db.last_lsn().get();
        let (next, expected, lsn) = self.predict(&call);
        let plain = matches!(&call, Call::Write { changes, expect, op: None } if changes.len() == 1 && expect.is_empty());
        let Call::Write { changes, .. } = &call else { unreachable!() };
        let first = &changes[0];
        let (space, token) = (&self.spaces[first.space], Self::token_of(first.token));
        let faults = self.disk.faults_fired();
        let submitted = match first.kind {
            Kind::Put if plain => space.submit_put(token, first.key, &first.value),
            Kind::Delete if plain => space.submit_delete(token, first.key),
            _ => self.batch(&call).and_then(|batch| batch.submit()),
        };
        // What a fault did to it, its commit says: it may not even have been appended.
        let submitted = match submitted {
            Ok(commit) if self.disk.faults_fired() > faults => {
                let result = commit.wait();
                let unknown = result.as_ref().is_err_and(|error| error.outcome() == Outcome::Unknown);
                return self.judge(&call, before, next, expected, lsn, say(result.map(done)), unknown);
            }
            submitted => submitted,
        };
        match submitted {
            Ok(commit) => {
                if lsn.is_some() {
                    self.append(next);
                }
                if self.trace {
                    eprintln!("submitted {call:?}\n    at {lsn:?}");
                }
                self.pending.push(Pending { call, commit, before, lsn });
            }
            Err(error) => {
                check_failure(&error);
                let unknown = error.outcome() == Outcome::Unknown;
                self.judge(&call, before, next, expected, lsn, say(Err(error)), unknown);
            }
        }
    }

    /// Waits for one of the commits, not always the oldest; some are dropped.
    fn wait_for_one(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let at = self.rng.below(self.pending.len() as u64) as usize;
        let Pending { call, commit, before, lsn } = self.pending.remove(at);
        if self.rng.chance(10) {
            return drop(commit);
        }
        let was_poisoned = !is_healthy(&self.db);
        let result = commit.wait();
        if let Err(error) = &result {
            check_failure(error);
        }
        let said = say(result.map(done));
        if self.trace {
            eprintln!("waited for {call:?}: {said:?}");
        }
        match (&said, lsn) {
            (Said::Failed(_), lsn) => {
                self.failed += 1;
                assert!(
                    lsn.is_none_or(|lsn| lsn > self.db.last_lsn().get()),
                    "a durable write was answered {said:?}"
                );
            }
            (said, Some(lsn)) => {
                assert_eq!(*said, Said::Done(lsn), "{call:?}");
                assert!(self.db.last_lsn().get() >= lsn, "{call:?} was acknowledged and is not durable");
                assert!(
                    !was_poisoned || self.history.durable >= lsn,
                    "a poisoned store acknowledged {call:?}"
                );
            }
            (said, None) => self.explain(&call, before, said),
        }
        self.catch_up();
    }

    pub fn acquire(&mut self, space: usize, key: &'static [u8]) {
        let call = Call::Acquire { space, key };
        let (next, expected, lsn) = self.predict(&call);
        let owner = OwnerId::new(u128::from(self.rng.next()));
        let ttl = Duration::from_secs(5 + self.rng.below(10));
        let fence = fence_of(space, key);
        let result = self.spaces[space].lease(key).owner(owner).ttl(ttl).acquire();
        let result = match result {
            Ok(lease) => {
                assert!(lease.token().get() > self.history.token, "a token was handed out twice");
                self.history.token = lease.token().get();
                let token = lease.token().get();
                let old = self.leases.insert((space, fence), lease);
                assert!(old.is_none_or(|old| !old.is_live()), "two live leases on one fence");
                Ok(Said::Granted(token))
            }
            Err(error) => {
                check_failure(&error);
                Err(error)
            }
        };
        let unknown = result.as_ref().is_err_and(|error| error.outcome() == Outcome::Unknown);
        let said = say(result);
        if said == Said::Held {
            assert!(self.leases.get(&(space, fence)).is_some_and(Lease::is_live), "held by nobody");
            return;
        }
        self.judge(&call, self.history.durable, next, expected, lsn, said, unknown);
    }

    /// D5: nothing is acknowledged any more, reads of what is durable go on, refusals rest on it.
    fn check_poisoned(&mut self) {
        // A disk that is well again heals nothing.
        self.disk.clear_faults();
        let durable = self.db.last_lsn().get();
        let model = self.history.at(durable).clone();
        match shown(&self.db) {
            // Positioned reads need power.
            Err(_) if self.disk.is_stopped() => return,
            shown => assert_eq!(shown.expect("reads go on"), model.shown(), "reads of a poisoned store"),
        }
        for (at, (space, known)) in self.spaces.iter().zip(&model.spaces).enumerate() {
            let floor = known.floor;
            let raised = space.raise_all(Self::token_of(floor.max(2) - 1));
            match raised {
                Err(Error::Fenced { .. }) => assert!(known.is_below_floor(floor.max(2) - 1)),
                Err(Error::Poisoned { .. }) => assert!(!known.is_below_floor(floor.max(2) - 1)),
                other => panic!("a floor raised after a failed sync, from {floor}: {other:?}"),
            }
            for key in KEYS {
                let mark = model.mark(at, key).unwrap_or(0);
                let current = space.put(Self::token_of(mark.max(1)), key, b"more");
                assert!(
                    matches!(current, Err(Error::Poisoned { .. })) || known.is_below_floor(mark),
                    "a write after a failed sync: {current:?}"
                );
                if mark > 1 {
                    let late = space.put(Self::token_of(mark - 1), key, b"late");
                    assert!(
                        matches!(late, Err(Error::Fenced { .. })),
                        "a late write after a failed sync: {late:?}"
                    );
                }
                if SPACES[at].2 == Tokens::Store {
                    let lease = space.lease(key).acquire();
                    assert!(lease.is_err(), "a grant after a failed sync");
                }
            }
        }
        assert!(matches!(self.db.advance_tokens(Token::MAX), Err(Error::Poisoned { .. })));
        assert_eq!(self.db.last_lsn().get(), durable);
    }

    /// Whether the whole store shows exactly what the model says now.
    pub fn check(&mut self) {
        self.catch_up();
        assert_eq!(
            shown(&self.db).expect("the store is whole"),
            self.history.at(self.history.durable).shown()
        );
    }

    /// Takes a grant: its token must be above every token that was ever handed out, and the next one.
    pub fn check_grant(&mut self) {
        if let Some(at) = (0..self.model.spaces.len())
            .find(|&at| SPACES[at].2 == Tokens::Store && SPACES[at].1 != Scope::Keyspace)
        {
            self.acquire(at, b"unused");
        }
    }

    /// Ends the run without closing the store in an orderly way, and gives what is known of it.
    pub fn into_history(mut self) -> History {
        self.catch_up();
        let live = self.leases.iter().filter(|(_, lease)| lease.is_live());
        self.history.held = live.map(|(&(at, fence), lease)| (at, fence, lease.token().get())).collect();
        self.history
    }
}

fn is_healthy(db: &Db) -> bool {
    db.health().is_writable()
}

fn is_traced() -> bool {
    static IS_TRACED: OnceLock<bool> = OnceLock::new();
    *IS_TRACED.get_or_init(|| std::env::var_os("TIDEWALL_CRASH_TRACE").is_some())
}
