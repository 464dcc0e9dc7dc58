//! May this write happen? The rule of `fence.rs` asked of what is appended, under the tail lock.
//!
//! One job: judge a whole write before anything of it is appended: tokens, operation numbers,
//! conditions, in this order. Promises F3: a refused write has changed nothing. An answer says what it
//! rests on, so that it is given only when that is durable (D4).
//!
//! Read next: `append.rs`, what happens when it may.

use crate::engine::{Engine, FenceHashes, FenceView, KeyspaceState, Tail};
use crate::error::{Error, Found, Result};
use crate::fence::{self, OperationOrder, Refusal};
use crate::log::segment::Glance;
use crate::look_up::{SIDE_BY_SIDE, bring_near, fenced};
use crate::op::{Class, Kind};
use crate::options::Scope;
use crate::sync::Arc;
use crate::types::{Excerpt, Lsn, Mark, OperationId, Token};
use crossbeam_epoch::Guard;
use std::iter;

/// One change of a write, its hashes and checksum made outside of any lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change<'a> {
    pub kind: ChangeKind,
    pub keyspace: &'a Arc<KeyspaceState>,
    pub key: &'a [u8],
    pub value: &'a [u8],
    /// Of the key, as a key.
    pub hash: u64,
    /// Of a value that is too large to be covered with its head.
    pub value_checksum: Option<u32>,
    /// Which of the write's fences guards it.
    pub fence: usize,
}

/// What a change does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChangeKind {
    Put,
    Delete,
    /// Raise the mark of the fence; `key` is its name.
    Raise,
}

impl ChangeKind {
    /// The op that does it.
    pub fn op(self) -> Kind {
        match self {
            ChangeKind::Put => Kind::Put,
            ChangeKind::Delete => Kind::Delete,
            ChangeKind::Raise => Kind::Mark,
        }
    }
}

/// A fence that a write touches, with the one token presented for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fence<'a> {
    pub keyspace: &'a Arc<KeyspaceState>,
    pub name: &'a [u8],
    pub hashes: FenceHashes,
    pub token: Token,
    /// The write raises it on purpose, so a token granted for another fence is welcome.
    pub raises: bool,
}

impl Fence<'_> {
    /// Whether its token is good also by the highest one of the keyspace or the store: nobody knows which op that was,
    /// but it is appended.
    fn is_judged_by_others(&self) -> bool {
        self.raises || self.keyspace.options.jump_cap.is_some()
    }

    /// The hash under which its state is found most of the time.
    fn likely_hash(&self) -> u64 {
        match self.keyspace.options.scope {
            Scope::Key => self.hashes.key,
            _ => self.hashes.own,
        }
    }
}

/// What must hold of a key before the write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Expect {
    /// The key has no value.
    Absent,
    /// The key has a value.
    Present,
    /// The key's value was written at this lsn.
    Version(Lsn),
}

/// What a write requires of its tokens, beyond that they are not fenced.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let db = tidewall::Db::open(dir.path().join("data"))?;
/// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
/// use tidewall::{Error, Require};
/// let lease = jobs.lease(b"job-7").acquire()?;
/// let token = lease.token();
/// lease.release()?;
/// jobs.put(token, b"job-7", b"late")?; // nobody came after: the token is still the newest
/// let mut batch = db.batch();
/// batch.put(&jobs, token, b"job-7", b"later")?;
/// batch.require(Require::Live);
/// assert!(matches!(batch.commit(), Err(Error::Expired { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[non_exhaustive]
pub enum Require {
    /// Nothing else. The default: a token is good until a newer one exists.
    #[default]
    Newest,
    /// Each token's lease on the fence it writes to is live at the write's place in the order: a holder whose
    /// time is over is refused ([`Error::Expired`]) even before anybody else has come. Whether a lease is
    /// live is the clock's word; that a newer token fences an older one never is.
    Live,
}

/// A condition of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition<'a> {
    pub keyspace: &'a Arc<KeyspaceState>,
    pub key: &'a [u8],
    pub hash: u64,
    pub expect: Expect,
}

