//! The keys of one keyspace in order, for scans.
//!
//! Touched when a key appears or disappears and when a range is read, never by a point look-up. A
//! scan copies a chunk of keys and lets go of the lock, so that no value is read under it.
//!
//! Promises: any pair of bounds is allowed, and one that holds no key yields none. Never knows a
//! place or a version: a key here may have no value at the reader's lsn.
//!
//! Read next: the scans, in the iterator over a snapshot.

use crate::sync::{AtomicBool, Ordering, RwLock};
use std::borrow::Borrow;
use std::cmp;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Bound, ControlFlow};

/// Keys up to this length lie in the tree itself.
const SHORT_BYTES: usize = 22;

/// A key: short ones in place, since a comparison that follows a pointer costs a cache miss.
enum Key {
    Short { len: u8, bytes: [u8; SHORT_BYTES] },
    Long(Box<[u8]>),
}
const _: () = assert!(size_of::<Key>() == 24);

impl Key {
    fn new(key: &[u8]) -> Self {
        if key.len() <= SHORT_BYTES {
            let mut bytes = [0; SHORT_BYTES];
            bytes[..key.len()].copy_from_slice(key);
            Key::Short { len: key.len() as u8, bytes }
        } else {
            Key::Long(key.into())
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Key::Short { len, bytes } => &bytes[..usize::from(*len)],
            Key::Long(bytes) => bytes,
        }
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        self.bytes()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == cmp::Ordering::Equal
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        match (self, other) {
            // What is not used is zero, so the length matters only where all the rest is equal.
            (Key::Short { len, bytes }, Key::Short { len: other_len, bytes: other }) => {
                words(bytes).cmp(&words(other)).then(len.cmp(other_len))
            }
            _ => self.bytes().cmp(other.bytes()),
        }
    }
}

/// Numbers that compare as the bytes do: a call of a function for each comparison would cost more.
#[inline]
fn words(bytes: &[u8; SHORT_BYTES]) -> (u128, u64) {
    let (front, back) = (bytes.first_chunk::<16>(), bytes.last_chunk::<8>());
    (front.map_or(0, |front| u128::from_be_bytes(*front)), back.map_or(0, |back| u64::from_be_bytes(*back)))
}

/// The ordered set of the keys of one keyspace.
#[derive(Default)]
pub(crate) struct OrderedKeys {
    /// Guards the set. A leaf of the lock order: nothing is locked, read or synced while it is held.
    keys: RwLock<Keys>,
    /// Somebody has asked for them. Set before the lock is taken to see whether they are in order.
    wanted: AtomicBool,
}

/// So many keys are kept in order for who may ask for them.
pub(crate) const KEPT: usize = 4096;

enum Keys {
    /// Nobody asked for them yet, so nobody keeps them: that is a third of what a new key costs, and more memory
    /// than the rest of the index.
    Unsorted,
    /// They are being put in order. What became meanwhile of each key that appeared or disappeared: whether it is
    /// there.
    Sorting(BTreeMap<Key, bool>),
    Sorted(BTreeSet<Key>),
}

impl Default for Keys {
    fn default() -> Self {
        Keys::Sorted(BTreeSet::new())
    }
}

/// Nobody has put the keys in order yet: see [`OrderedKeys::begin_sorting`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unsorted;

impl OrderedKeys {
    /// There are keys, and they will be put in order when somebody asks for them.
    pub fn postpone(&self) {
        *self.keys.write() = Keys::Unsorted;
    }

    /// Asks for the keys; whether they are still to be put in order. Once they are, they stay so.
    pub fn ask(&self) -> bool {
        // Ordered by the lock: whoever inserts behind the look at them sees this.
        self.wanted.store(true, Ordering::Relaxed);
        self.are_unsorted()
    }

    /// Whether somebody has asked for them.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Whether the keys are still to be put in order.
    pub fn are_unsorted(&self) -> bool {
        !matches!(*self.keys.read(), Keys::Sorted(_))
    }

