//! The command line, run as a user runs it: every command for people and for scripts, every exit code.

use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tidewall::*;

/// What a run of the program came to.
#[derive(Debug)]
struct Run {
    code: i32,
    out: String,
    err: String,
}

impl Run {
    /// The output of a run that ended well.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        assert_eq!(self.err, "", "a run that ended well is silent on the standard error");
        self.out
    }

    #[track_caller]
    fn json(self) -> Vec<Json> {
        self.ok().lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    #[track_caller]
    fn fails(self, code: i32, says: &str) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains(says), "{says:?} is not in {self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
        self
    }
}

struct Place {
    _scratch: tempfile::TempDir,
    dir: PathBuf,
}

impl Place {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("data");
        Place { _scratch: scratch, dir }
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.dir.with_file_name(name)
    }

    /// `command DIR rest...`, for this store.
    fn run<const N: usize>(&self, command: &str, rest: [&str; N]) -> Run {
        run(command, &self.dir, &rest, b"")
    }

    /// Keyspaces of each kind, with marks, floors, values and a counter.
    fn filled() -> Self {
        let place = Place::new();
        let db = open(Options::new(), &place.dir);
        let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
        let first = jobs.lease(b"7/").acquire().unwrap();
        jobs.put(first.token(), b"7/draft", b"by the first").unwrap();
        first.release().unwrap();
        let second = jobs.lease(b"7/").acquire().unwrap();
        jobs.put(second.token(), b"7/result", b"by the second").unwrap();
        jobs.put(second.token(), b"7/gone", b"x").unwrap();
        jobs.delete(second.token(), b"7/gone").unwrap();
        let other = jobs.lease(b"8/").acquire().unwrap();
        jobs.put(other.token(), b"8/\xff\x00", b"\x80\n").unwrap();
        // Of the leases one is left behind, as by a crash.
        second.release().unwrap();
        std::mem::forget(other);
        let rows = db.keyspace("rows", external()).unwrap();
        rows.put(token(10), b"a", b"1").unwrap();
        rows.put(token(30), b"b", b"2").unwrap();
        rows.delete(token(31), b"b").unwrap();
        rows.raise(token(99), b"never written").unwrap();
        let capped = db.keyspace("capped", external().scope(Scope::Keyspace).token_jump_cap(10)).unwrap();
        for number in (5..=95).step_by(10) {
            capped.put(token(number), format!("k{number:02}").as_bytes(), b"v").unwrap();
        }
        // What is left is further apart than the cap.
        capped.delete_prefix(token(95), b"k2").unwrap();
        capped.delete_prefix(token(95), b"k3").unwrap();
        capped.delete_prefix(token(95), b"k4").unwrap();
        let cut = db.keyspace("cut", external()).unwrap();
        cut.put(token(1), b"old", b"1").unwrap();
        cut.raise_all(token(50)).unwrap();
        cut.put(token(60), b"new", b"2").unwrap();
        let past = db.keyspace("past", KeyspaceOptions::new()).unwrap();
        past.raise_all_past(token(2)).unwrap();
        db.keyspace("empty", KeyspaceOptions::new().scope(Scope::Keyspace)).unwrap();
        db.advance_tokens(token(500)).unwrap();
        db.close().unwrap();
        place
    }
}

/// A child that another test is starting has the locks of this process until it is a program of its own, so a
/// store that was just closed may be locked for a moment.
fn run(command: &str, dir: &Path, rest: &[&str], input: &[u8]) -> Run {
    let mut run = run_once(command, dir, rest, input);
    for _ in 0..100 {
        if run.code != 4 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        run = run_once(command, dir, rest, input);
    }
    run
}

/// The same in this process.
fn open(options: Options, dir: &Path) -> Db {
    loop {
        match options.clone().open(dir) {
            Err(Error::Locked { .. }) => std::thread::sleep(Duration::from_millis(20)),
            opened => return opened.unwrap(),
        }
    }
}

fn run_once(command: &str, dir: &Path, rest: &[&str], input: &[u8]) -> Run {
    let mut child = program(command, dir, rest).stdin(Stdio::piped()).spawn().unwrap();
    // It may end before it has read all.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: output.status.code().expect("no signal"), out: text(output.stdout), err: text(output.stderr) }
}

fn program(command: &str, dir: &Path, rest: &[&str]) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_tidewall"));
    program.arg(command).arg(dir).args(rest).stdout(Stdio::piped()).stderr(Stdio::piped());
    program
}

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

fn external() -> KeyspaceOptions {
    KeyspaceOptions::new().tokens(Tokens::External)
}

/// Every file of a directory.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

