//! An epoll set that contains sockets of ours beside kernel descriptors. The set is a real kernel
//! epoll descriptor: other descriptors are registered there, as is every socket whose events the
//! kernel reports (listening, relayed).
//!
//! A set that is itself watched, in another set or by `poll`, has one more member in the kernel: a
//! notifier that is readable while a member of ours is ready.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portolan_sys::descriptor;
use portolan_sys::wait::{pollfd, ppoll};
use portolan_types::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::descriptors::InternalFd;
use crate::wait::events::{ERR, HUP, PRI};
use crate::wait::waiter::Waiter;

const EDGE: u32 = libc::EPOLLET as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
/// Members whose descriptor is closed get numbers that are not descriptors.
static NEXT_NAME: AtomicI32 = AtomicI32::new(-2);
/// Bits that are always reported.
const ALWAYS: u32 = ERR | HUP;

/// Marks the notifier in the kernel's set: its address is unique.
static NOTIFIER: u8 = 0;

/// `M` is a member of ours, as opposed to the kernel's: a socket. What is ready is asked of the caller, which has
/// the sessions.
#[derive(Debug)]
pub(crate) struct Epoll<M> {
    /// A descriptor of the kernel's set.
    fd: AtomicI32,
    /// The set itself is watched.
    is_watched: AtomicBool,
    has_own_notifier: AtomicBool,
    /// Sets of ours are members.
    has_nested: AtomicBool,
    state: Mutex<State<M>>,
}

#[derive(Debug)]
struct State<M> {
    interests: HashMap<RawFd, Interest<M>>,
    /// Members that may be ready, each at most once.
    candidates: VecDeque<RawFd>,
    /// Candidates that still have to be checked before the kernel's members get their turn.
    turn: usize,
    /// Members in the kernel's set: an upper bound, since closed descriptors leave it automatically.
    kernel_members: usize,
    /// Kernel members that listened when they were added, and their registration: the descriptor may be replaced.
    listeners: HashMap<RawFd, (Weak<M>, libc::epoll_event)>,
    /// Kernel members that are polled separately.
    polled: Vec<Polled>,
    /// Events that the kernel's members may report before it is our turn again.
    kernels_turn: usize,
    /// Sets of ours that are members, all in the kernel's set.
    nested: Vec<Weak<Epoll<M>>>,
    notifier: Option<SetEvent>,
    sleepers: Vec<Arc<Waiter>>,
}

/// An eventfd in the kernel's set, readable while it is notified.
#[derive(Debug)]
struct SetEvent(InternalFd);

impl SetEvent {
    fn new() -> Result<SetEvent, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(SetEvent(InternalFd::new(eventfd(0, flags)?)))
    }

    /// Each call is an edge for edge-triggered watchers.
    fn notify(&self) {
        // Fails only if it has been notified 2^64 - 2 times, and is readable.
        let _ = write(&self.0, &1_u64.to_ne_bytes());
    }

    fn rings(&self) -> bool {
        let mut polled = [pollfd(self.0.as_fd().as_raw_fd(), libc::POLLIN)];
        ppoll(&mut polled, Some(Instant::ZERO), None).is_ok_and(|ready| ready > 0)
    }

    fn drain(&self) {
        // Fails only if it is not notified.
        let _ = read(&self.0, &mut [0; 8]);
    }
}

/// A kernel descriptor that is watched for `EPOLLPRI` alone. Some (`/proc/mounts`) report a change once, to
/// the first poll: polling the kernel's set for them, and then asking it for events, would lose the change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polled {
    fd: RawFd,
    events: u32,
    data: u64,
    /// As in [`Interest`].
    is_armed: bool,
}

impl Polled {
    /// Must a member with these events be polled separately?
    pub(crate) fn fits(events: u32) -> bool {
        let input = libc::EPOLLIN | libc::EPOLLRDNORM | libc::EPOLLOUT;
        events & PRI != 0 && events & (input as u32 | EDGE) == 0
    }

    pub(crate) fn pollfd(&self) -> libc::pollfd {
        pollfd(self.fd, libc::POLLPRI)
    }
}

#[derive(Debug)]
struct Interest<M> {
    member: Arc<M>,
    events: u32,
    data: u64,
    /// A one-shot interest that has fired waits for `EPOLL_CTL_MOD`.
    is_armed: bool,
    is_candidate: bool,
}

