//! The interfaces between library, server and packet filter: control messages, capsules and
//! shared-memory layouts. Layouts and encodings only; nothing here does I/O or keeps state.
#![forbid(unsafe_code)]

mod bytes;
pub mod capture;
pub mod control;
pub mod datagram;
pub mod extension;
pub mod filter;
pub mod ip;
pub mod journal;
pub mod local;
pub mod metastate;
pub mod qos;
pub mod raw;
pub mod report;
mod speaks;

/// The number of the protocol between library and server: raised with every change of a message, of a layout of shared
/// memory, or of the capsule's version. `tests/protocol.rs` notices such changes.
pub const PROTOCOL: u32 = 19;

/// The oldest number that this version speaks, too (ADR 42). Raised to [`PROTOCOL`] with every change other than new variants
/// at the end of a message's enum; who sends those must know that the other one has them.
pub const OLDEST_PROTOCOL: u32 = 18;

pub use speaks::Speaks;

/// Maximum size of a control message in bytes, without fds. A capsule that does not fit travels in a memfd.
pub const MAX_MESSAGE: usize = 128 * 1024;

/// Maximum size of a capsule in bytes, inline or in a memfd.
pub const MAX_CAPSULE: usize = 64 * 1024 * 1024;

/// A message that does not decode.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message")]
pub struct Malformed;

/// Encodes any message of this crate.
pub fn encode<T: serde::Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).expect("plain data encodes into a growing vector")
}

/// Decodes one message; trailing bytes are an error.
pub fn decode<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(Malformed),
    }
}
