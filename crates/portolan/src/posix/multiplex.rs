//! `poll` and `epoll` over Portolan's sockets and kernel descriptors together.

use std::os::fd::{IntoRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use portolan_sys::wait::pollfd;
use portolan_sys::{clock, descriptor, wait};
use rustix::io::Errno;

use super::attach::notice_listening;
use super::find::find_here;
use super::listen::outlive_hang_up;
use super::watching::Watching;
use crate::descriptors;
use crate::migration::fallback::kernel_event;
use crate::migration::obtain;
use crate::outcome::{CallError, Outcome};
use crate::process::Process;
use crate::socket::table::{self, File};
use crate::socket::{Socket, SocketPhase};
use crate::threads::sleep::{Sleep, Woken, deadline_after};
use crate::threads::start::here;
use crate::wait::epoll::{Epoll, Polled};
use crate::wait::events::{ERR, HUP};
use crate::wait::waiter::Waiter;

/// Who reports the events of a descriptor.
enum Source {
    /// The session here.
    Library(Arc<Socket>),
    /// The kernel, which also reports the descriptor as writable. A part of the handshakes has a descriptor of its own.
    Listener(Arc<Socket>, Option<RawFd>),
    Kernel,
}

/// Events that a listening socket never has.
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;

fn notice_listening_on(fd: RawFd) {
    if Socket::any(SocketPhase::Idle)
        && let Some(socket) = table::socket(fd)
    {
        notice_listening(fd, &socket);
    }
}

fn source_of(fd: RawFd) -> Source {
    match table::socket(fd) {
        Some(socket) => match socket.phase() {
            SocketPhase::Listening => {
                socket.note_polled();
                let near = socket.own_near();
                Source::Listener(socket, near)
            }
            SocketPhase::Relayed => Source::Kernel,
            SocketPhase::Idle
            | SocketPhase::Connecting
            | SocketPhase::Cached
            | SocketPhase::HeldElsewhere
            | SocketPhase::Closed => Source::Library(socket),
        },
        None => Source::Kernel,
    }
}

pub fn poll(
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Outcome<usize> {
    if !fds.iter().any(|fd| descriptors::is_ours(fd.fd)) {
        return Err(CallError::NotOurs);
    }
    let Some(process) = here() else {
        for fd in fds.iter() {
            // A lost session shows as the end of its descriptor.
            let _ = find_here(fd.fd);
        }
        return Err(CallError::NotOurs);
    };
    let deadline = deadline_after(timeout);
    loop {
        match poll_once(process, fds, deadline, mask) {
            Ok(None) => {}
            Ok(Some(ready)) => return Ok(ready),
            Err(errno) => return Err(CallError::Errno(errno)),
        }
    }
}

/// Returns `None` if it was woken without anything to report.
fn poll_once(
    process: &'static Process,
    fds: &mut [libc::pollfd],
    deadline: Option<portolan_types::Instant>,
    mask: Option<&libc::sigset_t>,
) -> Result<Option<usize>, Errno> {
    for fd in fds.iter() {
        notice_listening_on(fd.fd);
    }
    if Socket::any(SocketPhase::HeldElsewhere) {
        for fd in fds.iter() {
            let _ = find_here(fd.fd);
        }
    }
    let sets: Vec<Arc<Epoll<Socket>>> = fds.iter().filter_map(|fd| table::epoll(fd.fd)).collect();
    if !sets.is_empty() {
        settle(process, &sets)?;
    }
    let sources: Vec<Source> = fds.iter().map(|fd| source_of(fd.fd)).collect();
    let mut kernel: Vec<libc::pollfd> = fds
        .iter()
        .zip(&sources)
        .filter_map(|(fd, source)| match source {
            Source::Library(_) => None,
            Source::Listener(..) => Some(pollfd(fd.fd, fd.events & !OUTPUT)),
            Source::Kernel => Some(pollfd(fd.fd, fd.events)),
        })
        .collect();
    let own_nears = fds.iter().zip(&sources).filter_map(|(fd, source)| {
        let Source::Listener(_, near) = source else {
            return None;
        };
        Some(pollfd((*near)?, fd.events & !OUTPUT))
    });
    kernel.extend(own_nears.collect::<Vec<_>>());
    // Whoever replaces a listener's descriptor wakes this thread, which would else go on polling the old one.
    let ours = sources.iter().filter_map(|source| match source {
        Source::Library(socket) | Source::Listener(socket, _) => Some(socket),
        Source::Kernel => None,
    });
    let watching = Watching::new(ours.collect());
    let sleep = Sleep {
        kernel: &mut kernel,
        mask,
        ..Sleep::until(deadline)
    };
    let woken = process.wait(sleep, |core, _| {
        let mut count = 0;
        let mut has_left = false;
        for (fd, source) in fds.iter_mut().zip(&sources) {
            match source {
                Source::Library(socket) => {
                    fd.revents = revents(core.readiness(socket), fd.events);
                    count += usize::from(fd.revents != 0);
                    has_left |= matches!(
                        socket.phase(),
                        SocketPhase::Relayed | SocketPhase::HeldElsewhere
                    );
                }
                Source::Listener(socket, near) => has_left |= socket.own_near() != *near,
                Source::Kernel => {}
            }
        }
        (count > 0 || has_left).then_some(count)
    })?;
    drop(watching);
    if !sets.is_empty() {
        settle(process, &sets)?;
    }
    if (!matches!(woken, Woken::Kernel) || !sets.is_empty()) && !kernel.is_empty() {
        wait::ppoll(&mut kernel, Some(clock::now()), None)?;
    }
    outlive_hang_ups(&mut kernel)?;
    enter_kernels(fds, &sources, &kernel);
    let count = fds.iter().filter(|fd| fd.revents != 0).count();
    let is_over = count > 0 || matches!(woken, Woken::TimedOut);
    Ok(is_over.then_some(count))
}

/// A listener hangs up when its server ends, and again when another one takes over from the kernel. The program has nothing
/// to do with that: no connection waits, and a blocking `accept` would not return.
fn outlive_hang_ups(polled: &mut [libc::pollfd]) -> Result<(), Errno> {
    let has_hung_up = |polled: &&mut libc::pollfd| polled.revents & libc::POLLHUP != 0;
    for polled in polled.iter_mut().filter(has_hung_up) {
        if let Some(listener) = table::socket(polled.fd)
            && let Ok(true) = outlive_hang_up(&listener)
        {
            wait::ppoll(std::slice::from_mut(polled), Some(clock::now()), None)?;
        }
    }
    Ok(())
}

/// Brings the kernel's view of watched sets up to date.
fn settle(process: &Process, sets: &[Arc<Epoll<Socket>>]) -> Result<(), Errno> {
    let mut core = process.lock();
    core.poll_rx(clock::now());
    sets.iter().try_for_each(|set| {
        set.be_watched();
        set.settle(&mut |socket| core.readiness(socket))
    })
}

fn settle_set(process: &Process, set: &Epoll<Socket>) -> Result<(), Errno> {
    let mut core = process.lock();
    set.settle(&mut |socket| core.readiness(socket))
}

/// Enters the kernel's results for its descriptors, those of parts of listeners last.
fn enter_kernels(fds: &mut [libc::pollfd], sources: &[Source], kernel: &[libc::pollfd]) {
    let mut polled = kernel.iter();
    let theirs = fds.iter_mut().zip(sources);
    let theirs = theirs.filter(|(_, source)| !matches!(source, Source::Library(_)));
    for ((fd, _), polled) in theirs.zip(&mut polled) {
        fd.revents = polled.revents;
    }
    let of_parts = fds.iter_mut().zip(sources);
    let of_parts = of_parts.filter(|(_, source)| matches!(source, Source::Listener(_, Some(_))));
    for ((fd, _), polled) in of_parts.zip(polled) {
        fd.revents |= polled.revents;
    }
}

fn revents(ready: u32, asked: i16) -> i16 {
    // Events are bits 0 to 13, so the mask loses nothing.
    (ready & (u32::from(asked as u16) | ERR | HUP) & 0x3fff) as i16
}

pub fn epoll_create(flags: i32) -> Outcome<RawFd> {
    let set = match descriptor::epoll_create(flags & libc::EPOLL_CLOEXEC != 0) {
        Ok(set) => set.into_raw_fd(),
        Err(errno) => return Err(CallError::Errno(errno)),
    };
    if descriptors::can_hold(set) {
        table::insert(set, File::Epoll(Arc::new(Epoll::new(set))));
    }
    Ok(set)
}

pub fn epoll_control(
    set: RawFd,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Outcome<()> {
    let Some(epoll) = table::epoll(set) else {
        return Err(CallError::NotOurs);
    };
    control(&epoll, operation, fd, event)
}

fn control(
    epoll: &Arc<Epoll<Socket>>,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Outcome<()> {
    let process = here();
    notice_listening_on(fd);
    // A lost session shows as an event.
    let _ = find_here(fd);
    let (socket, process) = match (source_of(fd), process) {
        (Source::Library(socket), Some(process)) => (socket, process),
        _ => return kernel_control(epoll, operation, fd, event),
    };
    let holds = epoll.holds(fd);
    match operation {
        libc::EPOLL_CTL_ADD if holds => Err(Errno::EXIST.into()),
        libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL if !holds => Err(Errno::NOENT.into()),
        libc::EPOLL_CTL_DEL => {
            epoll.remove(fd);
            socket.leave_epoll(epoll, fd);
            Ok(())
        }
        libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => {
            let event = event.ok_or(Errno::FAULT)?;
            check_exclusive(epoll, operation, fd, event.events)?;
            if !holds {
                socket.join_epoll(epoll, fd);
            }
            // Sleepers of the set are signalled with the core held.
            let mut core = process.lock();
            if core.readiness(&socket) & event.events != 0 {
                // It is told of after those that became ready before.
                core.look_at_locals(clock::now());
            }
            epoll.set((fd, &socket), event, |socket| core.readiness(socket));
            if socket.phase() == SocketPhase::HeldElsewhere {
                // They have to obtain it.
                epoll.wake_sleepers();
            }
            Ok(())
        }
        _ => Err(Errno::INVAL.into()),
    }
}

/// Checks what may be combined with `EPOLLEXCLUSIVE`, which is allowed only in the first call (epoll_ctl(2)).
fn check_exclusive(
    epoll: &Epoll<Socket>,
    operation: i32,
    fd: RawFd,
    wanted: u32,
) -> Result<(), Errno> {
    const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
    let ways = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET | libc::EPOLLWAKEUP;
    let allowed = ways as u32 | ERR | HUP | EXCLUSIVE;
    let before = epoll.interest(fd).map_or(0, |event| event.events);
    let is_change = operation == libc::EPOLL_CTL_MOD && (before | wanted) & EXCLUSIVE != 0;
    let is_odd = wanted & EXCLUSIVE != 0 && wanted & !allowed != 0;
    if is_change || is_odd {
        Err(Errno::INVAL)
    } else {
        Ok(())
    }
}

fn kernel_control(
    epoll: &Epoll<Socket>,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Outcome<()> {
    let wanted = event;
    let event = match (table::socket(fd), event) {
        (Some(socket), Some(event)) => Some(kernel_event(&socket, event)),
        (_, event) => event,
    };
    if let Some(done) = control_polled(epoll, operation, fd, event) {
        return done;
    }
    descriptor::epoll_control(epoll.fd(), operation, fd, event)?;
    if let Some(near) = table::socket(fd).and_then(|socket| socket.own_near()) {
        // It is there already if the listener is by two numbers.
        let _ = descriptor::epoll_control(epoll.fd(), operation, near, event);
    }
    if operation == libc::EPOLL_CTL_ADD
        && let Some(inner) = table::epoll(fd)
    {
        epoll.nest(&inner);
    }
    if let Some(socket) = table::socket(fd) {
        socket.leave_to_kernel();
        if socket.phase() == SocketPhase::Listening {
            let interest = wanted.filter(|_| operation != libc::EPOLL_CTL_DEL);
            epoll.note_listener(fd, &socket, interest);
        }
    }
    // Sleepers are signalled with the core locked.
    let _core = Process::running().map(Process::lock);
    match operation {
        libc::EPOLL_CTL_ADD => epoll.kernel_member_added(),
        libc::EPOLL_CTL_DEL => epoll.kernel_member_removed(),
        _ => {}
    }
    Ok(())
}

/// Handles a member that is polled separately, or should be; `None` if the kernel's set handles it.
fn control_polled(
    epoll: &Epoll<Socket>,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Option<Outcome<()>> {
    let is_polled = epoll.polls(fd);
    let fits = event.is_some_and(|event| Polled::fits(event.events)) && !descriptors::is_ours(fd);
    if !is_polled && !fits {
        return None;
    }
    // Sleepers are signalled with the core locked.
    let _core = Process::running().map(Process::lock);
    let in_kernel = |operation, event| descriptor::epoll_control(epoll.fd(), operation, fd, event);
    let done = match (operation, event) {
        (libc::EPOLL_CTL_ADD, _) if is_polled => Err(Errno::EXIST),
        (libc::EPOLL_CTL_ADD, Some(event)) => {
            // The kernel decides whether it can be a member at all.
            in_kernel(libc::EPOLL_CTL_ADD, Some(event))
                .and_then(|()| in_kernel(libc::EPOLL_CTL_DEL, None))
                .map(|()| epoll.set_polled(fd, event))
        }
        (libc::EPOLL_CTL_MOD, Some(event)) if is_polled && fits => {
            epoll.set_polled(fd, event);
            Ok(())
        }
        // It becomes a member of the kernel's set.
        (libc::EPOLL_CTL_MOD, Some(_)) if is_polled => {
            epoll.remove_polled(fd);
            epoll.kernel_member_added();
            in_kernel(libc::EPOLL_CTL_ADD, event)
        }
        (libc::EPOLL_CTL_DEL, _) if is_polled => {
            epoll.remove_polled(fd);
            Ok(())
        }
        _ => return None,
    };
    Some(done.map_err(CallError::from))
}

pub fn epoll_wait(
    set: RawFd,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Outcome<usize> {
    let Some(epoll) = table::epoll(set) else {
        return Err(CallError::NotOurs);
    };
    let Some(process) = here() else {
        for (fd, _) in members_away(&epoll) {
            let _ = find_here(fd);
        }
        return Err(CallError::NotOurs);
    };
    if events.is_empty() {
        return Err(CallError::Errno(Errno::INVAL));
    }
    let deadline = deadline_after(timeout);
    loop {
        match wait_once(process, &epoll, events, deadline, mask) {
            Ok(None) => {}
            Ok(Some(count)) => return Ok(count),
            Err(errno) => return Err(CallError::Errno(errno)),
        }
    }
}

/// Returns `None` if it was woken without anything to report.
fn wait_once(
    process: &'static Process,
    epoll: &Arc<Epoll<Socket>>,
    events: &mut [libc::epoll_event],
    deadline: Option<portolan_types::Instant>,
    mask: Option<&libc::sigset_t>,
) -> Result<Option<usize>, Errno> {
    for (fd, socket) in members_away(epoll) {
        let _ = obtain(process, fd, &socket);
    }
    let has_kernel_members = epoll.has_kernel_members();
    let mut kernel = Vec::new();
    if has_kernel_members {
        // Counts as ready until a poll has shown that it is not.
        kernel.push(libc::pollfd {
            revents: libc::POLLIN,
            ..pollfd(epoll.fd(), libc::POLLIN)
        });
    }
    let polled = epoll.polled();
    kernel.extend(polled.iter().map(Polled::pollfd));
    let is_linked = epoll.is_watched() || epoll.has_nested();
    if is_linked {
        settle_set(process, epoll)?;
    }
    if epoll.is_kernels_turn() {
        let count = ask_kernel(epoll, events)?;
        if count == events.len() {
            return Ok(Some(count));
        }
        if count > 0 {
            let mut core = process.lock();
            let readiness = |socket: &Socket| core.readiness(socket);
            let more = epoll.collect(&mut events[count..], readiness);
            return Ok(Some(count + more));
        }
    }
    let sleeping = Sleeping::new(epoll);
    let sleep = Sleep {
        kernel: &mut kernel,
        mask,
        ..Sleep::until(deadline)
    };
    let woken = process.wait(sleep, |core, _| {
        let count = epoll.collect(events, |socket| core.readiness(socket));
        let has_changed = epoll.has_kernel_members() != has_kernel_members
            || epoll.polled_count() != polled.len()
            || !members_away(epoll).is_empty();
        (count > 0 || has_changed).then_some(count)
    })?;
    drop(sleeping);
    let mut count = match woken {
        Woken::Ready(count) => count,
        Woken::Kernel | Woken::TimedOut => 0,
    };
    if !polled.is_empty() && count < events.len() {
        if !matches!(woken, Woken::Kernel) {
            wait::ppoll(&mut kernel, Some(clock::now()), None)?;
        }
        let found = &kernel[usize::from(has_kernel_members)..];
        count += epoll.collect_polled(found, &mut events[count..]);
    }
    if is_linked {
        let mut core = process.lock();
        epoll.settle_nested(&mut |socket| core.readiness(socket))?;
    }
    let may_kernel_have = has_kernel_members && kernel[0].revents != 0;
    if may_kernel_have && count < events.len() {
        count += ask_kernel(epoll, &mut events[count..])?;
    }
    if epoll.is_watched() {
        settle_set(process, epoll)?;
    }
    let is_over = count > 0 || matches!(woken, Woken::TimedOut);
    Ok(is_over.then_some(count))
}

/// Returns the members of a set whose session is held elsewhere.
fn members_away(epoll: &Epoll<Socket>) -> Vec<(RawFd, Arc<Socket>)> {
    if Socket::any(SocketPhase::HeldElsewhere) {
        epoll.members(|socket| socket.phase() == SocketPhase::HeldElsewhere)
    } else {
        Vec::new()
    }
}

fn ask_kernel(epoll: &Epoll<Socket>, events: &mut [libc::epoll_event]) -> Result<usize, Errno> {
    let count = epoll.collect_kernels(events)?;
    epoll.kernel_has_told(count, count == events.len());
    Ok(count)
}

/// While this lives, the calling thread sleeps on an epoll set.
struct Sleeping<'a> {
    epoll: &'a Epoll<Socket>,
    waiter: Arc<Waiter>,
}

impl<'a> Sleeping<'a> {
    fn new(epoll: &'a Epoll<Socket>) -> Sleeping<'a> {
        let waiter = Waiter::mine();
        epoll.add_sleeper(&waiter);
        Sleeping { epoll, waiter }
    }
}

impl Drop for Sleeping<'_> {
    fn drop(&mut self) {
        self.epoll.remove_sleeper(&self.waiter);
    }
}
