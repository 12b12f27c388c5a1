//! Output is parsed back to the same value; any other word is unambiguous or refused.

use super::*;

#[test]
fn quantities_are_read_in_their_units() {
    assert_eq!(rate("20mbit"), Ok(20_000_000));
    assert_eq!(rate("2.5gbit"), Ok(2_500_000_000));
    assert_eq!(rate("7bit"), Ok(7));
    assert_eq!(duration("4ms"), Ok(4_000));
    assert_eq!(duration("0.25s"), Ok(250_000));
    assert_eq!(bytes("64k"), Ok(65_536));
    assert_eq!(bytes("1500"), Ok(1_500));
    assert_eq!(share("0.3"), Ok(300_000));
    assert_eq!(share("33.3333%"), Ok(333_333));
    assert_eq!(milliseconds("50ms"), Ok(50));
}

#[test]
fn what_is_not_exactly_a_quantity_is_refused() {
    for word in [
        "",
        "mbit",
        "20",
        "20 mbit",
        "20mbps",
        "20Mbit",
        "-20mbit",
        "+20mbit",
        "1e6bit",
        ".5mbit",
        "5.mbit",
        "1..5mbit",
        "0.5bit",
        "0.0000001kbit",
        "18446744073709551616bit",
        "99999999999gbit",
        "٣mbit",
        "20mbit\n",
        "0x10bit",
        "inf",
        "NaNbit",
    ] {
        assert!(rate(word).is_err(), "{word:?}");
    }
    for word in ["", "5", "5m", "5h", "-1ms", "0.5us", "4295s"] {
        assert!(duration(word).is_err(), "{word:?}");
    }
    for word in ["", "4g", "4096m", "k", "0.3", "64K", "64kb"] {
        assert!(bytes(word).is_err(), "{word:?}");
    }
    assert!(milliseconds("1500us").is_err());
    assert!(share("0.0000001").is_err());
}

#[test]
fn a_refusal_names_the_word_and_what_is_allowed() {
    assert_eq!(
        rate("20mbps").unwrap_err().to_string(),
        "\"20mbps\" is not a rate: a number and bit, kbit, mbit or gbit, such as 20mbit"
    );
}

#[test]
fn scopes_are_read_as_they_are_shown() {
    for (read, word) in [
        (port as fn(&str) -> Result<Scope, Unreadable>, "udp:53"),
        (flow, "tcp:10.0.0.1:80-10.0.0.2:4000"),
        (flow, "udp:[fd00::1]:53-[fd00::2]:4000"),
        (flow, "tcp:[fe80::1%3]:53-[fe80::2%3]:4000"),
        (cgroup, "/video.slice/a b"),
        (cgroup, "/"),
    ] {
        let scope = read(word).unwrap();
        let shown = scope.to_string();
        let (_, again) = shown.split_once(' ').unwrap();
        assert_eq!(again, word);
        assert_eq!(read(again), Ok(scope));
    }
}

#[test]
fn a_mapped_address_is_the_one_it_maps() {
    assert_eq!(
        flow("tcp:[::ffff:10.0.0.1]:80-[::ffff:10.0.0.2]:4000"),
        flow("tcp:10.0.0.1:80-10.0.0.2:4000")
    );
}

#[test]
fn scopes_that_name_nothing_are_refused() {
    for word in [
        "53",
        "sctp:53",
        "udp:",
        "udp:0",
        "udp:65536",
        "udp:+5",
        "udp:53 ",
    ] {
        assert!(port(word).is_err(), "{word:?}");
    }
    for word in [
        "tcp:10.0.0.1:80",
        "10.0.0.1:80-10.0.0.2:5",
        "tcp:10.0.0.1-10.0.0.2",
        "tcp:fd00::1:80-fd00::2:5",
        "tcp:a:80-b:5",
    ] {
        assert!(flow(word).is_err(), "{word:?}");
    }
    for word in ["", "video", "/../etc", "/a/../..", "/a\u{1b}[2J"] {
        assert!(cgroup(word).is_err(), "{word:?}");
    }
    for word in ["", "0", "-1", "+1", "4194305", "1x"] {
        assert!(process(word).is_err(), "{word:?}");
    }
}

#[test]
fn limits_of_adaptation_are_in_order() {
    assert_eq!(adapt("propose"), Ok(Adapt::Propose));
    let limits = Adapt::Auto {
        least_ppm: 100_000,
        most_ppm: 500_000,
    };
    assert_eq!(adapt("0.1-50%"), Ok(limits));
    assert_eq!(limits.to_string(), "0.1-0.5");
    assert!(adapt("0.5-0.1").is_err());
    assert!(adapt("auto").is_err());
}

#[test]
fn whatever_is_shown_is_read_back() {
    portolan_fuzz::check!(2000)
        .with_type::<(u64, u32)>()
        .for_each(|(large, small)| {
            assert_eq!(rate(&show_rate(*large)), Ok(*large));
            assert_eq!(duration(&show_duration(*small)), Ok(*small));
            assert_eq!(bytes(&show_bytes(*small)), Ok(*small));
            assert_eq!(share(&show_share((*small).into())), Ok(*small));
        });
}

#[test]
fn no_word_makes_the_parser_panic() {
    const PIECES: [&str; 24] = [
        "0",
        "9",
        "20",
        "99999999999999999999",
        ".",
        "-",
        "+",
        ":",
        "/",
        "[",
        "]",
        "%",
        "k",
        "m",
        "s",
        "ms",
        "us",
        "bit",
        "kbit",
        "gbit",
        "tcp",
        "udp",
        "10.0.0.1",
        "::",
    ];
    portolan_fuzz::check!(3000)
        .with_type::<(Vec<u8>, String)>()
        .for_each(|(pieces, tail)| {
            let mut word: String = pieces
                .iter()
                .filter_map(|piece| PIECES.get(usize::from(piece % 28)).copied())
                .collect();
            word.push_str(tail);
            if let Ok(bits) = rate(&word) {
                assert_eq!(rate(&show_rate(bits)), Ok(bits));
            }
            let _ = (
                duration(&word),
                bytes(&word),
                share(&word),
                adapt(&word),
                process(&word),
            );
            for read in [port, flow, cgroup] {
                if let Ok(scope) = read(&word) {
                    let shown = scope.to_string();
                    let again = shown.split_once(' ').map(|(_, again)| read(again));
                    assert_eq!(again, Some(Ok(scope)));
                }
            }
        });
}
