//! From one holder to the next, while somebody waits.
//!
//! One job: append the grant of the first in a queue when the fence is free. Who gives a lease back does so
//! itself; whatever else ends one is seen to by the thread of the leases, which also renews what is kept
//! alive, and tells holders of their loss and waiters of their deadline. Nobody here waits for a sync: whoever
//! gets a lease does, asleep from before it was granted, so a hand-over costs one sync, shared with whatever
//! else is committed, and one wake-up, shared with whoever else waits for that. Nothing here is
//! needed for safety: if the thread stood still, leases would only be handed over later.
//!
//! Each step takes a bounded number of things under a lock, however many are due.
//!
//! Read next: `recover.rs`, what is kept over an open.

use crate::engine::{Engine, KeyspaceState, PoisonOnPanic, Tail};
use crate::error::{Error, Result};
use crate::grant::{Attempt, Busy, Turn};
use crate::lease::{FenceId, Grant};
use crate::log::pool::Need;
use crate::sync::{Arc, Ordering};
use crate::types::{KeyspaceId, Lsn, Token};
use crate::waiter::{Ask, Asleep, Granted, QueueId, Waiter};
use crate::watches::Keep;
use std::time::Duration;

/// How many things are done between two looks at the clock.
const MOST: usize = 256;
/// How many who wait are told something by one hand-over: a release returns soon, however many are late.
const MOST_TOLD: usize = 16;
/// The longest sleep while something is due later: a clock that jumps without saying so (the machine was
/// suspended) is noticed this late. Only wake-ups are late then: every answer asks the clock itself.
const LOOK: Duration = Duration::from_millis(250);

impl Engine {
    /// Does what is due now; how long to sleep, or `None` until somebody rings.
    pub fn tend_leases(&self) -> Option<Duration> {
        self.bell.plan();
        if self.cause.get().is_some() {
            self.fail_waiters(false, &self.indeterminate());
        }
        for over in self.bell.take() {
            self.pass(over.token, &over.fence, Room::Made);
        }
        let now = self.options.clock.now();
        for token in self.watches.due(now, MOST) {
            self.look_at_due(token, now);
        }
        for waiter in self.waiters.due(now, MOST) {
            if waiter.deadline <= now {
                self.tell(&waiter, Err(self.timeout(&waiter)));
            } else {
                self.hand_over(waiter, Room::Made);
            }
        }
        for queue in self.waiters.to_visit() {
            if let Some(first) = self.waiters.first(&queue) {
                self.hand_over(first, Room::Made);
            }
        }
        let next = [self.watches.next(), self.waiters.next()].into_iter().flatten().min()?;
        self.bell.planned(next);
        // The clock is read again: what was done above took its time.
        let now = self.options.clock.now();
        Some(Duration::from_nanos(next.saturating_sub(now)).min(LOOK))
    }

    /// A watched grant was given back: whoever did so hands the fence over, without I/O. `true`: to the next
    /// holder of the same fence.
    pub fn pass_on(&self, keyspace: &Arc<KeyspaceState>, grant: &Grant) -> bool {
        self.pass(grant.token(), grant.fence(), Room::AtHand(keyspace))
    }

    /// Somebody has joined a queue, to be looked at by `look_at`. The first to do so sees to it that somebody looks
    /// at the queue when what was found `busy` is over, or at once if nothing was; those behind it are looked at
    /// after it.
    pub fn begin_to_wait(
        &self,
        keyspace: &Arc<KeyspaceState>,
        waiter: &Arc<Waiter>,
        look_at: u64,
        first: Option<Option<Busy>>,
    ) {
        self.bell.look_by(look_at);
        let Some(busy) = first else { return };
        // In this order: whoever ends one of these from here on finds the queue. What is over may have been
        // superseded before the queue was there to be found.
        if !busy.is_some_and(|busy| busy.grants.iter().all(|grant| grant.watch())) {
            self.hand_over(waiter.clone(), Room::AtHand(keyspace));
        }
    }

    /// A watched grant is over.
    fn pass(&self, token: Token, fence: &FenceId, room: Room<'_>) -> bool {
        if let Some(mut watch) = self.watches.take(token) {
            watch.wake();
        }
        let mut is_passed = false;
        for queue in QueueId::of(fence) {
            if let Some(first) = self.waiters.first(&queue) {
                is_passed |= self.hand_over(first, room) && !queue.has_slots;
            }
        }
        is_passed
    }

