//! From handshakes to who accepts, by inputs and effects alone.

use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::BindingKey;

use super::*;
use crate::control::Input;
use crate::control::tests::{Bed, SLOT, USER};
use crate::session::Opening;

struct Listening {
    bed: Bed,
    listener: SessionId,
    next: u64,
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl Listening {
    fn new(backlog: u32) -> Listening {
        let mut bed = Bed::new();
        let listener = bed.listener(at("10.0.0.1:80"), backlog, || 1);
        Listening {
            bed,
            listener,
            next: 10,
        }
    }

    fn listener(&mut self) -> &mut Listener {
        let registry = &mut self.bed.control.registry;
        registry.listener_mut(self.listener).unwrap()
    }

    /// A SYN has come.
    fn handshake(&mut self) -> SessionId {
        self.next += 1;
        let number = self.next;
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: at("10.0.0.1:80"),
            remote: ([10, 0, 0, 2], number as u16).into(),
        };
        let life = Life::Handshake {
            deferred_until: None,
        };
        let control = &mut self.bed.control;
        let id = control.enter_for(self.listener, &flow, life, || number);
        let id = id.unwrap();
        self.bed.control.registry.steer(id, Holder::Server(SLOT));
        self.listener().opens.queue.handshake_started(id);
        id
    }

    /// An open within the host, as far as it goes at once.
    fn local_open(&mut self) -> (SessionId, SessionId, Effects) {
        self.next += 2;
        let number = self.next;
        let opening = Opening::new(Protocol::Tcp, at("10.0.0.1:0"), USER);
        let control = &mut self.bed.control;
        let opener = control.enter(None, opening, || number).unwrap();
        let to = (self.bed.channel, SLOT);
        let ends = (([10, 0, 0, 1], number as u16).into(), at("10.0.0.1:80"));
        let accepter = control.introduce(opener, to, self.listener, ends, || number - 1);
        let effects = self.bed.does(Input::LocalOpen(opener));
        (opener, accepter.unwrap(), effects)
    }

    fn announced(&self) -> [Effect; 2] {
        [
            Effect::ReviewFloods(self.listener),
            Effect::Announce(self.listener),
        ]
    }

    fn phase(&self, id: SessionId) -> SessionPhase {
        self.bed.control.registry.session(id).unwrap().phase()
    }
}

#[test]
fn a_full_accept_queue_leaves_connections_out_until_somebody_is_accepted() {
    let mut it = Listening::new(0);
    let [first, second] = [(); 2].map(|()| it.handshake());
    assert_eq!(it.bed.does(Input::Handshake(first)), it.announced());
    assert_eq!(it.phase(first), SessionPhase::Offered);
    assert_eq!(it.bed.does(Input::Handshake(second)), []);
    assert_eq!(it.bed.control.counters.accept_overflow, 1);
    it.listener().opens.queue.note_offered();
    let channel = it.bed.channel;
    let effects = it.bed.does(Input::Accepted(first, Some(channel)));
    assert_eq!(effects[1..], it.announced());
    assert_eq!(it.phase(second), SessionPhase::Offered);
    let session = it.bed.control.registry.session(first).unwrap();
    assert_eq!(session.acceptor, Some(channel));
}

#[test]
fn a_deferred_connection_is_offered_with_its_first_bytes_or_in_time() {
    for has_bytes in [true, false] {
        let mut it = Listening::new(4);
        it.listener().opens.options = HandshakeOptions {
            defer_accept_seconds: Some(3),
            ..HandshakeOptions::default()
        };
        let id = it.handshake();
        assert_eq!(it.bed.does(Input::Handshake(id)), []);
        let input = if has_bytes {
            Input::ReadableHandshake(id)
        } else {
            Input::Due(id, Deadline::Defer)
        };
        assert_eq!(it.bed.does(input), it.announced());
        let timer = crate::Timer::Session(id, Deadline::Defer);
        assert!(!it.bed.control.timers.is_armed(timer));
    }
}

#[test]
fn a_listener_that_ends_resets_whom_nobody_accepted_and_refuses_who_waits() {
    let mut it = Listening::new(0);
    let id = it.handshake();
    it.bed.does(Input::Handshake(id));
    let (opener, accepter, effects) = it.local_open();
    assert_eq!(effects, [], "the queue is full");
    let rows = BindingKey::of(Protocol::Tcp, at("10.0.0.1:80"), false);
    let expected = [
        Effect::CloseRows(rows.collect()),
        Effect::ReviewFloods(it.listener),
        Effect::ResetConnection(SLOT),
        Effect::Forget(accepter),
        Effect::FailOpen(opener, Errno::CONNREFUSED),
    ];
    assert_eq!(it.bed.does(Input::ListeningEnds(it.listener)), expected);
    assert_eq!(it.phase(it.listener), SessionPhase::Bound);
}

#[test]
fn an_open_within_the_host_is_accepted_when_its_opener_has_its_end() {
    let mut it = Listening::new(4);
    let (opener, accepter, effects) = it.local_open();
    assert_eq!(effects, [Effect::TellLocalOpener(opener)]);
    assert_eq!(it.phase(opener), SessionPhase::Connecting);
    let told = Input::LocalOpenerTold(opener, Ok(()));
    assert_eq!(it.bed.does(told), it.announced());
    assert_eq!(it.phase(opener), SessionPhase::Connected);
    assert_eq!(it.phase(accepter), SessionPhase::Offered);
}

#[test]
fn one_who_cannot_be_told_leaves_nothing_and_the_next_comes() {
    let mut it = Listening::new(0);
    let id = it.handshake();
    it.bed.does(Input::Handshake(id));
    let (first, its_accepter, _) = it.local_open();
    let (second, ..) = it.local_open();
    assert_eq!(it.bed.control.counters.syn_dropped, 2);
    it.listener().opens.queue.note_offered();
    let effects = it.bed.does(Input::Accepted(id, None));
    assert_eq!(effects[1..], [Effect::TellLocalOpener(first)]);
    let expected = [
        Effect::Forget(its_accepter),
        Effect::Forget(first),
        Effect::TellLocalOpener(second),
    ];
    let failed = Input::LocalOpenerTold(first, Err(Errno::NOBUFS));
    assert_eq!(it.bed.does(failed), expected);
}

#[test]
fn one_who_waits_for_too_long_or_goes_is_let_in_no_more() {
    for goes in [false, true] {
        let mut it = Listening::new(0);
        let id = it.handshake();
        it.bed.does(Input::Handshake(id));
        let (opener, accepter, _) = it.local_open();
        let input = if goes {
            Input::Forget(opener)
        } else {
            Input::Due(opener, Deadline::LocalConnect)
        };
        let effects = it.bed.does(input);
        assert_eq!(effects[0], Effect::Forget(accepter));
        let timed_out = Effect::FailOpen(opener, Errno::TIMEDOUT);
        assert_eq!(effects.contains(&timed_out), !goes);
        it.bed.does(Input::Forget(accepter));
        it.listener().opens.queue.note_offered();
        let effects = it.bed.does(Input::Accepted(id, None));
        assert_eq!(effects, [Effect::ReviewFloods(it.listener)]);
    }
}
