//! The whole lease table with its waiters, under many random interleavings.
//!
//! As in `tests/loom.rs` the sources of the crate are compiled once more, here with `crate::sync` made of
//! shuttle's primitives. A run is too long for every order of events to be tried: shuttle draws some thousand
//! of them, by chance and by PCT, and fails on a deadlock, which is how a lost wake-up shows, and on an
//! assertion. The engine around the kernels (`grant.rs`, `acquire.rs`, `hand_over.rs`) is a small model that
//! takes the same steps.
//!
//! Time is part of the model: it goes on when somebody sleeps for it, never past the first who does, and
//! meanwhile everybody else may be anywhere.
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test --test shuttle
//! TIDEWALL_SCHEDULES=100000 RUSTFLAGS="--cfg shuttle" cargo test --test shuttle
//! ```
#![cfg(shuttle)]
// The models use a part of each file.
#![allow(dead_code)]

#[path = "../src/block.rs"]
mod block;
#[path = "../src/error.rs"]
mod error;
#[path = "../src/group_commit.rs"]
mod group_commit;
#[path = "../src/lease.rs"]
mod lease;
#[path = "../src/lease_table.rs"]
mod lease_table;
#[path = "support/shuttled.rs"]
mod shuttled;
#[path = "../src/slots.rs"]
mod slots;
#[path = "../src/types.rs"]
mod types;
#[path = "../src/waiter.rs"]
mod waiter;
#[path = "../src/waiters.rs"]
mod waiters;
#[path = "../src/watches.rs"]
mod watches;

use block::block_on;
use error::Error;
use group_commit::{Doorbell, Progress};
use lease::{Bell, FenceId, Grant, RenewError, Terms};
use lease_table::LeaseTable;
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use slots::slot_name;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64 as Plain;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use sync::{Arc, AtomicBool, AtomicUsize, Mutex, Ordering, time};
use types::{KeyspaceId, Lsn, OwnerId, Token, Ttl};
use waiter::{Ask, Asleep, Granted, QueueId, Slots, Waiter};
use waiters::Waiters;
use watches::{Keep, Watches};

/// The one word of `src/options.rs` that the kernels use.
mod options {
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Scope {
        Key,
        Prefix(u8),
    }
}

/// `src/sync.rs` on shuttle: the part of it that the kernels use.
mod sync {
    pub(crate) use crate::shuttled::{Condvar, Mutex, MutexGuard, move_all, time, wait_on, wake_all};
    pub(crate) use crossbeam_utils::CachePadded;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use std::sync::Arc;
}

const MS: u64 = 1_000_000;
const JOBS: KeyspaceId = KeyspaceId(1);
/// Two fences, and the two slots of a key.
const FENCES: [&[u8]; 4] = [b"a", b"b", b"k.0/", b"k.1/"];
const KEY: &[u8] = b"k";
const SLOTS: u32 = 2;
const MOST: usize = 256;
const MOST_TOLD: usize = 3;

fn fence_of(name: &[u8]) -> usize {
    FENCES.iter().position(|fence| *fence == name).unwrap()
}

/// Not all ask for as many slots, and so what keeps one need not keep the next.
fn some_slots() -> Slots {
    Slots { n: 1 + any(u64::from(SLOTS)) as u32, delimiter: b'/' }
}

/// The queue that leads to a fence.
fn queue_of(fence: usize) -> &'static [u8] {
    if fence < 2 { FENCES[fence] } else { KEY }
}

fn any(n: u64) -> u64 {
    thread_rng().gen_range(0..n)
}

/// What the models know beside the kernels. Its locks are those of the standard library: no event of a
/// schedule happens under one.
#[derive(Default)]
struct Witness {
    grants: [std::sync::Mutex<Vec<Arc<Grant>>>; FENCES.len()],
    ended: std::sync::Mutex<BTreeSet<Token>>,
    joined: std::sync::Mutex<Vec<Joined>>,
    steps: Plain,
}

/// One who waits, as the model sees it.
#[derive(Clone)]
struct Joined {
    waiter: Arc<Waiter>,
    before: u64,
    after: u64,
    /// Served, told of its deadline, or about to leave.
    is_gone: bool,
    has_left: bool,
}

