//! Who waits for a fence, in the order they came.
//!
//! One job: the queue of each fence, exact under cancellation: what leaves leaves nothing behind. Pure: `now` is an
//! argument, and nothing here grants.
//!
//! Read next: `hand_over.rs`, which serves the first in the queue.

use rapidhash::quality::RandomState;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group_commit::Sleeper;
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering};
use crate::types::{KeyspaceId, OwnerId};
use crate::waiter::{Ask, Granted, QueueId, Turn, Waiter};

/// All queues. Its lock is a leaf, and so is the one of each waiter; of these the latter may be held while
/// a grant is appended for it.
#[derive(Debug)]
pub(crate) struct Waiters {
    inner: Mutex<Inner>,
    /// Waiters in all queues. Changed under the lock; loaded (Acquire) by acquirers, who need not lock
    /// while nobody waits.
    len: AtomicUsize,
}

#[derive(Debug, Default)]
struct Inner {
    queues: HashMap<QueueId, Queue, RandomState>,
    /// Who is to be looked at when, if nothing is reported before: everybody at its deadline, and the first of a
    /// queue when its fence may be free, if that is earlier.
    looks: Looks,
    /// Queues to look at as soon as may be.
    visits_now: Vec<QueueId>,
    last_id: u64,
    is_shut: bool,
}

/// A queue in which somebody waits.
#[derive(Debug)]
struct Queue {
    first: Arc<Waiter>,
    /// By the order of coming.
    behind: BTreeMap<u64, Arc<Waiter>>,
    /// When the fence may be free, if nobody says so before: the last instant for never.
    visit_at: u64,
}

impl Queue {
    /// When the first is to be looked at.
    fn look_at(&self) -> u64 {
        self.first.deadline.min(self.visit_at)
    }

    /// The first is looked at as the queue says, and no longer when it was to be.
    fn move_look(&self, from: u64, looks: &mut Looks) {
        if self.look_at() != from {
            looks.add(self.look_at(), &self.first);
        }
    }
}

/// Who is to be looked at when: each waiter once, the look that was added last. One that left, or is to be looked at
/// another time, is passed over when its turn comes, and no more of those are kept than there are waiters, and a few:
/// nearly all leave long before.
#[derive(Debug, Default)]
struct Looks {
    heap: BinaryHeap<Look>,
    added: u64,
}

/// When, the earliest first, then in the order of coming.
#[derive(Debug)]
struct Look {
    at: Reverse<(u64, u64)>,
    number: u64,
    waiter: Arc<Waiter>,
}

impl Look {
    fn counts(&self) -> bool {
        !self.waiter.is_out.load(Ordering::Relaxed) && self.waiter.look.load(Ordering::Relaxed) == self.number
    }
}

impl PartialEq for Look {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Look {}

impl PartialOrd for Look {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Look {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Looks {
    /// How many that are passed over are kept, above the number of waiters.
    const FEW: usize = 32;

    /// It is looked at then, and at no other time.
    fn add(&mut self, at: u64, waiter: &Arc<Waiter>) {
        self.added += 1;
        waiter.look.store(self.added, Ordering::Relaxed);
        self.heap.push(Look { at: Reverse((at, waiter.id)), number: self.added, waiter: waiter.clone() });
    }

    /// So many wait.
    fn tidy(&mut self, waiting: usize) {
        if waiting == 0 {
            self.heap.clear();
        } else if self.heap.len() > 2 * waiting + Looks::FEW {
            self.heap.retain(Look::counts);
        }
    }

    /// The first look that is to come.
    fn first(&mut self) -> Option<u64> {
        while self.heap.peek().is_some_and(|look| !look.counts()) {
            self.heap.pop();
        }
        self.heap.peek().map(|look| look.at.0.0)
    }

