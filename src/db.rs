//! The store as a user holds it: opening, keyspaces, batches, closing.
//!
//! One job: tie the engine to its directory, its lock and its two threads, and take them apart again.

use crate::append::{frame_bytes, room};
use crate::batch::Batch;
use crate::commit::{Answer, FEW_WRITERS, SealAt, sealed_short_bytes};
use crate::compact::{Compacted, Who};
use crate::engine::{Committer, Engine, KeyspaceState, PoisonOnPanic, Tail, Work};
use crate::error::{Error, Result};
use crate::events;
use crate::format::header::StoreBlock;
use crate::format::name;
use crate::group_commit::{Doorbell, Due, Heard, Progress, WakerSlot};
use crate::keyspace::Keyspace;
use crate::lease::{Bell, Ending};
use crate::lease_table::LeaseTable;
use crate::log::image::Images;
use crate::log::list::List;
use crate::log::pool::{Need, Pool};
use crate::observe::{begin_publishing, run_publisher};
use crate::op::{KeyspaceValue, Kind, Links, Op, check_keyspace_name};
use crate::options::{KeyspaceOptions, Options, Tokens};
use crate::patience::Patience;
use crate::recover::{OpenReport, Recovered, recover};
use crate::refresh::run_indexer;
use crate::snapshot::Snapshots;
use crate::space::{Compactor, Indexed};
use crate::stats::{Counters, Health, Stats};
use crate::storage::{Access, Disk, Storage, is_full};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, RwLock};
use crate::types::{KeyspaceId, Lsn, MAX_KEYSPACES, Token};
use crate::view::Snapshot;
use crate::waiters::Waiters;
use crate::watches::Watches;
use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

/// How long after the last commit an idle frame proves that all of them were durable.
const IDLE: Duration = Duration::from_millis(50);
/// How often compaction looks whether a reader is gone that it waits for.
const PATIENCE: Duration = Duration::from_millis(20);

/// A fencing key-value store in one directory.
///
/// Cheap to clone; `Send` and `Sync`. The store is closed when the last handle (`Db`, [`Keyspace`] or
/// [`Batch`]) is dropped, or by [`Db::close`], which reports.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::time::Duration;
/// use tidewall::{Db, Error, KeyspaceOptions};
///
/// let db = Db::open(dir.path().join("data"))?;
/// let jobs = db.keyspace("jobs", KeyspaceOptions::new())?;
///
/// let old = jobs.lease(b"job").ttl(Duration::from_millis(1)).acquire()?;
/// # let clock = std::time::Instant::now();
/// # while clock.elapsed() < Duration::from_millis(3) {}
/// let new = jobs.lease(b"job").acquire()?; // the old lease ran out
/// assert!(new.token() > old.token());
///
/// // The old holder wakes up and writes:
/// assert!(matches!(jobs.put(old.token(), b"job", b"late"), Err(Error::Fenced { .. })));
/// jobs.put(new.token(), b"job", b"done")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Db {
    pub(crate) shared: Arc<Shared>,
}

/// What all handles of one open store share.
pub(crate) struct Shared {
    pub engine: Arc<Engine>,
    report: OpenReport,
    /// The thread of the leases runs: started by the first lease that is asked for.
    tends_leases: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    compactor: Mutex<Option<JoinHandle<()>>>,
    /// The operating system's lock on the directory, until the store is closed.
    lock: Mutex<Option<Box<dyn Send + Sync>>>,
    /// One creation of a keyspace at a time.
    creating: Mutex<()>,
    stop: Arc<AtomicBool>,
}

