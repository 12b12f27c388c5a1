//! The ends of local sessions that are here (ADR 9), and the notifiers of their peers. An end that
//! was used since the last sleep is *active*: it is checked at each poll, and armed before the next
//! sleep. The others are armed already: their peers wake this process.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::fence;
use std::sync::{Arc, Weak};
use std::time::Duration;

use portolan_local::{Local, Stream, Wake, WakeBy, WakeRequest};
use portolan_proto::capture::CaptureRing;
use portolan_proto::local::{Side, holder};
use portolan_sys::clock;
use portolan_sys::shm::Rings;
use portolan_sys::wait::{WakeReceiver, WakeSender, pollfd};
use portolan_sys::word;
use portolan_tcp::Events;
use portolan_types::{Instant, SessionId, Slot};

use crate::channel::captures::Recorded;
use crate::descriptors::{self, InternalFd};
use crate::runtime::Core;

/// How often an awake process checks ends whose peers would have notified it.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Wake-ups without news, less those with news, that are tolerated: a peer may wake this process for what it has just
/// seen.
const SPURIOUS_MAX: u32 = 16;

/// How long the notifier is ignored after more of them. Data that peers have written until then is found afterwards.
const IGNORED_FOR: Duration = Duration::from_millis(1);

pub(crate) struct Locals {
    notifier: Notifier,
    /// Notifiers from previous servers, kept while there are sessions whose peers know them.
    earlier: Vec<Notifier>,
    ends: Vec<Option<LocalSlot>>,
    count: usize,
    active: Vec<Slot>,
    /// How ends that are not active are armed.
    armed: WakeBy,
    wake_senders: HashMap<u64, Weak<WakeSender<InternalFd>>>,
    /// Ends whose peers' notifiers must be requested from the server.
    unknown_peers: Vec<(SessionId, Slot)>,
    /// Ends whose peers could not be woken for want of a server.
    unwoken: Vec<(SessionId, Slot)>,
    looked_at_all: Instant,
    was_notified: bool,
    /// Number of checks that found something.
    news: u64,
    /// Its value when a peer last woke this process.
    news_before: u64,
    /// Wake-ups without news, less those with news.
    spurious: u32,
    /// Until when the notifier is ignored.
    ignored_until: Option<Instant>,
    /// Ends that hold bytes back.
    corked: Vec<Slot>,
    /// What they found, until nothing is locked but the core: who is to be told may be asking.
    unreported: Vec<(Slot, Events, Instant)>,
}

/// The descriptor by which peers wake this process.
struct Notifier {
    wake_receiver: WakeReceiver,
    /// The number by which peers know it.
    number: u64,
}

struct LocalSlot {
    id: SessionId,
    end: Local,
    /// For the next server, to which it shows that the end is here.
    memory: Option<Arc<InternalFd>>,
    is_active: bool,
    /// It is in [`Locals::corked`].
    is_corked: bool,
    wake_sender: Option<(u64, Arc<WakeSender<InternalFd>>)>,
    recorded: Recorded,
}

/// An end that arrives.
pub(crate) struct NewEnd {
    pub(crate) id: SessionId,
    pub(crate) end: Local,
    memory: Option<InternalFd>,
}

impl NewEnd {
    /// Opens an end in the memory that came with a message.
    pub(crate) fn open(
        id: SessionId,
        memory: Option<OwnedFd>,
        side: Side,
    ) -> Result<Box<NewEnd>, i32> {
        let memory = memory.ok_or(libc::EPROTO)?;
        let rings = Rings::map(&memory).map_err(|_| libc::ENOBUFS)?;
        Ok(Box::new(NewEnd {
            id,
            end: Local::new(Arc::new(rings), side),
            memory: descriptors::keep_spare(&memory),
        }))
    }
}

impl Locals {
    pub(crate) fn new(notifier: OwnedFd, number: u64) -> Locals {
        Locals {
            notifier: Notifier::new(notifier, number),
            earlier: Vec::new(),
            ends: Vec::new(),
            count: 0,
            active: Vec::new(),
            armed: WakeBy::default(),
            wake_senders: HashMap::new(),
            unknown_peers: Vec::new(),
            unwoken: Vec::new(),
            looked_at_all: Instant::ZERO,
            was_notified: false,
            news: 0,
            news_before: 0,
            spurious: 0,
            ignored_until: None,
            corked: Vec::new(),
            unreported: Vec::new(),
        }
    }

