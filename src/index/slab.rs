//! Where the tables of the index lie: a few in memory of their own, all others many in one slab.
//!
//! One job: an index of 10⁷ names has some eight thousand tables, and most of what it took to load them was the page
//! faults of fresh memory; and who jumps about in many small pages looks for the page longer than for the slot. A slab
//! is one large page where the system has them. It is given back with the last of its tables.
//!
//! Promises that a table is dropped once, the way it was made.
//!
//! Read next: `slots.rs`, which gives tables away and takes them back.
#![allow(unsafe_code)]

use super::table::Table;
use crate::storage::memory;
use crate::sync::{Arc, AtomicUsize, Ordering};
use crossbeam_queue::SegQueue;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::OnceLock;

const LARGE_PAGE_BYTES: usize = 2 << 20;
/// As many tables as one large page holds.
pub(crate) const SLAB_TABLES: usize = LARGE_PAGE_BYTES / size_of::<Table>();

/// So few are not worth a mapping of their own, which costs more to make and to give back than they do.
const FEW_TABLES: usize = 8;
/// As an index grows, it has so many in memory of their own first: a small one is to be small.
const SINGLE_TABLES: usize = 128;
/// So many of them are kept when they are not needed.
const KEPT_TABLES: usize = 4;

/// Tables for an index that grows: those that it has split, and slabs.
#[derive(Default)]
pub(super) struct Stock {
    free: SegQueue<OwnedTable>,
    /// Tables that were made one by one since it was given back.
    single: AtomicUsize,
}

impl Stock {
    /// A table without entries.
    pub fn take(&self) -> OwnedTable {
        if let Some(mut table) = self.free.pop() {
            table.clear(0);
            return table;
        }
        if self.single.load(Ordering::Relaxed) >= SINGLE_TABLES
            && let Ok(slab) = OwnedTable::slab(SLAB_TABLES)
        {
            let mut slab = slab.into_iter();
            if let Some(first) = slab.next() {
                slab.for_each(|table| self.free.push(table));
                return first;
            }
        }
        self.single.fetch_add(1, Ordering::Relaxed);
        OwnedTable::from(Table::new(0))
    }

    /// Keeps a table that was split, and that nobody can reach any more, unless there are many.
    pub fn put(&self, mut table: OwnedTable) {
        let most = if table.slab.is_some() { SLAB_TABLES } else { KEPT_TABLES };
        if self.free.len() < most {
            table.spill.take();
            self.free.push(table);
        }
    }

    /// The index shrinks: nothing is kept for it, and what becomes of two tables is one in memory of its own, for one
    /// table holds all of its slab.
    pub fn give_back(&self) -> OwnedTable {
        while self.free.pop().is_some() {}
        self.single.store(0, Ordering::Relaxed);
        OwnedTable::from(Table::new(0))
    }

    pub fn heap_bytes(&self) -> usize {
        self.free.len() * size_of::<Table>()
    }
}

/// A table that nobody else can reach.
pub(super) struct OwnedTable(NonNull<Table>);

// SAFETY: it owns its table, as a `Box` would, and tables may be sent.
unsafe impl Send for OwnedTable {}

impl OwnedTable {
    /// So many without entries, about to be loaded: at most [`SLAB_TABLES`] fill one large page.
    pub fn slab(count: usize) -> io::Result<Vec<Self>> {
        if count <= FEW_TABLES {
            return Ok((0..count).map(|_| OwnedTable::from(Table::new(0))).collect());
        }
        // All of a page, or it is made of small ones.
        let bytes = if count == SLAB_TABLES { LARGE_PAGE_BYTES } else { count * size_of::<Table>() };
        let mut memory = memory(bytes)?;
        let first = memory.as_mut_ptr().cast::<Table>();
        assert!(first.is_aligned(), "the system maps whole pages");
        let slab = Arc::new(memory);
        let table = |n| {
            // SAFETY: in bounds of the memory, which was made for so many, aligned as checked above, and nobody has been
            // there yet. The lines are zeros, which is what empty ones are; every other field is written here.
            // The table holds its memory until it is dropped.
            unsafe {
                let table = first.add(n);
                (&raw mut (*table).depth).write(0);
                (&raw mut (*table).used).write(AtomicUsize::new(0));
                (&raw mut (*table).spilled).write(AtomicUsize::new(0));
                (&raw mut (*table).spill).write(OnceLock::new());
                (&raw mut (*table).slab).write(Some(Arc::clone(&slab)));
                OwnedTable(NonNull::new_unchecked(table))
            }
        };
        Ok((0..count).map(table).collect())
    }

