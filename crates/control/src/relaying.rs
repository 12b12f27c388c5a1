//! Relayed sessions: in which directions their descriptors are served, how much the server holds of them for a user,
//! and when they end.
//!
//! The held bytes – written by a program and not acknowledged by the peer, or not read by the program – are charged to
//! the session's user. At the limit no more is read from the user's descriptors, and writers block as for a peer with a
//! closed window.

use std::time::Duration;

use portolan_types::{Instant, SessionId};

use crate::control::{Control, Effect, Effects};
use crate::relay::{Interest, Relay, RelayProgress, Start};
use crate::session::Life;
use crate::timer::{Deadline, Timer};

#[cfg(test)]
mod tests;

/// Bytes written at once to a descriptor whose last holder may soon want the session back, and how long the rest waits:
/// all that is in the descriptor then has to be taken out again.
const FIRST_HELPING: usize = 16 * 1024;
const SECOND_HELPING_AFTER: Duration = Duration::from_millis(2);

/// What each session may hold regardless of its user's others, so that none starves.
const LEAST: usize = 4096;

/// When to check for room again.
const RETRY: Duration = Duration::from_millis(10);

impl Control {
    pub(crate) fn start_relay(
        &mut self,
        id: SessionId,
        start: Start,
        now: Instant,
        out: &mut Effects,
    ) {
        let Some(session) = self.registry.session_mut(id) else {
            return;
        };
        let allowance = (start == Start::Gently).then_some(FIRST_HELPING);
        session.life = Life::Relayed(Relay {
            allowance,
            ..Relay::default()
        });
        out.push(if session.is_local() {
            Effect::WatchLocal(id)
        } else {
            Effect::MoveBytes(id)
        });
        if allowance.is_some() {
            self.arm(id, Deadline::Relay, now + SECOND_HELPING_AFTER);
        }
    }

    /// Releases the bytes that were held back, since the session was not recalled.
    pub(crate) fn end_allowance(&mut self, id: SessionId, out: &mut Effects) {
        if let Some(relay) = self.registry.relay_mut(id) {
            relay.allowance = None;
            out.push(Effect::MoveBytes(id));
        }
    }

    /// Returns how many bytes may be read from the descriptor of a session that has `stored` bytes held.
    pub fn relay_room(&self, id: SessionId, stored: Option<usize>) -> usize {
        let (Some(stored), Some(session)) = (stored, self.registry.session(id)) else {
            return usize::MAX;
        };
        let room = self.relays.memory.room(session.uid);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        room.max(LEAST.saturating_sub(stored))
    }

    pub(crate) fn on_relayed(
        &mut self,
        id: SessionId,
        progress: RelayProgress,
        now: Instant,
        out: &mut Effects,
    ) {
        let uid = self.registry.session(id).map(|session| session.uid);
        let (Some(uid), Some(relay)) = (uid, self.registry.relay_mut(id)) else {
            return;
        };
        if let Some(stored) = progress.stored {
            let open = || self.relays.memory.open(uid);
            relay.charge.get_or_insert_with(open).set(stored as u64);
        }
        // Processes that still have the descriptor of a closed connection see its end-of-file.
        if (relay.hung_up && relay.near_ended) || progress.is_over {
            let is_lost = relay.left_unread;
            out.push(Effect::ClosePeerEnd(id));
            return if is_lost {
                self.abort(id, out)
            } else {
                self.close(id, out)
            };
        }
        if !relay.hung_up {
            let interest = Interest {
                // If the connection is not writable now, an event reports when it is.
                bytes: !relay.near_ended && progress.is_writable && !progress.is_stalled,
                room: progress.is_blocked,
            };
            out.push(Effect::WatchPeerEnd(id, interest));
        }
        if progress.is_stalled {
            self.counters.relays_stalled += 1;
            self.relays.stalled.insert(id);
            self.timers.arm_once(Timer::RelayMemory, now + RETRY);
        }
    }

    /// Resumes the relays that waited for room.
    pub fn stalled_relays(&mut self) -> Effects {
        let stalled = std::mem::take(&mut self.relays.stalled);
        stalled.into_iter().map(Effect::MoveBytes).collect()
    }
}
