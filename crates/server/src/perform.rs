//! Performs the effects of `Control`. Decides nothing.

use std::time::Duration;

use portolan_control::{Effect, Effects, Holder, Input, Requester, Timer};
use portolan_proto::control::ReplyBody;
use portolan_sys::probes;
use portolan_types::{ChannelId, SessionId, Slot};

use crate::server::Server;

/// Timers processed in one turn.
const TIMERS_PER_TURN: usize = 256;

/// How long the allocator keeps the memory of disconnected programs, if the server is idle then.
const MEMORY_KEPT: Duration = Duration::from_secs(5);
/// The same if it is never idle.
const MEMORY_KEPT_MOST: Duration = Duration::from_secs(20);

/// A slot without a session.
const NO_SLOT: Slot = Slot(u32::MAX);

impl Server {
    /// Passes an event to `Control`, and performs its effects.
    pub(crate) fn input(&mut self, input: Input) {
        let effects = self.control.handle(input, self.now);
        self.carry_out(effects);
    }

    pub(crate) fn carry_out(&mut self, effects: Effects) {
        for effect in effects {
            self.carry_out_one(effect);
        }
    }

    fn carry_out_one(&mut self, effect: Effect) {
        match effect {
            Effect::CloseConnection(id, slot) => self.close_connection(id, slot),
            Effect::ResetConnection(slot) => self.reset_connection(slot),
            Effect::SteerListener(id) => self.steer_listener(id),
            Effect::CloseRows(keys) => self.close_rows(&keys),
            Effect::ForgetExempt(flows) => self.forget_exempt(&flows),
            Effect::AnswerFlood(binding, flood) => self.answer_flood(&binding, &flood),
            Effect::EndFlood(binding) => self.end_flood(&binding),
            Effect::ReviewFloods(id) => self.review_floods_of(id),
            Effect::Announce(id) => self.announce(id),
            Effect::CloseLocal(id) => self.close_local(id),
            Effect::ResetLocal(id) => self.abort_local(id),
            Effect::UnholdLocal(id) => self.unhold_local(id),
            Effect::EndGuarantees(flow) => self.end_guarantees_of_flow(&flow),
            Effect::EndExtensions(id) => self.end_extensions_of(id),
            Effect::Forget(id) => self.forget(id),
            Effect::ForgetWhenSent(id) => self.done.push(id),
            Effect::RemoveConnection(slot) => self.remove_connection(slot),
            Effect::RemoveRow(flow) => self.remove_row(&flow),
            Effect::LeaveEndpoint(id, endpoint) => self.leave_endpoint(id, endpoint),
            Effect::DropLocalEnd(id) => self.drop_local_end(id),
            Effect::ReleasePort(id) => self.drop_reservation(id),
            Effect::Release(id) => self.release_handles(id),
            Effect::SteerToNobody(id) => {
                self.steer(id, Holder::Server(NO_SLOT));
            }
            Effect::Probe(flow) => self.probe_peer(&flow),
            Effect::ClosePeerEnd(id) => self.drop_far(id),
            Effect::LookAtOrphan(id) => {
                let unsent = self.unsent(id);
                self.input(Input::Unsent { id, unsent });
            }
            Effect::Recall(channel, id) => self.recall(channel, id),
            Effect::MoveBytes(id) => self.pump(id),
            Effect::WatchPeerEnd(id, interest) => self.watch_relayed(id, interest),
            Effect::Serve(id, requester) => self.serve_requester(id, requester),
            Effect::Refuse(
                Requester {
                    client, request, ..
                },
                errno,
            ) => {
                let body = ReplyBody::Error { errno: errno.0 };
                self.reply(client, request, body, Vec::new());
            }
            Effect::TellLocalOpener(id) => self.tell_local_opener(id),
            Effect::WatchLocal(id) => {
                self.watch_local(id);
                self.attend_local(id);
            }
            Effect::FailOpen(id, errno) => self.open_failed(id, errno),
            Effect::EndDeal(id) => self.end_deal(id),
            Effect::TakeHandshakes(id) => self.take_handshakes(id),
            Effect::OpenPortAtKernel(id) => self.open_port_at_kernel(id),
        }
    }

    pub(crate) fn recall(&mut self, number: ChannelId, id: SessionId) {
        if let Some(channel) = self.channels.get_mut(&number) {
            channel.recalled.push(id);
            channel.recall_event.wake();
            probes::recalled(id.0, number.0.into());
        }
    }

    /// Processes expired timers, the earliest first.
    pub(crate) fn on_timers(&mut self) {
        for timer in self.control.timers.take(self.now, TIMERS_PER_TURN) {
            match timer {
                Timer::Session(id, deadline) => self.input(Input::Due(id, deadline)),
                Timer::Ports => self.control.expire_ports(self.now),
                Timer::EndedProcesses => self.go_on_ending(),
                Timer::Inheritance => self.look_at_inheritance(),
                Timer::Listings => self.go_on_listing(),
                Timer::Descriptors => self.look_for_descriptors(),
                Timer::Shares => self.read_throttled(),
                Timer::RelayMemory => {
                    let effects = self.control.stalled_relays();
                    self.carry_out(effects);
                }
                Timer::Neighbour(next_hop) => self.ask_again_for(next_hop),
                Timer::Unanswered => self.give_up_on_unanswered(),
                Timer::ChannelPool => self.shrink_channel_pool(),
                Timer::Floods => self.look_at_floods(),
                Timer::LostConnections => self.probe_lost_connections(),
                Timer::LocalSessions => self.attend_locals(),
                Timer::EndedPeers => self.tell_of_ended_peers(),
                Timer::LocalPeers => self.look_at_unpaired(),
                Timer::LeavingClasses => self.look_at_leaving_classes(),
                Timer::Cpu => self.look_at_cpu(),
                Timer::Extensions => self.look_for_stopped_extensions(),
                Timer::Cgroups => self.look_for_moves(),
                Timer::Guarantees => self.on_guarantees_due(),
                Timer::Budgets => self.go_on_renewing(),
                Timer::TxQueues(channel) => self.look_for_late_tx_queues(channel),
                Timer::PendingCloses => self.look_at_pending_closes(),
                Timer::ForeignEnds => self.look_at_foreign_ends(),
                Timer::Links => self.look_at_links_again(),
                Timer::FreeMemory => self.give_back_memory(),
                Timer::Watchdog => self.feed_watchdog(),
            }
        }
    }

    pub(crate) fn give_back_memory_later(&mut self) {
        let later = self.now + MEMORY_KEPT;
        self.control.timers.arm_once(Timer::FreeMemory, later);
        self.memory_free_since.get_or_insert(self.now);
    }

    /// Returns free memory to the kernel. It walks the allocator's lists, so it waits until the server is idle, but not for
    /// ever.
    fn give_back_memory(&mut self) {
        let since = self.memory_free_since.unwrap_or(self.now);
        if self.was_asked && self.now.since(since) < MEMORY_KEPT_MOST {
            return self.give_back_memory_later();
        }
        self.memory_free_since = None;
        portolan_sys::allocator::give_back_free();
    }
}
