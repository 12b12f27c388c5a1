//! Passive opens: listeners, their handshakes and accept queues, floods.

pub mod delegation;
pub mod floods;
pub mod listen;
pub mod passive;
pub mod rx_throttle;