    /// Switches to the notifier of another server. The previous one is kept until the last session whose peer knows it
    /// ends; the other peers find the new one in the memory.
    pub(crate) fn renew(&mut self, notifier: OwnedFd, number: u64) {
        let before = std::mem::replace(&mut self.notifier, Notifier::new(notifier, number));
        self.earlier.push(before);
        self.prune();
        self.forget_server();
        self.iter().for_each(|(_, _, end)| end.give_to(number));
        // A peer that has not seen the number has shown its data before: the next look finds it.
        fence(SeqCst);
        self.expect_missed();
    }

    /// The next server has the same number as the one before, and another notifier.
    fn forget_server(&mut self) {
        self.wake_senders.remove(&holder::SERVER);
        for held in self.ends.iter_mut().flatten() {
            held.wake_sender
                .take_if(|(number, _)| *number == holder::SERVER);
        }
    }

    /// The next check is of all ends: a peer may have been unable to wake this process.
    pub(crate) fn expect_missed(&mut self) {
        self.was_notified = true;
    }

    fn prune(&mut self) {
        if self.is_empty() {
            self.earlier.drain(..).for_each(Notifier::close);
        }
    }

    fn notifiers(&self) -> impl Iterator<Item = &Notifier> {
        std::iter::once(&self.notifier).chain(&self.earlier)
    }

    /// Changes whenever a check finds something. A caller that had nothing to do and sees it
    /// changed must try again: it is not notified a second time.
    pub(crate) fn news(&self) -> u64 {
        self.news
    }

    pub(crate) fn insert(&mut self, slot: Slot, arrival: NewEnd) {
        let NewEnd { id, end, memory } = arrival;
        let index = slot.0 as usize;
        if self.ends.len() <= index {
            self.ends.resize_with(index + 1, || None);
        }
        let held = LocalSlot {
            id,
            recorded: Recorded::until_now(&end),
            end,
            memory: memory.map(Arc::new),
            is_active: true,
            is_corked: false,
            wake_sender: None,
        };
        if self.ends[index].replace(held).is_none() {
            self.count += 1;
        }
        self.active.push(slot);
    }

    /// Removes an end, with everything published.
    fn remove(&mut self, slot: Slot) -> Option<LocalSlot> {
        let held = self.ends.get_mut(slot.0 as usize)?.take()?;
        self.count -= 1;
        self.active.retain(|active| *active != slot);
        self.corked.retain(|corked| *corked != slot);
        self.prune();
        Some(held)
    }

    fn get(&self, slot: Slot) -> Option<&LocalSlot> {
        self.ends.get(slot.0 as usize)?.as_ref()
    }

    /// Returns an end that is about to be used, and marks it as active.
    fn mark_active(&mut self, slot: Slot) -> Option<&mut LocalSlot> {
        let held = self.ends.get_mut(slot.0 as usize)?.as_mut()?;
        if !held.is_active {
            held.is_active = true;
            self.active.push(slot);
        }
        Some(held)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns all ends that are here.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, SessionId, &Local)> {
        let ends = self.ends.iter().zip(0..);
        ends.filter_map(|(held, slot)| {
            let held = held.as_ref()?;
            Some((Slot(slot), held.id, &held.end))
        })
    }

    /// One of these becomes readable when a peer wakes this process; there are none while the notifier is ignored.
    pub(crate) fn pollfds(&self) -> impl Iterator<Item = libc::pollfd> {
        let heard = self.notifiers().filter(|_| self.ignored_until.is_none());
        heard.map(|notifier| {
            let receiver = notifier.wake_receiver.as_fd();
            pollfd(receiver.as_raw_fd(), libc::POLLIN)
        })
    }

    /// Handles a wake-up by a peer. Repeated wake-ups without news cost no more than a check each millisecond.
    pub(crate) fn hear(&mut self, now: Instant, by: WakeBy) {
        let drained = || self.notifiers().filter(|it| it.wake_receiver.drain());
        if by == WakeBy::Notifier && drained().count() == 0 {
            return;
        }
        self.was_notified = true;
        if std::mem::replace(&mut self.news_before, self.news) == self.news {
            self.spurious += 1
        } else {
            self.spurious = self.spurious.saturating_sub(1)
        }
        if self.spurious > SPURIOUS_MAX {
            self.spurious = SPURIOUS_MAX;
            self.ignored_until = Some(now + IGNORED_FOR);
        }
    }

