//! The grant of each fence.
//!
//! One job: find, replace and end them. Promises L1 (one grant per fence that is not ended) and the half of
//! L5 that is here: ending all that a raised mark has passed.
//!
//! Never reads a clock and never decides who gets a fence. Read next: `waiters.rs`.

use rapidhash::v3::{DEFAULT_RAPID_SECRETS, rapidhash_v3_micro_inline};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;

use crate::lease::{Ending, Grant};
use crate::slots::slot_of;
use crate::sync::{Arc, AtomicUsize, CachePadded, Mutex, Ordering};
use crate::types::{KeyspaceId, Token};

/// Parts of the table, each under its own lock.
const SHARDS: usize = 16;
/// How many grants are looked at for each one inserted.
const SWEEP: usize = 8;

/// The grants of one shard, by keyspace and fence: nested, so that it is searched by borrowed bytes;
/// ordered, so that it needs no random hash keys and a simulation sees the same order each time.
#[derive(Debug, Default)]
struct Shard {
    keyspaces: BTreeMap<KeyspaceId, Fences>,
    /// Where the next sweep goes on.
    swept: Option<(KeyspaceId, Box<[u8]>)>,
}

type Fences = BTreeMap<Box<[u8]>, Arc<Grant>>;

/// The last grant of each fence: at most one that is not ended (L1).
///
/// Marks and tokens are decided under the engine's tail lock, so grants are inserted and ended by raises
/// under it too. Renewing and releasing need only the grant itself, found under the lock of its shard:
/// a leaf in the lock order, of which one is held at a time. All slots of one key lie in one shard.
#[derive(Debug)]
pub(crate) struct LeaseTable {
    shards: [CachePadded<Mutex<Shard>>; SHARDS],
    /// Grants in all shards. Relaxed: nothing rests on it.
    len: AtomicUsize,
    /// The shard that the next sweep is in.
    turn: AtomicUsize,
}

impl LeaseTable {
    pub(crate) fn new() -> Self {
        LeaseTable {
            shards: std::array::from_fn(|_| CachePadded::new(Mutex::new(Shard::default()))),
            len: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
        }
    }

    /// The grant of the fence, if it has one: pending, live, expired or ended, the caller asks.
    pub(crate) fn current(&self, keyspace: KeyspaceId, fence: &[u8]) -> Option<Arc<Grant>> {
        self.shard(keyspace, fence).lock().keyspaces.get(&keyspace)?.get(fence).cloned()
    }

