//! Compaction, folding and copies: what the engine does there is looked at behind its back, and the model says
//! whether it may.
//!
//! Which marks the engine folds, and when, is its own affair; that it may fold up to there is not. What it has
//! carried and dropped shows in nothing: so the model compacts all it can of its own log then. What a folded floor
//! covers is forgotten with it, wherever it may still lie in either log.

use super::{Action, Difference, Driver, Outcome, Own, PLACES, Source, State, number};
use tidewall::storage::{Crash, SimDisk};
use tidewall::{Error, Restore, Salvage, Token};

impl Driver<'_> {
    pub(super) fn store(&self) -> SimDisk {
        if self.dir.is_empty() { self.disk.clone() } else { self.disk.dir(&self.dir) }
    }

    /// Up to where the engine has folded.
    pub(super) fn folded(&self, space: usize) -> u8 {
        let forgotten = self.spaces[space].floor().and_then(|floor| floor.forgotten);
        forgotten.map_or(0, |mark| mark.get() as u8)
    }

    /// A state, and what the engine has folded behind it, which it may.
    pub(super) fn fold_as_found(&self, mut state: State) -> Result<State, Difference> {
        for space in 0..self.spaces.len() {
            let token = self.folded(space);
            if token == state.appended.folded[space] || self.model.source(space) == Source::External {
                continue;
            }
            let folded = self.model.take(&state, Action::Fold { space, token })?;
            let folded = folded.ok_or_else(|| {
                let (marks, live, kept) = (state.appended, state.live, state.kept);
                format!(
                    "the engine says that k{space} is folded up to {token}, the model not from {marks:?} with \
                     {live:?} live, {kept:?} kept, {} ops",
                    state.len
                )
            })?;
            state = folded.state;
        }
        Ok(state)
    }

    /// What the engine has folded and synced within its last call, which came before anything else in it.
    pub(super) fn adopt(&mut self) -> Result<(), Difference> {
        if self.model.bounds.segments == 1 {
            return Ok(());
        }
        let folded = self.fold_as_found(self.state)?;
        if folded != self.state {
            self.state = folded;
            *self.counts.answers.entry("folds").or_default() += 1;
        }
        if self.db.last_lsn() > self.durable {
            self.synced()?;
        }
        self.forget_folded();
        Ok(())
    }

    /// What a folded floor covers is forgotten at once, wherever it still lies in the log.
    pub(super) fn forget_folded(&mut self) {
        for fence in self.model.fences() {
            let folded = self.state.published.folded[self.model.space(fence)];
            for marks in [&mut self.state.appended, &mut self.state.published] {
                if marks.own[fence].mark <= folded {
                    marks.own[fence] = Own::default();
                }
            }
        }
    }

    /// Whom the open keeps a fence for, where it may do either: a release that finds the segment full is not
    /// logged; and compaction needs no grant that has run out.
    pub(super) fn keep_as_found(&mut self) {
        self.forget_folded();
        if self.model.bounds.segments == 1 {
            return;
        }
        for fence in self.model.fences() {
            let name = self.name(fence);
            let holders = self.space(fence).holders(&name).unwrap();
            let found =
                holders.iter().find(|holder| holder.fence == name).map_or(0, |it| it.token.get() as u8);
            let kept = &mut self.state.kept[fence];
            match self.given_up[fence] {
                (token, Action::Release { .. }) if *kept == 0 && found == token => *kept = token,
                (token, Action::Expire { .. }) if *kept == token && found == 0 => *kept = 0,
                _ => {}
            }
        }
    }

    pub(super) fn compact(&mut self) -> Result<(), Difference> {
        let db = self.db.clone();
        let compact = || db.compact().map(drop);
        let is_cut = self.state.crashes < self.model.bounds.crashes && self.rng.chance(25);
        match if is_cut { self.cut_within(60, compact) } else { Outcome::Told(compact()) } {
            Outcome::Told(told) => told.map_err(|e| format!("compacting: {e}"))?,
            Outcome::Cut => return self.recover(None),
        }
        self.adopt()?;
        self.compact_model()?;
        self.compare()
    }

    /// Everything that is needed to the end of the log, and the rest away.
    fn compact_model(&mut self) -> Result<(), Difference> {
        self.take_if_it_can(Action::Rotate)?;
        loop {
            let before = self.state;
            for at in 0..self.state.len as usize {
                (self.state.moves, self.state.appends) = (0, 0);
                self.take_if_it_can(Action::Move { at })?;
            }
            self.take_if_it_can(Action::Sync { to: self.state.len })?;
            for segment in 0..self.state.segment {
                self.take_if_it_can(Action::Retire { segment })?;
            }
            if self.state == before {
                return Ok(());
            }
        }
    }

    fn take_if_it_can(&mut self, action: Action) -> Result<(), Difference> {
        if let Some(taken) = self.model.take(&self.state, action)? {
            self.state = taken.state;
        }
        Ok(())
    }

    /// For the next steps, in the log of the model; says whether there is some.
    pub(super) fn make_room(&mut self) -> Result<bool, Difference> {
        if self.model.bounds.segments == 1 {
            return Ok(true);
        }
        self.state.appends = 0;
        let has_room = |state: &State, places: usize| state.len as usize + places <= PLACES;
        if !has_room(&self.state, 4) && has_room(&self.state, self.spaces.len()) {
            self.compact()?;
        }
        Ok(has_room(&self.state, 4))
    }

    /// Fills segments with what is garbage at once. Much of it, and the engine compacts by itself.
    pub(super) fn fill(&mut self, action: Action) -> Result<(), Difference> {
        for _ in 0..if self.by_itself { 10 } else { 2 } {
            let value = vec![7; 9_000 + self.rng.below(6_000)];
            self.written += 1;
            let token = Token::new(self.written).map_err(|e| e.to_string())?;
            let filled = match self.filler.put(token, b"x", &value) {
                Err(Error::NeedsFloor { .. }) => self.filler.raise_all(token).map(drop),
                told => told.map(drop),
            };
            filled.map_err(|e| format!("filling a segment: {e}"))?;
        }
        self.adopt()?;
        self.synced()?;
        self.take(action)?;
        self.compare()
    }

    pub(super) fn retire_below(&mut self, action: Action, space: usize, token: u8) -> Result<(), Difference> {
        let keyspace = self.spaces[space].clone();
        let call = || keyspace.retire_below(number(token + 1)).map(drop);
        match self.call(call) {
            Outcome::Told(told) => told.map_err(|e| format!("retiring: {e}"))?,
            Outcome::Cut => return self.recover(Some(action)),
        }
        // Not by itself: it was asked for.
        self.adopt()?;
        self.take(action)?;
        self.synced()?;
        self.forget_folded();
        self.compare()
    }

    // Copies.

    pub(super) fn checkpoint(&mut self, action: Action) -> Result<(), Difference> {
        if self.rng.chance(25) && self.model.take(&self.copied()?, Action::Restore)?.is_some() {
            return self.salvage_whole();
        }
        self.opens += 1;
        let copy = format!("copy{}", self.opens);
        let (db, into) = (self.db.clone(), self.disk.dir(&copy));
        let make = || db.checkpoint_into(into).map(drop);
        let is_cut = self.state.crashes < self.model.bounds.crashes && self.rng.chance(25);
        match if is_cut { self.cut_within(30, make) } else { Outcome::Told(make()) } {
            Outcome::Told(told) => told.map_err(|e| format!("making a checkpoint: {e}"))?,
            Outcome::Cut => return self.recover(None),
        }
        self.adopt()?;
        self.take(action)?;
        self.copy = copy;
        self.compare()
    }

    /// As if a checkpoint had been made of all there is.
    fn copied(&self) -> Result<State, Difference> {
        let mut state = self.state;
        for action in [Action::Sync { to: state.len }, Action::Checkpoint] {
            let taken = self.model.take(&state, action)?;
            state = taken.ok_or("the model makes no checkpoint")?.state;
        }
        Ok(state)
    }

    pub(super) fn restore(&mut self, action: Action) -> Result<(), Difference> {
        let from = self.copy.clone();
        let salvages = self.rng.chance(30);
        self.make_of(&from, salvages)?;
        self.begin_anew(action, salvages)
    }

    /// The store itself, which is whole, as another one.
    fn salvage_whole(&mut self) -> Result<(), Difference> {
        self.db.clone().close().map_err(|e| format!("closing: {e}"))?;
        self.adopt()?;
        self.state = self.copied()?;
        let from = self.dir.clone();
        self.make_of(&from, true)?;
        self.begin_anew(Action::Restore, true)
    }

    /// Makes a store of another directory; the power may go once meanwhile, and it is made anew.
    fn make_of(&mut self, from: &str, salvages: bool) -> Result<(), Difference> {
        for may_cut in [true, false] {
            self.opens += 1;
            let dir = format!("store{}", self.opens);
            let from = if from.is_empty() { self.disk.clone() } else { self.disk.dir(from) };
            let (into, seed) = (self.disk.dir(&dir), self.opens);
            let bump = u64::from(self.model.bounds.grants) + 1;
            let make = || match salvages {
                true => Salvage::new().bump(bump).deterministic(seed).run_on(from, into).map(|_| ()),
                false => Restore::new().bump(bump).deterministic(seed).run_on(from, into).map(|_| ()),
            };
            let outcome = match may_cut && self.rng.chance(30) {
                true => self.cut_within(40, make),
                false => Outcome::Told(make()),
            };
            match outcome {
                Outcome::Told(told) => {
                    told.map_err(|e| format!("making a store of a copy: {e}"))?;
                    self.dir = dir;
                    return Ok(());
                }
                Outcome::Cut => {
                    let seed = self.rng.below(usize::MAX) as u64;
                    self.disk = self.disk.crash(Crash::Subset { percent: 50 }, seed);
                }
            }
        }
        Err("the power went twice".to_owned())
    }

    fn begin_anew(&mut self, action: Action, salvaged: bool) -> Result<(), Difference> {
        self.take(action)?;
        self.reopen();
        if salvaged {
            self.lsns.clear();
        }
        self.forget_folded();
        self.present_all(false)?;
        self.compare()
    }

    /// Whoever had a token of the lost store is refused by this one. A keyspace that is `lost` with it and made
    /// anew has never heard of the token.
    fn present_all(&self, is_lost: bool) -> Result<(), Difference> {
        for fence in self.model.fences() {
            let (space, key) = (self.space(fence), self.key(fence));
            let is_ours = self.model.source(self.model.space(fence)) == Source::Store;
            let tokens = 1..=if is_ours { self.state.counter } else { self.state.issued };
            for token in tokens.filter(|token| !is_ours || self.state.is_handed_out(*token)) {
                match space.put(number(token), &key, b"late") {
                    Err(Error::Fenced { .. }) => {}
                    Err(Error::NeedsFloor { .. }) if !is_ours => {}
                    Err(Error::UnknownToken { .. }) if is_ours && is_lost => {}
                    told => {
                        return Err(format!("a lost token {token} on f{fence}: the engine says {told:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whatever is lost of a damaged store: nobody who wrote to it writes to what is made of it, and no token
    /// is granted again.
    pub(super) fn salvage_damaged(&mut self) -> Result<(), Difference> {
        let store = self.store();
        self.db.clone().close().map_err(|e| format!("closing: {e}"))?;
        for _ in 0..1 + self.rng.below(3) {
            let names: Vec<String> = store.file_names().into_iter().filter(|name| name != "LOCK").collect();
            let name = &names[self.rng.below(names.len())];
            let len = store.read_file(name).map_or(0, |bytes| bytes.len());
            match self.rng.below(10) {
                0 => store.remove_file(name),
                1 => store.truncate(name, self.rng.below(len + 1) as u64),
                _ if len > 0 => {
                    // Mostly where there is something: segments begin full.
                    let within = if self.rng.chance(70) { len.min(6_000) } else { len };
                    let at = self.rng.below(within);
                    store.flip_bit(name, at as u64, self.rng.below(8) as u8);
                }
                _ => {}
            }
            if store.file_names().len() < 2 {
                return Ok(());
            }
        }
        self.opens += 1;
        let into = self.disk.dir(&format!("store{}", self.opens));
        let salvaged = Salvage::new().bump(64).deterministic(self.opens).run_on(store, into.clone());
        let salvaged = salvaged.map_err(|e| format!("salvaging: {e}"))?;
        *self.counts.answers.entry("salvaged").or_default() += 1;
        self.dir = format!("store{}", self.opens);
        self.reopen();
        self.present_all(true).map_err(|what| format!("{what}, salvaged with {:?}", salvaged.faults))?;
        let highest = u64::from(self.state.counter);
        for fence in self.model.fences() {
            let space = self.space(fence);
            if self.model.source(self.model.space(fence)) == Source::Store {
                let lease = space.lease(&self.name(fence)).try_acquire().map_err(|e| e.to_string())?;
                if lease.token().get() <= highest {
                    return Err(format!("the engine says {}, the model more than {highest}", lease.token()));
                }
            }
        }
        Ok(())
    }
}
