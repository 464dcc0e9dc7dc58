//! `load`: a new store of a dump.
//!
//! Each value is written under the token it had, each mark and floor raised to what it was, through the same
//! checks as any write. Unless the original is closed for ever, what comes of that is restored, as a checkpoint
//! is: the original may have granted tokens since. The store gets its name only when all of it is durable: one
//! with half of its marks would let late writers in.

use crate::args::Load;
use crate::backup::write_need_floor;
use crate::bytes;
use crate::dump::VERSION;
use crate::failure::Failure;
use crate::show::{out, progress};
use indicatif::ProgressBar;
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use tidewall::{Commit, Db, Keyspace, KeyspaceOptions, Mark, Options, Restore, Scope, Token, Tokens};

/// Writes on their way at most, so that their answers come soon.
const WINDOW: usize = 10_000;
/// With a cap on the jumps of tokens: raises on the way from one token of a fence to the next, at most.
const MOST_STEPS: u64 = 1_000_000;

pub fn load(args: &Load) -> Result<(), Failure> {
    if fs::symlink_metadata(&args.dir).is_ok() {
        return Err(Failure::usage(format!(
            "{} exists: a dump becomes a new store, and never goes into another",
            args.dir.display()
        )));
    }
    let (input, len): (Box<dyn io::Read>, _) = match &args.file {
        Some(path) => {
            let failed = |e| Failure::io(&format!("opening {}", path.display()), &e);
            let file = File::open(path).map_err(failed)?;
            let len = file.metadata().map(|of| of.len()).ok();
            (Box::new(file), len)
        }
        None => (Box::new(io::stdin()), None),
    };
    let partial = partial_name(&args.dir)?;
    fs::create_dir(&partial).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => Failure::usage(format!(
            "{} exists: another load is at work, or was killed; then remove it",
            partial.display()
        )),
        _ => Failure::io(&format!("creating {}", partial.display()), &e),
    })?;
    let bar = progress(len, "loading");
    let loaded = make(args, &partial, BufReader::with_capacity(1 << 20, input), &bar);
    bar.finish_and_clear();
    // Made here, and of no use to anybody; what cannot be removed is named by the next try.
    let _ = fs::remove_dir_all(&partial);
    let (counter, need_floor) = loaded?;
    let mut out = out();
    writeln!(out, "loaded: tokens go on above {counter}")?;
    write_need_floor(&mut out, &need_floor)?;
    Ok(out.flush()?)
}

/// Answers the counter of the new store, and which keyspaces need a floor.
fn make(
    args: &Load,
    partial: &Path,
    input: impl BufRead,
    bar: &ProgressBar,
) -> Result<(u64, Vec<String>), Failure> {
    let (dumped, new) = (partial.join("dumped"), partial.join("new"));
    let counter = load_into(&dumped, input, args.is_move, bar)?;
    if args.is_move {
        give_name(&dumped, &args.dir)?;
        return Ok((counter, Vec::new()));
    }
    let mut restore = Restore::new();
    if let Some(past) = args.advance_tokens {
        restore = restore.advance_tokens(Token::new(past)?);
    }
    let restored = restore.run(&dumped, &new)?;
    give_name(&new, &args.dir)?;
    Ok((restored.counter.get(), restored.need_floor))
}

fn partial_name(dir: &Path) -> Result<PathBuf, Failure> {
    let mut name = dir.file_name().ok_or_else(|| Failure::usage("the directory has no name"))?.to_owned();
    name.push(".loading");
    Ok(dir.with_file_name(name))
}

fn give_name(partial: &Path, dir: &Path) -> Result<(), Failure> {
    let failed = |e| Failure::io(&format!("naming {}", dir.display()), &e);
    fs::rename(partial, dir).map_err(failed)?;
    #[cfg(unix)]
    {
        let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new("."))).and_then(|parent| parent.sync_all()).map_err(failed)?;
    }
    Ok(())
}

