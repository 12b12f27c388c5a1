//! Migrating Sockets: costs of single parts, the layers' shares of the time, finding receivers, and CPU time.

use portolan::layers::Layer;

use super::measure::{Context, Curves, KERNEL, Message, SHM, number, numbers};
use super::model::{AxisLabel, Content, Curve, Plot, Source, Style, Table};
use super::papers::Original;
use crate::MeasureError;
use crate::bed::Stack;
use crate::figure::Spread;
use crate::suites::demux::endpoints::{self, WAYS};
use crate::suites::qos::cpu;

pub(super) fn table2(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    const ROWS: [(&str, &str, Source); 12] = [
        ("lock and unlock, private word", "private", Source::Kernel),
        (
            "lock and unlock, word shared by processes",
            "shared",
            Source::Kernel,
        ),
        (
            "lock and unlock, inheriting (the library's)",
            "inheriting",
            Source::Portolan,
        ),
        (
            "contended by another core, private",
            "private-contended",
            Source::Kernel,
        ),
        (
            "contended by another core, shared",
            "shared-contended",
            Source::Kernel,
        ),
        (
            "contended by another core, inheriting",
            "inheriting-contended",
            Source::Portolan,
        ),
        (
            "signal that nobody awaits, private",
            "signal-private",
            Source::Kernel,
        ),
        (
            "signal that nobody awaits, shared",
            "signal-shared",
            Source::Kernel,
        ),
        (
            "switch of threads on one core, private",
            "switch-private",
            Source::Kernel,
        ),
        (
            "switch of threads on one core, shared",
            "switch-shared",
            Source::Kernel,
        ),
        (
            "wake-up on another core, private",
            "wake-private",
            Source::Kernel,
        ),
        (
            "wake-up on another core, shared",
            "wake-shared",
            Source::Kernel,
        ),
    ];
    let curves = context.micro("locks")?;
    let table = Table::new("This machine: nanoseconds", ["ns"]);
    let table = ROWS.iter().fold(table, |table, (label, name, source)| {
        table.row(*label, *source, [alone(&curves, name)])
    });
    let bars = ROWS.iter().map(|(label, name, source)| {
        let time = alone(&curves, name).map_or(0.0, |spread| spread.median);
        Curve::of(*label, *source, [(0.0, time)])
    });
    let plot = Plot {
        title: "Locks and switches".to_owned(),
        x: AxisLabel::linear(""),
        y: AxisLabel::linear("ns"),
        style: Style::Bars,
        curves: bars.collect(),
    };
    let time = |name| alone(&curves, name).map_or(f64::NAN, |spread| spread.median);
    Ok(Content::default()
        .with(table)
        .with(plot)
        .claim(
            "a switch of threads costs some twenty times a lock",
            time("switch-private") > 20.0 * time("inheriting"),
            format!(
                "switch {:.0} ns, lock {:.1} ns: {:.0} times; there 20 to 23 times",
                time("switch-private"),
                time("inheriting"),
                time("switch-private") / time("inheriting"),
            ),
            "",
        )
        .claim(
            "a signal costs less than a lock",
            time("signal-private") < time("inheriting"),
            format!("signal {:.0} ns, lock {:.1} ns", time("signal-private"), time("inheriting")),
            "a lock that is free is one instruction on a word today, without the kernel; a signal here is always a system call",
        )
        .note("A lock here is taken and given back. The words are those that the library's threads and local sessions sleep on (futex); the inheriting lock is the library's own, whose holder runs with the priority of whoever waits (FUTEX_LOCK_PI)."))
}

fn alone(curves: &Curves, name: &str) -> Option<Spread> {
    curves.get(name)?.first().map(|(_, spread)| *spread)
}

const MESSAGES: [Message; 4] = [
    Message::tcp(1400),
    Message::tcp(1),
    Message::udp(1400),
    Message::udp(1),
];

