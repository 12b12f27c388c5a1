//! cgroup version 2: a threaded group below the thread's own. The process stays in the group of its service, with all
//! its settings; the weight counts against the rest of that group.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{
    Controller, Quota, Share, ShareError, Version, create, group_of, mount_point, name, refused,
    write,
};

/// Maximum of `cpu.weight`.
const MOST_WEIGHT: u64 = 10_000;

/// Groups for whose children the controller was enabled here, and the number of their shares.
static ENABLED: Mutex<BTreeMap<PathBuf, usize>> = Mutex::new(BTreeMap::new());

fn enabled() -> MutexGuard<'static, BTreeMap<PathBuf, usize>> {
    ENABLED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn plan(tid: u32) -> Result<Share, ShareError> {
    let mount = mount_point(|kind, _| kind == "cgroup2").ok_or(ShareError::NoHierarchy)?;
    let own = group_of(tid, str::is_empty).ok_or(ShareError::NoHierarchy)?;
    plan_below(&mount.join(own.trim_start_matches('/')), tid)
}

/// `own` is the directory of the thread's group.
pub(super) fn plan_below(own: &Path, tid: u32) -> Result<Share, ShareError> {
    if !lists_cpu(own, "cgroup.controllers")? {
        let group = own.display().to_string();
        return Err(ShareError::NoController { group });
    }
    let is_on = lists_cpu(own, "cgroup.subtree_control")? && !enabled().contains_key(own);
    Ok(Share {
        version: Version::Second,
        group: own.join(name(tid)),
        before: own.to_owned(),
        controller: if is_on {
            Controller::Found
        } else {
            Controller::Requested
        },
        tid,
    })
}

pub(super) fn begin(share: &Share) -> Result<(), ShareError> {
    create(&share.group)?;
    let made =
        write(&share.group, "cgroup.type", "threaded").and_then(|()| request_controller(share));
    if let Err(error) = made {
        let _ = fs::remove_dir(&share.group);
        return Err(error);
    }
    write(&share.group, "cgroup.threads", share.tid).inspect_err(|_| share.end())
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

/// Enables the controller for the group's children, if it is not.
fn request_controller(share: &Share) -> Result<(), ShareError> {
    if share.controller == Controller::Requested && !enabled().contains_key(&share.before) {
        write(&share.before, "cgroup.subtree_control", "+cpu")?;
    }
    hold_controller(share);
    Ok(())
}

/// Keeps the controller enabled while a share that requested it exists.
pub(super) fn hold_controller(share: &Share) {
    if share.controller == Controller::Requested {
        *enabled().entry(share.before.clone()).or_insert(0) += 1;
    }
}

/// Disables the controller with the last share, if it was enabled here.
pub(super) fn release_controller(share: &Share) {
    let mut enabled = enabled();
    let Some(count) = enabled
        .get_mut(&share.before)
        .filter(|_| share.controller == Controller::Requested)
    else {
        return;
    };
    *count -= 1;
    if *count == 0 {
        enabled.remove(&share.before);
        let _ = write(&share.before, "cgroup.subtree_control", "-cpu");
    }
}

/// Resets the state to that of a new process.
#[cfg(test)]
pub(super) fn forget_controller(own: &Path) {
    enabled().remove(own);
}

fn lists_cpu(group: &Path, file: &str) -> Result<bool, ShareError> {
    let path = group.join(file);
    let list = fs::read_to_string(&path).map_err(|source| refused(&path, source))?;
    Ok(list.split_ascii_whitespace().any(|name| name == "cpu"))
}