    /// Makes `grant` the one of the fence, and answers the one before it, ended.
    pub(crate) fn insert(&self, keyspace: KeyspaceId, fence: &[u8], grant: Arc<Grant>) -> Option<Arc<Grant>> {
        let mut shard = self.shard(keyspace, fence).lock();
        let fences = shard.keyspaces.entry(keyspace).or_default();
        if let Some(place) = fences.get_mut(fence) {
            // Upholds L1: what is no longer in the table is ended, or nobody could end it.
            place.end(Ending::Overtaken);
            return Some(std::mem::replace(place, grant));
        }
        fences.insert(fence.into(), grant);
        self.len.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Ends and removes the grant of the fence if it is the one of `token`.
    pub(crate) fn remove_if(&self, keyspace: KeyspaceId, fence: &[u8], token: Token) -> bool {
        self.end_fence_if(keyspace, fence, |grant| grant.token() == token)
    }

    /// Removes a grant that was given back; `false`: the fence has a newer one, which says as much.
    pub(crate) fn remove_released(&self, keyspace: KeyspaceId, fence: &[u8], token: Token) -> bool {
        self.remove_if(keyspace, fence, token) || self.current(keyspace, fence).is_none()
    }

    /// Ends and removes the grant of the fence if its token is below `token`, which is its mark now.
    pub(crate) fn end_fence_below(&self, keyspace: KeyspaceId, fence: &[u8], token: Token) -> bool {
        // Upholds L5 for one fence.
        self.end_fence_if(keyspace, fence, |grant| grant.token() < token)
    }

    /// Ends and removes every grant of the keyspace with a token below `token`, which is its floor now.
    pub(crate) fn end_below(&self, keyspace: KeyspaceId, token: Token) {
        // Upholds L5 for all fences.
        for shard in &self.shards {
            let mut shard = shard.lock();
            if let Entry::Occupied(mut fences) = shard.keyspaces.entry(keyspace) {
                let before = fences.get().len();
                fences.get_mut().retain(|_, grant| {
                    let overtaken = grant.token() < token;
                    if overtaken {
                        grant.end(Ending::Overtaken);
                    }
                    !overtaken
                });
                self.len.fetch_sub(before - fences.get().len(), Ordering::Relaxed);
                if fences.get().is_empty() {
                    fences.remove();
                }
            }
        }
    }

    /// Removes what is over among the next few grants: those that ended in their place, and those whose
    /// deadline passed at `now` and which nobody ever released.
    ///
    /// To be called once for each insertion: as each looks at several, what is over never makes up more
    /// than a part of the table; and as it looks at no more, a million leases that expire together delay
    /// nobody.
    pub(crate) fn sweep(&self, now: u64) {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        // Locked by somebody else: whoever comes next sweeps for both.
        let mut shard = self.shards[turn % SHARDS].lock();
        let from = shard.swept.take();
        let mut over = Vec::new();
        let mut looked_at = 0;
        let first = from.as_ref().map_or(KeyspaceId(0), |(keyspace, _)| *keyspace);
        'all: for (&keyspace, fences) in shard.keyspaces.range(first..) {
            let start = match &from {
                Some((at, fence)) if *at == keyspace => Bound::Excluded(&**fence),
                _ => Bound::Unbounded,
            };
            for (fence, grant) in fences.range::<[u8], _>((start, Bound::Unbounded)) {
                // Expired ones are ended before they leave: see `Grant`.
                grant.end_if_expired(now);
                if grant.is_free(now) && !grant.is_listed_for_ever() {
                    over.push((keyspace, fence.clone()));
                }
                looked_at += 1;
                if looked_at == SWEEP {
                    shard.swept = Some((keyspace, fence.clone()));
                    break 'all;
                }
            }
        }
        for (keyspace, fence) in over {
            if let Entry::Occupied(mut fences) = shard.keyspaces.entry(keyspace) {
                fences.get_mut().remove(&fence);
                self.len.fetch_sub(1, Ordering::Relaxed);
                if fences.get().is_empty() {
                    fences.remove();
                }
            }
        }
    }

    /// How many fences have a grant here, ended or not.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Shows every grant, shard by shard, each shard at one moment. `show` must not call this table.
    pub(crate) fn for_each_of(
        &self,
        keyspace: KeyspaceId,
        prefix: &[u8],
        mut show: impl FnMut(&[u8], &Arc<Grant>),
    ) {
        for shard in &self.shards {
            let shard = shard.lock();
            let Some(fences) = shard.keyspaces.get(&keyspace) else { continue };
            for (fence, grant) in fences.range::<[u8], _>((Bound::Included(prefix), Bound::Unbounded)) {
                if !fence.starts_with(prefix) {
                    break;
                }
                show(fence, grant);
            }
        }
    }

    /// The grants of all slots of a key, with their numbers.
    pub(crate) fn slots(&self, keyspace: KeyspaceId, key: &[u8]) -> Vec<(u32, Arc<Grant>)> {
        let from = [key, b"."].concat();
        let to = [key, b"/"].concat();
        let shard = self.shard_of(keyspace, key).lock();
        let Some(fences) = shard.keyspaces.get(&keyspace) else { return Vec::new() };
        fences
            .range::<[u8], _>((Bound::Included(&from[..]), Bound::Excluded(&to[..])))
            .filter_map(|(fence, grant)| match slot_of(fence) {
                Some((of, index)) if of == key => Some((index, grant.clone())),
                _ => None,
            })
            .collect()
    }

