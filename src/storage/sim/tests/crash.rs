//! Power cuts leave what their policies say.

use super::*;

#[test]
fn ordered_policies_keep_what_their_names_say() {
    let (disk, file) = with_file(6);
    for index in 0..6 {
        put(&file, index, 1);
    }
    let shapes = |policy| -> BTreeSet<String> {
        let shape = |seed| -> String {
            firsts(&disk.crash(policy, seed)).iter().map(|&b| if b == 1 { 'n' } else { '-' }).collect()
        };
        (0..300).map(shape).collect()
    };
    let cut = |at: usize| ("n".repeat(at), "-".repeat(6 - at));
    let prefixes: BTreeSet<String> = (0..7).map(|at| cut(at).0 + &cut(at).1).collect();
    let suffixes: BTreeSet<String> = (0..7).map(|at| cut(6 - at).1 + &cut(6 - at).0).collect();
    assert_eq!(shapes(Crash::Prefix), prefixes);
    assert_eq!(shapes(Crash::Suffix), suffixes);
    assert_eq!(shapes(Crash::Reverse), suffixes);
    let missing: BTreeSet<String> = (0..6).map(|at| "n".repeat(at) + "-" + &"n".repeat(5 - at)).collect();
    let present: BTreeSet<String> = (0..6).map(|at| "-".repeat(at) + "n" + &"-".repeat(5 - at)).collect();
    assert_eq!(shapes(Crash::OneMissing), missing);
    assert_eq!(shapes(Crash::OnePresent), present);
}

#[test]
fn reverse_leaves_the_oldest_content_of_a_sector() {
    let (disk, file) = with_file(1);
    put(&file, 0, 1);
    put(&file, 0, 2);
    let left =
        |policy| -> BTreeSet<u8> { (0..50).map(|seed| firsts(&disk.crash(policy, seed))[0]).collect() };
    assert_eq!(left(Crash::Reverse), BTreeSet::from([0xEE, 1, 2]));
    assert_eq!(left(Crash::Suffix), BTreeSet::from([0xEE, 2]));
    assert_eq!(left(Crash::Prefix), BTreeSet::from([0xEE, 1, 2]));
}

#[test]
fn order_of_writes_is_over_all_files() {
    let (disk, a) = with_file(1);
    disk.write_file("b", &[0xEE; SECTOR]);
    let b = disk.open("b", Access::Write).unwrap();
    put(&b, 0, 1);
    put(&a, 0, 1);
    for seed in 0..50 {
        let after = disk.crash(Crash::Prefix, seed);
        let (a, b) = (after.read_file("a").unwrap()[0], after.read_file("b").unwrap()[0]);
        assert!((a, b) != (1, 0xEE), "the later write alone is no prefix");
    }
}

#[test]
fn torn_sector_is_cut_at_any_byte_and_only_one_is_torn() {
    let (disk, file) = with_file(3);
    file.write_all_at(&[1; 3 * SECTOR], 0).unwrap();
    let mut tears = BTreeSet::new();
    for seed in 0..20_000 {
        let bytes = disk.crash(Crash::Torn { bytes: true }, seed).read_file("a").unwrap();
        let mixed: Vec<&[u8]> =
            bytes.chunks(SECTOR).filter(|sector| sector.iter().any(|&byte| byte != sector[0])).collect();
        assert_eq!(mixed.len(), 1);
        tears.insert((mixed[0][0], mixed[0].iter().filter(|&&byte| byte == 1).count()));
    }
    assert_eq!(tears.len(), 2 * (SECTOR - 1), "heads and tails of every length");
}

#[test]
fn cut_write_ends_between_its_sectors() {
    let (disk, file) = with_file(6);
    put(&file, 0, 1);
    file.write_all_at(&[1; 4 * SECTOR], SECTOR as u64).unwrap();
    put(&file, 5, 1);
    let counts: BTreeSet<usize> = (0..300)
        .map(|seed| {
            firsts(&disk.crash(Crash::Torn { bytes: false }, seed)).iter().filter(|&&b| b == 1).count()
        })
        .collect();
    assert_eq!(counts, BTreeSet::from([0, 1, 2, 3, 4, 5, 6]));
    for seed in 0..300 {
        let left = firsts(&disk.crash(Crash::Torn { bytes: false }, seed));
        assert!(left.is_sorted_by_key(|&byte| byte != 1), "a cut write is a prefix: {left:?}");
    }
}

#[test]
fn directory_operations_on_a_lost_file_are_skipped() {
    let tmp: Arc<str> = "tmp".into();
    let mut names = BTreeMap::from([(tmp.clone(), 1)]);
    let before = names.clone();
    DirOp::Rename { from: tmp.clone(), to: "a".into(), node: 2 }.apply(&mut names);
    assert_eq!(names, before, "this is another file of that name");
    DirOp::Remove { name: tmp.clone(), node: 2 }.apply(&mut names);
    assert_eq!(names, before);
    DirOp::Rename { from: tmp, to: "a".into(), node: 1 }.apply(&mut names);
    assert_eq!(names, BTreeMap::from([("a".into(), 1)]));
}

