//! One op as bytes. The layout is in `docs/format.md`, under "Op".

use super::salt::Salt;
use crate::op::{Kind, Links, Op};
use crate::types::{KeyspaceId, Location, Lsn, MAX_KEY_BYTES, OperationId, SegmentId};
use std::ops::Range;

/// Values above this have a checksum of their own, so that reading a mark or a key never means
/// reading a large value.
pub(crate) const INLINE_VALUE_BYTES: usize = 512;
/// Of [`MAX_OVERHEAD`], what numbered operations take, and what only carried ops have.
pub(crate) const NUMBERED_OVERHEAD: usize = 20 + 20 + 10;
/// The most bytes an op takes beside its key and value: see also [`most_bytes`].
pub(crate) const MAX_OVERHEAD: usize = 4 + 2 + 5 + 3 + 9 + 3 + 5 + 8 + 8 + 20 + 20 + 10 + 4;

/// What every op begins with, at most: checksum, kind, flags, and five numbers. A power of two, so that an index into
/// it needs no check.
const FIXED_BYTES: usize = 64;

mod flag {
    /// The previous version lies in the same segment, this many bytes back.
    pub const PREVIOUS_NEAR: u8 = 1;
    /// The previous version lies anywhere.
    pub const PREVIOUS_FAR: u8 = 1 << 1;
    /// The op changes the state of its fence.
    pub const FENCE: u8 = 1 << 2;
    /// ... whose earlier state was set by another op.
    pub const FENCE_LINK: u8 = 1 << 3;
    pub const LAST: u8 = 1 << 4;
    pub const PREDECESSOR: u8 = 1 << 5;
    pub const MOVED: u8 = 1 << 6;
    pub const LARGE: u8 = 1 << 7;
}

/// Why bytes are not an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BadOp(pub &'static str);

/// Where an op is written: what its bytes depend on beside itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    pub salt: Salt,
    pub segment: SegmentId,
    /// The offset of the op in the segment.
    pub offset: u32,
    /// The offset of its frame.
    pub frame: u32,
    pub lsn: Lsn,
}

/// An op as found in bytes. A few words that are handed from one to the other on each look-up: what is
/// rarely asked for ([`Head::links`]) is read from the bytes when it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub token: u64,
    previous: u64,
    fence: u64,
    pub keyspace: KeyspaceId,
    pub kind: Kind,
    flags: u8,
    /// Bytes back to the start of the frame.
    pub back: u32,
    start: usize,
    /// From the start of the op to the extensions behind the fence link.
    rest: u32,
    /// From the start of the op to its key.
    key: u32,
    key_len: u32,
    value_len: u32,
    checksum: u32,
    value_checksum: u32,
}

impl Head {
    /// The bytes of the key.
    #[inline(always)]
    pub fn key(&self) -> Range<usize> {
        let from = self.start + self.key as usize;
        from..from + self.key_len as usize
    }

    /// The bytes of the value.
    #[inline(always)]
    pub fn value(&self) -> Range<usize> {
        let from = self.key().end;
        from..from + self.value_len as usize
    }

    /// Where the op ends.
    pub fn end(&self) -> usize {
        self.value().end
    }

    /// The bytes that the op takes.
    pub fn len(&self) -> u32 {
        self.key + self.key_len + self.value_len
    }

    /// Whether it tells of a numbered operation.
    pub fn is_numbered(&self) -> bool {
        self.flags & (flag::LAST | flag::PREDECESSOR) != 0
    }

    /// Whether compaction has moved the op.
    pub fn is_moved(&self) -> bool {
        self.flags & flag::MOVED != 0
    }

    /// The checksum of a value that has one of its own.
    pub fn value_checksum(&self) -> Option<u32> {
        (self.flags & flag::LARGE != 0).then_some(self.value_checksum)
    }

    /// The version of the key before this one.
    pub fn previous(&self) -> Option<Location> {
        let has = self.flags & (flag::PREVIOUS_NEAR | flag::PREVIOUS_FAR) != 0;
        has.then(|| Location::unpack(self.previous))
    }

