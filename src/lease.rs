//! Who holds what, until when.
//!
//! One job: the word of one grant, [`Grant`], and the table of the grant of each fence,
//! [`LeaseTable`]. Promises L1 (one live grant per fence), L4 (an ended grant never lives again) and the
//! half of L5 that is here: ending all that a raised mark has passed.
//!
//! Never reads a clock (`now` is an argument, in nanoseconds), raises a mark or decides whether a write is
//! allowed: only a newer token fences. Nothing here survives a restart, and nothing has to.
//!
//! Read next: `fence.rs`, the rule that holds when every lease is wrong; the interleavings of a grant are
//! tried by `tests/loom.rs`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use crate::sync::{Arc, AtomicU64, AtomicUsize, CachePadded, Mutex, Ordering};
use crate::types::{KeyspaceId, OwnerId, Token, Ttl};

const PENDING: u64 = 0;
const ENDED: u64 = 1;
const FOREVER: u64 = u64::MAX;
/// A clock says at least this, so that no deadline is taken for a state.
const NOW_MIN: u64 = 16;

/// Why a renewal was refused. None of the reasons ever goes away, except `Pending`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RenewError {
    /// The deadline has passed, nobody took over, and now the grant is ended.
    Expired,
    /// Released, broken, overtaken, or expired and found so by somebody else.
    Ended,
    /// Not durable yet, so not handed out yet.
    Pending,
}

/// One grant: a token, its owner, and until when.
///
/// Everything that changes is one word, so each change is one compare-and-swap:
///
/// | word       | state   | `enable` | `renew(now)`                        | `end`   | `end_if_expired(now)` |
/// |------------|---------|----------|-------------------------------------|---------|-----------------------|
/// | 0          | pending | → live   | `Pending`                           | → ended | no                    |
/// | a deadline | live    | no       | before it: → a later one            | → ended | no                    |
/// |            |         | no       | from it on: → ended, `Expired`      | → ended | → ended               |
/// | `u64::MAX` | live    | no       | as it is                            | → ended | no                    |
/// | 1          | ended   | no       | `Ended`                             | no      | no                    |
///
/// Nothing leads out of ended (L4). Expiry is a question about a deadline and a clock, not a state:
/// whoever acts on its answer must first end the grant by an exchange of exactly the deadline it asked
/// about. A holder that renewed in between wins that exchange; one that was paused between its clock
/// and its exchange loses it, for ever.
#[derive(Debug)]
pub(crate) struct Grant {
    token: Token,
    owner: OwnerId,
    ttl: Ttl,
    /// See above. Changed by AcqRel exchanges and loaded with Acquire, which pair with each other: who
    /// sees a grant live, or ended, sees what was done before it became so.
    word: AtomicU64,
}

impl Grant {
    /// A grant that is appended but not durable: nobody holds it yet, and nobody else gets the fence.
    pub(crate) fn pending(token: Token, owner: OwnerId, ttl: Ttl) -> Self {
        Grant { token, owner, ttl, word: AtomicU64::new(PENDING) }
    }

    pub(crate) fn token(&self) -> Token {
        self.token
    }

    pub(crate) fn owner(&self) -> OwnerId {
        self.owner
    }

    pub(crate) fn ttl(&self) -> Ttl {
        self.ttl
    }

    /// Makes a pending grant live from `now` on; `false` if it was ended meanwhile and must not be
    /// handed out.
    pub(crate) fn enable(&self, now: u64) -> bool {
        self.swap(PENDING, self.deadline(now)).is_ok()
    }

    /// Whether the grant is held at `now`.
    pub(crate) fn is_live(&self, now: u64) -> bool {
        match self.word.load(Ordering::Acquire) {
            PENDING | ENDED => false,
            deadline => !is_past(deadline, now),
        }
    }

    /// Whether the grant is over for good.
    pub(crate) fn is_ended(&self) -> bool {
        self.word.load(Ordering::Acquire) == ENDED
    }

