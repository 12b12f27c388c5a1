//! Paths: long datagrams in fragments, narrow links behind routers, and diagnostic tools, in both
//! address families.

use std::fs;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Impairment;
use portolan_programs::{
    PAIRINGS, PYTHON, Pairing, STACKS, Steps, bed, client, counter, each_pairing, eventually,
    impaired_bed, routed_bed, serve,
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/datagrams.py");
const PORT: u16 = 7009;

const SOON: Duration = Duration::from_secs(10);

/// MTU of the link between the routers.
const NARROW: u32 = 1300;

/// Runs a test over both families.
fn each_family(bed: Bed, mut test: impl FnMut(&Bed)) {
    test(&bed);
    test(&bed.over_ipv6());
}

/// Starts a program that answers datagrams; it may not be ready at once.
fn echo(bed: &Bed, stack: Stack, port: u16) -> Background {
    let address = bed.server.address.to_string();
    let mut command = bed.command(Side::Server, stack, PYTHON);
    command.args([SCRIPT, "echo", &address, &port.to_string()]);
    Background::start(&mut command).expect("a server")
}

fn datagrams(bed: &Bed, stack: Stack, mode: &str, sizes: &[&str]) -> String {
    let address = bed.server.address.to_string();
    let port = PORT.to_string();
    let arguments = [&[SCRIPT, mode, &address, &port], sizes].concat();
    client(bed, stack, PYTHON, &arguments)
}

#[test]
fn datagrams_longer_than_the_mtu_arrive_whole_both_ways() {
    each_family(bed(), |bed| {
        each_pairing(bed, |bed, Pairing { server, client }| {
            let _echo = echo(bed, server, PORT);
            let sizes = ["1472", "1473", "2000", "2953", "9000", "30000", "65507"];
            assert_eq!(datagrams(bed, client, "send", &sizes), "exact");
        });
    });
}

#[test]
fn the_first_datagram_to_an_unknown_neighbour_is_sent_once_that_is_known() {
    each_family(bed(), |bed| {
        let _echo = echo(bed, Stack::Kernel, PORT);
        // Wait until it is ready.
        assert_eq!(datagrams(bed, Stack::Kernel, "send", &["1"]), "exact");
        for _ in 0..5 {
            let mut flush = bed.namespace(Side::Client).exec("ip");
            run(flush.args(["neigh", "flush", "all"])).expect("all are forgotten");
            assert_eq!(
                datagrams(bed, Stack::Portolan, "once", &["1", "2"]),
                "exact"
            );
        }
    });
}

#[test]
fn what_a_program_sends_before_it_ends_waits_for_its_neighbour_without_it() {
    const LISTEN: &str = "import socket, sys
s = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
s.settimeout(20)
print('ready', flush=True)
while True:
    print(s.recv(100).decode(), flush=True)";
    // From a port of its own, and from one that two sockets share.
    const SAY_AND_END: &str = "import os, socket, sys
family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
some = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(int(sys.argv[3]))]
for s in some:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind(some[0].getsockname()[:2])
some[0].sendto(b'farewell', (sys.argv[1], int(sys.argv[2])))
os._exit(0)";
    each_family(bed(), |bed| {
        let (address, port) = (bed.server.address.to_string(), PORT.to_string());
        let mut listener = bed.command(Side::Server, Stack::Kernel, PYTHON);
        let mut listener = Steps::start(listener.args(["-c", LISTEN, &address, &port]));
        listener.await_line("ready");
        let unaddressed = || counter(bed, Side::Client, "transmit", "unaddressed");
        for sharers in ["1", "2"] {
            let before = unaddressed();
            for _ in 0..5 {
                let mut flush = bed.namespace(Side::Client).exec("ip");
                run(flush.args(["neigh", "flush", "all"])).expect("all are forgotten");
                let arguments = ["-c", SAY_AND_END, &address, &port, sharers];
                client(bed, Stack::Portolan, PYTHON, &arguments);
                listener.await_line("farewell");
            }
            assert!(unaddressed() > before, "{sharers}");
        }
    });
}

