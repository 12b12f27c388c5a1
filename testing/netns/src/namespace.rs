//! One host of a bed: a network namespace, kept alive by a descriptor.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::process::Command;

use portolan_sys::{namespace, sysctl};

/// A network namespace with loopback up. The kernel removes it when the descriptor is closed and
/// its last process has ended.
#[derive(Debug)]
pub struct Namespace {
    fd: OwnedFd,
    tag: String,
}

impl Namespace {
    /// Creates a namespace. `tag` is shown in messages. Its devices use their IPv6 addresses at once, without
    /// duplicate address detection: which source address is chosen does not depend on the time.
    pub fn new(tag: &str) -> Namespace {
        let fd = namespace::create().expect("root may create network namespaces");
        let namespace = Namespace {
            fd,
            tag: tag.to_owned(),
        };
        namespace.enter(|| {
            let written = sysctl::write("net/ipv6/conf/default/accept_dad", "0");
            written.expect("a namespace's sysctls may be written");
        });
        namespace.ip("link set lo up");
        namespace
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Returns a path by which other programs can enter it while this process lives:
    /// `nsenter --net=<path>`.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }

    /// Returns the inode number that `/proc/self/ns/net` shows for programs in it.
    pub fn inode(&self) -> u64 {
        self.enter(|| namespace::inode().expect("a thread's namespace can be looked at"))
    }

    /// Returns a command that will run `program` inside.
    pub fn exec(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let fd = self.fd.try_clone().expect("a descriptor can be copied");
        namespace::start_in(&mut command, fd);
        command
    }

    /// Runs `action` inside, on a thread of its own, and returns its result.
    pub fn enter<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                namespace::enter(&self.fd).expect("root may enter a namespace");
                action()
            });
            inside.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Runs `ip` with the words of `arguments` inside. Panics if it fails.
    pub fn ip(&self, arguments: &str) {
        let output = self
            .exec("ip")
            .args(arguments.split_whitespace())
            .output()
            .expect("iproute2 is installed");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "ip {arguments} (in {}): {said}",
            self.tag
        );
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_threads_run_inside() {
        let namespace = Namespace::new("host");
        let inode = namespace.inode();
        assert_ne!(inode, namespace::inode().unwrap());
        let mut readlink = namespace.exec("readlink");
        let output = readlink.arg("/proc/self/ns/net").output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.trim(), format!("net:[{inode}]"));
    }

    #[test]
    #[should_panic(expected = "from inside")]
    fn a_panic_inside_comes_out() {
        Namespace::new("host").enter(|| panic!("from inside"));
    }
}
