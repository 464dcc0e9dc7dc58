//! What the disk can do: writes and syncs without any engine.

use crate::engines::floor::{Pages, zeroed};
use crate::machine::{Weather, sync_file_system};
use crate::measure::{Class, Plan, repeat};
use crate::results::Row;
use crate::store::Res;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The name of their file of results.
pub const NAME: &str = "limits";
const FILE_BYTES: u64 = 64 << 20;

/// Measures each limit once.
pub fn run(dir: &Path, time: Duration, round: usize, out: &mut dyn FnMut(Row) -> Res<()>) -> Res<()> {
    let dir = &dir.join("limits");
    fs::create_dir_all(dir)?;
    let mut measure = |name: &str, threads: usize, once: &(dyn Fn() + Sync)| {
        sync_file_system(dir);
        let plan = Plan { threads, warm_up: Duration::from_millis(50), time, sample: 1, dir };
        let measured = repeat(plan, |_| {
            once();
            Class::First
        });
        let mut row =
            Row { workload: NAME.into(), engine: name.into(), threads, round, figures: BTreeMap::new() };
        measured.note(&mut row, &Weather::now());
        out(row)
    };

    let zeros = zeroed(&dir.join("zeros"), FILE_BYTES, 0)?;
    for (name, bytes) in [
        ("write 150 B, fdatasync; on zeros", 150),
        ("write 4 KiB, fdatasync; on zeros", 4 << 10),
        ("write 64 KiB, fdatasync; on zeros", 64 << 10),
        ("write 1 MiB, fdatasync; on zeros", 1 << 20),
    ] {
        let next = Places::new(bytes);
        let content = vec![7; bytes as usize];
        measure(name, 1, &|| {
            zeros.write_all_at(&content, next.take()).expect("writes");
            zeros.sync_data().expect("syncs");
        })?;
    }
    measure("fdatasync with nothing to write", 1, &|| zeros.sync_data().expect("syncs"))?;

    let content = [7; 4 << 10];
    let reserved = reserved(&dir.join("reserved"))?;
    let next = Places::new(4 << 10);
    measure("write 4 KiB, fdatasync; reserved, never written", 1, &|| {
        reserved.write_all_at(&content, next.take()).expect("writes");
        reserved.sync_data().expect("syncs");
    })?;
    let appended = File::create(dir.join("appended"))?;
    let end = AtomicU64::new(0);
    measure("write 4 KiB, fdatasync; appending", 1, &|| {
        appended.write_all_at(&content, end.fetch_add(4 << 10, Ordering::Relaxed)).expect("writes");
        appended.sync_data().expect("syncs");
    })?;

    let direct = zeroed(&dir.join("direct"), FILE_BYTES, libc::O_DIRECT | libc::O_DSYNC)?;
    for threads in [1, 2, 4, 8] {
        let next = Places::new(4 << 10);
        let pages: Vec<Mutex<Pages>> = (0..threads).map(|_| Mutex::new(Pages::new(4 << 10))).collect();
        let turn = AtomicU64::new(0);
        measure("direct write of 4 KiB, synchronous; on zeros", threads, &|| {
            // Some page that nobody writes from right now: there are as many as threads.
            let from = turn.fetch_add(1, Ordering::Relaxed) as usize;
            let mut pages = (from..).find_map(|at| pages[at % threads].try_lock()).expect("endless");
            direct.write_all_at(pages.fill(&content), next.take()).expect("writes");
        })?;
    }
    fs::remove_dir_all(dir)?;
    Ok(())
}

/// Places for writes of one size, front to back and over again.
struct Places {
    bytes: u64,
    next: AtomicU64,
}

impl Places {
    fn new(bytes: u64) -> Self {
        Places { bytes, next: AtomicU64::new(0) }
    }

    fn take(&self) -> u64 {
        let count = FILE_BYTES / self.bytes;
        self.next.fetch_add(1, Ordering::Relaxed) % count * self.bytes
    }
}

/// A file whose blocks are reserved and never written: the first write into one has the file system write its
/// journal.
fn reserved(path: &Path) -> Res<File> {
    let file = File::create(path)?;
    // SAFETY: a system call on a descriptor that is open.
    let failed = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, FILE_BYTES as libc::off_t) };
    if failed != 0 {
        return Err(std::io::Error::from_raw_os_error(failed).into());
    }
    file.sync_all()?;
    Ok(file)
}
