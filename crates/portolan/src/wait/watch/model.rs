//! A model of waiting, checked exhaustively: threads that wait, open sessions and attend in any order, the background
//! thread, and a world that lets something arrive at any moment. The watch is the library's own code; around it stands
//! what `wait.rs`, `runtime.rs`, `epoll.rs` and `helper.rs` do with it (`docs/design/waiting.md`).
//!
//! Two properties: whoever sleeps for something that has come is about to be woken, without the background thread's tick;
//! and that thread rests only while somebody leads, or is about to wake it.

use std::env;
use std::time::Duration;

use stateright::{Checker, Model, Property};

use super::*;

/// What a session's news come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Source {
    /// Frames of packets.
    Wire,
    /// Two local sessions: their peers wake by one descriptor for all, or by a word each.
    FirstLocal,
    SecondLocal,
    /// The outcome of an active open, on the socket's descriptor.
    Outcome,
    /// Room in the first local session. Its peer wakes this process for it only if requested.
    Room,
}

const DEAF_UNTIL: Instant = Instant::from_nanos(1_000_000);

use Source::{FirstLocal, Outcome, Room, SecondLocal, Wire};

const SOURCES: [Source; 5] = [Wire, FirstLocal, SecondLocal, Outcome, Room];

impl Source {
    fn is_local(self) -> bool {
        matches!(self, FirstLocal | SecondLocal | Room)
    }
}

/// State of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum News {
    Absent,
    None,
    /// It has arrived, unseen. For a local session: how its peer has woken this process.
    Arrived(SleepsOn),
    /// It has arrived, and the peer was not requested to wake this process for it.
    Unasked,
    /// The library knows of it, and has notified the waiting threads.
    Told,
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wanted {
    One(Source),
    /// An epoll set, whose members any thread adds.
    Set,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Thread {
    InProgram,
    /// Its wait is over, and it has not looked yet whether the background thread rests.
    Leaving,
    Asleep {
        wants: Wanted,
        role: Role,
        polls: Vec<Source>,
        on: SleepsOn,
        is_signalled: bool,
    },
}

/// The background thread, while it does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Helper {
    Awake,
    Rests,
    /// It was woken.
    Called,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    watch: Watch<u8>,
    /// The last one is the background thread.
    threads: Vec<Thread>,
    helper: Helper,
    members: Vec<Source>,
    /// Peers have woken this process for nothing, and are not heard until a timer fires.
    is_deaf: bool,
    news: [News; SOURCES.len()],
    /// How peers of local sessions wake this process.
    armed: SleepsOn,
    /// A writer found no room.
    is_blocked: bool,
    /// The peer must wake this process when there is room.
    asks_for_room: bool,
    additions: u64,
    /// Number of arrivals that the world may still cause.
    arrivals: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Arrive(Source),
    /// A thread of the program opens a session.
    Open(u8, Source),
    /// It makes a call that attends to the channel and does not wait.
    Attend(u8),
    /// As [`Step::Attend`]: a non-blocking write finds no room.
    Fill(u8),
    Wait(u8, Wanted),
    /// A sleeping thread finds what it polls, or a signal.
    Wake(u8),
    /// A thread that has returned from its wait calls the background thread, if that rests.
    Leave(u8),
    /// A member of the set.
    Add(u8, Source),
    /// Peers wake the leader again and again for nothing.
    Deafen(u8),
    /// The time is over, and another thread than the leader looks first.
    HearAgain(u8),
    /// The background thread's tick.
    Tick(Since),
    HelperWakes,
    HelperIsCalled,
}

impl State {
    fn news(&mut self, source: Source) -> &mut News {
        &mut self.news[source as usize]
    }

    fn exists(&self, source: Source) -> bool {
        self.news[source as usize] != News::Absent
    }

    fn has_local(&self) -> bool {
        self.exists(FirstLocal) || self.exists(SecondLocal)
    }

