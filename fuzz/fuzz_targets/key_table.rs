//! Key tables go both ways; made-up ones end; and a sealed segment with a made-up table that verifies gives an error
//! or values that were written, never anything else.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use support::{contents, open, sample};
use tidewall::Error;
use tidewall::storage::SimDisk;
use tidewall::testkit::codecs::{read_any_table, table_of, with_table, write_table};

#[derive(Arbitrary, Debug)]
enum Table {
    Bytes(Vec<u8>),
    Offsets(Vec<u32>),
    /// The right one, without some entries, and with others moved by a little.
    Nearly {
        leave_out: Vec<u8>,
        moved: Vec<(u8, i8)>,
    },
}

#[derive(Arbitrary, Debug)]
struct Input {
    table: Table,
    keyspaces: u8,
}

/// The files of a store that was closed, and the last of its segments, which was cut behind its seal.
static SAMPLE: OnceLock<(Vec<(String, Vec<u8>)>, String)> = OnceLock::new();

fuzz_target!(|input: Input| {
    let (files, last) = SAMPLE.get_or_init(|| {
        let (disk, _) = sample(1);
        let names = disk.file_names().into_iter().filter(|name| name != "LOCK");
        let files: Vec<_> =
            names.filter_map(|name| disk.read_file(&name).map(|bytes| (name, bytes))).collect();
        let cut = files.iter().filter(|(_, bytes)| table_of(bytes).is_some());
        let last = cut.max_by_key(|(name, _)| name.clone()).expect("a sealed segment").0.clone();
        (files, last)
    });
    let disk = SimDisk::new();
    files.iter().for_each(|(name, bytes)| disk.write_file(name, bytes));
    let sound = disk.read_file(last).expect("there");
    let table = match input.table {
        Table::Bytes(bytes) => {
            read_any_table(&bytes);
            bytes
        }
        Table::Offsets(offsets) => write_table(offsets.into_iter().take(500).collect()),
        Table::Nearly { leave_out, moved } => {
            let mut offsets = read_any_table(&table_of(&sound).expect("sealed"));
            for n in leave_out {
                if !offsets.is_empty() {
                    offsets.remove(n as usize % offsets.len());
                }
            }
            for (n, by) in moved {
                let len = offsets.len().max(1);
                if let Some(offset) = offsets.get_mut(n as usize % len) {
                    *offset = offset.saturating_add_signed(by as i32);
                }
            }
            write_table(offsets)
        }
    };
    disk.write_file(last, &with_table(&sound, &table, input.keyspaces as u32 % 4).expect("sealed"));
    let found = open(&disk, 5).and_then(|db| contents(&db));
    match found {
        Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "{error}"),
        Ok(contents) => {
            for ((keyspace, key), (value, _)) in contents {
                let written = match keyspace.as_str() {
                    "rows" => value.len() == 300 + value[0] as usize && key == [b'k', value[0] % 23],
                    _ => key == b"7/result" && value == b"done",
                };
                assert!(written, "{keyspace}: {} was never written so", key.escape_ascii());
            }
        }
    }
});
