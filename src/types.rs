//! The words of the crate as types.
//!
//! One job: give each number of the design its own type, so that a token, an owner and an operation
//! can never be confused. Nothing here computes anything beyond its own bounds.
//!
//! Read next: `fence.rs`, the rule these types serve.

use crate::error::{Error, Result};
use std::cmp::Ordering;
use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

/// The longest key, in bytes (64 KiB).
pub const MAX_KEY_BYTES: usize = 64 << 10;
/// The largest batch (and so the largest value), in bytes as written to the log, keys and
/// bookkeeping included: what one segment of the largest size holds.
pub const MAX_BATCH_BYTES: usize = (64 << 20) - (128 << 10);
/// The longest keyspace name, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// The most keyspaces one store holds.
pub const MAX_KEYSPACES: usize = 65_535;

macro_rules! number {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.get())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.get(), f)
            }
        }
    };
}

/// The fencing token: the number a writer presents with every write. Larger is newer.
///
/// From 1 to [`Token::MAX`] (`i64::MAX`, so that it fits every database's integer). A token comes
/// from a lease of this store, or from the external source of a keyspace
/// ([`Tokens::External`](crate::Tokens::External)); it is not an owner and not an operation.
///
/// ```
/// use tidewall::Token;
/// let token = Token::new(42)?;
/// assert_eq!(u64::from(token), 42);
/// assert!(Token::new(0).is_err());
/// # Ok::<(), tidewall::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct Token(NonZeroU64);

number!(Token);

impl Token {
    /// The largest token.
    pub const MAX: Token = Token(NonZeroU64::new(i64::MAX as u64).expect("not zero"));

    /// A token from its number.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 and for numbers above [`Token::MAX`].
    pub fn new(number: u64) -> Result<Self> {
        let failed = || Error::invalid(format!("token {number} is not between 1 and {}", i64::MAX));
        Self::try_new(number).ok_or_else(failed)
    }

    /// The same where no error is made of it.
    #[inline]
    pub(crate) const fn try_new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(n) if number <= i64::MAX as u64 => Some(Token(n)),
            _ => None,
        }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> u64 {
        token.get()
    }
}

impl TryFrom<u64> for Token {
    type Error = Error;

    fn try_from(number: u64) -> Result<Self> {
        Token::new(number)
    }
}

/// The highest token a fence has admitted: to look at, never to write with. It compares with a [`Token`]: one below it is
/// fenced. One that equals it is admitted, unless the mark is a floor that shuts out its own number too, as after
/// marks were folded or a copy was restored.
///
/// ```compile_fail
/// # fn f(jobs: &tidewall::Keyspace, mark: tidewall::Mark) {
/// jobs.put(mark, b"key", b"value"); // a mark is not a credential
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Mark(u64);

number!(Mark);

impl Mark {
    pub(crate) const fn from_number(number: u64) -> Self {
        Mark(number)
    }

    /// The number of the token that stands as the mark.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl PartialEq<Mark> for Token {
    fn eq(&self, mark: &Mark) -> bool {
        self.get() == mark.get()
    }
}

impl PartialEq<Token> for Mark {
    fn eq(&self, token: &Token) -> bool {
        self.get() == token.get()
    }
}

impl PartialOrd<Mark> for Token {
    fn partial_cmp(&self, mark: &Mark) -> Option<Ordering> {
        self.get().partial_cmp(&mark.get())
    }
}

impl PartialOrd<Token> for Mark {
    fn partial_cmp(&self, token: &Token) -> Option<Ordering> {
        self.get().partial_cmp(&token.get())
    }
}

impl From<Token> for Mark {
    fn from(token: Token) -> Self {
        Mark(token.get())
    }
}

/// The name of one holder: 128 random bits by default, so that nobody renews or releases somebody
/// else's lease. It fences nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OwnerId(u128);

impl OwnerId {
    /// An owner id chosen by the caller, for a holder that must be recognised later.
    pub const fn new(id: u128) -> Self {
        OwnerId(id)
    }

    /// The bits.
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerId({:032x})", self.0)
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The number of one operation, chosen by the writer, strictly increasing per fence and token:
/// a retry under the same number is recognised and not applied again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OperationId(NonZeroU64);

number!(OperationId);

impl OperationId {
    /// An operation id.
    ///
    /// # Panics
    /// If `number` is 0; use [`OperationId::try_new`] for numbers from outside.
    #[track_caller]
    pub const fn new(number: u64) -> Self {
        match NonZeroU64::new(number) {
            Some(n) => OperationId(n),
            None => panic!("an OperationId is at least 1"),
        }
    }

    /// An operation id, or `None` for 0.
    pub const fn try_new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(n) => Some(OperationId(n)),
            None => None,
        }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

/// The place of a batch in the order of all batches of a store: 1, 2, 3 and so on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Lsn(u64);

number!(Lsn);

impl Lsn {
    pub(crate) const ZERO: Lsn = Lsn(0);

    /// An lsn from its number, as [`Lsn::get`] gave it.
    pub const fn new(number: u64) -> Self {
        Lsn(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    pub(crate) const fn next(self) -> Self {
        Lsn(self.0 + 1)
    }

    /// The one before; [`Lsn::ZERO`] has none, and is its own.
    pub(crate) const fn before(self) -> Self {
        Lsn(self.0.saturating_sub(1))
    }
}

/// A keyspace inside of the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct KeyspaceId(pub u16);

/// One segment file. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SegmentId(pub u32);

/// Where the bytes of an op lie.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Location {
    pub segment: SegmentId,
    pub offset: u32,
}

impl Location {
    pub(crate) const fn pack(self) -> u64 {
        (self.segment.0 as u64) << 32 | self.offset as u64
    }

