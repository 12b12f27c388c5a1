//! The configuration file: TOML, unknown keys refused, every value checked before anything starts.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use portolan_control::qos::cpu::ClassTerms;
use portolan_proto::OLDEST_PROTOCOL;
use portolan_proto::control::{BufferLimits, Parameters};
use portolan_proto::filter::FilterSettings;
use portolan_tcp::{CongestionKind, EcnMode};
use serde::Deserialize;

mod change;
mod cpu;
mod delivery;
mod demux;
mod error;
mod extension;
mod filter;
mod host_policy;
mod limits;
mod qos;
mod raw;
mod source;
#[cfg(test)]
mod tests;

pub(crate) use change::Change;
use cpu::CpuClass;
pub(crate) use delivery::DeliveryConfig;
use delivery::check_ring_size;
pub(crate) use demux::DemuxConfig;
pub(crate) use error::ConfigError;
use error::LONGEST_FILE;
pub(crate) use extension::ExtensionConfig;
pub(crate) use filter::FilterConfig;
pub(crate) use host_policy::HostPolicy;
pub(crate) use limits::{FLOWS, LimitsConfig};
pub(crate) use qos::{LinkConfig, Policy, QosConfig, Whom};
pub(crate) use raw::RawRule;
pub(crate) use source::ConfigSource;

/// Lowest port an unprivileged process may bind; the ephemeral range must lie above.
pub(crate) const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// The configuration of `portoland`. Each key is optional.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Devices whose packets Portolan filters.
    pub interfaces: Vec<String>,
    /// Control socket; by default `/run/portolan/<namespace>/control`.
    pub socket: Option<PathBuf>,
    /// Mode of the control socket, as for `chmod`.
    pub socket_mode: u32,
    /// Group that owns the control socket.
    pub socket_group: Option<String>,
    /// First and last port for connections and binds that name none. Kept apart from the kernel's own range by
    /// `net.ipv4.ip_local_reserved_ports`, and by default outside 32768–60999.
    pub ephemeral_ports: [u16; 2],
    /// Bytes of each process's receive ring, a power of two.
    pub ring_size: u32,
    /// Maximum time in microseconds that a waiting thread polls its ring before it sleeps; if none, the cost of a
    /// sleep on this machine.
    pub spin_us: Option<u32>,
    /// `cubic`, `reno` or `bbr`.
    pub congestion: String,
    /// Explicit congestion notification: `off`, `accept` or `request`; if none, `tcp_ecn` applies.
    pub ecn: Option<String>,
    pub host_policy: HostPolicy,
    pub buffers: Buffers,
    pub limits: LimitsConfig,
    pub filter: FilterConfig,
    pub demux: DemuxConfig,
    pub delivery: DeliveryConfig,
    pub qos: QosConfig,
    /// `[[raw]]`.
    pub raw: Vec<RawRule>,
    pub extension: ExtensionConfig,
    pub delegation: DelegationConfig,
}

/// Which processes may perform the handshakes of their own ports.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DelegationConfig {
    /// Whether programs may do so at all.
    pub allow: bool,
    /// Ports that are delegated if their listener does not choose.
    pub ports: Vec<u16>,
}

impl Default for DelegationConfig {
    fn default() -> DelegationConfig {
        DelegationConfig {
            allow: true,
            ports: Vec::new(),
        }
    }
}

/// Socket buffers in bytes: initial sizes and limits of growth.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Buffers {
    pub send_initial: u32,
    pub send_maximum: u32,
    pub receive_initial: u32,
    pub receive_maximum: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            interfaces: Vec::new(),
            socket: None,
            socket_mode: 0o666,
            socket_group: None,
            ephemeral_ports: [20000, 29999],
            ring_size: 4 << 20,
            spin_us: None,
            congestion: CongestionKind::default().name().to_owned(),
            ecn: None,
            host_policy: HostPolicy::default(),
            buffers: Buffers::default(),
            limits: LimitsConfig::default(),
            filter: FilterConfig::default(),
            demux: DemuxConfig::default(),
            delivery: DeliveryConfig::default(),
            qos: QosConfig::default(),
            raw: Vec::new(),
            extension: ExtensionConfig::default(),
            delegation: DelegationConfig::default(),
        }
    }
}

impl Default for Buffers {
    fn default() -> Buffers {
        Buffers {
            send_initial: 256 << 10,
            send_maximum: 8 << 20,
            receive_initial: 256 << 10,
            receive_maximum: 8 << 20,
        }
    }
}

impl Config {
    /// Reads a file and checks its syntax; values are checked by [`Config::check`], after the command line was
    /// applied.
    pub(crate) fn read(path: &Path) -> Result<Config, ConfigError> {
        let refused = |source| ConfigError::Read {
            path: path.to_owned(),
            source,
        };
        let mut text = String::new();
        // A pipe has no length to query, a device has none at all.
        let file = File::open(path).map_err(refused)?;
        file.take(LONGEST_FILE + 1)
            .read_to_string(&mut text)
            .map_err(refused)?;
        Config::parse(path, &text)
    }

