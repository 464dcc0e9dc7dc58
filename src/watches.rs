//! Who wants to hear of one grant: its holder, and the one who keeps it alive. (Who waits for its fence is in a
//! queue, and found there.)
//!
//! One job: for each watched grant, whom it concerns and when it is to be looked at. A timer is only a
//! reminder to ask the grant: renewing moves no timer, a look finds the later deadline and sets another one.
//! Pure: `now` is an argument.
//!
//! Read next: `hand_over.rs`, the thread that looks.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::task::Waker;

use crate::group_commit::wake;
use crate::lease::Grant;
use crate::sync::{Arc, Mutex};
use crate::types::Token;

/// When a grant is to be renewed for its holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Keep {
    pub next: u64,
    /// No renewal goes beyond this instant.
    pub until: u64,
}

/// Whom a grant concerns.
#[derive(Debug)]
pub(crate) struct Watch {
    grant: Arc<Grant>,
    wakers: Vec<(u64, Waker)>,
    keep: Option<Keep>,
    timer: Option<u64>,
}

impl Watch {
    /// Wakes those who wait for the end of the grant; after all locks are given back.
    pub(crate) fn wake(&mut self) {
        self.wakers.drain(..).for_each(|(_, waker)| wake(waker));
    }

    fn is_idle(&self) -> bool {
        self.wakers.is_empty() && self.keep.is_none()
    }

    /// When to look, if nothing is reported before.
    fn look_at(&self, now: u64) -> Option<u64> {
        let look_at = self.grant.look_at(now);
        if self.grant.is_pending() {
            return look_at;
        }
        let held_until =
            (!self.wakers.is_empty()).then(|| self.grant.held_until()).filter(|&at| at != u64::MAX);
        let keep = self.keep.map(|keep| keep.next);
        [look_at, held_until, keep].into_iter().flatten().min()
    }
}

/// All watched grants, by token: a token is granted once. The lock is a leaf; wakers, which are foreign code,
/// are woken and dropped without it.
#[derive(Debug)]
pub(crate) struct Watches(Mutex<Inner>);

/// Tokens are numbers that this store gave, one after the other: nobody chooses them so that they collide.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Debug, Default)]
struct Inner {
    watches: HashMap<Token, Watch, BuildHasherDefault<Spread>>,
    timers: BTreeSet<(u64, Token)>,
    last_slot: u64,
    is_shut: bool,
}

impl Inner {
    fn entry(&mut self, grant: &Arc<Grant>) -> &mut Watch {
        self.watches.entry(grant.token()).or_insert_with(|| Watch {
            grant: grant.clone(),
            wakers: Vec::new(),
            keep: None,
            timer: None,
        })
    }

    fn is_known(&self, grant: &Grant) -> bool {
        self.watches.contains_key(&grant.token())
    }

    fn remove(&mut self, token: Token) -> Option<Watch> {
        let watch = self.watches.remove(&token)?;
        if let Some(at) = watch.timer {
            self.timers.remove(&(at, token));
        }
        Some(watch)
    }

    /// Sets the timer to when the grant is to be looked at; drops the watch when nobody cares any more.
    fn arm(&mut self, token: Token, now: u64) -> Option<Watch> {
        let watch = self.watches.get_mut(&token)?;
        if watch.is_idle() {
            return self.remove(token);
        }
        let at = watch.look_at(now);
        if at != watch.timer {
            if let Some(old) = std::mem::replace(&mut watch.timer, at) {
                self.timers.remove(&(old, token));
            }
            if let Some(at) = at {
                self.timers.insert((at, token));
            }
        }
        None
    }

    /// The watch is complete: asks the grant for its report. `false`: the grant is over, and nobody will come
    /// to say so.
    fn watch(&mut self, grant: &Arc<Grant>, was_known: bool, now: u64) -> (bool, Option<Watch>) {
        // In this order: whoever ends the grant from here on reports it, and then the entry is there.
        if !self.is_shut && grant.watch() {
            return (true, self.arm(grant.token(), now));
        }
        // An entry that was there is reported, and concerns others: it waits for the thread that looks.
        (false, if was_known { None } else { self.remove(grant.token()) })
    }
}

impl Watches {
    pub(crate) fn new() -> Self {
        Watches(Mutex::new(Inner::default()))
    }

    /// The task is to be woken when the grant is over; `false`: it is. A later call with the same `slot`
    /// replaces the waker.
    pub(crate) fn add_waker(&self, grant: &Arc<Grant>, slot: &mut u64, waker: Waker, now: u64) -> bool {
        let mut inner = self.0.lock();
        if *slot == 0 {
            inner.last_slot += 1;
            *slot = inner.last_slot;
        }
        let was_known = inner.is_known(grant);
        let watch = inner.entry(grant);
        let mut replaced = None;
        match watch.wakers.iter_mut().find(|(of, _)| of == slot) {
            Some((_, old)) => replaced = Some(std::mem::replace(old, waker)),
            None => watch.wakers.push((*slot, waker)),
        }
        let (watched, gone) = inner.watch(grant, was_known, now);
        drop(inner);
        drop((replaced, gone));
        watched
    }