/// The seventeen lines that follow from one another: write, read, write again, delete.
#[test]
fn values_go_in_and_come_out() {
    let at = Place::new();
    let said = at.run("put", ["rows", "a", "one", "--token", "5", "--create", "--tokens", "external"]).ok();
    assert_eq!(said, "written: token 5, lsn 2\n");
    assert_eq!(at.run("get", ["rows", "a"]).ok(), "one\n");
    assert_eq!(at.run("get", ["rows", "a", "--raw"]).ok(), "one");
    let got = at.run("get", ["rows", "a", "--json"]).json();
    let wanted = serde_json::json!({"key": "a", "value": "one", "bytes": 3, "token": 5, "lsn": 2});
    assert_eq!(got, [wanted]);
    let written = at.run("put", ["rows", "b", "two", "--token", "6", "--json"]).json();
    assert_eq!(written, [serde_json::json!({"done": "written", "token": 6, "lsn": 3})]);
    assert_eq!(at.run("keys", ["rows"]).ok(), "a\nb\n");
    assert_eq!(at.run("keys", ["rows", "--reverse", "--limit", "1"]).ok(), "b\n");
    assert_eq!(at.run("keys", ["rows", "--prefix", "b"]).ok(), "b\n");
    let long = at.run("keys", ["rows", "--long", "--json"]).json();
    assert_eq!(long[1], serde_json::json!({"key": "b", "bytes": 3, "token": 6, "lsn": 3}));
    let long = at.run("keys", ["rows", "--long"]).ok();
    assert!(long.lines().nth(1).unwrap().split_whitespace().eq(["3", "5", "2", "a"]), "{long}");
    let spaces = at.run("keys", ["--json", "--long"]).json();
    assert_eq!((&spaces[0]["keyspace"], &spaces[0]["keys"]), (&"rows".into(), &2.into()));
    assert!(at.run("keys", []).ok().contains("external"));
    assert_eq!(at.run("delete", ["rows", "a", "--token", "7"]).ok(), "deleted: token 7, lsn 4\n");
    at.run("get", ["rows", "a"]).fails(1, "\"a\" has no value");
    assert_eq!(at.run("delete", ["rows", "--prefix", "", "--token", "9"]).ok(), "deleted: token 9, keys 1\n");
    assert_eq!(at.run("keys", ["rows"]).ok(), "");
}

#[test]
fn a_lease_is_taken_for_the_command() {
    let at = Place::new();
    let create = ["jobs", "7/a", "v", "--acquire", "--create", "--scope", "prefix:/"];
    assert!(at.run("put", create).ok().starts_with("written: token 1, "));
    assert!(at.run("put", ["jobs", "7/b", "v", "--acquire"]).ok().starts_with("written: token 2, "));
    at.run("put", ["jobs", "7/a", "late", "--token", "1"]).fails(1, "fenced");
    at.run("put", ["jobs", "7/a", "v", "--token", "2"]).ok();
    assert!(at.run("delete", ["jobs", "7/a", "--acquire"]).ok().starts_with("deleted: token 3, "));
    // It was given back: nobody is listed.
    assert_eq!(at.run("holders", ["--json"]).json(), [Json::Null; 0]);
}

#[test]
fn conditions_and_numbers_of_operations_are_those_of_the_store() {
    let at = Place::new();
    let put = |rest: &[&str]| run("put", &at.dir, &[&["rows", "a", "v"], rest].concat(), b"");
    put(&["--token", "1", "--create", "--tokens", "external", "--if-present"]).fails(1, "no value");
    put(&["--token", "1", "--if-absent"]).ok();
    // On a busy machine an idle frame may have come before it.
    let db = open(Options::new().read_only(), &at.dir);
    let lsn = db.keyspace("rows", external()).unwrap().get(b"a").unwrap().unwrap().lsn().get();
    drop(db);
    put(&["--token", "1", "--if-absent"]).fails(1, &format!("a value of lsn {lsn}"));
    put(&["--token", "1", "--if-version", "99"]).fails(1, &format!("a value of lsn {lsn}"));
    put(&["--token", "1", "--if-version", &lsn.to_string()]).ok();
    put(&["--token", "1", "--operation", "4"]).ok();
    put(&["--token", "1", "--operation", "4"]).fails(1, "already committed");
    put(&["--token", "1", "--operation", "3"]).fails(1, "older");
    at.run("delete", ["rows", "b", "--token", "1", "--if-present"]).fails(1, "no value");
}

#[test]
fn every_byte_can_be_named_and_is_shown_so() {
    let at = Place::new();
    let all: Vec<u8> = (0..=255).collect();
    let escaped = all.escape_ascii().to_string();
    let hex: String = all.iter().map(|byte| format!("{byte:02x}")).collect();
    at.run("put", ["rows", &escaped, &escaped, "--token", "1", "--create", "--tokens", "external"]).ok();
    let db = open(Options::new().read_only(), &at.dir);
    let rows = db.keyspace("rows", external()).unwrap();
    assert_eq!(rows.get(&all).unwrap().unwrap().bytes(), all);
    drop((db, rows));
    assert_eq!(at.run("keys", ["rows"]).ok(), format!("{escaped}\n"));
    assert_eq!(at.run("keys", ["rows", "--hex"]).ok(), format!("{hex}\n"));
    assert_eq!(at.run("get", ["rows", &hex, "--hex"]).ok(), format!("{hex}\n"));
    assert_eq!(at.run("get", ["rows", &escaped, "--json"]).json()[0]["value_hex"], hex);
    // From the standard input a value is taken as it is.
    run("put", &at.dir, &["rows", "in", "-", "--token", "1"], b"\\x00\xff").fails_not("put");
    let raw = program("get", &at.dir, &["rows", "in", "--raw"]).output().unwrap();
    assert_eq!(raw.stdout, b"\\x00\xff");
}

impl Run {
    #[track_caller]
    fn fails_not(self, what: &str) {
        assert_eq!(self.code, 0, "{what}: {self:?}");
    }
}

