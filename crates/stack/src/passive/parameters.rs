//! What the connections of a listener begin with: the host's rules, the path to the peer, the application's options.

use core::time::Duration;

use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::Flood;
use portolan_tcp::cookie::CookieOptions;
use portolan_tcp::isn::{Secret, timestamp_offset};
use portolan_tcp::{ASSUMED_MSS_V4, ASSUMED_MSS_V6, Config, Connection};
use portolan_types::FlowKey;

use crate::routes::Path;

/// The least receive buffer that a connection starts with.
const RECEIVE_BUFFER_MIN: u32 = 4096;

/// What the path to a peer says.
pub fn path_config(base: &Config, path: &Path, flow: &FlowKey, secret: &Secret) -> Config {
    let (headers, assumed_mss) = if flow.remote.is_ipv4() {
        (40, ASSUMED_MSS_V4)
    } else {
        (60, ASSUMED_MSS_V6)
    };
    Config {
        assumed_mss,
        mss: u16::try_from(path.mtu.saturating_sub(headers)).unwrap_or(u16::MAX - 120),
        timestamp_offset: timestamp_offset(secret, flow),
        ..base.clone()
    }
}

/// What the application's options mean for a connection that is to be opened. `SO_RCVBUF` fixes the
/// size: no auto-tuning beyond it.
pub fn tune_config(config: &mut Config, options: &HandshakeOptions) {
    config.window_clamp = options.window_clamp.filter(|&bytes| bytes > 0);
    if let Some(bytes) = options.receive_buffer {
        let most = u32::try_from(config.receive_buffer_max).unwrap_or(u32::MAX);
        let bytes = bytes.clamp(RECEIVE_BUFFER_MIN, most.max(RECEIVE_BUFFER_MIN)) as usize;
        config.receive_buffer = bytes;
        config.receive_buffer_max = bytes;
    }
}

/// The same for a connection; `retries` unless the application has chosen.
pub fn tune_connection(connection: &mut Connection, options: &HandshakeOptions, retries: u8) {
    let tuned = connection.options();
    tuned.max_segment = options.max_segment.filter(|&mss| mss > 0);
    tuned.syn_retries = options.syn_retries.or(Some(retries));
    tuned.user_timeout = options
        .user_timeout_ms
        .map(|ms| Duration::from_millis(u64::from(ms)));
}

/// With what the packet filter answers the SYNs of a listener as [`answer_by_cookie`] would.
pub fn flood(base: &Config, options: &HandshakeOptions, secret: &Secret) -> Flood {
    let mut config = base.clone();
    tune_config(&mut config, options);
    let terms = CookieOptions::of(&config);
    let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
    Flood {
        secret: secret.0,
        window: terms.window,
        max_segment: options.max_segment.unwrap_or(0),
        scale: terms.scale.unwrap_or(Flood::NO_SCALE),
        flags: flag(terms.timestamps, Flood::TIMESTAMPS)
            | flag(terms.sack, Flood::SACK)
            | flag(terms.ecn, Flood::ECN)
            | flag(options.ip.discovery.forbids_routers(), Flood::DONT_FRAGMENT),
        // TCP decides on the two low bits for each segment.
        traffic_class: options.ip.tos & !3,
        hop_limit: options.ip.ttl,
        least_hops: options.ip.min_ttl,
        ..Flood::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receive_buffer_that_was_asked_for_stays_within_the_hosts() {
        let base = Config::default();
        let of = |bytes| {
            let mut config = base.clone();
            let options = HandshakeOptions {
                receive_buffer: Some(bytes),
                ..HandshakeOptions::default()
            };
            tune_config(&mut config, &options);
            (config.receive_buffer, config.receive_buffer_max)
        };
        assert_eq!(of(10_000), (10_000, 10_000));
        assert_eq!(of(1), (4096, 4096));
        assert_eq!(
            of(u32::MAX),
            (base.receive_buffer_max, base.receive_buffer_max)
        );
    }
}
