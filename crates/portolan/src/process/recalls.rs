//! What the server asks of a process by its recall event: sessions that others need, transmit queues, and captures; and
//! which peers within the host have ended.

use std::sync::PoisonError;

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_sys::clock;
use portolan_types::SessionId;

use crate::process::Process;

impl Process {
    /// Returns the sessions that the server recalls for other processes. Fetches the lists of transmit queues and
    /// captures, if they have changed, and ends the local sessions whose peers have ended.
    pub(crate) fn fetch_recalls(&self) -> Vec<SessionId> {
        let recall_lock = self
            .recall_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !self.recall_event.drain() {
            return Vec::new();
        }
        let Ok((
            ReplyBody::Recalled {
                sessions,
                ended,
                has_tx_queues,
                has_captures,
            },
            _,
        )) = self.control.call(RequestBody::FetchRecalls, &[])
        else {
            return Vec::new();
        };
        if has_tx_queues {
            self.fetch_tx_queues();
        }
        if has_captures {
            self.fetch_captures();
        }
        drop(recall_lock);
        if !ended.is_empty() {
            self.lock().end_peers(&ended, clock::now());
        }
        sessions
    }

    /// The server notifies before it hands over a session that must wait for its transmit queue, or of which a capture is to
    /// have the first byte; the receiver of the session checks here before it sends anything. If the helper has cleared
    /// the notifier and fetches the lists, this waits for it.
    pub(crate) fn hear_before_session(&self) {
        let _hearing = self
            .recall_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.recall_event.is_notified() {
            self.fetch_tx_queues();
            self.fetch_captures();
        }
    }

    fn fetch_captures(&self) {
        if let Ok((ReplyBody::Captures(rings), memory)) =
            self.control.call(RequestBody::FetchCaptures, &[])
        {
            self.lock().set_captures(&rings, memory);
        }
    }

    fn fetch_tx_queues(&self) {
        if let Ok((ReplyBody::TxQueues(tx_queues), taps)) =
            self.control.call(RequestBody::TxQueues, &[])
        {
            self.lock().set_tx_queues(clock::now(), tx_queues, taps);
        }
    }
}