#[test]
fn a_raise_fences_out_who_is_below() {
    let at = Place::new();
    at.run("put", ["rows", "a", "v", "--token", "5", "--create", "--tokens", "external"]).ok();
    assert!(at.run("raise", ["rows", "a", "--token", "8"]).ok().starts_with("raised: token 8, "));
    assert_eq!(at.run("raise", ["rows", "a", "--token", "8"]).ok(), "raised before: token 8\n");
    at.run("raise", ["rows", "a", "--token", "7"]).fails(1, "fenced");
    at.run("put", ["rows", "a", "v", "--token", "7"]).fails(1, "fenced");
    at.run("raise", ["rows", "--all", "--token", "20"]).ok();
    at.run("put", ["rows", "b", "v", "--token", "19"]).fails(1, "fenced");
    at.run("put", ["rows", "b", "v", "--token", "20"]).ok();
    at.run("raise", ["rows", "--all", "--past", "--token", "20"]).ok();
    at.run("put", ["rows", "b", "v", "--token", "20"]).fails(1, "fenced");
    let spaces = at.run("keys", ["--json"]).json();
    assert_eq!(spaces[0]["floor"], 20);
}

#[test]
fn what_cannot_be_right_is_a_usage_error() {
    let at = Place::new();
    at.run("put", ["rows", "a", "v", "--token", "5", "--create", "--tokens", "external"]).ok();
    let incarnation = || at.run("info", ["--json"]).json()[0]["incarnation"].clone();
    let before = incarnation();
    for (command, rest, says) in [
        ("put", vec!["rows", "a", "v"], "--token"),
        ("put", vec!["rows", "a", "v", "--token", "0"], "token"),
        ("put", vec!["rows", "a", "v", "--token", "9223372036854775808"], "token"),
        ("put", vec!["rows", "a", "v", "--token", "5", "--acquire"], "cannot be used"),
        ("put", vec!["rows", "a\\q", "v", "--token", "5"], "is no escape"),
        ("put", vec!["rows", "abc", "v", "--token", "5", "--hex"], "two digits"),
        ("put", vec!["rows", "a", "v", "--token", "5", "--operation", "0"], "from 1"),
        ("put", vec!["rows", "a", "v", "--token", "5", "--create", "--scope", "prefix:ab"], "one byte"),
        ("put", vec!["rows", "a", "v", "--token", "5", "--create", "--scope", "some"], "no scope"),
        ("delete", vec!["rows", "--token", "5"], "KEY"),
        ("raise", vec!["rows", "--token", "5"], "KEY"),
        ("raise", vec!["rows", "a", "--past", "--token", "5"], "cannot be used"),
        ("stats", vec!["--watch", "0"], "0"),
        ("bench", vec![], "exists"),
        ("load", vec![], "exists"),
        ("nonsense", vec![], "unrecognized"),
    ] {
        run(command, &at.dir, &rest, b"").fails(2, says);
    }
    assert_eq!(incarnation(), before, "a command line that is refused does not so much as open the store");
    at.run("get", ["else", "a"]).fails(2, "there is \"rows\"");
    at.run("put", ["rows", "", "v", "--token", "5"]).fails(2, "key");
    at.run("put", ["rows", "b", "v", "--acquire"]).fails(2, "lease");
    at.run("log", ["77"]).fails(2, "no segment 77");
}

#[test]
fn no_store_and_damage_have_their_codes() {
    let at = Place::new();
    for command in ["info", "stats", "log", "keys", "holders", "dump"] {
        run(command, &at.dir, &[], b"").fails(5, "does not exist");
    }
    at.run("put", ["rows", "a", "v", "--token", "1"]).fails(5, "does not exist");
    assert!(!at.dir.exists(), "nothing was made");
    fs::create_dir(&at.dir).unwrap();
    for command in ["info", "stats", "log", "keys", "holders", "dump"] {
        run(command, &at.dir, &[], b"").fails(5, "");
    }
    assert_eq!(files(&at.dir), BTreeMap::new(), "nothing was made");

    let at = Place::filled();
    let sound = files(&at.dir);
    // A byte of a value in the middle of the log.
    let segment = at.dir.join("000001.seg");
    let mut bytes = fs::read(&segment).unwrap();
    let place = bytes.windows(12).position(|window| window == b"by the first").unwrap();
    bytes[place] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    let told = at.run("log", []).fails(3, "000001.seg at offset");
    assert!(told.out.contains("is \"jobs\""), "what lies in front of it is shown: {told:?}");
    at.run("get", ["jobs", "7/draft"]).fails(3, "corrupt");
    // One copy of STORE, then both.
    let store = at.dir.join("STORE");
    let mut bytes = sound["STORE"].clone();
    bytes[20] ^= 1;
    fs::write(&store, &bytes).unwrap();
    assert!(at.run("info", []).fails(3, "damage").out.contains("one of its two copies is damaged"));
    let half = bytes.len() / 2;
    bytes[half + 20] ^= 1;
    fs::write(&store, &bytes).unwrap();
    for command in ["info", "stats", "log", "keys"] {
        run(command, &at.dir, &[], b"").fails(3, "STORE");
    }
    // A segment that is gone, and one that is cut.
    fs::write(&store, &sound["STORE"]).unwrap();
    fs::write(&segment, &sound["000001.seg"][..5000]).unwrap();
    assert!(at.run("info", []).fails(3, "damage").out.contains("the file is cut"));
    fs::remove_file(&segment).unwrap();
    assert!(at.run("info", []).fails(3, "damage").out.contains("the file is missing"));
    at.run("log", ["1"]).fails(3, "missing");
}

/// What only looks changes nothing, down to the last byte of the directory.
#[test]
fn commands_that_read_leave_the_files_as_they_are() {
    let at = Place::filled();
    let before = files(&at.dir);
    at.run("info", []).ok();
    at.run("stats", []).ok();
    at.run("log", ["--values"]).ok();
    at.run("keys", ["jobs"]).ok();
    at.run("get", ["jobs", "7/result"]).ok();
    at.run("holders", []).ok();
    at.run("dump", []).ok();
    assert!(files(&at.dir) == before);
    at.run("put", ["rows", "a", "v", "--token", "99"]).ok();
    assert!(files(&at.dir) != before);
}

