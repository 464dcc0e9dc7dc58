//! How a name is found in the log, and what stands there.
//!
//! One job: from a name to the newest op under it, and back along the links to what was durable at an lsn. Takes
//! no lock: whoever must not be overtaken holds the tail lock.
//!
//! Read next: `admit.rs`, which judges what is found.

use crate::engine::{Engine, FenceHashes, FenceView, KeyspaceState, Version, When};
use crate::error::{Error, Result};
use crate::fence::{FenceState, Floor, is_fenced, last_operation, mark};
use crate::format::frame::FRAME_HEADER_BYTES;
use crate::index::{Slots, name_hash};
use crate::log::segment::{Found, Glance, OpRef, OpView, Segment, Segments};
use crate::log::usage::Weight;
use crate::op::{Class, Kind};
use crate::options::Scope;
use crate::sync::Arc;
use crate::types::{Excerpt, Location, Token};
use crossbeam_epoch::Guard;
use std::convert::Infallible;
use std::hint::black_box;
use std::ops::Deref;

/// Names looked up side by side.
pub(crate) const SIDE_BY_SIDE: usize = 32;
/// Of most machines; if it is another, a few bytes are touched in vain or not at all.
const CACHE_LINE: usize = 64;

impl Engine {
    pub fn hash(&self, keyspace: &KeyspaceState, class: Class, name: &[u8]) -> u64 {
        name_hash(self.seed, keyspace.id.0, class as u8, name)
    }

    pub fn fence_hashes(&self, keyspace: &KeyspaceState, name: &[u8]) -> FenceHashes {
        let is_key = keyspace.options.scope == Scope::Key;
        let key = if is_key { self.hash(keyspace, Class::Key, name) } else { 0 };
        FenceHashes { own: self.hash(keyspace, Class::Fence, name), key }
    }

    /// The newest op under a name, durable or not.
    pub fn newest<'g>(
        &self,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        hash: u64,
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>> {
        self.find_newest(hash, guard, |segment, offset| {
            let found = segment.op(offset)?;
            Ok(is_named(&found, keyspace, class, name).then_some(found))
        })
    }

    /// A little of the newest op under a name, durable or not.
    #[inline(always)]
    fn glance(
        &self,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        hash: u64,
        guard: &Guard,
    ) -> Result<Option<Glance>> {
        self.look_at_newest(keyspace, class, name, hash, guard, |op| op.glance())
    }

    /// What `take` takes of the newest op under a name, durable or not.
    #[inline(always)]
    fn look_at_newest<T>(
        &self,
        keyspace: &KeyspaceState,
        class: Class,
        name: &[u8],
        hash: u64,
        guard: &Guard,
        take: impl Fn(&OpView<'_>) -> T,
    ) -> Result<Option<T>> {
        // Not handed up through the closures: each would copy it.
        let mut seen = None;
        self.find_newest(hash, guard, |segment, offset| {
            segment.look(offset, |op| {
                let is_it = is_named(op, keyspace, class, name);
                if is_it {
                    seen = Some(take(op));
                }
                Ok(is_it.then_some(()))
            })
        })?;
        Ok(seen)
    }

    /// Shows `probe` the ops that may be the newest under the name of `hash`, until it takes one.
    #[inline(always)]
    pub fn find_newest<'g, T>(
        &self,
        hash: u64,
        guard: &'g Guard,
        mut probe: impl FnMut(&'g Arc<Segment>, u32) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        loop {
            let mut is_gone = false;
            let found = self.slots.find(hash, guard, |place| -> Result<_> {
                let Some(segment) = self.segments.get(place.segment, guard) else {
                    is_gone = true;
                    return Ok(None);
                };
                probe(segment, place.offset)
            })?;
            // Between the look at the slot and the look at the segment the op was carried elsewhere and its
            // segment retired: the slot names the new place by now.
            if found.is_some() || !is_gone {
                return Ok(found);
            }
        }
    }

