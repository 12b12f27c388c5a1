//! The protocol engine alone: one connection between two stacks in this process, without a kernel,
//! for counting instructions (`valgrind --tool=callgrind --toggle-collect='*count_send*'`). Prints
//! the number of segments that the counted steps processed.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use portolan_proto::filter::RecordHeader;
use portolan_proto::metastate::{Address, Interface, Metastate, Neighbour, Route, RouteKind};
use portolan_stack::{
    Frame, Packet, Routes, Sending, Session, Stack, TcpSession, Transport, UdpSession, Wire,
};
use portolan_tcp::{Config, Connection};
use portolan_types::{FlowKey, Generation, Instant, MacAddr, Protocol, SeqNum, SessionId, Slot};
use portolan_wire::vnet;

/// Bytes of payload in one segment on the wire, with timestamps.
const MSS: usize = 1448;

/// Duration of a step, and of the transmission after it.
const STEP: Duration = Duration::from_micros(5);

#[derive(Parser)]
struct Arguments {
    /// Segments to send.
    #[arg(default_value_t = 10_000)]
    segments: usize,
    /// Bytes per frame that the device receives and segments; received frames have the same size.
    #[arg(long, default_value_t = MSS, value_parser = size)]
    size: usize,
    /// Parse every frame in full, even if its headers are as expected.
    #[arg(long)]
    apart: bool,
}

fn size(text: &str) -> Result<usize, String> {
    let size = text.parse().map_err(|_| "not a number".to_owned())?;
    if (1..=65_160).contains(&size) {
        Ok(size)
    } else {
        Err("1 to 65160 bytes".to_owned())
    }
}

fn main() {
    let arguments = Arguments::parse();
    let mut pair = Pair::connected(arguments.size);
    if arguments.apart {
        pair.sender.stack.take_all_apart();
        pair.receiver.stack.take_all_apart();
    }
    while pair.sent < arguments.segments {
        pair.exchange();
    }
    let turns = arguments.segments;
    Pair::connected(1).take_turns(turns);
    let datagrams = arguments.segments;
    take_datagrams(datagrams, arguments.size.min(MSS), arguments.apart);
    println!(
        "{{\"sent\":{},\"received\":{},\"acknowledgements\":{},\"turns\":{turns},\"datagrams\":{datagrams}}}",
        pair.sent, pair.received, pair.acknowledgements
    );
}

/// Frames in flight, in buffers that are reused: the function of a device, without allocations.
#[derive(Default)]
struct Line {
    buffers: Vec<Vec<u8>>,
    filled: usize,
}

impl Line {
    fn frames(&self) -> &[Vec<u8>] {
        &self.buffers[..self.filled]
    }

    fn clear(&mut self) {
        self.filled = 0;
    }
}

impl Wire for Line {
    fn transmit(&mut self, frame: &Frame<'_>) {
        if self.filled == self.buffers.len() {
            self.buffers.push(Vec::new());
        }
        let buffer = &mut self.buffers[self.filled];
        buffer.clear();
        buffer.extend_from_slice(frame.head);
        frame
            .payload
            .iter()
            .for_each(|piece| buffer.extend_from_slice(piece));
        self.filled += 1;
    }

    fn is_full(&self) -> bool {
        false
    }
}

struct End {
    stack: Stack,
    slot: Slot,
    routes: Routes,
}

impl End {
    fn new(own: u8, peer: u8, now: Instant) -> End {
        End {
            stack: Stack::new(now),
            slot: Slot(0),
            routes: routes(own, peer),
        }
    }

