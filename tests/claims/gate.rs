//! A disk whose syncs wait at a gate, so that a test can look at what is on its way.

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use tidewall::storage::{Access, File, Mapping, SimDisk, Storage};

#[derive(Clone, Debug)]
pub struct Gate {
    disk: SimDisk,
    shut: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    pub fn new() -> Self {
        Gate { disk: SimDisk::new(), shut: Arc::default() }
    }

    pub fn shut(&self) {
        *self.shut.0.lock().unwrap() = true;
    }

    pub fn open_up(&self) {
        *self.shut.0.lock().unwrap() = false;
        self.shut.1.notify_all();
    }
}

impl Storage for Gate {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        self.disk.lock(name)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(Gated { file: self.disk.open(name, access)?, shut: self.shut.clone() }))
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
        "gate".to_owned()
    }
}

#[derive(Debug)]
struct Gated {
    file: Arc<dyn File>,
    shut: Arc<(Mutex<bool>, Condvar)>,
}

impl File for Gated {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.file.write_at(buf, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut shut = self.shut.0.lock().unwrap();
        while *shut {
            shut = self.shut.1.wait(shut).unwrap();
        }
        drop(shut);
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
