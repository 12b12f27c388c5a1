//! Segments that a host on the wire forges into a connection (RFC 5961): with sequence numbers in the window, but not
//! the exact ones. They end nothing, put nothing into the stream, and cause a limited number of challenge ACKs.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use portolan_netns::{Bed, Namespace};
use portolan_wire::checksum::Sum;
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketFlags, SocketType, send, socket_with};

use crate::capture::Capture;
use crate::common::{control_path, start_server};
use crate::meter::Meter;
use crate::{Victim, assert_serves_others, echo};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

const ETHERNET: usize = 14;
const IPV4: usize = ETHERNET + 20;
const TCP: usize = IPV4 + 20;

/// Sends frames of any kind by a host's device.
pub(crate) struct Injector(OwnedFd);

impl Injector {
    pub(crate) fn of(host: &Namespace) -> Injector {
        host.enter(Injector::here)
    }

    /// Opens one in the caller's namespace.
    pub(crate) fn here() -> Injector {
        let everything = 0x0003_u16.to_be();
        let protocol = std::num::NonZero::new(u32::from(everything)).map(Protocol::from_raw);
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, protocol);
        let socket = socket.expect("root may send anything");
        let name = std::ffi::CString::new(Bed::DEVICE).unwrap();
        // SAFETY: the name is a string that lives until the call returns.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        assert_ne!(index, 0);
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: everything,
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = size_of_val(&address) as u32;
        // SAFETY: the kernel reads as much of the address as its length says.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
        assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
        Injector(socket)
    }

    /// Sends a frame; it is lost if the device cannot take it.
    pub(crate) fn send(&self, frame: &[u8]) {
        let _ = send(&self.0, frame, SendFlags::DONTWAIT);
    }
}

/// A possible segment of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub flags: u8,
    pub timestamps: Option<[u8; 8]>,
    pub payload: &'a [u8],
}

impl Segment<'_> {
    pub(crate) fn frame(&self, source: [u8; 6], destination: [u8; 6]) -> Vec<u8> {
        let options = match self.timestamps {
            Some(values) => [&[1, 1, 8, 10][..], &values].concat(),
            None => Vec::new(),
        };
        let mut segment = Vec::new();
        segment.extend(self.from.port().to_be_bytes());
        segment.extend(self.to.port().to_be_bytes());
        segment.extend(self.sequence.to_be_bytes());
        segment.extend(self.acknowledgement.to_be_bytes());
        segment.extend([(((20 + options.len()) / 4) << 4) as u8, self.flags]);
        segment.extend([0xff, 0xff, 0, 0, 0, 0]);
        segment.extend(options);
        segment.extend(self.payload);
        let addresses = [octets(self.from.ip()), octets(self.to.ip())].concat();
        let length = segment.len() as u16;
        let pseudo = [&addresses[..], &[0, 6], &length.to_be_bytes()].concat();
        let sum = Sum::default().over(&pseudo).over(&segment).checksum();
        segment[16..18].copy_from_slice(&sum.to_be_bytes());
        let mut header = vec![0x45, 0];
        header.extend((20 + length).to_be_bytes());
        header.extend([0x12, 0x34, 0x40, 0, 64, 6, 0, 0]);
        header.extend(addresses);
        let sum = Sum::default().over(&header).checksum();
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        [&destination[..], &source, &[8, 0], &header, &segment].concat()
    }
}

fn octets(address: IpAddr) -> [u8; 4] {
    crate::frames::v4(address).octets()
}

fn word(frame: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(frame[at..at + 4].try_into().unwrap())
}

/// Returns whether the frame is a segment between these endpoints.
fn goes(frame: &[u8], from: SocketAddr, to: SocketAddr) -> bool {
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    frame.len() >= TCP
        && frame[12..14] == [8, 0]
        && frame[23] == 6
        && frame[26..30] == octets(from.ip())
        && frame[30..34] == octets(to.ip())
        && port(IPV4) == from.port()
        && port(IPV4 + 2) == to.port()
}

/// Returns the timestamps of a segment whose options begin with them, as all do after the handshake.
fn timestamps(frame: &[u8]) -> Option<[u8; 8]> {
    let options = frame.get(TCP..TCP + 12)?;
    options
        .starts_with(&[1, 1, 8, 10])
        .then(|| options[4..].try_into().unwrap())
}

