//! Compares received packets with a script's expectations.

use super::{
    Content, Flow, Scope, Seen, SeenIcmp, SeenOption, SeenTcp, SeenUdp, TCP, UDP, pattern,
};
use crate::script::{
    About, Body, Checksum, Expression, Field, Icmp, IcmpKind, Packet, Payload, Sequence, Tcp,
    TcpOption, Udp,
};

type Verdict = Result<(), String>;

/// Checks that `seen` matches `packet`; captured numbers are added to `scope`.
pub fn compare(packet: &Packet, seen: &Seen, flow: &Flow, scope: &mut Scope) -> Verdict {
    let mut judge = Judge { flow, scope };
    if let Some(fault) = seen.fault {
        return Err(fault.to_owned());
    }
    if let Some(ttl) = &packet.ip.ttl {
        judge.field("ttl", ttl, seen.ttl.into())?;
    }
    if let Some(tos) = &packet.ip.tos {
        judge.field("tos", tos, seen.tos.into())?;
    }
    if let Some(expected) = packet.ip.dont_fragment
        && flow.remote.is_ipv4()
        && expected != seen.dont_fragment
    {
        return Err("DF is otherwise".to_owned());
    }
    match (&packet.body, &seen.content) {
        (Body::Tcp(tcp), Content::Tcp(seen)) => judge.tcp(tcp, seen),
        (Body::Udp(udp), Content::Udp(seen)) => judge.udp(udp, seen),
        (Body::Icmp(icmp), Content::Icmp(seen)) => judge.icmp(icmp, seen),
        _ => Err("it is of another protocol".to_owned()),
    }
}

struct Judge<'a> {
    flow: &'a Flow,
    scope: &'a mut Scope,
}

