//! Names and addresses.

use std::io;
use std::net::SocketAddr;

use ::tokio::net::{ToSocketAddrs, lookup_host};

use crate::net::handle::{no_address, with_first};

/// Makes a call with each address of `name` in turn until one succeeds; fails as the last one.
pub(super) async fn with_first_of<T>(
    name: impl ToSocketAddrs,
    call: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    with_first(lookup_host(name).await?, call)
}

/// Returns the first address of `name`.
pub(super) async fn first_of(name: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    lookup_host(name).await?.next().ok_or_else(no_address)
}
