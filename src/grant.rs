//! Granting a lease: one log record, one sync, and the fence is up.
//!
//! One job: the engine's half of a lease. A grant is appended under the tail lock, where the mark of
//! the fence rises with it, and is handed out only when it is durable (F4, L1, L2). Expiry is asked for
//! here and nowhere else, when somebody wants the fence; it permits a takeover and fences nobody.
//!
//! Read next: `hand_over.rs`, for those who wait.

use crate::append::{frame_bytes, room};
use crate::engine::{Engine, KeyspaceState, Released, Tail};
use crate::error::{Error, Result};
use crate::events;
use crate::fence::FenceState;
use crate::lease::{Ending, FenceId, Grant, RenewError};
use crate::log::pool::Need;
use crate::op::{GrantValue, Kind, Links, Op};
use crate::slots::{MAX_SLOTS, slot_name};
use crate::sync::{Arc, Ordering};
use crate::types::{Excerpt, Location, Lsn, OperationId, OwnerId, Token};
use crate::waiter::{Ask, Granted};
use std::ops::Deref;

/// One try at a fence.
pub(crate) enum Attempt {
    /// Appended; to be handed out when it is durable.
    Appended(Granted),
    /// The fence is taken; or, where slots are asked for, so many of them are.
    Busy(Busy),
    /// Others came first.
    Queued(OwnerId),
}

/// What keeps somebody from a fence.
pub(crate) struct Busy {
    pub grants: Grants,
    /// An answer that rests on these grants may be given when this is durable.
    pub rests_on: Lsn,
    pub group: u32,
}

/// Whether the one who asks has waited for its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    First,
    Newcomer,
}

/// A place for a grant, with the one that was there before; or the grants in the way.
enum Place {
    Free(Arc<[u8]>, Option<Arc<Grant>>),
    Taken(Grants),
}

/// Grants in the way: one of a fence, those of slots.
pub(crate) enum Grants {
    One(Arc<Grant>),
    Slots(Vec<Arc<Grant>>),
}

impl Deref for Grants {
    type Target = [Arc<Grant>];

    fn deref(&self) -> &[Arc<Grant>] {
        match self {
            Grants::One(grant) => std::slice::from_ref(grant),
            Grants::Slots(grants) => grants,
        }
    }
}

impl Busy {
    /// When one of the grants is to be looked at, if nothing is reported before.
    pub fn look_at(&self, now: u64) -> u64 {
        self.grants.iter().filter_map(|grant| grant.look_at(now)).min().unwrap_or(u64::MAX)
    }
}

impl Engine {
    /// The room that a grant of `ask` needs.
    pub fn room_of(ask: &Ask<'_>) -> u32 {
        let longest = MAX_SLOTS.ilog10() as usize + 1 + 2;
        room(frame_bytes(1, ask.name.len() + longest + GrantValue::BYTES), 1)
    }

    /// Tries once to get what is asked for.
    pub fn attempt(&self, keyspace: &Arc<KeyspaceState>, ask: &Ask<'_>) -> Result<Attempt> {
        self.with_room(Self::room_of(ask), Need::Privileged, |tail| {
            self.attempt_at(tail, keyspace, ask, Turn::Newcomer, self.options.clock.now())
        })?
    }

    /// What keeps `ask` from its fence right now, if anything does: for one who would wait for that.
    pub fn find_busy(&self, keyspace: &KeyspaceState, ask: &Ask<'_>, now: u64) -> Option<Busy> {
        match self.find_place(keyspace, ask, now) {
            Place::Free(..) => None,
            Place::Taken(grants) => Some(Busy { grants, rests_on: Lsn::ZERO, group: 0 }),
        }
    }

    /// The same under the tail lock, with room reserved; `now` was read under it.
    pub fn attempt_at(
        &self,
        tail: &mut Tail,
        keyspace: &Arc<KeyspaceState>,
        ask: &Ask<'_>,
        turn: Turn,
        now: u64,
    ) -> Result<Attempt> {
        let place = self.find_place(keyspace, ask, now);
        if turn == Turn::Newcomer
            && let Some(owner) = self.waiters.ahead(keyspace.id, ask)
            && !self.is_kept_for(keyspace, ask, now)
            // Who holds the fence is told so: waiting behind others would be waiting for itself.
            && !matches!(&place, Place::Taken(grants) if grants.iter().any(|grant| ask.is_held_by(grant)))
        {
            return Ok(Attempt::Queued(owner));
        }
        match place {
            Place::Free(fence, before) => {
                let last = before.and_then(|before| before.at);
                Ok(Attempt::Appended(self.append_grant(tail, keyspace, fence, last, ask, now)?))
            }
            Place::Taken(grants) => {
                let pending = grants.iter().filter(|grant| grant.is_pending()).map(|grant| grant.lsn());
                let rests_on = pending.max().unwrap_or(Lsn::ZERO);
                Ok(Attempt::Busy(Busy { grants, rests_on, group: tail.group_of(rests_on) }))
            }
        }
    }

