//! When the filter answers SYNs, for which listeners, and when it stops.

use portolan_proto::control::Reuse;
use portolan_tcp::isn::Secret;

use super::*;
use crate::control::Input;
use crate::control::tests::{Bed, USER, claim_of};
use crate::listener::Listener;
use crate::ports::PortClaim;
use crate::session::{Life, Opening};

fn answering() -> Answering {
    Answering {
        config: Config::default(),
        cookies: CookieUse::WhenFull,
    }
}

fn listen(bed: &mut Bed, number: u64) -> SessionId {
    let reuse = Reuse {
        address: false,
        port: true,
    };
    let claim = PortClaim {
        reuse,
        ..claim_of(([10, 0, 0, 1], 80).into())
    };
    let (claim, local) = bed.control.ports.bind(claim, 0).unwrap();
    let opening = Opening {
        claim: Some(claim),
        reuse,
        ..Opening::new(Protocol::Tcp, local, USER)
    };
    let id = bed.control.enter(None, opening, || number).unwrap();
    bed.does(Input::Listens(id));
    let session = bed.control.registry.session_mut(id).unwrap();
    session.life = Life::Listening(Box::new(Listener::new(4, Secret([7; 16]))));
    id
}

fn binding() -> BindingKey {
    BindingKey::new(Protocol::Tcp, ([10, 0, 0, 1], 80).into())
}

/// Sends `count` SYNs, for which no state is kept, at one instant.
fn syns(bed: &mut Bed, id: SessionId, count: usize) -> Effects {
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: ([10, 0, 0, 1], 80).into(),
        remote: ([10, 0, 0, 2], 4000).into(),
    };
    let now = bed.now;
    let control = &mut bed.control;
    let mut effects = Effects::new();
    for _ in 0..count {
        if let Some(binding) = control.on_unkept_syn(id, &flow, now) {
            control.begin_flood(&binding, &answering(), now, &mut effects);
        }
    }
    effects
}

fn look(bed: &mut Bed, seen: u64) -> Effects {
    bed.now += LOOK;
    let seen = FloodSeen {
        answered: seen,
        dropped: 0,
    };
    bed.control.look_at_floods(&answering(), bed.now, |_| seen)
}

#[test]
fn many_syns_are_the_filters_until_they_are_few() {
    let mut bed = Bed::new();
    let id = listen(&mut bed, 1);
    assert_eq!(syns(&mut bed, id, 10), [], "some are no flood");
    let begun = syns(&mut bed, id, 1000);
    let [Effect::AnswerFlood(known, flood)] = &begun[..] else {
        panic!("{begun:?}");
    };
    assert_eq!((*known, flood.secret), (binding(), [7; 16]));
    assert!(bed.control.timers.is_armed(Timer::Floods));
    assert_eq!(look(&mut bed, 500), begun, "it goes on");
    assert_eq!(look(&mut bed, 550), [Effect::EndFlood(binding())]);
    let seen = FloodSeen {
        answered: 560,
        dropped: 3,
    };
    bed.control.on_flood_ended(&binding(), seen);
    assert!(!bed.control.has_floods());
    let counts = bed.control.registry.listener(id).unwrap().floods;
    assert_eq!(
        (counts.floods, counts.answered, counts.dropped),
        (1, 560, 3)
    );
}

#[test]
fn listeners_of_one_port_that_do_not_agree_answer_themselves() {
    let mut bed = Bed::new();
    let ids = [1, 2].map(|number| listen(&mut bed, number));
    let begun = syns(&mut bed, ids[0], 1000);
    assert_eq!(begun.len(), 1, "they agree");
    let listener = bed.control.registry.listener_mut(ids[1]).unwrap();
    listener.opens.options.max_segment = Some(500);
    let ends = [Effect::EndFlood(binding())];
    assert_eq!(bed.control.review_floods_of(ids[1], &answering()), ends);
}

#[test]
fn a_full_queue_is_the_filters_business_and_an_unknown_flow_the_listeners() {
    let mut bed = Bed::new();
    let id = listen(&mut bed, 1);
    syns(&mut bed, id, 1000);
    let listener = bed.control.registry.listener_mut(id).unwrap();
    for number in 10..15 {
        listener.opens.queue.handshake_started(SessionId(number));
        listener.opens.queue.handshake_done(SessionId(number));
    }
    let answers = bed.control.review_floods_of(id, &answering());
    let [Effect::AnswerFlood(_, flood)] = &answers[..] else {
        panic!("{answers:?}");
    };
    assert_ne!(flood.flags & Flood::FULL, 0);
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: ([10, 0, 0, 1], 80).into(),
        remote: ([10, 0, 0, 2], 4000).into(),
    };
    bed.control.note_exempt(id, Some(flow), bed.now);
    bed.control.note_exempt(id, None, bed.now);
    let answers = bed.control.review_floods_of(id, &answering());
    assert_eq!(answers, [Effect::EndFlood(binding())]);
    // The rows of flows are removed with the flood.
    let expected = [answers, vec![Effect::ForgetExempt(vec![flow])]];
    assert_eq!(look(&mut bed, 0), expected.concat());
}

/// The messages of a report wait for their turns: a review comes between them.
#[test]
fn flows_that_a_report_exempts_are_kept_until_the_flood_begins() {
    let mut bed = Bed::new();
    let id = listen(&mut bed, 1);
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: ([10, 0, 0, 1], 80).into(),
        remote: ([10, 0, 0, 2], 4000).into(),
    };
    bed.control.note_exempt(id, Some(flow), bed.now);
    assert_eq!(look(&mut bed, 0), []);
    let whose = (ChannelId(1), id);
    let begun = bed
        .control
        .on_flooded(whose, AcceptQueue::HasRoom, &answering(), bed.now);
    assert_eq!(begun.len(), 1);
    bed.now += EXPECTED_FOR;
    assert_eq!(look(&mut bed, 500), begun, "it goes on");
    let ends = look(&mut bed, 500);
    assert_eq!(ends[0], Effect::EndFlood(binding()));
    assert_eq!(ends[1..], [Effect::ForgetExempt(vec![flow])]);
    bed.control.on_flood_ended(&binding(), FloodSeen::default());

    bed.control.note_exempt(id, Some(flow), bed.now);
    bed.now += EXPECTED_FOR;
    let forgotten = [Effect::ForgetExempt(vec![flow])];
    assert_eq!(look(&mut bed, 500), forgotten, "no report has come");
    assert_eq!(look(&mut bed, 500), []);
}

#[test]
fn without_cookies_nobody_answers_by_them() {
    let mut bed = Bed::new();
    let id = listen(&mut bed, 1);
    let never = Answering {
        cookies: CookieUse::Never,
        ..answering()
    };
    let queue = AcceptQueue::HasRoom;
    assert_eq!(
        bed.control
            .on_flooded((ChannelId(1), id), queue, &never, bed.now),
        []
    );
    let effects = bed
        .control
        .on_flooded((ChannelId(1), id), queue, &answering(), bed.now);
    assert_eq!(effects.len(), 1);
    let now = bed.now + LOOK;
    let seen = |_: &BindingKey| FloodSeen {
        answered: 10_000,
        dropped: 0,
    };
    let ends = bed.control.look_at_floods(&never, now, seen);
    assert_eq!(ends, [Effect::EndFlood(binding())]);
}
