//! Who holds what, until when.
//!
//! One job: the word of one grant, [`Grant`]. Promises L4 (an ended grant never lives again) and L3 (the
//! holder's time is never longer than the table's). Whoever wants to hear of an end says so in that same
//! word, so an end nobody waits for costs one exchange, and one that somebody waits for is never missed.
//!
//! Never reads a clock (`now` is an argument, in nanoseconds), raises a mark or decides whether a write is
//! allowed: only a newer token fences. Nothing here survives a restart, and nothing has to.
//!
//! Read next: `lease_table.rs`, the grant of each fence; the interleavings are tried by `tests/loom.rs`.

use std::time::Duration;

use crate::group_commit::Doorbell;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering};
use crate::types::{KeyspaceId, Location, Lsn, OwnerId, Token, Ttl};

/// Somebody wants to hear when the state changes.
const WATCHED: u64 = 1;
const ENDED: u64 = 2;
const ENDING_SHIFT: u32 = 2;
/// Instants in the word are multiples of this, rounded up: the bits below are the flags.
const STEP: u64 = 16;
const FLAGS: u64 = STEP - 1;
const PENDING: u64 = 0;
pub(crate) const FOREVER: u64 = !FLAGS;
/// A pending grant is looked at again after so long: whoever is to enable it may be gone.
const LOOK_PENDING: Duration = Duration::from_secs(1);

/// Why a renewal was refused. None of the reasons ever goes away, except `Pending`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RenewError {
    /// The deadline has passed, nobody took over, and now the grant is ended.
    Expired,
    /// Released, broken, overtaken, or expired and found so by somebody else.
    Ended,
    /// Not durable yet, so not handed out yet.
    Pending,
}

/// A renewal that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Renewed {
    /// The deadline that stands; [`FOREVER`] for none.
    pub until: u64,
    /// It came in the last fifth of the time to live.
    pub is_late: bool,
}

/// Why a lease is over: what [`Lost`](crate::Lost) answers.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let db = tidewall::Db::open(dir.path().join("data"))?;
/// # let jobs = db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
/// let lease = jobs.lease(b"job-7").acquire()?;
/// let lost = lease.lost();
/// jobs.break_lease(b"job-7", "its machine is on fire")?;
/// assert_eq!(lost.wait(), tidewall::Ending::Broken);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Ending {
    /// Its holder gave it back.
    Released,
    /// Its time ran out.
    Expired,
    /// An operator broke it.
    Broken,
    /// The mark of its fence passed its token: a raise, or a cut-over.
    Overtaken,
    /// The store was closed. Reopening it ends every lease.
    Closed,
}

impl Ending {
    fn bits(self) -> u64 {
        let number = match self {
            Ending::Released => 0,
            Ending::Expired => 1,
            Ending::Broken => 2,
            Ending::Overtaken | Ending::Closed => 3,
        };
        number << ENDING_SHIFT
    }

    fn of(word: u64) -> Self {
        match word >> ENDING_SHIFT & 3 {
            0 => Ending::Released,
            1 => Ending::Expired,
            2 => Ending::Broken,
            _ => Ending::Overtaken,
        }
    }
}

/// What a holder asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Terms {
    pub owner: OwnerId,
    pub ttl: Ttl,
    /// How long the fence stays unavailable after the lease ran out or was broken, in nanoseconds.
    pub delay: u64,
}

/// Which fence a grant is of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FenceId {
    pub keyspace: KeyspaceId,
    /// Of the standard library also in the models: loom has none of bytes.
    pub name: std::sync::Arc<[u8]>,
}

impl FenceId {
    pub(crate) fn new(keyspace: KeyspaceId, name: &[u8]) -> Self {
        FenceId { keyspace, name: name.into() }
    }
}

/// A watched grant that is over.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Over {
    pub token: Token,
    pub fence: FenceId,
}