fn busy(seed: u64) -> SimDisk {
    let disk = SimDisk::new();
    disk.early_write_back(seed);
    disk.short_transfers(seed);
    let mut rng = Rng::new(seed);
    for round in 0..20_u64 {
        let name = format!("f{}", rng.below(4));
        let file = disk.open(&name, Access::Create).or_else(|_| disk.open(&name, Access::Write)).unwrap();
        file.write_all_at(&vec![round as u8; rng.below(3000) as usize], rng.below(4000)).unwrap();
        match rng.below(6) {
            0 => file.sync_data().unwrap(),
            1 => disk.sync_dir().unwrap(),
            2 => disk.rename(&name, "f0").unwrap(),
            3 => file.set_len(rng.below(5000)).unwrap(),
            4 => disk.remove(&name).unwrap(),
            _ => {}
        }
    }
    disk
}

#[test]
fn same_seed_same_image() {
    for seed in 0..50 {
        let (one, two) = (busy(seed), busy(seed));
        assert_eq!((one.trace_hash(), one.image_hash()), (two.trace_hash(), two.image_hash()));
        for policy in POLICIES {
            assert_eq!(one.crash(policy, seed).image_hash(), two.crash(policy, seed).image_hash());
        }
    }
    assert_ne!(busy(1).trace_hash(), busy(2).trace_hash());
}

#[test]
fn power_cut_of_a_crashed_disk_changes_nothing_and_all_keeps_everything() {
    for seed in 0..50 {
        let disk = busy(seed);
        let all = disk.crash(Crash::All, 0);
        assert_eq!(all.file_names(), disk.file_names());
        for name in disk.file_names() {
            assert_eq!(all.read_file(&name), disk.read_file(&name));
        }
        for policy in POLICIES {
            let once = disk.crash(policy, seed);
            assert_eq!(once.pending_sectors(), 0);
            assert_eq!(once.crash(Crash::None, 7).image_hash(), once.image_hash());
        }
    }
}

#[test]
fn sync_of_everything_makes_all_cuts_alike() {
    for seed in 0..50 {
        let disk = busy(seed);
        for name in disk.file_names() {
            disk.open(&name, Access::Write).unwrap().sync_data().unwrap();
        }
        disk.sync_dir().unwrap();
        for policy in POLICIES {
            assert_eq!(disk.crash(policy, seed).image_hash(), disk.image_hash());
        }
    }
}

#[test]
fn early_write_back_may_save_what_was_never_synced() {
    let saved = (0..50).filter(|&seed| {
        let (disk, file) = with_file(1);
        disk.early_write_back(seed);
        put(&file, 0, 1);
        firsts(&disk.crash(Crash::None, 0)) == [1]
    });
    let saved = saved.count();
    assert!(saved > 5, "{saved}");
    assert!(saved < 45, "{saved}");
}

/// A link is an entry of its own directory, and nothing else makes it durable.
#[test]
fn a_link_is_durable_once_its_own_directory_is_synced() {
    let (disk, file) = with_file(1);
    let other = disk.dir("other");
    assert!(!file.is_shared().unwrap());
    disk.link("a", &other).unwrap();
    assert!(file.is_shared().unwrap());
    assert_eq!(kind(disk.link("a", &other)), ErrorKind::AlreadyExists);
    assert_eq!(kind(disk.link("b", &other)), ErrorKind::NotFound);
    assert_eq!(kind(disk.link("a", &SimDisk::new())), ErrorKind::Unsupported);
    assert_eq!(disk.file_names(), ["a"]);
    assert_eq!(other.list().unwrap(), ["a"]);
    disk.sync_dir().unwrap();
    assert!(disk.crash(Crash::None, 1).dir("other").file_names().is_empty());
    assert_eq!(disk.crash(Crash::All, 1).dir("other").file_names(), ["a"]);
    other.sync_dir().unwrap();
    put(&file, 0, 7);
    file.sync_data().unwrap();
    disk.remove("a").unwrap();
    disk.sync_dir().unwrap();
    let after = disk.crash(Crash::None, 1);
    assert!(after.file_names().is_empty());
    assert_eq!(after.dir("other").read_file("a").unwrap(), [7; SECTOR]);
}

/// Syncing one directory leaves what happened in another as it was: undecided.
#[test]
fn directories_are_synced_one_by_one() {
    let disk = SimDisk::new();
    let other = disk.dir("other");
    disk.open("a", Access::Create).unwrap();
    other.open("b", Access::Create).unwrap();
    other.remove("b").unwrap();
    other.open("c", Access::Create).unwrap();
    disk.sync_dir().unwrap();
    let none = disk.crash(Crash::None, 1);
    assert_eq!(none.file_names(), ["a"]);
    assert!(none.dir("other").file_names().is_empty());
    let all = disk.crash(Crash::All, 1);
    assert_eq!(all.dir("other").file_names(), ["c"]);
    other.sync_dir().unwrap();
    assert_eq!(disk.crash(Crash::None, 1).dir("other").file_names(), ["c"]);
}

/// Two names of one file take its bytes once.
#[test]
fn a_link_takes_no_space() {
    let (disk, _) = with_file(2);
    disk.set_budget(Some(3 * SECTOR as u64));
    disk.link("a", &disk.dir("other")).unwrap();
    let file = disk.open("b", Access::Create).unwrap();
    file.write_all_at(&[1; SECTOR], 0).unwrap();
    assert_eq!(kind(file.write_all_at(&[1; SECTOR], SECTOR as u64)), ErrorKind::StorageFull);
}
