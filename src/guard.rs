//! Leases, from the holder's side.
//!
//! One job: keep a lease, hear of its loss, give it back. A lease says who may go on, for how long; what
//! stops the one who may not is the token, in the write path.
//!
//! Read next: `acquire.rs`, how one comes by a lease.

use crate::block::block_on;
use crate::engine::{Engine, KeyspaceState};
use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::lease::{Ending, FOREVER, Grant};
use crate::sync::{Arc, Ordering};
use crate::types::{Excerpt, OperationId, OwnerId, Token, Ttl};
use crate::waiter::Granted;
use crate::watches::Keep;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

impl Keyspace {
    /// Renews the lease of a holder in another process, named by (key, token, owner): until now and its
    /// ttl. Answers the time that is left ([`Duration::MAX`] for [`Ttl::INFINITE`]), which the holder counts from
    /// before it asked.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let lease = jobs.lease(b"job-7").acquire()?;
    /// let (token, owner) = (lease.token(), lease.owner()); // sent to the holder, and back
    /// assert!(jobs.renew(b"job-7", token, owner)?.as_secs() <= 10);
    /// jobs.release(b"job-7", token, owner)?;
    /// assert!(jobs.renew(b"job-7", token, owner).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was released, broken or taken over, or was never granted.
    /// [`Error::Expired`]: it ran out. Either way: stop, or acquire again. [`Error::InvalidArgument`],
    /// [`Error::TooLarge`]: the key. [`Error::Poisoned`], [`Error::Closed`]: nothing is renewed any more.
    pub fn renew(&self, key: &[u8], token: Token, owner: OwnerId) -> Result<Duration> {
        let fence = self.fence_name(key)?;
        let engine = &self.shared.engine;
        match engine.renew(&self.state, fence, token, owner)? {
            FOREVER => Ok(Duration::MAX),
            deadline => Ok(Duration::from_nanos(deadline.saturating_sub(engine.options.clock.now()))),
        }
    }

    /// Releases the lease of a holder in another process, named by (key, token, owner): see
    /// [`Keyspace::renew`].
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was not held any more. Whoever holds the fence now is not touched.
    /// [`Error::InvalidArgument`], [`Error::TooLarge`]: the key. [`Error::Closed`].
    pub fn release(&self, key: &[u8], token: Token, owner: OwnerId) -> Result<()> {
        let fence = self.fence_name(key)?;
        self.shared.engine.release(&self.state, fence, token, owner)
    }
}

/// A lease that is held. Dropping it releases it at once, without I/O; [`Lease::detach`] does not.
///
/// Holding it is no proof that it is still valid: a paused thread finds out only when it asks. What
/// protects the data is [`Lease::token`] in every write. See the [guide](crate::guide).
///
/// It does not keep the store open: when the [`Db`](crate::Db) and all keyspaces of it are dropped, the store is
/// closed and the lease is over. A lease that is not kept is released at once, as in `acquire()?.token()`.
#[must_use = "dropping a lease releases it"]
pub struct Lease {
    engine: Arc<Engine>,
    keyspace: Arc<KeyspaceState>,
    grant: Arc<Grant>,
    predecessor: Option<(Token, OperationId)>,
    /// It is its holder's elsewhere: dropping this releases nothing.
    is_detached: bool,
}

