//! Every public call, in one table: who may write where.
//!
//! F1–F3 from the outside: each call that changes something × lower, equal, higher, unknown token × tokens
//! of the store, external ones, external ones with a cap × the three scopes × where the mark comes from. A
//! refusal leaves no trace, in memory or after reopening. The table must name every public function of the
//! handles: a new one without a row fails here.

mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use store::{Sim, op, secs, text, token};
use tidewall::*;

/// What a call does with a token.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// Writes under a token, judged by the mark of the key's fence.
    Write,
    /// As `Write`, but touches only keys that are there.
    WritePresent,
    /// Raises the mark of one fence.
    Raise,
    /// Raises the floor of the keyspace.
    RaiseAll,
    /// Raises the floor of a keyspace of external tokens to just below the token.
    Retire,
    /// Names a grant by its token; never changes a mark.
    Grant,
    /// Reads, or changes nothing that a token guards. The action must leave no trace.
    Read,
    /// Builds, opens, closes, or is covered by the row named.
    Other(&'static str),
}
use Kind::*;

type Act = fn(&World, Token) -> Result<()>;

struct Row {
    name: &'static str,
    kind: Kind,
    act: Act,
}

const fn row(name: &'static str, kind: Kind, act: Act) -> Row {
    Row { name, kind, act }
}

const fn other(name: &'static str, why: &'static str) -> Row {
    Row { name, kind: Other(why), act: |_, _| Ok(()) }
}

const NEW: &[u8] = b"new";