    /// Returns when something is due without a wake-up.
    fn deadline(&self) -> Option<Instant> {
        if self.is_empty() {
            return None;
        }
        let corked = self.corked.iter().filter_map(|slot| self.get(*slot));
        let pushes = corked.filter_map(|held| held.end.pushes_at());
        pushes.chain(self.ignored_until).min()
    }

    /// Updates whether the end at `slot` holds bytes back.
    fn note_corked(&mut self, slot: Slot) {
        if let Some(Some(held)) = self.ends.get_mut(slot.0 as usize) {
            held.is_corked = held.end.pushes_at().is_some();
            self.corked.retain(|corked| *corked != slot);
            if held.is_corked {
                self.corked.push(slot);
            }
        }
    }

    /// Are there ends, and few enough to sleep on their words besides the thread's own?
    pub(crate) fn fit_on_words(&self) -> bool {
        (1..word::MOST).contains(&self.count)
    }

    /// Returns the wake-up requests of all ends.
    pub(crate) fn wake_requests(&self) -> Vec<WakeRequest> {
        self.iter().map(|(_, _, end)| end.wake_request()).collect()
    }

    /// Has all ends armed in this way.
    fn arm_by(&mut self, by: WakeBy) {
        if std::mem::replace(&mut self.armed, by) == by {
            return;
        }
        for (held, slot) in self.ends.iter_mut().zip(0..) {
            if let Some(held) = held
                && !std::mem::replace(&mut held.is_active, true)
            {
                self.active.push(Slot(slot));
            }
        }
    }

    /// Wakes the peer of `slot`, unless it is awake. Returns true if the peer is in this process.
    fn notify(&mut self, slot: Slot, wake: Wake) -> bool {
        if self.notifiers().any(|it| it.number == wake.holder()) {
            return true;
        }
        let (Some(number), Some(Some(held))) =
            (wake.notifier(), self.ends.get_mut(slot.0 as usize))
        else {
            return false;
        };
        if held
            .wake_sender
            .as_ref()
            .is_none_or(|(known, _)| *known != number)
        {
            let known = self.wake_senders.get(&number).and_then(Weak::upgrade);
            held.wake_sender = known.map(|wake_sender| (number, wake_sender));
        }
        match &held.wake_sender {
            Some((_, wake_sender)) => wake_sender.wake(),
            None => self.unknown_peers.push((held.id, slot)),
        }
        false
    }

    /// Wakes the peer of `slot` by its notifier, which the server has sent, and remembers it.
    pub(crate) fn learn(&mut self, slot: Slot, number: u64, wake_sender: OwnedFd) {
        let known = self.wake_senders.get(&number).and_then(Weak::upgrade);
        let wake_sender =
            known.unwrap_or_else(|| Arc::new(WakeSender::from_fd(InternalFd::new(wake_sender))));
        wake_sender.wake();
        self.wake_senders
            .retain(|_, wake_sender| wake_sender.strong_count() > 0);
        self.wake_senders
            .insert(number, Arc::downgrade(&wake_sender));
        if let Some(Some(held)) = self.ends.get_mut(slot.0 as usize) {
            held.wake_sender = Some((number, wake_sender));
        }
    }

    /// The peer of `slot` could not be woken, since no server told its notifier.
    pub(crate) fn note_unwoken(&mut self, id: SessionId, slot: Slot) {
        if !self.unwoken.contains(&(id, slot)) && self.unwoken.len() < self.count {
            self.unwoken.push((id, slot));
        }
    }

    /// Has the peers that could not be woken be woken now.
    pub(crate) fn retry_unwoken(&mut self) {
        self.unknown_peers.append(&mut self.unwoken);
    }

    /// Returns what shows a server that the end at `slot` is here.
    pub(crate) fn evidence(&self, slot: Slot) -> Option<(SessionId, Side, Arc<InternalFd>)> {
        let held = self.get(slot)?;
        Some((held.id, held.end.side(), held.memory.clone()?))
    }

    /// Returns the number of the notifier of `slot`'s peer.
    pub(crate) fn peer_notifier(&self, slot: Slot) -> Option<u64> {
        Some(self.get(slot)?.end.peer_notifier())
    }

    pub(crate) fn has_unknown_peers(&self) -> bool {
        !self.unknown_peers.is_empty()
    }

