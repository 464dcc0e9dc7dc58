//! A copy of the crate with all bugs in it, each behind a switch, and what is built of it.

use crate::bugs::{Bug, Edit, root};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, io};

/// The environment variable that says which bug is on.
pub const SWITCH: &str = "TIDEWALL_SEEDED";

const SWITCH_SOURCE: &str = r#"
/// Whether a bug is switched on.
pub(crate) fn is(bug: u32) -> bool {
    static ON: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let number = || std::env::var("TIDEWALL_SEEDED").ok().and_then(|number| number.parse().ok());
    *ON.get_or_init(|| number().unwrap_or(0)) == bug
}
"#;

/// Tests that bring modules of the library with them, built in their own way.
const LOOM: &str = "tests/loom.rs";

/// The library's own tests under shuttle, which are those of `tests/schedules`.
const SCHEDULES: &str = "schedules";

/// The copy, and the test binaries built of it, by name.
pub struct Tree {
    pub dir: PathBuf,
    /// Where the dependencies are built as well that the crate's own tests need.
    target: PathBuf,
    pub binaries: BTreeMap<String, PathBuf>,
}

impl Tree {
    /// Copies the crate, puts all bugs in, and builds these test binaries.
    pub fn make(bugs: &[Bug], wanted: BTreeSet<&str>) -> Result<Tree, String> {
        let mut files = copies(&root()).map_err(|e| e.to_string())?;
        for (at, bug) in bugs.iter().enumerate() {
            for edit in &bug.edit {
                let text = files.get_mut(Path::new(&edit.file));
                let text = text.ok_or_else(|| format!("{}: there is no {}", bug.name, edit.file))?;
                seed(text, edit, at + 1).map_err(|what| format!("{}: {what}", bug.name))?;
            }
        }
        Tree::of(files, "bugs")?.build(wanted)
    }

    /// A tree of one test binary that is there already.
    #[cfg(test)]
    pub fn built(binary: &str, path: PathBuf, dir: PathBuf) -> Tree {
        Tree { dir, target: PathBuf::new(), binaries: BTreeMap::from([(binary.to_owned(), path)]) }
    }

    /// Writes these files, and the switch, where no other tree is.
    pub fn of(mut files: BTreeMap<PathBuf, Vec<u8>>, name: &str) -> Result<Tree, String> {
        let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
        let dir = target.join("gallery").join(name);
        files.insert("src/seeded.rs".into(), SWITCH_SOURCE.into());
        append(&mut files, "src/lib.rs", "mod seeded;");
        allow_warnings(&mut files);
        rename(&mut files, name);
        append(&mut files, LOOM, "#[path = \"../src/seeded.rs\"]\nmod seeded;");
        write(&files, &dir).map_err(|e| format!("copying the crate to {}: {e}", dir.display()))?;
        Ok(Tree { dir, target, binaries: BTreeMap::new() })
    }

    /// Builds these test binaries.
    pub fn build(mut self, wanted: BTreeSet<&str>) -> Result<Tree, String> {
        let (loom, rest): (Vec<&str>, Vec<&str>) = wanted.into_iter().partition(|binary| *binary == "loom");
        let (shuttle, plain): (Vec<&str>, Vec<&str>) =
            rest.into_iter().partition(|binary| *binary == SCHEDULES);
        if !plain.is_empty() {
            self.binaries = build(&self.dir, &self.target, &plain, None)?;
        }
        if !loom.is_empty() {
            let way = Some(("loom", "--cfg loom"));
            self.binaries.extend(build(&self.dir, &self.target.join("loom"), &loom, way)?);
        }
        if !shuttle.is_empty() {
            let way = Some(("release", "--cfg shuttle -C debug-assertions"));
            let built = build(&self.dir, &self.target.join("shuttle"), &["lib"], way)?;
            self.binaries.extend(built.into_values().map(|path| (SCHEDULES.to_owned(), path)));
        }
        Ok(self)
    }
}

/// The files of the crate that its tests need.
pub fn copies(root: &Path) -> io::Result<BTreeMap<PathBuf, Vec<u8>>> {
    const NOT: [&str; 5] = ["gallery", "model", "fuzz", "target", "benches/peers"];
    let mut files = BTreeMap::new();
    let base = root.to_owned();
    let walk = ignore::WalkBuilder::new(root)
        .require_git(false)
        .filter_entry(move |entry| !NOT.iter().any(|not| entry.path() == base.join(not)))
        .build();
    for entry in walk {
        let entry = entry.map_err(io::Error::other)?;
        if entry.file_type().is_some_and(|kind| kind.is_file()) {
            let name = entry.path().strip_prefix(root).map_err(io::Error::other)?;
            files.insert(name.to_owned(), fs::read(entry.path())?);
        }
    }
    Ok(files)
}

fn append(files: &mut BTreeMap<PathBuf, Vec<u8>>, file: &str, text: &str) {
    if let Some(bytes) = files.get_mut(Path::new(file)) {
        bytes.extend_from_slice(format!("\n{text}\n").as_bytes());
    }
}

/// Under another version, so that what is built of it lies beside what is built of the crate itself.
fn rename(files: &mut BTreeMap<PathBuf, Vec<u8>>, name: &str) {
    if let Some(bytes) = files.get_mut(Path::new("Cargo.toml")) {
        let manifest = String::from_utf8_lossy(bytes);
        let version = manifest.lines().find(|line| line.starts_with("version = ")).unwrap_or_default();
        let other = format!("{}-{name}\"", version.trim_end_matches('"'));
        *bytes = manifest.replacen(version, &other, 1).into_bytes();
    }
}

