//! The rules of the house that no compiler knows, each seen to fail on a line that breaks it.
//!
//! Each rule is a function from sources to complaints. The tests run it on the tree, where it must find
//! nothing, and on a piece of text that breaks it, where it must find something.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Beyond this a file is worth a look; beyond the second it is split.
const LONG_LINES: usize = 450;
const TOO_LONG_LINES: usize = 520;

/// Files that are longer for now, each with what is to leave it.
const TO_BE_SPLIT: [(&str, &str); 2] =
    [("db.rs", "the future of a commit, and the two threads"), ("keyspace.rs", "the deletes of a prefix")];

/// The files in which `unsafe` may stand, each with its reason.
const UNSAFE_FILES: [(&str, &str); 7] = [
    ("clock.rs", "one system call that the standard library does not make"),
    ("storage/futex.rs", "one system call that no crate makes: sleepers go on to another word"),
    ("storage/disk.rs", "mapping a file, and reserving its blocks"),
    ("log/image.rs", "one appender and many readers without a lock"),
    ("log/segment.rs", "the table of segments, freed by epochs"),
    ("index/slab.rs", "tables of their own or in memory that many share"),
    ("index/slots.rs", "tables and directories, freed by epochs"),
];

/// Pairs (user, used) that go against the order of `lib.rs`, each with its reason. One that is no
/// longer needed is a complaint.
const AGAINST_THE_ORDER: [(&str, &str, &str); 9] = [
    ("types", "error", "a word refuses what it cannot mean with the one error type, whose fields are words"),
    ("snapshot", "engine", "holds the register of pinned lsns beside the verb of reading: to be parted"),
    ("snapshot", "look_up", "the verb of reading, as above"),
    ("db", "batch", "hands out a handle: to be moved there"),
    ("db", "keyspace", "hands out a handle: to be moved there"),
    ("db", "view", "hands out a handle: to be moved there"),
    ("batch", "keyspace", "the handle lies beside its verbs: to be parted"),
    ("view", "keyspace", "the handle lies beside its verbs: to be parted"),
    ("sync", "storage", "where calls of one system only are made"),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// One source file.
struct Source {
    /// Below `src/`.
    path: String,
    text: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    /// The lines in front of the tests, with their numbers.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines: Vec<&str> = self.text.lines().collect();
        let tests = (1..lines.len()).find(|&at| {
            lines[at].starts_with("mod tests {")
                && lines[..at]
                    .iter()
                    .rev()
                    .find(|line| !line.is_empty())
                    .is_some_and(|line| line.contains("test"))
        });
        let end = tests.map_or(lines.len(), |at| at - 1);
        lines.into_iter().take(end).enumerate().map(|(at, line)| (at + 1, line))
    }

    /// The same without comments and docs.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.lines().filter_map(|(number, line)| {
            let code = match line.trim_start().starts_with("//") {
                true => "",
                false => line.split(" // ").next().unwrap_or_default(),
            };
            (!code.trim().is_empty()).then_some((number, code))
        })
    }
}

