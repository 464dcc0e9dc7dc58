//! Ids used once: 64 workers acquire, put, delete and release one after the other, while a leader of another
//! keyspace keeps the lease of the first token there is. What is left of them in memory and on disk, once
//! compacted, and the longest that one call took.
//!
//! A plain program. `IDS` sets how many ids (default 100 000).

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{dir, on_threads};
use tidewall::{Db, KeyspaceOptions};

const WORKERS: u64 = 64;

fn main() {
    let ids: u64 = std::env::var("IDS").map_or(100_000, |ids| ids.parse().expect("IDS is a number"));
    let dir = dir();
    let db = Db::open(dir.path().join("data")).expect("opens");
    let leaders = db.keyspace("leaders", KeyspaceOptions::new()).expect("opens");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).expect("opens");
    let day = Duration::from_secs(24 * 3600);
    let leader = leaders.lease(b"leader").ttl(day).acquire().expect("granted");
    let longest = AtomicU64::new(0);
    let took = on_threads(WORKERS, |worker| {
        for n in 0..ids / WORKERS {
            let id = (worker << 40 | n).to_be_bytes();
            let lease = timed(&longest, || jobs.lease(&id).acquire()).expect("granted");
            timed(&longest, || jobs.put(lease.token(), &id, &[7; 50]))
                .expect("not fenced: the lease is live");
            timed(&longest, || jobs.delete(lease.token(), &id)).expect("not fenced: the lease is live");
            timed(&longest, || lease.release()).expect("held until here");
            if n % 100 == 0 {
                leader.renew().expect("held");
            }
        }
    });
    let before = db.stats();
    let start = Instant::now();
    db.compact().expect("compacts");
    let compacted = start.elapsed();
    let after = db.stats();
    // The index file is written anew in the background.
    std::thread::sleep(Duration::from_secs(5));
    let later = db.stats();
    leaders.put(leader.token(), b"leader", b"still here").expect("not fenced: its keyspace has no floor");
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    println!("{ids} ids used once by {WORKERS} workers, {:.0}/s", ids as f64 / took.as_secs_f64());
    println!("longest call             {:.0?}", Duration::from_nanos(longest.load(Ordering::Relaxed)));
    for (when, stats) in [("before", before), ("after", after), ("later", later)] {
        println!(
            "{when:6} compacting        index {:.2} MiB, disk {:.2} MiB ({} segments, {} of them spares), {} keys, {} leases in the table",
            mib(stats.index_bytes),
            mib(stats.disk_bytes),
            stats.segments,
            stats.spares,
            stats.keys,
            stats.leases
        );
    }
    println!("compacted in             {compacted:.1?}; floor {:?}", jobs.floor().map(|floor| floor.mark));
}

fn timed<T>(longest: &AtomicU64, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let answer = call();
    longest.fetch_max(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    answer
}
