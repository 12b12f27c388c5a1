//! Raw flows: protocols of a program's own, above Ethernet, above IP, or at a port of TCP or UDP, beside TCP and UDP of
//! the same host (PX §2).
//!
//! A flow has all frames that its [`Guard`] tells from others, and sends such frames; the filters in the kernel see to
//! both. What goes through it are whole Ethernet frames. [`layers`] has the pieces to build and to read them with, and
//! those that a transport is made of: checksums, timers, congestion control, or the TCP machine itself.
//!
//! A flow ends with its process. A forked child does not have it.

use std::fmt;
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{self, Event};
pub use portolan_proto::raw::Guard;
use portolan_proto::report::RawRow;
use portolan_stack::{Frame, NextHop};
use portolan_sys::clock;
use portolan_types::{Instant, MacAddr, Slot};
pub use rustix::io::Errno;

use crate::extension::{Extension, Object, install_on};
use crate::process::control::Lost;
use crate::process::inside;
use crate::process::{CoreGuard, Process};
use crate::qos::Refused;
use crate::runtime::Core;
pub use crate::socket::inboxes::Received;
use crate::wait::{Sleep, Waiter, Woken};

/// The library's own layers, for use in others.
pub mod layers {
    pub use portolan_sys::clock::now;
    pub use portolan_tcp as tcp;
    pub use portolan_timers as timers;
    pub use portolan_types as types;
    pub use portolan_wire as wire;
}

/// A header that asks nothing of the device.
const PLAIN: [u8; layers::wire::vnet::HEADER_LEN] = [0; layers::wire::vnet::HEADER_LEN];

/// How often a next hop that nobody knows is looked for again.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// One protocol of this program's own.
pub struct RawFlow {
    process: &'static Process,
    guard: Guard,
    slot: Slot,
}

/// The first part of the way to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Index of the device.
    pub interface: u32,
    /// Of this host, as the route has it.
    pub source: IpAddr,
    /// Bytes behind the Ethernet header.
    pub mtu: u32,
    pub own_mac: MacAddr,
    /// Of the destination, or of the gateway.
    pub next_mac: MacAddr,
}

impl RawFlow {
    /// Takes a protocol for this program.
    ///
    /// # Errors
    /// `INVAL`: the stacks of this host live by it. `PERM`: this user may not have it (`[[raw]]` in the server's
    /// configuration). `ADDRINUSE`: another program has it, or the kernel has the port. `ACCES`: the port is below
    /// `ip_unprivileged_port_start`, and this program may not bind such. `ADDRNOTAVAIL`: the address is none of a device that Portolan
    /// serves. `NOBUFS`: this program has too many. `NETDOWN`: there is no server.
    pub fn open(guard: Guard) -> Result<RawFlow, Errno> {
        let _inside = inside::enter();
        let process = Process::start_to_stay().map_err(|_| Errno::NETDOWN)?;
        let slot = process.lock().inboxes.open();
        let mut flow = RawFlow {
            process,
            guard,
            slot,
        };
        let request = || RequestBody::ClaimProtocol { guard, slot };
        let mut answer = process.control.call(request(), &[]);
        if let (
            Guard::Port { local, .. },
            Ok((
                ReplyBody::Error {
                    errno: libc::EACCES,
                },
                _,
            )),
        ) = (guard, &answer)
        {
            // A privileged port: the kernel says who may bind it.
            process.show_right_to(local)?;
            answer = process.control.call(request(), &[]);
        }
        match answer {
            Ok((ReplyBody::Claimed { guard }, _)) => {
                flow.guard = guard;
                Ok(flow)
            }
            Ok((ReplyBody::Error { errno }, _)) => Err(Errno::from_raw_os_error(errno)),
            Ok(_) => Err(Errno::PROTO),
            Err(Lost) => Err(Errno::NETDOWN),
        }
    }

    /// What it has: a port with its number.
    pub fn guard(&self) -> Guard {
        self.guard
    }

    /// The next frame, if one has come.
    ///
    /// # Errors
    /// `AGAIN`: none has. `BADF`: it is the parent's. `CONNRESET`: the server has gone, and with it whatever delivers frames.
    pub fn try_recv(&self) -> Result<Received, Errno> {
        let _inside = inside::enter();
        self.check_owner()?;
        let mut core = self.process.lock();
        core.poll(clock::now());
        self.take(&mut core).unwrap_or(Err(Errno::AGAIN))
    }

    /// The next frame; waits for it as long as `timeout`, or forever.
    ///
    /// # Errors
    /// `AGAIN`: none came in time. `INTR`: a signal was handled. `CONNRESET`: as of [`RawFlow::try_recv`].
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Received, Errno> {
        let _inside = inside::enter();
        self.check_owner()?;
        let reading = Reading::new(self)?;
        let until = timeout.map(|timeout| clock::now() + timeout);
        self.wait(until, |core| reading.flow.take(core))?
    }

    /// Frames that came while too many were unread.
    pub fn dropped(&self) -> u64 {
        let _inside = inside::enter();
        if self.check_owner().is_err() {
            return 0;
        }
        let mut core = self.process.lock();
        core.inboxes
            .get(self.slot)
            .map_or(0, |inbox| inbox.dropped())
    }

    /// Sends a frame: its Ethernet header with what else belongs to the head, and a payload. The source's MAC address
    /// must be that of a device that Portolan serves, and the source address of a packet one of this host, its source port
    /// the flow's; else the kernel drops the frame and counts it. Waits while the device is busy.
    ///
    /// # Errors
    /// `INVAL`: the head is no Ethernet header.
    pub fn send(&self, head: &[u8], payload: &[u8]) -> Result<(), Errno> {
        if head.len() < layers::wire::ethernet::HEADER_LEN {
            return Err(Errno::INVAL);
        }
        let _inside = inside::enter();
        self.check_owner()?;
        let mut core = self.process.lock();
        if core.channel.is_main_full() {
            core = self.await_room(core)?;
        }
        core.channel.transmit_raw(&Frame {
            head: &PLAIN,
            payload: [head, payload],
        });
        if let Some(inbox) = core.inboxes.get(self.slot) {
            inbox.note_sent(head.len() + payload.len());
            let row = inbox.row(self.slot);
            publish(&core, row);
        }
        Ok(())
    }

