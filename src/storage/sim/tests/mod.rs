//! The simulated disk does what its module doc says.

use super::node::SECTOR;
use super::*;
use crate::storage::Disk;
use std::collections::BTreeSet;
use std::io::ErrorKind;

mod crash;
mod fault;

const POLICIES: [Crash; 11] = [
    Crash::None,
    Crash::All,
    Crash::Subset { percent: 50 },
    Crash::Subset { percent: 90 },
    Crash::Prefix,
    Crash::Suffix,
    Crash::Reverse,
    Crash::OneMissing,
    Crash::OnePresent,
    Crash::Torn { bytes: false },
    Crash::Torn { bytes: true },
];

fn kind<T>(answer: io::Result<T>) -> ErrorKind {
    answer.err().expect("this call should have failed").kind()
}

/// A disk with one durable file "a" of `sectors` sectors full of 0xEE.
fn with_file(sectors: usize) -> (SimDisk, Arc<dyn File>) {
    let disk = SimDisk::new();
    disk.write_file("a", &vec![0xEE; sectors * SECTOR]);
    let file = disk.open("a", Access::Write).unwrap();
    (disk, file)
}

/// The first byte of every sector.
fn firsts(disk: &SimDisk) -> Vec<u8> {
    disk.read_file("a").unwrap().iter().step_by(SECTOR).copied().collect()
}

/// Writes sector `index` full of `byte`.
fn put(file: &Arc<dyn File>, index: u64, byte: u8) {
    file.write_all_at(&[byte; SECTOR], index * SECTOR as u64).unwrap();
}

#[test]
fn synced_bytes_and_length_survive_every_power_cut() {
    let (disk, file) = with_file(0);
    file.write_all_at(&[5; 3000], 100).unwrap();
    file.sync_data().unwrap();
    let expected = disk.read_file("a").unwrap();
    assert_eq!(expected.len(), 3100);
    for policy in POLICIES {
        assert_eq!(disk.crash(policy, 1).read_file("a").unwrap(), expected, "{policy:?}");
    }
}

#[test]
fn unsynced_sectors_may_vanish_in_any_subset() {
    let (disk, file) = with_file(4);
    file.write_all_at(&[1; 4 * SECTOR], 0).unwrap();
    assert_eq!(disk.pending_sectors(), 4);
    for kept in 0..16_u64 {
        let expected: Vec<u8> = (0..4).map(|bit| if kept >> bit & 1 == 1 { 1 } else { 0xEE }).collect();
        assert_eq!(firsts(&disk.crash_exact(kept, false, false)), expected);
    }
    let drawn: BTreeSet<Vec<u8>> =
        (0..500).map(|seed| firsts(&disk.crash(Crash::Subset { percent: 50 }, seed))).collect();
    assert_eq!(drawn.len(), 16);
}

#[test]
fn any_content_of_a_sector_written_twice_may_be_left() {
    let (disk, file) = with_file(1);
    put(&file, 0, 1);
    put(&file, 0, 2);
    let left: Vec<u8> = (0..4).map(|kept| firsts(&disk.crash_exact(kept, false, false))[0]).collect();
    assert_eq!(left, [0xEE, 1, 2, 2]);
}

#[test]
fn unsynced_length_is_independent_of_the_bytes() {
    let (disk, file) = with_file(1);
    put(&file, 1, 1);
    assert_eq!(firsts(&disk.crash_exact(0b0, true, false)), [0xEE, 0]);
    assert_eq!(firsts(&disk.crash_exact(0b1, false, false)), [0xEE]);
    assert_eq!(firsts(&disk.crash_exact(0b1, true, false)), [0xEE, 1]);
    let seen: BTreeSet<Vec<u8>> =
        (0..200).map(|seed| firsts(&disk.crash(Crash::Subset { percent: 50 }, seed))).collect();
    assert_eq!(seen.len(), 3);
}

