//! Compaction changes places, and nothing that anybody can see (C1 to C4).
//!
//! Crashes at every storage call of a compaction are in `tests/crash.rs`; here is what a compaction that ends
//! must leave: the same values, marks, numbered operations, leases and counters, less space.

#[macro_use]
#[path = "../store/mod.rs"]
mod store;
#[path = "../support/mod.rs"]
mod support;

mod deletes;
mod folds;
mod kept;
mod places;
mod readers;
mod space;

use store::token;
use tidewall::{Db, Keyspace, KeyspaceOptions, Lease, Scope, Tokens};

const FILL: [u8; 900] = [7; 900];

fn key(db: &Db, name: &str) -> Keyspace {
    db.keyspace(name, KeyspaceOptions::new()).unwrap()
}

fn prefix(db: &Db, name: &str) -> Keyspace {
    db.keyspace(name, KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap()
}

fn whole(db: &Db, name: &str) -> Keyspace {
    db.keyspace(name, KeyspaceOptions::new().scope(Scope::Keyspace)).unwrap()
}

fn external(db: &Db, name: &str) -> Keyspace {
    db.keyspace(name, KeyspaceOptions::new().tokens(Tokens::External)).unwrap()
}

/// Two segments of garbage in a keyspace of their own, so that what lies before it is sealed.
fn churn(db: &Db) {
    let rows = external(db, "churn");
    for n in 0..40u8 {
        rows.put(token(1), &[n % 3], &FILL).unwrap();
    }
}

/// Uses so many fences once each, and leaves nothing in them.
fn use_once(ks: &Keyspace, name: &str, count: usize) {
    for n in 0..count {
        let key = format!("{name}-{n}/x");
        let lease = ks.lease(key.as_bytes()).ttl(tidewall::Ttl::INFINITE).acquire().unwrap();
        ks.put(lease.token(), key.as_bytes(), b"done").unwrap();
        ks.delete(lease.token(), key.as_bytes()).unwrap();
        lease.release().unwrap();
    }
}

/// A holder that neither releases nor is released by a drop.
fn keep(lease: Lease) -> u64 {
    let number = lease.token().get();
    std::mem::forget(lease);
    number
}

fn floor_of(ks: &Keyspace) -> u64 {
    ks.floor().map_or(0, |floor| floor.mark.get())
}
