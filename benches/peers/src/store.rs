//! What every engine is asked to do, and the little that several of them need for it.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::error::Error;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whatever an engine complains about: it ends the cell.
pub type Res<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// What became of a fenced put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Accepted,
    /// Names the mark, which is above the token.
    Rejected(u64),
}

/// One record: key, token, value.
pub type Item = (Vec<u8>, u64, Vec<u8>);

/// Looks at a value and its token, if there are any.
pub type Look<'a> = &'a mut dyn FnMut(Option<(&[u8], u64)>);

/// A map from keys to values with a token each.
pub trait FencedStore: Send + Sync {
    /// Puts the value unless the key's token is above `token`: check and write as one step. Answers
    /// [`Outcome::Accepted`] only when the write is durable.
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome>;

    fn get(&self, key: &[u8], look: Look<'_>) -> Res<()>;

    /// Reads every value whose key has the prefix; answers how many they are and the sum of their lengths.
    fn scan(&self, prefix: &[u8]) -> Res<(usize, usize)>;

    /// Puts without a check, durable once, at the end, the way the engine's documents say is fastest.
    fn load(&self, items: &[Item]) -> Res<()>;

    /// Fenced puts of what `next` gives until it gives nothing, up to `window` of them in flight; calls
    /// `durable` for each that is. For engines that can be asked without waiting for the answer.
    fn pipeline(
        &self,
        _window: usize,
        _next: &mut dyn FnMut() -> Option<Item>,
        _durable: &mut dyn FnMut(),
    ) -> Res<()> {
        Err("this engine answers a put only when it is durable".into())
    }

    /// After a load: waits for background work, if the engine says when it is done.
    fn settle(&self) -> Res<()> {
        Ok(())
    }

    /// A clean close.
    fn close(self: Box<Self>) -> Res<()> {
        drop(self);
        Ok(())
    }
}

/// How the engines that know only values store a record: the token in eight bytes, then the value.
pub fn encode(token: u64, value: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(8 + value.len());
    record.extend_from_slice(&token.to_le_bytes());
    record.extend_from_slice(value);
    record
}

/// The value and the token of a record.
pub fn decode(record: &[u8]) -> (&[u8], u64) {
    (&record[8..], token_of(record))
}

pub fn token_of(record: &[u8]) -> u64 {
    u64::from_le_bytes(*record.first_chunk().expect("a record starts with its token"))
}

/// The first key behind all that have the prefix, whose last byte is not 255.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    *end.last_mut().expect("a prefix is not empty") += 1;
    end
}

/// A lock per key, near enough, for engines without a step that reads, checks and writes.
pub struct Stripes {
    locks: Vec<Stripe>,
    hasher: foldhash::fast::RandomState,
}

/// A cache line of its own.
#[repr(align(64))]
#[derive(Default)]
struct Stripe(Mutex<()>);

impl Stripes {
    pub fn new() -> Self {
        Stripes {
            locks: std::iter::repeat_with(Stripe::default).take(4096).collect(),
            hasher: Default::default(),
        }
    }

    pub fn lock(&self, key: &[u8]) -> MutexGuard<'_, ()> {
        self.locks[self.hasher.hash_one(key) as usize % self.locks.len()].0.lock()
    }
}

/// One sync for all who wait: whoever finds none running runs one for every write before it.
pub struct GroupSync {
    written: AtomicU64,
    state: Mutex<SyncState>,
    done: Condvar,
}

#[derive(Default)]
struct SyncState {
    durable: u64,
    running: bool,
}

impl GroupSync {
    pub fn new() -> Self {
        GroupSync { written: AtomicU64::new(0), state: Mutex::default(), done: Condvar::new() }
    }

    /// Returns once a `sync` that began after this call is done.
    pub fn sync(&self, sync: impl Fn() -> Res<()>) -> Res<()> {
        let mine = self.written.fetch_add(1, Ordering::AcqRel) + 1;
        let mut state = self.state.lock();
        while state.durable < mine {
            if state.running {
                self.done.wait(&mut state);
                continue;
            }
            state.running = true;
            drop(state);
            // Lets in the writers that wait for a lock of the engine, so that the group is not one.
            std::thread::yield_now();
            let covers = self.written.load(Ordering::Acquire);
            let result = sync();
            state = self.state.lock();
            state.running = false;
            if result.is_ok() {
                state.durable = state.durable.max(covers);
            }
            self.done.notify_all();
            result?;
        }
        Ok(())
    }
}
