//! Any operations on leases while the clock jumps, forwards and back, and the store is closed, killed and cut off its
//! power: no token is given twice, one lease is live on a fence at most, an ended one never lives again, marks do not
//! fall, and no late write is accepted.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::time::Duration;
use support::rows::policy;
use support::token;
use tidewall::storage::SimDisk;
use tidewall::testkit::{History, ManualClock, Write};
use tidewall::{Clock, Db, Error, Keyspace, KeyspaceOptions, Lease, Options, OwnerId, Scope, Token};

#[derive(Arbitrary, Debug)]
enum Op {
    Acquire { fence: u8, owner: u8, ttl_ms: u16, lock_delay_ms: u8 },
    Resume { held: u8 },
    Renew { held: u8 },
    RenewRemotely { held: u8, owner: u8 },
    Release { held: u8 },
    ReleaseRemotely { held: u8, owner: u8 },
    Drop { held: u8 },
    Put { held: u8, fence: u8 },
    Carry { held: u8, fence: u8 },
    CarryToAll { held: u8 },
    Break { fence: u8 },
    Advance { ms: u16 },
    SetClock { to: u32 },
    Compact,
    Close,
    Kill,
    PowerCut { policy: u8, seed: u16 },
}

#[derive(Arbitrary, Debug)]
struct Input {
    grace_ms: u16,
    ops: Vec<Op>,
}

/// A grant that was handed out.
struct Held {
    token: Token,
    owner: OwnerId,
    fence: u8,
    /// Gone once it is given back or its store is closed.
    lease: Option<Lease>,
    /// It was given back, broken, superseded, or its store was opened again.
    ended: bool,
}

struct World {
    disk: SimDisk,
    clock: ManualClock,
    grace: Duration,
    opens: u64,
    db: Db,
    jobs: Keyspace,
    held: Vec<Held>,
    history: History,
    highest: u64,
    marks: BTreeMap<u8, u64>,
    writes: u64,
}

fuzz_target!(|input: Input| {
    let (disk, clock) = (SimDisk::new(), ManualClock::new());
    let grace = Duration::from_millis(input.grace_ms as u64);
    let (db, jobs) = open(&disk, &clock, grace, 0);
    let (history, marks) = (History::new(), BTreeMap::new());
    let mut world = World {
        disk,
        clock,
        grace,
        opens: 0,
        db,
        jobs,
        held: Vec::new(),
        history,
        highest: 0,
        marks,
        writes: 0,
    };
    for op in input.ops.iter().take(80) {
        world.run(op);
        world.check();
    }
    world.history.check().unwrap_or_else(|late| panic!("{late}\n{}", world.history));
});

fn open(disk: &SimDisk, clock: &ManualClock, grace: Duration, opens: u64) -> (Db, Keyspace) {
    let options = Options::new().storage(disk.clone()).clock(clock.clone()).lease_grace(grace);
    let db =
        options.deterministic(opens).without_threads().segment_bytes(16 << 10).open("fuzz").expect("opens");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).expect("there");
    (db, jobs)
}

fn key(fence: u8) -> [u8; 2] {
    [b'a' + fence % 4, b'/']
}

fn owner(number: u8) -> OwnerId {
    OwnerId::new(number as u128 % 4 + 1)
}

impl World {
    fn held(&mut self, number: u8) -> Option<&mut Held> {
        let len = self.held.len().max(1);
        self.held.get_mut(number as usize % len)
    }

    /// A fence is known to be at a token.
    fn moved(&mut self, fence: u8, token: Token) {
        self.history.moved(&key(fence), token);
        let mark = self.marks.entry(fence % 4).or_insert(0);
        *mark = (*mark).max(token.get());
    }

