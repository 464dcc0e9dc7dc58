//! Files as text: the form of the worked example in `docs/format.md` and of the golden directories.
//!
//! ```text
//! file STORE 32768
//! 00000000  54 49 44 45 53 54 4f 52  ; what it is
//! 00004000  54 49 44 45 53 54 4f 52
//! ```
//!
//! A file is its name and length, then runs of bytes with their offsets; all other bytes are zeros.
//! Behind `;` stands what a reader wants to know.
// Each test uses a part.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::Write;

/// The files of one directory.
pub type Files = BTreeMap<String, Vec<u8>>;

/// The files that `text` spells out. Panics, with the line, on what is not a dump.
pub fn parse(text: &str) -> Files {
    let mut files = Files::new();
    let mut current: Option<(String, usize)> = None;
    for line in text.lines() {
        let spelled = line.split(';').next().unwrap_or_default().trim();
        let mut words = spelled.split_whitespace();
        let Some(first) = words.next() else { continue };
        if first == "file" {
            let name = words.next().unwrap_or_else(|| panic!("no name: {line}"));
            let len =
                words.next().and_then(|len| len.parse().ok()).unwrap_or_else(|| panic!("no length: {line}"));
            assert!(words.next().is_none(), "{line}");
            assert!(files.insert(name.to_owned(), vec![0; len]).is_none(), "twice: {line}");
            current = Some((name.to_owned(), 0));
            continue;
        }
        let (name, end) = current.as_mut().unwrap_or_else(|| panic!("bytes without a file: {line}"));
        let bytes = files.get_mut(name).unwrap_or_else(|| panic!("no such file: {line}"));
        let mut at = usize::from_str_radix(first, 16).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(at >= *end, "offsets go backwards: {line}");
        for word in words {
            assert_eq!(word.len(), 2, "not a byte: {line}");
            bytes[at] = u8::from_str_radix(word, 16).unwrap_or_else(|e| panic!("{e}: {line}"));
            at += 1;
        }
        *end = at;
    }
    files
}

/// `files` as text, sixteen bytes a line; lines of zeros are left out.
pub fn write(files: &Files) -> String {
    let mut text = String::new();
    for (name, bytes) in files {
        writeln!(text, "file {name} {}", bytes.len()).unwrap();
        for (line, chunk) in bytes.chunks(16).enumerate() {
            if chunk.iter().any(|&byte| byte != 0) {
                write!(text, "{:08x} ", line * 16).unwrap();
                chunk.iter().for_each(|byte| write!(text, " {byte:02x}").unwrap());
                text.push('\n');
            }
        }
    }
    text
}

/// Fails at the first byte in which two directories differ.
pub fn assert_same(found: &Files, expected: &Files) {
    let lengths =
        |files: &Files| files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect::<Vec<_>>();
    assert_eq!(lengths(found), lengths(expected), "files and their lengths");
    for (name, bytes) in found {
        if let Some(at) = bytes.iter().zip(&expected[name]).position(|(a, b)| a != b) {
            panic!("{name} differs at {at:#x}: found {:02x}, expected {:02x}", bytes[at], expected[name][at]);
        }
    }
}
