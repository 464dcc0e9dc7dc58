//! `grants`: the last grant of each fence, as the log has it; beside a live store.
//!
//! Renewals and expiries stand in no log, so what is said here of a lease is only what ended it for certain.

use crate::args::Grants;
use crate::bytes;
use crate::failure::{DAMAGED, Failure};
use crate::look::{is_unlisted, look};
use crate::show::{nanos, object, out, table, write_json, write_table};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use tidewall::{Inspection, LogChange, LogOp, Lsn, Mark, OwnerId, SegmentState, Ttl};

/// Segments may go while they are read; then what was live in them is in others, and all is read again.
const TRIES: usize = 5;

struct Grant {
    lsn: Lsn,
    token: Mark,
    owner: OwnerId,
    ttl: Ttl,
    incarnation: u64,
}

/// What the log says of leases. Ops lie in it in any order where they were carried: each counts as of its own lsn.
#[derive(Default)]
struct Told {
    keyspaces: BTreeMap<u16, String>,
    grants: BTreeMap<(u16, Vec<u8>), Grant>,
    /// The highest token that was given back, and the highest mark that was raised without a value.
    released: BTreeMap<(u16, Vec<u8>), Mark>,
    raised: BTreeMap<(u16, Vec<u8>), Mark>,
    /// The highest floor, and whether it fences its own token.
    floors: BTreeMap<u16, (Mark, bool)>,
    damage: Vec<String>,
}

impl Told {
    fn take(&mut self, op: LogOp) {
        let (space, token) = (op.keyspace, op.mark);
        match op.what {
            LogChange::Keyspace { name, .. } => drop(self.keyspaces.insert(space, name)),
            LogChange::Grant { fence, owner, ttl, incarnation } => {
                let grant = Grant { lsn: op.lsn, token, owner, ttl, incarnation };
                let last = self.grants.entry((space, fence)).or_insert_with(|| Grant { ..grant });
                if last.lsn < grant.lsn {
                    *last = grant;
                }
            }
            LogChange::Release { fence } => raise(&mut self.released, (space, fence), token),
            LogChange::Raise { fence, .. } => raise(&mut self.raised, (space, fence), token),
            LogChange::Floor { is_exclusive } => raise(&mut self.floors, space, (token, is_exclusive)),
            _ => {}
        }
    }

    /// What ended a lease for certain.
    fn end(&self, at: &(u16, Vec<u8>), grant: &Grant, incarnation: u64) -> Option<&'static str> {
        let is_below = |marks: &BTreeMap<_, Mark>| marks.get(at).is_some_and(|&mark| grant.token < mark);
        let floor = self.floors.get(&at.0);
        if self.released.get(at) == Some(&grant.token) {
            Some("released")
        } else if is_below(&self.raised)
            || floor.is_some_and(|&floor| (grant.token, !floor.1) < (floor.0, true))
        {
            Some("fenced")
        } else if grant.incarnation != incarnation {
            Some("reopened")
        } else {
            None
        }
    }
}

fn raise<K: Ord, V: Ord + Copy>(known: &mut BTreeMap<K, V>, key: K, value: V) {
    let highest = known.entry(key).or_insert(value);
    *highest = value.max(*highest);
}

/// Reads all of the log. `None`: a segment went meanwhile.
fn read(dir: &Path, seen: &Inspection, segments: Vec<u32>) -> Result<Option<Told>, Failure> {
    let mut told = Told::default();
    for segment in segments {
        let log = match seen.log(segment) {
            Ok(log) => log,
            Err(_) if Inspection::of(dir)?.log(segment).is_err_and(is_unlisted) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        told.damage.extend(log.damage.map(|what| format!("{segment:06}.seg at offset {}: {what}", log.end)));
        log.frames.into_iter().flat_map(|frame| frame.ops).for_each(|op| told.take(op));
    }
    Ok(Some(told))
}

pub fn grants(args: &Grants) -> Result<(), Failure> {
    let dir = &args.dir.dir;
    let hex = args.shape.hex;
    let prefix = bytes::parse(&args.prefix, hex)?;
    for _ in 0..TRIES {
        let (seen, listed) = look(dir)?;
        let is_begun = |state: &SegmentState| *state != SegmentState::Empty;
        let segments = listed.into_iter().filter(|info| is_begun(&info.state)).map(|info| info.segment);
        let Some(told) = read(dir, &seen, segments.collect())? else { continue };
        if let Some(name) = &args.keyspace
            && !told.keyspaces.values().any(|known| known == name)
        {
            return Err(Failure::usage(format!("there is no keyspace {name:?}")));
        }
        write(args, &told, &prefix, seen.incarnation())?;
        return match told.damage.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(DAMAGED, told.damage.join("\ntidewall: "))),
        };
    }
    Err(Failure::new(crate::failure::OTHER, "segments go faster than they are read: try again"))
}

fn write(args: &Grants, told: &Told, prefix: &[u8], incarnation: u64) -> Result<(), Failure> {
    let mut out = out();
    let mut table = table(&["keyspace", "fence", "token", "owner", "ttl", "ended"], &[2]);
    let mut open = 0;
    for (at, grant) in &told.grants {
        let name = told.keyspaces.get(&at.0).map_or("?", String::as_str);
        if !at.1.starts_with(prefix) || args.keyspace.as_ref().is_some_and(|of| of != name) {
            continue;
        }
        let end = told.end(at, grant, incarnation);
        open += end.is_none() as usize;
        let ttl = grant.ttl.duration().map(|ttl| ttl.as_nanos() as u64);
        if args.shape.json {
            let mut line = object([("keyspace", name.into())]);
            bytes::put_json(&mut line, "fence", &at.1);
            line.extend(object([
                ("token", grant.token.get().into()),
                ("owner", grant.owner.to_string().into()),
                ("ttl_ms", ttl.map(|nanos| nanos.div_ceil(1_000_000)).into()),
                ("lsn", grant.lsn.get().into()),
                ("ended", end.into()),
            ]));
            write_json(&mut out, line)?;
            continue;
        }
        table.add_row([
            name.escape_debug().to_string(),
            bytes::show(&at.1, args.shape.hex),
            grant.token.to_string(),
            grant.owner.to_string(),
            ttl.map_or("without an end".to_owned(), nanos),
            end.unwrap_or("?").to_owned(),
        ]);
    }
    if !args.shape.json {
        write_table(&mut out, &table)?;
        if open > 0 {
            writeln!(
                out,
                "\n?: live, or run out. Renewals and expiries stand in no log: whether a lease is live knows only the\n\
                 process that has the store open (Keyspace::holders)."
            )?;
        }
    }
    Ok(out.flush()?)
}
