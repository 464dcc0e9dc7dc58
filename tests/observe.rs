//! What a store says of itself: figures, health, the file of figures, events, metrics.

use std::path::{Path, PathBuf};
use std::time::Duration;
use tidewall::*;

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn external() -> KeyspaceOptions {
    KeyspaceOptions::new().tokens(Tokens::External)
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("data");
    (scratch, dir)
}

fn reading(stats: &Stats, name: &str) -> Reading {
    let figures = stats.figures();
    figures.iter().find(|figure| figure.name == name).unwrap_or_else(|| panic!("{name}")).reading
}

#[test]
fn every_refusal_is_counted_by_its_kind() {
    let (_scratch, dir) = place();
    let db = Db::open(&dir).unwrap();
    let rows = db.keyspace("rows", external()).unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    rows.put_operation(token(5), OperationId::new(2), b"a", b"v").unwrap();
    let before = db.stats();
    assert!(matches!(rows.put(token(4), b"a", b"v"), Err(Error::Fenced { .. })));
    rows.raise_all(token(3)).unwrap();
    assert!(matches!(rows.raise_all(token(2)), Err(Error::Fenced { .. })));
    assert!(matches!(jobs.put(token(9), b"a", b"v"), Err(Error::UnknownToken { .. })));
    assert!(matches!(rows.put_if(token(5), b"a", b"v", Expect::Absent), Err(Error::Conflict { .. })));
    assert!(matches!(
        rows.put_operation(token(5), OperationId::new(2), b"a", b"v"),
        Err(Error::Duplicate { .. })
    ));
    assert!(matches!(
        rows.put_operation(token(5), OperationId::new(1), b"a", b"v"),
        Err(Error::StaleOperation { .. })
    ));
    let after = db.stats();
    let counts =
        [after.fenced, after.unknown_tokens, after.conflicts, after.duplicates, after.other_refusals];
    assert_eq!(counts, [2, 1, 1, 1, 1]);
    assert_eq!((before.refused, after.refused), (0, 6));
    assert_eq!(reading(&after, "fenced"), Reading::Counter(2));
}

#[test]
fn commits_are_summarised_once_a_group() {
    let (_scratch, dir) = place();
    let db = Db::open(&dir).unwrap();
    let rows = db.keyspace("rows", external()).unwrap();
    let begun = std::time::Instant::now();
    let before = db.stats();
    for _ in 0..20 {
        rows.put(token(1), b"a", b"v").unwrap();
    }
    let mut commits = Vec::new();
    for at in 0..1000u32 {
        commits.push(rows.submit_put(token(1), &at.to_be_bytes(), b"v").unwrap());
    }
    for commit in commits {
        commit.wait().unwrap();
    }
    let after = db.stats();
    assert_eq!(after.writes - before.writes, 1020);
    let groups = after.group_writes.count - before.group_writes.count;
    assert!((21..=1020).contains(&groups), "{groups} groups");
    let frames = after.group_writes.sum - before.group_writes.sum;
    assert!(
        (1020..=1020 + groups).contains(&frames),
        "every write is in one group, an idle frame in few: {frames}"
    );
    assert_eq!(after.commit_nanos.count, after.group_writes.count);
    assert!(after.sync_nanos.count >= groups, "each group was synced");
    let Summary { count, sum, p50, p90, p99, p999, max, .. } = after.commit_nanos;
    assert!(0 < p50 && p50 <= p90 && p90 <= p99 && p99 <= p999 && p999 <= max, "{:?}", after.commit_nanos);
    assert!(max <= sum && sum <= max * count);
    assert!(u128::from(max) <= begun.elapsed().as_nanos(), "{max} ns since the first of them");
    assert!(after.sync_nanos.p50 <= after.commit_nanos.max, "a sync is part of a commit");
}

#[test]
fn gauges_follow_what_is_there() {
    let (_scratch, dir) = place();
    let db = Options::new().segment_bytes(MIN_SEGMENT_BYTES).open(&dir).unwrap();
    let rows = db.keyspace("rows", external()).unwrap();
    rows.put(token(1), b"large", &[7; 5000]).unwrap();
    rows.put(token(1), b"small", b"v").unwrap();
    let snapshot = db.snapshot();
    rows.put(token(1), b"small", b"w").unwrap();
    rows.put(token(1), b"small", b"x").unwrap();
    let value = rows.get(b"large").unwrap().unwrap();
    let stats = db.stats();
    assert_eq!((stats.keyspaces, stats.keys, stats.snapshots, stats.snapshot_lag), (1, 2, 1, 2));
    assert_eq!(stats.pinned_values, 1);
    assert!(stats.pinned_bytes >= 5000 && stats.pinned_bytes <= stats.disk_bytes, "{stats:?}");
    assert!(stats.spares < stats.segments, "{stats:?}");
    let files = std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap());
    let bytes: u64 = files
        .filter(|file| file.file_name().to_str().unwrap().ends_with(".seg"))
        .map(|file| file.metadata().unwrap().len())
        .sum();
    // The spare in the making, if there is one, is not listed yet.
    assert!(stats.disk_bytes <= bytes, "{} listed, {bytes} there", stats.disk_bytes);
    drop((snapshot, value));
    let stats = db.stats();
    assert_eq!((stats.pinned_values, stats.pinned_bytes, stats.snapshots, stats.snapshot_lag), (0, 0, 0, 0));
    assert_eq!(reading(&stats, "keys"), Reading::Gauge(2));
}