    fn open(&mut self, own: u8, peer: u8, connection: Connection, now: Instant) {
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: endpoint(own),
            remote: endpoint(peer),
        };
        let session = TcpSession::new(SessionId(1), flow, connection);
        self.slot = self.stack.insert(now, Session::Tcp(Box::new(session)));
    }

    /// Processes one frame without sending a response.
    fn input(&mut self, now: Instant, frame: &[u8]) {
        let (record, frame) = opened(self.slot, frame);
        self.stack.input(now, &record, frame);
    }

    fn write(&mut self, now: Instant, data: &[u8]) {
        if let Some(session) = self.stack.tcp(self.slot) {
            session.connection.send(now, data);
            self.stack.touch(self.slot);
        }
    }

    fn read(&mut self, now: Instant, room: &mut [u8]) -> usize {
        let Some(session) = self.stack.tcp(self.slot) else {
            return 0;
        };
        let count = session.connection.recv(now, room);
        if session.connection.has_output() {
            self.stack.touch(self.slot);
        }
        count
    }

    fn output(&mut self, now: Instant, line: &mut Line) {
        self.stack.output(now, &self.routes, line);
        self.stack.changed().for_each(drop);
    }
}

struct Pair {
    now: Instant,
    sender: End,
    receiver: End,
    data: Vec<u8>,
    sent: usize,
    received: usize,
    acknowledgements: usize,
    segments: Line,
    answers: Line,
}

impl Pair {
    fn connected(size: usize) -> Pair {
        let now = Instant::from_millis(1_000);
        let config = Config {
            gso_max: size,
            send_buffer: 1 << 20,
            ..Config::default()
        };
        let (mut sender, mut receiver) = (End::new(1, 2, now), End::new(2, 1, now));
        let syn = Connection::connect(&config, 1, 2, SeqNum(1), now);
        sender.open(1, 2, syn, now);
        let mut line = Line::default();
        sender.output(now, &mut line);
        let (record, frame) = opened(Slot(0), &line.frames()[0]);
        let Ok(Packet {
            transport: Transport::Tcp { header, .. },
            ..
        }) = Packet::parse(frame, &record)
        else {
            panic!("the first frame is a SYN");
        };
        receiver.open(
            2,
            1,
            Connection::accept(&config, &header, SeqNum(9), now),
            now,
        );
        let mut pair = Pair {
            now,
            sender,
            receiver,
            data: vec![b'p'; size],
            sent: 0,
            received: 0,
            acknowledgements: 0,
            segments: Line::default(),
            answers: Line::default(),
        };
        let mut answer = Line::default();
        pair.receiver.output(now, &mut answer);
        pair.sender.input(now, &answer.frames()[0]);
        let mut last = Line::default();
        pair.sender.output(now, &mut last);
        pair.receiver.input(now, &last.frames()[0]);
        pair
    }

    /// Sends as many segments as the window admits, one by one, and processes the acknowledgements.
    fn exchange(&mut self) {
        self.answers.clear();
        loop {
            self.now += STEP;
            self.segments.clear();
            count_send(&mut self.sender, self.now, &self.data, &mut self.segments);
            if self.segments.frames().is_empty() {
                break;
            }
            for frame in self.segments.frames() {
                self.sent += 1;
                self.received += 1;
                let (room, answers) = (&mut self.data, &mut self.answers);
                count_receive(&mut self.receiver, self.now, frame, room, answers);
            }
        }
        if self.answers.frames().is_empty() {
            // The acknowledgement of a single segment is delayed.
            self.now += Duration::from_millis(40);
            self.receiver.stack.expire(self.now);
            self.receiver.output(self.now, &mut self.answers);
        }
        for frame in self.answers.frames() {
            self.acknowledgements += 1;
            self.now += STEP;
            count_acknowledgement(&mut self.sender, self.now, frame);
        }
    }

    /// Sends a byte back and forth.
    fn take_turns(&mut self, turns: usize) {
        let (mut there, mut back) = (Line::default(), Line::default());
        let mut room = [0; 1];
        self.now += STEP;
        self.sender.write(self.now, &room);
        self.sender.output(self.now, &mut there);
        for _ in 0..turns {
            self.now += STEP;
            let ball = there.frames().last().expect("one answer for each");
            count_turn(&mut self.receiver, self.now, ball, &mut room, &mut back);
            there.clear();
            core::mem::swap(&mut there, &mut back);
            core::mem::swap(&mut self.sender, &mut self.receiver);
        }
    }
}

