//! A disk in memory that fails in every way the assumptions permit, and in no other.
//!
//! One job: make every crash and every error of a disk something a test can ask for. Promises that
//! the same calls and the same seeds give the same disk, byte for byte. Never reads a clock, never
//! waits, and never forgives: what was not synced is not on the medium.
//!
//! # The fault model
//!
//! * A **file** is what is on the medium, what reads see, and the changes between the two: sectors
//!   of 512 bytes written, lengths set. [`File::sync_data`] carries all changes of its file over,
//!   and nothing else does, except for early write-back where a test asks for it.
//! * The **directory** likewise: creates, links, renames and removes, carried over by
//!   [`Storage::sync_dir`]. Names and files are separate, so a removed file that is open still
//!   works, and a file whose name is not durable is lost with all its synced bytes.
//! * A **power cut** ([`SimDisk::crash`]) leaves any subset of the sectors, whole or one of them
//!   torn at any byte (A2, [`Crash`]); each length (A3) and each directory operation (A4) stays or
//!   goes independently. Of several contents of one sector, any may be left. A sector is written as
//!   a whole, with the bytes around the changed ones as reads saw them at the time.
//! * A **kill** ([`SimDisk::kill`]) leaves what reads see, still un-synced.
//! * A **stop** ([`SimDisk::stop_at`]) is the instant before a power cut: that call and all later
//!   ones fail and change nothing.
//! * A **failed sync** (A5) leaves its bytes off the medium, and clean: [`SyncFailure`].
//! * A **failed write** may have written a part (A6, [`Fault::partial`]); a write may be short or
//!   interrupted without failing.
//! * A **full disk** ([`SimDisk::set_budget`]) takes what fits; overwriting needs no space (A7).
//! * **Damage** ([`SimDisk::flip_bit`] and the like) changes bytes behind the store's back (A8).
//!
//! Outside of the model: a directory whose operations become durable with a file's sync, renames
//! that leave both names, and a disk that loses what it acknowledged by a sync.
//!
//! Every call of the seam has an index, counted from 0 over all kinds and handles. The calls of
//! several threads are taken one at a time, in whatever order they come.
//!
//! Read next: `crash.rs` for the power cuts, `fault.rs` for the errors, `node.rs` for one file.

use super::{Access, File, Storage};
use crate::sync::{Arc, Mutex, MutexGuard};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, io};

mod node;
mod crash;
mod damage;
mod fault;
mod file;
#[cfg(test)]
mod tests;

pub use crash::Crash;
pub use fault::{CallKind, Fault, SyncFailure};

use crash::Rng;
use fault::{Faults, Refusal};
use file::SimFile;
use node::{Fate, Node, fold};

/// A simulated disk: one directory in memory, and others beside it ([`SimDisk::dir`]). Clones are handles on the same disk.
///
/// ```
/// # #[cfg(feature = "testkit")] {
/// use tidewall::storage::{Access, Crash, SimDisk, Storage};
///
/// let disk = SimDisk::new();
/// let file = disk.open("log", Access::Create)?;
/// file.write_all_at(b"synced", 0)?;
/// file.sync_data()?;
/// disk.sync_dir()?;
/// file.write_all_at(b" and not", 6)?;
///
/// let after = disk.crash(Crash::None, 0);
/// assert_eq!(after.read_file("log").as_deref(), Some(&b"synced"[..]));
/// let lucky = disk.crash(Crash::All, 0);
/// assert_eq!(lucky.read_file("log").as_deref(), Some(&b"synced and not"[..]));
/// # }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct SimDisk {
    shared: Arc<Mutex<Inner>>,
    /// In front of each name: nothing, or the name of the directory and a slash.
    dir: Arc<str>,
}

#[derive(Default)]
struct Inner {
    nodes: BTreeMap<u64, Node>,
    next_node: u64,
    next_write: u64,
    // What callers see, what is on the medium, and how the first came from the second.
    names: BTreeMap<Arc<str>, u64>,
    durable_names: BTreeMap<Arc<str>, u64>,
    dir_ops: Vec<DirOp>,
    locked: BTreeSet<Arc<str>>,

