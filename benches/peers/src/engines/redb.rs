//! redb, `Durability::Immediate` (the default): one write transaction at a time, a sync each.

use crate::store::*;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::path::Path;

const T: TableDefinition<&[u8], &[u8]> = TableDefinition::new("kv");

struct R(Database);

pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    std::fs::create_dir_all(p)?;
    let db = Database::builder().create(p.join("db.redb"))?;
    let tx = db.begin_write()?;
    tx.open_table(T)?;
    tx.commit()?;
    Ok(Box::new(R(db)))
}

impl FencedStore for R {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let mut mark = None;
        self.get(key, &mut |v| mark = v.map(|x| x.1))?;
        if let Some(m) = mark
            && token < m
        {
            return Ok(Outcome::Rejected(m));
        }
        let tx = self.0.begin_write()?;
        {
            let mut t = tx.open_table(T)?;
            let m = t.get(key)?.map(|g| token_of(g.value()));
            if let Some(m) = m
                && token < m
            {
                drop(t);
                tx.abort()?;
                return Ok(Outcome::Rejected(m));
            }
            t.insert(key, encode(token, value).as_slice())?;
        }
        tx.commit()?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let t = self.0.begin_read()?.open_table(T)?;
        let g = ReadableTable::get(&t, key)?;
        f(g.as_ref().map(|g| decode(g.value())));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let t = self.0.begin_read()?.open_table(T)?;
        let mut n = (0, 0);
        for kv in ReadableTable::range(&t, p..)? {
            let (k, v) = kv?;
            if !k.value().starts_with(p) {
                break;
            }
            n.0 += 1;
            n.1 += v.value().len() - 8;
        }
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let tx = self.0.begin_write()?;
        {
            let mut t = tx.open_table(T)?;
            for (k, tk, v) in items {
                t.insert(k.as_slice(), encode(*tk, v).as_slice())?;
            }
        }
        Ok(tx.commit()?)
    }
}