impl<M> Epoll<M> {
    pub(crate) fn new(fd: RawFd) -> Epoll<M> {
        Epoll {
            fd: AtomicI32::new(fd),
            is_watched: AtomicBool::new(false),
            has_own_notifier: AtomicBool::new(false),
            has_nested: AtomicBool::new(false),
            state: Mutex::new(State::new()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.load(Ordering::Relaxed)
    }

    /// Sets another descriptor of the set, because the known one is closed.
    pub(crate) fn move_to(&self, fd: RawFd) {
        self.fd.store(fd, Ordering::Relaxed);
    }

    pub(crate) fn holds(&self, fd: RawFd) -> bool {
        self.state().interests.contains_key(&fd)
    }

    /// Adds or replaces a member. One that is not ready yet has its place among the others once it is.
    pub(crate) fn set(
        &self,
        (fd, member): (RawFd, &Arc<M>),
        event: libc::epoll_event,
        readiness: impl FnMut(&M) -> u32,
    ) {
        let mut state = self.state();
        let was_candidate = state.interests.get(&fd).is_some_and(|i| i.is_candidate);
        let mut interest = Interest {
            member: Arc::clone(member),
            events: event.events,
            data: event.u64,
            is_armed: true,
            is_candidate: was_candidate,
        };
        if !was_candidate && interest.ready(readiness) != 0 {
            interest.is_candidate = true;
            state.candidates.push_back(fd);
        }
        let is_candidate = interest.is_candidate;
        state.interests.insert(fd, interest);
        if is_candidate {
            state.wake();
            self.notify(&state);
        }
    }

    /// Has sleeping threads look at the members again. The caller holds `Core`.
    pub(crate) fn wake_sleepers(&self) {
        self.state().wake();
    }

    /// Returns the registration of a member.
    pub(crate) fn interest(&self, fd: RawFd) -> Option<libc::epoll_event> {
        let state = self.state();
        let interest = state.interests.get(&fd)?;
        Some(libc::epoll_event {
            events: interest.events,
            u64: interest.data,
        })
    }

    pub(crate) fn remove(&self, fd: RawFd) -> Option<Arc<M>> {
        let mut state = self.state();
        state.candidates.retain(|&candidate| candidate != fd);
        state.interests.remove(&fd).map(|interest| interest.member)
    }

    /// Renames a member whose descriptor is closed while the socket stays open under another, by which it
    /// cannot be changed or removed (epoll(7), "Will closing a file descriptor cause it to be removed").
    pub(crate) fn rename(&self, fd: RawFd) -> RawFd {
        let name = NEXT_NAME.fetch_sub(1, Ordering::Relaxed);
        let mut state = self.state();
        if let Some(interest) = state.interests.remove(&fd) {
            state.interests.insert(name, interest);
        }
        for candidate in &mut state.candidates {
            if *candidate == fd {
                *candidate = name;
            }
        }
        name
    }

    /// Adds or changes a kernel member that is polled separately.
    pub(crate) fn set_polled(&self, fd: RawFd, event: libc::epoll_event) {
        let mut state = self.state();
        state.polled.retain(|polled| polled.fd != fd);
        state.polled.push(Polled {
            fd,
            events: event.events,
            data: event.u64,
            is_armed: true,
        });
        // Sleeping threads do not poll it yet.
        state.wake();
    }

    pub(crate) fn remove_polled(&self, fd: RawFd) {
        self.state().polled.retain(|polled| polled.fd != fd);
    }

    pub(crate) fn polls(&self, fd: RawFd) -> bool {
        self.state().polled.iter().any(|polled| polled.fd == fd)
    }

    /// Returns the members to poll beside the kernel's set.
    pub(crate) fn polled(&self) -> Vec<Polled> {
        let state = self.state();
        let armed = state.polled.iter().filter(|polled| polled.is_armed);
        armed.copied().collect()
    }

    pub(crate) fn polled_count(&self) -> usize {
        let state = self.state();
        state.polled.iter().filter(|polled| polled.is_armed).count()
    }

    /// Reports the results of polling those. Returns the number of `events`. Closed descriptors leave the set.
    pub(crate) fn collect_polled(
        &self,
        found: &[libc::pollfd],
        events: &mut [libc::epoll_event],
    ) -> usize {
        let mut state = self.state();
        let mut count = 0;
        for found in found.iter().filter(|found| found.revents != 0) {
            if found.revents & libc::POLLNVAL != 0 {
                state.polled.retain(|polled| polled.fd != found.fd);
                continue;
            }
            let mut polled = state.polled.iter_mut();
            let Some(polled) = polled.find(|polled| polled.fd == found.fd && polled.is_armed)
            else {
                continue;
            };
            let Some(event) = events.get_mut(count) else {
                break;
            };
            // Events are bits 0 to 13.
            let bits = u32::from(found.revents.cast_unsigned());
            *event = libc::epoll_event {
                events: bits & (polled.events | ALWAYS),
                u64: polled.data,
            };
            polled.is_armed = polled.events & ONE_SHOT == 0;
            count += 1;
        }
        count
    }

    pub(crate) fn kernel_member_added(&self) {
        let mut state = self.state();
        state.kernel_members += 1;
        // Sleeping threads do not watch the kernel's members yet.
        state.wake();
    }

    pub(crate) fn kernel_member_removed(&self) {
        let mut state = self.state();
        state.kernel_members = state.kernel_members.saturating_sub(1);
    }

    /// Records a listener that has become a kernel member, or whose interest has changed; `None` if it is no longer
    /// one.
    pub(crate) fn note_listener(
        &self,
        fd: RawFd,
        member: &Arc<M>,
        event: Option<libc::epoll_event>,
    ) {
        let listeners = &mut self.state().listeners;
        match event {
            Some(event) => listeners.insert(fd, (Arc::downgrade(member), event)),
            None => listeners.remove(&fd),
        };
    }

    /// Returns the registrations of a listener in the kernel's set.
    pub(crate) fn interests_in_listener(&self, listener: &Arc<M>) -> Vec<libc::epoll_event> {
        let state = self.state();
        let all = state.listeners.values();
        all.filter(|(member, _)| member.as_ptr() == Arc::as_ptr(listener))
            .map(|(_, event)| *event)
            .collect()
    }

    /// Takes the memberships of a listener whose descriptor is replaced, which ends them in the kernel's set.
    pub(crate) fn take_listener(&self, listener: &Arc<M>) -> Vec<(RawFd, libc::epoll_event)> {
        let mut state = self.state();
        let mut taken = Vec::new();
        state.listeners.retain(|fd, (member, event)| {
            let is_it = member.as_ptr() == Arc::as_ptr(listener);
            if is_it {
                taken.push((*fd, *event));
            }
            !is_it && member.strong_count() > 0
        });
        state.kernel_members = state.kernel_members.saturating_sub(taken.len());
        taken
    }

    /// May the kernel's members be asked first this time?
    pub(crate) fn is_kernels_turn(&self) -> bool {
        self.state().kernels_turn > 0
    }

    /// Notes that the kernel's members have reported `events`; it is still their turn if the caller has no more room.
    pub(crate) fn kernel_has_told(&self, events: usize, is_full: bool) {
        let mut state = self.state();
        state.kernels_turn = if is_full {
            state.kernels_turn.saturating_sub(events)
        } else {
            0
        };
    }

    /// From now on reports in the kernel's set whether a member of ours is ready.
    pub(crate) fn be_watched(&self) {
        self.is_watched.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Relaxed)
    }

    /// Called in a child of fork: the set in the kernel is shared with the parent, and the notifier
    /// is the parent's. Another thread may have held the lock on the state.
    pub(crate) fn inherit(&self) {
        self.has_own_notifier.store(false, Ordering::Relaxed);
    }

    /// Adds `inner` as a member.
    pub(crate) fn nest(&self, inner: &Arc<Epoll<M>>) {
        inner.be_watched();
        self.has_nested.store(true, Ordering::Relaxed);
        self.state().nested.push(Arc::downgrade(inner));
    }

    pub(crate) fn has_nested(&self) -> bool {
        self.has_nested.load(Ordering::Relaxed)
    }

    /// Sets or clears the notifiers to match the present state.
    pub(crate) fn settle_nested(&self, readiness: &mut impl FnMut(&M) -> u32) -> Result<(), Errno> {
        if !self.has_nested() {
            return Ok(());
        }
        let nested = self.nested();
        nested.iter().try_for_each(|inner| inner.settle(readiness))
    }

    fn nested(&self) -> Vec<Arc<Epoll<M>>> {
        let mut state = self.state();
        state.nested.retain(|inner| inner.strong_count() > 0);
        state.nested.iter().filter_map(Weak::upgrade).collect()
    }

    /// Sets or clears the notifiers to match the present state.
    pub(crate) fn settle(&self, readiness: &mut impl FnMut(&M) -> u32) -> Result<(), Errno> {
        self.settle_nested(readiness)?;
        if !self.is_watched() {
            return Ok(());
        }
        let mut state = self.state();
        if !self.has_own_notifier.load(Ordering::Relaxed) {
            // The parent's was closed at the fork, and its number may be in use again.
            std::mem::forget(state.notifier.replace(self.new_notifier()?));
            self.has_own_notifier.store(true, Ordering::Relaxed);
        }
        let is_ready = state.has_ready(readiness);
        match &state.notifier {
            Some(notifier) if !is_ready => notifier.drain(),
            Some(notifier) if !notifier.rings() => notifier.notify(),
            _ => {}
        }
        Ok(())
    }

    /// Notifies of news of a member, as an edge for edge-triggered watchers of the set.
    fn notify(&self, state: &State<M>) {
        if self.has_own_notifier.load(Ordering::Relaxed)
            && let Some(notifier) = &state.notifier
        {
            notifier.notify();
        }
    }

    fn new_notifier(&self) -> Result<SetEvent, Errno> {
        let notifier = SetEvent::new()?;
        let event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: notifier_mark(),
        };
        let fd = notifier.0.as_fd().as_raw_fd();
        descriptor::epoll_control(self.fd(), libc::EPOLL_CTL_ADD, fd, Some(event))?;
        Ok(notifier)
    }

