//! Floods of SYNs answered in the filter: exactly as the engine would, and only those permitted.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::panic::AssertUnwindSafe;

use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::{BindingKey, Budget, Flood, FlowRow, PathKey, ReturnPath};
use portolan_stack::Path;
use portolan_stack::passive::{clamp_for_cookie, flood, path_config, tune_config};
use portolan_tcp::isn::Secret;
use portolan_tcp::{Config, EcnMode, cookie};
use portolan_types::{FlowKey, Instant, MacAddr, Protocol, SeqNum};
use portolan_wire::checksum::Sum;
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use portolan_wire::tcp::{CHECKSUM_AT, TcpFlags, TcpHeader, TcpOptions, Timestamps};
use portolan_wire::{ethernet, tcp};

use super::bed::{
    Bed, CHANNEL, Context, IFINDEX, Outcome, REDIRECT, SHOT, UNSPEC, any_address, flows, outcome,
    row,
};
use super::frames::Frame;

const MTU: u32 = 1500;
const SECRET: Secret = Secret([7; 16]);

/// The parameters of one listener's answers.
#[derive(Clone, Debug)]
struct FloodSetup {
    config: Config,
    options: HandshakeOptions,
    secret: Secret,
}

impl Default for FloodSetup {
    fn default() -> FloodSetup {
        FloodSetup {
            config: Config::default(),
            options: HandshakeOptions::default(),
            secret: SECRET,
        }
    }
}

impl FloodSetup {
    fn flood(&self) -> Flood {
        flood(&self.config, &self.options, &self.secret)
    }

    /// The engine's answer to a SYN.
    fn answer(&self, flow: &FlowKey, syn: &TcpHeader, now: Instant) -> TcpHeader {
        let path = Path {
            interface: IFINDEX,
            managed: true,
            kind: portolan_proto::metastate::RouteKind::Unicast,
            next_hop: flow.remote.ip(),
            source: None,
            mtu: MTU,
            mac: MacAddr::default(),
        };
        let mut config = path_config(&self.config, &path, flow, &self.secret);
        tune_config(&mut config, &self.options);
        let config = clamp_for_cookie(config, &self.options);
        cookie::syn_ack(&self.secret, flow, syn, &config, now)
    }
}

/// A listener on any address of both families, flooded, with return paths to everybody.
fn flooded(terms: &FloodSetup) -> Bed {
    let bed = flooded_with(terms.flood(), row(CHANNEL));
    bed.records();
    bed
}

fn flooded_with(flood: Flood, row: FlowRow) -> Bed {
    let mut bed = Bed::new();
    for flow in flows(Protocol::Tcp) {
        let binding = BindingKey::new(Protocol::Tcp, any_address(&flow));
        bed.filter.bind(&binding, row).unwrap();
        bed.filter.floods.set(&binding, &flood).unwrap();
    }
    set_paths(&mut bed, IFINDEX);
    bed
}

fn set_paths(bed: &mut Bed, interface: u32) {
    let everywhere = ["0.0.0.0", "::"].map(|address| PathKey::new(address.parse().unwrap(), 0));
    let path = ReturnPath {
        interface,
        mtu: MTU,
    };
    let paths = HashMap::from(everywhere.map(|key| (key, path)));
    bed.filter.floods.set_paths(paths).unwrap();
}

fn syn(flow: &FlowKey) -> TcpHeader {
    TcpHeader {
        source_port: flow.remote.port(),
        destination_port: flow.local.port(),
        seq: SeqNum(1000),
        flags: TcpFlags::SYN,
        window: 0xffff,
        options: TcpOptions {
            mss: Some(1460),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some(Timestamps { value: 9, echo: 0 }),
            ..TcpOptions::default()
        },
        ..TcpHeader::default()
    }
}

/// The segment of a header, followed by bytes that may be options.
fn segment(header: &TcpHeader, more: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; header.header_len()];
    header.emit(&mut bytes);
    bytes.extend(more);
    bytes
}

fn seal(flow: &FlowKey, segment: &mut [u8]) {
    let (source, destination) = (flow.remote.ip(), flow.local.ip());
    let pseudo = Sum::pseudo_header(source, destination, 6, segment.len());
    segment[CHECKSUM_AT..CHECKSUM_AT + 2].fill(0);
    let checksum = pseudo.over(segment).checksum();
    segment[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&checksum.to_be_bytes());
}