    fn pop_due(&mut self, now: u64) -> Option<Arc<Waiter>> {
        if self.first()? > now {
            return None;
        }
        self.heap.pop().map(|look| look.waiter)
    }
}

impl Waiters {
    pub(crate) fn new() -> Self {
        Waiters { inner: Mutex::new(Inner::default()), len: AtomicUsize::new(0) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Joins the queue at its end, until `deadline`, after having said that it would wait for so long.
    /// `true`: it is the first, and nobody looks at the queue before `visit_at` unless the caller sees to it.
    pub(crate) fn join(
        &self,
        keyspace: KeyspaceId,
        ask: &Ask<'_>,
        deadline: u64,
        wait: Duration,
        visit_at: u64,
    ) -> Result<(Arc<Waiter>, bool)> {
        let queue = QueueId { keyspace, name: ask.name.clone(), has_slots: ask.slots.is_some() };
        let mut inner = self.inner.lock();
        if inner.is_shut {
            return Err(Error::Closed);
        }
        inner.last_id += 1;
        let waiter = Arc::new(Waiter {
            queue: queue.clone(),
            id: inner.last_id,
            deadline,
            wait,
            slots: ask.slots,
            terms: ask.terms,
            resume: ask.resume,
            state: Mutex::new(Turn::Queued(None)),
            sleeper: Sleeper::new(),
            is_out: AtomicBool::new(false),
            look: AtomicU64::new(0),
        });
        let (is_first, look_at) = match inner.queues.entry(queue) {
            Entry::Vacant(place) => {
                let queue = Queue { first: waiter.clone(), behind: BTreeMap::new(), visit_at };
                (true, place.insert(queue).look_at())
            }
            Entry::Occupied(mut queue) => {
                queue.get_mut().behind.insert(waiter.id, waiter.clone());
                (false, deadline)
            }
        };
        inner.looks.add(look_at, &waiter);
        let waiting = self.len.fetch_add(1, Ordering::Release) + 1;
        inner.looks.tidy(waiting);
        Ok((waiter, is_first))
    }

    /// Takes a waiter out of its queue. Nothing of it is left, whoever calls first. The queue is to be visited if
    /// what kept the first in it need not keep the next.
    pub(crate) fn remove(&self, waiter: &Waiter) {
        if waiter.is_out.load(Ordering::Acquire) {
            return;
        }
        let mut inner = self.inner.lock();
        let next = self.take_out(&mut inner, waiter);
        if next.is_some_and(|next| next.id > waiter.id && next.may_get_what_is_kept_from(waiter)) {
            inner.visits_now.push(waiter.queue.clone());
        }
    }

    /// The same for one who goes on with the first in the queue then, which is the answer. Of one who left
    /// before, too.
    pub(crate) fn remove_and_next(&self, waiter: &Waiter) -> Option<Arc<Waiter>> {
        self.take_out(&mut self.inner.lock(), waiter)
    }

    fn take_out(&self, inner: &mut Inner, waiter: &Waiter) -> Option<Arc<Waiter>> {
        let Inner { queues, looks, .. } = inner;
        let Entry::Occupied(mut place) = queues.entry(waiter.queue.clone()) else { return None };
        let queue = place.get_mut();
        let next = if queue.first.id != waiter.id {
            let next = Some(queue.first.clone());
            if queue.behind.remove(&waiter.id).is_none() {
                return next;
            }
            next
        } else if let Some((_, next)) = queue.behind.pop_first() {
            queue.first = next.clone();
            queue.move_look(next.deadline, looks);
            Some(next)
        } else {
            place.remove();
            None
        };
        let waiting = self.len.fetch_sub(1, Ordering::Release) - 1;
        waiter.is_out.store(true, Ordering::Release);
        looks.tidy(waiting);
        next
    }

    /// A waiter leaves: `Some` if a grant was appended for it already, which is then the caller's to end. If it
    /// waited for slots, there may be a queue to visit.
    pub(crate) fn leave(&self, waiter: &Waiter) -> Option<Granted> {
        let turn = std::mem::replace(&mut *waiter.state.lock(), Turn::Gone);
        self.remove(waiter);
        match turn {
            Turn::Told(Ok(granted)) => Some(granted),
            Turn::Told(Err(_)) | Turn::Queued(_) | Turn::Gone => None,
        }
    }

    /// The first in a queue.
    pub(crate) fn first(&self, queue: &QueueId) -> Option<Arc<Waiter>> {
        self.inner.lock().queues.get(queue).map(|queue| queue.first.clone())
    }

    /// The owner of the first in the queue for `ask`, who is not to be overtaken; and, for somebody who
    /// is that first one, nobody.
    pub(crate) fn ahead(&self, keyspace: KeyspaceId, ask: &Ask<'_>) -> Option<OwnerId> {
        if self.len() == 0 {
            return None;
        }
        let queue = QueueId { keyspace, name: ask.name.clone(), has_slots: ask.slots.is_some() };
        self.first(&queue).map(|waiter| waiter.terms.owner)
    }

    /// How many wait in a queue.
    pub(crate) fn waiting(&self, queue: &QueueId) -> usize {
        self.inner.lock().queues.get(queue).map_or(0, |queue| 1 + queue.behind.len())
    }

    /// Looks at the queue again at `at`, or earlier; `false`: `first` is not the first in it any more, and what
    /// keeps it need not keep the one who is.
    pub(crate) fn visit_at(&self, first: &Waiter, at: u64) -> bool {
        let mut inner = self.inner.lock();
        let Inner { queues, looks, .. } = &mut *inner;
        let Some(queue) = queues.get_mut(&first.queue).filter(|queue| queue.first.id == first.id) else {
            return false;
        };
        if at < queue.visit_at {
            let from = queue.look_at();
            queue.visit_at = at;
            queue.move_look(from, looks);
            looks.tidy(self.len());
        }
        true
    }

    /// Looks at the queue as soon as may be, if anybody waits in it.
    pub(crate) fn visit_now(&self, id: QueueId) {
        let mut inner = self.inner.lock();
        if inner.queues.contains_key(&id) {
            inner.visits_now.push(id);
        }
    }

    /// The same of all queues of a keyspace.
    pub(crate) fn visit_all_now(&self, keyspace: KeyspaceId) {
        let Inner { queues, visits_now, .. } = &mut *self.inner.lock();
        let mut ids: Vec<_> = queues.keys().filter(|id| id.keyspace == keyspace).cloned().collect();
        // In an order of their own, not of random hashes: a simulation sees the same one each time.
        ids.sort_unstable();
        visits_now.append(&mut ids);
    }

    /// Queues to look at as soon as may be.
    pub(crate) fn to_visit(&self) -> Vec<QueueId> {
        std::mem::take(&mut self.inner.lock().visits_now)
    }

    /// Who is to be looked at by `now`, at most so many: their time is over, or their fence may be free.
    pub(crate) fn due(&self, now: u64, most: usize) -> Vec<Arc<Waiter>> {
        let mut inner = self.inner.lock();
        let Inner { queues, looks, .. } = &mut *inner;
        let due: Vec<_> = std::iter::from_fn(|| looks.pop_due(now)).take(most).collect();
        for waiter in &due {
            if waiter.deadline > now
                && let Some(queue) = queues.get_mut(&waiter.queue)
            {
                queue.visit_at = u64::MAX;
            }
            // Until it leaves.
            looks.add(waiter.deadline, waiter);
        }
        due
    }

    /// When something is due here if nothing else happens.
    pub(crate) fn next(&self) -> Option<u64> {
        self.inner.lock().looks.first()
    }

    /// Everybody who waits; with `shut`, nobody joins any more.
    pub(crate) fn all(&self, shut: bool) -> Vec<Arc<Waiter>> {
        let mut inner = self.inner.lock();
        inner.is_shut |= shut;
        let mut looks: Vec<_> = inner.looks.heap.iter().filter(|look| look.counts()).collect();
        looks.sort_by_key(|look| Reverse(look.at));
        looks.into_iter().map(|look| look.waiter.clone()).collect()
    }
}

// The primitives of shuttle do not run outside of its models.
#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::lease::Terms;
    use crate::types::Ttl;
    use crate::waiter::{Asleep, Slots};

    fn ask(name: &Arc<[u8]>) -> Ask<'_> {
        let ttl = Ttl::new(Duration::from_secs(1)).unwrap();
        let terms = Terms { owner: OwnerId::new(1), ttl, delay: 0 };
        Ask { name, slots: None, terms, resume: None }
    }