/// Makes a store that is what was dumped. Answers its counter.
fn load_into(dir: &Path, input: impl BufRead, is_move: bool, bar: &ProgressBar) -> Result<u64, Failure> {
    let db = Options::new().open(dir)?;
    let mut loading = Loading {
        db: &db,
        is_move,
        spaces: BTreeMap::new(),
        in_flight: VecDeque::new(),
        lines: 0,
        is_over: false,
    };
    for (at, line) in input.lines().enumerate() {
        let wrong = |what: String| Failure::usage(format!("line {} of the dump: {what}", at + 1));
        let line = line.map_err(|e| wrong(e.to_string()))?;
        bar.inc(line.len() as u64 + 1);
        let line: Map<String, Json> = serde_json::from_str(&line).map_err(|e| wrong(e.to_string()))?;
        match loading.line(&line) {
            Ok(()) => {}
            Err(Wrong::Line(what)) => return Err(wrong(what)),
            Err(Wrong::Store(error)) => {
                let mut failure = Failure::from(error);
                failure.message = failure.message.map(|said| format!("line {} of the dump: {said}", at + 1));
                return Err(failure);
            }
        }
    }
    if !loading.is_over {
        return Err(Failure::usage("the dump ends before its last line: it is not whole"));
    }
    loading.settle(0)?;
    drop(loading);
    let counter = db.highest_token()?.map_or(0, Mark::get);
    db.close()?;
    Ok(counter)
}

/// Why a line is not loaded.
enum Wrong {
    Line(String),
    Store(tidewall::Error),
}

impl From<tidewall::Error> for Wrong {
    fn from(error: tidewall::Error) -> Self {
        Wrong::Store(error)
    }
}

impl From<String> for Wrong {
    fn from(what: String) -> Self {
        Wrong::Line(what)
    }
}

struct Loading<'d> {
    db: &'d Db,
    /// Nothing asks for a floor of the keyspaces of external tokens behind this.
    is_move: bool,
    /// With the highest token that each was written with.
    spaces: BTreeMap<String, (Keyspace, u64)>,
    in_flight: VecDeque<Commit>,
    lines: u64,
    is_over: bool,
}

