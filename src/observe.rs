//! What can be said of a store that is open: its figures, its health, and the file they are published in.
//!
//! One job: gather, from the engine and its parts. Nothing here changes the store or is read by it: `STATS` is
//! replaced as a whole, is never synced, and means nothing to an open.
//!
//! Read next: `stats.rs`, where each figure is named; a new one is a field and a row there, and a line here.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::events;
use crate::format::name;
use crate::stats::{Health, Reading, Stats, Warning};
use crate::storage::{Access, Storage};
use crate::sync::{AtomicBool, Ordering};
use std::fmt::Write;
use std::io;

/// How the file begins, by which it is told from a stranger's.
const STATS_BEGIN: &str = "{\"tidewall_stats\":1,";

impl Engine {
    /// Counters and sizes.
    pub fn stats(&self) -> Stats {
        let (segments, spares) = self.pool.segments();
        let copied = self.counters.copy();
        let (live_bytes, garbage_bytes, keys) = {
            let tail = self.tail.lock();
            (tail.usage.live(), tail.usage.garbage(), tail.usage.keys())
        };
        let (pinned_values, pinned_bytes) = self.segments.pinned();
        let visible = self.progress.durable();
        let oldest = self.snapshots.oldest(visible);
        let keyspaces = self.keyspaces.read().len() as u64;
        Stats {
            expiries: self.bell.expired(),
            waiting: self.waiters.len() as u64,
            watched_leases: self.watches.len() as u64,
            leases: self.leases.len() as u64,
            keyspaces,
            keys,
            index_bytes: self.slots.heap_bytes() as u64,
            segments,
            spares,
            disk_bytes: self.pool.disk_bytes() + self.index.bytes.load(Ordering::Relaxed),
            live_bytes,
            garbage_bytes,
            disk_written_bytes: self.pool.written_bytes()
                + self.index.written.load(Ordering::Relaxed)
                + copied.disk_written_bytes,
            pinned_values: pinned_values as u64,
            pinned_bytes,
            snapshots: self.snapshots.count() as u64,
            snapshot_lag: visible.get() - oldest.get(),
            ..copied
        }
    }

    /// Notes how a round of compaction went.
    pub fn note_compaction<T>(&self, done: &Result<T>) {
        let mut trouble = self.compaction_trouble.lock();
        match done {
            // The damaged segment is left alone from then on, so that later rounds go well.
            Ok(_) if matches!(*trouble, Some(Error::Corrupt { .. })) => {}
            Ok(_) | Err(Error::NoSpace { .. } | Error::Poisoned { .. } | Error::Closed) => *trouble = None,
            Err(error) => {
                events::not_compacting(&self.dir, error);
                *trouble = Some(error.clone());
            }
        }
    }

    /// Whether writes are still acknowledged, and what is to be looked at.
    pub fn health(&self) -> Health {
        if let Some(cause) = self.cause.get() {
            return Health::Poisoned(cause.clone());
        }
        if self.closed.load(Ordering::Acquire) {
            return Health::Closed;
        }
        let trouble = self.pool.trouble().map(|trouble| match trouble {
            Error::NoSpace { bytes, .. } => Warning::NoSpace(bytes),
            error => Warning::NoSpares(error),
        });
        // A full disk is told once, and a round that a close cut short is none that failed.
        let stuck = self.compaction_trouble.lock().clone().map(Warning::NotCompacting);
        let read_around = self.warnings.iter().map(|what| Warning::ReadAround(what.clone()));
        let warnings: Vec<_> = trouble.into_iter().chain(stuck).chain(read_around).collect();
        match warnings.is_empty() {
            true => Health::Healthy,
            false => Health::Degraded(warnings),
        }
    }
}

