//! Bugs that were, each with its story. The simulations found most of them; here they stand small.

mod support;

use std::io::ErrorKind;
use std::time::Duration;
use support::shown::{is_index, open, options_of_sim};
use tidewall::storage::{Access, CallKind, Crash, Fault, SimDisk, Storage};
use tidewall::{
    Db, Error, Expect, Found, Keyspace, KeyspaceOptions, LastOperation, ManualClock, OperationId, Options,
    Restore, Scope, Token, Tokens,
};

fn start(disk: &SimDisk, seed: u64) -> Db {
    open(disk, &ManualClock::new(), seed).expect("it opens")
}

fn external(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

/// Puts until the active segment has less than `bytes` of room; the next larger frame starts another one.
fn fill_to(rows: &Keyspace, bytes: usize) {
    let segment = 16 << 10;
    let mut used = 4096 + 200;
    while used + bytes < segment {
        let value = vec![7; 1000.min(segment - used - bytes)];
        rows.put(token(5), b"filler", &value).unwrap();
        used += value.len() + 60;
    }
}

/// A refused write had reserved room in a fresh segment, which stayed active and empty; `close` then wanted
/// to seal a segment whose header was never written, and panicked.
#[test]
fn a_store_closes_after_nothing_but_a_refusal() {
    let disk = SimDisk::new();
    external(&start(&disk, 1)).put(token(5), b"key", b"value").unwrap();
    let db = start(&disk, 2);
    let jobs = external(&db);
    let refused = jobs.put_if(token(5), b"key", b"value", Expect::Absent);
    assert!(matches!(refused, Err(Error::Conflict { .. })));
    drop(jobs);
    db.close().unwrap();
    assert_eq!(external(&start(&disk, 3)).get(b"key").unwrap().unwrap().bytes(), b"value");
}

/// The same empty segment, pushed out by a frame too large for it, was sealed without a frame: two segments
/// began at one lsn, and which came first was left to the order of the list.
#[test]
fn a_large_value_after_a_refusal_leaves_one_order() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let rows = external(&db);
    fill_to(&rows, 3000);
    assert!(rows.put_if(token(5), b"key", &[1; 4000], Expect::Present).is_err());
    rows.put(token(5), b"key", &[2; 30_000]).unwrap();
    let again = start(&disk.crash(Crash::None, 0), 2);
    assert_eq!(external(&again).get(b"key").unwrap().unwrap().bytes(), &[2; 30_000]);
}

/// A commit with nothing to write took the full segment from the queue and dropped it. The next frames then
/// went to the new segment at the place, and with the chain, of the old one.
#[test]
fn a_full_segment_is_sealed_by_a_commit_without_frames() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let rows = external(&db);
    fill_to(&rows, 3000);
    // Refused, but a new segment is active now, and the close below has nothing to write.
    assert!(rows.put_if(token(5), b"key", &[1; 4000], Expect::Present).is_err());
    drop(rows);
    db.close().unwrap();
    let before = disk.read_file("000001.seg").unwrap();
    let db = start(&disk, 2);
    assert_eq!(db.report().cut_bytes, 0);
    assert_eq!(external(&db).mark(b"filler").unwrap().unwrap().get(), 5);
    assert_eq!(disk.read_file("000001.seg").unwrap(), before, "a sealed segment was sealed again");
}

/// The frames of a full segment and its seal shared one sync. A power cut that kept the seal and lost a frame
/// looked like damage: the store did not open any more.
#[test]
fn a_seal_never_outlives_its_frames() {
    let mut cuts = 0;
    for call in 0.. {
        let disk = SimDisk::new();
        disk.stop_at(call);
        if let Ok(db) = open(&disk, &ManualClock::new(), 1)
            && let Ok(rows) = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))
        {
            for n in 0..12 {
                // One group that fills a segment and begins the next.
                let _ = rows.submit_put(token(5), b"key", &[n; 1500]);
            }
            let _ = rows.put(token(5), b"key", b"last");
        }
        if !disk.is_stopped() {
            break;
        }
        for seed in 0..8 {
            for crash in [Crash::OneMissing, Crash::Suffix, Crash::OnePresent] {
                start(&disk.crash(crash, seed), 2);
                cuts += 1;
            }
        }
    }
    assert!(cuts > 1000);
}

/// Writing STORE failed between its two copies, and the new segment was removed although the first copy
/// listed it: the next open missed it.
#[test]
fn a_failed_list_leaves_the_segment_it_may_name() {
    for nth in 0..12 {
        for kind in [CallKind::WriteAt, CallKind::SyncData] {
            let disk = SimDisk::new();
            let db = start(&disk, 1);
            disk.fail(Fault::new(kind, ErrorKind::Other).nth(nth));
            let _ = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External));
            for image in [disk.kill(), disk.crash(Crash::None, 0), disk.crash(Crash::All, 0)] {
                external(&start(&image, 2)).put(token(5), b"key", b"value").unwrap();
            }
        }
    }
}