/// Every file of the library, but for those that only its tests see.
fn sources() -> Vec<Source> {
    fn walk(dir: &Path, base: &Path, out: &mut Vec<Source>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let below = path.strip_prefix(base).unwrap().to_str().unwrap().replace('\\', "/");
            if path.is_dir() && !below.ends_with("tests") && below != "bin" {
                walk(&path, base, out);
            } else if below.ends_with(".rs") && !below.ends_with("/tests.rs") {
                out.push(Source::new(&below, &fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut out = Vec::new();
    let base = root().join("src");
    walk(&base, &base, &mut out);
    out.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(out.len() > 20, "the sources are where they are looked for");
    out
}

fn assert_tidy(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

fn complain(source: &Source, line: usize, what: &str) -> String {
    format!("src/{}:{line}: {what}", source.path)
}

/// The identifier at the start of `text`.
fn ident(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

// The order of modules.

/// The modules that a file declares, in its order.
fn declared(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| {
            let line = line.trim_start_matches("pub ").trim_start_matches("pub(crate) ");
            Some(line.strip_prefix("mod ")?.strip_suffix(';')?.to_owned())
        })
        .filter(|name| name != "tests")
        .collect()
}

/// What stands behind each `prefix` in a line.
fn behind<'a>(line: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    line.match_indices(prefix).map(|(at, _)| &line[at + prefix.len()..])
}

/// A module uses only what its list declares above it.
fn order(sources: &[Source], exceptions: &[(&str, &str, &str)]) -> Vec<String> {
    let lists: BTreeMap<&str, Vec<String>> = sources
        .iter()
        .filter(|source| source.path == "lib.rs" || source.path.ends_with("/mod.rs"))
        .map(|source| {
            (source.path.trim_end_matches("lib.rs").trim_end_matches("mod.rs"), declared(&source.text))
        })
        .collect();
    let mut complaints = Vec::new();
    let mut unused: Vec<_> = exceptions.iter().collect();
    for source in sources.iter().filter(|source| source.path != "lib.rs") {
        for (list, prefix) in places(&source.path) {
            let Some(names) = lists.get(list.as_str()) else { continue };
            let own = source.path[list.len()..].split(['/', '.']).next().unwrap_or_default();
            let place = |name: &str| names.iter().position(|known| known == name);
            let Some(here) = place(own) else {
                complaints.push(complain(
                    source,
                    1,
                    &format!("{own} is not declared in the list of {list:?}"),
                ));
                continue;
            };
            for (number, code) in source.code() {
                for used in behind(code, prefix) {
                    if used.starts_with('{') && prefix == "crate::" {
                        complaints.push(complain(
                            source,
                            number,
                            "one module a `use`, so that the order can be seen",
                        ));
                    }
                    let used = ident(used);
                    if prefix == "crate::" && used.starts_with(char::is_uppercase) {
                        complaints.push(complain(
                            source,
                            number,
                            &format!("{used} is used through the front page"),
                        ));
                    }
                    if place(used).is_none_or(|there| there <= here) {
                        continue;
                    }
                    if exceptions.iter().any(|&(user, name, _)| (user, name) == (own, used)) {
                        unused.retain(|&&(user, name, _)| (user, name) != (own, used));
                        continue;
                    }
                    complaints.push(complain(
                        source,
                        number,
                        &format!("{own} uses {used}, which is declared below it"),
                    ));
                }
            }
        }
    }
    complaints
        .extend(unused.iter().map(|(user, used, _)| format!("the exception {user} → {used} is not needed")));
    complaints
}

/// The lists a file stands in, and how its code names their modules.
fn places(path: &str) -> Vec<(String, &'static str)> {
    let mut places = vec![(String::new(), "crate::")];
    let parts: Vec<_> = path.split('/').collect();
    if parts.len() > 1 && parts[parts.len() - 1] != "mod.rs" {
        places.push((parts[..parts.len() - 1].join("/") + "/", "super::"));
    }
    places
}

#[test]
fn modules_use_only_what_is_declared_above_them() {
    assert_tidy(order(&sources(), &AGAINST_THE_ORDER));
    let tree = |low: &str, inner: &str| {
        [
            Source::new("lib.rs", "mod low;\npub mod high;\n"),
            Source::new("low.rs", low),
            Source::new("high/mod.rs", "mod first;\npub(crate) mod second;\nuse crate::low::A;\n"),
            Source::new("high/first.rs", inner),
            Source::new("high/second.rs", "use super::first::A;\nuse crate::low::B;\n"),
        ]
    };
    assert!(order(&tree("", ""), &[]).is_empty());
    assert!(
        order(&tree("// crate::high::A\n#[cfg(test)]\nmod tests {\nuse crate::high::A;\n}\n", ""), &[])
            .is_empty()
    );
    for (low, inner) in [
        ("use crate::high::A;", ""),
        ("fn f() -> crate::high::A {}", ""),
        ("", "use super::second::A;"),
        ("use crate::{high};", ""),
        ("use crate::High;", ""),
    ] {
        assert_eq!(order(&tree(low, inner), &[]).len(), 1, "{low}{inner}");
    }
    assert!(order(&tree("use crate::high::A;", ""), &[("low", "high", "why")]).is_empty());
    assert_eq!(order(&tree("", ""), &[("low", "high", "why")]).len(), 1);
}

// The size of files.

fn too_long(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let lines = source.lines().count();
        if lines > TOO_LONG_LINES && !TO_BE_SPLIT.iter().any(|&(path, _)| path == source.path) {
            complaints.push(complain(source, lines, &format!("{lines} lines without tests: split it")));
        } else if lines > LONG_LINES {
            println!("src/{}: {lines} lines without tests", source.path);
        }
    }
    complaints
}

#[test]
fn files_are_read_in_one_sitting() {
    assert_tidy(too_long(&sources()));
    let tests = "#[cfg(test)]\nmod tests {\n".to_owned() + &"line\n".repeat(600);
    assert!(too_long(&[Source::new("a.rs", &tests)]).is_empty());
    assert_eq!(too_long(&[Source::new("a.rs", &"line\n".repeat(521))]).len(), 1);
    assert!(read("src/lib.rs").lines().count() <= 150, "the front page is one screen or two");
    assert!(read("ARCHITECTURE.md").lines().count() <= 240);
}

// What is never written.

const NEVER: [(&str, &str); 7] = [
    (".unwrap()", "say why it cannot fail, with `expect`"),
    ("todo!", "unfinished"),
    ("unimplemented!", "unfinished"),
    ("dbg!", "left over"),
    ("println!", "a library is silent"),
    ("unwrap_unchecked", "say why it cannot fail, with `expect`"),
    ("static mut", "shared without a rule"),
];

fn never(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        for (number, code) in source.code() {
            let found = NEVER.iter().filter(|(word, _)| code.contains(word));
            complaints.extend(found.map(|(word, why)| complain(source, number, &format!("`{word}`: {why}"))));
        }
        for (number, line) in source.text.lines().enumerate() {
            if ["TODO", "FIXME", "XXX"].iter().any(|word| line.contains(word)) {
                complaints.push(complain(source, number + 1, "do it, or write it where it is planned"));
            }
        }
    }
    complaints
}

#[test]
fn nothing_unfinished_and_no_unwrap() {
    assert_tidy(never(&sources()));
    assert!(
        never(&[Source::new("a.rs", "/// x.unwrap()\n#[cfg(test)]\nmod tests {\nx.unwrap();\n")]).is_empty()
    );
    for bad in
        ["x.unwrap();", "todo!()", "// TODO: later", "    unimplemented!(\"x\")", "static mut X: u8 = 0;"]
    {
        assert_eq!(never(&[Source::new("a.rs", bad)]).len(), 1, "{bad}");
    }
}

// Unsafe code.

fn unsafe_code(sources: &[Source], allowed: &[(&str, &str)]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let lines: Vec<_> = source.lines().collect();
        for (number, code) in source.code() {
            let starts = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
            if !starts {
                continue;
            }
            if !allowed.iter().any(|&(path, _)| path == source.path) {
                complaints.push(complain(source, number, "unsafe code outside of its few files"));
            }
            // Up through the statement and its attributes to the comment in front of it.
            let before = lines[..number - 1].iter().rev().map(|(_, line)| line.trim());
            let mut comment = before
                .skip_while(|line| {
                    !line.starts_with("//")
                        && !line.is_empty()
                        && !line.ends_with(';')
                        && !line.ends_with('}')
                })
                .take_while(|line| line.starts_with("//"));
            if !comment.any(|line| line.starts_with("// SAFETY:")) {
                complaints.push(complain(source, number, "unsafe code without its `// SAFETY:`"));
            }
        }
    }
    complaints
}

#[test]
fn unsafe_code_is_rare_and_says_why() {
    let sources = sources();
    assert_tidy(unsafe_code(&sources, &UNSAFE_FILES));
    for (path, _) in UNSAFE_FILES {
        let source = sources.iter().find(|source| source.path == path);
        let source = source.unwrap_or_else(|| panic!("{path} is gone: strike it out"));
        assert!(source.code().any(|(_, code)| code.contains("unsafe")), "{path} needs no exception any more");
    }
    let good = "// SAFETY: it is.\nlet x =\n    unsafe { f() };\n";
    assert!(unsafe_code(&[Source::new("a.rs", good)], &[("a.rs", "")]).is_empty());
    assert_eq!(unsafe_code(&[Source::new("b.rs", good)], &[("a.rs", "")]).len(), 1);
    for bad in ["let x = unsafe { f() };", "// SAFETY: of y.\nlet y = 1;\nlet x = unsafe { f() };"] {
        assert_eq!(unsafe_code(&[Source::new("a.rs", bad)], &[("a.rs", "")]).len(), 1, "{bad}");
    }
}

// Syncs.

fn ignored_syncs(sources: &[Source]) -> Vec<String> {
    const SYNCS: [&str; 5] = ["sync_data(", "sync_dir(", "sync_all(", "sync_directory(", ".commit("];
    let mut complaints = Vec::new();
    for source in sources {
        for (number, code) in source.code() {
            let ignores = ["let _", ".ok()", "drop(", "unwrap_or"].iter().any(|way| code.contains(way));
            if ignores && SYNCS.iter().any(|sync| code.contains(sync)) {
                complaints.push(complain(source, number, "the answer of a sync is never ignored (D5)"));
            }
        }
    }
    complaints
}

#[test]
fn no_answer_of_a_sync_is_ignored() {
    assert_tidy(ignored_syncs(&sources()));
    assert!(ignored_syncs(&[Source::new("a.rs", "file.sync_data()?;")]).is_empty());
    for bad in ["let _ = file.sync_data();", "storage.sync_dir().ok();", "drop(file.sync_all());"] {
        assert_eq!(ignored_syncs(&[Source::new("a.rs", bad)]).len(), 1, "{bad}");
    }
}

// Documents.

/// The variants of `enum Error`.
fn variants(text: &str) -> Vec<&str> {
    let (_, body) = text.split_once("pub enum Error {").expect("the error type");
    let (body, _) = body.split_once("\n}").expect("its end");
    let names = body.lines().filter_map(|line| {
        let name = ident(line.strip_prefix("    ")?);
        name.starts_with(char::is_uppercase).then_some(name)
    });
    names.collect()
}

fn missing<'a>(names: &[&'a str], document: &str) -> Vec<&'a str> {
    names.iter().copied().filter(|name| !document.contains(&format!("`{name}`"))).collect()
}