impl Options {
    /// Opens the store in `dir`, creating the directory and the store where they are missing.
    ///
    /// # Errors
    /// [`Error::Locked`]: it is open already. [`Error::Corrupt`], [`Error::UpgradeRequired`]: the files are
    /// not what was written, or newer than this crate; nothing was changed. [`Error::OlderCopy`]: see
    /// [`Options::must_have_granted`]. [`Error::Io`], [`Error::NoSpace`]: the file system, or no store where there
    /// must be one. [`Error::InvalidArgument`]: the options, or the directory is a checkpoint.
    pub fn open(self, dir: impl AsRef<Path>) -> Result<Db> {
        self.check()?;
        let storage = match &self.storage {
            Some(storage) => storage.clone(),
            None => open_dir(dir.as_ref(), self.read_only || self.must_exist)?,
        };
        let name = storage.describe();
        if self.read_only || self.must_exist {
            check_exists(&*storage)?;
        }
        let lock = take_lock(&*storage, &self)?;
        if self.publish_stats.is_some() {
            begin_publishing(&*storage)?;
        }
        let access = if self.read_only { Access::Read } else { Access::Write };
        let (list, damage) = match List::load(storage.clone(), access)? {
            Some(loaded) => loaded,
            None => (create(&storage, &self)?, Default::default()),
        };
        if list.block().is_checkpoint && !self.read_only {
            let what = "is a checkpoint: make a store of it with `tidewall::restore`, or open it read-only";
            return Err(Error::invalid(format!("{name} {what}")));
        }
        let mut recovered = recover(&storage, &self, list)?;
        if damage.one_copy {
            let repaired = if self.read_only { "read around" } else { "repaired" };
            recovered.report.warnings.push(format!("one copy of STORE was damaged and {repaired}"));
        }
        let report = recovered.report.clone();
        let recorded = std::mem::take(&mut recovered.replay.recorded);
        let grace = self.lease_grace;
        let engine = Arc::new(assemble(storage, name, self, recovered));
        engine.keep_recorded(recorded, grace);
        events::opened(&engine.dir, report.segments, report.ops, report.cut_bytes, report.unproven_frames);
        report.warnings.iter().for_each(|what| events::warned(&engine.dir, what));
        let shared = Arc::new(Shared {
            engine,
            report,
            tends_leases: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            compactor: Mutex::new(None),
            lock: Mutex::new(lock),
            creating: Mutex::new(()),
            stop: Arc::new(AtomicBool::new(false)),
        });
        shared.start()?;
        Ok(Db { shared })
    }
}

