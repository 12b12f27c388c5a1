//! The transmit queue of each session: its own if something is reserved for its flow or its port
//! (ADR 11), else the channel's. The server publishes the reservations; a session's queue is chosen
//! when the session arrives, and again for all sessions when the reservations change.

use std::os::fd::OwnedFd;

use portolan_proto::control::{RequestBody, TxQueueState, TxQueues};
use portolan_proto::qos::Scope;
use portolan_stack::{Session, TxQueueId};
use portolan_types::{Instant, Protocol, Slot};

use crate::runtime::Core;

/// The server's last list of transmit queues.
#[derive(Debug, Default)]
pub(crate) struct TxQueueMap {
    main_burst: Option<u32>,
    /// Open or awaited queues, those for flows before those for ports.
    open: Vec<Open>,
    /// New queues; the server waits for the message that their sessions use them.
    entered: Vec<TxQueueId>,
    /// Queues that no session may use any more; they are closed once their backlog is sent.
    leaving: Vec<TxQueueId>,
}

#[derive(Debug)]
struct Open {
    scope: Scope,
    id: TxQueueId,
    burst: u32,
}

impl TxQueueMap {
    /// Is a transmit queue about to be entered or left by sessions?
    pub(crate) fn change(&self) -> bool {
        !(self.entered.is_empty() && self.leaving.is_empty())
    }

    /// Returns the session's transmit queue, and its limit on bursts.
    fn of(&self, session: &Session) -> (TxQueueId, Option<u32>) {
        let own = self.open.iter().find(|open| covers(&open.scope, session));
        match own {
            Some(own) => (own.id, Some(own.burst)),
            None => (TxQueueId::MAIN, self.main_burst),
        }
    }
}

impl Core {
    /// Applies the server's list of transmit queues, with the taps of the new ones.
    pub(crate) fn set_tx_queues(&mut self, now: Instant, tx_queues: TxQueues, taps: Vec<OwnedFd>) {
        let mut taps = taps.into_iter();
        let mut open = Vec::new();
        for tx_queue in tx_queues.others {
            let id = TxQueueId(tx_queue.number);
            match tx_queue.state {
                TxQueueState::Awaited => self.channel.await_tx_queue(id),
                TxQueueState::New => {
                    if let Some(tap) = taps.next() {
                        self.channel.open_tx_queue(id, tap);
                        self.tx_queues.entered.push(id);
                    }
                }
                TxQueueState::Open => {}
            }
            open.push(Open {
                scope: tx_queue.scope,
                id,
                burst: tx_queue.burst,
            });
        }
        open.sort_by_key(|open| !matches!(open.scope, Scope::Flow(_)));
        self.tx_queues.main_burst = tx_queues.main_burst;
        for before in std::mem::replace(&mut self.tx_queues.open, open) {
            let stays = self.tx_queues.open.iter().any(|open| open.id == before.id);
            if !stays && !self.channel.stop_awaiting(before.id) {
                self.tx_queues.leaving.push(before.id);
            }
        }
        self.choose_tx_queues(now);
    }

    fn choose_tx_queues(&mut self, now: Instant) {
        let slots: Vec<Slot> = self.stack.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.choose_tx_queue(slot);
        }
        // Sessions that waited for their transmit queue continue.
        self.poll_tx(now);
    }

    /// Stops waiting for queues that a lost server would have opened.
    pub(crate) fn stop_awaiting_tx_queues(&mut self, now: Instant) {
        let Core {
            tx_queues, channel, ..
        } = self;
        let before = tx_queues.open.len();
        tx_queues
            .open
            .retain(|open| !channel.stop_awaiting(open.id));
        if tx_queues.open.len() != before {
            self.choose_tx_queues(now);
        }
    }

    /// Discards the list, because another server has not reserved anything yet.
    pub(crate) fn forget_tx_queues(&mut self, now: Instant) {
        self.tx_queues = TxQueueMap::default();
        self.choose_tx_queues(now);
    }

    /// Chooses the session's transmit queue: when it arrives, gets another peer, or the list changes.
    pub(crate) fn choose_tx_queue(&mut self, slot: Slot) {
        let Some(session) = self.stack.get_mut(slot) else {
            return;
        };
        let (id, burst) = self.tx_queues.of(session);
        if let Session::Tcp(session) = session {
            session.connection.limit_bursts(burst);
        }
        self.stack.set_tx_queue(slot, id);
    }

    /// Reports the transmit queues that their sessions use by now to the server, and closes those
    /// that are no longer used.
    pub(crate) fn close_tx_queues(&mut self) {
        let Core {
            stack,
            channel,
            tx_queues,
            outbox,
            ..
        } = self;
        tx_queues.entered.retain(|&id| {
            let is_used = !stack.approaches_tx_queue(id);
            if is_used {
                outbox.push(RequestBody::TxQueueEntered { number: id.0 });
            }
            !is_used
        });
        tx_queues.leaving.retain(|&id| {
            let stays = stack.uses_tx_queue(id) || !channel.close_tx_queue(id);
            if !stays {
                outbox.push(RequestBody::TxQueueClosed { number: id.0 });
            }
            stays
        });
    }
}

fn covers(scope: &Scope, session: &Session) -> bool {
    match session {
        Session::Tcp(session) => {
            let flow = session.flow;
            scope.has_session(Protocol::Tcp, flow.local, Some(flow.remote))
        }
        Session::Udp(session) => scope.has_session(Protocol::Udp, session.local, session.remote),
    }
}
