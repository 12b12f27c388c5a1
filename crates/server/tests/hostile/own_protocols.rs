//! Extensions on protocols that a program runs itself: for what it sends, and for what its own transport receives.
//! Whatever a handler writes, the frame leaves in its owner's name.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use portolan_netns::{Bed, Daemon};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{
    Code, Event, Extension, ExtensionReply, ExtensionRequest, ExtensionState, Guard,
};
use portolan_proto::filter::RecordHeader;
use portolan_proto::raw;
use portolan_sys::tap::VNET_HEADER;
use portolan_types::{FlowKey, Protocol, Slot};
use portolan_wire::checksum::Sum;

use crate::capture::Capture;
use crate::common::{Configuration, await_some, control_path};
use crate::forgery::{macs, write};
use crate::frames::{Forgery, MARK};
use crate::handlers::{
    CONSUME, DELIVER, FORWARD, LENGTH, Owner, PASS, PAYLOAD, REPLY, always, ask, code, exit,
    filter_counter, list, mov, op, peer, send_from_first_cpu, slow,
};
use crate::sending::{
    COPIES, COPY, DESTINATION, DESTINATIONS, LOCAL, LOCAL_PORT, REPLACE, sending,
};
use crate::{NOBODY, Victim, assert_serves_others, counter};

const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
const IPV4: [u8; 2] = [0x08, 0x00];
const PROTOCOL: u8 = 253;
const SLOT: Slot = Slot(9);
const UDP_PORT: u16 = 7777;
const TCP_PORT: u16 = 7778;
const STATION: [u8; 6] = [2, 0, 0, 0, 0x99, 0x99];

fn at(protocol: Protocol, port: u16) -> raw::Guard {
    raw::Guard::Port {
        protocol,
        local: SocketAddr::new("0.0.0.0".parse().unwrap(), port),
    }
}

/// User nobody with protocols of its own, and an unrelated victim.
struct Stage {
    path: PathBuf,
    owner: Owner,
    victim: Victim,
    source: [u8; 6],
    next_hop: [u8; 6],
    capture: Capture,
    bed: Bed,
    _server: Daemon,
    _configuration: Configuration,
}

impl Stage {
    fn set(more: &str) -> Stage {
        let bed = Bed::veth();
        let rule = format!(
            "[[raw]]\nuser = \"{NOBODY}\"\nethertypes = [0x88b5]\nprotocols = [{PROTOCOL}]\n\
             udp_ports = [{UDP_PORT}]\ntcp_ports = [{TCP_PORT}]\n{more}"
        );
        let configuration = Configuration::new(&bed.a, &rule);
        let server = configuration.start(&bed.a);
        let path = control_path(&bed.a);
        // The victim has made the neighbour known.
        let victim = Victim::start(&bed, &path);
        let owner = Owner::start(&path);
        let (source, next_hop) = macs(&owner.library);
        Stage {
            capture: Capture::start(&bed.b),
            path,
            owner,
            victim,
            source,
            next_hop,
            bed,
            _server: server,
            _configuration: configuration,
        }
    }

    fn claim(&mut self, guard: raw::Guard) {
        let request = RequestBody::ClaimProtocol { guard, slot: SLOT };
        let reply = self.owner.library.client.ask(request);
        assert!(matches!(reply, ReplyBody::Claimed { .. }), "{reply:?}");
    }

    fn install(&mut self, guard: raw::Guard, code: Code) -> u16 {
        let spec = Extension {
            event: Event::of_raw(guard, code.direction),
            guards: vec![Guard::Raw(guard)],
            ..self.owner.spec(code)
        };
        match self.owner.ask(ExtensionRequest::Install(spec)) {
            ExtensionReply::Installed { number, .. } => number,
            other => panic!("{other:?}"),
        }
    }

    fn remove(&mut self, number: u16) {
        self.owner.ask(ExtensionRequest::Remove { number });
    }

    /// Sends a frame of the EtherType.
    fn send_frame(&self) {
        let mut frame = vec![0; VNET_HEADER];
        frame.extend([self.next_hop, self.source].concat());
        frame.extend(ETHERTYPE);
        frame.extend(MARK);
        write(&self.owner.library, &frame);
    }

    fn forgery(&self, protocol: Protocol, port: u16, to: SocketAddr) -> Forgery {
        let flow = FlowKey {
            protocol,
            local: SocketAddr::new(Bed::A4, port),
            remote: to,
        };
        Forgery::of(&flow, self.source, self.next_hop)
    }

    /// Sends a packet of the IP protocol to an absent host.
    fn send_packet(&self) {
        let nobody = "10.77.0.99:1".parse().unwrap();
        let mut packet = self.forgery(Protocol::Tcp, 1, nobody);
        packet.protocol = PROTOCOL;
        write(&self.owner.library, &packet.frame());
    }