    /// Whether the op changes the state of its fence; inside, the op that set the state before.
    pub fn fence(&self) -> Option<Option<Location>> {
        let linked = self.flags & flag::FENCE_LINK != 0;
        (self.flags & flag::FENCE != 0).then(|| linked.then(|| Location::unpack(self.fence)))
    }

    /// All that ties the op to earlier ones.
    pub fn links(&self, bytes: &[u8]) -> Links {
        let mut links = Links { previous: self.previous(), fence: self.fence(), ..Links::default() };
        // Nothing here is `None`: `decode` has read it before.
        if let Some((last, predecessor, moved)) = self.rest(bytes) {
            (links.last, links.predecessor, links.moved) = (last, predecessor, moved);
        }
        links
    }

    /// The own lsn of an op that compaction moved.
    #[inline(always)]
    pub fn moved_lsn(&self, bytes: &[u8]) -> Option<Lsn> {
        if self.flags & flag::MOVED == 0 {
            return None;
        }
        moved_lsn(bytes, self.start + self.rest as usize, self.flags)
    }

    fn rest(&self, bytes: &[u8]) -> Option<Rest> {
        if self.flags & (flag::LAST | flag::PREDECESSOR | flag::MOVED) == 0 {
            return Some((None, None, None));
        }
        read_rest(&mut Reader { bytes, at: self.start + self.rest as usize }, self.flags).ok()
    }

    /// The checksum that stands in front of the op: frames chain these.
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// The op as a value.
    pub fn op<'a>(&self, bytes: &'a [u8]) -> Op<'a> {
        Op {
            kind: self.kind,
            keyspace: self.keyspace,
            token: self.token,
            key: &bytes[self.key()],
            value: &bytes[self.value()],
            links: self.links(bytes),
        }
    }

    /// Whether everything but a large value is what was written at `offset` in the frame `lsn`.
    #[inline(always)]
    pub fn verify_head(&self, bytes: &[u8], salt: Salt, offset: u32, lsn: Lsn) -> bool {
        let value = self.value();
        let end = if self.flags & flag::LARGE != 0 { value.start } else { value.end };
        salt.op_checksum(offset, lsn, &bytes[self.start + 4..end]) == self.checksum
    }

    /// Whether a large value is what was written; `verify_head` has covered a small one.
    pub fn verify_value(&self, bytes: &[u8]) -> bool {
        self.flags & flag::LARGE == 0 || crc32fast::hash(&bytes[self.value()]) == self.value_checksum
    }
}

/// The last operation, the predecessor's, and the own lsn of a moved op.
type Rest = (Option<(OperationId, Lsn)>, Option<(u64, OperationId)>, Option<Lsn>);

fn read_rest(at: &mut Reader<'_>, flags: u8) -> Result<Rest, BadOp> {
    let mut rest = (None, None, None);
    if flags & flag::LAST != 0 {
        let op = OperationId::try_new(at.varint().ok_or(SHORT)?).ok_or(BadOp("operation 0"))?;
        rest.0 = Some((op, Lsn::new(at.varint().ok_or(SHORT)?)));
    }
    if flags & flag::PREDECESSOR != 0 {
        let token = at.varint().ok_or(SHORT)?;
        let op = OperationId::try_new(at.varint().ok_or(SHORT)?).ok_or(BadOp("operation 0"))?;
        rest.1 = Some((token, op));
    }
    if flags & flag::MOVED != 0 {
        rest.2 = Some(Lsn::new(at.varint().ok_or(SHORT)?));
    }
    Ok(rest)
}

/// Out of line, and without the head, which then need not be in memory: most ops were never moved.
#[cold]
fn moved_lsn(bytes: &[u8], at: usize, flags: u8) -> Option<Lsn> {
    read_rest(&mut Reader { bytes, at }, flags).ok()?.2
}

