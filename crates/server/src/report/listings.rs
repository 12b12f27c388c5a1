//! `ListSessions`: the answer is put together in parts, a slice of each turn, however many sessions there are.

use std::time::Duration;

use portolan_control::{ClientId, Errno, Timer};
use portolan_proto::control::ReplyBody;
use portolan_proto::report::SessionReport;
use portolan_sys::clock;
use portolan_types::SessionId;

use crate::control_socket::client::Listing;
use crate::requests::pack;
use crate::server::Server;

/// Of one turn, for all lists together.
const PER_TURN: Duration = Duration::from_millis(2);

/// Sessions between looks at the clock.
const AT_ONCE: usize = 16;

impl Server {
    /// Begins a list; a short one is answered at once.
    pub fn begin_listing(&mut self, client: ClientId, request: u32) {
        let ids: Vec<SessionId> = self
            .control
            .registry
            .sessions()
            .map(|session| session.id)
            .collect();
        self.listings.0.push_back(Listing {
            client,
            request,
            ids,
            count: 0,
            bytes: Vec::new(),
        });
        if self.listings.0.len() == 1 {
            self.go_on_listing();
        }
    }

    /// Goes on with lists, each in its turn.
    pub fn go_on_listing(&mut self) {
        let until = clock::now() + PER_TURN;
        while let Some(mut listing) = self.listings.0.pop_front() {
            // None if it is gone.
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
            if listing.ids.is_empty() {
                self.answer_listing(listing)
            } else {
                self.listings.0.push_front(listing)
            }
            if clock::now() >= until {
                // Another one goes on in the next turn.
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

    /// Numbers of sessions open doors, so they are shown to root and to their owner only.
    fn report_to(&mut self, uid: u32, id: SessionId) -> Option<SessionReport> {
        let session = self.control.registry.session(id)?;
        let is_shown = uid == 0 || uid == session.uid;
        let mut report = self.report(session);
        if !is_shown {
            report.session = SessionId(0);
        }
        report.listener = self.report_listener(id);
        if let Some(listener) = self.control.registry.listener(id) {
            // As of the kernel's: what waits to be accepted, and how many may.
            report.figures.receive_queue = listener.opens.queue.waiting();
            report.figures.send_queue = listener.opens.queue.limit();
        }
        Some(report)
    }

    fn answer_listing(&mut self, listing: Listing) {
        // A list is encoded as its length and its elements.
        let mut bytes = portolan_proto::encode(&listing.count);
        bytes.extend(listing.bytes);
        let (body, fds) = match pack(bytes) {
            Ok((list, fd)) => (ReplyBody::Sessions(list), fd.into_iter().collect()),
            Err(Errno(errno)) => (ReplyBody::Error { errno }, Vec::new()),
        };
        self.reply(listing.client, listing.request, body, fds);
    }
}
