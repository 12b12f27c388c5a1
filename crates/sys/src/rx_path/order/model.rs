//! A model of reception, checked exhaustively: the filter on several processors, and the owner, which falls asleep and
//! wakes up at any moment. The order is the library's own code; around it stands what `RxPath`, `OwnRing` and
//! `bpf/deliver.h` do with it, one access to shared memory for each step. Memory order is not modelled: where it
//! matters there are full barriers on both sides.
//!
//! Three assumptions about time; where a preemption of one side breaks them, two frames of a flow may be swapped. The
//! owner's last check and its store of the state are one step: some nanoseconds, in which the filter does not finish a
//! frame and begin the next. The filter reserves a record, after it has seen the owner awake, within the time of a sleep
//! (a system call). And it counts a frame, after it has seen the owner asleep, before the owner has polled at two
//! different times.

use stateright::{Checker, Model, Property};

use super::*;

/// How the owner of the ring sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Sleep {
    /// A process's channel: frames arrive by the tap.
    OnTap,
    /// A session's own ring.
    OnRing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Doorbell {
    Awake,
    Asleep,
    AsleepOnTap,
}

/// What a processor is about to do with its current frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Filter {
    Choose,
    Count,
    PutOnTap,
    Reserve,
    LoadState { record: usize },
    StoreAwake { record: usize },
    Submit { record: usize, wakes: bool },
}

