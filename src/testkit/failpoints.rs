//! Places in a program at which a test makes it stop, or takes its power away.

use crate::storage::SimDisk;
use crate::sync::Arc;
// Threads of the code under test wait here, never those of the store: not an event of its schedules.
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Named places in the code under test. Clones are handles on the same places.
///
/// The code calls [`reach`](Failpoints::reach) where a test may want it to stop; as long as no test does, that is a
/// look into an empty map. A worker that is held up there stands for one in a garbage collection, on a suspended
/// machine, behind a network: it goes on where it was, and does not know how long it stood.
///
/// ```
/// # #[cfg(feature = "testkit")] {
/// use std::time::Duration;
/// use tidewall::testkit::Failpoints;
///
/// let points = Failpoints::new();
/// let pause = points.pause("before the write");
/// let worker = std::thread::spawn({
///     let points = points.clone();
///     move || points.reach("before the write")
/// });
/// assert!(pause.reached(Duration::from_secs(10)));
/// pause.resume();
/// worker.join().expect("goes on");
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Failpoints(Arc<Shared>);

#[derive(Default)]
struct Shared {
    armed: Mutex<Armed>,
    changed: Condvar,
}

#[derive(Default)]
struct Armed {
    points: BTreeMap<String, Point>,
    next: u64,
}

/// What happens at a place.
enum Point {
    Pause { id: u64, reached: bool },
    CutPower(SimDisk),
}

impl Failpoints {
    /// Places at which nothing happens yet.
    pub fn new() -> Self {
        Failpoints::default()
    }

    /// The program is here. Returns at once, unless a test holds up whoever comes by; then when it lets go.
    pub fn reach(&self, name: &str) {
        let mut armed = self.0.armed.lock();
        let id = match armed.points.get_mut(name) {
            None => return,
            Some(Point::CutPower(disk)) => {
                disk.stop_at(disk.calls());
                armed.points.remove(name);
                return;
            }
            Some(Point::Pause { id, reached }) => {
                *reached = true;
                *id
            }
        };
        self.0.changed.notify_all();
        self.0.changed.wait_while(&mut armed, |armed| armed.pause(name, id).is_some());
    }

    /// From now on everybody who reaches the place is held up there, until the answer is dropped or resumed. What
    /// was to happen at the place before is forgotten.
    pub fn pause(&self, name: &str) -> Pause {
        let mut armed = self.0.armed.lock();
        let id = armed.next;
        armed.next += 1;
        armed.points.insert(name.to_owned(), Point::Pause { id, reached: false });
        self.0.changed.notify_all();
        Pause { points: self.clone(), name: name.to_owned(), id }
    }

    /// The first to reach the place loses its disk: every later call on it fails, as in the instant before a
    /// power cut. [`SimDisk::crash`] is what the cut leaves.
    pub fn cut_power(&self, name: &str, disk: &SimDisk) {
        self.0.armed.lock().points.insert(name.to_owned(), Point::CutPower(disk.clone()));
        self.0.changed.notify_all();
    }
}

impl Armed {
    /// Whether the pause with this id is still in force; if so, whether somebody has reached it.
    fn pause(&self, name: &str, id: u64) -> Option<bool> {
        match self.points.get(name) {
            Some(&Point::Pause { id: now, reached }) if now == id => Some(reached),
            _ => None,
        }
    }
}

impl fmt::Debug for Failpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.armed.lock().points.keys()).finish()
    }
}

/// A place at which everybody is held up while this lives, so that a test that fails leaves no thread behind.
#[must_use = "dropping it lets everybody go on"]
#[derive(Debug)]
pub struct Pause {
    points: Failpoints,
    name: String,
    id: u64,
}

impl Pause {
    /// Waits until somebody stands there, at most so long; whether somebody does.
    #[must_use = "false: nobody came by"]
    pub fn reached(&self, within: Duration) -> bool {
        let mut armed = self.points.0.armed.lock();
        let nobody = |armed: &mut Armed| armed.pause(&self.name, self.id) == Some(false);
        self.points.0.changed.wait_while_for(&mut armed, nobody, within);
        armed.pause(&self.name, self.id) == Some(true)
    }

    /// Lets everybody go on, as dropping it does.
    pub fn resume(self) {}
}

impl Drop for Pause {
    fn drop(&mut self) {
        let mut armed = self.points.0.armed.lock();
        if armed.pause(&self.name, self.id).is_some() {
            armed.points.remove(&self.name);
            self.points.0.changed.notify_all();
        }
    }
}
