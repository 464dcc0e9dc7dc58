//! The names of the files of a store: made and parsed here and nowhere else.

use crate::types::{Lsn, SegmentId};

/// The file that carries the operating system's lock.
pub(crate) const LOCK: &str = "LOCK";
/// The list of segments.
pub(crate) const STORE: &str = "STORE";
/// A larger `STORE` on its way to replace the old one.
pub(crate) const STORE_NEW: &str = "STORE.new";

/// Figures of the process that has the store open, for whoever looks from outside; never read by the store.
pub(crate) const STATS: &str = "STATS";
/// The same on its way to replace the old one.
pub(crate) const STATS_NEW: &str = "STATS.new";
/// The list of a store in the making: it becomes `STORE` as the last step of a restore or a salvage.
pub(crate) const STORE_PART: &str = "STORE.part";

/// The index as of one place in the log.
pub(crate) fn index(at: Lsn) -> String {
    format!("INDEX-{}", at.get())
}

/// The place that an index file is named after; `None` for every name that [`index`] does not make.
pub(crate) fn parse_index(name: &str) -> Option<Lsn> {
    let at = Lsn::new(name.strip_prefix("INDEX-")?.parse().ok()?);
    (index(at) == name).then_some(at)
}

/// The file of a segment.
pub(crate) fn segment(id: SegmentId) -> String {
    format!("{:06}.seg", id.0)
}

/// The segment that a file name stands for; `None` for every name that [`segment`] does not make.
pub(crate) fn parse_segment(name: &str) -> Option<SegmentId> {
    let id = SegmentId(name.strip_suffix(".seg")?.parse().ok()?);
    (segment(id) == name).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_made_here_are_parsed() {
        for id in [0, 1, 999_999, 1_000_000, u32::MAX] {
            assert_eq!(parse_segment(&segment(SegmentId(id))), Some(SegmentId(id)));
        }
        for foreign in [
            "1.seg",
            "+00001.seg",
            "0000001.seg",
            "000001.seg~",
            ".seg",
            "STORE",
            "00000a.seg",
            "99999999999.seg",
        ] {
            assert_eq!(parse_segment(foreign), None, "{foreign}");
        }
        for at in [1, 42, u64::MAX].map(Lsn::new) {
            assert_eq!(parse_index(&index(at)), Some(at));
        }
        for foreign in ["INDEX", "INDEX-", "INDEX-+1", "INDEX-01", "INDEX-1~", "index-1", "INDEX-1x"] {
            assert_eq!(parse_index(foreign), None, "{foreign}");
        }
    }
}