/// Where grants that are watched report their end, and what wakes the thread that looks.
#[derive(Debug)]
pub(crate) struct Bell {
    /// A leaf in the lock order.
    over: Mutex<Vec<Over>>,
    pub doorbell: Doorbell,
    /// When the thread looks again if nobody rings. Relaxed: the lock that what is due lies under orders it.
    planned: AtomicU64,
    /// Grants that were found past their deadline.
    expired: AtomicU64,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Bell {
            over: Mutex::new(Vec::new()),
            doorbell: Doorbell::new(),
            planned: AtomicU64::new(u64::MAX),
            expired: AtomicU64::new(0),
        }
    }

    fn report(&self, over: Over) {
        self.over.lock().push(over);
        self.doorbell.ring();
    }

    /// Wakes the thread to look at everything again: work was left elsewhere, or the clock has jumped.
    pub(crate) fn nudge(&self) {
        // The doorbell orders what lies under a lock: this one.
        drop(self.over.lock());
        self.doorbell.ring();
    }

    /// The thread is about to find out what is due first: whoever adds something meanwhile rings.
    pub(crate) fn plan(&self) {
        self.planned.store(u64::MAX, Ordering::Relaxed);
    }

    /// The thread will look at `at` by itself.
    pub(crate) fn planned(&self, at: u64) {
        self.planned.store(at, Ordering::Relaxed);
    }

    /// Something is due at `at`, put under its lock before: wakes the thread unless it looks by then anyway.
    pub(crate) fn look_by(&self, at: u64) {
        if at < self.planned.load(Ordering::Relaxed) {
            self.nudge();
        }
    }

    /// What was reported since the last call.
    pub(crate) fn take(&self) -> Vec<Over> {
        std::mem::take(&mut *self.over.lock())
    }

    pub(crate) fn expired(&self) -> u64 {
        self.expired.load(Ordering::Relaxed)
    }
}

/// One grant: a token, its owner, and until when.
///
/// Everything that changes is one word, so each change is one compare-and-swap:
///
/// | word              | state   | `enable` | `renew(now)`                   | `end`   | `end_if_expired(now)` |
/// |-------------------|---------|----------|--------------------------------|---------|-----------------------|
/// | 0                 | pending | → live   | `Pending`                      | → ended | no                    |
/// | a deadline        | live    | no       | in time: → a later one         | → ended | no                    |
/// |                   |         | no       | too late: → ended, `Expired`   | → ended | → ended               |
/// | the last instant  | live    | no       | as it is                       | → ended | no                    |
/// | an instant, ended | ended   | no       | `Ended`                        | no      | no                    |
///
/// The instant of an ended grant is when its fence is to be had again: 0, or later where a `lock_delay` or
/// the grace after an open keeps it. Nothing leads out of ended (L4). Expiry is a question about a deadline
/// and a clock, not a state: whoever acts on its answer must first end the grant by an exchange of exactly
/// the deadline it asked about. A holder that renewed in between wins that exchange; one that was paused
/// between its clock and its exchange loses it, for ever.
#[derive(Debug)]
pub(crate) struct Grant {
    fence: FenceId,
    token: Token,
    terms: Terms,
    /// Where its record lies in the order (it may be enabled when that is durable), and in the log, unless it was carried.
    lsn: Lsn,
    pub(crate) at: Option<Location>,
    /// From an earlier life of the store: never live, perhaps kept for its holder.
    is_recorded: bool,
    /// See above. Changed by AcqRel exchanges and loaded with Acquire, which pair with each other: who
    /// sees a grant live, or ended, sees what was done before it became so.
    word: AtomicU64,
    /// Until when the holder may believe in it: counted from before it asked. Upholds L3.
    held_until: AtomicU64,
    since: AtomicU64,
    bell: Arc<Bell>,
}

impl Grant {
    /// A grant that is appended but not durable: nobody holds it yet, and nobody else gets the fence.
    /// `asked` is the clock before the grant was asked for.
    pub(crate) fn pending(
        fence: FenceId,
        token: Token,
        terms: Terms,
        lsn: Lsn,
        asked: u64,
        bell: &Arc<Bell>,
    ) -> Self {
        Grant {
            fence,
            token,
            terms,
            lsn,
            at: None,
            is_recorded: false,
            word: AtomicU64::new(PENDING),
            held_until: AtomicU64::new(after(asked, terms.ttl)),
            since: AtomicU64::new(asked),
            bell: bell.clone(),
        }
    }

    /// A grant of an earlier life of the store: it is over, and its fence is kept until `free_at`.
    pub(crate) fn recorded(
        fence: FenceId,
        token: Token,
        terms: Terms,
        now: u64,
        free_at: u64,
        bell: &Arc<Bell>,
    ) -> Self {
        Grant {
            is_recorded: true,
            word: AtomicU64::new(round_up(free_at) | ENDED | Ending::Expired.bits()),
            held_until: AtomicU64::new(0),
            ..Grant::pending(fence, token, terms, Lsn::ZERO, now, bell)
        }
    }

    pub(crate) fn fence(&self) -> &FenceId {
        &self.fence
    }

    pub(crate) fn token(&self) -> Token {
        self.token
    }

    pub(crate) fn owner(&self) -> OwnerId {
        self.terms.owner
    }

    pub(crate) fn ttl(&self) -> Ttl {
        self.terms.ttl
    }

