//! Which transmit queue a session goes through: one of its own if something is reserved for its flow or its
//! port (ADR 11), else the channel's. The server says what is reserved; sessions find their transmit queues
//! when they come, and all of them anew when that changes.

use std::os::fd::OwnedFd;

use portolan_proto::control::{RequestBody, TxQueueState, TxQueues};
use portolan_proto::qos::Scope;
use portolan_stack::{Session, TxQueueId};
use portolan_types::{Instant, Protocol, Slot};

use crate::runtime::Core;

/// What the server said last.
#[derive(Debug, Default)]
pub(crate) struct TxQueueMap {
    main_burst: Option<u32>,
    /// Those that are open or awaited, flows before ports.
    open: Vec<Open>,
    /// New ones of which the server waits to hear that their sessions go through them.
    entered: Vec<TxQueueId>,
    /// No session is to go there any more; what waits there goes first.
    leaving: Vec<TxQueueId>,
}

#[derive(Debug)]
struct Open {
    scope: Scope,
    id: TxQueueId,
    burst: u32,
}

impl TxQueueMap {
    /// Is there a transmit queue that sessions are to enter or to leave?
    pub(crate) fn change(&self) -> bool {
        !(self.entered.is_empty() && self.leaving.is_empty())
    }

    /// The session's transmit queue, and what leaves by it at once.
    fn of(&self, session: &Session) -> (TxQueueId, Option<u32>) {
        let own = self.open.iter().find(|open| covers(&open.scope, session));
        match own {
            Some(own) => (own.id, Some(own.burst)),
            None => (TxQueueId::MAIN, self.main_burst),
        }
    }
}

impl Core {
    /// The server's list of transmit queues, with the taps of those that are new.
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
        // Who has waited for his transmit queue goes on.
        self.poll_tx(now);
    }

    /// There is no server any more that would open one.
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

    /// The server is another, which has reserved nothing yet.
    pub(crate) fn forget_tx_queues(&mut self, now: Instant) {
        self.tx_queues = TxQueueMap::default();
        self.choose_tx_queues(now);
    }

    /// Finds the session's transmit queue, when it has come, got another peer, or the transmit queues have changed.
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

    /// Tells the server which transmit queues their sessions go through, and lets go of those through which nothing goes any
    /// more.
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
                outbox.push(RequestBody::DoorwayEntered { number: id.0 });
            }
            !is_used
        });
        tx_queues.leaving.retain(|&id| {
            let stays = stack.uses_tx_queue(id) || !channel.close_tx_queue(id);
            if !stays {
                outbox.push(RequestBody::DoorwayClosed { number: id.0 });
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
