//! Processes with their channels, and sessions with their holders. Admits requests and limits how much one
//! process or user may have. Session numbers are random: knowing one proves that its descriptor's message
//! was read.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use portolan_proto::control::SocketOptionsBlob;
use portolan_types::{ChannelId, FlowKey, Generation, Instant, SessionId, Slot};

use crate::budget::{Budget, Charge, Exhausted, Limit};
use crate::errno::Errno;
use crate::legality::{self, Command, SessionPhase};
use crate::listener::Listener;
use crate::relay::Relay;
use crate::session::{Holder, Life, Opening, SessionEntry};

#[cfg(test)]
mod tests;

/// Limits of what the server admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub processes: Limit,
    pub sessions: Limit,
    /// Rows of the filter's table of bindings.
    pub bindings: Limit,
    pub sessions_per_process: u32,
}

/// A process that said `Hello`.
#[derive(Debug)]
pub struct Process {
    pub channel: ChannelId,
    pub pid: u32,
    pub uid: u32,
    pub program: String,
    sessions: u32,
    /// Sessions whose packets go to it.
    held: HashSet<SessionId>,
    /// Sessions whose descriptor it is known to have.
    known: HashSet<SessionId>,
    charge: Charge,
}

/// All processes and sessions of one network namespace.
#[derive(Debug)]
pub struct Registry {
    /// Highest channel number.
    channels: u32,
    sessions_per_process: u32,
    process_budget: Budget,
    session_budget: Budget,
    binding_budget: Budget,
    processes: HashMap<ChannelId, Process>,
    /// Channels of an earlier server, to which rows still lead.
    inherited: HashSet<ChannelId>,
    sessions: HashMap<SessionId, SessionEntry>,
    cookies: HashMap<u64, SessionId>,
    /// Sessions with a row of their flow in the filter.
    flows: HashMap<FlowKey, SessionId>,
    /// Number of group memberships of all sessions.
    memberships: usize,
    /// The last generation given to any row; each steering of a row gets a new one.
    generation: u32,
}

impl Registry {
    pub fn new(limits: Limits) -> Registry {
        Registry {
            channels: u32::try_from(limits.processes.total).unwrap_or(u32::MAX),
            sessions_per_process: limits.sessions_per_process,
            process_budget: Budget::new(limits.processes),
            session_budget: Budget::new(limits.sessions),
            binding_budget: Budget::new(limits.bindings),
            processes: HashMap::new(),
            inherited: HashSet::new(),
            sessions: HashMap::new(),
            cookies: HashMap::new(),
            flows: HashMap::new(),
            memberships: 0,
            generation: 0,
        }
    }

    /// Changes the limits. The number of channels stays.
    pub fn set_limits(&mut self, limits: &Limits) {
        self.sessions_per_process = limits.sessions_per_process;
        self.process_budget.set_limit(limits.processes);
        self.session_budget.set_limit(limits.sessions);
        self.binding_budget.set_limit(limits.bindings);
    }

