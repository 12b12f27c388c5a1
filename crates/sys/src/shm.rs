//! Memory shared by library and server: metastate (written by the server), statistics and journal
//! (written by the library), rings
//! of local sessions (written by both ends), captures (written by the library, read by a command), and sealed blobs.
//! Seals keep the other side from shrinking what is mapped here.

mod blob;
mod capsule;
mod capture;
mod journal;
mod metastate;
mod rings;
mod statistics;
mod unread;
mod words;

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;

pub use blob::{BlobReadError, BlobWriteError, Bytes, pack, unpack, write_blob};
pub use capsule::{Unread, pack_capsule, stretch, unpack_capsule};
pub use capture::{BadRecord, CaptureReader, CaptureWriter, create_capture};
pub use journal::{JournalReader, JournalWriter, RecordIndex};
pub use metastate::{MetastateReader, MetastateWriter, PublishError};
pub use rings::Rings;
pub use statistics::{StatisticsReader, StatisticsWriter};
pub use unread::{SetAside, WORTH_SETTING_ASIDE};

#[derive(Debug, thiserror::Error)]
#[error("cannot create shared memory: {0}")]
pub struct CreateError(#[from] Errno);

#[derive(Debug, thiserror::Error)]
pub enum MapError {
    #[error("the shared memory can shrink")]
    Unsealed,
    #[error("the shared memory is too short")]
    TooShort,
    #[error("the shared memory is not of the usual kind")]
    Foreign,
    #[error("cannot map the shared memory: {0}")]
    Map(#[from] Errno),
}

/// Creates a memfd of `size` zero bytes that permits seals.
fn create(name: &str, size: usize) -> Result<OwnedFd, Errno> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, size as u64)?;
    Ok(fd)
}

/// Seals the size of `fd` permanently, adds `more` and forbids further seals.
fn seal(fd: &OwnedFd, more: SealFlags) -> Result<(), Errno> {
    let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(fd, size | more)
}

/// Checks that accesses to a mapping of `size` bytes of `fd` can never fault.
fn check_size(fd: impl AsFd, size: usize) -> Result<(), MapError> {
    let seals = fcntl_get_seals(&fd).map_err(|_| MapError::Unsealed)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(MapError::Unsealed);
    }
    match usize::try_from(fstat(&fd)?.st_size) {
        Ok(bytes) if bytes >= size => Ok(()),
        _ => Err(MapError::TooShort),
    }
}
