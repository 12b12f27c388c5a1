//! The end of sessions, and recalls, by inputs and effects alone.

use std::collections::BTreeMap;

use bolero::TypeGenerator;
use portolan_proto::control::Reuse;
use portolan_tcp::isn::Secret;
use portolan_types::Generation;

use super::*;
use crate::legality::SessionPhase;
use crate::listener::Listener;
use crate::ports::PortClaim;
use crate::recall::ClientId;
use crate::relay::Relay;
use crate::session::Opening;

const PLENTY: Limit = Limit {
    total: 1000,
    per_user: 1000,
    reserve: 0,
};

pub(crate) const USER: u32 = 1000;
pub(crate) const SLOT: Slot = Slot(7);
const START: Instant = Instant::from_millis(1000);

/// An exclusive claim on a TCP port.
pub(crate) fn claim_of(local: SocketAddr) -> PortClaim {
    PortClaim {
        protocol: Protocol::Tcp,
        local,
        reuse: Reuse::default(),
        v6_only: false,
        uid: USER,
    }
}

/// A `Control` with one process.
pub(crate) struct Bed {
    pub(crate) control: Control,
    pub(crate) channel: ChannelId,
    next_port: u16,
    pub(crate) now: Instant,
}

impl Bed {
    pub(crate) fn new() -> Bed {
        Bed::with(PLENTY)
    }

    fn with(orphans: Limit) -> Bed {
        let limits = ControlLimits {
            registry: Limits {
                processes: PLENTY,
                sessions: PLENTY,
                bindings: PLENTY,
                sessions_per_process: 100,
            },
            orphans: OrphanLimits {
                number: orphans,
                memory: Limit {
                    total: 1 << 20,
                    per_user: 1 << 20,
                    reserve: 0,
                },
                patience: Duration::from_secs(240),
            },
            relay_memory: PLENTY,
            time_wait: 2,
        };
        let mut control = Control::new(&limits, PortTable::new(50_000..=50_999), START);
        let charge = control.registry.admit_process(USER).unwrap();
        control
            .registry
            .register(ChannelId(1), 1, "test".into(), charge);
        Bed {
            control,
            channel: ChannelId(1),
            next_port: 4000,
            now: START,
        }
    }

    /// A TCP listener at that address.
    pub(crate) fn listener(
        &mut self,
        local: SocketAddr,
        backlog: u32,
        random: impl FnMut() -> u64,
    ) -> SessionId {
        let (claim, local) = self.control.ports.bind(claim_of(local), 0).unwrap();
        let opening = Opening {
            claim: Some(claim),
            ..Opening::new(Protocol::Tcp, local, USER)
        };
        let listener = self.control.enter(None, opening, random).unwrap();
        let effects = self.does(Input::Listens(listener));
        assert_eq!(effects, [Effect::SteerListener(listener)]);
        let session = self.control.registry.session_mut(listener).unwrap();
        session.life = Life::Listening(Box::new(Listener::new(backlog, Secret([7; 16]))));
        listener
    }

    /// A connection from a port of its own.
    pub(crate) fn connection(&mut self, life: Life, holder: Holder) -> SessionId {
        let local = SocketAddr::from(([10, 0, 0, 1], self.next_port));
        let remote = SocketAddr::from(([10, 0, 0, 2], 80));
        self.next_port += 1;
        let opening = Opening {
            life,
            remote: Some(remote),
            flow_claim: Some(self.control.ports.join(claim_of(local), remote).unwrap()),
            ..Opening::new(Protocol::Tcp, local, USER)
        };
        let number = u64::from(self.next_port);
        let owner = Some(self.channel);
        let id = self
            .control
            .registry
            .open(owner, opening, || number)
            .unwrap();
        self.control.registry.steer(id, holder);
        id
    }

    pub(crate) fn held_here(&mut self, life: Life) -> SessionId {
        self.connection(life, Holder::Server(SLOT))
    }

    fn held_by_process(&mut self) -> SessionId {
        self.connection(Life::Connected, Holder::Process(self.channel, SLOT))
    }

    pub(crate) fn finishing(&mut self, unsent: u64) -> SessionId {
        let id = self.held_here(Life::Parked);
        assert_eq!(
            self.does(Input::Close(id)),
            [Effect::CloseConnection(id, SLOT)]
        );
        self.does(Input::Finishing { id, unsent });
        id
    }

    pub(crate) fn does(&mut self, input: Input) -> Effects {
        self.control.handle(input, self.now)
    }

