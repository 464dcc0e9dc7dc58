//! S1, S2: a view stays what it was.

use crate::store::{Sim, token};
use std::collections::BTreeMap;
use std::iter;
use tidewall::*;

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

fn all(view: &Snapshot, ks: &Keyspace) -> BTreeMap<Vec<u8>, Vec<u8>> {
    view.iter(ks).map(|item| item.map(|(key, value)| (key, value.into_vec())).unwrap()).collect()
}

#[test]
fn s1_s2_a_snapshot_stays_while_keys_are_deleted_and_written_again() {
    // Twice, so that both ways of reading sealed segments are used.
    let sim = Sim::new();
    for round in 0..2u64 {
        let db = sim.open();
        let ks = rows(&db);
        let mut views = Vec::new();
        let mut model = all(&db.snapshot(), &ks);
        for n in 0..300u64 {
            let key = format!("{:02}", n * 7 % 23).into_bytes();
            if n % 3 == 0 {
                ks.delete(token(1), &key).unwrap();
                model.remove(&key);
            } else {
                let value = vec![(n + round) as u8; n as usize * 31 % 6000];
                ks.put(token(1), &key, &value).unwrap();
                model.insert(key, value);
            }
            if n % 10 == 0 {
                views.push((db.snapshot(), model.clone()));
            }
            if n % 70 == 0 {
                ks.delete_prefix(token(1), b"1").unwrap();
                model.retain(|key, _| !key.starts_with(b"1"));
            }
        }
        assert_eq!(db.stats().snapshots, views.len() as u64);
        for (view, model) in &views {
            assert_eq!(&all(view, &ks), model);
            for n in 0..23 {
                let key = format!("{n:02}").into_bytes();
                assert_eq!(view.get(&ks, &key).unwrap().map(Value::into_vec), model.get(&key).cloned());
                assert_eq!(view.contains_key(&ks, &key).unwrap(), model.contains_key(&key));
            }
            let ones = view.prefix(&ks, b"1").rev().map(|item| item.unwrap().0);
            assert!(ones.eq(model.keys().rev().filter(|key| key.starts_with(b"1")).cloned()));
        }
        let (view, model) = views.swap_remove(5);
        drop(views);
        assert_eq!(db.stats().snapshots, 1);
        db.close().unwrap();
        // Behind the close the files may be another process's.
        assert!(!model.is_empty());
        assert_err!(view.get(&ks, b"00"), Error::Closed);
        assert_err!(view.iter(&ks).next().unwrap(), Error::Closed);
    }
}

#[test]
fn s1_an_iterator_is_a_snapshot_of_its_own() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    for n in 0..100u8 {
        ks.put(token(1), &[n], b"old").unwrap();
    }
    let mut walk = ks.iter();
    let mut seen = 0;
    for item in &mut walk {
        let (key, value) = item.unwrap();
        assert_eq!((&key[..], value.bytes()), (&[seen][..], &b"old"[..]));
        seen += 1;
        ks.delete(token(1), &[99 - seen % 50]).unwrap();
        ks.put(token(1), &[seen, 1], b"new").unwrap();
    }
    assert_eq!(seen, 100);
    assert!(walk.next().is_none() && walk.next_back().is_none());
}

#[test]
fn an_iterator_meets_itself_in_the_middle_wherever_that_is() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let mut batch = db.batch();
    for n in 0..200u8 {
        batch.put(&ks, token(1), &[n], &[n]).unwrap();
    }
    batch.commit().unwrap();
    let mut batch = db.batch();
    for n in (0..200u8).filter(|n| n % 5 == 0) {
        batch.delete(&ks, token(1), &[n]).unwrap();
    }
    batch.commit().unwrap();
    let keys: Vec<u8> = (0..200).filter(|n| n % 5 != 0).collect();
    for pattern in [1u32, 0b10, 0b110, 0b1011, 0b11110, 0xFFFF_0000, 0] {
        let mut walk = ks.iter();
        let (mut front, mut back) = (Vec::new(), Vec::new());
        for step in 0u32.. {
            let forwards = pattern.rotate_left(step) & 1 == 1;
            let key = match (forwards, step % 3) {
                (true, 0) => walk.next_with(|key, _| key[0]),
                (true, _) => walk.next().map(|item| item.map(|(key, _)| key[0])),
                (false, 0) => walk.next_back_with(|key, _| key[0]),
                (false, _) => walk.next_back().map(|item| item.map(|(key, _)| key[0])),
            };
            let Some(key) = key else { break };
            let side = if forwards { &mut front } else { &mut back };
            side.push(key.unwrap());
        }
        assert!(walk.next().is_none() && walk.next_back().is_none() && walk.next().is_none());
        front.extend(back.into_iter().rev());
        assert_eq!(front, keys, "pattern {pattern:b}");
    }
}

