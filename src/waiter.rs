//! One who waits for a fence: what it asks for, and how it learns what became of that.
//!
//! One job: a waiter is told once, its lease or why there is none, and sleeps until then, as a thread or as a task. Nothing
//! here knows of queues.
//!
//! Read next: `waiters.rs`, the queues.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group_commit::{Progress, Sleeper, WakerSlot, wake};
use crate::lease::{FenceId, Grant, Terms};
use crate::slots::slot_of;
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, MutexGuard};
use crate::types::{KeyspaceId, Lsn, OperationId, Token};

/// What is asked for: a fence, or any of the first slots of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask<'a> {
    /// The fence; with slots, the key.
    pub name: &'a Arc<[u8]>,
    pub slots: Option<Slots>,
    pub terms: Terms,
    /// The token of a lease from before the last open, which its holder wants to go on with.
    pub resume: Option<Token>,
}

impl Ask<'_> {
    /// Whether the one who asks holds the very fence already, by this grant.
    pub(crate) fn is_held_by(&self, grant: &Grant) -> bool {
        self.slots.is_none() && !grant.is_ended() && grant.owner() == self.terms.owner
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slots {
    pub n: u32,
    pub delimiter: u8,
}

/// The queue of one fence, or of all slots of one key.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct QueueId {
    pub keyspace: KeyspaceId,
    pub name: Arc<[u8]>,
    pub has_slots: bool,
}

impl QueueId {
    /// The queues that lead to a fence: its own, and the one for the slots of its key.
    pub(crate) fn of(fence: &FenceId) -> impl Iterator<Item = QueueId> {
        let keyspace = fence.keyspace;
        let own = QueueId { keyspace, name: fence.name.clone(), has_slots: false };
        let of_key = slot_of(&fence.name);
        [own].into_iter().chain(of_key.map(|(key, _)| QueueId {
            keyspace,
            name: key.into(),
            has_slots: true,
        }))
    }
}

/// A grant that is appended; to be handed out when `lsn` is durable.
#[derive(Debug)]
pub(crate) struct Granted {
    pub grant: Arc<Grant>,
    /// The table had no grant of the fence before.
    pub is_new: bool,
    pub predecessor: Option<(Token, OperationId)>,
    pub lsn: Lsn,
    pub group: u32,
    /// When the fence was given, for the time that a hand-over takes.
    pub asked: u64,
}

/// One who waits.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub queue: QueueId,
    /// The order of coming, over all queues.
    pub id: u64,
    pub deadline: u64,
    /// How long it was ready to wait, for its error.
    pub wait: Duration,
    pub slots: Option<Slots>,
    pub terms: Terms,
    pub resume: Option<Token>,
    pub state: Mutex<Turn>,
    /// Where a blocking caller sleeps until it is told.
    pub sleeper: Sleeper,
    /// It was taken out of its queue, so there is nothing left to remove. Stored (Release) under the lock of
    /// the queues, after that; loaded (Acquire) by those who would lock them for it.
    pub is_out: AtomicBool,
    /// Which look at it counts: see `Looks` in `waiters.rs`. Relaxed: read and changed under the lock of the queues.
    pub look: AtomicU64,
}

/// What has become of it so far.
#[derive(Debug)]
pub(crate) enum Turn {
    Queued(Option<Waker>),
    Told(Result<Granted>),
    /// It has taken its answer, or left.
    Gone,
}

/// The turn of a waiter, held while it is decided: it is still in the queue.
#[derive(Debug)]
pub(crate) struct Queued<'w> {
    waiter: &'w Arc<Waiter>,
    turn: MutexGuard<'w, Turn>,
}

impl Queued<'_> {
    /// Tells the waiter; who is to be woken, after all locks are given back.
    pub(crate) fn tell(mut self, answer: Result<Granted>) -> Asleep {
        match std::mem::replace(&mut *self.turn, Turn::Told(answer)) {
            Turn::Queued(Some(waker)) => Asleep::Task(waker),
            Turn::Queued(None) if self.waiter.sleeper.call() => Asleep::Thread(self.waiter.clone()),
            _ => Asleep::Nobody,
        }
    }
}

/// Who sleeps, and knows nothing of its answer yet.
#[derive(Debug)]
#[must_use = "somebody is to be woken, after all locks are given back"]
pub(crate) enum Asleep {
    Nobody,
    Task(Waker),
    Thread(Arc<Waiter>),
}

impl Asleep {
    pub(crate) fn wake(self) {
        match self {
            Asleep::Nobody => {}
            Asleep::Task(waker) => wake(waker),
            Asleep::Thread(waiter) => waiter.sleeper.wake(),
        }
    }

    /// Wakes it when `lsn` of `group` is durable, or will not be, together with all others who wait for that.
    pub(crate) fn wake_when_durable(self, progress: &Progress, lsn: Lsn, group: u32) {
        match self {
            Asleep::Nobody => {}
            Asleep::Task(waker) => {
                let mut cx = Context::from_waker(&waker);
                if progress.poll(lsn, &mut WakerSlot::default(), &mut cx).is_ready() {
                    wake(waker);
                }
            }
            Asleep::Thread(waiter) => progress.take_over(&waiter.sleeper, lsn, group),
        }
    }
}

impl Waiter {
    pub(crate) fn ask(&self) -> Ask<'_> {
        Ask { name: &self.queue.name, slots: self.slots, terms: self.terms, resume: self.resume }
    }

    /// Whether there may be a place for it where there is none for `other`, of the same queue: not if it asks
    /// for the same.
    pub(crate) fn may_get_what_is_kept_from(&self, other: &Waiter) -> bool {
        self.slots != other.slots || (self.slots.is_some() && self.resume.is_some())
    }

    /// The waiter, if nobody has told it anything and it has not left.
    pub(crate) fn queued(self: &Arc<Self>) -> Option<Queued<'_>> {
        let turn = self.state.lock();
        matches!(*turn, Turn::Queued(_)).then_some(Queued { waiter: self, turn })
    }

    /// Whether it would not sleep: it has been told.
    pub(crate) fn is_told(&self) -> bool {
        self.sleeper.is_called()
    }

    /// Sleeps until it is told; if that is a grant, perhaps until it is durable too.
    pub(crate) fn wait(&self) -> Result<Granted> {
        self.sleeper.sleep();
        match std::mem::replace(&mut *self.state.lock(), Turn::Gone) {
            Turn::Told(answer) => answer,
            Turn::Queued(_) | Turn::Gone => Err(Error::Closed),
        }
    }

    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Granted>> {
        // Foreign code outside of the lock.
        let waker = cx.waker().clone();
        let mut state = self.state.lock();
        if let Turn::Queued(old) = &mut *state {
            let old = old.replace(waker);
            drop(state);
            drop(old);
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, Turn::Gone) {
            Turn::Told(answer) => Poll::Ready(answer),
            Turn::Queued(_) | Turn::Gone => Poll::Ready(Err(Error::Closed)),
        }
    }
}
