//! The way to a lease: at once, or waiting, blocking or not.
//!
//! One job: carry one request from the first try to the lease. Each step of it can be abandoned: what was
//! not granted leaves nothing behind, what was is given back at once.
//!
//! Read next: `request.rs`, where it begins.

use crate::error::{Error, Result};
use crate::grant::{Attempt, Busy};
use crate::group_commit::WakerSlot;
use crate::guard::Lease;
use crate::keyspace::Keyspace;
use crate::lease::Terms;
use crate::sync::{Arc, Ordering};
use crate::types::{Lsn, Token};
use crate::waiter::{Ask, Granted, Slots, Waiter};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// A request, checked and owned.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub name: Arc<[u8]>,
    pub slots: Option<Slots>,
    pub terms: Terms,
    pub resume: Option<Token>,
}

impl Plan {
    fn ask(&self) -> Ask<'_> {
        Ask { name: &self.name, slots: self.slots, terms: self.terms, resume: self.resume }
    }
}

/// A lease that is being acquired; from
/// [`LeaseRequest::acquire_async`](crate::LeaseRequest::acquire_async).
///
/// A future for any runtime; polling it never waits for a sync (but in a store
/// [without threads](crate::Options::without_threads)). Cancel-safe at every point: dropped before it is
/// granted, it leaves nothing behind; dropped after, the lease is released at once, and the next in the
/// queue gets it. It keeps the store open.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let db = tidewall::Db::open(dir.path().join("data"))?;
/// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
/// # use std::time::Duration;
/// # fn block_on<T>(_: impl Future<Output = T>) {}
/// block_on(async {
///     let lease = jobs.lease(b"job-7").wait(Duration::from_secs(30)).acquire_async().await?;
///     jobs.submit_put(lease.token(), b"job-7", b"done")?.await
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is asked for until it is polled"]
pub struct Acquire {
    keyspace: Keyspace,
    plan: Result<Plan>,
    wait: Option<Duration>,
    /// When the wait is over, once it has begun.
    until: Option<u64>,
    stage: Stage,
    slot: WakerSlot,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// Behind a grant that is on its way: asked again when this is durable.
    Behind {
        lsn: Lsn,
        group: u32,
    },
    Waiting(Arc<Waiter>),
    Appended {
        granted: Granted,
        waited: bool,
    },
    Over,
}

impl Acquire {
    pub(crate) fn new(keyspace: Keyspace, plan: Result<Plan>, wait: Option<Duration>) -> Self {
        Acquire { keyspace, plan, wait, until: None, stage: Stage::Start, slot: WakerSlot::default() }
    }

    pub(crate) fn run(mut self) -> Result<Lease> {
        loop {
            match &self.stage {
                Stage::Start => self.start()?,
                Stage::Behind { lsn, group } => {
                    // Upholds D4: `Held` would rest on a grant that a crash may still take away.
                    self.keyspace.shared.engine.wait_durable(*lsn, *group)?;
                    self.stage = Stage::Start;
                }
                Stage::Waiting(waiter) => {
                    self.keyspace.shared.engine.lease_patience.wait(|| waiter.is_told());
                    let told = waiter.wait();
                    self.told(told)?;
                }
                Stage::Appended { granted, waited } => {
                    let engine = &self.keyspace.shared.engine;
                    let handed_out = engine.hand_out(granted, *waited)?;
                    if let Some(lease) = self.finish(handed_out) {
                        return Ok(lease);
                    }
                }
                Stage::Over => return Err(Error::Closed),
            }
        }
    }

    fn poll_lease(&mut self, cx: &mut Context<'_>) -> Poll<Result<Lease>> {
        loop {
            let engine = &self.keyspace.shared.engine;
            match &self.stage {
                Stage::Start => self.start()?,
                Stage::Behind { lsn, .. } => {
                    let lsn = *lsn;
                    std::task::ready!(self.poll_durable(lsn, cx))?;
                    self.stage = Stage::Start;
                }
                Stage::Waiting(waiter) => {
                    let told = std::task::ready!(waiter.poll(cx));
                    self.told(told)?;
                }
                Stage::Appended { granted, .. } => {
                    let lsn = granted.lsn;
                    let durable = std::task::ready!(self.poll_durable(lsn, cx));
                    let Stage::Appended { granted, waited } = &self.stage else { continue };
                    let engine = &self.keyspace.shared.engine;
                    if let Err(error) = durable {
                        engine.give_up(&self.keyspace.state, granted);
                        return Poll::Ready(Err(error));
                    }
                    let handed_out = engine.enable(granted, *waited);
                    if let Some(lease) = self.finish(handed_out) {
                        return Poll::Ready(Ok(lease));
                    }
                }
                Stage::Over => {
                    let _ = engine;
                    return Poll::Ready(Err(Error::Closed));
                }
            }
        }
    }

