//! One sub-table of the point index: 4096 slots of one word each.
//!
//! A word is tag | segment | offset; the word 0 is an empty slot. A hash owns two lines of eight
//! slots, its home and the twin, both named by low bits of the hash that the tag does not hold. An
//! entry lies in either of the two, or in the spill.
//!
//! **Why this survives a split.** The words do not hold the hash, so nobody can say any more which
//! hash an entry came from. It need not be known: which two lines a hash owns is the same in every
//! table, so a split copies each word to the same line and the same slot of the half that its tag bit
//! names, and whoever looks at the two lines still meets it. Walking on from a full line to the next
//! would not do: the half leaves gaps, and a walk ends at a gap.
//!
//! **Why most look-ups need one line.** An entry goes to its twin only when its home is full, so a home
//! that never was full answers alone, for hits and for misses. That it once was must not be forgotten:
//! a slot that a split or a removal vacates in a full line is marked [`VACATED`], not [`EMPTY`].
//!
//! The spill takes what neither line can, when a split would not help: many equal hashes, or a tag
//! with no bits left. It is a list of blocks of doubling size, searched in full: slow, and correct.
//!
//! Promises: readers need no lock; a word changes in one store. Never moves an entry within a table.
//!
//! Read next: `slots.rs`, which splits tables and retires them.

use crate::sync::{Arc, AtomicU64, AtomicUsize, Ordering};
use std::iter;
use std::sync::OnceLock;

/// Bits of a word that name the segment slot.
pub(crate) const SEGMENT_BITS: u32 = 18;
/// Bits of a word that name the byte in the segment.
const OFFSET_BITS: u32 = 26;
/// Bits of a word, and the top bits of the hash, that tell entries apart.
pub(crate) const TAG_BITS: u32 = 20;
const TAG_SHIFT: u32 = SEGMENT_BITS + OFFSET_BITS;
const _: () = assert!(TAG_SHIFT + TAG_BITS == 64);

const LINE_SLOTS: usize = 8;
const LINE_BITS: u32 = 9;
const LINES: usize = 1 << LINE_BITS;
/// In front of the entries of a saved table: which slots of each line hold one, and which lines were full.
const SAVED_HEAD_BYTES: usize = LINES + LINES / 8;
/// For each set of slots that hold an entry: which of the entries of the line a slot holds, or `NO_ENTRY`.
static ENTRY_OF_SLOT: [[u8; LINE_SLOTS]; 256] = entries_of_slots();
const NO_ENTRY: usize = LINE_SLOTS;
/// Below this many entries two full lines are a matter of equal hashes, not of load: spill.
const SPLIT_MIN: usize = LINES * LINE_SLOTS / 2;
/// Two tables with at most so many entries each become one: far from where it would split again.
const MERGE_MAX: usize = LINES * LINE_SLOTS / 16;

/// A slot that never held an entry since its line was made.
const EMPTY: u64 = 0;
/// A free slot of a line that was full once: entries of its hashes may lie in their twins. No entry looks
/// like it, for no op lies at offset 1.
const VACATED: u64 = 1;

/// Where an op lies, as the index remembers it.
///
/// The offset is never 0, since a segment starts with its header; so no entry looks like an empty slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Place {
    /// The slot of the segment in the list of segments, below 2^18.
    pub segment: u32,
    /// The byte in the segment, below 2^26.
    pub offset: u32,
}

impl Place {
    /// The low 44 bits of a word.
    #[inline]
    pub(crate) const fn pack(self) -> u64 {
        debug_assert!(self.segment < 1 << SEGMENT_BITS);
        debug_assert!(self.offset < 1 << OFFSET_BITS);
        debug_assert!(self.offset != 0);
        (self.segment as u64) << OFFSET_BITS | self.offset as u64
    }

    /// The place in a word, whatever its tag.
    #[inline]
    pub(crate) const fn unpack(word: u64) -> Self {
        Place {
            segment: (word >> OFFSET_BITS) as u32 & ((1 << SEGMENT_BITS) - 1),
            offset: word as u32 & ((1 << OFFSET_BITS) - 1),
        }
    }

    /// The word of this place under the tag of `hash`.
    #[inline]
    pub(super) const fn word(self, hash: u64) -> u64 {
        hash >> TAG_SHIFT << TAG_SHIFT | self.pack()
    }
}

/// Whether one place under either hash is one and the same word, so that a line in which both may lie does not tell them
/// apart.
#[inline]
pub(crate) fn share_a_tag(one: u64, other: u64) -> bool {
    one >> TAG_SHIFT == other >> TAG_SHIFT
}

/// One cache line of slots.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Line([AtomicU64; LINE_SLOTS]);

