//! Receives from several [`pour`](crate::pour)s at once, and reports how much of each arrived in every
//! window of time.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use serde::Serialize;

use crate::pour::HEADER;

const READ_SIZE: usize = 256 * 1024;

/// Bytes of the receive buffer, for datagrams that arrive while this program does not run. Only kernel sockets heed it.
const RECEIVE_BUFFER: usize = 32 << 20;

/// Interval of checks for the end while nothing arrives.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Bytes of UDP, IPv4 and Ethernet headers.
const DATAGRAM_HEADERS: u64 = 42;

#[derive(Serialize)]
pub(crate) struct Report {
    pub window_ms: u64,
    pub senders: Vec<Sender>,
}

#[derive(Clone, Serialize)]
pub(crate) struct Sender {
    pub tag: u16,
    pub protocol: &'static str,
    /// Bytes in each window since the first arrival: of datagrams with their headers, of
    /// streams as read.
    pub bytes: Vec<u64>,
    /// Missing sequence numbers below the highest that arrived.
    pub lost: u64,
    /// Times of the first and the last arrival.
    pub first_ms: f64,
    pub last_ms: f64,
    /// Time between two arrivals.
    pub longest_gap_ms: f64,
    #[serde(skip)]
    arrived: u64,
    #[serde(skip)]
    highest: u64,
}

/// All arrivals.
struct Record {
    /// Time of the first arrival.
    start: OnceLock<Instant>,
    window: Duration,
    senders: Mutex<BTreeMap<u16, Sender>>,
}

impl Record {
    fn note(&self, tag: u16, protocol: &'static str, bytes: u64, number: Option<u64>) {
        let at = self.start.get_or_init(Instant::now).elapsed();
        let at_ms = at.as_secs_f64() * 1e3;
        let mut senders = self.senders.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = senders.entry(tag).or_insert_with(|| Sender {
            tag,
            protocol,
            bytes: Vec::new(),
            lost: 0,
            first_ms: at_ms,
            last_ms: at_ms,
            longest_gap_ms: 0.0,
            arrived: 0,
            highest: 0,
        });
        sender.longest_gap_ms = sender.longest_gap_ms.max(at_ms - sender.last_ms);
        sender.last_ms = at_ms;
        let window = (at.as_nanos() / self.window.as_nanos()) as usize;
        if sender.bytes.len() <= window {
            sender.bytes.resize(window + 1, 0);
        }
        sender.bytes[window] += bytes;
        if let Some(number) = number {
            sender.arrived += 1;
            sender.highest = sender.highest.max(number);
            sender.lost = (sender.highest + 1).saturating_sub(sender.arrived);
        }
    }
}

/// Receives datagrams and streams at `address`, until `duration` after the first arrival.
pub(crate) fn gauge(
    address: SocketAddr,
    duration: Duration,
    window: Duration,
) -> io::Result<Report> {
    let socket = UdpSocket::bind(address)?;
    // Needs root; with a smaller buffer, more datagrams may be lost.
    let _ = set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER);
    // A listening port signals that the receiver is ready.
    let listener = TcpListener::bind(address)?;
    let record = Arc::new(Record {
        start: OnceLock::new(),
        window,
        senders: Mutex::default(),
    });
    let streams = Arc::clone(&record);
    thread::spawn(move || take_streams(&listener, &streams));
    take_datagrams(&socket, &record, duration)?;
    let senders = record
        .senders
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(Report {
        window_ms: window.as_millis() as u64,
        senders: senders.values().cloned().collect(),
    })
}

fn take_datagrams(socket: &UdpSocket, record: &Record, duration: Duration) -> io::Result<()> {
    let mut buffer = vec![0; READ_SIZE];
    socket.set_read_timeout(Some(LOOK_UP))?;
    let is_over = || {
        record
            .start
            .get()
            .is_some_and(|start| start.elapsed() >= duration)
    };
    while !is_over() {
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        if let ([a, b, ..], Some(number)) = (&buffer[..], buffer.get(8..HEADER))
            && length >= HEADER
        {
            let number = number
                .iter()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            let tag = u16::from_be_bytes([*a, *b]);
            let bytes = length as u64 + DATAGRAM_HEADERS;
            record.note(tag, "udp", bytes, Some(number));
        }
    }
    Ok(())
}

fn take_streams(listener: &TcpListener, record: &Arc<Record>) {
    while let Ok((stream, _)) = listener.accept() {
        let record = Arc::clone(record);
        thread::spawn(move || {
            // A stream that is cut off ends alone, without the others.
            if let Err(error) = take_stream(stream, &record) {
                eprintln!("portolan-traffic: {error}");
            }
        });
    }
}

fn take_stream(mut stream: TcpStream, record: &Record) -> io::Result<()> {
    let mut tag = [0; 2];
    stream.read_exact(&mut tag)?;
    let mut buffer = vec![0; READ_SIZE];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => record.note(u16::from_be_bytes(tag), "tcp", count as u64, None),
        }
    }
}
