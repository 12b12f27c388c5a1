//! A TCP of its own beside the host's: the library's TCP machine, put together by the program itself from the layers, for
//! one service and with its own parameters: BBR, and no timestamps, which leaves 12 bytes more to each segment. (PX §2:
//! TCP-special beside TCP-standard.) Over IP protocol 253 between two such programs
//!
//!     special-tcp serve
//!     special-tcp send ADDRESS BYTES
//!
//! who both tell how many bytes they have sent or received, and their sum; or at one port of TCP, for the whole world:
//!
//!     special-tcp offer PORT BYTES
//!
//! answers HTTP with so many bytes, to one client after the other. IPv4 only.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant as Clock};

use portolan::raw::layers::now;
use portolan::raw::layers::tcp::{Config, CongestionKind, Connection, Segment};
use portolan::raw::layers::types::{MacAddr, Protocol, SeqNum};
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
const TIMEOUT: Duration = Duration::from_secs(30);
/// More than this no question has.
const QUESTION_MAX: usize = 8 << 10;
const QUESTION_END: &[u8] = b"\r\n\r\n";

/// How the packets of one connection go to the other end.
struct Way {
    own_mac: MacAddr,
    next_mac: MacAddr,
    own: Ipv4Addr,
    other: Ipv4Addr,
    protocol: u8,
    mtu: u32,
}

struct Received {
    way: Way,
    header: TcpHeader,
    payload: Vec<u8>,
}