    fn find_place(&self, keyspace: &KeyspaceState, ask: &Ask<'_>, now: u64) -> Place {
        let Some(slots) = ask.slots else {
            return match self.leases.current(keyspace.id, ask.name) {
                Some(grant) if !self.is_free(&grant, ask, now) => Place::Taken(Grants::One(grant)),
                before => Place::Free(ask.name.clone(), before),
            };
        };
        let (mut taken, mut indexes) = (Vec::new(), Vec::new());
        let mut resumed = None;
        for (index, grant) in self.leases.slots(keyspace.id, ask.name) {
            if !self.is_free(&grant, ask, now) {
                indexes.push(index);
                taken.push(grant);
            } else if is_resumed(&grant, ask) {
                resumed = Some(index);
            }
        }
        // Upholds L1 for slots: all of the key count, also those above `n` of an earlier, larger one.
        if taken.len() >= slots.n as usize {
            return Place::Taken(Grants::Slots(taken));
        }
        indexes.sort_unstable();
        let lowest = (0..slots.n).find(|index| indexes.binary_search(index).is_err());
        match resumed.filter(|index| *index < slots.n).or(lowest) {
            Some(index) => Place::Free(slot_name(ask.name, index, slots.delimiter).into(), None),
            None => Place::Taken(Grants::Slots(taken)),
        }
    }

    /// Whether the fence is kept for the one who asks, so that it overtakes those who wait.
    fn is_kept_for(&self, keyspace: &KeyspaceState, ask: &Ask<'_>, now: u64) -> bool {
        let is_mine = |grant: &Arc<Grant>| !grant.is_free(now) && is_resumed(grant, ask);
        match ask.slots {
            _ if ask.resume.is_none() => false,
            None => self.leases.current(keyspace.id, ask.name).as_ref().is_some_and(is_mine),
            Some(_) => self.leases.slots(keyspace.id, ask.name).iter().any(|(_, grant)| is_mine(grant)),
        }
    }

    /// Whether a grant is in nobody's way any more. Upholds L1 and L4: one whose time is over is ended
    /// before another one exists; one that was renewed since, or is not durable yet, is not ended by this.
    fn is_free(&self, grant: &Grant, ask: &Ask<'_>, now: u64) -> bool {
        grant.end_if_expired(now);
        if grant.is_pending() && self.progress.durable() >= grant.lsn() {
            // Whoever was to hand it out has not come to it yet.
            grant.enable(now);
        }
        grant.is_free(now) || is_resumed(grant, ask)
    }

    /// Upholds L2: the token is one above every token so far, and durable before anyone holds it.
    fn append_grant(
        &self,
        tail: &mut Tail,
        keyspace: &Arc<KeyspaceState>,
        fence: Arc<[u8]>,
        last: Option<Location>,
        ask: &Ask<'_>,
        asked: u64,
    ) -> Result<Granted> {
        let value = GrantValue { owner: ask.terms.owner, ttl: ask.terms.ttl, incarnation: self.incarnation };
        let Raised { token, lsn, at, predecessor } =
            self.append_raise(tail, keyspace, &fence, last, Kind::Grant, &value.encode())?;
        let fence = FenceId { keyspace: keyspace.id, name: fence };
        let mut grant = Grant::pending(fence, token, ask.terms, lsn, asked, &self.bell);
        grant.at = Some(at);
        let grant = Arc::new(grant);
        let before = self.leases.insert(keyspace.id, &grant.fence().name, grant.clone());
        let is_new = before.is_none();
        if before.is_some_and(|before| before.ending() == Some(Ending::Expired) && !before.is_recorded()) {
            self.counters.takeovers.fetch_add(1, Ordering::Relaxed);
        }
        let predecessor = predecessor.and_then(|(token, op)| Token::new(token).ok().map(|token| (token, op)));
        Ok(Granted { grant, is_new, predecessor, lsn, group: tail.group, asked })
    }