#[test]
fn ranges_have_every_kind_of_bound_and_void_ones_are_empty() {
    use std::ops::Bound::{self, Excluded, Included, Unbounded};
    use std::ops::RangeBounds;
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let keys: Vec<Vec<u8>> = [&b"a"[..], b"a\0", b"ab", b"b", b"\xff", b"\xff\xff"].map(Vec::from).to_vec();
    for key in &keys {
        ks.put(token(1), key, b"x").unwrap();
    }
    let mut bounds = vec![Unbounded];
    for key in keys.iter().cloned().chain([b"".to_vec(), b"aa".to_vec(), b"zz".to_vec()]) {
        bounds.extend([Included(key.clone()), Excluded(key)]);
    }
    for from in &bounds {
        for to in &bounds {
            let range = (from.clone(), to.clone());
            let inside = keys.iter().filter(|key| {
                let after = match from {
                    Included(from) => *key >= from,
                    Excluded(from) => *key > from,
                    Unbounded => true,
                };
                let before = match to {
                    Included(to) => *key <= to,
                    Excluded(to) => *key < to,
                    Unbounded => true,
                };
                after && before
            });
            let inside: Vec<_> = inside.cloned().collect();
            let found: Vec<_> = ks.range(range.clone()).map(|item| item.unwrap().0).collect();
            assert_eq!(found, inside, "{range:?}");
            let found: Vec<_> = ks.range(range.clone()).rev().map(|item| item.unwrap().0).collect();
            assert!(found.iter().rev().eq(&inside), "{range:?} backwards");
        }
    }
    // Whatever gives bytes is a key of a range, and each kind of range means what it means elsewhere.
    let (a, c) = (&b"a"[..], b"c".to_vec());
    let found = |iter: Iter| iter.map(|item| item.unwrap().0).collect::<Vec<_>>();
    let inside = |from: Bound<&[u8]>, to: Bound<&[u8]>| {
        let is_inside = |key: &&Vec<u8>| (from, to).contains(&key[..]);
        keys.iter().filter(is_inside).cloned().collect::<Vec<_>>()
    };
    let view = db.snapshot();
    for (what, scan, expected) in [
        ("..", ks.range(..), inside(Unbounded, Unbounded)),
        ("a..c", ks.range("a".."c"), inside(Included(a), Excluded(&c))),
        ("a..=c", ks.range(b"a"..=b"c"), inside(Included(a), Included(&c))),
        ("a..", ks.range(a..), inside(Included(a), Unbounded)),
        ("..c", ks.range(..c.clone()), inside(Unbounded, Excluded(&c))),
        ("..=c", ks.range(..=&c), inside(Unbounded, Included(&c))),
        ("behind a", ks.range((Excluded(a), Unbounded)), inside(Excluded(a), Unbounded)),
        ("a..c of a snapshot", view.range(&ks, *b"a"..*b"c"), inside(Included(a), Excluded(&c))),
    ] {
        assert_eq!(found(scan), expected, "{what}");
    }
    for prefix in [&b""[..], b"a", b"a\0", b"\xff", b"\xff\xff\xff"] {
        let found: Vec<_> = ks.prefix(prefix).map(|item| item.unwrap().0).collect();
        let expected: Vec<_> = keys.iter().filter(|key| key.starts_with(prefix)).cloned().collect();
        assert_eq!(found, expected, "{}", prefix.escape_ascii());
    }
}

