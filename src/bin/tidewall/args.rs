//! Every command, with its help.

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::path::PathBuf;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  refused, and nothing was written: fenced, an unknown token, a condition
     that does not hold, a lease that is held, a key that is not there; but
     --acquire has taken the fence by then, and --create made the keyspace
  2  the command line, or what it names, cannot be right
  3  damage was found
  4  another process has the store open
  5  anything else: no space, a failing disk, no store there
A reader of the output that goes away (a closed pipe) ends a command with 0.";

const EXAMPLES: &str = "\
Examples:
  tidewall info /var/lib/jobs             what it is, and who has it open
  tidewall stats /var/lib/jobs --watch    figures of the process that has it open
  tidewall keys /var/lib/jobs jobs --prefix 7/
  tidewall get /var/lib/jobs jobs 7/result --json
  tidewall put /var/lib/jobs jobs 7/result done --token 42
  tidewall put /var/lib/jobs jobs 7/result done --acquire
  tidewall dump /var/lib/jobs > jobs.jsonl
  tidewall load /var/lib/jobs.new < jobs.jsonl";

const KEYS: &str = "\
Keys and values:
  Printed, and read from the command line, with escapes: printable ASCII as it
  is; \\n, \\r, \\t, \\\\, \\', \\\"; \\xNN for any other byte. With --hex they are two
  hex digits a byte. In JSON they are text where they are UTF-8, else hex under
  another name: \"key_hex\" in place of \"key\".";

