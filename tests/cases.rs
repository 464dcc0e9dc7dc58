//! Faults that were reported of other stores and lease systems, and where each is tried here.
//!
//! What was reported of leases is in `lease_cases.rs`; crashes at every call are in the crash tests.
//!
//! | reported at | tried by |
//! |---|---|
//! | etcd 9888, 9395, MetaStore 49 (leases revived by restarts) | `a_lease_is_over_after_each_of_ten_restarts_within_its_ttl`, claims `reopening_ends_every_lease_and_keeps_every_mark` |
//! | etcd 14019, 10686 (expiry through a bounded channel) | `ten_thousand_expired_leases_are_all_taken_over` |
//! | rustfs 5939 (ttl 0) | claims `a_ttl_is_from_one_millisecond_on_or_infinite_by_name` |
//! | dynamolock 280, dynamodb-lock-client 116, etcd-client 87, fountain 2346 (renewals) | claims `l4_a_remote_holder_renews_and_releases_by_key_token_and_owner`, `l4_a_renewal_after_expiry_fails_for_ever` |
//! | etcd 11886, jetcd 749 (many keep-alives) | `ten_thousand_renewed_leases_all_live` |
//! | curator 727, patroni 2787 (goes on after losing the session) | claims `f4_a_grant_has_raised_the_mark_before_anyone_holds_it` |
//! | ShedLock 74, dashpay 4476, curator 1193 (releasing somebody else's lock) | claims `l4_a_release_by_an_old_holder_leaves_its_successors_alone` |
//! | eventstore 176, kubernetes 77585 (one owner, one token) | claims `l2_the_same_owner_gets_a_new_token_with_every_grant`, `random_owners_differ` |
//! | ai-memory 2328, caplets 222, nats.rs 1301 (double grants) | claims `l1_l2_sixteen_threads_on_three_fences_never_hold_one_twice` |
//! | cockroach 101836, oxia 87 (grant before its mark is durable) | claims `f4_a_grant_has_raised_the_mark_before_anyone_holds_it`, `l5_an_overtaken_pending_grant_is_not_handed_out` |
//! | kubernetes 71490 (released while guarded code runs) | `a_released_lease_still_writes_until_somebody_newer_comes` |
//! | cosmos 91, slatedb 352 and 1622, bookkeeper 4462, golem 3845, kafka 7388 (marks lost with values) | claims `f2_a_mark_survives_its_value` |
//! | pd 6698, 4885, 11086; rocksdb 8488 (counters fall back) | claims `l2_tokens_strictly_increase_across_reopening_and_power_cuts` |
//! | pd 940, tidb 5709, rocksdb (clock moved back), rust 87906, cert-manager 8464 | `no_clock_lets_a_fenced_writer_through_or_two_hold_one_fence` |
//! | kafka 21506, 13499 (last epoch) | claims `l2_an_exhausted_counter_grants_nothing_and_writes_go_on` |
//! | hazelcast 17436, celld 158, bookkeeper 4812 (wrong or emptied directory) | bad_input `a_store_that_must_exist_is_not_made_and_nothing_is_left_behind` |
//! | slatedb 271, sled 1234 and 1289 (opened twice, lock kept) | bad_input `a_second_process_is_locked_out_and_one_that_is_killed_leaves_no_lock`, `a_store_is_opened_at_once_after_it_was_dropped` |
//! | temporal 12016, mycelium 96 (unfenced clean-up, token read back) | mutators, all of it; a `Mark` is no `Token` (types.rs) |
//! | bookkeeper 2143, pulsar 6751, reddb 1913 (errors without the numbers) | claims `a_fenced_writer_is_told_the_fence_both_numbers_and_what_to_do` |
//! | rslock 30, OpenSOVD 525 (Drop does nothing, or blocks) | claims `dropping_a_lease_releases_it_at_once_and_without_io` |
//! | bullmq 3183 (a job finished twice) | claims `a_retry_is_recognised_also_after_a_power_cut` |
//! | slatedb 266, 271 (F2) | claims `f2_racing_writers_of_one_fence_are_admitted_in_the_order_of_their_tokens` |
//! | slatedb 269 (F3: retried for ever) | claims `a_fenced_writer_is_told_the_fence_both_numbers_and_what_to_do` |
//! | turso 2091 (F5), redb 299 (D26) | claims `d5_after_a_failed_sync_nothing_is_acknowledged_until_the_store_is_reopened`, `r1_what_an_open_shows_survives_a_power_cut_right_behind_it` |
//! | fjall 241 (D4), svix 796 (D29) | model |
//! | fjall 112, lsm-tree 230 (D6: lost inserts) | `many_distinct_keys_are_all_there_before_and_after_reopening` |
//! | sled 1533 (D12), fjall 135 (O4) | bad_input `foreign_files_are_ignored_and_never_deleted` |
//! | bitcask 136 (D14), garnet 2150 (D18), tikv 14304 (D19), rocksdb 7701 (D20) | claims `r2_damage_to_a_sealed_segment_is_named_and_the_files_are_left_alone`, `r2_a_missing_or_cut_segment_is_named` |
//! | surrealkv 264 (D16), rocksdb 1351 (D22) | claims `d1_r1_what_was_acknowledged_survives_every_kind_of_power_cut` |
//! | rocksdb 12918 (D21) | claims `r3_a_segment_of_another_store_in_place_of_ones_own_is_refused` |
//! | rocksdb 12995 (D23) | claims `d2_of_a_batch_cut_off_by_the_power_everything_is_there_or_nothing` |
//! | fjall 53, skytable 333 (D27) | `a_record_torn_at_any_byte_is_cut_and_the_next_ones_are_whole` |
//! | redb 620 (E1), rocksdb 919 (E2), raft-engine 344 (E3) | claims `a_full_disk_refuses_puts_only_and_freed_space_heals_it`, `a_store_opens_on_a_full_disk` |
//! | hashi 1008 (E7) | claims `d5_after_a_failed_sync_nothing_is_acknowledged_until_the_store_is_reopened` |
//! | acid-state 175 (E10) | `closing_reports_a_failed_sync` |
//! | lsm-tree 310, fjall 263 (E11: a panic half-way) | `a_panic_in_the_disk_leaves_nobody_waiting` |
//! | bitcask 196 (G3) | `an_update_writes_little_more_than_its_own_bytes` |
//! | fjall 257 (G6) | claims `l2_tokens_strictly_increase_across_reopening_and_power_cuts` |
//! | sled 1509 (D13: no way to repair) | verify and salvage, all of them |
//! | surrealdb 7426 and 5001 (D15: names what is not there) | checkpoint `the_power_goes_at_every_call_of_a_checkpoint` and `…_of_a_restore` |
//! | garnet 559 (D18: less comes up than was there) | checkpoint `damaged_copies_are_named_and_leave_nothing` |
//! | raft-engine 344, tikv 15755 (E3, E4, of copies) | checkpoint `a_full_disk_stops_a_checkpoint_and_nothing_else` |
//! | redb 811 and 958 (O7: tools beside a writer) | verify `a_store_that_is_open_is_locked` |
//! | bitcask 163 (O3), py-lmdb 141 (O6), redb 811 (O7) | bad_input `a_lock_file_with_any_content_opens`, `a_read_only_medium_is_read_and_not_written` |
//! | redb 30 (P1) | claims `a_commit_is_a_future_of_any_runtime_and_commits_resolve_in_order` |
//! | sled 1127 (P3) | `a_counter_kept_with_conditions_counts_every_thread` |
//! | redb 579 (P4) | claims `s1_s2_a_snapshot_stays_while_keys_are_deleted_and_written_again` |
//! | raft-engine 288 (D1: an interrupted rewrite loses data) | crash, which cuts compaction off at every call, and the next one too |
//! | bitcask 82, 148, 156 (D2: a dropped tombstone) | compact `an_older_version_in_a_segment_that_stays_does_not_come_back`, `many_keys_in_every_order_stay_as_they_are` |
//! | rocksdb 2722 (D3: deleted keys reappear) | compact `nothing_that_can_be_seen_changes`, `a_delete_waits_for_who_still_sees_the_value` |
//! | fjall 288 (D5: an idle keyspace pins the log) | `an_idle_keyspace_keeps_nothing_else` |
//! | tikv 14478, redb 639 and 1055, ord 2256 (D9, D10: a slow, silent repair), sled 976 and 1410 (D11: reads half the store) | `Options::progress`; `cargo bench --bench recover`, beside the floor of reading the files; crash, which cuts recovery off too |
//! | rocksdb 10573 and 5287, leveldb 195 and 196, mongo-rocks 35 (D24: a directory not synced) | every crash test: the simulated disk forgets names whose directory was not synced; `storage/disk.rs` syncs the parent of the directory at each open |
//! | bitcask 212, riak_kv 1120 (D30: caches read unchecked) | damage, of every bit of the key tables and the index file |
//! | tikv 13123 (D31: recovery in parallel) | the tests of `read_ahead.rs`, against one after the other |
//! | rocksdb 8488 (D32) | claims `l2_tokens_strictly_increase_across_reopening_and_power_cuts`; kill |
//! | RocksDB (D33: the clock moved back) | `no_clock_lets_a_fenced_writer_through_or_two_hold_one_fence`; nothing but leases reads a clock |
//! | tikv 15718 and 10688 (E5: the file that holds space back is missing) | cannot happen: the reserve is spare segments, and a listed file that is missing is named at open |
//! | lsm-tree 304 (E8: one refused rename) | `one_refused_rename_or_removal_costs_nothing` |
//! | lsm-tree 310, fjall 263 (E11: compaction fails for ever) | `damage_below_a_compaction_is_named_and_left_alone` |
//! | sled 1333, rust-fil-sector-builder 71 (G1) | compact `overwriting_for_ever_stays_bounded` |
//! | redb 1165 and 934 (G2: compaction grows the file) | `compaction_never_leaves_more_than_it_found` |
//! | lsm-tree 125 (G7: deletes pile up) | `deleting_everything_leaves_nothing` |
//! | sled 1234 and 1289 (O2) | bad_input `a_store_is_opened_at_once_after_it_was_dropped` |
//! | surrealkv 363 (O5: a directory cannot be synced on Windows) | cannot happen: `storage/disk.rs` does not try there |
//! | redb 515 (O10: beyond 4 GiB) | cannot happen: a place is a segment and an offset, and no segment is above 64 MiB (`MAX_SEGMENT_BYTES`); sums are 64-bit |
//! | sled 654 and 1160, thaler 2100, atomic-server 901 (P2: not durable by default) | claims `d1_r1_what_was_acknowledged_survives_every_kind_of_power_cut`: there is no other mode |
//! | bitcask 164 (P9: harmless messages as errors) | a cut tail is told by `OpenReport::cut_bytes`, and by no event above `INFO` (`events.rs`) |
//! | oxen 822 (P10: errors told apart by their text) | bad_input, which matches variants |
//! | RocksDB (P6), merk 23 (P7), heed 152 (P8), diom 73 (P11), redb 925 (P12) | bad_input |