    /// From here on it is noted which keys appear and disappear.
    pub fn begin_sorting(&self) {
        *self.keys.write() = Keys::Sorting(BTreeMap::new());
    }

    /// Makes these the keys, which were there at some time since [`OrderedKeys::begin_sorting`], but for those
    /// that appeared or disappeared since.
    pub fn catch_up(&self, keys: UnorderedKeys) {
        // Nobody waits for more than a few of them.
        const FEW: usize = 256;
        let mut sorted = keys.into_set();
        loop {
            let mut keys = self.keys.write();
            let Keys::Sorting(changed) = &mut *keys else { return };
            let changed = std::mem::take(changed);
            if changed.len() <= FEW {
                apply(changed, &mut sorted);
                *keys = Keys::Sorted(sorted);
                return;
            }
            drop(keys);
            apply(changed, &mut sorted);
        }
    }

    /// Adds a key.
    pub fn insert(&self, key: &[u8]) {
        let mut keys = self.keys.write();
        match &mut *keys {
            Keys::Unsorted => {}
            Keys::Sorting(changed) => drop(changed.insert(Key::new(key), true)),
            Keys::Sorted(sorted) if sorted.len() < KEPT || self.is_wanted() => {
                sorted.insert(Key::new(key));
            }
            Keys::Sorted(_) => *keys = Keys::Unsorted,
        }
    }

    /// Removes a key.
    pub fn remove(&self, key: &[u8]) {
        match &mut *self.keys.write() {
            Keys::Unsorted => {}
            Keys::Sorting(changed) => drop(changed.insert(Key::new(key), false)),
            Keys::Sorted(keys) => drop(keys.remove(key)),
        }
    }

    /// Fills `out` with the first `limit` keys of the range, ascending. Fewer: the range has no more.
    pub fn chunk_after(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        limit: usize,
        out: &mut KeyChunk,
    ) -> Result<(), Unsorted> {
        out.clear(limit);
        let keys = self.keys.read();
        let Keys::Sorted(keys) = &*keys else { return Err(Unsorted) };
        if !is_void(from, to) {
            keys.range::<[u8], _>((from, to)).take(limit).for_each(|key| out.push(key.bytes()));
        }
        Ok(())
    }

    /// Fills `out` with the last `limit` keys of the range, descending. Fewer: the range has no more.
    pub fn chunk_before(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        limit: usize,
        out: &mut KeyChunk,
    ) -> Result<(), Unsorted> {
        out.clear(limit);
        let keys = self.keys.read();
        let Keys::Sorted(keys) = &*keys else { return Err(Unsorted) };
        if !is_void(from, to) {
            keys.range::<[u8], _>((from, to)).rev().take(limit).for_each(|key| out.push(key.bytes()));
        }
        Ok(())
    }

    /// Calls `each` with the keys of the range, ascending, until it breaks. The set is locked
    /// meanwhile: `each` is short and does not come back here.
    pub fn for_each_in(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        mut each: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<(), Unsorted> {
        let keys = self.keys.read();
        let Keys::Sorted(keys) = &*keys else { return Err(Unsorted) };
        if !is_void(from, to) {
            // That it stopped early is known to `each`.
            let _ = keys.range::<[u8], _>((from, to)).try_for_each(|key| each(key.bytes()));
        }
        Ok(())
    }
}

impl fmt::Debug for OrderedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OrderedKeys")
    }
}

fn apply(changed: BTreeMap<Key, bool>, sorted: &mut BTreeSet<Key>) {
    for (key, is_there) in changed {
        if is_there {
            sorted.insert(key);
        } else {
            sorted.remove(&key);
        }
    }
}

/// Keys to be put in order: sorting a list once is several times faster than as many insertions.
#[derive(Default)]
pub(crate) struct UnorderedKeys(Vec<Key>);

