//! Throughput over long, slow and lossy paths, and fairness between flows of both stacks. The beds
//! are impaired links, which carry the kernel's traffic and Portolan's alike.

use std::cell::OnceCell;
use std::thread;
use std::time::Duration;

use portolan_netns::Impairment;

use super::{Better, Case};
use crate::bed::{Bed, Side, Stack};
use crate::process::run;
use crate::{Effort, MeasureError};

const PORT: u16 = 7000;
/// The port of the second stack's flows when both share a link.
const SECOND_PORT: u16 = 7100;
/// The buffer of a deep path, in time at its rate.
const DEEP: Duration = Duration::from_millis(250);
/// The minimum buffer of a router: ten packets.
const LEAST_BUFFER: usize = 15_000;
/// Flows of each stack that share the link.
const SHARING: u16 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Buffer {
    /// A quarter of the bandwidth-delay product.
    Shallow,
    Deep,
}

#[derive(Clone, Copy, Debug)]
struct Path {
    /// Bits per second.
    rate: u64,
    /// Round-trip time.
    rtt: Duration,
    /// Lost packets per thousand, in each direction.
    loss: u32,
    buffer: Buffer,
}

impl Path {
    const QUICK: [Path; 4] = [
        Path::new(10, 20, 1, Buffer::Deep),
        Path::new(10, 100, 10, Buffer::Deep),
        Path::new(100, 20, 1, Buffer::Shallow),
        Path::new(100, 1, 10, Buffer::Shallow),
    ];

    const fn new(megabits: u64, rtt_ms: u64, loss: u32, buffer: Buffer) -> Path {
        Path {
            rate: megabits * 1_000_000,
            rtt: Duration::from_millis(rtt_ms),
            loss,
            buffer,
        }
    }

    fn all() -> impl Iterator<Item = Path> {
        [10, 100].into_iter().flat_map(|rate| {
            [1, 20, 100].into_iter().flat_map(move |rtt| {
                [1, 10, 30].into_iter().flat_map(move |loss| {
                    [Buffer::Shallow, Buffer::Deep].map(|buffer| Path::new(rate, rtt, loss, buffer))
                })
            })
        })
    }

    fn name(&self) -> String {
        let loss = match self.loss {
            1 => "0.1".to_owned(),
            thousandths => (thousandths / 10).to_string(),
        };
        let buffer = match self.buffer {
            Buffer::Shallow => "shallow",
            Buffer::Deep => "deep",
        };
        let (rate, rtt) = (self.rate / 1_000_000, self.rtt.as_millis());
        format!("path-{rate}m-{rtt}ms-{loss}pct-{buffer}")
    }

    fn impairment(&self) -> Impairment {
        let bytes = |time: Duration| (self.rate as f64 / 8.0 * time.as_secs_f64()) as usize;
        Impairment {
            delay: self.rtt / 2,
            rate: Some(self.rate),
            loss: f64::from(self.loss) / 1000.0,
            buffer: match self.buffer {
                Buffer::Shallow => (bytes(self.rtt) / 4).max(LEAST_BUFFER),
                Buffer::Deep => bytes(DEEP),
            },
            per_flow: true,
            ..Impairment::default()
        }
    }

    /// Returns the number of flows that are measured at a time, each on a path of its own: many on slow paths,
    /// whose results vary by chance; few on fast ones, which would keep the machine busy.
    fn flows(&self) -> u16 {
        let fast = self.rate > 50_000_000 && (self.loss < 10 || self.rtt.as_millis() < 10);
        if fast { 2 } else { 12 }
    }
}

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(8.0);
    let paths: Vec<Path> = if effort.quick {
        Path::QUICK.to_vec()
    } else {
        Path::all().collect()
    };
    let mut cases: Vec<Case> = paths.into_iter().map(|p| path_case(p, seconds)).collect();
    cases.push(fair_case("fair-2x2", 20, 2.5 * seconds));
    if !effort.quick {
        cases.push(fair_case("fair-2x2-100ms", 100, 4.0 * seconds));
    }
    cases
}

