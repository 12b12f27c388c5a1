//! Protocol Service Decomposition: delivery forms, the modified interface, and the layers' shares of the time.

use std::rc::Rc;

use portolan::layers::Layer;

use super::measure::{
    Context, IPC, KERNEL, KERNEL_HOOKED, Message, NEWAPI_IPC, NEWAPI_SHM, NEWAPI_SHM_IPF, Runs,
    SERVER, SHM, SHM_IPF, System,
};
use super::model::{AxisLabel, Content, Curve, Plot, Source, Style, Table};
use super::papers::Original;
use crate::MeasureError;
use crate::figure::Spread;
use crate::suites::buffers::{Direction, INTERFACES, Transfer, transfer};

const TCP_SIZES: [usize; 5] = [1, 100, 512, 1024, 1460];
const UDP_SIZES: [usize; 5] = [1, 100, 512, 1024, 1472];

/// A column of Tables 2 and 3.
#[derive(Clone, Copy)]
enum Column {
    Throughput,
    Latency(Message),
}

impl Column {
    fn label(&self) -> String {
        match self {
            Column::Throughput => "TCP Gb/s".to_owned(),
            Column::Latency(message) => message.label(),
        }
    }
}

fn columns(context: &Context) -> Vec<Column> {
    let ends = |sizes: [usize; 5]| {
        if context.effort.quick {
            vec![sizes[0], sizes[4]]
        } else {
            sizes.to_vec()
        }
    };
    let tcp = ends(TCP_SIZES).into_iter().map(Message::tcp);
    let udp = ends(UDP_SIZES).into_iter().map(Message::udp);
    let latencies = tcp.chain(udp).map(Column::Latency);
    std::iter::once(Column::Throughput)
        .chain(latencies)
        .collect()
}

fn measure_all(
    context: &Context,
    systems: &[System],
    columns: &[Column],
) -> Result<Vec<Vec<Spread>>, MeasureError> {
    let count = context.count(5_000, 1_500);
    let seconds = if context.effort.quick { 0.7 } else { 1.5 };
    context.in_turns(
        context.runs,
        systems,
        columns,
        |system, column| match column {
            Column::Throughput => context.stream(system, 65_536, seconds),
            Column::Latency(message) => context.ping(system, message, count),
        },
    )
}

fn table_of(systems: &[System], columns: &[Column], measured: &[Vec<Spread>]) -> Table {
    let table = Table::new(
        "This machine: throughput in Gb/s, round trips in µs",
        columns.iter().map(Column::label),
    );
    systems
        .iter()
        .zip(measured)
        .fold(table, |table, (system, values)| {
            table.row(system.label, system.source, values.iter().copied())
        })
}

/// Plots round-trip times by message size.
fn plot_of(
    protocol: &str,
    systems: &[System],
    columns: &[Column],
    measured: &[Vec<Spread>],
) -> Plot {
    let curve = |(system, values): (&System, &Vec<Spread>)| {
        let points = columns.iter().zip(values).filter_map(|(column, spread)| {
            let Column::Latency(message) = column else {
                return None;
            };
            (message.protocol == protocol).then_some((message.size as f64, *spread))
        });
        Curve::of_spreads(system.label, system.source, points)
    };
    Plot {
        title: format!("Round trips by {}", protocol.to_uppercase()),
        x: AxisLabel::linear("bytes of a message"),
        y: AxisLabel::linear("µs"),
        style: Style::Points,
        curves: systems.iter().zip(measured).map(curve).collect(),
    }
}

