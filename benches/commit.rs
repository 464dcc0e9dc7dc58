//! Durable fenced writes: 16-byte keys, 100-byte values, over 100 000 keys.
//!
//! `put/N` are N threads that wait for each write; `submit/N` are N threads that keep thousands in flight
//! and wait in order. The floor is one write and one `fdatasync` of the same bytes on a file of zeros.

mod support;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{Random, SyncFloor, VALUE, key, on_threads, store, token};

const KEYS: u64 = 100_000;
const IN_FLIGHT: usize = 10_000;
/// A frame of such a put.
const FRAME_BYTES: usize = 168;

fn commit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("commit");
    group.throughput(Throughput::Elements(1)).sample_size(10).measurement_time(Duration::from_secs(3));

    let mut floor = SyncFloor::new(FRAME_BYTES);
    group.bench_function("floor", |bench| bench.iter(|| floor.once()));

    for threads in [1, 4, 16, 64] {
        group.bench_with_input(BenchmarkId::new("put", threads), &threads, |bench, &threads| {
            let store = store();
            bench.iter_custom(|iterations| {
                let left = AtomicU64::new(iterations);
                on_threads(threads, |thread| {
                    let mut random = Random(thread);
                    while take_one(&left) {
                        store.rows.put(token(1), &key(random.below(KEYS)), &VALUE).expect("accepted");
                    }
                })
            });
        });
    }
    for threads in [1, 2] {
        group.bench_with_input(BenchmarkId::new("submit", threads), &threads, |bench, &threads| {
            let store = store();
            bench.iter_custom(|iterations| {
                on_threads(threads, |thread| {
                    let mut random = Random(thread);
                    let mut in_flight = VecDeque::with_capacity(IN_FLIGHT);
                    for _ in 0..iterations.div_ceil(threads) {
                        if in_flight.len() == IN_FLIGHT {
                            let oldest: tidewall::Commit = in_flight.pop_front().expect("full");
                            oldest.wait().expect("accepted");
                        }
                        let commit = store.rows.submit_put(token(1), &key(random.below(KEYS)), &VALUE);
                        in_flight.push_back(commit.expect("accepted"));
                    }
                    for commit in in_flight {
                        commit.wait().expect("accepted");
                    }
                })
            });
        });
    }
    group.finish();
}

fn take_one(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

criterion_group!(benches, commit);
criterion_main!(benches);
