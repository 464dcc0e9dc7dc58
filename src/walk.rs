//! Keys with their values at one lsn, in the order of the keys, from both ends.
//!
//! One job: a scan. Copies keys out of their order a chunk at a time, and looks up several of them side by side. No lock
//! is held while a value is read.
//!
//! Read next: `view.rs`, the public face of it.

use crate::engine::{Engine, KeyspaceState, When};
use crate::error::Result;
use crate::format::frame::FRAME_HEADER_BYTES;
use crate::index::KeyChunk;
use crate::look_up::is_named;
use crate::op::{Class, Kind};
use crate::snapshot::{Pin, Value, value_of};
use crate::sync::Arc;
use crate::types::{Location, Lsn};
use std::convert::Infallible;
use std::hint::black_box;
use std::mem;
use std::ops::Bound;

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
    /// Of the first keys of the chunk.
    sighted: Vec<Sighted>,
    next: usize,
    limit: usize,
}

/// A key that was looked up ahead.
#[derive(Clone, Copy)]
struct Sighted {
    hash: u64,
    /// Where an op lay that may be the key's newest one.
    at: Option<Location>,
}

const FIRST_CHUNK: usize = 32;
const LARGEST_CHUNK: usize = 1024;
/// Keys looked up side by side, and at the start of a walk, which may be wanted for one key only.
const AHEAD: usize = 32;
const FIRST_AHEAD: usize = 4;
/// Of most machines; if it is another, a few bytes are touched in vain or not at all.
const CACHE_LINE: usize = 64;

impl Ahead {
    /// Whether anybody has asked at this end.
    fn walks(&self) -> bool {
        self.limit > 0
    }

    /// Whether another chunk is to be copied; the last one was shorter than was asked for.
    fn is_used_up(&self) -> bool {
        self.next == self.keys.len() && self.keys.len() == self.limit
    }

    fn grow(&mut self) -> usize {
        self.next = 0;
        self.sighted.clear();
        self.limit = if self.limit == 0 { FIRST_CHUNK } else { (self.limit * 4).min(LARGEST_CHUNK) };
        self.limit
    }

