//! A disk in memory for a loop device: a FUSE file whose every write and flush is recorded, and fails when asked to.
//!
//! A file system on it is cut off its power by taking the writes that a flush has made durable and any of those behind
//! it: [`Recording::image`]. What the process that uses the file system had been answered by then is read, at
//! each write and flush, from a file of its own on another file system.

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, WriteFlags,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// What a power cut leaves or takes as a whole, as drives have it.
const BLOCK_BYTES: usize = 4096;
const FILE: INodeNo = INodeNo(2);
const FOREVER: Duration = Duration::from_secs(3600);

/// One thing that was asked of the disk, and how many steps had been answered when it was.
struct Event {
    acked: usize,
    what: What,
}

enum What {
    Write { at: usize, bytes: Vec<u8> },
    Flush,
}

/// Which calls fail: once so many steps were answered, so many of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failing {
    pub acked: usize,
    pub writes: usize,
    pub flushes: usize,
}

struct Inner {
    bytes: Vec<u8>,
    events: Vec<Event>,
    acks: File,
    failing: Option<Failing>,
    failed: usize,
}

impl Inner {
    fn acked(&self) -> usize {
        let mut bytes = [0; 8];
        self.acks.read_exact_at(&mut bytes, 0).map_or(0, |()| u64::from_le_bytes(bytes) as usize)
    }

    /// Whether this call is one that is to fail.
    fn fails(&mut self, is_flush: bool) -> bool {
        let acked = self.acked();
        let Some(failing) = &mut self.failing else { return false };
        let left = if is_flush { &mut failing.flushes } else { &mut failing.writes };
        let fails = acked >= failing.acked && *left > 0;
        *left -= fails as usize;
        self.failed += fails as usize;
        fails
    }
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Inner>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let is_dir = inode == INodeNo::ROOT;
        let size = if is_dir { 0 } else { self.lock().bytes.len() as u64 };
        FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_dir { FileType::Directory } else { FileType::RegularFile },
            perm: if is_dir { 0o755 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: BLOCK_BYTES as u32,
        }
    }
}

impl Filesystem for Shared {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "disk" {
            reply.entry(&FOREVER, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &self.attributes(inode));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // No page cache of its own: what is read is what the disk holds.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let inner = self.lock();
        let from = (offset as usize).min(inner.bytes.len());
        let to = (from + size as usize).min(inner.bytes.len());
        reply.data(&inner.bytes[from..to]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut inner = self.lock();
        let at = offset as usize;
        let Some(end) = at.checked_add(data.len()).filter(|&end| end <= inner.bytes.len()) else {
            return reply.error(Errno::EFBIG);
        };
        if inner.fails(false) {
            return reply.error(Errno::EIO);
        }
        inner.bytes[at..end].copy_from_slice(data);
        let acked = inner.acked();
        inner.events.push(Event { acked, what: What::Write { at, bytes: data.to_vec() } });
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut inner = self.lock();
        if inner.fails(true) {
            return reply.error(Errno::EIO);
        }
        let acked = inner.acked();
        inner.events.push(Event { acked, what: What::Flush });
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// The disk while it is attached.
pub struct Disk {
    shared: Shared,
    before: Vec<u8>,
    dir: tempfile::TempDir,
    session: Option<BackgroundSession>,
}

impl Disk {
    /// A disk that holds the bytes of an image.
    pub fn new(image: &Path, acks: &Path) -> Result<Disk, String> {
        let before = std::fs::read(image).map_err(|e| e.to_string())?;
        let acks = File::open(acks).map_err(|e| e.to_string())?;
        let inner = Inner { bytes: before.clone(), events: Vec::new(), acks, failing: None, failed: 0 };
        let shared = Shared(Arc::new(Mutex::new(inner)));
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("tidewall-disk".to_owned())];
        let session = fuser::spawn_mount(shared.clone(), dir.path(), &config)
            .map_err(|e| format!("mounting FUSE: {e}"))?;
        Ok(Disk { shared, before, dir, session: Some(session) })
    }

    /// The file that stands for the disk.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// From now on some calls fail.
    pub fn fail(&self, failing: Option<Failing>) {
        self.shared.lock().failing = failing;
    }

    /// How many calls have failed so far.
    pub fn failed(&self) -> usize {
        self.shared.lock().failed
    }

    /// Everything that was asked of it. Nothing may be mounted from it any more.
    pub fn into_recording(mut self) -> Recording {
        self.session.take().map(BackgroundSession::umount_and_join);
        let events = std::mem::take(&mut self.shared.lock().events);
        let acked = self.shared.lock().acked();
        Recording { before: std::mem::take(&mut self.before), events, acked }
    }
}

/// What was written to a disk, in order.
pub struct Recording {
    before: Vec<u8>,
    events: Vec<Event>,
    acked: usize,
}

/// What a power cut leaves of the blocks that were written since the last flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leaves {
    Nothing,
    Everything,
    /// Each with this chance, in percent.
    Some(u8),
    AllButOne,
    OnlyOne,
}

impl Leaves {
    pub const ALL: [Leaves; 7] = [
        Leaves::Nothing,
        Leaves::Everything,
        Leaves::Some(10),
        Leaves::Some(50),
        Leaves::Some(90),
        Leaves::AllButOne,
        Leaves::OnlyOne,
    ];
}

/// A disk after a power cut.
pub struct Image {
    bytes: Vec<u8>,
    /// How many steps had been answered by then.
    pub acked: usize,
    /// How many blocks were not flushed, and how many of them are there.
    pub pending: usize,
    pub kept: usize,
}

impl Image {
    /// Writes it to a file, without the zeros.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.bytes.len() as u64)?;
        for (n, block) in self.bytes.chunks(16 * BLOCK_BYTES).enumerate() {
            if block.iter().any(|&byte| byte != 0) {
                file.write_all_at(block, (n * 16 * BLOCK_BYTES) as u64)?;
            }
        }
        Ok(())
    }
}