pub(super) fn table2(context: &Context, paper: Option<&Original>) -> Result<Content, MeasureError> {
    let systems = [KERNEL, SERVER, IPC, SHM, KERNEL_HOOKED, SHM_IPF];
    let columns = columns(context);
    let measured = measure_all(context, &systems, &columns)?;
    let [kernel, server, ipc, shm, kernel_hooked, ipf] = [0, 1, 2, 3, 4, 5];
    let rate = |system: usize| measured[system][0].median;
    let latency = |system: usize| measured[system][1].median;
    let paper_ratio = |row: &str, column| {
        paper.map_or(f64::NAN, |paper| {
            paper.number(row, column) / paper.number("Mach 2.5, in the kernel", column)
        })
    };
    let ratio_text = |what: &str, here: f64, row: &str, column| {
        format!(
            "{what}: {:.2} of the kernel's here, {:.2} there",
            here,
            paper_ratio(row, column)
        )
    };
    Ok(Content::default()
        .with(table_of(&systems, &columns, &measured))
        .with(plot_of("tcp", &systems, &columns, &measured))
        .with(plot_of("udp", &systems, &columns, &measured))
        .claim(
            "server-based operation has the longest round trips",
            latency(server) > 1.3 * latency(shm),
            format!(
                "{}; {:.1} µs beside the library's {:.1} µs",
                ratio_text("TCP, 1 byte", latency(server) / latency(kernel), "UX server", 2),
                latency(server),
                latency(shm),
            ),
            "",
        )
        .claim(
            "server-based operation has the least throughput",
            rate(server) < rate(shm),
            format!(
                "{}; {:.2} Gb/s beside the library's {:.2} Gb/s",
                ratio_text("throughput", rate(server) / rate(kernel), "UX server", 0),
                rate(server),
                rate(shm),
            ),
            "the program, the protocols and the relay are three parties that work at the same time, each with large pieces of the stream, where the library does all in one thread; the processor time that this takes is not in the figure",
        )
        .claim(
            "the library in shared memory has the throughput of the kernel's stack",
            rate(shm) >= 0.95 * rate(kernel),
            ratio_text("throughput", rate(shm) / rate(kernel), "library, SHM", 0),
            "bulk data is copied once more here, from the filter into the ring; where copies bound the transfer the kernel is ahead",
        )
        .claim(
            "a ring in shared memory carries more than a message for each packet",
            rate(shm) > rate(ipc),
            format!("{:.2} of ipc's throughput here, {:.2} there", rate(shm) / rate(ipc), 1076.0 / 910.0),
            "with segments of 64 KiB there are so few messages that their cost does not show: a tap read for each costs less than the ring's wake-up",
        )
        .claim(
            "with the filter integrated into the driver round trips are as short as the kernel's",
            latency(ipf) <= 1.25 * latency(kernel_hooked),
            format!(
                "TCP, 1 byte: {:.1} µs, kernel on the same link {:.1} µs ({:.2}); there {:.2}",
                latency(ipf), latency(kernel_hooked), latency(ipf) / latency(kernel_hooked),
                paper_ratio("library, SHM-IPF", 2),
            ),
            "a sleeping reader of the ring is woken by the ring's notification, which costs some µs more than a socket's",
        )
        .note("Both ends sleep, as protolat's do. shm-ipf needs a filter in the driver (XDP), with which a veth gives no long segments: it has a link of its own, on which the kernel's sockets were measured, too.")
        .note(UDP_NOTE)
        .note("What receives has the buffer that the stack chooses; the paper's column of buffer sizes has no counterpart."))
}

const UDP_NOTE: &str = "The server relays streams only: datagrams come by the ring in its form, too, and have no figures of their own.";

pub(super) fn table3(context: &Context, paper: Option<&Original>) -> Result<Content, MeasureError> {
    let systems = [KERNEL, SHM, NEWAPI_IPC, NEWAPI_SHM, NEWAPI_SHM_IPF];
    let columns = columns(context);
    let measured = measure_all(context, &systems, &columns)?;
    let [_, sockets, _, shared, _] = [0, 1, 2, 3, 4];
    let largest = columns.iter().rposition(
        |column| matches!(column, Column::Latency(message) if message.protocol == "tcp"),
    );
    let largest = largest.unwrap_or(1);
    let ratio = |column: usize| measured[sockets][column].median / measured[shared][column].median;
    let there = paper.map_or(f64::NAN, |paper| {
        paper.number("library, NEWAPI-SHM-IPF", 0) / 1088.0
    });
    let (transfers, speed) = bulk(context)?;
    Ok(Content::default()
        .with(table_of(&systems, &columns, &measured))
        .with(plot_of("tcp", &systems, &columns, &measured))
        .with(plot_of("udp", &systems, &columns, &measured))
        .with(transfers)
        .claim(
            "an interface of shared buffers is faster than the copying one, most with large messages",
            ratio(largest) >= 1.0 && ratio(largest) >= ratio(1),
            format!(
                "round trips of TCP, socket interface over shared buffers: {:.2} with 1 byte, {:.2} with 1460",
                ratio(1),
                ratio(largest),
            ),
            "1460 bytes are copied in some 40 ns today, of round trips of some 40 µs",
        )
        .claim(
            "throughput grows where both ends have shared buffers",
            1.0 / ratio(0) > 1.0,
            format!("{:.2} of the socket interface's here, {there:.2} there", 1.0 / ratio(0)),
            "",
        )
        .claim(
            "a receiver alone takes 1.3 times as much by shared buffers, a sender alone sends 1.1 times as much",
            speed[0] >= 1.3 && speed[1] >= 1.1,
            format!("receiving {:.2}, sending {:.2}", speed[0], speed[1]),
            "what is left beside the copy is the program's own look at each byte, acknowledgements, wake-ups, and the other end",
        )
        .note("In the last table the other end has shared buffers, and looks at nothing. The program reads each byte it receives, and writes each that it sends, by either interface."))
}

/// Measures bulk throughput by either interface, and the gain factor of shared buffers: receiving, and sending.
fn bulk(context: &Context) -> Result<(Table, [f64; 2]), MeasureError> {
    let bed = context.bed()?;
    let seconds = if context.effort.quick { 0.7 } else { 1.5 };
    let mut table = Table::new(
        "One program, the other end by shared buffers",
        ["Gb/s", "Gb for a second of its processor time"],
    );
    let mut speed = [0.0; 2];
    for (direction, speed) in Direction::ALL.into_iter().zip(&mut speed) {
        let mut rates = [0.0; 2];
        for (interface, rate) in INTERFACES.into_iter().zip(&mut rates) {
            let runs: Vec<_> = (0..context.count(context.runs, 1))
                .map(|_| transfer(bed, direction, interface, seconds))
                .collect::<Result<_, _>>()?;
            let spread =
                |of: fn(&Transfer) -> f64| Spread::of(&mut runs.iter().map(of).collect::<Vec<_>>());
            let cells = [spread(|it| it.rate), spread(|it| it.per_processor)];
            *rate = cells[0].median;
            let label = format!("{}, {interface}", direction.name());
            table = table.row(label, Source::Portolan, cells);
        }
        *speed = rates[1] / rates[0];
    }
    Ok((table, speed))
}

