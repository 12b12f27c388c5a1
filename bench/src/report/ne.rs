//! Nemesis: bandwidth over time of senders with and without guarantees, and of consumers of which one falls behind.

use std::time::Duration;

use serde_json::Value;

use super::measure::{Context, number};
use super::model::{AxisLabel, Content, Curve, Plot, Source, Style, Table};
use super::papers::Original;
use crate::MeasureError;
use crate::bed::Stack;
use crate::suites::qos::receive::overloaded;
use crate::suites::qos::transmit::{Joins, Shares, Traces, best_effort, mean, variation, worst};

const STACKS: [(Stack, &str, Source); 2] = [
    (Stack::Portolan, "Portolan", Source::Portolan),
    (Stack::Kernel, "kernel sockets", Source::Kernel),
];

/// Bits of a frame on the wire.
const FRAME_BITS: f64 = 1514.0 * 8.0;

fn plot(title: String, curves: Vec<Curve>) -> Plot {
    Plot {
        title,
        x: AxisLabel::linear("seconds"),
        y: AxisLabel::linear("Mb/s"),
        style: Style::Line,
        curves,
    }
}

/// All senders have Portolan as source; the colours only distinguish them.
fn curve(traces: &Traces, tag: u16, label: String) -> Curve {
    Curve::of(
        label,
        Source::Portolan,
        averaged(traces.bandwidth(tag), traces.window_ms),
    )
}

/// Averages over 200 ms, as the paper does.
fn averaged(points: Vec<(f64, f64)>, window_ms: u64) -> Vec<(f64, f64)> {
    let group = (200 / window_ms.max(1)).max(1) as usize;
    let average = |points: &[(f64, f64)]| {
        let sum: f64 = points.iter().map(|(_, rate)| rate).sum();
        (points[0].0, sum / points.len() as f64)
    };
    points.chunks_exact(group).map(average).collect()
}

pub(super) fn fig5a(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let mut content = Content::default();
    let mut errors = Vec::new();
    for (stack, name, _) in STACKS {
        let shares = Shares::measure_on(context.ethernet(), stack, context.effort)?;
        let curves = (1..=Shares::COUNT)
            .map(|tag| curve(&shares.traces, tag, format!("{} ms", 4 * tag)))
            .collect();
        let guarantees = match stack {
            Stack::Portolan => "slices of every 100 ms",
            Stack::Kernel => "no reservations",
        };
        content = content.with(plot(format!("{name}, {guarantees}"), curves));
        errors.push(worst(shares.errors_of_windows()));
    }
    Ok(content
        .claim(
            "each sender has its share, in every window",
            errors[0] < 0.05,
            format!("worst window {:.1} % from the share; without reservations {:.0} %", errors[0] * 100.0, errors[1] * 100.0),
            "a window of 200 ms has two periods: a sender that the machine did not run for some ms shows there",
        )
        .note("What arrives is recorded on the other host, as in the paper. The kernel's senders are the same programs on sockets, without a guarantee: the link is theirs by chance."))
}

pub(super) fn fig5b(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let mut content = Content::default();
    let mut found = None;
    for (stack, name, _) in STACKS {
        let joins = Joins::measure_on(context.ethernet(), stack, context.effort)?;
        let guaranteed = (Joins::FIRST_MS..=Joins::LAST_MS)
            .map(|slice| curve(&joins.traces, Joins::tag(slice), format!("{slice} ms")));
        let first = curve(&joins.traces, Joins::SLACK_USER, "no guarantee".to_owned());
        let curves = std::iter::once(first).chain(guaranteed).collect();
        let guarantees = match stack {
            Stack::Portolan => "slices of every 100 ms, and one sender of what is left",
            Stack::Kernel => "no reservations",
        };
        content = content.with(plot(format!("{name}, {guarantees}"), curves));
        if stack == Stack::Portolan {
            found = Some((worst(joins.periods()), joins.slack_use()));
        }
    }
    let (periods, slack) = found.unwrap_or((f64::NAN, f64::NAN));
    Ok(content
        .claim(
            "who joins has the guarantee at once",
            periods <= 1.5,
            format!("the slowest after {periods:.1} periods of 100 ms"),
            "a first datagram may leave late: the period counts from it, and its windows are 20 ms",
        )
        .claim(
            "the first sender has the rest of the line",
            slack > 0.9,
            format!("{:.1} % of what is nobody's", slack * 100.0),
            "",
        ))
}

