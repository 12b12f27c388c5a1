//! Two connections, a link in each direction, and a clock.

use core::time::Duration;

use portolan_tcp::{Config, Connection, Events, Segment, capsule};
use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::TcpFlags;

use crate::START;
use crate::link::{Link, Packet};
use crate::random::Random;

/// Largest payload that GRO merges.
const GRO_MAX: usize = 65_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    A,
    B,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }
}

/// A host: its connection, if there is one, and its handling of packets.
#[derive(Debug)]
pub struct End {
    pub config: Config,
    pub connection: Option<Connection>,
    /// Whether packets that arrive together are merged.
    pub gro: bool,
    /// All events since the test last read them.
    pub events: Events,
    /// Whether the host accepts a SYN while it has no connection.
    pub listens: bool,
}

/// Two hosts and the links between them.
#[derive(Debug)]
pub struct Pair {
    pub now: Instant,
    pub a: End,
    pub b: End,
    pub a_to_b: Link,
    pub b_to_a: Link,
    /// Number of steps per thousand in which a connection is encoded and decoded.
    pub migration: u32,
    pub migrations: u64,
    random: Random,
    /// A line for each packet sent, if set.
    pub trace: Option<Vec<String>>,
}

/// The result of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub time: Duration,
    pub bytes: usize,
}

pub const PORT_A: u16 = 1000;
pub const PORT_B: u16 = 2000;

impl End {
    fn new(config: &Config) -> End {
        End {
            config: config.clone(),
            connection: None,
            gro: true,
            events: Events::NONE,
            listens: false,
        }
    }

    /// Returns the connection, which the test must have opened.
    pub fn tcp(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("the test opened this end")
    }
}

impl Pair {
    pub fn new(seed: u64, delay: Duration, config: &Config) -> Pair {
        let mut random = Random::new(seed);
        Pair {
            now: START,
            a: End::new(config),
            b: End::new(config),
            a_to_b: Link::new(random.draw(), delay),
            b_to_a: Link::new(random.draw(), delay),
            migration: 0,
            migrations: 0,
            random,
            trace: None,
        }
    }

    /// Applies `change` to both directions.
    pub fn links(&mut self, change: impl Fn(&mut Link)) {
        change(&mut self.a_to_b);
        change(&mut self.b_to_a);
    }

    pub fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    /// Starts an active open.
    pub fn connect(&mut self, side: Side) {
        let (local, remote) = ports(side);
        let iss = SeqNum(self.random.draw() as u32);
        let now = self.now;
        let end = self.end(side);
        end.connection = Some(Connection::connect(&end.config, local, remote, iss, now));
    }

    /// A opens, B listens, until both are established or a minute has passed.
    pub fn establish(&mut self) {
        self.b.listens = true;
        self.connect(Side::A);
        let until = self.now + Duration::from_secs(60);
        self.run_while(until, |pair| !pair.both_synchronized());
        assert!(self.both_synchronized(), "the handshake failed");
    }

    fn both_synchronized(&mut self) -> bool {
        use portolan_tcp::StateName::{SynReceived, SynSent};
        [&self.a, &self.b].iter().all(|end| {
            end.connection
                .as_ref()
                .is_some_and(|c| !matches!(c.state(), SynSent | SynReceived))
        })
    }

    /// Sends what is due, and advances the clock to the next event and processes it.
    /// Returns false if there are no further events.
    pub fn step(&mut self) -> bool {
        self.flush(Side::A);
        self.flush(Side::B);
        let Some(next) = self.next_instant() else {
            return false;
        };
        self.now = self.now.max(next);
        self.migrate();
        self.deliver(Side::A);
        self.deliver(Side::B);
        for side in [Side::A, Side::B] {
            let now = self.now;
            if let Some(connection) = &mut self.end(side).connection
                && connection.deadline().is_some_and(|at| at <= now)
            {
                connection.on_timer(now);
            }
        }
        self.flush(Side::A);
        self.flush(Side::B);
        self.check();
        true
    }