/// Layers in the order in which data passes them, with the corresponding rows of the paper.
const LAYERS: [(Layer, &str); 8] = [
    (Layer::Call, "call (entry, exit, locks, wake-up)"),
    (Layer::Copy, "copy (copyin, copyout)"),
    (Layer::OutputSession, "output, session (tcp, udp output)"),
    (Layer::OutputHeaders, "output, headers (ip output)"),
    (Layer::Device, "device (ether output)"),
    (Layer::Ring, "ring (kernel copyout, mbuf queue)"),
    (Layer::InputHeaders, "input, headers (ipintr)"),
    (Layer::InputSession, "input, session (tcp, udp input)"),
];

pub(super) fn table4(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let messages = [
        Message::tcp(1),
        Message::tcp(1460),
        Message::udp(1),
        Message::udp(1472),
    ];
    let parts = |system: &System| -> Result<Vec<Rc<Runs>>, MeasureError> {
        messages
            .iter()
            .map(|message| context.parts(system, message))
            .collect()
    };
    let (kernel, server, library) = (parts(&KERNEL)?, parts(&SERVER)?, parts(&SHM)?);
    let heads = messages.iter().map(Message::label);
    let mut layers = Table::new(
        "The library (shm): µs in each layer, for a message sent and one received",
        heads.clone(),
    );
    for (layer, label) in LAYERS {
        let cells = library.iter().map(|runs| runs.client(&[layer]));
        layers = layers.row(label, Source::Portolan, cells);
    }
    let all = LAYERS.map(|(layer, _)| layer);
    let sums = library.iter().map(|runs| runs.client(&all));
    layers = layers.row("sum", Source::Portolan, sums.clone());
    let mut totals = Table::new("µs of the call that sends, and of half a round trip", heads);
    for (label, source, system) in [
        ("kernel sockets", Source::Kernel, &kernel),
        ("Portolan, server", Source::Server, &server),
        ("Portolan, shm", Source::Portolan, &library),
    ] {
        let send = system
            .iter()
            .map(|runs| runs.spread(|parts| parts.send_call));
        let half = system
            .iter()
            .map(|runs| runs.spread(|parts| parts.round_trip / 2.0));
        totals = totals.row(format!("{label}: send"), source, send).row(
            format!("{label}: half a round trip"),
            source,
            half,
        );
    }
    let bars = LAYERS.iter().map(|(layer, label)| {
        let time = library[0].client(&[*layer]);
        Curve::of_spreads(*label, Source::Portolan, [(0.0, time)])
    });
    let plot = Plot {
        title: "Layers of the library, TCP, 1 byte".to_owned(),
        x: AxisLabel::linear(""),
        y: AxisLabel::linear("µs of a message sent and one received"),
        style: Style::Bars,
        curves: bars.collect(),
    };
    let half = |runs: &Runs| runs.median(|parts| parts.round_trip / 2.0);
    let time = |at: usize, layer| library[at].client(&[layer]).median;
    let sum: Vec<f64> = sums.map(|spread| spread.median).collect();
    let device = time(0, Layer::Device);
    Ok(Content::default()
        .with(layers)
        .with(totals)
        .with(plot)
        .claim(
            "the server's path is the longest, for it crosses the kernel four times with each message",
            (0..2).all(|at| half(&server[at]) > half(&library[at])),
            format!(
                "half a round trip of TCP, 1 byte: server {:.1} µs, library {:.1} µs, kernel {:.1} µs",
                half(&server[0]),
                half(&library[0]),
                half(&kernel[0]),
            ),
            "",
        )
        .claim(
            "large messages cost more in the layers that copy and sum",
            time(1, Layer::Copy) > time(0, Layer::Copy) || sum[1] > sum[0],
            format!("sum of layers: {:.2} µs with 1 byte, {:.2} µs with 1460", sum[0], sum[1]),
            "1460 bytes are copied in some 40 ns today, and their checksum is the device's: what is left of it is lost in the noise of the rest",
        )
        .claim(
            "handing a frame to the kernel is the dearest step of sending",
            LAYERS[2..4].iter().all(|(layer, _)| device > time(0, *layer)),
            format!("device {device:.2} µs, of {:.2} µs in all layers", sum[0]),
            "",
        )
        .note(UDP_NOTE)
        .note("The clock that is looked at between layers is taken off; what it does to caches is not. The kernel's stack has no such boundaries, nor has the relay in the server: of these the call that sends and the round trip are given. On a veth the call that sends does the peer's input, too."))
}