/// All that happens in one frame, or not at all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Write<'a> {
    pub changes: &'a [Change<'a>],
    pub fences: &'a [Fence<'a>],
    pub conditions: &'a [Condition<'a>],
    pub operation: Option<OperationId>,
    pub require: Require,
    /// What was seen of the first fences just before.
    pub seen: &'a [Option<Glance>],
}

/// Why a write is refused, and the lsn that this rests on.
#[derive(Debug)]
pub(crate) struct Refused {
    pub error: Error,
    pub rests_on: Lsn,
}

impl From<Error> for Refused {
    /// A failure of the disk or bad bytes: rests on nothing.
    fn from(error: Error) -> Self {
        Refused { error, rests_on: Lsn::ZERO }
    }
}

impl Engine {
    /// [`Engine::check_early`] of each of these, which come to `seen`.
    pub fn check_all_early(&self, fences: &[Fence<'_>], seen: &mut [Option<Glance>]) -> Result<()> {
        for (fences, seen) in fences.chunks(SIDE_BY_SIDE).zip(seen.chunks_mut(SIDE_BY_SIDE)) {
            if fences.len() > 1 {
                let guard = crossbeam_epoch::pin();
                bring_near(&self.slots, &self.segments, fences.iter().map(Fence::likely_hash), &guard);
            }
            for (fence, seen) in fences.iter().zip(seen) {
                *seen = self.check_early(fence.keyspace, fence.name, fence.hashes, fence.token)?;
            }
        }
        Ok(())
    }

    /// Judges a write against everything appended, at one point in the order: under the tail lock.
    pub fn judge(
        &self,
        tail: &Tail,
        write: &Write<'_>,
        guard: &Guard,
        views: &mut Vec<FenceView>,
    ) -> Result<(), Refused> {
        views.clear();
        let seen = write.seen.iter().copied().chain(iter::repeat(None));
        for (n, (fence, seen)) in write.fences.iter().zip(seen).enumerate() {
            if n.is_multiple_of(SIDE_BY_SIDE) && write.fences.len() > 1 {
                let next = write.fences[n..].iter().take(SIDE_BY_SIDE);
                self.slots.touch(next.map(Fence::likely_hash), guard);
            }
            views.push(self.fence_seen(fence.keyspace, fence.name, fence.hashes, seen, guard)?);
        }
        for (fence, view) in write.fences.iter().zip(views.iter()) {
            self.check_token(tail, fence, view)?;
        }
        let judged = match write.operation {
            Some(operation) => check_operation(write.fences, views, operation),
            None => Ok(()),
        };
        let mut conditions = write.conditions.iter();
        judged
            .and_then(
                |()| if write.require == Require::Live { self.check_live(write.fences) } else { Ok(()) },
            )
            .and_then(|()| conditions.try_for_each(|condition| self.check_condition(condition, guard)))
            .map_err(|refused| {
                // To come so far the tokens had to be good, and so this rests on what they were judged by as well.
                let grounds = write.fences.iter().zip(views.iter());
                let grounds = grounds.map(|(fence, view)| match fence.is_judged_by_others() {
                    true => tail.last(),
                    false => view.state.lsn.max(fence.keyspace.floor_lsn()),
                });
                Refused { rests_on: grounds.fold(refused.rests_on, Lsn::max), ..refused }
            })
    }

    /// Judges the token of a write that found nothing to change, of keys that have no one fence: against what
    /// holds for each fence of the keyspace, which is its floor, and that the token was ever granted.
    pub fn judge_token(
        &self,
        tail: &Tail,
        keyspace: &Arc<KeyspaceState>,
        token: Token,
    ) -> Result<(), Refused> {
        let hashes = FenceHashes { own: 0, key: 0 };
        // As a raise, which asks of no fence in particular.
        let fence = Fence { keyspace, name: b"", hashes, token, raises: true };
        self.check_token(tail, &fence, &FenceView::default())
    }

    /// The clock is read here, inside of the tail lock: what is live now is live at this place in the order.
    fn check_live(&self, fences: &[Fence<'_>]) -> Result<(), Refused> {
        let now = self.options.clock.now();
        for fence in fences {
            let grant = self.leases.current(fence.keyspace.id, fence.name);
            if !grant.is_some_and(|grant| grant.token() == fence.token && grant.is_live(now)) {
                return Err(fence.keyspace.expired(fence.name, fence.token).into());
            }
        }
        Ok(())
    }

    fn check_token(&self, tail: &Tail, fence: &Fence<'_>, view: &FenceView) -> Result<(), Refused> {
        let keyspace = fence.keyspace;
        if keyspace.needs_floor() {
            return Err(Error::NeedsFloor { keyspace: keyspace.name.clone() }.into());
        }
        let (floor, rule) = (keyspace.floor_appended(), keyspace.rule());
        let verdict = if fence.raises {
            fence::check_raise(fence.token, &view.state, floor, &rule, tail.counter)
        } else {
            fence::check(fence.token, &view.state, floor, &rule)
        };
        verdict.map_err(|refusal| self.refused(tail, fence, view, refusal))
    }

    fn refused(&self, tail: &Tail, fence: &Fence<'_>, view: &FenceView, refusal: Refusal) -> Refused {
        let keyspace = fence.keyspace;
        let (own, floor) = (&view.state, keyspace.floor_appended());
        let token = fence.token;
        // The mark is shown, whichever of the two refuses; nothing shown may be taken back by a crash.
        let rests_on = own.lsn.max(keyspace.floor_lsn());
        match refusal {
            Refusal::Fenced => Refused { error: fenced(token, keyspace, fence.name, own, floor), rests_on },
            Refusal::Unknown => {
                let mark = fence::mark(own.mark, floor);
                let (keyspace, fence) = (keyspace.excerpt(), Excerpt::new(fence.name));
                let error = Error::UnknownToken { token, mark, keyspace, fence };
                Refused { error, rests_on }
            }
            Refusal::Jump => {
                let rule = keyspace.rule();
                let (highest, cap) = (Mark::from_number(rule.highest), rule.jump_cap.unwrap_or(u64::MAX));
                // Nobody knows which op was the highest one: it is appended.
                let keyspace = keyspace.excerpt();
                Refused { error: Error::TokenJump { token, highest, keyspace, cap }, rests_on: tail.last() }
            }
        }
    }

    fn check_condition(&self, condition: &Condition<'_>, guard: &Guard) -> Result<(), Refused> {
        let Condition { keyspace, key, hash, expect } = *condition;
        let newest = self.newest(keyspace, Class::Key, key, hash, guard)?;
        let rests_on = newest.as_ref().map_or(Lsn::ZERO, |op| op.lsn);
        let found = match &newest {
            Some(op) if op.head.kind == Kind::Put => Found::Present(op.lsn),
            _ => Found::Absent,
        };
        let holds = match expect {
            Expect::Absent => found == Found::Absent,
            Expect::Present => found != Found::Absent,
            Expect::Version(lsn) => found == Found::Present(lsn),
        };
        if holds {
            return Ok(());
        }
        let error = Error::Conflict { keyspace: keyspace.excerpt(), key: Excerpt::new(key), found };
        Err(Refused { error, rests_on })
    }
}

/// An operation's number stands with every fence its write touches: the same on all is a retry, lower
/// on any is too old, the same on some only is a number used for two different writes.
fn check_operation(fences: &[Fence<'_>], views: &[FenceView], operation: OperationId) -> Result<(), Refused> {
    let mut same = None;
    let mut newer = false;
    for (fence, view) in fences.iter().zip(views) {
        match fence::check_operation(fence.token, operation, &view.state) {
            OperationOrder::Newer => newer = true,
            OperationOrder::Same(lsn) => same = same.max(Some(lsn)),
            OperationOrder::Older(last) => {
                return Err(Refused {
                    error: Error::StaleOperation { operation, last },
                    rests_on: view.state.lsn,
                });
            }
        }
    }
    match same {
        Some(lsn) if !newer => Err(Refused { error: Error::Duplicate { lsn }, rests_on: lsn }),
        Some(lsn) => Err(Refused {
            error: Error::invalid(format!(
                "operation {operation} was committed at lsn {lsn} by a write of only some of these fences: number \
                 each operation anew"
            )),
            rests_on: lsn,
        }),
        None => Ok(()),
    }
}
