//! Receiving into buffers that grow, or whose memory is not initialised.

use std::io;
use std::task::{Context, Poll};

use ::bytes::BufMut;
use ::tokio::io::{Interest, ReadBuf};

use super::readiness::Readiness;

/// Bytes that are received at a time at most by [`appended`]: they are copied once more.
const APPEND_MAX: usize = 64 * 1024;

/// A call that returns how many bytes of a buffer it has filled, and `T`.
pub(super) trait Fill<T>: FnMut(&mut [u8]) -> io::Result<(usize, T)> {}

impl<T, F: FnMut(&mut [u8]) -> io::Result<(usize, T)>> Fill<T> for F {}

/// Appends what a call receives, as far as `buffer` has room. It is unchanged if the call fails.
pub(super) fn appended<T>(
    buffer: &mut impl BufMut,
    call: &mut impl Fill<T>,
) -> io::Result<(usize, T)> {
    let mut bytes = vec![0; buffer.chunk_mut().len().min(APPEND_MAX)];
    let (length, more) = call(&mut bytes)?;
    buffer.put_slice(&bytes[..length]);
    Ok((length, more))
}

/// Repeats a call until it does not block, and advances `buffer` by what it has filled. At most `most` bytes, which have
/// to be initialised before, are received.
pub(super) fn poll_fill<T>(
    readiness: &Readiness,
    context: &mut Context<'_>,
    buffer: &mut ReadBuf<'_>,
    most: usize,
    mut call: impl Fill<T>,
) -> Poll<io::Result<(usize, T)>> {
    let room = buffer.remaining().min(most);
    let unfilled = buffer.initialize_unfilled_to(room);
    let filled = readiness.poll(Interest::READABLE, context, || call(unfilled));
    filled.map_ok(|(length, more)| {
        buffer.advance(length);
        (length, more)
    })
}