impl Lease {
    pub(crate) fn new(engine: &Arc<Engine>, keyspace: &Arc<KeyspaceState>, granted: Granted) -> Self {
        let Granted { grant, predecessor, .. } = granted;
        Lease { engine: engine.clone(), keyspace: keyspace.clone(), grant, predecessor, is_detached: false }
    }

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
        &self.grant.fence().name
    }

    /// What the keys of this lease begin with, in a keyspace of prefixes: the name of its fence, which for a
    /// slot is `key`, a dot, its number and the delimiter.
    pub fn prefix(&self) -> &[u8] {
        self.fence()
    }

    /// The last numbered operation committed on this fence under an earlier token, for the new holder
    /// who wants to know what its predecessor got done before it does it again.
    pub fn predecessor(&self) -> Option<(Token, OperationId)> {
        self.predecessor
    }

    /// Whether the lease is held right now. No lock, no I/O: a clock read and two loads.
    pub fn is_live(&self) -> bool {
        self.grant.is_held(self.engine.options.clock.now())
    }

    /// How long the lease lasts unless it is renewed; zero when it is over. [`Duration::MAX`] for
    /// [`Ttl::INFINITE`].
    pub fn remaining(&self) -> Duration {
        let now = self.engine.options.clock.now();
        if !self.grant.is_held(now) {
            return Duration::ZERO;
        }
        if self.grant.ttl() == Ttl::INFINITE {
            return Duration::MAX;
        }
        Duration::from_nanos(self.grant.held_until().saturating_sub(now))
    }

    /// Extends the lease to one ttl from now. No lock, no I/O.
    ///
    /// # Errors
    /// [`Error::Expired`], [`Error::NotHeld`]: it is over, for ever; acquire again. [`Error::Poisoned`],
    /// [`Error::Closed`]: nothing is renewed any more.
    pub fn renew(&self) -> Result<()> {
        let now = self.engine.options.clock.now();
        self.engine.renew_grant(&self.keyspace, &self.grant, now, u64::MAX).map(drop)
    }

    /// Sees to it that the lease lasts at least `time` from now, renewing it if it would not: for the start of
    /// a step that takes that long.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// # use std::time::Duration;
    /// let lease = jobs.lease(b"job-7").ttl(Duration::from_secs(30)).acquire()?;
    /// lease.ensure(Duration::from_secs(20))?;
    /// assert!(lease.remaining() > Duration::from_secs(20));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Lease::renew`]; [`Error::InvalidArgument`] for a time above the ttl.
    pub fn ensure(&self, time: Duration) -> Result<()> {
        if let Some(ttl) = self.grant.ttl().duration()
            && time > ttl
        {
            return Err(Error::invalid(format!(
                "a lease with a ttl of {ttl:?} never lasts {time:?}: ask for a longer ttl, or for less at a time"
            )));
        }
        if self.remaining() >= time && self.is_live() { Ok(()) } else { self.renew() }
    }

    /// Has the store's own thread renew the lease, at a third of its ttl, until it is released or lost, and at
    /// most for `max_hold` from now: what hangs for longer than that is not to keep others out. `max_hold` is at
    /// least the ttl, for which the lease lasts in any case. A runtime without a free thread, or a long
    /// computation, no longer loses the lease.
    ///
    /// The last renewal ends with `max_hold`, and calling this again moves it.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// # use std::time::Duration;
    /// let lease = jobs.lease(b"job-7").acquire()?;
    /// lease.keep_alive(Duration::from_secs(3600))?;
    /// // An hour of work at most; dropping the lease ends it, and the renewing.
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Expired`], [`Error::NotHeld`]: it is over. [`Error::InvalidArgument`]: a `max_hold` shorter than the
    /// ttl (ask for a shorter ttl), a lease without an end, which needs no renewing, or a store
    /// [without threads](crate::Options::without_threads), which has nobody to do it.
    pub fn keep_alive(&self, max_hold: Duration) -> Result<()> {
        if self.grant.ttl() == Ttl::INFINITE {
            return Err(Error::invalid("a lease without an end is not renewed: give it a ttl"));
        }
        if !self.engine.options.background {
            return Err(Error::invalid("a store without threads renews nothing by itself: call `renew`"));
        }
        if let Some(ttl) = self.grant.ttl().duration()
            && max_hold < ttl
        {
            return Err(Error::invalid(format!(
                "a hold of at most {max_hold:?} is shorter than the ttl of {ttl:?}, which the lease lasts anyway: ask \
                 for a shorter ttl"
            )));
        }
        let now = self.engine.options.clock.now();
        let until = now.saturating_add(u64::try_from(max_hold.as_nanos()).unwrap_or(u64::MAX));
        self.engine.renew_grant(&self.keyspace, &self.grant, now, until)?;
        let next = self.engine.next_renewal(&self.grant, now);
        let keep = next.map(|next| Keep { next, until });
        if !self.engine.watches.keep(&self.grant, keep, now) {
            return Err(self.keyspace.not_held(self.fence(), self.token()));
        }
        self.engine.bell.nudge();
        Ok(())
    }

    /// Hears of the end of the lease: a future, and a blocking wait, that outlive the lease.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// # use std::time::Duration;
    /// let lease = jobs.lease(b"job-7").ttl(Duration::from_millis(20)).acquire()?;
    /// let lost = lease.lost();
    /// let watchdog = std::thread::spawn(move || lost.wait()); // and then kill the child process, say
    /// assert_eq!(watchdog.join().expect("no panic"), tidewall::Ending::Expired);
    /// assert!(!lease.is_live());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lost(&self) -> Lost {
        Lost { engine: self.engine.clone(), grant: self.grant.clone(), slot: 0 }
    }

    /// Gives the lease back. The next holder need not wait for it to run out. No I/O, and no lock unless somebody
    /// waits for the fence: then the next grant is appended here, and the sync left to the one who gets it.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was over before. Nothing else is touched.
    pub fn release(self) -> Result<()> {
        if self.engine.release_grant(&self.keyspace, &self.grant) {
            return Ok(());
        }
        Err(self.keyspace.not_held(self.fence(), self.token()))
    }

    /// Hands the lease to a holder elsewhere: it stays granted, and is renewed and released by key, token and
    /// owner ([`Keyspace::renew`], [`Keyspace::release`]). Nothing is released here, and nothing is kept of it.
    ///
    /// A [`keep_alive`](Lease::keep_alive) ends: from here on the lease runs out one ttl after the last renewal,
    /// unless its holder renews it. A [`Lost`] goes on.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let (token, owner) = jobs.lease(b"job-7").acquire()?.detach(); // sent to the holder, and back
    /// assert!(jobs.lease(b"job-7").try_acquire().is_err());
    /// jobs.put(token, b"job-7", b"result")?;
    /// jobs.release(b"job-7", token, owner)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn detach(mut self) -> (Token, OwnerId) {
        self.is_detached = true;
        self.engine.watches.keep_no_longer(self.token(), self.engine.options.clock.now());
        (self.token(), self.owner())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.is_detached && !self.grant.is_ended() {
            self.engine.release_grant(&self.keyspace, &self.grant);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("fence", &Excerpt::new(self.fence()))
            .field("token", &self.token())
            .field("owner", &self.owner())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// The end of a lease, to be waited for; from [`Lease::lost`].
///
/// A future for any runtime, cancel-safe, and also a blocking [`Lost::wait`]. Woken within 10 ms of the end,
/// whatever it was, by the store's own thread; a clock that jumps without saying so (a suspended machine) is
/// noticed within a quarter of a second. In a store [without threads](crate::Options::without_threads) it
/// has to be polled again and again. Once it has answered, the lease is over for ever, also by a clock that
/// goes back. It does not keep the store open: closing that ends the lease, with [`Ending::Closed`].
#[must_use = "it does nothing until it is waited for or polled"]
pub struct Lost {
    engine: Arc<Engine>,
    grant: Arc<Grant>,
    slot: u64,
}

impl Lost {
    /// Blocks until the lease is over, and says why.
    pub fn wait(mut self) -> Ending {
        block_on(|cx| self.poll_end(cx))
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Ending> {
        let now = self.engine.options.clock.now();
        self.grant.end_if_not_held(now);
        if let Some(ending) = self.ending() {
            return Poll::Ready(ending);
        }
        if !self.engine.options.background {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.engine.watches.add_waker(&self.grant, &mut self.slot, cx.waker().clone(), now) {
            self.engine.bell.nudge();
            return Poll::Pending;
        }
        Poll::Ready(self.ending().unwrap_or(Ending::Closed))
    }

    /// How the lease ended, if it has. Closing ends what is held as a raise does, so it is asked for first.
    fn ending(&self) -> Option<Ending> {
        let closed = self.engine.closed.load(Ordering::Acquire);
        match self.grant.ending() {
            None | Some(Ending::Overtaken) if closed => Some(Ending::Closed),
            ending => ending,
        }
    }
}

impl Future for Lost {
    type Output = Ending;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ending> {
        self.poll_end(cx)
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if self.slot != 0 {
            let now = self.engine.options.clock.now();
            self.engine.watches.remove_waker(self.grant.token(), self.slot, now);
        }
    }
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lost").field("token", &self.grant.token()).finish_non_exhaustive()
    }
}