impl Recording {
    pub fn events(&self) -> usize {
        self.events.len()
    }

    pub fn flushes(&self) -> usize {
        self.events.iter().filter(|event| matches!(event.what, What::Flush)).count()
    }

    /// Before which events the power can go once the first step was answered.
    pub fn first_cut(&self) -> usize {
        self.events.iter().position(|event| event.acked > 0).unwrap_or(self.events.len())
    }

    /// The disk, if the power goes before the event at `cut`. One that lies has flushed nothing since its first
    /// flush behind `first_cut`, whatever it said.
    pub fn image(&self, cut: usize, leaves: Leaves, lies: bool, random: &mut fastrand::Rng) -> Image {
        let is_flush = |event: &Event| matches!(event.what, What::Flush);
        let flushed = match lies {
            false => self.events[..cut].iter().rposition(is_flush),
            true => self.events[..cut].iter().position(|event| event.acked > 0 && is_flush(event)),
        };
        let flushed = flushed.unwrap_or(0);
        let mut bytes = self.before.clone();
        for block in blocks(&self.events[..flushed]) {
            block.apply(&mut bytes);
        }
        let pending: Vec<Block<'_>> = blocks(&self.events[flushed..cut]).collect();
        let one = random.usize(0..pending.len().max(1));
        let mut kept = 0;
        for (place, block) in pending.iter().enumerate() {
            let stays = match leaves {
                Leaves::Nothing => false,
                Leaves::Everything => true,
                Leaves::Some(percent) => random.u8(0..100) < percent,
                Leaves::AllButOne => place != one,
                Leaves::OnlyOne => place == one,
            };
            if stays {
                block.apply(&mut bytes);
                kept += 1;
            }
        }
        let acked = self.events.get(cut).map_or(self.acked, |event| event.acked);
        Image { bytes, acked, pending: pending.len(), kept }
    }
}

struct Block<'a> {
    at: usize,
    bytes: &'a [u8],
}

impl Block<'_> {
    fn apply(&self, disk: &mut [u8]) {
        disk[self.at..self.at + self.bytes.len()].copy_from_slice(self.bytes);
    }
}

/// The blocks that were written, in order.
fn blocks(events: &[Event]) -> impl Iterator<Item = Block<'_>> {
    events.iter().flat_map(|event| {
        let (at, bytes) = match &event.what {
            What::Write { at, bytes } => (*at, &bytes[..]),
            What::Flush => (0, &[][..]),
        };
        // The first one may begin inside of a block.
        let head = (BLOCK_BYTES - at % BLOCK_BYTES).min(bytes.len());
        let (first, rest) = bytes.split_at(head);
        let rest = rest.chunks(BLOCK_BYTES).enumerate();
        let rest = rest.map(move |(n, bytes)| Block { at: at + head + n * BLOCK_BYTES, bytes });
        (!first.is_empty()).then_some(Block { at, bytes: first }).into_iter().chain(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_what_was_flushed_and_some_of_the_rest() {
        let write =
            |acked, at, bytes: &[u8]| Event { acked, what: What::Write { at, bytes: bytes.to_vec() } };
        let flush = |acked| Event { acked, what: What::Flush };
        let events =
            vec![write(0, 0, &[1; 8192]), flush(0), write(1, 4096, &[2; 8192]), write(2, 100, &[3; 8])];
        let recording = Recording { before: vec![0; 16384], events, acked: 3 };
        let image = |cut, leaves| recording.image(cut, leaves, false, &mut fastrand::Rng::with_seed(1));
        assert_eq!(image(1, Leaves::Nothing).bytes, vec![0; 16384]);
        let flushed = image(3, Leaves::Nothing);
        assert_eq!((&flushed.bytes[..8192], flushed.acked, flushed.pending), (&[1; 8192][..], 2, 2));
        assert_eq!(flushed.bytes[8192..], [0; 8192]);
        let all = image(4, Leaves::Everything);
        assert_eq!((all.acked, all.pending, all.kept), (3, 3, 3));
        assert_eq!((all.bytes[99], all.bytes[100], all.bytes[108]), (1, 3, 1));
        assert_eq!((all.bytes[4096], all.bytes[12287], all.bytes[12288]), (2, 2, 0));
        assert_eq!(image(4, Leaves::OnlyOne).kept, 1);
        assert_eq!(image(4, Leaves::AllButOne).kept, 2);
        assert_eq!((recording.first_cut(), recording.flushes()), (2, 1));
        let lied = recording.image(4, Leaves::Nothing, true, &mut fastrand::Rng::with_seed(1));
        assert_eq!((lied.bytes, lied.acked, lied.pending), (vec![0; 16384], 3, 5));
    }
}
