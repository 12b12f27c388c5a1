//! An epoll set that holds sockets of ours beside the kernel's descriptors. The set is a real
//! kernel epoll descriptor: what is not ours is registered there, as is every socket whose events
//! the kernel knows (listening, relayed).

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::Core;
use crate::socket::{ERR, HUP, Phase, Socket};
use crate::wait::Waiter;

const EDGE: u32 = libc::EPOLLET as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
/// Members whose descriptor is closed get names that are no descriptors.
static NEXT_NAME: AtomicI32 = AtomicI32::new(-2);
/// Bits that are always reported.
const ALWAYS: u32 = ERR | HUP;

#[derive(Debug)]
pub(crate) struct Epoll {
    pub(crate) fd: RawFd,
    /// The library's members took all the caller's room: the kernel's are asked first next time.
    is_kernels_turn: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    interests: HashMap<RawFd, Interest>,
    /// Members that may be ready, each at most once.
    candidates: VecDeque<RawFd>,
    /// Members the kernel was given: an upper bound, closed descriptors leave by themselves.
    kernel_members: usize,
    sleepers: Vec<Arc<Waiter>>,
}

#[derive(Debug)]
struct Interest {
    socket: Arc<Socket>,
    events: u32,
    data: u64,
    /// A one-shot interest that has fired waits for `EPOLL_CTL_MOD`.
    is_armed: bool,
    is_candidate: bool,
}

impl Epoll {
    pub(crate) fn new(fd: RawFd) -> Epoll {
        Epoll {
            fd,
            is_kernels_turn: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn holds(&self, fd: RawFd) -> bool {
        self.state().interests.contains_key(&fd)
    }

    /// Adds or replaces a member; it is looked at in the next wait.
    pub(crate) fn set(&self, fd: RawFd, socket: &Arc<Socket>, event: libc::epoll_event) {
        let mut state = self.state();
        let was_candidate = state.interests.get(&fd).is_some_and(|i| i.is_candidate);
        state.interests.insert(
            fd,
            Interest {
                socket: Arc::clone(socket),
                events: event.events,
                data: event.u64,
                is_armed: true,
                is_candidate: true,
            },
        );
        if !was_candidate {
            state.candidates.push_back(fd);
        }
        state.wake();
    }

    /// What the member was registered with.
    pub(crate) fn interest(&self, fd: RawFd) -> Option<libc::epoll_event> {
        let state = self.state();
        let interest = state.interests.get(&fd)?;
        Some(libc::epoll_event {
            events: interest.events,
            u64: interest.data,
        })
    }

    pub(crate) fn remove(&self, fd: RawFd) -> Option<Arc<Socket>> {
        let mut state = self.state();
        state.candidates.retain(|&candidate| candidate != fd);
        state.interests.remove(&fd).map(|interest| interest.socket)
    }

    /// The member's descriptor is closed but the socket lives on under another, which nobody can
    /// change or remove it by (epoll(7), "Will closing a file descriptor cause it to be removed").
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

    pub(crate) fn kernel_member_added(&self) {
        let mut state = self.state();
        state.kernel_members += 1;
        // Who sleeps did not look at the kernel's members.
        state.wake();
    }

    pub(crate) fn kernel_member_removed(&self) {
        let mut state = self.state();
        state.kernel_members = state.kernel_members.saturating_sub(1);
    }

    /// There was no room left for the kernel's members.
    pub(crate) fn owe_turn(&self) {
        self.is_kernels_turn.store(true, Ordering::Relaxed);
    }

    /// Are the kernel's members to be asked first this time?
    pub(crate) fn take_turn(&self) -> bool {
        self.is_kernels_turn.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn has_kernel_members(&self) -> bool {
        self.state().kernel_members > 0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.state().interests.is_empty()
    }

    pub(crate) fn members(&self) -> Vec<(RawFd, Arc<Socket>)> {
        self.state()
            .interests
            .iter()
            .map(|(fd, i)| (*fd, Arc::clone(&i.socket)))
            .collect()
    }

    /// The members that stand there, which is `Connecting` or `Away`.
    pub(crate) fn members_in(&self, phase: Phase) -> Vec<(RawFd, Arc<Socket>)> {
        if !Socket::any(phase) {
            return Vec::new();
        }
        let mut members = self.members();
        members.retain(|(_, socket)| socket.phase() == phase);
        members
    }

    /// Something happened to a member.
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

    /// Collects ready members into `events`; returns how many. Level-triggered members stay
    /// candidates for as long as they are ready, at the end of the queue (epoll(7)).
    pub(crate) fn collect(&self, core: &mut Core, events: &mut [libc::epoll_event]) -> usize {
        let mut state = self.state();
        let mut count = 0;
        for _ in 0..state.candidates.len() {
            if count == events.len() {
                break;
            }
            let Some(fd) = state.candidates.pop_front() else {
                break;
            };
            let Some(interest) = state.interests.get_mut(&fd) else {
                continue;
            };
            let ready = interest.socket.readiness(core) & (interest.events | ALWAYS);
            let is_ready = ready != 0 && interest.is_armed;
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
        count
    }
}

impl State {
    fn wake(&self) {
        for sleeper in &self.sleepers {
            sleeper.signal();
        }
    }
}
