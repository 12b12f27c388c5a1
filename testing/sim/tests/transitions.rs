//! A snapshot of the state table: the effect of each event on a connection in each state.

use core::time::Duration;
use std::fmt::Write;

use portolan_sim::{ISS, START, STATES, begin, segment};
use portolan_tcp::{Connection, StateName};
use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::TcpFlags;

const NOW: Instant = START;
const SYN: TcpFlags = TcpFlags::SYN;
const ACK: TcpFlags = TcpFlags::ACK;
const FIN: TcpFlags = TcpFlags::FIN.with(ACK);

/// A connection, and the numbers that its peer uses next.
struct Subject {
    connection: Connection,
    seq: SeqNum,
    ack: SeqNum,
}

impl Subject {
    fn new(state: StateName) -> Subject {
        let (connection, seq) = begin(state);
        let mut subject = Subject {
            connection,
            seq,
            ack: ISS + 1,
        };
        subject.answers();
        if !matches!(state, StateName::SynSent | StateName::SynReceived) {
            subject.receive(TcpFlags::ACK, &[]);
        }
        for step in path(state) {
            step(&mut subject);
            subject.answers();
        }
        assert_eq!(subject.connection.state(), state);
        subject
    }

    /// Processes a segment with the numbers that the peer uses next.
    fn receive(&mut self, flags: TcpFlags, payload: &[u8]) {
        let mut header = segment(2, 1, self.seq, flags);
        header.ack = self.ack;
        self.connection.on_segment(NOW, &header, payload);
        self.seq += payload.len() as u32 + u32::from(flags.contains(TcpFlags::FIN));
    }

    fn close(&mut self) {
        self.connection.shutdown_send(NOW);
        self.ack += 1;
    }

    /// Returns the flags of all segments that the connection sends.
    fn answers(&mut self) -> String {
        let names = [(2, "SYN"), (1, "FIN"), (4, "RST"), (16, "ACK")];
        let mut answers = String::new();
        while let Some(segment) = self.connection.transmit(NOW) {
            let flags = segment.header.flags.0;
            let set: Vec<&str> = names
                .iter()
                .filter(|(bit, _)| flags & bit != 0)
                .map(|(_, name)| *name)
                .collect();
            write!(answers, " <{}>", set.join("+")).expect("strings grow");
        }
        answers
    }
}

/// An event that may happen in any state, and its name.
struct Event(&'static str, fn(&mut Subject));

/// Returns the steps from ESTABLISHED to `state`.
fn path(state: StateName) -> Vec<fn(&mut Subject)> {
    let close: fn(&mut Subject) = Subject::close;
    let fin: fn(&mut Subject) = |s| s.receive(FIN, &[]);
    let ack: fn(&mut Subject) = |s| s.receive(ACK, &[]);
    // A FIN that does not acknowledge our FIN.
    let crossing: fn(&mut Subject) = |s| {
        s.ack = s.ack - 1;
        s.receive(FIN, &[]);
        s.ack += 1;
    };
    match state {
        StateName::FinWait1 => vec![close],
        StateName::FinWait2 => vec![close, ack],
        StateName::CloseWait => vec![fin],
        StateName::Closing => vec![close, crossing],
        StateName::LastAck => vec![fin, close],
        StateName::TimeWait => vec![close, ack, fin],
        _ => vec![],
    }
}

#[test]
fn each_event_in_each_state_has_one_outcome() {
    let events: [Event; 14] = [
        Event("SYN", |s| s.receive(SYN, &[])),
        Event("SYN+ACK", |s| s.receive(SYN.with(ACK), &[])),
        Event("ACK", |s| s.receive(ACK, &[])),
        Event("ACK too high", |s| {
            s.ack += 100;
            s.receive(ACK, &[]);
        }),
        Event("text", |s| s.receive(ACK, b"text")),
        Event("text out of order", |s| {
            s.seq += 10;
            s.receive(ACK, b"text");
        }),
        Event("FIN", |s| s.receive(FIN, &[])),
        Event("RST", |s| s.receive(TcpFlags::RST.with(ACK), &[])),
        Event("RST in window", |s| {
            s.seq += 10;
            s.receive(TcpFlags::RST.with(ACK), &[]);
        }),
        Event("no flags", |s| s.receive(TcpFlags::default(), &[])),
        Event("shutdown", |s| s.connection.shutdown_send(NOW)),
        Event("close", |s| s.connection.close(NOW)),
        Event("abort", |s| s.connection.abort(NOW)),
        Event("an hour", |s| {
            for minute in 0..60 {
                let now = NOW + Duration::from_secs(60 * minute);
                s.connection.on_timer(now);
                while s.connection.transmit(now).is_some() {}
            }
        }),
    ];
    let mut table = String::new();
    for state in STATES {
        writeln!(table, "{state}").expect("strings grow");
        for Event(name, event) in &events {
            let mut subject = Subject::new(state);
            event(&mut subject);
            let answers = subject.answers();
            let after = subject.connection.state();
            let error = subject
                .connection
                .error()
                .map_or(String::new(), |e| format!(" ({e})"));
            writeln!(table, "  {name:<18} -> {after}{error}{answers}").expect("strings grow");
        }
    }
    insta::assert_snapshot!(table);
}
