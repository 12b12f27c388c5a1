//! Bytes that identify their position in a stream.

use std::io;

/// The byte at a position of the stream.
fn at(position: u64) -> u8 {
    let word = (position / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word.to_le_bytes()[(position % 8) as usize]
}

pub(crate) fn fill(position: u64, bytes: &mut [u8]) {
    for (byte, position) in bytes.iter_mut().zip(position..) {
        *byte = at(position);
    }
}

pub(crate) fn check(position: u64, bytes: &[u8]) -> io::Result<()> {
    let mut pairs = bytes.iter().zip(position..);
    match pairs.find(|(byte, position)| **byte != at(*position)) {
        None => Ok(()),
        Some((_, position)) => Err(io::Error::other(format!(
            "another byte than was sent at {position}"
        ))),
    }
}

/// Reads all bytes once, as a program that uses them does.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| {
        sum.wrapping_add(u64::from_ne_bytes(*word))
    });
    rest.iter()
        .fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte)))
}