const SHORT: BadOp = BadOp("an op runs past its end");

/// The most bytes that an op of these takes anywhere in a segment, unless it is numbered or moved.
pub(crate) fn most_bytes(
    keyspace: KeyspaceId,
    token: u64,
    key: usize,
    value: usize,
    sets_fence: bool,
) -> usize {
    const CHECKSUM_KIND_FLAGS: usize = 4 + 2;
    // No segment has more than 2^26 bytes.
    const BACK: usize = 4;
    const LINK: usize = 8;
    let numbers = [keyspace.0 as u64, token, key as u64, value as u64].map(varint_len);
    let fence = if sets_fence { LINK } else { 0 };
    let large = if value > INLINE_VALUE_BYTES { 4 } else { 0 };
    CHECKSUM_KIND_FLAGS + BACK + numbers.iter().sum::<usize>() + LINK + fence + large + key + value
}

/// Appends the bytes of `op` to `out` and returns its checksum. `out` may hold earlier ops.
pub(crate) fn encode(op: &Op<'_>, site: &Site, large_checksum: Option<u32>, out: &mut Vec<u8>) -> u32 {
    let start = out.len();
    let links = &op.links;
    let near = links
        .previous
        .filter(|at| at.segment == site.segment && at.offset < site.offset)
        .map(|at| site.offset - at.offset);
    let large = op.value.len() > INLINE_VALUE_BYTES;
    let mut flags = 0;
    flags |= match (links.previous, near) {
        (None, _) => 0,
        (_, Some(_)) => flag::PREVIOUS_NEAR,
        (_, None) => flag::PREVIOUS_FAR,
    };
    flags |= match links.fence {
        None => 0,
        Some(None) => flag::FENCE,
        Some(Some(_)) => flag::FENCE | flag::FENCE_LINK,
    };
    flags |= if links.last.is_some() { flag::LAST } else { 0 };
    flags |= if links.predecessor.is_some() { flag::PREDECESSOR } else { 0 };
    flags |= if links.moved.is_some() { flag::MOVED } else { 0 };
    flags |= if large { flag::LARGE } else { 0 };

    out.extend_from_slice(&[0, 0, 0, 0, op.kind as u8, flags]);
    put_varint(out, (site.offset - site.frame) as u64);
    put_varint(out, op.keyspace.0 as u64);
    put_varint(out, op.token);
    put_varint(out, op.key.len() as u64);
    put_varint(out, op.value.len() as u64);
    match (near, links.previous) {
        (Some(back), _) => put_varint(out, back as u64),
        (None, Some(at)) => out.extend_from_slice(&at.pack().to_le_bytes()),
        (None, None) => {}
    }
    if let Some(Some(at)) = links.fence {
        out.extend_from_slice(&at.pack().to_le_bytes());
    }
    if let Some((op, lsn)) = links.last {
        put_varint(out, op.get());
        put_varint(out, lsn.get());
    }
    if let Some((token, op)) = links.predecessor {
        put_varint(out, token);
        put_varint(out, op.get());
    }
    if let Some(lsn) = links.moved {
        put_varint(out, lsn.get());
    }
    if large {
        let sum = large_checksum.unwrap_or_else(|| crc32fast::hash(op.value));
        out.extend_from_slice(&sum.to_le_bytes());
    }
    out.extend_from_slice(op.key);
    let head_end = out.len();
    out.extend_from_slice(op.value);
    let covered = if large { &out[start + 4..head_end] } else { &out[start + 4..] };
    let checksum = site.salt.op_checksum(site.offset, site.lsn, covered);
    out[start..start + 4].copy_from_slice(&checksum.to_le_bytes());
    checksum
}

