//! Demultiplexing on the ATM Adapter: a channel per connection, and the precomputed header filter.

use portolan::layers::Layer;

use super::measure::{Context, DIRECT, KERNEL, Message, Parts, Runs, SERVER, SHARED, SHM, System};
use super::model::{AxisLabel, Content, Curve, Plot, Source, Style, Table};
use super::papers::Original;
use crate::MeasureError;
use crate::figure::Spread;
use crate::suites::demux::expected::taken;
use crate::suites::engine::{Way, instructions};

const SEND: [Layer; 2] = [Layer::OutputSession, Layer::OutputHeaders];
const RECEIVE: [Layer; 5] = [
    Layer::Ring,
    Layer::InputHeaders,
    Layer::InputSession,
    Layer::Copy,
    Layer::Call,
];

/// Divides the time of a round trip as the paper does: round trip, link (sleep, wake-ups, device, filters),
/// client sends, server receives and sends, client receives. In microseconds.
fn budget(parts: &Parts) -> [f64; 5] {
    let sends = Parts::sum(&parts.client, &SEND);
    let receives = Parts::sum(&parts.client, &RECEIVE);
    let server = Parts::sum(&parts.server, &SEND) + Parts::sum(&parts.server, &RECEIVE);
    let link = parts.round_trip - sends - receives - server;
    [parts.round_trip, link, sends, server, receives]
}

/// Returns the spread of each part.
fn budgets(runs: &Runs) -> [Spread; 5] {
    [0, 1, 2, 3, 4].map(|part| runs.spread(|parts| budget(parts)[part]))
}

fn latency(
    context: &Context,
    message: Message,
    paper: Option<&Original>,
) -> Result<Content, MeasureError> {
    let mut table = Table::new(
        "This machine: µs",
        [
            "round trip",
            "link, wake-ups",
            "client sends",
            "server receives and sends",
            "client receives",
        ],
    );
    for system in [KERNEL, SERVER] {
        let parts = context.parts(&system, &message)?;
        table = table.row(
            system.label,
            system.source,
            [parts.spread(|parts| parts.round_trip)],
        );
    }
    let shared = budgets(&*context.parts(&SHARED, &message)?);
    let direct = budgets(&*context.parts(&DIRECT, &message)?);
    let table = table
        .row("MUX: Portolan, shared ring", Source::Portolan, shared)
        .row("OPT: Portolan, own ring", Source::Portolan, direct);
    let there = paper.map_or(f64::NAN, |paper| {
        paper.number("OPT, direct", 4) / paper.number("MUX, shared", 4)
    });
    let here = direct[4].median / shared[4].median;
    let inside = shared[2..].iter().map(|spread| spread.median).sum::<f64>();
    Ok(Content::default()
        .with(table)
        .claim(
            "a channel of its own makes receiving cheaper",
            here < 0.95,
            format!("client receives: {:.2} µs instead of {:.2} ({:.0} %); there {:.0} %",
                direct[4].median,
                shared[4].median, here * 100.0, there * 100.0),
            "a look-up by the slot in the packet's record replaced the paper's search for a control block in both forms, and both have the precomputed header filter; what a ring of its own spares is small (br-shared-tcp-receive and br-direct-tcp-receive of portolan bench demux count its instructions)",
        )
        .claim(
            "and the whole round trip a little shorter",
            direct[0].median < shared[0].median,
            format!(
                "{:.1} µs instead of {:.1} ({:.0} %); there {:.0} %",
                direct[0].median,
                shared[0].median,
                100.0 * direct[0].median / shared[0].median,
                paper.map_or(f64::NAN, |paper| {
                    100.0 * paper.number("OPT, direct", 0) / paper.number("MUX, shared", 0)
                }),
            ),
            "whoever sleeps on a shared ring is woken by the tap, whoever has a ring of its own by that ring's own notification, which costs some µs more (ADR 3, ADR 20); for programs that spin br-direct-tcp of portolan bench demux has the comparison",
        )
        .claim(
            "only a small part of the round trip is spent in the protocols",
            inside < 0.5 * shared[0].median,
            format!("{inside:.1} of {:.1} µs; there {:.0} %", shared[0].median,
                paper.map_or(f64::NAN, |paper| 100.0 - 100.0 * paper.number("MUX, shared", 1) / paper.number("MUX, shared", 0))),
            "",
        )
        .note("One byte, both ends sleep. The columns of ends are the library's layers without the device; what the two ends' clocks do not explain is the link: filters, device, sleep and wake-up. What is the call itself and the copy counts as receiving."))
}

