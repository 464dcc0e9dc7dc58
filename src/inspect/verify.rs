//! Everything checked, nothing changed: what must hold between ops, on top of what holds of each.

use super::{FaultKind, Faults, Intact, Report, Survey, Surveyed, survey, walk};
use crate::db::take_lock;
use crate::engine::KeyspaceState;
use crate::error::{Error, Result};
use crate::format::name;
use crate::log::guard::Pins;
use crate::log::segment::{Body, OpRef, Segment};
use crate::look_up::{is_named, state_of};
use crate::op::{Class, GrantValue, KeyspaceValue, Kind, check_keyspace_name};
use crate::options::{Options, Progress, Scope, Tokens};
use crate::storage::{Disk, Storage};
use crate::types::{KeyspaceId, Location, Lsn, Mark, SegmentId};
use std::collections::BTreeMap;
use std::path::Path;

/// Reads and checks every byte of a store that is not open, and changes none: the list of segments in both
/// copies, headers, frames and their order, ops, values, key tables, seals, links, and that no mark falls.
///
/// It does not stop at a fault but lists all of them. A checkpoint is verified in the same way, also on a
/// read-only medium.
///
/// ```
/// # let scratch = tempfile::tempdir()?;
/// # let dir = scratch.path().join("data");
/// let db = tidewall::Db::open(&dir)?;
/// db.keyspace("jobs", tidewall::KeyspaceOptions::new())?;
/// db.close()?;
///
/// let report = tidewall::verify(&dir)?;
/// assert!(report.is_sound());
/// assert_eq!(report.ops, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Locked`]: the store is open; verify a checkpoint of it. [`Error::UpgradeRequired`]: a newer
/// version wrote it. [`Error::Io`]: there is no store, or the directory cannot be read. Damage is no error: it
/// is in the report.
pub fn verify(dir: impl AsRef<Path>) -> Result<Report> {
    Verify::new().run(dir)
}

/// A verification with a callback: see [`verify`].
#[derive(Debug, Default)]
#[must_use]
pub struct Verify {
    options: Options,
}

impl Verify {
    /// Without a callback.
    pub fn new() -> Self {
        Self::default()
    }

    /// Called once per segment.
    pub fn progress(mut self, callback: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.options = self.options.progress(callback);
        self
    }

    /// Verifies the store in `dir`.
    ///
    /// # Errors
    /// As [`verify`].
    pub fn run(self, dir: impl AsRef<Path>) -> Result<Report> {
        let dir = dir.as_ref();
        let opened = Disk::existing(dir);
        self.run_on(opened.map_err(|e| Error::io(format!("opening the directory {}", dir.display()), e))?)
    }

    /// As [`Verify::run`], in another kind of directory than one of this machine.
    ///
    /// # Errors
    /// As [`verify`].
    pub fn run_on(self, storage: impl Storage) -> Result<Report> {
        let _lock = take_lock(&storage, &Options::new().read_only())?;
        let mut survey = survey(&storage)?;
        let segments = std::mem::take(&mut survey.segments);
        let mut report = Report {
            faults: Vec::new(),
            notes: Vec::new(),
            is_checkpoint: survey.block.as_ref().is_some_and(|block| block.is_checkpoint),
            segments: segments.len() as u32,
            frames: 0,
            ops: 0,
            bytes: 0,
            lsn: Lsn::ZERO,
            counter: Mark::from_number(0),
        };
        let mut log = Log::new(&segments);
        log.find_keyspaces(&mut survey, &segments);
        for (done, segment) in segments.iter().enumerate() {
            if let Some(callback) = &self.options.progress {
                callback(Progress {
                    segments_done: done as u32,
                    segments_all: report.segments,
                    ops: report.ops,
                });
            }
            let bytes = survey.read(&*segment.file, &segment.name, segment.len);
            let mut each = |intact: &Intact<'_>, faults: &mut Faults| log.op(segment, intact, faults);
            let walked = walk(segment, &bytes, &mut survey.faults, &mut each);
            report.frames += walked.frames;
            report.ops += walked.ops;
            report.lsn = report.lsn.max(walked.last);
            log.counter(segment);
            if walked.tail_bytes > 0 {
                let (bytes, file) = (walked.tail_bytes, &segment.name);
                survey.notes.push(format!("{file} ends in {bytes} bytes that a crash left unfinished"));
            }
        }
        log.finish(&mut survey.faults);
        survey.check_stray(report.lsn);
        report.counter = Mark::from_number(log.counter);
        report.bytes = survey.bytes;
        report.notes = survey.notes;
        report.faults = survey.faults.0;
        Ok(report)
    }
}

