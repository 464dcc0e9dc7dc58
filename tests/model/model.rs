//! What a store should hold, as plainly as it can be said: maps, and the rule of section 3.

use crate::{Change, What};
use std::collections::BTreeMap;
use tidewall::{Expect, LastOperation, Scope, Tokens};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub value: Vec<u8>,
    pub token: u64,
    pub lsn: u64,
}

#[derive(Clone, Default, Debug)]
struct Fence {
    mark: u64,
    last: Option<(u64, u64)>,
    predecessor: Option<(u64, u64)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Space {
    pub scope: Scope,
    pub tokens: Tokens,
    pub values: BTreeMap<Vec<u8>, Stored>,
    fences: BTreeMap<Vec<u8>, Fence>,
    pub floor: u64,
    /// The floor was raised by folding: a token equal to it is fenced as well.
    pub folded: bool,
    /// The highest floor that was raised by folding: of fences below it nothing else is known.
    pub folded_to: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub spaces: Vec<Space>,
    /// The highest token granted.
    pub counter: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Refused {
    Fenced { mark: u64, last_operation: LastOperation },
    Unknown,
    Duplicate { lsn: u64 },
    Stale { last: u64 },
    SomeOnly,
    Conflict,
}

impl Space {
    pub fn new(scope: Scope, tokens: Tokens) -> Self {
        Space {
            scope,
            tokens,
            values: BTreeMap::new(),
            fences: BTreeMap::new(),
            floor: 0,
            folded: false,
            folded_to: 0,
        }
    }

    pub fn fence<'k>(&self, key: &'k [u8]) -> &'k [u8] {
        match self.scope {
            Scope::Prefix(by) => &key[..key.iter().position(|&b| b == by).map_or(key.len(), |at| at + 1)],
            Scope::Keyspace => b"",
            _ => key,
        }
    }

    pub fn mark(&self, key: &[u8]) -> u64 {
        self.fences.get(self.fence(key)).map_or(0, |fence| fence.mark).max(self.floor)
    }

    fn is_below_floor(&self, token: u64) -> bool {
        token < self.floor || self.folded && token == self.floor
    }

    fn last_operation(&self, key: &[u8], token: u64) -> LastOperation {
        if token <= self.folded_to {
            return LastOperation::Unknown;
        }
        let committed = |op| LastOperation::Committed(tidewall::OperationId::new(op));
        let Some(fence) = self.fences.get(self.fence(key)) else { return LastOperation::Unknown };
        match (fence.last, fence.predecessor) {
            (last, _) if token == fence.mark => last.map_or(LastOperation::Nothing, |(op, _)| committed(op)),
            (_, Some((was, op))) if token == was => committed(op),
            (_, Some((was, _))) if token < was => LastOperation::Unknown,
            _ => LastOperation::Nothing,
        }
    }

    fn admit(&mut self, key: &[u8], token: u64, op: Option<u64>, lsn: u64) {
        let folded_to = self.folded_to;
        let fence = self.fences.entry(self.fence(key).to_vec()).or_default();
        if fence.mark <= folded_to {
            *fence = Fence::default();
        }
        if fence.mark != token {
            if let Some((last, _)) = fence.last.take() {
                fence.predecessor = Some((fence.mark, last));
            }
            fence.mark = token;
        }
        if let Some(op) = op {
            fence.last = Some((op, lsn));
        }
    }
}

impl Model {
    /// A write of all changes under one token, all or nothing. `lsn` is the one the store answered.
    pub fn write(
        &mut self,
        token: u64,
        op: Option<u64>,
        changes: &[Change],
        expect: Option<(&[u8], Expect)>,
        lsn: u64,
    ) -> Result<(), Refused> {
        let raises = |space, fence: &[u8]| {
            let raised = |c: &Change| c.space == space && c.what == What::Raise;
            changes.iter().any(|c| raised(c) && self.spaces[space].fence(&c.key) == fence)
        };
        let (mut same, mut newer) = (None, false);
        for &Change { space, ref key, .. } in changes {
            let of = &self.spaces[space];
            let mark = of.mark(key);
            if token < mark || of.is_below_floor(token) {
                return Err(Refused::Fenced { mark, last_operation: of.last_operation(key, token) });
            }
            let known = if raises(space, of.fence(key)) { self.counter } else { mark };
            if of.tokens == Tokens::Store && token > known {
                return Err(Refused::Unknown);
            }
        }
        for (Change { space, key, .. }, op) in changes.iter().filter_map(|change| Some((change, op?))) {
            let fence = self.spaces[*space].fences.get(self.spaces[*space].fence(key));
            match fence.filter(|fence| fence.mark == token).and_then(|fence| fence.last) {
                Some((last, _)) if op < last => return Err(Refused::Stale { last }),
                Some((last, at)) if op == last => same = same.max(Some(at)),
                _ => newer = true,
            }
        }
        match same {
            Some(_) if newer => return Err(Refused::SomeOnly),
            Some(lsn) => return Err(Refused::Duplicate { lsn }),
            None => {}
        }
        if let Some((key, expect)) = expect {
            let found = self.spaces[changes[0].space].values.get(key).map(|stored| stored.lsn);
            let holds = match expect {
                Expect::Absent => found.is_none(),
                Expect::Present => found.is_some(),
                Expect::Version(lsn) => found == Some(lsn.get()),
                _ => unreachable!(),
            };
            if !holds {
                return Err(Refused::Conflict);
            }
        }
        for Change { space, key, what } in changes {
            let of = &mut self.spaces[*space];
            of.admit(key, token, op, lsn);
            match what {
                What::Put(value) => {
                    of.values.insert(key.clone(), Stored { value: value.clone(), token, lsn });
                }
                What::Delete => drop(of.values.remove(key)),
                What::Raise => {}
            }
        }
        Ok(())
    }

    /// A delete of a prefix that no key has: judged by the fence they would all have, else by the floor.
    pub fn write_nothing(&self, space: usize, token: u64, prefix: &[u8]) -> Result<(), Refused> {
        let of = &self.spaces[space];
        let has_fence = match of.scope {
            Scope::Prefix(by) => prefix.contains(&by),
            Scope::Keyspace => true,
            _ => false,
        };
        let mark = if has_fence { of.mark(prefix) } else { of.floor };
        if token < mark || of.is_below_floor(token) {
            let last_operation =
                if has_fence { of.last_operation(prefix, token) } else { LastOperation::Unknown };
            return Err(Refused::Fenced { mark, last_operation });
        }
        let known = if has_fence { mark } else { self.counter };
        if of.tokens == Tokens::Store && token > known { Err(Refused::Unknown) } else { Ok(()) }
    }

    pub fn raise_all(&mut self, space: usize, token: u64) -> Result<(), Refused> {
        let of = &mut self.spaces[space];
        if of.is_below_floor(token) {
            return Err(Refused::Fenced { mark: of.floor, last_operation: LastOperation::Unknown });
        }
        if of.tokens == Tokens::Store && token > self.counter {
            return Err(Refused::Unknown);
        }
        (of.floor, of.folded) = (token, false);
        Ok(())
    }

    /// A lease: one above every token so far, and the mark of the fence.
    pub fn grant(&mut self, space: usize, key: &[u8]) -> u64 {
        self.counter += 1;
        self.spaces[space].admit(key, self.counter, None, 0);
        self.counter
    }
}
