//! Runs the tests with each small change in turn: see `mutants.rs`.

use crate::bugs::{binary_and_filter, root};
use crate::mutants::{Mutant, at, mutants, seeded};
use crate::run::{in_turn, run, usual_times};
use crate::tree::{Tree, copies, errors};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Only files whose names hold one of these.
    files: Vec<String>,
    /// Only changes whose names hold this, or one of these.
    #[arg(long)]
    only: Vec<String>,
    /// How many changes are tried at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Says what there is, and runs nothing.
    #[arg(long)]
    list: bool,
}

/// Files, and the tests that may find what is changed in them, the cheapest first.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Area {
    files: Vec<String>,
    tests: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Areas {
    area: Vec<Area>,
}

/// Files with numbered changes.
type Changes = BTreeMap<PathBuf, Vec<(usize, Mutant)>>;

/// Fails where something survives without a reason.
pub fn mutate(args: &Args) -> Result<bool, String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| fs::read_to_string(here.join(name)).map_err(|e| format!("{name}: {e}"));
    let areas: Areas = toml::from_str(&read("mutants.toml")?).map_err(|e| format!("mutants.toml: {e}"))?;
    let reasons = read("SURVIVORS.md")?;
    let files = copies(&root()).map_err(|e| e.to_string())?;
    let (mut changes, mut tests) = (Changes::new(), BTreeMap::new());
    let mut number = 0;
    for area in &areas.area {
        for file in area.files.iter().filter(|file| is_wanted(&args.files, file)) {
            let source = files.get(Path::new(file)).ok_or_else(|| format!("there is no {file}"))?;
            let source = String::from_utf8_lossy(source);
            for mutant in
                mutants(file, &source)?.into_iter().filter(|mutant| is_wanted(&args.only, &mutant.name))
            {
                number += 1;
                tests.insert(number, &area.tests);
                changes.entry(file.into()).or_default().push((number, mutant));
            }
        }
    }
    if args.list {
        changes.values().flatten().for_each(|(_, mutant)| println!("{}", mutant.name));
        return Ok(true);
    }
    let tree = buildable(files, &mut changes, &tests)?;
    let wanted = tests.values().flat_map(|tests| tests.iter().map(|test| &**test));
    let usual = usual_times(&tree, args.jobs, wanted)?;
    let begun = Instant::now();
    let all: Vec<(usize, Mutant)> = changes.into_values().flatten().collect();
    let tried = in_turn(args.jobs, &all, |(number, mutant)| {
        let found = find(&tree, *number, tests[number], &usual)?;
        let by = match &found {
            None => "NOBODY",
            Some(Found { hung: true, by }) => &format!("{by}, hung"),
            Some(Found { by, .. }) => by,
        };
        eprintln!("{:7.0} s  {}: {by}", begun.elapsed().as_secs_f64(), mutant.name);
        Ok((mutant, found))
    })?;
    let survivors: Vec<&Mutant> =
        tried.iter().filter(|(_, found)| found.is_none()).map(|(mutant, _)| *mutant).collect();
    let hung = tried.iter().filter(|(_, found)| found.as_ref().is_some_and(|found| found.hung)).count();
    let unexplained: Vec<&str> = survivors
        .iter()
        .map(|mutant| &*mutant.name)
        .filter(|name| !reasons.contains(&format!("`{name}`")))
        .collect();
    println!(
        "{} changes in {:.0} s: {} found, {hung} of them because a test hung, {} survive with a reason, {} without",
        all.len(),
        begun.elapsed().as_secs_f64(),
        all.len() - survivors.len(),
        survivors.len() - unexplained.len(),
        unexplained.len()
    );
    unexplained.iter().for_each(|name| println!("no test finds: {name}"));
    Ok(unexplained.is_empty())
}

/// The test that found a change.
struct Found<'t> {
    by: &'t str,
    hung: bool,
}

/// Runs the tests of a change, the quickest first, until one fails.
fn find<'t>(
    tree: &Tree,
    number: usize,
    tests: &'t [String],
    usual: &BTreeMap<&str, Duration>,
) -> Result<Option<Found<'t>>, String> {
    let usual = |test: &str| usual.get(test).copied().unwrap_or_default();
    let mut tests: Vec<&str> = tests.iter().map(|test| &**test).collect();
    tests.sort_by_key(|test| usual(test));
    for by in tests {
        let limit = Duration::from_secs(20) + usual(by) * 10;
        let ran = run(tree, by, number, limit).map_err(|e| e.to_string())?;
        if ran.failure().is_some() {
            return Ok(Some(Found { by, hung: ran.status.is_none() }));
        }
    }
    Ok(None)
}

fn is_wanted(wanted: &[String], name: &str) -> bool {
    wanted.is_empty() || wanted.iter().any(|part| name.contains(&**part))
}

/// The tree with all changes in it that the compiler takes.
fn buildable(
    files: BTreeMap<PathBuf, Vec<u8>>,
    changes: &mut Changes,
    tests: &BTreeMap<usize, &Vec<String>>,
) -> Result<Tree, String> {
    const TRIES: usize = 20;
    for _ in 0..TRIES {
        let mut changed = files.clone();
        for (file, mutants) in changes.iter() {
            let source = String::from_utf8_lossy(&files[file]).into_owned();
            let numbered: Vec<(usize, &Mutant)> =
                mutants.iter().map(|(number, mutant)| (*number, mutant)).collect();
            changed.insert(file.clone(), seeded(&source, &numbered).into_bytes());
        }
        let tree = Tree::of(changed, "mutants")?;
        let errors = errors(&tree)?;
        if errors.is_empty() {
            let binaries: BTreeSet<&str> =
                tests.values().flat_map(|tests| tests.iter().map(|test| binary_and_filter(test).0)).collect();
            return tree.build(binaries);
        }
        let mut refused = BTreeSet::new();
        for (file, byte) in &errors {
            let text = fs::read_to_string(tree.dir.join(file)).unwrap_or_default();
            refused.extend(at(&text, *byte));
        }
        if refused.is_empty() {
            return Err(format!("the compiler refuses something else: {errors:?}"));
        }
        for mutants in changes.values_mut() {
            mutants.retain(|(number, _)| !refused.contains(number));
        }
    }
    Err("too many changes do not build".to_owned())
}