/// A value that rotted is named, by every reader, and an iterator does not step over it.
#[test]
fn after_an_error_an_iterator_repeats_the_error() {
    for mode in [ReadMode::Map, ReadMode::Pread] {
        let sim = Sim::new();
        let db = sim.open();
        let ks = rows(&db);
        for n in 0..5u8 {
            ks.put(token(1), &[n], &vec![0xA0 + n; 2000]).unwrap();
        }
        db.close().unwrap();
        let bytes = sim.disk.read_file("000001.seg").unwrap();
        let at = bytes.windows(100).position(|window| window == [0xA2; 100]).expect("the value of key 2");
        sim.disk.flip_bit("000001.seg", at as u64 + 50, 0);
        let db = sim.options().read_mode(mode).open("sim").unwrap();
        let ks = rows(&db);
        let is_named = |error: &Error| matches!(error, Error::Corrupt { file, .. } if file == "000001.seg");
        for backwards in [false, true] {
            let mut walk = ks.iter();
            let mut step = || if backwards { walk.next_back() } else { walk.next() };
            assert!(step().unwrap().is_ok() && step().unwrap().is_ok());
            for _ in 0..3 {
                assert!(is_named(&step().unwrap().unwrap_err()));
            }
            assert!(is_named(&walk.next().unwrap().unwrap_err()), "from either end");
            assert!(is_named(&walk.next_back().unwrap().unwrap_err()), "from either end");
            assert!(is_named(&walk.next_with(|_, _| ()).unwrap().unwrap_err()), "borrowed too");
            assert!(is_named(&walk.next_back_with(|_, _| ()).unwrap().unwrap_err()), "borrowed too");
        }
        assert!(is_named(&ks.get(&[2]).unwrap_err()));
        assert!(is_named(&ks.get_with(&[2], drop_bytes).unwrap_err()));
        assert_eq!(ks.get(&[3]).unwrap().unwrap().bytes(), [0xA3; 2000]);
    }
}

fn drop_bytes(_: &[u8]) {}

/// S2 for a single value: it pins its segment, or is a copy.
#[test]
fn s2_a_large_value_stays_readable_after_its_segment_is_sealed_and_the_store_is_closed() {
    for mode in [ReadMode::Map, ReadMode::Pread] {
        let sim = Sim::new();
        let db = sim.options().read_mode(mode).open("sim").unwrap();
        let ks = rows(&db);
        for (n, len) in [4095usize, 4096, 4097, 9000, 100_000].into_iter().enumerate() {
            ks.put(token(1), &[n as u8], &vec![n as u8; len]).unwrap();
        }
        let before: Vec<Value> = ks.iter().map(|item| item.unwrap().1).collect();
        for n in 0..100u32 {
            ks.put(token(1), &n.to_be_bytes(), &[1; 1000]).unwrap();
            ks.delete(token(1), &[n as u8 % 5]).unwrap();
        }
        db.close().unwrap();
        let db = sim.open();
        rows(&db).put(token(1), b"on top", b"x").unwrap();
        for (n, value) in before.iter().enumerate() {
            assert!(value.iter().all(|&byte| byte == n as u8));
            assert_eq!(value.clone().into_vec().len(), [4095, 4096, 4097, 9000, 100_000][n]);
        }
        assert_err!(ks.get(b"on top"), Error::Closed);
        assert_err!(ks.put(token(1), b"a", b""), Error::Closed);
    }
}

