//! Extensions for sent packets: copies and other payloads leave in the owner's name only, to where
//! the owner could send itself, and everything else is refused and counted.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;

use portolan_netns::Bed;
use portolan_proto::extension::{
    Code, Direction, Event, Extension, ExtensionReply, ExtensionRequest, ExtensionState, Guard,
};
use portolan_types::{FlowKey, Protocol};

use crate::common::{Configuration, Library, await_some, control_path, start_server};
use crate::forgery::{macs, write};
use crate::frames::{Forgery, MARK};
use crate::handlers::{
    CONSUME, DELIVER, FORWARD, LENGTH, Owner, PASS, PAYLOAD, REPLY, VIEW, always, ask, code, exit,
    filter_counter, list, mov, op, peer, refusal, send_from_first_cpu, slow,
};
use crate::meter::Meter;
use crate::{NOBODY, Victim, assert_serves_others, counter, hostile_library};

pub(crate) const REPLACE: i32 = 5;
pub(crate) const COPY: i32 = 6;

/// Behind the view.
pub(crate) const COPIES: i16 = VIEW;
pub(crate) const DESTINATIONS: i16 = VIEW + 8;
pub(crate) const DESTINATION: i16 = 24;

/// The source fields of a view.
pub(crate) const LOCAL: i16 = 16;
pub(crate) const LOCAL_PORT: i16 = 48;
const FROM_PORT: i16 = 98;

pub(crate) fn sending(code: Code) -> Code {
    Code {
        direction: Direction::Send,
        ..code
    }
}

/// Sets destinations, and makes copies to the first `count` of them.
pub(crate) fn copies_to(destinations: &[SocketAddr], count: i32) -> Code {
    let mut instructions = vec![op(0x62, 1, 0, COPIES, count)];
    for (index, to) in (0..).zip(destinations) {
        let at = DESTINATIONS + index * DESTINATION;
        let bytes = match to.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        for (word, bytes) in (0..).zip(bytes.chunks_exact(4)) {
            let value = i32::from_le_bytes(bytes.try_into().unwrap());
            instructions.push(op(0x62, 1, 0, at + 4 * word, value));
        }
        instructions.push(op(0x6a, 1, 0, at + 16, to.port().into()));
    }
    instructions.extend([mov(0, COPY), exit()]);
    sending(code(instructions))
}

/// A hostile program that writes frames of its own to its tap.
pub(crate) struct Sender {
    pub owner: Owner,
    source: [u8; 6],
    next_hop: [u8; 6],
}

impl Sender {
    /// The victim has made the neighbour known.
    pub(crate) fn start(path: &Path, _victim: &Victim) -> Sender {
        let owner = Owner::start(path);
        let (source, next_hop) = macs(&owner.library);
        Sender {
            owner,
            source,
            next_hop,
        }
    }

    pub(crate) fn frame(&self, to: SocketAddr) -> Vec<u8> {
        let flow = FlowKey {
            protocol: Protocol::Udp,
            local: self.owner.port,
            remote: to,
        };
        Forgery::of(&flow, self.source, self.next_hop).frame()
    }

    fn send(&self, to: SocketAddr) {
        write(&self.owner.library, &self.frame(to));
    }

    fn remove(&mut self, number: u16) {
        self.owner.ask(ExtensionRequest::Remove { number });
    }
}

pub(crate) fn assert_hears(peer: &UdpSocket, expected: &[u8]) {
    let mut heard = [0; 2048];
    let length = peer.recv(&mut heard).expect("a datagram");
    assert_eq!(&heard[..length], expected);
}

/// Checks that nothing is queued that was not received: what is sent now is the next.
pub(crate) fn assert_nothing_waits(peer: &UdpSocket) {
    peer.set_nonblocking(true).unwrap();
    let heard = peer.recv(&mut [0; 64]);
    assert!(heard.is_err(), "{heard:?}");
    peer.set_nonblocking(false).unwrap();
}