    fn needs(&self) -> Needs {
        Needs {
            timer: self.is_deaf.then_some(DEAF_UNTIL),
            full: Full::NONE,
            wire: self.exists(Wire),
            local: self.has_local(),
            additions: self.additions,
        }
    }

    fn signal(&mut self, thread: Option<u8>) {
        if let Some(thread) = thread
            && let Thread::Asleep { is_signalled, .. } = &mut self.threads[usize::from(thread)]
        {
            *is_signalled = true;
        }
    }

    fn look(&mut self, sources: &[Source]) {
        for &source in sources {
            if !matches!(self.news(source), News::Arrived(_) | News::Unasked) {
                continue;
            }
            *self.news(source) = News::Told;
            self.is_blocked &= source != Room;
            self.tell(|wants| wants == Wanted::One(source));
            if self.members.contains(&source) {
                self.tell(|wants| wants == Wanted::Set);
            }
        }
    }

    /// Signals the threads that sleep for that.
    fn tell(&mut self, is_it: impl Fn(Wanted) -> bool) {
        for thread in 0..self.helper_index() {
            if matches!(&self.threads[usize::from(thread)], Thread::Asleep { wants, .. } if is_it(*wants))
            {
                self.signal(Some(thread));
            }
        }
    }

    fn helper_index(&self) -> u8 {
        (self.threads.len() - 1) as u8
    }

    /// Takes what a thread waits for, if the library knows of it.
    fn take_told(&mut self, wants: Wanted) -> bool {
        let sources = match wants {
            Wanted::One(source) => vec![source],
            Wanted::Set => self.members.clone(),
        };
        let told = sources
            .into_iter()
            .find(|source| *self.news(*source) == News::Told);
        told.map(|source| *self.news(source) = News::None).is_some()
    }

    /// As [`State::take_told`] would find, and also what the library does not know yet.
    fn has_come(&self, wants: Wanted) -> bool {
        let has_come = |source: &Source| {
            matches!(
                self.news[*source as usize],
                News::Arrived(_) | News::Unasked | News::Told
            )
        };
        match wants {
            Wanted::One(source) => has_come(&source),
            Wanted::Set => self.members.iter().any(has_come),
        }
    }

    /// `Core::poll`, which does not look for the outcomes of opens.
    fn poll(&mut self) {
        self.look(&[Wire, FirstLocal, SecondLocal, Room]);
    }

    /// `Core::arm_locals`: requests wake-ups, and checks once more.
    fn arm(&mut self) {
        self.asks_for_room = self.is_blocked;
        self.look(&[FirstLocal, SecondLocal, Room]);
    }

    /// Releases the lock.
    fn unlock(&mut self) {
        if self.watch.is_led_by(Leader::Application) {
            self.arm();
        }
        let leader = self.watch.settle(|| self.needs());
        self.signal(leader);
    }

    /// `Process::wait` from one look to the next sleep, or back to the program.
    fn wait(&mut self, thread: u8, wants: Wanted) {
        self.look(&SOURCES);
        if self.take_told(wants) {
            self.threads[usize::from(thread)] = Thread::Leaving;
            let next = self.watch.hand_over();
            self.signal(next);
            return self.unlock();
        }
        self.arm();
        let only_local = self.has_local() && !self.exists(Wire) && !self.exists(Outcome);
        let needs_no_poll = matches!(wants, Wanted::One(source) if source.is_local());
        let may_use_words = !self.is_deaf && self.watch.may_use_words();
        let on = match only_local && needs_no_poll && may_use_words {
            true => SleepsOn::Words,
            false => SleepsOn::Descriptors,
        };
        self.armed = on;
        let role = if self.watch.is_led_by(Leader::Application) {
            let leader = self.watch.follow(&thread);
            self.signal(leader);
            Role::Follow
        } else {
            let needs = self.needs();
            let before = self.watch.lead(Leader::Application, &thread, (needs, on));
            self.signal(before);
            Role::Lead
        };
        let polls = match role {
            Role::Lead => self.existing(match self.is_deaf {
                true => &[Wire, Outcome],
                false => &SOURCES,
            }),
            Role::Follow => Vec::new(),
        };
        self.threads[usize::from(thread)] = Thread::Asleep {
            wants,
            role,
            polls,
            on,
            is_signalled: false,
        };
        self.unlock();
    }

