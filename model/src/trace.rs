//! A counterexample, so that a person can follow it.
//!
//! A line for what happens, and one for the log behind it: `|` between segments, `//` where it is not synced
//! yet, `'` on an op that compaction has carried.

use crate::actions::Action;
use crate::rules::Model;
use crate::search::Counterexample;
use crate::state::{Kind, State};
use std::fmt::{self, Write};

impl Counterexample {
    /// The whole story.
    pub fn story(&self, model: &Model) -> String {
        let mut story = String::new();
        self.tell(model, &mut story).expect("a string takes everything");
        story
    }

    fn tell(&self, model: &Model, out: &mut impl Write) -> fmt::Result {
        for (number, (before, action)) in self.steps.iter().enumerate() {
            if number > 0 {
                writeln!(out, "        {}", log(before))?;
            }
            writeln!(out, "    {:>2}. {}", number + 1, step(model, before, *action))?;
        }
        writeln!(out, "        => {}", self.violation)
    }
}

/// One action, with what the state says of it.
fn step(model: &Model, s: &State, action: Action) -> String {
    let refused = |fence, token, intent| match model.judge(s, &s.appended, fence, token, intent) {
        Some(answer) => format!(": {answer:?}"),
        None => String::new(),
    };
    let numbered = |op| if op == 0 { String::new() } else { format!(", operation {op}") };
    let write = |op| crate::rules::Intent::Write { op };
    match action {
        Action::Acquire { fence } if s.is_taken(fence) => format!("f{fence} is asked for, and is held"),
        Action::Acquire { fence } => format!("f{fence} is asked for: a grant is appended"),
        Action::AcquireSlot { slots } => format!("one of {slots} slots is asked for"),
        Action::Resume { fence } => {
            format!("the holder of token {} in grace asks for f{fence} again", s.kept[fence])
        }
        Action::Release { fence } => format!("token {} releases f{fence}", s.live[fence]),
        Action::Expire { fence } => format!("the lease of token {} on f{fence} runs out", s.live[fence]),
        Action::GraceEnds => "the grace is over".into(),
        Action::Renew { fence } => format!("token {} renews its lease on f{fence}", s.stray[fence]),
        Action::Put { fence, token, op } => {
            format!("token {token} puts to f{fence}{}{}", numbered(op), refused(fence, token, write(op)))
        }
        Action::Delete { fence, token, op } => {
            format!("token {token} deletes from f{fence}{}{}", numbered(op), refused(fence, token, write(op)))
        }
        Action::Raise { fence, token } => format!("f{fence} is raised to token {token}"),
        Action::RaiseAll { space, token } => format!("raise_all of keyspace {space} to token {token}"),
        Action::Break { fence } => format!("the lease on f{fence} is broken"),
        Action::Issue => format!("the outer source issues token {}", s.issued + 1),
        Action::Fold { space, token } => {
            format!("a folding floor of {token} is appended for keyspace {space}")
        }
        Action::Forget { fence } => {
            format!("the own mark {} of f{fence} is dropped", s.appended.own[fence].mark)
        }
        Action::Sync { to } => format!("{to} ops of the log are durable, and what rests on them is answered"),
        Action::Rotate => format!("segment {} is sealed", s.segment),
        Action::Move { at } => format!("compaction carries {} to the end", op(s, at)),
        Action::Retire { segment } => format!("segment {segment} is retired"),
        Action::Crash { keep, killed: false } => {
            format!("power cut: {keep} of {} ops survive; it is opened", s.len)
        }
        Action::Crash { keep, killed: true } => {
            format!("killed: {keep} of {} ops can be read; it is opened", s.len)
        }
        Action::Checkpoint => format!("a checkpoint of {} ops", s.durable),
        Action::Restore => "the store is lost; the checkpoint is restored".into(),
    }
}

fn op(s: &State, at: usize) -> String {
    let op = &s.log[at];
    let kind = match op.kind {
        Kind::Grant => "grant",
        Kind::Release => "release",
        Kind::Put => "put",
        Kind::Delete => "delete",
        Kind::Mark => "mark",
        Kind::Raised => "raised",
        Kind::Folded => "folded",
    };
    let of = if op.is_floor() { 'k' } else { 'f' };
    format!("{kind}{} {of}{}={}", if op.moved { "'" } else { "" }, op.of, op.own.mark)
}

fn log(s: &State) -> String {
    let mut line = String::from("log:");
    let mut segment = 0;
    for at in 0..s.len as usize {
        for _ in segment..s.log[at].segment {
            line.push_str(" |");
        }
        segment = s.log[at].segment;
        if at == s.durable as usize {
            line.push_str(" //");
        }
        line.push(' ');
        line.push_str(&op(s, at));
        line.push(if at + 1 < s.len as usize { ',' } else { ' ' });
    }
    line.trim_end().to_owned()
}
