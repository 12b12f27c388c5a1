//! Guarantees: requests for other users, invalid requests, and floods of them. Each is refused with a reason and
//! counted, and nothing changes.

use std::net::SocketAddr;
use std::path::Path;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::{
    Adapt, Algorithm, ClassTraffic, Cpu, GroupAction, GroupOptions, Kind, QosReply, QosReport,
    QosRequest, Rate, Receive, Refusal, Scope, Slack, Transmit,
};
use portolan_types::{FlowKey, Protocol, Slot};

use crate::common::{Client, Configuration, Library, Near, control_path, start_server};
use crate::meter::Meter;
use crate::{NOBODY, Victim, as_nobody, assert_serves_others, counter};

/// A link with rates to reserve.
const LINK: &str = "[[qos.link]]\ndevice = 'eth0'\nrate = '1gbit'\nper_user = 50";

fn hostile_client(path: &Path) -> Client {
    as_nobody(|| Client::connect(path))
}

fn ask(client: &mut Client, request: QosRequest) -> QosReply {
    match client.ask(RequestBody::Qos(request)) {
        ReplyBody::Qos(reply) => reply,
        other => panic!("{other:?}"),
    }
}

/// Sends a request that must be refused, with a readable reason.
fn refused(client: &mut Client, request: QosRequest) -> Refusal {
    let mut what = format!("{request:?}");
    what.truncate(300);
    match ask(client, request) {
        QosReply::Refused(refusal) => {
            let is_readable = |c: char| !c.is_control();
            assert!(refusal.reason.chars().all(is_readable), "{what}");
            assert!(
                !refusal.reason.is_empty() && refusal.reason.len() < 1000,
                "{what}"
            );
            assert_ne!(refusal.errno, 0, "{what}");
            refusal
        }
        other => panic!("{what}: {other:?}"),
    }
}

fn modest_transmit() -> Transmit {
    Transmit {
        device: None,
        rate: Rate::Bits(1_000_000),
        burst: None,
        slack: Slack::None,
    }
}

fn modest_receive() -> Receive {
    Receive {
        packets: Some(1_000),
        bits: None,
        burst_ms: Receive::BURST_MS,
        priority: None,
    }
}

fn modest_cpu() -> Cpu {
    Cpu {
        class: None,
        rate_ppm: 10_000,
        period_us: Cpu::PERIOD_US,
        slack: false,
        adapt: Adapt::Off,
    }
}

/// Returns every request about a scope.
pub(crate) fn requests_about(scope: &Scope) -> Vec<QosRequest> {
    let scope = || scope.clone();
    let ends = [Kind::Transmit, Kind::Receive, Kind::Cpu].map(|kind| QosRequest::Delete {
        scope: scope(),
        kind,
    });
    let makes = [
        QosRequest::Transmit {
            scope: scope(),
            spec: modest_transmit(),
        },
        QosRequest::Receive {
            scope: scope(),
            spec: modest_receive(),
        },
        QosRequest::Cpu {
            scope: scope(),
            spec: modest_cpu(),
        },
    ];
    makes.into_iter().chain(ends).collect()
}

/// The deletion of something missing may be answered by just that; and threads have no packets.
fn errnos(request: &QosRequest, errno: i32) -> Vec<i32> {
    match request {
        QosRequest::Delete { .. } => vec![errno, libc::ENOENT],
        QosRequest::Transmit {
            scope: Scope::Thread { .. },
            ..
        }
        | QosRequest::Receive {
            scope: Scope::Thread { .. },
            ..
        } => vec![errno, libc::EINVAL],
        _ => vec![errno],
    }
}

fn flow(local: &str, remote: &str) -> Scope {
    Scope::Flow(FlowKey {
        protocol: Protocol::Tcp,
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
    })
}

