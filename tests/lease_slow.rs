//! A disk that stands still: nothing that needs it is answered, and nothing that does not is lost.
#![cfg(feature = "testkit")]

#[path = "support/gate.rs"]
mod gate;
mod leasekit;
#[path = "support/watched.rs"]
mod watched;

use gate::Gate;
use leasekit::{block_on, eventually, ms, poll_once};
use std::thread;
use tidewall::{Db, Error, KeyspaceOptions, ManualClock, Options};
use watched::Watched;

/// Opens the gate when it goes.
struct Opened<'s>(&'s Gate);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.open_up();
    }
}

#[test]
fn nothing_that_needs_the_disk_is_answered_while_it_stands_still() {
    let gate = Gate::default();
    let clock = ManualClock::new();
    let db: Db = Options::new().storage(Watched::by(&gate)).clock(clock.clone()).open("slow").unwrap();
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).unwrap();
    let held = jobs.lease(b"held").ttl(ms(100)).acquire().unwrap();
    let expiring = jobs.lease(b"f").ttl(ms(100)).acquire().unwrap();
    gate.shut();
    thread::scope(|scope| {
        // Also when an assertion fails: the threads would wait for it.
        let _opened = Opened(&gate);
        let taking_over = {
            let (jobs, clock) = (&jobs, &clock);
            scope.spawn(move || {
                clock.advance(ms(50));
                jobs.lease(b"f").ttl(ms(100)).wait(ms(10_000)).acquire().unwrap()
            })
        };
        // Not `stats`: that counts the bytes on the disk, and waits for a file that is being made.
        eventually(|| jobs.holders(b"f").unwrap().first().is_some_and(|holder| holder.waiting == 1));
        // Three times the ttl go by, while the holder of the other lease renews.
        for _ in 0..6 {
            held.renew().unwrap();
            clock.advance(ms(50));
        }
        // The grant is appended, and nobody has it; those who ask are not told that it is held, either. (Before
        // that they are told that somebody waits.)
        let end = std::time::Instant::now() + ms(60_000);
        let asking = loop {
            let mut asking = Box::pin(jobs.lease(b"f").acquire_async());
            match poll_once(asking.as_mut()) {
                std::task::Poll::Pending => break asking,
                std::task::Poll::Ready(answer) => {
                    assert!(matches!(answer, Err(Error::Held { .. })), "{answer:?}")
                }
            }
            assert!(std::time::Instant::now() < end);
        };
        assert!(!taking_over.is_finished());
        assert_eq!(
            jobs.mark(b"f").unwrap().unwrap().get(),
            expiring.token().get(),
            "not before it is durable"
        );
        held.renew().unwrap();
        gate.open_up();
        let new = taking_over.join().unwrap();
        assert!(matches!(block_on(asking), Err(Error::Held { .. })));
        assert!(held.is_live(), "renewed all the time, revoked by nobody");
        assert_eq!(new.token().get(), 3);
        assert!(matches!(jobs.put(expiring.token(), b"f", b"late"), Err(Error::Fenced { .. })));
    });
}