fn frame_of(flow: &FlowKey, mut segment: Vec<u8>) -> Vec<u8> {
    seal(flow, &mut segment);
    Frame::received(flow).around(6, &segment)
}

fn frame(flow: &FlowKey, header: &TcpHeader) -> Vec<u8> {
    frame_of(flow, segment(header, &[]))
}

fn run(bed: &Bed, frame: &[u8]) -> (Outcome, Vec<u8>) {
    bed.run_and_see("packet_filter", frame, &mut Context::default())
}

fn answered() -> Outcome {
    outcome(REDIRECT, &["answered_syn"])
}

fn left() -> Outcome {
    outcome(SHOT, &["delivered"])
}

fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Hop limit, traffic class and segment of an answer, whose addresses and checksums are verified.
fn open(flow: &FlowKey, answer: &[u8]) -> (u8, u8, Vec<u8>) {
    let packet = &answer[ethernet::HEADER_LEN..];
    let (local, remote) = (flow.local.ip(), flow.remote.ip());
    let (ends, hops, class, segment) = match flow.local {
        SocketAddr::V4(_) => {
            let header = Ipv4Header::parse(packet).unwrap().0;
            assert_eq!(
                Sum::default().over(&packet[..ipv4::HEADER_LEN]).checksum(),
                0
            );
            let ends: (IpAddr, IpAddr) = (header.source.into(), header.destination.into());
            let segment = &packet[ipv4::HEADER_LEN..];
            assert_eq!(usize::from(header.payload_len), segment.len());
            (ends, header.ttl, header.traffic_class, segment)
        }
        SocketAddr::V6(_) => {
            let header = Ipv6Header::parse(packet).unwrap().0;
            let ends: (IpAddr, IpAddr) = (header.source.into(), header.destination.into());
            let segment = &packet[ipv6::HEADER_LEN..];
            assert_eq!(usize::from(header.payload_len), segment.len());
            (ends, header.hop_limit, header.traffic_class, segment)
        }
    };
    assert_eq!(ends, (local, remote));
    let pseudo = Sum::pseudo_header(local, remote, 6, segment.len());
    assert_eq!(pseudo.over(segment).checksum(), 0, "of the segment");
    (hops, class, segment.to_vec())
}

/// Checks that the filter's answer, at some millisecond since `began`, is one that the engine gives.
fn assert_agrees(terms: &FloodSetup, flow: &FlowKey, syn: &TcpHeader, began: u64, answer: &[u8]) {
    let (hops, class, mut bytes) = open(flow, answer);
    let ip = terms.options.ip;
    assert_eq!((hops, class), (ip.ttl, ip.tos & !3));
    bytes[CHECKSUM_AT..CHECKSUM_AT + 2].fill(0);
    let engines: Vec<Vec<u8>> = (began..=now_ms())
        .map(|ms| segment(&terms.answer(flow, syn, Instant::from_millis(ms)), &[]))
        .collect();
    assert!(
        engines.contains(&bytes),
        "{syn:?}: {bytes:?} is none of {engines:?}"
    );
}

#[test]
fn a_syn_of_a_flood_is_answered_as_the_engine_would() {
    let terms = FloodSetup::default();
    let bed = flooded(&terms);
    for flow in flows(Protocol::Tcp) {
        let began = now_ms();
        let (outcome, answer) = run(&bed, &frame(&flow, &syn(&flow)));
        assert_eq!(outcome, answered());
        assert_agrees(&terms, &flow, &syn(&flow), began, &answer);
        let binding = BindingKey::new(Protocol::Tcp, any_address(&flow));
        let seen = bed.filter.floods.seen(&binding);
        assert_eq!((seen.answered, seen.dropped), (1, 0));
    }
    assert_eq!(bed.records().len(), 0, "its owner hears of none");
}

type SynOptions = (Option<u16>, Option<u8>, bool, Option<u32>, bool, bool);
type Peer = (bool, [u8; 14], u16, u32, SynOptions);
type Choice = ([u8; 16], [bool; 5], Option<u16>, Option<u32>, u8, u8);

