//! F1–F4: the rule, and what a refused writer is told.

use crate::store::{Sim, op, secs, text, token};
use tidewall::*;

fn store_keys(sim: &Sim, scope: Scope) -> (Db, Keyspace) {
    let db = sim.open();
    let ks = db.keyspace("k", KeyspaceOptions::new().scope(scope)).unwrap();
    (db, ks)
}

fn external(db: &Db) -> Keyspace {
    db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

#[test]
fn f1_keys_of_one_prefix_share_a_fence_and_no_other_keys_do() {
    let sim = Sim::new();
    let (_db, ks) = store_keys(&sim, Scope::Prefix(b'/'));
    let lease = ks.lease(b"7/any").acquire().unwrap();
    assert_eq!(lease.fence(), b"7/");
    ks.put(lease.token(), b"7/a", b"1").unwrap();
    ks.put(lease.token(), b"7/b/c", b"1").unwrap();
    ks.put(lease.token(), b"7/", b"1").unwrap();
    for outside in [&b"7"[..], b"8/a", b"70/a", b"/7/a"] {
        assert_err!(ks.put(lease.token(), outside, b"1"), Error::UnknownToken { .. });
    }
}

#[test]
fn f1_a_key_without_the_delimiter_is_a_fence_of_its_own() {
    let sim = Sim::new();
    let (_db, ks) = store_keys(&sim, Scope::Prefix(b'/'));
    let bare = ks.lease(b"7").acquire().unwrap();
    assert_eq!(bare.fence(), b"7");
    ks.put(bare.token(), b"7", b"1").unwrap();
    assert_err!(ks.put(bare.token(), b"7/", b"1"), Error::UnknownToken { .. });
    let prefix = ks.lease(b"7/").acquire().unwrap();
    ks.put(bare.token(), b"7", b"still its own").unwrap();
    assert_err!(ks.put(prefix.token(), b"7", b"1"), Error::UnknownToken { .. });
}

#[test]
fn f1_nul_bytes_are_bytes_like_others_in_keys_and_forbidden_in_names() {
    let sim = Sim::new();
    let (db, ks) = store_keys(&sim, Scope::Prefix(0));
    let lease = ks.lease(b"a\0").acquire().unwrap();
    for key in [&b"a\0"[..], b"a\0\0", b"a\0b"] {
        ks.put(lease.token(), key, key).unwrap();
    }
    assert_err!(ks.put(lease.token(), b"a", b""), Error::UnknownToken { .. });
    assert_err!(ks.put(lease.token(), b"\0a\0", b""), Error::UnknownToken { .. });
    assert_err!(db.keyspace("a\0b", KeyspaceOptions::new()), Error::InvalidArgument(_));
    let db = sim.reopen(db);
    let ks = db.keyspace("k", KeyspaceOptions::new().scope(Scope::Prefix(0))).unwrap();
    let keys: Vec<_> = ks.iter().map(|item| item.unwrap().0).collect();
    assert_eq!(keys, [&b"a\0"[..], b"a\0\0", b"a\0b"]);
}

#[test]
fn f1_a_value_may_be_empty_and_is_not_an_absent_one() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    rows.put(token(1), b"a", b"").unwrap();
    let db = sim.reopen(db);
    let rows = external(&db);
    assert_eq!(rows.get(b"a").unwrap().unwrap().bytes(), b"");
    assert_err!(rows.put_if(token(1), b"a", b"x", Expect::Absent), Error::Conflict { .. });
}

