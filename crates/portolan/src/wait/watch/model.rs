//! A model of waiting, checked exhaustively: threads that wait, open sessions and attend to the channel in any order,
//! the background thread, and a world that may let something arrive at any moment. The watch is the library's own code;
//! the model has what `wait.rs`, `runtime.rs` and `helper.rs` do with it (`docs/design/waiting.md`).
//!
//! One property: a thread that sleeps for something that has arrived is about to be woken, without the background
//! thread's tick.

use stateright::{Checker, Model, Property};

use super::*;

/// The source of a session's news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Thread {
    InProgram,
    Asleep {
        wants: Source,
        role: Role,
        polls: Vec<Source>,
        on: SleepsOn,
        is_signalled: bool,
    },
}

const THREADS: u8 = 3;
const HELPER: u8 = THREADS;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    watch: Watch<u8>,
    threads: Vec<Thread>,
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
    Wait(u8, Source),
    /// A sleeping thread is woken by what it polls, or by a signal.
    Wake(u8),
    HelperLeads,
    HelperWakes,
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
            timer: None,
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
            for thread in 0..THREADS {
                if matches!(&self.threads[usize::from(thread)], Thread::Asleep { wants, .. } if *wants == source)
                {
                    self.signal(Some(thread));
                }
            }
        }
    }

    /// `Core::poll`, which does not check for outcomes of opens.
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

    /// `Process::wait` from one check to the next sleep, or back to the program.
    fn wait(&mut self, thread: u8, wants: Source) {
        self.look(&SOURCES);
        if *self.news(wants) == News::Told {
            *self.news(wants) = News::None;
            let next = self.watch.hand_over();
            self.signal(next);
            return self.unlock();
        }
        self.arm();
        let only_local = self.has_local() && !self.exists(Wire) && !self.exists(Outcome);
        let on = if only_local && wants.is_local() && self.watch.may_use_words() {
            SleepsOn::Words
        } else {
            SleepsOn::Descriptors
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
            Role::Lead => self.existing(&SOURCES),
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
        *is_signalled || SOURCES.into_iter().any(comes_by)
    }

    fn is_in_program(&self, thread: u8) -> bool {
        self.threads[usize::from(thread)] == Thread::InProgram
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
            Step::HelperLeads => {
                self.poll();
                let needs = Needs {
                    wire: true,
                    ..self.needs()
                };
                let before =
                    self.watch
                        .lead(Leader::Helper, &HELPER, (needs, SleepsOn::Descriptors));
                self.signal(before);
                self.threads[usize::from(HELPER)] = Thread::Asleep {
                    wants: Wire,
                    role: Role::Lead,
                    polls: self.existing(&[Wire, Outcome]),
                    on: SleepsOn::Descriptors,
                    is_signalled: false,
                };
                self.unlock();
            }
            Step::HelperWakes => {
                self.threads[usize::from(HELPER)] = Thread::InProgram;
                if self.watch.is_led_by(Leader::Helper) {
                    let _itself = self.watch.stop();
                }
                self.look(&[Outcome]);
                self.poll();
                self.unlock();
            }
        }
    }
}

struct Waiting {
    sources: &'static [Source],
}

impl Model for Waiting {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            watch: Watch::default(),
            threads: vec![Thread::InProgram; usize::from(THREADS) + 1],
            news: [News::Absent; SOURCES.len()],
            armed: SleepsOn::Descriptors,
            is_blocked: false,
            asks_for_room: false,
            additions: 0,
            arrivals: 2,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for &source in self.sources {
            let may_come = source != Room || state.is_blocked;
            if may_come && state.arrivals > 0 && state.news[source as usize] == News::None {
                steps.push(Step::Arrive(source));
            }
        }
        for thread in 0..THREADS {
            if state.is_woken(thread) {
                steps.push(Step::Wake(thread));
            }
            if !state.is_in_program(thread) {
                continue;
            }
            steps.push(Step::Attend(thread));
            for &source in self.sources {
                if state.exists(source) {
                    steps.push(Step::Wait(thread, source));
                } else if source != Room {
                    steps.push(Step::Open(thread, source));
                }
            }
            let may_fill = self.sources.contains(&Room) && state.news[Room as usize] == News::None;
            if may_fill && !state.is_blocked {
                steps.push(Step::Fill(thread));
            }
        }
        if state.is_woken(HELPER) {
            steps.push(Step::HelperWakes);
        }
        if state.is_in_program(HELPER) && !state.watch.is_led_by(Leader::Application) {
            steps.push(Step::HelperLeads);
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        state.take(step);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Waiting>> {
        let nobody_sleeps_on = |_: &Waiting, state: &State| {
            let is_about_to_wake = || (0..=HELPER).any(|thread| state.is_woken(thread));
            let has_come = |source: Source| {
                matches!(
                    state.news[source as usize],
                    News::Arrived(_) | News::Unasked | News::Told
                )
            };
            let is_kept_waiting = |thread: &Thread| matches!(thread, Thread::Asleep { wants, .. } if has_come(*wants));
            let threads = &state.threads[..usize::from(THREADS)];
            !threads.iter().any(is_kept_waiting) || is_about_to_wake()
        };
        vec![Property::always(
            "who sleeps for what has come is about to be woken",
            nobody_sleeps_on,
        )]
    }
}

#[test]
fn nobody_sleeps_on_what_has_come() {
    check(&[Wire, FirstLocal, SecondLocal, Outcome]);
}

/// A thread that waits for room is notified of it, although another one found that there was none.
#[test]
fn nobody_sleeps_on_room() {
    check(&[Wire, FirstLocal, Room]);
}

fn check(sources: &'static [Source]) {
    let checker = Waiting { sources }.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    assert!(checker.unique_state_count() > 10_000);
    checker.assert_properties();
}
