//! Asking for a lease: at once, or waiting, blocking or not.
//!
//! One job: carry one request from the first try to the lease. Each step of it can be abandoned: what was
//! not granted leaves nothing behind, what was is given back at once.
//!
//! Read next: `oversee.rs`, for those who watch the holders.

use crate::block::block_on;
use crate::error::{Error, Result};
use crate::grant::Attempt;
use crate::group_commit::WakerSlot;
use crate::guard::Lease;
use crate::keyspace::Keyspace;
use crate::lease::Terms;
use crate::options::Tokens;
use crate::slots::check_slots;
use crate::sync::{Arc, Ordering};
use crate::types::{Lsn, OwnerId, Token, Ttl};
use crate::waiters::{Ask, Granted, Slots, Waiter};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// A lease about to be asked for; made by [`Keyspace::lease`].
#[derive(Clone, Debug)]
#[must_use = "a lease is asked for by `acquire`"]
pub struct LeaseRequest<'k> {
    keyspace: &'k Keyspace,
    key: &'k [u8],
    ttl: Result<Ttl>,
    owner: Option<OwnerId>,
    wait: Option<Duration>,
    lock_delay: Duration,
    slots: Option<u32>,
    resume: Option<Token>,
}

/// The time to live of a lease that names none.
const DEFAULT_TTL: Duration = Duration::from_secs(10);

impl Keyspace {
    /// Asks for the lease on the fence of `key`: any key of it, or its name.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # use std::time::Duration;
    /// let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let lease = jobs.lease(b"job-7").ttl(Duration::from_secs(10)).acquire()?;
    /// jobs.put(lease.token(), b"job-7", b"result")?;
    /// lease.release()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lease<'k>(&'k self, key: &'k [u8]) -> LeaseRequest<'k> {
        LeaseRequest {
            keyspace: self,
            key,
            ttl: Ttl::new(DEFAULT_TTL),
            owner: None,
            wait: None,
            lock_delay: Duration::ZERO,
            slots: None,
            resume: None,
        }
    }
}