    fn end_fence_if(
        &self,
        keyspace: KeyspaceId,
        fence: &[u8],
        condition: impl FnOnce(&Grant) -> bool,
    ) -> bool {
        let mut shard = self.shard(keyspace, fence).lock();
        let Entry::Occupied(mut fences) = shard.keyspaces.entry(keyspace) else { return false };
        match fences.get().get(fence) {
            Some(grant) if condition(grant) => {
                grant.end(Ending::Overtaken);
            }
            _ => return false,
        }
        fences.get_mut().remove(fence);
        self.len.fetch_sub(1, Ordering::Relaxed);
        if fences.get().is_empty() {
            fences.remove();
        }
        true
    }

    fn shard(&self, keyspace: KeyspaceId, fence: &[u8]) -> &Mutex<Shard> {
        self.shard_of(keyspace, slot_of(fence).map_or(fence, |(key, _)| key))
    }

    fn shard_of(&self, keyspace: KeyspaceId, name: &[u8]) -> &Mutex<Shard> {
        // Not keyed: whoever chooses names that meet here makes them share a lock, and nothing more.
        let hash = rapidhash_v3_micro_inline::<true, false>(name, &DEFAULT_RAPID_SECRETS);
        &self.shards[(hash as usize).wrapping_add(keyspace.0.into()) % SHARDS]
    }
}

