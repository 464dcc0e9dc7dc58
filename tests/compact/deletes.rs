//! C4 and C3: marks outlive values, and a delete covers what it covered for as long as that exists.

use crate::store::{Sim, token};
use crate::support::Rng;
use crate::{FILL, churn, external, key, prefix};
use std::collections::BTreeMap;
use tidewall::storage::Crash;
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Options, Scope, Tokens};

fn rows(db: &Db) -> Keyspace {
    let options = KeyspaceOptions::new().tokens(Tokens::External).scope(Scope::Prefix(b'/'));
    db.keyspace("rows", options).unwrap()
}

/// A cold segment: fifteen values that stay, and one small old version of `name`, so little garbage that the
/// segment is never worth a round.
fn cold(ks: &Keyspace, name: &[u8], n: u8) {
    for m in 0..15u8 {
        ks.put(token(5), &[b'c', n, m], &FILL).unwrap();
        if m == 7 {
            ks.put(token(5), name, &[b'v', n]).unwrap();
        }
    }
}

#[test]
fn an_older_version_in_a_segment_that_stays_does_not_come_back() {
    for deep in [true, false] {
        let sim = Sim::new();
        let db = sim.open();
        let rows = rows(&db);
        for n in 0..3 {
            cold(&rows, b"7/job", n);
        }
        rows.delete(token(6), b"7/job").unwrap();
        let absent = |db: &Db, round| {
            let ks = self::rows(db);
            assert_eq!(ks.get(b"7/job").unwrap().map(|v| v.into_vec()), None, "deep {deep}, round {round}");
            assert!(!ks.iter().any(|item| item.unwrap().0 == b"7/job"));
            assert_eq!(ks.mark(b"7/").unwrap().unwrap().get(), 6);
            assert_err!(ks.put(token(5), b"7/job", b"late"), Error::Fenced { .. });
            assert_eq!(ks.iter().count(), 45);
        };
        let mut retired = 0;
        for round in 0..12 {
            if deep {
                churn(&db);
                retired += db.compact().unwrap().segments;
            } else {
                let before = db.stats().retired_segments;
                (0..8).for_each(|_| churn(&db));
                retired += (db.stats().retired_segments - before) as u32;
            }
            absent(&db, round);
            let fork = sim.fork();
            let other = fork.open();
            absent(&other, round);
            // The fork goes on compacting by itself: the delete must still cover what is there.
            churn(&other);
            other.compact().unwrap();
            absent(&fork.fork().open(), round);
        }
        assert!(retired > 10, "{retired}");
        // Once the cold values go, so do the versions below the delete, and then the delete.
        let dropped = db.stats().dropped_deletes;
        for n in 0..3 {
            for m in 0..15u8 {
                rows.delete(token(5), &[b'c', n, m]).unwrap();
            }
        }
        for _ in 0..4 {
            churn(&db);
            db.compact().unwrap();
        }
        assert!(db.stats().dropped_deletes > dropped + 40, "{:?}", db.stats());
        let db = sim.reopen(db);
        assert_eq!(self::rows(&db).iter().count(), 0);
        assert_eq!(self::rows(&db).mark(b"7/").unwrap().unwrap().get(), 6, "a mark outlives its values");
        assert_err!(self::rows(&db).put(token(5), b"7/job", b"late"), Error::Fenced { .. });
    }
}