pub(super) fn table1(context: &Context, paper: Option<&Original>) -> Result<Content, MeasureError> {
    latency(context, Message::tcp(1), paper)
}

pub(super) fn table2(context: &Context, paper: Option<&Original>) -> Result<Content, MeasureError> {
    latency(context, Message::udp(1), paper)
}

const SIZES: [usize; 4] = [512, 1024, 1500, 2048];

/// A measurement in MByte/s.
type Throughput<'a> = dyn Fn(&System, usize) -> Result<f64, MeasureError> + 'a;

fn throughput(
    context: &Context,
    title: &str,
    paper: Option<&Original>,
    measure: &Throughput<'_>,
) -> Result<Content, MeasureError> {
    let systems = [KERNEL, SERVER, SHARED, DIRECT];
    let measured = context.in_turns(context.runs, &systems, &SIZES, |system, size| {
        // Converts Gb/s to MByte/s.
        Ok(measure(system, *size)? * 125.0)
    })?;
    let mut table = Table::new(title, SIZES);
    let mut curves = Vec::new();
    for (system, spreads) in systems.iter().zip(&measured) {
        let label = match *system {
            SHARED => "MUX: Portolan, shared ring",
            DIRECT => "OPT: Portolan, own ring",
            other => other.label,
        };
        table = table.row(label, system.source, spreads.iter().copied());
        let points = SIZES.iter().map(|size| *size as f64);
        let points = points.zip(spreads.iter().copied());
        curves.push(Curve::of_spreads(label, system.source, points));
    }
    let rate = |system: usize, size: usize| measured[system][size].median;
    let ratio = rate(3, 3) / rate(2, 3);
    let beside_kernel = rate(2, 3) / rate(0, 3);
    let there = paper.map_or(f64::NAN, |paper| {
        paper.number("MUX, shared", 3) / paper.number("SYS, in the kernel", 3)
    });
    Ok(Content::default()
        .with(table)
        .with(Plot {
            title: title.to_owned(),
            x: AxisLabel::linear("bytes"),
            y: AxisLabel::linear("MByte/s"),
            style: Style::Points,
            curves,
        })
        .claim(
            "a channel of its own changes nothing",
            (0.85..1.15).contains(&ratio),
            format!("2048 bytes: {ratio:.2} of the shared one's"),
            "a ring of its own is smaller than the one that all sessions share, and is notified by itself: a stream waits for room more often, and datagrams that find none are lost",
        )
        .claim(
            "the kernel's stack carries more than the one in user space, which copies more often",
            beside_kernel < 1.0,
            format!("2048 bytes: MUX {beside_kernel:.2} of the kernel's; there {there:.2}"),
            "a small write needs no system call here: the library gathers what is written and hands it over in large frames, with one copy on either side",
        ))
}

pub(super) fn table3(context: &Context, paper: Option<&Original>) -> Result<Content, MeasureError> {
    let seconds = if context.effort.quick { 0.4 } else { 1.0 };
    let title = "This machine, TCP: MByte/s by buffer size in bytes";
    throughput(context, title, paper, &|system, size| {
        context.stream(system, size, seconds)
    })
}

