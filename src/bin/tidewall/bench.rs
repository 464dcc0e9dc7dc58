//! `bench`: what this disk and machine give, in three small parts.

use crate::args::Bench;
use crate::failure::{Failure, OTHER};
use crate::show::{nanos, object, out, progress, table, write_json, write_table};
use std::fs;
use std::io::{self, Write};
use std::time::{Duration, Instant};
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Token, Tokens};

/// Keys of each thread that puts.
const KEYS: u64 = 10_000;

/// What one part took.
struct Part {
    name: String,
    /// Nanoseconds of each call, sorted.
    took: Vec<u64>,
    /// Of all threads together.
    elapsed: Duration,
    calls_of_first: u64,
}

pub fn bench(args: &Bench) -> Result<(), Failure> {
    fs::create_dir(&args.dir).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => Failure::usage(format!(
            "{} exists: name a directory that does not, since it is removed afterwards",
            args.dir.display()
        )),
        _ => Failure::io(&format!("creating {}", args.dir.display()), &e),
    })?;
    let measured = measure(args);
    let removed = fs::remove_dir_all(&args.dir);
    let parts = measured?;
    removed.map_err(|e| Failure::io(&format!("removing {}", args.dir.display()), &e))?;
    show(args, &parts)
}

fn measure(args: &Bench) -> Result<Vec<Part>, Failure> {
    let db = Db::open(&args.dir)?;
    let space = db.keyspace("bench", KeyspaceOptions::new().tokens(Tokens::External))?;
    let value = vec![b'v'; args.value_bytes as usize];
    let time = Duration::from_secs(args.seconds.into());
    let (old, new) = (Token::new(1)?, Token::new(2)?);
    let bar = progress(None, "measuring");
    bar.enable_steady_tick(Duration::from_millis(200));
    let puts = run(args.threads, KEYS, time, |key| space.put(new, key, &value).map(drop))?;
    // Those that are there.
    let keys = puts.calls_of_first.min(KEYS);
    let refusals = run(1, keys, time, |key| match space.put(old, key, &value) {
        Err(Error::Fenced { .. }) => Ok(()),
        answer => answer.map(drop),
    })?;
    let gets = run(1, keys, time, |key| space.get(key).map(drop))?;
    bar.finish_and_clear();
    let plural = if args.threads == 1 { "" } else { "s" };
    let threads = format!("durable put, {} thread{plural}", args.threads);
    let parts = vec![
        Part { name: threads, ..puts },
        Part { name: "fenced put".to_owned(), ..refusals },
        Part { name: "get".to_owned(), ..gets },
    ];
    close(db, space)?;
    Ok(parts)
}

fn close(db: Db, space: Keyspace) -> Result<(), Failure> {
    drop(space);
    Ok(db.close()?)
}

/// Calls `call` in so many threads for so long, each with keys of its own.
fn run(
    threads: u32,
    keys: u64,
    time: Duration,
    call: impl Fn(&[u8]) -> Result<(), Error> + Sync,
) -> Result<Part, Failure> {
    let begun = Instant::now();
    let work = |thread: u32| -> Result<Vec<u64>, Error> {
        let mut took = Vec::new();
        let mut at = 0;
        while begun.elapsed() < time {
            let key = format!("{thread:04}/{:010}", at % keys.max(1));
            let called = Instant::now();
            call(key.as_bytes())?;
            took.push(called.elapsed().as_nanos() as u64);
            at += 1;
        }
        Ok(took)
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        running.into_iter().map(|thread| thread.join()).collect()
    });
    let elapsed = begun.elapsed();
    let (mut took, mut counts) = (Vec::new(), Vec::new());
    for of_thread in all {
        let of_thread = of_thread.map_err(|_| Failure::new(OTHER, "a thread panicked"))??;
        counts.push(of_thread.len() as u64);
        took.extend(of_thread);
    }
    took.sort_unstable();
    Ok(Part { name: String::new(), took, elapsed, calls_of_first: counts.first().copied().unwrap_or(0) })
}

impl Part {
    fn at(&self, share: f64) -> u64 {
        let at = (self.took.len() as f64 * share) as usize;
        self.took.get(at.min(self.took.len().saturating_sub(1))).copied().unwrap_or_default()
    }

    fn per_second(&self) -> u64 {
        (self.took.len() as f64 / self.elapsed.as_secs_f64()) as u64
    }
}

fn show(args: &Bench, parts: &[Part]) -> Result<(), Failure> {
    const SHARES: [(&str, f64); 5] =
        [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)];
    let mut out = out();
    let mut table =
        table(&["", "calls", "a second", "half", "90 %", "99 %", "99.9 %", "most"], &[1, 2, 3, 4, 5, 6, 7]);
    for part in parts {
        if args.json {
            let mut line = object([
                ("what", part.name.clone().into()),
                ("calls", part.took.len().into()),
                ("per_second", part.per_second().into()),
            ]);
            line.extend(SHARES.map(|(name, share)| (format!("{name}_nanos"), part.at(share).into())));
            write_json(&mut out, line)?;
            continue;
        }
        let head = [part.name.clone(), part.took.len().to_string(), part.per_second().to_string()];
        table.add_row(head.into_iter().chain(SHARES.map(|(_, share)| nanos(part.at(share)))));
    }
    if !args.json {
        write_table(&mut out, &table)?;
    }
    Ok(out.flush()?)
}
