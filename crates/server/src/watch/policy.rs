//! The host's own policy: netfilter's rules, and policy rules of routing. Where there is one, new sockets are the
//! kernel's, which obeys it, and packets that no flow claims go to the kernel's stack, whose sockets hold the ports
//! ([ADR 38](../../../docs/adr/0038-the-hosts-policy.md)). A thread watches netfilter, since the kernel answers under a
//! lock that a large ruleset holds for long.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portolan_bpf::has_deciding_programs;
use portolan_control::{Errno as Fault, SessionPhase};
use portolan_sys::netfilter::{Nftables, has_legacy_tables};
use portolan_sys::socket_filter;
use portolan_sys::wait::EventNotifier;
use portolan_types::{ChannelId, SessionId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{error, info, warn};

use crate::calls::Call;
use crate::config::HostPolicy;
use crate::qos::cgroup_of;
use crate::requests::Answer;
use crate::server::Server;
use crate::user_threads::WaitsFor;

/// How often tables of iptables' own modules, of which there are no events, are looked for; and nftables where the
/// kernel has none yet.
const INTERVAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Pause between looks: bounds the effort where a ruleset changes all the time.
const REST: Duration = Duration::from_millis(10);

/// Whether netfilter has rules, and the thread that watches.
#[derive(Debug)]
pub(crate) struct PolicyWatch {
    has_rules: Arc<AtomicBool>,
    /// Becomes readable when that has changed.
    pub news: Arc<EventNotifier>,
}

impl PolicyWatch {
    /// Looks once, then starts a thread that does until the server ends.
    pub(crate) fn start() -> io::Result<PolicyWatch> {
        let mut follower = Follower {
            nftables: None,
            has_rules: Arc::default(),
            news: Arc::new(EventNotifier::new()?),
        };
        follower.look();
        let watch = PolicyWatch {
            has_rules: Arc::clone(&follower.has_rules),
            news: Arc::clone(&follower.news),
        };
        std::thread::Builder::new()
            .name("policy".to_owned())
            .spawn(move || follower.run())?;
        Ok(watch)
    }

    fn has_rules(&self) -> bool {
        self.has_rules.load(Ordering::Acquire)
    }
}

struct Follower {
    nftables: Option<Nftables>,
    has_rules: Arc<AtomicBool>,
    news: Arc<EventNotifier>,
}

impl Follower {
    fn run(mut self) {
        loop {
            self.sleep();
            let before = self.has_rules.load(Ordering::Relaxed);
            self.look();
            if self.has_rules.load(Ordering::Relaxed) != before {
                self.news.notify();
            }
            std::thread::sleep(REST);
        }
    }

    fn sleep(&self) {
        let events = self.nftables.as_ref().map(AsFd::as_fd);
        let mut fds: Vec<_> = events
            .iter()
            .map(|events| PollFd::new(events, PollFlags::IN))
            .collect();
        // When interrupted, it looks again.
        let _ = poll(&mut fds, Some(&INTERVAL));
    }

    fn look(&mut self) {
        let has_rules = self.has_nftables_rules() || has_legacy_tables();
        self.has_rules.store(has_rules, Ordering::Release);
    }

    /// Where the kernel gives no answer, there is a policy.
    fn has_nftables_rules(&mut self) -> bool {
        if self.nftables.is_none() {
            self.nftables = match Nftables::open() {
                Ok(nftables) => Some(nftables),
                Err(Errno::PROTONOSUPPORT) => return false,
                Err(errno) => {
                    warn!(%errno, "cannot watch nftables: sockets are the kernel's");
                    return true;
                }
            };
        }
        let Some(nftables) = &mut self.nftables else {
            return false;
        };
        // First the events, so that a change during the look causes another one.
        nftables.drain();
        match nftables.has_rules() {
            Ok(has_rules) => has_rules,
            // The module for it cannot be loaded: there are no rules.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => false,
            Err(errno) => {
                warn!(%errno, "cannot read nftables: sockets are the kernel's");
                true
            }
        }
    }
}

/// A hierarchy that is not mounted has no programs.
fn has_cgroup_policy(pid: u32) -> bool {
    let asked = cgroup_of(pid).map(|folder| File::open(folder).and_then(has_deciding_programs));
    match asked {
        None => false,
        Some(Ok(has_programs)) => has_programs,
        Some(Err(failure)) => {
            warn!(pid, %failure, "cannot read the programs of a control group");
            false
        }
    }
}

impl Server {
    /// Whether the host has a policy of its own that new flows must obey.
    pub(crate) fn has_host_policy(&self) -> bool {
        self.config.host_policy == HostPolicy::Obey
            && (self.policy.has_rules() || self.network.tables.has_policy_rules())
    }

    /// Whether new sockets of a process are the kernel's.
    pub(crate) fn is_subject_to_policy(&self, channel: ChannelId) -> bool {
        let process = self.channels.get(&channel);
        self.obeys_policy || process.is_some_and(|process| process.has_cgroup_policy == Some(true))
    }

    /// Answers a request for a socket when it is known whether programs of the process's control group decide on that.
    /// The kernel tells a thread, once for a process.
    pub(crate) fn knowing_policy(
        &mut self,
        channel: ChannelId,
        answer: impl FnOnce(&mut Server) -> Result<Answer, Fault> + Send + 'static,
    ) -> Result<Answer, Fault> {
        let known = self
            .channels
            .get(&channel)
            .map(|process| process.has_cgroup_policy);
        let process = self.control.registry.process(channel);
        let (Some(None), Some(process), HostPolicy::Obey) =
            (known, process, self.config.host_policy)
        else {
            return answer(self);
        };
        let (uid, pid) = (process.uid, process.pid);
        self.calls.check(uid, WaitsFor::ControlGroups)?;
        Ok(Answer::Call(Call {
            uid,
            waits_for: WaitsFor::ControlGroups,
            make: Box::new(move || {
                let has_policy = has_cgroup_policy(pid);
                Box::new(move |server| {
                    if let Some(process) = server.channels.get_mut(&channel) {
                        process.has_cgroup_policy = Some(has_policy);
                    }
                    answer(server)
                })
            }),
        }))
    }

    /// Netfilter has its first rule, or lost the last one.
    pub(crate) fn on_policy_news(&mut self) {
        self.policy.news.drain();
        self.publish();
    }

    /// Tells the filter whether there is a policy. The metastate tells the libraries.
    pub(crate) fn apply_host_policy(&mut self) {
        let is_there = self.has_host_policy();
        if let Err(failure) = self.filter.set_policy(is_there) {
            error!(%failure, "the filter does not know of the host's policy");
        }
        if std::mem::replace(&mut self.obeys_policy, is_there) == is_there {
            return;
        }
        self.control.counters.policy_changes += 1;
        if is_there {
            info!("the host has netfilter or policy rules: new sockets are the kernel's");
            self.open_listeners_at_kernel();
        } else {
            info!("the host has no netfilter and policy rules any more");
        }
    }

    /// From now on the kernel takes the connections to all listeners.
    fn open_listeners_at_kernel(&mut self) {
        let sessions = self.control.registry.sessions();
        let listening: Vec<SessionId> = sessions
            .filter(|session| session.phase() == SessionPhase::Listening)
            .map(|session| session.id)
            .collect();
        for id in listening {
            self.open_port_at_kernel(id);
        }
    }

    /// By now the filter has seen everything that reaches the kernel's stack since the port's row was written.
    pub(crate) fn open_port_at_kernel(&mut self, id: SessionId) {
        if let Some(port) = self.handles.port(id)
            && let Err(errno) = socket_filter::lift(&port.socket)
        {
            warn!(%errno, session = id.0, "the kernel takes no connections by managed devices");
        }
    }
}
