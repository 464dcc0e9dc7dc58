//! canopydb: concurrent optimistic write transactions over a log.
//!
//! `canopydb`: `commit_with(true)`, as its documents say; it holds the commit lock over the sync.
//! `canopydb-group`: `commit_with(false)`, then one `sync()` for all who wait. One caller at a time: of two
//! at once, one may return before the other's sync is done.

use crate::store::*;
use canopydb::{Database, DbOptions, EnvOptions, Error};
use std::path::Path;

const T: &[u8] = b"kv";

struct C(Database, Option<GroupSync>);

pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    with(p, None)
}
pub fn open_group(p: &Path) -> Res<Box<dyn FencedStore>> {
    with(p, Some(GroupSync::new()))
}
fn with(p: &Path, g: Option<GroupSync>) -> Res<Box<dyn FencedStore>> {
    let mut o = DbOptions::new();
    o.default_commit_sync = true;
    let db = Database::with_options(EnvOptions::new(p), o)?;
    let tx = db.begin_write()?;
    tx.get_or_create_tree(T)?;
    tx.commit()?;
    Ok(Box::new(C(db, g)))
}

impl FencedStore for C {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let new = encode(token, value);
        let mut mark = None;
        self.get(key, &mut |v| mark = v.map(|x| x.1))?;
        if let Some(m) = mark
            && token < m
        {
            return Ok(Outcome::Rejected(m));
        }
        loop {
            let tx = self.0.begin_write_concurrent()?;
            {
                let mut t = tx.get_tree(T)?.ok_or("no tree")?;
                if let Some(v) = t.get(key)?
                    && token < token_of(&v)
                {
                    return Ok(Outcome::Rejected(token_of(&v)));
                }
                t.insert(key, &new)?;
            }
            match tx.commit_with(self.1.is_none()) {
                Ok(_) => {
                    if let Some(g) = &self.1 {
                        g.sync(|| Ok(self.0.sync()?))?;
                    }
                    return Ok(Outcome::Accepted);
                }
                Err(Error::WriteConflict) => {}
                Err(e) => return Err(e.to_string().into()),
            }
        }
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let tx = self.0.begin_read()?;
        let t = tx.get_tree(T)?.ok_or("no tree")?;
        let v = t.get(key)?;
        f(v.as_deref().map(decode));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let tx = self.0.begin_read()?;
        let t = tx.get_tree(T)?.ok_or("no tree")?;
        let mut n = (0, 0);
        for kv in t.prefix(&p)? {
            n.0 += 1;
            n.1 += kv?.1.len() - 8;
        }
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let tx = self.0.begin_write()?;
        {
            let mut t = tx.get_tree(T)?.ok_or("no tree")?;
            for (k, tk, v) in items {
                t.insert(k, &encode(*tk, v))?;
            }
        }
        tx.commit_with(true)?;
        Ok(())
    }
    fn settle(&self) -> Res<()> {
        Ok(self.0.checkpoint()?)
    }
    fn close(self: Box<Self>) -> Res<()> {
        self.0.checkpoint()?;
        Ok(())
    }
}
