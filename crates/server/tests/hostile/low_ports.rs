//! Ports below the first unprivileged one. No identifier of a process shows who may bind them: its connection may be
//! held by a child while it runs a set-user-id program. A kernel socket bound by the program does.

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody, Reuse, SessionRef};
use portolan_sys::port_right;
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
pub fn try_to_bind(library: &mut Library, shown: BorrowedFd<'_>) {
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

pub fn assert_refused(library: &mut Library, shown: Option<BorrowedFd<'_>>) {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let (reply, _) = bind(library, protocol, shown);
        let is_refused = matches!(
            reply,
            ReplyBody::Error {
                errno: libc::EACCES
            }
        );
        assert!(is_refused, "{reply:?}");
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

#[test]
fn a_socket_bound_to_the_port_shows_the_right_to_it() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let mut kept = Vec::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let local = SocketAddr::new(Bed::A4, PORT);
        let right = bed.a.enter(|| port_right::show(local)).unwrap();
        show(&mut library, right.as_fd());
        // The server has closed its copy.
        drop(right);
        let (reply, near) = bind(&mut library, protocol, None);
        assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
        kept.push(near);
    }
}
