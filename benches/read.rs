//! Reads of a million keys: hits, misses, and scans of a hundred keys. The floor is a look-up in a bare hash
//! map of as many keys.

mod support;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::collections::HashMap;
use std::hint::black_box;
use support::{Random, VALUE, key, store, token};

const KEYS: u64 = 1_000_000;

fn read(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    group.throughput(Throughput::Elements(1));
    let mut random = Random(1);

    let map: HashMap<[u8; 16], Box<[u8]>> = (0..KEYS).map(|n| (key(n), VALUE.into())).collect();
    group.bench_function("floor (hash map, value copied)", |bench| {
        bench.iter(|| black_box(map.get(&key(random.below(KEYS))).map(|value| value.to_vec())));
    });
    drop(map);

    let store = store();
    for n in 0..KEYS {
        store.rows.submit_put(token(1), &key(n), &VALUE).map(drop).expect("accepted");
    }
    store.rows.put(token(1), b"last", b"v").expect("accepted");
    group.bench_function("get", |bench| {
        bench.iter(|| black_box(store.rows.get(&key(random.below(KEYS))).expect("reads")));
    });
    group.bench_function("get_with", |bench| {
        bench.iter(|| {
            black_box(store.rows.get_with(&key(random.below(KEYS)), |value| value.len()).expect("reads"))
        });
    });
    group.bench_function("get, missing", |bench| {
        bench.iter(|| black_box(store.rows.get(&key(KEYS + random.below(KEYS))).expect("reads")));
    });
    group.bench_function("scan of 100", |bench| {
        bench.iter(|| {
            let from = key(random.below(KEYS - 100));
            let read = store.rows.range(from..).take(100).filter(|item| item.is_ok()).count();
            assert!(read >= 100);
        });
    });
    group.bench_function("scan of 100, borrowed", |bench| {
        bench.iter(|| {
            let mut rows = store.rows.range(key(random.below(KEYS - 100))..);
            for _ in 0..100 {
                black_box(rows.next_with(|key, value| key.len() + value.len()))
                    .expect("a key")
                    .expect("reads");
            }
        });
    });
    group.finish();
}

criterion_group!(benches, read);
criterion_main!(benches);
