//! Damage behind the store's back: named, never cut, never believed; and the files stay as they are.
//!
//! What may be answered depends on what is hit. What is padding, a cache or one copy of two: the same state.
//! Frames of which something later proves that they were durable: `Corrupt`, naming the file. The last group
//! of a store that was killed, which nothing proves: a shorter log.
//!
//! `TIDEWALL_DAMAGE_EVERY=1` flips each bit of the compacted store and cuts each file to each of its lengths, not only many.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use support::Trying;
use support::model::{KEYS, SPACES, options};
use support::shown::{Shown, is_index, open, shown};
use tidewall::storage::{Crash, SimDisk};
use tidewall::{Db, Error, FaultKind, ManualClock, Options, ReadMode, Token, Tokens, Verify};

/// What a store shows, and what may be missing from it: nothing, or its last frames.
struct Subject {
    name: &'static str,
    disk: SimDisk,
    /// What it shows whole, and without its last frames: one less each.
    states: Vec<Vec<Shown>>,
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

/// Two segments and a bit, with marks, floors, deletes, grants, small values and large ones.
fn write(db: &Db, stop: impl Fn(u32) -> bool) {
    let mut step = 0;
    let mut go_on = || {
        step += 1;
        !stop(step)
    };
    let mut spaces = Vec::new();
    for (at, (name, ..)) in SPACES.iter().enumerate() {
        if !go_on() {
            return;
        }
        spaces.push(db.keyspace(name, options(at)).unwrap());
    }
    for round in 1..=3u64 {
        for (at, space) in spaces.iter().enumerate() {
            for (n, key) in KEYS[..4].iter().enumerate() {
                let token = match SPACES[at].2 {
                    Tokens::External => token(round),
                    _ => {
                        if !go_on() {
                            return;
                        }
                        space.lease(key).acquire().unwrap().token()
                    }
                };
                if !go_on() {
                    return;
                }
                let len = [10, 600, 40, 0, 300, 700, 5][(n + at) % 7];
                match (n as u64 + round) % 4 {
                    3 => space.delete(token, key).unwrap(),
                    _ => space.put(token, key, &vec![round as u8; len]).unwrap(),
                };
            }
        }
        if !go_on() {
            return;
        }
        spaces[5].raise_all(token(round)).unwrap();
    }
}

fn state_of(disk: &SimDisk) -> Vec<Shown> {
    shown(&open(&disk.kill(), &ManualClock::new(), 77).unwrap()).unwrap()
}

/// The store after so many steps, killed at once.
fn killed_after(steps: u32) -> SimDisk {
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), 3).unwrap();
    write(&db, |step| step > steps);
    disk.crash(Crash::None, 0)
}

/// With an index file, which covers all of the log.
fn closed() -> Subject {
    closed_with_seed(1)
}

fn closed_with_seed(seed: u64) -> Subject {
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), seed).unwrap();
    write(&db, |_| false);
    db.close().unwrap();
    let disk = disk.crash(Crash::None, 0);
    Subject { name: "closed", states: vec![state_of(&disk)], disk }
}

/// Written twice over, with marks folded, segments recycled and ops carried on; then closed.
fn compacted() -> Subject {
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), 1).unwrap();
    write(&db, |_| false);
    let rows = db.keyspace(SPACES[2].0, options(2)).unwrap();
    for n in 0..40u64 {
        rows.put(token(4), KEYS[n as usize % 3], &[n as u8; 1900]).unwrap();
    }
    let compacted = db.compact().unwrap();
    assert!(compacted.segments > 2, "{compacted:?}");
    // Into what was recycled, and beside what was carried on.
    for n in 0..12u64 {
        rows.put(token(5), KEYS[n as usize % 5], &[n as u8; 700]).unwrap();
    }
    db.compact().unwrap();
    rows.put(token(6), KEYS[1], b"the last").unwrap();
    db.close().unwrap();
    let disk = disk.crash(Crash::None, 0);
    let bytes: u64 = files(&disk).iter().map(|(_, len)| len).sum();
    assert!(bytes >= 64 << 10, "a store of {bytes} bytes is too small to say much");
    Subject { name: "compacted", states: vec![state_of(&disk)], disk }
}

