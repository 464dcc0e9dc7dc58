//! A small file system, filled up: what does not fit is refused, what was accepted stays, and room that is made is
//! used.

use crate::system::{Fs, Mounted, run, said, this};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Options, Token, Tokens};

/// Room that is left to the store on a disk that is larger than it takes.
const ROOM_BYTES: u64 = 3 << 20;
/// How often it is filled up and given room again.
const ROUNDS: usize = 3;
const BALLAST: &str = "ballast";

/// A full disk to be: ext4, XFS or btrfs, or memory. Says how much was written, and what refused.
pub fn on(fs: Option<Fs>, room: &Path) -> Result<String, String> {
    let Some(fs) = fs else {
        let mounted = Mounted::tmpfs(1 << 20)?;
        let report = said(this("fill")?.arg(mounted.path()))?;
        return mounted.unmount().map(|()| report);
    };
    let image = room.join(format!("small-{}", fs.name()));
    fs.make(&image, true)?;
    let mounted = Mounted::image(&image)?;
    let filled = said(this("fill")?.arg(mounted.path()));
    let shown = filled.and_then(|report| Ok((report, said(this("count")?.arg(mounted.path()))?)));
    mounted.unmount()?;
    let (report, shown) = shown?;
    let mounted = Mounted::image(&image)?;
    let again = said(this("count")?.arg(mounted.path()));
    mounted.unmount()?;
    if again? != shown {
        return Err(format!("mounted again, it shows other than {shown}"));
    }
    Ok(report)
}

/// How many keys there are, and a sum over all of them: to be compared.
pub fn count(dir: &Path) -> Result<String, String> {
    let (_db, rows) = open(&dir.join("data")).map_err(|e| format!("opening: {e}"))?;
    let (mut keys, mut sum) = (0, 0u64);
    for item in rows.iter() {
        let (key, value) = item.map_err(|e| format!("a read: {e}"))?;
        let bytes = key.iter().chain(value.iter());
        sum = bytes.fold(sum, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte as u64))
            ^ value.token().get();
        keys += 1;
    }
    Ok(format!("{keys} keys, {sum:x}"))
}

fn token(number: u64) -> Token {
    Token::new(number).expect("in range")
}

fn open(dir: &Path) -> Result<(Db, Keyspace), Error> {
    let db = Options::new().segment_bytes(64 << 10).open(dir)?;
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    Ok((db, rows))
}

/// What was acknowledged.
type Accepted = BTreeMap<u64, (u64, usize)>;

fn value(number: u64, len: usize) -> Vec<u8> {
    vec![number as u8; len]
}

fn holds(rows: &Keyspace, accepted: &Accepted) -> Result<(), String> {
    for (key, &(number, len)) in accepted {
        let found = rows.get(&key.to_le_bytes()).map_err(|e| format!("a read: {e}"))?;
        if found.as_deref() != Some(&value(number, len)[..]) {
            return Err(format!("key {key} of write {number} is not as it was acknowledged"));
        }
        let late = rows.put(token(number - 1), &key.to_le_bytes(), b"late");
        if number > 1 && !matches!(late, Err(Error::Fenced { .. })) {
            return Err(format!("a late write got {late:?}"));
        }
    }
    Ok(())
}

/// Takes all but a little of the room.
fn ballast(dir: &Path) -> Result<(), String> {
    let bytes = free(dir)?.saturating_sub(ROOM_BYTES);
    let file = dir.join(BALLAST);
    let path = file.to_str().ok_or("a path that is not UTF-8")?;
    if bytes > 0 { run("fallocate", &["-l", &bytes.to_string(), path]).map(drop) } else { Ok(()) }
}

fn free(dir: &Path) -> Result<u64, String> {
    let bytes = run("stat", &["-f", "-c", "%a %S", dir.to_str().ok_or("a path")?])?;
    let numbers: Vec<u64> = bytes.split(' ').filter_map(|n| n.parse().ok()).collect();
    Ok(numbers.iter().product())
}

