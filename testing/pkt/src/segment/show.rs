//! Formats packets in the language of the scripts.

use std::fmt::Write;

use super::{Content, Flow, Seen, SeenOption, SeenTcp};

const FLAG_LETTERS: &str = "FSRP.UEWA";

/// The initial numbers that the sequence and the acknowledgement number are relative to.
struct Firsts {
    sequence: u32,
    ack: u32,
}

/// Formats a packet as one line; numbers are relative where the flow's initial ones are known. `outgoing` is
/// true for packets that the stack under test has sent.
pub fn show(seen: &Seen, flow: &Flow, outgoing: bool) -> String {
    let (local, remote) = (flow.local_isn.unwrap_or(0), flow.remote_isn);
    let firsts = if outgoing {
        Firsts {
            sequence: local,
            ack: remote,
        }
    } else {
        Firsts {
            sequence: remote,
            ack: local,
        }
    };
    let mut line = match &seen.content {
        Content::Tcp(tcp) => show_tcp(tcp, &firsts),
        Content::Udp(udp) => format!("udp {}", udp.payload.len()),
        Content::Icmp(icmp) => {
            let (kind, code, word) = (icmp.kind, icmp.code, icmp.word);
            format!(
                "icmp type {kind} code {code} word {word:#x} about {:?}",
                icmp.about
            )
        }
    };
    if seen.tos != 0 {
        let _ = write!(line, " tos {}", seen.tos);
    }
    if seen.ttl != 64 {
        let _ = write!(line, " ttl {}", seen.ttl);
    }
    if seen.fragments > 1 {
        let _ = write!(line, " in {} fragments", seen.fragments);
    }
    line
}

fn show_tcp(tcp: &SeenTcp, firsts: &Firsts) -> String {
    let letters = FLAG_LETTERS.chars().enumerate();
    let flags: String = letters
        .filter(|(bit, _)| tcp.flags & 1 << bit != 0)
        .map(|(_, letter)| letter)
        .collect();
    let flags = if flags.is_empty() {
        "-".to_owned()
    } else {
        flags
    };
    let start = tcp.sequence.wrapping_sub(firsts.sequence);
    let mut line = format!("{flags} {start}");
    if !tcp.payload.is_empty() {
        let _ = write!(line, "..{}", start.wrapping_add(tcp.payload.len() as u32));
    }
    if tcp.flags & 0x10 != 0 {
        let _ = write!(line, " ack {}", tcp.ack.wrapping_sub(firsts.ack));
    }
    let _ = write!(line, " win {}", tcp.window);
    if tcp.urgent != 0 {
        let _ = write!(line, " urg {}", tcp.urgent);
    }
    let shown = tcp.options.iter().map(|option| show_option(option, firsts));
    let options = shown.collect::<Vec<_>>().join(", ");
    let _ = write!(line, " <{options}>");
    line
}

fn show_option(option: &SeenOption, firsts: &Firsts) -> String {
    match option {
        SeenOption::Mss(mss) => format!("mss {mss}"),
        SeenOption::WindowScale(shift) => format!("ws {shift}"),
        SeenOption::SackPermitted => "sackok".to_owned(),
        SeenOption::Timestamps(value, echo) => format!("ts {value} {echo}"),
        SeenOption::FastOpen(cookie) => format!("fastopen {}", hexadecimal(cookie)),
        SeenOption::Other(bytes) => format!("raw {}", hexadecimal(bytes)),
        SeenOption::Sack(blocks) => {
            let edge = |edge: u32| edge.wrapping_sub(firsts.ack);
            let blocks = blocks
                .iter()
                .map(|(a, b)| format!("{}..{}", edge(*a), edge(*b)));
            format!("sack {}", blocks.collect::<Vec<_>>().join(" "))
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
