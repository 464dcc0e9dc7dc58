//! A copy becomes a store that repeats nothing of what the original did.

use super::{BUMP, Making, Output, progress};
use crate::db::{check_exists, take_lock};
use crate::error::{Error, Result};
use crate::format::header::{Listed, SegmentHeader, StoreBlock};
use crate::format::salt::Salt;
use crate::format::{HEADER_BYTES, name};
use crate::log::list::List;
use crate::log::segment::read_seal;
use crate::options::{Options, Progress};
use crate::recover::{check_unlisted, recover};
use crate::storage::{Access, Disk, File, Storage};
use crate::sync::Arc;
use crate::types::{Lsn, Mark, Token};
use std::io;
use std::path::Path;

/// What [`restore`] made.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Restored {
    /// Every token granted from now on is above this, and none up to it is admitted where this store issues
    /// the tokens.
    pub counter: Mark,
    /// The lsn from which the store goes on.
    pub lsn: Lsn,
    /// The keyspaces of external tokens: each answers [`Error::NeedsFloor`] to writes until
    /// [`raise_all`](crate::Keyspace::raise_all) tells it the present value of its source.
    pub need_floor: Vec<String>,
    /// Segments that are one file with those of the copy.
    pub linked: u32,
    /// Segments that were copied.
    pub copied: u32,
}

/// Makes a store in `dir`, which must be empty or missing, of a checkpoint or of a store that is not open.
///
/// Whatever the original did since the copy was taken, the new store repeats none of it: no token that the
/// original granted is granted again or admitted, all leases are over, and no lsn names two things. It has
/// another id; its token counter and its lsns go on 2³² behind the copy's ([`Restore::bump`]); the floor of
/// each keyspace whose tokens the store issues stands at the new counter. Keyspaces of external tokens, also
/// those created later, answer [`Error::NeedsFloor`] to writes until [`raise_all`](crate::Keyspace::raise_all)
/// is told the present value of their source.
///
/// The copy stays as it is. Its sealed segments are linked where the file system can do that, else copied.
/// The new directory opens once everything else is done; a restore that was interrupted leaves one that does
/// not.
///
/// ```
/// # let scratch = tempfile::tempdir()?;
/// # let (data, copy, new) = (scratch.path().join("data"), scratch.path().join("copy"), scratch.path().join("new"));
/// use tidewall::{Db, Error, KeyspaceOptions};
///
/// let db = Db::open(&data)?;
/// let jobs = db.keyspace("jobs", KeyspaceOptions::new())?;
/// db.checkpoint(&copy)?;
/// let late = jobs.lease(b"1").acquire()?; // granted after the copy was taken
///
/// tidewall::restore(&copy, &new)?;
/// let db = Db::open(&new)?;
/// let jobs = db.keyspace("jobs", KeyspaceOptions::new())?;
/// assert!(matches!(jobs.put(late.token(), b"1", b"late"), Err(Error::Fenced { .. })));
/// assert!(jobs.lease(b"1").acquire()?.token() > late.token());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`]: `dir` is not empty. [`Error::Locked`]: the original is open; make a checkpoint
/// of it. [`Error::Corrupt`]: the copy is damaged; take another, or [`salvage`](crate::salvage) it.
/// [`Error::UpgradeRequired`]. [`Error::TokensExhausted`]: the bump leaves no tokens; take a smaller one.
/// [`Error::NoSpace`], [`Error::Io`]. In each case what was written is removed.
pub fn restore(checkpoint: impl AsRef<Path>, dir: impl AsRef<Path>) -> Result<Restored> {
    Restore::new().run(checkpoint, dir)
}

/// A restore with options: see [`restore`].
#[derive(Debug)]
#[must_use]
pub struct Restore {
    bump: u64,
    past: Option<Token>,
    options: Options,
}

impl Default for Restore {
    fn default() -> Self {
        Restore { bump: BUMP, past: None, options: Options::new().without_threads() }
    }
}

impl Restore {
    /// A bump of 2³², and no callback.
    pub fn new() -> Self {
        Self::default()
    }

    /// How far the token counter and the lsns go on behind those of the copy: more than the original has
    /// granted, and written, since the copy was taken. Default: 2³².
    pub fn bump(mut self, by: u64) -> Self {
        self.bump = by;
        self
    }

    /// A token of the original that was seen elsewhere: the counter goes on behind it too, should that be
    /// further on; see [`Db::advance_tokens`](crate::Db::advance_tokens). Default: none.
    pub fn advance_tokens(mut self, past: Token) -> Self {
        self.past = Some(past);
        self
    }

    /// Called once per segment: while they are copied, and again while they are read.
    pub fn progress(mut self, callback: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.options = self.options.progress(callback);
        self
    }

    /// As [`Options::deterministic`], for simulations.
    #[cfg(any(test, feature = "testkit", fuzzing))]
    pub fn deterministic(mut self, seed: u64) -> Self {
        self.options = self.options.deterministic(seed);
        self
    }

