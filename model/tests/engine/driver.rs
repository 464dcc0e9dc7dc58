//! The same actions through the model and the engine, and every answer compared.
//!
//! The engine runs without threads on the simulated disk. What it tells of its state (marks, values, holders,
//! the lsn up to which it is durable) is compared after every step. The model says what may come of a crash:
//! one of the ways in which what was not synced is cut; what the engine makes of it must be one of them.

use std::collections::HashMap;
use tidewall::storage::{Crash, SimDisk};
use tidewall::{
    Commit, Db, Error, Keyspace, KeyspaceOptions, Lease, Lsn, ManualClock, Mark, OperationId, Options,
    OwnerId, Raised, Scope, Token, Tokens,
};
use tidewall_model::actions::Action;
use tidewall_model::rules::{Answer, Intent, LastOperation, Model, Source};
use tidewall_model::state::{Kind, Own, PLACES, State, TOKENS};

mod upkeep;

/// How engine and model have come apart.
pub type Difference = String;

macro_rules! same {
    ($engine:expr, $model:expr, $($what:tt)*) => {
        match (&$engine, &$model) {
            (engine, model) if engine == model => {}
            (engine, model) => {
                return Err(format!("{}: the engine says {engine:?}, the model {model:?}", format!($($what)*)));
            }
        }
    };
}

/// SplitMix64: small, seeded, and the same everywhere.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        ((u128::from(word) * bound as u128) >> 64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// How often what was done and answered.
#[derive(Default)]
pub struct Counts {
    pub actions: HashMap<&'static str, u64>,
    pub answers: HashMap<&'static str, u64>,
    /// What of the un-synced ops a crash has left, where there were some.
    pub crashes: HashMap<&'static str, u64>,
}

/// Half of a lease's time and a bit more, in seconds: twice this is the end of one that is not renewed.
const TTL_SECS: u64 = 10;
const HALF_SECS: u64 = 6;

pub struct Driver<'c> {
    model: Model,
    scope: Scope,
    state: State,
    rng: Rng,
    counts: &'c mut Counts,

    /// All of the disk, and the directory of the store on it; of the newest checkpoint.
    disk: SimDisk,
    dir: String,
    copy: String,
    clock: ManualClock,
    db: Db,
    spaces: Vec<Keyspace>,
    /// What is written to it is no concern of the model; it fills segments.
    filler: Keyspace,
    opens: u64,
    /// The engine compacts within its writes too, not only when it is asked to.
    by_itself: bool,
    /// Up to which lsn the engine was durable when the model was brought up to it.
    durable: Lsn,

    /// The lease on each fence, and those that are over.
    held: Vec<Option<Lease>>,
    over: Vec<Lease>,
    /// Who was granted each token.
    owners: HashMap<u8, OwnerId>,
    /// Submitted and not durable, with the lsn in the model.
    commits: Vec<(Commit, u8)>,
    /// From the model's lsns to the engine's, as far as they are known; and to the value written there.
    lsns: HashMap<u8, Lsn>,
    values: HashMap<u8, Vec<u8>>,
    written: u64,
    /// The newest token of each fence whose lease was over before its time or in it, and how.
    given_up: Vec<(u8, Action)>,
}

/// What became of a call of the engine.
enum Outcome {
    Told(Result<(), Error>),
    /// The power went in the middle of it.
    Cut,
}

impl<'c> Driver<'c> {
    pub fn new(model: Model, scope: Scope, seed: u64, counts: &'c mut Counts) -> Self {
        let (disk, clock) = (SimDisk::new(), ManualClock::new());
        let by_itself = model.bounds.segments > 1 && seed.is_multiple_of(3);
        let (db, spaces, filler) = open(&model, scope, by_itself, &disk, &clock, 0);
        Driver {
            held: model.fences().map(|_| None).collect(),
            given_up: model.fences().map(|_| (0, Action::GraceEnds)).collect(),
            model,
            scope,
            state: State::default(),
            rng: Rng(seed),
            counts,
            disk,
            dir: String::new(),
            copy: String::new(),
            clock,
            durable: db.last_lsn(),
            db,
            spaces,
            filler,
            opens: 0,
            by_itself,
            over: Vec::new(),
            owners: HashMap::new(),
            commits: Vec::new(),
            lsns: HashMap::new(),
            values: HashMap::new(),
            written: 0,
        }
    }

