//! A store on a simulated disk, as most tests of the engine want it.
//!
//! Each open draws from another seed (two lives of one store must not share their random bits) and reads
//! sealed segments in the other mode, so that whatever is checked across a reopening is checked in both.
#![allow(dead_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidewall::storage::{Crash, SimDisk};
use tidewall::{Db, ManualClock, OperationId, Options, ReadMode, Token, Value};

pub struct Sim {
    pub disk: SimDisk,
    pub clock: ManualClock,
    opens: AtomicU64,
}

impl Sim {
    pub fn new() -> Self {
        Sim::on(SimDisk::new())
    }

    pub fn on(disk: SimDisk) -> Self {
        Sim { disk, clock: ManualClock::new(), opens: AtomicU64::new(0) }
    }

    pub fn options(&self) -> Options {
        let opens = self.opens.fetch_add(1, Ordering::Relaxed);
        Options::new()
            .storage(self.disk.clone())
            .clock(self.clock.clone())
            .deterministic(1 + opens * 1_000_003)
            .read_mode(if opens.is_multiple_of(2) { ReadMode::Map } else { ReadMode::Pread })
            .without_threads()
            .segment_bytes(16 << 10)
    }

    pub fn open(&self) -> Db {
        self.options().open("sim").expect("the store opens")
    }

    /// Opens with the store's own threads.
    pub fn open_threaded(&self) -> Db {
        Options::new()
            .storage(self.disk.clone())
            .clock(self.clock.clone())
            .segment_bytes(64 << 10)
            .open("sim")
            .expect("the store opens")
    }

    /// Closes the store, and opens it again.
    pub fn reopen(&self, db: Db) -> Db {
        db.close().expect("the store closes");
        self.open()
    }

    /// Cuts the power so that nothing un-synced survives, and opens what is left. The old handles are
    /// left on a disk that nobody looks at any more.
    pub fn power_cut(&mut self) -> Db {
        self.disk = self.disk.crash(Crash::None, self.opens.load(Ordering::Relaxed));
        self.open()
    }

    /// Another disk with what this one would have after a power cut.
    pub fn fork(&self) -> Sim {
        let fork = Sim::on(self.disk.crash(Crash::None, 7));
        fork.opens.store(self.opens.load(Ordering::Relaxed) + 100, Ordering::Relaxed);
        fork
    }
}

pub fn token(number: u64) -> Token {
    Token::new(number).expect("a token")
}

pub fn op(number: u64) -> OperationId {
    OperationId::new(number)
}

pub fn secs(number: u64) -> Duration {
    Duration::from_secs(number)
}

pub fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

pub fn text(value: Option<Value>) -> Option<String> {
    value.map(|value| String::from_utf8_lossy(&value).into_owned())
}

/// Asserts that a result is an error of a shape, and gives the error.
#[macro_export]
macro_rules! assert_err {
    ($result:expr, $pattern:pat $(if $guard:expr)? $(,)?) => {
        match $result {
            Err(error) => {
                let shown = format!("{error:?}");
                match error {
                    $pattern $(if $guard)? => {}
                    _ => panic!("expected {}, got {shown}", stringify!($pattern)),
                }
            }
            Ok(value) => panic!("expected {}, got Ok({value:?})", stringify!($pattern)),
        }
    };
}
