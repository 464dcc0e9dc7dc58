//! `info`, `log`, `stats`: from outside, beside whoever has the store open.

use crate::args::{Info, Log, Stats};
use crate::bytes;
use crate::failure::{DAMAGED, Failure, OTHER};
use crate::read::{describe_options, scope, tokens};
use crate::show::{self, nanos, object, out, table, write_json, write_table};
use crate::store::{lock_holder, lock_pid};
use serde_json::{Map, Value as Json};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};
use tidewall::{
    Error, IndexInfo, Inspection, LogChange, LogFrame, LogOp, SegmentInfo, SegmentLog, SegmentState,
};

/// The list and what it lists. Between the reads of the two a segment may have been retired, so what seems
/// damaged is looked at again by a list of its own time.
fn look(dir: &Path) -> Result<(Inspection, Vec<SegmentInfo>), Failure> {
    let mut tries = 3;
    loop {
        let seen = Inspection::of(dir)?;
        let segments = seen.segments()?;
        tries -= 1;
        if tries == 0 || !segments.iter().any(|info| matches!(info.state, SegmentState::Damaged(_))) {
            return Ok((seen, segments));
        }
    }
}

pub fn info(args: &Info) -> Result<(), Failure> {
    let dir = &args.dir.dir;
    let (seen, segments) = look(dir)?;
    let is_damaged =
        seen.has_damaged_copy() || segments.iter().any(|info| matches!(info.state, SegmentState::Damaged(_)));
    let index = seen.index()?;
    Failure::of_damage(is_damaged, tell(args, &seen, &segments, index.as_ref()))
}

fn tell(
    args: &Info,
    seen: &Inspection,
    segments: &[SegmentInfo],
    index: Option<&IndexInfo>,
) -> io::Result<()> {
    let dir = &args.dir.dir;
    let mut out = out();
    if args.json {
        let ancestors: Vec<_> = seen.ancestors().iter().map(|id| format!("{id:032x}")).collect();
        let mut line = object([
            ("dir", seen.dir().into()),
            ("format", seen.format_version().into()),
            ("store_id", format!("{:032x}", seen.store_id()).into()),
            ("ancestors", ancestors.into()),
            ("incarnation", format!("{:016x}", seen.incarnation()).into()),
            ("generation", seen.generation().into()),
            ("is_checkpoint", seen.is_checkpoint().into()),
            ("damaged_copy", seen.has_damaged_copy().into()),
            ("pid", lock_pid(dir).into()),
        ]);
        line.insert("index".to_owned(), index.map_or(Json::Null, |index| Json::Object(indexed(index))));
        line.insert("segments".to_owned(), segments.iter().map(|info| Json::Object(segment(info))).collect());
        write_json(&mut out, line)?;
    } else {
        writeln!(out, "store        {}", seen.dir())?;
        writeln!(out, "id           {:032x}", seen.store_id())?;
        for id in seen.ancestors() {
            writeln!(out, "restored of  {id:032x}")?;
        }
        let kind = if seen.is_checkpoint() { ", a checkpoint" } else { "" };
        writeln!(out, "format       {}{kind}", seen.format_version())?;
        writeln!(out, "incarnation  {:016x}", seen.incarnation())?;
        let copy = if seen.has_damaged_copy() { "; one of its two copies is damaged" } else { "" };
        writeln!(out, "STORE        written {} times{copy}", seen.generation())?;
        let holder =
            lock_holder(dir).map_or("by nobody that can be seen".to_owned(), |who| format!("by {who}"));
        writeln!(out, "open         {holder}")?;
        let bytes = segments.iter().map(|info| info.bytes).sum();
        writeln!(out, "on disk      {} in {} segments", show::bytes(bytes), segments.len())?;
        match index {
            None => writeln!(out, "index file   none")?,
            Some(IndexInfo { file, trouble: Some(why), .. }) => {
                writeln!(out, "index file   {file} is of no use: {why}; the next open reads the whole log")?
            }
            Some(IndexInfo { file, bytes, through, ops_behind, .. }) => {
                let bytes = show::bytes(*bytes);
                writeln!(
                    out,
                    "index file   {file}, {bytes}, up to lsn {through}; {ops_behind} ops behind it"
                )?
            }
        }
        writeln!(out)?;
        let mut table = table(
            &["segment", "bytes", "state", "first lsn", "last lsn", "frames", "counter"],
            &[1, 3, 4, 5, 6],
        );
        for info in segments {
            table.add_row(row(info));
        }
        write_table(&mut out, &table)?;
    }
    out.flush()
}

