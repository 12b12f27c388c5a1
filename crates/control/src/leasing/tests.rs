//! What leases claim, and who may use them.

use std::time::Duration;

use portolan_types::FlowKey;

use super::*;
use crate::control::Input;
use crate::control::tests::{Bed, SLOT, USER, claim_of};

const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

fn random() -> impl FnMut() -> u64 {
    let mut last = 0;
    move || {
        last += 7919;
        last
    }
}

fn lease(bed: &mut Bed, wanted: usize) -> Vec<LeasedPort> {
    let to = (bed.channel, SLOT);
    bed.control.lease_ports(to, OWN, wanted, random()).unwrap()
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
    // The limit of sessions per process, of 512, or of the ephemeral ports, whichever comes first.
    loop {
        let more = bed
            .control
            .lease_ports((bed.channel, SLOT), OWN, 1000, random());
        match more.map(|ports| ports.len()) {
            Ok(0) | Err(_) => break,
            Ok(more) => leased += more,
        }
    }
    assert!(leased <= MOST && leased <= bed.control.ports.ephemeral() / 2);
    assert_eq!(bed.control.leased, leased);
    for id in bed.control.leases_of(bed.channel) {
        forget(&mut bed, id);
    }
    assert_eq!(bed.control.leased, 0);
}

#[test]
fn who_comes_and_goes_leaves_half_of_the_ports_to_others() {
    let mut bed = Bed::new();
    let most = bed.control.ports.ephemeral() / 2;
    for _ in 0..most {
        let ports = lease(&mut bed, 50);
        for port in &ports {
            forget(&mut bed, port.id);
        }
        if ports.is_empty() {
            break;
        }
    }
    assert_eq!(bed.control.ports.held_back(), most);
}
