//! The parser accepts the language, reports the position of errors, and never panics.

use portolan_pkt::script::{Action, Body, Family, ParseError, parse};

fn error(text: &str) -> ParseError {
    match parse(text) {
        Ok(script) => panic!("{text:?} is a script: {script:?}"),
        Err(error) => error,
    }
}

#[test]
fn a_script_has_families_parameters_and_steps() {
    let text = "# What it proves.\nfamilies 4 6\nsysctl net.ipv4.tcp_sack = 0\n\
                +0.5 < S 0 win 100 <mss 1000, ts $a+1 TS>  # comment\n\
                +[0.1,2] > [b] P. 1..MSS+1 ack * win >=$w <sack 1..2 5..9>\n\
                c = socket(tcp)\nsend(c, \"x\\x00\", MSG_OOB|MSG_MORE) = EAGAIN\n";
    let script = parse(text).expect("it is a script");
    assert_eq!(script.about, "What it proves.");
    assert_eq!(script.families, [Family::V4, Family::V6]);
    assert_eq!(script.sysctls.len(), 1);
    assert_eq!(script.steps.len(), 4);
    assert_eq!(script.steps[0].time.earliest.as_millis(), 500);
    assert_eq!(script.steps[1].time.latest.map(|t| t.as_secs()), Some(2));
    let Action::Expect(packet) = &script.steps[1].action else {
        panic!("no expectation: {script:?}");
    };
    assert_eq!(packet.flow, "b");
    assert!(matches!(&packet.body, Body::Tcp(tcp) if tcp.flags == 0x18));
}

#[test]
fn mistakes_are_told_with_their_place() {
    let at = |text: &str| {
        let error = error(text);
        (error.line, error.column)
    };
    assert_eq!(at("\n  connct(c)"), (2, 9));
    assert_eq!(at("< SX 0"), (1, 5));
    assert_eq!(at("> . 1 ack 1 win"), (1, 16));
    assert_eq!(at("+x < S 0"), (1, 2));
    assert_eq!(at("close()"), (1, 8));
    assert_eq!(at("close(a, 1)"), (1, 9));
    assert_eq!(at("send(c, \"open"), (1, 10));
}

#[test]
fn what_cannot_be_sent_or_seen_is_refused() {
    for text in [
        "< . *  ack 1",
        "< . 1 ack *",
        "< . 1",
        "> . 1",
        "> S 0 ack 1",
        "< . 1 ack 1 win *",
        "< . 1 ack 1 <ts * 0>",
        "< udp *",
        "> udp 100 part 0..8 of 1",
        "< udp 100 part 4..8 of 1",
        "< udp 100 part 8..8 of 1",
        "< . 5..1 ack 1",
        "< . $a+5..$a ack 1",
        "< udp 5 win 3",
        "< icmp strange about 1",
        "< icmp too-big 99999999999 about 1",
        "sysctl kernel.x = 1",
        "sysctl net.../../x = 1",
        "include other.inc",
        "quiet",
        "quiet 99999999",
        "await",
    ] {
        error(text);
    }
}

#[test]
fn nothing_makes_the_parser_panic() {
    bolero::check!().with_type::<String>().for_each(|text| {
        let _ = parse(text);
    });
}

/// The same with pieces of the language, which reach deeper into the parser.
#[test]
fn no_mixture_of_the_language_makes_the_parser_panic() {
    const PIECES: &[&str] = &[
        "<",
        ">",
        " ",
        "\n",
        "S.",
        ". ",
        "1..",
        "$a",
        "+",
        "-",
        "0x",
        "99999999999999999999",
        "[",
        "]",
        "ack ",
        "win ",
        "\"",
        "\\x",
        "ts ",
        "sack ",
        "mss ",
        ",",
        "udp ",
        "icmp ",
        "about ",
        "too-big ",
        "part ",
        " of ",
        "send(",
        "c",
        ")",
        "=",
        "*",
        "?x",
        "MSS",
        "quiet ",
        "+0.1 ",
        "socket(tcp)",
        "raw ",
        "fe",
        "é",
        "#",
        "families ",
        "sysctl net.",
        "maybe ",
        "start ",
    ];
    bolero::check!().with_type::<Vec<u8>>().for_each(|choices| {
        let piece = |choice: &u8| PIECES[usize::from(*choice) % PIECES.len()];
        let text: String = choices.iter().map(piece).collect();
        let _ = parse(&text);
    });
}
