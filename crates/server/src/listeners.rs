//! Passive opens: listeners, their handshakes and accept queues, floods.

pub(crate) mod dealing;
pub(crate) mod delegation;
pub(crate) mod floods;
pub(crate) mod listen;
pub(crate) mod passive;
pub(crate) mod rx_throttle;
pub(crate) mod unregistered;
