//! The server in a bed of two hosts: `a` runs it, `b` is a plain kernel. Sessions are opened, moved, closed and
//! orphaned; the kernel peer shows what it received.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use common::{
    Client, Library, await_some, control_path, open_files, open_files_at_rest, start_server,
};
use portolan_netns::{Bed, Daemon};
use portolan_proto::control::{
    AfterFlush, DescriptorEvent, KernelReason, Reader, ReplyBody, RequestBody, SessionRef,
};
use portolan_proto::report::Holder;
use portolan_proto::{OLDEST_PROTOCOL, PROTOCOL};
use portolan_sys::unix::PairKind;
use portolan_types::{Protocol, Slot};
use rustix::process::Signal;

const TIMEOUT: Option<Duration> = Some(Duration::from_secs(10));

fn at(address: std::net::IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}

fn connect_from_b(bed: &Bed, remote: SocketAddr) -> TcpStream {
    let stream = bed.b.enter(|| TcpStream::connect(remote)).unwrap();
    stream.set_read_timeout(TIMEOUT).unwrap();
    stream
}

fn listen_on_b(bed: &Bed) -> TcpListener {
    bed.b.enter(|| TcpListener::bind(at(Bed::B4, 0))).unwrap()
}

fn await_time_wait(client: &mut Client) {
    await_some("TIME_WAIT", || {
        let state = client
            .sessions()
            .into_iter()
            .find(|session| session.remote.is_some())?
            .state;
        (state == "TIME-WAIT").then_some(())
    });
}

fn counter(client: &mut Client, group: &str, name: &str) -> u64 {
    client.counter(group, name)
}

#[test]
fn a_connection_to_a_listener_is_accepted_cached_used_and_closed() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (_, local, listener) = library.listen(at([0, 0, 0, 0].into(), 8080), 5);
    assert_eq!(local.port(), 8080);

    let mut peer = connect_from_b(&bed, at(Bed::A4, 8080));
    let (id, near, slot) = library.accept(&listener);
    peer.write_all(b"question").unwrap();
    assert_eq!(library.read(slot, 8), b"question");
    library.write(slot, b"answer");
    let mut answer = [0; 6];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");

    library.flush(id, slot, AfterFlush::Close);
    drop(near);
    assert_eq!(peer.read(&mut answer).unwrap(), 0, "the peer sees the end");
    drop(peer);
    let mut command = Client::connect(&control_path(&bed.a));
    await_time_wait(&mut command);
}

#[test]
fn data_that_comes_before_cache_is_in_the_capsule() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 5);
    let mut peer = connect_from_b(&bed, at(Bed::A4, 8080));
    let sent: Vec<u8> = (0..60_000).map(|i| i as u8).collect();
    peer.write_all(&sent).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let (_, _near, slot) = library.accept(&listener);
    assert_eq!(library.read(slot, sent.len()), sent);
}

#[test]
fn an_active_open_resolves_the_neighbour_and_hands_the_session_over() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let kernel = listen_on_b(&bed);
    let (id, near, slot) = library.open(kernel.local_addr().unwrap());
    let (mut peer, from) = kernel.accept().unwrap();
    peer.set_read_timeout(TIMEOUT).unwrap();
    assert!((20000..30000).contains(&from.port()), "{from}");
    library.write(slot, b"hello");
    let mut hello = [0; 5];
    peer.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");

    let mut command = Client::connect(&control_path(&bed.a));
    let report = command.sessions().remove(0);
    assert_eq!(report.session, id);
    assert!(matches!(report.holder, Holder::Process { .. }));
    drop(near);
}

#[test]
fn an_open_to_a_closed_port_is_refused() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (reply, near, _) = library.connect(Protocol::Tcp, at(Bed::B4, 9));
    assert!(matches!(reply, ReplyBody::Connecting { .. }), "{reply:?}");
    let (event, _) = near.event();
    assert!(
        matches!(event, DescriptorEvent::Failed { errno: 111 }),
        "{event:?}"
    );
}