    fn existing(&self, of: &[Source]) -> Vec<Source> {
        let exists = |source: &Source| self.exists(*source);
        of.iter().copied().filter(exists).collect()
    }

    /// Would the sleep of that thread end?
    fn is_woken(&self, thread: u8) -> bool {
        let Thread::Asleep {
            polls,
            on,
            is_signalled,
            ..
        } = &self.threads[usize::from(thread)]
        else {
            return false;
        };
        let has_local = polls.iter().any(|source| source.is_local());
        let comes_by = |source: Source| match self.news[source as usize] {
            // One descriptor stands for all local sessions, a word for one.
            News::Arrived(by) if source.is_local() => {
                by == *on
                    && match on {
                        SleepsOn::Descriptors => has_local,
                        SleepsOn::Words => polls.contains(&source),
                    }
            }
            News::Arrived(_) => polls.contains(&source),
            News::Absent | News::None | News::Unasked | News::Told => false,
        };
        *is_signalled || SOURCES.into_iter().any(comes_by) || self.has_timer(thread)
    }

    /// A leader with a timer wakes by itself.
    fn has_timer(&self, thread: u8) -> bool {
        let leader = self.watch.asleep.as_ref();
        leader.is_some_and(|leader| leader.waiter == thread && leader.watched.timer.is_some())
    }

    /// Does that thread wake when peers of local sessions do?
    fn hears_locals(&self, thread: u8) -> bool {
        matches!(&self.threads[usize::from(thread)], Thread::Asleep { polls, on: SleepsOn::Descriptors, .. }
            if polls.iter().any(|source| source.is_local()))
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Arrive(source) => {
                self.arrivals -= 1;
                let is_asked = source != Room || std::mem::take(&mut self.asks_for_room);
                *self.news(source) = if is_asked {
                    News::Arrived(self.armed)
                } else {
                    News::Unasked
                };
            }
            Step::Open(_, source) => {
                *self.news(source) = News::None;
                if source == FirstLocal {
                    *self.news(Room) = News::None;
                }
                if source == Outcome || source.is_local() && self.watch.sleeps_on_words() {
                    self.additions += 1;
                }
                self.unlock();
            }
            Step::Attend(_) => {
                self.poll();
                self.unlock();
            }
            Step::Fill(_) => {
                self.poll();
                self.is_blocked = true;
                self.unlock();
            }
            Step::Wait(thread, wants) => self.wait(thread, wants),
            Step::Wake(thread) => {
                if self.has_timer(thread) {
                    self.is_deaf = false;
                }
                self.wake(thread);
            }
            Step::Deafen(thread) => {
                self.is_deaf = true;
                self.wake(thread);
            }
            Step::HearAgain(_) => {
                self.is_deaf = false;
                self.poll();
                self.unlock();
            }
            Step::Leave(thread) => {
                self.threads[usize::from(thread)] = Thread::InProgram;
                if self.helper == Helper::Rests {
                    self.helper = Helper::Called;
                }
            }
            Step::Add(_, source) => {
                self.members.push(source);
                self.members.sort_unstable();
                self.tell(|wants| wants == Wanted::Set);
                self.unlock();
            }
            Step::Tick(since) => {
                self.look(&[Outcome]);
                match self.watch.after_tick(since) {
                    HelperStep::Tick => self.poll(),
                    HelperStep::Rest => self.helper = Helper::Rests,
                    HelperStep::StandIn => self.stand_in(),
                }
                self.unlock();
            }
            Step::HelperWakes => {
                let helper = usize::from(self.helper_index());
                self.threads[helper] = Thread::InProgram;
                if self.watch.is_led_by(Leader::Helper) {
                    let _itself = self.watch.stop();
                }
                self.look(&[Outcome]);
                self.poll();
                self.unlock();
            }
            Step::HelperIsCalled => {
                self.helper = Helper::Awake;
                self.unlock();
            }
        }
    }

    fn wake(&mut self, thread: u8) {
        let index = usize::from(thread);
        let woken = std::mem::replace(&mut self.threads[index], Thread::InProgram);
        let Thread::Asleep { wants, role, .. } = woken else {
            return;
        };
        match role {
            Role::Lead => {
                let other = self.watch.stop().filter(|leader| *leader != thread);
                self.signal(other);
            }
            Role::Follow => self.watch.unfollow(&thread),
        }
        self.wait(thread, wants);
    }

    fn stand_in(&mut self) {
        self.poll();
        if self.watch.while_standing_in(Since::Left) != HelperStep::StandIn {
            return;
        }
        let helper = self.helper_index();
        let needs = Needs {
            wire: true,
            ..self.needs()
        };
        let before = self
            .watch
            .lead(Leader::Helper, &helper, (needs, SleepsOn::Descriptors));
        self.signal(before);
        self.threads[usize::from(helper)] = Thread::Asleep {
            wants: Wanted::One(Wire),
            role: Role::Lead,
            polls: self.existing(&[Wire, Outcome]),
            on: SleepsOn::Descriptors,
            is_signalled: false,
        };
    }
}

