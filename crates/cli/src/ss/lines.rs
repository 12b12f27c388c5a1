//! Rows as text: the columns of ss(8), and what `-i`, `-e`, `-m` and `-o` add.

use portolan_types::Protocol;

use super::services::Services;
use super::session::{FiguresView, ListenerView, segments};
use super::{Arguments, SocketView};
use crate::json::HolderView;
use crate::table::{lines, printable};

const HEAD: [&str; 7] = [
    "Netid",
    "State",
    "Recv-Q",
    "Send-Q",
    "Local Address:Port",
    "Peer Address:Port",
    "Process",
];

pub(super) fn table(
    sockets: &[&SocketView],
    arguments: &Arguments,
    services: &Services,
) -> Vec<String> {
    let services = (!arguments.numeric).then_some(services);
    let cells = |socket: &&SocketView| cells(socket, arguments, services);
    let rows: Vec<_> = sockets.iter().map(cells).collect();
    let mut aligned = lines(&HEAD, &rows).into_iter();
    let head = aligned.next().filter(|_| !arguments.no_header);
    let mut table: Vec<_> = head.into_iter().collect();
    for (line, socket) in aligned.zip(sockets) {
        let more = details(socket, arguments);
        match (more.is_empty(), arguments.oneline) {
            (true, _) => table.push(line),
            (false, true) => table.push(format!("{line} {more}")),
            (false, false) => table.extend([line, format!("\t {more}")]),
        }
    }
    table
}

fn cells(socket: &SocketView, arguments: &Arguments, services: Option<&Services>) -> Vec<String> {
    let process = if arguments.processes {
        process(socket)
    } else {
        String::new()
    };
    vec![
        netid(socket.protocol).to_owned(),
        socket.state.clone(),
        socket.receive_queue.to_string(),
        socket.send_queue.to_string(),
        local(socket, services),
        peer(socket, services),
        process,
    ]
}

fn netid(protocol: &str) -> &str {
    match protocol {
        "ethernet" => "eth",
        other => other,
    }
}

fn local(socket: &SocketView, services: Option<&Services>) -> String {
    match (socket.place.local, &socket.raw) {
        (Some(local), _) => {
            let port = port(socket.place.protocol, local.port(), services);
            with_port(&local.to_string(), &port)
        }
        (None, Some(raw)) if socket.protocol == "ethernet" => format!("{:#06x}", raw.number),
        (None, Some(raw)) => raw.number.to_string(),
        (None, None) => "*".to_owned(),
    }
}

fn peer(socket: &SocketView, services: Option<&Services>) -> String {
    match (socket.place.peer, socket.place.local) {
        (Some(peer), _) => {
            let port = port(socket.place.protocol, peer.port(), services);
            with_port(&peer.to_string(), &port)
        }
        (None, Some(_)) if socket.place.is_ipv6 => "[::]:*".to_owned(),
        (None, Some(_)) => "0.0.0.0:*".to_owned(),
        (None, None) => "*".to_owned(),
    }
}

fn with_port(address: &str, port: &str) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    format!("{host}:{port}")
}

fn port(protocol: Option<Protocol>, port: u16, services: Option<&Services>) -> String {
    let name = protocol.and_then(|protocol| services?.name(protocol, port));
    name.map_or_else(|| port.to_string(), str::to_owned)
}

fn process(socket: &SocketView) -> String {
    let holder = match &socket.holder {
        None => String::new(),
        Some(HolderView::Server) => "server".to_owned(),
        Some(HolderView::Relayed) => "relayed".to_owned(),
        Some(HolderView::Process { pid, program }) => {
            format!("users:((\"{}\",pid={pid}))", printable(program))
        }
    };
    if socket.reservation {
        format!("portolan:reservation {holder}")
            .trim_end()
            .to_owned()
    } else {
        holder
    }
}

