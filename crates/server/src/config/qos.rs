//! `[qos]`: guarantees by the administrator. The values of a policy are checked while the file is parsed, so that the
//! error message shows the line.

use std::path::PathBuf;

use portolan_control::qos::transmit::Portions;
use portolan_proto::qos::text::{self, Unreadable};
use portolan_proto::qos::{Adapt, Cpu, Rate, Receive, Scope, Slack, Transmit};
use portolan_sys::accounts;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::cpu::CpuClass;

#[cfg(test)]
mod tests;

/// The section `[qos]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct QosConfig {
    /// `[[qos.link]]`.
    pub link: Vec<LinkConfig>,
    /// `[[qos.policy]]`, in the order of the file.
    pub policy: Vec<Policy>,
    /// `[[qos.cpu_class]]`; a default class if there is none.
    pub cpu_class: Vec<CpuClass>,
    /// Where the servers of this machine exchange their CPU promises.
    pub cpu_ledger: PathBuf,
}

impl Default for QosConfig {
    fn default() -> QosConfig {
        QosConfig {
            link: Vec::new(),
            policy: Vec::new(),
            cpu_class: Vec::new(),
            cpu_ledger: PathBuf::from("/run/portolan/cpu"),
        }
    }
}

/// The reservable part of a device's rate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinkConfig {
    pub device: String,
    /// If none, the rate that the device reports.
    #[serde(default, deserialize_with = "rate")]
    pub rate: Option<u64>,
    /// Percent of the rate for all reservations together.
    #[serde(default = "usual_reservable")]
    pub reservable: u8,
    /// Percent of that for one user other than root; with 0 only root may reserve.
    #[serde(default = "usual_per_user")]
    pub per_user: u8,
    /// Whether a queueing discipline that was put on the device may be replaced.
    #[serde(default)]
    pub replace: bool,
}

impl LinkConfig {
    /// The link of a device that the file does not name: only root reserves there, since reservations replace the
    /// host's queueing discipline.
    pub(crate) fn usual(device: &str) -> LinkConfig {
        LinkConfig {
            device: device.to_owned(),
            rate: None,
            reservable: usual_reservable(),
            per_user: 0,
            replace: false,
        }
    }

    pub(crate) fn portions(&self) -> Portions {
        Portions {
            reservable_percent: self.reservable,
            user_percent: self.per_user,
        }
    }
}

fn usual_reservable() -> u8 {
    90
}

fn usual_per_user() -> u8 {
    50
}

/// Guarantees given without a request.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "PolicyTable")]
pub(crate) struct Policy {
    pub whom: Whom,
    pub transmit: Option<Transmit>,
    pub receive: Option<Receive>,
    pub cpu: Option<Cpu>,
}