/// Refusals were given that named a mark which was only appended: a crash took it back, and a token that the
/// refusal had called too high for one mark met another.
#[test]
fn a_refusal_shows_no_mark_that_a_crash_takes_back() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
    let rows =
        db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External).token_jump_cap(10)).unwrap();
    db.advance_tokens(token(20)).unwrap();
    let raise = |key: &[u8], to| {
        let mut batch = db.batch();
        batch.raise(&jobs, token(to), key).unwrap();
        batch.submit().unwrap()
    };

    let pending = raise(b"a/", 7);
    let refused = jobs.put(token(9), b"a/1", b"value");
    assert!(matches!(refused, Err(Error::UnknownToken { mark, .. }) if mark.get() == 7));
    assert!(pending.is_done(), "the refusal shows a mark that is not durable");

    let pending = rows.submit_put(token(50), b"key", b"value").unwrap();
    let refused = rows.put(token(70), b"other", b"value");
    assert!(matches!(refused, Err(Error::TokenJump { highest, .. }) if highest.get() == 50));
    assert!(pending.is_done(), "the refusal shows a highest token that is not durable");

    // A condition is looked at only where the token is good.
    let pending = raise(b"b/", 8);
    let refused = jobs.put_if(token(8), b"b/1", b"value", Expect::Present);
    assert!(matches!(refused, Err(Error::Conflict { found: Found::Absent, .. })));
    assert!(pending.is_done(), "the conflict shows that the token was admitted");
}

/// `delete_prefix` found nothing because of deletes that were only appended, and said so at once.
#[test]
fn an_empty_delete_prefix_waits_for_what_made_it_empty() {
    let db = start(&SimDisk::new(), 1);
    let rows = external(&db);
    rows.put(token(5), b"a/1", b"value").unwrap();
    let pending = rows.submit_delete(token(5), b"a/1").unwrap();
    assert_eq!(rows.delete_prefix(token(5), b"a/").unwrap().keys, 0);
    assert!(pending.is_done());
}

/// `delete_prefix` asked for the room of the longest key and so, with small segments, for a segment of its
/// own: not to be had from the reserve of a full disk.
#[test]
fn delete_prefix_goes_on_when_the_disk_is_full() {
    let disk = SimDisk::new();
    let rows = external(&start(&disk, 1));
    for n in 0..20u8 {
        rows.put(token(5), &[b'a', n], &[n; 900]).unwrap();
    }
    disk.set_budget(Some(0));
    assert_eq!(rows.delete_prefix(token(5), b"a").unwrap().keys, 20);
}

/// A list of segments that outgrew its file moves to a larger one. Killed between the rename and the sync of
/// the directory, the next open believed the new file; a power cut then brought the old one back, with old
/// lives: everything acknowledged in between was taken for garbage.
#[test]
fn a_list_that_outgrew_its_file_is_durable_under_its_name() {
    let disk = SimDisk::new();
    let rows = external(&start(&disk, 1));
    let len = |disk: &SimDisk| disk.read_file("STORE").unwrap().len();
    let small = len(&disk);
    let mut before = disk.kill();
    for n in 0u32.. {
        rows.put(token(5), &n.to_be_bytes(), &[7; 11_000]).unwrap();
        if len(&disk) > small {
            break;
        }
        if n > 850 {
            before = disk.crash(Crash::None, 0);
        }
    }
    let grow = |disk: &SimDisk, seed| {
        let Ok(db) = open(disk, &ManualClock::new(), seed) else { return };
        let rows = external(&db);
        let (mut said, mut n) = (Ok(()), 1u32 << 16);
        while said.is_ok() && len(disk) == small {
            n += 1;
            said = rows.put(token(5), &n.to_be_bytes(), &[8; 11_000]).map(drop);
        }
    };
    let whole = before.kill();
    grow(&whole, 2);
    let syncs = whole.calls_of(CallKind::SyncDir);
    let mut grown = 0;
    for call in 0..syncs {
        let disk = before.kill();
        disk.fail(Fault::new(CallKind::SyncDir, ErrorKind::Other).nth(call).forever());
        grow(&disk, 2);
        let killed = disk.kill();
        grown += u32::from(len(&killed) > small);
        let db = start(&killed, 3);
        // From the reserve: a put would make a segment, and sync the directory for it.
        external(&db).raise(token(6), b"key").unwrap();
        let cut = start(&killed.crash(Crash::None, 0), 4);
        assert_eq!(external(&cut).mark(b"key").unwrap().unwrap().get(), 6, "call {call}");
    }
    assert!(grown > 0, "no kill came behind the rename");
}

