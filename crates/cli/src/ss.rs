//! `portolan ss`: the sessions, and protocols of programs' own, in the manner of ss(8).

mod raw;

use portolan_proto::raw::Guard;
use portolan_proto::report::{Holder, ListenerReport, RawReport, SessionFigures, SessionReport};
use portolan_tcp::EVENTS;
use portolan_types::Protocol;

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::status::print_json;
use crate::table::{lines, printable};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Show TCP sessions.
    #[arg(short, long)]
    tcp: bool,
    /// Show UDP sessions.
    #[arg(short, long)]
    udp: bool,
    /// Show protocols that programs implement themselves: of an EtherType, of an IP protocol, or at a port.
    #[arg(short = 'w', long)]
    raw: bool,
    /// Show listening sessions only.
    #[arg(short, long)]
    listening: bool,
    /// Show windows, times and event counts of each session.
    ///
    /// Of a listener, shows floods of SYNs: whether there is one now (`flooded`), how many there were (`floods`),
    /// SYNs that the packet filter answered by cookies (`syns_answered`) and dropped because the number of
    /// connections in set-up was at its limit (`syns_dropped`), cookies that the performer of the handshakes
    /// sent (`cookies_sent`), and acknowledgements of cookies that were valid (`cookies_good`) or not
    /// (`cookies_bad`). Zeros are left out, except in JSON. Listeners that share a port each show the filter's
    /// counts of all of them. The counts of a program that performs its own handshakes are its claim, up to a
    /// second old.
    #[arg(short, long)]
    info: bool,
    /// Show the holder of each session. Always shown; accepted because ss(8) has it.
    #[arg(short, long)]
    processes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut sessions = arguments.server.sessions()?;
    sessions.retain(|session| arguments.wants(session));
    let mut flows = arguments.server.raw_flows()?;
    flows.retain(|flow| arguments.wants_raw(flow));
    if arguments.json {
        let sessions: Vec<_> = sessions.iter().map(json).collect::<Result<_, _>>()?;
        let all: Vec<_> = sessions
            .into_iter()
            .chain(flows.iter().map(raw::json))
            .collect();
        return print_json(&all);
    }
    for line in table(&sessions, &flows, arguments.info) {
        print(line)?;
    }
    Ok(())
}

impl Arguments {
    fn wants(&self, session: &SessionReport) -> bool {
        self.wants_protocol(session.protocol) && (!self.listening || is_listening(session))
    }

    /// Whoever has a protocol of his own listens.
    fn wants_raw(&self, flow: &RawReport) -> bool {
        match flow.guard {
            _ if self.raw => true,
            Guard::Port { protocol, .. } => self.wants_protocol(protocol),
            Guard::EtherType(_) | Guard::IpProtocol(_) => self.wants_all(),
        }
    }

    fn wants_protocol(&self, protocol: Protocol) -> bool {
        let is_named = match protocol {
            Protocol::Tcp => self.tcp,
            Protocol::Udp => self.udp,
        };
        is_named || self.wants_all()
    }

    fn wants_all(&self) -> bool {
        !(self.tcp || self.udp || self.raw)
    }
}

/// An unconnected UDP socket listens, as ss(8) sees it.
fn is_listening(session: &SessionReport) -> bool {
    session.listener.is_some() || session.state == "UNCONN"
}

const HEAD: [&str; 7] = [
    "Netid",
    "State",
    "Recv-Q",
    "Send-Q",
    "Local Address:Port",
    "Peer Address:Port",
    "Holder",
];

fn table(sessions: &[SessionReport], flows: &[RawReport], info: bool) -> Vec<String> {
    let rows = sessions
        .iter()
        .map(cells)
        .chain(flows.iter().map(raw::cells));
    let rows: Vec<_> = rows.collect();
    let figures = sessions
        .iter()
        .map(figures)
        .chain(flows.iter().map(raw::figures));
    let mut aligned = lines(&HEAD, &rows).into_iter();
    let mut table: Vec<_> = aligned.next().into_iter().collect();
    for (line, figures) in aligned.zip(figures) {
        table.push(line);
        if info {
            table.push(format!("\t {figures}"));
        }
    }
    table
}

fn cells(session: &SessionReport) -> Vec<String> {
    let netid = match session.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    vec![
        netid.to_owned(),
        session.state.clone(),
        session.figures.receive_queue.to_string(),
        session.figures.send_queue.to_string(),
        session.local.to_string(),
        session
            .remote
            .map_or_else(|| "*".to_owned(), |remote| remote.to_string()),
        shown(&session.holder),
    ]
}

