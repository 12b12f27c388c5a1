//! Packet headers: parse from octets, build into octets, checksum. `no_std`, no allocation, no
//! state. Raw packet octets are interpreted here and nowhere else.
#![no_std]
#![forbid(unsafe_code)]

pub mod tcp;