/// F2, after anything that takes a value away. Bookkeeper 4462, golemcloud 3845.
#[test]
fn f2_a_mark_survives_its_value() {
    for scope in [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace] {
        let mut sim = Sim::new();
        let (db, ks) = store_keys(&sim, scope);
        let old = ks.lease(b"a/x").acquire().unwrap();
        ks.put(old.token(), b"a/x", b"1").unwrap();
        let (old, new) = (old.token(), {
            drop(old);
            ks.lease(b"a/x").acquire().unwrap().token()
        });
        ks.put(new, b"a/x", b"2").unwrap();
        ks.delete(new, b"a/x").unwrap();
        ks.delete_prefix(new, b"").unwrap();
        assert_err!(ks.put(old, b"a/x", b"late"), Error::Fenced { mark, .. } if mark == new);
        drop((db, ks));
        for _ in 0..3 {
            let db = sim.power_cut();
            let ks = db.keyspace("k", KeyspaceOptions::new().scope(scope)).unwrap();
            assert_eq!(ks.mark(b"a/x").unwrap(), Some(new.into()));
            assert_err!(ks.put(old, b"a/x", b"late"), Error::Fenced { .. });
            assert_err!(ks.delete(old, b"a/x"), Error::Fenced { .. });
            ks.put(new, b"a/x", b"again").unwrap();
            ks.delete(new, b"a/x").unwrap();
        }
    }
}

/// RocksDB 12995: all of a batch, marks included.
#[test]
fn f2_a_batch_raises_the_mark_of_every_fence_it_writes() {
    for scope in [Scope::Key, Scope::Prefix(b'/')] {
        let mut sim = Sim::new();
        let options = KeyspaceOptions::new().tokens(Tokens::External).scope(scope);
        let db = sim.open();
        let ks = db.keyspace("rows", options).unwrap();
        let mut batch = db.batch();
        for (n, key) in [b"a/x", b"b/x", b"c/x"].into_iter().enumerate() {
            batch.put(&ks, token(5 + n as u64), key, b"1").unwrap();
        }
        batch.commit().unwrap();
        drop((db, ks));
        let db = sim.power_cut();
        let ks = db.keyspace("rows", options).unwrap();
        for (n, key) in [b"a/x", b"b/x", b"c/x"].into_iter().enumerate() {
            assert_eq!(ks.mark(key).unwrap(), Some(token(5 + n as u64).into()));
            assert_err!(ks.put(token(4 + n as u64), key, b"late"), Error::Fenced { .. });
        }
    }
}

/// The delete itself may be what raised the mark.
#[test]
fn f2_a_delete_carries_the_mark_that_it_raised() {
    for scope in [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace] {
        let mut sim = Sim::new();
        let options = KeyspaceOptions::new().tokens(Tokens::External).scope(scope);
        let db = sim.open();
        let ks = db.keyspace("rows", options).unwrap();
        ks.put(token(5), b"a/x", b"1").unwrap();
        let deleted = ks.submit_delete(token(7), b"a/x").unwrap();
        // Judged by what is appended, then by what is durable.
        let late = ks.submit_put(token(6), b"a/x", b"late").and_then(Commit::wait);
        assert_err!(late, Error::Fenced { mark, .. } if mark == token(7));
        deleted.wait().unwrap();
        drop((db, ks));
        for _ in 0..2 {
            let db = sim.power_cut();
            let ks = db.keyspace("rows", options).unwrap();
            assert_eq!(ks.mark(b"a/x").unwrap(), Some(token(7).into()));
            assert_err!(ks.put(token(6), b"a/x", b"late"), Error::Fenced { .. });
        }
    }
}

/// F3. A write that finds the segment full takes another one before it is judged.
#[test]
fn f3_a_refused_write_that_found_the_segment_full_leaves_no_trace() {
    for refused_bytes in [100, 9_000, 40_000] {
        let sim = Sim::new();
        let db = sim.open();
        let rows = external(&db);
        let mut written = 0u32;
        for round in 0..60u32 {
            rows.put(token(5), &round.to_be_bytes(), &vec![1; 700]).unwrap();
            written += 1;
            let large = vec![2; refused_bytes];
            assert_err!(rows.put(token(4), &round.to_be_bytes(), &large), Error::Fenced { .. });
            let conflict = rows.put_if(token(5), &round.to_be_bytes(), &large, Expect::Absent);
            assert_err!(conflict, Error::Conflict { .. });
            assert_eq!(rows.delete_prefix(token(9), b"none").unwrap().keys, 0);
        }
        let db = sim.reopen(db);
        let rows = external(&db);
        assert_eq!(rows.iter().filter(|item| item.as_ref().unwrap().1.bytes() == [1; 700]).count(), 60);
        assert_eq!(rows.iter().count() as u32, written);
    }
}