/// Killed, without an index file: the last group is proven by nothing.
fn killed() -> Subject {
    const STEPS: u32 = 60;
    let disk = killed_after(STEPS);
    let states = (0..16).map(|less| state_of(&killed_after(STEPS - less))).collect();
    Subject { name: "killed", states, disk }
}

fn read_only(disk: &SimDisk, mode: ReadMode) -> tidewall::Result<Db> {
    Options::new().storage(disk.clone()).read_only().read_mode(mode).open("sim")
}

/// How the damaged stores answered.
#[derive(Default)]
struct Tally {
    same: AtomicU64,
    warned: AtomicU64,
    refused: AtomicU64,
    shorter: AtomicU64,
    at_reads: AtomicU64,
}

impl Tally {
    fn print(&self, what: &str) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        println!(
            "{what}: {} the same, {} of them with a warning; {} refused; {} shorter; {} refused at a read",
            get(&self.same),
            get(&self.warned),
            get(&self.refused),
            get(&self.shorter),
            get(&self.at_reads)
        );
    }

    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn is_named(error: &Error, disk: &SimDisk) -> bool {
    match error {
        Error::Corrupt { file, offset, .. } => {
            let len = disk.read_file(file).map_or(0, |bytes| bytes.len() as u64);
            file == "STORE" || file.ends_with(".seg") && *offset <= len.max(64 << 10)
        }
        _ => false,
    }
}

/// Opens a damaged store, to read and to write. At most `lost` frames may be missing afterwards.
fn judge(subject: &Subject, damaged: &SimDisk, lost: usize, what: &dyn Fn() -> String, tally: &Tally) {
    let before = damaged.image_hash();
    let tried = |result: &tidewall::Result<Vec<Shown>>, warnings: usize, lost: usize| match result {
        Ok(state) if *state == subject.states[0] => {
            Tally::count(&tally.same);
            if warnings > 0 {
                Tally::count(&tally.warned);
            }
        }
        Ok(state) if subject.states.iter().take(lost + 1).any(|allowed| allowed == state) => {
            Tally::count(&tally.shorter);
        }
        Ok(state) => panic!("{}: {} was not noticed: {state:?}", subject.name, what()),
        Err(error) => {
            assert!(is_named(error, damaged), "{}: {}: {error:?} names nothing", subject.name, what())
        }
    };
    // Writing is tried with all of them, reading only with a sample.
    let modes = match before % 8 {
        0 => &[ReadMode::Map, ReadMode::Pread][..],
        1 => &[ReadMode::Map],
        _ => &[],
    };
    for &mode in modes {
        let disk = damaged.kill();
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let db = read_only(&disk, mode)?;
            let warnings = db.report().warnings.len();
            shown(&db).map(|state| (state, warnings))
        }));
        let opened = opened.unwrap_or_else(|_| panic!("{}: {}: a panic", subject.name, what()));
        let warnings = opened.as_ref().map_or(0, |(_, warnings)| *warnings);
        if mode == ReadMode::Map {
            // It leaves out what is whole and proven by nothing, too: one group more.
            tried(&opened.map(|(state, _)| state), warnings, lost + 2);
        } else if let Err(error) = &opened {
            assert!(is_named(error, damaged), "{}: {}: {error:?} names nothing", subject.name, what());
        }
        assert_eq!(disk.image_hash(), before, "{}: {}: a read-only open wrote", subject.name, what());
    }
    let disk = damaged.kill();
    let opened = catch_unwind(AssertUnwindSafe(|| open(&disk, &ManualClock::new(), 5)));
    match opened.unwrap_or_else(|_| panic!("{}: {}: a panic", subject.name, what())) {
        Ok(db) => {
            let warnings = db.report().warnings.len();
            let state = catch_unwind(AssertUnwindSafe(|| shown(&db)));
            let state = state.unwrap_or_else(|_| panic!("{}: {}: a panic", subject.name, what()));
            if state.is_err() {
                Tally::count(&tally.at_reads);
                // One value cannot be read; whatever can be is right, and no mark is lower.
                reads_are_right_or_corrupt(&db, &subject.states[0], what);
            }
            tried(&state, warnings, lost);
        }
        Err(error) => {
            Tally::count(&tally.refused);
            assert!(is_named(&error, damaged), "{}: {}: {error:?}", subject.name, what());
            assert_eq!(disk.image_hash(), before, "{}: {}: a refused open wrote", subject.name, what());
        }
    }
}