impl LeaseRequest<'_> {
    /// How long the lease lasts without renewal, from the grant on: a [`Duration`] from 1 ms on, or
    /// [`Ttl::INFINITE`]. Default: 10 s.
    pub fn ttl<T>(mut self, ttl: T) -> Self
    where
        T: TryInto<Ttl>,
        Error: From<T::Error>,
    {
        self.ttl = ttl.try_into().map_err(Error::from);
        self
    }

    /// The holder's name. Default: 128 random bits.
    pub fn owner(mut self, owner: OwnerId) -> Self {
        self.owner = Some(owner);
        self
    }

    /// How long to wait for the fence while somebody else has it. Default: not at all.
    ///
    /// Those who wait are served in the order they came, and nobody who comes later overtakes them. The ttl
    /// counts from the grant. Whoever waits past this time never gets the lease. In a store
    /// [without threads](crate::Options::without_threads) nobody waits: the answer is [`Error::Held`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// # use std::time::Duration;
    /// let first = jobs.lease(b"job-7").acquire()?;
    /// let next = std::thread::scope(|scope| {
    ///     let waiting = scope.spawn(|| jobs.lease(b"job-7").wait(Duration::from_secs(30)).acquire());
    ///     first.release()?;
    ///     waiting.join().expect("no panic")
    /// })?;
    /// assert_eq!(next.token().get(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait(mut self, time: Duration) -> Self {
        self.wait = Some(time);
        self
    }

    /// How long the fence stays unavailable after this lease has run out or was broken (not after a release):
    /// for a destination that cannot check tokens, where a late request of the old holder may still be on
    /// its way. It does not survive an open. Default: zero.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// # use std::time::Duration;
    /// let lease = jobs.lease(b"valve").lock_delay(Duration::from_secs(15)).acquire()?;
    /// jobs.break_lease(b"valve", "stuck")?;
    /// assert!(matches!(jobs.lease(b"valve").acquire(), Err(tidewall::Error::Held { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lock_delay(mut self, time: Duration) -> Self {
        self.lock_delay = time;
        self
    }

    /// Asks for one of `n` slots of the key, at most [`MAX_SLOTS`](crate::MAX_SLOTS): at most `n` are held at
    /// a time. In a keyspace with [`Scope::Prefix`](crate::Scope::Prefix), whose delimiter is not in the key.
    ///
    /// Each slot is a fence of its own, named by [`Lease::prefix`]; what it protects is written under that.
    /// The lowest free one is given. All live slots of the key count, so after `n` was lowered nobody is
    /// evicted, and nobody gets one until fewer than `n` are held.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// use tidewall::{Error, KeyspaceOptions, Scope};
    /// let streams = db.keyspace("streams", KeyspaceOptions::new().scope(Scope::Prefix(b'/')))?;
    /// let tv = streams.lease(b"user-7").slots(2).acquire()?;
    /// let phone = streams.lease(b"user-7").slots(2).acquire()?;
    /// assert_eq!((tv.prefix(), phone.prefix()), (&b"user-7.0/"[..], &b"user-7.1/"[..]));
    /// assert!(matches!(streams.lease(b"user-7").slots(2).acquire(), Err(Error::Held { .. })));
    /// streams.put(phone.token(), &[phone.prefix(), b"position"].concat(), b"00:12:07")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn slots(mut self, n: u32) -> Self {
        self.slots = Some(n);
        self
    }

    /// The token of a lease from before the store was opened, whose holder (the same
    /// [`owner`](LeaseRequest::owner)) wants to go on: within [`Options::lease_grace`](crate::Options::lease_grace)
    /// its fence is kept for it. What it gets is a *new* lease, with a new token. When the grace is over this
    /// is a request like any other.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # use std::time::Duration;
    /// use tidewall::{Error, KeyspaceOptions, Options};
    /// let open = || Options::new().lease_grace(Duration::from_secs(5)).open(dir.path().join("data"));
    /// let (token, owner) = {
    ///     let jobs = open()?.keyspace("jobs", KeyspaceOptions::new())?;
    ///     let lease = jobs.lease(b"job-7").acquire()?;
    ///     let names = (lease.token(), lease.owner());
    ///     std::mem::forget(lease); // as a crash would
    ///     names
    /// };
    /// let jobs = open()?.keyspace("jobs", KeyspaceOptions::new())?;
    /// assert!(matches!(jobs.lease(b"job-7").acquire(), Err(Error::Held { .. })));
    /// let lease = jobs.lease(b"job-7").owner(owner).resume(token).acquire()?;
    /// assert!(lease.token() > token);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resume(mut self, token: Token) -> Self {
        self.resume = Some(token);
        self
    }

    /// Acquires the lease, waiting for it as long as [`LeaseRequest::wait`] says. Returns when the grant is
    /// durable and the fence of everybody before is up.
    ///
    /// # Errors
    /// [`Error::Held`]: somebody has it, perhaps this very owner (then waiting would not help, and is not
    /// done), or others wait for it. [`Error::Timeout`]: the wait was over first. [`Error::InvalidArgument`]:
    /// a bad ttl, key or number of slots, or a keyspace of external tokens. [`Error::TokensExhausted`],
    /// [`Error::NoSpace`], [`Error::Indeterminate`], [`Error::Poisoned`], [`Error::Closed`].
    pub fn acquire(self) -> Result<Lease> {
        self.acquire_async().run()
    }

    /// Acquires the lease, or says at once (but for a sync) that somebody has it.
    ///
    /// # Errors
    /// As [`LeaseRequest::acquire`].
    pub fn try_acquire(mut self) -> Result<Lease> {
        self.wait = None;
        self.acquire()
    }

    /// As [`LeaseRequest::acquire`], as a future for any runtime.
    pub fn acquire_async(self) -> Acquire {
        let keyspace = self.keyspace.clone();
        let wait = self.wait;
        let plan = self.plan();
        Acquire { keyspace, plan, wait, until: None, stage: Stage::Start, slot: WakerSlot::default() }
    }

    fn plan(self) -> Result<Plan> {
        let state = &self.keyspace.state;
        if state.options.tokens == Tokens::External {
            return Err(Error::invalid(format!(
                "keyspace {:?} takes its tokens from elsewhere, so it grants no leases",
                self.keyspace.name()
            )));
        }
        let name = self.keyspace.fence_name(self.key)?;
        let slots = match self.slots {
            None => None,
            Some(n) => Some(Slots { n, delimiter: check_slots(state.options.scope, self.key, n)? }),
        };
        if slots.is_some() && self.key.len() + 6 > crate::types::MAX_KEY_BYTES {
            let (size, limit) = (self.key.len() + 6, crate::types::MAX_KEY_BYTES);
            return Err(Error::TooLarge { what: "the key of a slot", size, limit });
        }
        let owner = match self.owner {
            Some(owner) => owner,
            None => OwnerId::new(self.keyspace.shared.engine.options.entropy.u128()?),
        };
        let delay = u64::try_from(self.lock_delay.as_nanos()).unwrap_or(u64::MAX);
        Ok(Plan {
            name: name.into(),
            slots,
            terms: Terms { owner, ttl: self.ttl?, delay },
            resume: self.resume,
        })
    }
}