#[test]
fn an_open_to_a_silent_neighbour_fails_as_linux_does() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (_, near, _) = library.connect(Protocol::Tcp, "10.77.0.99:80".parse().unwrap());
    let (event, _) = near.event();
    assert!(
        matches!(event, DescriptorEvent::Failed { errno: 113 }),
        "{event:?}"
    );
}

#[test]
fn what_is_not_portolans_goes_to_the_kernel_with_a_reason() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    for (remote, expected) in [
        ("127.0.0.1:80", KernelReason::LocalAddress),
        ("[::1]:80", KernelReason::LocalAddress),
        ("0.0.0.0:80", KernelReason::LocalAddress),
        ("10.77.0.1:80", KernelReason::LocalAddress),
        ("8.8.8.8:80", KernelReason::NoRoute),
        ("224.0.0.1:80", KernelReason::NotUnicast),
        ("10.77.0.255:80", KernelReason::NotUnicast),
    ] {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let (reply, ..) = library.connect(protocol, remote.parse().unwrap());
            assert!(
                matches!(reply, ReplyBody::UseKernel { reason } if reason == expected),
                "{protocol} {remote}: {reply:?}"
            );
        }
    }
    let (reply, _) = library.bind(Protocol::Udp, "127.0.0.1:0".parse().unwrap(), Slot(0));
    assert!(matches!(
        reply,
        ReplyBody::UseKernel {
            reason: KernelReason::LocalAddress
        }
    ));
}

#[test]
fn a_bound_session_that_goes_to_the_kernel_takes_its_port_along() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (reply, _near) = library.bind(Protocol::Tcp, at([0, 0, 0, 0].into(), 4321), Slot(0));
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    let body = RequestBody::Connect {
        session: SessionRef::Known(session),
        protocol: Protocol::Tcp,
        remote: "127.0.0.1:80".parse().unwrap(),
        slot: Slot(0),
        options: portolan_proto::control::HandshakeOptions::default(),
        early: portolan_proto::control::FastOpenMode::No,
    };
    let (reply, fds) = library.client.ask_with(body, &[]);
    assert!(matches!(reply, ReplyBody::UseKernel { .. }), "{reply:?}");
    let local = rustix::net::getsockname(&fds[0]).unwrap();
    assert_eq!(SocketAddr::try_from(local).unwrap().port(), 4321);
}

#[test]
fn a_port_has_one_owner_on_both_sides() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let mut other = Library::start(&control_path(&bed.a));
    let taken = at([0, 0, 0, 0].into(), 8080);
    let _listener = library.listen(taken, 5);
    let (reply, _) = other.bind(Protocol::Tcp, taken, Slot(0));
    assert!(matches!(reply, ReplyBody::Error { errno: 98 }), "{reply:?}");
    let kernel = bed.a.enter(|| TcpListener::bind(taken));
    assert_eq!(kernel.unwrap_err().kind(), ErrorKind::AddrInUse);

    let kernels = bed
        .a
        .enter(|| TcpListener::bind(at(Bed::A4, 8081)))
        .unwrap();
    let (reply, _) = other.bind(Protocol::Tcp, at(Bed::A4, 8081), Slot(0));
    assert!(matches!(reply, ReplyBody::Error { errno: 98 }), "{reply:?}");
    drop(kernels);
}

#[test]
fn a_connection_over_loopback_is_handed_on_as_a_kernel_socket() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at([0, 0, 0, 0].into(), 8080), 5);
    bed.a.ip("link set lo up");
    let _peer = bed
        .a
        .enter(|| TcpStream::connect("127.0.0.1:8080"))
        .unwrap();
    let (event, fds) = listener.event();
    assert!(matches!(event, DescriptorEvent::AcceptedKernel { .. }));
    assert_eq!(fds.len(), 1);
}

