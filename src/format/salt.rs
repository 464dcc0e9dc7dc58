//! What every checksum of a segment covers without storing it.
//!
//! Upholds R3: bytes of another life, another place or another store never verify.

use crate::types::{Lsn, SegmentId};
use crc32fast::Hasher;

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
        let mut hasher = Hasher::new_with_initial(self.0);
        hasher.update(&offset.to_le_bytes());
        for part in parts {
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// The checksum of an op at `offset` in the frame `lsn`: an op tells its lsn only through its
    /// frame, so the lsn is part of what is proven.
    pub fn op_checksum(self, offset: u32, lsn: Lsn, bytes: &[u8]) -> u32 {
        let mut bound = [0; 12];
        bound[..4].copy_from_slice(&offset.to_le_bytes());
        bound[4..].copy_from_slice(&lsn.get().to_le_bytes());
        let mut hasher = Hasher::new_with_initial(self.0);
        hasher.update(&bound);
        hasher.update(bytes);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
