//! tidewall on the real kernel: a worker that is killed at every system call, system calls that fail, small file
//! systems that are filled up, disks whose writes and flushes fail, and disks that are cut off their power.
//!
//! Everything that a machine cannot do is named at the end, loudly; `--strict` makes that a failure.

mod calls;
mod disk;
mod full;
mod power;
mod script;
mod system;

use calls::Traced;
use clap::{Parser, Subcommand};
use disk::Failing;
use indicatif::{ProgressBar, ProgressStyle};
use power::Bench;
use script::{Ended, steps, work};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use system::Fs;

#[derive(Parser)]
#[command(version, about = "tidewall on real file systems; needs Linux, root, loop devices and FUSE")]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// What to run: kill, errno, full, sync, power; all of them unless named
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// How many power cuts on each file system
    #[arg(long, default_value_t = 70)]
    images: u64,
    /// Every n-th of the failing system calls
    #[arg(long, default_value_t = 7)]
    every: usize,
    /// How many steps the script has
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Which script
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail where something cannot be run here
    #[arg(long)]
    strict: bool,
}

#[derive(Subcommand)]
enum Command {
    /// The process that is killed: runs the script and counts its answers
    #[command(hide = true)]
    Worker {
        dir: PathBuf,
        acks: PathBuf,
        seed: u64,
        steps: usize,
        #[arg(long)]
        threads: bool,
    },
    /// Holds what a worker left to its answers
    #[command(hide = true)]
    Check {
        dir: PathBuf,
        seed: u64,
        steps: usize,
        acked: usize,
        #[arg(long)]
        exact: bool,
    },
    /// Prints all that a store shows
    #[command(hide = true)]
    Look { dir: PathBuf },
    /// Fills a directory up
    #[command(hide = true)]
    Fill { dir: PathBuf },
    /// Prints how many keys it then has
    #[command(hide = true)]
    Count { dir: PathBuf },
}

/// What was run, and what was not.
struct Report {
    only: Vec<String>,
    table: comfy_table::Table,
    skipped: Vec<String>,
    failures: Vec<String>,
}