    const JOBS: KeyspaceId = KeyspaceId(1);

    fn join(waiters: &Waiters, at: u64) -> Result<Arc<Waiter>> {
        let (name, wait) = (b"f"[..].into(), Duration::from_nanos(at));
        waiters.join(JOBS, &ask(&name), at, wait, u64::MAX).map(|(waiter, _)| waiter)
    }

    fn is_empty(waiters: &Waiters) -> bool {
        let inner = waiters.inner.lock();
        waiters.len() == 0 && inner.queues.is_empty() && inner.looks.heap.is_empty()
    }

    #[test]
    fn the_first_to_come_is_the_first_in_the_queue() {
        let waiters = Waiters::new();
        let (a, b) = (join(&waiters, 900).unwrap(), join(&waiters, 100).unwrap());
        assert!(Arc::ptr_eq(&waiters.first(&a.queue).unwrap(), &a));
        waiters.remove(&a);
        assert!(Arc::ptr_eq(&waiters.first(&a.queue).unwrap(), &b));
        assert!(waiters.ahead(JOBS, &ask(&b"g"[..].into())).is_none());
    }

    /// Whoever serves a queue knows who was the first in it, and comes by that to whoever is the first by then.
    #[test]
    fn one_who_left_still_leads_to_the_first_of_its_queue() {
        let waiters = Waiters::new();
        let [a, b, c] = [900, 800, 700].map(|at| join(&waiters, at).unwrap());
        waiters.remove(&b);
        assert!(Arc::ptr_eq(&waiters.remove_and_next(&b).unwrap(), &a));
        assert!(Arc::ptr_eq(&waiters.remove_and_next(&a).unwrap(), &c));
        assert!(Arc::ptr_eq(&waiters.remove_and_next(&a).unwrap(), &c));
        assert_eq!((waiters.len(), waiters.waiting(&c.queue)), (1, 1));
        assert!(waiters.remove_and_next(&c).is_none());
        assert!(waiters.remove_and_next(&b).is_none());
        assert!(is_empty(&waiters));
    }

