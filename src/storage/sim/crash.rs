//! Power cuts: which of the un-synced changes are found on the medium.

use super::node::{Fate, Node, Op, SECTOR, Sector};
use super::{DirOp, Inner, SimDisk};
use crate::sync::Arc;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Which un-synced sector writes a power cut leaves on the medium.
///
/// The writes are taken in the order in which they were made, over all files. [`Crash::None`] and
/// [`Crash::All`] hold for lengths and directory operations too; under the other policies these are
/// drawn independently of the data and of each other, each by a coin whose bias is drawn anew for
/// every cut, so that "none", "all" and everything between turn up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Crash {
    /// Nothing un-synced survives.
    None,
    /// Everything survives.
    All,
    /// Each sector survives with this chance.
    Subset {
        /// From 0 to 100.
        percent: u8,
    },
    /// The first writes survive, up to a random one.
    Prefix,
    /// The last writes survive, from a random one on.
    Suffix,
    /// As [`Crash::Suffix`], but written last to first, so that of several contents of one sector
    /// the oldest stays.
    Reverse,
    /// Every sector but a random one survives.
    OneMissing,
    /// Only one random sector survives.
    OnePresent,
    /// The first writes survive up to a random one, which is torn.
    Torn {
        /// Whether the tear is within a sector, among the bytes that changed, and leaves what is before
        /// it or what is behind it; else a write is cut between two sectors.
        bytes: bool,
    },
}

/// SplitMix64: small, seeded, and the same everywhere.
pub(super) struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub fn chance(&mut self, percent: u8) -> bool {
        self.below(100) < u64::from(percent)
    }
}

/// One un-synced sector write: where it stands in the lists, and what it writes.
struct Pending {
    write: u64,
    node: u64,
    op: usize,
    index: u64,
}

/// The decision about every un-synced change.
struct Verdict {
    ops: BTreeMap<u64, Vec<Fate>>,
    dir: Vec<bool>,
}

/// Power cuts and kills. None of them changes the disk itself, so that one run serves many cuts.
impl SimDisk {
    /// The disk as it is found after a power cut under `policy`. The seed decides what the policy
    /// leaves open; the same seed gives the same disk.
    ///
    /// The new disk has everything on the medium, no lock, no fault, limit or other setting, and
    /// its counters at zero.
    pub fn crash(&self, policy: Crash, seed: u64) -> SimDisk {
        let inner = self.lock_inner();
        let pending = inner.pending();
        let mut rng = Rng::new(seed);
        let kept = choose(policy, &pending, &mut rng, |sector| inner.changed(sector));
        let percent = |rng: &mut Rng| match policy {
            Crash::None => 0,
            Crash::All => 100,
            _ => rng.below(101) as u8,
        };
        let lengths = percent(&mut rng);
        let dirs = percent(&mut rng);
        let verdict = inner.verdict(&pending, &kept, lengths, dirs, &mut rng);
        inner.rebuild(&verdict)
    }

    /// The disk after a power cut that left exactly the un-synced sectors whose bits are set in
    /// `kept`, and all or none of the un-synced lengths and directory operations.
    ///
    /// With [`SimDisk::pending_sectors`] this tries every subset of a few sectors; bit 0 is the
    /// oldest.
    ///
    /// # Panics
    /// When more than 64 sectors are pending.
    pub fn crash_exact(&self, kept: u64, lengths: bool, dirs: bool) -> SimDisk {
        let inner = self.lock_inner();
        let pending = inner.pending();
        assert!(pending.len() <= 64, "{} un-synced sectors are too many to be named by bits", pending.len());
        let fate = |bit: usize| if kept >> bit & 1 == 1 { Fate::Kept } else { Fate::Lost };
        let fates: Vec<Fate> = (0..pending.len()).map(fate).collect();
        let percent = |all: bool| if all { 100 } else { 0 };
        let verdict = inner.verdict(&pending, &fates, percent(lengths), percent(dirs), &mut Rng::new(0));
        inner.rebuild(&verdict)
    }

    /// How many sector writes are un-synced, in files that a power cut could leave behind.
    pub fn pending_sectors(&self) -> usize {
        self.lock_inner().pending().len()
    }

    /// The disk after the process was killed: the page cache survives, so a later power cut can
    /// still lose what is un-synced. Open files, locks, settings and counters are gone.
    pub fn kill(&self) -> SimDisk {
        let inner = self.lock_inner();
        let mut next = Inner {
            names: inner.names.clone(),
            durable_names: inner.durable_names.clone(),
            dir_ops: inner.dir_ops.clone(),
            next_node: inner.next_node,
            next_write: inner.next_write,
            ..Inner::default()
        };
        for &id in &inner.survivors() {
            let node = &inner.nodes[&id];
            next.nodes.insert(id, Node { handles: Arc::default(), ..node.clone() });
        }
        SimDisk::from_inner(next)
    }
}

impl Inner {
    /// The files that some power cut could leave a name for.
    fn survivors(&self) -> BTreeSet<u64> {
        let created = self.dir_ops.iter().filter_map(|op| match op {
            DirOp::Create { node, .. } => Some(*node),
            DirOp::Rename { .. } | DirOp::Remove { .. } => None,
        });
        self.durable_names.values().copied().chain(created).collect()
    }

    /// All un-synced sector writes, oldest first.
    fn pending(&self) -> Vec<Pending> {
        let mut pending = Vec::new();
        for node in self.survivors() {
            for (op, change) in self.nodes[&node].ops.iter().enumerate() {
                if let Op::Sector { index, write, .. } = *change {
                    pending.push(Pending { write, node, op, index });
                }
            }
        }
        // Stable: the sectors of one write stay in order.
        pending.sort_by_key(|sector| sector.write);
        pending
    }

