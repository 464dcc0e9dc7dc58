//! The ops of a log, read and verified a little ahead of whoever replays them.
//!
//! One job: everything about an op that does not depend on the ops before it (its bytes, its checksum, the
//! hash of its name), on other threads where there are any. The batches arrive in the order of the log,
//! whoever read them: thread n of m reads every mth batch, and each has a queue of its own.
//!
//! Promises that damage is met where it lies: everything in front of it arrives first.
//!
//! Read next: `replay.rs`, which applies the batches.

use crate::error::{Error, Result};
use crate::format::header::End;
use crate::index::name_hash;
use crate::log::scan::Table;
use crate::log::segment::{OpRef, Segment};
use crate::op::Class;
use crate::sync::Arc;
use std::ops::ControlFlow;
use std::sync::mpsc::sync_channel;
use std::thread;

/// Enough that a queue costs nothing, and few enough that they stay in the cache until they are applied.
const BATCH_OPS: usize = 256;
/// Batches that a thread reads before it waits for them to be applied.
const QUEUE_BATCHES: usize = 8;
/// More threads than this read faster than one applies.
const MAX_THREADS: usize = 4;
/// Below this many bytes of key tables, threads cost more than they save.
const MIN_TABLE_BYTES: u64 = 16 << 10;

/// A segment about to be replayed: what of it is proven, and where its ops lie.
pub(crate) struct Loaded {
    pub segment: Arc<Segment>,
    pub table: Table,
    pub end: End,
    pub counter: u64,
}

impl Loaded {
    /// Where the ops lie.
    pub fn offsets(&self) -> impl Iterator<Item = Result<u32>> {
        let end = self.end.offset;
        Table::offsets(self.table.bytes()).map(move |offset| {
            offset
                .filter(|&offset| offset < end)
                .ok_or_else(|| self.segment.corrupt(end, "the key table points nowhere"))
        })
    }
}

/// An op, and the hash of its key: as a version, or as the name of a fence.
pub(crate) struct Read<'a> {
    pub op: OpRef<'a>,
    pub hash: u64,
}

/// Ops of one segment.
pub(crate) struct Batch<'a> {
    /// Which of the segments.
    pub segment: usize,
    /// It is the first one of its segment; each has one, perhaps without ops.
    pub begins: bool,
    pub ops: Vec<Read<'a>>,
    /// What lies behind these ops cannot be read.
    pub failed: Option<Error>,
}

