//! Frames that a process says have reached it after their session had left. The server puts them through the packet filter
//! once more: what it takes them for and what the filter takes them for must be the same, or whoever says so has datagrams of his
//! own making delivered to others.

use std::net::{IpAddr, SocketAddr};

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_types::{Protocol, SessionId, Slot};
use portolan_wire::checksum::Sum;

use crate::common::{Library, Near, await_some, control_path, start_server};
use crate::frames::{MARK, UDP, v4};
use crate::{Victim, counter, hostile_library};

const VICTIM: u16 = 5353;
const PEER: u16 = 7000;

const V4: [u8; 2] = [0x08, 0x00];
const V6: [u8; 2] = [0x86, 0xdd];

/// A connected UDP session, whose row names its flow.
fn connected(library: &mut Library, remote: SocketAddr) -> (SessionId, u16, Near) {
    let (reply, near, _) = library.connect(Protocol::Udp, remote);
    match reply {
        ReplyBody::Connected { session, local, .. } => (session, local.port(), near),
        other => panic!("{other:?}"),
    }
}

fn datagram(port: u16) -> Vec<u8> {
    let mut bytes = PEER.to_be_bytes().to_vec();
    bytes.extend(port.to_be_bytes());
    bytes.extend(((8 + MARK.len()) as u16).to_be_bytes());
    // No checksum.
    bytes.extend([0, 0]);
    bytes.extend(MARK);
    bytes
}

fn ethernet(kind: [u8; 2]) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend(kind);
    frame
}

/// From host `b`, with so many words of what is options for whoever heeds the header's length.
fn ipv4(words: u8, (flags, length): (u16, u16), between: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut header = vec![0x40 | words, 0];
    let total = 20 + between.len() + rest.len();
    let total = if length == 0 { total as u16 } else { length };
    header.extend(total.to_be_bytes());
    header.extend([0x12, 0x34]);
    header.extend(flags.to_be_bytes());
    header.extend([64, UDP, 0, 0]);
    header.extend(v4(Bed::B4).octets());
    header.extend(v4(Bed::A4).octets());
    header.extend(between);
    let sum = Sum::default().over(&header).checksum();
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut frame = ethernet(V4);
    frame.extend(header);
    frame.extend(rest);
    frame
}

fn ipv6(next: u8, rest: &[u8]) -> Vec<u8> {
    let octets = |address: IpAddr| match address {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(_) => panic!("IPv6"),
    };
    let mut frame = ethernet(V6);
    frame.extend([0x60, 0, 0, 0]);
    frame.extend((rest.len() as u16).to_be_bytes());
    frame.extend([next, 64]);
    frame.extend(octets(Bed::B6));
    frame.extend(octets(Bed::A6));
    frame.extend(rest);
    frame
}

/// Each shows one port to whoever reads it one way, and the other to whoever reads it another way.
fn ambiguous(one: u16, other: u16) -> Vec<Vec<u8>> {
    let (one, other) = (datagram(one), datagram(other));
    let both = [&one[..], &other[..]].concat();
    let ports = &one[..8];
    // Destination options, a routing header, a fragment header, and authentication: whose first bytes are ports.
    let extensions = [60, 43, 44, 51].map(|kind| {
        let mut extension = vec![UDP, 0, one[2], one[3], 0, 0, 0, 0];
        extension.extend(&other);
        ipv6(kind, &extension)
    });
    let mut frames = vec![
        ipv4(7, (0, 0), ports, &other),
        ipv4(5, (0, 0), &[], &both),
        ipv4(4, (0, 0), &[], &both),
        ipv4(15, (0, 0), &both[..40], &other),
        // Fragments: the first, and later ones, whose payload looks like a header.
        ipv4(5, (0x2000, 0), &[], &both),
        ipv4(5, (0x0001, 0), &[], &both),
        ipv4(7, (0x2001, 0), ports, &other),
        // Shorter and longer than they are.
        ipv4(5, (0, 24), &[], &both),
        ipv4(7, (0, 28), ports, &other),
        ipv4(5, (0, 1400), &[], &both),
        ipv6(UDP, &both),
        ipv6(0, &both),
    ];
    frames.extend(extensions);
    frames
}

#[test]
fn no_frame_that_is_said_to_have_come_here_reaches_another() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut other = Library::start(&path);
    let any = SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), VICTIM);
    let (reply, _port) = other.bind(Protocol::Udp, any, Slot(0));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let mut hostile = hostile_library(&path);
    let sessions = [Bed::B4, Bed::B6].map(|to| connected(&mut hostile, SocketAddr::new(to, PEER)));
    let tell = |hostile: &mut Library, frame: Vec<u8>| {
        hostile
            .client
            .send(RequestBody::MisdeliveredFrame { frame }, &[]);
    };
    for (_, own, _) in &sessions {
        for (one, other) in [(*own, VICTIM), (VICTIM, *own)] {
            for frame in ambiguous(one, other) {
                for cut in [frame.len(), frame.len() / 2, 14, 3] {
                    tell(&mut hostile, frame[..cut].to_vec());
                }
            }
        }
        tell(&mut hostile, ipv4(5, (0, 0), &[], &datagram(VICTIM)));
        tell(&mut hostile, ipv6(UDP, &datagram(VICTIM)));
    }
    // An honest one reaches its session, after all that was said before.
    let honest = ipv4(5, (0, 0), &[], &datagram(sessions[0].1));
    tell(&mut hostile, honest.clone());
    await_some("the honest frame", || {
        let frames = hostile.take_frames();
        // The addresses of the link are the server's to write.
        frames
            .iter()
            .any(|frame| frame[12..] == honest[12..])
            .then_some(())
    });
    assert!(counter(&path, "server", "reinjected_frames") > 0);
    let reached = other.take_frames();
    assert!(reached.is_empty(), "{reached:?}");
    victim.assert_unharmed();
}
