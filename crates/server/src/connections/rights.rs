//! Rights to low ports, which sockets of programs show.

use portolan_sys::port_right::BoundPort;

/// The right that a connection has shown for its next bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortRight {
    Nothing,
    /// A thread is querying.
    Asking,
    /// The right to bind this.
    To(BoundPort),
}
