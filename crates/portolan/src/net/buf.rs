//! Shared buffers: sending and receiving without the copy between the program and the stack (Maeda and Bershad, section 4.2).
//!
//! [`TcpStream::receive`] gives the program *pieces*: bytes that lie where the kernel put them. A program has them for
//! as long as it likes, passes them to other threads, and gives them back by dropping them, in any order.
//! [`TcpStream::reserve`] and [`TcpStream::send`] are the way out: a piece is filled by the program, becomes a part of the send
//! buffer as it is, and goes to the device from there.
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
//! A piece is always there; whether it was copied tells [`Piece::is_in_place`]. What comes in order while the program is in
//! `receive`, in frames of at least 1 KiB, is not, as long as less than a quarter of the ring is lent. Copied are: what came before
//! the first call and was put into the receive queue then, what comes out of order, datagrams (once, from the ring), and what comes from a program on the same host or by way of the
//! server. [`moved`] counts both.
//!
//! # What a program can do with pieces
//! Keep them: its window closes, so that it is sent no more on that connection; all others go on. Once pieces hold up half
//! of the ring their memory is replaced by a copy, which nobody notices. Use them after the stream is closed or has gone to
//! another process: they are its own. Use them after a `fork`: both processes have them. They cannot be given back twice.
//!
//! [`TcpStream::receive`]: super::TcpStream::receive
//! [`TcpStream::reserve`]: super::TcpStream::reserve
//! [`TcpStream::send`]: super::TcpStream::send

use std::io::{self, Write};
use std::ops::{Deref, DerefMut};

use crate::posix::Chunk;
pub use crate::posix::{Moved, Piece, moved};

/// A piece of a send buffer, which the program fills: `Write` adds bytes behind those that are there, and it is a slice of
/// what it has. Filling it in place is [`Reserved::resize`], then writing to the slice.
#[derive(Debug, Default)]
pub struct Reserved(Chunk);

impl Reserved {
    /// Bytes that one has room for.
    pub const CAPACITY: usize = Chunk::CAPACITY;

    /// An empty one; of any stream.
    pub fn new() -> Reserved {
        Reserved(Chunk::new())
    }

    /// Bytes that may be added.
    pub fn room(&self) -> usize {
        self.0.room()
    }

    /// Gives it `length` bytes, at most [`Reserved::CAPACITY`]: those that are added are zero.
    pub fn resize(&mut self, length: usize) {
        self.0.resize(length);
    }

    /// As [`Reserved::resize`], but the bytes that are added are what some piece of this process had before: to be written, all
    /// of them, before they are sent. It spares filling them twice.
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

/// Takes as many bytes as there is room for: none when it is full.
impl Write for Reserved {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.0.extend(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why a piece was not sent, or not all of it.
#[derive(Debug)]
pub struct SendError {
    /// What a write would have failed with.
    pub error: io::Error,
    /// What is left of the piece.
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
