//! Processes come and go: `Hello` builds a channel, a hang-up takes it down.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_control::{Errno, Phase, Session};
use portolan_proto::control::{Probed, ReplyBody, Standing};
use portolan_stack::VERSION;
use portolan_sys::shm::StatisticsReader;
use portolan_sys::tap::Tap;
use portolan_sys::unix::Credentials;
use portolan_sys::wait::Bell;
use portolan_types::{ChannelId, Instant, Protocol, SessionId};
use tracing::{error, info, warn};

use crate::clients::{Answer, ClientId};
use crate::server::Server;

/// Longest program name that is kept.
const PROGRAM_MAX: usize = 64;

/// Octets of frames on their way to the wire before a library's tap is full.
const TAP_SEND_BUFFER: u32 = 4 << 20;

/// `CAP_NET_BIND_SERVICE`.
const BIND_LOW_PORTS: u64 = 1 << 10;

/// How long the tap of a process that is gone may take to go with it.
const TAP_GOES_WITHIN: Duration = Duration::from_secs(1);

/// What the server keeps of a process's channel. The tap's descriptor is not among it: the device
/// must go with the process, and destroying one is slow.
#[derive(Debug)]
pub struct Channel {
    pub client: ClientId,
    pub statistics: StatisticsReader,
    tap: u32,
    /// Rings when `recalled` is not empty.
    pub alert: Bell,
    /// What the process is to give back, until it asks.
    pub recalled: Vec<SessionId>,
}

impl Server {
    /// Registers a process and hands it its channel.
    pub fn hello(
        &mut self,
        id: ClientId,
        version: u32,
        mut program: String,
    ) -> Result<Answer, Errno> {
        let client = self.clients.get(&id).ok_or(Errno::BADF)?;
        if version != VERSION {
            warn!(
                pid = client.credentials.pid,
                program, "program with a library of another version refused"
            );
            return Err(Errno::PROTO);
        }
        if client.channel.is_some() {
            return Err(Errno::ALREADY);
        }
        let Credentials { pid, uid, .. } = client.credentials;
        while program.len() > PROGRAM_MAX {
            program.pop();
        }
        let low_ports = uid == 0 || has_capability(pid, BIND_LOW_PORTS);
        let channel = self
            .registry
            .register(pid, uid, program.clone(), low_ports)?;
        match self.build_channel(id, channel) {
            Ok(answer) => {
                self.counters.processes += 1;
                if let Some(client) = self.clients.get_mut(&id) {
                    client.channel = Some(channel);
                }
                info!(pid, uid, program, channel = channel.0, "process registered");
                Ok(answer)
            }
            Err(failure) => {
                error!(%failure, pid, "cannot build a channel");
                self.registry.unregister(channel);
                Err(Errno::NOBUFS)
            }
        }
    }

    fn build_channel(&mut self, client: ClientId, channel: ChannelId) -> anyhow::Result<Answer> {
        self.sysctls.look(self.now);
        let tap = Tap::create("ptl")?;
        tap.set_send_buffer(TAP_SEND_BUFFER)?;
        let statistics = StatisticsReader::create()?;
        let alert = Bell::new()?;
        let ends = self.filter.create_channel(channel, self.config.ring_size)?;
        self.filter.attach_tap(channel, tap.ifindex)?;
        let fds: Vec<OwnedFd> = vec![
            tap.fd,
            ends.ring,
            ends.doorbell,
            self.metastate.as_fd().try_clone_to_owned()?,
            statistics.as_fd().try_clone_to_owned()?,
            alert.as_fd().try_clone_to_owned()?,
        ];
        self.channels.insert(
            channel,
            Channel {
                client,
                statistics,
                tap: tap.ifindex,
                alert,
                recalled: Vec::new(),
            },
        );
        let body = ReplyBody::Welcome {
            channel,
            ring_size: self.config.ring_size,
            tap: tap.ifindex,
            cuts_datagrams: tap.cuts_datagrams,
            parameters: self.config.parameters(),
        };
        Ok(Answer::Reply(body, fds))
    }

    /// The process is gone, however it went: abort what it held, free its channel.
    pub fn channel_gone(&mut self, channel: ChannelId) {
        if let Some(process) = self.registry.process(channel) {
            info!(pid = process.pid, program = process.program, "process gone");
        }
        for id in self.registry.unregister(channel) {
            self.abort_orphan(id);
        }
        if let Some(gone) = self.channels.remove(&channel) {
            let due = self.now + TAP_GOES_WITHIN;
            self.leaving_taps.push_back((due, gone.tap));
            self.add_to_ended(&gone.statistics);
        }
        if let Err(failure) = self.filter.remove_channel(channel) {
            error!(%failure, channel = channel.0, "cannot remove a channel");
        }
    }

    /// Removes taps that did not go with their processes: whoever has a tap can make it persist.
    /// Returns when to come back.
    pub fn drive_leaving_taps(&mut self) -> Option<Instant> {
        while let Some(&(due, tap)) = self.leaving_taps.front() {
            if due > self.now {
                return Some(due);
            }
            self.leaving_taps.pop_front();
            if let Err(failure) = self.monitor.delete_device(tap) {
                warn!(%failure, "a tap stays");
            }
        }
        None
    }

    /// `Probe`: tells what is behind a descriptor that the process did not open. Having it is the
    /// right to know.
    pub fn probe(&self, descriptor: Option<&OwnedFd>) -> Result<Answer, Errno> {
        let descriptor = descriptor.ok_or(Errno::INVAL)?;
        let cookie = portolan_sys::unix::cookie(descriptor).map_err(|_| Errno::INVAL)?;
        let session = self.registry.by_cookie(cookie);
        let probed = session.and_then(|session| self.probed(session));
        Ok(ReplyBody::Probed(probed).into())
    }

    /// None if its descriptor says nothing to another process.
    fn probed(&self, session: &Session) -> Option<Probed> {
        let standing = match (session.protocol, session.phase, session.remote) {
            (Protocol::Tcp, Phase::Bound, _) => Standing::Bound,
            (_, Phase::Listening, _) => Standing::Listening {
                backlog: self.listeners.get(&session.id)?.backlog(),
            },
            (
                Protocol::Tcp,
                Phase::Offered | Phase::Connected | Phase::Relayed | Phase::Parked,
                Some(remote),
            ) => Standing::Connected { remote },
            _ => return None,
        };
        let listener = session.listener.and_then(|id| self.registry.session(id));
        Some(Probed {
            session: session.id,
            standing,
            is_v6: listener.unwrap_or(session).local.is_ipv6(),
            local: session.local,
            traits: session.traits.clone(),
        })
    }
}

/// Looks up an effective capability of a process.
fn has_capability(pid: u32, capability: u64) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/status"))
        .ok()
        .and_then(|status| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        })
        .is_some_and(|effective| effective & capability != 0)
}
