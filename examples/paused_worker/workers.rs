//! The worker processes, from their parent's side.
//!
//! One job: start, pause, resume, kill, and leave none behind: dropping [`Workers`] kills them all, paused
//! ones too. Should the parent be killed, they end by themselves (closed stdin, and what [`die_with_parent`]
//! does for those that are stopped).

use crate::Result;
use crate::chaos::Random;
use crate::protocol::WorkerId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

pub struct Workers {
    program: PathBuf,
    addr: SocketAddr,
    renew_ms: u64,
    random: Random,
    children: BTreeMap<WorkerId, Child>,
    started: WorkerId,
}

impl Workers {
    pub fn start(count: usize, addr: SocketAddr, renew_ms: u64, random: Random) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut workers = Workers { program, addr, renew_ms, random, children: BTreeMap::new(), started: 0 };
        for _ in 0..count {
            workers.spawn()?;
        }
        Ok(workers)
    }

    fn spawn(&mut self) -> Result<()> {
        self.started += 1;
        let owner = u128::from(self.random.u64()) << 64 | u128::from(self.random.u64());
        let mut command = Command::new(&self.program);
        command
            .arg(crate::WORKER)
            .args(["--addr", &self.addr.to_string()])
            .args(["--worker", &self.started.to_string()])
            .args(["--owner", &format!("{owner:032x}")])
            .args(["--renew-ms", &self.renew_ms.to_string()])
            .stdin(Stdio::piped());
        die_with_parent(&mut command);
        let child = command.spawn().map_err(|e| format!("starting a worker: {e}"))?;
        self.children.insert(self.started, child);
        Ok(())
    }

    /// How many are left.
    pub fn len(&self) -> usize {
        self.children.len()
    }

    /// Forgets those that have ended as they were told; an error if one did not.
    pub fn reap(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        for (&worker, child) in &mut self.children {
            match child.try_wait()? {
                None => {}
                Some(status) if status.success() => ended.push(worker),
                Some(status) => return Err(format!("worker {worker} failed: {status}").into()),
            }
        }
        self.children.retain(|worker, _| !ended.contains(worker));
        Ok(())
    }

    /// Kills a worker and starts another one in its place.
    pub fn kill(&mut self, worker: WorkerId) -> Result<()> {
        let mut child = self.children.remove(&worker).ok_or_else(|| gone(worker))?;
        child.kill()?;
        child.wait()?;
        self.spawn()
    }

    /// Stops a worker, and returns when the kernel says that it stands.
    #[cfg(unix)]
    pub fn pause(&mut self, worker: WorkerId) -> Result<()> {
        let pid = self.signal(worker, libc::SIGSTOP)?;
        // SAFETY: all zeroes is a `siginfo_t`, and the call writes nothing else. It leaves an exit for
        // `Child` to collect: it asks for stops only.
        let waited = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, libc::WSTOPPED)
        };
        match waited {
            0 => Ok(()),
            _ => Err(format!("pausing worker {worker}: {}", std::io::Error::last_os_error()).into()),
        }
    }

    #[cfg(unix)]
    pub fn resume(&mut self, worker: WorkerId) -> Result<()> {
        self.signal(worker, libc::SIGCONT).map(drop)
    }

    #[cfg(unix)]
    fn signal(&self, worker: WorkerId, signal: libc::c_int) -> Result<libc::pid_t> {
        let pid = self.children.get(&worker).ok_or_else(|| gone(worker))?.id() as libc::pid_t;
        // SAFETY: passes two numbers. The pid is a child's that was not waited for, so it is still its.
        match unsafe { libc::kill(pid, signal) } {
            0 => Ok(pid),
            _ => Err(format!("signalling worker {worker}: {}", std::io::Error::last_os_error()).into()),
        }
    }

    /// No signals here: `Chaos::strike` pauses a worker by withholding the answer that it waits for.
    #[cfg(not(unix))]
    pub fn pause(&mut self, worker: WorkerId) -> Result<()> {
        self.children.contains_key(&worker).then_some(()).ok_or_else(|| gone(worker))
    }

    #[cfg(not(unix))]
    pub fn resume(&mut self, worker: WorkerId) -> Result<()> {
        self.pause(worker)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            // It may have ended by now. A stopped process is killed as any other.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn gone(worker: WorkerId) -> crate::BoxError {
    format!("worker {worker} is gone").into()
}

/// A group of its own keeps the terminal's Ctrl-C from a worker (the parent ends it), and gets it hung up by
/// the kernel when it is stopped and its parent dies.
#[cfg(unix)]
fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
    #[cfg(target_os = "linux")]
    // SAFETY: between fork and exec this makes one system call, with two numbers.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

#[cfg(not(unix))]
fn die_with_parent(_command: &mut Command) {}
