//! `portolan ss`: sessions and protocols of programs' own, with the options, filters and columns of ss(8).

mod filter;
mod kernel;
mod lines;
mod raw;
mod services;
mod session;
mod state;
mod summary;

use std::net::SocketAddr;

use portolan_types::Protocol;
use schemars::JsonSchema;
use serde::Serialize;

use self::filter::{Filter, Subject};
use self::services::Services;
use self::state::States;
pub(crate) use self::summary::SummaryView;
use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::{HolderView, print_json};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Show TCP sessions.
    #[arg(short, long)]
    tcp: bool,
    /// Show UDP sessions.
    #[arg(short, long)]
    udp: bool,
    /// Show protocols that programs implement themselves: by EtherType, by IP protocol, or at a port.
    #[arg(short = 'w', long)]
    raw: bool,
    /// Show UNIX sockets: always none, since all of them are the kernel's.
    #[arg(short = 'x', long)]
    unix: bool,
    /// Show sessions in all states.
    #[arg(short, long)]
    all: bool,
    /// Show listening sessions only.
    #[arg(short, long)]
    listening: bool,
    /// Show sessions over IPv4 only.
    #[arg(short = '4', long, conflicts_with = "ipv6")]
    ipv4: bool,
    /// Show sessions over IPv6 only.
    #[arg(short = '6', long)]
    ipv6: bool,
    /// Show ports as numbers.
    #[arg(short, long)]
    numeric: bool,
    /// Show the process that holds each session.
    #[arg(short, long)]
    processes: bool,
    /// Show windows, times and event counts of each session.
    ///
    /// cwnd and ssthresh are in segments, as in ss(8); an ssthresh that has not been set yet is left out.
    ///
    /// For a listener, shows floods of SYNs: whether there is one now (`flooded`), how many there were (`floods`),
    /// SYNs that the packet filter answered with cookies (`syns_answered`) or dropped because the number of
    /// connections in set-up was at its limit (`syns_dropped`), cookies sent by the process that performs the
    /// handshakes (`cookies_sent`), and acknowledgements of cookies that were valid (`cookies_good`) or not
    /// (`cookies_bad`). Zeros are left out, except in JSON. Listeners that share a port each show the filter's
    /// counts of all of them. The counts of a program that performs its own handshakes are reported by the program,
    /// unverified and up to a second old.
    #[arg(short, long)]
    info: bool,
    /// Show user, session number and holder of each session.
    #[arg(short, long)]
    extended: bool,
    /// Show the memory that the data of each session takes.
    #[arg(short, long)]
    memory: bool,
    /// Show the timer of each session.
    #[arg(short, long)]
    options: bool,
    /// Show the numbers of sessions instead of a list.
    #[arg(short, long)]
    summary: bool,
    /// Leave out the header line.
    #[arg(short = 'H', long)]
    no_header: bool,
    /// Show each session on one line.
    #[arg(short = 'O', long)]
    oneline: bool,
    /// Include the kernel's own TCP and UDP sockets.
    ///
    /// A socket by which Portolan reserves a port is shown as `portolan:reservation`, with the process that has the
    /// port. The processes of other users' sockets are shown to root only. Where the kernel refuses `sock_diag`, the
    /// sockets are read from /proc/net, without the backlog of listeners and without figures.
    #[arg(long)]
    kernel: bool,
    /// Print JSON: all figures, whatever columns are selected.
    #[arg(long)]
    pub json: bool,
    /// Show only sockets that match this filter, in the language of ss(8).
    ///
    /// States come first (`state established`, `exclude time-wait`), then conditions on addresses and ports
    /// (`src 10.0.0.0/8`, `dst 192.0.2.1:443`, `sport = :80`, `dport gt 1024`), combined by `and`, `or`, `not` and
    /// parentheses.
    #[arg(value_name = "FILTER")]
    filter: Vec<String>,
}

/// One row: a session, a protocol of a program's own, or one of the kernel's sockets.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct SocketView {
    /// `portolan` or `kernel`.
    pub stack: &'static str,
    /// `tcp`, `udp`, `ethernet` or `ip`.
    pub protocol: &'static str,
    /// As spelled by ss(8); `RAW` for protocols of a program's own.
    pub state: String,
    /// Unread bytes; for a TCP listener, the connections that wait to be accepted.
    pub receive_queue: u64,
    /// Unacknowledged bytes; for a TCP listener, how many connections may wait to be accepted.
    pub send_queue: u64,
    /// Address and port; null for a protocol that is identified by EtherType or IP protocol alone.
    pub local: Option<String>,
    /// Null: none yet, or any peer.
    pub remote: Option<String>,
    /// Null for the kernel's sockets.
    pub holder: Option<HolderView>,
    pub uid: u32,
    /// Null if the caller may not know it.
    pub session: Option<String>,
    /// How often it migrated to or from a process.
    pub migrations: Option<u32>,
    /// The ring that its frames arrive by: `shared` or `direct`.
    pub mapping: Option<&'static str>,
    /// Why it was refused a ring of its own.
    pub mapping_refused: Option<String>,
    /// The delivery form: `shm`, `ipc`, `server`, `shm-ipf`.
    pub delivery: Option<&'static str>,
    /// Why the requested delivery form is not used.
    pub delivery_refused: Option<&'static str>,
    pub figures: Option<session::FiguresView>,
    pub listener: Option<session::ListenerView>,
    pub raw: Option<raw::RawView>,
    /// The inode number of a kernel socket.
    pub inode: Option<String>,
    /// A kernel socket by which Portolan reserves a port.
    pub reservation: bool,
    #[serde(skip)]
    place: Place,
}

