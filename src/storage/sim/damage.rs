//! Reading and changing the disk behind the store's back.
//!
//! None of this counts as a call, is refused, or waits for a sync: what is changed here is on the
//! medium at once. Adding or removing a file brings the whole directory to the medium with it.

use super::node::{Image, Node, SECTOR, fold, merge};
use super::{Inner, SimDisk};

/// Inspection and damage.
impl SimDisk {
    /// The names that a caller would see in this directory, in order.
    pub fn file_names(&self) -> Vec<String> {
        self.lock_inner().names_in(&self.dir)
    }

    /// The bytes that a reader would see.
    pub fn read_file(&self, name: &str) -> Option<Vec<u8>> {
        let inner = self.lock_inner();
        let node = inner.names.get(&self.full(name))?;
        Some(inner.nodes[node].cache.to_vec())
    }

    /// Whether a file reads the same here and on `other`, or is on neither. Quick where one disk was made of the
    /// other: what they share is not compared.
    pub fn has_same_file(&self, other: &SimDisk, name: &str) -> bool {
        let image = |disk: &SimDisk| {
            let inner = disk.lock_inner();
            inner.names.get(&disk.full(name)).map(|node| inner.nodes[node].cache.clone())
        };
        image(self) == image(other)
    }

    /// A hash over everything there is, in all directories: names and bytes, as seen and as on the medium. It changes
    /// with any of them, and with nothing else.
    pub fn image_hash(&self) -> u64 {
        let inner = self.lock_inner();
        let mut hash = 0;
        for (names, durable) in [(&inner.names, false), (&inner.durable_names, true)] {
            hash = fold(hash, names.len() as u64);
            for (name, node) in names {
                hash = fold(hash, rapidhash::v3::rapidhash_v3(name.as_bytes()));
                let node = &inner.nodes[node];
                hash = if durable { node.durable.hash(hash) } else { node.cache.hash(hash) };
            }
        }
        hash
    }

    /// Gives a file these bytes, creating it if it is missing.
    pub fn write_file(&self, name: &str, bytes: &[u8]) {
        let mut inner = self.lock_inner();
        let image = Image::from_bytes(bytes);
        let name = &*self.full(name);
        let node = inner.names.get(name).copied().unwrap_or(inner.next_node);
        if node == inner.next_node {
            inner.next_node += 1;
            inner.nodes.insert(node, Node::default());
        }
        inner.replace(node, image);
        inner.settle(name, Some(node));
    }

    /// Flips one bit, 0 to 7, of the byte at `offset`, as seen and as on the medium.
    ///
    /// # Panics
    /// When there is no such byte: damage that hits nothing would prove nothing.
    pub fn flip_bit(&self, name: &str, offset: u64, bit: u8) {
        let mut inner = self.lock_inner();
        let id = inner.must_find(&self.full(name));
        let node = inner.node(id);
        assert!(offset < node.cache.len, "{name} ends at {}, before {offset}", node.cache.len);
        let (index, at) = (offset / SECTOR as u64, (offset % SECTOR as u64) as usize);
        for image in [&mut node.cache, &mut node.durable] {
            let old = image.get(index).clone();
            let byte = old.as_ref().map_or(0, |bytes| bytes[at]) ^ (1 << bit);
            image.put(index, merge(&old, at, &[byte]));
        }
    }

    /// Cuts or extends a file; un-synced changes of it are gone.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn truncate(&self, name: &str, len: u64) {
        let mut inner = self.lock_inner();
        let node = inner.must_find(&self.full(name));
        let mut image = inner.node(node).cache.clone();
        image.cut(len);
        inner.replace(node, image);
    }

    /// Removes a file.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn remove_file(&self, name: &str) {
        let mut inner = self.lock_inner();
        inner.must_find(&self.full(name));
        inner.settle(&self.full(name), None);
    }
}

impl Inner {
    fn must_find(&self, name: &str) -> u64 {
        *self.names.get(name).unwrap_or_else(|| panic!("there is no file {name} on the simulated disk"))
    }

    fn replace(&mut self, id: u64, image: Image) {
        let node = self.node(id);
        (node.durable, node.cache) = (image.clone(), image);
        node.forget();
    }

    /// Makes the whole directory durable, with this name as given.
    fn settle(&mut self, name: &str, node: Option<u64>) {
        match node {
            Some(node) => self.names.insert(name.into(), node),
            None => self.names.remove(name),
        };
        self.durable_names = self.names.clone();
        self.dir_ops.clear();
        self.sweep();
    }
}
