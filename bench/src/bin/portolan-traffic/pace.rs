//! Sends datagrams at a steady rate, each with its number and its send time, and receives them (NE §5.2).

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::phases::{Phase, Phases, Spread, nanoseconds};

/// Bytes of the number and the time.
const HEADER: usize = 16;

/// Interval at which the receiver checks for the end while nothing arrives.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Length of the windows in which arrivals are counted.
const WINDOW_MS: u64 = 100;

#[derive(Serialize)]
pub(crate) struct Sent {
    pub datagrams: u64,
}

#[derive(Serialize)]
pub(crate) struct Taken {
    /// Missing sequence numbers below the highest that arrived.
    pub lost: u64,
    /// Arrivals in calm half-seconds, and in busy ones.
    pub calm: Arrivals,
    pub busy: Arrivals,
    /// Counts from the first arrival on, in windows of [`WINDOW_MS`].
    pub windows: Vec<Window>,
    pub window_ms: u64,
}

/// Arrivals in a short time, and the sequence numbers missing before the last of these.
#[derive(Clone, Copy, Default, Serialize)]
pub(crate) struct Window {
    pub arrived: u64,
    pub lost: u64,
}

#[derive(Serialize)]
pub(crate) struct Arrivals {
    pub per_second: f64,
    /// Delays from the sender to this program.
    #[serde(flatten)]
    pub delays: Spread,
}

/// The destination: always the same, or another one in calm half-seconds.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Target {
    address: SocketAddr,
    /// The destination in every other half-second.
    #[arg(long)]
    in_turn_with: Option<SocketAddr>,
}

impl Target {
    pub(crate) fn now(&self) -> SocketAddr {
        match (self.in_turn_with, Phase::now()) {
            (Some(other), Phase::Calm) => other,
            _ => self.address,
        }
    }

    pub(crate) fn is_ipv6(&self) -> bool {
        self.address.is_ipv6()
    }
}

/// Calls `send` `per_second` times per second. Calls that are late are made at once.
pub(crate) fn steadily(
    per_second: f64,
    duration: Duration,
    mut send: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<u64> {
    let start = Instant::now();
    let mut number = 0;
    loop {
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return Ok(number);
        }
        while (number as f64) < elapsed.as_secs_f64() * per_second {
            send(number)?;
            number += 1;
        }
        let due = Duration::from_secs_f64((number + 1) as f64 / per_second);
        std::thread::sleep(due.saturating_sub(start.elapsed()));
    }
}

pub(crate) fn send(
    target: Target,
    per_second: f64,
    size: usize,
    duration: Duration,
) -> io::Result<Sent> {
    let any: SocketAddr = if target.is_ipv6() {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    let mut datagram = vec![0x5a; size.max(HEADER)];
    let datagrams = steadily(per_second, duration, |number| {
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        datagram[8..HEADER].copy_from_slice(&nanoseconds().to_be_bytes());
        socket.send_to(&datagram, target.now()).map(drop)
    })?;
    Ok(Sent { datagrams })
}

/// Receives until `duration` after the first arrival. Spends `work` on each datagram, in calm phases a fifth of it.
pub(crate) fn take(at: SocketAddr, duration: Duration, work: Duration) -> io::Result<Taken> {
    let socket = UdpSocket::bind(at)?;
    socket.set_read_timeout(Some(LOOK_UP))?;
    // A listening port signals that the receiver is ready.
    let _listener = TcpListener::bind(at)?;
    let mut buffer = [0; 65_536];
    let mut delays = Phases::default();
    let mut highest = None;
    let mut windows = Vec::new();
    let mut start = None;
    while start.is_none_or(|start: Instant| start.elapsed() < duration) {
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        let elapsed = start.get_or_insert_with(Instant::now).elapsed();
        if length >= HEADER {
            delays.note(nanoseconds().saturating_sub(number_at(&buffer, 8)));
            let number = number_at(&buffer, 0);
            let expected = highest.map_or(0, |highest: u64| highest + 1);
            note(&mut windows, elapsed, number.saturating_sub(expected));
            highest = highest.max(Some(number));
        }
        process(match Phase::now() {
            Phase::Busy => work,
            Phase::Calm => work / 5,
        });
    }
    let arrivals = |kind| {
        let delays = delays.spread(kind);
        Arrivals {
            per_second: delays.count as f64 / (duration / 2).as_secs_f64(),
            delays,
        }
    };
    Ok(Taken {
        lost: highest
            .map_or(1, |highest| highest + 1)
            .saturating_sub(delays.count() as u64),
        windows,
        window_ms: WINDOW_MS,
        calm: arrivals(Phase::Calm),
        busy: arrivals(Phase::Busy),
    })
}

/// Counts a datagram that arrived `elapsed` after the first, behind `lost` missing ones.
fn note(windows: &mut Vec<Window>, elapsed: Duration, lost: u64) {
    let at = (elapsed.as_millis() / u128::from(WINDOW_MS)) as usize;
    if windows.len() <= at {
        windows.resize(at + 1, Window::default());
    }
    windows[at].arrived += 1;
    windows[at].lost += lost;
}

/// Uses the CPU for this time. Without a spin-loop hint: a hypervisor deschedules virtual CPUs that give it.
fn process(work: Duration) {
    let start = Instant::now();
    while start.elapsed() < work {}
}

fn number_at(buffer: &[u8], offset: usize) -> u64 {
    let bytes = buffer[offset..offset + 8].iter();
    bytes.fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}