#[test]
fn a_datagram_goes_to_all_that_the_handler_names_and_from_its_owner_alone() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    // Each is connected to the owner's endpoint: it would not receive from any other.
    let peers: Vec<UdpSocket> = (0..32).map(|_| peer(&bed, sender.owner.port)).collect();
    let ends: Vec<SocketAddr> = peers.iter().map(|p| p.local_addr().unwrap()).collect();
    for count in [1, 2, 32] {
        let number = sender
            .owner
            .install(copies_to(&ends[..count], count as i32));
        for _ in 0..3 {
            sender.send(ends[0]);
            for peer in &peers[..count] {
                assert_hears(peer, MARK);
            }
        }
        sender.remove(number);
    }
    peers.iter().for_each(assert_nothing_waits);
    assert_eq!(filter_counter(&path, "copied"), 3 * (1 + 2 + 32));
    assert_eq!(filter_counter(&path, "copy_refused"), 0);
    // The original receiver gets nothing, unless it is named.
    sender.owner.install(copies_to(&ends[1..2], 1));
    sender.send(ends[0]);
    assert_hears(&peers[1], MARK);
    assert_nothing_waits(&peers[0]);
    let statistics = list(&mut sender.owner.library.client)[0].statistics;
    assert_eq!((statistics.copied, statistics.runs), (1, 1));
    victim.assert_unharmed();
}

#[test]
fn copies_go_only_where_the_owner_could_send_himself() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let hearing = peer(&bed, sender.owner.port);
    let to = hearing.local_addr().unwrap();
    let refused = [
        SocketAddr::new(Bed::A4, 9),
        "224.0.0.1:9".parse().unwrap(),
        "255.255.255.255:9".parse().unwrap(),
        "127.0.0.1:9".parse().unwrap(),
        "0.0.0.0:9".parse().unwrap(),
        SocketAddr::new(Bed::B6, to.port()),
        SocketAddr::new(to.ip(), 0),
    ];
    for (count, bad) in (1..).zip(refused) {
        // The valid destination gets its copy, first or last.
        let number = sender.owner.install(copies_to(&[to, bad], 2));
        sender.send(to);
        assert_hears(&hearing, MARK);
        sender.remove(number);
        assert_eq!(filter_counter(&path, "copy_refused"), count, "{bad}");
    }
    assert_eq!(filter_counter(&path, "refused"), 0);
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

#[test]
fn verdicts_that_sending_does_not_have_are_refused_and_counted() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let hearing = peer(&bed, sender.owner.port);
    let to = hearing.local_addr().unwrap();
    let too_long = code([op(0x62, 1, 0, LENGTH, 513), mov(0, REPLACE), exit()]);
    let bad = [
        always(REPLY),
        always(FORWARD),
        always(77),
        always(-1),
        too_long,
        copies_to(&[to], 0),
        copies_to(&[to], 33),
        copies_to(&[to], -1),
    ];
    for (count, code) in (1..).zip(bad) {
        let number = sender.owner.install(sending(code));
        sender.send(to);
        await_some("a count", || {
            (filter_counter(&path, "refused") == count).then_some(())
        });
        sender.remove(number);
    }
    assert_nothing_waits(&hearing);
    // Received packets are answered, not copied or replaced.
    for (count, verdict) in (9..).zip([REPLACE, COPY]) {
        let number = sender.owner.install(always(verdict));
        hearing.send(b"?").unwrap();
        await_some("a count", || {
            (filter_counter(&path, "refused") == count).then_some(())
        });
        sender.remove(number);
    }
    victim.assert_unharmed();
}

