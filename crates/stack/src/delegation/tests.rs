//! A client and the holder of a delegated port, connected by hand.

use core::time::Duration;
use std::net::SocketAddr;

use portolan_proto::control::AcceptQueue;
use portolan_proto::metastate::{Address, Interface, Metastate, Neighbour, Route, RouteKind};
use portolan_tcp::Config;
use portolan_types::{Generation, MacAddr, Protocol, SeqNum};

use super::*;
use crate::flow_table::FOLLOW_FOR;
use crate::frame::Frame;

const LISTENER: Slot = Slot(99);
const SERVER: &str = "10.0.0.1:80";
const VNET: usize = 10;

#[derive(Default)]
pub(crate) struct KeptFrames(pub(crate) Vec<Vec<u8>>);

impl Wire for KeptFrames {
    fn transmit(&mut self, frame: &Frame<'_>) {
        let parts = [frame.head, frame.payload[0], frame.payload[1]];
        self.0.push(parts.concat().split_off(VNET));
    }

    fn is_full(&self) -> bool {
        false
    }
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

pub(crate) fn now() -> Instant {
    Instant::from_millis(1_000)
}

pub(crate) fn routes(own: &str, peer: &str) -> Routes {
    let (own, peer) = (own.parse().unwrap(), peer.parse().unwrap());
    let interface = Interface {
        index: 2,
        name: "eth0".into(),
        mac: MacAddr([2; 6]),
        mtu: 1500,
        up: true,
        managed: true,
    };
    let route = Route {
        destination: "10.0.0.0".parse().unwrap(),
        prefix: 24,
        gateway: None,
        interface: 2,
        source: Some(own),
        metric: 0,
        mtu: None,
        kind: RouteKind::Unicast,
    };
    let state = Metastate {
        obeys_policy: false,
        interfaces: vec![interface],
        addresses: vec![Address {
            interface: 2,
            address: own,
            prefix: 24,
        }],
        routes: vec![route],
        neighbours: vec![Neighbour {
            interface: 2,
            address: peer,
            mac: MacAddr([4; 6]),
        }],
    };
    Routes::new(2, state)
}

/// The process that performs the handshakes, and a host of clients.
struct Pair {
    delegation: Delegation,
    own: Stack,
    clients: Stack,
    /// The result for the last frame.
    met: Option<DelegateInput>,
}

fn delegation(backlog: u32) -> Delegation {
    let rules = Rules {
        config: Config::default(),
        cookies: CookieUse::WhenFull,
        syn_ack_retries: 5,
        secret: [7; 16],
    };
    Delegation::new(now(), rules, HandshakeOptions::default(), backlog)
}

impl Pair {
    fn new(backlog: u32) -> Pair {
        Pair {
            delegation: delegation(backlog),
            own: Stack::new(now()),
            clients: Stack::new(now()),
            met: None,
        }
    }

    /// Sends a client's SYN.
    fn connect(&mut self, port: u16) -> Slot {
        self.connect_by(port, SeqNum(u32::from(port)))
    }

    fn connect_by(&mut self, port: u16, isn: SeqNum) -> Slot {
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: SocketAddr::new("10.0.0.2".parse().unwrap(), port),
            remote: at(SERVER),
        };
        let connection = Connection::connect(
            &Config::default(),
            flow.local.port(),
            flow.remote.port(),
            isn,
            now(),
        );
        let session = TcpSession::new(SessionId(1), flow, connection);
        self.clients.insert(now(), Session::Tcp(Box::new(session)))
    }

    /// Delivers the clients' segments by the port's row.
    fn hear(&mut self) {
        let mut wire = KeptFrames::default();
        let theirs = routes("10.0.0.2", "10.0.0.1");
        self.clients.output(now(), &theirs, &mut wire);
        let record = RecordHeader {
            slot: LISTENER.0,
            flags: RecordHeader::BINDING,
            ..RecordHeader::default()
        };
        let own = routes("10.0.0.1", "10.0.0.2");
        for frame in wire.0 {
            let record = RecordHeader {
                length: frame.len() as u32,
                ..record
            };
            let with = (&mut self.own, &own);
            self.met = Some(self.delegation.input(with, now(), &record, &frame));
        }
        let changed: Vec<_> = self.own.changed().collect();
        for changed in changed {
            // Events of accepted connections are their sockets'.
            let _is_waiting = self.delegation.on_changed(&mut self.own, changed);
        }
    }