    /// Follows links back until an op is old enough.
    fn back_to<'g>(
        &self,
        mut found: Option<OpRef<'g>>,
        when: When,
        link: impl Fn(&OpRef<'g>) -> Option<Location>,
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>> {
        let lsn = match when {
            When::Appended => return Ok(found),
            When::Visible => self.progress.durable(),
            When::At(lsn) => lsn,
        };
        while let Some(op) = &found
            && op.lsn > lsn
        {
            let Some(at) = link(op) else { return Ok(None) };
            let before = self.segments.op(at, guard)?;
            // A segment goes only when what came after its ops is visible: then that is the answer. A
            // snapshot keeps the segments that it needs.
            if before.is_none() && when == When::Visible && op.lsn <= self.progress.durable() {
                return Ok(found);
            }
            found = before;
        }
        Ok(found)
    }

    /// The version of a key: a put, a delete, or nothing. Upholds S1.
    pub fn version<'g>(
        &self,
        keyspace: &KeyspaceState,
        key: &[u8],
        hash: u64,
        when: When,
        guard: &'g Guard,
    ) -> Result<Option<OpRef<'g>>> {
        let newest = self.newest(keyspace, Class::Key, key, hash, guard)?;
        self.back_to(newest, when, |op| op.head.previous(), guard)
    }

    /// What stands at a fence.
    ///
    /// In `Scope::Key` the versions of the key carry the state of its fence too, so a fence costs
    /// nothing beside its key; whichever op is newer has it.
    pub fn fence(
        &self,
        keyspace: &KeyspaceState,
        name: &[u8],
        hashes: FenceHashes,
        when: When,
        guard: &Guard,
    ) -> Result<FenceView> {
        let newest = if keyspace.names_fences() {
            self.newest(keyspace, Class::Fence, name, hashes.own, guard)?
        } else {
            None
        };
        let at = newest.as_ref().map(|op| op.at);
        let weight = newest.as_ref().map_or(Weight::default(), |op| Weight::as_state(&op.head));
        let own = self.back_to(newest, when, |op| op.head.fence().flatten(), guard)?;
        let mut view = FenceView {
            state: own.as_ref().map_or(FenceState::default(), state_of),
            at,
            weight,
            version: None,
        };
        if keyspace.options.scope == Scope::Key
            && let Some(version) = self.version(keyspace, name, hashes.key, when, guard)?
        {
            view.version = Some(Version::of(&version));
            if version.lsn > view.state.lsn {
                view.state = state_of(&version);
            }
        }
        let floor = match when {
            When::Appended => keyspace.floor_appended(),
            _ => keyspace.floor_durable(),
        };
        // It may be older than one that is forgotten: who believed it would take that for never done.
        if view.state.mark <= floor.folded {
            view.state = FenceState::default();
        }
        Ok(view)
    }

    /// What stands at a fence, appended, where `seen` is what [`Engine::check_early`] saw of it: an op that stands
    /// under the name still need not be read again. For the one who may change that: under the tail lock.
    pub fn fence_seen(
        &self,
        keyspace: &KeyspaceState,
        name: &[u8],
        hashes: FenceHashes,
        seen: Option<Glance>,
        guard: &Guard,
    ) -> Result<FenceView> {
        let is_all = keyspace.options.scope == Scope::Key && !keyspace.names_fences();
        let seen = seen.filter(|seen| is_all && !seen.is_numbered && self.stands(hashes.key, seen.at, guard));
        let Some(seen) = seen else { return self.fence(keyspace, name, hashes, When::Appended, guard) };
        let is_folded = seen.token <= keyspace.floor_appended().folded;
        let state = FenceState { mark: seen.token, lsn: seen.lsn, ..FenceState::default() };
        Ok(FenceView {
            state: if is_folded { FenceState::default() } else { state },
            version: Some(Version::seen(&seen)),
            ..FenceView::default()
        })
    }

    /// What a grant has to know of its fence, appended, and the hash of that: all that [`Engine::fence`] answers where
    /// operations are numbered, and else where it is. A grant is above every mark, so there is nothing to judge.
    /// `last`: where the grant before it was appended, which need not be read if it still stands under the name. For
    /// the one who may change that: under the tail lock.
    pub fn fence_to_grant(
        &self,
        keyspace: &KeyspaceState,
        name: &[u8],
        last: Option<Location>,
        guard: &Guard,
    ) -> Result<(u64, FenceView)> {
        if keyspace.numbers_operations() {
            let hashes = self.fence_hashes(keyspace, name);
            return Ok((hashes.own, self.fence(keyspace, name, hashes, When::Appended, guard)?));
        }
        let hash = self.hash(keyspace, Class::Fence, name);
        if let Some(at) = last.filter(|&at| self.stands(hash, at, guard)) {
            let weight = Weight::new(Kind::Grant, false, 0);
            return Ok((hash, FenceView { at: Some(at), weight, ..FenceView::default() }));
        }
        let take = |op: &OpView<'_>| (op.at, Weight::as_state(&op.head));
        let mut view = FenceView::default();
        if keyspace.names_fences()
            && let Some((at, weight)) =
                self.look_at_newest(keyspace, Class::Fence, name, hash, guard, take)?
        {
            (view.at, view.weight) = (Some(at), weight);
        }
        Ok((hash, view))
    }

    /// Whether the name of `hash`, which this op had, is still its own.
    fn stands(&self, hash: u64, at: Location, guard: &Guard) -> bool {
        self.slots.holds(hash, Segments::place(at), guard) && self.segments.of(at.segment, guard).is_some()
    }

    /// A little of the op that carries the newest state of a fence, found as [`Engine::fence`] does.
    fn glance_at_fence(
        &self,
        keyspace: &KeyspaceState,
        name: &[u8],
        hashes: FenceHashes,
        guard: &Guard,
    ) -> Result<Option<Glance>> {
        let mut seen = None;
        if keyspace.names_fences() {
            seen = self.glance(keyspace, Class::Fence, name, hashes.own, guard)?;
        }
        if keyspace.options.scope == Scope::Key {
            let version = self.glance(keyspace, Class::Key, name, hashes.key, guard)?;
            let is_newer = |version: &Glance| seen.is_none_or(|seen| version.lsn > seen.lsn);
            seen = version.filter(is_newer).or(seen);
        }
        Ok(seen)
    }

    /// The refusal that needs no lock: the durable mark alone is above the token.
    ///
    /// The own mark is read before the floor: folding raises the floor before it drops own marks.
    ///
    /// Where it does not refuse, it answers what it saw of the fence, for [`Engine::fence_seen`].
    pub fn check_early(
        &self,
        keyspace: &KeyspaceState,
        fence: &[u8],
        hashes: FenceHashes,
        token: Token,
    ) -> Result<Option<Glance>> {
        let guard = crossbeam_epoch::pin();
        let durable = self.progress.durable();
        let seen = self.glance_at_fence(keyspace, fence, hashes, &guard)?;
        if !is_fenced(token, seen.map_or(0, |seen| seen.token), keyspace.floor_appended()) {
            return Ok(seen);
        }
        let state = match seen {
            None => FenceState::default(),
            Some(seen) if seen.lsn > durable || seen.is_numbered => {
                self.fence(keyspace, fence, hashes, When::Visible, &guard)?.state
            }
            Some(seen) => FenceState { mark: seen.token, lsn: seen.lsn, ..FenceState::default() },
        };
        let floor = keyspace.floor_durable();
        if is_fenced(token, state.mark, floor) {
            self.counters.fenced.add_one();
            return Err(fenced(token, keyspace, fence, &state, floor));
        }
        Ok(seen)
    }
}