#[test]
fn f4_a_grant_has_raised_the_mark_before_anyone_holds_it() {
    let mut sim = Sim::new();
    let (_db, ks) = store_keys(&sim, Scope::Key);
    let old = ks.lease(b"a").ttl(secs(1)).acquire().unwrap();
    sim.clock.advance(secs(1));
    let new = ks.lease(b"a").acquire().unwrap();
    assert_eq!(ks.mark(b"a").unwrap(), Some(new.token().into()));
    let (old, new) = (old.token(), new.token());
    let db = sim.power_cut();
    let ks = db.keyspace("k", KeyspaceOptions::new()).unwrap();
    assert_err!(ks.put(old, b"a", b"late"), Error::Fenced { .. });
    ks.put(new, b"a", b"mine").unwrap();
}

#[test]
fn an_unknown_token_says_what_to_do() {
    let sim = Sim::new();
    let (_db, ks) = store_keys(&sim, Scope::Key);
    let error = ks.put(token(7), b"job-1", b"x").unwrap_err();
    assert_eq!(
        error.to_string(),
        "token 7 was not granted for \"job-1\" in keyspace \"k\" (its mark is 0): acquire a lease on this fence, or \
         create the keyspace with `Tokens::External`"
    );
    assert_eq!((error.is_retryable(), error.outcome()), (false, Outcome::NotApplied));
}

/// What concerns no fence but the whole keyspace says so.
#[test]
fn a_refusal_by_the_floor_names_the_keyspace() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    rows.raise_all(token(9)).unwrap();
    let lower = rows.raise_all(token(8)).unwrap_err().to_string();
    assert_eq!(
        lower,
        "token 8 is fenced: the mark of the whole keyspace \"rows\" is 9; stop, or acquire again"
    );
    let (_db, keys) = store_keys(&Sim::new(), Scope::Key);
    let unknown = keys.raise_all(token(999)).unwrap_err().to_string();
    assert!(unknown.starts_with("token 999 was not granted for the whole keyspace"), "{unknown}");
}

#[test]
fn a_fenced_writer_is_told_the_fence_both_numbers_and_what_to_do() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    rows.put_operation(token(41), op(3), b"a\n", b"x").unwrap();
    rows.raise(token(42), b"a\n").unwrap();
    let error = rows.put(token(41), b"a\n", b"late").unwrap_err();
    assert_eq!(
        error.to_string(),
        "token 41 is fenced: the mark of \"a\\n\" in keyspace \"rows\" is 42; stop, or acquire again (the last \
         operation committed under it is 3)"
    );
    assert!(!error.is_retryable());
}

#[test]
fn a_jump_above_the_cap_is_refused_and_raise_all_admits_it() {
    let options = KeyspaceOptions::new().tokens(Tokens::External).token_jump_cap(10);
    let mut sim = Sim::new();
    let db = sim.open();
    let rows = db.keyspace("rows", options).unwrap();
    rows.put(token(1000), b"a", b"the first is exempt").unwrap();
    rows.put(token(1010), b"b", b"").unwrap();
    drop((db, rows));
    let db = sim.power_cut();
    let rows = db.keyspace("rows", options).unwrap();
    let refused = rows.put(token(1021), b"c", b"");
    assert_err!(refused, Error::TokenJump { highest, cap: 10, .. } if highest.get() == 1010);
    assert_err!(rows.raise(token(1021), b"c"), Error::TokenJump { .. });
    let mut batch = db.batch();
    batch.put(&rows, token(1010), b"b", b"x").unwrap().raise(&rows, token(5000), b"c").unwrap();
    assert_err!(batch.commit(), Error::TokenJump { .. });
    rows.raise_all(token(5000)).unwrap();
    rows.put(token(5010), b"c", b"").unwrap();
    assert_err!(rows.put(token(1010), b"b", b""), Error::Fenced { .. });
    rows.put(token(5000), b"b", b"equal to the floor").unwrap();
}

