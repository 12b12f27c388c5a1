//! Packet headers: parse from bytes, build into bytes, checksum. `no_std`, no allocation, no
//! state. Raw packet bytes are interpreted here and nowhere else.
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

/// Bytes that are not the header they should be: cut short, inconsistent, or with a bad checksum.
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