    pub(crate) fn take_unknown_peers(&mut self) -> Vec<(SessionId, Slot)> {
        std::mem::take(&mut self.unknown_peers)
    }

    fn slots_of(&self, ids: &[SessionId]) -> Vec<Slot> {
        let ids: HashSet<&SessionId> = ids.iter().collect();
        let theirs = self.iter().filter(|(_, id, _)| ids.contains(id));
        theirs.map(|(slot, ..)| slot).collect()
    }

    /// Returns the ends to check now: the active ones, or all.
    fn due(&mut self, now: Instant) -> Vec<Slot> {
        if self.ignored_until.is_some_and(|until| until <= now) {
            self.ignored_until = None;
            self.was_notified = true;
        }
        if !self.was_notified && now.since(self.looked_at_all) < LOOK_EVERY {
            return self.active.clone();
        }
        self.was_notified = false;
        self.looked_at_all = now;
        let ends = self.ends.iter().zip(0..);
        ends.filter_map(|(held, slot)| {
            let held = held.as_ref()?;
            (held.is_active || held.end.was_rung()).then_some(Slot(slot))
        })
        .collect()
    }
}

impl Notifier {
    fn new(notifier: OwnedFd, number: u64) -> Notifier {
        Notifier {
            wake_receiver: WakeReceiver::from_fd(descriptors::hide(notifier)),
            number,
        }
    }

    fn close(self) {
        drop(InternalFd::hidden(self.wake_receiver.into()));
    }
}

impl Core {
    pub(crate) fn is_local(&self, slot: Slot) -> bool {
        self.locals.get(slot).is_some()
    }

    /// Returns the stream at `slot`, whatever its kind. After changing it, call [`Core::touch`].
    pub(crate) fn stream(&mut self, slot: Slot) -> Option<&mut dyn Stream> {
        if self.is_local(slot) {
            self.look_at(slot, clock::now());
            return Some(&mut self.locals.mark_active(slot)?.end);
        }
        self.settle_lending(slot);
        Some(&mut self.stack.tcp(slot)?.connection)
    }

    /// As [`Core::stream`], for callers that do not read received data.
    pub(crate) fn stream_to_send(&mut self, slot: Slot) -> Option<&mut dyn Stream> {
        if self.is_local(slot) {
            return self.stream(slot);
        }
        Some(&mut self.stack.tcp(slot)?.connection)
    }

    /// Called after bytes of the stream at `slot` were read. Acknowledgements may wait for the program's reply.
    pub(crate) fn touch_after_read(&mut self, slot: Slot) {
        match self.locals.get(slot) {
            Some(_) => self.touch(slot),
            None => self.stack.touch_after_read(slot),
        }
    }

    /// Called after the stream at `slot` was changed: publishes the change to its peer.
    pub(crate) fn touch(&mut self, slot: Slot) {
        let Some(held) = self.locals.mark_active(slot) else {
            return self.stack.touch(slot);
        };
        let now = clock::now();
        let wake = held.end.publish(now);
        self.channel
            .captures
            .note(held.id, &held.end, &mut held.recorded);
        if held.is_corked != held.end.pushes_at().is_some() {
            self.locals.note_corked(slot);
        }
        if let Some(wake) = wake
            && self.locals.notify(slot, wake)
        {
            // The peer is in this process, too.
            self.locals.was_notified = true;
            for slot in self.locals.due(now) {
                self.look_at(slot, now);
            }
        }
        self.look_at(slot, now);
    }

    /// Removes the local end at `slot`, closed or for its next holder.
    pub(crate) fn take_local(
        &mut self,
        slot: Slot,
        finish: impl FnOnce(&mut Local),
    ) -> Option<SessionId> {
        let end = &mut self.locals.mark_active(slot)?.end;
        finish(end);
        end.push();
        self.touch(slot);
        let held = self.locals.remove(slot)?;
        self.stack.remove(slot);
        Some(held.id)
    }

    /// Would a check of a local end bring nothing for its reader?
    pub(crate) fn local_has_nothing(&self, slot: Slot) -> Option<bool> {
        let end = &self.locals.get(slot)?.end;
        let is_still = end.is_still()
            && end.readable() == 0
            && !end.is_at_mark()
            && !end.is_receive_finished()
            && end.error().is_none();
        Some(is_still)
    }

