//! Who never sleeps: whatever the store *could* answer in a state counts as answered, so that a later state
//! which contradicts it is a violation.

use crate::mistakes::{
    BELOW_TOKEN, GRACE_FENCED, HOLDER_FENCED, LOCKED_OUT, MARK_FELL, Mistake, VERSION_FELL, Violation,
};
use crate::rules::{Model, Source};
use crate::state::State;

impl Model {
    /// What the world could be told now, against what it was told before.
    pub(crate) fn observe(&self, mut s: State) -> Result<State, Violation> {
        if self.bounds.late_writes_only {
            return Ok(s);
        }
        for fence in self.fences() {
            let mark = self.mark(&s.published, fence);
            let space = self.space(fence);
            if mark < s.seen[fence] {
                return Err(MARK_FELL);
            }
            s.seen[fence] = mark;
            let read = if self.is(Mistake::ReadsWhatIsNotDurable) { s.ops() } else { s.visible_ops() };
            let version = self.version(fence, read);
            let is_forgotten_delete = version == 0 && s.seen_version[fence].is_multiple_of(2);
            if version < s.seen_version[fence] && !is_forgotten_delete {
                return Err(VERSION_FELL);
            }
            s.seen_version[fence] = s.seen_version[fence].max(version);
            if s.live[fence] != 0 && self.is_fenced(&s.appended, fence, s.live[fence]) {
                return Err(HOLDER_FENCED);
            }
            if s.kept[fence] != 0 && self.is_fenced(&s.appended, fence, s.kept[fence]) {
                return Err(GRACE_FENCED);
            }
            let is_ours = self.source(space) == Source::Store;
            if is_ours && !s.restored && mark < s.newest_handed_out(fence) {
                return Err(BELOW_TOKEN);
            }
            let newest = s.issued;
            if !is_ours && newest != 0 && self.is_fenced(&s.appended, fence, newest) {
                return Err(LOCKED_OUT);
            }
        }
        Ok(s)
    }
}
