//! RocksDB, the system's C++ library through the `rocksdb` crate.
//!
//! `rocksdb`: a plain database, `sync` on, a striped lock of ours around read, check and write.
//! `rocksdb-recycle`: the same with recycled log files, so that in the steady state a sync does not have to
//! commit a new file size; smaller write buffers, so that the steady state is reached.
//! `rocksdb-txn`: a pessimistic `TransactionDB`: `get_for_update`, then a commit with `sync`.

use crate::store::*;
use rocksdb::properties::{COMPACTION_PENDING, NUM_RUNNING_COMPACTIONS};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, FlushOptions, Options, TransactionDB,
    TransactionDBOptions, TransactionOptions, WriteBatch, WriteBatchWithTransaction, WriteOptions,
};
use std::path::Path;
use std::time::Duration;

fn opts(recycle: bool) -> Res<Options> {
    let mut o = Options::default();
    o.create_if_missing(true);
    o.increase_parallelism(2);
    o.set_compression_type(DBCompressionType::Lz4);
    o.set_bytes_per_sync(1 << 20);
    let mut b = BlockBasedOptions::default();
    b.set_block_cache(&Cache::new_lru_cache(1 << 30)?);
    b.set_bloom_filter(10.0, false);
    b.set_cache_index_and_filter_blocks(false);
    o.set_block_based_table_factory(&b);
    if recycle {
        o.set_recycle_log_file_num(4);
        o.set_write_buffer_size(8 << 20);
    }
    Ok(o)
}

fn sync() -> WriteOptions {
    let mut w = WriteOptions::default();
    w.set_sync(true);
    w
}

struct Plain {
    db: DB,
    stripes: Stripes,
    w: WriteOptions,
}

fn plain(p: &Path, recycle: bool) -> Res<Box<dyn FencedStore>> {
    let db = DB::open(&opts(recycle)?, p)?;
    Ok(Box::new(Plain { db, stripes: Stripes::new(), w: sync() }))
}
pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    plain(p, false)
}
pub fn open_recycle(p: &Path) -> Res<Box<dyn FencedStore>> {
    plain(p, true)
}

impl FencedStore for Plain {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        let _l = self.stripes.lock(key);
        if let Some(v) = self.db.get_pinned(key)?
            && token < token_of(&v)
        {
            return Ok(Outcome::Rejected(token_of(&v)));
        }
        self.db.put_opt(key, encode(token, value), &self.w)?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let v = self.db.get_pinned(key)?;
        f(v.as_deref().map(decode));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let mut ro = rocksdb::ReadOptions::default();
        ro.set_iterate_upper_bound(prefix_end(p));
        let mut it = self.db.raw_iterator_opt(ro);
        it.seek(p);
        let mut n = (0, 0);
        while let Some(value) = it.value() {
            n.0 += 1;
            n.1 += value.len() - 8;
            it.next();
        }
        it.status()?;
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let mut b = WriteBatch::default();
        for (k, t, v) in items {
            b.put(k, encode(*t, v));
        }
        Ok(self.db.write_opt(b, &self.w)?)
    }
    fn settle(&self) -> Res<()> {
        let mut f = FlushOptions::default();
        f.set_wait(true);
        self.db.flush_opt(&f)?;
        // Nothing is written meanwhile. A compaction is pending until it runs, and one that ends can leave another
        // pending: at rest is what was so twice in a row.
        let mut at_rest = 0;
        while at_rest < 2 {
            let pending = self.db.property_int_value(COMPACTION_PENDING)?;
            let running = self.db.property_int_value(NUM_RUNNING_COMPACTIONS)?;
            at_rest = if (pending, running) == (Some(0), Some(0)) { at_rest + 1 } else { 0 };
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

struct Txn {
    db: TransactionDB,
    w: WriteOptions,
    t: TransactionOptions,
}

pub fn open_txn(p: &Path) -> Res<Box<dyn FencedStore>> {
    let mut to = TransactionDBOptions::default();
    to.set_default_lock_timeout(60_000);
    to.set_txn_lock_timeout(60_000);
    let db = TransactionDB::open(&opts(false)?, &to, p)?;
    Ok(Box::new(Txn { db, w: sync(), t: TransactionOptions::default() }))
}

impl FencedStore for Txn {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        // Marks only rise: a low token is refused without a lock.
        if let Some(v) = self.db.get_pinned(key)?
            && token < token_of(&v)
        {
            return Ok(Outcome::Rejected(token_of(&v)));
        }
        let tx = self.db.transaction_opt(&self.w, &self.t);
        if let Some(v) = tx.get_for_update(key, true)?
            && token < token_of(&v)
        {
            return Ok(Outcome::Rejected(token_of(&v)));
        }
        tx.put(key, encode(token, value))?;
        tx.commit()?;
        Ok(Outcome::Accepted)
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        let v = self.db.get_pinned(key)?;
        f(v.as_deref().map(decode));
        Ok(())
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        let mut ro = rocksdb::ReadOptions::default();
        ro.set_iterate_upper_bound(prefix_end(p));
        let mut it = self.db.raw_iterator_opt(ro);
        it.seek(p);
        let mut n = (0, 0);
        while let Some(value) = it.value() {
            n.0 += 1;
            n.1 += value.len() - 8;
            it.next();
        }
        it.status()?;
        Ok(n)
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        let mut b = WriteBatchWithTransaction::<true>::default();
        for (k, t, v) in items {
            b.put(k, encode(*t, v));
        }
        Ok(self.db.write_opt(b, &self.w)?)
    }
}