    /// Parses the text of the file at `path`.
    fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
        if text.len() as u64 > LONGEST_FILE {
            return Err(ConfigError::Long(path.to_owned()));
        }
        toml::from_str(text).map_err(|error| ConfigError::Parse {
            path: path.to_owned(),
            message: error.to_string(),
        })
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.check_interfaces()?;
        check_ring_size("ring_size", self.ring_size)?;
        let [first, last] = self.ephemeral_ports;
        if first > last || first < FIRST_UNPRIVILEGED_PORT {
            return Err(ConfigError::EphemeralPorts(first, last));
        }
        if CongestionKind::from_name(&self.congestion).is_none() {
            return Err(ConfigError::Congestion(self.congestion.clone()));
        }
        if let Some(ecn) = &self.ecn
            && EcnMode::from_name(ecn).is_none()
        {
            return Err(ConfigError::Ecn(ecn.clone()));
        }
        if self.socket_mode & !0o777 != 0 {
            return Err(ConfigError::SocketMode(self.socket_mode));
        }
        let b = &self.buffers;
        let sound = |initial, maximum| (4096..=maximum).contains(&initial);
        if !sound(b.send_initial, b.send_maximum) || !sound(b.receive_initial, b.receive_maximum) {
            return Err(ConfigError::Buffers);
        }
        if !self.demux.is_sound() {
            return Err(ConfigError::Marker(self.demux.marker));
        }
        cpu::check(&self.qos.cpu_class)?;
        self.delivery.check()?;
        raw::check(&self.raw)?;
        extension::check(&self.extension)?;
        self.limits.check()?;
        self.check_links()
    }

    fn check_links(&self) -> Result<(), ConfigError> {
        let links = &self.qos.link;
        for (i, link) in links.iter().enumerate() {
            let name = || link.device.clone();
            let is_repeated = links[..i].iter().any(|other| other.device == link.device);
            if is_repeated || !self.interfaces.contains(&link.device) {
                return Err(ConfigError::LinkDevice(name()));
            }
            if link.rate.is_some_and(|rate| rate < LEAST_LINK_RATE) {
                return Err(ConfigError::LinkRate(name()));
            }
            // Best effort always keeps a part.
            if !(1..=99).contains(&link.reservable) {
                return Err(ConfigError::LinkPortion(name(), "reservable", 1, 99));
            }
            if link.per_user > 100 {
                return Err(ConfigError::LinkPortion(name(), "per_user", 0, 100));
            }
        }
        Ok(())
    }

    fn check_interfaces(&self) -> Result<(), ConfigError> {
        const MAX: usize = portolan_proto::filter::MAX_INTERFACES;
        if self.interfaces.is_empty() {
            return Err(ConfigError::NoInterface);
        }
        if self.interfaces.len() > MAX {
            return Err(ConfigError::TooManyInterfaces(MAX));
        }
        for (i, name) in self.interfaces.iter().enumerate() {
            if self.interfaces[..i].contains(name) {
                return Err(ConfigError::RepeatedInterface(name.clone()));
            }
        }
        Ok(())
    }

    /// Returns the configured mode of explicit congestion notification, if any.
    pub(crate) fn ecn(&self) -> Option<EcnMode> {
        self.ecn.as_deref().and_then(EcnMode::from_name)
    }

    /// Returns the service classes of CPU time; the first is the default.
    pub(crate) fn cpu_classes(&self) -> Vec<ClassTerms> {
        let default = [CpuClass::default_class()];
        let classes = match &*self.qos.cpu_class {
            [] => &default,
            classes => classes,
        };
        classes.iter().filter_map(CpuClass::terms).collect()
    }

    /// Returns the settings of the programs in the kernel.
    pub(crate) fn filter_settings(&self) -> FilterSettings {
        FilterSettings {
            algorithm: self.filter.algorithm.number(),
            marker: self.demux.traffic_class().map_or(0, u32::from),
            format: OLDEST_PROTOCOL,
        }
    }

    /// Returns the parameters of each library.
    pub(crate) fn parameters(&self) -> Parameters {
        Parameters {
            spin_us: self.spin_us.unwrap_or_default(),
            send_buffer: BufferLimits {
                initial: self.buffers.send_initial,
                maximum: self.buffers.send_maximum,
            },
            receive_buffer: BufferLimits {
                initial: self.buffers.receive_initial,
                maximum: self.buffers.receive_maximum,
            },
            gso_max: GSO_MAX,
            congestion: self.congestion.clone(),
            delivery: self.delivery.form,
            mapping: self.delivery.mapping,
        }
    }
}

const LEAST_LINK_RATE: u64 = 1_000_000;

/// TCP payload of the largest segment: 64 KiB less the longest IPv6 and TCP headers.
const GSO_MAX: u32 = 65_535 - 40 - 60;
