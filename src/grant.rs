//! Granting a lease: one log record, one sync, and the fence is up.
//!
//! One job: the engine's half of a lease. A grant is appended under the tail lock, where the mark of
//! the fence rises with it, and is handed out only when it is durable (F4, L1, L2). Expiry is asked for
//! here and nowhere else, when somebody wants the fence; it permits a takeover and fences nobody.
//!
//! Read next: `guard.rs`, the holder's half.

use crate::append::{frame_bytes, room};
use crate::engine::{Engine, KeyspaceState, Released, Tail};
use crate::error::{Error, Result};
use crate::lease::{Grant, RenewError};
use crate::log::pool::Need;
use crate::op::{Class, GrantValue, Kind, Links, Op};
use crate::sync::{Arc, Ordering};
use crate::types::{Excerpt, Lsn, OpId, OwnerId, Token, Ttl};

/// A lease as the engine hands it out.
#[derive(Debug)]
pub(crate) struct Granted {
    pub grant: Arc<Grant>,
    /// The clock before the grant was asked for: the holder counts from here (L3).
    pub asked: u64,
    pub predecessor: Option<(Token, OpId)>,
}

/// One try at a fence.
enum Attempt {
    /// Appended; to be handed out when this lsn is durable.
    Appended {
        granted: Granted,
        lsn: Lsn,
        group: u32,
    },
    /// Somebody's grant is on its way; it will be durable with this lsn at the latest.
    Pending {
        grant: Arc<Grant>,
        lsn: Lsn,
        group: u32,
    },
    Held {
        grant: Arc<Grant>,
    },
}

impl Engine {
    /// Acquires the lease on a fence, or says who holds it.
    pub fn acquire(
        &self,
        keyspace: &Arc<KeyspaceState>,
        fence: &[u8],
        owner: OwnerId,
        ttl: Ttl,
    ) -> Result<Granted> {
        loop {
            match self.attempt(keyspace, fence, owner, ttl)? {
                Attempt::Held { grant } => return Err(self.held(fence, &grant)),
                Attempt::Pending { grant, lsn, group } => {
                    // Upholds D4: `Held` would rest on a grant that a crash may still take away.
                    self.wait_durable(lsn, group)?;
                    grant.enable(self.options.clock.now());
                }
                Attempt::Appended { granted, lsn, group } => {
                    let durable = self.wait_durable(lsn, group);
                    let token = granted.grant.token();
                    if let Err(error) = durable {
                        self.leases.remove_if(keyspace.id, fence, token);
                        return Err(error);
                    }
                    let now = self.options.clock.now();
                    let handed_out = granted.grant.enable(now) || granted.grant.is_live(now);
                    self.leases.sweep(now);
                    if handed_out {
                        self.counters.grants.fetch_add(1, Ordering::Relaxed);
                        return Ok(granted);
                    }
                    // Overtaken on the way by a raise: its token is burnt.
                    self.leases.remove_if(keyspace.id, fence, token);
                }
            }
        }
    }

    fn attempt(
        &self,
        keyspace: &Arc<KeyspaceState>,
        fence: &[u8],
        owner: OwnerId,
        ttl: Ttl,
    ) -> Result<Attempt> {
        let room = room(frame_bytes(1, fence.len() + GrantValue::BYTES), 1);
        self.with_room(room, Need::Privileged, |tail| {
            let asked = self.options.clock.now();
            if let Some(grant) = self.leases.current(keyspace.id, fence) {
                if grant.is_live(asked) {
                    return Ok(Attempt::Held { grant });
                }
                // Upholds L1 and L4: the old grant is ended before a new one exists. One that was renewed
                // since, or is not durable yet, is not ended by this.
                if grant.end_if_expired(asked) {
                    self.counters.takeovers.fetch_add(1, Ordering::Relaxed);
                } else if grant.is_live(asked) {
                    return Ok(Attempt::Held { grant });
                } else if !grant.is_ended() {
                    let lsn = Lsn::new(tail.next.get() - 1);
                    return Ok(Attempt::Pending { grant, lsn, group: tail.group_of(lsn) });
                }
            }
            self.append_grant(tail, keyspace, fence, owner, ttl, asked)
        })?
    }

