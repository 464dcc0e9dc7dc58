//! The bytes of every file: `docs/format.md` describes them, this module reads and writes them.
//!
//! One job: bytes to values and back. Never decides whether something is allowed, never opens a
//! file. A checksum is verified over raw bytes before a field in them is believed.

pub(crate) mod name;
pub(crate) mod salt;
pub(crate) mod op;
pub(crate) mod frame;
pub(crate) mod header;
pub(crate) mod index;

/// The version of the format; a store of a newer one answers `UpgradeRequired`.
pub(crate) const FORMAT_VERSION: u32 = 1;
/// The block that a segment's header fills alone; frames start behind it.
pub(crate) const HEADER_BYTES: u32 = 4096;
/// Frames start at multiples of this.
pub(crate) const FRAME_ALIGN: u32 = 4;
