//! Measurements that the papers do not have: today's programs on both stacks, connections, and tails of round trips.

use super::measure::{Context, KERNEL, Message, SERVER, SHM, numbers};
use super::model::{AxisLabel, Cell, Content, Curve, Plot, Style, Table};
use super::papers::Original;
use crate::figure::Figure;
use crate::suites::{Better, Suite, cases};
use crate::{MeasureError, measure_case};

/// Returns the figures of a suite of `portolan bench` as a table.
fn suite(context: &Context, suite: Suite) -> Result<Content, MeasureError> {
    let bed = context.bed()?;
    let runs = context.count(5, 2);
    let heads = [
        "unit",
        "kernel",
        "Portolan",
        "ratio",
        "kernel p50/p99 µs",
        "Portolan p50/p99 µs",
    ];
    let mut table = Table::new("This machine", heads);
    let mut worse = Vec::new();
    for case in cases(suite, context.effort) {
        let figure = measure_case(bed, &case, runs)?;
        if is_worse(&figure) {
            worse.push(figure.name.clone());
        }
        table = table.row(
            figure.name.as_str(),
            super::model::Source::Portolan,
            cells(&figure),
        );
    }
    let said = if worse.is_empty() {
        "Portolan is at least as good in each row that has both".to_owned()
    } else {
        format!("the kernel is ahead in {}", worse.join(", "))
    };
    Ok(Content::default().with(table).note(&format!("{said}.")))
}

fn is_worse(figure: &Figure) -> bool {
    figure.ratio.is_some_and(|ratio| match figure.better {
        Better::Lower => ratio > 1.0,
        Better::Higher => ratio < 1.0,
    })
}

fn cells(figure: &Figure) -> [Cell; 6] {
    let percentiles = |measured: Option<crate::figure::Measured>| -> Cell {
        let latency = measured.and_then(|measured| measured.latency);
        latency.map_or(Cell::Empty, |latency| {
            Cell::Text(format!("{:.1} / {:.1}", latency.p50_us, latency.p99_us))
        })
    };
    [
        figure.unit.into(),
        figure.kernel.map(|kernel| kernel.values).into(),
        figure.portolan.values.into(),
        figure.ratio.into(),
        percentiles(figure.kernel),
        percentiles(Some(figure.portolan)),
    ]
}

pub(super) fn round_trips(
    context: &Context,
    _: Option<&Original>,
) -> Result<Content, MeasureError> {
    suite(context, Suite::Rtt)
}

pub(super) fn transfers(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    suite(context, Suite::Bulk)
}

pub(super) fn redis(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    suite(context, Suite::Redis)
}

pub(super) fn web(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    suite(context, Suite::Http)
}

pub(super) fn connections(
    context: &Context,
    _: Option<&Original>,
) -> Result<Content, MeasureError> {
    suite(context, Suite::Conns)
}

pub(super) fn local(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    suite(context, Suite::Local)
}

/// Percentiles of all round trips.
const PERCENTILES: [f64; 9] = [1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99];

pub(super) fn percentiles(
    context: &Context,
    _: Option<&Original>,
) -> Result<Content, MeasureError> {
    let count = context.count(50_000, 10_000).to_string();
    let mut content = Content::default();
    for (message, name) in [
        (Message::tcp(1), "both ends sleep"),
        (Message::tcp(1).spinning(), "both ends spin"),
    ] {
        let mut table = Table::new(
            &format!("Round trips of 1 byte by TCP, {name}: µs by percentile"),
            PERCENTILES,
        );
        let mut curves = Vec::new();
        for system in [KERNEL, SHM, SERVER] {
            let report = context.pings(&system, &message, &["--series", "--count", &count])?;
            let mut times = numbers(&report, "series_us")?;
            times.sort_unstable_by(f64::total_cmp);
            let at = |percent: f64| {
                times[((times.len() as f64 * percent / 100.0) as usize).min(times.len() - 1)]
            };
            table = table.row(system.label, system.source, PERCENTILES.map(at));
            let points = (0..=400).map(|step| {
                // Steps become shorter towards the end, up to 99.99 %.
                let percent = 100.0 - 100.0 * 10_f64.powf(-f64::from(step) / 100.0);
                (100.0 / (100.0 - percent), at(percent))
            });
            curves.push(Curve::of(system.label, system.source, points));
        }
        content = content
            .with(Plot {
                title: format!("The tail of round trips, {name}"),
                x: AxisLabel::logarithmic("one of so many is longer"),
                y: AxisLabel::logarithmic("µs"),
                style: Style::Line,
                curves,
            })
            .with(table);
    }
    Ok(content)
}