#[rustfmt::skip]
const TABLE: &[Row] = &[
    row("Keyspace::put", Write, |w, t| w.ks.put(t, KEY, NEW).map(drop)),
    row("Keyspace::put_operation", Write, |w, t| w.ks.put_operation(t, op(7), KEY, NEW).map(drop)),
    row("Keyspace::put_if", Write, |w, t| w.ks.put_if(t, KEY, NEW, w.expect()).map(drop)),
    row("Keyspace::delete", Write, |w, t| w.ks.delete(t, KEY).map(drop)),
    row("Keyspace::delete_operation", Write, |w, t| w.ks.delete_operation(t, op(7), KEY).map(drop)),
    row("Keyspace::delete_if", Write, |w, t| w.ks.delete_if(t, KEY, w.expect()).map(drop)),
    row("Keyspace::submit_put", Write, |w, t| w.ks.submit_put(t, KEY, NEW)?.wait().map(drop)),
    row("Keyspace::submit_delete", Write, |w, t| w.ks.submit_delete(t, KEY)?.wait().map(drop)),
    row("Keyspace::try_submit_put", Write, |w, t| w.ks.try_submit_put(t, KEY, NEW)?.wait().map(drop)),
    row("Keyspace::delete_prefix", WritePresent, |w, t| w.ks.delete_prefix(t, b"a").map(drop)),
    row("Keyspace::delete_prefix_some", WritePresent, |w, t| w.ks.delete_prefix_some(t, b"", 9).map(drop)),
    row("Keyspace::raise", Raise, |w, t| w.ks.raise(t, KEY).map(drop)),
    row("Keyspace::raise_all", RaiseAll, |w, t| w.ks.raise_all(t).map(drop)),
    row("Keyspace::raise_all_past", RaiseAll, |w, t| w.ks.raise_all_past(t).map(drop)),
    row("Keyspace::renew", Grant, |w, t| w.ks.renew(KEY, t, w.owner()).map(drop)),
    row("Keyspace::release", Grant, |w, t| w.ks.release(KEY, t, w.owner())),
    row("Keyspace::get", Read, |w, _| w.ks.get(KEY).map(drop)),
    row("Keyspace::get_with", Read, |w, _| w.ks.get_with(KEY, <[u8]>::len).map(drop)),
    row("Keyspace::contains_key", Read, |w, _| w.ks.contains_key(KEY).map(drop)),
    row("Keyspace::retire_below", Retire, |w, t| w.ks.retire_below(t).map(drop)),
    row("Keyspace::floor", Read, |w, _| { w.ks.floor(); Ok(()) }),
    other("Db::compact", "presents no token; tests/compact.rs"),
    row("Keyspace::mark", Read, |w, _| w.ks.mark(KEY).map(drop)),
    row("Keyspace::iter", Read, |w, _| w.ks.iter().try_for_each(|item| item.map(drop))),
    row("Keyspace::range", Read, |w, _| w.ks.range(KEY..).try_for_each(|item| item.map(drop))),
    row("Keyspace::prefix", Read, |w, _| w.ks.prefix(b"a").rev().try_for_each(|item| item.map(drop))),
    row("Keyspace::needs_floor", Read, |w, _| { assert!(!w.ks.needs_floor()); Ok(()) }),
    row("Keyspace::name", Read, |w, _| { assert_eq!(w.ks.name(), "k"); Ok(()) }),
    row("Keyspace::options", Read, |w, _| { assert_eq!(w.ks.options(), w.case.options()); Ok(()) }),
    row("Keyspace::fence", Read, |w, _| { assert!(KEY.starts_with(w.ks.fence(KEY))); Ok(()) }),
    row("Keyspace::lease", Read, |w, _| { let _ = w.ks.lease(KEY).owner(OwnerId::new(1)).ttl(secs(1)); Ok(()) }),
    row("Batch::put", Write, |w, t| { let mut b = w.db.batch(); b.put(&w.ks, t, KEY, NEW)?; b.commit().map(drop) }),
    row("Batch::delete", Write, |w, t| { let mut b = w.db.batch(); b.delete(&w.ks, t, KEY)?; b.commit().map(drop) }),
    row("Batch::raise", Raise, |w, t| { let mut b = w.db.batch(); b.raise(&w.ks, t, KEY)?; b.commit().map(drop) }),
    row("Batch::commit", Write, |w, t| w.mixed(t, Batch::commit)),
    row("Batch::submit", Write, |w, t| w.mixed(t, |batch| batch.submit()?.wait())),
    row("Batch::try_submit", Write, |w, t| w.mixed(t, |batch| batch.try_submit()?.wait())),
    row("Batch::expect", Read, |w, _| { let mut b = w.db.batch(); b.expect(&w.ks, KEY, Expect::Absent)?; Ok(()) }),
    row("Batch::operation", Read, |w, _| { let mut b = w.db.batch(); b.operation(op(1)); Ok(()) }),
    row("Batch::len", Read, |w, _| { assert_eq!(w.db.batch().len(), 0); Ok(()) }),
    row("Batch::is_empty", Read, |w, _| { assert!(w.db.batch().is_empty()); Ok(()) }),
    row("Db::batch", Read, |w, t| { let mut b = w.db.batch(); b.put(&w.ks, t, KEY, NEW)?; Ok(()) }),
    row("Db::keyspace", Read, |w, _| w.db.keyspace("k", w.case.options()).map(drop)),
    row("Db::open_keyspace", Read, |w, _| { assert!(w.db.open_keyspace("k")?.is_some()); Ok(()) }),
    row("Db::keyspaces", Read, |w, _| { assert_eq!(w.db.keyspaces().len(), 2); Ok(()) }),
    row("Db::snapshot", Read, |w, _| { let _ = w.db.snapshot(); Ok(()) }),
    row("Db::last_lsn", Read, |w, _| { assert!(w.db.last_lsn() > Lsn::default()); Ok(()) }),
    row("Db::report", Read, |w, _| { assert!(w.db.report().warnings.is_empty()); Ok(()) }),
    row("Db::health", Read, |w, _| { assert!(w.db.health().is_healthy()); Ok(()) }),
    row("Db::highest_token", Read, |w, _| w.db.highest_token().map(drop)),
    row("Db::stats", Read, |w, _| { assert!(w.db.stats().disk_bytes > 0); Ok(()) }),
    row("Snapshot::get", Read, |w, _| w.db.snapshot().get(&w.ks, KEY).map(drop)),
    row("Snapshot::contains_key", Read, |w, _| w.db.snapshot().contains_key(&w.ks, KEY).map(drop)),
    row("Snapshot::iter", Read, |w, _| w.db.snapshot().iter(&w.ks).try_for_each(|item| item.map(drop))),
    row("Snapshot::range", Read, |w, _| w.db.snapshot().range(&w.ks, ..).try_for_each(|item| item.map(drop))),
    row("Snapshot::prefix", Read, |w, _| w.db.snapshot().prefix(&w.ks, b"a").try_for_each(|item| item.map(drop))),
    row("Snapshot::lsn", Read, |w, _| { assert_eq!(w.db.snapshot().lsn(), w.db.last_lsn()); Ok(()) }),
    other("Db::open", "opens"),
    other("Db::close", "closes; every reopening of this file"),
    other("Db::advance_tokens", "takes no fence: raises the counter only, a_counter_is_advanced_by_one_call"),
    other("Commit::wait", "Keyspace::submit_put"),
    other("Commit::is_done", "a question"),
    other("LeaseRequest::ttl", "builds"),
    other("LeaseRequest::owner", "builds"),
    other("LeaseRequest::wait", "builds"),
    other("LeaseRequest::slots", "builds"),
    other("LeaseRequest::resume", "builds"),
    other("LeaseRequest::lock_delay", "builds"),
    other("LeaseRequest::acquire_async", "grants, as acquire: tests/leases.rs"),
    other("LeaseRequest::acquire", "grants: only_a_grant_hands_out_a_token"),
    other("LeaseRequest::try_acquire", "grants: only_a_grant_hands_out_a_token"),
    other("Lease::token", "a question"),
    other("Lease::owner", "a question"),
    other("Lease::fence", "a question"),
    other("Lease::predecessor", "a question"),
    other("Lease::is_live", "a question"),
    other("Lease::remaining", "a question"),
    other("Lease::lost", "a question"),
    other("Lease::prefix", "a question"),
    other("Lease::ensure", "Keyspace::renew"),
    other("Lease::keep_alive", "Keyspace::renew"),
    other("Keyspace::break_lease", "presents no token, burns a fresh one: tests/lease_keeping.rs"),
    row("Keyspace::holders", Read, |w, _| w.ks.holders(b"").map(drop)),
    row("Batch::require", Read, |w, _| { let mut b = w.db.batch(); b.require(Require::Live); Ok(()) }),
    other("Lease::renew", "Keyspace::renew"),
    other("Lease::release", "Keyspace::release"),
    other("Lease::detach", "changes nothing: tests/leases.rs"),
];

