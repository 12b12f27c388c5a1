//! SYN cookies (RFC 4987 §3.6): under a flood of SYNs the state of a half-open connection travels
//! in the initial sequence number and in the timestamp, and costs no memory.
//!
//! Sequence number: keyed hash of flow and peer's number, plus the peer's number, plus a minute
//! counter in the top byte, plus the index of the MSS. Timestamp: its low bits are the peer's window
//! scale and whether it permits SACK and requests ECN.

use portolan_types::{FlowKey, Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader, TcpOptions, Timestamps as Field};

use crate::config::{Config, EcnMode};
use crate::ecn::Ecn;
use crate::handshake::{Agreement, Offer};
use crate::isn::Secret;
use crate::receive::{MAX_SCALE, Receiver};
use crate::timestamps::Timestamps;

/// The sizes a cookie can carry; the largest that does not exceed the peer's is chosen.
const SIZES: [u16; 8] = [536, 1220, 1300, 1360, 1400, 1440, 1460, 8960];
/// A cookie is valid in its own and the following minute.
const MAX_AGE: u32 = 2;
const COUNTER_SHIFT: u32 = 24;
const DATA_MASK: u32 = (1 << COUNTER_SHIFT) - 1;
/// Low bits of the timestamp, as Linux's: scale (15 for none), SACK and ECN.
const STAMP_BITS: u32 = 6;
const NO_SCALE: u32 = 15;
const SACK: u32 = 1 << 4;
const ECN: u32 = 1 << 5;
/// Domain separators of the keyed hash.
const OUTER: u8 = 3;
const INNER: u8 = 4;

/// What the answers to all SYNs of a listener have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CookieOptions {
    pub window: u16,
    /// None if windows are not scaled.
    pub scale: Option<u8>,
    pub timestamps: bool,
    pub sack: bool,
    pub ecn: bool,
}

impl CookieOptions {
    pub fn of(config: &Config) -> CookieOptions {
        let offer = CookieOptions::offer(config);
        let clamp = config
            .window_clamp
            .map_or(u16::MAX, |clamp| clamp.min(0xffff) as u16);
        CookieOptions {
            window: (config.receive_buffer.min(0xffff) as u16).min(clamp),
            scale: offer.scale,
            timestamps: offer.timestamps,
            sack: offer.sack,
            ecn: config.ecn != EcnMode::Off,
        }
    }

    fn offer(config: &Config) -> Offer {
        let scale = Receiver::new(config).wanted_scale(config.window_clamp);
        Offer::new(config, scale)
    }
}

/// The properties of the peer's SYN encoded in a cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decoded {
    mss: u16,
    scale: Option<u8>,
    sack: bool,
    ecn: bool,
    timestamps: bool,
}

impl Decoded {
    pub(crate) fn agrees_on_ecn(&self, config: &Config) -> bool {
        self.ecn && config.ecn != EcnMode::Off
    }

    pub(crate) fn agreement(&self, config: &Config, scale: u8) -> Agreement {
        let peer = TcpOptions {
            mss: Some(self.mss),
            window_scale: self.scale,
            sack_permitted: self.sack,
            timestamps: self.timestamps.then_some(Field { value: 0, echo: 0 }),
            ..TcpOptions::default()
        };
        Offer::new(config, scale).agree(&peer)
    }
}

/// Returns the SYN+ACK that answers `syn`, without keeping any state. `flow` is as seen from this host. During a
/// flood the packet filter gives the same answer (`bpf/syn_answer.bpf.c`).
pub fn syn_ack(
    secret: &Secret,
    flow: &FlowKey,
    syn: &TcpHeader,
    config: &Config,
    now: Instant,
) -> TcpHeader {
    let mut offer = CookieOptions::offer(config).answering(&syn.options);
    offer.ecn = Ecn::accepts(config.ecn, syn);
    if !offer.timestamps {
        // Without timestamps there is nothing to encode these options in.
        offer.scale = None;
        offer.sack = false;
        offer.ecn = false;
    }
    let timestamps = syn
        .options
        .timestamps
        .filter(|_| offer.timestamps)
        .map(|peer| Field {
            value: stamp(
                bits(&syn.options, offer),
                Timestamps::clock(config.timestamp_offset, now),
            ),
            echo: peer.value,
        });
    let flags = TcpFlags::SYN.with(TcpFlags::ACK);
    TcpHeader {
        source_port: syn.destination_port,
        destination_port: syn.source_port,
        seq: sequence(secret, flow, syn, config, now),
        ack: syn.seq + 1,
        flags: if offer.ecn {
            flags.with(Ecn::syn_flags(true))
        } else {
            flags
        },
        window: CookieOptions::of(config).window,
        urgent: 0,
        options: TcpOptions {
            mss: Some(offer.mss),
            window_scale: offer.scale,
            sack_permitted: offer.sack,
            timestamps,
            ..TcpOptions::default()
        },
    }
}