#[macro_use]
mod store;

use std::time::Duration;
use store::{Sim, ms, secs, token};
use tidewall::storage::{CallKind, Crash, Fault};
use tidewall::*;

fn rows(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

fn jobs(db: &Db) -> Keyspace {
    db.keyspace("jobs", KeyspaceOptions::new()).unwrap()
}

#[test]
fn a_lease_is_over_after_each_of_ten_restarts_within_its_ttl() {
    let mut sim = Sim::new();
    let mut db = sim.open();
    for round in 0..10 {
        let lease = jobs(&db).lease(b"a").owner(OwnerId::new(1)).ttl(secs(1000)).acquire().unwrap();
        let named = (lease.token(), lease.owner());
        std::mem::forget(lease);
        sim.clock.advance(secs(1));
        db = if round % 2 == 0 { sim.reopen(db) } else { sim.power_cut() };
        assert_err!(jobs(&db).renew(b"a", named.0, named.1), Error::NotHeld { .. });
    }
}

fn leases(jobs: &Keyspace, count: u32) -> Vec<Lease> {
    (0..count).map(|n| jobs.lease(&n.to_be_bytes()).ttl(secs(10)).acquire().unwrap()).collect()
}

#[test]
fn ten_thousand_expired_leases_are_all_taken_over() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = jobs(&db);
    let old = leases(&jobs, 10_000);
    sim.clock.advance(secs(10));
    let new = leases(&jobs, 10_000);
    for (n, (old, new)) in old.iter().zip(&new).enumerate() {
        assert!(!old.is_live() && new.is_live());
        if n % 100 == 0 {
            let key = (n as u32).to_be_bytes();
            assert_err!(jobs.put(old.token(), &key, b"late"), Error::Fenced { .. });
        }
    }
    assert!(db.stats().leases < 20_001);
}

