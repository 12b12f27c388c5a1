//! cgroup version 1: a group at the root of the `cpu` hierarchy, whose weight counts against all others there.

use std::path::Path;

use super::{
    Controller, Quota, Share, ShareError, Version, create, group_of, mount_point, moved, name,
    write,
};

/// Maximum of `cpu.shares`.
const MOST_SHARES: u64 = 262_144;

fn has_cpu(controllers: &str) -> bool {
    controllers.split(',').any(|name| name == "cpu")
}

pub(super) fn plan(tid: u32) -> Result<Share, ShareError> {
    let mount = mount_point(|kind, options| kind == "cgroup" && has_cpu(options));
    let mount = mount.ok_or(ShareError::NoHierarchy)?;
    let before = group_of(tid, has_cpu).ok_or(ShareError::NoHierarchy)?;
    Ok(Share {
        version: Version::First,
        group: mount.join(name(tid)),
        before: mount.join(before.trim_start_matches('/')),
        controller: Controller::Found,
        tid,
    })
}

pub(super) fn begin(share: &Share) -> Result<(), ShareError> {
    let before = group_of(share.tid, has_cpu).ok_or(ShareError::NoHierarchy)?;
    create(&share.group)?;
    // Recorded first, so that nobody sees the thread outside its own group.
    moved().insert(share.tid, (format!("/{}", name(share.tid)), before));
    write(&share.group, "tasks", share.tid).inspect_err(|_| share.end())
}

pub(super) fn set_rate(group: &Path, rate_ppm: u32, quota: Quota) -> Result<(), ShareError> {
    let shares = MOST_SHARES * u64::from(rate_ppm) / 1_000_000;
    write(group, "cpu.shares", shares.clamp(2, MOST_SHARES))?;
    write(group, "cpu.cfs_period_us", quota.period_us)?;
    write(group, "cpu.cfs_quota_us", quota.quota_us)
}