    fn forget(&mut self, id: SessionId) {
        self.does(Input::Forget(id));
    }

    pub(crate) fn flow(&self, id: SessionId) -> FlowKey {
        self.control.registry.session(id).unwrap().flow().unwrap()
    }

    /// Advances the time. Returns the effects of the sessions' deadlines.
    pub(crate) fn passes(&mut self, time: Duration) -> Effects {
        self.now += time;
        let due = self.control.timers.take(self.now, usize::MAX);
        let mut effects = Effects::new();
        for timer in due {
            match timer {
                Timer::Session(id, deadline) => effects.extend(self.does(Input::Due(id, deadline))),
                Timer::Ports => self.control.expire_ports(self.now),
                other => panic!("{other:?} is none of a session's"),
            }
        }
        effects
    }

    fn phase(&self, id: SessionId) -> SessionPhase {
        self.control.registry.session(id).unwrap().phase()
    }
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn wants(client: u64, want: RequestedState) -> Requester {
    Requester {
        client: ClientId(client),
        request: 1,
        want,
    }
}

#[test]
fn a_close_is_finished_by_the_engine_and_forgotten_when_it_is_sent() {
    let mut bed = Bed::new();
    let id = bed.finishing(0);
    assert_eq!(bed.phase(id), SessionPhase::Closing);
    let progress = Progress::Closed;
    assert_eq!(
        bed.does(Input::Progress { id, progress }),
        [Effect::ForgetWhenSent(id)]
    );
    bed.does(Input::Forget(id));
    assert_eq!(bed.control.timers.next(), None, "nothing of it is left");
    assert!(bed.control.ports.is_empty());
}

#[test]
fn the_oldest_go_when_too_many_are_in_time_wait() {
    let mut bed = Bed::new();
    let ids = [(); 3].map(|()| bed.finishing(0));
    let flows = ids.map(|id| (id, bed.flow(id))).into_iter();
    let flows: BTreeMap<SessionId, FlowKey> = flows.collect();
    let mut effects = Effects::new();
    for id in ids {
        bed.now += seconds(1);
        let progress = Progress::TimeWait;
        effects.extend(bed.does(Input::Progress { id, progress }));
        // The engine repeats it with each segment.
        assert_eq!(bed.does(Input::Progress { id, progress }), []);
    }
    let [a, b, c] = ids;
    let guarantees = |id| Effect::EndGuarantees(flows[&id]);
    let expected = [
        guarantees(a),
        guarantees(b),
        guarantees(c),
        Effect::Forget(a),
    ];
    assert_eq!(effects, expected);
    assert_eq!(bed.control.counters.time_wait_evicted, 1);
}

#[test]
fn ports_in_time_wait_are_for_the_same_peer_again_after_a_second() {
    let mut bed = Bed::new();
    let id = bed.finishing(0);
    let progress = Progress::TimeWait;
    bed.does(Input::Progress { id, progress });
    let local = bed.control.registry.session(id).unwrap().local;
    let remote = SocketAddr::from(([10, 0, 0, 2], 80));
    let reusable = |bed: &Bed| bed.control.reusable_time_wait(local, remote, bed.now);
    assert_eq!(reusable(&bed), None);
    bed.now += seconds(1);
    assert_eq!(reusable(&bed), Some(id));
    let other = SocketAddr::from(([10, 0, 0, 3], 80));
    assert_eq!(bed.control.reusable_time_wait(local, other, bed.now), None);
    bed.forget(id);
    assert_eq!(reusable(&bed), None);
}

#[test]
fn a_user_with_too_many_orphans_loses_the_oldest() {
    let mut bed = Bed::with(Limit {
        total: 100,
        per_user: 2,
        reserve: 0,
    });
    let first = bed.finishing(10);
    bed.finishing(10);
    let id = bed.held_here(Life::Parked);
    bed.does(Input::Close(id));
    assert_eq!(
        bed.does(Input::Finishing { id, unsent: 10 }),
        [Effect::ResetConnection(SLOT)]
    );
    assert_eq!(bed.control.counters.orphans_reset, 1);
    // The first is reset, and not queried any more.
    bed.forget(first);
    let effects = bed.passes(seconds(241));
    assert_eq!(effects.len(), 2);
    assert!(!effects.contains(&Effect::LookAtOrphan(first)));
}

#[test]
fn an_orphan_is_reset_when_its_peer_takes_nothing_for_too_long() {
    let mut bed = Bed::new();
    let id = bed.finishing(1000);
    assert_eq!(bed.passes(seconds(239)), []);
    assert_eq!(bed.passes(seconds(2)), [Effect::LookAtOrphan(id)]);
    let unsent = Some(900);
    assert_eq!(
        bed.does(Input::Unsent { id, unsent }),
        [],
        "it has taken some"
    );
    assert_eq!(bed.passes(seconds(241)), [Effect::LookAtOrphan(id)]);
    assert_eq!(
        bed.does(Input::Unsent { id, unsent }),
        [Effect::ResetConnection(SLOT)]
    );
}

#[test]
fn one_that_has_sent_all_has_its_own_time_limit() {
    let mut bed = Bed::new();
    let id = bed.finishing(1000);
    for _ in 0..3 {
        assert_eq!(bed.passes(seconds(241)), [Effect::LookAtOrphan(id)]);
        let unsent = Some(0);
        assert_eq!(bed.does(Input::Unsent { id, unsent }), []);
    }
}

#[test]
fn the_peer_of_a_dead_holder_is_asked_five_times_and_its_port_held_back() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    let flow = bed.control.registry.session(id).unwrap().flow().unwrap();
    assert_eq!(
        bed.does(Input::Orphaned(id)),
        [
            Effect::ClosePeerEnd(id),
            Effect::SteerToNobody(id),
            Effect::Probe(flow)
        ]
    );
    assert!(bed.control.registry.session(id).unwrap().is_probing());
    let mut wait = Duration::from_millis(551);
    for _ in 0..4 {
        assert_eq!(bed.passes(wait), [Effect::Probe(flow)]);
        wait *= 2;
    }
    assert_eq!(bed.passes(wait), [Effect::Forget(id)]);
    bed.forget(id);
    assert!(!bed.control.ports.is_empty(), "held back");
    bed.passes(seconds(61));
    assert!(bed.control.ports.is_empty());
}

