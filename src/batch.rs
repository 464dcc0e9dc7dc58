//! Several changes as one: all or nothing, across keys, fences and keyspaces.
//!
//! One job: collect changes, check each in the call that adds it, and hand them to the engine as one
//! write. A single put is a write of one change and does not come through here.
//!
//! Read next: `keyspace.rs`, where single changes come from.

use crate::admit::{Change, ChangeKind, Condition, Expect, Fence, Require, Write};
use crate::append::batch_bytes;
use crate::commit::Answer;
use crate::db::{Commit, Shared};
use crate::engine::{Engine, KeyspaceState};
use crate::error::{Error, Result};
use crate::format::op::INLINE_VALUE_BYTES;
use crate::keyspace::{Keyspace, check_key};
use crate::op::Class;
use crate::options::Scope;
use crate::sync::Arc;
use crate::types::{Excerpt, Lsn, MAX_BATCH_BYTES, OperationId, Token};
use rapidhash::quality::RandomState;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Changes that are applied together or not at all; made by [`Db::batch`](crate::Db::batch).
///
/// Each change carries its token; there is one token per fence. Of two changes to one key the later one
/// counts. Conditions see the state before the batch.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let db = tidewall::Db::open(dir.path().join("data"))?;
/// # use tidewall::{Expect, KeyspaceOptions, OperationId, Token, Tokens};
/// let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
/// let token = Token::new(7)?;
/// let mut batch = db.batch();
/// batch.expect(&rows, b"a", Expect::Absent)?;
/// batch.put(&rows, token, b"a", b"1")?;
/// batch.put(&rows, token, b"b", b"2")?;
/// batch.operation(OperationId::new(1));
/// let lsn = batch.commit()?;
/// assert_eq!(rows.get(b"b")?.expect("just written").lsn(), lsn);
/// // Committing leaves the batch as it is. A retry under its number is recognised, and changes nothing.
/// assert!(matches!(batch.commit(), Err(tidewall::Error::Duplicate { lsn: at }) if at == lsn));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// So a commit that was refused may be tried again: after [`Error::Busy`], [`Error::NoSpace`] or
/// [`Error::Conflict`] the batch was not applied. Where an answer was lost (a dropped [`Commit`], say) it may have
/// been: number the batch ([`Batch::operation`]), or the retry applies it twice. After [`Error::Indeterminate`] the store is to
/// be reopened, and the batch belongs to the store before: make the same one anew, under the same number.
#[derive(Debug)]
#[must_use = "a batch does nothing until it is committed"]
pub struct Batch {
    shared: Arc<Shared>,
    /// Keys and values, one behind the other.
    bytes: Vec<u8>,
    changes: Vec<Stored>,
    conditions: Vec<StoredCondition>,
    operation: Option<OperationId>,
    require: Require,
}

#[derive(Debug)]
struct Stored {
    kind: ChangeKind,
    keyspace: Arc<KeyspaceState>,
    token: Token,
    key: Range<usize>,
    value: Range<usize>,
}

#[derive(Debug)]
struct StoredCondition {
    keyspace: Arc<KeyspaceState>,
    key: Range<usize>,
    expect: Expect,
}