    /// Waits for `count` frames of that type with the mark, or its edit; no more may follow.
    fn hears(&self, ethertype: [u8; 2], count: usize) -> Vec<Vec<u8>> {
        let mut heard = Vec::new();
        let is_ours = |frame: &Vec<u8>| {
            frame[12..14] == ethertype
                && (ethertype == ETHERTYPE || frame.get(23) == Some(&PROTOCOL))
        };
        await_some("frame", || {
            heard.extend(self.capture.frames().into_iter().filter(is_ours));
            (heard.len() >= count).then_some(())
        });
        assert_eq!(heard.len(), count, "{heard:?}");
        heard
    }

    fn await_count(&self, name: &str, count: u64) {
        await_some(name, || {
            (filter_counter(&self.path, name) == count).then_some(())
        });
    }

    /// Returns how many frames came to the owner's ring, as they were on the wire.
    fn raw_frames(&mut self) -> usize {
        let mut count = 0;
        while let Some(record) = self.owner.library.ring.next() {
            assert_eq!(record.header.flags, RecordHeader::RAW);
            assert_eq!(record.header.slot, SLOT.0);
            count += 1;
        }
        count
    }
}

/// Overwrites all source fields of a frame with the owner's choice, and then runs `then`.
fn spoofing(then: impl IntoIterator<Item = u64>) -> Code {
    let mut instructions = vec![
        op(0x62, 1, 0, LOCAL, 0x0102_0304),
        op(0x62, 1, 0, LOCAL + 12, i32::from_le_bytes([10, 77, 0, 99])),
        op(0x6a, 1, 0, LOCAL_PORT, 0x0800),
    ];
    instructions.extend(then);
    sending(code(instructions))
}

fn edit(verdict: i32) -> [u64; 4] {
    [
        op(0x62, 1, 0, PAYLOAD, i32::from_le_bytes(*b"edit")),
        op(0x62, 1, 0, LENGTH, 4),
        mov(0, verdict),
        exit(),
    ]
}

/// Copies to addresses in the view's format.
fn copies_to(addresses: &[[u8; 16]]) -> Code {
    let mut instructions = vec![op(0x62, 1, 0, COPIES, addresses.len() as i32)];
    for (index, address) in (0..).zip(addresses) {
        for (word, bytes) in (0..).zip(address.chunks_exact(4)) {
            let value = i32::from_le_bytes(bytes.try_into().unwrap());
            let place = DESTINATIONS + index * DESTINATION + 4 * word;
            instructions.push(op(0x62, 1, 0, place, value));
        }
    }
    instructions.extend([mov(0, COPY), exit()]);
    sending(code(instructions))
}

fn station(mac: [u8; 6]) -> [u8; 16] {
    let mut address = [0; 16];
    address[..6].copy_from_slice(&mac);
    address
}

fn host(address: &str) -> [u8; 16] {
    match address.parse().unwrap() {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    }
}

/// Verdicts that sending does not have, or cannot apply.
fn refused_verdicts() -> [Code; 6] {
    let too_long = code([op(0x62, 1, 0, LENGTH, 513), mov(0, REPLACE), exit()]);
    let too_many = code([op(0x62, 1, 0, COPIES, 33), mov(0, COPY), exit()]);
    [
        always(REPLY),
        always(FORWARD),
        always(77),
        always(COPY),
        too_long,
        too_many,
    ]
    .map(sending)
}

#[test]
fn frames_of_ones_own_leave_from_their_owners_station_whatever_a_handler_writes() {
    let mut stage = Stage::set("");
    let guard = raw::Guard::EtherType(u16::from_be_bytes(ETHERTYPE));
    stage.claim(guard);
    let header = [&stage.next_hop[..], &stage.source, &ETHERTYPE].concat();
    for (then, expected) in [
        (vec![mov(0, PASS), exit()], MARK),
        (vec![mov(0, DELIVER), exit()], MARK),
        (edit(PASS).to_vec(), MARK),
        (edit(REPLACE).to_vec(), b"edit"),
    ] {
        let number = stage.install(guard, spoofing(then));
        stage.send_frame();
        let heard = stage.hears(ETHERTYPE, 1);
        assert_eq!(heard[0], [&header, expected].concat());
        stage.remove(number);
    }
    let number = stage.install(guard, sending(always(CONSUME)));
    stage.send_frame();
    stage.await_count("consumed", 1);
    stage.remove(number);
    for (count, code) in (1..).zip(refused_verdicts()) {
        let number = stage.install(guard, code);
        stage.send_frame();
        stage.await_count("refused", count);
        stage.remove(number);
    }
    // Copies go to stations and groups of the link, and leave from the owner's address.
    let to = [STATION, [0xff; 6], stage.next_hop];
    let number = stage.install(guard, copies_to(&to.map(station)));
    stage.send_frame();
    let heard = stage.hears(ETHERTYPE, 3);
    for (frame, to) in heard.iter().zip(to) {
        assert_eq!(frame, &[&to[..], &stage.source, &ETHERTYPE, MARK].concat());
    }
    let statistics = list(&mut stage.owner.library.client)[0].statistics;
    assert_eq!((statistics.runs, statistics.copied), (1, 3));
    stage.remove(number);
    stage.send_frame();
    assert_eq!(stage.hears(ETHERTYPE, 1)[0], [&header, MARK].concat());
    stage.victim.assert_unharmed();
    assert_serves_others(&stage.bed, &stage.path);
}