/// What is tried, and how much of it.
#[derive(Clone)]
struct Waiting {
    sources: &'static [Source],
    /// Beside the background thread.
    threads: u8,
    /// What the world lets arrive.
    arrivals: u8,
    /// Threads wait for a set, too, and add members to it.
    has_set: bool,
    /// Peers wake for nothing.
    is_vain: bool,
}

impl Waiting {
    /// Of the size that the environment asks for: `PORTOLAN_MODEL_THREADS` and `PORTOLAN_MODEL_ARRIVALS`.
    fn of(sources: &'static [Source]) -> Waiting {
        let size = |name, default| {
            let asked = env::var(name).ok();
            asked.map_or(default, |asked| asked.parse().expect("a number"))
        };
        Waiting {
            sources,
            threads: size("PORTOLAN_MODEL_THREADS", 3),
            arrivals: size("PORTOLAN_MODEL_ARRIVALS", 2),
            has_set: false,
            is_vain: false,
        }
    }

    /// Everything, or as much as `PORTOLAN_TEST_SECONDS` let it see.
    fn check(self) {
        let seconds = env::var("PORTOLAN_TEST_SECONDS").ok();
        let mut builder = self.checker().threads(2);
        if let Some(seconds) = seconds {
            let seconds = seconds.parse().expect("a number");
            // States take memory.
            builder = builder
                .timeout(Duration::from_secs(seconds))
                .target_state_count(20_000_000);
        }
        let checker = builder.spawn_bfs().join();
        println!("{} states", checker.unique_state_count());
        assert!(checker.unique_state_count() > 10_000);
        checker.assert_properties();
    }
}