/// The fields that filters and columns need in binary form.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    protocol: Option<Protocol>,
    /// The local address is an IPv6 address.
    is_ipv6: bool,
}

impl SocketView {
    /// Returns a row with these fields only.
    fn bare(stack: &'static str, protocol: &'static str, state: &str, place: Place) -> SocketView {
        SocketView {
            stack,
            protocol,
            state: state.to_owned(),
            receive_queue: 0,
            send_queue: 0,
            local: place.local.map(|local| local.to_string()),
            remote: place.peer.map(|peer| peer.to_string()),
            holder: None,
            uid: 0,
            session: None,
            migrations: None,
            mapping: None,
            mapping_refused: None,
            delivery: None,
            delivery_refused: None,
            figures: None,
            listener: None,
            raw: None,
            inode: None,
            reservation: false,
            place,
        }
    }
}

impl Place {
    fn of(protocol: Protocol, local: SocketAddr, peer: Option<SocketAddr>) -> Place {
        Place {
            local: Some(local),
            peer,
            protocol: Some(protocol),
            is_ipv6: local.is_ipv6(),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let services = Services::read();
    let filter = Filter::parse(&arguments.filter, &services)
        .map_err(|error| Failure::Usage(anyhow::anyhow!(error)))?;
    let sockets = sockets(arguments)?;
    if arguments.summary {
        return summary::show(&sockets, arguments.json);
    }
    let wanted: Vec<_> = sockets
        .iter()
        .filter(|socket| arguments.wants(socket, &filter))
        .collect();
    if arguments.json {
        return print_json(&wanted);
    }
    for line in lines::table(&wanted, arguments, &services) {
        print(line)?;
    }
    Ok(())
}

/// Returns all rows, before the filter.
fn sockets(arguments: &Arguments) -> Result<Vec<SocketView>, Failure> {
    let sessions = arguments.server.sessions()?;
    let flows = arguments.server.raw_flows()?;
    let views = sessions.iter().map(session::view);
    let mut sockets: Vec<_> = views.chain(flows.iter().map(raw::view)).collect();
    if arguments.kernel {
        let of_kernel = kernel::sockets(&sockets);
        sockets.extend(of_kernel);
    }
    Ok(sockets)
}

impl Arguments {
    fn wants(&self, socket: &SocketView, filter: &Filter) -> bool {
        let state = States::of_socket(&socket.state);
        let states = filter.states.unwrap_or(match socket.raw {
            // A protocol of a program's own has the state of a listener; --raw shows these whatever the state.
            Some(_) if self.raw => States::ALL,
            _ if self.all => States::ALL,
            _ if self.listening => States::LISTENING,
            _ => States::CONNECTED,
        });
        let subject = Subject {
            local: socket.place.local,
            peer: socket.place.peer,
        };
        states.has(state)
            && self.wants_protocol(socket)
            && self.wants_family(socket)
            && filter.admits(&subject)
    }

    fn wants_protocol(&self, socket: &SocketView) -> bool {
        match socket.place.protocol {
            _ if self.raw && socket.raw.is_some() => true,
            Some(Protocol::Tcp) if self.tcp => true,
            Some(Protocol::Udp) if self.udp => true,
            _ => !(self.tcp || self.udp || self.raw || self.unix),
        }
    }

    fn wants_family(&self, socket: &SocketView) -> bool {
        match socket.place.local {
            None => !(self.ipv4 || self.ipv6),
            Some(_) => !(self.ipv4 && socket.place.is_ipv6 || self.ipv6 && !socket.place.is_ipv6),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::session::tests::{established, listening, unconnected};
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    pub(super) fn arguments(line: &str) -> Arguments {
        let words = std::iter::once("ss").chain(line.split_whitespace());
        Line::try_parse_from(words)
            .unwrap_or_else(|error| panic!("{error}"))
            .arguments
    }

    fn wanted(line: &str) -> Vec<String> {
        let arguments = arguments(line);
        let filter = Filter::parse(&arguments.filter, &Services::default()).expect(line);
        let sockets = [established(), unconnected(), listening()];
        let views = sockets.iter().map(session::view);
        views
            .filter(|view| arguments.wants(view, &filter))
            .map(|view| view.state)
            .collect()
    }

    #[test]
    fn options_choose_as_those_of_ss_do() {
        for (line, states) in [
            ("", &["ESTAB"][..]),
            ("-a", &["ESTAB", "UNCONN", "LISTEN"]),
            ("-ta", &["ESTAB", "LISTEN"]),
            ("-tanp", &["ESTAB", "LISTEN"]),
            ("-tlnp", &["LISTEN"]),
            ("-tulpen", &["UNCONN", "LISTEN"]),
            ("-l", &["UNCONN", "LISTEN"]),
            ("-ua", &["UNCONN"]),
            ("-xa", &[]),
            ("-a6", &[]),
            ("-a4nieomH", &["ESTAB", "UNCONN", "LISTEN"]),
            ("state established", &["ESTAB"]),
            ("-tn state listening", &["LISTEN"]),
            (
                "-a sport = :80 and not dst 10.0.0.0/8",
                &["UNCONN", "LISTEN"],
            ),
            (
                "-t -a ( sport = :80 or dport = :22 ) dst 10.0.0.1",
                &["ESTAB"],
            ),
        ] {
            assert_eq!(wanted(line), states, "{line}");
        }
    }
}