/// Looks into tidewall stores and changes them.
///
/// A tidewall is an embedded store: one directory, one process that has it open. `info`, `stats` and `log` work
/// beside that process, by checked reads and without the lock. Every other command opens the store itself, and
/// so only while nobody else has it open; else it says who seems to, and ends with exit code 4.
///
/// Commands that write (`put`, `delete`, `raise`, `compact`, `checkpoint`) begin an incarnation, as every opening for writing does, and so
/// cost a grace: leases from before are over, and the next open keeps no fence for their holders. Those that
/// only read (`keys`, `get`, `holders`, `dump`) leave the files as they are.
#[derive(Parser, Debug)]
#[command(name = "tidewall", version, max_term_width = 110)]
#[command(after_help = EXIT_CODES, after_long_help = format!("{EXAMPLES}\n\n{KEYS}\n\n{EXIT_CODES}"))]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// What a store is, its segments, and who has it open. Works beside a live store.
    Info(Info),
    /// The keys of a keyspace, in order.
    Keys(Keys),
    /// The value of a key.
    Get(Get),
    /// Writes a value under a token. Begins an incarnation.
    ///
    /// Durable when the command ends. Begins an incarnation, and so costs a grace: leases from before it are
    /// over, and the next open keeps no fence for their holders (Options::lease_grace).
    #[command(after_long_help = PUT_EXAMPLES)]
    Put(Put),
    /// Deletes a key, or all with a prefix, under a token. Begins an incarnation.
    ///
    /// Durable when the command ends. The mark of the fence stays for ever. Begins an incarnation, and so
    /// costs a grace: leases from before it are over, and the next open keeps no fence for their holders
    /// (Options::lease_grace).
    Delete(Delete),
    /// Raises the mark of a fence, or the floor of a keyspace, to a token. Begins an incarnation.
    ///
    /// Whoever writes under a lower token is fenced from then on, durably. Begins an incarnation, and so costs a
    /// grace: leases from before it are over, and the next open keeps no fence for their holders
    /// (Options::lease_grace).
    #[command(after_long_help = RAISE_EXAMPLES)]
    Raise(Raise),
    /// Gives back the space of what is not needed any more. Begins an incarnation.
    ///
    /// A store does so by itself while it is written to; this does all of it now, for instance before a backup.
    /// Marks that nobody needs fold into the floor. Begins an incarnation, and so costs a grace: leases from
    /// before it are over, and the next open keeps no fence for their holders (Options::lease_grace).
    Compact(Compact),
    /// Who held a lease when the store was last open, and has not given it back.
    ///
    /// Reopening a store ends every lease, so none of these is live. They are what a grace would keep the fences
    /// for, and those without an end. A process that has the store open knows its own: Keyspace::holders.
    Holders(Holders),
    /// Figures: of the files, and of the process that has the store open. Works beside a live store.
    ///
    /// The process publishes its figures in the file STATS when it was told to, with Options::publish_stats;
    /// else only what the files show is there to be seen.
    Stats(Stats),
    /// Reads and checks every byte of a store, and changes nothing. Exit code 3 when there is damage.
    Verify(Verify),
    /// Makes a new store of what is provably intact in a damaged one, and lists what is not.
    ///
    /// What cannot be read may have held the highest mark, so the new store begins above it as a restored one
    /// does: a new id, tokens and floors moved up, keyspaces of external tokens in need of a floor (`raise --all`).
    /// Exit code 3 when there was damage, also when all went well.
    Salvage(Salvage),
    /// Makes a copy of a store that `restore` makes a store of. Begins an incarnation.
    ///
    /// Files are linked where the file system has links. Beside a live store the process that has it open makes
    /// its own: Db::checkpoint. Begins an incarnation, and so costs a grace: leases from before it are over, and
    /// the next open keeps no fence for their holders (Options::lease_grace).
    Checkpoint(Checkpoint),
    /// Makes a new store of a checkpoint, with tokens above all that were granted since.
    ///
    /// It has a new id; tokens, lsns and floors are moved up, and keyspaces of external tokens take no writes until
    /// `raise --all` tells them the present value of their token source.
    Restore(Restore),
    /// Everything as JSON lines: values, marks, floors and the token counter.
    ///
    /// Each keyspace, then each of its fences, the one with the highest mark first: its values, the oldest token
    /// first, then its mark. The last line counts the others, so that a part of a dump is not taken for all of
    /// it. Leases are not in it, nor are the numbers of operations (OperationId): finish retries before moving house.
    /// What the original grants after the dump is not in it either: see load.
    Dump(Dump),
    /// Makes a new store of a dump, with tokens above all that were granted since.
    ///
    /// Values and their tokens are those of the dump. As `restore` does it, the token counter and the floors are
    /// moved up by 2^32, so that no token which the original grants after the dump is granted again or admitted,
    /// and keyspaces of external tokens take no writes until `raise --all` tells them the present value of their
    /// token source. With --move all of that stays as it was dumped.
    ///
    /// Reads a dump from the standard input, or a file. The directory must not exist; it is there, whole, or
    /// not at all: until all is written and durable it is in DIR.loading. The store has a new id. Every
    /// value and mark passes the same checks as any write.
    #[command(after_long_help = LOAD_EXAMPLES)]
    Load(Load),
    /// The frames of the log, readable. Works beside a live store.
    ///
    /// One line for each op: the lsn, where it begins, and what it did. Without a segment all of them, in the
    /// order of the log.
    Log(Log),
    /// Measures durable puts, refusals and reads on a new store, which is removed afterwards.
    ///
    /// The directory must not exist: put it on the disk that is to be measured. On a shared machine compare
    /// ratios of two runs, not times.
    Bench(Bench),
    /// Prints a completion script for a shell.
    ///
    /// For bash: source <(tidewall completions bash)
    Completions {
        /// Which shell.
        shell: Shell,
    },
}

const PUT_EXAMPLES: &str = "\
Examples:
  tidewall put data jobs 7/result done --token 42    the token last granted for it
  tidewall put data jobs 7/result done --acquire     a new one, whoever had the fence
  tidewall put data rows row - --token 9 < file      the value from the standard input
  tidewall put data rows row v --token 9 --create --tokens external";