    fn granted(&mut self, fence: u8, owner: OwnerId, lease: Lease) {
        let token = lease.token();
        assert!(token.get() > self.highest, "token {token} was granted after {}", self.highest);
        self.highest = token.get();
        assert!(!self.held.iter().any(|held| held.is_live(fence)), "granted while another lease is live");
        assert!(lease.is_live(), "granted and over");
        for before in self.held.iter_mut().filter(|held| held.fence % 4 == fence % 4) {
            before.ended = true;
        }
        self.moved(fence, token);
        self.held.push(Held { token, owner, fence, lease: Some(lease), ended: false });
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Acquire { fence, owner: number, ttl_ms, lock_delay_ms } => {
                let key = key(fence);
                let request = self.jobs.lease(&key).owner(owner(number));
                let request = request.ttl(Duration::from_millis(ttl_ms as u64 + 1));
                let request = request.lock_delay(Duration::from_millis(lock_delay_ms as u64));
                match request.try_acquire() {
                    Ok(lease) => self.granted(fence, owner(number), lease),
                    Err(error) => assert!(matches!(error, Error::Held { .. }), "{error}"),
                }
            }
            Op::Resume { held } => {
                let Some(held) = self.held(held) else { return };
                let (fence, owner, token) = (held.fence, held.owner, held.token);
                let key = key(fence);
                match self.jobs.lease(&key).owner(owner).resume(token).try_acquire() {
                    Ok(lease) => self.granted(fence, owner, lease),
                    Err(Error::Held { .. } | Error::NotHeld { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Op::Renew { held } => {
                let Some(held) = self.held(held) else { return };
                let Some(lease) = &held.lease else { return };
                let answer = lease.renew();
                assert!(answer.is_err() || !held.ended, "an ended lease was renewed");
                assert!(answer.is_err() || lease.is_live(), "renewed and over");
            }
            Op::RenewRemotely { held, owner: number } => {
                let Some(&mut Held { token, owner: mine, fence, ended, .. }) = self.held(held) else {
                    return;
                };
                if self.jobs.renew(&key(fence), token, owner(number)).is_ok() {
                    assert!(!ended && mine == owner(number), "renewed for somebody else, or after its end");
                }
            }
            Op::Release { held } => {
                let Some(held) = self.held(held) else { return };
                let ended = held.ended;
                held.ended = true;
                let Some(lease) = held.lease.take() else { return };
                assert!(lease.release().is_err() || !ended, "an ended lease was released");
            }
            Op::ReleaseRemotely { held, owner: number } => {
                let Some(&mut Held { token, owner: mine, fence, ended, .. }) = self.held(held) else {
                    return;
                };
                if self.jobs.release(&key(fence), token, owner(number)).is_ok() {
                    assert!(!ended && mine == owner(number), "released for somebody else, or after its end");
                    self.held(held).expect("as before").ended = true;
                }
            }
            Op::Drop { held } => {
                if let Some(held) = self.held(held)
                    && held.lease.take().is_some()
                {
                    held.ended = true;
                }
            }
            Op::Put { held, fence } => {
                self.writes += 1;
                let value = self.writes.to_le_bytes();
                let Some(&mut Held { token, .. }) = self.held(held) else { return };
                let key = key(fence);
                let write = Write { who: "a holder", fence: &key, token, key: &key, value: &value };
                let answer = self.history.write(write, |w| self.jobs.put(w.token, w.key, w.value));
                let mark = self.marks.get(&(fence % 4)).copied().unwrap_or(0);
                match answer {
                    Ok(_) => assert!(token.get() >= mark, "{token} was accepted below {mark}"),
                    Err(Error::Fenced { mark, .. }) => {
                        assert!(mark.get() >= token.get(), "fenced from below")
                    }
                    Err(Error::UnknownToken { .. }) => {
                        assert!(token.get() > mark, "{token} raised this fence")
                    }
                    Err(error) => panic!("{error}"),
                }
                if answer.is_ok() {
                    let found = self.history.read(&key, || self.jobs.get(&key)).expect("reads");
                    assert_eq!(found.as_deref(), Some(&value[..]));
                }
            }
            Op::Carry { held, fence } => {
                let Some(&mut Held { token, .. }) = self.held(held) else { return };
                if self.jobs.raise(token, &key(fence)).is_ok() {
                    self.moved(fence, token);
                    self.end_below(token, Some(fence));
                }
            }
            Op::CarryToAll { held } => {
                let Some(&mut Held { token, .. }) = self.held(held) else { return };
                if self.jobs.raise_all(token).is_ok() {
                    (0..4).for_each(|fence| self.moved(fence, token));
                    self.end_below(token, None);
                }
            }
            Op::Break { fence } => {
                if let Some(broken) = self.jobs.break_lease(&key(fence), "fuzz").expect("there is room") {
                    let mark = broken.mark.get();
                    assert!(mark > self.highest, "broken with a token that is not fresh");
                    self.highest = mark;
                    self.moved(fence, token(mark));
                    self.end_below(token(mark), Some(fence));
                }
            }
            Op::Advance { ms } => self.clock.advance(Duration::from_millis(ms as u64)),
            Op::SetClock { to } => self.clock.set(to as u64 * 16),
            Op::Compact => drop(self.db.compact().expect("there is room")),
            Op::Close => {
                self.db.clone().close().expect("closes");
                self.reopen(self.disk.kill());
            }
            Op::Kill => self.reopen(self.disk.kill()),
            Op::PowerCut { policy: number, seed } => {
                self.reopen(self.disk.crash(policy(number), seed as u64))
            }
        }
    }

    fn end_below(&mut self, token: Token, fence: Option<u8>) {
        for held in &mut self.held {
            held.ended |= held.token < token && fence.is_none_or(|fence| fence % 4 == held.fence % 4);
        }
    }

    /// Goes on with another disk. What is dropped afterwards is given back to a store that nobody looks at any more.
    fn reopen(&mut self, disk: SimDisk) {
        self.opens += 1;
        (self.db, self.jobs) = open(&disk, &self.clock, self.grace, self.opens);
        self.disk = disk;
        for held in &mut self.held {
            held.ended = true;
            held.lease = None;
        }
    }

    fn check(&self) {
        let now = self.clock.now();
        for fence in 0..4 {
            let live = self.held.iter().filter(|held| held.is_live(fence)).count();
            assert!(live <= 1, "{live} leases are live on one fence at {now}");
            let mark = self.jobs.mark(&key(fence)).expect("reads").map_or(0, |mark| mark.get());
            let least = self.marks.get(&fence).copied().unwrap_or(0);
            assert!(mark >= least, "a mark fell from {least} to {mark}");
        }
        for held in &self.held {
            let live = held.lease.as_ref().is_some_and(Lease::is_live);
            assert!(!(held.ended && live), "lease {} is over, and live", held.token);
        }
        let holders = self.jobs.holders(b"").unwrap();
        let mut fences: Vec<_> = holders.iter().filter(|holder| holder.is_live).map(|h| &h.fence).collect();
        let all = fences.len();
        fences.dedup();
        assert_eq!(fences.len(), all, "two live holders of one fence: {holders:?}");
    }
}

impl Held {
    fn is_live(&self, fence: u8) -> bool {
        self.fence % 4 == fence % 4 && self.lease.as_ref().is_some_and(Lease::is_live)
    }
}
