//! The same durable fenced work on tidewall and on the engines that could be used instead, beside what the
//! machine allows. `README.md` says how it measures.

mod chart;
mod engines;
mod lease;
mod limits;
mod machine;
mod measure;
mod results;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod workloads;

use clap::{Args, Parser, Subcommand};
use engines::{ALL, Engine, find};
use machine::{Counters, Machine, file_system};
use results::{Results, Row};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};
use store::Res;
use workloads::{Cell, LOADED, Workload};

/// Durable fenced writes on tidewall and on other engines, side by side.
///
/// Without a command: runs everything and prints the tables.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Measures, and prints the tables.
    Run(Run),
    /// Measures what the disk alone can do, and prints it.
    Limits(Limits),
    /// Prints the tables of what has been measured.
    Table(Shown),
    /// Draws the charts of what has been measured, as SVG.
    Chart(Chart),
    /// Lists the engines.
    List,
    /// Runs one cell in this process.
    #[command(hide = true)]
    Cell(OneCell),
}

#[derive(Args)]
struct Run {
    /// What to measure [default: everything]
    #[arg(long, value_delimiter = ',', value_enum)]
    workload: Vec<Workload>,
    /// Which engines; see `list` [default: those that make sense for the workload]
    #[arg(long, value_delimiter = ',', value_parser = engine)]
    engines: Vec<&'static Engine>,
    /// How many threads [default: several numbers, by the workload]
    #[arg(long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// How often everything is measured; the tables show medians
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How long a cell is measured
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// How many keys are loaded, a multiple of 1000
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// Up to how many keys `grow` grows
    #[arg(long, default_value_t = 10_000_000)]
    grow_keys: u64,
    /// How often a cell is repeated in which other processes were not quiet
    #[arg(long, default_value_t = 2)]
    repeats: usize,
    /// How many seconds a cell is put off, at most, until other processes are quiet
    #[arg(long, default_value_t = 5.0)]
    wait: f64,
    /// Keeps the data; what is loaded can then be read by a later run
    #[arg(long)]
    keep: bool,
    /// Prints no tables at the end
    #[arg(long)]
    no_tables: bool,
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    shown: Shown,
}

#[derive(Args)]
struct Limits {
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How long each is measured
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    shown: Shown,
}

#[derive(Args, Clone)]
struct Places {
    /// A folder on the disk that is to be measured; the data lie in `peers-data` there [default: beside the build]
    #[arg(long)]
    dir: Option<PathBuf>,
}

#[derive(Args, Clone)]
struct Shown {
    /// The folder of the results [default: beside the build]
    #[arg(long)]
    results: Option<PathBuf>,
    /// So many cores may other processes use meanwhile; noisier cells count only where there is no quiet one
    #[arg(long, default_value_t = 0.2)]
    noise: f64,
}

#[derive(Args)]
struct Chart {
    /// Where to
    #[arg(long, default_value = ".")]
    to: PathBuf,
    #[command(flatten)]
    shown: Shown,
}

#[derive(Args)]
struct OneCell {
    #[arg(long, value_enum)]
    workload: Workload,
    #[arg(long, value_parser = engine)]
    engine: &'static Engine,
    #[arg(long)]
    threads: usize,
    #[arg(long)]
    seconds: f64,
    #[arg(long)]
    round: usize,
    #[arg(long)]
    dir: PathBuf,
    #[arg(long)]
    keys: u64,
    /// Loads, and waits to be killed
    #[arg(long)]
    until_killed: bool,
}

fn engine(name: &str) -> Result<&'static Engine, String> {
    find(name).ok_or_else(|| "no such engine: `list` shows them".to_owned())
}