#[test]
fn every_error_is_in_the_readme() {
    let errors = read("src/error.rs");
    let names = variants(&errors);
    assert!(names.len() > 15, "{names:?}");
    assert_eq!(missing(&names, &read("README.md")), [""; 0]);
    assert_eq!(missing(&["Fenced", "Gone"], "`Fenced`: stop"), ["Gone"]);
}

/// The value of a constant expression of integers, named constants, `+`, `-`, `<<`, `as` and parentheses.
fn value(expression: &str, known: &BTreeMap<String, u64>) -> Option<u64> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let (value, rest) = sum(&tokens, known)?;
    rest.is_empty().then_some(value)
}

fn sum<'t>(tokens: &'t [&'t str], known: &BTreeMap<String, u64>) -> Option<(u64, &'t [&'t str])> {
    let (mut value, mut rest) = atom(tokens, known)?;
    while let [operator @ ("+" | "-" | "<<"), behind @ ..] = rest {
        let (next, left) = atom(behind, known)?;
        value = match *operator {
            "+" => value.checked_add(next)?,
            "-" => value.checked_sub(next)?,
            _ => value << next,
        };
        rest = left;
    }
    Some((value, rest))
}

fn atom<'t>(tokens: &'t [&'t str], known: &BTreeMap<String, u64>) -> Option<(u64, &'t [&'t str])> {
    match tokens {
        ["(", rest @ ..] => match sum(rest, known)? {
            (value, [")", rest @ ..]) => Some((value, rest)),
            _ => None,
        },
        [word, rest @ ..] => {
            let number = word.replace('_', "").parse().ok().or_else(|| known.get(*word).copied());
            Some((number?, rest))
        }
        [] => None,
    }
}

/// The constants of integers in the sources, by name.
fn constants(sources: &[Source]) -> BTreeMap<String, u64> {
    let mut known = BTreeMap::new();
    // Twice, since one may be made of others.
    for _ in 0..2 {
        for source in sources {
            for (_, code) in source.code() {
                let Some((_, rest)) = code.split_once("const ") else { continue };
                let Some((name, rest)) = rest.split_once(": ") else { continue };
                let Some((_, expression)) = rest.split_once(" = ") else { continue };
                if let Some(value) = expression.strip_suffix(';').and_then(|e| value(e, &known)) {
                    known.insert(name.to_owned(), value);
                }
            }
        }
    }
    known
}

/// The rows of the table behind "## Constants".
fn documented_constants(page: &str) -> Vec<(String, u64)> {
    let (_, section) = page.split_once("## Constants").expect("the section");
    let section = section.split("\n## ").next().expect("the first piece");
    let rows = section.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        let name = cells.next()?.trim_end_matches('`').to_owned();
        Some((name, cells.next()?.trim().parse().ok()?))
    });
    rows.collect()
}