fn flow_of(&(is_ipv6, bytes, port, ..): &Peer) -> FlowKey {
    let flow = flows(Protocol::Tcp)[usize::from(is_ipv6)];
    let address: IpAddr = if is_ipv6 {
        // Of somebody on the network, whatever the rest.
        let mut address = [0x20; 16];
        address[2..].copy_from_slice(&bytes);
        address.into()
    } else {
        [11, bytes[0], bytes[1], bytes[2]].into()
    };
    FlowKey {
        remote: SocketAddr::new(address, port.max(1)),
        ..flow
    }
}

fn syn_of(peer: &Peer) -> TcpHeader {
    let (.., seq, (mss, scale, sack, stamp, ece, cwr)) = *peer;
    let flag = |is_set, flag| if is_set { flag } else { TcpFlags::default() };
    let asks = flag(ece, TcpFlags::ECE).with(flag(cwr, TcpFlags::CWR));
    TcpHeader {
        seq: SeqNum(seq),
        flags: TcpFlags::SYN.with(asks),
        options: TcpOptions {
            mss: mss.filter(|mss| *mss > 0),
            window_scale: scale,
            sack_permitted: sack,
            timestamps: stamp.map(|value| Timestamps { value, echo: 0 }),
            ..TcpOptions::default()
        },
        ..syn(&flow_of(peer))
    }
}

fn terms_of(choice: &Choice) -> FloodSetup {
    let (secret, [timestamps, sack, scaling, ecn, dont_fragment], mss, clamp, tos, ttl) = *choice;
    let mut options = HandshakeOptions {
        max_segment: mss.filter(|mss| *mss > 0),
        window_clamp: clamp,
        ..HandshakeOptions::default()
    };
    options.ip.tos = tos;
    options.ip.ttl = ttl.max(1);
    if !dont_fragment {
        options.ip.discovery = portolan_proto::ip::MtuDiscovery::Dont;
    }
    let config = Config {
        timestamps,
        sack,
        window_scaling: scaling,
        ecn: if ecn { EcnMode::Accept } else { EcnMode::Off },
        ..Config::default()
    };
    FloodSetup {
        config,
        options,
        secret: Secret(secret),
    }
}

#[test]
fn filter_and_engine_agree_on_every_cookie() {
    let bed = AssertUnwindSafe(RefCell::new(flooded(&FloodSetup::default())));
    portolan_fuzz::check!(1000)
        .with_type::<(Peer, Choice)>()
        .for_each(|(peer, choice)| {
            let (flow, terms) = (flow_of(peer), terms_of(choice));
            let binding = BindingKey::new(Protocol::Tcp, any_address(&flow));
            let mut bed = bed.borrow_mut();
            bed.filter.floods.set(&binding, &terms.flood()).unwrap();
            let began = now_ms();
            let (outcome, answer) = run(&bed, &frame(&flow, &syn_of(peer)));
            assert_eq!(outcome, answered());
            assert_agrees(&terms, &flow, &syn_of(peer), began, &answer);
        });
}

#[test]
fn of_options_of_any_kind_both_understand_the_same() {
    let terms = FloodSetup::default();
    let bed = AssertUnwindSafe(flooded(&terms));
    let bare = |flow: &FlowKey| TcpHeader {
        options: TcpOptions::default(),
        ..syn(flow)
    };
    let kinds = [0, 1, 2, 3, 4, 5, 8, 34, 254];
    portolan_fuzz::check!(2000)
        .with_type::<(bool, Vec<(u8, u8, [u8; 4])>)>()
        .for_each(|(is_ipv6, pieces)| {
            let flow = flows(Protocol::Tcp)[usize::from(*is_ipv6)];
            let mut options = Vec::new();
            for (kind, length, value) in pieces {
                options.push(kinds[usize::from(*kind) % kinds.len()]);
                options.push(length % 12);
                options.extend(value);
            }
            options.truncate(40);
            options.resize(options.len().next_multiple_of(4), 0);
            let mut bytes = segment(&bare(&flow), &options);
            bytes[12] = ((bytes.len() / 4) as u8) << 4;
            let (understood, _) = TcpHeader::parse(&bytes).unwrap();
            let began = now_ms();
            let (outcome, answer) = run(&bed, &frame_of(&flow, bytes));
            if outcome == left() {
                bed.records();
                return;
            }
            assert_eq!(outcome, answered());
            assert_agrees(&terms, &flow, &understood, began, &answer);
        });
}

