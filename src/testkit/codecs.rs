//! The codecs of the format, opened to fuzzing alone: what goes in comes out, and bytes that somebody made up are
//! refused or read as something harmless.

use crate::format::frame::{BodySum, FRAME_HEADER_BYTES, FrameHeader};
use crate::format::header::{SEAL_BYTES, Seal, SegmentHeader};
use crate::format::op::{Site, decode, encode};
use crate::format::salt::Salt;
use crate::format::{FRAME_ALIGN, HEADER_BYTES};
use crate::log::scan::{Scanned, Start, Table, scan};
use crate::op::{Kind, Links, Op};
use crate::types::{KeyspaceId, Location, Lsn, OperationId, SegmentId};

const SEGMENT: SegmentId = SegmentId(3);
const FIRST: Lsn = Lsn::new(1 << 33);
const HEADER_CHECKSUM: u32 = 7;

/// An op as a fuzzer makes one up: every number is brought into its range.
#[derive(Clone, Default, Debug)]
pub struct AnyOp {
    /// The kind, modulo the kinds there are.
    pub kind: u8,
    /// The keyspace.
    pub keyspace: u16,
    /// The token, cut to its range.
    pub token: u64,
    /// The key.
    pub key: Vec<u8>,
    /// The length of the value, at most 4 095, and what it is filled with.
    pub value: (u16, u8),
    /// Where the version before lies: segment and offset.
    pub previous: Option<(u32, u32)>,
    /// Where the state of the fence before lies, if the op changes it and if there was one.
    pub fence: Option<Option<(u32, u32)>>,
    /// The last numbered operation and its lsn.
    pub last: Option<(u64, u64)>,
    /// The predecessor's token and operation.
    pub predecessor: Option<(u64, u64)>,
    /// The own lsn of a moved op.
    pub moved: Option<u64>,
}

impl AnyOp {
    fn links(&self) -> Links {
        let at = |(segment, offset)| Location { segment: SegmentId(segment), offset };
        let number = |op: u64| OperationId::new(op | 1);
        Links {
            previous: self.previous.map(at),
            fence: self.fence.map(|before| before.map(at)),
            last: self.last.map(|(op, lsn)| (number(op), Lsn::new(lsn))),
            predecessor: self.predecessor.map(|(token, op)| (token, number(op))),
            moved: self.moved.map(Lsn::new),
        }
    }

    /// Hands the op to `with`, since it borrows its value.
    fn with<T>(&self, with: impl FnOnce(Op<'_>) -> T) -> T {
        let value = vec![self.value.1; self.value.0 as usize % 4096];
        with(Op {
            kind: Kind::ALL[self.kind as usize % Kind::ALL.len()],
            keyspace: KeyspaceId(self.keyspace),
            token: self.token >> 1,
            key: &self.key[..self.key.len().min(crate::types::MAX_KEY_BYTES)],
            value: &value,
            links: self.links(),
        })
    }
}

fn salt() -> Salt {
    Salt::new(&[7; 16], SEGMENT, 9)
}

fn scanned(bytes: &[u8]) -> Scanned {
    let start = Start { segment: SEGMENT, salt: salt(), checksum: HEADER_CHECKSUM, lsn: FIRST };
    let scanned = scan(bytes, &start);
    assert!(scanned.end as usize <= bytes.len().max(HEADER_BYTES as usize));
    scanned
}

/// A segment of frames, each of which was written when all but the last `behind` before it were durable.
#[derive(Debug)]
pub struct Written {
    bytes: Vec<u8>,
    /// Each frame's first byte, the one behind its last, and what it says was durable.
    frames: Vec<(usize, usize, Lsn)>,
}

/// Writes frames of these ops, and holds what is read to what was written.
pub fn write_frames(frames: &[Vec<AnyOp>], behind: u8) -> Written {
    let mut bytes = vec![0; HEADER_BYTES as usize];
    let mut written = Vec::new();
    let (mut previous, mut lsn) = (HEADER_CHECKSUM, FIRST);
    for ops in frames {
        let from = bytes.len();
        let mut body = Vec::new();
        let mut sum = BodySum::default();
        for op in ops {
            let offset = (from + FRAME_HEADER_BYTES + body.len()) as u32;
            let site = Site { salt: salt(), segment: SEGMENT, offset, frame: from as u32, lsn };
            sum.add(op.with(|op| encode(&op, &site, None, &mut body)));
        }
        let durable = Lsn::new(lsn.get() - 1 - behind as u64);
        let header = FrameHeader { body_len: body.len() as u32, lsn, durable, previous, body: sum.finish() };
        let (head, checksum) = header.encode(salt(), from as u32);
        bytes.extend_from_slice(&head);
        bytes.extend_from_slice(&body);
        written.push((from, bytes.len(), durable));
        bytes.resize(bytes.len().next_multiple_of(FRAME_ALIGN as usize), 0);
        (previous, lsn) = (checksum, lsn.next());
    }
    let written = Written { bytes, frames: written };
    written.check(frames);
    written
}

impl Written {
    fn check(&self, frames: &[Vec<AnyOp>]) {
        let scanned = scanned(&self.bytes);
        assert_eq!((scanned.frames as usize, scanned.damage), (frames.len(), None));
        assert_eq!(scanned.end as usize, self.bytes.len());
        let mut offsets = Table::offsets(scanned.table.bytes());
        let (mut lsn, mut keyspaces) = (FIRST, 0);
        for ops in frames {
            for op in ops {
                let at = offsets.next().flatten().expect("an offset for each op");
                let head = decode(&self.bytes, at as usize, SEGMENT, at).expect("what was written");
                assert!(head.verify_head(&self.bytes, salt(), at, lsn) && head.verify_value(&self.bytes));
                op.with(|op| assert_eq!(head.op(&self.bytes), op));
                keyspaces += (head.kind == Kind::Keyspace) as u32;
            }
            lsn = lsn.next();
        }
        assert_eq!((offsets.next(), scanned.table.keyspaces()), (None, keyspaces));
    }