/// The deletes of one round and what they cover, in segments of which only some are in the round.
#[test]
fn many_keys_in_every_order_stay_as_they_are() {
    let mut dropped = 0;
    for seed in 1..25u64 {
        let mut rng = Rng(seed);
        let mut sim = Sim::new();
        let mut db = sim.open();
        let mut values: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        let mut marks: BTreeMap<u64, u64> = BTreeMap::new();
        for step in 0..260 {
            let ks = rows(&db);
            let fence = rng.below(6);
            let key = format!("{fence}/{}", rng.below(5)).into_bytes();
            let mark = marks.entry(fence).or_insert(1);
            let what = rng.below(100);
            // A fence whose mark is known to be above 1 was written with it.
            if rng.chance(20) && (what < 70 || (75..85).contains(&what)) {
                *mark += 1;
            }
            match what {
                0..=39 => {
                    let value = vec![step as u8; [4, 200, 2000][rng.below(3) as usize]];
                    ks.put(token(*mark), &key, &value).unwrap();
                    values.insert(key, value);
                }
                40..=69 => {
                    ks.delete(token(*mark), &key).unwrap();
                    values.remove(&key);
                }
                70..=74 => {
                    let gone = format!("{fence}/").into_bytes();
                    let deleted = ks.delete_prefix(token(*mark), &gone).unwrap();
                    let before = values.len();
                    values.retain(|key, _| !key.starts_with(&gone));
                    assert_eq!(deleted.keys, before - values.len());
                }
                75..=84 => drop(ks.raise(token(*mark), &key).unwrap()),
                85..=92 => churn(&db),
                _ => drop(db.compact().unwrap()),
            }
            if rng.chance(12) {
                dropped += db.stats().dropped_deletes;
                drop(ks);
                db = if rng.chance(50) { sim.power_cut() } else { sim.reopen(db) };
            }
            let ks = rows(&db);
            let found: BTreeMap<Vec<u8>, Vec<u8>> =
                ks.iter().map(|item| item.map(|(key, value)| (key, value.to_vec())).unwrap()).collect();
            assert!(found == values, "seed {seed}, step {step}: {:?} for {:?}", found.keys(), values.keys());
            for (fence, mark) in &marks {
                let name = format!("{fence}/").into_bytes();
                let shown = ks.mark(&name).unwrap().map_or(1, |mark| mark.get());
                assert_eq!(shown, *mark, "seed {seed}, step {step}, fence {fence}");
                if *mark > 1 {
                    assert_err!(ks.put(token(mark - 1), &name, b"late"), Error::Fenced { .. });
                }
            }
        }
    }
    assert!(dropped > 100, "{dropped} deletes were dropped: this shows little");
}

/// In a keyspace where each key is its own fence the delete carries the mark; nothing else does.
#[test]
fn a_mark_outlives_its_value_in_every_scope() {
    let mut sim = Sim::new();
    let mut db = sim.open();
    let store = |db: &Db| [key(db, "keys"), prefix(db, "jobs")];
    for ks in store(&db) {
        // Pins the floor below it: only places may change.
        crate::keep(ks.lease(b"pin").ttl(tidewall::Ttl::INFINITE).acquire().unwrap());
        let first = ks.lease(b"k/").acquire().unwrap();
        first.release().unwrap();
        let lease = ks.lease(b"k/").acquire().unwrap();
        ks.put(lease.token(), b"k/", b"x").unwrap();
        ks.delete(lease.token(), b"k/").unwrap();
    }
    let raw = external(&db, "raw");
    raw.put(token(70), b"k/", b"x").unwrap();
    raw.delete(token(71), b"k/").unwrap();
    raw.raise(token(80), b"raised").unwrap();
    drop(raw);
    for round in 0..8 {
        churn(&db);
        assert!(db.compact().unwrap().segments > 0);
        for ks in store(&db) {
            let mark = ks.mark(b"k/").unwrap().unwrap().get();
            assert_eq!(mark, if ks.name() == "keys" { 3 } else { 6 }, "{} in round {round}", ks.name());
            assert_err!(ks.put(token(mark - 1), b"k/", b"late"), Error::Fenced { .. });
            assert_eq!(ks.get(b"k/").unwrap(), None);
        }
        assert_eq!(external(&db, "raw").mark(b"k/").unwrap().unwrap().get(), 71);
        assert_err!(external(&db, "raw").put(token(70), b"k/", b"late"), Error::Fenced { .. });
        assert_eq!(external(&db, "raw").mark(b"raised").unwrap().unwrap().get(), 80);
        db = if round % 2 == 0 { sim.power_cut() } else { sim.reopen(db) };
    }
}

