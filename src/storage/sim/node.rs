//! One file of the simulated disk: what is on the medium, what reads see, and what lies between.

use crate::sync::Arc;
use std::ops::Deref;
use std::sync::OnceLock;

/// What a disk writes as a whole, except where a test tears it.
pub(super) const SECTOR: usize = 512;
/// The content of one sector; `None` is all zeros, so that zeroed files cost next to nothing.
pub(super) type Sector = Option<Arc<Content>>;

/// The bytes of a sector, and their hash once somebody asked for it: most sectors are shared by many disks.
pub(super) struct Content {
    bytes: [u8; SECTOR],
    hash: OnceLock<u64>,
}

impl Content {
    fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| rapidhash::v3::rapidhash_v3(&self.bytes))
    }
}

impl Deref for Content {
    type Target = [u8; SECTOR];

    fn deref(&self) -> &[u8; SECTOR] {
        &self.bytes
    }
}

/// The bytes of a file. Sectors are never changed in place but replaced, so a clone is one count up
/// and a changed clone shares all sectors but the changed ones.
#[derive(Clone, Default)]
pub(super) struct Image {
    pub len: u64,
    sectors: Arc<Vec<Sector>>,
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &Sector, b: &Sector| match (a, b) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a.bytes == b.bytes,
            (a, b) => a.is_none() && b.is_none(),
        };
        let sectors = self.sectors.len().max(other.sectors.len()) as u64;
        self.len == other.len
            && (Arc::ptr_eq(&self.sectors, &other.sectors)
                || (0..sectors).all(|at| same(self.get(at), other.get(at))))
    }
}

impl Image {
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut image = Image { len: bytes.len() as u64, ..Image::default() };
        for (index, chunk) in bytes.chunks(SECTOR).enumerate() {
            image.put(index as u64, merge(&None, 0, chunk));
        }
        image
    }

    pub fn get(&self, index: u64) -> &Sector {
        self.sectors.get(index as usize).unwrap_or(&None)
    }

    /// Replaces a sector, wherever the end is.
    pub fn put(&mut self, index: u64, sector: Sector) {
        let index = index as usize;
        if index < self.sectors.len() {
            Arc::make_mut(&mut self.sectors)[index] = sector;
        } else if sector.is_some() {
            let sectors = Arc::make_mut(&mut self.sectors);
            sectors.resize(index, None);
            sectors.push(sector);
        }
    }

    /// Reads up to the end.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let count = self.len.saturating_sub(offset).min(buf.len() as u64) as usize;
        let mut done = 0;
        while done < count {
            let at = offset + done as u64;
            let (index, skip) = (at / SECTOR as u64, (at % SECTOR as u64) as usize);
            let part = (SECTOR - skip).min(count - done);
            let into = &mut buf[done..done + part];
            match self.get(index) {
                Some(bytes) => into.copy_from_slice(&bytes[skip..skip + part]),
                None => into.fill(0),
            }
            done += part;
        }
        count
    }

    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        self.read(&mut bytes, 0);
        bytes
    }

    /// Sets the length; every byte at and beyond it becomes zero.
    pub fn cut(&mut self, len: u64) {
        self.len = len;
        let (whole, rest) = ((len / SECTOR as u64) as usize, (len % SECTOR as u64) as usize);
        let keep = whole + usize::from(rest > 0);
        if self.sectors.len() > keep {
            Arc::make_mut(&mut self.sectors).truncate(keep);
        }
        if let Some(last) = self.get(whole as u64)
            && last[rest..].iter().any(|&byte| byte != 0)
        {
            self.put(whole as u64, merge(&None, 0, &last.clone()[..rest]));
        }
    }

    /// Folds length and content into a hash; equal content gives the same answer, however it came.
    pub fn hash(&self, mut hash: u64) -> u64 {
        hash = fold(hash, self.len);
        for (index, sector) in self.sectors.iter().enumerate() {
            if let Some(bytes) = sector {
                hash = fold(fold(hash, index as u64), bytes.hash());
            }
        }
        hash
    }
}