    /// Delivers the answers to those clients that still have the connection.
    fn answer(&mut self) {
        let mut wire = KeptFrames::default();
        let own = routes("10.0.0.1", "10.0.0.2");
        self.own.output(now(), &own, &mut wire);
        self.delegation.answer(&own, &mut wire);
        self.deliver(wire);
    }

    fn deliver(&mut self, wire: KeptFrames) {
        for frame in wire.0 {
            let packet = Packet::parse(&frame, &RecordHeader::default()).unwrap();
            let flow = packet.flow().unwrap();
            let to = self
                .clients
                .iter()
                .find_map(|(slot, session)| match session {
                    Session::Tcp(session) if session.flow == flow => Some(slot),
                    _ => None,
                });
            let record = RecordHeader {
                slot: to.unwrap().0,
                ..RecordHeader::default()
            };
            self.clients.input(now(), &record, &frame);
        }
    }

    fn open(&mut self, port: u16) -> Slot {
        let client = self.connect(port);
        self.hear();
        self.answer();
        self.hear();
        client
    }

    fn say(&mut self, client: Slot, words: &[u8]) {
        let session = self.clients.tcp(client).unwrap();
        session.connection.send(now(), words);
        self.clients.touch(client);
    }

    fn state(&mut self, client: Slot) -> StateName {
        self.clients.tcp(client).unwrap().connection.state()
    }

    fn count(&self, name: &str) -> u64 {
        let at = crate::counter_names().position(|(_, known, _)| known == name);
        self.own.counters()[at.unwrap()]
    }
}

