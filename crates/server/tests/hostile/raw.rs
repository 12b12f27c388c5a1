//! A program's own transports at ports: which ports an unprivileged program gets, and what it can do to those
//! of others.

use std::net::SocketAddr;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::raw::Guard;
use portolan_types::{Protocol, Slot};

use crate::common::{Configuration, Library, await_some, control_path};
use crate::handlers::Owner;
use crate::meter::Meter;
use crate::{NOBODY, Victim, assert_serves_others, hostile_library, refused};

const PERM: i32 = 1;
const ADDRINUSE: i32 = 98;
const ADDRNOTAVAIL: i32 = 99;
const NOBUFS: i32 = 105;

/// The limit of one process.
const MOST: usize = 64;

fn at(protocol: Protocol, local: &str) -> Guard {
    let local = local.parse().unwrap();
    Guard::Port { protocol, local }
}

fn spec(guard: Guard, slot: u32) -> RequestBody {
    let slot = Slot(slot);
    RequestBody::ClaimProtocol { guard, slot }
}

fn claimed(library: &mut Library, guard: Guard) -> Option<Guard> {
    match library.client.ask(spec(guard, 0)) {
        ReplyBody::Claimed { guard } => Some(guard),
        _ => None,
    }
}

#[test]
fn ports_are_had_by_the_rules_of_sockets_and_by_permission() {
    let bed = Bed::veth();
    let configuration = Configuration::new(
        &bed.a,
        &format!(
            "[[raw]]\nuser = \"{NOBODY}\"\ntcp_ports = [7100]\nudp_ports = [0, 7100, 7101, 7102]\n"
        ),
    );
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut other = Owner::of(Library::start(&path), SocketAddr::new(Bed::A4, 7101));
    let others = at(Protocol::Udp, "0.0.0.0:7102");
    claimed(&mut other.library, others).unwrap();
    let mut hostile = hostile_library(&path);
    for (protocol, local, errno) in [
        // Not allowed.
        (Protocol::Tcp, "0.0.0.0:22", PERM),
        (Protocol::Tcp, "0.0.0.0:0", PERM),
        (Protocol::Tcp, "0.0.0.0:7101", PERM),
        // A port with a socket, and one with another transport.
        (Protocol::Udp, "0.0.0.0:7101", ADDRINUSE),
        (Protocol::Udp, "[::]:7101", ADDRINUSE),
        (Protocol::Udp, "0.0.0.0:7102", ADDRINUSE),
        (Protocol::Udp, "[::]:7102", ADDRINUSE),
        // Loopback, another host's address, multicast and broadcast.
        (Protocol::Udp, "127.0.0.1:7100", ADDRNOTAVAIL),
        (Protocol::Udp, "192.0.2.1:7100", ADDRNOTAVAIL),
        (Protocol::Udp, "224.0.0.251:7100", ADDRNOTAVAIL),
        (Protocol::Udp, "255.255.255.255:7100", ADDRNOTAVAIL),
        (Protocol::Udp, "[ff05::fb]:7100", ADDRNOTAVAIL),
    ] {
        let got = refused(&mut hostile, spec(at(protocol, local), 0), &[]);
        assert_eq!(got, errno, "{protocol} {local}");
    }
    // Releasing another's protocol does nothing.
    let request = RequestBody::UnclaimProtocol {
        guard: others,
        slot: Slot(0),
    };
    hostile.client.send(request, &[]);
    assert_eq!(refused(&mut hostile, spec(others, 0), &[]), ADDRINUSE);
    victim.assert_unharmed();
}

#[test]
fn a_process_has_so_many_ports_and_they_end_with_it() {
    let bed = Bed::veth();
    let rule = format!("[[raw]]\nuser = \"{NOBODY}\"\nudp_ports = [0, 7100]\n");
    let configuration = Configuration::new(&bed.a, &rule);
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let own = at(Protocol::Udp, "0.0.0.0:7100");
    claimed(&mut hostile, own).unwrap();
    for _ in 1..MOST {
        let got = claimed(&mut hostile, at(Protocol::Udp, "0.0.0.0:0")).unwrap();
        assert!(matches!(got, Guard::Port { local, .. } if local.port() != 0));
    }
    let more = spec(at(Protocol::Udp, "0.0.0.0:0"), 0);
    assert_eq!(refused(&mut hostile, more, &[]), NOBUFS);
    drop(hostile);
    let mut next = hostile_library(&path);
    await_some("the port is free", || claimed(&mut next, own));
    assert_serves_others(&bed, &path);
    meter.finish();
}
