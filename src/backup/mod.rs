//! Copies of a store: made while it runs, and made into a store again.
//!
//! One job: what is new in a directory becomes a store, or a checkpoint, in its last step; whatever goes wrong
//! before leaves nothing that opens, and an error leaves nothing at all. Promises L2 and F2 across copies:
//! what comes of one has another id, and grants and admits nothing that the original may have seen.
//!
//! Read next: `checkpoint.rs`, then `restore.rs` and `salvage.rs`.

use crate::append::{frame_bytes, room};
use crate::db::{assemble, take_lock};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::header::{End, StoreBlock};
use crate::format::name;
use crate::log::list::List;
use crate::log::pool::Need;
use crate::op::{KeyspaceValue, Kind, Links, Op};
use crate::options::{Options, Progress, Tokens};
use crate::recover::Recovered;
use crate::storage::{Access, Disk, File, Storage, is_full};
use crate::sync::{Arc, Mutex};
use crate::types::{KeyspaceId, Lsn, Mark, Token};
use std::io;
use std::path::Path;

mod checkpoint;
mod restore;
mod salvage;

pub use checkpoint::Checkpoint;
pub use restore::{Restore, Restored, restore};
pub use salvage::{Salvage, Salvaged, salvage};

/// How far what comes of a copy is ahead of it, unless told otherwise.
const BUMP: u64 = 1 << 32;

/// A directory that is being filled. Dropped before it is kept, it is as it was.
struct Output {
    storage: Arc<dyn Storage>,
    /// Where this call made the directory itself.
    made: Option<Disk>,
    /// Files that were made here, as long as the directory is not locked: another call may be filling it too.
    files: Mutex<Vec<String>>,
    lock: Option<Box<dyn Send + Sync>>,
    kept: bool,
}

impl Output {
    /// The directory at `path`, which must be empty or missing.
    fn create(path: &Path) -> Result<Self> {
        let (disk, made) = Disk::create_empty(path).map_err(|e| match e.kind() {
            io::ErrorKind::DirectoryNotEmpty => not_empty(&path.display().to_string()),
            _ => Error::io(format!("creating the directory {}", path.display()), e),
        })?;
        let made = made.then(|| disk.clone());
        Ok(Self::new(Arc::new(disk), made))
    }

    /// Another kind of directory, which must be empty.
    fn over(storage: Arc<dyn Storage>) -> Result<Self> {
        let dir = storage.describe();
        let names = storage.list().map_err(|e| Error::io(format!("listing {dir}"), e))?;
        if names.iter().any(|file_name| file_name != name::LOCK) {
            return Err(not_empty(&dir));
        }
        Ok(Self::new(storage, None))
    }

    fn new(storage: Arc<dyn Storage>, made: Option<Disk>) -> Self {
        Output { storage, made, files: Mutex::default(), lock: None, kept: false }
    }

    /// Keeps everybody else out. From here on every file of a store in it is one of this call.
    fn lock(&mut self) -> Result<()> {
        self.lock = take_lock(&*self.storage, &Options::new())?;
        Ok(())
    }

    /// Gives a file a second name here, and says whether that could be done.
    fn link(&self, from: &dyn Storage, file_name: &str) -> bool {
        let linked = from.link(file_name, &*self.storage).is_ok();
        if linked {
            self.files.lock().push(file_name.to_owned());
        }
        linked
    }

    /// Makes what is here a checkpoint: the last step.
    fn name_checkpoint(&self, block: StoreBlock) -> Result<()> {
        self.storage.sync_dir().map_err(|e| self.failed(0, e))?;
        self.files.lock().extend([name::STORE_NEW, name::STORE].map(str::to_owned));
        List::create(self.storage.clone(), block).map_err(|e| self.failed(0, e)).map(drop)
    }

    fn keep(mut self) {
        self.kept = true;
    }

    /// What failed here, as an error.
    fn failed(&self, bytes: u64, e: io::Error) -> Error {
        let dir = self.storage.describe();
        match is_full(&e) {
            true => Error::NoSpace { dir, bytes },
            false => Error::io(format!("writing a copy into {dir}"), e),
        }
    }

    /// A copy of a file, up to the length that it is listed with (it is shorter where a write of the list failed behind its
    /// seal), synced; answers how long it is. Its name is not durable, yet.
    fn copy(&self, file_name: &str, file: &dyn File, most: u64) -> Result<u64> {
        let from = |e| Error::io(format!("reading {file_name}"), e);
        let len = file.len().map_err(from)?.min(most);
        let into = |e| self.failed(len, e);
        let copy = self.storage.open(file_name, Access::Create).map_err(into)?;
        self.files.lock().push(file_name.to_owned());
        let mut chunk = vec![0; (1 << 20).min(len as usize)];
        let mut at = 0;
        while at < len {
            let n = (len - at).min(chunk.len() as u64) as usize;
            file.read_exact_at(&mut chunk[..n], at).map_err(from)?;
            copy.write_all_at(&chunk[..n], at).map_err(into)?;
            at += n as u64;
        }
        copy.sync_data().map_err(into)?;
        Ok(len)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // What cannot be removed does not open either.
        let mut files = std::mem::take(&mut *self.files.lock());
        if self.lock.is_some() {
            files = self.storage.list().unwrap_or_default();
            let lists = [name::STORE, name::STORE_NEW, name::STORE_PART];
            let is_part =
                |file: &str| name::parse_segment(file).is_some() || name::parse_index(file).is_some();
            files.retain(|file| is_part(file) || lists.contains(&&**file));
        }
        for file_name in files {
            let _ = self.storage.remove(&file_name);
        }
        if let Some(made) = &self.made {
            let _ = made.remove(name::LOCK);
            let _ = made.remove_dir();
        }
    }
}