#[test]
fn a_child_that_only_shuts_its_descriptor_down_ends_the_stream() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let listener = library.listen_for_children(at(Bed::A4, 8080));
    let mut peer = connect_from_b(&bed, at(Bed::A4, 8080));
    let (event, fds) = listener.event();
    let DescriptorEvent::Accepted { session, .. } = event else {
        panic!("{event:?}");
    };
    library.client.send(RequestBody::Accepted { session }, &[]);
    rustix::net::shutdown(&fds[0], rustix::net::Shutdown::Write).unwrap();
    assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_dead_process_has_its_connections_reset_and_its_port_freed() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut command = Client::connect(&control_path(&bed.a));
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 5);
    let mut peer = connect_from_b(&bed, at(Bed::A4, 8080));
    let (_, near, slot) = library.accept(&listener);
    let mut waiting = connect_from_b(&bed, at(Bed::A4, 8080));
    library.write(slot, &[7; 10_000]);
    let mut bytes = vec![0; 10_000];
    peer.read_exact(&mut bytes).unwrap();

    drop((library, listener, near));
    for stream in [&mut peer, &mut waiting] {
        let end = stream.read(&mut bytes).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    }
    await_some("an empty table", || {
        command.sessions().is_empty().then_some(())
    });
    bed.a
        .enter(|| TcpListener::bind(at(Bed::A4, 8080)))
        .unwrap();
}

#[test]
fn a_parked_session_can_be_cached_again_and_a_relayed_one_stays_so() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let kernel = listen_on_b(&bed);
    let (id, near, slot) = library.open(kernel.local_addr().unwrap());
    let (mut peer, _) = kernel.accept().unwrap();
    peer.set_read_timeout(TIMEOUT).unwrap();
    library.write(slot, b"zero");
    library.flush(id, slot, AfterFlush::Park);
    let mut four = [0; 4];
    peer.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"zero");
    let slot = library.cache(id);
    library.write(slot, b"one");
    library.flush(id, slot, AfterFlush::Relay(Reader::Sender));

    let mut descriptor = std::os::unix::net::UnixStream::from(near.0.try_clone().unwrap());
    descriptor.write_all(b"two").unwrap();
    let mut both = [0; 6];
    peer.read_exact(&mut both).unwrap();
    assert_eq!(&both, b"onetwo");
    peer.write_all(b"three").unwrap();
    let mut three = [0; 5];
    descriptor.read_exact(&mut three).unwrap();
    assert_eq!(&three, b"three");

    let reply = library.client.ask(RequestBody::Cache { session: id, slot });
    assert!(matches!(reply, ReplyBody::Relayed), "{reply:?}");
    descriptor.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(peer.read(&mut four).unwrap(), 0);
    peer.write_all(b"last").unwrap();
    descriptor.read_exact(&mut four).unwrap();
    drop(peer);
    assert_eq!(descriptor.read(&mut four).unwrap(), 0);
}

#[test]
fn more_connections_than_the_descriptors_queue_holds_are_all_accepted() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 511);
    let peers: Vec<TcpStream> = (0..500)
        .map(|_| connect_from_b(&bed, at(Bed::A4, 8080)))
        .collect();
    for _ in &peers {
        library.accept(&listener);
    }
}

#[test]
fn a_thousand_connections_leave_nothing_behind() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let mut command = Client::connect(&control_path(&bed.a));
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 64);
    command.sessions();
    let before = open_files_at_rest(&server);
    for _ in 0..1000 {
        let peer = connect_from_b(&bed, at(Bed::A4, 8080));
        let (id, near, slot) = library.accept(&listener);
        drop(peer);
        await_some("the peer's end", || {
            library.turn();
            let session = library.stack.tcp(slot).unwrap();
            session.connection.is_receive_shut().then_some(())
        });
        library.flush(id, slot, AfterFlush::Close);
        drop(near);
    }
    await_some("an empty table", || {
        (command.sessions().len() == 1).then_some(())
    });
    assert_eq!(open_files(&server), before);
}