/// Decodes the cookie that `ack` returns, if it is valid and fresh.
pub fn decode(secret: &Secret, flow: &FlowKey, ack: &TcpHeader, now: Instant) -> Option<Decoded> {
    let irs = ack.seq - 1;
    let cookie = (ack.ack - 1).0;
    let rest = cookie
        .wrapping_sub(secret.hash(OUTER, flow, 0) as u32)
        .wrapping_sub(irs.0);
    let now = minute(now);
    let age = now.wrapping_sub(rest >> COUNTER_SHIFT) & 0xff;
    if age >= MAX_AGE {
        return None;
    }
    let inner = secret.hash(INNER, flow, now.wrapping_sub(age)) as u32;
    let index = rest.wrapping_sub(inner) & DATA_MASK;
    let mss = *SIZES.get(index as usize)?;
    let timestamps = ack.options.timestamps;
    let bits = timestamps.map_or(NO_SCALE, |t| t.echo);
    let scale = bits & 0xf;
    Some(Decoded {
        mss,
        scale: (scale != NO_SCALE).then_some((scale as u8).min(MAX_SCALE)),
        sack: timestamps.is_some() && bits & SACK != 0,
        ecn: timestamps.is_some() && bits & ECN != 0,
        timestamps: timestamps.is_some(),
    })
}

fn minute(now: Instant) -> u32 {
    (now.as_millis() / 60_000) as u32
}

fn sequence(
    secret: &Secret,
    flow: &FlowKey,
    syn: &TcpHeader,
    config: &Config,
    now: Instant,
) -> SeqNum {
    let minute = minute(now);
    let peer = syn.options.mss.unwrap_or(config.assumed_mss);
    let index = SIZES.iter().rposition(|&size| size <= peer).unwrap_or(0) as u32;
    let inner = (secret.hash(INNER, flow, minute) as u32).wrapping_add(index) & DATA_MASK;
    let outer = secret.hash(OUTER, flow, 0) as u32;
    let counter = minute << COUNTER_SHIFT;
    SeqNum(
        outer
            .wrapping_add(syn.seq.0)
            .wrapping_add(counter)
            .wrapping_add(inner),
    )
}

/// The stamp's bits: the peer's options and those of the answer.
fn bits(peer: &TcpOptions, offer: Offer) -> u32 {
    let scale = peer
        .window_scale
        .map_or(NO_SCALE, |s| u32::from(s.min(MAX_SCALE)));
    let sack = if peer.sack_permitted { SACK } else { 0 };
    let ecn = if offer.ecn { ECN } else { 0 };
    scale | sack | ecn
}

