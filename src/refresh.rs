//! When an index file is written, and of what.
//!
//! One job: now and then, and at a clean close, make the state that the sealed part of the log proves, as an open
//! would, and write it down. It is made from the log and never from what is in memory here, so it is what a scan
//! finds, and no writer waits for it. What fails costs the next open a scan of what would have been spared.
//!
//! Read next: `index_file.rs`, the bytes; `recover.rs`, the same from the front.

use crate::clock::{Clock, SystemClock};
use crate::engine::{Engine, KeyspaceState};
use crate::error::{Error, Result};
use crate::events;
use crate::format::header::{End, Listed, StoreBlock};
use crate::format::name;
use crate::found::{Begun, load, table_of};
use crate::index_file::{self, IndexFile, Known, replay_on};
use crate::log::segment::{Body, Segment};
use crate::read_ahead::{Loaded, read_ahead};
use crate::replay::Replay;
use crate::sync::{Arc, AtomicBool, Ordering};
use crate::types::{Lsn, SegmentId};
use std::io;
use std::time::Duration;

/// Replaying so many ops takes no time that anybody notices.
const FEW_OPS: u64 = 4096;
/// While the store runs, an index file is written when the next open would replay so many ops, which takes it about
/// a tenth of a second, or as many as a share of the names in the index. A name costs some eight bytes in the file, so
/// what is written stays below thirty bytes an op.
const MANY_OPS: u64 = 300_000;
const SHARE_OF_NAMES: u64 = 3;
/// About what a name takes in the file, and how long the file is anyway before it is worth writing a shorter one.
const NAME_BYTES: u64 = 10;
const MANY_BYTES: u64 = 8 << 20;
/// At a clean close, already when so small a share would be replayed.
const SHARE_AT_CLOSE: u64 = 256;

/// Under load, so many times as long as it took to write one it is rested, at most until twice as much waits: else
/// that would be a quarter of all processor time.
const RESTS: u64 = 9;

/// The thread that writes index files.
pub(crate) fn run_indexer(engine: &Engine, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        let begun = SystemClock.now();
        engine.refresh_index_if_due(false);
        let ended = SystemClock.now();
        let until = ended + ended.saturating_sub(begun) * RESTS;
        engine.index_bell.listen(None);
        while !stop.load(Ordering::Acquire) && SystemClock.now() < until && !engine.is_index_overdue() {
            engine.index_bell.listen(Some(Duration::from_nanos(until.saturating_sub(SystemClock.now()))));
        }
    }
}

/// The part of the log that is sealed, held as it is.
struct Cut {
    bound: End,
    block: StoreBlock,
    held: Vec<(Listed, Arc<Segment>)>,
}

impl Engine {
    /// Whether the next open would replay so much that an index file is worth its bytes.
    pub fn is_index_due(&self, is_closing: bool) -> bool {
        let uncovered = self.tail.lock().usage.uncovered();
        let names = self.slots.len() as u64;
        match (self.options.index_every, is_closing) {
            (Some(ops), _) => uncovered >= ops,
            (None, true) => uncovered >= FEW_OPS.max(names / SHARE_AT_CLOSE),
            (None, false) => {
                let many = MANY_OPS.max(names / SHARE_OF_NAMES) + self.index.put_off.load(Ordering::Relaxed);
                uncovered >= many || self.is_index_bloated(names)
            }
        }
    }

    /// Whether the next open would replay so much that it is worth its time at once.
    fn is_index_overdue(&self) -> bool {
        self.tail.lock().usage.uncovered() >= 2 * MANY_OPS.max(self.slots.len() as u64 / SHARE_OF_NAMES)
    }

    /// Whether the index file is full of names that are gone.
    fn is_index_bloated(&self, names: u64) -> bool {
        self.index.bytes.load(Ordering::Relaxed) > MANY_BYTES.max(names * NAME_BYTES * SHARE_OF_NAMES)
    }

    /// Writes an index file if it is time to, and says what went wrong to whoever listens to events.
    pub fn refresh_index_if_due(&self, is_closing: bool) {
        // One at a time: two would remove each other's file. What another one is at needs no second; but a close waits for
        // it, for behind that the directory may be somebody else's.
        let writing = &self.index.writing;
        let alone = if is_closing { Some(writing.lock()) } else { writing.try_lock() };
        if alone.is_none() {
            return;
        }
        if self.options.read_only || !self.is_index_due(is_closing) {
            return;
        }
        let refreshed = self.refresh_index();
        let put_off = match &refreshed {
            Ok(()) => 0,
            Err(_) => self.tail.lock().usage.uncovered(),
        };
        self.index.put_off.store(put_off, Ordering::Relaxed);
        if let Err(error) = refreshed {
            events::unindexed(&self.dir, &error);
        }
    }

