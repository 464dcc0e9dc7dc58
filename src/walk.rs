//! Keys with their values at one lsn, in the order of the keys, from both ends.
//!
//! One job: a scan. Copies keys out of their order a chunk at a time, and looks up several of them side by side. No lock
//! is held while a value is read.
//!
//! Read next: `view.rs`, the public face of it.

use crate::engine::{Engine, KeyspaceState, When};
use crate::error::Result;
use crate::format::op::INLINE_VALUE_BYTES;
use crate::index::KeyChunk;
use crate::log::segment::Segment;
use crate::look_up::{SIDE_BY_SIDE, bring_near, is_named};
use crate::op::{Class, Kind};
use crate::snapshot::{Pin, Value};
use crate::sync::Arc;
use crate::types::{Lsn, Token};
use std::ops::{Bound, Range};

/// What stands under a key, for whoever reads it at its turn.
pub(crate) enum Read<'a> {
    /// It was read ahead.
    Seen {
        bytes: &'a [u8],
        token: Token,
        lsn: Lsn,
    },
    Value(Value),
}

impl Read<'_> {
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Read::Seen { bytes, .. } => bytes,
            Read::Value(value) => value.bytes(),
        }
    }

    #[inline]
    pub fn into_value(self) -> Value {
        match self {
            Read::Seen { bytes, token, lsn } => Value::copied(bytes, token, lsn),
            Read::Value(value) => value,
        }
    }
}

/// A walk over the keys of a keyspace at one lsn, from both ends.
pub(crate) struct Walk {
    pin: Arc<Pin>,
    keyspace: Arc<KeyspaceState>,
    /// Where the chunks of the two ends begin.
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
    seen: Vec<Seen>,
    /// The values that were seen last.
    values: Vec<u8>,
    next: usize,
    limit: usize,
}

/// What was seen of a key ahead of its turn.
#[derive(Clone)]
enum Seen {
    /// A value, and where in `values` it is.
    Value { token: Token, lsn: Lsn, bytes: Range<u32> },
    /// It has none.
    Nothing,
    /// Nothing that could be told from one look.
    Unknown { hash: u64 },
}

const FIRST_CHUNK: usize = 32;
const LARGEST_CHUNK: usize = 1024;
/// So many keys are looked up at the start of a walk, which may be wanted for one key only.
const FIRST_AHEAD: usize = 4;
/// There is room for so many bytes of each value that is read ahead, so that most need no more.
const SMALL_BYTES: usize = 128;

impl Ahead {
    /// Whether anybody has asked at this end.
    fn walks(&self) -> bool {
        self.limit > 0
    }

    /// Whether another chunk is to be copied; the last one was shorter than was asked for.
    fn is_used_up(&self) -> bool {
        self.next == self.keys.len() && self.keys.len() == self.limit
    }

    /// Where this end has come to; its chunk begins at `start`.
    fn reached<'a>(&'a self, start: &'a Bound<Vec<u8>>) -> Bound<&'a [u8]> {
        let last = self.next.checked_sub(1).and_then(|last| self.keys.get(last));
        last.map_or(start.as_ref().map(Vec::as_slice), Bound::Excluded)
    }

    fn grow(&mut self) -> usize {
        self.next = 0;
        self.seen.clear();
        self.limit = if self.limit == 0 { FIRST_CHUNK } else { (self.limit * 4).min(LARGEST_CHUNK) };
        self.seen.reserve(self.limit);
        self.limit
    }

    /// Sees to it that the next key was looked up; whether there is one.
    #[inline]
    fn look(&mut self, engine: &Engine, keyspace: &KeyspaceState, lsn: Lsn) -> bool {
        if self.next == self.seen.len() && self.next < self.keys.len() {
            let is_first = self.next == 0 && self.limit == FIRST_CHUNK;
            let count = if is_first { FIRST_AHEAD } else { SIDE_BY_SIDE };
            self.values.clear();
            self.values.reserve(count * SMALL_BYTES);
            engine.look_ahead(keyspace, &self.keys, count, lsn, &mut self.seen, &mut self.values);
        }
        self.next < self.seen.len()
    }

    /// The next key.
    #[inline]
    fn key(&self) -> &[u8] {
        self.keys.get(self.next).unwrap_or_default()
    }

    /// The value of the next key, which was looked up.
    #[inline]
    fn value(&self, engine: &Engine, keyspace: &KeyspaceState, lsn: Lsn) -> Result<Option<Read<'_>>> {
        match &self.seen[self.next] {
            Seen::Value { token, lsn, bytes } => {
                let bytes = &self.values[bytes.start as usize..bytes.end as usize];
                Ok(Some(Read::Seen { bytes, token: *token, lsn: *lsn }))
            }
            Seen::Nothing => Ok(None),
            Seen::Unknown { hash } => {
                let value = engine.hashed_value(keyspace, self.key(), *hash, When::At(lsn))?;
                Ok(value.map(Read::Value))
            }
        }
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

