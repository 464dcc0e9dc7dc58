//! `dump`: a store as JSON lines, in the order in which `load` can write them again.
//!
//! The names of the fences stand in the log, and what each is worth is asked of the store, which is open
//! read-only and so locked: the files stay as they are meanwhile.

use crate::args::Dump;
use crate::bytes;
use crate::failure::Failure;
use crate::read::describe_options;
use crate::show::{object, out, progress, write_json};
use crate::store::{keyspace, open_to_read};
use serde_json::{Map, Value as Json};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::io::{self, Write};
use tidewall::{Db, Inspection, Keyspace, LogChange, Scope, SegmentState};

/// The version of the form of a dump.
pub const VERSION: u64 = 1;

struct Lines<W: Write> {
    out: W,
    count: u64,
}

impl<W: Write> Lines<W> {
    fn write(&mut self, line: Map<String, Json>) -> io::Result<()> {
        self.count += 1;
        write_json(&mut self.out, line)
    }
}

pub fn dump(args: &Dump) -> Result<(), Failure> {
    let db = open_to_read(&args.dir.dir)?;
    let seen = Inspection::of(&args.dir.dir)?;
    let spaces = match &args.keyspace {
        Some(name) => vec![keyspace(&db, name)?],
        None => db.keyspaces().iter().map(|(name, _)| keyspace(&db, name)).collect::<Result<_, _>>()?,
    };
    let fences = fences(&db, &seen)?;
    let mut lines = Lines { out: out(), count: 0 };
    lines.write(object([
        ("tidewall_dump", VERSION.into()),
        ("store_id", format!("{:032x}", seen.store_id()).into()),
        ("counter", db.highest_token()?.map_or(0, |mark| mark.get()).into()),
        ("lsn", db.last_lsn().get().into()),
    ]))?;
    let bar = progress(Some(fences.iter().map(|fences| fences.len() as u64).sum()), "fences");
    for (space, names) in db.keyspaces().iter().zip(&fences) {
        if let Some(space) = spaces.iter().find(|known| known.name() == space.0) {
            dump_keyspace(&mut lines, space, names, &bar)?;
        }
    }
    bar.finish_and_clear();
    let count = lines.count;
    lines.write(object([("end", true.into()), ("lines", count.into())]))?;
    Ok(lines.out.flush()?)
}

/// The names of the fences of each keyspace, as far as the log tells of them: that is all that have a mark.
fn fences(db: &Db, seen: &Inspection) -> Result<Vec<BTreeSet<Vec<u8>>>, Failure> {
    let spaces: Vec<Keyspace> =
        db.keyspaces().iter().map(|(name, _)| keyspace(db, name)).collect::<Result<_, _>>()?;
    let mut fences = vec![BTreeSet::new(); spaces.len()];
    let segments = seen.segments()?;
    let bar = progress(Some(segments.len() as u64), "reading the log");
    for info in segments {
        bar.inc(1);
        if info.state == SegmentState::Empty {
            continue;
        }
        for op in seen.log(info.segment)?.frames.into_iter().flat_map(|frame| frame.ops) {
            // A keyspace that only a torn tail knows was left out.
            let Some(at) = (op.keyspace as usize).checked_sub(1).filter(|&at| at < spaces.len()) else {
                continue;
            };
            let name = match op.what {
                LogChange::Put { key, .. } | LogChange::Delete { key } => spaces[at].fence(&key).to_vec(),
                LogChange::Grant { fence, .. } | LogChange::Raise { fence, .. } => fence,
                _ => continue,
            };
            fences[at].insert(name);
        }
    }
    bar.finish_and_clear();
    Ok(fences)
}

fn dump_keyspace<W: Write>(
    lines: &mut Lines<W>,
    space: &Keyspace,
    names: &BTreeSet<Vec<u8>>,
    bar: &indicatif::ProgressBar,
) -> Result<(), Failure> {
    let line_of = || object([("keyspace", space.name().into())]);
    let mut line = line_of();
    describe_options(&mut line, space.options());
    line.insert("needs_floor".to_owned(), space.needs_floor().into());
    lines.write(line)?;
    // Every key has a fence, and every fence that was ever written to a mark.
    let mut marks = Vec::new();
    for name in names {
        if let Some(mark) = space.mark(name)? {
            marks.push((Reverse(mark), name));
        }
    }
    marks.sort();
    let floor = space.floor();
    for (Reverse(mark), name) in marks {
        bar.inc(1);
        for (token, key) in values(space, name)? {
            let Some(value) = space.get(&key)? else { continue };
            let mut line = line_of();
            bytes::put_json(&mut line, "key", &key);
            bytes::put_json(&mut line, "value", &value);
            line.insert("token".to_owned(), token.into());
            lines.write(line)?;
        }
        // A mark of its own means nothing at or below the floor.
        if floor.is_none_or(|floor| mark > floor.mark) {
            let mut line = line_of();
            bytes::put_json(&mut line, "fence", name);
            line.insert("mark".to_owned(), mark.get().into());
            lines.write(line)?;
        }
    }
    if let Some(floor) = floor {
        let mut line = line_of();
        line.insert("floor".to_owned(), floor.mark.get().into());
        line.insert("exclusive".to_owned(), floor.is_folded.into());
        lines.write(line)?;
    }
    Ok(())
}

/// The keys of a fence that have a value, with their tokens: the oldest token first, as they can be written.
fn values(space: &Keyspace, fence: &[u8]) -> Result<Vec<(u64, Vec<u8>)>, Failure> {
    let mut keys = Vec::new();
    if space.options().get_scope() == Scope::Key {
        keys.extend(space.get(fence)?.map(|value| (value.token().get(), fence.to_vec())));
    } else {
        for item in space.prefix(fence) {
            let (key, value) = item?;
            if space.fence(&key) == fence {
                keys.push((value.token().get(), key));
            }
        }
    }
    keys.sort();
    Ok(keys)
}