/// Returns the details that follow the row.
fn details(socket: &SocketView, arguments: &Arguments) -> String {
    let mut parts = Vec::new();
    if arguments.options {
        parts.extend(socket.figures.as_ref().and_then(timer));
    }
    if arguments.extended {
        parts.push(extended(socket));
    }
    if arguments.memory {
        parts.push(format!(
            "skmem:(r{},w{})",
            socket.receive_queue, socket.send_queue
        ));
    }
    if arguments.info {
        parts.push(info(socket));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(" ")
}

/// Formats a timer: `timer:(on,200ms,0)`.
fn timer(figures: &FiguresView) -> Option<String> {
    let left = duration(figures.timer_ms?);
    Some(format!(
        "timer:({},{left},{})",
        figures.timer, figures.retries
    ))
}

/// Formats a time as ss(8) does, in the two largest units.
fn duration(milliseconds: u64) -> String {
    let (seconds, rest) = (milliseconds / 1000, milliseconds % 1000);
    match (seconds / 60, seconds) {
        (minutes @ 1.., _) if seconds % 60 == 0 || minutes >= 10 => format!("{minutes}min"),
        (minutes @ 1.., _) => format!("{minutes}min{}sec", seconds % 60),
        (0, 10..) => format!("{seconds}sec"),
        (0, 1..) => format!("{seconds}.{:03}sec", rest),
        (0, 0) => format!("{rest}ms"),
    }
}

fn extended(socket: &SocketView) -> String {
    let mut parts = Vec::new();
    if socket.uid != 0 {
        parts.push(format!("uid:{}", socket.uid));
    }
    parts.extend(socket.inode.as_ref().map(|inode| format!("ino:{inode}")));
    parts.extend(
        socket
            .session
            .as_ref()
            .map(|session| format!("sk:{session}")),
    );
    parts.push(match &socket.holder {
        _ if socket.stack == "kernel" => "stack:kernel".to_owned(),
        Some(HolderView::Relayed) => "holder:relayed".to_owned(),
        Some(HolderView::Process { .. }) => "holder:process".to_owned(),
        Some(HolderView::Server) | None => "holder:server".to_owned(),
    });
    if socket
        .listener
        .as_ref()
        .is_some_and(|listener| listener.delegated)
    {
        parts.push("delegated".to_owned());
    }
    parts.join(" ")
}

fn info(socket: &SocketView) -> String {
    if let Some(raw) = &socket.raw {
        return format!(
            "bytes_sent:{} bytes_received:{} frames_out:{} frames_in:{} dropped:{} uid:{} channel:{}",
            raw.bytes_out,
            raw.bytes_in,
            raw.frames_out,
            raw.frames_in,
            raw.dropped,
            socket.uid,
            raw.channel,
        );
    }
    let Some(figures) = &socket.figures else {
        return String::new();
    };
    let mut parts = Vec::new();
    let is_stream = socket.protocol == "tcp" && socket.listener.is_none();
    if is_stream {
        parts.push(windows(figures));
    }
    parts.push(format!(
        "bytes_sent:{} bytes_received:{} segs_out:{} segs_in:{}",
        figures.bytes_out, figures.bytes_in, figures.segments_out, figures.segments_in,
    ));
    parts.extend(figures.cpu_us.map(|cpu| format!("cpu_us:{cpu}")));
    parts.extend(way(socket));
    if let Some(listener) = &socket.listener {
        parts.extend(floods(listener));
    }
    if is_stream {
        if figures.retransmits != 0 {
            parts.push(format!(
                "retrans:{}/{}",
                figures.retries, figures.retransmits
            ));
        }
        let migrations = socket.migrations;
        parts.extend(migrations.map(|count| format!("migrations:{count}")));
        let events = figures.events.iter();
        parts.extend(events.map(|(name, count)| format!("{name}:{count}")));
    }
    parts.join(" ")
}

fn windows(figures: &FiguresView) -> String {
    let milliseconds = |microseconds: u32| f64::from(microseconds) / 1e3;
    let threshold = figures
        .ssthresh_bytes
        .map(|bytes| format!(" ssthresh:{}", segments(bytes, figures.mss)));
    let receive_window = figures
        .receive_window
        .map(|bytes| format!(" rcv_wnd:{bytes}"));
    format!(
        "rto:{:.0} rtt:{:.3}/{:.3} mss:{} cwnd:{}{}{} snd_wnd:{}",
        milliseconds(figures.rto_us),
        milliseconds(figures.srtt_us),
        milliseconds(figures.rttvar_us),
        figures.mss,
        figures.cwnd,
        threshold.unwrap_or_default(),
        receive_window.unwrap_or_default(),
        figures.send_window,
    )
}

/// Names the ring and the delivery form where they are not the usual ones.
fn way(socket: &SocketView) -> Vec<String> {
    let mut parts = Vec::new();
    match (&socket.mapping_refused, socket.mapping) {
        (Some(reason), _) => parts.push(format!("mapping:shared({reason})")),
        (None, Some("direct")) => parts.push("mapping:direct".to_owned()),
        _ => {}
    }
    match (socket.delivery_refused, socket.delivery) {
        (Some(reason), _) => parts.push(format!("delivery:shm({reason})")),
        (None, Some(form)) if form != "shm" => parts.push(format!("delivery:{form}")),
        _ => {}
    }
    parts
}

/// Counts of floods and cookies, without those that are zero.
fn floods(listener: &ListenerView) -> Vec<String> {
    let counts = [
        ("floods", listener.floods),
        ("syns_answered", listener.syns_answered),
        ("syns_dropped", listener.syns_dropped),
        ("cookies_sent", listener.cookies_sent),
        ("cookies_good", listener.cookies_good),
        ("cookies_bad", listener.cookies_bad),
    ];
    let words = [
        ("delegated", listener.delegated),
        ("flooded", listener.flooded),
    ];
    let words = words
        .into_iter()
        .filter(|(_, is)| *is)
        .map(|(word, _)| word.to_owned());
    let some = counts.into_iter().filter(|(_, count)| *count != 0);
    words
        .chain(some.map(|(name, count)| format!("{name}:{count}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use portolan_proto::control::Delivery;
    use portolan_proto::report::{
        CookieCounts, DeliveryReport, FloodCounts, Holder, ListenerReport, Mapping, SessionReport,
    };

    use super::super::session::tests::{established, listening, unconnected};
    use super::super::{session, tests::arguments};
    use super::*;

    fn shown(line: &str, sessions: &[SessionReport]) -> Vec<String> {
        let views: Vec<_> = sessions.iter().map(session::view).collect();
        let services = Services::of("http 80/tcp\n");
        table(
            &views.iter().collect::<Vec<_>>(),
            &arguments(line),
            &services,
        )
    }

    #[test]
    fn sessions_stand_under_the_heads_of_ss() {
        assert_eq!(
            shown("-anp", &[established(), unconnected(), listening()]),
            [
                "Netid State  Recv-Q Send-Q Local Address:Port Peer Address:Port Process",
                "tcp   ESTAB  0      5      10.0.0.2:80        10.0.0.1:40000    users:((\"nginx\",pid=42))",
                "udp   UNCONN 0      5      10.0.0.2:80        0.0.0.0:*         relayed",
                "tcp   LISTEN 3      511    10.0.0.2:80        0.0.0.0:*         users:((\"nginx\",pid=42))",
            ]
        );
        let lines = shown("-tH", &[established()]);
        assert_eq!(
            lines,
            ["tcp   ESTAB 0      5      10.0.0.2:http      10.0.0.1:40000"]
        );
    }

    #[test]
    fn windows_are_in_segments_and_an_infinite_threshold_is_left_out() {
        let lines = shown("-i", &[established()]);
        assert!(
            lines[2].contains("rtt:1.250/0.000 mss:1448 cwnd:10 rcv_wnd"),
            "{}",
            lines[2]
        );
        let mut known = established();
        known.figures.ssthresh = 7 * 1448;
        let lines = shown("-i", &[known]);
        assert!(lines[2].contains(" cwnd:10 ssthresh:7 "), "{}", lines[2]);
    }

    #[test]
    fn ways_that_are_not_the_usual_one_are_shown() {
        let with = |mapping, delivery| {
            let session = SessionReport {
                mapping,
                delivery,
                ..established()
            };
            shown("-i", &[session])[2].clone()
        };
        let usual = with(Mapping::Shared, DeliveryReport::As(Delivery::Shm));
        assert!(
            !usual.contains("mapping") && !usual.contains("delivery"),
            "{usual}"
        );
        let line = with(Mapping::Direct, DeliveryReport::As(Delivery::ShmIpf));
        assert!(line.contains(" mapping:direct delivery:shm-ipf "), "{line}");
        let line = with(Mapping::Shared, DeliveryReport::NotInDriver);
        assert!(line.contains(" delivery:shm(no-driver-hook) "), "{line}");
    }

    #[test]
    fn a_listener_shows_that_it_is_flooded_and_what_came_of_cookies() {
        let with = |report| {
            let session = SessionReport {
                listener: Some(report),
                ..listening()
            };
            shown("-li", &[session])[2].clone()
        };
        assert!(with(ListenerReport::default()).ends_with(" cpu_us:0"));
        let flooded = with(ListenerReport {
            is_delegated: false,
            is_flooded: true,
            filter: FloodCounts {
                floods: 1,
                answered: 4711,
                dropped: 0,
            },
            cookies: CookieCounts {
                sent: 0,
                accepted: 10,
                refused: 3,
            },
        });
        let end = " flooded floods:1 syns_answered:4711 cookies_good:10 cookies_bad:3";
        assert!(flooded.ends_with(end), "{flooded}");
    }

    #[test]
    fn timers_memory_and_users_are_shown_to_who_asks() {
        let mut session = established();
        session.figures.timer = 1;
        let lines = shown("-tonem", &[session]);
        assert!(
            lines[2]
                .starts_with("\t timer:(on,0ms,0) uid:33 sk:18446744073709551615 holder:process")
        );
        assert!(lines[2].ends_with("skmem:(r0,w5)"), "{}", lines[2]);
    }

    #[test]
    fn times_are_written_as_ss_does() {
        for (milliseconds, text) in [
            (0, "0ms"),
            (204, "204ms"),
            (1_250, "1.250sec"),
            (59_000, "59sec"),
            (60_000, "1min"),
            (90_000, "1min30sec"),
            (7_140_000, "119min"),
        ] {
            assert_eq!(duration(milliseconds), text);
        }
    }

    #[test]
    fn a_programs_name_moves_no_cursor() {
        let holder = Holder::Process {
            pid: 1,
            program: "x\x1b[2J".into(),
        };
        let lines = shown(
            "-p",
            &[SessionReport {
                holder,
                ..established()
            }],
        );
        assert!(
            lines[1].ends_with("users:((\"x?[2J\",pid=1))"),
            "{}",
            lines[1]
        );
    }
}
