//! One segment, frame by frame and op by op, going on behind what is damaged.
//!
//! One job: hand out every op that its own checksum proves, and list everything that is not as it was written.
//! A length is believed only behind a checksum that covers it: behind a damaged op the next one is found
//! through the key table, behind a damaged frame through the next frame that verifies whole.

use super::{FaultKind, Faults, Surveyed};
use crate::format::frame::{BodySum, FRAME_HEADER_BYTES, FrameHeader};
use crate::format::header::{SEAL_BYTES, Seal};
use crate::format::op;
use crate::format::{FRAME_ALIGN, HEADER_BYTES};
use crate::log::scan::{Table, evidence, frame_end};
use crate::log::segment::{Bytes, OpRef};
use crate::types::{Excerpt, Location, Lsn};

/// An op whose head, key and small value are proven.
pub(crate) struct Intact<'b> {
    pub op: OpRef<'b>,
    /// So is its large value, if it has one.
    pub has_value: bool,
}

/// What a walk came to.
#[derive(Debug, Default)]
pub(crate) struct Walked {
    pub frames: u64,
    pub ops: u64,
    /// The newest lsn of a frame whose header is proven.
    pub last: Lsn,
    /// Bytes behind the last whole frame of the newest segment: the tail that a crash left.
    pub tail_bytes: u64,
}

struct Walker<'b, 'f> {
    segment: &'b Surveyed,
    bytes: &'b [u8],
    faults: &'f mut Faults,
    walked: Walked,
    /// The offsets of all ops, where the key table is intact.
    offsets: Option<Vec<u32>>,
    table: Table,
    /// The checksum that the next frame names; unknown behind damage.
    chained: Option<u32>,
    next: Lsn,
    at: u32,
    limit: u32,
}

/// Walks through `bytes`, the whole segment.
pub(crate) fn walk<'b>(
    segment: &'b Surveyed,
    bytes: &'b [u8],
    faults: &mut Faults,
    each: &mut dyn FnMut(&Intact<'b>, &mut Faults),
) -> Walked {
    let faults_before = faults.0.len();
    let table = segment.seal.as_ref().and_then(|seal| key_table(segment, bytes, seal));
    let limit = match &segment.seal {
        Some(seal) if seal.end.offset as usize <= bytes.len() => seal.end.offset,
        _ => bytes.len() as u32,
    };
    let mut walker = Walker {
        segment,
        bytes,
        faults,
        walked: Walked { last: segment.follows, ..Walked::default() },
        offsets: table.and_then(|table| Table::offsets(table).collect()),
        table: Table::default(),
        chained: segment.header.map(|(_, checksum)| checksum),
        next: segment.follows.next(),
        at: HEADER_BYTES,
        limit,
    };
    walker.run(each);
    if let Some(seal) = &segment.seal {
        let whole = walker.faults.0.len() == faults_before;
        walker.check_seal(seal, table, whole);
    }
    walker.walked
}

/// The bytes of the key table, if they are what the seal says.
fn key_table<'b>(segment: &Surveyed, bytes: &'b [u8], seal: &Seal) -> Option<&'b [u8]> {
    let end = bytes.len().checked_sub(SEAL_BYTES)?;
    let start = end.checked_sub(seal.table_len as usize)?;
    let table = &bytes[start..end];
    (segment.salt.checksum(start as u32, &[table]) == seal.table_checksum).then_some(table)
}