    #[inline(always)]
    pub fn next<T>(&mut self, read: impl FnOnce(&[u8], Read<'_>) -> T) -> Result<Option<T>> {
        let Pin { engine, lsn } = &*self.pin;
        loop {
            if self.front.is_used_up() {
                engine.sort_keys(&self.keyspace)?;
                self.from = self.front.reached(&self.from).map(<[u8]>::to_vec);
                let limit = self.front.grow();
                let (from, to) = (self.from.as_ref().map(Vec::as_slice), self.back.reached(&self.to));
                let keys = self.keyspace.keys.chunk_after(from, to, limit, &mut self.front.keys);
                debug_assert_eq!(keys, Ok(()), "sorted above, for ever");
            }
            if !self.front.look(engine, &self.keyspace, *lsn) {
                return Ok(None);
            }
            let key = self.front.key();
            // The other end, once it walks, may have come past the keys that were copied ahead.
            if self.back.walks() && is_beyond(key, self.back.reached(&self.to)) {
                return Ok(None);
            }
            // An error leaves the walk where it is, so that it is returned again.
            let Some(value) = self.front.value(engine, &self.keyspace, *lsn)? else {
                self.front.next += 1;
                continue;
            };
            let found = read(key, value);
            self.front.next += 1;
            return Ok(Some(found));
        }
    }

    #[inline(always)]
    pub fn next_back<T>(&mut self, read: impl FnOnce(&[u8], Read<'_>) -> T) -> Result<Option<T>> {
        let Pin { engine, lsn } = &*self.pin;
        loop {
            if self.back.is_used_up() {
                engine.sort_keys(&self.keyspace)?;
                self.to = self.back.reached(&self.to).map(<[u8]>::to_vec);
                let limit = self.back.grow();
                let (from, to) = (self.front.reached(&self.from), self.to.as_ref().map(Vec::as_slice));
                let keys = self.keyspace.keys.chunk_before(from, to, limit, &mut self.back.keys);
                debug_assert_eq!(keys, Ok(()), "sorted above, for ever");
            }
            if !self.back.look(engine, &self.keyspace, *lsn) {
                return Ok(None);
            }
            let key = self.back.key();
            if self.front.walks() && is_before(key, self.front.reached(&self.from)) {
                return Ok(None);
            }
            // An error leaves the walk where it is, so that it is returned again.
            let Some(value) = self.back.value(engine, &self.keyspace, *lsn)? else {
                self.back.next += 1;
                continue;
            };
            let found = read(key, value);
            self.back.next += 1;
            return Ok(Some(found));
        }
    }
}

impl Engine {
    /// Looks up the next `count` keys behind those that were, side by side, and reads what it finds.
    fn look_ahead(
        &self,
        keyspace: &KeyspaceState,
        keys: &KeyChunk,
        count: usize,
        lsn: Lsn,
        seen: &mut Vec<Seen>,
        values: &mut Vec<u8>,
    ) {
        let guard = crossbeam_epoch::pin();
        let first = seen.len();
        let count = count.min(SIDE_BY_SIDE).min(keys.len() - first);
        let mut hashes = [0; SIDE_BY_SIDE];
        let hashes = &mut hashes[..count];
        for (hash, key) in hashes.iter_mut().zip(keys.from(first)) {
            *hash = self.hash(keyspace, Class::Key, key);
        }
        let ops = bring_near(&self.slots, &self.segments, hashes.iter().copied(), &guard);
        for ((op, &hash), key) in ops.iter().zip(&*hashes).zip(keys.from(first)) {
            let found = op.and_then(|(segment, offset)| see(segment, offset, keyspace, key, lsn, values));
            seen.push(found.unwrap_or(Seen::Unknown { hash }));
        }
    }
}

/// What an op that was found says of a key at `lsn`, which a snapshot pins. Where it is that old, it is the
/// answer: whatever is newer was appended behind the look, and so behind the snapshot.
///
/// `None`: it is not to be told from this op alone, or is better read when its turn comes: what cannot be read, so that
/// the error comes at its place, large values, and what takes a system call.
#[inline(always)]
fn see(
    segment: &Segment,
    offset: u32,
    keyspace: &KeyspaceState,
    key: &[u8],
    lsn: Lsn,
    values: &mut Vec<u8>,
) -> Option<Seen> {
    let op = &segment.view(offset)?;
    // Upholds S1.
    if op.lsn > lsn || !is_named(op, keyspace, Class::Key, key) {
        return None;
    }
    if op.head.kind != Kind::Put {
        return Some(Seen::Nothing);
    }
    let value = op.value();
    // What has a checksum of its own is not proven by its head, whatever its length.
    if op.head.value_checksum().is_some() || value.len() > INLINE_VALUE_BYTES {
        return None;
    }
    let token = Token::try_new(op.head.token)?;
    let from = values.len() as u32;
    values.extend_from_slice(value);
    Some(Seen::Value { token, lsn: op.lsn, bytes: from..values.len() as u32 })
}

fn is_beyond(key: &[u8], to: Bound<&[u8]>) -> bool {
    match to {
        Bound::Included(to) => key > to,
        Bound::Excluded(to) => key >= to,
        Bound::Unbounded => false,
    }
}

fn is_before(key: &[u8], from: Bound<&[u8]>) -> bool {
    match from {
        Bound::Included(from) => key < from,
        Bound::Excluded(from) => key <= from,
        Bound::Unbounded => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Db;
    use crate::format::HEADER_BYTES;
    use crate::format::frame::{FRAME_HEADER_BYTES, LSN_AT};
    use crate::format::op::{Site, encode};
    use crate::keyspace::Keyspace;
    use crate::log::guard::Pins;
    use crate::log::segment::Body;
    use crate::op::{Links, Op};
    use crate::options::{KeyspaceOptions, Options};
    use crate::storage::{Mapping, SimDisk};

    const OFFSET: u32 = HEADER_BYTES + FRAME_HEADER_BYTES as u32;

    fn store() -> (Db, Keyspace, Arc<Segment>) {
        let options = Options::new().storage(SimDisk::new()).without_threads().deterministic(1);
        let db = options.open("sim").unwrap();
        let rows = db.keyspace("rows", KeyspaceOptions::new()).unwrap();
        let segment = db.shared.engine.tail.lock().active.as_ref().unwrap().segment.clone();
        (db, rows, segment)
    }

    /// A put of so many bytes at `OFFSET` in a segment as it was read from a disk.
    fn put(rows: &Keyspace, active: &Segment, value: usize) -> Vec<u8> {
        let (frame, lsn) = (HEADER_BYTES, Lsn::new(1));
        let site = Site { salt: active.salt, segment: active.id, offset: OFFSET, frame, lsn };
        let (keyspace, value, links) = (rows.state.id, &vec![7; value][..], Links::default());
        let op = Op { kind: Kind::Put, keyspace, token: 1, key: b"key", value, links };
        let mut bytes = vec![0; OFFSET as usize];
        bytes[frame as usize + LSN_AT] = 1;
        encode(&op, &site, None, &mut bytes);
        bytes
    }

    fn read(active: &Segment, bytes: &[u8]) -> Segment {
        let body = Body::Map(Mapping::from_bytes(bytes.to_vec()));
        Segment { id: active.id, salt: active.salt, file: active.file.clone(), body, pins: Pins::new() }
    }

    fn sees(rows: &Keyspace, segment: &Segment) -> bool {
        let seen = see(segment, OFFSET, &rows.state, b"key", Lsn::new(1), &mut Vec::new());
        matches!(seen, Some(Seen::Value { .. }))
    }

    /// None is written, but such an op is well formed.
    #[test]
    fn a_small_value_with_a_checksum_of_its_own_is_left_to_its_turn() {
        let (_db, rows, active) = store();
        let mut bytes = put(&rows, &active, 200);
        assert!(sees(&rows, &read(&active, &bytes)));
        *bytes.last_mut().unwrap() ^= 1;
        assert!(read(&active, &bytes).view(OFFSET).is_none(), "its head covers it");

        let mut bytes = put(&rows, &active, 600);
        let value = bytes.len() - 600;
        bytes.truncate(value + 200);
        // Behind checksum, kind, flags, back, keyspace, token and length of the key.
        let length = OFFSET as usize + 10;
        assert_eq!(bytes[length..length + 2], [0xd8, 4], "600");
        bytes[length..length + 2].copy_from_slice(&[0xc8, 1]);
        let checksum = active.salt.op_checksum(OFFSET, Lsn::new(1), &bytes[OFFSET as usize + 4..value]);
        bytes[OFFSET as usize..][..4].copy_from_slice(&checksum.to_le_bytes());
        let segment = read(&active, &bytes);
        let op = segment.view(OFFSET).expect("its head is right");
        assert_eq!(op.value().len(), 200);
        assert!(segment.check_value(&op).is_err(), "it is the checksum of another value");
        assert!(!sees(&rows, &segment));
    }
}
