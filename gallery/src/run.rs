//! Running tests with a bug switched on, until one of them fails.

use crate::bugs::binary_and_filter;
use crate::tree::{SWITCH, Tree};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What a test binary did.
pub struct Ran {
    /// `None`: it hung, and was stopped.
    pub status: Option<ExitStatus>,
    pub time: Duration,
    pub output: String,
}

impl Ran {
    /// The first test that failed, or what happened instead; `None`: all have passed.
    pub fn failure(&self) -> Option<String> {
        let Some(status) = self.status else {
            return Some("(it hung)".to_owned());
        };
        if status.success() {
            return None;
        }
        let failed = self.output.lines().filter_map(|line| line.strip_prefix("test "));
        let name = failed.filter_map(|line| line.strip_suffix(" ... FAILED")).next();
        Some(name.map_or_else(|| format!("the process ended: {status}"), str::to_owned))
    }

    /// How many tests passed.
    pub fn passed(&self) -> u32 {
        let summary = self.output.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
        summary.filter_map(|line| line.split(' ').next()?.parse::<u32>().ok()).sum()
    }
}

/// Runs a test of the tree with a bug on (0 for none), for at most so long.
pub fn run(tree: &Tree, test: &str, bug: usize, limit: Duration) -> io::Result<Ran> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let (binary, filter) = binary_and_filter(test);
    let Some(path) = tree.binaries.get(binary) else {
        return Err(io::Error::other(format!("there is no test binary {binary}")));
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("tidewall-gallery-{}-{number}", std::process::id());
    let log = std::env::temp_dir().join(name);
    let begun = Instant::now();
    let status = wait(path, &tree.dir, filter, bug, limit, &log);
    let time = begun.elapsed();
    let output = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    let _ = fs::remove_file(&log);
    Ok(Ran { status: status?, time, output })
}

fn wait(
    path: &Path,
    dir: &Path,
    filter: &str,
    bug: usize,
    limit: Duration,
    log: &Path,
) -> io::Result<Option<ExitStatus>> {
    let output = File::create(log)?;
    let mut command = Command::new(path);
    command.args(filter.split(' ').filter(|part| !part.is_empty()));
    command
        .current_dir(dir)
        .env("CARGO_MANIFEST_DIR", dir)
        .env(SWITCH, bug.to_string())
        .env("RUST_BACKTRACE", "0");
    command.stdin(Stdio::null()).stderr(output.try_clone()?).stdout(output);
    let mut child = command.spawn()?;
    let until = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// How long each test takes without a bug; all must pass then.
pub fn usual_times<'t>(
    tree: &Tree,
    jobs: usize,
    tests: impl Iterator<Item = &'t str>,
) -> Result<BTreeMap<&'t str, Duration>, String> {
    let tests: Vec<&str> = tests.collect::<BTreeSet<&str>>().into_iter().collect();
    let times = in_turn(jobs, &tests, |test| {
        let ran = run(tree, test, 0, Duration::from_secs(600)).map_err(|e| e.to_string())?;
        if let Some(failure) = ran.failure() {
            return Err(format!("{test} fails without a bug: {failure}\n{}", ran.output));
        }
        if ran.passed() == 0 {
            return Err(format!("{test}: no test has such a name"));
        }
        Ok((*test, ran.time))
    })?;
    Ok(times.into_iter().collect())
}

/// Does something with each, so many at a time; the answers in the same order.
pub fn in_turn<'a, T: Sync, A: Send>(
    jobs: usize,
    all: &'a [T],
    each: impl Fn(&'a T) -> Result<A, String> + Sync,
) -> Result<Vec<A>, String> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = all.get(at) else { break };
                    let answer = each(one);
                    if let Ok(mut done) = done.lock() {
                        done.push((at, answer));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().map_err(|e| e.to_string())?;
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, answer)| answer).collect()
}