fn reads_are_right_or_corrupt(db: &Db, expected: &[Shown], what: &dyn Fn() -> String) {
    for (at, expected) in expected.iter().enumerate() {
        let space = db.keyspace(SPACES[at].0, options(at)).unwrap();
        for (n, key) in KEYS.iter().enumerate() {
            match space.get(key) {
                Ok(value) => {
                    let value: Option<Arc<[u8]>> = value.map(|value| value.bytes().into());
                    let right = expected.values.iter().find(|value| value.0 == *key).map(|value| &value.1.0);
                    assert_eq!(value.as_ref(), right, "{}", what());
                }
                Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "{}: {error:?}", what()),
            }
            match space.mark(key) {
                Ok(mark) => assert_eq!(mark.map(|mark| mark.get()), expected.marks[n], "{}", what()),
                Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "{}: {error:?}", what()),
            }
        }
    }
}

/// Runs `test` for each number below `count` on all processors.
fn sweep(count: u64, test: impl Fn(u64) + Sync) {
    const AT_ONCE: u64 = 256;
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                // One failure ends the sweep.
                let _all = Trying(|| {
                    next.store(count, Ordering::Relaxed);
                    "see above".to_owned()
                });
                loop {
                    let from = next.fetch_add(AT_ONCE, Ordering::Relaxed);
                    if from >= count {
                        break;
                    }
                    (from..count.min(from + AT_ONCE)).for_each(&test);
                }
            });
        }
    });
}

fn files(disk: &SimDisk) -> Vec<(String, u64)> {
    let names = disk.file_names().into_iter().filter(|name| name != "LOCK");
    names.map(|name| (name.clone(), disk.read_file(&name).unwrap().len() as u64)).collect()
}

/// Every byte that may mean something, and a sample of the padding: zeros far behind the last other byte.
fn bytes_to_flip(disk: &SimDisk) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for (name, _) in files(disk) {
        let bytes = disk.read_file(&name).unwrap();
        let mut last = None;
        for (at, &byte) in bytes.iter().enumerate() {
            if byte != 0 {
                last = Some(at);
            }
            let near = last.is_some_and(|last| at - last < 64);
            if near || at % 97 == 0 || at + 64 > bytes.len() {
                all.push((name.clone(), at as u64));
            }
        }
    }
    all
}

fn is_every() -> bool {
    std::env::var_os("TIDEWALL_DAMAGE_EVERY").is_some()
}

#[test]
fn every_flipped_bit_is_harmless_or_named() {
    for subject in [killed(), closed(), compacted()] {
        let tally = Tally::default();
        let bytes = bytes_to_flip(&subject.disk);
        // The largest one whole on demand: it takes minutes.
        let step = if subject.name == "compacted" && !is_every() { 13 } else { 1 };
        let flips = bytes.len() as u64 * 8 / step;
        sweep(flips, |n| {
            let n = n * step;
            let (name, at) = &bytes[n as usize / 8];
            let bit = (n % 8) as u8;
            let damaged = subject.disk.kill();
            damaged.flip_bit(name, *at, bit);
            judge(&subject, &damaged, 1, &|| format!("bit {bit} of byte {at} of {name} flipped"), &tally);
        });
        tally.print(&format!("{} store, {flips} bits flipped", subject.name));
    }
}

#[test]
fn every_cut_or_longer_file_is_harmless_or_named() {
    for subject in [closed(), killed(), compacted()] {
        let tally = Tally::default();
        for (name, len) in files(&subject.disk) {
            // Every length on demand: it takes minutes.
            let step = match &*name {
                _ if is_every() => 1,
                "STORE" => 61,
                _ if subject.name == "compacted" => 37,
                _ => 3,
            };
            sweep(len / step + 1, |n| {
                let cut = (n * step).min(len - 1);
                let damaged = subject.disk.kill();
                damaged.truncate(&name, cut);
                judge(&subject, &damaged, 1, &|| format!("{name} cut to {cut} of {len} bytes"), &tally);
            });
            for more in [1, 63, 64, 512, 4096, 70_000] {
                let damaged = subject.disk.kill();
                damaged.truncate(&name, len + more);
                judge(&subject, &damaged, 1, &|| format!("{name} longer by {more} zeros"), &tally);
                let mut bytes = subject.disk.read_file(&name).unwrap();
                bytes.resize((len + more) as usize, 0xA5);
                damaged.write_file(&name, &bytes);
                judge(&subject, &damaged, 1, &|| format!("{name} longer by {more} bytes"), &tally);
            }
        }
        tally.print(&format!("{} store, lengths", subject.name));
    }
}

