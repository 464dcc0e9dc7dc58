//! Leases, from the holder's side.
//!
//! One job: ask for a lease, keep it, give it back. A lease says who may go on, for how long; what stops
//! the one who may not is the token, in the write path.

use crate::engine::{Engine, KeyspaceState};
use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::lease::Grant;
use crate::options::Tokens;
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::types::{OpId, OwnerId, Token, Ttl};
use std::fmt;
use std::time::Duration;

/// A lease about to be asked for; made by [`Keyspace::lease`].
#[derive(Debug)]
#[must_use = "a lease is asked for by `acquire`"]
pub struct LeaseRequest<'k> {
    keyspace: &'k Keyspace,
    key: &'k [u8],
    ttl: Result<Ttl>,
    owner: Option<OwnerId>,
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
        LeaseRequest { keyspace: self, key, ttl: Ttl::new(DEFAULT_TTL), owner: None }
    }

    /// Renews the lease of a holder in another process, named by (key, token, owner), and answers how long
    /// it lasts from now on: [`Duration::MAX`] for [`Ttl::INFINITE`]. The holder counts from before it asked.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was released, broken or taken over, or was never granted.
    /// [`Error::Expired`]: it ran out. Either way: stop, or acquire again.
    pub fn renew(&self, key: &[u8], token: Token, owner: OwnerId) -> Result<Duration> {
        let fence = self.fence_name(key)?;
        let engine = &self.shared.engine;
        match engine.renew(&self.state, fence, token, owner)? {
            u64::MAX => Ok(Duration::MAX),
            deadline => Ok(Duration::from_nanos(deadline.saturating_sub(engine.options.clock.now()))),
        }
    }

    /// Releases the lease of a holder in another process, named by (key, token, owner).
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was not held any more. Whoever holds the fence now is not touched.
    pub fn release(&self, key: &[u8], token: Token, owner: OwnerId) -> Result<()> {
        let fence = self.fence_name(key)?;
        self.shared.engine.release(&self.state, fence, token, owner)
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

    /// Acquires the lease. Returns when the grant is durable and the fence of everybody before is up.
    ///
    /// # Errors
    /// [`Error::Held`]: somebody has it, perhaps this very owner. [`Error::InvalidArgument`]: a bad ttl or
    /// key, or a keyspace of external tokens. [`Error::TokensExhausted`], [`Error::NoSpace`],
    /// [`Error::Indeterminate`], [`Error::Poisoned`].
    pub fn acquire(self) -> Result<Lease> {
        self.try_acquire()
    }

    /// Acquires the lease, or says at once (but for a sync) that somebody has it.
    ///
    /// # Errors
    /// As [`LeaseRequest::acquire`].
    pub fn try_acquire(self) -> Result<Lease> {
        let keyspace = self.keyspace;
        if keyspace.state.options.tokens == Tokens::External {
            return Err(Error::invalid(format!(
                "keyspace {:?} takes its tokens from elsewhere, so it grants no leases",
                keyspace.name()
            )));
        }
        let fence = keyspace.fence_name(self.key)?;
        let ttl = self.ttl?;
        let owner = match self.owner {
            Some(owner) => owner,
            None => OwnerId::new(keyspace.shared.engine.options.entropy.u128()?),
        };
        let granted = keyspace.shared.engine.acquire(&keyspace.state, fence, owner, ttl)?;
        Ok(Lease {
            held_until: AtomicU64::new(granted.asked.saturating_add(ttl.nanos())),
            engine: keyspace.shared.engine.clone(),
            keyspace: keyspace.state.clone(),
            fence: fence.into(),
            predecessor: granted.predecessor,
            grant: granted.grant,
        })
    }
}

/// A lease that is held. Dropping it releases it at once, without I/O.
///
/// Holding it is no proof that it is still valid: a paused thread finds out only when it asks. What
/// protects the data is [`Lease::token`] in every write.
#[must_use = "dropping a lease releases it"]
pub struct Lease {
    engine: Arc<Engine>,
    keyspace: Arc<KeyspaceState>,
    fence: Box<[u8]>,
    grant: Arc<Grant>,
    /// Until when the holder may believe in it: counted from before asking, so never longer than the
    /// table does. Upholds L3.
    held_until: AtomicU64,
    predecessor: Option<(Token, OpId)>,
}

impl Lease {
    /// The token to write with.
    pub fn token(&self) -> Token {
        self.grant.token()
    }

    /// The holder's name.
    pub fn owner(&self) -> OwnerId {
        self.grant.owner()
    }

    /// The name of the fence.
    pub fn fence(&self) -> &[u8] {
        &self.fence
    }

    /// The last numbered operation committed on this fence under an earlier token, for the new holder
    /// who wants to know what its predecessor got done before it does it again.
    pub fn predecessor(&self) -> Option<(Token, OpId)> {
        self.predecessor
    }

    /// Whether the lease is held right now. No lock, no I/O: a clock read and two loads.
    pub fn is_live(&self) -> bool {
        let now = self.engine.options.clock.now();
        self.grant.is_live(now) && now < self.held_until.load(Ordering::Acquire)
    }

    /// How long the lease lasts unless it is renewed; zero when it is over. [`Duration::MAX`] for
    /// [`Ttl::INFINITE`].
    pub fn remaining(&self) -> Duration {
        let now = self.engine.options.clock.now();
        if !self.grant.is_live(now) {
            return Duration::ZERO;
        }
        if self.grant.ttl() == Ttl::INFINITE {
            return Duration::MAX;
        }
        Duration::from_nanos(self.held_until.load(Ordering::Acquire).saturating_sub(now))
    }

    /// Extends the lease to one ttl from now. No lock, no I/O.
    ///
    /// # Errors
    /// [`Error::Expired`], [`Error::NotHeld`]: it is over, for ever; acquire again.
    pub fn renew(&self) -> Result<()> {
        let now = self.engine.options.clock.now();
        if now >= self.held_until.load(Ordering::Acquire) {
            self.grant.end_if_expired(now);
            return Err(Error::Expired { token: self.token() });
        }
        self.engine.renew_grant(&self.fence, &self.grant, now)?;
        self.held_until.fetch_max(now.saturating_add(self.grant.ttl().nanos()), Ordering::AcqRel);
        Ok(())
    }

    /// Gives the lease back. The next holder need not wait for it to run out.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was over before. Nothing else is touched.
    pub fn release(self) -> Result<()> {
        if self.engine.release_grant(&self.keyspace, &self.fence, &self.grant) {
            return Ok(());
        }
        Err(Error::NotHeld { fence: crate::types::Excerpt::new(&self.fence), token: self.token() })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.grant.is_ended() {
            self.engine.release_grant(&self.keyspace, &self.fence, &self.grant);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("fence", &crate::types::Excerpt::new(&self.fence))
            .field("token", &self.token())
            .field("owner", &self.owner())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
