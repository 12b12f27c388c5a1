//! A TCP of its own beside the host's: the library's TCP machine over IP protocol 253, put together by the program
//! itself from the layers, for one service and with its own parameters: BBR, and no timestamps, which leaves 12 octets
//! more to each segment. (PX §2: TCP-special beside TCP-standard.)
//!
//!     special-tcp serve
//!     special-tcp send ADDRESS OCTETS
//!
//! Both ends tell how many octets they have sent or received, and their sum. IPv4 only.

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::time::{Duration, Instant as Clock};

use portolan::raw::layers::now;
use portolan::raw::layers::tcp::{Config, CongestionKind, Connection, Segment};
use portolan::raw::layers::types::{MacAddr, SeqNum};
use portolan::raw::layers::wire::checksum::{Offload, Sum, verify};
use portolan::raw::layers::wire::ethernet::{EtherType, EthernetHeader};
use portolan::raw::layers::wire::ipv4::{HEADER_LEN as IP_HEADER, Ipv4Header};
use portolan::raw::layers::wire::tcp::{CHECKSUM_AT, HEADER_LEN, TcpFlags, TcpHeader};
use portolan::raw::{Errno, Guard, RawFlow};

/// For experiments (RFC 3692).
const PROTOCOL: u8 = 253;
const PORT: u16 = 1;
const ETHERNET: usize = 14;
const OPTIONS_MAX: usize = 40;
const CHUNK: usize = 64 << 10;

/// Frames taken in before anything is answered.
const BATCH: usize = 64;
const PATIENCE: Duration = Duration::from_secs(30);

/// How the packets of one connection go to the other end.
struct Way {
    own_mac: MacAddr,
    next_mac: MacAddr,
    own: Ipv4Addr,
    other: Ipv4Addr,
    mtu: u32,
}

struct Received {
    way: Way,
    header: TcpHeader,
    payload: Vec<u8>,
}

impl Way {
    fn find(flow: &RawFlow, other: Ipv4Addr) -> Result<Way, Errno> {
        let hop = flow.hop(other.into(), PATIENCE)?;
        match hop.source {
            IpAddr::V4(own) => Ok(Way {
                own_mac: hop.own_mac,
                next_mac: hop.next_mac,
                own,
                other,
                mtu: hop.mtu,
            }),
            IpAddr::V6(_) => Err(Errno::AFNOSUPPORT),
        }
    }

    fn config(&self) -> Config {
        let mss = u16::try_from(self.mtu).unwrap_or(u16::MAX) - (IP_HEADER + HEADER_LEN) as u16;
        Config {
            mss,
            // Nothing cuts what this program sends.
            gso_max: mss.into(),
            congestion: CongestionKind::Bbr,
            timestamps: false,
            ..Config::default()
        }
    }

    fn pseudo_header(&self, length: usize) -> Sum {
        Sum::pseudo_header(self.own.into(), self.other.into(), PROTOCOL, length)
    }

    fn send(&self, flow: &RawFlow, segment: &Segment<'_>) -> Result<(), Errno> {
        let mut head = [0; ETHERNET + IP_HEADER + HEADER_LEN + OPTIONS_MAX];
        let (ethernet, rest) = head.split_at_mut(ETHERNET);
        let (ip, tcp) = rest.split_at_mut(IP_HEADER);
        let length = segment.header.emit(tcp);
        let payload = segment.payload.concat();
        let whole = length + payload.len();
        let sum = self
            .pseudo_header(whole)
            .over(&tcp[..length])
            .over(&payload);
        tcp[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&sum.checksum().to_be_bytes());
        let header = Ipv4Header {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            protocol: PROTOCOL,
            source: self.own,
            destination: self.other,
            payload_len: whole as u16,
        };
        header.emit(ip);
        let header = EthernetHeader {
            destination: self.next_mac,
            source: self.own_mac,
            ether_type: EtherType::IPV4,
        };
        header.emit(ethernet);
        flow.send(&head[..ETHERNET + IP_HEADER + length], &payload)
    }
}

/// A sound segment and the way back to its sender; its hop tells the MTU, which nothing in it does.
fn parse(frame: &[u8]) -> Option<Received> {
    let (ethernet, packet) = EthernetHeader::parse(frame).ok()?;
    let (ip, segment) = Ipv4Header::parse(packet).ok()?;
    let way = Way {
        own_mac: ethernet.destination,
        next_mac: ethernet.source,
        own: ip.destination,
        other: ip.source,
        mtu: 0,
    };
    let pseudo = way.pseudo_header(segment.len());
    if !verify(pseudo, segment, CHECKSUM_AT, Offload::Complete) {
        return None;
    }
    let (header, length) = TcpHeader::parse(segment).ok()?;
    let payload = segment[length..].to_vec();
    Some(Received {
        way,
        header,
        payload,
    })
}

