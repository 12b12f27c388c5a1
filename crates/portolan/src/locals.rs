//! The ends of local sessions that are here (ADR 9), and the bells of whoever has their other ends.
//! An end that was used since the last sleep is *hot*: it is looked at whenever somebody attends, and
//! armed before the next sleep. The others are armed already: what comes for them rings our bell.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use portolan_local::{Local, Stream, Wake, WakeBy, Wish};
use portolan_proto::local::Side;
use portolan_sys::clock;
use portolan_sys::shm::Rings;
use portolan_sys::wait::{Chime, Rope};
use portolan_sys::word;
use portolan_tcp::Events;
use portolan_types::{Instant, SessionId, Slot};

use crate::core::Core;
use crate::table::{self, Hidden};
use crate::wait::pollfd;

/// How often an awake process looks at ends that would have rung.
const LOOK_EVERY: Duration = Duration::from_micros(50);

pub(crate) struct Locals {
    chime: Chime,
    /// What peers know our bell by.
    number: u64,
    ends: Vec<Option<Held>>,
    count: usize,
    hot: Vec<Slot>,
    /// How those are armed that are not hot.
    armed: WakeBy,
    ropes: HashMap<u64, Weak<Rope<Hidden>>>,
    /// Ends whose peers' bells the server is to be asked for.
    strangers: Vec<(SessionId, Slot)>,
    looked_at_all: Instant,
    was_rung: bool,
    /// Looks that found something.
    news: u64,
    /// What they found, until nothing is locked but the core: who is to be told may be asking.
    untold: Vec<(Slot, Events)>,
}

struct Held {
    id: SessionId,
    end: Local,
    is_hot: bool,
    rope: Option<(u64, Arc<Rope<Hidden>>)>,
}

/// One end, from the memory that came with a message.
pub(crate) fn open(memory: Option<OwnedFd>, side: Side) -> Result<Local, i32> {
    let rings = Rings::map(memory.ok_or(libc::EPROTO)?).map_err(|_| libc::ENOBUFS)?;
    Ok(Local::new(Arc::new(rings), side))
}

impl Locals {
    pub(crate) fn new(bell: OwnedFd, number: u64) -> Locals {
        Locals {
            chime: Chime::from_fd(table::hide(bell)),
            number,
            ends: Vec::new(),
            count: 0,
            hot: Vec::new(),
            armed: WakeBy::default(),
            ropes: HashMap::new(),
            strangers: Vec::new(),
            looked_at_all: Instant::ZERO,
            was_rung: false,
            news: 0,
            untold: Vec::new(),
        }
    }

    /// Changes whenever a look finds something. Who has found nothing to do and sees it changed
    /// since has to try again: nobody will tell him a second time.
    pub(crate) fn news(&self) -> u64 {
        self.news
    }

    pub(crate) fn insert(&mut self, slot: Slot, id: SessionId, end: Local) {
        let index = slot.0 as usize;
        if self.ends.len() <= index {
            self.ends.resize_with(index + 1, || None);
        }
        let held = Held {
            id,
            end,
            is_hot: true,
            rope: None,
        };
        if self.ends[index].replace(held).is_none() {
            self.count += 1;
        }
        self.hot.push(slot);
    }

    /// Takes an end out: the session, and the end with all that was published.
    fn remove(&mut self, slot: Slot) -> Option<Held> {
        let held = self.ends.get_mut(slot.0 as usize)?.take()?;
        self.count -= 1;
        self.hot.retain(|hot| *hot != slot);
        Some(held)
    }

    fn get(&self, slot: Slot) -> Option<&Held> {
        self.ends.get(slot.0 as usize)?.as_ref()
    }

    /// An end that is about to be used.
    fn heat(&mut self, slot: Slot) -> Option<&mut Held> {
        let held = self.ends.get_mut(slot.0 as usize)?.as_mut()?;
        if !held.is_hot {
            held.is_hot = true;
            self.hot.push(slot);
        }
        Some(held)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All ends that are here.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, SessionId, &Local)> {
        let ends = self.ends.iter().zip(0..);
        ends.filter_map(|(held, slot)| {
            let held = held.as_ref()?;
            Some((Slot(slot), held.id, &held.end))
        })
    }

    /// Rings when something has come while asleep.
    pub(crate) fn pollfd(&self) -> libc::pollfd {
        pollfd(self.chime.as_fd().as_raw_fd(), libc::POLLIN)
    }

    /// A peer has woken us.
    pub(crate) fn hear(&mut self, by: WakeBy) {
        if by == WakeBy::Bell {
            self.chime.silence();
        }
        self.was_rung = true;
    }

    /// Are there ends, and not too many to sleep on besides a word of one's own?
    pub(crate) fn fit_on_words(&self) -> bool {
        (1..word::MOST).contains(&self.count)
    }

    /// What all ends wish for.
    pub(crate) fn wishes(&self) -> Vec<Wish> {
        self.iter().map(|(_, _, end)| end.wish()).collect()
    }

    /// All ends are to be armed like that.
    fn arm_by(&mut self, by: WakeBy) {
        if std::mem::replace(&mut self.armed, by) == by {
            return;
        }
        for (held, slot) in self.ends.iter_mut().zip(0..) {
            if let Some(held) = held
                && !std::mem::replace(&mut held.is_hot, true)
            {
                self.hot.push(Slot(slot));
            }
        }
    }

