//! From one holder to the next, while somebody waits.
//!
//! One job: what the thread of the leases does. It appends the grant of the first in a queue when the fence
//! is free, renews what is kept alive, tells holders of their loss and waiters of their deadline. It never
//! waits for a sync: whoever gets a lease waits for it, so a hand-over costs one sync, shared with whatever
//! else is committed. Nothing here is needed for safety: if the thread stood still, leases would only be
//! handed over later.
//!
//! Each step takes a bounded number of things under a lock, however many are due.
//!
//! Read next: `recover.rs`, what is kept over an open.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::grant::{Attempt, Turn};
use crate::lease::Grant;
use crate::log::pool::Need;
use crate::slots::slot_of;
use crate::sync::{Arc, Ordering};
use crate::types::{KeyspaceId, Token};
use crate::waiters::{QueueId, Waiter};
use crate::watches::Keep;
use std::task::Waker;
use std::time::Duration;

/// How many things are done between two looks at the clock.
const MOST: usize = 256;
/// The longest sleep while something is due later: a clock that jumps without saying so (the machine was
/// suspended) is noticed this late. Only wake-ups are late then: every answer asks the clock itself.
const LOOK: Duration = Duration::from_millis(250);

impl Engine {
    /// Does what is due now; how long to sleep, or `None` until somebody rings.
    pub fn tend_leases(&self) -> Option<Duration> {
        if self.cause.get().is_some() {
            self.fail_waiters(false, &self.indeterminate());
        }
        for token in self.bell.take() {
            self.look_at_changed(token);
        }
        let now = self.options.clock.now();
        for token in self.watches.due(now, MOST) {
            self.look_at_due(token, now);
        }
        for waiter in self.waiters.late(now, MOST) {
            self.tell(&waiter, Err(self.timeout(&waiter)));
        }
        for queue in self.waiters.to_visit(now, MOST) {
            self.hand_over(&queue);
        }
        let next = [self.watches.next(), self.waiters.next()].into_iter().flatten().min()?;
        // The clock is read again: what was done above took its time.
        let now = self.options.clock.now();
        Some(Duration::from_nanos(next.saturating_sub(now)).min(LOOK))
    }

    /// A watched grant was enabled, or is over.
    fn look_at_changed(&self, token: Token) {
        let Some((grant, ..)) = self.watches.get(token) else { return };
        if !grant.is_ended() {
            return self.watches.arm(token, self.options.clock.now());
        }
        let Some(mut watch) = self.watches.take(token) else { return };
        watch.wake();
        for queue in &watch.queues {
            self.hand_over(queue);
        }
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
            self.watches.keep(&grant, next, now);
        }
        // Once told, for ever over: a clock that goes back does not bring it back. Upholds L4.
        let ended = if is_told { grant.end_if_not_held(now) } else { grant.end_if_expired(now) };
        if !ended {
            self.watches.arm(token, now);
        }
    }

    /// Renews a grant that is kept alive; when to do so again, if at all.
    fn keep_alive(&self, grant: &Grant, keep: Keep, now: u64) -> Option<Keep> {
        if now >= keep.until || self.renew_grant(b"", grant, now, keep.until).is_err() {
            return None;
        }
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

    /// Serves the first in the queue while the fence is free; else sees to it that somebody looks again.
    pub fn hand_over(&self, queue: &QueueId) {
        while let Some(waiter) = self.waiters.first(queue) {
            match self.serve(&waiter) {
                Served::Told(waker) => {
                    self.waiters.remove(&waiter);
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                }
                Served::Waits => return,
                Served::Again => {}
            }
        }
    }

    fn serve(&self, waiter: &Arc<Waiter>) -> Served {
        let ask = waiter.ask();
        let keyspace = self.keyspace_by_id(waiter.queue.keyspace);
        let Some(keyspace) = keyspace else { return Served::Told(None) };
        let attempt = self.with_room(Self::room_of(&ask), Need::Privileged, |tail| {
            // Held while the grant is appended: it is told, or it has left, never both.
            let Some(queued) = waiter.queued() else { return Ok(Err(None)) };
            // Asked under the tail lock: a waiter past its deadline gets no grant, and burns no token.
            if self.options.clock.now() >= waiter.deadline {
                return Ok(Err(queued.tell(Err(self.timeout(waiter)))));
            }
            match self.attempt_at(tail, &keyspace, &ask, Turn::First) {
                Ok(Attempt::Appended(granted)) => Ok(Err(queued.tell(Ok(granted)))),
                Ok(Attempt::Busy(busy)) => Ok(Ok(busy)),
                Ok(Attempt::Queued(_)) => Ok(Err(None)),
                Err(error) => Ok(Err(queued.tell(Err(error)))),
            }
        });
        let busy = match attempt.and_then(|attempt: Result<_>| attempt) {
            Ok(Ok(busy)) => busy,
            Ok(Err(waker)) => return Served::Told(waker),
            // No room, or no store: the one whose turn it is learns so.
            Err(error) => return Served::Told(waiter.queued().and_then(|queued| queued.tell(Err(error)))),
        };
        let now = self.options.clock.now();
        let mut served = Served::Waits;
        for grant in &busy.grants {
            if self.watches.add_queue(grant, &waiter.queue, now) {
                continue;
            }
            match grant.free_at() {
                Some(at) if at > now => self.waiters.visit_at(&waiter.queue, at),
                // It ended between the two looks.
                Some(_) => served = Served::Again,
                // The store is being closed: all who wait are told.
                None => {}
            }
        }
        served
    }

    fn tell(&self, waiter: &Waiter, answer: Result<crate::waiters::Granted>) {
        let waker = waiter.queued().and_then(|queued| queued.tell(answer));
        self.waiters.remove(waiter);
        if let Some(waker) = waker {
            waker.wake();
        }
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
    pub fn visit_queues(&self, keyspace: KeyspaceId, fence: &[u8]) {
        if self.waiters.len() == 0 {
            return;
        }
        self.waiters.visit_now(QueueId { keyspace, name: fence.into(), has_slots: false });
        if let Some((key, _)) = slot_of(fence) {
            self.waiters.visit_now(QueueId { keyspace, name: key.into(), has_slots: true });
        }
        self.bell.nudge();
    }
}

/// What became of the first in a queue.
enum Served {
    /// It has its answer, or has left: it is to be removed, and this one woken.
    Told(Option<Waker>),
    /// The fence is taken, and its end will be heard of.
    Waits,
    Again,
}
