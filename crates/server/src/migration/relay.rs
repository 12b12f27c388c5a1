//! Relaying: a TCP session that the server holds while its descriptor is open. Bytes move both ways through the far end
//! as each side accepts them; the end of each direction is passed on. If the last copy of the descriptor is closed with
//! unread bytes, the connection is reset (RFC 2525 §2.17).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_control::{Holder, Input, Interest, Life, Relay, RelayProgress, SessionPhase, Timer};
use portolan_local::Stream;
use portolan_stack::Stack;
use portolan_types::SessionId;
use rustix::event::epoll::EventFlags;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::handles::Handles;
use crate::local_ends::LocalEnd;
use crate::server::Server;

/// Bytes moved in one direction before others have their turn.
const TURN: usize = 256 * 1024;
const CHUNK: usize = 64 * 1024;

/// By then a descriptor that is passed on is where it is to be.
const OURS_WITHIN: Duration = Duration::from_secs(1);
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);

/// Bytes that are taken out of a descriptor in each direction when a relay ends, however many its buffers hold.
const DRAINED: usize = 16 << 20;

impl Server {
    /// May the session be taken back from its descriptor? Not if a direction has ended, nor if it is local: its peer may
    /// have written over what would go back into the ring.
    pub(crate) fn may_end_relay(&mut self, id: SessionId) -> bool {
        if self.handles.local(id).is_some() || !self.is_far_ours(id) {
            return false;
        }
        let is_drained = self.drain_far(id);
        if !is_drained {
            self.pump(id);
        }
        is_drained
    }

    /// Does a thread read what lies in the session's descriptor?
    pub(crate) fn is_suspended(&mut self, id: SessionId) -> bool {
        let relay = self.control.registry.relay_mut(id);
        relay.is_some_and(|relay| relay.is_suspended)
    }

    /// Nothing is moved before the session's only user has got what lies in its descriptor.
    pub(crate) fn suspend_relay(&mut self, id: SessionId) {
        if let Some(relay) = self.control.registry.relay_mut(id) {
            relay.is_suspended = true;
        }
        self.watch_far(id, EventFlags::ET);
    }

    /// Takes a session back from its descriptor, whose only user shows it: what was on its way in it goes
    /// on from the session, in order. False if a direction has ended meanwhile; then the relay goes on.
    pub(crate) fn end_relay(&mut self, id: SessionId, unread: &[u8]) -> bool {
        let Some(relay) = self.control.registry.relay_mut(id) else {
            return false;
        };
        relay.is_suspended = false;
        let Some(session) = self.server_slot(id).and_then(|slot| self.stack.tcp(slot)) else {
            return false;
        };
        session.connection.unread(unread);
        if !self.may_end_relay(id) {
            return false;
        }
        self.control.counters.relays_ended += 1;
        self.control.registry.end_relay(id);
        self.watch_far(id, EventFlags::empty());
        self.set_life(id, Life::Parked);
        true
    }

