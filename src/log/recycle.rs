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

/// Beyond the reserve, so many retired segments wait to be used again, where there is no room for more.
const RECYCLED: usize = 4;
/// So many are made spares by one change of the list.
const AT_ONCE: usize = 4;

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

    /// Makes spares of the files of retired segments that nobody reads any more, and removes the others: all spares
    /// together take at most `room`, beside a few that are always kept.
    ///
    /// # Errors
    /// The failure of the disk. What is not listed then, and cannot be removed now, goes at the next open.
    pub fn recycle(&self, retired: Vec<(Listed, Arc<dyn File>)>, room: u64) -> Result<()> {
        let mut list = self.list.lock();
        let mut kept = self.choose(&list, retired, room).into_iter().peekable();
        let mut outcome = Ok(());
        while kept.peek().is_some() {
            let some: Vec<_> = kept.by_ref().take(AT_ONCE).collect();
            let freed = some.iter().map(|(listed, _)| u64::from(listed.bytes)).sum();
            let relisted = self.relist(&mut list, some);
            self.note_list(&list);
            self.retired_bytes.fetch_sub(freed, Ordering::Relaxed);
            outcome = outcome.and(relisted);
            // Whoever has no spare gets the first of them, and waits for the list no longer.
            drop(list);
            list = self.list.lock();
        }
        outcome
    }

    /// Removes what is not to be used again; answers the others.
    fn choose(
        &self,
        list: &List,
        retired: Vec<(Listed, Arc<dyn File>)>,
        room: u64,
    ) -> Vec<(Listed, Arc<dyn File>)> {
        let wanted = self.following_bytes(list);
        let most = room + (RESERVE + RECYCLED) as u64 * u64::from(wanted);
        let mut bytes: u64 = self.ready.lock().iter().map(|spare| u64::from(spare.listed.bytes)).sum();
        let mut kept = Vec::new();
        for (listed, file) in retired {
            let more = u64::from(listed.bytes);
            // One that is much larger or smaller than what is made now would keep the store at its old size.
            let fits = (wanted..=wanted.saturating_mul(2)).contains(&listed.bytes)
                && file.len().is_ok_and(|len| len == more);
            // Upholds C2: what a checkpoint has a name for is not written again.
            let fits = fits && file.is_shared().is_ok_and(|shared| !shared);
            // Upholds C2 too: a value from an earlier opening may point into it, which nobody here knows of; its bytes
            // stay for as long as that value when the file is removed.
            let fits = fits && listed.segment >= self.first_own;
            if fits && bytes + more <= most && list.check_open().is_ok() {
                bytes += more;
                kept.push((listed, file));
            } else {
                drop(file);
                self.remove(listed);
            }
        }
        kept
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

    /// The files of retired segments get new names and new lives. Their blocks are written already: to make a
    /// spare of one costs no more than the mark of a spare in place of its header.
    ///
    /// Each takes the place of a spare that has become too small, if there is one.
    fn relist(&self, list: &mut List, retired: Vec<(Listed, Arc<dyn File>)>) -> Result<()> {
        list.check_open().map_err(|e| Error::io("recycling segments", e))?;
        let wanted = self.following_bytes(list);
        let mut from = list.block().next_segment;
        let mut renamed = Vec::with_capacity(retired.len());
        let mut outcome = Ok(());
        for (old, file) in retired {
            let id = match self.unused_id(list, from) {
                Ok(id) => id,
                Err(e) => {
                    // There are no more ids; its file goes at the next open.
                    outcome = Err(Error::io("recycling segments", e));
                    continue;
                }
            };
            from = id.0 + 1;
            let new = self.entropy.u64().map(|life| Listed {
                segment: id,
                life,
                origin: 0,
                is_marked: true,
                ..old
            });
            match new.and_then(|new| self.rename(list, old, new, &*file)) {
                Ok(listed) => renamed.push(Spare { listed, file }),
                Err(e) => outcome = Err(e),
            }
        }
        let failed = |e| Error::io("recycling segments", e);
        if let Err(e) = self.storage.sync_dir() {
            for spare in renamed {
                let _ = self.storage.remove(&name::segment(spare.listed.segment));
            }
            return Err(failed(e));
        }
        // Out of reach before they are struck out: what is not listed must never get a frame.
        let outgrown = self.take_small(wanted, renamed.len());
        // After a failure the list may name either all the same: the files stay, and are of no use until the next open.
        list.update(|block| {
            block.next_segment = from;
            block.segments.retain(|listed| !outgrown.contains(&listed.segment));
            block.segments.extend(renamed.iter().map(|spare| spare.listed));
        })
        .map_err(failed)?;
        self.ready.lock().extend(renamed);
        for segment in outgrown {
            // Not listed: what cannot be removed now goes at the next open.
            let _ = self.storage.remove(&name::segment(segment));
        }
        outcome
    }

    /// Takes up to `count` spares that have become too small.
    fn take_small(&self, wanted: u32, count: usize) -> Vec<SegmentId> {
        let mut ready = self.ready.lock();
        let mut small = Vec::new();
        while small.len() < count
            && let Some(at) = ready.iter().position(|spare| spare.listed.bytes < wanted)
        {
            small.push(ready.remove(at).listed.segment);
        }
        small
    }

    /// The next id, from `from` on, that is free in the list and in the directory.
    fn unused_id(&self, list: &List, from: u32) -> io::Result<SegmentId> {
        let mut id = free_id(list, from)?;
        while self.storage.open(&name::segment(id), Access::Read).is_ok() {
            id = free_id(list, id.0 + 1)?;
        }
        Ok(id)
    }

    /// Marks the file of a retired segment as a spare and gives it its new name, which is not durable yet.
    fn rename(&self, list: &List, old: Listed, new: Listed, file: &dyn File) -> Result<Listed> {
        let (old_name, new_name) = (name::segment(old.segment), name::segment(new.segment));
        self.zeros.fetch_add(HEADER_BYTES as u64, Ordering::Relaxed);
        let renamed = file
            .write_all_at(&spare_block(list, new.segment), 0)
            .and_then(|()| file.sync_data())
            .and_then(|()| self.storage.rename(&old_name, &new_name));
        match renamed {
            Ok(()) => Ok(new),
            Err(e) => {
                for file_name in [&old_name, &new_name] {
                    let _ = self.storage.remove(file_name);
                }
                Err(Error::io(format!("recycling {old_name}"), e))
            }
        }
    }
}