/// Reads the op that starts at `start` of `bytes`, the bytes of its segment (or a piece of them:
/// `offset` is then where `start` lies in `segment`). Proves nothing: see [`Head::verify_head`].
#[inline(always)]
pub(crate) fn decode(bytes: &[u8], start: usize, segment: SegmentId, offset: u32) -> Result<Head, BadOp> {
    let here = bytes.get(start..).unwrap_or_default();
    let padded;
    let fixed: &[u8; FIXED_BYTES] = match here.first_chunk() {
        Some(fixed) => fixed,
        None => {
            // What runs into the zeros runs past the end, and is found to do so below.
            padded = pad(here);
            &padded
        }
    };
    let [c0, c1, c2, c3, kind, flags, ..] = *fixed;
    let checksum = u32::from_le_bytes([c0, c1, c2, c3]);
    let kind = Kind::from_number(kind).ok_or(BadOp("an op of an unknown kind"))?;
    let mut at = 6;
    let back = u32::try_from(fixed_varint(fixed, &mut at).ok_or(SHORT)?).map_err(|_| SHORT)?;
    let keyspace = u16::try_from(fixed_varint(fixed, &mut at).ok_or(SHORT)?);
    let keyspace = keyspace.map_err(|_| BadOp("a keyspace out of range"))?;
    let token = fixed_varint(fixed, &mut at).ok_or(SHORT)?;
    let key_len = fixed_varint(fixed, &mut at).ok_or(SHORT)?;
    let value_len = fixed_varint(fixed, &mut at).ok_or(SHORT)?;
    let mut at = Reader { bytes, at: start + at };
    if token > i64::MAX as u64 {
        return Err(BadOp("a token out of range"));
    }
    if key_len > MAX_KEY_BYTES as u64 || value_len > u32::MAX as u64 {
        return Err(BadOp("a length out of range"));
    }
    let mut previous = 0;
    if flags & flag::PREVIOUS_NEAR != 0 {
        let back = at.varint().ok_or(SHORT)?;
        let offset = (offset as u64).checked_sub(back).ok_or(BadOp("a link before the segment"))?;
        previous = Location { segment, offset: offset as u32 }.pack();
    } else if flags & flag::PREVIOUS_FAR != 0 {
        previous = at.u64().ok_or(SHORT)?;
    }
    let linked = flag::FENCE | flag::FENCE_LINK;
    let fence = if flags & linked == linked { at.u64().ok_or(SHORT)? } else { 0 };
    let rest = (at.at - start) as u32;
    if flags & (flag::LAST | flag::PREDECESSOR | flag::MOVED) != 0 {
        read_rest(&mut at, flags)?;
    }
    let value_checksum = if flags & flag::LARGE != 0 { at.u32().ok_or(SHORT)? } else { 0 };
    let head = Head {
        token,
        previous,
        fence,
        keyspace: KeyspaceId(keyspace),
        kind,
        flags,
        back,
        start,
        rest,
        key: (at.at - start) as u32,
        key_len: key_len as u32,
        value_len: value_len as u32,
        checksum,
        value_checksum,
    };
    let rest = bytes.len().checked_sub(at.at).and_then(|rest| rest.checked_sub(key_len as usize));
    if rest.is_none_or(|rest| rest < value_len as usize) {
        return Err(SHORT);
    }
    Ok(head)
}

#[cold]
fn pad(bytes: &[u8]) -> [u8; FIXED_BYTES] {
    let mut padded = [0; FIXED_BYTES];
    padded.iter_mut().zip(bytes).for_each(|(padded, byte)| *padded = *byte);
    padded
}

