use std::time::Duration;

use portolan_proto::local::Side;
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
        evidence: Evidence::Row(Generation(9)),
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
fn an_expected_connection_is_adopted_or_abandoned_and_its_port_bound_meanwhile() {
    let mut bed = Bed::new();
    bed.control.expect(&flow(), USER);
    let listener = claim_of(flow().local);
    let (bound, _) = bed.control.ports.bind(listener, 0).unwrap();
    bed.control.ports.release(bound);
    bed.control.adopt(bed.channel, adopted(77), 5).unwrap();
    assert_eq!(bed.control.ports.len(), 1);
    bed.does(Input::Forget(SessionId(77)));
    bed.control.expect(&flow(), USER);
    let now = bed.now;
    bed.control.abandon((&flow(), USER), || 78, now).unwrap();
    assert_eq!(bed.control.ports.len(), 1);
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
fn ends_of_a_session_within_the_host_are_adopted_without_a_port_and_paired() {
    let mut bed = Bed::new();
    let end = |id, side| Adopted {
        evidence: Evidence::Memory(side),
        ..adopted(id)
    };
    let opener = bed.control.adopt(bed.channel, end(77, Side::Opener), 5);
    let accepter = bed.control.adopt(bed.channel, end(78, Side::Accepter), 6);
    let (opener, accepter) = (opener.unwrap(), accepter.unwrap());
    assert!(bed.control.ports.is_empty());
    assert_eq!(bed.control.registry.by_flow(&flow()), None);
    let peer = |bed: &Bed| bed.control.registry.session(opener).unwrap().local_peer;
    assert_eq!(peer(&bed), Some(SessionId::NONE));
    bed.control.pair_again(opener, accepter);
    assert_eq!(peer(&bed), Some(accepter));
    let ended = bed.does(Input::Orphaned(opener));
    assert_eq!(
        ended,
        [Effect::UnholdLocal(opener), Effect::CloseLocal(opener)]
    );
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

#[test]
fn a_connection_that_the_preceding_server_held_is_entered_once_for_its_user() {
    let mut bed = Bed::new();
    let held = HeldBefore {
        id: SessionId(77),
        flow: flow(),
        listener: Some(SessionId(5)),
        uid: USER,
        cookie: 9,
        reuse: Reuse::default(),
        v6_only: false,
        options: HandshakeOptions::default(),
    };
    let id = bed.control.enter_held(held, Reach::Network).unwrap();
    let session = bed.control.registry.session(id).unwrap();
    assert_eq!((session.id, session.uid), (held.id, USER));
    assert_eq!((session.holder, session.cookie), (Holder::None, 9));
    assert_eq!(session.listener, held.listener);
    for id in [77, 78, 0].map(SessionId) {
        let again = HeldBefore { id, ..held };
        assert!(bed.control.enter_held(again, Reach::Network).is_err());
    }
    bed.does(Input::Forget(id));
    assert!(bed.control.ports.is_empty());
}
