//! LMDB, through `heed`: one write transaction a put, with the default flags, which sync.

use crate::store::*;
use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvOpenOptions};
use std::path::Path;

struct L {
    env: Env,
    db: Database<'static, Bytes, Bytes>,
}

pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    std::fs::create_dir_all(p)?;
    // SAFETY: nobody else has the file open or changes it: the directory is this process's own.
    let env = unsafe { EnvOpenOptions::new().map_size(16 << 30).max_readers(1024).max_dbs(2).open(p)? };
    let tx = env.write_txn()?;
    let db = env
        .create_databases_and_commit(tx, |o, tx| {
            o.create_database::<Bytes, Bytes>(tx, Some("kv")).map(CommitOrAbort::<_, ()>::Commit)
        })?
        .unwrap_commit();
    Ok(Box::new(L { env, db }))
}

impl FencedStore for L {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        {
            // Marks only rise: a low token is refused without the lock of writers.
            let r = self.env.read_txn()?;
            if let Some(v) = self.db.get(&r, key)?
                && token < token_of(v)
            {
                return Ok(Outcome::Rejected(token_of(v)));
            }
        }
        let mut tx = self.env.write_txn()?;
        if let Some(v) = self.db.get(&tx, key)?
            && token < token_of(v)
        {
            return Ok(Outcome::Rejected(token_of(v)));
        }
        self.db.put(&mut tx, key, &encode(token, value))?;
        tx.commit()?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let r = self.env.read_txn()?;
        f(self.db.get(&r, key)?.map(decode));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let r = self.env.read_txn()?;
        let mut n = (0, 0);
        for kv in self.db.prefix_iter(&r, p)? {
            n.0 += 1;
            n.1 += kv?.1.len() - 8;
        }
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let mut tx = self.env.write_txn()?;
        for (k, t, v) in items {
            self.db.put(&mut tx, k, &encode(*t, v))?;
        }
        Ok(tx.commit()?)
    }
    fn close(self: Box<Self>) -> Res<()> {
        let ev = self.env.clone().prepare_for_closing();
        drop(self);
        ev.wait();
        Ok(())
    }
}
