//! Sends pictures at a fixed rate over one connection to a viewer that spends CPU time on decoding each (MS §VII-B).

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Bytes of a compressed picture: 4 Mb/s at 30 a second.
const PICTURE: usize = 16 << 10;

/// Not measured: a reservation may not have been made yet.
const WARM_UP: Duration = Duration::from_millis(500);

/// The results of a viewer.
#[derive(Serialize)]
pub(crate) struct Report {
    pub pictures: usize,
    pub per_second: f64,
    /// Longest time between two decoded pictures.
    pub longest_gap_ms: f64,
    /// All times between two decoded pictures.
    pub gaps_ms: Vec<f64>,
}

/// Sends `rate` pictures per second to each viewer until it disconnects. Pictures that are late are sent at once.
pub(crate) fn show(address: SocketAddr, rate: u32) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    loop {
        let mut viewer = listener.accept()?.0;
        viewer.set_nodelay(true)?;
        let start = Instant::now();
        let mut number = 0;
        while viewer.write_all(&[0; PICTURE]).is_ok() {
            number += 1;
            let due = start + Duration::from_secs(1) * number / rate;
            sleep(due.saturating_duration_since(Instant::now()));
        }
    }
}

/// Receives pictures for `time` after the warm-up, and spends `work` of CPU time on each.
pub(crate) fn view(address: SocketAddr, time: Duration, work: Duration) -> io::Result<Report> {
    let mut stream = TcpStream::connect(address)?;
    let mut picture = vec![0; PICTURE];
    let begin = Instant::now();
    while begin.elapsed() < WARM_UP {
        stream.read_exact(&mut picture)?;
        decode(work);
    }
    let start = Instant::now();
    let mut last = start;
    let mut gaps_ms = Vec::new();
    while start.elapsed() < time {
        stream.read_exact(&mut picture)?;
        decode(work);
        let now = Instant::now();
        gaps_ms.push(now.duration_since(last).as_secs_f64() * 1e3);
        last = now;
    }
    let seconds = last.duration_since(start).as_secs_f64();
    if gaps_ms.is_empty() {
        return Err(ErrorKind::InvalidInput.into());
    }
    Ok(Report {
        pictures: gaps_ms.len(),
        per_second: gaps_ms.len() as f64 / seconds,
        longest_gap_ms: gaps_ms.iter().copied().fold(0.0, f64::max),
        gaps_ms,
    })
}

/// Computes until the thread has used `work` of CPU time.
fn decode(work: Duration) {
    let until = run_time() + work;
    while run_time() < until {
        for _ in 0..1000 {
            std::hint::spin_loop();
        }
    }
}

fn run_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}
