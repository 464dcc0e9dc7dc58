//! A thread that waits as a future does.
//!
//! One job: sleep until a waker is called, so that blocking and asynchronous calls are woken by the same
//! road.

use crate::sync::{AtomicU32, Ordering, wait_on, wake_all};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

struct Sleeper(AtomicU32);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        // Release: pairs with the exchange of the sleeper, who then sees what it was woken for.
        self.0.store(1, Ordering::Release);
        wake_all(&self.0);
    }
}

/// Polls until there is an answer, asleep in between.
pub(crate) fn block_on<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let sleeper = Arc::new(Sleeper(AtomicU32::new(0)));
    let waker = Waker::from(sleeper.clone());
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(answer) = poll(&mut cx) {
            return answer;
        }
        while sleeper.0.swap(0, Ordering::Acquire) == 0 {
            wait_on(&sleeper.0, 0);
        }
    }
}