/// A grant whose lease is held is carried to the end of the log, behind what its holder wrote meanwhile: at the next
/// open it is the older one all the same, or the number of the last operation would be forgotten.
#[test]
fn a_grant_carried_behind_its_holders_writes_is_not_newer() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let (db, jobs) = begin_with_grace(&disk, &clock, 1);
    let rows = external(&db);
    let held = jobs.lease(b"a/").acquire().unwrap();
    for n in 1..10u64 {
        jobs.put_operation(held.token(), OperationId::new(n), b"a/1", &[7; 2000]).unwrap();
    }
    // In a segment of its own, which is needed as it is.
    for n in 0..20u8 {
        rows.put(token(5), &[n], &[1; 1800]).unwrap();
        if n == 10 {
            jobs.put_operation(held.token(), OperationId::new(10), b"a/2", b"last").unwrap();
        }
    }
    assert!(db.compact().unwrap().segments > 0);
    let (_db, jobs) = begin_with_grace(&disk.crash(Crash::None, 0), &clock, 2);
    let again = jobs.put_operation(held.token(), OperationId::new(10), b"a/2", b"last");
    assert!(matches!(again, Err(Error::Duplicate { .. })), "{again:?}");
}

/// A store whose list of segments is written in its first copy, and then in the second only up to `partial` bytes.
fn with_one_copy(partial: usize) -> (SimDisk, Keyspace, u32) {
    // A put may change the list more than once; it is the last change that is to fail.
    for write in [1, 3, 5, 7] {
        let disk = SimDisk::new();
        // Opened again, for the list was made under another name.
        start(&disk, 1).close().unwrap();
        let rows = external(&start(&disk, 1));
        // The first put of an open makes several spares, and lists each.
        rows.put(token(1), b"first", b"").unwrap();
        disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::Other).on("STORE").nth(write).partial(partial));
        let mut written = 0u32;
        while disk.faults_fired() == 0 {
            rows.put(token(1), &written.to_be_bytes(), &[7; 900]).unwrap();
            written += 1;
            assert!(written < 200, "the second copy was never written");
        }
        let list = disk.read_file("STORE").unwrap();
        let (one, other) = list.split_at(list.len() / 2);
        if one != other {
            return (disk, rows, written);
        }
    }
    panic!("the copies are the same after each write that failed");
}

/// Puts until the list is written again; at which calls that put began and ended.
fn until_the_list_changes(disk: &SimDisk, rows: &Keyspace, written: &mut u32) -> std::ops::Range<u64> {
    let before = disk.read_file("STORE");
    loop {
        let from = disk.calls();
        let put = rows.put(token(1), &written.to_be_bytes(), &[7; 900]);
        if put.is_err() || disk.read_file("STORE") != before {
            return from..disk.calls();
        }
        *written += 1;
    }
}

/// The second copy of the list failed to be written, so it is no longer sure to be whole. The next change
/// overwrote the first one before it, and a power cut in the middle of that left none.
#[test]
fn the_copy_of_the_list_that_failed_is_written_before_the_good_one() {
    let (disk, rows, mut written) = with_one_copy(30);
    let calls = until_the_list_changes(&disk, &rows, &mut written);
    for call in calls {
        let (disk, rows, mut written) = with_one_copy(30);
        disk.stop_at(call);
        until_the_list_changes(&disk, &rows, &mut written);
        assert!(disk.is_stopped());
        for seed in 0..40 {
            let image = disk.crash(Crash::Torn { bytes: true }, seed);
            let found = external(&start(&image, 2)).iter().count() as u32;
            assert!(found > written, "call {call}: {found} of {written}, and the first");
        }
    }
}

/// Both copies are whole, and one of them is older: segments that it lists are gone.
#[test]
fn of_two_whole_copies_of_the_list_the_newer_counts() {
    for write in 0..12 {
        let disk = SimDisk::new();
        // Opened again, for the list was made under another name.
        start(&disk, 1).close().unwrap();
        let db = start(&disk, 1);
        let rows = external(&db);
        rows.put(token(1), b"key", &[1; 6000]).unwrap();
        for n in 0..60u8 {
            rows.put(token(1), &[n % 3], &[7; 900]).unwrap();
        }
        // Files with two names are removed when they are given up, and not used again.
        db.checkpoint_into(disk.dir("copy")).unwrap();
        rows.put(token(1), b"key", b"new").unwrap();
        disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::Other).on("STORE").nth(write));
        let compacted = db.compact();
        for image in [disk.kill(), disk.crash(Crash::None, 1)] {
            let db = open(&image, &ManualClock::new(), 2);
            let db = db.unwrap_or_else(|error| panic!("write {write}, {compacted:?}: {error}"));
            assert_eq!(external(&db).iter().count(), 4);
        }
    }
}

/// The same, made on purpose: beside the newest copy lies one from before segments went.
#[test]
fn beside_a_copy_of_the_list_from_long_ago_the_newest_counts() {
    let disk = SimDisk::new();
    start(&disk, 1).close().unwrap();
    let db = start(&disk, 1);
    let rows = external(&db);
    for n in 0..60u8 {
        rows.put(token(1), &[n % 3], &[7; 900]).unwrap();
    }
    let before = disk.read_file("STORE").unwrap();
    db.checkpoint_into(disk.dir("copy")).unwrap();
    for n in 0..60u8 {
        rows.put(token(1), &[n % 3], &[8; 900]).unwrap();
    }
    db.compact().unwrap();
    let opens = [0, before.len() / 2].map(|from| {
        let image = disk.kill();
        let file = image.open("STORE", Access::Write).unwrap();
        file.write_all_at(&before[from..][..before.len() / 2], from as u64).unwrap();
        file.sync_data().unwrap();
        drop(file);
        open(&image, &ManualClock::new(), 2).is_ok_and(|db| external(&db).iter().count() == 3)
    });
    assert!(opens.contains(&true), "{opens:?}");
}

