//! Puts known bugs into tidewall, one at a time, and fails unless its tests find each.

mod bugs;
mod mutants;
mod mutate;
mod run;
mod tree;

use bugs::{Bug, binary_and_filter, complaints, load, root};
use clap::{Parser, Subcommand};
use comfy_table::{Table, presets};
use run::{in_turn, run, usual_times};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tree::Tree;

/// Puts known bugs into tidewall, one at a time: its tests must find each.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// Only the bugs whose names hold one of these.
    names: Vec<String>,
    /// Says what there is, and runs nothing.
    #[arg(long)]
    list: bool,
    /// How many bugs are tried at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Only every so many-th bug, which is what the usual checks do.
    #[arg(long, default_value_t = 1)]
    every: usize,
    /// The longest that a test may take before it counts as hung, in seconds; and ten times what it takes
    /// without a bug.
    #[arg(long, default_value_t = 20)]
    limit: u64,
    /// Does not first see the tests pass without a bug.
    #[arg(long)]
    trust: bool,
    /// Prints what the test that found a bug had to say.
    #[arg(long)]
    show: bool,
    /// Instead of the tests that a bug names, all of these binaries, whatever they find: for a bug that is new.
    #[arg(long, value_delimiter = ',')]
    search: Vec<String>,
}

#[derive(Subcommand)]
enum Other {
    /// Makes small changes by rule instead, one at a time: each must be found, or have its reason in SURVIVORS.md.
    Mutants(mutate::Args),
}

/// What came of one bug.
struct Tried<'b> {
    bug: &'b Bug,
    found: Option<String>,
    time: Duration,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let passed = match &args.other {
        Some(Other::Mutants(args)) => mutate::mutate(args),
        None => gallery(&args),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}

fn gallery(args: &Args) -> Result<bool, String> {
    let mut bugs = load()?;
    let wrong = complaints(&bugs, &root());
    if !wrong.is_empty() {
        return Err(wrong.join("\n"));
    }
    if !args.search.is_empty() {
        bugs.iter_mut()
            .for_each(|bug| bug.tests = args.search.iter().map(|name| format!("{name} ")).collect());
    }
    let is_wanted =
        |bug: &Bug| args.names.is_empty() || args.names.iter().any(|name| bug.name.contains(&**name));
    let wanted: Vec<usize> =
        (0..bugs.len()).filter(|&at| is_wanted(&bugs[at])).step_by(args.every.max(1)).collect();
    if args.list {
        println!("{}", list(wanted.iter().map(|&at| &bugs[at])));
        return Ok(true);
    }
    let tests = || wanted.iter().flat_map(|&at| &bugs[at].tests);
    let tree = Tree::make(&bugs, tests().map(|test| binary_and_filter(test).0).collect())?;
    let usual = match args.trust {
        true => BTreeMap::new(),
        false => usual_times(&tree, args.jobs, tests().map(|test| &**test))?,
    };
    let begun = Instant::now();
    let tried = in_turn(args.jobs, &wanted, |&at| try_bug(&tree, at, &bugs[at], &usual, args))?;
    println!("{}", table(&tried));
    let missed: Vec<&str> =
        tried.iter().filter(|tried| tried.found.is_none()).map(|tried| &*tried.bug.name).collect();
    let (all, seconds) = (tried.len(), begun.elapsed().as_secs_f64());
    let mut times: Vec<Duration> = tried.iter().map(|tried| tried.time).collect();
    times.sort();
    let median = times.get(all / 2).map_or(0.0, Duration::as_secs_f64);
    println!(
        "{} of {all} found in {seconds:.0} s, half of them within {median:.2} s each",
        all - missed.len()
    );
    if !missed.is_empty() {
        println!("not found: {}", missed.join(", "));
    }
    Ok(missed.is_empty())
}

/// Runs the tests of a bug, the quickest first, until one fails.
fn try_bug<'b>(
    tree: &Tree,
    at: usize,
    bug: &'b Bug,
    usual: &BTreeMap<&str, Duration>,
    args: &Args,
) -> Result<Tried<'b>, String> {
    let time_of = |test: &String| usual.get(&**test).copied().unwrap_or_default();
    let mut tests: Vec<&String> = bug.tests.iter().collect();
    tests.sort_by_key(|test| time_of(test));
    let mut tried = Tried { bug, found: None, time: Duration::ZERO };
    for test in tests {
        let limit = Duration::from_secs(args.limit) + time_of(test) * 10;
        let ran = run(tree, test, at + 1, limit).map_err(|e| e.to_string())?;
        tried.time += ran.time;
        let Some(failure) = ran.failure() else { continue };
        let (binary, _) = binary_and_filter(test);
        if args.show {
            println!("{}: {failure}\n{}", bug.name, ran.output);
        }
        if args.search.is_empty() {
            tried.found = Some(format!("{binary} {failure}"));
            break;
        }
        println!("{:40} {binary} {:6.2} s", bug.name, ran.time.as_secs_f64());
        let failed = ran.output.lines().filter(|line| line.ends_with(" ... FAILED"));
        failed.for_each(|line| println!("    {line}"));
        tried.found = Some(binary.to_owned());
    }
    let seconds = tried.time.as_secs_f64();
    eprintln!("{seconds:7.2} s  {}: {}", bug.name, tried.found.as_deref().unwrap_or("NOBODY"));
    Ok(tried)
}

fn table(tried: &[Tried<'_>]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["bug", "from", "found by", "seconds"]);
    for Tried { bug, found, time } in tried {
        let found = found.as_deref().unwrap_or("NOBODY");
        table.add_row([&*bug.name, &*bug.from, found, &*format!("{:.2}", time.as_secs_f64())]);
    }
    table
}

fn list<'b>(bugs: impl Iterator<Item = &'b Bug>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["bug", "from", "what goes wrong"]);
    for bug in bugs {
        table.add_row([&bug.name, &bug.from, &bug.wrong]);
    }
    table
}
