//! The seam between the log and a disk.
//!
//! One job: name the few calls the log makes, and what it assumes of them. [`Disk`] makes them on
//! real files; `SimDisk` (feature `testkit`) is a disk in memory that forgets, tears and fails exactly
//! as the assumptions below permit, so that every crash can be tried.
//!
//! # What is assumed of a disk
//!
//! * **A1** After [`File::sync_data`] returned `Ok`, every byte written before the call is on the
//!   medium, and so is the length needed to read it.
//! * **A2** Bytes written and not yet synced may be on the medium or not, sector by sector (512
//!   bytes), in any subset and any order; one sector may be torn at any byte.
//! * **A3** A length set or grown and not yet synced is independent of the bytes.
//! * **A4** Creating, linking, renaming and removing a file are each durable only after
//!   [`Storage::sync_dir`]; until then each of them may or may not have happened.
//! * **A5** A failed sync says nothing: the bytes may be on the medium or not, the cache may hold
//!   the new or the old ones, and a later sync that succeeds proves nothing about them.
//! * **A6** A write that fails, or is short, may have changed any of the bytes it was given.
//! * **A7** Overwriting bytes that were written and synced before allocates nothing, except on
//!   copy-on-write file systems, where it may fail with "no space" at the write or at the sync.
//! * **A8** What was read back correctly once may read differently later: every byte is checked.
//!
//! A disk that loses what it acknowledged by a sync is outside of the model; where evidence of it
//! survives in the log, opening names the damage.
//!
//! Read next: `log/`, which is written on this seam alone.

use crate::sync::Arc;
use std::any::Any;
use std::fmt;
use std::io;

mod disk;
mod futex;
#[cfg(any(test, feature = "testkit", fuzzing))]
mod sim;

pub use disk::Disk;
pub(crate) use futex::requeue;
#[cfg(any(test, feature = "testkit", fuzzing))]
pub use sim::{CallKind, Crash, Fault, SimDisk, SyncFailure};

/// Whether there is no room: on the disk, or for who asks.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// How a file is to be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reading only; the file must exist.
    Read,
    /// Reading and writing; the file must exist.
    Write,
    /// Reading and writing a new file; fails with [`io::ErrorKind::AlreadyExists`] if it exists.
    Create,
}

/// One directory of files. All names are plain file names without a separator.
pub trait Storage: Any + Send + Sync + fmt::Debug {
    /// Takes the lock of the directory until the returned value is dropped.
    ///
    /// Creates the lock file if it is missing and never removes it; its content means nothing.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when another handle, in this process or another, holds it.
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>>;

    /// Opens one file.
    ///
    /// # Errors
    /// Whatever the file system says; [`io::ErrorKind::NotFound`] when it must exist and does not.
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>>;

    /// The names in the directory that are regular files and valid UTF-8, in any order.
    ///
    /// # Errors
    /// Whatever the file system says.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Removes a file. Durable only after [`Storage::sync_dir`].
    ///
    /// # Errors
    /// Whatever the file system says.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Renames a file, replacing the target. Durable only after [`Storage::sync_dir`].
    ///
    /// # Errors
    /// Whatever the file system says.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Makes every create, link, rename and remove so far durable.
    ///
    /// # Errors
    /// Whatever the file system says; on systems without the notion it does nothing.
    fn sync_dir(&self) -> io::Result<()>;

    /// Gives a file the same name in another directory too, of the same file system: both names are one
    /// file from then on. Durable only after [`Storage::sync_dir`] of `into`. The usual body says that it
    /// cannot be done, and whoever asked copies.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] when `into` is another kind of storage, [`io::ErrorKind::AlreadyExists`]
    /// when the name is taken there, or whatever the file system says.
    fn link(&self, name: &str, into: &dyn Storage) -> io::Result<()> {
        let _ = (name, into);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// How the directory is called in messages.
    fn describe(&self) -> String;
}

/// One open file. Positions are absolute; nothing here has a cursor.
pub trait File: Send + Sync + fmt::Debug + 'static {
    /// Reads up to `buf.len()` bytes at `offset`; fewer at the end of the file, or at any time.
    ///
    /// # Errors
    /// Whatever the file system says.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes up to `buf.len()` bytes at `offset` and says how many.
    ///
    /// # Errors
    /// Whatever the file system says; see assumption A6.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize>;

