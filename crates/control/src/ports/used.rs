//! Which ports have claims, as bits: the search for one without takes the same time however many there are.

use std::iter::successors;
use std::ops::RangeInclusive;

use portolan_types::Protocol;

const WORD: usize = u64::BITS as usize;
const WORDS: usize = (1 << 16) / WORD;

#[derive(Debug)]
pub(super) struct UsedPorts {
    tcp: Box<[u64; WORDS]>,
    udp: Box<[u64; WORDS]>,
}

impl Default for UsedPorts {
    fn default() -> UsedPorts {
        UsedPorts {
            tcp: Box::new([0; WORDS]),
            udp: Box::new([0; WORDS]),
        }
    }
}

impl UsedPorts {
    pub(super) fn insert(&mut self, (protocol, port): (Protocol, u16)) {
        let (word, bit) = place(port);
        self.of_mut(protocol)[word] |= 1 << bit;
    }

    pub(super) fn remove(&mut self, (protocol, port): (Protocol, u16)) {
        let (word, bit) = place(port);
        self.of_mut(protocol)[word] &= !(1 << bit);
    }

    /// Returns the ports of the range that have no claim.
    pub(super) fn unused(
        &self,
        protocol: Protocol,
        range: RangeInclusive<u16>,
    ) -> impl Iterator<Item = u16> {
        let last = *range.end();
        let first = self.first_unused(protocol, range);
        successors(first, move |port| {
            self.first_unused(protocol, port.checked_add(1)?..=last)
        })
    }

    fn first_unused(&self, protocol: Protocol, range: RangeInclusive<u16>) -> Option<u16> {
        let words = match protocol {
            Protocol::Tcp => &self.tcp,
            Protocol::Udp => &self.udp,
        };
        let (first, bit) = place(*range.start());
        let (last, _) = place(*range.end());
        // Ports below the range count as used.
        let below = (1 << bit) - 1;
        let used = |word: usize| words[word] | if word == first { below } else { 0 };
        let word = (first..=last).find(|&word| used(word) != u64::MAX)?;
        let port = word * WORD + used(word).trailing_ones() as usize;
        u16::try_from(port).ok().filter(|port| range.contains(port))
    }

    fn of_mut(&mut self, protocol: Protocol) -> &mut [u64; WORDS] {
        match protocol {
            Protocol::Tcp => &mut self.tcp,
            Protocol::Udp => &mut self.udp,
        }
    }
}

fn place(port: u16) -> (usize, usize) {
    (usize::from(port) / WORD, usize::from(port) % WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_unused_port_of_a_range_is_found() {
        let mut used = UsedPorts::default();
        assert_eq!(used.first_unused(Protocol::Tcp, 70..=65535), Some(70));
        for port in 70..200 {
            used.insert((Protocol::Tcp, port));
        }
        assert_eq!(used.first_unused(Protocol::Tcp, 70..=65535), Some(200));
        assert_eq!(used.first_unused(Protocol::Tcp, 69..=65535), Some(69));
        assert_eq!(used.first_unused(Protocol::Tcp, 100..=199), None);
        assert_eq!(used.first_unused(Protocol::Udp, 100..=199), Some(100));
        used.remove((Protocol::Tcp, 150));
        assert_eq!(used.first_unused(Protocol::Tcp, 100..=199), Some(150));
        used.insert((Protocol::Tcp, u16::MAX));
        assert_eq!(used.first_unused(Protocol::Tcp, u16::MAX..=u16::MAX), None);
        let unused: Vec<u16> = used.unused(Protocol::Tcp, 68..=202).collect();
        assert_eq!(unused, [68, 69, 150, 200, 201, 202]);
    }
}
