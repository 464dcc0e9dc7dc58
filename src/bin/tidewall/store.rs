//! Opening a store for a command, and saying whose it is when it cannot be opened.

use crate::failure::{Failure, LOCKED};
use crate::show::progress;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use tidewall::{Db, Error, Keyspace, Options};

/// For reading: no incarnation is begun, and nothing written.
pub fn open_to_read(dir: &Path) -> Result<Db, Failure> {
    // What a grace could keep is listed; nothing is granted here, so none of it is kept from anybody.
    open(dir, Options::new().read_only().lease_grace(Duration::MAX))
}

/// For writing; the store must exist, unless it may be created.
pub fn open_to_write(dir: &Path, create: bool) -> Result<Db, Failure> {
    let options = Options::new();
    open(dir, if create { options } else { options.must_exist() })
}

pub fn open(dir: &Path, options: Options) -> Result<Db, Failure> {
    let bar = progress(None, "opening: ops replayed");
    let shown = bar.clone();
    let opened = options.progress(move |done| shown.set_position(done.ops)).open(dir);
    bar.finish_and_clear();
    let db = opened.map_err(|error| explain(error, dir))?;
    for warning in &db.report().warnings {
        warn(warning);
    }
    if db.report().unproven_frames > 0 {
        warn(&format!(
            "{} frames at the end of the log are left out: they may be torn, and only an open \
             for writing settles that",
            db.report().unproven_frames
        ));
    }
    Ok(db)
}

/// An error of opening the store in `dir`: with whose it is, where somebody else has it.
pub fn explain(error: Error, dir: &Path) -> Failure {
    match error {
        Error::Locked { dir: name } => Failure::new(LOCKED, locked(dir, &name)),
        other => other.into(),
    }
}

fn warn(what: &str) {
    // Nobody may be listening there.
    let _ = writeln!(std::io::stderr(), "tidewall: warning: {what}");
}

fn locked(dir: &Path, name: &str) -> String {
    let who = match lock_holder(dir) {
        Some(holder) => format!("{holder}, as the system's list of locks says"),
        None => "nobody that can be seen from here: who had it has just let go, or is on another host or in another \
                 container"
            .to_owned(),
    };
    format!(
        "{name} is open in another process. Its lock is held by {who}.\nUse `info`, `stats` or `log`, which work \
         beside it, or stop that process first. Removing files does not help: the lock is the system's, and \
         ends with the process."
    )
}

/// Who holds the lock of a store, as far as can be seen: a hint, for numbers of processes are used again.
pub fn lock_holder(dir: &Path) -> Option<String> {
    let pid = lock_pid(dir)?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(match name.trim() {
        "" => format!("process {pid}"),
        name => format!("process {pid} ({})", name.escape_debug()),
    })
}

#[cfg(target_os = "linux")]
pub fn lock_pid(dir: &Path) -> Option<u32> {
    use std::os::linux::fs::MetadataExt;
    let lock = dir.join("LOCK").canonicalize().ok()?;
    let inode = lock.metadata().ok()?.st_ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // 1: FLOCK  ADVISORY  WRITE 4242 08:01:131077 0 EOF
    let pids = locks.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let at = fields.iter().position(|&field| field == "FLOCK")?;
        let pid = fields.get(at + 3)?.parse::<u32>().ok()?;
        let (_, of) = fields.get(at + 4)?.rsplit_once(':')?;
        (of == inode && pid > 0).then_some(pid)
    });
    // The number of the device there need not be that of the file here, so another file may have this inode:
    // a process whose open files can be read must have this one among them.
    pids.into_iter().find(|pid| match std::fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(open) => open.flatten().any(|file| std::fs::read_link(file.path()).is_ok_and(|path| path == lock)),
        Err(_) => true,
    })
}

#[cfg(not(target_os = "linux"))]
pub fn lock_pid(_: &Path) -> Option<u32> {
    None
}

/// A keyspace that exists.
pub fn keyspace(db: &Db, name: &str) -> Result<Keyspace, Failure> {
    if let Some(space) = db.open_keyspace(name)? {
        return Ok(space);
    }
    let names: Vec<_> = db.keyspaces().iter().map(|(name, _)| format!("{name:?}")).collect();
    let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(Failure::usage(format!("there is no keyspace {name:?}; there is {known}")))
}