/// Returns the connection of a victim.
fn flow_of(victim: &Victim) -> FlowKey {
    let local = victim.peer.peer_addr().unwrap();
    let remote = victim.peer.local_addr().unwrap();
    FlowKey {
        protocol: Protocol::Tcp,
        local,
        remote,
    }
}

/// Returns the guarantees, without values that change by themselves: the traffic of a link, and the promises of other
/// tests' servers.
fn decided(path: &Path) -> QosReport {
    let mut report = Client::connect(path).guarantees();
    for link in &mut report.links {
        link.best_effort = ClassTraffic::default();
    }
    report.cpu_elsewhere_ppm = 0;
    report
}

/// Returns the mapped IPv6 address of an IPv4 one.
fn mapped(endpoint: SocketAddr) -> SocketAddr {
    match endpoint {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        v6 => v6,
    }
}

#[test]
fn what_is_other_peoples_is_out_of_reach() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let flow = flow_of(&victim);
    let mut hostile = hostile_client(&path);
    let empty = decided(&path);
    let before = counter(&path, "server", "guarantees_refused");
    let mut asked = 0;
    for scope in [
        Scope::Process { pid: 1 },
        Scope::Process { pid: server.pid() },
        Scope::Thread { tid: server.pid() },
        Scope::User { uid: 0 },
        Scope::User { uid: NOBODY - 1 },
        Scope::Cgroup("/".into()),
        Scope::Flow(flow),
        Scope::Flow(FlowKey {
            local: mapped(flow.local),
            remote: mapped(flow.remote),
            ..flow
        }),
        Scope::Port {
            protocol: Protocol::Tcp,
            port: flow.local.port(),
        },
        // Not owned by anyone yet.
        Scope::Port {
            protocol: Protocol::Udp,
            port: 9,
        },
    ] {
        for request in requests_about(&scope) {
            let allowed = errnos(&request, libc::EPERM);
            let errno = refused(&mut hostile, request).errno;
            assert!(allowed.contains(&errno), "{scope}: {errno}");
            asked += 1;
        }
    }
    let counted = counter(&path, "server", "guarantees_refused") - before;
    assert_eq!(counted, asked);
    assert_eq!(decided(&path), empty);
    victim.assert_unharmed();
}

#[test]
fn what_is_not_there_is_nobodys() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_client(&path);
    for scope in [
        Scope::Process { pid: u32::MAX },
        Scope::Thread { tid: 1 << 22 },
        Scope::Cgroup("/no/such/cgroup".into()),
        flow("10.9.9.9:1", "10.9.9.8:2"),
    ] {
        for request in requests_about(&scope) {
            let allowed = errnos(&request, libc::ESRCH);
            let errno = refused(&mut hostile, request).errno;
            assert!(allowed.contains(&errno), "{scope}: {errno}");
        }
    }
    for scope in [
        Scope::Cgroup("/../../etc".into()),
        Scope::User { uid: u32::MAX },
        Scope::Cgroup("relative".into()),
        Scope::Cgroup("/a\u{1b}[2J".into()),
        Scope::Cgroup("/a".repeat(20_000)),
        Scope::Port {
            protocol: Protocol::Udp,
            port: 0,
        },
    ] {
        for request in requests_about(&scope) {
            assert_eq!(refused(&mut hostile, request).errno, libc::EINVAL);
        }
    }
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

/// A port on which two users have sessions belongs to neither.
#[test]
fn a_port_that_several_users_share_is_roots() {
    let bed = Bed::veth();
    let _server = Configuration::new(&bed.a, LINK).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let (_, address, _near) = honest.listen(SocketAddr::new(Bed::A4, 0), 5);
    let mut hostile = crate::hostile_library(&path);
    // The same number in another protocol: that one is its own.
    let (reply, _near) = hostile.bind(Protocol::Udp, address, Slot(0));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let taken = Scope::Port {
        protocol: Protocol::Tcp,
        port: address.port(),
    };
    for request in requests_about(&taken) {
        let allowed = errnos(&request, libc::EPERM);
        let errno = refused(&mut hostile.client, request).errno;
        assert!(allowed.contains(&errno), "{errno}");
    }
    let own = Scope::Port {
        protocol: Protocol::Udp,
        port: address.port(),
    };
    for request in requests_about(&own) {
        if let QosReply::Refused(refusal) = ask(&mut hostile.client, request) {
            assert_ne!(refusal.errno, libc::EPERM, "{refusal:?}");
        }
    }
    meter.finish_but_for_starts();
}