    /// Handles an epoll event of a relayed descriptor.
    pub(crate) fn on_relay(&mut self, id: SessionId, flags: EventFlags) {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR)
            && let Some(relay) = self.control.registry.relay_mut(id)
            && !relay.hung_up
        {
            relay.hung_up = true;
            // A hang-up is reported level-triggered even without interest.
            self.watch_far(id, EventFlags::ET);
        }
        self.pump(id);
    }

    /// Has a child written to the descriptor of a session that is not relayed?
    pub(crate) fn is_written_to(&self, id: SessionId) -> bool {
        let far = self.handles.peer_end(id);
        let far =
            far.filter(|far| far.relays_writes && self.phase(id) != Some(SessionPhase::Relayed));
        far.is_some_and(|far| waiting_in(&far.fd) > 0)
    }

    /// Likewise, or has it shut the descriptor down for writing, which epoll would report again and again?
    pub(crate) fn begins_relay(&self, id: SessionId, flags: EventFlags) -> bool {
        let is_shut = flags.contains(EventFlags::RDHUP) && !flags.contains(EventFlags::HUP);
        let far = self.handles.peer_end(id);
        far.is_some_and(|far| far.relays_writes)
            && (is_shut || flags.contains(EventFlags::IN) && self.is_written_to(id))
    }

    /// Moves what can be moved, and waits for the rest.
    pub(crate) fn pump(&mut self, id: SessionId) {
        match self.server_slot(id) {
            Some(slot) => {
                self.pump_once(id);
                self.stack.touch(slot);
            }
            None => self.pump_local(id, |server| server.pump_once(id)),
        }
    }

    fn pump_once(&mut self, id: SessionId) {
        if self.is_suspended(id) || !self.is_far_ours(id) {
            return;
        }
        let is_stalled = self.pump_out(id);
        let is_blocked = self.pump_in(id);
        let stored = self.stored(id);
        let holder = self.holder(id);
        let local = self.handles.get_mut(id).map(|handles| &mut handles.local);
        if let Some(stream) = local.and_then(|local| held(&mut self.stack, local, holder)) {
            let progress = RelayProgress {
                stored,
                is_writable: stream.poll_writable(),
                is_over: stream.is_closed() && stream.readable() == 0,
                is_stalled,
                is_blocked,
            };
            self.input(Input::Relayed(id, progress));
        }
    }

    /// Has nobody else the server's end of the descriptor? Who made the pair could have kept a copy: while such a one is read
    /// into memory that does not come, a read here would wait (the kernel's `iolock`).
    fn is_far_ours(&mut self, id: SessionId) -> bool {
        let Some(far) = self.handles.get_mut(id).and_then(|it| it.peer_end.as_mut()) else {
            return true;
        };
        if !far.is_ours {
            let count = self.holder_count.as_mut();
            // Where the kernel does not tell, nobody knows.
            far.is_ours = count.is_none_or(|count| count.is_only_with(&[], far.fd.as_fd()));
        }
        let is_ours = far.is_ours;
        if !is_ours && self.foreign_ends.iter().all(|(known, _)| *known != id) {
            self.watch_far(id, EventFlags::ET);
            self.foreign_ends.push((id, self.now + OURS_WITHIN));
            let next = self.now + BETWEEN_LOOKS;
            self.control.timers.arm_once(Timer::ForeignEnds, next);
        }
        is_ours
    }

    /// Children that are to become programs have what their parents have, for a moment. The connection of a program that
    /// keeps the server's end of its descriptor is reset.
    pub(crate) fn look_at_foreign_ends(&mut self) {
        for (id, until) in std::mem::take(&mut self.foreign_ends) {
            if self.phase(id) != Some(SessionPhase::Relayed) {
                continue;
            }
            self.pump(id);
            let is_kept = self.foreign_ends.last_mut().filter(|(last, _)| *last == id);
            match is_kept {
                Some(_) if until < self.now => {
                    self.foreign_ends.pop();
                    self.input(Input::Abort(id));
                }
                Some(kept) => kept.1 = until,
                None => {}
            }
        }
    }

    pub(crate) fn watch_relayed(&self, id: SessionId, interest: Interest) {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, interest.bytes);
        flags.set(EventFlags::OUT, interest.room);
        self.watch_far(id, flags);
    }

    fn stored(&mut self, id: SessionId) -> Option<usize> {
        let slot = self.server_slot(id)?;
        Some(self.stack.tcp(slot)?.connection.stored())
    }

    /// Returns the two ends between which bytes are moved, and the state of the relay.
    fn relayed(&mut self, id: SessionId) -> Option<(&OwnedFd, &mut Relay, &mut dyn Stream)> {
        let holder = self.holder(id);
        let Handles {
            peer_end, local, ..
        } = self.handles.get_mut(id)?;
        let relay = self.control.registry.relay_mut(id)?;
        let stream = held(&mut self.stack, local, holder)?;
        Some((&peer_end.as_ref()?.fd, relay, stream))
    }

    /// Moves bytes from the descriptor to the peer. Returns true if its user has no room for more.
    fn pump_out(&mut self, id: SessionId) -> bool {
        let stored = self.stored(id);
        let most = self.control.relay_room(id, stored);
        let now = self.now;
        let Some((far, relay, stream)) = self.relayed(id) else {
            return false;
        };
        let mut chunk = vec![0; CHUNK];
        let mut moved = 0;
        while !relay.near_ended && moved < TURN {
            if moved >= most {
                return true;
            }
            let room = stream.send_space().min(CHUNK).min(most - moved);
            if room == 0 {
                // A closed connection accepts nothing.
                relay.near_ended = stream.is_send_closed();
                break;
            }
            match recv(far, &mut chunk[..room], RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    relay.near_ended = true;
                    stream.shutdown_send(now);
                }
                Ok((count, _)) => {
                    stream.send(now, &chunk[..count]);
                    moved += count;
                }
                Err(rustix::io::Errno::AGAIN) => break,
                Err(errno) => {
                    relay.near_ended = true;
                    // A pair reports by this that its other end was closed with bytes in it.
                    relay.left_unread |= errno == rustix::io::Errno::CONNRESET;
                }
            }
        }
        false
    }

    /// Moves everything queued in the descriptor to the session, whatever the room in its buffer. Returns false if a
    /// direction has ended, or the user's relays hold too much.
    fn drain_far(&mut self, id: SessionId) -> bool {
        let stored = self.stored(id);
        let room = self.control.relay_room(id, stored);
        let slot = self.server_slot(id);
        let (Some(far), Some(relay), Some(session)) = (
            self.handles.peer_end(id),
            self.control.registry.relay_mut(id),
            slot.and_then(|slot| self.stack.tcp(slot)),
        ) else {
            return false;
        };
        if relay.near_ended || relay.far_ended || relay.hung_up {
            return false;
        }
        let mut chunk = vec![0; CHUNK];
        let mut left = waiting_in(&far.fd);
        if left > room {
            return false;
        }
        loop {
            // Peeks first: bytes that the session cannot take stay where they are.
            let look = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match recv(&far.fd, &mut chunk[..], look) {
                Ok((count @ 1.., _))
                    if left > 0 && session.connection.send_whole(&chunk[..count]) =>
                {
                    // It was there a moment ago.
                    let _ = recv(&far.fd, &mut chunk[..count], RecvFlags::DONTWAIT);
                    left = left.saturating_sub(count);
                }
                Err(rustix::io::Errno::AGAIN) => return true,
                _ => return false,
            }
        }
    }

    /// Moves bytes from the peer to the descriptor. Returns true if the descriptor is full.
    fn pump_in(&mut self, id: SessionId) -> bool {
        let now = self.now;
        let Some((far, relay, stream)) = self.relayed(id) else {
            return false;
        };
        let mut chunk = vec![0; CHUNK];
        let mut moved = 0;
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let most = relay.allowance.unwrap_or(TURN);
        while moved < most {
            let room = CHUNK.min(most - moved);
            let count = stream.peek(0, &mut chunk[..room]);
            if count == 0 {
                break;
            }
            match send(far, &chunk[..count], flags) {
                Ok(sent) => {
                    // Consumes what was sent; it was peeked, so it is there.
                    stream.recv(now, &mut chunk[..sent]);
                    moved += sent;
                }
                Err(rustix::io::Errno::AGAIN) => return true,
                // There is no reader any more.
                Err(_) => {
                    relay.left_unread |= relay.hung_up;
                    stream.recv(now, &mut chunk[..count]);
                }
            }
        }
        let ended = stream.is_receive_finished() || stream.is_closed();
        if ended && !relay.far_ended && stream.readable() == 0 {
            relay.far_ended = true;
            // Fails if the descriptor is closed already, which has the same effect.
            let _ = shutdown(far, Shutdown::Write);
        }
        if let Some(bytes) = &mut relay.allowance {
            *bytes -= moved;
            // The rest waits for its deadline, not for room.
            return false;
        }
        stream.readable() > 0
    }
}