impl Db {
    /// Opens the store in `dir` with the default options: durable, created where it is missing.
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Options::new().open(dir)
    }

    /// Opens a keyspace, creating it (durably) where it is missing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it exists with other options, naming the difference, has an impossible name, or
    /// would be one more than [`MAX_KEYSPACES`](crate::MAX_KEYSPACES); [`Error::ReadOnly`] when it would have to be created;
    /// [`Error::Closed`].
    pub fn keyspace(&self, name: &str, options: KeyspaceOptions) -> Result<Keyspace> {
        self.shared.engine.check_readable()?;
        check_keyspace_name(name)?;
        options.check()?;
        let _creating = self.shared.creating.lock();
        let state = match self.shared.engine.keyspace_by_name(name) {
            Some(state) => state,
            None => self.create_keyspace(name, options)?,
        };
        match options.difference(&state.options) {
            Some(difference) => {
                Err(Error::invalid(format!("keyspace {name:?} exists with other options: {difference}")))
            }
            None => Ok(Keyspace { shared: self.shared.clone(), state }),
        }
    }

    /// Opens a keyspace that exists, with the options it was created with. `None`: there is none of that name.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # use tidewall::{KeyspaceOptions, Scope};
    /// db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/')))?;
    /// let jobs = db.open_keyspace("jobs")?.expect("just created");
    /// assert_eq!(jobs.options().get_scope(), Scope::Prefix(b'/'));
    /// assert!(db.open_keyspace("other")?.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn open_keyspace(&self, name: &str) -> Result<Option<Keyspace>> {
        let engine = &self.shared.engine;
        engine.check_readable()?;
        let state = engine.keyspace_by_name(name);
        Ok(state.map(|state| Keyspace { shared: self.shared.clone(), state }))
    }

    fn create_keyspace(&self, name: &str, options: KeyspaceOptions) -> Result<Arc<KeyspaceState>> {
        let engine = &self.shared.engine;
        let count = engine.keyspaces.read().len();
        if count >= MAX_KEYSPACES {
            return Err(Error::invalid(format!(
                "keyspace {name:?} would be one more than the {MAX_KEYSPACES} that a store holds: tell things apart \
                 by the beginning of their keys"
            )));
        }
        let id = KeyspaceId(count as u16 + 1);
        // The copy may be older than a keyspace of this name: what was admitted there is not known here.
        let needs_floor = options.tokens == Tokens::External && engine.restored;
        let value = KeyspaceValue { options, needs_floor }.encode();
        let op = Op {
            kind: Kind::Keyspace,
            keyspace: id,
            token: 0,
            key: name.as_bytes(),
            value: &value,
            links: Links::default(),
        };
        let room = room(frame_bytes(1, name.len() + value.len()), 1);
        let lsn = engine.with_room(room, Need::Privileged, |tail| {
            let (lsn, ..) = engine.append_op(tail, &op);
            lsn
        })?;
        // `creating` is held.
        engine.commit_behind_locks(lsn)?;
        let state = Arc::new(KeyspaceState::new(id, name.to_owned(), options, needs_floor));
        engine.keyspaces.write().push(state.clone());
        events::keyspace_created(&engine.dir, name);
        Ok(state)
    }

    /// The names and options of all keyspaces, in the order of their creation.
    pub fn keyspaces(&self) -> Vec<(String, KeyspaceOptions)> {
        let keyspaces = self.shared.engine.keyspaces.read();
        keyspaces.iter().map(|keyspace| (keyspace.name.clone(), keyspace.options)).collect()
    }

    /// A batch of changes that are applied together or not at all.
    pub fn batch(&self) -> Batch {
        Batch::new(self.shared.clone())
    }

    /// Everything as it is now, owned: it stays as it is whatever is written later. Of a store that was closed,
    /// each read of it answers [`Error::Closed`].
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(&self.shared)
    }

    /// Sees to it, durably, that every token granted from now on is above `past`. For a migration from a
    /// system whose tokens are higher.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Indeterminate`], [`Error::Poisoned`], [`Error::ReadOnly`], [`Error::Closed`].
    pub fn advance_tokens(&self, past: Token) -> Result<()> {
        let engine = &self.shared.engine;
        let answer = engine.with_room(room(frame_bytes(1, 0), 1), Need::Privileged, |tail| {
            let token = past.get().max(tail.counter);
            let op = Op {
                kind: Kind::Counter,
                keyspace: KeyspaceId(0),
                token,
                key: b"",
                value: b"",
                links: Links::default(),
            };
            let (lsn, ..) = engine.append_op(tail, &op);
            tail.counter = token;
            engine.answer(tail, Ok(lsn))
        })?;
        engine.settle(answer).map(drop)
    }

    /// The lsn of the newest durable batch.
    pub fn last_lsn(&self) -> Lsn {
        self.shared.engine.progress.durable()
    }

    /// What opening found: how much was replayed, cut, or read around.
    pub fn report(&self) -> &OpenReport {
        &self.shared.report
    }

    /// Whether the store still acknowledges writes, if not, why, and what is to be looked at.
    pub fn health(&self) -> Health {
        self.shared.engine.health()
    }

    /// What the store has done since it was opened, and how large it is.
    pub fn stats(&self) -> Stats {
        self.shared.engine.stats()
    }

    /// Gives back the space of everything that is not needed any more, and folds marks that nobody needs into
    /// floors. The store does so by itself while it is written to; this does all of it now, for instance
    /// before a backup. Writes go on meanwhile.
    ///
    /// # Errors
    /// [`Error::NoSpace`]: there is no room to carry what is needed of any segment to; [`Error::Corrupt`]: a
    /// segment is damaged, and stays as it is. Nothing is lost either way. [`Error::Poisoned`],
    /// [`Error::ReadOnly`], [`Error::Closed`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let lease = jobs.lease(b"job-7").acquire()?;
    /// for n in 0..100u8 {
    ///     jobs.put(lease.token(), b"job-7", &[n; 1000])?;
    /// }
    /// let compacted = db.compact()?;
    /// assert!(compacted.bytes > 0);
    /// assert_eq!(jobs.get(b"job-7")?.map(|value| value.len()), Some(1000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn compact(&self) -> Result<Compacted> {
        let engine = &self.shared.engine;
        // What a close came in between says.
        let done = engine.compact_all().or_else(|error| engine.check_readable().and(Err(error)));
        engine.note_compaction(&done);
        done
    }

    /// Makes everything submitted durable, seals the log, and lets go of the directory, so that it can be opened
    /// again.
    ///
    /// Other handles stay, for nothing: reads and writes answer [`Error::Closed`], also those of snapshots and
    /// iterators from before. A write under a token that was fenced before may still answer [`Error::Fenced`],
    /// which stays true. Every lease is over ([`Ending::Closed`]). Figures
    /// ([`Db::stats`], [`Db::last_lsn`], [`Keyspace::floor`] and their like) stay as they were.
    ///
    /// # Errors
    /// [`Error::Indeterminate`], [`Error::Poisoned`]: what was submitted and not waited for may be lost.
    pub fn close(self) -> Result<()> {
        self.shared.close()
    }
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db").field("dir", &self.shared.engine.dir).finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("engine", &self.engine).finish_non_exhaustive()
    }
}

