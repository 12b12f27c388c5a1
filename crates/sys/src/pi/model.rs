//! A model of waiting for the lock, checked exhaustively: threads that park, are overtaken, lose patience and join the
//! kernel's queue. One access to shared memory for each step, in the order of `pi.rs`. Memory order is not modelled: all
//! accesses that matter are sequentially consistent.

use stateright::{Checker, Model, Property};

use super::{NOBODY, SOMEBODY};

/// What a thread is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Thread {
    Take,
    /// `park`: note that it is parked, take, sleep.
    Park,
    TakeOnce,
    FallAsleep,
    Asleep,
    /// Woken; it takes the lock, and notes that others may be parked.
    TakeAwake,
    NoteOthers,
    /// Its patience is over: note that it is parked for the last time, take, sleep in the queue.
    ParkLast,
    TakeLast,
    Queue,
    Queued,
    Release,
    CheckParked,
    NoteNobody,
    Wake,
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    threads: Vec<Thread>,
    /// How often each thread still takes the lock.
    left: Vec<u8>,
    holder: Option<usize>,
    parked: u32,
    /// The kernel's queue, in order of arrival.
    queue: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Run(usize),
    /// A signal, or nothing at all, wakes a parked thread.
    WakeUp(usize),
    LosePatience(usize),
}

/// What the model leaves out, to see that it finds the mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// A woken thread does not note that others may be parked.
    ForgetOthers,
    /// The lock is not taken again after the thread has noted that it is parked.
    SleepAtOnce,
}

struct Lock {
    threads: usize,
    turns: u8,
    mistake: Mistake,
}

impl State {
    fn take(&mut self, thread: usize, on_failure: Thread) -> Thread {
        if self.holder.is_some() {
            return on_failure;
        }
        self.holder = Some(thread);
        Thread::Release
    }

    /// Returns a thread that has released the lock to its beginning.
    fn end_of_turn(&mut self, thread: usize) -> Thread {
        self.left[thread] -= 1;
        match self.left[thread] {
            0 => Thread::Done,
            _ => Thread::Take,
        }
    }

    /// `FUTEX_UNLOCK_PI`, or the exchange that succeeds where no thread is in the queue.
    fn release(&mut self) {
        self.holder = (!self.queue.is_empty()).then(|| self.queue.remove(0));
        if let Some(next) = self.holder {
            self.threads[next] = Thread::Release;
        }
    }

    /// `FUTEX_WAKE` of one thread.
    fn wake_one(&mut self) {
        let asleep = self.threads.iter_mut().find(|at| **at == Thread::Asleep);
        if let Some(asleep) = asleep {
            *asleep = Thread::TakeAwake;
        }
    }
}

impl Model for Lock {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            threads: vec![Thread::Take; self.threads],
            left: vec![self.turns; self.threads],
            holder: None,
            parked: NOBODY,
            queue: Vec::new(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        for (thread, at) in state.threads.iter().enumerate() {
            match at {
                Thread::Done | Thread::Queued => {}
                Thread::Asleep => {
                    actions.extend([Step::WakeUp(thread), Step::LosePatience(thread)])
                }
                _ => actions.push(Step::Run(thread)),
            }
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        let thread = match step {
            Step::Run(thread) => thread,
            Step::WakeUp(thread) => {
                state.threads[thread] = Thread::TakeAwake;
                return Some(state);
            }
            Step::LosePatience(thread) => {
                state.threads[thread] = Thread::ParkLast;
                return Some(state);
            }
        };
        let next = match state.threads[thread] {
            Thread::Take => state.take(thread, Thread::Park),
            at @ (Thread::Park | Thread::ParkLast) => {
                state.parked = SOMEBODY;
                match (at, self.mistake) {
                    (Thread::ParkLast, _) => Thread::TakeLast,
                    (_, Mistake::SleepAtOnce) => Thread::FallAsleep,
                    _ => Thread::TakeOnce,
                }
            }
            Thread::TakeOnce => state.take(thread, Thread::FallAsleep),
            Thread::FallAsleep if state.parked == SOMEBODY => Thread::Asleep,
            Thread::FallAsleep => Thread::TakeAwake,
            Thread::TakeAwake => match state.take(thread, Thread::Park) {
                Thread::Release if self.mistake != Mistake::ForgetOthers => Thread::NoteOthers,
                next => next,
            },
            Thread::NoteOthers => {
                state.parked = SOMEBODY;
                Thread::Release
            }
            Thread::TakeLast => state.take(thread, Thread::Queue),
            Thread::Queue => match state.take(thread, Thread::Queued) {
                Thread::Queued => {
                    state.queue.push(thread);
                    Thread::Queued
                }
                next => next,
            },
            Thread::Release => {
                state.release();
                Thread::CheckParked
            }
            Thread::CheckParked if state.parked == NOBODY => state.end_of_turn(thread),
            Thread::CheckParked => Thread::NoteNobody,
            Thread::NoteNobody => {
                state.parked = NOBODY;
                Thread::Wake
            }
            Thread::Wake => {
                state.wake_one();
                state.end_of_turn(thread)
            }
            Thread::Asleep | Thread::Queued | Thread::Done => return None,
        };
        state.threads[thread] = next;
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one holder", |_, state: &State| {
                let holds = |at: &Thread| matches!(at, Thread::Release | Thread::NoteOthers);
                let holders = state.threads.iter().filter(|at| holds(at)).count();
                holders == usize::from(state.holder.is_some())
            }),
            Property::always("nobody sleeps for ever", |_, state: &State| {
                let rests =
                    |at: &Thread| matches!(at, Thread::Asleep | Thread::Queued | Thread::Done);
                let is_done = |at: &Thread| *at == Thread::Done;
                !state.threads.iter().all(rests) || state.threads.iter().all(is_done)
            }),
            Property::sometimes("a thread joins the queue", |_, state: &State| {
                !state.queue.is_empty()
            }),
        ]
    }
}

fn check(threads: usize, turns: u8, mistake: Mistake) -> impl Checker<Lock> {
    let lock = Lock {
        threads,
        turns,
        mistake,
    };
    lock.checker().spawn_bfs().join()
}

#[test]
fn nobody_sleeps_while_the_lock_is_free() {
    check(2, 3, Mistake::None).assert_properties();
    check(3, 2, Mistake::None).assert_properties();
}

#[test]
fn the_model_finds_mistakes() {
    for mistake in [Mistake::ForgetOthers, Mistake::SleepAtOnce] {
        let found = check(3, 2, mistake);
        assert!(
            found.discovery("nobody sleeps for ever").is_some(),
            "{mistake:?}"
        );
    }
}