/// Compaction forgot a mark, and the operation committed under it, beneath a folded floor. `raise_all` lifted
/// the floor further, the store forgot that the lower one was folded, and the next grant made a fresh mark: the
/// old writer was told `Nothing` of an operation that had been committed.
#[test]
fn what_folding_forgot_stays_unknown_under_a_floor_raised_on_purpose() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let old = jobs.lease(b"a").acquire().unwrap();
    jobs.put_operation(old.token(), OperationId::new(3), b"a", b"value").unwrap();
    jobs.delete(old.token(), b"a").unwrap();
    let late = old.token();
    old.release().unwrap();
    db.compact().unwrap();
    let floor = jobs.floor().unwrap();
    assert!(floor.is_folded && floor.mark == late, "{floor:?}");
    let other = jobs.lease(b"b").acquire().unwrap();
    jobs.raise_all(other.token()).unwrap();
    let new = jobs.lease(b"a").acquire().unwrap();
    let is_unknown = |jobs: &Keyspace| {
        let Err(Error::Fenced { last_operation, mark, .. }) = jobs.put(late, b"a", b"late") else {
            return false;
        };
        last_operation == LastOperation::Unknown && mark == new.token()
    };
    assert!(is_unknown(&jobs));
    db.compact().unwrap();
    assert!(is_unknown(&jobs));
    drop(jobs);
    db.close().unwrap();
    let jobs = start(&disk, 2).keyspace("jobs", KeyspaceOptions::new()).unwrap();
    assert!(is_unknown(&jobs), "behind an open");
}

/// A restored keyspace of external tokens was told by `raise_all` the floor it had before. Compaction kept
/// the older of the two equal floors, which lies before the restore, and after the next open it needed a floor again.
#[test]
fn a_restored_keyspace_told_its_old_floor_needs_none_again() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    external(&db).raise_all(token(5)).unwrap();
    db.close().unwrap();
    let new = disk.dir("new");
    Restore::new().deterministic(2).run_on(disk, new.clone()).unwrap();
    let db = start(&new, 3);
    external(&db).raise_all(token(5)).unwrap();
    // Garbage beside it, so that its segment is worth a round.
    for n in 0..20u8 {
        external(&db).put(token(5), b"key", &[n; 2000]).unwrap();
    }
    assert!(db.compact().unwrap().segments > 0);
    external(&db).put(token(5), b"key", b"value").unwrap();
    db.close().unwrap();
    external(&start(&new, 4)).put(token(5), b"key", b"value").unwrap();
}

/// More than a segment that is needed, with some garbage in between, so that each segment is worth a round.
fn ballast(db: &Db, name: &str) {
    let other = db.keyspace(name, KeyspaceOptions::new()).unwrap();
    for n in 0..20 {
        for (key, len) in [(n, 900), (99, 300)] {
            let lease = other.lease(&[key]).acquire().unwrap();
            other.put(lease.token(), &[key], &vec![7; len]).unwrap();
        }
    }
}

/// A store that was restored, with its keyspace of external tokens created a segment before it was shut.
fn restored() -> SimDisk {
    let disk = SimDisk::new();
    let db = start(&disk, 2);
    external(&db).put(token(5), b"key", b"value").unwrap();
    ballast(&db, "before");
    db.close().unwrap();
    let new = disk.dir("new");
    Restore::new().deterministic(3).run_on(disk, new.clone()).unwrap();
    new
}

fn indices(disk: &SimDisk) -> usize {
    disk.file_names().iter().filter(|name| is_index(name)).count()
}

/// Compaction had carried the floor that a restored keyspace was told behind the end of what is sealed. An index file
/// made then did not know of it, and yet counted as newer: behind the next open the keyspace was shut again.
#[test]
fn an_index_file_knows_that_a_restored_keyspace_was_told_its_floor() {
    let disk = restored();
    let db = start(&disk, 4);
    ballast(&db, "behind");
    external(&db).raise_all(token(5)).unwrap();
    db.compact().unwrap();
    external(&start(&disk.kill().dir("new"), 6)).put(token(5), b"key", b"more").unwrap();
}

/// The same of the op that shuts it: behind the next open it took writes although it was never told a floor.
#[test]
fn an_index_file_knows_that_a_restored_keyspace_was_told_no_floor() {
    let disk = restored();
    // Restoring leaves a spare of the usual size: that is used up first.
    let db = start(&disk, 6);
    let filler = db.keyspace("filler", KeyspaceOptions::new()).unwrap();
    let lease = filler.lease(b"f").acquire().unwrap();
    (0..90).for_each(|_| _ = filler.put(lease.token(), b"f", &[0; 12_000]).unwrap());
    drop((lease, filler));
    db.close().unwrap();
    // The first index file is made when all has been carried.
    let db = options_of_sim(&disk, &ManualClock::new(), 4).index_every(1).open("sim").unwrap();
    assert_eq!(indices(&disk), 0);
    eprintln!("{:?} {:?}", db.compact(), disk.file_names());
    assert_eq!(indices(&disk), 1);
    let put = external(&start(&disk.kill().dir("new"), 7)).put(token(5), b"key", b"late");
    assert!(matches!(put, Err(Error::NeedsFloor { .. })), "{put:?}");
}