    calls: u64,
    counts: [u64; CallKind::ALL.len() + 1],
    trace: u64,
    stop_at: Option<u64>,
    stopped: bool,

    faults: Faults,
    early: Option<Rng>,
    budget: Option<u64>,
    read_only: bool,
    observer: Option<Observer>,
}

type Observer = Box<dyn FnMut(u64, CallKind) + Send>;

/// A change of a directory since its last sync.
#[derive(Clone)]
enum DirOp {
    /// A name was given, to a new file or as a link to one that has another.
    Create {
        name: Arc<str>,
        node: u64,
    },
    Rename {
        from: Arc<str>,
        to: Arc<str>,
        node: u64,
    },
    Remove {
        name: Arc<str>,
        node: u64,
    },
}

impl SimDisk {
    /// An empty disk.
    pub fn new() -> Self {
        SimDisk::default()
    }

    /// Another directory of the same disk, for a checkpoint or what is restored from one. There is no call
    /// that makes it: it is there, and empty.
    pub fn dir(&self, name: &str) -> SimDisk {
        SimDisk { shared: self.shared.clone(), dir: format!("{name}/").into() }
    }

    /// How many calls were made, refused ones included; the index of the next call.
    pub fn calls(&self) -> u64 {
        self.lock_inner().calls
    }

    /// How many calls of one kind were made, refused ones included.
    pub fn calls_of(&self, kind: CallKind) -> u64 {
        let inner = self.lock_inner();
        if kind == CallKind::Any { inner.calls } else { inner.counts[kind as usize] }
    }

    /// A hash over all calls so far: kinds, names, offsets, lengths, and the bytes written. Two
    /// runs that should be the same have the same.
    pub fn trace_hash(&self) -> u64 {
        self.lock_inner().trace
    }

    /// The power goes before the call with this index: it fails, as do all later ones, and none of
    /// them changes anything. An index that has passed stops the disk at the next call.
    pub fn stop_at(&self, call: u64) {
        self.lock_inner().stop_at = Some(call);
    }

    /// Whether a call was refused because the power is off.
    pub fn is_stopped(&self) -> bool {
        self.lock_inner().stopped
    }

    /// Tells `observer` of each call to come, refused ones included, with its index: to learn what made it, for
    /// instance. It is told before the call does anything, and must make none itself.
    pub fn observe(&self, observer: impl FnMut(u64, CallKind) + Send + 'static) {
        self.lock_inner().observer = Some(Box::new(observer));
    }

    /// The most bytes that all files with a name may have together; `None`, the default, has no
    /// limit. Lowering it below what is used takes nothing away. A file has as many bytes as it is
    /// long, and they are free again once its last name is removed.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.lock_inner().budget = bytes;
    }

    /// Makes every call that would change something fail with
    /// [`io::ErrorKind::ReadOnlyFilesystem`], or no longer.
    pub fn set_read_only(&self, read_only: bool) {
        self.lock_inner().read_only = read_only;
    }

    /// From now on each write may bring random un-synced sectors of its file to the medium early.
    pub fn early_write_back(&self, seed: u64) {
        self.lock_inner().early = Some(Rng::new(seed));
    }

    fn from_inner(inner: Inner) -> Self {
        SimDisk { shared: Arc::new(Mutex::new(inner)), dir: "".into() }
    }

    fn lock_inner(&self) -> MutexGuard<'_, Inner> {
        self.shared.lock()
    }

    /// The name as the disk knows it.
    fn full(&self, name: &str) -> Arc<str> {
        if self.dir.is_empty() { name.into() } else { format!("{}{name}", self.dir).into() }
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.lock_inner();
        f.debug_struct("SimDisk").field("files", &inner.names.len()).field("calls", &inner.calls).finish()
    }
}