/// An inclusive floor; `raises.rs` has the exclusive ones of calls, `tests/compact/folds.rs` those of folding.
#[test]
fn raise_all_revokes_every_lower_writer_and_admits_its_own_token() {
    for scope in [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace] {
        let mut sim = Sim::new();
        let (db, ks) = store_keys(&sim, scope);
        let old = ks.lease(b"a/x").acquire().unwrap().token();
        ks.put(old, b"a/x", b"old").unwrap();
        let new = db.keyspace("other", KeyspaceOptions::new()).unwrap().lease(b"boss").acquire().unwrap();
        assert_eq!(ks.raise_all(new.token()).unwrap(), Raised::Now(db.last_lsn()));
        assert_eq!(ks.raise_all(new.token()).unwrap(), Raised::Already);
        for _ in 0..2 {
            let db = sim.power_cut();
            let ks = db.keyspace("k", KeyspaceOptions::new().scope(scope)).unwrap();
            assert_err!(ks.put(old, b"a/x", b"late"), Error::Fenced { .. });
            assert_err!(ks.raise_all(old), Error::Fenced { .. });
            assert_eq!(ks.mark(b"never/seen").unwrap(), Some(new.token().into()));
            ks.put(new.token(), b"a/x", b"own token").unwrap();
            assert_eq!(ks.raise_all(new.token()).unwrap(), Raised::Already);
        }
    }
}

#[test]
fn a_raise_carries_a_token_that_another_fence_was_granted() {
    let sim = Sim::new();
    let (db, ks) = store_keys(&sim, Scope::Key);
    let lease = ks.lease(b"a").acquire().unwrap();
    assert_err!(ks.put(lease.token(), b"b", b""), Error::UnknownToken { .. });
    let never = token(lease.token().get() + 1);
    assert_err!(ks.raise(never, b"b"), Error::UnknownToken { .. });
    assert_err!(ks.raise_all(never), Error::UnknownToken { .. });
    let Raised::Now(lsn) = ks.raise(lease.token(), b"b").unwrap() else { panic!("it was lower") };
    assert_eq!(ks.raise(lease.token(), b"b").unwrap(), Raised::Already);
    assert!(lsn <= db.last_lsn());
    ks.put(lease.token(), b"b", b"welcome").unwrap();
    let mut batch = db.batch();
    batch.raise(&ks, lease.token(), b"c").unwrap().put(&ks, lease.token(), b"c", b"at once").unwrap();
    batch.commit().unwrap();
    assert_eq!(text(ks.get(b"c").unwrap()).as_deref(), Some("at once"));
    assert!(lease.is_live());
}

#[test]
fn last_op_is_committed_nothing_or_unknown_and_known_one_hand_over_later() {
    let mut sim = Sim::new();
    let (_db, ks) = store_keys(&sim, Scope::Key);
    let take = |ks: &Keyspace| ks.lease(b"a").acquire().unwrap().token();
    let last_operation = |ks: &Keyspace, token| match ks.put(token, b"a", b"late") {
        Err(Error::Fenced { last_operation, .. }) => last_operation,
        other => panic!("{other:?}"),
    };
    let a = take(&ks);
    ks.put_operation(a, op(7), b"a", b"x").unwrap();
    ks.put(a, b"a", b"without a number").unwrap();
    let b = take(&ks);
    assert_eq!(last_operation(&ks, a), LastOperation::Committed(op(7)));
    let c = take(&ks);
    // b wrote nothing, so it displaced nothing.
    assert_eq!(
        (last_operation(&ks, a), last_operation(&ks, b)),
        (LastOperation::Committed(op(7)), LastOperation::Nothing)
    );
    let lease = ks.lease(b"a").acquire().unwrap();
    assert_eq!(lease.predecessor(), Some((a, op(7))));
    let d = lease.token();
    ks.put_operation(d, op(1), b"a", b"y").unwrap();
    lease.release().unwrap();
    let e = take(&ks);
    let answers = |ks: &Keyspace| [a, b, c, d].map(|token| last_operation(ks, token));
    let expected = [
        LastOperation::Unknown,
        LastOperation::Unknown,
        LastOperation::Unknown,
        LastOperation::Committed(op(1)),
    ];
    assert_eq!(answers(&ks), expected);
    ks.raise(e, b"a").unwrap();
    ks.delete(e, b"a").unwrap();
    assert_eq!(answers(&ks), expected);
    let db = sim.power_cut();
    let ks = db.keyspace("k", KeyspaceOptions::new()).unwrap();
    assert_eq!(answers(&ks), expected);
}

