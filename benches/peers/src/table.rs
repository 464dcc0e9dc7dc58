//! The results as Markdown: medians over the rounds.

use crate::engines::{Sort, find};
use crate::limits;
use crate::results::{Results, Rows};
use crate::store::Res;
use crate::workloads::Workload;
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};

/// A column: its heading, the figure, and what the figure is multiplied with.
type Column = (&'static str, &'static str, f64);

const US: f64 = 1e-3;

pub fn print(results: &Results, noise: f64) -> Res<()> {
    println!("{}", results.machine()?);
    let limits = results.rows(limits::NAME, noise)?;
    if !limits.0.is_empty() {
        let figures: &[Column] = &[
            ("per second", "ops_per_s", 1.0),
            ("p50 µs", "p50_ns", US),
            ("p99 µs", "p99_ns", US),
            ("MB/s to the device", "device_mb_per_s", 1.0),
        ];
        heading("The disk alone", &limits);
        columns(&limits, figures);
    }
    for workload in Workload::ALL {
        let rows = results.rows(workload.name(), noise)?;
        if !rows.0.is_empty() {
            print_one(workload, &rows);
        }
    }
    Ok(())
}

fn print_one(workload: Workload, rows: &Rows) {
    match workload {
        Workload::Put => {
            heading("Durable fenced puts per second, by threads; in brackets: of the best floor", rows);
            by_threads(rows, "ops_per_s", 1.0, true);
            for (title, figure, scale) in [
                ("Their p50, µs", "p50_ns", US),
                ("Their p99, µs", "p99_ns", US),
                ("Bytes to the device for each put", "device_bytes_per_op", 1.0),
                ("Flushes of the device for each put", "flushes_per_op", 1.0),
                ("µs of CPU for each put", "cpu_us_per_op", 1.0),
                ("Voluntary context switches for each put", "switches_per_op", 1.0),
            ] {
                heading(title, rows);
                by_threads(rows, figure, scale, false);
            }
        }
        Workload::Submit => {
            heading("Durable fenced puts with up to 10 000 in flight a thread", rows);
            let figures: &[Column] = &[
                ("per second", "ops_per_s", 1.0),
                ("µs of CPU each", "cpu_us_per_op", 1.0),
                ("device bytes each", "device_bytes_per_op", 1.0),
                ("MB/s to the device", "device_mb_per_s", 1.0),
                ("cores", "cores", 1.0),
            ];
            columns(rows, figures);
        }
        Workload::Refuse => {
            heading("Refusals per second, by threads", rows);
            by_threads(rows, "ops_per_s", 1.0, false);
        }
        Workload::Load => {
            heading("A load in random order, one sync each 10 000 records", rows);
            let figures: &[Column] = &[
                ("per second", "ops_per_s", 1.0),
                ("records", "loaded", 1.0),
                ("µs of CPU each", "cpu_us_per_op", 1.0),
                ("settling, s", "settle_s", 1.0),
                ("closing, s", "close_s", 1.0),
                ("device bytes per user byte", "device_per_user_byte", 1.0),
                ("disk bytes per live byte", "disk_per_live_byte", 1.0),
            ];
            columns(rows, figures);
        }
        Workload::Open | Workload::Recover => {
            let after = if workload == Workload::Open { "a clean close" } else { "a kill" };
            heading(&format!("Open to first read after {after}, ms"), rows);
            columns(rows, &[("ms", "open_ms", 1.0)]);
        }
        Workload::Get => {
            heading("Reads per second, by threads", rows);
            by_threads(rows, "ops_per_s", 1.0, false);
            heading("Reads: time, and memory of the process", rows);
            let figures: &[Column] = &[
                ("p50 ns", "p50_ns", 1.0),
                ("p99 ns", "p99_ns", 1.0),
                ("anonymous MB", "anonymous_mb", 1.0),
                ("MB with mapped files", "resident_mb", 1.0),
            ];
            columns(rows, figures);
        }
        Workload::Scan => {
            heading("Scans of 100 keys", rows);
            columns(
                rows,
                &[("per second", "ops_per_s", 1.0), ("p50 µs", "p50_ns", US), ("p99 µs", "p99_ns", US)],
            );
        }
        Workload::Mix => {
            heading("95 % reads, 5 % durable fenced puts", rows);
            let figures: &[Column] = &[
                ("per second", "ops_per_s", 1.0),
                ("puts per second", "puts_per_s", 1.0),
                ("read p50 µs", "p50_ns", US),
                ("read p99 µs", "p99_ns", US),
                ("put p50 µs", "put_p50_ns", US),
                ("put p99 µs", "put_p99_ns", US),
            ];
            columns(rows, figures);
        }
        Workload::Overwrite => {
            heading("100 000 records of 1 KiB overwritten 20 times", rows);
            let figures: &[Column] = &[
                ("per second", "ops_per_s", 1.0),
                ("overwrites", "overwrites", 1.0),
                ("disk bytes per live byte, at most", "disk_per_live_byte_peak", 1.0),
                ("… closed", "disk_per_live_byte_closed", 1.0),
                ("device bytes per user byte", "device_per_user_byte", 1.0),
            ];
            columns(rows, figures);
        }
        Workload::Grow => {
            for size in ["100000", "1000000", "10000000"] {
                grown(rows, size);
            }
        }
        Workload::Lease => {
            heading("A lease, ns", rows);
            columns(rows, &[("ns", "ns", 1.0)]);
        }
    }
}