#[test]
fn a_peer_that_answers_is_asked_no_more() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    bed.does(Input::Orphaned(id));
    assert_eq!(bed.does(Input::ProbeAnswered(id)), [Effect::Forget(id)]);
    bed.forget(id);
    assert_eq!(bed.passes(seconds(50)), []);
}

#[test]
fn what_waits_for_a_session_whose_holder_dies_is_dropped_and_refused() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    let requester = wants(5, RequestedState::Relay);
    assert_eq!(
        bed.does(Input::Recall(id, requester)),
        [Effect::Recall(bed.channel, id)]
    );
    bed.control.registry.depart(id, Slot(9), Instant::ZERO);
    let effects = bed.does(Input::Orphaned(id));
    assert!(effects.contains(&Effect::Refuse(requester, Errno::CONNRESET)));
    assert!(effects.contains(&Effect::RemoveConnection(Slot(9))));
    let session = bed.control.registry.session(id).unwrap();
    assert_eq!((session.awaited, session.recalls), (None, 1));
}

#[test]
fn the_first_who_wants_a_session_gets_it_and_the_next_has_it_relayed() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    let requester = wants(5, RequestedState::CacheAt(Slot(1)));
    for expected in [
        vec![Effect::Serve(id, requester)],
        vec![Effect::MoveBytes(id), Effect::Serve(id, requester)],
    ] {
        bed.does(Input::Recall(id, requester));
        let session = bed.control.registry.session_mut(id).unwrap();
        session.has_descriptor = true;
        assert_eq!(bed.does(Input::Park(id)), []);
        assert_eq!(bed.does(Input::Returned(id)), expected);
        assert_eq!(bed.does(Input::Returned(id)), []);
    }
}

#[test]
fn a_holder_that_does_not_give_a_session_back_loses_it() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    let requester = wants(5, RequestedState::Relay);
    bed.does(Input::Recall(id, requester));
    assert_eq!(bed.does(Input::Recall(id, requester)), [], "asked once");
    assert_eq!(bed.passes(Duration::from_millis(1990)), []);
    let effects = bed.passes(Duration::from_millis(20));
    let refusal = Effect::Refuse(requester, Errno::CONNRESET);
    assert_eq!(effects[..2], [refusal.clone(), refusal]);
    assert!(effects.contains(&Effect::SteerToNobody(id)));
    assert_eq!(bed.control.counters.recall_timeouts, 1);
}

#[test]
fn so_many_may_wait_for_one_session() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    for client in 0..REQUESTERS_MAX as u64 {
        bed.does(Input::Recall(id, wants(client, RequestedState::Relay)));
    }
    let last = wants(99, RequestedState::Relay);
    assert_eq!(
        bed.does(Input::Recall(id, last)),
        [Effect::Refuse(last, Errno::NOBUFS)]
    );
}