#[test]
fn the_device_that_was_to_finish_the_checksum_finishes_the_answers() {
    let bed = flooded(&FloodSetup::default());
    for flow in flows(Protocol::Tcp) {
        let mut bytes = segment(&syn(&flow), &[]);
        let (source, destination) = (flow.remote.ip(), flow.local.ip());
        let start = Sum::pseudo_header(source, destination, 6, bytes.len());
        let start = (!start.checksum()).to_be_bytes();
        bytes[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&start);
        let (outcome, answer) = run(&bed, &Frame::received(&flow).around(6, &bytes));
        assert_eq!(outcome, answered());
        let headers = answer.len() - tcp::MAX_HEADER_LEN.min(40);
        let found = &answer[headers + CHECKSUM_AT..][..2];
        assert_eq!(found, start, "as long as the SYN, between the same two");
    }
}

/// Packets left to the owner, with what is unusual about them.
fn oddities(flow: &FlowKey) -> Vec<(&'static str, Vec<u8>)> {
    let good = syn(flow);
    let with = |flags| TcpHeader {
        flags: TcpFlags::SYN.with(flags),
        ..good.clone()
    };
    let mut spoilt = frame(flow, &good);
    *spoilt.last_mut().unwrap() ^= 1;
    let mut late = segment(&good, &[]);
    late[25] = 77;
    let nowhere = FlowKey {
        remote: SocketAddr::new(flow.remote.ip(), 0),
        ..*flow
    };
    let mut cut = frame(flow, &good);
    cut.pop();
    let with_options = {
        let mut around = Frame::received(flow).around(6, &[]);
        let mut sealed = segment(&good, &[]);
        seal(flow, &mut sealed);
        if flow.local.is_ipv4() {
            around[ethernet::HEADER_LEN] = 0x46;
            around.extend([1, 1, 1, 0]);
            around.extend(sealed);
            around
        } else {
            let inner = [&[6, 0, 1, 4, 0, 0, 0, 0][..], &sealed].concat();
            Frame::received(flow).around(60, &inner)
        }
    };
    vec![
        ("an acknowledgement", frame(flow, &with(TcpFlags::ACK))),
        ("a reset", frame(flow, &with(TcpFlags::RST))),
        ("a FIN", frame(flow, &with(TcpFlags::FIN))),
        ("urgent", frame(flow, &with(TcpFlags::URG))),
        ("with text", frame_of(flow, segment(&good, b"text"))),
        ("spoilt", spoilt),
        ("options that do not fit", frame_of(flow, late)),
        ("of no port", frame(&nowhere, &syn(&nowhere))),
        ("cut short", cut),
        ("with IP options", with_options),
    ]
}

#[test]
fn whatever_is_odd_is_its_owners() {
    let bed = flooded(&FloodSetup::default());
    for flow in flows(Protocol::Tcp) {
        for (what, frame) in oddities(&flow) {
            assert_eq!(run(&bed, &frame).0, left(), "{what}: {flow:?}");
            assert_eq!(bed.records().len(), 1);
        }
    }
}

#[test]
fn a_spoilt_ip_header_a_fragment_and_several_in_one_are_not_answered() {
    let bed = flooded(&FloodSetup::default());
    let [flow, _] = flows(Protocol::Tcp);
    let mut spoilt = frame(&flow, &syn(&flow));
    spoilt[ethernet::HEADER_LEN + 10] ^= 1;
    assert_eq!(run(&bed, &spoilt).0, left());
    let mut fragment = frame(&flow, &syn(&flow));
    fragment[ethernet::HEADER_LEN + 6] |= 0x20;
    fragment[ethernet::HEADER_LEN + 10..][..2].fill(0);
    let header = &fragment[ethernet::HEADER_LEN..][..ipv4::HEADER_LEN];
    let checksum = Sum::default().over(header).checksum().to_be_bytes();
    fragment[ethernet::HEADER_LEN + 10..][..2].copy_from_slice(&checksum);
    assert_eq!(run(&bed, &fragment).0.verdict, SHOT);
    let several = frame(&flow, &syn(&flow));
    let mut context = Context::with_gso_size(10);
    let outcome = bed.run_with("packet_filter", &several, &mut context);
    assert_eq!(outcome, left());
}

