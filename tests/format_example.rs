//! The worked example of `docs/format.md`, held to its word in three ways: written again it gives the
//! same bytes, the store opens it, and its checksums follow from the formulas on that page.
#![cfg(feature = "testkit")]

mod dump;

use dump::Files;
use tidewall::storage::SimDisk;
use tidewall::{Db, Error, KeyspaceOptions, OperationId, Options, OwnerId, Scope, Token};

const PAGE: &str = include_str!("../docs/format.md");

/// The block of the page behind `<!-- example -->`.
fn documented() -> Files {
    let (_, behind) = PAGE.split_once("<!-- example -->").expect("the page marks its example");
    let (_, block) = behind.split_once("```text\n").expect("the example is a text block");
    let (block, _) = block.split_once("```").expect("the block ends");
    dump::parse(block)
}

fn options(disk: &SimDisk, seed: u64) -> Options {
    Options::new().storage(disk.clone()).deterministic(seed).without_threads().segment_bytes(16 << 10)
}

fn jobs() -> KeyspaceOptions {
    KeyspaceOptions::new().scope(Scope::Prefix(b'/'))
}

/// What the page says was done.
fn write_example() -> SimDisk {
    let disk = SimDisk::new();
    let db = options(&disk, 1).open("example").unwrap();
    let jobs = db.keyspace("jobs", jobs()).unwrap();
    let lease = jobs.lease(b"7/").owner(OwnerId::new(0xA)).acquire().unwrap();
    jobs.put(lease.token(), b"7/a", b"draft").unwrap();
    jobs.put_operation(lease.token(), OperationId::new(9), b"7/a", b"done").unwrap();
    lease.release().unwrap();
    db.close().unwrap();
    disk
}

fn files(disk: &SimDisk) -> Files {
    let stored = disk.file_names().into_iter().filter(|name| name != "LOCK");
    stored.map(|name| (name.clone(), disk.read_file(&name).unwrap())).collect()
}

fn open(files: &Files) -> Result<Db, Error> {
    let disk = SimDisk::new();
    for (name, bytes) in files {
        disk.write_file(name, bytes);
    }
    options(&disk, 2).open("example")
}

#[test]
fn the_example_is_what_this_build_writes() {
    let written = files(&write_example());
    if let Ok(path) = std::env::var("TIDEWALL_WRITE_EXAMPLE") {
        std::fs::write(path, dump::write(&written)).unwrap();
    }
    dump::assert_same(&written, &documented());
}

#[test]
fn the_example_opens_and_holds_what_the_page_says() {
    let db = open(&documented()).unwrap();
    assert_eq!(db.report().ops, 5);
    assert_eq!(db.report().cut_bytes, 0);
    assert!(db.report().warnings.is_empty(), "{:?}", db.report().warnings);
    assert_eq!(db.keyspaces(), [("jobs".to_owned(), jobs())]);
    let jobs = db.keyspace("jobs", jobs()).unwrap();
    let value = jobs.get(b"7/a").unwrap().unwrap();
    assert_eq!((&*value, value.token().get(), value.lsn().get()), (&b"done"[..], 1, 4));
    assert_eq!(jobs.iter().count(), 1);
    assert_eq!(jobs.mark(b"7/").unwrap().unwrap().get(), 1);
    let retry = jobs.put_operation(Token::new(1).unwrap(), OperationId::new(9), b"7/a", b"done");
    assert!(matches!(retry, Err(Error::Duplicate { lsn }) if lsn.get() == 4), "{retry:?}");
    assert_eq!(jobs.lease(b"7/").acquire().unwrap().token().get(), 2);
}

#[test]
fn a_flipped_bit_of_the_example_is_named_or_harmless() {
    let files = documented();
    for (name, bytes) in &files {
        for at in (0..bytes.len()).filter(|&at| bytes[at] != 0) {
            let mut damaged = files.clone();
            damaged.get_mut(name).unwrap()[at] ^= 0x10;
            match open(&damaged) {
                Err(Error::Corrupt { .. }) => {}
                // One copy of STORE, or the key table: read around, and said. The header of a frame in a
                // segment that STORE calls sealed is read by a scan alone, but for its lsn.
                Ok(db) => {
                    let warned = !db.report().warnings.is_empty();
                    // Nothing rests on a spare but that it begins as one.
                    let in_spare = bytes.starts_with(b"TIDEFREE") && at >= 4;
                    assert!(
                        warned || in_spare || (name != "STORE" && in_frame_header(bytes, at)),
                        "{name} {at:#x}"
                    );
                    let jobs = db.keyspace("jobs", jobs()).unwrap();
                    assert_eq!(jobs.get(b"7/a").unwrap().as_deref(), Some(&b"done"[..]), "{name} {at:#x}");
                    assert_eq!(jobs.mark(b"7/").unwrap().unwrap().get(), 1, "{name} {at:#x}");
                }
                Err(other) => panic!("{name} {at:#x}: {other}"),
            }
        }
    }
}