    /// Makes everything written so far durable (`fdatasync`).
    ///
    /// # Errors
    /// Whatever the file system says; see assumption A5: never to be retried.
    fn sync_data(&self) -> io::Result<()>;

    /// The length in bytes.
    ///
    /// # Errors
    /// Whatever the file system says.
    fn len(&self) -> io::Result<u64>;

    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// As [`File::len`].
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Cuts or extends the file.
    ///
    /// # Errors
    /// Whatever the file system says.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Whether the file has other names beside the one it was opened by: a checkpoint's, perhaps. Then it
    /// must never be written again, not even when this name is given up. `true` where that is not known.
    ///
    /// # Errors
    /// Whatever the file system says.
    fn is_shared(&self) -> io::Result<bool> {
        Ok(true)
    }

    /// Maps the first `len` bytes read-only. The caller promises that the file is neither written
    /// nor cut below `len` while the mapping lives.
    ///
    /// # Errors
    /// Whatever the file system says; `InvalidInput` if `len` is beyond the end of the file.
    fn map(&self, len: usize) -> io::Result<Mapping>;

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] when the file ends first, else as [`File::read_at`].
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes all of `buf` at `offset`, however many calls that takes.
    ///
    /// # Errors
    /// [`io::ErrorKind::WriteZero`] when the file takes no more, else as [`File::write_at`].
    fn write_all_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.write_at(&buf[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Makes the file `len` bytes long and reserves its blocks, which read as zeros, without writing them
    /// (`fallocate`). `false`: that is not to be had here, and nothing was done.
    ///
    /// # Errors
    /// As [`File::write_at`].
    fn reserve(&self, len: u64) -> io::Result<bool> {
        let _ = len;
        Ok(false)
    }

    /// Writes zeros over the first `len` bytes, so that every block is allocated and written.
    ///
    /// [`File::reserve`] is not enough where little is written at once: the first write into an unwritten
    /// extent makes the sync that covers it commit the file system's journal, which costs as much again as
    /// the sync itself.
    ///
    /// # Errors
    /// As [`File::write_at`].
    fn write_zeros(&self, len: u64) -> io::Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let mut at = 0;
        while at < len {
            let n = (len - at).min(ZEROS.len() as u64);
            self.write_all_at(&ZEROS[..n as usize], at)?;
            at += n;
        }
        Ok(())
    }
}

/// Bytes of a sealed file: a memory map, or a copy where there is no file to map.
pub struct Mapping(Backing);

/// Zeroed memory of `len` bytes that the operating system provides as it is touched, in large pages where
/// it has them: look-ups jump about in it, and a small page each time costs as much as the memory itself.
pub(crate) fn memory(len: usize) -> io::Result<memmap2::MmapMut> {
    let memory = memmap2::MmapMut::map_anon(len.max(1))?;
    #[cfg(target_os = "linux")]
    // Advice only: without large pages it is memory all the same.
    let _ = memory.advise(memmap2::Advice::HugePage);
    Ok(memory)
}

enum Backing {
    Map(memmap2::Mmap),
    Copy(Box<[u8]>),
}

impl Mapping {
    /// A mapping that owns a copy of the bytes.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Mapping(Backing::Copy(bytes.into_boxed_slice()))
    }

    /// A mapping of a file. Not public: `memmap2` is not 1.0, so its types stay out of the API.
    pub(crate) fn from_map(map: memmap2::Mmap) -> Self {
        Mapping(Backing::Map(map))
    }
}

impl std::ops::Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Backing::Map(map) => map,
            Backing::Copy(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("bytes", &self.len()).finish()
    }
}
