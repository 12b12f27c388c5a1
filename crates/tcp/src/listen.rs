//! What a segment means to a listener (RFC 9293 §3.10.7.2).

use portolan_wire::tcp::{TcpFlags, TcpHeader};

/// The answer of state LISTEN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ListenAnswer {
    /// Nothing: a reset, a segment that opens nothing and acknowledges nothing, or a SYN with a FIN.
    Ignore,
    /// It acknowledges what a listener never sent; but it may return a cookie.
    Reset,
    /// A connection begins.
    Open,
}

/// RFC 9293 §3.10.7.2: RST, ACK and SYN, in this order. The RFC would leave a FIN beside the SYN for
/// its sender to repeat; as Linux, this takes it for a probe, which it is today.
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
