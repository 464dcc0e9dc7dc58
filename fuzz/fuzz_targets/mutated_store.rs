//! A sound store, closed, then damaged on purpose: opening gives the same contents, or an error that leaves the
//! files as they are; a read gives the right value or an error.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use support::{contents, open, sample};
use tidewall::Error;
use tidewall::storage::SimDisk;

#[derive(Arbitrary, Debug)]
enum Damage {
    Flip { file: u8, offset: u32, bit: u8 },
    Fill { file: u8, sector: u8, byte: u8 },
    Truncate { file: u8, len: u32 },
    Extend { file: u8, bytes: u16 },
    Remove { file: u8 },
    Swap { one: u8, other: u8 },
    Duplicate { from: u8, to: u8 },
}

fuzz_target!(|input: (u8, Vec<Damage>)| {
    let (seed, damages) = input;
    let (disk, expected) = sample(seed as u64);
    for damage in damages.iter().take(3) {
        hurt(&disk, damage);
    }
    let before = disk.image_hash();
    match open(&disk, 99) {
        Ok(db) => match contents(&db) {
            Ok(found) => assert_eq!(found, expected, "damage changed what is read: {damages:?}"),
            Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "{error}: {damages:?}"),
        },
        Err(error) => {
            assert!(
                matches!(error, Error::Corrupt { .. } | Error::UpgradeRequired { .. }),
                "{error}: {damages:?}"
            );
            let locked = disk.image_hash();
            assert_eq!(before, locked, "a refused open changed the files: {damages:?}");
        }
    }
});

/// Every file but the lock, whose content and existence mean nothing.
fn files(disk: &SimDisk) -> Vec<String> {
    disk.file_names().into_iter().filter(|name| name != "LOCK").collect()
}

fn hurt(disk: &SimDisk, damage: &Damage) {
    let names = files(disk);
    if names.len() < 2 {
        return;
    }
    let name = |n: u8| names[n as usize % names.len()].clone();
    let read = |name: &str| disk.read_file(name).unwrap_or_default();
    match *damage {
        Damage::Flip { file, offset, bit } => {
            let len = read(&name(file)).len() as u32;
            if len > 0 {
                disk.flip_bit(&name(file), (offset % len) as u64, bit % 8);
            }
        }
        Damage::Fill { file, sector, byte } => {
            let mut bytes = read(&name(file));
            let sectors = bytes.len().div_ceil(512).max(1);
            let from = sector as usize % sectors * 512;
            let to = (from + 512).min(bytes.len());
            bytes[from..to].fill(byte);
            disk.write_file(&name(file), &bytes);
        }
        Damage::Truncate { file, len } => {
            let now = read(&name(file)).len() as u32;
            disk.truncate(&name(file), (len % (now + 1)) as u64);
        }
        Damage::Extend { file, bytes } => {
            let mut longer = read(&name(file));
            longer.resize(longer.len() + bytes as usize, 0xA5);
            disk.write_file(&name(file), &longer);
        }
        Damage::Remove { file } => disk.remove_file(&name(file)),
        Damage::Swap { one, other } => {
            let (a, b) = (read(&name(one)), read(&name(other)));
            disk.write_file(&name(one), &b);
            disk.write_file(&name(other), &a);
        }
        Damage::Duplicate { from, to } => {
            let bytes = read(&name(from));
            disk.write_file(&name(to), &bytes);
        }
    }
}
