//! What happened, and whether it was right.
//!
//! One job: the timeline of one hand-over, the table of counts, and the check of the reopened store, which
//! believes nothing that the service said about results.

use crate::Result;
use crate::chaos::{Blow, Hit, Step};
use crate::protocol::JobId;
use crate::service::{Event, Service, What, fence_key, open_jobs, result_key};
use crate::worker::FileDigest;
use comfy_table::{CellAlignment, Table, presets};
use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tidewall::{Db, Keyspace, Stats};

/// One run, told from its end.
pub struct Outcome {
    stats: Stats,
    events: Vec<Event>,
    hits: Vec<Hit>,
    jobs: usize,
    elapsed: Duration,
}

impl Outcome {
    pub fn new(db: &Db, service: &Service) -> Self {
        Outcome {
            stats: db.stats(),
            events: service.events(),
            hits: service.chaos.hits(),
            jobs: service.files.len(),
            elapsed: service.now(),
        }
    }

    fn count(&self, is_it: impl Fn(&What) -> bool) -> usize {
        self.events.iter().filter(|event| is_it(&event.what)).count()
    }

    /// Writes that took the place of another one, which was of a token like this.
    fn overwrote(&self, before: Ordering) -> usize {
        let is_it = |event: &&Event| match event.what {
            What::Overwrote { before: token } => token.cmp(&event.token) == before,
            _ => false,
        };
        self.events.iter().filter(is_it).count()
    }

    /// The first job whose worker was paused.
    pub fn paused_job(&self) -> Option<JobId> {
        self.hits.iter().find(|hit| hit.blow == Blow::Pause).map(|hit| hit.job)
    }
}

/// What happened to a job, from beginning to end.
pub fn timeline(outcome: &Outcome, job: JobId) {
    for Event { at, token, worker, what, .. } in outcome.events.iter().filter(|event| event.job == job) {
        let signal = |name| if cfg!(unix) { name } else { "its answer is withheld" };
        let line = match what {
            What::Granted => format!("token {token} granted to worker {worker}"),
            What::FoundDone => format!("token {token} granted, and the job was done"),
            What::Paused => format!("worker {worker} renewed, then paused ({})", signal("SIGSTOP")),
            What::Expired => format!("the lease of token {token} expired"),
            What::Resumed => format!("worker {worker} resumed"),
            What::Killed => format!("worker {worker} killed"),
            What::Committed => format!("token {token} committed"),
            What::AnswerLost => format!("the answer to worker {worker} is lost"),
            What::Recognised => format!("token {token} committed before: recognised"),
            What::Fenced { mark, last_operation } => {
                format!("token {token} fenced: mark is {mark} ({last_operation})")
            }
            What::Overwrote { before } => {
                format!("token {token} accepted, over the result of token {before}")
            }
        };
        println!("{:>10.1}  {line}", at.as_secs_f64() * 1e3);
    }
    println!();
}

/// The counts of a run, and of the control run beside it.
pub fn table(fenced: &Outcome, control: Option<&Outcome>) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(["", "fenced"]);
    if control.is_some() {
        table.set_header(["", "fenced", "no token checked"]);
    }
    let columns: Vec<_> = [fenced].into_iter().chain(control).map(counts).collect();
    for (row, (what, _)) in columns[0].iter().enumerate() {
        let counts = columns.iter().map(|column| column[row].1.clone());
        table.add_row([what.to_string()].into_iter().chain(counts));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}\n");
}

fn counts(outcome: &Outcome) -> Vec<(&'static str, String)> {
    let stats = &outcome.stats;
    let hit = |blow| outcome.hits.iter().filter(|hit| hit.blow == blow).count();
    let per_sync = (stats.writes + stats.grants) as f64 / stats.commits.max(1) as f64;
    vec![
        ("jobs", outcome.jobs.to_string()),
        ("grants", stats.grants.to_string()),
        ("takeovers", stats.takeovers.to_string()),
        ("renewals", stats.renewals.to_string()),
        ("late writes refused", outcome.count(|what| matches!(what, What::Fenced { .. })).to_string()),
        ("late writes accepted", outcome.overwrote(Ordering::Greater).to_string()),
        ("retries recognised", outcome.count(|what| *what == What::Recognised).to_string()),
        ("retries written again", outcome.overwrote(Ordering::Equal).to_string()),
        ("workers paused / killed", format!("{} / {}", hit(Blow::Pause), hit(Blow::Kill))),
        ("writes and grants per fsync", format!("{per_sync:.2}")),
        ("elapsed", format!("{:.2} s", outcome.elapsed.as_secs_f64())),
    ]
}

