//! `STORE`: which segments belong to the store, in two copies.
//!
//! Promises that a change is durable in one copy before the other is touched, so that one of them is
//! always whole; a segment is listed before its first frame and struck out before it is removed.
//!
//! Read next: `pool.rs`, which lists segments ahead of need.

use crate::error::{Error, Result};
use crate::format::header::{LISTED_BYTES, STORE_COPY_BYTES, StoreBlock};
use crate::format::name;
use crate::storage::{Access, File, Storage, is_full};
use crate::sync::Arc;
use std::io;

/// The segment list in memory and on disk.
#[derive(Debug)]
pub(crate) struct List {
    storage: Arc<dyn Storage>,
    file: Arc<dyn File>,
    /// What the file is called: `STORE`, unless the store is still in the making.
    name: &'static str,
    block: StoreBlock,
    /// Bytes set aside for one copy.
    capacity: usize,
    /// The copy to write first: never the only one that is known to be whole.
    first: usize,
    /// Bytes written into it since it was opened.
    pub written: u64,
    /// A sync of it failed: what is on the disk is unknown, and so nothing may rest on it.
    failed: bool,
    /// The directory is somebody else's by now: whoever comes too late writes nothing.
    closed: bool,
    /// It was read, perhaps from a cache that survived a failed sync: neither copy is durable for certain.
    unsure: bool,
}

/// What loading found beside the list.
#[derive(Debug, Default)]
pub(crate) struct Damage {
    /// One copy was damaged; the other one counted.
    pub one_copy: bool,
}

impl List {
    /// Writes the first list of a new store under a temporary name, then gives it its own.
    pub fn create(storage: Arc<dyn Storage>, block: StoreBlock) -> io::Result<Self> {
        Self::create_as(name::STORE, storage, block)
    }

    /// The list of a store in the making: nothing opens before [`List::publish`].
    pub fn create_part(storage: Arc<dyn Storage>, block: StoreBlock) -> io::Result<Self> {
        Self::create_as(name::STORE_PART, storage, block)
    }

    fn create_as(name: &'static str, storage: Arc<dyn Storage>, block: StoreBlock) -> io::Result<Self> {
        let capacity = block.len().next_power_of_two().max(STORE_COPY_BYTES);
        let file = write_new(&*storage, &block, capacity)?;
        give_name(&*storage, name).map_err(|(e, _)| e)?;
        let first = 0;
        let (failed, closed, unsure) = (false, false, false);
        Ok(List { storage, file, name, block, capacity, first, failed, closed, unsure, written: 0 })
    }

    /// Makes the store in the making one that opens.
    pub fn publish(&mut self) -> io::Result<()> {
        self.check()?;
        self.storage.rename(self.name, name::STORE)?;
        self.name = name::STORE;
        self.storage.sync_dir()
    }

