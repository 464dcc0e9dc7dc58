//! Refusals: a stale token against one of a million keys. No lock, no I/O; the floor is a look-up in a bare
//! hash map of as many keys.

mod support;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::collections::HashMap;
use std::hint::black_box;
use support::{Random, VALUE, key, store, token};

const KEYS: u64 = 1_000_000;

fn refuse(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("refuse");
    group.throughput(Throughput::Elements(1));

    let map: HashMap<[u8; 16], u64> = (0..KEYS).map(|n| (key(n), n)).collect();
    let mut random = Random(1);
    group.bench_function("floor (hash map)", |bench| {
        bench.iter(|| black_box(map.get(&key(random.below(KEYS)))));
    });
    drop(map);

    let store = store();
    for n in 0..KEYS {
        store.rows.submit_put(token(42), &key(n), b"v").map(drop).expect("accepted");
    }
    store.rows.put(token(42), b"last", b"v").expect("accepted");
    group.bench_function("put", |bench| {
        bench.iter(|| {
            let refused = store.rows.put(token(41), &key(random.below(KEYS)), &VALUE);
            assert!(matches!(refused, Err(tidewall::Error::Fenced { .. })));
        });
    });
    group.bench_function("put, one key", |bench| {
        bench.iter(|| assert!(store.rows.put(token(41), &key(7), &VALUE).is_err()));
    });
    group.finish();
}

criterion_group!(benches, refuse);
criterion_main!(benches);
