//! Segments of connections that were opened from leased ports, and of none.

use portolan_tcp::{Config, Connection, StateName};
use portolan_types::{Protocol, SessionId};
use portolan_wire::tcp::TcpFlags;

use super::*;
use crate::delegation::tests::{KeptFrames, now, routes};
use crate::packet::{Packet, Transport};
use crate::session::{Session, TcpSession};

const OWN: &str = "10.0.0.1";
const PEER: &str = "10.0.0.2";
const ROWS: Slot = Slot(77);

fn flow(port: u16) -> FlowKey {
    FlowKey {
        protocol: Protocol::Tcp,
        local: format!("{OWN}:{port}").parse().unwrap(),
        remote: format!("{PEER}:80").parse().unwrap(),
    }
}

/// Opens a connection in `stack`, and returns its SYN.
fn open(stack: &mut Stack, flow: FlowKey, routes: &Routes) -> (Slot, Vec<u8>) {
    let ports = (flow.local.port(), flow.remote.port());
    let connection = Connection::connect(&Config::default(), ports.0, ports.1, SeqNum(100), now());
    let session = TcpSession::new(SessionId(0), flow, connection);
    let slot = stack.insert(now(), Session::Tcp(Box::new(session)));
    let mut wire = KeptFrames::default();
    stack.output(now(), routes, &mut wire);
    (slot, wire.0.pop().expect("a SYN"))
}

fn record(frame: &[u8]) -> RecordHeader {
    RecordHeader {
        slot: ROWS.0,
        flags: RecordHeader::BINDING,
        length: frame.len() as u32,
        ..RecordHeader::default()
    }
}

#[test]
fn segments_find_their_connections_and_strangers_are_reset() {
    let (mut ports, mut stack) = (LeasedPorts::default(), Stack::new(now()));
    let (ours, theirs) = (routes(OWN, PEER), routes(PEER, OWN));
    let (slot, _) = open(&mut stack, flow(1000), &ours);
    ports.opened(slot, flow(1000));
    assert_eq!(ports.slot_of(&flow(1000)), Some(slot));

    // The peer opens the same connection at the same time, and another one.
    let mut peer = Stack::new(now());
    for (port, state) in [
        (1000, StateName::SynReceived),
        (1001, StateName::SynReceived),
    ] {
        let (_, syn) = open(&mut peer, flow(port).reversed(), &theirs);
        let met = ports.input(&mut stack, now(), &record(&syn), &syn);
        assert_eq!(met, DelegateInput::Done);
        assert_eq!(stack.tcp(slot).unwrap().connection.state(), state);
    }
    assert!(ports.has_answers());
    let mut wire = KeptFrames::default();
    ports.answer(&ours, &mut wire);
    let [answer] = &wire.0[..] else {
        panic!("{} answers", wire.0.len());
    };
    let answer = Packet::parse(answer, &record(answer)).unwrap();
    assert_eq!(answer.source, flow(1001).local);
    let Transport::Tcp { header, .. } = answer.transport else {
        panic!("no segment");
    };
    assert!(header.flags.contains(TcpFlags::RST));
}

#[test]
fn segments_of_a_registered_connection_follow_it_for_a_while() {
    let (mut ports, mut stack) = (LeasedPorts::default(), Stack::new(now()));
    let (slot, _) = open(&mut stack, flow(1000), &routes(OWN, PEER));
    ports.opened(slot, flow(1000));
    ports.registered(now(), slot, &flow(1000));
    stack.remove(slot);
    let mut peer = Stack::new(now());
    let (_, syn) = open(&mut peer, flow(1000).reversed(), &routes(PEER, OWN));
    let met = ports.input(&mut stack, now(), &record(&syn), &syn);
    assert_eq!(met, DelegateInput::Left);
    let later = now() + crate::flow_table::FOLLOW_FOR;
    let met = ports.input(&mut stack, later, &record(&syn), &syn);
    assert_eq!(met, DelegateInput::Done);
    assert_eq!(ports.slot_of(&flow(1000)), None);
}
