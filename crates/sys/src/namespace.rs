//! Network namespaces: which one this is, and starting programs in another.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::fs::stat;
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Names the calling thread's network namespace among those of the host.
pub fn inode() -> Result<u64, Errno> {
    Ok(stat("/proc/thread-self/ns/net")?.st_ino)
}

/// Where the server of the calling thread's network namespace listens unless told otherwise.
pub fn control_path() -> Result<PathBuf, Errno> {
    Ok(format!("/run/portolan/{}/control", inode()?).into())
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
    use rustix::fs::{Mode, OFlags, open};

    use super::*;
    use crate::testing::in_fresh_namespace;

    #[test]
    fn a_fresh_namespace_has_another_inode_and_programs_start_in_it() {
        let outside = inode().unwrap();
        in_fresh_namespace(move || {
            let inside = inode().unwrap();
            assert_ne!(outside, inside);
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let fd = open("/proc/thread-self/ns/net", flags, Mode::empty()).unwrap();
            in_fresh_namespace(move || {
                let mut command = Command::new("readlink");
                command.arg("/proc/self/ns/net");
                start_in(&mut command, fd);
                let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
                assert_eq!(said.trim(), format!("net:[{inside}]"));
            });
        });
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