    /// It is time to look at a watched grant.
    fn look_at_due(&self, token: Token, now: u64) {
        let Some((grant, is_told, keep)) = self.watches.get(token) else { return };
        if grant.is_pending() && self.progress.durable() >= grant.lsn() {
            // Whoever was to hand it out is gone, or very slow: its time runs from now on.
            grant.enable(now);
        }
        if let Some(keep) = keep.filter(|keep| keep.next <= now) {
            let next = self.keep_alive(&grant, keep, now);
            self.watches.keep_on(token, keep, next, now);
        }
        // Once told, for ever over: a clock that goes back does not bring it back. Upholds L4.
        let ended = if is_told { grant.end_if_not_held(now) } else { grant.end_if_expired(now) };
        if !ended {
            self.watches.arm(token, now);
        }
    }

    /// Renews a grant that is kept alive; when to do so again, if at all.
    fn keep_alive(&self, grant: &Grant, keep: Keep, now: u64) -> Option<Keep> {
        if now >= keep.until || self.check_open().is_err() {
            return None;
        }
        self.renew_open(grant, now, keep.until).ok()?;
        Some(Keep { next: self.next_renewal(grant, now)?, ..keep })
    }

    /// A third of the ttl from now, give or take a tenth, so that leases acquired together do not stay
    /// together.
    pub fn next_renewal(&self, grant: &Grant, now: u64) -> Option<u64> {
        let third = grant.ttl().duration()?.as_nanos() as u64 / 3;
        let random = self.options.entropy.u64().unwrap_or(0);
        let jitter = random % (third / 5 + 1);
        Some(now.saturating_add(third - third / 10 + jitter))
    }

    /// Serves the first in a queue while the fence is free; else sees to it that somebody looks again. Says
    /// whether anybody got a lease. `first` was the first, and may have left since.
    fn hand_over(&self, mut first: Arc<Waiter>, room: Room<'_>) -> bool {
        let mut is_granted = false;
        for _ in 0..MOST_TOLD {
            let next = match self.serve(&first, room) {
                Served::Told(asleep) => {
                    let next = self.waiters.remove_and_next(&first);
                    asleep.wake();
                    next
                }
                Served::Granted { asleep, lsn, group, company } => {
                    let next = self.waiters.remove_and_next(&first);
                    self.wake_when_durable(asleep, lsn, group, company);
                    is_granted = true;
                    next
                }
                Served::Busy(busy) => {
                    if self.wait_for(&first, &busy) {
                        return is_granted;
                    }
                    self.waiters.first(&first.queue)
                }
                Served::NoRoom => break,
            };
            match next {
                Some(next) => first = next,
                None => return is_granted,
            }
        }
        self.waiters.visit_now(first.queue.clone());
        self.bell.nudge();
        is_granted
    }

    /// Sees to it that somebody looks at the queue of `first` when one of these is over; `false`: one is, or it
    /// is somebody else's turn by now.
    fn wait_for(&self, first: &Arc<Waiter>, busy: &Busy) -> bool {
        let now = self.options.clock.now();
        let mut visit_at = u64::MAX;
        for grant in &*busy.grants {
            let at = if grant.watch() { grant.look_at(now) } else { grant.free_at() };
            if grant.is_free(now) {
                return false;
            }
            visit_at = visit_at.min(at.unwrap_or(u64::MAX));
        }
        if !self.waiters.visit_at(first, visit_at) {
            return false;
        }
        self.bell.look_by(visit_at);
        true
    }

    /// Wakes the one whose grant was appended: at once if it is to make the commit, being alone, and else
    /// when that is made, so that it is woken once.
    fn wake_when_durable(&self, asleep: Asleep, lsn: Lsn, group: u32, company: bool) {
        if !company && self.progress.durable().next() == lsn {
            return asleep.wake();
        }
        asleep.wake_when_durable(&self.progress, lsn, group);
        self.doorbell.ring();
    }

    /// Runs `append` under the tail lock, with the room that the ask needs; `None`: there is none at hand.
    fn with_room_for<T>(
        &self,
        ask: &Ask<'_>,
        room: Room<'_>,
        mut append: impl FnMut(&mut Tail) -> Result<T>,
    ) -> Option<Result<T>> {
        let bytes = Self::room_of(ask);
        if matches!(room, Room::Made) {
            return Some(self.with_room(bytes, Need::Privileged, append).and_then(|appended| appended));
        }
        let _guard = PoisonOnPanic::new(self);
        let mut tail = self.tail.lock();
        let is_ready = self.check_open().is_ok() && tail.active.as_ref().is_some_and(|a| a.fits(bytes));
        is_ready.then(|| append(&mut tail))
    }