/// The key that everything is tried on; `/` is the delimiter of `Scope::Prefix`.
const KEY: &[u8] = b"a/x";
/// The mark of its fence in every world, a token granted elsewhere, and one that nobody has granted.
const MARK: u64 = 5;
const HIGHER: u64 = 6;
const UNKNOWN: u64 = 99;
const CAP: u64 = 20;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Source {
    Store,
    External,
    Capped,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum From {
    /// The fence's own mark: from a grant where the store issues tokens, else from a write.
    Own,
    /// A floor above an own mark, which so means nothing.
    FloorAboveOwn,
    /// A floor alone.
    Floor,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    source: Source,
    scope: Scope,
    from: From,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let scopes = [Scope::Key, Scope::Prefix(b'/'), Scope::Keyspace];
        [Source::Store, Source::External, Source::Capped].into_iter().flat_map(move |source| {
            scopes.into_iter().flat_map(move |scope| {
                let all = [From::Own, From::FloorAboveOwn, From::Floor];
                all.into_iter().map(move |from| Case { source, scope, from })
            })
        })
    }

    fn options(self) -> KeyspaceOptions {
        let options = KeyspaceOptions::new().scope(self.scope);
        match self.source {
            Source::Store => options,
            Source::External => options.tokens(Tokens::External),
            Source::Capped => options.tokens(Tokens::External).token_jump_cap(CAP),
        }
    }

    fn has_value(self) -> bool {
        self.from != From::Floor
    }
}