fn wrong_constants(documented: &[(String, u64)], known: &BTreeMap<String, u64>) -> Vec<String> {
    let wrong = documented.iter().filter(|(name, value)| known.get(name) != Some(value));
    wrong
        .map(|(name, value)| {
            format!("{name} is {:?} in the code, {value} in docs/format.md", known.get(name))
        })
        .collect()
}

#[test]
fn the_constants_of_the_format_page_are_those_of_the_code() {
    let known = constants(&sources());
    let documented = documented_constants(&read("docs/format.md"));
    assert!(documented.len() >= 19, "{documented:?}");
    assert_tidy(wrong_constants(&documented, &known));
    for (name, value) in &documented {
        assert_eq!(wrong_constants(&[(name.clone(), value + 1)], &known).len(), 1, "{name}");
    }
    assert_eq!(value("(64 << 20) - (128 << 10)", &known), Some(66_977_792));
    assert_eq!(value("1 +", &known), None);
}

/// The numbers of the invariants in a text.
fn numbers(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric());
    let named = words.filter(|word| {
        let (letter, digits) = word.split_at(word.len().min(1));
        "FLDRCS".contains(letter) && digits.len() == 1 && digits.parse::<u8>().is_ok_and(|n| n > 0)
    });
    let mut named: Vec<_> = named.filter(|word| !word.is_empty()).map(str::to_owned).collect();
    named.sort();
    named.dedup();
    named
}

