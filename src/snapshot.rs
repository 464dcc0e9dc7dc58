//! Reading: values, and the lsns that readers still need.
//!
//! One job: what a reader sees at one lsn, and the register of the oldest one in use. Promises S1 (all
//! at or below the lsn, nothing above: whole batches or none of them) and S2 (what is needed stays).
//! No lock is held while a value is read.
//!
//! Read next: `walk.rs`, a scan.

use crate::engine::{Engine, KeyspaceState, When};
use crate::error::Result;
use crate::log::segment::{Found, OpView, Pinned, Segment};
use crate::look_up::is_named;
use crate::op::{Class, Kind};
use crate::sync::{Arc, Mutex};
use crate::types::{Lsn, Mark, Token};
use crossbeam_epoch::Guard;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;

/// The lsns that snapshots pin.
#[derive(Debug, Default)]
pub(crate) struct Snapshots(Mutex<BTreeMap<Lsn, usize>>);

impl Snapshots {
    /// The lowest lsn that a reader may ask for: `visible` is the newest that will ever be asked for.
    pub fn oldest(&self, visible: Lsn) -> Lsn {
        self.0.lock().first_key_value().map_or(visible, |(&lsn, _)| lsn.min(visible))
    }

    pub fn count(&self) -> usize {
        self.0.lock().values().sum()
    }
}

/// One pinned lsn. Everything visible at it stays readable while this lives.
pub(crate) struct Pin {
    pub engine: Arc<Engine>,
    pub lsn: Lsn,
}

impl Pin {
    pub fn new(engine: &Arc<Engine>) -> Self {
        // `visible` is read under the register's lock, so that nobody decides in between that
        // nothing that old is needed any more.
        let mut register = engine.snapshots.0.lock();
        let lsn = engine.progress.durable();
        *register.entry(lsn).or_insert(0) += 1;
        drop(register);
        Pin { engine: engine.clone(), lsn }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut register = self.engine.snapshots.0.lock();
        if let Some(count) = register.get_mut(&self.lsn) {
            *count -= 1;
            if *count == 0 {
                register.remove(&self.lsn);
            }
        }
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("lsn", &self.lsn).finish_non_exhaustive()
    }
}

/// A value as it was at one lsn: its bytes, the token that wrote it, and when.
///
/// Up to 4 KiB are copied; a larger value pins its segment in memory or on disk until it is dropped. It does not keep
/// the store open, and can be read after that was closed.
#[derive(Clone)]
pub struct Value {
    bytes: Held,
    token: Token,
    lsn: Lsn,
}

#[derive(Clone)]
enum Held {
    Copy(Box<[u8]>),
    Pinned { segment: Arc<Pinned>, from: usize, to: usize },
}

const COPY_BYTES: usize = 4096;

impl Value {
    #[inline]
    pub(crate) fn copied(bytes: &[u8], token: Token, lsn: Lsn) -> Self {
        Value { bytes: Held::Copy(bytes.into()), token, lsn }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Held::Copy(bytes) => bytes,
            Held::Pinned { segment, from, to } => segment.bytes().get(*from..*to).unwrap_or_default(),
        }
    }

    /// The bytes, on their own.
    pub fn into_vec(self) -> Vec<u8> {
        match self.bytes {
            Held::Copy(bytes) => bytes.into_vec(),
            Held::Pinned { .. } => self.bytes().to_vec(),
        }
    }

    /// The token that the value was written under: whose work it is. To look at, not to write with: whoever does
    /// may be that writer's late twin.
    ///
    /// It is not the mark of the fence, which may be higher by now ([`Keyspace::mark`](crate::Keyspace::mark)): a grant,
    /// a raise and a write to another key of the fence raise that, and leave this value's token as it is.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let first = jobs.lease(b"job-7").acquire()?;
    /// jobs.put(first.token(), b"job-7", b"by the first")?;
    /// let written_by = first.token();
    /// first.release()?;
    /// let second = jobs.lease(b"job-7").acquire()?;
    /// let value = jobs.get(b"job-7")?.expect("just written");
    /// assert_eq!(value.token(), written_by);
    /// assert_eq!(jobs.mark(b"job-7")?, Some(second.token().into()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn token(&self) -> Token {
        self.token
    }

    /// The place of the write in the order; what [`Expect::Version`](crate::Expect::Version) compares.
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }
}

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.lsn == other.lsn && self.token == other.token && self.bytes() == other.bytes()
    }
}

impl Eq for Value {}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Value")
            .field("bytes", &crate::types::Excerpt::new(self.bytes()))
            .field("token", &self.token)
            .field("lsn", &self.lsn)
            .finish()
    }
}

impl Engine {
    /// The value of a key.
    pub fn value(&self, keyspace: &KeyspaceState, key: &[u8], when: When) -> Result<Option<Value>> {
        self.hashed_value(keyspace, key, self.hash(keyspace, Class::Key, key), when)
    }

    pub fn hashed_value(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        hash: u64,
        when: When,
    ) -> Result<Option<Value>> {
        self.with_version(keyspace, key, hash, when, value_of)
    }

    /// Runs `read` on the value of a key, borrowed.
    pub fn value_with<T>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        when: When,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<Option<T>> {
        let hash = self.hash(keyspace, Class::Key, key);
        self.with_version(keyspace, key, hash, when, |_, found| Ok(read(found.value())))
    }