fn path_case(path: Path, seconds: f64) -> Case {
    let bed = LazyBed::new(path.impairment());
    let traffic = Traffic {
        port: PORT,
        flows: path.flows(),
        skip: seconds / 4.0,
        seconds,
    };
    Case::new(path.name(), "Mb/s", Better::Higher, move |_, stack| {
        let rates = traffic.run(bed.get()?, stack)?;
        Ok(rates.iter().sum::<f64>() / rates.len() as f64)
    })
}

/// Jain's index of four flows on one link with a buffer of one round trip: for the kernel, all flows are the kernel's;
/// for Portolan, two of them are.
fn fair_case(name: &str, rtt_ms: u64, seconds: f64) -> Case {
    let path = Path::new(20, rtt_ms, 0, Buffer::Shallow);
    let shallow = path.impairment();
    let bed = LazyBed::new(Impairment {
        per_flow: false,
        buffer: 4 * shallow.buffer,
        ..shallow
    });
    let half = move |port| Traffic {
        port,
        flows: SHARING,
        skip: seconds / 2.0,
        seconds,
    };
    Case::new(name, "Jain", Better::Higher, move |_, stack| {
        let bed = bed.get()?;
        let (first, second) = thread::scope(|scope| {
            let second = scope.spawn(|| half(SECOND_PORT).run(bed, Stack::Kernel));
            (half(PORT).run(bed, stack), second.join())
        });
        // A panic of the other thread is propagated.
        let second = second.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok(jain(&[first?, second?].concat()))
    })
}

/// Returns Jain's index: one if all have the same rate, 1/n if one has all of it.
fn jain(rates: &[f64]) -> f64 {
    let sum: f64 = rates.iter().sum();
    let squares: f64 = rates.iter().map(|rate| rate * rate).sum();
    sum * sum / (rates.len() as f64 * squares)
}

/// A bed that is made at the first use.
struct LazyBed {
    impairment: Impairment,
    bed: OnceCell<Bed>,
}

impl LazyBed {
    fn new(impairment: Impairment) -> LazyBed {
        LazyBed {
            impairment,
            bed: OnceCell::new(),
        }
    }

    fn get(&self) -> Result<&Bed, MeasureError> {
        if let Some(bed) = self.bed.get() {
            return Ok(bed);
        }
        let bed = Bed::impaired(self.impairment)?;
        // Portolan's default; some distributions choose another one for the kernel.
        bed.set_kernel_congestion("cubic");
        Ok(self.bed.get_or_init(|| bed))
    }
}

/// Simultaneous flows from the client to the server.
#[derive(Clone, Copy)]
struct Traffic {
    port: u16,
    flows: u16,
    /// Seconds before the measurement, and its duration.
    skip: f64,
    seconds: f64,
}

impl Traffic {
    /// Returns the megabits per second of each flow.
    fn run(self, bed: &Bed, stack: Stack) -> Result<Vec<f64>, MeasureError> {
        let address = bed.endpoint(self.port).to_string();
        let words = [
            address,
            "--count".to_owned(),
            self.flows.to_string(),
            "--skip".to_owned(),
            self.skip.to_string(),
            "--seconds".to_owned(),
            self.seconds.to_string(),
        ];
        let mut serve = vec!["measure"];
        serve.extend(words.iter().map(String::as_str));
        let _receiver = bed.serve(stack, self.port, "portolan-traffic", &serve)?;
        let output = run(bed
            .command(Side::Client, stack, "portolan-traffic")
            .arg("flows")
            .args(&words))?;
        rates(&output).ok_or(MeasureError::Output {
            program: "portolan-traffic",
            output,
        })
    }
}

fn rates(output: &str) -> Option<Vec<f64>> {
    let report: serde_json::Value = serde_json::from_str(output).ok()?;
    let rates = report.get("megabits_per_second")?.as_array()?;
    rates.iter().map(serde_json::Value::as_f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_one_for_equals_and_small_for_a_monopoly() {
        assert!((jain(&[3.0, 3.0, 3.0]) - 1.0).abs() < 1e-9);
        assert!((jain(&[4.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn paths_are_named_by_what_they_are() {
        assert_eq!(
            Path::new(10, 20, 10, Buffer::Deep).name(),
            "path-10m-20ms-1pct-deep"
        );
        assert_eq!(
            Path::new(100, 1, 1, Buffer::Shallow).name(),
            "path-100m-1ms-0.1pct-shallow"
        );
        assert_eq!(Path::all().count(), 36);
    }
}
