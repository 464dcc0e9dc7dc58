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

/// A step of the waiting that takes longer does not count for more: then the whole machine stood still, the test too.
const LONGEST_STEP: Duration = Duration::from_millis(100);

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
        .env("RUST_BACKTRACE", "0")
        // A case that fails with one bug would be tried with every other, out of a file in the tree that all share.
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
    command.stdin(Stdio::null()).stderr(output.try_clone()?).stdout(output);
    let mut child = command.spawn()?;
    let mut left = limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if left.is_zero() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        let begun = Instant::now();
        thread::sleep(Duration::from_millis(5));
        left = left.saturating_sub(begun.elapsed().min(LONGEST_STEP));
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::PathBuf;

    const BUG: usize = 7;

    proptest! {
        #[test]
        fn a_property_that_one_bug_breaks(_number in 0..9) {
            prop_assert!(std::env::var(SWITCH) != Ok(BUG.to_string()));
        }
    }

    #[test]
    fn what_a_property_test_finds_with_one_bug_does_not_stay_for_the_next() {
        let dir = std::env::temp_dir().join(format!("tidewall-gallery-tree-{}", std::process::id()));
        fs::create_dir_all(dir.join("src")).unwrap();
        // Where it is run, a property test looks for its source, and saves beside it.
        let sources = ["src/main.rs", "src/run.rs"].map(|name| dir.join(name));
        sources.iter().for_each(|path| fs::write(path, "").unwrap());
        let tree = Tree::built("lib", std::env::current_exe().unwrap(), dir.clone());
        let found = run(&tree, "lib a_property_that_one_bug", BUG, Duration::from_secs(60)).unwrap();
        let there = ignore::Walk::new(&dir).flatten().filter(|entry| entry.path().is_file());
        let there: BTreeSet<PathBuf> = there.map(|entry| entry.into_path()).collect();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(
            found.failure().unwrap(),
            "run::tests::a_property_that_one_bug_breaks",
            "{}",
            found.output
        );
        assert_eq!(there, BTreeSet::from(sources), "{}", found.output);
    }

    #[test]
    #[cfg(unix)]
    fn who_goes_on_for_too_long_is_stopped() {
        let tree = Tree::built("sleep", "/bin/sleep".into(), std::env::temp_dir());
        let hung = run(&tree, "sleep 100000", 0, Duration::from_millis(300)).unwrap();
        assert_eq!(hung.failure().unwrap(), "(it hung)");
        let ended = run(&tree, "sleep 0.1", 0, Duration::from_secs(60)).unwrap();
        assert!(ended.failure().is_none());
    }
}