/// Datagrams that wait for unreachable neighbours do not fill the queue that the sessions of a program share.
#[test]
fn neighbours_that_do_not_answer_hold_up_nobody_else() {
    const TRY_BOTH: &str = "import ipaddress, socket, sys, time
live, port = sys.argv[1], int(sys.argv[2])
dead = [str(ipaddress.ip_address(live) + n) for n in range(40, 80)]
family = socket.AF_INET6 if ':' in live else socket.AF_INET
to_dead, to_live = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
to_live.connect((live, port))
to_live.settimeout(10)
def trip():
    to_live.send(b'x')
    to_live.recv(10)
trip()
begun = time.monotonic()
for n in range(3000):
    to_dead.sendto(bytes(1000), (dead[n % len(dead)], port))
trip()
assert time.monotonic() - begun < 2, 'held up'";
    each_family(bed(), |bed| {
        let _echo = echo(bed, Stack::Kernel, PORT);
        assert_eq!(datagrams(bed, Stack::Kernel, "send", &["1"]), "exact");
        let address = bed.server.address.to_string();
        let arguments = ["-c", TRY_BOTH, &address, &PORT.to_string()];
        client(bed, Stack::Portolan, PYTHON, &arguments);
    });
}

#[test]
fn datagrams_pass_a_narrow_link_in_fragments_and_it_is_known_afterwards() {
    each_family(routed_bed(NARROW), |bed| {
        each_pairing(bed, |bed, Pairing { server, client }| {
            let _echo = echo(bed, server, PORT);
            let mtu = datagrams(bed, client, "path", &["1400"]);
            assert_eq!(mtu, NARROW.to_string());
            let sizes = ["1000", "1400", "5000", "40000"];
            assert_eq!(datagrams(bed, client, "send", &sizes), "exact");
        });
    });
}

#[test]
fn streams_find_the_mtu_of_a_narrow_link() {
    let file = vec![7; 1 << 20];
    each_family(routed_bed(NARROW), |bed| {
        let source = bed.file("stream");
        fs::write(&source, &file).expect("the bed's directory is writable");
        each_pairing(bed, |bed, Pairing { server, client: of }| {
            let endpoint = bed.endpoint(PORT).to_string();
            let _mirror = bed
                .serve(server, PORT, "portolan-traffic", &["mirror", &endpoint])
                .unwrap_or_else(|error| panic!("{error}"));
            let copy = bed.file("copy");
            let (from, to) = (source.display().to_string(), copy.display().to_string());
            client(
                bed,
                of,
                "portolan-traffic",
                &["send", &endpoint, &from, &to],
            );
            assert!(fs::read(&copy).is_ok_and(|copy| copy == file));
        });
    });
}

/// Fragments overtake each other, including the first of their datagram, and some are duplicated.
#[test]
fn fragments_arrive_in_any_order() {
    let bed = impaired_bed(Impairment {
        reorder: 0.3,
        duplicate: 0.1,
        ..Impairment::default()
    });
    each_family(bed, |bed| {
        each_pairing(bed, |bed, Pairing { server, client }| {
            let _echo = echo(bed, server, PORT);
            assert_eq!(
                datagrams(bed, client, "send", &["9000", "9000", "5000"]),
                "exact"
            );
        });
        // Fragments ahead of the first of their datagram are handed to the server. Whether a first one is
        // overtaken depends on chance: three in ten are.
        let _echo = echo(bed, Stack::Portolan, PORT);
        let was_overtaken = (0..40).any(|_| {
            datagrams(bed, Stack::Kernel, "send", &["9000"]);
            has_reinjected(bed)
        });
        assert!(was_overtaken, "of forty first fragments none");
    });
}

