//! Gives sessions the transmit queues of their classes.

use std::time::Duration;

use portolan_bpf::Filter;
use portolan_control::{Holder, SessionEntry, Timer};
use portolan_proto::control::{ReplyBody, TxQueue, TxQueues};
use portolan_proto::qos::Scope;
use portolan_sys::tap::Tap;
use portolan_types::{ChannelId, SessionId};
use tracing::{error, warn};

use super::super::transmit::Class;
use super::{Stage, Transition, TxQueueEntry};
use crate::calls::Calls;
use crate::requests::Answer;
use crate::server::Server;

/// The kernel takes milliseconds to make a tap, tens of them when it is busy.
const TIMEOUT: Duration = Duration::from_secs(1);

impl Server {
    /// Handles a session that has moved to a process, where it may need a transmit queue.
    pub(crate) fn note_arrival(&mut self, id: SessionId, channel: ChannelId) {
        if let Some((scope, class)) = self.tx_queue_for(id) {
            self.open_tx_queue(channel, (scope, class), Transition::Wait);
        }
    }

    fn tx_queue_for(&self, id: SessionId) -> Option<(Scope, Class)> {
        let session = self.control.registry.session(id)?;
        let (scope, class) = self.own_reservation(session)?;
        Some((scope.clone(), class))
    }

    /// Returns whether the session is in no class until it uses its transmit queue.
    pub(crate) fn goes_on_as_before(&self, session: &SessionEntry, channel: ChannelId) -> bool {
        let set = self.channels.get(&channel).map(|entry| &entry.tx_queues);
        let goes_on = |entry: &&TxQueueEntry| {
            entry.transition == Transition::GoOn && entry.deadline.is_some()
        };
        set.is_some_and(|set| {
            let mut going = set.tx_queues.iter().filter(goes_on);
            going.any(|entry| {
                self.own_reservation(session)
                    .is_some_and(|(scope, _)| entry.is_for(scope))
            })
        })
    }

    /// Handles changed reservations, where that of `anew` is new to existing sessions: orders missing transmit queues,
    /// and closes unneeded ones.
    pub(crate) fn refresh_tx_queues(&mut self, anew: Option<&Scope>) {
        let held = |session: &portolan_control::SessionEntry| match session.holder {
            Holder::Process(channel, _) => Some((session.id, channel)),
            _ => None,
        };
        let sessions: Vec<_> = self.control.registry.sessions().filter_map(held).collect();
        let channels: Vec<ChannelId> = self.channels.keys().copied().collect();
        for channel in channels {
            self.close_tx_queues(channel);
        }
        for (id, channel) in sessions {
            if let Some((scope, class)) = self.tx_queue_for(id) {
                let transition = if anew == Some(&scope) {
                    Transition::GoOn
                } else {
                    Transition::Wait
                };
                self.open_tx_queue(channel, (scope, class), transition);
            }
        }
    }

    /// Sets the burst of a process's own tap.
    pub(crate) fn tell_main_burst(&mut self, channel: ChannelId, burst: Option<u32>) {
        if let Some(entry) = self.channels.get_mut(&channel)
            && entry.tx_queues.main_burst != burst
        {
            entry.tx_queues.main_burst = burst;
            self.tell_of_tx_queues(channel);
        }
    }