    /// Returns the events of the kernel's members.
    pub(crate) fn collect_kernels(&self, events: &mut [libc::epoll_event]) -> Result<usize, Errno> {
        let count = descriptor::epoll_collect(self.fd(), events)?;
        let is_notifier = |event: &libc::epoll_event| event.u64 == notifier_mark();
        match events[..count].iter().position(is_notifier) {
            Some(notifier) => {
                events.copy_within(notifier + 1..count, notifier);
                Ok(count - 1)
            }
            None => Ok(count),
        }
    }

    pub(crate) fn has_kernel_members(&self) -> bool {
        self.state().kernel_members > 0
    }

    /// Returns those members of ours that are `wanted`.
    pub(crate) fn members(&self, wanted: impl Fn(&M) -> bool) -> Vec<(RawFd, Arc<M>)> {
        let state = self.state();
        let members = state.interests.iter();
        members
            .filter(|(_, interest)| wanted(&interest.member))
            .map(|(fd, interest)| (*fd, Arc::clone(&interest.member)))
            .collect()
    }

    /// Called after an event of a member.
    pub(crate) fn mark(&self, fd: RawFd, bits: u32) {
        let mut state = self.state();
        let Some(interest) = state.interests.get_mut(&fd) else {
            return;
        };
        if !interest.is_armed || bits & (interest.events | ALWAYS) == 0 {
            return;
        }
        if !interest.is_candidate {
            interest.is_candidate = true;
            state.candidates.push_back(fd);
        }
        state.wake();
        self.notify(&state);
    }