/// Checks the header; behind it is what the owner, or its handler, wrote.
fn assert_packet(frame: &[u8], to: [u8; 4], payload: usize) {
    let header = &frame[14..34];
    assert_eq!(header[12..16], [10, 77, 0, 1]);
    assert_eq!(header[16..20], to);
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    assert_eq!((total, frame.len()), (20 + payload, 34 + payload));
    assert_eq!(Sum::default().over(header).checksum(), 0, "{header:?}");
}

#[test]
fn packets_of_ones_own_protocol_leave_from_their_owners_address() {
    let mut stage = Stage::set("");
    let guard = raw::Guard::IpProtocol(PROTOCOL);
    stage.claim(guard);
    let whole = 20 + MARK.len();
    for (then, length) in [
        (vec![mov(0, PASS), exit()], whole),
        (edit(PASS).to_vec(), whole),
        (edit(REPLACE).to_vec(), 4),
    ] {
        let number = stage.install(guard, spoofing(then));
        stage.send_packet();
        let heard = stage.hears(IPV4, 1);
        assert_packet(&heard[0], [10, 77, 0, 99], length);
        assert_eq!(heard[0].ends_with(b"edit"), length == 4);
        stage.remove(number);
    }
    for (count, code) in (1..).zip(refused_verdicts()) {
        let number = stage.install(guard, code);
        stage.send_packet();
        stage.await_count("refused", count);
        stage.remove(number);
    }
    // Copies go where the owner could send itself, according to the kernel's neighbours.
    let bad = [
        "10.77.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "127.0.0.1",
        "fd77::2",
    ];
    for (count, bad) in (1..).zip(bad) {
        let number = stage.install(guard, copies_to(&[host("10.77.0.2"), host(bad)]));
        stage.send_packet();
        stage.await_count("copy_refused", count);
        assert_packet(&stage.hears(IPV4, 1)[0], [10, 77, 0, 2], whole);
        stage.remove(number);
    }
    stage.victim.assert_unharmed();
    assert_serves_others(&stage.bed, &stage.path);
}

#[test]
fn one_that_takes_too_long_with_frames_of_ones_own_is_stopped() {
    let mut stage = Stage::set("[extension]\ntime_limit_ns = 500\n");
    let guard = raw::Guard::EtherType(u16::from_be_bytes(ETHERTYPE));
    stage.claim(guard);
    let mut slow = sending(slow());
    let verdict = slow.instructions.len() - 2;
    slow.instructions[verdict] = mov(0, CONSUME);
    stage.install(guard, slow);
    send_from_first_cpu();
    for _ in 0..9 {
        stage.send_frame();
    }
    stage.hears(ETHERTYPE, 1);
    assert_eq!(filter_counter(&stage.path, "stopped"), 1);
    await_some("removal", || {
        (counter(&stage.path, "server", "extensions_over_budget") == 1).then_some(())
    });
    let reports = list(&mut stage.owner.library.client);
    assert_eq!(reports[0].standing, ExtensionState::OverBudget);
    assert_eq!(reports[0].event, Event::EthernetSend);
    stage.victim.assert_unharmed();
}

fn asks(socket: &UdpSocket, question: &[u8]) -> Vec<u8> {
    let mut heard = [0; 2048];
    socket.send(question).unwrap();
    let length = socket.recv(&mut heard).expect("an answer");
    heard[..length].to_vec()
}