impl Line {
    /// One bit for each slot with this tag. Branch-free; a bit is a hint, to be read again.
    #[inline(always)]
    fn matches(&self, tag: u64) -> u32 {
        let mut bits = 0;
        for (n, slot) in self.0.iter().enumerate() {
            bits |= u32::from(slot.load(Ordering::Relaxed) >> TAG_SHIFT == tag) << n;
        }
        bits
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|slot| slot.load(Ordering::Relaxed))
    }

    /// Whether it has never been full: then no entry of its hashes lies elsewhere.
    #[inline(always)]
    fn is_open(&self) -> bool {
        self.words().any(|word| word == EMPTY)
    }

    /// Makes it a line that was full once.
    fn close(&self) {
        let empty = self.0.iter().filter(|slot| slot.load(Ordering::Relaxed) == EMPTY);
        empty.for_each(|slot| slot.store(VACATED, Ordering::Relaxed));
    }

    /// The first slot that holds `word`.
    fn slot(&self, word: u64) -> Option<&AtomicU64> {
        self.0.iter().find(|slot| slot.load(Ordering::Relaxed) == word)
    }

    fn try_put(&self, word: u64) -> bool {
        // Pairs with the Acquire in `find`: who sees the word sees the bytes it points to.
        let free = self.slot(EMPTY).or_else(|| self.slot(VACATED));
        free.map(|slot| slot.store(word, Ordering::Release)).is_some()
    }
}

/// A block of the spill; the next one is twice as large, so the list stays short.
pub(super) struct Spill {
    lines: Box<[Line]>,
    next: OnceLock<Box<Spill>>,
}

/// 4096 slots, and the spill for what two lines cannot hold.
pub(super) struct Table {
    pub(super) lines: [Line; LINES],
    /// How many top bits of the hash all entries share.
    pub(super) depth: u32,
    /// Entries in the lines, and in the spill; for the one writer.
    pub(super) used: AtomicUsize,
    pub(super) spilled: AtomicUsize,
    pub(super) spill: OnceLock<Box<Spill>>,
    /// The memory it lies in, if that is not its own.
    pub(super) slab: Option<Arc<memmap2::MmapMut>>,
}

impl Table {
    pub(super) fn new(depth: u32) -> Box<Self> {
        let lines = [const { Line([const { AtomicU64::new(EMPTY) }; LINE_SLOTS]) }; LINES];
        Box::new(Table {
            lines,
            depth,
            used: AtomicUsize::new(0),
            spilled: AtomicUsize::new(0),
            spill: OnceLock::new(),
            slab: None,
        })
    }

    /// The two lines that a hash owns, in every table: home and twin.
    #[inline(always)]
    fn pair(&self, hash: u64) -> [&Line; 2] {
        let home = hash as usize % LINES;
        // Odd, so that the twin is another line.
        let step = ((hash >> LINE_BITS) as usize % LINES) | 1;
        [&self.lines[home], &self.lines[home ^ step]]
    }

    fn in_spill(&self) -> impl Iterator<Item = &Line> {
        self.blocks().flat_map(|block| &block.lines)
    }

    fn blocks(&self) -> impl Iterator<Item = &Spill> {
        iter::successors(self.spill.get(), |block| block.next.get()).map(Box::as_ref)
    }

    /// Reads the line in which a look-up starts, for the sake of having read it.
    #[inline]
    pub(super) fn touch(&self, hash: u64) -> u64 {
        self.pair(hash)[0].0[0].load(Ordering::Relaxed)
    }

    /// Offers each place under the tag of `hash` to `probe` until it takes one.
    #[inline]
    pub(super) fn find<T, E>(
        &self,
        hash: u64,
        mut probe: impl FnMut(Place) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let tag = hash >> TAG_SHIFT;
        for line in self.pair(hash) {
            let mut bits = line.matches(tag);
            while bits != 0 {
                let n = bits.trailing_zeros() as usize;
                if let Some(found) = offer(&line.0[n % LINE_SLOTS], tag, &mut probe)? {
                    return Ok(Some(found));
                }
                bits &= bits - 1;
            }
            if line.is_open() {
                return Ok(None);
            }
        }
        if self.spill.get().is_some() { self.find_spilled(tag, probe) } else { Ok(None) }
    }