fn indexed(index: &IndexInfo) -> Map<String, Json> {
    object([
        ("file", index.file.as_str().into()),
        ("bytes", index.bytes.into()),
        ("through", index.through.get().into()),
        ("ops_behind", index.ops_behind.into()),
        ("trouble", index.trouble.as_deref().into()),
    ])
}

fn row(info: &SegmentInfo) -> [String; 7] {
    let (state, first, last, frames, counter) = match &info.state {
        SegmentState::Sealed { first, last, frames, counter, .. } => (
            "sealed".to_owned(),
            first.to_string(),
            last.to_string(),
            frames.to_string(),
            counter.to_string(),
        ),
        SegmentState::Open { first, counter } => {
            ("open".to_owned(), first.to_string(), String::new(), String::new(), counter.to_string())
        }
        SegmentState::Damaged(what) => {
            (format!("damaged: {what}"), String::new(), String::new(), String::new(), String::new())
        }
        _ => ("empty".to_owned(), String::new(), String::new(), String::new(), String::new()),
    };
    [format!("{:06}", info.segment), info.bytes.to_string(), state, first, last, frames, counter]
}

fn segment(info: &SegmentInfo) -> Map<String, Json> {
    let mut line = object([("segment", info.segment.into()), ("bytes", info.bytes.into())]);
    line.extend(match &info.state {
        SegmentState::Sealed { first, last, frames, end, counter } => object([
            ("state", "sealed".into()),
            ("first_lsn", first.get().into()),
            ("last_lsn", last.get().into()),
            ("frames", (*frames).into()),
            ("end", (*end).into()),
            ("counter", (*counter).into()),
        ]),
        SegmentState::Open { first, counter } => object([
            ("state", "open".into()),
            ("first_lsn", first.get().into()),
            ("counter", (*counter).into()),
        ]),
        SegmentState::Damaged(what) => object([("state", "damaged".into()), ("damage", what.clone().into())]),
        _ => object([("state", "empty".into())]),
    });
    line
}

pub fn log(args: &Log) -> Result<(), Failure> {
    let (seen, listed) = look(&args.dir.dir)?;
    let segments = match args.segment {
        Some(segment) => vec![segment],
        None => listed
            .into_iter()
            .filter(|info| info.state != SegmentState::Empty)
            .map(|info| info.segment)
            .collect(),
    };
    let mut out = out();
    let mut damage = Vec::new();
    if !args.shape.json {
        writeln!(out, "{:>12} {:>9}  op", "lsn", "offset")?;
    }
    for segment in segments {
        let log = match seen.log(segment) {
            Ok(log) => log,
            // Retired meanwhile: what was live in it is carried to another, which comes later.
            Err(_)
                if args.segment.is_none()
                    && Inspection::of(&args.dir.dir)?.log(segment).is_err_and(is_unlisted) =>
            {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        write_log(&mut out, args, &log)?;
        damage.extend(log.damage.map(|what| format!("{segment:06}.seg at offset {}: {what}", log.end)));
    }
    out.flush()?;
    match damage.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(DAMAGED, damage.join("\ntidewall: "))),
    }
}

fn is_unlisted(error: Error) -> bool {
    matches!(error, Error::InvalidArgument(_))
}

fn write_log(out: &mut impl Write, args: &Log, log: &SegmentLog) -> io::Result<()> {
    if !args.shape.json {
        writeln!(out, "segment {:06}, {} frames up to offset {}", log.segment, log.frames.len(), log.end)?;
    }
    for frame in &log.frames {
        if args.shape.json {
            write_json(out, frame_json(log.segment, frame, args.values))?;
            continue;
        }
        if frame.ops.is_empty() {
            writeln!(
                out,
                "{:>12} {:>9}  idle, all up to lsn {} durable",
                frame.lsn, frame.offset, frame.durable
            )?;
        }
        for op in &frame.ops {
            let carried = if op.lsn == frame.lsn { "" } else { " (carried here)" };
            let number = op.operation.map_or(String::new(), |number| format!(" operation {number}"));
            writeln!(out, "{:>12} {:>9}  {}{number}{carried}", op.lsn, op.offset, sentence(op, args))?;
        }
    }
    Ok(())
}

