//! The ops of the log, applied one by one to an empty state.
//!
//! One job: from what recovery found whole to the index, the marks, the floors, the counter. Decides
//! nothing: what is in the log was admitted once. It checks one thing again, on another road: marks rise
//! along the log (F2); a log in which one falls is damaged.
//!
//! Read next: `engine.rs`, which takes the state over.

use crate::commit::sealed_form;
use crate::engine::{KeyspaceState, is_named, state_of};
use crate::error::{Error, Result};
use crate::fence::Floor;
use crate::format::header::{End, StoreBlock};
use crate::grace::Recorded;
use crate::index::{Slots, SlotsWriter, name_hash, slots};
use crate::log::scan::Table;
use crate::log::segment::{OpRef, Segment, Segments};
use crate::op::{Class, GrantValue, KeyspaceValue, Kind, check_keyspace_name};
use crate::options::{ReadMode, Tokens};
use crate::sync::Arc;
use crate::types::{KeyspaceId, Location, Lsn};
use crossbeam_epoch::Guard;
use std::collections::BTreeMap;

/// The state so far.
pub(crate) struct Replay {
    pub seed: u64,
    pub slots: Arc<Slots>,
    pub writer: SlotsWriter,
    pub segments: Segments,
    pub keyspaces: Vec<Arc<KeyspaceState>>,
    /// Leases that nobody has released, as far as the log goes.
    pub recorded: Recorded,
    counter: u64,
    /// The op that last closed or opened each keyspace.
    closings: BTreeMap<KeyspaceId, Lsn>,
    forms: Vec<(Arc<Segment>, u32)>,
}

impl Replay {
    pub fn new(block: &StoreBlock) -> Self {
        let (slots, writer) = slots();
        Replay {
            seed: seed_of(&block.store_id),
            slots,
            writer,
            segments: Segments::new(),
            keyspaces: Vec::new(),
            recorded: Recorded::new(block.incarnation),
            counter: 0,
            closings: BTreeMap::new(),
            forms: Vec::new(),
        }
    }

    /// The highest token granted, and none admitted from this store's leases is above it.
    pub fn counter(&self) -> u64 {
        self.counter
    }

    /// Replays the ops that `table` lists; says how many.
    pub fn segment(&mut self, segment: Arc<Segment>, table: &Table, end: End, counter: u64) -> Result<u64> {
        self.counter = self.counter.max(counter);
        self.segments.set(segment.clone());
        self.forms.push((segment.clone(), end.offset));
        let mut ops = 0;
        for offset in Table::offsets(table.bytes()) {
            let offset = offset
                .filter(|&offset| offset < end.offset)
                .ok_or_else(|| segment.corrupt(end.offset, "the key table points nowhere"))?;
            let op = segment.op(offset)?;
            // Once an op, so that what a growing index retires can be freed.
            let guard = crossbeam_epoch::pin();
            self.apply(&op, &guard).map_err(|what| what.or(&segment, offset))?;
            ops += 1;
        }
        Ok(ops)
    }

    /// Gives every segment the form that readers use.
    pub fn settle(&mut self, mode: ReadMode) -> Result<()> {
        for (segment, end) in self.forms.drain(..) {
            let file = crate::format::name::segment(segment.id);
            let form =
                sealed_form(&segment, end, mode).map_err(|e| Error::io(format!("mapping {file}"), e))?;
            self.segments.set(Arc::new(form));
        }
        Ok(())
    }

    fn apply(&mut self, op: &OpRef<'_>, guard: &Guard) -> Result<(), Wrong> {
        let value = op.op().value;
        if op.head.kind == Kind::Keyspace {
            let value = KeyspaceValue::decode(value).ok_or(Wrong::What("a keyspace with unknown options"))?;
            return self.keyspace(op, value);
        }
        if op.head.kind == Kind::Counter {
            self.counter = self.counter.max(op.head.token);
            return Ok(());
        }
        let keyspace = self
            .keyspaces
            .iter()
            .find(|keyspace| keyspace.id == op.head.keyspace)
            .cloned()
            .ok_or(Wrong::What("an op of a keyspace that was never created"))?;
        if op.head.kind != Kind::Release {
            keyspace.admitted(op.head.token);
            if keyspace.options.tokens == Tokens::Store {
                self.counter = self.counter.max(op.head.token);
            }
        }
        match op.head.kind {
            Kind::Put | Kind::Delete => return self.version(op, &keyspace, guard),
            Kind::Grant => {
                let value = GrantValue::decode(value).ok_or(Wrong::What("a grant without an owner"))?;
                self.fence(op, &keyspace, op.key(), guard)?;
                self.recorded.grant(keyspace.id, op.key(), op.head.token, value);
            }
            Kind::Mark => self.fence(op, &keyspace, op.key(), guard)?,
            Kind::Floor => {
                let floor = Floor { token: op.head.token, exclusive: value == [1] };
                keyspace.raise_floor(floor, op.lsn);
                keyspace.publish_floor(floor);
                self.close(op, &keyspace, false);
            }
            // Leases end with the incarnation that granted them.
            Kind::Release => self.recorded.release(keyspace.id, op.key(), op.head.token),
            Kind::Keyspace | Kind::Counter => {}
        }
        Ok(())
    }

