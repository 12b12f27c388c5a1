//! Start and end of processes: `Hello` sets up a channel, a hang-up tears it down.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_bpf::ChannelMaps;
use portolan_control::{
    Charge, ClientId, Control, Errno, Input, SessionEntry, SessionPhase, Timer,
};
use portolan_proto::Speaks;
use portolan_proto::control::{Probed, ProbedState, ReplyBody};
use portolan_sys::clock;
use portolan_sys::shm::{JournalReader, StatisticsReader};
use portolan_sys::tap::Tap;
use portolan_sys::unix::Credentials;
use portolan_sys::wait::{wake_pair, wake_receiver};
use portolan_types::{ChannelId, Protocol, SessionId};
use tracing::{debug, error, warn};

use crate::channels::channel::{Channel, Ending, Ends};
use crate::channels::pool::{PendingHello, Spare};
use crate::local_ends::ProcessNotifier;
use crate::requests::Answer;
use crate::server::Server;

/// Maximum length of a program name.
const PROGRAM_MAX: usize = 64;

/// Time spent per turn on ending the sessions of exited processes.
const ENDING_PER_TURN: Duration = Duration::from_millis(2);

impl Server {
    /// Registers a process and gives it a channel, now or as soon as there is one. `ring` is that of its channel under the
    /// previous server.
    pub(crate) fn hello(
        &mut self,
        id: ClientId,
        (version, program): (u32, String),
        ring: Option<&OwnedFd>,
    ) -> Result<Answer, Errno> {
        let client = self.clients.get(&id).ok_or(Errno::BADF)?;
        let program: String = program.chars().take(PROGRAM_MAX).collect();
        // One channel per connection, including one that is being made.
        if client.channel.is_some() || client.is_registering {
            return Err(Errno::ALREADY);
        }
        if !Speaks::OWN.fits(Speaks::from_word(version)) {
            warn!(
                pid = client.credentials.pid,
                program, "program with a library of another version refused"
            );
            return Err(Errno::PROTO);
        }
        let uid = client.credentials.uid;
        self.note_shown_ring(id, ring);
        let charge = match self.control.registry.admit_process(uid) {
            Ok(charge) => charge,
            // Waits for its user's own taps that are about to be deleted.
            Err(exhausted) if self.leaving_taps.relieves(uid, exhausted) => {
                self.set_registering(id, true);
                return Ok(Answer::Channel(program, None));
            }
            Err(exhausted) => return Err(exhausted.errno_of_number()),
        };
        self.check_descriptors()?;
        let claim = self.leaving_taps.claim_of(uid);
        let answer = match self.channel_pool.take(self.now, claim) {
            Some(spare) => self.hand_channel(id, (program, charge), spare)?,
            None => Answer::Channel(program, Some(charge)),
        };
        // The channel taken is registered by now.
        self.order_channel_pool();
        match answer {
            Answer::Channel(..) if self.is_out_of_channels() => Err(Errno::NFILE),
            answer => {
                let is_registering = matches!(answer, Answer::Channel(..));
                self.set_registering(id, is_registering);
                Ok(answer)
            }
        }
    }