// Loom and shuttle have their own models of a grant, and their primitives do not run outside of them.
#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::lease::{Bell, FenceId, RenewError, Terms};
    use crate::types::{Lsn, OwnerId, Ttl};
    use std::time::Duration;

    const MS: u64 = 1_000_000;
    const OWNER: OwnerId = OwnerId::new(7);
    const JOBS: KeyspaceId = KeyspaceId(1);
    const LOCKS: KeyspaceId = KeyspaceId(2);

    fn token(number: u64) -> Token {
        Token::new(number).unwrap()
    }

    fn fence() -> FenceId {
        FenceId::new(KeyspaceId(1), b"f")
    }

    fn terms(ttl: Ttl) -> Terms {
        Terms { owner: OWNER, ttl, delay: 0 }
    }

    fn grant_at(number: u64, now: u64) -> Grant {
        let ttl = Ttl::new(Duration::from_millis(10)).unwrap();
        Grant::pending(fence(), token(number), terms(ttl), Lsn::new(number), now, &Arc::new(Bell::new()))
    }

    fn grant(number: u64) -> Grant {
        grant_at(number, MS)
    }

    /// A grant of 10 ms, live since `now`.
    fn live(number: u64, now: u64) -> Arc<Grant> {
        let grant = grant_at(number, now);
        assert!(grant.enable(now));
        Arc::new(grant)
    }

    fn renew(grant: &Grant, now: u64) -> Result<u64, RenewError> {
        grant.renew(now, u64::MAX).map(|renewed| renewed.until)
    }

    #[test]
    fn a_fence_has_one_grant_and_taking_over_ends_the_old_one() {
        let table = LeaseTable::new();
        let old = live(1, MS);
        assert!(table.insert(JOBS, b"a", old.clone()).is_none());
        assert!(table.current(JOBS, b"b").is_none());
        assert!(table.current(LOCKS, b"a").is_none());
        assert!(Arc::ptr_eq(&table.current(JOBS, b"a").unwrap(), &old));
        let replaced = table.insert(JOBS, b"a", live(2, MS)).unwrap();
        assert!(Arc::ptr_eq(&replaced, &old));
        assert!(old.is_ended());
        assert_eq!(table.current(JOBS, b"a").unwrap().token(), token(2));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_grant_is_removed_by_its_own_token_only() {
        let table = LeaseTable::new();
        let grant = live(2, MS);
        table.insert(JOBS, b"a", grant.clone());
        assert!(!table.remove_if(JOBS, b"a", token(1)));
        assert!(!table.remove_if(LOCKS, b"a", token(2)));
        assert!(!grant.is_ended());
        assert!(table.remove_if(JOBS, b"a", token(2)));
        assert!(grant.is_ended());
        assert!(!table.remove_if(JOBS, b"a", token(2)));
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_release_is_worth_a_record_unless_a_newer_grant_follows() {
        let table = LeaseTable::new();
        let old = live(1, MS);
        table.insert(JOBS, b"a", old.clone());
        old.end(Ending::Released);
        assert!(table.remove_released(JOBS, b"a", token(1)));
        assert_eq!(table.len(), 0);
        // Swept before: nothing follows it.
        assert!(table.remove_released(JOBS, b"a", token(1)));
        table.insert(JOBS, b"a", live(2, MS));
        assert!(!table.remove_released(JOBS, b"a", token(1)));
        assert!(table.current(JOBS, b"a").unwrap().is_live(MS));
    }

    #[test]
    fn a_raised_mark_ends_the_grant_below_it() {
        let table = LeaseTable::new();
        let grant = live(5, MS);
        table.insert(JOBS, b"a", grant.clone());
        assert!(!table.end_fence_below(JOBS, b"a", token(5)));
        assert!(grant.is_live(MS));
        assert!(table.end_fence_below(JOBS, b"a", token(6)));
        assert!(grant.is_ended());
        assert!(table.current(JOBS, b"a").is_none());
    }

    #[test]
    fn a_raised_floor_ends_every_grant_of_the_keyspace_below_it() {
        let table = LeaseTable::new();
        let grants: Vec<_> = (1..=100).map(|number| Arc::new(grant(number))).collect();
        for grant in &grants {
            table.insert(JOBS, &grant.token().get().to_le_bytes(), grant.clone());
        }
        let elsewhere = live(1, MS);
        table.insert(LOCKS, b"a", elsewhere.clone());
        table.end_below(JOBS, token(60));
        assert_eq!(table.len(), 42);
        for grant in &grants {
            assert_eq!(grant.is_ended(), grant.token() < token(60));
        }
        assert!(elsewhere.is_live(MS));
        table.end_below(JOBS, Token::MAX);
        table.end_below(KeyspaceId(3), Token::MAX);
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn every_grant_is_shown_once() {
        let table = LeaseTable::new();
        for number in 1..=50u64 {
            table.insert(JOBS, &number.to_be_bytes(), live(number, MS));
        }
        table.insert(LOCKS, b"elsewhere", live(60, MS));
        let mut seen = Vec::new();
        table.for_each_of(JOBS, b"", |fence, grant| {
            assert_eq!(fence, grant.token().get().to_be_bytes());
            seen.push(grant.token().get());
        });
        seen.sort_unstable();
        assert!(seen.into_iter().eq(1..=50));
        let mut some = 0;
        table.for_each_of(JOBS, &[0; 8], |_, _| some += 1);
        table.for_each_of(JOBS, &7u64.to_be_bytes(), |_, _| some += 1);
        assert_eq!(some, 1);
    }

    #[test]
    fn the_slots_of_a_key_are_found_among_other_names() {
        let table = LeaseTable::new();
        for name in
            [&b"user.0/"[..], b"user.12/", b"user.x/", b"user/", b"user.0.1/", b"users.3/", b"user.07/"]
        {
            table.insert(JOBS, name, live(1, MS));
        }
        let mut slots: Vec<_> = table.slots(JOBS, b"user").into_iter().map(|(index, _)| index).collect();
        slots.sort_unstable();
        assert_eq!(slots, [0, 12]);
        // Names of other keys' slots that lie among those of this key, in the same shard too.
        for n in 100..200 {
            table.insert(JOBS, format!("user.{n}.1/").as_bytes(), live(1, MS));
        }
        assert_eq!(table.slots(JOBS, b"user").len(), 2);
        assert_eq!(table.slots(JOBS, b"user.0").len(), 1);
        assert_eq!(table.slots(LOCKS, b"user").len(), 0);
    }

    #[test]
    fn leases_nobody_releases_do_not_pile_up() {
        let table = LeaseTable::new();
        let mut now = MS;
        let mut len_max = 0;
        for number in 1..=20_000u64 {
            table.insert(JOBS, &number.to_le_bytes(), live(number, now));
            table.sweep(now);
            len_max = len_max.max(table.len());
            now += MS;
        }
        assert!(len_max <= 256, "{len_max} grants of which at most 11 are live");
        assert!(table.current(JOBS, &20_000u64.to_le_bytes()).is_some());
    }

    /// Each sweep goes on where the last one of its shard stopped, over keyspaces too, and not far.
    #[test]
    fn leases_that_stay_do_not_hide_those_that_are_over() {
        let table = LeaseTable::new();
        let forever = |number| {
            let grant = Grant::pending(
                fence(),
                token(number),
                terms(Ttl::INFINITE),
                Lsn::ZERO,
                MS,
                &Arc::new(Bell::new()),
            );
            assert!(grant.enable(MS));
            Arc::new(grant)
        };
        // In front of the others in one keyspace, and with names behind all of the other one's.
        for number in 1..=400u64 {
            table.insert(JOBS, &[b"a", &number.to_be_bytes()[..]].concat(), forever(number));
        }
        for number in 1..=400u64 {
            table.insert(JOBS, &[b"m", &number.to_be_bytes()[..]].concat(), live(number, MS));
            table.insert(JOBS, &[b"z", &number.to_be_bytes()[..]].concat(), forever(number));
            table.insert(LOCKS, &[b"c", &number.to_be_bytes()[..]].concat(), live(number, MS));
        }
        let before = table.len();
        table.sweep(20 * MS);
        assert!(table.len() >= before - SWEEP, "one sweep is short");
        for _ in 0..SHARDS * 1600 / SWEEP {
            table.sweep(20 * MS);
        }
        assert_eq!(table.len(), 800, "what is over is gone, the rest is there");
    }

    #[test]
    fn a_sweep_keeps_what_nobody_broke_of_an_earlier_life() {
        let table = LeaseTable::new();
        let bell = Arc::new(Bell::new());
        let bounded = terms(Ttl::new(Duration::from_millis(10)).unwrap());
        let kept = Grant::recorded(fence(), token(1), terms(Ttl::INFINITE), MS, 0, &bell);
        table.insert(JOBS, b"kept", Arc::new(kept));
        table.insert(JOBS, b"over", Arc::new(Grant::recorded(fence(), token(2), bounded, MS, 0, &bell)));
        let ended = Grant::pending(fence(), token(3), terms(Ttl::INFINITE), Lsn::ZERO, MS, &bell);
        assert!(ended.enable(MS) && ended.end(Ending::Released));
        table.insert(JOBS, b"ended", Arc::new(ended));
        for _ in 0..SHARDS {
            table.sweep(2 * MS);
        }
        assert!(table.current(JOBS, b"kept").is_some());
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_sweep_removes_only_what_is_over_and_ends_it_first() {
        let table = LeaseTable::new();
        let expired: Vec<_> = (1..=300).map(|number| live(number, MS)).collect();
        for grant in &expired {
            table.insert(JOBS, &grant.token().get().to_le_bytes(), grant.clone());
        }
        let terms = Terms { delay: 100 * MS, ..terms(Ttl::new(Duration::from_millis(10)).unwrap()) };
        let delayed = Grant::pending(fence(), token(999), terms, Lsn::new(1), MS, &Arc::new(Bell::new()));
        assert!(delayed.enable(MS));
        table.insert(LOCKS, b"delayed", Arc::new(delayed));
        table.insert(LOCKS, b"live", live(1000, 15 * MS));
        table.insert(LOCKS, b"pending", Arc::new(grant_at(1001, 15 * MS)));
        table.insert(LOCKS, b"ended", live(1002, 15 * MS));
        table.current(LOCKS, b"ended").unwrap().end(Ending::Released);
        for _ in 0..300 {
            table.sweep(15 * MS);
        }
        assert_eq!(table.len(), 3);
        for kept in [&b"live"[..], b"pending", b"delayed"] {
            assert!(table.current(LOCKS, kept).is_some(), "{kept:?}");
        }
        for grant in expired {
            assert_eq!(renew(&grant, 2 * MS), Err(RenewError::Ended));
        }
    }
}
