//! Whoever finds nobody committing commits all that is queued.

use super::{Groups, Log, no_store, push_record};
use crate::store::*;
use parking_lot::Mutex;
use std::path::Path;

pub fn open_leader(dir: &Path) -> Res<Box<dyn FencedStore>> {
    open(dir, false)
}

pub fn open_direct(dir: &Path) -> Res<Box<dyn FencedStore>> {
    open(dir, true)
}

fn open(dir: &Path, direct: bool) -> Res<Box<dyn FencedStore>> {
    Ok(Box::new(Leader {
        queue: Mutex::new(Queue { records: Vec::new(), group: 0, led: false }),
        log: Mutex::new((Log::open(dir, direct)?, Vec::new())),
        groups: Groups::new(),
    }))
}

struct Leader {
    queue: Mutex<Queue>,
    /// The log, and room for the records of the group under way.
    log: Mutex<(Log, Vec<u8>)>,
    groups: Groups,
}

struct Queue {
    records: Vec<u8>,
    /// The group that these records will be.
    group: u32,
    /// Somebody commits.
    led: bool,
}

impl FencedStore for Leader {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let mut queue = self.queue.lock();
        push_record(&mut queue.records, key, token, value);
        let group = queue.group;
        loop {
            if group == queue.group && !queue.led {
                queue.led = true;
                queue.group = group.wrapping_add(1);
                let mut log = self.log.lock();
                let (log, records) = &mut *log;
                std::mem::swap(&mut queue.records, records);
                drop(queue);
                log.append(records);
                records.clear();
                let more = {
                    let mut queue = self.queue.lock();
                    queue.led = false;
                    !queue.records.is_empty()
                };
                if more {
                    // One of the next group leads, if none of this one comes back first.
                    self.groups.nudge(group.wrapping_add(1));
                }
                self.groups.finish(group);
                return Ok(Outcome::Accepted);
            }
            drop(queue);
            // The word is read before the state is looked at again, and whoever changes the state changes the
            // word after that: no wake is lost.
            let word = self.groups.word(group);
            if self.groups.is_done(group) {
                return Ok(Outcome::Accepted);
            }
            queue = self.queue.lock();
            if group == queue.group && !queue.led {
                continue;
            }
            drop(queue);
            self.groups.sleep(group, word);
            if self.groups.is_done(group) {
                return Ok(Outcome::Accepted);
            }
            queue = self.queue.lock();
        }
    }

    no_store!();
}
