//! Passive opens: what the owner of a port answers to segments that belong to no session. The
//! server does this for its listeners, and a library for those that are delegated to it (ADR 15).

use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::Flood;
use portolan_tcp::cookie::{self, CookieOptions, Decoded};
use portolan_tcp::isn::{Secret, initial_sequence, timestamp_offset};
use portolan_tcp::{
    ASSUMED_MSS_V4, ASSUMED_MSS_V6, Config, Connection, ListenAnswer, judge_at_listener, reset_for,
};
use portolan_types::{FlowKey, Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader};
use serde::{Deserialize, Serialize};

use core::time::Duration;

use crate::backlog::CookieUse;
use crate::routes::Path;

/// Twice the age at which the engine refuses a cookie.
pub const COOKIE_LIFETIME: Duration = Duration::from_secs(240);

/// The least receive buffer that a connection starts with.
const RECEIVE_BUFFER_MIN: u32 = 4096;

/// What holds for all handshakes of a host, as the server tells it to a library that performs some.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Of connections before their path and their listener are known.
    pub config: Config,
    pub cookies: CookieUse,
    pub syn_ack_retries: u8,
    /// For cookies and initial numbers of the port. The server knows it, and goes on with it.
    pub secret: [u8; 16],
}

/// What a segment without a session wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerSegment {
    /// Nothing that is answered.
    Noise,
    Syn,
    /// It returns a cookie.
    Cookie(Decoded),
    /// It acknowledges what nobody sent; while cookies are about, it may be a guess at one.
    Stray {
        is_forgery: bool,
    },
}

/// When cookies were sent last: acknowledgements are looked at for them only then.
#[derive(Clone, Copy, Debug, Default)]
pub struct CookieClock(Option<Instant>);

impl CookieClock {
    /// Others make cookies, too.
    pub const ALWAYS: CookieClock = CookieClock(Some(Instant::FAR_FUTURE));

    pub fn note(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    fn is_running(self, now: Instant) -> bool {
        self.0.is_some_and(|last| now.since(last) < COOKIE_LIFETIME)
    }

    /// Judges a segment by the secrets that cookies of the port were made with.
    pub fn judge<'a>(
        self,
        now: Instant,
        flow: &FlowKey,
        header: &TcpHeader,
        secrets: impl IntoIterator<Item = &'a Secret>,
    ) -> ListenerSegment {
        match judge_at_listener(header) {
            ListenAnswer::Ignore => ListenerSegment::Noise,
            ListenAnswer::Open => ListenerSegment::Syn,
            ListenAnswer::Reset if is_plain_ack(header) && self.is_running(now) => {
                let mut decoded = secrets
                    .into_iter()
                    .filter_map(|secret| cookie::decode(secret, flow, header, now));
                decoded.next().map_or(
                    ListenerSegment::Stray { is_forgery: true },
                    ListenerSegment::Cookie,
                )
            }
            ListenAnswer::Reset => ListenerSegment::Stray { is_forgery: false },
        }
    }
}

/// Parameters of the connections of a listener to that peer.
pub fn passive_config(
    base: &Config,
    options: &HandshakeOptions,
    (path, flow): (&Path, &FlowKey),
    secret: &Secret,
) -> Config {
    let mut config = path_config(base, path, flow, secret);
    tune_config(&mut config, options);
    config
}

