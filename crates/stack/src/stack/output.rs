//! Output of sessions, and their timers.

use core::time::Duration;

use portolan_proto::ip::IpOptions;
use portolan_tcp::{Codepoint, Events};
use portolan_types::{FlowKey, Instant, Protocol, Slot, scope_of};
use portolan_wire::tcp::TcpHeader;

use super::{LOOK_FIRST, LOOK_LAST, SessionEntry, Stack, Step, entry_of, tell};
use crate::frame::{Frame, HEAD_MAX, Wire};
use crate::pmtu::PathMtus;
use crate::resolved_path::{Ends, ResolvedPath};
use crate::routes::Routes;
use crate::session::Session;

/// A visit this long before the deadline is not worth the update that it saves.
const MUCH_LATER: Duration = Duration::from_secs(1);

/// From this distance on, deadlines are rounded to steps.
const FAR_AHEAD: Duration = Duration::from_millis(100);
pub(super) const FAR_STEP: Duration = Duration::from_millis(4);

impl Stack {
    /// Whether [`Stack::output`] has anything to do.
    pub fn awaits_output(&self, routes: &Routes) -> bool {
        self.has_output()
            || self.next_look.is_some()
            || !self.stalled.is_empty()
            || self.tried_generation != routes.generation()
    }

    /// Sends what is due, until only sessions with full transmit queues have something left.
    pub fn output(&mut self, now: Instant, routes: &Routes, wire: &mut impl Wire) {
        if self.tried_generation != routes.generation() {
            self.retry_stalled(routes);
        }
        self.admit_waiting(wire);
        self.awaits_window = false;
        while let Some(slot) = self.pending.pop_front() {
            self.output_one(now, slot, routes, wire);
        }
        self.tx_queues.end_turns();
        self.look_again(now);
    }

    /// A sleeping holder is not notified of changed routes, so it checks at intervals.
    fn look_again(&mut self, now: Instant) {
        self.next_look = match self.next_look {
            _ if self.stalled.is_empty() => None,
            None => Some((now + LOOK_FIRST, LOOK_FIRST)),
            Some((at, wait)) if at <= now => {
                let wait = (wait * 2).min(LOOK_LAST);
                Some((now + wait, wait))
            }
            waiting => waiting,
        };
    }

    /// Whether a session that sent in the last round has more data than its windows permit.
    pub fn awaits_window(&self) -> bool {
        self.awaits_window
    }

    /// Whether a session waits to send.
    pub fn has_output(&self) -> bool {
        !self.pending.is_empty() || self.tx_queues.has_waiting()
    }

    fn output_one(&mut self, now: Instant, slot: u32, routes: &Routes, wire: &mut impl Wire) {
        let Some(entry) = entry_of(&mut self.places, slot) else {
            return;
        };
        if entry.is_suspend_tx {
            entry.is_pending = false;
            return;
        }
        if !entry.enter(wire) {
            return self.tx_queues.wait(entry.tx_queue, slot);
        }
        entry.is_pending = false;
        wire.serve(Slot(slot));
        let SessionEntry {
            session: Session::Tcp(session),
            resolved,
            ..
        } = entry
        else {
            // A UDP session only waits for room.
            return self.note(slot, Events::WRITABLE);
        };
        let flow = &session.flow;
        let ends = Ends {
            protocol: Protocol::Tcp,
            source: flow.local.ip(),
            destination: flow.remote.ip(),
            scope: scope_of(flow.remote),
        };
        let is_current = resolved
            .as_ref()
            .is_some_and(|resolved| resolved.is_current(&ends, routes, &self.mtus));
        if !is_current {
            *resolved = ResolvedPath::find(ends, session.ip, routes, &self.mtus).ok();
        }
        let next_hop = resolved.as_ref().map(|resolved| resolved.unresolved);
        let (Some(resolved), Some(None)) = (resolved, next_hop) else {
            self.stalled.push(slot);
            self.unresolved.extend(next_hop.flatten());
            return;
        };
        if !is_current {
            let mtu = resolved.mtu_for(session.ip.discovery);
            session.connection.set_path_mtu(tcp_payload(mtu, flow));
        }
        let mut head = [0; HEAD_MAX];
        while let Some(segment) = session.connection.transmit(now) {
            tell(self.observer, Step::Headers);
            let head = resolved.template_for(&segment).tcp_head(
                &mut head,
                &segment.header,
                segment.payload,
                segment.segment_size,
                segment.codepoint,
            );
            wire.transmit(&Frame {
                head,
                payload: segment.payload,
            });
            tell(self.observer, Step::Session);
            if wire.is_full() {
                entry.is_pending = true;
                break;
            }
            if !session.connection.may_transmit() {
                session.connection.rest(now);
                break;
            }
        }
        if entry.is_pending {
            self.tx_queues.wait_for_next_turn(entry.tx_queue, slot);
        }
        self.awaits_window |= session.connection.has_unsent();
        let events = session.connection.events();
        self.note(slot, events);
        self.reschedule(now, slot);
    }

