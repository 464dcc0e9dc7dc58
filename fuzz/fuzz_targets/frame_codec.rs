//! Ops and frames go both ways; made-up bytes are refused; one changed byte is noticed where it lies, and told from a
//! torn tail by whoever wrote after it.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidewall::testkit::codecs::{AnyOp, read_anything, write_frames};

#[derive(Arbitrary, Debug)]
struct Op {
    kind: u8,
    keyspace: u16,
    token: u64,
    key: Vec<u8>,
    value: (u16, u8),
    previous: Option<(u32, u32)>,
    fence: Option<Option<(u32, u32)>>,
    last: Option<(u64, u64)>,
    predecessor: Option<(u64, u64)>,
    moved: Option<u64>,
}

impl Op {
    fn any(self) -> AnyOp {
        let Op { kind, keyspace, token, key, value, previous, fence, last, predecessor, moved } = self;
        AnyOp { kind, keyspace, token, key, value, previous, fence, last, predecessor, moved }
    }
}

#[derive(Arbitrary, Debug)]
enum Input {
    Bytes { bytes: Vec<u8>, offset: u32 },
    Frames { frames: Vec<Vec<Op>>, behind: u8, damage: Option<(u16, u8)> },
}

fuzz_target!(|input: Input| match input {
    Input::Bytes { bytes, offset } => read_anything(&bytes, offset),
    Input::Frames { frames, behind, damage } => {
        let frames: Vec<Vec<AnyOp>> =
            frames.into_iter().take(6).map(|ops| ops.into_iter().take(6).map(Op::any).collect()).collect();
        let written = write_frames(&frames, behind);
        if let Some((at, xor)) = damage {
            written.damage(at as usize, xor);
        }
    }
});
