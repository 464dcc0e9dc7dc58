//! For operators: who holds what, and taking it away.

use crate::db::Db;
use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::FenceId;
use crate::types::{Mark, OwnerId, Token};
use crate::waiter::QueueId;
use std::time::Duration;

/// One fence that is not to be had, and why; from [`Keyspace::holders`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Holder {
    /// The fence.
    pub fence: Vec<u8>,
    /// Who holds it, or held it last.
    pub owner: OwnerId,
    /// Under which token.
    pub token: Token,
    /// Whether the lease is live. If not, it is over and the fence is kept: by a `lock_delay`, by the grace
    /// after an open, or for a lease without an end from before it, which nobody has broken or superseded.
    pub is_live: bool,
    /// Time since the grant; for one from before the open, since that.
    pub age: Duration,
    /// How long the fence stays taken unless something happens; `None`: without an end.
    pub remaining: Option<Duration>,
    /// How many wait for it.
    pub waiting: usize,
}

/// What [`Keyspace::break_lease`] broke.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Broken {
    /// Whose lease it was.
    pub owner: OwnerId,
    /// Its token, which is fenced now.
    pub token: Token,
    /// The mark of the fence now: a fresh token that nobody has.
    pub mark: Mark,
    /// The reason given.
    pub reason: String,
}

impl Db {
    /// The highest token that this store has granted, or was told of by [`Db::advance_tokens`], durably: to
    /// look at, not to write with. `None` before the first one.
    ///
    /// # Errors
    /// [`Error::Indeterminate`](crate::Error::Indeterminate): the disk failed on the way.
    /// [`Error::Closed`](crate::Error::Closed).
    pub fn highest_token(&self) -> Result<Option<Mark>> {
        let engine = &self.shared.engine;
        engine.check_readable()?;
        let (counter, rests_on, group) = {
            let tail = engine.tail.lock();
            (tail.counter, tail.last(), tail.group_of(tail.last()))
        };
        engine.wait_durable(rests_on, group)?;
        Ok((counter > 0).then(|| Mark::from_number(counter)))
    }
}

/// The longest reason that is written to the log.
const REASON_BYTES: usize = 1024;

impl Keyspace {
    /// Whether the keyspace is of a restored copy, and takes no writes until [`Keyspace::raise_all`] tells it the
    /// present value of its token source: they answer [`Error::NeedsFloor`](crate::Error::NeedsFloor).
    pub fn needs_floor(&self) -> bool {
        self.state.needs_floor()
    }

    /// Every lease on a fence whose name starts with `prefix`, in the order of the names: the live ones, and
    /// those that are over but keep their fence. A look, not a moment: leases come and go meanwhile.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let lease = jobs.lease(b"job-7").acquire()?;
    /// for holder in jobs.holders(b"job-")? {
    ///     assert_eq!(holder.owner, lease.owner());
    ///     println!("{holder:?}");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed).
    pub fn holders(&self, prefix: &[u8]) -> Result<Vec<Holder>> {
        let engine = &self.shared.engine;
        engine.check_readable()?;
        let now = engine.options.clock.now();
        let mut holders = Vec::new();
        engine.leases.for_each_of(self.state.id, prefix, |fence, grant| {
            let is_live = grant.is_live(now);
            // Pending ones are nobody's yet, and may never be. Upholds D4.
            let is_kept = grant.is_ended() && !grant.is_free(now);
            if is_live || is_kept || grant.is_listed_for_ever() {
                holders.push(Holder {
                    fence: fence.to_vec(),
                    owner: grant.owner(),
                    token: grant.token(),
                    is_live,
                    age: grant.age(now),
                    remaining: grant.remaining(now),
                    waiting: 0,
                });
            }
        });
        holders.sort_by(|a, b| a.fence.cmp(&b.fence));
        if engine.waiters.len() > 0 {
            for holder in &mut holders {
                let fence = FenceId::new(self.state.id, &holder.fence);
                holder.waiting = QueueId::of(&fence).map(|queue| engine.waiters.waiting(&queue)).sum();
            }
        }
        Ok(holders)
    }

    /// Ends the lease on the fence of `key` (any key of it, or its name), whoever holds it. A fresh token is
    /// burnt on the fence in the same step, so what the broken holder writes is fenced from here on,
    /// durably, also before anybody else acquires. Whoever waits is next; a `lock_delay` of the broken lease
    /// is honoured, and ended by breaking it once more.
    ///
    /// `reason` stands in the log, up to 1 KiB of it, and in what is returned. `None`: there was nothing to
    /// break.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
    /// let lease = jobs.lease(b"job-7").acquire()?;
    /// let broken = jobs.break_lease(b"job-7", "worker-3 is gone")?.expect("it was held");
    /// assert_eq!(broken.token, lease.token());
    /// let late = jobs.put(lease.token(), b"job-7", b"late");
    /// assert!(matches!(late, Err(tidewall::Error::Fenced { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument), [`Error::TooLarge`](crate::Error::TooLarge): the
    /// key. [`Error::TokensExhausted`](crate::Error::TokensExhausted), [`Error::NoSpace`](crate::Error::NoSpace),
    /// [`Error::Poisoned`](crate::Error::Poisoned), [`Error::ReadOnly`](crate::Error::ReadOnly),
    /// [`Error::Closed`](crate::Error::Closed): nothing was broken.
    /// [`Error::Indeterminate`](crate::Error::Indeterminate): reopen and look.
    pub fn break_lease(&self, key: &[u8], reason: &str) -> Result<Option<Broken>> {
        let fence = self.fence_name(key)?;
        let logged = &reason[..reason.floor_char_boundary(REASON_BYTES)];
        let broken = self.shared.engine.break_grant(&self.state, fence, logged.as_bytes())?;
        Ok(broken.map(|(grant, mark)| Broken {
            owner: grant.owner(),
            token: grant.token(),
            mark: mark.into(),
            reason: reason.to_owned(),
        }))
    }
}
