//! `[extension]`: the limits of protocol extensions, and which users may install them.

use portolan_proto::extension::Event;
use portolan_sys::accounts;
use portolan_sys::unix::Credentials;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::error::ConfigError;
use super::raw;

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ExtensionConfig {
    /// Nanoseconds that one run of a handler may take; a handler that exceeds it repeatedly is
    /// removed.
    pub time_limit_ns: u64,
    /// Instructions that the verifier may process to prove that a handler ends: an upper bound for each run.
    pub instructions: u32,
    /// Bytes of maps per process.
    pub memory_per_process: u64,
    /// `[[extension.allow]]`. If there are none, every user may install them on ports of its own.
    pub allow: Vec<ExtensionRule>,
}

/// What some users may install.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtensionRule {
    /// Any user, if neither user nor group is named.
    #[serde(default, deserialize_with = "user")]
    user: Option<u32>,
    #[serde(default, deserialize_with = "group")]
    group: Option<u32>,
    /// By name; all if there are none.
    #[serde(default, deserialize_with = "events")]
    events: Vec<Event>,
    /// First and last port.
    #[serde(default = "all_ports")]
    ports: [u16; 2],
}

impl Default for ExtensionConfig {
    fn default() -> ExtensionConfig {
        ExtensionConfig {
            time_limit_ns: 10_000,
            instructions: 65_536,
            memory_per_process: 32 << 20,
            allow: Vec::new(),
        }
    }
}

impl ExtensionConfig {
    /// Returns whether a user may install a handler; root always may. `[[raw]]` determines which protocols without
    /// ports a user may have.
    pub(crate) fn allows(&self, user: &Credentials, event: Event, port: Option<u16>) -> bool {
        let rules = &self.allow;
        user.uid == 0 || rules.is_empty() || rules.iter().any(|r| r.allows(user, event, port))
    }
}

impl ExtensionRule {
    fn allows(&self, user: &Credentials, event: Event, port: Option<u16>) -> bool {
        let [first, last] = self.ports;
        self.user.is_none_or(|uid| uid == user.uid)
            && self.group.is_none_or(|gid| gid == user.gid)
            && (self.events.is_empty() || self.events.contains(&event))
            && port.is_none_or(|port| (first..=last).contains(&port))
    }
}

pub(super) fn check(config: &ExtensionConfig) -> Result<(), ConfigError> {
    if !(100..=10_000_000).contains(&config.time_limit_ns) {
        return Err(ConfigError::ExtensionTime(config.time_limit_ns));
    }
    let mut ports = config.allow.iter().map(|rule| rule.ports);
    match ports.find(|[first, last]| first > last) {
        Some([first, last]) => Err(ConfigError::ExtensionPorts(first, last)),
        None => Ok(()),
    }
}

fn all_ports() -> [u16; 2] {
    [0, u16::MAX]
}

fn user<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    raw::user(from).map(Some)
}

fn group<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let name = String::deserialize(from)?;
    let gid = name.parse().ok().or_else(|| accounts::gid_of(&name));
    let unknown = || D::Error::custom(format!("there is no group {name:?}"));
    gid.map(Some).ok_or_else(unknown)
}

fn events<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Event>, D::Error> {
    let event = |name: &String| {
        let unknown = || D::Error::custom(format!("there is no event {name:?}"));
        Event::from_name(name).ok_or_else(unknown)
    };
    Vec::<String>::deserialize(from)?
        .iter()
        .map(event)
        .collect()
}
