//! Killed at the N-th system call, for every N; and every system call failing once, and from then on. By strace.

use crate::script::{Ended, Step, check};
use crate::system::has;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The calls that change what is in a file or a directory, or make it durable; `flock` guards it.
const CALLS: [&str; 14] = [
    "pwrite64",
    "write",
    "fdatasync",
    "fsync",
    "openat",
    "ftruncate",
    "fallocate",
    "rename",
    "renameat2",
    "unlink",
    "unlinkat",
    "linkat",
    "mkdir",
    "flock",
];

/// What each call may answer.
const ERRORS: [(&str, &[&str]); 11] = [
    ("pwrite64", &["EIO", "ENOSPC", "EFBIG", "EDQUOT", "EROFS", "EINTR"]),
    ("fdatasync", &["EIO", "ENOSPC", "EDQUOT", "EROFS"]),
    ("fsync", &["EIO", "ENOSPC", "EROFS"]),
    ("openat", &["EMFILE", "ENFILE", "EACCES", "EROFS", "ENOSPC", "EIO"]),
    ("ftruncate", &["EIO", "ENOSPC", "EFBIG"]),
    ("rename", &["EIO", "ENOSPC", "EROFS"]),
    ("unlink", &["EIO", "EROFS", "EACCES"]),
    ("linkat", &["EIO", "EMLINK"]),
    ("flock", &["EIO", "ENOLCK", "EWOULDBLOCK"]),
    ("pread64", &["EIO", "EINTR"]),
    ("mmap", &["ENOMEM"]),
];

pub fn missing() -> Option<String> {
    (!has("strace")).then(|| "there is no strace".to_owned())
}

/// Where a worker runs, and how often it was seen to make each call.
pub struct Traced {
    room: PathBuf,
    seed: u64,
    steps: Vec<Step>,
    counts: BTreeMap<String, u64>,
}

impl Traced {
    /// Runs the script once, counting.
    pub fn new(room: &Path, seed: u64, steps: Vec<Step>) -> Result<Traced, String> {
        let mut traced = Traced { room: room.to_owned(), seed, steps, counts: BTreeMap::new() };
        let log = room.join("trace");
        let ended = traced.run(&["-o", log.to_str().ok_or("a path that is not UTF-8")?])?;
        if ended.0 != Ended::Whole {
            return Err(format!("the script does not run by itself: {ended:?}"));
        }
        for line in fs::read_to_string(&log).map_err(|e| e.to_string())?.lines() {
            // With `-f` a pid stands in front where there is more than one thread.
            let call = line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ');
            if let Some((name, _)) = call.split_once('(') {
                *traced.counts.entry(name.to_owned()).or_default() += 1;
            }
        }
        Ok(traced)
    }

    /// Runs the script under strace in a new directory: how it ended, and how many steps were answered.
    fn run(&self, arguments: &[&str]) -> Result<(Ended, usize, PathBuf), String> {
        let (data, acks) = (self.room.join("data"), self.room.join("acks"));
        let _ = fs::remove_dir_all(&data);
        fs::write(&acks, [0; 8]).map_err(|e| e.to_string())?;
        let this = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq"]).args(arguments).arg(this).arg("worker").arg(&data).arg(&acks);
        let strace = strace.args([self.seed.to_string(), self.steps.len().to_string()]);
        let output = strace.output().map_err(|e| format!("strace: {e}"))?;
        if output.status.signal() == Some(libc::SIGALRM) {
            return Err(format!("{}: the worker hangs", arguments.join(" ")));
        }
        if output.status.code() == Some(3) {
            return Err(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Ok((Ended::parse(&String::from_utf8_lossy(&output.stdout)), acked(&acks)?, data))
    }

    /// How many system calls there are to be killed at.
    pub fn kills(&self) -> Vec<(&'static str, u64)> {
        let each =
            |call: &'static str| (1..=self.counts.get(call).copied().unwrap_or(0)).map(move |n| (call, n));
        CALLS.into_iter().flat_map(each).collect()
    }

    /// Kills the worker at the N-th call of a kind.
    pub fn kill(&self, call: &str, nth: u64) -> Result<(), String> {
        let inject = format!("inject={call}:signal=KILL:when={nth}");
        let (ended, acked, data) =
            self.run(&["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject])?;
        let what = format!("killed at {call} {nth}");
        if ended != Ended::Killed {
            return Err(format!("{what}: it lived: {ended:?}"));
        }
        check(&data, &self.steps, acked, false).map(drop).map_err(|e| format!("{what}: {e}"))
    }

    /// Every call of every kind, with each error: once, or from then on.
    pub fn errors(&self, every: usize) -> Vec<(&'static str, &'static str, String)> {
        let mut all = Vec::new();
        for (call, errors) in ERRORS {
            for &error in errors {
                for nth in 1..=self.counts.get(call).copied().unwrap_or(0) {
                    all.push((call, error, nth.to_string()));
                    // Calls that are repeated when interrupted would be for ever.
                    if error != "EINTR" {
                        all.push((call, error, format!("{nth}+")));
                    }
                }
            }
        }
        all.into_iter().step_by(every).collect()
    }

    /// Has calls fail; whether any answer was an error.
    pub fn fail(&self, call: &str, error: &str, when: &str) -> Result<bool, String> {
        let inject = format!("inject={call}:error={error}:when={when}");
        let (ended, acked, data) =
            self.run(&["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject])?;
        let what = format!("{call} {when} answers {error}: {ended:?}");
        let exact = match ended {
            // Before the worker is one: libraries are opened and mapped with the same calls.
            Ended::Killed => acked == 0,
            Ended::Whole => true,
            Ended::Refused { not_applied, .. } => not_applied,
        };
        if ended == Ended::Killed && acked > 0 {
            return Err(format!("{what}: it died of an error"));
        }
        check(&data, &self.steps, acked, exact).map_err(|e| format!("{what}: {e}"))?;
        Ok(ended != Ended::Whole)
    }
}

/// How many steps a worker had answers for.
pub fn acked(acks: &Path) -> Result<usize, String> {
    let bytes = fs::read(acks).map_err(|e| e.to_string())?;
    let bytes: [u8; 8] = bytes.try_into().map_err(|_| "the file of acknowledgements is cut")?;
    Ok(u64::from_le_bytes(bytes) as usize)
}