    /// The task wants no waking any more.
    pub(crate) fn remove_waker(&self, token: Token, slot: u64, now: u64) {
        let mut inner = self.0.lock();
        let Some(watch) = inner.watches.get_mut(&token) else { return };
        let at = watch.wakers.iter().position(|(of, _)| *of == slot);
        let waker = at.map(|at| watch.wakers.swap_remove(at));
        let gone = inner.arm(token, now);
        drop(inner);
        drop((waker, gone));
    }

    /// The grant is to be renewed, or not, as its holder says; `false`: it is over.
    pub(crate) fn keep(&self, grant: &Arc<Grant>, keep: Option<Keep>, now: u64) -> bool {
        let mut inner = self.0.lock();
        let was_known = inner.is_known(grant);
        inner.entry(grant).keep = keep;
        let (watched, gone) = inner.watch(grant, was_known, now);
        drop(inner);
        drop(gone);
        watched
    }

    /// A grant that was kept alive is to be renewed again, or no longer; unless its holder has said otherwise
    /// since it was so.
    pub(crate) fn keep_on(&self, token: Token, was: Keep, next: Option<Keep>, now: u64) {
        self.change_keep(token, now, |keep| if keep == Some(was) { next } else { keep });
    }

    /// The grant is renewed for nobody any more.
    pub(crate) fn keep_no_longer(&self, token: Token, now: u64) {
        self.change_keep(token, now, |_| None);
    }

    fn change_keep(&self, token: Token, now: u64, change: impl FnOnce(Option<Keep>) -> Option<Keep>) {
        let mut inner = self.0.lock();
        let Some(watch) = inner.watches.get_mut(&token) else { return };
        watch.keep = change(watch.keep);
        let gone = inner.arm(token, now);
        drop(inner);
        drop(gone);
    }

    /// The grant is over: whom that concerns.
    pub(crate) fn take(&self, token: Token) -> Option<Watch> {
        self.0.lock().remove(token)
    }

    /// The grant behind a token, whether its holder wants to hear of its end, and until when it is kept.
    pub(crate) fn get(&self, token: Token) -> Option<(Arc<Grant>, bool, Option<Keep>)> {
        let inner = self.0.lock();
        let watch = inner.watches.get(&token)?;
        Some((watch.grant.clone(), !watch.wakers.is_empty(), watch.keep))
    }

    /// Sets the timer of a grant that was looked at.
    pub(crate) fn arm(&self, token: Token, now: u64) {
        let gone = self.0.lock().arm(token, now);
        drop(gone);
    }

    /// Grants to look at, at most so many.
    pub(crate) fn due(&self, now: u64, most: usize) -> Vec<Token> {
        let mut inner = self.0.lock();
        let mut due = Vec::new();
        while due.len() < most
            && let Some(&(at, token)) = inner.timers.first()
            && at <= now
        {
            inner.timers.pop_first();
            if let Some(watch) = inner.watches.get_mut(&token) {
                watch.timer = None;
            }
            due.push(token);
        }
        due
    }

    /// When the next one is to be looked at.
    pub(crate) fn next(&self) -> Option<u64> {
        self.0.lock().timers.first().map(|&(at, _)| at)
    }

    /// How many grants are watched.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().watches.len()
    }

    /// Nothing is watched any more: everybody whom that concerns.
    pub(crate) fn shut(&self) -> Vec<Watch> {
        let mut inner = self.0.lock();
        inner.is_shut = true;
        inner.timers.clear();
        let mut all: Vec<_> = std::mem::take(&mut inner.watches).into_values().collect();
        drop(inner);
        all.sort_unstable_by_key(|watch| watch.grant.token());
        all
    }
}

