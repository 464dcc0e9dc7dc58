//! The store as a pure function: what each call answers, and what it leaves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidewall::{Expect, Found, KeyspaceOptions, LastOperation, Lsn, Scope, Tokens};

/// The keyspaces of a simulation, in the order of their creation.
pub const SPACES: [(&str, Scope, Tokens); 6] = [
    ("keys", Scope::Key, Tokens::Store),
    ("jobs", Scope::Prefix(b'/'), Tokens::Store),
    ("rows", Scope::Key, Tokens::External),
    ("all", Scope::Keyspace, Tokens::Store),
    ("logs", Scope::Prefix(b'/'), Tokens::External),
    ("one", Scope::Keyspace, Tokens::External),
];
/// The keyspace whose tokens may not jump far.
pub const CAPPED: usize = 4;
pub const CAP: u64 = 100;
/// Every key a simulation uses; the last one is never written.
pub const KEYS: [&[u8]; 8] = [b"a/1", b"a/2", b"a/3", b"b/1", b"b/2", b"c", b"d", b"unused"];

pub fn options(space: usize) -> KeyspaceOptions {
    let (_, scope, tokens) = SPACES[space];
    let options = KeyspaceOptions::new().scope(scope).tokens(tokens);
    if space == CAPPED { options.token_jump_cap(CAP) } else { options }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Put,
    Delete,
    Raise,
}

#[derive(Clone, Debug)]
pub struct Change {
    pub kind: Kind,
    pub space: usize,
    pub token: u64,
    pub key: &'static [u8],
    pub value: Arc<[u8]>,
}

