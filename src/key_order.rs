//! The keys in order.
//!
//! One job: make the ordered sets from the index, when the first one is asked for: a scan, a delete of a
//! prefix, or marks to be folded. Whoever never asks does not pay. Writers go on meanwhile; what they add and
//! remove is noted and added behind.
//!
//! Read next: `snapshot.rs`, which walks the keys.

use crate::engine::{Engine, KeyspaceState};
use crate::error::Result;
use crate::index::{KEPT, Place, UnorderedKeys};
use crate::op::{Class, Kind};
use crate::sync::Arc;
use crate::types::{KeyspaceId, Lsn};
use std::collections::BTreeMap;

/// Ops that are read under one epoch guard.
const AT_ONCE: usize = 256;

type Unsorted = BTreeMap<KeyspaceId, (Arc<KeyspaceState>, UnorderedKeys)>;

impl Engine {
    /// Sees to it that the keys of a keyspace are in order. Without a lock that the compactor comes before.
    ///
    /// # Errors
    /// An op that the index points at cannot be read.
    pub fn sort_keys(&self, keyspace: &KeyspaceState) -> Result<()> {
        if !keyspace.keys.ask() {
            return Ok(());
        }
        let _compactor = self.compactor.lock();
        self.sort_all_keys()
    }

    /// The same for all keyspaces, by whoever holds the compactor's lock: so no segment leaves meanwhile.
    pub fn sort_all_keys(&self) -> Result<()> {
        let mut unsorted: Unsorted = BTreeMap::new();
        for keyspace in self.keyspaces.read().iter().filter(|keyspace| keyspace.keys.are_unsorted()) {
            unsorted.insert(keyspace.id, (keyspace.clone(), UnorderedKeys::default()));
        }
        if unsorted.is_empty() {
            return Ok(());
        }
        let sorted = self.note_keys(&mut unsorted);
        for (keyspace, keys) in unsorted.into_values() {
            match sorted {
                Ok(()) => keyspace.keys.catch_up(keys),
                Err(_) => keyspace.keys.postpone(),
            }
        }
        sorted
    }

    fn note_keys(&self, unsorted: &mut Unsorted) -> Result<()> {
        // Before anything is looked at: whatever changes behind this is noted.
        unsorted.values().for_each(|(keyspace, _)| keyspace.keys.begin_sorting());
        // Before anything is looked at: what is deleted behind this may be wanted by a reader.
        let seen_by_all = self.snapshots.oldest(self.progress.durable());
        let mut places = Vec::with_capacity(self.slots.len());
        self.slots.each_place(&crossbeam_epoch::pin(), |place| places.push(place.pack()));
        // In the order of the log, which the memory fetches ahead. An op may stand under two names.
        places.sort_unstable();
        places.dedup();
        for places in places.chunks(AT_ONCE) {
            self.add_keys(places, seen_by_all, unsorted)?;
        }
        Ok(())
    }

    fn add_keys(&self, places: &[u64], seen_by_all: Lsn, unsorted: &mut Unsorted) -> Result<()> {
        let guard = crossbeam_epoch::pin();
        for place in places.iter().copied().map(Place::unpack) {
            let Some(segment) = self.segments.get(place.segment, &guard) else { continue };
            let op = segment.op(place.offset)?;
            let Some((keyspace, keys)) = unsorted.get_mut(&op.head.keyspace) else { continue };
            if !op.head.kind.is_value() {
                continue;
            }
            let may_be_seen = |kind, lsn| kind == Kind::Put || lsn > seen_by_all;
            // It may stand there as the state of its fence only, long overtaken as a version.
            let is_there = if op.head.fence().is_some() {
                let hash = self.hash(keyspace, Class::Key, op.key());
                let newest = self.newest(keyspace, Class::Key, op.key(), hash, &guard)?;
                newest.is_some_and(|newest| may_be_seen(newest.head.kind, newest.lsn))
            } else {
                may_be_seen(op.head.kind, op.lsn)
            };
            if !is_there || keys.insert(op.key()) <= KEPT || keyspace.keys.is_wanted() {
                continue;
            }
            // Few keys are kept for who may ask for them. These are many.
            let id = keyspace.id;
            keyspace.keys.postpone();
            unsorted.remove(&id);
        }
        Ok(())
    }
}
