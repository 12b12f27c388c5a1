//! What the owner of a connection chooses: the parameters it is opened with, and the options that
//! a socket may change during its lifetime.

use core::time::Duration;

use serde::{Deserialize, Serialize};

use crate::encoding;

/// The congestion control algorithm of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CongestionKind {
    #[default]
    Cubic,
    Reno,
    Bbr,
}

encoding::variants!(CongestionKind {
    0 => Cubic,
    1 => Reno,
    2 => Bbr,
});

impl CongestionKind {
    pub const ALL: [CongestionKind; 3] = [
        CongestionKind::Cubic,
        CongestionKind::Reno,
        CongestionKind::Bbr,
    ];

    /// The name used by `TCP_CONGESTION`.
    pub const fn name(self) -> &'static str {
        match self {
            CongestionKind::Cubic => "cubic",
            CongestionKind::Reno => "reno",
            CongestionKind::Bbr => "bbr",
        }
    }

    pub fn from_name(name: &str) -> Option<CongestionKind> {
        CongestionKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// How a connection treats explicit congestion notification; Linux's `tcp_ecn`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum EcnMode {
    Off,
    /// Accepts it if the peer requests it.
    #[default]
    Accept,
    /// Requests and accepts it.
    Request,
}

impl EcnMode {
    /// Parses the name used in the configuration file.
    pub fn from_name(name: &str) -> Option<EcnMode> {
        match name {
            "off" => Some(EcnMode::Off),
            "accept" => Some(EcnMode::Accept),
            "request" => Some(EcnMode::Request),
            _ => None,
        }
    }
}

/// RFC 9293 §3.7.1: 536 bytes over IPv4, 1220 over IPv6.
pub const ASSUMED_MSS_V4: u16 = 536;
pub const ASSUMED_MSS_V6: u16 = 1220;

/// Parameters of a new connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Config {
    /// Largest payload of one segment on the path without options: MTU less IP and TCP headers.
    pub mss: u16,
    /// The peer's MSS if it sends no MSS option (RFC 9293 §3.7.1).
    pub assumed_mss: u16,
    pub send_buffer: usize,
    pub send_buffer_max: usize,
    pub receive_buffer: usize,
    pub receive_buffer_max: usize,
    /// Largest payload in one segment for segmentation offload.
    pub gso_max: usize,
    pub congestion: CongestionKind,
    pub ecn: EcnMode,
    pub timestamps: bool,
    pub sack: bool,
    pub window_scaling: bool,
    /// Bytes that a demux handle takes in each packet; 0 if handles are not offered to the peer.
    pub handle_room: u16,
    /// Upper bound of the advertised window, including the first.
    pub window_clamp: Option<u32>,
    /// Added to the millisecond clock in the timestamp option, so that it does not reveal the uptime.
    pub timestamp_offset: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            mss: 1460,
            assumed_mss: ASSUMED_MSS_V4,
            send_buffer: 87_040,
            send_buffer_max: 4 << 20,
            receive_buffer: 131_072,
            receive_buffer_max: 6 << 20,
            gso_max: 65_160,
            congestion: CongestionKind::Cubic,
            ecn: EcnMode::Accept,
            timestamps: true,
            sack: true,
            window_scaling: true,
            handle_room: 0,
            window_clamp: None,
            timestamp_offset: 0,
        }
    }
}

/// Keep-alive probing (RFC 9293 §3.8.4 [MUST-24, MUST-25, MUST-27, MUST-28]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeepAlive {
    pub enabled: bool,
    pub idle: Duration,
    pub interval: Duration,
    pub count: u32,
}

encoding::fields!(KeepAlive {
    enabled,
    idle,
    interval,
    count
});

impl Default for KeepAlive {
    fn default() -> KeepAlive {
        KeepAlive {
            enabled: false,
            idle: Duration::from_secs(7200),
            interval: Duration::from_secs(75),
            count: 9,
        }
    }
}

/// How long an orphaned connection waits for the peer's FIN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OrphanWait {
    /// As long as TIME-WAIT lasts.
    #[default]
    Default,
    For(Duration),
    /// The connection ends as soon as its FIN is acknowledged.
    Never,
}

encoding::variants!(OrphanWait {
    0 => Default,
    1 => For(inner),
    2 => Never,
});

/// Options that may change at any time; they take effect at the next `transmit`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Disables Nagle's algorithm.
    pub nodelay: bool,
    /// Holds back segments that are not full (`TCP_CORK`).
    pub cork: bool,
    /// Like `cork`, until the next write: the writer has more to send (`MSG_MORE`).
    pub more: bool,
    pub keepalive: KeepAlive,
    /// How long data may stay unacknowledged (RFC 5482).
    pub user_timeout: Option<Duration>,
    /// Upper bound of the segment size in both directions (`TCP_MAXSEG`).
    pub max_segment: Option<u16>,
    /// Bytes required for the connection to count as readable.
    pub receive_low_water: usize,
    /// Upper bound of the advertised window.
    pub window_clamp: Option<u32>,
    /// Upper bound of the sending rate, bytes per second (`SO_MAX_PACING_RATE`).
    pub max_pacing: Option<u64>,
    /// Number of unsent bytes at which `send` accepts no more (`TCP_NOTSENT_LOWAT`).
    pub unsent_low_water: Option<u32>,
    /// Leaves the urgent byte in the stream (`SO_OOBINLINE`).
    pub urgent_inline: bool,
    /// Retransmissions of a SYN or SYN+ACK before the open fails (`TCP_SYNCNT`).
    pub syn_retries: Option<u8>,
    /// Closing sends a RST (`SO_LINGER` of zero).
    pub reset_on_close: bool,
    /// How long an orphan stays in FIN-WAIT-2 (`TCP_LINGER2`).
    pub orphan_wait: OrphanWait,
}

encoding::fields!(Options {
    nodelay,
    cork,
    more,
    keepalive,
    user_timeout,
    max_segment,
    receive_low_water,
    window_clamp,
    max_pacing,
    unsent_low_water,
    urgent_inline,
    syn_retries,
    reset_on_close,
    orphan_wait
});
