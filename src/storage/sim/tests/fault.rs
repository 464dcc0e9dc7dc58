//! Stops, faults and limits hit where they should.

use super::*;

#[test]
fn stopped_disk_refuses_every_call_and_changes_nothing() {
    let (disk, file) = with_file(1);
    put(&file, 0, 1);
    disk.early_write_back(0);
    let before = disk.image_hash();
    disk.stop_at(disk.calls());
    assert!(!disk.is_stopped());
    for _ in 0..20 {
        assert!(file.write_at(b"x", 0).is_err());
    }
    assert!(disk.is_stopped());
    assert!(file.sync_data().is_err());
    assert!(file.read_at(&mut [0], 0).is_err());
    assert!(file.len().is_err());
    assert!(file.set_len(0).is_err());
    assert!(file.map(0).is_err());
    assert!(disk.lock("LOCK").is_err());
    assert!(disk.open("b", Access::Create).is_err());
    assert!(disk.list().is_err());
    assert!(disk.remove("a").is_err());
    assert!(disk.rename("a", "b").is_err());
    assert!(disk.link("a", &disk.dir("other")).is_err());
    assert!(file.is_shared().is_err());
    assert_eq!(disk.sync_dir().unwrap_err().to_string(), "power is off");
    assert_eq!(disk.image_hash(), before);
    assert_eq!(firsts(&disk.crash(Crash::None, 0)), [0xEE]);
    for kind in CallKind::ALL {
        assert!(disk.calls_of(kind) > 0, "{kind:?} was not tried");
    }
}

#[test]
fn stop_hits_exactly_the_call_with_that_index() {
    let (disk, file) = with_file(1);
    disk.stop_at(3);
    assert_eq!(disk.calls(), 1);
    put(&file, 0, 1);
    file.sync_data().unwrap();
    assert!(file.len().is_err());
    assert_eq!(disk.calls(), 4);
    assert_eq!((disk.calls_of(CallKind::WriteAt), disk.calls_of(CallKind::Any)), (1, 4));
}

#[test]
fn fault_hits_the_nth_matching_call_once() {
    let (disk, file) = with_file(1);
    disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::QuotaExceeded).nth(1));
    put(&file, 0, 1);
    file.len().unwrap();
    assert_eq!(disk.faults_fired(), 0);
    assert_eq!(kind(file.write_at(&[2; SECTOR], 0)), ErrorKind::QuotaExceeded);
    assert_eq!((firsts(&disk), disk.faults_fired()), (vec![1], 1));
    put(&file, 0, 3);
    assert_eq!(firsts(&disk), [3]);
}

#[test]
fn fault_may_last_and_may_be_for_one_file() {
    let (disk, file) = with_file(1);
    disk.write_file("b", b"b");
    disk.fail(Fault::errno(CallKind::Any, 5).forever().on("b"));
    for _ in 0..3 {
        assert_eq!(disk.open("b", Access::Read).unwrap_err().raw_os_error(), Some(5));
    }
    put(&file, 0, 1);
    disk.clear_faults();
    disk.open("b", Access::Read).unwrap();
}

#[test]
fn failed_write_may_leave_a_part() {
    let (disk, file) = with_file(1);
    disk.fail(Fault::new(CallKind::WriteAt, ErrorKind::Other).partial(2));
    assert!(file.write_all_at(b"new", 0).is_err());
    assert_eq!(&disk.read_file("a").unwrap()[..3], b"ne\xEE");
}

#[test]
fn failed_sync_keep_new_is_not_on_the_medium() {
    let (disk, file) = with_file(2);
    put(&file, 0, 1);
    put(&file, 2, 1);
    disk.fail(Fault::errno(CallKind::SyncData, 5));
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
    assert_eq!(firsts(&disk), [1, 0xEE, 1]);
    assert_eq!(disk.pending_sectors(), 0);
    file.sync_data().unwrap();
    assert_eq!(firsts(&disk.crash(Crash::All, 0)), [0xEE, 0xEE], "a later sync proves nothing");
    // But what is written afterwards is synced with the length it needs.
    put(&file, 2, 2);
    file.sync_data().unwrap();
    assert_eq!(firsts(&disk.crash(Crash::None, 0)), [0xEE, 0xEE, 2]);
}

#[test]
fn failed_sync_revert_old_shows_the_medium() {
    let (disk, file) = with_file(2);
    put(&file, 0, 1);
    put(&file, 2, 1);
    disk.set_sync_failure(SyncFailure::RevertOld);
    disk.fail(Fault::errno(CallKind::SyncData, 5));
    assert!(file.sync_data().is_err());
    assert_eq!(firsts(&disk), [0xEE, 0xEE]);
    assert_eq!(firsts(&disk.crash(Crash::All, 0)), [0xEE, 0xEE]);
}

