//! Packet headers: parsing, building, checksums. `no_std`, no allocation, no state. Raw packet bytes are
//! interpreted only here.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod checksum;
pub mod demux;
pub mod ethernet;
pub mod icmp;
pub mod ipv4;
pub mod ipv6;
pub mod tcp;
pub mod udp;
pub mod vnet;

use core::fmt;

/// Bytes that are not a valid header: truncated, inconsistent, or with a wrong checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("malformed packet")
    }
}

impl core::error::Error for Malformed {}

/// Writes a header of fixed shape to the front of `out`.
fn put<T: zerocopy::IntoBytes + zerocopy::Immutable>(header: &T, out: &mut [u8]) {
    out[..size_of::<T>()].copy_from_slice(header.as_bytes());
}
