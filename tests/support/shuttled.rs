//! The primitives of `src/sync.rs`, made of shuttle's: locks, sleeping and waking are the events of a schedule.
#![allow(dead_code, reason = "each test uses a part of it")]

use crate::sync::{Arc, AtomicU32, Ordering};
use shuttle::rand::{Rng, thread_rng};
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a shuttle::sync::Mutex<T>,
    /// Empty only while a condition variable sleeps with it.
    held: Option<shuttle::sync::MutexGuard<'a, T>>,
}

/// A queue of sleepers, each with a place of its own: time has to wake one of them.
#[derive(Debug)]
pub(crate) struct Condvar(shuttle::sync::Mutex<Vec<Arc<Sleeper>>>);

#[derive(Debug)]
struct Sleeper {
    is_woken: shuttle::sync::Mutex<bool>,
    condvar: shuttle::sync::Condvar,
}

impl Sleeper {
    fn new() -> Arc<Self> {
        Arc::new(Sleeper {
            is_woken: shuttle::sync::Mutex::new(false),
            condvar: shuttle::sync::Condvar::new(),
        })
    }

    fn sleep(&self) {
        let mut is_woken = self.is_woken.lock().unwrap();
        while !*is_woken {
            is_woken = self.condvar.wait(is_woken).unwrap();
        }
    }

    fn wake(&self) {
        *self.is_woken.lock().unwrap() = true;
        self.condvar.notify_one();
    }
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: &self.0, held: Some(self.0.lock().unwrap()) }
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard { mutex: &self.0, held: Some(self.0.try_lock().ok()?) })
    }

    /// The time may be over at any moment: it is when nobody else has to run first.
    pub(crate) fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T>> {
        shuttle::thread::yield_now();
        self.try_lock()
    }
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        RwLock(shuttle::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> shuttle::sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap()
    }

    pub(crate) fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap()
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().unwrap()
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().unwrap()
    }
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Condvar(shuttle::sync::Mutex::new(Vec::new()))
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.sleep(guard, None);
    }

    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) {
        self.sleep(guard, Some(time::now() + timeout.as_nanos() as u64));
    }

    fn sleep<T>(&self, guard: &mut MutexGuard<'_, T>, until: Option<u64>) {
        let sleeper = Sleeper::new();
        self.0.lock().unwrap().push(sleeper.clone());
        if let Some(until) = until {
            time::wake_at(until, &sleeper);
        }
        drop(guard.held.take());
        sleeper.sleep();
        time::forget(&sleeper);
        self.0.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &sleeper));
        guard.held = Some(guard.mutex.lock().unwrap());
    }

    pub(crate) fn notify_one(&self) {
        let mut sleepers = self.0.lock().unwrap();
        if !sleepers.is_empty() {
            sleepers.remove(0).wake();
        }
    }
}

shuttle::lazy_static! {
    /// The kernel's side of a futex: under one lock, a queue of sleepers for each word.
    static ref FUTEXES: shuttle::sync::Mutex<HashMap<usize, Vec<Arc<Sleeper>>>> =
        shuttle::sync::Mutex::new(HashMap::new());
}

pub(crate) fn wait_on(word: &AtomicU32, expected: u32) {
    let mut queues = FUTEXES.lock().unwrap();
    if word.load(Ordering::SeqCst) == expected {
        let sleeper = Sleeper::new();
        queues.entry(std::ptr::from_ref(word).addr()).or_default().push(sleeper.clone());
        drop(queues);
        sleeper.sleep();
    }
}

pub(crate) fn wake_all(word: &AtomicU32) {
    let sleepers = FUTEXES.lock().unwrap().remove(&std::ptr::from_ref(word).addr());
    for sleeper in sleepers.into_iter().flatten() {
        sleeper.wake();
    }
}

/// A step at which the schedule may go on with another thread, now and then for so long that others do a good
/// deal of work meanwhile.
pub(crate) fn may_switch() {
    let is_long = thread_rng().gen_range(0..32) == 0;
    let steps = if is_long { thread_rng().gen_range(0..200) } else { 0 };
    (0..steps).for_each(|_| shuttle::thread::yield_now());
    time::now();
}

pub(crate) fn move_all(word: &AtomicU32, expected: u32, other: &AtomicU32) {
    let mut queues = FUTEXES.lock().unwrap();
    if word.load(Ordering::SeqCst) == expected {
        let sleepers = queues.remove(&std::ptr::from_ref(word).addr()).unwrap_or_default();
        queues.entry(std::ptr::from_ref(other).addr()).or_default().extend(sleepers);
    }
}

/// The clock of a run.
pub(crate) mod time {
    use super::{Ordering, Sleeper};
    use shuttle::rand::{Rng, thread_rng};
    use std::sync::Arc;

    #[derive(Default)]
    struct Timers {
        sleepers: Vec<(u64, Arc<Sleeper>)>,
        is_over: bool,
    }

    shuttle::lazy_static! {
        static ref NOW: shuttle::sync::atomic::AtomicU64 = shuttle::sync::atomic::AtomicU64::new(1_000_000);
        static ref TIMERS: shuttle::sync::Mutex<Timers> = shuttle::sync::Mutex::new(Timers::default());
        static ref CHANGED: shuttle::sync::Condvar = shuttle::sync::Condvar::new();
    }

    pub(crate) fn now() -> u64 {
        NOW.load(Ordering::SeqCst)
    }

    /// Time passes by looking at it, for who does nothing else until it has.
    pub(crate) fn tick() -> u64 {
        NOW.fetch_add(10_000, Ordering::SeqCst)
    }

    pub(super) fn wake_at(at: u64, sleeper: &Arc<Sleeper>) {
        TIMERS.lock().unwrap().sleepers.push((at, sleeper.clone()));
        CHANGED.notify_one();
    }

    pub(super) fn forget(sleeper: &Arc<Sleeper>) {
        TIMERS.lock().unwrap().sleepers.retain(|(_, other)| !Arc::ptr_eq(other, sleeper));
    }

    pub(crate) fn sleep(nanos: u64) {
        let sleeper = Sleeper::new();
        wake_at(now() + nanos, &sleeper);
        sleeper.sleep();
    }

    pub(crate) fn end() {
        TIMERS.lock().unwrap().is_over = true;
        CHANGED.notify_one();
    }

    /// Lets time pass while somebody sleeps for it, until `end`: to the first who does, or half the way.
    pub(crate) fn run() {
        loop {
            let mut timers = TIMERS.lock().unwrap();
            while timers.sleepers.is_empty() && !timers.is_over {
                timers = CHANGED.wait(timers).unwrap();
            }
            let Some(first) = timers.sleepers.iter().map(|(at, _)| *at).min() else { return };
            let now = now();
            let next =
                if thread_rng().gen_range(0..3) == 0 { now + first.saturating_sub(now) / 2 } else { first };
            NOW.store(next.max(now), Ordering::SeqCst);
            let (due, later) = timers.sleepers.drain(..).partition(|(at, _)| *at <= next.max(now));
            timers.sleepers = later;
            drop(timers);
            let due: Vec<(u64, Arc<Sleeper>)> = due;
            for (_, sleeper) in due {
                sleeper.wake();
            }
            shuttle::thread::yield_now();
        }
    }
}