/// Layers of one direction, with the corresponding rows of the paper.
type Rows = [(Layer, &'static str)];

fn layers(context: &Context, title: &str, rows: &Rows) -> Result<(Table, Vec<f64>), MeasureError> {
    let parts: Vec<_> = MESSAGES
        .iter()
        .map(|message| context.parts(&SHM, message))
        .collect::<Result<_, _>>()?;
    let mut table = Table::new(title, MESSAGES.iter().map(Message::label));
    for (layer, label) in rows {
        let cells = parts.iter().map(|runs| runs.client(&[*layer]));
        table = table.row(*label, Source::Portolan, cells);
    }
    let all: Vec<_> = rows.iter().map(|(layer, _)| *layer).collect();
    let totals: Vec<_> = parts.iter().map(|runs| runs.client(&all)).collect();
    let medians = totals.iter().map(|spread| spread.median).collect();
    Ok((table.row("total", Source::Portolan, totals), medians))
}

const LAYERS_NOTE: &str = "One message is sent and one received for each turn; calls and copies of both are in the layers call and copy, which a program's clock cannot tell apart by direction: they are in neither table. Their times stand in MB Table 4.";

pub(super) fn table3(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    const ROWS: [(Layer, &str); 3] = [
        (
            Layer::OutputSession,
            "output, session (socket send, TCP, UDP)",
        ),
        (Layer::OutputHeaders, "output, headers (IP, link layer)"),
        (Layer::Device, "device (device driver)"),
    ];
    let (table, sums) = layers(context, "The library (shm): µs to send", &ROWS)?;
    let heads = MESSAGES.iter().map(Message::label);
    let mut calls = Table::new("µs of the call that sends", heads);
    for system in [KERNEL, SHM] {
        let times: Vec<_> = MESSAGES
            .iter()
            .map(|message| {
                Ok(context
                    .parts(&system, message)?
                    .spread(|parts| parts.send_call))
            })
            .collect::<Result<_, MeasureError>>()?;
        calls = calls.row(system.label, system.source, times);
    }
    let device = context
        .parts(&SHM, &MESSAGES[0])?
        .client(&[Layer::Device])
        .median;
    Ok(Content::default()
        .with(table)
        .with(calls)
        .claim(
            "most of the time to send goes to the transport and the socket, not to the driver",
            device < sums[0] / 2.0,
            format!("TCP, 1400 bytes: device {device:.2} of {:.2} µs", sums[0]),
            "copy and checksum, which made the transport dear, cost nanoseconds today; the driver's row is a system call that ends in the peer's input",
        )
        .note(LAYERS_NOTE))
}

pub(super) fn table4(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    const ROWS: [(Layer, &str); 3] = [
        (Layer::Ring, "ring (link layer)"),
        (Layer::InputHeaders, "input, headers (IP)"),
        (Layer::InputSession, "input, session (TCP, UDP)"),
    ];
    let (table, sums) = layers(context, "The library (shm): µs to receive", &ROWS)?;
    let parts = context.parts(&SHM, &MESSAGES[0])?;
    let send = parts
        .client(&[Layer::OutputSession, Layer::OutputHeaders, Layer::Device])
        .median;
    Ok(Content::default()
        .with(table)
        .claim(
            "receiving costs more than sending, by two switches of threads",
            sums[0] > send,
            format!("TCP, 1400 bytes: {:.2} µs to receive, {send:.2} µs to send", sums[0]),
            "the thread that waits does the protocol's work itself: there is no switch on the way, only the wake-up from the kernel, which is sleep and no layer's time",
        )
        .note(LAYERS_NOTE))
}

/// Returns a curve of the parts that are measured alone.
fn curve(curves: &Curves, name: &str, label: &str, source: Source) -> Curve {
    let points = curves.get(name).into_iter().flatten().copied();
    Curve::of_spreads(label, source, points)
}

fn plot(title: &str, [x, y]: [AxisLabel; 2], curves: Vec<Curve>) -> Plot {
    Plot {
        title: title.to_owned(),
        x,
        y,
        style: Style::Points,
        curves,
    }
}

fn sizes() -> AxisLabel {
    AxisLabel::logarithmic("bytes")
}

fn nanoseconds() -> AxisLabel {
    AxisLabel::logarithmic("ns")
}

pub(super) fn fig11(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let curves = context.micro("buffers")?;
    let copy = curve(&curves, "copy", "into a new buffer", Source::Portolan);
    let in_use = curve(
        &curves,
        "copy-in-use",
        "into a buffer in use",
        Source::Portolan,
    );
    let (small, large) = (copy.at(64.0), copy.at(4096.0));
    Ok(Content::default()
        .with(plot(
            "Copying into a stream's buffer",
            [sizes(), nanoseconds()],
            vec![copy, in_use],
        ))
        .claim(
            "the time grows with the size",
            large > 1.3 * small,
            format!("64 bytes {small:.0} ns, 4096 bytes {large:.0} ns"),
            "",
        ))
}

pub(super) fn fig12(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let curves = context.micro("buffers")?;
    let copy = curve(&curves, "copy", "copy (Fig. 11)", Source::Portolan);
    let duplicate = curve(&curves, "duplicate", "reference", Source::Portolan);
    let (at_small, at_large) = (duplicate.at(16.0), duplicate.at(65_536.0));
    let copied = copy.at(4096.0);
    Ok(Content::default()
        .with(plot(
            "Referring to bytes where they lie",
            [sizes(), nanoseconds()],
            vec![duplicate, copy],
        ))
        .claim(
            "a reference costs much less than a copy, and the same for every size",
            at_large < copied / 2.0 && at_large < 1.5 * at_small + 2.0,
            format!("16 bytes {at_small:.1} ns, 65,536 bytes {at_large:.1} ns; a copy of 4096 bytes {copied:.0} ns"),
            "",
        ))
}

pub(super) fn fig13(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let curves = context.micro("buffers")?;
    let link = curve(&curves, "link", "header and reference", Source::Portolan);
    let (at_small, at_large) = (link.at(16.0), link.at(65_536.0));
    let copy = curve(&curves, "copy", "copy (Fig. 11)", Source::Portolan);
    let copied = copy.at(1024.0);
    Ok(Content::default()
        .with(plot(
            "A header before bytes where they lie",
            [sizes(), nanoseconds()],
            vec![link, copy],
        ))
        .claim(
            "linking is cheap, whatever the size",
            at_large < copied && at_large < 1.5 * at_small + 2.0,
            format!("16 bytes {at_small:.1} ns, 65,536 bytes {at_large:.1} ns"),
            "",
        ))
}

fn pending() -> AxisLabel {
    AxisLabel::logarithmic("timers pending")
}

pub(super) fn fig14(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let curves = context.micro("timers")?;
    let set = curve(&curves, "set", "insert", Source::Portolan);
    let clear = curve(&curves, "clear", "delete", Source::Portolan);
    let growth = set.at(65_536.0) / set.at(16.0);
    let both = set.at(1024.0) + clear.at(1024.0);
    Ok(Content::default()
        .with(plot(
            "The timing wheel: insertion and deletion",
            [pending(), AxisLabel::linear("ns")],
            vec![set, clear],
        ))
        .claim(
            "insertion and deletion do not depend on the number of timers",
            growth < 2.0,
            format!("{both:.0} ns for both with 1,024 pending; insertion with 65,536: {growth:.2} times that with 16"),
            "the nodes of 65,536 timers no longer fit the nearest caches",
        ))
}

pub(super) fn fig15(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let curves = context.micro("timers")?;
    let expire = curve(&curves, "expire", "execute", Source::Portolan);
    let growth = expire.at(16_384.0) / expire.at(16.0);
    let one = expire.at(1024.0);
    Ok(Content::default()
        .with(plot(
            "The timing wheel: a timer that does nothing",
            [pending(), AxisLabel::linear("ns")],
            vec![expire],
        ))
        .claim(
            "the time for a timer hardly depends on their number",
            growth < 3.0,
            format!("{one:.0} ns with 1,024; with 16,384 {growth:.2} times that with 16"),
            "a timer moves down through up to five levels of the wheel before it fires, each time in a cold line if there are many",
        ))
}

pub(super) fn fig16(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let curves = context.micro("checksums")?;
    let plain = curve(
        &curves,
        "plain",
        "16 bits at a time (RFC 1071)",
        Source::Kernel,
    );
    let library = curve(&curves, "library", "the library's", Source::Portolan);
    let (slow, fast) = (plain.at(1448.0), library.at(1448.0));
    Ok(Content::default()
        .with(plot(
            "The Internet checksum",
            [sizes(), nanoseconds()],
            vec![plain, library],
        ))
        .claim(
            "a checksum in the machine's words is much faster than the plain one",
            fast < 0.5 * slow,
            format!("1448 bytes: {fast:.0} ns beside {slow:.0} ns"),
            "",
        )
        .note(
            "The library computes checksums only where no device does; on a veth it sums headers.",
        ))
}

fn in_one_pass(
    context: &Context,
    footprint: &str,
    title: &str,
) -> Result<(Plot, f64, String), MeasureError> {
    let curves = context.micro("checksums")?;
    let name = |passes: &str| format!("{footprint}-{passes}");
    let separate = curve(
        &curves,
        &name("separate"),
        "copy, then sum",
        Source::Portolan,
    );
    let integrated = curve(
        &curves,
        &name("integrated"),
        "in one pass",
        Source::Portolan,
    );
    let (two, one) = (separate.at(1448.0), integrated.at(1448.0));
    let said = format!("1448 bytes: {one:.0} ns in one pass, {two:.0} ns in two");
    Ok((
        plot(title, [sizes(), nanoseconds()], vec![separate, integrated]),
        two / one,
        said,
    ))
}

pub(super) fn fig17(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let (plot, gain, said) = in_one_pass(context, "small", "Checksum and copy, data in the cache")?;
    Ok(Content::default().with(plot).claim(
        "in a cache one pass gains next to nothing",
        (0.8..1.25).contains(&gain),
        said,
        "two passes use the widest vectors for copy and sum each; the words of one pass decide otherwise today, in either direction",
    ))
}

pub(super) fn fig18(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let (plot, gain, said) = in_one_pass(context, "large", "Checksum and copy, data in memory")?;
    Ok(Content::default()
        .with(plot)
        .claim(
            "where data comes from memory one pass is much faster",
            gain > 1.2,
            said,
            "the first pass leaves the data in the nearest cache for the second, which then costs next to nothing beside the memory; processors of the paper's time had smaller caches and no prefetching",
        )
        .note("256 MiB for source and destination each, the next place far from the last: beyond today's caches, as 41 MB were beyond theirs."))
}

/// One row of the table and one curve of Fig. 19.
struct Profile {
    label: &'static str,
    source: Source,
    stack: Stack,
    is_reserved: bool,
    is_loaded: bool,
}

const PROFILES: [Profile; 4] = [
    Profile {
        label: "kernel sockets, among hogs",
        source: Source::Kernel,
        stack: Stack::Kernel,
        is_reserved: false,
        is_loaded: true,
    },
    Profile {
        label: "Portolan, among hogs",
        source: Source::Portolan,
        stack: Stack::Portolan,
        is_reserved: false,
        is_loaded: true,
    },
    Profile {
        label: "Portolan, rate 0.1, among hogs",
        source: Source::Portolan,
        stack: Stack::Portolan,
        is_reserved: true,
        is_loaded: true,
    },
    Profile {
        label: "Portolan, rate 0.1, alone",
        source: Source::Portolan,
        stack: Stack::Portolan,
        is_reserved: true,
        is_loaded: false,
    },
];

pub(super) fn fig19(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let bed = context.bed()?;
    let count = context.count(2000, 600);
    let runs = context.count(3, 1);
    let mut table = Table::new(
        "Round trips of 1400 bytes, µs",
        ["median", "99th percentile", "longest"],
    );
    let mut curves = Vec::new();
    let mut worst = Vec::new();
    for profile in &PROFILES {
        let mut columns = [const { Vec::new() }; 3];
        for run in 0..runs {
            let _hogs = if profile.is_loaded {
                cpu::hogs(bed, cpu::hogs_of_all_cores())?
            } else {
                Vec::new()
            };
            let rate = profile.is_reserved.then_some(cpu::RATE_OF_PING);
            let text = cpu::profile(bed, profile.stack, rate, count)?;
            let report = parsed(text)?;
            for (column, field) in columns.iter_mut().zip(["p50_us", "p99_us", "max_us"]) {
                column.push(number(&report, field)?);
            }
            if run + 1 == runs {
                let series = numbers(&report, "series_us")?;
                let points = series.into_iter().enumerate();
                let points = points.map(|(at, time)| (at as f64, time));
                curves.push(Curve::of(profile.label, profile.source, points));
            }
        }
        let spreads = columns.map(|mut column| Spread::of(&mut column));
        worst.push(spreads[1].median);
        table = table.row(profile.label, profile.source, spreads);
    }
    let profile = |title: &str, curves: Vec<Curve>| Plot {
        title: title.to_owned(),
        x: AxisLabel::linear("number of the round trip"),
        y: AxisLabel::logarithmic("µs"),
        style: Style::Line,
        curves,
    };
    let reserved = curves.split_off(2);
    Ok(Content::default()
        .with(profile("(a) without reservations", curves))
        .with(profile("(b) with reservations", reserved))
        .with(table)
        .claim(
            "without a reservation other programs lengthen round trips now and then, by much",
            worst[1] > 3.0 * worst[3],
            format!("99th percentile: {:.0} µs among other programs, {:.0} µs alone", worst[1], worst[3]),
            "the kernel's scheduler prefers threads that slept; with few programs beside it a wake-up seldom waits",
        )
        .claim(
            "with a reservation they are as without the other programs",
            worst[2] < 1.5 * worst[3],
            format!("99th percentile: {:.0} µs among other programs, {:.0} µs alone", worst[2], worst[3]),
            "another run of the same may hold: the hypervisor takes the processor from both",
        )
        .note("Four programs that compute on each core, no program bound to one."))
}

fn parsed(text: String) -> Result<serde_json::Value, MeasureError> {
    serde_json::from_str(&text).map_err(|_| MeasureError::Output {
        program: "portolan-traffic",
        output: text,
    })
}

pub(super) fn fig20(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let numbers: &[usize] = if context.effort.quick {
        &[1, 64, 1024]
    } else {
        &[1, 16, 256, 4096, 16_384]
    };
    let count = context.count(10_000, 4_000);
    let runs = context.count(3, 1);
    let systems = WAYS
        .iter()
        .map(|way| (Stack::Portolan, *way))
        .chain([(Stack::Kernel, WAYS[1])]);
    let mut round_trips = Vec::new();
    let mut filters = Vec::new();
    for (stack, way) in systems {
        let mut all = Vec::new();
        for _ in 0..runs {
            all.push(endpoints::curve(stack, way, numbers, count)?);
        }
        let points = |of: fn(&endpoints::Point) -> f64| {
            let spread = |(at, number): (usize, &usize)| {
                let mut values: Vec<_> = all.iter().map(|curve| of(&curve[at])).collect();
                (*number as f64, Spread::of(&mut values))
            };
            numbers.iter().enumerate().map(spread).collect::<Vec<_>>()
        };
        let (label, source) = match stack {
            Stack::Kernel => ("kernel sockets".to_owned(), Source::Kernel),
            Stack::Portolan => (format!("Portolan, {}", way.name), Source::Portolan),
        };
        let times = points(|point| point.round_trip_us);
        round_trips.push(Curve::of_spreads(label.as_str(), source, times));
        if stack == Stack::Portolan {
            let times = points(|point| point.filter_ns);
            filters.push(Curve::of_spreads(label, source, times));
        }
    }
    let last = numbers[numbers.len() - 1] as f64;
    let growth = |curve: &Curve| curve.at(last) / curve.at(1.0);
    let (linear, active) = (growth(&round_trips[0]), growth(&round_trips[2]));
    let endpoints = || AxisLabel::logarithmic("receive endpoints");
    Ok(Content::default()
        .with(plot(
            "Round trips of 1400 bytes by TCP",
            [endpoints(), AxisLabel::logarithmic("µs")],
            round_trips,
        ))
        .with(plot(
            "The packet filter's time for a packet",
            [endpoints(), nanoseconds()],
            filters,
        ))
        .claim(
            "with linear matching the time grows with the endpoints",
            linear > 1.5,
            format!("{last:.0} endpoints over one: {linear:.2} times"),
            "a comparison costs some nanoseconds: with these few endpoints they do not show in a round trip, but in the filter's own time",
        )
        .claim(
            "with active demultiplexing it does not",
            active < 1.15,
            format!("{last:.0} endpoints over one: {active:.2} times"),
            "beyond some thousand endpoints the filter's rows no longer lie in a cache; the programs of the others compute on the same cores",
        )
        .note("Both ends spin. The other endpoints are connections of one more program of the receiving host, whose peers are on the kernel's sockets."))
}

pub(super) fn fig21(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let bed = context.bed()?;
    let mut curves = Vec::new();
    let mut table = Table::new("Pictures", ["a second", "longest time between two, ms"]);
    let mut worst = Vec::new();
    for (label, source, stack, rate) in [
        ("kernel sockets", Source::Kernel, Stack::Kernel, None),
        ("Portolan", Source::Portolan, Stack::Portolan, None),
        (
            "Portolan, rate 0.3 of 33 ms",
            Source::Portolan,
            Stack::Portolan,
            Some(cpu::RATE_OF_VIEWER),
        ),
    ] {
        let report = parsed(cpu::pictures(bed, stack, rate, context.effort)?)?;
        let gaps = numbers(&report, "gaps_ms")?;
        let points = gaps.into_iter().enumerate();
        let points = points.map(|(at, gap)| (at as f64, gap));
        curves.push(Curve::of(label, source, points));
        let row = [
            number(&report, "per_second")?,
            number(&report, "longest_gap_ms")?,
        ];
        worst.push(row);
        table = table.row(label, source, row);
    }
    let [rate, gap] = worst[2];
    Ok(Content::default()
        .with(Plot {
            title: "Times between two decoded pictures".to_owned(),
            x: AxisLabel::linear("number of the picture"),
            y: AxisLabel::linear("ms"),
            style: Style::Line,
            curves,
        })
        .with(table)
        .claim(
            "with a reservation all pictures are decoded, at most 66 ms apart",
            rate > 29.9 && gap <= 66.0,
            format!("{rate:.2} a second, at most {gap:.1} ms apart; there 29.99 and 66 ms"),
            "another machine shares the processor: what the hypervisor takes no reservation gives back",
        )
        .claim(
            "without one, among programs that compute, about half of them are",
            worst[0][0] < 25.0,
            format!("{:.1} a second on the kernel's sockets; there 14", worst[0][0]),
            "today's scheduler gives a program that sleeps most of the time what it needs sooner than Solaris TS",
        ))
}