/// Each invariant of the page has a line in the code that upholds it, and the other way round.
fn unheld(page: &str, sources: &[Source]) -> Vec<String> {
    let (_, section) = page.split_once("## Invariants").expect("the section");
    let section = section.split("\n## ").next().expect("the first piece");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| **"));
    let promised: Vec<String> = rows.filter_map(|row| row.split("**").next()).map(str::to_owned).collect();
    let mut upheld = Vec::new();
    for source in sources {
        for line in source.text.lines() {
            if let Some((_, what)) = line.split_once("Upholds ") {
                upheld.extend(numbers(what.split(':').next().unwrap_or_default()));
            }
        }
    }
    let later = |number: &String| number.starts_with('C');
    let mut complaints: Vec<_> = promised
        .iter()
        .filter(|number| !later(number) && !upheld.contains(number))
        .map(|number| format!("{number} is promised, and no line says that it upholds it"))
        .collect();
    let unknown = upheld.iter().filter(|number| !promised.contains(number));
    complaints
        .extend(unknown.map(|number| format!("{number} is upheld, and ARCHITECTURE.md does not know it")));
    complaints
}

#[test]
fn every_invariant_has_a_line_that_upholds_it() {
    let page = read("ARCHITECTURE.md");
    assert_tidy(unheld(&page, &sources()));
    let page = "## Invariants\n| **F1** | a |\n| **C1** | later |\n";
    assert!(unheld(page, &[Source::new("a.rs", "/// Upholds F1: so.")]).is_empty());
    assert_eq!(unheld(page, &[Source::new("a.rs", "")]).len(), 1);
    assert_eq!(unheld(page, &[Source::new("a.rs", "/// Upholds F1 and F9.")]).len(), 1);
}

/// The code map names the modules of `lib.rs`, all of them, in their order.
#[test]
fn the_code_map_is_the_module_list() {
    let page = read("ARCHITECTURE.md");
    let (_, section) = page.split_once("## Code map").expect("the section");
    let section = section.split("\n## ").next().expect("the first piece");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let mapped: Vec<String> = rows.map(|row| ident(row).to_owned()).collect();
    assert_eq!(mapped, declared(&read("src/lib.rs")));
}

