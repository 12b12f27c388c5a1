//! Events of a connection besides its stream: every drop, retry and refusal has a name here. Each connection
//! counts its own; holders add up the counts. The names follow `/proc/net/netstat` where it has an equivalent.

use crate::encoding;

/// Number of event counters that a session's statistics have room for.
pub const EVENTS_MAX: usize = 32;

macro_rules! events {
    ($($variant:ident = $name:literal, $meaning:literal;)*) => {
        /// An event that is counted.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Event { $($variant,)* }

        /// Name and meaning of each event, in the order of the counts.
        pub const EVENTS: &[(&str, &str)] = &[$(($name, $meaning),)*];
    };
}

events! {
    Timeout = "timeouts", "retransmission time-outs";
    FastRecovery = "fast_recoveries", "losses found without a time-out";
    TailProbe = "tail_probes", "probes of a flight's tail (TLP)";
    WindowProbe = "window_probes", "probes of a closed window, and short segments sent late";
    KeepAlive = "keepalive_probes", "probes of an idle connection";
    HandshakeRetry = "handshake_retries", "SYN and SYN-ACK segments sent again";
    GaveUp = "given_up", "connections ended because the peer did not answer";
    OutOfOrder = "out_of_order", "segments that came before what precedes them";
    Duplicate = "duplicates", "segments that brought nothing new";
    DropWrapped = "drop_paws", "segments dropped: their timestamp is older than one seen (PAWS)";
    DropWindow = "drop_out_of_window", "segments dropped: outside the receive window";
    DropNoAck = "drop_without_ack", "segments dropped: no acknowledgement in a state that asks for one";
    DropBadAck = "drop_bad_ack", "segments dropped: they acknowledge what was not sent, or long ago";
    DropReset = "drop_reset", "resets dropped: not at the edge of the window";
    DropSyn = "drop_syn", "SYN segments dropped: within a connection";
    DropClosed = "drop_after_fin", "text after the peer's FIN";
    Challenge = "challenge_acks", "challenges sent (RFC 5961)";
    ChallengeWithheld = "challenge_acks_withheld", "challenges not sent: less than half a second after the last";
    ResetIn = "resets_received", "connections ended by the peer's RST";
    ResetOut = "resets_sent", "RST segments sent for a connection";
    ZeroWindowOut = "zero_windows_sent", "segments sent that offer no room";
    ZeroWindowIn = "zero_windows_received", "segments received that offer no room";
    UndoneByTimestamp = "undone_by_timestamp", "window reductions taken back: the original was acknowledged (Eifel)";
    UndoneByReport = "undone_by_dsack", "window reductions taken back: all that went again was there before (DSACK)";
    UndoneByProbing = "undone_by_f_rto", "window reductions taken back: what was sent before a time-out arrived (F-RTO)";
    SpuriousTimeout = "spurious_timeouts", "time-outs that came too early, by any of these signs";
    DsackIn = "dsacks_received", "duplicates that the peer reported (DSACK)";
    ReportOut = "dsacks_sent", "duplicates reported to the peer (DSACK)";
    TailRepair = "tail_probe_recoveries", "losses that a tail probe repaired";
    Reordering = "reorderings", "acknowledgements of what came behind later segments (RACK)";
    IcmpIgnored = "drop_icmp", "ICMP errors dropped: about nothing in flight";
    HandleDoubted = "handles_doubted", "connections that enclose no handles any more, since something was lost";
}

const _: () = assert!(EVENTS.len() <= EVENTS_MAX);

/// Event counts of one connection; they travel with it, and wrap.
#[derive(Clone, Debug, Default)]
pub struct EventCounters([u32; EVENTS_MAX]);

encoding::fields!(EventCounters(_));

impl EventCounters {
    pub(crate) fn count(&mut self, event: Event) {
        let count = &mut self.0[event as usize];
        *count = count.wrapping_add(1);
    }

    pub fn counts(&self) -> &[u32; EVENTS_MAX] {
        &self.0
    }
}