/// The list of figures and the fields of the struct are the same.
#[test]
fn every_field_is_a_figure() {
    let stats = Stats::default();
    let shown = format!("{stats:?}");
    let figures = stats.figures();
    for figure in &figures {
        assert!(shown.contains(&format!("{}: ", figure.name)), "{}", figure.name);
    }
    let mut names: Vec<_> = figures.iter().map(|figure| figure.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), figures.len(), "a figure twice");
}

/// A copy of `STORE` that was damaged is repaired, and an operator hears of it: the disk may be failing.
#[test]
fn health_tells_of_damage_that_was_read_around() {
    let (_scratch, dir) = place();
    Db::open(&dir).unwrap().close().unwrap();
    let file = dir.join("STORE");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    assert!(Inspection::of(&dir).unwrap().has_damaged_copy());
    let db = Db::open(&dir).unwrap();
    let health = db.health();
    assert!(!health.is_healthy() && health.is_writable());
    assert!(health.to_string().starts_with("degraded: read around damage: one copy of STORE"), "{health}");
    assert!(
        matches!(&health, Health::Degraded(warnings) if matches!(warnings[..], [Warning::ReadAround(_)]))
    );
    assert!(!Inspection::of(&dir).unwrap().has_damaged_copy(), "repaired");
    db.close().unwrap();
    assert!(Db::open(&dir).unwrap().health().is_healthy());
}

fn published(dir: &Path) -> Option<serde_json::Value> {
    let text = std::fs::read_to_string(dir.join("STATS")).ok()?;
    Some(serde_json::from_str(&text).expect("the file is replaced as a whole"))
}

#[test]
fn figures_are_published_as_a_whole_and_go_with_the_store() {
    let (_scratch, dir) = place();
    let db = Options::new().publish_stats(Duration::from_millis(10)).open(&dir).unwrap();
    let rows = db.keyspace("rows", external()).unwrap();
    let mut written = 0;
    let begun = std::time::Instant::now();
    // Read as fast as it is replaced; each time whole, until the last write is in it.
    loop {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is published");
        if written < 50 {
            rows.put(token(1), b"a", b"v").unwrap();
            written += 1;
        }
        let Some(seen) = published(&dir) else { continue };
        assert_eq!(seen["pid"], std::process::id());
        assert_eq!(seen["incarnation"], format!("{:016x}", Inspection::of(&dir).unwrap().incarnation()));
        if seen["stats"]["writes"] == 50 {
            assert_eq!(seen["state"], "healthy");
            assert_eq!(seen["stats"].as_object().unwrap().len(), db.stats().figures().len());
            break;
        }
    }
    drop(rows);
    db.close().unwrap();
    assert!(!dir.join("STATS").exists() && !dir.join("STATS.new").exists());
    Db::open(&dir).unwrap().close().unwrap();
    assert!(!dir.join("STATS").exists(), "nobody asked for it");
}

#[test]
fn a_strangers_file_is_named_and_stays_and_what_a_crash_left_goes() {
    for name in ["STATS", "STATS.new"] {
        let (_scratch, dir) = place();
        Db::open(&dir).unwrap().close().unwrap();
        let before = Inspection::of(&dir).unwrap().incarnation();
        let file = dir.join(name);
        let open = || Options::new().publish_stats(Duration::from_secs(60)).open(&dir);
        std::fs::write(&file, "a file of my own").unwrap();
        let refused = open().unwrap_err();
        assert!(refused.to_string().contains(&format!("{name} in")), "{refused}");
        assert!(matches!(refused, Error::InvalidArgument(_)));
        assert_eq!(std::fs::read(&file).unwrap(), b"a file of my own");
        assert_eq!(Inspection::of(&dir).unwrap().incarnation(), before, "nothing was begun");
        // Whoever does not publish is not concerned.
        Db::open(&dir).unwrap().close().unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"a file of my own");
        for left in [&b""[..], &[0; 700], b"{\"tidewall_stats\":1,\"pi", b"{\"tide"] {
            std::fs::write(&file, left).unwrap();
            open().unwrap().close().unwrap();
            assert!(!dir.join("STATS").exists() && !dir.join("STATS.new").exists(), "{left:?}");
        }
    }
}

