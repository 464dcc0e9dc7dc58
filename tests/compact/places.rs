//! C1: values, marks, lsns, snapshots and numbered operations are the same before and after.

use crate::store::{Sim, op, token};
use crate::support::Rng;
use crate::{FILL, churn, external, key, prefix, whole};
use std::collections::BTreeMap;
use tidewall::storage::Crash;
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, LastOperation, Lease, Scope, Snapshot, Token, Tokens};

const KEYS: [&[u8]; 9] = [b"a", b"a/", b"a/1", b"a/2", b"b/1", b"b/2", b"c", b"d", b"\xff"];
const SCOPES: [Scope; 3] = [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace];

type Shown = Vec<(String, Vec<(Vec<u8>, Vec<u8>, u64, u64)>, Vec<Option<u64>>, Option<u64>)>;

fn spaces(db: &Db) -> Vec<Keyspace> {
    let mut spaces = Vec::new();
    for (at, scope) in SCOPES.into_iter().enumerate() {
        for tokens in [Tokens::Store, Tokens::External] {
            let options = KeyspaceOptions::new().scope(scope).tokens(tokens);
            spaces.push(db.keyspace(&format!("{at}-{tokens:?}"), options).unwrap());
        }
    }
    spaces
}

fn is_store(ks: &Keyspace) -> bool {
    ks.name().ends_with("Store")
}

fn is_whole(ks: &Keyspace) -> bool {
    ks.name().starts_with('2')
}

/// Everything there is to see, read in every way there is.
fn everything(db: &Db) -> Shown {
    let show = |ks: Keyspace| {
        let values: Vec<_> = ks.iter().map(Result::unwrap).collect();
        let backwards: Vec<_> = ks.iter().rev().map(Result::unwrap).collect();
        assert!(values.iter().rev().eq(&backwards));
        for (key, value) in &values {
            assert_eq!(ks.get(key).unwrap().as_ref(), Some(value));
        }
        for key in KEYS {
            assert_eq!(ks.contains_key(key).unwrap(), values.iter().any(|(found, _)| found == key));
        }
        let values = values
            .into_iter()
            .map(|(key, value)| (key, value.to_vec(), value.token().get(), value.lsn().get()))
            .collect();
        let marks = KEYS.map(|key| ks.mark(key).unwrap().map(|mark| mark.get())).to_vec();
        (ks.name().to_owned(), values, marks, ks.floor().map(|floor| floor.mark.get()))
    };
    spaces(db).into_iter().map(show).collect()
}

fn seen(db: &Db, snapshot: &Snapshot) -> Vec<(Vec<u8>, Vec<u8>, u64)> {
    let mut all = Vec::new();
    for ks in spaces(db) {
        let listed: Vec<_> = snapshot.iter(&ks).map(Result::unwrap).collect();
        for key in KEYS {
            let value = snapshot.get(&ks, key).unwrap();
            assert_eq!(value.as_ref(), listed.iter().find(|(found, _)| found == key).map(|(_, value)| value));
        }
        all.extend(listed.into_iter().map(|(key, value)| (key, value.to_vec(), value.lsn().get())));
    }
    all
}

/// One leader in each keyspace of store-issued tokens holds a lease all along, so that nothing folds and every
/// mark must stay.
struct Life {
    db: Db,
    leaders: Vec<Lease>,
    rng: Rng,
    last_operation: u64,
}

impl Life {
    fn new(db: Db, seed: u64) -> Self {
        let mut life = Life { db, leaders: Vec::new(), rng: Rng(seed), last_operation: 0 };
        life.lead();
        life
    }

    fn lead(&mut self) {
        for ks in spaces(&self.db).iter().filter(|ks| is_store(ks)) {
            let key: &[u8] = if is_whole(ks) { b"" } else { b"leader" };
            self.leaders.push(ks.lease(key).ttl(tidewall::Ttl::INFINITE).acquire().unwrap());
        }
    }

    fn token(&mut self, ks: &Keyspace, key: &[u8]) -> Token {
        let mark = ks.mark(key).unwrap().map_or(1, |mark| mark.get());
        match is_store(ks) {
            false => token(mark + self.rng.below(2)),
            // The leader of the keyspace holds it.
            _ if is_whole(ks) => token(mark),
            _ if mark == 1 || self.rng.chance(30) => match ks.lease(key).acquire() {
                Ok(lease) => lease.token(),
                Err(Error::Held { .. }) => token(mark),
                Err(other) => panic!("{other}"),
            },
            _ => token(mark),
        }
    }

    fn step(&mut self) {
        let all = spaces(&self.db);
        let ks = self.rng.pick(&all).clone();
        let key = *self.rng.pick(&KEYS);
        let token = self.token(&ks, key);
        self.last_operation += 1;
        let len = [20, 300, 900, 5000][self.rng.below(4) as usize];
        let value = vec![self.rng.next() as u8; len];
        match self.rng.below(10) {
            0..=4 => drop(ks.put(token, key, &value).unwrap()),
            5 => drop(ks.put_operation(token, op(self.last_operation), key, &value).unwrap()),
            6..=7 => drop(ks.delete(token, key).unwrap()),
            8 => drop(ks.delete_prefix(token, key)),
            _ => drop(ks.raise(token, key).unwrap()),
        }
    }
}

