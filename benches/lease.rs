//! Leases: the lock-free verbs beside their floors, durable hand-overs beside durable puts, and a great many
//! leases kept alive by one thread.

mod support;

use criterion::{Criterion, Throughput, criterion_group};
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use support::{SyncFloor, VALUE, key, store, token};
use tidewall::{Clock, Error, KeyspaceOptions, SystemClock};

fn lease(criterion: &mut Criterion) {
    let store = store();
    let jobs = store.db.keyspace("jobs", KeyspaceOptions::new()).expect("opens");
    let held = jobs.lease(b"held").ttl(Duration::from_secs(3600)).acquire().expect("free");
    let mut group = criterion.benchmark_group("lease");
    group.throughput(Throughput::Elements(1));

    let clock = SystemClock::new();
    group.bench_function("floor (clock read)", |bench| bench.iter(|| black_box(clock.now())));
    let word = AtomicU64::new(0);
    group.bench_function("floor (compare-and-swap)", |bench| {
        bench.iter(|| {
            let seen = word.load(Ordering::Acquire);
            black_box(word.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire))
        });
    });
    let map = parking_lot::Mutex::new(HashMap::from([(b"held".to_vec(), 1u64)]));
    group.bench_function("floor (mutex and hash map)", |bench| {
        bench.iter(|| map.lock().get_mut(&b"held"[..]).map(|word| *word += 1));
    });
    group.bench_function("is_live", |bench| bench.iter(|| black_box(held.is_live())));
    group.bench_function("renew", |bench| bench.iter(|| held.renew().expect("held")));
    group.bench_function("held", |bench| bench.iter(|| jobs.lease(b"held").acquire().is_err()));

    group.sample_size(10).measurement_time(Duration::from_secs(3));
    let mut floor = SyncFloor::new(128);
    group.bench_function("floor (one sync)", |bench| bench.iter(|| floor.once()));
    let mut n = 0;
    group.bench_function("acquire and release", |bench| {
        bench.iter(|| {
            n += 1;
            let lease = jobs.lease(&key(n % 1000)).acquire().expect("free");
            lease.release().expect("held");
        });
    });
    group.bench_function("raise_all", |bench| {
        bench.iter(|| {
            n += 1;
            store.rows.raise_all(token(n)).expect("rises")
        });
    });
    group.finish();
}

const THREADS: u64 = 16;
/// Short, and many of them: a slow moment of the disk or of the machine then spoils a few ratios, not all.
const RUN: Duration = Duration::from_millis(300);
const ROUNDS: usize = 30;

/// How often per second `step` is done by so many threads; it gets the number of its thread and counts.
fn per_second(threads: u64, step: impl Fn(u64) -> u64 + Sync) -> f64 {
    let done = AtomicU64::new(0);
    let start = Instant::now();
    thread::scope(|scope| {
        for n in 0..threads {
            let (done, step) = (&done, &step);
            scope.spawn(move || {
                while start.elapsed() < RUN {
                    done.fetch_add(step(n), Ordering::Relaxed);
                }
            });
        }
    });
    done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()
}

/// Durable puts, durable grants, and hand-overs to those who wait, in turns.
fn hand_overs() {
    let store = store();
    let jobs = store.db.keyspace("jobs", KeyspaceOptions::new()).expect("opens");
    let mut ratios = [Vec::new(), Vec::new()];
    let mut sum = [0.0; 3];
    for _ in 0..ROUNDS {
        let puts = per_second(THREADS, |n| {
            store.rows.put(token(1), &key(n), &VALUE).expect("writes");
            1
        });
        let grants = per_second(THREADS, |n| {
            jobs.lease(&key(n)).acquire().expect("free").release().expect("held");
            1
        });
        // Two threads for each fence: one holds, one waits.
        let handed = per_second(2 * THREADS, |n| {
            let key = key(n % THREADS);
            let request = jobs.lease(&key).wait(Duration::from_secs(10));
            request.acquire().expect("in time").release().expect("held");
            1
        });
        for (ratios, count) in ratios.iter_mut().zip([grants, handed]) {
            ratios.push(count / puts);
        }
        for (sum, count) in sum.iter_mut().zip([puts, grants, handed]) {
            *sum += count / ROUNDS as f64;
        }
    }
    let [puts, grants, handed] = sum;
    println!(
        "{THREADS} threads or fences, per second: {puts:.0} puts, {grants:.0} grants, {handed:.0} hand-overs"
    );
    for (name, mut ratios) in ["grants", "hand-overs to waiters"].into_iter().zip(ratios) {
        ratios.sort_by(f64::total_cmp);
        let at = |part: f64| ratios[(part * (ROUNDS - 1) as f64) as usize];
        println!(
            "{name} to puts: {:.2} (half of {ROUNDS} rounds: {:.2} to {:.2})",
            at(0.5),
            at(0.25),
            at(0.75)
        );
    }
}

/// A great many leases, kept alive by one thread; what that costs of one core.
fn keep_alive() {
    const LEASES: u64 = 100_000;
    let ttl = Duration::from_secs(6);
    let store = store();
    let jobs = store.db.keyspace("jobs", KeyspaceOptions::new()).expect("opens");
    let leases: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..64)
            .map(|thread| {
                let jobs = &jobs;
                scope.spawn(move || {
                    let mut leases = Vec::new();
                    for n in (thread..LEASES).step_by(64) {
                        let lease = jobs.lease(&key(n)).ttl(ttl).acquire().expect("free");
                        lease.keep_alive(Duration::from_secs(3600)).expect("held");
                        leases.push(lease);
                    }
                    leases
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    let (renewals, cpu, start) = (store.db.stats().renewals, cpu_time(), Instant::now());
    thread::sleep(2 * ttl);
    let (cpu, took) = (cpu_time() - cpu, start.elapsed());
    let renewals = store.db.stats().renewals - renewals;
    let lost = leases.iter().filter(|lease| !lease.is_live()).count();
    println!(
        "{LEASES} leases kept alive for {took:?}: {:.0} renewals/s, {:.1} % of a core, {lost} lost",
        renewals as f64 / took.as_secs_f64(),
        100.0 * cpu.as_secs_f64() / took.as_secs_f64()
    );
    assert_eq!((lost, store.db.stats().expiries), (0, 0));
    drop(leases);
    assert!(!matches!(jobs.lease(&key(0)).acquire(), Err(Error::Held { .. })));
}

/// What this process has used of all cores.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

criterion_group!(benches, lease);

fn main() {
    benches();
    // These are runs, not repetitions; `--test` and filters are for the rest.
    if std::env::args().any(|arg| arg == "--bench") && std::env::args().count() == 2 {
        hand_overs();
        keep_alive();
    }
    Criterion::default().configure_from_args().final_summary();
}
