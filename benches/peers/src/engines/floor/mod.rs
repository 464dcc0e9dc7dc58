//! The floors of a durable put: a group commit of records into a file of zeros, with no store behind it. What
//! a fenced put cannot beat on this machine, whatever it does besides.
//!
//! `floor-committer`: one thread commits; who waits sleeps on a word per group, woken all at once.
//! `floor-gather`: the same, and before a write the committer waits up to 40 µs for as many writers as the last
//! group had: they were just woken, and come back.
//! `floor-leader`: whoever finds nobody committing commits all that is queued.
//! `floor-leader-direct`: the same with direct, synchronous writes, padded to pages.
//! `floor-pipe`: leaders with up to 4 direct writes under way; a group is answered when those before it are
//! durable too.

mod committer;
mod leader;
mod pipe;

pub use committer::{open_committer, open_gather};
pub use leader::{open_direct, open_leader};
pub use pipe::open_pipe;

use crate::store::Res;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writing starts over at the front when the file is full.
const LOG_BYTES: u64 = 128 << 20;
/// A record: 16-byte key, 100-byte value, token, and as much again as a log needs to check and order them.
const RECORD_BYTES: usize = 150;
const PAGE: usize = 4096;

/// A file whose blocks are written, not only reserved, and synced.
pub fn zeroed(path: &Path, bytes: u64, flags: i32) -> Res<File> {
    let mut file = File::create(path)?;
    let zeros = vec![0; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        let n = left.min(zeros.len() as u64);
        file.write_all(&zeros[..n as usize])?;
        left -= n;
    }
    file.sync_all()?;
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?)
}

/// Bytes that begin at a page, as direct writes want them.
pub struct Pages {
    bytes: Vec<u8>,
    from: usize,
}

impl Pages {
    pub fn new(bytes: usize) -> Self {
        let bytes = vec![0; bytes + PAGE];
        let from = bytes.as_ptr().align_offset(PAGE);
        Pages { bytes, from }
    }

    /// `content`, padded with zeros to whole pages.
    pub fn fill(&mut self, content: &[u8]) -> &[u8] {
        let padded = content.len().next_multiple_of(PAGE);
        let pages = &mut self.bytes[self.from..self.from + padded];
        pages[..content.len()].copy_from_slice(content);
        pages[content.len()..].fill(0);
        pages
    }
}

/// The file, written front to back, each write synced.
struct Log {
    file: File,
    at: u64,
    direct: Option<Pages>,
}

const DIRECT: i32 = libc::O_DIRECT | libc::O_DSYNC;
/// No group is longer.
const DIRECT_BYTES: usize = 1 << 20;

impl Log {
    fn open(dir: &Path, direct: bool) -> Res<Self> {
        let file = zeroed(&dir.join("log"), LOG_BYTES, if direct { DIRECT } else { 0 })?;
        Ok(Log { file, at: 0, direct: direct.then(|| Pages::new(DIRECT_BYTES)) })
    }

    /// Writes `records` and makes them durable.
    fn append(&mut self, records: &[u8]) {
        let bytes = self.direct.as_mut().map_or(records, |pages| pages.fill(records));
        if self.at + bytes.len() as u64 > LOG_BYTES {
            self.at = 0;
        }
        self.file.write_all_at(bytes, self.at).expect("the disk takes it");
        self.at += bytes.len() as u64;
        if self.direct.is_none() {
            self.file.sync_data().expect("the disk keeps it");
        }
    }
}

fn push_record(records: &mut Vec<u8>, key: &[u8], token: u64, value: &[u8]) {
    let end = records.len() + RECORD_BYTES;
    records.extend_from_slice(&(value.len() as u32).to_le_bytes());
    records.extend_from_slice(&(key.len() as u32).to_le_bytes());
    records.extend_from_slice(&token.to_le_bytes());
    records.extend_from_slice(key);
    records.extend_from_slice(value);
    if records.len() < end {
        records.resize(end, 0);
    }
}

const SLOTS: usize = 64;

/// Which groups are durable, and where to sleep until one is. Numbers wrap; no more than `SLOTS` are under way.
struct Groups {
    slots: [Slot; SLOTS],
}

struct Slot {
    /// The newest durable group of those that share the slot.
    done: AtomicU32,
    /// Changes whenever a sleeper ought to look again.
    word: AtomicU32,
}

impl Groups {
    fn new() -> Self {
        let slot = |at: usize| Slot {
            done: AtomicU32::new((at as u32).wrapping_sub(SLOTS as u32)),
            word: AtomicU32::new(0),
        };
        Groups { slots: std::array::from_fn(slot) }
    }

    fn slot(&self, group: u32) -> &Slot {
        &self.slots[group as usize % SLOTS]
    }

    /// To be read before the state that [`Groups::sleep`] is to be woken for.
    fn word(&self, group: u32) -> u32 {
        self.slot(group).word.load(Ordering::SeqCst)
    }

    fn is_done(&self, group: u32) -> bool {
        self.slot(group).done.load(Ordering::SeqCst).wrapping_sub(group) as i32 >= 0
    }

    /// Sleeps unless the word has changed.
    fn sleep(&self, group: u32, word: u32) {
        atomic_wait::wait(&self.slot(group).word, word);
    }

    fn wait(&self, group: u32) {
        loop {
            let word = self.word(group);
            if self.is_done(group) {
                return;
            }
            self.sleep(group, word);
        }
    }

    /// Wakes one of a group: it is to lead.
    fn nudge(&self, group: u32) {
        self.slot(group).word.fetch_add(1, Ordering::SeqCst);
        atomic_wait::wake_one(&self.slot(group).word);
    }

    fn finish(&self, group: u32) {
        self.slot(group).done.store(group, Ordering::SeqCst);
        self.slot(group).word.fetch_add(1, Ordering::SeqCst);
        atomic_wait::wake_all(&self.slot(group).word);
    }
}

/// What a floor cannot do.
macro_rules! no_store {
    () => {
        fn get(&self, _: &[u8], look: Look<'_>) -> Res<()> {
            look(None);
            Ok(())
        }

        fn scan(&self, _: &[u8]) -> Res<(usize, usize)> {
            Err("a floor has no store".into())
        }

        fn load(&self, _: &[Item]) -> Res<()> {
            Ok(())
        }
    };
}
use no_store;
