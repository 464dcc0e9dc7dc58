//! The point index: which places may hold the bytes of a hash.
//!
//! Extendible hashing: the top bits of the hash pick a table from the directory, and a table that has
//! become too full is split in two by the next bit. So the index grows by one small table at a time,
//! and only the directory (a pointer for each) is ever copied.
//!
//! Promises, to a reader that holds an epoch guard: an entry inserted before the search began, and
//! neither replaced nor removed, is found; in the middle of a `replace` the old or the new place is
//! found; what the writer wrote before it inserted a place is visible to who finds the place. Never
//! blocks a reader, never looks at a key (the caller's `probe` does). Shrinks by merging what splits made.
//!
//! Read next: `table.rs`.
#![allow(unsafe_code)]

use super::slab::{OwnedTable, Stock};
use super::table::{Place, TAG_BITS, Table};
use crate::sync::{Arc, AtomicUsize, Ordering};
use crossbeam_epoch::{self as epoch, Atomic, Guard, Owned, Shared};
use std::fmt;
use std::hint::black_box;
use std::io;

/// The tables by the top `depth` bits of the hash. A table less deep than this stands here repeatedly.
struct Directory {
    depth: u32,
    tables: Box<[Atomic<Table>]>,
}

impl Directory {
    #[inline(always)]
    fn index(&self, hash: u64) -> usize {
        // In two steps, since a shift by 64 (depth 0) is not defined.
        (hash >> 1 >> (63 - self.depth)) as usize
    }

    #[inline(always)]
    fn table<'g>(&self, hash: u64, guard: &'g Guard) -> Shared<'g, Table> {
        // Pairs with the Release in `point`.
        self.tables[self.index(hash)].load(Ordering::Acquire, guard)
    }

    /// The same tables under one more bit.
    fn doubled(&self, guard: &Guard) -> Self {
        let twice = |table: &Atomic<Table>| {
            let table = table.load(Ordering::Relaxed, guard);
            [Atomic::from(table), Atomic::from(table)]
        };
        Directory { depth: self.depth + 1, tables: self.tables.iter().flat_map(twice).collect() }
    }

    /// Lets every entry of the table of `hash`, which was `depth` deep, name one of its halves.
    fn point(&self, hash: u64, depth: u32, halves: [Shared<'_, Table>; 2]) {
        let half = 1 << (self.depth - depth - 1);
        let first = self.index(hash) & !(2 * half - 1);
        for (n, entry) in self.tables[first..first + 2 * half].iter().enumerate() {
            entry.store(halves[n / half], Ordering::Release);
        }
    }
}

/// Hands a table over to a directory, until [`retire`] or the drop of the index.
fn give<'g>(table: OwnedTable) -> Shared<'g, Table> {
    Shared::from(table.into_raw())
}

/// Puts a table into the stock, or drops it, when its last reader is gone.
// SAFETY: asks that no entry of the newest directory names it, and that it is retired once.
unsafe fn retire(table: Shared<'_, Table>, stock: Option<&Arc<Stock>>, guard: &Guard) {
    let stock = stock.map(Arc::clone);
    // SAFETY: tables come from `give`; whoever could still reach this one was pinned before now.
    unsafe {
        let table = OwnedTable::from_raw(table.as_raw());
        guard.defer_unchecked(move || match stock {
            Some(stock) => stock.put(table),
            None => drop(table),
        });
    }
}

/// The index as readers see it.
pub(crate) struct Slots {
    directory: Atomic<Directory>,
    len: AtomicUsize,
    stock: Arc<Stock>,
}

impl Slots {
    fn new() -> Self {
        let stock = Arc::new(Stock::default());
        let first = Directory { depth: 0, tables: Box::new([Atomic::from(give(stock.take()))]) };
        Slots { directory: Atomic::new(first), len: AtomicUsize::new(0), stock }
    }

