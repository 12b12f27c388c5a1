//! `ListSessions`: the answer is assembled in parts, a slice per turn, however many sessions there are.

use std::time::Duration;

use portolan_control::{Limit, SessionPhase, Timer};
use portolan_proto::control::ReplyBody;
use portolan_proto::report::SessionReport;
use portolan_sys::clock;
use portolan_types::SessionId;

use crate::calls::RequestId;
use crate::control_socket::client::Listing;
use crate::server::Server;

/// Bytes of lists of all kinds, until they are sent: more than one user's of all sessions that there may be.
pub(crate) const LISTS: Limit = Limit {
    total: 128 << 20,
    per_user: 32 << 20,
    reserve: 32 << 20,
};

/// Time per turn, for all lists together.
const PER_TURN: Duration = Duration::from_millis(2);

/// Sessions between reads of the clock.
const AT_ONCE: usize = 16;

impl Server {
    /// Begins a list; a short one is answered at once.
    pub(crate) fn begin_listing(&mut self, (client, request): RequestId) {
        let Some(uid) = self.clients.get(&client).map(|c| c.credentials.uid) else {
            return;
        };
        let ids: Vec<SessionId> = self
            .control
            .registry
            .sessions()
            .map(|session| session.id)
            .collect();
        let charge = self.lists.open(uid);
        self.listings.0.push_back(Listing {
            client,
            request,
            ids,
            count: 0,
            bytes: Vec::new(),
            charge,
        });
        if self.listings.0.len() == 1 {
            self.go_on_listing();
        }
    }

    /// Continues the lists in turn.
    pub(crate) fn go_on_listing(&mut self) {
        let until = clock::now() + PER_TURN;
        while let Some(mut listing) = self.listings.0.pop_front() {
            // None if the client has disconnected.
            let uid = self.clients.get(&listing.client).map(|c| c.credentials.uid);
            let Some(uid) = uid else {
                continue;
            };
            for _ in 0..AT_ONCE {
                let Some(id) = listing.ids.pop() else {
                    break;
                };
                if let Some(report) = self.report_to(uid, id) {
                    listing.count += 1;
                    listing.bytes.append(&mut portolan_proto::encode(&report));
                }
            }
            let request = (listing.client, listing.request);
            if listing.charge.grow_to(listing.size()).is_err() {
                self.refuse_list(request);
            } else if listing.ids.is_empty() {
                // A list is encoded as its length and its elements.
                let mut bytes = portolan_proto::encode(&listing.count);
                bytes.append(&mut listing.bytes);
                self.send_charged_list(request, (bytes, listing.charge), ReplyBody::Sessions);
            } else {
                self.listings.0.push_front(listing)
            }
            if clock::now() >= until {
                // Another list continues in the next turn.
                self.listings
                    .0
                    .rotate_left(usize::from(!self.listings.0.is_empty()));
                break;
            }
        }
        if !self.listings.0.is_empty() {
            self.control.timers.defer(Timer::Listings);
        }
    }

    /// Session numbers grant access, so they are shown to root and to their owner only.
    fn report_to(&mut self, uid: u32, id: SessionId) -> Option<SessionReport> {
        let session = self.control.registry.session(id)?;
        // A port, and no socket.
        if session.phase() == SessionPhase::Leased {
            return None;
        }
        let is_shown = uid == 0 || uid == session.uid;
        let mut report = self.report(session);
        if !is_shown {
            report.session = SessionId(0);
        }
        report.listener = self.report_listener(id);
        if let Some(listener) = self.control.registry.listener(id) {
            // As the kernel does for listeners: connections waiting to be accepted, and their limit.
            report.figures.receive_queue = listener.opens.queue.waiting();
            report.figures.send_queue = listener.opens.queue.limit();
        }
        Some(report)
    }
}
