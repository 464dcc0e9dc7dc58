//! Many at once: at most one holder, unique tokens, and nobody delayed by what expires together.
//!
//! `TIDEWALL_ROUNDS=10` runs ten times as many rounds.
#![cfg(feature = "testkit")]

mod leasekit;

use leasekit::{ms, sim};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use tidewall::{Error, KeyspaceOptions};

#[test]
fn at_most_one_of_many_threads_holds_a_fence_at_a_time_in_memory() {
    let sim = sim();
    contend(&sim.db, &sim.jobs, leasekit::rounds(100_000));
}

#[test]
fn at_most_one_of_many_threads_holds_a_fence_at_a_time_on_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    let db = tidewall::Db::open(dir.path().join("data")).unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    contend(&db, &jobs, leasekit::rounds(10_000));
}

/// 64 threads acquire and release the leases of four fences, some waiting, some only trying.
fn contend(db: &tidewall::Db, jobs: &tidewall::Keyspace, rounds: u64) {
    const FENCES: usize = 4;
    let inside: [AtomicUsize; FENCES] = Default::default();
    let newest: [AtomicU64; FENCES] = Default::default();
    let done = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..64u64 {
            let (inside, newest, done) = (&inside, &newest, &done);
            scope.spawn(move || {
                let mut n = thread;
                while done.load(Ordering::Relaxed) < rounds {
                    n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let fence = (n >> 33) as usize % FENCES;
                    let key = [b'a' + fence as u8];
                    let request = jobs.lease(&key).ttl(Duration::from_secs(600)).wait(ms(600_000));
                    let answer = if n >> 40 & 3 == 0 { request.try_acquire() } else { request.acquire() };
                    let lease = match answer {
                        Ok(lease) => lease,
                        Err(Error::Held { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    assert_eq!(inside[fence].fetch_add(1, Ordering::SeqCst), 0, "two hold {key:?}");
                    let token = lease.token().get();
                    assert!(newest[fence].fetch_max(token, Ordering::SeqCst) < token, "token {token} twice");
                    inside[fence].fetch_sub(1, Ordering::SeqCst);
                    done.fetch_add(1, Ordering::Relaxed);
                    if n >> 50 & 1 == 0 { lease.release().unwrap() } else { drop(lease) }
                }
            });
        }
    });
    let stats = db.stats();
    assert_eq!(stats.waiting, 0);
    assert!(stats.grants >= rounds && stats.expiries == 0, "{stats:?}");
    println!(
        "{} grants, {} hand-overs of {} ns, {} syncs",
        stats.grants, stats.hand_overs, stats.hand_over_nanos_mean, stats.commits
    );
}

#[test]
fn a_great_many_leases_expiring_together_delay_nobody_else() {
    let sim = sim();
    let many = leasekit::rounds(20_000);
    for n in 0..many {
        std::mem::forget(sim.jobs.lease(&n.to_be_bytes()).ttl(ms(1000)).acquire().unwrap());
    }
    let other = sim.jobs.lease(b"other").ttl(ms(1_000_000)).acquire().unwrap();
    assert!(sim.db.stats().leases >= many);
    sim.clock.advance(ms(1000));
    let mut took: Vec<_> = (0..many)
        .map(|n| {
            let start = std::time::Instant::now();
            other.renew().unwrap();
            sim.jobs
                .lease(&[b"new".as_slice(), &n.to_be_bytes()].concat())
                .acquire()
                .unwrap()
                .release()
                .unwrap();
            start.elapsed()
        })
        .collect();
    took.sort_unstable();
    let (p50, p99) = (took[took.len() / 2], took[took.len() * 99 / 100]);
    println!("acquire, renew and release beside {many} expiries: p50 {p50:?}, p99 {p99:?}");
    assert!(p99 < ms(20), "p50 {p50:?}, p99 {p99:?}");
    assert!(sim.db.stats().leases < many / 2, "they are swept: {}", sim.db.stats().leases);
}
