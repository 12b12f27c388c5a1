//! Guarantees as text, for commands and the configuration: `20mbit`, `4ms`, `64k`, `port udp:53`. A word is unambiguous
//! or refused; output can be used as input.

use core::fmt;
use core::net::SocketAddr;

use portolan_types::{FlowKey, Protocol, canonical};

use super::{Adapt, CpuForm, Kind, Scope};

#[cfg(test)]
mod tests;

/// A word that cannot be parsed, and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not {wanted}")]
pub struct Unreadable {
    pub word: String,
    pub wanted: &'static str,
}

const RATES: [(&str, u64); 4] = [
    ("gbit", 1_000_000_000),
    ("mbit", 1_000_000),
    ("kbit", 1_000),
    ("bit", 1),
];
const TIMES: [(&str, u64); 3] = [("s", 1_000_000), ("ms", 1_000), ("us", 1)];
const BYTES: [(&str, u64); 3] = [("m", 1 << 20), ("k", 1 << 10), ("", 1)];
const SHARES: [(&str, u64); 2] = [("%", 10_000), ("", 1_000_000)];

/// Parses a rate; bits per second.
pub fn rate(word: &str) -> Result<u64, Unreadable> {
    quantity(word, &RATES).ok_or_else(|| {
        unreadable(
            word,
            "a rate: a number and bit, kbit, mbit or gbit, such as 20mbit",
        )
    })
}

/// Parses a duration; microseconds.
pub fn duration(word: &str) -> Result<u32, Unreadable> {
    narrow(quantity(word, &TIMES)).ok_or_else(|| {
        unreadable(
            word,
            "a time: a number and us, ms or s, up to 4294s, such as 4ms",
        )
    })
}

/// Parses a duration; milliseconds.
pub fn milliseconds(word: &str) -> Result<u32, Unreadable> {
    let whole = duration(word).ok().filter(|us| us.is_multiple_of(1_000));
    whole
        .map(|us| us / 1_000)
        .ok_or_else(|| unreadable(word, "a time in whole milliseconds, such as 50ms"))
}

/// Parses a size; bytes.
pub fn bytes(word: &str) -> Result<u32, Unreadable> {
    narrow(quantity(word, &BYTES)).ok_or_else(|| {
        unreadable(
            word,
            "a size: bytes below 4096m, alone or with k or m for 1024 or 1048576 of them",
        )
    })
}

/// Parses a share of a CPU; millionths.
pub fn share(word: &str) -> Result<u32, Unreadable> {
    narrow(quantity(word, &SHARES)).ok_or_else(|| {
        unreadable(
            word,
            "a share of a CPU in millionths at the finest, such as 0.3 or 30%",
        )
    })
}

/// Parses `off`, `propose`, or the limits between which a rate may be changed.
pub fn adapt(word: &str) -> Result<Adapt, Unreadable> {
    let limits = || {
        let (least, most) = word.split_once('-')?;
        let (least_ppm, most_ppm) = (share(least).ok()?, share(most).ok()?);
        (least_ppm <= most_ppm).then_some(Adapt::Auto {
            least_ppm,
            most_ppm,
        })
    };
    match word {
        "off" => Ok(Adapt::Off),
        "propose" => Ok(Adapt::Propose),
        _ => limits().ok_or_else(|| {
            unreadable(
                word,
                "off, propose, or the least and the greatest rate, such as 0.1-0.5",
            )
        }),
    }
}

/// Parses a local port: `tcp:80`.
pub fn port(word: &str) -> Result<Scope, Unreadable> {
    let read = || {
        let (protocol, port) = with_protocol(word)?;
        let port = digits(port)?.parse().ok().filter(|port| *port != 0)?;
        Some(Scope::Port { protocol, port })
    };
    read().ok_or_else(|| unreadable(word, "a port, such as udp:53"))
}

/// Parses a connection, this host's end first: `tcp:10.0.0.1:80-10.0.0.2:4000`.
pub fn flow(word: &str) -> Result<Scope, Unreadable> {
    let read = || {
        let (protocol, ends) = with_protocol(word)?;
        let (local, remote) = ends.split_once('-')?;
        let end = |text: &str| text.parse::<SocketAddr>().ok().map(canonical);
        Some(Scope::Flow(FlowKey {
            protocol,
            local: end(local)?,
            remote: end(remote)?,
        }))
    };
    read().ok_or_else(|| {
        unreadable(
            word,
            "a flow, this host's end first, such as tcp:10.0.0.1:80-10.0.0.2:4000 or udp:[fd00::1]:53-[fd00::2]:4000",
        )
    })
}

/// Parses a path below `/sys/fs/cgroup`.
pub fn cgroup(word: &str) -> Result<Scope, Unreadable> {
    let is_path = word.starts_with('/') && !word.split('/').any(|part| part == "..");
    if !is_path || word.chars().any(char::is_control) {
        return Err(unreadable(
            word,
            "a cgroup: its path below /sys/fs/cgroup, such as /video.slice",
        ));
    }
    let path = word.trim_end_matches('/');
    Ok(Scope::Cgroup(
        if path.is_empty() { "/" } else { path }.to_owned(),
    ))
}