/// Handlers come first; the owner's transport gets the rest, as it was on the wire.
#[test]
fn what_comes_to_a_transport_of_ones_own_its_handlers_see_before_it() {
    let mut stage = Stage::set("");
    let guard = at(Protocol::Udp, UDP_PORT);
    stage.claim(guard);
    let near = SocketAddr::new(Bed::A4, UDP_PORT);
    let peer = peer(&stage.bed, near);
    let number = stage.install(guard, always(REPLY));
    assert_eq!(asks(&peer, b"in the filter"), b"in the filter");
    assert_eq!(stage.raw_frames(), 0);
    stage.remove(number);
    let number = stage.install(guard, always(CONSUME));
    peer.send(b"nobody's").unwrap();
    stage.await_count("consumed", 1);
    assert_eq!(stage.raw_frames(), 0);
    stage.remove(number);
    for verdict in [PASS, DELIVER] {
        let number = stage.install(guard, always(verdict));
        peer.send(b"the owner's").unwrap();
        await_some("the frame", || (stage.raw_frames() == 1).then_some(()));
        stage.remove(number);
    }
    // Sent packets are handled, too, and still leave from that port.
    let number = stage.install(guard, spoofing(edit(REPLACE)));
    let to = peer.local_addr().unwrap();
    let datagram = stage.forgery(Protocol::Udp, UDP_PORT, to).frame();
    write(&stage.owner.library, &datagram);
    let mut heard = [0; 64];
    let length = peer.recv(&mut heard).expect("from that port");
    assert_eq!(&heard[..length], b"edit");
    stage.remove(number);
    peer.send(b"as ever").unwrap();
    await_some("the frame", || (stage.raw_frames() == 1).then_some(()));
    stage.victim.assert_unharmed();
}

#[test]
fn segments_to_a_transport_of_ones_own_may_end_in_its_handler() {
    let mut stage = Stage::set("");
    let guard = at(Protocol::Tcp, TCP_PORT);
    stage.claim(guard);
    let near = SocketAddr::new(Bed::A4, TCP_PORT);
    let send_frames = |stage: &Stage| {
        let limit = Duration::from_millis(100);
        let connect = || TcpStream::connect_timeout(&near, limit);
        assert!(stage.bed.b.enter(connect).is_err());
    };
    let number = stage.install(guard, always(CONSUME));
    send_frames(&stage);
    assert!(filter_counter(&stage.path, "consumed") > 0);
    assert_eq!(stage.raw_frames(), 0);
    stage.remove(number);
    let number = stage.install(guard, always(PASS));
    send_frames(&stage);
    assert!(stage.raw_frames() > 0);
    assert!(filter_counter(&stage.path, "passed") > 0);
    // Closing a flow removes its handlers.
    let slot = SLOT;
    let request = RequestBody::UnclaimProtocol { guard, slot };
    stage.owner.library.client.send(request, &[]);
    let reports = list(&mut stage.owner.library.client);
    assert!(reports.iter().all(|one| one.number != number));
    stage.victim.assert_unharmed();
}

/// The event, the direction and the flow must agree, and the flow must be the requester's.
#[test]
fn nobody_handles_what_others_send_of_theirs() {
    let mut stage = Stage::set("");
    for guard in [
        raw::Guard::EtherType(0x88b5),
        raw::Guard::IpProtocol(PROTOCOL),
        at(Protocol::Udp, UDP_PORT),
    ] {
        stage.claim(guard);
    }
    let session = Guard::Session(stage.owner.session);
    let own = |guard| Guard::Raw(guard);
    for (guard, event, errno) in [
        (
            own(raw::Guard::EtherType(0x88b6)),
            Event::EthernetSend,
            libc::EPERM,
        ),
        (
            own(raw::Guard::EtherType(0x0806)),
            Event::EthernetSend,
            libc::EPERM,
        ),
        (own(raw::Guard::IpProtocol(6)), Event::IpSend, libc::EPERM),
        (own(at(Protocol::Udp, 53)), Event::UdpSend, libc::EPERM),
        (
            own(at(Protocol::Udp, UDP_PORT)),
            Event::TcpSend,
            libc::EINVAL,
        ),
        (
            own(at(Protocol::Udp, UDP_PORT)),
            Event::EthernetReceive,
            libc::EINVAL,
        ),
        (
            own(raw::Guard::EtherType(0x88b5)),
            Event::IpSend,
            libc::EINVAL,
        ),
        (
            own(raw::Guard::IpProtocol(PROTOCOL)),
            Event::EthernetSend,
            libc::EINVAL,
        ),
        (session, Event::EthernetSend, libc::EINVAL),
        (session, Event::IpSend, libc::EINVAL),
    ] {
        let direction = event.direction();
        let spec = Extension {
            event,
            guards: vec![guard],
            ..stage.owner.spec(Code {
                direction,
                ..always(CONSUME)
            })
        };
        let request = ExtensionRequest::Install(spec);
        let refusal = crate::handlers::refusal(ask(&mut stage.owner.library.client, request));
        assert_eq!(
            refusal.errno, errno,
            "{guard:?} {event:?}: {}",
            refusal.reason
        );
    }
    // A handler for received packets cannot be used for sent ones.
    let spec = Extension {
        event: Event::EthernetSend,
        guards: vec![Guard::Raw(raw::Guard::EtherType(0x88b5))],
        ..stage.owner.spec(always(CONSUME))
    };
    let reply = stage.owner.ask(ExtensionRequest::Install(spec));
    assert_eq!(crate::handlers::refusal(reply).errno, libc::EINVAL);
    stage.victim.assert_unharmed();
}
