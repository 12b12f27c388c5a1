//! A script as data, as produced by the parser and played by the runner.

mod calls;
mod cursor;
mod load;
mod packet;
mod parse;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use calls::{ArgumentKind, CALLS, Signature};
pub use load::{LoadError, load};
pub use parse::parse;

/// A script.
#[derive(Clone, Debug)]
pub struct Script {
    /// The comment at its head.
    pub about: String,
    /// IP versions it runs over.
    pub families: Vec<Family>,
    /// Kernel parameters of the namespace while it runs.
    pub sysctls: Vec<(String, String)>,
    pub steps: Vec<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "v4",
            Family::V6 => "v6",
        })
    }
}

/// A position in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: Arc<str>,
    pub line: usize,
    pub text: Arc<str>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.text)
    }
}

/// A syntax error and its position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    pub line: usize,
    pub column: usize,
    pub message: String,
}

#[derive(Clone, Debug)]
pub struct Step {
    pub place: Place,
    pub time: Time,
    pub action: Action,
}

/// Time relative to the previous step: an action is performed at the earliest time; an expectation must be
/// fulfilled between the two.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Time {
    pub earliest: Duration,
    /// None: the runner's time limit applies.
    pub latest: Option<Duration>,
}

#[derive(Clone, Debug)]
pub enum Action {
    Inject(Packet),
    Expect(Packet),
    /// The packet may arrive before the next step.
    Allow(Packet),
    /// No packet arrives for this long.
    Quiet(Duration),
    Call {
        call: Call,
        result: Outcome,
    },
    /// Starts a call that may block, under a name.
    Start {
        name: String,
        call: Call,
    },
    /// The started call has returned.
    Await {
        name: String,
        result: Outcome,
    },
    /// The started call has not returned.
    Pending(String),
}

#[derive(Clone, Debug)]
pub struct Call {
    pub name: &'static str,
    pub arguments: Vec<Argument>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    Number(Expression),
    Text(Vec<u8>),
    Words(Vec<String>),
}

/// The expected outcome of a call.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Any value, but no error.
    Success,
    Any,
    Number(Field),
    Errno(String),
    Text(Vec<u8>),
    /// Events of poll, in any order.
    Words(Vec<String>),
    /// A number, which the script can refer to by this name afterwards.
    Named(String),
}

/// A number in a script.
#[derive(Clone, Debug, PartialEq)]
pub struct Expression {
    pub base: Base,
    pub plus: i64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Base {
    Number(i64),
    Variable(String),
    /// The largest segment on the link without options.
    Mss,
    /// The last timestamp that the stack under test has sent.
    Timestamp,
}

/// The expected value of a number in a packet.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    Any,
    Compare(Comparison, Expression),
    /// Any value, which the script can refer to by this name afterwards.
    Capture(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// A packet to send, or one to expect.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The pair of ports; empty for the flow without a name.
    pub flow: String,
    pub ip: Ip,
    pub body: Body,
}

/// The properties of the IP header that a script states.
#[derive(Clone, Debug, Default)]
pub struct Ip {
    pub ttl: Option<Field>,
    /// Traffic class, ECN bits included.
    pub tos: Option<Field>,
    pub dont_fragment: Option<bool>,
    /// Send only these bytes of the IP payload, as a fragment.
    pub part: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub start: usize,
    pub end: usize,
    pub identification: u16,
}

#[derive(Clone, Debug)]
pub enum Body {
    Tcp(Tcp),
    Udp(Udp),
    Icmp(Icmp),
}

#[derive(Clone, Debug)]
pub struct Tcp {
    pub flags: u16,
    /// Flags that may be set or clear.
    pub either: u16,
    pub sequence: Sequence,
    pub payload: Payload,
    pub ack: Option<Sequence>,
    pub window: Option<Field>,
    pub urgent: Option<Field>,
    /// None: not checked in expectations, absent in sent packets.
    pub options: Option<Vec<TcpOption>>,
    pub checksum: Checksum,
    /// An invalid data offset, in words.
    pub offset: Option<u8>,
}

/// A sequence number of a packet.
#[derive(Clone, Debug, PartialEq)]
pub enum Sequence {
    Any,
    /// Relative to the sender's initial sequence number.
    Relative(Expression),
    /// The number in the packet itself.
    Absolute(Expression),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Payload {
    /// A number of bytes of the sender's stream, which is a pattern.
    Stream(Expression),
    /// The bytes between two sequence numbers.
    Span(Expression, Expression),
    Text(Vec<u8>),
    Any,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Checksum {
    #[default]
    Good,
    Bad,
    Zero,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TcpOption {
    Mss(Field),
    WindowScale(Field),
    SackPermitted,
    Sack(Vec<(Expression, Expression)>),
    Timestamps(Field, Field),
    /// None: any cookie.
    FastOpen(Option<Vec<u8>>),
    Nop,
    End,
    /// Literal bytes.
    Raw(Vec<u8>),
}

#[derive(Clone, Debug)]
pub struct Udp {
    pub payload: Payload,
    pub checksum: Checksum,
    /// An invalid length field.
    pub length: Option<u16>,
}

/// An ICMP error about a packet of a flow.
#[derive(Clone, Debug)]
pub struct Icmp {
    pub kind: IcmpKind,
    pub about: About,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpKind {
    NetUnreachable,
    HostUnreachable,
    ProtocolUnreachable,
    PortUnreachable,
    Prohibited,
    TooBig(u32),
    SourceQuench,
    TimeExceeded,
    ParameterProblem,
}

#[derive(Clone, Debug)]
pub enum About {
    Tcp(Sequence),
    Udp,
}
