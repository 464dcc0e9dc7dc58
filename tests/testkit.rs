//! The checker of `testkit` passes what is right and finds what is wrong; a pause holds up whoever comes by.
#![cfg(feature = "testkit")]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;
use tidewall::testkit::{Checked, Crash, Failpoints, History, LateWrite, ManualClock, SimDisk, Write};
use tidewall::{Db, Error, Keyspace, KeyspaceOptions, Options, Token};

const LONG: Duration = Duration::from_secs(20);

fn token(number: u64) -> Token {
    Token::new(number).expect("in range")
}

fn write<'a>(who: &'a str, number: u64, value: &'a [u8]) -> Write<'a> {
    Write { who, fence: b"f", token: token(number), key: b"k", value }
}

/// What the destination does with a write.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Says {
    Ok,
    No,
}

fn answers(history: &History, write: Write<'_>, says: Says) {
    let answer = history.write(write, |_| if says == Says::Ok { Ok(()) } else { Err(()) });
    assert_eq!(answer.is_ok(), says == Says::Ok);
}

fn finds(history: &History, found: Option<&[u8]>) {
    assert_eq!(history.read(b"k", || Ok::<_, ()>(found)), Ok(found));
}

fn late(history: &History) -> LateWrite {
    history.check().expect_err("a late write")
}

fn counts(history: &History) -> (usize, usize, usize, usize) {
    let Checked { writes, accepted, refused_late, reads, .. } = history.check().expect("no late write");
    (writes, accepted, refused_late, reads)
}

#[test]
fn an_accepted_write_below_a_token_known_before_is_late() {
    for moved in 0..3 {
        let history = History::new();
        match moved {
            0 => history.moved(b"f", token(5)),
            1 => history.moved_all(token(5)),
            _ => answers(&history, write("b", 5, b"b"), Says::Ok),
        }
        answers(&history, write("a", 4, b"a"), Says::No);
        let (_, _, refused, _) = counts(&history);
        assert_eq!(refused, 1);
        answers(&history, write("c", 5, b"c"), Says::Ok);
        assert!(history.check().is_ok(), "the same token may go on");
        answers(&history, write("a", 4, b"again"), Says::Ok);
        let late = late(&history);
        assert_eq!((late.who.as_str(), late.token, late.newer), ("a", token(4), token(5)));
        assert_eq!((&late.value[..], late.accepted), (&b"again"[..], true));
        assert!(history.to_string().contains("a writes k = again on f under 4: accepted"), "{history}");
    }
}

#[test]
fn another_fence_moves_nobody() {
    let history = History::new();
    history.moved(b"other", token(9));
    answers(&history, write("a", 1, b"a"), Says::Ok);
    assert_eq!(counts(&history), (1, 1, 0, 0));
}

#[test]
fn a_write_on_its_way_while_the_fence_moves_may_be_accepted() {
    let history = History::new();
    let answer = history.write(write("a", 1, b"a"), |_| {
        history.moved(b"f", token(2));
        Ok::<(), ()>(())
    });
    assert_eq!(answer, Ok(()));
    finds(&history, Some(b"a"));
    assert_eq!(counts(&history), (1, 1, 0, 1));
}

#[test]
fn what_was_refused_and_is_read_all_the_same_is_late() {
    let history = History::new();
    history.moved(b"f", token(2));
    answers(&history, write("a", 1, b"a"), Says::No);
    finds(&history, Some(b"somebody's before"));
    finds(&history, None);
    assert_eq!(counts(&history), (1, 0, 1, 2));
    finds(&history, Some(b"a"));
    assert!(!late(&history).accepted);
}

#[test]
fn what_lands_behind_the_first_look_of_the_new_holder_is_late() {
    // It began before the fence moved, and was never answered: only the second look shows when it landed.
    let history = History::new();
    let answer = history.write(write("a", 1, b"a"), |_| {
        finds(&history, Some(b"before"));
        history.moved(b"f", token(2));
        finds(&history, Some(b"a"));
        assert!(history.check().is_ok(), "it may have landed before the move, behind the first look");
        Err::<(), ()>(())
    });
    assert_eq!(answer, Err(()));
    assert!(history.check().is_ok());

    let history = History::new();
    let answer = history.write(write("a", 1, b"a"), |_| {
        history.moved(b"f", token(2));
        finds(&history, Some(b"before"));
        Err::<(), ()>(())
    });
    assert_eq!(answer, Err(()));
    assert!(history.check().is_ok());
    finds(&history, Some(b"a"));
    assert_eq!(late(&history).who, "a");
}