/// Finds what probably stands under each of up to [`SIDE_BY_SIDE`] names: first all lines of the index are touched, then
/// all ops. The memory fetches those side by side, where one look-up behind the other would wait for each.
#[inline]
pub(crate) fn bring_near<'g>(
    slots: &Slots,
    segments: &'g Segments,
    hashes: impl Iterator<Item = u64> + Clone,
    guard: &'g Guard,
) -> [Option<(&'g Segment, u32)>; SIDE_BY_SIDE] {
    slots.touch(hashes.clone(), guard);
    let mut ops = [None; SIDE_BY_SIDE];
    for (op, hash) in ops.iter_mut().zip(hashes) {
        // The first place under the tag is nearly always the right one; if not, nothing is lost.
        let place = slots.find(hash, guard, |place| Ok::<_, Infallible>(Some(place)));
        if let Ok(Some(place)) = place
            && let Some(segment) = segments.get(place.segment, guard)
        {
            *op = Some((&**segment, place.offset));
        }
    }
    let mut touched = 0;
    for (segment, offset) in ops.iter().flatten() {
        // The header of a frame with one op stands in front of it.
        let start = (*offset as usize).saturating_sub(FRAME_HEADER_BYTES);
        let op = segment.bytes().get(start..).unwrap_or_default();
        for at in [0, CACHE_LINE, 2 * CACHE_LINE, 3 * CACHE_LINE - 1] {
            touched ^= op.get(at).copied().unwrap_or(0);
        }
    }
    black_box(touched);
    ops
}

/// The state that an op leaves its fence in.
pub(crate) fn state_of(op: &OpRef<'_>) -> FenceState {
    let links = op.head.links(&op.bytes);
    FenceState { mark: op.head.token, lsn: op.lsn, last: links.last, predecessor: links.predecessor }
}

/// Whether an op stands under a name: as a version of a key, or as the state of a fence.
#[inline(always)]
pub(crate) fn is_named<B: Deref<Target = [u8]>>(
    found: &Found<B>,
    keyspace: &KeyspaceState,
    class: Class,
    name: &[u8],
) -> bool {
    let (head, key) = (&found.head, found.key());
    if head.keyspace != keyspace.id {
        return false;
    }
    match (class, head.kind) {
        (Class::Key, kind) => kind.is_value() && is_same(key, name),
        (Class::Fence, Kind::Grant | Kind::Mark) => is_same(key, name),
        (Class::Fence, kind) => kind.is_value() && head.fence().is_some() && keyspace.fence_of(key) == name,
    }
}

/// Equality of names. Most are short, and a call of a function would cost more than to compare them.
#[inline(always)]
fn is_same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    match (one.first_chunk::<8>(), other.first_chunk::<8>(), one.last_chunk::<8>(), other.last_chunk::<8>()) {
        (Some(front), Some(other_front), Some(back), Some(other_back)) if one.len() <= 16 => {
            front == other_front && back == other_back
        }
        _ => one == other,
    }
}