impl<'b> Walker<'b, '_> {
    fn run(&mut self, each: &mut dyn FnMut(&Intact<'b>, &mut Faults)) {
        while self.at < self.limit {
            let header = FrameHeader::decode(&self.bytes[self.at as usize..], self.segment.salt, self.at);
            let end = header
                .map(|(header, _)| self.at as u64 + (FRAME_HEADER_BYTES as u64) + header.body_len as u64);
            match header {
                Some((header, checksum)) if end.is_some_and(|end| end <= self.limit as u64) => {
                    let torn = self.segment.is_last && self.segment.seal.is_none();
                    if torn && !self.is_sound(self.at, &header) && !self.was_durable(header.lsn) {
                        break;
                    }
                    self.frame(&header, checksum, each);
                }
                _ if !self.skip() => break,
                _ => {}
            }
        }
        if self.segment.is_last && self.segment.seal.is_none() {
            let rest = &self.bytes[self.at.min(self.limit) as usize..];
            self.walked.tail_bytes = rest.iter().rposition(|&byte| byte != 0).map_or(0, |at| at as u64 + 1);
        }
    }

    /// Whether something behind says that everything up to `lsn` was durable.
    fn was_durable(&self, lsn: Lsn) -> bool {
        let behind = &self.bytes[..self.limit as usize];
        evidence(behind, self.segment.salt, self.at, lsn).is_some()
    }

    /// No frame lies here. Goes on at the next one that is whole, unless this is where the log ends.
    fn skip(&mut self) -> bool {
        let is_end = self.segment.is_last && self.segment.seal.is_none() && !self.was_durable(self.next);
        if is_end {
            return false;
        }
        let damaged = self.at;
        let zeros = self.bytes[damaged as usize..self.limit as usize].iter().all(|&byte| byte == 0);
        self.at += FRAME_ALIGN;
        while self.at < self.limit {
            let found = FrameHeader::decode(&self.bytes[self.at as usize..], self.segment.salt, self.at);
            if found.is_some_and(|(header, _)| header.lsn >= self.next && self.is_sound(self.at, &header)) {
                break;
            }
            self.at += FRAME_ALIGN;
        }
        self.chained = None;
        // A segment that lost its seal has zeros behind its frames, as it always had.
        if self.segment.seal.is_some() || !zeros {
            let what = "no frame verifies here, and one was written";
            self.faults.add(FaultKind::Frame, &self.segment.name, damaged as u64, Some(self.next), what);
        }
        true
    }

    /// Whether every byte of a frame verifies.
    fn is_sound(&self, offset: u32, header: &FrameHeader) -> bool {
        let from = offset as usize + FRAME_HEADER_BYTES;
        let Some(to) = from.checked_add(header.body_len as usize).filter(|&to| to <= self.limit as usize)
        else {
            return false;
        };
        let mut sum = BodySum::default();
        let mut at = from;
        while at < to {
            match self.op_at(at, to, offset, header.lsn) {
                Some(head) if head.verify_value(self.bytes) => {
                    sum.add(head.checksum());
                    at = head.end();
                }
                _ => return false,
            }
        }
        sum.finish() == header.body
    }

    /// The op at `at` of the frame at `frame`, which ends at `to`, if it was written there.
    fn op_at(&self, at: usize, to: usize, frame: u32, lsn: Lsn) -> Option<op::Head> {
        let head = op::decode(&self.bytes[..to], at, self.segment.id, at as u32).ok()?;
        let belongs = head.back == at as u32 - frame;
        (belongs && head.verify_head(self.bytes, self.segment.salt, at as u32, lsn)).then_some(head)
    }

    /// A frame whose header is proven.
    fn frame(&mut self, header: &FrameHeader, checksum: u32, each: &mut dyn FnMut(&Intact<'b>, &mut Faults)) {
        let lsn = Some(header.lsn);
        let (name, frame) = (&self.segment.name, self.at);
        let breaks =
            self.chained.is_some_and(|chained| chained != header.previous || header.lsn != self.next);
        if breaks {
            let what = format!("the frame does not follow the one before, whose next lsn is {}", self.next);
            self.faults.add(FaultKind::Frame, name, frame as u64, lsn, what);
        }
        let from = frame as usize + FRAME_HEADER_BYTES;
        let to = from + header.body_len as usize;
        let (mut at, mut sum, mut whole) = (from, BodySum::default(), true);
        while at < to {
            let Some(head) = self.op_at(at, to, frame, header.lsn) else {
                whole = false;
                self.faults.add(FaultKind::Op, name, at as u64, lsn, "an op does not match its checksum");
                match self.op_behind(at, to) {
                    Some(next) => at = next,
                    None => break,
                }
                continue;
            };
            let has_value = head.verify_value(self.bytes);
            if !has_value {
                let key = Excerpt::new(&self.bytes[head.key()]);
                let what = format!("the value of {key} does not match its checksum");
                self.faults.add(FaultKind::Value, name, at as u64, lsn, what);
            }
            sum.add(head.checksum());
            self.table.push(at as u32, head.kind);
            self.walked.ops += 1;
            let end = head.end();
            let location = Location { segment: self.segment.id, offset: at as u32 };
            let own = head.moved_lsn(self.bytes).unwrap_or(header.lsn);
            let op = OpRef { at: location, lsn: own, head, bytes: Bytes::Borrowed(self.bytes) };
            each(&Intact { op, has_value }, self.faults);
            at = end;
        }
        if whole && sum.finish() != header.body {
            let what = "the ops of the frame are not those it was written with";
            self.faults.add(FaultKind::Frame, name, frame as u64, lsn, what);
        }
        self.walked.frames += 1;
        self.walked.last = header.lsn;
        self.chained = Some(checksum);
        self.next = header.lsn.next();
        self.at = frame_end(frame, header.body_len);
    }

    /// The next op in front of `to`, by the key table.
    fn op_behind(&self, at: usize, to: usize) -> Option<usize> {
        let offsets = self.offsets.as_ref()?;
        let next = offsets.partition_point(|&offset| offset as usize <= at);
        offsets.get(next).map(|&offset| offset as usize).filter(|&offset| offset < to)
    }

    /// The seal says what was walked; `whole`: nothing was damaged on the way.
    fn check_seal(&mut self, seal: &Seal, table: Option<&[u8]>, whole: bool) {
        let at = (self.bytes.len() - SEAL_BYTES) as u64;
        let name = &self.segment.name;
        let says = (seal.end.segment, seal.end.offset, seal.end.lsn, seal.frames as u64, seal.keyspaces);
        let keyspaces = self.table.keyspaces();
        let found = (self.segment.id.0, self.at, self.walked.last, self.walked.frames, keyspaces);
        if whole && (says != found || self.chained != Some(seal.end.checksum)) {
            let what = "the seal says something else than the frames";
            self.faults.add(FaultKind::Seal, name, at, Some(seal.end.lsn), what);
        }
        match table {
            None => self.faults.add(FaultKind::KeyTable, name, at, None, "the key table is damaged"),
            Some(table) if whole && table != self.table.bytes() => {
                let what = "the key table does not name the ops of the segment";
                self.faults.add(FaultKind::KeyTable, name, at, None, what);
            }
            Some(_) => {}
        }
    }
}