#[test]
fn a_writing_command_begins_an_incarnation_and_says_so() {
    let at = Place::filled();
    let incarnation = || at.run("info", ["--json"]).json()[0]["incarnation"].clone();
    let before = incarnation();
    at.run("keys", ["jobs"]).ok();
    assert_eq!(incarnation(), before);
    at.run("raise", ["rows", "a", "--token", "99"]).ok();
    assert_ne!(incarnation(), before);
    for command in ["put", "delete", "raise", "compact", "checkpoint"] {
        let help = run(command, Path::new("--help"), &[], b"").ok();
        let words: Vec<&str> = help.split_whitespace().collect();
        assert!(words.join(" ").contains("Begins an incarnation, and so costs a grace"), "{help}");
    }
}

#[test]
fn holders_are_those_of_the_last_incarnation_who_gave_nothing_back() {
    let at = Place::filled();
    let held = at.run("holders", ["--json"]).json();
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!((&held[0]["keyspace"], &held[0]["fence"]), (&"jobs".into(), &"8/".into()));
    assert_eq!(held[0]["token"], 3);
    let remaining = held[0]["remaining_ms"].as_u64().unwrap();
    assert!((1..=10_000).contains(&remaining), "{remaining} of a ttl of 10 s");
    let shown = at.run("holders", ["jobs"]).ok();
    assert!(shown.contains("8/") && shown.contains(" s"), "{shown}");
    assert_eq!(at.run("holders", ["jobs", "--prefix", "7", "--json"]).json().len(), 0);
    at.run("put", ["rows", "a", "v", "--token", "99"]).ok();
    assert_eq!(at.run("holders", ["--json"]).json().len(), 0, "a writing command costs the grace");
}

/// The lines of a dump, without what differs from store to store.
fn without_ids(dump: &str) -> Vec<Json> {
    let mut lines: Vec<Json> = dump.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let head = lines[0].as_object_mut().unwrap();
    assert!(head.remove("store_id").is_some() && head.remove("lsn").is_some());
    lines
}

#[test]
fn a_dump_that_moves_house_becomes_a_store_with_the_same_dump() {
    let at = Place::filled();
    let dump = at.run("dump", []).ok();
    let lines = without_ids(&dump);
    for wanted in [
        serde_json::json!({"tidewall_dump": 1, "counter": 500}),
        serde_json::json!({"keyspace": "jobs", "scope": "prefix", "delimiter": "/", "tokens": "store",
            "jump_cap": null, "needs_floor": false}),
        serde_json::json!({"keyspace": "jobs", "key": "7/draft", "value": "by the first", "token": 1}),
        serde_json::json!({"keyspace": "jobs", "fence": "7/", "mark": 2}),
        serde_json::json!({"keyspace": "jobs", "key_hex": "382fff00", "value_hex": "800a", "token": 3}),
        serde_json::json!({"keyspace": "rows", "fence": "b", "mark": 31}),
        serde_json::json!({"keyspace": "rows", "fence": "never written", "mark": 99}),
        serde_json::json!({"keyspace": "cut", "floor": 50, "exclusive": false}),
        serde_json::json!({"keyspace": "past", "floor": 2, "exclusive": true}),
        serde_json::json!({"end": true, "lines": lines.len() - 1}),
    ] {
        let shown = lines.iter().any(|line| {
            let has = |(name, value): (&String, &Json)| line.get(name) == Some(value);
            wanted.as_object().unwrap().iter().all(has)
        });
        assert!(shown, "{wanted} is not in\n{dump}");
    }
    assert!(!dump.contains("gone"), "a deleted key");
    let copy = at.beside("copy");
    let told = run("load", &copy, &["--move"], dump.as_bytes()).ok();
    assert_eq!(told, "loaded: tokens go on above 500\n");
    assert_eq!(without_ids(&run("dump", &copy, &[], b"").ok()), lines);
    // The file is as good as the standard input.
    let file = at.beside("dump.jsonl");
    fs::write(&file, &dump).unwrap();
    let second = at.beside("second");
    run("load", &second, &["--move", file.to_str().unwrap()], b"").ok();
    assert_eq!(without_ids(&run("dump", &second, &[], b"").ok()), lines);
    let id = |dir: &Path| run("info", dir, &["--json"], b"").json()[0]["store_id"].clone();
    assert!(id(&copy) != id(&at.dir) && id(&copy) != id(&second));

    // Late writers are fenced there too, and tokens go on where they were.
    let late = |space, key, token| run("put", &copy, &[space, key, "late", "--token", token], b"");
    late("jobs", "7/draft", "1").fails(1, "fenced");
    late("rows", "b", "30").fails(1, "fenced");
    late("rows", "never written", "98").fails(1, "fenced");
    late("cut", "anything", "49").fails(1, "fenced");
    late("past", "anything", "2").fails(1, "fenced");
    late("capped", "k05", "94").fails(1, "fenced");
    late("capped", "k05", "106").fails(1, "jumps");
    let next = run("put", &copy, &["jobs", "9/", "v", "--acquire"], b"").ok();
    assert!(next.starts_with("written: token 501, "), "{next}");
    let part = at.run("dump", ["--keyspace", "rows"]).ok();
    assert!(part.contains("never written") && !part.contains("jobs"), "{part}");
}

