//! A film: frames at a steady rate for an audience, and what it costs to show it (PX §5.1).

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Film {
    /// Who gets it: so many ports, from the first on.
    #[arg(long, default_value_t = 30)]
    pub streams: u16,
    #[arg(long, default_value_t = 60)]
    pub frames: u32,
    /// Frames per second.
    #[arg(long, default_value_t = 30)]
    pub rate: u32,
    /// Bytes of a frame.
    #[arg(long, default_value_t = 12_500)]
    pub size: usize,
    /// Bytes of the datagrams that a frame is sent in; 0: of one.
    #[arg(long, default_value_t = 0)]
    pub segment: u16,
}

#[derive(Debug, Serialize)]
pub struct Shown {
    pub frames: u32,
    /// Of one processor's time, this process took, in percent.
    pub cpu: f64,
}

impl Film {
    /// Sends one frame after the other; what is late goes at once.
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

    /// Everybody's endpoint, from the first on.
    pub fn audience(&self, first: SocketAddr) -> impl Iterator<Item = SocketAddr> {
        let ports = first.port()..first.port().saturating_add(self.streams);
        ports.map(move |port| SocketAddr::new(first.ip(), port))
    }

    /// Each byte depends on its place and on the frame.
    fn frame(&self, number: u32) -> Vec<u8> {
        let first = number as usize * 31;
        (first..first + self.size)
            .map(|n| (n % 251) as u8)
            .collect()
    }
}

/// Of this process, and of what the kernel does in its name.
fn run_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}
