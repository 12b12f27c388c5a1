//! Datagrams that a library reports as unread: it may have anything put into its own kernel socket,
//! and nothing into another's.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use portolan_netns::{Bed, Namespace};
use portolan_proto::control::{Blob, ReplyBody, RequestBody, Reuse};
use portolan_proto::datagram::UnreadDatagram;
use portolan_proto::encode;
use portolan_types::{Protocol, SessionId, Slot};

use crate::common::{Library, Near, control_path, start_server};
use crate::meter::Meter;
use crate::{assert_serves_others, counter, hostile_library, refused};

const PORT: u16 = 6100;
/// Source of the forged answer of a name server.
const FORGED: &str = "192.0.2.53:53";

const SHARED: Reuse = Reuse {
    address: true,
    port: false,
};

fn bind(library: &mut Library, local: SocketAddr) -> (SessionId, Near) {
    let (reply, near) = library.bind_with(Protocol::Udp, local, Slot(0), SHARED);
    match reply {
        ReplyBody::Bound { session, .. } => (session, near),
        other => panic!("{other:?}"),
    }
}

fn forged(to: IpAddr) -> UnreadDatagram {
    UnreadDatagram {
        from: FORGED.parse().unwrap(),
        to,
        interface: 0,
        hops: 64,
        traffic_class: 0,
        payload: b"forged".to_vec(),
    }
}

fn list(datagrams: &[UnreadDatagram]) -> Blob {
    Blob::Inline(encode(&datagrams))
}

fn share(session: SessionId, unread: Blob) -> RequestBody {
    RequestBody::Share {
        session,
        is_v6: false,
        unread,
    }
}

/// Returns the kernel socket that a session falls back to.
fn shared(library: &mut Library, near: &Near, request: RequestBody) -> UdpSocket {
    let (reply, mut fds) = library.client.ask_with(request, &[near.0.as_fd()]);
    assert!(matches!(reply, ReplyBody::KernelSocket), "{reply:?}");
    let socket = UdpSocket::from(fds.remove(0));
    socket.set_nonblocking(true).unwrap();
    socket
}

/// Opens a kernel socket that shares the port, as those of multicast DNS do.
fn sharer(host: &Namespace, address: SocketAddr) -> UdpSocket {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    host.enter(|| {
        let fd = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        sockopt::set_socket_reuseaddr(&fd, true).unwrap();
        bind(&fd, &address).unwrap();
        let socket = UdpSocket::from(fd);
        socket
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        socket
    })
}

#[test]
fn no_datagram_is_put_into_anybody_elses_socket() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let victim = sharer(&bed.a, SocketAddr::new(Bed::A4, PORT));
    let mut hostile = hostile_library(&path);
    let (session, near) = bind(&mut hostile, SocketAddr::new([0, 0, 0, 0].into(), PORT));
    let loopback = IpAddr::from([127, 0, 0, 1]);
    // To the host's own addresses, another host's, and a group's.
    let datagrams = [Bed::A4, loopback, Bed::B4, [224, 0, 0, 251].into()].map(forged);
    let socket = shared(&mut hostile, &near, share(session, list(&datagrams)));
    assert!(
        victim.recv(&mut [0; 16]).is_err(),
        "it is not the library's"
    );
    let mut text = [0; 16];
    let (length, from) = socket.recv_from(&mut text).unwrap();
    assert_eq!(
        (&text[..length], from),
        (&b"forged"[..], FORGED.parse().unwrap())
    );
    assert!(socket.recv(&mut text).is_err());
    assert_eq!(counter(&path, "server", "unread_datagrams_handed_over"), 1);
    assert_eq!(counter(&path, "server", "unread_datagrams_lost"), 3);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

#[test]
fn lists_of_unread_datagrams_are_bounded_and_of_ones_own_sockets() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let (theirs, _theirs) = bind(&mut honest, SocketAddr::new(Bed::A4, PORT));
    let mut hostile = hostile_library(&path);
    let (session, near) = bind(&mut hostile, SocketAddr::new(Bed::A4, PORT + 1));
    let garbage = [
        Blob::Inline(vec![0xff; 100]),
        Blob::Inline(Vec::new()),
        Blob::Memfd { length: 100 },
    ];
    for unread in garbage {
        let fds = [near.0.as_fd()];
        let errno = refused(&mut hostile, share(session, unread), &fds);
        assert_eq!(errno, libc::EINVAL);
    }
    // Before the session falls back to the kernel, and of another process's session.
    for session in [session, theirs, SessionId(0)] {
        let unread = list(&[forged(Bed::A4)]);
        hostile
            .client
            .send(RequestBody::Unread { session, unread }, &[]);
    }
    let many = vec![
        UnreadDatagram {
            payload: Vec::new(),
            ..forged(Bed::A4)
        };
        2000
    ];
    let socket = shared(&mut hostile, &near, share(session, list(&many)));
    let read = (0..2000).take_while(|_| socket.recv(&mut [0; 4]).is_ok());
    assert_eq!(read.count(), 1024);
    assert_eq!(
        counter(&path, "server", "unread_datagrams_lost"),
        2000 - 1024
    );
    assert_eq!(
        counter(&path, "server", "unread_datagrams_handed_over"),
        1024
    );
    assert_serves_others(&bed, &path);
    meter.finish();
}