/// `raise_all` answered that the floor was there already, of a token that folding had fenced meanwhile.
#[test]
fn raise_all_of_a_token_folded_over_is_fenced() {
    let db = start(&SimDisk::new(), 1);
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let lease = jobs.lease(b"a").acquire().unwrap();
    let late = lease.token();
    jobs.raise_all(late).unwrap();
    lease.release().unwrap();
    jobs.lease(b"a").acquire().unwrap().release().unwrap();
    db.compact().unwrap();
    assert!(jobs.floor().unwrap().is_folded);
    let told = jobs.raise_all(late);
    assert!(matches!(told, Err(Error::Fenced { .. })), "{told:?}");
}

/// In `Scope::Key` a delete was taken for the state of its fence although a grant had come since: its mark was
/// folded, and the loser of the hand-over heard `Unknown` of an operation that the fence still knew.
#[test]
fn a_deleted_key_that_is_held_again_knows_what_was_committed() {
    let db = start(&SimDisk::new(), 1);
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let old = jobs.lease(b"a").acquire().unwrap();
    jobs.put_operation(old.token(), OperationId::new(3), b"a", b"value").unwrap();
    jobs.delete(old.token(), b"a").unwrap();
    let late = old.token();
    old.release().unwrap();
    let _new = jobs.lease(b"a").acquire().unwrap();
    db.compact().unwrap();
    let told = jobs.put(late, b"a", b"late");
    let Err(Error::Fenced { last_operation, .. }) = told else { panic!("{told:?}") };
    assert_eq!(last_operation, LastOperation::Committed(OperationId::new(3)));
}

fn begin_with_grace(disk: &SimDisk, clock: &ManualClock, seed: u64) -> (Db, Keyspace) {
    let options = Options::new().storage(disk.clone()).clock(clock.clone()).deterministic(seed);
    let options = options.without_threads().segment_bytes(16 << 10).lease_grace(Duration::from_secs(60));
    let db = options.open("sim").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
    (db, jobs)
}

/// A write with an operation number took the place of the grant as the state of its fence. Compaction dropped
/// the grant then, and the next open kept no fence for its holder, who was still at work.
#[test]
fn a_holder_who_numbers_its_writes_is_kept_its_fence() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let (db, jobs) = begin_with_grace(&disk, &clock, 1);
    let held = jobs.lease(b"a/").acquire().unwrap();
    for n in 1..40u64 {
        jobs.put_operation(held.token(), OperationId::new(n), b"a/1", &[7; 2000]).unwrap();
    }
    db.compact().unwrap();
    let (_db, jobs) = begin_with_grace(&disk.crash(Crash::None, 0), &clock, 2);
    let holders: Vec<_> = jobs.holders(b"").unwrap().into_iter().map(|holder| holder.token).collect();
    assert_eq!(holders, [held.token()]);
}

/// And its release was dropped, while the grant lay in a segment that stayed: the next open kept the fence for
/// somebody who had given it back.
#[test]
fn a_release_outlives_the_grant_it_ends() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let (db, jobs) = begin_with_grace(&disk, &clock, 1);
    let lease = jobs.lease(b"a/").acquire().unwrap();
    // The rest of the segment of the grant is needed.
    for n in 0..5u8 {
        jobs.put(lease.token(), &[b'a', b'/', n], &[n; 2000]).unwrap();
    }
    for n in 1..20u64 {
        jobs.put_operation(lease.token(), OperationId::new(n), b"a/key", &[7; 2000]).unwrap();
    }
    let token = lease.token();
    lease.release().unwrap();
    for _ in 0..20 {
        jobs.put(token, b"a/key", &[8; 2000]).unwrap();
    }
    db.compact().unwrap();
    let (_db, jobs) = begin_with_grace(&disk.crash(Crash::None, 0), &clock, 2);
    assert_eq!(jobs.holders(b"").unwrap(), []);
}

/// Compaction had forgotten the state of a fence under a folded floor, and an older one still lay in a segment
/// that was not worth a round. The next open believed that one, and the next holder was told the operation of a
/// writer before the last.
#[test]
fn an_older_state_under_a_folded_floor_is_not_believed() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let jobs = |db: &Db| db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
    let write = |op| {
        let lease = jobs(&db).lease(b"a/").acquire().unwrap();
        jobs(&db).put_operation(lease.token(), OperationId::new(op), b"a/1", b"value").unwrap();
        jobs(&db).delete(lease.token(), b"a/1").unwrap();
        lease.release().unwrap();
    };
    write(1);
    // The rest of the segment is needed.
    for n in 0..5u8 {
        external(&db).put(token(1), &[n], &[n; 2000]).unwrap();
    }
    for n in 0..10u8 {
        external(&db).put(token(1), b"key", &[n; 9000]).unwrap();
    }
    write(2);
    for n in 0..10u8 {
        external(&db).put(token(1), b"key", &[n; 9000]).unwrap();
    }
    db.compact().unwrap();
    assert_eq!(jobs(&db).floor().unwrap().forgotten.unwrap().get(), 2);
    db.close().unwrap();
    let next = jobs(&start(&disk, 2)).lease(b"a/").acquire().unwrap();
    assert_eq!(next.predecessor(), None, "operation 2 came after it");
}