/// Calls `apply` with all ops of these segments, in order. `seed` is that of the store's hashes.
pub(crate) fn read_ahead<'a>(
    loaded: &'a [Loaded],
    seed: u64,
    may_start_threads: bool,
    mut apply: impl FnMut(Batch<'a>) -> Result<()>,
) -> Result<()> {
    let is_small = loaded.iter().map(|loaded| loaded.table.len() as u64).sum::<u64>() < MIN_TABLE_BYTES;
    let spare_cores = || thread::available_parallelism().map_or(0, |all| all.get() - 1);
    let threads = if may_start_threads && !is_small { spare_cores().min(MAX_THREADS) } else { 0 };
    if threads > 0 {
        return read_on_threads(loaded, seed, threads, apply);
    }
    let mut result = Ok(());
    each_batch(loaded, seed, (0, 1), |batch| {
        result = apply(batch);
        if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    result
}

#[expect(clippy::disallowed_methods, reason = "threads that end before opening does, and not in simulations")]
fn read_on_threads<'a>(
    loaded: &'a [Loaded],
    seed: u64,
    threads: usize,
    mut apply: impl FnMut(Batch<'a>) -> Result<()>,
) -> Result<()> {
    thread::scope(|scope| {
        let mut queues = Vec::with_capacity(threads);
        for n in 0..threads {
            let (sender, queue) = sync_channel(QUEUE_BATCHES);
            queues.push(queue);
            let read = move || {
                each_batch(loaded, seed, (n, threads), |batch| match sender.send(batch) {
                    Ok(()) => ControlFlow::Continue(()),
                    // Whoever applies them has failed.
                    Err(_) => ControlFlow::Break(()),
                });
            };
            thread::Builder::new()
                .name("tidewall-read".to_owned())
                .spawn_scoped(scope, read)
                .map_err(|e| Error::io("starting a thread", e))?;
        }
        // A queue that is at its end when its turn comes: that was the last batch.
        queues.iter().cycle().map_while(|queue| queue.recv().ok()).try_for_each(&mut apply)
    })
}

/// Reads each `every`th batch from the `first` on, until `each` breaks.
fn each_batch<'a>(
    loaded: &'a [Loaded],
    seed: u64,
    (first, every): (usize, usize),
    mut each: impl FnMut(Batch<'a>) -> ControlFlow<()>,
) {
    let mut n = 0;
    for (segment, loaded) in loaded.iter().enumerate() {
        let mut offsets = loaded.offsets().peekable();
        let mut begins = true;
        while begins || offsets.peek().is_some() {
            let offsets = offsets.by_ref().take(BATCH_OPS);
            if n % every == first {
                let mut batch = Batch { segment, begins, ops: Vec::with_capacity(BATCH_OPS), failed: None };
                batch.failed = batch.read(loaded, seed, offsets).err();
                if each(batch).is_break() {
                    return;
                }
            } else {
                offsets.for_each(drop);
            }
            n += 1;
            begins = false;
        }
    }
}

impl<'a> Batch<'a> {
    fn read(
        &mut self,
        loaded: &'a Loaded,
        seed: u64,
        offsets: impl Iterator<Item = Result<u32>>,
    ) -> Result<()> {
        for offset in offsets {
            let op = loaded.segment.op(offset?)?;
            let class = if op.head.kind.is_value() { Class::Key } else { Class::Fence };
            let hash = name_hash(seed, op.head.keyspace.0, class as u8, op.key());
            self.ops.push(Read { op, hash });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Db;
    use crate::format::header::SegmentHeader;
    use crate::format::{HEADER_BYTES, name};
    use crate::log::guard::Pins;
    use crate::log::scan::{Start, scan};
    use crate::log::segment::Body;
    use crate::options::{KeyspaceOptions, Options, Tokens};
    use crate::storage::{Access, Mapping, SimDisk, Storage};
    use crate::types::{SegmentId, Token};

    /// A few segments of some batches each; in one of them, a byte of the op in the middle is another.
    fn segments(damaged: Option<usize>) -> Vec<Loaded> {
        let disk = SimDisk::new();
        let options = Options::new().storage(disk.clone()).without_threads().deterministic(1);
        let db: Db = options.segment_bytes(64 << 10).open("sim").unwrap();
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        for n in 0..2000u32 {
            rows.put(Token::new(1).unwrap(), &n.to_be_bytes(), &[7; 60]).unwrap();
        }
        db.close().unwrap();
        (1..=3).map(|id| load(&disk, SegmentId(id), damaged == Some(id as usize - 1))).collect()
    }

    fn load(disk: &SimDisk, id: SegmentId, is_damaged: bool) -> Loaded {
        let file = disk.open(&name::segment(id), Access::Read).unwrap();
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let (header, salt) = SegmentHeader::decode_any(&bytes).unwrap();
        let (_, checksum) = SegmentHeader::decode(&bytes, salt, "").unwrap().unwrap();
        let start = Start { segment: id, salt, checksum, lsn: header.before.lsn.next() };
        let scanned = scan(&bytes, &start);
        assert!(scanned.frames as usize > 2 * BATCH_OPS && scanned.end > HEADER_BYTES);
        if is_damaged {
            let middle = Table::offsets(scanned.table.bytes()).nth(scanned.frames as usize / 2);
            bytes[middle.unwrap().unwrap() as usize] ^= 1;
        }
        let end = End { segment: id.0, offset: scanned.end, ..End::default() };
        let body = Body::Map(Mapping::from_bytes(bytes));
        let segment = Arc::new(Segment { id, salt, file, body, pins: Pins::new() });
        Loaded { segment, table: scanned.table, end, counter: 0 }
    }

    /// What arrives, until something cannot be read, or `most` batches have.
    fn arrives(loaded: &[Loaded], threads: usize, most: usize) -> (Vec<String>, String) {
        let mut seen = Vec::new();
        let mut batches = 0;
        let apply = |batch: Batch<'_>| {
            let Batch { segment, begins, ops, failed } = batch;
            seen.push(format!("batch {segment} {begins}"));
            seen.extend(ops.iter().map(|read| format!("{:?} {}", read.op.at, read.hash)));
            batches += 1;
            if batches == most { Err(Error::invalid("enough")) } else { failed.map_or(Ok(()), Err) }
        };
        let result = match threads {
            0 => read_ahead(loaded, 7, false, apply),
            threads => read_on_threads(loaded, 7, threads, apply),
        };
        (seen, format!("{result:?}"))
    }

    #[test]
    fn threads_change_nothing_about_what_arrives() {
        for damaged in [None, Some(0), Some(1), Some(2)] {
            let loaded = segments(damaged);
            for most in [1, 2, 5, usize::MAX] {
                let want = arrives(&loaded, 0, most);
                assert_eq!(want.1 == "Ok(())", damaged.is_none() && most == usize::MAX, "{}", want.1);
                for threads in [1, 2, 3, 7] {
                    assert_eq!(arrives(&loaded, threads, most), want, "{threads} threads, {damaged:?}");
                }
            }
        }
    }

    #[test]
    fn each_op_arrives_once_with_the_first_batch_of_its_segment_in_front() {
        let loaded = segments(None);
        let (seen, _) = arrives(&loaded, 2, usize::MAX);
        let ops: usize = loaded.iter().map(|loaded| loaded.offsets().count()).sum();
        assert_eq!(seen.iter().filter(|line| !line.starts_with("batch")).count(), ops);
        let begins: Vec<_> = seen.iter().filter(|line| line.ends_with(" true")).collect();
        assert_eq!(begins, ["batch 0 true", "batch 1 true", "batch 2 true"]);
    }

    #[test]
    fn damage_arrives_behind_all_that_lies_in_front_of_it() {
        let loaded = segments(Some(1));
        let (seen, result) = arrives(&loaded, 3, usize::MAX);
        let in_front = loaded[0].offsets().count() + loaded[1].offsets().count() / 2;
        assert_eq!(seen.iter().filter(|line| !line.starts_with("batch")).count(), in_front);
        assert!(result.contains("an op does not match its checksum"), "{result}");
    }
}