#[test]
fn whatever_a_handler_writes_the_source_stays_its_owners() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let hearing = peer(&bed, sender.owner.port);
    let to = hearing.local_addr().unwrap();
    let spoofs = |then: Vec<u64>| {
        let mut instructions = vec![
            op(0x62, 1, 0, LOCAL + 12, i32::from_le_bytes([10, 77, 0, 99])),
            op(0x6a, 1, 0, LOCAL_PORT, 22),
            op(0x6a, 1, 0, FROM_PORT, 22),
        ];
        instructions.extend(then);
        sending(code(instructions))
    };
    let edit = [
        op(0x62, 1, 0, PAYLOAD, i32::from_le_bytes(*b"edit")),
        op(0x62, 1, 0, LENGTH, 4),
    ];
    let replaces = [&edit[..], &[mov(0, REPLACE), exit()]].concat();
    let copies = copies_to(&[to], 1).instructions;
    for (then, expected) in [
        (vec![mov(0, PASS), exit()], MARK),
        (vec![mov(0, DELIVER), exit()], MARK),
        (replaces, b"edit"),
        (copies, MARK),
        // The packet is unchanged, whatever happened to its copy.
        ([&edit[..], &[mov(0, PASS), exit()]].concat(), MARK),
    ] {
        let number = sender.owner.install(spoofs(then));
        sender.send(to);
        assert_hears(&hearing, expected);
        sender.remove(number);
    }
    sender.owner.install(sending(always(CONSUME)));
    sender.send(to);
    await_some("a count", || {
        (filter_counter(&path, "consumed") == 1).then_some(())
    });
    assert_nothing_waits(&hearing);
    victim.assert_unharmed();
}

#[test]
fn another_payload_is_sent_with_the_right_lengths_and_sums() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let hearing = peer(&bed, sender.owner.port);
    let to = hearing.local_addr().unwrap();
    for length in [0, 1, 15, 16, 17, 255, 512] {
        let number = sender.owner.install(sending(code([
            op(0x62, 1, 0, LENGTH, length),
            mov(0, REPLACE),
            exit(),
        ])));
        let mut expected = [0; 512];
        expected[..MARK.len()].copy_from_slice(MARK);
        sender.send(to);
        assert_hears(&hearing, &expected[..length as usize]);
        sender.remove(number);
    }
    assert_eq!(filter_counter(&path, "replaced"), 7);
}

#[test]
fn nobody_handles_what_others_send() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let other = Owner::of(Library::start(&path), SocketAddr::new(Bed::A4, 0));
    let mut hostile = Owner::start(&path);
    for (event, session) in [
        (Event::UdpSend, other.session),
        (Event::TcpSend, victim.id),
        (Event::UdpSend, portolan_types::SessionId(u64::MAX)),
    ] {
        let spec = Extension {
            event,
            guards: vec![Guard::Session(session)],
            ..hostile.spec(sending(always(CONSUME)))
        };
        let refusal = refusal(hostile.ask(ExtensionRequest::Install(spec)));
        assert_eq!(refusal.errno, libc::EPERM, "{}", refusal.reason);
    }
    // Nor is one installed that is written for the other direction, or for another protocol.
    for (event, code) in [
        (Event::UdpReceive, sending(always(PASS))),
        (Event::UdpSend, always(PASS)),
        (Event::TcpSend, sending(always(PASS))),
    ] {
        let spec = Extension {
            event,
            ..hostile.spec(code)
        };
        let refusal = refusal(hostile.ask(ExtensionRequest::Install(spec)));
        assert_eq!(refusal.errno, libc::EINVAL, "{}", refusal.reason);
    }
    hostile.install(sending(always(CONSUME)));
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    assert_eq!(filter_counter(&path, "consumed"), 0);
}

