//! Which writes came late: asked of what was written, answered and read, and of nothing else.
//!
//! The checker knows no store. It is given who wrote what under which token, what was answered, what was read, and
//! when it was known that a fence had moved on; so it judges any destination, the one it was built with least of all.

use crate::sync::{Arc, Mutex};
use crate::types::Token;
use std::collections::BTreeMap;
use std::fmt;

/// What was written, answered and read, in the order in which it happened. Clones are handles on the same history.
///
/// Record a write and a read by having them made through the history, so that their beginning and their end have a
/// place in the order; say [`moved`](History::moved) once you *know* that a fence has a newer holder, which is when
/// `acquire` or `raise` has returned. Then [`check`](History::check).
///
/// A write is **late** if it took effect after its fence had moved to a newer token:
///
/// * it began after that was known, and was accepted; or
/// * it was read, although it began after that was known, or although a reader who began after that was known had
///   found something else in its place before.
///
/// A write that was on its way when the fence moved may be accepted: it may have come first.
///
/// ```
/// # #[cfg(feature = "testkit")] {
/// use std::collections::BTreeMap;
/// use tidewall::Token;
/// use tidewall::testkit::{History, Write};
///
/// // A destination that takes whatever it is given.
/// let mut unfenced = BTreeMap::new();
/// let history = History::new();
/// history.moved(b"job-7", Token::new(2)?);
/// let late = Write { who: "a", fence: b"job-7", token: Token::new(1)?, key: b"job-7", value: b"late" };
/// let answer = history.write(late, |w| Ok::<_, ()>(unfenced.insert(w.key.to_vec(), w.value.to_vec())));
/// assert!(answer.is_ok());
///
/// let late = history.check().expect_err("it was accepted");
/// assert_eq!((late.who.as_str(), late.token.get(), late.newer.get()), ("a", 1, 2));
/// # }
/// # Ok::<(), tidewall::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct History(Arc<Mutex<Events>>);

/// One write, as it is about to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write<'a> {
    /// The writer, for people to read.
    pub who: &'a str,
    /// The fence that the key belongs to, by any name that [`History::moved`] uses as well.
    pub fence: &'a [u8],
    /// What the writer takes for its right to write.
    pub token: Token,
    /// Where it writes.
    pub key: &'a [u8],
    /// What it writes. Two writes of one value to one key are told apart by nobody who reads it: give each its own.
    pub value: &'a [u8],
}

/// What a history without a late write consists of: a test that means something has seen `refused_late` above zero.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Checked {
    /// All writes.
    pub writes: usize,
    /// Those that were answered with `Ok`.
    pub accepted: usize,
    /// Those that began after their fence was known to have moved on, and were not accepted.
    pub refused_late: usize,
    /// All reads.
    pub reads: usize,
}

/// A write that took effect although its fence had moved on before.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LateWrite {
    /// Who wrote.
    pub who: String,
    /// The fence, as the write named it.
    pub fence: Vec<u8>,
    /// Where it wrote.
    pub key: Vec<u8>,
    /// What it wrote.
    pub value: Vec<u8>,
    /// The token of the write.
    pub token: Token,
    /// The newer token that the fence had moved to.
    pub newer: Token,
    /// Whether the writer was told that it was accepted; else a reader found it.
    pub accepted: bool,
}

impl fmt::Display for LateWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LateWrite { who, fence, key, value, token, newer, accepted } = self;
        let how = if *accepted { "was accepted" } else { "was read" };
        write!(f, "the late write of {who} to {} under token {token} {how}, ", key.escape_ascii())?;
        write!(
            f,
            "after fence {} had moved to {newer}; it was {}",
            fence.escape_ascii(),
            value.escape_ascii()
        )
    }
}

impl std::error::Error for LateWrite {}

#[derive(Default)]
struct Events {
    /// The place in the order of whatever comes next.
    next: u64,
    /// The tokens that each fence was known to have moved to, and since when: both rise.
    moves: BTreeMap<Vec<u8>, Vec<Move>>,
    /// The same for all fences at once.
    moves_of_all: Vec<Move>,
    writes: Vec<Written>,
    reads: BTreeMap<Vec<u8>, Vec<Read>>,
}

#[derive(Clone, Copy)]
struct Move {
    known: u64,
    token: Token,
}

struct Written {
    who: String,
    fence: Vec<u8>,
    token: Token,
    key: Vec<u8>,
    value: Vec<u8>,
    began: u64,
    /// When it was answered, and whether with `Ok`; a writer may have died before.
    answer: Option<(u64, bool)>,
}

struct Read {
    began: u64,
    ended: u64,
    found: Option<Vec<u8>>,
}

impl History {
    /// Nothing has happened.
    pub fn new() -> Self {
        History::default()
    }

    /// It is known from now on that the fence has moved to this token: `acquire` or `raise` has returned.
    ///
    /// An accepted write says as much for its own token, and need not be told.
    pub fn moved(&self, fence: &[u8], token: Token) {
        self.0.lock().rise(Some(fence), token);
    }

    /// The same for all fences: `raise_all` has returned.
    pub fn moved_all(&self, token: Token) {
        self.0.lock().rise(None, token);
    }

