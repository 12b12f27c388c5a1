//! Bulk transfer in one direction, by either interface.

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use portolan::net::buf::{Reserved, moved};
use portolan::net::{TcpListener, TcpStream};
use portolan::posix::spun;
use portolan_bench::transfer::Transfer;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::{Interface, pattern, print};

const READ_SIZE: usize = 256 * 1024;

/// The program's work on the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Work {
    /// No access to the bytes. The sender's data is prepared in advance.
    None,
    /// One read of each byte by the receiver, or one write before the sender sends it.
    Touch,
    /// A comparison with a pattern.
    Check,
}

impl Work {
    fn receive(self, position: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Work::None => {}
            Work::Touch => {
                black_box(pattern::sum(bytes));
            }
            Work::Check => pattern::check(position, bytes)?,
        }
        Ok(())
    }

    fn produce(self, position: u64, bytes: &mut [u8]) {
        match self {
            Work::None => {}
            Work::Touch => bytes.fill(position as u8),
            Work::Check => pattern::fill(position, bytes),
        }
    }
}

/// How bytes were transferred by shared buffers.
#[derive(Serialize)]
struct Moved {
    /// CPU time of the process since its start, without what it has spun.
    processor_seconds: f64,
    received_in_place: u64,
    received_copied: u64,
    sent_in_place: u64,
    sent_copied: u64,
}

fn all_moved() -> Moved {
    let moved = moved();
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let processor = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    Moved {
        processor_seconds: processor - spun().as_secs_f64(),
        received_in_place: moved.received_in_place,
        received_copied: moved.received_copied,
        sent_in_place: moved.sent_in_place,
        sent_copied: moved.sent_copied,
    }
}

#[derive(Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    transfer: Transfer,
    moved: Moved,
}

pub(crate) fn sink(address: SocketAddr, by: Interface, work: Work) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        match drain(&stream, by, work) {
            Ok(total) => {
                print(&all_moved())?;
                stream.write_all(&total.to_be_bytes())?;
            }
            Err(error) => eprintln!("portolan-native: {error}"),
        }
    }
    Ok(())
}

fn drain(mut stream: &TcpStream, by: Interface, work: Work) -> io::Result<u64> {
    let mut total = 0;
    if by == Interface::Socket {
        let mut buffer = vec![0; READ_SIZE];
        loop {
            let count = stream.read(&mut buffer)?;
            if count == 0 {
                return Ok(total);
            }
            work.receive(total, &buffer[..count])?;
            total += count as u64;
        }
    }
    let mut pieces = Vec::new();
    while stream.receive(&mut pieces)? > 0 {
        for piece in pieces.drain(..) {
            work.receive(total, &piece)?;
            total += piece.len() as u64;
        }
    }
    Ok(total)
}

/// Parameters of a sender.
pub(crate) struct Plan {
    pub by: Interface,
    pub work: Work,
    pub size: usize,
    pub duration: Duration,
}

pub(crate) fn send(address: SocketAddr, plan: Plan) -> io::Result<Report> {
    let stream = TcpStream::connect(address)?;
    let start = Instant::now();
    let sent = match plan.by {
        Interface::Socket => write_all(&stream, &plan, start)?,
        Interface::Shared => send_all(&stream, &plan, start)?,
    };
    stream.shutdown(Shutdown::Write)?;
    let transfer = Transfer::confirmed(stream, sent, start)?;
    Ok(Report {
        transfer,
        moved: all_moved(),
    })
}

fn write_all(mut stream: &TcpStream, plan: &Plan, start: Instant) -> io::Result<u64> {
    let mut block = vec![0x5a; plan.size];
    let mut sent = 0;
    while start.elapsed() < plan.duration {
        plan.work.produce(sent, &mut block);
        stream.write_all(&block)?;
        sent += plan.size as u64;
    }
    Ok(sent)
}

fn send_all(stream: &TcpStream, plan: &Plan, start: Instant) -> io::Result<u64> {
    let size = plan.size.min(Reserved::CAPACITY);
    let mut sent = 0;
    while start.elapsed() < plan.duration {
        let mut piece = stream.reserve();
        piece.resize_unspecified(size);
        plan.work.produce(sent, &mut piece);
        stream.send(piece)?;
        sent += size as u64;
    }
    Ok(sent)
}