#[test]
fn every_lost_or_misplaced_sector_is_harmless_or_named() {
    const SECTOR: usize = 512;
    for subject in [closed(), killed(), compacted()] {
        let tally = Tally::default();
        let files = files(&subject.disk);
        let sectors: Vec<(String, usize)> = files
            .iter()
            .flat_map(|(name, len)| (0..*len as usize).step_by(SECTOR).map(|at| (name.clone(), at)))
            .collect();
        let read = |(name, at): &(String, usize)| {
            let bytes = subject.disk.read_file(name).unwrap();
            bytes[*at..(at + SECTOR).min(bytes.len())].to_vec()
        };
        let put = |damaged: &SimDisk, (name, at): &(String, usize), sector: &[u8]| {
            let mut bytes = damaged.read_file(name).unwrap();
            let len = sector.len().min(bytes.len() - at);
            bytes[*at..at + len].copy_from_slice(&sector[..len]);
            damaged.write_file(name, &bytes);
        };
        let meant: Vec<_> = sectors.iter().filter(|at| read(at).iter().any(|&byte| byte != 0)).collect();
        // Where the last sectors of the log lie: with them goes what proves the frames in them.
        let is_begun = |name: &String| subject.disk.read_file(name).unwrap().starts_with(b"TIDEWALL");
        let newest = meant.iter().map(|(name, _)| name).filter(|name| is_begun(name)).max().unwrap();
        let last = meant.iter().filter(|(name, _)| name == newest).map(|(_, at)| *at).max().unwrap();
        let lost = |(name, at): &(String, usize)| {
            if subject.states.len() > 1 && name == newest && at + 2 * SECTOR > last { 15 } else { 1 }
        };
        sweep(sectors.len() as u64, |n| {
            let at = &sectors[n as usize];
            for fill in [0, 0xFF, 0x5A] {
                let damaged = subject.disk.kill();
                put(&damaged, at, &[fill; SECTOR]);
                judge(&subject, &damaged, lost(at), &|| format!("sector {at:?} all {fill}"), &tally);
            }
        });
        sweep((meant.len() * meant.len()) as u64, |n| {
            let (from, to) = (meant[n as usize / meant.len()], meant[n as usize % meant.len()]);
            if from == to {
                return;
            }
            let damaged = subject.disk.kill();
            put(&damaged, to, &read(from));
            judge(&subject, &damaged, lost(to), &|| format!("sector {from:?} written over {to:?}"), &tally);
            put(&damaged, from, &read(to));
            let lost = lost(to).max(lost(from));
            judge(&subject, &damaged, lost, &|| format!("sectors {from:?} and {to:?} swapped"), &tally);
        });
        tally.print(&format!("{} store, {} sectors", subject.name, sectors.len()));
    }
}

#[test]
fn every_missing_swapped_or_old_file_is_harmless_or_named() {
    for subject in [closed(), killed(), compacted()] {
        let tally = Tally::default();
        let files = files(&subject.disk);
        for (name, _) in &files {
            let damaged = subject.disk.kill();
            damaged.remove_file(name);
            judge(&subject, &damaged, 1, &|| format!("{name} removed"), &tally);
            for (other, _) in &files {
                let (a, b) = (subject.disk.read_file(name).unwrap(), subject.disk.read_file(other).unwrap());
                if a == b {
                    continue;
                }
                let damaged = subject.disk.kill();
                damaged.write_file(other, &a);
                judge(&subject, &damaged, 1, &|| format!("{name} copied over {other}"), &tally);
                damaged.write_file(name, &b);
                judge(&subject, &damaged, 1, &|| format!("{name} and {other} swapped"), &tally);
            }
        }
        tally.print(&format!("{} store, files", subject.name));
    }
}