#[test]
fn the_last_descriptor_ends_each_part_of_a_life_in_its_own_way() {
    let mut bed = Bed::new();
    let parked = bed.held_here(Life::Parked);
    let offered = bed.held_here(Life::Offered);
    let relayed = bed.held_here(Life::Relayed(Relay::default()));
    let bound = bed.connection(Life::Bound, Holder::None);
    assert_eq!(
        bed.does(Input::HungUp(parked)),
        [Effect::CloseConnection(parked, SLOT)]
    );
    assert_eq!(
        bed.does(Input::HungUp(offered)),
        [Effect::ResetConnection(SLOT)]
    );
    assert_eq!(bed.does(Input::HungUp(relayed)), [], "its relay sees to it");
    assert_eq!(bed.does(Input::HungUp(bound)), [Effect::Forget(bound)]);
    let connected = bed.held_by_process();
    assert!(
        bed.does(Input::HungUp(connected))
            .contains(&Effect::SteerToNobody(connected))
    );
}

#[test]
fn what_is_parked_without_a_descriptor_is_closed() {
    let mut bed = Bed::new();
    let id = bed.held_here(Life::Connected);
    assert_eq!(
        bed.does(Input::Park(id)),
        [Effect::CloseConnection(id, SLOT)]
    );
}

#[test]
fn an_abort_of_what_nobody_holds_forgets_it() {
    let mut bed = Bed::new();
    let id = bed.connection(Life::Offered, Holder::None);
    assert_eq!(bed.does(Input::Abort(id)), [Effect::Forget(id)]);
    assert_eq!(bed.control.counters.aborts, 1);
}

#[test]
fn a_local_end_stays_with_those_who_have_its_descriptor() {
    let mut bed = Bed::new();
    let id = bed.held_by_process();
    let session = bed.control.registry.session_mut(id).unwrap();
    (session.local_peer, session.has_descriptor) = (Some(SessionId(1)), true);
    session.generation = Generation(3);
    assert_eq!(bed.does(Input::Orphaned(id)), [Effect::UnholdLocal(id)]);
    assert_eq!(bed.phase(id), SessionPhase::Parked);
    bed.control.registry.session_mut(id).unwrap().has_descriptor = false;
    assert_eq!(
        bed.does(Input::Orphaned(id)),
        [Effect::UnholdLocal(id), Effect::CloseLocal(id)]
    );
}

#[test]
fn inputs_about_what_is_gone_do_nothing() {
    let mut bed = Bed::new();
    let id = SessionId(42);
    for input in [
        Input::HungUp(id),
        Input::Close(id),
        Input::Park(id),
        Input::Finishing { id, unsent: 1 },
        Input::Unsent { id, unsent: None },
        Input::Orphaned(id),
        Input::Returned(id),
        Input::Due(id, Deadline::Probe),
    ] {
        assert_eq!(bed.does(input.clone()), [], "{input:?}");
    }
}

#[test]
fn a_flow_that_is_opened_anew_is_no_longer_the_old_sessions() {
    let mut bed = Bed::new();
    let id = bed.held_here(Life::Parked);
    let flow = bed.flow(id);
    let given_up = [Effect::RemoveRow(flow), Effect::EndGuarantees(flow)];
    assert_eq!(bed.does(Input::FlowReused(id)), given_up);
    assert_eq!(bed.does(Input::FlowReused(id)), []);
    bed.control.registry.steer(id, Holder::Server(SLOT));
    assert_eq!(bed.control.registry.by_flow(&flow), None);
    let forgotten = [
        Effect::RemoveConnection(SLOT),
        Effect::EndExtensions(id),
        Effect::Release(id),
    ];
    assert_eq!(bed.does(Input::Forget(id)), forgotten);
}

#[test]
fn nobody_probes_a_flow_that_is_opened_anew() {
    let mut bed = Bed::new();
    let id = bed.held_here(Life::Parked);
    bed.does(Input::Orphaned(id));
    assert!(bed.control.registry.session(id).unwrap().is_probing());
    bed.control.registry.steer(id, Holder::Server(SLOT));
    let effects = bed.does(Input::FlowReused(id));
    assert_eq!(effects.last(), Some(&Effect::Forget(id)));
}

