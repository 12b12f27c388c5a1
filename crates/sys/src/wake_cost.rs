//! The cost on this machine of sleeping and being woken by another CPU: a few microseconds on bare metal, tens
//! of them if a hypervisor must resume a halted virtual CPU.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

/// Round trips that are measured.
const ROUND_TRIPS: usize = 64;
/// Minimum number of round trips: with fewer, the machine was too busy for a result.
const ROUND_TRIPS_MIN: usize = 9;
const TIME_LIMIT: Duration = Duration::from_millis(30);

/// Two threads on different CPUs wake each other alternately; returns half of the median round trip. Fails if there is
/// only one CPU, and with `EAGAIN` if the machine was too busy.
pub fn measure() -> Result<Duration, Errno> {
    let [there, back] = [
        eventfd(0, EventfdFlags::CLOEXEC)?,
        eventfd(0, EventfdFlags::CLOEXEC)?,
    ];
    let here = sched_getcpu();
    let mut times = thread::scope(|scope| {
        scope.spawn(|| {
            // There is no other CPU.
            if leave(here).is_err() {
                let _ = give(&back, STOP);
                return;
            }
            while take(&there) == Ok(GO_ON) {
                if give(&back, GO_ON).is_err() {
                    break;
                }
            }
        });
        let begun = Instant::now();
        let mut times = Vec::with_capacity(ROUND_TRIPS);
        while times.len() < ROUND_TRIPS && begun.elapsed() < TIME_LIMIT {
            let sent = Instant::now();
            if give(&there, GO_ON).is_err() || take(&back) != Ok(GO_ON) {
                break;
            }
            times.push(sent.elapsed());
        }
        // The only way to end the other thread; a counter that is not full accepts this.
        let _ = give(&there, STOP);
        times
    });
    times.sort_unstable();
    match times.len() {
        0 => Err(Errno::IO),
        few if few < ROUND_TRIPS_MIN => Err(Errno::AGAIN),
        enough => Ok(times[enough / 2] / 2),
    }
}

/// Moves the calling thread to the other CPUs.
fn leave(processor: usize) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    let others = (0..CpuSet::MAX_CPU).filter(|&other| other != processor);
    others.for_each(|other| set.set(other));
    sched_setaffinity(None, &set)
}

const GO_ON: u64 = 1;
const STOP: u64 = 2;

fn give(fd: &impl AsFd, value: u64) -> Result<(), Errno> {
    write(fd, &value.to_ne_bytes()).map(drop)
}

fn take(fd: &impl AsFd) -> Result<u64, Errno> {
    let mut value = [0; 8];
    loop {
        match read(fd, &mut value) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => return Ok(u64::from_ne_bytes(value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    #[test]
    fn a_wake_up_costs_something_and_few_milliseconds() {
        match super::measure() {
            Ok(cost) => assert!((200..10_000_000).contains(&cost.as_nanos()), "{cost:?}"),
            // It was too busy.
            Err(errno) => assert_eq!(errno, Errno::AGAIN),
        }
    }
}