#[test]
fn a_handler_sees_nothing_of_whom_others_send_to() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let victim = Victim::start(&bed, &path);
    let mut secret = Sender::start(&path, &victim);
    let mut spy = Sender::start(&path, &victim);
    let (told, asked) = (peer(&bed, secret.owner.port), peer(&bed, spy.owner.port));
    let told_end = told.local_addr().unwrap();
    secret.owner.install(copies_to(&[told_end], 1));
    // Sends the first destination and the number of copies, as it finds them.
    let mut reads = vec![op(0x61, 2, 1, COPIES, 0), op(0x63, 1, 2, PAYLOAD, 0)];
    for word in 0..6 {
        reads.push(op(0x61, 2, 1, DESTINATIONS + 4 * word, 0));
        reads.push(op(0x63, 1, 2, PAYLOAD + 4 + 4 * word, 0));
    }
    reads.extend([op(0x62, 1, 0, LENGTH, 28), mov(0, REPLACE), exit()]);
    spy.owner.install(sending(code(reads)));
    for _ in 0..8 {
        secret.send(told_end);
        assert_hears(&told, MARK);
        spy.send(asked.local_addr().unwrap());
        assert_hears(&asked, &[0; 28]);
    }
    // Nothing lies behind the destinations, and handlers of received packets have none.
    let end = DESTINATIONS + 32 * DESTINATION;
    let past = |at| code([op(0x61, 0, 1, at, 0), exit()]);
    let denied = spy.owner.refused(sending(past(end)));
    assert!(denied.reason.contains("verifier"), "{}", denied.reason);
    let denied = spy.owner.refused(past(COPIES));
    assert!(denied.reason.contains("verifier"), "{}", denied.reason);
    spy.owner.install(sending(past(end - 4)));
}

#[test]
fn one_that_takes_too_long_with_what_is_sent_is_stopped_and_removed() {
    let bed = Bed::veth();
    let configuration = Configuration::new(&bed.a, "[extension]\ntime_limit_ns = 500");
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let hearing = peer(&bed, sender.owner.port);
    let to = hearing.local_addr().unwrap();
    let mut slow = sending(slow());
    // It consumes what it is shown.
    let verdict = slow.instructions.len() - 2;
    slow.instructions[verdict] = mov(0, CONSUME);
    sender.owner.install(slow);
    send_from_first_cpu();
    for _ in 0..9 {
        sender.send(to);
    }
    // From the ninth on they leave as if it did not exist.
    assert_hears(&hearing, MARK);
    assert_nothing_waits(&hearing);
    assert_eq!(filter_counter(&path, "stopped"), 1);
    await_some("removal", || {
        (counter(&path, "server", "extensions_over_budget") == 1).then_some(())
    });
    let reports = list(&mut sender.owner.library.client);
    assert_eq!(reports[0].standing, ExtensionState::OverBudget);
    sender.send(to);
    assert_hears(&hearing, MARK);
    victim.assert_unharmed();
    meter.finish();
}

#[test]
fn what_is_sent_is_handled_no_more_when_its_extension_has_gone() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let victim = Victim::start(&bed, &path);
    let mut sender = Sender::start(&path, &victim);
    let hearing = peer(&bed, sender.owner.port);
    let to = hearing.local_addr().unwrap();
    let number = sender.owner.install(sending(always(CONSUME)));
    sender.send(to);
    sender.remove(number);
    sender.send(to);
    assert_hears(&hearing, MARK);
    assert_nothing_waits(&hearing);
    assert_eq!(filter_counter(&path, "consumed"), 1);
}

#[test]
fn the_configuration_says_who_may_install_what_where() {
    let bed = Bed::veth();
    let rule = format!(
        "[[extension.allow]]\nuser = \"{NOBODY}\"\nevents = [\"UDP.PacketSend\"]\nports = [7000, 7009]"
    );
    let configuration = Configuration::new(&bed.a, &rule);
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let at = |port| SocketAddr::new(Bed::A4, port);
    let mut owner = Owner::of(hostile_library(&path), at(7009));
    owner.install(sending(always(PASS)));
    let refusal = owner.refused(always(PASS));
    assert_eq!(refusal.errno, libc::EPERM);
    assert!(
        refusal.reason.contains("UDP.PacketRecv on port 7009"),
        "{}",
        refusal.reason
    );
    let mut elsewhere = Owner::of(hostile_library(&path), at(7010));
    let refusal = elsewhere.refused(sending(always(PASS)));
    assert!(refusal.reason.contains("port 7010"), "{}", refusal.reason);
    // Root may.
    let mut root = Owner::of(Library::start(&path), at(7011));
    let spec = root.spec(always(PASS));
    let reply = root.ask(ExtensionRequest::Install(spec));
    assert!(
        matches!(reply, ExtensionReply::Installed { .. }),
        "{reply:?}"
    );
    meter.finish_but_for_starts();
}