impl Batch {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Batch {
            shared,
            bytes: Vec::new(),
            changes: Vec::new(),
            conditions: Vec::new(),
            operation: None,
            require: Require::Newest,
        }
    }

    /// Writes a value.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty key or a keyspace of another store,
    /// [`Error::TooLarge`] for a key above its limit or a batch above [`MAX_BATCH_BYTES`]; the batch
    /// is as it was before.
    pub fn put(&mut self, keyspace: &Keyspace, token: Token, key: &[u8], value: &[u8]) -> Result<&mut Self> {
        check_key(key)?;
        self.add(ChangeKind::Put, keyspace, token, key, value)
    }

    /// Deletes a key; it need not be there. The mark of its fence stays.
    ///
    /// # Errors
    /// As [`Batch::put`].
    pub fn delete(&mut self, keyspace: &Keyspace, token: Token, key: &[u8]) -> Result<&mut Self> {
        check_key(key)?;
        self.add(ChangeKind::Delete, keyspace, token, key, b"")
    }

    /// Raises the mark of the fence of `key` to `token` without writing a value.
    ///
    /// # Errors
    /// As [`Batch::put`].
    pub fn raise(&mut self, keyspace: &Keyspace, token: Token, key: &[u8]) -> Result<&mut Self> {
        let fence = keyspace.fence_name(key)?;
        self.add(ChangeKind::Raise, keyspace, token, fence, b"")
    }

    /// Applies the batch only if `key` is as expected before it. A condition needs no token.
    ///
    /// # Errors
    /// As [`Batch::put`].
    pub fn expect(&mut self, keyspace: &Keyspace, key: &[u8], expect: Expect) -> Result<&mut Self> {
        check_key(key)?;
        self.check_store(keyspace)?;
        check_batch_bytes(self.changes.len(), self.bytes.len() + key.len())?;
        let key = self.store(key);
        self.conditions.push(StoredCondition { keyspace: keyspace.state.clone(), key, expect });
        Ok(self)
    }

    /// Numbers the batch, so that a retry of the whole batch is recognised ([`Error::Duplicate`]).
    ///
    /// The number counts for each fence that the batch touches, under the token presented for it: number upwards on
    /// all of them. One that was used by a write of only some of these fences is [`Error::InvalidArgument`], one
    /// below the last of any is [`Error::StaleOperation`]. Numbers are looked at before conditions, so a retry is a
    /// `Duplicate` also where its conditions do not hold any more.
    pub fn operation(&mut self, operation: OperationId) -> &mut Self {
        self.operation = Some(operation);
        self
    }

    /// What the batch requires of its tokens. Default: [`Require::Newest`].
    pub fn require(&mut self, require: Require) -> &mut Self {
        self.require = require;
        self
    }

    /// How many changes were added.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether no change was added.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Applies the batch and waits until it is durable.
    ///
    /// # Errors
    /// Any refusal, [`Error::InvalidArgument`] for two tokens for one fence or an empty batch,
    /// [`Error::NoSpace`], [`Error::Indeterminate`], [`Error::Poisoned`], [`Error::ReadOnly`], [`Error::Closed`].
    pub fn commit(&self) -> Result<Lsn> {
        let answer = self.begin()?;
        self.shared.engine.settle(answer)
    }

    /// Appends the batch and returns at once with the right to wait for it. Waits first while more
    /// bytes than [`Options::in_flight_bytes`](crate::Options::in_flight_bytes) are in flight.
    ///
    /// # Errors
    /// Errors that are known at once; the others come out of the [`Commit`].
    pub fn submit(&self) -> Result<Commit> {
        self.shared.wait_for_room()?;
        let answer = self.begin()?;
        Ok(Commit::new(&self.shared, answer))
    }

    /// As [`Batch::submit`], but never waits.
    ///
    /// # Errors
    /// [`Error::Busy`] while too many bytes are in flight, else as [`Batch::submit`].
    pub fn try_submit(&self) -> Result<Commit> {
        self.shared.check_room()?;
        let answer = self.begin()?;
        Ok(Commit::new(&self.shared, answer))
    }

    fn add(
        &mut self,
        kind: ChangeKind,
        keyspace: &Keyspace,
        token: Token,
        key: &[u8],
        value: &[u8],
    ) -> Result<&mut Self> {
        self.check_store(keyspace)?;
        check_batch_bytes(self.changes.len() + 1, self.bytes.len() + key.len() + value.len())?;
        let key = self.store(key);
        let value = self.store(value);
        self.changes.push(Stored { kind, keyspace: keyspace.state.clone(), token, key, value });
        Ok(self)
    }

    fn store(&mut self, bytes: &[u8]) -> Range<usize> {
        let from = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        from..self.bytes.len()
    }

    fn check_store(&self, keyspace: &Keyspace) -> Result<()> {
        if Arc::ptr_eq(&self.shared, &keyspace.shared) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "keyspace {:?} belongs to another store than the batch, or to an earlier opening of it: open the keyspace \
             again",
            keyspace.name()
        )))
    }

    fn begin(&self) -> Result<Answer> {
        if self.changes.is_empty() {
            return Err(Error::invalid("a batch without a change: add a put, delete or raise"));
        }
        let engine = &self.shared.engine;
        let mut plan = Plan::with_capacity(self.changes.len());
        // Backwards, so that of two changes to one key the later one is met first.
        for stored in self.changes.iter().rev() {
            let (key, value) = (&self.bytes[stored.key.clone()], &self.bytes[stored.value.clone()]);
            plan.add(engine, stored, key, value)?;
        }
        plan.changes.reverse();
        let conditions: Vec<_> = self
            .conditions
            .iter()
            .map(|stored| {
                let key = &self.bytes[stored.key.clone()];
                let hash = engine.hash(&stored.keyspace, Class::Key, key);
                Condition { keyspace: &stored.keyspace, key, hash, expect: stored.expect }
            })
            .collect();
        engine.begin(&Write {
            changes: &plan.changes,
            fences: &plan.fences,
            conditions: &conditions,
            operation: self.operation,
            require: self.require,
            seen: &[],
        })
    }
}