fn open_dir(dir: &Path, existing: bool) -> Result<Arc<dyn Storage>> {
    let opened = if existing { Disk::existing(dir) } else { Disk::create(dir) };
    match opened {
        _ if dir.as_os_str().is_empty() => {
            Err(Error::invalid("the path of the store is empty: name a directory"))
        }
        Ok(disk) => Ok(Arc::new(disk)),
        Err(e) => Err(Error::io(format!("opening the directory {}", dir.display()), e)),
    }
}

pub(crate) fn take_lock(storage: &dyn Storage, options: &Options) -> Result<Option<Box<dyn Send + Sync>>> {
    // A copy on a read-only medium may come without its lock file; nobody can write there.
    let is_missing = |e: io::Error| e.kind() == io::ErrorKind::NotFound;
    if options.read_only && storage.open(name::LOCK, Access::Read).is_err_and(is_missing) {
        return Ok(None);
    }
    match storage.lock(name::LOCK) {
        Ok(lock) => Ok(Some(lock)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(Error::Locked { dir: storage.describe() }),
        // On a medium that knows no locks nobody can write.
        Err(_) if options.read_only => Ok(None),
        Err(e) => Err(Error::io(format!("locking {}", storage.describe()), e)),
    }
}

/// Whether there is a store, before so much as a lock file is made where there is none.
pub(crate) fn check_exists(storage: &dyn Storage) -> Result<()> {
    match storage.open(name::STORE, Access::Read) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            check_no_segments(storage)?;
            let missing = io::Error::new(e.kind(), "there is no store (no file STORE)");
            Err(Error::io(format!("opening the store in {}", storage.describe()), missing))
        }
        // Whatever else is the matter with it is found when it is read.
        _ => Ok(()),
    }
}

/// Without STORE nobody knows which marks there were: segments without it are no new store.
fn check_no_segments(storage: &dyn Storage) -> Result<()> {
    let names = storage.list().map_err(|e| Error::io(format!("listing {}", storage.describe()), e))?;
    if names.iter().any(|file| file == name::STORE_PART) {
        let what = "it is missing: a restore or salvage into this directory was interrupted; empty it, and do \
                    that again";
        return Err(Error::corrupt(name::STORE, 0, what));
    }
    if names.iter().any(|file| name::parse_segment(file).is_some()) {
        return Err(Error::corrupt(name::STORE, 0, "it is missing, and segments are there"));
    }
    Ok(())
}

/// Begins a store in a directory that has none.
fn create(storage: &Arc<dyn Storage>, options: &Options) -> Result<List> {
    let dir = storage.describe();
    check_no_segments(&**storage)?;
    options.check_counter(0)?;
    if options.read_only || options.must_exist {
        return Err(Error::io(format!("opening the store in {dir}"), io::ErrorKind::NotFound.into()));
    }
    let block = StoreBlock {
        generation: 1,
        store_id: options.entropy.u128()?.to_le_bytes(),
        ancestors: Vec::new(),
        incarnation: options.entropy.u64()?,
        incarnation_before: 0,
        next_segment: 1,
        sealed_through: 0,
        is_checkpoint: false,
        segments: Vec::new(),
        index: Lsn::ZERO,
    };
    List::create(storage.clone(), block).map_err(|e| match is_full(&e) {
        true => Error::NoSpace { dir, bytes: 0 },
        false => Error::io(format!("creating the store in {dir}"), e),
    })
}