/// It fits a batch of its own, and none with anything beside it.
#[test]
fn the_largest_value_there_can_be_moves_house() {
    let at = Place::new();
    let db = open(Options::new(), &at.dir);
    let rows = db.keyspace("rows", KeyspaceOptions::new().tokens(Tokens::External)).unwrap();
    let mut value = vec![b'v'; MAX_BATCH_BYTES];
    let Err(Error::TooLarge { size, limit, .. }) = rows.put(Token::new(7).unwrap(), b"key", &value) else {
        panic!("it is too large")
    };
    value.truncate(MAX_BATCH_BYTES - (size - limit));
    rows.put(Token::new(7).unwrap(), b"key", &value).unwrap();
    drop(rows);
    db.close().unwrap();
    let dump = at.run("dump", []).ok();
    let copy = at.beside("copy");
    run("load", &copy, &["--move"], dump.as_bytes()).ok();
    let rows = open(Options::new(), &copy).open_keyspace("rows").unwrap().unwrap();
    assert!(rows.get(b"key").unwrap().unwrap().bytes() == value);
    assert_eq!(rows.mark(b"key").unwrap().unwrap().get(), 7);
}

/// The original goes on after its dump: nothing that it grants is granted again or admitted by what is loaded.
#[test]
fn what_the_original_grants_after_its_dump_is_fenced_where_it_is_loaded() {
    let at = Place::filled();
    let dump = at.run("dump", []).ok();
    let db = open(Options::new(), &at.dir);
    let jobs = db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/'))).unwrap();
    let late = jobs.lease(b"9/").acquire().unwrap().token().get().to_string();
    assert_eq!(late, "501", "the dump knows of 500");
    drop(jobs);
    db.close().unwrap();

    let copy = at.beside("copy");
    let told = run("load", &copy, &[], dump.as_bytes()).ok();
    let above: u64 = 500 + (1 << 32);
    assert!(told.starts_with(&format!("loaded: tokens go on above {above}\n")), "{told}");
    for name in ["rows", "capped", "cut"] {
        assert!(told.contains(&format!("keyspace {name:?} needs a floor: ")), "{told}");
    }
    assert!(!at.beside("copy.loading").exists());
    let put = |dir: &Path, rest: &[&str]| run("put", dir, rest, b"");
    let next = put(&copy, &["jobs", "9/", "v", "--acquire"]).ok();
    assert!(next.starts_with(&format!("written: token {}, ", above + 1)), "{next}");
    for key in ["9/", "7/result", "never seen"] {
        put(&copy, &["jobs", key, "late", "--token", &late]).fails(1, "fenced");
    }
    put(&copy, &["past", "anything", "late", "--token", "500"]).fails(1, "fenced");
    // Tokens from elsewhere are admitted once the floor is told, and not by what the dump knows.
    put(&copy, &["rows", "a", "late", "--token", "10"]).fails(1, "raise_all");
    run("raise", &copy, &["rows", "--all", "--token", "200"], b"").ok();
    put(&copy, &["rows", "a", "late", "--token", "199"]).fails(1, "fenced");
    put(&copy, &["rows", "a", "new", "--token", "200"]).ok();
    // Values stay what they are, under their own tokens.
    let values = |dump: &str| -> Vec<Json> {
        let lines = without_ids(dump).into_iter();
        lines.filter(|line| line.get("token").is_some() && line["keyspace"] != "rows").collect()
    };
    let again = run("dump", &copy, &[], b"").ok();
    let (before, mut after) = (values(&dump), values(&again));
    after.retain(|line| line["key"] != "9/");
    assert!(before.len() > 8);
    let sorted = |mut lines: Vec<Json>| -> Vec<String> {
        lines.sort_by_key(Json::to_string);
        lines.iter().map(Json::to_string).collect()
    };
    assert_eq!(sorted(after), sorted(before));

    // A dump of that, with keyspaces that need a floor, is loaded as well; and a token seen elsewhere counts.
    let third = at.beside("third");
    let seen = (above * 4).to_string();
    let told = run("load", &third, &["--advance-tokens", &seen], again.as_bytes()).ok();
    assert!(told.starts_with(&format!("loaded: tokens go on above {}\n", above * 4 + (1 << 32))), "{told}");
    put(&third, &["capped", "k05", "late", "--token", "95"]).fails(1, "raise_all");
    run("verify", &third, &[], b"").ok();
}

/// What compaction leaves is dumped and loaded as well: marks without values, floors over folded marks.
#[test]
fn a_compacted_store_moves_house_too() {
    let at = Place::filled();
    let db = open(Options::new(), &at.dir);
    let once = db.keyspace("once", KeyspaceOptions::new()).unwrap();
    for n in 0..200u32 {
        let lease = once.lease(&n.to_be_bytes()).acquire().unwrap();
        once.put(lease.token(), &n.to_be_bytes(), &[7; 1000]).unwrap();
        once.delete(lease.token(), &n.to_be_bytes()).unwrap();
    }
    let last = once.lease(b"last").acquire().unwrap();
    once.put(last.token(), b"last", b"v").unwrap();
    last.release().unwrap();
    drop(once);
    db.close().unwrap();
    let values = |dump: &str| -> Vec<Json> {
        without_ids(dump).into_iter().filter(|line| line.get("token").is_some()).collect()
    };
    let before = values(&at.run("dump", []).ok());
    assert_eq!(before.len(), 14);
    // What was granted by the incarnation just before is still respected: the second time it is history.
    at.run("compact", []).ok();
    let said = at.run("compact", ["--json"]).json();
    assert_eq!(said[0]["done"], "given back");
    let dump = at.run("dump", []).ok();
    assert_eq!(values(&dump), before, "{dump}");
    let folded =
        without_ids(&dump).into_iter().find(|line| line["keyspace"] == "once" && line["floor"].is_u64());
    assert!(folded.is_some_and(|line| line["exclusive"] == true), "{dump}");
    let copy = at.beside("copy");
    run("load", &copy, &["--move"], dump.as_bytes()).ok();
    assert_eq!(without_ids(&run("dump", &copy, &[], b"").ok()), without_ids(&dump));
    for dir in [&at.dir, &copy] {
        run("put", dir, &["once", "\\0\\0\\0\\0", "late", "--token", "501"], b"").fails(1, "fenced");
    }
}

