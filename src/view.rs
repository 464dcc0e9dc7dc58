//! Snapshots and iterators: the public face of reading at one lsn.

use crate::db::Shared;
use crate::engine::When;
use crate::error::{Error, Result};
use crate::index::prefix_end;
use crate::keyspace::Keyspace;
use crate::snapshot::{Pin, Value, Walk};
use crate::sync::Arc;
use crate::types::Lsn;
use std::fmt;
use std::iter::FusedIterator;
use std::ops::{Bound, RangeBounds};

/// Everything as it was at one lsn: whole batches or none of them. Made by
/// [`Db::snapshot`](crate::Db::snapshot); owned, `Send`, and free of lifetimes.
///
/// What it may still need stays on disk while it lives. It does not keep the store open: that is closed when the
/// [`Db`](crate::Db) and all keyspaces of it are dropped, and then each read answers [`Error::Closed`]. A keyspace of
/// a later opening is not one of this snapshot.
#[derive(Clone, Debug)]
#[must_use]
pub struct Snapshot {
    pin: Arc<Pin>,
}

impl Snapshot {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Snapshot { pin: Arc::new(Pin::new(&shared.engine)) }
    }

    /// The lsn that is seen: everything at or below it, nothing above.
    pub fn lsn(&self) -> Lsn {
        self.pin.lsn
    }

    /// The value of a key.
    ///
    /// # Errors
    /// [`Error::Corrupt`] or [`Error::Io`] when the bytes cannot be had, [`Error::InvalidArgument`] for
    /// a keyspace of another store, [`Error::Closed`].
    pub fn get(&self, keyspace: &Keyspace, key: &[u8]) -> Result<Option<Value>> {
        self.check_store(keyspace)?;
        self.pin.engine.check_readable()?;
        self.pin.engine.value(&keyspace.state, key, When::At(self.pin.lsn))
    }

    /// Whether a key has a value.
    ///
    /// # Errors
    /// As [`Snapshot::get`].
    pub fn contains_key(&self, keyspace: &Keyspace, key: &[u8]) -> Result<bool> {
        self.check_store(keyspace)?;
        self.pin.engine.check_readable()?;
        self.pin.engine.contains(&keyspace.state, key, When::At(self.pin.lsn))
    }

    /// Every key and value, in the order of the keys.
    pub fn iter(&self, keyspace: &Keyspace) -> Iter {
        self.range(keyspace, ..)
    }

    /// The keys and values in a range of keys.
    pub fn range(&self, keyspace: &Keyspace, range: impl RangeBounds<Vec<u8>>) -> Iter {
        self.walk(keyspace, range.start_bound().cloned(), range.end_bound().cloned())
    }

    /// The keys and values whose keys start with `prefix`.
    pub fn prefix(&self, keyspace: &Keyspace, prefix: &[u8]) -> Iter {
        self.walk(keyspace, Bound::Included(prefix.to_vec()), prefix_end(prefix))
    }

    fn walk(&self, keyspace: &Keyspace, from: Bound<Vec<u8>>, to: Bound<Vec<u8>>) -> Iter {
        let failed = self.check_store(keyspace).err();
        Iter { walk: Walk::new(self.pin.clone(), keyspace.state.clone(), from, to), failed }
    }

    fn check_store(&self, keyspace: &Keyspace) -> Result<()> {
        if Arc::ptr_eq(&self.pin.engine, &keyspace.shared.engine) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "keyspace {:?} belongs to another store than the snapshot, or to an earlier opening of it: open the \
             keyspace again",
            keyspace.name()
        )))
    }
}

/// Keys with their values at one lsn, from either end. After an error it returns that error for ever; of a store
/// that was closed meanwhile too, [`Error::Closed`].
#[must_use = "iterators do nothing until they are asked"]
pub struct Iter {
    walk: Walk,
    failed: Option<Error>,
}

impl Iter {
    fn step(&mut self, step: impl FnOnce(&mut Walk) -> Result<Option<(Vec<u8>, Value)>>) -> Option<Item> {
        if let Some(error) = &self.failed {
            return Some(Err(error.clone()));
        }
        match self.walk.check_readable().and_then(|()| step(&mut self.walk)) {
            Ok(found) => found.map(Ok),
            Err(error) => {
                self.failed = Some(error.clone());
                Some(Err(error))
            }
        }
    }
}

type Item = Result<(Vec<u8>, Value)>;

impl Iterator for Iter {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        self.step(Walk::next)
    }
}

impl DoubleEndedIterator for Iter {
    fn next_back(&mut self) -> Option<Item> {
        self.step(Walk::next_back)
    }
}

impl FusedIterator for Iter {}

impl fmt::Debug for Iter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("failed", &self.failed).finish_non_exhaustive()
    }
}