/// Installs a handler for what a connection of this process sends.
fn install_on_connection(victim: &mut Victim, code: Code) -> u16 {
    let spec = Extension {
        name: "segments".to_owned(),
        event: Event::TcpSend,
        guards: vec![Guard::Session(victim.id)],
        priority: 0,
        code: sending(code),
    };
    match ask(&mut victim.library.client, ExtensionRequest::Install(spec)) {
        ExtensionReply::Installed { number, .. } => number,
        other => panic!("{other:?}"),
    }
}

/// Writes bytes that a handler drops, removes the handler, and checks that they arrive after all.
fn lose_and_recover(victim: &mut Victim, path: &Path, code: Code, counted: &str) {
    use std::io::{Read, Write};
    const WORDS: &[u8] = b"late";
    let before = filter_counter(path, counted);
    let number = install_on_connection(victim, code);
    victim.library.write(victim.slot, WORDS);
    await_some("a segment at the handler", || {
        victim.library.turn();
        (filter_counter(path, counted) > before).then_some(())
    });
    victim.peer.set_nonblocking(true).unwrap();
    assert!(victim.peer.read(&mut [0; 8]).is_err(), "{counted}");
    let remove = ExtensionRequest::Remove { number };
    ask(&mut victim.library.client, remove);
    // The connection retransmits what was lost.
    let mut heard = Vec::new();
    await_some("what was lost", || {
        victim.library.turn();
        let mut some = [0; 8];
        let count = victim.peer.read(&mut some).unwrap_or(0);
        heard.extend_from_slice(&some[..count]);
        (heard.len() >= WORDS.len()).then_some(())
    });
    assert_eq!(heard, WORDS);
    victim.peer.set_nonblocking(false).unwrap();
    victim.peer.write_all(WORDS).unwrap();
    assert_eq!(victim.library.read(victim.slot, WORDS.len()), WORDS);
}

#[test]
fn the_segments_of_a_live_connection_are_its_owners_to_handle() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Victim::unmetered(&bed, &path);
    let mut bystander = Victim::unmetered(&bed, &path);
    // What passes is counted and arrives.
    let number = install_on_connection(&mut owner, always(PASS));
    for _ in 0..20 {
        owner.assert_unharmed();
    }
    let listed = list(&mut owner.library.client);
    let [report] = &listed[..] else {
        panic!("{listed:?}");
    };
    let counts = &report.statistics;
    assert!(
        counts.runs >= 20 && counts.passed == counts.runs,
        "{report:?}"
    );
    assert!(filter_counter(&path, "sent") >= 20);
    ask(
        &mut owner.library.client,
        ExtensionRequest::Remove { number },
    );
    // Consumed segments are lost, and so are those with a verdict that the event does not have: other
    // payload is for UDP only.
    lose_and_recover(&mut owner, &path, always(CONSUME), "consumed");
    lose_and_recover(&mut owner, &path, always(REPLACE), "refused");
    assert_eq!(filter_counter(&path, "replaced"), 0);
    let consumed = filter_counter(&path, "consumed");
    let _number = install_on_connection(&mut owner, always(CONSUME));
    bystander.assert_unharmed();
    assert_eq!(filter_counter(&path, "consumed"), consumed);
    meter.finish_but_for_starts();
}
