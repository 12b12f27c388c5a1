//! The header before a frame on a tap makes the kernel write a checksum after the filter: it must be only where the
//! packet's own transport has it. IPv4 is tested in `forgery`; here are IPv6, raw flows, copies by extensions, and
//! segments.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::raw;
use portolan_sys::tap::VNET_HEADER;
use portolan_types::{FlowKey, Protocol, Slot};
use portolan_wire::checksum::Sum;
use portolan_wire::vnet::{Gso, VnetHeader};

use crate::capture::Capture;
use crate::common::{Configuration, Library, await_some, control_path, start_server};
use crate::forgery::{drops_of, flow_of, macs, to_be_summed, write};
use crate::frames::{Forgery, MARK, is_marked};
use crate::handlers::peer;
use crate::sending::{Sender, assert_hears, assert_nothing_waits, copies_to};
use crate::{NOBODY, Victim, assert_serves_others, hostile_library};

const ETHERNET: u16 = 14;
const V4: u16 = ETHERNET + 20;
const V6: u16 = ETHERNET + 40;
const TCP_CHECKSUM: u16 = 16;
const UDP_CHECKSUM: u16 = 6;
const UDP_HEADER: u16 = 8;
const TCP_HEADER: u16 = 20;

/// The kernel refuses the frame at the tap, or the filter drops it.
fn assert_stopped(path: &Path, library: &Library, frame: &[u8], case: &str) {
    let mut taken = Ok(());
    let drops = drops_of(path, || {
        taken = library.tap.0.write(&[IoSlice::new(frame)]);
    });
    match taken {
        Ok(()) => assert_eq!(drops, ["drop_offload"], "{case}"),
        Err(refused) => assert_eq!(drops, [""; 0], "{case}: {refused}"),
    }
}

/// Returns a segment or datagram of an IPv6 flow, with the pseudo-header's sum in the checksum field.
fn v6_frame(flow: &FlowKey, (source, destination): ([u8; 6], [u8; 6])) -> Vec<u8> {
    let octets = |address: IpAddr| match address {
        IpAddr::V6(v6) => v6.octets(),
        IpAddr::V4(_) => panic!("an IPv6 flow"),
    };
    let mut transport = flow.local.port().to_be_bytes().to_vec();
    transport.extend(flow.remote.port().to_be_bytes());
    let checksum = match flow.protocol {
        Protocol::Udp => {
            transport.extend((UDP_HEADER + MARK.len() as u16).to_be_bytes());
            transport.extend([0, 0]);
            UDP_CHECKSUM
        }
        // An acknowledgement far outside any window.
        Protocol::Tcp => {
            transport.extend([0x55, 0, 0, 0, 0x66, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
            TCP_CHECKSUM
        }
    };
    transport.extend(MARK);
    let length = transport.len() as u16;
    let addresses = [octets(flow.local.ip()), octets(flow.remote.ip())].concat();
    let number = flow.protocol.number();
    let pseudo = [&addresses[..], &length.to_be_bytes(), &[0, number]].concat();
    // The sum itself, not its complement.
    let sum = !Sum::default().over(&pseudo).checksum();
    let at = usize::from(checksum);
    transport[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    let mut frame = vec![0; VNET_HEADER];
    frame.extend([destination, source].concat());
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
    frame.extend(length.to_be_bytes());
    frame.extend([number, 64]);
    frame.extend(addresses);
    frame.extend(transport);
    frame
}

/// Returns a flow and a port of IPv6 of user nobody.
fn v6_owner(bed: &Bed, library: &mut Library) -> [FlowKey; 2] {
    let listener = bed
        .b
        .enter(|| TcpListener::bind(SocketAddr::new(Bed::B6, 0)))
        .unwrap();
    let (_, near, slot) = library.open(listener.local_addr().unwrap());
    std::mem::forget((near, listener.accept().unwrap()));
    let any = SocketAddr::new("::".parse().unwrap(), 6000);
    let (reply, near) = library.bind(Protocol::Udp, any, Slot(9));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    std::mem::forget(near);
    let datagrams = FlowKey {
        protocol: Protocol::Udp,
        local: SocketAddr::new(Bed::A6, 6000),
        remote: SocketAddr::new(Bed::B6, 7000),
    };
    [flow_of(library, slot), datagrams]
}

#[test]
fn a_checksum_of_ipv6_is_completed_where_it_belongs_and_nowhere_else() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let flows = v6_owner(&bed, &mut hostile);
    let stations = macs(&hostile);
    let peer = bed.b.enter(|| UdpSocket::bind(flows[1].remote)).unwrap();
    peer.set_read_timeout(crate::TIMEOUT).unwrap();
    let capture = Capture::start(&bed.b);
    let places = [
        ("the source's port", V6, 0),
        ("the destination's port", V6, 2),
        ("the source's address", ETHERNET + 8, 0),
        ("its last bytes", ETHERNET + 8, 14),
        ("the destination's address", ETHERNET + 24, 0),
        ("the next header and the hop limit", ETHERNET, 6),
        ("where IPv4 would have it", V4, TCP_CHECKSUM),
        (
            "the TCP checksum, from elsewhere",
            V6 - 10,
            10 + TCP_CHECKSUM,
        ),
        (
            "the UDP checksum, from elsewhere",
            V6 - 10,
            10 + UDP_CHECKSUM,
        ),
        ("the payload", V6 + 20, 4),
    ];
    for (flow, own, other) in [
        (&flows[0], TCP_CHECKSUM, UDP_CHECKSUM),
        (&flows[1], UDP_CHECKSUM, TCP_CHECKSUM),
    ] {
        let frame = v6_frame(flow, stations);
        let of_the_other = ("the other protocol's checksum", V6, other);
        for (case, start, offset) in places.into_iter().chain([of_the_other]) {
            let forged = to_be_summed(frame.clone(), start, offset);
            let case = format!("{case} of {flow:?}");
            assert_stopped(&path, &hostile, &forged, &case);
        }
        let escaped = capture.frames().into_iter().find(|frame| is_marked(frame));
        assert_eq!(escaped, None);
        let genuine = to_be_summed(frame, V6, own);
        assert!(drops_of(&path, || write(&hostile, &genuine)).is_empty());
        let passed = || capture.frames().iter().any(|frame| is_marked(frame));
        await_some("the genuine frame", || passed().then_some(()));
    }
    // The kernel there has verified its checksum.
    assert_hears(&peer, MARK);
    victim.assert_unharmed();
}

#[test]
fn nothing_is_completed_in_protocols_of_ones_own() {
    const PROTOCOL: u8 = 253;
    let bed = Bed::veth();
    let rule =
        format!("[[raw]]\nuser = \"{NOBODY}\"\nethertypes = [0x88b5]\nprotocols = [{PROTOCOL}]\n");
    let configuration = Configuration::new(&bed.a, &rule);
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    for guard in [
        raw::Guard::EtherType(0x88b5),
        raw::Guard::IpProtocol(PROTOCOL),
    ] {
        let slot = Slot(3);
        let reply = hostile
            .client
            .ask(RequestBody::ClaimProtocol { guard, slot });
        assert!(matches!(reply, ReplyBody::Claimed { .. }), "{reply:?}");
    }
    let (source, destination) = macs(&hostile);
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: SocketAddr::new(Bed::A4, 1),
        remote: SocketAddr::new(Bed::B4, 1),
    };
    let packet = Forgery {
        protocol: PROTOCOL,
        ..Forgery::of(&flow, source, destination)
    };
    let mut frame = vec![0; VNET_HEADER];
    frame.extend([destination, source].concat());
    frame.extend([0x88, 0xb5]);
    frame.extend([0; 40]);
    frame.extend(MARK);
    let capture = Capture::start(&bed.b);
    for bytes in [packet.frame(), frame] {
        for (start, offset) in [
            (ETHERNET, 12),
            (ETHERNET, 10),
            (V4, 0),
            (V4, TCP_CHECKSUM),
            (V4, UDP_CHECKSUM),
        ] {
            let forged = to_be_summed(bytes.clone(), start, offset);
            assert_stopped(&path, &hostile, &forged, &format!("{start} {offset}"));
        }
        let escaped = capture.frames().into_iter().find(|frame| is_marked(frame));
        assert_eq!(escaped, None);
        assert!(drops_of(&path, || write(&hostile, &bytes)).is_empty());
        let passed = || capture.frames().iter().any(|frame| is_marked(frame));
        await_some("the genuine frame", || passed().then_some(()));
    }
    victim.assert_unharmed();
}

#[test]
fn copies_that_extensions_make_are_completed_in_their_own_place() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let peers: Vec<UdpSocket> = (0..3).map(|_| peer(&bed, sender.owner.port)).collect();
    let ends: Vec<SocketAddr> = peers.iter().map(|p| p.local_addr().unwrap()).collect();
    sender.owner.install(copies_to(&ends, ends.len() as i32));
    for (start, offset) in [
        (V4, 0),
        (V4, 2),
        (ETHERNET + 6, 6),
        (V4, TCP_CHECKSUM),
        (V4 + 8, 0),
    ] {
        let forged = to_be_summed(sender.frame(ends[0]), start, offset);
        let library = &sender.owner.library;
        assert_stopped(&path, library, &forged, &format!("{start} {offset}"));
    }
    peers.iter().for_each(assert_nothing_waits);
    let genuine = to_be_summed(sender.frame(ends[0]), V4, UDP_CHECKSUM);
    write(&sender.owner.library, &genuine);
    for peer in &peers {
        assert_hears(peer, MARK);
    }
    victim.assert_unharmed();
}

