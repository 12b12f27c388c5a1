//! The server's tables against clients that make any requests in any order. No process can use
//! another's sessions, no limit is exceeded, and nothing is left after all have exited.

use core::time::Duration;
use std::collections::HashMap;
use std::net::SocketAddr;

use bolero::TypeGenerator;
use portolan_control::legality::{Command, SessionPhase};
use portolan_control::ports::{ClaimId, PortClaim, PortTable};
use portolan_control::{
    Closing, Holder, Life, Limit, Limits, Listener, Opening, Registry, Relay, SessionEntry,
};
use portolan_proto::control::Reuse;
use portolan_tcp::isn::Secret;
use portolan_types::{ChannelId, Instant, Protocol, SessionId, Slot};

const PLENTY: Limit = Limit {
    total: 1 << 20,
    per_user: 1 << 20,
    reserve: 0,
};

const LIMITS: Limits = Limits {
    processes: Limit {
        total: 4,
        per_user: 3,
        reserve: 0,
    },
    sessions: PLENTY,
    bindings: PLENTY,
    sessions_per_process: 5,
};

/// Requests; channels and sessions are picked among those ever handed out.
#[derive(Debug, TypeGenerator)]
enum Request {
    Hello {
        uid: u8,
    },
    HangUp {
        channel: u8,
    },
    Open {
        channel: u8,
        life: u8,
        udp: bool,
        cookie: u8,
    },
    Command {
        channel: u8,
        session: u8,
        command: u8,
        life: u8,
    },
    Entitle {
        channel: u8,
        session: u8,
    },
    Detach {
        session: u8,
    },
    Remove {
        session: u8,
    },
    ReplaceCookie {
        session: u8,
        cookie: u8,
    },
}

struct Server {
    registry: Registry,
    channels: Vec<ChannelId>,
    sessions: Vec<SessionId>,
    /// Generations never repeat.
    generation: u32,
}

impl Server {
    fn channel(&self, pick: u8) -> ChannelId {
        // Includes one that was never handed out.
        let all = self.channels.len() + 1;
        let pick = usize::from(pick) % all;
        self.channels.get(pick).copied().unwrap_or(ChannelId(99))
    }

    fn session(&self, pick: u8) -> SessionId {
        let all = self.sessions.len() + 1;
        let pick = usize::from(pick) % all;
        self.sessions.get(pick).copied().unwrap_or(SessionId(99))
    }

    fn apply(&mut self, request: &Request) {
        match *request {
            Request::Hello { uid } => {
                let uid = u32::from(uid % 3);
                let free = self.registry.free_channels().next();
                if let Some(channel) = free
                    && self
                        .registry
                        .admit_process(uid)
                        .map(|charge| {
                            let program = "hostile".into();
                            self.registry.register(channel, 1, program, charge);
                        })
                        .is_ok()
                {
                    self.channels.push(channel);
                }
            }
            Request::HangUp { channel } => self.hang_up(self.channel(channel)),
            Request::Open {
                channel,
                life,
                udp,
                cookie,
            } => {
                let channel = self.channel(channel);
                let owner = self.registry.process(channel).map(|p| p.channel);
                let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
                let mut next = 1000 + self.sessions.len() as u64 / 2;
                let opened = self.registry.open(
                    owner,
                    opening(protocol, life_of(life), cookie.into()),
                    || {
                        // The numbers repeat: the registry must not hand one out twice.
                        next += 1;
                        next
                    },
                );
                if let Ok(id) = opened {
                    assert!(!self.sessions.contains(&id) || owner.is_none());
                    self.sessions.push(id);
                }
            }
            Request::Command {
                channel,
                session,
                command,
                life,
            } => {
                let (channel, id) = (self.channel(channel), self.session(session));
                let command = Command::ALL[usize::from(command) % Command::ALL.len()];
                self.command(channel, id, command, life_of(life));
            }
            Request::Entitle { channel, session } => {
                let (channel, id) = (self.channel(channel), self.session(session));
                if self.registry.has_room(channel).is_ok() {
                    self.registry.entitle(id, channel);
                }
            }
            Request::Detach { session } => self.registry.detach(self.session(session)),
            Request::Remove { session } => {
                let id = self.session(session);
                self.registry.remove(id);
                self.sessions.retain(|known| *known != id);
            }
            Request::ReplaceCookie { session, cookie } => {
                self.registry
                    .replace_cookie(self.session(session), cookie.into());
            }
        }
    }

    /// As the server does: it takes over what the process held.
    fn hang_up(&mut self, channel: ChannelId) {
        for id in self.registry.held_by(channel) {
            self.registry.steer(id, Holder::Server(Slot(0)));
        }
        self.registry.unregister(channel);
    }

