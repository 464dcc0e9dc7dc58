//! Reading a segment frame by frame, and telling a torn tail from damage.
//!
//! One job: find the end of what was written whole, and say whether what lies behind is merely not
//! written (a crash), or was durable once (damage). Never decides what to do about it.
//!
//! | at the first bad frame, expected lsn n | verdict |
//! |---|---|
//! | a later frame says that n was durable when it was written | damage |
//! | later frames verify, none says so | torn: writes reorder |
//! | nothing behind verifies | torn, or simply the end |
//!
//! Read next: `recover.rs`, which knows the segments around this one.

use crate::format::frame::{BodySum, FRAME_HEADER_BYTES, FrameHeader};
use crate::format::op::{self, put_varint};
use crate::format::salt::Salt;
use crate::format::{FRAME_ALIGN, HEADER_BYTES};
use crate::op::Kind;
use crate::types::{Lsn, SegmentId};
use std::collections::VecDeque;

/// Which bytes are scanned, and what the first frame must follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    pub segment: SegmentId,
    pub salt: Salt,
    /// The checksum of the segment's header.
    pub checksum: u32,
    /// The lsn of the first frame.
    pub lsn: Lsn,
}

/// Where the whole frames end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scanned {
    /// The offset behind the last whole frame.
    pub end: u32,
    pub frames: u32,
    /// The checksum of the last whole frame's header, or of the segment's header.
    pub checksum: u32,
    /// The lsn of the next frame.
    pub next: Lsn,
    /// Everything up to here was durable, as the frames themselves say.
    pub proven: Lsn,
    /// The first whole frame that no later one proves: from here the tail is adopted.
    pub unproven: u32,
    /// Where each op lies, as the key table stores it.
    pub table: Table,
    /// A later frame proves that the one at `end` was durable: its offset.
    pub damage: Option<u32>,
}

/// The offsets of the ops of a segment: differences, as base-128 numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    bytes: Vec<u8>,
    last: u32,
    /// Ops that create a keyspace: replay wants these first.
    keyspaces: u32,
}

impl Table {
    /// The most bytes one op adds.
    pub const ENTRY_BYTES: u32 = 5;

    /// A table as it was read from a segment.
    pub fn from_bytes(bytes: Vec<u8>, keyspaces: u32) -> Self {
        Table { bytes, last: 0, keyspaces }
    }

    pub fn push(&mut self, offset: u32, kind: Kind) {
        put_varint(&mut self.bytes, (offset - self.last) as u64);
        self.last = offset;
        self.keyspaces += (kind == Kind::Keyspace) as u32;
    }

