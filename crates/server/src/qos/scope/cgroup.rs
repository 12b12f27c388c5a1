//! Cgroups of both versions. A scope names a directory below `/sys/fs/cgroup`; where hierarchies of version 1 are
//! mounted there too, the first part of the path may name one of them (`/cpu/video`). A path that names none belongs
//! to version 2, wherever that is mounted.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const ROOT: &str = "/sys/fs/cgroup";

/// The mounts of the machine's hierarchies; they do not change at run time.
static HIERARCHIES: LazyLock<Vec<Hierarchy>> = LazyLock::new(|| {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    hierarchies(&mounts)
});

/// One tree of cgroups.
#[derive(Debug, PartialEq)]
struct Hierarchy {
    /// The name in `/proc/PID/cgroup`: empty for version 2.
    controllers: Vec<String>,
    /// The cgroup that is mounted.
    root: PathBuf,
    mounted_at: PathBuf,
}

pub(super) fn exists(path: &str) -> bool {
    folder(path, &HIERARCHIES).is_some_and(|folder| folder.join("cgroup.procs").exists())
}

/// Returns whether the process is in the cgroup, or in one below it.
pub(super) fn has(path: &str, pid: u32) -> bool {
    let Some(memberships) = super::memberships_of(pid) else {
        return false;
    };
    folder(path, &HIERARCHIES).is_some_and(|folder| is_member(&folder, &memberships, &HIERARCHIES))
}

/// Returns the directory of version 2 among the memberships of a process.
pub(super) fn folder_of(memberships: &str) -> Option<PathBuf> {
    let path = memberships
        .lines()
        .find_map(|line| line.strip_prefix("0::"))?;
    let second = HIERARCHIES.iter().find(|h| h.controllers.is_empty())?;
    second.folder(Path::new(path))
}

/// Returns the directory that a scope's path names.
fn folder(path: &str, hierarchies: &[Hierarchy]) -> Option<PathBuf> {
    let named = Path::new(ROOT).join(path.trim_start_matches('/'));
    if hierarchies.iter().any(|h| named.starts_with(&h.mounted_at)) {
        return Some(named);
    }
    let second = hierarchies.iter().find(|h| h.controllers.is_empty())?;
    Some(second.mounted_at.join(path.trim_start_matches('/')))
}

/// Parses lines of `/proc/PID/cgroup`: number, controllers, path.
fn is_member(folder: &Path, memberships: &str, hierarchies: &[Hierarchy]) -> bool {
    memberships.lines().any(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            return false;
        };
        let of_line = |h: &&Hierarchy| h.is(controllers);
        hierarchies
            .iter()
            .filter(of_line)
            .filter_map(|h| h.folder(Path::new(path)))
            .any(|own| own.starts_with(folder))
    })
}

impl Hierarchy {
    fn is(&self, controllers: &str) -> bool {
        let mut listed: Vec<_> = controllers.split(',').filter(|c| !c.is_empty()).collect();
        listed.sort_unstable();
        listed == self.controllers
    }

    fn folder(&self, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&self.root).ok()?;
        Some(self.mounted_at.join(below))
    }
}

/// Parses lines of proc_pid_mountinfo(5).
fn hierarchies(mounts: &str) -> Vec<Hierarchy> {
    mounts.lines().filter_map(hierarchy).collect()
}

fn hierarchy(line: &str) -> Option<Hierarchy> {
    let (mount, system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, mounted_at) = (mount.next()?.into(), mount.next()?.into());
    let mut system = system.split(' ');
    let controllers = match system.next()? {
        "cgroup2" => Vec::new(),
        "cgroup" => controllers(system.nth(1)?),
        _ => return None,
    };
    Some(Hierarchy {
        controllers,
        root,
        mounted_at,
    })
}

/// Returns the controllers among the options of a mount.
fn controllers(options: &str) -> Vec<String> {
    const OTHERS: [&str; 6] = ["rw", "ro", "xattr", "noprefix", "clone_children", "none"];
    let mut controllers: Vec<_> = options
        .split(',')
        .filter(|option| !OTHERS.contains(option) && !option.starts_with("release_agent="))
        .map(str::to_owned)
        .collect();
    controllers.sort_unstable();
    controllers
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str =
        "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 master:2 - cgroup cgroup rw,cpuacct,cpu\n\
        40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    const CONTAINER: &str = "30 20 0:26 /pod/box /sys/fs/cgroup ro - cgroup2 cgroup rw\n";

    fn member(mounts: &str, memberships: &str, path: &str) -> bool {
        let hierarchies = hierarchies(mounts);
        folder(path, &hierarchies)
            .is_some_and(|folder| is_member(&folder, memberships, &hierarchies))
    }

    #[test]
    fn a_cgroup_has_those_below_it_and_none_beside_it() {
        let a_b = |path| member(UNIFIED, "0::/a/b\n", path);
        assert!(a_b("/a"));
        assert!(a_b("/a/b"));
        assert!(a_b("/"));
        assert!(!a_b("/a/b/c"));
        assert!(!a_b("/ab"));
        assert!(!a_b("/b"));
    }

    #[test]
    fn hierarchies_of_the_first_version_are_named_by_their_folder() {
        let memberships = "9:name=systemd:/\n2:cpu,cpuacct:/video\n0::/audio\n";
        let is_in = |path| member(HYBRID, memberships, path);
        assert!(is_in("/cpu,cpuacct/video"));
        assert!(is_in("/audio"), "the second version needs no name");
        assert!(is_in("/unified/audio"), "but may have one");
        assert!(!is_in("/video"));
        assert!(!is_in("/systemd/video"));
        assert!(!is_in("/cpu,cpuacct/audio"));
    }

    #[test]
    fn a_mount_of_a_part_shows_that_part() {
        assert!(member(CONTAINER, "0::/pod/box/a\n", "/a"));
        assert!(!member(CONTAINER, "0::/pod/other/a\n", "/a"));
    }

    #[test]
    fn colons_in_a_path_belong_to_it() {
        assert!(member(UNIFIED, "0::/a:b\n", "/a:b"));
    }

    #[test]
    fn no_file_makes_the_parsers_panic() {
        portolan_fuzz::check!(1000)
            .with_type::<(String, String, String)>()
            .for_each(|(mounts, memberships, path)| {
                member(mounts, memberships, path);
            });
    }

    #[test]
    fn this_process_is_in_a_cgroup_of_this_machine() {
        if !HIERARCHIES.is_empty() {
            assert!(exists("/"));
            assert!(has("/", std::process::id()));
        }
        assert!(!exists("/no/such/cgroup"));
    }
}
