//! Relaying: a TCP session that the server holds while its descriptor lives. Bytes move both ways
//! through the far end as each side takes them; the end of each direction is passed on. When the last
//! copy of the descriptor goes with bytes that nobody has read, the connection is reset (RFC 2525
//! §2.17).

use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_control::{Deadline, Holder, Input, Life, Relay};
use portolan_local::Stream;
use portolan_stack::Stack;
use portolan_types::SessionId;
use rustix::event::epoll::EventFlags;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::locals::Locals;
use crate::server::Server;

/// Bytes moved in one direction before others get their turn.
const TURN: usize = 256 * 1024;
const CHUNK: usize = 64 * 1024;

/// Bytes that are taken out of a descriptor in each direction when a relay ends: more than its buffers hold, of which
/// nobody sends more meanwhile unless he means harm.
const DRAINED: usize = 16 << 20;

/// What comes at once to a descriptor whose session its last holder may soon want back, and how long
/// the rest waits: all that lies in the descriptor then has to be taken out again.
const FIRST_HELPING: usize = 16 * 1024;
const SECOND_HELPING_AFTER: Duration = Duration::from_millis(2);

impl Server {
    pub fn start_relay(&mut self, id: SessionId) {
        self.begin_relay(id, Relay::default());
    }

    /// As [`Server::start_relay`], for a session that may go back to its last holder at once.
    pub fn start_relay_gently(&mut self, id: SessionId) {
        let relay = Relay {
            allowance: Some(FIRST_HELPING),
            ..Relay::default()
        };
        let until = self.now + SECOND_HELPING_AFTER;
        self.control.arm(id, Deadline::Relay, until);
        self.begin_relay(id, relay);
    }

    fn begin_relay(&mut self, id: SessionId, relay: Relay) {
        self.set_life(id, Life::Relayed(relay));
        self.watch_local(id);
        self.pump(id);
    }

    /// Moves what was held back, since nobody wanted the session back.
    pub fn resume_relay(&mut self, id: SessionId) {
        if let Some(relay) = self.control.registry.relay_mut(id) {
            relay.allowance = None;
            self.pump(id);
        }
    }

    /// Takes a session back from its descriptor, whose only user shows it: what is on its way in it goes
    /// on from the session, in order. False if that cannot be, because a direction has ended; then the
    /// relay goes on.
    pub fn end_relay(&mut self, id: SessionId, near: &OwnedFd) -> bool {
        if self.locals.has(id) {
            // Its peer may have written over what would go back into the ring.
            return false;
        }
        if !self.drain_far(id) {
            self.pump(id);
            return false;
        }
        let Some(session) = self.server_slot(id).and_then(|slot| self.stack.tcp(slot)) else {
            return false;
        };
        session.connection.unread(&unread(near));
        self.control.counters.relays_ended += 1;
        self.control.registry.end_relay(id);
        self.watch_far(id, EventFlags::empty());
        self.set_life(id, Life::Parked);
        true
    }