impl Way {
    fn find(flow: &RawFlow, other: Ipv4Addr) -> Result<Way, Errno> {
        let hop = flow.hop(other.into(), TIMEOUT)?;
        match hop.source {
            IpAddr::V4(own) => Ok(Way {
                own_mac: hop.own_mac,
                next_mac: hop.next_mac,
                own,
                other,
                protocol: protocol_of(flow),
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
        Sum::pseudo_header(self.own.into(), self.other.into(), self.protocol, length)
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
            protocol: self.protocol,
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

fn protocol_of(flow: &RawFlow) -> u8 {
    match flow.guard() {
        Guard::Port { protocol, .. } => protocol.number(),
        Guard::EtherType(_) | Guard::IpProtocol(_) => PROTOCOL,
    }
}

/// A sound segment and the way back to its sender; its hop tells the MTU, which nothing in it does.
fn parse(protocol: u8, frame: &[u8]) -> Option<Received> {
    let (ethernet, packet) = EthernetHeader::parse(frame).ok()?;
    let (ip, segment) = Ipv4Header::parse(packet).ok()?;
    // To a port come ICMP errors about what was sent from there, too, and fragments.
    if ip.protocol != protocol || ip.is_fragment() {
        return None;
    }
    let way = Way {
        own_mac: ethernet.destination,
        next_mac: ethernet.source,
        own: ip.destination,
        other: ip.source,
        protocol,
        mtu: 0,
    };
    let pseudo = way.pseudo_header(segment.len());
    if !verify(pseudo, segment, CHECKSUM_AT, Offload::MayBePartial) {
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
        let wait = connection.deadline().map_or(TIMEOUT, |at| at.since(now()));
        let mut received = flow.recv(Some(wait));
        for _ in 0..BATCH {
            match received {
                Ok(frame) => take(way, connection, &frame.bytes),
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
    if let Some(received) = parse(way.protocol, frame)
        && received.way.other == way.other
        && received.header.source_port == connection.remote_port()
    {
        connection.on_segment(now(), &received.header, &received.payload);
    }
}

fn initial_sequence() -> SeqNum {
    SeqNum(now().as_nanos() as u32)
}

/// The bytes of a stream, which tell where they belong.
fn byte(position: u64) -> u8 {
    (position ^ position >> 8 ^ position >> 16) as u8
}

fn send(flow: &RawFlow, address: Ipv4Addr, bytes: u64) -> Result<(), Errno> {
    let way = Way::find(flow, address)?;
    let own_port = 1 + (std::process::id() % 0xfff0) as u16;
    let mut connection =
        Connection::connect(&way.config(), own_port, PORT, initial_sequence(), now());
    let (mut sent, mut sum) = (0, 0);
    let begun = Clock::now();
    drive(flow, &way, &mut connection, |connection| {
        while sent < bytes {
            let room = connection.send_space().min(CHUNK) as u64;
            let chunk: Vec<u8> = (sent..bytes.min(sent + room)).map(byte).collect();
            if chunk.is_empty() {
                return false;
            }
            let count = connection.send(now(), &chunk);
            sum += chunk[..count]
                .iter()
                .map(|&byte| u64::from(byte))
                .sum::<u64>();
            sent += count as u64;
        }
        if !connection.is_send_closed() {
            connection.shutdown_send(now());
        }
        connection.is_flushed() && connection.is_receive_finished()
    })?;
    println!("bytes {sent} sum {sum}");
    let rate = bytes as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e6;
    println!("{rate:.0} Mb/s");
    Ok(())
}

/// Has one client after the other served; whoever comes meanwhile is not heard, and tries again.
fn serve(
    flow: &RawFlow,
    port: u16,
    mut service: impl FnMut(&RawFlow, &Way, &mut Connection) -> Result<(), Errno>,
) -> Result<(), Errno> {
    println!("serving");
    loop {
        let Some(syn) = parse(protocol_of(flow), &flow.recv(None)?.bytes) else {
            continue;
        };
        let flags = syn.header.flags.0 & !(TcpFlags::ECE.0 | TcpFlags::CWR.0);
        if flags != TcpFlags::SYN.0 || syn.header.destination_port != port {
            continue;
        }
        let way = Way::find(flow, syn.way.other)?;
        let mut connection =
            Connection::accept(&way.config(), &syn.header, initial_sequence(), now());
        if let Err(errno) = service(flow, &way, &mut connection) {
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
                wrong += u64::from(got != byte(received));
                sum += u64::from(got);
                received += 1;
            }
        }
        if connection.is_receive_finished() && !connection.is_send_closed() {
            connection.close(now());
        }
        connection.is_closed()
    })?;
    println!("bytes {received} sum {sum} wrong {wrong}");
    Ok(())
}

/// The head of an answer, and behind it the stream.
fn answer(bytes: u64, position: u64, room: usize) -> Vec<u8> {
    let head = format!("HTTP/1.0 200 OK\r\nContent-Length: {bytes}\r\n\r\n");
    let head = head.as_bytes();
    let end = head.len() as u64 + bytes;
    (position..end.min(position + room as u64))
        .map(|at| match head.get(at as usize) {
            Some(&byte) => byte,
            None => byte(at - head.len() as u64),
        })
        .collect()
}

/// Reads a question to its end, and answers it.
fn reply(flow: &RawFlow, way: &Way, connection: &mut Connection, bytes: u64) -> Result<(), Errno> {
    let mut question = Vec::new();
    let mut chunk = vec![0; CHUNK];
    let mut sent = 0;
    drive(flow, way, connection, |connection| {
        let count = connection.recv(now(), &mut chunk);
        question.extend_from_slice(&chunk[..count]);
        question.truncate(QUESTION_MAX);
        let is_asked = question
            .windows(QUESTION_END.len())
            .any(|bytes| bytes == QUESTION_END);
        let is_over = connection.is_receive_finished();
        if !is_asked {
            return is_over || question.len() == QUESTION_MAX;
        }
        loop {
            let rest = answer(bytes, sent, connection.send_space().min(CHUNK));
            if rest.is_empty() {
                break;
            }
            sent += connection.send(now(), &rest) as u64;
        }
        if answer(bytes, sent, 1).is_empty() && !connection.is_send_closed() {
            connection.shutdown_send(now());
        }
        connection.is_flushed() && is_over
    })
}

fn run(words: &[&str]) -> Result<(), Errno> {
    let own = || RawFlow::open(Guard::IpProtocol(PROTOCOL));
    let number = |word: &str| word.parse::<u64>().map_err(|_| Errno::INVAL);
    match words {
        ["serve"] => serve(&own()?, PORT, receive),
        ["send", address, bytes] => {
            let address = address.parse().map_err(|_| Errno::INVAL)?;
            send(&own()?, address, number(bytes)?)
        }
        ["offer", port, bytes] => {
            let port = port.parse().map_err(|_| Errno::INVAL)?;
            let bytes = number(bytes)?;
            let flow = RawFlow::open(Guard::Port {
                protocol: Protocol::Tcp,
                local: SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
            })?;
            serve(&flow, port, |flow, way, connection| {
                reply(flow, way, connection, bytes)
            })
        }
        _ => Err(Errno::INVAL),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = run(&words);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(errno) => {
            eprintln!("special-tcp: {errno}");
            ExitCode::FAILURE
        }
    }
}
