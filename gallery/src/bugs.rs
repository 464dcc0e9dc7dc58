//! The bugs: what each changes, where it comes from, and the tests that are to find it.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// One bug.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bug {
    pub name: String,
    /// The trap or the public report that it is taken from.
    pub from: String,
    /// What goes wrong.
    pub wrong: String,
    pub edit: Vec<Edit>,
    /// The tests that find it: a test binary, a space, a part of the test's name.
    pub tests: Vec<String>,
}

/// A change of one piece of the source.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    pub file: String,
    /// The text as it is. It stands once in the file.
    pub good: String,
    /// The text with the bug; where `{{on}}` stands in it, the bug is switched on there, and the text is taken
    /// as it is.
    pub bug: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Gallery {
    bug: Vec<Bug>,
}

/// The directory of the crate in which the bugs go.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All bugs, in the order of the file; the switch of each is its place there, from 1.
pub fn load() -> Result<Vec<Bug>, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("bugs.toml");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let gallery: Gallery = toml::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(gallery.bug)
}

/// The binary and the filter of a test.
pub fn binary_and_filter(test: &str) -> (&str, &str) {
    test.split_once(' ').unwrap_or((test, ""))
}

/// What is wrong with the bugs as they stand beside this tree.
pub fn complaints(bugs: &[Bug], root: &Path) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut names = BTreeSet::new();
    let tests = test_functions(root);
    for bug in bugs {
        if !names.insert(&bug.name) {
            complaints.push(format!("{}: the name is taken", bug.name));
        }
        for edit in &bug.edit {
            let text = fs::read_to_string(root.join(&edit.file)).unwrap_or_default();
            let times = text.matches(&edit.good).count();
            if times != 1 {
                let (name, file, good) = (&bug.name, &edit.file, &edit.good);
                complaints.push(format!("{name}: its text stands {times} times in {file}: {good}"));
            }
        }
        for test in &bug.tests {
            let (binary, filter) = binary_and_filter(test);
            let name = filter.rsplit("::").next().unwrap_or_default();
            let is_there =
                tests.get(binary).is_some_and(|there| there.iter().any(|known| known.contains(name)));
            if name.is_empty() || !is_there {
                complaints.push(format!("{}: there is no test {test}", bug.name));
            }
        }
    }
    complaints
}

/// The names of functions in the sources of each test binary; those of the library's own tests under `lib`.
fn test_functions(root: &Path) -> BTreeMap<String, Vec<String>> {
    let mut functions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in ignore::Walk::new(root).flatten() {
        let path = entry.path().strip_prefix(root).unwrap_or(entry.path());
        let mut parts = path.iter().filter_map(|part| part.to_str());
        let binary = match (parts.next(), parts.next()) {
            (Some("src"), Some(_)) => "lib",
            (Some("tests"), Some(name)) => name.trim_end_matches(".rs"),
            _ => continue,
        };
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let names = text.lines().filter_map(|line| line.trim_start().strip_prefix("fn "));
        let names = names.filter_map(|line| line.split(['(', '<']).next()).map(str::to_owned);
        functions.entry(binary.to_owned()).or_default().extend(names);
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_still_fits_the_tree() {
        let bugs = load().unwrap();
        let complaints = complaints(&bugs, &root());
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        assert!(bugs.len() >= 40);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let edit = |good: &str| Edit { file: "src/lib.rs".into(), good: good.into(), bug: String::new() };
        let bug = |good: &str, test: &str| Bug {
            name: "a".into(),
            from: String::new(),
            wrong: String::new(),
            edit: vec![edit(good)],
            tests: vec![test.into()],
        };
        let good = "smoke a_paused_worker_is_fenced";
        let complain = |bugs: &[Bug]| complaints(bugs, &root()).len();
        assert_eq!(complain(&[bug("mod fence;", good)]), 0);
        assert_eq!(complain(&[bug("no such text", good)]), 1);
        assert_eq!(complain(&[bug("mod ", good)]), 1);
        assert_eq!(complain(&[bug("mod fence;", "smoke no_such_test")]), 1);
        assert_eq!(complain(&[bug("mod fence;", "smoke")]), 1);
        assert_eq!(complain(&[bug("mod fence;", good), bug("mod lease;", good)]), 1);
    }
}
