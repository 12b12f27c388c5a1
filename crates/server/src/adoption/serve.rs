//! Requests of processes that continue, and the end of what nobody has named.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_bpf::map_id;
use portolan_control::{Adopted, ClientId, Errno, Holder, Input, Life, Timer};
use portolan_proto::control::{DescriptorOfAdopted, Evidence, ReplyBody};
use portolan_proto::filter::{FilterKey, FlowRow};
use portolan_proto::qos::Scope;
use portolan_sys::clock;
use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SessionId, is_scoped};
use tracing::{info, warn};

use crate::adoption::left_ends::Identity;
use crate::channels::pool::Spare;
use crate::random::random_u64;
use crate::requests::Answer;
use crate::server::Server;

/// Time spent per turn on what nobody has named.
const ABANDONING_PER_TURN: Duration = Duration::from_millis(2);

impl Server {
    /// Keeps what the previous server's processes may continue to use.
    pub(crate) fn keep_inheritance(&mut self) {
        let inheritance = &self.inheritance;
        for channel in inheritance.channels.keys() {
            self.control.registry.keep_channel(*channel);
        }
        let reset = inheritance.abandoned.iter().map(|(key, row)| (key, row));
        let mut latest = 0;
        for (key, row) in inheritance.flows.iter().chain(reset) {
            latest = latest.max(row.generation);
            if let Some(flow) = named(key) {
                let uid = inheritance.uid_of(row);
                self.control.expect(&flow, uid);
            }
        }
        self.control.registry.continue_from(Generation(latest));
        for (key, row) in &inheritance.ports {
            let channel = inheritance.channels.get(&ChannelId(row.channel));
            if let Some(channel) = channel.filter(|_| row.flags & FlowRow::LEASED != 0) {
                self.control
                    .hold_lease_back(key.local(), channel.uid, self.now);
            }
        }
        if inheritance.until.is_some() {
            self.control.timers.defer(Timer::Inheritance);
        }
    }

    /// Notes the channel that a process has shown the ring of, for its `Hello`.
    pub(crate) fn note_shown_ring(&mut self, id: ClientId, ring: Option<&OwnedFd>) {
        let Some(ring) = ring else { return };
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if client.inherits.is_some() {
            return;
        }
        let uid = client.credentials.uid;
        let shown = map_id(ring.as_fd());
        client.inherits = shown.and_then(|ring| self.inheritance.claim(ring, uid));
        if client.inherits.is_none() {
            self.control.counters.channels_refused += 1;
        }
    }

    /// Moves the tap of a channel that was made in advance to the one that a process continues with.
    pub(crate) fn move_tap(&mut self, spare: &Spare, channel: ChannelId) -> Result<(), Errno> {
        let removed = self.filter.remove_channel(spare.channel);
        let moved = removed.and_then(|()| self.filter.register_tap(channel, spare.tap.ifindex));
        moved.map_err(|failure| {
            warn!(%failure, channel = channel.0, "cannot move a tap");
            Errno::NOBUFS
        })
    }

    /// `Adopt`: a process holds a connection of an earlier server's time.
    pub(crate) fn adopt(
        &mut self,
        channel: ChannelId,
        adopted: Adopted,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let result = match adopted.evidence {
            Evidence::Row(generation) => self.adopt_flow(channel, (adopted, generation), fds),
            Evidence::Memory(side) => self.adopt_end(channel, (adopted, side), fds),
        };
        match result {
            Ok(_) => self.control.counters.adopted += 1,
            Err(_) => self.control.counters.adoptions_refused += 1,
        }
        let (session, descriptor) = result?;
        self.grant_awaited(&Scope::Flow(adopted.flow.canonical()));
        self.answer_waiting(session);
        Ok(ReplyBody::Adopted {
            session,
            descriptor,
        }
        .into())
    }

