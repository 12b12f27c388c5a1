//! The second version: a threaded group below the thread's own. The process stays where its service put it, with all
//! that its group means; the weight is one against what else is in that group.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{
    Quota, Share, ShareError, Version, create, group_of, mount_point, name, refused, write,
};

/// The most that `cpu.weight` takes.
const MOST_WEIGHT: u64 = 10_000;

/// Groups for whose children the controller was turned on here, and how many of these have threads.
static ENABLED: Mutex<BTreeMap<PathBuf, usize>> = Mutex::new(BTreeMap::new());

fn enabled() -> MutexGuard<'static, BTreeMap<PathBuf, usize>> {
    ENABLED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn give(tid: u32) -> Result<Share, ShareError> {
    let mount = mount_point(|kind, _| kind == "cgroup2").ok_or(ShareError::NoHierarchy)?;
    let own = group_of(tid, str::is_empty).ok_or(ShareError::NoHierarchy)?;
    give_below(&mount.join(own.trim_start_matches('/')), tid)
}

/// `own` is the folder of the thread's group.
pub(super) fn give_below(own: &Path, tid: u32) -> Result<Share, ShareError> {
    if !lists_cpu(own, "cgroup.controllers")? {
        let group = own.display().to_string();
        return Err(ShareError::NoController { group });
    }
    let share = Share {
        version: Version::Second,
        group: own.join(name(tid)),
        before: own.to_owned(),
        tid,
    };
    create(&share.group)?;
    let made =
        write(&share.group, "cgroup.type", "threaded").and_then(|()| request_controller(own));
    if let Err(error) = made {
        let _ = fs::remove_dir(&share.group);
        return Err(error);
    }
    if let Err(error) = write(&share.group, "cgroup.threads", tid) {
        share.end();
        return Err(error);
    }
    Ok(share)
}

pub(super) fn set_rate(group: &Path, rate_ppm: u32, quota: Quota) -> Result<(), ShareError> {
    let weight = MOST_WEIGHT * u64::from(rate_ppm) / 1_000_000;
    write(group, "cpu.weight", weight.clamp(1, MOST_WEIGHT))?;
    let Quota {
        quota_us,
        period_us,
    } = quota;
    write(group, "cpu.max", format_args!("{quota_us} {period_us}"))
}

/// Has the group's children be weighed, if they are not.
fn request_controller(own: &Path) -> Result<(), ShareError> {
    let mut enabled = enabled();
    if let Some(count) = enabled.get_mut(own) {
        *count += 1;
        return Ok(());
    }
    if !lists_cpu(own, "cgroup.subtree_control")? {
        write(own, "cgroup.subtree_control", "+cpu")?;
        enabled.insert(own.to_owned(), 1);
    }
    Ok(())
}

/// The last one turns it off, if it was turned on here.
pub(super) fn release_controller(own: &Path) {
    let mut enabled = enabled();
    let Some(count) = enabled.get_mut(own) else {
        return;
    };
    *count -= 1;
    if *count == 0 {
        enabled.remove(own);
        let _ = write(own, "cgroup.subtree_control", "-cpu");
    }
}

fn lists_cpu(group: &Path, file: &str) -> Result<bool, ShareError> {
    let path = group.join(file);
    let list = fs::read_to_string(&path).map_err(|source| refused(&path, source))?;
    Ok(list.split_ascii_whitespace().any(|name| name == "cpu"))
}