#[test]
fn bytes_beyond_a_lost_length_do_not_come_back() {
    let (disk, file) = with_file(1);
    file.write_all_at(&[1; 100], SECTOR as u64 - 50).unwrap();
    let after = disk.crash_exact(0b11, false, false);
    after.open("a", Access::Write).unwrap().set_len(2 * SECTOR as u64).unwrap();
    let mut expected = vec![0xEE; SECTOR - 50];
    expected.resize(SECTOR, 1);
    expected.resize(2 * SECTOR, 0);
    assert_eq!(after.read_file("a").unwrap(), expected);
}

#[test]
fn unsynced_cut_may_be_undone() {
    let (disk, file) = with_file(3);
    file.set_len(SECTOR as u64).unwrap();
    assert_eq!(firsts(&disk.crash(Crash::None, 0)), [0xEE; 3]);
    assert_eq!(firsts(&disk.crash(Crash::All, 0)), [0xEE]);
    file.set_len(3 * SECTOR as u64).unwrap();
    assert_eq!(firsts(&disk.crash(Crash::All, 0)), [0xEE, 0, 0]);
    file.sync_data().unwrap();
    assert_eq!(firsts(&disk.crash(Crash::None, 0)), [0xEE, 0, 0]);
}

#[test]
fn sync_of_one_file_leaves_another_unsynced() {
    let (disk, file) = with_file(1);
    disk.write_file("b", b"old");
    disk.open("b", Access::Write).unwrap().write_all_at(b"new", 0).unwrap();
    file.sync_data().unwrap();
    disk.sync_dir().unwrap();
    assert_eq!(disk.crash(Crash::None, 0).read_file("b").unwrap(), b"old");
}

#[test]
fn reader_sees_what_was_written_but_cannot_write() {
    let (disk, file) = with_file(1);
    file.write_all_at(b"new", 510).unwrap();
    let reader = disk.open("a", Access::Read).unwrap();
    let mut bytes = [0; 9];
    assert_eq!(reader.read_at(&mut bytes, 508).unwrap(), 5);
    assert_eq!(&bytes[..5], b"\xEE\xEEnew");
    assert_eq!(reader.read_at(&mut bytes, 9000).unwrap(), 0);
    assert_eq!(kind(reader.write_at(b"x", 0)), ErrorKind::PermissionDenied);
    assert_eq!(kind(reader.set_len(0)), ErrorKind::PermissionDenied);
    assert_eq!(kind(file.write_at(b"x", u64::MAX)), ErrorKind::FileTooLarge);
    assert_eq!(&*reader.map(2).unwrap(), b"\xEE\xEE");
    assert!(reader.map(0).unwrap().is_empty());
    assert_eq!(kind(reader.map(514)), ErrorKind::InvalidInput);
}

#[test]
fn killed_process_leaves_its_bytes_to_be_lost_by_a_later_power_cut() {
    let (disk, file) = with_file(1);
    put(&file, 0, 1);
    disk.open("b", Access::Create).unwrap();
    let killed = disk.kill();
    assert_eq!(firsts(&killed), [1]);
    assert_eq!(killed.file_names(), ["a", "b"]);
    assert_eq!((killed.calls(), killed.pending_sectors()), (0, 1));
    assert_eq!(firsts(&killed.crash(Crash::None, 0)), [0xEE]);
    assert_eq!(killed.crash(Crash::None, 0).file_names(), ["a"]);
    assert_eq!(killed.crash(Crash::All, 0).file_names(), ["a", "b"]);
    killed.open("a", Access::Write).unwrap().sync_data().unwrap();
    assert_eq!(firsts(&killed.crash(Crash::None, 0)), [1]);
    assert_eq!(firsts(&disk.crash(Crash::None, 0)), [0xEE], "the old disk is another one");
}

#[test]
fn directory_entry_is_durable_only_after_sync_dir() {
    let disk = SimDisk::new();
    let file = disk.open("a", Access::Create).unwrap();
    file.write_all_at(b"bytes", 0).unwrap();
    file.sync_data().unwrap();
    assert_eq!(disk.crash(Crash::None, 0).read_file("a"), None);
    disk.sync_dir().unwrap();
    assert_eq!(disk.crash(Crash::None, 0).read_file("a").unwrap(), b"bytes");
}

