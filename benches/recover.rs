//! Opening a store of 100 000 keys with 100-byte values: after a clean close, and after a kill; with the index
//! file, and without it, by a scan of the log. The floor is reading the same files.
//!
//! `KEYS=1000000 cargo bench --bench recover` takes another number of keys. A plain program: each round opens all
//! of them once, one after the other, so that a machine which is slower for a while is so for all of them. Prints
//! the median of the rounds (`ROUNDS`, default 11), what the close and the first scan took, and ratios.

mod support;

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use support::{VALUE, dir, external, key, token};
use tidewall::{Db, Options};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn main() {
    let (keys, rounds) = (number("KEYS", 100_000), number("ROUNDS", 11) as usize);
    let made = dir();
    let at = |name: &str| made.path().join(name);
    let db = fill(&at("clean"), keys);
    let start = Instant::now();
    db.close().expect("closes");
    println!("{keys} keys, closed in {:.1} ms", millis(start.elapsed()));
    // A kill: the files as they are while the store is open.
    let running = fill(&at("running"), keys);
    copy_at_rest(&running, &at("running"), &at("killed"));
    drop(running);
    for name in ["clean", "killed"] {
        copy(&at(name), &at(&format!("{name}, scanned")));
        remove_index(&at(&format!("{name}, scanned")));
    }
    println!("index file {:.2} bytes a key", index_bytes(&at("clean")) as f64 / keys as f64);

    let names = ["clean", "killed", "clean, scanned", "killed, scanned"];
    let mut times = [const { Vec::new() }; 4];
    let (mut floor, mut scans) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        floor.push(time(|| read_all(&at("clean"))).0);
        for (name, times) in names.iter().zip(&mut times) {
            let to = at("copy");
            let _ = std::fs::remove_dir_all(&to);
            copy(&at(name), &to);
            // Or its pages are written back to the disk while the time is taken.
            sync(&to);
            let (took, db) = time(|| Options::new().open(&to).expect("opens"));
            times.push(took);
            if *name == "clean" {
                let rows = db.keyspace("rows", external()).expect("opens");
                scans.push(time(|| rows.iter().next().expect("there").expect("read")).0);
            }
            assert_eq!(db.stats().keys, keys + 1);
        }
    }
    println!("{:<24} {:>9.2} ms", "floor (files read)", median(&mut floor));
    for (name, times) in names.iter().zip(&mut times) {
        println!("{name:<24} {:>9.2} ms", median(times));
    }
    println!("{:<24} {:>9.2} ms", "first key, after clean", median(&mut scans));
    let [clean, killed, clean_scanned, killed_scanned] = times.each_mut().map(|times| median(times));
    println!("scan / index file: clean {:.1}, killed {:.1}", clean_scanned / clean, killed_scanned / killed);
}

fn fill(path: &Path, keys: u64) -> Db {
    let db = Db::open(path).expect("opens");
    let rows = db.keyspace("rows", external()).expect("opens");
    for n in 0..keys {
        rows.submit_put(token(1), &key(n), &VALUE).map(drop).expect("accepted");
    }
    rows.put(token(1), b"last", b"v").expect("accepted");
    db
}

fn time<T>(run: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let made = run();
    (start.elapsed(), made)
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    millis(times[times.len() / 2])
}

fn files(dir: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    std::fs::read_dir(dir).expect("there").flatten().map(|file| file.path())
}

fn is_index(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("INDEX-"))
}

fn index_bytes(dir: &Path) -> u64 {
    files(dir).filter(|path| is_index(path)).map(|path| path.metadata().map_or(0, |file| file.len())).sum()
}

fn remove_index(dir: &Path) {
    files(dir).filter(|path| is_index(path)).for_each(|path| std::fs::remove_file(path).expect("removed"));
}

fn read_all(dir: &Path) {
    let bytes = files(dir).filter_map(|path| std::fs::read(path).ok());
    black_box(bytes.map(|bytes| bytes.len()).sum::<usize>());
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for file in files(from) {
        std::fs::copy(&file, to.join(file.file_name().expect("a file"))).expect("copied");
    }
}

/// A copy of a store that is open, taken when it has written nothing for a second before and none meanwhile.
fn copy_at_rest(db: &Db, from: &Path, to: &Path) {
    loop {
        let before = db.stats().disk_written_bytes;
        std::thread::sleep(Duration::from_secs(1));
        if db.stats().disk_written_bytes != before {
            continue;
        }
        let _ = std::fs::remove_dir_all(to);
        std::fs::create_dir_all(to).expect("made");
        // A file that is removed meanwhile was written before.
        let all =
            files(from).all(|file| std::fs::copy(&file, to.join(file.file_name().expect("a file"))).is_ok());
        if all && db.stats().disk_written_bytes == before {
            return;
        }
    }
}

fn sync(dir: &Path) {
    files(dir).for_each(|path| std::fs::File::open(path).and_then(|file| file.sync_all()).expect("synced"));
}