    /// So many random steps.
    pub fn run(&mut self, steps: usize) -> Result<(), Difference> {
        let (mut actions, mut trail) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            self.model.actions(&self.state, &mut actions);
            self.add_strangers(&mut actions);
            actions.retain(|action| self.is_driven(*action));
            let Some(action) = self.choose(&actions) else { break };
            trail.push(action);
            self.step(action).map_err(|what| format!("{what}\n    behind {trail:?}"))?;
            if !self.make_room().map_err(|what| format!("{what}\n    behind {trail:?}"))? {
                break;
            }
        }
        if self.model.bounds.checkpoint && self.rng.chance(10) {
            return self.salvage_damaged().map_err(|what| format!("{what}\n    behind {trail:?}"));
        }
        Ok(())
    }

    /// A kind first, so that the many ways to write do not crowd out the rest.
    fn choose(&mut self, actions: &[Action]) -> Option<Action> {
        let mut kinds: Vec<_> = actions.iter().map(|action| action.number()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        if kinds.is_empty() {
            return None;
        }
        let number = |action: Action| action.number();
        let crash = number(Action::Crash { keep: 0, killed: false });
        let put = number(Action::Put { fence: 0, token: 1, op: 0 });
        // While something is on its way more is sent after it, or the power goes; few crashes otherwise.
        let is_idle = self.commits.is_empty();
        let kind = match self.rng.below(10) {
            0..6 if !is_idle => put,
            6 if !is_idle && kinds.contains(&crash) => crash,
            _ => self.rng.pick(&kinds),
        };
        let kind = if kind == crash && is_idle && self.rng.chance(80) { self.rng.pick(&kinds) } else { kind };
        let of_kind: Vec<_> = actions.iter().copied().filter(|action| action.number() == kind).collect();
        // Most tokens are refused; often one that is not is preferred.
        let leads_on = |action: &Action| match self.model.take(&self.state, *action) {
            Ok(Some(taken)) => taken.state != self.state,
            _ => true,
        };
        let welcome: Vec<_> = of_kind.iter().copied().filter(leads_on).collect();
        let prefers = !welcome.is_empty() && self.rng.chance(60);
        Some(self.rng.pick(if prefers { &welcome } else { &of_kind }))
    }

    /// Tokens that nobody was given.
    fn add_strangers(&self, actions: &mut Vec<Action>) {
        let token = self.state.counter + 1;
        for fence in self.model.fences() {
            let space = self.model.space(fence);
            if self.model.source(space) == Source::Store && (token as usize) < TOKENS {
                actions.push(Action::Put { fence, token, op: 0 });
                actions.push(Action::Raise { fence, token });
                actions.push(Action::RaiseAll { space, token });
            }
        }
    }

    /// Within the bounds, and something that the engine can be asked for: it syncs all that is appended, and
    /// only for somebody who waits.
    fn is_driven(&self, action: Action) -> bool {
        match action {
            Action::Sync { to } => to == self.state.len && !self.commits.is_empty(),
            Action::Crash { keep, .. } => keep == self.state.durable,
            // `retire_below` would answer that it is fenced.
            Action::Fold { space, token }
                if self.model.source(space) == Source::External
                    && token + 1 < self.state.appended.raised[space] =>
            {
                false
            }
            _ => !matches!(self.model.take(&self.state, action), Ok(None)),
        }
    }

    fn key(&self, fence: usize) -> Vec<u8> {
        let mut key = self.name(fence);
        match self.scope {
            Scope::Prefix(_) => key.extend_from_slice(b"key"),
            Scope::Keyspace => key.extend_from_slice(b"the key"),
            _ => {}
        }
        key
    }

    fn name(&self, fence: usize) -> Vec<u8> {
        match self.scope {
            Scope::Prefix(_) if self.model.layout.slots => format!("job.{fence}/").into_bytes(),
            Scope::Prefix(_) => format!("f{fence}/").into_bytes(),
            Scope::Keyspace => Vec::new(),
            _ => format!("f{fence}").into_bytes(),
        }
    }

    fn space(&self, fence: usize) -> Keyspace {
        self.spaces[self.model.space(fence)].clone()
    }

    /// One action through both.
    fn step(&mut self, action: Action) -> Result<(), Difference> {
        *self.counts.actions.entry(Action::NAMES[action.number()]).or_default() += 1;
        if let Action::Release { fence } | Action::Expire { fence } = action {
            self.given_up[fence] = (self.state.live[fence], action);
        }
        match action {
            Action::Acquire { fence } => self.acquire(action, Some(fence), None, None),
            Action::AcquireSlot { slots } => self.acquire(action, None, Some(slots as u32), None),
            Action::Resume { fence } => self.acquire(action, Some(fence), None, Some(self.state.kept[fence])),
            Action::Put { fence, token, op } => self.write(action, fence, token, op, Kind::Put),
            Action::Delete { fence, token, op } => self.write(action, fence, token, op, Kind::Delete),
            Action::Raise { fence, token } => {
                let (space, key) = (self.space(fence), self.key(fence));
                self.raise(action, token, |token| space.raise(token, &key))
            }
            Action::RaiseAll { space, token } => {
                let space = self.spaces[space].clone();
                self.raise(action, token, |token| space.raise_all(token))
            }
            Action::Break { fence } => self.break_lease(action, fence),
            Action::Release { fence } => {
                let lease = self.held[fence].take().ok_or("the driver holds no such lease")?;
                same!(lease.release().is_ok(), true, "the release");
                self.adopt()?;
                self.take(action)?;
                self.compare()
            }
            Action::Expire { fence } => {
                // What is kept after an open is kept for no longer than a lease lasts.
                if self.state.kept.iter().any(|kept| *kept != 0) {
                    self.take(Action::GraceEnds)?;
                }
                self.pass_time(Some(fence))?;
                self.take(action)?;
                self.compare()
            }
            Action::GraceEnds => {
                self.pass_time(None)?;
                self.take(action)?;
                self.compare()
            }
            Action::Issue => self.take(action),
            Action::Sync { .. } => {
                let at = self.rng.below(self.commits.len());
                let (commit, lsn) = self.commits.swap_remove(at);
                let known = commit.wait().map_err(|e| format!("a commit failed: {e}"))?;
                self.lsns.insert(lsn, known);
                self.adopt()?;
                self.synced()?;
                self.compare()
            }
            Action::Crash { .. } => self.crash_or_close(),
            Action::Fold { space, token } if self.model.source(space) == Source::External => {
                self.retire_below(action, space, token)
            }
            Action::Fold { .. } | Action::Forget { .. } | Action::Move { .. } | Action::Retire { .. } => {
                self.compact()
            }
            Action::Rotate => self.fill(action),
            Action::Checkpoint => self.checkpoint(action),
            Action::Restore => self.restore(action),
            Action::Renew { .. } => Err("only a mistaken model asks for it".to_owned()),
        }
    }

    // Each kind of call.

    fn acquire(
        &mut self,
        action: Action,
        fence: Option<usize>,
        slots: Option<u32>,
        resume: Option<u8>,
    ) -> Result<(), Difference> {
        let space = self.spaces[fence.map_or(0, |fence| self.model.space(fence))].clone();
        let name = fence.map_or(b"job".to_vec(), |fence| self.name(fence));
        self.written += 1;
        let owner = match resume {
            Some(token) => self.owners[&token],
            None => OwnerId::new(self.written.into()),
        };
        // Of the grant, if there is one.
        self.owners.insert(self.state.counter + 1, owner);
        let mut request = space.lease(&name).ttl(secs(TTL_SECS)).owner(owner);
        if let Some(n) = slots {
            request = request.slots(n);
        }
        if let Some(token) = resume {
            request = request.resume(number(token));
        }
        let mut lease = None;
        let outcome = self.call(|| {
            lease = Some(request.try_acquire()?);
            Ok(())
        });
        let told = match outcome {
            Outcome::Told(told) => told,
            Outcome::Cut => return self.recover(Some(action)),
        };
        self.adopt()?;
        let answer = self.take_answer(action)?;
        self.note(&answer);
        match (told, answer) {
            (Err(Error::Held { .. }), Answer::Held) => {}
            (Ok(()), Answer::Granted(token)) => {
                let fence = self.model.fences().find(|&fence| self.state.pending[fence] == token);
                let fence = fence.ok_or("the model has granted nothing")?;
                self.synced()?;
                let lease = lease.ok_or("no lease")?;
                same!(lease.token().get(), u64::from(token), "the token");
                same!(lease.fence(), &self.name(fence)[..], "the fence");
                same!(lease.predecessor(), predecessor(&self.state.published.own[fence]), "the predecessor");
                if let Some(before) = self.held[fence].replace(lease) {
                    self.over.push(before);
                }
            }
            (told, answer) => return Err(format!("the engine says {told:?}, the model {answer:?}")),
        }
        self.compare()
    }

    fn write(
        &mut self,
        action: Action,
        fence: usize,
        token: u8,
        op: u8,
        kind: Kind,
    ) -> Result<(), Difference> {
        let (space, key) = (self.space(fence), self.key(fence));
        self.written += 1;
        let mut value = format!("value {}", self.written).into_bytes();
        // Some are longer than a sector, so that a crash can leave a part of a group.
        if self.rng.chance(50) {
            value.resize(20 + self.rng.below(1_500), b'.');
        }
        let mut batch = self.db.batch();
        let added = match kind {
            Kind::Put => batch.put(&space, number(token), &key, &value).map(drop),
            _ => batch.delete(&space, number(token), &key).map(drop),
        };
        added.map_err(|e| format!("{e}"))?;
        if op != 0 {
            batch.operation(OperationId::new(op.into()));
        }
        let lsn = self.state.next;
        let intent = Intent::Write { op };
        let is_accepted =
            |model: &Model, s: &State| model.judge(s, &s.appended, fence, token, intent).is_none();
        // A refusal is waited for, and so are some writes.
        let mut waits = !is_accepted(&self.model, &self.state) || self.rng.chance(20);
        let (mut commit, mut known) = (None, None);
        let outcome = self.call(|| {
            let submitted = batch.submit()?;
            match waits {
                true => known = Some(submitted.wait()?),
                false => commit = Some(submitted),
            }
            Ok(())
        });
        let mut told = match outcome {
            Outcome::Told(told) => told,
            Outcome::Cut => {
                self.values.extend([(lsn, value.clone()), (lsn + 1, value.clone()), (lsn + 2, value)]);
                return self.recover(Some(action));
            }
        };
        self.adopt()?;
        // Behind what was folded, by which it may be fenced now.
        let lsn = self.state.next;
        if !is_accepted(&self.model, &self.state)
            && let Some(refused) = commit.take()
        {
            (told, waits) = (refused.wait().map(drop), true);
        }
        let appended = self.take_answer(action)?;
        if let (Ok(()), Answer::Done) = (&told, &appended) {
            self.values.insert(lsn, value);
            self.lsns.remove(&lsn);
            if let Some(known) = known {
                self.lsns.insert(lsn, known);
            }
            self.commits.extend(commit.map(|commit| (commit, lsn)));
        }
        self.settle(told, appended, waits, |model, s| {
            model.judge(s, &s.published, fence, token, Intent::Write { op })
        })
    }

    fn raise(
        &mut self,
        action: Action,
        token: u8,
        raise: impl FnOnce(Token) -> tidewall::Result<Raised>,
    ) -> Result<(), Difference> {
        let mut already = false;
        let outcome = self.call(|| {
            already = raise(number(token))? == Raised::Already;
            Ok(())
        });
        let told = match outcome {
            Outcome::Told(told) => told,
            Outcome::Cut => return self.recover(Some(action)),
        };
        self.adopt()?;
        let appended = self.take_answer(action)?;
        if told.is_ok() {
            same!(already, appended == Answer::Already, "whether it was raised before");
        }
        let waits = appended != Answer::Already;
        self.settle(told, appended, waits, |model, s| {
            // Judged by what is durable: everything appended is taken away.
            let durable = State { appended: s.published, ..*s };
            match model.take(&durable, action) {
                Ok(Some(taken)) if taken.answer != Answer::Done => Some(taken.answer),
                _ => None,
            }
        })
    }

    fn break_lease(&mut self, action: Action, fence: usize) -> Result<(), Difference> {
        let (space, key) = (self.space(fence), self.key(fence));
        let token = self.state.live[fence].max(self.state.kept[fence]);
        let mut broken = None;
        let outcome = self.call(|| {
            broken = space.break_lease(&key, "for a test")?;
            Ok(())
        });
        match outcome {
            Outcome::Told(Ok(())) => {}
            Outcome::Told(Err(e)) => return Err(format!("{e}")),
            Outcome::Cut => return self.recover(Some(action)),
        }
        self.adopt()?;
        self.take(action)?;
        self.synced()?;
        let broken = broken.ok_or("nothing was broken")?;
        same!(broken.token.get(), u64::from(token), "what was broken");
        same!(broken.mark.get(), u64::from(self.state.counter), "the mark of the fence");
        self.compare()
    }

    /// Runs a call of the engine; now and then the power goes at one of its calls of the disk.
    fn call(&mut self, call: impl FnOnce() -> tidewall::Result<()>) -> Outcome {
        if self.state.crashes >= self.model.bounds.crashes || !self.rng.chance(8) {
            return Outcome::Told(call());
        }
        let calls = if self.by_itself && self.rng.chance(50) { 60 } else { 4 };
        self.cut_within(calls, call)
    }

    /// Runs a call of the engine; the power goes at one of the next calls of the disk, if there are so many.
    fn cut_within(&mut self, calls: usize, call: impl FnOnce() -> tidewall::Result<()>) -> Outcome {
        self.disk.stop_at(self.disk.calls() + self.rng.below(calls) as u64);
        let told = call();
        if self.disk.is_stopped() {
            return Outcome::Cut;
        }
        self.disk.stop_at(u64::MAX);
        Outcome::Told(told)
    }

    /// Compares the answer to a write. One that rests on what is not durable is a difference: without a sync
    /// it must be the one that follows from what is durable alone.
    fn settle(
        &mut self,
        told: Result<(), Error>,
        appended: Answer,
        waits: bool,
        from_durable: impl Fn(&Model, &State) -> Option<Answer>,
    ) -> Result<(), Difference> {
        if self.db.last_lsn() > self.durable || told.is_ok() && waits {
            self.synced()?;
        }
        let answer = match appended {
            Answer::Done | Answer::Already => appended,
            refused => from_durable(&self.model, &self.state).unwrap_or(refused),
        };
        self.note(&answer);
        match (told, answer) {
            (Ok(()), Answer::Done | Answer::Already) => {}
            (Err(error), answer) => self.compare_refusal(&error, answer)?,
            (Ok(()), answer) => return Err(format!("the engine accepts, the model says {answer:?}")),
        }
        self.compare()
    }

    fn compare_refusal(&mut self, error: &Error, answer: Answer) -> Result<(), Difference> {
        let said = match *error {
            Error::Fenced { mark, last_operation, .. } => {
                let last_operation = match last_operation {
                    tidewall::LastOperation::Committed(op) => LastOperation::Committed(op.get() as u8),
                    tidewall::LastOperation::Nothing => LastOperation::Nothing,
                    _ => LastOperation::Unknown,
                };
                Answer::Fenced { mark: mark.get() as u8, last_operation }
            }
            Error::UnknownToken { .. } => Answer::UnknownToken,
            Error::NeedsFloor { .. } => Answer::NeedsFloor,
            Error::Duplicate { lsn } => {
                let Answer::Duplicate { lsn: model } = answer else {
                    return Err(format!("the engine says {error:?}, the model {answer:?}"));
                };
                let known = *self.lsns.entry(model).or_insert(lsn);
                same!(lsn, known, "where it was committed");
                answer
            }
            Error::StaleOperation { last, .. } => Answer::StaleOperation { last: last.get() as u8 },
            _ => return Err(format!("the engine says {error:?}, the model {answer:?}")),
        };
        same!(said, answer, "the refusal");
        Ok(())
    }

    // Time, and the end of it.

    /// Lets a lease's time pass, while all but one are renewed.
    fn pass_time(&mut self, but: Option<usize>) -> Result<(), Difference> {
        for _ in 0..2 {
            self.clock.advance(secs(HALF_SECS));
            let renewed = self.held.iter().enumerate().filter(|(fence, _)| Some(*fence) != but);
            for (fence, lease) in renewed.filter_map(|(fence, lease)| Some((fence, lease.as_ref()?))) {
                same!(lease.renew().is_ok(), self.state.live[fence] != 0, "renewing f{fence}");
            }
        }
        Ok(())
    }

    fn crash_or_close(&mut self) -> Result<(), Difference> {
        if self.rng.chance(70) {
            if self.rng.chance(60)
                && let Some((commit, lsn)) = self.commits.pop()
            {
                // What was submitted is on its way: written, and not synced.
                self.disk.stop_at(self.disk.calls() + 1 + self.rng.below(2) as u64);
                if let Ok(known) = commit.wait() {
                    self.lsns.insert(lsn, known);
                    self.synced()?;
                }
            }
            return self.recover(None);
        }
        self.db.clone().close().map_err(|e| format!("closing: {e}"))?;
        self.adopt()?;
        if self.state.visible < self.state.len {
            self.take(Action::Sync { to: self.state.len })?;
        }
        self.take(Action::Crash { keep: self.state.len, killed: false })?;
        self.reopen();
        self.keep_as_found();
        self.compare()
    }

    /// The power goes, in the middle of `action` or between two: what is found must be a state that the model
    /// can come to. Unless it compacts, which appends frames too, the lsn tells how much is left.
    fn recover(&mut self, action: Option<Action>) -> Result<(), Difference> {
        let seed = self.rng.below(usize::MAX) as u64;
        let policies = [
            Crash::None,
            Crash::All,
            Crash::Subset { percent: 50 },
            Crash::Prefix,
            Crash::Torn { bytes: true },
        ];
        // The engine logs releases with the next group, behind what came after them.
        let un_synced = &self.state.ops()[self.state.durable as usize..];
        let is_in_order = un_synced.iter().all(|op| op.kind != Kind::Release);
        let policy = self.rng.pick(if is_in_order { &policies } else { &policies[..2] });
        // Compaction syncs on the way. And a release that no room is left for in a segment is not logged.
        let compacted = self.model.bounds.segments > 1;
        let durable = if compacted { self.durable } else { self.db.last_lsn() }.get();
        self.disk = self.disk.crash(policy, seed);
        self.reopen();
        let survived = (self.db.last_lsn().get() - durable) as usize;
        // What was folded was so first.
        let folded = self.fold_as_found(self.state)?;
        let mut before = vec![folded];
        if let Some(action) = action
            && let Ok(Some(taken)) = self.model.take(&folded, action)
        {
            before.insert(0, taken.state);
        }
        let mut differences = Vec::new();
        let known = self.lsns.clone();
        for state in before {
            for keep in (state.durable..=state.len).rev() {
                let (fewest, expected) = frames(&state, keep);
                let is_possible = fewest <= survived && (compacted || survived <= expected);
                if !is_possible {
                    continue;
                }
                let crashed = self.model.take(&state, Action::Crash { keep, killed: false });
                let Some(taken) = crashed.map_err(str::to_owned)? else { continue };
                self.state = taken.state;
                self.keep_as_found();
                match self.compare() {
                    Ok(()) => {
                        self.note_crash(&state, keep);
                        return Ok(());
                    }
                    Err(difference) => differences.push(difference),
                }
                self.lsns.clone_from(&known);
            }
        }
        Err(format!(
            "after the crash, with {survived} frames of what was not synced: {}",
            differences.join("; or ")
        ))
    }

    fn note_crash(&mut self, before: &State, keep: u8) {
        let name = match keep {
            _ if before.durable == before.len => return,
            keep if keep == before.len => "all",
            keep if keep == before.durable => "none",
            _ => "some",
        };
        *self.counts.crashes.entry(name).or_default() += 1;
    }

    fn reopen(&mut self) {
        self.opens += 1;
        let disk = self.store();
        let (db, spaces, filler) =
            open(&self.model, self.scope, self.by_itself, &disk, &self.clock, self.opens);
        self.durable = db.last_lsn();
        (self.db, self.spaces, self.filler) = (db, spaces, filler);
        self.commits.clear();
        self.over.clear();
        self.held.iter_mut().for_each(|lease| *lease = None);
        // Of what was lost, another op may have the lsn now.
        let durable = self.state.top;
        self.lsns.retain(|lsn, _| *lsn <= durable);
    }

    // The model, and the comparison.

    fn take_answer(&mut self, action: Action) -> Result<Answer, Difference> {
        let taken = self.model.take(&self.state, action).map_err(|wrong| format!("the model: {wrong}"))?;
        let taken = taken.ok_or("the model cannot do it")?;
        self.state = taken.state;
        Ok(taken.answer)
    }

    fn take(&mut self, action: Action) -> Result<(), Difference> {
        self.take_answer(action).map(drop)
    }

    /// Somebody has waited, so all that was appended is durable: every commit has its answer.
    fn synced(&mut self) -> Result<(), Difference> {
        let lsn = self.db.last_lsn();
        if self.state.visible < self.state.len {
            // Compaction may have done it on the way.
            let is_synced = lsn > self.durable || self.model.bounds.segments > 1;
            same!(is_synced, true, "whether something was synced");
            self.take(Action::Sync { to: self.state.len })?;
        }
        self.durable = lsn;
        for (commit, lsn) in std::mem::take(&mut self.commits) {
            same!(commit.is_done(), true, "the commit of lsn {lsn}");
            let known = commit.wait().map_err(|e| format!("a commit failed: {e}"))?;
            self.lsns.insert(lsn, known);
        }
        Ok(())
    }

    fn note(&mut self, answer: &Answer) {
        let name = match answer {
            Answer::Done => "done",
            Answer::Already => "already",
            Answer::Granted(_) => "granted",
            Answer::Fenced { last_operation: LastOperation::Committed(_), .. } => "fenced, committed",
            Answer::Fenced { last_operation: LastOperation::Nothing, .. } => "fenced, nothing",
            Answer::Fenced { last_operation: LastOperation::Unknown, .. } => "fenced, unknown",
            Answer::UnknownToken => "unknown token",
            Answer::NeedsFloor => "needs floor",
            Answer::Duplicate { .. } => "duplicate",
            Answer::StaleOperation { .. } => "stale",
            Answer::Held => "held",
        };
        *self.counts.answers.entry(name).or_default() += 1;
    }

    /// Marks, values and holders, as they can be seen.
    fn compare(&mut self) -> Result<(), Difference> {
        for space in 0..self.spaces.len() {
            let floor = self.spaces[space].floor();
            let (raised, folded) = (self.state.published.raised[space], self.state.published.folded[space]);
            let mark = floor.map_or(0, |floor| floor.mark.get());
            same!(mark, u64::from(raised.max(folded)), "the floor of k{space}");
            same!(self.folded(space), folded, "what is folded of k{space}");
        }
        for fence in self.model.fences() {
            let (space, key) = (self.space(fence), self.key(fence));
            let mark = space.mark(&key).map_err(|e| e.to_string())?.map_or(0, Mark::get);
            same!(mark, u64::from(self.model.mark(&self.state.published, fence)), "the mark of f{fence}");
            self.compare_value(fence, &space, &key)?;
            self.compare_lease(fence, &space)?;
        }
        Ok(())
    }

    fn compare_value(&mut self, fence: usize, space: &Keyspace, key: &[u8]) -> Result<(), Difference> {
        let found = space.get(key).map_err(|e| e.to_string())?;
        let version = self.model.version(fence, self.state.visible_ops());
        same!(found.is_some(), version % 2 == 1, "whether f{fence} has a value");
        let Some(found) = found else { return Ok(()) };
        let lsn = version / 2;
        let brief =
            |value: &[u8]| (String::from_utf8_lossy(&value[..value.len().min(12)]).into_owned(), value.len());
        let expected = self.values.get(&lsn).map(|value| brief(value));
        same!(Some(brief(found.bytes())), expected, "the value of f{fence}, its beginning and length");
        let of = self.state.ops().iter().find(|op| op.own.lsn == lsn).ok_or("a value without its op")?;
        same!(found.token().get(), u64::from(of.own.mark), "the token of the value of f{fence}");
        let known = *self.lsns.entry(lsn).or_insert(found.lsn());
        same!(found.lsn(), known, "the lsn of the value of f{fence}");
        Ok(())
    }

    fn compare_lease(&mut self, fence: usize, space: &Keyspace) -> Result<(), Difference> {
        let (live, kept) = (self.state.live[fence], self.state.kept[fence]);
        let name = self.name(fence);
        let holders = space.holders(&name).unwrap();
        let holder = holders.iter().find(|holder| holder.fence == name);
        let shown = holder.map(|holder| (holder.token.get(), holder.is_live, holder.owner));
        let token = live.max(kept);
        let expected = (token != 0).then(|| (u64::from(token), live != 0, self.owners[&token]));
        same!(shown, expected, "the holder of f{fence}");
        let held = self.held[fence].as_ref().filter(|lease| lease.is_live());
        same!(held.map_or(0, |lease| lease.token().get()), u64::from(live), "the lease on f{fence}");
        if live == 0 {
            self.over.extend(self.held[fence].take());
        }
        // Upholds L4 here: what is over is over.
        let revived = self.over.iter().find(|lease| lease.is_live() || lease.renew().is_ok());
        same!(revived.map(Lease::token), None, "a lease that was over");
        Ok(())
    }
}