/// The kernel refuses some of these at the tap, the filter the others: none is sent.
#[test]
fn segments_of_another_kind_than_their_packet_do_not_leave() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let flows = v6_owner(&bed, &mut hostile);
    let (_, _near, slot, _peer) = crate::open_to_b(&bed, &mut hostile);
    let stations = macs(&hostile);
    let segment = Forgery::of(&flow_of(&hostile, slot), stations.0, stations.1).frame();
    let frames = [
        (segment, V4, TCP_HEADER, Gso::TcpV4),
        (v6_frame(&flows[0], stations), V6, TCP_HEADER, Gso::TcpV6),
        (v6_frame(&flows[1], stations), V6, UDP_HEADER, Gso::UdpL4),
    ];
    let kinds = [Gso::TcpV4, Gso::TcpV6, Gso::UdpL4, Gso::UdpFragments];
    let capture = Capture::start(&bed.b);
    for (frame, transport, header, own) in &frames {
        for kind in kinds {
            for (start, length) in [
                (*transport, transport + header),
                (*transport, 4),
                (transport + 8, transport + header),
                (ETHERNET, ETHERNET + 20),
                (0, 14),
            ] {
                // It may have the kernel fragment its own datagrams.
                let is_own = kind == *own || kind == Gso::UdpFragments && *own == Gso::UdpL4;
                if is_own && start == *transport {
                    continue;
                }
                let mut forged = frame.clone();
                VnetHeader::segments(kind, length, start, 8).emit(&mut forged);
                let case = format!("{kind:?} of {own:?} at {start}, {length}");
                assert_stopped(&path, &hostile, &forged, &case);
            }
        }
    }
    let escaped = capture.frames().into_iter().find(|frame| is_marked(frame));
    assert_eq!(escaped, None);
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}