/// The clock with its low bits replaced, never later than the clock.
fn stamp(bits: u32, clock: u32) -> u32 {
    let mask = (1 << STAMP_BITS) - 1;
    let value = clock & !mask | bits;
    if SeqNum(value).after(SeqNum(clock)) {
        value.wrapping_sub(mask + 1)
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Connection, StateName};
    use portolan_types::Protocol;

    const SECRET: Secret = Secret([9; 16]);
    const NOW: Instant = Instant::from_millis(123_456_789);

    fn flow() -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 2], 1234).into(),
        }
    }

    fn syn(options: TcpOptions) -> TcpHeader {
        TcpHeader {
            source_port: 1234,
            destination_port: 80,
            seq: SeqNum(77),
            flags: TcpFlags::SYN,
            options,
            ..TcpHeader::default()
        }
    }

    fn full() -> TcpOptions {
        TcpOptions {
            mss: Some(1452),
            window_scale: Some(9),
            sack_permitted: true,
            timestamps: Some(Field { value: 5, echo: 0 }),
            ..TcpOptions::default()
        }
    }

    /// The ACK with which an honest peer answers.
    fn answer(syn_ack: &TcpHeader) -> TcpHeader {
        TcpHeader {
            source_port: 1234,
            destination_port: 80,
            seq: syn_ack.ack,
            ack: syn_ack.seq + 1,
            flags: TcpFlags::ACK,
            window: 500,
            options: TcpOptions {
                timestamps: syn_ack.options.timestamps.map(|t| Field {
                    value: 6,
                    echo: t.value,
                }),
                ..TcpOptions::default()
            },
            ..TcpHeader::default()
        }
    }

    #[test]
    fn an_honest_peer_gets_the_options_it_asked_for() {
        let config = Config::default();
        let reply = syn_ack(&SECRET, &flow(), &syn(full()), &config, NOW);
        let ack = answer(&reply);
        let cookie = decode(&SECRET, &flow(), &ack, NOW).expect("our own cookie");
        let wanted = Decoded {
            mss: 1440,
            scale: Some(9),
            sack: true,
            ecn: false,
            timestamps: true,
        };
        assert_eq!(cookie, wanted);
        let connection = Connection::accept_cookie(&config, &ack, &cookie, NOW);
        assert_eq!(connection.state(), StateName::Established);
        let figures = connection.tcp_info();
        assert_eq!((figures.mss, figures.send_window), (1428, 500 << 9));
        assert_eq!(connection.validate(), Ok(()));
    }

    #[test]
    fn without_timestamps_only_the_segment_size_is_kept() {
        let options = TcpOptions {
            timestamps: None,
            ..full()
        };
        let reply = syn_ack(&SECRET, &flow(), &syn(options), &Config::default(), NOW);
        assert_eq!(
            (reply.options.window_scale, reply.options.sack_permitted),
            (None, false)
        );
        let cookie = decode(&SECRET, &flow(), &answer(&reply), NOW).expect("our own cookie");
        let wanted = Decoded {
            mss: 1440,
            scale: None,
            sack: false,
            ecn: false,
            timestamps: false,
        };
        assert_eq!(cookie, wanted);
    }

    #[test]
    fn old_foreign_and_invented_cookies_are_refused() {
        let reply = syn_ack(&SECRET, &flow(), &syn(full()), &Config::default(), NOW);
        let ack = answer(&reply);
        let later = Instant::from_millis(NOW.as_millis() + 130_000);
        assert_eq!(decode(&SECRET, &flow(), &ack, later), None);
        assert_eq!(decode(&Secret([8; 16]), &flow(), &ack, NOW), None);
        let other = FlowKey {
            remote: ([10, 0, 0, 3], 1234).into(),
            ..flow()
        };
        assert_eq!(decode(&SECRET, &other, &ack, NOW), None);
        let luck = (0..100_000u32)
            .filter(|i| {
                let ack = TcpHeader {
                    ack: SeqNum(i.wrapping_mul(2_654_435_761)),
                    ..ack.clone()
                };
                decode(&SECRET, &flow(), &ack, NOW).is_some()
            })
            .count();
        assert_eq!(luck, 0);
    }

    #[test]
    fn explicit_congestion_notification_travels_in_the_timestamp() {
        let asking = TcpHeader {
            flags: TcpFlags::SYN.with(TcpFlags::ECE).with(TcpFlags::CWR),
            ..syn(full())
        };
        let config = Config::default();
        let accepted = |syn: &TcpHeader, config: &Config| {
            let reply = syn_ack(&SECRET, &flow(), syn, config, NOW);
            let ack = answer(&reply);
            let cookie = decode(&SECRET, &flow(), &ack, NOW).expect("our own cookie");
            let connection = Connection::accept_cookie(config, &ack, &cookie, NOW);
            (
                reply.flags.contains(TcpFlags::ECE),
                connection.tcp_info().ecn,
            )
        };
        assert_eq!(accepted(&asking, &config), (true, true));
        assert_eq!(accepted(&syn(full()), &config), (false, false));
        let off = Config {
            ecn: EcnMode::Off,
            ..Config::default()
        };
        assert_eq!(accepted(&asking, &off), (false, false));
        let unstamped = TcpHeader {
            options: TcpOptions {
                timestamps: None,
                ..full()
            },
            ..asking
        };
        assert_eq!(accepted(&unstamped, &config), (false, false));
    }

    #[test]
    fn without_a_size_a_cookie_assumes_what_the_ip_version_has() {
        let config = Config {
            assumed_mss: crate::config::ASSUMED_MSS_V6,
            ..Config::default()
        };
        let reply = syn_ack(&SECRET, &flow(), &syn(TcpOptions::default()), &config, NOW);
        let cookie = decode(&SECRET, &flow(), &answer(&reply), NOW).expect("our own cookie");
        assert_eq!(cookie.mss, 1220);
    }

    #[test]
    fn a_clamped_window_is_clamped_in_the_answer() {
        let config = Config {
            window_clamp: Some(2000),
            ..Config::default()
        };
        let reply = syn_ack(&SECRET, &flow(), &syn(full()), &config, NOW);
        assert_eq!((reply.window, reply.options.window_scale), (2000, Some(0)));
    }

    #[test]
    fn the_stamp_carries_six_bits_and_is_never_later_than_the_clock() {
        for clock in [0, 1, 63, 64, 1000, u32::MAX] {
            let value = stamp(9 | SACK | ECN, clock);
            assert_eq!(value & 63, 9 | 16 | 32);
            assert!(SeqNum(value).at_or_before(SeqNum(clock)));
        }
    }
}
