//! A real process is killed with SIGKILL while it writes; what it had reported through a pipe is there.
//!
//! The page cache survives such a kill, so this proves that what was acknowledged had left the process, and
//! that any place to die in leaves a directory that opens; power cuts are `crash.rs`'s.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Options, Scope, Token, Tokens};

const CHILD: &str = "TIDEWALL_KILL_CHILD";
const ROUNDS: &str = "TIDEWALL_KILL_ROUNDS";
const KEYS: u64 = 17;

#[test]
fn acknowledged_writes_and_tokens_survive_sigkill() {
    if let Ok(dir) = std::env::var(CHILD) {
        child(Path::new(&dir));
    }
    let rounds = std::env::var(ROUNDS).ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(200);
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("data");
    let mut seen = Seen::default();
    for round in 0..rounds {
        // How much is read before the kill differs from round to round, from nothing at all on.
        let acknowledgements = round * 7919 % 97;
        let mut process = spawn(&data);
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let first: Vec<_> = lines.by_ref().take(acknowledgements).collect();
        process.kill().expect("killed");
        process.wait().expect("waited for");
        // What it had written to the pipe before it died counts too; its last line may be cut short.
        let rest: Vec<_> = lines.collect();
        for line in first.into_iter().chain(rest) {
            seen.note(&line.expect("text"));
        }
        seen.check(&data, round);
    }
    assert!(seen.values.len() as u64 == KEYS, "the child got to write: {seen:?}");
}

fn spawn(data: &Path) -> Child {
    Command::new(std::env::current_exe().expect("this test"))
        .args(["acknowledged_writes_and_tokens_survive_sigkill", "--exact", "--nocapture"])
        .env(CHILD, data)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts")
}

fn open(data: &Path) -> (Db, Keyspace, Keyspace) {
    let db = Options::new().segment_bytes(64 << 10).open(data).expect("opens after any kill");
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).expect("rows");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).expect("jobs");
    (db, rows, jobs)
}

fn token(number: u64) -> Token {
    Token::new(number).expect("in range")
}

/// Writes for ever, and reports each answer when it has it.
fn child(data: &Path) -> ! {
    let (_db, rows, jobs) = open(data);
    let mut number = rows.get(b"number").expect("reads").map_or(1, |value| parse(&value) + 1);
    let mut out = std::io::stdout();
    loop {
        // A few in flight at once, so that groups hold several frames.
        let commits: Vec<_> = (0..4)
            .map(|_| {
                number += 1;
                let value = number.to_string();
                let key = format!("key-{}", number % KEYS);
                (
                    number,
                    rows.submit_put(token(number), key.as_bytes(), value.as_bytes()).expect("newest token"),
                )
            })
            .collect();
        for (number, commit) in commits {
            commit.wait().expect("durable");
            writeln!(out, "put {number}").expect("the parent listens");
        }
        rows.put(token(number), b"number", number.to_string().as_bytes()).expect("newest token");
        if number % 3 == 0 {
            let lease = jobs.lease(b"job/").acquire().expect("released before");
            writeln!(out, "token {}", lease.token()).expect("the parent listens");
            jobs.put(lease.token(), b"job/result", &number.to_le_bytes()).expect("held");
        }
        out.flush().expect("the parent listens");
    }
}

fn parse(value: &[u8]) -> u64 {
    std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).expect("a number")
}

/// What the child has reported so far.
#[derive(Default, Debug)]
struct Seen {
    values: BTreeMap<u64, u64>,
    token: u64,
}

impl Seen {
    fn note(&mut self, line: &str) {
        match line.split_once(' ') {
            Some(("put", number)) => {
                if let Ok(number) = number.parse::<u64>() {
                    self.values.insert(number % KEYS, number);
                }
            }
            Some(("token", number)) => {
                if let Ok(number) = number.parse::<u64>() {
                    assert!(number > self.token, "token {number} was granted after {}", self.token);
                    self.token = number;
                }
            }
            // The test harness talks too.
            _ => {}
        }
    }

    fn check(&mut self, data: &Path, round: usize) {
        let (db, rows, jobs) = open(data);
        for (slot, &number) in &self.values {
            let key = format!("key-{slot}");
            let found = rows.get(key.as_bytes()).expect("reads").expect("an acknowledged write is there");
            assert!(
                parse(&found) >= number,
                "round {round}: {key} went back from {number} to {}",
                parse(&found)
            );
            assert_eq!(found.token().get(), parse(&found), "round {round}: the token of another write");
            let late = rows.put(token(number.max(2) - 1), key.as_bytes(), b"late");
            assert!(matches!(late, Err(Error::Fenced { .. })), "round {round}: a late write got {late:?}");
        }
        let lease = jobs.lease(b"job/").acquire().expect("reopening ends every lease");
        assert!(lease.token().get() > self.token, "round {round}: a token was granted twice");
        self.token = lease.token().get();
        lease.release().expect("held");
        db.close().expect("closes");
    }
}
