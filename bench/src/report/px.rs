//! Plexus: handlers in the kernel's receive path beside programs.

use super::measure::{Context, KERNEL, Message, SHM};
use super::model::{AxisLabel, Content, Curve, Plot, Source, Style, Table};
use super::papers::Original;
use crate::MeasureError;
use crate::figure::Spread;
use crate::suites::ext::video::Cut;
use crate::suites::ext::{by_handler_and_program, by_handlers, by_threads, forward, video};

/// One bar of Fig. 5.
#[derive(Clone, Copy)]
enum Place {
    Filter,
    FilterAndProgram,
    Thread,
    Program(super::measure::System, Wait),
}

#[derive(Clone, Copy)]
enum Wait {
    Sleep,
    Spin,
}

pub(super) fn fig5(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let bed = context.bed()?;
    let places = [
        ("handlers in the filter", Source::Portolan, Place::Filter),
        ("handlers in threads", Source::Portolan, Place::Thread),
        (
            "filter and spinning program",
            Source::Portolan,
            Place::FilterAndProgram,
        ),
        (
            "Portolan, spinning programs",
            Source::Portolan,
            Place::Program(SHM, Wait::Spin),
        ),
        (
            "kernel sockets, spinning",
            Source::Kernel,
            Place::Program(KERNEL, Wait::Spin),
        ),
        (
            "Portolan, sleeping programs",
            Source::Portolan,
            Place::Program(SHM, Wait::Sleep),
        ),
        (
            "kernel sockets, sleeping",
            Source::Kernel,
            Place::Program(KERNEL, Wait::Sleep),
        ),
    ];
    let count = context.count(20_000, 6_000);
    let runs = context.count(5, 2);
    let message = Message::udp(8);
    let measured = context.in_turns(runs, &places, &[()], |(_, _, place), ()| match place {
        Place::Filter => by_handlers(bed, count),
        Place::FilterAndProgram => by_handler_and_program(bed, count),
        Place::Thread => by_threads(bed, count / 4),
        Place::Program(system, Wait::Spin) => context.ping(system, &message.spinning(), count),
        Place::Program(system, Wait::Sleep) => context.ping(system, &message, count / 4),
    })?;
    let mut table = Table::new("Round trips of 8 bytes by UDP", ["µs"]);
    let mut bars = Vec::new();
    for ((label, source, _), spreads) in places.iter().zip(&measured) {
        table = table.row(*label, *source, spreads.iter().copied());
        bars.push(Curve::of_spreads(*label, *source, [(0.0, spreads[0])]));
    }
    let time = |at: usize| measured[at][0].median;
    let (filter, thread, sleeping) = (time(0), time(1), time(6));
    Ok(Content::default()
        .with(Plot {
            title: "Round trips of 8 bytes by UDP, by where the two functions are".to_owned(),
            x: AxisLabel::linear(""),
            y: AxisLabel::linear("µs"),
            style: Style::Bars,
            curves: bars,
        })
        .with(table)
        .claim(
            "handlers at interrupt level are the fastest, those in threads next, programs on sockets last",
            filter < thread && thread < sleeping,
            format!("filter {filter:.1} µs, threads {thread:.1} µs, sleeping programs on the kernel's sockets {sleeping:.1} µs"),
            "a thread here is the owner's, which the kernel wakes by its ring as it wakes a reader of a socket: both are that wake-up",
        )
        .note("A handler in the filter runs where the driver hands a packet over, as the paper's at interrupt level. The paper has one bar for each device; here there is one, a veth. In the form of the server datagrams come by the ring, too: it has no bar of its own."))
}

