//! SQLite, bundled: a write-ahead log, `synchronous=FULL`, a connection per thread; `BEGIN IMMEDIATE` and an
//! upsert whose `WHERE` is the fence.

use crate::store::*;
use rusqlite::{Connection, OptionalExtension, params};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(1);
thread_local!(static CONN: RefCell<Option<(u64, Connection)>> = const { RefCell::new(None) });

struct Sq {
    id: u64,
    path: PathBuf,
}

fn conn(path: &Path) -> Res<Connection> {
    let c = Connection::open(path)?;
    c.busy_timeout(std::time::Duration::from_secs(120))?;
    c.pragma_update(None, "journal_mode", "WAL")?;
    c.pragma_update(None, "synchronous", "FULL")?;
    c.pragma_update(None, "mmap_size", 1i64 << 30)?;
    c.set_prepared_statement_cache_capacity(16);
    Ok(c)
}

pub fn open(p: &Path) -> Res<Box<dyn FencedStore>> {
    std::fs::create_dir_all(p)?;
    let path = p.join("db.sqlite");
    let c = conn(&path)?;
    c.execute_batch(
        "CREATE TABLE IF NOT EXISTS kv(key BLOB PRIMARY KEY, token INTEGER NOT NULL, value BLOB NOT NULL) WITHOUT ROWID",
    )?;
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    CONN.with(|s| *s.borrow_mut() = Some((id, c)));
    Ok(Box::new(Sq { id, path }))
}

impl Sq {
    fn with<T>(&self, f: impl FnOnce(&Connection) -> Res<T>) -> Res<T> {
        CONN.with(|s| {
            let mut s = s.borrow_mut();
            if s.as_ref().is_none_or(|x| x.0 != self.id) {
                *s = Some((self.id, conn(&self.path)?));
            }
            f(&s.as_ref().expect("made above").1)
        })
    }
}

const SEL: &str = "SELECT token FROM kv WHERE key = ?1";
const UPSERT: &str = "INSERT INTO kv(key, token, value) VALUES(?1, ?2, ?3) ON CONFLICT(key) DO UPDATE \
     SET token = excluded.token, value = excluded.value WHERE excluded.token >= kv.token";

impl FencedStore for Sq {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        self.with(|c| {
            let mark = |c: &Connection| -> Res<Option<u64>> {
                Ok(c.prepare_cached(SEL)?
                    .query_row([key], |r| r.get::<_, i64>(0))
                    .optional()?
                    .map(|x| x as u64))
            };
            // Marks only rise: a low token is refused without the lock of writers.
            if let Some(m) = mark(c)?
                && token < m
            {
                return Ok(Outcome::Rejected(m));
            }
            c.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
            let r = c.prepare_cached(UPSERT).and_then(|mut s| s.execute(params![key, token as i64, value]));
            match r {
                Ok(0) => {
                    let m = mark(c)?;
                    c.prepare_cached("COMMIT")?.execute([])?;
                    Ok(Outcome::Rejected(m.unwrap_or(0)))
                }
                Ok(_) => {
                    c.prepare_cached("COMMIT")?.execute([])?;
                    Ok(Outcome::Accepted)
                }
                Err(e) => {
                    let _ = c.execute_batch("ROLLBACK");
                    Err(e.into())
                }
            }
        })
    }
    fn get(&self, key: &[u8], f: Look<'_>) -> Res<()> {
        self.with(|c| {
            let mut s = c.prepare_cached("SELECT value, token FROM kv WHERE key = ?1")?;
            let mut rows = s.query([key])?;
            match rows.next()? {
                Some(r) => f(Some((r.get_ref(0)?.as_blob()?, r.get::<_, i64>(1)? as u64))),
                None => f(None),
            }
            Ok(())
        })
    }
    fn scan(&self, p: &[u8]) -> Res<(usize, usize)> {
        self.with(|c| {
            let mut s = c.prepare_cached("SELECT key, token, value FROM kv WHERE key >= ?1 AND key < ?2")?;
            let mut rows = s.query([p, &prefix_end(p)])?;
            let mut n = (0, 0);
            while let Some(r) = rows.next()? {
                n.0 += 1;
                n.1 += r.get_ref(2)?.as_blob()?.len();
            }
            Ok(n)
        })
    }
    fn load(&self, items: &[Item]) -> Res<()> {
        self.with(|c| {
            c.execute_batch("BEGIN IMMEDIATE")?;
            {
                let mut s = c.prepare_cached(
                    "INSERT INTO kv(key, token, value) VALUES(?1, ?2, ?3) ON CONFLICT(key) DO UPDATE SET token = excluded.token, value = excluded.value",
                )?;
                for (k, t, v) in items {
                    s.execute(params![k, *t as i64, v])?;
                }
            }
            c.execute_batch("COMMIT")?;
            Ok(())
        })
    }
    fn close(self: Box<Self>) -> Res<()> {
        // The last connection to close checkpoints the log.
        CONN.with(|s| *s.borrow_mut() = None);
        Ok(())
    }
}
