//! Random histories against a model of a page, with a reopening after every single step.
//!
//! One call may leave something wrong that only the next start shows, so after each step the store is
//! either closed or loses its power, is opened again, and everything in it is compared: values with their
//! tokens and lsns in both directions, marks, the counter.

#[path = "../store/mod.rs"]
mod store;

mod model;

use model::{Model, Refused, Space};
use proptest::collection::vec;
use proptest::prelude::*;
use store::{Sim, op, secs, token};
use tidewall::*;

const SPACES: [(&str, Scope, Tokens); 4] = [
    ("key", Scope::Key, Tokens::Store),
    ("prefix", Scope::Prefix(b'/'), Tokens::Store),
    ("all", Scope::Keyspace, Tokens::Store),
    ("rows", Scope::Prefix(b'/'), Tokens::External),
];
const KEYS: [&[u8]; 7] = [b"a", b"a/", b"a/x", b"a/y", b"b/x", b"b\0", b"\xff"];

/// One change of a write: where, and the value, a delete, or a raise.
#[derive(Clone, Debug)]
struct Change {
    space: usize,
    key: Vec<u8>,
    what: What,
}

#[derive(Clone, Debug, PartialEq)]
enum What {
    Put(Vec<u8>),
    Delete,
    Raise,
}

#[derive(Clone, Debug)]
enum Step {
    Write { token: u64, op: Option<u64>, changes: Vec<Change> },
    WriteIf { token: u64, change: Change, expect: u8 },
    DeletePrefix { space: usize, token: u64, prefix: &'static [u8] },
    RaiseAll { space: usize, token: u64 },
    Acquire { space: usize, key: &'static [u8], release: bool },
    Advance { by: u64 },
}

fn change() -> impl Strategy<Value = Change> {
    let value = prop_oneof![vec(any::<u8>(), 0..40), vec(any::<u8>(), 4000..6000)];
    let what = prop_oneof![4 => value.prop_map(What::Put), 2 => Just(What::Delete), 1 => Just(What::Raise)];
    (0..SPACES.len(), 0..KEYS.len(), what).prop_map(|(space, key, what)| {
        // The name of a fence is a key of it, so a raise may be given either.
        Change { space, key: KEYS[key].to_vec(), what }
    })
}

fn step() -> impl Strategy<Value = Step> {
    let space = 0..SPACES.len();
    let key = (0..KEYS.len()).prop_map(|at| KEYS[at]);
    let prefix = prop_oneof![Just(&b""[..]), Just(&b"a"[..]), Just(&b"a/"[..]), Just(&b"zz"[..])];
    // 0 stands for the mark of the first key, so that admitted writes are common.
    let number = prop_oneof![6 => Just(0u64), 3 => 1u64..12];
    let op = prop_oneof![2 => Just(None), 3 => (1u64..5).prop_map(Some)];
    prop_oneof![
        8 => (number.clone(), op, vec(change(), 1..4))
            .prop_map(|(token, op, changes)| Step::Write { token, op, changes }),
        2 => (number.clone(), change(), 0u8..4)
            .prop_map(|(token, change, expect)| Step::WriteIf { token, change, expect }),
        1 => (space.clone(), number.clone(), prefix)
            .prop_map(|(space, token, prefix)| Step::DeletePrefix { space, token, prefix }),
        1 => (space.clone(), 1u64..12).prop_map(|(space, token)| Step::RaiseAll { space, token }),
        5 => (0..3usize, key, any::<bool>())
            .prop_map(|(space, key, release)| Step::Acquire { space, key, release }),
        1 => (1u64..3).prop_map(|by| Step::Advance { by }),
    ]
}

struct Run {
    sim: Sim,
    db: Db,
    model: Model,
    spaces: Vec<Keyspace>,
    /// Leases that nobody released, superseded or not.
    held: Vec<Held>,
}

struct Held {
    space: usize,
    key: Vec<u8>,
    token: u64,
    /// `None`: granted before the last restart, and so perhaps still in use.
    lease: Option<Lease>,
}

fn open_spaces(db: &Db) -> Vec<Keyspace> {
    let open = |&(name, scope, tokens): &(&str, Scope, Tokens)| {
        db.keyspace(name, KeyspaceOptions::new().scope(scope).tokens(tokens)).unwrap()
    };
    SPACES.iter().map(open).collect()
}

impl Run {
    fn new() -> Run {
        let sim = Sim::new();
        let db = sim.open();
        let spaces = open_spaces(&db);
        let model = SPACES.iter().map(|&(_, scope, tokens)| Space::new(scope, tokens)).collect();
        Run { sim, db, model: Model { spaces: model, counter: 0 }, spaces, held: Vec::new() }
    }

    /// Compaction may have folded marks into a floor meanwhile: never over a lease that is live or may be.
    fn adopt_folds(&mut self) {
        for (at, (of, ks)) in self.model.spaces.iter_mut().zip(&self.spaces).enumerate() {
            let Some(floor) = ks.floor() else { continue };
            // Under a floor raised on purpose as well.
            let forgotten = floor.forgotten.map_or(0, Mark::get);
            if forgotten > of.folded_to {
                assert_eq!(of.tokens, Tokens::Store, "{} is folded by its user only", ks.name());
                let lowest =
                    self.held.iter().filter(|held| held.space == at && of.mark(&held.key) == held.token);
                let lowest = lowest.map(|held| held.token).min();
                assert!(lowest.is_none_or(|held| forgotten < held), "{floor:?} over {lowest:?}");
                assert!(forgotten <= self.model.counter);
                of.folded |= forgotten >= of.floor;
                of.floor = of.floor.max(forgotten);
                of.folded_to = forgotten;
            }
        }
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Write { token, op, changes } => self.write(*token, *op, changes),
            Step::WriteIf { token, change, expect } => self.write_if(*token, change, *expect),
            Step::DeletePrefix { space, token, prefix } => self.delete_prefix(*space, *token, prefix),
            Step::RaiseAll { space, token: number } => {
                let answer = self.spaces[*space].raise_all(token(*number));
                self.adopt_folds();
                let expected = self.model.raise_all(*space, *number);
                assert_eq!(refusal(answer.map(drop)), expected);
            }
            Step::Acquire { space, key, release } => {
                let fence = self.model.spaces[*space].fence(key).to_vec();
                self.held.retain(|held| {
                    held.lease.is_none()
                        || held.space != *space
                        || self.model.spaces[*space].fence(&held.key) != fence
                });
                let lease = self.spaces[*space].lease(key).ttl(secs(10)).acquire().unwrap();
                self.adopt_folds();
                assert_eq!(lease.token().get(), self.model.grant(*space, key));
                if *release {
                    lease.release().unwrap();
                } else {
                    let token = lease.token().get();
                    self.held.push(Held { space: *space, key: key.to_vec(), token, lease: Some(lease) });
                }
            }
            Step::Advance { by } => {
                self.model.counter += by;
                self.db.advance_tokens(token(self.model.counter)).unwrap();
                self.adopt_folds();
            }
        }
    }

    fn number(&self, number: u64, space: usize, key: &[u8]) -> u64 {
        if number == 0 { self.model.spaces[space].mark(key).max(1) } else { number }
    }

    fn write(&mut self, number: u64, op_: Option<u64>, changes: &[Change]) {
        let number = self.number(number, changes[0].space, &changes[0].key);
        // Of two changes to one key the last one counts.
        let same = |a: &Change, b: &Change| {
            a.space == b.space && a.key == b.key && (a.what == What::Raise) == (b.what == What::Raise)
        };
        let left = changes.iter().enumerate();
        let left = left.filter(|(at, change)| !changes[at + 1..].iter().any(|later| same(change, later)));
        let counted: Vec<Change> = left.map(|(_, change)| change.clone()).collect();
        let mut batch = self.db.batch();
        for Change { space, key, what } in changes {
            let ks = &self.spaces[*space];
            match what {
                What::Put(value) => batch.put(ks, token(number), key, value).unwrap(),
                What::Delete => batch.delete(ks, token(number), key).unwrap(),
                What::Raise => batch.raise(ks, token(number), key).unwrap(),
            };
        }
        if let Some(op_) = op_ {
            batch.operation(op(op_));
        }
        let answer = batch.commit();
        let lsn = answer.as_ref().map_or(0, |lsn| lsn.get());
        self.adopt_folds();
        let expected = self.model.write(number, op_, &counted, None, lsn);
        self.compare_batch(refusal(answer.map(drop)), expected, &counted, number);
    }

    /// With several fences any one of them may be the one that refuses.
    fn compare_batch(
        &self,
        answer: Result<(), Refused>,
        expected: Result<(), Refused>,
        changes: &[Change],
        number: u64,
    ) {
        let fences: std::collections::BTreeSet<_> =
            changes.iter().map(|c| (c.space, self.model.spaces[c.space].fence(&c.key))).collect();
        match (&answer, &expected) {
            (Err(Refused::Fenced { mark, .. }), Err(_)) if fences.len() > 1 => assert!(number <= *mark),
            (Err(Refused::Unknown | Refused::Stale { .. }), Err(_)) if fences.len() > 1 => {}
            _ => assert_eq!(answer, expected),
        }
    }

    fn write_if(&mut self, number: u64, change: &Change, expect: u8) {
        let Change { space, key, what } = change;
        let number = self.number(number, *space, key);
        let stored = self.model.spaces[*space].values.get(key).map_or(77, |stored| stored.lsn);
        let expect = match expect {
            0 => Expect::Absent,
            1 => Expect::Present,
            2 => Expect::Version(Lsn::new(stored)),
            _ => Expect::Version(Lsn::new(stored + 1)),
        };
        let ks = &self.spaces[*space];
        let answer = match what {
            What::Put(value) => ks.put_if(token(number), key, value, expect),
            What::Delete => ks.delete_if(token(number), key, expect),
            What::Raise => return,
        };
        let lsn = answer.as_ref().map_or(0, |lsn| lsn.get());
        self.adopt_folds();
        let changes = std::slice::from_ref(change);
        let expected = self.model.write(number, None, changes, Some((key, expect)), lsn);
        assert_eq!(refusal(answer.map(drop)), expected);
    }

    fn delete_prefix(&mut self, space: usize, number: u64, prefix: &'static [u8]) {
        let number = self.number(number, space, KEYS[2]);
        let keys = self.model.spaces[space].values.keys().filter(|key| key.starts_with(prefix));
        let change = |key: &Vec<u8>| Change { space, key: key.clone(), what: What::Delete };
        let changes: Vec<Change> = keys.map(change).collect();
        let answer = self.spaces[space].delete_prefix(token(number), prefix);
        if let Ok(deleted) = &answer {
            assert_eq!((deleted.keys, deleted.more), (changes.len(), false));
        }
        self.adopt_folds();
        let expected = match changes.is_empty() {
            true => self.model.write_nothing(space, number, prefix),
            false => self.model.write(number, None, &changes, None, 0),
        };
        self.compare_batch(refusal(answer.map(drop)), expected, &changes, number);
    }

    fn restart(&mut self, clean: bool) {
        if clean {
            self.spaces.clear();
            let db = std::mem::replace(&mut self.db, Sim::new().open());
            db.close().unwrap();
            self.db = self.sim.open();
        } else {
            self.db = self.sim.power_cut();
        }
        // Only the grants of the life just before may still be in use.
        self.held.retain(|held| held.lease.is_some());
        self.held.iter_mut().for_each(|held| held.lease = None);
        self.spaces = open_spaces(&self.db);
        self.adopt_folds();
    }

    fn compare(&self) {
        for (of, ks) in self.model.spaces.iter().zip(&self.spaces) {
            let expected: Vec<_> = of.values.iter().collect();
            let found: Vec<_> = ks.iter().map(Result::unwrap).collect();
            assert_eq!(found.len(), expected.len(), "{}", ks.name());
            for ((key, value), (expected, stored)) in found.iter().zip(&expected) {
                assert_eq!(key, *expected, "{}", ks.name());
                assert_eq!(value.bytes(), stored.value, "{}", ks.name());
                assert_eq!((value.token().get(), value.lsn().get()), (stored.token, stored.lsn));
                assert_eq!(ks.get(key).unwrap().as_ref(), Some(value));
            }
            let backwards: Vec<_> = ks.iter().rev().map(Result::unwrap).collect();
            assert!(found.iter().rev().eq(&backwards), "{}", ks.name());
            for key in KEYS {
                let mark = ks.mark(key).unwrap().map_or(0, Mark::get);
                assert_eq!(mark, of.mark(key), "{} {}", ks.name(), key.escape_ascii());
                assert_eq!(ks.contains_key(key).unwrap(), of.values.contains_key(key));
            }
        }
        assert!(self.db.report().warnings.is_empty(), "{:?}", self.db.report());
    }
}

/// The refusal in the words of the model.
fn refusal(answer: tidewall::Result<()>) -> Result<(), Refused> {
    answer.map_err(|error| match error {
        Error::Fenced { mark, last_operation, .. } => Refused::Fenced { mark: mark.get(), last_operation },
        Error::UnknownToken { .. } => Refused::Unknown,
        Error::Duplicate { lsn } => Refused::Duplicate { lsn: lsn.get() },
        Error::StaleOperation { last, .. } => Refused::Stale { last: last.get() },
        Error::Conflict { .. } => Refused::Conflict,
        Error::InvalidArgument(_) => Refused::SomeOnly,
        other => panic!("{other:?}"),
    })
}

/// How often, and how, the store is opened again.
#[derive(Clone, Copy, Debug)]
struct Restarts {
    every: usize,
    clean_every: usize,
}

fn run(steps: &[Step], restarts: Restarts) {
    let mut run = Run::new();
    let mut last = Lsn::default();
    for (at, step) in steps.iter().enumerate() {
        run.apply(step);
        run.compare();
        if (at + 1).is_multiple_of(restarts.every) {
            run.restart(((at + 1) / restarts.every).is_multiple_of(restarts.clean_every));
            run.compare();
        }
        // The order goes on where it was, and every new token is above all before (L2).
        assert!(run.db.last_lsn() >= last);
        last = run.db.last_lsn();
        let probe = run.spaces[0].lease(b"probe").acquire().unwrap();
        run.adopt_folds();
        assert_eq!(probe.token().get(), run.model.grant(0, b"probe"));
    }
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(100))]

    /// F2, D1, D2, R1, R4, L2.
    #[test]
    fn the_store_is_the_model_after_every_step_and_every_reopening(
        steps in vec(step(), 1..40),
        clean_every in 1usize..4,
    ) {
        run(&steps, Restarts { every: 1, clean_every });
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// The same with longer lives, so that segments fill up within one of them.
    #[test]
    fn the_store_is_the_model_after_every_step_of_a_long_life(
        steps in vec(step(), 1..200),
        every in 10usize..60,
    ) {
        run(&steps, Restarts { every, clean_every: 2 });
    }
}
