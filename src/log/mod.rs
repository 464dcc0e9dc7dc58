//! The log: segments on a [`Storage`](crate::storage::Storage), from their creation to their seal.

pub(crate) mod guard;
pub(crate) mod image;
pub(crate) mod scan;
pub(crate) mod segment;
pub(crate) mod list;
pub(crate) mod pool;
mod recycle;
pub(crate) mod usage;
