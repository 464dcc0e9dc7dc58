//! A disk that stands still: nothing that needs it is answered, and nothing that does not is lost.
#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{block_on, eventually, ms, poll_once};
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use tidewall::storage::{Access, File, Mapping, SimDisk, Storage};
use tidewall::{Db, Error, KeyspaceOptions, ManualClock, Options};

/// A disk whose syncs stand still while the gate is shut.
#[derive(Clone)]
struct Slow {
    disk: SimDisk,
    gate: Arc<(Mutex<bool>, Condvar)>,
}

#[derive(Debug)]
struct SlowFile(Arc<dyn File>, Slow);

impl Slow {
    fn shut(&self, shut: bool) {
        *self.gate.0.lock().unwrap() = shut;
        self.gate.1.notify_all();
    }

    fn pass(&self) {
        let mut shut = self.gate.0.lock().unwrap();
        while *shut {
            shut = self.gate.1.wait(shut).unwrap();
        }
    }
}

struct Opened<'s>(&'s Slow);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.shut(false);
    }
}

impl fmt::Debug for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slow")
    }
}

impl Storage for Slow {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        self.disk.lock(name)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(SlowFile(self.disk.open(name, access)?, self.clone())))
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
        "a slow disk".into()
    }
}

impl File for SlowFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.0.write_at(buf, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn map(&self, len: usize) -> io::Result<Mapping> {
        self.0.map(len)
    }
}

#[test]
fn nothing_that_needs_the_disk_is_answered_while_it_stands_still() {
    let slow = Slow { disk: SimDisk::new(), gate: Arc::new((Mutex::new(false), Condvar::new())) };
    let clock = ManualClock::new();
    let db: Db = Options::new().storage(slow.clone()).clock(clock.clone()).open("slow").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let held = jobs.lease(b"held").ttl(ms(100)).acquire().unwrap();
    let expiring = jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    slow.shut(true);
    thread::scope(|scope| {
        // Also when an assertion fails: the threads would wait for it.
        let _opened = Opened(&slow);
        let taking_over = {
            let (jobs, clock) = (&jobs, &clock);
            scope.spawn(move || {
                clock.advance(ms(50));
                jobs.lease(b"f").ttl(ms(100)).wait(ms(10_000)).acquire().unwrap()
            })
        };
        // Not `stats`: that counts the bytes on the disk, and waits for a file that is being made.
        eventually(|| jobs.holders(b"f").first().is_some_and(|holder| holder.waiting == 1));
        // Three times the ttl go by, while the holder of the other lease renews.
        for _ in 0..6 {
            held.renew().unwrap();
            clock.advance(ms(50));
        }
        // The grant is appended, and nobody has it; those who ask are not told that it is held, either. (Before
        // that they are told that somebody waits.)
        let end = std::time::Instant::now() + ms(60_000);
        let asking = loop {
            let mut asking = Box::pin(jobs.lease(b"f").acquire_async());
            match poll_once(asking.as_mut()) {
                std::task::Poll::Pending => break asking,
                std::task::Poll::Ready(answer) => {
                    assert!(matches!(answer, Err(Error::Held { .. })), "{answer:?}")
                }
            }
            assert!(std::time::Instant::now() < end);
        };
        assert!(!taking_over.is_finished());
        assert_eq!(
            jobs.mark(b"f").unwrap().unwrap().get(),
            expiring.token().get(),
            "not before it is durable"
        );
        held.renew().unwrap();
        slow.shut(false);
        let new = taking_over.join().unwrap();
        assert!(matches!(block_on(asking), Err(Error::Held { .. })));
        assert!(held.is_live(), "renewed all the time, revoked by nobody");
        assert_eq!(new.token().get(), 3);
        assert!(matches!(jobs.put(expiring.token(), b"f", b"late"), Err(Error::Fenced { .. })));
    });
}
