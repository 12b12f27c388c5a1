//! `fork`, for programs that check what a child inherits.
#![allow(unsafe_code)]

use std::io;

/// A child process, for its parent.
pub(crate) struct Child(libc::pid_t);

/// Returns None in the child.
pub(crate) fn fork() -> io::Result<Option<Child>> {
    // SAFETY: the library's fork handlers handle its own locks; no other thread of this program holds any.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        pid if pid > 0 => Ok(Some(Child(pid))),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Child {
    /// Waits for the end of the child, and fails unless it exits successfully.
    pub(crate) fn wait(self) -> io::Result<()> {
        let mut status = 0;
        // SAFETY: `status` is valid for the duration of the call.
        if unsafe { libc::waitpid(self.0, &raw mut status, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        match status {
            0 => Ok(()),
            _ => Err(io::Error::other(format!(
                "the child has ended with {status}"
            ))),
        }
    }
}
