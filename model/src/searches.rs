//! What is searched, within which bounds.
//!
//! Everything at once is too much at any useful depth; so each search has a part of the protocol that belongs
//! together, and no part is in none.

use crate::rules::{
    Bounds, EXTERNAL, Layout, Model, NOTHING, ONE_FENCE, ONE_KEYSPACE, SLOTS, THREE_FENCES, TWO_KEYSPACES,
};

/// One part of the protocol, and two sizes of it.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    pub name: &'static str,
    pub layout: Layout,
    /// For every change: all searches together take well under a minute.
    pub small: Bounds,
    /// For now and then: some minutes and gigabytes.
    pub large: Bounds,
}

impl Search {
    pub fn model(&self, bounds: Bounds) -> Model {
        Model { layout: self.layout, bounds, mistake: None }
    }
}

const MARKS: Bounds = Bounds {
    grants: 3,
    appends: 6,
    crashes: 1,
    deletes: true,
    folds: true,
    raises: 1,
    raise_alls: true,
    ..NOTHING
};
const FEWER: Bounds = Bounds { appends: 4, ..MARKS };
const OPS: Bounds = Bounds { ops: 2, grants: 2, appends: 5, ..MARKS };
const GRACE: Bounds = Bounds { grace: true, releases: true, breaks: true, crashes: 2, appends: 4, ..MARKS };
const LOG: Bounds = Bounds { grants: 2, appends: 4, segments: 3, moves: 2, raises: 0, ..MARKS };
const COPY: Bounds = Bounds { checkpoint: true, appends: 4, ..MARKS };
const OUTER: Bounds = Bounds { issues: 2, grants: 1, ..COPY };
const HELD: Bounds = Bounds { grace: true, releases: true, deletes: false, raises: 0, grants: 4, ..MARKS };

const fn search(name: &'static str, layout: Layout, small: Bounds, large: Bounds) -> Search {
    Search { name, layout, small, large }
}

/// All of them.
pub const SEARCHES: [Search; 14] = [
    search("marks", ONE_KEYSPACE, MARKS, Bounds { appends: 7, crashes: 2, grants: 4, ..MARKS }),
    search(
        "crash after crash",
        ONE_KEYSPACE,
        Bounds { appends: 5, crashes: 3, ..MARKS },
        Bounds { crashes: 4, ..MARKS },
    ),
    search("two keyspaces", TWO_KEYSPACES, Bounds { appends: 5, ..MARKS }, MARKS),
    search("three fences", THREE_FENCES, FEWER, Bounds { appends: 5, ..MARKS }),
    search("operations", ONE_KEYSPACE, OPS, Bounds { appends: 6, grants: 3, ..OPS }),
    search("leases and grace", ONE_KEYSPACE, GRACE, Bounds { appends: 5, ..GRACE }),
    search("slots", SLOTS, HELD, Bounds { appends: 7, crashes: 2, ..HELD }),
    search("compaction", ONE_FENCE, LOG, Bounds { appends: 5, ..LOG }),
    search(
        "compaction, operations",
        ONE_FENCE,
        Bounds { ops: 1, ..LOG },
        Bounds { ops: 1, appends: 5, ..LOG },
    ),
    search(
        "compaction, grace",
        ONE_FENCE,
        Bounds { grace: true, releases: true, moves: 1, ..LOG },
        Bounds { grace: true, releases: true, ..LOG },
    ),
    search("compaction, two fences", ONE_KEYSPACE, Bounds { moves: 1, ..LOG }, Bounds { appends: 5, ..LOG }),
    search("restore", ONE_KEYSPACE, COPY, Bounds { appends: 6, ..COPY }),
    search(
        "restore, compaction",
        ONE_FENCE,
        Bounds { checkpoint: true, segments: 2, moves: 1, ..LOG },
        Bounds { checkpoint: true, ..LOG },
    ),
    search("outer tokens", EXTERNAL, OUTER, Bounds { appends: 5, grants: 2, ..OUTER }),
];
