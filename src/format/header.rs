//! The headers and seals of segments and the blocks of `STORE` as bytes. The layouts are in
//! `docs/format.md`, under "Segment" and "STORE".

use super::op::Reader;
use super::salt::Salt;
use super::{FORMAT_VERSION, HEADER_BYTES, name};
use crate::error::{Error, Result};
use crate::types::{Lsn, SegmentId};

/// The bytes of a seal, the last ones of a sealed segment.
pub(crate) const SEAL_BYTES: usize = 64;
/// The smallest capacity of one copy in `STORE`.
pub(crate) const STORE_COPY_BYTES: usize = 16 << 10;

pub(super) const PREAMBLE_BYTES: usize = 16;
/// So many bytes of the magic of a spare and of a segment are the same.
const MAGIC_PREFIX: usize = 4;
const SEGMENT_MAGIC: [u8; 8] = *b"TIDEWALL";
const SPARE_MAGIC: [u8; 8] = *b"TIDEFREE";
const STORE_MAGIC: [u8; 8] = *b"TIDESTOR";
const SEAL_MAGIC: [u8; 8] = *b"TIDESEAL";

/// Magic, version and their checksum: the same in every version of the format, so that a newer one
/// is told from a damaged one.
pub(super) fn preamble(magic: [u8; 8]) -> [u8; PREAMBLE_BYTES] {
    let mut out = [0; PREAMBLE_BYTES];
    out[..8].copy_from_slice(&magic);
    out[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    let checksum = crc32fast::hash(&out[..12]);
    out[12..].copy_from_slice(&checksum.to_le_bytes());
    out
}

/// Whether `bytes` start with a preamble this build can read.
pub(super) fn check_preamble(bytes: &[u8], magic: [u8; 8], file: &str) -> Result<bool> {
    let mut at = Reader { bytes, at: 8 };
    let (Some(version), Some(checksum)) = (at.u32(), at.u32()) else { return Ok(false) };
    if bytes[..8] != magic || crc32fast::hash(&bytes[..12]) != checksum {
        return Ok(false);
    }
    if version != FORMAT_VERSION {
        return Err(Error::UpgradeRequired {
            file: file.to_owned(),
            found: version,
            supported: FORMAT_VERSION,
        });
    }
    Ok(true)
}

/// How a sealed segment ended: in its own seal, and named again by the header of the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct End {
    /// 0: there is no segment before.
    pub segment: u32,
    /// Where the frames end.
    pub offset: u32,
    /// The checksum of the last frame's header, or of the segment's header when there is none.
    pub checksum: u32,
    pub lsn: Lsn,
}

/// The block in front of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentHeader {
    pub store_id: [u8; 16],
    pub segment: SegmentId,
    pub bytes: u32,
    pub life: u64,
    /// The token counter when the segment was begun.
    pub counter: u64,
    /// How the segment before ended.
    pub before: End,
}

const SEGMENT_FIELDS: usize = PREAMBLE_BYTES + 16 + 4 + 4 + 8 + 8 + 20;

impl SegmentHeader {
    /// The whole block, and the checksum in it.
    pub fn encode(&self, salt: Salt) -> (Vec<u8>, u32) {
        let mut out = Vec::with_capacity(HEADER_BYTES as usize);
        out.extend_from_slice(&preamble(SEGMENT_MAGIC));
        out.extend_from_slice(&self.store_id);
        out.extend_from_slice(&self.segment.0.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&self.life.to_le_bytes());
        out.extend_from_slice(&self.counter.to_le_bytes());
        put_end(&mut out, &self.before);
        let checksum = salt.checksum(0, &[&out]);
        out.extend_from_slice(&checksum.to_le_bytes());
        out.resize(HEADER_BYTES as usize, 0);
        (out, checksum)
    }

    /// The header in `bytes` and its checksum, or `None` when it was not written in this life.
    pub fn decode(bytes: &[u8], salt: Salt, file: &str) -> Result<Option<(Self, u32)>> {
        if !check_preamble(bytes, SEGMENT_MAGIC, file)? {
            return Ok(None);
        }
        Ok(Self::fields(bytes, salt))
    }