impl Report {
    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == part)
    }

    fn skip(&mut self, what: &str, why: &str) {
        println!("!! NOT RUN: {what}: {why}");
        self.skipped.push(format!("{what}: {why}"));
    }

    /// Runs one case after the other; `each` says whether the case is one to be counted in the second number.
    fn run<C>(&mut self, what: &str, of: &str, cases: Vec<C>, each: impl Fn(&C) -> Result<bool, String>) {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a template");
        let bar = ProgressBar::new(cases.len() as u64).with_style(style).with_message(what.to_owned());
        let (mut counted, mut failed) = (0, 0);
        let start = std::time::Instant::now();
        for case in &cases {
            match each(case) {
                Ok(counts) => counted += counts as usize,
                Err(error) => {
                    bar.suspend(|| println!("!! FAILED: {what}: {error}"));
                    failed += 1;
                    self.failures.push(format!("{what}: {error}"));
                }
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        let seconds = format!("{:.1} s", start.elapsed().as_secs_f64());
        println!("{what}: {} runs, {counted} {of}, {failed} failed, {seconds}", cases.len());
        self.table.add_row([
            what,
            &cases.len().to_string(),
            &format!("{counted} {of}"),
            &failed.to_string(),
            &seconds,
        ]);
    }

    fn failed(&mut self, what: &str, error: String) {
        println!("!! FAILED: {what}: {error}");
        self.failures.push(format!("{what}: {error}"));
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(command) = &arguments.command {
        return child(command);
    }
    let mut table = comfy_table::Table::new();
    table.set_header(["what", "runs", "of these", "failed", "time"]);
    let only = arguments.only.clone();
    let mut report = Report { only, table, skipped: Vec::new(), failures: Vec::new() };
    let room = match tempfile::tempdir() {
        Ok(room) => room,
        Err(error) => {
            eprintln!("no room for files: {error}");
            return ExitCode::FAILURE;
        }
    };
    if report.wants("kill") || report.wants("errno") {
        system_calls(&mut report, room.path(), &arguments);
    }
    if report.wants("full") {
        full_disks(&mut report, room.path());
    }
    if report.wants("sync") || report.wants("power") {
        for fs in Fs::ALL {
            recorded_disk(&mut report, room.path(), fs, &arguments);
        }
    }
    println!("\n{}", report.table);
    report.skipped.iter().for_each(|what| println!("!! NOT RUN: {what}"));
    report.failures.iter().for_each(|what| println!("!! FAILED: {what}"));
    let skipped = arguments.strict && !report.skipped.is_empty();
    if skipped || !report.failures.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn child(command: &Command) -> ExitCode {
    let said = match command {
        Command::Worker { dir, acks, seed, steps, threads } => {
            return worker(dir, acks, *seed, *steps, *threads);
        }
        Command::Check { dir, seed, steps: count, acked, exact } => {
            script::check(dir, &steps(*seed, *count), *acked, *exact).map(|found| found.to_string())
        }
        Command::Look { dir } => script::look(dir),
        Command::Fill { dir } => full::fill(dir),
        Command::Count { dir } => full::count(dir),
    };
    match said {
        Ok(line) => println!("{line}"),
        Err(error) => {
            println!("{error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// One line says how it ended; an exit code of 3 says that the store was wrong.
fn worker(dir: &Path, acks: &Path, seed: u64, count: usize, threads: bool) -> ExitCode {
    // A worker that hangs is as wrong as one that loses something.
    // SAFETY: the call takes a number, and only makes a signal come later.
    unsafe { libc::alarm(120) };
    match work(dir, acks, &steps(seed, count), threads) {
        Ok(Ended::Refused { what, not_applied: true }) => println!("not applied: {what}"),
        Ok(Ended::Refused { what, not_applied: false }) => println!("unknown: {what}"),
        Ok(_) => println!("whole: all steps were answered"),
        Err(error) => {
            println!("{error}");
            return ExitCode::from(3);
        }
    }
    ExitCode::SUCCESS
}

fn system_calls(report: &mut Report, room: &Path, arguments: &Arguments) {
    if let Some(why) = calls::missing() {
        report.skip("killed at the n-th system call, and each system call failing", &why);
        return;
    }
    let traced = match Traced::new(room, arguments.seed, steps(arguments.seed, arguments.steps)) {
        Ok(traced) => traced,
        Err(error) => {
            // Where tracing is forbidden nothing starts under strace.
            report.skip("killed at the n-th system call, and each system call failing", &error);
            return;
        }
    };
    if report.wants("kill") {
        let kills = traced.kills();
        report.run("killed at the n-th system call", "killed", kills, |(call, nth)| {
            traced.kill(call, *nth).map(|()| true)
        });
    }
    if report.wants("errno") {
        let errors = traced.errors(arguments.every);
        report.run("the n-th system call fails", "noticed", errors, |(call, error, when)| {
            traced.fail(call, error, when)
        });
    }
}

fn full_disks(report: &mut Report, room: &Path) {
    if !system::is_root() {
        report.skip("full file systems", "mounting takes root");
        return;
    }
    for fs in [None, Some(Fs::Ext4), Some(Fs::Xfs), Some(Fs::Btrfs)] {
        let what = format!("{} filled up", fs.map_or("tmpfs", Fs::name));
        match fs.and_then(Fs::missing) {
            Some(why) => report.skip(&what, &why),
            None => report.run(&what, "whole", vec![()], |()| {
                full::on(fs, room).map(|said| println!("{what}: {said}")).map(|()| true)
            }),
        }
    }
}

fn recorded_disk(report: &mut Report, room: &Path, fs: Fs, arguments: &Arguments) {
    let (cuts, failing) =
        (format!("{} cut off its power", fs.name()), format!("{} with failing syncs", fs.name()));
    if let Some(why) = power::missing().or_else(|| fs.missing()) {
        report.skip(&cuts, &why);
        report.skip(&failing, &why);
        return;
    }
    let count = arguments.steps * 2;
    let bench = match Bench::new(room, fs, arguments.seed, steps(arguments.seed, count)) {
        Ok(bench) => bench,
        Err(error) => return report.failed(&cuts, error),
    };
    if report.wants("power") {
        match bench.record() {
            Ok(recording) => {
                println!(
                    "{}: {} writes and flushes recorded, {} of them flushes",
                    fs.name(),
                    recording.events(),
                    recording.flushes()
                );
                let images = (0..arguments.images).collect();
                report.run(&cuts, "with blocks in doubt", images, |&seed| {
                    bench.cut(&recording, seed, false).map(|pending| pending > 0)
                });
                // The other way round: what a disk that lies has lost must be noticed, else the runs prove nothing.
                let lies = format!("{} on a disk that lies", fs.name());
                let (mut seed, images) = (0, 14);
                while seed < images && bench.cut(&recording, seed, true).is_ok() {
                    seed += 1;
                }
                if seed == images {
                    report.failed(&lies, format!("{images} power cuts, and nothing was missed"));
                } else {
                    println!("{lies}: found out by power cut {}", seed + 1);
                }
            }
            Err(error) => report.failed(&cuts, error),
        }
    }
    if report.wants("sync") {
        let mut plans = Vec::new();
        for acked in (1..count).step_by(count / 6) {
            plans.push(Failing { acked, writes: 1, flushes: 0 });
            plans.push(Failing { acked, writes: 0, flushes: 1 });
            plans.push(Failing { acked, writes: usize::MAX, flushes: usize::MAX });
        }
        report.run(&failing, "refused a step", plans, |&failing| bench.fail(failing));
    }
}