/// The log so far.
struct Log {
    segments: BTreeMap<SegmentId, Segment>,
    /// Each with its floor, raised and folded, and the lsns that say so.
    keyspaces: BTreeMap<KeyspaceId, (KeyspaceState, [(u64, Lsn); 2])>,
    /// The first op of each keyspace that was not created before it.
    orphans: BTreeMap<KeyspaceId, (String, u32, Lsn)>,
    /// Links to where no op is: by file, offset and lsn, and the segment they lead into.
    broken: Vec<(String, u32, Lsn, SegmentId)>,
    counter: u64,
}

impl Log {
    fn new(segments: &[Surveyed]) -> Self {
        let readable = segments.iter().map(|segment| {
            let end = segment.seal.map_or(segment.len, |seal| seal.end.offset as usize).min(segment.len);
            let body = Body::Pread(end as u32);
            let (salt, file) = (segment.salt, segment.file.clone());
            (segment.id, Segment { id: segment.id, salt, file, body, pins: Pins::new() })
        });
        Log {
            segments: readable.collect(),
            keyspaces: BTreeMap::new(),
            orphans: BTreeMap::new(),
            broken: Vec::new(),
            counter: 0,
        }
    }

    /// The keyspaces that there are: compaction may have carried the op that creates one behind ops of it. What is wrong
    /// with them is told at their turn.
    fn find_keyspaces(&mut self, survey: &mut Survey, segments: &[Surveyed]) {
        let (bytes_read, faults) = (survey.bytes, survey.faults.0.len());
        for segment in segments.iter().filter(|segment| segment.seal.is_none_or(|seal| seal.keyspaces > 0)) {
            let bytes = survey.read(&*segment.file, &segment.name, segment.len);
            let mut each = |intact: &Intact<'_>, _: &mut Faults| {
                if intact.op.head.kind == Kind::Keyspace {
                    self.keyspace(&intact.op, &mut |_, _| {});
                }
            };
            walk(segment, &bytes, &mut survey.faults, &mut each);
        }
        survey.bytes = bytes_read;
        survey.faults.0.truncate(faults);
    }

    fn counter(&mut self, segment: &Surveyed) {
        let header = segment.header.map_or(0, |(header, _)| header.counter);
        self.counter = self.counter.max(header).max(segment.seal.map_or(0, |seal| seal.counter));
    }

    fn op(&mut self, segment: &Surveyed, intact: &Intact<'_>, faults: &mut Faults) {
        let op = &intact.op;
        let mut wrong = |kind, what: &str| {
            faults.add(kind, &segment.name, op.at.offset as u64, Some(op.lsn), what);
        };
        match op.head.kind {
            Kind::Keyspace => return self.keyspace(op, &mut wrong),
            Kind::Counter => {
                self.counter = self.counter.max(op.head.token);
                return;
            }
            _ => {}
        }
        let Some((keyspace, floors)) = self.keyspaces.get_mut(&op.head.keyspace) else {
            let orphan = (segment.name.clone(), op.at.offset, op.lsn);
            self.orphans.entry(op.head.keyspace).or_insert(orphan);
            return;
        };
        if op.head.kind != Kind::Release && keyspace.options.tokens == Tokens::Store {
            self.counter = self.counter.max(op.head.token);
        }
        match op.head.kind {
            Kind::Floor => {
                let (mark, lsn) = &mut floors[usize::from(op.value() == [1])];
                if op.head.token < *mark && op.lsn > *lsn {
                    wrong(FaultKind::Mark, "a floor falls along the log");
                }
                if op.lsn > *lsn {
                    (*mark, *lsn) = (op.head.token, op.lsn);
                }
            }
            Kind::Put | Kind::Delete => {
                let rises = keyspace.options.scope == Scope::Key;
                let found = follow(&self.segments, op.head.previous(), op, keyspace, Class::Key, op.key());
                let mut nowhere = check_link(found, op, rises, &mut wrong);
                if let Some(link) = op.head.fence() {
                    let fence = keyspace.fence_of(op.key());
                    let found = follow(&self.segments, link, op, keyspace, Class::Fence, fence);
                    nowhere = nowhere.or(check_link(found, op, true, &mut wrong));
                }
                self.broken.extend(nowhere.map(|into| (segment.name.clone(), op.at.offset, op.lsn, into)));
            }
            Kind::Grant if GrantValue::decode(op.value()).is_none() => {
                wrong(FaultKind::Op, "a grant without an owner");
            }
            Kind::Grant | Kind::Mark => match op.head.fence() {
                None => wrong(FaultKind::Link, "a fence op without its link"),
                Some(link) => {
                    let found = follow(&self.segments, link, op, keyspace, Class::Fence, op.key());
                    let nowhere = check_link(found, op, true, &mut wrong);
                    self.broken
                        .extend(nowhere.map(|into| (segment.name.clone(), op.at.offset, op.lsn, into)));
                }
            },
            Kind::Release | Kind::Keyspace | Kind::Counter => {}
        }
    }

    fn keyspace(&mut self, op: &OpRef<'_>, wrong: &mut dyn FnMut(FaultKind, &str)) {
        let name = std::str::from_utf8(op.key()).ok().filter(|name| check_keyspace_name(name).is_ok());
        let (Some(value), Some(name)) = (KeyspaceValue::decode(op.value()), name) else {
            return wrong(FaultKind::Op, "a keyspace with an impossible name or unknown options");
        };
        match self.keyspaces.get(&op.head.keyspace) {
            Some((known, ..)) if known.name == name && known.options == value.options => {}
            Some(_) => wrong(FaultKind::Op, "a keyspace created twice, with other options"),
            None => {
                let state =
                    KeyspaceState::new(op.head.keyspace, name.to_owned(), value.options, value.needs_floor);
                self.keyspaces.insert(op.head.keyspace, (state, [(0, Lsn::ZERO); 2]));
            }
        }
    }

    fn finish(&self, faults: &mut Faults) {
        for (id, (file, offset, lsn)) in &self.orphans {
            if !self.keyspaces.contains_key(id) {
                let what = "an op of a keyspace that was never created, as far as can be read";
                faults.add(FaultKind::Op, file, *offset as u64, Some(*lsn), what);
            }
        }
        for (file, offset, lsn, into) in &self.broken {
            // Where the segment it leads into is damaged, that is what is wrong.
            let name = name::segment(*into);
            if !faults.0.iter().any(|fault| fault.file == name) {
                let what = format!("a link to where no op is, in {name}");
                faults.add(FaultKind::Link, file, *offset as u64, Some(*lsn), what);
            }
        }
    }
}