    fn fields(bytes: &[u8], salt: Salt) -> Option<(Self, u32)> {
        let checksum = Reader { bytes, at: SEGMENT_FIELDS }.u32()?;
        if salt.checksum(0, &[&bytes[..SEGMENT_FIELDS]]) != checksum {
            return None;
        }
        let mut at = Reader { bytes, at: PREAMBLE_BYTES };
        let header = SegmentHeader {
            store_id: at.take(16)?.try_into().ok()?,
            segment: SegmentId(at.u32()?),
            bytes: at.u32()?,
            life: at.u64()?,
            counter: at.u64()?,
            before: end(&mut at)?,
        };
        Some((header, checksum))
    }

    /// The header in `bytes`, of whatever store, segment and life it says that it is, and its salt.
    pub fn decode_any(bytes: &[u8]) -> Option<(Self, Salt)> {
        let mut at = Reader { bytes, at: PREAMBLE_BYTES };
        let store_id = at.take(16)?.try_into().ok()?;
        let (segment, _, life) = (SegmentId(at.u32()?), at.u32()?, at.u64()?);
        let salt = Salt::new(&store_id, segment, life);
        let (header, _) = Self::decode(bytes, salt, "").ok().flatten()?;
        Some((header, salt))
    }

    /// Whether the first bytes of a file say that it is a segment of this store, whatever its life:
    /// only then may an unlisted file be removed.
    pub fn belongs_to(bytes: &[u8], store_id: &[u8; 16]) -> bool {
        bytes.len() >= PREAMBLE_BYTES + 16
            && bytes[..8] == SEGMENT_MAGIC
            && bytes[PREAMBLE_BYTES..PREAMBLE_BYTES + 16] == *store_id
    }
}

/// The block in front of a segment that waits to be begun. What a header has in common with it, no tear can change:
/// what a file begins with, whose it is, and which.
pub(crate) struct SpareBlock {
    pub store_id: [u8; 16],
    pub segment: SegmentId,
}

impl SpareBlock {
    /// The whole block.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = preamble(SPARE_MAGIC).to_vec();
        out.extend_from_slice(&self.store_id);
        out.extend_from_slice(&self.segment.0.to_le_bytes());
        out.resize(HEADER_BYTES as usize, 0);
        out
    }

    /// The block in front of `bytes`, if it is one, whole.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut at = Reader { bytes, at: PREAMBLE_BYTES };
        let block = SpareBlock { store_id: at.take(16)?.try_into().ok()?, segment: SegmentId(at.u32()?) };
        (bytes.get(..HEADER_BYTES as usize)? == block.encode()).then_some(block)
    }

    /// Whether a file of such a store begins so: a spare, a segment, or what a tear makes of the two.
    pub fn may_be(bytes: &[u8], is_it: impl FnOnce(&[u8; 16]) -> bool) -> bool {
        let store_id = bytes.get(PREAMBLE_BYTES..).and_then(<[u8]>::first_chunk);
        Self::was_marked(bytes) && store_id.is_some_and(is_it)
    }

    /// Whether a segment that was marked as a spare when it was listed may begin so, whatever became of it since.
    pub fn was_marked(bytes: &[u8]) -> bool {
        bytes.starts_with(&SPARE_MAGIC[..MAGIC_PREFIX])
    }
}

pub(super) fn put_end(out: &mut Vec<u8>, end: &End) {
    out.extend_from_slice(&end.segment.to_le_bytes());
    out.extend_from_slice(&end.offset.to_le_bytes());
    out.extend_from_slice(&end.checksum.to_le_bytes());
    out.extend_from_slice(&end.lsn.get().to_le_bytes());
}

pub(super) fn end(at: &mut Reader<'_>) -> Option<End> {
    Some(End { segment: at.u32()?, offset: at.u32()?, checksum: at.u32()?, lsn: Lsn::new(at.u64()?) })
}

/// The last bytes of a sealed segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Seal {
    pub end: End,
    pub frames: u32,
    /// The key table lies right in front of the seal.
    pub table_len: u32,
    pub table_checksum: u32,
    pub counter: u64,
    /// How many ops create a keyspace: these are read before all others.
    pub keyspaces: u32,
}

