//! One keyspace: every way to write to it, each fenced, and every way to read it.
//!
//! Read next: `guard.rs`, where tokens come from.

use crate::admit::{Change, ChangeKind, Condition, Expect, Fence, Refused, Require, Write};
use crate::append::{batch_bytes, frame_bytes, room};
use crate::batch::{check_batch_bytes, large_checksum};
use crate::commit::Answer;
use crate::db::{Commit, Shared};
use crate::engine::{KeyspaceState, Tail, When};
use crate::error::{Error, Result};
use crate::index::{prefix_end, share_a_tag};
use crate::log::pool::Need;
use crate::op::{Class, Kind};
use crate::options::{KeyspaceOptions, Scope};
use crate::snapshot::Value;
use crate::sync::Arc;
use crate::types::{Lsn, MAX_BATCH_BYTES, MAX_KEY_BYTES, Mark, OperationId, Token};
use crate::view::{Iter, KeyRange, Snapshot};
use std::fmt;
use std::ops::{Bound, ControlFlow};

/// A named set of keys with one rule for its fences; opened by [`Db::keyspace`](crate::Db::keyspace).
///
/// Cheap to clone and to send. Every call that changes something takes a [`Token`] and is refused
/// when that is below the mark of the key's fence.
///
/// Which of the calls that raise a mark is for what ([`Keyspace::raise`], [`Keyspace::raise_all`],
/// [`Keyspace::break_lease`] and others) stands in a table of the [guide](crate::guide#which-raise-is-for-what).
#[derive(Clone)]
pub struct Keyspace {
    pub(crate) shared: Arc<Shared>,
    pub(crate) state: Arc<KeyspaceState>,
}

/// From this length of its value on, a write looks at the mark before anything is made of the value.
const LOOK_FIRST_BYTES: usize = 8192;

/// What a raise did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Raised {
    /// The mark was below the token and is now the token, durably, since this lsn.
    Now(Lsn),
    /// The mark was the token already, durably.
    Already,
}

/// What a bounded delete did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub struct Deleted {
    /// How many keys were deleted.
    pub keys: usize,
    /// Whether keys with the prefix are left.
    pub more: bool,
}

impl Keyspace {
    /// The name.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// The options the keyspace was created with.
    pub fn options(&self) -> KeyspaceOptions {
        self.state.options
    }

