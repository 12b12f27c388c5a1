//! The transitions, and: threads that open, end and use one socket concurrently never find another
//! socket's session (loom: all interleavings).

use loom::sync::atomic::Ordering;
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::*;

const SLOT: Slot = Slot(3);
const OTHER_SLOT: Slot = Slot(4);

const AWAY: SocketState = SocketState::HeldElsewhere {
    use_here: UseHere::Before,
};

const STATES: [SocketState; 8] = [
    SocketState::Idle,
    SocketState::Connecting { slot: SLOT },
    SocketState::Cached { slot: SLOT },
    SocketState::Listening,
    SocketState::Relayed,
    SocketState::HeldElsewhere {
        use_here: UseHere::Never,
    },
    AWAY,
    SocketState::Closed,
];

#[test]
fn states_and_words_are_the_same() {
    for state in STATES {
        let cell = StateCell::<AtomicU64>::new(state);
        assert_eq!(cell.state(), state);
        assert_eq!(cell.phase(), state.phase());
    }
    for (index, phase) in PHASES.into_iter().enumerate() {
        assert_eq!(phase as usize, index);
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    for before in STATES {
        for next in STATES {
            let cell = StateCell::<AtomicU64>::new(before);
            let expected = if before.may_become(next) {
                (Ok(before), next)
            } else {
                (Err(before), before)
            };
            assert_eq!(
                (cell.change(next), cell.state()),
                expected,
                "{before:?} {next:?}"
            );
        }
    }
}

/// One row for each previous state: the allowed next ones, in the order of [`STATES`].
#[test]
fn the_transitions_are_these() {
    let row = |before: SocketState| -> String {
        let may = |next| if before.may_become(next) { 'x' } else { '.' };
        STATES.into_iter().map(may).collect()
    };
    let rows = STATES.map(row);
    let expected = [
        "xxxxx..x", // Idle
        "x.x....x", // Connecting
        "x...xxxx", // Cached
        "x...x..x", // Listening
        "..x....x", // Relayed
        "..x.x..x", // HeldElsewhere, unused
        "..x.x..x", // HeldElsewhere
        "x......x", // Closed
    ];
    assert_eq!(rows, expected);
    let elsewhere = SocketState::Cached { slot: OTHER_SLOT };
    assert!(!SocketState::Connecting { slot: SLOT }.may_become(elsewhere));
}

impl AtomicWord for loom::sync::atomic::AtomicU64 {
    fn new(word: u64) -> Self {
        Self::new(word)
    }

    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn compare_exchange(&self, expected: u64, new: u64) -> Result<(), u64> {
        self.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
    }
}

type Cell = StateCell<loom::sync::atomic::AtomicU64>;

/// Whose session is in the slot. This is all of `Core` that is needed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    /// Promised to the socket.
    Promised,
    Own,
    /// The slot was free, and another socket has taken it.
    Others,
}

struct World {
    cell: Cell,
    core: Mutex<Place>,
    /// Number of sessions that were closed in order.
    closed: Mutex<u32>,
}

impl World {
    fn opening() -> Arc<World> {
        Arc::new(World {
            cell: Cell::new(SocketState::Connecting { slot: SLOT }),
            core: Mutex::new(Place::Promised),
            closed: Mutex::new(0),
        })
    }

    fn close_session(&self) {
        *self.closed.lock().unwrap() += 1;
    }

    /// Like `install`, with the outcome of an open.
    fn install(&self) {
        let mut place = self.core.lock().unwrap();
        match self.cell.change(SocketState::Cached { slot: SLOT }) {
            Ok(_) => {
                assert_eq!(*place, Place::Promised);
                *place = Place::Own;
            }
            Err(_) => self.close_session(),
        }
    }

    /// Like closing the last descriptor.
    fn close(&self) {
        let mut place = self.core.lock().unwrap();
        match self.cell.change(SocketState::Closed) {
            Ok(SocketState::Cached { .. }) => {
                assert_eq!(*place, Place::Own);
                *place = Place::Free;
                self.close_session();
            }
            Ok(SocketState::Connecting { .. }) => {
                assert_eq!(*place, Place::Promised);
                *place = Place::Free;
            }
            _ => {}
        }
    }

    /// Like a recall by the server.
    fn give_back(&self) {
        let mut place = self.core.lock().unwrap();
        let SocketState::Cached { slot } = self.cell.state() else {
            return;
        };
        assert_eq!((slot, *place), (SLOT, Place::Own));
        *place = Place::Free;
        assert!(self.cell.change(AWAY).is_ok(), "it is here");
    }

    /// Like an open of another socket.
    fn take_free_slot(&self) {
        let mut place = self.core.lock().unwrap();
        if *place == Place::Free {
            *place = Place::Others;
        }
    }

    /// Like a call that moves data.
    fn receive(&self) {
        let phase = self.cell.phase();
        let place = self.core.lock().unwrap();
        match self.cell.state() {
            SocketState::Cached { slot } => assert_eq!((slot, *place), (SLOT, Place::Own)),
            SocketState::Connecting { .. } => assert_eq!(phase, SocketPhase::Connecting),
            // It must never seem unopened.
            state => assert!(matches!(state, AWAY | SocketState::Closed), "{state:?}"),
        }
    }
}

#[test]
fn a_session_that_comes_while_its_socket_is_closed_is_closed_once() {
    loom::model(|| {
        let world = World::opening();
        let threads = [World::install, World::close, World::take_free_slot].map(|step| {
            let world = Arc::clone(&world);
            thread::spawn(move || step(&world))
        });
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(world.cell.state(), SocketState::Closed);
        assert_eq!(*world.closed.lock().unwrap(), 1);
    });
}

#[test]
fn nobody_meets_a_session_that_is_not_the_sockets() {
    loom::model(|| {
        let world = World::opening();
        let opener = Arc::clone(&world);
        let opener = thread::spawn(move || {
            opener.install();
            opener.give_back();
            opener.take_free_slot();
        });
        let reader = Arc::clone(&world);
        let reader = thread::spawn(move || reader.receive());
        world.close();
        opener.join().unwrap();
        reader.join().unwrap();
        assert_eq!(world.cell.state(), SocketState::Closed);
        assert!(matches!(
            *world.core.lock().unwrap(),
            Place::Free | Place::Others
        ));
    });
}
