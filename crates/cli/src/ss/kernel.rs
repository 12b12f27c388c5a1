//! The kernel's own sockets among the rows of `portolan ss --kernel`, from `sock_diag` as in ss(8), or from `/proc/net`
//! if the kernel or a sandbox refuses that. A socket by which Portolan reserves a port is identified by its endpoint,
//! which no other socket can have.

use std::collections::HashMap;
use std::net::SocketAddr;

use portolan_proto::report::TIMER_NAMES;
use portolan_sys::sock_diag::{self, KernelSocket, TcpInfo, Timer};
use portolan_types::Protocol;
use procfs::net::{TcpNetEntry, UdpNetEntry};
use procfs::process::{FDTarget, all_processes};

use super::session::FiguresView;
use super::{Place, SocketView, state};
use crate::json::{self, HolderView};

/// A threshold of this many segments or more has not been set yet (`TCP_INFINITE_SSTHRESH`).
const INFINITE: u32 = 0x7fff_ffff;

pub(super) fn sockets(portolans: &[SocketView]) -> Vec<SocketView> {
    let holders = holders();
    let mut sockets = diagnosed(Protocol::Tcp).unwrap_or_else(listed_tcp);
    sockets.extend(diagnosed(Protocol::Udp).unwrap_or_else(listed_udp));
    for socket in &mut sockets {
        socket.holder = socket
            .inode
            .as_ref()
            .and_then(|inode| holders.get(inode).cloned());
        if let Some(owner) = owner(socket, portolans) {
            socket.reservation = true;
            socket.holder = owner.holder.clone();
        }
    }
    sockets
}

/// Returns the sockets of a protocol by `sock_diag`, if the kernel answers.
fn diagnosed(protocol: Protocol) -> Option<Vec<SocketView>> {
    let sockets = sock_diag::sockets(protocol).ok()?;
    let views = sockets.iter().map(|socket| of_diag(protocol, socket));
    Some(views.collect())
}

/// Returns the TCP sockets by `/proc/net`: without the backlog of listeners, and without figures.
fn listed_tcp() -> Vec<SocketView> {
    // Without support for an address family, the kernel does not have its file.
    let files = [procfs::net::tcp(), procfs::net::tcp6()];
    let entries = files.into_iter().flatten().flatten();
    entries.map(|entry| of_tcp(&entry)).collect()
}

fn listed_udp() -> Vec<SocketView> {
    let files = [procfs::net::udp(), procfs::net::udp6()];
    let entries = files.into_iter().flatten().flatten();
    entries.map(|entry| of_udp(&entry)).collect()
}

/// Returns the session whose port a kernel socket reserves.
fn owner<'a>(socket: &SocketView, portolans: &'a [SocketView]) -> Option<&'a SocketView> {
    let is_open =
        socket.place.peer.is_none() && matches!(socket.state.as_str(), "LISTEN" | "UNCONN");
    portolans.iter().find(|session| {
        is_open
            && session.place.protocol == socket.place.protocol
            && session.place.local == socket.place.local
    })
}

fn of_diag(protocol: Protocol, socket: &KernelSocket) -> SocketView {
    let state = state::name_of(socket.state);
    let info = socket.info.as_deref().filter(|_| state != "LISTEN");
    SocketView {
        figures: info.map(|info| figures(info, socket.timer.as_ref())),
        ..view(
            protocol,
            socket.local,
            socket.remote,
            state,
            (socket.receive_queue, socket.send_queue),
            (socket.uid, socket.inode.into()),
        )
    }
}

fn figures(info: &TcpInfo, timer: Option<&Timer>) -> FiguresView {
    let (name, left) = match timer {
        None => (TIMER_NAMES[0], None),
        Some(Timer::Retransmit(left, _)) => ("on", Some(left)),
        Some(Timer::KeepAlive(left)) => ("keepalive", Some(left)),
        Some(Timer::TimeWait) => ("timewait", None),
        Some(Timer::Probe(left)) => ("persist", Some(left)),
    };
    let bytes = |segments: u32| segments.saturating_mul(info.snd_mss);
    let threshold = Some(info.snd_ssthresh).filter(|&segments| segments < INFINITE);
    FiguresView {
        bytes_in: info.bytes_received,
        bytes_out: info.bytes_sent,
        segments_in: info.segs_in.into(),
        segments_out: info.segs_out.into(),
        retransmits: info.total_retrans.into(),
        cpu_us: None,
        cwnd_bytes: bytes(info.snd_cwnd),
        cwnd: info.snd_cwnd,
        ssthresh_bytes: threshold.map(bytes),
        srtt_us: info.rtt,
        rttvar_us: info.rttvar,
        rto_us: info.rto,
        mss: info.snd_mss,
        receive_window: None,
        send_window: info.snd_wnd,
        timer: name,
        timer_ms: left.map(|left| left.as_millis() as u64),
        retries: info.retransmits.into(),
        events: serde_json::Map::new(),
    }
}