/// A number at `at` of what an op begins with; as [`Reader::varint`], but it never ends.
#[inline(always)]
fn fixed_varint(fixed: &[u8; FIXED_BYTES], at: &mut usize) -> Option<u64> {
    let first = fixed[*at % FIXED_BYTES];
    *at += 1;
    if first < 0x80 {
        return Some(first.into());
    }
    let mut number = u64::from(first & 0x7f);
    for shift in (7..64).step_by(7) {
        let byte = fixed[*at % FIXED_BYTES];
        *at += 1;
        if shift == 63 && byte > 1 {
            return None;
        }
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

/// Appends a little-endian base-128 number.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// How many bytes that takes.
pub(crate) fn varint_len(number: u64) -> usize {
    (number | 1).ilog2() as usize / 7 + 1
}

/// A cursor over bytes that ends with `None`, never with a panic.
pub(crate) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    #[inline(always)]
    pub fn u8(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    #[inline(always)]
    pub fn varint(&mut self) -> Option<u64> {
        let first = self.u8()?;
        if first < 0x80 { Some(first.into()) } else { self.more_of_varint(first) }
    }

    /// Out of line: most numbers here are small.
    fn more_of_varint(&mut self, first: u8) -> Option<u64> {
        let mut number = u64::from(first & 0x7f);
        for shift in (7..64).step_by(7) {
            let byte = self.u8()?;
            if shift == 63 && byte > 1 {
                return None;
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn site() -> Site {
        Site {
            salt: Salt::new(&[1; 16], SegmentId(3), 5),
            segment: SegmentId(3),
            offset: 5000,
            frame: 4972,
            lsn: Lsn::new(77),
        }
    }

    fn ops() -> Vec<Op<'static>> {
        static LARGE: [u8; 700] = [7; 700];
        let near = Location { segment: SegmentId(3), offset: 4100 };
        let far = Location { segment: SegmentId(2), offset: 9999 };
        let plain = Op {
            kind: Kind::Put,
            keyspace: KeyspaceId(1),
            token: 41,
            key: b"key",
            value: b"value",
            links: Links::default(),
        };
        let full = Links {
            previous: Some(far),
            fence: Some(Some(near)),
            last: Some((OperationId::new(9), Lsn::new(70))),
            predecessor: Some((40, OperationId::new(u64::MAX))),
            moved: Some(Lsn::new(50)),
        };
        vec![
            plain,
            Op { links: Links { previous: Some(near), ..Links::default() }, ..plain },
            Op { links: Links { fence: Some(None), ..Links::default() }, token: i64::MAX as u64, ..plain },
            Op { links: full, value: &LARGE, keyspace: KeyspaceId(u16::MAX), ..plain },
            Op { kind: Kind::Delete, value: b"", key: b"\0", ..plain },
        ]
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        let site = site();
        let encoded = |op: &Op<'_>| {
            let mut bytes = Vec::new();
            encode(op, &site, None, &mut bytes);
            bytes
        };
        let decoded = |bytes: &[u8]| decode(bytes, 0, site.segment, site.offset).map(|_| ());
        let op = Op { value: b"", ..ops()[0] };
        assert!(decoded(&encoded(&Op { token: i64::MAX as u64 + 1, ..op })).is_err());
        let key = [7; MAX_KEY_BYTES + 1];
        assert!(decoded(&encoded(&Op { key: &key[1..], ..op })).is_ok());
        assert!(decoded(&encoded(&Op { key: &key, ..op })).is_err());
        // The length of the value, behind checksum, kind, flags, back, keyspace, token and length of the key.
        let mut bytes = encoded(&op);
        assert_eq!(bytes[10], 0);
        let mut length = Vec::new();
        put_varint(&mut length, 1 << 32);
        bytes.splice(10..11, length);
        assert!(decoded(&bytes).is_err(), "cut to 32 bits it would be the right one");
    }

    #[test]
    fn a_value_has_a_checksum_of_its_own_from_513_bytes() {
        for (len, has) in [(INLINE_VALUE_BYTES, false), (INLINE_VALUE_BYTES + 1, true)] {
            let (site, value, mut bytes) = (site(), vec![7; len], Vec::new());
            encode(&Op { value: &value, ..ops()[0] }, &site, None, &mut bytes);
            let head = decode(&bytes, 0, site.segment, site.offset).unwrap();
            assert_eq!(head.value_checksum().is_some(), has, "{len} bytes");
        }
    }

    #[test]
    fn ops_go_both_ways_and_no_flipped_bit_verifies() {
        for op in ops() {
            let site = site();
            let mut bytes = vec![0xEE; 3];
            encode(&op, &site, None, &mut bytes);
            let overhead = bytes.len() - 3 - op.key.len() - op.value.len();
            assert!(overhead <= MAX_OVERHEAD);
            let sets_fence = op.links.fence.is_some();
            let most = most_bytes(op.keyspace, op.token, op.key.len(), op.value.len(), sets_fence);
            let is_plain =
                op.links.last.is_none() && op.links.predecessor.is_none() && op.links.moved.is_none();
            assert!(bytes.len() - 3 <= most + if is_plain { 0 } else { NUMBERED_OVERHEAD });
            let verify = |bytes: &[u8]| {
                decode(bytes, 3, site.segment, site.offset).is_ok_and(|head| {
                    head.end() == bytes.len()
                        && head.verify_head(bytes, site.salt, site.offset, site.lsn)
                        && head.verify_value(bytes)
                })
            };
            let head = decode(&bytes, 3, site.segment, site.offset).unwrap();
            assert_eq!(head.op(&bytes), op);
            let links = &op.links;
            assert_eq!(head.is_moved(), links.moved.is_some());
            assert_eq!(head.is_numbered(), links.last.is_some() || links.predecessor.is_some());
            let large = (op.value.len() > INLINE_VALUE_BYTES).then(|| crc32fast::hash(op.value));
            assert_eq!(head.value_checksum(), large);
            assert_eq!(head.len() as usize, bytes.len() - 3);
            assert_eq!(head.back, 28);
            assert!(verify(&bytes));
            for bit in 3 * 8..bytes.len() * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(!verify(&bytes), "bit {bit} of {op:?}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            for len in 0..bytes.len() {
                assert!(!verify(&bytes[..len]));
            }
        }
    }

    #[test]
    fn the_longest_plain_op_takes_what_is_reserved_for_it() {
        let (key, value) = (vec![1; MAX_KEY_BYTES], vec![2; INLINE_VALUE_BYTES + 1]);
        let elsewhere = Location { segment: SegmentId(u32::MAX), offset: (1 << 26) - 1 };
        let (keyspace, token) = (KeyspaceId(u16::MAX), i64::MAX as u64);
        let links = Links { previous: Some(elsewhere), fence: Some(Some(elsewhere)), ..Links::default() };
        let op = Op { kind: Kind::Put, keyspace, token, key: &key, value: &value, links };
        let site = Site { frame: 4096, offset: (1 << 26) - 1, ..site() };
        let mut bytes = Vec::new();
        encode(&op, &site, None, &mut bytes);
        assert_eq!(bytes.len(), most_bytes(keyspace, token, key.len(), value.len(), true));
    }

    #[test]
    fn varints_go_both_ways_and_overlong_ones_do_not_decode() {
        for number in [0, 1, 127, 128, 1 << 14, u32::MAX as u64, u64::MAX] {
            let mut out = Vec::new();
            put_varint(&mut out, number);
            assert_eq!(Reader { bytes: &out, at: 0 }.varint(), Some(number));
            assert_eq!(varint_len(number), out.len());
        }
        assert_eq!(Reader { bytes: &[0xff; 10], at: 0 }.varint(), None);
        let too_large = [[0xff; 9].as_slice(), &[2]].concat();
        assert_eq!(Reader { bytes: &too_large, at: 0 }.varint(), None);
        assert_eq!(Reader { bytes: &[0x80; 3], at: 0 }.varint(), None);
    }

    /// What both readers of numbers answer at `at`, and where they stand behind it.
    fn both(fixed: &[u8; FIXED_BYTES], at: usize) -> [(Option<u64>, usize); 2] {
        let (mut reader, mut fixed_at) = (Reader { bytes: fixed, at }, at);
        let number = reader.varint();
        [(number, reader.at), (fixed_varint(fixed, &mut fixed_at), fixed_at)]
    }

    #[test]
    fn both_readers_of_numbers_agree_on_each_length() {
        let mut numbers = vec![0, u64::MAX];
        numbers.extend((0..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1]));
        for number in numbers {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, number);
            for behind in [0, 0xff] {
                for at in [0, 6, FIXED_BYTES - bytes.len()] {
                    let mut fixed = [behind; FIXED_BYTES];
                    fixed[at..at + bytes.len()].copy_from_slice(&bytes);
                    assert_eq!(both(&fixed, at), [(Some(number), at + bytes.len()); 2]);
                }
            }
        }
        // Longer than need be, of ten bytes with too high a last one, and without an end.
        let nine = [0x80; 9];
        for (last, number) in [(0, Some(0)), (1, Some(1 << 63)), (2, None), (0x7f, None), (0x80, None)] {
            let mut fixed = [0x80; FIXED_BYTES];
            fixed[..9].copy_from_slice(&nine);
            fixed[9] = last;
            assert_eq!(both(&fixed, 0), [(number, 10); 2], "{last}");
        }
        for len in 2..=9 {
            let mut fixed = [0xff; FIXED_BYTES];
            fixed[..len].fill(0x80);
            fixed[len - 1] = 0;
            assert_eq!(both(&fixed, 0), [(Some(0), len); 2]);
        }
    }

    /// Bytes of which many say that a number goes on.
    fn bytes() -> impl Strategy<Value = u8> {
        prop_oneof![any::<u8>(), 0x80..=0xffu8, 0..8u8]
    }

    /// What `decode` answers at `start` of `bytes` and of the first `len` of them, compared. Whether it found an op.
    fn is_cut_rightly(bytes: &[u8], start: usize, len: usize) -> bool {
        let site = site();
        let whole = decode(bytes, start, site.segment, site.offset);
        let cut = decode(&bytes[..len], start, site.segment, site.offset);
        match &whole {
            Ok(head) if head.end() <= len => assert_eq!(cut, whole),
            // Where the kind is cut off, it is what is missed first.
            Ok(_) if len < start + 5 => assert!(cut.is_err()),
            Ok(_) => assert_eq!(cut, Err(SHORT)),
            Err(_) => assert!(cut.is_err()),
        }
        cut.is_ok()
    }

    #[test]
    fn an_op_is_found_only_where_all_of_it_is() {
        for kind in Kind::ALL {
            for op in ops() {
                let mut bytes = vec![0xEE; 3];
                encode(&Op { kind, ..op }, &site(), None, &mut bytes);
                let end = bytes.len();
                encode(&op, &site(), None, &mut bytes);
                bytes.resize(end + 2 * FIXED_BYTES, 0x81);
                for len in 0..=bytes.len() {
                    assert_eq!(is_cut_rightly(&bytes, 3, len), len >= end, "{len} bytes of {op:?}");
                    (len.saturating_sub(FIXED_BYTES)..=len).for_each(|start| {
                        is_cut_rightly(&bytes, start, len);
                    });
                }
            }
        }
    }

    proptest! {
        #[test]
        fn both_readers_of_numbers_agree(bytes in prop::collection::vec(bytes(), FIXED_BYTES)) {
            let fixed: [u8; FIXED_BYTES] = bytes.try_into().unwrap();
            for at in 0..=FIXED_BYTES - 10 {
                let [reader, fixed] = both(&fixed, at);
                prop_assert_eq!(reader, fixed);
            }
        }

        #[test]
        fn whatever_is_cut_off_is_missed(
            mut bytes in prop::collection::vec(bytes(), 3 * FIXED_BYTES),
            len in 0..=3 * FIXED_BYTES,
            kind in 0..Kind::ALL.len(),
        ) {
            for start in len.saturating_sub(FIXED_BYTES)..=len {
                // Else it is nearly always of an unknown kind.
                if let Some(byte) = bytes.get_mut(start + 4) {
                    *byte = Kind::ALL[kind] as u8;
                }
                is_cut_rightly(&bytes, start, len);
            }
        }
    }
}
