//! SurrealKV: optimistic transactions, `Durability::Immediate`, its log allocated ahead. A commit is a future:
//! each writer blocks on its own, and a runtime with two workers runs the engine.

use crate::store::*;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::path::Path;
use surrealkv::{Durability, Error, LSMIterator, Mode, Options, Tree, TreeBuilder};

struct S {
    t: Option<Tree>,
    rt: tokio::runtime::Runtime,
}

pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let t = {
        let _g = rt.enter();
        let o = Options::default()
            .with_path(p.to_path_buf())
            .with_wal_preallocation(true)
            .with_block_cache_capacity(1 << 30);
        TreeBuilder::with_options(o).build()?
    };
    Ok(Box::new(S { t: Some(t), rt }))
}

/// The read, the check and the write of a put, and its commit, again until no other came between.
async fn put(tree: &Tree, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
    loop {
        let mut tx = tree.begin()?;
        if let Some(v) = tx.get(key)?
            && token < token_of(&v)
        {
            return Ok(Outcome::Rejected(token_of(&v)));
        }
        tx.set(key, encode(token, value))?;
        tx.set_durability(Durability::Immediate);
        match tx.commit().await {
            Ok(()) => return Ok(Outcome::Accepted),
            Err(Error::TransactionWriteConflict | Error::TransactionRetry) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

impl S {
    fn t(&self) -> &Tree {
        self.t.as_ref().expect("open until it is closed")
    }
}

impl FencedStore for S {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        self.rt.block_on(put(self.t(), key, token, value))
    }
    fn pipeline(
        &self,
        window: usize,
        next: &mut dyn FnMut() -> Option<Item>,
        durable: &mut dyn FnMut(),
    ) -> Res<()> {
        let check = |outcome: Option<Res<Outcome>>| match outcome {
            Some(Ok(Outcome::Accepted)) => Ok(()),
            Some(Ok(Outcome::Rejected(mark))) => Err(format!("rejected: the mark is {mark}").into()),
            Some(Err(e)) => Err(e),
            None => Err("nothing was in flight".into()),
        };
        self.rt.block_on(async {
            let mut in_flight = FuturesUnordered::new();
            while let Some((key, token, value)) = next() {
                if in_flight.len() == window {
                    check(in_flight.next().await)?;
                    durable();
                }
                in_flight.push(async move { put(self.t(), &key, token, &value).await });
            }
            while !in_flight.is_empty() {
                check(in_flight.next().await)?;
                durable();
            }
            Ok(())
        })
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let tx = self.t().begin_with_mode(Mode::ReadOnly)?;
        let v = tx.get(key)?;
        f(v.as_deref().map(decode));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let tx = self.t().begin_with_mode(Mode::ReadOnly)?;
        let mut it = tx.range(p, prefix_end(p).as_slice())?;
        it.seek_first()?;
        let mut n = (0, 0);
        while it.valid() {
            n.0 += 1;
            n.1 += it.value_ref()?.len() - 8;
            it.next()?;
        }
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let mut tx = self.t().begin_with_mode(Mode::WriteOnly)?;
        for (k, t, v) in items {
            tx.set(k.as_slice(), encode(*t, v))?;
        }
        tx.set_durability(Durability::Immediate);
        self.rt.block_on(tx.commit())?;
        Ok(())
    }
    fn close(mut self: Box<Self>) -> Res<()> {
        let t = self.t.take().expect("open until it is closed");
        self.rt.block_on(t.close())?;
        drop(t);
        Ok(())
    }
}

impl Drop for S {
    fn drop(&mut self) {
        let _g = self.rt.enter();
        self.t.take();
    }
}