    /// Gives it away, to be taken back by [`OwnedTable::from_raw`].
    pub fn into_raw(self) -> *const Table {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }

    /// Takes it back.
    // SAFETY: asks that it comes from `into_raw`, and that nobody else can reach it when this is dropped.
    pub unsafe fn from_raw(table: *const Table) -> Self {
        // SAFETY: `into_raw` gives no null pointer.
        OwnedTable(unsafe { NonNull::new_unchecked(table.cast_mut()) })
    }
}

impl From<Box<Table>> for OwnedTable {
    fn from(table: Box<Table>) -> Self {
        OwnedTable(NonNull::from(Box::leak(table)))
    }
}

impl Deref for OwnedTable {
    type Target = Table;

    fn deref(&self) -> &Table {
        // SAFETY: it is a whole table, and owned.
        unsafe { self.0.as_ref() }
    }
}

impl DerefMut for OwnedTable {
    fn deref_mut(&mut self) -> &mut Table {
        // SAFETY: as above, and `&mut self` says that nobody else looks.
        unsafe { self.0.as_mut() }
    }
}

impl Drop for OwnedTable {
    fn drop(&mut self) {
        let slab = self.slab.take();
        // SAFETY: it is owned, so it is dropped once. Without a slab it was made as a box; with one, its memory is
        // there until `slab` is dropped, behind it.
        unsafe {
            match slab {
                None => drop(Box::from_raw(self.0.as_ptr())),
                Some(_) => self.0.drop_in_place(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Place;

    #[test]
    fn the_last_table_of_a_slab_gives_it_back_whatever_the_order() {
        let mut tables = OwnedTable::slab(FEW_TABLES + 1).unwrap();
        tables.truncate(3);
        let slab = Arc::downgrade(tables[0].slab.as_ref().unwrap());
        assert!(tables.iter().all(|table| table.len() == 0 && table.places().next().is_none()));
        drop(tables.remove(1));
        let raw = tables.remove(0).into_raw();
        drop(tables);
        assert_eq!(slab.strong_count(), 1);
        // SAFETY: given away above, to nobody.
        drop(unsafe { OwnedTable::from_raw(raw) });
        assert_eq!(slab.strong_count(), 0);
        assert!(OwnedTable::from(Table::new(3)).slab.is_none());
        assert!(OwnedTable::slab(FEW_TABLES).unwrap().iter().all(|table| table.slab.is_none()));
    }

    #[test]
    fn a_table_that_is_used_again_has_nothing_of_its_last_use() {
        let stock = Stock::default();
        let mut table = stock.take();
        table.depth = 20;
        // One hash for all: two lines of them, and the rest is spilled.
        (1..100).for_each(|offset| assert!(table.try_insert(42, Place { segment: 0, offset })));
        assert!(table.spill.get().is_some() && table.len() == 99);
        let at = &raw const *table;
        stock.put(table);
        let table = stock.take();
        assert!(std::ptr::eq(at, &raw const *table), "it was kept");
        assert!(table.spill.get().is_none() && table.len() == 0 && table.places().next().is_none());
        assert_eq!(table.depth, 0);
    }

    #[test]
    fn many_tables_lie_in_slabs_and_what_many_leave_is_given_back() {
        let stock = Stock::default();
        let mut tables: Vec<_> = (0..SINGLE_TABLES + SLAB_TABLES + 1).map(|_| stock.take()).collect();
        assert_eq!(tables.iter().filter(|table| table.slab.is_none()).count(), SINGLE_TABLES);
        assert_eq!(stock.free.len(), SLAB_TABLES - 1);
        let second = Arc::downgrade(tables[SINGLE_TABLES + SLAB_TABLES].slab.as_ref().unwrap());
        let in_slabs = tables.split_off(SINGLE_TABLES);
        while stock.free.pop().is_some() {}
        tables.into_iter().for_each(|table| stock.put(table));
        assert_eq!(stock.free.len(), KEPT_TABLES);
        in_slabs.into_iter().for_each(|table| stock.put(table));
        assert_eq!(stock.free.len(), SLAB_TABLES);
        assert!(stock.heap_bytes() < LARGE_PAGE_BYTES);
        assert!(stock.give_back().slab.is_none());
        assert_eq!((stock.free.len(), second.strong_count()), (0, 0));
    }
}
