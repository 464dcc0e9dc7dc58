//! A job service that survives paused workers.
//!
//! Worker processes hash files and publish the results through a service that embeds tidewall. While they
//! hold leases, some are paused (SIGSTOP) until somebody else has done their job, and then wake up and
//! write; some are killed; some send a result twice. In the end every result is there once, written by
//! the last holder of its job, and every late write was refused.
//!
//! ```text
//! cargo run --release --example paused_worker [-- --unfenced] [DIR]
//! ```
//!
//! With `--unfenced` all of it is done once more, the same jobs with the same blows, and the results go into a plain map.
//! There the late writes are accepted, over the results of those who hold the jobs by then.
//!
//! To read: `service.rs` (`Service::result` is where a late write is refused), `worker.rs`, `protocol.rs`;
//! then what makes the trouble, `chaos.rs` and `workers.rs`; then `report.rs`, which checks it all against a
//! reopened store.

mod chaos;
mod protocol;
mod report;
mod service;
mod worker;
mod workers;

use chaos::{Amount, Chaos, Random};
use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use service::{Results, Service};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use tidewall::Db;
use workers::Workers;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = BoxError> = std::result::Result<T, E>;

/// The hidden subcommand that makes this program a worker.
const WORKER: &str = "__worker";
/// Between two looks at the workers.
const TICK: Duration = Duration::from_millis(1);
/// When nothing has moved for so long, something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// Hash files with worker processes that are paused and killed, and refuse what they write too late
#[derive(Parser, Debug)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Hidden>,
    /// The tree of files to hash [default: the source of this crate]
    dir: Option<PathBuf>,
    /// Files to hash, at most
    #[arg(long, default_value_t = 120)]
    jobs: usize,
    /// Worker processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,
    #[command(flatten)]
    chaos: Amount,
    /// How long a lease lasts without renewal
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    ttl_ms: u64,
    /// Chooses the victims
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Do it all a second time, with the results in a map that checks no token, and show both
    #[arg(long)]
    unfenced: bool,
    /// Where to put the store, and leave it; must be empty [default: a temporary directory]
    #[arg(long)]
    dir_of_store: Option<PathBuf>,
}

#[derive(Subcommand, Debug)]
enum Hidden {
    #[command(name = WORKER, hide = true)]
    Worker(worker::WorkerArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Hidden::Worker(args)) => worker::run(args),
        None => run(&cli),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let root = cli.dir.as_deref().unwrap_or(Path::new(env!("CARGO_MANIFEST_DIR")));
    let files = list_files(root, cli.jobs)?;
    let temporary = tempfile::tempdir()?;
    let store = cli.dir_of_store.clone().unwrap_or_else(|| temporary.path().join("store"));
    if store.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(format!("{} is not empty: the store starts with nothing done", store.display()).into());
    }
    let fenced = play(cli, &files, &store, Results::Store)?;
    let control = match cli.unfenced {
        true => Some(play(cli, &files, &temporary.path().join("control"), Results::map())?),
        false => None,
    };
    if let Some(job) = fenced.paused_job() {
        println!("One hand-over, in ms since the start: job {job}, {}\n", files[job].display());
        report::timeline(&fenced, job);
        if let Some(control) = &control {
            println!("The same job where no token is checked:\n");
            report::timeline(control, job);
        }
    }
    report::table(&fenced, control.as_ref());

    let mut checked = vec![report::check_run(&fenced), check_store(&store, &files, &fenced)];
    checked.extend(control.as_ref().map(report::check_control));
    let wrong: Vec<_> = checked.into_iter().filter_map(|check| check.err().map(|e| e.to_string())).collect();
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(wrong.join("\nerror: ").into()),
    }
}

/// All jobs once, with the blows of the seed.
fn play(cli: &Cli, files: &[PathBuf], store: &Path, results: Results) -> Result<report::Outcome> {
    let mut random = Random(cli.seed);
    let chaos = Chaos::new(cli.chaos, files.len(), cli.workers.into(), &mut random)?;
    let db = Db::open(store)?;
    let service = Service::new(&db, results, files.to_vec(), Duration::from_millis(cli.ttl_ms), chaos)?;
    work(&service, cli, random)?;
    let outcome = report::Outcome::new(&db, &service);
    drop(service);
    db.close()?;
    Ok(outcome)
}

fn check_store(store: &Path, files: &[PathBuf], outcome: &report::Outcome) -> Result<()> {
    let db = Db::open(store).map_err(|e| format!("reopening the store: {e}"))?;
    report::check_store(&db, files, outcome)?;
    Ok(db.close()?)
}