fn has_reinjected(bed: &Bed) -> bool {
    let counters = bed
        .portolan(Side::Server, &["counters"])
        .expect("the server answers");
    let line = counters
        .lines()
        .find(|line| line.contains("reinjected_frames"));
    // Counters that are zero are not listed.
    line.and_then(|line| line.split_whitespace().nth(1))
        .is_some_and(|count| count != "0")
}

/// A sender that lets routers fragment, as the kernel does with `ip_no_pmtu_disc`.
#[test]
fn segments_that_a_router_cut_arrive() {
    let bed = routed_bed(NARROW);
    let setting = ["-qw", "net.ipv4.ip_no_pmtu_disc=1"];
    client(&bed, Stack::Kernel, "sysctl", &setting);
    let (source, copy) = (bed.file("stream"), bed.file("copy"));
    let bytes: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    fs::write(&source, &bytes).expect("the bed's directory is writable");
    let endpoint = bed.endpoint(PORT).to_string();
    let _mirror = bed
        .serve(
            Stack::Portolan,
            PORT,
            "portolan-traffic",
            &["mirror", &endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let (from, to) = (source.display().to_string(), copy.display().to_string());
    client(
        &bed,
        Stack::Kernel,
        "portolan-traffic",
        &["send", &endpoint, &from, &to],
    );
    assert!(fs::read(&copy).is_ok_and(|copy| copy == bytes));
}

/// A Portolan listener and a bound UDP port on the server host, as targets of probes.
fn occupy(bed: &Bed) -> [Background; 2] {
    let endpoint = bed.endpoint(PORT).to_string();
    let greet = ["greet", &endpoint];
    let listener = bed
        .serve(Stack::Portolan, PORT, "portolan-traffic", &greet)
        .unwrap_or_else(|error| panic!("{error}"));
    [listener, echo(bed, Stack::Portolan, PORT)]
}

#[test]
fn ping_and_traceroute_see_the_hosts_and_the_routers_between_them() {
    each_family(routed_bed(NARROW), |bed| {
        let _occupied = occupy(bed);
        let address = bed.server.address.to_string();
        let kernel =
            |program: &str, arguments: &[&str]| client(bed, Stack::Kernel, program, arguments);
        // Larger than the MTU of the narrow link: fragmented.
        for size in ["56", "4000"] {
            let arguments = ["-c", "5", "-i", "0.2", "-W", "2", "-s", size, &address];
            let report = run(bed
                .command(Side::Client, Stack::Kernel, "ping")
                .args(arguments));
            // The first large ones may only reveal the MTU, in each direction.
            assert!(
                report.is_ok_and(|text| text.contains("bytes from")),
                "{size}"
            );
        }
        let hops = |options: &[&str]| {
            let common = ["-n", "-q", "1", "-w", "5", &address];
            let report = kernel("traceroute", &[options, &common].concat());
            let last = report.lines().last().unwrap_or_default().trim().to_owned();
            assert!(
                last.starts_with("3 ") && last.contains(&address),
                "{report}"
            );
        };
        hops(&[]);
        let port = PORT.to_string();
        hops(&["-T", "-p", &port]);
        hops(&["-U", "-p", &port]);
        // At a closed port: the kernel answers with a reset.
        hops(&["-T", "-p", "9"]);
    });
}

/// The same tools with their datagram sockets on Portolan; raw sockets stay the kernel's.
#[test]
fn tools_that_look_at_paths_see_the_same_on_portolan() {
    each_family(routed_bed(NARROW), |bed| {
        // Every probe must be answered, so ICMP rate limits are off.
        let limits = ["net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0"];
        let mut sysctl = bed.command(Side::Server, Stack::Kernel, "sysctl");
        run(sysctl.arg("-qw").args(limits)).expect("the host's own settings");
        let _occupied = occupy(bed);
        let address = bed.server.address.to_string();
        let port = PORT.to_string();
        let hops = |stack, options: &[&str]| {
            let common = ["-n", "-q", "1", "-w", "5", &address];
            let report = client(bed, stack, "traceroute", &[options, &common].concat());
            // Times differ; the host that answers at each hop does not.
            let hop = |line: &str| -> Vec<String> {
                let words = line.split_whitespace().take(2);
                words.map(str::to_owned).collect()
            };
            let hops: Vec<Vec<String>> = report.lines().skip(1).map(hop).collect();
            assert_eq!(
                hops.last(),
                Some(&vec!["3".to_owned(), address.clone()]),
                "{stack:?} {options:?} {report}"
            );
            hops
        };
        for options in [&[][..], &["-U", "-p", &port], &["--mtu"]] {
            let kernel = hops(Stack::Kernel, options);
            assert_eq!(hops(Stack::Portolan, options), kernel, "{options:?}");
        }
        let ping = ["-c", "2", "-i", "0.2", "-W", "2", &address];
        let report = client(bed, Stack::Portolan, "ping", &ping);
        assert!(report.contains("2 received"), "{report}");
    });
}

/// Tries a closed port and prints the result.
const KNOCK: &str = "
import socket, sys
address, kind = sys.argv[1:]
family = socket.AF_INET6 if ':' in address else socket.AF_INET
if kind == 'tcp':
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(10)
    print(s.connect_ex((address, 9)))
else:
    s = socket.socket(family, socket.SOCK_DGRAM)
    s.connect((address, 9))
    s.settimeout(10)
    s.send(b'x')
    try:
        s.recv(9)
    except OSError as error:
        print(error.errno)
";

#[test]
fn closed_ports_are_refused_at_once() {
    const REFUSED: &str = "111";
    each_family(bed(), |bed| {
        for Pairing { client: of, .. } in PAIRINGS {
            let address = bed.server.address.to_string();
            for kind in ["tcp", "udp"] {
                let answer = client(bed, of, PYTHON, &["-c", KNOCK, &address, kind]);
                assert_eq!(answer, REFUSED, "{address} {kind} {of:?}");
            }
        }
    });
}

/// A router has no route: its ICMP error ends the open as it does on Linux.
#[test]
fn an_open_to_a_network_that_cannot_be_reached_fails_at_once() {
    const UNREACHABLE: &str = "101";
    let bed = routed_bed(NARROW);
    for stack in [Stack::Kernel, Stack::Portolan] {
        for address in ["192.0.2.1", "2001:db8::1"] {
            let answer = client(&bed, stack, PYTHON, &["-c", KNOCK, address, "tcp"]);
            assert_eq!(answer, UNREACHABLE, "{address} {stack:?}");
        }
    }
}

const SCOPES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/scopes.py");

#[test]
fn mapped_and_link_local_peers_meet_on_one_socket() {
    each_pairing(&bed(), |bed, pairing| {
        let port = PORT.to_string();
        let _server = bed
            .serve(pairing.server, PORT, PYTHON, &[SCOPES, "serve", &port])
            .unwrap_or_else(|error| panic!("{error}"));
        let address = bed.server.address.to_string();
        let arguments = [SCOPES, "call", &address, &port];
        assert_eq!(client(bed, pairing.client, PYTHON, &arguments), "exact");
    });
}

#[test]
fn a_socket_for_ipv6_only_leaves_ipv4_alone() {
    let bed = bed();
    let address = bed.server.address.to_string();
    for stack in [Stack::Kernel, Stack::Portolan] {
        let arguments = [SCOPES, "only", &address, "7010"];
        assert_eq!(
            client(&bed, stack, PYTHON, &arguments),
            "exact",
            "{stack:?}"
        );
    }
}

const REUSED_PORTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/reused_ports.py");

#[test]
fn a_reset_connection_that_is_still_open_stands_in_no_new_ones_way() {
    each_family(bed(), |bed| {
        each_pairing(bed, |bed, Pairing { server, client: of }| {
            let address = bed.server.address.to_string();
            let port = PORT.to_string();
            let _server = bed
                .serve(
                    server,
                    PORT,
                    PYTHON,
                    &[REUSED_PORTS, "serve", &address, &port],
                )
                .unwrap_or_else(|error| panic!("{error}"));
            let arguments = [REUSED_PORTS, "call", &address, &port];
            let answer = client(bed, of, PYTHON, &arguments);
            assert_eq!(answer, "exact", "{server:?} {of:?}");
        });
    });
}

/// Prints the results of a connect by TCP, a connect by UDP, and a datagram.
const ATTEMPTS: &str = "
import errno, socket, sys

def connect(kind):
    with socket.socket(family, kind) as attempt:
        attempt.settimeout(1)
        attempt.connect(peer)

def send():
    with socket.socket(family, socket.SOCK_DGRAM) as attempt:
        attempt.sendto(b'x', peer)

peer = (sys.argv[1], int(sys.argv[2]))
family = socket.AF_INET6 if ':' in peer[0] else socket.AF_INET
for attempt in (lambda: connect(socket.SOCK_STREAM), lambda: connect(socket.SOCK_DGRAM), send):
    try:
        attempt()
        print('done')
    except OSError as error:
        print(errno.errorcode.get(error.errno, 'timed out'))
";

/// Prints whether a connect by UDP is possible.
const CONNECTS: &str = "
import socket, sys
family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
try:
    socket.socket(family, socket.SOCK_DGRAM).connect((sys.argv[1], 9))
    print('possible')
except OSError:
    print('refused')
";

/// Adds or deletes a route that refuses `to`, and returns when the side's server knows, too: it follows the kernel with a
/// thread, later on a busy machine.
fn refuse(bed: &Bed, side: Side, [verb, kind, to]: [&str; 3]) {
    let mut change = bed.namespace(side).exec("ip");
    run(change.args(["route", verb, kind, to])).expect("the route is changed");
    let expected = if verb == "add" { "refused" } else { "possible" };
    let is_followed = || {
        let mut asked = bed.command(side, Stack::Portolan, PYTHON);
        let told = run(asked.args(["-c", CONNECTS, to])).expect("it ends");
        told.trim() == expected
    };
    assert!(eventually(SOON, is_followed), "{verb} {kind} {to}");
}

/// The administrator's routes that refuse destinations hold for Portolan's sockets as for the kernel's.
#[test]
fn routes_that_refuse_a_host_are_obeyed() {
    const LISTENER: u16 = 7019;
    let attempts = |bed: &Bed, stack| {
        let address = bed.server.address.to_string();
        let words = ["-c", ATTEMPTS, &address, &LISTENER.to_string()];
        client(bed, stack, PYTHON, &words)
    };
    each_family(bed(), |bed| {
        for stack in STACKS {
            let endpoint = bed.endpoint(LISTENER).to_string();
            let service = ["echo", "tcp", &endpoint];
            let _echo = serve(bed, stack, LISTENER, "portolan-traffic", &service);
            assert_eq!(attempts(bed, Stack::Portolan), "done\ndone\ndone");
            let from = bed.client.address.to_string();
            refuse(bed, Side::Server, ["add", "unreachable", &from]);
            // Nothing that the server sends would leave.
            let answered = attempts(bed, Stack::Kernel);
            refuse(bed, Side::Server, ["del", "unreachable", &from]);
            assert_eq!(answered, "timed out\ndone\ndone", "{stack:?}");
        }
        let to = bed.server.address.to_string();
        for kind in ["blackhole", "unreachable", "prohibit"] {
            refuse(bed, Side::Client, ["add", kind, &to]);
            let [kernel, portolan] = STACKS.map(|stack| attempts(bed, stack));
            refuse(bed, Side::Client, ["del", kind, &to]);
            assert_eq!(kernel, portolan, "{kind}");
            assert!(!kernel.contains("done"), "{kind}: {kernel}");
        }
    });
}
