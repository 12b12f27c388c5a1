//! A film: frames at a steady rate for an audience, and the CPU time that sending it takes (PX §5.1).

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Film {
    /// Number of viewers, each at a port of its own, counted from the first.
    #[arg(long, default_value_t = 30)]
    pub streams: u16,
    #[arg(long, default_value_t = 60)]
    pub frames: u32,
    /// Frames per second.
    #[arg(long, default_value_t = 30)]
    pub rate: u32,
    /// Bytes per frame.
    #[arg(long, default_value_t = 12_500)]
    pub size: usize,
    /// Bytes of the datagrams that a frame is sent in; 0: one datagram per frame.
    #[arg(long, default_value_t = 0)]
    pub segment: u16,
}

#[derive(Debug, Serialize)]
pub struct Shown {
    pub frames: u32,
    /// CPU time of this process, in percent of one processor.
    pub cpu: f64,
}

impl Film {
    /// Sends all frames in turn. Frames that are late are sent at once.
    pub fn show(&self, mut send: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<Shown> {
        let start = Instant::now();
        let before = run_time();
        for number in 0..self.frames {
            send(&self.frame(number))?;
            let due = start + Duration::from_secs(1) * (number + 1) / self.rate;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        let took = run_time() - before;
        Ok(Shown {
            frames: self.frames,
            cpu: took.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0,
        })
    }

    /// Returns the endpoints of all viewers, from the first on.
    pub fn audience(&self, first: SocketAddr) -> impl Iterator<Item = SocketAddr> {
        let ports = first.port()..first.port().saturating_add(self.streams);
        ports.map(move |port| SocketAddr::new(first.ip(), port))
    }

    /// Returns a frame, in which each byte depends on its position and on the frame's number.
    fn frame(&self, number: u32) -> Vec<u8> {
        let first = number as usize * 31;
        (first..first + self.size)
            .map(|n| (n % 251) as u8)
            .collect()
    }
}

/// Returns the CPU time of this process, including system calls.
fn run_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}
