//! Sessions over IP, sans-IO.
//!
//! Call contract of [`Stack`]: pass it every received frame ([`Stack::input`]; fragments through
//! [`Stack::reassemble`]), then call [`Stack::output`], process the [`Stack::changed`] sessions, and
//! call [`Stack::expire`] and `output` no later than [`Stack::deadline`]. After changing a session
//! through [`Stack::get_mut`] call [`Stack::touch`].
#![forbid(unsafe_code)]

mod counters;
mod delegation;
mod expected;
mod flood_detector;
mod flow_table;
mod fragments;
mod frame;
mod leased_ports;
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

pub use counters::{COUNTERS, SPUN_US, counter_names, round_trip_times};
pub use delegation::{DelegateInput, Delegation, FloodReport};
pub use flood_detector::FloodDetector;
pub use fragments::{EarlyFragments, FragmentCounters, Reassembled, Whole};
pub use frame::{Frame, TxQueueId, Wire};
pub use leased_ports::LeasedPorts;
pub use membership::Memberships;
pub use packet::{Drop, IcmpMessage, Packet, Transport};
pub use portolan_proto::ip::{IpOptions, MtuDiscovery};
pub use reset_limit::ResetLimit;
pub use resolved_path::NextHop;
pub use routes::{NoRoute, Path, Routes};
pub use session::{Session, TcpSession};
pub use stack::{Input, SendError, Sending, Stack, Step, send_segment};
pub use udp::{
    Checksums, Datagram, DatagramError, ErrorCause, MulticastOptions, Reports, UdpSession, V6Sizes,
};