#[test]
fn nobody_is_answered_whose_address_is_nobodys() {
    let bed = flooded(&FloodSetup::default());
    let v4 = ["127.0.0.1", "224.0.0.1", "255.255.255.255", "10.0.0.1"];
    let v6 = ["::", "::1", "ff02::1", "fd00::1"];
    for (index, sources) in [&v4[..], &v6[..]].into_iter().enumerate() {
        for source in sources {
            let flow = FlowKey {
                remote: SocketAddr::new(source.parse().unwrap(), 4000),
                ..flows(Protocol::Tcp)[index]
            };
            let dropped = outcome(SHOT, &["drop_martian"]);
            assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, dropped, "{source}");
        }
    }
    let mut flow = flows(Protocol::Tcp)[0];
    flow.remote.set_ip("0.0.0.1".parse().unwrap());
    assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
}

#[test]
fn who_is_reached_by_another_device_or_not_at_all_is_the_owners_to_answer() {
    let mut bed = flooded(&FloodSetup::default());
    for interface in [IFINDEX + 1, 0] {
        set_paths(&mut bed, interface);
        for flow in flows(Protocol::Tcp) {
            assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
        }
    }
    bed.filter.floods.set_paths(HashMap::new()).unwrap();
    for flow in flows(Protocol::Tcp) {
        assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
    }
}

#[test]
fn the_longest_prefix_says_which_way() {
    let mut bed = flooded(&FloodSetup::default());
    let [flow, _] = flows(Protocol::Tcp);
    let near = PathKey::new("10.0.0.0".parse().unwrap(), 24);
    let all = PathKey::new("0.0.0.0".parse().unwrap(), 0);
    let by = |interface| ReturnPath {
        interface,
        mtu: MTU,
    };
    let paths = |first, second| HashMap::from([(near, by(first)), (all, by(second))]);
    bed.filter.floods.set_paths(paths(IFINDEX, 0)).unwrap();
    assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, answered());
    bed.filter.floods.set_paths(paths(0, IFINDEX)).unwrap();
    assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
}

#[test]
fn flows_that_have_rows_are_none_of_the_flood() {
    let bed = flooded(&FloodSetup::default());
    for flow in flows(Protocol::Tcp) {
        bed.filter.steer(&flow, row(CHANNEL)).unwrap();
        assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
    }
}

#[test]
fn flows_of_a_delegate_are_spared_by_name() {
    let delegated = FlowRow {
        flags: FlowRow::DELEGATED,
        ..row(CHANNEL)
    };
    let bed = flooded_with(FloodSetup::default().flood(), delegated);
    for flow in flows(Protocol::Tcp) {
        let bytes = frame(&flow, &syn(&flow));
        bed.filter.floods.spare(&flow).unwrap();
        assert_eq!(run(&bed, &bytes).0, left());
        bed.filter.floods.spare_no_more(&flow).unwrap();
        assert_eq!(run(&bed, &bytes).0, answered());
    }
}

#[test]
fn another_listener_on_the_port_is_not_flooded_with_it() {
    let mut bed = flooded(&FloodSetup::default());
    for flow in flows(Protocol::Tcp) {
        let own = BindingKey::new(Protocol::Tcp, flow.local);
        bed.filter.bind(&own, row(CHANNEL)).unwrap();
        let bytes = frame(&flow, &syn(&flow));
        assert_eq!(run(&bed, &bytes).0, left());
        let any = BindingKey::new(Protocol::Tcp, any_address(&flow));
        bed.filter.floods.end(&any).unwrap();
        bed.filter
            .floods
            .set(&own, &FloodSetup::default().flood())
            .unwrap();
        assert_eq!(run(&bed, &bytes).0, answered());
    }
}

#[test]
fn a_flood_that_is_over_is_answered_no_more() {
    let mut bed = flooded(&FloodSetup::default());
    for flow in flows(Protocol::Tcp) {
        let binding = BindingKey::new(Protocol::Tcp, any_address(&flow));
        bed.filter.floods.end(&binding).unwrap();
        assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
    }
}

#[test]
fn a_full_backlog_drops_syns_and_nothing_else() {
    let mut full = FloodSetup::default().flood();
    full.flags |= Flood::FULL;
    let bed = flooded_with(full, row(CHANNEL));
    for flow in flows(Protocol::Tcp) {
        let dropped = outcome(SHOT, &["drop_syn"]);
        assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, dropped);
        let ack = TcpHeader {
            flags: TcpFlags::ACK,
            ..syn(&flow)
        };
        assert_eq!(run(&bed, &frame(&flow, &ack)).0, left());
    }
}

