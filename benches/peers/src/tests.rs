//! The same promises, asked of every engine.

use crate::engines::{ALL, Engine, Sort};
use crate::measure::{key, prefix};
use crate::store::{FencedStore, Item, Outcome};
use fastrand::Rng;
use parking_lot::Mutex;
use std::path::Path;

/// A folder under the build: the temporary folder may be memory.
fn folder() -> tempfile::TempDir {
    let base = crate::beside_the_build("peers-tests");
    std::fs::create_dir_all(&base).unwrap();
    tempfile::tempdir_in(base).unwrap()
}

fn read(store: &dyn FencedStore, key: &[u8]) -> Option<(Vec<u8>, u64)> {
    let mut found = None;
    store.get(key, &mut |value| found = value.map(|(value, token)| (value.to_vec(), token))).unwrap();
    found
}

fn each_store(test: impl Fn(&'static Engine, &Path)) {
    for engine in ALL.iter().filter(|engine| engine.sort != Sort::LogFloor) {
        eprintln!("{}", engine.name);
        test(engine, folder().path());
    }
}

#[test]
fn a_lower_token_is_refused_also_after_opening_again() {
    each_store(|engine, dir| {
        let store = (engine.open)(dir).unwrap();
        assert_eq!(read(&*store, b"k"), None);
        let put =
            |store: &dyn FencedStore, key: &[u8], token, value: &[u8]| store.put(key, token, value).unwrap();
        assert_eq!(put(&*store, b"k", 42, b"one"), Outcome::Accepted);
        assert_eq!(put(&*store, b"k", 41, b"two"), Outcome::Rejected(42));
        assert_eq!(read(&*store, b"k"), Some((b"one".to_vec(), 42)));
        assert_eq!(put(&*store, b"k", 42, b"three"), Outcome::Accepted);
        assert_eq!(put(&*store, b"other", 1, b"x"), Outcome::Accepted);
        store.close().unwrap();
        if engine.sort == Sort::MemoryFloor {
            return;
        }
        let store = (engine.open)(dir).unwrap();
        assert_eq!(read(&*store, b"k"), Some((b"three".to_vec(), 42)), "{}", engine.name);
        assert_eq!(put(&*store, b"k", 41, b"four"), Outcome::Rejected(42));
        assert_eq!(put(&*store, b"k", 43, b"five"), Outcome::Accepted);
        assert_eq!(put(&*store, b"k", 42, b"six"), Outcome::Rejected(43));
        assert_eq!(read(&*store, b"other"), Some((b"x".to_vec(), 1)));
        store.close().unwrap();
    });
}

/// What is left must be the highest token that was accepted, with the value that came with it.
#[test]
fn check_and_write_are_one_step_when_threads_race() {
    const KEYS: usize = 4;
    each_store(|engine, dir| {
        let store = (engine.open)(dir).unwrap();
        let best: [Mutex<u64>; KEYS] = Default::default();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (store, best) = (&store, &best);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(thread);
                    for step in 0..40 {
                        let at = random.usize(..KEYS);
                        let token = step * 10 + random.u64(1..30);
                        let value = token.to_string();
                        match store.put(&key(at as u64), token, value.as_bytes()).unwrap() {
                            Outcome::Accepted => {
                                let mut best = best[at].lock();
                                *best = token.max(*best);
                            }
                            Outcome::Rejected(mark) => assert!(mark > token, "{}", engine.name),
                        }
                    }
                });
            }
        });
        for (at, best) in best.iter().enumerate() {
            let best = *best.lock();
            let left = Some((best.to_string().into_bytes(), best));
            assert_eq!(read(&*store, &key(at as u64)), left, "{}", engine.name);
        }
        store.close().unwrap();
    });
}

#[test]
fn what_is_loaded_is_there_and_guarded() {
    each_store(|engine, dir| {
        let store = (engine.open)(dir).unwrap();
        let item = |number: u64| (key(number).to_vec(), number + 2, vec![number as u8; 100]);
        let items: Vec<Item> = (0..500).map(item).collect();
        store.load(&items).unwrap();
        store.settle().unwrap();
        if engine.name != "memory-papaya" {
            assert_eq!(store.scan(&prefix(3)).unwrap(), (100, 10_000), "{}", engine.name);
            assert_eq!(store.scan(&prefix(9)).unwrap(), (0, 0), "{}", engine.name);
        }
        for (key, token, value) in items.iter().step_by(37) {
            assert_eq!(read(&*store, key), Some((value.clone(), *token)), "{}", engine.name);
            let refused = store.put(key, token - 1, b"no").unwrap();
            assert_eq!(refused, Outcome::Rejected(*token), "{}", engine.name);
        }
        store.close().unwrap();
    });
}

#[test]
fn a_pipeline_says_of_each_put_that_it_is_durable() {
    const PUTS: u64 = 1000;
    for engine in ALL.iter().filter(|engine| engine.pipelines) {
        let dir = folder();
        let store = (engine.open)(dir.path()).unwrap();
        let mut numbers = 0..PUTS;
        let mut next = || numbers.next().map(|number| (key(number).to_vec(), 7, vec![1; 100]));
        let mut durable = 0;
        store.pipeline(100, &mut next, &mut || durable += 1).unwrap();
        assert_eq!(durable, PUTS, "{}", engine.name);
        if engine.sort != Sort::LogFloor {
            assert_eq!(read(&*store, &key(PUTS - 1)), Some((vec![1; 100], 7)), "{}", engine.name);
        }
        store.close().unwrap();
    }
}

#[test]
fn floors_do_not_lose_a_wake_up() {
    for engine in ALL.iter().filter(|engine| engine.sort == Sort::LogFloor) {
        for threads in [1, 2, 33] {
            let dir = folder();
            let store = (engine.open)(dir.path()).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        for token in 0..300 {
                            store.put(&key(token), token, &[1; 100]).unwrap();
                        }
                    });
                }
            });
        }
    }
}
