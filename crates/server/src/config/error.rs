//! Errors of the configuration.

use std::path::PathBuf;

use portolan_proto::raw::Guard;

/// Maximum length of a configuration file.
pub(super) const LONGEST_FILE: u64 = 1 << 20;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{0} is longer than {LONGEST_FILE} bytes")]
    Long(PathBuf),
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    #[error("no interface is named: give --interface or `interfaces` in the file")]
    NoInterface,
    #[error("at most {0} interfaces can be managed")]
    TooManyInterfaces(usize),
    #[error("interface {0:?} is named twice")]
    RepeatedInterface(String),
    #[error("`{key}` {bytes} is not a power of two between 256 KiB and 1 GiB")]
    RingSize { key: &'static str, bytes: u32 },
    #[error(
        "`delivery.form` is \"shm-ipf\", which needs a hook in the driver, but `delivery.xdp` is \"off\""
    )]
    NoDriverHook,
    #[error("`ephemeral_ports` {0}-{1} is empty or reaches below port 1024")]
    EphemeralPorts(u16, u16),
    #[error("`congestion` {0:?} is unknown; there are cubic, reno and bbr")]
    Congestion(String),
    #[error("`ecn` {0:?} is unknown; it may be off, accept or request")]
    Ecn(String),
    #[error("`socket_mode` {0:o} has more than permission bits")]
    SocketMode(u32),
    #[error("`buffers`: each initial size must be at least 4096 and at most its maximum")]
    Buffers,
    #[error(
        "`demux.marker` {0} is no code point for local use: of 0 to 63, those that end in binary 11"
    )]
    Marker(u8),
    #[error("`limits`: {0} must be between 1 and {1}")]
    Limit(&'static str, u32),
    #[error("`limits`: root_reserve {0} is above 90 percent")]
    RootReserve(u8),
    #[error(
        "`qos.cpu_class` {0:?}: `share` is above 0 and at most 1, `each_user` is 0 to 1, `overbooking` is 0 to 1000 or \
         \"unbounded\""
    )]
    CpuClass(String),
    #[error("`qos.cpu_class` {0:?}: each class has a name of its own")]
    CpuClassName(String),
    #[error("`qos.cpu_class`: the shares add up to more than 1")]
    CpuShares,
    #[error("`qos.link`: {0:?} is not a managed interface, or is named twice")]
    LinkDevice(String),
    #[error("`qos.link`: the rate of {0:?} is below 1 Mbit")]
    LinkRate(String),
    #[error("`raw`: {0} is nobody's to have")]
    RawGuard(Guard),
    #[error("`qos.link`: `{1}` of {0:?} must be between {2} and {3} percent")]
    LinkPortion(String, &'static str, u8, u8),
    #[error("`extension.time_limit_ns` {0} is not between 100 and 10000000")]
    ExtensionTime(u64),
    #[error("`extension.allow`: ports {0}-{1} are none")]
    ExtensionPorts(u16, u16),
}