    fn keyspace(&mut self, op: &OpRef<'_>, value: KeyspaceValue) -> Result<(), Wrong> {
        let name = std::str::from_utf8(op.key()).ok().filter(|name| check_keyspace_name(name).is_ok());
        let name = name.ok_or(Wrong::What("a keyspace with an impossible name"))?;
        let known = self.keyspaces.iter().find(|keyspace| keyspace.id == op.head.keyspace).cloned();
        match known {
            Some(known) if known.name == name && known.options == value.options => {
                self.close(op, &known, value.closed);
            }
            Some(_) => return Err(Wrong::What("a keyspace created twice, with other options")),
            None => {
                let state =
                    KeyspaceState::new(op.head.keyspace, name.to_owned(), value.options, value.closed);
                self.closings.insert(op.head.keyspace, op.lsn);
                self.keyspaces.push(Arc::new(state));
            }
        }
        Ok(())
    }

    /// The newest op says whether a keyspace is closed, wherever it lies: a floor from before a restore, carried
    /// on behind it, opens nothing.
    fn close(&mut self, op: &OpRef<'_>, keyspace: &KeyspaceState, closed: bool) {
        let newest = self.closings.entry(keyspace.id).or_insert(op.lsn);
        if op.lsn >= *newest {
            *newest = op.lsn;
            keyspace.set_closed(closed);
        }
    }

    /// A version of a key: found under the key, and where it changed its fence, under that too.
    fn version(&mut self, op: &OpRef<'_>, keyspace: &KeyspaceState, guard: &Guard) -> Result<(), Wrong> {
        let key = op.key();
        let previous = self.linked(op.head.previous(), op, keyspace, Class::Key, key, guard)?;
        let was_present = previous.as_ref().is_some_and(|previous| previous.head.kind == Kind::Put);
        if keyspace.options.scope == crate::options::Scope::Key {
            check_rise(op, previous.as_ref())?;
        }
        self.point(keyspace, Class::Key, key, op.head.previous(), op.at);
        match op.head.kind {
            Kind::Put if !was_present => {
                keyspace.keys.insert(key);
            }
            Kind::Delete if was_present => {
                keyspace.keys.remove(key);
            }
            _ => {}
        }
        if op.head.fence().is_some() {
            self.fence(op, keyspace, keyspace.fence_of(key), guard)?;
        }
        Ok(())
    }

    fn fence(
        &mut self,
        op: &OpRef<'_>,
        keyspace: &KeyspaceState,
        name: &[u8],
        guard: &Guard,
    ) -> Result<(), Wrong> {
        let Some(link) = op.head.fence() else { return Err(Wrong::What("a fence op without its link")) };
        let before = self.linked(link, op, keyspace, Class::Fence, name, guard)?;
        check_rise(op, before.as_ref())?;
        keyspace.note_fence();
        self.point(keyspace, Class::Fence, name, link, op.at);
        Ok(())
    }

    /// What an op links to, which must be an op of the same name.
    fn linked<'g>(
        &'g self,
        link: Option<Location>,
        op: &OpRef<'_>,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>, Wrong> {
        let Some(at) = link else { return Ok(None) };
        let found = self.segments.op(at, guard).map_err(Wrong::Error)?;
        match found {
            Some(found) if !is_named(&found, keyspace, class, name) || found.lsn > op.lsn => {
                Err(Wrong::What("a link to an op of another name"))
            }
            found => Ok(found),
        }
    }

    fn point(
        &mut self,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        old: Option<Location>,
        new: Location,
    ) {
        let hash = name_hash(self.seed, keyspace.id.0, class as u8, name);
        let place = Segments::place(new);
        let replaced = old.is_some_and(|old| self.writer.replace(hash, Segments::place(old), place));
        if !replaced {
            self.writer.insert(hash, place);
        }
    }
}

/// Marks rise along the log. Upholds F2, on a second road.
fn check_rise(op: &OpRef<'_>, before: Option<&OpRef<'_>>) -> Result<(), Wrong> {
    match before {
        Some(before) if state_of(before).mark > op.head.token => {
            Err(Wrong::What("a mark falls along the log"))
        }
        _ => Ok(()),
    }
}

/// The seed of a store's hashes.
pub(crate) fn seed_of(store_id: &[u8; 16]) -> u64 {
    let (low, high) = store_id.split_at(8);
    let half = |bytes: &[u8]| bytes.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    half(low) ^ half(high).rotate_left(32)
}

/// What is wrong with an op.
enum Wrong {
    What(&'static str),
    Error(Error),
}

impl Wrong {
    fn or(self, segment: &Segment, offset: u32) -> Error {
        match self {
            Wrong::What(what) => segment.corrupt(offset, what),
            Wrong::Error(error) => error,
        }
    }
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Replay")
    }
}
