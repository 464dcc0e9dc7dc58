//! `keys`, `get`, `holders`: they open the store read-only.

use crate::args::{Get, Holders, Keys};
use crate::bytes;
use crate::failure::{Failure, REFUSED};
use crate::show::{nanos, object, out, table, write_json, write_table};
use crate::store::{keyspace, open_to_read};
use serde_json::Value as Json;
use std::io::Write;
use tidewall::{Db, KeyspaceOptions, Scope, Tokens, Value};

pub fn keys(args: &Keys) -> Result<(), Failure> {
    let db = open_to_read(&args.dir.dir)?;
    let Some(name) = &args.keyspace else { return keyspaces(&db, args) };
    let space = keyspace(&db, name)?;
    let hex = args.shape.hex;
    let found = space.prefix(&bytes::parse(&args.prefix, hex)?);
    let found: Box<dyn Iterator<Item = _>> = match args.reverse {
        true => Box::new(found.rev()),
        false => Box::new(found),
    };
    let mut out = out();
    if args.long && !args.shape.json {
        writeln!(out, "{:>10} {:>20} {:>20}  key", "bytes", "token", "lsn")?;
    }
    for item in found.take(args.limit.map_or(usize::MAX, |limit| limit as usize)) {
        let (key, value) = item?;
        if args.shape.json {
            let mut line = object([]);
            bytes::put_json(&mut line, "key", &key);
            if args.long {
                describe(&mut line, &value);
            }
            write_json(&mut out, line)?;
        } else if args.long {
            let (bytes, token, lsn) = (value.len(), value.token(), value.lsn());
            writeln!(out, "{bytes:>10} {token:>20} {lsn:>20}  {}", bytes::show(&key, hex))?;
        } else {
            writeln!(out, "{}", bytes::show(&key, hex))?;
        }
    }
    Ok(out.flush()?)
}

fn describe(line: &mut serde_json::Map<String, Json>, value: &Value) {
    line.insert("bytes".to_owned(), value.len().into());
    line.insert("token".to_owned(), value.token().get().into());
    line.insert("lsn".to_owned(), value.lsn().get().into());
}

fn keyspaces(db: &Db, args: &Keys) -> Result<(), Failure> {
    let json = args.shape.json;
    let mut out = out();
    let mut table = table(
        &["keyspace", "scope", "tokens", "jump cap", "floor", if args.long { "keys" } else { "" }],
        &[3, 4, 5],
    );
    for (name, options) in db.keyspaces() {
        let space = keyspace(db, &name)?;
        let floor = space.floor();
        // Counted one by one.
        let keys = match args.long {
            true => Some(space.iter().try_fold(0u64, |keys, item| item.map(|_| keys + 1))?),
            false => None,
        };
        if json {
            let mut line = object([("keyspace", name.into())]);
            describe_options(&mut line, options);
            line.insert("floor".to_owned(), floor.map(|floor| floor.mark.get()).into());
            line.extend(keys.map(|keys| ("keys".to_owned(), keys.into())));
            write_json(&mut out, line)?;
            continue;
        }
        let cap = options.get_token_jump_cap().map_or(String::new(), |cap| cap.to_string());
        let floor = floor.map_or(String::new(), |floor| floor.mark.to_string());
        let (scope, tokens) = (scope(options), tokens(options).to_owned());
        table.add_row([
            name.escape_debug().to_string(),
            scope,
            tokens,
            cap,
            floor,
            keys.map_or(String::new(), |keys| keys.to_string()),
        ]);
    }
    if !json {
        write_table(&mut out, &table)?;
    }
    Ok(out.flush()?)
}

/// The options of a keyspace in JSON, as `dump` writes them too.
pub fn describe_options(line: &mut serde_json::Map<String, Json>, options: KeyspaceOptions) {
    let kind = match options.get_scope() {
        Scope::Prefix(delimiter) => {
            bytes::put_json(line, "delimiter", &[delimiter]);
            "prefix"
        }
        Scope::Keyspace => "keyspace",
        _ => "key",
    };
    line.insert("scope".to_owned(), kind.into());
    line.insert("tokens".to_owned(), tokens(options).into());
    line.insert("jump_cap".to_owned(), options.get_token_jump_cap().into());
}

pub fn scope(options: KeyspaceOptions) -> String {
    match options.get_scope() {
        Scope::Prefix(delimiter) => format!("prefix:{}", bytes::show(&[delimiter], false)),
        Scope::Keyspace => "keyspace".to_owned(),
        _ => "key".to_owned(),
    }
}

pub fn tokens(options: KeyspaceOptions) -> &'static str {
    match options.get_tokens() {
        Tokens::External => "external",
        _ => "store",
    }
}

pub fn get(args: &Get) -> Result<(), Failure> {
    let db = open_to_read(&args.dir.dir)?;
    let space = keyspace(&db, &args.keyspace)?;
    let hex = args.shape.hex;
    let key = bytes::parse(&args.key, hex)?;
    let Some(value) = space.get(&key)? else {
        return Err(Failure::new(REFUSED, format!("\"{}\" has no value", bytes::show(&key, hex))));
    };
    let mut out = out();
    if args.raw {
        out.write_all(&value)?;
    } else if args.shape.json {
        let mut line = object([]);
        bytes::put_json(&mut line, "key", &key);
        bytes::put_json(&mut line, "value", &value);
        describe(&mut line, &value);
        write_json(&mut out, line)?;
    } else {
        writeln!(out, "{}", bytes::show(&value, hex))?;
    }
    Ok(out.flush()?)
}

pub fn holders(args: &Holders) -> Result<(), Failure> {
    let db = open_to_read(&args.dir.dir)?;
    let hex = args.shape.hex;
    let prefix = bytes::parse(&args.prefix, hex)?;
    let names = match &args.keyspace {
        Some(name) => vec![name.clone()],
        None => db.keyspaces().into_iter().map(|(name, _)| name).collect(),
    };
    let mut out = out();
    let mut table = table(&["keyspace", "fence", "token", "owner", "kept at most for"], &[2]);
    for name in names {
        for holder in keyspace(&db, &name)?.holders(&prefix)? {
            let remaining = holder.remaining.map(|time| time.as_nanos() as u64);
            if args.shape.json {
                let mut line = object([("keyspace", name.clone().into())]);
                bytes::put_json(&mut line, "fence", &holder.fence);
                line.extend(object([
                    ("token", holder.token.get().into()),
                    ("owner", holder.owner.to_string().into()),
                    ("remaining_ms", remaining.map(|nanos| nanos.div_ceil(1_000_000)).into()),
                ]));
                write_json(&mut out, line)?;
                continue;
            }
            table.add_row([
                name.escape_debug().to_string(),
                bytes::show(&holder.fence, hex),
                holder.token.to_string(),
                holder.owner.to_string(),
                remaining.map_or("without an end".to_owned(), nanos),
            ]);
        }
    }
    if !args.shape.json {
        write_table(&mut out, &table)?;
    }
    Ok(out.flush()?)
}
