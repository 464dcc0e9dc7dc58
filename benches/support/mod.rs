//! What every benchmark prints its figures beside: the floor of the machine, measured in the same run.
#![allow(dead_code, clippy::disallowed_methods)]

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};
use tidewall::{Db, Keyspace, KeyspaceOptions, Options, Token, Tokens};

/// A store in a fresh directory of the working directory's file system: a temporary directory may be
/// memory, where a sync costs nothing and a figure means nothing.
pub struct Bench {
    pub db: Db,
    pub rows: Keyspace,
    pub dir: tempfile::TempDir,
}

const SEGMENT_BYTES: u32 = 64 << 20;

pub fn store() -> Bench {
    let dir = dir();
    let db =
        Options::new().segment_bytes(SEGMENT_BYTES).open(dir.path().join("data")).expect("the store opens");
    let rows = db.keyspace("rows", external()).expect("the keyspace opens");
    // The spares of a new store are still being filled with zeros: that is not what is measured.
    while db.stats().disk_bytes < 4 * SEGMENT_BYTES as u64 {
        std::thread::yield_now();
    }
    Bench { db, rows, dir }
}

pub fn dir() -> tempfile::TempDir {
    let base = Path::new(env!("CARGO_TARGET_TMPDIR"));
    tempfile::tempdir_in(base).expect("the target directory is writable")
}

pub fn external() -> KeyspaceOptions {
    KeyspaceOptions::new().tokens(Tokens::External)
}

pub fn token(number: u64) -> Token {
    Token::new(number).expect("in range")
}

/// A 16-byte key, cheap to make.
pub fn key(n: u64) -> [u8; 16] {
    let mut key = *b"a key..........!";
    key[8..].copy_from_slice(&n.to_be_bytes());
    key
}

/// A cheap sequence of random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }
}

pub const VALUE: [u8; 100] = [7; 100];

/// One write and one `fdatasync` of `bytes` on a file of zeros: what a durable write cannot beat.
pub struct SyncFloor {
    file: File,
    bytes: Vec<u8>,
    at: u64,
    _dir: tempfile::TempDir,
}

const FLOOR_FILE: u64 = 64 << 20;

impl SyncFloor {
    pub fn new(bytes: usize) -> Self {
        let dir = dir();
        let path = dir.path().join("floor");
        std::fs::write(&path, vec![0; FLOOR_FILE as usize]).expect("room for the floor");
        let file = OpenOptions::new().write(true).open(&path).expect("just written");
        file.sync_all().expect("syncs");
        SyncFloor { file, bytes: vec![7; bytes], at: 0, _dir: dir }
    }

    pub fn once(&mut self) {
        if self.at + self.bytes.len() as u64 > FLOOR_FILE {
            self.at = 0;
        }
        write_at(&self.file, &self.bytes, self.at);
        self.file.sync_data().expect("syncs");
        self.at += self.bytes.len() as u64;
    }
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], at: u64) {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at).expect("writes");
}

#[cfg(windows)]
fn write_at(file: &File, bytes: &[u8], at: u64) {
    std::os::windows::fs::FileExt::seek_write(file, bytes, at).expect("writes");
}

/// The time that `work` takes on each of `threads` threads at once.
pub fn on_threads(threads: u64, work: impl Fn(u64) + Sync) -> Duration {
    let barrier = std::sync::Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                barrier.wait();
                work(thread);
                barrier.wait();
            });
        }
        barrier.wait();
        let start = Instant::now();
        barrier.wait();
        start.elapsed()
    })
}
