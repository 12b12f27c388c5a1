//! Parses the packets of a script.

use super::cursor::{Cursor, Parsed};
use super::{
    About, Base, Body, Checksum, Comparison, Expression, Field, Icmp, IcmpKind, Ip, Packet, Part,
    Payload, Sequence, Tcp, TcpOption, Udp,
};

/// The letters of the control bits in the order in which they are written, from the lowest bit.
pub(crate) const FLAG_LETTERS: &str = "FSRP.UEWA";

const PUSH: u16 = 0x08;

/// The direction of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// To the stack under test: every number must be stated.
    In,
    Out,
}

pub(super) fn packet(cursor: &mut Cursor, direction: Direction) -> Parsed<Packet> {
    let mut ip = Ip::default();
    let flow = if cursor.take("[") {
        let name = cursor.expect_word("the name of a flow")?.to_owned();
        cursor.expect("]")?;
        name
    } else {
        String::new()
    };
    let mut body = if cursor.take_word("udp") {
        Body::Udp(udp(cursor)?)
    } else if cursor.take_word("icmp") {
        Body::Icmp(icmp(cursor)?)
    } else {
        Body::Tcp(tcp(cursor)?)
    };
    while !cursor.is_at_end() {
        attribute(cursor, &mut ip, &mut body)?;
    }
    let packet = Packet { flow, ip, body };
    check(cursor, &packet, direction)?;
    Ok(packet)
}

fn tcp(cursor: &mut Cursor) -> Parsed<Tcp> {
    let (flags, either) = flags(cursor)?;
    let (sequence, payload) = range(cursor)?;
    Ok(Tcp {
        flags,
        either,
        sequence,
        payload,
        ack: None,
        window: None,
        urgent: None,
        options: None,
        checksum: Checksum::Good,
        offset: None,
    })
}

/// Parses the flags, and those that may be either set or clear: `p` for `P`.
fn flags(cursor: &mut Cursor) -> Parsed<(u16, u16)> {
    let chunk = cursor.chunk();
    if chunk == "-" {
        return Ok((0, 0));
    }
    let (mut flags, mut either) = (0, 0);
    for letter in chunk.chars() {
        match (FLAG_LETTERS.find(letter), letter) {
            (Some(bit), _) => flags |= 1 << bit,
            (None, 'p') => either |= PUSH,
            _ => return cursor.error(format!("{chunk:?} are no flags")),
        }
    }
    if flags == 0 {
        return cursor.error("flags are missing");
    }
    Ok((flags, either))
}

/// Parses the beginning of a segment and its length: `1`, `1..101`, `=1`, `*`.
fn range(cursor: &mut Cursor) -> Parsed<(Sequence, Payload)> {
    let start = sequence(cursor)?;
    let nothing = Expression {
        base: Base::Number(0),
        plus: 0,
    };
    if start == Sequence::Any {
        return Ok((start, Payload::Any));
    }
    if !cursor.take("..") {
        return Ok((start, Payload::Stream(nothing)));
    }
    let end = cursor.expect_expression("the end of the segment")?;
    match &start {
        Sequence::Relative(first) | Sequence::Absolute(first) if !is_backwards(first, &end) => {
            let span = Payload::Span(first.clone(), end);
            Ok((start, span))
        }
        _ => cursor.error("a segment ends after its start"),
    }
}

/// Returns true if the end is before the beginning, as far as this is known before the script runs.
fn is_backwards(first: &Expression, end: &Expression) -> bool {
    match (&first.base, &end.base) {
        (Base::Number(a), Base::Number(b)) => {
            b.saturating_add(end.plus) < a.saturating_add(first.plus)
        }
        (a, b) => a == b && end.plus < first.plus,
    }
}

fn sequence(cursor: &mut Cursor) -> Parsed<Sequence> {
    if cursor.take("*") {
        return Ok(Sequence::Any);
    }
    let absolute = cursor.take("=");
    let number = cursor.expect_expression("a sequence number")?;
    Ok(if absolute {
        Sequence::Absolute(number)
    } else {
        Sequence::Relative(number)
    })
}