    /// Steps until `until`, or until `going` returns false.
    pub fn run_while(&mut self, until: Instant, mut going: impl FnMut(&mut Pair) -> bool) {
        while self.now < until && going(self) {
            if !self.step() {
                break;
            }
        }
    }

    pub fn run_for(&mut self, time: Duration) {
        let until = self.now + time;
        self.flush(Side::A);
        self.flush(Side::B);
        while self.next_instant().is_some_and(|at| at <= until) {
            self.step();
        }
        self.now = until;
        self.flush(Side::A);
        self.flush(Side::B);
    }

    /// Sends `data` from `from` to the other side and checks that it arrives unchanged.
    pub fn transfer(&mut self, from: Side, data: &[u8], limit: Duration) -> Transfer {
        let start = self.now;
        let until = start + limit;
        let (mut sent, mut received) = (0, Vec::with_capacity(data.len()));
        let mut chunk = vec![0; 1 << 20];
        while received.len() < data.len() {
            let now = self.now;
            sent += self.end(from).tcp().send(now, &data[sent..]);
            assert!(self.step(), "stuck at {} of {}", received.len(), data.len());
            let now = self.now;
            let count = self.end(from.other()).tcp().recv(now, &mut chunk);
            received.extend_from_slice(&chunk[..count]);
            assert!(
                self.now < until,
                "{} of {} in {limit:?}",
                received.len(),
                data.len()
            );
        }
        assert!(received == data, "the stream was damaged");
        Transfer {
            time: self.now - start,
            bytes: data.len(),
        }
    }

    /// Delivers a packet to `side` now.
    pub fn inject(&mut self, side: Side, packet: &Packet) {
        let now = self.now;
        if let Some(connection) = &mut self.end(side).connection {
            connection.on_marked_segment(now, packet.codepoint, &packet.header, &packet.payload);
        }
        self.collect(side);
    }

    /// Sends what `side` has due.
    pub fn flush(&mut self, side: Side) {
        let now = self.now;
        let (end, link) = match side {
            Side::A => (&mut self.a, &mut self.a_to_b),
            Side::B => (&mut self.b, &mut self.b_to_a),
        };
        let Some(connection) = &mut end.connection else {
            return;
        };
        while let Some(segment) = connection.transmit(now) {
            for packet in cut(&segment) {
                let mtu = usize::from(end.config.mss);
                assert!(
                    packet.payload.len() + option_bytes(&packet) <= mtu,
                    "{packet:?}"
                );
                if let Some(trace) = &mut self.trace {
                    trace.push(describe(side, now - START, &packet));
                }
                link.send(now, packet);
            }
        }
        self.collect(side);
    }

    fn collect(&mut self, side: Side) {
        let end = self.end(side);
        if let Some(connection) = &mut end.connection {
            end.events = end.events | connection.events();
        }
    }

