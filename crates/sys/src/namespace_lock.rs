//! A lock that exists once per network namespace, whatever files its processes see: the name of an abstract UNIX
//! socket, which the kernel keeps per network namespace (unix(7)) and frees when its holder ends for any reason. Any
//! user may take a name, so the credentials of its holder are checked.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::geteuid;

use crate::unix::peer_credentials;

const ROOT: u32 = 0;

/// The lock, held until dropped.
#[derive(Debug)]
pub struct NamespaceLock {
    _socket: OwnedFd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Held by root or this process's user: the process ID.
    #[error("process {0} has it")]
    Held(u32),
    /// Held by a user who is neither.
    #[error("a process of another user, {0:?}, has its name")]
    Squatted(Option<u32>),
    #[error("{0}")]
    Failed(Errno),
}

impl From<Errno> for ClaimError {
    fn from(errno: Errno) -> ClaimError {
        ClaimError::Failed(errno)
    }
}

/// Takes the lock `name` in the calling thread's network namespace.
pub fn claim(name: &str) -> Result<NamespaceLock, ClaimError> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = seqpacket()?;
    match bind(&socket, &address) {
        Ok(()) => {
            // A process that finds the name taken connects, to learn the holder's credentials.
            listen(&socket, 1)?;
            Ok(NamespaceLock { _socket: socket })
        }
        Err(Errno::ADDRINUSE) => Err(holder(&address)?),
        Err(errno) => Err(errno.into()),
    }
}

fn holder(address: &SocketAddrUnix) -> Result<ClaimError, ClaimError> {
    let asking = seqpacket()?;
    let holder = connect(&asking, address).and_then(|()| peer_credentials(&asking));
    Ok(match holder {
        Ok(holder) if [ROOT, geteuid().as_raw()].contains(&holder.uid) => {
            ClaimError::Held(holder.pid)
        }
        Ok(holder) => ClaimError::Squatted(Some(holder.uid)),
        // Its queue is full, or it does not listen: neither lasts long for a server.
        Err(_) => ClaimError::Squatted(None),
    })
}

fn seqpacket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{as_nobody, in_fresh_namespace};

    #[test]
    fn one_of_a_namespace_has_it() {
        in_fresh_namespace(|| {
            let first = claim("test").unwrap();
            let refused = claim("test").unwrap_err();
            assert_eq!(refused, ClaimError::Held(std::process::id()));
            claim("another").unwrap();
            drop(first);
            claim("test").unwrap();
        });
    }

    #[test]
    fn another_namespace_has_one_of_its_own() {
        in_fresh_namespace(|| {
            let _first = claim("test").unwrap();
            in_fresh_namespace(|| claim("test").map(drop).unwrap());
        });
    }

    #[test]
    fn a_user_who_took_the_name_is_found_out() {
        in_fresh_namespace(|| {
            let _squatter = as_nobody(|| claim("test")).unwrap();
            assert_eq!(
                claim("test").unwrap_err(),
                ClaimError::Squatted(Some(65_534))
            );
        });
    }
}