/// Checks that what was to be shown was shown: every late write refused, every retry recognised.
pub fn check_run(outcome: &Outcome) -> Result<()> {
    let mut wrong = Vec::new();
    for Hit { token, worker, job, blow, step, .. } in &outcome.hits {
        if *blow == Blow::Pause && *step != Step::Over {
            wrong.push(format!(
                "job {job}: the late write of paused worker {worker} under token {token} was accepted"
            ));
        }
    }
    let lost = outcome.count(|what| *what == What::AnswerLost);
    let recognised = outcome.count(|what| *what == What::Recognised);
    if recognised != lost {
        wrong.push(format!("{lost} results were sent again, and {recognised} of them recognised"));
    }
    none_wrong("the run", &wrong)
}

/// Checks that the control run shows what the other one prevents: without a check each late write is accepted.
pub fn check_control(outcome: &Outcome) -> Result<()> {
    let mut wrong = Vec::new();
    for Hit { token, worker, job, blow, step, .. } in &outcome.hits {
        if *blow == Blow::Pause && *step != Step::Accepted {
            wrong.push(format!(
                "job {job}: nobody checks tokens, and worker {worker} did not write late under token {token}"
            ));
        }
    }
    none_wrong("the control run", &wrong)?;
    println!(
        "Where no token is checked, {} results are now those of workers that had",
        outcome.overwrote(Ordering::Greater)
    );
    println!("lost their job, and nobody was told.");
    Ok(())
}

/// Checks every result of a store that was just reopened, against the file and the grants that were made.
pub fn check_store(db: &Db, files: &[PathBuf], outcome: &Outcome) -> Result<()> {
    let jobs = open_jobs(db)?;
    let mut wrong = Vec::new();
    for (job, file) in files.iter().enumerate() {
        if let Err(e) = check_job(&jobs, job, file, outcome) {
            wrong.push(format!("job {job} ({}): {e}", file.display()));
        }
    }
    let keys = jobs.iter().count();
    if keys != files.len() {
        wrong.push(format!("{keys} keys for {} jobs", files.len()));
    }
    none_wrong("the reopened store", &wrong)?;
    println!(
        "Reopened and checked: {keys} results, each written once, by the last holder of its job, with the"
    );
    println!("hash of its file. No late write is among them.");
    Ok(())
}

fn none_wrong(place: &str, wrong: &[String]) -> Result<()> {
    if wrong.is_empty() {
        return Ok(());
    }
    let shown = wrong.iter().take(20).cloned().collect::<Vec<_>>().join("\n  ");
    Err(format!("{} violations in {place}:\n  {shown}", wrong.len()).into())
}

/// One result: whose it is by its content, by the store's book-keeping and by the grants that were made must
/// be the same; and it must be right.
fn check_job(jobs: &Keyspace, job: JobId, file: &Path, outcome: &Outcome) -> Result<()> {
    let value = jobs.get(&result_key(job))?.ok_or("no result")?;
    let mark = jobs.mark(&fence_key(job))?.ok_or("no mark")?;
    let text = str::from_utf8(&value)?;
    let ["worker", worker, "token", token, "size", size, "sha256", sha256] =
        *text.split(' ').collect::<Vec<_>>()
    else {
        return Err(format!("not a result: {text:?}").into());
    };
    let tokens = |is_it: fn(&What) -> bool| -> Vec<u64> {
        let events = outcome.events.iter().filter(|event| event.job == job && is_it(&event.what));
        events.map(|event| event.token.get()).collect()
    };
    let granted = tokens(|what| matches!(what, What::Granted | What::FoundDone));
    let found_done = tokens(|what| *what == What::FoundDone);
    let committed = tokens(|what| *what == What::Committed);
    if token.parse() != Ok(value.token().get()) {
        return Err(
            format!("worker {worker} wrote it with token {token}, the store says {}", value.token()).into()
        );
    }
    if granted.iter().max() != Some(&mark.get()) {
        return Err(format!("the mark is {mark}, and granted were {granted:?}").into());
    }
    if value.token().get() != mark.get() && !found_done.contains(&mark.get()) {
        return Err(format!("worker {worker} wrote it with token {token}, and the mark is {mark}").into());
    }
    if committed != [value.token().get()] {
        return Err(format!("written once, with token {token}? committed were {committed:?}").into());
    }
    let (fresh_size, fresh_sha256) = FileDigest::of(file)?;
    if (size.parse(), sha256) != (Ok(fresh_size), &*fresh_sha256) {
        return Err(format!("says {size} {sha256}, the file now {fresh_size} {fresh_sha256}").into());
    }
    Ok(())
}