impl UnorderedKeys {
    /// Adds a key; answers how many there are.
    pub fn insert(&mut self, key: &[u8]) -> usize {
        self.0.push(Key::new(key));
        self.0.len()
    }

    fn into_set(self) -> BTreeSet<Key> {
        // Sorts, and builds the tree from its leaves.
        self.0.into_iter().collect()
    }
}

/// True if no key can lie between the bounds. `BTreeSet::range` panics on some of these.
fn is_void(from: Bound<&[u8]>, to: Bound<&[u8]>) -> bool {
    match (from, to) {
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
        (Bound::Included(from), Bound::Included(to)) => from > to,
        (Bound::Included(from) | Bound::Excluded(from), Bound::Included(to) | Bound::Excluded(to)) => {
            from >= to
        }
    }
}

/// Keys copied out of the set, one after the other in one buffer that is used again.
#[derive(Default, Debug)]
pub(crate) struct KeyChunk {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl KeyChunk {
    /// The `n`th key of the chunk.
    pub fn get(&self, n: usize) -> Option<&[u8]> {
        let end = *self.ends.get(n)?;
        let start = if n == 0 { 0 } else { self.ends[n - 1] };
        Some(&self.bytes[start..end])
    }

    /// The keys from the `n`th on.
    #[inline]
    pub fn from(&self, n: usize) -> impl Iterator<Item = &[u8]> {
        let mut start = n.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |&end| end);
        self.ends.get(n..).unwrap_or_default().iter().map(move |&end| {
            let key = &self.bytes[start..end];
            start = end;
            key
        })
    }

    /// The key to go on after (or before, when descending).
    #[cfg(test)]
    pub fn last(&self) -> Option<&[u8]> {
        self.get(self.len().checked_sub(1)?)
    }

    /// The keys in the order of the scan.
    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.from(0)
    }

    /// Keys in the chunk.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Forgets the keys, keeps the memory, and has some for as many short ones, up to [`KEPT`].
    pub fn clear(&mut self, keys: usize) {
        let keys = keys.min(KEPT);
        self.bytes.clear();
        self.ends.clear();
        self.bytes.reserve(keys * SHORT_BYTES);
        self.ends.reserve(keys);
    }

    fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len());
    }
}