#[test]
fn ten_thousand_renewed_leases_all_live() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = jobs(&db);
    let held = leases(&jobs, 10_000);
    for _ in 0..10 {
        sim.clock.advance(ms(3_333));
        for lease in &held {
            lease.renew().unwrap();
        }
    }
    assert!(held.iter().all(Lease::is_live));
    assert_eq!(db.stats().takeovers, 0);
}

#[test]
fn random_owners_differ() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let jobs = jobs(&db);
    let owners = (0..100u32).map(|n| jobs.lease(&n.to_be_bytes()).acquire().unwrap().owner());
    assert_eq!(owners.collect::<std::collections::HashSet<_>>().len(), 100);
}

#[test]
fn a_released_lease_still_writes_until_somebody_newer_comes() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = jobs(&db);
    let lease = jobs.lease(b"a").acquire().unwrap();
    let old = lease.token();
    lease.release().unwrap();
    jobs.put(old, b"a", b"the code it guarded was not done").unwrap();
    let _new = jobs.lease(b"a").acquire().unwrap();
    assert_err!(jobs.put(old, b"a", b"late"), Error::Fenced { .. });
}

/// Suspend, freeze, jumps in both directions: a clock decides when somebody may take over, and no more.
#[test]
fn no_clock_lets_a_fenced_writer_through_or_two_hold_one_fence() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = jobs(&db);
    let mut held: Vec<Lease> = Vec::new();
    let mut newest = 0;
    let start = sim.clock.now();
    let instants = [0, 5, 20, 3, 0, 1_000_000, 7, 2, u64::MAX / 2_000_000_000, 1, 40, 0];
    for (round, &at) in instants.iter().cycle().take(200).enumerate() {
        sim.clock.set(start.saturating_add(at.saturating_mul(1_000_000_000 * (1 + round as u64 % 3))));
        if let Ok(lease) = jobs.lease(b"a").ttl(secs(10)).acquire() {
            assert!(lease.token().get() > newest);
            newest = lease.token().get();
            held.push(lease);
        }
        for (n, lease) in held.iter().enumerate() {
            let is_newest = n + 1 == held.len();
            assert!(is_newest || (!lease.is_live() && lease.renew().is_err()), "an older lease lives");
            let written = jobs.put(lease.token(), b"a", b"x");
            assert_eq!(written.is_ok(), is_newest, "{written:?}");
        }
    }
    assert!(held.len() > 5, "{} grants", held.len());
}