    /// epoll says something about a relayed descriptor.
    pub fn on_relay(&mut self, id: SessionId, flags: EventFlags) {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR)
            && let Some(relay) = self.control.registry.relay_mut(id)
            && !relay.hung_up
        {
            relay.hung_up = true;
            // A hang-up is level-triggered whether it is wanted or not.
            self.watch_far(id, EventFlags::ET);
        }
        self.pump(id);
    }

    /// Moves what can be moved, and waits for what cannot.
    pub fn pump(&mut self, id: SessionId) {
        match self.server_slot(id) {
            Some(slot) => {
                self.pump_once(id);
                self.stack.touch(slot);
            }
            None => self.pump_local(id, |server| server.pump_once(id)),
        }
    }

    fn pump_once(&mut self, id: SessionId) {
        self.pump_out(id);
        let blocked = self.pump_in(id);
        let holder = self.holder(id);
        let (Some(relay), Some(stream)) = (
            self.control.registry.relay_mut(id).copied(),
            held(&mut self.stack, &mut self.locals, (id, holder)),
        ) else {
            return;
        };
        let is_writable = stream.poll_writable();
        // Who still has the descriptor of a connection that is over learns it by the descriptor's end.
        let is_over = stream.is_closed() && stream.readable() == 0;
        if (relay.hung_up && relay.near_ended) || is_over {
            self.drop_far(id);
            return self.input(match relay.left_unread {
                true => Input::Abort(id),
                false => Input::Close(id),
            });
        }
        if relay.hung_up {
            return;
        }
        let mut interest = EventFlags::empty();
        // If it is not writable now, an event will tell when it is.
        if !relay.near_ended && is_writable {
            interest |= EventFlags::IN;
        }
        if blocked {
            interest |= EventFlags::OUT;
        }
        self.watch_far(id, interest);
    }

    /// From the descriptor to the peer.
    fn pump_out(&mut self, id: SessionId) {
        let holder = self.holder(id);
        let (Some(far), Some(relay), Some(stream)) = (
            self.handles.peer_end(id),
            self.control.registry.relay_mut(id),
            held(&mut self.stack, &mut self.locals, (id, holder)),
        ) else {
            return;
        };
        let mut chunk = vec![0; CHUNK];
        let mut moved = 0;
        while !relay.near_ended && moved < TURN {
            let room = stream.send_space().min(CHUNK);
            if room == 0 {
                // A closed connection takes nothing.
                relay.near_ended = stream.is_send_closed();
                break;
            }
            match recv(&far.fd, &mut chunk[..room], RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    relay.near_ended = true;
                    stream.shutdown_send(self.now);
                }
                Ok((count, _)) => {
                    stream.send(self.now, &chunk[..count]);
                    moved += count;
                }
                Err(rustix::io::Errno::AGAIN) => break,
                Err(errno) => {
                    relay.near_ended = true;
                    // How a pair tells that its other end was closed with bytes in it.
                    relay.left_unread |= errno == rustix::io::Errno::CONNRESET;
                }
            }
        }
    }

    /// All that lies in the descriptor becomes the session's, whatever room it has. False if a direction
    /// has ended.
    fn drain_far(&mut self, id: SessionId) -> bool {
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
        for _ in 0..DRAINED / CHUNK {
            // Looks first: what the session cannot take stays where it is.
            let look = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match recv(&far.fd, &mut chunk[..], look) {
                Ok((count @ 1.., _)) if session.connection.send_whole(&chunk[..count]) => {
                    // It was there a moment ago.
                    let _ = recv(&far.fd, &mut chunk[..count], RecvFlags::DONTWAIT);
                }
                Err(rustix::io::Errno::AGAIN) => return true,
                _ => return false,
            }
        }
        false
    }

    /// From the peer to the descriptor. True if the descriptor is full.
    fn pump_in(&mut self, id: SessionId) -> bool {
        let holder = self.holder(id);
        let (Some(far), Some(relay), Some(stream)) = (
            self.handles.peer_end(id),
            self.control.registry.relay_mut(id),
            held(&mut self.stack, &mut self.locals, (id, holder)),
        ) else {
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
            match send(&far.fd, &chunk[..count], flags) {
                Ok(sent) => {
                    // Consumes what was sent; it was peeked, so it is there.
                    stream.recv(self.now, &mut chunk[..sent]);
                    moved += sent;
                }
                Err(rustix::io::Errno::AGAIN) => return true,
                // Nobody reads any more.
                Err(_) => {
                    relay.left_unread |= relay.hung_up;
                    stream.recv(self.now, &mut chunk[..count]);
                }
            }
        }
        let ended = stream.is_receive_finished() || stream.is_closed();
        if ended && !relay.far_ended && stream.readable() == 0 {
            relay.far_ended = true;
            // The descriptor may be closed already, which says as much.
            let _ = shutdown(&far.fd, Shutdown::Write);
        }
        if let Some(bytes) = &mut relay.allowance {
            *bytes -= moved;
            // The rest waits for its time, not for room.
            return false;
        }
        stream.readable() > 0
    }
}

/// The stream that the server holds.
fn held<'a>(
    stack: &'a mut Stack,
    locals: &'a mut Locals,
    (id, holder): (SessionId, Option<Holder>),
) -> Option<&'a mut dyn Stream> {
    match holder? {
        Holder::Server(slot) => Some(&mut stack.tcp(slot)?.connection),
        Holder::None => Some(locals.watched(id)?),
        Holder::Process(..) => None,
    }
}

/// What the application has not read yet.
fn unread(near: &OwnedFd) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; CHUNK];
    // It ends, or fails, when nothing is left.
    while bytes.len() < DRAINED
        && let Ok((count @ 1.., _)) = recv(near, &mut chunk[..], RecvFlags::DONTWAIT)
    {
        bytes.extend_from_slice(&chunk[..count]);
    }
    bytes
}