    /// Moves the deadline to `now` and one ttl, never back, and answers the deadline that stands.
    pub(crate) fn renew(&self, now: u64) -> Result<u64, RenewError> {
        let mut seen = self.word.load(Ordering::Acquire);
        loop {
            let (next, answer) = match seen {
                PENDING => return Err(RenewError::Pending),
                ENDED => return Err(RenewError::Ended),
                deadline if is_past(deadline, now) => (ENDED, Err(RenewError::Expired)),
                deadline => {
                    let later = self.deadline(now).max(deadline);
                    (later, Ok(later))
                }
            };
            if next == seen {
                return answer;
            }
            // Upholds L4: a grant that was ended since the load is no longer `seen`.
            match self.swap(seen, next) {
                Ok(()) => return answer,
                Err(now_there) => seen = now_there,
            }
        }
    }

    /// Ends the grant; `true` for the one call that did.
    pub(crate) fn end(&self) -> bool {
        self.word.swap(ENDED, Ordering::AcqRel) != ENDED
    }

    /// Ends the grant if its deadline has passed at `now`; `true` for the one call that did.
    pub(crate) fn end_if_expired(&self, now: u64) -> bool {
        match self.word.load(Ordering::Acquire) {
            PENDING | ENDED => false,
            // A failed exchange is an answer: it was renewed or ended since the load.
            deadline => is_past(deadline, now) && self.swap(deadline, ENDED).is_ok(),
        }
    }

    /// How long nobody else gets the fence unless the grant is renewed or ended; `None` if it has no end.
    pub(crate) fn remaining(&self, now: u64) -> Option<Duration> {
        match self.word.load(Ordering::Acquire) {
            FOREVER => None,
            PENDING => self.ttl.duration(),
            ENDED => Some(Duration::ZERO),
            deadline => Some(Duration::from_nanos(deadline.saturating_sub(now))),
        }
    }

    fn deadline(&self, now: u64) -> u64 {
        debug_assert!(now >= NOW_MIN, "the clock says what would read as a state");
        match self.ttl {
            Ttl::INFINITE => FOREVER,
            // At the far end of the clock a bounded grant is still not one for ever.
            ttl => now.saturating_add(ttl.nanos()).min(FOREVER - 1),
        }
    }

    fn swap(&self, seen: u64, next: u64) -> Result<(), u64> {
        self.word.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }
}

/// The one place where expiry is decided: the deadline itself is past. `FOREVER` never is.
fn is_past(deadline: u64, now: u64) -> bool {
    deadline != FOREVER && now >= deadline
}

/// Parts of the table, each under its own lock.
const SHARDS: usize = 16;
/// Below so many grants nothing is swept.
const SWEEP_MIN: usize = 256;

/// The grants of one shard, by keyspace and fence: nested, so that it is searched by borrowed bytes;
/// ordered, so that it needs no random hash keys and a simulation sees the same order each time.
type Shard = BTreeMap<KeyspaceId, BTreeMap<Box<[u8]>, Arc<Grant>>>;

/// The last grant of each fence: at most one that is not ended (L1).
///
/// Marks and tokens are decided under the engine's tail lock, so grants are inserted and ended by raises
/// under it too. Renewing and releasing need only the grant itself, found under the lock of its shard:
/// a leaf in the lock order, of which one is held at a time.
#[derive(Debug)]
pub(crate) struct LeaseTable {
    shards: [CachePadded<Mutex<Shard>>; SHARDS],
    /// Grants in all shards. Relaxed, like `sweep_at`: they say when to sweep, and nothing rests on them.
    len: AtomicUsize,
    /// The length at which the next sweep is due; `usize::MAX` while one runs.
    sweep_at: AtomicUsize,
}

impl LeaseTable {
    pub(crate) fn new() -> Self {
        LeaseTable {
            shards: std::array::from_fn(|_| CachePadded::new(Mutex::new(Shard::new()))),
            len: AtomicUsize::new(0),
            sweep_at: AtomicUsize::new(SWEEP_MIN),
        }
    }

