//! Sessions over IP, sans-IO.
//!
//! Call contract of [`Stack`]: give it every received frame ([`Stack::input`], fragments by way of
//! [`Stack::reassemble`]), then let it send
//! ([`Stack::output`]), look at the [`Stack::changed`] sessions, and come back no later than
//! [`Stack::deadline`] with [`Stack::expire`] and `output`. After touching a session through
//! [`Stack::get_mut`] call [`Stack::touch`].
#![forbid(unsafe_code)]

/// Changes with every source that shapes messages, capsules or shared memory. Library and server
/// refuse each other when it differs.
pub const VERSION: u32 = match u32::from_str_radix(env!("PORTOLAN_BUILD"), 10) {
    Ok(version) => version,
    Err(_) => panic!("the build script writes a number"),
};

mod backlog;
mod counters;
mod delegation;
mod expected;
mod flood_detector;
mod fragments;
mod frame;
mod membership;
mod packet;
pub mod passive;
mod pmtu;
mod reset_limit;
mod resolved_path;
mod routes;
mod session;
mod stack;
mod udp;

pub use backlog::{Backlog, CookieUse, SOMAXCONN, SynVerdict};
pub use counters::{COUNTERS, SPUN_US, counter_names};
pub use delegation::{DelegateInput, Delegation, FloodReport};
pub use flood_detector::FloodDetector;
pub use fragments::{EarlyFragments, FragmentCounters, Reassembled, Whole};
pub use frame::{Frame, TxQueueId, Wire};
pub use membership::Memberships;
pub use packet::{Drop, IcmpMessage, Packet, Transport};
pub use portolan_proto::ip::{IpOptions, MtuDiscovery};
pub use reset_limit::ResetLimit;
pub use resolved_path::NextHop;
pub use routes::{NoRoute, Path, Routes};
pub use session::{BadCapsule, Session, TcpSession};
pub use stack::{Input, SendError, Sending, Stack, Step, send_segment};
pub use udp::{
    Checksums, Datagram, DatagramError, ErrorCause, MulticastOptions, Reports, UdpSession, V6Sizes,
};