/// Sends SYNs to `10.77.0.1:8080` from unused addresses.
const FLOOD: &str = r#"
import socket, struct
def total(bytes):
    s = sum(struct.unpack("!%dH" % (len(bytes) // 2), bytes))
    return ~((s & 0xffff) + (s >> 16)) & 0xffff
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
to = socket.inet_aton("10.77.0.1")
for n in range(200):
    source = socket.inet_aton("10.77.0.%d" % (100 + n % 100))
    tcp = struct.pack("!HHIIBBHHH", 1024 + n, 8080, n, 0, 0x50, 2, 1024, 0, 0)
    sum_ = total(source + to + struct.pack("!HH", 6, 20) + tcp)
    tcp = tcp[:16] + struct.pack("!H", sum_) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, 6, 0) + source + to
    raw.sendto(ip + tcp, ("10.77.0.1", 0))
"#;

#[test]
fn under_a_flood_of_syns_cookies_keep_the_port_open() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut command = Client::connect(&control_path(&bed.a));
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 16);
    // The neighbour is known: the rest is about SYNs only.
    drop(connect_from_b(&bed, at(Bed::A4, 8080)));
    library.accept(&listener);
    let flood = bed.b.exec("python3").args(["-c", FLOOD]).status();
    assert!(flood.unwrap().success());

    let mut peer = connect_from_b(&bed, at(Bed::A4, 8080));
    let (_, _near, slot) = library.accept(&listener);
    peer.write_all(b"through").unwrap();
    assert_eq!(library.read(slot, 7), b"through");
    assert!(counter(&mut command, "server", "syn_cookies_sent") >= 1);
    assert_eq!(counter(&mut command, "server", "syn_cookies_accepted"), 1);
}

/// Has a SYN answered by a cookie, while handshakes that are reset afterwards fill the queue, sends it again, and then
/// acknowledges the cookie, with data.
const SECOND_ANSWER: &str = r#"
import socket, struct
ME, SERVER, PORT = "10.77.0.99", "10.77.0.1", 8080
FIN, SYN, RST, ACK = 1, 2, 4, 16
def total(bytes):
    s = sum(struct.unpack("!%dH" % (len(bytes) // 2), bytes))
    return ~((s & 0xffff) + (s >> 16)) & 0xffff
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x800))
wire.settimeout(5)
addresses = socket.inet_aton(ME) + socket.inet_aton(SERVER)
def send(port, seq, ack, flags, data=b""):
    tcp = struct.pack("!HHIIBBHHH", port, PORT, seq, ack, 0x50, flags, 1024, 0, 0) + data
    sum_ = total(addresses + struct.pack("!HH", 6, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", sum_) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0) + addresses
    raw.sendto(ip + tcp, (SERVER, 0))
def answer(port):
    while True:
        packet = wire.recv(2048)
        from_, to, seq, ack, _, flags = struct.unpack("!HHIIBB", packet[20:34])
        if packet[9] == 6 and (from_, to) == (PORT, port) and flags & SYN:
            assert ack == 1001, ack
            return seq
for port in range(2000, 2018):
    send(port, 1000, 0, SYN)
    answer(port)
send(3000, 1000, 0, SYN)
cookie = answer(3000)
for port in range(2000, 2018):
    send(port, 1001, 0, RST)
second = cookie
# Until the resets have made room.
while second == cookie:
    send(3000, 1000, 0, SYN)
    second = answer(3000)
send(3000, 1001, cookie + 1 & 0xffffffff, ACK, b"as they say ")
while True:
    packet = wire.recv(2048)
    from_, to, seq, ack, _, flags = struct.unpack("!HHIIBB", packet[20:34])
    if packet[9] == 6 and (from_, to) == (PORT, 3000) and not flags & SYN:
        print(flags & RST, ack)
        break
"#;

#[test]
fn who_has_acknowledged_a_cookie_is_connected_though_another_answer_followed() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut command = Client::connect(&control_path(&bed.a));
    let mut library = Library::start(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 16);
    let links = bed
        .b
        .exec("ip")
        .args(["-o", "link", "show", Bed::DEVICE])
        .output();
    let links = String::from_utf8(links.unwrap().stdout).unwrap();
    let mac = links.split("link/ether ").nth(1).unwrap();
    let mac = mac.split(' ').next().unwrap();
    bed.a.ip(&format!(
        "neigh add 10.77.0.99 lladdr {mac} dev {} nud permanent",
        Bed::DEVICE
    ));
    let output = bed.b.exec("python3").args(["-c", SECOND_ANSWER]).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.trim(), "0 1013", "{errors}");
    let (_, _near, slot) = library.accept(&listener);
    assert_eq!(library.read(slot, 12), b"as they say ");
    assert_eq!(counter(&mut command, "server", "syn_cookies_accepted"), 1);
}

#[test]
fn a_port_in_time_wait_can_connect_and_be_connected_to_again() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let mut command = Client::connect(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 5);
    for _ in 0..2 {
        // The same port of the peer each time: only TIME-WAIT stands in the way.
        let mut peer = bed.b.enter(|| connect_from_port(4000, at(Bed::A4, 8080)));
        let (id, near, slot) = library.accept(&listener);
        library.flush(id, slot, AfterFlush::Close);
        drop(near);
        assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        drop(peer);
        await_time_wait(&mut command);
    }
}