    /// The grant of the fence, if it has one: pending, live, expired or ended, the caller asks.
    pub(crate) fn current(&self, keyspace: KeyspaceId, fence: &[u8]) -> Option<Arc<Grant>> {
        self.shard(keyspace, fence).lock().get(&keyspace)?.get(fence).cloned()
    }

    /// Makes `grant` the one of the fence, and answers the one before it, ended.
    pub(crate) fn insert(&self, keyspace: KeyspaceId, fence: &[u8], grant: Arc<Grant>) -> Option<Arc<Grant>> {
        let mut shard = self.shard(keyspace, fence).lock();
        let fences = shard.entry(keyspace).or_default();
        if let Some(place) = fences.get_mut(fence) {
            // Upholds L1: what is no longer in the table is ended, or nobody could end it.
            place.end();
            return Some(std::mem::replace(place, grant));
        }
        fences.insert(fence.into(), grant);
        self.len.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Ends and removes the grant of the fence if it is the one of `token`.
    pub(crate) fn remove_if(&self, keyspace: KeyspaceId, fence: &[u8], token: Token) -> bool {
        self.end_fence_if(keyspace, fence, |grant| grant.token == token)
    }

    /// Ends and removes the grant of the fence if its token is below `token`, which is its mark now.
    pub(crate) fn end_fence_below(&self, keyspace: KeyspaceId, fence: &[u8], token: Token) -> bool {
        // Upholds L5 for one fence.
        self.end_fence_if(keyspace, fence, |grant| grant.token < token)
    }

    /// Ends and removes every grant of the keyspace with a token below `token`, which is its floor now.
    pub(crate) fn end_below(&self, keyspace: KeyspaceId, token: Token) {
        // Upholds L5 for all fences.
        for shard in &self.shards {
            let mut shard = shard.lock();
            if let Entry::Occupied(mut fences) = shard.entry(keyspace) {
                self.retain(fences.get_mut(), |grant| {
                    let overtaken = grant.token < token;
                    if overtaken {
                        grant.end();
                    }
                    !overtaken
                });
                if fences.get().is_empty() {
                    fences.remove();
                }
            }
        }
    }

    /// Removes what is over, if enough may have gathered: grants that ended in their place, and those whose
    /// deadline passed at `now` and which nobody ever released.
    ///
    /// Two loads, unless the table has doubled since the last sweep. A sweep visits every grant, but as
    /// many were inserted since the last one as that left behind, so each insert pays for two visits; and
    /// the table is never more than twice what was unfinished at the last sweep, and a constant. To be
    /// called after inserting, without the tail lock: a sweep locks one shard after the other.
    pub(crate) fn sweep(&self, now: u64) {
        let due = self.sweep_at.load(Ordering::Relaxed);
        if self.len() < due {
            return;
        }
        // One sweeper is enough; the others go on.
        let mine =
            self.sweep_at.compare_exchange(due, usize::MAX, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !mine {
            return;
        }
        for shard in &self.shards {
            shard.lock().retain(|_, fences| {
                // Expired ones are ended before they leave: see `Grant`.
                self.retain(fences, |grant| !grant.is_ended() && !grant.end_if_expired(now));
                !fences.is_empty()
            });
        }
        self.sweep_at.store(SWEEP_MIN.max(self.len().saturating_mul(2)), Ordering::Relaxed);
    }

    /// How many fences have a grant here, ended or not.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Shows every grant, shard by shard, each shard at one moment. `show` must not call this table.
    pub(crate) fn for_each(&self, mut show: impl FnMut(KeyspaceId, &[u8], &Arc<Grant>)) {
        for shard in &self.shards {
            for (keyspace, fences) in shard.lock().iter() {
                for (fence, grant) in fences {
                    show(*keyspace, fence, grant);
                }
            }
        }
    }

    fn end_fence_if(
        &self,
        keyspace: KeyspaceId,
        fence: &[u8],
        condition: impl FnOnce(&Grant) -> bool,
    ) -> bool {
        let mut shard = self.shard(keyspace, fence).lock();
        let Entry::Occupied(mut fences) = shard.entry(keyspace) else { return false };
        match fences.get().get(fence) {
            Some(grant) if condition(grant) => {
                grant.end();
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

    fn retain(&self, fences: &mut BTreeMap<Box<[u8]>, Arc<Grant>>, mut keep: impl FnMut(&Grant) -> bool) {
        let before = fences.len();
        fences.retain(|_, grant| keep(grant));
        self.len.fetch_sub(before - fences.len(), Ordering::Relaxed);
    }

    fn shard(&self, keyspace: KeyspaceId, fence: &[u8]) -> &Mutex<Shard> {
        let mut hasher = DefaultHasher::new();
        (keyspace, fence).hash(&mut hasher);
        &self.shards[hasher.finish() as usize % SHARDS]
    }
}

// Loom has its own models of a grant, and its primitives do not run outside of them.
#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const OWNER: OwnerId = OwnerId::new(7);
    const JOBS: KeyspaceId = KeyspaceId(1);
    const LOCKS: KeyspaceId = KeyspaceId(2);

    fn token(number: u64) -> Token {
        Token::new(number).unwrap()
    }

    fn grant(number: u64) -> Grant {
        Grant::pending(token(number), OWNER, Ttl::new(Duration::from_millis(10)).unwrap())
    }

    /// A grant of 10 ms, live since `now`.
    fn live(number: u64, now: u64) -> Arc<Grant> {
        let grant = grant(number);
        assert!(grant.enable(now));
        Arc::new(grant)
    }

    #[test]
    fn a_pending_grant_is_held_by_nobody_and_does_not_expire() {
        let grant = grant(1);
        assert!(!grant.is_live(16));
        assert!(!grant.is_ended());
        assert!(!grant.end_if_expired(u64::MAX));
        assert_eq!(grant.renew(16), Err(RenewError::Pending));
        assert_eq!(grant.remaining(16), Some(Duration::from_millis(10)));
        assert_eq!((grant.token(), grant.owner()), (token(1), OWNER));
        assert_eq!(grant.ttl().duration(), Some(Duration::from_millis(10)));
    }

    #[test]
    fn a_grant_ended_while_pending_is_not_handed_out() {
        let grant = grant(1);
        assert!(grant.end());
        assert!(!grant.enable(16));
        assert!(!grant.is_live(16));
    }

    #[test]
    fn a_grant_is_enabled_once() {
        let grant = live(1, MS);
        assert!(!grant.enable(100 * MS));
        assert_eq!(grant.remaining(MS), Some(Duration::from_millis(10)));
    }

    #[test]
    fn a_live_grant_is_live_until_just_before_its_deadline() {
        let grant = live(1, MS);
        assert!(grant.is_live(11 * MS - 1));
        assert!(!grant.is_live(11 * MS));
        assert_eq!(grant.remaining(11 * MS - 1), Some(Duration::from_nanos(1)));
        assert_eq!(grant.remaining(20 * MS), Some(Duration::ZERO));
        assert!(!grant.is_ended());
    }

    #[test]
    fn renewing_moves_the_deadline_and_never_back() {
        let grant = live(1, 5 * MS);
        assert_eq!(grant.renew(9 * MS), Ok(19 * MS));
        assert_eq!(grant.renew(6 * MS), Ok(19 * MS));
        assert_eq!(grant.remaining(9 * MS), Some(Duration::from_millis(10)));
    }

    #[test]
    fn renewing_at_the_deadline_is_too_late_for_ever() {
        let grant = live(1, MS);
        assert_eq!(grant.renew(11 * MS), Err(RenewError::Expired));
        assert!(grant.is_ended());
        assert_eq!(grant.renew(2 * MS), Err(RenewError::Ended));
        assert!(!grant.is_live(2 * MS));
        assert!(!grant.enable(2 * MS));
    }

    #[test]
    fn an_ended_grant_is_ended_by_one_call() {
        let grant = live(1, MS);
        assert!(grant.end());
        assert!(!grant.end());
        assert!(!grant.end_if_expired(u64::MAX));
        assert_eq!(grant.renew(2 * MS), Err(RenewError::Ended));
        assert_eq!(grant.remaining(2 * MS), Some(Duration::ZERO));
    }

    #[test]
    fn only_an_expired_grant_is_ended_for_expiry() {
        let grant = live(1, MS);
        assert!(!grant.end_if_expired(11 * MS - 1));
        assert!(grant.is_live(MS));
        assert!(grant.end_if_expired(11 * MS));
        assert!(!grant.end_if_expired(11 * MS));
    }

    #[test]
    fn a_grant_without_an_end_is_only_ended_by_hand() {
        let grant = Grant::pending(token(1), OWNER, Ttl::INFINITE);
        assert!(grant.enable(MS));
        assert!(grant.is_live(u64::MAX));
        assert!(!grant.end_if_expired(u64::MAX));
        assert_eq!(grant.renew(u64::MAX), Ok(FOREVER));
        assert_eq!(grant.remaining(MS), None);
        assert!(grant.end());
    }

    #[test]
    fn a_bounded_grant_at_the_end_of_time_is_still_bounded() {
        let grant = Grant::pending(token(1), OWNER, Ttl::new(Ttl::MAX).unwrap());
        assert!(grant.enable(u64::MAX - 5));
        assert!(grant.is_live(u64::MAX - 5));
        assert!(grant.remaining(u64::MAX - 5).is_some());
        assert!(grant.end_if_expired(u64::MAX));
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
            table.insert(JOBS, &number.to_le_bytes(), live(number, MS));
        }
        let mut seen = Vec::new();
        table.for_each(|keyspace, fence, grant| {
            assert_eq!(keyspace, JOBS);
            assert_eq!(fence, grant.token().get().to_le_bytes());
            seen.push(grant.token().get());
        });
        seen.sort_unstable();
        assert!(seen.into_iter().eq(1..=50));
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
        assert!(len_max <= SWEEP_MIN, "{len_max} grants of which at most 11 are live");
        assert!(table.current(JOBS, &20_000u64.to_le_bytes()).is_some());
    }

    #[test]
    fn a_sweep_removes_only_what_is_over_and_ends_it_first() {
        let table = LeaseTable::new();
        let expired: Vec<_> = (1..=SWEEP_MIN as u64).map(|number| live(number, MS)).collect();
        for grant in &expired {
            table.insert(JOBS, &grant.token().get().to_le_bytes(), grant.clone());
        }
        table.insert(LOCKS, b"live", live(1000, 15 * MS));
        table.insert(LOCKS, b"pending", Arc::new(grant(1001)));
        table.insert(LOCKS, b"ended", live(1002, 15 * MS));
        table.current(LOCKS, b"ended").unwrap().end();
        table.sweep(15 * MS);
        assert_eq!(table.len(), 2);
        assert!(table.current(LOCKS, b"live").is_some());
        assert!(table.current(LOCKS, b"pending").is_some());
        for grant in expired {
            assert_eq!(grant.renew(2 * MS), Err(RenewError::Ended));
        }
    }

    #[test]
    fn sweeps_are_as_rare_as_doublings() {
        let table = LeaseTable::new();
        for number in 1..=SWEEP_MIN as u64 {
            table.insert(JOBS, &number.to_le_bytes(), live(number, MS));
        }
        table.sweep(2 * MS);
        assert_eq!(table.sweep_at.load(Ordering::Relaxed), 2 * SWEEP_MIN);
        table.sweep(100 * MS);
        assert_eq!(table.len(), SWEEP_MIN, "not due until the table has doubled");
    }
}
