//! Marks that nobody needs any more become one floor.
//!
//! One job: raise the floor of a keyspace to the largest mark that compaction is about to drop. Promises
//! C4, its half: the floor is durable before a mark is dropped, and below the token of every lease of the
//! keyspace that is live, pending, or from before the open and not yet certain to be over.
//!
//! The floor is exclusive: a token equal to it is fenced too, for nobody knows any more which fence it was
//! granted for. Keyspaces of external tokens are never folded: see `Keyspace::retire_below`.
//!
//! Read next: `carry.rs`, which drops what the floor covers.

use crate::append::{frame_bytes, room};
use crate::carry::{Victim, state_name};
use crate::engine::{Engine, KeyspaceState, When};
use crate::error::Result;
use crate::fence::{Floor, is_fenced};
use crate::log::pool::Need;
use crate::log::segment::{OpRef, Segments};
use crate::op::{Class, Kind};
use crate::options::{Scope, Tokens};
use crate::space::Afterlife;
use crate::sync::{Arc, Ordering};
use crate::types::{KeyspaceId, Token, Ttl};
use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};

impl Engine {
    /// Raises the floors over the marks in `victims` that nobody needs, durably.
    pub fn fold(&self, victims: &[Victim]) -> Result<()> {
        let mut floors: BTreeMap<KeyspaceId, (Arc<KeyspaceState>, u64)> = BTreeMap::new();
        let mut limits = BTreeMap::new();
        let mut held_back = 0;
        for op in victims.iter().flat_map(Victim::ops) {
            let op = op?;
            let Some(keyspace) = self.keyspace_by_id(op.head.keyspace) else { continue };
            let token = op.head.token;
            let known = floors.get(&keyspace.id).map_or(0, |(_, token)| *token);
            let known = known.max(keyspace.floor_durable().folded);
            if keyspace.options.tokens != Tokens::Store || token <= known || !self.is_idle(&keyspace, &op)? {
                continue;
            }
            let limit = *limits.entry(keyspace.id).or_insert_with(|| self.lowest_needed(&keyspace));
            if limit.is_none_or(|limit| token < limit.get()) {
                floors.insert(keyspace.id, (keyspace, token));
            } else {
                held_back += 1;
            }
        }
        if held_back > 0 || !floors.is_empty() {
            self.counters.held_back.store(held_back, Ordering::Relaxed);
        }
        for (keyspace, token) in floors.into_values() {
            let floor = Floor::folded(token);
            let lsn = self.with_room(room(frame_bytes(1, 1), 1), Need::Compaction, |tail| {
                if keyspace.floor_appended().folded >= token {
                    return keyspace.floor_lsn();
                }
                self.counters.folds.fetch_add(1, Ordering::Relaxed);
                // Every lease below it is over: counting them has ended those that ran out.
                self.append_floor(tail, &keyspace, floor)
            })?;
            self.commit_behind_locks(lsn)?;
        }
        Ok(())
    }

    /// The lowest token of the keyspace that somebody may still write with. Leases that are over are ended on
    /// the way, so that none of them can be renewed after it was not counted; grants that come later
    /// have higher tokens than any mark there is now.
    pub fn lowest_needed(&self, keyspace: &KeyspaceState) -> Option<Token> {
        let now = self.options.clock.now();
        let mut lowest: Option<Token> = None;
        let mut need = |token: Token| lowest = Some(lowest.map_or(token, |lowest| lowest.min(token)));
        self.leases.for_each_of(keyspace.id, b"", |_, grant| {
            grant.end_if_expired(now);
            let is_for_ever = grant.is_recorded() && grant.ttl() == Ttl::INFINITE;
            if !grant.is_free(now) || is_for_ever {
                need(grant.token());
            }
        });
        let mut afterlives = self.afterlives.lock();
        afterlives.retain(|afterlife| afterlife.until > now);
        for afterlife in afterlives.iter().filter(|afterlife| afterlife.keyspace == keyspace.id) {
            if !self.is_superseded(keyspace, afterlife) {
                need(afterlife.token);
            }
        }
        lowest
    }

