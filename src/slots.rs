//! The names of slots: `key`, a dot, a number, the delimiter of the keyspace.
//!
//! One job: from a key and a number to the fence of that slot, and back. A slot is an ordinary prefix fence,
//! with tokens of its own: that is why a slot used again fences its former holder and nobody else.
//!
//! Read next: `grant.rs`, which picks the lowest free one.

use crate::error::{Error, Result};
use crate::options::Scope;

/// The most slots of one key.
pub const MAX_SLOTS: u32 = 4096;

const DOT: u8 = b'.';

/// The delimiter of a keyspace in which `key` may have `n` slots.
pub(crate) fn check_slots(scope: Scope, key: &[u8], n: u32) -> Result<u8> {
    let Scope::Prefix(delimiter) = scope else {
        return Err(Error::invalid(
            "slots are prefixes: create the keyspace with `Scope::Prefix`, so that a slot's keys share a fence",
        ));
    };
    if delimiter.is_ascii_digit() || delimiter == DOT {
        return Err(Error::invalid(format!(
            "the delimiter {:?} of the keyspace may stand inside of a slot's name: slots need one that is neither \
             a digit nor a dot",
            char::from(delimiter)
        )));
    }
    if key.contains(&delimiter) {
        return Err(Error::invalid(format!(
            "the key of slots holds the delimiter {:?}: leave it out, each slot's name ends with it",
            char::from(delimiter)
        )));
    }
    if n == 0 || n > MAX_SLOTS {
        return Err(Error::invalid(format!("{n} slots are not between 1 and {MAX_SLOTS}")));
    }
    Ok(delimiter)
}

/// The fence of slot `index` of `key`.
pub(crate) fn slot_name(key: &[u8], index: u32, delimiter: u8) -> Vec<u8> {
    let mut name = key.to_vec();
    name.push(DOT);
    name.extend_from_slice(index.to_string().as_bytes());
    name.push(delimiter);
    name
}

/// The key and the number that a fence is a slot of, if its name is one of a slot.
pub(crate) fn slot_of(fence: &[u8]) -> Option<(&[u8], u32)> {
    let (_, name) = fence.split_last()?;
    // From behind, where most names that are none of a slot end at once.
    let dot = name.iter().rposition(|byte| !byte.is_ascii_digit()).filter(|&at| name[at] == DOT)?;
    let digits = &name[dot + 1..];
    if digits.is_empty() || (digits[0] == b'0' && digits.len() > 1) {
        return None;
    }
    Some((&name[..dot], std::str::from_utf8(digits).ok()?.parse().ok()?))
}

// The primitives of shuttle do not run outside of its models.
#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_slot_goes_both_ways() {
        for (key, index) in [(&b"user"[..], 0), (b"user", 7), (b"a.1", 10), (b"", 4095), (b".", 1)] {
            let name = slot_name(key, index, b'/');
            assert_eq!(slot_of(&name), Some((key, index)), "{name:?}");
            assert_eq!(Scope::Prefix(b'/').fence_len(&name), name.len(), "it is a fence");
        }
        for name in
            [&b""[..], b"user/", b"user./", b"user.x/", b"user.01/", b"user.+1/", b"user.99999999999/"]
        {
            assert_eq!(slot_of(name), None, "{name:?}");
        }
    }

    #[test]
    fn what_could_be_taken_for_another_name_is_refused() {
        assert_eq!(check_slots(Scope::Prefix(b'/'), b"user", 3).unwrap(), b'/');
        for (scope, key, n) in [
            (Scope::Key, &b"user"[..], 3),
            (Scope::Keyspace, b"user", 3),
            (Scope::Prefix(b'.'), b"user", 3),
            (Scope::Prefix(b'7'), b"user", 3),
            (Scope::Prefix(b'/'), b"user/", 3),
            (Scope::Prefix(b'/'), b"user", 0),
            (Scope::Prefix(b'/'), b"user", MAX_SLOTS + 1),
        ] {
            assert!(
                matches!(check_slots(scope, key, n), Err(Error::InvalidArgument(_))),
                "{scope:?} {key:?} {n}"
            );
        }
    }
}