#[test]
fn a_port_in_time_wait_can_be_connected_to_when_it_has_become_the_kernels() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let mut command = Client::connect(&control_path(&bed.a));
    let (_, _, listener) = library.listen(at(Bed::A4, 8080), 5);
    let mut peer = bed.b.enter(|| connect_from_port(4000, at(Bed::A4, 8080)));
    let (id, near, slot) = library.accept(&listener);
    library.flush(id, slot, AfterFlush::Close);
    drop(near);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    drop(peer);
    await_time_wait(&mut command);
    drop(listener);
    let kernel = await_some("the port", || {
        bed.a.enter(|| TcpListener::bind(at(Bed::A4, 8080))).ok()
    });

    // Its first SYN ends the session in TIME-WAIT, the second reaches the kernel.
    let start = std::time::Instant::now();
    let peer = bed.b.enter(|| connect_from_port(4000, at(Bed::A4, 8080)));
    let (_, from) = kernel.accept().unwrap();
    assert_eq!(from, peer.local_addr().unwrap());
    // TIME-WAIT lasts a minute.
    assert!(start.elapsed() < Duration::from_secs(30));
}

fn connect_from_port(port: u16, remote: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_reuseaddr(&fd, true).unwrap();
    bind(&fd, &at(Bed::B4, port)).unwrap();
    connect(&fd, &remote).unwrap();
    TcpStream::from(fd)
}

