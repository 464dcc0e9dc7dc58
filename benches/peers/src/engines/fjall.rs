//! fjall, in three ways.
//!
//! `fjall`: plain inserts under a striped lock of ours, then one `persist(SyncData)` for all who wait.
//! `fjall-occ`, `fjall-sw`: optimistic and single-writer transactions that commit with
//! `PersistMode::SyncData`, as its documents say for durable commits.

use crate::store::*;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode, Readable};
use std::path::Path;

const CACHE: u64 = 1 << 30;

fn load(db: &Database, ks: &Keyspace, items: &[Item]) -> Res<()> {
    let mut b = db.batch().durability(Some(PersistMode::SyncData));
    for (k, t, v) in items {
        b.insert(ks, k.as_slice(), encode(*t, v));
    }
    Ok(b.commit()?)
}

fn get(ks: &Keyspace, key: &[u8], f: Look<'_>) -> Res<()> {
    let v = ks.get(key)?;
    f(v.as_deref().map(decode));
    Ok(())
}

fn scan(ks: &Keyspace, p: &[u8]) -> Res<(usize, usize)> {
    let mut n = (0, 0);
    for g in ks.prefix(p) {
        let v = g.value()?;
        n.0 += 1;
        n.1 += v.len() - 8;
    }
    Ok(n)
}

fn settle(db: &Database, ks: &Keyspace) -> Res<()> {
    ks.rotate_memtable_and_wait()?;
    let t = std::time::Instant::now();
    while (db.outstanding_flushes() > 0 || db.active_compactions() > 0) && t.elapsed().as_secs() < 20 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok(())
}

struct Occ {
    db: fjall::OptimisticTxDatabase,
    ks: fjall::OptimisticTxKeyspace,
}

pub fn open_occ(p: &Path) -> Res<Box<dyn FencedStore>> {
    let db = fjall::OptimisticTxDatabase::builder(p).cache_size(CACHE).open()?;
    let ks = db.keyspace("kv", KeyspaceCreateOptions::default)?;
    Ok(Box::new(Occ { db, ks }))
}

impl FencedStore for Occ {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        loop {
            let mut tx = self.db.write_tx()?.durability(Some(PersistMode::SyncData));
            if let Some(v) = tx.get(&self.ks, key)? {
                let m = token_of(&v);
                if token < m {
                    return Ok(Outcome::Rejected(m));
                }
            }
            tx.insert(&self.ks, key, encode(token, value));
            if tx.commit()?.is_ok() {
                return Ok(Outcome::Accepted);
            }
        }
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        get(self.ks.inner(), key, f)
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        scan(self.ks.inner(), p)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        load(self.db.inner(), self.ks.inner(), items)
    }
    fn settle(&self) -> Res<()> {
        settle(self.db.inner(), self.ks.inner())
    }
}

struct Sw {
    db: fjall::SingleWriterTxDatabase,
    ks: fjall::SingleWriterTxKeyspace,
}

pub fn open_sw(p: &Path) -> Res<Box<dyn FencedStore>> {
    let db = fjall::SingleWriterTxDatabase::builder(p).cache_size(CACHE).open()?;
    let ks = db.keyspace("kv", KeyspaceCreateOptions::default)?;
    Ok(Box::new(Sw { db, ks }))
}

impl FencedStore for Sw {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        // Marks only rise: a low token is refused without the lock of writers.
        if let Some(v) = self.ks.get(key)?
            && token < token_of(&v)
        {
            return Ok(Outcome::Rejected(token_of(&v)));
        }
        let mut tx = self.db.write_tx().durability(Some(PersistMode::SyncData));
        if let Some(v) = tx.get(&self.ks, key)?
            && token < token_of(&v)
        {
            return Ok(Outcome::Rejected(token_of(&v)));
        }
        tx.insert(&self.ks, key, encode(token, value));
        tx.commit()?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        get(self.ks.inner(), key, f)
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        scan(self.ks.inner(), p)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        load(self.db.inner(), self.ks.inner(), items)
    }
    fn settle(&self) -> Res<()> {
        settle(self.db.inner(), self.ks.inner())
    }
}

struct Group {
    db: Database,
    ks: Keyspace,
    stripes: Stripes,
    gs: GroupSync,
}

pub fn open_group(p: &Path) -> Res<Box<dyn FencedStore>> {
    let db = Database::builder(p).cache_size(CACHE).manual_journal_persist(true).open()?;
    let ks = db.keyspace("kv", KeyspaceCreateOptions::default)?;
    Ok(Box::new(Group { db, ks, stripes: Stripes::new(), gs: GroupSync::new() }))
}

impl FencedStore for Group {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        {
            let _l = self.stripes.lock(key);
            if let Some(v) = self.ks.get(key)?
                && token < token_of(&v)
            {
                return Ok(Outcome::Rejected(token_of(&v)));
            }
            self.ks.insert(key, encode(token, value))?;
        }
        self.gs.sync(|| Ok(self.db.persist(PersistMode::SyncData)?))?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        get(&self.ks, key, f)
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        scan(&self.ks, p)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        load(&self.db, &self.ks, items)
    }
    fn settle(&self) -> Res<()> {
        settle(&self.db, &self.ks)
    }
}