/// Sizes around those of the chunks that a walk copies ahead, 16, 64, 256 and 1024, and their sums.
#[test]
fn s1_a_walk_from_both_ends_meets_every_key_once_over_many_chunks() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let mut written = 0u16;
    for keys in [0u16, 1, 4, 5, 15, 16, 17, 47, 48, 79, 80, 81, 336, 337, 1361, 1500] {
        for n in written..keys {
            ks.submit_put(token(1), &n.to_be_bytes(), &n.to_le_bytes()).map(drop).unwrap();
        }
        if keys > 5 {
            ks.delete(token(1), &(keys - 5).to_be_bytes()).unwrap();
        }
        ks.put(token(1), &keys.to_be_bytes(), b"").unwrap();
        ks.delete(token(1), &keys.to_be_bytes()).unwrap();
        written = keys;
        let expected: Vec<Vec<u8>> =
            (0..keys).map(|n| n.to_be_bytes().to_vec()).filter(|key| ks.contains_key(key).unwrap()).collect();
        for turns in [[1, 0], [0, 1], [1, 1], [7, 1], [1, 40]] {
            let (mut walk, mut front, mut back) = (ks.iter(), Vec::new(), Vec::new());
            // Comes into the set of keys under the walk, and is not of its lsn.
            ks.put(token(1), &[0, 0, 0], b"later").unwrap();
            loop {
                let before = front.len() + back.len();
                front.extend(walk.by_ref().take(turns[0]).map(|item| item.unwrap().0));
                back.extend(walk.by_ref().rev().take(turns[1]).map(|item| item.unwrap().0));
                if front.len() + back.len() == before {
                    break;
                }
            }
            front.extend(back.into_iter().rev());
            assert_eq!(front, expected, "{keys} keys, {turns:?} at a time");
            assert!(walk.next().is_none() && walk.next_back().is_none());
            ks.delete(token(1), &[0, 0, 0]).unwrap();
        }
    }
}

/// Small values are read ahead of the walk, several at once; large ones, and what was overwritten, when it is their turn.
#[test]
fn s1_a_walk_shows_small_and_large_old_and_new_values_side_by_side() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    let lengths = [0usize, 1, 100, 511, 512, 513, 4096, 4097];
    let mut expected = BTreeMap::new();
    for n in 0..300usize {
        let (key, value) = (n.to_be_bytes(), vec![n as u8; lengths[n % lengths.len()]]);
        ks.put(token(1), &key, &value).unwrap();
        match n % 7 {
            3 => _ = ks.delete(token(1), &key).unwrap(),
            _ => _ = expected.insert(key.to_vec(), value),
        }
    }
    let view = db.snapshot();
    for n in (0..300usize).step_by(5) {
        ks.put(token(2), &n.to_be_bytes(), b"later").unwrap();
    }
    for _ in 0..2 {
        assert_eq!(all(&view, &ks), expected);
        let back: Vec<_> = view.iter(&ks).rev().map(Result::unwrap).collect();
        let back: Vec<_> = back.iter().map(|(key, value)| (&key[..], value.bytes())).collect();
        let front: Vec<_> = expected.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        assert!(back.iter().rev().eq(&front));
        let owned = |key: &[u8], value: &[u8]| (key.to_vec(), value.to_vec());
        let (mut forwards, mut backwards) = (view.iter(&ks), view.iter(&ks));
        let lent: Vec<_> = iter::from_fn(|| forwards.next_with(owned)).map(Result::unwrap).collect();
        assert!(lent.iter().map(|(key, value)| (&key[..], &value[..])).eq(front.iter().copied()));
        let lent: Vec<_> = iter::from_fn(|| backwards.next_back_with(owned)).map(Result::unwrap).collect();
        assert!(lent.iter().rev().map(|(key, value)| (&key[..], &value[..])).eq(front));
        for (key, value) in view.iter(&ks).map(Result::unwrap) {
            assert_eq!(view.get(&ks, &key).unwrap(), Some(value), "with its token and lsn");
        }
        db.compact().unwrap();
    }
}

/// Each of two snapshots at one lsn keeps what it needs, whichever is dropped first.
#[test]
fn s2_a_snapshot_keeps_what_it_needs_when_its_twin_is_dropped() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    for n in 0..20u8 {
        ks.put(token(1), &[n], &[n; 900]).unwrap();
    }
    let (one, other) = (db.snapshot(), db.snapshot());
    assert_eq!(one.lsn(), other.lsn());
    let then = all(&one, &ks);
    drop(one);
    for n in 0..20u8 {
        ks.delete(token(1), &[n]).unwrap();
    }
    // What nobody sees any more leaves the order of keys a few at a time, then the segments.
    for n in 0..60u8 {
        ks.put(token(1), &[100, n % 3], &[n; 900]).unwrap();
    }
    db.compact().unwrap();
    assert_eq!(all(&other, &ks), then);
    drop(other);
    assert_eq!(ks.iter().count(), 3);
}