impl Seal {
    pub fn encode(&self, salt: Salt, offset: u32) -> [u8; SEAL_BYTES] {
        let mut out = Vec::with_capacity(SEAL_BYTES);
        out.extend_from_slice(&SEAL_MAGIC);
        put_end(&mut out, &self.end);
        out.extend_from_slice(&self.frames.to_le_bytes());
        out.extend_from_slice(&self.table_len.to_le_bytes());
        out.extend_from_slice(&self.table_checksum.to_le_bytes());
        out.extend_from_slice(&self.counter.to_le_bytes());
        out.extend_from_slice(&self.keyspaces.to_le_bytes());
        let mut block = [0; SEAL_BYTES];
        block[..out.len()].copy_from_slice(&out);
        let checksum = salt.checksum(offset, &[&block[..SEAL_BYTES - 4]]);
        block[SEAL_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
        block
    }

    /// The seal in `bytes`, if it was written at `offset` in this life of the segment.
    pub fn decode(bytes: &[u8], salt: Salt, offset: u32) -> Option<Self> {
        let bytes = bytes.get(..SEAL_BYTES)?;
        let checksum = Reader { bytes, at: SEAL_BYTES - 4 }.u32()?;
        if bytes[..8] != SEAL_MAGIC || salt.checksum(offset, &[&bytes[..SEAL_BYTES - 4]]) != checksum {
            return None;
        }
        let mut at = Reader { bytes, at: 8 };
        Some(Seal {
            end: end(&mut at)?,
            frames: at.u32()?,
            table_len: at.u32()?,
            table_checksum: at.u32()?,
            counter: at.u64()?,
            keyspaces: at.u32()?,
        })
    }
}

/// A segment in the list of `STORE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listed {
    pub segment: SegmentId,
    pub bytes: u32,
    /// This life of the file; part of every checksum in it.
    pub life: u64,
    /// Which store wrote it: 0 this one, n its n-th ancestor.
    pub origin: u16,
    /// It has not begun with zeros since it was listed: they are damage.
    pub is_marked: bool,
}

/// What `STORE` says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StoreBlock {
    /// Counts the times it was written; the newest valid copy counts.
    pub generation: u64,
    pub store_id: [u8; 16],
    pub ancestors: Vec<[u8; 16]>,
    /// Drawn anew at each open for writing.
    pub incarnation: u64,
    /// The one before: grants of it may be given grace.
    pub incarnation_before: u64,
    pub next_segment: u32,
    /// The newest segment whose seal was synced before this was written; 0 for none. Its seal is
    /// believed without rewriting it, and missed if it is damaged.
    pub sealed_through: u32,
    /// A copy made by `checkpoint`: opens read-only, or through `restore`.
    pub is_checkpoint: bool,
    /// In the order of their ids.
    pub segments: Vec<Listed>,
    /// The place that the index file is bound to, which is its name; 0: there is none.
    pub index: Lsn,
}

/// One listed segment.
pub(crate) const LISTED_BYTES: usize = 18;
/// Beside the origin of a listed segment.
const MARKED: u16 = 1 << 15;

impl StoreBlock {
    /// How many bytes [`StoreBlock::encode`] answers.
    pub fn len(&self) -> usize {
        let index = if self.index > Lsn::ZERO { 8 } else { 0 };
        79 + 16 * self.ancestors.len() + LISTED_BYTES * self.segments.len() + index
    }

    /// The bytes, with their length and checksum.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128 + self.segments.len() * LISTED_BYTES);
        out.extend_from_slice(&preamble(STORE_MAGIC));
        out.extend_from_slice(&[0; 4]); // the length, below
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.extend_from_slice(&self.store_id);
        out.extend_from_slice(&self.incarnation.to_le_bytes());
        out.extend_from_slice(&self.incarnation_before.to_le_bytes());
        out.extend_from_slice(&self.next_segment.to_le_bytes());
        out.extend_from_slice(&self.sealed_through.to_le_bytes());
        out.push(self.is_checkpoint as u8);
        out.extend_from_slice(&(self.ancestors.len() as u16).to_le_bytes());
        for id in &self.ancestors {
            out.extend_from_slice(id);
        }
        out.extend_from_slice(&(self.segments.len() as u32).to_le_bytes());
        for listed in &self.segments {
            out.extend_from_slice(&listed.segment.0.to_le_bytes());
            out.extend_from_slice(&listed.bytes.to_le_bytes());
            out.extend_from_slice(&listed.life.to_le_bytes());
            let marked = if listed.is_marked { MARKED } else { 0 };
            out.extend_from_slice(&(listed.origin | marked).to_le_bytes());
        }
        if self.index > Lsn::ZERO {
            out.extend_from_slice(&self.index.get().to_le_bytes());
        }
        let len = out.len() as u32 + 4;
        out[PREAMBLE_BYTES..PREAMBLE_BYTES + 4].copy_from_slice(&len.to_le_bytes());
        let checksum = crc32fast::hash(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Whether `bytes` are a `STORE` file, of any store.
    pub fn is_one(bytes: &[u8]) -> bool {
        bytes.starts_with(&STORE_MAGIC)
    }

    /// The copy at the start of `bytes`, or `None` when it is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>> {
        if !check_preamble(bytes, STORE_MAGIC, name::STORE)? {
            return Ok(None);
        }
        Ok(Self::fields(bytes))
    }