    /// Upholds L2: the token is one above every token so far, and durable before anyone holds it.
    fn append_grant(
        &self,
        tail: &mut Tail,
        keyspace: &Arc<KeyspaceState>,
        fence: &[u8],
        owner: OwnerId,
        ttl: Ttl,
        asked: u64,
    ) -> Result<Attempt> {
        let token = Token::new(tail.counter + 1).map_err(|_| Error::TokensExhausted)?;
        let guard = crossbeam_epoch::pin();
        let hash = self.hash(keyspace, Class::Fence, fence);
        let view = self.fence(keyspace, fence, hash, Lsn::LAST, &guard)?;
        let group = tail.group;
        let state = crate::fence::admit(&view.state, token, None, tail.next);
        let value = GrantValue { owner, ttl, incarnation: self.incarnation }.encode();
        let op = Op {
            kind: Kind::Grant,
            keyspace: keyspace.id,
            token: token.get(),
            key: fence,
            value: &value,
            links: Links { fence: Some(view.at), predecessor: state.predecessor, ..Links::default() },
        };
        let lsn = self.append_fence_op(tail, keyspace, &op, hash, view.at);
        tail.counter = token.get();
        let grant = Arc::new(Grant::pending(token, owner, ttl));
        self.leases.insert(keyspace.id, fence, grant.clone());
        let predecessor =
            state.predecessor.and_then(|(token, op)| Token::new(token).ok().map(|token| (token, op)));
        Ok(Attempt::Appended { granted: Granted { grant, asked, predecessor }, lsn, group })
    }

    fn held(&self, fence: &[u8], grant: &Grant) -> Error {
        Error::Held {
            fence: Excerpt::new(fence),
            owner: grant.owner(),
            remaining: grant.remaining(self.options.clock.now()),
        }
    }

    /// The live grant that (key, token, owner) names: ownership is checked in one place.
    fn owned(
        &self,
        keyspace: &KeyspaceState,
        fence: &[u8],
        token: Token,
        owner: OwnerId,
    ) -> Result<Arc<Grant>> {
        self.leases
            .current(keyspace.id, fence)
            .filter(|grant| grant.token() == token && grant.owner() == owner && !grant.is_ended())
            .ok_or(Error::NotHeld { fence: Excerpt::new(fence), token })
    }

    /// Renews a grant for its remote holder; answers the deadline.
    pub fn renew(&self, keyspace: &KeyspaceState, fence: &[u8], token: Token, owner: OwnerId) -> Result<u64> {
        let grant = self.owned(keyspace, fence, token, owner)?;
        self.renew_grant(fence, &grant, self.options.clock.now())
    }

    /// Renews a grant, by one compare-and-swap; no lock and no I/O.
    pub fn renew_grant(&self, fence: &[u8], grant: &Grant, now: u64) -> Result<u64> {
        if self.cause.get().is_some() || self.closed.load(Ordering::Acquire) {
            self.check_open()?;
        }
        match grant.renew(now) {
            Ok(deadline) => {
                self.counters.renewals.fetch_add(1, Ordering::Relaxed);
                Ok(deadline)
            }
            Err(RenewError::Expired) => Err(Error::Expired { token: grant.token() }),
            Err(RenewError::Ended | RenewError::Pending) => {
                Err(Error::NotHeld { fence: Excerpt::new(fence), token: grant.token() })
            }
        }
    }

    /// Releases a grant for its remote holder.
    pub fn release(
        &self,
        keyspace: &Arc<KeyspaceState>,
        fence: &[u8],
        token: Token,
        owner: OwnerId,
    ) -> Result<()> {
        let grant = self.owned(keyspace, fence, token, owner)?;
        if self.release_grant(keyspace, fence, &grant) {
            return Ok(());
        }
        Err(Error::NotHeld { fence: Excerpt::new(fence), token })
    }

    /// Ends a grant at once, without a lock or I/O; the record of it rides with the next group. Says
    /// whether it was still held.
    pub fn release_grant(&self, keyspace: &Arc<KeyspaceState>, fence: &[u8], grant: &Grant) -> bool {
        let was_live = grant.is_live(self.options.clock.now());
        if !grant.end() {
            return false;
        }
        self.counters.releases.fetch_add(1, Ordering::Relaxed);
        self.released.push(Released {
            keyspace: keyspace.clone(),
            fence: fence.into(),
            token: grant.token(),
        });
        was_live
    }
}
