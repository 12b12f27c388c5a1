//! Every combination of control bits, in every state, inside and outside the window, with every
//! kind of acknowledgement: the engine does what RFC 9293 §3.10.7 and RFC 5961 specify. The expectations
//! are written from the rules of the RFCs, not from the engine.

use portolan_sim::{IRS, ISS, START, STATES, begin, segment};
use portolan_tcp::{Connection, Events, ListenAnswer, StateName, judge_at_listener, reset_for};
use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

const NOW: Instant = START;

const FIN: TcpFlags = TcpFlags::FIN;
const SYN: TcpFlags = TcpFlags::SYN;
const RST: TcpFlags = TcpFlags::RST;
const ACK: TcpFlags = TcpFlags::ACK;
const URG: TcpFlags = TcpFlags::URG;

/// The position of a segment relative to RCV.NXT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seq {
    Next,
    /// Inside the window, with a gap before it.
    Ahead,
    /// All of it was received before.
    Old,
    Beyond,
}

/// The acknowledgement number of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ack {
    /// SND.NXT: all that was sent.
    All,
    /// SND.UNA: nothing new.
    Nothing,
    /// Data that was never sent.
    TooMuch,
    /// Older than RFC 5961 §5.2 accepts.
    TooOld,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    state: StateName,
    flags: TcpFlags,
    seq: Seq,
    ack: Ack,
    text: bool,
}

/// A segment that the connection sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Nothing,
    /// <SEQ=SND.NXT><ACK=RCV.NXT><CTL=ACK>
    Ack,
    /// <SEQ=ISS><ACK=RCV.NXT><CTL=SYN,ACK>
    SynAck,
    /// <SEQ=SEG.ACK><CTL=RST>
    Reset,
}

#[derive(PartialEq, Eq, Debug)]
struct Outcome {
    state: StateName,
    answer: Answer,
    /// Data was delivered to the user.
    delivered: bool,
    /// The user was notified of urgent data.
    urgent: bool,
}

impl Case {
    fn has(&self, flag: TcpFlags) -> bool {
        self.flags.contains(flag)
    }

    fn outcome(&self, state: StateName, answer: Answer) -> Outcome {
        Outcome {
            state,
            answer,
            delivered: false,
            urgent: false,
        }
    }

    fn stays(&self, answer: Answer) -> Outcome {
        self.outcome(self.state, answer)
    }

    /// Returns the outcome that the RFCs specify.
    fn expected(&self) -> Outcome {
        match self.state {
            StateName::SynSent => self.expected_in_syn_sent(),
            _ => self.expected_otherwise(),
        }
    }

    /// §3.10.7.3.
    fn expected_in_syn_sent(&self) -> Outcome {
        // First: "If SEG.ACK =< ISS or SEG.ACK > SND.NXT, send a reset (unless the RST bit is set".
        // SND.UNA is ISS.
        let acceptable = self.has(ACK) && self.ack == Ack::All;
        if self.has(ACK) && !acceptable {
            let answer = if self.has(RST) {
                Answer::Nothing
            } else {
                Answer::Reset
            };
            return self.stays(answer);
        }
        // Second.
        if self.has(RST) {
            return if acceptable {
                self.outcome(StateName::Closed, Answer::Nothing)
            } else {
                self.stays(Answer::Nothing)
            };
        }
        // Fourth. Data and controls beside a SYN without ACK must be retransmitted by their sender.
        if !self.has(SYN) {
            return self.stays(Answer::Nothing);
        }
        if !acceptable {
            return self.outcome(StateName::SynReceived, Answer::SynAck);
        }
        let state = if self.has(FIN) {
            StateName::CloseWait
        } else {
            StateName::Established
        };
        Outcome {
            state,
            answer: Answer::Ack,
            delivered: self.text,
            urgent: self.has(URG),
        }
    }

