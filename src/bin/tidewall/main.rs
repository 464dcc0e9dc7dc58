//! The command line: what is in a store, is it healthy, whose is it?
//!
//! On the public API of the crate alone. Read next: `args.rs`, every command with its help; the other files
//! carry them out, a few commands each.

mod args;
mod backup;
mod bench;
mod bytes;
mod dump;
mod failure;
mod load;
mod look;
mod read;
mod show;
mod store;
mod write;

use args::{Args, Command};
use clap::{CommandFactory, Parser};
use failure::Failure;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Usage errors end here, with exit code 2.
    let args = Args::parse();
    match run(args.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(message) = &failure.message {
                // Nobody may be listening there either.
                let _ = writeln!(std::io::stderr(), "tidewall: {message}");
            }
            ExitCode::from(failure.code)
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Info(args) => look::info(&args),
        Command::Log(args) => look::log(&args),
        Command::Stats(args) => look::stats(&args),
        Command::Keys(args) => read::keys(&args),
        Command::Get(args) => read::get(&args),
        Command::Holders(args) => read::holders(&args),
        Command::Put(args) => write::put(&args),
        Command::Delete(args) => write::delete(&args),
        Command::Raise(args) => write::raise(&args),
        Command::Compact(args) => write::compact(&args),
        Command::Verify(args) => backup::verify(&args),
        Command::Salvage(args) => backup::salvage(&args),
        Command::Checkpoint(args) => backup::checkpoint(&args),
        Command::Restore(args) => backup::restore(&args),
        Command::Dump(args) => dump::dump(&args),
        Command::Load(args) => load::load(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "tidewall", &mut script);
            show::quiet(std::io::stdout().write_all(&script))
        }
    }
}