impl Places {
    /// A temporary folder may be memory, where a sync costs nothing and a figure means nothing.
    fn dir(&self) -> Res<PathBuf> {
        // A folder of its own, since it is removed with all that is in it.
        const DATA: &str = "peers-data";
        let dir = self.dir.as_ref().map_or_else(|| beside_the_build(DATA), |dir| dir.join(DATA));
        std::fs::create_dir_all(&dir)?;
        match file_system(&dir) {
            Some((kind, _)) if kind == "tmpfs" || kind == "ramfs" => {
                let _ = std::fs::remove_dir(&dir);
                Err(format!("{} is memory ({kind}): choose a disk with --dir", dir.display()).into())
            }
            _ => Ok(dir),
        }
    }
}

impl Shown {
    fn results(&self) -> Results {
        Results::new(&self.results.clone().unwrap_or_else(|| beside_the_build("peers-results")))
    }
}

/// Beside the folder of the executable.
fn beside_the_build(name: &str) -> PathBuf {
    let exe = std::env::current_exe().unwrap_or_default();
    exe.parent().and_then(Path::parent).unwrap_or(Path::new(".")).join(name)
}

fn main() {
    let command = Cli::parse()
        .command
        .unwrap_or_else(|| Cli::parse_from(["peers", "run"]).command.expect("it has one"));
    let done = match command {
        Command::Run(args) => run(&args),
        Command::Limits(args) => measure_limits(&args),
        Command::Table(shown) => table::print(&shown.results(), shown.noise),
        Command::Chart(args) => chart::draw(&args.shown.results(), args.shown.noise, &args.to)
            .map(|drawn| drawn.iter().for_each(|path| println!("{}", path.display()))),
        Command::List => {
            for engine in ALL {
                println!("{:20} {:?} of {}", engine.name, engine.sort, engine.kind);
            }
            Ok(())
        }
        Command::Cell(args) => run_here(args),
    };
    if let Err(e) = done {
        eprintln!("peers: {e}");
        std::process::exit(1);
    }
}

fn measure_limits(args: &Limits) -> Res<()> {
    let (dir, results) = (args.places.dir()?, args.shown.results());
    results.set_machine(&Machine::of(&dir))?;
    for round in 0..args.rounds {
        limits::run(&dir, Duration::from_secs_f64(args.seconds), round, &mut |row| results.append(&row))?;
    }
    table::print(&results, args.shown.noise)
}

fn run_here(args: OneCell) -> Res<()> {
    let cell = Cell {
        workload: args.workload,
        engine: args.engine,
        threads: args.threads,
        time: Duration::from_secs_f64(args.seconds),
        round: args.round,
        dir: args.dir,
        keys: args.keys,
    };
    if args.until_killed {
        return cell.load_until_killed();
    }
    for row in cell.run()? {
        println!("{}", serde_json::to_string(&row)?);
    }
    Ok(())
}

/// Every cell of every round. Within a workload the engines take turns, so that those which are compared have
/// seen the same minutes.
fn run(args: &Run) -> Res<()> {
    if args.keys == 0 || ![args.keys, args.grow_keys].iter().all(|keys| keys.is_multiple_of(1000)) {
        return Err("--keys and --grow-keys are multiples of 1000".into());
    }
    let (dir, results) = (args.places.dir()?, args.shown.results());
    results.set_machine(&Machine::of(&dir))?;
    let workloads = if args.workload.is_empty() { &Workload::ALL[..] } else { &args.workload };
    for round in 0..args.rounds {
        for &workload in workloads {
            let threads = match &args.threads {
                asked if !asked.is_empty() && workload.is_threaded() => &asked[..],
                _ => workload.threads(),
            };
            for &threads in threads {
                for engine in ALL {
                    let wanted = if args.engines.is_empty() {
                        workload.wants(engine)
                    } else {
                        workload.fits(engine) && args.engines.iter().any(|asked| asked.name == engine.name)
                    };
                    if !wanted {
                        continue;
                    }
                    let cell = Cell {
                        workload,
                        engine,
                        threads,
                        time: Duration::from_secs_f64(args.seconds),
                        round,
                        dir: dir.clone(),
                        keys: if workload == Workload::Grow { args.grow_keys } else { args.keys },
                    };
                    if let Err(e) = measure(&cell, args, &results) {
                        eprintln!("{} on {}, {threads} threads: {e}", workload.name(), engine.name);
                    }
                }
            }
        }
    }
    if !args.keep {
        std::fs::remove_dir_all(&dir)?;
    }
    if args.no_tables { Ok(()) } else { table::print(&results, args.shown.noise) }
}