    /// Reads the newest valid copy; `None` when there is no `STORE`.
    pub fn load(storage: Arc<dyn Storage>, access: Access) -> Result<Option<(Self, Damage)>> {
        let failed = |e| Error::io("reading STORE", e);
        let file = match storage.open(name::STORE, access) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("opening STORE", e)),
        };
        let mut bytes = vec![0; file.len().map_err(failed)? as usize];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        let first = StoreBlock::decode(&bytes)?;
        let second = second_copy(&bytes)?;
        let damage = Damage { one_copy: first.is_none() || second.is_none() };
        let (capacity, second) = match second {
            Some((capacity, block)) => (capacity, Some(block)),
            None => ((bytes.len() / 2).next_power_of_two().max(STORE_COPY_BYTES), None),
        };
        let generation = |copy: &Option<StoreBlock>| copy.as_ref().map_or(0, |block| block.generation);
        let stale = usize::from(generation(&first) > generation(&second));
        let newest = first.into_iter().chain(second).max_by_key(|block| block.generation);
        let Some(block) = newest else {
            return Err(Error::corrupt(name::STORE, 0, "both copies of the segment list are damaged"));
        };
        let name = name::STORE;
        Ok(Some((
            List {
                storage,
                file,
                name,
                block,
                capacity,
                first: stale,
                failed: false,
                closed: false,
                unsure: true,
                written: 0,
            },
            damage,
        )))
    }

    pub fn block(&self) -> &StoreBlock {
        &self.block
    }

    /// Only answers: is what is on the disk known?
    ///
    /// # Errors
    /// An earlier write failed: either list may be found there, so nothing that one of them names may be
    /// removed, and no further change is accepted.
    pub fn check(&self) -> io::Result<()> {
        match self.failed {
            true => Err(io::Error::other("an earlier write of STORE failed")),
            false => Ok(()),
        }
    }

    /// Lets go of the directory: no further change is accepted.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Only answers: as [`List::check`], and may anything be made or renamed that is to be listed?
    ///
    /// # Errors
    /// As [`List::check`]; or the store was closed.
    pub fn check_open(&self) -> io::Result<()> {
        self.check()?;
        if self.closed { Err(io::Error::other("the store was closed")) } else { Ok(()) }
    }

    /// Makes a change durable, in both copies.
    ///
    /// # Errors
    /// The failure of the disk: the change may or may not be there after a crash, so what it names must
    /// stay, and its ids are not used again. A failed write may be tried again (the next one overwrites all
    /// of it), a failed sync never: then no further change is accepted.
    pub fn update(&mut self, change: impl FnOnce(&mut StoreBlock)) -> io::Result<()> {
        self.check_open()?;
        if self.unsure {
            // The same bytes again, which no tear can harm: then the other copy may be overwritten.
            self.write_copy(&self.block.encode(), 1 - self.first)?;
            self.unsure = false;
        }
        let mut block = self.block.clone();
        change(&mut block);
        self.block.next_segment = block.next_segment;
        self.fit(block.len())?;
        self.block.generation += 1;
        block.generation = self.block.generation;
        let bytes = block.encode();
        let (first, second) = (self.first, 1 - self.first);
        self.write_copy(&bytes, first)?;
        // Durable in one copy is durable: the newest valid one counts. Should the other fail now, it is the
        // one that the next change begins with, or the next open repairs.
        self.block = block;
        self.first = if self.write_copy(&bytes, second).is_ok() { 0 } else { second };
        Ok(())
    }

    fn write_copy(&mut self, bytes: &[u8], copy: usize) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.write_all_at(bytes, (copy * self.capacity) as u64)?;
        let synced = self.file.sync_data();
        self.failed |= synced.is_err();
        synced
    }

    /// Sees to it that one more segment can be listed without a larger file: so one that finds no room is made before
    /// there is anything to be listed.
    ///
    /// # Errors
    /// As [`List::update`]; without room for a larger file the list stands as it is.
    pub fn make_room(&mut self) -> io::Result<()> {
        self.check_open()?;
        self.fit(self.block.len() + LISTED_BYTES)
    }

    /// A list that outgrows its copies moves to a larger file first, as it is and whole before it gets the name.
    fn fit(&mut self, bytes: usize) -> io::Result<()> {
        if bytes <= self.capacity {
            return Ok(());
        }
        let capacity = bytes.next_power_of_two();
        let file = write_new(&*self.storage, &self.block, capacity)?;
        self.written += 2 * (capacity + self.block.len()) as u64;
        give_name(&*self.storage, self.name).map_err(|(e, is_as_before)| {
            self.failed = !is_as_before;
            e
        })?;
        (self.file, self.capacity, self.first, self.unsure) = (file, capacity, 0, false);
        Ok(())
    }
}

/// Gives a new file the name that it waits for. Beside an error: whether everything is as it was before.
fn give_name(storage: &dyn Storage, name: &str) -> std::result::Result<(), (io::Error, bool)> {
    // Without room nothing was renamed; else nobody knows.
    storage.rename(name::STORE_NEW, name).map_err(|e| {
        let is_as_before = is_full(&e);
        (e, is_as_before)
    })?;
    // The file of before has no name any more, or has it again after a power cut: whatever the error is.
    storage.sync_dir().map_err(|e| (e, false))
}

/// The second copy lies at the capacity, a power of two, of the first; found without believing the
/// length of the file, which may have been cut.
pub(crate) fn second_copy(bytes: &[u8]) -> Result<Option<(usize, StoreBlock)>> {
    let mut capacity = STORE_COPY_BYTES;
    while capacity < bytes.len() {
        if let Some(block) = StoreBlock::decode(&bytes[capacity..])? {
            return Ok(Some((capacity, block)));
        }
        capacity *= 2;
    }
    Ok(None)
}

/// Both copies in a file that waits for its name.
fn write_new(storage: &dyn Storage, block: &StoreBlock, capacity: usize) -> io::Result<Arc<dyn File>> {
    match storage.remove(name::STORE_NEW) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let file = storage.open(name::STORE_NEW, Access::Create)?;
    let written = (|| {
        file.write_zeros(2 * capacity as u64)?;
        let bytes = block.encode();
        file.write_all_at(&bytes, 0)?;
        file.write_all_at(&bytes, capacity as u64)?;
        file.sync_data()
    })();
    if let Err(e) = written {
        drop(file);
        // The old list still stands; the half-written one is removed again by the next open at the latest.
        let _ = storage.remove(name::STORE_NEW);
        return Err(e);
    }
    Ok(file)
}
