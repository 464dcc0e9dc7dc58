//! The floor of a keyspace: one mark that no fence of it is below.
//!
//! One job: the calls that raise it or show it. Compaction raises it too, over marks that nobody needs any
//! more: see `fold.rs`.
//!
//! Read next: `block.rs`.

use crate::admit::Refused;
use crate::append::{frame_bytes, room};
use crate::error::{Error, Result};
use crate::fence::{self, FenceState, Refusal};
use crate::keyspace::{Keyspace, Raised};
use crate::log::pool::Need;
use crate::look_up::fenced;
use crate::options::Tokens;
use crate::types::{Excerpt, Mark, Token};

/// The keyspace-wide mark; from [`Keyspace::floor`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub struct Floor {
    /// Tokens below it are fenced on every key.
    pub mark: Mark,
    /// It fences the token equal to it as well: it was raised by compaction, [`Keyspace::retire_below`] or
    /// [`Keyspace::raise_all_past`].
    pub is_folded: bool,
    /// Up to here marks are forgotten, and what was committed with these tokens: whoever is fenced with one is told
    /// [`LastOperation::Unknown`](crate::LastOperation::Unknown). At most `mark`.
    pub forgotten: Option<Mark>,
}

impl Keyspace {
    /// Raises the floor of the keyspace to `token`, durably: one record revokes every writer with a
    /// lower token, of every fence, and ends their leases. For a cut-over; and for a restored keyspace of
    /// external tokens, which takes no writes before it ([`Keyspace::needs_floor`]).
    ///
    /// # Errors
    /// As [`Keyspace::raise`], but for [`Error::TokenJump`] and [`Error::NeedsFloor`].
    pub fn raise_all(&self, token: Token) -> Result<Raised> {
        self.raise_floor(token, fence::Floor::raised(token.get()))
    }

    /// As [`Keyspace::raise_all`], and `token` itself is fenced as well, on every fence: only a higher one is
    /// admitted from here on.
    ///
    /// # Errors
    /// As [`Keyspace::raise_all`]; [`Error::InvalidArgument`] for [`Token::MAX`], which no token is above.
    pub fn raise_all_past(&self, token: Token) -> Result<Raised> {
        self.raise_floor(token, fence::Floor::folded(token.get()))
    }

    fn raise_floor(&self, token: Token, floor: fence::Floor) -> Result<Raised> {
        let engine = &self.shared.engine;
        let lowest = Token::new(token.get() + (floor.folded > 0) as u64)?;
        let holds = |known: fence::Floor| known.with(floor) == known && !fence::is_fenced(lowest, 0, known);
        let durable = self.state.floor_durable();
        if !holds(durable) && fence::is_fenced(token, 0, durable) {
            // At once, and of a poisoned store too: the durable floor alone says so.
            engine.counters.fenced.add_one();
            return Err(fenced(token, &self.state, b"", &FenceState::default(), durable));
        }
        let (answer, already) = engine.with_room(room(frame_bytes(1, 1), 1), Need::Privileged, |tail| {
            let old = self.state.floor_appended();
            let mut rule = self.state.rule();
            rule.jump_cap = None;
            let already = holds(old) && !self.state.needs_floor();
            let judged = match fence::check_raise(token, &FenceState::default(), old, &rule, tail.counter) {
                _ if already => Ok(self.state.floor_lsn()),
                Ok(()) => {
                    let lsn = engine.append_floor(tail, &self.state, floor);
                    // Upholds L5: leases below it are over before the call returns.
                    engine.leases.end_below(self.state.id, lowest);
                    engine.visit_all_queues(self.state.id);
                    Ok(lsn)
                }
                Err(Refusal::Fenced) => Err(Refused {
                    error: fenced(token, &self.state, b"", &FenceState::default(), old),
                    rests_on: self.state.floor_lsn(),
                }),
                Err(_) => Err(Refused {
                    error: Error::UnknownToken {
                        token,
                        mark: Mark::from_number(old.mark()),
                        keyspace: self.state.excerpt(),
                        fence: Excerpt::new(b""),
                    },
                    rests_on: self.state.floor_lsn(),
                }),
            };
            if judged.is_ok() {
                self.state.set_needs_floor(false);
            }
            (engine.answer(tail, judged), already)
        })?;
        let lsn = engine.settle(answer)?;
        Ok(if already { Raised::Already } else { Raised::Now(lsn) })
    }

    /// The floor of the keyspace, durably: no fence of it is below. `None` when there is none yet.
    pub fn floor(&self) -> Option<Floor> {
        let floor = self.state.floor_durable();
        (floor.mark() > 0).then(|| Floor {
            mark: Mark::from_number(floor.mark()),
            is_folded: floor.folded >= floor.raised,
            forgotten: (floor.folded > 0).then(|| Mark::from_number(floor.folded)),
        })
    }

    /// States that no writer uses a token below `token` any more, in a keyspace of external tokens: they are
    /// fenced from now on, durably, and compaction forgets the marks of fences that only knew such ones.
    /// Where the store issues the tokens it knows that by itself.
    ///
    /// # Errors
    /// [`Error::Fenced`]: the floor is above `token` already. [`Error::InvalidArgument`]: the store issues
    /// the tokens of this keyspace. [`Error::NeedsFloor`] in a restored keyspace: raise it with
    /// [`Keyspace::raise_all`] first. [`Error::NoSpace`], [`Error::Indeterminate`], [`Error::Poisoned`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let db = tidewall::Db::open(dir.path().join("data"))?;
    /// use tidewall::{Error, KeyspaceOptions, Token, Tokens};
    /// let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    /// rows.put(Token::new(7)?, b"row", b"value")?;
    /// rows.delete(Token::new(7)?, b"row")?;
    /// rows.retire_below(Token::new(100)?)?; // the lock service has got that far
    /// db.compact()?; // nothing is left of the row, and nothing can bring it back
    /// assert!(matches!(rows.put(Token::new(99)?, b"row", b"late"), Err(Error::Fenced { .. })));
    /// rows.put(Token::new(100)?, b"row", b"new")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn retire_below(&self, token: Token) -> Result<Raised> {
        if self.state.options.tokens == Tokens::Store {
            return Err(Error::invalid(format!(
                "keyspace {:?} gets its tokens from this store, which knows itself which are in use",
                self.state.name
            )));
        }
        let engine = &self.shared.engine;
        let floor = fence::Floor::folded(token.get() - 1);
        let (answer, already) = engine.with_room(room(frame_bytes(1, 1), 1), Need::Privileged, |tail| {
            let old = self.state.floor_appended();
            let already = old.folded >= floor.folded;
            let judged = if self.state.needs_floor() {
                Err(Refused::from(Error::NeedsFloor { keyspace: self.state.name.clone() }))
            } else if fence::is_fenced(token, 0, old) {
                let error = fenced(token, &self.state, b"", &FenceState::default(), old);
                Err(Refused { error, rests_on: self.state.floor_lsn() })
            } else if already {
                Ok(self.state.floor_lsn())
            } else {
                Ok(engine.append_floor(tail, &self.state, floor))
            };
            (engine.answer(tail, judged), already)
        })?;
        let lsn = engine.settle(answer)?;
        Ok(if already { Raised::Already } else { Raised::Now(lsn) })
    }
}