#[test]
fn nothing_that_can_be_seen_changes() {
    let mut retired = 0;
    for seed in 1..13 {
        let mut sim = Sim::new();
        let mut life = Life::new(sim.open(), seed);
        for round in 0..6 {
            let mut views = Vec::new();
            for _ in 0..4 {
                (0..15).for_each(|_| life.step());
                let view = life.db.snapshot();
                views.push((seen(&life.db, &view), view));
            }
            let before = everything(&life.db);
            retired += life.db.compact().unwrap().segments;
            assert_eq!(everything(&life.db), before, "seed {seed}, round {round}");
            for (then, view) in &views {
                assert_eq!(&seen(&life.db, view), then, "a snapshot of seed {seed}, round {round}");
            }
            // Once more, with the oldest reader gone.
            drop(views.remove(0));
            retired += life.db.compact().unwrap().segments;
            assert_eq!(everything(&life.db), before, "seed {seed}, round {round}, twice");
            for (then, view) in &views {
                assert_eq!(&seen(&life.db, view), then, "a snapshot of seed {seed}, round {round}, twice");
            }
            drop(views);
            retired += life.db.compact().unwrap().segments;
            assert_eq!(everything(&life.db), before, "seed {seed}, round {round}, alone");
            if round % 2 == 1 {
                // Without an end, and never given back: they pin the floors in the next life too.
                life.leaders.drain(..).for_each(std::mem::forget);
                let lsn = life.db.last_lsn();
                life.db = if round == 3 { sim.power_cut() } else { sim.reopen(life.db) };
                assert!(life.db.last_lsn() >= lsn);
                assert_eq!(everything(&life.db), before, "seed {seed}, round {round}, reopened");
            }
        }
    }
    assert!(retired > 100, "only {retired} segments were retired: this shows little");
}

#[test]
fn a_numbered_operation_is_answered_the_same() {
    let sim = Sim::new();
    let mut db = sim.open();
    for gone in [false, true] {
        let name = |of: &str| format!("{of}-{gone}");
        let (keys, jobs, all) =
            (key(&db, &name("keys")), prefix(&db, &name("jobs")), whole(&db, &name("all")));
        let rows = external(&db, &name("rows"));
        // Pins what is below it, so that only places change.
        let pins: Vec<Lease> = [&keys, &jobs]
            .iter()
            .map(|ks| ks.lease(b"pin").ttl(tidewall::Ttl::INFINITE).acquire().unwrap())
            .collect();
        let mut lsns: BTreeMap<String, u64> = BTreeMap::new();
        let mut tokens = BTreeMap::new();
        for ks in [&keys, &jobs, &all] {
            let fence: &[u8] = if ks.name().starts_with("all") { b"" } else { b"k/" };
            let first = ks.lease(fence).acquire().unwrap();
            ks.put_operation(first.token(), op(3), b"k/", b"first").unwrap();
            let was = first.token();
            first.release().unwrap();
            let next = ks.lease(fence).acquire().unwrap();
            assert_eq!(next.predecessor(), Some((was, op(3))));
            ks.put(next.token(), b"k/", b"plain").unwrap();
            let lsn = ks.put_operation(next.token(), op(9), b"k/", b"numbered").unwrap();
            if gone {
                ks.delete(next.token(), b"k/").unwrap();
            } else {
                ks.put(next.token(), b"k/", b"over").unwrap();
            }
            lsns.insert(ks.name().to_owned(), lsn.get());
            tokens.insert(ks.name().to_owned(), (was, next));
        }
        let lsn = rows.put_operation(token(50), op(9), b"k/", b"numbered").unwrap();
        lsns.insert(rows.name().to_owned(), lsn.get());
        let check = |db: &Db| {
            for (ks, token_now) in
                [key(db, &name("keys")), prefix(db, &name("jobs")), whole(db, &name("all"))]
                    .iter()
                    .map(|ks| (ks, tokens[ks.name()].1.token()))
                    .chain([(&external(db, &name("rows")), token(50))])
            {
                let again = ks.put_operation(token_now, op(9), b"k/", b"again");
                assert_err!(again, Error::Duplicate { lsn } if lsn.get() == lsns[ks.name()]);
                assert_err!(ks.put_operation(token_now, op(8), b"k/", b"x"), Error::StaleOperation { last, .. } if last == op(9));
                if let Some((was, _)) = tokens.get(ks.name()) {
                    let late = ks.put(*was, b"k/", b"late");
                    assert_err!(late, Error::Fenced { last_operation: LastOperation::Committed(found), .. } if found == op(3));
                }
            }
        };
        check(&db);
        for round in 0..4 {
            churn(&db);
            assert!(db.compact().unwrap().segments > 0);
            check(&db);
            let fork = sim.fork();
            check(&fork.open());
            if round == 1 {
                // What was carried is carried again.
                db.compact().unwrap();
                check(&db);
            }
        }
        drop((pins, tokens));
        db = sim.reopen(db);
    }
}