pub(crate) fn assemble(
    storage: Arc<dyn Storage>,
    dir: String,
    options: Options,
    recovered: Recovered,
) -> Engine {
    let Recovered { list, replay, spares, before, next, report, index_bytes } = recovered;
    let durable = Lsn::new(next.get() - 1);
    let (store_id, incarnation) = (list.block().store_id, list.block().incarnation);
    let restored = !list.block().ancestors.is_empty();
    let counter = replay.counter();
    Engine {
        dir,
        store_id,
        incarnation,
        restored,
        seed: replay.seed,
        slots: replay.slots,
        segments: replay.segments,
        images: Images::default(),
        patience: Patience::new(options.yield_for),
        lease_patience: Patience::new(options.yield_for),
        keyspaces: RwLock::new(replay.keyspaces),
        progress: Progress::new(durable),
        overdue: Mutex::new(Vec::new()),
        tail: Mutex::new(Tail {
            slots: replay.writer,
            usage: replay.usage,
            active: None,
            filled: VecDeque::new(),
            next,
            counter,
            group: 0,
            group_start: next,
            group_since: 0,
            floors: Vec::new(),
            vanished: VecDeque::new(),
            idle: true,
            scratch: Vec::new(),
            work: Work::default(),
        }),
        committer: Mutex::new(Committer { cursor: None, before, durable, company: 0, staging: Vec::new() }),
        pool: Pool::new(storage, list, spares, &options),
        leases: LeaseTable::new(),
        bell: Arc::new(Bell::new()),
        waiters: Waiters::new(),
        watches: Watches::new(),
        released: SegQueue::new(),
        snapshots: Snapshots::default(),
        doorbell: Doorbell::new(),
        pool_bell: Doorbell::new(),
        publish_bell: Doorbell::new(),
        compact_bell: Doorbell::new(),
        index_bell: Doorbell::new(),
        index: Indexed { bytes: AtomicU64::new(index_bytes), ..Indexed::default() },
        compactor: Mutex::new(Compactor::default()),
        afterlives: Mutex::new(Vec::new()),
        compaction_trouble: Mutex::new(None),
        waiting: AtomicUsize::new(0),
        quiet: AtomicBool::new(true),
        appended_bytes: AtomicU64::new(0),
        cause: OnceLock::new(),
        closed: AtomicBool::new(false),
        counters: Counters::default(),
        warnings: report.warnings,
        options,
    }
}

impl Shared {
    /// Starts the threads of a store that is open for writing.
    fn start(&self) -> Result<()> {
        if self.engine.options.read_only || !self.engine.options.background {
            return Ok(());
        }
        let mut threads = self.threads.lock();
        threads.push(self.run("tidewall-commit", run_committer)?);
        threads.push(self.run("tidewall-spares", run_spares)?);
        threads.push(self.run("tidewall-index", run_indexer)?);
        if self.engine.options.publish_stats.is_some() {
            threads.push(self.run("tidewall-stats", run_publisher)?);
        }
        if self.engine.options.compaction {
            *self.compactor.lock() = Some(self.run("tidewall-compact", run_compactor)?);
        }
        self.engine.pool_bell.ring();
        Ok(())
    }

    #[expect(clippy::disallowed_methods, reason = "the store's threads, which `close` joins")]
    fn run(&self, name: &str, body: fn(&Engine, &AtomicBool)) -> Result<JoinHandle<()>> {
        let (engine, stop) = (self.engine.clone(), self.stop.clone());
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(&engine, &stop))
            .map_err(|e| Error::io("starting a thread", e))
    }

    /// Starts the thread that hands leases over, if it does not run: a store that grants none has none.
    pub fn tend_leases(&self) -> Result<()> {
        let engine = &self.engine;
        let nobody = engine.options.read_only || !engine.options.background;
        if nobody || self.tends_leases.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut threads = self.threads.lock();
        if self.tends_leases.load(Ordering::Acquire) || engine.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        threads.push(self.run("tidewall-leases", run_leases)?);
        self.tends_leases.store(true, Ordering::Release);
        let bell = Arc::downgrade(&engine.bell);
        engine.options.clock.watch(Box::new(move || bell.upgrade().inspect(|bell| bell.nudge()).is_some()));
        Ok(())
    }

    /// Waits while too many bytes are in flight.
    pub fn wait_for_room(&self) -> Result<()> {
        let engine = &self.engine;
        let limit = engine.options.in_flight_bytes;
        let appended = engine.appended_bytes.load(Ordering::Relaxed);
        if engine.progress.bytes_in_flight(appended) > limit {
            if engine.options.background {
                engine.doorbell.ring();
                engine.progress.wait_for_room(appended, limit);
            } else {
                engine.commit_now()?;
            }
        }
        Ok(())
    }

    pub fn check_room(&self) -> Result<()> {
        let limit = self.engine.options.in_flight_bytes;
        let appended = self.engine.appended_bytes.load(Ordering::Relaxed);
        let in_flight = self.engine.progress.bytes_in_flight(appended);
        if in_flight > limit { Err(Error::Busy { in_flight, limit }) } else { Ok(()) }
    }

    fn close(&self) -> Result<()> {
        let engine = &self.engine;
        if engine.closed.swap(true, Ordering::AcqRel) {
            return Err(Error::Closed);
        }
        engine.compact_bell.ring();
        let compactor = self.compactor.lock().take();
        join(compactor);
        self.stop.store(true, Ordering::Release);
        engine.doorbell.ring();
        engine.pool_bell.ring();
        engine.index_bell.ring();
        engine.publish_bell.ring();
        engine.bell.nudge();
        // Not joined with the lock held: a waker may ask for the first lease.
        let threads = std::mem::take(&mut *self.threads.lock());
        join(threads);
        engine.end_waiting();
        // The next process may grant anew what is held here.
        for keyspace in engine.keyspaces.read().iter() {
            engine.leases.for_each_of(keyspace.id, b"", |_, grant| {
                grant.end(Ending::Closed);
            });
        }
        let sealed = if engine.options.read_only { Ok(()) } else { engine.seal_all() };
        if sealed.is_ok() {
            engine.refresh_index_if_due(true);
        }
        // Whoever still waits learns that nothing more will come. Who makes a commit behind locks has made it.
        drop(engine.committer.lock());
        engine.fail_waiting();
        engine.pool.close();
        *self.lock.lock() = None;
        events::closed(&engine.dir);
        engine.wake_overdue();
        sealed
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.engine.closed.load(Ordering::Acquire) {
            // Only `close` can report; what was acknowledged is durable either way.
            let _ = self.close();
        }
    }
}