/// A recovery wrote the first copy of `STORE` first, also when the power had gone while the second was written and
/// the first was the only one that was whole. A second cut then left none.
#[test]
fn a_cut_in_the_recovery_of_a_cut_leaves_one_copy_of_the_list() {
    const SEEDS: u64 = 12;
    let disk = SimDisk::new();
    external(&start(&disk, 1)).put(token(2), b"key", b"value").unwrap();
    let opens = |disk: &SimDisk, seed| open(disk, &ManualClock::new(), seed);
    let cuts = |disk: &SimDisk, seed| -> Vec<SimDisk> {
        let uncut = disk.kill();
        opens(&uncut, seed).expect("a crash opens by itself");
        let at = |call| {
            let cut = disk.kill();
            cut.stop_at(call);
            assert!(opens(&cut, seed).is_err(), "call {call}");
            (0..SEEDS).map(move |seed| cut.crash(Crash::Torn { bytes: true }, seed))
        };
        (0..uncut.calls()).flat_map(at).collect()
    };
    let is_torn = |disk: &SimDisk| !opens(&disk.kill(), 4).unwrap().report().warnings.is_empty();
    let once = cuts(&disk.crash(Crash::None, 0), 2);
    let torn: Vec<_> = once.iter().filter(|disk| is_torn(disk)).collect();
    assert!(torn.len() > 1);
    for once in torn {
        for twice in cuts(once, 4) {
            let db = opens(&twice, 6).expect("a crash opens by itself");
            assert_eq!(external(&db).get(b"key").unwrap().unwrap().bytes(), b"value");
        }
    }
}

/// While an open drew new lives, the sync of the second copy of `STORE` failed; the first one was durable, so the store
/// went on. After a kill the next open read both from the cache, wrote the first one anew and counted on the
/// second: a power cut just then left a torn one, and on the disk the list of before, with the lives of before.
#[test]
fn a_copy_of_the_list_that_is_only_in_the_cache_is_not_counted_on() {
    const SEEDS: u64 = 12;
    let opens = |disk: &SimDisk, seed| open(disk, &ManualClock::new(), seed);
    let mut went_on = 0;
    for sync in 0..4 {
        let disk = SimDisk::new();
        let db = start(&disk, 1);
        let rows = external(&db);
        for n in 0..60 {
            rows.put(token(1), b"key", &[n; 900]).unwrap();
        }
        db.compact().unwrap();
        drop((rows, db));
        disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other).on("STORE").nth(sync));
        let Ok(db) = opens(&disk, 2) else { continue };
        went_on += disk.faults_fired();
        // No more spares can be listed, and a raise may take one of the last.
        external(&db).raise(token(3), b"key").unwrap();
        let killed = disk.kill();
        opens(&killed, 6).expect("a crash opens by itself");
        for call in 0..killed.calls() {
            let cut = disk.kill();
            cut.stop_at(call);
            assert!(opens(&cut, 6).is_err(), "call {call}");
            for seed in 0..SEEDS {
                let db = opens(&cut.crash(Crash::Torn { bytes: true }, seed), 10);
                let db = db.unwrap_or_else(|error| panic!("sync {sync}, call {call}, seed {seed}: {error}"));
                let mark = external(&db).mark(b"key").unwrap().unwrap();
                assert_eq!(mark.get(), 3, "sync {sync}, call {call}, seed {seed}");
            }
        }
    }
    assert_eq!(went_on, 1, "an open goes on without the last copy that it syncs");
}

