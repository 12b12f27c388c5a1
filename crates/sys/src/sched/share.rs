//! A cgroup for a single thread, for its share of the CPUs: in the `cpu` hierarchy of cgroup version 1, where single
//! threads can be moved without other effects, or, if version 2 has the controller, a threaded group below the thread's
//! own, so that its process stays in its group.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

mod first;
mod second;

/// Why a thread cannot have a share.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    #[error("no hierarchy of cgroups is mounted")]
    NoHierarchy,
    #[error("{group} has no cpu controller")]
    NoController { group: String },
    #[error("{path}: {source}")]
    Refused {
        path: String,
        source: std::io::Error,
    },
}

/// Determines the names and formats of a group's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    First,
    Second,
}

/// Permitted periods of a quota: 1 ms to 1 s.
const QUOTA_PERIODS_US: std::ops::RangeInclusive<u32> = 1_000..=1_000_000;
const LEAST_QUOTA_US: u64 = 1_000;

/// A thread's group. Must be ended by [`Share::end`].
#[derive(Debug)]
pub struct Share {
    version: Version,
    group: PathBuf,
    /// The thread's former group.
    before: PathBuf,
    controller: Controller,
    tid: u32,
}

/// Whether the controller is enabled for children of the thread's former group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Controller {
    /// Left as it was found.
    Found,
    /// A share enabled it, for as long as there is one.
    Requested,
}

/// Threads in groups at the root of the version 1 hierarchy: the group's path there, and the former one.
static MOVED: Mutex<BTreeMap<u32, (String, String)>> = Mutex::new(BTreeMap::new());

fn moved() -> MutexGuard<'static, BTreeMap<u32, (String, String)>> {
    MOVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread's memberships in the form of `/proc/PID/cgroup`, `told`, but with its former group in place of its share's.
pub fn memberships(tid: u32, told: &str) -> String {
    let moved = moved();
    let Some((group, before)) = moved.get(&tid) else {
        return told.to_owned();
    };
    let line = |line: &str| match line.strip_suffix(group).filter(|rest| rest.ends_with(':')) {
        Some(rest) => format!("{rest}{before}\n"),
        None => format!("{line}\n"),
    };
    told.lines().map(line).collect()
}

impl Share {
    /// Plans a share: nothing changes before [`Share::begin`].
    pub fn plan(tid: u32) -> Result<Share, ShareError> {
        match first::plan(tid) {
            Err(ShareError::NoHierarchy) => second::plan(tid),
            planned => planned,
        }
    }

    pub fn begin(&self) -> Result<(), ShareError> {
        match self.version {
            Version::First => first::begin(self),
            Version::Second => second::begin(self),
        }
    }

    /// Encodes the share for a later process, which takes it over by [`Share::adopt`]. The paths contain no double
    /// slash, and cgroup names no newline.
    pub fn record(&self) -> String {
        let kind = match (self.version, self.controller) {
            (Version::First, _) => "first",
            (Version::Second, Controller::Found) => "second",
            (Version::Second, Controller::Requested) => "second-requested",
        };
        format!("{kind} {}//{}", self.group.display(), self.before.display())
    }

    /// Takes over a share that a dead process had begun or planned. All must be adopted before the first is ended.
    pub fn adopt(tid: u32, record: &str) -> Option<Share> {
        let (kind, paths) = record.split_once(' ')?;
        let (version, controller) = match kind {
            "first" => (Version::First, Controller::Found),
            "second" => (Version::Second, Controller::Found),
            "second-requested" => (Version::Second, Controller::Requested),
            _ => return None,
        };
        let (group, before) = paths.split_once("//")?;
        let share = Share {
            version,
            group: group.into(),
            before: before.into(),
            controller,
            tid,
        };
        second::hold_controller(&share);
        Some(share)
    }

