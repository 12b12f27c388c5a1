//! The common interface of a TCP connection and an end of a local session: all that the socket
//! layer needs of a stream. The call contract is [`Connection`]'s: the peer sees the effect of
//! `send`, `recv`, `shutdown_send`, `close` and `abort` once the owner has sent the output.

use portolan_tcp::{
    Connection, EVENTS_MAX, Error, Options, OutOfBand, RunningTimer, SendSpace, StateName, TcpInfo,
};
use portolan_types::Instant;

/// Declares the trait, and implements it for [`Connection`] by its methods of the same names. A
/// receiver is written `mut self` or `ref self`.
macro_rules! streams {
    ($($(#[$doc:meta])* fn $name:ident(
        $(mut $changed:ident)? $(ref $read:ident)? $(, $argument:ident: $type:ty)*
    ) $(-> $result:ty)?;)*) => {
        /// A byte stream with TCP's semantics.
        pub trait Stream {
            $($(#[$doc])*
            fn $name($(&mut $changed)? $(&$read)? $(, $argument: $type)*) $(-> $result)?;)*
        }

        impl Stream for Connection {
            $(fn $name($(&mut $changed)? $(&$read)? $(, $argument: $type)*) $(-> $result)? {
                Connection::$name($($changed)? $($read)? $(, $argument)*)
            })*
        }
    };
}

streams! {
    /// Queues bytes. Returns how many were accepted.
    fn send(mut self, now: Instant, data: &[u8]) -> usize;
    /// Marks the last sent byte as urgent.
    fn mark_urgent(mut self);
    /// Ends a record with the last sent byte.
    fn end_record(mut self);
    /// Sends data that waits for more, even if the stream is corked.
    fn push(mut self);
    /// Returns how many bytes `send` would accept now.
    fn send_space(ref self) -> usize;
    /// Moves received bytes to `out`. Returns how many.
    fn recv(mut self, now: Instant, out: &mut [u8]) -> usize;
    /// Copies bytes from `offset` on, without consuming them.
    fn peek(ref self, offset: usize, out: &mut [u8]) -> usize;
    /// Returns how many bytes `recv` would return.
    fn readable(ref self) -> usize;
    /// Are at least `receive_low_water` bytes readable?
    fn is_readable(ref self) -> bool;
    /// The value of `FIONREAD`.
    fn inquiry(ref self) -> usize;
    /// Is a good part of the send buffer free? If not, an event will report when it is.
    fn poll_writable(mut self) -> bool;
    /// Is there output that the peer has not received?
    fn has_output(ref self) -> bool;
    /// When payload arrived last.
    fn last_text_at(ref self) -> Instant;

    fn is_at_mark(ref self) -> bool;
    fn has_urgent(ref self) -> bool;
    fn peek_urgent(ref self) -> OutOfBand;
    fn take_urgent(mut self) -> OutOfBand;

    fn shutdown_send(mut self, now: Instant);
    fn shutdown_receive(mut self);
    fn close(mut self, now: Instant);
    fn abort(mut self, now: Instant);

    fn ack_quickly(mut self);
    fn ack_lazily(mut self);

    fn state(ref self) -> StateName;
    fn is_send_closed(ref self) -> bool;
    fn is_receive_shut(ref self) -> bool;
    fn is_receive_finished(ref self) -> bool;
    /// Has the end of the peer's stream been read?
    fn has_read_end(ref self) -> bool;
    fn is_closed(ref self) -> bool;
    fn is_flushed(ref self) -> bool;
    fn error(ref self) -> Option<Error>;
    fn take_error(mut self) -> Option<Error>;

    fn options(mut self) -> &mut Options;
    fn set_send_buffer(mut self, bytes: usize);
    fn set_receive_buffer(mut self, bytes: usize);
    fn tcp_info(ref self) -> TcpInfo;
    /// The timer that `ss -o` shows, and when it is due.
    fn running_timer(ref self) -> Option<(RunningTimer, Instant)>;
    fn edges(ref self) -> SendSpace;
    fn counts(ref self) -> &[u32; EVENTS_MAX];
    fn retransmissions_in_flight(ref self) -> u32;
}