/// What an eavesdropper on the wire knows of a connection.
struct Overheard {
    /// The victim's next sequence number, and the next that it expects.
    sent: u32,
    wanted: u32,
    timestamps: Option<[u8; 8]>,
    /// Of the victim, and of the peer.
    macs: [[u8; 6]; 2],
}

impl Overheard {
    fn of(frames: &[Vec<u8>], victim: SocketAddr, peer: SocketAddr) -> Overheard {
        let last = |from, to| frames.iter().rfind(|frame| goes(frame, from, to));
        let (ours, theirs) = (last(victim, peer).unwrap(), last(peer, victim).unwrap());
        Overheard {
            sent: word(theirs, IPV4 + 8).max(word(ours, IPV4 + 4)),
            wanted: word(ours, IPV4 + 8),
            timestamps: timestamps(theirs),
            macs: [
                ours[6..12].try_into().unwrap(),
                theirs[6..12].try_into().unwrap(),
            ],
        }
    }
}

/// Kinds of forgeries: name, offsets to the number that the victim expects and to the one that it has sent, flags.
const FORGERIES: [(&str, u32, u32, u8); 9] = [
    ("a reset in the window", 100, 0, RST),
    (
        "a reset in the window that acknowledges",
        1000,
        0,
        RST | ACK,
    ),
    ("a SYN in the window", 100, 0, SYN),
    ("a SYN of the next number", 0, 0, SYN),
    ("a SYN+ACK", 0, 0, SYN | ACK),
    (
        "bytes that acknowledge what was never sent",
        0,
        1 << 20,
        PSH | ACK,
    ),
    (
        "bytes that acknowledge what is long past",
        0,
        0x8000_0000,
        PSH | ACK,
    ),
    (
        "an end that acknowledges what was never sent",
        0,
        1 << 20,
        FIN | ACK,
    ),
    ("bytes far outside of the window", 1 << 29, 0, PSH | ACK),
];

#[test]
fn segments_with_numbers_of_the_window_change_nothing_and_are_seldom_answered() {
    const TIMES: usize = 500;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let (near, far) = (
        victim.peer.peer_addr().unwrap(),
        victim.peer.local_addr().unwrap(),
    );
    let injector = Injector::of(&bed.b);
    let meter = Meter::start(&bed);
    for (case, ahead, acknowledged, flags) in FORGERIES {
        let capture = Capture::start(&bed.b);
        echo(
            &mut victim.library,
            victim.slot,
            &mut victim.peer,
            b"overheard",
        );
        victim.library.turn();
        let overheard = Overheard::of(&capture.frames(), near, far);
        let [ours, theirs] = overheard.macs;
        for with_timestamps in [true, false] {
            let forged = Segment {
                from: far,
                to: near,
                sequence: overheard.wanted.wrapping_add(ahead),
                acknowledgement: overheard.sent.wrapping_add(acknowledged),
                flags,
                timestamps: overheard.timestamps.filter(|_| with_timestamps),
                payload: b"",
            };
            let payload: &[u8] = if flags & PSH != 0 { b"injected" } else { b"" };
            let frame = Segment { payload, ..forged }.frame(theirs, ours);
            capture.frames();
            let begun = Instant::now();
            for _ in 0..TIMES {
                injector.send(&frame);
                victim.library.turn();
            }
            let took = begun.elapsed();
            let answers = capture.frames();
            let answers = answers
                .iter()
                .filter(|frame| goes(frame, near, far))
                .count();
            // One per half second, and those in flight. Data and FINs are answered each time: an acknowledgement may
            // have been lost, and acknowledgements make no loop.
            let most = match flags & (PSH | FIN) {
                0 => 2 + took.as_millis() as usize / 500,
                _ => TIMES,
            };
            assert!(
                answers <= most,
                "{case}: {answers} answers to {TIMES} in {took:?}"
            );
            echo(
                &mut victim.library,
                victim.slot,
                &mut victim.peer,
                b"goes on",
            );
        }
        victim.assert_unharmed();
    }
    meter.finish();
    assert_serves_others(&bed, &path);
}
