//! A session in transfer: its capsule, and the memory with its unread bytes.

use std::os::fd::OwnedFd;

use portolan_proto::control::{Blob, ByteRange, Capsule};

use super::blob::{BlobReadError, BlobWriteError, Bytes, pack, unpack};
use super::unread::SetAside;

/// Unread bytes: a memory, the offset in it, and the length.
pub type Unread<'a> = (&'a SetAside, usize, usize);

/// Packs a session for a message; the descriptors must be sent with it.
pub fn pack_capsule(
    state: Vec<u8>,
    unread: Option<Unread<'_>>,
) -> Result<(Capsule, Vec<OwnedFd>), BlobWriteError> {
    let (state, fd) = pack(state)?;
    let mut fds: Vec<OwnedFd> = fd.into_iter().collect();
    let mut capsule = Capsule::from(state);
    if let Some((memory, start, length)) = unread {
        fds.push(memory.descriptor()?);
        capsule.unread = stretch(start, length);
    }
    Ok((capsule, fds))
}

/// Returns the capsule, and the unread bytes, of a message and its descriptors.
pub fn unpack_capsule(
    capsule: Capsule,
    fds: Vec<OwnedFd>,
) -> Result<(Bytes, Option<(SetAside, ByteRange)>), BlobReadError> {
    let mut fds = fds.into_iter();
    let state = match capsule.state {
        Blob::Inline(_) => None,
        Blob::Memfd { .. } => fds.next(),
    };
    let bytes = unpack(capsule.state, state)?;
    let unread = match capsule.unread {
        Some(stretch) => {
            let fd = fds.next().ok_or(BlobReadError::Missing)?;
            Some((SetAside::open(fd)?, stretch))
        }
        None => None,
    };
    Ok((bytes, unread))
}

/// The range of such a memory in the form of a message.
pub fn stretch(start: usize, length: usize) -> Option<ByteRange> {
    Some(ByteRange {
        start: u32::try_from(start).ok()?,
        length: u32::try_from(length).ok()?,
    })
}