    /// Checks local sessions, and notifies their watchers.
    pub(crate) fn look_at_locals(&mut self, now: Instant) {
        if self.locals.is_empty() {
            return;
        }
        if !self.locals.corked.is_empty() {
            self.push_late(now);
        }
        for slot in self.locals.due(now) {
            self.look_at(slot, now);
        }
        self.report_local_events();
    }

    /// Publishes data that was held back long enough.
    fn push_late(&mut self, now: Instant) {
        for slot in self.locals.corked.clone() {
            let held = self.locals.mark_active(slot);
            if let Some(held) = held
                && held.end.pushes_at().is_some_and(|due| due <= now)
            {
                held.end.push();
                self.touch(slot);
            }
        }
    }

    /// Returns when something is due, for any kind of session.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let all = [
            self.stack.deadline(),
            self.locals.deadline(),
            self.delegations.deferred_until(),
        ];
        all.into_iter().flatten().min()
    }

    /// The server says that the peers of these sessions have ended, whatever is in their memory.
    pub(crate) fn end_peers(&mut self, ended: &[SessionId], now: Instant) {
        for slot in self.locals.slots_of(ended) {
            self.look_by(slot, |end| end.note_peer_end(now));
        }
        self.report_local_events();
    }

    /// Sets the rings in which is recorded from now on.
    pub(crate) fn set_captures(&mut self, rings: &[CaptureRing], memory: Vec<OwnedFd>) {
        let captures = &mut self.channel.captures;
        let had_local = captures.has_local();
        captures.set(rings, memory);
        if captures.has_local() && !had_local {
            for held in self.locals.ends.iter_mut().flatten() {
                held.recorded = Recorded::until_now(&held.end);
            }
        }
    }

    fn look_at(&mut self, slot: Slot, now: Instant) {
        self.look_by(slot, |end| end.look(now));
    }

    fn look_by(&mut self, slot: Slot, look: impl FnOnce(&mut Local) -> Events) {
        let Some(held) = self.locals.mark_active(slot) else {
            return;
        };
        let events = look(&mut held.end);
        self.channel
            .captures
            .note(held.id, &held.end, &mut held.recorded);
        if events != Events::NONE {
            let arose = held.end.news_at();
            self.locals.news += 1;
            self.locals.unreported.push((slot, events, arose));
        }
    }

    /// Reports the events found by checks to the watchers of local sessions.
    pub(crate) fn report_local_events(&mut self) {
        // Events are reported in the order in which they are told.
        if self.locals.unreported.len() > 1 {
            self.locals.unreported.sort_by_key(|(_, _, arose)| *arose);
        }
        for next in 0..self.locals.unreported.len() {
            let (slot, events, _) = self.locals.unreported[next];
            self.tell(slot, events);
        }
        self.locals.unreported.clear();
    }

    /// As [`Core::arm_locals`], for a sleeping leader: another thread's use of an end may have
    /// changed what its peer must wake the leader for.
    pub(crate) fn rearm_locals(&mut self) {
        if !self.locals.active.is_empty() {
            let by = self.locals.armed;
            self.arm_locals(by);
        }
    }

    /// Has the active ends request wake-ups. Returns false if something has arrived in the
    /// meantime, so that the caller must not sleep.
    pub(crate) fn arm_locals(&mut self, by: WakeBy) -> bool {
        let mut has_news = false;
        self.locals.arm_by(by);
        for slot in std::mem::take(&mut self.locals.active) {
            let Some(Some(held)) = self.locals.ends.get_mut(slot.0 as usize) else {
                continue;
            };
            held.is_active = false;
            held.end.arm(by);
            let events = held.end.look(clock::now());
            self.channel
                .captures
                .note(held.id, &held.end, &mut held.recorded);
            if events != Events::NONE {
                let arose = held.end.news_at();
                has_news = true;
                self.locals.mark_active(slot);
                self.locals.unreported.push((slot, events, arose));
            }
        }
        self.report_local_events();
        !has_news
    }
}

#[cfg(test)]
mod tests {
    use portolan_proto::local::RING_MIN;
    use portolan_sys::wait::{ppoll, wake_pair};

    use super::*;

    const SLOT: Slot = Slot(0);

