//! Captures every frame that arrives at a host, as tcpdump would.

use std::os::fd::OwnedFd;

use portolan_netns::Namespace;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};

/// `ETH_P_ALL` in network order.
const EVERYTHING: u32 = 0x0003_u16.to_be() as u32;

pub(crate) struct Capture(OwnedFd);

impl Capture {
    /// Captures the frames of all devices of `host` from now on.
    pub(crate) fn start(host: &Namespace) -> Capture {
        let protocol = std::num::NonZero::new(EVERYTHING).map(Protocol::from_raw);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            host.enter(|| socket_with(AddressFamily::PACKET, SocketType::RAW, flags, protocol));
        Capture(socket.expect("root may capture"))
    }

    /// Returns the frames since the last call.
    pub(crate) fn frames(&self) -> Vec<Vec<u8>> {
        let mut buffer = vec![0; 1 << 17];
        let mut frames = Vec::new();
        while let Ok((length, _)) = recv(&self.0, &mut buffer[..], RecvFlags::empty()) {
            frames.push(buffer[..length].to_vec());
        }
        frames
    }
}
