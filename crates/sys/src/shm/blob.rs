//! Capsules and lists in messages: in the message itself, or, if too long, in a memfd that its sender can no longer
//! change.

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};

use portolan_proto::MAX_CAPSULE;
use portolan_proto::control::Blob;
use rustix::fs::{FsWord, SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::io::{Errno, pwrite};

use super::{create, seal};
use crate::mapping::Mapping;

/// `f_type` of ordinary shared memory in `fstatfs` (`TMPFS_MAGIC`).
const TMPFS: FsWord = libc::TMPFS_MAGIC as FsWord;

/// Maximum size of a blob in the message.
const INLINE: usize = 32 * 1024;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobWriteError {
    #[error("{0} bytes are more than a blob may have")]
    TooLarge(usize),
    #[error("cannot write a blob: {0}")]
    Write(#[from] Errno),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobReadError {
    #[error("the blob's sender can still change it")]
    Unsealed,
    #[error("the blob is not in ordinary memory")]
    Extraordinary,
    #[error("the blob has not the length that the message claims")]
    WrongLength,
    #[error("the message says that a blob comes with it, and none does")]
    Missing,
    #[error("cannot read a blob: {0}")]
    Read(#[from] Errno),
}

/// A received blob, read in place.
#[derive(Debug)]
pub struct Bytes(Storage);

#[derive(Debug)]
enum Storage {
    Message(Vec<u8>),
    /// Sealed: nobody can change it.
    Sealed(Mapping),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Storage::Message(bytes) => bytes,
            Storage::Sealed(mapping) => {
                let length = mapping.length();
                // SAFETY: `length` bytes are mapped as long as `self` lives, and the seals required by `map`
                // keep everybody from writing to them.
                unsafe { std::slice::from_raw_parts(mapping.pointer(0, length), length) }
            }
        }
    }
}

/// Packs bytes for a message; the memfd, if there is one, must be sent with it.
pub fn pack(bytes: Vec<u8>) -> Result<(Blob, Option<OwnedFd>), BlobWriteError> {
    if bytes.len() <= INLINE {
        return Ok((Blob::Inline(bytes), None));
    }
    let fd = write_blob(&bytes)?;
    let length = u32::try_from(bytes.len()).map_err(|_| BlobWriteError::TooLarge(bytes.len()))?;
    Ok((Blob::Memfd { length }, Some(fd)))
}

/// Returns the bytes of a message or of the descriptor that came with it.
pub fn unpack(blob: Blob, fd: Option<OwnedFd>) -> Result<Bytes, BlobReadError> {
    match blob {
        Blob::Inline(bytes) => Ok(Bytes(Storage::Message(bytes))),
        Blob::Memfd { length } => map(fd.ok_or(BlobReadError::Missing)?, length),
    }
}

/// Writes `bytes` to a sealed memfd.
pub fn write_blob(bytes: &[u8]) -> Result<OwnedFd, BlobWriteError> {
    write_pieces(bytes.len(), [(0, bytes)].into_iter())
}

/// Writes pieces to a sealed memfd of `length` bytes, each at its offset.
pub(super) fn write_pieces<'a>(
    length: usize,
    pieces: impl Iterator<Item = (usize, &'a [u8])>,
) -> Result<OwnedFd, BlobWriteError> {
    if length > MAX_CAPSULE {
        return Err(BlobWriteError::TooLarge(length));
    }
    let fd = create("portolan-blob", length)?;
    for (at, piece) in pieces {
        let mut done = 0;
        while done < piece.len() {
            done += pwrite(&fd, &piece[done..], (at + done) as u64)?;
        }
    }
    seal(&fd, SealFlags::WRITE)?;
    Ok(fd)
}

/// Maps `fd`, which must have `length` bytes.
fn map(fd: impl AsFd, length: u32) -> Result<Bytes, BlobReadError> {
    let bytes = map_all(fd)?;
    if bytes.len() == length as usize {
        Ok(bytes)
    } else {
        Err(BlobReadError::WrongLength)
    }
}

/// Maps all of `fd`, if nobody can change it.
pub(super) fn map_all(fd: impl AsFd) -> Result<Bytes, BlobReadError> {
    let seals = fcntl_get_seals(&fd).map_err(|_| BlobReadError::Unsealed)?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::WRITE) {
        return Err(BlobReadError::Unsealed);
    }
    // A huge page may be missing when it is read.
    if fstatfs(&fd)?.f_type != TMPFS {
        return Err(BlobReadError::Extraordinary);
    }
    let length = usize::try_from(fstat(&fd)?.st_size);
    let length = length.map_err(|_| BlobReadError::WrongLength)?;
    if length > MAX_CAPSULE {
        return Err(BlobReadError::WrongLength);
    }
    match length {
        0 => Ok(Bytes(Storage::Message(Vec::new()))),
        _ => Ok(Bytes(Storage::Sealed(Mapping::read_only(
            fd.as_fd(),
            0,
            length,
        )?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::memory;

    #[test]
    fn a_blob_crosses_whole() {
        for length in [0, 1, 100_000, 5_000_000] {
            let bytes: Vec<u8> = (0..length).map(|index| index as u8).collect();
            let fd = write_blob(&bytes).unwrap();
            assert_eq!(*map(&fd, length).unwrap(), bytes);
        }
    }

    #[test]
    fn what_is_short_travels_in_the_message() {
        for length in [0, 10, INLINE, INLINE + 1] {
            let (blob, fd) = pack(vec![7; length]).unwrap();
            assert_eq!(fd.is_some(), length > INLINE);
            assert_eq!(*unpack(blob, fd).unwrap(), vec![7; length]);
        }
        let missing = unpack(Blob::Memfd { length: 1 }, None);
        assert_eq!(missing.err(), Some(BlobReadError::Missing));
    }

    #[test]
    fn the_sender_cannot_change_a_blob() {
        let fd = write_blob(b"fixed").unwrap();
        assert_eq!(pwrite(&fd, b"other", 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 1), Err(Errno::PERM));
    }

    #[test]
    fn an_unsealed_memfd_or_another_file_is_refused() {
        assert_eq!(map(memory(8), 8).err(), Some(BlobReadError::Unsealed));
        let file = std::fs::File::open("/dev/zero").unwrap();
        assert_eq!(map(&file, 8).err(), Some(BlobReadError::Unsealed));
    }

    #[test]
    fn huge_pages_are_refused() {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let fd = memfd_create("huge", flags).unwrap();
        ftruncate(&fd, 2 << 20).unwrap();
        seal(&fd, SealFlags::WRITE).unwrap();
        assert_eq!(map(&fd, 2 << 20).err(), Some(BlobReadError::Extraordinary));
    }

    #[test]
    fn a_wrong_length_is_refused() {
        let fd = write_blob(b"fixed").unwrap();
        for length in [0, 4, 6, u32::MAX] {
            assert_eq!(map(&fd, length).err(), Some(BlobReadError::WrongLength));
        }
    }
}
