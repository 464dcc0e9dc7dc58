//! What a store shows, to be compared with the model as a whole.

use super::model::{Call, Change, KEYS, Kind, Model, SPACES, Said, Valued, fence_of, options};
use std::sync::Arc;
use tidewall::storage::SimDisk;
use tidewall::{Db, Error, Keyspace, Lsn, ManualClock, OperationId, Options, ReadMode, Token};

pub const SEGMENT_BYTES: u32 = 16 << 10;

/// Opens the store on a simulated disk. The seed must differ from open to open: lives must. With an odd one
/// it reads with positioned reads; where its second bit is clear it writes index files, all the time.
pub fn open(disk: &SimDisk, clock: &ManualClock, seed: u64) -> tidewall::Result<Db> {
    options_of_sim(disk, clock, seed).open("sim")
}

/// As [`open`], reading in one mode.
pub fn open_reading(disk: &SimDisk, clock: &ManualClock, seed: u64, mode: ReadMode) -> tidewall::Result<Db> {
    options_of_sim(disk, clock, seed).read_mode(mode).open("sim")
}

/// What [`open`] opens with.
pub fn options_of_sim(disk: &SimDisk, clock: &ManualClock, seed: u64) -> Options {
    // The store of some seeds makes larger segments: so that spares of the size before are outgrown.
    let is_larger = seed >> 10 & 7 == 5;
    let mode = if seed.is_multiple_of(2) { ReadMode::Map } else { ReadMode::Pread };
    Options::new()
        .storage(disk.clone())
        .clock(clock.clone())
        .deterministic(seed)
        .read_mode(mode)
        .without_threads()
        // Only when asked for: so that every call takes the lsn that the model says.
        .compaction(false)
        .segment_bytes(SEGMENT_BYTES << u32::from(is_larger))
        .index_every(if seed & 2 == 0 { 1 } else { u64::MAX })
}

/// Whether a file is an index.
pub fn is_index(name: &str) -> bool {
    name.starts_with("INDEX-")
}

/// The same disk without its index file.
pub fn without_index(disk: &SimDisk) -> SimDisk {
    let scanned = disk.kill();
    scanned.file_names().iter().filter(|name| is_index(name)).for_each(|name| scanned.remove_file(name));
    scanned
}

/// Everything a user sees of a keyspace: values with their marks and lsns, and the marks of the fences.
#[derive(PartialEq, Eq, Debug)]
pub struct Shown {
    pub values: Vec<(&'static [u8], Valued)>,
    pub marks: Vec<Option<u64>>,
}

impl Model {
    pub fn shown(&self) -> Vec<Shown> {
        let spaces = self.spaces.iter().enumerate();
        spaces
            .map(|(at, space)| Shown {
                values: space.values.iter().map(|(&key, value)| (key, value.clone())).collect(),
                marks: KEYS.iter().map(|key| self.mark(at, key)).collect(),
            })
            .collect()
    }
}

/// The keyspaces there are, which must be the first ones of [`SPACES`] with their options.
pub fn keyspaces(db: &Db) -> Vec<Keyspace> {
    let found = db.keyspaces();
    for (at, (name, created)) in found.iter().enumerate() {
        assert_eq!((name.as_str(), *created), (SPACES[at].0, options(at)), "a keyspace came back as another");
    }
    found.iter().map(|(name, options)| db.keyspace(name, *options).expect("it exists")).collect()
}

/// What the store shows, read in three ways that must agree: key by key, forwards and backwards.
pub fn shown(db: &Db) -> tidewall::Result<Vec<Shown>> {
    let mut all = Vec::new();
    for space in keyspaces(db) {
        let mut values = Vec::new();
        for key in KEYS {
            let value = space.get(key)?;
            assert_eq!(space.contains_key(key)?, value.is_some());
            if let Some(value) = value {
                values.push((key, (value.bytes().into(), value.token().get(), value.lsn().get())));
            }
        }
        let listed = |iter: &mut dyn Iterator<Item = tidewall::Result<(Vec<u8>, tidewall::Value)>>| {
            iter.map(|item| item.map(|(key, value)| (key, value.lsn().get()))).collect::<Result<Vec<_>, _>>()
        };
        let expected: Vec<_> = values.iter().map(|(key, (_, _, lsn))| (key.to_vec(), *lsn)).collect();
        assert_eq!(listed(&mut space.iter())?, expected, "a scan differs from look-ups");
        let mut backwards = listed(&mut space.iter().rev())?;
        backwards.reverse();
        assert_eq!(backwards, expected, "a scan backwards differs");
        let marks = KEYS.iter().map(|key| Ok(space.mark(key)?.map(|mark| mark.get())));
        all.push(Shown { values, marks: marks.collect::<tidewall::Result<_>>()? });
    }
    Ok(all)
}

/// Refusals that must come in this state, and leave no trace: stale tokens, and retries of the last
/// numbered operation of each fence.
pub fn probe(db: &Db, model: &Model) {
    for (at, space) in keyspaces(db).iter().enumerate() {
        for key in KEYS {
            let Some(fence) = model.spaces[at].fences.get(fence_of(at, key)) else { continue };
            if model.mark(at, key).is_some_and(|mark| mark > 1) {
                let put = |token| {
                    let change = Change { kind: Kind::Put, space: at, token, key, value: Arc::default() };
                    Call::Write { changes: vec![change], expect: Vec::new(), op: None }
                };
                let token = model.mark(at, key).expect("checked above") - 1;
                let expected = model.clone().answer(&put(token));
                let said = say(space.put(Token::new(token).unwrap(), key, b"late").map(done));
                assert!(expected.contains(&said), "a stale token got {said:?} instead of {expected:?}");
            }
            if let Some((op, lsn)) = fence.last
                && !model.spaces[at].is_below_floor(fence.mark)
            {
                let token = Token::new(fence.mark).unwrap();
                let said = say(space.put_operation(token, OperationId::new(op), key, b"again").map(done));
                assert_eq!(said, Said::Duplicate(lsn), "a retry of operation {op} on {key:?}");
            }
        }
    }
}

pub fn done(lsn: Lsn) -> Said {
    Said::Done(lsn.get())
}

/// An answer in the words of the model.
pub fn say(result: tidewall::Result<Said>) -> Said {
    match result {
        Ok(said) => said,
        Err(Error::Fenced { mark, last_operation, .. }) => Said::Fenced(mark.get(), last_operation),
        Err(Error::UnknownToken { mark, .. }) => Said::Unknown(mark.get()),
        Err(Error::TokenJump { highest, .. }) => Said::Jump(highest.get()),
        Err(Error::StaleOperation { last, .. }) => Said::Stale(last.get()),
        Err(Error::Duplicate { lsn }) => Said::Duplicate(lsn.get()),
        Err(Error::Conflict { found, .. }) => Said::Conflict(found),
        Err(Error::InvalidArgument(_)) => Said::Invalid,
        Err(Error::Held { .. }) => Said::Held,
        Err(other) => Said::Failed(other.to_string()),
    }
}

/// A failure of the disk has one of these forms, and never looks like a refusal.
pub fn check_failure(error: &Error) {
    let known = matches!(
        error,
        Error::Indeterminate { .. } | Error::Poisoned { .. } | Error::NoSpace { .. } | Error::Io { .. }
    ) || !matches!(say(Err(error.clone())), Said::Failed(_));
    assert!(known, "an answer of an unexpected kind: {error:?}");
}