/// What is wrong with the links of a page that is part of the documentation of the crate: each leads to the source
/// at its end, for whoever reads the file, and to the item in `links`, which rustdoc is given first.
fn wrong_links<'t>(page: &'t str, links: &'t str, source: impl Fn(&str) -> String) -> Vec<&'t str> {
    let definition = |line: &'t str| line.strip_prefix("[`")?.split_once("`]: ");
    let of_rustdoc: Vec<&str> = links.lines().filter_map(definition).map(|(label, _)| label).collect();
    let of_file: BTreeMap<&str, &str> = page.lines().filter_map(definition).collect();
    let text = page.lines().filter(|line| definition(line).is_none());
    let labels = |line: &'t str| {
        let ends = line.match_indices("`]").filter(|(at, _)| !line[at + 2..].starts_with(['[', '(']));
        ends.filter_map(|(at, _)| Some(&line[line[..at].rfind("[`")? + 2..at]))
    };
    let used: BTreeSet<&str> = text.flat_map(labels).collect();
    let is_right = |label: &&str| {
        let item = label.rsplit("::").next().unwrap_or(label);
        let has_item = |path: &&str| {
            let words = source(path);
            ["fn ", "struct ", "enum ", "pub "].iter().any(|kind| words.contains(&format!("{kind}{item}")))
                || words.contains(&format!("    {item},"))
        };
        of_rustdoc.contains(label) && of_file.get(*label).is_some_and(has_item)
    };
    let all: BTreeSet<&str> = used.iter().chain(of_file.keys()).chain(&of_rustdoc).copied().collect();
    all.into_iter().filter(|label| !used.contains(label) || !is_right(label)).collect()
}

#[test]
fn pages_link_to_items_for_rustdoc_and_to_sources_for_readers_of_the_file() {
    for page in ["leases", "testkit"] {
        let text = read(&format!("docs/{page}.md"));
        let links = read(&format!("docs/{page}.links"));
        let wrong = wrong_links(&text, &links, |path| read(&path.replace("../", "")));
        assert_eq!(wrong, [""; 0], "docs/{page}.md");
        assert!(!text.contains("crate::"), "docs/{page}.md: what rustdoc alone understands");
        let hidden = text.lines().enumerate().filter(|(_, line)| line.starts_with("# ")).nth(1);
        assert_eq!(hidden, None, "docs/{page}.md: a line that rustdoc alone hides");
    }
    let page = "see [`f`][`A::f`] and [`B`].\n\n[`A::f`]: a.rs\n[`B`]: a.rs";
    let links = "[`A::f`]: crate::A::f\n[`B`]: crate::B";
    assert_eq!(wrong_links(page, links, |_| "pub fn f(\npub struct B;".to_owned()), [""; 0]);
    assert_eq!(wrong_links(page, links, |_| "pub fn f(".to_owned()), ["B"]);
    assert_eq!(wrong_links(page, "[`B`]: crate::B", |_| "fn f( struct B".to_owned()), ["A::f"]);
    assert_eq!(wrong_links("none", links, |_| "fn f( struct B".to_owned()), ["A::f", "B"]);
}

/// Every path in back quotes exists.
fn dead_paths(document: &str, exists: impl Fn(&str) -> bool) -> Vec<&str> {
    let quoted = document.split('`').skip(1).step_by(2);
    let paths = quoted.filter(|word| {
        let known =
            ["src/", "tests/", "docs/", "examples/", "benches/", "fuzz/", "model/", "gallery/", "kernel/"]
                .iter()
                .any(|dir| word.starts_with(dir));
        known && !word.contains(['<', '*', ' ', '{'])
    });
    paths.filter(|path| !exists(path)).collect()
}

#[test]
fn documents_name_files_that_exist() {
    let documents = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];
    let pages = ["docs/format.md", "docs/reliability.md", "docs/testkit.md"];
    for document in documents.into_iter().chain(pages) {
        let text = read(document);
        assert_eq!(dead_paths(&text, |path| root().join(path).exists()), [""; 0], "{document}");
    }
    assert_eq!(dead_paths("see `src/gone.rs`", |_| false), ["src/gone.rs"]);
}