impl Engine {
    /// Makes everything appended durable, for stores without threads.
    pub(crate) fn commit_now(&self) -> Result<()> {
        let mut committer = self.committer.lock();
        let due = self.commit(&mut committer).map_err(|_| self.indeterminate())?;
        drop(committer);
        drop(due);
        Ok(())
    }

    /// Commits what is left and seals the active segment where it ends, so that the next open reads its
    /// key table and has no tail to wonder about.
    pub(crate) fn seal_all(&self) -> Result<()> {
        if let Some(cause) = self.cause.get() {
            return Err(Error::Poisoned { cause: cause.clone() });
        }
        self.commit_now()?;
        // A group takes a few of the releases that wait. Without room for them the next open waits a little.
        for _ in 0..self.released.len() {
            if self.released.is_empty() {
                break;
            }
            self.commit_now()?;
        }
        let mut committer = self.committer.lock();
        let filled = {
            let mut tail = self.tail.lock();
            self.retire_active(&mut tail);
            tail.filled.pop_front()
        };
        let mut short = None;
        let sealed = match filled {
            Some(filled) => {
                short = Some(sealed_short_bytes(filled.end, &filled.table));
                self.seal(&mut committer, &filled, SealAt::EndOfFrames)
            }
            None => Ok(()),
        };
        // Also when the last frame filled its segment: its seal is as good as one made here.
        let sealed = sealed.and_then(|()| self.pool.note_sealed(committer.before.segment, short));
        sealed.map_err(|e| Error::io("sealing the last segment", e))
    }
}

/// The committer: one group after the other while there is work, an idle frame when there is none.
fn run_committer(engine: &Engine, stop: &AtomicBool) {
    let _wakes = WakesOverdue(engine);
    let _guard = PoisonOnPanic::new(engine);
    let mut expected = 0;
    while !stop.load(Ordering::Acquire) {
        let quiet = engine.quiet.load(Ordering::Acquire);
        let before = engine.progress.durable();
        let heard = engine.doorbell.listen((!quiet).then_some(IDLE));
        if heard == Heard::TimedOut {
            if engine.progress.durable() != before {
                continue;
            }
            engine.append_idle(&mut engine.tail.lock(), true);
            engine.quiet.store(true, Ordering::Release);
        } else {
            engine.gather(expected, stop);
        }
        let mut committer = engine.committer.lock();
        let before = committer.durable;
        let due = engine.commit(&mut committer);
        let last_group = committer.durable.get() - before.get();
        // A few writers fall in step; with more, one half writes while the other is woken.
        expected = if committer.company <= FEW_WRITERS { committer.company } else { last_group };
        drop(committer);
        drop::<Result<Due, _>>(due);
        engine.wake_overdue();
    }
}