fn not_empty(dir: &str) -> Error {
    Error::invalid(format!(
        "{dir} is not empty: name a directory that is, or that does not exist; if an interrupted copy left its \
         files there, remove them"
    ))
}

/// What a progress callback is told.
fn progress(options: &Options, done: usize, all: usize) {
    if let Some(callback) = &options.progress {
        callback(Progress { segments_done: done as u32, segments_all: all as u32, ops: 0 });
    }
}

/// A store in the making: an engine over a list that no open finds yet.
struct Making {
    engine: Engine,
    counter: u64,
}

impl Making {
    /// Goes on behind what was recovered, `bump` further on: in lsns, and in tokens from `counter`.
    fn new(
        storage: Arc<dyn Storage>,
        options: Options,
        mut recovered: Recovered,
        counter: u64,
        bump: u64,
    ) -> Result<Self> {
        let counter = counter.checked_add(bump).filter(|&counter| counter <= Token::MAX.get());
        let counter = counter.ok_or(Error::TokensExhausted)?;
        let lsn = recovered.before.lsn.get().checked_add(bump).filter(|&lsn| lsn < u64::MAX >> 1);
        let lsn = Lsn::new(lsn.ok_or_else(|| Error::invalid("the bump leaves no lsns to go on with"))?);
        // The next segment follows nothing: lsns jump in front of it.
        recovered.before = End { lsn, ..End::default() };
        recovered.next = lsn.next();
        let name = storage.describe();
        let making = Making { engine: assemble(storage, name, options, recovered), counter };
        let op = Op { kind: Kind::Counter, token: counter, ..op(KeyspaceId(0), b"", b"") };
        making.write(&op)?;
        making.engine.tail.lock().counter = counter;
        Ok(making)
    }

    fn write(&self, op: &Op<'_>) -> Result<()> {
        let room = room(frame_bytes(1, op.key.len() + op.value.len()), 1);
        self.engine.with_room(room, Need::Privileged, |tail| self.engine.append_op(tail, op)).map(drop)
    }

    /// Upholds F2 and L2: shuts out every token that the original may have seen: those of this store by a floor that is above
    /// them all; those from elsewhere until the keyspace is told a floor. Answers which keyspaces need one.
    fn shut_out(&self) -> Result<Vec<String>> {
        let mut need_floor = Vec::new();
        for keyspace in self.engine.keyspaces.read().iter() {
            match keyspace.options.tokens {
                Tokens::Store => {
                    // Exclusive: a token equal to it was perhaps granted too.
                    let op = Op { kind: Kind::Floor, token: self.counter, ..op(keyspace.id, b"", &[1]) };
                    self.write(&op)?;
                }
                Tokens::External => {
                    let value = KeyspaceValue { options: keyspace.options, needs_floor: true }.encode();
                    let op = Op { kind: Kind::Keyspace, ..op(keyspace.id, keyspace.name.as_bytes(), &value) };
                    self.write(&op)?;
                    need_floor.push(keyspace.name.clone());
                }
            }
        }
        Ok(need_floor)
    }

    /// Makes everything durable, and then the store one that opens. Answers its last lsn.
    fn finish(self) -> Result<Lsn> {
        self.engine.seal_all()?;
        let lsn = self.engine.progress.durable();
        let dir = &self.engine.dir;
        self.engine.pool.publish().map_err(|e| Error::io(format!("naming the store in {dir}"), e))?;
        Ok(lsn)
    }

    fn counter(&self) -> Mark {
        Mark::from_number(self.counter)
    }
}

/// An op without a token or links.
fn op<'a>(keyspace: KeyspaceId, key: &'a [u8], value: &'a [u8]) -> Op<'a> {
    Op { kind: Kind::Put, keyspace, token: 0, key, value, links: Links::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Db;
    use crate::keyspace::Keyspace;
    use crate::options::KeyspaceOptions;
    use crate::storage::SimDisk;

    fn open(disk: &SimDisk, seed: u64) -> Db {
        let options = Options::new().storage(disk.clone()).without_threads();
        options.deterministic(seed).segment_bytes(16 << 10).open("sim").unwrap()
    }

    fn rows(db: &Db) -> Keyspace {
        db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
    }

    /// A floor from before a restore that lies behind it, as compaction moves ops, opens nothing.
    #[test]
    fn an_older_floor_carried_on_opens_no_closed_keyspace() {
        let disk = SimDisk::new();
        let db = open(&disk, 1);
        rows(&db).raise_all(Token::new(5).unwrap()).unwrap();
        let lsn = db.last_lsn();
        db.close().unwrap();
        Restore::new().deterministic(2).run_on(disk.clone(), disk.dir("new")).unwrap();
        for (seed, moved, opens) in [(3, Some(lsn), false), (5, None, true)] {
            let db = open(&disk.dir("new"), seed);
            let links = Links { moved, ..Links::default() };
            let id = rows(&db).state.id;
            let floor = Op { kind: Kind::Floor, token: 5, links, ..op(id, b"", &[0]) };
            let engine = &db.shared.engine;
            let room = room(frame_bytes(1, 1), 1);
            engine.with_room(room, Need::Privileged, |tail| engine.append_op(tail, &floor)).unwrap();
            engine.commit_now().unwrap();
            db.close().unwrap();
            let db = open(&disk.dir("new"), seed + 1);
            let put = rows(&db).put(Token::new(9).unwrap(), b"a", b"x");
            assert_eq!(put.is_ok(), opens, "{put:?}");
        }
    }
}
