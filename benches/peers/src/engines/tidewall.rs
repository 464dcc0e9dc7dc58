//! tidewall with its default options: a keyspace of external tokens, in which each key is a fence of its own.

use crate::store::*;
use std::collections::VecDeque;
use std::path::Path;
use tidewall::{Commit, Db, Error, Keyspace, KeyspaceOptions, Token, Tokens};

pub fn open(dir: &Path) -> Res<Box<dyn FencedStore>> {
    let db = Db::open(dir)?;
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External))?;
    Ok(Box::new(Tidewall { db, rows }))
}

struct Tidewall {
    db: Db,
    rows: Keyspace,
}

impl FencedStore for Tidewall {
    fn put(&self, key: &[u8], token: u64, value: &[u8]) -> Res<Outcome> {
        match self.rows.put(Token::new(token)?, key, value) {
            Ok(_) => Ok(Outcome::Accepted),
            Err(Error::Fenced { mark, .. }) => Ok(Outcome::Rejected(mark.get())),
            Err(e) => Err(e.into()),
        }
    }

    fn get(&self, key: &[u8], look: Look<'_>) -> Res<()> {
        let value = self.rows.get(key)?;
        look(value.as_ref().map(|value| (value.bytes(), value.token().get())));
        Ok(())
    }

    fn scan(&self, prefix: &[u8]) -> Res<(usize, usize)> {
        let mut read = (0, 0);
        let mut rows = self.rows.prefix(prefix);
        while let Some(bytes) = rows.next_with(|_, value| value.len()) {
            read.0 += 1;
            read.1 += bytes?;
        }
        Ok(read)
    }

    fn load(&self, items: &[Item]) -> Res<()> {
        let mut batch = self.db.batch();
        for (key, token, value) in items {
            batch.put(&self.rows, Token::new(*token)?, key, value)?;
        }
        batch.commit()?;
        Ok(())
    }

    fn pipeline(
        &self,
        window: usize,
        next: &mut dyn FnMut() -> Option<Item>,
        durable: &mut dyn FnMut(),
    ) -> Res<()> {
        let mut in_flight: VecDeque<Commit> = VecDeque::with_capacity(window);
        while let Some((key, token, value)) = next() {
            if in_flight.len() == window
                && let Some(oldest) = in_flight.pop_front()
            {
                oldest.wait()?;
                durable();
            }
            in_flight.push_back(self.rows.submit_put(Token::new(token)?, &key, &value)?);
        }
        for commit in in_flight {
            commit.wait()?;
            durable();
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Res<()> {
        let Tidewall { db, rows } = *self;
        drop(rows);
        Ok(db.close()?)
    }
}