#[test]
fn udp_is_cached_at_bind_and_at_connect() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut library = Library::start(&control_path(&bed.a));
    let peer = bed.b.enter(|| UdpSocket::bind(at(Bed::B4, 0))).unwrap();
    let (reply, _near) = library.bind(Protocol::Udp, at([0, 0, 0, 0].into(), 5353), Slot(0));
    let ReplyBody::Bound { session, local, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(local.port(), 5353);
    let body = RequestBody::Connect {
        session: SessionRef::Known(session),
        protocol: Protocol::Udp,
        remote: peer.local_addr().unwrap(),
        slot: Slot(0),
        options: portolan_proto::control::HandshakeOptions::default(),
        early: portolan_proto::control::FastOpenMode::No,
    };
    let reply = library.client.ask(body);
    let ReplyBody::Connected { local, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(local, at(Bed::A4, 5353));
    let reply = library.client.ask(RequestBody::Disconnect {
        session,
        slot: Slot(0),
    });
    let ReplyBody::Bound { local, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(local, at([0, 0, 0, 0].into(), 5353));
    let reply = library.client.ask(RequestBody::Release { session });
    assert!(matches!(reply, ReplyBody::Done));
    bed.a
        .enter(|| UdpSocket::bind(at([0, 0, 0, 0].into(), 5353)))
        .unwrap();
}

#[test]
fn hostile_clients_are_refused_or_disconnected() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut garbage = Client::connect(&path);
    garbage.send_raw(&[0xff; 100]);
    assert!(garbage.receive().is_none(), "disconnected");

    let mut stranger = Client::connect(&path);
    let reply = stranger.ask(RequestBody::Listen {
        session: SessionRef::New,
        backlog: 1,
        options: portolan_proto::control::HandshakeOptions::default(),
        options_blob: Default::default(),
        slot: None,
    });
    assert!(matches!(reply, ReplyBody::Error { errno: 1 }), "{reply:?}");
    // Those of other versions; then one of the version before, and one of the next, which speaks this one's protocol, too.
    const NEXT: u32 = PROTOCOL + 1;
    for version in [999, NEXT, 0, u32::MAX] {
        let program = String::new();
        let reply = stranger.ask(RequestBody::Hello { version, program });
        assert!(matches!(reply, ReplyBody::Error { errno: 71 }), "{reply:?}");
    }
    for version in [OLDEST_PROTOCOL, 1 << 24 | NEXT] {
        let program = String::new();
        let reply = Client::connect(&path).ask(RequestBody::Hello { version, program });
        assert!(matches!(reply, ReplyBody::Welcome { .. }), "{reply:?}");
    }

    let mut owner = Library::start(&path);
    let mut thief = Library::start(&path);
    let kernel = listen_on_b(&bed);
    let (id, _near, _) = owner.open(kernel.local_addr().unwrap());
    let reply = thief.client.ask(RequestBody::Cache {
        session: id,
        slot: Slot(0),
    });
    assert!(matches!(reply, ReplyBody::Error { errno: 9 }), "{reply:?}");
    let (reply, _) = thief.ask_new(
        PairKind::Stream,
        RequestBody::Listen {
            session: SessionRef::Known(id),
            backlog: 1,
            options: portolan_proto::control::HandshakeOptions::default(),
            options_blob: Default::default(),
            slot: None,
        },
    );
    assert!(matches!(reply, ReplyBody::Error { errno: 9 }), "{reply:?}");

    let (_, mine, slot) = owner.open(kernel.local_addr().unwrap());
    owner.write(slot, b"still alive");
    drop(mine);
    let mut command = Client::connect(&path);
    assert!(counter(&mut command, "server", "malformed_messages") >= 1);
    assert!(counter(&mut command, "server", "refused_requests") >= 4);
}

#[test]
fn a_second_server_is_refused_and_a_stopped_one_leaves_nothing() {
    let bed = Bed::veth();
    let mut server = start_server(&bed.a);
    let second = bed
        .a
        .exec(env!("CARGO_BIN_EXE_portoland"))
        .args(["--interface", Bed::DEVICE])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&second.stderr).contains("running already"));

    stop_and_look(&bed, &mut server, "");
    start_server(&bed.a);
}

#[test]
fn what_a_killed_server_left_goes_with_the_next() {
    let bed = Bed::veth();
    // The kernel reuses the numbers of ended namespaces: a server killed in an earlier one may have left its
    // directory, which is not the subject of this test.
    let _ = std::fs::remove_dir_all(control_path(&bed.a).parent().unwrap());
    let parameter = "net/ipv4/ip_local_reserved_ports";
    bed.a
        .enter(|| portolan_sys::sysctl::write(parameter, "8080,25000-25010"))
        .unwrap();
    let mut server = start_server(&bed.a);
    server.signal(Signal::KILL);
    server.await_end();
    let mut next = start_server(&bed.a);
    stop_and_look(&bed, &mut next, "8080,25000-25010");
    assert!(!control_path(&bed.a).parent().unwrap().exists());
}