pub(super) fn table4(context: &Context, paper: Option<&Original>) -> Result<Content, MeasureError> {
    let seconds = if context.effort.quick { 0.4 } else { 1.0 };
    let title = "This machine, UDP: MByte/s by packet size in bytes";
    let content = throughput(context, title, paper, &|system, size| {
        context.datagrams(system, size, seconds)
    })?;
    Ok(content.note("What arrives of datagrams that are sent as fast as the socket takes them. 2048 bytes go in two fragments here: an Ethernet frame holds 1500, the paper's ATM frame 4096. The server relays streams only: datagrams come by the ring in its form, too."))
}

/// Counts the segments on the fast and on the standard path of both ends during `load`.
fn counted(
    context: &Context,
    load: impl Fn() -> Result<f64, MeasureError>,
) -> Result<[f64; 2], MeasureError> {
    let bed = context.bed()?;
    let before = taken(bed)?;
    load()?;
    let after = taken(bed)?;
    Ok([after[0] - before[0], after[1] - before[1]])
}

pub(super) fn fig5(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let segments = context.count(10_000, 2_000);
    let bed = context.bed()?;
    let mut table = Table::new(
        "Instructions of the engine for a segment or datagram of 1448 bytes",
        ["fast path", "standard path", "fast/standard"],
    );
    let mut ratios = Vec::new();
    for (label, counted) in [
        ("data that comes, TCP", ("count_receive", "received")),
        (
            "an acknowledgement that comes, TCP",
            ("count_acknowledgement", "acknowledgements"),
        ),
        (
            "a datagram that comes, UDP",
            ("count_datagram", "datagrams"),
        ),
    ] {
        let of = |way| instructions(bed, (1448, segments), way, counted);
        let (fast, standard) = (of(Way::Fast)?, of(Way::Standard)?);
        ratios.push(fast / standard);
        table = table.row(label, Source::Portolan, [fast, standard, fast / standard]);
    }
    Ok(Content::default().with(table).claim(
        "the fast path is cheaper, for it leaves functions out",
        ratios.iter().all(|ratio| *ratio < 1.0),
        format!(
            "fast over standard: {:.2}, {:.2} and {:.2}",
            ratios[0], ratios[1], ratios[2]
        ),
        "",
    ))
}

pub(super) fn fig6(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let count = context.count(20_000, 4_000);
    let seconds = if context.effort.quick { 0.5 } else { 2.0 };
    let mut table = Table::new(
        "Segments that both ends received, by path",
        ["fast", "standard", "share of the fast path"],
    );
    let round_trips = counted(context, || context.ping(&SHM, &Message::tcp(1), count))?;
    let transfer = counted(context, || context.stream(&SHM, 65_536, seconds))?;
    let mut shares = Vec::new();
    for (label, [fast, standard]) in [
        ("round trips, TCP, 1 byte", round_trips),
        ("a transfer, TCP", transfer),
    ] {
        let share = fast / (fast + standard).max(1.0);
        shares.push(share);
        table = table.row(label, Source::Portolan, [fast, standard, share]);
    }
    let budget = budgets(&*context.parts(&SHARED, &Message::tcp(1))?);
    let names = [
        "client sends",
        "server receives and sends",
        "client receives",
        "link, wake-ups",
    ];
    let times = [2, 3, 4, 1].map(|part| budget[part]);
    let bars = names
        .iter()
        .zip(times)
        .map(|(name, time)| Curve::of_spreads(*name, Source::Portolan, [(0.0, time)]));
    Ok(Content::default()
        .with(table)
        .with(Plot {
            title: "Where a round trip is timed: TCP, 1 byte".to_owned(),
            x: AxisLabel::linear(""),
            y: AxisLabel::linear("µs"),
            style: Style::Bars,
            curves: bars.collect(),
        })
        .claim(
            "in the normal case headers are as expected, and segments take the fast path",
            shares.iter().all(|share| *share > 0.95),
            format!(
                "{:.1} % in round trips, {:.1} % in a transfer",
                shares[0] * 100.0,
                shares[1] * 100.0
            ),
            "segments that come out of order, or after a loss, are taken apart",
        ))
}