    /// §3.10.7.4.
    fn expected_otherwise(&self) -> Outcome {
        // First: sequence number.
        if matches!(self.seq, Seq::Old | Seq::Beyond) {
            let answer = if self.has(RST) {
                Answer::Nothing
            } else {
                Answer::Ack
            };
            return self.stays(answer);
        }
        // Second: RFC 5961 §3.2 – only the exact sequence number resets.
        if self.has(RST) {
            return match self.seq {
                Seq::Next => self.outcome(StateName::Closed, Answer::Nothing),
                _ => self.stays(Answer::Ack),
            };
        }
        // Fourth: a passive open returns to LISTEN; otherwise RFC 5961 §4.2, whatever the sequence number.
        if self.has(SYN) {
            return match self.state {
                StateName::SynReceived => self.outcome(StateName::Closed, Answer::Nothing),
                _ => self.stays(Answer::Ack),
            };
        }
        // Fifth.
        if !self.has(ACK) {
            return self.stays(Answer::Nothing);
        }
        let acknowledged = match self.ack {
            Ack::All => true,
            // SYN-RECEIVED accepts SND.UNA < SEG.ACK =< SND.NXT.
            _ if self.state == StateName::SynReceived => return self.stays(Answer::Reset),
            Ack::Nothing => false,
            // "send an ACK, drop the segment"; RFC 5961 §5.2.
            Ack::TooMuch | Ack::TooOld => return self.stays(Answer::Ack),
        };
        let state = match (self.state, acknowledged) {
            (StateName::SynReceived, _) => StateName::Established,
            (StateName::FinWait1, true) => StateName::FinWait2,
            (StateName::Closing, true) => StateName::TimeWait,
            (StateName::LastAck, true) => return self.outcome(StateName::Closed, Answer::Nothing),
            (state, _) => state,
        };
        self.expected_of_text(state)
    }

    /// Sixth to eighth, in the state that the acknowledgement led to.
    fn expected_of_text(&self, state: StateName) -> Outcome {
        let receives = matches!(
            state,
            StateName::Established | StateName::FinWait1 | StateName::FinWait2
        );
        let in_order = self.seq == Seq::Next;
        let finished = self.has(FIN) && in_order;
        let after = match state {
            StateName::Established if finished => StateName::CloseWait,
            StateName::FinWait1 if finished => StateName::Closing,
            StateName::FinWait2 if finished => StateName::TimeWait,
            _ => state,
        };
        let answered = self.has(FIN) || (self.text && receives);
        Outcome {
            state: after,
            answer: if answered {
                Answer::Ack
            } else {
                Answer::Nothing
            },
            delivered: self.text && in_order && receives,
            urgent: self.has(URG) && receives,
        }
    }
}

type Step = fn(&mut Subject);

/// A connection in a given state, and the numbers that its peer uses next.
struct Subject {
    connection: Connection,
    next: SeqNum,
    una: SeqNum,
    nxt: SeqNum,
}

impl Subject {
    fn in_state(state: StateName) -> Subject {
        let (connection, next) = begin(state);
        let mut subject = Subject {
            connection,
            next,
            una: ISS,
            nxt: ISS + 1,
        };
        subject.connection.options().urgent_inline = true;
        subject.drain();
        if !matches!(state, StateName::SynSent | StateName::SynReceived) {
            subject.hear(ACK);
        }
        let (close, ack, fin): (Step, Step, Step) = (
            |s| {
                s.connection.shutdown_send(NOW);
                s.drain();
                s.nxt += 1;
            },
            |s| s.hear(ACK),
            |s| {
                s.hear_without_progress(ACK.with(FIN));
                s.next += 1;
            },
        );
        let path: &[Step] = match state {
            StateName::FinWait1 => &[close],
            StateName::FinWait2 => &[close, ack],
            StateName::CloseWait => &[fin],
            StateName::Closing => &[close, fin],
            StateName::LastAck => &[fin, close],
            StateName::TimeWait => &[close, ack, fin],
            _ => &[],
        };
        for step in path {
            step(&mut subject);
        }
        assert_eq!(subject.connection.state(), state);
        subject.connection.events();
        subject
    }

    fn hear(&mut self, flags: TcpFlags) {
        self.una = self.nxt;
        self.hear_without_progress(flags);
    }

    fn hear_without_progress(&mut self, flags: TcpFlags) {
        let mut header = segment(2, 1, self.next, flags);
        header.ack = self.una;
        self.connection.on_segment(NOW, &header, &[]);
        self.drain();
    }

    fn drain(&mut self) {
        while self.connection.transmit(NOW).is_some() {}
    }

    fn header(&self, case: &Case) -> TcpHeader {
        let seq = match case.seq {
            Seq::Next => self.next,
            Seq::Ahead => self.next + 10,
            Seq::Old => self.next - 100,
            Seq::Beyond => self.next + 1_000_000,
        };
        let mut header = segment(2, 1, seq, case.flags);
        header.ack = match case.ack {
            Ack::All => self.nxt,
            Ack::Nothing => self.una,
            Ack::TooMuch => self.nxt + 100,
            Ack::TooOld => self.una - 0x20000,
        };
        if case.has(URG) {
            header.urgent = 1;
        }
        header
    }

