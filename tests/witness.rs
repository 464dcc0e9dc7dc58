//! The checker of concurrent histories by their lsns is itself checked: it says the same as a search through
//! every order, of many small histories, most of them spoilt in one place.

#[path = "support/witness.rs"]
mod witness;

use std::collections::BTreeMap;
use witness::{Ask, Event, History, Told, Valued, check, search};

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % bound
    }
}

/// A history of some calls at once, answered as a store would.
fn draw(rng: &mut Rng) -> History {
    const BASE: u64 = 2;
    let mut history = History { base: BASE, ..History::default() };
    let (mut keys, mut counter) = (BTreeMap::<u8, (Option<Valued>, u64)>::new(), 0);
    let mut lsn = BASE;
    for nth in 0..3 + rng.below(5) {
        // The point at which it happens, with its beginning before and its end behind.
        let at = 10 * (nth + 1);
        let (began, ended) = (at - rng.below(25).min(at), at + rng.below(25));
        let key = rng.below(2) as u8;
        let ask = match rng.below(6) {
            0 | 1 => Ask::Put { key, token: 1 + nth + rng.below(3) * 10 },
            2 => Ask::PutIfAbsent { key, token: 1 + nth + rng.below(2) * 10 },
            3 => Ask::Get { key },
            4 => Ask::Mark { key },
            _ => Ask::Acquire { key: 2 },
        };
        // Now and then something else takes an lsn.
        lsn += u64::from(rng.below(6) == 0);
        let (value, mark) = keys.get(&key).copied().unwrap_or_default();
        let told = match ask {
            Ask::Put { token, .. } | Ask::PutIfAbsent { token, .. } if token < mark => Told::Fenced { mark },
            Ask::PutIfAbsent { .. } if value.is_some() => {
                Told::Conflict { lsn: value.map_or(0, |value| value.lsn) }
            }
            Ask::Put { token, .. } | Ask::PutIfAbsent { token, .. } => {
                lsn += 1;
                keys.insert(key, (Some(Valued { token, lsn }), token));
                Told::Done { lsn }
            }
            Ask::Acquire { key } => {
                (lsn, counter) = (lsn + 1, counter + 1);
                keys.insert(key, (None, counter));
                Told::Granted { token: counter }
            }
            Ask::Get { .. } => Told::Value(value),
            Ask::Mark { .. } => Told::Mark(mark),
        };
        let is_lost_sight_of = rng.below(5) == 0;
        let told = if is_lost_sight_of { Told::Unknown } else { told };
        history.events.push(Event {
            began,
            ended: if is_lost_sight_of { u64::MAX } else { ended },
            ask,
            told,
        });
    }
    history.last_lsn = lsn;
    history.came_back = (0..3).map(|key| (key, keys.get(&key).copied().unwrap_or_default())).collect();
    history
}

/// Changes one thing.
fn spoil(history: &mut History, rng: &mut Rng) {
    let at = rng.below(history.events.len() as u64) as usize;
    let event = &mut history.events[at];
    match (rng.below(8), &mut event.told) {
        (0, _) => event.began = event.began.saturating_sub(15),
        (1, _) => (event.began, event.ended) = (event.began + 15, event.ended.saturating_add(15)),
        (2, _) => history.last_lsn -= u64::from(history.last_lsn > history.base),
        (3, _) => {
            let key = rng.below(3) as u8;
            let (_, mark) = history.came_back.get_mut(&key).unwrap();
            *mark = mark.wrapping_sub(1) % 40;
        }
        (_, Told::Done { lsn }) => *lsn += rng.below(3),
        (_, Told::Granted { token }) => *token += rng.below(2),
        (_, Told::Fenced { mark }) => *mark = 1 + rng.below(30),
        (_, Told::Conflict { lsn }) => *lsn = 3 + rng.below(6),
        (_, Told::Value(value)) => *value = None,
        (_, Told::Mark(mark)) => *mark = rng.below(20),
        (_, Told::Unknown | Told::Not) => {}
    }
}

#[test]
fn the_witness_says_what_a_search_through_every_order_says() {
    const HISTORIES: u64 = 60_000;
    let (mut good, mut bad) = (0, 0);
    for seed in 0..HISTORIES {
        let mut rng = Rng(seed);
        let mut history = draw(&mut rng);
        let is_spoilt = rng.below(3) > 0;
        for _ in 0..if is_spoilt { 1 + rng.below(2) } else { 0 } {
            spoil(&mut history, &mut rng);
        }
        let (checked, searched) = (check(&history), search(&history));
        assert_eq!(checked.is_ok(), searched, "seed {seed}: {checked:?}\n{history:#?}");
        assert!(checked.is_ok() || is_spoilt, "seed {seed}: {checked:?}\n{history:#?}");
        if searched { good += 1 } else { bad += 1 }
    }
    println!(
        "{HISTORIES} histories: {good} good, {bad} not; the witness agrees with the search on all of them"
    );
    assert!(good > HISTORIES / 4 && bad > HISTORIES / 4);
}