    fn fields(bytes: &[u8]) -> Option<Self> {
        let len = Reader { bytes, at: PREAMBLE_BYTES }.u32()? as usize;
        let covered = bytes.get(..len.checked_sub(4)?)?;
        if crc32fast::hash(covered) != (Reader { bytes, at: covered.len() }).u32()? {
            return None;
        }
        let mut at = Reader { bytes: covered, at: PREAMBLE_BYTES + 4 };
        let generation = at.u64()?;
        let store_id = at.take(16)?.try_into().ok()?;
        let incarnation = at.u64()?;
        let incarnation_before = at.u64()?;
        let next_segment = at.u32()?;
        let sealed_through = at.u32()?;
        let is_checkpoint = at.u8()? != 0;
        let mut ancestors = Vec::new();
        for _ in 0..at.u16()? {
            ancestors.push(at.take(16)?.try_into().ok()?);
        }
        let mut segments = Vec::new();
        for _ in 0..at.u32()? {
            let (segment, bytes, life, origin) = (SegmentId(at.u32()?), at.u32()?, at.u64()?, at.u16()?);
            let is_marked = origin & MARKED != 0;
            segments.push(Listed { segment, bytes, life, origin: origin & !MARKED, is_marked });
        }
        let index = if at.at < covered.len() { Lsn::new(at.u64()?) } else { Lsn::ZERO };
        Some(StoreBlock {
            generation,
            store_id,
            ancestors,
            incarnation,
            incarnation_before,
            next_segment,
            sealed_through,
            is_checkpoint,
            segments,
            index,
        })
    }

    /// A listed segment was cut to so many bytes, durably.
    pub fn set_bytes(&mut self, segment: SegmentId, bytes: u32) {
        for listed in self.segments.iter_mut().filter(|listed| listed.segment == segment) {
            listed.bytes = bytes;
        }
    }

    /// Whether an id is that of this store, or of one that it came of.
    pub fn is_kin(&self, id: &[u8; 16]) -> bool {
        self.store_id == *id || self.ancestors.contains(id)
    }

