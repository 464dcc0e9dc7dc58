//! The bytes of the active segment in memory: the only copy of a value until its segment is sealed.
//!
//! One job: let one appender write at the end while any number of readers read what was appended,
//! without a lock. This is one of the few modules with unsafe code (a locked buffer would put a lock
//! into every read); its interface is safe: there is one [`Appender`], it only moves forward, and a
//! reader gets no byte at or behind the end it has published.
//!
//! Read next: `segment.rs`, the only user.
#![allow(unsafe_code)]

use crate::storage::memory;
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering};
use std::io;
use std::ptr::NonNull;

/// A fixed number of bytes, appended once and never changed.
pub(crate) struct Image {
    /// Where the bytes of `memory` lie. Reached only through this pointer.
    start: NonNull<u8>,
    capacity: usize,
    /// Bytes below are appended and immutable. The appender's release store pairs with the acquire
    /// load of readers.
    end: AtomicUsize,
    memory: memmap2::MmapMut,
}

// SAFETY: the bytes are plain memory owned by the image. Only the one `Appender` writes, only at or
// behind `end`; readers only read below `end`, which the release/acquire pair orders behind the write.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

/// The right to append to an image: there is exactly one.
#[derive(Debug)]
pub(crate) struct Appender(Arc<Image>);

impl Image {
    /// An image of `capacity` bytes that starts with `head` zeros (a block that is never read), and
    /// the one appender.
    pub fn new(capacity: u32, head: u32) -> io::Result<(Arc<Image>, Appender)> {
        Ok(Self::over(memory(capacity.max(head) as usize)?, head))
    }

    fn over(mut memory: memmap2::MmapMut, head: u32) -> (Arc<Image>, Appender) {
        let capacity = memory.len();
        let start = NonNull::from(&mut memory[..]).cast();
        let image = Arc::new(Image { start, capacity, end: AtomicUsize::new(head as usize), memory });
        (image.clone(), Appender(image))
    }

    /// Everything appended so far.
    pub fn bytes(&self) -> &[u8] {
        let end = self.end.load(Ordering::Acquire);
        // SAFETY: `end <= capacity`, and the bytes below `end` are initialised and no longer written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), end) }
    }
}

/// Images that were sealed, to be used again: fresh memory costs more than all that is written into it.
#[derive(Debug, Default)]
pub(crate) struct Images(Mutex<Vec<Arc<Image>>>);

impl Images {
    /// At most so many are kept.
    const MOST: usize = 2;

    /// Keeps an image that nothing is appended to any more; readers may still be in it.
    pub fn keep(&self, image: Arc<Image>) {
        let mut kept = self.0.lock();
        if kept.len() < Self::MOST {
            kept.push(image);
        }
    }

    /// An image as [`Image::new`] gives it, over the memory of one that no reader is in any more where there
    /// is one. What it held stays behind its end, where nobody reads.
    pub fn take(&self, capacity: u32, head: u32) -> io::Result<(Arc<Image>, Appender)> {
        let mut kept = self.0.lock();
        let at = kept
            .iter()
            .position(|image| image.capacity == capacity as usize && Arc::strong_count(image) == 1);
        let free = at.and_then(|at| Arc::into_inner(kept.swap_remove(at)));
        drop(kept);
        match free {
            Some(image) => Ok(Image::over(image.memory, head)),
            None => Image::new(capacity, head),
        }
    }
}

impl Appender {
    /// Appends `bytes` and publishes them to readers.
    pub fn append(&mut self, bytes: &[u8]) {
        let image = &*self.0;
        let end = image.end.load(Ordering::Relaxed);
        assert!(bytes.len() <= image.capacity - end, "space is checked before a frame is appended");
        // SAFETY: in bounds by the assert. `&mut self` of the only appender makes this the only write,
        // no reader has a slice that reaches beyond `end`, so `bytes` cannot overlap the target either.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), image.start.as_ptr().add(end), bytes.len());
        }
        image.end.store(end + bytes.len(), Ordering::Release);
    }

    pub fn end(&self) -> u32 {
        self.0.end.load(Ordering::Relaxed) as u32
    }

    pub fn capacity(&self) -> u32 {
        self.0.capacity as u32
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The safe twin: a vector grown under a lock gives the same bytes at every length.
    #[test]
    fn readers_see_exactly_what_was_appended() {
        let (image, mut appender) = Image::new(1 << 16, 8).unwrap();
        let mut twin = vec![0; 8];
        std::thread::scope(|scope| {
            let reader = image.clone();
            scope.spawn(move || {
                let mut last = 0;
                while last < 8 + 255 * 200 {
                    let bytes = reader.bytes();
                    assert!(bytes.len() >= last);
                    last = bytes.len();
                    for (i, chunk) in bytes[8..].chunks(200).enumerate() {
                        assert_eq!(chunk, [i as u8 + 1; 200]);
                    }
                    std::thread::yield_now();
                }
            });
            for i in 1..=255u8 {
                appender.append(&[i; 200]);
                twin.extend_from_slice(&[i; 200]);
            }
        });
        assert_eq!(image.bytes(), twin);
        assert_eq!(appender.end() as usize, twin.len());
    }

    /// Memory is used again only when nobody reads it.
    #[test]
    fn an_image_that_is_still_read_is_not_used_again() {
        let images = Images::default();
        let (image, mut appender) = images.take(1 << 12, 8).unwrap();
        appender.append(b"first");
        drop(appender);
        images.keep(image.clone());
        let (other, mut appender) = images.take(1 << 12, 8).unwrap();
        appender.append(b"other");
        assert_eq!(&image.bytes()[8..], b"first");
        assert_eq!(&other.bytes()[8..], b"other");
        let start = image.start;
        drop(image);
        let (again, mut appender) = images.take(1 << 12, 8).unwrap();
        assert_eq!(again.start, start, "the memory that is free now");
        assert_eq!(again.bytes().len(), 8, "what it held is not shown");
        appender.append(b"2nd");
        assert_eq!(&again.bytes()[8..], b"2nd");
    }

    #[test]
    #[should_panic(expected = "space is checked")]
    fn nothing_is_appended_beyond_the_capacity() {
        let (_image, mut appender) = Image::new(16, 8).unwrap();
        appender.append(&[1; 9]);
    }
}