/// What is behind a switch reads as code that is never reached, or unused.
fn allow_warnings(files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for file in ["src/lib.rs", LOOM] {
        if let Some(bytes) = files.get_mut(Path::new(file)) {
            bytes.splice(0..0, *b"#![allow(warnings)]\n");
        }
    }
}

/// Puts one edit into a file, behind its switch. What an earlier bug has put around the text stays.
fn seed(text: &mut Vec<u8>, edit: &Edit, switch: usize) -> Result<(), String> {
    let source = String::from_utf8_lossy(text).into_owned();
    let at = source.rfind(&edit.good).ok_or("its text is gone; another bug has taken it")?;
    let on = format!("crate::seeded::is({switch})");
    let (good, bug) = (&edit.good, &edit.bug);
    let seeded = if bug.contains("{{on}}") {
        bug.replace("{{on}}", &on)
    } else if good.trim_end().ends_with([';', '}']) {
        format!("if {on} {{ {bug} }} else {{ {good} }}")
    } else {
        format!("(if {on} {{ {bug} }} else {{ {good} }})")
    };
    *text = [&source[..at], &seeded, &source[at + good.len()..]].concat().into_bytes();
    Ok(())
}

/// Writes what has changed, so that only that is built again, and removes what is gone.
fn write(files: &BTreeMap<PathBuf, Vec<u8>>, dir: &Path) -> io::Result<()> {
    for (name, bytes) in files {
        let path = dir.join(name);
        if fs::read(&path).is_ok_and(|there| there == *bytes) {
            continue;
        }
        fs::create_dir_all(path.parent().unwrap_or(dir))?;
        fs::write(path, bytes)?;
    }
    for entry in ignore::WalkBuilder::new(dir).standard_filters(false).build().flatten() {
        let is_file = entry.file_type().is_some_and(|kind| kind.is_file());
        let name = entry.path().strip_prefix(dir).map_err(io::Error::other)?;
        if is_file && !files.contains_key(name) && name != Path::new("Cargo.lock") {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Builds the named test binaries, some of them under a profile and flags of their own; where each lies.
fn build(
    dir: &Path,
    target: &Path,
    names: &[&str],
    way: Option<(&str, &str)>,
) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["test", "--no-run", "--features", "testkit", "--message-format=json-render-diagnostics"]);
    for name in names {
        match *name {
            "lib" => cargo.arg("--lib"),
            name => cargo.args(["--test", name]),
        };
    }
    cargo.current_dir(dir).env("CARGO_TARGET_DIR", target).stderr(Stdio::inherit()).stdout(Stdio::piped());
    if let Some((profile, flags)) = way {
        cargo.args(["--profile", profile]).env("RUSTFLAGS", flags);
    }
    let output = cargo.output().map_err(|e| format!("cargo: {e}"))?;
    if !output.status.success() {
        return Err("the crate with its bugs does not build".into());
    }
    let mut binaries = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let Some(executable) = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)
        else {
            continue;
        };
        let is_lib = message["target"]["kind"][0] == "lib";
        let name = if is_lib { "lib" } else { message["target"]["name"].as_str().unwrap_or_default() };
        binaries.insert(name.to_owned(), executable.into());
    }
    Ok(binaries)
}

/// Where the compiler refuses the library: the file, and the place in it.
pub fn errors(tree: &Tree) -> Result<Vec<(String, usize)>, String> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["test", "--no-run", "--lib", "--features", "testkit", "--message-format=json"]);
    cargo.current_dir(&tree.dir).env("CARGO_TARGET_DIR", &tree.target);
    let output = cargo.stderr(Stdio::null()).output().map_err(|e| format!("cargo: {e}"))?;
    let mut errors = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        if message["message"]["level"] != "error" {
            continue;
        }
        for span in message["message"]["spans"].as_array().into_iter().flatten() {
            if let (Some(file), Some(byte)) = (span["file_name"].as_str(), span["byte_start"].as_u64()) {
                errors.push((file.to_owned(), byte as usize));
            }
        }
    }
    Ok(errors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeded(source: &str, edits: &[(&str, &str)]) -> String {
        let mut text = source.as_bytes().to_vec();
        for (at, (good, bug)) in edits.iter().enumerate() {
            let edit = Edit { file: String::new(), good: (*good).into(), bug: (*bug).into() };
            seed(&mut text, &edit, at + 1).unwrap();
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_bug_stands_behind_its_switch_beside_the_text_as_it_is() {
        assert_eq!(
            seeded("f(a < b);", &[("a < b", "a <= b")]),
            "f((if crate::seeded::is(1) { a <= b } else { a < b }));"
        );
        assert_eq!(seeded("sync()?;", &[("sync()?;", "")]), "if crate::seeded::is(1) {  } else { sync()?; }");
        assert_eq!(seeded("if x {", &[("if x {", "if {{on}} || x {")]), "if crate::seeded::is(1) || x {");
        let two = seeded("f(a < b);", &[("a < b", "a <= b"), ("a < b", "a > b")]);
        assert!(
            two.contains("is(1) { a <= b } else { (if crate::seeded::is(2) { a > b } else { a < b }) }"),
            "{two}"
        );
    }
}
