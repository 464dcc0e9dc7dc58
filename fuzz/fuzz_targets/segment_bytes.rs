//! Any bytes as a segment of an otherwise sound store: an error or a store, never a panic, never much memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use support::{contents, open, open_read_only, sample};
use tidewall::storage::SimDisk;

static SAMPLE: OnceLock<Vec<(String, Vec<u8>)>> = OnceLock::new();

fuzz_target!(|input: (u8, u16, Vec<u8>)| {
    let files = SAMPLE.get_or_init(|| {
        let (disk, _) = sample(1);
        let names = disk.file_names();
        names.into_iter().filter_map(|name| disk.read_file(&name).map(|bytes| (name, bytes))).collect()
    });
    let (which, at, bytes) = input;
    let disk = SimDisk::new();
    let segments = files.iter().filter(|(name, _)| name != "LOCK").count();
    for (n, (name, sound)) in files.iter().filter(|(name, _)| name != "LOCK").enumerate() {
        let mut file = sound.clone();
        if n == which as usize % segments {
            // The bytes lie over the sound ones, so that the checks in front of them are passed now and then.
            let at = at as usize % (file.len() + 1);
            let end = (at + bytes.len()).min(file.len());
            file[at..end].copy_from_slice(&bytes[..end - at]);
        }
        disk.write_file(name, &file);
    }
    if let Ok(db) = open_read_only(&disk) {
        let _ = contents(&db);
    }
    if let Ok(db) = open(&disk, 2) {
        let _ = contents(&db);
    }
});