/// A disk that loses a whole file would else take back what was acknowledged: the file would look like one of those that
/// wait to be begun.
#[test]
fn a_newest_segment_that_reads_as_zeros_is_missed() {
    for subject in [killed(), compacted()] {
        let begun: Vec<(String, u64)> = files(&subject.disk)
            .into_iter()
            .filter(|(name, _)| name.ends_with(".seg"))
            .filter(|(name, _)| subject.disk.read_file(name).unwrap().starts_with(b"TIDEWALL"))
            .collect();
        // The newest is the one that names the highest lsn before it.
        let follows = |name: &str| {
            let head = subject.disk.read_file(name).unwrap();
            u64::from_le_bytes(head[68..76].try_into().unwrap())
        };
        let (newest, len) = begun.into_iter().max_by_key(|(name, _)| follows(name)).unwrap();
        for filler in [0, 0xFF] {
            let damaged = subject.disk.kill();
            damaged.write_file(&newest, &vec![filler; len as usize]);
            let error = open(&damaged.kill(), &ManualClock::new(), 1).unwrap_err();
            assert!(is_named(&error, &damaged), "{}: {error}", subject.name);
            assert!(read_only(&damaged, ReadMode::Map).is_err(), "{}", subject.name);
            let report = Verify::new().run_on(damaged.kill()).unwrap();
            let found: Vec<_> = report.faults.iter().map(|fault| (fault.kind, fault.file.as_str())).collect();
            assert!(found.contains(&(FaultKind::Header, &newest)), "{}: {found:?}", subject.name);
        }
    }
}

/// Every listed segment without frames, made or used again, says that it is one.
#[test]
fn every_spare_is_marked() {
    let mut spares = 0;
    for subject in [killed(), compacted(), closed()] {
        for (name, _) in files(&subject.disk).iter().filter(|(name, _)| name.ends_with(".seg")) {
            let bytes = subject.disk.read_file(name).unwrap();
            assert!(bytes.starts_with(b"TIDE"), "{}: {name}", subject.name);
            spares += u32::from(bytes.starts_with(b"TIDEFREE"));
        }
    }
    assert!(spares >= 3, "{spares}");
}

#[test]
fn a_damaged_key_table_or_copy_of_the_list_costs_a_warning() {
    const SEAL: u64 = 64;
    // Without an index file: with one, nobody reads key tables.
    let subject = closed_with_seed(3);
    let sealed: Vec<_> = files(&subject.disk)
        .into_iter()
        .filter(|(name, len)| match subject.disk.read_file(name) {
            Some(bytes) if name != "STORE" => bytes[(*len - SEAL) as usize..].starts_with(b"TIDESEAL"),
            _ => false,
        })
        .collect();
    assert!(sealed.len() > 1);
    let tables =
        sealed.iter().flat_map(|(name, len)| (1..20).map(move |back| (name.as_str(), len - SEAL - back)));
    let list = [("STORE", 20), ("STORE", 40), ("STORE", (16 << 10) + 40)];
    for (name, at) in tables.chain(list) {
        let damaged = subject.disk.kill();
        damaged.flip_bit(name, at, 2);
        let db = open(&damaged, &ManualClock::new(), 5).expect("it costs nothing but time");
        assert_eq!(shown(&db).unwrap(), subject.states[0], "byte {at} of {name}");
        assert_eq!(db.report().warnings.len(), 1, "byte {at} of {name}");
    }
}

/// An old copy of one file among newer ones. A whole directory put back is not to be told from a store that
/// nobody wrote to since (B9); one file is.
#[test]
fn an_old_copy_of_a_file_is_harmless_or_named() {
    let last = closed();
    for steps in [10, 30, 60, 90] {
        let old = killed_after(steps);
        let tally = Tally::default();
        for (name, _) in files(&old) {
            if name == "STORE" || last.disk.read_file(&name).is_none() {
                continue;
            }
            let damaged = last.disk.kill();
            damaged.write_file(&name, &old.read_file(&name).unwrap());
            judge(&last, &damaged, 1, &|| format!("{name} as it was after {steps} steps"), &tally);
        }
        let damaged = last.disk.kill();
        damaged.write_file("STORE", &old.read_file("STORE").unwrap());
        judge(&last, &damaged, 1, &|| format!("STORE as it was after {steps} steps"), &tally);
        tally.print(&format!("old copies of {steps} steps"));
    }
}