#[test]
fn many_distinct_keys_are_all_there_before_and_after_reopening() {
    for seed in 0..3u64 {
        let sim = Sim::new();
        let db = sim.open();
        let ks = rows(&db);
        let key = |n: u64| {
            let word = (n ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            [&word.to_be_bytes()[..], &vec![n as u8; if n.is_multiple_of(5) { 300 } else { 3 }]].concat()
        };
        for from in (0..6_000).step_by(200) {
            let mut batch = db.batch();
            for n in from..from + 200 {
                batch.put(&ks, token(1), &key(n), &n.to_le_bytes()).unwrap();
            }
            batch.commit().unwrap();
        }
        assert_eq!(ks.iter().count(), 6_000);
        let db = sim.reopen(db);
        let ks = rows(&db);
        assert_eq!(ks.iter().count(), 6_000);
        assert!(
            (0..6_000).all(|n| ks.get(&key(n)).unwrap().is_some_and(|value| value[..] == n.to_le_bytes()))
        );
    }
}

/// The last record is lost from each of its bytes on; then two more lives.
#[test]
fn a_record_torn_at_any_byte_is_cut_and_the_next_ones_are_whole() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    ks.put(token(1), b"first", b"1").unwrap();
    let whole = sim.disk.read_file("000001.seg").unwrap();
    let mut batch = db.batch();
    batch.put(&ks, token(2), b"half", b"of a batch").unwrap().put(&ks, token(2), b"and", b"half").unwrap();
    batch.commit().unwrap();
    let longer = sim.disk.read_file("000001.seg").unwrap();
    let end = longer.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    let start = whole.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    assert!(start + 50 < end);
    for torn_at in start..end {
        let torn = Sim::on(sim.disk.crash(Crash::None, 0));
        let mut bytes = longer.clone();
        bytes[torn_at..].fill(0);
        torn.disk.write_file("000001.seg", &bytes);
        for life in 0..2u64 {
            let seed = 1_000 + torn_at as u64 * 2 + life;
            let db = torn.options().deterministic(seed).open("sim").unwrap();
            let ks = rows(&db);
            assert_eq!(ks.iter().count() as u64, 1 + life, "torn at {torn_at}");
            assert_eq!(ks.get(b"half").unwrap(), None);
            let most = if life == 0 { torn_at - start } else { 0 };
            assert!(db.report().cut_bytes <= most as u64, "torn at {torn_at}");
            ks.put(token(3), &life.to_be_bytes(), b"next").unwrap();
        }
    }
}

