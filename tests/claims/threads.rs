//! The same promises when many call at once, on a real disk or behind a gate.

use crate::gate::Gate;
use crate::store::{secs, token};
use crate::watched::Watched;
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;
use tidewall::storage::SimDisk;
use tidewall::*;

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

/// The last group of a store that is idle is proven by one frame more, and by no second one.
#[test]
fn an_idle_store_proves_its_last_group_once() {
    let disk = SimDisk::new();
    let db = Options::new().storage(disk.clone()).open("sim").unwrap();
    let lsn = rows(&db).put(token(1), b"key", b"value").unwrap();
    until(|| db.last_lsn() > lsn);
    let killed = Options::new().storage(disk.kill()).read_only().open("sim").unwrap();
    assert!(rows(&killed).get(b"key").unwrap().is_some(), "a read-only open shows what is proven");
    thread::sleep(Duration::from_millis(200));
    assert_eq!(db.last_lsn().get(), lsn.get() + 1);
    assert_eq!(db.stats().group_writes.count, 2, "no writer waited for the idle one");
    // The committer sleeps without an end by now, and has to be told that there is something to prove.
    let lsn = rows(&db).put(token(1), b"key", b"again").unwrap();
    until(|| db.last_lsn() > lsn);
}

/// D1 with company: each thread's writes are in its order, and all are there after reopening.
#[test]
fn d1_many_writers_are_each_in_their_own_order_and_nothing_is_lost() {
    const THREADS: u64 = 8;
    const PUTS: u64 = 400;
    let dir = tempfile::tempdir().unwrap();
    let open =
        |mode| Options::new().segment_bytes(64 << 10).read_mode(mode).open(dir.path().join("d")).unwrap();
    let db = open(ReadMode::Map);
    let ks = rows(&db);
    let all: Vec<Vec<Lsn>> = thread::scope(|scope| {
        let writer = |writer: u64| {
            let ks = &ks;
            move || {
                let put = |n: u64| {
                    let key = [writer.to_be_bytes(), n.to_be_bytes()].concat();
                    let lsn = ks.put(token(1 + n), &key, &n.to_le_bytes()).unwrap();
                    assert_eq!(ks.get(&key).unwrap().unwrap().lsn(), lsn, "visible to its own writer");
                    lsn
                };
                (0..PUTS).map(put).collect::<Vec<_>>()
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(writer(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|lsns| lsns.is_sorted_by(|a, b| a < b)));
    let distinct: BTreeSet<Lsn> = all.iter().flatten().copied().collect();
    assert_eq!(distinct.len() as u64, THREADS * PUTS);
    assert!(db.stats().commits <= db.stats().writes);
    assert_eq!(db.stats().writes, THREADS * PUTS);
    db.close().unwrap();
    let db = open(ReadMode::Pread);
    let ks = rows(&db);
    let found: Vec<(Vec<u8>, Value)> = ks.iter().map(Result::unwrap).collect();
    assert_eq!(found.len() as u64, THREADS * PUTS);
    for (at, (_, value)) in found.iter().enumerate() {
        assert_eq!(value.lsn(), all[at / PUTS as usize][at % PUTS as usize]);
    }
}

/// L1, L2: one holder at a time, each token its own, increasing per fence and never below the mark.
#[test]
fn l1_l2_sixteen_threads_on_three_fences_never_hold_one_twice() {
    const KEYS: [&[u8]; 3] = [b"a", b"b", b"c"];
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let ks = db.keyspace("k", KeyspaceOptions::new()).unwrap();
    let held: [AtomicBool; 3] = Default::default();
    let newest: [AtomicU64; 3] = Default::default();
    let tokens = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 0..16usize {
            let (ks, held, newest, tokens) = (&ks, &held, &newest, &tokens);
            scope.spawn(move || {
                let mut mine = Vec::new();
                for round in 0..120usize {
                    let at = (n + round) % 3;
                    match ks.lease(KEYS[at]).ttl(secs(1000)).acquire() {
                        Ok(lease) => {
                            assert!(!held[at].swap(true, Ordering::SeqCst), "two holders of one fence");
                            let before = newest[at].swap(lease.token().get(), Ordering::SeqCst);
                            assert!(before < lease.token().get());
                            ks.put(lease.token(), KEYS[at], b"mine").unwrap();
                            mine.push(lease.token());
                            held[at].store(false, Ordering::SeqCst);
                            match round % 3 {
                                0 => drop(lease),
                                1 => lease.release().unwrap(),
                                _ => {
                                    let (token, owner) = (lease.token(), lease.owner());
                                    ks.release(KEYS[at], token, owner).unwrap();
                                    assert_err!(lease.release(), Error::NotHeld { .. });
                                }
                            }
                        }
                        Err(Error::Held { .. }) => thread::yield_now(),
                        Err(other) => panic!("{other:?}"),
                    }
                }
                tokens.lock().unwrap().extend(mine);
            });
        }
    });
    let tokens = tokens.into_inner().unwrap();
    assert!(tokens.len() >= 16, "{} grants", tokens.len());
    assert_eq!(tokens.iter().collect::<BTreeSet<_>>().len(), tokens.len(), "a token granted twice");
    assert_eq!(db.stats().grants, tokens.len() as u64);
}

/// L5 under threads: what `raise_all` has returned for, no acquire hands out below.
#[test]
fn l5_no_lease_below_a_floor_is_handed_out_after_the_floor_was_raised() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let (ks, boss) =
        (db.keyspace("k", KeyspaceOptions::new()).unwrap(), db.keyspace("boss", KeyspaceOptions::new()));
    let boss = boss.unwrap();
    let floor = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for n in 0..3u8 {
            let (ks, floor, done) = (&ks, &floor, &done);
            scope.spawn(move || {
                while !done.load(Ordering::SeqCst) {
                    let before = floor.load(Ordering::SeqCst);
                    let lease = ks.lease(&[n]).acquire().unwrap();
                    assert!(lease.token().get() > before, "{} under the floor {before}", lease.token());
                    match ks.put(lease.token(), &[n], b"x") {
                        Ok(_) => {}
                        Err(Error::Fenced { .. }) => assert!(!lease.is_live() && lease.renew().is_err()),
                        Err(other) => panic!("{other:?}"),
                    }
                }
            });
        }
        for _ in 0..150 {
            let lease = boss.lease(b"boss").acquire().unwrap();
            ks.raise_all(lease.token()).unwrap();
            floor.store(lease.token().get(), Ordering::SeqCst);
        }
        done.store(true, Ordering::SeqCst);
    });
}