    fn command(&mut self, channel: ChannelId, id: SessionId, command: Command, next: Life) {
        // The server reads no command before a `Hello`.
        if self.registry.process(channel).is_none() {
            return;
        }
        let Ok(session) = self.registry.admit(channel, command, id) else {
            return;
        };
        assert!(!matches!(
            session.phase(),
            SessionPhase::Handshake | SessionPhase::Closing
        ));
        if session.phase() == SessionPhase::Connected {
            let holder = matches!(session.holder, Holder::Process(of, _) if of == channel);
            let asks = command == Command::Cache && session.is_user(channel);
            assert!(
                holder || asks,
                "{command:?} for a session that another process holds"
            );
        }
        let generation = self.registry.steer(id, Holder::Process(channel, Slot(1))).0;
        assert!(generation > self.generation);
        self.generation = generation;
        if let Some(session) = self.registry.session_mut(id) {
            session.life = next;
        }
    }

    /// The index of a process agrees with its sessions.
    fn check_index(&self, channel: ChannelId) {
        let is_held = |session: &&SessionEntry| matches!(session.holder, Holder::Process(of, _) if of == channel);
        let is_known = |session: &&SessionEntry| session.is_user(channel);
        let is_there = self.registry.process(channel).is_some();
        let sorted = |mut ids: Vec<SessionId>| {
            ids.sort_unstable();
            ids
        };
        let held = self.registry.sessions().filter(is_held).map(|s| s.id);
        let known = self.registry.sessions().filter(is_known).map(|s| s.id);
        let (held, known) = (sorted(held.collect()), sorted(known.collect()));
        assert_eq!(sorted(self.registry.held_by(channel)), held);
        assert_eq!(sorted(self.registry.known_to(channel)), known);
        assert!(is_there || (held.is_empty() && known.is_empty()));
    }

    fn check(&self) {
        assert!(self.registry.process_count() <= LIMITS.processes.total as usize);
        let mut charged: HashMap<ChannelId, u32> = HashMap::new();
        for session in self.registry.sessions() {
            if let Some(owner) = session.owner() {
                assert!(
                    self.registry.process(owner).is_some(),
                    "a dead process is charged"
                );
                *charged.entry(owner).or_default() += 1;
            }
            if let Holder::Process(holder, _) = session.holder {
                assert!(
                    self.registry.process(holder).is_some(),
                    "a dead process holds {session:?}"
                );
            }
        }
        for channel in &self.channels {
            self.check_index(*channel);
        }
        for (channel, count) in charged {
            assert!(
                count <= LIMITS.sessions_per_process,
                "{channel:?} has {count}"
            );
        }
        for cookie in 1..=u8::MAX {
            if let Some(session) = self.registry.by_cookie(cookie.into()) {
                assert!(self.registry.session(session.id).is_some());
            }
        }
    }
}

fn life_of(code: u8) -> Life {
    match code % 9 {
        0 => Life::Bound,
        1 => Life::Listening(Box::new(Listener::new(1, Secret([7; 16])))),
        2 => Life::Connecting {
            channel: ChannelId(1),
            slot: Slot(0),
        },
        3 => Life::Handshake {
            deferred_until: None,
        },
        4 => Life::Offered,
        5 => Life::Connected,
        6 => Life::Relayed(Relay::default()),
        7 => Life::Parked,
        _ => Life::Closing(Closing::Finishing(None)),
    }
}

fn opening(protocol: Protocol, life: Life, cookie: u64) -> Opening {
    let local = "10.0.0.1:80".parse().expect("an address");
    Opening {
        life,
        cookie,
        ..Opening::new(protocol, local, 1000)
    }
}

#[test]
fn no_order_of_requests_passes_a_limit_or_reaches_anothers_session() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<Request>>()
        .for_each(|requests| {
            let mut server = Server {
                registry: Registry::new(LIMITS),
                channels: Vec::new(),
                sessions: Vec::new(),
                generation: 0,
            };
            for request in requests {
                server.apply(request);
                server.check();
            }
            for channel in server.channels.clone() {
                server.hang_up(channel);
            }
            server.check();
            assert_eq!(server.registry.process_count(), 0);
            for id in server.sessions.clone() {
                server.registry.remove(id);
            }
            assert_eq!(server.registry.session_count(), 0);
            assert!((1..=255).all(|cookie| server.registry.by_cookie(cookie).is_none()));
        });
}