impl Judge<'_> {
    fn number(&self, expression: &Expression) -> Result<i64, String> {
        let value = self.scope.evaluate(expression, Some(self.flow));
        value.map_err(|unknown| unknown.to_string())
    }

    fn field(&mut self, what: &str, field: &Field, seen: i64) -> Verdict {
        let (comparison, expression) = match field {
            Field::Any => return Ok(()),
            Field::Capture(name) => {
                self.scope.variables.insert(name.clone(), seen);
                return Ok(());
            }
            Field::Compare(comparison, expression) => (comparison, expression),
        };
        let expected = self.number(expression)?;
        if comparison.holds(seen, expected) {
            Ok(())
        } else {
            Err(format!("{what} is {seen}, not {comparison}{expected}"))
        }
    }

    fn sequence(&self, what: &str, expected: &Sequence, seen: u32, first: Option<u32>) -> Verdict {
        let (expected, base) = match expected {
            Sequence::Any => return Ok(()),
            Sequence::Absolute(number) => (self.number(number)? as u32, 0),
            Sequence::Relative(number) => match first {
                Some(first) => (self.number(number)? as u32, first),
                None => return Err(format!("{what}: no first sequence number is known")),
            },
        };
        let seen = seen.wrapping_sub(base);
        if seen == expected {
            return Ok(());
        }
        Err(format!(
            "{what} is {}, not {}",
            seen as i32, expected as i32
        ))
    }

    fn tcp(&mut self, tcp: &Tcp, seen: &SeenTcp) -> Verdict {
        if tcp.flags & !tcp.either != seen.flags & !tcp.either {
            return Err("the flags differ".to_owned());
        }
        self.sequence("seq", &tcp.sequence, seen.sequence, self.flow.local_isn)?;
        // A SYN takes one number; the first byte of the stream follows it.
        let syn = u32::from(seen.flags & 2 != 0);
        let position = self.flow.local_isn.map(|isn| {
            let position = seen.sequence.wrapping_add(syn).wrapping_sub(isn);
            u64::from(position) + 250
        });
        self.payload(&tcp.payload, &seen.payload, position)?;
        if let Some(ack) = &tcp.ack {
            self.sequence("ack", ack, seen.ack, Some(self.flow.remote_isn))?;
        }
        if let Some(window) = &tcp.window {
            self.field("win", window, seen.window.into())?;
        }
        if let Some(urgent) = &tcp.urgent {
            self.field("urg", urgent, seen.urgent.into())?;
        }
        match &tcp.options {
            Some(options) => self.options(options, &seen.options),
            None => Ok(()),
        }
    }

    fn payload(&self, expected: &Payload, seen: &[u8], position: Option<u64>) -> Verdict {
        let length = match expected {
            Payload::Any => return Ok(()),
            Payload::Text(text) if text == seen => return Ok(()),
            Payload::Text(_) => {
                let text = String::from_utf8_lossy(seen);
                return Err(format!("the text is {text:?}"));
            }
            Payload::Stream(length) => self.number(length)?,
            Payload::Span(first, end) => self.number(end)?.saturating_sub(self.number(first)?),
        };
        if seen.len() as i64 != length {
            return Err(format!("{} bytes of payload, not {length}", seen.len()));
        }
        let Some(position) = position else {
            return Ok(());
        };
        let wrong = seen
            .iter()
            .zip(position..)
            .position(|(byte, p)| *byte != pattern(p));
        match wrong {
            Some(at) => Err(format!("byte {at} of the payload is wrong")),
            None => Ok(()),
        }
    }

    /// Compares the options as sets; order and padding do not matter.
    fn options(&mut self, expected: &[TcpOption], seen: &[SeenOption]) -> Verdict {
        let mut left = seen.to_vec();
        for option in expected {
            if matches!(option, TcpOption::Nop | TcpOption::End) {
                continue;
            }
            let same_kind = |seen: &SeenOption| kind_of(option) == kind_of_seen(seen);
            let Some(at) = left.iter().position(same_kind) else {
                return Err(format!("{} is missing", name_of(option)));
            };
            let seen = left.remove(at);
            self.option(option, &seen)?;
        }
        match left.first() {
            Some(option) => Err(format!("it has an option too many: {option:?}")),
            None => Ok(()),
        }
    }

    fn option(&mut self, expected: &TcpOption, seen: &SeenOption) -> Verdict {
        match (expected, seen) {
            (TcpOption::Mss(field), SeenOption::Mss(mss)) => {
                self.field("mss", field, (*mss).into())
            }
            (TcpOption::WindowScale(field), SeenOption::WindowScale(shift)) => {
                self.field("ws", field, (*shift).into())
            }
            (TcpOption::Timestamps(value, echo), SeenOption::Timestamps(seen, seen_echo)) => {
                self.field("ts value", value, (*seen).into())?;
                self.field("ts echo", echo, (*seen_echo).into())
            }
            (TcpOption::Sack(blocks), SeenOption::Sack(seen)) => self.sack(blocks, seen),
            (TcpOption::FastOpen(Some(cookie)), SeenOption::FastOpen(seen)) if cookie != seen => {
                Err("the cookie is another".to_owned())
            }
            (TcpOption::Raw(raw), SeenOption::Other(seen)) if raw != seen => {
                Err(format!("the option is {seen:02x?}"))
            }
            _ => Ok(()),
        }
    }

    fn sack(&self, expected: &[(Expression, Expression)], seen: &[(u32, u32)]) -> Verdict {
        let first = self.flow.remote_isn;
        let relative = |edge: u32| i64::from(edge.wrapping_sub(first) as i32);
        let seen: Vec<_> = seen
            .iter()
            .map(|b| (relative(b.0), relative(b.1)))
            .collect();
        let expected = expected
            .iter()
            .map(|(start, end)| Ok((self.number(start)?, self.number(end)?)));
        let expected: Vec<(i64, i64)> = expected.collect::<Result<_, String>>()?;
        if seen == expected {
            return Ok(());
        }
        Err(format!("sack is {seen:?}, not {expected:?}"))
    }

    fn udp(&self, udp: &Udp, seen: &SeenUdp) -> Verdict {
        if (udp.checksum == Checksum::Zero) == seen.has_checksum {
            return Err("its checksum is there, or is not".to_owned());
        }
        self.payload(&udp.payload, &seen.payload, Some(0))
    }

    fn icmp(&self, icmp: &Icmp, seen: &SeenIcmp) -> Verdict {
        let v4 = self.flow.remote.is_ipv4();
        let (kind, code) = match (icmp.kind, v4) {
            (IcmpKind::PortUnreachable, true) => (3, 3),
            (IcmpKind::PortUnreachable, false) => (1, 4),
            (IcmpKind::ProtocolUnreachable, true) => (3, 2),
            (IcmpKind::ProtocolUnreachable, false) => (4, 1),
            (IcmpKind::TimeExceeded, true) => (11, 1),
            (IcmpKind::TimeExceeded, false) => (3, 1),
            (IcmpKind::ParameterProblem, true) => (12, 0),
            (IcmpKind::ParameterProblem, false) => (4, 0),
            _ => return Err("no host sends such an error".to_owned()),
        };
        if (kind, code) != (seen.kind, seen.code) {
            return Err(format!("ICMP type {} code {}", seen.kind, seen.code));
        }
        // The error is about a packet that the remote host has sent.
        let protocol = match icmp.about {
            About::Tcp(_) => TCP,
            About::Udp => UDP,
        };
        if seen.about != Some((protocol, self.flow.remote, self.flow.local)) {
            return Err("it is about another packet".to_owned());
        }
        Ok(())
    }
}

fn kind_of(option: &TcpOption) -> u8 {
    match option {
        TcpOption::End => 0,
        TcpOption::Nop => 1,
        TcpOption::Mss(_) => 2,
        TcpOption::WindowScale(_) => 3,
        TcpOption::SackPermitted => 4,
        TcpOption::Sack(_) => 5,
        TcpOption::Timestamps(..) => 8,
        TcpOption::FastOpen(_) => 34,
        TcpOption::Raw(raw) => raw.first().copied().unwrap_or(0),
    }
}

fn name_of(option: &TcpOption) -> String {
    match option {
        TcpOption::Mss(_) => "mss".to_owned(),
        TcpOption::WindowScale(_) => "ws".to_owned(),
        TcpOption::SackPermitted => "sackok".to_owned(),
        TcpOption::Sack(_) => "sack".to_owned(),
        TcpOption::Timestamps(..) => "ts".to_owned(),
        TcpOption::FastOpen(_) => "fastopen".to_owned(),
        other => format!("option {}", kind_of(other)),
    }
}

fn kind_of_seen(option: &SeenOption) -> u8 {
    match option {
        SeenOption::Mss(_) => 2,
        SeenOption::WindowScale(_) => 3,
        SeenOption::SackPermitted => 4,
        SeenOption::Sack(_) => 5,
        SeenOption::Timestamps(..) => 8,
        SeenOption::FastOpen(_) => 34,
        SeenOption::Other(bytes) => bytes.first().copied().unwrap_or(0),
    }
}