    #[test]
    fn who_leaves_leaves_nothing_behind_however_it_leaves() {
        let waiters = Waiters::new();
        let all: Vec<_> = (0..100).map(|n| join(&waiters, n * 10).unwrap()).collect();
        waiters.visit_at(&all[0], 55);
        waiters.visit_at(&all[0], 77);
        assert_eq!(waiters.next(), Some(0));
        for (n, waiter) in all.iter().enumerate() {
            match n % 3 {
                0 => assert!(waiters.leave(waiter).is_none()),
                1 => {
                    assert!(matches!(waiter.queued().unwrap().tell(Err(Error::Closed)), Asleep::Nobody));
                    waiters.remove(waiter);
                    assert!(waiters.leave(waiter).is_none());
                }
                _ => {
                    waiters.remove(waiter);
                    waiters.remove(waiter);
                }
            }
        }
        assert!(is_empty(&waiters));
        assert!(waiters.due(1000, 10).is_empty());
    }

    #[test]
    fn the_first_is_looked_at_when_its_fence_may_be_free_and_then_at_its_deadline() {
        let waiters = Waiters::new();
        let [a, b] = [900, 800].map(|at| join(&waiters, at).unwrap());
        let due = |now| waiters.due(now, 10).iter().map(|waiter| waiter.deadline).collect::<Vec<_>>();
        waiters.visit_at(&a, 500);
        waiters.visit_at(&a, 700);
        assert_eq!((waiters.next(), due(499)), (Some(500), vec![]));
        // It is the fence that is free then, whoever is the first.
        waiters.remove(&a);
        assert_eq!((waiters.next(), due(500)), (Some(500), vec![800]));
        assert_eq!((waiters.next(), due(799)), (Some(800), vec![]));
        waiters.visit_at(&b, 900);
        assert_eq!((waiters.next(), due(800)), (Some(800), vec![800]));
        waiters.remove(&b);
        assert!(is_empty(&waiters));
    }

