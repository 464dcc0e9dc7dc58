//! Snapshots and iterators: the public face of reading at one lsn.

use crate::db::Shared;
use crate::engine::When;
use crate::error::{Error, Result};
use crate::index::prefix_end;
use crate::keyspace::Keyspace;
use crate::snapshot::{Pin, Value};
use crate::sync::Arc;
use crate::types::Lsn;
use crate::walk::{Read, Walk};
use std::fmt;
use std::iter::FusedIterator;
use std::ops::{Bound, Range, RangeBounds, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

/// A range of keys: each kind of range that Rust has, over whatever gives bytes (`&str`, `&[u8]`, `&[u8; N]`,
/// `Vec<u8>` and so on), and pairs of [`Bound`]s. Nothing else implements it.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let db = tidewall::Db::open(dir.path().join("data"))?;
/// # use tidewall::{KeyspaceOptions, Token, Tokens};
/// # let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
/// for key in ["a", "b", "c"] {
///     rows.put(Token::new(1)?, key.as_bytes(), b"value")?;
/// }
/// let after: &[u8] = b"a"; // where a page ended
/// assert_eq!(rows.range("b"..).count(), 2);
/// assert_eq!(rows.range(b"a"..=b"b").count(), 2);
/// assert_eq!(rows.range((std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded)).count(), 2);
/// assert_eq!(rows.range(..).count(), 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait KeyRange: sealed::Bounds {}

impl<R: sealed::Bounds> KeyRange for R {}

/// One implementation for each kind of range, where one for all of [`RangeBounds`] would leave open what the key of
/// `..` is, or of `b"a"..b"b"`.
mod sealed {
    use super::*;

    pub trait Bounds {
        fn bounds(&self) -> [Bound<Vec<u8>>; 2];
    }

    fn owned<K: AsRef<[u8]>>(range: &impl RangeBounds<K>) -> [Bound<Vec<u8>>; 2] {
        [range.start_bound(), range.end_bound()].map(|bound| bound.map(|key| key.as_ref().to_vec()))
    }

    macro_rules! bounds {
        ($($range:ty),*) => {$(
            impl<K: AsRef<[u8]>> Bounds for $range {
                fn bounds(&self) -> [Bound<Vec<u8>>; 2] {
                    owned::<K>(self)
                }
            }
        )*};
    }

    bounds!(Range<K>, RangeInclusive<K>, RangeFrom<K>, RangeTo<K>, RangeToInclusive<K>, (Bound<K>, Bound<K>));

    impl Bounds for RangeFull {
        fn bounds(&self) -> [Bound<Vec<u8>>; 2] {
            owned::<Vec<u8>>(self)
        }
    }
}

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
    pub fn range(&self, keyspace: &Keyspace, range: impl KeyRange) -> Iter {
        let [from, to] = range.bounds();
        self.walk(keyspace, from, to)
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
    /// Runs `read` on the next key and its value, borrowed. A scan of small values takes two thirds of the time so, where
    /// they need not be kept.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # use tidewall::{KeyspaceOptions, Token, Tokens};
    /// # let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    /// # for key in ["a", "b", "c"] {
    /// #     rows.put(Token::new(1)?, key.as_bytes(), b"value")?;
    /// # }
    /// let (mut rows, mut bytes) = (rows.iter(), 0);
    /// while let Some(len) = rows.next_with(|key, value| key.len() + value.len()) {
    ///     bytes += len?;
    /// }
    /// assert_eq!(bytes, 18);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn next_with<T>(&mut self, read: impl FnOnce(&[u8], &[u8]) -> T) -> Option<Result<T>> {
        self.step(|walk| walk.next(|key, value| read(key, value.bytes())))
    }

    /// As [`Iter::next_with`], from the other end.
    pub fn next_back_with<T>(&mut self, read: impl FnOnce(&[u8], &[u8]) -> T) -> Option<Result<T>> {
        self.step(|walk| walk.next_back(|key, value| read(key, value.bytes())))
    }

    #[inline]
    fn step<T>(&mut self, step: impl FnOnce(&mut Walk) -> Result<Option<T>>) -> Option<Result<T>> {
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

impl Iterator for Iter {
    type Item = Result<(Vec<u8>, Value)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step(|walk| walk.next(owned))
    }
}

impl DoubleEndedIterator for Iter {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.step(|walk| walk.next_back(owned))
    }
}

fn owned(key: &[u8], value: Read<'_>) -> (Vec<u8>, Value) {
    (key.to_vec(), value.into_value())
}

impl FusedIterator for Iter {}

impl fmt::Debug for Iter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("failed", &self.failed).finish_non_exhaustive()
    }
}