struct World {
    case: Case,
    sim: Sim,
    db: Db,
    ks: Keyspace,
    /// Of another fence, so that tokens granted there are known and not for this one.
    elsewhere: Keyspace,
    lease: Option<Lease>,
}

impl World {
    fn new(case: Case) -> World {
        let sim = Sim::new();
        let db = sim.open();
        let ks = db.keyspace("k", case.options()).unwrap();
        let elsewhere = db.keyspace("elsewhere", KeyspaceOptions::new()).unwrap();
        let mut world = World { case, sim, db, ks, elsewhere, lease: None };
        match case.from {
            From::Own => {
                world.take(MARK);
                world.ks.put(token(MARK), KEY, b"old").unwrap();
            }
            From::FloorAboveOwn => {
                world.take(3);
                world.ks.put(token(3), KEY, b"old").unwrap();
                world.grant_elsewhere(MARK);
                world.ks.raise_all(token(MARK)).unwrap();
            }
            From::Floor => {
                world.grant_elsewhere(MARK);
                world.ks.raise_all(token(MARK)).unwrap();
            }
        }
        world.grant_elsewhere(HIGHER);
        world
    }

    /// Makes `number` good for the fence of `KEY`.
    fn take(&mut self, number: u64) {
        if self.case.source == Source::Store {
            self.db.advance_tokens(token(number - 1)).unwrap();
            let lease = self.ks.lease(KEY).owner(OwnerId::new(1)).ttl(secs(100)).acquire().unwrap();
            assert_eq!(lease.token(), token(number));
            self.lease = Some(lease);
        }
    }

    fn grant_elsewhere(&self, number: u64) {
        self.db.advance_tokens(token(number - 1)).unwrap();
        let lease = self.elsewhere.lease(b"other").acquire().unwrap();
        assert_eq!(lease.token(), token(number));
    }

    fn owner(&self) -> OwnerId {
        OwnerId::new(1)
    }

    fn expect(&self) -> Expect {
        if self.case.has_value() { Expect::Present } else { Expect::Absent }
    }

    /// A batch whose other half, in another keyspace, would be admitted.
    fn mixed(&self, token_: Token, finish: fn(&Batch) -> Result<Lsn>) -> Result<()> {
        let mut batch = self.db.batch();
        batch.put(&self.elsewhere, token(HIGHER), b"other", NEW)?;
        batch.put(&self.ks, token_, KEY, NEW)?;
        finish(&batch).map(drop)
    }

    /// Everything that a refusal must not change.
    fn trace(&self) -> Trace {
        let all = |ks: &Keyspace| ks.iter().map(Result::unwrap).map(|(key, value)| (key, Some(value)));
        let mut values: BTreeMap<Vec<u8>, Option<Value>> = all(&self.ks).collect();
        values.extend(all(&self.elsewhere));
        let marks = [&b"a/"[..], KEY, b"a", b"b/y"].map(|key| self.ks.mark(key).unwrap());
        let other = self.elsewhere.mark(b"other").unwrap();
        Trace { values, marks, other, last: self.db.last_lsn() }
    }

    fn reopened(self) -> World {
        let World { case, mut sim, db, .. } = self;
        drop(db);
        let db = sim.power_cut();
        let ks = db.keyspace("k", case.options()).unwrap();
        let elsewhere = db.keyspace("elsewhere", KeyspaceOptions::new()).unwrap();
        World { case, sim, db, ks, elsewhere, lease: None }
    }
}