/// What an op did, in a line.
fn sentence(op: &LogOp, args: &Log) -> String {
    let show = |name: &[u8]| format!("\"{}\"", bytes::show(name, args.shape.hex));
    let (space, token) = (op.keyspace, op.mark);
    match &op.what {
        LogChange::Keyspace { name, options, needs_floor } => {
            let floor = if *needs_floor { ", needs a floor" } else { "" };
            format!(
                "keyspace {space} is {name:?}, scope {}, tokens {}{floor}",
                scope(*options),
                tokens(*options)
            )
        }
        LogChange::Put { key, value } => {
            let value = if args.values { show(value) } else { format!("{} bytes", value.len()) };
            format!("put {space} {} token {token}: {value}", show(key))
        }
        LogChange::Delete { key } => format!("delete {space} {} token {token}", show(key)),
        LogChange::Grant { fence, owner, ttl } => {
            let ttl = ttl.duration().map_or("for ever".to_owned(), |ttl| nanos(ttl.as_nanos() as u64));
            format!("grant {space} {} token {token} to {owner}, {ttl}", show(fence))
        }
        LogChange::Release { fence } => format!("release {space} {} token {token}", show(fence)),
        LogChange::Raise { fence, reason } if reason.is_empty() => {
            format!("raise {space} {} to {token}", show(fence))
        }
        LogChange::Raise { fence, reason } => {
            format!("raise {space} {} to {token}: {}", show(fence), show(reason))
        }
        LogChange::Floor { is_exclusive } => {
            format!("floor {space} to {token}{}", if *is_exclusive { ", itself fenced" } else { "" })
        }
        LogChange::Counter => format!("token counter to {token}"),
        _ => "an op that cannot be shown".to_owned(),
    }
}

fn frame_json(segment: u32, frame: &LogFrame, values: bool) -> Map<String, Json> {
    let mut line = object([
        ("segment", segment.into()),
        ("offset", frame.offset.into()),
        ("bytes", frame.bytes.into()),
        ("lsn", frame.lsn.get().into()),
        ("durable", frame.durable.get().into()),
    ]);
    let ops: Vec<_> = frame.ops.iter().map(|op| Json::Object(op_json(op, values))).collect();
    line.insert("ops".to_owned(), ops.into());
    line
}

fn op_json(op: &LogOp, values: bool) -> Map<String, Json> {
    let mut line = object([("offset", op.offset.into()), ("lsn", op.lsn.get().into())]);
    if op.keyspace > 0 {
        line.insert("keyspace".to_owned(), op.keyspace.into());
    }
    if op.mark.get() > 0 {
        line.insert("token".to_owned(), op.mark.get().into());
    }
    line.extend(op.operation.map(|number| ("operation".to_owned(), number.get().into())));
    let kind = match &op.what {
        LogChange::Keyspace { name, options, needs_floor } => {
            line.insert("name".to_owned(), name.clone().into());
            describe_options(&mut line, *options);
            line.insert("needs_floor".to_owned(), (*needs_floor).into());
            "keyspace"
        }
        LogChange::Put { key, value } => {
            bytes::put_json(&mut line, "key", key);
            line.insert("value_bytes".to_owned(), value.len().into());
            if values {
                bytes::put_json(&mut line, "value", value);
            }
            "put"
        }
        LogChange::Delete { key } => {
            bytes::put_json(&mut line, "key", key);
            "delete"
        }
        LogChange::Grant { fence, owner, ttl } => {
            bytes::put_json(&mut line, "fence", fence);
            line.insert("owner".to_owned(), owner.to_string().into());
            let ttl = ttl.duration().map(|ttl| ttl.as_nanos() as u64);
            line.insert("ttl_nanos".to_owned(), ttl.into());
            "grant"
        }
        LogChange::Release { fence } => {
            bytes::put_json(&mut line, "fence", fence);
            "release"
        }
        LogChange::Raise { fence, reason } => {
            bytes::put_json(&mut line, "fence", fence);
            if !reason.is_empty() {
                bytes::put_json(&mut line, "reason", reason);
            }
            "raise"
        }
        LogChange::Floor { is_exclusive } => {
            line.insert("exclusive".to_owned(), (*is_exclusive).into());
            "floor"
        }
        LogChange::Counter => "counter",
        _ => "unreadable",
    };
    line.insert("kind".to_owned(), kind.into());
    line
}

pub fn stats(args: &Stats) -> Result<(), Failure> {
    let dir = &args.dir.dir;
    let Some(seconds) = args.watch else { return show_stats(dir, args.json, false) };
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        show_stats(dir, args.json, true)?;
        left -= 1;
        if left > 0 {
            std::thread::sleep(Duration::from_secs(seconds.into()));
        }
    }
    Ok(())
}