/// However the thread ends that wakes the tasks, those that it knows of are woken.
struct WakesOverdue<'e>(&'e Engine);

impl Drop for WakesOverdue<'_> {
    fn drop(&mut self) {
        self.0.wake_overdue();
    }
}

/// Keeps spare segments ready, off the path of any write.
fn run_spares(engine: &Engine, stop: &AtomicBool) {
    let _guard = PoisonOnPanic::new(engine);
    while !stop.load(Ordering::Acquire) {
        // A full disk is told to the write that needs a spare and finds none; it asks again itself.
        if !engine.options.compaction || !engine.is_littered(Who::Writer) {
            let _ = engine.pool.refill();
        }
        engine.check_list();
        engine.pool_bell.listen(None);
    }
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        // Waking a task may drop the last handle in a thread of the store, which cannot wait for itself.
        if thread.thread().id() != thread::current().id() {
            // A thread that panicked has poisoned nothing that is still to be used.
            let _ = thread.join();
        }
    }
}

/// Gives space back while the store takes too much.
fn run_compactor(engine: &Engine, _: &AtomicBool) {
    let _guard = PoisonOnPanic::new(engine);
    while !engine.closed.load(Ordering::Acquire) {
        // What fails is tried again when the next segment is sealed; a write that needs the space is told.
        let done = engine.compact_some(Who::Background);
        engine.note_compaction(&done);
        let more = done.unwrap_or(false);
        if more {
            engine.pool_bell.ring();
        } else {
            let waits = engine.compaction_waits();
            engine.compact_bell.listen(waits.then_some(PATIENCE));
        }
    }
}

/// Hands leases over, and tells whom that concerns.
fn run_leases(engine: &Engine, stop: &AtomicBool) {
    let _guard = PoisonOnPanic::new(engine);
    while !stop.load(Ordering::Acquire) {
        let sleep = engine.tend_leases();
        engine.bell.doorbell.listen(sleep);
    }
}

/// A write that was appended and is on its way to the disk; from the `submit` calls.
///
/// Wait for it with [`Commit::wait`], or `.await` it on any runtime: polling never syncs (but in a store
/// [without threads](Options::without_threads)). Commits become durable in the order they were submitted.
/// Dropping one is harmless: the write goes on. Its lsn is not to be had before it is durable, for after a
/// crash it would name something else.
///
/// Its waker is called by the thread that made the commit, behind all locks. It may call the store, or drop the last
/// handle; but a call that waits for another commit there may wait for itself.
#[must_use = "a submitted write is durable only once its commit says so"]
pub struct Commit {
    engine: Arc<Engine>,
    answer: Answer,
    slot: WakerSlot,
}

impl Commit {
    pub(crate) fn new(shared: &Arc<Shared>, answer: Answer) -> Self {
        let engine = shared.engine.clone();
        if engine.options.background && engine.progress.durable() < answer.rests_on {
            engine.doorbell.ring();
        }
        Commit { engine, answer, slot: WakerSlot::default() }
    }

    /// Waits until the write is durable, or refused for a reason that is.
    ///
    /// # Errors
    /// Any refusal; [`Error::Indeterminate`] when the disk failed on the way.
    pub fn wait(self) -> Result<Lsn> {
        let Answer { rests_on, group, .. } = self.answer;
        if self.engine.progress.durable() < rests_on {
            if self.engine.options.background {
                let waited = self.engine.progress.wait(rests_on, group);
                waited.map_err(|_| self.engine.indeterminate())?;
            } else {
                self.engine.wait_durable(rests_on, group)?;
            }
        }
        self.answer.outcome
    }

    /// Whether the answer is there, so that [`Commit::wait`] gives it at once: the write is durable or refused, or
    /// the store failed or was closed before it was.
    pub fn is_done(&self) -> bool {
        self.engine.progress.is_settled(self.answer.rests_on)
    }
}

impl Future for Commit {
    type Output = Result<Lsn>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let lsn = this.answer.rests_on;
        if !this.engine.options.background && this.engine.progress.durable() < lsn {
            this.engine.commit_now()?;
        }
        match this.engine.progress.poll(lsn, &mut this.slot, cx) {
            Poll::Ready(Ok(())) => Poll::Ready(this.answer.outcome.clone()),
            Poll::Ready(Err(_)) => Poll::Ready(Err(this.engine.indeterminate())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl fmt::Debug for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commit").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}