    /// The next key, and what was seen of it.
    fn peek(&mut self, engine: &Engine, keyspace: &KeyspaceState) -> Option<(&[u8], Sighted)> {
        if self.next == self.sighted.len() {
            let is_first = self.next == 0 && self.limit == FIRST_CHUNK;
            let count = if is_first { FIRST_AHEAD } else { AHEAD };
            engine.look_ahead(keyspace, &self.keys, count, &mut self.sighted);
        }
        Some((self.keys.get(self.next)?, *self.sighted.get(self.next)?))
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

    pub fn check_readable(&self) -> Result<()> {
        self.pin.engine.check_readable()
    }

    pub fn next(&mut self) -> Step {
        loop {
            if self.front.is_used_up() {
                self.pin.engine.sort_keys(&self.keyspace)?;
                let limit = self.front.grow();
                let (from, to) = (borrowed(&self.from), borrowed(&self.to));
                let keys = self.keyspace.keys.chunk_after(from, to, limit, &mut self.front.keys);
                debug_assert_eq!(keys, Ok(()), "sorted above, for ever");
            }
            let engine = &self.pin.engine;
            let Some((key, sighted)) = self.front.peek(engine, &self.keyspace) else { return Ok(None) };
            // The other end, once it walks, may have come past the keys that were copied ahead.
            if self.back.walks() && is_beyond(key, &self.to) {
                return Ok(None);
            }
            // An error leaves the walk where it is, so that it is returned again.
            let value = engine.sighted_value(&self.keyspace, key, sighted, self.pin.lsn)?;
            exclude(&mut self.from, key);
            let found = value.map(|value| (key.to_vec(), value));
            self.front.next += 1;
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    pub fn next_back(&mut self) -> Step {
        loop {
            if self.back.is_used_up() {
                self.pin.engine.sort_keys(&self.keyspace)?;
                let limit = self.back.grow();
                let (from, to) = (borrowed(&self.from), borrowed(&self.to));
                let keys = self.keyspace.keys.chunk_before(from, to, limit, &mut self.back.keys);
                debug_assert_eq!(keys, Ok(()), "sorted above, for ever");
            }
            let engine = &self.pin.engine;
            let Some((key, sighted)) = self.back.peek(engine, &self.keyspace) else { return Ok(None) };
            if self.front.walks() && is_before(key, &self.from) {
                return Ok(None);
            }
            // An error leaves the walk where it is, so that it is returned again.
            let value = engine.sighted_value(&self.keyspace, key, sighted, self.pin.lsn)?;
            exclude(&mut self.to, key);
            let found = value.map(|value| (key.to_vec(), value));
            self.back.next += 1;
            if found.is_some() {
                return Ok(found);
            }
        }
    }
}

impl Engine {
    /// Looks for the next `count` keys behind those that are looked up, and touches what reading them will read:
    /// first all lines of the index, then all ops. The memory fetches those side by side, where one look-up
    /// behind the other would wait for each.
    fn look_ahead(&self, keyspace: &KeyspaceState, keys: &KeyChunk, count: usize, found: &mut Vec<Sighted>) {
        let guard = crossbeam_epoch::pin();
        let from = found.len();
        let names = (from..keys.len()).take(count.min(AHEAD)).filter_map(|n| keys.get(n));
        found.extend(names.map(|key| Sighted { hash: self.hash(keyspace, Class::Key, key), at: None }));
        let new = &mut found[from..];
        let mut touched = new.iter().fold(0, |touched, new| touched ^ self.slots.touch(new.hash, &guard));
        let mut ops: [&[u8]; AHEAD] = [&[]; AHEAD];
        for (op, new) in ops.iter_mut().zip(new) {
            // The first place under the tag is nearly always the right one; if not, nothing is lost.
            let place = self.slots.find(new.hash, &guard, |place| Ok::<_, Infallible>(Some(place)));
            if let Ok(Some(place)) = place
                && let Some(segment) = self.segments.get(place.segment, &guard)
            {
                new.at = Some(segment.location(place.offset));
                // The header of a frame with one op stands in front of it.
                let start = (place.offset as usize).saturating_sub(FRAME_HEADER_BYTES);
                *op = segment.bytes().get(start..).unwrap_or_default();
            }
        }
        for at in [0, CACHE_LINE, 2 * CACHE_LINE, 3 * CACHE_LINE - 1] {
            touched ^= ops.iter().fold(0, |sum, op| sum ^ u64::from(op.get(at).copied().unwrap_or(0)));
        }
        black_box(touched);
    }

    /// The value of a key at `lsn`, which a snapshot pins. Where the op that was sighted is that old, it is the
    /// answer: whatever is newer was appended behind the look, and so behind the snapshot.
    fn sighted_value(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        sighted: Sighted,
        lsn: Lsn,
    ) -> Result<Option<Value>> {
        if let Some(at) = sighted.at {
            let guard = crossbeam_epoch::pin();
            if let Some(segment) = self.segments.of(at.segment, &guard) {
                let seen = segment.look(at.offset, |op| {
                    // Upholds S1.
                    if op.lsn > lsn || !is_named(op, keyspace, Class::Key, key) {
                        return Ok(None);
                    }
                    if op.head.kind != Kind::Put {
                        return Ok(Some(None));
                    }
                    segment.check_value(op)?;
                    Ok(Some(Some(value_of(segment, op)?)))
                })?;
                if let Some(value) = seen {
                    return Ok(value);
                }
            }
        }
        self.hashed_value(keyspace, key, sighted.hash, When::At(lsn))
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

/// The walk has come past `key`. Keeps the memory of the bound.
fn exclude(bound: &mut Bound<Vec<u8>>, key: &[u8]) {
    let mut bytes = match mem::replace(bound, Bound::Unbounded) {
        Bound::Included(bytes) | Bound::Excluded(bytes) => bytes,
        Bound::Unbounded => Vec::new(),
    };
    bytes.clear();
    bytes.extend_from_slice(key);
    *bound = Bound::Excluded(bytes);
}

fn borrowed(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}
