//! When a sealed segment may be recycled.
//!
//! One job: count those who stand in a segment, and name the one caller who may free it (C2:
//! no reader is in it). Promises that exactly one of all `retire` and `unpin` calls answers "free now",
//! and that nobody gets in after it. Knows nothing of segments, and never waits.
//!
//! Read next: `log/segment.rs`, what is guarded; every interleaving is tried by `tests/loom.rs`.

use crate::sync::{AtomicUsize, Ordering};

/// Set once the segment is retired; the bits below count the pins.
const RETIRED: usize = 1 << (usize::BITS - 1);

/// The pins of one segment.
///
/// | state            | `try_pin`     | `unpin`                      | `retire`              |
/// |------------------|---------------|------------------------------|-----------------------|
/// | open, 0 pins     | open, 1 pin   | a bug                        | gone, **free now**    |
/// | open, n pins     | open, n + 1   | open, n − 1                  | retired, n pins       |
/// | retired, n pins  | refused       | n − 1; at 0 gone, **free now** | no change           |
/// | gone             | refused       | a bug                        | no change             |
#[derive(Debug)]
pub(crate) struct Pins(AtomicUsize);

impl Pins {
    /// An open segment nobody is in.
    pub(crate) fn new() -> Self {
        Pins(AtomicUsize::new(0))
    }

    /// Keeps the segment from being freed until [`Pins::unpin`]; `false` once it is retired.
    pub(crate) fn try_pin(&self) -> bool {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen & RETIRED == 0 {
            debug_assert!(seen + 1 < RETIRED, "more pins than memory could hold");
            // Acquire: what the pin leads to is read after it. It pairs with no store of its own; that the
            // segment is not freed meanwhile rests on the order of changes to this one word.
            match self.0.compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Gives a pin back; `true` if the segment is retired and this was the last: the caller frees it.
    pub(crate) fn unpin(&self) -> bool {
        // Release: what was read under the pin is read before whoever frees goes on. Acquire: this may be
        // the one who frees, after all the others. Pairs with `retire` and the other `unpin`s.
        let before = self.0.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before & !RETIRED > 0, "unpinned more often than pinned");
        before == RETIRED | 1
    }

    /// Lets nobody in any more; `true` if nobody is: the caller frees it.
    ///
    /// Only the first call can answer `true`.
    pub(crate) fn retire(&self) -> bool {
        // Acquire: pairs with the Release of every `unpin`, for the case that all of them are gone already.
        // Release: pairs with the last `unpin`, which frees what was retired here.
        self.0.fetch_or(RETIRED, Ordering::AcqRel) == 0
    }

    /// How many pins there are now; of use only to look at.
    pub(crate) fn pinned(&self) -> usize {
        self.0.load(Ordering::Relaxed) & !RETIRED
    }
}

// Loom has its own models of this file, and its primitives do not run outside of them.
#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn retiring_what_nobody_pins_frees_it_at_once() {
        let pins = Pins::new();
        assert!(pins.retire());
        assert!(!pins.try_pin());
    }

    #[test]
    fn the_last_unpin_of_a_retired_segment_frees_it() {
        let pins = Pins::new();
        assert!(pins.try_pin());
        assert!(pins.try_pin());
        assert_eq!(pins.pinned(), 2);
        assert!(!pins.retire());
        assert_eq!(pins.pinned(), 2);
        assert!(!pins.try_pin());
        assert!(!pins.unpin());
        assert!(pins.unpin());
        assert_eq!(pins.pinned(), 0);
    }

    #[test]
    fn unpinning_an_open_segment_frees_nothing() {
        let pins = Pins::new();
        assert!(pins.try_pin());
        assert!(!pins.unpin());
        assert!(pins.try_pin());
    }

    #[test]
    fn retiring_twice_frees_once() {
        let pins = Pins::new();
        assert!(pins.retire());
        assert!(!pins.retire());
        let pins = Pins::new();
        assert!(pins.try_pin());
        assert!(!pins.retire());
        assert!(!pins.retire());
        assert!(pins.unpin());
        assert!(!pins.retire());
    }
}
