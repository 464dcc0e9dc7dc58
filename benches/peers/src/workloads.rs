//! The workloads. A cell is one of them, on one engine, with so many threads; it runs in a process of its own
//! and answers with rows.

use crate::engines::{Engine, Sort};
use crate::lease;
use crate::machine::{Counters, Weather, disk_bytes, resident_bytes, sync_file_system};
use crate::measure::{Class, KEY_BYTES, PREFIX_KEYS, Plan, VALUE_BYTES, key, prefix, repeat, stream, value};
use crate::results::Row;
use crate::store::{FencedStore, Item, Outcome, Res};
use clap::ValueEnum;
use fastrand::Rng;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Workload {
    /// Durable fenced puts over 100 000 keys, each waited for.
    Put,
    /// The same, with up to 10 000 in flight a thread.
    Submit,
    /// Puts with a low token over 100 000 keys: all are refused.
    Refuse,
    /// A load in random order, one sync each 10 000 records.
    Load,
    /// Opening what was loaded and closed, up to the first read.
    Open,
    /// Opening what a killed process has loaded, up to the first read.
    Recover,
    /// Reads of single keys.
    Get,
    /// Scans of prefixes of 100 keys.
    Scan,
    /// 95 % reads, 5 % durable fenced puts.
    Mix,
    /// 100 000 records of 1 KiB overwritten 20 times: what is written, and what space it takes.
    Overwrite,
    /// From 100 000 keys on, ten times as many each time: does a put, a read, a key get dearer?
    Grow,
    /// What a lease costs its holder, beside reading a clock.
    Lease,
}

impl Workload {
    /// In an order in which each finds what it needs.
    pub const ALL: [Workload; 12] = [
        Workload::Put,
        Workload::Submit,
        Workload::Refuse,
        Workload::Load,
        Workload::Open,
        Workload::Recover,
        Workload::Get,
        Workload::Scan,
        Workload::Mix,
        Workload::Overwrite,
        Workload::Grow,
        Workload::Lease,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Workload::Put => "put",
            Workload::Submit => "submit",
            Workload::Refuse => "refuse",
            Workload::Load => "load",
            Workload::Open => "open",
            Workload::Recover => "recover",
            Workload::Get => "get",
            Workload::Scan => "scan",
            Workload::Mix => "mix",
            Workload::Overwrite => "overwrite",
            Workload::Grow => "grow",
            Workload::Lease => "lease",
        }
    }

    /// How many threads it is run with, where nothing else is asked for.
    pub fn threads(self) -> &'static [usize] {
        match self {
            Workload::Put => &[1, 4, 16, 64, 256],
            Workload::Submit | Workload::Refuse | Workload::Get => &[1, 2],
            Workload::Mix => &[16],
            _ => &[1],
        }
    }

    /// Whether other numbers of threads can be asked for.
    pub fn is_threaded(self) -> bool {
        matches!(
            self,
            Workload::Put
                | Workload::Submit
                | Workload::Refuse
                | Workload::Get
                | Workload::Scan
                | Workload::Mix
        )
    }

    /// Whether an engine can do it.
    pub fn fits(self, engine: &Engine) -> bool {
        match self {
            Workload::Put => engine.sort != Sort::MemoryFloor,
            Workload::Submit => engine.pipelines,
            Workload::Refuse | Workload::Get => engine.sort != Sort::LogFloor,
            Workload::Scan => engine.sort != Sort::LogFloor && engine.name != "memory-papaya",
            Workload::Lease => engine.name == "tidewall",
            _ => engine.has_files(),
        }
    }

    /// Whether an engine takes part where nothing else is asked for. Ways of writing matter only where many
    /// write.
    pub fn wants(self, engine: &Engine) -> bool {
        let one_way = matches!(engine.sort, Sort::Peer | Sort::MemoryFloor);
        self.fits(engine) && (one_way || matches!(self, Workload::Put | Workload::Submit | Workload::Mix))
    }

    /// Whether it reads what [`Workload::Load`] has left behind.
    pub fn needs_image(self) -> bool {
        matches!(self, Workload::Open | Workload::Get | Workload::Scan | Workload::Mix)
    }
}

