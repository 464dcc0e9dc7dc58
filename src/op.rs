//! What can happen to a store: the ops, as values.
//!
//! One job: name each kind of op and what it carries. How they look as bytes is
//! `format/op.rs`; what they may do is `fence.rs`.

use crate::error::{Error, Result};
use crate::options::{KeyspaceOptions, Scope, Tokens};
use crate::types::{KeyspaceId, Location, Lsn, OperationId, OwnerId, Ttl};

/// The kinds of op. The numbers are on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A keyspace with its name and options; written again when these change.
    Keyspace = 1,
    Put = 2,
    Delete = 3,
    /// A lease was granted; raises the mark of its fence.
    Grant = 4,
    /// A lease was given back. Rides in the log for `lease_grace`; moves no mark.
    Release = 5,
    /// A mark raised without a value, or carried on by compaction when the value is gone.
    Mark = 6,
    /// The keyspace-wide floor.
    Floor = 7,
    /// The token counter was moved up.
    Counter = 8,
}

impl Kind {
    pub const ALL: [Kind; 8] = [
        Kind::Keyspace,
        Kind::Put,
        Kind::Delete,
        Kind::Grant,
        Kind::Release,
        Kind::Mark,
        Kind::Floor,
        Kind::Counter,
    ];

    pub fn from_number(number: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|&kind| kind as u8 == number)
    }

    /// Whether the op is about the value of a key.
    pub fn is_value(self) -> bool {
        matches!(self, Kind::Put | Kind::Delete)
    }
}

/// One op, about to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op<'a> {
    pub kind: Kind,
    pub keyspace: KeyspaceId,
    /// 0 where the kind has no token.
    pub token: u64,
    /// The key; for grants, releases and marks the fence; for a keyspace its name.
    pub key: &'a [u8],
    pub value: &'a [u8],
    pub links: Links,
}

/// What ties an op to earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Links {
    /// The version of the key before this one.
    pub previous: Option<Location>,
    /// This op changes the state of its fence; inside, the op that set the state before.
    pub fence: Option<Option<Location>>,
    /// The last numbered operation of the fence and token, this one or an earlier one carried on.
    pub last: Option<(OperationId, Lsn)>,
    /// The last numbered operation of the newest earlier token that had one.
    pub predecessor: Option<(u64, OperationId)>,
    /// Compaction moved this op: its own lsn, which is older than that of its frame.
    pub moved: Option<Lsn>,
}

/// The two kinds of name that the index knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    Key = 0,
    Fence = 1,
}

/// The value of a [`Kind::Grant`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GrantValue {
    pub owner: OwnerId,
    pub ttl: Ttl,
    pub incarnation: u64,
}

impl GrantValue {
    pub const BYTES: usize = 32;

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..16].copy_from_slice(&self.owner.get().to_le_bytes());
        out[16..24].copy_from_slice(&self.ttl.nanos().to_le_bytes());
        out[24..].copy_from_slice(&self.incarnation.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (owner, rest) = bytes.split_first_chunk::<16>()?;
        let (ttl, rest) = rest.split_first_chunk::<8>()?;
        let incarnation = rest.first_chunk::<8>()?;
        Some(GrantValue {
            owner: OwnerId::new(u128::from_le_bytes(*owner)),
            ttl: Ttl::from_nanos(u64::from_le_bytes(*ttl)),
            incarnation: u64::from_le_bytes(*incarnation),
        })
    }
}

/// The value of a [`Kind::Keyspace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KeyspaceValue {
    pub options: KeyspaceOptions,
    /// Restored, and not yet told the present value of its token source.
    pub needs_floor: bool,
}

impl KeyspaceValue {
    pub const BYTES: usize = 12;

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        (out[0], out[1]) = match self.options.scope {
            Scope::Key => (0, 0),
            Scope::Prefix(delimiter) => (1, delimiter),
            Scope::Keyspace => (2, 0),
        };
        out[2] = match self.options.tokens {
            Tokens::Store => 0,
            Tokens::External => 1,
        };
        out[3] = self.needs_floor as u8;
        out[4..].copy_from_slice(&self.options.jump_cap.unwrap_or(0).to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let [scope, delimiter, tokens, needs_floor, cap @ ..] = bytes else { return None };
        let scope = match (scope, delimiter) {
            (0, 0) => Scope::Key,
            (1, delimiter) => Scope::Prefix(*delimiter),
            (2, 0) => Scope::Keyspace,
            _ => return None,
        };
        let tokens = match tokens {
            0 => Tokens::Store,
            1 => Tokens::External,
            _ => return None,
        };
        let needs_floor = match needs_floor {
            0 => false,
            1 => true,
            _ => return None,
        };
        let cap = u64::from_le_bytes(cap.try_into().ok()?);
        let jump_cap = (cap != 0).then_some(cap);
        Some(KeyspaceValue { options: KeyspaceOptions { scope, tokens, jump_cap }, needs_floor })
    }
}

/// What is wrong with the name of a keyspace, if anything.
pub(crate) fn check_keyspace_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid("a keyspace name is empty; name it"));
    }
    if name.len() > crate::types::MAX_NAME_BYTES {
        return Err(Error::TooLarge {
            what: "a keyspace name",
            size: name.len(),
            limit: crate::types::MAX_NAME_BYTES,
        });
    }
    if name.chars().any(char::is_control) {
        return Err(Error::invalid(format!("keyspace name {name:?} holds control characters")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_grants_and_keyspaces_go_both_ways() {
        let grant = GrantValue { owner: OwnerId::new(7), ttl: Ttl::INFINITE, incarnation: 9 };
        assert_eq!(GrantValue::decode(&grant.encode()), Some(grant));
        assert_eq!(GrantValue::decode(&[0; 31]), None);
        for scope in [Scope::Key, Scope::Prefix(b'/'), Scope::Prefix(0), Scope::Keyspace] {
            for tokens in [Tokens::Store, Tokens::External] {
                for (needs_floor, jump_cap) in [(false, None), (true, Some(7))] {
                    let value =
                        KeyspaceValue { options: KeyspaceOptions { scope, tokens, jump_cap }, needs_floor };
                    assert_eq!(KeyspaceValue::decode(&value.encode()), Some(value));
                }
            }
        }
        assert_eq!(KeyspaceValue::decode(&[9; 12]), None);
    }

    #[test]
    fn kinds_have_distinct_numbers() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_number(kind as u8), Some(kind));
        }
        assert_eq!(Kind::from_number(0), None, "zeros are never an op");
        assert_eq!(Kind::from_number(9), None);
    }
}
