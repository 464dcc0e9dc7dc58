//! The header of a frame as bytes. The layout is in `docs/format.md`, under "Frame".

use super::op::Reader;
use super::salt::Salt;
use crate::types::Lsn;

/// The bytes of a frame's header.
pub(crate) const FRAME_HEADER_BYTES: usize = 28;

/// What stands in front of the ops of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FrameHeader {
    /// Bytes of ops behind the header.
    pub body_len: u32,
    pub lsn: Lsn,
    /// Everything up to here was durable when this frame was written: evidence against damage.
    pub durable: Lsn,
    /// The checksum of the header before this one; of the segment's header for the first frame.
    pub previous: u32,
    /// The checksum over the checksums of the ops.
    pub body: u32,
}

impl FrameHeader {
    /// The bytes, and the checksum in front of them.
    pub fn encode(&self, salt: Salt, offset: u32) -> ([u8; FRAME_HEADER_BYTES], u32) {
        let behind = u32::try_from(self.lsn.get().saturating_sub(self.durable.get())).unwrap_or(u32::MAX);
        let mut out = [0; FRAME_HEADER_BYTES];
        out[4..8].copy_from_slice(&self.body_len.to_le_bytes());
        out[8..16].copy_from_slice(&self.lsn.get().to_le_bytes());
        out[16..20].copy_from_slice(&behind.to_le_bytes());
        out[20..24].copy_from_slice(&self.previous.to_le_bytes());
        out[24..28].copy_from_slice(&self.body.to_le_bytes());
        let checksum = salt.checksum(offset, &[&out[4..]]);
        out[..4].copy_from_slice(&checksum.to_le_bytes());
        (out, checksum)
    }

    /// The header at the start of `bytes` and its checksum, if it was written at `offset` of this
    /// life of this segment. The checksum is verified before any field is believed.
    pub fn decode(bytes: &[u8], salt: Salt, offset: u32) -> Option<(Self, u32)> {
        let bytes = bytes.get(..FRAME_HEADER_BYTES)?;
        let mut at = Reader { bytes, at: 0 };
        let checksum = at.u32()?;
        // Zeros are the common case when looking for a later frame, and are never a header.
        if bytes[4..16] == [0; 12] || salt.checksum(offset, &[&bytes[4..]]) != checksum {
            return None;
        }
        let body_len = at.u32()?;
        let lsn = at.u64()?;
        let durable = lsn.saturating_sub(at.u32()? as u64);
        let header = FrameHeader {
            body_len,
            lsn: Lsn::new(lsn),
            durable: Lsn::new(durable),
            previous: at.u32()?,
            body: at.u32()?,
        };
        Some((header, checksum))
    }
}

/// Where the lsn of a frame lies in its header.
pub(crate) const LSN_AT: usize = 8;

/// The checksum over the checksums of a frame's ops, made step by step.
#[derive(Default)]
pub(crate) struct BodySum(crc32fast::Hasher);

impl BodySum {
    pub fn add(&mut self, op_checksum: u32) {
        self.0.update(&op_checksum.to_le_bytes());
    }

    pub fn finish(self) -> u32 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::SegmentId;

    #[test]
    fn headers_go_both_ways_and_no_flipped_bit_verifies() {
        let salt = Salt::new(&[1; 16], SegmentId(1), 1);
        let header = FrameHeader {
            body_len: 99,
            lsn: Lsn::new(1 << 40),
            durable: Lsn::new((1 << 40) - 3),
            previous: 5,
            body: 6,
        };
        let (mut bytes, checksum) = header.encode(salt, 4096);
        assert_eq!(FrameHeader::decode(&bytes, salt, 4096), Some((header, checksum)));
        assert_eq!(FrameHeader::decode(&bytes, salt, 4100), None);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(FrameHeader::decode(&bytes, salt, 4096), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(FrameHeader::decode(&[0; 28], salt, 4096), None);
    }
}