    fn observe(mut self, case: &Case) -> Outcome {
        let header = self.header(case);
        let text: &[u8] = if case.text { b"text" } else { b"" };
        self.connection.on_segment(NOW, &header, text);
        let answer = self.answer(&header);
        let events = self.connection.events();
        Outcome {
            state: self.connection.state(),
            answer,
            delivered: self.connection.readable() > 0,
            urgent: events.contains(Events::URGENT),
        }
    }

    /// Returns the single segment sent in response, which must be one of those in the RFCs.
    fn answer(&mut self, received: &TcpHeader) -> Answer {
        let Some(sent) = self.connection.transmit(NOW) else {
            return Answer::Nothing;
        };
        let sent = sent.header;
        assert!(self.connection.transmit(NOW).is_none(), "two answers");
        match sent.flags {
            ACK => {
                assert_eq!(sent.seq, self.nxt, "SEQ=SND.NXT");
                Answer::Ack
            }
            TcpFlags(0x12) => {
                assert_eq!((sent.seq, sent.ack), (ISS, received.seq + 1));
                Answer::SynAck
            }
            RST => {
                assert_eq!(sent.seq, received.ack, "SEQ=SEG.ACK");
                Answer::Reset
            }
            other => panic!("sent {other:?}"),
        }
    }
}

fn all_flags() -> impl Iterator<Item = TcpFlags> {
    (0..64).map(TcpFlags)
}

#[test]
fn every_segment_in_every_state_does_what_the_rfcs_say() {
    let mut judged = 0;
    let mut wrong = Vec::new();
    for state in STATES {
        for flags in all_flags() {
            for seq in [Seq::Next, Seq::Ahead, Seq::Old, Seq::Beyond] {
                for ack in [Ack::All, Ack::Nothing, Ack::TooMuch, Ack::TooOld] {
                    for text in [false, true] {
                        let case = Case {
                            state,
                            flags,
                            seq,
                            ack,
                            text,
                        };
                        let (expected, found) =
                            (case.expected(), Subject::in_state(state).observe(&case));
                        judged += 1;
                        if expected != found {
                            wrong.push(format!("{case:?}\n  {expected:?}\n  {found:?}"));
                        }
                    }
                }
            }
        }
    }
    assert_eq!(judged, 9 * 64 * 4 * 4 * 2);
    let shown: Vec<&String> = wrong.iter().take(8).collect();
    assert!(wrong.is_empty(), "{} of {judged}: {shown:#?}", wrong.len());
}

/// §3.10.7.2, except for a FIN in the SYN, which opens no connection, as on Linux.
#[test]
fn every_segment_at_a_listener_does_what_the_rfc_says() {
    for flags in all_flags() {
        let expected = match (
            flags.contains(RST),
            flags.contains(ACK),
            flags.contains(SYN) && !flags.contains(FIN),
        ) {
            (true, _, _) | (false, false, false) => ListenAnswer::Ignore,
            (false, true, _) => ListenAnswer::Reset,
            (false, false, true) => ListenAnswer::Open,
        };
        let found = judge_at_listener(&segment(2, 1, IRS, flags));
        assert_eq!(found, expected, "{flags:?}");
    }
}

/// §3.10.7.1.
#[test]
fn every_segment_without_a_connection_does_what_the_rfc_says() {
    for flags in all_flags() {
        for length in [0, 4] {
            let mut header = segment(2, 1, IRS, flags);
            header.ack = ISS;
            let found = reset_for(&header, length);
            if flags.contains(RST) {
                assert_eq!(found, None, "{flags:?}");
                continue;
            }
            let found = found.expect("all but a reset are answered");
            if flags.contains(ACK) {
                assert_eq!((found.seq, found.flags), (ISS, RST), "{flags:?}");
            } else {
                let controls = u32::from(flags.contains(SYN)) + u32::from(flags.contains(FIN));
                let end = IRS + length as u32 + controls;
                assert_eq!(
                    (found.seq, found.ack, found.flags),
                    (SeqNum(0), end, RST.with(ACK)),
                    "{flags:?}"
                );
            }
        }
    }
}
