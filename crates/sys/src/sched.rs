//! Scheduling of single threads of any process (sched(7), sched_setattr(2)): `SCHED_DEADLINE`, restoring earlier
//! attributes, and CPU usage.

use std::fs;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::sched_getaffinity;

use crate::raw;
use crate::sysctl;

mod share;
#[cfg(test)]
mod tests;

pub use share::{Share, ShareError, hierarchies, memberships};

const SCHED_OTHER: u32 = 0;
const SCHED_BATCH: u32 = 3;
const SCHED_DEADLINE: u32 = 6;

const RESET_ON_FORK: u64 = 1;
const RECLAIM: u64 = 2;

/// The shortest runtime that the kernel accepts.
pub const LEAST_RUNTIME: Duration = Duration::from_nanos(1024);
/// The periods that the kernel accepts (`sched_deadline_period_min_us` and `_max_us`).
pub const PERIODS_US: std::ops::RangeInclusive<u32> = 100..=4_194_303;

/// The smallest bandwidth, which rounds to zero. If a thread leaves `SCHED_DEADLINE` while asleep, its bandwidth stays
/// allocated forever (Linux 6.18); so it is reduced to this first.
const LEAST: Deadline = Deadline {
    runtime: LEAST_RUNTIME,
    period: Duration::from_micros(4_194_303),
    reclaims: false,
};

/// The calling thread.
const CALLER: u32 = 0;

/// First version of `struct sched_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const SIZE: usize = size_of::<Attributes>();
const _: () = assert!(SIZE == 48);

/// A thread's parameters under `SCHED_DEADLINE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    pub runtime: Duration,
    pub period: Duration,
    /// May use time that others leave over.
    pub reclaims: bool,
}

impl Attributes {
    pub fn of(tid: u32) -> Result<Attributes, Errno> {
        let mut attributes = Attributes::default();
        let at = std::ptr::from_mut(&mut attributes).expose_provenance();
        // SAFETY: the kernel writes at most the given size.
        unsafe { raw::syscall(libc::SYS_sched_getattr, [tid as usize, at, SIZE, 0, 0, 0]) }?;
        Ok(attributes)
    }

    pub fn is_deadline(&self) -> bool {
        self.policy == SCHED_DEADLINE
    }

    /// Whether the nice value applies.
    pub fn is_ordinary(&self) -> bool {
        [SCHED_OTHER, SCHED_BATCH].contains(&self.policy)
    }

    pub fn with_nice(self, nice: i32) -> Attributes {
        Attributes { nice, ..self }
    }

    /// Whether the attributes are the defaults.
    pub fn is_plain(&self) -> bool {
        (self.policy, self.flags, self.nice) == (SCHED_OTHER, 0, 0)
    }

    /// Applies these attributes to a thread with this nice value. A thread whose nice value was changed since keeps it.
    pub fn replace_nice(&self, nice: i32, tid: u32) -> Result<(), Errno> {
        let now = Attributes::of(tid)?;
        if now.is_ordinary() && now.nice == nice {
            self.apply(tid)
        } else {
            Ok(())
        }
    }

    /// Encodes the attributes for a later process, which restores them by [`Attributes::recorded`].
    pub fn record(&self) -> String {
        let numbers = [
            self.policy.into(),
            self.flags,
            self.priority.into(),
            self.runtime,
            self.deadline,
            self.period,
        ];
        let numbers = numbers.map(|number: u64| number.to_string()).join(",");
        format!("{},{numbers}", self.nice)
    }

    pub fn recorded(text: &str) -> Option<Attributes> {
        let (nice, numbers) = text.split_once(',')?;
        let numbers: Result<Vec<u64>, _> = numbers.split(',').map(str::parse).collect();
        let [policy, flags, priority, runtime, deadline, period] = *numbers.ok()? else {
            return None;
        };
        Some(Attributes {
            size: SIZE as u32,
            policy: policy.try_into().ok()?,
            flags,
            nice: nice.parse().ok()?,
            priority: priority.try_into().ok()?,
            runtime,
            deadline,
            period,
        })
    }

    /// With a time slice (Linux 6.12), for ordinary threads: the shorter it is, the sooner the thread runs after it
    /// wakes up.
    pub fn with_slice(self, slice: Duration) -> Attributes {
        if self.is_ordinary() {
            Attributes {
                runtime: slice.as_nanos() as u64,
                ..self
            }
        } else {
            self
        }
    }

    /// Gives the calling thread, and those that it starts from now on, a time slice; returns its attributes of before.
    pub fn take_slice(slice: Duration) -> Result<Attributes, Errno> {
        let before = Attributes::of(CALLER)?;
        before.with_slice(slice).apply(CALLER)?;
        Ok(before)
    }

    #[cfg(test)]
    pub(crate) fn fifo(priority: u32) -> Attributes {
        Attributes {
            policy: 1,
            priority,
            ..Attributes::default()
        }
    }