// The primitives of shuttle do not run outside of its models.
#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::lease::{Bell, Ending, FenceId, Over, Terms};
    use crate::types::{KeyspaceId, Lsn, OwnerId, Ttl};
    use std::time::Duration;

    const MS: u64 = 1_000_000;

    fn fence() -> FenceId {
        FenceId::new(KeyspaceId(1), b"f")
    }

    fn live(bell: &Arc<Bell>) -> Arc<Grant> {
        let ttl = Ttl::new(Duration::from_millis(10)).unwrap();
        let terms = Terms { owner: OwnerId::new(1), ttl, delay: 0 };
        let grant = Grant::pending(fence(), Token::new(1).unwrap(), terms, Lsn::new(1), MS, bell);
        assert!(grant.enable(MS));
        Arc::new(grant)
    }

    #[test]
    fn a_renewal_moves_the_next_look_only_when_the_last_one_is_due() {
        let (watches, bell) = (Watches::new(), Arc::new(Bell::new()));
        let grant = live(&bell);
        let mut slot = 0;
        assert!(watches.add_waker(&grant, &mut slot, Waker::noop().clone(), MS));
        assert_eq!(watches.next(), Some(11 * MS));
        grant.renew(5 * MS, u64::MAX).unwrap();
        assert_eq!(watches.next(), Some(11 * MS));
        assert_eq!(watches.due(11 * MS, 10), [grant.token()]);
        watches.arm(grant.token(), 11 * MS);
        assert_eq!(watches.next(), Some(15 * MS));
        let watch = watches.take(grant.token()).unwrap();
        assert!(watch.wakers.iter().any(|(of, _)| *of == slot));
        assert_eq!(watches.next(), None);
    }

    #[test]
    fn what_nobody_cares_about_any_more_is_forgotten() {
        let (watches, bell) = (Watches::new(), Arc::new(Bell::new()));
        let grant = live(&bell);
        let mut slot = 0;
        assert!(watches.add_waker(&grant, &mut slot, Waker::noop().clone(), MS));
        assert!(watches.add_waker(&grant, &mut slot, Waker::noop().clone(), MS));
        watches.remove_waker(grant.token(), slot, MS);
        assert_eq!((watches.len(), watches.next()), (0, None));
        assert!(watches.keep(&grant, Some(Keep { next: 3 * MS, until: 100 * MS }), MS));
        assert_eq!(watches.next(), Some(3 * MS));
        assert!(watches.keep(&grant, None, MS));
        assert_eq!((watches.len(), watches.next()), (0, None));
    }

    /// The thread renews without the lock: what the holder says meanwhile counts.
    #[test]
    fn a_renewal_does_not_undo_what_the_holder_said_meanwhile() {
        let (watches, bell) = (Watches::new(), Arc::new(Bell::new()));
        let grant = live(&bell);
        let was = Keep { next: 3 * MS, until: 100 * MS };
        let next = Some(Keep { next: 6 * MS, ..was });
        let longer = Keep { until: 900 * MS, ..was };
        for (meanwhile, at) in [(Some(was), Some(6 * MS)), (Some(longer), Some(3 * MS)), (None, None)] {
            assert!(watches.keep(&grant, Some(was), MS));
            match meanwhile {
                Some(keep) => assert!(watches.keep(&grant, Some(keep), MS)),
                None => watches.keep_no_longer(grant.token(), MS),
            }
            watches.keep_on(grant.token(), was, next, 3 * MS);
            assert_eq!((watches.len(), watches.next()), (usize::from(at.is_some()), at));
        }
    }

    #[test]
    fn a_grant_that_is_over_is_not_watched() {
        let (watches, bell) = (Watches::new(), Arc::new(Bell::new()));
        let grant = live(&bell);
        grant.end(Ending::Released);
        assert!(!watches.add_waker(&grant, &mut 0, Waker::noop().clone(), MS));
        assert_eq!((watches.len(), watches.next()), (0, None));
    }

    /// Found by `tests/shuttle.rs`: whoever came between the end and the look at it took the watch away, and
    /// the others in it were never told.
    #[test]
    fn who_comes_after_the_end_takes_nobody_out_who_is_still_to_be_told() {
        for is_keeper in [false, true] {
            let (watches, bell) = (Watches::new(), Arc::new(Bell::new()));
            let grant = live(&bell);
            let mut slot = 0;
            assert!(watches.add_waker(&grant, &mut slot, Waker::noop().clone(), MS));
            grant.end(Ending::Broken);
            assert!(!if is_keeper {
                watches.keep(&grant, None, MS)
            } else {
                watches.add_waker(&grant, &mut 0, Waker::noop().clone(), MS)
            });
            assert_eq!(bell.take(), [Over { token: grant.token(), fence: fence() }]);
            let watch = watches.take(grant.token()).unwrap();
            assert!(watch.wakers.iter().any(|(of, _)| *of == slot));
            assert_eq!((watches.len(), watches.next()), (0, None));
        }
    }

    #[test]
    fn nothing_is_watched_in_a_store_that_is_shut() {
        let (watches, bell) = (Watches::new(), Arc::new(Bell::new()));
        let grant = live(&bell);
        assert!(watches.add_waker(&grant, &mut 0, Waker::noop().clone(), MS));
        assert_eq!(watches.shut().len(), 1);
        assert!(!watches.add_waker(&grant, &mut 0, Waker::noop().clone(), MS));
        assert_eq!(watches.len(), 0);
    }
}