fn gated(in_flight: u64) -> (Gate, Db) {
    let gate = Gate::default();
    let options =
        Options::new().storage(Watched::by(&gate)).segment_bytes(1 << 20).in_flight_bytes(in_flight);
    (gate, options.open("gate").unwrap())
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::yield_now();
    }
}

/// L2, L5: a grant that is on its way while the floor passes it is not handed out; its token is burnt.
#[test]
fn l5_an_overtaken_pending_grant_is_not_handed_out() {
    let (gate, db) = gated(1 << 20);
    let (ks, boss) =
        (db.keyspace("k", KeyspaceOptions::new()).unwrap(), db.keyspace("boss", KeyspaceOptions::new()));
    let boss = boss.unwrap();
    gate.shut();
    thread::scope(|scope| {
        let overtaken = scope.spawn(|| ks.lease(b"a").acquire());
        until(|| db.stats().leases == 1);
        // Nobody else gets the fence, nor is told that it is held: that would rest on nothing yet.
        let other = scope.spawn(|| boss.lease(b"boss").acquire());
        until(|| db.stats().leases == 2);
        let raised = scope.spawn(|| ks.raise_all(token(2)));
        until(|| db.stats().leases == 1);
        assert!(!overtaken.is_finished() && !other.is_finished() && !raised.is_finished());
        gate.open_up();
        raised.join().unwrap().unwrap();
        let other = other.join().unwrap().unwrap();
        assert_eq!(other.token(), token(2));
        assert!(other.is_live(), "of another keyspace");
        let lease = overtaken.join().unwrap().unwrap();
        assert_eq!(lease.token(), token(3), "token 1 is burnt");
        assert!(lease.is_live());
        assert_err!(ks.put(token(1), b"a", b"never held"), Error::Fenced { .. });
        ks.put(lease.token(), b"a", b"mine").unwrap();
    });
}

/// D3, D4 while a sync hangs: nothing is shown, and nobody is told `Held` or `Fenced` on such ground.
#[test]
fn d3_while_a_sync_hangs_readers_go_on_with_what_is_durable() {
    let (gate, db) = gated(1 << 20);
    let ks = rows(&db);
    ks.put(token(3), b"a", b"old").unwrap();
    gate.shut();
    thread::scope(|scope| {
        let writer = scope.spawn(|| ks.put(token(5), b"a", b"new"));
        let in_flight = ks.submit_put(token(6), b"b", b"behind").unwrap();
        let late = scope.spawn(|| ks.put(token(4), b"b", b"late"));
        for _ in 0..1000 {
            assert_eq!(ks.get(b"a").unwrap().unwrap().bytes(), b"old");
            assert_eq!(ks.mark(b"a").unwrap().unwrap().get(), 3);
            assert_eq!(ks.iter().count(), 1);
        }
        assert!(!writer.is_finished() && !in_flight.is_done() && !late.is_finished());
        // A refusal that the durable mark carries alone waits for nothing.
        assert_err!(ks.put(token(2), b"a", b"late"), Error::Fenced { mark, .. } if mark.get() == 3);
        gate.open_up();
        writer.join().unwrap().unwrap();
        in_flight.wait().unwrap();
        assert_err!(late.join().unwrap(), Error::Fenced { .. });
    });
}