impl Loading<'_> {
    fn line(&mut self, line: &Map<String, Json>) -> Result<(), Wrong> {
        if self.is_over {
            return Err("it comes behind the last one".to_owned().into());
        }
        if self.lines == 0 {
            match number(line, "tidewall_dump") {
                Ok(VERSION) => {}
                Ok(other) => return Err(format!("version {other} of the form is not known").into()),
                Err(_) => return Err("this is no dump of a tidewall".to_owned().into()),
            }
            let counter = number(line, "counter")?;
            if counter > 0 {
                self.db.advance_tokens(Token::new(counter)?)?;
            }
        } else if line.contains_key("end") {
            if number(line, "lines")? != self.lines {
                return Err(format!("{} lines came before it: some are missing", self.lines).into());
            }
            self.is_over = true;
        } else {
            self.keyspace_line(line)?;
        }
        self.lines += 1;
        Ok(())
    }

    fn keyspace_line(&mut self, line: &Map<String, Json>) -> Result<(), Wrong> {
        let name = text(line, "keyspace")?;
        if line.contains_key("scope") {
            if self.is_move && line.get("needs_floor") == Some(&Json::Bool(true)) {
                return Err(format!(
                    "{name:?} needs a floor: load without --move, or raise it where it was dumped (`raise --all`) \
                     and dump again"
                )
                .into());
            }
            let space = self.db.keyspace(name, options(line)?)?;
            self.spaces.insert(name.to_owned(), (space, 0));
            return Ok(());
        }
        let (space, _) =
            self.spaces.get(name).ok_or_else(|| format!("keyspace {name:?} comes before its options"))?;
        let space = space.clone();
        if let Some(key) = bytes::get_json(line, "key")? {
            let value = bytes::get_json(line, "value")?.ok_or_else(|| "it has no value".to_owned())?;
            let token = Token::new(number(line, "token")?)?;
            self.step_up(&space, &key, token)?;
            let mut batch = self.db.batch();
            batch.raise(&space, token, &key)?;
            if let Err(tidewall::Error::TooLarge { .. }) = batch.put(&space, token, &key, &value) {
                // It fitted a batch of its own; nobody sees what is between the two.
                self.submitted(batch.submit()?, name, token)?;
                batch = self.db.batch();
                batch.put(&space, token, &key, &value)?;
            }
            self.submitted(batch.submit()?, name, token)?;
        } else if let Some(fence) = bytes::get_json(line, "fence")? {
            let token = Token::new(number(line, "mark")?)?;
            self.step_up(&space, &fence, token)?;
            let mut batch = self.db.batch();
            batch.raise(&space, token, &fence)?;
            self.submitted(batch.submit()?, name, token)?;
        } else {
            let token = Token::new(number(line, "floor")?)?;
            match line.get("exclusive") {
                Some(Json::Bool(true)) => space.raise_all_past(token)?,
                _ => space.raise_all(token)?,
            };
        }
        Ok(())
    }

    fn submitted(&mut self, commit: Commit, space: &str, token: Token) -> Result<(), Wrong> {
        if let Some((_, highest)) = self.spaces.get_mut(space) {
            *highest = token.get().max(*highest);
        }
        self.in_flight.push_back(commit);
        Ok(self.settle(WINDOW)?)
    }

    fn settle(&mut self, most: usize) -> Result<(), tidewall::Error> {
        while self.in_flight.len() > most
            && let Some(commit) = self.in_flight.pop_front()
        {
            commit.wait()?;
        }
        Ok(())
    }

    /// Raises the fence by no more than the cap at a time, where the keyspace has one, up to where `token` may
    /// follow: what it once passed on the way is not in the dump.
    fn step_up(&mut self, space: &Keyspace, key: &[u8], token: Token) -> Result<(), Wrong> {
        let Some(cap) = space.options().get_token_jump_cap() else { return Ok(()) };
        let highest = self.spaces.get(space.name()).map_or(0, |&(_, highest)| highest);
        if highest == 0 || token.get() <= highest.saturating_add(cap) {
            return Ok(());
        }
        if (token.get() - highest) / cap > MOST_STEPS {
            return Err(format!(
                "token {token} is more than {MOST_STEPS} times the cap {cap} above {highest}"
            )
            .into());
        }
        let mut step = highest + cap;
        while step < token.get() {
            let mut batch = self.db.batch();
            batch.raise(space, Token::new(step)?, key)?;
            self.submitted(batch.submit()?, space.name(), Token::new(step)?)?;
            step += cap;
        }
        Ok(())
    }
}

fn number(line: &Map<String, Json>, name: &str) -> Result<u64, String> {
    line.get(name).and_then(Json::as_u64).ok_or_else(|| format!("{name:?} is missing, or is no number"))
}

fn text<'l>(line: &'l Map<String, Json>, name: &str) -> Result<&'l str, String> {
    line.get(name).and_then(Json::as_str).ok_or_else(|| format!("{name:?} is missing, or is no text"))
}

fn options(line: &Map<String, Json>) -> Result<KeyspaceOptions, String> {
    let scope = match text(line, "scope")? {
        "key" => Scope::Key,
        "keyspace" => Scope::Keyspace,
        "prefix" => match bytes::get_json(line, "delimiter")?.as_deref() {
            Some(&[delimiter]) => Scope::Prefix(delimiter),
            _ => return Err("the delimiter is not one byte".to_owned()),
        },
        other => return Err(format!("scope {other:?} is not known")),
    };
    let tokens = match text(line, "tokens")? {
        "store" => Tokens::Store,
        "external" => Tokens::External,
        other => return Err(format!("tokens {other:?} are not known")),
    };
    let options = KeyspaceOptions::new().scope(scope).tokens(tokens);
    Ok(match line.get("jump_cap") {
        None | Some(Json::Null) => options,
        Some(_) => options.token_jump_cap(number(line, "jump_cap")?),
    })
}
