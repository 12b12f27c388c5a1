//! Passive opens: listeners, their handshakes and accept queues, floods, Fast Open.

pub mod delegation;
pub mod fast_open;
pub mod floods;
pub mod listen;
pub mod rx_throttle;
