//! Reading: values, and the lsns that readers still need.
//!
//! One job: what a reader sees at one lsn, and the register of the oldest one in use. Promises S1 (all
//! at or below the lsn, nothing above: whole batches or none of them) and S2 (what is needed stays).
//! No lock is held while a value is read.
//!
//! Read next: `view.rs`, the public face of it.

use crate::engine::{Engine, KeyspaceState, When};
use crate::error::Result;
use crate::index::KeyChunk;
use crate::log::segment::{OpRef, Pinned, Segment, Segments};
use crate::op::{Class, Kind};
use crate::sync::{Arc, Mutex};
use crate::types::{Lsn, Mark};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Bound, Deref};

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
/// Up to 4 KiB are copied; a larger value pins its segment in memory or on disk until it is dropped.
#[derive(Clone)]
pub struct Value {
    bytes: Held,
    mark: Mark,
    lsn: Lsn,
}

#[derive(Clone)]
enum Held {
    Copy(Box<[u8]>),
    Pinned { segment: Arc<Pinned>, from: usize, to: usize },
}

const COPY_BYTES: usize = 4096;

impl Value {
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

    /// The token that the value was written under: to look at, not to write with.
    pub fn mark(&self) -> Mark {
        self.mark
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
        self.lsn == other.lsn && self.mark == other.mark && self.bytes() == other.bytes()
    }
}

impl Eq for Value {}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Value")
            .field("bytes", &crate::types::Excerpt::new(self.bytes()))
            .field("mark", &self.mark)
            .field("lsn", &self.lsn)
            .finish()
    }
}

impl Engine {
    /// The value of a key.
    pub fn value(&self, keyspace: &KeyspaceState, key: &[u8], when: When) -> Result<Option<Value>> {
        self.with_version(keyspace, key, when, |segment, found| Ok(value_of(segment, found)))
    }

    /// Runs `read` on the value of a key, borrowed.
    pub fn value_with<T>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        when: When,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<Option<T>> {
        self.with_version(keyspace, key, when, |_, found| Ok(read(found.value())))
    }

    /// Whether a key has a value.
    pub fn contains(&self, keyspace: &KeyspaceState, key: &[u8], when: When) -> Result<bool> {
        let guard = crossbeam_epoch::pin();
        let hash = self.hash(keyspace, Class::Key, key);
        let found = self.version(keyspace, key, hash, when, &guard)?;
        Ok(found.is_some_and(|op| op.head.kind == Kind::Put))
    }

    fn with_version<T>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        when: When,
        read: impl FnOnce(&Arc<Segment>, &OpRef<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let guard = crossbeam_epoch::pin();
        let hash = self.hash(keyspace, Class::Key, key);
        loop {
            let found = self.version(keyspace, key, hash, when, &guard)?;
            let Some(found) = found.filter(|op| op.head.kind == Kind::Put) else { return Ok(None) };
            // If it is gone, what it held was carried elsewhere meanwhile.
            if let Some(segment) = self.segments.get(Segments::slot(found.at.segment), &guard) {
                segment.check_value(&found)?;
                return read(segment, &found).map(Some);
            }
        }
    }

    /// The mark of a fence as it is on the disk: the larger of its own and the floor.
    pub fn mark(&self, keyspace: &KeyspaceState, fence: &[u8]) -> Result<Option<Mark>> {
        let guard = crossbeam_epoch::pin();
        let hash = self.hash(keyspace, Class::Fence, fence);
        // In front of the floor: folding raises that before it drops own marks.
        let own = self.fence(keyspace, fence, hash, When::Visible, &guard)?.state.mark;
        let mark = crate::fence::mark(own, keyspace.floor_durable());
        Ok((mark.get() > 0).then_some(mark))
    }
}