#[test]
fn a_value_that_somebody_wrote_in_time_accuses_nobody() {
    let history = History::new();
    answers(&history, write("b", 2, b"same"), Says::Ok);
    answers(&history, write("a", 1, b"same"), Says::No);
    finds(&history, Some(b"same"));
    assert_eq!(counts(&history), (2, 1, 1, 1));
}

fn store() -> (Db, Keyspace, ManualClock) {
    let clock = ManualClock::new();
    let db = Options::new().storage(SimDisk::new()).clock(clock.clone()).open("sim").expect("opens");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).expect("made");
    (db, jobs, clock)
}

/// Workers that are paused in front of their write, each taken over by the next: the store refuses all but the
/// last, and a map that takes everything is found out.
#[test]
fn workers_paused_in_turn_are_refused_and_an_unfenced_map_is_found_out() {
    const WORKERS: usize = 6;
    let (_db, jobs, clock) = store();
    let (points, fenced, unfenced) = (Failpoints::new(), History::new(), History::new());
    let map = Mutex::new(BTreeMap::new());
    std::thread::scope(|threads| {
        let mut paused = Vec::new();
        for n in 0..WORKERS {
            let name = format!("worker {n}");
            let pause = points.pause(&name);
            let (jobs, points, fenced, unfenced, map) = (&jobs, &points, &fenced, &unfenced, &map);
            let worker = threads.spawn(move || {
                let lease = jobs.lease(b"f").ttl(Duration::from_secs(1)).acquire().expect("free");
                fenced.moved(b"f", lease.token());
                unfenced.moved(b"f", lease.token());
                points.reach(&name);
                let write = Write { token: lease.token(), key: b"f", ..write(&name, 1, name.as_bytes()) };
                let put = |w: Write<'_>| Ok::<_, ()>(map.lock().unwrap().insert(w.key.to_vec(), n));
                unfenced.write(write, put).expect("takes everything");
                fenced.write(write, |w| jobs.put(w.token, w.key, w.value)).map(drop)
            });
            assert!(pause.reached(LONG), "nobody came by");
            clock.advance(Duration::from_secs(2));
            paused.push((pause, worker));
        }
        let last = paused.pop().expect("six");
        for (pause, worker) in paused {
            pause.resume();
            assert!(matches!(worker.join().expect("no panic"), Err(Error::Fenced { .. })));
        }
        last.0.resume();
        assert!(last.1.join().expect("no panic").is_ok());
    });
    let checked = fenced.check().expect("all were refused");
    assert_eq!((checked.writes, checked.accepted, checked.refused_late), (WORKERS, 1, WORKERS - 1));
    assert_eq!(late(&unfenced).who, "worker 0");
}

#[test]
fn a_pause_is_reached_by_whoever_comes_by_and_ends_with_its_guard() {
    let points = Failpoints::new();
    points.reach("x");
    let pause = points.pause("x");
    assert!(!pause.reached(Duration::from_millis(5)), "nobody has come by");
    std::thread::scope(|threads| {
        let workers: Vec<_> = (0..3).map(|_| threads.spawn(|| points.reach("x"))).collect();
        assert!(pause.reached(LONG));
        assert!(workers.iter().any(|worker| !worker.is_finished()));
        points.reach("y");
        drop(pause);
        for worker in workers {
            worker.join().expect("goes on");
        }
    });
    points.reach("x");
    // A newer pause takes the place of the older, whose end does not touch it.
    let (older, newer) = (points.pause("x"), points.pause("x"));
    assert!(!older.reached(LONG), "it is not in force any more, and says so at once");
    drop(older);
    assert_eq!(format!("{points:?}"), r#"{"x"}"#);
    drop(newer);
    assert_eq!(format!("{points:?}"), "{}");
}

#[test]
fn power_is_cut_once_where_it_is_asked_for() {
    let disk = SimDisk::new();
    let points = Failpoints::new();
    points.cut_power("here", &disk);
    let open = |disk: &SimDisk| Options::new().storage(disk.clone()).without_threads().open("sim");
    let db = open(&disk).expect("opens");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).expect("made");
    let lease = jobs.lease(b"f").acquire().expect("free");
    points.reach("elsewhere");
    jobs.put(lease.token(), b"f", b"kept").expect("held");
    assert!(!disk.is_stopped());
    points.reach("here");
    assert!(jobs.put(lease.token(), b"f", b"lost").is_err());
    assert!(disk.is_stopped());
    let after = disk.crash(Crash::All, 0);
    let db = open(&after).expect("opens");
    points.reach("here");
    let jobs = db.keyspace("jobs", KeyspaceOptions::new()).expect("there");
    assert_eq!(jobs.get(b"f").expect("reads").as_deref(), Some(&b"kept"[..]));
    jobs.raise_all(lease.token()).expect("its power is on");
}
