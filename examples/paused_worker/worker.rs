//! One worker process: takes a job, hashes a file, sends the result. It knows nothing of the store.
//!
//! It is an honest worker: it renews while it works, and stops a job when it is told that its lease is
//! over. That does not help against a pause between a renewal and the next write, which is why the service
//! does not rely on it.

use crate::Result;
use crate::protocol::{Answer, Ask, JobId, Lines, Stage, WorkerId};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::process;
use std::thread;
use std::time::{Duration, Instant};
use tidewall::{OperationId, OwnerId, Token};

const CHUNK_BYTES: usize = 64 << 10;
const WAIT: Duration = Duration::from_millis(5);
/// A job has one result, so one operation number will do: a retry is the same operation again.
const RESULT: OperationId = OperationId::new(1);

#[derive(Debug, Clone, Copy, clap::Args)]
pub struct WorkerArgs {
    #[arg(long)]
    addr: SocketAddr,
    #[arg(long)]
    worker: WorkerId,
    /// 128 bits in hex.
    #[arg(long, value_parser = |hex: &str| u128::from_str_radix(hex, 16))]
    owner: u128,
    #[arg(long)]
    renew_ms: u64,
}

pub fn run(args: WorkerArgs) -> Result<()> {
    // The parent holds the other end of stdin and never writes: it ends when the parent does.
    thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        process::exit(0);
    });
    let mut link = Link { args, owner: OwnerId::new(args.owner), lines: Lines::connect(args.addr)? };
    loop {
        match link.ask(&Ask::Job { worker: args.worker, owner: link.owner })? {
            Answer::Job { job, token, path } => {
                if let Some((size, sha256)) = link.hash(job, token, Path::new(&path))? {
                    // Committed, recognised or fenced: in each case this worker is through with the job.
                    link.ask(&Ask::Result {
                        worker: args.worker,
                        job,
                        token,
                        operation: RESULT,
                        size,
                        sha256,
                    })?;
                }
            }
            Answer::Wait => thread::sleep(WAIT),
            Answer::Stop => return Ok(()),
            other => return Err(format!("asked for a job, was answered {other}").into()),
        }
    }
}

/// The way to the service.
struct Link {
    args: WorkerArgs,
    owner: OwnerId,
    lines: Lines,
}

impl Link {
    /// Asks until there is an answer. When the connection is lost the question is asked again, as it was:
    /// the service cannot be told from here to have missed it, or only its answer to have been lost.
    fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        loop {
            self.lines.send(ask)?;
            if let Some(line) = self.lines.receive()? {
                return Answer::parse(line);
            }
            self.lines = Lines::connect(self.args.addr)?;
        }
    }

    /// The size and hash of a file, or `None` if the lease was lost over it. Renews as often as the service
    /// asked for, and at the end, so that the result has a whole ttl to arrive in.
    fn hash(&mut self, job: JobId, token: Token, path: &Path) -> Result<Option<(u64, String)>> {
        let every = Duration::from_millis(self.args.renew_ms);
        let mut renewed = Instant::now();
        let mut digest = FileDigest::open(path)?;
        while digest.read_chunk()? {
            if renewed.elapsed() >= every {
                if !self.renew(job, token, Stage::Reading)? {
                    return Ok(None);
                }
                renewed = Instant::now();
            }
        }
        Ok(self.renew(job, token, Stage::Ready)?.then(|| digest.finish()))
    }

    /// Whether the lease goes on.
    fn renew(&mut self, job: JobId, token: Token, stage: Stage) -> Result<bool> {
        let ask = Ask::Renew { worker: self.args.worker, owner: self.owner, job, token, stage };
        Ok(self.ask(&ask)? == Answer::Renewed)
    }
}

/// A file being hashed chunk by chunk.
pub struct FileDigest {
    file: File,
    sha256: Sha256,
    size: u64,
    chunk: Vec<u8>,
}

impl FileDigest {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| format!("opening {}: {e}", path.display()))?;
        Ok(FileDigest { file, sha256: Sha256::new(), size: 0, chunk: vec![0; CHUNK_BYTES] })
    }

    /// Takes in the next chunk; `false` at the end.
    fn read_chunk(&mut self) -> Result<bool> {
        let len = self.file.read(&mut self.chunk)?;
        self.sha256.update(&self.chunk[..len]);
        self.size += len as u64;
        Ok(len > 0)
    }

    fn finish(self) -> (u64, String) {
        let hex = self.sha256.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        (self.size, hex)
    }

    /// The size and hash of a file, at once.
    pub fn of(path: &Path) -> Result<(u64, String)> {
        let mut digest = FileDigest::open(path)?;
        while digest.read_chunk()? {}
        Ok(digest.finish())
    }
}