/// What the owner is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Read,
    CheckRing,
    Sleep,
    WakeUp,
    StoreAwake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Frame {
    processor: usize,
    number: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Processor {
    filter: Filter,
    /// Frames delivered, and of them received by the owner.
    sent: u8,
    received: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    processors: Vec<Processor>,
    owner: Owner,
    order: Order,
    doorbell: Doorbell,
    by_tap: u32,
    tap: Vec<Frame>,
    /// All records, and whether they are submitted.
    ring: Vec<(Frame, bool)>,
    position: usize,
    /// The ring's descriptor is readable.
    is_rung: bool,
    is_in_order: bool,
    /// Frames that the tap may still lose.
    losses: u8,
    /// One was lost, or may have been given up.
    has_lost: bool,
    now: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Filter(usize),
    /// The tap's queue is full.
    Lose(usize),
    Owner,
    /// The owner reads no further, but falls asleep.
    FallAsleep,
    /// Time goes on by less than [`STRAGGLE`], or by more.
    Tick,
    Straggle,
}

struct Reception {
    processors: usize,
    frames: u8,
    losses: u8,
    sleep: Sleep,
}

impl State {
    fn is_ring_empty(&self) -> bool {
        self.position == self.ring.len()
    }

    fn receive(&mut self, frame: Frame) {
        let received = &mut self.processors[frame.processor].received;
        self.is_in_order &= self.has_lost || frame.number == *received;
        *received = frame.number + 1;
    }

    /// `RxPath::next`.
    fn read(&mut self) {
        let position = self.position as u64;
        let counted = match self.order.next(position, || self.by_tap, self.now) {
            Look::Ring => return self.read_ring(),
            Look::Nowhere => return,
            Look::Tap(counted) => counted,
        };
        if self.tap.is_empty() {
            self.order.found_tap_empty(counted, self.by_tap, self.now);
            if self.order.may_read_ring() {
                self.read_ring();
            }
            return;
        }
        self.order.took_from_tap(counted);
        let frame = self.tap.remove(0);
        self.receive(frame);
    }

    fn read_ring(&mut self) {
        if let Some(&(frame, true)) = self.ring.get(self.position) {
            self.position += 1;
            self.receive(frame);
        }
    }

    fn filter(&mut self, processor: usize, frames: u8) {
        let frame = Frame {
            processor,
            number: self.processors[processor].sent,
        };
        let next = match self.processors[processor].filter {
            Filter::Choose if self.doorbell == Doorbell::AsleepOnTap => Filter::Count,
            Filter::Choose => Filter::Reserve,
            Filter::Count => {
                self.by_tap += 1;
                Filter::PutOnTap
            }
            Filter::PutOnTap => {
                self.tap.push(frame);
                return self.finish(processor, frames);
            }
            Filter::Reserve => {
                self.ring.push((frame, false));
                Filter::LoadState {
                    record: self.ring.len() - 1,
                }
            }
            Filter::LoadState { record } => match self.doorbell {
                Doorbell::Asleep => Filter::StoreAwake { record },
                state => Filter::Submit {
                    record,
                    wakes: state != Doorbell::Awake,
                },
            },
            Filter::StoreAwake { record } => {
                self.doorbell = Doorbell::Awake;
                Filter::Submit {
                    record,
                    wakes: true,
                }
            }
            Filter::Submit { record, wakes } => {
                self.ring[record].1 = true;
                self.is_rung |= wakes;
                return self.finish(processor, frames);
            }
        };
        self.processors[processor].filter = next;
    }

    fn finish(&mut self, processor: usize, frames: u8) {
        let processor = &mut self.processors[processor];
        processor.sent += 1;
        processor.filter = Filter::Choose;
        assert!(processor.sent <= frames, "no more are sent");
    }

    fn owner(&mut self, sleep: Sleep) {
        self.owner = match self.owner {
            Owner::Read => {
                self.read();
                Owner::Read
            }
            Owner::CheckRing if self.is_ring_empty() => Owner::Sleep,
            Owner::CheckRing | Owner::Sleep => Owner::WakeUp,
            Owner::WakeUp => {
                if sleep == Sleep::OnTap {
                    self.order.wake_up(self.ring.len() as u64, self.now);
                }
                Owner::StoreAwake
            }
            Owner::StoreAwake => {
                self.doorbell = Doorbell::Awake;
                self.is_rung = false;
                Owner::Read
            }
        };
    }

    fn fall_asleep(&mut self, sleep: Sleep) {
        self.doorbell = match sleep {
            Sleep::OnTap => {
                self.order.fall_asleep();
                Doorbell::AsleepOnTap
            }
            Sleep::OnRing => Doorbell::Asleep,
        };
        self.owner = Owner::CheckRing;
    }

    /// Would the owner's `ppoll` return?
    fn is_woken(&self) -> bool {
        self.is_rung || !self.tap.is_empty()
    }

    /// Is a processor about to do that?
    fn is_any(&self, step: Filter) -> bool {
        self.processors
            .iter()
            .any(|processor| processor.filter == step)
    }

    /// No processor is about to deliver a frame.
    fn is_quiet(&self) -> bool {
        let is_idle = |processor: &Processor| processor.filter == Filter::Choose;
        self.processors.iter().all(is_idle)
    }
}

impl Model for Reception {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let processor = Processor {
            filter: Filter::Choose,
            sent: 0,
            received: 0,
        };
        vec![State {
            processors: vec![processor; self.processors],
            owner: Owner::Read,
            order: Order::default(),
            doorbell: Doorbell::Awake,
            by_tap: 0,
            tap: Vec::new(),
            ring: Vec::new(),
            position: 0,
            is_rung: false,
            is_in_order: true,
            losses: self.losses,
            has_lost: false,
            now: Instant::ZERO,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (number, processor) in state.processors.iter().enumerate() {
            if processor.sent < self.frames {
                steps.push(Step::Filter(number));
            }
            if processor.filter == Filter::PutOnTap && state.losses > 0 {
                steps.push(Step::Lose(number));
            }
        }
        let may_go_on = match state.owner {
            Owner::Sleep => state.is_woken(),
            Owner::WakeUp => !state.is_any(Filter::Reserve),
            _ => true,
        };
        if may_go_on {
            steps.push(Step::Owner);
        }
        if state.owner == Owner::Read
            && state.is_ring_empty()
            && !state.order.tap_holds_more(state.by_tap)
        {
            steps.push(Step::FallAsleep);
        }
        // Times matter only relative to the wake-up.
        if state.owner == Owner::Read && state.order.is_settling() {
            if !state.is_any(Filter::Count) {
                steps.push(Step::Tick);
            }
            if self.losses > 0 {
                steps.push(Step::Straggle);
            }
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        match step {
            Step::Filter(processor) => state.filter(processor, self.frames),
            Step::Lose(processor) => {
                state.losses -= 1;
                state.has_lost = true;
                state.finish(processor, self.frames);
            }
            Step::Owner => state.owner(self.sleep),
            Step::FallAsleep => state.fall_asleep(self.sleep),
            Step::Tick if state.now == Instant::ZERO => state.now = Instant::from_nanos(1),
            Step::Straggle if state.now < Instant::ZERO + STRAGGLE * 2 => {
                state.has_lost = true;
                state.now += STRAGGLE * 2;
            }
            Step::Tick | Step::Straggle => return None,
        }
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Reception>> {
        vec![
            Property::always(
                "frames of one processor are received in order",
                |_, state: &State| state.is_in_order,
            ),
            Property::always("who sleeps is woken for a frame", |_, state: &State| {
                state.owner != Owner::Sleep
                    || state.is_ring_empty()
                    || !state.is_quiet()
                    || state.is_woken()
            }),
            Property::sometimes("all are received", |model: &Reception, state: &State| {
                let all = |processor: &Processor| processor.received == model.frames;
                state.processors.iter().all(all)
            }),
        ]
    }
}

fn check(reception: Reception) {
    let checked = reception.checker().spawn_bfs().join();
    eprintln!("{} states", checked.unique_state_count());
    checked.assert_properties();
}

#[test]
fn a_sleeper_on_the_tap_receives_in_order() {
    check(Reception {
        processors: 1,
        frames: 4,
        losses: 0,
        sleep: Sleep::OnTap,
    });
}

#[test]
fn a_sleeper_on_the_tap_receives_from_several_processors() {
    check(Reception {
        processors: 2,
        frames: 2,
        losses: 0,
        sleep: Sleep::OnTap,
    });
}

#[test]
fn frames_that_the_tap_loses_do_not_delay_others_for_long() {
    check(Reception {
        processors: 1,
        frames: 3,
        losses: 1,
        sleep: Sleep::OnTap,
    });
}

#[test]
fn a_sleeper_on_a_ring_is_woken() {
    check(Reception {
        processors: 2,
        frames: 2,
        losses: 0,
        sleep: Sleep::OnRing,
    });
}