/// What compaction had carried on lay in the newest group, of which nothing proves that it was durable, when the
/// segments it came from were given back. So a read-only open after a kill showed a store without it, with lower
/// marks; and damage of that group was taken for a torn tail.
#[test]
fn what_was_carried_is_proven_before_its_segment_goes() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let rows = external(&db);
    rows.put(token(9), b"old", b"value").unwrap();
    for n in 0..20u8 {
        rows.put(token(5), b"key", &[n; 2000]).unwrap();
    }
    assert!(db.compact().unwrap().segments > 0);
    let read_only = Options::new().storage(disk.kill()).read_only().open("sim").unwrap();
    let old = external(&read_only).get(b"old").unwrap().expect("it was acknowledged long ago");
    assert_eq!((old.bytes(), old.token().get()), (&b"value"[..], 9));
}
/// A disk that said of every new file that its name was taken kept whoever made a segment looking for a free one
/// for ever, with the list of segments locked; and so did one whose writes failed with the same error, for it was taken
/// for that of the open. Found by the fuzz target `errno_plans`.
#[test]
fn a_disk_on_which_every_name_is_taken_gives_an_error() {
    for call in [CallKind::Open, CallKind::WriteAt] {
        let disk = SimDisk::new();
        let db = start(&disk, 1);
        let rows = external(&db);
        let files = disk.file_names();
        // The writes of a commit are left alone: those of new segments are hit.
        let taken = |name: String| disk.fail(Fault::errno(call, libc::EEXIST).on(name).forever());
        (1..20_000).map(|n| format!("{n:06}.seg")).filter(|name| !files.contains(name)).for_each(taken);
        let put = |n: u64| rows.put(token(n), b"key", &[n as u8; 2000]);
        let refused = (1..100).find_map(|n| put(n).err()).expect("the spares run out");
        assert!(matches!(refused, Error::Io { .. }), "{refused:?}");
        assert_eq!(disk.file_names(), files, "what could not be written is removed");
        disk.clear_faults();
        put(100).unwrap();
        db.close().unwrap();
        assert_eq!(external(&start(&disk, 2)).mark(b"key").unwrap().unwrap().get(), 100);
    }
}

/// A value may outlive its store. The next opening knew nothing of it, used the file again that it pointed into,
/// and its bytes changed under whoever read them: in safe code, and silently.
#[test]
fn a_value_keeps_its_bytes_when_the_store_is_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Options::new().segment_bytes(64 << 10).open(dir.path()).unwrap();
    let load = |db: &Db, fill: u8| {
        for n in 0..40u8 {
            external(db).put(token(1), &[n], &[fill; 8000]).unwrap();
        }
    };
    load(&open(), 1);
    // Sealed, and read through a map of the file.
    let db = open();
    let (values, snapshot): (Vec<_>, _) =
        ((0..40u8).map(|n| external(&db).get(&[n]).unwrap().unwrap()).collect(), db.snapshot());
    assert!(db.stats().pinned_values > 30);
    db.close().unwrap();
    let db = open();
    for fill in 2..30 {
        load(&db, fill);
    }
    assert!(db.stats().retired_segments > 20);
    assert!(values.iter().all(|value| value.iter().all(|&byte| byte == 1)));
    drop(snapshot);
}

/// A store whose list of segments is about to outgrow its file.
fn nearly_outgrown() -> (SimDisk, usize) {
    let disk = SimDisk::new();
    let rows = external(&start(&disk, 1));
    let len = || disk.read_file("STORE").unwrap().len();
    let small = len();
    let mut before = disk.kill();
    for n in 0u32.. {
        rows.put(token(5), &n.to_be_bytes(), &[7; 11_000]).unwrap();
        if len() > small {
            break;
        }
        if n > 850 {
            before = disk.crash(Crash::None, 0);
        }
    }
    (before, small)
}

/// A list that outgrew its file had its new name when the sync of the directory failed for want of space. That was
/// taken for one that was never made, and the store went on with the old file, which had no name any more: what
/// compaction struck out there was still listed at the next open, and missing.
#[test]
fn a_larger_list_whose_name_is_not_synced_is_not_given_up() {
    let (before, small) = nearly_outgrown();
    let mut grown = 0;
    for call in 0..4 {
        let disk = before.kill();
        let db = start(&disk, 2);
        let rows = external(&db);
        disk.fail(Fault::new(CallKind::SyncDir, ErrorKind::StorageFull).nth(call).forever());
        let put = |n: u32| rows.put(token(5), &n.to_be_bytes(), &[8; 11_000]);
        if (1u32 << 16..).take(20).any(|n| put(n).is_err()) {
            // Its space is wanted, and given back as far as that can be done.
            let _ = rows.raise_all(token(6)).and_then(|_| rows.delete_prefix_some(token(6), b"", 400));
            let _ = db.compact();
        }
        let left = rows.iter().count();
        let killed = disk.kill();
        grown += u32::from(killed.read_file("STORE").unwrap().len() > small);
        let db = start(&killed, 3);
        assert_eq!(external(&db).iter().count(), left, "call {call}");
    }
    assert!(grown > 0, "the list grew");
}

/// Where the disk had room for a segment and none for the larger list that was to name it, each attempt left the file of
/// one, until the disk was full, and all of that was lost to the store until it was opened anew.
#[test]
fn a_list_without_room_to_grow_costs_no_segments() {
    let (before, _) = nearly_outgrown();
    let disk = before.kill();
    let db = start(&disk, 2);
    let rows = external(&db);
    disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::StorageFull).on("STORE.new").forever());
    let put = |n: u32| rows.put(token(5), &n.to_be_bytes(), &[8; 11_000]);
    let refused = (1u32 << 16..1 << 17).find_map(|n| put(n).err()).unwrap();
    assert!(matches!(refused, Error::NoSpace { .. }), "{refused:?}");
    let files = disk.file_names();
    for n in 0..10 {
        assert!(matches!(put(n), Err(Error::NoSpace { .. })));
    }
    assert!(disk.file_names() == files, "a file for each attempt");
    disk.clear_faults();
    put(1).unwrap();
    db.close().unwrap();
    start(&disk, 3);
    assert_eq!(disk.file_names().len(), files.len() + 1, "nothing was left that no list names");
}

