//! Opening a store of 100 000 keys with 100-byte values: after a clean close, and after a kill. The floor is
//! reading the same files. `KEYS=1000000 cargo bench --bench recover` takes another number of keys.

mod support;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::Path;
use support::{VALUE, dir, external, key, token};
use tidewall::{Db, Options};

fn keys() -> u64 {
    std::env::var("KEYS").map_or(100_000, |keys| keys.parse().expect("KEYS is a number"))
}

fn recover(criterion: &mut Criterion) {
    let made = dir();
    let (clean, killed) = (made.path().join("clean"), made.path().join("killed"));
    make(&clean).close().expect("closes");
    // A kill: the files as they are while the store is open.
    let running = make(&made.path().join("running"));
    copy(&made.path().join("running"), &killed);
    drop(running);

    let mut group = criterion.benchmark_group("recover");
    group.sample_size(10);
    group.bench_function("floor (files read)", |bench| {
        bench.iter(|| {
            let files = std::fs::read_dir(&clean).expect("there");
            let bytes = files.filter_map(|file| std::fs::read(file.ok()?.path()).ok());
            black_box(bytes.map(|bytes| bytes.len()).sum::<usize>())
        });
    });
    for (name, from) in [("clean", &clean), ("killed", &killed)] {
        group.bench_function(name, |bench| {
            let setup = || {
                let to = made.path().join("copy");
                let _ = std::fs::remove_dir_all(&to);
                copy(from, &to);
                to
            };
            bench.iter_batched(setup, |to| Options::new().open(to).expect("opens"), BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn make(path: &Path) -> Db {
    let db = Db::open(path).expect("opens");
    let rows = db.keyspace("rows", external()).expect("opens");
    for n in 0..keys() {
        rows.submit_put(token(1), &key(n), &VALUE).map(drop).expect("accepted");
    }
    rows.put(token(1), b"last", b"v").expect("accepted");
    db
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for file in std::fs::read_dir(from).expect("there").flatten() {
        std::fs::copy(file.path(), to.join(file.file_name())).expect("copied");
    }
}

criterion_group!(benches, recover);
criterion_main!(benches);
