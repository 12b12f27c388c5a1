//! Ports under lease: what a process gets, and what it can do with its own and with those of others.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use portolan_netns::Bed;
use portolan_proto::control::{Blob, LeasedPort, ReplyBody, RequestBody};
use portolan_sys::unix::PairKind;
use portolan_types::{SessionId, Slot};

use crate::common::{Library, control_path, start_server};
use crate::delegations::{a, b, claim, claim_refused};
use crate::{Victim, assert_serves_others, counter, hostile_library, refused};

const BADF: i32 = 9;
const INVAL: i32 = 22;
const PROTO: i32 = 71;
const ADDRINUSE: i32 = 98;
const ADDRNOTAVAIL: i32 = 99;

/// The most ports of a request, and of a process: a quarter of the ephemeral ports.
const MOST_AT_A_TIME: usize = 512;
const MOST: usize = 2500;

fn request(local: IpAddr, most: u32) -> RequestBody {
    let slot = Slot(9);
    RequestBody::LeasePorts { local, slot, most }
}

pub(crate) fn lease(library: &mut Library, most: u32) -> Vec<LeasedPort> {
    match library.client.ask(request(Bed::A4, most)) {
        ReplyBody::Leased { ports, .. } => ports,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_process_gets_a_limited_number_of_ports_and_only_of_this_hosts_addresses() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let elsewhere = [
        Bed::B4,
        Ipv4Addr::LOCALHOST.into(),
        Ipv4Addr::UNSPECIFIED.into(),
    ];
    for local in elsewhere {
        let errno = refused(&mut hostile, request(local, 8), &[]);
        assert_eq!(errno, ADDRNOTAVAIL, "{local}");
    }
    assert_eq!(lease(&mut hostile, 0).len(), 0);
    for left in (1..=MOST).rev().step_by(MOST_AT_A_TIME) {
        let leased = lease(&mut hostile, u32::MAX).len();
        assert_eq!(leased, left.min(MOST_AT_A_TIME));
    }
    assert_eq!(lease(&mut hostile, u32::MAX).len(), 0);
    assert_eq!(counter(&path, "server", "ports_leased"), MOST as u64);
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

#[test]
fn connections_are_registered_only_on_ones_own_ports() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut owner = Library::start(&path);
    let others = lease(&mut owner, 1)[0];
    let mut hostile = hostile_library(&path);
    let own = lease(&mut hostile, 2);
    let (first, second) = (own[0], own[1]);
    let elsewhere = SocketAddr::new(Bed::B4, first.number);
    let cases = [
        ("another's", claim(others.id, a(others.number), b(1)), BADF),
        ("none", claim(SessionId(77), a(first.number), b(1)), BADF),
        (
            "another port",
            claim(first.id, a(second.number), b(1)),
            INVAL,
        ),
        ("a foreign address", claim(first.id, elsewhere, b(1)), INVAL),
        ("itself", claim(first.id, a(first.number), a(9)), INVAL),
        ("no port", claim(first.id, a(first.number), b(0)), INVAL),
    ];
    for (case, body, errno) in cases {
        assert_eq!(claim_refused(&mut hostile, body), errno, "{case}");
    }
    let closed = RequestBody::ReturnClosed {
        port: first.id,
        capsule: Blob::Inline(vec![0xff; 3000]),
    };
    assert_eq!(refused(&mut hostile, closed, &[]), PROTO);

    let body = || claim(first.id, a(first.number), b(1));
    let (reply, _near) = hostile.ask_new(PairKind::Stream, body());
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    assert_eq!(claim_refused(&mut hostile, body()), ADDRINUSE, "twice");

    // What is not under lease, or another's, is not returned.
    let ports = vec![others.id, SessionId(77), second.id];
    hostile.client.send(RequestBody::ReturnPorts { ports }, &[]);
    let body = claim(second.id, a(second.number), b(1));
    assert_eq!(claim_refused(&mut hostile, body), BADF, "it is returned");
    let (reply, _near) = owner.ask_new(PairKind::Stream, claim(others.id, a(others.number), b(1)));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// Nobody gets the ports of processes that come and go within a minute: there must be others.
#[test]
fn processes_that_lease_and_leave_do_not_use_up_the_ports() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    for _ in 0..40 {
        let mut hostile = hostile_library(&path);
        if let ReplyBody::Leased { ports, .. } = hostile.client.ask(request(Bed::A4, u32::MAX)) {
            assert!(ports.len() <= MOST);
        }
    }
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}