#[test]
fn bytes_in_flight_are_bounded_try_submit_is_busy_and_submit_waits() {
    let (gate, db) = gated(10_000);
    let ks = rows(&db);
    ks.put(token(1), b"warm", b"up").unwrap();
    gate.shut();
    let mut commits = Vec::new();
    let error = loop {
        match ks.try_submit_put(token(1), b"a", &[1; 1000]) {
            Ok(commit) => commits.push(commit),
            Err(error) => break error,
        }
    };
    assert!((9..=11).contains(&commits.len()), "{}", commits.len());
    assert!(error.is_retryable());
    assert_err!(Err::<(), _>(error), Error::Busy { in_flight, limit: 10_000 } if in_flight > 10_000);
    let mut batch = db.batch();
    batch.put(&ks, token(1), b"b", b"").unwrap();
    assert_err!(batch.try_submit(), Error::Busy { .. });
    let submitted = AtomicBool::new(false);
    thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let commit = ks.submit_put(token(1), b"a", b"last").unwrap();
            submitted.store(true, Ordering::SeqCst);
            commit.wait().unwrap()
        });
        for _ in 0..10_000 {
            thread::yield_now();
            assert!(!submitted.load(Ordering::SeqCst), "there is no room before the gate opens");
        }
        gate.open_up();
        let last = waits.join().unwrap();
        let lsns: Vec<Lsn> = commits.drain(..).map(|commit| commit.wait().unwrap()).collect();
        assert!(lsns.is_sorted_by(|a, b| a < b) && lsns.iter().all(|&lsn| lsn < last));
    });
    // One batch above the bound is let through when nothing is in flight.
    until(|| ks.try_submit_put(token(1), b"large", &vec![1; 200_000]).is_ok());
    db.close().unwrap();
}

/// An executor of a page: parks until it is woken.
struct Parker(Thread, AtomicBool);

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::SeqCst);
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let parker = Arc::new(Parker(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(parker.clone());
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        while !parker.1.swap(false, Ordering::SeqCst) {
            thread::park();
        }
    }
}

#[test]
fn a_commit_is_a_future_of_any_runtime_and_commits_resolve_in_order() {
    let (gate, db) = gated(1 << 20);
    let ks = rows(&db);
    gate.shut();
    let submit = |n: u32| ks.submit_put(token(1), &n.to_be_bytes(), b"x").unwrap();
    let mut commits: Vec<Commit> = (0..500).map(submit).collect();
    // Polled under a waker that is then replaced, and none of them is done while the sync hangs.
    let idle = Waker::from(Arc::new(Parker(thread::current(), AtomicBool::new(false))));
    for commit in &mut commits {
        assert!(pin!(commit).poll(&mut Context::from_waker(&idle)).is_pending());
    }
    let last = commits.pop().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| block_on(last));
        assert!(commits.iter().all(|commit| !commit.is_done()));
        gate.open_up();
        let last = waiter.join().unwrap().unwrap();
        assert!(commits.iter().all(Commit::is_done), "all before the last one are done");
        let lsns: Vec<Lsn> = commits.into_iter().map(|commit| block_on(commit).unwrap()).collect();
        assert!(lsns.is_sorted_by(|a, b| a < b));
        assert!(lsns.iter().all(|&lsn| lsn < last));
    });
}

#[test]
fn dropping_commits_is_harmless_polled_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let ks = rows(&db);
    let idle = Waker::from(Arc::new(Parker(thread::current(), AtomicBool::new(false))));
    for n in 0..2000u32 {
        let mut commit = ks.submit_put(token(1), &n.to_be_bytes(), b"x").unwrap();
        if n % 2 == 0 {
            let _ = pin!(&mut commit).poll(&mut Context::from_waker(&idle));
        }
        drop(commit);
    }
    db.close().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    assert_eq!(rows(&db).iter().count(), 2000);
}

