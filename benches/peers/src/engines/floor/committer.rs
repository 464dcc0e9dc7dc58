//! One thread commits.

use super::{Groups, Log, no_store, push_record};
use crate::store::*;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub fn open_committer(dir: &Path) -> Res<Box<dyn FencedStore>> {
    open(dir, Duration::ZERO)
}

pub fn open_gather(dir: &Path) -> Res<Box<dyn FencedStore>> {
    open(dir, Duration::from_micros(40))
}

fn open(dir: &Path, gather: Duration) -> Res<Box<dyn FencedStore>> {
    let log = Log::open(dir, false)?;
    let shared = Arc::new(Shared {
        queue: Mutex::new(Queue { records: Vec::new(), count: 0, group: 0, stop: false }),
        groups: Groups::new(),
        asleep: AtomicU32::new(0),
    });
    let thread = std::thread::spawn({
        let shared = shared.clone();
        move || run(&shared, log, gather)
    });
    Ok(Box::new(Committer { shared, thread: Some(thread) }))
}

struct Committer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    groups: Groups,
    /// 1 while the committer sleeps.
    asleep: AtomicU32,
}

struct Queue {
    records: Vec<u8>,
    count: u32,
    /// The group that these records will be.
    group: u32,
    stop: bool,
}

impl Shared {
    fn push(&self, key: &[u8], token: u64, value: &[u8]) -> u32 {
        let group = {
            let mut queue = self.queue.lock();
            push_record(&mut queue.records, key, token, value);
            queue.count += 1;
            queue.group
        };
        self.wake();
        group
    }

    fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst) == 1 && self.asleep.swap(0, Ordering::SeqCst) == 1 {
            atomic_wait::wake_one(&self.asleep);
        }
    }
}

fn run(shared: &Shared, mut log: Log, gather: Duration) {
    let mut records = Vec::new();
    let mut last_count = 0;
    loop {
        let group = {
            let mut queue = shared.queue.lock();
            let start = Instant::now();
            while !gather.is_zero() && queue.count < last_count && start.elapsed() < gather {
                drop(queue);
                std::thread::yield_now();
                queue = shared.queue.lock();
            }
            while queue.records.is_empty() {
                if queue.stop {
                    return;
                }
                shared.asleep.store(1, Ordering::SeqCst);
                drop(queue);
                atomic_wait::wait(&shared.asleep, 1);
                queue = shared.queue.lock();
            }
            shared.asleep.store(0, Ordering::SeqCst);
            std::mem::swap(&mut queue.records, &mut records);
            last_count = std::mem::take(&mut queue.count);
            let group = queue.group;
            queue.group = group.wrapping_add(1);
            group
        };
        log.append(&records);
        records.clear();
        shared.groups.finish(group);
    }
}

impl FencedStore for Committer {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let group = self.shared.push(key, token, value);
        self.shared.groups.wait(group);
        Ok(Outcome::Accepted)
    }

    fn pipeline(
        &self,
        window: usize,
        next: &mut dyn FnMut() -> Option<Item>,
        durable: &mut dyn FnMut(),
    ) -> Res<()> {
        let mut in_flight = VecDeque::with_capacity(window);
        while let Some((key, token, value)) = next() {
            if in_flight.len() == window
                && let Some(oldest) = in_flight.pop_front()
            {
                self.shared.groups.wait(oldest);
                durable();
            }
            in_flight.push_back(self.shared.push(&key, token, &value));
        }
        for group in in_flight {
            self.shared.groups.wait(group);
            durable();
        }
        Ok(())
    }

    no_store!();
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.shared.queue.lock().stop = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