#[test]
fn who_is_too_far_is_left_to_the_owner() {
    let mut near = FloodSetup::default().flood();
    near.least_hops = 65;
    let bed = flooded_with(near, row(CHANNEL));
    for flow in flows(Protocol::Tcp) {
        assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
    }
}

#[test]
fn an_answer_is_paid_for_like_what_is_received() {
    const BUDGET: u16 = 3;
    let budgeted = FlowRow {
        budget: BUDGET,
        ..row(CHANNEL)
    };
    let bed = flooded_with(FloodSetup::default().flood(), budgeted);
    let once = Budget {
        packet_price: Budget::SECOND,
        priority: Budget::LAST.into(),
        ..Budget::default()
    };
    bed.filter.set_budget(BUDGET, &once).unwrap();
    let [flow, _] = flows(Protocol::Tcp);
    let bytes = frame(&flow, &syn(&flow));
    assert_eq!(run(&bed, &bytes).0, answered());
    let over = outcome(SHOT, &["drop_over_budget"]);
    assert_eq!(run(&bed, &bytes).0, over);
    assert_eq!(bed.filter.budget(BUDGET).passed, 1);
}

#[test]
fn extensions_see_what_comes_to_their_port_in_a_flood_too() {
    let extended = FlowRow {
        flags: FlowRow::EXTENDED,
        ..row(CHANNEL)
    };
    let bed = flooded_with(FloodSetup::default().flood(), extended);
    let [flow, _] = flows(Protocol::Tcp);
    assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, left());
}

#[test]
fn a_transport_of_ones_own_is_not_answered_for() {
    let raw = FlowRow {
        flags: FlowRow::RAW,
        ..row(CHANNEL)
    };
    let bed = flooded_with(FloodSetup::default().flood(), raw);
    let [flow, _] = flows(Protocol::Tcp);
    let delivered = outcome(SHOT, &["delivered_raw"]);
    assert_eq!(run(&bed, &frame(&flow, &syn(&flow))).0, delivered);
}

#[test]
fn what_the_server_lets_in_again_is_not_answered() {
    let bed = flooded(&FloodSetup::default());
    let [flow, _] = flows(Protocol::Tcp);
    let bytes = frame(&flow, &syn(&flow));
    assert_ne!(bed.run("inject_filter", &bytes).verdict, REDIRECT);
    assert_ne!(run(&bed, &bytes).0.verdict, UNSPEC);
}

/// How many of many such segments, which arrive at once, are dropped as strays.
fn strays(bed: &Bed, bytes: &[u8]) -> u64 {
    bed.times_counted("drop_stray", bytes, 2500)
}

/// A second's worth at once, and a thousand each second after that.
#[test]
fn of_segments_without_a_connection_a_listener_gets_so_many() {
    for flow in flows(Protocol::Tcp) {
        let bed = Bed::new();
        let binding = BindingKey::new(Protocol::Tcp, any_address(&flow));
        bed.filter.bind(&binding, row(CHANNEL)).unwrap();
        let with = |flags| {
            let header = TcpHeader {
                flags,
                ..syn(&flow)
            };
            frame(&flow, &header)
        };
        let ack = with(TcpFlags::ACK);
        let first = strays(&bed, &ack);
        assert!((1..=3000).contains(&first), "{first}");
        assert!(strays(&bed, &with(TcpFlags::SYN.with(TcpFlags::ACK))) > 0);
        // What begins a connection goes on, and so does what belongs to one.
        assert_eq!(strays(&bed, &with(TcpFlags::SYN)), 0);
        bed.filter.steer(&flow, row(CHANNEL)).unwrap();
        assert_eq!(strays(&bed, &ack), 0);
        bed.filter.unsteer(&flow).unwrap();
        // So does all while cookies are out, and what a process answers that has the handshakes.
        let floods = &bed.filter.floods;
        floods.expect_cookies(Instant::FAR_FUTURE).unwrap();
        assert_eq!(strays(&bed, &ack), 0);
        floods.expect_cookies(Instant::default()).unwrap();
        assert!(strays(&bed, &ack) > 0);
        let delegated = FlowRow {
            flags: FlowRow::DELEGATED,
            ..row(CHANNEL)
        };
        bed.filter.bind(&binding, delegated).unwrap();
        assert_eq!(strays(&bed, &ack), 0);
    }
}
