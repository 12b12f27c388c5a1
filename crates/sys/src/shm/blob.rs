//! Octets too long for a control message, in a memfd that its sender cannot change any more.

use std::os::fd::{AsFd, OwnedFd};

use portolan_proto::MAX_CAPSULE;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::{Errno, pread, pwrite};

use super::{create, seal};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobWriteError {
    #[error("{0} octets are more than a blob may have")]
    TooLarge(usize),
    #[error("cannot write a blob: {0}")]
    Write(#[from] Errno),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobReadError {
    #[error("the blob's sender can still change it")]
    Unsealed,
    #[error("the blob has not the length that the message claims")]
    WrongLength,
    #[error("cannot read a blob: {0}")]
    Read(#[from] Errno),
}

/// Puts `octets` into a sealed memfd.
pub fn write_blob(octets: &[u8]) -> Result<OwnedFd, BlobWriteError> {
    if octets.len() > MAX_CAPSULE {
        return Err(BlobWriteError::TooLarge(octets.len()));
    }
    let fd = create("portolan-blob", octets.len())?;
    let mut done = 0;
    while done < octets.len() {
        done += pwrite(&fd, &octets[done..], done as u64)?;
    }
    seal(&fd, SealFlags::WRITE)?;
    Ok(fd)
}

/// Takes the `length` octets that a message says are in `fd`.
pub fn read_blob(fd: impl AsFd, length: u32) -> Result<Vec<u8>, BlobReadError> {
    let seals = fcntl_get_seals(&fd).map_err(|_| BlobReadError::Unsealed)?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::WRITE) {
        return Err(BlobReadError::Unsealed);
    }
    let length = length as usize;
    let actual = usize::try_from(fstat(&fd)?.st_size).ok();
    if length > MAX_CAPSULE || actual != Some(length) {
        return Err(BlobReadError::WrongLength);
    }
    let mut octets = vec![0; length];
    let mut done = 0;
    while done < length {
        match pread(&fd, &mut octets[done..], done as u64)? {
            0 => return Err(BlobReadError::WrongLength),
            more => done += more,
        }
    }
    Ok(octets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::memory;

    #[test]
    fn a_blob_crosses_whole() {
        for length in [0, 1, 100_000, 5_000_000] {
            let octets: Vec<u8> = (0..length).map(|index| index as u8).collect();
            let fd = write_blob(&octets).unwrap();
            assert_eq!(read_blob(&fd, length).unwrap(), octets);
        }
    }

    #[test]
    fn the_sender_cannot_change_a_blob() {
        let fd = write_blob(b"fixed").unwrap();
        assert_eq!(pwrite(&fd, b"other", 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 1), Err(Errno::PERM));
    }

    #[test]
    fn an_unsealed_memfd_or_another_file_is_refused() {
        assert_eq!(read_blob(memory(8), 8), Err(BlobReadError::Unsealed));
        let file = std::fs::File::open("/dev/zero").unwrap();
        assert_eq!(read_blob(&file, 8), Err(BlobReadError::Unsealed));
    }

    #[test]
    fn a_wrong_length_is_refused() {
        let fd = write_blob(b"fixed").unwrap();
        for length in [0, 4, 6, u32::MAX] {
            assert_eq!(read_blob(&fd, length), Err(BlobReadError::WrongLength));
        }
    }
}
