//! The head of an index file as bytes: all that replay makes of the log but the slots of the hash. The layout is
//! in `docs/format.md`, under "Index file".

use super::header::{End, PREAMBLE_BYTES, check_preamble, end, preamble, put_end};
use super::op::Reader;
use crate::error::Result;
use crate::op::{GrantValue, KeyspaceValue};
use crate::types::{KeyspaceId, Location, Lsn, SegmentId};

const INDEX_MAGIC: [u8; 8] = *b"TIDEINDX";
/// What must be read to know how long the head is.
pub(crate) const INDEX_START_BYTES: usize = PREAMBLE_BYTES + 8;

/// The state that the log up to `bound` proves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct IndexHead {
    pub store_id: [u8; 16],
    /// How the last segment ended that is in it.
    pub bound: End,
    pub counter: u64,
    /// Every segment that was begun up to there, in the order of the log.
    pub segments: Vec<IndexedSegment>,
    pub keyspaces: Vec<IndexedKeyspace>,
    /// Grants that nobody had released or superseded.
    pub grants: Vec<IndexedGrant>,
    /// The tables of the hash, in its order. Their bytes follow the head.
    pub tables: Vec<IndexedTable>,
}

/// A segment, and what of it is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IndexedSegment {
    pub life: u64,
    pub end: End,
    pub ops: u64,
    pub filled: u64,
    pub live: u64,
    pub carried: u64,
    pub keys: u64,
    pub dead: u64,
}

/// A keyspace, and what all its fences share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct IndexedKeyspace {
    pub id: KeyspaceId,
    pub name: String,
    pub value: KeyspaceValue,
    /// The floors, raised and folded, each with the lsn of the op that raised it there.
    pub floors: [(u64, Lsn); 2],
    /// The highest token admitted.
    pub highest: u64,
    pub names_fences: bool,
    pub numbers_operations: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct IndexedGrant {
    pub keyspace: KeyspaceId,
    pub fence: Box<[u8]>,
    pub token: u64,
    pub value: GrantValue,
    pub at: Location,
}

/// One table of the hash, as the bytes of the file show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IndexedTable {
    pub depth: u8,
    pub bytes: u32,
    pub checksum: u32,
}

impl IndexHead {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + self.tables.len() * 9 + self.segments.len() * 76);
        out.extend_from_slice(&preamble(INDEX_MAGIC));
        out.extend_from_slice(&[0; 8]); // the length, below
        out.extend_from_slice(&self.store_id);
        put_end(&mut out, &self.bound);
        put(&mut out, &[self.counter]);
        put_count(&mut out, self.segments.len());
        for segment in &self.segments {
            put_end(&mut out, &segment.end);
            let IndexedSegment { life, end: _, ops, filled, live, carried, keys, dead } = *segment;
            put(&mut out, &[life, ops, filled, live, carried, keys, dead]);
        }
        put_count(&mut out, self.keyspaces.len());
        for keyspace in &self.keyspaces {
            out.extend_from_slice(&keyspace.id.0.to_le_bytes());
            out.push(keyspace.name.len() as u8);
            out.extend_from_slice(keyspace.name.as_bytes());
            out.extend_from_slice(&keyspace.value.encode());
            let [raised, folded] = keyspace.floors;
            put(&mut out, &[raised.0, raised.1.get(), folded.0, folded.1.get(), keyspace.highest]);
            out.push(u8::from(keyspace.names_fences) | u8::from(keyspace.numbers_operations) << 1);
        }
        put_count(&mut out, self.grants.len());
        for grant in &self.grants {
            out.extend_from_slice(&grant.keyspace.0.to_le_bytes());
            put_count(&mut out, grant.fence.len());
            out.extend_from_slice(&grant.fence);
            put(&mut out, &[grant.token]);
            out.extend_from_slice(&grant.value.encode());
            out.extend_from_slice(&grant.at.segment.0.to_le_bytes());
            out.extend_from_slice(&grant.at.offset.to_le_bytes());
        }
        put_count(&mut out, self.tables.len());
        for table in &self.tables {
            out.push(table.depth);
            out.extend_from_slice(&table.bytes.to_le_bytes());
            out.extend_from_slice(&table.checksum.to_le_bytes());
        }
        let len = out.len() as u64 + 4;
        out[PREAMBLE_BYTES..INDEX_START_BYTES].copy_from_slice(&len.to_le_bytes());
        let checksum = crc32fast::hash(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// How long the head is that starts like this; `None`: it is none.
    ///
    /// # Errors
    /// It is one of a newer version.
    pub fn len(start: &[u8], file: &str) -> Result<Option<u64>> {
        if !check_preamble(start, INDEX_MAGIC, file)? {
            return Ok(None);
        }
        Ok(Reader { bytes: start, at: PREAMBLE_BYTES }.u64())
    }

    /// Whether the first bytes of a file say that it is an index of this store: only then may it be removed.
    pub fn belongs_to(bytes: &[u8], store_id: &[u8; 16]) -> bool {
        bytes.starts_with(&INDEX_MAGIC)
            && bytes.get(INDEX_START_BYTES..INDEX_START_BYTES + 16) == Some(store_id)
    }

    /// The head in these bytes, all of them; `None`: it is damaged.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let covered = bytes.get(..bytes.len().checked_sub(4)?)?;
        if crc32fast::hash(covered) != (Reader { bytes, at: covered.len() }).u32()? {
            return None;
        }
        let mut at = Reader { bytes: covered, at: INDEX_START_BYTES };
        let store_id = at.take(16)?.try_into().ok()?;
        let bound = end(&mut at)?;
        let counter = at.u64()?;
        let segments = list(&mut at, |at| {
            Some(IndexedSegment {
                end: end(at)?,
                life: at.u64()?,
                ops: at.u64()?,
                filled: at.u64()?,
                live: at.u64()?,
                carried: at.u64()?,
                keys: at.u64()?,
                dead: at.u64()?,
            })
        })?;
        let keyspaces = list(&mut at, |at| {
            let id = KeyspaceId(at.u16()?);
            let name_len = at.u8()? as usize;
            let name = std::str::from_utf8(at.take(name_len)?).ok()?.to_owned();
            let value = KeyspaceValue::decode(at.take(KeyspaceValue::BYTES)?)?;
            let mut floor = || Some((at.u64()?, Lsn::new(at.u64()?)));
            let floors = [floor()?, floor()?];
            let highest = at.u64()?;
            let flags = at.u8()?;
            let (names_fences, numbers_operations) = (flags & 1 != 0, flags & 2 != 0);
            Some(IndexedKeyspace { id, name, value, floors, highest, names_fences, numbers_operations })
        })?;
        let grants = list(&mut at, |at| {
            let keyspace = KeyspaceId(at.u16()?);
            let fence_len = at.u32()? as usize;
            let fence = at.take(fence_len)?.into();
            let token = at.u64()?;
            let value = GrantValue::decode(at.take(GrantValue::BYTES)?)?;
            let at = Location { segment: SegmentId(at.u32()?), offset: at.u32()? };
            Some(IndexedGrant { keyspace, fence, token, value, at })
        })?;
        let tables = list(&mut at, |at| {
            Some(IndexedTable { depth: at.u8()?, bytes: at.u32()?, checksum: at.u32()? })
        })?;
        let head = IndexHead { store_id, bound, counter, segments, keyspaces, grants, tables };
        (at.at == covered.len()).then_some(head)
    }
}

