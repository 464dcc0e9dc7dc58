//! `verify`, `salvage`, `checkpoint`, `restore`: damage, and copies.

use crate::args::{Checkpoint, Restore, Salvage, Verify};
use crate::failure::Failure;
use crate::show::{object, out, progress, write_json};
use crate::store::{explain, open_to_write};
use indicatif::ProgressBar;
use serde_json::{Map, Value as Json};
use std::io::{self, Write};
use tidewall::{Fault, Progress, Report, Salvaged, Token};

/// A bar of segments, and what moves it.
fn segments(what: &'static str) -> (ProgressBar, impl Fn(Progress) + Send + Sync + 'static) {
    let bar = progress(Some(0), what);
    let shown = bar.clone();
    (bar, move |done: Progress| {
        shown.set_length(done.segments_all.into());
        shown.set_position(done.segments_done.into());
    })
}

pub fn verify(args: &Verify) -> Result<(), Failure> {
    let (bar, moves) = segments("verifying");
    let report = tidewall::Verify::new().progress(moves).run(&args.dir.dir);
    bar.finish_and_clear();
    let report = report.map_err(|error| explain(error, &args.dir.dir))?;
    Failure::of_damage(!report.is_sound(), tell_verified(&report, args.json))
}

fn tell_verified(report: &Report, json: bool) -> io::Result<()> {
    let mut out = out();
    if json {
        let mut line = object([
            ("sound", report.is_sound().into()),
            ("opens", report.opens().into()),
            ("checkpoint", report.is_checkpoint.into()),
            ("segments", report.segments.into()),
            ("frames", report.frames.into()),
            ("ops", report.ops.into()),
            ("bytes", report.bytes.into()),
            ("lsn", report.lsn.get().into()),
            ("counter", report.counter.get().into()),
        ]);
        describe(&mut line, &report.faults, &report.notes);
        write_json(&mut out, line)?;
    } else {
        write_findings(&mut out, &report.faults, &report.notes)?;
        let verdict = match (report.is_sound(), report.opens()) {
            (true, _) => "sound",
            (false, true) => "damaged, and opens as whole as it was",
            (false, false) => "damaged: restore a checkpoint, or salvage it",
        };
        let (segments, frames, ops) = (report.segments, report.frames, report.ops);
        writeln!(
            out,
            "{verdict}: {segments} segments, {frames} frames, {ops} ops, up to lsn {}",
            report.lsn
        )?;
    }
    out.flush()
}

pub fn salvage(args: &Salvage) -> Result<(), Failure> {
    let (bar, moves) = segments("salvaging");
    let mut salvage = tidewall::Salvage::new().progress(moves);
    if let Some(past) = args.advance_tokens {
        salvage = salvage.advance_tokens(Token::new(past)?);
    }
    let salvaged = salvage.run(&args.dir.dir, &args.into);
    bar.finish_and_clear();
    let salvaged = salvaged.map_err(|error| explain(error, &args.dir.dir))?;
    Failure::of_damage(!salvaged.faults.is_empty(), tell_salvaged(&salvaged, args.json))
}

fn tell_salvaged(salvaged: &Salvaged, json: bool) -> io::Result<()> {
    let mut out = out();
    if json {
        let mut line = object([
            ("keyspaces", salvaged.keyspaces.into()),
            ("keys", salvaged.keys.into()),
            ("counter", salvaged.counter.get().into()),
            ("lsn", salvaged.lsn.get().into()),
            ("needs_floor", salvaged.need_floor.clone().into()),
        ]);
        describe(&mut line, &salvaged.faults, &salvaged.notes);
        write_json(&mut out, line)?;
    } else {
        write_findings(&mut out, &salvaged.faults, &salvaged.notes)?;
        writeln!(out, "salvaged: {} keys in {} keyspaces", salvaged.keys, salvaged.keyspaces)?;
        write_need_floor(&mut out, &salvaged.need_floor)?;
    }
    out.flush()
}

pub fn checkpoint(args: &Checkpoint) -> Result<(), Failure> {
    let db = open_to_write(&args.dir.dir, false)?;
    let made = db.checkpoint(&args.into)?;
    db.close()?;
    let mut out = out();
    if args.json {
        let (lsn, linked, copied) = (made.lsn.get(), made.linked, made.copied);
        let line = object([
            ("lsn", lsn.into()),
            ("linked", linked.into()),
            ("copied", copied.into()),
            ("copied_bytes", made.copied_bytes.into()),
        ]);
        write_json(&mut out, line)?;
    } else {
        writeln!(
            out,
            "checkpoint as of lsn {}: {} files linked, {} copied",
            made.lsn, made.linked, made.copied
        )?;
    }
    Ok(out.flush()?)
}

pub fn restore(args: &Restore) -> Result<(), Failure> {
    let (bar, moves) = segments("restoring");
    let mut restore = tidewall::Restore::new().progress(moves);
    if let Some(past) = args.advance_tokens {
        restore = restore.advance_tokens(Token::new(past)?);
    }
    let restored = restore.run(&args.dir.dir, &args.into);
    bar.finish_and_clear();
    let restored = restored.map_err(|error| explain(error, &args.dir.dir))?;
    let mut out = out();
    if args.json {
        let line = object([
            ("counter", restored.counter.get().into()),
            ("lsn", restored.lsn.get().into()),
            ("needs_floor", restored.need_floor.clone().into()),
        ]);
        write_json(&mut out, line)?;
    } else {
        writeln!(out, "restored: tokens go on above {}, lsns above {}", restored.counter, restored.lsn)?;
        write_need_floor(&mut out, &restored.need_floor)?;
    }
    Ok(out.flush()?)
}

fn describe(line: &mut Map<String, Json>, faults: &[Fault], notes: &[String]) {
    let faults = faults.iter().map(|fault| {
        Json::Object(object([
            ("kind", format!("{:?}", fault.kind).into()),
            ("file", fault.file.clone().into()),
            ("offset", fault.offset.into()),
            ("lsn", fault.lsn.map(|lsn| lsn.get()).into()),
            ("what", fault.what.clone().into()),
        ]))
    });
    line.insert("faults".to_owned(), faults.collect());
    line.insert("notes".to_owned(), notes.into());
}

fn write_findings(out: &mut impl Write, faults: &[Fault], notes: &[String]) -> io::Result<()> {
    faults.iter().try_for_each(|fault| writeln!(out, "damage: {fault}"))?;
    notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))
}

pub fn write_need_floor(out: &mut impl Write, names: &[String]) -> io::Result<()> {
    names.iter().try_for_each(|name| {
        writeln!(
            out,
            "keyspace {name:?} needs a floor: tell it the present value of its token source with `raise --all`"
        )
    })
}