#[derive(Clone, PartialEq, Debug)]
struct Trace {
    values: BTreeMap<Vec<u8>, Option<Value>>,
    marks: [Option<Mark>; 4],
    other: Option<Mark>,
    last: Lsn,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Answer {
    Done,
    /// Done, and there was nothing to do.
    Nothing,
    Fenced,
    Unknown,
    Jump,
    NotHeld,
    Invalid,
}

/// The rule in words: section 3 of the design.
fn expected(kind: Kind, case: Case, number: u64) -> Answer {
    let is_absent = kind == WritePresent && !case.has_value();
    // Without a key to delete, the fence is known only where the keyspace is one.
    let has_no_fence = is_absent && case.scope != Scope::Keyspace;
    let known = match case.source {
        Source::Store if (kind == Write || kind == WritePresent) && !has_no_fence => number <= MARK,
        Source::Store => number <= HIGHER,
        Source::External | Source::Capped => true,
    };
    let jumps = case.source == Source::Capped && number > MARK + CAP;
    match kind {
        Grant => match case.source {
            Source::Store if case.from == From::Own && number == MARK => Answer::Done,
            _ => Answer::NotHeld,
        },
        Read | Other(_) => Answer::Nothing,
        Retire if case.source == Source::Store => Answer::Invalid,
        // Measured against the floor before, as `raise_all`.
        Retire if case.from == From::Own => Answer::Done,
        Retire if number < MARK => Answer::Fenced,
        Retire => Answer::Done,
        // A floor is measured against the floor before: an own mark that is higher stays in force.
        RaiseAll if case.from == From::Own && known => Answer::Done,
        _ if number < MARK => Answer::Fenced,
        _ if !known => Answer::Unknown,
        RaiseAll => Answer::Done,
        _ if jumps => Answer::Jump,
        _ if is_absent => Answer::Nothing,
        _ => Answer::Done,
    }
}

fn answer_of(result: &Result<()>) -> Answer {
    match result {
        Ok(()) => Answer::Done,
        Err(Error::Fenced { .. }) => Answer::Fenced,
        Err(Error::UnknownToken { .. }) => Answer::Unknown,
        Err(Error::InvalidArgument(_)) => Answer::Invalid,
        Err(Error::TokenJump { .. }) => Answer::Jump,
        Err(Error::NotHeld { .. }) => Answer::NotHeld,
        Err(other) => panic!("{other:?}"),
    }
}

const TOKENS: [u64; 4] = [MARK - 1, MARK, HIGHER, UNKNOWN];

/// F3: refused calls and readers, all of them one after the other on one store, change nothing, and
/// nothing of them is there after a power cut.
#[test]
fn a_refusal_leaves_no_trace_for_every_call_token_scope_and_source() {
    let mut refused = 0;
    for case in Case::all() {
        let world = World::new(case);
        let before = world.trace();
        let stats = world.db.stats();
        for row in TABLE {
            for number in TOKENS {
                let expected = expected(row.kind, case, number);
                if expected == Answer::Done {
                    continue;
                }
                let result = (row.act)(&world, token(number));
                let what = format!("{} with {number} in {case:?}", row.name);
                match expected {
                    Answer::Nothing => assert!(result.is_ok(), "{what}: {result:?}"),
                    _ => {
                        assert_eq!(answer_of(&result), expected, "{what}");
                        refused += 1;
                    }
                }
                if let Err(Error::Fenced { token, mark, .. }) = result {
                    assert_eq!((token.get(), mark.get()), (number, MARK), "{what}");
                }
                assert_eq!(world.trace(), before, "{what}");
                let now = world.db.stats();
                assert_eq!(now.written_bytes, stats.written_bytes, "{what}");
                assert_eq!((now.writes, now.grants), (stats.writes, stats.grants), "{what}");
                if case.from == From::Own
                    && let Some(lease) = &world.lease
                {
                    assert!(lease.is_live(), "{what}");
                }
            }
        }
        let world = world.reopened();
        let after = world.trace();
        assert_eq!(
            (&after.values, after.marks),
            (&before.values, before.marks),
            "{case:?} after a power cut"
        );
    }
    assert!(refused > 1000, "{refused} refusals are too few for this table");
}

/// F1, F2: what is admitted is done and raises the mark of its fence, of no other, for ever.
#[test]
fn an_admitted_call_raises_the_mark_of_its_fence_for_every_call_scope_and_source() {
    for case in Case::all() {
        for row in TABLE {
            if matches!(row.kind, Grant | Read | Other(_)) {
                continue;
            }
            for number in TOKENS {
                if expected(row.kind, case, number) != Answer::Done {
                    continue;
                }
                let world = World::new(case);
                let before = world.trace();
                let what = format!("{} with {number} in {case:?}", row.name);
                let result = (row.act)(&world, token(number));
                assert_eq!(answer_of(&result), Answer::Done, "{what}");
                let after = world.trace();
                check_admitted(&world, row, number, &before, &after, &what);
                let reopened = world.reopened();
                let again = reopened.trace();
                assert_eq!((&again.values, again.marks), (&after.values, after.marks), "{what}, reopened");
                assert_eq!(again.other, after.other, "{what}, reopened");
            }
        }
    }
}

fn check_admitted(world: &World, row: &Row, number: u64, before: &Trace, after: &Trace, what: &str) {
    let mark = world.ks.mark(KEY).unwrap().map(Mark::get);
    // What is retired is below the token, so that becomes no mark.
    let raised = if row.kind == Retire { number - 1 } else { number };
    assert_eq!(mark, Some(raised.max(MARK)), "{what}");
    let elsewhere = world.ks.mark(if world.case.scope == Scope::Key { b"a/other" } else { b"b/y" }).unwrap();
    if world.case.scope != Scope::Keyspace && !matches!(row.kind, RaiseAll | Retire) {
        assert_eq!(elsewhere, before.marks[3], "{what} touched another fence");
    }
    if row.kind == RaiseAll {
        assert!(elsewhere.map(Mark::get) >= Some(number), "{what} reaches every fence");
    }
    if row.kind == Retire {
        assert!(elsewhere.map_or(0, Mark::get) >= number - 1, "{what} reaches every fence");
    }
    let value = text(world.ks.get(KEY).unwrap());
    match row.kind {
        Raise | RaiseAll | Retire => assert_eq!(after.values, before.values, "{what}"),
        _ if row.name.contains("delete") => assert_eq!(value, None, "{what}"),
        _ => {
            assert_eq!(value.as_deref(), Some("new"), "{what}");
            assert_eq!(world.ks.get(KEY).unwrap().unwrap().token().get(), number, "{what}");
        }
    }
    // The token itself is fenced by a floor that is raised past it.
    let past = u64::from(row.name == "Keyspace::raise_all_past");
    let held = world.case.from == From::Own && number + past <= MARK;
    if let Some(lease) = &world.lease {
        assert_eq!(lease.is_live(), held, "{what}: a lease ends when the mark passes its token");
    }
}

/// F4: a token comes from a grant, which raises the mark first; external keyspaces grant none.
#[test]
fn only_a_grant_hands_out_a_token() {
    for case in Case::all() {
        let world = World::new(case);
        drop(world.lease);
        let acquired = world.ks.lease(KEY).acquire();
        let tried = |lease: Result<Lease>| match (case.source, lease) {
            (Source::Store, Ok(lease)) => {
                assert!(lease.token().get() > HIGHER);
                assert_eq!(world.ks.mark(KEY).unwrap(), Some(lease.token().into()));
            }
            (Source::Store, Err(error)) => panic!("{error}"),
            (_, lease) => assert_err!(lease, Error::InvalidArgument(_)),
        };
        tried(acquired);
        tried(world.ks.lease(KEY).try_acquire());
    }
}

#[test]
fn a_counter_is_advanced_by_one_call() {
    let world = World::new(Case { source: Source::Store, scope: Scope::Key, from: From::Own });
    world.db.advance_tokens(token(1000)).unwrap();
    world.db.advance_tokens(token(10)).unwrap();
    let before = world.trace();
    assert_err!(world.ks.put(token(1000), KEY, NEW), Error::UnknownToken { .. });
    assert_eq!(world.trace(), before);
    let world = world.reopened();
    assert_eq!(world.ks.lease(b"new").acquire().unwrap().token(), token(1001));
}

/// The types that a user calls, and so the ones whose functions have rows.
const HANDLES: &[&str] = &["Batch", "Commit", "Db", "Keyspace", "Lease", "LeaseRequest", "Snapshot"];
/// Public types of the same files that change nothing: options, answers, iterators.
const OTHERS: &[&str] = &["Deleted", "Iter", "KeyRange", "Lost", "Options", "Raised"];

#[test]
fn every_public_function_of_a_handle_has_a_row() {
    let mut found = BTreeSet::new();
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|ext| ext == "rs") {
            functions_of_handles(&std::fs::read_to_string(&path).unwrap(), &mut found);
        }
    }
    assert!(found.contains("Keyspace::put"), "the parser finds nothing: {found:?}");
    let rows: BTreeSet<String> = TABLE.iter().map(|row| row.name.to_owned()).collect();
    assert_eq!(rows.len(), TABLE.len(), "a row twice");
    let missing: Vec<_> = found.difference(&rows).collect();
    assert!(missing.is_empty(), "public functions without a row: {missing:?}");
    let gone: Vec<_> = rows.difference(&found).collect();
    assert!(gone.is_empty(), "rows without a function: {gone:?}");
}