fn shown(holder: &Holder) -> String {
    match holder {
        Holder::Server => "server".to_owned(),
        Holder::Relayed => "relayed".to_owned(),
        Holder::Process { pid, program } => format!("{pid},{}", printable(program)),
    }
}

fn figures(session: &SessionReport) -> String {
    let figures = &session.figures;
    let traffic = format!(
        "bytes_sent:{} bytes_received:{} segs_out:{} segs_in:{} cpu_us:{}",
        figures.bytes_out,
        figures.bytes_in,
        figures.segments_out,
        figures.segments_in,
        figures.cpu_us,
    );
    let traffic = match session.mapping.name() {
        "" => traffic,
        mapping => format!("{traffic} mapping:{mapping}"),
    };
    let traffic = match session.delivery.name() {
        "" => traffic,
        delivery => format!("{traffic} delivery:{delivery}"),
    };
    if let Some(listener) = &session.listener {
        return format!("{traffic}{}", segments_shown(listener));
    }
    if session.protocol == Protocol::Udp || is_listening(session) {
        return traffic;
    }
    let milliseconds = |microseconds: u32| f64::from(microseconds) / 1e3;
    let line = format!(
        "cwnd:{} ssthresh:{} rtt:{:.3}/{:.3} rto:{:.0} mss:{} rcv_wnd:{} snd_wnd:{} {traffic} retrans:{} \
         migrations:{}",
        figures.cwnd,
        figures.ssthresh,
        milliseconds(figures.srtt_us),
        milliseconds(figures.rttvar_us),
        milliseconds(figures.rto_us),
        figures.mss,
        figures.receive_window,
        figures.send_window,
        figures.retransmits,
        session.migrations,
    );
    events(figures).fold(line, |line, (name, count)| format!("{line} {name}:{count}"))
}

/// What came of floods and cookies, if there were any.
fn segments_shown(listener: &ListenerReport) -> String {
    let ListenerReport {
        is_flooded,
        filter,
        cookies,
    } = listener;
    let counts = [
        ("floods", filter.floods),
        ("syns_answered", filter.answered),
        ("syns_dropped", filter.dropped),
        ("cookies_sent", cookies.sent),
        ("cookies_good", cookies.accepted),
        ("cookies_bad", cookies.refused),
    ];
    let state = if *is_flooded { " flooded" } else { "" };
    let some = counts.into_iter().filter(|(_, count)| *count != 0);
    some.fold(state.to_owned(), |line, (name, count)| {
        format!("{line} {name}:{count}")
    })
}

/// What happened at all.
fn events(figures: &SessionFigures) -> impl Iterator<Item = (&'static str, u32)> {
    let counts = figures.events.into_iter();
    let named = EVENTS.iter().map(|(name, _)| *name).zip(counts);
    named.filter(|(_, count)| *count != 0)
}