    #[test]
    fn few_looks_are_kept_that_nobody_needs_any_more() {
        let waiters = Waiters::new();
        let kept = || waiters.inner.lock().looks.heap.len();
        let stays = join(&waiters, 1 << 40).unwrap();
        let mut left = Vec::new();
        for n in 0..1000 {
            let waiter = join(&waiters, n).unwrap();
            waiters.remove(&waiter);
            left.push(Arc::downgrade(&waiter));
            assert!(waiters.visit_at(&stays, 1_000_000 - n));
            assert!(kept() <= 2 + Looks::FEW, "{}", kept());
        }
        assert!(left.iter().filter(|waiter| waiter.upgrade().is_some()).count() <= 2 + Looks::FEW);
        // The one that waits is looked at all the same, at once as the last of those looks said.
        assert_eq!((waiters.next(), waiters.due(999_000, 10).len()), (Some(999_001), 0));
        assert!(Arc::ptr_eq(&waiters.due(999_001, 10)[0], &stays));
        assert_eq!((waiters.next(), waiters.all(false).len()), (Some(1 << 40), 1));
        assert!(waiters.leave(&stays).is_none() && is_empty(&waiters));
    }

    #[test]
    fn what_keeps_one_who_left_is_not_waited_for_by_the_next() {
        let waiters = Waiters::new();
        let name: Arc<[u8]> = b"f"[..].into();
        let [few, same, more, few_again] = [1, 1, 2, 1].map(|n| {
            let ask = Ask { slots: Some(Slots { n, delimiter: b'/' }), ..ask(&name) };
            waiters.join(JOBS, &ask, 900, Duration::ZERO, u64::MAX).unwrap().0
        });
        assert!(waiters.visit_at(&few, 500));
        assert!(waiters.leave(&few).is_none());
        assert_eq!(waiters.to_visit(), [], "the next one asks for the same");
        assert!(!waiters.visit_at(&few, 400));
        assert_eq!(waiters.next(), Some(500));
        waiters.remove(&few_again);
        assert_eq!(waiters.to_visit(), [], "it was not the first");
        waiters.remove(&same);
        waiters.remove(&same);
        assert_eq!(waiters.to_visit(), std::slice::from_ref(&more.queue));
        waiters.remove(&more);
        assert!(is_empty(&waiters) && waiters.to_visit().is_empty());
    }

    #[test]
    fn the_late_are_found_and_nobody_else() {
        let waiters = Waiters::new();
        for at in [300, 100, 200] {
            join(&waiters, at).unwrap();
        }
        let late: Vec<_> = waiters.due(200, 10).iter().map(|waiter| waiter.deadline).collect();
        assert_eq!(late, [100, 200]);
        assert_eq!(waiters.due(1000, 1).len(), 1);
    }

    #[test]
    fn nobody_joins_what_is_shut() {
        let waiters = Waiters::new();
        join(&waiters, 100).unwrap();
        assert_eq!(waiters.all(true).len(), 1);
        assert!(matches!(join(&waiters, 100), Err(Error::Closed)));
    }
}
