//! Which lines of the engine call the disk, and how often each of them was the last one or failed.
//!
//! The lines are found in the sources, so that a call somebody adds is missed until a crash is tried there;
//! who makes a call is found by walking up its stack.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use tidewall::storage::{CallKind, SimDisk};

/// A line that calls the disk, as `file:line`.
pub type Site = &'static str;

/// Files whose calls are tried elsewhere.
const ELSEWHERE: [(&str, &str); 6] = [
    ("src/outside.rs", "reads only: tests/observe.rs"),
    ("src/inspect/", "reads only: tests/verify.rs"),
    ("src/observe.rs", "a file that nothing depends on, by a thread: tests/observe.rs"),
    ("src/backup/restore.rs", "the_power_goes_at_every_call_of_a_restore in tests/checkpoint.rs"),
    ("src/backup/salvage.rs", "tests/salvage.rs"),
    ("src/bin/", "no storage of its own"),
];

/// Lines in the other files whose calls are tried elsewhere: file, text, where.
const LINES_ELSEWHERE: [(&str, &str, &str); 6] = [
    ("src/log/list.rs", "self.storage.rename(self.name, name::STORE)", "a restore: tests/checkpoint.rs"),
    ("src/log/list.rs", "        self.storage.sync_dir()", "a restore: tests/checkpoint.rs"),
    (
        "src/index_file.rs",
        "        storage.remove(&file_name)?",
        "what a failed write could not remove, and the next one finds: by chance",
    ),
    (
        "src/index_file.rs",
        "written = file.write_all_at(&buffer, at)",
        "files above a MiB: benches/recover.rs",
    ),
    ("src/recover.rs", "let bytes = file.len();", "what a head says: no call"),
    ("src/backup/mod.rs", "files = self.storage.list()", "a restore or salvage: tests/checkpoint.rs"),
];

/// How a call of the disk looks.
const CALLS: [&str; 11] = [
    ".sync_data()",
    ".sync_dir()",
    ".set_len(",
    ".write_all_at(",
    ".write_zeros(",
    ".read_exact_at(",
    ".is_shared()",
    "file.map(",
    "file.len()",
    "storage.open(",
    "storage.list()",
];
const MORE_CALLS: [&str; 4] = ["storage.remove(", "storage.rename(", "storage.lock(", "from.link("];

#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Times it was called in a run that nothing cut off.
    pub calls: u64,
    /// Times it was the call at which the power went, and the images judged then.
    pub cut: u64,
    pub images: u64,
    /// Times it failed.
    pub failed: u64,
}

/// What every site has seen.
#[derive(Default)]
pub struct Sites(Mutex<BTreeMap<Site, Counts>>);

impl Sites {
    pub fn note(&self, site: Option<Site>, note: impl FnOnce(&mut Counts)) {
        let Some(site) = site else { return };
        note(self.0.lock().unwrap().entry(site).or_default());
    }

    pub fn get(&self, site: Site) -> Counts {
        self.0.lock().unwrap().get(site).copied().unwrap_or_default()
    }

    /// Prints the table and says which sites were not cut off, or did not fail.
    pub fn missed(&self) -> Vec<String> {
        let seen = self.0.lock().unwrap();
        let all = in_sources();
        println!("{:42} {:>9} {:>9} {:>9} {:>9}", "storage call", "calls", "last", "images", "failed");
        let mut missed = Vec::new();
        for site in all.iter().map(String::as_str).chain(seen.keys().copied()).collect::<BTreeSet<_>>() {
            let Counts { calls, cut, images, failed } = seen.get(site).copied().unwrap_or_default();
            println!("{site:42} {calls:>9} {cut:>9} {images:>9} {failed:>9}");
            if all.contains(site) && (cut == 0 || failed == 0) {
                missed.push(format!("{site}: the last call {cut} times, failed {failed} times"));
            }
        }
        missed
    }
}

/// Every line of the library that calls the disk, but for those tried elsewhere.
fn in_sources() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = BTreeSet::new();
    let mut dirs = vec![root.join("src")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
            let is_elsewhere = ELSEWHERE.iter().any(|(file, _)| name.starts_with(file));
            if is_elsewhere || name.starts_with("src/storage/") || !name.ends_with(".rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for (at, line) in text.lines().enumerate() {
                if line.starts_with("mod tests {") {
                    break;
                }
                let is_call = CALLS.iter().chain(&MORE_CALLS).any(|call| line.contains(call));
                let is_elsewhere =
                    LINES_ELSEWHERE.iter().any(|(file, text, _)| name == *file && line.contains(text));
                if is_call && !is_elsewhere && !line.trim_start().starts_with("//") {
                    found.insert(format!("{name}:{}", at + 1));
                }
            }
        }
    }
    assert!(found.len() > 40, "the calls of the disk were not found in the sources");
    found
}

/// The sites of the calls of a run, in order.
pub struct Observed(Arc<Mutex<Vec<Made>>>);

/// Who made a call, and which.
type Made = (Option<Site>, CallKind);

impl Observed {
    /// Notes every call of `disk` from now on, which is to be its first.
    pub fn of(disk: &SimDisk) -> Observed {
        let sites = Arc::new(Mutex::new(Vec::new()));
        let notes = sites.clone();
        disk.observe(move |_, kind| notes.lock().unwrap().push((caller(), kind)));
        Observed(sites)
    }

    pub fn at(&self, call: u64) -> Option<Site> {
        self.0.lock().unwrap().get(call as usize).and_then(|(site, _)| *site)
    }

    pub fn kind(&self, call: u64) -> Option<CallKind> {
        self.0.lock().unwrap().get(call as usize).map(|(_, kind)| *kind)
    }

    pub fn calls(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    /// Whether a call may have changed the disk.
    pub fn may_change(&self, call: u64) -> bool {
        use CallKind::{IsShared, Len, List, Map, ReadAt};
        let calls = self.0.lock().unwrap();
        calls.get(call as usize).is_none_or(|(_, kind)| !matches!(kind, ReadAt | Len | List | Map | IsShared))
    }

    pub fn all(&self) -> Vec<Option<Site>> {
        self.0.lock().unwrap().iter().map(|(site, _)| *site).collect()
    }
}

/// The innermost line of the library above the disk.
fn caller() -> Option<Site> {
    static KNOWN: LazyLock<Mutex<HashMap<usize, Option<Site>>>> = LazyLock::new(Mutex::default);
    let mut found = None;
    backtrace::trace(|frame| {
        let ip = frame.ip();
        let known = KNOWN.lock().unwrap().get(&(ip as usize)).copied();
        found = known.unwrap_or_else(|| {
            let site = site_of(ip);
            KNOWN.lock().unwrap().insert(ip as usize, site);
            site
        });
        found.is_none()
    });
    found
}

fn site_of(ip: *mut c_void) -> Option<Site> {
    static ROOT: OnceLock<String> = OnceLock::new();
    let root = ROOT.get_or_init(|| format!("{}/", env!("CARGO_MANIFEST_DIR")));
    let mut site: Option<Site> = None;
    // The address is behind the call: the line is that of the byte before.
    backtrace::resolve(ip, |symbol| {
        let name =
            symbol.filename().and_then(Path::to_str).map(|name| name.strip_prefix(root).unwrap_or(name));
        if let (None, Some(name), Some(line)) = (site, name, symbol.lineno())
            && name.starts_with("src/")
            && !name.starts_with("src/storage/")
        {
            site = Some(format!("{name}:{line}").leak());
        }
    });
    site
}
