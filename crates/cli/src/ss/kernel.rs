//! The kernel's own sockets among the rows of `portolan ss --kernel`. A socket by which Portolan reserves a port is
//! identified by its endpoint, which no other socket can have.

use std::collections::HashMap;
use std::net::SocketAddr;

use portolan_types::Protocol;
use procfs::net::{TcpNetEntry, UdpNetEntry};
use procfs::process::{FDTarget, all_processes};

use super::{Place, SocketView, state};
use crate::json::{self, HolderView};

pub(super) fn sockets(portolans: &[SocketView]) -> Vec<SocketView> {
    let holders = holders();
    let tcp = [procfs::net::tcp(), procfs::net::tcp6()];
    let udp = [procfs::net::udp(), procfs::net::udp6()];
    // Without support for an address family, the kernel does not have its file.
    let tcp = tcp
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| of_tcp(&entry));
    let udp = udp
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| of_udp(&entry));
    let mut sockets: Vec<_> = tcp.chain(udp).collect();
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
    use std::net::TcpListener;

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