    pub(crate) fn add_sleeper(&self, waiter: &Arc<Waiter>) {
        self.state().sleepers.push(Arc::clone(waiter));
    }

    pub(crate) fn remove_sleeper(&self, waiter: &Arc<Waiter>) {
        let mut state = self.state();
        if let Some(at) = state.sleepers.iter().position(|w| Arc::ptr_eq(w, waiter)) {
            state.sleepers.swap_remove(at);
        }
    }

    /// Collects ready members into `events`. Returns how many. Level-triggered members stay
    /// candidates while they are ready, at the end of the queue (epoll(7)).
    pub(crate) fn collect(
        &self,
        events: &mut [libc::epoll_event],
        mut readiness: impl FnMut(&M) -> u32,
    ) -> usize {
        let mut state = self.state();
        let mut count = 0;
        if state.turn == 0 {
            state.turn = state.candidates.len();
        }
        for _ in 0..state.candidates.len() {
            if count == events.len() {
                break;
            }
            state.turn = state.turn.saturating_sub(1);
            let Some(fd) = state.candidates.pop_front() else {
                break;
            };
            let Some(interest) = state.interests.get_mut(&fd) else {
                continue;
            };
            let ready = interest.ready(&mut readiness);
            let is_ready = ready != 0;
            if is_ready {
                events[count] = libc::epoll_event {
                    events: ready,
                    u64: interest.data,
                };
                count += 1;
                if interest.events & ONE_SHOT != 0 {
                    interest.is_armed = false;
                }
            }
            interest.is_candidate = is_ready && interest.is_armed && interest.events & EDGE == 0;
            if interest.is_candidate {
                state.candidates.push_back(fd);
            }
        }
        if count < events.len() || state.turn == 0 {
            state.turn = 0;
            state.kernels_turn = state.kernel_members;
        }
        count
    }
}

fn notifier_mark() -> u64 {
    std::ptr::from_ref(&NOTIFIER).addr() as u64
}

impl<M> Interest<M> {
    /// Returns the events it would report now.
    fn ready(&self, mut readiness: impl FnMut(&M) -> u32) -> u32 {
        if self.is_armed {
            readiness(&self.member) & (self.events | ALWAYS)
        } else {
            0
        }
    }
}

impl<M> State<M> {
    fn new() -> State<M> {
        State {
            interests: HashMap::new(),
            candidates: VecDeque::new(),
            turn: 0,
            kernel_members: 0,
            listeners: HashMap::new(),
            polled: Vec::new(),
            kernels_turn: 0,
            nested: Vec::new(),
            notifier: None,
            sleepers: Vec::new(),
        }
    }

    fn has_ready(&self, readiness: &mut impl FnMut(&M) -> u32) -> bool {
        let candidates = self.candidates.iter();
        candidates
            .filter_map(|fd| self.interests.get(fd))
            .any(|interest| interest.ready(&mut *readiness) != 0)
    }

    fn wake(&self) {
        for sleeper in &self.sleepers {
            sleeper.signal();
        }
    }
}