fn udp(cursor: &mut Cursor) -> Parsed<Udp> {
    Ok(Udp {
        payload: payload(cursor)?,
        checksum: Checksum::Good,
        length: None,
    })
}

fn payload(cursor: &mut Cursor) -> Parsed<Payload> {
    if cursor.take("*") {
        return Ok(Payload::Any);
    }
    match cursor.text()? {
        Some(text) => Ok(Payload::Text(text)),
        None => Ok(Payload::Stream(cursor.expect_expression("a payload")?)),
    }
}

fn icmp(cursor: &mut Cursor) -> Parsed<Icmp> {
    let kind = match cursor.expect_word("the kind of the error")? {
        "net-unreachable" => IcmpKind::NetUnreachable,
        "host-unreachable" => IcmpKind::HostUnreachable,
        "protocol-unreachable" => IcmpKind::ProtocolUnreachable,
        "port-unreachable" => IcmpKind::PortUnreachable,
        "prohibited" => IcmpKind::Prohibited,
        "too-big" => IcmpKind::TooBig(cursor.expect_small("MTU")?),
        "source-quench" => IcmpKind::SourceQuench,
        "time-exceeded" => IcmpKind::TimeExceeded,
        "parameter-problem" => IcmpKind::ParameterProblem,
        other => return cursor.error(format!("{other:?} is no ICMP error")),
    };
    let about = if cursor.take_word("about") {
        if cursor.take_word("udp") {
            About::Udp
        } else {
            About::Tcp(sequence(cursor)?)
        }
    } else {
        return cursor.error("\"about\" is missing");
    };
    Ok(Icmp { kind, about })
}

/// Parses one of the attributes that may follow, in any order.
fn attribute(cursor: &mut Cursor, ip: &mut Ip, body: &mut Body) -> Parsed<()> {
    if cursor.take("<") {
        let options = options(cursor)?;
        return match body {
            Body::Tcp(tcp) => {
                tcp.options = Some(options);
                Ok(())
            }
            _ => cursor.error("only TCP has options"),
        };
    }
    let word = cursor.expect_word("an attribute of the packet")?;
    match (word, body) {
        ("ttl", _) => ip.ttl = Some(cursor.field("TTL")?),
        ("tos", _) => ip.tos = Some(cursor.field("TOS")?),
        ("df", _) => ip.dont_fragment = Some(true),
        ("no-df", _) => ip.dont_fragment = Some(false),
        ("part", _) => ip.part = Some(part(cursor)?),
        ("ack", Body::Tcp(tcp)) => tcp.ack = Some(sequence(cursor)?),
        ("win", Body::Tcp(tcp)) => tcp.window = Some(cursor.field("window")?),
        ("urg", Body::Tcp(tcp)) => tcp.urgent = Some(cursor.field("urgent pointer")?),
        ("offset", Body::Tcp(tcp)) => tcp.offset = Some(cursor.expect_small("data offset")?),
        ("data", Body::Tcp(tcp)) => match cursor.text()? {
            Some(text) => tcp.payload = Payload::Text(text),
            None => return cursor.error("a text is missing"),
        },
        ("bad-checksum", Body::Tcp(tcp)) => tcp.checksum = Checksum::Bad,
        ("bad-checksum", Body::Udp(udp)) => udp.checksum = Checksum::Bad,
        ("no-checksum", Body::Udp(udp)) => udp.checksum = Checksum::Zero,
        ("length", Body::Udp(udp)) => udp.length = Some(cursor.expect_small("length")?),
        (word, _) => return cursor.error(format!("{word:?} is nothing that this packet has")),
    }
    Ok(())
}

