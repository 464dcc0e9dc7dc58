//! One keyspace in memory: its options, its keys in order, its floors.
//!
//! One job: hold what all fences of a keyspace share. Promises that a floor only rises (F2), and that what
//! is shown of it is on the disk.
//!
//! Read next: `engine.rs`.

use crate::fence::{Floor, Rule};
use crate::index::OrderedKeys;
use crate::options::KeyspaceOptions;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::types::{KeyspaceId, Lsn};

/// One keyspace in memory.
#[derive(Debug)]
pub(crate) struct KeyspaceState {
    pub id: KeyspaceId,
    pub name: String,
    pub options: KeyspaceOptions,
    /// Every key that is present at some lsn a reader may still ask for, and perhaps more.
    pub keys: OrderedKeys,
    /// Changed under the tail lock.
    floor_appended: AtomicU64,
    floor_lsn: AtomicU64,
    /// Follows `floor_appended` when that is on disk; never ahead of the disk.
    floor_durable: AtomicU64,
    /// The highest exclusive floor that is on disk: of fences whose own mark is not above it nobody knows
    /// more than that, for compaction may have dropped the newest of what was known.
    folded: AtomicU64,
    folded_lsn: AtomicU64,
    highest: AtomicU64,
    closed: AtomicBool,
    /// Some op stands in the index under the name of a fence. Set (Release) before the first one is, so
    /// whoever loads `false` (Acquire) need not look: a keyspace of external tokens may never have one.
    names_fences: AtomicBool,
}

impl KeyspaceState {
    pub fn new(id: KeyspaceId, name: String, options: KeyspaceOptions, closed: bool) -> Self {
        KeyspaceState {
            id,
            name,
            options,
            keys: OrderedKeys::default(),
            floor_appended: AtomicU64::new(0),
            floor_lsn: AtomicU64::new(0),
            floor_durable: AtomicU64::new(0),
            folded: AtomicU64::new(0),
            folded_lsn: AtomicU64::new(0),
            highest: AtomicU64::new(0),
            closed: AtomicBool::new(closed),
            names_fences: AtomicBool::new(false),
        }
    }

    /// The fence of a key, by the scope.
    pub fn fence_of<'k>(&self, key: &'k [u8]) -> &'k [u8] {
        &key[..self.options.scope.fence_len(key)]
    }

    pub fn floor_appended(&self) -> Floor {
        Floor::unpack(self.floor_appended.load(Ordering::Acquire))
    }

    pub fn floor_lsn(&self) -> Lsn {
        Lsn::new(self.floor_lsn.load(Ordering::Acquire))
    }

    pub fn floor_durable(&self) -> Floor {
        Floor::unpack(self.floor_durable.load(Ordering::Acquire))
    }

    /// Under the tail lock. Upholds F2: a floor only rises. Of two ops that raise it to the same the newer one
    /// is kept by compaction, for it may have opened the keyspace as well.
    pub fn raise_floor(&self, floor: Floor, lsn: Lsn) {
        if floor.exclusive {
            self.folded_lsn.fetch_max(lsn.get(), Ordering::AcqRel);
        }
        let old = self.floor_appended();
        if (floor.token, floor.exclusive) > (old.token, old.exclusive) {
            self.floor_appended.store(floor.pack(), Ordering::Release);
            self.floor_lsn.store(lsn.get(), Ordering::Release);
        } else if floor == old {
            self.floor_lsn.fetch_max(lsn.get(), Ordering::AcqRel);
        }
    }

    /// After the sync that made it durable.
    pub fn publish_floor(&self, floor: Floor) {
        if floor.exclusive {
            self.folded.fetch_max(floor.token, Ordering::AcqRel);
        }
        let old = self.floor_durable();
        if (floor.token, floor.exclusive) > (old.token, old.exclusive) {
            self.floor_durable.store(floor.pack(), Ordering::Release);
        }
    }

    /// Whether compaction may drop, or has dropped, a mark. Upholds C4.
    pub fn is_folded(&self, mark: u64) -> bool {
        mark <= self.folded.load(Ordering::Acquire)
    }

    /// The floor ops that count, by their lsns.
    pub fn is_needed_floor(&self, lsn: Lsn) -> bool {
        lsn == self.floor_lsn() || lsn.get() == self.folded_lsn.load(Ordering::Acquire)
    }

    pub fn admitted(&self, token: u64) {
        self.highest.fetch_max(token, Ordering::Relaxed);
    }

    pub fn rule(&self) -> Rule {
        Rule {
            tokens: self.options.tokens,
            jump_cap: self.options.jump_cap,
            highest: self.highest.load(Ordering::Relaxed),
        }
    }

    /// Whether some op may stand in the index under the name of a fence.
    pub fn may_name_fences(&self) -> bool {
        self.names_fences.load(Ordering::Acquire)
    }

    /// An op is about to be found under the name of a fence.
    pub fn note_fence(&self) {
        if !self.names_fences.load(Ordering::Relaxed) {
            self.names_fences.store(true, Ordering::Release);
        }
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub fn set_closed(&self, closed: bool) {
        self.closed.store(closed, Ordering::Release);
    }
}