/// Writes until a write is refused, over and over, in a directory that is a file system of its own.
pub fn fill(dir: &Path) -> Result<String, String> {
    ballast(dir)?;
    let data = dir.join("data");
    let show = |e: Error| e.to_string();
    let (mut db, mut rows) = open(&data).map_err(|e| format!("opening: {e}"))?;
    let mut accepted = Accepted::new();
    let (mut number, mut refusals) = (1, Vec::new());
    for round in 0..ROUNDS {
        let error = loop {
            number += 1;
            let (key, len) = (number % 100_000, 1 + (number as usize * 7919) % 3000);
            match rows.put(token(number), &key.to_le_bytes(), &value(number, len)) {
                Ok(_) => drop(accepted.insert(key, (number, len))),
                Err(error) => break error,
            }
            if number > 100_000 * (round as u64 + 1) {
                return Err("it never fills up".to_owned());
            }
        };
        let what = format!("round {round}, after {number} writes: {error:?}");
        let kind = if matches!(error, Error::NoSpace { .. }) { "NoSpace" } else { "Indeterminate" };
        refusals.push(format!("{kind} after {number}"));
        match error {
            Error::NoSpace { .. } => {
                if !db.health().is_writable() {
                    return Err(format!("{what}: refused for room, and closed to writes"));
                }
            }
            // Copy on write: the sync finds out. What it answered is known after the next open only.
            Error::Indeterminate { .. } => {
                db.close().err();
                drop(rows);
                (db, rows) = open(&data).map_err(|e| format!("{what}: opening: {e}"))?;
                let key = number % 100_000;
                if let Some(found) = rows.get(&key.to_le_bytes()).map_err(show)?
                    && found.token().get() == number
                {
                    accepted.insert(key, (number, found.len()));
                }
            }
            _ => return Err(what),
        }
        holds(&rows, &accepted).map_err(|e| format!("{what}: {e}"))?;
        // Beside the store that has it open, and of a copy that nobody has: reading takes no byte.
        db.close().map_err(|e| format!("{what}: closing: {e}"))?;
        drop(rows);
        let reader = Options::new().read_only().open(&data).map_err(|e| format!("{what}: to read: {e}"))?;
        for (name, options) in reader.keyspaces() {
            let rows = reader.keyspace(&name, options).map_err(show)?;
            let found = rows.iter().filter_map(Result::ok).count();
            if found != accepted.len() {
                return Err(format!("{what}: a reader sees {found} keys, not {}", accepted.len()));
            }
        }
        drop(reader);
        (db, rows) = match open(&data) {
            Ok(opened) => opened,
            // An open needs a segment to go on in; without room for one it says so.
            Err(Error::NoSpace { .. }) => {
                make_room(dir)?;
                open(&data).map_err(|e| format!("{what}: opening with room again: {e}"))?
            }
            Err(error) => return Err(format!("{what}: opening: {error}")),
        };
        holds(&rows, &accepted).map_err(|e| format!("{what}, reopened: {e}"))?;
        // Deletes have segments kept back for them, and make room.
        let doomed: Vec<u64> = accepted.keys().copied().filter(|key| key % 4 != round as u64 % 4).collect();
        for key in doomed {
            number += 1;
            match rows.delete(token(number), &key.to_le_bytes()) {
                Ok(_) => drop(accepted.remove(&key)),
                Err(Error::NoSpace { .. }) => break,
                Err(error) => return Err(format!("{what}: a delete: {error}")),
            }
        }
        number += 1;
        let used = db.compact().and_then(|_| rows.put(token(number), b"room again", b"is used"));
        match used {
            Ok(_) => {}
            // Where the file system needs room to make room: the next write succeeds, without opening again.
            Err(Error::NoSpace { .. }) if dir.join(BALLAST).exists() => {
                make_room(dir)?;
                let used = rows.put(token(number), b"room again", b"is used");
                used.map_err(|e| format!("{what}: with room again: {e}"))?;
            }
            Err(error) => return Err(format!("{what}: after deletes: {error}")),
        }
        rows.delete(token(number), b"room again").map_err(show)?;
        if !dir.join(BALLAST).exists() {
            ballast(dir)?;
        }
    }
    holds(&rows, &accepted)?;
    db.close().map_err(show)?;
    Ok(format!("{} keys left, {}", accepted.len(), refusals.join(", ")))
}

fn make_room(dir: &Path) -> Result<(), String> {
    match fs::remove_file(dir.join(BALLAST)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{BALLAST}: {error}")),
        _ => run("sync", &["-f", dir.to_str().ok_or("a path that is not UTF-8")?]).map(drop),
    }
}