    /// Makes a write and records it. `Ok` means that it was accepted; anything else, that nobody may rely on it.
    ///
    /// # Errors
    /// The error of the call, as it is.
    pub fn write<T, E>(
        &self,
        write: Write<'_>,
        call: impl FnOnce(Write<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let Write { who, fence, token, key, value } = write;
        let record = |began| Written {
            who: who.to_owned(),
            fence: fence.to_vec(),
            token,
            key: key.to_vec(),
            value: value.to_vec(),
            began,
            answer: None,
        };
        let place = {
            let mut events = self.0.lock();
            let began = events.tick();
            events.writes.push(record(began));
            events.writes.len() - 1
        };
        let answer = call(write);
        let mut events = self.0.lock();
        let ended = match answer {
            Ok(_) => events.rise(Some(fence), token),
            Err(_) => events.tick(),
        };
        events.writes[place].answer = Some((ended, answer.is_ok()));
        answer
    }

    /// Reads what lies under a key and records it, unless that fails.
    ///
    /// # Errors
    /// The error of the call, as it is.
    pub fn read<V: AsRef<[u8]>, E>(
        &self,
        key: &[u8],
        call: impl FnOnce() -> Result<Option<V>, E>,
    ) -> Result<Option<V>, E> {
        let began = self.0.lock().tick();
        let found = call()?;
        let value = found.as_ref().map(|value| value.as_ref().to_vec());
        let mut events = self.0.lock();
        let ended = events.tick();
        events.reads.entry(key.to_vec()).or_default().push(Read { began, ended, found: value });
        Ok(found)
    }

    /// Looks for a late write.
    ///
    /// Takes time in proportion to the events, and for each read of a key to the other reads and writes of that key.
    ///
    /// # Errors
    /// The first late write there is: of those that were accepted, else of those that were read.
    pub fn check(&self) -> Result<Checked, LateWrite> {
        let events = self.0.lock();
        let mut checked = Checked { writes: events.writes.len(), ..Checked::default() };
        let mut by_key: BTreeMap<&[u8], Vec<&Written>> = BTreeMap::new();
        for write in &events.writes {
            let late = events.passed(write).filter(|newer| newer.known < write.began);
            match (write.answer, late) {
                (Some((_, true)), Some(newer)) => return Err(write.late(newer, true)),
                (Some((_, true)), None) => checked.accepted += 1,
                (_, Some(_)) => checked.refused_late += 1,
                (_, None) => {}
            }
            by_key.entry(&write.key).or_default().push(write);
        }
        for (key, reads) in &events.reads {
            checked.reads += reads.len();
            let writes = by_key.get(key.as_slice()).map_or(&[][..], Vec::as_slice);
            for read in reads {
                if let Some((write, newer)) = events.found_late(read, reads, writes) {
                    return Err(write.late(newer, false));
                }
            }
        }
        Ok(checked)
    }
}

impl Events {
    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Adds a move, if it is one; when that was.
    fn rise(&mut self, fence: Option<&[u8]>, token: Token) -> u64 {
        let known = self.tick();
        let moves = match fence {
            Some(fence) => self.moves.entry(fence.to_vec()).or_default(),
            None => &mut self.moves_of_all,
        };
        if moves.last().is_none_or(|last| last.token < token) {
            moves.push(Move { known, token });
        }
        known
    }

    /// The first move of its fence beyond the token of a write.
    fn passed(&self, write: &Written) -> Option<Move> {
        let beyond = |moves: &[Move]| moves.get(moves.partition_point(|m| m.token <= write.token)).copied();
        let own = self.moves.get(&write.fence).and_then(|moves| beyond(moves));
        own.into_iter().chain(beyond(&self.moves_of_all)).min_by_key(|newer| newer.known)
    }

    /// The write that a read proves to have come late, if it does: no write of what it found was in time.
    fn found_late<'a>(
        &self,
        read: &Read,
        reads: &[Read],
        writes: &[&'a Written],
    ) -> Option<(&'a Written, Move)> {
        let found = read.found.as_deref()?;
        let mut proof = None;
        for &write in writes.iter().filter(|write| write.value == found && write.began < read.ended) {
            let newer = self.passed(write)?;
            let other_before = |other: &Read| {
                newer.known < other.began && other.ended < read.began && other.found.as_deref() != Some(found)
            };
            if newer.known > write.began && !reads.iter().any(other_before) {
                return None;
            }
            proof = proof.or(Some((write, newer)));
        }
        proof
    }
}

impl Written {
    fn late(&self, newer: Move, accepted: bool) -> LateWrite {
        LateWrite {
            who: self.who.clone(),
            fence: self.fence.clone(),
            key: self.key.clone(),
            value: self.value.clone(),
            token: self.token,
            newer: newer.token,
            accepted,
        }
    }
}

/// One line an event, in the order in which they began: to be printed by a test that fails.
impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let events = self.0.lock();
        let mut lines = BTreeMap::new();
        for write in &events.writes {
            let Written { who, fence, token, key, value, began, answer } = write;
            let answer = match answer {
                Some((ended, true)) => format!("accepted at {ended}"),
                Some((ended, false)) => format!("not accepted at {ended}"),
                None => "no answer".to_owned(),
            };
            let (fence, key, value) = (fence.escape_ascii(), key.escape_ascii(), value.escape_ascii());
            lines.insert(*began, format!("{who} writes {key} = {value} on {fence} under {token}: {answer}"));
        }
        for (key, reads) in &events.reads {
            for Read { began, ended, found } in reads {
                let found = found.as_ref().map_or("nothing".to_owned(), |v| v.escape_ascii().to_string());
                lines.insert(*began, format!("{} is read: {found}, at {ended}", key.escape_ascii()));
            }
        }
        // Accepted writes are moves too, and stand at the end of their write.
        let fences = events.moves.iter().map(|(fence, moves)| (fence.escape_ascii().to_string(), moves));
        for (fence, moves) in fences.chain([("every fence".to_owned(), &events.moves_of_all)]) {
            for Move { known, token } in moves {
                lines.insert(*known, format!("{fence} is known to be at {token}"));
            }
        }
        lines.iter().try_for_each(|(at, line)| writeln!(f, "{at:>6}  {line}"))
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let events = self.0.lock();
        f.debug_struct("History").field("writes", &events.writes.len()).field("ticks", &events.next).finish()
    }
}