/// A reader from before the delete still sees the value, however often is compacted meanwhile; then both go.
#[test]
fn a_delete_waits_for_who_still_sees_the_value() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = rows(&db);
    rows.put(token(5), b"7/job", b"value").unwrap();
    rows.put(token(5), b"8/job", b"value").unwrap();
    let view = db.snapshot();
    rows.delete(token(5), b"7/job").unwrap();
    for _ in 0..4 {
        churn(&db);
        db.compact().unwrap();
        assert_eq!(view.get(&rows, b"7/job").unwrap().unwrap().bytes(), b"value");
        assert_eq!(view.iter(&rows).count(), 2);
        assert_eq!(rows.get(b"7/job").unwrap(), None);
    }
    assert_eq!(db.stats().dropped_deletes, 0);
    let fork = sim.disk.crash(Crash::None, 1);
    let again = Options::new().storage(fork).deterministic(4_711).without_threads().segment_bytes(16 << 10);
    assert_eq!(self::rows(&again.open("sim").unwrap()).iter().count(), 1);
    drop(view);
    for _ in 0..3 {
        churn(&db);
        db.compact().unwrap();
    }
    assert_eq!(db.stats().dropped_deletes, 1);
    assert_eq!(rows.get(b"7/job").unwrap(), None);
}

/// Bitcask 212: what does not verify is neither given a right checksum elsewhere nor thrown away.
#[test]
fn damage_is_not_carried_on() {
    let mut sim = Sim::new();
    let db = sim.open();
    let rows = rows(&db);
    for n in 0..30u8 {
        rows.put(token(5), &[b'k', n], &FILL).unwrap();
    }
    for n in (0..30u8).step_by(2) {
        rows.delete(token(5), &[b'k', n]).unwrap();
    }
    churn(&db);
    drop(rows);
    db.close().unwrap();
    // A byte of a large value: opening reads it not.
    let names = sim.disk.file_names().into_iter().filter(|name| name.ends_with(".seg"));
    let (name, at) = names
        .filter_map(|name| {
            let bytes = sim.disk.read_file(&name)?;
            let value = bytes.windows(FILL.len()).rposition(|bytes| bytes == FILL)?;
            Some((name, value))
        })
        .min()
        .unwrap();
    sim.disk.flip_bit(&name, at as u64 + 400, 3);
    let db = sim.open();
    assert_err!(db.compact(), Error::Corrupt { file, .. } if file == name);
    assert!(sim.disk.read_file(&name).is_some(), "it is for `verify` and `salvage`");
    let damaged = (0..30u8).filter(|n| self::rows(&db).get(&[b'k', *n]).is_err());
    assert_eq!(damaged.count(), 1);
    drop(db);
    sim.power_cut();
    assert!(sim.disk.read_file(&name).is_some());
}

/// A round that leaves more than its last segment for the next one let go of deletes for what these still hold:
/// segments full of deletes cost nothing to the eye, so they come first, and what they cover comes last.
#[test]
fn a_round_cut_short_lets_no_delete_go_that_covers_what_stays() {
    const KEYS: u32 = 1500;
    let sim = Sim::new();
    let db = sim.options().compaction(false).open("sim").unwrap();
    let name = |n: u32| format!("7/{n:06}").into_bytes();
    let stays = |n: u32| n.is_multiple_of(50);
    for n in 0..KEYS {
        rows(&db).put(token(5), &name(n), b"old").unwrap();
    }
    for n in (0..KEYS).filter(|&n| !stays(n)) {
        rows(&db).delete(token(5), &name(n)).unwrap();
    }
    // One that costs more than all of these, and covers nothing.
    for n in 0..13u8 {
        rows(&db).put(token(5), &[b'c', n % 10], &FILL).unwrap();
    }
    churn(&db);
    let db = sim.reopen(db);
    let mut dropped = 0;
    for n in 0..60u8 {
        external(&db, "churn").put(token(1), &[n % 3], &FILL).unwrap();
        dropped = db.stats().dropped_deletes;
        let fork = sim.fork();
        let left = rows(&fork.open()).prefix(b"7/").count();
        assert_eq!(
            left,
            (0..KEYS).filter(|&n| stays(n)).count(),
            "after {n} writes, {dropped} deletes dropped"
        );
    }
    assert!(dropped > 0);
}
