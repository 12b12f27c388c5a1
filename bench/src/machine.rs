//! How busy the machine was during a measurement, from `/proc`.

use std::fs;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The share of CPU time used by others above which figures are unreliable.
const BUSY: f64 = 0.1;

/// The share of CPU time taken by the hypervisor above which figures are unreliable.
const STOLEN: f64 = 0.02;

/// The state of the machine while a figure was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineState {
    /// The one-minute load average when the figure was complete.
    pub load: f64,
    /// The share of all CPUs' time that the hypervisor took during the measurement.
    pub steal: f64,
}

/// Sums of CPU time since boot, in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    idle: u64,
    steal: u64,
    total: u64,
}

impl CpuTimes {
    /// Reads `/proc/stat`. Returns zeros where it cannot be read.
    pub fn now() -> CpuTimes {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        CpuTimes::parse(&text).unwrap_or_default()
    }

    /// Parses the first line: `cpu  user nice system idle iowait irq softirq steal guest guest_nice`.
    fn parse(text: &str) -> Option<CpuTimes> {
        let fields: Vec<u64> = text
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        // `user` and `nice` include the guests' time.
        let fields = fields.get(..8)?;
        Some(CpuTimes {
            idle: fields[3] + fields[4],
            steal: fields[7],
            total: fields.iter().sum(),
        })
    }

    /// Returns the share of stolen time since `self`.
    fn stolen_until(self, later: CpuTimes) -> f64 {
        share(self.steal, later.steal, self.total, later.total)
    }

    /// Returns the share of time since `self` in which CPUs were not idle.
    fn busy_until(self, later: CpuTimes) -> f64 {
        1.0 - share(self.idle, later.idle, self.total, later.total)
    }

    /// Returns the state of the machine for a measurement that began at `self`.
    pub fn state(self) -> MachineState {
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|word| word.parse().ok());
        MachineState {
            load: load.unwrap_or_default(),
            steal: self.stolen_until(CpuTimes::now()),
        }
    }
}

fn share(part: u64, later_part: u64, total: u64, later_total: u64) -> f64 {
    let elapsed = later_total.saturating_sub(total).max(1);
    later_part.saturating_sub(part) as f64 / elapsed as f64
}

/// Returns a warning if the machine is disturbed. Observes it for a while, during which the benchmark does not
/// run anything.
pub fn disturbance(watch: Duration) -> Option<String> {
    let before = CpuTimes::now();
    std::thread::sleep(watch);
    describe(before, CpuTimes::now())
}

fn describe(before: CpuTimes, after: CpuTimes) -> Option<String> {
    let stolen = before.stolen_until(after);
    if stolen > STOLEN {
        return Some(format!(
            "the hypervisor gives {:.0} % of this machine's CPU time to others",
            100.0 * stolen
        ));
    }
    let busy = before.busy_until(after);
    (busy > BUSY).then(|| {
        format!(
            "other programs use {:.0} % of this machine's CPU time",
            100.0 * busy
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(idle: u64, steal: u64, total: u64) -> CpuTimes {
        CpuTimes { idle, steal, total }
    }

    #[test]
    fn the_first_line_of_proc_stat_is_read() {
        let text = "cpu  10 1 5 80 4 0 2 3 7 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(CpuTimes::parse(text), Some(times(84, 3, 105)));
        assert_eq!(CpuTimes::parse("intr 5"), None);
        assert_eq!(CpuTimes::parse("cpu  1 2 x"), None);
        assert_eq!(CpuTimes::parse("cpu  1 2 3"), None);
    }

    #[test]
    fn a_busy_machine_is_told_apart_from_a_quiet_one() {
        let start = times(1000, 0, 2000);
        assert_eq!(describe(start, times(1095, 0, 2100)), None);
        let busy = describe(start, times(1050, 0, 2100)).unwrap();
        assert!(busy.contains("50 %"), "{busy}");
        let stolen = describe(start, times(1090, 5, 2100)).unwrap();
        assert!(stolen.contains("hypervisor"), "{stolen}");
    }

    #[test]
    fn no_time_at_all_is_quiet() {
        let start = times(1000, 0, 2000);
        assert_eq!(start.stolen_until(start), 0.0);
    }
}
