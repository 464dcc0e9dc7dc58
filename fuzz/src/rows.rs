//! Operations on a keyspace of external tokens, and what their answers oblige the store to.

use crate::{rows, token};
use arbitrary::Arbitrary;
use std::collections::BTreeMap;
use tidewall::storage::Crash;
use tidewall::{Db, Error, Keyspace, Outcome, Snapshot};

#[derive(Arbitrary, Debug, Clone)]
pub enum Op {
    Put { key: u8, token: u8, len: u16 },
    Submit { key: u8, token: u8, len: u8 },
    Delete { key: u8, token: u8 },
    DeletePrefix { token: u8 },
    Raise { key: u8, token: u8 },
    RaiseAll { token: u8 },
    Batch { keys: [u8; 3], token: u8 },
    Compact,
    Snapshot,
}

/// What was acknowledged: the least mark of each key, and its value where the last answer was clear.
#[derive(Default, Debug)]
pub struct Model {
    marks: BTreeMap<u8, u64>,
    floor: u64,
    values: BTreeMap<u8, Option<Vec<u8>>>,
}

impl Model {
    fn mark(&self, key: u8) -> u64 {
        self.marks.get(&key).copied().unwrap_or(0).max(self.floor)
    }

    fn admit(&mut self, key: u8, token: u64) {
        assert!(token >= self.mark(key), "token {token} was admitted below the mark {}", self.mark(key));
        self.marks.insert(key, token);
    }

    fn settle(&mut self, keys: &[u8], token: u64, value: Option<Vec<u8>>, answer: Result<(), Error>) {
        match answer {
            Ok(()) => {
                for &key in keys {
                    self.admit(key % KEYS, token);
                    self.values.insert(key % KEYS, value.clone());
                }
            }
            Err(error) => self.refused(keys, token, &error),
        }
    }

    fn refused(&mut self, keys: &[u8], token: u64, error: &Error) {
        if let Error::Fenced { mark, .. } = error {
            assert!(mark.get() >= token, "fenced by a mark that is not above");
            // An answer that named a mark pins it: a crash may not take it away.
            if let [key] = keys {
                let least = self.marks.entry(key % KEYS).or_insert(0);
                *least = (*least).max(mark.get());
            }
        }
        // What is said not to have happened leaves what was there.
        if error.outcome() != Outcome::NotApplied {
            keys.iter().for_each(|key| {
                self.values.remove(&(key % KEYS));
            });
        }
    }

    /// Holds a store to it.
    pub fn check(&self, rows: &Keyspace) {
        for number in 0..KEYS {
            let key = key(number);
            let mark = rows.mark(&key).expect("reads").map_or(0, |mark| mark.get());
            assert!(mark >= self.mark(number), "the mark of {key:?} fell to {mark}: {self:?}");
            if let Some(expected) = self.values.get(&number) {
                let found = rows.get(&key).expect("reads").map(|value| value.to_vec());
                assert_eq!(&found, expected, "an acknowledged write of {key:?} is lost");
            }
            if mark > 1 {
                let stale = rows.put(token(mark - 1), &key, b"late");
                assert!(matches!(stale, Err(Error::Fenced { .. })), "a late write got {stale:?}");
            }
        }
    }
}

const KEYS: u8 = 8;

fn key(key: u8) -> [u8; 1] {
    [key % KEYS + 1]
}

/// Runs operations on a store that is open, as far as the keyspace is to be had.
pub fn run(db: &Db, model: &mut Model, ops: &[Op]) {
    let Ok(rows) = rows(db) else { return };
    let mut snapshot: Option<(Snapshot, Vec<(Vec<u8>, Vec<u8>)>)> = None;
    let seen = |snapshot: &Snapshot, rows: &Keyspace| -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
        snapshot.iter(rows).map(|item| item.ok().map(|(key, value)| (key, value.to_vec()))).collect()
    };
    for op in ops.iter().take(60) {
        if matches!(op, Op::Snapshot) {
            let now = db.snapshot();
            snapshot = seen(&now, &rows).map(|seen| (now, seen));
        }
        run_one(db, &rows, model, op);
        if let Some((snapshot, before)) = &snapshot
            && let Some(after) = seen(snapshot, &rows)
        {
            assert_eq!(&after, before, "a snapshot changed at {op:?}");
        }
    }
}

fn run_one(db: &Db, rows: &Keyspace, model: &mut Model, op: &Op) {
    let t = |number: u8| token(number as u64 % 16 + 1);
    match *op {
        Op::Put { key: k, token: n, len } => {
            let value = vec![k ^ n; len as usize % 3000];
            let answer = rows.put(t(n), &key(k), &value);
            model.settle(&[k], t(n).get(), Some(value), answer.map(drop));
        }
        Op::Submit { key: k, token: n, len } => {
            let value = vec![k ^ n; len as usize];
            let answer = rows.submit_put(t(n), &key(k), &value).and_then(|commit| commit.wait());
            model.settle(&[k], t(n).get(), Some(value), answer.map(drop));
        }
        Op::Delete { key: k, token: n } => {
            model.settle(&[k], t(n).get(), None, rows.delete(t(n), &key(k)).map(drop));
        }
        Op::DeletePrefix { token: n } => {
            let present: Vec<u8> =
                (0..KEYS).filter(|&k| matches!(rows.contains_key(&key(k)), Ok(true))).collect();
            model.settle(&present, t(n).get(), None, rows.delete_prefix(t(n), b"").map(drop));
        }
        Op::Raise { key: k, token: n } => match rows.raise(t(n), &key(k)) {
            Ok(_) => model.admit(k % KEYS, t(n).get()),
            Err(error) => model.refused(&[k], t(n).get(), &error),
        },
        Op::RaiseAll { token: n } => {
            if rows.raise_all(t(n)).is_ok() {
                assert!(t(n).get() >= model.floor);
                model.floor = t(n).get();
            }
        }
        Op::Batch { keys, token: n } => {
            let mut batch = db.batch();
            for k in keys {
                batch.put(rows, t(n), &key(k), &[n; 40]).expect("small");
            }
            model.settle(&keys, t(n).get(), Some(vec![n; 40]), batch.commit().map(drop));
        }
        Op::Compact => drop(db.compact()),
        Op::Snapshot => {}
    }
}

pub fn policy(number: u8) -> Crash {
    match number % 9 {
        0 => Crash::None,
        1 => Crash::All,
        2 => Crash::Subset { percent: 50 },
        3 => Crash::Prefix,
        4 => Crash::Suffix,
        5 => Crash::OneMissing,
        6 => Crash::OnePresent,
        7 => Crash::Torn { bytes: true },
        _ => Crash::Reverse,
    }
}