/// What the process that has the store open has published.
struct Published {
    figures: Map<String, Json>,
    age: Option<Duration>,
    /// It is from an earlier opening of the store: that process was killed.
    is_stale: bool,
}

fn published(dir: &Path, seen: &Inspection) -> Result<Option<Published>, Failure> {
    let Some(text) = seen.published_stats()? else { return Ok(None) };
    let Ok(Json::Object(figures)) = serde_json::from_str(&text) else { return Ok(None) };
    let written = std::fs::metadata(dir.join("STATS")).and_then(|file| file.modified()).ok();
    let age = written.and_then(|written| SystemTime::now().duration_since(written).ok());
    let now = format!("{:016x}", seen.incarnation());
    let is_stale = figures.get("incarnation").and_then(Json::as_str) != Some(&now);
    Ok(Some(Published { figures, age, is_stale }))
}

fn show_stats(dir: &Path, json: bool, watch: bool) -> Result<(), Failure> {
    let (seen, segments) = look(dir)?;
    let published = published(dir, &seen)?.filter(|published| !published.is_stale);
    if watch && published.is_none() {
        return Err(Failure::new(
            OTHER,
            format!(
                "nobody publishes figures of {}: the process that has it open does so if it was told to, with \
                 Options::publish_stats",
                seen.dir()
            ),
        ));
    }
    let count = |of: fn(&SegmentState) -> bool| segments.iter().filter(|info| of(&info.state)).count() as u64;
    let files = [
        ("segments", segments.len() as u64),
        ("sealed", count(|state| matches!(state, SegmentState::Sealed { .. }))),
        ("empty", count(|state| matches!(state, SegmentState::Empty))),
        ("damaged", count(|state| matches!(state, SegmentState::Damaged(_)))),
        ("disk_bytes", segments.iter().map(|info| info.bytes).sum()),
    ];
    let mut out = out();
    if json {
        let files = object(files.map(|(name, number)| (name, number.into())));
        let age = published.as_ref().and_then(|published| published.age).map(|age| age.as_millis() as u64);
        let figures = published.map_or(Json::Null, |published| Json::Object(published.figures));
        let line = object([("files", Json::Object(files)), ("published", figures), ("age_ms", age.into())]);
        write_json(&mut out, line)?;
    } else {
        if watch && io::stdout().is_terminal() {
            // Clears the screen and begins at its top.
            out.write_all(b"\x1b[2J\x1b[H")?;
        }
        match &published {
            Some(published) => write_published(&mut out, published)?,
            None => {
                writeln!(
                    out,
                    "No process publishes figures (Options::publish_stats). What the files show:\n"
                )?;
            }
        }
        for (name, number) in files {
            writeln!(out, "{name:<22} {}", number_as(name, number))?;
        }
    }
    Ok(out.flush()?)
}

fn write_published(out: &mut impl Write, published: &Published) -> io::Result<()> {
    let figure = |name| published.figures.get(name).cloned().unwrap_or_default();
    let age = published.age.map_or(String::new(), |age| format!(", {:.1} s ago", age.as_secs_f64()));
    writeln!(out, "process {}{age}, lsn {}", figure("pid"), figure("last_lsn"))?;
    writeln!(out, "{}\n", figure("health").as_str().unwrap_or_default())?;
    let Json::Object(stats) = figure("stats") else { return Ok(()) };
    let mut summaries = table(&["", "count", "half", "90 %", "99 %", "99.9 %", "most"], &[1, 2, 3, 4, 5, 6]);
    for (name, value) in &stats {
        if let Json::Object(summary) = value {
            let of = |part| summary.get(part).and_then(Json::as_u64).unwrap_or_default();
            let row = ["p50", "p90", "p99", "p999", "max"].map(|part| number_as(name, of(part)));
            summaries.add_row([name.clone(), of("count").to_string()].into_iter().chain(row));
        }
    }
    write_table(out, &summaries)?;
    writeln!(out)?;
    for (name, value) in &stats {
        if let Some(number) = value.as_u64() {
            writeln!(out, "{name:<22} {}", number_as(name, number))?;
        }
    }
    writeln!(out, "\nfiles")
}

/// A number with its unit, which is in its name.
fn number_as(name: &str, number: u64) -> String {
    if name.contains("_nanos") {
        nanos(number)
    } else if name.ends_with("_bytes") {
        show::bytes(number)
    } else {
        number.to_string()
    }
}
