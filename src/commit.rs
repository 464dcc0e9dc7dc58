//! A write, end to end; and the one place where the log reaches the disk.
//!
//! One job: refuse without a lock where the durable mark says so; judge and append at one point in the
//! order; write and sync everything appended as one group; then, and only then, answer.
//!
//! Promises D1–D5. Never retries a sync: a failed one poisons the store.
//!
//! Read next: `recover.rs`, the same road backwards.

use crate::admit::{ChangeKind, Refused, Write};
use crate::clock::{Clock, SystemClock};
use crate::engine::{Committer, Cursor, Engine, Filled, KeyspaceState, PoisonOnPanic, Tail};
use crate::error::{Error, Result};
use crate::events;
use crate::fence::Floor;
use crate::format::HEADER_BYTES;
use crate::format::frame::{FRAME_HEADER_BYTES, FrameHeader};
use crate::format::header::{End, Listed, SEAL_BYTES, Seal, SegmentHeader};
use crate::format::salt::Salt;
use crate::group_commit::Due;
use crate::log::guard::Pins;
use crate::log::image::Image;
use crate::log::pool::Need;
use crate::log::scan::{Table, frame_end};
use crate::log::segment::{Body, Segment};
use crate::options::ReadMode;
use crate::sync::{Arc, AtomicBool, MutexGuard, Ordering, thread};
use crate::types::Lsn;
use std::io;

/// The longest that the committer waits for writers who are on their way.
const GATHER_NANOS: u64 = 40_000;
/// The largest group for which it waits again.
const GATHERED_FRAMES: u64 = 1024;
/// So few writers are all waited for.
pub(crate) const FEW_WRITERS: u64 = 5;

/// An answer that may be given once `rests_on` is durable.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub rests_on: Lsn,
    pub group: u32,
    pub outcome: Result<Lsn>,
}

