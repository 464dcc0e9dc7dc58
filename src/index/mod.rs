//! From a name to where its bytes lie.
//!
//! Two views of the same keys: [`slots`] answers "where is this one", [`OrderedKeys`] answers "which
//! come next". The slots hold no keys: a match is a hint, and the caller proves it in the log. Both
//! are caches of the log in memory and never read or write a file.
//!
//! Read next: `table.rs` for what a slot is, then `slab.rs` for where its table lies, `slots.rs`, then `ordered.rs`.

mod table;
mod slab;
mod slots;
mod ordered;

pub(crate) use ordered::{KEPT, KeyChunk, OrderedKeys, UnorderedKeys, prefix_end};
pub(crate) use slab::SLAB_TABLES;
pub(crate) use slots::{SavedTable, Slots, SlotsWriter, saved_slots, slots};
pub(crate) use table::{Place, SEGMENT_BITS, share_a_tag};

use rapidhash::v3::{DEFAULT_RAPID_SECRETS, RapidSecrets, rapidhash_v3_inline};

/// The hash of one name of one class (key, fence, ...) in one keyspace. It is written to disk: its
/// output never changes.
///
/// The store's random `seed` keeps others from choosing colliding names. Since the other secrets of
/// the hash are public, its protected form is used: in the plain one a name that starts with a secret
/// multiplies the seed by zero, and all such names collide in every store.
#[inline]
pub(crate) fn name_hash(seed: u64, keyspace: u16, class: u8, name: &[u8]) -> u64 {
    let [_, space_secret, seed_secret, ..] = DEFAULT_RAPID_SECRETS.secrets;
    let space = u64::from(keyspace) << 8 | u64::from(class);
    let wide = u128::from(seed ^ seed_secret) * u128::from(space ^ space_secret);
    let secrets = RapidSecrets { seed: seed ^ wide as u64 ^ (wide >> 64) as u64, ..DEFAULT_RAPID_SECRETS };
    rapidhash_v3_inline::<true, false, true>(name, &secrets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_hash_of_a_name_never_changes() {
        let long = [7u8; 300];
        let table: [(u64, u16, u8, &[u8], u64); 8] = [
            (0, 0, 0, b"", 0x26D8_60C7_5D03_6EF7),
            (0, 0, 0, b"a", 0xD34C_569A_AF37_FC54),
            (1, 0, 0, b"a", 0x851D_E11F_EFA6_DF80),
            (1, 2, 0, b"a", 0x45E7_38FF_B797_3991),
            (1, 2, 3, b"a", 0x4D24_EA8A_5249_E979),
            (u64::MAX, u16::MAX, u8::MAX, b"0123456789abcdef", 0x7739_6272_388A_75FA),
            (42, 1, 1, b"a key of more than sixteen bytes", 0x6917_B51B_CCE2_95DA),
            (42, 1, 1, &long, 0xA99A_6706_DEA6_6371),
        ];
        for (seed, keyspace, class, name, hash) in table {
            let got = name_hash(seed, keyspace, class, name);
            assert_eq!(got, hash, "{got:#018x} for {seed} {keyspace} {class} {}", name.escape_ascii());
        }
    }

    #[test]
    fn names_that_start_with_a_secret_do_not_collide() {
        let secret = DEFAULT_RAPID_SECRETS.secrets[1].to_le_bytes();
        let names = (0..1000u64).map(|n| [secret, n.to_le_bytes()].concat());
        let hashes: HashSet<u64> = names.map(|name| name_hash(9, 1, 0, &name)).collect();
        assert_eq!(hashes.len(), 1000);
    }

    #[test]
    fn a_prefix_ends_where_the_next_one_starts() {
        use std::ops::Bound::{self, *};
        let table: [(&[u8], Bound<Vec<u8>>); 6] = [
            (b"", Unbounded),
            (b"a", Excluded(b"b".to_vec())),
            (b"ab", Excluded(b"ac".to_vec())),
            (b"a\xff", Excluded(b"b".to_vec())),
            (b"a\xff\x00\xff\xff", Excluded(b"a\xff\x01".to_vec())),
            (b"\xff\xff", Unbounded),
        ];
        for (prefix, end) in table {
            assert_eq!(prefix_end(prefix), end, "{}", prefix.escape_ascii());
        }
    }
}