/// The session with its events by name.
fn json(session: &SessionReport) -> Result<serde_json::Value, serde_json::Error> {
    let mut value = serde_json::to_value(session)?;
    let named = events(&session.figures).map(|(name, count)| (name.to_owned(), count.into()));
    value["figures"]["events"] = serde_json::Value::Object(named.collect());
    Ok(value)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use portolan_proto::control::Delivery;
    use portolan_proto::report::{
        CookieCounts, DeliveryReport, FloodCounts, Mapping, SharedReason,
    };
    use portolan_types::SessionId;

    use super::*;

    fn established() -> SessionReport {
        SessionReport {
            session: SessionId(1),
            protocol: Protocol::Tcp,
            local: "10.0.0.2:80".parse().unwrap(),
            remote: Some("10.0.0.1:40000".parse().unwrap()),
            holder: Holder::Process {
                pid: 42,
                program: "nginx".into(),
            },
            state: "ESTAB".into(),
            migrations: 1,
            mapping: Mapping::Shared,
            delivery: DeliveryReport::As(Delivery::Shm),
            listener: None,
            figures: SessionFigures {
                send_queue: 5,
                srtt_us: 1_250,
                ..Default::default()
            },
        }
    }

    fn unconnected() -> SessionReport {
        SessionReport {
            protocol: Protocol::Udp,
            remote: None,
            holder: Holder::Relayed,
            state: "UNCONN".into(),
            ..established()
        }
    }

    #[test]
    fn sessions_stand_under_their_heads() {
        let lines = table(&[established(), unconnected()], &[], false);
        assert_eq!(
            lines,
            [
                "Netid State  Recv-Q Send-Q Local Address:Port Peer Address:Port Holder",
                "tcp   ESTAB  0      5      10.0.0.2:80        10.0.0.1:40000    42,nginx",
                "udp   UNCONN 0      5      10.0.0.2:80        *                 relayed",
            ]
        );
    }

    #[test]
    fn the_figures_of_a_tcp_session_follow_its_line() {
        let lines = table(&[established()], &[], true);
        assert!(lines[2].contains("rtt:1.250/0.000"), "{}", lines[2]);
        assert!(lines[2].contains("retrans:0"));
    }

    #[test]
    fn a_ring_of_its_own_is_shown_and_why_there_is_none() {
        let with = |mapping| {
            figures(&SessionReport {
                mapping,
                ..established()
            })
        };
        assert!(!with(Mapping::Shared).contains("mapping"));
        assert!(with(Mapping::Direct).contains(" mapping:direct "));
        let refused = Mapping::Refused(SharedReason::ProcessLimit);
        assert!(with(refused).contains(" mapping:shared(process-limit) "));
    }

    #[test]
    fn a_form_that_is_not_the_usual_one_is_shown_and_where_it_cannot_be() {
        let by = |delivery| {
            figures(&SessionReport {
                delivery,
                ..established()
            })
        };
        assert!(!by(DeliveryReport::As(Delivery::Shm)).contains("delivery"));
        assert!(by(DeliveryReport::As(Delivery::ShmIpf)).contains(" delivery:shm-ipf "));
        assert!(by(DeliveryReport::NotInDriver).contains(" delivery:shm(no-driver-hook) "));
    }

    #[test]
    fn a_listener_shows_that_it_is_flooded_and_what_came_of_cookies() {
        let with = |listener| {
            figures(&SessionReport {
                listener: Some(listener),
                state: "LISTEN".into(),
                ..established()
            })
        };
        assert!(with(ListenerReport::default()).ends_with(" cpu_us:0"));
        let flooded = with(ListenerReport {
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
    fn events_that_happened_are_named() {
        let mut session = established();
        session.figures.events[0] = 3;
        let line = figures(&session);
        assert!(
            line.ends_with("retrans:0 migrations:1 timeouts:3"),
            "{line}"
        );
        let value = json(&session).unwrap();
        assert_eq!(value["figures"]["events"]["timeouts"], 3);
    }

    #[test]
    fn a_program_cannot_send_control_characters_to_the_terminal() {
        let hostile = Holder::Process {
            pid: 1,
            program: "x\u{1b}[2J".into(),
        };
        let lines = table(
            &[SessionReport {
                holder: hostile,
                ..established()
            }],
            &[],
            false,
        );
        assert!(lines[1].ends_with("1,x?[2J"));
    }

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn flags_choose_as_those_of_ss_do() {
        let wanted = |flags: &[&str]| {
            let line = Line::parse_from([&["ss"], flags].concat());
            [established(), unconnected()].map(|session| line.arguments.wants(&session))
        };
        assert_eq!(wanted(&[]), [true, true]);
        assert_eq!(wanted(&["-t"]), [true, false]);
        assert_eq!(wanted(&["-u"]), [false, true]);
        assert_eq!(wanted(&["-tul"]), [false, true]);
        assert_eq!(wanted(&["-w"]), [false, false]);
    }

    #[test]
    fn protocols_of_ones_own_are_shown_beside_what_they_stand_for() {
        let flow = |guard| RawReport {
            guard,
            holder: Holder::Server,
            uid: 0,
            channel: 1,
            figures: Default::default(),
        };
        let port = Guard::Port {
            protocol: Protocol::Udp,
            local: "0.0.0.0:9".parse().unwrap(),
        };
        let flows = [flow(Guard::EtherType(0x88b5)), flow(port)];
        let wanted = |flags: &[&str]| {
            let line = Line::parse_from([&["ss"], flags].concat());
            [0, 1].map(|at: usize| line.arguments.wants_raw(&flows[at]))
        };
        assert_eq!(wanted(&[]), [true, true]);
        assert_eq!(wanted(&["-l"]), [true, true]);
        assert_eq!(wanted(&["-t"]), [false, false]);
        assert_eq!(wanted(&["-u"]), [false, true]);
        assert_eq!(wanted(&["-w"]), [true, true]);
        let lines = table(&[established()], &flows, true);
        assert_eq!(lines.len(), 7);
        assert!(lines[3].starts_with("eth   RAW"), "{}", lines[3]);
        assert!(lines[6].contains("channel:1"), "{}", lines[6]);
    }
}