#[test]
fn closing_reports_a_failed_sync() {
    let sim = Sim::new();
    let db = sim.open();
    drop(rows(&db).submit_put(token(1), b"a", b"not waited for").unwrap());
    sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
    assert_err!(db.close(), Error::Indeterminate { cause } if cause.raw_os_error() == Some(5));
    let db = sim.open();
    rows(&db).put(token(1), b"b", b"").unwrap();
    // Sealing is all that is left to do here, and its failure is told as well.
    sim.disk.fail(Fault::errno(CallKind::SyncData, 5));
    assert_err!(db.close(), Error::Io { .. });
    assert!(rows(&sim.open()).contains_key(b"b").unwrap());
}

mod trap {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tidewall::storage::{Access, File, Mapping, SimDisk, Storage};

    /// What a value holds whose sync panics.
    pub const BAIT: &[u8] = b"on its way";

    /// A disk that panics in the sync of a file into which the bait was written.
    #[derive(Clone, Debug)]
    pub struct Trap(pub SimDisk);

    impl Storage for Trap {
        fn lock(&self, name: &str) -> io::Result<Box<dyn Send + Sync>> {
            self.0.lock(name)
        }

        fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn File>> {
            Ok(Arc::new(TrapFile(self.0.open(name, access)?, AtomicBool::new(false))))
        }

        fn list(&self) -> io::Result<Vec<String>> {
            self.0.list()
        }

        fn remove(&self, name: &str) -> io::Result<()> {
            self.0.remove(name)
        }

        fn rename(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.rename(from, to)
        }

        fn sync_dir(&self) -> io::Result<()> {
            self.0.sync_dir()
        }

        fn describe(&self) -> String {
            "trap".to_owned()
        }
    }

    #[derive(Debug)]
    struct TrapFile(Arc<dyn File>, AtomicBool);

    impl File for TrapFile {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            self.0.read_at(buf, offset)
        }

        fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
            if buf.windows(BAIT.len()).any(|bytes| bytes == BAIT) {
                self.1.store(true, Ordering::Release);
            }
            self.0.write_at(buf, offset)
        }

        fn sync_data(&self) -> io::Result<()> {
            assert!(!self.1.swap(false, Ordering::AcqRel), "the trap");
            self.0.sync_data()
        }

        fn len(&self) -> io::Result<u64> {
            self.0.len()
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.0.set_len(len)
        }

        fn map(&self, len: usize) -> io::Result<Mapping> {
            self.0.map(len)
        }
    }
}