    fn refresh_index(&self) -> Result<()> {
        let cut = self.cut_for_index();
        if cut.bound.lsn == cut.block.index {
            return Ok(());
        }
        let storage = self.pool.storage();
        let (replay, segments) = self.replay_sealed(&cut)?;
        if replay.keyspaces.iter().any(|keyspace| self.was_told_elsewhere(keyspace, cut.bound.lsn)) {
            return Ok(());
        }
        let head = replay.head(self.store_id, cut.bound, &segments);
        let failed = |e: io::Error| Error::io(format!("writing {}", name::index(cut.bound.lsn)), e);
        let bytes = index_file::write(storage, head, &replay.slots).map_err(failed)?;
        self.index.written.fetch_add(bytes, Ordering::Relaxed);
        let named = self.pool.note_index(cut.bound.lsn);
        // After a failure either may be the one that is named: both stay.
        self.check_list();
        named.map_err(|e| Error::io("writing STORE", e))?;
        self.index.bytes.store(bytes, Ordering::Relaxed);
        self.tail.lock().usage.cover(SegmentId(cut.bound.segment));
        if cut.block.index > Lsn::ZERO {
            // Not named any more: what cannot be removed now goes at the next open.
            let _ = storage.remove(&name::index(cut.block.index));
        }
        Ok(())
    }

    /// Whether a restored keyspace was told a floor by an op that compaction has carried behind what is sealed: an index
    /// file would say that it needs one, and count as newer than that op.
    fn was_told_elsewhere(&self, replayed: &KeyspaceState, bound: Lsn) -> bool {
        let now = self.keyspace_by_id(replayed.id);
        replayed.needs_floor() && now.is_some_and(|now| !now.needs_floor() && now.floor_lsn() <= bound)
    }

    /// The log up to the last seal. What compaction retires later stays readable while this is held.
    fn cut_for_index(&self) -> Cut {
        // As for a checkpoint: nothing leaves the list between the look at it and the holding.
        let _retiring = self.pool.retiring.lock();
        // In this order: all that is sealed up to there is listed. No commit waits for the list, which is held
        // while a segment is made.
        let bound = self.committer.lock().before;
        let block = self.pool.block();
        let guard = crossbeam_epoch::pin();
        let sealed = |listed: &Listed| {
            let segment = self.segments.of(listed.segment, &guard)?;
            let is_sealed = !matches!(segment.body, Body::Image(_));
            is_sealed.then(|| (*listed, segment.clone()))
        };
        let held = block.segments.iter().filter_map(sealed).collect();
        Cut { bound, held, block }
    }

    /// The state that the sealed part of the log proves, and its segments, each with its life and its end.
    fn replay_sealed(&self, cut: &Cut) -> Result<(Replay, Vec<(u64, End)>)> {
        let background = self.options.background;
        let mut begun = Vec::with_capacity(cut.held.len());
        for (listed, segment) in &cut.held {
            begun.push((Begun::sealed(*listed, segment)?, segment));
        }
        // Others may have been sealed since.
        begun.retain(|(found, _)| found.header.before.lsn < cut.bound.lsn);
        begun.sort_by_key(|(found, _)| found.header.before.lsn);
        let known: Vec<Known> = begun.iter().map(|(found, _)| found.known()).collect();
        let before = IndexFile::open(self.pool.storage(), &cut.block)
            .and_then(|file| replay_on(file.ok()?, &cut.block, &known, background).ok());
        let mut replay = before.unwrap_or_else(|| Replay::new(&cut.block));
        let mut loaded = Vec::new();
        for (found, segment) in &begun {
            if found.header.before.lsn < replay.covers {
                replay.share((*segment).clone());
                continue;
            }
            let (end, table, counter) = table_of(found, &mut Vec::new())?;
            let segment = match &segment.body {
                Body::Map(_) => (*segment).clone(),
                _ => Arc::new(Segment { body: Body::Map(load(found, end.offset as usize)?), ..found.form() }),
            };
            loaded.push(Loaded { segment, table, end, counter: found.header.counter.max(counter) });
        }
        loaded.iter().try_for_each(|loaded| replay.keyspaces(loaded))?;
        replay.known.clone_from(&self.keyspaces.read());
        read_ahead(&loaded, replay.seed, background, |batch| {
            let segment = &loaded[batch.segment];
            if batch.begins {
                replay.begin(segment);
            }
            replay.batch(segment, batch).map(drop)
        })?;
        let ends = begun.iter().filter_map(|(found, _)| Some((found.listed.life, found.seal?.end)));
        Ok((replay, ends.collect()))
    }
}