const RAISE_EXAMPLES: &str = "\
Examples:
  tidewall raise data jobs 7/ --token 42          fences out lower tokens from 7/
  tidewall raise data rows --all --token 1000     cut-over: every fence at once";

const LOAD_EXAMPLES: &str = "\
Examples:
  tidewall load new-data < dump.jsonl                 the original may have gone on
  ssh old-host tidewall dump data | tidewall load --move data    it never runs again";

#[derive(ClapArgs, Debug)]
pub struct Dir {
    /// The directory of the store.
    pub dir: PathBuf,
}

#[derive(ClapArgs, Debug)]
pub struct Shape {
    /// Prints JSON, one object a line, in place of tables.
    #[arg(long)]
    pub json: bool,
    /// Keys and values in hex, as printed and as given.
    #[arg(long)]
    pub hex: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Info {
    #[command(flatten)]
    pub dir: Dir,
    /// Prints JSON in place of tables.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Keys {
    #[command(flatten)]
    pub dir: Dir,
    /// The keyspace; without one, the keyspaces are listed.
    pub keyspace: Option<String>,
    /// Only keys that start with this.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub prefix: String,
    /// At most so many.
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
    /// From the last key to the first.
    #[arg(long)]
    pub reverse: bool,
    /// Also the bytes, token and lsn of each value; of keyspaces, how many keys they have.
    #[arg(long, short)]
    pub long: bool,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
pub struct Get {
    #[command(flatten)]
    pub dir: Dir,
    /// The keyspace.
    pub keyspace: String,
    /// The key.
    pub key: String,
    /// The bytes of the value and nothing else.
    #[arg(long, conflicts_with_all = ["json"])]
    pub raw: bool,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
#[group(required = true, multiple = false)]
pub struct Under {
    /// The token to write under.
    #[arg(long, value_name = "N")]
    pub token: Option<u64>,
    /// Takes the lease on the fence for this command, and so a new token: whoever had the fence is fenced out.
    #[arg(long)]
    pub acquire: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Debug)]
pub enum Source {
    /// Leases of this store.
    Store,
    /// Something else.
    External,
}

#[derive(ClapArgs, Debug)]
pub struct Put {
    #[command(flatten)]
    pub dir: Dir,
    /// The keyspace.
    pub keyspace: String,
    /// The key.
    pub key: String,
    /// The value; - reads it, as it is, from the standard input.
    #[arg(allow_hyphen_values = true)]
    pub value: String,
    #[command(flatten)]
    pub under: Under,
    /// Only if the key has no value.
    #[arg(long, group = "condition")]
    pub if_absent: bool,
    /// Only if the key has a value.
    #[arg(long, group = "condition")]
    pub if_present: bool,
    /// Only if the key was last written at this lsn.
    #[arg(long, value_name = "LSN", group = "condition")]
    pub if_version: Option<u64>,
    /// The number of the operation: a retry under the same number and token is recognised (exit code 1).
    #[arg(long, value_name = "N", conflicts_with = "condition")]
    pub operation: Option<u64>,
    /// Creates the keyspace if it is missing, and the store too.
    #[arg(long)]
    pub create: bool,
    /// Of a created keyspace: which keys share a fence; key, keyspace, or prefix:D with a delimiter.
    #[arg(long, default_value = "key", requires = "create")]
    pub scope: String,
    /// Of a created keyspace: where its tokens come from.
    #[arg(long, value_enum, default_value = "store", requires = "create")]
    pub tokens: Source,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
pub struct Delete {
    #[command(flatten)]
    pub dir: Dir,
    /// The keyspace.
    pub keyspace: String,
    /// The key.
    #[arg(required_unless_present = "prefix")]
    pub key: Option<String>,
    /// Every key that starts with this, each against its own fence, all or none.
    #[arg(long, conflicts_with_all = ["key", "acquire", "if_present"])]
    pub prefix: Option<String>,
    #[command(flatten)]
    pub under: Under,
    /// Only if the key has a value.
    #[arg(long)]
    pub if_present: bool,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
pub struct Raise {
    #[command(flatten)]
    pub dir: Dir,
    /// The keyspace.
    pub keyspace: String,
    /// Any key of the fence, or its name.
    #[arg(required_unless_present = "all")]
    pub key: Option<String>,
    /// The floor of the keyspace: every fence at once.
    #[arg(long, conflicts_with = "key")]
    pub all: bool,
    /// With --all: the token itself is fenced as well.
    #[arg(long, requires = "all", conflicts_with = "key")]
    pub past: bool,
    /// The token.
    #[arg(long, value_name = "N")]
    pub token: u64,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
pub struct Compact {
    #[command(flatten)]
    pub dir: Dir,
    /// Prints JSON in place of a sentence.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Holders {
    #[command(flatten)]
    pub dir: Dir,
    /// Of this keyspace only.
    pub keyspace: Option<String>,
    /// Only fences that start with this.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub prefix: String,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
pub struct Stats {
    #[command(flatten)]
    pub dir: Dir,
    /// Again every so many seconds, until it is stopped.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub watch: Option<u32>,
    /// With --watch: so many times.
    #[arg(long, value_name = "N", requires = "watch")]
    pub count: Option<u64>,
    /// Prints JSON, one object a time, in place of tables.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Verify {
    #[command(flatten)]
    pub dir: Dir,
    /// Prints JSON in place of sentences.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Salvage {
    #[command(flatten)]
    pub dir: Dir,
    /// The directory of the new store, which must be missing or empty.
    pub into: PathBuf,
    /// A token of the store that was seen elsewhere: the counter goes on above it.
    #[arg(long, value_name = "N")]
    pub advance_tokens: Option<u64>,
    /// Prints JSON in place of sentences.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Checkpoint {
    #[command(flatten)]
    pub dir: Dir,
    /// The directory of the checkpoint, which must be missing or empty.
    pub into: PathBuf,
    /// Prints JSON in place of sentences.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Restore {
    #[command(flatten)]
    pub dir: Dir,
    /// The directory of the new store, which must be missing or empty.
    pub into: PathBuf,
    /// A token of the store that was seen elsewhere: the counter goes on above it.
    #[arg(long, value_name = "N")]
    pub advance_tokens: Option<u64>,
    /// Prints JSON in place of sentences.
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs, Debug)]
pub struct Dump {
    #[command(flatten)]
    pub dir: Dir,
    /// Only this keyspace.
    #[arg(long, value_name = "NAME")]
    pub keyspace: Option<String>,
}

#[derive(ClapArgs, Debug)]
pub struct Load {
    /// The directory of the new store, which must not exist.
    pub dir: PathBuf,
    /// The dump; without it, the standard input.
    pub file: Option<PathBuf>,
    /// The original is closed for ever, and was when it was dumped: tokens, marks, floors and the counter stay as
    /// they are. Should it ever run again, both stores grant and admit the same tokens.
    #[arg(long = "move")]
    pub is_move: bool,
    /// A token of the original that was seen elsewhere: the counter goes on above it.
    #[arg(long, value_name = "N", conflicts_with = "is_move")]
    pub advance_tokens: Option<u64>,
}

#[derive(ClapArgs, Debug)]
pub struct Log {
    #[command(flatten)]
    pub dir: Dir,
    /// The number of a segment, as in the name of its file.
    pub segment: Option<u32>,
    /// Also the values.
    #[arg(long)]
    pub values: bool,
    #[command(flatten)]
    pub shape: Shape,
}

#[derive(ClapArgs, Debug)]
pub struct Bench {
    /// A directory that does not exist, on the disk to be measured.
    pub dir: PathBuf,
    /// Threads that put at the same time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Seconds for each of the three parts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Bytes of a value.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=1_048_576))]
    pub value_bytes: u32,
    /// Prints JSON in place of a table.
    #[arg(long)]
    pub json: bool,
}