/// The refusal, with what the loser wants to know.
pub(crate) fn fenced(
    token: Token,
    keyspace: &KeyspaceState,
    fence: &[u8],
    own: &FenceState,
    floor: Floor,
) -> Error {
    Error::Fenced {
        token,
        mark: mark(own.mark, floor),
        keyspace: keyspace.excerpt(),
        fence: Excerpt::new(fence),
        last_operation: last_operation(token, own, floor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Db;
    use crate::fence::admit;
    use crate::keyspace::Keyspace;
    use crate::options::{KeyspaceOptions, Options, Tokens};
    use crate::storage::SimDisk;
    use crate::types::{Lsn, OperationId};

    #[test]
    fn names_are_the_same_in_every_byte() {
        for len in 0..40u8 {
            let name: Vec<u8> = (0..len).collect();
            assert!(is_same(&name, &name.clone()));
            assert!(!is_same(&name, &[&name[..], b"0"].concat()));
            for n in 0..name.len() {
                let mut other = name.clone();
                other[n] ^= 1;
                assert!(!is_same(&name, &other), "byte {n} of {len}");
            }
        }
    }

    fn token(number: u64) -> Token {
        Token::new(number).unwrap()
    }

    fn store() -> (Db, Keyspace) {
        let options = Options::new().storage(SimDisk::new()).without_threads().deterministic(1);
        let db = options.segment_bytes(16 << 10).open("sim").unwrap();
        let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        (db, rows)
    }

    /// The segment of a version goes once the one after it is durable: a reader who set out before finds that one.
    #[test]
    fn a_version_that_goes_while_a_reader_looks_back_leaves_the_one_after_it() {
        let (db, rows) = store();
        rows.put(token(1), b"key", b"before").unwrap();
        for n in 0..40 {
            rows.put(token(1), b"other", &[n; 900]).unwrap();
        }
        let commit = rows.submit_put(token(1), b"key", b"after").unwrap();
        let engine = &db.shared.engine;
        let (guard, hash) = (crossbeam_epoch::pin(), engine.hash(&rows.state, Class::Key, b"key"));
        let newest = engine.newest(&rows.state, Class::Key, b"key", hash, &guard).unwrap();
        let link = |op: &OpRef<'_>| {
            assert!(op.lsn > engine.progress.durable());
            db.compact().unwrap();
            let at = op.head.previous().unwrap();
            assert!(engine.segments.of(at.segment, &guard).is_none());
            Some(at)
        };
        let found = engine.back_to(newest, When::Visible, link, &guard).unwrap();
        assert_eq!(found.expect("the key was never without a value").value(), b"after");
        assert!(commit.wait().unwrap() <= engine.progress.durable());
    }

    /// What a look in front of the lock answers, and then, after `between`, one behind it that knows of the first,
    /// and one that does not.
    fn looks(db: &Db, rows: &Keyspace, between: impl FnOnce()) -> (Option<Glance>, FenceView, FenceView) {
        let engine = &db.shared.engine;
        let hashes = engine.fence_hashes(&rows.state, b"key");
        let seen = engine.check_early(&rows.state, b"key", hashes, token(9)).unwrap();
        between();
        let guard = crossbeam_epoch::pin();
        let again = engine.fence_seen(&rows.state, b"key", hashes, seen, &guard).unwrap();
        let anew = engine.fence(&rows.state, b"key", hashes, When::Appended, &guard).unwrap();
        (seen, again, anew)
    }

    #[test]
    fn what_was_seen_of_a_fence_counts_only_while_it_stands() {
        type Between = fn(&Db, &Keyspace);
        let cases: [(&str, Between); 8] = [
            ("nothing", |_, _| {}),
            ("a put", |_, rows| {
                rows.put(token(5), b"key", b"later").unwrap();
            }),
            ("the same token", |_, rows| {
                rows.put(token(3), b"key", b"later").unwrap();
            }),
            ("a delete", |_, rows| {
                rows.delete(token(5), b"key").unwrap();
            }),
            ("a numbered put", |_, rows| {
                rows.put_operation(token(5), OperationId::new(1), b"key", b"").unwrap();
            }),
            ("a raise", |_, rows| {
                rows.raise(token(6), b"key").unwrap();
            }),
            ("a floor", |_, rows| {
                rows.raise_all(token(7)).unwrap();
            }),
            ("compaction", |db, rows| {
                for n in 0..40 {
                    rows.put(token(1), b"other", &[n; 900]).unwrap();
                }
                db.compact().unwrap();
            }),
        ];
        for (what, between) in cases {
            for writes in 0..3 {
                let (db, rows) = store();
                match writes {
                    0 => {}
                    1 => _ = rows.put(token(3), b"key", b"first").unwrap(),
                    _ => _ = rows.put_operation(token(3), OperationId::new(7), b"key", b"first").unwrap(),
                }
                let (seen, again, anew) = looks(&db, &rows, || between(&db, &rows));
                assert_eq!(seen.map(|seen| seen.token), (writes > 0).then_some(3), "{what}");
                assert_eq!(format!("{again:?}"), format!("{anew:?}"), "{what} in between, {writes}");
            }
        }
    }

    #[test]
    fn a_grant_knows_of_its_fence_what_a_judge_would() {
        type Step = fn(&Db, &Keyspace, Token);
        let put: Step = |_, jobs, token| _ = jobs.put(token, b"job", b"done").unwrap();
        let number: Step = |_, jobs, token| {
            jobs.put_operation(token, OperationId::new(token.get()), b"job", b"done").unwrap();
        };
        let kick: Step = |_, jobs, _| _ = jobs.break_lease(b"job", "stuck").unwrap();
        let carry: Step = |db, jobs, token| {
            (0..40).for_each(|n| _ = jobs.put(token, b"job", &[n; 900]).unwrap());
            db.compact().unwrap();
        };
        let floor: Step = |_, jobs, token| _ = jobs.raise_all(token).unwrap();
        for scope in [Scope::Key, Scope::Prefix(b'/')] {
            for steps in [&[put, put][..], &[kick], &[carry, carry], &[number, put], &[number, floor, carry]]
            {
                let (db, _) = store();
                let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(scope)).unwrap();
                let engine = &db.shared.engine;
                for step in [&[put], steps].concat() {
                    let name = jobs.fence_name(b"job").unwrap();
                    let guard = crossbeam_epoch::pin();
                    let hashes = engine.fence_hashes(&jobs.state, name);
                    let view = engine.fence(&jobs.state, name, hashes, When::Appended, &guard).unwrap();
                    let last = engine.leases.current(jobs.state.id, name).and_then(|grant| grant.at);
                    let (hash, short) = engine.fence_to_grant(&jobs.state, name, last, &guard).unwrap();
                    assert_eq!((hash, short.at, short.weight), (hashes.own, view.at, view.weight));
                    let after =
                        |view: &FenceView| admit(&view.state, token(1 << 40), None, Lsn::new(1)).predecessor;
                    assert_eq!(after(&short), after(&view));
                    let lease = jobs.lease(b"job").acquire().unwrap();
                    assert_eq!(lease.predecessor().map(|(token, op)| (token.get(), op)), after(&view));
                    step(&db, &jobs, lease.token());
                }
            }
        }
    }
}
