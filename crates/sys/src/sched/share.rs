//! A cgroup of a thread's own in the `cpu` hierarchy of the first version, where single threads can be moved without a
//! change to anything but their share of the CPUs. The second version moves whole processes, with all else that their
//! group means.

use std::fs;
use std::path::{Path, PathBuf};

/// Why a thread has no share of its own.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    #[error("no cpu hierarchy of cgroup version 1 is mounted")]
    NoHierarchy,
    #[error("{path}: {source}")]
    Refused {
        path: String,
        source: std::io::Error,
    },
}

/// The most that `cpu.shares` takes.
const MOST_SHARES: u64 = 262_144;

/// The quota's period: between 1 ms and 1 s.
const QUOTA_PERIODS_US: std::ops::RangeInclusive<u32> = 1_000..=1_000_000;
const LEAST_QUOTA_US: u64 = 1_000;

/// A thread's group. Ends with [`Share::end`].
#[derive(Debug)]
pub struct Share {
    group: PathBuf,
    /// Where the thread was before.
    before: PathBuf,
    tid: u32,
}

impl Share {
    pub fn give(tid: u32) -> Result<Share, ShareError> {
        let mount = mount_point().ok_or(ShareError::NoHierarchy)?;
        let before = group_of(tid).ok_or(ShareError::NoHierarchy)?;
        let share = Share {
            group: mount.join(format!("portolan-{}-{tid}", std::process::id())),
            before: mount.join(before.trim_start_matches('/')),
            tid,
        };
        fs::create_dir_all(&share.group).map_err(|source| refused(&share.group, source))?;
        if let Err(error) = write(&share.group, "tasks", u64::from(tid)) {
            share.end();
            return Err(error);
        }
        Ok(share)
    }

    /// As much weight against ordinary threads as a rate, in millionths of a CPU, gives; and no more time than that.
    pub fn set_rate(&self, rate_ppm: u32, period_us: u32) -> Result<(), ShareError> {
        let shares = MOST_SHARES * u64::from(rate_ppm) / 1_000_000;
        write(&self.group, "cpu.shares", shares.clamp(2, MOST_SHARES))?;
        let period = period_us.clamp(*QUOTA_PERIODS_US.start(), *QUOTA_PERIODS_US.end());
        let quota = u64::from(period) * u64::from(rate_ppm) / 1_000_000;
        // A quota is at least a millisecond, so its period may have to be longer.
        let stretch = LEAST_QUOTA_US.div_ceil(quota.max(1));
        let period = (u64::from(period) * stretch).min(u64::from(*QUOTA_PERIODS_US.end()));
        let quota = period * u64::from(rate_ppm) / 1_000_000;
        write(&self.group, "cpu.cfs_period_us", period)?;
        write(&self.group, "cpu.cfs_quota_us", quota.max(LEAST_QUOTA_US))
    }

    /// The thread may have more while CPUs are idle.
    pub fn lift_limit(&self) -> Result<(), ShareError> {
        write(&self.group, "cpu.cfs_quota_us", -1)
    }

    /// Back to where it was; a thread that has ended left by itself.
    pub fn end(&self) {
        let _ = write(&self.before, "tasks", u64::from(self.tid));
        let _ = fs::remove_dir(&self.group);
    }
}

fn write(group: &Path, file: &str, value: impl std::fmt::Display) -> Result<(), ShareError> {
    let path = group.join(file);
    fs::write(&path, value.to_string()).map_err(|source| refused(&path, source))
}

fn refused(path: &Path, source: std::io::Error) -> ShareError {
    ShareError::Refused {
        path: path.display().to_string(),
        source,
    }
}

/// Where the hierarchy with the `cpu` controller is.
fn mount_point() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup" && options.split(',').any(|option| option == "cpu"))
            .then(|| PathBuf::from(path))
    })
}

/// A thread's group there.
fn group_of(tid: u32) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{tid}/cgroup")).ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let has_cpu = controllers.split(',').any(|name| name == "cpu");
        has_cpu.then(|| path.to_owned())
    })
}