    /// The id under which the checksums of a listed segment were made.
    pub fn origin_id(&self, listed: &Listed) -> Option<&[u8; 16]> {
        match listed.origin {
            0 => Some(&self.store_id),
            n => self.ancestors.get(n as usize - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salt() -> Salt {
        Salt::new(&[1; 16], SegmentId(1), 1)
    }

    fn an_end() -> End {
        End { segment: 6, offset: 70_000, checksum: 8, lsn: Lsn::new(9) }
    }

    #[test]
    fn segment_header_goes_both_ways_and_no_flipped_bit_verifies() {
        let header = SegmentHeader {
            store_id: [1; 16],
            segment: SegmentId(7),
            bytes: 1 << 20,
            life: 3,
            counter: 4,
            before: an_end(),
        };
        let (mut bytes, checksum) = header.encode(salt());
        assert_eq!(bytes.len(), HEADER_BYTES as usize);
        assert_eq!(SegmentHeader::decode(&bytes, salt(), "f").unwrap(), Some((header, checksum)));
        let begins = PREAMBLE_BYTES + 16;
        assert!(SegmentHeader::belongs_to(&bytes[..begins], &[1; 16]));
        assert!(!SegmentHeader::belongs_to(&bytes[..begins - 1], &[1; 16]));
        assert!(!SegmentHeader::belongs_to(&bytes, &[2; 16]));
        assert!(!StoreBlock::is_one(&bytes));
        for bit in 0..(SEGMENT_FIELDS + 4) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&bytes, salt(), "f").unwrap(), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    fn a_header() -> SegmentHeader {
        SegmentHeader {
            store_id: [7; 16],
            segment: SegmentId(9),
            bytes: 1 << 20,
            life: 11,
            counter: 4,
            before: an_end(),
        }
    }

    #[test]
    fn a_header_of_any_life_is_read_by_what_it_says_of_itself() {
        let header = a_header();
        let salt = Salt::new(&[7; 16], SegmentId(9), 11);
        let (mut bytes, _) = header.encode(salt);
        assert_eq!(SegmentHeader::decode_any(&bytes), Some((header, salt)));
        bytes[40] ^= 1;
        assert_eq!(SegmentHeader::decode_any(&bytes), None);
    }

    #[test]
    fn no_tear_between_a_spare_and_a_header_hides_that_it_was_marked_and_whose_it_is() {
        let spare = SpareBlock { store_id: [7; 16], segment: SegmentId(9) }.encode();
        let decoded = SpareBlock::decode(&spare).unwrap();
        assert_eq!((decoded.store_id, decoded.segment), ([7; 16], SegmentId(9)));
        for bit in (0..16 * 8).chain(36 * 8..4096 * 8) {
            let mut bytes = spare.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(SpareBlock::decode(&bytes).is_none(), "bit {bit}");
        }
        assert!(SpareBlock::decode(&spare[..4095]).is_none() && SpareBlock::decode(&[0; 4096]).is_none());
        assert!(!SpareBlock::may_be(&spare, |id| *id == [8; 16]) && !SpareBlock::was_marked(&[0; 4096]));
        assert!(!SegmentHeader::belongs_to(&spare, &[7; 16]), "it proves nothing about the list");
        let (header, _) = a_header().encode(salt());
        for at in 0..=512 {
            for (first, second) in [(&spare, &header), (&header, &spare)] {
                let torn = [&first[..at], &second[at..]].concat();
                assert!(
                    SpareBlock::was_marked(&torn) && SpareBlock::may_be(&torn, |id| *id == [7; 16]),
                    "{at}"
                );
            }
        }
    }

    #[test]
    fn seal_goes_both_ways_and_no_flipped_bit_verifies() {
        let seal =
            Seal { end: an_end(), frames: 5, table_len: 6, table_checksum: 7, counter: 8, keyspaces: 9 };
        let mut bytes = seal.encode(salt(), 999);
        assert_eq!(Seal::decode(&bytes, salt(), 999), Some(seal));
        assert_eq!(Seal::decode(&bytes, salt(), 998), None);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Seal::decode(&bytes, salt(), 999), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn store_block_goes_both_ways_and_no_flipped_bit_verifies() {
        let block = StoreBlock {
            generation: 1,
            store_id: [2; 16],
            ancestors: vec![[3; 16], [4; 16]],
            incarnation: 5,
            incarnation_before: 6,
            next_segment: 7,
            sealed_through: 6,
            is_checkpoint: true,
            segments: vec![
                Listed { segment: SegmentId(1), bytes: 2, life: 3, origin: 1, is_marked: true };
                3
            ],
            index: Lsn::new(8),
        };
        let unindexed = StoreBlock { index: Lsn::ZERO, ..block.clone() };
        assert_eq!(StoreBlock::decode(&unindexed.encode()).unwrap(), Some(unindexed.clone()));
        assert_eq!(unindexed.encode().len() + 8, block.encode().len(), "the name is there only if a file is");
        let mut bytes = block.encode();
        bytes.resize(bytes.len() + 100, 0);
        assert_eq!(StoreBlock::decode(&bytes).unwrap(), Some(block.clone()));
        for bit in 0..(bytes.len() - 100) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(StoreBlock::decode(&bytes).unwrap(), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for len in 0..bytes.len() - 100 {
            assert_eq!(StoreBlock::decode(&bytes[..len]).unwrap(), None);
        }
    }

    #[test]
    fn a_format_from_the_future_says_upgrade() {
        let mut future = preamble(STORE_MAGIC);
        future[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
        let checksum = crc32fast::hash(&future[..12]);
        future[12..].copy_from_slice(&checksum.to_le_bytes());
        let error = StoreBlock::decode(&future).unwrap_err();
        assert!(matches!(error, Error::UpgradeRequired { found, .. } if found == FORMAT_VERSION + 1));
        assert!(StoreBlock::is_one(&future));
        future[..8].copy_from_slice(&SEGMENT_MAGIC);
        let checksum = crc32fast::hash(&future[..12]);
        future[12..].copy_from_slice(&checksum.to_le_bytes());
        let error = SegmentHeader::decode(&future, salt(), "000001.seg").unwrap_err();
        assert!(matches!(error, Error::UpgradeRequired { file, .. } if file == "000001.seg"));
    }
}