/// Recipients of a policy's guarantees.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Whom {
    Scope(Scope),
    /// Each process that runs this file, separately.
    Program {
        path: String,
        uid: Option<u32>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyTable {
    #[serde(default, deserialize_with = "user")]
    user: Option<Scope>,
    #[serde(default, deserialize_with = "cgroup")]
    cgroup: Option<Scope>,
    #[serde(default, deserialize_with = "port")]
    port: Option<Scope>,
    program: Option<String>,
    transmit: Option<TransmitTable>,
    receive: Option<ReceiveTable>,
    cpu: Option<CpuTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TransmitTable {
    #[serde(default, deserialize_with = "rate")]
    rate: Option<u64>,
    #[serde(default, deserialize_with = "duration")]
    slice: Option<u32>,
    #[serde(default, deserialize_with = "duration")]
    period: Option<u32>,
    #[serde(default, deserialize_with = "bytes")]
    burst: Option<u32>,
    #[serde(default, deserialize_with = "rate")]
    ceiling: Option<u64>,
    #[serde(default)]
    slack: bool,
    device: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReceiveTable {
    packets: Option<u32>,
    #[serde(default, deserialize_with = "rate")]
    bits: Option<u64>,
    #[serde(default, deserialize_with = "milliseconds")]
    burst: Option<u32>,
    priority: Option<u8>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CpuTable {
    #[serde(default, deserialize_with = "share")]
    rate: Option<u32>,
    #[serde(default, deserialize_with = "duration")]
    period: Option<u32>,
    class: Option<String>,
    #[serde(default)]
    slack: bool,
    #[serde(default, deserialize_with = "adapt")]
    adapt: Option<Adapt>,
}

impl TryFrom<PolicyTable> for Policy {
    type Error = &'static str;

    fn try_from(table: PolicyTable) -> Result<Policy, &'static str> {
        let whom = match (table.program, table.user, table.cgroup, table.port) {
            (None, Some(scope), None, None)
            | (None, None, Some(scope), None)
            | (None, None, None, Some(scope)) => Whom::Scope(scope),
            (Some(path), user, None, None) if path.starts_with('/') => Whom::Program {
                path,
                uid: user.and_then(|scope| match scope {
                    Scope::User { uid } => Some(uid),
                    _ => None,
                }),
            },
            (Some(_), _, None, None) => return Err("`program` is the path of a file"),
            _ => {
                return Err(
                    "a policy is for a `user`, a `cgroup`, a `port`, a `program`, or a `program` of a `user`",
                );
            }
        };
        if table.transmit.is_none() && table.receive.is_none() && table.cpu.is_none() {
            return Err("a policy has one of `transmit`, `receive` and `cpu`, or more");
        }
        if table.cpu.is_some() && matches!(whom, Whom::Scope(Scope::Port { .. })) {
            return Err("`cpu` is for a `user`, a `cgroup`, or each process of a `program`");
        }
        Ok(Policy {
            whom,
            transmit: table.transmit.map(Transmit::try_from).transpose()?,
            receive: table.receive.map(Receive::try_from).transpose()?,
            cpu: table.cpu.map(Cpu::try_from).transpose()?,
        })
    }
}

impl TryFrom<TransmitTable> for Transmit {
    type Error = &'static str;

    fn try_from(table: TransmitTable) -> Result<Transmit, &'static str> {
        let rate = match (table.rate, table.slice, table.period) {
            (Some(bits), None, None) => Rate::Bits(bits),
            (None, Some(slice_us), Some(period_us)) => Rate::Slice {
                slice_us,
                period_us,
            },
            _ => return Err("`transmit` has either `rate`, or `slice` and `period`"),
        };
        let slack = match (table.ceiling, table.slack) {
            (None, false) => Slack::None,
            (None, true) => Slack::All,
            (Some(bits), false) => Slack::UpTo(bits),
            (Some(_), true) => return Err("`transmit` has `ceiling` or `slack`, not both"),
        };
        Ok(Transmit {
            device: table.device,
            rate,
            burst: table.burst,
            slack,
        })
    }
}

impl TryFrom<ReceiveTable> for Receive {
    type Error = &'static str;

    fn try_from(table: ReceiveTable) -> Result<Receive, &'static str> {
        if table.packets.is_none() && table.bits.is_none() && table.priority.is_none() {
            return Err("`receive` has one of `packets`, `bits` and `priority`, or more");
        }
        Ok(Receive {
            packets: table.packets,
            bits: table.bits,
            burst_ms: table.burst.unwrap_or(Receive::BURST_MS),
            priority: table.priority,
        })
    }
}

impl TryFrom<CpuTable> for Cpu {
    type Error = &'static str;

    fn try_from(table: CpuTable) -> Result<Cpu, &'static str> {
        Ok(Cpu {
            class: table.class,
            rate_ppm: table.rate.ok_or("`cpu` has a `rate`")?,
            period_us: table.period.unwrap_or(Cpu::PERIOD_US),
            slack: table.slack,
            adapt: table.adapt.unwrap_or_default(),
        })
    }
}

/// Parses the string value of a key.
fn word<'de, D: Deserializer<'de>, T>(
    from: D,
    read: impl FnOnce(&str) -> Result<T, Unreadable>,
) -> Result<Option<T>, D::Error> {
    let word = String::deserialize(from)?;
    read(&word).map(Some).map_err(D::Error::custom)
}

pub(super) fn rate<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    word(from, text::rate)
}

pub(super) fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    word(from, text::duration)
}

fn milliseconds<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    word(from, text::milliseconds)
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    word(from, text::bytes)
}

fn share<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    word(from, text::share)
}

fn adapt<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Adapt>, D::Error> {
    word(from, text::adapt)
}

fn cgroup<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Scope>, D::Error> {
    word(from, text::cgroup)
}

fn port<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Scope>, D::Error> {
    word(from, text::port)
}

fn user<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Scope>, D::Error> {
    word(from, |name| text::user(name, accounts::uid_of))
}