    pub fn keyspaces(&self) -> u32 {
        self.keyspaces
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn len(&self) -> u32 {
        self.bytes.len() as u32
    }

    /// The offsets in `bytes`, ending early (with `None`) where they are no table.
    pub fn offsets(bytes: &[u8]) -> impl Iterator<Item = Option<u32>> {
        let mut at = op::Reader { bytes, at: 0 };
        let mut last = 0u64;
        std::iter::from_fn(move || {
            if at.at == at.bytes.len() {
                return None;
            }
            match at
                .varint()
                .and_then(|delta| last.checked_add(delta))
                .filter(|&next| next <= u32::MAX as u64)
            {
                Some(next) => {
                    last = next;
                    Some(Some(next as u32))
                }
                None => {
                    at.at = at.bytes.len();
                    Some(None)
                }
            }
        })
    }
}

impl Scanned {
    /// Nothing yet, of frames that begin at `offset`.
    fn from(offset: u32, start: &Start) -> Self {
        Scanned {
            end: offset,
            frames: 0,
            checksum: start.checksum,
            next: start.lsn,
            proven: Lsn::ZERO,
            unproven: offset,
            table: Table::default(),
            damage: None,
        }
    }
}

/// Scans the frames of a segment from behind its header. `bytes` is the whole segment.
pub(crate) fn scan(bytes: &[u8], start: &Start) -> Scanned {
    let mut scanned = Scanned::from(HEADER_BYTES, start);
    let mut unproven = VecDeque::new();
    while let Some((header, checksum)) = whole_frame(bytes, start, &mut scanned) {
        unproven.push_back((header.lsn, scanned.end));
        while unproven.front().is_some_and(|&(lsn, _)| lsn <= header.durable) {
            unproven.pop_front();
        }
        scanned.end = frame_end(scanned.end, header.body_len);
        scanned.frames += 1;
        scanned.checksum = checksum;
        scanned.next = header.lsn.next();
        scanned.proven = scanned.proven.max(header.durable);
    }
    scanned.unproven = unproven.front().map_or(scanned.end, |&(_, offset)| offset);
    scanned.damage = evidence(bytes, start.salt, scanned.end, scanned.next);
    scanned
}

/// The offset behind a frame.
pub(crate) fn frame_end(offset: u32, body_len: u32) -> u32 {
    (offset + FRAME_HEADER_BYTES as u32 + body_len).next_multiple_of(FRAME_ALIGN)
}

/// The frame at the end of what was scanned, if it is the next one and every byte of it verifies.
fn whole_frame(bytes: &[u8], start: &Start, scanned: &mut Scanned) -> Option<(FrameHeader, u32)> {
    let offset = scanned.end;
    let (header, checksum) = FrameHeader::decode(bytes.get(offset as usize..)?, start.salt, offset)?;
    let from = offset as usize + FRAME_HEADER_BYTES;
    let to = from.checked_add(header.body_len as usize).filter(|&to| to <= bytes.len())?;
    if header.previous != scanned.checksum || header.lsn != scanned.next {
        return None;
    }
    let mut table = Table { bytes: Vec::new(), ..scanned.table };
    let mut sum = BodySum::default();
    let mut at = from;
    while at < to {
        let head = op::decode(&bytes[..to], at, start.segment, at as u32).ok()?;
        let belongs = head.back == at as u32 - offset;
        if !belongs
            || !head.verify_head(bytes, start.salt, at as u32, header.lsn)
            || !head.verify_value(bytes)
        {
            return None;
        }
        sum.add(head.checksum());
        table.push(at as u32, head.kind);
        at = head.end();
    }
    if sum.finish() != header.body {
        return None;
    }
    scanned.table.bytes.extend_from_slice(&table.bytes);
    (scanned.table.last, scanned.table.keyspaces) = (table.last, table.keyspaces);
    Some((header, checksum))
}

/// A frame behind `end` that says lsn `next`, which belongs at `end`, was durable when it was written.
///
/// Its body may be damaged too, so the header has to do; and among the millions of places in a segment that was used
/// before, one verifies by chance now and then. But such a one has any lsn, and those of a segment count its frames.
pub(crate) fn evidence(bytes: &[u8], salt: Salt, end: u32, next: Lsn) -> Option<u32> {
    let mut offset = end;
    // Zeros are never a header.
    let written = written_len(bytes);
    while (offset as usize) < written {
        let between = (offset - end) as u64 / FRAME_HEADER_BYTES as u64;
        match FrameHeader::decode(&bytes[offset as usize..], salt, offset) {
            Some((header, _)) if header.durable >= next && header.lsn.get() - next.get() <= between => {
                return Some(offset);
            }
            _ => offset += FRAME_ALIGN,
        }
    }
    None
}

/// Whether a whole frame of this life lies anywhere behind the header. Its header alone would not do: among the
/// millions of places in a segment that was used before, one verifies by chance now and then.
pub(crate) fn holds_frame(bytes: &[u8], salt: Salt, segment: SegmentId) -> bool {
    let places = (HEADER_BYTES as usize..written_len(bytes)).step_by(FRAME_ALIGN as usize);
    places.into_iter().any(|place| {
        let offset = place as u32;
        FrameHeader::decode(&bytes[place..], salt, offset).is_some_and(|(header, _)| {
            let start = Start { segment, salt, checksum: header.previous, lsn: header.lsn };
            whole_frame(bytes, &start, &mut Scanned::from(offset, &start)).is_some()
        })
    })
}

/// How many bytes there are in front of the zeros at the end.
pub(crate) fn written_len(bytes: &[u8]) -> usize {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut len = bytes.len();
    // Whole blocks first: most of a segment that was just begun is zeros, and these compare fast.
    while bytes[..len].last_chunk() == Some(&ZEROS) {
        len -= ZEROS.len();
    }
    bytes[..len].iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1)
}

