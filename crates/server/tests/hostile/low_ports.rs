//! Ports below the first unprivileged one. No identifier of a process shows who may bind them: its connection may be
//! held by a child while it runs a set-user-id program. A kernel socket bound by the program does.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody, Reuse, SessionRef};
use portolan_sys::port_right::{self, BoundPort};
use portolan_types::{Protocol, Slot};

use crate::common::{Library, Near, control_path, start_server};
use crate::hostile_library;
use crate::meter::Meter;

const PORT: u16 = 443;

fn bind(
    library: &mut Library,
    protocol: Protocol,
    shown: Option<BorrowedFd<'_>>,
) -> (ReplyBody, Near) {
    if let Some(shown) = shown {
        show(library, shown);
    }
    library.bind(protocol, SocketAddr::new(Bed::A4, PORT), Slot(0))
}

/// Shows `shown` and binds, without waiting for an answer.
pub(crate) fn try_to_bind(library: &mut Library, shown: BorrowedFd<'_>) {
    library.client.send(RequestBody::ShowRight, &[shown]);
    let bind = RequestBody::Bind {
        session: SessionRef::New,
        protocol: Protocol::Udp,
        local: SocketAddr::new(Bed::A4, PORT),
        reuse: Reuse::default(),
        v6_only: false,
        slot: Slot(0),
    };
    library.client.send(bind, &[]);
}

/// The answer is the same whether or not the socket shows a right.
fn show(library: &mut Library, socket: BorrowedFd<'_>) {
    let (reply, _) = library.client.ask_with(RequestBody::ShowRight, &[socket]);
    assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
}

pub(crate) fn assert_refused(library: &mut Library, shown: Option<BorrowedFd<'_>>) {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let (reply, _) = bind(library, protocol, shown);
        assert!(is_refused(&reply), "{reply:?}");
    }
}

/// The library's thread runs as user nobody; its process, the test, as root, as after execution of a set-user-id
/// program.
#[test]
fn the_rights_of_a_process_are_not_those_of_its_connection() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&control_path(&bed.a));
    assert_refused(&mut hostile, None);
    meter.finish_but_for_starts();
}

#[test]
fn what_is_not_bound_to_the_port_here_shows_nothing() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&control_path(&bed.a));
    let at = |port| SocketAddr::new(Bed::A4, port);
    let (other_port, unbound, connection) = bed.a.enter(|| {
        let connection = TcpStream::connect_timeout(&at(9), std::time::Duration::from_millis(50));
        (
            UdpSocket::bind(at(PORT + 1)).unwrap(),
            TcpListener::bind(at(0)).unwrap(),
            connection,
        )
    });
    assert!(connection.is_err());
    let elsewhere = bed
        .b
        .enter(|| UdpSocket::bind(SocketAddr::new(Bed::B4, PORT)))
        .unwrap();
    let file = File::open("/dev/null").unwrap();
    for shown in [
        other_port.as_fd(),
        unbound.as_fd(),
        elsewhere.as_fd(),
        file.as_fd(),
    ] {
        assert_refused(&mut hostile, Some(shown));
    }
    meter.finish_but_for_starts();
}

#[test]
fn a_connection_accepted_at_the_port_shows_nothing() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&control_path(&bed.a));
    let accepted = bed.a.enter(|| {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, PORT)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        (accepted, client)
    });
    assert_refused(&mut hostile, Some(accepted.0.as_fd()));
    drop(accepted.1);
    assert_refused(&mut hostile, Some(accepted.0.as_fd()));
    meter.finish_but_for_starts();
}

fn right_to(bed: &Bed, protocol: Protocol, ip: IpAddr, v6_only: bool) -> OwnedFd {
    let wanted = BoundPort {
        protocol,
        local: SocketAddr::new(ip, PORT),
        v6_only,
    };
    let shown = || port_right::show(wanted, Reuse::default());
    bed.a.enter(shown).unwrap()
}

fn is_refused(reply: &ReplyBody) -> bool {
    let errno = libc::EACCES;
    matches!(reply, ReplyBody::Error { errno: is } if *is == errno)
}

/// What a program was given by whoever started it: the socket of one service at one address.
#[test]
fn a_right_is_one_to_its_own_protocol_and_address() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&control_path(&bed.a));
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let any_v6 = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let (tcp, udp) = (Protocol::Tcp, Protocol::Udp);
    for ((shown, at, v6_only), (protocol, ip)) in [
        ((udp, Bed::A4, false), (tcp, Bed::A4)),
        ((tcp, Bed::A4, false), (udp, Bed::A4)),
        ((udp, Bed::A4, false), (udp, any)),
        ((tcp, Bed::A4, false), (tcp, any)),
        ((udp, any, false), (udp, any_v6)),
        ((udp, any_v6, true), (udp, Bed::A4)),
        ((udp, Bed::A6, false), (udp, any_v6)),
    ] {
        let shown = right_to(&bed, shown, at, v6_only);
        show(&mut hostile, shown.as_fd());
        drop(shown);
        let (reply, _) = hostile.bind(protocol, SocketAddr::new(ip, PORT), Slot(0));
        assert!(is_refused(&reply), "{protocol} {ip}: {reply:?}");
    }
    meter.finish_but_for_starts();
}

/// While the server's socket has the port, nobody can show a right of the same protocol.
#[test]
fn who_has_a_port_shares_it_by_a_right_of_the_other_protocol_and_nobody_else_does() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let local = SocketAddr::new(Bed::A4, PORT);
    let reuse = Reuse {
        address: false,
        port: true,
    };
    let mut first = Library::start(&path);
    let tcp = Protocol::Tcp;
    show(&mut first, right_to(&bed, tcp, Bed::A4, false).as_fd());
    let (reply, _near) = first.bind_with(tcp, local, Slot(0), reuse);
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let bind_by_other = |library: &mut Library| {
        let right = right_to(&bed, Protocol::Udp, Bed::A4, false);
        show(library, right.as_fd());
        drop(right);
        library.bind_with(tcp, local, Slot(0), reuse)
    };
    let (reply, _) = bind_by_other(&mut hostile_library(&path));
    assert!(is_refused(&reply), "{reply:?}");
    let (reply, _near) = bind_by_other(&mut Library::start(&path));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    meter.finish_but_for_starts();
}

#[test]
fn a_socket_bound_to_the_port_shows_the_right_to_it() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let mut kept = Vec::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let local = SocketAddr::new(Bed::A4, PORT);
        let right = right_to(&bed, protocol, local.ip(), false);
        show(&mut library, right.as_fd());
        // The server has closed its copy.
        drop(right);
        let (reply, near) = bind(&mut library, protocol, None);
        assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
        kept.push(near);
    }
}