    /// Appends an op that sets the mark of a fence to the next token, which is granted by it. Upholds F4. `last`: where
    /// the grant before it was appended.
    fn append_raise(
        &self,
        tail: &mut Tail,
        keyspace: &KeyspaceState,
        fence: &[u8],
        last: Option<Location>,
        kind: Kind,
        value: &[u8],
    ) -> Result<Raised> {
        let token = Token::new(tail.counter + 1).map_err(|_| Error::TokensExhausted)?;
        let guard = crossbeam_epoch::pin();
        let (hash, view) = self.fence_to_grant(keyspace, fence, last, &guard)?;
        let FenceState { predecessor, .. } = crate::fence::admit(&view.state, token, None, tail.next);
        let links = Links { fence: Some(view.at), predecessor, ..Links::default() };
        let op = Op { kind, keyspace: keyspace.id, token: token.get(), key: fence, value, links };
        let (lsn, at) = self.append_fence_op(tail, keyspace, &op, hash, &view);
        tail.counter = token.get();
        Ok(Raised { token, lsn, at, predecessor })
    }

    /// Waits until a grant is durable, and enables it; `false`: it was overtaken on the way by a raise, and
    /// its token is burnt.
    pub fn hand_out(&self, granted: &Granted, waited: bool) -> Result<bool> {
        if let Err(error) = self.wait_durable(granted.lsn, granted.group) {
            self.drop_grant(&granted.grant);
            return Err(error);
        }
        Ok(self.enable(granted, waited))
    }

    /// Enables a grant that is durable, of one who `waited` for its turn or did not; `false`: it was overtaken.
    pub fn enable(&self, granted: &Granted, waited: bool) -> bool {
        let now = self.options.clock.now();
        let handed_out = granted.grant.enable(now) || !granted.grant.is_ended();
        // A grant in the place of another makes the table no longer: a few of those are enough.
        if granted.is_new || granted.grant.token().get().is_multiple_of(8) {
            self.leases.sweep(now);
        }
        if handed_out {
            self.counters.grants.fetch_add(1, Ordering::Relaxed);
            if waited {
                let took = now.saturating_sub(granted.asked);
                self.counters.hand_overs.fetch_add(1, Ordering::Relaxed);
                self.counters.hand_over_nanos.fetch_add(took, Ordering::Relaxed);
                self.counters.hand_over_nanos_max.fetch_max(took, Ordering::Relaxed);
            }
        } else {
            self.drop_grant(&granted.grant);
        }
        handed_out
    }

    fn drop_grant(&self, grant: &Grant) {
        let FenceId { keyspace, name } = grant.fence();
        self.leases.remove_if(*keyspace, name, grant.token());
    }

    /// A grant that nobody takes: it ends at once.
    pub fn give_up(&self, keyspace: &Arc<KeyspaceState>, granted: &Granted) {
        self.let_go(keyspace, &granted.grant);
    }

    /// Who is in the way, and for how long. Upholds D4: not before what is in the way is durable.
    pub fn held(&self, keyspace: &KeyspaceState, ask: &Ask<'_>, busy: &Busy) -> Error {
        let now = self.options.clock.now();
        let soonest = busy
            .grants
            .iter()
            .map(|grant| (grant.remaining(now), grant.owner()))
            .min_by_key(|(remaining, _)| remaining.unwrap_or(std::time::Duration::MAX));
        let Some((remaining, owner)) = soonest else { return Error::Closed };
        self.held_by(keyspace, ask, owner, remaining)
    }