/// Returns the stream that the server holds.
fn held<'a>(
    stack: &'a mut Stack,
    local: &'a mut Option<Box<LocalEnd>>,
    holder: Option<Holder>,
) -> Option<&'a mut dyn Stream> {
    match holder? {
        Holder::Server(slot) => Some(&mut stack.tcp(slot)?.connection),
        Holder::None => Some(local.as_mut()?.watched.as_mut()?),
        Holder::Process(..) => None,
    }
}

/// Returns how many bytes are in a stream now. Only a malicious program sends more while a relay ends: that is left
/// where it is.
fn waiting_in(stream: impl AsFd) -> usize {
    let there = rustix::io::ioctl_fionread(stream).unwrap_or(0);
    usize::try_from(there).map_or(DRAINED, |there| there.min(DRAINED))
}

/// Does the application have all that was sent to it?
pub(crate) fn is_read(near: &OwnedFd) -> bool {
    waiting_in(near) == 0
}

/// What the application has not read yet. Waits for whoever reads it into memory that does not come.
pub(crate) fn unread(near: &OwnedFd) -> Vec<u8> {
    let there = waiting_in(near);
    let mut bytes = Vec::with_capacity(there);
    let mut chunk = vec![0; CHUNK];
    // Ends, or fails, when nothing is left.
    while bytes.len() < there
        && let Ok((count @ 1.., _)) = recv(near, &mut chunk[..], RecvFlags::DONTWAIT)
    {
        bytes.extend_from_slice(&chunk[..count]);
    }
    bytes
}
