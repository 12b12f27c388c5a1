//! Receive budgets: which packets they hold back, and when they end.

mod common;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

use common::cgroup::Cgroup;
use common::{Client, Library, Near, await_some, control_path, start_server};
use portolan_netns::{Bed, Daemon};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::{Kind, QosReply, QosRequest, Receive, ReceiveReport, Scope};
use portolan_sys::clock;
use portolan_types::{FlowKey, Protocol, Slot};

const FLOODED: u16 = 5353;
const QUIET: u16 = 5354;
const SENT: usize = 50;

/// Two UDP ports of one process, and an administrator.
struct Scene {
    bed: Bed,
    _server: Daemon,
    library: Library,
    admin: Client,
    _near: Vec<Near>,
}

impl Scene {
    fn new() -> Scene {
        let bed = Bed::veth();
        let server = start_server(&bed.a);
        let path = control_path(&bed.a);
        let mut library = Library::start(&path);
        let any: IpAddr = [0, 0, 0, 0].into();
        let near = [FLOODED, QUIET].map(|port| {
            let local = SocketAddr::new(any, port);
            let (reply, near) = library.bind(Protocol::Udp, local, Slot(port.into()));
            assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
            near
        });
        Scene {
            admin: Client::connect(&path),
            bed,
            _server: server,
            library,
            _near: near.into(),
        }
    }

    fn set(&mut self, scope: Scope, spec: Receive) -> QosReply {
        ask(&mut self.admin, QosRequest::Receive { scope, spec })
    }

    fn report(&mut self) -> Vec<ReceiveReport> {
        self.admin.guarantees().receive
    }