#[test]
fn the_counter_and_the_cap_survive() {
    let mut sim = Sim::new();
    let db = sim.open();
    let capped = |db: &Db| {
        db.keyspace("capped", KeyspaceOptions::new().tokens(Tokens::External).token_jump_cap(100)).unwrap()
    };
    let ks = capped(&db);
    ks.put(token(1_000), b"row", b"x").unwrap();
    ks.put(token(1_090), b"other", b"x").unwrap();
    ks.delete(token(1_090), b"other").unwrap();
    db.advance_tokens(token(5_000)).unwrap();
    // Nothing else of the store is at work: the counter lives in one op and in headers.
    for _ in 0..4 {
        churn(&db);
        db.compact().unwrap();
    }
    // All that held it is gone.
    db.compact().unwrap();
    db.compact().unwrap();
    drop((ks, db));
    let db = sim.power_cut();
    let lease = key(&db, "keys").lease(b"k").acquire().unwrap();
    assert_eq!(lease.token().get(), 5_001);
    assert_err!(capped(&db).put(token(1_191), b"row", b"far"), Error::TokenJump { .. });
    capped(&db).put(token(1_190), b"row", b"near").unwrap();
    // A mark that `retire_below` lets go was the highest admitted: the cap still counts from there.
    capped(&db).delete(token(1_190), b"row").unwrap();
    capped(&db).retire_below(token(1_191)).unwrap();
    for _ in 0..3 {
        churn(&db);
        db.compact().unwrap();
    }
    assert_eq!(capped(&db).mark(b"row").unwrap().unwrap().get(), 1_190);
    let db = sim.power_cut();
    assert_err!(capped(&db).put(token(1_291), b"row", b"far"), Error::TokenJump { .. });
    capped(&db).put(token(1_290), b"row", b"near").unwrap();
}

/// A grant raises the counter, is given back, folded and gone, and no token is ever granted twice.
#[test]
fn no_token_is_granted_twice_when_all_that_named_it_is_gone() {
    let mut sim = Sim::new();
    let mut db = sim.open();
    let mut highest = 0;
    for round in 0..8 {
        let lease = key(&db, "keys").lease(b"job").acquire().unwrap();
        assert!(lease.token().get() > highest, "round {round}");
        highest = lease.token().get();
        lease.release().unwrap();
        for _ in 0..=round % 3 {
            db.compact().unwrap();
        }
        let lsn = db.last_lsn();
        db = if round % 2 == 0 { sim.power_cut() } else { sim.reopen(db) };
        assert!(db.last_lsn() >= lsn, "the order went back");
    }
}

/// Releases wait to ride with a group; more of them than a segment holds must not keep compaction from leaving a
/// frame behind what it retires, or the counter and the newest lsn would go with it.
#[test]
fn releases_that_fill_a_segment_leave_a_frame_behind() {
    const HELD: usize = 400;
    let mut sim = Sim::new();
    let db = sim.open();
    let keys = key(&db, "keys");
    let leases: Vec<Lease> =
        (0..HELD).map(|n| keys.lease(format!("{n:0>400}").as_bytes()).acquire().unwrap()).collect();
    let highest = leases.last().unwrap().token();
    for lease in leases {
        lease.release().unwrap();
    }
    let lsn = db.last_lsn();
    for _ in 0..4 {
        db.compact().unwrap();
    }
    assert!(db.last_lsn() >= lsn);
    let lsn = db.last_lsn();
    drop((keys, db));
    let db = sim.power_cut();
    assert!(db.last_lsn() >= lsn, "{} came back instead of {lsn}", db.last_lsn());
    let lease = key(&db, "keys").lease(b"job").acquire().unwrap();
    assert!(lease.token() > highest, "{} was granted again", lease.token());
}

/// Keyspaces are created by an op in the first segment; it is carried behind ops that need it.
#[test]
fn the_op_that_creates_a_keyspace_may_lie_behind_its_ops() {
    let mut sim = Sim::new();
    let mut db = sim.open();
    let rows = external(&db, "rows");
    rows.put(token(9), b"cold", &FILL).unwrap();
    churn(&db);
    churn(&db);
    // The first segment goes, again and again; cold values of the second one stay where they are.
    for n in 0..30u8 {
        rows.put(token(9), &[n], &FILL).unwrap();
    }
    for round in 0..6 {
        assert!(db.compact().unwrap().segments > 0, "round {round}");
        let image = sim.disk.crash(Crash::None, round);
        let copy = Sim::on(image).options().deterministic(90 + round).open("sim").unwrap();
        assert_eq!(external(&copy, "rows").iter().count(), 31);
        churn(&db);
        assert_eq!(db.keyspaces().len(), 2);
    }
    churn(&db);
    drop(rows);
    db = sim.power_cut();
    assert_eq!(external(&db, "rows").get(b"cold").unwrap().unwrap().bytes(), &FILL);
}
