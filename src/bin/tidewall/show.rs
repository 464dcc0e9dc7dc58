//! Output: tables for people, JSON lines for scripts, progress on a terminal.

use crate::failure::Failure;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};

/// The standard output, buffered.
pub fn out() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(64 << 10, io::stdout().lock())
}

/// Ends a command with what its last write said.
pub fn quiet(written: io::Result<()>) -> Result<(), Failure> {
    written.map_err(Failure::from)
}

/// A table without lines; numbers go to the right.
pub fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().copied());
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for &column in right {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A table without trailing blanks.
pub fn write_table(out: &mut impl Write, table: &Table) -> io::Result<()> {
    table.lines().try_for_each(|line| writeln!(out, "{}", line.trim_end()))
}

/// One line of JSON.
pub fn write_json(out: &mut impl Write, map: Map<String, Value>) -> io::Result<()> {
    serde_json::to_writer(&mut *out, &Value::Object(map))?;
    out.write_all(b"\n")
}

/// A JSON object of a few fields.
pub fn object<const N: usize>(fields: [(&str, Value); N]) -> Map<String, Value> {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// A bar on the standard error, if that is a terminal.
pub fn progress(len: Option<u64>, what: &'static str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match len {
        Some(len) => (ProgressBar::new(len), "{msg} {wide_bar} {percent} % {eta}"),
        None => (ProgressBar::new_spinner(), "{msg} {pos} {elapsed}"),
    };
    let style = ProgressStyle::with_template(template);
    bar.with_message(what).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Bytes as a person says them, with the exact number where that differs.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut size = bytes as f64;
    let mut unit = "B";
    for larger in UNITS {
        if size < 1024.0 {
            break;
        }
        size /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{size:.1} {unit}") }
}

/// Nanoseconds as a person says them.
pub fn nanos(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{:.1} µs", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanos as f64 / 1e6),
        _ => format!("{:.1} s", nanos as f64 / 1e9),
    }
}
