//! Unread bytes of a migrating session: written once, to a memfd that is then sealed, and read in place by
//! the next holder.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_types::Memory;
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::blob::{BlobReadError, BlobWriteError, Bytes, map_all, write_pieces};

/// Minimum size: fewer bytes are cheaper to send in the capsule.
pub const WORTH_SETTING_ASIDE: usize = 16 * 1024;

/// A mapped memfd with unread bytes.
pub struct SetAside {
    fd: OwnedFd,
    bytes: Bytes,
}

impl SetAside {
    /// Writes `pieces` in order, each at its offset, to a memfd of `length` bytes, and seals it.
    pub fn write<'a>(
        length: usize,
        pieces: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Result<SetAside, BlobWriteError> {
        let fd = write_pieces(length, pieces)?;
        let bytes = map_all(&fd).map_err(|_| BlobWriteError::Write(Errno::NOMEM))?;
        Ok(SetAside { fd, bytes })
    }

    /// Maps a received memfd. Fails if anybody can change or shrink it, which would make reading it
    /// unsafe.
    pub fn open(fd: OwnedFd) -> Result<SetAside, BlobReadError> {
        let bytes = map_all(&fd)?;
        Ok(SetAside { fd, bytes })
    }

    /// Duplicates the descriptor, for a message.
    pub fn descriptor(&self) -> Result<OwnedFd, Errno> {
        fcntl_dupfd_cloexec(&self.fd, 0)
    }

    /// Keeps only the mapping, for memory that is not passed on.
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

impl AsFd for SetAside {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Memory for SetAside {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Memory for Bytes {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for SetAside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SetAside({} bytes)", self.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::ftruncate;
    use rustix::io::pwrite;

    use super::*;
    use crate::testing::memory;

    #[test]
    fn bytes_that_are_set_aside_are_there_for_the_next_and_fixed() {
        let pieces: [(usize, &[u8]); 4] = [(0, b"ab"), (2, b""), (2, b"xxcde"), (2, b"cd")];
        let written = SetAside::write(8, pieces.into_iter()).unwrap();
        let opened = SetAside::open(written.descriptor().unwrap()).unwrap();
        drop(written);
        assert_eq!(opened.bytes(), b"abcdcde\0", "what is written later counts");
        assert_eq!(pwrite(&opened, b"x", 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&opened, 0), Err(Errno::PERM));
        assert_eq!(&*opened.into_bytes(), b"abcdcde\0");
    }

    #[test]
    fn memory_that_could_change_is_refused() {
        assert_eq!(
            SetAside::open(memory(8)).err(),
            Some(BlobReadError::Unsealed)
        );
        let device = std::fs::File::open("/dev/zero").unwrap();
        assert_eq!(
            SetAside::open(device.into()).err(),
            Some(BlobReadError::Unsealed)
        );
    }
}
