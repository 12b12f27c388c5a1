//! A host: two holders of sessions, like a program and the server, and the filter before them.

use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use portolan_proto::filter::RecordHeader;
use portolan_proto::metastate::RouteKind::Unicast;
use portolan_proto::metastate::{Address, Interface, Metastate, Neighbour, Route};
use portolan_stack::{
    Frame, Input, IpOptions, Packet, Routes, Session, Stack, TcpSession, Transport, Wire,
    send_segment,
};
use portolan_tcp::{Config, Connection, reset_for};
use portolan_types::{FlowKey, Generation, Instant, MacAddr, Protocol, SeqNum, SessionId, Slot};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

use crate::device::{Flying, cut};

const LINK_MTU: u32 = 1500;

/// A row of the filter's table.
#[derive(Clone, Copy, Debug)]
struct Row {
    holder: usize,
    slot: Slot,
    generation: Generation,
}

pub(crate) struct Host {
    pub flow: FlowKey,
    pub config: Config,
    holders: [Stack; 2],
    row: Option<Row>,
    generation: u32,
    iss: SeqNum,
    routes: Routes,
    /// Frames that the filter has delivered to a holder that has not polled yet.
    ring: Vec<(usize, RecordHeader, Vec<u8>)>,
    /// Packets in flight to the other host, in sending order.
    pub flying: Vec<Flying>,
    /// Frames that reached a holder that had given the session away.
    pub strays: u32,
    pub written: u64,
    pub read: u64,
    /// The connection existed and is over.
    pub ended: bool,
    /// Right window edges: offered by this host, and offered to it.
    offered: Option<SeqNum>,
    pub allowed: Option<SeqNum>,
    /// Window scale shift of its segments.
    pub scale: u8,
}

/// A wire that is never full.
#[derive(Default)]
struct Card(Vec<Flying>);

impl Wire for Card {
    fn transmit(&mut self, frame: &Frame<'_>) {
        let frame = [frame.head, frame.payload[0], frame.payload[1]].concat();
        self.0.extend(cut(&frame));
    }

    fn is_full(&self) -> bool {
        false
    }
}

impl Host {
    pub(crate) fn new(now: Instant, local: SocketAddr, remote: SocketAddr, config: Config) -> Host {
        Host {
            flow: FlowKey {
                protocol: Protocol::Tcp,
                local,
                remote,
            },
            config,
            holders: [Stack::new(now), Stack::new(now)],
            row: None,
            generation: 0,
            iss: SeqNum(0) + u32::from(local.port()).wrapping_mul(0x9e37_79b9),
            routes: routes(local.ip(), remote.ip()),
            ring: Vec::new(),
            flying: Vec::new(),
            strays: 0,
            written: 0,
            read: 0,
            ended: false,
            offered: None,
            allowed: None,
            scale: 0,
        }
    }

    // ---- sessions ----

    pub(crate) fn connect(&mut self, now: Instant) {
        let (local, remote) = (self.flow.local.port(), self.flow.remote.port());
        let connection = Connection::connect(&self.config, local, remote, self.iss, now);
        let session = TcpSession::new(SessionId(1), self.flow, connection);
        self.hold(now, 0, session);
    }

    fn hold(&mut self, now: Instant, holder: usize, mut session: TcpSession) {
        self.generation += 1;
        let generation = Generation(self.generation);
        session.generation = generation;
        let slot = self.holders[holder].insert(now, Session::Tcp(Box::new(session)));
        self.row = Some(Row {
            holder,
            slot,
            generation,
        });
    }

    /// The session migrates to the other holder by capsule.
    pub(crate) fn move_session(&mut self, now: Instant) {
        let Some(row) = self.row.take() else { return };
        let Some(Session::Tcp(session)) = self.holders[row.holder].remove(row.slot) else {
            panic!("the row names no session: {row:?}");
        };
        let mut session = at_the_next(&session);
        // Its buffers begin at their heads now, unlike the original's.
        let capsule = session.to_capsule();
        assert_eq!(
            at_the_next(&session).to_capsule(),
            capsule,
            "what was read differs"
        );
        // Every other time the received bytes travel beside the capsule.
        if self.generation.is_multiple_of(2) {
            set_aside(&mut session);
            session = at_the_next(&session);
        }
        self.hold(now, 1 - row.holder, session);
    }

    pub(crate) fn connection(&mut self) -> Option<&mut Connection> {
        let row = self.row?;
        let session = self.holders[row.holder].tcp(row.slot)?;
        Some(&mut session.connection)
    }

    pub(crate) fn touch(&mut self) {
        if let Some(row) = self.row {
            self.holders[row.holder].touch(row.slot);
        }
    }

    // ---- frames ----

    /// A frame arrives: the filter assigns it to the holder of the session.
    pub(crate) fn filter(&mut self, now: Instant, frame: Vec<u8>, flags: u16) {
        let Some(row) = self.row else {
            return self.refuse_or_accept(now, &frame, flags);
        };
        let record = RecordHeader {
            length: frame.len() as u32,
            slot: row.slot.0,
            generation: row.generation.0,
            flags,
            ..RecordHeader::default()
        };
        self.ring.push((row.holder, record, frame));
    }

    /// Both holders process what the filter delivered to them.
    pub(crate) fn poll(&mut self, now: Instant) {
        for (holder, record, frame) in core::mem::take(&mut self.ring) {
            let input = self.holders[holder].input(now, &record, &frame);
            if matches!(input, Input::Unclaimed(_)) {
                // The server passes it through the filter again.
                self.strays += 1;
                self.filter(now, frame, record.flags);
            }
        }
        self.output(now);
    }

