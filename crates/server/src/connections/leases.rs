//! Ports under lease: processes open connections from them without a request (ADR 31).

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use portolan_control::{Effects, Errno, SessionPhase};
use portolan_proto::control::ReplyBody;
use portolan_proto::encode;
use portolan_proto::filter::{BindingKey, FlowRow};
use portolan_stack::passive::OpenRules;
use portolan_types::{ChannelId, Protocol, SessionId, Slot, is_scoped};
use tracing::{debug, warn};

use crate::random::random_u64;
use crate::requests::Answer;
use crate::server::Server;

impl Server {
    /// `LeasePorts`: gives the process ports of an address, unless each open has to be seen here.
    pub(crate) fn lease_ports(
        &mut self,
        (channel, slot): (ChannelId, Slot),
        local: IpAddr,
        most: u32,
    ) -> Result<Answer, Errno> {
        let process = self.control.registry.process(channel).ok_or(Errno::PERM)?;
        let uid = process.uid;
        if !self.config.delegation.allow
            || self.config.demux.active
            || self.is_subject_to_policy(channel)
        {
            return Err(Errno::PERM);
        }
        if self.routes.serves(local) != Some(true) || is_scoped(local) {
            return Err(Errno::ADDRNOTAVAIL);
        }
        self.sysctls.refresh(self.now);
        let (to, most) = ((channel, slot), most as usize);
        let mut effects = Effects::new();
        let leased = self
            .control
            .lease_ports(to, local, most, self.now, random_u64, &mut effects);
        self.carry_out(effects);
        let ports = leased?;
        self.control.counters.leases += ports.len() as u64;
        for port in &ports {
            self.open_leased_port(port.id, to, SocketAddr::new(local, port.number));
        }
        debug!(channel = channel.0, %local, count = ports.len(), "ports leased");
        let rules = OpenRules {
            config: self.base_config(),
            syn_retries: self.sysctls.values().syn_retries,
            // Whoever knows it can predict the user's own initial numbers only.
            secret: self.secret_of_opens(uid).0,
            timestamp_secret: self.secret_of_timestamps().0,
        };
        let rules = encode(&rules);
        Ok(ReplyBody::Leased { ports, rules }.into())
    }

    fn open_leased_port(&self, id: SessionId, (channel, slot): (ChannelId, Slot), at: SocketAddr) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let row = FlowRow {
            channel: channel.0,
            slot: slot.0,
            flags: FlowRow::DELEGATED | FlowRow::LEASED,
            class: self.class_in_row(session),
            budget: self.budget_of(session),
            ..FlowRow::default()
        };
        if let Err(error) = self.filter.bind(&BindingKey::new(Protocol::Tcp, at), row) {
            warn!(%error, %at, "cannot open a port in the filter");
        }
    }

    /// Returns the rows of the ports that are under lease.
    pub(crate) fn leased_bindings(&self) -> HashSet<BindingKey> {
        let all = self.control.registry.sessions();
        all.filter(|session| session.phase() == SessionPhase::Leased)
            .map(|session| BindingKey::new(Protocol::Tcp, session.local))
            .collect()
    }

    /// `ReturnPorts`: the process needs them no longer.
    pub(crate) fn end_leases(&mut self, channel: ChannelId, ports: Vec<SessionId>) -> Answer {
        for id in ports {
            if self.control.is_lease(id) && self.is_held_by(id, channel) {
                self.forget(id);
            }
        }
        Answer::Silence
    }
}