#[derive(Clone, Debug)]
pub enum Call {
    Create,
    Write { changes: Vec<Change>, expect: Vec<(usize, &'static [u8], Expect)>, op: Option<u64> },
    DeletePrefix { space: usize, token: u64, prefix: &'static [u8] },
    Raise { space: usize, token: u64, key: &'static [u8] },
    RaiseAll { space: usize, token: u64 },
    Advance { token: u64 },
    Acquire { space: usize, key: &'static [u8] },
    Get { space: usize, key: &'static [u8] },
    Mark { space: usize, key: &'static [u8] },
}

/// A value, the token it was written under, and its lsn.
pub type Valued = (Arc<[u8]>, u64, u64);

/// An answer, as far as the model predicts it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    Done(u64),
    Ok,
    Already,
    Deleted(usize),
    Granted(u64),
    Held,
    Value(Option<Valued>),
    Mark(Option<u64>),
    Fenced(u64, LastOperation),
    Unknown(u64),
    Jump(u64),
    Stale(u64),
    Duplicate(u64),
    Conflict(Found),
    Invalid,
    Failed(String),
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Fence {
    pub mark: u64,
    pub last: Option<(u64, u64)>,
    pub before: Option<(u64, u64)>,
}

#[derive(Clone, Default, Debug)]
pub struct Space {
    pub values: BTreeMap<&'static [u8], Valued>,
    pub fences: BTreeMap<&'static [u8], Fence>,
    pub floor: u64,
    /// The floor was raised by folding: a token equal to it is fenced as well.
    pub folded: bool,
    pub highest: u64,
}

impl Space {
    pub fn is_below_floor(&self, token: u64) -> bool {
        token < self.floor || self.folded && token == self.floor
    }
}

#[derive(Clone, Default, Debug)]
pub struct Model {
    pub spaces: Vec<Space>,
    pub counter: u64,
    pub lsn: u64,
    /// Compaction may have dropped what fences below their floor knew.
    pub compacted: bool,
}

pub fn fence_of(space: usize, key: &'static [u8]) -> &'static [u8] {
    match SPACES[space].1 {
        Scope::Prefix(byte) => key.iter().position(|&b| b == byte).map_or(key, |at| &key[..=at]),
        Scope::Keyspace => b"",
        _ => key,
    }
}

/// What the refused is told of its last operation.
fn last_operation(token: u64, fence: &Fence, space: &Space) -> LastOperation {
    let op = |number| LastOperation::Committed(tidewall::OperationId::new(number));
    if space.folded && token <= space.floor {
        return LastOperation::Unknown;
    }
    match (fence.last, fence.before) {
        (Some((number, _)), _) if token == fence.mark => op(number),
        (None, _) if token == fence.mark => LastOperation::Nothing,
        _ if fence.mark == 0 => LastOperation::Unknown,
        (_, Some((was, number))) if token == was => op(number),
        (_, Some((was, _))) if token < was => LastOperation::Unknown,
        _ => LastOperation::Nothing,
    }
}

impl Model {
    /// Every answer that may be given in this state: one, or where several things are wrong, any of them.
    /// A call that changes something takes the next lsn.
    pub fn answer(&mut self, call: &Call) -> Vec<Said> {
        match call {
            Call::Create => {
                self.spaces.push(Space::default());
                self.lsn += 1;
                vec![Said::Ok]
            }
            Call::Write { changes, expect, op } => self.write(changes, expect, *op, Said::Done(self.lsn + 1)),
            Call::DeletePrefix { space, token, prefix } => {
                let keys = self.spaces[*space].values.keys().filter(|key| key.starts_with(prefix));
                let delete = |&key| Change {
                    kind: Kind::Delete,
                    space: *space,
                    token: *token,
                    key,
                    value: Arc::default(),
                };
                let changes: Vec<_> = keys.map(delete).collect();
                if changes.is_empty() {
                    // Judged by the fence that the keys would all have, else by the floor, as a raise of nothing.
                    let has_fence = match SPACES[*space].1 {
                        Scope::Prefix(byte) => prefix.contains(&byte),
                        scope => scope == Scope::Keyspace,
                    };
                    let name = if has_fence { fence_of(*space, prefix) } else { b"" };
                    let refused = self.refuse((*space, name), *token, !has_fence);
                    return if refused.is_empty() { vec![Said::Deleted(0)] } else { refused };
                }
                self.write(&changes, &[], None, Said::Deleted(changes.len()))
            }
            Call::Raise { space, token, key } => {
                let key = fence_of(*space, key);
                let raise =
                    Change { kind: Kind::Raise, space: *space, token: *token, key, value: Arc::default() };
                let before = self.spaces[*space].fences.get(key).map_or(0, |fence| fence.mark);
                let mut next = self.clone();
                let said = next.write(&[raise], &[], None, Said::Done(self.lsn + 1));
                if matches!(said[0], Said::Done(_)) && before == *token {
                    return vec![Said::Already];
                }
                *self = next;
                said
            }
            Call::RaiseAll { space, token } => {
                let floor = self.spaces[*space].floor;
                if self.spaces[*space].is_below_floor(*token) {
                    return vec![Said::Fenced(floor, LastOperation::Unknown)];
                }
                if SPACES[*space].2 == Tokens::Store && *token > self.counter {
                    return vec![Said::Unknown(floor)];
                }
                if *token == floor {
                    return vec![Said::Already];
                }
                let space = &mut self.spaces[*space];
                (space.floor, space.highest) = (*token, space.highest.max(*token));
                space.folded = false;
                self.lsn += 1;
                vec![Said::Done(self.lsn)]
            }
            Call::Advance { token } => {
                self.counter = self.counter.max(*token);
                self.lsn += 1;
                vec![Said::Ok]
            }
            Call::Acquire { space, key } => {
                (self.counter, self.lsn) = (self.counter + 1, self.lsn + 1);
                self.admit(*space, fence_of(*space, key), self.counter, None);
                vec![Said::Granted(self.counter)]
            }
            Call::Get { space, key } => vec![Said::Value(self.spaces[*space].values.get(key).cloned())],
            Call::Mark { space, key } => vec![Said::Mark(self.mark(*space, key))],
        }
    }

    pub fn mark(&self, space: usize, key: &'static [u8]) -> Option<u64> {
        let own = self.spaces[space].fences.get(fence_of(space, key)).map_or(0, |fence| fence.mark);
        Some(own.max(self.spaces[space].floor)).filter(|&mark| mark > 0)
    }

    fn write(
        &mut self,
        changes: &[Change],
        expect: &[(usize, &'static [u8], Expect)],
        op: Option<u64>,
        done: Said,
    ) -> Vec<Said> {
        let mut fences: BTreeMap<(usize, &'static [u8]), (u64, bool)> = BTreeMap::new();
        for change in changes {
            let at = (change.space, fence_of(change.space, change.key));
            let fence = fences.entry(at).or_insert((change.token, false));
            if fence.0 != change.token {
                return vec![Said::Invalid];
            }
            fence.1 |= change.kind == Kind::Raise;
        }
        let mut refused: Vec<_> =
            fences.iter().flat_map(|(&at, &(token, raises))| self.refuse(at, token, raises)).collect();
        if refused.is_empty() {
            refused.extend(op.into_iter().flat_map(|op| self.refuse_op(&fences, op)));
        }
        if refused.is_empty() {
            refused.extend(expect.iter().filter_map(|(space, key, expect)| {
                let found = self.spaces[*space].values.get(key).map(|&(_, _, lsn)| Lsn::new(lsn));
                let holds = match expect {
                    Expect::Absent => found.is_none(),
                    Expect::Present => found.is_some(),
                    Expect::Version(lsn) => found == Some(*lsn),
                    _ => unreachable!(),
                };
                (!holds).then(|| Said::Conflict(found.map_or(Found::Absent, Found::Present)))
            }));
        }
        if !refused.is_empty() {
            return refused;
        }
        self.lsn += 1;
        for (&(space, fence), &(token, _)) in &fences {
            self.admit(space, fence, token, op);
        }
        for change in changes {
            let values = &mut self.spaces[change.space].values;
            match change.kind {
                Kind::Put => {
                    values.insert(change.key, (change.value.clone(), change.token, self.lsn));
                }
                Kind::Delete => drop(values.remove(change.key)),
                Kind::Raise => {}
            }
        }
        vec![done]
    }

    fn refuse(&self, (space, name): (usize, &'static [u8]), token: u64, raises: bool) -> Vec<Said> {
        let Space { fences, floor, highest, .. } = &self.spaces[space];
        let own = fences.get(name).cloned().unwrap_or_default();
        let mark = own.mark.max(*floor);
        if token < mark || self.spaces[space].is_below_floor(token) {
            let mut said = vec![Said::Fenced(mark, last_operation(token, &own, &self.spaces[space]))];
            if self.compacted && token < *floor {
                said.push(Said::Fenced(mark, LastOperation::Unknown));
            }
            return said;
        }
        if SPACES[space].2 == Tokens::Store {
            let known = if raises { token <= self.counter } else { token == mark };
            return if known { Vec::new() } else { vec![Said::Unknown(mark)] };
        }
        let jumps = space == CAPPED && *highest > 0 && token > highest + CAP && (raises || token > mark);
        if jumps { vec![Said::Jump(*highest)] } else { Vec::new() }
    }

    fn refuse_op(&self, fences: &BTreeMap<(usize, &'static [u8]), (u64, bool)>, op: u64) -> Vec<Said> {
        let (mut same, mut newer, mut stale) = (BTreeSet::new(), false, Vec::new());
        for (&(space, name), &(token, _)) in fences {
            let own = self.spaces[space].fences.get(name).cloned().unwrap_or_default();
            match own.last {
                Some((last, lsn)) if own.mark == token && op == last => drop(same.insert(lsn)),
                Some((last, _)) if own.mark == token && op < last => stale.push(Said::Stale(last)),
                _ => newer = true,
            }
        }
        match same.last() {
            _ if !stale.is_empty() => stale,
            Some(_) if newer => vec![Said::Invalid],
            Some(&lsn) => vec![Said::Duplicate(lsn)],
            None => Vec::new(),
        }
    }

    fn admit(&mut self, space: usize, fence: &'static [u8], token: u64, op: Option<u64>) {
        let lsn = self.lsn;
        let space = &mut self.spaces[space];
        space.highest = space.highest.max(token);
        let own = space.fences.entry(fence).or_default();
        if own.mark != token {
            own.before = own.last.map(|(op, _)| (own.mark, op)).or(own.before);
            own.last = None;
            own.mark = token;
        }
        own.last = op.map(|op| (op, lsn)).or(own.last);
    }
}