    pub fn held_by(
        &self,
        keyspace: &KeyspaceState,
        ask: &Ask<'_>,
        owner: OwnerId,
        remaining: Option<std::time::Duration>,
    ) -> Error {
        self.counters.lease_refusals.fetch_add(1, Ordering::Relaxed);
        Error::Held {
            keyspace: keyspace.excerpt(),
            fence: Excerpt::new(ask.name),
            owner,
            by_asker: ask.slots.is_none() && owner == ask.terms.owner,
            remaining,
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
        self.check_readable()?;
        self.leases
            .current(keyspace.id, fence)
            .filter(|grant| grant.token() == token && grant.owner() == owner && !grant.is_ended())
            .ok_or_else(|| keyspace.not_held(fence, token))
    }

    /// Renews a grant for its remote holder; answers the deadline.
    pub fn renew(&self, keyspace: &KeyspaceState, fence: &[u8], token: Token, owner: OwnerId) -> Result<u64> {
        let grant = self.owned(keyspace, fence, token, owner)?;
        self.renew_grant(keyspace, &grant, self.options.clock.now(), u64::MAX)
    }

    /// Renews a grant, by one compare-and-swap; no lock and no I/O.
    pub fn renew_grant(&self, keyspace: &KeyspaceState, grant: &Grant, now: u64, limit: u64) -> Result<u64> {
        if self.cause.get().is_some() || self.closed.load(Ordering::Acquire) {
            self.check_open()?;
        }
        let fence = &grant.fence().name;
        match self.renew_open(grant, now, limit) {
            Ok(until) => Ok(until),
            Err(RenewError::Expired) => Err(keyspace.expired(fence, grant.token())),
            Err(RenewError::Ended) if grant.ending() == Some(Ending::Expired) => {
                Err(keyspace.expired(fence, grant.token()))
            }
            Err(RenewError::Ended | RenewError::Pending) => Err(keyspace.not_held(fence, grant.token())),
        }
    }

    /// The same of a store that is open.
    pub fn renew_open(&self, grant: &Grant, now: u64, limit: u64) -> Result<u64, RenewError> {
        let renewed = grant.renew(now, limit)?;
        self.counters.renewals.fetch_add(1, Ordering::Relaxed);
        if renewed.is_late {
            self.counters.late_renewals.fetch_add(1, Ordering::Relaxed);
        }
        Ok(renewed.until)
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
        if self.release_grant(keyspace, &grant) {
            return Ok(());
        }
        Err(keyspace.not_held(fence, token))
    }

    /// Ends a grant at once, without I/O and, where nobody waits, without a lock. Says whether it was still
    /// held.
    pub fn release_grant(&self, keyspace: &Arc<KeyspaceState>, grant: &Grant) -> bool {
        let now = self.options.clock.now();
        // What ran out was not given back: a delay that was asked for counts.
        if grant.end_if_expired(now) || !self.let_go(keyspace, grant) {
            return false;
        }
        self.counters.releases.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn let_go(&self, keyspace: &Arc<KeyspaceState>, grant: &Grant) -> bool {
        let Some(is_watched) = grant.release() else { return false };
        // The grant of the next holder says that this one is over; else the record of it rides with the next
        // group.
        if !is_watched || !self.pass_on(keyspace, grant) {
            let (fence, token) = (grant.fence().clone(), grant.token());
            self.released.push(Released { keyspace: keyspace.clone(), fence, token });
        }
        true
    }

    /// Breaks the grant of a fence: burns a fresh token on it, so that what is broken is fenced at once.
    /// Answers the grant, and the token that is its mark now.
    pub fn break_grant(
        &self,
        keyspace: &Arc<KeyspaceState>,
        fence: &[u8],
        reason: &[u8],
    ) -> Result<Option<(Arc<Grant>, Token)>> {
        let room = room(frame_bytes(1, fence.len() + reason.len()), 1);
        type Step = Result<(Option<(Arc<Grant>, Token)>, Lsn, u32)>;
        let (broken, lsn, group) = self.with_room(room, Need::Privileged, |tail| -> Step {
            let Some(grant) = self.leases.current(keyspace.id, fence) else {
                return Ok((None, Lsn::ZERO, tail.group));
            };
            let now = self.options.clock.now();
            grant.end_if_expired(now);
            if grant.is_free(now) && !grant.is_listed_for_ever() {
                return Ok((None, Lsn::ZERO, tail.group));
            }
            let Raised { token, lsn, .. } =
                self.append_raise(tail, keyspace, fence, grant.at, Kind::Mark, reason)?;
            if !grant.end_broken(now) {
                // Nothing was held any more: what kept the fence goes.
                self.drop_grant(&grant);
            }
            Ok((Some((grant, token)), lsn, tail.group))
        })??;
        self.wait_durable(lsn, group)?;
        if let Some((grant, _)) = &broken {
            self.counters.breaks.fetch_add(1, Ordering::Relaxed);
            events::lease_broken(&self.dir, &keyspace.name, fence, grant.token().get(), reason);
            self.visit_queues(grant.fence());
        }
        Ok(broken)
    }
}

/// The mark of a fence, raised to a new token.
struct Raised {
    token: Token,
    lsn: Lsn,
    at: Location,
    predecessor: Option<(u64, OperationId)>,
}

/// Whether the grant is from before the last open, and the one who asks is its holder.
fn is_resumed(grant: &Grant, ask: &Ask<'_>) -> bool {
    grant.is_recorded() && ask.resume == Some(grant.token()) && ask.terms.owner == grant.owner()
}