pub(super) fn fig6(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let bed = context.bed()?;
    let streams: &[u16] = if context.effort.quick {
        &[1, 15, 30]
    } else {
        &[1, 5, 10, 15, 20, 25, 30]
    };
    let frames = context.count(60, 30) as u32;
    let runs = context.count(3, 1);
    let ways = [
        (
            "kernel sockets, a datagram",
            Source::Kernel,
            Some(Cut::Fragments),
        ),
        (
            "kernel sockets, UDP_SEGMENT",
            Source::Kernel,
            Some(Cut::Datagrams),
        ),
        ("Portolan, extension", Source::Portolan, None),
    ];
    let measured = context.in_turns(runs, &ways, streams, |(_, _, cut), streams| match cut {
        Some(cut) => video::by_sockets(bed, *streams, frames, *cut),
        None => video::by_extension(bed, *streams, frames),
    })?;
    let curves = ways
        .iter()
        .zip(&measured)
        .map(|((label, source, _), spreads)| {
            let points = streams.iter().map(|streams| f64::from(*streams));
            Curve::of_spreads(*label, *source, points.zip(spreads.iter().copied()))
        });
    let heads = streams.iter().map(|streams| format!("{streams} streams"));
    let table = Table::new("% of a processor", heads);
    let table = ways
        .iter()
        .zip(&measured)
        .fold(table, |table, ((label, source, _), spreads)| {
            table.row(*label, *source, spreads.iter().copied())
        });
    let at_15 = streams
        .iter()
        .position(|streams| *streams == 15)
        .unwrap_or(0);
    let at = |way: usize, streams: usize| measured[way][streams].median;
    let [fragments, segments, extension] = [0, 1, 2].map(|way| at(way, at_15));
    let most = streams.len() - 1;
    Ok(Content::default()
        .with(Plot {
            title: "A video server's processor time against its streams".to_owned(),
            x: AxisLabel::linear("streams of 30 frames a second"),
            y: AxisLabel::linear("% of a processor"),
            style: Style::Points,
            curves: curves.collect(),
        })
        .with(table)
        .claim(
            "with 15 streams the extension takes half the time of a server on sockets",
            extension <= 0.6 * fragments,
            format!(
                "{extension:.2} % beside {fragments:.2} % (one datagram to each) and {segments:.2} % (UDP_SEGMENT); with {} streams {:.2} of the former",
                streams[most],
                at(2, most) / at(0, most),
            ),
            "to hand a frame to the extension costs the same for any number of streams, and on a veth the sender pays for the receiver's input in each form: half is reached with more streams",
        ))
}

pub(super) fn fig7(context: &Context, _: Option<&Original>) -> Result<Content, MeasureError> {
    let sizes: &[usize] = if context.effort.quick {
        &[1, 1024]
    } else {
        &[1, 128, 512, 1024, 1448]
    };
    let count = context.count(5_000, 2_000);
    let runs = context.count(5, 3);
    let mut all = Vec::new();
    for &size in sizes {
        let runs: Result<Vec<_>, _> = (0..runs).map(|_| forward::measure(size, count)).collect();
        all.push((size as f64, runs?));
    }
    let curve = |label: &str, source, of: fn(&forward::Times) -> f64| {
        let point = |(size, runs): &(f64, Vec<forward::Times>)| {
            (
                *size,
                Spread::of(&mut runs.iter().map(of).collect::<Vec<_>>()),
            )
        };
        Curve::of_spreads(label, source, all.iter().map(point))
    };
    let curves = vec![
        curve("direct", Source::Kernel, |times| times.direct),
        curve("forwarder in the filter", Source::Portolan, |times| {
            times.by_handler
        }),
        curve("program that splices sockets", Source::Server, |times| {
            times.by_proxy
        }),
    ];
    let added = |at: usize| curves[at].at(1.0) - curves[0].at(1.0);
    let (handler, proxy) = (added(1), added(2));
    Ok(Content::default()
        .with(Plot {
            title: "Round trips by TCP through a forwarder".to_owned(),
            x: AxisLabel::linear("bytes of a message"),
            y: AxisLabel::linear("µs"),
            style: Style::Points,
            curves,
        })
        .claim(
            "a forwarder in the kernel adds much less than a program that joins two sockets",
            handler < 0.5 * proxy,
            format!("1 byte: {handler:.1} µs more beside {proxy:.1} µs more"),
            "the wake-ups of three hosts on two cores vary by more than what is added: see the spread",
        )
        .note("Three hosts on a switch; who asks and who answers are on the kernel's sockets, and sleep. The forwarder keeps the connection from end to end; the program ends one and begins another."))
}
