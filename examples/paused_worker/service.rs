//! The job service: hands out jobs under leases, and writes results under tokens.
//!
//! One job: to put the store behind three questions. [`Service::result`] is where a late write is refused, by
//! the store and by nothing else: the service keeps no list of who may write, and takes no lock around it.
//! What is done, it asks the store. In the control run results go into [`Results::Map`] instead.
//!
//! Read next: `chaos.rs`, what is done to the workers meanwhile.

use crate::Result;
use crate::chaos::{Blow, Chaos};
use crate::protocol::{Answer, Ask, JobId, Lines, Stage, WorkerId};
use std::collections::{HashMap, VecDeque};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tidewall::{
    Db, Error, Keyspace, KeyspaceOptions, LastOperation, Lease, OperationId, OwnerId, Scope, Token,
};

pub struct Service {
    jobs: Keyspace,
    results: Results,
    pub files: Vec<PathBuf>,
    ttl: Duration,
    queue: Mutex<Queue>,
    /// How many jobs were seen done.
    done: AtomicUsize,
    /// All that happened, as it happens.
    events: Mutex<Vec<Event>>,
    started: Instant,
    pub chaos: Chaos,
}

/// Where results are written.
pub enum Results {
    /// In the store, which checks the token of each write.
    Store,
    /// The control run: in a map that takes what comes, with the token of whoever wrote last. Jobs are granted by
    /// the store all the same, and the workers are as honest as before.
    Map(Mutex<HashMap<JobId, Token>>),
}

impl Results {
    pub fn map() -> Self {
        Results::Map(Mutex::default())
    }
}

/// Which jobs to look at next. Never the authority on anything: that is the store.
struct Queue {
    /// Not granted yet.
    waiting: VecDeque<JobId>,
    /// Granted, and not seen done yet. Dropping the lease releases it.
    granted: VecDeque<(JobId, Lease)>,
}

#[derive(Debug, Clone)]
pub struct Event {
    pub at: Duration,
    pub job: JobId,
    pub token: Token,
    pub worker: WorkerId,
    pub what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Granted,
    /// Granted, and found done by the holder before.
    FoundDone,
    Paused,
    Expired,
    Resumed,
    Killed,
    Committed,
    AnswerLost,
    Recognised,
    Fenced {
        mark: u64,
        last_operation: LastOperation,
    },
    /// Accepted by the map, in place of what was written under this token.
    Overwrote {
        before: Token,
    },
}

/// The name of a job's fence. In a keyspace of `Scope::Prefix(b'/')` all keys that start with it are
/// guarded together: whoever has the lease on `17/` may write `17/result`, and nobody else.
pub fn fence_key(job: JobId) -> Vec<u8> {
    format!("{job}/").into_bytes()
}

pub fn result_key(job: JobId) -> Vec<u8> {
    format!("{job}/result").into_bytes()
}

pub fn open_jobs(db: &Db) -> Result<Keyspace> {
    Ok(db.keyspace("jobs", KeyspaceOptions::new().scope(Scope::Prefix(b'/')))?)
}

impl Service {
    pub fn new(db: &Db, results: Results, files: Vec<PathBuf>, ttl: Duration, chaos: Chaos) -> Result<Self> {
        let queue = Queue { waiting: (0..files.len()).collect(), granted: VecDeque::new() };
        Ok(Service {
            jobs: open_jobs(db)?,
            results,
            files,
            ttl,
            queue: Mutex::new(queue),
            done: AtomicUsize::new(0),
            events: Mutex::new(Vec::new()),
            started: Instant::now(),
            chaos,
        })
    }

