//! Options are taken, refused and shown as on Linux.

use super::*;

fn int(value: i32) -> [u8; 4] {
    value.to_ne_bytes()
}

#[test]
fn buffers_read_back_doubled_as_linux_shows_them() {
    let mut options = Options::default();
    options
        .set(Protocol::Tcp, SOL_SOCKET, libc::SO_SNDBUF, &int(100_000))
        .unwrap();
    assert_eq!(
        options
            .get(Protocol::Tcp, SOL_SOCKET, libc::SO_SNDBUF)
            .unwrap(),
        int(200_000)
    );
}

#[test]
fn values_out_of_range_and_unknown_options_are_refused() {
    let mut options = Options::default();
    let set = Options::set;
    assert_eq!(
        set(
            &mut options,
            Protocol::Tcp,
            IPPROTO_TCP,
            TCP_KEEPIDLE,
            &int(0)
        ),
        Err(Errno::INVAL)
    );
    assert_eq!(
        set(
            &mut options,
            Protocol::Udp,
            IPPROTO_TCP,
            TCP_NODELAY,
            &int(1)
        ),
        Err(Errno::NOPROTOOPT)
    );
    assert_eq!(
        set(&mut options, Protocol::Tcp, SOL_SOCKET, 9999, &int(1)),
        Err(Errno::NOPROTOOPT)
    );
    assert_eq!(
        set(
            &mut options,
            Protocol::Tcp,
            SOL_SOCKET,
            libc::SO_KEEPALIVE,
            &[1]
        ),
        Err(Errno::INVAL)
    );
}

#[test]
fn flags_read_back_as_one() {
    let mut options = Options::default();
    options
        .set(Protocol::Tcp, SOL_SOCKET, libc::SO_REUSEADDR, &int(17))
        .unwrap();
    assert_eq!(
        options
            .get(Protocol::Tcp, SOL_SOCKET, libc::SO_REUSEADDR)
            .unwrap(),
        int(1)
    );
    assert!(options.reuse().address && !options.reuse().port);
}

#[test]
fn a_pacing_rate_may_be_an_int_or_a_long_and_the_largest_is_none() {
    let mut options = Options::default();
    let mut set = |value: &[u8]| {
        options
            .set(Protocol::Tcp, SOL_SOCKET, libc::SO_MAX_PACING_RATE, value)
            .unwrap();
        options.max_pacing()
    };
    assert_eq!(set(&int(125_000)), Some(125_000));
    assert_eq!(set(&(1u64 << 33).to_ne_bytes()), Some(1 << 33));
    assert_eq!(set(&int(-1)), None);
}

#[test]
fn congestion_control_is_known_by_its_name() {
    let mut options = Options::default();
    let mut set = |name: &[u8]| options.set(Protocol::Tcp, IPPROTO_TCP, libc::TCP_CONGESTION, name);
    assert_eq!(set(b"bbr"), Ok(()));
    assert_eq!(set(b"vegas"), Err(Errno::NOENT));
    assert_eq!(options.congestion(), Some(CongestionKind::Bbr));
}

#[test]
fn a_zero_timeout_means_for_ever() {
    let mut options = Options::default();
    let mut value = [0; 16];
    options
        .set(Protocol::Tcp, SOL_SOCKET, libc::SO_RCVTIMEO, &value)
        .unwrap();
    assert_eq!(options.receive_timeout(), None);
    value[8] = 100;
    options
        .set(Protocol::Tcp, SOL_SOCKET, libc::SO_RCVTIMEO, &value)
        .unwrap();
    assert_eq!(options.receive_timeout(), Some(Duration::from_micros(100)));
}

#[test]
fn a_type_of_service_chooses_the_priority_as_linux_does() {
    let mut options = Options::default();
    let mut choose = |protocol, level, name, number| {
        options.set(protocol, level, name, &int(number))?;
        let shown = options.get(protocol, SOL_SOCKET, libc::SO_PRIORITY)?;
        Ok::<_, Errno>((shown, options.priority()))
    };
    // What the transmit filter derives from each packet, the server need not know.
    let derived = |priority| Ok((int(priority).to_vec(), 0));
    let chosen = |priority: u8| Ok((int(priority.into()).to_vec(), priority));
    let udp = Protocol::Udp;
    for (tos, priority) in [(0x08, 2), (0x10, 6), (0x1e, 4), (0xe0, 0), (0x0a, 2)] {
        let set = choose(udp, IPPROTO_IP, libc::IP_TOS, tos);
        assert_eq!(set, derived(priority), "{tos:#x}");
    }
    // Setting the same value changes nothing, and IPv6's option never does.
    assert_eq!(choose(udp, SOL_SOCKET, libc::SO_PRIORITY, 5), chosen(5));
    assert_eq!(choose(udp, IPPROTO_IP, libc::IP_TOS, 0x0a), chosen(5));
    assert_eq!(choose(udp, IPPROTO_IPV6, IPV6_TCLASS, 0x10), chosen(5));
    // The program does not control the two low bits of a stream.
    let tcp = Protocol::Tcp;
    assert_eq!(choose(tcp, IPPROTO_IP, libc::IP_TOS, 0x0b), chosen(5));
    assert_eq!(choose(tcp, IPPROTO_IP, libc::IP_TOS, 0x10), derived(6));
}
