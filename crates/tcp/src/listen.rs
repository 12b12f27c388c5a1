//! Classification of segments that arrive at a listener (RFC 9293 §3.10.7.2).

use portolan_wire::tcp::{TcpFlags, TcpHeader};

/// The action of a listener in state LISTEN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ListenAnswer {
    /// No answer: a reset, a segment that neither opens nor acknowledges anything, or a SYN with a FIN.
    Ignore,
    /// It acknowledges something never sent; but it may return a cookie.
    Reset,
    /// A connection is opened.
    Open,
}

/// Does a listener open a connection for the segment?
pub fn opens_connection(header: &TcpHeader) -> bool {
    judge_at_listener(header) == ListenAnswer::Open
}

/// RFC 9293 §3.10.7.2: RST, ACK and SYN, in this order. The RFC would ignore a FIN beside the SYN until its sender
/// repeats it; like Linux, this treats such a segment as a probe, which it nowadays is.
pub fn judge_at_listener(header: &TcpHeader) -> ListenAnswer {
    let has = |flag| header.flags.contains(flag);
    if has(TcpFlags::RST) {
        ListenAnswer::Ignore
    } else if has(TcpFlags::ACK) {
        ListenAnswer::Reset
    } else if has(TcpFlags::SYN) && !has(TcpFlags::FIN) {
        ListenAnswer::Open
    } else {
        ListenAnswer::Ignore
    }
}