/// The upper bound of all keys that start with `prefix`.
pub(crate) fn prefix_end(prefix: &[u8]) -> Bound<Vec<u8>> {
    // 0xFF has no successor, so it goes, and the byte before it is raised.
    let kept = prefix.iter().rposition(|&byte| byte != u8::MAX);
    kept.map_or(Bound::Unbounded, |last| {
        let mut end = prefix[..=last].to_vec();
        end[last] += 1;
        Bound::Excluded(end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use Bound::{Excluded, Included, Unbounded};
    use proptest::prelude::*;

    fn set(keys: &[&str]) -> OrderedKeys {
        let set = OrderedKeys::default();
        keys.iter().for_each(|key| set.insert(key.as_bytes()));
        set
    }

    fn after(set: &OrderedKeys, from: Bound<&str>, to: Bound<&str>, limit: usize) -> String {
        let mut chunk = KeyChunk::default();
        set.chunk_after(from.map(str::as_bytes), to.map(str::as_bytes), limit, &mut chunk).unwrap();
        text(&chunk)
    }

    fn before(set: &OrderedKeys, from: Bound<&str>, to: Bound<&str>, limit: usize) -> String {
        let mut chunk = KeyChunk::default();
        set.chunk_before(from.map(str::as_bytes), to.map(str::as_bytes), limit, &mut chunk).unwrap();
        text(&chunk)
    }

    fn text(chunk: &KeyChunk) -> String {
        chunk.iter().map(|key| key.escape_ascii().to_string()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_pair_of_bounds_yields_its_keys_in_both_directions() {
        let set = set(&["b", "d", "f"]);
        let table = [
            (Unbounded, Unbounded, "b d f", "f d b"),
            (Included("b"), Included("f"), "b d f", "f d b"),
            (Excluded("b"), Excluded("f"), "d", "d"),
            (Included("c"), Unbounded, "d f", "f d"),
            (Unbounded, Excluded("d"), "b", "b"),
            (Included("d"), Included("d"), "d", "d"),
            (Included("d"), Excluded("d"), "", ""),
            (Excluded("d"), Included("d"), "", ""),
            (Excluded("d"), Excluded("d"), "", ""),
            (Included("f"), Included("b"), "", ""),
            (Excluded("f"), Excluded("b"), "", ""),
            (Included("f"), Excluded("b"), "", ""),
            (Included("g"), Unbounded, "", ""),
            (Unbounded, Excluded(""), "", ""),
        ];
        for (from, to, up, down) in table {
            assert_eq!(after(&set, from, to, 9), up, "up from {from:?} to {to:?}");
            assert_eq!(before(&set, from, to, 9), down, "down from {from:?} to {to:?}");
        }
    }

    #[test]
    fn a_limit_keeps_the_end_the_scan_starts_from() {
        let set = set(&["b", "d", "f"]);
        assert_eq!(after(&set, Unbounded, Unbounded, 2), "b d");
        assert_eq!(before(&set, Unbounded, Unbounded, 2), "f d");
        assert_eq!(after(&set, Unbounded, Unbounded, 0), "");
    }

    #[test]
    fn short_and_long_keys_sort_as_bytes() {
        let long = "k".repeat(40);
        let cut = "k".repeat(22);
        let set = set(&[&long, "", "z", &cut, "\0"]);
        assert_eq!(after(&set, Unbounded, Unbounded, 9), format!(" \\x00 {cut} {long} z"));
        set.remove(long.as_bytes());
        set.remove(long.as_bytes());
        set.insert(cut.as_bytes());
        assert_eq!(after(&set, Unbounded, Unbounded, 9), format!(" \\x00 {cut} z"));
    }

    #[test]
    fn a_visit_ends_where_it_breaks() {
        let set = set(&["b", "d", "f"]);
        let mut seen = Vec::new();
        set.for_each_in(Included(b"b"), Unbounded, |key| {
            seen.push(key.to_vec());
            if key == b"d" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
        assert_eq!(seen, [b"b", b"d"]);
        set.for_each_in(Excluded(b"d"), Excluded(b"d"), |_| panic!("no key lies here")).unwrap();
    }

    #[test]
    fn keys_compare_as_their_bytes() {
        let lengths = [0, 1, 2, 7, 8, 9, 15, 16, 17, 21, 22, 23, 30];
        let keys: Vec<Vec<u8>> = lengths
            .iter()
            .flat_map(|&len| [vec![0; len], vec![1; len], [vec![1; len], vec![0]].concat(), vec![0xFF; len]])
            .collect();
        for (one, other) in keys.iter().flat_map(|one| keys.iter().map(move |other| (one, other))) {
            let got = Key::new(one).cmp(&Key::new(other));
            assert_eq!(got, one.cmp(other), "{} and {}", one.escape_ascii(), other.escape_ascii());
        }
    }

    #[test]
    fn keys_that_are_sorted_later_are_what_they_were_then_and_what_became_of_them_since() {
        let set = OrderedKeys::default();
        set.postpone();
        assert!(set.ask());
        assert_eq!(set.chunk_after(Unbounded, Unbounded, 9, &mut KeyChunk::default()), Err(Unsorted));
        // What comes and goes before the sorting begins will be found in the index.
        set.insert(b"before");
        set.begin_sorting();
        ["b", "new", "back", "gone"].iter().for_each(|key| set.insert(key.as_bytes()));
        ["a", "back", "gone", "never"].iter().for_each(|key| set.remove(key.as_bytes()));
        set.insert(b"back");
        let mut then = UnorderedKeys::default();
        for key in ["c", "b", "a"] {
            then.insert(key.as_bytes());
        }
        set.catch_up(then);
        assert_eq!(after(&set, Unbounded, Unbounded, 9), "b back c new");
        set.insert(b"d");
        set.catch_up(UnorderedKeys::default());
        assert_eq!(after(&set, Unbounded, Unbounded, 9), "b back c d new", "once is enough");
    }

    #[test]
    fn many_keys_are_kept_in_order_only_for_who_has_asked_for_them() {
        let (asked, other) = (OrderedKeys::default(), OrderedKeys::default());
        assert!(!asked.ask());
        for n in 0..KEPT as u32 {
            asked.insert(&n.to_be_bytes());
            other.insert(&n.to_be_bytes());
        }
        assert!(!asked.are_unsorted() && !other.are_unsorted(), "few are kept for anybody");
        asked.insert(b"one more");
        other.insert(b"one more");
        assert!(!asked.are_unsorted() && other.are_unsorted());
        assert_eq!(before(&asked, Unbounded, Unbounded, 1), "one more");
    }

    #[test]
    fn catching_up_with_many_changes_misses_none() {
        let set = OrderedKeys::default();
        set.begin_sorting();
        let mut then = UnorderedKeys::default();
        for n in 0..2000u32 {
            then.insert(&n.to_be_bytes());
            set.insert(&(n + 2000).to_be_bytes());
            set.remove(&(n / 2).to_be_bytes());
        }
        set.catch_up(then);
        let mut chunk = KeyChunk::default();
        set.chunk_after(Unbounded, Unbounded, usize::MAX, &mut chunk).unwrap();
        assert!(chunk.iter().eq((1000..4000u32).map(u32::to_be_bytes)));
    }

    fn bound() -> impl Strategy<Value = Bound<Vec<u8>>> {
        let key = || prop::collection::vec(0..3u8, 0..4);
        prop_oneof![key().prop_map(Included), key().prop_map(Excluded), Just(Unbounded)]
    }

    proptest! {
        #[test]
        fn chunks_joined_are_the_range_filtered(
            keys in prop::collection::btree_set(prop::collection::vec(0..3u8, 0..30), 0..40),
            from in bound(), to in bound(), limit in 1..5usize,
        ) {
            let set = OrderedKeys::default();
            keys.iter().for_each(|key| set.insert(key));
            let above = |key: &[u8]| match &from {
                Included(from) => key >= &from[..], Excluded(from) => key > &from[..], Unbounded => true,
            };
            let below = |key: &[u8]| match &to {
                Included(to) => key <= &to[..], Excluded(to) => key < &to[..], Unbounded => true,
            };
            let mut want: Vec<_> = keys.iter().filter(|key| above(key) && below(key)).cloned().collect();
            let mut chunk = KeyChunk::default();

            let (mut got, mut start) = (Vec::new(), from.clone());
            loop {
                let (from, to) = (start.as_ref().map(|k| &k[..]), to.as_ref().map(|k| &k[..]));
                set.chunk_after(from, to, limit, &mut chunk).unwrap();
                got.extend(chunk.iter().map(<[u8]>::to_vec));
                let Some(last) = chunk.last() else { break };
                start = Excluded(last.to_vec());
            }
            prop_assert_eq!(&got, &want);

            let (mut got, mut end) = (Vec::new(), to.clone());
            loop {
                let (from, to) = (from.as_ref().map(|k| &k[..]), end.as_ref().map(|k| &k[..]));
                set.chunk_before(from, to, limit, &mut chunk).unwrap();
                got.extend(chunk.iter().map(<[u8]>::to_vec));
                let Some(last) = chunk.last() else { break };
                end = Excluded(last.to_vec());
            }
            want.reverse();
            prop_assert_eq!(&got, &want);
        }
    }
}