    /// Sends `SENT` datagrams to a port. Returns how many arrived.
    fn arrive(&mut self, port: u16) -> usize {
        let peer = self.bed.b.enter(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        for _ in 0..SENT {
            peer.send_to(b"x", (Bed::A4, port)).unwrap();
        }
        // A packet is delivered while it is sent, unless the peer's address is resolved first.
        sleep(Duration::from_millis(50));
        let mut count = 0;
        while let Some(record) = self.library.ring.next() {
            count += usize::from(record.header.slot == u32::from(port));
        }
        count
    }
}

fn ask(client: &mut Client, request: QosRequest) -> QosReply {
    match client.ask(RequestBody::Qos(request)) {
        ReplyBody::Qos(reply) => reply,
        other => panic!("{other:?}"),
    }
}

/// Allows almost nothing once the burst is used up.
fn ten_packets() -> Receive {
    Receive {
        packets: Some(1),
        bits: None,
        burst_ms: 9_000,
        priority: None,
    }
}

fn port(port: u16) -> Scope {
    let protocol = Protocol::Udp;
    Scope::Port { protocol, port }
}

#[test]
fn a_port_has_its_budget_alone_until_it_is_deleted() {
    let mut scene = Scene::new();
    assert_eq!(scene.arrive(FLOODED), SENT);
    assert_eq!(scene.set(port(FLOODED), ten_packets()), QosReply::Done);
    // A busy machine may take seconds for it, and each second permits one more packet.
    let through = scene.arrive(FLOODED);
    assert!((10..30).contains(&through), "{through}");
    assert_eq!(scene.arrive(QUIET), SENT);
    let report = &scene.report()[0];
    assert_eq!(report.passed, through as u64);
    assert_eq!(report.dropped, (SENT - through) as u64);
    let dropped = scene.admin.counter("receive", "drop_over_budget");
    assert_eq!(dropped, (SENT - through) as u64);

    let delete = QosRequest::Delete {
        scope: port(FLOODED),
        kind: Kind::Receive,
    };
    assert_eq!(ask(&mut scene.admin, delete), QosReply::Done);
    assert_eq!(scene.arrive(FLOODED), SENT);
    assert!(scene.report().is_empty());
}

#[test]
fn the_narrower_of_two_budgets_counts() {
    let mut scene = Scene::new();
    let pid = std::process::id();
    let process = Scope::Process { pid };
    assert_eq!(scene.set(process, ten_packets()), QosReply::Done);
    let wide = Receive {
        packets: Some(1_000_000),
        ..ten_packets()
    };
    assert_eq!(scene.set(port(QUIET), wide), QosReply::Done);
    assert!(scene.arrive(FLOODED) < 30);
    assert_eq!(scene.arrive(QUIET), SENT);
}

#[test]
fn a_budget_covers_what_is_opened_later() {
    let mut scene = Scene::new();
    let user = Scope::User { uid: 0 };
    assert_eq!(scene.set(user, ten_packets()), QosReply::Done);
    let later = 5355;
    let local = SocketAddr::new([0, 0, 0, 0].into(), later);
    let slot = Slot(later.into());
    let (reply, _near) = scene.library.bind(Protocol::Udp, local, slot);
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    assert!(scene.arrive(later) < 30);
    // All sockets of the user share one budget.
    assert!(scene.arrive(FLOODED) < 20);
}

#[test]
fn a_budget_of_a_process_goes_with_it_and_one_of_a_port_stays() {
    let mut scene = Scene::new();
    let pid = std::process::id();
    let spec = ten_packets();
    assert_eq!(
        scene.set(Scope::Process { pid }, spec.clone()),
        QosReply::Done
    );
    assert_eq!(scene.set(port(FLOODED), spec), QosReply::Done);
    let Scene {
        library,
        mut admin,
        _server,
        bed: _bed,
        _near,
    } = scene;
    let gone = clock::now();
    drop(library);
    let left = await_some("end of a budget", || {
        let left = admin.guarantees().receive;
        (left.len() == 1).then_some(left)
    });
    assert!(clock::now().since(gone) < Duration::from_secs(5));
    assert_eq!(left[0].scope, port(FLOODED));
}

#[test]
fn a_process_that_moves_into_a_cgroup_has_its_budget_soon() {
    let mut scene = Scene::new();
    let cgroup = Cgroup::new("budget");
    let scope = Scope::Cgroup(cgroup.path.clone());
    assert_eq!(scene.set(scope, ten_packets()), QosReply::Done);
    assert_eq!(scene.arrive(FLOODED), SENT);
    cgroup.take_in_this_process();
    await_some("the budget of the cgroup", || {
        (scene.arrive(FLOODED) < SENT).then_some(())
    });
}

#[test]
fn a_flows_budget_ends_when_its_socket_forgets_the_peer() {
    let mut scene = Scene::new();
    let remote = SocketAddr::new(Bed::B4, FLOODED);
    let (reply, _near, slot) = scene.library.connect(Protocol::Udp, remote);
    let ReplyBody::Connected { session, local, .. } = reply else {
        panic!("{reply:?}");
    };
    let flow = Scope::Flow(FlowKey {
        protocol: Protocol::Udp,
        local,
        remote,
    });
    assert_eq!(scene.set(flow.clone(), ten_packets()), QosReply::Done);
    assert_eq!(scene.report()[0].scope, flow);
    let disconnect = RequestBody::Disconnect { session, slot };
    let reply = scene.library.client.ask(disconnect);
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    assert!(scene.report().is_empty());
}

#[test]
fn what_makes_no_sense_is_refused_with_a_reason() {
    let mut scene = Scene::new();
    let nothing = Receive {
        packets: None,
        ..ten_packets()
    };
    for (scope, spec, errno) in [
        (port(FLOODED), nothing, libc::EINVAL),
        (Scope::Process { pid: 1 }, ten_packets(), libc::ESRCH),
        (Scope::Process { pid: u32::MAX }, ten_packets(), libc::ESRCH),
        (Scope::Cgroup("/no/such".into()), ten_packets(), libc::ESRCH),
    ] {
        let QosReply::Refused(refusal) = scene.set(scope.clone(), spec) else {
            panic!("{scope:?} is taken");
        };
        assert_eq!(refusal.errno, errno, "{}", refusal.reason);
        assert!(!refusal.reason.is_empty());
    }
    let delete = QosRequest::Delete {
        scope: port(FLOODED),
        kind: Kind::Receive,
    };
    let QosReply::Refused(refusal) = ask(&mut scene.admin, delete) else {
        panic!("there is nothing to delete");
    };
    assert_eq!(refusal.errno, libc::ENOENT);
}
