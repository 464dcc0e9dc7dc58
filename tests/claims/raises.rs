//! Which raise fences whom, and leaves whom alone: the table of `docs/leases.md`, call by call.

use crate::store::{Sim, secs, token};
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Lease, Result, Token, Tokens};

/// Five writers with a lease each. Their tokens are 1 to 5, in this order.
const WRITERS: [&str; 5] = ["here", "there", "elsewhere", "boss", "above"];
const BOSS: u64 = 4;

struct World {
    sim: Sim,
    db: Db,
    jobs: Keyspace,
    other: Keyspace,
    leases: Vec<Lease>,
}

impl World {
    fn new() -> World {
        let sim = Sim::new();
        let db = sim.open();
        let [jobs, other] = ["jobs", "other"].map(|name| db.keyspace(name, KeyspaceOptions::new()).unwrap());
        let mut world = World { sim, db, jobs, other, leases: Vec::new() };
        for name in WRITERS {
            let lease = world.space(name).lease(name.as_bytes()).ttl(secs(10)).acquire().unwrap();
            world.leases.push(lease);
        }
        assert_eq!(world.leases[3].token(), token(BOSS));
        world
    }

    /// Only one of them writes into the other keyspace.
    fn space(&self, name: &str) -> &Keyspace {
        if name == "elsewhere" { &self.other } else { &self.jobs }
    }

    /// Who is fenced. Whoever is, is not live any more.
    fn fenced(&self) -> Vec<&str> {
        let fenced =
            |name: &str, lease: &Lease| match self.space(name).put(lease.token(), name.as_bytes(), b"") {
                Err(Error::Fenced { .. }) => {
                    assert!(!lease.is_live(), "{name} is fenced and live");
                    true
                }
                Ok(_) => false,
                Err(error) => panic!("{name}: {error}"),
            };
        WRITERS
            .into_iter()
            .zip(&self.leases)
            .filter(|(name, lease)| fenced(name, lease))
            .map(|(n, _)| n)
            .collect()
    }

    fn live(&self) -> usize {
        self.leases.iter().filter(|lease| lease.is_live()).count()
    }
}

#[test]
fn each_raise_fences_whom_the_guide_says_and_nobody_else() {
    type Raise = fn(&World, Token) -> Result<()>;
    let table: [(&str, Raise, &[&str]); 9] = [
        ("raise", |w, t| w.jobs.raise(t, b"here").map(|_| ()), &["here"]),
        (
            "Batch::raise",
            |w, t| {
                let mut batch = w.db.batch();
                batch.raise(&w.jobs, t, b"here")?;
                batch.commit().map(|_| ())
            },
            &["here"],
        ),
        ("raise_all", |w, t| w.jobs.raise_all(t).map(|_| ()), &["here", "there"]),
        ("raise_all_past", |w, t| w.jobs.raise_all_past(t).map(|_| ()), &["here", "there", "boss"]),
        (
            "break_lease",
            |w, _| w.jobs.break_lease(b"boss", "").map(|broken| assert!(broken.is_some())),
            &["boss"],
        ),
        (
            "break_lease where none is held",
            |w, _| w.jobs.break_lease(b"nobody", "").map(|broken| assert!(broken.is_none())),
            &[],
        ),
        ("Db::advance_tokens", |w, _| w.db.advance_tokens(token(1000)), &[]),
        ("a lease that is given back", |w, t| w.jobs.release(b"boss", t, w.leases[3].owner()), &[]),
        (
            "acquire, of one that is given back",
            |w, t| {
                w.jobs.release(b"boss", t, w.leases[3].owner())?;
                w.jobs.lease(b"boss").acquire().map(drop)
            },
            &["boss"],
        ),
    ];
    for (call, raise, expected) in table {
        let world = World::new();
        raise(&world, token(BOSS)).unwrap();
        assert_eq!(world.fenced(), expected, "{call}");
        let over = expected.len().max(call.contains("given back") as usize);
        assert_eq!(world.live(), WRITERS.len() - over, "{call}");
        let World { mut sim, leases, .. } = world;
        let db = sim.power_cut();
        for (name, lease) in WRITERS.into_iter().zip(&leases) {
            let space = if name == "elsewhere" { "other" } else { "jobs" };
            let space = db.keyspace(space, KeyspaceOptions::new()).unwrap();
            let late = space.put(lease.token(), name.as_bytes(), b"");
            assert_eq!(
                late.is_err(),
                expected.contains(&name),
                "{call}, behind a power cut: {name}: {late:?}"
            );
        }
    }
}

/// A lease that ran out has not fenced its holder, and cannot be broken.
#[test]
fn an_expired_lease_is_no_raise_and_nothing_to_break() {
    let world = World::new();
    world.sim.clock.advance(secs(11));
    assert_eq!(world.live(), 0);
    assert_eq!(world.jobs.break_lease(b"boss", "").unwrap(), None);
    assert_eq!(world.fenced(), [""; 0]);
}

#[test]
fn where_the_tokens_come_from_elsewhere_so_does_each() {
    type Raise = fn(&Keyspace, Token) -> Result<()>;
    let table: [(&str, Raise, &[&str]); 4] = [
        ("raise", |ks, t| ks.raise(t, b"low").map(|_| ()), &["low"]),
        ("raise_all", |ks, t| ks.raise_all(t).map(|_| ()), &["low", "lower"]),
        ("raise_all_past", |ks, t| ks.raise_all_past(t).map(|_| ()), &["low", "lower", "same"]),
        ("retire_below", |ks, t| ks.retire_below(t).map(|_| ()), &["low", "lower"]),
    ];
    let rows = |db: &Db| db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    let writers = [("low", 3), ("lower", 2), ("same", 4), ("high", 5)];
    for (call, raise, expected) in table {
        let mut sim = Sim::new();
        let db = sim.open();
        for (key, number) in writers {
            rows(&db).put(token(number), key.as_bytes(), b"").unwrap();
        }
        raise(&rows(&db), token(4)).unwrap();
        for db in [db, sim.power_cut()] {
            let late =
                |&(key, number): &(&str, u64)| rows(&db).put(token(number), key.as_bytes(), b"").is_err();
            let fenced: Vec<_> = writers.into_iter().filter(late).map(|(key, _)| key).collect();
            assert_eq!(fenced, expected, "{call}");
        }
    }
}