    /// Changes one byte: every frame before it is read as it was, the one with it never, and later ones say so
    /// where they know that it was durable.
    pub fn damage(mut self, at: usize, xor: u8) {
        let frames = self.bytes.len() - HEADER_BYTES as usize;
        if frames == 0 || xor == 0 {
            return;
        }
        let at = HEADER_BYTES as usize + at % frames;
        let sound = scanned(&self.bytes);
        self.bytes[at] ^= xor;
        let damaged = scanned(&self.bytes);
        let hit = self.frames.iter().position(|&(from, to, _)| (from..to).contains(&at));
        let Some(hit) = hit else {
            assert_eq!(damaged, sound, "bytes between frames mean nothing");
            return;
        };
        assert_eq!((damaged.frames as usize, damaged.end as usize), (hit, self.frames[hit].0));
        let before = damaged.table.bytes();
        assert_eq!(&sound.table.bytes()[..before.len()], before);
        let lsn = Lsn::new(FIRST.get() + hit as u64);
        let witness = self.frames[hit + 1..].iter().find(|&&(_, _, durable)| durable >= lsn);
        assert_eq!(damaged.damage, witness.map(|&(from, _, _)| from as u32), "rot is told from a torn tail");
    }
}

/// Reads any bytes as an op, as a frame, and as the ops of a frame whose header is right.
pub fn read_anything(bytes: &[u8], offset: u32) {
    if let Ok(head) = decode(bytes, 0, SEGMENT, offset) {
        assert!(head.key().end <= head.value().start && head.end() <= bytes.len());
        let op = head.op(bytes);
        let (mut again, site) =
            (Vec::new(), Site { salt: salt(), segment: SEGMENT, offset, frame: 0, lsn: FIRST });
        encode(&op, &site, None, &mut again);
        let read = decode(&again, 0, SEGMENT, offset).expect("what was written");
        assert_eq!(read.op(&again), op);
        assert!(read.verify_head(&again, salt(), offset, FIRST) && read.verify_value(&again));
        assert!(!head.verify_head(bytes, salt(), offset, FIRST), "made up, and it verifies");
    }
    FrameHeader::decode(bytes, salt(), offset);
    Seal::decode(bytes, salt(), offset);
    SegmentHeader::decode_any(bytes);
    let mut segment = vec![0; HEADER_BYTES as usize];
    segment.extend_from_slice(bytes);
    assert_eq!(scanned(&segment).frames, 0);

    let (numbers, body) = bytes.split_at(bytes.len().min(8));
    let number =
        |at: usize| numbers.get(at..at + 4).map_or(0, |n| n.iter().fold(0, |n, &b| n << 8 | b as u32));
    let header = FrameHeader {
        // Now and then the length is that of the body, and only the ops are made up.
        body_len: if number(0) % 2 == 0 { body.len() as u32 } else { number(0) },
        lsn: FIRST,
        durable: Lsn::new(FIRST.get() - 1),
        previous: HEADER_CHECKSUM,
        body: number(4),
    };
    segment.truncate(HEADER_BYTES as usize);
    segment.extend_from_slice(&header.encode(salt(), HEADER_BYTES).0);
    segment.extend_from_slice(body);
    let empty = header.body_len == 0 && header.body == BodySum::default().finish();
    assert_eq!(scanned(&segment).frames, empty as u32);
}

/// Reads any bytes as a key table.
pub fn read_any_table(bytes: &[u8]) -> Vec<u32> {
    let all: Vec<Option<u32>> = Table::offsets(bytes).take(bytes.len() + 1).collect();
    assert!(all.len() <= bytes.len(), "an entry takes a byte at least");
    let good: Vec<u32> = all.iter().map_while(|offset| *offset).collect();
    assert!(good.is_sorted(), "offsets rise");
    assert!(all.len() - good.len() <= 1, "only the last may be none");
    good
}

/// Writes a key table of these offsets, and reads it back.
pub fn write_table(mut offsets: Vec<u32>) -> Vec<u8> {
    offsets.sort_unstable();
    let mut table = Table::default();
    offsets.iter().for_each(|&offset| table.push(offset, Kind::Put));
    assert!(table.len() as usize <= offsets.len() * Table::ENTRY_BYTES as usize);
    assert_eq!(read_any_table(table.bytes()), offsets);
    table.bytes().to_vec()
}

/// The key table of a segment that was sealed and cut, as by a clean close.
pub fn table_of(segment: &[u8]) -> Option<Vec<u8>> {
    let (_, seal, at) = seal_of(segment)?;
    segment.get(at.checked_sub(seal.table_len as usize)?..at).map(<[u8]>::to_vec)
}

/// The same segment with another key table, which verifies.
pub fn with_table(segment: &[u8], table: &[u8], keyspaces: u32) -> Option<Vec<u8>> {
    let (salt, seal, _) = seal_of(segment)?;
    let from = seal.end.offset as usize;
    let mut forged = segment.get(..from)?.to_vec();
    forged.extend_from_slice(table);
    let table_checksum = salt.checksum(from as u32, &[table]);
    let seal = Seal { table_len: table.len() as u32, table_checksum, keyspaces, ..seal };
    forged.extend_from_slice(&seal.encode(salt, (from + table.len()) as u32));
    Some(forged)
}

fn seal_of(segment: &[u8]) -> Option<(Salt, Seal, usize)> {
    let (_, salt) = SegmentHeader::decode_any(segment)?;
    let at = segment.len().checked_sub(SEAL_BYTES)?;
    Some((salt, Seal::decode(&segment[at..], salt, at as u32)?, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_tables_go_both_ways() {
        let op = AnyOp { kind: 1, token: 8, key: b"key".to_vec(), value: (5, 5), ..AnyOp::default() };
        let large = AnyOp { value: (2000, 1), previous: Some((3, 4124)), fence: Some(None), ..op.clone() };
        let frames = vec![vec![op.clone(), large.clone()], vec![], vec![AnyOp { last: Some((1, 2)), ..op }]];
        let len = write_frames(&frames, 0).bytes.len() - HEADER_BYTES as usize;
        for behind in [0, 1, 9] {
            (0..len).for_each(|at| write_frames(&frames, behind).damage(at, 1 << (at % 8)));
        }
        assert_eq!(write_table(vec![4124, 4096, 1 << 31]), [0x80, 0x20, 28, 0xe4, 0xdf, 0xff, 0xff, 0x07]);
        assert_eq!(read_any_table(&[5, 0xff, 0xff, 0xff, 0xff, 0x7f, 1]), [5]);
    }
}