    /// Sets the weight that corresponds to a rate, in millionths of a CPU, against ordinary threads, and limits the
    /// time to it.
    pub fn set_rate(&self, rate_ppm: u32, period_us: u32) -> Result<(), ShareError> {
        let quota = Quota::of(rate_ppm, period_us);
        match self.version {
            Version::First => first::set_rate(&self.group, rate_ppm, quota),
            Version::Second => second::set_rate(&self.group, rate_ppm, quota),
        }
    }

    /// Lets the thread use more while CPUs are idle.
    pub fn lift_limit(&self) -> Result<(), ShareError> {
        match self.version {
            Version::First => write(&self.group, "cpu.cfs_quota_us", -1),
            Version::Second => write(&self.group, "cpu.max", "max"),
        }
    }

    /// A description for users.
    pub fn form(&self) -> &'static str {
        match self.version {
            Version::First => "cpu.shares and cpu.cfs_quota_us of a cgroup",
            Version::Second => "cpu.weight and cpu.max of a threaded cgroup",
        }
    }

    /// Moves the thread back. Not if it has ended, as its ID may have been reused, or if it was moved to another group
    /// since.
    pub fn end(&self) {
        if self.has_thread() {
            let _ = write(self.home(), self.threads(), self.tid);
        }
        let _ = fs::remove_dir(&self.group);
        match self.version {
            Version::First => drop(moved().remove(&self.tid)),
            Version::Second => second::release_controller(self),
        }
    }

    /// The file that lists a group's threads.
    fn threads(&self) -> &'static str {
        match self.version {
            Version::First => "tasks",
            Version::Second => "cgroup.threads",
        }
    }

    fn has_thread(&self) -> bool {
        let inside = fs::read_to_string(self.group.join(self.threads())).unwrap_or_default();
        let number = self.tid.to_string();
        inside.lines().any(|line| line == number)
    }

    /// The former group, or its nearest ancestor that still exists.
    fn home(&self) -> &Path {
        let mut groups = self.before.ancestors();
        groups.find(|group| group.is_dir()).unwrap_or(&self.before)
    }
}

/// The permitted part of each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quota {
    quota_us: u64,
    period_us: u64,
}

impl Quota {
    /// A quota is at least a millisecond, so its period may have to be longer.
    fn of(rate_ppm: u32, period_us: u32) -> Quota {
        let period = period_us.clamp(*QUOTA_PERIODS_US.start(), *QUOTA_PERIODS_US.end());
        let quota = u64::from(period) * u64::from(rate_ppm) / 1_000_000;
        let stretch = LEAST_QUOTA_US.div_ceil(quota.max(1));
        let period_us = (u64::from(period) * stretch).min(u64::from(*QUOTA_PERIODS_US.end()));
        let quota_us = (period_us * u64::from(rate_ppm) / 1_000_000).max(LEAST_QUOTA_US);
        Quota {
            quota_us,
            period_us,
        }
    }
}

/// The group's name, which contains the server's process ID and the thread ID.
fn name(tid: u32) -> String {
    format!("portolan-{}-{tid}", std::process::id())
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

fn create(group: &Path) -> Result<(), ShareError> {
    match fs::create_dir(group) {
        // Left over from an ended thread with the same ID.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        created => created.map_err(|source| refused(group, source)),
    }
}

/// Mount point of the first matching hierarchy in proc_pid_mounts(5).
fn mount_point(is_meant: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        is_meant(kind, options).then(|| PathBuf::from(path))
    })
}

/// Mount points of the hierarchies that control CPU time, of either version.
pub fn hierarchies() -> impl Iterator<Item = PathBuf> {
    let first = mount_point(|kind, options| {
        kind == "cgroup" && options.split(',').any(|option| option == "cpu")
    });
    let second = mount_point(|kind, _| kind == "cgroup2");
    first.into_iter().chain(second)
}

/// A thread's group in the hierarchy with these controllers.
fn group_of(tid: u32, is_meant: impl Fn(&str) -> bool) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{tid}/cgroup")).ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        is_meant(controllers).then(|| path.to_owned())
    })
}

#[cfg(test)]
mod tests;