/// Of the workloads that write to a store of their own.
const KEYS: u64 = 100_000;
/// How often each record is written before durable puts are measured.
const AGE: usize = 5;
const LOAD_BATCH: usize = 10_000;
const IN_FLIGHT: usize = 10_000;
/// A load that takes longer is ended, and says how far it came.
const LOAD_TIME: Duration = Duration::from_secs(150);
/// Presented by the puts. The records were loaded with a lower one.
const TOKEN: u64 = 42;

#[derive(Clone, Debug)]
pub struct Cell {
    pub workload: Workload,
    pub engine: &'static Engine,
    pub threads: usize,
    pub time: Duration,
    pub round: usize,
    /// Where the data lie.
    pub dir: PathBuf,
    /// How many keys are loaded.
    pub keys: u64,
}

impl Cell {
    pub fn row(&self) -> Row {
        Row {
            workload: self.workload.name().to_owned(),
            engine: self.engine.name.to_owned(),
            threads: self.threads,
            round: self.round,
            figures: BTreeMap::new(),
        }
    }

    /// What `load` leaves behind for the workloads that read.
    pub fn image(&self) -> PathBuf {
        self.dir.join(format!("image-{}", self.engine.kind))
    }

    fn plan(&self, sample: u64) -> Plan<'_> {
        let warm_up = Duration::from_millis(300).min(self.time);
        Plan { threads: self.threads, warm_up, time: self.time, sample, dir: &self.dir }
    }

    /// Runs the cell in this process.
    pub fn run(&self) -> Res<Vec<Row>> {
        let fresh = self.dir.join("cell");
        let _ = fs::remove_dir_all(&fresh);
        fs::create_dir_all(&fresh)?;
        let rows = match self.workload {
            Workload::Put => self.put(&fresh)?,
            Workload::Submit => self.submit(&fresh)?,
            Workload::Refuse => self.refuse(&fresh)?,
            Workload::Load => self.load()?,
            Workload::Open => self.open(&self.image())?,
            Workload::Recover => self.open(&self.killed())?,
            Workload::Get => self.get()?,
            Workload::Scan => self.scan()?,
            Workload::Mix => self.mix()?,
            Workload::Overwrite => self.overwrite(&fresh)?,
            Workload::Grow => self.grow(&fresh)?,
            Workload::Lease => lease::run(self, &fresh)?,
        };
        let _ = fs::remove_dir_all(&fresh);
        Ok(rows)
    }

    fn put(&self, fresh: &Path) -> Res<Vec<Row>> {
        let store = (self.engine.open)(fresh)?;
        self.age(&*store, fresh)?;
        let weather = Weather::now();
        let measured = repeat(self.plan(1), |random| {
            let outcome = store.put(&key(random.u64(..KEYS)), TOKEN, &value(random));
            assert_eq!(outcome.expect("the put is accepted"), Outcome::Accepted);
            Class::First
        });
        let mut row = self.row();
        measured.note(&mut row, &weather);
        store.close()?;
        Ok(vec![row])
    }

    /// Writes every record several times: a store that has grown to its size uses its files again, compacts, and
    /// flushes, as it will for most of its life.
    fn age(&self, store: &dyn FencedStore, dir: &Path) -> Res<()> {
        for _ in 0..AGE {
            load(store, KEYS, 1, LOAD_TIME)?;
        }
        sync_file_system(dir);
        Ok(())
    }

    fn submit(&self, fresh: &Path) -> Res<Vec<Row>> {
        let store = (self.engine.open)(fresh)?;
        self.age(&*store, fresh)?;
        let weather = Weather::now();
        let measured = stream(self.plan(1), |stream, random| {
            let mut next = || {
                let item = || (key(random.u64(..KEYS)).to_vec(), TOKEN, value(random).to_vec());
                stream.goes_on().then(item)
            };
            store.pipeline(IN_FLIGHT, &mut next, &mut || stream.count_one()).expect("the puts are accepted");
        });
        let mut row = self.row();
        measured.note(&mut row, &weather);
        store.close()?;
        Ok(vec![row])
    }

    fn refuse(&self, fresh: &Path) -> Res<Vec<Row>> {
        let store = (self.engine.open)(fresh)?;
        load(&*store, KEYS, TOKEN, LOAD_TIME)?;
        sync_file_system(fresh);
        let weather = Weather::now();
        let measured = repeat(self.plan(16), |random| {
            let outcome = store.put(&key(random.u64(..KEYS)), TOKEN - 1, &[3; VALUE_BYTES]);
            assert_eq!(outcome.expect("an answer"), Outcome::Rejected(TOKEN));
            Class::First
        });
        let mut row = self.row();
        measured.note(&mut row, &weather);
        store.close()?;
        Ok(vec![row])
    }

    fn load(&self) -> Res<Vec<Row>> {
        let image = self.image();
        let _ = fs::remove_dir_all(&image);
        fs::create_dir_all(&image)?;
        sync_file_system(&image);
        let store = (self.engine.open)(&image)?;
        let before = Counters::now(&image);
        let (loaded, took) = load(&*store, self.keys, 1, LOAD_TIME)?;
        let mut row = self.row();
        let start = Instant::now();
        store.settle()?;
        row.note("settle_s", start.elapsed().as_secs_f64());
        let start = Instant::now();
        store.close()?;
        row.note("close_s", start.elapsed().as_secs_f64());
        let used = Counters::now(&image).since(&before);
        sync_file_system(&image);
        let written = Counters::now(&image).since(&before).device_bytes;
        let user_bytes = loaded as f64 * (KEY_BYTES + VALUE_BYTES) as f64;
        row.note("ops_per_s", loaded as f64 / took.as_secs_f64());
        row.note("loaded", loaded as f64);
        row.note("cpu_us_per_op", used.cpu_us as f64 / loaded as f64);
        row.note("device_per_user_byte", written as f64 / user_bytes);
        row.note("disk_per_live_byte", disk_bytes(&image) as f64 / user_bytes);
        Ok(vec![row])
    }

    /// The image of the load; in memory it is made anew.
    fn open_image(&self) -> Res<Box<dyn FencedStore>> {
        let store = (self.engine.open)(&self.image())?;
        if self.engine.sort == Sort::MemoryFloor {
            load(&*store, self.keys, 1, LOAD_TIME)?;
        }
        Ok(store)
    }

    fn open(&self, dir: &Path) -> Res<Vec<Row>> {
        let start = Instant::now();
        let store = (self.engine.open)(dir)?;
        let mut found = false;
        store.get(&key(7), &mut |value| found = value.is_some())?;
        let took = start.elapsed();
        assert!(found, "the key is gone");
        let mut row = self.row();
        row.note("open_ms", took.as_secs_f64() * 1e3);
        row.note("resident_mb", resident_bytes().1 as f64 / 1e6);
        store.close()?;
        Ok(vec![row])
    }

    /// What a killed process has left.
    pub fn killed(&self) -> PathBuf {
        self.dir.join(format!("killed-{}", self.engine.kind))
    }

    /// Loads, says so, and waits to be killed.
    pub fn load_until_killed(&self) -> Res<()> {
        let dir = self.killed();
        fs::create_dir_all(&dir)?;
        let store = (self.engine.open)(&dir)?;
        load(&*store, self.keys, 1, LOAD_TIME)?;
        println!("{LOADED}");
        loop {
            std::thread::park();
        }
    }

    fn get(&self) -> Res<Vec<Row>> {
        let store = self.open_image()?;
        let once = |random: &mut Rng| {
            let mut copy = [0; VALUE_BYTES];
            let mut found = false;
            let look = &mut |value: Option<(&[u8], u64)>| {
                if let Some((value, _)) = value {
                    copy.copy_from_slice(value);
                    found = true;
                }
            };
            store.get(&key(random.u64(..self.keys)), look).expect("it reads");
            assert!(found, "a key is missing");
            black_box(&copy);
        };
        // About once each, so that the caches hold what they will hold.
        let (mut random, start) = (Rng::with_seed(5), Instant::now());
        for _ in 0..self.keys {
            once(&mut random);
            if start.elapsed() > Duration::from_secs(6) {
                break;
            }
        }
        let weather = Weather::now();
        let measured = repeat(self.plan(8), |random| {
            once(random);
            Class::First
        });
        let mut row = self.row();
        measured.note(&mut row, &weather);
        let (anonymous, all) = resident_bytes();
        row.note("anonymous_mb", anonymous as f64 / 1e6);
        row.note("resident_mb", all as f64 / 1e6);
        store.close()?;
        Ok(vec![row])
    }

    fn scan(&self) -> Res<Vec<Row>> {
        let store = self.open_image()?;
        let weather = Weather::now();
        let measured = repeat(self.plan(1), |random| {
            let read = store.scan(&prefix(random.u64(..self.keys / PREFIX_KEYS))).expect("it reads");
            assert_eq!(read, (PREFIX_KEYS as usize, PREFIX_KEYS as usize * VALUE_BYTES));
            Class::First
        });
        let mut row = self.row();
        measured.note(&mut row, &weather);
        store.close()?;
        Ok(vec![row])
    }

    fn mix(&self) -> Res<Vec<Row>> {
        let store = self.open_image()?;
        let weather = Weather::now();
        let measured = repeat(self.plan(1), |random| {
            let key = key(random.u64(..self.keys));
            if random.u8(..100) < 95 {
                let mut copy = [0; VALUE_BYTES];
                let look = &mut |value: Option<(&[u8], u64)>| {
                    copy.copy_from_slice(value.expect("the key is there").0);
                };
                store.get(&key, look).expect("it reads");
                black_box(&copy);
                Class::First
            } else {
                let outcome = store.put(&key, TOKEN, &value(random));
                assert_eq!(outcome.expect("the put is accepted"), Outcome::Accepted);
                Class::Second
            }
        });
        let mut row = self.row();
        measured.note(&mut row, &weather);
        row.note("gets_per_s", measured.count[0] as f64 / measured.seconds);
        row.note("puts_per_s", measured.count[1] as f64 / measured.seconds);
        row.note("put_p50_ns", measured.time[1].value_at_quantile(0.5) as f64);
        row.note("put_p99_ns", measured.time[1].value_at_quantile(0.99) as f64);
        store.close()?;
        Ok(vec![row])
    }

    fn overwrite(&self, fresh: &Path) -> Res<Vec<Row>> {
        const BYTES: usize = 1024;
        const TIMES: u64 = 20;
        const BATCH: usize = 1000;
        const TIME: Duration = Duration::from_secs(60);

        let store = (self.engine.open)(fresh)?;
        let mut random = Rng::with_seed(17);
        let mut write = |keys: &[u64]| -> Res<Duration> {
            let item = |&number: &u64| {
                let mut value = vec![0; BYTES];
                random.fill(&mut value);
                (key(number).to_vec(), 1, value)
            };
            let items: Vec<Item> = keys.iter().map(item).collect();
            let start = Instant::now();
            store.load(&items)?;
            Ok(start.elapsed())
        };
        let mut keys: Vec<u64> = (0..KEYS).collect();
        let mut shuffle = Rng::with_seed(18);
        shuffle.shuffle(&mut keys);
        for keys in keys.chunks(BATCH) {
            write(keys)?;
        }
        store.settle()?;
        sync_file_system(fresh);
        let before = Counters::now(fresh);
        let (start, mut spent, mut done, mut peak) = (Instant::now(), Duration::ZERO, 0, 0);
        while done < KEYS * TIMES && start.elapsed() < TIME {
            let mut keys = HashSet::with_capacity(BATCH);
            while keys.len() < BATCH {
                keys.insert(shuffle.u64(..KEYS));
            }
            spent += write(&keys.into_iter().collect::<Vec<_>>())?;
            done += BATCH as u64;
            if done % (KEYS / 4) == 0 {
                peak = peak.max(disk_bytes(fresh));
            }
        }
        store.close()?;
        sync_file_system(fresh);
        let used = Counters::now(fresh).since(&before);
        let record = (KEY_BYTES + BYTES) as f64;
        let mut row = self.row();
        row.note("overwrites", done as f64);
        row.note("ops_per_s", done as f64 / spent.as_secs_f64());
        row.note("disk_per_live_byte_peak", peak as f64 / (KEYS as f64 * record));
        row.note("disk_per_live_byte_closed", disk_bytes(fresh) as f64 / (KEYS as f64 * record));
        row.note("device_per_user_byte", used.device_bytes as f64 / (done as f64 * record));
        Ok(vec![row])
    }

    fn grow(&self, fresh: &Path) -> Res<Vec<Row>> {
        const BATCH: u64 = 1000;
        const READS: u64 = 200_000;

        let store = (self.engine.open)(fresh)?;
        let resident = resident_bytes().0;
        let mut random = Rng::with_seed(23);
        let start = Instant::now();
        let (mut row, mut longest) = (self.row(), Duration::ZERO);
        let (mut tenth, mut tenth_puts) = (Duration::ZERO, 0);
        let mut size = KEYS.min(self.keys);
        for first in (0..self.keys).step_by(BATCH as usize) {
            let item = |number| (key(scatter(number, self.keys)).to_vec(), 1, value(&mut random).to_vec());
            let items: Vec<Item> = (first..first + BATCH).map(item).collect();
            let begun = Instant::now();
            store.load(&items)?;
            let took = begun.elapsed();
            longest = longest.max(took);
            let written = first + BATCH;
            if written > size - size / 10 {
                tenth += took;
                tenth_puts += BATCH;
            }
            if written < size {
                continue;
            }
            row.note(&format!("put_ns_{size}"), tenth.as_nanos() as f64 / tenth_puts as f64);
            row.note(&format!("longest_batch_ms_{size}"), longest.as_secs_f64() * 1e3);
            let begun = Instant::now();
            for _ in 0..READS {
                let key = key(scatter(random.u64(..size), self.keys));
                store.get(&key, &mut |value| assert!(value.is_some(), "a key is missing"))?;
            }
            row.note(&format!("get_ns_{size}"), begun.elapsed().as_nanos() as f64 / READS as f64);
            let grown = resident_bytes().0.saturating_sub(resident);
            row.note(&format!("anonymous_bytes_per_key_{size}"), grown as f64 / size as f64);
            (longest, tenth, tenth_puts) = (Duration::ZERO, Duration::ZERO, 0);
            size *= 10;
            if start.elapsed() > LOAD_TIME {
                break;
            }
        }
        store.close()?;
        Ok(vec![row])
    }
}