impl Witness {
    fn step(&self) -> u64 {
        self.steps.fetch_add(1, Ordering::SeqCst)
    }

    /// Under the tail lock: a grant is in the table.
    fn granted(&self, fence: usize, grant: &Arc<Grant>) {
        let mut grants = self.grants[fence].lock().unwrap();
        assert!(grants.last().is_none_or(|last| last.token() < grant.token()), "a token came twice, or late");
        grants.push(grant.clone());
    }

    /// At any moment at most one grant of a fence is not ended, and what was ended stays so.
    fn check(&self, fence: usize) {
        let grants = self.grants[fence].lock().unwrap().clone();
        let Some((_, before)) = grants.split_last() else { return };
        for grant in before {
            assert!(grant.is_ended(), "{:?} lives beside a later one", grant.token());
        }
        for grant in &grants {
            if self.ended.lock().unwrap().contains(&grant.token()) {
                assert!(grant.is_ended() && !grant.is_live(MS), "{:?} lives again", grant.token());
                assert_eq!(grant.renew(MS, u64::MAX), Err(RenewError::Ended));
                assert!(!grant.enable(MS));
            } else if grant.is_ended() {
                self.ended.lock().unwrap().insert(grant.token());
            }
        }
    }

    /// Under the tail lock: a fence is given to `waiter`, or to a newcomer who began at `since`.
    fn given(&self, fence: usize, waiter: Option<&Arc<Waiter>>, since: u64) {
        let now = time::now();
        let mut joined = self.joined.lock().unwrap();
        let me = waiter.and_then(|waiter| joined.iter().position(|other| Arc::ptr_eq(&other.waiter, waiter)));
        let since = me.map_or(since, |me| joined[me].before);
        for other in joined.iter().filter(|other| &*other.waiter.queue.name == queue_of(fence)) {
            let overtaken = !other.is_gone && other.waiter.deadline > now && other.after < since;
            assert!(!overtaken, "overtook one who came at {} and was there before {since}", other.after);
        }
        if let Some(me) = me {
            assert!(!joined[me].has_left, "one who left was served");
            joined[me].is_gone = true;
        }
    }

    fn check_all(&self) {
        (0..FENCES.len()).for_each(|fence| self.check(fence));
    }

    fn note(&self, waiter: &Arc<Waiter>, note: impl FnOnce(&mut Joined)) {
        let mut joined = self.joined.lock().unwrap();
        if let Some(known) = joined.iter_mut().find(|other| Arc::ptr_eq(&other.waiter, waiter)) {
            note(known);
        }
    }
}

/// What the tail lock guards.
struct Tail {
    counter: u64,
    next: u64,
    group: u32,
}

/// The engine in small.
struct Engine {
    tail: Mutex<Tail>,
    commit: Mutex<()>,
    progress: Progress,
    leases: LeaseTable,
    waiters: Waiters,
    watches: Watches,
    bell: Arc<Bell>,
    /// Rung when the committer has work.
    doorbell: Doorbell,
    /// Who waits for the committer right now.
    waiting: AtomicUsize,
    is_over: AtomicBool,
    witness: Witness,
}

enum Attempt {
    Appended(Granted),
    Busy(Vec<Arc<Grant>>),
    Queued,
}

enum Served {
    Told(Asleep),
    Granted { asleep: Asleep, lsn: Lsn, group: u32, company: bool },
    NoRoom,
    Busy(Vec<Arc<Grant>>),
}

/// How a worker behaves.
#[derive(Clone, Copy)]
struct Wish {
    /// A fence, or a key with slots.
    name: &'static [u8],
    slots: Option<Slots>,
    terms: Terms,
    wait: u64,
    /// Leaves after so many polls.
    patience: Option<u64>,
    /// Waits as a future does, not as a thread.
    is_task: bool,
}

impl Engine {
    fn new() -> Arc<Self> {
        Arc::new(Engine {
            tail: Mutex::new(Tail { counter: 0, next: 1, group: 1 }),
            commit: Mutex::new(()),
            progress: Progress::new(Lsn::ZERO),
            leases: LeaseTable::new(),
            waiters: Waiters::new(),
            watches: Watches::new(),
            bell: Arc::new(Bell::new()),
            doorbell: Doorbell::new(),
            waiting: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
            witness: Witness::default(),
        })
    }