    /// A process with one end, the other end, and the sender of its notifier.
    fn scene() -> (Locals, Local, WakeSender) {
        let (wake_receiver, wake_sender) = wake_pair().expect("a socket");
        let mut locals = Locals::new(wake_receiver.into(), 7);
        let memory = Rings::create(RING_MIN).expect("memory");
        let rings = Arc::new(Rings::map(&memory).expect("memory"));
        let here = NewEnd::open(SessionId(1), Some(memory), Side::Opener).expect("an end");
        here.end.give_to(7);
        locals.insert(SLOT, *here);
        (locals, Local::new(rings, Side::Accepter), wake_sender)
    }

    fn is_woken(locals: &Locals) -> bool {
        let mut fds: Vec<_> = locals.pollfds().collect();
        ppoll(&mut fds, Some(Instant::ZERO), None).expect("ppoll") > 0
    }

    /// One turn of a leader, which the notifier may have woken. Returns true if it had news.
    fn turn(locals: &mut Locals, now: Instant) -> bool {
        if is_woken(locals) {
            locals.hear(now, WakeBy::Notifier);
        }
        let mut has_news = false;
        for slot in locals.due(now) {
            let held = locals.mark_active(slot).expect("it is there");
            if held.end.look(now) != Events::NONE {
                has_news = true;
                locals.news += 1;
            }
        }
        has_news
    }

    #[test]
    fn a_notifier_that_rings_without_news_is_not_heard_for_a_while() {
        let (mut locals, mut peer, wake_sender) = scene();
        let start = Instant::ZERO + Duration::from_secs(1);
        let mut turns = 0;
        while locals.deadline().is_none() {
            wake_sender.wake();
            assert!(is_woken(&locals));
            assert!(!turn(&mut locals, start));
            turns += 1;
            assert!(turns < 100, "it is heard for good");
        }
        wake_sender.wake();
        assert!(!is_woken(&locals));
        // Data written while it is ignored is found afterwards.
        peer.send(start, b"news");
        let _ = peer.publish(start);
        let until = start + IGNORED_FOR;
        assert_eq!(locals.deadline(), Some(until));
        assert!(turn(&mut locals, until));
        assert_eq!(locals.deadline(), None);
        assert!(is_woken(&locals));
        locals.remove(SLOT);
        locals.ignored_until = Some(until);
        assert_eq!(locals.deadline(), None, "nobody is there to be heard");
    }

    #[test]
    fn a_notifier_that_rings_with_news_is_always_heard() {
        let (mut locals, mut peer, wake_sender) = scene();
        let now = Instant::ZERO + Duration::from_secs(1);
        for round in 0..1000 {
            peer.send(now, b"x");
            let _ = peer.publish(now);
            wake_sender.wake();
            assert!(is_woken(&locals), "{round}");
            turn(&mut locals, now);
            // Some wake-ups come twice.
            if round % 2 == 0 {
                wake_sender.wake();
                assert!(is_woken(&locals), "{round}");
                turn(&mut locals, now);
            }
            let end = &mut locals.mark_active(SLOT).expect("it is there").end;
            end.recv(now, &mut [0; 8]);
            let _ = end.publish(now);
            peer.look(now);
        }
    }

    #[test]
    fn the_notifier_of_a_server_before_is_heard_while_a_session_has_it() {
        let (mut locals, _peer, earlier) = scene();
        let (wake_receiver, wake_sender) = wake_pair().expect("a socket");
        locals.renew(wake_receiver.into(), 8);
        for sender in [&earlier, &wake_sender] {
            assert!(!is_woken(&locals));
            sender.wake();
            assert!(is_woken(&locals));
            locals.hear(Instant::ZERO, WakeBy::Notifier);
        }
        locals.remove(SLOT);
        earlier.wake();
        assert!(!is_woken(&locals), "it is closed");
    }

    #[test]
    fn what_is_corked_has_a_deadline() {
        let (mut locals, _peer, _wake_sender) = scene();
        let now = Instant::ZERO + Duration::from_secs(1);
        let held = locals.mark_active(SLOT).expect("it is there");
        held.end.options().cork = true;
        held.end.send(now, b"x");
        let _ = held.end.publish(now);
        locals.note_corked(SLOT);
        assert_eq!(locals.deadline(), Some(now + Duration::from_millis(200)));
        let held = locals.mark_active(SLOT).expect("it is there");
        held.end.push();
        let _ = held.end.publish(now);
        locals.note_corked(SLOT);
        assert_eq!(locals.deadline(), None);
        assert!(locals.corked.is_empty());
    }
}
