//! What every checksum of a segment covers without storing it.
//!
//! Upholds R3: bytes of another life, another place or another store never verify.

use crate::types::{Lsn, SegmentId};
use crc32fast::Hasher;
use std::sync::LazyLock;

/// The identity of one life of one segment of one store, folded into every checksum of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Salt(u32);

impl Salt {
    pub fn new(store_id: &[u8; 16], segment: SegmentId, life: u64) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(store_id);
        hasher.update(&segment.0.to_le_bytes());
        hasher.update(&life.to_le_bytes());
        Salt(hasher.finalize())
    }

    /// The checksum of `parts` at `offset`.
    pub fn checksum(self, offset: u32, parts: &[&[u8]]) -> u32 {
        let mut hasher = PLAIN.clone();
        hasher.update(&self.begin(offset));
        for part in parts {
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// The checksum of an op at `offset` in the frame `lsn`: an op tells its lsn only through its
    /// frame, so the lsn is part of what is proven.
    pub fn op_checksum(self, offset: u32, lsn: Lsn, bytes: &[u8]) -> u32 {
        let mut bound = [0; 12];
        bound[..4].copy_from_slice(&self.begin(offset));
        bound[4..].copy_from_slice(&lsn.get().to_le_bytes());
        let mut hasher = PLAIN.clone();
        hasher.update(&bound);
        hasher.update(bytes);
        hasher.finalize()
    }

    /// What a checksum that starts from nothing begins with, in place of `offset` to one that goes on from the salt: the
    /// state of a CRC is added to the first four bytes, and to nothing else.
    #[inline]
    fn begin(self, offset: u32) -> [u8; 4] {
        (offset ^ self.0).to_le_bytes()
    }
}

/// To make one costs a third of a checksum: it asks what the processor can do.
static PLAIN: LazyLock<Hasher> = LazyLock::new(Hasher::new);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_goes_on_from_the_salt() {
        for salt in [0, 1, 0x8000_0000, 0xDEAD_BEEF, u32::MAX] {
            let mut hasher = Hasher::new_with_initial(salt);
            hasher.update(&4096u32.to_le_bytes());
            assert_eq!(Salt(salt).checksum(4096, &[]), hasher.clone().finalize());
            hasher.update(&77u64.to_le_bytes());
            hasher.update(b"bytes");
            assert_eq!(Salt(salt).op_checksum(4096, Lsn::new(77), b"bytes"), hasher.finalize());
        }
    }

    /// R3.
    #[test]
    fn bytes_of_another_life_place_or_store_never_verify() {
        let here = Salt::new(&[1; 16], SegmentId(1), 1);
        let sum = here.checksum(4096, &[b"bytes"]);
        assert_eq!(sum, here.checksum(4096, &[b"by", b"tes"]));
        for other in [
            Salt::new(&[2; 16], SegmentId(1), 1),
            Salt::new(&[1; 16], SegmentId(2), 1),
            Salt::new(&[1; 16], SegmentId(1), 2),
        ] {
            assert_ne!(sum, other.checksum(4096, &[b"bytes"]));
        }
        assert_ne!(sum, here.checksum(4100, &[b"bytes"]));
        assert_ne!(
            here.op_checksum(4096, Lsn::new(1), b"bytes"),
            here.op_checksum(4096, Lsn::new(2), b"bytes")
        );
    }
}
