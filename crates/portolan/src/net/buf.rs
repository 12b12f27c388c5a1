//! Shared buffers: sending and receiving without the copy between the program and the stack (Maeda and Bershad, section 4.2).
//!
//! [`TcpStream::receive`] returns *pieces*: received bytes in the memory where the kernel put them. A program
//! may keep them for any time and pass them to other threads. It returns them by dropping them, in any order.
//! [`TcpStream::reserve`] and [`TcpStream::send`] are for sending: the program fills a piece, which becomes a
//! part of the send buffer without a copy, and the device reads the bytes from there.
//!
//! ```no_run
//! use std::io::Write;
//!
//! use portolan::net::{TcpListener, buf};
//!
//! let listener = TcpListener::bind("0.0.0.0:7")?;
//! let (stream, _) = listener.accept()?;
//! let mut pieces = Vec::new();
//! while stream.receive(&mut pieces)? > 0 {
//!     for piece in pieces.drain(..) {
//!         let mut answer = stream.reserve();
//!         // The receiver's copy is the only one; `piece` is given back here.
//!         for part in piece.chunks(buf::Reserved::CAPACITY) {
//!             answer.write_all(part)?;
//!             stream.send(std::mem::replace(&mut answer, stream.reserve()))?;
//!         }
//!     }
//! }
//! # std::io::Result::Ok(())
//! ```
//!
//! # What is copied nevertheless
//! `receive` returns pieces in every case; [`Piece::is_in_place`] tells whether the bytes were copied. They are not
//! copied if they arrive in order while the program is in `receive`, in frames of at least 1 KiB, as long as less than
//! a quarter of the ring is lent. Copied are: data that was put into the receive queue before the first call, data out
//! of order, datagrams (once, from the ring), and data from a program on the same host or relayed by the server.
//! [`moved`] counts both.
//!
//! # What a program can do with pieces
//! Keep them: bytes that were not copied count against the receive window of that connection, which closes in the end; all
//! other connections continue. Once pieces hold up half of
//! the ring, their memory is replaced by a copy, transparently. Use them after the stream is closed or has moved to
//! another process: they belong to the program. Use them after a `fork`: both processes have them. They cannot be
//! returned twice.
//!
//! [`TcpStream::receive`]: super::TcpStream::receive
//! [`TcpStream::reserve`]: super::TcpStream::reserve
//! [`TcpStream::send`]: super::TcpStream::send

use std::io::{self, Write};
use std::ops::{Deref, DerefMut};

use crate::posix::Chunk;
pub use crate::posix::{Moved, Piece, moved};

/// A piece of a send buffer, to be filled by the program. `Write` appends bytes; the piece dereferences to a
/// slice of its contents. To fill it in place, call [`Reserved::resize`] and write to the slice.
#[derive(Debug, Default)]
pub struct Reserved(Chunk);

impl Reserved {
    /// Capacity of a piece, in bytes.
    pub const CAPACITY: usize = Chunk::CAPACITY;

    /// Returns an empty piece, which any stream can send.
    pub fn new() -> Reserved {
        Reserved(Chunk::new())
    }

    /// Returns how many bytes can be appended.
    pub fn room(&self) -> usize {
        self.0.room()
    }

    /// Sets the length to `length` bytes, at most [`Reserved::CAPACITY`]. Added bytes are zero.
    pub fn resize(&mut self, length: usize) {
        self.0.resize(length);
    }

    /// As [`Reserved::resize`], but added bytes have unspecified contents: remains of earlier
    /// pieces of this process. Write all of them before sending. This avoids filling them twice.
    pub fn resize_unspecified(&mut self, length: usize) {
        self.0.resize_unspecified(length);
    }

    pub(super) fn of_chunk(chunk: Chunk) -> Reserved {
        Reserved(chunk)
    }

    pub(super) fn into_chunk(self) -> Chunk {
        self.0
    }
}

impl Deref for Reserved {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for Reserved {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// Appends as many bytes as there is room for: zero if the piece is full.
impl Write for Reserved {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.0.extend(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The reason why a piece was not sent, or not completely.
#[derive(Debug)]
pub struct SendError {
    /// The error that a write would have returned.
    pub error: io::Error,
    /// The unsent rest of the piece.
    pub unsent: Option<Reserved>,
}

impl std::fmt::Display for SendError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for SendError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<SendError> for io::Error {
    fn from(error: SendError) -> io::Error {
        error.error
    }
}