#[test]
fn failed_sync_keep_part_leaves_some_sectors_on_the_medium() {
    let mut seen = BTreeSet::new();
    for seed in 0..50 {
        let (disk, file) = with_file(2);
        file.write_all_at(&[1; 2 * SECTOR], 0).unwrap();
        disk.set_sync_failure(SyncFailure::KeepPart { seed });
        disk.fail(Fault::errno(CallKind::SyncData, 5));
        assert!(file.sync_data().is_err());
        assert_eq!(firsts(&disk), [1, 1]);
        seen.insert(firsts(&disk.crash(Crash::All, 0)));
    }
    assert_eq!(seen.len(), 4);
}

#[test]
fn failed_directory_sync_leaves_its_operations_open() {
    let disk = SimDisk::new();
    disk.open("a", Access::Create).unwrap();
    disk.fail(Fault::errno(CallKind::SyncDir, 5));
    assert!(disk.sync_dir().is_err());
    assert!(disk.crash(Crash::None, 0).file_names().is_empty());
    assert_eq!(disk.crash(Crash::All, 0).file_names(), ["a"]);
}

#[test]
fn short_and_interrupted_transfers_are_survived_by_the_loops() {
    let (disk, file) = with_file(0);
    disk.short_transfers(1);
    disk.interruptions(2);
    let bytes: Vec<u8> = (0..60_000_u32).map(|n| n as u8).collect();
    for chunk in 0..60 {
        file.write_all_at(&bytes[chunk * 1000..][..1000], chunk as u64 * 1000).unwrap();
    }
    assert_eq!(disk.read_file("a").unwrap(), bytes);
    assert!(disk.calls_of(CallKind::WriteAt) > 80);
    let mut back = vec![0; bytes.len()];
    for chunk in 0..60 {
        file.read_exact_at(&mut back[chunk * 1000..][..1000], chunk as u64 * 1000).unwrap();
    }
    assert_eq!(back, bytes);
    assert!(disk.calls_of(CallKind::ReadAt) > 80);
}

#[test]
fn full_disk_refuses_and_heals() {
    let (disk, file) = with_file(2);
    disk.write_file("b", &[1; 100]);
    disk.set_budget(Some(3 * SECTOR as u64));
    put(&file, 1, 1);
    assert_eq!(file.write_at(&[2; 1000], 2 * SECTOR as u64).unwrap(), SECTOR - 100, "what fits is taken");
    assert_eq!(kind(file.write_at(b"x", file.len().unwrap())), ErrorKind::StorageFull);
    assert_eq!(kind(file.write_all_at(b"xyz", file.len().unwrap() - 1)), ErrorKind::StorageFull);
    assert_eq!(kind(file.set_len(3 * SECTOR as u64)), ErrorKind::StorageFull);
    file.write_all_at(&[3; 2 * SECTOR], 0).unwrap();
    disk.remove("b").unwrap();
    file.set_len(3 * SECTOR as u64).unwrap();
    assert_eq!(kind(file.write_at(b"x", 3 * SECTOR as u64)), ErrorKind::StorageFull);
    disk.set_budget(None);
    put(&file, 9, 1);
}

#[test]
fn read_only_disk_reads_and_locks_but_changes_nothing() {
    let (disk, file) = with_file(1);
    disk.write_file("LOCK", b"");
    let before = disk.image_hash();
    disk.set_read_only(true);
    let refused = ErrorKind::ReadOnlyFilesystem;
    assert_eq!(kind(file.write_at(b"x", 0)), refused);
    assert_eq!(kind(file.set_len(0)), refused);
    assert_eq!(kind(disk.open("a", Access::Write)), refused);
    assert_eq!(kind(disk.open("b", Access::Create)), refused);
    assert_eq!(kind(disk.remove("a")), refused);
    assert_eq!(kind(disk.rename("a", "b")), refused);
    assert_eq!(kind(disk.lock("new")), refused);
    disk.lock("LOCK").unwrap();
    disk.open("a", Access::Read).unwrap().read_exact_at(&mut [0; SECTOR], 0).unwrap();
    assert_eq!(disk.image_hash(), before);
    disk.set_read_only(false);
    put(&file, 0, 1);
}

#[test]
fn settings_do_not_outlive_a_power_cut() {
    let (disk, _file) = with_file(1);
    disk.set_read_only(true);
    disk.set_budget(Some(0));
    disk.fail(Fault::errno(CallKind::Any, 5).forever());
    disk.stop_at(0);
    for next in [disk.crash(Crash::None, 0), disk.kill()] {
        assert_eq!((next.calls(), next.trace_hash(), next.is_stopped()), (0, 0, false));
        put(&next.open("a", Access::Write).unwrap(), 5, 1);
    }
}
