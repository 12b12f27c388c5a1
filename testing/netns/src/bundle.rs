//! One direction of a link: a single [`Link`], or one for each TCP flow, so that one bed carries
//! many independent measurements at a time.

use std::collections::BTreeMap;

use portolan_types::Instant;

use crate::link::{Counters, Impairment, Link};

const ETHERNET_HEADER: usize = 14;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;

/// The two ports, that of host `b` first; frames that are not TCP share (0, 0).
type Ports = (u16, u16);

#[derive(Debug)]
pub(crate) struct Bundle {
    impairment: Impairment,
    direction: u64,
    links: BTreeMap<Ports, Link>,
}

impl Bundle {
    /// `direction` of the links: 0 is from host `a`, 1 from host `b`.
    pub(crate) fn new(impairment: Impairment, direction: u64) -> Bundle {
        Bundle {
            impairment,
            direction,
            links: BTreeMap::new(),
        }
    }

    /// Puts a frame on the link.
    pub(crate) fn offer(&mut self, now: Instant, frame: Vec<u8>) {
        let ports = if self.impairment.per_flow {
            ports(&frame, self.direction).unwrap_or_default()
        } else {
            Ports::default()
        };
        let (impairment, direction) = (self.impairment, self.direction);
        let link = self.links.entry(ports).or_insert_with(|| {
            let seed = impairment.seed.wrapping_add(u64::from(ports.0) << 8);
            Link::new(Impairment { seed, ..impairment }, direction)
        });
        link.offer(now, frame);
    }

    /// Returns the next frame that leaves the link by `now`.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let first = self
            .links
            .values_mut()
            .min_by_key(|link| link.deadline().unwrap_or(Instant::FAR_FUTURE))?;
        first.due(now)
    }

    /// Returns the time at which the next frame leaves.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.links.values().filter_map(Link::deadline).min()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.links
            .values()
            .map(Link::counters)
            .fold(Counters::default(), Counters::plus)
    }
}

/// Returns the ports of a TCP frame that travels in `direction`.
fn ports(frame: &[u8], direction: u64) -> Option<Ports> {
    let (protocol, transport) = match frame.get(12..14)?.try_into().ok()? {
        ETHERTYPE_IPV4 => {
            let header = usize::from(frame.get(ETHERNET_HEADER)? & 0xf) * 4;
            (frame.get(ETHERNET_HEADER + 9)?, ETHERNET_HEADER + header)
        }
        ETHERTYPE_IPV6 => (frame.get(ETHERNET_HEADER + 6)?, ETHERNET_HEADER + 40),
        _ => return None,
    };
    if *protocol != TCP {
        return None;
    }
    let port = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
    let (source, destination) = (port(transport)?, port(transport + 2)?);
    Some(match direction {
        0 => (destination, source),
        _ => (source, destination),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn frame(source: u16, destination: u16) -> Vec<u8> {
        let mut frame = vec![0; 54];
        frame[12..14].copy_from_slice(&ETHERTYPE_IPV4);
        frame[14] = 0x45;
        frame[23] = TCP;
        frame[34..36].copy_from_slice(&source.to_be_bytes());
        frame[36..38].copy_from_slice(&destination.to_be_bytes());
        frame
    }

    fn impairment() -> Impairment {
        Impairment {
            per_flow: true,
            rate: Some(54 * 8 * 1000),
            delay: Duration::from_millis(5),
            ..Impairment::default()
        }
    }

    #[test]
    fn each_flow_has_the_whole_rate() {
        let mut bundle = Bundle::new(impairment(), 0);
        for source in 1..=3 {
            bundle.offer(Instant::from_millis(0), frame(source, 80));
        }
        assert_eq!(bundle.deadline(), Some(Instant::from_millis(6)));
        let arrived = || bundle.due(Instant::from_millis(6));
        assert_eq!(std::iter::from_fn(arrived).count(), 3);
    }

    #[test]
    fn flows_to_one_port_meet_the_same_accidents() {
        let impairment = Impairment {
            loss: 0.3,
            rate: None,
            ..impairment()
        };
        let mut bundle = Bundle::new(impairment, 0);
        let mut fates = |source, port| -> Vec<bool> {
            let one = |_| {
                bundle.offer(Instant::ZERO, frame(source, port));
                bundle.due(Instant::from_millis(5)).is_some()
            };
            (0..100).map(one).collect()
        };
        let first = fates(1, 80);
        assert_eq!(first, fates(2, 80));
        assert_ne!(first, fates(1, 81));
    }

    #[test]
    fn both_directions_of_a_flow_know_its_port() {
        assert_eq!(ports(&frame(1000, 80), 0), Some((80, 1000)));
        assert_eq!(ports(&frame(80, 1000), 1), Some((80, 1000)));
        assert_eq!(ports(&[0; 20], 0), None);
    }
}