    /// Whether a key has a value.
    pub fn contains(&self, keyspace: &KeyspaceState, key: &[u8], when: When) -> Result<bool> {
        let guard = crossbeam_epoch::pin();
        let hash = self.hash(keyspace, Class::Key, key);
        let found = self.version(keyspace, key, hash, when, &guard)?;
        Ok(found.is_some_and(|op| op.head.kind == Kind::Put))
    }

    /// Nearly always the newest op is the version that is asked for, and it is read where it is found.
    #[inline]
    fn with_version<T>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        hash: u64,
        when: When,
        read: impl FnOnce(&Arc<Segment>, &OpView<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let guard = crossbeam_epoch::pin();
        let lsn = match when {
            When::Appended => Lsn::new(u64::MAX),
            When::Visible => self.progress.durable(),
            When::At(lsn) => lsn,
        };
        let (mut read, mut value) = (Some(read), None);
        // The value is not handed up through the closures: each would copy it.
        let newest = self.find_newest(hash, &guard, |segment, offset| {
            segment.look(offset, |op| {
                if !is_named(op, keyspace, Class::Key, key) {
                    return Ok(None);
                }
                // Upholds S1 and D3.
                if op.lsn > lsn {
                    return Ok(Some(Newest::TooNew));
                }
                if let Some(read) = read.take_if(|_| op.head.kind == Kind::Put) {
                    segment.check_value(op)?;
                    value = Some(read(segment, op)?);
                }
                Ok(Some(Newest::Seen))
            })
        })?;
        match (newest, read) {
            (Some(Newest::TooNew), Some(read)) => {
                self.with_older_version(keyspace, key, hash, when, read, &guard)
            }
            _ => Ok(value),
        }
    }

    /// The same where the newest op is too new: back along the links.
    #[cold]
    fn with_older_version<T>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        hash: u64,
        when: When,
        read: impl FnOnce(&Arc<Segment>, &OpView<'_>) -> Result<T>,
        guard: &Guard,
    ) -> Result<Option<T>> {
        loop {
            let found = self.version(keyspace, key, hash, when, guard)?;
            let Some(found) = found.filter(|op| op.head.kind == Kind::Put) else { return Ok(None) };
            // If it is gone, what it held was carried elsewhere meanwhile.
            if let Some(segment) = self.segments.of(found.at.segment, guard) {
                let Found { at, lsn, head, bytes } = found;
                let found = Found { at, lsn, head, bytes: &*bytes };
                segment.check_value(&found)?;
                return read(segment, &found).map(Some);
            }
        }
    }

    /// The mark of a fence as it is on the disk: the larger of its own and the floor.
    pub fn mark(&self, keyspace: &KeyspaceState, fence: &[u8]) -> Result<Option<Mark>> {
        let guard = crossbeam_epoch::pin();
        let hashes = self.fence_hashes(keyspace, fence);
        // In front of the floor: folding raises that before it drops own marks.
        let own = self.fence(keyspace, fence, hashes, When::Visible, &guard)?.state.mark;
        let mark = crate::fence::mark(own, keyspace.floor_durable());
        Ok((mark.get() > 0).then_some(mark))
    }
}

/// The newest op under a key, to one who reads at an lsn.
enum Newest {
    Seen,
    TooNew,
}

#[inline]
pub(crate) fn value_of(segment: &Arc<Segment>, found: &OpView<'_>) -> Result<Value> {
    let range = found.head.value();
    let pinned = if range.len() > COPY_BYTES { segment.pin() } else { None };
    let bytes = match pinned {
        Some(segment) => Held::Pinned { segment: Arc::new(segment), from: range.start, to: range.end },
        None => Held::Copy(found.value().into()),
    };
    let Some(token) = Token::try_new(found.head.token) else {
        return Err(segment.corrupt(found.at.offset, "a value without a token"));
    };
    Ok(Value { bytes, token, lsn: found.lsn })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::append::{frame_bytes, room};
    use crate::db::Db;
    use crate::error::Error;
    use crate::keyspace::Keyspace;
    use crate::log::pool::Need;
    use crate::op::{Links, Op};
    use crate::options::{KeyspaceOptions, Options, Tokens};
    use crate::storage::SimDisk;

    /// No write makes one; whoever forges the files gets an error for it.
    #[test]
    fn a_value_without_a_token_is_damage() {
        let disk = SimDisk::new();
        let open = || -> (Db, Keyspace) {
            let db = Options::new().storage(disk.clone()).without_threads().open("sim").unwrap();
            let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
            (db, rows)
        };
        let (db, rows) = open();
        let key = &b"key"[..];
        let id = rows.state.id;
        let op =
            Op { kind: Kind::Put, keyspace: id, token: 0, key, value: b"value", links: Links::default() };
        let engine = &db.shared.engine;
        let room = room(frame_bytes(1, 8), 1);
        engine.with_room(room, Need::Ordinary, |tail| engine.append_op(tail, &op)).unwrap();
        db.close().unwrap();
        let (_db, rows) = open();
        let found = rows.get(key);
        assert!(matches!(&found, Err(Error::Corrupt { .. })), "{found:?}");
        assert!(rows.iter().next().is_some_and(|item| item.is_err()));
    }
}
