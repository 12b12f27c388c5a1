//! Packets: built from a script, read from the link, compared with a script's expectations, and
//! formatted. Independent of `portolan-wire`, so that an error there is detected.

mod build;
mod compare;
mod read;
mod reassembly;
mod show;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use crate::script::{Base, Expression, Family};

pub use build::{Unbuildable, build};
pub use compare::compare;
pub use read::{Content, Seen, SeenIcmp, SeenOption, SeenTcp, SeenUdp, read};
pub use reassembly::Reassembly;
pub use show::show;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMP: u8 = 1;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const FRAGMENT: u8 = 44;

/// Returns the byte at a position of streams and datagrams whose contents no script states. The period is
/// prime, so that misplaced data is detected.
pub fn pattern(position: u64) -> u8 {
    (position % 251) as u8
}

/// A pair of endpoints and the runner's knowledge about the connection between them.
#[derive(Clone, Debug)]
pub struct Flow {
    pub local: SocketAddr,
    /// False until the first packet from `local` reveals its port.
    pub local_is_known: bool,
    pub remote: SocketAddr,
    pub remote_isn: u32,
    pub local_isn: Option<u32>,
    /// The last timestamp value that the stack under test has sent.
    pub timestamp: u32,
}

/// The values of a script's names.
#[derive(Clone, Debug)]
pub struct Scope {
    pub family: Family,
    pub variables: HashMap<String, i64>,
    /// The last Fast Open cookie that the stack under test has sent.
    pub cookie: Vec<u8>,
}

/// A number that is not known yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not known yet")]
pub struct Unknown(pub String);

impl Scope {
    pub fn evaluate(&self, expression: &Expression, flow: Option<&Flow>) -> Result<i64, Unknown> {
        let base = match &expression.base {
            Base::Number(number) => *number,
            Base::Variable(name) => match self.variables.get(name) {
                Some(value) => *value,
                None => return Err(Unknown(format!("${name}"))),
            },
            Base::Mss => match self.family {
                Family::V4 => 1460,
                Family::V6 => 1440,
            },
            Base::Timestamp => match flow {
                Some(flow) => flow.timestamp.into(),
                None => return Err(Unknown("TS".to_owned())),
            },
        };
        Ok(base.wrapping_add(expression.plus))
    }
}

/// The checksum of RFC 1071 over pieces, all of which but the last have an even length.
pub(crate) fn sum(pieces: &[&[u8]]) -> u16 {
    let mut total = 0_u32;
    for piece in pieces {
        for pair in piece.chunks(2) {
            total += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            total = (total & 0xffff) + (total >> 16);
        }
    }
    total as u16
}

/// The pseudo-header of RFC 9293 §3.1 and RFC 8200 §8.1.
pub(crate) fn pseudo_header(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(40);
    for address in [from, to] {
        match address {
            IpAddr::V4(v4) => bytes.extend(v4.octets()),
            IpAddr::V6(v6) => bytes.extend(v6.octets()),
        }
    }
    bytes.extend((length as u32).to_be_bytes());
    bytes.extend([0, 0, 0, protocol]);
    bytes
}