/// Parses a user, by a name known to `number_of`, or by number.
pub fn user(word: &str, number_of: impl Fn(&str) -> Option<u32>) -> Result<Scope, Unreadable> {
    let number = || digits(word)?.parse().ok().filter(|uid| *uid != u32::MAX);
    let uid = number_of(word).or_else(number);
    uid.map(|uid| Scope::User { uid })
        .ok_or_else(|| unreadable(word, "a user of this host"))
}

/// Parses the ID of a process or thread.
pub fn process(word: &str) -> Result<u32, Unreadable> {
    let number = digits(word).and_then(|word| word.parse().ok());
    number
        .filter(|number| (1..=1 << 22).contains(number))
        .ok_or_else(|| unreadable(word, "the number of a process or thread"))
}

/// Parses a number with one of `units`; returns it in the smallest unit. Fractions are accepted if the result is whole.
fn quantity(word: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = word
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(word.len());
    let (number, unit) = word.split_at(end);
    let scale = units.iter().find(|(name, _)| *name == unit)?.1;
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (digits(whole)?, digits(fraction)?),
        None => (digits(number)?, ""),
    };
    if whole.len() + fraction.len() > 20 {
        return None;
    }
    let number: u128 = format!("{whole}{fraction}").parse().ok()?;
    let parts = 10_u128.pow(fraction.len().try_into().ok()?);
    let scaled = number * u128::from(scale);
    scaled
        .is_multiple_of(parts)
        .then(|| u64::try_from(scaled / parts).ok())?
}

fn narrow(value: Option<u64>) -> Option<u32> {
    value.and_then(|value| value.try_into().ok())
}

/// Accepts only digits, at least one: `parse` alone would accept a sign.
fn digits(word: &str) -> Option<&str> {
    (!word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())).then_some(word)
}

fn with_protocol(word: &str) -> Option<(Protocol, &str)> {
    let (protocol, rest) = word.split_once(':')?;
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return None,
    };
    Some((protocol, rest))
}

fn unreadable(word: &str, wanted: &'static str) -> Unreadable {
    Unreadable {
        word: word.to_owned(),
        wanted,
    }
}

/// Formats a rate as [`rate`] parses it.
pub fn show_rate(bits: u64) -> String {
    show(bits, &RATES)
}

/// Formats a duration as [`duration`] parses it.
pub fn show_duration(us: u32) -> String {
    show(us.into(), &TIMES)
}

/// Formats a size as [`bytes`] parses it.
pub fn show_bytes(bytes: u32) -> String {
    let whole = |(_, scale): &&(&str, u64)| bytes != 0 && u64::from(bytes).is_multiple_of(*scale);
    let (unit, scale) = BYTES.iter().find(whole).unwrap_or(&BYTES[2]);
    format!("{}{unit}", u64::from(bytes) / scale)
}

/// Formats a share as [`share`] parses it.
pub fn show_share(ppm: u64) -> String {
    decimal(ppm, 1_000_000)
}

/// Formats a value in the largest unit that does not exceed it.
fn show(value: u64, units: &[(&str, u64)]) -> String {
    let fits = |(_, scale): &&(&str, u64)| value >= *scale;
    let (unit, scale) = units.iter().find(fits).or(units.last()).unwrap_or(&("", 1));
    format!("{}{unit}", decimal(value, *scale))
}

/// Formats `value / scale`; `scale` is a power of ten.
fn decimal(value: u64, scale: u64) -> String {
    let (whole, rest) = (value / scale, value % scale);
    if rest == 0 {
        return whole.to_string();
    }
    let places = scale.ilog10() as usize;
    let fraction = format!("{rest:0places$}");
    format!("{whole}.{}", fraction.trim_end_matches('0'))
}

/// The format of commands.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Flow(flow) => write!(f, "flow {}:{}-{}", flow.protocol, flow.local, flow.remote),
            Scope::Port { protocol, port } => write!(f, "port {protocol}:{port}"),
            Scope::Process { pid } => write!(f, "pid {pid}"),
            Scope::Thread { tid } => write!(f, "tid {tid}"),
            Scope::Cgroup(path) => write!(f, "cgroup {path}"),
            Scope::User { uid } => write!(f, "user {uid}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Transmit => "tx",
            Kind::Receive => "rx",
            Kind::Cpu => "cpu",
        })
    }
}

impl fmt::Display for Adapt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Adapt::Off => f.pad("off"),
            Adapt::Propose => f.pad("propose"),
            Adapt::Auto {
                least_ppm,
                most_ppm,
            } => {
                let [least, most] = [least_ppm, most_ppm].map(|ppm| show_share(ppm.into()));
                write!(f, "{least}-{most}")
            }
        }
    }
}

impl fmt::Display for CpuForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CpuForm::Deadline => f.pad("deadline"),
            CpuForm::Weaker { form, .. } => f.pad(form),
        }
    }
}