/// What a restored store had taken over and given back was another store's, by its id: where it could not be removed at
/// once, it stayed for ever.
#[test]
fn what_a_restored_store_took_over_goes_with_it() {
    let disk = SimDisk::new();
    let db = start(&disk, 1);
    let rows = external(&db);
    for n in 0..60u8 {
        rows.put(token(5), &[n], &[7; 2000]).unwrap();
    }
    drop(rows);
    db.close().unwrap();
    Restore::new().deterministic(2).run_on(disk.clone(), disk.dir("new")).unwrap();
    let new = disk.dir("new");
    let taken = new.file_names();
    let db = start(&new, 3);
    let rows = external(&db);
    rows.raise_all(token(6)).unwrap();
    for n in 0..60u8 {
        rows.delete(token(6), &[n]).unwrap();
    }
    new.fail(Fault::new(CallKind::Remove, ErrorKind::Other).forever());
    db.compact().unwrap();
    drop(rows);
    db.close().unwrap();
    new.clear_faults();
    let db = start(&new, 4);
    let listed = db.stats().segments;
    let segments = new.file_names().into_iter().filter(|name| name.ends_with(".seg")).count() as u64;
    assert_eq!(segments, listed, "{:?} of {taken:?}", new.file_names());
}

/// An open that began with an index file looked at the grants in it when it had written its new incarnation: where one of
/// them was damaged it answered that, and had changed `STORE` all the same; and the fences of all other holders were
/// not kept for them any more by the next.
#[test]
fn a_damaged_grant_in_front_of_an_index_file_is_told_to_who_asks_for_it() {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let open = |disk: &SimDisk, seed| {
        options_of_sim(disk, &clock, seed).lease_grace(Duration::from_secs(60)).open("sim")
    };
    let db = open(&disk, 4).unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let _held = [&b"damaged fence"[..], b"other"].map(|key| jobs.lease(key).acquire().unwrap());
    let rows = external(&db);
    for n in 0..60u8 {
        rows.put(token(1), &[n], &[n; 900]).unwrap();
    }
    let killed = disk.kill();
    assert!(killed.file_names().iter().any(|name| is_index(name)));
    let segment = killed.read_file("000001.seg").unwrap();
    let at = segment.windows(13).position(|bytes| bytes == b"damaged fence").unwrap();
    killed.flip_bit("000001.seg", at as u64, 0);
    let db = open(&killed, 8).expect("nothing of the damage is read");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    for key in [&b"damaged fence"[..], b"other"] {
        assert!(matches!(jobs.lease(key).try_acquire(), Err(Error::Held { .. })));
    }
    assert!(matches!(jobs.mark(b"damaged fence"), Err(Error::Corrupt { .. })));
}

/// Who asked a store that was open for reading for a lease, ready to wait, waited for ever while the grace of its last
/// holder ran: in such a store nobody hands leases over, and nobody looks at deadlines.
#[test]
fn nobody_waits_for_a_lease_of_a_store_that_is_only_read() {
    let disk = SimDisk::new();
    let jobs = |db: &Db| db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let db = start(&disk, 1);
    jobs(&db).lease(b"job").acquire().unwrap().detach();
    // What follows proves that it was durable.
    jobs(&db).lease(b"other").acquire().unwrap().detach();
    let options = Options::new().storage(disk.kill()).read_only().lease_grace(Duration::from_secs(10));
    let jobs = jobs(&options.open("sim").unwrap());
    let (told, answer) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        told.send(jobs.lease(b"job").wait(Duration::from_millis(10)).acquire().map(drop))
    });
    let answer = answer.recv_timeout(Duration::from_secs(10)).expect("it answers");
    assert!(matches!(answer, Err(Error::ReadOnly)), "{answer:?}");
}

/// Only some places knew that a quota can be used up as a disk can: a list that was to move to a larger file poisoned the
/// store, and a store that could not be begun was told an error of another kind.
#[test]
fn a_quota_that_is_used_up_is_a_full_disk() {
    for kind in [ErrorKind::StorageFull, ErrorKind::QuotaExceeded] {
        let disk = SimDisk::new();
        let full = || Fault::new(CallKind::WriteAt, kind).on("STORE.new");
        disk.fail(full());
        let refused = open(&disk, &ManualClock::new(), 3).err();
        assert!(matches!(refused, Some(Error::NoSpace { .. })), "{refused:?}");
        drop(start(&disk, 3));
        let db = start(&disk, 7);
        disk.fail(full());
        let put = |n: u64| external(&db).put(token(n), b"key", &[n as u8; 12_000]);
        let (n, refused) = (1..2000).find_map(|n| put(n).err().map(|refused| (n, refused))).unwrap();
        assert!(matches!(refused, Error::NoSpace { .. }), "{refused:?}");
        put(n + 1).unwrap();
    }
}