    fn open_tx_queue(
        &mut self,
        channel: ChannelId,
        (scope, class): (Scope, Class),
        transition: Transition,
    ) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let set = &mut entry.tx_queues;
        if let Some(entry) = set.of_scope(&scope) {
            if entry.class == class {
                return;
            }
            entry.class = class;
            if let Stage::Made(tap) | Stage::Handed(tap) = &entry.stage {
                settle((&self.filter, &self.calls), channel, tap, class);
            }
            return self.tell_of_tx_queues(channel);
        }
        let Some(number) = set.free_number() else {
            self.control.counters.tx_queues_refused += 1;
            return;
        };
        let until = self.now + TIMEOUT;
        set.tx_queues.push(TxQueueEntry {
            number,
            scope,
            class,
            stage: Stage::Ordered,
            transition,
            deadline: Some(until),
        });
        self.control
            .timers
            .arm_once(Timer::TxQueues(channel), until);
        self.channel_pool.order_tx_queue(channel, number);
        self.tell_of_tx_queues(channel);
    }

    /// Handles transmit queues of a process that are late.
    pub(crate) fn look_for_late_tx_queues(&mut self, channel: ChannelId) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let (lost, next) = entry.tx_queues.lose_patience(self.now);
        self.control.counters.tx_queues_late += lost;
        if let Some(next) = next {
            self.control.timers.arm(Timer::TxQueues(channel), next);
        }
        if lost > 0 {
            self.tell_of_tx_queues(channel);
            self.classify_sessions_of(channel);
        }
    }

    fn classify_sessions_of(&mut self, channel: ChannelId) {
        for id in self.sessions_owned_by(channel) {
            self.renew_rows(id);
        }
    }

    /// Handles a transmit queue that the thread has made, or could not.
    pub(crate) fn enter_tx_queue(&mut self, channel: ChannelId, number: u8, tap: Option<Tap>) {
        let Some(tap) = tap else {
            return self.drop_tx_queue(channel, number);
        };
        let entry = self.channels.get_mut(&channel);
        let ordered = entry.and_then(|entry| entry.tx_queues.find_ordered(number));
        match ordered {
            Some(entry) => {
                settle((&self.filter, &self.calls), channel, &tap, entry.class);
                entry.stage = Stage::Made(tap);
                self.tell_of_tx_queues(channel);
            }
            // The process has exited in the meantime, or the reservation has ended.
            None => self.leaving_taps.delete(tap, None),
        }
    }

    /// Drops a transmit queue that could not be made: its sessions share their process's.
    fn drop_tx_queue(&mut self, channel: ChannelId, number: u8) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        entry
            .tx_queues
            .tx_queues
            .retain(|entry| entry.number != number);
        self.control.counters.tx_queues_refused += 1;
        self.tell_of_tx_queues(channel);
        self.classify_sessions_of(channel);
    }

    /// Closes transmit queues without a reservation.
    fn close_tx_queues(&mut self, channel: ChannelId) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let (mut kept, mut unused, mut has_news) = (Vec::new(), Vec::new(), false);
        for mut tx_queue in std::mem::take(&mut entry.tx_queues.tx_queues) {
            if self.qos.transmit.has(&tx_queue.scope) {
                kept.push(tx_queue);
                continue;
            }
            match tx_queue.stage {
                // The tap is destroyed when the thread delivers it.
                Stage::Ordered => {
                    has_news = true;
                    continue;
                }
                Stage::Made(tap) => {
                    has_news = true;
                    unused.push(tap);
                    continue;
                }
                Stage::Handed(tap) => {
                    has_news = true;
                    tx_queue.stage = Stage::Leaving(tap);
                }
                Stage::Leaving(_) => {}
            }
            kept.push(tx_queue);
        }
        entry.tx_queues.tx_queues = kept;
        for tap in unused {
            self.destroy_tx_queue(tap);
        }
        if has_news {
            self.tell_of_tx_queues(channel);
        }
    }

    pub(crate) fn destroy_tx_queue(&mut self, tap: Tap) {
        if let Err(failure) = self.filter.remove_tx_queue(tap.ifindex) {
            error!(%failure, "cannot remove a transmit queue");
        }
        self.leaving_taps.delete(tap, None);
    }

    fn tell_of_tx_queues(&mut self, channel: ChannelId) {
        if let Some(entry) = self.channels.get_mut(&channel) {
            entry.tx_queues.has_news = true;
            entry.recall_event.wake();
        }
    }

    /// `TxQueues`: hands over the list and new taps.
    pub(crate) fn tx_queues(&mut self, channel: ChannelId) -> Answer {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return Answer::Silence;
        };
        let set = &mut entry.tx_queues;
        set.has_news = false;
        let (mut others, mut taps) = (Vec::new(), Vec::new());
        for entry in &mut set.tx_queues {
            let Some(state) = entry.state() else {
                continue;
            };
            match entry.hand_over() {
                Ok(tap) => taps.extend(tap),
                Err(failure) => {
                    error!(%failure, "cannot share a transmit queue");
                    continue;
                }
            }
            others.push(TxQueue {
                number: entry.number,
                state,
                scope: entry.scope.clone(),
                burst: entry.class.terms.burst,
            });
        }
        let main_burst = set.main_burst;
        let tx_queues = TxQueues { main_burst, others };
        Answer::Reply(ReplyBody::TxQueues(tx_queues), taps)
    }

    /// `TxQueueEntered`: the sessions use the transmit queue.
    pub(crate) fn tx_queue_entered(&mut self, channel: ChannelId, number: u8) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let is_it = |entry: &&mut TxQueueEntry| {
            entry.number == number
                && entry.deadline.is_some()
                && matches!(entry.stage, Stage::Handed(_))
        };
        if let Some(entry) = entry.tx_queues.tx_queues.iter_mut().find(is_it) {
            entry.deadline = None;
            self.classify_sessions_of(channel);
        }
    }

    /// `TxQueueClosed`: the process has released the transmit queue.
    pub(crate) fn tx_queue_closed(&mut self, channel: ChannelId, number: u8) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let set = &mut entry.tx_queues.tx_queues;
        let is_it = |entry: &TxQueueEntry| {
            entry.number == number && matches!(entry.stage, Stage::Leaving(_))
        };
        if let Some(at) = set.iter().position(is_it)
            && let Stage::Leaving(tap) = set.swap_remove(at).stage
        {
            self.destroy_tx_queue(tap);
            // A reservation made in the meantime may need its number.
            self.refresh_tx_queues(None);
        }
    }
}

/// What goes through the tap is the channel's and in the class, in which only so much waits that its writer
/// notices soon.
fn settle((filter, calls): (&Filter, &Calls), channel: ChannelId, tap: &Tap, class: Class) {
    calls.bound_tap(tap, class.terms.send_buffer());
    if let Err(failure) = filter.set_tap(channel, tap.ifindex, class.minor.0) {
        warn!(%failure, "cannot classify the frames of a transmit queue");
    }
}
