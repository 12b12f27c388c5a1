//! `fork`, for programs that check what a child inherits.
#![allow(unsafe_code)]

use std::io;

/// A child, as its parent sees it.
pub struct Child(libc::pid_t);

/// None: this is the child.
pub fn fork() -> io::Result<Option<Child>> {
    // SAFETY: the library's handlers see to its own locks; no other thread of this program is in the middle of anything.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        pid if pid > 0 => Ok(Some(Child(pid))),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Child {
    /// Waits for its end; it must be a good one.
    pub fn wait(self) -> io::Result<()> {
        let mut status = 0;
        // SAFETY: `status` lives.
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
