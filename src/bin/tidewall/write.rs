//! `put`, `delete`, `raise`: each fenced as every write is, and durable when it ends. And `compact`.

use crate::args::{Compact, Delete, Put, Raise, Source, Under};
use crate::bytes;
use crate::failure::Failure;
use crate::show::{object, out, write_json};
use crate::store::{keyspace, open_to_write};
use serde_json::Value as Json;
use std::io::{Read, Write};
use tidewall::{Expect, Keyspace, KeyspaceOptions, Lease, Lsn, OperationId, Raised, Scope, Token, Tokens};

/// The token of a command, and the lease that it came with, held until the command is done. Dropped, it is released;
/// that it ran out meanwhile makes no write undone.
struct Claim {
    token: Token,
    _lease: Option<Lease>,
}

impl Claim {
    fn of(under: &Under, space: &Keyspace, key: &[u8]) -> Result<Self, Failure> {
        match under.token {
            Some(number) => Ok(Claim { token: Token::new(number)?, _lease: None }),
            None => {
                let lease = space.lease(key).acquire()?;
                Ok(Claim { token: lease.token(), _lease: Some(lease) })
            }
        }
    }
}

pub fn put(args: &Put) -> Result<(), Failure> {
    let hex = args.shape.hex;
    let key = bytes::parse(&args.key, hex)?;
    let value = value(&args.value, hex)?;
    // All of the command line is read before the store is opened, which alone costs an incarnation.
    let expect = match (args.if_absent, args.if_present, args.if_version) {
        (true, _, _) => Some(Expect::Absent),
        (_, true, _) => Some(Expect::Present),
        (_, _, Some(lsn)) => Some(Expect::Version(Lsn::new(lsn))),
        _ => None,
    };
    let operation = match args.operation {
        Some(number) => Some(
            OperationId::try_new(number).ok_or_else(|| Failure::usage("operations are numbered from 1"))?,
        ),
        None => None,
    };
    let options = created(args)?;
    args.under.token.map(Token::new).transpose()?;
    let db = open_to_write(&args.dir.dir, args.create)?;
    let missing = db.keyspaces().iter().all(|(name, _)| *name != args.keyspace);
    let space = match args.create && missing {
        true => db.keyspace(&args.keyspace, options)?,
        false => keyspace(&db, &args.keyspace)?,
    };
    let claim = Claim::of(&args.under, &space, &key)?;
    let token = claim.token;
    let lsn = match (operation, expect) {
        (Some(operation), _) => space.put_operation(token, operation, &key, &value)?,
        (None, Some(expect)) => space.put_if(token, &key, &value, expect)?,
        (None, None) => space.put(token, &key, &value)?,
    };
    drop(claim);
    drop(space);
    db.close()?;
    done(args.shape.json, "written", &[("token", token.get()), ("lsn", lsn.get())])
}

fn value(text: &str, hex: bool) -> Result<Vec<u8>, Failure> {
    if text != "-" {
        return bytes::parse(text, hex);
    }
    let mut value = Vec::new();
    let most = tidewall::MAX_BATCH_BYTES as u64 + 1;
    let read = std::io::stdin().take(most).read_to_end(&mut value);
    read.map_err(|e| Failure::io("reading the standard input", &e))?;
    Ok(value)
}

fn created(args: &Put) -> Result<KeyspaceOptions, Failure> {
    let scope = match (args.scope.as_str(), args.scope.strip_prefix("prefix:")) {
        ("key", _) => Scope::Key,
        ("keyspace", _) => Scope::Keyspace,
        (_, Some(delimiter)) => match bytes::parse(delimiter, false)?[..] {
            [delimiter] => Scope::Prefix(delimiter),
            _ => return Err(Failure::usage(format!("the delimiter in {:?} is not one byte", args.scope))),
        },
        _ => return Err(Failure::usage(format!("{:?} is no scope: key, keyspace or prefix:D", args.scope))),
    };
    let tokens = match args.tokens {
        Source::Store => Tokens::Store,
        Source::External => Tokens::External,
    };
    Ok(KeyspaceOptions::new().scope(scope).tokens(tokens))
}

pub fn delete(args: &Delete) -> Result<(), Failure> {
    let hex = args.shape.hex;
    let key = args.key.as_deref().map(|key| bytes::parse(key, hex)).transpose()?;
    let prefix = args.prefix.as_deref().map(|prefix| bytes::parse(prefix, hex)).transpose()?;
    args.under.token.map(Token::new).transpose()?;
    let db = open_to_write(&args.dir.dir, false)?;
    let space = keyspace(&db, &args.keyspace)?;
    let claim = Claim::of(&args.under, &space, key.as_deref().unwrap_or_default())?;
    let token = claim.token;
    let said = match (&key, &prefix) {
        (Some(key), _) if args.if_present => ("lsn", space.delete_if(token, key, Expect::Present)?.get()),
        (Some(key), _) => ("lsn", space.delete(token, key)?.get()),
        (None, prefix) => {
            let prefix = prefix.as_deref().unwrap_or_default();
            ("keys", space.delete_prefix(token, prefix)?.keys as u64)
        }
    };
    drop(claim);
    drop(space);
    db.close()?;
    done(args.shape.json, "deleted", &[("token", token.get()), said])
}

pub fn raise(args: &Raise) -> Result<(), Failure> {
    let key = args.key.as_deref().map(|key| bytes::parse(key, args.shape.hex)).transpose()?;
    let token = Token::new(args.token)?;
    let db = open_to_write(&args.dir.dir, false)?;
    let space = keyspace(&db, &args.keyspace)?;
    let raised = match (&key, args.past) {
        (Some(key), _) => space.raise(token, key)?,
        (None, true) => space.raise_all_past(token)?,
        (None, false) => space.raise_all(token)?,
    };
    drop(space);
    db.close()?;
    match raised {
        Raised::Now(lsn) => done(args.shape.json, "raised", &[("token", token.get()), ("lsn", lsn.get())]),
        _ => done(args.shape.json, "raised before", &[("token", token.get())]),
    }
}

pub fn compact(args: &Compact) -> Result<(), Failure> {
    let db = open_to_write(&args.dir.dir, false)?;
    let compacted = db.compact()?;
    db.close()?;
    let said = [("segments", compacted.segments.into()), ("bytes", compacted.bytes)];
    done(args.json, "given back", &said)
}

fn done(json: bool, what: &str, said: &[(&str, u64)]) -> Result<(), Failure> {
    let mut out = out();
    if json {
        let mut line = object([("done", what.into())]);
        line.extend(said.iter().map(|&(name, number)| (name.to_owned(), Json::from(number))));
        write_json(&mut out, line)?;
    } else {
        let said: Vec<_> = said.iter().map(|(name, number)| format!("{name} {number}")).collect();
        writeln!(out, "{what}: {}", said.join(", "))?;
    }
    Ok(out.flush()?)
}
