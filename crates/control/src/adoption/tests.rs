use std::time::Duration;

use portolan_types::{Generation, SessionId};

use super::*;
use crate::control::tests::{Bed, SLOT, USER, claim_of};
use crate::control::{Effect, Input};
use crate::legality::SessionPhase;

fn flow() -> FlowKey {
    FlowKey {
        protocol: Protocol::Tcp,
        local: "10.0.0.1:80".parse().unwrap(),
        remote: "10.0.0.2:40000".parse().unwrap(),
    }
}

fn adopted(id: u64) -> Adopted {
    Adopted {
        id: SessionId(id),
        flow: flow(),
        slot: SLOT,
        generation: Generation(9),
        reuse: Reuse::default(),
        v6_only: false,
        options: HandshakeOptions::default(),
    }
}

#[test]
fn an_adopted_connection_is_its_processs_under_its_number() {
    let mut bed = Bed::new();
    let id = bed.control.adopt(bed.channel, adopted(77), 5).unwrap();
    assert_eq!(id, SessionId(77));
    let session = bed.control.registry.session(id).unwrap();
    assert_eq!(session.phase(), SessionPhase::Connected);
    assert_eq!(session.holder, Holder::Process(bed.channel, SLOT));
    assert_eq!((session.generation, session.uid), (Generation(9), USER));
    assert_eq!(bed.control.registry.by_flow(&flow()), Some(id));
    assert_eq!(bed.control.registry.held_by(bed.channel), [id]);
    let forgotten = bed.does(Input::Forget(id));
    assert!(forgotten.contains(&Effect::RemoveRow(flow())));
    assert!(bed.control.ports.is_empty());
}

#[test]
fn neither_a_number_nor_a_flow_is_adopted_twice() {
    let mut bed = Bed::new();
    bed.control.adopt(bed.channel, adopted(77), 5).unwrap();
    for again in [adopted(77), adopted(78), adopted(0)] {
        assert!(bed.control.adopt(bed.channel, again, 5).is_err());
    }
    assert_eq!(bed.control.registry.session_count(), 1);
    assert_eq!(bed.control.ports.len(), 1);
}

#[test]
fn a_listener_returns_to_the_port_of_adopted_connections() {
    let mut bed = Bed::new();
    bed.control.adopt(bed.channel, adopted(77), 5).unwrap();
    let claim = claim_of(flow().local);
    let of_another = PortClaim {
        uid: USER + 1,
        ..claim
    };
    assert!(bed.control.ports.bind(of_another, 0).is_err());
    let (claim, _) = bed.control.ports.bind(claim, 0).unwrap();
    bed.control.ports.listen(claim).unwrap();
}

#[test]
fn what_nobody_names_is_reset_as_after_the_death_of_its_holder() {
    let mut bed = Bed::new();
    let effects = bed.control.abandon((&flow(), USER), || 5, bed.now).unwrap();
    let id = SessionId(5);
    let expected = [
        Effect::ClosePeerEnd(id),
        Effect::SteerToNobody(id),
        Effect::Probe(flow()),
    ];
    assert_eq!(effects, expected);
    assert!(bed.control.registry.session(id).unwrap().is_probing());
    bed.does(Input::ProbeAnswered(id));
    bed.does(Input::Forget(id));
    bed.passes(Duration::from_secs(61));
    assert!(bed.control.ports.is_empty());
}