/// Said by a process that is to be killed.
pub const LOADED: &str = "loaded";

/// A fixed order of the numbers below `keys`, with neighbours far apart.
fn scatter(number: u64, keys: u64) -> u64 {
    // A prime that divides no number of keys in use.
    const STEP: u64 = 2_654_435_761;
    (number as u128 * STEP as u128 % keys as u128) as u64
}

/// Loads `keys` records in a random order, for at most `most`; answers how many, and the time that the engine
/// took, the making of the records left out.
fn load(store: &dyn FencedStore, keys: u64, token: u64, most: Duration) -> Res<(u64, Duration)> {
    let mut random = Rng::with_seed(99);
    let mut numbers: Vec<u32> = (0..u32::try_from(keys)?).collect();
    random.shuffle(&mut numbers);
    let (mut loaded, mut spent) = (0, Duration::ZERO);
    let mut items: Vec<Item> = Vec::with_capacity(LOAD_BATCH);
    for numbers in numbers.chunks(LOAD_BATCH) {
        items.clear();
        items.extend(
            numbers.iter().map(|&number| (key(number as u64).to_vec(), token, value(&mut random).to_vec())),
        );
        let start = Instant::now();
        store.load(&items)?;
        spent += start.elapsed();
        loaded += numbers.len() as u64;
        if spent > most {
            break;
        }
    }
    Ok((loaded, spent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_met_once() {
        for keys in [1000, 100_000] {
            let met: HashSet<u64> = (0..keys).map(|number| scatter(number, keys)).collect();
            assert_eq!(met.len() as u64, keys);
            assert!(met.iter().all(|&number| number < keys));
        }
    }
}