    fn serve(&self, waiter: &Arc<Waiter>, room: Room<'_>) -> Served {
        let ask = waiter.ask();
        let found;
        let keyspace = match room {
            Room::AtHand(keyspace) => keyspace,
            Room::Made => {
                found = self.keyspace_by_id(waiter.queue.keyspace);
                let Some(keyspace) = &found else { return Served::Told(Asleep::Nobody) };
                // Room is made for one who gets the fence, not for a look at it: there may be none to be had.
                if let Some(busy) = self.find_busy(keyspace, &ask, self.options.clock.now()) {
                    return Served::Busy(busy);
                }
                keyspace
            }
        };
        let attempt = self.with_room_for(&ask, room, |tail| {
            // Held while the grant is appended: it is told, or it has left, never both.
            let Some(queued) = waiter.queued() else { return Ok(Served::Told(Asleep::Nobody)) };
            // Asked under the tail lock: a waiter past its deadline gets no grant, and burns no token.
            let now = self.options.clock.now();
            if now >= waiter.deadline {
                return Ok(Served::Told(queued.tell(Err(self.timeout(waiter)))));
            }
            Ok(match self.attempt_at(tail, keyspace, &ask, Turn::First, now) {
                Ok(Attempt::Appended(granted)) => {
                    let (lsn, group) = (granted.lsn, granted.group);
                    // From here on it waits for the sync, until it says otherwise.
                    let company = self.waiting.fetch_add(1, Ordering::AcqRel) > 0;
                    Served::Granted { asleep: queued.tell(Ok(granted)), lsn, group, company }
                }
                Ok(Attempt::Busy(busy)) => Served::Busy(busy),
                Ok(Attempt::Queued(_)) => Served::Told(Asleep::Nobody),
                Err(error) => Served::Told(queued.tell(Err(error))),
            })
        });
        match attempt {
            None => Served::NoRoom,
            Some(Ok(served)) => served,
            // No room, or no store: the one whose turn it is learns so.
            Some(Err(error)) => {
                Served::Told(waiter.queued().map_or(Asleep::Nobody, |queued| queued.tell(Err(error))))
            }
        }
    }

    fn tell(&self, waiter: &Arc<Waiter>, answer: Result<Granted>) {
        let asleep = waiter.queued().map_or(Asleep::Nobody, |queued| queued.tell(answer));
        self.waiters.remove(waiter);
        asleep.wake();
    }

    fn timeout(&self, waiter: &Waiter) -> Error {
        self.counters.lease_refusals.fetch_add(1, Ordering::Relaxed);
        Error::Timeout { after: waiter.wait }
    }

    fn fail_waiters(&self, shut: bool, error: &Error) {
        for waiter in self.waiters.all(shut) {
            self.tell(&waiter, Err(error.clone()));
        }
    }

    /// Nobody will be served or told any more: the store is being closed.
    pub fn end_waiting(&self) {
        self.fail_waiters(true, &Error::Closed);
        for mut watch in self.watches.shut() {
            watch.wake();
        }
    }

    /// The queues that a change of a fence concerns, which nothing else reports to them.
    pub fn visit_queues(&self, fence: &FenceId) {
        if self.waiters.len() == 0 {
            return;
        }
        QueueId::of(fence).for_each(|queue| self.waiters.visit_now(queue));
        self.bell.nudge();
    }

    /// The same of all fences of a keyspace.
    pub fn visit_all_queues(&self, keyspace: KeyspaceId) {
        if self.waiters.len() > 0 {
            self.waiters.visit_all_now(keyspace);
            self.bell.nudge();
        }
    }
}

/// Where the room for a grant comes from.
#[derive(Clone, Copy)]
enum Room<'a> {
    /// The active segment, as it is; for one who has the keyspace at hand as well.
    AtHand(&'a Arc<KeyspaceState>),
    /// A new segment if need be, which may have to be made.
    Made,
}

/// What became of the first in a queue.
enum Served {
    /// It has its answer, or has left: it is to be removed, and woken.
    Told(Asleep),
    /// Its grant is appended: it is to be removed, and woken when that is durable.
    Granted { asleep: Asleep, lsn: Lsn, group: u32, company: bool },
    /// The thread of the leases has to make room first.
    NoRoom,
    /// The fence is taken.
    Busy(Busy),
}