#[test]
fn copies_are_made_and_damage_is_found_and_left_behind() {
    let at = Place::filled();
    let said = at.run("verify", ["--json"]).json();
    assert_eq!((&said[0]["sound"], &said[0]["faults"]), (&true.into(), &Json::Array(Vec::new())));
    assert!(at.run("verify", []).ok().contains("sound: "));
    let (copy, restored, rest) = (at.beside("copy"), at.beside("restored"), at.beside("rest"));
    let name = |dir: &Path| dir.to_str().unwrap().to_owned();
    assert!(at.run("checkpoint", [&name(&copy)]).ok().starts_with("checkpoint as of lsn "));
    at.run("checkpoint", [&name(&copy)]).fails(2, "empty");
    assert_eq!(run("info", &copy, &["--json"], b"").json()[0]["is_checkpoint"], true);
    run("put", &copy, &["rows", "a", "v", "--token", "99"], b"").fails(2, "checkpoint");
    let said = run("restore", &copy, &[&name(&restored), "--json"], b"").json();
    assert!(said[0]["counter"].as_u64() > Some(500), "{said:?}");
    assert!(said[0]["needs_floor"].as_array().unwrap().contains(&"rows".into()), "{said:?}");
    run("put", &restored, &["rows", "a", "v", "--token", "99"], b"").fails(1, "raise_all");
    run("raise", &restored, &["rows", "--all", "--token", "99"], b"").ok();
    run("put", &restored, &["rows", "a", "v", "--token", "99"], b"").ok();

    let segment = at.dir.join("000001.seg");
    let mut bytes = fs::read(&segment).unwrap();
    let place = bytes.windows(12).position(|window| window == b"by the first").unwrap();
    bytes[place] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    let before = files(&at.dir);
    let told = at.run("verify", []).fails(3, "damage was found");
    assert!(told.out.contains("damage: 000001.seg at offset"), "{told:?}");
    let told = at.run("salvage", [&name(&rest), "--json"]).fails(3, "damage was found");
    assert!(told.out.contains("000001.seg"), "{told:?}");
    assert!(files(&at.dir) == before, "neither changes a byte");
    run("get", &rest, &["jobs", "7/result"], b"").ok();
    run("verify", &rest, &[], b"").ok();
}

#[test]
fn what_is_no_whole_dump_leaves_nothing_behind() {
    let at = Place::filled();
    let dump = at.run("dump", []).ok();
    let lines: Vec<&str> = dump.lines().collect();
    let copy = at.beside("copy");
    let load = |text: &str, code, says: &str| {
        run("load", &copy, &[], text.as_bytes()).fails(code, says);
        assert!(!copy.exists() && !at.beside("copy.loading").exists(), "{says}");
    };
    load("", 2, "not whole");
    load("not JSON\n", 2, "line 1");
    load("{}\n", 2, "no dump");
    load("{\"tidewall_dump\":2,\"counter\":1}\n", 2, "version 2");
    for end in 1..lines.len() {
        load(&(lines[..end].join("\n") + "\n"), 2, "not whole");
    }
    let missing: String =
        lines.iter().enumerate().filter(|(at, _)| *at != 3).map(|(_, l)| format!("{l}\n")).collect();
    load(&missing, 2, "some are missing");
    load(&(dump.clone() + lines[1] + "\n"), 2, "behind the last");
    load(
        &dump.replacen("\"token\":1,", "", 1).replacen("\"token\":1}", "\"x\":1}", 1),
        2,
        "\"token\" is missing",
    );
    load(&dump.replacen("\"mark\":2", "\"mark\":0", 1), 2, "token");
    load(&dump.replacen("\"scope\":\"prefix\"", "\"scope\":\"other\"", 1), 2, "\"other\"");
    load(&dump.replacen("\"key_hex\":\"3", "\"key_hex\":\"", 1), 2, "two digits");
    let restored = dump.replacen("\"needs_floor\":false", "\"needs_floor\":true", 1);
    run("load", &copy, &["--move"], restored.as_bytes()).fails(2, "load without --move");
    assert!(!copy.exists() && !at.beside("copy.loading").exists());
    run("load", &copy, &["--move", "--advance-tokens", "9"], dump.as_bytes()).fails(2, "cannot be used with");
    // A token above the counter was granted by nobody.
    load(&dump.replacen("\"counter\":500", "\"counter\":1", 1), 1, "was not granted");
    fs::create_dir(at.beside("copy.loading")).unwrap();
    run("load", &copy, &[], dump.as_bytes()).fails(2, "another load");
    assert!(at.beside("copy.loading").exists(), "somebody else's stays");
}