#[test]
fn a_retry_is_recognised_also_after_a_power_cut() {
    for scope in [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace] {
        let mut sim = Sim::new();
        let (db, ks) = store_keys(&sim, scope);
        let t = ks.lease(b"a/x").acquire().unwrap().token();
        let first = ks.put_operation(t, op(5), b"a/x", b"1").unwrap();
        ks.put(t, b"a/x", b"between").unwrap();
        drop((db, ks));
        let db = sim.power_cut();
        let ks = db.keyspace("k", KeyspaceOptions::new().scope(scope)).unwrap();
        assert_err!(ks.put_operation(t, op(5), b"a/x", b"1"), Error::Duplicate { lsn } if lsn == first);
        assert_err!(ks.delete_operation(t, op(5), b"a/x"), Error::Duplicate { .. });
        assert_err!(ks.put_operation(t, op(4), b"a/x", b"1"), Error::StaleOperation { last, .. } if last == op(5));
        assert_eq!(text(ks.get(b"a/x").unwrap()).as_deref(), Some("between"));
        assert_eq!((db.stats().duplicates, db.stats().refused), (2, 3));
        ks.delete_operation(t, op(6), b"a/x").unwrap();
        assert_err!(ks.delete_operation(t, op(6), b"a/x"), Error::Duplicate { .. });
        // Numbers are per token: a new one starts again.
        let new = ks.lease(b"a/x").acquire().unwrap().token();
        ks.put_operation(new, op(1), b"a/x", b"2").unwrap();
    }
}

/// Unknown token, fenced, duplicate or stale, conditions: in this order.
/// A commit leaves its batch as it is, so that it can be tried again: as a whole, and at most once by its number.
#[test]
fn a_batch_that_was_refused_or_whose_answer_was_lost_is_committed_again() {
    let sim = Sim::new();
    let db = sim.options().in_flight_bytes(5000).open("sim").unwrap();
    let rows = external(&db);
    let mut batch = db.batch();
    batch.put(&rows, token(5), b"a", b"1").unwrap().put(&rows, token(5), b"b", b"2").unwrap();
    batch.expect(&rows, b"c", Expect::Present).unwrap().operation(op(7));
    assert_err!(batch.commit(), Error::Conflict { .. });
    rows.submit_put(token(5), b"c", &[0; 9000]).map(drop).unwrap();
    assert_err!(batch.try_submit(), Error::Busy { .. });
    drop(batch.submit().unwrap());
    let Err(Error::Duplicate { lsn }) = batch.commit() else { panic!("it was committed before") };
    assert_eq!(rows.get(b"a").unwrap().unwrap().lsn(), lsn);
    assert_eq!((batch.len(), rows.iter().count()), (2, 3));
    // Without a number it is a write like any other, each time.
    let mut again = db.batch();
    again.put(&rows, token(5), b"a", b"3").unwrap();
    assert!(again.commit().unwrap() < again.submit().unwrap().wait().unwrap());
}

#[test]
fn checks_are_made_in_their_order() {
    let sim = Sim::new();
    let (db, ks) = store_keys(&sim, Scope::Key);
    let t = ks.lease(b"a").acquire().unwrap().token();
    let current = ks.lease(b"b").acquire().unwrap().token();
    ks.put_operation(t, op(5), b"a", b"1").unwrap();
    let commit = |token, number, key: &[u8]| {
        let mut batch = db.batch();
        batch
            .put(&ks, token, key, b"2")
            .unwrap()
            .expect(&ks, b"a", Expect::Absent)
            .unwrap()
            .operation(op(number));
        batch.commit()
    };
    assert_err!(commit(current, 5, b"a"), Error::UnknownToken { .. });
    assert_err!(commit(t, 5, b"a"), Error::Duplicate { .. });
    assert_err!(commit(t, 4, b"a"), Error::StaleOperation { .. });
    assert_err!(commit(t, 6, b"a"), Error::Conflict { found: Found::Present(_), .. });
    ks.raise(current, b"a").unwrap();
    for number in 4..7 {
        assert_err!(commit(t, number, b"a"), Error::Fenced { .. });
    }
    // A refusal uses up no number.
    let mut batch = db.batch();
    batch.put(&ks, current, b"a", b"2").unwrap().operation(op(1));
    batch.commit().unwrap();
}

