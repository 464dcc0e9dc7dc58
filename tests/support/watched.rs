//! The simulated disk with somebody beside it who is told of writes and syncs.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use tidewall::storage::{Access, File, Mapping, SimDisk, Storage};

pub trait Watch: Clone + Debug + Send + Sync + 'static {
    /// Data is about to be synced, and is when this returns.
    fn before_sync(&self) {}

    /// So many bytes were written.
    fn after_write(&self, _bytes: usize) {}
}

#[derive(Debug)]
pub struct Watched<W> {
    disk: SimDisk,
    watch: W,
}

impl<W: Watch> Watched<W> {
    pub fn by(watch: &W) -> Self {
        Watched { disk: SimDisk::new(), watch: watch.clone() }
    }
}

impl<W: Watch> Storage for Watched<W> {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        self.disk.lock(name)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(WatchedFile { file: self.disk.open(name, access)?, watch: self.watch.clone() }))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.disk.sync_dir()
    }

    fn describe(&self) -> String {
        "a disk that is watched".to_owned()
    }
}

#[derive(Debug)]
struct WatchedFile<W> {
    file: Arc<dyn File>,
    watch: W,
}

impl<W: Watch> File for WatchedFile<W> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let written = self.file.write_at(buf, offset)?;
        self.watch.after_write(written);
        Ok(written)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.watch.before_sync();
        self.file.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn map(&self, len: usize) -> io::Result<Mapping> {
        self.file.map(len)
    }
}
