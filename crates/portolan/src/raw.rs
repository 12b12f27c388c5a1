//! Raw flows: a program's own protocols, above Ethernet, above IP, or at a TCP or UDP port, beside TCP and
//! UDP of the same host (PX §2).
//!
//! A flow receives all frames that match its [`Guard`], and may send only such frames; the filters in the
//! kernel enforce both. Whole Ethernet frames are passed. [`layers`] has the building blocks to compose and
//! parse them, and those of a transport: checksums, timers, congestion control, or the TCP machine itself.
//!
//! A flow ends with its process. A forked child does not inherit it.

use std::fmt;
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use portolan_proto::control::RequestBody;
use portolan_proto::extension::{self, Event};
pub use portolan_proto::raw::Guard;
use portolan_proto::report::RawRow;
use portolan_stack::{Frame, NextHop};
use portolan_sys::clock;
use portolan_types::{Instant, MacAddr, Slot};
pub use rustix::io::Errno;

use crate::extension::{Extension, Object, install_on};
use crate::process::claims::claim;
use crate::process::inside;
use crate::process::{CoreGuard, Process};
use crate::qos::Refused;
use crate::runtime::Core;
pub use crate::socket::inboxes::Received;
use crate::threads::sleep::{Sleep, Woken};
use crate::threads::start::start_to_stay;
use crate::wait::waiter::Waiter;

/// The library's own layers, for use in other protocols.
pub mod layers {
    pub use portolan_sys::clock::now;
    pub use portolan_tcp as tcp;
    pub use portolan_timers as timers;
    pub use portolan_types as types;
    pub use portolan_wire as wire;
}

/// A virtio-net header that requests no offload.
const PLAIN: [u8; layers::wire::vnet::HEADER_LEN] = [0; layers::wire::vnet::HEADER_LEN];

/// Interval of retries while the next hop's address is unknown.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A protocol of this program.
pub struct RawFlow {
    process: &'static Process,
    guard: Guard,
    slot: Slot,
}

/// The first hop of a path to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Index of the device.
    pub interface: u32,
    /// The host's address that the route prefers.
    pub source: IpAddr,
    /// In bytes, without the Ethernet header.
    pub mtu: u32,
    pub own_mac: MacAddr,
    /// Of the destination, or of the gateway.
    pub next_mac: MacAddr,
}

impl RawFlow {
    /// Claims a protocol for this program.
    ///
    /// # Errors
    /// `INVAL`: the host's own stacks need it. `PERM`: this user may not have it (`[[raw]]` in the server's
    /// configuration). `ADDRINUSE`: another program has it, or the kernel has the port. `ACCES`: the port is below
    /// `ip_unprivileged_port_start`, and this program may not bind such. `ADDRNOTAVAIL`: the address is not on a device
    /// that Portolan serves. `NOBUFS`: this program has too many. `NETDOWN`: there is no server.
    pub fn open(guard: Guard) -> Result<RawFlow, Errno> {
        let _inside = inside::enter();
        let process = start_to_stay().map_err(|_| Errno::NETDOWN)?;
        let slot = process.lock().inboxes.open();
        let mut flow = RawFlow {
            process,
            guard,
            slot,
        };
        flow.guard = claim(process, guard, slot)?;
        // It notices when the server is gone.
        process.ensure_helper();
        Ok(flow)
    }

    /// Returns the guard; a port guard has its port number.
    pub fn guard(&self) -> Guard {
        self.guard
    }

    /// Returns the next received frame.
    ///
    /// # Errors
    /// `AGAIN`: none is pending. `BADF`: the flow is the parent's. `CONNRESET`: the server was stopped for good, or the
    /// next one does not grant the protocol: frames are no longer delivered. While a server is restarted, none arrive.
    pub fn try_recv(&self) -> Result<Received, Errno> {
        let _inside = inside::enter();
        self.check_owner()?;
        let mut core = self.process.lock();
        core.poll(clock::now());
        self.take(&mut core).unwrap_or(Err(Errno::AGAIN))
    }

    /// Returns the next frame. Waits for it at most as long as `timeout`; `None` means without limit.
    ///
    /// # Errors
    /// `AGAIN`: no frame arrived in time. `INTR`: a signal was handled. `CONNRESET`: as [`RawFlow::try_recv`].
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Received, Errno> {
        let _inside = inside::enter();
        self.check_owner()?;
        let reading = Reading::new(self)?;
        let until = timeout.map(|timeout| clock::now() + timeout);
        self.wait(until, |core| reading.flow.take(core))?
    }

    /// Returns the number of frames dropped because too many were unread.
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

    /// Sends a frame: a head, which begins with the Ethernet header, and a payload. The source MAC address
    /// must be that of a device that Portolan serves, the source IP address one of this host, and the source
    /// port the flow's; else the kernel drops the frame and counts it. Waits while the device is busy.
    ///
    /// # Errors
    /// `INVAL`: the head is shorter than an Ethernet header.
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

    /// Installs the handler of an object for frames that this flow receives, or that it sends: PacketRecv or PacketSend
    /// of Ethernet, of IP, or at a TCP or UDP port. The flow gets the frames that handlers pass. Handlers are called in
    /// ascending order of `priority`.
    ///
    /// # Errors
    /// The server's or the kernel verifier's; `BADF`: the flow is the parent's.
    pub fn install(&self, name: &str, priority: u8, object: Object) -> Result<Extension, Refused> {
        if let Err(errno) = self.check_owner() {
            return Err(Refused::new(errno, "the flow is another process's"));
        }
        let event = Event::of_raw(self.guard, object.direction());
        let guards = vec![extension::Guard::Raw(self.guard)];
        install_on(event, guards, (name, priority), object)
    }

    /// Returns the first hop towards `destination`, by the kernel's routes and neighbours. Waits
    /// until the neighbour is known, at most as long as `timeout`.
    ///
    /// # Errors
    /// `NETUNREACH`: there is no route through a device that Portolan serves. `HOSTUNREACH`: the
    /// next hop did not answer in time.
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

    /// Fails in a forked child, which must not use the parent's channel.
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
        // Fails only without a server, which would have kept the claim.
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
    /// Returns the first hop to a destination, or the neighbour to be resolved first.
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

/// Publishes the flow's statistics to the server.
fn publish(core: &Core, row: Option<(usize, RawRow)>) {
    if let Some((row, figures)) = row {
        core.statistics.publish_raw(row, &figures);
    }
}