    /// Restores.
    ///
    /// # Errors
    /// As [`restore`].
    pub fn run(self, checkpoint: impl AsRef<Path>, dir: impl AsRef<Path>) -> Result<Restored> {
        let checkpoint = checkpoint.as_ref();
        let from = Disk::existing(checkpoint)
            .map_err(|e| Error::io(format!("opening the directory {}", checkpoint.display()), e))?;
        check_exists(&from)?;
        self.make(Arc::new(from), Output::create(dir.as_ref())?)
    }

    /// As [`Restore::run`], from and into other kinds of directories than those of this machine.
    ///
    /// # Errors
    /// As [`restore`].
    pub fn run_on(self, from: impl Storage, into: impl Storage) -> Result<Restored> {
        check_exists(&from)?;
        self.make(Arc::new(from), Output::over(Arc::new(into))?)
    }

    fn make(self, from: Arc<dyn Storage>, mut out: Output) -> Result<Restored> {
        if self.bump == 0 {
            return Err(Error::invalid("a bump of 0 would grant tokens again"));
        }
        let _original = take_lock(&*from, &Options::new().read_only())?;
        out.lock()?;
        let Some((list, _)) = List::load(from.clone(), Access::Read)? else {
            return Err(Error::corrupt(name::STORE, 0, "it is missing"));
        };
        let mut block = list.block().clone();
        check_unlisted(&*from, &block)?;
        let (linked, copied) = self.take_segments(&*from, &out, &block)?;
        descend(&mut block, self.options.entropy.u128()?.to_le_bytes());
        out.storage.sync_dir().map_err(|e| out.failed(0, e))?;
        let list = List::create_part(out.storage.clone(), block).map_err(|e| out.failed(0, e))?;
        let recovered = recover(&out.storage, &self.options, list)?;
        let counter = recovered.replay.counter().max(self.past.map_or(0, Token::get));
        let making = Making::new(out.storage.clone(), self.options, recovered, counter, self.bump)?;
        let need_floor = making.shut_out()?;
        let counter = making.counter();
        let lsn = making.finish()?;
        out.keep();
        Ok(Restored { counter, lsn, need_floor, linked, copied })
    }

    /// Links what is never written again, and copies the rest; says how many of each.
    fn take_segments(&self, from: &dyn Storage, out: &Output, block: &StoreBlock) -> Result<(u32, u32)> {
        let mut found = Vec::new();
        for listed in &block.segments {
            let file_name = name::segment(listed.segment);
            let file = match from.open(&file_name, Access::Read) {
                Ok(file) => file,
                // Recovery will name it.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(Error::io(format!("opening {file_name}"), e)),
            };
            let sealed = sealed_behind(block, listed, &*file)
                .map_err(|e| Error::io(format!("reading {file_name}"), e))?;
            found.push((listed, file_name, file, sealed));
        }
        // The newest one will be sealed anew, unless STORE says that it was.
        let newest = found.iter().filter_map(|&(.., sealed)| sealed).max();
        let (mut linked, mut copied) = (0, 0);
        for (done, (listed, file_name, file, sealed)) in found.iter().enumerate() {
            progress(&self.options, done, found.len());
            let stays = listed.segment.0 == block.sealed_through || *sealed < newest;
            if sealed.is_some() && stays && link(from, file_name, out)? {
                linked += 1;
                continue;
            }
            out.copy(file_name, &**file, listed.bytes as u64)?;
            copied += 1;
        }
        Ok((linked, copied))
    }
}

/// The lsn in front of a segment that is sealed; `None` for any other.
fn sealed_behind(block: &StoreBlock, listed: &Listed, file: &dyn File) -> io::Result<Option<Lsn>> {
    let Some(origin) = block.origin_id(listed) else { return Ok(None) };
    let salt = Salt::new(origin, listed.segment, listed.life);
    let len = file.len()?.min(listed.bytes as u64) as usize;
    let mut head = vec![0; len.min(HEADER_BYTES as usize)];
    file.read_exact_at(&mut head, 0)?;
    let Ok(Some((header, _))) = SegmentHeader::decode(&head, salt, "") else { return Ok(None) };
    Ok(read_seal(file, len, salt)?.map(|_| header.before.lsn))
}

/// Gives a sealed segment a second name, if that is possible.
fn link(from: &dyn Storage, file_name: &str, out: &Output) -> Result<bool> {
    if !out.link(from, file_name) {
        return Ok(false);
    }
    let failed = |e| out.failed(0, e);
    match out.storage.open(file_name, Access::Write) {
        // Whoever made the copy may not have synced it.
        Ok(file) => file.sync_data().map_err(failed).map(|()| true),
        // A copy that may not be written; the store opens its files for writing.
        Err(_) => out.storage.remove(file_name).map_err(failed).map(|()| false),
    }
}

/// The list of a new store that begins with the segments of an old one.
fn descend(block: &mut StoreBlock, store_id: [u8; 16]) {
    block.ancestors.push(block.store_id);
    let parent = block.ancestors.len() as u16;
    for listed in block.segments.iter_mut().filter(|listed| listed.origin == 0) {
        listed.origin = parent;
    }
    block.store_id = store_id;
    block.generation = 1;
    block.is_checkpoint = false;
    block.index = Lsn::ZERO;
    // No grant of the original is kept for its holder.
    block.incarnation = 0;
    block.incarnation_before = 0;
}
