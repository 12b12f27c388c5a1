//! Relaying: a TCP session that the server holds while its descriptor lives. Bytes move both ways
//! through the far end as each side takes them; the end of each direction is passed on. When the last
//! copy of the descriptor goes with bytes that nobody has read, the connection is reset (RFC 2525
//! §2.17).

use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_control::{Holder, Registry, SessionPhase};
use portolan_local::Stream;
use portolan_stack::Stack;
use portolan_types::{Instant, SessionId};
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

/// What one relayed session has seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Relay {
    /// The application's side ended: nothing more comes from the descriptor.
    near_ended: bool,
    /// The peer's end was passed on to the descriptor.
    far_ended: bool,
    /// Every copy of the descriptor is closed.
    hung_up: bool,
    /// And bytes lay in it that nobody had read.
    left_unread: bool,
    /// No more is moved to the descriptor until the last holder has had time to come back.
    helping: Option<usize>,
}

impl Server {
    pub fn start_relay(&mut self, id: SessionId) {
        self.begin_relay(id, Relay::default());
    }

    /// As [`Server::start_relay`], for a session that may go back to its last holder at once.
    pub fn start_relay_gently(&mut self, id: SessionId) {
        let until = self.now + SECOND_HELPING_AFTER;
        let relay = Relay {
            helping: Some(FIRST_HELPING),
            ..Relay::default()
        };
        self.throttled_relays.push_back((until, id));
        self.begin_relay(id, relay);
    }

    fn begin_relay(&mut self, id: SessionId, relay: Relay) {
        self.set_phase(id, SessionPhase::Relayed);
        self.relays.insert(id, relay);
        self.watch_local(id);
        self.pump(id);
    }

    /// Moves what was held back of those that nobody wanted back. Returns when to come again.
    pub fn drive_relays(&mut self) -> Option<Instant> {
        while let Some(&(due, id)) = self.throttled_relays.front() {
            if due > self.now {
                return Some(due);
            }
            self.throttled_relays.pop_front();
            if let Some(relay) = self.relays.get_mut(&id) {
                relay.helping = None;
                self.pump(id);
            }
        }
        None
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
        self.counters.relays_ended += 1;
        self.relays.remove(&id);
        self.registry.end_relay(id);
        self.watch_far(id, EventFlags::empty());
        self.set_phase(id, SessionPhase::Parked);
        true
    }

    /// epoll says something about a relayed descriptor.
    pub fn on_relay(&mut self, id: SessionId, flags: EventFlags) {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR)
            && let Some(relay) = self.relays.get_mut(&id)
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
        let Some(relay) = self.relays.get(&id).copied() else {
            return;
        };
        let stream = held(&mut self.stack, &mut self.locals, &self.registry, id);
        let Some(stream) = stream else {
            return;
        };
        let is_writable = stream.poll_writable();
        // Who still has the descriptor of a connection that is over learns it by the descriptor's end.
        let is_over = stream.is_closed() && stream.readable() == 0;
        if (relay.hung_up && relay.near_ended) || is_over {
            self.relays.remove(&id);
            self.drop_far(id);
            match relay.left_unread {
                true => self.abort_held(id),
                false => self.close_held(id),
            }
            return;
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
        let (Some(far), Some(relay), Some(stream)) = (
            self.peer_ends.get(&id),
            self.relays.get_mut(&id),
            held(&mut self.stack, &mut self.locals, &self.registry, id),
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
            self.peer_ends.get(&id),
            self.relays.get(&id),
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
        let (Some(far), Some(relay), Some(stream)) = (
            self.peer_ends.get(&id),
            self.relays.get_mut(&id),
            held(&mut self.stack, &mut self.locals, &self.registry, id),
        ) else {
            return false;
        };
        let mut chunk = vec![0; CHUNK];
        let mut moved = 0;
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let most = relay.helping.unwrap_or(TURN);
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
        if let Some(bytes) = &mut relay.helping {
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
    registry: &Registry,
    id: SessionId,
) -> Option<&'a mut dyn Stream> {
    match registry.session(id)?.holder {
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
