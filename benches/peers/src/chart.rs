//! The results as two pictures: puts by the number of threads, and bars for the rest.

use crate::engines::{Sort, find};
use crate::machine::Machine;
use crate::results::{Results, Rows};
use crate::store::Res;
use crate::table::number;
use crate::workloads::Workload;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::{Path, PathBuf};

const OURS: RGBColor = RGBColor(200, 40, 40);
const FLOOR: RGBColor = RGBColor(120, 120, 120);
const OTHERS: RGBColor = RGBColor(70, 110, 160);
const FONT: &str = "sans-serif";

/// Draws what there are results for; answers the files.
pub fn draw(results: &Results, noise: f64, dir: &Path) -> Res<Vec<PathBuf>> {
    let machine = results.machine()?;
    std::fs::create_dir_all(dir)?;
    let mut drawn = Vec::new();
    let puts = results.rows(Workload::Put.name(), noise)?;
    if !puts.0.is_empty() {
        let path = dir.join("puts.svg");
        draw_puts(&path, &puts, &machine)?;
        drawn.push(path);
    }
    let mut panels = Vec::new();
    for (workload, threads, title) in [
        (Workload::Refuse, 1, "refusals, 1 thread"),
        (Workload::Get, 1, "reads, 1 thread"),
        (Workload::Scan, 1, "scans of 100 keys, 1 thread"),
        (Workload::Load, 1, "load, records"),
        (Workload::Mix, 16, "95 % reads, 5 % puts, 16 threads"),
        (Workload::Submit, 1, "puts, 10 000 in flight, 1 thread"),
    ] {
        let rows = results.rows(workload.name(), noise)?;
        let bars = best_of_each(&rows, threads);
        if !bars.is_empty() {
            panels.push((title, bars));
        }
    }
    if !panels.is_empty() {
        let path = dir.join("others.svg");
        draw_bars(&path, &panels, &machine)?;
        drawn.push(path);
    }
    Ok(drawn)
}

/// What a line or bar stands for: an engine in whichever way is fastest there.
fn family(engine: &str) -> Option<(&'static str, RGBColor)> {
    let engine = find(engine)?;
    Some(match engine.sort {
        Sort::LogFloor => ("floor", FLOOR),
        Sort::MemoryFloor => (engine.name, FLOOR),
        _ if engine.kind == "tidewall" => (engine.kind, OURS),
        _ => (engine.kind, OTHERS),
    })
}

fn families(rows: &Rows) -> Vec<(&'static str, RGBColor)> {
    let mut families: Vec<_> = rows.engines().into_iter().filter_map(family).collect();
    families.dedup();
    families
}

fn best_of(rows: &Rows, name: &str, threads: usize) -> Option<f64> {
    let is_of = |engine: &str| family(engine).is_some_and(|(family, _)| family == name);
    rows.best(threads, "ops_per_s", is_of).map(|(_, value)| value)
}

type Bars = Vec<(&'static str, RGBColor, f64)>;

fn best_of_each(rows: &Rows, threads: usize) -> Bars {
    let named = families(rows).into_iter();
    let mut bars: Bars =
        named.filter_map(|(name, color)| Some((name, color, best_of(rows, name, threads)?))).collect();
    bars.sort_by(|a, b| b.2.total_cmp(&a.2));
    bars
}

fn draw_puts(path: &Path, rows: &Rows, machine: &Machine) -> Res<()> {
    let root = SVGBackend::new(path, (900, 520)).into_drawing_area();
    root.fill(&WHITE)?;
    let threads = rows.threads();
    let values = rows.0.iter().filter_map(|row| row.figures.get("ops_per_s"));
    let (low, high) = values.fold((f64::MAX, 0f64), |(low, high), &v| (low.min(v), high.max(v)));
    let last = (threads.len() - 1) as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption("Durable fenced puts per second, by threads that each wait", (FONT, 20))
        .margin(12)
        .margin_right(130)
        .x_label_area_size(56)
        .y_label_area_size(80)
        .build_cartesian_2d(0.0..last.max(0.1), (low / 1.3..high * 1.3).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(machine.to_string())
        .x_labels(threads.len())
        .x_label_formatter(&|x| threads.get(x.round() as usize).map_or_else(String::new, usize::to_string))
        .y_label_formatter(&|y| number(*y))
        .light_line_style(WHITE)
        .label_style((FONT, 14))
        .draw()?;
    let mut labels: Vec<(f64, &str, RGBColor)> = Vec::new();
    for (name, color) in families(rows) {
        let points: Vec<(f64, f64)> = threads
            .iter()
            .enumerate()
            .filter_map(|(at, &threads)| Some((at as f64, best_of(rows, name, threads)?)))
            .collect();
        let style = color.stroke_width(if color == OTHERS { 1 } else { 3 });
        chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        let dots = points.iter().map(|&point| Circle::new(point, 3, color.filled()));
        chart.draw_series(dots)?;
        if let Some(&(_, value)) = points.last() {
            labels.push((value, name, color));
        }
    }
    // Names at the right end, each at its line or as near to it as the one below lets it be.
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lowest = i32::MAX;
    for (value, name, color) in labels {
        let (x, y) = chart.backend_coord(&(last, value));
        let y = (y - 8).min(lowest - 16);
        lowest = y;
        root.draw(&Text::new(name, (x + 10, y), (FONT, 14).into_font().color(&color)))?;
    }
    root.present()?;
    Ok(())
}

/// Below the title of a panel, and from bar to bar.
const BARS_TOP: i32 = 40;
const BAR_STEP: i32 = 20;

fn draw_bars(path: &Path, panels: &[(&str, Bars)], machine: &Machine) -> Res<()> {
    let lines = panels.len().div_ceil(2);
    let most = panels.iter().map(|(_, bars)| bars.len()).max().unwrap_or(0);
    let height = (BARS_TOP + (most as i32 + 1) * BAR_STEP) as u32 * lines as u32;
    let root = SVGBackend::new(path, (900, height + 24)).into_drawing_area();
    root.fill(&WHITE)?;
    let (above, below) = root.split_vertically(height);
    for (area, (title, bars)) in above.split_evenly((lines, 2)).iter().zip(panels) {
        draw_panel(area, title, bars)?;
    }
    below.draw(&Text::new(machine.to_string(), (12, 2), (FONT, 14)))?;
    root.present()?;
    Ok(())
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, bars: &Bars) -> Res<()> {
    const LEFT: i32 = 120;
    const WIDTH: f64 = 230.0;
    area.draw(&Text::new(format!("{title}, per second"), (12, 12), (FONT, 16)))?;
    let longest = bars.iter().map(|bar| bar.2).fold(0.0, f64::max);
    for (at, (name, color, value)) in bars.iter().enumerate() {
        let top = BARS_TOP + at as i32 * BAR_STEP;
        let right = LEFT + (value / longest * WIDTH).max(1.0) as i32;
        area.draw(&Text::new(*name, (12, top), (FONT, 14)))?;
        area.draw(&Rectangle::new([(LEFT, top), (right, top + BAR_STEP - 5)], color.filled()))?;
        area.draw(&Text::new(number(*value), (right + 6, top), (FONT, 14)))?;
    }
    Ok(())
}