/// A user can neither change what root has given it, nor can others see it.
#[test]
fn what_root_has_decided_stays() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let victim = Victim::start(&bed, &path);
    let mut root = Client::connect(&path);
    let hostile_user = Scope::User { uid: NOBODY };
    for scope in [Scope::Flow(flow_of(&victim)), hostile_user.clone()] {
        let spec = modest_receive();
        let made = ask(&mut root, QosRequest::Receive { scope, spec });
        assert_eq!(made, QosReply::Done);
    }
    let before = root.guarantees();
    let mut hostile = crate::hostile_library(&path);
    for scope in [Scope::Flow(flow_of(&victim)), hostile_user.clone()] {
        let end = QosRequest::Delete {
            scope: scope.clone(),
            kind: Kind::Receive,
        };
        assert_eq!(refused(&mut hostile.client, end).errno, libc::EPERM);
        let spec = Receive {
            packets: Some(u32::MAX),
            ..modest_receive()
        };
        let change = QosRequest::Receive { scope, spec };
        assert_eq!(refused(&mut hostile.client, change).errno, libc::EPERM);
    }
    let terms = |report: &QosReport| -> Vec<_> {
        let entries = report.receive.iter();
        entries
            .map(|entry| (entry.scope.clone(), entry.uid, entry.spec.clone()))
            .collect()
    };
    assert_eq!(terms(&root.guarantees()), terms(&before));
    let seen = hostile.client.guarantees().receive;
    let seen: Vec<_> = seen.into_iter().map(|entry| entry.scope).collect();
    assert_eq!(seen, [hostile_user]);
}

/// More requests of each kind than any user may have granted.
#[test]
fn a_flood_of_specs_ends_and_harms_nobody() {
    const FLOOD: u16 = 600;
    let bed = Bed::veth();
    let configuration = Configuration::new(&bed.a, LINK);
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut hostile = crate::hostile_library(&path);
    let mut ends = Vec::new();
    for _ in 0..FLOOD {
        let (near, scope) = own_port(&mut hostile);
        for request in requests_about(&scope).into_iter().take(3) {
            ask(&mut hostile.client, request);
        }
        ends.push(near);
    }
    let report = Client::connect(&path).guarantees();
    for count in [report.receive.len(), report.transmit.len()] {
        assert!((1..=64).contains(&count), "{count}");
    }
    for _ in 0..FLOOD {
        hostile.client.guarantees();
    }
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    meter.finish();
}

fn impossible_transmits() -> Vec<Transmit> {
    let rates = [
        Rate::Bits(0),
        Rate::Bits(u64::MAX),
        Rate::Bits(i64::MAX as u64 + 1),
        Rate::Slice {
            slice_us: 0,
            period_us: 0,
        },
        Rate::Slice {
            slice_us: 1,
            period_us: 0,
        },
        Rate::Slice {
            slice_us: u32::MAX,
            period_us: 1,
        },
        Rate::Slice {
            slice_us: u32::MAX,
            period_us: u32::MAX,
        },
    ];
    let rates = rates.map(|rate| Transmit {
        rate,
        ..modest_transmit()
    });
    let devices = ["", "nosuch0", "lo", "../../etc", "a\0b", "\u{1b}[2J"].map(str::to_owned);
    let devices = devices.into_iter().chain(["x".repeat(100_000)]);
    let devices = devices.map(|device| Transmit {
        device: Some(device),
        ..modest_transmit()
    });
    rates.into_iter().chain(devices).collect()
}

