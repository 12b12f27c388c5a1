//! The cost of single parts of the library, without a network: locks and thread switches, buffers, timers and
//! checksums (MS §VII-A). Prints one JSON object: points `[x, nanoseconds]` by the name of the curve.
#![forbid(unsafe_code)]

mod buffers;
mod checksums;
mod locks;
mod timers;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};

#[derive(Parser)]
#[command(
    name = "portolan-micro",
    version,
    about = "Costs of parts of the protocol library"
)]
struct Arguments {
    part: Part,
    /// Duration of the measurement of each point.
    #[arg(long, default_value_t = 50)]
    milliseconds: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Part {
    Locks,
    Buffers,
    Timers,
    Checksums,
}

/// The points of each curve.
type Curves = BTreeMap<&'static str, Vec<[f64; 2]>>;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let clock = Clock {
        time: Duration::from_millis(arguments.milliseconds.max(1)),
    };
    let measured = match arguments.part {
        Part::Locks => locks::measure(clock),
        Part::Buffers => Ok(buffers::measure(clock)),
        Part::Timers => Ok(timers::measure(clock)),
        Part::Checksums => Ok(checksums::measure(clock)),
    };
    let printed = measured.and_then(|curves| Ok(serde_json::to_string(&curves)?));
    match printed {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("portolan-micro: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The duration of the measurement of a point.
#[derive(Clone, Copy)]
struct Clock {
    time: Duration,
}

impl Clock {
    /// Returns the nanoseconds per call of `step`: the minimum of several batches, each with a part of the time.
    fn measure<T>(self, mut step: impl FnMut() -> T) -> f64 {
        const BATCHES: u32 = 10;
        let goal = self.time / BATCHES;
        let mut count = 1_u32;
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        while begin.elapsed() < self.time || best.is_infinite() {
            let start = Instant::now();
            for _ in 0..count {
                black_box(step());
            }
            let took = start.elapsed();
            if took * 2 < goal && count < 1 << 28 {
                count *= 2;
                continue;
            }
            best = best.min(took.as_nanos() as f64 / f64::from(count));
        }
        best
    }

    /// Returns the mean nanoseconds per call of `step`, for steps that other threads disturb.
    fn mean(self, mut step: impl FnMut()) -> f64 {
        let mut count = 0_u64;
        let start = Instant::now();
        while start.elapsed() < self.time {
            (0..1000).for_each(|_| step());
            count += 1000;
        }
        start.elapsed().as_nanos() as f64 / count as f64
    }
}

/// The sizes in the papers' figures, and larger ones.
const SIZES: [usize; 9] = [16, 64, 256, 512, 1024, 1448, 4096, 16_384, 65_536];