#[test]
fn directory_operations_stay_or_go_one_by_one() {
    let disk = SimDisk::new();
    disk.write_file("old", b"old");
    disk.open("new", Access::Create).unwrap();
    disk.remove("old").unwrap();
    let seen: BTreeSet<Vec<String>> =
        (0..200).map(|seed| disk.crash(Crash::Subset { percent: 50 }, seed).file_names()).collect();
    assert_eq!(seen.len(), 4, "{seen:?}");
    assert_eq!(disk.crash_exact(0, false, true).file_names(), ["new"]);
    assert_eq!(disk.crash_exact(0, false, false).file_names(), ["old"]);
}

#[test]
fn rename_is_lost_with_the_creation_of_its_file() {
    let disk = SimDisk::new();
    disk.write_file("a", b"old");
    let file = disk.open("tmp", Access::Create).unwrap();
    file.write_all_at(b"new", 0).unwrap();
    file.sync_data().unwrap();
    disk.rename("tmp", "a").unwrap();
    let mut seen = BTreeSet::new();
    for seed in 0..200 {
        let after = disk.crash(Crash::Subset { percent: 50 }, seed);
        seen.insert((after.read_file("a").unwrap(), after.read_file("tmp")));
    }
    let (old, new) = (b"old".to_vec(), b"new".to_vec());
    assert_eq!(seen, BTreeSet::from([(old.clone(), None), (old, Some(new.clone())), (new, None)]));
}

#[test]
fn removed_file_works_while_it_is_open_and_is_gone_afterwards() {
    let (disk, file) = with_file(1);
    disk.remove("a").unwrap();
    disk.sync_dir().unwrap();
    put(&file, 0, 7);
    file.sync_data().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [7]);
    assert_eq!(disk.pending_sectors(), 0);
    let again = disk.open("a", Access::Create).unwrap();
    assert!(again.is_empty().unwrap());
    drop(file);
    disk.sync_dir().unwrap();
    assert_eq!(disk.lock_inner().nodes.len(), 1);
}

#[test]
fn access_decides_what_open_may_do() {
    let disk = SimDisk::new();
    assert_eq!(kind(disk.open("a", Access::Read)), ErrorKind::NotFound);
    assert_eq!(kind(disk.open("a", Access::Write)), ErrorKind::NotFound);
    disk.open("a", Access::Create).unwrap();
    assert_eq!(kind(disk.open("a", Access::Create)), ErrorKind::AlreadyExists);
    assert_eq!(kind(disk.remove("b")), ErrorKind::NotFound);
    assert_eq!(kind(disk.rename("b", "a")), ErrorKind::NotFound);
    assert_eq!(disk.list().unwrap(), ["a"]);
}

#[test]
fn second_lock_fails_until_the_first_is_dropped_or_the_process_dies() {
    let disk = SimDisk::new();
    let held = disk.lock("LOCK").unwrap();
    assert_eq!(kind(disk.clone().lock("LOCK")), ErrorKind::WouldBlock);
    disk.kill().lock("LOCK").unwrap();
    disk.crash(Crash::All, 0).lock("LOCK").unwrap();
    drop(held);
    assert_eq!(disk.list().unwrap(), ["LOCK"]);
    disk.lock("LOCK").unwrap();
}

#[test]
fn damage_is_on_the_medium_at_once() {
    let disk = SimDisk::new();
    disk.write_file("a", &[0; 1000]);
    let whole = disk.image_hash();
    disk.flip_bit("a", 600, 3);
    assert_eq!(disk.crash(Crash::None, 0).read_file("a").unwrap()[600], 8);
    assert_ne!(disk.image_hash(), whole);
    disk.flip_bit("a", 600, 3);
    assert_eq!(disk.image_hash(), whole, "the hash is of the content alone");
    disk.truncate("a", 10);
    assert_eq!(disk.crash(Crash::None, 0).read_file("a").unwrap(), [0; 10]);
    disk.truncate("a", 1000);
    assert_eq!(disk.image_hash(), whole);
    disk.write_file("a", b"short");
    assert_eq!(disk.crash(Crash::None, 0).read_file("a").unwrap(), b"short");
    disk.remove_file("a");
    assert!(disk.crash(Crash::All, 0).file_names().is_empty());
}

