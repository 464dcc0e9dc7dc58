//! Runs the searches, prints what was visited, and fails where something is not as it should be.

use clap::Parser;
use std::process::ExitCode;
use tidewall_model::mistakes::SEEDED;
use tidewall_model::rules::Model;
use tidewall_model::search::{Found, search};
use tidewall_model::searches::SEARCHES;

/// Searches tidewall's protocol, every state within bounds, and finds each seeded mistake.
#[derive(Parser)]
struct Args {
    /// Only the searches and mistakes whose names begin so.
    names: Vec<String>,
    /// The larger bounds: some minutes, and some gigabytes.
    #[arg(long)]
    large: bool,
    /// Prints the counterexample of each mistake.
    #[arg(long)]
    trace: bool,
    /// Gives a search up after so many states.
    #[arg(long, default_value_t = 200_000_000)]
    limit: usize,
}

impl Args {
    fn wants(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        self.names.is_empty() || self.names.iter().any(|wanted| name.starts_with(&wanted.to_lowercase()))
    }
}

fn report(name: &str, model: &Model, found: &Found, is_right: bool, with_story: bool) {
    let end = match &found.counterexample {
        Some(wrong) => format!("{} steps: {}", wrong.steps.len(), wrong.violation),
        None if found.complete => format!("holds, to depth {}", found.depth),
        None => "not searched to the end".to_owned(),
    };
    let (states, secs) = (found.states, found.time.as_secs_f64());
    println!("{}  {name:34} {states:>10} states {secs:>7.2} s  {end}", if is_right { "ok " } else { "BAD" });
    if let Some(wrong) = found.counterexample.as_ref().filter(|_| with_story || !is_right) {
        println!("{}", wrong.story(model));
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (mut all, mut states, mut time) = (true, 0, 0.0);
    for part in SEARCHES.iter().filter(|part| args.wants(part.name)) {
        let model = part.model(if args.large { part.large } else { part.small });
        let found = search(&model, args.limit);
        report(part.name, &model, &found, found.complete, true);
        all &= found.complete;
        states += found.states;
        time += found.time.as_secs_f64();
    }
    for seeded in SEEDED.iter().filter(|seeded| args.wants(&format!("{:?}", seeded.mistake))) {
        let found = search(&seeded.model(), args.limit);
        let is_found = found.counterexample.as_ref().is_some_and(|wrong| wrong.violation == seeded.violation);
        report(&format!("{:?}", seeded.mistake), &seeded.model(), &found, is_found, args.trace);
        all &= is_found;
        states += found.states;
        time += found.time.as_secs_f64();
    }
    println!("{states} states in {time:.1} s");
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
