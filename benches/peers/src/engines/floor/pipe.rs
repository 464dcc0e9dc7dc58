//! Several direct writes under way at once, answered in order.

use super::{DIRECT, Groups, LOG_BYTES, PAGE, Pages, SLOTS, no_store, push_record, zeroed};
use crate::store::*;
use parking_lot::Mutex;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const WRITES_MAX: u32 = 4;
/// No group is longer.
const GROUP_BYTES: usize = 256 << 10;

pub fn open_pipe(dir: &Path) -> Res<Box<dyn FencedStore>> {
    let room = || (Pages::new(GROUP_BYTES), Vec::new());
    Ok(Box::new(Pipe {
        queue: Mutex::new(Queue {
            records: Vec::new(),
            group: 0,
            writes: 0,
            durable: 0,
            written: 0,
            at: 0,
            spare: (0..WRITES_MAX).map(|_| room()).collect(),
        }),
        file: zeroed(&dir.join("log"), LOG_BYTES, DIRECT)?,
        groups: Groups::new(),
    }))
}

struct Pipe {
    queue: Mutex<Queue>,
    file: File,
    groups: Groups,
}

struct Queue {
    records: Vec<u8>,
    /// The group that these records will be.
    group: u32,
    /// How many are under way.
    writes: u32,
    /// Every group before this one is durable.
    durable: u32,
    /// Bit i: group `durable + i` is written, but one before it is not.
    written: u64,
    at: u64,
    spare: Vec<(Pages, Vec<u8>)>,
}

impl Queue {
    /// A leader that does not run for long must not let the others leave the window.
    fn may_lead(&self) -> bool {
        self.writes < WRITES_MAX && self.group.wrapping_sub(self.durable) < SLOTS as u32 / 2
    }

    /// Notes that a group is written; answers the groups that are durable by it, as a range that may wrap.
    fn note_written(&mut self, group: u32) -> (u32, u32) {
        let from = self.durable;
        self.written |= 1 << group.wrapping_sub(from);
        let count = self.written.trailing_ones();
        self.written = self.written.checked_shr(count).unwrap_or(0);
        self.durable = from.wrapping_add(count);
        (from, self.durable)
    }
}

impl FencedStore for Pipe {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let mut queue = self.queue.lock();
        push_record(&mut queue.records, key, token, value);
        let group = queue.group;
        loop {
            if group == queue.group && queue.may_lead() {
                queue.writes += 1;
                queue.group = group.wrapping_add(1);
                let (mut pages, mut records) = queue.spare.pop().expect("one for each write");
                std::mem::swap(&mut queue.records, &mut records);
                let bytes = records.len().next_multiple_of(PAGE) as u64;
                let at = if queue.at + bytes > LOG_BYTES { 0 } else { queue.at };
                queue.at = at + bytes;
                drop(queue);
                self.file.write_all_at(pages.fill(&records), at).expect("the disk keeps it");
                records.clear();

                let mut queue = self.queue.lock();
                queue.spare.push((pages, records));
                queue.writes -= 1;
                let (from, to) = queue.note_written(group);
                let next = (!queue.records.is_empty()).then_some(queue.group);
                drop(queue);
                if let Some(next) = next {
                    self.groups.nudge(next);
                }
                let mut done = from;
                while done != to {
                    self.groups.finish(done);
                    done = done.wrapping_add(1);
                }
                self.groups.wait(group);
                return Ok(Outcome::Accepted);
            }
            drop(queue);
            let word = self.groups.word(group);
            if self.groups.is_done(group) {
                return Ok(Outcome::Accepted);
            }
            queue = self.queue.lock();
            if group == queue.group && queue.may_lead() {
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