    /// The fence that guards `key`: `key` itself, its prefix, or `b""`, by the scope.
    pub fn fence<'k>(&self, key: &'k [u8]) -> &'k [u8] {
        self.state.fence_of(key)
    }

    // Writing. Each of these is a row in the table of `tests/mutators.rs`.

    /// Writes a value and waits until it is durable.
    ///
    /// # Errors
    /// [`Error::Fenced`]: stop. [`Error::UnknownToken`]: acquire a lease on this fence.
    /// [`Error::TokenJump`], [`Error::NeedsFloor`]: external tokens. [`Error::InvalidArgument`],
    /// [`Error::TooLarge`]: the key or value. [`Error::NoSpace`]: free space, try again.
    /// [`Error::Indeterminate`], [`Error::Poisoned`]: reopen the store. [`Error::ReadOnly`], [`Error::Closed`].
    pub fn put(&self, token: Token, key: &[u8], value: &[u8]) -> Result<Lsn> {
        self.write(ChangeKind::Put, token, key, value, None, None)
    }

    /// As [`Keyspace::put`], numbered: a retry under the same number is recognised.
    ///
    /// # Errors
    /// As [`Keyspace::put`], and [`Error::Duplicate`]: it was done before;
    /// [`Error::StaleOperation`]: a later number was used before.
    pub fn put_operation(
        &self,
        token: Token,
        operation: OperationId,
        key: &[u8],
        value: &[u8],
    ) -> Result<Lsn> {
        self.write(ChangeKind::Put, token, key, value, Some(operation), None)
    }

    /// As [`Keyspace::put`], if the key is as expected.
    ///
    /// # Errors
    /// As [`Keyspace::put`], and [`Error::Conflict`]: read again, decide again.
    pub fn put_if(&self, token: Token, key: &[u8], value: &[u8], expect: Expect) -> Result<Lsn> {
        self.write(ChangeKind::Put, token, key, value, None, Some(expect))
    }

    /// Deletes a key, which need not be there, and waits until that is durable. The mark of its fence
    /// never goes down.
    ///
    /// # Errors
    /// As [`Keyspace::put`].
    pub fn delete(&self, token: Token, key: &[u8]) -> Result<Lsn> {
        self.write(ChangeKind::Delete, token, key, b"", None, None)
    }

    /// As [`Keyspace::delete`], numbered as [`Keyspace::put_operation`].
    ///
    /// # Errors
    /// As [`Keyspace::put_operation`].
    pub fn delete_operation(&self, token: Token, operation: OperationId, key: &[u8]) -> Result<Lsn> {
        self.write(ChangeKind::Delete, token, key, b"", Some(operation), None)
    }

    /// As [`Keyspace::delete`], if the key is as expected.
    ///
    /// # Errors
    /// As [`Keyspace::put_if`].
    pub fn delete_if(&self, token: Token, key: &[u8], expect: Expect) -> Result<Lsn> {
        self.write(ChangeKind::Delete, token, key, b"", None, Some(expect))
    }

    /// Appends a put and returns at once with the right to wait for it; see
    /// [`Batch::submit`](crate::Batch::submit).
    ///
    /// # Errors
    /// As [`Keyspace::put`], where they are known at once; the others come out of the [`Commit`].
    pub fn submit_put(&self, token: Token, key: &[u8], value: &[u8]) -> Result<Commit> {
        self.shared.wait_for_room()?;
        let answer = self.begin(ChangeKind::Put, token, key, value, None, None)?;
        Ok(Commit::new(&self.shared, answer))
    }

    /// As [`Keyspace::submit_put`] for a delete.
    ///
    /// # Errors
    /// As [`Keyspace::submit_put`].
    pub fn submit_delete(&self, token: Token, key: &[u8]) -> Result<Commit> {
        self.shared.wait_for_room()?;
        let answer = self.begin(ChangeKind::Delete, token, key, b"", None, None)?;
        Ok(Commit::new(&self.shared, answer))
    }

    /// As [`Keyspace::submit_put`], but never waits.
    ///
    /// # Errors
    /// [`Error::Busy`] while too many bytes are in flight, else as [`Keyspace::submit_put`].
    pub fn try_submit_put(&self, token: Token, key: &[u8], value: &[u8]) -> Result<Commit> {
        self.shared.check_room()?;
        let answer = self.begin(ChangeKind::Put, token, key, value, None, None)?;
        Ok(Commit::new(&self.shared, answer))
    }

    /// Deletes every key with the prefix, each against its own fence, all or nothing. Fences without a
    /// present key are not touched. An empty prefix means every key.
    ///
    /// Where there is no such key, the token is judged all the same: against the mark of the one fence that they
    /// would have, if the prefix says which (it holds the delimiter, or the keyspace is one fence); else against the
    /// floor of the keyspace, and a token that this store never granted is refused.
    ///
    /// # Errors
    /// As [`Keyspace::delete`]; [`Error::TooLarge`] when they do not fit one batch:
    /// [`Keyspace::delete_prefix_some`] goes step by step.
    pub fn delete_prefix(&self, token: Token, prefix: &[u8]) -> Result<Deleted> {
        self.delete_keys(token, prefix, usize::MAX, true)
    }

    /// Deletes up to `limit` keys with the prefix, as many as fit one batch, those together or not at
    /// all, and says whether more are left. Where there is no key, as [`Keyspace::delete_prefix`].
    ///
    /// # Errors
    /// As [`Keyspace::delete`].
    pub fn delete_prefix_some(&self, token: Token, prefix: &[u8], limit: usize) -> Result<Deleted> {
        self.delete_keys(token, prefix, limit, false)
    }

    /// Raises the mark of the fence of `key` to `token`, durably: whoever writes under a lower one is
    /// fenced from here on. For strict hand-off, before the new owner starts.
    ///
    /// `key` is any key of the fence, or the fence's own name. A token that this store granted for
    /// another fence may be carried over on purpose.
    ///
    /// # Errors
    /// [`Error::Fenced`]: a newer token was here. [`Error::UnknownToken`]: never granted.
    /// [`Error::NeedsFloor`], [`Error::TokenJump`]: external tokens. [`Error::InvalidArgument`],
    /// [`Error::TooLarge`]: the key. [`Error::NoSpace`], [`Error::Indeterminate`], [`Error::Poisoned`],
    /// [`Error::ReadOnly`], [`Error::Closed`] as for a put.
    pub fn raise(&self, token: Token, key: &[u8]) -> Result<Raised> {
        let name = self.fence_name(key)?;
        let engine = &self.shared.engine;
        let hashes = engine.fence_hashes(&self.state, name);
        let seen = [engine.check_early(&self.state, name, hashes, token)?];
        let fences = [Fence { keyspace: &self.state, name, hashes, token, raises: true }];
        let change = Change {
            kind: ChangeKind::Raise,
            keyspace: &self.state,
            key: name,
            value: b"",
            hash: hashes.own,
            value_checksum: None,
            fence: 0,
        };
        let write = Write {
            changes: &[change],
            fences: &fences,
            conditions: &[],
            operation: None,
            require: Require::Newest,
            seen: &seen,
        };
        let (answer, already) =
            engine.with_room(room(frame_bytes(1, name.len()), 1), Need::Privileged, |tail| {
                let (judged, already) = self.judge_raise(tail, &write);
                (engine.answer(tail, judged), already)
            })?;
        let lsn = engine.settle(answer)?;
        Ok(if already { Raised::Already } else { Raised::Now(lsn) })
    }

    /// Appends the raise, or finds that the own mark (not the floor: a raise makes sure that the fence
    /// itself knows) is the token already.
    fn judge_raise(&self, tail: &mut Tail, write: &Write<'_>) -> (Result<Lsn, Refused>, bool) {
        let engine = &self.shared.engine;
        let guard = crossbeam_epoch::pin();
        let mut work = std::mem::take(&mut tail.work);
        let mut already = false;
        let judged = engine.judge(tail, write, &guard, &mut work.views).and_then(|()| {
            match (work.views.first(), write.fences.first()) {
                (Some(view), Some(fence)) if view.state.mark == fence.token.get() => {
                    already = true;
                    Ok(view.state.lsn)
                }
                _ => Ok(engine.append_write(tail, &mut work, write, &guard)?),
            }
        });
        tail.work = work;
        (judged, already)
    }

    // Reading.

    /// The value of a key, as of the newest durable write. A key that cannot be written, empty or above
    /// [`MAX_KEY_BYTES`], is absent as any other that was not.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the bytes on disk are not what was written, [`Error::Io`] when they
    /// cannot be read, [`Error::Closed`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>> {
        let engine = &self.shared.engine;
        engine.check_readable()?;
        engine.value(&self.state, key, When::Visible)
    }

    /// Runs `read` on the value of a key without copying it.
    ///
    /// # Errors
    /// As [`Keyspace::get`].
    pub fn get_with<T>(&self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let engine = &self.shared.engine;
        engine.check_readable()?;
        engine.value_with(&self.state, key, When::Visible, read)
    }

    /// Whether a key has a value. An empty key, or one above [`MAX_KEY_BYTES`], never has.
    ///
    /// # Errors
    /// As [`Keyspace::get`].
    pub fn contains_key(&self, key: &[u8]) -> Result<bool> {
        let engine = &self.shared.engine;
        engine.check_readable()?;
        engine.contains(&self.state, key, When::Visible)
    }

    /// The mark of the fence of `key` (any key of it, or its name), to look at: the highest token it
    /// has admitted, durably. `None` when there is none yet.
    ///
    /// # Errors
    /// As [`Keyspace::get`].
    pub fn mark(&self, key: &[u8]) -> Result<Option<Mark>> {
        self.shared.engine.check_readable()?;
        self.shared.engine.mark(&self.state, self.fence_name(key)?)
    }

    /// Every key and value in the order of the keys, as of now: a snapshot of its own.
    ///
    /// Above 4096 keys, the first scan since the open (or since there are so many) puts them in order, which takes
    /// about 0.15 s a million keys of the store. From then on that is kept up with each new key.
    pub fn iter(&self) -> Iter {
        self.range(..)
    }

    /// The keys and values in a range of keys, as of now.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// # use tidewall::{KeyspaceOptions, Token, Tokens};
    /// # let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    /// for key in [b"a", b"b", b"c"] {
    ///     rows.put(Token::new(1)?, key, b"value")?;
    /// }
    /// let keys: Result<Vec<_>, _> = rows.range(b"b"..).rev().map(|item| item.map(|(key, _)| key)).collect();
    /// assert_eq!(keys?, [b"c", b"b"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn range(&self, range: impl KeyRange) -> Iter {
        Snapshot::new(&self.shared).range(self, range)
    }

    /// The keys and values whose keys start with `prefix`, as of now.
    pub fn prefix(&self, prefix: &[u8]) -> Iter {
        Snapshot::new(&self.shared).prefix(self, prefix)
    }

    pub(crate) fn fence_name<'k>(&self, key: &'k [u8]) -> Result<&'k [u8]> {
        if self.state.options.scope != Scope::Keyspace {
            check_key(key)?;
        }
        Ok(self.state.fence_of(key))
    }

    fn write(
        &self,
        kind: ChangeKind,
        token: Token,
        key: &[u8],
        value: &[u8],
        operation: Option<OperationId>,
        expect: Option<Expect>,
    ) -> Result<Lsn> {
        let answer = self.begin(kind, token, key, value, operation, expect)?;
        self.shared.engine.settle(answer)
    }

    fn begin(
        &self,
        kind: ChangeKind,
        token: Token,
        key: &[u8],
        value: &[u8],
        operation: Option<OperationId>,
        expect: Option<Expect>,
    ) -> Result<Answer> {
        check_key(key)?;
        check_batch_bytes(1, key.len() + value.len())?;
        let engine = &self.shared.engine;
        let keyspace = &self.state;
        let name = keyspace.fence_of(key);
        let hashes = engine.fence_hashes(keyspace, name);
        let is_fence = keyspace.options.scope == Scope::Key;
        let hash = if is_fence { hashes.key } else { engine.hash(keyspace, Class::Key, key) };
        let fence = Fence { keyspace, name, hashes, token, raises: false };
        // A look at the mark costs less than the checksum of such a value, which a refusal does not need.
        if value.len() >= LOOK_FIRST_BYTES {
            engine.check_early(keyspace, name, hashes, token)?;
        }
        let change =
            Change { kind, keyspace, key, value, hash, value_checksum: large_checksum(value), fence: 0 };
        let condition = expect.map(|expect| Condition { keyspace, key, hash, expect });
        engine.begin(&Write {
            changes: &[change],
            fences: &[fence],
            conditions: condition.as_slice(),
            operation,
            require: Require::Newest,
            seen: &[],
        })
    }

    /// The keys are taken from the state at the delete's own place in the order: all that has been
    /// appended, found under the tail lock.
    fn delete_keys(&self, token: Token, prefix: &[u8], limit: usize, all: bool) -> Result<Deleted> {
        let engine = &self.shared.engine;
        let mut needed = room(frame_bytes(1, 0), 1);
        engine.sort_keys(&self.state)?;
        loop {
            let step = engine.with_room(needed, Need::Privileged, |tail| {
                let found = self.present_keys(prefix, limit)?;
                if all && found.more {
                    // At least: counting stopped at the first key too many.
                    let size = MAX_BATCH_BYTES + 1;
                    return Err(Error::TooLarge { what: "a batch of deletes", size, limit: MAX_BATCH_BYTES });
                }
                let room = room(found.frame_bytes(), found.ops);
                if !tail.active.as_ref().is_some_and(|active| active.fits(room)) {
                    return Ok(Step::NeedsRoom(room));
                }
                let answer = self.delete_found(tail, token, prefix, &found);
                Ok(Step::Done(answer, found.keys.len(), found.more))
            })??;
            match step {
                Step::NeedsRoom(room) => needed = room,
                Step::Done(answer, keys, more) => {
                    engine.settle(answer)?;
                    return Ok(Deleted { keys, more });
                }
            }
        }
    }

    /// Under the tail lock.
    fn present_keys(&self, prefix: &[u8], limit: usize) -> Result<Present> {
        let engine = &self.shared.engine;
        let mut found = Present { keys: Vec::new(), ops: 0, payload: 0, more: false };
        let mut failed = None;
        let to = prefix_end(prefix);
        let visited =
            self.state.keys.for_each_in(Bound::Included(prefix), to.as_ref().map(Vec::as_slice), |key| {
                let guard = crossbeam_epoch::pin();
                let hash = engine.hash(&self.state, Class::Key, key);
                match engine.newest(&self.state, Class::Key, key, hash, &guard) {
                    Ok(Some(op)) if op.head.kind == Kind::Put => {}
                    Ok(_) => return ControlFlow::Continue(()),
                    Err(e) => {
                        failed = Some(e);
                        return ControlFlow::Break(());
                    }
                }
                // The mark of its fence may have to be an op of its own.
                let name = self.state.fence_of(key);
                let own = || engine.hash(&self.state, Class::Fence, name);
                let is_apart = self.state.options.scope != Scope::Key && share_a_tag(hash, own());
                let (more, name) = if is_apart { (2, name.len()) } else { (1, 0) };
                let (ops, payload) = (found.ops + more, found.payload + key.len() + name);
                if found.keys.len() == limit || batch_bytes(ops, payload) > MAX_BATCH_BYTES {
                    found.more = true;
                    return ControlFlow::Break(());
                }
                (found.ops, found.payload) = (ops, payload);
                found.keys.push(key.to_vec());
                ControlFlow::Continue(())
            });
        debug_assert_eq!(visited, Ok(()), "sorted before, for ever");
        match failed {
            Some(error) => Err(error),
            None => Ok(found),
        }
    }

    fn delete_found(&self, tail: &mut Tail, token: Token, prefix: &[u8], found: &Present) -> Answer {
        let engine = &self.shared.engine;
        let keyspace = &self.state;
        let mut fences: Vec<Fence<'_>> = Vec::new();
        let mut changes = Vec::new();
        for key in &found.keys {
            let name = keyspace.fence_of(key);
            // Keys of one fence share a prefix, so they follow one another.
            if fences.last().is_none_or(|fence| fence.name != name) {
                let hashes = engine.fence_hashes(keyspace, name);
                fences.push(Fence { keyspace, name, hashes, token, raises: false });
            }
            changes.push(Change {
                kind: ChangeKind::Delete,
                keyspace,
                key,
                value: b"",
                hash: engine.hash(keyspace, Class::Key, key),
                value_checksum: None,
                fence: fences.len() - 1,
            });
        }
        let write = Write {
            changes: &changes,
            fences: &fences,
            conditions: &[],
            operation: None,
            require: Require::Newest,
            seen: &[],
        };
        let judged = match changes.is_empty() {
            true => self.judge_nothing(tail, token, prefix).map(|()| tail.last()),
            false => engine.judge_and_append(tail, &write),
        };
        // Also a refusal rests on which keys are there, and so on all that was appended before.
        let last = tail.last();
        let judged = judged.map_err(|refused| Refused { rests_on: refused.rests_on.max(last), ..refused });
        engine.answer(tail, judged)
    }

    /// Under the tail lock: whether the token would be good, as far as that can be said without a key.
    fn judge_nothing(&self, tail: &Tail, token: Token, prefix: &[u8]) -> Result<(), Refused> {
        let (engine, keyspace) = (&self.shared.engine, &self.state);
        let Some(name) = keyspace.fence_of_prefix(prefix) else {
            return engine.judge_token(tail, keyspace, token);
        };
        let hashes = engine.fence_hashes(keyspace, name);
        let fences = [Fence { keyspace, name, hashes, token, raises: false }];
        let write = Write {
            changes: &[],
            fences: &fences,
            conditions: &[],
            operation: None,
            require: Require::Newest,
            seen: &[],
        };
        engine.judge(tail, &write, &crossbeam_epoch::pin(), &mut Vec::new())
    }
}

