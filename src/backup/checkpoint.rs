//! A copy of a store that is open, while writes go on.
//!
//! One job: seal the log where it ends, hold what is sealed, and give it second names. Sealed segments are
//! never written again, so the copy shares nothing with the store that either of them may write.

use super::Output;
use crate::db::Db;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::header::{Listed, SegmentHeader, StoreBlock};
use crate::format::{HEADER_BYTES, name};
use crate::log::segment::{Body, Pinned, Segment};
use crate::storage::Storage;
use crate::sync::Arc;
use crate::types::Lsn;
use std::io;
use std::path::Path;

/// What [`Db::checkpoint`] made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Everything up to this lsn is in it, and nothing behind.
    pub lsn: Lsn,
    /// Segments that are one file with the store's.
    pub linked: u32,
    /// Segments that were copied, because no link could be made.
    pub copied: u32,
    /// Bytes of those.
    pub copied_bytes: u64,
}

impl Db {
    /// Makes a copy of the store in `dir`, which must be empty or missing, as of one lsn, while writes go on.
    ///
    /// On one file system with hard links this costs a few syncs, a link for each segment, and no space: the
    /// copy's files are the store's sealed segments. Else the segments are copied. The copy stays as it is when the store goes on. It
    /// opens read-only, with [`Options::read_only`](crate::Options::read_only); [`restore`](crate::restore)
    /// makes a store of it. What is in it may be copied elsewhere with any tool that reads files.
    ///
    /// ```
    /// # let scratch = tempfile::tempdir()?;
    /// # let (data, copy) = (scratch.path().join("data"), scratch.path().join("copy"));
    /// let db = tidewall::Db::open(&data)?;
    /// let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let lease = jobs.lease(b"1").acquire()?;
    /// jobs.put(lease.token(), b"1", b"draft")?;
    ///
    /// let made = db.checkpoint(&copy)?;
    /// assert_eq!(made.lsn, db.last_lsn());
    /// jobs.put(lease.token(), b"1", b"done")?;
    ///
    /// let seen = tidewall::Options::new().read_only().open(&copy)?;
    /// let jobs = seen.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// assert_eq!(jobs.get(b"1")?.as_deref(), Some(&b"draft"[..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the directory is not empty. [`Error::NoSpace`], [`Error::Io`]: it could not
    /// be written. In each case what was written of it is removed, and the store goes on.
    /// [`Error::Indeterminate`], [`Error::Poisoned`]: the store's own disk failed. [`Error::ReadOnly`],
    /// [`Error::Closed`].
    pub fn checkpoint(&self, dir: impl AsRef<Path>) -> Result<Checkpoint> {
        self.shared.engine.check_open()?;
        self.shared.engine.checkpoint(Output::create(dir.as_ref())?)
    }

    /// As [`Db::checkpoint`], into another kind of directory than one of this machine. Segments are linked
    /// where [`Storage::link`] of the store's own storage can do that.
    ///
    /// # Errors
    /// As [`Db::checkpoint`].
    pub fn checkpoint_into(&self, into: impl Storage) -> Result<Checkpoint> {
        self.shared.engine.check_open()?;
        self.shared.engine.checkpoint(Output::over(Arc::new(into))?)
    }
}

/// The log up to one lsn: its segments, which stay as they are while this is held.
struct Cut {
    lsn: Lsn,
    block: StoreBlock,
    held: Vec<(Listed, Pinned)>,
}

impl Engine {
    fn checkpoint(&self, out: Output) -> Result<Checkpoint> {
        let cut = self.cut()?;
        let mut made = Checkpoint { lsn: cut.lsn, linked: 0, copied: 0, copied_bytes: 0 };
        for (listed, held) in &cut.held {
            let file_name = name::segment(listed.segment);
            // Whatever stands against a link, a copy does as well.
            if out.link(self.pool.storage(), &file_name) {
                made.linked += 1;
                continue;
            }
            made.copied_bytes += out.copy(&file_name, &*held.segment().file, listed.bytes as u64)?;
            made.copied += 1;
        }
        out.name_checkpoint(cut.block)?;
        out.keep();
        Ok(made)
    }

    /// Seals the log where it ends now, and holds what is sealed.
    fn cut(&self) -> Result<Cut> {
        // What leaves the list had moved to the end of the log before. So nothing leaves between the cut and
        // the holding: else it would be in neither.
        let _retiring = self.pool.retiring.lock();
        let (lsn, last, short) = self.seal_short()?;
        // Durable before anything is linked: a crash now must not rewrite that seal, in a file with two names.
        let noted = self.pool.note_sealed(last, short);
        self.check_list();
        noted.map_err(|e| Error::io("writing STORE", e))?;
        let mut block = self.pool.block();
        let guard = crossbeam_epoch::pin();
        let mut held = Vec::new();
        for &listed in &block.segments {
            let sealed = |segment: &&Arc<Segment>| !matches!(segment.body, Body::Image(_));
            let Some(segment) = self.segments.of(listed.segment, &guard).filter(sealed) else { continue };
            if follows(segment)? < lsn {
                let hold = segment.hold();
                let busy = || Error::io("holding a segment", io::ErrorKind::ResourceBusy.into());
                held.push((listed, hold.ok_or_else(busy)?));
            }
        }
        block.generation = 1;
        block.is_checkpoint = true;
        block.index = Lsn::ZERO;
        block.sealed_through = last;
        block.segments = held.iter().map(|(listed, _)| *listed).collect();
        Ok(Cut { lsn, block, held })
    }
}

/// The lsn in front of a segment.
fn follows(segment: &Segment) -> Result<Lsn> {
    let file_name = name::segment(segment.id);
    let mut head = vec![0; HEADER_BYTES as usize];
    segment.file.read_exact_at(&mut head, 0).map_err(|e| Error::io(format!("reading {file_name}"), e))?;
    match SegmentHeader::decode(&head, segment.salt, &file_name)? {
        Some((header, _)) => Ok(header.before.lsn),
        None => Err(Error::corrupt(file_name, 0, "the header of a sealed segment is damaged")),
    }
}