/// Makes the way free for the published figures: an earlier file goes, a stranger's is named.
///
/// # Errors
/// [`Error::InvalidArgument`]: a file of that name is none of the store's. Else the file system's.
pub(crate) fn begin_publishing(storage: &dyn Storage) -> Result<()> {
    for file in [name::STATS, name::STATS_NEW] {
        let ours = is_ours(storage, file).map_err(|e| Error::io(format!("reading {file}"), e))?;
        if !ours {
            return Err(Error::invalid(format!(
                "figures cannot be published: {file} in {} is somebody else's; move it away",
                storage.describe()
            )));
        }
    }
    remove_published(storage).map_err(|e| Error::io("removing an old STATS", e))
}

/// The thread that publishes the figures, until it is told to stop; it takes the file away with it.
pub(crate) fn run_publisher(engine: &Engine, stop: &AtomicBool) {
    let storage = engine.pool.storage();
    while !stop.load(Ordering::Acquire) {
        if let Err(e) = publish(storage, &to_json(engine)) {
            events::unpublished(&engine.dir, &e);
        }
        engine.publish_bell.listen(engine.options.publish_stats);
    }
    if let Err(e) = remove_published(storage) {
        events::unpublished(&engine.dir, &e);
    }
}

fn publish(storage: &dyn Storage, text: &str) -> io::Result<()> {
    remove(storage, name::STATS_NEW)?;
    storage.open(name::STATS_NEW, Access::Create)?.write_all_at(text.as_bytes(), 0)?;
    storage.rename(name::STATS_NEW, name::STATS)
}

/// Whether a file is one of these, or none. After a power cut it may be empty, or zeros.
fn is_ours(storage: &dyn Storage, file: &str) -> io::Result<bool> {
    let file = match storage.open(file, Access::Read) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(e) => return Err(e),
    };
    let mut head = vec![0; file.len()?.min(STATS_BEGIN.len() as u64) as usize];
    file.read_exact_at(&mut head, 0)?;
    Ok(STATS_BEGIN.as_bytes().starts_with(&head) || head.iter().all(|&byte| byte == 0))
}

fn remove_published(storage: &dyn Storage) -> io::Result<()> {
    remove(storage, name::STATS_NEW)?;
    remove(storage, name::STATS)
}

fn remove(storage: &dyn Storage, file: &str) -> io::Result<()> {
    match storage.remove(file) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// One line of JSON: who says so, and every figure by its name.
fn to_json(engine: &Engine) -> String {
    let mut out = String::from(STATS_BEGIN);
    let health = engine.health();
    let state = match &health {
        Health::Healthy => "healthy",
        Health::Degraded(_) => "degraded",
        Health::Poisoned(_) => "poisoned",
        Health::Closed => "closed",
    };
    push(&mut out, format_args!("\"pid\":{},", std::process::id()));
    push(&mut out, format_args!("\"incarnation\":\"{:016x}\",", engine.incarnation));
    push(&mut out, format_args!("\"last_lsn\":{},", engine.progress.durable()));
    push(&mut out, format_args!("\"state\":\"{state}\",\"health\":\"{}\",", escaped(&health.to_string())));
    out.push_str("\"stats\":{");
    for (at, figure) in engine.stats().figures().into_iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        push(&mut out, format_args!("{comma}\"{}\":", figure.name));
        match figure.reading {
            Reading::Counter(value) | Reading::Gauge(value) => push(&mut out, format_args!("{value}")),
            Reading::Summary(s) => push(
                &mut out,
                format_args!(
                    "{{\"count\":{},\"sum\":{},\"p50\":{},\"p90\":{},\"p99\":{},\"p999\":{},\"max\":{}}}",
                    s.count, s.sum, s.p50, s.p90, s.p99, s.p999, s.max
                ),
            ),
        }
    }
    out.push_str("}}\n");
    out
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a string takes all that is written to it");
}

/// Text as the inside of a JSON string.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => push(&mut out, format_args!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_as_json_asks() {
        assert_eq!(escaped("a\"b\\c\nd\u{7f}é"), "a\\\"b\\\\c\\u000ad\\u007fé");
    }
}
