//! What is kept of the leases from before an open: nothing that is live.
//!
//! One job: of the grants that the log holds and nobody released or superseded, keep the fence for their
//! holder during the grace, and list those without an end. Replay never makes a live lease, and grace is a
//! delay, never authority: its holder gets a new grant, with a new token. Only grants of the incarnation
//! just before count, and for no longer than their ttl: ten opens within one ttl prolong nothing.

use crate::engine::{Engine, When};
use crate::fence::is_fenced;
use crate::format::index::IndexedGrant;
use crate::lease::{FenceId, Grant, Terms};
use crate::op::GrantValue;
use crate::space::Afterlife;
use crate::sync::Arc;
use crate::types::{KeyspaceId, Location, Token, Ttl};
use std::collections::BTreeMap;
use std::time::Duration;

type Place = (KeyspaceId, Box<[u8]>);

/// The last grant of each fence that may be kept, by replay.
#[derive(Debug, Default)]
pub(crate) struct Recorded {
    /// The incarnation just before: the one that STORE names when it is opened.
    before: u64,
    grants: BTreeMap<Place, (Token, GrantValue, Location)>,
}

impl Recorded {
    pub fn new(before: u64) -> Self {
        Recorded { before, grants: BTreeMap::new() }
    }

    /// A grant stands in the log, at a place.
    pub fn grant(&mut self, keyspace: KeyspaceId, fence: &[u8], token: u64, value: GrantValue, at: Location) {
        let Ok(token) = Token::new(token) else { return };
        let place = (keyspace, fence.into());
        if value.incarnation == self.before || value.ttl == Ttl::INFINITE {
            let known = self.grants.entry(place).or_insert((token, value, at));
            if known.0 <= token {
                *known = (token, value, at);
            }
        } else if self.grants.get(&place).is_some_and(|known| known.0 < token) {
            self.grants.remove(&place);
        }
    }

    /// A release stands in the log.
    pub fn release(&mut self, keyspace: KeyspaceId, fence: &[u8], token: u64) {
        let place = (keyspace, fence.into());
        if self.grants.get(&place).is_some_and(|known| known.0.get() == token) {
            self.grants.remove(&place);
        }
    }

    /// Every grant, for an index file.
    pub fn iter(&self) -> impl Iterator<Item = IndexedGrant> {
        self.grants.iter().map(|((keyspace, fence), &(token, value, at))| IndexedGrant {
            keyspace: *keyspace,
            fence: fence.clone(),
            token: token.get(),
            value,
            at,
        })
    }
}

impl Engine {
    /// Puts what is recorded into the table: over, each fence kept for `grace` and its ttl at most.
    pub fn keep_recorded(&self, recorded: Recorded, grace: Duration) {
        let now = self.options.clock.now();
        let guard = crossbeam_epoch::pin();
        for ((id, fence), (token, value, _)) in recorded.grants {
            let keyspace = self.keyspaces.read().iter().find(|keyspace| keyspace.id == id).cloned();
            let Some(keyspace) = keyspace else { continue };
            let hashes = self.fence_hashes(&keyspace, &fence);
            // What cannot be read is not known to be over: whoever asks for it is told, and the store opens.
            let view = self.fence(&keyspace, &fence, hashes, When::Appended, &guard);
            let mark = view.map_or(0, |view| view.state.mark);
            // Upholds L5: a mark that has passed the token has ended the lease.
            if is_fenced(token, mark, keyspace.floor_appended()) {
                continue;
            }
            // Upholds C4: whoever holds it may still be at work, and its time cannot have begun later.
            if let Some(ttl) = value.ttl.duration() {
                let until = now.saturating_add(u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX));
                self.afterlives.lock().push(Afterlife { keyspace: id, fence: fence.clone(), token, until });
            }
            let kept = match value.ttl.duration() {
                _ if value.incarnation != recorded.before => Duration::ZERO,
                Some(ttl) => grace.min(ttl),
                None => grace,
            };
            if kept.is_zero() && value.ttl != Ttl::INFINITE {
                continue;
            }
            let free_at = match kept.as_nanos() {
                0 => 0,
                nanos => now.saturating_add(u64::try_from(nanos).unwrap_or(u64::MAX)),
            };
            let terms = Terms { owner: value.owner, ttl: value.ttl, delay: 0 };
            let of = FenceId::new(id, &fence);
            let grant = Grant::recorded(of, token, terms, now, free_at, &self.bell);
            self.leases.insert(id, &fence, Arc::new(grant));
        }
    }
}