/// Lsm-tree 310: a panic in the middle of a commit, whoever makes it, poisons the store; nobody waits for ever.
#[test]
fn a_panic_in_the_disk_leaves_nobody_waiting() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let disk = tidewall::storage::SimDisk::new();
    for threads in [false, true] {
        let options = Options::new().storage(trap::Trap(disk.clone()));
        let db = if threads { options } else { options.without_threads() }.open("trap").unwrap();
        let ks = rows(&db);
        ks.put(token(1), b"a", b"before").unwrap();
        let waiting = ks.submit_put(token(1), b"b", trap::BAIT).unwrap();
        let answer = catch_unwind(AssertUnwindSafe(|| waiting.wait()));
        if threads {
            assert_err!(answer.expect("the thread of the store panicked"), Error::Indeterminate { .. });
        } else {
            answer.expect_err("this thread made the commit");
        }
        assert_err!(ks.put(token(1), b"c", b"after"), Error::Poisoned { .. });
        assert!(matches!(db.health(), Health::Poisoned(_)));
        assert!(ks.get(b"a").unwrap().is_some(), "what is durable is read on");
        drop((ks, db));
        let db = Options::new().storage(disk.clone()).open("sim").unwrap();
        assert!(!rows(&db).contains_key(b"c").unwrap());
    }
}

#[test]
fn an_update_writes_little_more_than_its_own_bytes() {
    let sim = Sim::new();
    let db = sim.options().segment_bytes(1 << 20).open("sim").unwrap();
    let ks = rows(&db);
    ks.put(token(1), b"key", &[0; 100]).unwrap();
    let before = db.stats().written_bytes;
    for n in 0..1000u64 {
        ks.put(token(1), b"key", &[n as u8; 100]).unwrap();
    }
    let each = (db.stats().written_bytes - before) / 1000;
    assert!((103..=170).contains(&each), "{each} bytes for 103");
}

#[test]
fn a_counter_kept_with_conditions_counts_every_thread() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(dir.path().join("d")).unwrap();
    let ks = rows(&db);
    ks.put(token(1), b"n", &0u64.to_le_bytes()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    loop {
                        let seen = ks.get(b"n").unwrap().unwrap();
                        let n = u64::from_le_bytes(seen[..].try_into().unwrap());
                        let next = (n + 1).to_le_bytes();
                        match ks.put_if(token(1), b"n", &next, Expect::Version(seen.lsn())) {
                            Ok(_) => break,
                            Err(Error::Conflict { .. }) => {}
                            Err(other) => panic!("{other:?}"),
                        }
                    }
                }
            });
        }
    });
    assert_eq!(ks.get(b"n").unwrap().unwrap()[..], 200u64.to_le_bytes());
}

/// The wait that a lease's ttl states is honoured as stated.
#[test]
fn a_lease_lasts_exactly_its_ttl() {
    let sim = Sim::new();
    let db = sim.open();
    let jobs = jobs(&db);
    for ttl in [ms(1), ms(1500), secs(3600)] {
        let lease = jobs.lease(b"a").ttl(ttl).acquire().unwrap();
        sim.clock.advance(ttl - Duration::from_nanos(1));
        assert!(lease.is_live());
        sim.clock.advance(Duration::from_nanos(1));
        assert!(!lease.is_live());
    }
}

/// Writes so much that the segments before it are sealed.
fn overwrite(ks: &Keyspace, times: u32) {
    for n in 0..times {
        ks.put(token(1), &[n as u8 % 7], &[n as u8; 500]).unwrap();
    }
}

#[test]
fn an_idle_keyspace_keeps_nothing_else() {
    let sim = Sim::new();
    let db = sim.open();
    let idle = db.keyspace("idle", KeyspaceOptions::new()).unwrap();
    let lease = idle.lease(b"only").ttl(Ttl::INFINITE).acquire().unwrap();
    idle.put(lease.token(), b"only", b"here").unwrap();
    let busy = rows(&db);
    let mut most = 0;
    for _ in 0..40 {
        overwrite(&busy, 100);
        most = most.max(db.stats().disk_bytes);
    }
    // 2 MB were written, and 4 KB are needed.
    assert!(most <= 256 << 10, "{most} bytes");
    std::mem::forget(lease);
    let db = sim.reopen(db);
    assert!(db.report().ops < 1000, "{} ops replayed", db.report().ops);
    let idle = db.keyspace("idle", KeyspaceOptions::new()).unwrap();
    assert_eq!(idle.get(b"only").unwrap().as_deref(), Some(&b"here"[..]));
}

