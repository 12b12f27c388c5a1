//! Time that threads spend in the library, by layer. Each boundary has a static probe, which costs a no-operation. With
//! `PORTOLAN_LAYERS=FILE` the program itself sums up the time that each of its threads spends in each layer, on a page
//! of that file.

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use portolan_stack::Step;
use portolan_sys::probes::{self, Totals};
use portolan_sys::{clock, leak};

use crate::settings::settings;

/// Rows of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// The rest of a call that is in no other layer: the socket, locks, watchers, timers.
    Call,
    /// Copies between the program's buffers and the session's.
    Copy,
    /// Reads ring and tap, and separates records.
    Ring,
    /// Processes the headers of a received frame, checksums included.
    InputHeaders,
    /// The TCP machine, or a socket's queue, processes the payload.
    InputSession,
    /// Decides what sessions send, and when.
    OutputSession,
    /// Builds the headers of a frame to be sent.
    OutputHeaders,
    /// Passes a frame to the kernel: system call, transmit filter, device, and on a veth the peer's packet filter.
    Device,
    Sleep,
    /// Outside the library.
    Program,
}

impl Layer {
    pub const ALL: [(Layer, &'static str); 10] = [
        (Layer::Call, "call"),
        (Layer::Copy, "copy"),
        (Layer::Ring, "ring"),
        (Layer::InputHeaders, "input-headers"),
        (Layer::InputSession, "input-session"),
        (Layer::OutputSession, "output-session"),
        (Layer::OutputHeaders, "output-headers"),
        (Layer::Device, "device"),
        (Layer::Sleep, "sleep"),
        (Layer::Program, "program"),
    ];
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static TOTALS: AtomicPtr<Totals> = AtomicPtr::new(null_mut());
/// Cost of reading the clock, in nanoseconds.
static CLOCK_COST: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The thread's current layer, and since when.
    static NOW_IN: Cell<Option<(Layer, u64)>> = const { Cell::new(None) };
}

/// Starts to sum up in the file named by `PORTOLAN_LAYERS`. Returns whether the measurement is on.
pub(crate) fn start() -> bool {
    if IS_ON.load(Ordering::Acquire) {
        // A child of fork continues with its parent's page.
        return true;
    }
    let Some(path) = &settings().layers else {
        return false;
    };
    // Not reported: the user notices that the file is missing.
    let Ok(totals) = Totals::create(path) else {
        return false;
    };
    CLOCK_COST.store(cost_of_clock(), Ordering::Relaxed);
    leak::store(&TOTALS, totals);
    IS_ON.store(true, Ordering::Release);
    true
}

fn cost_of_clock() -> u64 {
    let trial = |_| {
        let before = clock::now().as_nanos();
        clock::now().as_nanos() - before
    };
    (0..64).map(trial).min().unwrap_or_default()
}

/// Keeps the thread in a layer until dropped, which returns it to the previous one.
#[must_use]
pub(crate) struct Inside {
    before: Option<Layer>,
}

pub(crate) fn enter(layer: Layer) -> Inside {
    fire(layer);
    Inside {
        before: IS_ON.load(Ordering::Relaxed).then(|| change(layer)),
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            change(before);
        }
    }
}

#[inline(always)]
fn fire(layer: Layer) {
    match layer {
        Layer::Call => probes::call(),
        Layer::Copy => probes::copy(),
        Layer::Ring => probes::ring(),
        Layer::OutputSession => probes::output(),
        Layer::Sleep => probes::sleep(),
        // Those of frames have arguments, which their callers know.
        Layer::InputHeaders | Layer::Device => {}
        Layer::InputSession | Layer::OutputHeaders | Layer::Program => {}
    }
}

/// Enters the layer of a step of the stack, on the input or on the output path.
pub(crate) fn on_step(step: Step) {
    let is_input = NOW_IN.get().is_some_and(|(layer, _)| {
        matches!(
            layer,
            Layer::Ring | Layer::InputHeaders | Layer::InputSession
        )
    });
    change(match (step, is_input) {
        (Step::Headers, true) => Layer::InputHeaders,
        (Step::Session, true) => Layer::InputSession,
        (Step::Headers, false) => Layer::OutputHeaders,
        (Step::Session, false) => Layer::OutputSession,
    });
}

/// Switches the thread to a layer. Returns the previous one.
#[cold]
fn change(layer: Layer) -> Layer {
    let now = clock::now().as_nanos();
    let before = NOW_IN.replace(Some((layer, now)));
    let Some((before, since)) = before else {
        return Layer::Program;
    };
    if let Some(totals) = leak::load(&TOTALS) {
        let took = now.saturating_sub(since);
        let cost = CLOCK_COST.load(Ordering::Relaxed);
        totals.add(before as usize, took.saturating_sub(cost));
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_has_a_row_of_its_own() {
        for (row, (layer, _)) in Layer::ALL.into_iter().enumerate() {
            assert_eq!(layer as usize, row);
        }
        assert!(Layer::ALL.len() <= Totals::most());
    }

    #[test]
    fn who_leaves_a_layer_is_in_the_one_before() {
        assert_eq!(change(Layer::Call), Layer::Program);
        let copy = change(Layer::Copy);
        assert_eq!(copy, Layer::Call);
        assert_eq!(change(copy), Layer::Copy);
        change(Layer::Ring);
        on_step(Step::Session);
        assert_eq!(change(Layer::OutputSession), Layer::InputSession);
        on_step(Step::Headers);
        assert_eq!(change(Layer::Program), Layer::OutputHeaders);
    }
}