/// Parses `part 0..1480 of 7`: a fragment of the packet with this identification.
fn part(cursor: &mut Cursor) -> Parsed<Part> {
    let start: u16 = cursor.expect_small("start")?;
    cursor.expect("..")?;
    let end: u16 = cursor.expect_small("end")?;
    cursor.expect("of")?;
    let identification = cursor.expect_small("identification")?;
    if end <= start || start & 7 != 0 {
        return cursor.error("a part begins at a multiple of eight, before its end");
    }
    Ok(Part {
        start: start.into(),
        end: end.into(),
        identification,
    })
}

fn options(cursor: &mut Cursor) -> Parsed<Vec<TcpOption>> {
    let mut options = Vec::new();
    if cursor.take(">") {
        return Ok(options);
    }
    loop {
        options.push(option(cursor)?);
        if cursor.take(">") {
            return Ok(options);
        }
        cursor.expect(",")?;
    }
}

fn option(cursor: &mut Cursor) -> Parsed<TcpOption> {
    Ok(match cursor.expect_word("an option")? {
        "mss" => TcpOption::Mss(cursor.field("MSS")?),
        "ws" => TcpOption::WindowScale(cursor.field("shift")?),
        "sackok" => TcpOption::SackPermitted,
        "sack" => TcpOption::Sack(sack_blocks(cursor)?),
        "ts" => {
            let value = cursor.field("timestamp")?;
            TcpOption::Timestamps(value, cursor.field("timestamp echo")?)
        }
        "fastopen" => {
            if cursor.take("*") {
                TcpOption::FastOpen(None)
            } else {
                TcpOption::FastOpen(Some(if cursor.take_word("request") {
                    Vec::new()
                } else {
                    cursor.bytes()?
                }))
            }
        }
        "nop" => TcpOption::Nop,
        "end" => TcpOption::End,
        "raw" => TcpOption::Raw(cursor.bytes()?),
        other => return cursor.error(format!("{other:?} is no option")),
    })
}

fn sack_blocks(cursor: &mut Cursor) -> Parsed<Vec<(Expression, Expression)>> {
    let mut blocks = Vec::new();
    while let Some(start) = cursor.expression()? {
        cursor.expect("..")?;
        blocks.push((start, cursor.expect_expression("the end of a block")?));
    }
    if blocks.is_empty() || blocks.len() > 4 {
        return cursor.error("one to four blocks are missing");
    }
    Ok(blocks)
}

/// Checks the properties that are allowed in one direction only.
fn check(cursor: &Cursor, packet: &Packet, direction: Direction) -> Parsed<()> {
    if let Body::Tcp(tcp) = &packet.body {
        let acknowledges = tcp.flags & 1 << 4 != 0;
        if acknowledges != tcp.ack.is_some() && (acknowledges || direction == Direction::Out) {
            return cursor.error("flag \".\" and \"ack\" belong together");
        }
    }
    if direction == Direction::Out {
        return match packet.ip.part {
            Some(_) => cursor.error("a fragment cannot be expected"),
            None => Ok(()),
        };
    }
    let known =
        |field: &Option<Field>| matches!(field, None | Some(Field::Compare(Comparison::Equal, _)));
    let told = match &packet.body {
        Body::Tcp(tcp) => {
            tcp.sequence != Sequence::Any
                && tcp.either == 0
                && tcp.ack != Some(Sequence::Any)
                && known(&tcp.window)
                && known(&tcp.urgent)
                && tcp.options.iter().flatten().all(is_told)
        }
        Body::Udp(udp) => udp.payload != Payload::Any,
        Body::Icmp(icmp) => !matches!(icmp.about, About::Tcp(Sequence::Any)),
    };
    if !told || !known(&packet.ip.ttl) || !known(&packet.ip.tos) {
        return cursor.error("a packet to be sent must be told in full");
    }
    Ok(())
}

fn is_told(option: &TcpOption) -> bool {
    let known = |field: &Field| matches!(field, Field::Compare(Comparison::Equal, _));
    match option {
        TcpOption::Mss(field) | TcpOption::WindowScale(field) => known(field),
        TcpOption::Timestamps(value, echo) => known(value) && known(echo),
        _ => true,
    }
}