#[test]
fn a_handshake_ends_in_the_queue_and_bytes_wait_with_it() {
    let mut pair = Pair::new(8);
    let client = pair.open(1000);
    assert_eq!(pair.state(client), StateName::Established);
    pair.say(client, b"early");
    pair.hear();
    let (_, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    assert_eq!(session.connection.state(), StateName::Established);
    assert_eq!(session.connection.readable(), 5);
    assert!(!pair.delegation.has_ready());
    assert_eq!(pair.count("delegated_handshakes"), 1);
}

/// The end of the first handshake is noticed only after the SYN of the second.
#[test]
fn a_peer_that_gives_up_a_handshake_and_begins_another_at_once_is_heard() {
    let mut pair = Pair::new(8);
    let first = pair.connect(1000);
    pair.hear();
    pair.answer();
    pair.clients.tcp(first).unwrap().connection.abort(now());
    pair.clients.touch(first);
    let second = pair.connect_by(1000, SeqNum(70_000));
    pair.hear();
    pair.clients.remove(first);
    pair.answer();
    pair.hear();
    assert_eq!(pair.state(second), StateName::Established);
    pair.say(second, b"heard");
    pair.hear();
    let (_, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    assert_eq!(session.connection.readable(), 5);
    assert_eq!(pair.count("delegated_handshakes"), 2);
}

/// A listener with `TCP_DEFER_ACCEPT`.
fn deferring() -> Pair {
    let mut pair = Pair::new(8);
    pair.delegation.opens.options.defer_accept_seconds = Some(3);
    pair
}

#[test]
fn a_deferred_connection_is_accepted_with_its_first_bytes() {
    let mut pair = deferring();
    let client = pair.open(1000);
    assert_eq!(pair.state(client), StateName::Established);
    assert!(!pair.delegation.has_ready());
    assert_eq!(pair.delegation.take_done().count(), 1, "its peer relies");
    pair.say(client, b"early");
    pair.hear();
    let (_, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    assert_eq!(session.connection.readable(), 5);
    assert_eq!(pair.delegation.take_done().count(), 0, "once");
}

#[test]
fn a_deferred_connection_is_accepted_without_bytes_after_its_time() {
    let mut pair = deferring();
    pair.open(1000);
    let until = now() + Duration::from_secs(3);
    assert_eq!(pair.delegation.deferred_until(), Some(until));
    pair.delegation
        .end_deferrals(now() + Duration::from_millis(2_999));
    assert!(!pair.delegation.has_ready());
    pair.delegation.end_deferrals(until);
    assert!(pair.delegation.has_ready());
    assert_eq!(pair.delegation.deferred_until(), None);
}

#[test]
fn connections_that_wait_for_their_first_bytes_no_more_take_no_memory() {
    let mut pair = deferring();
    let waiting = pair.open(1);
    for port in 2..1000 {
        let client = pair.open(port);
        pair.say(client, b"early");
        pair.hear();
        pair.delegation.accept(&mut pair.own, now()).unwrap();
    }
    assert!(pair.delegation.deferred.len() <= DEFERRED_LEAST);
    pair.say(waiting, b"late");
    pair.hear();
    assert!(pair.delegation.has_ready());
}

#[test]
fn a_deferred_connection_that_is_reset_is_forgotten() {
    let mut pair = deferring();
    let client = pair.open(1000);
    let until = pair.delegation.deferred_until().unwrap();
    pair.clients.tcp(client).unwrap().connection.abort(now());
    pair.clients.touch(client);
    pair.hear();
    assert!(pair.own.is_empty());
    pair.delegation.end_deferrals(until);
    assert!(!pair.delegation.has_ready());
}

#[test]
fn what_comes_by_the_ports_row_follows_an_accepted_connection() {
    let mut pair = Pair::new(8);
    let client = pair.open(1000);
    let (slot, mut session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    session.generation = Generation(5);
    let flow = session.flow;
    pair.own.insert_at(now(), slot, Session::Tcp(session));
    pair.delegation.registered(now(), slot, &flow);
    pair.say(client, b"late");
    let mut wire = KeptFrames::default();
    pair.clients
        .output(now(), &routes("10.0.0.2", "10.0.0.1"), &mut wire);
    let frame = wire.0.pop().unwrap();
    let record = RecordHeader {
        slot: LISTENER.0,
        ..RecordHeader::default()
    };
    let own = routes("10.0.0.1", "10.0.0.2");
    let input = |pair: &mut Pair, at| {
        let with = (&mut pair.own, &own);
        pair.delegation.input(with, at, &record, &frame)
    };
    assert_eq!(input(&mut pair, now()), DelegateInput::Done);
    assert_eq!(pair.own.tcp(slot).unwrap().connection.readable(), 4);

    pair.own.remove(slot);
    assert_eq!(
        input(&mut pair, now()),
        DelegateInput::Left,
        "it is the server's"
    );
    let later = now() + FOLLOW_FOR;
    assert_eq!(input(&mut pair, later), DelegateInput::Done);
    pair.answer();
    assert_eq!(pair.state(client), StateName::Closed, "nobody knows it");
}

#[test]
fn what_comes_for_a_connection_without_a_row_arrives_until_it_is_over() {
    let mut pair = Pair::new(8);
    let client = pair.open(1000);
    let (slot, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    let flow = session.flow;
    pair.own.insert_at(now(), slot, Session::Tcp(session));
    // However long it takes.
    pair.delegation.flows.forget_left(now() + 2 * FOLLOW_FOR);
    pair.say(client, b"late");
    pair.hear();
    assert_eq!(pair.own.tcp(slot).unwrap().connection.readable(), 4);
    pair.own.remove(slot);
    pair.delegation.forget_ended(Slot(slot.0 + 1), &flow);
    assert_eq!(
        pair.delegation.flows.flows().count(),
        1,
        "that is another one"
    );
    pair.delegation.forget_ended(slot, &flow);
    assert_eq!(pair.delegation.flows.flows().count(), 0);
}

/// The socket gets the session a moment after it was taken from the queue.
#[test]
fn what_comes_while_a_connection_is_accepted_is_not_lost() {
    let mut pair = Pair::new(8);
    let client = pair.open(1000);
    let (slot, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    pair.say(client, b"word");
    pair.hear();
    pair.own.insert_at(now(), slot, Session::Tcp(session));
    assert_eq!(pair.own.tcp(slot).unwrap().connection.readable(), 4);
    assert!(!pair.own.has_released());

    let other = pair.open(1001);
    let (slot, _) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    pair.say(other, b"word");
    pair.hear();
    let (_, third) = {
        pair.open(1002);
        pair.delegation.accept(&mut pair.own, now()).unwrap()
    };
    pair.own.insert_at(now(), slot, Session::Tcp(third));
    assert!(pair.own.has_released(), "of another flow");
}

/// Returns the slot of a connection of port 1000 in TIME-WAIT, whose peer has forgotten it.
fn in_time_wait(pair: &mut Pair) -> Slot {
    let client = pair.open(1000);
    let (slot, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    pair.own.insert_at(now(), slot, Session::Tcp(session));
    pair.own.tcp(slot).unwrap().connection.close(now());
    pair.own.touch(slot);
    pair.answer();
    pair.clients.tcp(client).unwrap().connection.close(now());
    pair.clients.touch(client);
    pair.hear();
    let state = pair.own.tcp(slot).unwrap().connection.state();
    assert_eq!(state, StateName::TimeWait);
    pair.answer();
    pair.clients.remove(client);
    slot
}

#[test]
fn a_syn_ends_a_time_wait() {
    let mut pair = Pair::new(8);
    let slot = in_time_wait(&mut pair);
    let second = pair.connect_by(1000, SeqNum(77_000));
    pair.hear();
    assert_eq!(pair.met, Some(DelegateInput::Reopened(slot)));
    pair.answer();
    pair.hear();
    assert_eq!(pair.state(second), StateName::Established);
}

/// Answers the SYN of the client at `slot` by a cookie, as the packet filter does in a flood.
fn answer_by_cookie(pair: &mut Pair, client: Slot) {
    let theirs = routes("10.0.0.2", "10.0.0.1");
    let mut syn = KeptFrames::default();
    pair.clients.output(now(), &theirs, &mut syn);
    let record = RecordHeader::default();
    let packet = Packet::parse(&syn.0[0], &record).unwrap();
    let syn = Segment::of(&packet).unwrap();
    let secret = Secret(pair.delegation.secret.0);
    let config = Config::default();
    let answer = portolan_tcp::cookie::syn_ack(&secret, &syn.flow, syn.header, &config, now());
    let session = pair.clients.tcp(client).unwrap();
    session.connection.on_segment(now(), &answer, &[]);
    assert_eq!(pair.state(client), StateName::Established);
    pair.clients.touch(client);
}

#[test]
fn a_cookie_ends_a_time_wait_that_the_filter_knows_nothing_of() {
    let mut pair = Pair::new(8);
    let slot = in_time_wait(&mut pair);
    let second = pair.connect_by(1000, SeqNum(77_000));
    answer_by_cookie(&mut pair, second);
    pair.say(second, b"hello");
    pair.hear();
    assert_eq!(pair.count("syn_cookies_accepted"), 1);
    assert!(pair.own.tcp(slot).is_some(), "it is its socket's");
    let (_, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    assert_eq!(session.connection.readable(), 5);
}

#[test]
fn a_late_acknowledgement_of_its_own_cookie_ends_no_time_wait() {
    let mut pair = Pair::new(8);
    let client = pair.connect(1000);
    answer_by_cookie(&mut pair, client);
    let theirs = routes("10.0.0.2", "10.0.0.1");
    let mut acknowledgement = KeptFrames::default();
    pair.clients.output(now(), &theirs, &mut acknowledgement);
    pair.clients.remove(client);
    let slot = in_time_wait(&mut pair);
    let frame = &acknowledgement.0[0];
    let record = RecordHeader {
        slot: LISTENER.0,
        flags: RecordHeader::BINDING,
        length: frame.len() as u32,
        ..RecordHeader::default()
    };
    let own = routes("10.0.0.1", "10.0.0.2");
    let with = (&mut pair.own, &own);
    let met = pair.delegation.input(with, now(), &record, frame);
    assert_eq!(met, DelegateInput::Done);
    assert_eq!(pair.count("syn_cookies_accepted"), 0);
    let state = pair.own.tcp(slot).unwrap().connection.state();
    assert_eq!(state, StateName::TimeWait);
}

/// A connection of a client, taken from its slot, that the server has learned of.
fn registered(pair: &mut Pair) -> (Slot, Slot, Box<TcpSession>) {
    let client = pair.open(1000);
    let (slot, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    pair.delegation.registered(now(), slot, &session.flow);
    (client, slot, session)
}

#[test]
fn the_server_decides_on_a_port_of_the_peer_that_is_used_again_soon() {
    let mut pair = Pair::new(8);
    let (first, slot, _) = registered(&mut pair);
    pair.own.remove(slot);
    pair.clients.remove(first);
    pair.connect(1000);
    pair.hear();
    assert_eq!(pair.met, Some(DelegateInput::Left), "its own SYN once more");
    let slots: Vec<Slot> = pair.clients.iter().map(|(slot, _)| slot).collect();
    for slot in slots {
        pair.clients.remove(slot);
    }

    pair.connect_by(1000, SeqNum(77_000));
    pair.hear();
    assert_eq!(pair.met, Some(DelegateInput::Left), "another one");
    pair.delegation.flows.forget_left(now() + FOLLOW_FOR);
    assert_eq!(pair.delegation.flows.flows().count(), 0);
}

#[test]
fn without_a_server_a_port_of_the_peer_that_is_used_again_soon_opens_a_connection() {
    let mut pair = Pair::new(8);
    let (first, slot, session) = registered(&mut pair);
    let own = routes("10.0.0.1", "10.0.0.2");
    let refused = |pair: &mut Pair, isn: u32| {
        let client = pair.connect_by(1000, SeqNum(isn));
        let mut wire = KeptFrames::default();
        let theirs = routes("10.0.0.2", "10.0.0.1");
        pair.clients.output(now(), &theirs, &mut wire);
        pair.clients.remove(client);
        let with = (&mut pair.own, &own);
        pair.delegation
            .input_without_server(with, now(), &wire.0[0])
    };
    pair.clients.remove(first);
    pair.own.insert_at(now(), slot, Session::Tcp(session));
    assert!(!refused(&mut pair, 77_000), "it is here");
    pair.own.remove(slot);
    assert!(!refused(&mut pair, 1000), "its own SYN once more");
    assert_eq!(pair.count("delegated_handshakes"), 1);
    assert!(refused(&mut pair, 77_000));
    assert_eq!(pair.count("delegated_handshakes"), 2);
    assert!(!refused(&mut pair, 78_000), "it is known");
}

#[test]
fn a_full_queue_answers_with_cookies_and_keeps_nothing() {
    let mut pair = Pair::new(1);
    pair.connect(1);
    pair.hear();
    let held = pair.own.iter().count();
    let client = pair.connect(2);
    pair.hear();
    assert_eq!(pair.own.iter().count(), held);
    assert_eq!(pair.count("syn_cookies_sent"), 1);
    pair.answer();
    pair.hear();
    assert_eq!(pair.state(client), StateName::Established);
    assert_eq!(pair.count("syn_cookies_accepted"), 1);
    assert!(pair.delegation.has_ready());
}

/// A busy listener is delegated while cookies are out that the server has sent.
#[test]
fn a_cookie_of_whoever_performed_the_handshakes_before_opens_a_connection() {
    let mut pair = Pair::new(1);
    pair.connect(1);
    pair.hear();
    let client = pair.connect(2);
    pair.hear();
    pair.answer();
    pair.delegation = delegation(1);
    pair.say(client, b"early");
    pair.hear();
    assert_eq!(pair.count("syn_cookies_accepted"), 1);
    pair.answer();
    assert_eq!(pair.state(client), StateName::Established);
}

#[test]
fn an_accept_queue_that_is_full_drops_syns() {
    let mut pair = Pair::new(0);
    pair.open(1);
    pair.connect(2);
    pair.hear();
    assert_eq!(pair.count("syns_dropped_queue_full"), 1);
}

/// Two handshakes complete while there is room for only one more connection.
fn crowd() -> (Pair, [Slot; 2]) {
    let mut pair = Pair::new(2);
    pair.open(1);
    pair.open(2);
    let clients = [pair.connect(3), pair.connect(4)];
    pair.hear();
    pair.answer();
    pair.hear();
    (pair, clients)
}

#[test]
fn a_handshake_that_ends_at_a_full_accept_queue_waits_for_room() {
    let (mut pair, clients) = crowd();
    pair.answer();
    for client in clients {
        assert_eq!(pair.state(client), StateName::Established, "none is reset");
    }
    assert_eq!(pair.count("accept_queue_overflows"), 1);
    for _ in 0..3 {
        assert!(pair.delegation.accept(&mut pair.own, now()).is_some());
    }
    assert!(pair.delegation.accept(&mut pair.own, now()).is_none());
    pair.say(clients[1], b"early");
    pair.hear();
    let (_, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    assert_eq!(session.connection.readable(), 5);
}

#[test]
fn a_handshake_at_a_full_accept_queue_repeats_its_answer() {
    let (mut pair, clients) = crowd();
    let session = pair.clients.tcp(clients[1]).unwrap();
    let heard = session.connection.tcp_info().segments_in;
    pair.own.expire(now() + Duration::from_secs(3));
    pair.answer();
    let session = pair.clients.tcp(clients[1]).unwrap();
    assert_eq!(session.connection.tcp_info().segments_in, heard + 1);
    assert!(pair.delegation.accept(&mut pair.own, now()).is_some());
    pair.hear();
    let accepted = std::iter::from_fn(|| pair.delegation.accept(&mut pair.own, now()));
    assert_eq!(accepted.count(), 3);
}

#[test]
fn a_cookie_that_finds_the_accept_queue_full_may_come_again() {
    let mut pair = Pair::new(1);
    pair.open(1);
    let clients = [pair.connect(2), pair.connect(3)];
    pair.hear();
    pair.answer();
    pair.hear();
    pair.answer();
    for client in clients {
        assert_eq!(pair.state(client), StateName::Established, "none is reset");
    }
    assert_eq!(pair.count("syn_cookies_accepted"), 0);
    assert!(pair.delegation.accept(&mut pair.own, now()).is_some());
    pair.say(clients[1], b"again");
    pair.hear();
    assert_eq!(pair.count("syn_cookies_accepted"), 1);
}

#[test]
fn who_has_acknowledged_a_cookie_is_connected_though_a_handshake_has_begun() {
    let mut pair = Pair::new(1);
    pair.connect(1);
    pair.hear();
    let client = pair.connect(2);
    pair.hear();
    let mut cookie = KeptFrames::default();
    let own = routes("10.0.0.1", "10.0.0.2");
    pair.delegation.answer(&own, &mut cookie);
    // There is room for the client's second SYN.
    pair.delegation.opens.queue.resize(8);
    pair.clients.expire(now() + Duration::from_secs(3));
    pair.hear();
    assert_eq!(pair.count("delegated_handshakes"), 2);
    pair.deliver(cookie);
    pair.say(client, b"early");
    pair.hear();
    assert_eq!(pair.count("syn_cookies_accepted"), 1);
    let (_, session) = pair.delegation.accept(&mut pair.own, now()).unwrap();
    assert_eq!(session.connection.readable(), 5);
    pair.answer();
    assert_eq!(pair.state(client), StateName::Established);
}

#[test]
fn what_is_surrendered_is_what_nobody_has_accepted() {
    let mut pair = Pair::new(8);
    pair.open(1);
    pair.open(2);
    pair.connect(3);
    pair.hear();
    pair.delegation.accept(&mut pair.own, now()).unwrap();
    let Pair {
        delegation,
        mut own,
        ..
    } = pair;
    let surrendered = delegation.surrender(&mut own);
    let states = surrendered.iter().map(|s| s.connection.state());
    let states: Vec<_> = states.collect();
    assert_eq!(states, [StateName::Established, StateName::SynReceived]);
    assert!(own.is_empty());
}

#[test]
fn who_waits_for_a_listener_that_closes_is_reset() {
    let mut pair = Pair::new(8);
    let client = pair.open(1);
    let delegation = std::mem::replace(&mut pair.delegation, Pair::new(8).delegation);
    let ending = delegation.abort(&mut pair.own, now());
    pair.answer();
    assert_eq!(pair.state(client), StateName::Closed);
    assert_eq!(ending.len(), 1);
}

#[test]
fn what_belongs_to_no_connection_is_reset() {
    let mut pair = Pair::new(8);
    let client = pair.open(1);
    let mut another = Pair::new(8);
    std::mem::swap(&mut another.clients, &mut pair.clients);
    another.say(client, b"hello?");
    another.hear();
    another.answer();
    assert_eq!(another.state(client), StateName::Closed);
}

/// A listener with a backlog of two, as many handshakes in progress, and a flood.
fn flooded() -> Pair {
    let mut pair = Pair::new(2);
    for port in 1..40 {
        pair.connect(port);
        pair.hear();
    }
    pair
}

fn spared(reports: &[FloodReport]) -> Vec<u16> {
    let flows = reports.iter().flat_map(|report| match report {
        FloodReport::ExemptFlows(flows) => flows.as_slice(),
        FloodReport::Flooded(_) => &[],
    });
    let mut ports: Vec<u16> = flows.map(|flow| flow.remote.port()).collect();
    ports.sort_unstable();
    ports
}

#[test]
fn a_flood_is_told_once_and_behind_the_flows_that_are_known() {
    let mut pair = flooded();
    let reports = pair.delegation.flood_reports();
    assert_eq!(spared(&reports), [1, 2]);
    let told = FloodReport::Flooded(AcceptQueue::HasRoom);
    assert_eq!(reports.last(), Some(&told));
    assert_eq!(reports.iter().filter(|report| **report == told).count(), 1);
    pair.connect(100);
    pair.hear();
    assert!(pair.delegation.flood_reports().is_empty());
}

#[test]
fn what_a_few_clients_do_is_no_flood() {
    let mut pair = Pair::new(1);
    for port in 1..10 {
        pair.open(port);
    }
    assert!(pair.delegation.flood_reports().is_empty());
}

#[test]
fn in_a_flood_connections_that_come_by_cookies_are_spared_and_a_full_queue_is_told() {
    let mut pair = flooded();
    pair.delegation.flood_reports();
    let last = pair.connect(1000);
    pair.hear();
    pair.answer();
    pair.hear();
    assert_eq!(pair.state(last), StateName::Established);
    let reports = pair.delegation.flood_reports();
    assert!(spared(&reports).contains(&3), "{reports:?}");
    let full = FloodReport::Flooded(AcceptQueue::Full);
    assert!(reports.contains(&full), "{reports:?}");
    pair.delegation.accept(&mut pair.own, now()).unwrap();
    let has_room = [FloodReport::Flooded(AcceptQueue::HasRoom)];
    assert_eq!(pair.delegation.flood_reports(), has_room);
}

#[test]
fn where_cookies_are_never_sent_no_flood_is_told_of() {
    let mut pair = Pair::new(2);
    pair.delegation.rules.cookies = CookieUse::Never;
    for port in 1..40 {
        pair.connect(port);
        pair.hear();
    }
    assert!(pair.delegation.flood_reports().is_empty());
}
