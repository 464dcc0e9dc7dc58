//! One keyspace in memory, what compaction is in the middle of, and how far the index file reaches.
//!
//! Promises that a floor only rises (F2). Read next: `engine.rs`, which holds them.

use crate::error::Error;
use crate::fence::{Floor, Rule};
use crate::format::header::Listed;
use crate::index::OrderedKeys;
use crate::log::segment::Segment;
use crate::options::KeyspaceOptions;
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering};
use crate::types::{Excerpt, KeyspaceId, Lsn, SegmentId, Token};

/// One keyspace in memory.
#[derive(Debug)]
pub(crate) struct KeyspaceState {
    pub id: KeyspaceId,
    pub name: String,
    pub options: KeyspaceOptions,
    /// Every key that is present at some lsn a reader may still ask for, and perhaps more.
    pub keys: OrderedKeys,
    raised: FloorCell,
    folded: FloorCell,
    highest: AtomicU64,
    needs_floor: AtomicBool,
    /// Some op stands in the index under the name of a fence. Set (Release) before the first one is, so
    /// whoever loads `false` (Acquire) need not look: a keyspace of external tokens may never have one.
    names_fences: AtomicBool,
    /// Some operation was numbered. Set under the tail lock before the first one is appended.
    numbers_operations: AtomicBool,
}

impl KeyspaceState {
    pub fn new(id: KeyspaceId, name: String, options: KeyspaceOptions, needs_floor: bool) -> Self {
        KeyspaceState {
            id,
            name,
            options,
            keys: OrderedKeys::default(),
            raised: FloorCell::default(),
            folded: FloorCell::default(),
            highest: AtomicU64::new(0),
            needs_floor: AtomicBool::new(needs_floor),
            names_fences: AtomicBool::new(false),
            numbers_operations: AtomicBool::new(false),
        }
    }

    /// The name, for messages.
    pub fn excerpt(&self) -> Excerpt {
        Excerpt::new(self.name.as_bytes())
    }

    /// The answer to a holder whose grant ran out.
    pub fn expired(&self, fence: &[u8], token: Token) -> Error {
        Error::Expired { keyspace: self.excerpt(), fence: Excerpt::new(fence), token }
    }

    /// The answer to one whose grant is not the live one.
    pub fn not_held(&self, fence: &[u8], token: Token) -> Error {
        Error::NotHeld { keyspace: self.excerpt(), fence: Excerpt::new(fence), token }
    }

    /// The fence of a key, by the scope.
    pub fn fence_of<'k>(&self, key: &'k [u8]) -> &'k [u8] {
        &key[..self.options.scope.fence_len(key)]
    }

    pub fn floor_appended(&self) -> Floor {
        let read = |cell: &FloorCell| cell.appended.load(Ordering::Acquire);
        Floor { raised: read(&self.raised), folded: read(&self.folded) }
    }

    /// The lsn that an answer rests on which shows the floor.
    pub fn floor_lsn(&self) -> Lsn {
        let read = |cell: &FloorCell| Lsn::new(cell.lsn.load(Ordering::Acquire));
        read(&self.raised).max(read(&self.folded))
    }

    /// The floors as appended, raised and folded, each with the lsn of the op that raised it there.
    pub fn floors(&self) -> [(u64, Lsn); 2] {
        [&self.raised, &self.folded]
            .map(|cell| (cell.appended.load(Ordering::Acquire), Lsn::new(cell.lsn.load(Ordering::Acquire))))
    }

    /// The highest token admitted.
    pub fn highest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// Whether this op, which raised the floor once, is what holds it up now.
    pub fn holds_floor(&self, floor: Floor, lsn: Lsn) -> bool {
        let cell = if floor.folded > 0 { &self.folded } else { &self.raised };
        cell.lsn.load(Ordering::Acquire) == lsn.get()
    }

    pub fn floor_durable(&self) -> Floor {
        let read = |cell: &FloorCell| cell.durable.load(Ordering::Acquire);
        Floor { raised: read(&self.raised), folded: read(&self.folded) }
    }

    /// Under the tail lock. Upholds F2: a floor only rises. Of two equal ones the newer counts: it may be
    /// the one that a restored keyspace needed.
    pub fn raise_floor(&self, floor: Floor, lsn: Lsn) {
        for (cell, token) in [(&self.raised, floor.raised), (&self.folded, floor.folded)] {
            let known = (cell.appended.load(Ordering::Acquire), cell.lsn.load(Ordering::Acquire));
            if token > 0 && (token, lsn.get()) > known {
                cell.appended.store(token, Ordering::Release);
                cell.lsn.store(lsn.get(), Ordering::Release);
            }
        }
    }

    /// After the sync that made it durable.
    pub fn publish_floor(&self, floor: Floor) {
        self.raised.durable.fetch_max(floor.raised, Ordering::AcqRel);
        self.folded.durable.fetch_max(floor.folded, Ordering::AcqRel);
    }

    pub fn admitted(&self, token: u64) {
        // Nearly always known: a look is cheaper than a locked change.
        if self.highest.load(Ordering::Relaxed) < token {
            self.highest.fetch_max(token, Ordering::Relaxed);
        }
    }

    pub fn rule(&self) -> Rule {
        Rule { tokens: self.options.tokens, jump_cap: self.options.jump_cap, highest: self.highest() }
    }

    /// An op is about to be found under the name of a fence.
    pub fn note_fence(&self) {
        if !self.names_fences.load(Ordering::Relaxed) {
            self.names_fences.store(true, Ordering::Release);
        }
    }

    pub fn names_fences(&self) -> bool {
        self.names_fences.load(Ordering::Acquire)
    }

    /// An operation is about to be numbered.
    pub fn note_numbered(&self) {
        self.numbers_operations.store(true, Ordering::Release);
    }

    pub fn numbers_operations(&self) -> bool {
        self.numbers_operations.load(Ordering::Acquire)
    }

    /// Restored, and not yet told the present value of its token source.
    pub fn needs_floor(&self) -> bool {
        self.needs_floor.load(Ordering::Acquire)
    }

    pub fn set_needs_floor(&self, needs_floor: bool) {
        self.needs_floor.store(needs_floor, Ordering::Release);
    }
}

/// One of the two ways in which a floor rises.
#[derive(Debug, Default)]
struct FloorCell {
    /// Changed under the tail lock.
    appended: AtomicU64,
    /// Of the op that raised it there.
    lsn: AtomicU64,
    /// Follows `appended` when that is on disk; never ahead of the disk.
    durable: AtomicU64,
}

/// A grant from before the open: its holder may still be at work until `until`.
#[derive(Debug)]
pub(crate) struct Afterlife {
    pub keyspace: KeyspaceId,
    pub fence: Box<[u8]>,
    pub token: Token,
    pub until: u64,
}

/// What compaction is in the middle of.
#[derive(Default)]
pub(crate) struct Compactor {
    /// Segments out of which everything was carried, and what was appended last then. There is no further round
    /// before these are gone.
    pub drained: Option<(Vec<SegmentId>, Lsn)>,
    /// Struck out of the list; somebody may still read them.
    pub retired: Vec<(Listed, Arc<Segment>)>,
    /// How much had been appended when carried deletes and marks were last looked at again.
    pub looked_at: u64,
}

/// The index file that there is.
#[derive(Debug, Default)]
pub(crate) struct Indexed {
    /// Held by whoever writes one.
    pub writing: Mutex<()>,
    /// How many ops were not covered when one could not be written: it is tried again when there are many more.
    pub put_off: AtomicU64,
    /// Its length, and the bytes of all that were written.
    pub bytes: AtomicU64,
    pub written: AtomicU64,
}
