//! A directory of the real file system.
//!
//! One job: make each call of the seam with one call of the system. Promises nothing beyond what
//! the file system does; the assumptions are listed in `mod.rs`. Never retries, caches or guesses.
//!
//! * **Sync** is [`std::fs::File::sync_data`]: `fdatasync` on Linux, which also makes the length
//!   durable when it is needed to read the bytes; on macOS the standard library calls
//!   `fcntl(F_FULLFSYNC)`, which reaches the medium where `fsync` stops at the drive's cache.
//! * **Lock** is `flock` on a permanent file. It belongs to the opened file, not to the process, so
//!   a second handle in the same process is refused as another process is; and the system drops it
//!   when the process dies. The file is never removed: whoever removes a lock file lets one process
//!   lock the old file and another the new one. The standard library opens with `O_CLOEXEC`, so a
//!   child does not inherit the lock.
//! * **Directory sync** has no meaning on Windows and does nothing there.
//!
//! Read next: `sim/`, the same seam with every failure on demand.
#![expect(clippy::disallowed_methods, reason = "this module is where files come from")]

use super::{Access, File, Mapping, Storage};
use crate::sync::Arc;
use std::any::Any;
use std::fs::{self, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// A real directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disk {
    // Canonical: neither a change of the working directory nor a moved symlink may split one store
    // over two directories.
    dir: PathBuf,
}

impl Disk {
    /// The directory at `path`, created if it is missing. Its parent must exist.
    ///
    /// The parent is synced in either case: an earlier attempt may have died between creating the
    /// directory and syncing, and a store in a directory that vanishes at the next power cut has
    /// lost everything it acknowledged.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] naming the parent when that is missing, [`ErrorKind::NotADirectory`]
    /// when `path` or its parent is something else, or whatever the file system says.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let created = match fs::create_dir(path) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
            // A file system that is read-only says so before it says that the directory exists.
            Err(_) if path.is_dir() => false,
            Err(e) if e.kind() == ErrorKind::NotFound => return Err(missing(parent_of(path))),
            Err(e) if e.kind() == ErrorKind::NotADirectory => return Err(no_directory(parent_of(path))),
            Err(e) => return Err(e),
        };
        let disk = Disk::existing(path)?;
        match disk.dir.parent().map(sync_directory) {
            None | Some(Ok(())) => {}
            // A directory that someone else made, under a parent that we may not read or that cannot
            // change, was made durable by them or is beyond our reach.
            Some(Err(e)) if !created && is_beyond_us(&e) => {}
            Some(Err(e)) => return Err(e),
        }
        Ok(disk)
    }

    /// The directory at `path`, which must exist. Creates and changes nothing.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] when there is nothing, [`ErrorKind::NotADirectory`] when it is
    /// something else, or whatever the file system says.
    pub fn existing(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let dir = match path.canonicalize() {
            Ok(dir) => dir,
            Err(e) if e.kind() == ErrorKind::NotFound => return Err(missing(path)),
            Err(e) => return Err(e),
        };
        if !fs::metadata(&dir)?.is_dir() {
            return Err(no_directory(path));
        }
        Ok(Disk { dir })
    }

    /// The directory at `path`, which holds nothing or is made by this call; and whether it was made.
    ///
    /// # Errors
    /// [`ErrorKind::DirectoryNotEmpty`] when something lies there, else as [`Disk::create`].
    pub(crate) fn create_empty(path: &Path) -> io::Result<(Self, bool)> {
        let existed = path.exists();
        let disk = Disk::create(path)?;
        for entry in fs::read_dir(&disk.dir)? {
            // A lock file is all that is left of a copy that was given up.
            if entry?.file_name() != "LOCK" {
                return Err(ErrorKind::DirectoryNotEmpty.into());
            }
        }
        Ok((disk, !existed))
    }

    /// Removes the directory, if nothing lies in it.
    pub(crate) fn remove_dir(&self) -> io::Result<()> {
        fs::remove_dir(&self.dir)
    }

    /// Where it is, as an absolute path without symlinks.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The path of a file; a name that would leave the directory is refused.
    fn at(&self, name: &str) -> io::Result<PathBuf> {
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(std::path::Component::Normal(only)), None) if only == name => Ok(self.dir.join(name)),
            _ => Err(io::Error::new(ErrorKind::InvalidInput, format!("{name:?} is not a plain file name"))),
        }
    }
}