impl Model for Waiting {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            watch: Watch::default(),
            threads: vec![Thread::InProgram; usize::from(self.threads) + 1],
            helper: Helper::Awake,
            members: Vec::new(),
            is_deaf: false,
            news: [News::Absent; SOURCES.len()],
            armed: SleepsOn::Descriptors,
            is_blocked: false,
            asks_for_room: false,
            additions: 0,
            arrivals: self.arrivals,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for &source in self.sources {
            let may_come = source != Room || state.is_blocked;
            if may_come && state.arrivals > 0 && state.news[source as usize] == News::None {
                steps.push(Step::Arrive(source));
            }
        }
        for thread in 0..self.threads {
            match &state.threads[usize::from(thread)] {
                Thread::InProgram => self.calls(state, thread, steps),
                Thread::Leaving => steps.push(Step::Leave(thread)),
                Thread::Asleep { .. } => {
                    if state.is_woken(thread) {
                        steps.push(Step::Wake(thread));
                    }
                    if self.is_vain && state.hears_locals(thread) {
                        steps.push(Step::Deafen(thread));
                    }
                }
            }
        }
        self.helper_steps(state, steps);
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        state.take(step);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Waiting>> {
        let nobody_sleeps_on = |model: &Waiting, state: &State| {
            let is_about_to_wake = || (0..=model.threads).any(|thread| state.is_woken(thread));
            let is_kept_waiting = |thread: &Thread| matches!(thread, Thread::Asleep { wants, .. } if state.has_come(*wants));
            let threads = &state.threads[..usize::from(model.threads)];
            !threads.iter().any(is_kept_waiting) || is_about_to_wake()
        };
        let rests_only_while_led = |model: &Waiting, state: &State| {
            let threads = &state.threads[..usize::from(model.threads)];
            let is_leaving = || threads.contains(&Thread::Leaving);
            let is_signalled = |thread: &Thread| {
                matches!(
                    thread,
                    Thread::Asleep {
                        is_signalled: true,
                        ..
                    }
                )
            };
            state.helper != Helper::Rests
                || state.watch.is_led_by(Leader::Application)
                || is_leaving()
                || threads.iter().any(is_signalled)
        };
        vec![
            Property::always(
                "who sleeps for what has come is about to be woken",
                nobody_sleeps_on,
            ),
            Property::always(
                "the background thread rests only while another leads, or is about to call it",
                rests_only_while_led,
            ),
        ]
    }
}

impl Waiting {
    /// What a thread of the program may call.
    fn calls(&self, state: &State, thread: u8, steps: &mut Vec<Step>) {
        steps.push(Step::Attend(thread));
        if state.is_deaf {
            steps.push(Step::HearAgain(thread));
        }
        if self.has_set {
            steps.push(Step::Wait(thread, Wanted::Set));
        }
        for &source in self.sources {
            if state.exists(source) {
                steps.push(Step::Wait(thread, Wanted::One(source)));
            } else if source != Room {
                steps.push(Step::Open(thread, source));
            }
            let may_be_added = self.has_set && source != Room && state.exists(source);
            if may_be_added && !state.members.contains(&source) {
                steps.push(Step::Add(thread, source));
            }
        }
        let may_fill = self.sources.contains(&Room) && state.news[Room as usize] == News::None;
        if may_fill && !state.is_blocked {
            steps.push(Step::Fill(thread));
        }
    }

    fn helper_steps(&self, state: &State, steps: &mut Vec<Step>) {
        match state.helper {
            Helper::Rests => {}
            Helper::Called => steps.push(Step::HelperIsCalled),
            Helper::Awake if state.is_woken(self.threads) => steps.push(Step::HelperWakes),
            Helper::Awake => {
                if state.threads[usize::from(self.threads)] == Thread::InProgram {
                    steps.extend([Since::Left, Since::Attended].map(Step::Tick));
                }
            }
        }
    }
}

#[test]
fn nobody_sleeps_on_what_has_come() {
    Waiting::of(&[Wire, FirstLocal, SecondLocal, Outcome]).check();
}

/// A thread that waits for room is notified of it, although another one found that there was none.
#[test]
fn nobody_sleeps_on_room() {
    Waiting::of(&[Wire, FirstLocal, Room]).check();
}

/// Who waits for a set hears of members that others add meanwhile.
#[test]
fn nobody_sleeps_on_a_set() {
    let model = Waiting::of(&[FirstLocal, Outcome]);
    Waiting {
        has_set: true,
        ..model
    }
    .check();
}

/// What comes while peers that wake for nothing are not heard is found a millisecond later.
#[test]
fn nobody_sleeps_on_what_comes_while_deaf() {
    let model = Waiting::of(&[Wire, FirstLocal, SecondLocal]);
    Waiting {
        is_vain: true,
        ..model
    }
    .check();
}