impl KeyspaceState {
    /// The fence of every key with the prefix, if they all have the same one.
    fn fence_of_prefix<'k>(&self, prefix: &'k [u8]) -> Option<&'k [u8]> {
        let fence = self.fence_of(prefix);
        match self.options.scope {
            Scope::Key => None,
            Scope::Prefix(delimiter) => fence.ends_with(&[delimiter]).then_some(fence),
            Scope::Keyspace => Some(fence),
        }
    }
}

/// Keys found present for a delete.
struct Present {
    keys: Vec<Vec<u8>>,
    /// Ops that delete them.
    ops: usize,
    /// Bytes of all names in these.
    payload: usize,
    more: bool,
}

impl Present {
    fn frame_bytes(&self) -> usize {
        frame_bytes(self.ops, self.payload)
    }
}

enum Step {
    NeedsRoom(u32),
    Done(Answer, usize, bool),
}

impl fmt::Debug for Keyspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyspace")
            .field("name", &self.name())
            .field("options", &self.options())
            .finish_non_exhaustive()
    }
}

/// Keys are any bytes, from 1 to [`MAX_KEY_BYTES`] of them.
pub(crate) fn check_key(key: &[u8]) -> Result<()> {
    if key.is_empty() {
        return Err(Error::invalid("a key is empty: keys have at least one byte"));
    }
    if key.len() > MAX_KEY_BYTES {
        return Err(Error::TooLarge { what: "a key", size: key.len(), limit: MAX_KEY_BYTES });
    }
    Ok(())
}