/// `old` with `bytes` laid over it from `skip`.
pub(super) fn merge(old: &Sector, skip: usize, bytes: &[u8]) -> Sector {
    let mut new = old.as_ref().map_or([0; SECTOR], |old| old.bytes);
    new[skip..skip + bytes.len()].copy_from_slice(bytes);
    (new != [0; SECTOR]).then(|| Arc::new(Content { bytes: new, hash: OnceLock::new() }))
}

/// Takes one more word into a running hash.
pub(super) fn fold(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ 0x9e37_79b9_7f4a_7c15) * u128::from(word ^ 0xd1b5_4a32_d192_ed03);
    (product as u64 ^ (product >> 64) as u64).wrapping_add(hash.rotate_left(23))
}

/// What happened to a file since its last sync.
#[derive(Clone)]
pub(super) enum Op {
    /// A sector got this content, by the write with this number.
    Sector { index: u64, write: u64, bytes: Sector },
    /// The file ends here now; whether it got shorter.
    Len { len: u64, cut: bool },
}

/// What becomes of an [`Op`] when the power goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Lost,
    Kept,
    /// Of the new sector, only the bytes below this one are on the medium.
    Head(usize),
    /// Of the new sector, only the bytes from this one on are on the medium.
    Tail(usize),
}

/// A file, whatever its names.
#[derive(Clone, Default)]
pub(super) struct Node {
    /// The medium. Between syncs, early write-back may have put bytes beyond the durable length.
    pub durable: Image,
    /// What reads see. All zeros beyond its length.
    pub cache: Image,
    /// How the second came from the first, in order.
    pub ops: Vec<Op>,
    /// The length that the medium has once all ops are on it. Less than what reads see after a failed
    /// sync took lengths with it; then the next write into the part between sets a length again.
    pub reach: u64,
    /// Shared with every open handle, so that their count says whether an unlinked file is in use.
    pub handles: Arc<()>,
}

impl Node {
    /// A file whose content is on the medium.
    pub fn synced(image: Image) -> Self {
        Node { reach: image.len, durable: image.clone(), cache: image, ..Node::default() }
    }

    pub fn write(&mut self, bytes: &[u8], offset: u64, write: u64) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (index, skip) = (at / SECTOR as u64, (at % SECTOR as u64) as usize);
            let part = (SECTOR - skip).min(bytes.len() - done);
            let sector = merge(self.cache.get(index), skip, &bytes[done..done + part]);
            self.cache.put(index, sector.clone());
            self.ops.push(Op::Sector { index, write, bytes: sector });
            done += part;
        }
        let end = offset + bytes.len() as u64;
        if !bytes.is_empty() && end > self.reach {
            self.reach = end;
            self.ops.push(Op::Len { len: end, cut: false });
        }
        if !bytes.is_empty() {
            self.cache.len = self.cache.len.max(end);
        }
    }

    pub fn set_len(&mut self, len: u64) {
        if len != self.cache.len || len != self.reach {
            self.ops.push(Op::Len { len, cut: len < self.cache.len.max(self.reach) });
            self.reach = len;
            self.cache.cut(len);
        }
    }

    pub fn sync(&mut self) {
        for op in self.ops.drain(..) {
            apply(&mut self.durable, op, Fate::Kept);
        }
    }

    /// Takes all changes for clean, whatever is on the medium.
    pub fn forget(&mut self) {
        self.ops.clear();
        self.reach = self.durable.len;
    }

    /// Puts what the cache holds of one un-synced sector on the medium, ahead of any sync. The op
    /// stays in the list (applying it again changes nothing), but older contents of the sector can
    /// no longer come back.
    pub fn write_back(&mut self, position: usize) {
        let Some(Op::Sector { index, .. }) = self.ops.get(position) else { return };
        let index = *index;
        let same = |op: &Op| matches!(op, Op::Sector { index: i, .. } if *i == index);
        let Some(latest) = self.ops.iter().rposition(same) else { return };
        if let Op::Sector { bytes, .. } = self.ops[latest].clone() {
            self.durable.put(index, bytes);
        }
        let mut at = 0;
        self.ops.retain(|op| {
            let older = at < latest && same(op);
            at += 1;
            !older
        });
    }

    /// The medium after a power cut, one fate for each op.
    pub fn after(&self, fates: &[Fate]) -> Image {
        let mut image = self.durable.clone();
        for (op, &fate) in self.ops.iter().zip(fates) {
            if fate != Fate::Lost {
                apply(&mut image, op.clone(), fate);
            }
        }
        image.cut(image.len);
        image
    }
}