/// Ends a server; the host must be as before, including ports reserved by others.
fn stop_and_look(bed: &Bed, server: &mut Daemon, expected_ports: &str) {
    server.signal(Signal::TERM);
    assert_eq!(server.await_end().and_then(|end| end.code()), Some(0));
    assert!(!control_path(&bed.a).exists());
    let shown = |arguments: &[&str]| {
        let output = bed.a.exec(arguments[0]).args(&arguments[1..]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let filters = shown(&["tc", "filter", "show", "dev", "eth0", "ingress"]);
    assert!(!filters.contains("bpf"), "{filters}");
    assert!(!shown(&["ip", "link"]).contains("ptl"));
    let reserved = shown(&["cat", "/proc/sys/net/ipv4/ip_local_reserved_ports"]);
    assert_eq!(reserved.trim(), expected_ports);
}

/// A script that resets the device's traffic control removes the filter, and only the sessions would notice.
#[test]
fn a_filter_that_somebody_takes_off_is_put_back() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut client = Client::connect(&control_path(&bed.a));
    let filters = || {
        let mut show = bed.a.exec("tc");
        show.args(["filter", "show", "dev", "eth0", "ingress"]);
        String::from_utf8(show.output().unwrap().stdout).unwrap()
    };
    for times in 1..=2 {
        assert!(filters().contains("packet_filter"));
        let mut take_off = bed.a.exec("tc");
        take_off.args(["qdisc", "del", "dev", "eth0", "clsact"]);
        assert!(take_off.status().unwrap().success());
        await_some("filter that is back", || {
            (counter(&mut client, "server", "hooks_restored") == times).then_some(())
        });
    }
    assert!(filters().contains("packet_filter"));
}

#[test]
fn more_sessions_than_fit_a_message_are_listed() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut library = Library::start(&path);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let wanted = rustix::process::Rlimit {
        current: Some(limit.maximum.unwrap_or(65_536).min(65_536)),
        ..limit
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, wanted).unwrap();
    let any = at([0, 0, 0, 0].into(), 0);
    let nears: Vec<_> = (0..MANY)
        .map(|slot| {
            let (reply, near) = library.bind(Protocol::Udp, any, Slot(slot));
            assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
            near
        })
        .collect();
    let listed = Client::connect(&path).sessions();
    assert_eq!(listed.len(), nears.len());
}

/// Descriptions of so many sessions exceed any message.
const MANY: u32 = 2500;

/// `SO_REUSEPORT`: listeners of two processes share a port, and both get connections.
#[test]
fn listeners_of_two_processes_share_a_port_if_both_want_to() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let local = at(Bed::A4, 8090);
    let mut first = Library::start(&path);
    let mut second = Library::start(&path);
    let one = first.listen_sharing(local);
    let two = second.listen_sharing(local);
    let (reply, _near) = second.bind(Protocol::Tcp, local, Slot(0));
    assert!(matches!(reply, ReplyBody::Error { errno: 98 }), "{reply:?}");

    let peers: Vec<_> = (0..40).map(|_| connect_from_b(&bed, local)).collect();
    let mut taken = [0, 0];
    await_some("all connections", || {
        for (count, listener) in taken.iter_mut().zip([&one, &two]) {
            while listener.try_event().is_some() {
                *count += 1;
            }
        }
        (taken[0] + taken[1] == peers.len()).then_some(())
    });
    assert!(taken[0] > 5 && taken[1] > 5, "{taken:?}");

    drop((one, first));
    await_some("the first listener's end", || {
        let left = Client::connect(&path).sessions();
        (left.iter().filter(|s| s.state == "LISTEN").count() == 1).then_some(())
    });
    let _more: Vec<_> = (0..10).map(|_| connect_from_b(&bed, local)).collect();
    for _ in 0..10 {
        two.event();
    }
}

/// More than are kept ready: the rest wait until theirs are made.
#[test]
fn processes_that_come_at_once_get_a_channel_each() {
    const PROCESSES: usize = 24;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let peer = listen_on_b(&bed);
    let remote = peer.local_addr().unwrap();
    let clients: Vec<Client> = (0..PROCESSES).map(|_| Client::greeting(&path)).collect();
    let libraries: Vec<Library> = clients.into_iter().map(Library::welcomed).collect();
    for mut library in libraries {
        let (_, _near, slot) = library.open(remote);
        let (mut stream, _) = peer.accept().unwrap();
        library.write(slot, b"mine");
        let mut got = [0; 4];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"mine");
    }
}
