//! Leases: the lock-free verbs beside a bare clock read, and durable hand-overs.

mod support;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use support::{SyncFloor, key, store, token};
use tidewall::{Clock, KeyspaceOptions, SystemClock};

fn lease(criterion: &mut Criterion) {
    let store = store();
    let jobs = store.db.keyspace("jobs", KeyspaceOptions::new()).expect("opens");
    let held = jobs.lease(b"held").ttl(Duration::from_secs(3600)).acquire().expect("free");
    let mut group = criterion.benchmark_group("lease");
    group.throughput(Throughput::Elements(1));

    let clock = SystemClock::new();
    group.bench_function("floor (clock read)", |bench| bench.iter(|| black_box(clock.now())));
    group.bench_function("is_live", |bench| bench.iter(|| black_box(held.is_live())));
    group.bench_function("renew", |bench| bench.iter(|| held.renew().expect("held")));

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

criterion_group!(benches, lease);
criterion_main!(benches);