/// Runs the service and its workers until all is done.
fn work(service: &Service, cli: &Cli, random: Random) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    interrupt::watch();
    // Drawn on a terminal only.
    let style = ProgressStyle::with_template("{elapsed} {wide_bar} {pos}/{len} jobs  {msg}")?;
    let bar =
        ProgressBar::new(service.files.len() as u64).with_style(style).with_finish(ProgressFinish::AndClear);
    thread::scope(|scope| {
        // Whatever happens, these two are dropped before the scope waits for the threads below: workers
        // gone, connections end; nobody left waiting in a strike.
        let mut workers =
            Workers::start(cli.workers.into(), listener.local_addr()?, cli.ttl_ms.div_ceil(3), random)?;
        let _cancel = CancelOnDrop(&service.chaos);
        let mut connections = Vec::new();
        let mut seen = (0, Vec::new());
        let mut moved = Instant::now();
        while workers.len() > 0 {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        stream.set_nonblocking(false)?;
                        connections.push(scope.spawn(|| service.serve(stream)));
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) => return Err(e.into()),
                }
            }
            connections = join_finished(connections)?;
            service.chaos.step(service, &mut workers)?;
            workers.reap()?;

            let hits = service.chaos.hits();
            let now = (service.done(), hits.iter().map(|hit| hit.step).collect());
            if now != seen {
                bar.set_position(now.0 as u64);
                bar.set_message(format!("{} workers paused or killed", hits.len()));
                (seen, moved) = (now, Instant::now());
            }
            if interrupt::came() {
                return Err("interrupted".into());
            }
            if moved.elapsed() > PATIENCE {
                return Err(format!("nothing moved for {PATIENCE:?}: {} jobs done, {hits:?}", seen.0).into());
            }
            thread::sleep(TICK);
        }
        Ok(())
    })
}

/// Joins the threads that have ended, and passes on what went wrong in them.
fn join_finished(
    threads: Vec<ScopedJoinHandle<'_, Result<()>>>,
) -> Result<Vec<ScopedJoinHandle<'_, Result<()>>>> {
    let (ended, running): (Vec<_>, _) = threads.into_iter().partition(|thread| thread.is_finished());
    for thread in ended {
        thread.join().map_err(|_| "a connection's thread panicked")??;
    }
    Ok(running)
}

struct CancelOnDrop<'c>(&'c Chaos);

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Up to `max` regular files under `root` that can be read, in the order of their names.
fn list_files(root: &Path, max: usize) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut skipped = 0;
    // Names still to look at, the next one last.
    let mut paths = vec![root.to_owned()];
    while let Some(path) = paths.pop()
        && files.len() < max
    {
        let kind = path.symlink_metadata().map_err(|e| format!("{}: {e}", path.display()))?.file_type();
        if kind.is_dir() {
            if matches!(path.file_name().and_then(|name| name.to_str()), Some("target" | ".git")) {
                continue;
            }
            let Ok(entries) = path.read_dir() else {
                skipped += 1;
                continue;
            };
            let mut entries = entries.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?;
            entries.sort_unstable_by(|a, b| b.cmp(a));
            paths.append(&mut entries);
        } else if kind.is_file() {
            // The protocol has names in lines of text.
            let is_line = path.to_str().is_some_and(|name| !name.contains('\n'));
            match is_line && std::fs::File::open(&path).is_ok() {
                true => files.push(path),
                false => skipped += 1,
            }
        }
    }
    if skipped > 0 {
        eprintln!("{skipped} files or directories cannot be read, or have names that are not a line of text");
    }
    match files.is_empty() {
        true => Err(format!("no files to hash under {}", root.display()).into()),
        false => Ok(files),
    }
}

/// Ctrl-C and a request to end, taken as an error that leaves no worker behind.
mod interrupt {
    use super::{AtomicBool, Ordering};

    static CAME: AtomicBool = AtomicBool::new(false);

    pub fn came() -> bool {
        CAME.load(Ordering::Relaxed)
    }

    #[cfg(unix)]
    pub fn watch() {
        extern "C" fn note(_signal: libc::c_int) {
            CAME.store(true, Ordering::Relaxed);
        }
        let note: extern "C" fn(libc::c_int) = note;
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: the handler does nothing but store to an atomic.
            unsafe { libc::signal(signal, note as libc::sighandler_t) };
        }
    }

    /// The workers see their stdin close.
    #[cfg(not(unix))]
    pub fn watch() {}
}