/// The batch as the engine wants it: each key once, each fence once.
struct Plan<'a> {
    changes: Vec<Change<'a>>,
    fences: Vec<Fence<'a>>,
    known: HashMap<(u16, &'a [u8]), Known, RandomState>,
    /// Keys with a change, where more than one may have the same fence.
    keys: HashSet<(u16, &'a [u8]), RandomState>,
}

/// A fence of the batch: which one, and whether it is raised, and its key changed where it has one only.
#[derive(Clone, Copy)]
struct Known {
    fence: usize,
    is_raised: bool,
    is_changed: bool,
}

impl<'a> Plan<'a> {
    fn with_capacity(changes: usize) -> Self {
        Plan {
            changes: Vec::with_capacity(changes),
            fences: Vec::new(),
            known: HashMap::with_hasher(RandomState::new()),
            keys: HashSet::with_hasher(RandomState::new()),
        }
    }

    fn add(&mut self, engine: &Engine, stored: &'a Stored, key: &'a [u8], value: &'a [u8]) -> Result<()> {
        let (kind, keyspace, token) = (stored.kind, &stored.keyspace, stored.token);
        let raises = kind == ChangeKind::Raise;
        let is_fence = keyspace.options.scope == Scope::Key;
        let name = if raises { key } else { keyspace.fence_of(key) };
        if self.known.is_empty() && is_fence {
            // Most likely each change has one of its own.
            self.known.reserve(self.changes.capacity());
        }
        let fences = &mut self.fences;
        let known = self.known.entry((keyspace.id.0, name)).or_insert_with(|| {
            let hashes = engine.fence_hashes(keyspace, name);
            fences.push(Fence { keyspace, name, hashes, token, raises });
            Known { fence: fences.len() - 1, is_raised: false, is_changed: false }
        });
        let fence = &mut self.fences[known.fence];
        if fence.token != token {
            return Err(Error::invalid(format!(
                "two tokens for the fence {} in one batch: {token} and {}",
                Excerpt::new(name),
                fence.token
            )));
        }
        fence.raises |= raises;
        let is_new = match (raises, is_fence) {
            (true, _) => !std::mem::replace(&mut known.is_raised, true),
            (false, true) => !std::mem::replace(&mut known.is_changed, true),
            (false, false) => self.keys.insert((keyspace.id.0, key)),
        };
        if is_new {
            let is_key = is_fence && !raises;
            let hash = if is_key { fence.hashes.key } else { engine.hash(keyspace, Class::Key, key) };
            let value_checksum = large_checksum(value);
            self.changes.push(Change {
                kind,
                keyspace,
                key,
                value,
                hash,
                value_checksum,
                fence: known.fence,
            });
        }
        Ok(())
    }
}

/// The checksum of a value that has one of its own; made outside of any lock.
pub(crate) fn large_checksum(value: &[u8]) -> Option<u32> {
    (value.len() > INLINE_VALUE_BYTES).then(|| crc32fast::hash(value))
}

/// What a batch may hold, bookkeeping included.
pub(crate) fn check_batch_bytes(changes: usize, payload: usize) -> Result<()> {
    let size = batch_bytes(changes, payload);
    if size > MAX_BATCH_BYTES {
        return Err(Error::TooLarge {
            what: "a batch (or value, with its bookkeeping)",
            size,
            limit: MAX_BATCH_BYTES,
        });
    }
    Ok(())
}
