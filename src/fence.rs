//! The rule: a lower token is fenced.
//!
//! [`check`] is the whole of it. Promises F1–F3 (ARCHITECTURE.md). Never reads a clock, a file or a
//! lease: the same calls in the same order give the same answers, which is why recovery can simply
//! replay what was admitted.
//!
//! Read next: `commit.rs`, which calls [`check`] and the mutation under one lock.

use crate::error::LastOperation;
use crate::options::Tokens;
use crate::types::{Lsn, Mark, OperationId, Token};

/// What the log knows of one fence.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct FenceState {
    /// The own mark; 0 when the fence has none.
    pub mark: u64,
    /// The op that set this state: what an answer resting on it rests on.
    pub lsn: Lsn,
    /// The last numbered operation under `mark`, and where it was committed.
    pub last: Option<(OperationId, Lsn)>,
    /// The newest token below `mark` that committed a numbered operation, and its last one. A raise
    /// without a write does not displace it.
    pub predecessor: Option<(u64, OperationId)>,
}

/// A keyspace-wide mark that no fence of the keyspace is below. It rises in two ways that are not forgotten
/// over each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Floor {
    /// By `raise_all`: admits its own token. 0 for never.
    pub raised: u64,
    /// Over marks that are gone: a token equal to it belongs to a fence that nobody knows any more, so it is
    /// fenced, and what was committed with it is not known either. 0 for never.
    pub folded: u64,
}

impl Floor {
    pub fn raised(token: u64) -> Self {
        Floor { raised: token, folded: 0 }
    }

    pub fn folded(token: u64) -> Self {
        Floor { raised: 0, folded: token }
    }

    /// What an op of the log raises.
    pub fn of(token: u64, value: &[u8]) -> Self {
        if value == [1] { Floor::folded(token) } else { Floor::raised(token) }
    }

    /// The mark that it is for every fence.
    pub fn mark(self) -> u64 {
        self.raised.max(self.folded)
    }

    /// The highest token that it fences.
    fn below(self) -> u64 {
        self.folded.max(self.raised.saturating_sub(1))
    }

    /// Both. Upholds F2: neither falls.
    pub fn with(self, other: Floor) -> Self {
        Floor { raised: self.raised.max(other.raised), folded: self.folded.max(other.folded) }
    }
}

/// The mark of a fence: the larger of its own and the floor.
pub(crate) fn mark(own: u64, floor: Floor) -> Mark {
    Mark::from_number(own.max(floor.mark()))
}

/// Whether `token` is below what these admit: the question of the lock-free path.
pub(crate) fn is_fenced(token: Token, own: u64, floor: Floor) -> bool {
    token.get() < own || token.get() <= floor.below()
}

/// What else the rule needs to know of a keyspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub tokens: Tokens,
    pub jump_cap: Option<u64>,
    /// The highest token the keyspace has admitted.
    pub highest: u64,
}

/// Why a token is not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    Fenced,
    Unknown,
    Jump,
}

/// The rule of every mutator: may a writer who presents `token` write to this fence?
///
/// Upholds F2 (an admitted token is never below the mark) and F3 (a refusal changes nothing: this
/// only answers).
pub(crate) fn check(token: Token, own: &FenceState, floor: Floor, rule: &Rule) -> Result<(), Refusal> {
    let mark = mark(own.mark, floor).get();
    if is_fenced(token, own.mark, floor) {
        return Err(Refusal::Fenced);
    }
    if token.get() == mark {
        return Ok(());
    }
    match rule.tokens {
        // A grant raises its fence before anyone holds the token (F4), so a token above the mark was
        // granted for another fence, or never.
        Tokens::Store => Err(Refusal::Unknown),
        Tokens::External => check_jump(token, rule),
    }
}

/// The rule of `raise` and `raise_all`: as [`check`], but a token that this store granted may be
/// carried to another fence on purpose. `counter` is the highest token ever granted.
pub(crate) fn check_raise(
    token: Token,
    own: &FenceState,
    floor: Floor,
    rule: &Rule,
    counter: u64,
) -> Result<(), Refusal> {
    if is_fenced(token, own.mark, floor) {
        return Err(Refusal::Fenced);
    }
    match rule.tokens {
        Tokens::Store if token.get() > counter => Err(Refusal::Unknown),
        Tokens::Store => Ok(()),
        Tokens::External => check_jump(token, rule),
    }
}

fn check_jump(token: Token, rule: &Rule) -> Result<(), Refusal> {
    match rule.jump_cap {
        Some(cap) if rule.highest > 0 && token.get() > rule.highest.saturating_add(cap) => Err(Refusal::Jump),
        _ => Ok(()),
    }
}