fn impossible_receives() -> Vec<Receive> {
    vec![
        Receive {
            packets: None,
            ..modest_receive()
        },
        Receive {
            packets: Some(0),
            ..modest_receive()
        },
        Receive {
            burst_ms: u32::MAX,
            ..modest_receive()
        },
        Receive {
            priority: Some(8),
            ..modest_receive()
        },
        Receive {
            priority: Some(u8::MAX),
            ..modest_receive()
        },
    ]
}

fn impossible_cpus() -> Vec<Cpu> {
    let adapts = [(500_000, 100_000), (0, u32::MAX)];
    let adapts = adapts.map(|(least_ppm, most_ppm)| Cpu {
        adapt: Adapt::Auto {
            least_ppm,
            most_ppm,
        },
        ..modest_cpu()
    });
    let classes = ["", "nosuch", "\u{1b}[2J"].map(|class| Cpu {
        class: Some(class.into()),
        ..modest_cpu()
    });
    let rates = [0, 1_000_001, u32::MAX].map(|rate_ppm| Cpu {
        rate_ppm,
        ..modest_cpu()
    });
    let periods = [0, 1, u32::MAX].map(|period_us| Cpu {
        period_us,
        ..modest_cpu()
    });
    [&adapts[..], &classes, &rates, &periods].concat()
}

#[test]
fn numbers_and_names_that_cannot_be_are_refused() {
    let bed = Bed::veth();
    let configuration = Configuration::new(&bed.a, LINK);
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = crate::hostile_library(&path);
    let empty = decided(&path);
    let (_near, port) = own_port(&mut hostile);
    for spec in impossible_transmits() {
        let scope = port.clone();
        refused(&mut hostile.client, QosRequest::Transmit { scope, spec });
    }
    for spec in impossible_receives() {
        let scope = port.clone();
        refused(&mut hostile.client, QosRequest::Receive { scope, spec });
    }
    as_nobody(|| {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        for spec in impossible_cpus() {
            let scope = Scope::Thread {
                tid: tid.unsigned_abs(),
            };
            let refusal = refused(&mut hostile.client, QosRequest::Cpu { scope, spec });
            assert_ne!(refusal.errno, libc::EPERM, "{refusal:?}");
        }
    });
    assert_eq!(decided(&path), empty);
    victim.assert_unharmed();
}

/// Returns a port that the process has bound.
fn own_port(library: &mut Library) -> (Near, Scope) {
    let (reply, near) = library.bind(Protocol::Udp, SocketAddr::new(Bed::A4, 0), Slot(0));
    let ReplyBody::Bound { local, .. } = reply else {
        panic!("{reply:?}");
    };
    let scope = Scope::Port {
        protocol: Protocol::Udp,
        port: local.port(),
    };
    (near, scope)
}

fn group_actions() -> Vec<GroupAction> {
    let options = GroupOptions::default();
    let create = |bits, mode| GroupAction::Create {
        device: None,
        bits,
        mode,
        options,
        algorithm: Algorithm::RateControlled,
    };
    vec![
        create(0, 0o700),
        create(u64::MAX, 0o700),
        create(1_000_000, 0o7777),
        GroupAction::Open,
        GroupAction::SetOptions(options),
        GroupAction::SetRate { bits: u64::MAX },
        GroupAction::Join {
            scope: Scope::Process { pid: 1 },
            bits: 1_000,
        },
        GroupAction::Leave { member: u32::MAX },
        GroupAction::Delete,
    ]
}

#[test]
fn groups_that_are_not_there_cannot_be_used() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_client(&path);
    for key in [0, 7, u32::MAX] {
        for action in group_actions() {
            refused(&mut hostile, QosRequest::Group { key, action });
        }
    }
    assert!(Client::connect(&path).guarantees().groups.is_empty());
    meter.finish_but_for_starts();
}
