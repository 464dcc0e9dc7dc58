//! What is intact of a damaged store, as a store that repeats nothing of what the damaged one did.
//!
//! Two walks through the files: the first lists every fault and learns the keyspaces and the highest token, the
//! second finds the newest intact version of each key. What could not be read may have held the highest mark;
//! so everything that the old store may have admitted is shut out, as by a restore.

use super::{BUMP, Making, Output, op, progress};
use crate::db::take_lock;
use crate::engine::KeyspaceState;
use crate::error::{Error, Result};
use crate::fence::{FenceState, Floor};
use crate::format::header::StoreBlock;
use crate::inspect::{Fault, FaultKind, Faults, Intact, Surveyed, survey, walk};
use crate::log::guard::Pins;
use crate::log::list::List;
use crate::log::segment::{Body, OpRef, Segment};
use crate::look_up::state_of;
use crate::op::{KeyspaceValue, Kind, Links, Op, check_keyspace_name};
use crate::options::{KeyspaceOptions, Options, Progress, Scope, Tokens};
use crate::recover::recover;
use crate::storage::{Disk, Storage};
use crate::sync::Arc;
use crate::types::{KeyspaceId, Lsn, Mark, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What [`salvage`] made, and what it could not.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Salvaged {
    /// Everything that is not as it was written, as by [`verify`](crate::verify). What lay there is lost, and
    /// an older version of its key, if one is intact, was kept in its place.
    pub faults: Vec<Fault>,
    /// What is worth knowing beside them.
    pub notes: Vec<String>,
    /// Keyspaces that were kept.
    pub keyspaces: u32,
    /// Keys that were kept, each in its newest intact version.
    pub keys: u64,
    /// Every token granted from now on is above this, and none up to it is admitted where this store issues
    /// the tokens.
    pub counter: Mark,
    /// The lsn from which the store goes on.
    pub lsn: Lsn,
    /// The keyspaces of external tokens: each answers [`Error::NeedsFloor`] to writes until
    /// [`raise_all`](crate::Keyspace::raise_all) tells it the present value of its source.
    pub need_floor: Vec<String>,
}

/// Makes a store in `into`, which must be empty or missing, of what is provably intact in `dir`, and lists what
/// is not. The damaged store must not be open, and stays as it is.
///
/// Of each key the newest intact version counts: where that is a delete, the key is absent; where the newest
/// one is damaged, an older one takes its place, and the report names the damage. A batch of which one change is
/// damaged keeps the others. Marks, floors and tokens are handled as by [`restore`](crate::restore): nothing
/// that the damaged store may have granted or admitted can happen again, whatever could not be read; marks and
/// last operations of external keyspaces are kept as far as they are intact. All leases are over. Lsns are new.
///
/// Without `STORE` every segment counts that proves what it is, those too that were given up and not yet
/// removed: what had been deleted may be back then.
///
/// It needs memory for all keys at once.
///
/// ```
/// # let scratch = tempfile::tempdir()?;
/// # let (data, new) = (scratch.path().join("data"), scratch.path().join("new"));
/// # let db = tidewall::Db::open(&data)?;
/// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
/// # let lease = jobs.lease(b"1").acquire()?;
/// # jobs.put(lease.token(), b"1", b"done")?;
/// # drop(lease);
/// # db.close()?;
/// std::fs::remove_file(data.join("STORE"))?;
/// assert!(matches!(tidewall::Db::open(&data), Err(tidewall::Error::Corrupt { .. })));
///
/// let salvaged = tidewall::salvage(&data, &new)?;
/// for fault in &salvaged.faults {
///     println!("{fault}");
/// }
/// assert_eq!(salvaged.keys, 1);
/// let db = tidewall::Db::open(&new)?;
/// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
/// # assert_eq!(jobs.get(b"1")?.as_deref(), Some(&b"done"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`]: `into` is not empty. [`Error::Locked`]: the store is open.
/// [`Error::UpgradeRequired`]. [`Error::TokensExhausted`]: the bump leaves no tokens; take a smaller one.
/// [`Error::NoSpace`], [`Error::Io`]: the new directory could not be written, or there is nothing in `dir`. In
/// each case what was written is removed. Damage is no error: it is in the answer.
pub fn salvage(dir: impl AsRef<Path>, into: impl AsRef<Path>) -> Result<Salvaged> {
    Salvage::new().run(dir, into)
}

/// A salvage with options: see [`salvage`].
#[derive(Debug)]
#[must_use]
pub struct Salvage {
    bump: u64,
    past: Option<Token>,
    options: Options,
}

impl Default for Salvage {
    fn default() -> Self {
        Salvage { bump: BUMP, past: None, options: Options::new().without_threads() }
    }
}

impl Salvage {
    /// A bump of 2³², and no callback.
    pub fn new() -> Self {
        Self::default()
    }

    /// How far the token counter and the lsns go on behind the highest that can be read: more than what cannot
    /// be read may have held. Default: 2³².
    pub fn bump(mut self, by: u64) -> Self {
        self.bump = by;
        self
    }

    /// A token of the damaged store that was seen elsewhere: the counter goes on behind it too, should that be
    /// further on; see [`Db::advance_tokens`](crate::Db::advance_tokens). Default: none.
    pub fn advance_tokens(mut self, past: Token) -> Self {
        self.past = Some(past);
        self
    }

    /// Called once per segment, in each of two rounds.
    pub fn progress(mut self, callback: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.options = self.options.progress(callback);
        self
    }

    /// As [`Options::deterministic`], for simulations.
    #[cfg(any(test, feature = "testkit", fuzzing))]
    pub fn deterministic(mut self, seed: u64) -> Self {
        self.options = self.options.deterministic(seed);
        self
    }

    /// Salvages.
    ///
    /// # Errors
    /// As [`salvage`].
    pub fn run(self, dir: impl AsRef<Path>, into: impl AsRef<Path>) -> Result<Salvaged> {
        let dir = dir.as_ref();
        let from = Disk::existing(dir)
            .map_err(|e| Error::io(format!("opening the directory {}", dir.display()), e))?;
        self.make(&from, Output::create(into.as_ref())?)
    }

    /// As [`Salvage::run`], from and into other kinds of directories than those of this machine.
    ///
    /// # Errors
    /// As [`salvage`].
    pub fn run_on(self, from: impl Storage, into: impl Storage) -> Result<Salvaged> {
        self.make(&from, Output::over(Arc::new(into))?)
    }

    fn make(self, from: &dyn Storage, mut out: Output) -> Result<Salvaged> {
        if self.bump == 0 {
            return Err(Error::invalid("a bump of 0 would grant tokens again"));
        }
        let _old = take_lock(from, &Options::new().read_only())?;
        out.lock()?;
        let mut found = self.find(from)?;
        let block = self.block(&found)?;
        let list = List::create_part(out.storage.clone(), block).map_err(|e| out.failed(0, e))?;
        let mut recovered = recover(&out.storage, &self.options, list)?;
        recovered.before.lsn = found.lsn;
        let counter = found.counter.max(self.past.map_or(0, Token::get));
        let making = Making::new(out.storage.clone(), self.options, recovered, counter, self.bump)?;
        let keys = found.write(&making)?;
        let need_floor = making.shut_out()?;
        let counter = making.counter();
        let lsn = making.finish()?;
        out.keep();
        let keyspaces = found.keyspaces.len() as u32;
        Ok(Salvaged { faults: found.faults.0, notes: found.notes, keyspaces, keys, counter, lsn, need_floor })
    }

    fn block(&self, found: &Found) -> Result<StoreBlock> {
        Ok(StoreBlock {
            generation: 1,
            store_id: self.options.entropy.u128()?.to_le_bytes(),
            // Whoever has ancestors asks for a floor of what is created later and has external tokens.
            ancestors: vec![found.store_id],
            incarnation: 0,
            incarnation_before: 0,
            next_segment: 1,
            sealed_through: 0,
            is_checkpoint: false,
            segments: Vec::new(),
            index: Lsn::ZERO,
        })
    }

    /// Reads everything, twice.
    fn find(&self, from: &dyn Storage) -> Result<Found> {
        let mut survey = survey(from)?;
        let segments = std::mem::take(&mut survey.segments);
        let id = survey.block.as_ref().map(|block| block.store_id);
        let id = id.or(segments.last().map(|segment| segment.store_id));
        let mut found = Found { store_id: id.unwrap_or_default(), ..Found::default() };
        for (done, segment) in segments.iter().enumerate() {
            progress(&self.options, done, segments.len());
            let bytes = survey.read(&*segment.file, &segment.name, segment.len);
            let mut each = |intact: &Intact<'_>, faults: &mut Faults| found.learn(segment, intact, faults);
            let walked = walk(segment, &bytes, &mut survey.faults, &mut each);
            found.bounds(segment, walked.last);
            if walked.tail_bytes > 0 {
                let (bytes, file) = (walked.tail_bytes, &segment.name);
                survey.notes.push(format!("{file} ends in {bytes} bytes that a crash left unfinished"));
            }
        }
        survey.check_stray(found.lsn);
        found.faults = std::mem::take(&mut survey.faults);
        found.notes = std::mem::take(&mut survey.notes);
        for (done, segment) in segments.iter().enumerate() {
            progress(&self.options, done, segments.len());
            let bytes = survey.read(&*segment.file, &segment.name, segment.len);
            let mut each = |intact: &Intact<'_>, _: &mut Faults| found.take(done, segment, intact);
            walk(segment, &bytes, &mut survey.faults, &mut each);
        }
        found.segments =
            segments.into_iter().map(|segment| (segment.name.clone(), readable(segment))).collect();
        Ok(found)
    }
}

/// A segment whose ops are read one by one, each proven again.
fn readable(segment: Surveyed) -> Segment {
    let body = Body::Pread(segment.len as u32);
    Segment { id: segment.id, salt: segment.salt, file: segment.file, body, pins: Pins::new() }
}

/// What is intact.
#[derive(Default)]
struct Found {
    store_id: [u8; 16],
    faults: Faults,
    notes: Vec<String>,
    segments: Vec<(String, Segment)>,
    keyspaces: BTreeMap<KeyspaceId, (String, KeyspaceOptions)>,
    /// Keyspaces whose creation cannot be read.
    lost: BTreeSet<KeyspaceId>,
    /// The newest version of each key.
    versions: BTreeMap<(KeyspaceId, Box<[u8]>), Version>,
    /// Of keyspaces with external tokens.
    fences: BTreeMap<(KeyspaceId, Box<[u8]>), FenceState>,
    floors: BTreeMap<KeyspaceId, Floor>,
    counter: u64,
    lsn: Lsn,
}

/// Where a version of a key lies.
struct Version {
    lsn: Lsn,
    segment: usize,
    offset: u32,
    is_put: bool,
}

impl Found {
    /// The first round: keyspaces, and the highest token of those that the store issued.
    fn learn(&mut self, segment: &Surveyed, intact: &Intact<'_>, faults: &mut Faults) {
        let op = &intact.op;
        match op.head.kind {
            Kind::Keyspace => {
                let name = std::str::from_utf8(op.key()).ok();
                let name = name.filter(|name| check_keyspace_name(name).is_ok());
                let (Some(value), Some(name)) = (KeyspaceValue::decode(op.value()), name) else {
                    let what = "a keyspace with an impossible name or unknown options";
                    faults.add(FaultKind::Op, &segment.name, op.at.offset as u64, Some(op.lsn), what);
                    return;
                };
                self.keyspaces.entry(op.head.keyspace).or_insert((name.to_owned(), value.options));
            }
            Kind::Counter | Kind::Grant => self.counter = self.counter.max(op.head.token),
            _ => {}
        }
    }

    /// Headers and seals carry the counter, too.
    fn bounds(&mut self, segment: &Surveyed, last: Lsn) {
        let header = segment.header.map_or(0, |(header, _)| header.counter);
        let seal = segment.seal.map_or(0, |seal| seal.counter);
        self.counter = self.counter.max(header).max(seal);
        let sealed = segment.seal.map_or(Lsn::ZERO, |seal| seal.end.lsn);
        self.lsn = self.lsn.max(last).max(sealed);
    }

    /// The second round: what is newest.
    fn take(&mut self, at: usize, segment: &Surveyed, intact: &Intact<'_>) {
        let op = &intact.op;
        let id = op.head.keyspace;
        if matches!(op.head.kind, Kind::Keyspace | Kind::Counter | Kind::Release) {
            return;
        }
        let Some((_, options)) = self.keyspaces.get(&id) else {
            if self.lost.insert(id) {
                let what = "a keyspace whose creation cannot be read: all its ops are lost";
                self.faults.add(FaultKind::Op, &segment.name, op.at.offset as u64, Some(op.lsn), what);
            }
            return;
        };
        let options = *options;
        if op.head.kind == Kind::Floor {
            let known = self.floors.entry(id).or_default();
            *known = known.with(Floor::of(op.head.token, op.value()));
        }
        match options.tokens {
            Tokens::Store => self.counter = self.counter.max(op.head.token),
            Tokens::External if op.head.kind != Kind::Floor => self.fence(id, options.scope, op),
            Tokens::External => {}
        }
        if op.head.kind.is_value() && intact.has_value {
            let version =
                Version { lsn: op.lsn, segment: at, offset: op.at.offset, is_put: op.head.kind == Kind::Put };
            // Of two ops on one key in one frame, the later one counts.
            match self.versions.entry((id, op.key().into())) {
                std::collections::btree_map::Entry::Occupied(mut known) if known.get().lsn <= op.lsn => {
                    known.insert(version);
                }
                std::collections::btree_map::Entry::Occupied(_) => {}
                std::collections::btree_map::Entry::Vacant(place) => {
                    place.insert(version);
                }
            }
        }
    }

    /// The highest mark of a fence, and the last operation under it, as far as it is known.
    fn fence(&mut self, id: KeyspaceId, scope: Scope, op: &OpRef<'_>) {
        let is_value = op.head.kind.is_value();
        let name = if is_value { &op.key()[..scope.fence_len(op.key())] } else { op.key() };
        let sets = !is_value || scope == Scope::Key || op.head.fence().is_some();
        let found = state_of(op);
        let known = self.fences.entry((id, name.into())).or_default();
        if found.mark > known.mark || (sets && found.mark == known.mark && found.lsn >= known.lsn) {
            *known = found;
        }
    }

    /// Writes what is intact into a new store; says how many keys.
    fn write(&mut self, making: &Making) -> Result<u64> {
        let mut ids = BTreeMap::new();
        for (&old, (name, options)) in &self.keyspaces {
            let id = KeyspaceId(ids.len() as u16 + 1);
            let value = KeyspaceValue { options: *options, needs_floor: false }.encode();
            making.write(&Op { kind: Kind::Keyspace, ..op(id, name.as_bytes(), &value) })?;
            let state = KeyspaceState::new(id, name.clone(), *options, false);
            making.engine.keyspaces.write().push(Arc::new(state));
            ids.insert(old, id);
            if let (Tokens::External, Some(floor)) = (options.tokens, self.floors.get(&old)) {
                for (token, value) in [(floor.raised, [0]), (floor.folded, [1])] {
                    if token > 0 {
                        making.write(&Op { kind: Kind::Floor, token, ..op(id, b"", &value) })?;
                    }
                }
            }
        }
        let keys = self.write_values(making, &ids)?;
        for ((old, name), state) in &self.fences {
            let Some(&id) = ids.get(old) else { continue };
            let links = Links {
                fence: Some(None),
                last: state.last,
                predecessor: state.predecessor,
                ..Links::default()
            };
            let op = Op { kind: Kind::Mark, token: state.mark, links, ..op(id, name, b"") };
            making.write(&op)?;
        }
        Ok(keys)
    }

    fn write_values(&mut self, making: &Making, ids: &BTreeMap<KeyspaceId, KeyspaceId>) -> Result<u64> {
        const GROUP_BYTES: usize = 1 << 20;
        let (mut keys, mut pending) = (0, 0);
        for ((old, key), version) in self.versions.iter().filter(|(_, version)| version.is_put) {
            let Some(&id) = ids.get(old) else { continue };
            let (name, segment) = &self.segments[version.segment];
            // Read once more, and proven once more: a failing disk may answer differently.
            let found = segment.op(version.offset).and_then(|op| segment.check_value(&op).map(|()| op));
            let found = match found {
                Ok(found) if found.key() == &**key => found,
                _ => {
                    let what = "an op was intact, and is not any more";
                    self.faults.add(FaultKind::Op, name, version.offset as u64, Some(version.lsn), what);
                    continue;
                }
            };
            making.write(&Op { token: found.head.token, ..op(id, key, found.value()) })?;
            keys += 1;
            pending += key.len() + found.value().len();
            if pending > GROUP_BYTES {
                making.engine.commit_now()?;
                pending = 0;
            }
        }
        Ok(keys)
    }
}
