//! An open file of the simulated disk.

use super::fault::CallKind;
use super::{Access, Call, File, SimDisk};
use crate::storage::Mapping;
use crate::sync::Arc;
use std::io;

/// The longest file: a wild offset should be an error, not an allocation.
const FILE_BYTES_MAX: u64 = 1 << 36;

#[derive(Debug)]
pub(super) struct SimFile {
    disk: SimDisk,
    name: Arc<str>,
    node: u64,
    writable: bool,
    // Counted, never read: while it lives, the file is not swept.
    _handle: Arc<()>,
}

impl SimFile {
    pub fn new(disk: SimDisk, name: &str, node: u64, access: Access, handle: Arc<()>) -> Self {
        SimFile { disk, name: name.into(), node, writable: access != Access::Read, _handle: handle }
    }

    fn call<'a>(&'a self, kind: CallKind, offset: u64, len: u64) -> Call<'a> {
        Call { kind, name: &self.name, offset, len, bytes: &[], changes: false }
    }

    fn check_change(&self, end: Option<u64>) -> io::Result<u64> {
        if !self.writable {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the file is open for reading only"));
        }
        end.filter(|&end| end <= FILE_BYTES_MAX).ok_or_else(|| io::ErrorKind::FileTooLarge.into())
    }
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut inner = self.disk.lock_inner();
        inner.begin(self.call(CallKind::ReadAt, offset, buf.len() as u64))?;
        let wanted = inner.faults.shorten(buf.len());
        Ok(inner.node(self.node).cache.read(&mut buf[..wanted], offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let mut inner = self.disk.lock_inner();
        let call = self.call(CallKind::WriteAt, offset, buf.len() as u64);
        let (wanted, refused) = match inner.begin(Call { bytes: buf, changes: true, ..call }) {
            Ok(()) => (inner.faults.shorten(buf.len()), None),
            Err(refusal) => (refusal.partial.min(buf.len()), Some(refusal.error)),
        };
        let end = match self.check_change(offset.checked_add(wanted as u64)) {
            Ok(end) => inner.room(self.node, end),
            Err(error) => return Err(refused.unwrap_or(error)),
        };
        let fits = end.saturating_sub(offset) as usize;
        // Not even an empty write: it could bring other sectors to the medium of a stopped disk.
        if fits > 0 {
            inner.write(self.node, &buf[..fits], offset);
        }
        match refused {
            Some(error) => Err(error),
            None if fits == 0 && wanted > 0 => Err(io::ErrorKind::StorageFull.into()),
            None => Ok(fits),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut inner = self.disk.lock_inner();
        if let Err(refusal) = inner.begin(self.call(CallKind::SyncData, 0, 0)) {
            if refusal.planned {
                inner.fail_sync(self.node);
            }
            return Err(refusal.error);
        }
        inner.node(self.node).sync();
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        let mut inner = self.disk.lock_inner();
        inner.begin(self.call(CallKind::Len, 0, 0))?;
        Ok(inner.node(self.node).cache.len)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut inner = self.disk.lock_inner();
        inner.begin(Call { changes: true, ..self.call(CallKind::SetLen, 0, len) })?;
        let len = self.check_change(Some(len))?;
        if inner.room(self.node, len) < len {
            return Err(io::ErrorKind::StorageFull.into());
        }
        inner.node(self.node).set_len(len);
        Ok(())
    }

    fn reserve(&self, len: u64) -> io::Result<bool> {
        self.set_len(len).map(|()| true)
    }

    fn is_shared(&self) -> io::Result<bool> {
        let mut inner = self.disk.lock_inner();
        inner.begin(self.call(CallKind::IsShared, 0, 0))?;
        Ok(inner.names.values().filter(|&&node| node == self.node).count() > 1)
    }

    fn map(&self, len: usize) -> io::Result<Mapping> {
        let mut inner = self.disk.lock_inner();
        inner.begin(self.call(CallKind::Map, 0, len as u64))?;
        let image = &inner.node(self.node).cache;
        if len as u64 > image.len {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping beyond the end of the file"));
        }
        let mut bytes = vec![0; len];
        image.read(&mut bytes, 0);
        Ok(Mapping::from_bytes(bytes))
    }
}
