//! Where segments go: what nobody needs any more becomes a spare again, or is removed.
//!
//! Read next: `pool.rs`, which makes the others.

use super::list::List;
use super::pool::{Pool, RESERVE, Spare, free_id, spare_block};
use crate::error::{Error, Result};
use crate::format::header::Listed;
use crate::format::{HEADER_BYTES, name};
use crate::storage::{Access, File};
use crate::sync::{Arc, Ordering};
use crate::types::SegmentId;
use std::io;

/// Beyond the reserve, at most so many retired segments wait to be used again.
const RECYCLED: usize = 4;

impl Pool {
    /// Strikes segments out of the list, all or none; their files are still there.
    ///
    /// # Errors
    /// The failure of the disk: they may be listed or not, so nothing of them may be removed.
    pub fn retire(&self, segments: &[SegmentId]) -> io::Result<Vec<Listed>> {
        let _retiring = self.retiring.lock();
        let mut list = self.list.lock();
        let is_retired = |listed: &Listed| segments.contains(&listed.segment);
        let retired: Vec<Listed> = list.block().segments.iter().copied().filter(is_retired).collect();
        list.update(|block| block.segments.retain(|listed| !is_retired(listed)))?;
        let bytes = retired.iter().map(|listed| listed.bytes as u64).sum();
        self.retired_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.note_list(&list);
        Ok(retired)
    }

    /// Makes a spare of the file of a retired segment that nobody reads any more, or removes it.
    ///
    /// # Errors
    /// The failure of the disk. The file is not listed: what cannot be removed now goes at the next open.
    pub fn recycle(&self, retired: Listed, file: Arc<dyn File>) -> Result<()> {
        let mut list = self.list.lock();
        let wanted = self.following_bytes(&list);
        let useful = self.ready.lock().iter().filter(|spare| spare.listed.bytes >= wanted).count();
        let enough = useful > RESERVE + RECYCLED;
        // One that is much larger or smaller than what is made now would keep the store at its old size.
        let fits = (wanted..=wanted.saturating_mul(2)).contains(&retired.bytes)
            && file.len().is_ok_and(|len| len == retired.bytes as u64);
        // Upholds C2: what a checkpoint has a name for is not written again.
        let fits = fits && file.is_shared().is_ok_and(|shared| !shared);
        // Upholds C2 too: a value from an earlier opening may point into it, which nobody here knows of; its bytes
        // stay for as long as that value when the file is removed.
        let fits = fits && retired.segment >= self.first_own;
        if enough || !fits || list.check().is_err() {
            drop(file);
            self.remove(retired);
            return Ok(());
        }
        let recycled = self.relist(&mut list, retired, file, wanted);
        self.note_list(&list);
        self.retired_bytes.fetch_sub(retired.bytes as u64, Ordering::Relaxed);
        recycled
    }

    /// Gives back the spares that are too large by now, and those beyond what is always kept; never the reserve.
    ///
    /// # Errors
    /// The failure of the disk: they may be listed or not, so their files stay.
    pub fn trim(&self) -> io::Result<()> {
        let mut list = self.list.lock();
        loop {
            // With each that goes the store is smaller.
            let most = self.following_bytes(&list).saturating_mul(2);
            let Some(spare) = self.take_excess(most) else { return Ok(()) };
            let segment = spare.listed.segment;
            let updated = list.update(|block| block.segments.retain(|listed| listed.segment != segment));
            self.note_list(&list);
            updated?;
            drop(spare);
            // Not listed: what cannot be removed now goes at the next open.
            let _ = self.storage.remove(&name::segment(segment));
        }
    }

    fn take_excess(&self, most: u32) -> Option<Spare> {
        let mut ready = self.ready.lock();
        // Of several the one that was made first: those that were used before have their blocks.
        let largest = (0..ready.len()).rev().max_by_key(|&at| ready[at].listed.bytes)?;
        let is_excess = ready[largest].listed.bytes > most || ready.len() > RESERVE + 1;
        (is_excess && ready.len() > RESERVE).then(|| ready.remove(largest))
    }

    /// Removes the file of a retired segment.
    pub fn remove(&self, retired: Listed) {
        // Not listed: what cannot be removed now goes at the next open.
        let _ = self.storage.remove(&name::segment(retired.segment));
        self.retired_bytes.fetch_sub(retired.bytes as u64, Ordering::Relaxed);
    }

    /// The file of a retired segment gets a new name and a new life. Its blocks are written already: to make
    /// a spare of it costs no more than the mark of one in place of its header.
    ///
    /// It takes the place of a spare that has become too small, if there is one.
    fn relist(&self, list: &mut List, retired: Listed, file: Arc<dyn File>, wanted: u32) -> Result<()> {
        let old = name::segment(retired.segment);
        let failed = |e: io::Error| Error::io(format!("recycling {old}"), e);
        self.zeros.fetch_add(HEADER_BYTES as u64, Ordering::Relaxed);
        let mut id = free_id(list, list.block().next_segment);
        while self.storage.open(&name::segment(id), Access::Read).is_ok() {
            id = free_id(list, id.0 + 1);
        }
        let marked = file.write_all_at(&spare_block(list, id), 0).and_then(|()| file.sync_data());
        if let Err(e) = marked {
            let _ = self.storage.remove(&old);
            return Err(failed(e));
        }
        let renamed = self.storage.rename(&old, &name::segment(id)).and_then(|()| self.storage.sync_dir());
        if let Err(e) = renamed {
            for file_name in [&old, &name::segment(id)] {
                let _ = self.storage.remove(file_name);
            }
            return Err(failed(e));
        }
        let listed = Listed { segment: id, life: self.entropy.u64()?, origin: 0, is_marked: true, ..retired };
        let outgrown = {
            let mut ready = self.ready.lock();
            let at = ready.iter().position(|spare| spare.listed.bytes < wanted);
            at.map(|at| ready.remove(at).listed.segment)
        };
        // After a failure the list may name either all the same: the files stay.
        list.update(|block| {
            block.next_segment = id.0 + 1;
            block.segments.retain(|listed| Some(listed.segment) != outgrown);
            block.segments.push(listed);
        })
        .map_err(failed)?;
        self.ready.lock().push(Spare { listed, file });
        if let Some(outgrown) = outgrown {
            // Not listed: what cannot be removed now goes at the next open.
            let _ = self.storage.remove(&name::segment(outgrown));
        }
        Ok(())
    }
}