/// A request, checked and owned.
#[derive(Clone, Debug)]
struct Plan {
    name: Box<[u8]>,
    slots: Option<Slots>,
    terms: Terms,
    resume: Option<Token>,
}

impl Plan {
    fn ask(&self) -> Ask<'_> {
        Ask { name: &self.name, slots: self.slots, terms: self.terms, resume: self.resume }
    }
}

/// A lease that is being acquired; from [`LeaseRequest::acquire_async`].
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
    fn run(mut self) -> Result<Lease> {
        loop {
            match &self.stage {
                Stage::Start => self.start()?,
                Stage::Behind { lsn, group } => {
                    // Upholds D4: `Held` would rest on a grant that a crash may still take away.
                    self.keyspace.shared.engine.wait_durable(*lsn, *group)?;
                    self.stage = Stage::Start;
                }
                Stage::Waiting(waiter) => {
                    let told = block_on(|cx| waiter.poll(cx));
                    self.told(told)?;
                }
                Stage::Appended { granted, .. } => {
                    let engine = &self.keyspace.shared.engine;
                    let handed_out = engine.hand_out(&self.keyspace.state, granted)?;
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
                    let Stage::Appended { granted, .. } = &self.stage else { continue };
                    let engine = &self.keyspace.shared.engine;
                    if let Err(error) = durable {
                        engine.give_up(&self.keyspace.state, granted);
                        return Poll::Ready(Err(error));
                    }
                    let handed_out = engine.enable(&self.keyspace.state, granted);
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
        let held = match engine.attempt(state, &ask)? {
            Attempt::Appended(granted) => {
                self.stage = Stage::Appended { granted, waited: false };
                return Ok(());
            }
            Attempt::Busy(busy) => {
                let is_mine = |owner: OwnerId| plan.slots.is_none() && owner == plan.terms.owner;
                let by_me = busy.grants.iter().any(|grant| !grant.is_ended() && is_mine(grant.owner()));
                if (waits.is_none() || by_me) && busy.rests_on > engine.progress.durable() {
                    self.stage = Stage::Behind { lsn: busy.rests_on, group: busy.group };
                    return Ok(());
                }
                if waits.is_some() && !by_me { None } else { Some(engine.held(&plan.name, &busy)) }
            }
            Attempt::Queued(_) if waits.is_some() => None,
            Attempt::Queued(owner) => Some(engine.held_by(&plan.name, owner, Some(Duration::ZERO))),
        };
        if let Some(held) = held {
            return Err(held);
        }
        let wait = waits.unwrap_or_default();
        let now = engine.options.clock.now();
        let nanos = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        let until = *self.until.get_or_insert(now.saturating_add(nanos));
        let waiter = engine.waiters.join(state.id, &ask, until, wait)?;
        self.stage = Stage::Waiting(waiter);
        engine.bell.nudge();
        Ok(())
    }

    fn told(&mut self, told: Result<Granted>) -> Result<()> {
        self.stage = Stage::Over;
        self.stage = Stage::Appended { granted: told?, waited: true };
        Ok(())
    }

    /// The lease, or the start again: a grant was overtaken on its way by a raise, and its token is burnt.
    fn finish(&mut self, handed_out: bool) -> Option<Lease> {
        let stage = std::mem::replace(&mut self.stage, Stage::Over);
        let Stage::Appended { granted, waited } = stage else { return None };
        if !handed_out {
            self.slot = WakerSlot::default();
            self.stage = Stage::Start;
            return None;
        }
        let engine = &self.keyspace.shared.engine;
        if waited {
            let took = engine.options.clock.now().saturating_sub(granted.asked);
            engine.counters.hand_overs.fetch_add(1, Ordering::Relaxed);
            engine.counters.hand_over_nanos.fetch_add(took, Ordering::Relaxed);
            engine.counters.hand_over_nanos_max.fetch_max(took, Ordering::Relaxed);
        }
        Some(Lease::new(engine, &self.keyspace.state, granted))
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
                if let Some(granted) = engine.waiters.leave(&waiter) {
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
