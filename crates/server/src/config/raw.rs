//! `[[raw]]`: which users may run protocols of their own.

use portolan_proto::qos::Scope;
use portolan_proto::qos::text;
use portolan_proto::raw::Guard;
use portolan_sys::accounts;
use portolan_types::Protocol;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::error::ConfigError;

/// What a user other than root may have.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRule {
    #[serde(deserialize_with = "user")]
    user: u32,
    #[serde(default)]
    ethertypes: Vec<u16>,
    #[serde(default)]
    protocols: Vec<u8>,
    /// 0 permits ephemeral ports.
    #[serde(default)]
    tcp_ports: Vec<u16>,
    #[serde(default)]
    udp_ports: Vec<u16>,
}

impl RawRule {
    pub(crate) fn allows(&self, uid: u32, guard: Guard) -> bool {
        self.user == uid && self.names(guard)
    }

    fn names(&self, guard: Guard) -> bool {
        match guard {
            Guard::EtherType(number) => self.ethertypes.contains(&number),
            Guard::IpProtocol(number) => self.protocols.contains(&number),
            Guard::Port { protocol, local } => {
                let ports = match protocol {
                    Protocol::Tcp => &self.tcp_ports,
                    Protocol::Udp => &self.udp_ports,
                };
                ports.contains(&local.port())
            }
        }
    }

    /// The guards that must not be the host's own protocols.
    fn guards(&self) -> impl Iterator<Item = Guard> {
        let ethertypes = self.ethertypes.iter().copied().map(Guard::EtherType);
        ethertypes.chain(self.protocols.iter().copied().map(Guard::IpProtocol))
    }
}

pub(super) fn check(rules: &[RawRule]) -> Result<(), ConfigError> {
    let mut guards = rules.iter().flat_map(RawRule::guards);
    match guards.find(|guard| !guard.is_free()) {
        Some(taken) => Err(ConfigError::RawGuard(taken)),
        None => Ok(()),
    }
}

pub(super) fn user<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let name = String::deserialize(from)?;
    match text::user(&name, accounts::uid_of) {
        Ok(Scope::User { uid }) => Ok(uid),
        Ok(other) => Err(D::Error::custom(format!("{other} is not a user"))),
        Err(error) => Err(D::Error::custom(error)),
    }
}