fn value_of(segment: &Arc<Segment>, found: &OpRef<'_>) -> Value {
    let range = found.head.value();
    let pinned = if range.len() > COPY_BYTES { segment.pin() } else { None };
    let bytes = match pinned {
        Some(segment) => Held::Pinned { segment: Arc::new(segment), from: range.start, to: range.end },
        None => Held::Copy(found.value().into()),
    };
    Value { bytes, mark: Mark::from_number(found.head.token), lsn: found.lsn }
}

/// A key and its value, or that there is no more.
type Step = Result<Option<(Vec<u8>, Value)>>;

/// A walk over the keys of a keyspace at one lsn, from both ends.
pub(crate) struct Walk {
    pin: Arc<Pin>,
    keyspace: Arc<KeyspaceState>,
    from: Bound<Vec<u8>>,
    to: Bound<Vec<u8>>,
    front: Ahead,
    back: Ahead,
}

/// Keys copied ahead of the walk, a chunk at a time.
#[derive(Default)]
struct Ahead {
    keys: KeyChunk,
    next: usize,
    limit: usize,
}

const FIRST_CHUNK: usize = 16;
const LARGEST_CHUNK: usize = 1024;

impl Ahead {
    fn grow(&mut self) -> usize {
        self.next = 0;
        self.limit = if self.limit == 0 { FIRST_CHUNK } else { (self.limit * 4).min(LARGEST_CHUNK) };
        self.limit
    }
}

impl Walk {
    pub fn new(
        pin: Arc<Pin>,
        keyspace: Arc<KeyspaceState>,
        from: Bound<Vec<u8>>,
        to: Bound<Vec<u8>>,
    ) -> Self {
        Walk { pin, keyspace, from, to, front: Ahead::default(), back: Ahead::default() }
    }

    pub fn next(&mut self) -> Step {
        loop {
            if self.front.next == self.front.keys.len() {
                let limit = self.front.grow();
                self.keyspace.keys.chunk_after(
                    borrowed(&self.from),
                    borrowed(&self.to),
                    limit,
                    &mut self.front.keys,
                );
                if self.front.keys.is_empty() {
                    return Ok(None);
                }
            }
            let Some(key) = self.front.keys.get(self.front.next).map(<[u8]>::to_vec) else { return Ok(None) };
            // The other end may have come past the keys that were copied ahead.
            if is_beyond(&key, &self.to) {
                return Ok(None);
            }
            // An error leaves the walk where it is, so that it is returned again.
            let value = self.pin.engine.value(&self.keyspace, &key, When::At(self.pin.lsn))?;
            self.front.next += 1;
            self.from = Bound::Excluded(key.clone());
            if let Some(value) = value {
                return Ok(Some((key, value)));
            }
        }
    }

    pub fn next_back(&mut self) -> Step {
        loop {
            if self.back.next == self.back.keys.len() {
                let limit = self.back.grow();
                self.keyspace.keys.chunk_before(
                    borrowed(&self.from),
                    borrowed(&self.to),
                    limit,
                    &mut self.back.keys,
                );
                if self.back.keys.is_empty() {
                    return Ok(None);
                }
            }
            let Some(key) = self.back.keys.get(self.back.next).map(<[u8]>::to_vec) else { return Ok(None) };
            if is_before(&key, &self.from) {
                return Ok(None);
            }
            let value = self.pin.engine.value(&self.keyspace, &key, When::At(self.pin.lsn))?;
            self.back.next += 1;
            self.to = Bound::Excluded(key.clone());
            if let Some(value) = value {
                return Ok(Some((key, value)));
            }
        }
    }
}

fn is_beyond(key: &[u8], to: &Bound<Vec<u8>>) -> bool {
    match to {
        Bound::Included(to) => key > &to[..],
        Bound::Excluded(to) => key >= &to[..],
        Bound::Unbounded => false,
    }
}

fn is_before(key: &[u8], from: &Bound<Vec<u8>>) -> bool {
    match from {
        Bound::Included(from) => key < &from[..],
        Bound::Excluded(from) => key <= &from[..],
        Bound::Unbounded => false,
    }
}

fn borrowed(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}
