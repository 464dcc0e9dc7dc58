//! Keys, fences and values as text, and back.
//!
//! On the command line and in tables: printable ASCII as it is, `\n`, `\r`, `\t`, `\\`, `\'`, `\"`, and `\xNN`
//! for every other byte; or two hex digits a byte. In JSON: text where the bytes are UTF-8, else hex, under
//! another name.

use crate::failure::Failure;
use serde_json::{Map, Value};

/// The bytes that an argument names.
pub fn parse(text: &str, hex: bool) -> Result<Vec<u8>, Failure> {
    let parsed = if hex { from_hex(text) } else { unescape(text) };
    parsed.map_err(|what| Failure::usage(format!("{text:?}: {what}")))
}

/// As a person reads them.
pub fn show(bytes: &[u8], hex: bool) -> String {
    if hex { to_hex(bytes) } else { bytes.escape_ascii().to_string() }
}

pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

pub fn from_hex(text: &str) -> Result<Vec<u8>, String> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return Err("hex has two digits a byte, and here one is left over".to_owned());
    }
    digits.chunks_exact(2).map(hex_byte).collect()
}

fn hex_byte(digits: &[u8]) -> Result<u8, String> {
    let digit = |at: usize| digits.get(at).and_then(|&digit| char::from(digit).to_digit(16));
    match (digit(0), digit(1)) {
        (Some(high), Some(low)) => Ok((high * 16 + low) as u8),
        _ => Err(format!("\"{}\" is not a byte in hex", digits.escape_ascii())),
    }
}

fn unescape(text: &str) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&kind, behind) = rest.split_first().ok_or("a backslash at the end; write \\\\ for one")?;
        rest = behind;
        out.push(match kind {
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'0' => 0,
            b'\\' | b'\'' | b'"' => kind,
            b'x' => {
                let digits = rest.get(..2).ok_or("\\x wants two hex digits")?;
                rest = &rest[2..];
                hex_byte(digits)?
            }
            _ => return Err(format!("\\{} is no escape; write \\\\ for a backslash", kind.escape_ascii())),
        });
    }
    Ok(out)
}

/// Puts bytes into a JSON object: as text where they are UTF-8, else as hex under `name_hex`.
pub fn put_json(map: &mut Map<String, Value>, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => map.insert(name.to_owned(), text.into()),
        Err(_) => map.insert(format!("{name}_hex"), to_hex(bytes).into()),
    };
}

/// Takes them out again; `None` when they are not there.
pub fn get_json(map: &Map<String, Value>, name: &str) -> Result<Option<Vec<u8>>, String> {
    match (map.get(name), map.get(&format!("{name}_hex"))) {
        (Some(Value::String(text)), None) => Ok(Some(text.as_bytes().to_vec())),
        (None, Some(Value::String(hex))) => from_hex(hex).map(Some),
        (None, None) => Ok(None),
        _ => Err(format!("{name:?} is not text, or there twice")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_goes_both_ways() {
        let all: Vec<u8> = (0..=255).collect();
        for hex in [false, true] {
            assert_eq!(parse(&show(&all, hex), hex).expect("its own output"), all);
        }
        for bytes in [&all[..], b"text \xc3\xa9"] {
            let mut map = Map::new();
            put_json(&mut map, "key", bytes);
            assert_eq!(get_json(&map, "key"), Ok(Some(bytes.to_vec())));
        }
    }

    #[test]
    fn what_is_no_escape_is_named() {
        for bad in ["\\", "\\x", "\\x1", "\\xg0", "\\q", "a\\"] {
            assert!(unescape(bad).is_err(), "{bad}");
        }
        for bad in ["a", "0g", "é"] {
            assert!(from_hex(bad).is_err(), "{bad}");
        }
        assert_eq!(unescape("é\\x00\\0"), Ok(vec![0xc3, 0xa9, 0, 0]));
    }
}
