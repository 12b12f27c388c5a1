//! SYN cookies (RFC 4987 §3.6): under a flood of SYNs the state of a half-open connection travels
//! in the initial sequence number and in the timestamp, and costs no memory.
//!
//! Sequence number: keyed hash over flow and peer's number, plus the peer's number, plus a minute
//! counter in the top octet, plus index of the MSS. Timestamp: its low bits are the peer's window
//! scale and whether it permits SACK.

use portolan_types::{FlowKey, Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader, TcpOptions, Timestamps as Field};

use crate::config::Config;
use crate::handshake::{Agreement, Offer};
use crate::isn::Secret;
use crate::receive::{MAX_SCALE, Receiver};
use crate::timestamps::Timestamps;

/// The sizes a cookie can carry; the largest that is not above the peer's is taken.
const SIZES: [u16; 8] = [536, 1220, 1300, 1360, 1400, 1440, 1460, 8960];
/// A cookie is good for this and the previous minute.
const MAX_AGE: u32 = 2;
const COUNTER_SHIFT: u32 = 24;
const DATA_MASK: u32 = (1 << COUNTER_SHIFT) - 1;
/// Low bits of the timestamp: scale (15 for none) and SACK.
const STAMP_BITS: u32 = 5;
const NO_SCALE: u32 = 15;
/// Domains of the key.
const OUTER: u8 = 3;
const INNER: u8 = 4;

/// What a cookie said of the peer's SYN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decoded {
    mss: u16,
    scale: Option<u8>,
    sack: bool,
    timestamps: bool,
}

impl Decoded {
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

/// The SYN+ACK that answers `syn` without keeping anything. `flow` is seen from this host.
pub fn syn_ack(
    secret: &Secret,
    flow: &FlowKey,
    syn: &TcpHeader,
    config: &Config,
    now: Instant,
) -> TcpHeader {
    let scale = Receiver::new(config).wanted_scale();
    let mut offer = Offer::new(config, scale).answering(&syn.options);
    if !offer.timestamps {
        // Nothing to carry them in.
        offer.scale = None;
        offer.sack = false;
    }
    let timestamps = syn
        .options
        .timestamps
        .filter(|_| offer.timestamps)
        .map(|peer| Field {
            value: stamp(
                &syn.options,
                Timestamps::clock(config.timestamp_offset, now),
            ),
            echo: peer.value,
        });
    TcpHeader {
        source_port: syn.destination_port,
        destination_port: syn.source_port,
        seq: sequence(secret, flow, syn, minute(now)),
        ack: syn.seq + 1,
        flags: TcpFlags::SYN.with(TcpFlags::ACK),
        window: config.receive_buffer.min(0xffff) as u16,
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

/// Reads the cookie that `ack` returns, if it is one of ours and fresh.
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
        sack: timestamps.is_some() && bits & 0x10 != 0,
        timestamps: timestamps.is_some(),
    })
}

fn minute(now: Instant) -> u32 {
    (now.as_millis() / 60_000) as u32
}

fn sequence(secret: &Secret, flow: &FlowKey, syn: &TcpHeader, minute: u32) -> SeqNum {
    let peer = syn.options.mss.unwrap_or(SIZES[0]);
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

/// The clock with its low bits replaced, never later than the clock.
fn stamp(peer: &TcpOptions, clock: u32) -> u32 {
    let scale = peer
        .window_scale
        .map_or(NO_SCALE, |s| u32::from(s.min(MAX_SCALE)));
    let bits = scale | u32::from(peer.sack_permitted) << 4;
    let mask = (1 << STAMP_BITS) - 1;
    let value = clock & !mask | bits;
    if SeqNum(value).after(SeqNum(clock)) {
        value.wrapping_sub(mask + 1)
    } else {
        value
    }
}