#[test]
fn what_a_session_has_elsewhere_goes_by_what_its_entry_says() {
    let mut bed = Bed::new();
    let id = bed.held_here(Life::Parked);
    let flow = bed.flow(id);
    bed.control.registry.depart(id, Slot(9), Instant::ZERO);
    assert_eq!(bed.control.registry.by_flow(&flow), Some(id));
    let requester = wants(5, RequestedState::Relay);
    bed.does(Input::Recall(id, requester));
    let expected = [
        Effect::RemoveConnection(Slot(9)),
        Effect::RemoveConnection(SLOT),
        Effect::RemoveRow(flow),
        Effect::EndGuarantees(flow),
        Effect::EndExtensions(id),
        Effect::Release(id),
        Effect::Refuse(requester, Errno::CONNRESET),
    ];
    assert_eq!(bed.does(Input::Forget(id)), expected);
    assert_eq!(bed.control.registry.by_flow(&flow), None);
    assert_eq!(bed.does(Input::Forget(id)), []);
}

#[test]
fn an_end_within_the_host_has_no_row_and_is_dropped() {
    let mut bed = Bed::new();
    let id = bed.connection(Life::Parked, Holder::None);
    let session = bed.control.registry.session_mut(id).unwrap();
    session.local_peer = Some(SessionId(9));
    bed.control
        .registry
        .steer(id, Holder::Process(ChannelId(1), SLOT));
    let flow = bed.flow(id);
    let expected = [
        Effect::DropLocalEnd(id),
        Effect::EndGuarantees(flow),
        Effect::EndExtensions(id),
        Effect::Release(id),
    ];
    assert_eq!(bed.does(Input::Forget(id)), expected);
    assert_eq!(bed.control.registry.held_by(ChannelId(1)), []);
}

#[test]
fn a_udp_session_leaves_its_endpoint_and_its_groups() {
    let mut bed = Bed::new();
    let local = SocketAddr::from(([0, 0, 0, 0], 53));
    let opening = Opening::new(Protocol::Udp, local, USER);
    let registry = &mut bed.control.registry;
    let id = registry.open(None, opening, || 3).unwrap();
    registry.join_group(id, [224, 0, 0, 251].into(), 2);
    registry.join_group(id, [224, 0, 0, 251].into(), 2);
    assert!(registry.has_members());
    let endpoint = UdpEndpoint {
        local,
        v6_only: false,
    };
    let effects = bed.does(Input::Forget(id));
    assert_eq!(effects[0], Effect::LeaveEndpoint(id, endpoint));
    assert!(!bed.control.registry.has_members());
}

/// An input for one of a few sessions.
#[derive(Debug, TypeGenerator)]
enum Step {
    Open { life: u8, is_here: bool },
    HungUp(u8),
    Close(u8),
    Abort(u8),
    Park { pick: u8, has_descriptor: bool },
    Finishing { pick: u8, unsent: u16 },
    TimeWait(u8),
    Closed(u8),
    Orphaned(u8),
    ProbeAnswered(u8),
    FlowReused(u8),
    Recall { pick: u8, wants_cache: bool },
    Returned(u8),
    Pass { millis: u32 },
}

/// A bed that performs the effects that stay within `Control`.
struct Shell {
    bed: Bed,
    ids: Vec<SessionId>,
    /// Requests that wait for an answer.
    waiting: BTreeMap<ClientId, u32>,
    next_client: u64,
}

impl Shell {
    fn pick(&self, pick: u8) -> SessionId {
        let ids = &self.ids;
        let pick = usize::from(pick) % (ids.len() + 1);
        ids.get(pick).copied().unwrap_or(SessionId(9))
    }

