//! What a call returns, and the errors of the server's replies.

use std::os::fd::OwnedFd;

use portolan_proto::control::ReplyBody;
use rustix::io::Errno;

use crate::process::control::Lost;

/// The result of a call.
pub type Outcome<T> = Result<T, CallError>;

/// The reason why the library has not completed a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    Errno(Errno),
    /// The kernel's own call has to be made instead.
    NotOurs,
    /// The session moved to another process in between, and the call can be repeated:
    /// `posix::find::retry_if_moved` does. A program sees a call that cannot be repeated as interrupted.
    Moved,
}

impl From<Errno> for CallError {
    fn from(errno: Errno) -> CallError {
        CallError::Errno(errno)
    }
}

impl From<Lost> for CallError {
    /// The error of calls after the server is gone.
    fn from(_: Lost) -> CallError {
        CallError::Errno(Errno::NETDOWN)
    }
}

impl CallError {
    /// Converts to an error number; `absent` if the library has nothing to do with the descriptor.
    pub fn errno_or(self, absent: Errno) -> Errno {
        match self {
            CallError::Errno(errno) => errno,
            CallError::Moved => Errno::INTR,
            CallError::NotOurs => absent,
        }
    }
}

/// Returns the error of a call that the server has refused.
pub(crate) fn refusal(answer: Result<(ReplyBody, Vec<OwnedFd>), Lost>) -> CallError {
    match answer {
        Ok((ReplyBody::Error { errno }, _)) => Errno::from_raw_os_error(errno).into(),
        Ok(_) => Errno::PROTO.into(),
        Err(lost) => lost.into(),
    }
}