/// Whether any frame of this life lies right behind the header: else the segment is empty.
pub(crate) fn has_frames(bytes: &[u8], salt: Salt) -> bool {
    bytes
        .get(HEADER_BYTES as usize..)
        .is_some_and(|behind| FrameHeader::decode(behind, salt, HEADER_BYTES).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_verifies_by_chance_is_no_frame() {
        let salt = Salt::new(&[7; 16], SegmentId(3), 9);
        let mut bytes = vec![0x5A; 3 * HEADER_BYTES as usize];
        let at = HEADER_BYTES + 640;
        let header =
            FrameHeader { lsn: Lsn::new(5), durable: Lsn::new(4), body_len: 40, previous: 1, body: 2 };
        let place = at as usize..at as usize + FRAME_HEADER_BYTES;
        bytes[place.clone()].copy_from_slice(&header.encode(salt, at).0);
        assert_eq!(evidence(&bytes, salt, HEADER_BYTES, Lsn::ZERO), Some(at));
        assert!(!holds_frame(&bytes, salt, SegmentId(3)));
        // A whole one, without an op.
        let idle = FrameHeader { body_len: 0, body: BodySum::default().finish(), ..header };
        bytes[place].copy_from_slice(&idle.encode(salt, at).0);
        assert!(holds_frame(&bytes, salt, SegmentId(3)));
        assert!(!holds_frame(&bytes, Salt::new(&[7; 16], SegmentId(3), 10), SegmentId(3)));
    }

    /// Found by fuzzing: what an earlier life of a segment has left behind its end was taken for a later frame, and the
    /// torn frame for damage. One crash in 256 with segments of 64 MiB.
    #[test]
    fn a_header_that_verifies_by_chance_proves_nothing_of_the_frames_before_it() {
        let salt = Salt::new(&[7; 16], SegmentId(3), 9);
        let (end, next) = (HEADER_BYTES, Lsn::new(1000));
        let place = |frames: u32| (end + frames * FRAME_HEADER_BYTES as u32) as usize;
        let found = |at: usize, lsn: u64, durable: u64| {
            let mut bytes = vec![0x5A; 3 * HEADER_BYTES as usize];
            let (lsn, durable) = (Lsn::new(lsn), Lsn::new(durable));
            let header = FrameHeader { lsn, durable, body_len: 0, previous: 1, body: 2 };
            bytes[at..at + FRAME_HEADER_BYTES].copy_from_slice(&header.encode(salt, at as u32).0);
            evidence(&bytes, salt, end, next).is_some()
        };
        assert!(found(place(9), 1009, 1000) && found(place(9), 1001, 1000), "as many frames fit in between");
        assert!(!found(place(9), 1009, 999), "it does not say so");
        assert!(!found(place(9), 1010, 1005) && !found(place(9) - 4, 1009, 1000), "they do not fit");
        assert!(!found(place(100), u64::MAX, u64::MAX - 1) && !found(place(100), 1 << 40, (1 << 40) - 1));
    }

    /// A segment of two frames without ops, the second one changed by `change`.
    fn scan_two(change: impl FnOnce(&mut FrameHeader)) -> Scanned {
        let salt = Salt::new(&[7; 16], SegmentId(3), 9);
        let start = Start { segment: SegmentId(3), salt, checksum: 77, lsn: Lsn::new(5) };
        let body = BodySum::default().finish();
        let mut bytes = vec![0; 2 * HEADER_BYTES as usize];
        let mut put = |header: &FrameHeader, at: u32| {
            let (encoded, checksum) = header.encode(salt, at);
            bytes[at as usize..at as usize + FRAME_HEADER_BYTES].copy_from_slice(&encoded);
            checksum
        };
        let first = FrameHeader {
            lsn: Lsn::new(5),
            durable: Lsn::new(4),
            body_len: 0,
            previous: start.checksum,
            body,
        };
        let previous = put(&first, HEADER_BYTES);
        let mut second = FrameHeader { lsn: Lsn::new(6), durable: Lsn::new(3), previous, ..first };
        change(&mut second);
        put(&second, frame_end(HEADER_BYTES, 0));
        scan(&bytes, &start)
    }

    #[test]
    fn a_frame_follows_the_one_before_by_lsn_and_checksum() {
        let whole = scan_two(|_| {});
        assert_eq!((whole.frames, whole.next), (2, Lsn::new(7)));
        assert_eq!(whole.proven, Lsn::new(4), "the highest that any of them names");
        for wrong in [
            scan_two(|header| header.lsn = Lsn::new(7)),
            scan_two(|header| header.previous ^= 1),
            scan_two(|header| header.body ^= 1),
            scan_two(|header| header.body_len = u32::MAX - 64),
        ] {
            assert_eq!((wrong.frames, wrong.next), (1, Lsn::new(6)));
        }
    }

    #[test]
    fn a_segment_has_frames_when_one_lies_behind_its_header() {
        let salt = Salt::new(&[7; 16], SegmentId(3), 9);
        let mut bytes = vec![0; 2 * HEADER_BYTES as usize];
        assert!(!has_frames(&bytes, salt));
        let header =
            FrameHeader { lsn: Lsn::new(5), durable: Lsn::new(4), body_len: 0, previous: 1, body: 2 };
        let place = HEADER_BYTES as usize..HEADER_BYTES as usize + FRAME_HEADER_BYTES;
        bytes[place].copy_from_slice(&header.encode(salt, HEADER_BYTES).0);
        assert!(has_frames(&bytes, salt));
        assert!(!has_frames(&bytes, Salt::new(&[7; 16], SegmentId(3), 10)));
        assert!(!has_frames(&bytes[..HEADER_BYTES as usize - 1], salt), "cut off in front of them");
    }

    #[test]
    fn offsets_end_where_they_are_no_table() {
        let offsets = |bytes: &[u8]| Table::offsets(bytes).take(9).collect::<Vec<_>>();
        let mut bytes = Vec::new();
        put_varint(&mut bytes, u32::MAX.into());
        assert_eq!(offsets(&bytes), [Some(u32::MAX)]);
        bytes.push(1);
        assert_eq!(offsets(&bytes), [Some(u32::MAX), None]);
        bytes.push(1);
        assert_eq!(offsets(&bytes), [Some(u32::MAX), None], "nothing behind that");
        assert_eq!(offsets(&[5, 0x80]), [Some(5), None]);
    }

    #[test]
    fn keyspaces_are_counted_among_the_ops() {
        let mut table = Table::default();
        for (offset, kind) in [(10, Kind::Put), (20, Kind::Keyspace), (30, Kind::Keyspace)] {
            table.push(offset, kind);
        }
        assert_eq!(table.keyspaces(), 2);
        assert_eq!(Table::offsets(table.bytes()).collect::<Vec<_>>(), [Some(10), Some(20), Some(30)]);
    }

    #[test]
    fn what_is_written_ends_at_the_last_byte_that_is_not_zero() {
        for len in [0, 1, 4095, 4096, 4097, 20_000] {
            let mut bytes = vec![0; len];
            assert_eq!(written_len(&bytes), 0);
            for at in [0, 1, 4094, 4095, 4096, 15_807, 15_808, 19_999] {
                if at < len {
                    bytes[at] = 1;
                    assert_eq!(written_len(&bytes), at + 1, "{len} bytes");
                }
            }
        }
    }
}