#[test]
#[should_panic(expected = "ends at 3")]
fn damage_beyond_the_end_is_a_mistake_of_the_test() {
    let disk = SimDisk::new();
    disk.write_file("a", b"abc");
    disk.flip_bit("a", 3, 0);
}

// The real thing.

/// One random call; what it answers, in a form that two disks can be compared by.
fn random_call(disk: &dyn Storage, rng: &mut Rng) -> String {
    let name = format!("f{}", rng.below(3));
    let (offset, len) = (rng.below(3000), rng.below(2000));
    let plain = |answer: io::Result<()>| format!("{:?}", answer.map_err(|e| e.kind()));
    let with = |access, call: &dyn Fn(&dyn File) -> io::Result<Vec<u8>>| {
        format!("{:?}", disk.open(&name, access).and_then(|file| call(&*file)).map_err(|e| e.kind()))
    };
    match rng.below(10) {
        0 => with(Access::Create, &|_| Ok(vec![])),
        1 => plain(disk.remove(&name)),
        2 => plain(disk.rename(&name, &format!("f{}", offset % 3))),
        3 => plain(disk.sync_dir()),
        4 => {
            let mut names = disk.list().unwrap();
            names.sort();
            format!("{names:?}")
        }
        5 => with(Access::Write, &|file| file.set_len(offset).map(|()| vec![])),
        6 => with(Access::Read, &|file| Ok(file.map(len as usize)?.to_vec())),
        7 => with(Access::Read, &|file| {
            let mut bytes = vec![0; len as usize];
            let count = file.read_at(&mut bytes, offset)?;
            bytes.truncate(count);
            Ok(bytes)
        }),
        _ => {
            let bytes = vec![rng.below(3) as u8; len as usize];
            with(Access::Write, &|file| file.write_all_at(&bytes, offset).map(|()| vec![]))
        }
    }
}

#[test]
fn simulated_and_real_disk_answer_alike() {
    for seed in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let (real, sim) = (Disk::existing(dir.path()).unwrap(), SimDisk::new());
        let (mut for_real, mut for_sim) = (Rng::new(seed), Rng::new(seed));
        for call in 0..200 {
            let (one, two) = (random_call(&real, &mut for_real), random_call(&sim, &mut for_sim));
            assert_eq!(one, two, "call {call} of seed {seed}");
        }
    }
}

#[test]
fn an_observer_is_told_of_each_call_and_of_refused_ones() {
    let (disk, file) = with_file(1);
    let told = Arc::new(Mutex::new(Vec::new()));
    let notes = told.clone();
    let first = disk.calls();
    disk.observe(move |index, kind| notes.lock().push((index - first, kind)));
    put(&file, 0, 1);
    disk.fail(Fault::new(CallKind::SyncData, ErrorKind::Other));
    file.sync_data().unwrap_err();
    assert_eq!(*told.lock(), [(0, CallKind::WriteAt), (1, CallKind::SyncData)]);
    disk.kill().open("a", Access::Read).unwrap();
    assert_eq!(told.lock().len(), 2, "of another disk");
}

#[test]
fn the_same_file_is_told_from_a_changed_or_missing_one() {
    let (disk, file) = with_file(3);
    let other = disk.kill();
    assert!(disk.has_same_file(&other, "a") && disk.has_same_file(&other, "b"));
    // Written anew, and equal all the same.
    put(&file, 1, 0xEE);
    assert!(disk.has_same_file(&other, "a"));
    put(&file, 1, 0);
    assert!(!disk.has_same_file(&other, "a"));
    file.set_len(700).unwrap();
    assert!(!disk.has_same_file(&other, "a"));
    other.remove_file("a");
    assert!(!disk.has_same_file(&other, "a"));
}