#[test]
fn publishing_needs_a_thread_and_a_sensible_interval() {
    let (_scratch, dir) = place();
    let second = Duration::from_secs(1);
    for options in [
        Options::new().publish_stats(Duration::ZERO),
        Options::new().publish_stats(Duration::from_millis(9)),
        Options::new().publish_stats(Duration::MAX),
        Options::new().publish_stats(second).read_only(),
        Options::new().publish_stats(second).without_threads(),
    ] {
        assert!(matches!(options.open(&dir), Err(Error::InvalidArgument(_))));
    }
    assert!(!dir.exists(), "nothing was made");
}

/// From outside and from inside the log is the same.
#[test]
fn an_inspection_sees_what_is_durable_and_nothing_of_what_is_not_there() {
    let (_scratch, dir) = place();
    assert!(matches!(Inspection::of(&dir), Err(Error::Io { .. })));
    let db = Options::new().segment_bytes(MIN_SEGMENT_BYTES).open(&dir).unwrap();
    let rows = db.keyspace("rows", external()).unwrap();
    for at in 0..200u32 {
        rows.put(token(1), &at.to_be_bytes(), &[at as u8; 300]).unwrap();
        if at % 20 == 0 {
            let seen = Inspection::of(&dir).unwrap();
            let mut keys = 0;
            for info in seen.segments().unwrap() {
                assert!(!matches!(info.state, SegmentState::Damaged(_)), "{info:?}");
                let log = seen.log(info.segment).unwrap();
                assert_eq!(log.damage, None);
                let ops = log.frames.iter().flat_map(|frame| &frame.ops);
                keys += ops.filter(|op| matches!(op.what, LogChange::Put { .. })).count();
            }
            assert_eq!(keys, at as usize + 1, "each durable write, once");
        }
    }
    let seen = Inspection::of(&dir).unwrap();
    assert!(matches!(seen.log(999), Err(Error::InvalidArgument(_))));
    let sealed = seen.segments().unwrap();
    let sealed = sealed.iter().filter(|info| matches!(info.state, SegmentState::Sealed { .. })).count();
    assert!(sealed >= 3, "{sealed} segments are sealed");
}

#[cfg(feature = "tracing")]
mod events {
    use super::*;
    use std::fmt::Write;
    use std::sync::{LazyLock, Mutex};
    use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

    /// Every event of this process as a line, of all tests together: the directory tells them apart.
    static HEARD: LazyLock<Mutex<Vec<String>>> = LazyLock::new(|| {
        struct Heard;
        impl<S: tracing::Subscriber> Layer<S> for Heard {
            fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
                struct Fields(String);
                impl tracing::field::Visit for Fields {
                    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                        write!(self.0, " {}={value:?}", field.name()).unwrap();
                    }
                }
                let about = event.metadata();
                let mut fields = Fields(format!("{} {}", about.level(), about.target()));
                event.record(&mut fields);
                HEARD.lock().unwrap().push(fields.0);
            }
        }
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Heard)).unwrap();
        Mutex::new(Vec::new())
    });

    fn listen() {
        LazyLock::force(&HEARD);
    }

    #[track_caller]
    fn assert_heard(dir: &str, words: &[&str]) {
        let heard = HEARD.lock().unwrap();
        let of_dir: Vec<_> = heard.iter().filter(|line| line.contains(dir)).collect();
        let found = of_dir.iter().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(found, "{words:?} is not in {of_dir:#?}");
    }

    #[test]
    fn what_happens_to_a_store_is_told() {
        listen();
        let (_scratch, dir) = place();
        let name = dir.canonicalize().unwrap_or_else(|_| dir.clone()).display().to_string();
        let db = Options::new().segment_bytes(MIN_SEGMENT_BYTES).open(&dir).unwrap();
        let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
        let lease = jobs.lease(b"a").acquire().unwrap();
        for _ in 0..10 {
            jobs.put(lease.token(), b"a", &[7; 4000]).unwrap();
        }
        jobs.break_lease(b"a", "stuck").unwrap();
        drop((lease, jobs));
        assert!(db.compact().unwrap().segments > 0);
        db.close().unwrap();
        assert_heard(&name, &["INFO tidewall", "message=opened", "segments=0", "ops=0"]);
        assert_heard(&name, &["INFO tidewall", "created a keyspace", "keyspace=\"jobs\""]);
        assert_heard(&name, &["DEBUG tidewall", "sealed a segment", "segment=1"]);
        assert_heard(&name, &["DEBUG tidewall", "made a spare segment"]);
        assert_heard(&name, &["DEBUG tidewall", "retired a segment", "segment=1"]);
        assert_heard(&name, &["WARN tidewall", "broke a lease", "token=1", "reason=stuck"]);
        assert_heard(&name, &["INFO tidewall", "message=closed"]);
        let file = dir.join("STORE");
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[20] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        drop(Db::open(&dir).unwrap());
        assert_heard(&name, &["WARN tidewall", "read around damage", "one copy of STORE"]);
    }

    #[cfg(feature = "testkit")]
    #[test]
    fn a_full_disk_and_a_failed_sync_are_told() {
        use tidewall::storage::{CallKind, Fault, SimDisk};
        listen();
        let disk = SimDisk::new();
        let name = tidewall::storage::Storage::describe(&disk);
        let db = Options::new().storage(disk.clone()).without_threads().open("sim").unwrap();
        let rows = db.keyspace("rows", external()).unwrap();
        disk.set_budget(Some(0));
        let mut key = 0u32;
        while rows.put(token(1), &key.to_be_bytes(), &[7; 4000]).is_ok() {
            key += 1;
        }
        assert_heard(&name, &["WARN tidewall", "no space for a spare segment", "bytes="]);
        disk.set_budget(None);
        disk.fail(Fault::errno(CallKind::SyncData, 5));
        while rows.put(token(1), b"a", b"v").is_ok() {}
        assert_heard(&name, &["ERROR tidewall", "poisoned", "cause="]);
    }
}