#[test]
fn the_log_is_shown_op_by_op() {
    let at = Place::filled();
    let shown = at.run("log", ["--values"]).ok();
    for line in [
        "keyspace 1 is \"jobs\", scope prefix:/, tokens store",
        "grant 1 \"7/\" token 1 to ",
        "put 1 \"7/draft\" token 1: \"by the first\"",
        "put 1 \"8/\\xff\\x00\" token 3: \"\\x80\\n\"",
        "delete 1 \"7/gone\" token 2",
        "release 1 \"7/\" token 2",
        "raise 2 \"never written\" to 99",
        "floor 4 to 50",
        "floor 5 to 2, itself fenced",
        "token counter to 500",
    ] {
        assert!(shown.contains(line), "{line} is not in\n{shown}");
    }
    let plain = at.run("log", ["1"]).ok();
    assert!(
        plain.contains("put 1 \"7/draft\" token 1: 12 bytes") && !plain.contains("by the first"),
        "{plain}"
    );
    let frames = at.run("log", ["--json", "--values"]).json();
    let kinds: Vec<_> = frames.iter().flat_map(|frame| frame["ops"].as_array().unwrap()).collect();
    let of = |kind: &str| kinds.iter().find(|op| op["kind"] == kind).copied().unwrap_or(&Json::Null);
    assert_eq!((&of("put")["key"], &of("put")["value"]), (&"7/draft".into(), &"by the first".into()));
    assert_eq!((&of("grant")["fence"], &of("grant")["token"]), (&"7/".into(), &1.into()));
    assert_eq!((&of("floor")["token"], &of("floor")["exclusive"]), (&50.into(), &false.into()));
    assert_eq!(of("counter")["token"], 500);
    for (at, frame) in frames.iter().enumerate() {
        assert_eq!(frame["lsn"], at as u64 + 1, "one frame after the other");
    }
}

#[test]
fn info_names_the_index_file_and_what_lies_behind_it() {
    let at = Place::filled();
    let index = || at.run("info", ["--json"]).json()[0]["index"].clone();
    assert!(index().is_null() && at.run("info", []).ok().contains("index file   none"));
    let db = open(Options::new(), &at.dir);
    let rows = db.keyspace("rows", external()).unwrap();
    // Enough that a close writes one.
    (0..5000u32).for_each(|n| drop(rows.submit_put(token(99), &n.to_be_bytes(), b"v").unwrap()));
    rows.put(token(99), b"a", b"v").unwrap();
    drop(rows);
    db.close().unwrap();
    let there = index();
    let name = there["file"].as_str().unwrap().to_owned();
    assert_eq!(there["bytes"], std::fs::metadata(at.dir.join(&name)).unwrap().len());
    assert_eq!(name, format!("INDEX-{}", there["through"]));
    assert_eq!((&there["ops_behind"], &there["trouble"]), (&0.into(), &serde_json::Value::Null));
    let db = open(Options::new(), &at.dir);
    let rows = db.keyspace("rows", external()).unwrap();
    rows.put(token(99), b"a", b"behind").unwrap();
    rows.put(token(99), b"b", b"behind").unwrap();
    assert_eq!(index()["ops_behind"], 2);
    assert!(at.run("info", []).ok().contains("; 2 ops behind it"));
    drop(rows);
    db.close().unwrap();
    std::fs::remove_file(at.dir.join(&name)).unwrap();
    assert_eq!(index()["trouble"], "it is missing");
    assert!(at.run("info", []).ok().contains("is of no use: it is missing"));
}

/// The program beside this process, which has the store open and publishes its figures.
#[test]
fn beside_a_live_store_only_what_looks_from_outside_works() {
    let at = Place::filled();
    let db = open(Options::new().publish_stats(Duration::from_millis(20)), &at.dir);
    let rows = db.keyspace("rows", external()).unwrap();
    rows.put(token(99), b"a", b"live").unwrap();
    assert!(rows.put(token(1), b"a", b"late").is_err());
    let info = at.run("info", ["--json"]).json();
    let log = at.run("log", ["--values"]).ok();
    assert!(log.contains("token 99: \"live\""), "what is durable is seen at once:\n{log}");
    let states: Vec<_> = info[0]["segments"].as_array().unwrap().iter().map(|s| s["state"].clone()).collect();
    assert!(states.contains(&"open".into()) && !states.contains(&"damaged".into()), "{info:?}");
    if cfg!(target_os = "linux") {
        assert_eq!(info[0]["pid"], std::process::id());
        assert!(at.run("info", []).ok().contains(&format!("by process {} (", std::process::id())));
    }
    for (command, rest) in [
        ("keys", vec!["rows"]),
        ("get", vec!["rows", "a"]),
        ("put", vec!["rows", "a", "v", "--token", "99"]),
        ("delete", vec!["rows", "a", "--token", "99"]),
        ("raise", vec!["rows", "a", "--token", "99"]),
        ("compact", vec![]),
        ("verify", vec![]),
        ("holders", vec![]),
        ("dump", vec![]),
    ] {
        let told = run_once(command, &at.dir, &rest, b"").fails(4, "is open in another process");
        assert!(told.err.contains("`info`, `stats` or `log`"), "{told:?}");
        if cfg!(target_os = "linux") {
            assert!(told.err.contains(&format!("process {} (", std::process::id())), "{told:?}");
        }
    }

    // Figures: as of some time after the write, for they are published every 20 ms.
    let begun = std::time::Instant::now();
    let published = loop {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is published");
        let seen = at.run("stats", ["--json"]).json().remove(0);
        if seen["published"]["stats"]["fenced"] == 1 {
            break seen;
        }
    };
    assert_eq!(published["published"]["pid"], std::process::id());
    assert_eq!(published["published"]["state"], "healthy");
    assert_eq!(published["published"]["stats"]["writes"], 1);
    assert!(published["published"]["stats"]["commit_nanos"]["p99"].as_u64() > Some(0), "{published}");
    assert!(published["age_ms"].as_u64().is_some_and(|age| age < 60_000), "{published}");
    let watched = at.run("stats", ["--watch", "1", "--count", "2", "--json"]).json();
    assert_eq!(watched.len(), 2);
    let table = at.run("stats", []).ok();
    assert!(table.contains("commit_nanos") && table.contains("healthy") && table.contains("keys"), "{table}");
    drop(rows);
    db.close().unwrap();
    at.run("stats", ["--watch"]).fails(5, "nobody publishes");
    assert!(!at.dir.join("STATS").exists(), "a clean close takes it away");
}