#[test]
fn every_public_type_of_the_front_is_known() {
    for file in ["keyspace.rs", "batch.rs", "db.rs", "guard.rs", "view.rs"] {
        let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file));
        for line in source.unwrap().lines() {
            let name =
                ["pub struct ", "pub enum ", "pub trait "].iter().find_map(|start| line.strip_prefix(start));
            if let Some(name) = name.map(identifier) {
                assert!(HANDLES.contains(&name) || OTHERS.contains(&name), "{file}: {name} is new here");
            }
        }
    }
}

/// Collects `Type::function` for each `pub fn` in an inherent `impl` of a handle.
fn functions_of_handles(source: &str, found: &mut BTreeSet<String>) {
    let mut handle = None;
    for line in source.lines() {
        if line.starts_with("impl") {
            let head = line.trim_start_matches("impl").trim_start();
            let head =
                head.strip_prefix('<').and_then(|rest| rest.split_once("> ")).map_or(head, |(_, ty)| ty);
            handle =
                (!line.contains(" for ")).then(|| identifier(head)).filter(|name| HANDLES.contains(name));
        } else if line.starts_with('}') {
            handle = None;
        }
        let function = ["    pub fn ", "    pub async fn ", "    pub const fn ", "    pub unsafe fn "]
            .iter()
            .find_map(|start| line.strip_prefix(start));
        if let (Some(handle), Some(function)) = (handle, function) {
            found.insert(format!("{handle}::{}", identifier(function)));
        }
    }
}

fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// A floor that is raised past a token fences that token too, on every fence, and stays so.
#[test]
fn raising_past_a_token_fences_the_token_itself() {
    for (source, inclusive) in [(Source::Store, false), (Source::External, false), (Source::External, true)] {
        let world = World::new(Case { source, scope: Scope::Prefix(b'/'), from: From::Own });
        if inclusive {
            world.ks.raise_all(token(MARK)).unwrap();
            let floor = world.ks.floor().unwrap();
            assert_eq!((floor.mark.get(), floor.is_folded, floor.forgotten), (MARK, false, None));
        }
        world.ks.raise_all_past(token(MARK)).unwrap();
        assert!(matches!(world.ks.raise_all_past(token(MARK)), Ok(Raised::Already)));
        assert_err!(world.ks.raise_all_past(Token::MAX), Error::InvalidArgument(_));
        let world = world.reopened();
        let floor = world.ks.floor().unwrap();
        let forgotten = floor.forgotten.map(Mark::get);
        assert_eq!((floor.mark.get(), floor.is_folded, forgotten), (MARK, true, Some(MARK)));
        assert_err!(world.ks.put(token(MARK), KEY, NEW), Error::Fenced { .. });
        assert_err!(world.ks.put(token(MARK), b"new/key", NEW), Error::Fenced { .. });
        assert_err!(world.ks.raise_all(token(MARK)), Error::Fenced { .. });
    }
}
