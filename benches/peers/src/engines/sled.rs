//! sled 0.34: compare and swap, then `flush()`.
//!
//! On Linux it makes its log durable with `sync_file_range`, which flushes neither the disk's write cache nor
//! the file's metadata: weaker than a sync, and cheaper.

use crate::store::*;
use std::path::Path;

struct S {
    db: sled::Db,
    t: sled::Tree,
}

pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    let db = sled::Config::new().path(p).cache_capacity(1 << 30).mode(sled::Mode::HighThroughput).open()?;
    let t = db.open_tree("kv")?;
    Ok(Box::new(S { db, t }))
}

impl FencedStore for S {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let new = sled::IVec::from(encode(token, value));
        let mut cur = self.t.get(key)?;
        loop {
            if let Some(v) = &cur
                && token < token_of(v)
            {
                return Ok(Outcome::Rejected(token_of(v)));
            }
            match self.t.compare_and_swap(key, cur.as_ref(), Some(new.clone()))? {
                Ok(()) => break,
                Err(e) => cur = e.current,
            }
        }
        self.t.flush()?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let v = self.t.get(key)?;
        f(v.as_deref().map(decode));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let mut n = (0, 0);
        for kv in self.t.scan_prefix(p) {
            n.0 += 1;
            n.1 += kv?.1.len() - 8;
        }
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        for (k, t, v) in items {
            self.t.insert(k.as_slice(), encode(*t, v))?;
        }
        self.t.flush()?;
        Ok(())
    }
    fn close(self: Box<Self>) -> Res<()> {
        self.db.flush()?;
        drop(self);
        Ok(())
    }
}