pub(super) fn fig6(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let duration = Duration::from_secs_f64(if context.effort.quick { 3.0 } else { 6.0 });
    let mut content = Content::default();
    let mut table = Table::new(
        "Two senders without guarantees",
        ["Mb/s, mean", "coefficient of variation"],
    );
    let mut variations = Vec::new();
    for (stack, name, source) in STACKS {
        let traces = best_effort(context.ethernet(), stack, duration)?;
        let curves = [1, 2].map(|tag| curve(&traces, tag, format!("sender {tag}")));
        let of_both = [1, 2].map(|tag| traces.steady(tag));
        let window = traces.window_ms as f64 / 1e3;
        let rates = of_both.map(|trace| mean(trace) * 8.0 / window / 1e6);
        let variation = worst(of_both.into_iter().map(variation));
        variations.push(variation);
        table = table.row(name, source, [(rates[0] + rates[1]) / 2.0, variation]);
        content = content.with(plot(name.to_owned(), curves.into()));
    }
    Ok(content.with(table).claim(
        "both have half of the line, and the library's senders more smoothly",
        variations[0] <= variations[1] + 0.01,
        format!(
            "coefficient of variation: {:.4} beside the kernel's {:.4}",
            variations[0], variations[1]
        ),
        "today's kernel shares a device among sockets packet by packet, as smoothly as anybody",
    ))
}

/// Returns the Mb/s that arrived, or that were lost.
fn windows(report: &Value, field: &str) -> Result<Vec<(f64, f64)>, MeasureError> {
    let window = number(report, "window_ms")? / 1e3;
    let all = report["windows"].as_array().cloned().unwrap_or_default();
    let whole = &all[..all.len().saturating_sub(1)];
    let point = |(at, one): (usize, &Value)| {
        let rate = one[field].as_f64().unwrap_or(0.0) * FRAME_BITS / window / 1e6;
        (at as f64 * window, rate)
    };
    Ok(whole.iter().enumerate().map(point).collect())
}

pub(super) fn fig7(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let seconds = if context.effort.quick { 4.0 } else { 8.0 };
    let mut content = Content::default();
    let mut kept = Vec::new();
    for (stack, name, _) in STACKS {
        let reports = overloaded(context.bed()?, stack, seconds)?;
        let [steady, busy] = reports.map(|text| {
            serde_json::from_str::<Value>(&text).map_err(|_| MeasureError::Output {
                program: "portolan-traffic",
                output: text.clone(),
            })
        });
        let (steady, busy) = (steady?, busy?);
        let curves = vec![
            Curve::of(
                "no processing",
                Source::Portolan,
                windows(&steady, "arrived")?,
            ),
            Curve::of("processing", Source::Portolan, windows(&busy, "arrived")?),
            Curve::of(
                "loss of the latter",
                Source::Portolan,
                windows(&busy, "lost")?,
            ),
        ];
        let rate =
            |report: &Value, phase: &str| report[phase]["per_second"].as_f64().unwrap_or(0.0);
        let busy_kept = rate(&busy, "busy") / rate(&busy, "calm").max(1.0);
        kept.push((
            rate(&steady, "busy") / rate(&steady, "calm").max(1.0),
            busy_kept,
            number(&steady, "lost")?,
        ));
        content = content.with(plot(name.to_owned(), curves));
    }
    let (steady, busy, lost) = kept[0];
    Ok(content
        .claim(
            "the consumer that falls behind loses its own packets, the other one none",
            steady > 0.97 && busy < 0.8 && lost == 0.0,
            format!(
                "while one falls behind it gets {:.0} % of its stream, the other {:.1} %, which lost {lost:.0} datagrams; on the kernel's sockets {:.0} % and {:.1} %, {:.0} lost",
                busy * 100.0, steady * 100.0, kept[1].1 * 100.0, kept[1].0 * 100.0, kept[1].2,
            ),
            "the machine itself was taken away for longer than the buffers of the steady consumer hold",
        )
        .note("Windows of 100 ms. The consumer falls behind in every other half-second; losses are numbers that did not arrive, counted when a later one does."))
}