/// One call of the seam, as it is counted, traced and matched against faults.
struct Call<'a> {
    kind: CallKind,
    name: &'a str,
    offset: u64,
    len: u64,
    bytes: &'a [u8],
    changes: bool,
}

impl Inner {
    fn begin(&mut self, call: Call<'_>) -> Result<(), Refusal> {
        let index = self.calls;
        self.calls += 1;
        self.counts[call.kind as usize] += 1;
        if let Some(observer) = &mut self.observer {
            observer(index, call.kind);
        }
        let name = rapidhash::v3::rapidhash_v3(call.name.as_bytes());
        let bytes = rapidhash::v3::rapidhash_v3(call.bytes);
        for word in [call.kind as u64, name, call.offset, call.len, bytes] {
            self.trace = fold(self.trace, word);
        }
        if self.stop_at.is_some_and(|stop| index >= stop) {
            self.stopped = true;
        }
        if self.stopped {
            return Err(Refusal::plain(io::Error::other("power is off")));
        }
        self.faults.check(call.kind, call.name)?;
        if call.changes { self.check_writable().map_err(Refusal::plain) } else { Ok(()) }
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.read_only { Err(io::ErrorKind::ReadOnlyFilesystem.into()) } else { Ok(()) }
    }

    /// A call on the directory.
    fn begin_dir(&mut self, kind: CallKind, name: &str, other: &str, changes: bool) -> io::Result<()> {
        self.begin(Call { kind, name, offset: 0, len: 0, bytes: other.as_bytes(), changes })?;
        Ok(())
    }

    /// What is called in a directory, without its name.
    fn names_in(&self, dir: &str) -> Vec<String> {
        let inside = self.names.keys().filter(|name| is_in(name, dir));
        inside.map(|name| name[dir.len()..].to_owned()).collect()
    }