    fn adopt_flow(
        &mut self,
        channel: ChannelId,
        (adopted, generation): (Adopted, Generation),
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(SessionId, DescriptorOfAdopted), Errno> {
        let flow = adopted.flow;
        let place = (adopted.slot, generation);
        let adopted = match adopted.id {
            SessionId::NONE if self.may_have_opened(channel, &flow) => Adopted {
                id: SessionId(random_u64()),
                evidence: Evidence::Row(Generation::UNREGISTERED),
                ..adopted
            },
            _ if self.inheritance.confirms(channel, &flow, place) => adopted,
            _ => return Err(Errno::PERM),
        };
        let whose = (adopted.id, Identity::Flow(flow));
        let descriptor = self.descriptor_of_adopted(channel, whose, fds)?;
        let which = descriptor.which;
        let id = self.control.adopt(channel, adopted, descriptor.cookie)?;
        self.inheritance.flows.remove(&FilterKey::new(&flow));
        if let Err(errno) = self.watch_adopted(id, descriptor) {
            self.forget(id);
            return Err(errno);
        }
        self.renew_rows(id);
        self.note_arrival(id, channel);
        Ok((id, which))
    }

    /// Is it a connection that the previous server did not know, on a port from which the process could open it?
    fn may_have_opened(&self, channel: ChannelId, flow: &FlowKey) -> bool {
        self.inheritance.entitles(channel, flow.local)
            && self.may_connect(flow)
            && self.control.registry.by_flow(flow).is_none()
    }

    /// Resets what nobody has named. There may be hundreds of thousands: the rest follows in the next turn.
    pub(crate) fn look_at_inheritance(&mut self) {
        let Some(until) = self.inheritance.until else {
            return;
        };
        if until <= self.now {
            let unnamed = std::mem::take(&mut self.inheritance.flows);
            self.inheritance.abandoned.extend(unnamed);
        }
        let end = clock::now() + ABANDONING_PER_TURN;
        while let Some((key, row)) = self.inheritance.abandoned.pop_front() {
            self.abandon(&key, row);
            if clock::now() >= end {
                break;
            }
        }
        if !self.inheritance.abandoned.is_empty() {
            self.control.timers.defer(Timer::Inheritance);
        } else if until <= self.now {
            self.end_inheritance();
        } else {
            self.control.timers.arm(Timer::Inheritance, until);
        }
    }

    fn abandon(&mut self, key: &FilterKey, row: FlowRow) {
        self.control.counters.abandoned += 1;
        let uid = self.inheritance.uid_of(&row);
        let flow = named(key);
        let effects = flow.and_then(|flow| {
            let whose = (&flow, uid);
            self.control.abandon(whose, random_u64, self.now).ok()
        });
        match effects {
            Some(effects) => self.carry_out(effects),
            // The kernel's stack resets it when the peer sends.
            None => {
                if let Some(flow) = flow {
                    self.control.expect_no_longer(&flow);
                }
                if let Err(failure) = self.filter.drop_row(key) {
                    warn!(%failure, "cannot remove a row of the filter");
                }
            }
        }
    }

    /// From now on numbers of channels are free that no process has, and taps of before send nothing.
    fn end_inheritance(&mut self) {
        // Programs that wait for a channel get a new one.
        for client in self.clients.values_mut() {
            self.inheritance.give_back(client.inherits.take());
        }
        self.close_ends();
        let inheritance = std::mem::take(&mut self.inheritance);
        for id in inheritance.queued.into_values().flatten() {
            self.input(Input::Abort(id));
        }
        for (number, channel) in &inheritance.channels {
            let mut ended = self.filter.forget_taps(&channel.taps);
            if !inheritance.claimed.contains(number) {
                ended = ended.and_then(|()| self.filter.drop_inherited(*number));
            }
            if let Err(failure) = ended {
                warn!(%failure, channel = number.0, "cannot end a channel");
            }
        }
        let leased = self.leased_bindings();
        for (key, row) in &inheritance.ports {
            if leased.contains(key) {
                continue;
            }
            if let Err(failure) = self.filter.forget_port(key, row) {
                warn!(%failure, ?key, "cannot close a port in the filter");
            }
        }
        self.end_parts_of_absent();
        self.forget_awaited_guarantees();
        self.control.registry.release_channels();
        info!(
            adopted = self.control.counters.adopted,
            reset = self.control.counters.abandoned,
            "nothing is left of the previous server's"
        );
    }

    /// Can the next server continue with a session, whose state is its process's?
    pub(crate) fn is_left_to_successor(&self, id: SessionId) -> bool {
        let session = self.control.registry.session(id);
        session.is_some_and(|session| match &session.life {
            Life::Connected => {
                session.protocol == Protocol::Tcp
                    && matches!(session.holder, Holder::Process(..))
                    && session.awaited.is_none()
                    && !session.is_local()
            }
            Life::Listening(listener) => listener.is_delegated(),
            // Its process may open a connection at any moment.
            Life::Leased => true,
            _ => false,
        })
    }
}

/// Returns the flow of a row. What the table does not say of one between link-local addresses is needed to reach its peer.
fn named(key: &FilterKey) -> Option<FlowKey> {
    key.flow().filter(|flow| !is_scoped(flow.local.ip()))
}
