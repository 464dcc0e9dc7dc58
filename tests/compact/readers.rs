//! C2: what a reader needs stays, and readers beside a compaction see neither less nor older things.

use crate::store::{Sim, token};
use crate::{churn, external, prefix};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tidewall::{Db, KeyspaceOptions, Options, ReadMode, Scope, Tokens};

#[test]
fn an_old_snapshot_keeps_its_segments_and_only_them() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db, "rows");
    let write = |round: u8| {
        for n in 0..40u8 {
            rows.put(token(1), &[n], &[round; 700]).unwrap();
        }
    };
    write(0);
    let old = db.snapshot();
    write(1);
    let waiting = db.compact().unwrap().waiting;
    assert!(waiting > 0, "all that the snapshot reads is in them");
    let middle = db.snapshot();
    for round in 2..8 {
        write(round);
        let compacted = db.compact().unwrap();
        assert_eq!(compacted.segments, 0, "they wait for the snapshot: {compacted:?}");
        for (view, value) in [(&old, 0), (&middle, 1)] {
            for n in 0..40u8 {
                assert_eq!(view.get(&rows, &[n]).unwrap().unwrap().bytes(), &[value; 700]);
            }
            assert!(view.iter(&rows).all(|item| item.unwrap().1.bytes() == [value; 700]));
            assert_eq!(view.iter(&rows).rev().count(), 40);
        }
    }
    drop(old);
    let first = db.compact().unwrap();
    assert!(first.segments >= waiting, "{first:?}, {waiting} waited");
    assert!(middle.iter(&rows).all(|item| item.unwrap().1.bytes() == [1; 700]));
    drop(middle);
    let then = db.compact().unwrap();
    assert!(then.segments > 0 && then.waiting == 0, "{then:?}");
    // What is left is what is needed, the active segment and spares.
    let rest = db.stats().disk_bytes;
    assert!(rest <= 12 * (16 << 10), "{rest} bytes are left for {}", db.stats().live_bytes);
    assert!(rows.iter().all(|item| item.unwrap().1.bytes() == [7; 700]));
}

#[test]
fn a_value_in_hand_stays_right_while_its_file_is_used_again() {
    for mode in [ReadMode::Map, ReadMode::Pread] {
        let scratch = tempfile::tempdir().unwrap();
        for real in [false, true] {
            let sim = Sim::new();
            let options = sim.options().read_mode(mode);
            let db = if real {
                let options = Options::new().read_mode(mode).without_threads().segment_bytes(16 << 10);
                options.open(scratch.path().join(format!("{mode:?}"))).unwrap()
            } else {
                options.open("sim").unwrap()
            };
            let rows = external(&db, "rows");
            let mut held = Vec::new();
            for n in 0..6u8 {
                let key = [n];
                rows.put(token(1), &key, &[n; 9_000]).unwrap();
                // One out of the segment that is being written, one out of the sealed one.
                held.push((n, rows.get(&key).unwrap().unwrap()));
                churn(&db);
                held.push((n, rows.get(&key).unwrap().unwrap()));
            }
            let before = db.stats().retired_segments;
            for round in 0..12u8 {
                for n in 0..6u8 {
                    rows.put(token(1), &[n], &[100 + round; 9_000]).unwrap();
                }
                churn(&db);
                db.compact().unwrap();
                for (n, value) in &held {
                    assert_eq!(value.bytes(), &[*n; 9_000], "{mode:?}, real {real}, round {round}");
                }
            }
            assert!(db.stats().retired_segments > before + 20, "{:?}", db.stats());
            drop(held);
        }
    }
}