    pub fn apply(&self, tid: u32) -> Result<(), Errno> {
        let sized = Attributes {
            size: SIZE as u32,
            ..*self
        };
        let at = std::ptr::from_ref(&sized).expose_provenance();
        // SAFETY: the kernel reads at most `size` bytes.
        unsafe { raw::syscall(libc::SYS_sched_setattr, [tid as usize, at, 0, 0, 0, 0]) }.map(drop)
    }
}

/// As long as it exists, and starts no threads, the calling thread has the longest slice that the kernel grants: it keeps
/// its share of the processor, and others preempt it when they wake up (Linux 6.12; no effect before).
pub struct LongSlice(Option<Attributes>);

impl LongSlice {
    const LENGTH: Duration = Duration::from_millis(100);

    pub fn begin() -> LongSlice {
        LongSlice(Attributes::take_slice(LongSlice::LENGTH).ok())
    }
}

impl Drop for LongSlice {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            let _ = before.apply(CALLER);
        }
    }
}

impl Deadline {
    /// Applies the deadline. Children of the thread are ordinary: the kernel would not permit any otherwise.
    pub fn apply(&self, tid: u32) -> Result<(), Errno> {
        let period = self.period.as_nanos() as u64;
        let reclaims = if self.reclaims { RECLAIM } else { 0 };
        Attributes {
            policy: SCHED_DEADLINE,
            flags: RESET_ON_FORK | reclaims,
            runtime: self.runtime.max(LEAST_RUNTIME).as_nanos() as u64,
            deadline: period,
            period,
            ..Attributes::default()
        }
        .apply(tid)
    }

    /// Restores the former attributes of the thread. A thread that was given another policy since keeps that.
    pub fn revoke(tid: u32, before: &Attributes) -> Result<(), Errno> {
        if !Attributes::of(tid)?.is_deadline() {
            return Ok(());
        }
        if !before.is_deadline() {
            LEAST.apply(tid)?;
        }
        before.apply(tid)
    }
}

/// CPU time of a thread since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub running: Duration,
    /// Time in which it was runnable but did not run.
    pub waiting: Duration,
}

impl Usage {
    /// None if the thread does not exist.
    pub fn of(tid: u32) -> Option<Usage> {
        let text = fs::read_to_string(format!("/proc/{tid}/schedstat")).ok()?;
        let mut fields = text.split_ascii_whitespace().map(str::parse);
        let mut next = || Some(Duration::from_nanos(fields.next()?.ok()?));
        Some(Usage {
            running: next()?,
            waiting: next()?,
        })
    }
}

/// The kernel's priority of a thread, the 18th field of proc_pid_stat(5): 0 to 39 for ordinary ones, lower for others.
#[cfg(test)]
pub(crate) fn priority_of(tid: u32) -> Option<i64> {
    let text = fs::read_to_string(format!("/proc/{tid}/stat")).ok()?;
    // The second field is arbitrary text in parentheses.
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(18 - 3)?.parse().ok()
}

/// The threads of a process, at most `most`.
pub fn threads_of(pid: u32, most: usize) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.take(most).collect()
}

/// Limit of real-time and deadline scheduling per CPU, in millionths.
pub fn limit_ppm() -> u32 {
    let read = |name| sysctl::read_value(name).ok()?.parse::<i64>().ok();
    let period = read("kernel/sched_rt_period_us").filter(|period| *period > 0);
    match (read("kernel/sched_rt_runtime_us"), period) {
        (Some(runtime), Some(period)) if runtime >= 0 => {
            (runtime.saturating_mul(1_000_000) / period).clamp(0, 1_000_000) as u32
        }
        // Unlimited.
        _ => 1_000_000,
    }
}

/// Whether the calling thread has a priority or a deadline that the holder of a lock could inherit.
pub(crate) fn is_real_time() -> bool {
    const CALLER: usize = 0;
    // SAFETY: takes no pointers.
    let policy = unsafe { raw::syscall(libc::SYS_sched_getscheduler, [CALLER, 0, 0, 0, 0, 0]) };
    policy.is_ok_and(|policy| {
        let policy = policy as i32 & !libc::SCHED_RESET_ON_FORK;
        [libc::SCHED_FIFO, libc::SCHED_RR, libc::SCHED_DEADLINE].contains(&policy)
    })
}

/// Whether the thread may not run on all CPUs.
pub fn is_bound(tid: u32) -> bool {
    let affinity = Pid::from_raw(tid as i32).and_then(|tid| sched_getaffinity(Some(tid)).ok());
    affinity.is_some_and(|set| set.count() < cpus())
}

/// Number of CPUs online.
pub fn cpus() -> u32 {
    let online = fs::read_to_string("/sys/devices/system/cpu/online");
    online
        .ok()
        .and_then(|list| count_of(list.trim()))
        .unwrap_or(1)
}

/// Number of CPUs in a list like `0-3,8`.
fn count_of(list: &str) -> Option<u32> {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.split(',').map(count).sum()
}
