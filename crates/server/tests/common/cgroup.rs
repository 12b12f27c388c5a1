//! Cgroups for tests.

use std::path::PathBuf;

/// A cgroup for the time of the test, and the path by which the server knows it.
pub(crate) struct Cgroup {
    folder: PathBuf,
    pub path: String,
}

impl Cgroup {
    /// Makes a cgroup in a hierarchy of this machine that imposes no limits.
    pub(crate) fn new(name: &str) -> Cgroup {
        let name = format!("portolan-test-{}-{name}", std::process::id());
        let hierarchies = ["freezer/", "unified/", ""];
        let mut paths = hierarchies
            .map(|hierarchy| format!("/{hierarchy}{name}"))
            .into_iter();
        let found = paths.find_map(|path| {
            let folder = PathBuf::from(format!("/sys/fs/cgroup{path}"));
            std::fs::create_dir(&folder).ok()?;
            Some(Cgroup { folder, path })
        });
        found.expect("a hierarchy that root may write")
    }

    pub(crate) fn take_in_this_process(&self) {
        let pid = std::process::id().to_string();
        std::fs::write(self.folder.join("cgroup.procs"), pid).unwrap();
    }
}

impl Drop for Cgroup {
    /// Processes that other tests have started in the meantime are in it, too.
    fn drop(&mut self) {
        let outside = self.folder.parent().unwrap().join("cgroup.procs");
        let inside = std::fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        for pid in inside.lines() {
            let _ = std::fs::write(&outside, pid);
        }
        let _ = std::fs::remove_dir(&self.folder);
    }
}