fn of_tcp(entry: &TcpNetEntry) -> SocketView {
    view(
        Protocol::Tcp,
        entry.local_address,
        entry.remote_address,
        state::name_of(entry.state.to_u8()),
        (entry.rx_queue, entry.tx_queue),
        (entry.uid, entry.inode),
    )
}

fn of_udp(entry: &UdpNetEntry) -> SocketView {
    view(
        Protocol::Udp,
        entry.local_address,
        entry.remote_address,
        state::name_of(entry.state.to_u8()),
        (entry.rx_queue, entry.tx_queue),
        (entry.uid, entry.inode),
    )
}

fn view(
    protocol: Protocol,
    local: SocketAddr,
    remote: SocketAddr,
    state: &str,
    (receive_queue, send_queue): (u32, u32),
    (uid, inode): (u32, u64),
) -> SocketView {
    let peer = Some(remote).filter(|remote| remote.port() != 0);
    let place = Place::of(protocol, local, peer);
    SocketView {
        receive_queue: receive_queue.into(),
        send_queue: send_queue.into(),
        uid,
        inode: Some(inode.to_string()),
        ..SocketView::bare("kernel", json::protocol(protocol), state, place)
    }
}

/// Maps the inodes of sockets to their processes, as far as this user may read them.
fn holders() -> HashMap<String, HolderView> {
    let mut holders = HashMap::new();
    for process in all_processes().into_iter().flatten().flatten() {
        let (Ok(stat), Ok(descriptors)) = (process.stat(), process.fd()) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            if let FDTarget::Socket(inode) = descriptor.target {
                let holder = HolderView::Process {
                    pid: stat.pid.unsigned_abs(),
                    program: stat.comm.clone(),
                };
                holders.entry(inode.to_string()).or_insert(holder);
            }
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::super::session;
    use super::super::session::tests::listening;
    use super::*;

    #[test]
    fn the_kernels_sockets_are_listed_with_their_processes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let sockets = sockets(&[]);
        let own = sockets
            .iter()
            .find(|socket| socket.place.local == Some(local));
        let own = own.expect("it listens");
        assert_eq!(
            (own.state.as_str(), own.stack, own.reservation),
            ("LISTEN", "kernel", false)
        );
        assert!(
            matches!(own.holder, Some(HolderView::Process { pid, .. }) if pid == std::process::id())
        );
    }

    fn view_of(sockets: &[SocketView], local: SocketAddr, state: &str) -> SocketView {
        let own = sockets
            .iter()
            .find(|socket| socket.place.local == Some(local) && socket.state == state);
        own.expect("the socket is listed").clone()
    }

    #[test]
    fn both_sources_name_the_same_sockets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let stream = TcpStream::connect(local).unwrap();
        let diagnosed = diagnosed(Protocol::Tcp).expect("the kernel answers");
        let listed = listed_tcp();
        for (local, state) in [(local, "LISTEN"), (stream.local_addr().unwrap(), "ESTAB")] {
            let [a, b] = [&diagnosed, &listed].map(|sockets| view_of(sockets, local, state));
            assert_eq!(
                (a.remote, a.uid, a.inode, a.receive_queue),
                (b.remote, b.uid, b.inode, b.receive_queue)
            );
        }
    }

    #[test]
    fn a_connection_has_the_kernels_figures() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let view = view_of(&sockets(&[]), stream.local_addr().unwrap(), "ESTAB");
        let figures = view.figures.expect("it has figures");
        assert_eq!((figures.cpu_us, figures.ssthresh_bytes), (None, None));
        assert_eq!(figures.cwnd_bytes, figures.cwnd * figures.mss);
        assert!(
            figures.cwnd >= 10 && figures.segments_out >= 2,
            "{figures:?}"
        );
    }

    #[test]
    fn a_socket_at_a_sessions_endpoint_is_its_reservation() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut session = listening();
        session.local = listener.local_addr().unwrap();
        let sockets = sockets(&[session::view(&session)]);
        let kept: Vec<_> = sockets.iter().filter(|socket| socket.reservation).collect();
        assert_eq!(kept.len(), 1);
        let owner = HolderView::Process {
            pid: 42,
            program: "nginx".into(),
        };
        assert_eq!(kept[0].holder, Some(owner));
    }
}