    #[inline(always)]
    fn directory<'g>(&self, guard: &'g Guard) -> &'g Directory {
        // SAFETY: never null. The writer retires a directory only after it has stored the next one,
        // through the default collector, so what a guard of that collector can load outlives the guard.
        unsafe { self.directory.load(Ordering::Acquire, guard).deref() }
    }

    #[inline(always)]
    fn table<'g>(&self, hash: u64, guard: &'g Guard) -> &'g Table {
        debug_assert!(guard.collector() == Some(epoch::default_collector()));
        // SAFETY: never null. A table is retired once no entry of the newest directory names it, and
        // whoever still holds an older directory was pinned before that: it outlives the guard.
        unsafe { self.directory(guard).table(hash, guard).deref() }
    }

    /// Brings near what [`Slots::find`] will read for these: the memory fetches their lines side by side.
    #[inline]
    pub fn touch(&self, hashes: impl Iterator<Item = u64>, guard: &Guard) {
        black_box(hashes.fold(0, |all, hash| all ^ self.table(hash, guard).touch(hash)));
    }

    /// Calls `probe` with each place whose tag matches `hash`, until it returns `Some` or an error.
    ///
    /// The guard must come from [`crossbeam_epoch::pin`]. A match is a hint: `probe` compares the key.
    #[inline]
    pub fn find<T, E>(
        &self,
        hash: u64,
        guard: &Guard,
        probe: impl FnMut(Place) -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        self.table(hash, guard).find(hash, probe)
    }

    /// Whether this very entry is there.
    pub fn holds(&self, hash: u64, place: Place, guard: &Guard) -> bool {
        self.table(hash, guard).slot(hash, place).is_some()
    }

    /// Entries in the index.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Bytes of memory, without what waits for the last reader to leave, and without the gaps that an index which has
    /// shrunk leaves in its slabs. Looks at every table.
    pub fn heap_bytes(&self) -> usize {
        let guard = &epoch::pin();
        let directory = self.directory(guard);
        let mut bytes = size_of::<Directory>() + size_of_val(&*directory.tables) + self.stock.heap_bytes();
        self.each_table(guard, |table| bytes += table.heap_bytes());
        bytes
    }

    /// Shows the place of every entry that is there before the call and stays; of one that is repointed
    /// meanwhile, the old or the new place.
    pub fn each_place(&self, guard: &Guard, mut each: impl FnMut(Place)) {
        self.each_table(guard, |table| table.places().for_each(&mut each));
    }

    /// Shows each table as bytes, in the order of the hash, with its depth. Nobody writes meanwhile.
    pub fn save(&self, mut each: impl FnMut(u32, &[u8])) {
        let mut bytes = Vec::new();
        self.each_table(&epoch::pin(), |table| {
            bytes.clear();
            table.save(&mut bytes);
            each(table.depth, &bytes);
        });
    }

    fn each_table<'g>(&self, guard: &'g Guard, mut each: impl FnMut(&'g Table)) {
        let directory = self.directory(guard);
        let mut n = 0;
        while n < directory.tables.len() {
            // SAFETY: as in `table`.
            let table = unsafe { directory.tables[n].load(Ordering::Acquire, guard).deref() };
            each(table);
            // To where it ends: two tables that were merged meanwhile may be met in their middle.
            let entries = 1 << directory.depth.saturating_sub(table.depth);
            n = (n & !(entries - 1)) + entries;
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: `&mut self` says that no reader and no writer is left, so nothing needs a guard.
        let guard = unsafe { epoch::unprotected() };
        // SAFETY: as above; the directory is owned by this value alone.
        let directory = unsafe { std::mem::take(&mut self.directory).into_owned() };
        let mut last = Shared::null();
        for entry in &directory.tables {
            let table = entry.load(Ordering::Relaxed, guard);
            if table != last {
                // SAFETY: the entries that name one table are neighbours, so it is dropped once.
                drop(unsafe { OwnedTable::from_raw(table.as_raw()) });
                last = table;
            }
        }
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// The right to change the index. There is one, and its methods take `&mut self`: one writer.
#[derive(Debug)]
pub(crate) struct SlotsWriter(Arc<Slots>);

/// An empty index: what readers share, and what the one writer holds.
pub(crate) fn slots() -> (Arc<Slots>, SlotsWriter) {
    let slots = Arc::new(Slots::new());
    (Arc::clone(&slots), SlotsWriter(slots))
}

/// A table that was saved.
pub(crate) struct SavedTable(OwnedTable);

impl SavedTable {
    /// So many that are about to be loaded, in memory that they share.
    pub fn many(count: usize) -> io::Result<Vec<Self>> {
        Ok(OwnedTable::slab(count)?.into_iter().map(SavedTable).collect())
    }

    /// Becomes the table in `bytes`; `None`: they are none.
    pub fn load(&mut self, depth: u32, bytes: &[u8]) -> Option<()> {
        self.0.load(depth, bytes)
    }

    /// Leaves out the entries in segments that `keeps` does not know.
    pub fn keep(&mut self, keeps: impl Fn(u32) -> bool) {
        self.0.keep(keeps);
    }
}

/// The index that was saved as these tables; `None` if they are not one index.
pub(crate) fn saved_slots(tables: Vec<SavedTable>) -> Option<(Arc<Slots>, SlotsWriter)> {
    let depth = tables.iter().map(|table| table.0.depth).max().filter(|&depth| depth <= TAG_BITS)?;
    let len = tables.iter().map(|table| table.0.len()).sum();
    // Each table stands at a multiple of its share, and all together fill the directory.
    let mut end = 0;
    for SavedTable(table) in &tables {
        let share = 1 << (depth - table.depth);
        if end % share != 0 {
            return None;
        }
        end += share;
    }
    if end != 1 << depth {
        return None;
    }
    let mut directory: Vec<Atomic<Table>> = Vec::with_capacity(end);
    for SavedTable(table) in tables {
        let share = 1 << (depth - table.depth);
        let table = give(table);
        directory.extend(std::iter::repeat_with(|| Atomic::from(table)).take(share));
    }
    let directory = Atomic::new(Directory { depth, tables: directory.into() });
    let slots = Arc::new(Slots { directory, len: AtomicUsize::new(len), stock: Arc::default() });
    Some((Arc::clone(&slots), SlotsWriter(slots)))
}

impl SlotsWriter {
    /// Adds an entry. One that is there already is there twice: each op has a place of its own.
    pub fn insert(&mut self, hash: u64, place: Place) {
        let guard = &epoch::pin();
        // Ends: each round makes the table of `hash` deeper, and the deepest takes everything.
        while !self.0.table(hash, guard).try_insert(hash, place) {
            self.split(hash, guard);
        }
        self.count(usize::wrapping_add);
    }

    /// Repoints an entry in one store; false if it is not there.
    pub fn replace(&mut self, hash: u64, old: Place, new: Place) -> bool {
        let guard = &epoch::pin();
        let Some(slot) = self.0.table(hash, guard).slot(hash, old) else { return false };
        // Pairs with the Acquire in `find`.
        slot.store(new.word(hash), Ordering::Release);
        true
    }

    /// Removes an entry; false if it is not there.
    pub fn remove(&mut self, hash: u64, place: Place) -> bool {
        let guard = &epoch::pin();
        if !self.0.table(hash, guard).vacate(hash, place) {
            return false;
        }
        self.count(usize::wrapping_sub);
        while self.merge(hash, guard) {}
        true
    }

    /// Makes one table of that of `hash` and its other half, where both are nearly empty.
    fn merge(&mut self, hash: u64, guard: &Guard) -> bool {
        let directory = self.0.directory(guard);
        let table = self.0.table(hash, guard);
        if table.depth == 0 || !table.is_sparse() {
            return false;
        }
        let other_hash = hash ^ 1 << (64 - table.depth);
        let other = self.0.table(other_hash, guard);
        if other.depth != table.depth || !other.is_sparse() {
            return false;
        }
        let retired = [directory.table(hash, guard), directory.table(other_hash, guard)];
        let halves = if hash < other_hash { [table, other] } else { [other, table] };
        let mut merged = self.0.stock.give_back();
        merged.merge(halves);
        let merged = give(merged);
        // Where the two stood, one by the other, as if it were about to be split into itself.
        directory.point(hash, table.depth - 1, [merged, merged]);
        for table in retired {
            // SAFETY: no entry of the newest directory names it, and this is the one writer: retired once.
            unsafe { retire(table, None, guard) };
        }
        guard.flush();
        true
    }

    fn count(&mut self, step: fn(usize, usize) -> usize) {
        // A load and a store instead of an addition: there is one writer.
        self.0.len.store(step(self.0.len(), 1), Ordering::Relaxed);
    }

    #[cold]
    fn split(&mut self, hash: u64, guard: &Guard) {
        let directory = self.0.directory(guard);
        let table = self.0.table(hash, guard);
        let [mut low, mut high] = [self.0.stock.take(), self.0.stock.take()];
        table.split_into([&mut low, &mut high]);
        let halves = [low, high].map(give);
        let retired = directory.table(hash, guard);
        if table.depth < directory.depth {
            directory.point(hash, table.depth, halves);
        } else {
            let next = directory.doubled(guard);
            next.point(hash, table.depth, halves);
            let last = self.0.directory.swap(Owned::new(next), Ordering::AcqRel, guard);
            // SAFETY: no longer reachable, and this is the one writer: retired once.
            unsafe { guard.defer_destroy(last) };
        }
        // SAFETY: as above; every entry of the newest directory that named the table names a half.
        unsafe { retire(retired, Some(&self.0.stock), guard) };
        // Tables are large: hand them over now instead of when 64 of them wait in this thread.
        guard.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    fn place(n: u32) -> Place {
        Place { segment: n >> 20, offset: 4096 + (n & 0xF_FFFF) }
    }

    /// A well-mixed hash of a small number.
    fn mix(n: u64) -> u64 {
        let n = (n ^ n >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let n = (n ^ n >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        n ^ n >> 31
    }

    fn places(slots: &Slots, hash: u64) -> HashSet<Place> {
        let mut places = HashSet::new();
        let none = slots.find(hash, &epoch::pin(), |place| {
            assert!(places.insert(place), "{place:?} was offered twice");
            Ok::<_, Infallible>(None::<()>)
        });
        assert_eq!(none, Ok(None));
        places
    }

    fn holds(slots: &Slots, hash: u64, place: Place) -> bool {
        let probe = |at| Ok::<_, Infallible>((at == place).then_some(()));
        slots.find(hash, &epoch::pin(), probe) == Ok(Some(()))
    }

    /// The kinds of hashes: well mixed, and the ones an attacker would choose.
    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Mixed,
        Equal,
        SameTag,
        SameLine,
        TagZero,
    }

    impl Kind {
        fn hash(self, n: u64) -> u64 {
            match self {
                Kind::Mixed => mix(n),
                Kind::Equal => mix(7),
                Kind::SameTag => 0xABCDE << 44 | mix(n) >> 20,
                Kind::SameLine => mix(n) << 9 | 5,
                Kind::TagZero => mix(n) >> 20,
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(Kind, u64, u64),
        Replace(usize, usize),
        Remove(usize, usize),
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![
            4 => Just(Kind::Mixed),
            1 => Just(Kind::Equal),
            1 => Just(Kind::SameTag),
            1 => Just(Kind::SameLine),
            1 => Just(Kind::TagZero),
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        let run = prop_oneof![Just(1u64), 1..40u64, 1000..4000u64];
        prop_oneof![
            (kind(), any::<u32>(), run).prop_map(|(kind, from, n)| {
                let most = if matches!(kind, Kind::Mixed) { n } else { n.min(300) };
                Step::Insert(kind, from.into(), most)
            }),
            (any::<usize>(), 1..200usize).prop_map(|(at, n)| Step::Replace(at, n)),
            (any::<usize>(), 1..2000usize).prop_map(|(at, n)| Step::Remove(at, n)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn slots_hold_what_a_map_of_hash_and_place_holds(steps in prop::collection::vec(step(), 1..24)) {
            let (slots, mut writer) = slots();
            let mut model: Vec<(u64, Place)> = Vec::new();
            let mut fresh = 0;
            for step in steps {
                match step {
                    Step::Insert(kind, from, n) => for n in from..from + n {
                        fresh += 1;
                        model.push((kind.hash(n), place(fresh)));
                        writer.insert(kind.hash(n), place(fresh));
                    },
                    Step::Replace(at, n) => for n in at..at.saturating_add(n.min(model.len())) {
                        fresh += 1;
                        let len = model.len();
                        let (hash, old) = &mut model[n % len];
                        prop_assert!(writer.replace(*hash, *old, place(fresh)));
                        prop_assert!(!writer.replace(*hash, *old, place(fresh)));
                        *old = place(fresh);
                    },
                    Step::Remove(at, n) => for _ in 0..n.min(model.len()) {
                        let (hash, old) = model.swap_remove(at % model.len());
                        prop_assert!(writer.remove(hash, old));
                        prop_assert!(!writer.remove(hash, old));
                    },
                }
            }
            prop_assert_eq!(slots.len(), model.len());
            let mut by_tag: HashMap<u64, HashSet<Place>> = HashMap::new();
            for &(hash, place) in &model {
                by_tag.entry(hash >> 44).or_default().insert(place);
            }
            check_saved(&slots, &model)?;
            for &(hash, place) in &model {
                let found = places(&slots, hash);
                prop_assert!(found.contains(&place), "{:x} {:?} is lost", hash, place);
                prop_assert!(found.is_subset(&by_tag[&(hash >> 44)]), "a removed place is offered");
            }
        }
    }

    fn load_one(depth: u32, bytes: &[u8], keeps: impl Fn(u32) -> bool) -> Option<SavedTable> {
        let mut table = SavedTable::many(1).unwrap().remove(0);
        table.load(depth, bytes)?;
        table.keep(keeps);
        Some(table)
    }

    /// What is saved and read again is the same index, or the same without the segments that are gone; and both
    /// can be written on.
    fn check_saved(slots: &Slots, model: &[(u64, Place)]) -> Result<(), TestCaseError> {
        let is_even = |segment: u32| segment.is_multiple_of(2);
        for keeps in [|_| true, is_even] {
            let mut tables = Vec::new();
            slots.save(|depth, bytes| tables.push(load_one(depth, bytes, keeps).unwrap()));
            let (saved, mut writer) = saved_slots(tables).unwrap();
            let left: Vec<_> = model.iter().filter(|(_, place)| keeps(place.segment)).collect();
            prop_assert_eq!(saved.len(), left.len());
            for &(hash, place) in model {
                prop_assert_eq!(holds(&saved, hash, place), keeps(place.segment), "{:x} {:?}", hash, place);
            }
            let mut shown: Vec<_> = Vec::new();
            saved.each_place(&epoch::pin(), |place| shown.push(place.pack()));
            let mut want: Vec<_> = left.iter().map(|(_, place)| place.pack()).collect();
            shown.sort_unstable();
            want.sort_unstable();
            prop_assert_eq!(shown, want);
            (0..300).for_each(|n| writer.insert(mix(n), Place { segment: 77_777, offset: 5000 + n as u32 }));
            left.iter().for_each(|&&(hash, place)| assert!(writer.remove(hash, place)));
            prop_assert_eq!(saved.len(), 300);
        }
        Ok(())
    }

    #[test]
    fn tables_that_are_not_one_index_are_refused() {
        let (slots, mut writer) = slots();
        (0..10_000).for_each(|n| writer.insert(mix(n.into()), place(n)));
        let mut all = Vec::new();
        slots.save(|depth, bytes| all.push((depth, bytes.to_vec())));
        assert!(all.len() > 2);
        let load = |tables: &[(u32, Vec<u8>)]| {
            let loaded = tables.iter().map(|(depth, bytes)| load_one(*depth, bytes, |_| true).unwrap());
            saved_slots(loaded.collect()).is_some()
        };
        assert!(load(&all) && !load(&all[1..]) && !load(&all[..1]) && !load(&[]));
        all[0].0 = 40;
        assert!(!load(&all));
        assert!(load_one(0, &all[1].1[1..], |_| true).is_none(), "a byte is missing");
        assert!(load_one(0, &all[1].1[..600], |_| true).is_none(), "entries are missing");
        let last = all[1].1.len() - 8;
        all[1].1[last..].copy_from_slice(&1u64.to_le_bytes());
        assert!(load_one(0, &all[1].1, |_| true).is_none(), "no entry looks like this");
    }

    #[test]
    fn a_place_survives_packing_under_any_tag() {
        let limits = [(0, 1), (0, (1 << 26) - 1), ((1 << 18) - 1, 1), ((1 << 18) - 1, (1 << 26) - 1)];
        for (segment, offset) in limits {
            let place = Place { segment, offset };
            for hash in [0, u64::MAX, mix(1)] {
                assert_eq!(Place::unpack(place.word(hash)), place);
                assert_ne!(place.word(hash), 0);
            }
        }
    }

    #[test]
    fn a_hundred_thousand_entries_of_growth_lose_none() {
        let (slots, mut writer) = slots();
        (0..100_000).for_each(|n| writer.insert(mix(n.into()), place(n)));
        (0..100_000).for_each(|n| assert!(holds(&slots, mix(n.into()), place(n)), "{n} is lost"));
        assert_eq!(slots.len(), 100_000);
        let bytes = slots.heap_bytes();
        assert!(bytes < 100_000 * 24, "{bytes} bytes");
    }

    /// A line of the two tables held more entries than one line can. What found no slot was spilled, and a search
    /// ended at the twin line, which had never been full: the key was gone.
    #[test]
    fn two_tables_that_become_one_lose_no_entry_of_a_line_that_overflows() {
        let (slots, mut writer) = slots();
        // All in one line, half of them in either table.
        let hash = |n: u32| u64::from(n & 1) << 63 | mix(n.into()) << 9 >> 1 & !511 | 5;
        (0..12).for_each(|n| writer.insert(hash(n), place(n)));
        let others = 100..4000;
        others.clone().for_each(|n| writer.insert(mix(n.into()), place(n)));
        let tables = || {
            let mut count = 0;
            slots.each_table(&epoch::pin(), |_| count += 1);
            count
        };
        let split = tables();
        others.for_each(|n| assert!(writer.remove(mix(n.into()), place(n))));
        assert!(tables() < split, "they were merged");
        (0..12).for_each(|n| assert!(holds(&slots, hash(n), place(n)), "{n} is lost"));
        assert_eq!(slots.len(), 12);
    }

    #[test]
    fn equal_hashes_do_not_make_the_directory_grow() {
        let (slots, mut writer) = slots();
        let before = slots.heap_bytes();
        (0..3000).for_each(|n| writer.insert(42, place(n)));
        (0..3000).for_each(|n| assert!(holds(&slots, 42, place(n))));
        assert!(slots.heap_bytes() < before + 3000 * 24);
        (0..3000).for_each(|n| assert!(writer.remove(42, place(n))));
        let spilled = slots.heap_bytes();
        (0..3000).for_each(|n| writer.insert(42, place(n)));
        assert_eq!(slots.heap_bytes(), spilled, "an emptied slot is used again");
    }

    #[test]
    fn a_table_without_a_bit_left_to_split_by_takes_more() {
        let (slots, mut writer) = slots();
        let hash = |n: u32| 0xABCDE << 44 | mix(n.into()) >> 20;
        (0..6000).for_each(|n| writer.insert(hash(n), place(n)));
        (0..6000).for_each(|n| assert!(holds(&slots, hash(n), place(n)), "{n} is lost"));
    }

    #[test]
    fn the_answer_and_the_error_of_the_probe_end_the_search() {
        let (slots, mut writer) = slots();
        (0..5).for_each(|n| writer.insert(42, place(n)));
        let guard = &epoch::pin();
        let mut calls = 0;
        let found = slots.find(42, guard, |place| {
            calls += 1;
            Ok::<_, ()>((calls == 2).then_some(place))
        });
        assert!(matches!(found, Ok(Some(_))));
        assert_eq!(calls, 2);
        assert_eq!(slots.find(42, guard, |_| Err::<Option<()>, _>("damage")), Err("damage"));
    }

    #[test]
    fn readers_find_every_entry_while_the_index_grows_and_places_change() {
        const COUNT: u32 = 1 << 16;
        let (slots, mut writer) = slots();
        let inserted = AtomicU32::new(0);
        let versions: Vec<AtomicU32> = (0..COUNT).map(|_| AtomicU32::new(0)).collect();
        let done = AtomicBool::new(false);
        // The offset says which entry it is, the segment how often it was replaced.
        let at = |n: u32, version: u32| Place { segment: version, offset: 4096 + n };
        std::thread::scope(|scope| {
            let readers = [0, 1, 2].map(|seed| {
                let (slots, inserted, versions, done) = (&slots, &inserted, &versions, &done);
                scope.spawn(move || {
                    let mut round = mix(seed);
                    while !done.load(Ordering::Acquire) {
                        round = mix(round.wrapping_add(0x9E37_79B9_7F4A_7C15));
                        let count = inserted.load(Ordering::Acquire);
                        // Half of the time among the newest, where the splits are.
                        let window = if round & 1 == 0 { count } else { count.min(64) };
                        let Some(back) = (round >> 1).checked_rem(window.into()) else { continue };
                        let n = count - 1 - back as u32;
                        let version = versions[n as usize].load(Ordering::Acquire);
                        let probe =
                            |place: Place| Ok::<_, ()>((place.offset == 4096 + n).then_some(place.segment));
                        let found = slots.find(mix(n.into()), &epoch::pin(), probe);
                        let Ok(Some(found)) = found else { panic!("{n} of {count} is lost") };
                        assert!(found >= version, "{n} went back from {version} to {found}");
                    }
                })
            });
            for n in 0..COUNT {
                writer.insert(mix(n.into()), at(n, 0));
                inserted.store(n + 1, Ordering::Release);
                let old = (mix(n.into()) % u64::from(n + 1)) as u32;
                let version = versions[old as usize].load(Ordering::Relaxed);
                assert!(writer.replace(mix(old.into()), at(old, version), at(old, version + 1)));
                versions[old as usize].store(version + 1, Ordering::Release);
            }
            done.store(true, Ordering::Release);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
    }
}