fn transmit(flow: &RawFlow, way: &Way, connection: &mut Connection) -> Result<(), Errno> {
    while let Some(segment) = connection.transmit(now()) {
        way.send(flow, &segment)?;
    }
    Ok(())
}

/// Sends what is due, takes in what comes, and keeps the timers, until `done`.
fn drive(
    flow: &RawFlow,
    way: &Way,
    connection: &mut Connection,
    mut done: impl FnMut(&mut Connection) -> bool,
) -> Result<(), Errno> {
    loop {
        transmit(flow, way, connection)?;
        if let Some(error) = connection.take_error() {
            eprintln!("special-tcp: {error}");
            return Err(Errno::CONNRESET);
        }
        if done(connection) {
            return Ok(());
        }
        transmit(flow, way, connection)?;
        let wait = connection.deadline().map_or(PATIENCE, |at| at.since(now()));
        let mut received = flow.recv(Some(wait));
        for _ in 0..BATCH {
            match received {
                Ok(frame) => take(way, connection, &frame.octets),
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno),
            }
            received = flow.try_recv();
        }
        if connection.deadline().is_some_and(|at| at <= now()) {
            connection.on_timer(now());
        }
    }
}

fn take(way: &Way, connection: &mut Connection, frame: &[u8]) {
    if let Some(received) = parse(frame)
        && received.way.other == way.other
        && received.header.source_port == connection.remote_port()
    {
        connection.on_segment(now(), &received.header, &received.payload);
    }
}

fn initial_sequence() -> SeqNum {
    SeqNum(now().as_nanos() as u32)
}

/// The octets of a stream, which tell where they belong.
fn octet(position: u64) -> u8 {
    (position ^ position >> 8 ^ position >> 16) as u8
}

fn send(flow: &RawFlow, address: Ipv4Addr, octets: u64) -> Result<(), Errno> {
    let way = Way::find(flow, address)?;
    let own_port = 1 + (std::process::id() % 0xfff0) as u16;
    let mut connection =
        Connection::connect(&way.config(), own_port, PORT, initial_sequence(), now());
    let (mut sent, mut sum) = (0, 0);
    let begun = Clock::now();
    drive(flow, &way, &mut connection, |connection| {
        while sent < octets {
            let room = connection.send_space().min(CHUNK) as u64;
            let chunk: Vec<u8> = (sent..octets.min(sent + room)).map(octet).collect();
            if chunk.is_empty() {
                return false;
            }
            let count = connection.send(now(), &chunk);
            sum += chunk[..count]
                .iter()
                .map(|&octet| u64::from(octet))
                .sum::<u64>();
            sent += count as u64;
        }
        if !connection.is_send_closed() {
            connection.shutdown_send(now());
        }
        connection.is_flushed() && connection.is_receive_finished()
    })?;
    println!("octets {sent} sum {sum}");
    let rate = octets as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e6;
    println!("{rate:.0} Mb/s");
    Ok(())
}

/// Receives one stream after the other; whoever comes meanwhile is not heard, and tries again.
fn serve(flow: &RawFlow) -> Result<(), Errno> {
    println!("serving");
    loop {
        let Some(syn) = parse(&flow.recv(None)?.octets) else {
            continue;
        };
        if syn.header.flags.0 != TcpFlags::SYN.0 || syn.header.destination_port != PORT {
            continue;
        }
        let way = Way::find(flow, syn.way.other)?;
        let mut connection =
            Connection::accept(&way.config(), &syn.header, initial_sequence(), now());
        if let Err(errno) = receive(flow, &way, &mut connection) {
            eprintln!("special-tcp: {}: {errno}", way.other);
        }
    }
}

fn receive(flow: &RawFlow, way: &Way, connection: &mut Connection) -> Result<(), Errno> {
    let (mut received, mut sum, mut wrong) = (0, 0, 0);
    let mut chunk = vec![0; CHUNK];
    drive(flow, way, connection, |connection| {
        loop {
            let count = connection.recv(now(), &mut chunk);
            if count == 0 {
                break;
            }
            for &got in &chunk[..count] {
                wrong += u64::from(got != octet(received));
                sum += u64::from(got);
                received += 1;
            }
        }
        if connection.is_receive_finished() && !connection.is_send_closed() {
            connection.close(now());
        }
        connection.is_closed()
    })?;
    println!("octets {received} sum {sum} wrong {wrong}");
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = RawFlow::open(Guard::IpProtocol(PROTOCOL)).and_then(|flow| match words[..] {
        ["serve"] => serve(&flow),
        ["send", address, octets] => match (address.parse(), octets.parse()) {
            (Ok(address), Ok(octets)) => send(&flow, address, octets),
            _ => Err(Errno::INVAL),
        },
        _ => Err(Errno::INVAL),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(errno) => {
            eprintln!("special-tcp: {errno}");
            ExitCode::FAILURE
        }
    }
}