/// Sends datagrams between two connected sockets.
fn take_datagrams(count: usize, size: usize, apart: bool) {
    let now = Instant::from_millis(1_000);
    let open = |own, peer| {
        let mut end = End::new(own, peer, now);
        if apart {
            end.stack.take_all_apart();
        }
        let (local, remote) = (endpoint(own), Some(endpoint(peer)));
        let udp = UdpSession::new(SessionId(1), local, remote, Generation(0), 1 << 20);
        end.slot = end.stack.insert(now, Session::Udp(Box::new(udp)));
        end
    };
    let (mut from, mut to) = (open(1, 2), open(2, 1));
    let (mut line, data) = (Line::default(), vec![b'p'; size]);
    for _ in 0..count {
        line.clear();
        let sending = Sending::default();
        let End {
            stack,
            slot,
            routes,
        } = &mut from;
        let sent = stack.send_datagram(*slot, None, [&data, &[]], &sending, routes, &mut line);
        assert_eq!(sent, Ok(size));
        count_datagram(&mut to, now, &line.frames()[0]);
    }
}

/// The input of a datagram, and the application's read.
#[inline(never)]
fn count_datagram(end: &mut End, now: Instant, frame: &[u8]) {
    end.input(now, frame);
    end.stack.changed().for_each(drop);
    let read = end.stack.udp(end.slot).and_then(UdpSession::receive);
    assert!(read.is_some());
}

/// One side of a round trip, with the calls that a program makes: a segment arrives and is read, and
/// the response is written.
#[inline(never)]
fn count_turn(end: &mut End, now: Instant, frame: &[u8], room: &mut [u8], line: &mut Line) {
    end.input(now, frame);
    end.stack.expire(now);
    let read = end.read(now, room);
    end.output(now, line);
    end.stack.expire(now);
    end.write(now, &room[..read]);
    end.output(now, line);
}

/// The application's write, the engine's segment, and its headers.
#[inline(never)]
fn count_send(end: &mut End, now: Instant, data: &[u8], line: &mut Line) {
    end.write(now, data);
    end.output(now, line);
}

/// A segment in order, the application's read, and the acknowledgement if one is due.
#[inline(never)]
fn count_receive(end: &mut End, now: Instant, frame: &[u8], room: &mut [u8], line: &mut Line) {
    end.input(now, frame);
    end.read(now, room);
    end.output(now, line);
}

#[inline(never)]
fn count_acknowledgement(end: &mut End, now: Instant, frame: &[u8]) {
    end.input(now, frame);
    end.stack.changed().for_each(drop);
}

/// Returns a frame as the packet filter delivers it: with a record header instead of the virtio-net header.
fn opened(slot: Slot, frame: &[u8]) -> (RecordHeader, &[u8]) {
    let gso_size = vnet::VnetHeader::parse(frame)
        .ok()
        .and_then(|(header, _)| header.gso())
        .map_or(0, |(_, size)| size);
    let record = RecordHeader {
        slot: slot.0,
        gso_size,
        ..RecordHeader::default()
    };
    (record, &frame[vnet::HEADER_LEN..])
}

fn endpoint(host: u8) -> SocketAddr {
    ([10, 0, 0, host], host.into()).into()
}

fn routes(own: u8, peer: u8) -> Routes {
    let mac = |host| MacAddr([2, 0, 0, 0, 0, host]);
    let interface = Interface {
        index: 2,
        name: "wire".into(),
        mac: mac(own),
        mtu: 1500,
        up: true,
        managed: true,
    };
    let route = Route {
        destination: [10, 0, 0, 0].into(),
        prefix: 24,
        gateway: None,
        interface: 2,
        source: Some(endpoint(own).ip()),
        metric: 0,
        mtu: None,
        kind: RouteKind::Unicast,
    };
    let neighbour = Neighbour {
        interface: 2,
        address: endpoint(peer).ip(),
        mac: mac(peer),
    };
    let address = Address {
        interface: 2,
        address: endpoint(own).ip(),
        prefix: 24,
    };
    let state = Metastate {
        obeys_policy: false,
        interfaces: vec![interface],
        addresses: vec![address],
        routes: vec![route],
        neighbours: vec![neighbour],
    };
    Routes::new(2, state)
}