    /// Has the handler of an object called for what comes, or for what this flow sends: PacketRecv or PacketSend of
    /// Ethernet, of IP, or at a port of TCP or UDP. The flow gets what handlers leave to it. Of several handlers the one with the lowest `priority` comes first.
    ///
    /// # Errors
    /// What the server or the kernel's verifier says; `BADF`: it is the parent's.
    pub fn install(&self, name: &str, priority: u8, object: Object) -> Result<Extension, Refused> {
        if let Err(errno) = self.check_owner() {
            return Err(Refused::new(errno, "the flow is another process's"));
        }
        let event = Event::of_raw(self.guard, object.direction());
        let guards = vec![extension::Guard::Raw(self.guard)];
        install_on(event, guards, (name, priority), object)
    }

    /// Where packets to `destination` go first, as the kernel's routes and neighbours say; waits until the neighbour
    /// is known, as long as `timeout`.
    ///
    /// # Errors
    /// `NETUNREACH`: there is no route by a device that Portolan serves. `HOSTUNREACH`: the next hop did not answer in
    /// time.
    pub fn hop(&self, destination: IpAddr, timeout: Duration) -> Result<Hop, Errno> {
        let _inside = inside::enter();
        self.check_owner()?;
        let until = clock::now() + timeout;
        loop {
            let mut core = self.process.lock();
            let now = clock::now();
            core.poll(now);
            match core.hop(destination)? {
                Ok(hop) => return Ok(hop),
                Err(_) if now >= until => return Err(Errno::HOSTUNREACH),
                Err(NextHop { interface, address }) => {
                    let question = RequestBody::Resolve { interface, address };
                    core.outbox.push(question);
                }
            }
            drop(core);
            let _outside = inside::leave();
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// The channel of a forked child's parent is not the child's to use.
    fn check_owner(&self) -> Result<(), Errno> {
        let is_ours = Process::running().is_some_and(|running| ptr::eq(running, self.process));
        is_ours.then_some(()).ok_or(Errno::BADF)
    }

    fn take(&self, core: &mut Core) -> Option<Result<Received, Errno>> {
        let inbox = core.inboxes.get(self.slot)?;
        let received = inbox.next().map(Ok);
        let end = inbox.is_cut_off().then_some(Err(Errno::CONNRESET));
        let row = inbox.row(self.slot);
        publish(core, row);
        received.or(end)
    }

    fn await_room<'a>(&'a self, core: CoreGuard<'a>) -> Result<CoreGuard<'a>, Errno> {
        drop(core);
        self.wait(None, |core| (!core.channel.is_main_full()).then_some(()))?;
        Ok(self.process.lock())
    }

    fn wait<T>(
        &self,
        until: Option<Instant>,
        mut ready: impl FnMut(&mut Core) -> Option<T>,
    ) -> Result<T, Errno> {
        match self
            .process
            .wait(Sleep::until(until), |core, _| ready(core))?
        {
            Woken::Ready(value) => Ok(value),
            Woken::TimedOut | Woken::Kernel => Err(Errno::AGAIN),
        }
    }
}

impl fmt::Debug for RawFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawFlow({})", self.guard)
    }
}

impl Drop for RawFlow {
    fn drop(&mut self) {
        let _inside = inside::enter();
        if self.check_owner().is_err() {
            return;
        }
        self.process.lock().inboxes.close(self.slot);
        let (guard, slot) = (self.guard, self.slot);
        // Without a server there is nobody who would keep it.
        let _ = self
            .process
            .control
            .tell(RequestBody::UnclaimProtocol { guard, slot }, &[]);
    }
}

/// A thread that waits for the frames of a flow.
struct Reading<'a> {
    flow: &'a RawFlow,
    waiter: Arc<Waiter>,
}

impl Reading<'_> {
    fn new(flow: &RawFlow) -> Result<Reading<'_>, Errno> {
        let waiter = Waiter::mine();
        if let Some(inbox) = flow.process.lock().inboxes.get(flow.slot) {
            inbox.add_reader(&waiter);
        }
        Ok(Reading { flow, waiter })
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        if let Some(inbox) = self.flow.process.lock().inboxes.get(self.flow.slot) {
            inbox.remove_reader(&self.waiter);
        }
    }
}

impl Core {
    /// The way to a destination, or the neighbour that has to be asked for first.
    fn hop(&self, destination: IpAddr) -> Result<Result<Hop, NextHop>, Errno> {
        let path = self
            .routes
            .path(destination)
            .map_err(|_| Errno::NETUNREACH)?;
        let (true, Some(source)) = (path.managed, path.source) else {
            return Err(Errno::NETUNREACH);
        };
        let known = self.routes.neighbour(path.interface, path.next_hop);
        Ok(match known {
            Some(next_mac) => Ok(Hop {
                interface: path.interface,
                source,
                mtu: path.mtu,
                own_mac: path.mac,
                next_mac,
            }),
            None => Err(NextHop {
                interface: path.interface,
                address: path.next_hop,
            }),
        })
    }
}

/// Where the server can read it: a program with nothing but raw flows has no thread that does so for all.
fn publish(core: &Core, row: Option<(usize, RawRow)>) {
    if let Some((row, figures)) = row {
        core.statistics.publish_raw(row, &figures);
    }
}
