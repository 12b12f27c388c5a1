//! What leases claim, and who may use them.

use std::collections::HashSet;
use std::time::Duration;

use portolan_types::FlowKey;

use super::*;
use crate::control::tests::{Bed, SLOT, USER, claim_of};
use crate::control::{HOLD_BACK, Input, Progress};

const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

fn random() -> impl FnMut() -> u64 {
    let mut last = 0;
    move || {
        last += 7919;
        last
    }
}

fn lease(bed: &mut Bed, wanted: usize) -> Vec<LeasedPort> {
    try_to_lease(bed, wanted, &mut Effects::new()).unwrap()
}

fn try_to_lease(bed: &mut Bed, wanted: usize, out: &mut Effects) -> Result<Vec<LeasedPort>, Errno> {
    let (to, now) = ((bed.channel, SLOT), bed.now);
    bed.control.lease_ports(to, OWN, wanted, now, random(), out)
}

fn forget(bed: &mut Bed, id: SessionId) -> Effects {
    let now = bed.now;
    bed.control.handle(Input::Forget(id), now)
}

#[test]
fn nobody_else_has_a_leased_port_and_it_is_held_back_from_other_users_for_a_minute() {
    let mut bed = Bed::new();
    let ports = lease(&mut bed, 8);
    assert_eq!(ports.len(), 8);
    let first = ports[0];
    let at = SocketAddr::new(OWN, first.number);
    let is_free_for = |bed: &mut Bed, uid| {
        let claim = PortClaim {
            uid,
            ..claim_of(at)
        };
        let taken = bed.control.ports.bind(claim, 0);
        taken.map(|(id, _)| bed.control.ports.release(id)).is_ok()
    };
    assert!(!is_free_for(&mut bed, USER));
    let effects = forget(&mut bed, first.id);
    let row = BindingKey::new(Protocol::Tcp, at);
    assert!(effects.contains(&Effect::CloseRows(vec![row])));
    let other = USER + 1;
    assert!(!is_free_for(&mut bed, other), "its connections may linger");
    assert!(is_free_for(&mut bed, USER), "they are its own");
    bed.now = bed.now + HOLD_BACK + Duration::from_millis(1);
    let now = bed.now;
    bed.control.expire_ports(now);
    assert!(is_free_for(&mut bed, other));
}

#[test]
fn only_its_process_opens_connections_on_it() {
    let mut bed = Bed::new();
    let port = lease(&mut bed, 1)[0];
    let other = ChannelId(bed.channel.0 + 1);
    assert_eq!(bed.control.admit_opener(bed.channel, port.id), Ok(()));
    assert_eq!(bed.control.admit_opener(other, port.id), Err(Errno::BADF));
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: SocketAddr::new(OWN, port.number),
        remote: "10.0.0.2:80".parse().unwrap(),
    };
    let enter = |bed: &mut Bed| {
        bed.control
            .enter_for(port.id, &flow, Life::Connected, random())
    };
    let id = enter(&mut bed).unwrap();
    assert_eq!(bed.control.registry.session(id).unwrap().listener, None);
    assert!(enter(&mut bed).is_err(), "it is there already");
}

#[test]
fn a_process_has_a_limited_number_and_half_of_the_ports_are_for_others() {
    let mut bed = Bed::new();
    let mut leased = lease(&mut bed, usize::MAX).len();
    assert!(leased > 0);
    // The limit of sessions per process, or of the ephemeral ports, whichever comes first.
    loop {
        let more = try_to_lease(&mut bed, 1000, &mut Effects::new());
        match more.map(|ports| ports.len()) {
            Ok(0) | Err(_) => break,
            Ok(more) => leased += more,
        }
    }
    assert!(leased <= bed.control.ports.ephemeral().div_ceil(SHARE));
    assert_eq!(bed.control.leased, leased);
    for id in bed.control.leases_of(bed.channel) {
        forget(&mut bed, id);
    }
    assert_eq!(bed.control.leased, 0);
}