    /// The wheel must be updated only if a deadline moves forward: if it moves back, the early visit
    /// costs less than an update for each segment. It moves back by a minute, once, when a connection enters TIME-WAIT: the
    /// early visit of each one would wake a thread, whose other timers come less often.
    pub(super) fn reschedule(&mut self, now: Instant, slot: u32) {
        let Some(entry) = self.entry(slot) else {
            return;
        };
        let Session::Tcp(session) = &entry.session else {
            return;
        };
        let Some(deadline) = session.connection.deadline() else {
            return;
        };
        let is_well_placed = entry.scheduled > now
            && entry.scheduled <= deadline
            && deadline.since(entry.scheduled) <= MUCH_LATER;
        if !is_well_placed {
            let scheduled = coarse(now, deadline);
            entry.scheduled = scheduled;
            self.timers.set(slot, scheduled);
        }
    }

    /// When to call [`Stack::expire`] next.
    pub fn deadline(&self) -> Option<Instant> {
        let earliest = |known: Option<Instant>, other: Option<Instant>| match (known, other) {
            (Some(known), Some(other)) => Some(known.min(other)),
            (known, other) => known.or(other),
        };
        let timers = earliest(self.timers.next(), self.fragments.deadline());
        let timers = earliest(timers, self.next_look.map(|(at, _)| at));
        earliest(timers, self.mtus.deadline())
    }

    /// Runs the timers that are due; follow with [`Stack::output`].
    pub fn expire(&mut self, now: Instant) {
        self.fragments.expire(now);
        self.mtus.expire(now);
        if self.timers.next().is_none_or(|next| next > now) {
            return;
        }
        let mut due = Vec::new();
        self.timers.expire(now, |slot| due.push(slot));
        for slot in due {
            let Some(entry) = self.entry(slot) else {
                continue;
            };
            entry.scheduled = Instant::FAR_FUTURE;
            let Session::Tcp(session) = &mut entry.session else {
                continue;
            };
            if session
                .connection
                .deadline()
                .is_some_and(|deadline| deadline <= now)
            {
                session.connection.on_timer(now);
                let events = session.connection.events();
                self.note(slot, events);
                self.touch(Slot(slot));
            }
            self.reschedule(now, slot);
        }
    }

    fn retry_stalled(&mut self, routes: &Routes) {
        self.tried_generation = routes.generation();
        for slot in core::mem::take(&mut self.stalled) {
            self.touch(Slot(slot));
        }
    }
}

/// Rounds a deadline that is far ahead up, as the kernel does for its timers (jiffies), so that those of many connections
/// come together.
pub(super) fn coarse(now: Instant, deadline: Instant) -> Instant {
    let step = FAR_STEP.as_nanos() as u64;
    match deadline.as_nanos().checked_next_multiple_of(step) {
        Some(later) if deadline.since(now) >= FAR_AHEAD => Instant::from_nanos(later),
        _ => deadline,
    }
}

/// Sends a segment that belongs to no session: a reset or a SYN cookie. Returns false if there is no path
/// to its destination at present.
pub fn send_segment(
    flow: &FlowKey,
    ip: IpOptions,
    header: &TcpHeader,
    routes: &Routes,
    wire: &mut impl Wire,
) -> bool {
    let ends = Ends {
        protocol: Protocol::Tcp,
        source: flow.local.ip(),
        destination: flow.remote.ip(),
        scope: scope_of(flow.remote),
    };
    let found = ResolvedPath::find(ends, ip, routes, &PathMtus::default()).ok();
    let Some(resolved) = found.filter(|resolved| resolved.unresolved.is_none()) else {
        return false;
    };
    let mut head = [0; HEAD_MAX];
    let head = resolved
        .template
        .tcp_head(&mut head, header, [&[], &[]], 0, Codepoint::NotEct);
    wire.transmit(&Frame {
        head,
        payload: [&[], &[]],
    });
    true
}

/// The part of an IP packet left for TCP's options and payload.
fn tcp_payload(mtu: u32, flow: &FlowKey) -> u16 {
    let headers = if flow.remote.is_ipv4() { 40 } else { 60 };
    u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX)
}
