//! UDP sockets with the kernel's participation: datagrams unread on a socket that is passed on,
//! datagrams sent past the packet filter, and rare calls. Each behaves as on the kernel's stack.

use std::net::{IpAddr, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::run;
use portolan_netns::{Daemon, Namespace, Ready};
use portolan_programs::{PYTHON, Steps, bed, counter, eventually};

const UNREAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/unread.py");
const CALLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/udp_calls.py");
const SENDERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/senders.py");
const LISTENER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/listener.py");
const TWO_DEVICES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/two_devices.py");

const PORT: u16 = 7060;
const GROUP: &str = "239.77.0.7";
const GROUP_V6: &str = "ff05::77:7";

/// More time than a datagram takes.
const LIMIT: Duration = Duration::from_secs(20);
/// Time for datagrams to arrive on the socket.
const ARRIVAL: Duration = Duration::from_millis(300);

fn socket_on(bed: &Bed, side: Side, address: IpAddr, port: u16) -> UdpSocket {
    let bind = || UdpSocket::bind((address, port)).expect("a socket");
    bed.namespace(side).enter(bind)
}

/// Returns the datagrams that were unread when the socket was passed on, with their sources.
fn unread(bed: &Bed, stack: Stack, way: &str, bound: &str) -> Vec<String> {
    let mut command = bed.command(Side::Server, stack, PYTHON);
    let own = bed.server.address.to_string();
    let bound = if bound == "own" { &own } else { bound };
    let mut program = Steps::start(command.args([UNREAD, way, bound, &PORT.to_string(), &own]));
    program.await_line("bound");
    let there = bed.endpoint(PORT);
    let client = socket_on(bed, Side::Client, bed.client.address, 7999);
    client.send_to(b"one", there).expect("sent");
    client.send_to(&[b'2'; 4000], there).expect("sent");
    client.send_to(b"", there).expect("sent");
    thread::sleep(ARRIVAL);
    let local = socket_on(bed, Side::Server, bed.server.address, 7998);
    local.send_to(b"local", there).expect("sent");
    thread::sleep(ARRIVAL);
    program.go_on();
    let count = if way == "peeked" { 5 } else { 4 };
    (0..count).map(|_| program.line()).collect()
}

#[test]
fn what_nobody_has_read_is_read_by_whoever_has_the_socket_next() {
    for bed in [bed(), bed().over_ipv6()] {
        let any = if bed.server.address.is_ipv4() {
            "0.0.0.0"
        } else {
            "::"
        };
        for way in [
            "fork", "exec", "passed", "connect", "peeked", "option", "sharing",
        ] {
            for bound in ["own", any] {
                let [kernel, ours] =
                    [Stack::Kernel, Stack::Portolan].map(|stack| unread(&bed, stack, way, bound));
                assert_eq!(ours, kernel, "{way}, bound to {bound}");
            }
        }
        let lost = counter(&bed, Side::Server, "server", "unread_datagrams_lost");
        assert_eq!(lost, 0);
    }
}

/// A DTLS server that listens (`DTLSv1_listen`) peeks, connects, and reads the datagram again.
#[test]
fn a_dtls_server_answers_a_client_on_its_own_host_and_on_another() {
    let bed = bed();
    let (key, certificate) = (bed.file("key"), bed.file("certificate"));
    let mut request = Command::new("openssl");
    request
        .args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=portolan",
        ])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate);
    run(&mut request).expect("a certificate");
    for (side, stack) in [
        (Side::Server, Stack::Kernel),
        (Side::Server, Stack::Portolan),
        (Side::Client, Stack::Kernel),
        (Side::Client, Stack::Portolan),
    ] {
        // s_server ends at the end of its input.
        let script = format!(
            "sleep 60 | openssl s_server -dtls1_2 -listen -accept {PORT} -key {} -cert {}",
            key.display(),
            certificate.display()
        );
        let mut server = bed.command(Side::Server, Stack::Portolan, "sh");
        server.args(["-c", &script]);
        let server = Daemon::start(server, Ready::Line("ACCEPT".to_owned()));
        let endpoint = bed.endpoint(PORT).to_string();
        let mut client = bed.command(side, stack, "openssl");
        client.args(["s_client", "-dtls1_2", "-connect", &endpoint]);
        let mut client = Steps::start(&mut client);
        client.say("a line by DTLS");
        let is_there = || server.output().contains("a line by DTLS");
        assert!(
            eventually(LIMIT, is_there),
            "{side:?} {stack:?}: {}",
            server.output()
        );
    }
}

#[test]
fn rare_calls_do_what_they_do_on_the_kernels_sockets() {
    let bed = bed();
    let said = |stack| {
        let (own, peer) = (bed.server.address, bed.client.address);
        let mut command = bed.command(Side::Server, stack, PYTHON);
        let command = command.args([CALLS, &own.to_string(), &peer.to_string()]);
        run(command).expect("it ends")
    };
    let lines = |text: String| -> Vec<String> { text.lines().map(str::to_owned).collect() };
    let kernel = lines(said(Stack::Kernel));
    assert!(kernel.len() > 50, "{kernel:#?}");
    assert_eq!(lines(said(Stack::Portolan)), kernel);
}