fn heading(title: &str, rows: &Rows) {
    let rounds = rows.rounds();
    let rounds = if rounds == 1 { "one round".to_owned() } else { format!("medians of {rounds} rounds") };
    println!("\n**{title}** ({rounds})\n");
}

fn show(mut header: Vec<String>, body: Vec<Vec<String>>) {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    header.insert(0, "engine".into());
    table.set_header(header);
    table.add_rows(body);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
}

/// One line an engine, one column a number of threads.
fn by_threads(rows: &Rows, figure: &str, scale: f64, of_floor: bool) {
    let threads = rows.threads();
    let line = |engine: &str| {
        let cell = |&threads: &usize| {
            let Some(value) = rows.median(engine, threads, figure) else { return "–".into() };
            let floor = rows.best(threads, figure, is_floor).filter(|_| of_floor);
            let part = floor.map(|(_, floor)| format!(" ({:.2})", value / floor)).unwrap_or_default();
            number(value * scale) + &part
        };
        let mut line = vec![engine.to_owned()];
        line.extend(threads.iter().map(cell));
        line
    };
    show(threads.iter().map(usize::to_string).collect(), rows.engines().into_iter().map(line).collect());
}

fn is_floor(engine: &str) -> bool {
    find(engine).is_some_and(|engine| engine.sort == Sort::LogFloor)
}

/// One line an engine and number of threads, one column a figure.
fn columns(rows: &Rows, figures: &[Column]) {
    let threads = rows.threads();
    let mut body = Vec::new();
    for engine in rows.engines() {
        for &count in &threads {
            let values: Vec<_> = figures.iter().map(|c| (rows.median(engine, count, c.1), c.2)).collect();
            if values.iter().all(|(value, _)| value.is_none()) {
                continue;
            }
            let mut line = vec![engine.to_owned()];
            if threads.len() > 1 {
                line.push(count.to_string());
            }
            line.extend(values.iter().map(|(v, scale)| v.map_or_else(|| "–".into(), |v| number(v * scale))));
            body.push(line);
        }
    }
    let mut header: Vec<String> = figures.iter().map(|column| column.0.to_owned()).collect();
    if threads.len() > 1 {
        header.insert(0, "threads".into());
    }
    show(header, body);
}

fn grown(rows: &Rows, size: &str) {
    let figures = ["put_ns", "longest_batch_ms", "get_ns", "anonymous_bytes_per_key"];
    let names: Vec<String> = figures.iter().map(|figure| format!("{figure}_{size}")).collect();
    let line = |engine: &str| {
        let values: Vec<_> = names.iter().map(|name| rows.median(engine, 1, name)).collect();
        values.iter().any(Option::is_some).then(|| {
            let mut line = vec![engine.to_owned()];
            line.extend(values.iter().map(|value| value.map_or_else(|| "–".into(), number)));
            line
        })
    };
    let body: Vec<_> = rows.engines().into_iter().filter_map(line).collect();
    if !body.is_empty() {
        heading(&format!("Grown to {size} keys, batches of 1000 new ones"), rows);
        let header = ["a put, ns", "longest batch, ms", "a read, ns", "anonymous bytes a key"];
        show(header.map(str::to_owned).to_vec(), body);
    }
}

/// Three digits, or all of them up to a million.
pub fn number(value: f64) -> String {
    if value >= 1e6 {
        format!("{:.2} M", value / 1e6)
    } else if value >= 1e4 {
        let thousands = value as u64 / 1000;
        format!("{thousands} {:03}", value as u64 % 1000)
    } else if value >= 100.0 {
        format!("{value:.0}")
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown = [0.123, 12.34, 123.4, 9999.4, 12_045.0, 1_234_567.0].map(number);
        assert_eq!(shown, ["0.12", "12.3", "123", "9999", "12 045", "1.23 M"]);
    }
}