impl Engine {
    /// Judges and appends a write. The answer is not to be given yet: see [`Engine::settle`].
    pub fn begin(&self, write: &Write<'_>) -> Result<Answer> {
        let (mut one, mut many);
        let seen: &mut [_] = if write.fences.len() == 1 {
            one = [None];
            &mut one
        } else {
            many = vec![None; write.fences.len()];
            &mut many
        };
        self.check_all_early(write.fences, seen)?;
        let write = &Write { seen, ..*write };
        let frees_space = write.changes.iter().all(|change| change.kind != ChangeKind::Put);
        let need = if frees_space { Need::Privileged } else { Need::Ordinary };
        let plain = write.plain_room();
        loop {
            let room = write.room(plain);
            let answer = self.with_room(room, need, |tail| {
                if write.room(plain) > room {
                    return None;
                }
                let judged = self.judge_and_append(tail, write);
                Some(self.answer(tail, judged))
            })?;
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
    }

    /// The check and the mutation, at one point in the order: under the tail lock.
    pub fn judge_and_append(&self, tail: &mut Tail, write: &Write<'_>) -> Result<Lsn, Refused> {
        let guard = crossbeam_epoch::pin();
        let mut work = std::mem::take(&mut tail.work);
        let judged = self
            .judge(tail, write, &guard, &mut work.views)
            .and_then(|()| Ok(self.append_write(tail, &mut work, write, &guard)?));
        tail.work = work;
        judged
    }

    /// Runs `append` under the tail lock with `room` reserved in the active segment.
    pub fn with_room<T>(&self, room: u32, need: Need, mut append: impl FnMut(&mut Tail) -> T) -> Result<T> {
        let _guard = PoisonOnPanic::new(self);
        let mut waits = true;
        loop {
            let mut tail = self.tail.lock();
            self.check_open()?;
            if self.reserve(&mut tail, room, need)? {
                return Ok(append(&mut tail));
            }
            drop(tail);
            let made = self.make_room(room, need, waits);
            // What a close came in between says.
            made.or_else(|error| self.check_readable().and(Err(error)))?;
            // Whatever was made, others may have taken it: that costs no second wait.
            waits = false;
        }
    }

    /// A sync of the list of segments that failed poisons the store like one of the log: it says the same of
    /// the disk, and without the list there will be no further segment.
    pub fn check_list(&self) {
        if let Err(e) = self.pool.check_list() {
            self.poison(e);
        }
    }

    /// What was found at one point in the order, and what it rests on.
    pub fn answer(&self, tail: &Tail, judged: Result<Lsn, Refused>) -> Answer {
        let (rests_on, outcome) = match judged {
            Ok(lsn) => (lsn, Ok(lsn)),
            Err(refused) => {
                self.counters.refuse(&refused.error);
                (refused.rests_on, Err(refused.error))
            }
        };
        Answer { rests_on, group: tail.group_of(rests_on), outcome }
    }

    /// Waits until what an answer rests on is durable, and gives it. Upholds D1 and D4.
    pub fn settle(&self, answer: Answer) -> Result<Lsn> {
        self.wait_durable(answer.rests_on, answer.group)?;
        answer.outcome
    }

    /// Waits for `lsn`. A caller that is alone makes the commit itself: handing it to the committer
    /// thread would cost two switches. With company the committer does it, once for all of them.
    pub fn wait_durable(&self, lsn: Lsn, group: u32) -> Result<()> {
        if self.progress.durable() >= lsn {
            return Ok(());
        }
        let company = self.waiting.fetch_add(1, Ordering::AcqRel) > 0;
        let result = self.wait_or_lead(lsn, group, company);
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        result
    }

    fn wait_or_lead(&self, lsn: Lsn, group: u32, company: bool) -> Result<()> {
        if !self.options.background {
            return self.commit_until(self.committer.lock(), lsn);
        }
        let alone = !company && self.progress.durable().next() == lsn;
        if alone && let Some(committer) = self.committer.try_lock() {
            return self.commit_until(committer, lsn);
        }
        self.doorbell.ring();
        self.patience.wait(|| self.progress.is_settled(lsn));
        self.progress.wait(lsn, group).map_err(|_| self.indeterminate())
    }

    fn commit_until(&self, mut committer: MutexGuard<'_, Committer>, lsn: Lsn) -> Result<()> {
        let mut due = Vec::new();
        while self.progress.durable() < lsn {
            due.push(self.commit(&mut committer).map_err(|_| self.indeterminate())?);
        }
        // Wakers run foreign code: never under the commit lock.
        drop(committer);
        drop(due);
        Ok(())
    }

    /// Makes everything up to `lsn` durable, for one who holds locks. Who comes for those in a waker has the committer
    /// thread stand still until they are given back: so this waits for no other thread, and wakes no task.
    pub fn commit_behind_locks(&self, lsn: Lsn) -> Result<()> {
        let mut committer = self.committer.lock();
        while self.progress.durable() < lsn {
            self.commit_quietly(&mut committer)?;
        }
        Ok(())
    }

    /// The same, and while only threads wait for commits it is left to the committer thread: then it rides with theirs.
    pub fn wait_behind_locks(&self, lsn: Lsn, group: u32) -> Result<()> {
        if self.options.background && self.progress.durable() < lsn {
            self.waiting.fetch_add(1, Ordering::AcqRel);
            self.doorbell.ring();
            let settled = self.progress.wait_beside_no_task(lsn, group);
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            if let Some(settled) = settled {
                return settled.map_err(|_| self.indeterminate());
            }
        }
        self.commit_behind_locks(lsn)
    }

    /// One commit; the tasks that are due are left to the committer thread.
    pub fn commit_quietly(&self, committer: &mut Committer) -> Result<()> {
        let due = self.commit(committer).map_err(|_| self.indeterminate())?;
        self.wake_later(due);
        Ok(())
    }

    /// What a caller is told whose call was on its way when the disk failed.
    pub fn indeterminate(&self) -> Error {
        let cause =
            self.cause.get().cloned().unwrap_or_else(|| io::Error::other("the store was closed").into());
        Error::Indeterminate { cause }
    }

    /// Lets in those whom the last commit of the committer thread woke: they are on their way with their next
    /// writes, and whoever comes just after the commit has begun waits for two syncs. `expected`: how many.
    ///
    /// Never for long, and not at all behind a writer who was alone or a group that costs more to write
    /// than to sync.
    pub fn gather(&self, expected: u64, stop: &AtomicBool) {
        if !(2..=GATHERED_FRAMES).contains(&expected) {
            return;
        }
        // Not the clock of the leases: that one may stand still.
        let begun = SystemClock.now();
        loop {
            let appended = self.tail.lock().last().get() - self.progress.durable().get();
            let is_over = appended >= expected || stop.load(Ordering::Acquire);
            if is_over || SystemClock.now() - begun >= GATHER_NANOS {
                return;
            }
            thread::yield_now();
        }
    }

    /// Writes and syncs everything appended as one group, then publishes it. Under the commit lock;
    /// the tasks that are due are woken when what is returned is dropped, behind that lock.
    ///
    /// # Errors
    /// The store is poisoned, by this call or an earlier one.
    pub fn commit(&self, committer: &mut Committer) -> Result<Due, Poisoned> {
        let _guard = PoisonOnPanic::new(self);
        if self.cause.get().is_some() {
            return Err(Poisoned);
        }
        let group = self.take_group();
        // A segment may have been filled up for a write that was refused: no new frame, and yet it is to be
        // sealed before the next one is begun.
        if group.last == committer.durable && group.filled.is_empty() {
            return Ok(Due::default());
        }
        match self.write_group(committer, &group) {
            Ok(()) => {
                committer.durable = group.last;
                self.pool.note_group(self.progress.bytes_in_flight(group.appended_bytes));
                for (keyspace, floor) in &group.floors {
                    keyspace.publish_floor(*floor);
                }
                self.counters.commits.fetch_add(1, Ordering::Relaxed);
                if !group.idle {
                    self.counters.group_writes.record(group.frames);
                    self.counters.commit_nanos.record(self.since(group.since));
                }
                if self.options.idle_seal && !group.idle && self.quiet.swap(false, Ordering::AcqRel) {
                    self.doorbell.ring();
                }
                committer.company = self.waiting.load(Ordering::Relaxed) as u64;
                // Upholds D3: visible implies durable; they are one number.
                Ok(self.progress.publish(group.last, group.number, group.appended_bytes))
            }
            Err(e) => {
                self.poison(e);
                Err(Poisoned)
            }
        }
    }

    /// Makes everything appended so far durable and seals the segment in which it ends: its lsn, that segment
    /// (0: there is none yet), and the length it was cut to, unless it was full.
    ///
    /// # Errors
    /// The store takes no writes, or the disk failed and it is poisoned.
    pub fn seal_short(&self) -> Result<(Lsn, u32, Option<u32>)> {
        let mut committer = self.committer.lock();
        let (lsn, short) = {
            let mut tail = self.tail.lock();
            self.check_open()?;
            self.retire_active(&mut tail);
            let short = tail.filled.back_mut().map(|filled| {
                filled.short = true;
                (filled.segment.id.0, sealed_short_bytes(filled.end, &filled.table))
            });
            (tail.last(), short)
        };
        let segment = short.map_or(committer.before.segment, |(segment, _)| segment);
        self.commit_quietly(&mut committer)?;
        Ok((lsn, segment, short.map(|(_, bytes)| bytes)))
    }

    /// Everything appended so far becomes one group; what comes later belongs to the next.
    fn take_group(&self) -> Group {
        let mut tail = self.tail.lock();
        self.append_idle(&mut tail, false);
        let number = tail.group;
        let frames = tail.next.get() - tail.group_start.get();
        tail.group = tail.group.wrapping_add(1);
        tail.group_start = tail.next;
        Group {
            number,
            frames,
            since: tail.group_since,
            last: Lsn::new(tail.next.get() - 1),
            filled: tail.filled.drain(..).collect(),
            active: tail.active.as_ref().map(|active| Piece {
                segment: active.segment.clone(),
                image: active.image.clone(),
                listed: active.listed,
                counter: active.counter,
                end: active.appender.end(),
            }),
            floors: std::mem::take(&mut tail.floors),
            idle: tail.idle,
            appended_bytes: self.appended_bytes.load(Ordering::Relaxed),
        }
    }

    fn write_group(&self, committer: &mut Committer, group: &Group) -> io::Result<()> {
        for filled in &group.filled {
            let piece = Piece {
                segment: filled.segment.clone(),
                image: filled.image.clone(),
                listed: filled.listed,
                counter: filled.counter_before,
                end: filled.end,
            };
            // Upholds R2: a seal proves its frames, so it is not written while a power cut could keep it and
            // lose one of them.
            if self.write_frames(committer, &piece)? {
                self.sync(&piece)?;
            }
            self.seal(committer, filled, if filled.short { SealAt::EndOfFrames } else { SealAt::EndOfFile })?;
        }
        match &group.active {
            Some(piece) if piece.end > HEADER_BYTES => {
                if self.write_frames(committer, piece)? {
                    self.sync(piece)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Writes the frames that are appended and not yet written, not syncing them; says whether there
    /// were any. The first frames of a segment wait for its header to be durable.
    fn write_frames(&self, committer: &mut Committer, piece: &Piece) -> io::Result<bool> {
        if committer.cursor.is_none() {
            committer.cursor = Some(self.write_header(committer, piece)?);
        }
        let cursor = committer.cursor.as_mut().expect("set above");
        debug_assert_eq!(cursor.segment.id, piece.segment.id);
        if cursor.offset == piece.end {
            return Ok(false);
        }
        let from = cursor.offset;
        let staging = &mut committer.staging;
        staging.clear();
        staging.extend_from_slice(&piece.image.bytes()[from as usize..piece.end as usize]);
        cursor.checksum = fill_headers(staging, from, cursor, committer.durable);
        cursor.offset = piece.end;
        piece.segment.file.write_all_at(staging, from as u64)?;
        self.counters.written.fetch_add(staging.len() as u64, Ordering::Relaxed);
        Ok(true)
    }

    fn sync(&self, piece: &Piece) -> io::Result<()> {
        let begun = self.options.clock.now();
        piece.segment.file.sync_data()?;
        self.counters.sync_nanos.record(self.since(begun));
        Ok(())
    }

    fn since(&self, begun: u64) -> u64 {
        self.options.clock.now().saturating_sub(begun)
    }

    fn write_header(&self, committer: &Committer, piece: &Piece) -> io::Result<Cursor> {
        let header = SegmentHeader {
            store_id: self.store_id,
            segment: piece.segment.id,
            bytes: piece.listed.bytes,
            life: piece.listed.life,
            counter: piece.counter,
            before: committer.before,
        };
        let (bytes, checksum) = header.encode(piece.segment.salt);
        piece.segment.file.write_all_at(&bytes, 0)?;
        self.counters.sealing.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        piece.segment.file.sync_data()?;
        Ok(Cursor { segment: piece.segment.clone(), offset: HEADER_BYTES, checksum })
    }

    /// Seals a full segment: its key table and seal are synced before the next header names them.
    pub fn seal(&self, committer: &mut Committer, filled: &Filled, at: SealAt) -> io::Result<()> {
        let cursor = committer.cursor.take().expect("a segment is sealed after its frames are written");
        let segment = &filled.segment;
        let end =
            End { segment: segment.id.0, offset: filled.end, checksum: cursor.checksum, lsn: filled.last };
        let sealed_bytes = filled.table.len() + SEAL_BYTES as u32;
        let offset = match at {
            SealAt::EndOfFile => filled.listed.bytes - sealed_bytes,
            SealAt::EndOfFrames => filled.end,
        };
        let bytes = seal_bytes(segment.salt, end, filled.frames, filled.counter, &filled.table, offset);
        segment.file.write_all_at(&bytes, offset as u64)?;
        self.counters.sealing.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        segment.file.sync_data()?;
        if at == SealAt::EndOfFrames {
            segment.file.set_len((offset + sealed_bytes) as u64)?;
            segment.file.sync_data()?;
        }
        let taken = match at {
            SealAt::EndOfFile => filled.listed.bytes,
            SealAt::EndOfFrames => offset + sealed_bytes,
        };
        committer.before = end;
        events::sealed(&self.dir, segment.id.0, filled.frames, filled.end);
        self.segments.set(Arc::new(sealed_form(segment, filled.end, self.options.read_mode)?));
        // Behind that: compaction proves what it finds in the table, and an image has no header.
        self.tail.lock().usage.seal(segment.id, taken);
        self.images.keep(filled.image.clone());
        self.compact_bell.ring();
        self.index_bell.ring();
        Ok(())
    }
}

/// Where a seal goes: a full segment has kept room at its end; one sealed short is cut there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SealAt {
    EndOfFile,
    EndOfFrames,
}

/// The store is poisoned; the cause stands in the engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Poisoned;

struct Group {
    number: u32,
    frames: u64,
    /// When the first of them was appended.
    since: u64,
    last: Lsn,
    filled: Vec<Filled>,
    active: Option<Piece>,
    floors: Vec<(Arc<KeyspaceState>, Floor)>,
    /// The last frame is an idle one.
    idle: bool,
    appended_bytes: u64,
}

/// A segment as far as it is appended.
struct Piece {
    segment: Arc<Segment>,
    image: Arc<Image>,
    listed: Listed,
    counter: u64,
    end: u32,
}

/// Fills in what only the committer knows: what is durable, and the chain of checksums.
fn fill_headers(staging: &mut [u8], from: u32, cursor: &Cursor, durable: Lsn) -> u32 {
    let salt = cursor.segment.salt;
    let mut previous = cursor.checksum;
    let mut at = 0;
    while at < staging.len() {
        let field =
            |from: usize| staging[at + from..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b));
        let lsn = staging[at + 8..].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        let (body_len, body) = (field(4), field(24));
        let header = FrameHeader { body_len, lsn: Lsn::new(lsn), durable, previous, body };
        let (bytes, checksum) = header.encode(salt, from + at as u32);
        staging[at..at + FRAME_HEADER_BYTES].copy_from_slice(&bytes);
        previous = checksum;
        at = frame_end(at as u32, body_len) as usize;
    }
    previous
}

/// The length of a segment that is cut right behind its frames, its key table and its seal.
pub(crate) fn sealed_short_bytes(end: u32, table: &Table) -> u32 {
    end + table.len() + SEAL_BYTES as u32
}

/// The key table and the seal behind it.
pub(crate) fn seal_bytes(
    salt: Salt,
    end: End,
    frames: u32,
    counter: u64,
    table: &Table,
    offset: u32,
) -> Vec<u8> {
    let seal = Seal {
        end,
        frames,
        table_len: table.len(),
        table_checksum: salt.checksum(offset, &[table.bytes()]),
        counter,
        keyspaces: table.keyspaces(),
    };
    let mut bytes = table.bytes().to_vec();
    bytes.extend_from_slice(&seal.encode(salt, offset + table.len()));
    bytes
}

/// A sealed segment as readers see it.
pub(crate) fn sealed_form(segment: &Segment, end: u32, mode: ReadMode) -> io::Result<Segment> {
    let body = match mode {
        ReadMode::Map => Body::Map(segment.file.map(end as usize)?),
        ReadMode::Pread => Body::Pread(end),
    };
    Ok(Segment { id: segment.id, salt: segment.salt, file: segment.file.clone(), body, pins: Pins::new() })
}
