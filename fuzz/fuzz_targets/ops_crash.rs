//! Any operations, any crash, three times over: opening succeeds, what was acknowledged is there, marks are not
//! below what was answered, and no stale token is admitted.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use support::{contents, open, rows, token};
use tidewall::storage::{Crash, SimDisk};
use tidewall::{Error, Keyspace};

#[derive(Arbitrary, Debug, Clone)]
enum Op {
    Put { key: u8, token: u8, len: u16 },
    Submit { key: u8, token: u8, len: u8 },
    Delete { key: u8, token: u8 },
    DeletePrefix { token: u8 },
    Raise { key: u8, token: u8 },
    RaiseAll { token: u8 },
    Batch { keys: [u8; 3], token: u8 },
}

#[derive(Arbitrary, Debug)]
struct Round {
    ops: Vec<Op>,
    /// After so many storage calls the power goes.
    calls: u16,
    policy: u8,
    seed: u16,
}

/// What was acknowledged: the least mark of each key, and its value where the last answer was clear.
#[derive(Default, Debug)]
struct Model {
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
}

fuzz_target!(|rounds: Vec<Round>| {
    let mut disk = SimDisk::new();
    let mut model = Model::default();
    for (n, round) in rounds.iter().take(4).enumerate() {
        let begin = disk.calls();
        disk.stop_at(begin + round.calls as u64);
        if let Ok(db) = open(&disk, n as u64)
            && let Ok(rows) = rows(&db)
        {
            for op in round.ops.iter().take(60) {
                run(&rows, &db, &mut model, op);
            }
        }
        disk = disk.crash(policy(round.policy), round.seed as u64);
        let db = open(&disk, 1000 + n as u64).expect("a crash of any kind opens again by itself");
        let rows = rows(&db).expect("the keyspace is there, or is made");
        check(&rows, &model);
        contents(&db).expect("everything reads");
        db.close().expect("closes");
        // What recovery has shown stays.
        disk = disk.crash(Crash::None, 0);
        let again = open(&disk, 2000 + n as u64).expect("opens again");
        check(&self::rows(&again).expect("there"), &model);
        again.close().expect("closes");
        disk = disk.kill();
    }
});

fn key(key: u8) -> [u8; 1] {
    [key % 8 + 1]
}

fn run(rows: &Keyspace, db: &tidewall::Db, model: &mut Model, op: &Op) {
    let t = |number: u8| token(number as u64 % 16 + 1);
    match *op {
        Op::Put { key: k, token: n, len } => {
            let value = vec![k ^ n; len as usize % 3000];
            let answer = rows.put(t(n), &key(k), &value);
            settle(model, &[k], t(n).get(), Some(value), answer.map(drop));
        }
        Op::Submit { key: k, token: n, len } => {
            let value = vec![k ^ n; len as usize];
            let answer = rows.submit_put(t(n), &key(k), &value).and_then(|commit| commit.wait());
            settle(model, &[k], t(n).get(), Some(value), answer.map(drop));
        }
        Op::Delete { key: k, token: n } => {
            settle(model, &[k], t(n).get(), None, rows.delete(t(n), &key(k)).map(drop));
        }
        Op::DeletePrefix { token: n } => {
            let present: Vec<u8> =
                (0..8).filter(|&k| matches!(rows.contains_key(&key(k)), Ok(true))).collect();
            settle(model, &present, t(n).get(), None, rows.delete_prefix(t(n), b"").map(drop));
        }
        Op::Raise { key: k, token: n } => match rows.raise(t(n), &key(k)) {
            Ok(_) => model.admit(key(k)[0], t(n).get()),
            Err(error) => refused(model, &[k], t(n).get(), &error),
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
            settle(model, &keys, t(n).get(), Some(vec![n; 40]), batch.commit().map(drop));
        }
    }
}

fn settle(model: &mut Model, keys: &[u8], token: u64, value: Option<Vec<u8>>, answer: Result<(), Error>) {
    match answer {
        Ok(()) => {
            for &k in keys {
                model.admit(key(k)[0], token);
                model.values.insert(key(k)[0], value.clone());
            }
        }
        Err(error) => refused(model, keys, token, &error),
    }
}

fn refused(model: &mut Model, keys: &[u8], token: u64, error: &Error) {
    match error {
        Error::Fenced { mark, .. } => {
            assert!(mark.get() >= token, "fenced by a mark that is not above");
            // An answer that named a mark pins it: a crash may not take it away.
            if let [k] = keys {
                let least = model.marks.entry(key(*k)[0]).or_insert(0);
                *least = (*least).max(mark.get());
            }
        }
        // It may or may not be there: the value is unknown from here on.
        _ => keys.iter().for_each(|&k| {
            model.values.remove(&key(k)[0]);
        }),
    }
}

fn check(rows: &Keyspace, model: &Model) {
    for k in 0..8 {
        let key = key(k);
        let mark = rows.mark(&key).expect("reads").map_or(0, |mark| mark.get());
        assert!(mark >= model.mark(key[0]), "the mark of {key:?} fell to {mark}: {model:?}");
        if let Some(expected) = model.values.get(&key[0]) {
            let found = rows.get(&key).expect("reads").map(|value| value.to_vec());
            assert_eq!(&found, expected, "an acknowledged write of {key:?} is lost");
        }
        if mark > 1 {
            let stale = rows.put(token(mark - 1), &key, b"late");
            assert!(matches!(stale, Err(Error::Fenced { .. })), "a late write got {stale:?}");
        }
    }
}

fn policy(number: u8) -> Crash {
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