fn apply(image: &mut Image, op: Op, fate: Fate) {
    match op {
        Op::Len { len, cut: true } => image.cut(len),
        // Not `cut`: sectors may be on the medium before the length that makes them visible.
        Op::Len { len, cut: false } => image.len = len,
        Op::Sector { index, bytes, .. } => {
            let new = bytes.as_ref().map_or(&[0; SECTOR], |bytes| &bytes.bytes);
            let sector = match fate {
                Fate::Head(at) => merge(image.get(index), 0, &new[..at]),
                Fate::Tail(at) => merge(image.get(index), at, &new[at..]),
                Fate::Lost | Fate::Kept => bytes,
            };
            image.put(index, sector);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_zeroes_what_a_later_growth_shows() {
        let mut node = Node::synced(Image::from_bytes(&[7; 2000]));
        node.set_len(700);
        node.set_len(2000);
        let mut expected = vec![7; 700];
        expected.resize(2000, 0);
        assert_eq!(node.cache.to_vec(), expected);
        node.sync();
        assert_eq!(node.durable.to_vec(), expected);
    }

    #[test]
    fn write_beyond_the_end_leaves_zeros_between() {
        let mut node = Node::default();
        node.write(b"x", 1000, 0);
        assert_eq!(node.cache.len, 1001);
        assert_eq!(node.cache.to_vec()[..1000], [0; 1000]);
    }

    #[test]
    fn clones_share_all_sectors_but_the_changed_ones() {
        let before = Image::from_bytes(&[7; 4 * SECTOR]);
        let mut after = before.clone();
        after.put(2, None);
        for index in 0..4 {
            let same = match (before.get(index), after.get(index)) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                _ => false,
            };
            assert_eq!(same, index != 2);
        }
    }

    #[test]
    fn zeros_cost_no_sector() {
        let mut node = Node::default();
        node.write(&[0; 64 << 10], 0, 0);
        assert!(node.cache.sectors.is_empty());
        assert_eq!(node.cache.len, 64 << 10);
        node.write(&[1; 512], 0, 1);
        node.write(&[0; 512], 0, 2);
        assert!(node.cache.get(0).is_none());
    }

    #[test]
    fn written_back_sector_survives_and_its_older_content_does_not_return() {
        let mut node = Node::synced(Image::from_bytes(&[1; 512]));
        node.write(&[2; 512], 0, 0);
        node.write(&[3; 512], 0, 1);
        node.write_back(0);
        assert_eq!(node.ops.len(), 1);
        for fate in [Fate::Lost, Fate::Kept] {
            assert_eq!(node.after(&[fate]).to_vec(), [3; 512]);
        }
    }

    #[test]
    fn equal_content_hashes_alike_however_it_came() {
        let mut written = Node::default();
        written.write(&[9; 1024], 0, 0);
        written.write(&[0; 512], 512, 1);
        let mut expected = vec![9; 512];
        expected.resize(1024, 0);
        assert_eq!(written.cache.hash(1), Image::from_bytes(&expected).hash(1));
        assert_ne!(written.cache.hash(1), Image::from_bytes(&[9; 1024]).hash(1));
        assert_ne!(written.cache.hash(1), Image::from_bytes(&expected[..1023]).hash(1));
    }
}