/// What a link leads to.
enum Followed<'s> {
    Nothing,
    Op(OpRef<'s>),
    Wrong,
    /// To where no op verifies, in this segment: damage there, or a wrong link.
    Nowhere(SegmentId),
}

fn follow<'s>(
    segments: &'s BTreeMap<SegmentId, Segment>,
    link: Option<Location>,
    op: &OpRef<'_>,
    keyspace: &KeyspaceState,
    class: Class,
    name: &[u8],
) -> Followed<'s> {
    // What was carried names what stood there when it was first written.
    let Some(at) = link.filter(|_| !op.head.is_moved()) else { return Followed::Nothing };
    let Some(segment) = segments.get(&at.segment) else { return Followed::Nothing };
    match segment.op(at.offset) {
        Ok(found) if is_named(&found, keyspace, class, name) && found.lsn <= op.lsn => Followed::Op(found),
        Ok(_) => Followed::Wrong,
        Err(_) => Followed::Nowhere(at.segment),
    }
}

/// `rises`: both ops set the state of one fence, whose mark does not fall. Answers where a link that found no
/// op leads.
fn check_link(
    found: Followed<'_>,
    op: &OpRef<'_>,
    rises: bool,
    wrong: &mut dyn FnMut(FaultKind, &str),
) -> Option<SegmentId> {
    match found {
        Followed::Op(before) if rises && state_of(&before).mark > op.head.token => {
            wrong(FaultKind::Mark, "a mark falls along the log");
        }
        Followed::Wrong => wrong(FaultKind::Link, "a link to an op of another name"),
        Followed::Nowhere(into) => return Some(into),
        Followed::Op(_) | Followed::Nothing => {}
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::append::{frame_bytes, room};
    use crate::db::Db;
    use crate::log::pool::Need;
    use crate::op::{Links, Op};
    use crate::options::KeyspaceOptions;
    use crate::storage::SimDisk;

    /// A store with the keyspace 1, and what `write` appends to it that no verb would.
    fn found(write: impl FnOnce(&dyn Fn(Op<'_>) -> Location)) -> (Vec<FaultKind>, bool) {
        let disk = SimDisk::new();
        let options = Options::new().storage(disk.clone()).without_threads();
        let db = options.deterministic(1).segment_bytes(16 << 10).open("sim").unwrap();
        db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
        let engine = &db.shared.engine;
        write(&|op| {
            let room = room(frame_bytes(1, 100), 1);
            engine.with_room(room, Need::Privileged, |tail| engine.append_op(tail, &op)).unwrap().1
        });
        engine.commit_now().unwrap();
        let disk = disk.kill();
        let report = Verify::new().run_on(disk.clone()).unwrap();
        let kinds = report.faults.iter().map(|fault| fault.kind).collect();
        let opens: Result<Db> = Options::new().storage(disk).without_threads().deterministic(2).open("sim");
        (kinds, opens.is_ok())
    }

    fn op<'a>(kind: Kind, token: u64, key: &'a [u8], fence: Option<Option<Location>>) -> Op<'a> {
        let links = Links { fence, ..Links::default() };
        Op { kind, keyspace: KeyspaceId(1), token, key, value: b"", links }
    }

    fn alone(op: Op<'_>) -> (Vec<FaultKind>, bool) {
        found(|append| {
            append(op);
        })
    }

    #[test]
    fn a_mark_that_falls_is_found() {
        let falls = |token| {
            found(|append| {
                let first = append(op(Kind::Mark, 9, b"a", Some(None)));
                append(op(Kind::Mark, token, b"a", Some(Some(first))));
            })
        };
        assert_eq!(falls(9), (vec![], true));
        assert_eq!(falls(8), (vec![FaultKind::Mark], false));
        let version = |token| {
            found(|append| {
                let first = append(op(Kind::Put, 9, b"a", None));
                let links = Links { previous: Some(first), ..Links::default() };
                append(Op { links, ..op(Kind::Delete, token, b"a", None) });
            })
        };
        assert_eq!(version(9), (vec![], true));
        assert_eq!(version(8), (vec![FaultKind::Mark], false));
        let floors = |token| {
            found(|append| {
                append(Op { value: &[0], ..op(Kind::Floor, 9, b"", None) });
                append(Op { value: &[0], ..op(Kind::Floor, token, b"", None) });
            })
        };
        assert_eq!(floors(9).0, []);
        assert_eq!(floors(8).0, [FaultKind::Mark]);
    }

    /// Compaction carries the op that creates a keyspace behind others of it: those were only told to have one, and the
    /// store counted as sound while it did not open.
    #[test]
    fn what_lies_in_front_of_a_carried_keyspace_is_checked_too() {
        let falls = |token| {
            found(|append| {
                let of = |op: Op<'_>| append(Op { keyspace: KeyspaceId(2), ..op });
                let first = of(op(Kind::Mark, 9, b"a", Some(None)));
                of(op(Kind::Mark, token, b"a", Some(Some(first))));
                let value = KeyspaceValue { options: KeyspaceOptions::new(), needs_floor: false }.encode();
                append(Op {
                    keyspace: KeyspaceId(2),
                    value: &value,
                    ..op(Kind::Keyspace, 0, b"later", None)
                });
            })
        };
        assert_eq!(falls(9), (vec![], true));
        assert_eq!(falls(8), (vec![FaultKind::Mark], false));
    }

    #[test]
    fn a_link_that_leads_astray_is_found() {
        let astray = |key: &[u8], by: u32| {
            found(|append| {
                let first = append(op(Kind::Mark, 9, b"a", Some(None)));
                let link = Location { offset: first.offset + by, ..first };
                append(op(Kind::Mark, 9, key, Some(Some(link))));
            })
        };
        assert_eq!(astray(b"a", 0), (vec![], true));
        assert_eq!(astray(b"b", 0), (vec![FaultKind::Link], false));
        assert_eq!(astray(b"a", 1), (vec![FaultKind::Link], false));
        assert_eq!(alone(op(Kind::Mark, 9, b"a", None)), (vec![FaultKind::Link], false));
    }

    #[test]
    fn ops_that_mean_nothing_are_found() {
        let grant = op(Kind::Grant, 9, b"a", Some(None));
        assert_eq!(alone(grant), (vec![FaultKind::Op], false));
        let stray = Op { keyspace: KeyspaceId(7), ..op(Kind::Put, 9, b"a", None) };
        assert_eq!(alone(stray), (vec![FaultKind::Op], false));
        let options = KeyspaceOptions::new();
        let value = KeyspaceValue { options, needs_floor: false }.encode();
        let twice = Op { value: &value, ..op(Kind::Keyspace, 0, b"rows", None) };
        assert_eq!(alone(twice), (vec![FaultKind::Op], false));
        let nameless = Op { key: b"", ..twice };
        assert_eq!(alone(nameless), (vec![FaultKind::Op], false));
    }
}