    /// Returns the channels without a process, lowest first.
    pub fn free_channels(&self) -> impl Iterator<Item = ChannelId> + '_ {
        (1..=self.channels).map(ChannelId).filter(|channel| {
            !self.processes.contains_key(channel) && !self.inherited.contains(channel)
        })
    }

    /// Keeps a channel of an earlier server for its process.
    pub fn keep_channel(&mut self, channel: ChannelId) {
        self.inherited.insert(channel);
    }

    /// No row of before leads to these channels any more.
    pub fn release_channels(&mut self) {
        self.inherited.clear();
    }

    /// Generations from now on are later than this one.
    pub fn continue_from(&mut self, generation: Generation) {
        self.generation = generation.0;
    }

    /// Charges `uid` for one more process.
    pub fn admit_process(&self, uid: u32) -> Result<Charge, Exhausted> {
        self.process_budget.charge(uid, 1)
    }

    /// Gives an admitted process a free channel.
    pub fn register(&mut self, channel: ChannelId, pid: u32, program: String, charge: Charge) {
        let process = Process {
            channel,
            pid,
            uid: charge.uid(),
            program,
            sessions: 0,
            held: HashSet::new(),
            known: HashSet::new(),
            charge,
        };
        self.processes.insert(channel, process);
    }

    /// Charges the session's user for rows in the table of bindings, replacing the previous charge.
    pub fn charge_bindings(&mut self, id: SessionId, rows: usize) -> Result<(), Errno> {
        let session = self.sessions.get_mut(&id).ok_or(Errno::BADF)?;
        session.bindings = None;
        session.bindings = Some(self.binding_budget.charge(session.uid, rows as u64)?);
        Ok(())
    }

    /// The same for a session that is to listen, which takes more of the server's than others.
    pub fn charge_listener(&mut self, id: SessionId, rows: usize) -> Result<(), Errno> {
        self.charge_bindings(id, rows)?;
        let session = self.sessions.get_mut(&id).ok_or(Errno::BADF)?;
        session.listening = None;
        session.listening = Some(self.session_budget.charge(session.uid, 1)?);
        Ok(())
    }

    /// Charges for no rows any more.
    pub fn release_bindings(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.bindings = None;
            session.listening = None;
        }
    }

    /// Returns how many requests were refused by the budgets of processes, sessions, and rows in the table of bindings.
    pub fn refusals(&self) -> [u64; 3] {
        let budgets = [
            &self.process_budget,
            &self.session_budget,
            &self.binding_budget,
        ];
        budgets.map(Budget::refused)
    }

    /// Returns the sessions whose packets go to a process.
    pub fn held_by(&self, channel: ChannelId) -> Vec<SessionId> {
        let process = self.processes.get(&channel);
        process.map_or_else(Vec::new, |process| process.held.iter().copied().collect())
    }

    /// Returns the sessions whose descriptor a process is known to have.
    pub fn known_to(&self, channel: ChannelId) -> Vec<SessionId> {
        let process = self.processes.get(&channel);
        process.map_or_else(Vec::new, |process| process.known.iter().copied().collect())
    }

    /// Records that a process no longer has a session's descriptor.
    pub fn disentitle(&mut self, id: SessionId, channel: ChannelId) {
        if let Some(process) = self.processes.get_mut(&channel) {
            process.known.remove(&id);
        }
        if self.sessions.get(&id).and_then(SessionEntry::owner) == Some(channel) {
            self.detach(id);
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.users.remove(&channel);
            session.relayed_to.remove(&channel);
        }
    }

    /// Removes a process that holds no sessions. Returns its charge.
    pub fn unregister(&mut self, channel: ChannelId) -> Option<Charge> {
        for id in self.known_to(channel) {
            self.disentitle(id, channel);
        }
        let process = self.processes.remove(&channel)?;
        Some(process.charge)
    }

    /// Checks whether `channel` may have one more session.
    pub fn has_room(&self, channel: ChannelId) -> Result<(), Errno> {
        let process = self.processes.get(&channel).ok_or(Errno::PERM)?;
        if process.sessions >= self.sessions_per_process {
            return Err(Errno::NOBUFS);
        }
        Ok(())
    }

    /// Enters a session under a number from `random`. `owner` is charged for it.
    pub fn open(
        &mut self,
        owner: Option<ChannelId>,
        opening: Opening,
        mut random: impl FnMut() -> u64,
    ) -> Result<SessionId, Errno> {
        if let Some(channel) = owner {
            self.has_room(channel)?;
        }
        // One near end, one session: a second would take over the first one's cookie.
        if opening.cookie != 0 && self.by_cookie(opening.cookie).is_some() {
            return Err(Errno::INVAL);
        }
        let charge = self.session_budget.charge(opening.uid, 1)?;
        let mut id = SessionId(random());
        while id == SessionId::NONE || self.sessions.contains_key(&id) {
            id = SessionId(random());
        }
        if opening.cookie != 0 {
            self.cookies.insert(opening.cookie, id);
        }
        self.sessions.insert(id, opening.into_entry(id, charge));
        if let Some(channel) = owner {
            self.entitle(id, channel);
        }
        Ok(id)
    }

    /// Checks that `channel` may give `command` for `id` now.
    pub fn admit(
        &self,
        channel: ChannelId,
        command: Command,
        id: SessionId,
    ) -> Result<&SessionEntry, Errno> {
        let session = self.sessions.get(&id).ok_or(Errno::BADF)?;
        if !session.may_be_named_by(channel, command) {
            return Err(match session.phase() {
                SessionPhase::Connecting if command == Command::Connect => Errno::ALREADY,
                _ => Errno::BADF,
            });
        }
        legality::check(command, session.protocol, session.phase())?;
        Ok(session)
    }

    /// Records that `channel` has the descriptor; the first process that does is charged.
    pub fn entitle(&mut self, id: SessionId, channel: ChannelId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let Some(process) = self.processes.get_mut(&channel) else {
            return;
        };
        session.users.insert(channel);
        process.known.insert(id);
        if session.owner.is_none() {
            session.owner = Some(channel);
            process.sessions += 1;
        }
    }

    /// Like [`Registry::entitle`], for a process that is told that the session is relayed.
    pub fn tell_relayed(&mut self, id: SessionId, channel: ChannelId) {
        self.entitle(id, channel);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.relayed_to.insert(channel);
        }
    }

    /// Records that no process uses the descriptor for relaying any more.
    pub fn end_relay(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.relayed_to.clear();
        }
    }

    /// Records that the session's owner no longer uses it and is not charged for it.
    pub fn detach(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if let Some(process) = session
            .owner
            .take()
            .and_then(|c| self.processes.get_mut(&c))
        {
            process.sessions = process.sessions.saturating_sub(1);
        }
    }

    /// Stores the socket options reported by a library.
    pub fn describe(&mut self, id: SessionId, options_blob: SocketOptionsBlob) {
        if let Some(session) = self.sessions.get_mut(&id)
            && options_blob.0.len() <= SocketOptionsBlob::MAX
        {
            session.options_blob = options_blob;
        }
    }

    /// Gives the session a new holder and a fresh generation.
    pub fn steer(&mut self, id: SessionId, holder: Holder) -> Generation {
        let generation = self.next_generation();
        if let Some(session) = self.sessions.get_mut(&id) {
            session.generation = generation;
            let has_row = holder != Holder::None && !session.is_local() && !session.is_flow_reused;
            if let Some(flow) = session.flow().filter(|_| has_row) {
                session.row = Some(flow);
                self.flows.insert(flow, id);
            }
        }
        self.set_holder(id, holder);
        generation
    }

    /// Enters the holder of a session whose row was there before.
    pub fn adopt(&mut self, id: SessionId, holder: Holder, generation: Generation) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.generation = generation;
            session.row = session.flow();
            self.flows.extend(session.row.map(|flow| (flow, id)));
        }
        self.set_holder(id, holder);
    }

    /// Removes the session's holder. Returns the flow that has a row in the filter.
    pub fn unsteer(&mut self, id: SessionId) -> Option<FlowKey> {
        self.set_holder(id, Holder::None);
        self.take_row(id)
    }

    /// Leaves the session's flow to another one for good. Returns the flow that has a row in the filter.
    pub(crate) fn give_up_flow(&mut self, id: SessionId) -> Option<FlowKey> {
        let flow = self.take_row(id)?;
        if let Some(session) = self.sessions.get_mut(&id) {
            session.is_flow_reused = true;
        }
        Some(flow)
    }

    fn take_row(&mut self, id: SessionId) -> Option<FlowKey> {
        let flow = self.sessions.get_mut(&id)?.row.take()?;
        if self.flows.get(&flow) == Some(&id) {
            self.flows.remove(&flow);
        }
        Some(flow)
    }

    /// Adds the session to a group on a device.
    pub fn join_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        if let Some(session) = self.sessions.get_mut(&id)
            && session.memberships.insert((group, interface))
        {
            self.memberships += 1;
        }
    }

    pub fn leave_group(&mut self, id: SessionId, group: IpAddr, interface: u32) {
        if let Some(session) = self.sessions.get_mut(&id)
            && session.memberships.remove(&(group, interface))
        {
            self.memberships -= 1;
        }
    }

    pub fn leave_all_groups(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            self.memberships -= std::mem::take(&mut session.memberships).len();
        }
    }

    /// Returns whether any session is a member of a group.
    pub fn has_members(&self) -> bool {
        self.memberships > 0
    }

    fn set_holder(&mut self, id: SessionId, holder: Holder) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let before = std::mem::replace(&mut session.holder, holder);
        if let Some(process) = process_of(&mut self.processes, before) {
            process.held.remove(&id);
        }
        if let Some(process) = process_of(&mut self.processes, holder) {
            process.held.insert(id);
        }
    }

    /// Notes that the server waits for the session at `slot`; its holder still has it.
    pub fn depart(&mut self, id: SessionId, slot: Slot, now: Instant) {
        let generation = self.next_generation();
        if let Some(session) = self.sessions.get_mut(&id) {
            session.awaited = Some((slot, generation));
            session.awaited_since = now;
        }
    }

    /// Makes the server the holder of a session that it waited for. Returns none if it did not wait.
    pub fn arrive(&mut self, id: SessionId) -> Option<(Slot, Generation)> {
        let session = self.sessions.get_mut(&id)?;
        let (slot, generation) = session.awaited.take()?;
        session.generation = generation;
        self.set_holder(id, Holder::Server(slot));
        Some((slot, generation))
    }

    fn next_generation(&mut self) -> Generation {
        self.generation = self.generation.wrapping_add(1);
        Generation(self.generation)
    }

    /// Replaces the descriptor's cookie (`Listen` replaces a listener's descriptor).
    pub fn replace_cookie(&mut self, id: SessionId, cookie: u64) {
        if let Some(session) = self.sessions.get_mut(&id) {
            self.cookies.remove(&session.cookie);
            session.cookie = cookie;
            if cookie != 0 {
                self.cookies.insert(cookie, id);
            }
        }
    }

    pub fn remove(&mut self, id: SessionId) -> Option<SessionEntry> {
        self.detach(id);
        self.unsteer(id);
        self.leave_all_groups(id);
        let session = self.sessions.remove(&id)?;
        for channel in &session.users {
            if let Some(process) = self.processes.get_mut(channel) {
                process.known.remove(&id);
            }
        }
        if self.cookies.get(&session.cookie) == Some(&id) {
            self.cookies.remove(&session.cookie);
        }
        Some(session)
    }

    pub fn session(&self, id: SessionId) -> Option<&SessionEntry> {
        self.sessions.get(&id)
    }

    pub fn session_mut(&mut self, id: SessionId) -> Option<&mut SessionEntry> {
        self.sessions.get_mut(&id)
    }

    pub fn listener(&self, id: SessionId) -> Option<&Listener> {
        match &self.session(id)?.life {
            Life::Listening(listener) => Some(listener),
            _ => None,
        }
    }

    pub fn listener_mut(&mut self, id: SessionId) -> Option<&mut Listener> {
        match &mut self.session_mut(id)?.life {
            Life::Listening(listener) => Some(listener),
            _ => None,
        }
    }

    pub fn relay_mut(&mut self, id: SessionId) -> Option<&mut Relay> {
        match &mut self.session_mut(id)?.life {
            Life::Relayed(relay) => Some(relay),
            _ => None,
        }
    }

    pub fn by_cookie(&self, cookie: u64) -> Option<&SessionEntry> {
        self.cookies.get(&cookie).and_then(|id| self.session(*id))
    }

    /// Returns the session whose row has the flow.
    pub fn by_flow(&self, flow: &FlowKey) -> Option<SessionId> {
        self.flows.get(flow).copied()
    }

    pub fn process(&self, channel: ChannelId) -> Option<&Process> {
        self.processes.get(&channel)
    }

    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.processes.values()
    }

    pub fn sessions(&self) -> impl Iterator<Item = &SessionEntry> {
        self.sessions.values()
    }

    pub fn process_count(&self) -> usize {
        self.processes.len()
    }

    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }
}

fn process_of(processes: &mut HashMap<ChannelId, Process>, holder: Holder) -> Option<&mut Process> {
    match holder {
        Holder::Process(channel, _) => processes.get_mut(&channel),
        Holder::None | Holder::Server(_) => None,
    }
}
