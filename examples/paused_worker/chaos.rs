//! What is done to the workers: which are paused and killed, when, and when they go on.
//!
//! One job: the plan, made from a seed, and each blow step by step. A worker is hit while it holds a lease
//! and waits for the answer to a renewal, so it cannot be a moment too late; it goes on when, by the
//! store's word, somebody else has finished its job. Nothing here is timed by sleeping.
//!
//! Read next: `workers.rs`, the processes.

use crate::Result;
use crate::protocol::{Answer, JobId, WorkerId};
use crate::service::{Service, What};
use crate::workers::Workers;
use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidewall::Token;

/// How much of each.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Amount {
    /// Workers to pause while they hold a lease (SIGSTOP), until another one has done their job
    #[arg(long, default_value_t = 3)]
    pub pauses: usize,
    /// Workers to kill while they hold a lease (SIGKILL)
    #[arg(long, default_value_t = 2)]
    pub kills: usize,
    /// Results whose answer is lost on the way, so that they are sent again
    #[arg(long, default_value_t = 3)]
    pub lost_answers: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blow {
    Pause,
    Kill,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planned {
    Hit(Blow),
    LoseAnswer,
}

/// How far a blow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Ordered,
    /// The worker is stopped or dead.
    Down,
    /// So is its lease.
    Expired,
    /// It runs again, and its late write is on the way.
    Resumed,
    /// The job of a killed worker was taken over, or the late write was refused.
    Over,
    /// The late write was not refused.
    Accepted,
}

/// One worker that was hit.
#[derive(Debug, Clone, Copy)]
pub struct Hit {
    pub blow: Blow,
    pub job: JobId,
    pub token: Token,
    pub worker: WorkerId,
    /// By what the store answered to its last renewal.
    lease_ends: Duration,
    pub step: Step,
}

pub struct Chaos {
    state: Mutex<State>,
    /// Rung when a hit has moved on.
    moved: Condvar,
}

struct State {
    plan: HashMap<JobId, Planned>,
    hits: Vec<Hit>,
    /// Jobs whose worker will be paused, or is. One worker less than there are, so that one goes on.
    pausing: HashSet<JobId>,
    pausing_max: usize,
    cancelled: bool,
}

impl Chaos {
    pub fn new(amount: Amount, jobs: usize, workers: usize, random: &mut Random) -> Result<Self> {
        let Amount { pauses, kills, lost_answers } = amount;
        if pauses + kills + lost_answers > jobs {
            return Err(format!(
                "{pauses} pauses, {kills} kills and {lost_answers} lost answers need a job each, and there are {jobs}"
            )
            .into());
        }
        if pauses > 0 && workers < 2 {
            return Err("with a single worker nobody takes over while it is paused".into());
        }
        let mut victims: Vec<JobId> = (0..jobs).collect();
        for i in (1..jobs).rev() {
            victims.swap(i, random.below(i as u64 + 1) as usize);
        }
        let blows = std::iter::repeat_n(Planned::Hit(Blow::Pause), pauses)
            .chain(std::iter::repeat_n(Planned::Hit(Blow::Kill), kills))
            .chain(std::iter::repeat_n(Planned::LoseAnswer, lost_answers));
        let state = State {
            plan: victims.into_iter().zip(blows).collect(),
            hits: Vec::new(),
            pausing: HashSet::new(),
            pausing_max: workers.saturating_sub(1),
            cancelled: false,
        };
        Ok(Chaos { state: Mutex::new(state), moved: Condvar::new() })
    }

    /// Whether enough workers would still be running if the one that gets this job is paused over it.
    pub fn may_grant(&self, job: JobId) -> bool {
        let mut state = self.lock();
        if state.plan.get(&job) != Some(&Planned::Hit(Blow::Pause)) {
            return true;
        }
        if state.pausing.len() < state.pausing_max {
            state.pausing.insert(job);
        }
        state.pausing.contains(&job)
    }

    /// Hits the worker of this job if that is planned, and returns when it is down: `Some` says how.
    pub fn strike(&self, job: JobId, token: Token, worker: WorkerId, lease_ends: Duration) -> Option<Blow> {
        let mut state = self.lock();
        let Some(&Planned::Hit(blow)) = state.plan.get(&job) else { return None };
        state.plan.remove(&job);
        let index = state.hits.len();
        state.hits.push(Hit { blow, job, token, worker, lease_ends, step: Step::Ordered });
        // Where there is no SIGSTOP the worker is paused by letting it wait for its answer.
        let withhold = cfg!(not(unix)) && blow == Blow::Pause;
        let is_waiting = |state: &mut State| {
            let step = state.hits[index].step;
            let waits = match withhold {
                true => matches!(step, Step::Ordered | Step::Down | Step::Expired),
                false => step == Step::Ordered,
            };
            waits && !state.cancelled
        };
        drop(self.moved.wait_while(state, is_waiting).unwrap_or_else(PoisonError::into_inner));
        Some(blow)
    }

    /// Whether the answer to this result is to be lost; once.
    pub fn loses_answer(&self, job: JobId) -> bool {
        let mut state = self.lock();
        let planned = state.plan.get(&job) == Some(&Planned::LoseAnswer);
        planned && state.plan.remove(&job).is_some()
    }

    /// A result came, and the store gave this answer: perhaps it was the late write that is waited for.
    pub fn result_came(&self, job: JobId, token: Token, answer: &Answer) {
        let mut state = self.lock();
        let Some(hit) = state.hits.iter_mut().find(|hit| hit.job == job && hit.token == token) else {
            return;
        };
        hit.step = match answer {
            Answer::Fenced { .. } => Step::Over,
            _ => Step::Accepted,
        };
        state.pausing.remove(&job);
    }

    /// Moves every hit on as far as it goes; called again and again by the thread that owns the workers.
    pub fn step(&self, service: &Service, workers: &mut Workers) -> Result<()> {
        let mut state = self.lock();
        for hit in &mut state.hits {
            let Hit { blow, job, token, worker, lease_ends, step } = *hit;
            let note = |what| service.note(job, token, worker, what);
            hit.step = match (step, blow) {
                (Step::Ordered, Blow::Pause) => {
                    workers.pause(worker)?;
                    note(What::Paused);
                    Step::Down
                }
                (Step::Ordered, Blow::Kill) => {
                    workers.kill(worker)?;
                    note(What::Killed);
                    Step::Down
                }
                (Step::Down, _) if service.now() >= lease_ends => {
                    service.note_at(lease_ends, job, token, worker, What::Expired);
                    Step::Expired
                }
                (Step::Expired, Blow::Pause) if service.is_done(job)? => {
                    note(What::Resumed);
                    workers.resume(worker)?;
                    Step::Resumed
                }
                (Step::Expired, Blow::Kill) if service.is_done(job)? => Step::Over,
                _ => continue,
            };
            self.moved.notify_all();
        }
        Ok(())
    }

    /// Whether everything that was planned has happened and has had its effect.
    pub fn is_over(&self) -> bool {
        let state = self.lock();
        state.plan.is_empty() && state.hits.iter().all(|hit| matches!(hit.step, Step::Over | Step::Accepted))
    }

    pub fn hits(&self) -> Vec<Hit> {
        self.lock().hits.clone()
    }

    /// Lets go whoever waits in [`Chaos::strike`].
    pub fn cancel(&self) {
        self.lock().cancelled = true;
        self.moved.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// SplitMix64: the same seed, the same plan.
pub struct Random(pub u64);

impl Random {
    pub fn u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.u64() % bound
    }
}