impl Storage for Disk {
    fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
        let path = self.at(name)?;
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = match opened {
            Ok(file) => file,
            // On a read-only medium the lock must still be taken, and needs no right to write.
            Err(e) if is_beyond_us(&e) => fs::File::open(&path).map_err(|_| e)?,
            Err(e) => return Err(e),
        };
        match file.try_lock() {
            Ok(()) => Ok(Box::new(file)),
            Err(TryLockError::WouldBlock) => Err(ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(e)) => Err(e),
        }
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
        let mut options = OpenOptions::new();
        match access {
            Access::Read => options.read(true),
            Access::Write => options.read(true).write(true),
            Access::Create => options.read(true).write(true).create_new(true),
        };
        Ok(Arc::new(DiskFile(options.open(self.at(name)?)?)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            // The type of the entry itself: a symlink is not followed, so it is not a file here.
            if entry.file_type()?.is_file()
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.at(name)?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.at(from)?, self.at(to)?)
    }

    fn sync_dir(&self) -> io::Result<()> {
        sync_directory(&self.dir)
    }

    fn link(&self, name: &str, into: &dyn Storage) -> io::Result<()> {
        let into: &dyn Any = into;
        let Some(into) = into.downcast_ref::<Disk>() else { return Err(ErrorKind::Unsupported.into()) };
        fs::hard_link(self.at(name)?, into.at(name)?)
    }

    fn describe(&self) -> String {
        self.dir.display().to_string()
    }
}

#[derive(Debug)]
struct DiskFile(fs::File);