#[test]
fn figures_of_a_process_that_was_killed_are_not_taken_for_live() {
    let at = Place::filled();
    let left =
        "{\"tidewall_stats\":1,\"pid\":1,\"incarnation\":\"0000000000000001\",\"stats\":{\"writes\":7}}";
    fs::write(at.dir.join("STATS"), left).unwrap();
    let seen = at.run("stats", ["--json"]).json();
    assert_eq!(seen[0]["published"], Json::Null);
    assert!(seen[0]["files"]["disk_bytes"].as_u64() > Some(0));
    assert!(at.run("stats", []).ok().starts_with("No process publishes figures"));
    at.run("stats", ["--watch"]).fails(5, "nobody publishes");
    for junk in ["", "{", "[1]", "\0\0\0"] {
        fs::write(at.dir.join("STATS"), junk).unwrap();
        assert_eq!(at.run("stats", ["--json"]).json()[0]["published"], Json::Null);
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let at = Place::new();
    let db = open(Options::new(), &at.dir);
    let rows = db.keyspace("rows", external()).unwrap();
    let mut batch = db.batch();
    for at in 0..40_000u32 {
        batch
            .put(&rows, token(1), format!("a key of some length, number {at:010}").as_bytes(), b"v")
            .unwrap();
    }
    batch.commit().unwrap();
    drop(rows);
    db.close().unwrap();
    for (command, rest) in [("keys", vec!["rows"]), ("log", vec![]), ("dump", vec![])] {
        let mut child = program(command, &at.dir, &rest).spawn().unwrap();
        let mut line = String::new();
        // Dropped behind the first line: the pipe is closed.
        BufReader::with_capacity(16, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), &output.stderr[..]), (Some(0), &b""[..]), "{command}");
    }
}

/// Where nobody read what was found, the store counted as sound.
#[test]
fn damage_is_damage_without_a_reader() {
    let at = Place::filled();
    let ends = |command: &str, rest: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        program(command, &at.dir, rest).stdout(writer).output().unwrap().status.code()
    };
    assert_eq!((ends("verify", &[]), ends("info", &[])), (Some(0), Some(0)));
    let mut bytes = fs::read(at.dir.join("000001.seg")).unwrap();
    bytes[4096 + 40] ^= 1;
    fs::write(at.dir.join("000001.seg"), &bytes[..bytes.len() - 10]).unwrap();
    let into = at.beside("salvaged");
    assert_eq!(ends("verify", &[]), Some(3));
    assert_eq!(ends("verify", &["--json"]), Some(3));
    assert_eq!(ends("info", &[]), Some(3));
    assert_eq!(ends("salvage", &[into.to_str().unwrap()]), Some(3));
}

#[test]
fn the_bench_measures_and_cleans_up() {
    let at = Place::new();
    let told = at.run("bench", ["--seconds", "1", "--threads", "2", "--json"]).json();
    assert_eq!(told.len(), 3);
    for part in &told {
        let of = |name: &str| part[name].as_u64().unwrap();
        assert!(of("calls") > 0 && of("p50_nanos") > 0, "{part}");
        assert!(of("p50_nanos") <= of("p99_nanos") && of("p99_nanos") <= of("max_nanos"), "{part}");
    }
    assert!(!at.dir.exists());
    let table = at.run("bench", ["--seconds", "1", "--threads", "1", "--value-bytes", "0"]).ok();
    assert!(table.contains("durable put, 1 thread ") && table.contains("fenced put"), "{table}");
    assert!(!at.dir.exists());
}

#[test]
fn help_and_completions_know_every_command() {
    const COMMANDS: [&str; 18] = [
        "info",
        "keys",
        "get",
        "put",
        "delete",
        "raise",
        "compact",
        "verify",
        "salvage",
        "checkpoint",
        "restore",
        "holders",
        "stats",
        "dump",
        "load",
        "log",
        "bench",
        "completions",
    ];
    let direct = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tidewall")).args(args).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, help) = direct(&["--help"]);
    assert_eq!(code, Some(0));
    assert!(help.contains("Exit codes:") && help.contains("Examples:"), "{help}");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let (code, script) = direct(&["completions", shell]);
        assert_eq!(code, Some(0));
        assert!(COMMANDS.iter().all(|command| script.contains(command)), "{shell}");
    }
    for command in COMMANDS {
        assert!(help.contains(&format!("  {command} ")), "{command} is not in\n{help}");
        let (code, help) = direct(&[command, "--help"]);
        assert_eq!(code, Some(0), "{command}");
        // Every argument says what it is, beside its name or below.
        let mut lines = help.lines().peekable();
        while let Some(line) = lines.next() {
            let said_below = lines.peek().is_some_and(|below| !below.trim().is_empty());
            let alone = line.starts_with("  ")
                && line.trim_start().starts_with(['<', '[', '-'])
                && !line.trim().contains("  ");
            assert!(!alone || said_below || line.contains(": "), "{command}: {line}");
        }
        assert!(help.lines().all(|line| line.chars().count() <= 110), "{help}");
    }
}