/// Whether `at` lies in the header of a frame, its lsn left out.
fn in_frame_header(segment: &[u8], at: usize) -> bool {
    let mut frame = 4096;
    while frame <= at {
        let body_len = u32::from_le_bytes(segment[frame + 4..frame + 8].try_into().unwrap());
        if (frame..frame + 28).contains(&at) {
            return !(frame + 8..frame + 16).contains(&at);
        }
        frame = (frame + 28 + body_len as usize).next_multiple_of(4);
    }
    false
}

/// A reader of the page and of nothing else.
struct Page<'a> {
    bytes: &'a [u8],
    identity: Vec<u8>,
}

impl Page<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    /// crc32(store id, segment id, life, `parts`).
    fn salted(&self, parts: &[&[u8]]) -> u32 {
        let mut all = self.identity.clone();
        parts.iter().for_each(|part| all.extend_from_slice(part));
        crc32fast::hash(&all)
    }
}

#[test]
fn the_checksums_of_the_example_follow_from_the_page() {
    let files = documented();
    let store = &files["STORE"];
    let len = u32::from_le_bytes(store[16..20].try_into().unwrap()) as usize;
    assert_eq!(crc32fast::hash(&store[..12]).to_le_bytes(), store[12..16]);
    assert_eq!(crc32fast::hash(&store[..len - 4]).to_le_bytes(), store[len - 4..len]);
    assert_eq!(store[..len], store[16384..16384 + len], "both copies");

    let (store_id, listed) = (&store[28..44], &store[75..93]);
    let (segment, bytes, life) = (&listed[..4], &listed[4..8], &listed[8..16]);
    assert_eq!(u32::from_le_bytes(bytes.try_into().unwrap()) as usize, files["000001.seg"].len());
    let page = Page { bytes: &files["000001.seg"], identity: [store_id, segment, life].concat() };
    let file = page.bytes;
    assert_eq!(page.u32(76), page.salted(&[&0u32.to_le_bytes(), &file[..76]]), "segment header");

    let (mut at, mut previous, mut ops) = (4096, page.u32(76), Vec::new());
    let seal = file.len() - 64;
    let end = page.u32(seal + 12) as usize;
    for lsn in 1..=5u64 {
        let (body_len, offset) = (page.u32(at + 4) as usize, (at as u32).to_le_bytes());
        assert_eq!(page.u32(at), page.salted(&[&offset, &file[at + 4..at + 28]]), "frame {lsn}");
        assert_eq!((page.u64(at + 8), page.u32(at + 16), page.u32(at + 20)), (lsn, 1, previous));
        // Each frame of the example has one op, and none a large value.
        let (op, op_end) = (at + 28, at + 28 + body_len);
        let bound = [&(op as u32).to_le_bytes()[..], &lsn.to_le_bytes()].concat();
        assert_eq!(page.u32(op), page.salted(&[&bound, &file[op + 4..op_end]]), "op of frame {lsn}");
        assert_eq!(page.u32(at + 24), crc32fast::hash(&file[op..op + 4]), "body of frame {lsn}");
        ops.push(op);
        previous = page.u32(at);
        at = op_end.next_multiple_of(4);
    }
    assert_eq!(at, end);
    assert_eq!(page.u32(seal + 16), previous, "the seal names the last frame");
    let table = seal - page.u32(seal + 32) as usize;
    assert_eq!(page.u32(seal + 36), page.salted(&[&(table as u32).to_le_bytes(), &file[table..seal]]));
    assert_eq!(page.u32(seal + 60), page.salted(&[&(seal as u32).to_le_bytes(), &file[seal..seal + 60]]));
    let first = usize::from(file[table] & 0x7f) | usize::from(file[table + 1]) << 7;
    assert_eq!(first, ops[0]);
    let differences: Vec<usize> = ops.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(file[table + 2..seal].iter().map(|&byte| usize::from(byte)).collect::<Vec<_>>(), differences);
}