#[test]
fn a_refused_submit_is_refused_at_once_or_through_its_commit() {
    let (gate, db) = gated(1 << 20);
    let ks = rows(&db);
    ks.put(token(5), b"a", b"x").unwrap();
    assert_err!(ks.submit_put(token(4), b"a", b"late"), Error::Fenced { .. });
    gate.shut();
    let newer = ks.submit_put(token(9), b"a", b"x").unwrap();
    let refused = ks.submit_put(token(8), b"a", b"late").unwrap();
    assert!(!refused.is_done());
    gate.open_up();
    assert_err!(block_on(refused), Error::Fenced { mark, .. } if mark.get() == 9);
    newer.wait().unwrap();
}

/// S1: whole batches or none, whatever the reader does and however segments are read.
#[test]
fn s1_readers_beside_a_writer_see_whole_batches() {
    const WIDTH: u8 = 7;
    for mode in [ReadMode::Map, ReadMode::Pread] {
        let dir = tempfile::tempdir().unwrap();
        let db = Options::new().segment_bytes(32 << 10).read_mode(mode).open(dir.path().join("d")).unwrap();
        let ks = rows(&db);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for reader in 0..3 {
                let (db, ks, done) = (&db, &ks, &done);
                scope.spawn(move || {
                    let mut last = 0;
                    while !done.load(Ordering::SeqCst) {
                        let view = db.snapshot();
                        let walk = view.prefix(ks, b"k").map(|item| item.unwrap().1);
                        let seen: Vec<Value> = if reader == 0 {
                            walk.rev().collect()
                        } else {
                            (0..WIDTH).filter_map(|n| view.get(ks, &[b'k', n]).unwrap()).collect()
                        };
                        let Some(first) = seen.first() else { continue };
                        assert_eq!(seen.len(), WIDTH as usize, "a part of a batch");
                        assert!(
                            seen.iter().all(|value| value.lsn() == first.lsn() && value[..8] == first[..8])
                        );
                        assert!(first.lsn() <= view.lsn() && first.lsn().get() >= last);
                        last = first.lsn().get();
                    }
                });
            }
            for round in 0..150u64 {
                let mut batch = db.batch();
                for n in 0..WIDTH {
                    // Every third batch deletes all keys, and larger values fill segments.
                    if round % 3 == 2 {
                        batch.delete(&ks, token(1), &[b'k', n]).unwrap();
                    } else {
                        let value = [&round.to_le_bytes()[..], &vec![n; round as usize * 7]].concat();
                        batch.put(&ks, token(1), &[b'k', n], &value).unwrap();
                    }
                }
                batch.commit().unwrap();
            }
            done.store(true, Ordering::SeqCst);
        });
    }
}

/// F2: after an accepted token no lower one is accepted, in the order of the lsns; slatedb 266.
#[test]
fn f2_racing_writers_of_one_fence_are_admitted_in_the_order_of_their_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let ks = rows(&db);
    let admitted = Mutex::new(Vec::new());
    let next = AtomicU64::new(1);
    thread::scope(|scope| {
        for n in 0..8u64 {
            let (ks, admitted, next) = (&ks, &admitted, &next);
            scope.spawn(move || {
                for _ in 0..150 {
                    let number = next.fetch_add(n % 3, Ordering::SeqCst);
                    match ks.put(token(number), b"one", &n.to_le_bytes()) {
                        Ok(lsn) => admitted.lock().unwrap().push((lsn, number)),
                        Err(Error::Fenced { mark, .. }) => assert!(mark.get() > number),
                        Err(other) => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    let mut admitted = admitted.into_inner().unwrap();
    admitted.sort();
    assert!(admitted.is_sorted_by_key(|&(_, number)| number));
    let (lsn, number) = *admitted.last().unwrap();
    let value = ks.get(b"one").unwrap().unwrap();
    assert_eq!((value.lsn(), value.token().get()), (lsn, number));
}

/// F3. A refused write may have taken a new segment; the committer, awake beside it, must not lose the one
/// before.
#[test]
fn f3_a_refusal_that_took_a_new_segment_beside_the_committer_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Options::new().segment_bytes(MIN_SEGMENT_BYTES).open(dir.path().join("d")).unwrap();
    // Behind its first commit the committer looks once more whether there is work.
    for n in 0..60u32 {
        let db = open();
        let ks = rows(&db);
        ks.submit_put(token(5), &n.to_be_bytes(), b"x").unwrap().wait().unwrap();
        assert_err!(ks.put_if(token(5), b"a", &[0; 20_000], Expect::Present), Error::Conflict { .. });
        for _ in 0..n % 8 {
            thread::yield_now();
        }
        ks.put(token(5), &[&n.to_be_bytes()[..], b"/2"].concat(), b"x").unwrap();
    }
    assert_eq!(rows(&open()).iter().count(), 120);
}