    fn set_registering(&mut self, id: ClientId, is_registering: bool) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.is_registering = is_registering;
        }
    }

    /// Like [`Server::hello`], for a process that had to wait.
    pub(crate) fn welcome_late(&mut self, pending_hello: PendingHello, spare: Spare) {
        let PendingHello {
            client,
            request,
            program,
            charge,
            ..
        } = pending_hello;
        let Some(charge) = charge else { return };
        self.set_registering(client, false);
        let (body, fds) = match self.hand_channel(client, (program, charge), spare) {
            Ok(Answer::Reply(body, fds)) => (body, fds),
            Ok(_) => return,
            Err(errno) => (ReplyBody::Error { errno: errno.0 }, Vec::new()),
        };
        self.reply(client, request, body, fds);
    }

    pub(crate) fn refuse_late(&mut self, pending_hello: PendingHello, errno: Errno) {
        self.control.counters.refused += 1;
        self.set_registering(pending_hello.client, false);
        let refusal = ReplyBody::Error { errno: errno.0 };
        self.reply(
            pending_hello.client,
            pending_hello.request,
            refusal,
            Vec::new(),
        );
    }

    fn hand_channel(
        &mut self,
        id: ClientId,
        (mut program, charge): (String, Charge),
        spare: Spare,
    ) -> Result<Answer, Errno> {
        while program.len() > PROGRAM_MAX {
            program.pop();
        }
        let client = self.clients.get_mut(&id);
        let inherited = client.and_then(|client| client.inherits.take());
        let channel = inherited.unwrap_or(spare.channel);
        let uid = charge.uid();
        if let Err(errno) = self.register(id, (program, charge), channel) {
            self.return_spare(spare);
            return Err(errno);
        }
        if inherited.is_some()
            && let Err(errno) = self.move_tap(&spare, channel)
        {
            let charge = self.disown(id, channel);
            self.drop_channel(channel, spare.tap, charge);
            return Err(errno);
        }
        if let Err(failure) = self.filter.set_owner(channel, uid) {
            error!(%failure, channel = channel.0, "the next server will not know the channel");
        }
        let tap = spare.tap;
        let maps = inherited.is_none().then_some(spare.maps);
        match self.share_channel(id, channel, (&tap, maps)) {
            Ok((answer, ends)) => {
                self.channels.insert(channel, Channel::new(ends, tap));
                self.tell_channel(channel);
                self.capture_newcomer(channel);
                self.apply_policies_to(channel);
                self.grant_awaited_by(channel);
                Ok(answer)
            }
            Err(failure) => {
                error!(%failure, "cannot share a channel");
                let charge = self.disown(id, channel);
                self.drop_channel(channel, tap, charge);
                Err(Errno::NOBUFS)
            }
        }
    }

    fn register(
        &mut self,
        id: ClientId,
        (program, charge): (String, Charge),
        channel: ChannelId,
    ) -> Result<(), Errno> {
        let client = self.clients.get_mut(&id).ok_or(Errno::BADF)?;
        if client.channel.is_some() {
            return Err(Errno::ALREADY);
        }
        let Credentials { pid, uid, .. } = client.credentials;
        client.channel = Some(channel);
        self.control.counters.processes += 1;
        debug!(pid, uid, program, channel = channel.0, "process registered");
        self.control
            .registry
            .register(channel, pid, program, charge);
        Ok(())
    }

    /// Undoes a registration. Returns its charge.
    fn disown(&mut self, id: ClientId, channel: ChannelId) -> Option<Charge> {
        if let Some(client) = self.clients.get_mut(&id) {
            client.channel = None;
        }
        self.control.registry.unregister(channel)
    }

    /// Makes what the process gets of its channel, and what the server keeps besides the tap.
    fn share_channel(
        &mut self,
        client: ClientId,
        channel: ChannelId,
        (tap, maps): (&Tap, Option<ChannelMaps>),
    ) -> anyhow::Result<(Answer, Ends)> {
        self.sysctls.look(self.now);
        let statistics = StatisticsReader::create()?;
        let journal = JournalReader::create()?;
        let (recall_receiver, recall_event) = wake_pair()?;
        let (wake_receiver, address) = wake_receiver(self.wake_directory.path())?;
        let notifier = ProcessNotifier::new(address)?;
        let continues = maps.is_none();
        let mut fds: Vec<OwnedFd> = vec![tap.fd.try_clone()?];
        fds.extend(maps.into_iter().flat_map(|maps| [maps.ring, maps.doorbell]));
        fds.extend([
            self.metastate.as_fd().try_clone_to_owned()?,
            statistics.as_fd().try_clone_to_owned()?,
            journal.as_fd().try_clone_to_owned()?,
            recall_receiver.into(),
            wake_receiver.into(),
        ]);
        let body = ReplyBody::Welcome {
            channel,
            continues,
            incarnation: self.incarnation,
            notifier: notifier.number,
            ring_size: self.config.ring_size,
            tap: tap.ifindex,
            cuts_datagrams: tap.cuts_datagrams,
            parameters: self.config.parameters(),
        };
        let ends = Ends {
            client,
            statistics,
            journal,
            recall_event,
            notifier,
        };
        Ok((Answer::Reply(body, fds), ends))
    }

    /// Handles the end of a process, whatever its cause: aborts the sessions it held, frees its channel.
    pub(crate) fn channel_gone(&mut self, channel: ChannelId) {
        if let Some(process) = self.control.registry.process(channel) {
            debug!(pid = process.pid, program = process.program, "process gone");
        }
        self.end_delegations_of(channel);
        self.probe_unregistered(channel, Control::is_lease);
        self.end_extensions_of_channel(channel);
        let sessions = self.control.registry.held_by(channel);
        self.ending.push_back(Ending {
            channel,
            sessions,
            known: None,
        });
        self.go_on_ending();
    }

    /// Aborts the sessions of exited processes. A process may have had tens of thousands: the rest follows in the next
    /// turn.
    pub(crate) fn go_on_ending(&mut self) {
        let until = clock::now() + ENDING_PER_TURN;
        while let Some(process) = self.ending.front_mut() {
            let channel = process.channel;
            if let Some(id) = process.sessions.pop() {
                self.abort_if_held_by(id, channel);
            } else {
                let registry = &mut self.control.registry;
                let known = process
                    .known
                    .get_or_insert_with(|| registry.known_to(channel));
                match known.pop() {
                    Some(id) => {
                        registry.disentitle(id, channel);
                        self.leave_rejoined(id, channel);
                    }
                    None => {
                        self.ending.pop_front();
                        self.free_channel(channel);
                    }
                }
            }
            if clock::now() >= until && !self.ending.is_empty() {
                return self.control.timers.defer(Timer::EndedProcesses);
            }
        }
    }

    fn abort_if_held_by(&mut self, id: SessionId, channel: ChannelId) {
        if self.is_held_by(id, channel) {
            self.input(Input::Orphaned(id));
        }
    }

    fn free_channel(&mut self, channel: ChannelId) {
        for id in self.control.registry.held_by(channel) {
            self.input(Input::Orphaned(id));
        }
        let charge = self.control.registry.unregister(channel);
        self.end_budgets_of_gone();
        self.end_raw_flows(channel);
        self.end_rings_of(channel);
        if let Some(gone) = self.channels.remove(&channel) {
            for tap in gone.tx_queues.into_taps() {
                self.destroy_tx_queue(tap);
            }
            self.add_to_ended(&gone.statistics);
            self.tell_of_gone_process(channel, gone.captures);
            self.drop_channel(channel, gone.tap, charge);
        }
    }

    /// Deletes a channel's tap and maps.
    fn drop_channel(&mut self, channel: ChannelId, tap: Tap, charge: Option<Charge>) {
        if let Err(failure) = self.filter.remove_channel(channel) {
            error!(%failure, channel = channel.0, "cannot remove a channel");
        }
        self.leaving_taps.delete(tap, charge);
    }

    /// `Probe`: reports what is behind a descriptor that the process did not open. Having the descriptor is the right
    /// to know.
    pub(crate) fn probe(
        &mut self,
        client: ClientId,
        descriptor: Option<&OwnedFd>,
    ) -> Result<Answer, Errno> {
        let descriptor = descriptor.ok_or(Errno::INVAL)?;
        let cookie = portolan_sys::unix::cookie(descriptor).map_err(|_| Errno::INVAL)?;
        let session = self.control.registry.by_cookie(cookie);
        let probed = session.and_then(|session| self.probed(session));
        if let Some(probed) = &probed {
            self.note_prober(client, probed.session);
        }
        Ok(ReplyBody::Probed(probed).into())
    }

    /// Another process has a listener's descriptor, and may accept on it: ends a delegation.
    fn note_prober(&mut self, client: ClientId, id: SessionId) {
        let delegate = self
            .control
            .registry
            .listener(id)
            .and_then(|listener| listener.delegate);
        let prober = self.clients.get(&client).and_then(|client| client.channel);
        if delegate.is_some_and(|delegate| Some(delegate.channel) != prober) {
            self.input(Input::WantBack(id));
        }
    }

    /// Returns none if its descriptor means nothing to another process.
    fn probed(&self, session: &SessionEntry) -> Option<Probed> {
        let standing = match (session.protocol, session.phase(), session.remote) {
            (Protocol::Tcp, SessionPhase::Bound, _) => ProbedState::Bound,
            (_, SessionPhase::Listening, _) => {
                let listener = self.control.registry.listener(session.id)?;
                ProbedState::Listening {
                    backlog: listener.opens.queue.limit(),
                    waiting: listener.opens.queue.waiting(),
                }
            }
            (
                Protocol::Tcp,
                SessionPhase::Offered
                | SessionPhase::Connected
                | SessionPhase::Relayed
                | SessionPhase::Parked,
                Some(remote),
            ) => ProbedState::Connected { remote },
            (Protocol::Udp, _, remote) => ProbedState::Datagrams { remote },
            _ => return None,
        };
        let listener = session
            .listener
            .and_then(|id| self.control.registry.session(id));
        Some(Probed {
            incarnation: self.incarnation,
            session: session.id,
            standing,
            is_v6: listener.unwrap_or(session).local.is_ipv6(),
            local: session.local,
            options_blob: session.options_blob.clone(),
        })
    }
}