#[test]
fn who_comes_and_goes_leaves_half_of_the_ports_to_others_and_has_its_own_again() {
    let mut bed = Bed::new();
    let most = bed.control.ports.ephemeral() / 2;
    let mut names = HashSet::new();
    for _ in 0..most {
        let ports = lease(&mut bed, 50);
        assert_eq!(ports.len(), 50);
        names.extend(ports.iter().map(|port| port.number));
        for port in &ports {
            forget(&mut bed, port.id);
        }
    }
    assert_eq!(names.len(), most);
    assert_eq!(bed.control.ports.held_back(), most);
}

#[test]
fn a_port_with_a_connection_is_not_leased_again() {
    let mut bed = Bed::new();
    let half = bed.control.ports.ephemeral() / 2;
    let first = lease(&mut bed, 1)[0];
    let lingers = PortClaim {
        uid: USER,
        ..claim_of(SocketAddr::new(OWN, first.number))
    };
    let remote = "10.0.0.2:80".parse().unwrap();
    let lingers = bed.control.ports.join(lingers, remote).unwrap();
    let end = bed.now + HOLD_BACK;
    bed.control.ports.linger(lingers, end, 10);
    forget(&mut bed, first.id);
    // First those that were never leased.
    for _ in 0..2 * half {
        let ports = lease(&mut bed, 1);
        assert_ne!(ports[0].number, first.number);
        forget(&mut bed, ports[0].id);
    }
}

#[test]
fn connections_in_time_wait_end_when_their_ports_are_leased_again() {
    let mut bed = Bed::new();
    let port = lease(&mut bed, 1)[0];
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: SocketAddr::new(OWN, port.number),
        remote: "10.0.0.2:80".parse().unwrap(),
    };
    let id = bed
        .control
        .enter_for(port.id, &flow, Life::Connected, random())
        .unwrap();
    let held = Holder::Server(SLOT);
    bed.control
        .registry
        .adopt(id, held, Generation::UNREGISTERED);
    for step in [
        Input::Close(id),
        Input::Finishing { id, unsent: 0 },
        Input::Progress {
            id,
            progress: Progress::TimeWait,
        },
    ] {
        bed.control.handle(step, bed.now);
    }
    forget(&mut bed, port.id);
    let others = bed.control.ports.ephemeral() / 2 - 1;
    for _ in 0..others {
        let other = lease(&mut bed, 1)[0];
        forget(&mut bed, other.id);
    }
    let mut ended = Effects::new();
    let again = try_to_lease(&mut bed, 1, &mut ended).unwrap();
    assert_ne!(again[0].number, port.number, "it is younger than a second");
    assert_eq!(ended, []);
    bed.now += Duration::from_secs(1);
    let again = try_to_lease(&mut bed, 1, &mut ended).unwrap();
    assert_eq!(again[0].number, port.number);
    assert_eq!(ended, [Effect::Forget(id)]);
}

#[test]
fn a_port_whose_connection_is_expected_to_be_named_is_nobody_elses() {
    let mut bed = Bed::new();
    let remote = "10.0.0.2:80".parse().unwrap();
    let ephemeral = bed.control.ports.ephemeral();
    let first = lease(&mut bed, 1)[0];
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: SocketAddr::new(OWN, first.number),
        remote,
    };
    forget(&mut bed, first.id);
    bed.control.expect(&flow, USER);
    let mut numbers = HashSet::new();
    // Each in turn is held back, and leased again.
    for _ in 0..2 * ephemeral {
        let port = lease(&mut bed, 1)[0];
        numbers.insert(port.number);
        forget(&mut bed, port.id);
    }
    assert!(!numbers.contains(&first.number));
    let open = claim_of(SocketAddr::new(OWN, 0));
    while let Ok((_, local)) = bed.control.ports.connect(open, remote, 0) {
        assert_ne!(local, flow.local);
    }
    bed.control.expect_no_longer(&flow);
    assert!(bed.control.ports.join(claim_of(flow.local), remote).is_ok());
}