impl File for DiskFile {
    #[cfg(unix)]
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.0, buf, offset)
    }

    #[cfg(unix)]
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(&self.0, buf, offset)
    }

    // These two also move the file's cursor, which nothing here looks at.
    #[cfg(windows)]
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self.0, buf, offset)
    }

    #[cfg(windows)]
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_write(&self.0, buf, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    #[cfg(target_os = "linux")]
    #[expect(unsafe_code, reason = "a system call that the standard library does not make")]
    fn reserve(&self, len: u64) -> io::Result<bool> {
        use std::os::fd::AsRawFd;
        let len = libc::off_t::try_from(len).map_err(|_| ErrorKind::FileTooLarge)?;
        loop {
            // SAFETY: the descriptor is open, and the call touches no memory of this process.
            if unsafe { libc::fallocate(self.0.as_raw_fd(), 0, 0, len) } == 0 {
                return Ok(true);
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => return Ok(false),
                _ => return Err(error),
            }
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    #[cfg(unix)]
    fn is_shared(&self) -> io::Result<bool> {
        Ok(std::os::unix::fs::MetadataExt::nlink(&self.0.metadata()?) > 1)
    }

    fn map(&self, len: usize) -> io::Result<Mapping> {
        // Checked, because touching a mapping beyond the end of its file kills the process.
        if len as u64 > self.len()? {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a mapping beyond the end of the file"));
        }
        if len == 0 {
            return Ok(Mapping::from_bytes(Vec::new()));
        }
        map_file(&self.0, len).map(Mapping::from_map)
    }
}

#[allow(unsafe_code)]
fn map_file(file: &fs::File, len: usize) -> io::Result<memmap2::Mmap> {
    // SAFETY: `len` is within the file, and by the contract of `File::map` nobody writes or cuts
    // these bytes while the mapping lives: the store maps sealed segments only, under the lock of
    // the directory, and gives a segment another life only after its last mapping is gone.
    unsafe { memmap2::MmapOptions::new().len(len).map(file) }
}

/// Makes the entries of a directory durable.
#[cfg(not(windows))]
fn sync_directory(dir: &Path) -> io::Result<()> {
    match fs::File::open(dir)?.sync_all() {
        // "The file does not support synchronization": what there is of it happened already.
        Err(e) if e.kind() == ErrorKind::InvalidInput => Ok(()),
        answer => answer,
    }
}

#[cfg(windows)]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}

fn is_beyond_us(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied)
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn missing(path: &Path) -> io::Error {
    io::Error::new(ErrorKind::NotFound, format!("the directory {} does not exist", path.display()))
}

fn no_directory(path: &Path) -> io::Error {
    io::Error::new(ErrorKind::NotADirectory, format!("{} is not a directory", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> (tempfile::TempDir, Disk) {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::create(dir.path().join("store")).unwrap();
        (dir, disk)
    }

    fn kind<T>(answer: io::Result<T>) -> ErrorKind {
        answer.err().expect("this call should have failed").kind()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn reserved_blocks_read_as_zeros_and_take_room() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::existing(dir.path()).unwrap();
        let file = disk.open("f", Access::Create).unwrap();
        if file.reserve(1 << 20).unwrap() {
            assert!(fs::metadata(dir.path().join("f")).unwrap().blocks() * 512 >= 1 << 20);
            assert_eq!(file.len().unwrap(), 1 << 20);
            let mut bytes = vec![7; 1 << 20];
            assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn create_makes_the_directory_once_and_existing_never_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        assert_eq!(kind(Disk::existing(&path)), ErrorKind::NotFound);
        assert!(!path.exists());
        let disk = Disk::create(&path).unwrap();
        assert!(disk.path().is_dir());
        assert_eq!(Disk::create(&path).unwrap(), disk);
        assert_eq!(Disk::existing(&path).unwrap(), disk);
    }

    #[test]
    fn missing_parent_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join("nowhere");
        let error = Disk::create(parent.join("store")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains(&parent.display().to_string()), "{error}");
        assert!(!error.to_string().contains("store"), "{error}");
        assert!(!parent.exists());
    }

    #[test]
    fn file_in_place_of_the_directory_or_its_parent_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"x").unwrap();
        assert_eq!(kind(Disk::create(&file)), ErrorKind::NotADirectory);
        assert_eq!(kind(Disk::existing(&file)), ErrorKind::NotADirectory);
        let error = Disk::create(file.join("store")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
        assert!(error.to_string().contains("file is not a directory"), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"x");
    }

    #[test]
    fn second_lock_in_the_same_process_fails() {
        let (_dir, disk) = scratch();
        let held = disk.lock("LOCK").unwrap();
        assert_eq!(kind(disk.lock("LOCK")), ErrorKind::WouldBlock);
        assert_eq!(kind(Disk::existing(disk.path()).unwrap().lock("LOCK")), ErrorKind::WouldBlock);
        drop(held);
        assert!(disk.path().join("LOCK").exists());
        disk.lock("LOCK").unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn lock_file_that_cannot_be_written_is_locked_all_the_same() {
        // A file that not even root may open for writing, in a directory where nobody may create.
        let disk = Disk::existing("/proc/sys/kernel").unwrap();
        let held = disk.lock("ostype").unwrap();
        assert_eq!(kind(disk.lock("ostype")), ErrorKind::WouldBlock);
        drop(held);
        let error = disk.lock("no-such-file").err().unwrap();
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "{error}");
    }

    #[test]
    fn access_decides_what_open_may_do() {
        let (_dir, disk) = scratch();
        assert_eq!(kind(disk.open("a", Access::Read)), ErrorKind::NotFound);
        assert_eq!(kind(disk.open("a", Access::Write)), ErrorKind::NotFound);
        assert!(disk.list().unwrap().is_empty());
        let file = disk.open("a", Access::Create).unwrap();
        file.write_all_at(b"hello", 0).unwrap();
        assert_eq!(kind(disk.open("a", Access::Create)), ErrorKind::AlreadyExists);
        assert_eq!(file.len().unwrap(), 5);
        let reader = disk.open("a", Access::Read).unwrap();
        assert!(reader.write_at(b"x", 0).is_err());
        disk.open("a", Access::Write).unwrap().write_all_at(b"J", 0).unwrap();
        let mut bytes = [0; 5];
        reader.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"Jello");
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        let (_dir, disk) = scratch();
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a/"] {
            assert_eq!(kind(disk.open(name, Access::Create)), ErrorKind::InvalidInput, "{name:?}");
        }
        assert_eq!(kind(disk.rename("a", "../b")), ErrorKind::InvalidInput);
        assert_eq!(kind(disk.remove("../b")), ErrorKind::InvalidInput);
        assert_eq!(kind(disk.lock("../b")), ErrorKind::InvalidInput);
    }

    #[cfg(unix)]
    #[test]
    fn a_linked_file_is_one_file_with_two_names() {
        let (dir, disk) = scratch();
        let other = Disk::create(dir.path().join("other")).unwrap();
        let file = disk.open("a", Access::Create).unwrap();
        assert!(!file.is_shared().unwrap());
        disk.link("a", &other).unwrap();
        assert!(file.is_shared().unwrap());
        assert_eq!(kind(disk.link("a", &other)), ErrorKind::AlreadyExists);
        assert_eq!(kind(disk.link("b", &other)), ErrorKind::NotFound);
        file.write_all_at(b"both", 0).unwrap();
        let mut bytes = [0; 4];
        other.open("a", Access::Read).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"both");
        other.remove("a").unwrap();
        assert!(!file.is_shared().unwrap());
        assert_eq!(kind(disk.link("a", &crate::storage::SimDisk::new())), ErrorKind::Unsupported);
    }

    #[test]
    fn create_empty_takes_no_directory_that_holds_something() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let (disk, made) = Disk::create_empty(&path).unwrap();
        assert!(made);
        fs::write(path.join("LOCK"), b"").unwrap();
        assert!(!Disk::create_empty(&path).unwrap().1);
        fs::create_dir(path.join("inner")).unwrap();
        assert_eq!(kind(Disk::create_empty(&path)), ErrorKind::DirectoryNotEmpty);
        assert!(disk.remove_dir().is_err());
        fs::remove_dir(path.join("inner")).unwrap();
        fs::remove_file(path.join("LOCK")).unwrap();
        disk.remove_dir().unwrap();
        assert!(!path.exists());
    }

    #[cfg(unix)]
    #[test]
    fn list_is_regular_files_with_utf8_names_only() {
        use std::os::unix::ffi::OsStrExt;
        let (_dir, disk) = scratch();
        disk.open("file", Access::Create).unwrap();
        fs::create_dir(disk.path().join("dir")).unwrap();
        std::os::unix::fs::symlink(disk.path().join("file"), disk.path().join("link")).unwrap();
        // Some file systems refuse such a name, which is as good.
        let _ = fs::write(disk.path().join(std::ffi::OsStr::from_bytes(b"bad\xff")), b"");
        assert_eq!(disk.list().unwrap(), ["file"]);
    }

    #[test]
    fn rename_replaces_and_remove_removes() {
        let (_dir, disk) = scratch();
        disk.open("a", Access::Create).unwrap().write_all_at(b"new", 0).unwrap();
        disk.open("b", Access::Create).unwrap().write_all_at(b"older", 0).unwrap();
        disk.rename("a", "b").unwrap();
        disk.sync_dir().unwrap();
        assert_eq!(disk.list().unwrap(), ["b"]);
        assert_eq!(disk.open("b", Access::Read).unwrap().len().unwrap(), 3);
        disk.remove("b").unwrap();
        assert_eq!(kind(disk.remove("b")), ErrorKind::NotFound);
        assert!(disk.list().unwrap().is_empty());
    }

    #[test]
    fn mapping_shows_the_bytes_and_never_reaches_beyond_the_file() {
        let (_dir, disk) = scratch();
        let file = disk.open("a", Access::Create).unwrap();
        assert!(file.map(0).unwrap().is_empty());
        file.write_zeros(100_000).unwrap();
        file.write_all_at(b"end", 99_997).unwrap();
        file.sync_data().unwrap();
        let map = file.map(100_000).unwrap();
        assert_eq!(&map[99_997..], b"end");
        assert_eq!(file.map(10).unwrap().len(), 10);
        assert_eq!(kind(file.map(100_001)), ErrorKind::InvalidInput);
        drop(map);
        file.set_len(10).unwrap();
        assert_eq!(kind(file.map(11)), ErrorKind::InvalidInput);
    }
}