#[test]
fn a_number_of_a_batch_stands_with_every_fence_it_writes() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    let commit = |number, keys: &[&[u8]]| {
        let mut batch = db.batch();
        for key in keys {
            batch.put(&rows, token(1), key, b"x").unwrap();
        }
        batch.operation(op(number));
        batch.commit()
    };
    let lsn = commit(5, &[b"a", b"b"]).unwrap();
    assert_err!(commit(5, &[b"a", b"b"]), Error::Duplicate { lsn: at } if at == lsn);
    assert_err!(commit(5, &[b"a"]), Error::Duplicate { lsn: at } if at == lsn);
    assert_err!(commit(5, &[b"a", b"b", b"c"]), Error::InvalidArgument(_));
    assert_err!(commit(5, &[b"c", b"a"]), Error::InvalidArgument(_));
    commit(7, &[b"b"]).unwrap();
    assert_err!(commit(6, &[b"a", b"b"]), Error::StaleOperation { last, .. } if last == op(7));
    assert_err!(commit(5, &[b"a", b"b"]), Error::StaleOperation { .. });
    assert_err!(commit(7, &[b"a", b"b"]), Error::InvalidArgument(_));
    assert_eq!(rows.get(b"c").unwrap(), None);
    commit(8, &[b"a", b"b", b"c"]).unwrap();
    assert_err!(rows.put_operation(token(1), op(8), b"c", b""), Error::Duplicate { .. });
}

#[test]
fn a_batch_has_one_token_per_fence() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = db.keyspace("p", KeyspaceOptions::new().tokens(Tokens::External).scope(Scope::Prefix(b'/')));
    let rows = rows.unwrap();
    let mut batch = db.batch();
    batch.put(&rows, token(1), b"a/1", b"").unwrap().put(&rows, token(2), b"a/2", b"").unwrap();
    let error = batch.commit().unwrap_err();
    assert_err!(Err::<(), _>(error.clone()), Error::InvalidArgument(_));
    assert!(error.to_string().contains("two tokens for the fence \"a/\""), "{error}");
    let mut batch = db.batch();
    batch.put(&rows, token(1), b"a/1", b"").unwrap().put(&rows, token(2), b"b/2", b"").unwrap();
    batch.commit().unwrap();
    assert_eq!(rows.mark(b"b/").unwrap().unwrap().get(), 2);
}

