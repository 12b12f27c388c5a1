//! The calls that a script can make, and their arguments.

/// The kind of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentKind {
    /// A number; a descriptor is the name that `x = socket(…)` gave it.
    Number,
    /// `"text"`, or a number of bytes of the pattern.
    Data,
    /// A word, or several joined by `|`.
    Words,
    /// A number, a text or words, depending on the option.
    Value,
}

#[derive(Debug)]
pub struct Signature {
    pub name: &'static str,
    pub needed: &'static [ArgumentKind],
    pub optional: &'static [ArgumentKind],
}

use ArgumentKind::{Data, Number, Value, Words};

const fn call(
    name: &'static str,
    needed: &'static [ArgumentKind],
    optional: &'static [ArgumentKind],
) -> Signature {
    Signature {
        name,
        needed,
        optional,
    }
}

pub const CALLS: &[Signature] = &[
    call("socket", &[Words], &[]),
    call("bind", &[Number, Words], &[]),
    call("listen", &[Number, Number], &[]),
    call("connect", &[Number], &[Words]),
    call("disconnect", &[Number], &[]),
    call("accept", &[Number], &[]),
    call("nonblock", &[Number], &[]),
    call("send", &[Number, Data], &[Words]),
    call("sendto", &[Number, Words, Data], &[Words]),
    call("recv", &[Number, Number], &[Words]),
    call("recvmsg", &[Number, Number], &[Words]),
    call("shutdown", &[Number, Words], &[]),
    call("close", &[Number], &[]),
    call("exit", &[], &[]),
    call("setsockopt", &[Number, Words, Value], &[Number]),
    call("getsockopt", &[Number, Words], &[]),
    call("tcp_info", &[Number, Words], &[]),
    call("ioctl", &[Number, Words], &[]),
    call("poll", &[Number, Words], &[Number]),
    call("watch_urgent", &[Number], &[]),
    call("urgent_signals", &[], &[]),
];

pub(super) fn signature(name: &str) -> Option<&'static Signature> {
    CALLS.iter().find(|signature| signature.name == name)
}
