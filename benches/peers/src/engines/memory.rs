//! The floors of what happens in memory: maps with nothing durable behind them.

use crate::store::*;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::Path;

struct Papaya(papaya::HashMap<Vec<u8>, Vec<u8>>);

pub fn open_papaya(_: &Path) -> Res<Box<dyn FencedStore>> {
    Ok(Box::new(Papaya(papaya::HashMap::new())))
}

impl FencedStore for Papaya {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let m = self.0.pin();
        if let Some(v) = m.get(key)
            && token < token_of(v)
        {
            return Ok(Outcome::Rejected(token_of(v)));
        }
        let mut out = Outcome::Accepted;
        let new = encode(token, value);
        m.compute(key.to_vec(), |e| match e {
            Some((_, v)) if token < token_of(v) => {
                out = Outcome::Rejected(token_of(v));
                papaya::Operation::Abort::<_, ()>(())
            }
            _ => {
                out = Outcome::Accepted;
                papaya::Operation::Insert(new.clone())
            }
        });
        Ok(out)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        f(self.0.pin().get(key).map(|v| decode(v)));
        Ok(())
    }
    fn scan(&self, _: &[u8]) -> Res<(usize, usize)> {
        Err("a hash map has no order".into())
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let m = self.0.pin();
        for (k, t, v) in items {
            m.insert(k.clone(), encode(*t, v));
        }
        Ok(())
    }
}

struct Ordered(parking_lot::RwLock<BTreeMap<Vec<u8>, Vec<u8>>>);

pub fn open_btree(_: &Path) -> Res<Box<dyn FencedStore>> {
    Ok(Box::new(Ordered(Default::default())))
}

impl FencedStore for Ordered {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        if let Some(v) = self.0.read().get(key)
            && token < token_of(v)
        {
            return Ok(Outcome::Rejected(token_of(v)));
        }
        let mut m = self.0.write();
        if let Some(v) = m.get(key)
            && token < token_of(v)
        {
            return Ok(Outcome::Rejected(token_of(v)));
        }
        m.insert(key.to_vec(), encode(token, value));
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        f(self.0.read().get(key).map(|v| decode(v)));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let m = self.0.read();
        let mut n = (0, 0);
        for (_, v) in
            m.range::<[u8], _>((Bound::Included(p), Bound::Unbounded)).take_while(|(k, _)| k.starts_with(p))
        {
            n.0 += 1;
            n.1 += v.len() - 8;
        }
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let mut m = self.0.write();
        for (k, t, v) in items {
            m.insert(k.clone(), encode(*t, v));
        }
        Ok(())
    }
}
