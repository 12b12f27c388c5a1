//! Datagrams at a steady rate, each with its number and the time it left, and who takes them (NE §5.2).

use std::collections::BTreeMap;
use std::hint::spin_loop;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Number and time.
const HEADER: usize = 16;

/// The two kinds of phases are the same for all programs of this machine.
const PHASE: Duration = Duration::from_millis(500);

/// Who takes them looks up once in that time while nothing arrives.
const LOOK_UP: Duration = Duration::from_millis(100);

#[derive(Serialize)]
pub struct Sent {
    pub datagrams: u64,
    pub refused: u64,
}

#[derive(Serialize)]
pub struct Taken {
    /// Numbers that did not arrive before the last that did.
    pub lost: u64,
    /// Of what arrived in even half-seconds, while nobody works, and in odd ones, while somebody may.
    pub calm: Arrivals,
    pub overloaded: Arrivals,
}

#[derive(Serialize)]
pub struct Arrivals {
    pub per_second: f64,
    /// From the sender to this program, in the median half-second: the machine's own pauses fall into some of them.
    pub p50_us: f64,
    pub p99_us: f64,
}

/// Calls `send` so often in each second. What is late goes at once.
pub fn steadily(
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

pub fn send(to: SocketAddr, per_second: f64, size: usize, duration: Duration) -> io::Result<Sent> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    let mut datagram = vec![0x5a; size.max(HEADER)];
    let mut refused = 0;
    let datagrams = steadily(per_second, duration, |number| {
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        datagram[8..HEADER].copy_from_slice(&nanoseconds().to_be_bytes());
        match socket.send(&datagram) {
            Ok(_) => {}
            // Who took them may have ended.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => refused += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    })?;
    Ok(Sent { datagrams, refused })
}

/// Takes them until some time after the first has come, and in odd half-seconds works on each for a while.
pub fn take(at: SocketAddr, duration: Duration, work: Duration) -> io::Result<Taken> {
    let socket = UdpSocket::bind(at)?;
    socket.set_read_timeout(Some(LOOK_UP))?;
    // Who sees that somebody listens may send.
    let _listener = TcpListener::bind(at)?;
    let mut buffer = [0; 65_536];
    let mut phases: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut highest = 0;
    let mut start = None;
    while start.is_none_or(|start: Instant| start.elapsed() < duration) {
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        let now = nanoseconds();
        start.get_or_insert_with(Instant::now);
        let phase = now / PHASE.as_nanos() as u64;
        if length >= HEADER {
            let delay = now.saturating_sub(number_at(&buffer, 8));
            phases.entry(phase).or_default().push(delay);
            highest = highest.max(number_at(&buffer, 0));
        }
        if is_overloaded(phase) {
            process(work);
        }
    }
    let came: usize = phases.values().map(Vec::len).sum();
    let (overloaded, calm): (Vec<_>, Vec<_>) = phases
        .into_iter()
        .partition(|(phase, _)| is_overloaded(*phase));
    Ok(Taken {
        lost: (highest + 1).saturating_sub(came as u64),
        calm: arrivals(calm, duration / 2),
        overloaded: arrivals(overloaded, duration / 2),
    })
}

fn is_overloaded(phase: u64) -> bool {
    phase % 2 == 1
}

/// Of the delays in each phase of one kind.
fn arrivals(phases: Vec<(u64, Vec<u64>)>, time: Duration) -> Arrivals {
    let came: usize = phases.iter().map(|(_, delays)| delays.len()).sum();
    let phases: Vec<Vec<u64>> = phases
        .into_iter()
        .map(|(_, mut delays)| {
            delays.sort_unstable();
            delays
        })
        .collect();
    let at = |fraction: f64| {
        let mut each: Vec<u64> = phases
            .iter()
            .map(|phase| quantile(phase, fraction))
            .collect();
        each.sort_unstable();
        quantile(&each, 0.5) as f64 / 1e3
    };
    Arrivals {
        per_second: came as f64 / time.as_secs_f64(),
        p50_us: at(0.5),
        p99_us: at(0.99),
    }
}

/// Of what is sorted; 0 of nothing.
fn quantile(sorted: &[u64], fraction: f64) -> u64 {
    let index = (sorted.len() as f64 * fraction) as usize;
    sorted.get(index).copied().unwrap_or_default()
}

/// Uses the CPU for so long.
fn process(work: Duration) {
    let start = Instant::now();
    while start.elapsed() < work {
        spin_loop();
    }
}

fn number_at(buffer: &[u8], offset: usize) -> u64 {
    let octets = buffer[offset..offset + 8].iter();
    octets.fold(0, |sum, octet| sum << 8 | u64::from(*octet))
}

/// The same for all programs of this machine.
fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
