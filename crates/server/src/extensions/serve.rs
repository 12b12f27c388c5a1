//! Requests for extensions, and their results.

use std::collections::{BTreeSet, HashSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_control::extensions::{TableEntry, check};
use portolan_control::{ClientId, Holder, SessionEntry, SessionPhase, Timer};
use portolan_proto::control::ReplyBody;
use portolan_proto::extension::layout::GuardKey;
use portolan_proto::extension::{
    Code, Direction, Event, Extension, ExtensionReply, ExtensionReport, ExtensionRequest,
    ExtensionState, Guard, Placement,
};
use portolan_proto::filter::FlowRow;
use portolan_proto::{encode, raw};
use portolan_sys::unix::Credentials;
use portolan_types::{ChannelId, SessionId};
use tracing::{info, warn};

use super::loader::{Done, Order, Ready};
use super::{InstallPoint, Installed, LoadRequest, Outcome, refuse};
use crate::requests::Answer;
use crate::server::Server;

/// Interval at which stopped extensions are removed.
const LOOK: Duration = Duration::from_millis(250);

/// Returns the key by which a session's packets raise an event.
fn guard_key(session: &SessionEntry, channel: ChannelId, event: Event) -> GuardKey {
    GuardKey {
        channel: channel.0,
        port: session.local.port().to_be_bytes(),
        protocol: session.protocol.number(),
        event: event.number(),
    }
}

/// Returns the key by which a process's own protocol raises an event.
fn raw_guard_key(guard: raw::Guard, channel: ChannelId, event: Event) -> GuardKey {
    let (port, protocol) = match guard {
        raw::Guard::EtherType(number) => (number, 0),
        raw::Guard::IpProtocol(number) => (0, number),
        raw::Guard::Port { protocol, local } => (local.port(), protocol.number()),
    };
    GuardKey {
        channel: channel.0,
        port: port.to_be_bytes(),
        protocol,
        event: event.number(),
    }
}

/// Returns the row flag for handlers of received or sent packets.
const fn flag_of(direction: Direction) -> u16 {
    match direction {
        Direction::Receive => FlowRow::EXTENDED,
        Direction::Send => FlowRow::EXTENDED_SENDING,
    }
}

impl Server {
    pub(crate) fn extension(
        &mut self,
        (client, request): (ClientId, u32),
        spec: ExtensionRequest,
        maps: Vec<OwnedFd>,
    ) -> Answer {
        let outcome = match spec {
            ExtensionRequest::List => return self.list_extensions(client),
            ExtensionRequest::Install(extension) => {
                self.install_extension((client, request), extension, maps)
            }
            ExtensionRequest::Check(code) => {
                let place = None;
                self.order_load((client, request), place, (code, Vec::new()))
            }
            ExtensionRequest::Announce {
                name,
                event,
                guard,
                priority,
            } => match self.announce_handler(client, (name, priority), guard, event) {
                Ok(announced) => return ReplyBody::Extension(announced).into(),
                Err(refusal) => Err(refusal),
            },
            ExtensionRequest::Remove { number } => {
                match self.remove_extension_for(client, number) {
                    Ok(()) => return ReplyBody::Extension(ExtensionReply::Removed).into(),
                    Err(refusal) => Err(refusal),
                }
            }
        };
        match outcome {
            Ok(()) => Answer::Silence,
            Err(refusal) => {
                self.control.counters.extensions_refused += 1;
                ReplyBody::Extension(ExtensionReply::Refused(refusal)).into()
            }
        }
    }

    /// Admits what can be checked here; the reply comes from [`Server::on_loaded`].
    fn install_extension(
        &mut self,
        (client, request): (ClientId, u32),
        extension: Extension,
        maps: Vec<OwnedFd>,
    ) -> Outcome<()> {
        let Extension {
            name,
            event,
            guards,
            priority,
            code,
        } = extension;
        if name.len() > Extension::NAME_MAX || name.is_empty() {
            let most = Extension::NAME_MAX;
            return refuse(libc::EINVAL, format!("a name has 1 to {most} bytes"));
        }
        if event.direction() != code.direction {
            let reason = format!("the handler is not written for {}", event.name());
            return refuse(libc::EINVAL, reason);
        }
        let (owner, credentials) = match self.clients.get(&client) {
            Some(requester) => (requester.channel, requester.credentials),
            None => return Ok(()),
        };
        let uid = credentials.uid;
        let Some(owner) = owner else {
            return refuse(
                libc::EPERM,
                "only a process with sockets on Portolan has extensions",
            );
        };
        let keys = self.admit_guards(owner, &guards, event)?;
        self.admit_user(&credentials, event, &keys)?;
        let room = self.extensions.table.has_room(owner, uid);
        room.or_else(|full| refuse(libc::EDQUOT, full.to_string()))?;
        let place = Some(InstallPoint {
            guards,
            name,
            event,
            entry: TableEntry {
                owner,
                uid,
                keys,
                priority,
            },
        });
        self.order_load((client, request), place, (code, maps))
    }

    /// Checks whether the configuration permits it to the user.
    fn admit_user(&self, user: &Credentials, event: Event, keys: &[GuardKey]) -> Outcome<()> {
        let config = &self.extensions.config;
        let port = |key: &GuardKey| event.protocol().map(|_| key.number());
        let denied = keys
            .iter()
            .find(|key| !config.allows(user, event, port(key)));
        match denied {
            Some(key) => {
                let place = port(key).map_or_else(String::new, |port| format!(" on port {port}"));
                let event = event.name();
                refuse(
                    libc::EPERM,
                    format!("[[extension.allow]] does not let you have {event}{place}"),
                )
            }
            None => Ok(()),
        }
    }

    /// The manager of the event: checks that the process has what the guards name.
    pub(crate) fn admit_guards(
        &self,
        channel: ChannelId,
        guards: &[Guard],
        event: Event,
    ) -> Outcome<Vec<GuardKey>> {
        if guards.is_empty() || guards.len() > Extension::GUARDS_MAX {
            let most = Extension::GUARDS_MAX;
            return refuse(libc::EINVAL, format!("an extension has 1 to {most} guards"));
        }
        let mut keys = Vec::new();
        for guard in guards {
            let more = match *guard {
                Guard::Session(session) => self.admit_session(channel, session, event)?,
                Guard::Raw(guard) => vec![self.admit_raw(channel, guard, event)?],
            };
            for key in more {
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
        }
        Ok(keys)
    }

    fn admit_raw(&self, channel: ChannelId, guard: raw::Guard, event: Event) -> Outcome<GuardKey> {
        if !self.has_protocol(channel, guard) {
            return refuse(libc::EPERM, "a guard is no protocol of this process");
        }
        if Event::of_raw(guard, event.direction()) == event {
            Ok(raw_guard_key(guard, channel, event))
        } else {
            refuse(
                libc::EINVAL,
                format!("{guard} does not raise {}", event.name()),
            )
        }
    }

    fn admit_session(
        &self,
        channel: ChannelId,
        id: SessionId,
        event: Event,
    ) -> Outcome<Vec<GuardKey>> {
        let session = self.control.registry.session(id);
        let Some(session) = session.filter(|session| session.is_user(channel)) else {
            return refuse(libc::EPERM, "a guard is no endpoint of this process");
        };
        let is_listener = session.phase() == SessionPhase::Listening;
        let (is_raised, whose) = match event {
            Event::UdpReceive | Event::UdpSend => (true, "UDP's sockets"),
            Event::TcpReceive => (is_listener, "TCP's listeners"),
            Event::TcpSend => (true, "TCP's sockets"),
            Event::EthernetReceive | Event::EthernetSend => (false, "flows of EtherTypes"),
            Event::IpReceive | Event::IpSend => (false, "flows of IP protocols"),
        };
        if Some(session.protocol) != event.protocol() || !is_raised {
            return refuse(
                libc::EINVAL,
                format!("{} is raised by {whose}", event.name()),
            );
        }
        let key = |of| guard_key(session, of, event);
        match self.receiving_channel(session) {
            // Packets that the process sends are its own, whether or not it performs the handshakes.
            Some(_) if is_listener && event.direction() == Direction::Send => {
                Ok(vec![key(channel)])
            }
            // Packets for connections that the process accepted and, before that, for the handshakes' performer.
            Some(receiver) if is_listener => Ok(vec![key(receiver), key(channel)]),
            Some(receiver) if receiver == channel => Ok(vec![key(channel)]),
            _ => refuse(
                libc::EINVAL,
                "a guard's socket has no port, or is not this process's",
            ),
        }
    }

    /// Returns the channel named by the rows of a session's port.
    fn receiving_channel(&self, session: &SessionEntry) -> Option<ChannelId> {
        if session.phase() == SessionPhase::Listening {
            return Some(self.control.channel_of_listener(session.id));
        }
        match session.holder {
            Holder::Process(holder, _) if session.local.port() != 0 => Some(holder),
            _ => None,
        }
    }

    fn order_load(
        &mut self,
        (client, request): (ClientId, u32),
        place: Option<InstallPoint>,
        (code, maps): (Code, Vec<OwnedFd>),
    ) -> Outcome<()> {
        let memory = check(&code, &self.extensions.domain)
            .or_else(|fault| refuse(libc::EACCES, fault.to_string()))?;
        if let Some(place) = &place {
            self.extensions.has_memory(place.entry.owner, memory)?;
        }
        let Some(uid) = self.clients.get(&client).map(|c| c.credentials.uid) else {
            return refuse(libc::ESRCH, "the program has gone");
        };
        let spec = LoadRequest {
            client,
            request,
            place,
        };
        let order = Order {
            spec,
            code,
            maps,
            memory,
        };
        if self.extensions.loader.order(order, uid) {
            Ok(())
        } else {
            refuse(libc::EAGAIN, "too many extensions wait to be verified")
        }
    }

    /// Handles verdicts of the kernel's verifier.
    pub(crate) fn on_loaded(&mut self) {
        for Done { spec, result } in self.extensions.loader.finished() {
            let LoadRequest {
                client,
                request,
                place,
            } = spec;
            let outcome = match (result, place) {
                (Ok(ready), Some(place)) => self.enter_extension(client, place, ready),
                (Ok(ready), None) => Ok((ExtensionReply::Checked(ready.cost), Vec::new())),
                (Err(refusal), _) => Err(refusal),
            };
            let (reply, fds) = outcome.unwrap_or_else(|refusal| {
                self.control.counters.extensions_refused += 1;
                (ExtensionReply::Refused(refusal), Vec::new())
            });
            self.reply(client, request, ReplyBody::Extension(reply), fds);
        }
    }

    /// Installs a verified extension on the packet path, unless its conditions have changed in the meantime.
    fn enter_extension(
        &mut self,
        client: ClientId,
        place: InstallPoint,
        ready: Ready,
    ) -> Outcome<(ExtensionReply, Vec<OwnedFd>)> {
        let InstallPoint {
            guards,
            name,
            event,
            entry,
        } = place;
        let owner = entry.owner;
        let pid = match self.clients.get(&client) {
            Some(requester) if requester.channel == Some(owner) => requester.credentials.pid,
            _ => return refuse(libc::ESRCH, "its owner has gone"),
        };
        let keys = self.admit_guards(owner, &guards, event)?;
        self.extensions.has_memory(owner, ready.cost.memory)?;
        let number = self
            .extensions
            .table
            .enter(TableEntry {
                keys: keys.clone(),
                ..entry
            })
            .or_else(|full| refuse(libc::EDQUOT, full.to_string()))?;
        let limit = self.extensions.config.time_limit_ns;
        let entered = self.filter.extensions.enter(number, &ready.program, limit);
        if let Err(error) = entered {
            self.extensions.table.remove(number);
            return refuse(
                libc::EIO,
                format!("the packet filter does not take it: {error}"),
            );
        }
        *self.extensions.memory.entry(owner).or_default() += ready.cost.memory;
        info!(number, name, pid, "extension installed");
        self.control.counters.extensions += 1;
        let cost = ready.cost;
        let standing = ExtensionState::Running;
        self.look_at_extensions_later();
        self.extensions.installed.insert(
            number,
            Installed {
                guards,
                name,
                pid,
                event,
                standing,
                cost,
            },
        );
        self.tell_of_chains(&keys);
        Ok((ExtensionReply::Installed { number, cost }, ready.maps))
    }

    /// Writes who is called for endpoints, and in their rows that somebody is: in parts, where a program has thousands.
    fn tell_of_chains(&mut self, keys: &[GuardKey]) {
        for key in keys {
            let written = match self.extensions.table.chain(key) {
                Some(chain) => self.filter.extensions.guard(key, &chain),
                None => self.filter.extensions.unguard(key),
            };
            if let Err(error) = written {
                warn!(%error, "cannot write the extensions of an endpoint");
            }
        }
        let endpoint = |key: &GuardKey| (key.protocol, u16::from_be_bytes(key.port), key.channel);
        let endpoints: HashSet<(u8, u16, u32)> = keys.iter().map(endpoint).collect();
        let is_concerned = |session: &&SessionEntry| {
            let (protocol, port) = (session.protocol.number(), session.local.port());
            let channel = self.receiving_channel(session);
            channel.is_some_and(|channel| endpoints.contains(&(protocol, port, channel.0)))
        };
        let sessions = self.control.registry.sessions().filter(is_concerned);
        let ids: Vec<SessionId> = sessions.map(|session| session.id).collect();
        self.renew_in_parts(ids);
        self.renew_raw_rows();
    }

    /// Returns the extension flags of a session's row.
    pub(crate) fn extension_flags(&self, session: &SessionEntry, channel: ChannelId) -> u16 {
        let table = &self.extensions.table;
        if table.is_empty() {
            return 0;
        }
        let flag = |event: &Event| flag_of(event.direction());
        let has_some = |event: &Event| {
            let key = guard_key(session, channel, *event);
            event.protocol() == Some(session.protocol) && table.chain(&key).is_some()
        };
        let with_some = Event::ALL.iter().filter(|event| has_some(event));
        with_some.map(flag).fold(0, |flags, flag| flags | flag)
    }

    /// Likewise for the row of a process's own protocol.
    pub(crate) fn raw_extension_flags(&self, guard: raw::Guard, channel: ChannelId) -> u16 {
        let flag = |direction: Direction| {
            let key = raw_guard_key(guard, channel, Event::of_raw(guard, direction));
            let chain = self.extensions.table.chain(&key);
            chain.map_or(0, |_| flag_of(direction))
        };
        flag(Direction::Receive) | flag(Direction::Send)
    }

    /// Moves the extensions of a listener whose SYNs go to another channel from now on.
    pub(crate) fn move_extensions_of(&mut self, id: SessionId) {
        let installed = self.extensions.installed.iter();
        let its: Vec<(u16, Event, Vec<Guard>)> = installed
            .filter(|(_, one)| {
                one.guards.contains(&Guard::Session(id)) && one.event == Event::TcpReceive
            })
            .map(|(number, one)| (*number, one.event, one.guards.clone()))
            .collect();
        for (number, event, guards) in its {
            let owner = self.extensions.table.entry(number).map(|entry| entry.owner);
            let keys = owner.map(|owner| self.admit_guards(owner, &guards, event));
            let Some(Ok(keys)) = keys else {
                continue;
            };
            let before = self.extensions.table.relocate(number, keys.clone());
            self.tell_of_chains(&before.unwrap_or_default());
            self.tell_of_chains(&keys);
        }
    }

    fn remove_extension_for(&mut self, client: ClientId, number: u16) -> Outcome<()> {
        let requester = self.clients.get(&client);
        let channel = requester.and_then(|requester| requester.channel);
        let uid = requester.map(|requester| requester.credentials.uid);
        if channel.is_some_and(|channel| self.extensions.threaded.remove(channel, number)) {
            return Ok(());
        }
        let owner = self.extensions.table.entry(number).map(|entry| entry.uid);
        match (uid, owner) {
            (Some(uid), Some(owner)) if uid == 0 || uid == owner => {
                self.remove_extension(number);
                Ok(())
            }
            // Those of others are not disclosed.
            _ => refuse(libc::ENOENT, format!("you have no extension {number}")),
        }
    }

    fn remove_extension(&mut self, number: u16) {
        let Some(entry) = self.extensions.table.remove(number) else {
            return;
        };
        self.tell_of_chains(&entry.keys);
        self.take_out(number);
        if let Some(gone) = self.extensions.installed.remove(&number) {
            info!(
                number,
                name = gone.name,
                pid = gone.pid,
                "extension removed"
            );
        }
    }

    fn take_out(&self, number: u16) {
        if let Err(error) = self.filter.extensions.remove(number) {
            warn!(%error, number, "cannot take out an extension");
        }
    }

    /// Ends the extensions of a session whose port was released.
    pub(crate) fn end_extensions_of(&mut self, id: SessionId) {
        self.extensions.threaded.end_at(Guard::Session(id));
        self.end_extensions(|one| one.guards.contains(&Guard::Session(id)));
    }

    /// Ends the extensions of a protocol that was released.
    pub(crate) fn end_extensions_of_protocol(&mut self, guard: raw::Guard) {
        self.extensions.threaded.end_at(Guard::Raw(guard));
        self.end_extensions(|one| one.guards.contains(&Guard::Raw(guard)));
    }

    /// Ends the extensions of a process that has exited.
    pub(crate) fn end_extensions_of_channel(&mut self, channel: ChannelId) {
        self.extensions.memory.remove(&channel);
        self.extensions.threaded.end_of(channel);
        let entries = self.extensions.table.entries();
        let numbers: Vec<u16> = entries
            .filter(|(_, entry)| entry.owner == channel)
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            self.remove_extension(number);
        }
    }

    fn end_extensions(&mut self, is_over: impl Fn(&Installed) -> bool) {
        let installed = self.extensions.installed.iter();
        let numbers: Vec<u16> = installed
            .filter(|(_, one)| is_over(one))
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            self.remove_extension(number);
        }
    }

    /// Removes extensions that were stopped because they took too long.
    pub(crate) fn look_for_stopped_extensions(&mut self) {
        if !self.extensions.installed.is_empty() {
            self.look_at_extensions();
            self.look_at_extensions_later();
        }
    }

    fn look_at_extensions_later(&mut self) {
        self.control
            .timers
            .arm_once(Timer::Extensions, self.now + LOOK);
    }

    fn look_at_extensions(&mut self) {
        let running = self.extensions.installed.iter();
        let stopped: Vec<u16> = running
            .filter(|(_, one)| one.standing == ExtensionState::Running)
            .map(|(number, _)| *number)
            .filter(|number| self.filter.extensions.is_stopped(*number))
            .collect();
        for number in stopped {
            self.suspend(number);
        }
    }

    /// Suspends an extension; its owner sees its state until the owner removes it, or exits.
    fn suspend(&mut self, number: u16) {
        let Some(keys) = self.extensions.table.suspend(number) else {
            return;
        };
        self.tell_of_chains(&keys);
        self.take_out(number);
        self.control.counters.extensions_over_budget += 1;
        if let Some(one) = self.extensions.installed.get_mut(&number) {
            warn!(
                number,
                name = one.name,
                pid = one.pid,
                "extension took too long too often"
            );
            one.standing = ExtensionState::OverBudget;
        }
    }

    /// Lists the requester's extensions; for root, all.
    fn list_extensions(&mut self, client: ClientId) -> Answer {
        self.look_at_extensions();
        let uid = self
            .clients
            .get(&client)
            .map(|requester| requester.credentials.uid);
        let shows = |of: u32| uid == Some(0) || uid == Some(of);
        let in_filter = self.extensions.table.entries();
        let in_filter = in_filter
            .filter(|(_, entry)| shows(entry.uid))
            .filter_map(|(number, entry)| self.report_extension(number, entry));
        let in_threads = self.extensions.threaded.all();
        let in_threads = in_threads
            .filter(|(_, one)| shows(one.uid))
            .map(|(number, one)| self.report_threaded(number, one));
        let reports: Vec<ExtensionReport> = in_filter.chain(in_threads).collect();
        let list = |part| ReplyBody::Extension(ExtensionReply::List(part));
        Answer::List(encode(&reports), list)
    }

    fn report_extension(&self, number: u16, entry: &TableEntry) -> Option<ExtensionReport> {
        let installed = self.extensions.installed.get(&number)?;
        let ports: BTreeSet<u16> = entry.keys.iter().map(GuardKey::number).collect();
        Some(ExtensionReport {
            number,
            name: installed.name.clone(),
            pid: installed.pid,
            uid: entry.uid,
            event: installed.event,
            ports: ports.into_iter().collect(),
            priority: entry.priority,
            placement: Placement::Filter,
            standing: installed.standing,
            cost: installed.cost,
            limit: self.extensions.config.time_limit_ns,
            statistics: self.filter.extensions.statistics(number),
        })
    }
}