    #[cold]
    fn find_spilled<T, E>(
        &self,
        tag: u64,
        mut probe: impl FnMut(Place) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        for slot in self.in_spill().flat_map(|line| &line.0) {
            if let Some(found) = offer(slot, tag, &mut probe)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The slot that holds this place of this hash, for the one writer to change.
    pub(super) fn slot(&self, hash: u64, place: Place) -> Option<&AtomicU64> {
        let word = place.word(hash);
        self.pair(hash).into_iter().chain(self.in_spill()).find_map(|line| line.slot(word))
    }

    /// Frees the slot that holds this place of this hash, as if its line had been full: nobody looks whether
    /// it was. `false`: there is none.
    pub(super) fn vacate(&self, hash: u64, place: Place) -> bool {
        let word = place.word(hash);
        let in_lines = self.pair(hash).into_iter().find_map(|line| line.slot(word));
        let (slot, count) = match in_lines {
            Some(slot) => (Some(slot), &self.used),
            None => (self.in_spill().find_map(|line| line.slot(word)), &self.spilled),
        };
        let Some(slot) = slot else { return false };
        slot.store(VACATED, Ordering::Release);
        count.store(count.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        true
    }

    /// Adds the entry, or says that the table has to split first.
    pub(super) fn try_insert(&self, hash: u64, place: Place) -> bool {
        let word = place.word(hash);
        let [home, twin] = self.pair(hash);
        if home.try_put(word) || twin.try_put(word) {
            add_one(&self.used);
            return true;
        }
        let split_helps = self.depth < TAG_BITS && self.used.load(Ordering::Relaxed) >= SPLIT_MIN;
        if !split_helps {
            self.spill(word);
        }
        !split_helps
    }

    /// Whether so few entries are left that two such tables are one with room to grow.
    pub(super) fn is_sparse(&self) -> bool {
        self.len() <= MERGE_MAX
    }

    fn spill(&self, word: u64) {
        let mut link = &self.spill;
        let mut lines = 1;
        loop {
            let block = link.get_or_init(|| {
                let lines = iter::repeat_with(Line::default).take(lines).collect();
                Box::new(Spill { lines, next: OnceLock::new() })
            });
            if block.lines.iter().any(|line| line.try_put(word)) {
                add_one(&self.spilled);
                return;
            }
            link = &block.next;
            lines *= 2;
        }
    }

    /// Becomes one without entries, but stays where it is.
    pub(super) fn clear(&mut self, depth: u32) {
        self.lines.iter_mut().for_each(|line| *line = Line::default());
        self.depth = depth;
        self.used = AtomicUsize::new(0);
        self.spilled = AtomicUsize::new(0);
        self.spill = OnceLock::new();
    }

    /// Gives the entries of this table to two without any, told apart by the next bit of the tag.
    pub(super) fn split_into(&self, halves: [&mut Table; 2]) {
        let halves = halves.map(|half| {
            half.depth = self.depth + 1;
            &*half
        });
        let side = |word: u64| (word >> (63 - self.depth)) as usize & 1;
        for (n, line) in self.lines.iter().enumerate() {
            let rest = if line.is_open() { EMPTY } else { VACATED };
            for (slot, word) in line.words().enumerate() {
                for (half, table) in halves.iter().enumerate() {
                    let stays = is_entry(word) && side(word) == half;
                    // Relaxed, as nobody sees the half until the directory points to it.
                    table.lines[n].0[slot].store(if stays { word } else { rest }, Ordering::Relaxed);
                    if stays {
                        add_one(&table.used);
                    }
                }
            }
        }
        for word in self.in_spill().flat_map(Line::words).filter(|&word| is_entry(word)) {
            halves[side(word)].spill(word);
        }
    }

    /// Becomes the table of which these two are the halves; it is without entries. An entry keeps its line, as in a split; which of the two
    /// lines of its hash that is nobody knows, so one that finds no slot there is spilled, and then no line of
    /// the table is open: a search that ended at the other line would not meet it.
    pub(super) fn merge(&mut self, halves: [&Table; 2]) {
        self.depth = halves[0].depth - 1;
        let table = &*self;
        let mut overflows = false;
        for (n, line) in table.lines.iter().enumerate() {
            for word in halves.iter().flat_map(|half| half.lines[n].words()).filter(|&word| is_entry(word)) {
                if line.try_put(word) {
                    add_one(&table.used);
                } else {
                    table.spill(word);
                    overflows = true;
                }
            }
        }
        for (n, line) in table.lines.iter().enumerate() {
            if overflows || halves.iter().any(|half| !half.lines[n].is_open()) {
                line.close();
            }
        }
        for half in halves {
            for word in half.in_spill().flat_map(Line::words).filter(|&word| is_entry(word)) {
                table.spill(word);
            }
        }
    }

    /// Appends what a saved table is: see `docs/format.md`, "Index file".
    pub(super) fn save(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + SAVED_HEAD_BYTES, 0);
        for (n, line) in self.lines.iter().enumerate() {
            for (slot, word) in line.words().enumerate().filter(|&(_, word)| is_entry(word)) {
                out[start + n] |= 1 << slot;
                out.extend_from_slice(&word.to_le_bytes());
            }
            out[start + LINES + n / 8] |= u8::from(!line.is_open()) << (n % 8);
        }
        let spilled = self.in_spill().flat_map(Line::words).filter(|&word| is_entry(word));
        spilled.for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    }

    /// Becomes the table that was saved. Nothing was entered before. `None`: the bytes are no table.
    pub(super) fn load(&mut self, depth: u32, bytes: &[u8]) -> Option<()> {
        let (head, words) = bytes.split_at_checked(SAVED_HEAD_BYTES)?;
        let (occupied, full) = head.split_at(LINES);
        let (mut words, &[]) = words.as_chunks::<8>() else { return None };
        if words.iter().any(|word| !is_entry(u64::from_le_bytes(*word))) {
            return None;
        }
        let all = words.len();
        // The entries of one line, whatever follows them, and at `NO_ENTRY` what stands in a slot without one. Without
        // a branch, for which slots hold an entry cannot be foreseen.
        let mut entries = [0; 2 * LINE_SLOTS];
        for (n, line) in self.lines.iter_mut().enumerate() {
            let (here, behind) = words.split_at_checked(occupied[n].count_ones() as usize)?;
            match words.first_chunk::<LINE_SLOTS>() {
                Some(eight) => (0..LINE_SLOTS).for_each(|at| entries[at] = u64::from_le_bytes(eight[at])),
                None => (0..here.len()).for_each(|at| entries[at] = u64::from_le_bytes(here[at])),
            }
            entries[NO_ENTRY] = if full[n / 8] >> (n % 8) & 1 == 1 { VACATED } else { EMPTY };
            for (slot, &at) in line.0.iter_mut().zip(&ENTRY_OF_SLOT[occupied[n] as usize]) {
                *slot = AtomicU64::new(entries[at as usize % (2 * LINE_SLOTS)]);
            }
            words = behind;
        }
        self.depth = depth;
        self.used = AtomicUsize::new(all - words.len());
        words.iter().for_each(|word| self.spill(u64::from_le_bytes(*word)));
        Some(())
    }

    /// Leaves out the entries in segments that `keeps` does not know. Nobody else has seen the table yet.
    pub(super) fn keep(&mut self, keeps: impl Fn(u32) -> bool) {
        let goes = |word: u64| is_entry(word) && !keeps(Place::unpack(word).segment);
        let leave = |line: &Line, rest: u64| {
            let slots = line.0.iter().filter(|slot| goes(slot.load(Ordering::Relaxed)));
            slots.map(|slot| slot.store(rest, Ordering::Relaxed)).count()
        };
        let in_lines = |line: &Line| leave(line, if line.is_open() { EMPTY } else { VACATED });
        let left: usize = self.lines.iter().map(in_lines).sum();
        let spilled: usize = self.in_spill().map(|line| leave(line, VACATED)).sum();
        *self.used.get_mut() -= left;
        *self.spilled.get_mut() -= spilled;
    }

    /// How many entries there are.
    pub(super) fn len(&self) -> usize {
        self.used.load(Ordering::Relaxed) + self.spilled.load(Ordering::Relaxed)
    }

    /// The place of every entry.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        let all = self.lines.iter().chain(self.in_spill()).flat_map(Line::words);
        all.filter(|&word| is_entry(word)).map(Place::unpack)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let spill = |block: &Spill| size_of::<Spill>() + size_of_val(&*block.lines);
        size_of::<Table>() + self.blocks().map(spill).sum::<usize>()
    }
}

const fn entries_of_slots() -> [[u8; LINE_SLOTS]; 256] {
    let mut all = [[NO_ENTRY as u8; LINE_SLOTS]; 256];
    let mut occupied = 0;
    while occupied < all.len() {
        let (mut slot, mut entry) = (0, 0);
        while slot < LINE_SLOTS {
            if occupied >> slot & 1 == 1 {
                all[occupied][slot] = entry;
                entry += 1;
            }
            slot += 1;
        }
        occupied += 1;
    }
    all
}

/// A load and a store instead of an addition: there is one writer.
fn add_one(count: &AtomicUsize) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

#[inline(always)]
const fn is_entry(word: u64) -> bool {
    word > VACATED
}

/// Reads the slot again, for good: a hint may have been overtaken, and tag 0 also matches empty slots.
#[inline(always)]
fn offer<T, E>(
    slot: &AtomicU64,
    tag: u64,
    probe: &mut impl FnMut(Place) -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    // Pairs with the Release of whoever stored the word.
    let word = slot.load(Ordering::Acquire);
    if word >> TAG_SHIFT == tag && is_entry(word) { probe(Place::unpack(word)) } else { Ok(None) }
}
