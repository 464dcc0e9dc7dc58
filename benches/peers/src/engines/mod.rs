//! The engines, one file each. To add one: implement [`FencedStore`], and add a line to [`ALL`].

mod canopy;
mod fjall;
pub mod floor;
mod lmdb;
mod memory;
mod queue;
mod redb;
#[cfg(feature = "rocksdb")]
mod rocks;
mod sled;
mod sqlite;
mod surreal;
mod tidewall;

use crate::store::{FencedStore, Res};
use std::path::Path;

/// An engine, used in one way.
#[derive(Debug)]
pub struct Engine {
    pub name: &'static str,
    /// What it leaves on the disk: ways that share this can open each other's files.
    pub kind: &'static str,
    pub sort: Sort,
    pub open: fn(&Path) -> Res<Box<dyn FencedStore>>,
    /// A thread can have many puts in flight.
    pub pipelines: bool,
}

/// What an engine stands for in the comparison.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sort {
    /// A store, used in the way that its documents recommend or that proved fastest in most cells.
    Peer,
    /// The same store, used in another way.
    Variant,
    /// The same store behind a group commit of ours.
    Queue,
    /// A log with no store behind it.
    LogFloor,
    /// A map with nothing durable behind it.
    MemoryFloor,
}

impl Engine {
    /// Whether it is a store that can be found on the disk afterwards.
    pub fn has_files(&self) -> bool {
        !matches!(self.sort, Sort::LogFloor | Sort::MemoryFloor)
    }
}

type Open = fn(&Path) -> Res<Box<dyn FencedStore>>;

const fn engine(name: &'static str, kind: &'static str, sort: Sort, open: Open) -> Engine {
    Engine { name, kind, sort, open, pipelines: false }
}

const fn pipelined(engine: Engine) -> Engine {
    Engine { pipelines: true, ..engine }
}

fn queued(engine: Res<Box<dyn FencedStore>>) -> Res<Box<dyn FencedStore>> {
    Ok(Box::new(queue::Queued::new(engine?)))
}

pub static ALL: &[Engine] = &[
    pipelined(engine("tidewall", "tidewall", Sort::Peer, tidewall::open)),
    engine("fjall", "fjall", Sort::Peer, fjall::open_group),
    engine("fjall-occ", "fjall", Sort::Variant, fjall::open_occ),
    engine("fjall-sw", "fjall", Sort::Variant, fjall::open_sw),
    engine("fjall-queue", "fjall", Sort::Queue, |dir| queued(fjall::open_group(dir))),
    engine("redb", "redb", Sort::Peer, redb::open),
    engine("redb-queue", "redb", Sort::Queue, |dir| queued(redb::open(dir))),
    engine("sled", "sled", Sort::Peer, sled::open),
    #[cfg(feature = "rocksdb")]
    engine("rocksdb", "rocksdb", Sort::Peer, rocks::open),
    #[cfg(feature = "rocksdb")]
    engine("rocksdb-recycle", "rocksdb", Sort::Variant, rocks::open_recycle),
    #[cfg(feature = "rocksdb")]
    engine("rocksdb-txn", "rocksdb", Sort::Variant, rocks::open_txn),
    #[cfg(feature = "rocksdb")]
    engine("rocksdb-queue", "rocksdb", Sort::Queue, |dir| queued(rocks::open(dir))),
    engine("sqlite", "sqlite", Sort::Peer, sqlite::open),
    engine("sqlite-queue", "sqlite", Sort::Queue, |dir| queued(sqlite::open(dir))),
    engine("lmdb", "lmdb", Sort::Peer, lmdb::open),
    engine("lmdb-queue", "lmdb", Sort::Queue, |dir| queued(lmdb::open(dir))),
    engine("canopydb", "canopydb", Sort::Peer, canopy::open),
    engine("canopydb-group", "canopydb", Sort::Variant, canopy::open_group),
    engine("canopydb-queue", "canopydb", Sort::Queue, |dir| queued(canopy::open(dir))),
    pipelined(engine("surrealkv", "surrealkv", Sort::Peer, surreal::open)),
    engine("surrealkv-queue", "surrealkv", Sort::Queue, |dir| queued(surreal::open(dir))),
    pipelined(engine("floor-committer", "floor", Sort::LogFloor, floor::open_committer)),
    engine("floor-gather", "floor", Sort::LogFloor, floor::open_gather),
    engine("floor-leader", "floor", Sort::LogFloor, floor::open_leader),
    engine("floor-leader-direct", "floor", Sort::LogFloor, floor::open_direct),
    engine("floor-pipe", "floor", Sort::LogFloor, floor::open_pipe),
    engine("memory-papaya", "memory-papaya", Sort::MemoryFloor, memory::open_papaya),
    engine("memory-btree", "memory-btree", Sort::MemoryFloor, memory::open_btree),
];

pub fn find(name: &str) -> Option<&'static Engine> {
    ALL.iter().find(|engine| engine.name == name)
}