    fn is_superseded(&self, keyspace: &KeyspaceState, afterlife: &Afterlife) -> bool {
        let guard = crossbeam_epoch::pin();
        let hashes = self.fence_hashes(keyspace, &afterlife.fence);
        let view = self.fence(keyspace, &afterlife.fence, hashes, When::Visible, &guard);
        // What cannot be read is not known to be superseded.
        view.is_ok_and(|view| is_fenced(afterlife.token, view.state.mark, keyspace.floor_durable()))
    }

    /// Whether an op is the state of a fence that holds no key: its lease is asked for elsewhere.
    fn is_idle(&self, keyspace: &KeyspaceState, op: &OpRef<'_>) -> Result<bool> {
        let guard = crossbeam_epoch::pin();
        let place = Segments::place(op.at);
        if keyspace.options.scope == Scope::Key {
            let class = if op.head.kind == Kind::Delete { Class::Key } else { Class::Fence };
            let is_state = matches!(op.head.kind, Kind::Delete | Kind::Grant | Kind::Mark)
                && self.slots.holds(self.hash(keyspace, class, op.key()), place, &guard);
            if !is_state {
                return Ok(false);
            }
            let other = if class == Class::Key { Class::Fence } else { Class::Key };
            let hash = self.hash(keyspace, other, op.key());
            let other = self.newest(keyspace, other, op.key(), hash, &guard)?;
            // A key is there; or the fence has risen since, and knows what was committed before.
            return Ok(other.is_none_or(|other| match class {
                Class::Key => other.lsn < op.lsn,
                _ => other.head.kind != Kind::Put && other.head.token <= op.head.token,
            }));
        }
        let Some(name) = state_name(keyspace, op) else { return Ok(false) };
        if !self.slots.holds(self.hash(keyspace, Class::Fence, name), place, &guard) {
            return Ok(false);
        }
        // The keys of a fence start with its name, so the first one at or behind the name tells.
        if keyspace.keys.ask() {
            self.sort_all_keys()?;
        }
        let mut holds_key = false;
        let visited = keyspace.keys.for_each_in(Bound::Included(name), Bound::Unbounded, |key| {
            holds_key = keyspace.fence_of(key) == name;
            ControlFlow::Break(())
        });
        debug_assert_eq!(visited, Ok(()), "sorted above, for ever");
        Ok(!holds_key)
    }
}

#[cfg(test)]
mod tests {
    use crate::options::{KeyspaceOptions, Options};
    use crate::storage::SimDisk;
    use crate::types::{Token, Ttl};

    #[test]
    fn what_a_lease_holds_back_is_told_until_a_round_finds_otherwise() {
        let options = Options::new().storage(SimDisk::new()).without_threads().deterministic(1);
        let db = options.segment_bytes(16 << 10).open("sim").unwrap();
        let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
        let held = jobs.lease(b"held").ttl(Ttl::INFINITE).acquire().unwrap();
        for n in 0..20u8 {
            jobs.lease(&[n]).acquire().unwrap().release().unwrap();
        }
        // The last mark in the log is not the highest.
        jobs.raise(Token::new(2).unwrap(), b"other").unwrap();
        db.compact().unwrap();
        // Its own among them.
        assert_eq!((jobs.floor(), db.stats().held_back_marks), (None, 22));
        db.shared.engine.fold(&[]).unwrap();
        assert_eq!(db.stats().held_back_marks, 22, "a round without marks knows nothing of them");
        held.release().unwrap();
        db.compact().unwrap();
        assert_eq!(db.stats().held_back_marks, 0);
        assert_eq!(jobs.floor().unwrap().mark.get(), 21, "the highest of all");
        // What a durable floor covers stays behind, and the op that creates the keyspace does not.
        let carried = db.shared.engine.tail.lock().usage.carried();
        assert!((1..40).contains(&carried), "{carried}");
    }
}
