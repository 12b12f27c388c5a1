//! Where a thread's time goes in the library, by layers. Each boundary has a static probe, which costs a no-operation. With
//! `PORTOLAN_LAYERS=FILE` the program itself adds up the time that each of its threads spends in each layer, on a page of that file.

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
    /// Of a call, all that is no other layer's: the socket, locks, who watches, timers.
    Call,
    /// Bytes between the program's buffers and the session's.
    Copy,
    /// Ring and tap are looked at, records told apart.
    Ring,
    /// The headers of a frame that has come, checksums included.
    InputHeaders,
    /// TCP's machine, or a socket's queue, takes it in.
    InputSession,
    /// What sessions have to send, and when.
    OutputSession,
    /// The headers of a frame that is to go.
    OutputHeaders,
    /// The kernel takes a frame: system call, transmit filter, device, and on a veth the peer's packet filter.
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
/// Nanoseconds that a look at the clock takes.
static CLOCK_COST: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The layer that the thread is in, and since when.
    static NOW_IN: Cell<Option<(Layer, u64)>> = const { Cell::new(None) };
}

/// Begins to add up in the file that `PORTOLAN_LAYERS` names, if it does. True then.
pub(crate) fn start() -> bool {
    if IS_ON.load(Ordering::Acquire) {
        // A child of fork goes on where its parent was.
        return true;
    }
    let Some(path) = &settings().layers else {
        return false;
    };
    // Who asks for it sees that there is no file.
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

/// In the layer until dropped, then in the one before again.
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
        Layer::InputHeaders => probes::input(),
        Layer::OutputSession => probes::output(),
        Layer::Device => probes::device(),
        Layer::Sleep => probes::sleep(),
        Layer::InputSession | Layer::OutputHeaders | Layer::Program => {}
    }
}

/// What the stack says of its own steps, on the way in or on the way out.
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

/// From now on the thread is in that layer. Returns the one that it was in.
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