    fn next_instant(&self) -> Option<Instant> {
        let deadline = |end: &End| end.connection.as_ref().and_then(Connection::deadline);
        [
            self.a_to_b.next_arrival(),
            self.b_to_a.next_arrival(),
            deadline(&self.a),
            deadline(&self.b),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn deliver(&mut self, side: Side) {
        let now = self.now;
        let link = match side {
            Side::A => &mut self.b_to_a,
            Side::B => &mut self.a_to_b,
        };
        let mut arrived = Vec::new();
        while let Some(packet) = link.receive(now) {
            arrived.push(packet);
        }
        if self.end(side).gro {
            arrived = merge(arrived);
        }
        for packet in &arrived {
            self.accept(side, packet);
            self.inject(side, packet);
        }
    }

    /// Opens a connection for a SYN that a listener received.
    fn accept(&mut self, side: Side, packet: &Packet) {
        let (now, iss) = (self.now, SeqNum(self.random.draw() as u32));
        let end = self.end(side);
        let asks = TcpFlags::ECE.0 | TcpFlags::CWR.0;
        let syn = packet.header.flags.0 & !asks == TcpFlags::SYN.0;
        if syn && end.listens && end.connection.is_none() {
            end.connection = Some(Connection::accept(&end.config, &packet.header, iss, now));
        }
    }

    fn migrate(&mut self) {
        for side in [Side::A, Side::B] {
            if !self.random.chance(self.migration) {
                continue;
            }
            self.migrations += 1;
            if let Some(connection) = &mut self.end(side).connection {
                let capsule = capsule::to_bytes(connection);
                *connection = capsule::from_bytes(&capsule).expect("and decode");
            }
        }
    }

    fn check(&self) {
        for end in [&self.a, &self.b] {
            if let Some(connection) = &end.connection {
                assert_eq!(connection.validate(), Ok(()), "{connection:?}");
            }
        }
    }
}

fn ports(side: Side) -> (u16, u16) {
    match side {
        Side::A => (PORT_A, PORT_B),
        Side::B => (PORT_B, PORT_A),
    }
}

/// Segments as a network card does.
pub fn cut(segment: &Segment<'_>) -> Vec<Packet> {
    let bytes = segment.payload.concat();
    if segment.segment_size == 0 {
        return vec![Packet {
            header: segment.header.clone(),
            payload: bytes,
            codepoint: segment.codepoint,
            handle: segment.handle,
        }];
    }
    let size = usize::from(segment.segment_size);
    let count = bytes.len().div_ceil(size);
    let piece = |(i, payload): (usize, &[u8])| {
        let mut header = segment.header.clone();
        header.seq += (i * size) as u32;
        if i + 1 < count {
            header.flags.0 &= !(TcpFlags::PSH.0 | TcpFlags::FIN.0);
        }
        Packet {
            header,
            payload: payload.to_vec(),
            codepoint: segment.codepoint,
            handle: segment.handle,
        }
    };
    bytes.chunks(size).enumerate().map(piece).collect()
}

/// Merges consecutive packets without IP options, as the kernel's GRO does.
pub fn merge(packets: Vec<Packet>) -> Vec<Packet> {
    let mut merged: Vec<Packet> = Vec::new();
    for packet in packets {
        match merged.last_mut() {
            Some(last) if follows(last, &packet) => {
                last.payload.extend_from_slice(&packet.payload);
                last.header.flags = last.header.flags.with(packet.header.flags);
            }
            _ => merged.push(packet),
        }
    }
    merged
}

fn follows(last: &Packet, packet: &Packet) -> bool {
    last.header.flags == TcpFlags::ACK
        && !last.payload.is_empty()
        && !packet.payload.is_empty()
        && last.header.seq + last.payload.len() as u32 == packet.header.seq
        && last.header.ack == packet.header.ack
        && last.codepoint == packet.codepoint
        && last.header.window == packet.header.window
        && last.header.options == packet.header.options
        && last.handle.is_none()
        && packet.handle.is_none()
        && last.payload.len() + packet.payload.len() <= GRO_MAX
}

/// Returns the bytes of the options that may accompany payload, with their padding.
fn option_bytes(packet: &Packet) -> usize {
    let options = &packet.header.options;
    let sack = match options.sack.len() {
        0 => 0,
        blocks => 4 + 8 * blocks,
    };
    let timestamps = if options.timestamps.is_some() { 12 } else { 0 };
    let demux = options.demux.map_or(0, |option| option.padded_len());
    let enclosed = if packet.handle.is_some() { 12 } else { 0 };
    timestamps + sack + demux + enclosed
}

fn describe(side: Side, at: Duration, packet: &Packet) -> String {
    let header = &packet.header;
    let names = [(2, 'S'), (1, 'F'), (4, 'R'), (8, 'P'), (16, '.')];
    let flags: String = names
        .iter()
        .filter(|(bit, _)| header.flags.0 & bit != 0)
        .map(|(_, c)| *c)
        .collect();
    format!(
        "{:>12} {side:?} [{flags}] seq {} len {} ack {} win {} sack {:?}",
        at.as_micros(),
        header.seq.0,
        packet.payload.len(),
        header.ack.0,
        header.window,
        header.options.sack,
    )
}
