//! A gate at which the syncs of a disk wait, so that a test can look at what is on its way.

use crate::watched::Watch;
use std::sync::{Arc, Condvar, Mutex};

/// Open at first.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn shut(&self) {
        *self.0.0.lock().unwrap() = true;
    }

    pub fn open_up(&self) {
        *self.0.0.lock().unwrap() = false;
        self.0.1.notify_all();
    }
}

impl Watch for Gate {
    fn before_sync(&self) {
        let mut shut = self.0.0.lock().unwrap();
        while *shut {
            shut = self.0.1.wait(shut).unwrap();
        }
    }
}