/// So many frames are the ops up to `keep` that are not synced, without and with the one of all releases: it is
/// left out where the grants of the next holders say as much.
fn frames(s: &State, keep: u8) -> (usize, usize) {
    let ops = &s.log[s.durable as usize..keep as usize];
    let releases = ops.iter().filter(|op| op.kind == Kind::Release).count();
    (ops.len() - releases, ops.len() - releases + usize::from(releases > 0))
}

fn open(
    model: &Model,
    scope: Scope,
    by_itself: bool,
    disk: &SimDisk,
    clock: &ManualClock,
    opens: u64,
) -> (Db, Vec<Keyspace>, Keyspace) {
    let grace = if model.bounds.grace { secs(TTL_SECS) } else { secs(0) };
    let options = Options::new()
        .storage(disk.clone())
        .clock(clock.clone())
        // Two lives of one store must not share their random bits.
        .deterministic(1 + opens * 1_000_003)
        .without_threads()
        .lease_grace(grace)
        .compaction(by_itself)
        .segment_bytes(16 << 10);
    let db = options.open("sim").expect("the store opens after any crash");
    let keyspace = |name: &str, scope, source| {
        let tokens = match source {
            Source::Store => Tokens::Store,
            Source::External => Tokens::External,
        };
        db.keyspace(name, KeyspaceOptions::new().scope(scope).tokens(tokens)).expect("a keyspace")
    };
    let count = model.layout.fences.iter().max().map_or(1, |last| last + 1);
    let spaces = (0..count).map(|space| keyspace(&format!("k{space}"), scope, model.source(space)));
    let spaces = spaces.collect();
    let filler = keyspace("filler", Scope::Keyspace, Source::External);
    (db, spaces, filler)
}

fn predecessor(own: &Own) -> Option<(Token, OperationId)> {
    (own.was != 0).then(|| (number(own.was), OperationId::new(own.was_op.into())))
}

fn number(token: u8) -> Token {
    Token::new(token.into()).expect("not zero")
}

fn secs(secs: u64) -> std::time::Duration {
    std::time::Duration::from_secs(secs)
}