    pub(crate) fn lsn(&self) -> Lsn {
        self.lsn
    }

    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// A grant without an end from before an open: over, but listed until somebody breaks or supersedes it.
    pub(crate) fn is_listed_for_ever(&self) -> bool {
        self.is_recorded && self.terms.ttl == Ttl::INFINITE
    }

    /// Until when the holder may believe in it.
    pub(crate) fn held_until(&self) -> u64 {
        self.held_until.load(Ordering::Acquire)
    }

    fn is_believed(&self, now: u64) -> bool {
        now < self.held_until() || self.held_until() == u64::MAX
    }

    /// How long ago it was granted.
    pub(crate) fn age(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.since.load(Ordering::Relaxed)))
    }

    /// Makes a pending grant live from `now` on; `false` if it was live already, or was ended meanwhile and
    /// must not be handed out.
    pub(crate) fn enable(&self, now: u64) -> bool {
        let deadline = round_up(after(now, self.terms.ttl));
        // Whoever watches looks one ttl after it began to, which is not later than the deadline.
        self.change(|word| (word & !WATCHED == PENDING).then_some(deadline | word & WATCHED)).is_some()
    }

    /// Whether the grant is the fence's live one at `now`.
    pub(crate) fn is_live(&self, now: u64) -> bool {
        deadline(self.word.load(Ordering::Acquire)).is_some_and(|deadline| !is_past(deadline, now))
    }

    /// Whether its holder may go on at `now`.
    pub(crate) fn is_held(&self, now: u64) -> bool {
        let word = self.word.load(Ordering::Acquire);
        // The usual answer first, in few steps. A pending word is 0, and no instant is below that.
        let is_usual = now < word & !FLAGS && word & ENDED == 0 && now < self.held_until();
        is_usual || (self.is_live(now) && self.is_believed(now))
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.word.load(Ordering::Acquire) & !WATCHED == PENDING
    }

    /// Whether the grant is over for good.
    pub(crate) fn is_ended(&self) -> bool {
        self.word.load(Ordering::Acquire) & ENDED != 0
    }

    /// Why it is over, if it is.
    pub(crate) fn ending(&self) -> Option<Ending> {
        let word = self.word.load(Ordering::Acquire);
        (word & ENDED != 0).then(|| Ending::of(word))
    }

    /// Whether somebody else may have the fence at `now`: an end that was made certain, and no delay left.
    pub(crate) fn is_free(&self, now: u64) -> bool {
        self.free_at().is_some_and(|at| now >= at)
    }

    /// When the fence of an ended grant is to be had.
    pub(crate) fn free_at(&self) -> Option<u64> {
        let word = self.word.load(Ordering::Acquire);
        (word & ENDED != 0).then_some(word & !FLAGS)
    }

    /// When the state is to be looked at again, if nothing is reported before; `None` for never.
    pub(crate) fn look_at(&self, now: u64) -> Option<u64> {
        let word = self.word.load(Ordering::Acquire);
        if word & !WATCHED == PENDING {
            return Some(now.saturating_add(self.terms.ttl.nanos().min(LOOK_PENDING.as_nanos() as u64)));
        }
        deadline(word).filter(|&deadline| deadline != FOREVER)
    }

    /// Moves the deadline to `now` and one ttl, at most to `limit` and never back.
    pub(crate) fn renew(&self, now: u64, limit: u64) -> Result<Renewed, RenewError> {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if word & !WATCHED == PENDING {
                return Err(RenewError::Pending);
            }
            let Some(old) = deadline(word) else { return Err(RenewError::Ended) };
            if is_past(old, now) || !self.is_believed(now) {
                return match self.exchange(word, self.expired_word(old)) {
                    Ok(()) => Err(RenewError::Expired),
                    Err(_) if self.is_ended() => Err(RenewError::Ended),
                    // Renewed by somebody else who was in time, or watched: look again.
                    Err(seen) => {
                        word = seen;
                        continue;
                    }
                };
            }
            let until = after(now, self.terms.ttl).min(limit);
            let next = round_up(until).max(old) | word & WATCHED;
            // Upholds L4: a grant that was ended since the load is no longer `word`.
            if next != word
                && let Err(seen) = self.exchange(word, next)
            {
                word = seen;
                continue;
            }
            // The table first, the holder after it: upholds L3.
            self.held_until.fetch_max(until, Ordering::AcqRel);
            let is_late = old != FOREVER && old.saturating_sub(now) < self.terms.ttl.nanos() / 5;
            return Ok(Renewed { until: next & !FLAGS, is_late });
        }
    }

    /// Ends the grant; `true` for the one call that did. Its fence is free at once.
    pub(crate) fn end(&self, ending: Ending) -> bool {
        self.end_with(|_| Some(ENDED | ending.bits()))
    }

    /// Gives the grant back: `Some` for the one call that ended it. It says whether somebody wants to hear of
    /// that, which is then the caller's to see to.
    pub(crate) fn release(&self) -> Option<bool> {
        let mut word = self.word.load(Ordering::Acquire);
        while word & ENDED == 0 {
            let next = ENDED | Ending::Released.bits();
            match self.word.compare_exchange(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(word & WATCHED != 0),
                Err(seen) => word = seen,
            }
        }
        None
    }

    /// Ends the grant for an operator: its fence is free after the delay it was asked for with.
    pub(crate) fn end_broken(&self, now: u64) -> bool {
        let free_at = if self.terms.delay == 0 { 0 } else { now.saturating_add(self.terms.delay) };
        self.end_with(|_| Some(round_up(free_at) | ENDED | Ending::Broken.bits()))
    }

    /// Ends the grant if its deadline has passed at `now`; `true` for the one call that did.
    pub(crate) fn end_if_expired(&self, now: u64) -> bool {
        self.end_with(|deadline| deadline.filter(|&at| is_past(at, now)).map(|at| self.expired_word(at)))
    }

    /// Ends the grant if its holder may no longer believe in it, a little before its deadline: the fence
    /// stays taken until that. For telling the holder so that no clock can take it back.
    pub(crate) fn end_if_not_held(&self, now: u64) -> bool {
        let late = !self.is_believed(now);
        self.end_with(|deadline| {
            let deadline = deadline?;
            (is_past(deadline, now) || late).then(|| self.expired_word(deadline))
        })
    }

    /// How long nobody else gets the fence unless something happens; `None` if that has no end.
    pub(crate) fn remaining(&self, now: u64) -> Option<Duration> {
        let word = self.word.load(Ordering::Acquire);
        match word & !FLAGS {
            FOREVER => None,
            _ if word & !WATCHED == PENDING => self.terms.ttl.duration(),
            until => Some(Duration::from_nanos(until.saturating_sub(now))),
        }
    }

    /// Asks for a report when the state changes; `false`: it is ended, and nothing will.
    pub(crate) fn watch(&self) -> bool {
        self.change(|word| (word & ENDED == 0).then_some(word | WATCHED)).is_some()
    }

    fn expired_word(&self, deadline: u64) -> u64 {
        round_up(deadline.saturating_add(self.terms.delay)) | ENDED | Ending::Expired.bits()
    }

    /// Ends the grant with the word that `next` makes of its deadline; `None` there leaves it as it is.
    fn end_with(&self, next: impl Fn(Option<u64>) -> Option<u64>) -> bool {
        self.change(|word| if word & ENDED != 0 { None } else { next(deadline(word)) }).is_some()
    }

    /// One exchange of the word, tried until nothing else comes between; answers the word before.
    fn change(&self, next: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut word = self.word.load(Ordering::Acquire);
        while let Some(next) = next(word) {
            match self.exchange(word, next) {
                Ok(()) => return Some(word),
                Err(seen) => word = seen,
            }
        }
        None
    }

    fn exchange(&self, word: u64, next: u64) -> Result<(), u64> {
        self.word.compare_exchange(word, next, Ordering::AcqRel, Ordering::Acquire)?;
        if next & ENDED != 0 {
            if Ending::of(next) == Ending::Expired {
                self.bell.expired.fetch_add(1, Ordering::Relaxed);
            }
            // Read out of the word that was exchanged: who watches before the end is told of it.
            if word & WATCHED != 0 {
                self.bell.report(Over { token: self.token, fence: self.fence.clone() });
            }
        }
        Ok(())
    }
}

/// The deadline of a live word.
fn deadline(word: u64) -> Option<u64> {
    (word & ENDED == 0 && word & !WATCHED != PENDING).then_some(word & !FLAGS)
}

/// One ttl after `now`.
fn after(now: u64, ttl: Ttl) -> u64 {
    debug_assert!(now >= STEP, "the clock says what would read as a state");
    match ttl {
        Ttl::INFINITE => u64::MAX,
        // At the far end of the clock a bounded grant is still not one for ever.
        ttl => now.saturating_add(ttl.nanos()).min(FOREVER - STEP),
    }
}

/// An instant as it stands in the word: never earlier than it is. Upholds L3.
fn round_up(instant: u64) -> u64 {
    instant.saturating_add(FLAGS) & !FLAGS
}

/// The one place where expiry is decided: the deadline itself is past. `FOREVER` never is.
fn is_past(deadline: u64, now: u64) -> bool {
    deadline != FOREVER && now >= deadline
}

// Loom and shuttle have their own models of a grant, and their primitives do not run outside of them.
#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "lease/tests.rs"]
mod tests;