    /// A frame for no session here.
    fn refuse_or_accept(&mut self, now: Instant, frame: &[u8], flags: u16) {
        let record = RecordHeader {
            flags,
            ..RecordHeader::default()
        };
        let Ok(packet) = Packet::parse(frame, &record) else {
            return;
        };
        let flow = packet.flow();
        let Transport::Tcp {
            header, payload, ..
        } = packet.transport
        else {
            return;
        };
        if flow != Some(self.flow) {
            return;
        }
        if opens(&header) && !self.ended {
            let connection = Connection::accept(&self.config, &header, self.iss, now);
            let session = TcpSession::new(SessionId(1), self.flow, connection);
            self.hold(now, 1, session);
        } else if let Some(reset) = reset_for(&header, payload.len()) {
            let mut card = Card::default();
            let ip = IpOptions::default();
            send_segment(&self.flow, ip, &reset, &self.routes, &mut card);
            self.flying.extend(card.0);
        }
    }

    pub(crate) fn output(&mut self, now: Instant) {
        let mut card = Card::default();
        for holder in &mut self.holders {
            holder.output(now, &self.routes, &mut card);
            assert!(!holder.has_output(), "output that never ends");
            holder.changed().for_each(drop);
        }
        self.note_sent(&card.0);
        self.flying.extend(card.0);
        self.bury();
    }

    fn bury(&mut self) {
        let over = self.connection().is_some_and(|c| c.is_closed());
        if let Some(row) = self.row.filter(|_| over) {
            self.holders[row.holder].remove(row.slot);
            self.row = None;
            self.ended = true;
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.holders.iter().filter_map(Stack::deadline).min()
    }

    pub(crate) fn expire(&mut self, now: Instant) {
        for holder in &mut self.holders {
            holder.expire(now);
        }
        self.output(now);
    }

    // ---- what an observer sees ----

    fn note_sent(&mut self, packets: &[Flying]) {
        let scale = self.connection().map(|c| c.tcp_info().receive_scale);
        for packet in packets {
            let header = &packet.header;
            if header.flags.contains(TcpFlags::RST) || !header.flags.contains(TcpFlags::ACK) {
                continue;
            }
            let syn = header.flags.contains(TcpFlags::SYN);
            self.scale = if syn { 0 } else { scale.unwrap_or(self.scale) };
            let edge = header.ack + (u32::from(header.window) << self.scale);
            if let Some(before) = self.offered.filter(|_| !syn) {
                let granule = (1 << self.scale) - 1;
                assert!((edge + granule).at_or_after(before), "the window shrank");
            }
            self.offered = Some(self.offered.map_or(edge, |before| before.max(edge)));
            let end = header.seq + packet.payload as u32;
            let within = self.allowed.is_none_or(|allowed| end.at_or_before(allowed));
            assert!(
                packet.payload == 0 || within,
                "{header:?} exceeds the window"
            );
        }
    }

    /// A genuine packet of the peer arrived undamaged.
    pub(crate) fn note_arrived(&mut self, scale: u8, packet: &Flying) {
        let header = &packet.header;
        if header.flags.contains(TcpFlags::RST) || !header.flags.contains(TcpFlags::ACK) {
            return;
        }
        let syn = header.flags.contains(TcpFlags::SYN);
        let scale = if syn { 0 } else { scale };
        let edge = header.ack + (u32::from(header.window) << scale);
        self.allowed = Some(self.allowed.map_or(edge, |before| before.max(edge)));
    }

    /// The stream of this host, in which misplaced bytes are detectable.
    pub(crate) fn byte(&self, position: u64) -> u8 {
        let salt = u64::from(self.flow.local.port());
        ((position ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    pub(crate) fn check(&mut self) {
        if let Some(connection) = self.connection() {
            assert_eq!(connection.validate(), Ok(()), "{connection:?}");
        }
    }
}

fn opens(header: &TcpHeader) -> bool {
    let congestion = TcpFlags::ECE.with(TcpFlags::CWR).0;
    header.flags.0 & !congestion == TcpFlags::SYN.0
}

fn routes(own: IpAddr, peer: IpAddr) -> Routes {
    let mac = |address: IpAddr| MacAddr([2, 0, 0, 0, 0, u8::from(address == own)]);
    let prefix = if own.is_ipv4() { 24 } else { 64 };
    let interface = Interface {
        index: 2,
        name: "eth0".into(),
        mac: mac(own),
        mtu: LINK_MTU,
        up: true,
        managed: true,
    };
    let route = Route {
        destination: own,
        prefix,
        gateway: None,
        interface: 2,
        source: Some(own),
        metric: 0,
        mtu: None,
        kind: Unicast,
    };
    let neighbour = Neighbour {
        interface: 2,
        address: peer,
        mac: mac(peer),
    };
    let address = Address {
        interface: 2,
        address: own,
        prefix,
    };
    Routes::new(
        2,
        Metastate {
            obeys_policy: false,
            interfaces: vec![interface],
            addresses: vec![address],
            routes: vec![route],
            neighbours: vec![neighbour],
        },
    )
}

fn set_aside(session: &mut TcpSession) {
    let mut image = vec![0; session.connection.arrived()];
    for (at, bytes) in session.connection.arrived_pieces() {
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }
    assert!(session.connection.set_aside(Arc::new(image)), "it fits");
}

/// The session as another process receives it, with the memory that holds bytes of it.
fn at_the_next(session: &TcpSession) -> TcpSession {
    let prefix = session.connection.handoff().cloned();
    TcpSession::from_parts(&session.to_capsule(), prefix).expect("a genuine capsule")
}