fn put(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&(count as u32).to_le_bytes());
}

fn list<T>(at: &mut Reader<'_>, mut item: impl FnMut(&mut Reader<'_>) -> Option<T>) -> Option<Vec<T>> {
    (0..at.u32()?).map(|_| item(at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{KeyspaceOptions, Scope};
    use crate::types::{OwnerId, Ttl};

    fn head() -> IndexHead {
        let end = |segment, lsn| End { segment, offset: 5000, checksum: 7, lsn: Lsn::new(lsn) };
        let segment = |id, lsn| IndexedSegment {
            life: 3,
            end: end(id, lsn),
            ops: 5,
            filled: 100,
            live: 50,
            carried: 10,
            keys: 2,
            dead: 1,
        };
        IndexHead {
            store_id: [9; 16],
            bound: end(2, 40),
            counter: 17,
            segments: vec![segment(1, 20), segment(2, 40)],
            keyspaces: vec![IndexedKeyspace {
                id: KeyspaceId(1),
                name: "jobs".to_owned(),
                value: KeyspaceValue {
                    options: KeyspaceOptions::new().scope(Scope::Prefix(b'/')),
                    needs_floor: false,
                },
                floors: [(3, Lsn::new(8)), (0, Lsn::ZERO)],
                highest: 17,
                names_fences: true,
                numbers_operations: false,
            }],
            grants: vec![IndexedGrant {
                keyspace: KeyspaceId(1),
                fence: (*b"7/").into(),
                token: 17,
                value: GrantValue { owner: OwnerId::new(5), ttl: Ttl::INFINITE, incarnation: 6 },
                at: Location { segment: SegmentId(2), offset: 4124 },
            }],
            tables: vec![IndexedTable { depth: 0, bytes: 576, checksum: 11 }],
        }
    }

    #[test]
    fn a_head_goes_both_ways_and_no_bit_of_it_may_flip() {
        let bytes = head().encode();
        assert_eq!(IndexHead::len(&bytes, "").unwrap(), Some(bytes.len() as u64));
        assert_eq!(IndexHead::decode(&bytes), Some(head()));
        assert!(IndexHead::belongs_to(&bytes, &[9; 16]) && !IndexHead::belongs_to(&bytes, &[8; 16]));
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let starts = matches!(IndexHead::len(&bytes, ""), Ok(Some(len)) if len == bytes.len() as u64);
            assert!(!starts || IndexHead::decode(&bytes).is_none(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert_eq!(IndexHead::decode(&bytes[..len]), None);
        }
    }
}