#[cfg(feature = "metrics")]
mod facade {
    use super::*;
    use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    type Seen = Arc<Mutex<BTreeMap<String, f64>>>;

    /// Keeps what it is told under the name and labels.
    struct Recorder(Seen);

    struct Metric(String, Seen);

    impl Metric {
        fn keep(&self, value: f64) {
            self.1.lock().unwrap().insert(self.0.clone(), value);
        }
    }

    impl metrics::CounterFn for Metric {
        fn increment(&self, _: u64) {
            panic!("a counter of the store is set, not counted again");
        }
        fn absolute(&self, value: u64) {
            self.keep(value as f64);
        }
    }

    impl metrics::GaugeFn for Metric {
        fn increment(&self, _: f64) {
            panic!("a gauge is set");
        }
        fn decrement(&self, _: f64) {
            panic!("a gauge is set");
        }
        fn set(&self, value: f64) {
            self.keep(value);
        }
    }

    impl Recorder {
        fn metric(&self, key: &Key) -> Arc<Metric> {
            let labels: Vec<_> =
                key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            Arc::new(Metric(format!("{}{{{}}}", key.name(), labels.join(",")), self.0.clone()))
        }
    }

    impl metrics::Recorder for Recorder {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.metric(key))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.metric(key))
        }
        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            panic!("{key:?}: numbers that are summarised already");
        }
    }

    #[test]
    fn metrics_carry_every_figure_under_its_name() {
        let (_scratch, dir) = place();
        let db = Db::open(&dir).unwrap();
        let rows = db.keyspace("rows", external()).unwrap();
        rows.put(token(2), b"a", b"v").unwrap();
        assert!(rows.put(token(1), b"a", b"v").is_err());
        let stats = db.stats();
        let recorder = Recorder(Seen::default());
        metrics::with_local_recorder(&recorder, || stats.publish_metrics("jobs"));
        let seen = recorder.0.lock().unwrap();
        let of = |name: &str| *seen.get(name).unwrap_or_else(|| panic!("{name} is not in {seen:#?}"));
        assert_eq!(of("tidewall_fenced_total{store=jobs}"), 1.0);
        assert_eq!(of("tidewall_writes_total{store=jobs}"), 1.0);
        assert_eq!(of("tidewall_keys{store=jobs}"), 1.0);
        assert_eq!(of("tidewall_disk_bytes{store=jobs}"), stats.disk_bytes as f64);
        let Summary { count, sum, p99, max, .. } = stats.commit_nanos;
        assert!(count > 0 && p99 > 0);
        assert_eq!(of("tidewall_commit_seconds_count{store=jobs}"), count as f64);
        assert_eq!(of("tidewall_commit_seconds_sum{store=jobs}"), sum as f64 * 1e-9);
        assert_eq!(of("tidewall_commit_seconds{store=jobs,quantile=0.99}"), p99 as f64 * 1e-9);
        assert_eq!(of("tidewall_commit_seconds{store=jobs,quantile=1}"), max as f64 * 1e-9);
        assert_eq!(of("tidewall_hand_over_seconds_mean{store=jobs}"), 0.0);
        let summaries = stats.figures().iter().filter(|f| matches!(f.reading, Reading::Summary(_))).count();
        // A summary is five percentiles, a count and a sum.
        assert_eq!(seen.len(), stats.figures().len() + 6 * summaries);
    }
}
