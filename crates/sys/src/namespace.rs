//! Network namespaces: identifying, creating and entering them, and starting programs in one.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags, open, stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::descriptor;

/// The inode of the calling thread's network namespace, which is unique on the host.
pub fn inode() -> Result<u64, Errno> {
    Ok(stat("/proc/thread-self/ns/net")?.st_ino)
}

/// Tells the calling thread's network namespace from all others that there have been: inodes are used again, and after a
/// restart of the host cookies are, too.
pub fn identity() -> std::io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(format!("{} {}", boot.trim(), own_cookie()?))
}

/// The cookie of a socket's network namespace (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn cookie_of(socket: impl AsFd) -> Result<u64, Errno> {
    let mut cookie = [0; size_of::<u64>()];
    descriptor::socket_option(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, &mut cookie)?;
    Ok(u64::from_ne_bytes(cookie))
}

/// That of the calling thread's.
pub fn own_cookie() -> Result<u64, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
    cookie_of(socket?)
}

/// The default control socket of the server of the calling thread's network namespace.
pub fn control_path() -> Result<PathBuf, Errno> {
    Ok(format!("/run/portolan/{}/control", inode()?).into())
}

/// The lock file of the server with this control socket. A server that ends for good removes it.
pub fn lock_path(control: &Path) -> PathBuf {
    beside(control, ".lock")
}

/// The path with a suffix at its end: that of a file which belongs to the one at `path`.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Creates a network namespace, which lasts as long as the descriptor, or a process or device in it.
/// The calling thread does not enter it.
pub fn create() -> Result<OwnedFd, Errno> {
    std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            // SAFETY: a new network namespace does not affect the descriptor table.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            open("/proc/thread-self/ns/net", flags, Mode::empty())
        });
        // The thread never panics.
        made.join().unwrap_or(Err(Errno::CANCELED))
    })
}

/// Moves the calling thread into the network namespace `fd`.
pub fn enter(fd: impl AsFd) -> Result<(), Errno> {
    move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))
}

/// Makes `command` start in the network namespace `fd`.
pub fn start_in(command: &mut Command, fd: OwnedFd) {
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(move || Ok(enter(&fd)?)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_fresh_namespace, run};

    #[test]
    fn a_program_starts_in_the_namespace_it_is_given() {
        let fresh = create().unwrap();
        let inside = rustix::fs::fstat(&fresh).unwrap().st_ino;
        assert_ne!(inode().unwrap(), inside);
        let mut command = Command::new("readlink");
        command.arg("/proc/self/ns/net");
        start_in(&mut command, fresh);
        let said = String::from_utf8(run(&mut command).stdout).unwrap();
        assert_eq!(said.trim(), format!("net:[{inside}]"));
    }

    #[test]
    fn a_thread_that_enters_is_in_another_namespace() {
        let outside = inode().unwrap();
        in_fresh_namespace(move || assert_ne!(inode().unwrap(), outside));
        assert_eq!(inode().unwrap(), outside);
    }

    #[test]
    fn namespaces_have_different_identities() {
        let outside = identity().unwrap();
        in_fresh_namespace({
            let outside = outside.clone();
            move || assert_ne!(identity().unwrap(), outside)
        });
        assert_eq!(identity().unwrap(), outside);
    }

    #[test]
    fn the_control_path_names_the_namespace() {
        let path = control_path().unwrap();
        let inode = inode().unwrap().to_string();
        assert!(
            path.components()
                .any(|part| part.as_os_str() == inode.as_str())
        );
    }
}