    /// From the first to the last byte in which a pending sector differs from what was there before it.
    fn changed(&self, sector: &Pending) -> Range<usize> {
        let node = &self.nodes[&sector.node];
        let (before, new) = match node.ops.get(sector.op) {
            Some(Op::Sector { bytes, .. }) => (&node.ops[..sector.op], bytes),
            _ => return 0..0,
        };
        let earlier = before.iter().rev().find_map(|op| match op {
            Op::Sector { index, bytes, .. } if *index == sector.index => Some(bytes),
            _ => None,
        });
        let old = earlier.unwrap_or(node.durable.get(sector.index));
        let byte = |sector: &Sector, at: usize| sector.as_ref().map_or(0, |bytes| bytes[at]);
        let differs = |&at: &usize| byte(old, at) != byte(new, at);
        match (0..SECTOR).find(differs) {
            Some(first) => first..(0..SECTOR).rev().find(differs).map_or(SECTOR, |last| last + 1),
            None => 0..0,
        }
    }

    fn verdict(&self, pending: &[Pending], kept: &[Fate], lengths: u8, dirs: u8, rng: &mut Rng) -> Verdict {
        let mut ops = BTreeMap::new();
        for id in self.survivors() {
            let length = |op: &Op| match op {
                Op::Len { .. } if rng.chance(lengths) => Fate::Kept,
                _ => Fate::Lost,
            };
            ops.insert(id, self.nodes[&id].ops.iter().map(length).collect::<Vec<Fate>>());
        }
        for (sector, &fate) in pending.iter().zip(kept) {
            if let Some(fates) = ops.get_mut(&sector.node) {
                fates[sector.op] = fate;
            }
        }
        Verdict { ops, dir: self.dir_ops.iter().map(|_| rng.chance(dirs)).collect() }
    }

    fn rebuild(&self, verdict: &Verdict) -> SimDisk {
        let mut names = self.durable_names.clone();
        for (op, _) in self.dir_ops.iter().zip(&verdict.dir).filter(|(_, kept)| **kept) {
            op.apply(&mut names);
        }
        let mut next = Inner { next_node: self.next_node, ..Inner::default() };
        for &id in names.values() {
            let image = self.nodes[&id].after(&verdict.ops[&id]);
            next.nodes.insert(id, Node::synced(image));
        }
        next.durable_names = names.clone();
        next.names = names;
        SimDisk::from_inner(next)
    }
}

/// The fate of each sector write.
fn choose(
    policy: Crash,
    pending: &[Pending],
    rng: &mut Rng,
    changed: impl Fn(&Pending) -> Range<usize>,
) -> Vec<Fate> {
    let count = pending.len();
    let mut fates = vec![Fate::Lost; count];
    if count == 0 {
        return fates;
    }
    let one = rng.below(count as u64) as usize;
    let edge = rng.below(count as u64 + 1) as usize;
    match policy {
        Crash::None => {}
        Crash::All => fates.fill(Fate::Kept),
        Crash::Subset { percent } => {
            for fate in &mut fates {
                if rng.chance(percent) {
                    *fate = Fate::Kept;
                }
            }
        }
        Crash::Prefix => fates[..edge].fill(Fate::Kept),
        Crash::Suffix => fates[edge..].fill(Fate::Kept),
        Crash::Reverse => {
            let mut seen = BTreeSet::new();
            for (fate, sector) in fates.iter_mut().zip(pending).skip(edge) {
                if seen.insert((sector.node, sector.index)) {
                    *fate = Fate::Kept;
                }
            }
        }
        Crash::OneMissing => {
            fates.fill(Fate::Kept);
            fates[one] = Fate::Lost;
        }
        Crash::OnePresent => fates[one] = Fate::Kept,
        Crash::Torn { bytes: true } => {
            fates[..one].fill(Fate::Kept);
            // A tear outside of what changed would be none.
            let changed = changed(&pending[one]);
            let at = match changed.len() as u64 {
                0 | 1 => 1 + rng.below(SECTOR as u64 - 1) as usize,
                len => changed.start + 1 + rng.below(len - 1) as usize,
            };
            fates[one] = if rng.chance(50) { Fate::Head(at) } else { Fate::Tail(at) };
        }
        Crash::Torn { bytes: false } => {
            let write = pending[one].write;
            let first = pending.partition_point(|sector| sector.write < write);
            let sectors = pending.partition_point(|sector| sector.write <= write) - first;
            // A write of one sector has no place to be cut: it is there or not.
            let cut = if sectors > 1 { 1 + rng.below(sectors as u64 - 1) } else { rng.below(2) };
            fates[..first + cut as usize].fill(Fate::Kept);
        }
    }
    fates
}

impl DirOp {
    /// Does it again to what a power cut left, where that makes sense: a file whose creation is lost
    /// can be neither renamed nor removed.
    pub(super) fn apply(&self, names: &mut BTreeMap<Arc<str>, u64>) {
        match self {
            DirOp::Create { name, node } => {
                names.insert(name.clone(), *node);
            }
            DirOp::Rename { from, to, node } => {
                if names.get(from) == Some(node) {
                    names.remove(from);
                    names.insert(to.clone(), *node);
                }
            }
            DirOp::Remove { name, node } => {
                if names.get(name) == Some(node) {
                    names.remove(name);
                }
            }
        }
    }
}