/// How an operation number stands to the last one of the same fence and token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OperationOrder {
    Newer,
    Same(Lsn),
    Older(OperationId),
}

/// Only answers: is this operation new for (fence, token)?
pub(crate) fn check_operation(token: Token, operation: OperationId, own: &FenceState) -> OperationOrder {
    match own.last {
        Some((last, lsn)) if own.mark == token.get() && operation == last => OperationOrder::Same(lsn),
        Some((last, _)) if own.mark == token.get() && operation < last => OperationOrder::Older(last),
        _ => OperationOrder::Newer,
    }
}

/// The state after an admitted op at `lsn`. Upholds F2: marks only rise.
pub(crate) fn admit(own: &FenceState, token: Token, operation: Option<OperationId>, lsn: Lsn) -> FenceState {
    debug_assert!(token.get() >= own.mark);
    let same = own.mark == token.get();
    let last = match operation {
        Some(operation) => Some((operation, lsn)),
        None if same => own.last,
        None => None,
    };
    let predecessor = match own.last {
        Some((operation, _)) if !same => Some((own.mark, operation)),
        _ => own.predecessor,
    };
    FenceState { mark: token.get(), lsn, last, predecessor }
}

/// What a fenced writer is told of its last operation.
pub(crate) fn last_operation(token: Token, own: &FenceState, floor: Floor) -> LastOperation {
    let token = token.get();
    // What a folded mark knew went with it.
    if token <= floor.folded {
        return LastOperation::Unknown;
    }
    match (own.last, own.predecessor) {
        (Some((last, _)), _) if token == own.mark => LastOperation::Committed(last),
        (None, _) if token == own.mark => LastOperation::Nothing,
        _ if own.mark == 0 => LastOperation::Unknown,
        (_, Some((was, last))) if token == was => LastOperation::Committed(last),
        (_, Some((was, _))) if token < was => LastOperation::Unknown,
        _ => LastOperation::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    fn own(mark: u64) -> FenceState {
        FenceState { mark, ..FenceState::default() }
    }

    const STORE: Rule = Rule { tokens: Tokens::Store, jump_cap: None, highest: 0 };
    const EXTERNAL: Rule = Rule { tokens: Tokens::External, jump_cap: None, highest: 0 };

    /// Every own mark, floor, kind of floor, source and token from 0 to 5, against the rule in words.
    #[test]
    fn lower_token_is_fenced_in_every_combination() {
        for own_mark in 0..=5 {
            for floor_token in 0..=5 {
                for exclusive in [false, true] {
                    for rule in [STORE, EXTERNAL] {
                        for t in 1..=6 {
                            let floor = if exclusive {
                                Floor::folded(floor_token)
                            } else {
                                Floor::raised(floor_token)
                            };
                            let m = own_mark.max(floor_token);
                            let folded = exclusive && t == floor_token;
                            let expected = if t < m || folded {
                                Err(Refusal::Fenced)
                            } else if t == m || rule.tokens == Tokens::External {
                                Ok(())
                            } else {
                                Err(Refusal::Unknown)
                            };
                            assert_eq!(
                                check(token(t), &own(own_mark), floor, &rule),
                                expected,
                                "own {own_mark} floor {floor:?} {:?} token {t}",
                                rule.tokens
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn raise_carries_a_granted_token_and_no_other() {
        assert_eq!(check_raise(token(5), &own(3), Floor::default(), &STORE, 5), Ok(()));
        assert_eq!(check_raise(token(6), &own(3), Floor::default(), &STORE, 5), Err(Refusal::Unknown));
        assert_eq!(check_raise(token(2), &own(3), Floor::default(), &STORE, 5), Err(Refusal::Fenced));
        assert_eq!(check_raise(token(6), &own(3), Floor::default(), &EXTERNAL, 0), Ok(()));
    }

    #[test]
    fn a_jump_above_the_cap_is_refused_but_not_the_first_token() {
        let rule = Rule { tokens: Tokens::External, jump_cap: Some(10), highest: 100 };
        assert_eq!(check(token(110), &own(0), Floor::default(), &rule), Ok(()));
        assert_eq!(check(token(111), &own(0), Floor::default(), &rule), Err(Refusal::Jump));
        let first = Rule { highest: 0, ..rule };
        assert_eq!(check(token(1 << 40), &own(0), Floor::default(), &first), Ok(()));
        let top = Rule { highest: u64::MAX - 1, ..rule };
        assert_eq!(check(Token::MAX, &own(0), Floor::default(), &top), Ok(()));
    }

    #[test]
    fn operations_are_ordered_per_token() {
        let state = FenceState { last: Some((OperationId::new(5), Lsn::new(9))), ..own(7) };
        assert_eq!(check_operation(token(7), OperationId::new(5), &state), OperationOrder::Same(Lsn::new(9)));
        assert_eq!(
            check_operation(token(7), OperationId::new(4), &state),
            OperationOrder::Older(OperationId::new(5))
        );
        assert_eq!(check_operation(token(7), OperationId::new(6), &state), OperationOrder::Newer);
        assert_eq!(check_operation(token(8), OperationId::new(1), &state), OperationOrder::Newer);
    }

    #[test]
    fn the_predecessors_last_operation_is_known_one_hand_over_later() {
        let floor = Floor::default();
        let a = admit(&FenceState::default(), token(41), Some(OperationId::new(7)), Lsn::new(1));
        let b = admit(&a, token(42), None, Lsn::new(2));
        assert_eq!(last_operation(token(41), &b, floor), LastOperation::Committed(OperationId::new(7)));
        // 42 was granted and wrote nothing: it does not displace what 41 left.
        let c = admit(&b, token(43), None, Lsn::new(3));
        assert_eq!(last_operation(token(41), &c, floor), LastOperation::Committed(OperationId::new(7)));
        assert_eq!(last_operation(token(42), &c, floor), LastOperation::Nothing);
        assert_eq!(last_operation(token(40), &c, floor), LastOperation::Unknown);
        let d = admit(&c, token(43), Some(OperationId::new(1)), Lsn::new(4));
        let e = admit(&d, token(44), None, Lsn::new(5));
        assert_eq!(last_operation(token(43), &e, floor), LastOperation::Committed(OperationId::new(1)));
        assert_eq!(last_operation(token(41), &e, floor), LastOperation::Unknown);
        assert_eq!(last_operation(token(41), &e, Floor::folded(41)), LastOperation::Unknown);
    }

    #[test]
    fn numbers_of_one_holder_do_not_displace_its_predecessors() {
        let a = admit(&FenceState::default(), token(41), Some(OperationId::new(7)), Lsn::new(1));
        let b = admit(&a, token(42), Some(OperationId::new(1)), Lsn::new(2));
        let c = admit(&b, token(42), Some(OperationId::new(2)), Lsn::new(3));
        assert_eq!(c.predecessor, Some((41, OperationId::new(7))));
        assert_eq!(
            last_operation(token(41), &c, Floor::default()),
            LastOperation::Committed(OperationId::new(7))
        );
    }

    /// A floor raised on purpose fences tokens at their own mark, too.
    #[test]
    fn under_a_raised_floor_the_last_operation_of_the_mark_is_known() {
        let floor = Floor::raised(9);
        let numbered = FenceState { last: Some((OperationId::new(7), Lsn::new(1))), ..own(5) };
        assert_eq!(last_operation(token(5), &numbered, floor), LastOperation::Committed(OperationId::new(7)));
        assert_eq!(last_operation(token(6), &numbered, floor), LastOperation::Nothing);
        assert_eq!(last_operation(token(5), &own(5), floor), LastOperation::Nothing);
        let behind = FenceState { predecessor: Some((4, OperationId::new(3))), ..own(5) };
        assert_eq!(last_operation(token(5), &behind, floor), LastOperation::Nothing);
        assert_eq!(
            last_operation(token(5), &FenceState::default(), floor),
            LastOperation::Unknown,
            "nobody knows the fence"
        );
    }

    #[test]
    fn a_write_without_a_number_keeps_the_last_number() {
        let a = admit(&FenceState::default(), token(1), Some(OperationId::new(3)), Lsn::new(1));
        let b = admit(&a, token(1), None, Lsn::new(2));
        assert_eq!(b.last, Some((OperationId::new(3), Lsn::new(1))));
    }

    #[test]
    fn a_floor_rises_in_two_ways_that_do_not_hide_each_other() {
        let floor = Floor::folded(5).with(Floor::raised(9)).with(Floor::raised(7)).with(Floor::folded(4));
        assert_eq!((floor.raised, floor.folded, floor.mark()), (9, 5, 9));
        let own = FenceState { mark: 10, ..FenceState::default() };
        assert_eq!(
            last_operation(token(5), &own, floor),
            LastOperation::Unknown,
            "it may have committed one"
        );
        assert_eq!(last_operation(token(6), &own, floor), LastOperation::Nothing);
        assert_eq!(Floor::of(3, &[1]), Floor::folded(3));
        assert_eq!(Floor::of(3, &[0]), Floor::raised(3));
    }
}