/// Runs one cell, again while others use the machine, and writes down what comes of it.
fn measure(cell: &Cell, args: &Run, results: &Results) -> Res<()> {
    if cell.workload.needs_image() && cell.engine.has_files() && !cell.image().exists() {
        eprintln!("loading {} for it", cell.engine.name);
        finish(start(&Cell { workload: Workload::Load, ..cell.clone() }, false)?)?;
    }
    for repeat in 0..=args.repeats {
        if cell.workload == Workload::Recover {
            load_and_kill(cell)?;
        }
        wait_for_quiet(&cell.dir, Duration::from_secs_f64(args.wait), args.shown.noise);
        let rows = finish(start(cell, false)?)?;
        let others =
            rows.iter().filter_map(|row| row.figures.get("others_cores")).fold(0.0, |a, &b| b.max(a));
        for row in &rows {
            results.append(row)?;
            let ops = row.figures.get("ops_per_s").map_or_else(String::new, |&ops| table::number(ops));
            eprintln!("{} {}: {} threads, {} {ops}", row.round, row.workload, row.threads, row.engine);
        }
        if others <= args.shown.noise || repeat == args.repeats {
            break;
        }
        eprintln!("others used {others:.2} cores meanwhile: once more");
    }
    if cell.workload == Workload::Recover {
        std::fs::remove_dir_all(cell.killed())?;
    }
    Ok(())
}

/// Returns when other processes have used little for a moment, or when `most` is over.
fn wait_for_quiet(dir: &Path, most: Duration, noise: f64) {
    const MOMENT: Duration = Duration::from_millis(300);
    let start = Instant::now();
    while start.elapsed() < most {
        let before = Counters::now(dir);
        std::thread::sleep(MOMENT);
        let others_us = Counters::now(dir).since(&before).others_us;
        if others_us as f64 <= noise * MOMENT.as_micros() as f64 {
            return;
        }
    }
}

/// A cell in a process of its own.
fn start(cell: &Cell, until_killed: bool) -> Res<Child> {
    let mut process = Process::new(std::env::current_exe()?);
    process.args(["cell", "--workload", cell.workload.name(), "--engine", cell.engine.name]);
    process.args(["--threads", &cell.threads.to_string(), "--round", &cell.round.to_string()]);
    process.args(["--seconds", &cell.time.as_secs_f64().to_string(), "--keys", &cell.keys.to_string()]);
    process.arg("--dir").arg(&cell.dir);
    if until_killed {
        process.arg("--until-killed");
    }
    Ok(process.stdout(Stdio::piped()).spawn()?)
}

/// The rows of a cell, when it is done.
fn finish(mut child: Child) -> Res<Vec<Row>> {
    const MOST: Duration = Duration::from_secs(600);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > MOST {
            child.kill()?;
            child.wait()?;
            return Err(format!("not done after {MOST:?}").into());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if !status.success() {
        return Err(format!("the process ended with {status}").into());
    }
    let out = BufReader::new(child.stdout.take().ok_or("its output was taken")?);
    let mut rows = Vec::new();
    for line in out.lines() {
        // An engine may print something of its own.
        if let Ok(row) = serde_json::from_str(&line?) {
            rows.push(row);
        }
    }
    Ok(rows)
}

fn load_and_kill(cell: &Cell) -> Res<()> {
    let _ = std::fs::remove_dir_all(cell.killed());
    let mut child = start(cell, true)?;
    let out = BufReader::new(child.stdout.take().ok_or("its output was taken")?);
    let loaded = out.lines().map_while(Result::ok).any(|line| line == LOADED);
    child.kill()?;
    child.wait()?;
    if loaded { Ok(()) } else { Err("the load to be killed has failed".into()) }
}
