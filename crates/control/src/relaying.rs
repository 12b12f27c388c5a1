//! Relayed sessions: which directions their descriptors are served in, how much the server holds of them for a user, and
//! when they end.
//!
//! What is held, bytes that a program has written and the peer has not acknowledged, and those that the program has not
//! read, is charged to the session's user. Where that has as much as it may, no more is taken out of its descriptors: who
//! writes to one waits, as for a peer that takes nothing.

use std::time::Duration;

use portolan_types::{Instant, SessionId};

use crate::control::{Control, Effect, Effects};
use crate::relay::{Interest, Relay, RelayProgress, Start};
use crate::session::Life;
use crate::timer::{Deadline, Timer};

#[cfg(test)]
mod tests;

/// What comes at once to a descriptor whose session its last holder may soon want back, and how long
/// the rest waits: all that lies in the descriptor then has to be taken out again.
const FIRST_HELPING: usize = 16 * 1024;
const SECOND_HELPING_AFTER: Duration = Duration::from_millis(2);

/// What each session may hold whatever the others of its user do, so that none waits for ever.
const LEAST: usize = 4096;

/// When to look for room again.
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

    /// What was held back follows, since nobody wanted the session back.
    pub(crate) fn end_allowance(&mut self, id: SessionId, out: &mut Effects) {
        if let Some(relay) = self.registry.relay_mut(id) {
            relay.allowance = None;
            out.push(Effect::MoveBytes(id));
        }
    }

    /// How many bytes may be taken out of the descriptor of a session of which `stored` are held?
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
        // Who still has the descriptor of a connection that is over learns it by the descriptor's end.
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
                // If it is not writable now, an event will tell when it is.
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

    /// Those that waited for room are read again.
    pub fn stalled_relays(&mut self) -> Effects {
        let stalled = std::mem::take(&mut self.relays.stalled);
        stalled.into_iter().map(Effect::MoveBytes).collect()
    }
}
