//! Where opens lead, and what they claim and release.

use std::time::Duration;

use portolan_proto::metastate::{Address, Interface, Metastate, Route};
use portolan_types::{Generation, MacAddr, Slot};

use super::*;
use crate::control::tests::{Bed, SLOT, USER, claim_of};
use crate::control::{Input, Progress};
use crate::ports::{PortClaim, PortTable};
use portolan_proto::control::Reuse;

/// `eth2` is managed, `eth3` is not.
fn routes() -> Routes {
    let interface = |index, managed| Interface {
        index,
        name: format!("eth{index}"),
        mac: MacAddr([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        up: true,
        managed,
    };
    let address = |interface, address: &str| Address {
        interface,
        address: address.parse().unwrap(),
        prefix: 24,
    };
    let route = |destination: &str, prefix, interface, kind| Route {
        destination: destination.parse().unwrap(),
        prefix,
        gateway: None,
        interface,
        source: (prefix >= 32).then(|| destination.parse().unwrap()),
        metric: 0,
        mtu: None,
        kind,
    };
    let state = Metastate {
        obeys_policy: false,
        interfaces: vec![interface(1, false), interface(2, true), interface(3, false)],
        addresses: vec![
            address(1, "127.0.0.1"),
            address(2, "10.0.0.1"),
            address(3, "10.0.1.1"),
            address(2, "fd00::1"),
        ],
        routes: vec![
            route("fd00::1", 128, 1, RouteKind::Local),
            route("10.0.0.1", 32, 1, RouteKind::Local),
            route("10.0.0.255", 32, 2, RouteKind::Broadcast),
            route("10.0.9.0", 24, 2, RouteKind::Refuse),
            route("10.0.0.0", 24, 2, RouteKind::Unicast),
            route("10.0.1.0", 24, 3, RouteKind::Unicast),
            route("fd00::", 64, 2, RouteKind::Unicast),
            route("127.0.0.0", 8, 1, RouteKind::Local),
        ],
        neighbours: Vec::new(),
    };
    Routes::new(2, state)
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Without a Portolan listener.
fn way(protocol: Protocol, remote: &str) -> Result<Way, Fallback> {
    let to = (protocol, at(remote));
    Bed::new().control.way_to(&routes(), to, None, |_, id| id.0)
}

#[test]
fn what_no_served_device_reaches_is_the_kernels() {
    let kernel = |reason: KernelReason| Err(Fallback::Kernel(reason));
    let cases = [
        ("10.0.1.7:80", kernel(KernelReason::UnmanagedDevice)),
        ("10.0.0.1:80", kernel(KernelReason::LocalAddress)),
        ("0.0.0.0:80", kernel(KernelReason::LocalAddress)),
        ("127.0.0.1:80", kernel(KernelReason::LocalAddress)),
        ("10.0.0.255:80", kernel(KernelReason::NotUnicast)),
        ("224.0.0.1:80", kernel(KernelReason::NotUnicast)),
        ("10.0.9.1:80", kernel(KernelReason::NoRoute)),
        ("192.0.2.1:80", kernel(KernelReason::NoRoute)),
        ("[fe80::1]:80", Err(Fallback::Error(Errno::INVAL))),
    ];
    for (remote, expected) in cases {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            assert_eq!(way(protocol, remote), expected, "{remote}");
        }
    }
    let Ok(Way::Network(path)) = way(Protocol::Tcp, "10.0.0.7:80") else {
        panic!("it is reached by eth2");
    };
    assert_eq!(path.interface, 2);
}

#[test]
fn a_bound_session_goes_nowhere_that_its_address_does_not() {
    let mut bed = Bed::new();
    let mut from = |local: &str| {
        let opening = Opening::new(Protocol::Tcp, at(local), USER);
        let id = bed.control.enter(None, opening, rand()).unwrap();
        let to = (Protocol::Tcp, at("10.0.0.7:80"));
        bed.control.way_to(&routes(), to, Some(id), |_, id| id.0)
    };
    assert!(from("10.0.0.1:4000").is_ok());
    let local = Fallback::Kernel(KernelReason::LocalAddress);
    assert_eq!(from("127.0.0.1:4000"), Err(local));
    let family = Fallback::Error(Errno::AFNOSUPPORT);
    assert_eq!(from("[fd00::1]:4000"), Err(family));
}

/// Numbers that are unique across the sessions of a test.
fn rand() -> impl FnMut() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(10_000);
    || NEXT.fetch_add(1, Ordering::Relaxed)
}

fn listen(bed: &mut Bed, local: &str) -> SessionId {
    bed.listener(at(local), 4, rand())
}

#[test]
fn a_listener_of_ours_is_reached_within_the_host_by_any_of_its_addresses() {
    let mut bed = Bed::new();
    listen(&mut bed, "0.0.0.0:80");
    for (remote, source) in [
        ("10.0.0.1:80", "10.0.0.1"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("0.0.0.0:80", "127.0.0.1"),
    ] {
        let to = (Protocol::Tcp, at(remote));
        let way = bed.control.way_to(&routes(), to, None, |_, id| id.0);
        let Ok(Way::WithinHost(peer)) = way else {
            panic!("{remote}: {way:?}");
        };
        assert_eq!(peer.path.source, Some(source.parse().unwrap()), "{remote}");
    }
    let to = (Protocol::Tcp, at("10.0.0.1:81"));
    let way = bed.control.way_to(&routes(), to, None, |_, id| id.0);
    assert_eq!(
        way,
        Err(KernelReason::LocalAddress.into()),
        "nobody listens"
    );
}

#[test]
fn local_addresses_are_the_hosts_and_on_a_served_device() {
    let check = |protocol, local| check_local(&routes(), protocol, at(local));
    for local in ["10.0.0.1:1", "0.0.0.0:1", "[fd00::1]:1"] {
        assert_eq!(check(Protocol::Tcp, local), Ok(()), "{local}");
        assert_eq!(check(Protocol::Udp, local), Ok(()), "{local}");
    }
    assert_eq!(check(Protocol::Tcp, "127.0.0.1:1"), Ok(()));
    assert_eq!(check(Protocol::Udp, "224.0.0.251:1"), Ok(()));
    let kernel = |reason: KernelReason| Err(Fallback::Kernel(reason));
    let local = kernel(KernelReason::LocalAddress);
    assert_eq!(check(Protocol::Udp, "127.0.0.1:1"), local);
    let group = kernel(KernelReason::NotUnicast);
    assert_eq!(check(Protocol::Tcp, "224.0.0.251:1"), group);
    let other = kernel(KernelReason::UnmanagedDevice);
    assert_eq!(check(Protocol::Tcp, "10.0.1.1:1"), other);
    let nobodys = Err(Fallback::Error(Errno::ADDRNOTAVAIL));
    assert_eq!(check(Protocol::Tcp, "10.0.0.2:1"), nobodys);
}

/// Opens a connection from a session without a port.
fn open(bed: &mut Bed, remote: &str) -> (SessionId, Result<SocketAddr, Errno>, Effects) {
    let opening = Opening::new(Protocol::Tcp, at("0.0.0.0:0"), USER);
    let id = bed.control.enter(None, opening, rand()).unwrap();
    let path = path_to(&routes(), at(remote), None).unwrap();
    let mut effects = Effects::new();
    let to = (at(remote), &path);
    let chosen = bed
        .control
        .choose_source(id, to, (0, bed.now), &mut effects);
    (id, chosen, effects)
}

#[test]
fn without_a_free_port_an_old_time_wait_to_the_same_peer_makes_room() {
    let mut bed = Bed::new();
    bed.control.ports = PortTable::new(50_000..=50_000);
    let (old, chosen, _) = open(&mut bed, "10.0.0.7:80");
    let local = at("10.0.0.1:50000");
    assert_eq!(chosen, Ok(local));
    let session = bed.control.registry.session_mut(old).unwrap();
    (session.local, session.remote) = (local, Some(at("10.0.0.7:80")));
    bed.control.registry.steer(old, crate::Holder::Server(SLOT));
    bed.does(Input::Close(old));
    let progress = Progress::TimeWait;
    bed.does(Input::Progress { id: old, progress });
    let exhausted = Err(Errno::ADDRNOTAVAIL);
    assert_eq!(open(&mut bed, "10.0.0.7:80").1, exhausted, "it is too new");
    bed.now += Duration::from_secs(1);
    let (_, chosen, effects) = open(&mut bed, "10.0.0.7:80");
    assert_eq!((chosen, effects), (Ok(local), vec![Effect::Forget(old)]));
    // The old session has no claim left that could release the new one's.
    bed.does(Input::Forget(old));
    assert_eq!(bed.control.ports.len(), 1);
}

/// Has a connection, whose port was chosen or is under lease, wait in TIME-WAIT.
fn wait_in_time_wait(bed: &mut Bed, local: SocketAddr) -> SessionId {
    let remote = at("10.0.0.7:80");
    let (id, _, _) = open(bed, "10.0.0.8:80");
    let chosen = bed.control.registry.session_mut(id).unwrap().flow_claim;
    bed.control.ports.release(chosen.unwrap());
    let claim = PortClaim {
        protocol: Protocol::Tcp,
        local,
        reuse: Reuse::default(),
        v6_only: false,
        uid: USER,
    };
    let joined = bed.control.ports.join(claim, remote).unwrap();
    let session = bed.control.registry.session_mut(id).unwrap();
    session.flow_claim = Some(joined);
    (session.local, session.remote) = (local, Some(remote));
    bed.control.registry.steer(id, crate::Holder::Server(SLOT));
    bed.does(Input::Close(id));
    let progress = Progress::TimeWait;
    bed.does(Input::Progress { id, progress });
    id
}

#[test]
fn a_time_wait_on_a_port_that_is_under_lease_makes_no_room() {
    let mut bed = Bed::new();
    bed.control.ports = PortTable::new(50_000..=50_001);
    let own = at("10.0.0.1:0").ip();
    let to = (bed.channel, SLOT);
    let (now, mut ended) = (bed.now, Effects::new());
    let leased = bed
        .control
        .lease_ports(to, own, 1, now, rand(), &mut ended)
        .unwrap();
    let leased = SocketAddr::new(own, leased[0].number);
    wait_in_time_wait(&mut bed, leased);
    let other = [50_000, 50_001].map(|port| SocketAddr::new(own, port));
    let other = *other.iter().find(|&&other| other != leased).unwrap();
    let younger = wait_in_time_wait(&mut bed, other);
    bed.now += Duration::from_secs(1);
    let (_, chosen, effects) = open(&mut bed, "10.0.0.7:80");
    assert_eq!(
        (chosen, effects),
        (Ok(other), vec![Effect::Forget(younger)])
    );
}

#[test]
fn a_failed_open_leaves_the_session_as_it_was_before() {
    let mut bed = Bed::new();
    let (id, chosen, _) = open(&mut bed, "10.0.0.7:80");
    let session = bed.control.registry.session_mut(id).unwrap();
    session.local = chosen.unwrap();
    session.remote = Some(at("10.0.0.7:80"));
    session.life = Life::Connecting {
        channel: bed.channel,
        slot: Slot(3),
    };
    let flow = bed.flow(id);
    bed.control.registry.steer(id, crate::Holder::Server(SLOT));
    let expected = [Effect::RemoveConnection(SLOT), Effect::RemoveRow(flow)];
    assert_eq!(bed.does(Input::OpenFailed(id)), expected);
    let session = bed.control.registry.session(id).unwrap();
    assert_eq!((session.local, session.remote), (at("0.0.0.0:0"), None));
    assert!(matches!(session.life, Life::Bound));
    assert_ne!(session.generation, Generation(0));
    assert!(bed.control.ports.is_empty());
}

#[test]
fn only_a_port_that_was_chosen_outlives_a_failed_open() {
    for has_chosen_port in [false, true] {
        let mut bed = Bed::new();
        let id = listen(&mut bed, "10.0.0.1:4000");
        let session = bed.control.registry.session_mut(id).unwrap();
        (session.life, session.has_chosen_port) = (Life::Bound, has_chosen_port);
        let effects = bed.does(Input::OpenFailed(id));
        let gives_up = effects.contains(&Effect::ReleasePort(id));
        assert_eq!(gives_up, !has_chosen_port);
        assert_eq!(bed.control.ports.is_empty(), !has_chosen_port);
        let session = bed.control.registry.session(id).unwrap();
        let port = if has_chosen_port { 4000 } else { 0 };
        assert_eq!(session.local.port(), port);
    }
}

#[test]
fn an_open_that_is_refused_keeps_no_port() {
    let mut bed = Bed::new();
    let listener = listen(&mut bed, "10.0.0.1:80");
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: at("10.0.0.1:80"),
        remote: at("10.0.0.7:4000"),
    };
    let life = || Life::Handshake {
        deferred_until: None,
    };
    let id = bed.control.enter_for(listener, &flow, life(), rand());
    let id = id.unwrap();
    let again = bed.control.enter_for(listener, &flow, life(), rand());
    assert_eq!(again, Err(Errno::ADDRNOTAVAIL), "the connection is there");
    bed.control.registry.replace_cookie(id, 7);
    let before = bed.control.ports.len();
    let claim = claim_of(at("10.0.0.1:90"));
    let (claim, local) = bed.control.ports.bind(claim, 0).unwrap();
    let opening = Opening {
        cookie: 7,
        claim: Some(claim),
        ..Opening::new(Protocol::Tcp, local, USER)
    };
    let second = bed.control.enter(None, opening, rand());
    assert_eq!(second, Err(Errno::INVAL), "one near end, one session");
    assert_eq!(bed.control.ports.len(), before);
}

#[test]
fn a_fallback_takes_the_port_to_the_kernel_unless_the_library_does_so_later() {
    let mut bed = Bed::new();
    let reason = KernelReason::NoRoute;
    let tcp = listen(&mut bed, "10.0.0.1:80");
    assert_eq!(bed.control.fall_back(reason, Some(tcp)), Some(tcp));
    assert_eq!(bed.control.fall_back(reason, None), None);
    let opening = Opening::new(Protocol::Udp, at("10.0.0.1:53"), USER);
    let udp = bed.control.enter(None, opening, rand()).unwrap();
    assert_eq!(bed.control.fall_back(reason, Some(udp)), Some(udp));
    let holder = crate::Holder::Process(bed.channel, SLOT);
    bed.control.registry.steer(udp, holder);
    assert_eq!(bed.control.fall_back(reason, Some(udp)), None);
}
