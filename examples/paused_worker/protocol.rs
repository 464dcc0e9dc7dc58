//! What a worker and the service say to each other: one line each way, over loopback TCP.
//!
//! One job: messages to lines and back. Read next: `service.rs`, which answers them.

use crate::Result;
use std::fmt;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use tidewall::{OperationId, OwnerId, Token};

/// The number of a job: its place in the list of files.
pub type JobId = usize;
/// The number of a worker: every process that was ever started has its own.
pub type WorkerId = u32;

/// What a worker asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    Job {
        worker: WorkerId,
        owner: OwnerId,
    },
    /// A worker has its owner's id to renew with, and says how far it is.
    Renew {
        worker: WorkerId,
        owner: OwnerId,
        job: JobId,
        token: Token,
        stage: Stage,
    },
    Result {
        worker: WorkerId,
        job: JobId,
        token: Token,
        operation: OperationId,
        size: u64,
        sha256: String,
    },
}

/// How far a worker is with its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Reading,
    /// The result is next.
    Ready,
}

/// What the service answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To `Job`: this one, under this token.
    Job { job: JobId, token: Token, path: String },
    /// To `Job`: somebody has each of those that are left. Ask again.
    Wait,
    /// To `Job`: all are done.
    Stop,
    /// To `Renew`.
    Renewed,
    /// To `Renew`: the lease is over. Stop the job.
    Lost,
    /// To `Result`: it is in the store, and on the disk.
    Committed,
    /// To `Result`: it was already.
    Duplicate,
    /// To `Result`: a newer token holds the job. Stop the job.
    Fenced { mark: u64 },
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Job { worker, owner } => write!(f, "job {worker} {owner}"),
            Ask::Renew { worker, owner, job, token, stage } => {
                let stage = match stage {
                    Stage::Reading => "reading",
                    Stage::Ready => "ready",
                };
                write!(f, "renew {worker} {owner} {job} {token} {stage}")
            }
            Ask::Result { worker, job, token, operation, size, sha256 } => {
                write!(f, "result {worker} {job} {token} {operation} {size} {sha256}")
            }
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Job { job, token, path } => write!(f, "job {job} {token} {path}"),
            Answer::Wait => f.write_str("wait"),
            Answer::Stop => f.write_str("stop"),
            Answer::Renewed => f.write_str("renewed"),
            Answer::Lost => f.write_str("lost"),
            Answer::Committed => f.write_str("committed"),
            Answer::Duplicate => f.write_str("duplicate"),
            Answer::Fenced { mark } => write!(f, "fenced {mark}"),
        }
    }
}

impl Ask {
    pub fn parse(line: &str) -> Result<Self> {
        let ask = match *line.split(' ').collect::<Vec<_>>() {
            ["job", worker, owner] => Ask::Job { worker: worker.parse()?, owner: parse_owner(owner)? },
            ["renew", worker, owner, job, token, stage] => Ask::Renew {
                worker: worker.parse()?,
                owner: parse_owner(owner)?,
                job: job.parse()?,
                token: Token::new(token.parse()?)?,
                stage: match stage {
                    "reading" => Stage::Reading,
                    "ready" => Stage::Ready,
                    _ => return Err(format!("not a stage: {stage:?}").into()),
                },
            },
            ["result", worker, job, token, operation, size, sha256] => Ask::Result {
                worker: worker.parse()?,
                job: job.parse()?,
                token: Token::new(token.parse()?)?,
                operation: OperationId::try_new(operation.parse()?)
                    .ok_or("an operation is numbered from 1")?,
                size: size.parse()?,
                sha256: sha256.to_owned(),
            },
            _ => return Err(format!("not a question: {line:?}").into()),
        };
        Ok(ask)
    }
}

impl Answer {
    pub fn parse(line: &str) -> Result<Self> {
        // The path comes last and may hold spaces.
        let answer = match *line.splitn(4, ' ').collect::<Vec<_>>() {
            ["job", job, token, path] => {
                Answer::Job { job: job.parse()?, token: Token::new(token.parse()?)?, path: path.to_owned() }
            }
            ["wait"] => Answer::Wait,
            ["stop"] => Answer::Stop,
            ["renewed"] => Answer::Renewed,
            ["lost"] => Answer::Lost,
            ["committed"] => Answer::Committed,
            ["duplicate"] => Answer::Duplicate,
            ["fenced", mark] => Answer::Fenced { mark: mark.parse()? },
            _ => return Err(format!("not an answer: {line:?}").into()),
        };
        Ok(answer)
    }
}

fn parse_owner(hex: &str) -> Result<OwnerId> {
    Ok(OwnerId::new(u128::from_str_radix(hex, 16)?))
}

/// One connection, line by line.
#[derive(Debug)]
pub struct Lines {
    stream: BufReader<TcpStream>,
    line: String,
}

impl Lines {
    pub fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Lines { stream: BufReader::new(stream), line: String::new() })
    }

    pub fn connect(addr: SocketAddr) -> Result<Self> {
        Lines::new(TcpStream::connect(addr)?)
    }

    pub fn send(&mut self, message: &impl fmt::Display) -> Result<()> {
        Ok(self.stream.get_mut().write_all(format!("{message}\n").as_bytes())?)
    }

    /// The next line, or `None` when the other side is gone. Half a line counts as none.
    pub fn receive(&mut self) -> Result<Option<&str>> {
        self.line.clear();
        match self.stream.read_line(&mut self.line) {
            Ok(_) => Ok(self.line.strip_suffix('\n')),
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted) => {
                Ok(None)
            }
            Err(e) => Err(e.into()),
        }
    }
}