    /// As `Engine::commit`.
    fn commit(&self) {
        let commit = self.commit.lock();
        let mut tail = self.tail.lock();
        let (last, taken) = (Lsn::new(tail.next - 1), tail.group);
        if self.progress.durable() == last {
            return;
        }
        tail.group += 1;
        drop(tail);
        let due = self.progress.publish(last, taken, 0);
        drop(commit);
        drop(due);
    }

    /// As `Engine::wait_durable`: who is alone commits by itself, with company the committer does.
    fn wait_durable(&self, lsn: Lsn, group: u32) {
        if self.progress.durable() >= lsn {
            return;
        }
        let company = self.waiting.fetch_add(1, Ordering::AcqRel) > 0;
        if !company && self.progress.durable().next() == lsn {
            self.commit();
        } else {
            self.doorbell.ring();
        }
        assert_eq!(self.progress.wait(lsn, group), Ok(()));
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    fn commit_until_over(&self) {
        while !self.is_over.load(Ordering::Acquire) {
            self.doorbell.listen(None);
            self.commit();
        }
    }

    /// As `Engine::is_free`.
    fn is_free(&self, grant: &Grant, now: u64) -> bool {
        grant.end_if_expired(now);
        if grant.is_pending() && self.progress.durable() >= grant.lsn() {
            grant.enable(now);
        }
        grant.is_free(now)
    }

    /// As `Engine::find_place`: the fence, or the grants in the way.
    fn find_place(&self, ask: &Ask<'_>, now: u64) -> Result<Vec<u8>, Vec<Arc<Grant>>> {
        let Some(slots) = ask.slots else {
            return match self.leases.current(JOBS, ask.name) {
                Some(grant) if !self.is_free(&grant, now) => Err(vec![grant]),
                _ => Ok(ask.name.to_vec()),
            };
        };
        let mut taken = self.leases.slots(JOBS, ask.name);
        taken.retain(|(_, grant)| !self.is_free(grant, now));
        assert!(taken.len() <= SLOTS as usize, "more than all slots are held");
        let is_full = taken.len() >= slots.n as usize;
        match (0..slots.n).filter(|_| !is_full).find(|index| taken.iter().all(|(of, _)| of != index)) {
            Some(index) => Ok(slot_name(ask.name, index, slots.delimiter)),
            None => Err(taken.into_iter().map(|(_, grant)| grant).collect()),
        }
    }

    /// As `Engine::attempt_at`, for the first in the queue or for a newcomer.
    fn attempt_at(&self, tail: &mut Tail, ask: &Ask<'_>, waiter: Option<&Arc<Waiter>>) -> Attempt {
        let since = self.witness.step();
        let now = time::now();
        if waiter.is_none() && self.waiters.ahead(JOBS, ask).is_some() {
            return Attempt::Queued;
        }
        let name = match self.find_place(ask, now) {
            Ok(name) => name,
            Err(taken) => return Attempt::Busy(taken),
        };
        let fence = fence_of(&name);
        if let Some(grant) = self.leases.current(JOBS, &name) {
            assert!(grant.is_ended(), "given while it is held");
        }
        tail.counter += 1;
        let token = Token::new(tail.counter).unwrap();
        let lsn = Lsn::new(tail.next);
        tail.next += 1;
        let of = FenceId::new(JOBS, &name);
        let grant = Arc::new(Grant::pending(of, token, ask.terms, lsn, now, &self.bell));
        let is_new = self.leases.insert(JOBS, &name, grant.clone()).is_none();
        self.witness.granted(fence, &grant);
        self.witness.given(fence, waiter, since);
        self.witness.check(fence);
        Attempt::Appended(Granted { grant, is_new, predecessor: None, lsn, group: tail.group, asked: now })
    }

    /// As `Engine::let_go`.
    fn let_go(&self, grant: &Grant) {
        if grant.release() == Some(true) {
            self.pass(grant.token(), grant.fence(), true);
        }
        assert!(grant.is_ended());
    }

    fn enable(&self, granted: &Granted) -> bool {
        let now = time::now();
        let handed_out = granted.grant.enable(now) || !granted.grant.is_ended();
        if granted.is_new || any(8) == 0 {
            self.leases.sweep(now);
        }
        if !handed_out {
            self.leases.remove_if(JOBS, &granted.grant.fence().name, granted.grant.token());
        }
        handed_out
    }

    /// As `Acquire::run` and its `leave`: the grant, or `None` if there was none in time, or it left.
    fn acquire(&self, wish: &Wish) -> Option<Arc<Grant>> {
        let name = wish.name.into();
        let ask = Ask { name: &name, slots: wish.slots, terms: wish.terms, resume: None };
        let mut until = None;
        loop {
            let busy = if wish.wait == 0 { None } else { self.find_place(&ask, time::now()).err() };
            let attempt = match busy {
                Some(busy) => Attempt::Busy(busy),
                None => self.attempt_at(&mut self.tail.lock(), &ask, None),
            };
            let busy = match attempt {
                Attempt::Appended(granted) => Err(granted),
                Attempt::Busy(_) | Attempt::Queued if wish.wait == 0 => return None,
                Attempt::Busy(busy) => Ok(Some(busy)),
                Attempt::Queued => Ok(None),
            };
            let granted = match busy {
                Err(granted) => granted,
                Ok(busy) => {
                    let until = *until.get_or_insert(time::now().saturating_add(wish.wait));
                    self.wait(wish, &ask, until, busy)?
                }
            };
            if wish.patience == Some(0) {
                self.let_go(&granted.grant);
                return None;
            }
            self.wait_durable(granted.lsn, granted.group);
            if self.enable(&granted) {
                return Some(granted.grant);
            }
        }
    }

    fn wait(&self, wish: &Wish, ask: &Ask<'_>, until: u64, busy: Option<Vec<Arc<Grant>>>) -> Option<Granted> {
        let before = self.witness.step();
        let looks = busy.iter().flatten().filter_map(|grant| grant.look_at(time::now()));
        let visit_at = looks.min().unwrap_or(u64::MAX);
        let (waiter, is_first) =
            self.waiters.join(JOBS, ask, until, Duration::from_nanos(wish.wait), visit_at).unwrap();
        let after = self.witness.step();
        let joined = Joined { waiter: waiter.clone(), before, after, is_gone: false, has_left: false };
        let mut all = self.witness.joined.lock().unwrap();
        all.push(joined);
        drop(all);
        // As `Engine::begin_to_wait`.
        self.bell.look_by(waiter.deadline.min(visit_at));
        if is_first && !busy.is_some_and(|busy| busy.iter().all(|grant| grant.watch())) {
            self.hand_over(waiter.clone(), true);
        }
        let told = match wish.patience {
            None if wish.is_task => block_on(|cx| waiter.poll(cx)),
            None => waiter.wait(),
            Some(polls) => {
                let mut told = None;
                for _ in 0..polls {
                    if let Poll::Ready(answer) = waiter.poll(&mut Context::from_waker(Waker::noop())) {
                        told = Some(answer);
                        break;
                    }
                    thread::yield_now();
                }
                match told {
                    Some(told) => told,
                    None => {
                        self.leave(&waiter);
                        return None;
                    }
                }
            }
        };
        self.waiters.remove(&waiter);
        match told {
            Ok(granted) => {
                self.waiting.fetch_sub(1, Ordering::AcqRel);
                assert_eq!(queue_of(fence_of(&granted.grant.fence().name)), &**ask.name);
                Some(granted)
            }
            Err(Error::Timeout { .. }) => {
                assert!(time::now() >= until, "told of its deadline before it");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn leave(&self, waiter: &Arc<Waiter>) {
        self.witness.note(waiter, |joined| joined.is_gone = true);
        let granted = self.waiters.leave(waiter);
        if waiter.queue.has_slots {
            self.bell.nudge();
        }
        self.witness.note(waiter, |joined| joined.has_left = true);
        assert!(waiter.queued().is_none());
        if let Some(granted) = granted {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            self.let_go(&granted.grant);
        }
    }

    /// As `Engine::break_grant`; or as a write whose token is above the mark.
    fn overtake(&self, fence: usize, by_raise: bool) {
        let name = FENCES[fence];
        let mut tail = self.tail.lock();
        let now = time::now();
        let current = self.leases.current(JOBS, name);
        tail.counter += 1;
        let token = Token::new(tail.counter).unwrap();
        let lsn = Lsn::new(tail.next);
        tail.next += 1;
        if by_raise {
            self.leases.end_fence_below(JOBS, name, token);
        } else if let Some(grant) = &current {
            grant.end_if_expired(now);
            if !grant.end_broken(now) {
                self.leases.remove_if(JOBS, name, grant.token());
            }
        }
        if let Some(grant) = current {
            assert!(grant.is_ended(), "{:?} lives below the mark", grant.token());
        }
        let group = tail.group;
        drop(tail);
        self.wait_durable(lsn, group);
        if !by_raise && self.waiters.len() > 0 {
            QueueId::of(&FenceId::new(JOBS, name)).for_each(|queue| self.waiters.visit_now(queue));
            self.bell.nudge();
        }
        self.witness.check(fence);
    }

    /// As `Lost::wait`.
    fn wait_for_the_end(&self, grant: &Arc<Grant>) {
        let mut slot = 0;
        block_on(|cx| {
            let now = time::now();
            grant.end_if_not_held(now);
            if !grant.is_ended() && self.watches.add_waker(grant, &mut slot, cx.waker().clone(), now) {
                self.bell.nudge();
                return Poll::Pending;
            }
            assert!(grant.is_ended());
            Poll::Ready(())
        });
        self.watches.remove_waker(grant.token(), slot, time::now());
    }

    /// As `Engine::tend_leases`, without the look that it takes four times a second for nothing.
    fn tend(&self) -> Option<Duration> {
        self.bell.plan();
        for over in self.bell.take() {
            self.pass(over.token, &over.fence, false);
        }
        let now = time::now();
        for token in self.watches.due(now, MOST) {
            self.look_at_due(token, now);
        }
        for waiter in self.waiters.due(now, MOST) {
            if waiter.deadline > now {
                self.hand_over(waiter, false);
                continue;
            }
            let asleep = waiter.queued().map_or(Asleep::Nobody, |queued| {
                self.witness.note(&waiter, |joined| joined.is_gone = true);
                queued.tell(Err(Error::Timeout { after: waiter.wait }))
            });
            self.waiters.remove(&waiter);
            asleep.wake();
        }
        for queue in self.waiters.to_visit() {
            if let Some(first) = self.waiters.first(&queue) {
                self.hand_over(first, false);
            }
        }
        let next = [self.watches.next(), self.waiters.next()].into_iter().flatten().min()?;
        self.bell.planned(next);
        (next != u64::MAX).then(|| Duration::from_nanos(next.saturating_sub(time::now())))
    }

    fn pass(&self, token: Token, fence: &FenceId, at_hand: bool) {
        if let Some(mut watch) = self.watches.take(token) {
            watch.wake();
        }
        for queue in QueueId::of(fence) {
            if let Some(first) = self.waiters.first(&queue) {
                self.hand_over(first, at_hand);
            }
        }
    }

    fn look_at_due(&self, token: Token, now: u64) {
        let Some((grant, is_told, keep)) = self.watches.get(token) else { return };
        if grant.is_pending() && self.progress.durable() >= grant.lsn() {
            grant.enable(now);
        }
        if let Some(keep) = keep.filter(|keep| keep.next <= now) {
            let renewed = now < keep.until && grant.renew(now, keep.until).is_ok();
            let next = renewed.then(|| Keep { next: now + 3 * MS, ..keep });
            self.watches.keep(&grant, next, now);
        }
        let ended = if is_told { grant.end_if_not_held(now) } else { grant.end_if_expired(now) };
        if !ended {
            self.watches.arm(token, now);
        }
    }

    /// By whoever gives a lease back, or begins to wait, with the room at hand; or by the thread.
    fn hand_over(&self, mut first: Arc<Waiter>, at_hand: bool) {
        for _ in 0..MOST_TOLD {
            let next = match self.serve(&first, at_hand) {
                Served::Told(asleep) => {
                    let next = self.waiters.remove_and_next(&first);
                    asleep.wake();
                    next
                }
                Served::Granted { asleep, lsn, group, company } => {
                    let next = self.waiters.remove_and_next(&first);
                    self.wake_when_durable(asleep, lsn, group, company);
                    next
                }
                Served::Busy(busy) => {
                    if self.wait_for(&first, &busy) {
                        return;
                    }
                    self.waiters.first(&first.queue)
                }
                Served::NoRoom => break,
            };
            match next {
                Some(next) => first = next,
                None => return,
            }
        }
        self.waiters.visit_now(first.queue.clone());
        self.bell.nudge();
    }

    fn serve(&self, waiter: &Arc<Waiter>, at_hand: bool) -> Served {
        if !at_hand && let Err(busy) = self.find_place(&waiter.ask(), time::now()) {
            return Served::Busy(busy);
        }
        let mut tail = self.tail.lock();
        if at_hand && any(8) == 0 {
            return Served::NoRoom;
        }
        let Some(queued) = waiter.queued() else { return Served::Told(Asleep::Nobody) };
        if time::now() >= waiter.deadline {
            self.witness.note(waiter, |joined| joined.is_gone = true);
            return Served::Told(queued.tell(Err(Error::Timeout { after: waiter.wait })));
        }
        match self.attempt_at(&mut tail, &waiter.ask(), Some(waiter)) {
            Attempt::Appended(granted) => {
                let (lsn, group) = (granted.lsn, granted.group);
                let company = self.waiting.fetch_add(1, Ordering::AcqRel) > 0;
                Served::Granted { asleep: queued.tell(Ok(granted)), lsn, group, company }
            }
            Attempt::Busy(busy) => Served::Busy(busy),
            Attempt::Queued => unreachable!("it is the first"),
        }
    }

    fn wait_for(&self, first: &Arc<Waiter>, busy: &[Arc<Grant>]) -> bool {
        let now = time::now();
        let mut visit_at = u64::MAX;
        for grant in busy {
            let at = if grant.watch() { grant.look_at(now) } else { grant.free_at() };
            if grant.is_free(now) {
                return false;
            }
            visit_at = visit_at.min(at.unwrap_or(u64::MAX));
        }
        if !self.waiters.visit_at(first, visit_at) {
            return false;
        }
        self.bell.look_by(visit_at);
        true
    }

    fn wake_when_durable(&self, asleep: Asleep, lsn: Lsn, group: u32, company: bool) {
        if !company && self.progress.durable().next() == lsn {
            return asleep.wake();
        }
        asleep.wake_when_durable(&self.progress, lsn, group);
        self.doorbell.ring();
    }

    fn tend_until_over(&self) {
        while !self.is_over.load(Ordering::Acquire) {
            let timeout = self.tend();
            self.bell.doorbell.listen(timeout);
        }
        // What the last ones left is done, and then nothing is left.
        self.tend();
    }
}

fn terms(ttl: Ttl, delay: u64) -> Terms {
    Terms { owner: OwnerId::new(1), ttl, delay }
}

fn spawn(engine: &Arc<Engine>, run: impl FnOnce(&Engine) + Send + 'static) -> thread::JoinHandle<()> {
    let engine = engine.clone();
    thread::spawn(move || run(&engine))
}

type Worker = Box<dyn FnOnce(&Engine) + Send>;

/// Runs the workers beside the thread of the leases and the clock, and looks at what is left.
fn run(workers: Vec<Worker>) {
    let engine = Engine::new();
    let tender = spawn(&engine, Engine::tend_until_over);
    let committer = spawn(&engine, Engine::commit_until_over);
    let clock = thread::spawn(time::run);
    let workers: Vec<_> = workers.into_iter().map(|worker| spawn(&engine, worker)).collect();
    for worker in workers {
        worker.join().unwrap();
    }
    assert_eq!(engine.waiters.len(), 0, "somebody who left is still in a queue");
    assert_eq!(engine.waiting.load(Ordering::Acquire), 0, "somebody is still counted");
    for fence in 0..FENCES.len() {
        engine.overtake(fence, true);
        engine.witness.check(fence);
    }
    engine.is_over.store(true, Ordering::Release);
    engine.bell.nudge();
    engine.doorbell.ring();
    tender.join().unwrap();
    committer.join().unwrap();
    time::end();
    clock.join().unwrap();
    assert_eq!(engine.waiters.next(), None, "a deadline or a visit is left behind");
    assert!(engine.waiters.to_visit().is_empty());
    assert_eq!((engine.watches.len(), engine.watches.next()), (0, None), "a watch is left behind");
    assert_eq!(engine.leases.len(), 0);
}

/// Nobody is in a hurry and nothing ends by itself: whoever waits is woken by the end of the one before.
fn without_deadlines() {
    let worker = |engine: &Engine| {
        for _ in 0..2 {
            let patience = (any(4) == 0).then(|| any(3));
            let (name, slots) = if any(3) == 0 { (KEY, Some(some_slots())) } else { (FENCES[0], None) };
            let wish = Wish {
                name,
                slots,
                terms: terms(Ttl::INFINITE, 0),
                wait: u64::MAX,
                patience,
                is_task: any(3) == 0,
            };
            let Some(grant) = engine.acquire(&wish) else { continue };
            engine.witness.check_all();
            let now = time::now();
            match any(3) {
                0 => {
                    let keep = Keep { next: now + MS, until: now + 2 * MS };
                    engine.watches.keep(&grant, Some(keep), now);
                    engine.bell.nudge();
                }
                1 => {
                    // Asks to be told of the end, and does not wait for it.
                    let mut slot = 0;
                    engine.watches.add_waker(&grant, &mut slot, Waker::noop().clone(), now);
                    engine.watches.remove_waker(grant.token(), slot, now);
                }
                _ => {}
            }
            engine.let_go(&grant);
            engine.witness.check_all();
        }
    };
    let breaker = |engine: &Engine| (0..3).for_each(|_| engine.overtake(any(4) as usize, any(2) == 0));
    run(vec![Box::new(worker), Box::new(worker), Box::new(worker), Box::new(breaker)]);
}

/// Everything at once: leases that are released, renewed, kept, watched or left to expire, on two fences.
fn with_deadlines() {
    let worker = |engine: &Engine| {
        for _ in 0..2 {
            let name = [FENCES[0], FENCES[0], FENCES[1], KEY][any(4) as usize];
            let slots = (name == KEY).then(some_slots);
            let ttl = Ttl::new(Duration::from_millis(5 + any(6))).unwrap();
            let delay = if any(4) == 0 { 2 * MS } else { 0 };
            let patience = (any(5) == 0).then(|| any(3));
            let terms = terms(ttl, delay);
            let wish = Wish { name, slots, terms, wait: any(4) * 7 * MS, patience, is_task: any(2) == 0 };
            let Some(grant) = engine.acquire(&wish) else { continue };
            if any(3) == 0 {
                let now = time::now();
                engine.watches.keep(&grant, Some(Keep { next: now + 3 * MS, until: now + 12 * MS }), now);
                engine.bell.nudge();
            }
            match any(5) {
                0 => {}
                1 => engine.wait_for_the_end(&grant),
                2 => time::sleep(4 * MS),
                _ => {
                    let now = time::now();
                    let was_over = grant.is_ended();
                    thread::yield_now();
                    let renewed = grant.renew(now, u64::MAX);
                    assert!(!(was_over && renewed.is_ok()), "renewed what was over");
                }
            }
            engine.witness.check_all();
            if any(3) != 0 && !grant.end_if_expired(time::now()) {
                engine.let_go(&grant);
            }
            engine.witness.check_all();
        }
    };
    let breaker = |engine: &Engine| {
        for _ in 0..2 {
            engine.overtake(any(4) as usize, any(2) == 0);
        }
    };
    run(vec![Box::new(worker), Box::new(worker), Box::new(worker), Box::new(breaker)]);
}

fn schedules() -> usize {
    std::env::var("TIDEWALL_SCHEDULES").map_or(2_000, |n| n.parse().expect("a number of schedules"))
}

#[test]
fn the_table_without_deadlines_in_random_order() {
    shuttle::check_random(without_deadlines, schedules());
}

#[test]
fn the_table_without_deadlines_by_priorities() {
    shuttle::check_pct(without_deadlines, schedules(), 4);
}

#[test]
fn the_table_with_deadlines_in_random_order() {
    shuttle::check_random(with_deadlines, schedules());
}

#[test]
fn the_table_with_deadlines_by_priorities() {
    shuttle::check_pct(with_deadlines, schedules(), 4);
}