    /// Wakes the peer of `slot`, if it is not awake by now. True if it is here, too.
    fn ring(&mut self, slot: Slot, wake: Wake) -> bool {
        if wake.holder() == self.number {
            return true;
        }
        let (Some(number), Some(Some(held))) = (wake.bell(), self.ends.get_mut(slot.0 as usize))
        else {
            return false;
        };
        if held.rope.as_ref().is_none_or(|(known, _)| *known != number) {
            let known = self.ropes.get(&number).and_then(Weak::upgrade);
            held.rope = known.map(|rope| (number, rope));
        }
        match &held.rope {
            Some((_, rope)) => rope.pull(),
            None => self.strangers.push((held.id, slot)),
        }
        false
    }

    /// The server has told whose bell wakes the peer of `slot`: rings it.
    pub(crate) fn learn(&mut self, slot: Slot, number: u64, rope: OwnedFd) {
        let known = self.ropes.get(&number).and_then(Weak::upgrade);
        let rope = known.unwrap_or_else(|| Arc::new(Rope::from_fd(Hidden::new(rope))));
        rope.pull();
        self.ropes.retain(|_, rope| rope.strong_count() > 0);
        self.ropes.insert(number, Arc::downgrade(&rope));
        if let Some(Some(held)) = self.ends.get_mut(slot.0 as usize) {
            held.rope = Some((number, rope));
        }
    }

    pub(crate) fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    pub(crate) fn take_strangers(&mut self) -> Vec<(SessionId, Slot)> {
        std::mem::take(&mut self.strangers)
    }

    /// The ends to look at now: those in use, or all.
    fn due(&mut self, now: Instant) -> Vec<Slot> {
        if !self.was_rung && now.since(self.looked_at_all) < LOOK_EVERY {
            return self.hot.clone();
        }
        self.was_rung = false;
        self.looked_at_all = now;
        let ends = self.ends.iter().zip(0..);
        ends.filter_map(|(held, slot)| {
            let held = held.as_ref()?;
            (held.is_hot || held.end.was_rung()).then_some(Slot(slot))
        })
        .collect()
    }
}

impl Core {
    pub(crate) fn is_local(&self, slot: Slot) -> bool {
        self.locals.get(slot).is_some()
    }

    /// The stream at `slot`, whatever its kind. After changing it, call [`Core::touch`].
    pub(crate) fn stream(&mut self, slot: Slot) -> Option<&mut dyn Stream> {
        if self.is_local(slot) {
            self.look_at(slot);
            return Some(&mut self.locals.heat(slot)?.end);
        }
        Some(&mut self.stack.tcp(slot)?.connection)
    }

    /// The stream at `slot` was changed: its peer is to see it.
    pub(crate) fn touch(&mut self, slot: Slot) {
        let Some(held) = self.locals.heat(slot) else {
            return self.stack.touch(slot);
        };
        if let Some(wake) = held.end.publish()
            && self.locals.ring(slot, wake)
        {
            // The other end is here, too.
            self.locals.was_rung = true;
            for slot in self.locals.due(clock::now()) {
                self.look_at(slot);
            }
        }
        self.look_at(slot);
    }

    /// Takes the local end at `slot` out, closed or for its next holder.
    pub(crate) fn take_local(
        &mut self,
        slot: Slot,
        finish: impl FnOnce(&mut Local),
    ) -> Option<SessionId> {
        finish(&mut self.locals.heat(slot)?.end);
        self.touch(slot);
        let held = self.locals.remove(slot)?;
        self.stack.remove(slot);
        Some(held.id)
    }

    /// Would a look at a local end bring nothing for its reader?
    pub(crate) fn local_has_nothing(&self, slot: Slot) -> Option<bool> {
        let end = &self.locals.get(slot)?.end;
        let is_still = end.is_still()
            && end.readable() == 0
            && !end.is_at_mark()
            && !end.is_receive_finished()
            && end.error().is_none();
        Some(is_still)
    }

    /// Looks at local sessions, and tells whoever watches them what has happened.
    pub(crate) fn look_at_locals(&mut self, now: Instant) {
        if self.locals.is_empty() {
            return;
        }
        for slot in self.locals.due(now) {
            self.look_at(slot);
        }
        self.tell_of_locals();
    }

    fn look_at(&mut self, slot: Slot) {
        let Some(held) = self.locals.heat(slot) else {
            return;
        };
        let events = held.end.look(clock::now());
        if events != Events::NONE {
            self.locals.news += 1;
            self.locals.untold.push((slot, events));
        }
    }

    /// Tells whoever watches local sessions what looks have found.
    pub(crate) fn tell_of_locals(&mut self) {
        // In the order in which it was found, which is that in which events are reported.
        for next in 0..self.locals.untold.len() {
            let (slot, events) = self.locals.untold[next];
            self.tell(slot, events);
        }
        self.locals.untold.clear();
    }

    /// As [`Core::arm_locals`], for a leader that sleeps: what another thread did with an end may have changed what
    /// its peer has to wake the leader for.
    pub(crate) fn rearm_locals(&mut self) {
        if !self.locals.hot.is_empty() {
            let by = self.locals.armed;
            self.arm_locals(by);
        }
    }

    /// The ends in use wish to be woken. False if something came meanwhile, and it is no time to
    /// sleep.
    pub(crate) fn arm_locals(&mut self, by: WakeBy) -> bool {
        let mut has_news = false;
        self.locals.arm_by(by);
        for slot in std::mem::take(&mut self.locals.hot) {
            let Some(Some(held)) = self.locals.ends.get_mut(slot.0 as usize) else {
                continue;
            };
            held.is_hot = false;
            held.end.arm(by);
            let events = held.end.look(clock::now());
            if events != Events::NONE {
                has_news = true;
                self.locals.heat(slot);
                self.locals.untold.push((slot, events));
            }
        }
        self.tell_of_locals();
        !has_news
    }
}