    fn poll_durable(&mut self, lsn: Lsn, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let engine = &self.keyspace.shared.engine;
        if engine.progress.durable() < lsn {
            if engine.options.background {
                engine.doorbell.ring();
            } else {
                engine.commit_now()?;
            }
        }
        engine.progress.poll(lsn, &mut self.slot, cx).map_err(|_| engine.indeterminate())
    }

    /// The first try, or the next one after somebody else's grant came in between.
    fn start(&mut self) -> Result<()> {
        let (shared, state) = (&self.keyspace.shared, &self.keyspace.state);
        let engine = &shared.engine;
        let plan = match &self.plan {
            Ok(plan) => plan,
            Err(error) => return Err(error.clone()),
        };
        let ask = plan.ask();
        shared.tend_leases()?;
        let waits = self.wait.filter(|wait| !wait.is_zero() && engine.options.background);
        let by_me = |busy: &Busy| busy.grants.iter().any(|grant| ask.is_held_by(grant));
        let now = engine.options.clock.now();
        // Who is going to wait needs no place in the order for that: the tail lock is left to those who do.
        let attempt = match waits.and_then(|_| engine.find_busy(state, &ask, now)) {
            Some(busy) if !by_me(&busy) => {
                // Else it would wait where nobody serves it, as in a store that is only read.
                engine.check_open()?;
                Attempt::Busy(busy)
            }
            // Who waited before goes on in the queue: there its deadline is looked at before anything is granted.
            None if self.until.is_some() => Attempt::Queued(plan.terms.owner),
            _ => engine.attempt(state, &ask)?,
        };
        let (held, busy) = match attempt {
            Attempt::Appended(granted) => {
                if plan.resume.is_some() {
                    // It may have overtaken a queue, which is to wait for this grant now.
                    engine.visit_queues(granted.grant.fence());
                }
                self.stage = Stage::Appended { granted, waited: false };
                return Ok(());
            }
            Attempt::Busy(busy) => {
                let by_me = by_me(&busy);
                if (waits.is_none() || by_me) && busy.rests_on > engine.progress.durable() {
                    self.stage = Stage::Behind { lsn: busy.rests_on, group: busy.group };
                    return Ok(());
                }
                let held = (waits.is_none() || by_me).then(|| engine.held(state, &ask, &busy));
                (held, Some(busy))
            }
            Attempt::Queued(_) if waits.is_some() => (None, None),
            Attempt::Queued(owner) => (Some(engine.held_by(state, &ask, owner, Some(Duration::ZERO))), None),
        };
        if let Some(held) = held {
            return Err(held);
        }
        let wait = waits.unwrap_or_default();
        let nanos = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        let until = *self.until.get_or_insert(now.saturating_add(nanos));
        let visit_at = busy.as_ref().map_or(u64::MAX, |busy| busy.look_at(now));
        let (waiter, is_first) = engine.waiters.join(state.id, &ask, until, wait, visit_at)?;
        engine.begin_to_wait(state, &waiter, until.min(visit_at), is_first.then_some(busy));
        self.stage = Stage::Waiting(waiter);
        Ok(())
    }

    fn told(&mut self, told: Result<Granted>) -> Result<()> {
        if let Stage::Waiting(waiter) = std::mem::replace(&mut self.stage, Stage::Over) {
            // Whoever told it may not have come to that yet.
            self.keyspace.shared.engine.waiters.remove(&waiter);
        }
        let granted = told?;
        // Counted when it was told.
        self.keyspace.shared.engine.waiting.fetch_sub(1, Ordering::AcqRel);
        self.stage = Stage::Appended { granted, waited: true };
        Ok(())
    }

    /// The lease, or the start again: a grant was overtaken on its way by a raise, and its token is burnt.
    fn finish(&mut self, handed_out: bool) -> Option<Lease> {
        let stage = std::mem::replace(&mut self.stage, Stage::Over);
        let Stage::Appended { granted, .. } = stage else { return None };
        if !handed_out {
            self.slot = WakerSlot::default();
            self.stage = Stage::Start;
            return None;
        }
        Some(Lease::new(&self.keyspace.shared.engine, &self.keyspace.state, granted))
    }
}

impl Future for Acquire {
    type Output = Result<Lease>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(self.poll_lease(cx));
        if answer.is_err() {
            self.leave();
        }
        Poll::Ready(answer)
    }
}

impl Acquire {
    /// Leaves nothing behind, whatever was reached.
    fn leave(&mut self) {
        let engine = &self.keyspace.shared.engine;
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Waiting(waiter) => {
                let granted = engine.waiters.leave(&waiter);
                if waiter.queue.has_slots {
                    engine.bell.nudge();
                }
                if let Some(granted) = granted {
                    engine.waiting.fetch_sub(1, Ordering::AcqRel);
                    engine.give_up(&self.keyspace.state, &granted);
                }
            }
            Stage::Appended { granted, .. } => engine.give_up(&self.keyspace.state, &granted),
            Stage::Start | Stage::Behind { .. } | Stage::Over => {}
        }
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").field("keyspace", &self.keyspace.name()).finish_non_exhaustive()
    }
}
