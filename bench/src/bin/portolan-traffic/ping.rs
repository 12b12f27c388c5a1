//! Ping-pong: sends a message and waits for the same message back, one at a time. A spinning side polls
//! its socket without sleeping; a sleeping side blocks in the call.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::phases::{Phase, Phases, Spread};

/// Attempts for the first datagram: the server may still be starting.
const FIRST_TRIES: usize = 100;

const FIRST_TIMEOUT: Duration = Duration::from_millis(50);

/// A datagram that is not answered within this time ends the run.
const LOST: Duration = Duration::from_secs(2);

/// Number and kind of the round trips.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Plan {
    /// Bytes per message.
    #[arg(long, default_value_t = 1)]
    size: usize,
    #[arg(long, default_value_t = 10_000)]
    count: usize,
    /// Round trips before the measured ones.
    #[arg(long, default_value_t = 500)]
    warm_up: usize,
    /// Polls instead of sleeping.
    #[arg(long)]
    spin: bool,
    /// Also reports every round trip, in order.
    #[arg(long)]
    series: bool,
    /// Also reports the duration of the calls that send.
    #[arg(long)]
    calls: bool,
}

/// Round-trip times in microseconds.
#[derive(Serialize)]
pub(crate) struct Report {
    pub round_trips: usize,
    pub p50_us: f64,
    pub p99_us: f64,
    pub min_us: f64,
    pub max_us: f64,
    /// Times in calm and in busy phases.
    pub calm: Spread,
    pub busy: Spread,
    /// The median duration of the calls that send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_p50_us: Option<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub series_us: Vec<f64>,
}

/// Durations of the calls that send, if requested.
#[derive(Default)]
struct Calls {
    are_wanted: bool,
    times: Vec<Duration>,
}

impl Calls {
    fn send<T>(&mut self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if !self.are_wanted {
            return call();
        }
        let start = Instant::now();
        let sent = call();
        self.times.push(start.elapsed());
        sent
    }
}

pub(crate) fn echo_tcp(address: SocketAddr, size: usize, spin: bool) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    let mut message = vec![0; size];
    loop {
        let mut peer = Peer::new(listener.accept()?.0, spin)?;
        while peer
            .receive(&mut message)
            .and_then(|()| peer.send(&message))
            .is_ok()
        {}
    }
}

pub(crate) fn ping_tcp(address: SocketAddr, plan: Plan) -> io::Result<Report> {
    let mut peer = Peer::new(TcpStream::connect(address)?, plan.spin)?;
    let mut message = vec![b'p'; plan.size];
    measure(plan, |calls| {
        calls.send(|| peer.send(&message))?;
        peer.receive(&mut message)
    })
}

pub(crate) fn echo_udp(address: SocketAddr, size: usize, spin: bool) -> io::Result<()> {
    let socket = UdpSocket::bind(address)?;
    socket.set_nonblocking(spin)?;
    let mut message = vec![0; size.max(1)];
    loop {
        let (length, peer) = retry(|| socket.recv_from(&mut message), |_| false)?;
        retry(|| socket.send_to(&message[..length], peer), |_| false)?;
    }
}

pub(crate) fn ping_udp(address: SocketAddr, plan: Plan) -> io::Result<Report> {
    let unspecified: SocketAddr = match address {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(unspecified)?;
    socket.connect(address)?;
    let mut message = vec![b'p'; plan.size];
    reach(&socket, &mut message)?;
    socket.set_nonblocking(plan.spin)?;
    socket.set_read_timeout(Some(LOST))?;
    measure(plan, |calls| {
        calls.send(|| retry(|| socket.send(&message), |_| false))?;
        let sent = Instant::now();
        retry(
            || socket.recv(&mut message),
            |spins| spins % 4096 == 0 && sent.elapsed() > LOST,
        )?;
        Ok(())
    })
}

/// Sends until the first answer, then reads the answers to the other attempts.
fn reach(socket: &UdpSocket, message: &mut [u8]) -> io::Result<()> {
    socket.set_read_timeout(Some(FIRST_TIMEOUT))?;
    for _ in 0..FIRST_TRIES {
        match socket.send(message).and_then(|_| socket.recv(message)) {
            Ok(_) => {
                while socket.recv(message).is_ok() {}
                return Ok(());
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                std::thread::sleep(FIRST_TIMEOUT);
            }
            Err(error) if is_idle(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// A connected stream with the wait strategy of its side.
struct Peer {
    stream: TcpStream,
    spin: bool,
}

impl Peer {
    fn new(stream: TcpStream, spin: bool) -> io::Result<Peer> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(spin)?;
        Ok(Peer { stream, spin })
    }

    fn send(&mut self, mut message: &[u8]) -> io::Result<()> {
        while !message.is_empty() {
            match self.stream.write(message) {
                Ok(count) => message = &message[count..],
                Err(error) if self.spin && is_idle(&error) => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn receive(&mut self, message: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < message.len() {
            match self.stream.read(&mut message[filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if self.spin && is_idle(&error) => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Repeats a call until it does not return "would block" or `give_up` returns true. A blocking socket
/// gets there only by its timeout, at which `give_up` ends the run.
fn retry<T>(
    mut call: impl FnMut() -> io::Result<T>,
    give_up: impl Fn(u64) -> bool,
) -> io::Result<T> {
    let mut spins = 0;
    loop {
        match call() {
            Err(error) if is_idle(&error) => {
                spins += 1;
                if give_up(spins) {
                    return Err(ErrorKind::TimedOut.into());
                }
                std::hint::spin_loop();
            }
            other => return other,
        }
    }
}

fn is_idle(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn measure(
    plan: Plan,
    mut round_trip: impl FnMut(&mut Calls) -> io::Result<()>,
) -> io::Result<Report> {
    for _ in 0..plan.warm_up {
        round_trip(&mut Calls::default())?;
    }
    let mut calls = Calls {
        are_wanted: plan.calls,
        ..Calls::default()
    };
    let count = plan.count;
    let mut times = Vec::with_capacity(count);
    let mut phases = Phases::default();
    for _ in 0..count {
        let start = Instant::now();
        round_trip(&mut calls)?;
        let time = start.elapsed();
        times.push(time);
        phases.note(time.as_nanos() as u64);
    }
    if times.is_empty() {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "a count of zero measures nothing",
        ));
    }
    let series = if plan.series { &times[..] } else { &[] };
    let series_us = series.iter().copied().map(microseconds).collect();
    times.sort_unstable();
    calls.times.sort_unstable();
    Ok(Report {
        round_trips: count,
        p50_us: quantile(&times, 0.5),
        p99_us: quantile(&times, 0.99),
        min_us: quantile(&times, 0.0),
        max_us: quantile(&times, 1.0),
        calm: phases.spread(Phase::Calm),
        busy: phases.spread(Phase::Busy),
        send_p50_us: plan.calls.then(|| quantile(&calls.times, 0.5)),
        series_us,
    })
}

/// Returns a quantile of times, which must be sorted and not empty.
fn quantile(sorted: &[Duration], quantile: f64) -> f64 {
    let index = ((sorted.len() as f64 * quantile) as usize).min(sorted.len() - 1);
    microseconds(sorted[index])
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