/// What the path to a peer says.
pub fn path_config(base: &Config, path: &Path, flow: &FlowKey, secret: &Secret) -> Config {
    let (headers, assumed_mss) = match flow.remote.is_ipv4() {
        true => (40, ASSUMED_MSS_V4),
        false => (60, ASSUMED_MSS_V6),
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

/// The same for the answer by cookie and for the connection that may come of it.
pub fn clamp_for_cookie(config: Config, options: &HandshakeOptions) -> Config {
    Config {
        mss: options
            .max_segment
            .map_or(config.mss, |clamp| clamp.min(config.mss)),
        ..config
    }
}

/// A connection that a SYN opens.
pub fn open(
    config: &Config,
    (options, retries): (&HandshakeOptions, u8),
    syn: &TcpHeader,
    isn: SeqNum,
    now: Instant,
) -> Connection {
    let mut connection = Connection::accept(config, syn, isn, now);
    tune_connection(&mut connection, options, retries);
    connection
}

/// A connection that a cookie opens, with what came along. Its events are the caller's to know.
pub fn open_by_cookie(
    config: &Config,
    decoded: &Decoded,
    (header, payload): (&TcpHeader, &[u8]),
    now: Instant,
) -> Connection {
    let mut connection = Connection::accept_cookie(config, header, decoded, now);
    connection.on_segment(now, header, payload);
    connection.events();
    connection
}

/// Answers a SYN without keeping anything.
pub fn answer_by_cookie(
    secret: &Secret,
    flow: &FlowKey,
    syn: &TcpHeader,
    config: &Config,
    now: Instant,
) -> TcpHeader {
    cookie::syn_ack(secret, flow, syn, config, now)
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

/// Of a connection that a SYN opens.
pub fn first_number(secret: &Secret, flow: &FlowKey, now: Instant) -> SeqNum {
    initial_sequence(secret, flow, now)
}

/// RFC 9293 §3.10.7.1; none for what is not to be answered.
pub fn refusal(header: &TcpHeader, payload: &[u8]) -> Option<TcpHeader> {
    reset_for(header, payload.len())
}

fn is_plain_ack(header: &TcpHeader) -> bool {
    let others = TcpFlags::SYN.with(TcpFlags::RST);
    header.flags.contains(TcpFlags::ACK) && header.flags.0 & others.0 == 0
}

#[cfg(test)]
mod tests {
    use portolan_types::Protocol;

    use super::*;

    const NOW: Instant = Instant::from_millis(60_000);
    const SECRETS: [Secret; 2] = [Secret([1; 16]), Secret([2; 16])];

    fn flow() -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 2], 1234).into(),
        }
    }

    fn segment(flags: TcpFlags) -> TcpHeader {
        TcpHeader {
            source_port: 1234,
            destination_port: 80,
            seq: SeqNum(1000),
            flags,
            ..TcpHeader::default()
        }
    }

    fn acknowledgement_of(secret: &Secret) -> TcpHeader {
        let syn = segment(TcpFlags::SYN);
        let answer = answer_by_cookie(secret, &flow(), &syn, &Config::default(), NOW);
        TcpHeader {
            seq: syn.seq + 1,
            ack: answer.seq + 1,
            ..segment(TcpFlags::ACK)
        }
    }

    fn running() -> CookieClock {
        let mut clock = CookieClock::default();
        clock.note(NOW);
        clock
    }

    #[test]
    fn a_cookie_of_any_of_the_ports_secrets_is_known() {
        for secret in &SECRETS {
            let ack = acknowledgement_of(secret);
            let segment = running().judge(NOW, &flow(), &ack, &SECRETS);
            assert!(matches!(segment, ListenerSegment::Cookie(_)), "{segment:?}");
        }
        let ack = acknowledgement_of(&Secret([3; 16]));
        let segment = running().judge(NOW, &flow(), &ack, &SECRETS);
        assert_eq!(segment, ListenerSegment::Stray { is_forgery: true });
    }

    #[test]
    fn without_cookies_about_an_acknowledgement_is_no_forgery() {
        let ack = acknowledgement_of(&SECRETS[0]);
        let stray = ListenerSegment::Stray { is_forgery: false };
        let never = CookieClock::default().judge(NOW, &flow(), &ack, &SECRETS);
        assert_eq!(never, stray);
        let later = NOW + COOKIE_LIFETIME;
        assert_eq!(running().judge(later, &flow(), &ack, &SECRETS), stray);
    }

    #[test]
    fn a_syn_opens_and_a_reset_is_noise() {
        let judge = |flags| running().judge(NOW, &flow(), &segment(flags), &SECRETS);
        assert_eq!(judge(TcpFlags::SYN), ListenerSegment::Syn);
        assert_eq!(judge(TcpFlags::RST), ListenerSegment::Noise);
    }

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