/// The list of the life before knows all segments, but not the lives that were drawn since: their frames
/// looked like garbage of earlier ones.
#[test]
fn a_list_from_before_the_last_open_is_named() {
    let disk = killed_after(40);
    let old = disk.read_file("STORE").unwrap();
    let db = open(&disk, &ManualClock::new(), 8).unwrap();
    let space = db.keyspace(SPACES[5].0, options(5)).unwrap();
    space.put(token(9), b"c", b"later").unwrap();
    let damaged = disk.crash(Crash::None, 0);
    damaged.write_file("STORE", &old);
    let before = damaged.image_hash();
    for result in [open(&damaged, &ManualClock::new(), 9), read_only(&damaged, ReadMode::Map)] {
        assert!(matches!(result, Err(Error::Corrupt { file, .. }) if file == "STORE"));
    }
    assert_eq!(damaged.image_hash(), before);
}

/// The newest segment is sealed, and the power fails before the list says so: its seal alone tells that the last frame
/// was durable, whatever became of it since.
#[test]
fn a_damaged_last_frame_is_named_though_the_list_does_not_know_its_seal() {
    const LAST: &[u8] = b"what was written last of all";
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), 1).unwrap();
    write(&db, |_| false);
    db.keyspace(SPACES[5].0, options(5)).unwrap().put(token(9), b"c", LAST).unwrap();
    let list = disk.read_file("STORE").unwrap();
    db.close().unwrap();
    let sealed = disk.crash(Crash::None, 0);
    let whole = state_of(&sealed);
    sealed.write_file("STORE", &list);
    assert_eq!(state_of(&sealed.kill()), whole);

    let place = |name: &String| {
        let bytes = sealed.read_file(name).unwrap();
        bytes.windows(LAST.len()).position(|window| window == LAST)
    };
    let segments = sealed.file_names().into_iter().filter(|name| name.ends_with(".seg"));
    let (name, at) = segments.filter_map(|name| place(&name).map(|at| (name, at))).next().unwrap();
    sealed.flip_bit(&name, at as u64, 3);
    for result in [open(&sealed, &ManualClock::new(), 2), read_only(&sealed, ReadMode::Map)] {
        assert!(matches!(&result, Err(Error::Corrupt { file, .. }) if *file == name), "{result:?}");
    }
}

#[test]
fn files_of_another_store_are_named() {
    let subject = closed();
    let tally = Tally::default();
    let disk = SimDisk::new();
    let db = open(&disk, &ManualClock::new(), 9).unwrap();
    write(&db, |_| false);
    db.close().unwrap();
    for (name, _) in files(&disk) {
        let differs = subject.disk.read_file(&name).is_some_and(|ours| Some(ours) != disk.read_file(&name));
        // That of another store costs a scan.
        if differs && !is_index(&name) {
            let damaged = subject.disk.kill();
            damaged.write_file(&name, &disk.read_file(&name).unwrap());
            judge(&subject, &damaged, 1, &|| format!("{name} of another store"), &tally);
        }
    }
    tally.print("files of another store");
    assert_eq!(tally.same.into_inner() + tally.shorter.into_inner(), 0);
}

#[test]
fn foreign_files_are_left_alone() {
    let subject = closed();
    let disk = subject.disk.kill();
    for name in ["notes.txt", ".DS_Store", "000099.seg~", "INDEX", "x.seg"] {
        disk.write_file(name, b"mine");
    }
    disk.write_file("000099.seg", b"not zeros, not ours");
    let db = open(&disk, &ManualClock::new(), 3).unwrap();
    assert_eq!(shown(&db).unwrap(), subject.states[0]);
    drop(db);
    for name in ["notes.txt", ".DS_Store", "000099.seg~", "INDEX", "x.seg", "000099.seg"] {
        assert!(disk.read_file(name).is_some(), "{name} was removed");
    }
}
