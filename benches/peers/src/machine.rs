//! The machine: what it is, what it has counted, and how it is right now.

use serde::{Deserialize, Serialize};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Named beside every figure.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: u64,
    pub kernel: String,
    pub file_system: String,
}

impl Machine {
    pub fn of(dir: &Path) -> Self {
        let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into());
        let kib = field("/proc/meminfo", "MemTotal").and_then(|size| number(&size)).unwrap_or(0);
        Machine {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            memory_gib: (kib + (1 << 19)) >> 20,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            file_system: file_system(dir).map_or_else(|| "unknown".into(), |(kind, _)| kind),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { cpu, cores, memory_gib, kernel, file_system } = self;
        let kernel: Vec<&str> = kernel.split(['.', '-']).take(2).collect();
        write!(f, "{cpu}, {cores} cores, {memory_gib} GiB, Linux {}, {file_system}", kernel.join("."))
    }
}

/// The kind of the file system that `dir` lies in, and where that is mounted.
pub fn file_system(dir: &Path) -> Option<(String, PathBuf)> {
    let dir = dir.canonicalize().ok()?;
    let mounts = read("/proc/self/mounts");
    let found = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let at = PathBuf::from(words.next()?);
        let kind = words.next()?;
        dir.starts_with(&at).then(|| (kind.to_owned(), at))
    });
    found.max_by_key(|(_, at)| at.components().count())
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value behind `name:` in a file of `/proc`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = read(path);
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim_start().strip_prefix(':')?.trim().to_owned())
}

fn number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// What the process, its disk and the other processes have used so far.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counters {
    /// Bytes that this process has sent towards its disks.
    pub process_bytes: u64,
    /// Bytes written to the device that holds the data, by anybody.
    pub device_bytes: u64,
    pub device_writes: u64,
    pub device_flushes: u64,
    pub cpu_us: u64,
    pub switches: u64,
    /// CPU time of all other processes, but for the kernel's own threads.
    pub others_us: u64,
}

impl Counters {
    /// Of this process, and of the device that holds `dir`.
    pub fn now(dir: &Path) -> Self {
        let stat: Vec<u64> = device(dir).map(|path| numbers(&read(path.join("stat")))).unwrap_or_default();
        let device = |field: usize| stat.get(field).copied().unwrap_or(0);
        let (cpu_us, switches) = usage();
        Counters {
            process_bytes: field("/proc/self/io", "write_bytes").and_then(|n| number(&n)).unwrap_or(0),
            device_bytes: device(6) * 512,
            device_writes: device(4),
            device_flushes: device(15),
            cpu_us,
            switches,
            others_us: others_us(),
        }
    }

    pub fn since(&self, start: &Counters) -> Counters {
        let less = u64::saturating_sub;
        Counters {
            process_bytes: less(self.process_bytes, start.process_bytes),
            device_bytes: less(self.device_bytes, start.device_bytes),
            device_writes: less(self.device_writes, start.device_writes),
            device_flushes: less(self.device_flushes, start.device_flushes),
            cpu_us: less(self.cpu_us, start.cpu_us),
            switches: less(self.switches, start.switches),
            others_us: less(self.others_us, start.others_us),
        }
    }
}

fn numbers(text: &str) -> Vec<u64> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// The whole disk that holds `dir`, in `/sys`: flushes are not counted by partition.
fn device(dir: &Path) -> Option<PathBuf> {
    let id = fs::metadata(dir).ok()?.dev();
    let path = format!("/sys/dev/block/{}:{}", libc::major(id), libc::minor(id));
    let path = fs::canonicalize(path).ok()?;
    if path.join("partition").exists() { path.parent().map(Path::to_owned) } else { Some(path) }
}

/// CPU time and voluntary context switches of this process.
fn usage() -> (u64, u64) {
    // SAFETY: all zeros is a value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a struct of the kind that the call fills in.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    (us(usage.ru_utime) + us(usage.ru_stime), usage.ru_nvcsw as u64)
}

/// The time of a process that has ended is its parent's, so that nothing gets lost between two looks.
fn others_us() -> u64 {
    const TICK_US: u64 = 10_000;
    let me = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let ticks = ids.filter(|&id| id != me).map(|id| {
        let stat = read(format!("/proc/{id}/stat"));
        // Behind the name, which may hold anything: state, parent, …, flags (6), …, times (11 to 14).
        let Some((_, rest)) = stat.rsplit_once(')') else { return 0 };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let at = |place: usize| words.get(place).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        const KERNEL_THREAD: u64 = 0x0020_0000;
        if at(6) & KERNEL_THREAD != 0 { 0 } else { (11..15).map(at).sum() }
    });
    ticks.sum::<u64>() * TICK_US
}

/// Flushes everything that is dirty in the file system of `dir`, so that the next cell does not pay for it.
pub fn sync_file_system(dir: &Path) {
    if let Ok(dir) = fs::File::open(dir) {
        // SAFETY: a system call on a descriptor that is open.
        unsafe { libc::syncfs(dir.as_raw_fd()) };
    }
}

/// Anonymous and all resident memory of this process, in bytes.
pub fn resident_bytes() -> (u64, u64) {
    let bytes = |name| field("/proc/self/status", name).and_then(|size| number(&size)).unwrap_or(0) << 10;
    (bytes("RssAnon"), bytes("VmRSS"))
}

/// The bytes that everything in a directory has on the disk.
pub fn disk_bytes(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let bytes = entries.flatten().map(|entry| match entry.path().symlink_metadata() {
        Ok(found) if found.is_dir() => disk_bytes(&entry.path()),
        Ok(found) => found.blocks() * 512,
        Err(_) => 0,
    });
    bytes.sum()
}

pub fn boot_clock() -> u64 {
    clock(libc::CLOCK_BOOTTIME)
}

pub fn coarse_clock() -> u64 {
    clock(libc::CLOCK_MONOTONIC_COARSE)
}

fn clock(id: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a struct of the kind that the call fills in.
    unsafe { libc::clock_gettime(id, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// How the machine is right now. The host of a virtual machine moves its processors about, which changes what a
/// cache line or a wake-up costs by a factor: cells that differ in these figures are not to be compared.
pub struct Weather {
    /// For a cache line to go from one thread to another that runs.
    pub hop_ns: f64,
    /// For one thread to wake another.
    pub wake_us: f64,
}

impl Weather {
    pub fn now() -> Self {
        const HOPS: u32 = 20_000;
        const WAKES: u32 = 1_000;
        Weather { hop_ns: take_turns(HOPS, false), wake_us: take_turns(WAKES, true) / 1e3 }
    }
}

/// Nanoseconds a turn of two threads that take turns, spinning or sleeping.
fn take_turns(turns: u32, sleep: bool) -> f64 {
    let word = AtomicU32::new(0);
    let play = |me: u32| {
        for mine in (me..2 * turns).step_by(2) {
            let mut seen = word.load(Ordering::Acquire);
            while seen != mine {
                if sleep {
                    atomic_wait::wait(&word, seen);
                } else {
                    std::hint::spin_loop();
                }
                seen = word.load(Ordering::Acquire);
            }
            word.store(mine + 1, Ordering::Release);
            if sleep {
                atomic_wait::wake_one(&word);
            }
        }
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| play(0));
        scope.spawn(|| play(1));
    });
    start.elapsed().as_nanos() as f64 / (2 * turns) as f64
}