/// What a host on the link hears of one that sends in every way, and how often.
fn heard(bed: &Bed, stack: Stack) -> Vec<String> {
    let [peer, group, broadcast] = match bed.client.address {
        IpAddr::V4(_) => ["10.77.0.3", GROUP, "10.77.0.255"],
        IpAddr::V6(_) => ["fd77::3", GROUP_V6, "ff02::1%eth0"],
    };
    let guest = bed.guest(3);
    let mut listener = guest.exec(PYTHON);
    listener.args([LISTENER, group, &PORT.to_string(), INTERFACE]);
    let listener = Daemon::start(listener, Ready::Line("ready".to_owned()));
    let has_link_local = || {
        let mut ip = bed.command(Side::Client, Stack::Kernel, "ip");
        let listed = run(ip.args([
            "-6", "-o", "address", "show", "dev", INTERFACE, "scope", "link",
        ]));
        !listed.expect("iproute2 lists addresses").is_empty()
    };
    assert!(eventually(LIMIT, has_link_local));
    let mut sender = bed.command(Side::Client, stack, PYTHON);
    sender
        .args([SENDERS, &bed.client.address.to_string(), peer])
        .args([&PORT.to_string(), group, broadcast, INTERFACE]);
    run(&mut sender).expect("it ends");
    assert_sent_by(stack, bed);
    let is_over = || listener.output().contains("broadcast");
    assert!(eventually(LIMIT, is_over), "{}", listener.output());
    thread::sleep(ARRIVAL);
    let output = listener.output();
    let mut lines: Vec<String> = output.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn assert_sent_by(stack: Stack, bed: &Bed) {
    let is_portolan = counter(bed, Side::Client, "transmit", "sent") > 0;
    assert_eq!(is_portolan, stack == Stack::Portolan);
}

#[test]
fn every_datagram_leaves_once_from_whatever_socket() {
    let bed = || Bed::switched().unwrap_or_else(|error| panic!("no bed: {error}"));
    compare_what_is_heard(bed, 9);
    compare_what_is_heard(|| bed().over_ipv6(), 7);
}

fn compare_what_is_heard(bed: impl Fn() -> Bed, more_than: usize) {
    let kernel = heard(&bed(), Stack::Kernel);
    assert!(kernel.len() > more_than, "{kernel:#?}");
    assert_eq!(heard(&bed(), Stack::Portolan), kernel);
}

/// Linux takes the device that the socket names, else that of the address it is bound to, else that of the route.
#[test]
fn on_a_host_with_two_devices_multicast_leaves_by_the_one_that_linux_takes() {
    for (group, own) in [
        (GROUP, ["10.77.0.1", "10.88.0.1"]),
        (GROUP_V6, ["fd77::1", "fd88::1"]),
    ] {
        let kernel = leaves_by(Stack::Kernel, group, own);
        assert!(kernel.iter().all(|device| device.len() > 10), "{kernel:#?}");
        assert_eq!(leaves_by(Stack::Portolan, group, own), kernel);
    }
}

/// Returns what the program says, and what is received on the links of its first and its second device.
fn leaves_by(stack: Stack, group: &str, own: [&str; 2]) -> [Vec<String>; 3] {
    let (bed, others) = with_two_devices();
    let port = PORT.to_string();
    let listeners = others.map(|other| {
        let mut listener = other.exec(PYTHON);
        listener.args([LISTENER, group, &port, INTERFACE]);
        Daemon::start(listener, Ready::Line("ready".to_owned()))
    });
    let mut sender = bed.command(Side::Client, stack, PYTHON);
    let said = run(sender.args([TWO_DEVICES, group, &port]).args(own)).expect("it ends");
    assert_sent_by(stack, &bed);
    thread::sleep(ARRIVAL);
    let [near, far] = listeners.map(|listener| listener.output());
    [said, near, far].map(|text| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    })
}

/// Returns a bed whose client has a second device that its server manages, and a host on the link of each.
fn with_two_devices() -> (Bed, [Namespace; 2]) {
    let wire = portolan_netns::Bed::switched();
    let mut bed = Bed::bare(wire).unwrap_or_else(|error| panic!("no bed: {error}"));
    let (near, far) = (bed.guest(3), Namespace::new("far"));
    let host = bed.namespace(Side::Client);
    let peer = far.path();
    host.ip(&format!(
        "link add eth1 type veth peer name {INTERFACE} netns {peer}"
    ));
    host.ip("addr add 10.88.0.1/24 dev eth1");
    host.ip("addr add fd88::1/64 dev eth1");
    host.ip("link set eth1 up");
    host.ip("route add 224.0.0.0/4 dev eth1");
    far.ip(&format!("addr add 10.88.0.2/24 dev {INTERFACE}"));
    far.ip(&format!("link set {INTERFACE} up"));
    bed.manage("eth1");
    bed.start_daemon(Side::Client)
        .unwrap_or_else(|error| panic!("{error}"));
    (bed, [near, far])
}