#[test]
fn of_two_changes_to_one_key_the_last_counts_and_conditions_see_the_state_before() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    let t = token(1);
    let mut batch = db.batch();
    batch
        .put(&rows, t, b"a", b"1")
        .unwrap()
        .delete(&rows, t, b"a")
        .unwrap()
        .put(&rows, t, b"a", b"3")
        .unwrap();
    batch.put(&rows, t, b"b", b"1").unwrap().delete(&rows, t, b"b").unwrap();
    batch.expect(&rows, b"a", Expect::Absent).unwrap().expect(&rows, b"b", Expect::Absent).unwrap();
    assert_eq!((batch.len(), batch.is_empty()), (5, false));
    let lsn = batch.commit().unwrap();
    assert_eq!(text(rows.get(b"a").unwrap()).as_deref(), Some("3"));
    assert_eq!(rows.get(b"b").unwrap(), None);
    assert_eq!(rows.iter().count(), 1);
    let versions = [(Expect::Version(lsn), true), (Expect::Version(Lsn::new(lsn.get() + 1)), false)];
    for (expect, holds) in versions {
        let mut batch = db.batch();
        batch.put(&rows, t, b"c", b"").unwrap().expect(&rows, b"a", expect).unwrap();
        match batch.commit() {
            Ok(_) => assert!(holds),
            Err(Error::Conflict { found, .. }) => {
                assert!(!holds);
                assert_eq!(found, Found::Present(lsn));
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    // A condition on a fence that the batch does not write needs no token.
    rows.raise(token(9), b"guarded").unwrap();
    rows.put_if(t, b"d", b"", Expect::Absent).unwrap();
    let mut batch = db.batch();
    batch.put(&rows, t, b"e", b"").unwrap().expect(&rows, b"guarded", Expect::Absent).unwrap();
    batch.commit().unwrap();
}

/// D2, over two keyspaces and two fences, where any one part may refuse.
#[test]
fn d2_a_batch_over_fences_and_keyspaces_is_all_or_nothing() {
    let sim = Sim::new();
    let db = sim.open();
    let (rows, other) = (external(&db), db.keyspace("other", KeyspaceOptions::new()).unwrap());
    let lease = other.lease(b"o").acquire().unwrap();
    let batch = |row_token, other_token| {
        let mut batch = db.batch();
        batch.put(&rows, token(row_token), b"a", b"x").unwrap();
        batch.put(&rows, token(5), b"b", b"x").unwrap();
        batch.put(&other, other_token, b"o", b"x").unwrap();
        batch.commit()
    };
    rows.raise(token(4), b"a").unwrap();
    assert_err!(batch(3, lease.token()), Error::Fenced { .. });
    assert_err!(batch(4, token(99)), Error::UnknownToken { .. });
    assert_eq!((rows.iter().count(), other.iter().count()), (0, 0));
    assert_eq!(rows.mark(b"b").unwrap(), None);
    let lsn = batch(4, lease.token()).unwrap();
    for value in [rows.get(b"a"), rows.get(b"b"), other.get(b"o")] {
        assert_eq!(value.unwrap().unwrap().lsn(), lsn);
    }
}

#[test]
fn an_empty_batch_and_a_stranger_are_refused() {
    let (sim, stranger) = (Sim::new(), Sim::new());
    let (db, other) = (sim.open(), stranger.open());
    assert_err!(db.batch().commit(), Error::InvalidArgument(_));
    let foreign = external(&other);
    let mut batch = db.batch();
    assert_err!(batch.put(&foreign, token(1), b"a", b"").map(drop), Error::InvalidArgument(_));
    assert_err!(batch.delete(&foreign, token(1), b"a").map(drop), Error::InvalidArgument(_));
    assert_err!(batch.raise(&foreign, token(1), b"a").map(drop), Error::InvalidArgument(_));
    assert_err!(batch.expect(&foreign, b"a", Expect::Absent).map(drop), Error::InvalidArgument(_));
    assert!(batch.is_empty());
    assert_err!(db.snapshot().get(&foreign, b"a"), Error::InvalidArgument(_));
    assert_err!(db.snapshot().iter(&foreign).next().unwrap(), Error::InvalidArgument(_));
}

#[test]
fn delete_prefix_is_one_batch_against_each_fence() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    for (number, key) in [(3, b"a1"), (5, b"a2"), (3, b"b1")] {
        rows.put(token(number), key, b"x").unwrap();
    }
    assert_err!(rows.delete_prefix(token(4), b"a"), Error::Fenced { mark, .. } if mark.get() == 5);
    assert_eq!(rows.iter().count(), 3);
    let deleted = rows.delete_prefix_some(token(5), b"a", 1).unwrap();
    assert_eq!((deleted.keys, deleted.more), (1, true));
    let deleted = rows.delete_prefix_some(token(5), b"a", 1).unwrap();
    assert_eq!((deleted.keys, deleted.more), (1, false));
    let deleted = rows.delete_prefix_some(token(5), b"", 0).unwrap();
    assert_eq!((deleted.keys, deleted.more), (0, true));
    let deleted = rows.delete_prefix(token(5), b"").unwrap();
    assert_eq!((deleted.keys, deleted.more), (1, false));
    assert_eq!(rows.mark(b"b1").unwrap().unwrap().get(), 5);
    assert_eq!(rows.mark(b"b2").unwrap(), None, "a fence without a present key is not touched");
}

type Call<'k> = dyn Fn(Token, &[u8]) -> Result<Deleted> + 'k;

/// A late writer whose keys are gone learns that it is fenced, and is not told that all went well.
#[test]
fn delete_prefix_judges_its_token_also_where_no_key_has_the_prefix() {
    for scope in [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace] {
        let sim = Sim::new();
        let (db, ks) = store_keys(&sim, scope);
        let first = ks.lease(b"a/").acquire().unwrap();
        first.release().unwrap();
        ks.lease(b"a/").acquire().unwrap().release().unwrap();
        let (old, new, unknown) = (token(1), token(2), token(99));
        // Whether every key with the prefix has the fence of `a/`.
        let fenced = |prefix: &[u8]| match scope {
            Scope::Keyspace => true,
            Scope::Prefix(_) => prefix.starts_with(b"a/"),
            _ => false,
        };
        let all = |token, prefix: &[u8]| ks.delete_prefix(token, prefix);
        let some = |token, prefix: &[u8]| ks.delete_prefix_some(token, prefix, 10);
        let calls: [&Call<'_>; 2] = [&all, &some];
        for delete in calls {
            for prefix in [&b"a/"[..], b"a/x", b"a/x/y", b"a", b""] {
                match fenced(prefix) {
                    true => {
                        assert_err!(delete(old, prefix), Error::Fenced { mark, .. } if mark == new)
                    }
                    false => assert_eq!(delete(old, prefix).unwrap().keys, 0),
                }
                assert_eq!(delete(new, prefix).unwrap().keys, 0);
                assert_err!(delete(unknown, prefix), Error::UnknownToken { .. });
            }
        }
        if scope == Scope::Prefix(b'/') {
            assert_err!(ks.delete_prefix(new, b"b/"), Error::UnknownToken { .. });
        }
        ks.raise_all(new).unwrap();
        for delete in calls {
            for prefix in [&b"a/"[..], b"b/", b""] {
                assert_err!(delete(old, prefix), Error::Fenced { mark, .. } if mark == new);
                assert_eq!(delete(new, prefix).unwrap().keys, 0);
            }
        }
        assert_eq!(ks.mark(b"b/").unwrap(), Some(new.into()), "the floor: nothing was raised");
        drop(db);
    }
    // What refuses is durable by then; and where tokens may not jump, none does.
    let sim = Sim::new();
    let db = sim.open();
    let options = KeyspaceOptions::new().tokens(Tokens::External).scope(Scope::Prefix(b'/'));
    let rows = db.keyspace("rows", options.token_jump_cap(10)).unwrap();
    let mut raise = db.batch();
    raise.raise(&rows, token(5), b"a/").unwrap();
    let pending = raise.submit().unwrap();
    assert!(!pending.is_done());
    assert_err!(rows.delete_prefix(token(4), b"a/"), Error::Fenced { .. });
    assert!(pending.is_done());
    for prefix in [&b"a/"[..], b""] {
        assert_err!(rows.delete_prefix(token(16), prefix), Error::TokenJump { .. });
        assert_eq!(rows.delete_prefix(token(15), prefix).unwrap().keys, 0);
    }
    assert_eq!(rows.mark(b"a/").unwrap(), Some(token(5).into()), "nothing was written");
}

/// F3, R2: the segment that such a write found full is sealed all the same, by the close at the latest.
#[test]
fn f3_a_segment_that_was_left_for_a_refused_write_is_sealed() {
    let sim = Sim::new();
    let db = sim.open();
    let rows = external(&db);
    rows.put(token(5), b"a", b"x").unwrap();
    assert_err!(rows.put_if(token(5), b"a", &[0; 20_000], Expect::Absent), Error::Conflict { .. });
    db.close().unwrap();
    let bytes = sim.disk.read_file("000001.seg").unwrap();
    assert_eq!(bytes[bytes.len() - 64..][..8], *b"TIDESEAL");
}