    fn find(&self, name: &str) -> io::Result<u64> {
        self.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn create(&mut self, name: &str) -> io::Result<u64> {
        self.check_writable()?;
        let (name, node): (Arc<str>, u64) = (name.into(), self.next_node);
        self.next_node += 1;
        self.nodes.insert(node, Node::default());
        self.names.insert(name.clone(), node);
        self.dir_ops.push(DirOp::Create { name, node });
        Ok(node)
    }

    /// Drops the files that have no name, here or on the medium, and no open handle.
    fn sweep(&mut self) {
        let named = self.names.values().chain(self.durable_names.values()).copied();
        let named: BTreeSet<u64> = named.chain(self.dir_ops.iter().map(DirOp::node)).collect();
        self.nodes.retain(|id, node| named.contains(id) || Arc::strong_count(&node.handles) > 1);
    }

    fn node(&mut self, id: u64) -> &mut Node {
        self.nodes.get_mut(&id).expect("a file with an open handle is not swept")
    }

    /// The end that a growing file may have at most, if it wants to end at `end`.
    fn room(&mut self, id: u64, end: u64) -> u64 {
        let len = self.node(id).cache.len;
        let named = self.names.values().any(|&other| other == id);
        match self.budget {
            Some(budget) if end > len && named => {
                let files: BTreeSet<_> = self.names.values().collect();
                let used: u64 = files.into_iter().map(|id| self.nodes[id].cache.len).sum();
                end.min(len + budget.saturating_sub(used))
            }
            _ => end,
        }
    }

    fn write(&mut self, id: u64, bytes: &[u8], offset: u64) {
        let write = self.next_write;
        self.next_write += 1;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.write(bytes, offset, write);
        if let Some(rng) = &mut self.early {
            while !node.ops.is_empty() && rng.chance(50) {
                node.write_back(rng.below(node.ops.len() as u64) as usize);
            }
        }
    }

    fn fail_sync(&mut self, id: u64) {
        let failure = self.faults.sync_failure;
        let node = self.node(id);
        match failure {
            SyncFailure::KeepNew => {}
            SyncFailure::RevertOld => {
                node.cache = node.durable.clone();
                // Early write-back may have left bytes beyond the durable end.
                node.cache.cut(node.cache.len);
            }
            SyncFailure::KeepPart { seed } => {
                let mut rng = Rng::new(seed);
                let coin = |_: &_| if rng.chance(50) { Fate::Kept } else { Fate::Lost };
                let fates: Vec<Fate> = node.ops.iter().map(coin).collect();
                node.durable = node.after(&fates);
            }
        }
        node.forget();
    }
}

impl Storage for SimDisk {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        let name = &*self.full(name);
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::Lock, name, "", false)?;
        if inner.find(name).is_err() {
            inner.create(name)?;
        }
        let name: Arc<str> = name.into();
        if !inner.locked.insert(name.clone()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(SimLock { disk: self.clone(), name }))
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        let name = &*self.full(name);
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::Open, name, "", false)?;
        let node = match access {
            Access::Read => inner.find(name)?,
            Access::Write => {
                let node = inner.find(name)?;
                inner.check_writable()?;
                node
            }
            Access::Create if inner.find(name).is_ok() => return Err(io::ErrorKind::AlreadyExists.into()),
            Access::Create => inner.create(name)?,
        };
        let handle = inner.node(node).handles.clone();
        Ok(Arc::new(SimFile::new(self.clone(), name, node, access, handle)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::List, &self.dir, "", false)?;
        Ok(inner.names_in(&self.dir))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let name = &*self.full(name);
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::Remove, name, "", true)?;
        let node = inner.find(name)?;
        inner.names.remove(name);
        inner.dir_ops.push(DirOp::Remove { name: name.into(), node });
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (&*self.full(from), &*self.full(to));
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::Rename, from, to, true)?;
        let node = inner.find(from)?;
        inner.names.remove(from);
        inner.names.insert(to.into(), node);
        inner.dir_ops.push(DirOp::Rename { from: from.into(), to: to.into(), node });
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::SyncDir, &self.dir, "", false)?;
        let Inner { names, durable_names, dir_ops, .. } = &mut *inner;
        durable_names.retain(|name, _| !is_in(name, &self.dir));
        let inside = names.iter().filter(|(name, _)| is_in(name, &self.dir));
        durable_names.extend(inside.map(|(name, &node)| (name.clone(), node)));
        dir_ops.retain(|op| !op.is_in(&self.dir));
        inner.sweep();
        Ok(())
    }

    fn link(&self, name: &str, into: &dyn Storage) -> io::Result<()> {
        let into: &dyn Any = into;
        let same = |other: &&SimDisk| Arc::ptr_eq(&other.shared, &self.shared);
        let Some(into) = into.downcast_ref::<SimDisk>().filter(same) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let (from, to) = (self.full(name), into.full(name));
        let mut inner = self.lock_inner();
        inner.begin_dir(CallKind::Link, &from, &to, true)?;
        let node = inner.find(&from)?;
        if inner.find(&to).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        inner.names.insert(to.clone(), node);
        inner.dir_ops.push(DirOp::Create { name: to, node });
        Ok(())
    }

    fn describe(&self) -> String {
        "the simulated disk".to_string()
    }
}

/// Whether a name lies right in a directory.
fn is_in(name: &str, dir: &str) -> bool {
    name.strip_prefix(dir).is_some_and(|name| !name.contains('/'))
}

impl DirOp {
    fn node(&self) -> u64 {
        match self {
            DirOp::Create { node, .. } | DirOp::Rename { node, .. } | DirOp::Remove { node, .. } => *node,
        }
    }

    fn is_in(&self, dir: &str) -> bool {
        match self {
            DirOp::Create { name, .. } | DirOp::Remove { name, .. } => is_in(name, dir),
            DirOp::Rename { to, .. } => is_in(to, dir),
        }
    }
}

struct SimLock {
    disk: SimDisk,
    name: Arc<str>,
}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.disk.lock_inner().locked.remove(&self.name);
    }
}