    pub(crate) const fn unpack(word: u64) -> Self {
        Location { segment: SegmentId((word >> 32) as u32), offset: word as u32 }
    }
}

/// How long a grant lasts without renewal.
///
/// From 1 ms to [`Ttl::MAX`], or [`Ttl::INFINITE`] by name. Zero is refused: it means "never" in
/// one system and "for ever" in the next.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(u64);

impl Ttl {
    /// Ten years (3660 days).
    pub const MAX: Duration = Duration::from_secs(10 * 366 * 86_400);
    /// Until it is released, broken, or the store is reopened.
    pub const INFINITE: Ttl = Ttl(u64::MAX);

    /// A bounded time to live.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] below 1 ms and above [`Ttl::MAX`].
    pub fn new(ttl: Duration) -> Result<Self> {
        if ttl < Duration::from_millis(1) || ttl > Self::MAX {
            return Err(Error::invalid(format!(
                "a lease's ttl of {ttl:?} is not between 1 ms and {} days (ten years); Ttl::INFINITE has no end",
                Self::MAX.as_secs() / 86_400
            )));
        }
        Ok(Ttl(ttl.as_nanos() as u64))
    }

    /// The duration, or `None` for [`Ttl::INFINITE`].
    pub fn duration(self) -> Option<Duration> {
        (self != Ttl::INFINITE).then(|| Duration::from_nanos(self.0))
    }

    pub(crate) const fn nanos(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Ttl(nanos)
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = Error;

    fn try_from(ttl: Duration) -> Result<Self> {
        Ttl::new(ttl)
    }
}

/// As a [`Duration`] shows itself (`1.5s`), or `infinite`.
impl fmt::Display for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.duration() {
            Some(duration) => fmt::Debug::fmt(&duration, f),
            None => f.pad("infinite"),
        }
    }
}

impl fmt::Debug for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.duration() {
            Some(d) => write!(f, "Ttl({d:?})"),
            None => f.write_str("Ttl(INFINITE)"),
        }
    }
}

/// The beginning of a key or fence, for messages: up to 30 bytes, shown escaped.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Excerpt {
    bytes: [u8; Self::BYTES],
    /// The length of the whole, capped one above what fits.
    len: u8,
}

impl Excerpt {
    const BYTES: usize = 30;

    pub(crate) fn new(whole: &[u8]) -> Self {
        let kept = whole.len().min(Self::BYTES);
        let mut bytes = [0; Self::BYTES];
        bytes[..kept].copy_from_slice(&whole[..kept]);
        Excerpt { bytes, len: whole.len().min(Self::BYTES + 1) as u8 }
    }

    /// The bytes that were kept.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..(self.len as usize).min(Self::BYTES)]
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.len as usize > Self::BYTES { "…" } else { "" };
        write!(f, "\"{}\"{more}", self.bytes().escape_ascii())
    }
}

impl fmt::Debug for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_bounds_are_one_and_i64_max() {
        assert!(Token::new(0).is_err());
        assert_eq!(Token::new(1).unwrap().get(), 1);
        assert_eq!(Token::new(i64::MAX as u64).unwrap(), Token::MAX);
        assert!(Token::new(i64::MAX as u64 + 1).is_err());
        assert!(Token::new(u64::MAX).is_err());
    }

    #[test]
    fn a_token_compares_with_a_mark_as_their_numbers_do() {
        let numbers = [1, 2, 7, i64::MAX as u64];
        for (a, b) in numbers.into_iter().flat_map(|a| numbers.map(|b| (a, b))) {
            let (token, mark) = (Token::new(a).unwrap(), Mark::from_number(b));
            assert_eq!(token.partial_cmp(&mark), Some(a.cmp(&b)));
            assert_eq!(mark.partial_cmp(&token), Some(b.cmp(&a)));
            assert_eq!((token == mark, mark == token), (a == b, b == a));
        }
        assert!(Token::new(1).unwrap() > Mark::from_number(0));
    }

    #[test]
    fn a_ttl_shows_itself_as_a_duration_does() {
        let shown = |ms| Ttl::new(Duration::from_millis(ms)).unwrap().to_string();
        assert_eq!([shown(10_000), shown(1_500), shown(1)], ["10s", "1.5s", "1ms"]);
        assert_eq!(Ttl::INFINITE.to_string(), "infinite");
        assert_eq!(format!("[{:>10}] [{:<6}]", Ttl::INFINITE, Ttl(10_000_000_000)), "[  infinite] [10s   ]");
    }

    #[test]
    fn location_packs_both_ways() {
        let at = Location { segment: SegmentId(7), offset: 4096 };
        assert_eq!(Location::unpack(at.pack()), at);
    }

    #[test]
    fn ttl_zero_is_refused_and_infinite_is_by_name() {
        assert!(Ttl::new(Duration::ZERO).is_err());
        let above = Ttl::new(Duration::MAX).unwrap_err().to_string();
        assert!(above.contains("1 ms and 3660 days (ten years)"), "{above}");
        assert_eq!(Ttl::INFINITE.duration(), None);
    }
}
