//! A group commit of ours in front of an engine that can apply a durable batch. Writers queue their puts; one
//! thread checks the tokens of all that is queued (nobody else writes, so check and write are one step),
//! applies the accepted ones as one durable batch, and wakes their writers. What a user could build around an
//! engine whose own commits do not group.

use crate::store::*;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{JoinHandle, Thread};

pub struct Queued {
    /// `None` once closed.
    shared: Option<Arc<Shared>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    engine: Box<dyn FencedStore>,
    queue: Mutex<Queue>,
    rung: Condvar,
}

#[derive(Default)]
struct Queue {
    puts: Vec<Arc<Put>>,
    stop: bool,
}

struct Put {
    item: Item,
    answer: Mutex<Option<Result<Outcome, String>>>,
    writer: Thread,
}

impl Queued {
    pub fn new(engine: Box<dyn FencedStore>) -> Self {
        let shared = Arc::new(Shared { engine, queue: Mutex::default(), rung: Condvar::new() });
        let thread = std::thread::spawn({
            let shared = shared.clone();
            move || run(&shared)
        });
        Queued { shared: Some(shared), thread: Some(thread) }
    }

    fn shared(&self) -> &Shared {
        self.shared.as_ref().expect("open until it is closed")
    }

    fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared().queue.lock().stop = true;
            self.shared().rung.notify_one();
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn mark(&self, key: &[u8]) -> Res<Option<u64>> {
        let mut mark = None;
        self.engine.get(key, &mut |found| mark = found.map(|(_, token)| token))?;
        Ok(mark)
    }
}

fn run(shared: &Shared) {
    let mut puts = Vec::new();
    loop {
        {
            let mut queue = shared.queue.lock();
            while queue.puts.is_empty() {
                if queue.stop {
                    return;
                }
                shared.rung.wait(&mut queue);
            }
            std::mem::swap(&mut queue.puts, &mut puts);
        }
        let answers = commit(shared, &puts);
        for (put, answer) in puts.drain(..).zip(answers) {
            *put.answer.lock() = Some(answer);
            put.writer.unpark();
        }
    }
}

fn commit(shared: &Shared, puts: &[Arc<Put>]) -> Vec<Result<Outcome, String>> {
    // The last accepted put of each key.
    let mut accepted: HashMap<&[u8], &Item> = HashMap::with_capacity(puts.len());
    let judge =
        |put: &'_ Arc<Put>, accepted: &HashMap<&[u8], &Item>| match accepted.get(put.item.0.as_slice()) {
            Some(newer) => Ok(Some(newer.1)),
            None => shared.mark(&put.item.0).map_err(|e| e.to_string()),
        };
    let mut answers = Vec::with_capacity(puts.len());
    for put in puts {
        answers.push(match judge(put, &accepted) {
            Ok(Some(mark)) if put.item.1 < mark => Ok(Outcome::Rejected(mark)),
            Ok(_) => {
                accepted.insert(&put.item.0, &put.item);
                Ok(Outcome::Accepted)
            }
            Err(e) => Err(e),
        });
    }
    let batch: Vec<Item> = accepted.into_values().cloned().collect();
    if !batch.is_empty()
        && let Err(e) = shared.engine.load(&batch)
    {
        for answer in &mut answers {
            if let Ok(Outcome::Accepted) = answer {
                *answer = Err(e.to_string());
            }
        }
    }
    answers
}

impl FencedStore for Queued {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let shared = self.shared();
        // Marks only rise: a low token is refused without the queue.
        if let Some(mark) = shared.mark(key)?
            && token < mark
        {
            return Ok(Outcome::Rejected(mark));
        }
        let put = Arc::new(Put {
            item: (key.to_vec(), token, value.to_vec()),
            answer: Mutex::new(None),
            writer: std::thread::current(),
        });
        {
            let mut queue = shared.queue.lock();
            queue.puts.push(put.clone());
            if queue.puts.len() == 1 {
                shared.rung.notify_one();
            }
        }
        loop {
            if let Some(answer) = put.answer.lock().take() {
                return answer.map_err(Into::into);
            }
            std::thread::park();
        }
    }

    fn get(&self, key: &[u8], look: Look<'_>) -> Res<()> {
        self.shared().engine.get(key, look)
    }

    fn scan(&self, prefix: &[u8]) -> Res<(usize, usize)> {
        self.shared().engine.scan(prefix)
    }

    fn load(&self, items: &[Item]) -> Res<()> {
        self.shared().engine.load(items)
    }

    fn settle(&self) -> Res<()> {
        self.shared().engine.settle()
    }

    fn close(mut self: Box<Self>) -> Res<()> {
        self.stop();
        let shared = self.shared.take().and_then(Arc::into_inner).ok_or("the queue is still in use")?;
        shared.engine.close()
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.stop();
    }
}