    /// Answers one connection until the worker hangs up.
    pub fn serve(&self, stream: TcpStream) -> Result<()> {
        let mut lines = Lines::new(stream)?;
        while let Some(line) = lines.receive()? {
            let answer = match Ask::parse(line)? {
                Ask::Job { worker, owner } => Some(self.next_job(worker, owner)?),
                Ask::Renew { worker, owner, job, token, stage } => {
                    self.renew(worker, owner, job, token, stage)?
                }
                Ask::Result { worker, job, token, operation, size, sha256 } => {
                    let value = format!("worker {worker} token {token} size {size} sha256 {sha256}");
                    let answer = self.result(worker, job, token, operation, value.as_bytes())?;
                    let lost = answer == Answer::Committed && self.chaos.loses_answer(job);
                    if lost {
                        self.note(job, token, worker, What::AnswerLost);
                        return Ok(());
                    }
                    Some(answer)
                }
            };
            // A worker that was killed does not hear the answer, and needs none.
            if let Some(answer) = answer
                && lines.send(&answer).is_err()
            {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes a result under the token of its worker, whoever holds the job by now.
    fn result(
        &self,
        worker: WorkerId,
        job: JobId,
        token: Token,
        operation: OperationId,
        value: &[u8],
    ) -> Result<Answer> {
        let (what, answer) = match &self.results {
            Results::Store => self.write_fenced(job, token, operation, value)?,
            Results::Map(map) => match lock(map).insert(job, token) {
                None => (What::Committed, Answer::Committed),
                Some(before) => (What::Overwrote { before }, Answer::Committed),
            },
        };
        self.note(job, token, worker, what);
        self.chaos.result_came(job, token, &answer);
        Ok(answer)
    }

    fn write_fenced(
        &self,
        job: JobId,
        token: Token,
        operation: OperationId,
        value: &[u8],
    ) -> Result<(What, Answer)> {
        // The store compares the token with the mark of `job` where it writes, in one step. A worker that
        // was paused while its job went to somebody else comes back here, with a token below the mark.
        Ok(match self.jobs.put_operation(token, operation, &result_key(job), value) {
            Ok(_) => (What::Committed, Answer::Committed),
            // A retry of what was committed, before or after somebody else got the job: it is done.
            Err(Error::Duplicate { .. }) => (What::Recognised, Answer::Duplicate),
            Err(Error::Fenced { last_operation: LastOperation::Committed(last), .. })
                if last == operation =>
            {
                (What::Recognised, Answer::Duplicate)
            }
            Err(Error::Fenced { mark, last_operation, .. }) => {
                (What::Fenced { mark: mark.get(), last_operation }, Answer::Fenced { mark: mark.get() })
            }
            Err(other) => return Err(other.into()),
        })
    }

    /// Grants a job: one that was taken over goes before one that is new.
    fn next_job(&self, worker: WorkerId, owner: OwnerId) -> Result<Answer> {
        let granted = self.lock_queue().granted.len();
        for _ in 0..granted {
            let Some((job, lease)) = self.lock_queue().granted.pop_front() else { break };
            if self.is_done(job)? {
                self.done.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if let Some(answer) = self.grant(worker, owner, job)? {
                return Ok(answer);
            }
            self.lock_queue().granted.push_back((job, lease));
        }
        let job = {
            let mut queue = self.lock_queue();
            let at = queue.waiting.iter().position(|&job| self.chaos.may_grant(job));
            at.and_then(|at| queue.waiting.remove(at))
        };
        match job {
            Some(job) => match self.grant(worker, owner, job)? {
                Some(answer) => Ok(answer),
                None => Err(format!("job {job} was never granted, and is held").into()),
            },
            None if self.is_finished() => Ok(Answer::Stop),
            None => Ok(Answer::Wait),
        }
    }

    /// Acquires the lease on the job for the worker, or `None` where there is nothing to grant. The grant is
    /// durable, and whoever held the job before is fenced out, when this returns.
    fn grant(&self, worker: WorkerId, owner: OwnerId, job: JobId) -> Result<Option<Answer>> {
        let fence = fence_key(job);
        let lease = match self.jobs.lease(&fence).ttl(self.ttl).owner(owner).try_acquire() {
            Ok(lease) => lease,
            Err(Error::Held { .. }) => return Ok(None),
            Err(other) => return Err(other.into()),
        };
        let token = lease.token();
        if lease.predecessor().is_some() {
            // Since we looked, the holder before has sent its result, in the last moment. The only numbered
            // operation on a job is its result, so the job is done.
            self.note(job, token, worker, What::FoundDone);
            return Ok(None);
        }
        self.note(job, token, worker, What::Granted);
        self.lock_queue().granted.push_back((job, lease));
        let path = self.files[job].display().to_string();
        Ok(Some(Answer::Job { job, token, path }))
    }

    /// Renews for a worker, which names itself by (job, token, owner). `None`: it gets no answer.
    fn renew(
        &self,
        worker: WorkerId,
        owner: OwnerId,
        job: JobId,
        token: Token,
        stage: Stage,
    ) -> Result<Option<Answer>> {
        let asked = self.now();
        let left = match self.jobs.renew(&fence_key(job), token, owner) {
            Ok(left) => left,
            Err(Error::Expired { .. } | Error::NotHeld { .. }) => return Ok(Some(Answer::Lost)),
            Err(other) => return Err(other.into()),
        };
        if stage == Stage::Reading {
            return Ok(Some(Answer::Renewed));
        }
        // Here the worker waits for us, with a lease just renewed, and its next step is to write: the moment
        // at which a pause does most harm.
        Ok(match self.chaos.strike(job, token, worker, asked + left) {
            None | Some(Blow::Pause) => Some(Answer::Renewed),
            Some(Blow::Kill) => None,
        })
    }

    pub fn is_done(&self, job: JobId) -> Result<bool> {
        match &self.results {
            Results::Store => Ok(self.jobs.contains_key(&result_key(job))?),
            Results::Map(map) => Ok(lock(map).contains_key(&job)),
        }
    }

    pub fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// Whether every job is done and every blow has had its effect.
    pub fn is_finished(&self) -> bool {
        self.done() == self.files.len() && self.chaos.is_over()
    }

    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn note(&self, job: JobId, token: Token, worker: WorkerId, what: What) {
        self.note_at(self.now(), job, token, worker, what);
    }

    pub fn note_at(&self, at: Duration, job: JobId, token: Token, worker: WorkerId, what: What) {
        lock(&self.events).push(Event { at, job, token, worker, what });
    }

    /// All that happened, in the order of time.
    pub fn events(&self) -> Vec<Event> {
        let mut events = lock(&self.events).clone();
        events.sort_by_key(|event| event.at);
        events
    }

    fn lock_queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