#[derive(Debug, TypeGenerator)]
enum Operation {
    Bind {
        place: Endpoint,
        random: u32,
    },
    Connect {
        place: Endpoint,
        remote: u8,
        random: u32,
    },
    Join {
        place: Endpoint,
        remote: u8,
    },
    Listen {
        claim: u8,
    },
    Release {
        claim: u8,
    },
    HoldBack {
        claim: u8,
        seconds: u8,
    },
    Expire {
        seconds: u8,
    },
}

/// Few addresses and ports, so that they collide.
#[derive(Clone, Copy, Debug, TypeGenerator)]
struct Endpoint {
    address: u8,
    port: u8,
    udp: bool,
    reuse: (bool, bool),
    v6_only: bool,
    uid: u8,
}

impl Endpoint {
    fn claim(self) -> PortClaim {
        let address = ["0.0.0.0", "10.0.0.1", "::", "fd00::1"][usize::from(self.address % 4)];
        let port = [0, 80, 20000, 20001][usize::from(self.port % 4)];
        PortClaim {
            protocol: if self.udp {
                Protocol::Udp
            } else {
                Protocol::Tcp
            },
            local: SocketAddr::new(address.parse().expect("an address"), port),
            reuse: Reuse {
                address: self.reuse.0,
                port: self.reuse.1,
            },
            v6_only: self.v6_only,
            uid: (self.uid % 2).into(),
        }
    }
}

fn remote(code: u8) -> SocketAddr {
    SocketAddr::new([192, 0, 2, code % 3].into(), 80)
}

#[test]
fn ports_that_exclude_each_other_are_never_both_given_out() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<Operation>>()
        .for_each(|specs| {
            let mut table = PortTable::new(20000..=20003);
            let mut now = Instant::from_millis(1_000_000);
            let mut live: Vec<ClaimId> = Vec::new();
            let mut binds: Vec<ClaimId> = Vec::new();
            for operation in specs {
                let before = live.len();
                apply(&mut table, &mut live, &mut now, operation);
                if matches!(operation, Operation::Bind { .. }) {
                    binds.extend(live.get(before));
                }
                binds.retain(|id| live.contains(id));
                check_claims(&table, &binds);
            }
            for id in live {
                table.release(id);
                table.release(id);
            }
            table.expire(now + Duration::from_secs(1 << 20));
            assert!(table.is_empty(), "{} claims are left", table.len());
        });
}

fn apply(table: &mut PortTable, live: &mut Vec<ClaimId>, now: &mut Instant, operation: &Operation) {
    let pick = |live: &[ClaimId], code: u8| {
        (!live.is_empty()).then(|| live[usize::from(code) % live.len()])
    };
    match *operation {
        Operation::Bind { place, random } => {
            if let Ok((id, local)) = table.bind(place.claim(), random) {
                assert_ne!(local.port(), 0);
                live.push(id);
            }
        }
        Operation::Connect {
            place,
            remote: to,
            random,
        } => {
            if let Ok((id, local)) = table.connect(place.claim(), remote(to), random) {
                assert_ne!(local.port(), 0);
                live.push(id);
            }
        }
        Operation::Join { place, remote: to } => live.extend(table.join(place.claim(), remote(to))),
        Operation::Listen { claim } => {
            if let Some(id) = pick(live, claim) {
                let _ = table.listen(id);
            }
        }
        Operation::Release { claim } => {
            if let Some(id) = pick(live, claim) {
                table.release(id);
                live.retain(|known| *known != id);
            }
        }
        Operation::HoldBack { claim, seconds } => {
            if let Some(id) = pick(live, claim) {
                table.hold_back(id, *now + Duration::from_secs(seconds.into()));
                live.retain(|known| *known != id);
            }
        }
        Operation::Expire { seconds } => {
            *now += Duration::from_secs(seconds.into());
            assert!(table.expire(*now).is_none_or(|next| next > *now));
        }
    }
}

/// No two claims are on one endpoint without an option that allows sharing.
fn check_claims(table: &PortTable, live: &[ClaimId]) {
    let claims: Vec<PortClaim> = live.iter().filter_map(|&id| table.claim(id)).collect();
    assert_eq!(claims.len(), live.len(), "a live claim was forgotten");
    assert!(table.len() >= claims.len());
    for (index, one) in claims.iter().enumerate() {
        for other in &claims[index + 1..] {
            let same = one.protocol == other.protocol && one.local == other.local;
            let shared = one.reuse.address && other.reuse.address
                || one.reuse.port && other.reuse.port && one.uid == other.uid;
            assert!(!same || shared, "{one:?} and {other:?}");
        }
    }
}
