//! What was measured: rows, one line of JSON each, one file a workload.

use crate::machine::Machine;
use crate::store::Res;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// One cell of one round.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Row {
    pub workload: String,
    pub engine: String,
    pub threads: usize,
    pub round: usize,
    #[serde(flatten)]
    pub figures: BTreeMap<String, f64>,
}

impl Row {
    /// Figures that are not numbers are left out.
    pub fn note(&mut self, figure: &str, value: f64) {
        if value.is_finite() {
            // Six digits are more than can be measured.
            let digits = 5 - value.abs().max(1e-9).log10().floor() as i32;
            let scale = 10f64.powi(digits);
            let rounded = if scale.is_finite() { (value * scale).round() / scale } else { value };
            self.figures.insert(figure.to_owned(), rounded);
        }
    }
}

/// The folder that the results are written to and read from.
pub struct Results {
    dir: PathBuf,
}

impl Results {
    pub fn new(dir: &Path) -> Self {
        Results { dir: dir.to_owned() }
    }

    fn path(&self, workload: &str) -> PathBuf {
        self.dir.join(format!("{workload}.jsonl"))
    }

    pub fn append(&self, row: &Row) -> Res<()> {
        fs::create_dir_all(&self.dir)?;
        let mut file = OpenOptions::new().create(true).append(true).open(self.path(&row.workload))?;
        writeln!(file, "{}", serde_json::to_string(row)?)?;
        Ok(())
    }

    pub fn set_machine(&self, machine: &Machine) -> Res<()> {
        fs::create_dir_all(&self.dir)?;
        fs::write(self.dir.join("machine.json"), serde_json::to_string_pretty(machine)?)?;
        Ok(())
    }

    pub fn machine(&self) -> Res<Machine> {
        let text = fs::read_to_string(self.dir.join("machine.json"));
        let text = text.map_err(|e| format!("no results in {}: {e}", self.dir.display()))?;
        Ok(serde_json::from_str(&text)?)
    }

    /// The rows of a workload; of cells that were repeated because others used the machine, the quiet ones, if
    /// there are any.
    pub fn rows(&self, workload: &str, noise: f64) -> Res<Rows> {
        let path = self.path(workload);
        let Ok(text) = fs::read_to_string(&path) else { return Ok(Rows(Vec::new())) };
        let rows: Result<Vec<Row>, _> = text.lines().map(serde_json::from_str).collect();
        let rows = rows.map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Rows(quiet(rows, noise)))
    }
}

fn quiet(rows: Vec<Row>, noise: f64) -> Vec<Row> {
    let is_quiet = |row: &Row| row.figures.get("others_cores").is_none_or(|&others| others <= noise);
    let keep = |row: &&Row| {
        let same = |other: &&Row| other.engine == row.engine && other.threads == row.threads;
        is_quiet(row) || !rows.iter().filter(same).any(is_quiet)
    };
    rows.iter().filter(keep).cloned().collect()
}

/// The rows of one workload.
pub struct Rows(pub Vec<Row>);

impl Rows {
    /// In the order in which they first appear.
    pub fn engines(&self) -> Vec<&str> {
        let mut engines = Vec::new();
        for row in &self.0 {
            if !engines.contains(&row.engine.as_str()) {
                engines.push(row.engine.as_str());
            }
        }
        engines
    }

    pub fn threads(&self) -> Vec<usize> {
        let mut threads: Vec<_> = self.0.iter().map(|row| row.threads).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    fn of<'r>(&'r self, engine: &'r str, threads: usize) -> impl Iterator<Item = &'r Row> {
        self.0.iter().filter(move |row| row.engine == engine && row.threads == threads)
    }

    pub fn rounds(&self) -> usize {
        let rounds = self.0.iter().map(|row| self.of(&row.engine, row.threads).count());
        rounds.max().unwrap_or(0)
    }

    /// The median over the rounds.
    pub fn median(&self, engine: &str, threads: usize, figure: &str) -> Option<f64> {
        median(self.of(engine, threads).filter_map(|row| row.figures.get(figure).copied()).collect())
    }

    /// The engine with the highest median among those that `which` names.
    pub fn best(&self, threads: usize, figure: &str, which: impl Fn(&str) -> bool) -> Option<(&str, f64)> {
        let engines = self.engines().into_iter().filter(|engine| which(engine));
        let medians = engines.filter_map(|engine| Some((engine, self.median(engine, threads, figure)?)));
        medians.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[middle - 1] + upper) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(engine: &str, ops: f64, others: f64) -> Row {
        let figures = [("ops_per_s".to_owned(), ops), ("others_cores".to_owned(), others)];
        Row { workload: "put".into(), engine: engine.into(), threads: 1, round: 0, figures: figures.into() }
    }

    #[test]
    fn a_row_survives_its_line() {
        let row = row("redb", 12.5, 0.0);
        let line = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&line).unwrap(), row);
    }

    #[test]
    fn figures_keep_six_digits_and_lose_what_is_no_number() {
        let mut row = row("redb", 0.0, 0.0);
        for (figure, value) in [("a", 1234567.89), ("b", 0.000123456789), ("c", 0.0), ("d", f64::NAN)] {
            row.note(figure, value);
        }
        assert_eq!((row.figures["a"], row.figures["b"], row.figures["c"]), (1234570.0, 0.000123457, 0.0));
        assert!(!row.figures.contains_key("d"));
    }

    #[test]
    fn a_noisy_row_counts_only_where_there_is_no_quiet_one() {
        let rows = vec![row("a", 1.0, 0.9), row("a", 5.0, 0.1), row("b", 2.0, 0.8), row("b", 4.0, 0.9)];
        let rows = Rows(quiet(rows, 0.3));
        assert_eq!(rows.median("a", 1, "ops_per_s"), Some(5.0));
        assert_eq!(rows.median("b", 1, "ops_per_s"), Some(3.0));
        assert_eq!(rows.best(1, "ops_per_s", |engine| engine != "a"), Some(("b", 3.0)));
        assert_eq!(rows.median("c", 1, "ops_per_s"), None);
    }
}
