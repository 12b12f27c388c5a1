//! The urgent mark as Linux treats it: one byte "out of band", located by the BSD reading of the
//! urgent pointer (it points behind that byte; RFC 9293 §3.8.5, RFC 6093 §2).

use portolan_types::SeqNum;

use crate::encoding;

/// The urgent byte in the receive queue that the peer's urgent pointer names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Urgent {
    /// Sequence number of the urgent byte.
    pub(crate) seq: SeqNum,
    /// The user has read the byte out of band.
    pub(crate) taken: bool,
}

encoding::fields!(Urgent { seq, taken });

/// How the user reads the urgent byte (`SO_OOBINLINE`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UrgentMark {
    /// In the stream.
    Inline,
    /// Separately, out of band.
    Aside,
}

/// How a read treats the mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    /// Urgent bytes to skip before the read.
    pub(crate) skip: usize,
    /// Bytes that one read may return.
    pub(crate) len: usize,
}

impl Urgent {
    /// The part of `queued` bytes from `head` on that a read may return: it ends at the mark, and
    /// includes the urgent byte only if that is read in-line.
    pub(crate) fn span(self, head: SeqNum, queued: usize, place: UrgentMark) -> Span {
        let before = self.seq.distance(head);
        match usize::try_from(before) {
            // The reader is past the mark.
            Err(_) => Span {
                skip: 0,
                len: queued,
            },
            Ok(0) if place == UrgentMark::Inline || queued == 0 => Span {
                skip: 0,
                len: queued,
            },
            Ok(0) => Span {
                skip: 1,
                len: queued - 1,
            },
            Ok(before) => Span {
                skip: 0,
                len: queued.min(before),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(seq: u32) -> Urgent {
        Urgent {
            seq: SeqNum(seq),
            taken: false,
        }
    }

    #[test]
    fn a_read_stops_at_the_mark_and_then_steps_over_the_byte() {
        let span = |head, place| mark(10).span(SeqNum(head), 8, place);
        assert_eq!(span(5, UrgentMark::Aside), Span { skip: 0, len: 5 });
        assert_eq!(span(10, UrgentMark::Aside), Span { skip: 1, len: 7 });
        assert_eq!(span(10, UrgentMark::Inline), Span { skip: 0, len: 8 });
        assert_eq!(span(11, UrgentMark::Aside), Span { skip: 0, len: 8 });
        assert_eq!(span(0, UrgentMark::Aside), Span { skip: 0, len: 8 });
    }

    #[test]
    fn an_byte_that_is_not_here_yet_is_not_stepped_over() {
        assert_eq!(
            mark(10).span(SeqNum(10), 0, UrgentMark::Aside),
            Span { skip: 0, len: 0 }
        );
    }
}
