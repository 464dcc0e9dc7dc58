//! What can be asked of a lease, before it is asked for.
//!
//! One job: the options of one request, each with its default, checked in one place.
//!
//! Read next: `oversee.rs`, for those who watch the holders.

use crate::acquire::{Acquire, Plan};
use crate::error::{Error, Result};
use crate::guard::Lease;
use crate::keyspace::Keyspace;
use crate::lease::Terms;
use crate::options::Tokens;
use crate::slots::check_slots;
use crate::types::{OwnerId, Token, Ttl};
use crate::waiter::Slots;
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
    /// How long the lease lasts without renewal, from the grant on: a [`Duration`] from 1 ms to [`Ttl::MAX`] (ten
    /// years), or [`Ttl::INFINITE`]. Default: 10 s.
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
    /// its way. It ends early where the mark of the fence passes the lease's token ([`Keyspace::raise`],
    /// [`Keyspace::raise_all`]) or the fence is broken once more, and does not survive an open. Default: zero.
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

    /// Acquires the lease. Does not wait for one that somebody holds, unless [`LeaseRequest::wait`] was called: then
    /// as long as that says. Returns when the grant is durable, and whoever had the fence before is fenced.
    ///
    /// Keep what it returns: `acquire()?.token()` drops the lease at the end of the line, and so releases it.
    ///
    /// # Errors
    /// [`Error::Held`]: somebody has it, perhaps this very owner (then waiting would not help, and is not
    /// done), or others wait for it. [`Error::Timeout`]: the wait was over first. [`Error::InvalidArgument`],
    /// [`Error::TooLarge`]: a bad ttl, key or number of slots, or a keyspace of external tokens.
    /// [`Error::TokensExhausted`], [`Error::NoSpace`], [`Error::Indeterminate`], [`Error::Poisoned`],
    /// [`Error::ReadOnly`], [`Error::Closed`].
    pub fn acquire(self) -> Result<Lease> {
        self.acquire_async().run()
    }

    /// As [`LeaseRequest::acquire`], but never waits for a holder: [`LeaseRequest::wait`] counts for nothing. Without
    /// that the two are the same. Either waits for a sync.
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
        Acquire::new(keyspace, self.plan(), wait)
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
            None => OwnerId::new(self.keyspace.shared.engine.options.entropy.name()?),
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