    fn apply(&mut self, step: &Step) {
        let input = match *step {
            Step::Open { .. } if self.ids.len() == 50 => return,
            Step::Open { life, is_here } => {
                let (life, holder) = match (life % 4, is_here) {
                    (0, _) => (Life::Connected, Holder::Process(self.bed.channel, SLOT)),
                    (1, true) => (Life::Offered, Holder::Server(SLOT)),
                    (2, true) => (Life::Relayed(Relay::default()), Holder::Server(SLOT)),
                    (_, true) => (Life::Parked, Holder::Server(SLOT)),
                    (_, false) => (Life::Bound, Holder::None),
                };
                let id = self.bed.connection(life, holder);
                return self.ids.push(id);
            }
            Step::HungUp(pick) => Input::HungUp(self.pick(pick)),
            Step::Close(pick) => Input::Close(self.pick(pick)),
            Step::Abort(pick) => Input::Abort(self.pick(pick)),
            Step::Park {
                pick,
                has_descriptor,
            } => {
                let id = self.pick(pick);
                if let Some(session) = self.bed.control.registry.session_mut(id) {
                    session.has_descriptor = has_descriptor;
                }
                Input::Park(id)
            }
            Step::Finishing { pick, unsent } => Input::Finishing {
                id: self.pick(pick),
                unsent: unsent.into(),
            },
            Step::TimeWait(pick) => Input::Progress {
                id: self.pick(pick),
                progress: Progress::TimeWait,
            },
            Step::Closed(pick) => Input::Progress {
                id: self.pick(pick),
                progress: Progress::Closed,
            },
            Step::Orphaned(pick) => Input::Orphaned(self.pick(pick)),
            Step::ProbeAnswered(pick) => Input::ProbeAnswered(self.pick(pick)),
            Step::FlowReused(pick) => Input::FlowReused(self.pick(pick)),
            Step::Recall { pick, wants_cache } => {
                self.next_client += 1;
                let want = if wants_cache {
                    RequestedState::CacheAt(SLOT)
                } else {
                    RequestedState::Relay
                };
                let requester = wants(self.next_client, want);
                self.waiting.insert(requester.client, requester.request);
                Input::Recall(self.pick(pick), requester)
            }
            Step::Returned(pick) => Input::Returned(self.pick(pick)),
            Step::Pass { millis } => {
                let effects = self.bed.passes(Duration::from_millis(millis.into()));
                return self.perform(effects);
            }
        };
        let effects = self.bed.does(input);
        self.perform(effects);
    }

    fn perform(&mut self, effects: Effects) {
        for effect in effects {
            match effect {
                Effect::Forget(id) | Effect::ForgetWhenSent(id) => self.forget(id),
                Effect::Serve(_, requester) | Effect::Refuse(requester, _) => {
                    let answered = self.waiting.remove(&requester.client);
                    assert!(answered.is_some(), "answered twice");
                }
                Effect::LookAtOrphan(id) => {
                    let unsent = Some(1);
                    let effects = self.bed.does(Input::Unsent { id, unsent });
                    self.perform(effects);
                }
                _ => {}
            }
        }
    }

    fn forget(&mut self, id: SessionId) {
        self.ids.retain(|known| *known != id);
        let effects = self.bed.does(Input::Forget(id));
        self.perform(effects);
    }

    /// Checks the indices against the entries.
    fn check(&self) {
        let control = &self.bed.control;
        let (mut in_time_wait, mut orphans, mut waiting) = (0, 0, 0);
        for session in control.registry.sessions() {
            match &session.life {
                Life::Closing(Closing::TimeWait { since }) => {
                    in_time_wait += 1;
                    assert!(control.time_wait.contains(&(*since, session.id)));
                }
                Life::Closing(Closing::Finishing(Some(_))) => {
                    orphans += 1;
                    let timer = Timer::Session(session.id, Deadline::Orphan);
                    assert!(control.timers.is_armed(timer));
                }
                Life::Closing(Closing::Probing { .. }) => {
                    let timer = Timer::Session(session.id, Deadline::Probe);
                    assert!(control.timers.is_armed(timer));
                }
                _ => {}
            }
            let finds_itself = |flow| control.registry.by_flow(&flow) == Some(session.id);
            assert!(!session.is_flow_reused || !session.flow().is_some_and(finds_itself));
            if let Some(recall) = &session.recall {
                waiting += recall.requesters.len();
                let timer = Timer::Session(session.id, Deadline::Recall);
                assert!(control.timers.is_armed(timer));
            }
        }
        assert_eq!(control.time_wait.len(), in_time_wait);
        assert_eq!(control.orphans.count(), orphans);
        assert_eq!(
            self.waiting.len(),
            waiting,
            "everybody is answered or waits"
        );
    }
}

#[test]
fn whatever_comes_in_whatever_order_the_tables_agree_and_nothing_is_left() {
    portolan_fuzz::check!(500)
        .with_type::<Vec<Step>>()
        .for_each(|steps| {
            let mut shell = Shell {
                bed: Bed::new(),
                ids: Vec::new(),
                waiting: BTreeMap::new(),
                next_client: 0,
            };
            for step in steps {
                shell.apply(step);
                shell.check();
            }
            for id in shell.ids.clone() {
                shell.forget(id);
            }
            shell.check();
            shell.bed.passes(seconds(600));
            assert_eq!(shell.bed.control.timers.next(), None);
            assert!(shell.bed.control.ports.is_empty());
        });
}