#[test]
fn compaction_never_leaves_more_than_it_found() {
    let sim = Sim::new();
    let db = sim.open();
    let ks = rows(&db);
    for n in 0..200u32 {
        ks.put(token(1), &n.to_be_bytes(), &[n as u8; 300]).unwrap();
    }
    for round in 0..5 {
        let before = db.stats();
        db.compact().unwrap();
        let after = db.stats();
        assert!(
            after.disk_bytes <= before.disk_bytes,
            "round {round}: {} {}",
            after.disk_bytes,
            before.disk_bytes
        );
        assert!(after.garbage_bytes <= before.garbage_bytes, "round {round}");
        overwrite(&ks, 30 * round);
    }
}

#[test]
fn deleting_everything_leaves_nothing() {
    let sim = Sim::new();
    let db = sim.open();
    let empty = db.stats();
    let ks = rows(&db);
    for round in 1..=3u64 {
        for n in 0..500u32 {
            ks.put(token(round), format!("{n:04}").as_bytes(), &[n as u8; 100]).unwrap();
        }
        ks.delete_prefix(token(round), b"").unwrap();
        // Nobody comes with a lower token any more.
        ks.retire_below(token(round + 1)).unwrap();
        db.compact().unwrap();
        db.compact().unwrap();
    }
    let left = db.stats();
    assert_eq!(left.keys, 0);
    assert!(left.live_bytes < 1000, "{} bytes are needed", left.live_bytes);
    assert!(left.disk_bytes <= empty.disk_bytes + (160 << 10), "{} of {}", left.disk_bytes, empty.disk_bytes);
    let db = sim.reopen(db);
    assert_err!(rows(&db).put(token(3), b"0001", b"late"), Error::Fenced { .. });
}

#[test]
fn one_refused_rename_or_removal_costs_nothing() {
    for call in [CallKind::Rename, CallKind::Remove] {
        for nth in 0..3 {
            let sim = Sim::new();
            let db = sim.open();
            let ks = rows(&db);
            sim.disk.fail(Fault::errno(call, libc_eacces()).nth(nth));
            for _ in 0..20 {
                overwrite(&ks, 100);
                db.compact().ok();
            }
            // So that the file of an unlisted segment is removed, too, and not only used again.
            for n in 0..400u32 {
                ks.put(token(2), &n.to_be_bytes(), &[1; 900]).unwrap();
            }
            ks.delete_prefix(token(2), b"").unwrap();
            db.compact().ok();
            assert_eq!(sim.disk.faults_fired(), 1, "{call:?} {nth} was never made");
            db.compact().unwrap();
            assert!(db.health().is_writable(), "{call:?} {nth}: {:?}", db.health());
            ks.put(token(2), b"after", b"it").unwrap();
            let db = sim.reopen(db);
            assert_eq!(rows(&db).get(b"after").unwrap().as_deref(), Some(&b"it"[..]));
        }
    }
}

/// `EACCES`, which Windows answers while somebody looks at the file.
fn libc_eacces() -> i32 {
    13
}

#[test]
fn damage_below_a_compaction_is_named_and_left_alone() {
    let sim = Sim::new();
    let db = sim.options().read_mode(ReadMode::Pread).open("sim").unwrap();
    let ks = rows(&db);
    for n in 0..60u32 {
        ks.put(token(1), &n.to_be_bytes(), &[n as u8; 500]).unwrap();
    }
    for n in (0..60u32).step_by(2) {
        ks.put(token(1), &n.to_be_bytes(), &[n as u8; 500]).unwrap();
    }
    overwrite(&ks, 10);
    let mut bytes = sim.disk.read_file("000001.seg").unwrap();
    let at = bytes.windows(20).position(|window| window == [3; 20]).unwrap();
    bytes[at] ^= 1;
    sim.disk.write_file("000001.seg", &bytes);
    assert_err!(db.compact(), Error::Corrupt { file, .. } if file == "000001.seg");
    assert!(matches!(db.health(), Health::Degraded(_)), "{:?}", db.health());
    // Everything else goes on, compaction as well.
    overwrite(&ks, 300);
    assert!(db.compact().unwrap().segments > 0);
    assert_err!(ks.get(&3u32.to_be_bytes()), Error::Corrupt { .. });
    assert_eq!(ks.get(&4u32.to_be_bytes()).unwrap().as_deref(), Some(&[4; 500][..]));
    assert!(sim.disk.read_file("000001.seg").is_some());
}