/// Values carry their number. Readers remember the newest one they saw of each key; what they see next is never
/// older and never missing, in look-ups, scans, snapshots and marks, however much is compacted meanwhile.
fn stress(db: &Db, seconds: f32) {
    const KEYS: u64 = 24;
    let rows = {
        let options = KeyspaceOptions::new().scope(Scope::Prefix(b'/')).tokens(Tokens::External);
        db.keyspace("rows", options).unwrap()
    };
    let name = |n: u64| format!("{n}/k").into_bytes();
    let value = |n: u64, len: usize| {
        let mut bytes = vec![n as u8; len.max(8)];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        bytes
    };
    let number = |bytes: &[u8]| {
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(bytes[8..].iter().all(|&byte| byte == number as u8), "a value of mixed bytes");
        number
    };
    for n in 0..KEYS {
        rows.put(token(1), &name(n), &value(1, 8)).unwrap();
    }
    let stop = AtomicBool::new(false);
    let written: Vec<AtomicU64> = (0..KEYS).map(|_| AtomicU64::new(1)).collect();
    let (reads, compactions) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for writer in 0..2u64 {
            let (rows, stop, written) = (&rows, &stop, &written);
            scope.spawn(move || {
                let mut n = 1;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    for key in (0..KEYS).filter(|key| key % 2 == writer) {
                        let len = [16, 700, 6_000][(n % 3) as usize];
                        // The token is the number as well, so marks tell the same.
                        if key % 3 == 0 {
                            let commit = rows.submit_put(token(n), &name(key), &value(n, len)).unwrap();
                            if n % 5 == 0 {
                                commit.wait().unwrap();
                                written[key as usize].fetch_max(n, Ordering::Release);
                            }
                        } else {
                            rows.put(token(n), &name(key), &value(n, len)).unwrap();
                            written[key as usize].fetch_max(n, Ordering::Release);
                        }
                    }
                }
            });
        }
        for reader in 0..2u64 {
            let (db, rows, stop, written, reads) = (db, &rows, &stop, &written, &reads);
            scope.spawn(move || {
                let mut seen = vec![1u64; KEYS as usize];
                let mut marks = vec![1u64; KEYS as usize];
                let mut round = reader;
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    for key in 0..KEYS {
                        let at = key as usize;
                        let known = written[at].load(Ordering::Acquire);
                        let found = match round % 2 {
                            0 => rows.get(&name(key)).unwrap().map(|value| number(&value)),
                            _ => rows.get_with(&name(key), |bytes| number(bytes)).unwrap(),
                        };
                        let found = found.unwrap_or_else(|| panic!("key {key} is missing"));
                        assert!(
                            found >= seen[at].max(known),
                            "key {key}: {found} after {} and {known}",
                            seen[at]
                        );
                        seen[at] = found;
                        let mark = rows.mark(&name(key)).unwrap().map_or(0, |mark| mark.get());
                        assert!(mark >= marks[at].max(found), "mark {mark} after {} and {found}", marks[at]);
                        marks[at] = mark;
                        assert!(rows.contains_key(&name(key)).unwrap());
                    }
                    if round % 4 == reader {
                        let view = db.snapshot();
                        let first: Vec<_> =
                            view.iter(rows).map(|i| i.map(|(k, v)| (k, number(&v))).unwrap()).collect();
                        assert_eq!(first.len() as u64, KEYS);
                        thread::yield_now();
                        let mut then: Vec<_> =
                            view.iter(rows).rev().map(|i| i.map(|(k, v)| (k, number(&v))).unwrap()).collect();
                        then.reverse();
                        assert_eq!(first, then, "a snapshot that changes");
                        for (key, then) in &first {
                            assert_eq!(view.get(rows, key).unwrap().map(|value| number(&value)), Some(*then));
                        }
                    }
                    reads.fetch_add(KEYS, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            let _stop = crate::readers::Stop(&stop);
            while !stop.load(Ordering::Relaxed) {
                db.compact().unwrap();
                compactions.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _stop = Stop(&stop);
        let start = Instant::now();
        // On a busy machine it takes longer to have done something.
        let is_over = |passed: Duration| {
            let enough = db.stats().retired_segments > 20 || passed > Duration::from_secs(120);
            enough && passed >= Duration::from_secs_f32(seconds)
        };
        while !is_over(start.elapsed()) && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
    });
    let stats = db.stats();
    println!(
        "{} reads beside {} compactions, {} segments retired",
        reads.into_inner(),
        compactions.into_inner(),
        stats.retired_segments
    );
    assert!(stats.retired_segments > 20, "{stats:?}");
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn readers_beside_compaction_see_nothing_missing_or_older() {
    let sim = Sim::new();
    stress(&sim.open_threaded(), 2.5);
}

#[test]
fn readers_beside_compaction_on_a_real_disk() {
    for mode in [ReadMode::Map, ReadMode::Pread] {
        let scratch = tempfile::tempdir().unwrap();
        let options = Options::new().segment_bytes(16 << 10).read_mode(mode);
        stress(&options.open(scratch.path()).unwrap(), 2.0);
    }
}

/// Nothing but reads and leases beside a compactor: grants are handed out and marks rise.
#[test]
fn leases_beside_compaction_are_never_fenced_while_live() {
    let sim = Sim::new();
    let db = sim.open_threaded();
    let jobs = prefix(&db, "jobs");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for worker in 0..3 {
            let (jobs, stop) = (&jobs, &stop);
            scope.spawn(move || {
                let mut highest = 0;
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let key = format!("{worker}-{}/x", n % 50);
                    let lease = jobs.lease(key.as_bytes()).acquire().unwrap();
                    assert!(lease.token().get() > highest);
                    highest = lease.token().get();
                    jobs.put(lease.token(), key.as_bytes(), &[1; 500]).unwrap();
                    lease.renew().unwrap();
                    jobs.delete(lease.token(), key.as_bytes()).unwrap();
                    jobs.put(lease.token(), key.as_bytes(), b"twice").unwrap();
                    jobs.delete(lease.token(), key.as_bytes()).unwrap();
                    lease.release().unwrap();
                }
            });
        }
        let _stop = Stop(&stop);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            db.compact().unwrap();
        }
    });
    assert!(db.stats().folds > 3, "{:?}", db.stats());
    let lsn = db.last_lsn();
    drop(jobs);
    db.close().unwrap();
    let db = sim.open();
    assert!(db.last_lsn() >= lsn);
    assert_eq!(prefix(&db, "jobs").iter().count(), 0);
}
