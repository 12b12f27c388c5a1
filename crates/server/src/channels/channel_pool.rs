//! Channels that are made before anybody asks for them, and transmit queues. The kernel takes tens of milliseconds for
//! one, and a server that forks for each connection needs one each time. A thread makes them, several
//! at a time; as many wait as the last seconds showed to be wanted.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use portolan_bpf::{AttachError, ChannelError, ChannelMaps, MapBuilder};
use portolan_control::{Charge, ClientId, Errno, Timer};
use portolan_sys::tap::{self, CreateError, Tap};
use portolan_sys::wait::EventNotifier;
use portolan_types::{ChannelId, Instant};
use tracing::error;

use crate::server::Server;

/// Bytes of frames on their way to the wire before a library's tap is full.
pub(crate) const TAP_SEND_BUFFER: u32 = 4 << 20;

/// Rings are memory that nobody else can have.
const MOST: usize = 16;

/// After so long without a new program one is enough again.
const LULL: Duration = Duration::from_secs(3);

/// A channel that no process has.
#[derive(Debug)]
pub struct Spare {
    pub channel: ChannelId,
    pub tap: Tap,
    pub maps: ChannelMaps,
}

/// A process whose `Hello` waits for a channel.
#[derive(Debug)]
pub struct PendingHello {
    pub client: ClientId,
    pub request: u32,
    pub uid: u32,
    pub program: String,
    /// None until taps of processes that are gone are, too.
    pub charge: Option<Charge>,
}

#[derive(Debug, thiserror::Error)]
enum MakeError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Tap(#[from] CreateError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("cannot bound a tap: {0}")]
    Bound(#[from] rustix::io::Errno),
}

enum Made {
    Channels {
        ordered: Vec<ChannelId>,
        spare: Result<Spare, MakeError>,
    },
    TxQueue {
        channel: ChannelId,
        number: u8,
        tap: Result<Tap, MakeError>,
    },
    Ring {
        ring: ChannelId,
        maps: Result<ChannelMaps, ChannelError>,
    },
}

/// What the thread does.
enum Order {
    Make(Vec<ChannelId>),
    /// One more tap for a channel.
    MakeDoorway(ChannelId, u8),
    /// A ring of so many bytes for one session.
    MakeRing(ChannelId, u32),
}

/// Which of the channels that are ready a new program may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortClaim {
    Any,
    /// All but the last, which is for users none of whose channels have just gone.
    NotLast,
}

pub struct ChannelPool {
    ready: VecDeque<Spare>,
    ordered: BTreeSet<ChannelId>,
    /// Users in turn, each one's in their order.
    waiting: VecDeque<PendingHello>,
    /// As many are to be ready.
    target: usize,
    wanted_at: Instant,
    map_builder: Arc<MapBuilder>,
    orders: Sender<Order>,
    made: Receiver<Made>,
    pub notifier: Arc<EventNotifier>,
}

impl ChannelPool {
    /// Starts the thread that makes them.
    pub fn new(
        map_builder: Arc<MapBuilder>,
        ring_size: u32,
        now: Instant,
    ) -> Result<ChannelPool, rustix::io::Errno> {
        let notifier = Arc::new(EventNotifier::new()?);
        let (orders, to_do) = mpsc::channel();
        let (done, made) = mpsc::channel();
        let (theirs, ring) = (Arc::clone(&map_builder), Arc::clone(&notifier));
        std::thread::spawn(move || {
            let deliver = |made| {
                // Nobody is there any more if the server ends, and this thread with it.
                let _ = done.send(made);
                ring.notify();
            };
            work(&to_do, |wanted| match wanted {
                Wanted::Channels(channels) => make(&theirs, channels, ring_size, deliver),
                Wanted::TxQueue(channel, number) => deliver(Made::TxQueue {
                    channel,
                    number,
                    tap: make_tap(&theirs),
                }),
                Wanted::Ring(ring, size) => deliver(Made::Ring {
                    ring,
                    maps: make_ring(&theirs, ring, size),
                }),
            });
        });
        Ok(ChannelPool {
            ready: VecDeque::new(),
            ordered: BTreeSet::new(),
            waiting: VecDeque::new(),
            target: 1,
            wanted_at: now,
            map_builder,
            orders,
            made,
            notifier,
        })
    }

    fn has(&self, channel: ChannelId) -> bool {
        self.ordered.contains(&channel) || self.ready.iter().any(|spare| spare.channel == channel)
    }

    /// One for a new program. If there is none, more are to be ready next time.
    pub fn take(&mut self, now: Instant, claim: PortClaim) -> Option<Spare> {
        self.wanted_at = now;
        let spare = match self.has_for(claim) {
            true => self.ready.pop_front(),
            false => None,
        };
        if spare.is_none() {
            self.target = (self.target * 2).min(MOST);
        }
        spare
    }

    fn has_for(&self, claim: PortClaim) -> bool {
        match claim {
            PortClaim::Any => !self.ready.is_empty(),
            PortClaim::NotLast => self.ready.len() > 1,
        }
    }

    /// Takes out who is to be served next, and lets other users go before this one's others.
    fn next_pending_hello(&mut self, claim: impl Fn(u32) -> PortClaim) -> Option<PendingHello> {
        let may_be = |pending_hello: &PendingHello| {
            pending_hello.charge.is_some() && self.has_for(claim(pending_hello.uid))
        };
        let at = self.waiting.iter().position(may_be)?;
        let next = self.waiting.remove(at)?;
        let waiting = std::mem::take(&mut self.waiting);
        let (its, others): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|n| n.uid == next.uid);
        self.waiting = others.into_iter().chain(its).collect();
        Some(next)
    }

    /// Newcomers for whom channels are made.
    fn charged(&self) -> usize {
        let is_charged = |pending_hello: &&PendingHello| pending_hello.charge.is_some();
        self.waiting.iter().filter(is_charged).count()
    }

    /// The client is gone.
    pub fn forget_pending_hello(&mut self, client: ClientId) {
        self.waiting
            .retain(|pending_hello| pending_hello.client != client);
    }

    /// Has a transmit queue made for a channel.
    pub fn order_tx_queue(&self, channel: ChannelId, number: u8) {
        // The thread ends with the server only.
        let _ = self.orders.send(Order::MakeDoorway(channel, number));
    }

    /// Has a ring made, and a doorbell.
    pub fn order_ring(&self, ring: ChannelId, size: u32) {
        // The thread ends with the server only.
        let _ = self.orders.send(Order::MakeRing(ring, size));
    }

    /// How many are to be ordered now.
    fn missing(&self) -> usize {
        (self.target + self.charged()).saturating_sub(self.ready.len() + self.ordered.len())
    }
}

/// What is to be made at a time.
enum Wanted<'a> {
    Channels(&'a [ChannelId]),
    TxQueue(ChannelId, u8),
    Ring(ChannelId, u32),
}

fn work(to_do: &Receiver<Order>, mut make: impl FnMut(Wanted<'_>)) {
    while let Ok(first) = to_do.recv() {
        // What was ordered meanwhile is made together: the kernel's wait is the same.
        let mut ordered = Vec::new();
        for order in std::iter::once(first).chain(to_do.try_iter()) {
            match order {
                Order::Make(channels) => ordered.extend(channels),
                Order::MakeDoorway(channel, number) => make(Wanted::TxQueue(channel, number)),
                Order::MakeRing(ring, size) => make(Wanted::Ring(ring, size)),
            }
        }
        if !ordered.is_empty() {
            make(Wanted::Channels(&ordered));
        }
    }
}

fn make(map_builder: &MapBuilder, channels: &[ChannelId], ring_size: u32, deliver: impl Fn(Made)) {
    let maps = match map_builder.create_channels(channels, ring_size) {
        Ok(maps) => maps,
        Err(failure) => {
            return deliver(Made::Channels {
                ordered: channels.to_vec(),
                spare: Err(failure.into()),
            });
        }
    };
    for (&channel, maps) in channels.iter().zip(maps) {
        deliver(Made::Channels {
            ordered: vec![channel],
            spare: with_tap(map_builder, channel, maps),
        });
    }
}

fn make_ring(
    map_builder: &MapBuilder,
    ring: ChannelId,
    size: u32,
) -> Result<ChannelMaps, ChannelError> {
    let mut maps = map_builder.create_channels(&[ring], size)?;
    maps.pop().ok_or(ChannelError::OutOfRange(ring))
}

fn with_tap(
    map_builder: &MapBuilder,
    channel: ChannelId,
    maps: ChannelMaps,
) -> Result<Spare, MakeError> {
    let tap = make_tap(map_builder)?;
    Ok(Spare { channel, tap, maps })
}

fn make_tap(map_builder: &MapBuilder) -> Result<Tap, MakeError> {
    let tap = Tap::create(tap::PREFIX)?;
    tap.set_send_buffer(TAP_SEND_BUFFER)?;
    map_builder.attach_tap(tap.ifindex)?;
    Ok(tap)
}

impl Server {
    /// Has channels made, if fewer are ready than should be. The numbers of those that have just
    /// gone come last.
    pub fn order_channel_pool(&mut self) {
        self.note_pool_size();
        let missing = self.channel_pool.missing();
        if missing == 0 {
            return;
        }
        let free = self.control.registry.free_channels();
        let (leaving, free): (Vec<_>, Vec<_>) = free
            .filter(|channel| !self.channel_pool.has(*channel))
            .take(missing + MOST)
            .partition(|channel| self.channel_pool.map_builder.is_leaving(*channel));
        let channels: Vec<ChannelId> = free.into_iter().chain(leaving).take(missing).collect();
        if channels.is_empty() {
            return;
        }
        self.channel_pool.ordered.extend(&channels);
        // The thread ends with the server only.
        let _ = self.channel_pool.orders.send(Order::Make(channels));
    }

    /// Is there no channel for a new program, nor one on its way?
    pub fn is_out_of_channels(&self) -> bool {
        self.channel_pool.ready.is_empty()
            && self.channel_pool.ordered.len() <= self.channel_pool.charged()
    }

    /// Keeps a new program until there is a channel for it.
    pub fn await_spare(&mut self, pending_hello: PendingHello) {
        self.channel_pool.waiting.push_back(pending_hello);
        self.order_channel_pool();
    }

    /// Channels are made, or could not be.
    pub fn on_channel_pool(&mut self) {
        self.channel_pool.notifier.drain();
        while let Ok(made) = self.channel_pool.made.try_recv() {
            self.enter_made(made);
        }
        self.welcome_waiting();
    }

    /// Waits for the first, so that the first process does not.
    pub fn await_first_spare(&mut self) {
        self.order_channel_pool();
        if let Ok(made) = self.channel_pool.made.recv() {
            self.enter_made(made);
        }
    }

    fn enter_made(&mut self, made: Made) {
        match made {
            Made::Channels { ordered, spare } => self.enter_channel_pool(&ordered, spare),
            Made::TxQueue {
                channel,
                number,
                tap,
            } => {
                let tap = tap.inspect_err(|failure| error!(%failure, "cannot make a doorway"));
                self.enter_tx_queue(channel, number, tap.ok());
            }
            Made::Ring { ring, maps } => {
                let maps = maps.inspect_err(|failure| error!(%failure, "cannot make a ring"));
                self.enter_ring(ring, maps.ok());
            }
        }
    }

    fn enter_channel_pool(&mut self, ordered: &[ChannelId], spare: Result<Spare, MakeError>) {
        for channel in ordered {
            self.channel_pool.ordered.remove(channel);
        }
        let spare = match spare {
            Ok(spare) => spare,
            Err(failure) => {
                error!(%failure, "cannot make a channel");
                return;
            }
        };
        match self.filter.register_tap(spare.channel, spare.tap.ifindex) {
            Ok(()) => {
                self.channel_pool.ready.push_back(spare);
                self.note_pool_size();
            }
            Err(failure) => error!(%failure, "cannot register a tap"),
        }
    }

    /// Charges those who waited for that; refuses them if nothing is left to wait for.
    pub fn admit_waiting(&mut self) {
        let waiting = std::mem::take(&mut self.channel_pool.waiting);
        for mut pending_hello in waiting {
            let uid = pending_hello.uid;
            if pending_hello.charge.is_none() {
                match self.control.registry.admit_process(uid) {
                    Ok(charge) => pending_hello.charge = Some(charge),
                    Err(exhausted) if self.leaving_taps.relieves(uid, exhausted) => {}
                    Err(exhausted) => {
                        self.refuse_late(pending_hello, exhausted.errno_of_number());
                        continue;
                    }
                }
            }
            self.channel_pool.waiting.push_back(pending_hello);
        }
    }

    pub fn welcome_waiting(&mut self) {
        while !self.channel_pool.waiting.is_empty() {
            let leaving = &self.leaving_taps;
            let Some(pending_hello) = self
                .channel_pool
                .next_pending_hello(|uid| leaving.claim_of(uid))
            else {
                break;
            };
            if let Some(spare) = self.channel_pool.ready.pop_front() {
                self.welcome_late(pending_hello, spare);
            }
        }
        // What could not be made is not tried again and again.
        while self.channel_pool.ordered.len() + self.channel_pool.ready.len()
            < self.channel_pool.charged()
            && let Some(at) = self
                .channel_pool
                .waiting
                .iter()
                .rposition(|n| n.charge.is_some())
            && let Some(pending_hello) = self.channel_pool.waiting.remove(at)
        {
            self.refuse_late(pending_hello, Errno::NFILE);
        }
    }

    /// Puts one back that was not wanted after all.
    pub fn return_spare(&mut self, spare: Spare) {
        self.channel_pool.ready.push_front(spare);
        self.note_pool_size();
    }

    /// After a lull one is enough.
    pub fn shrink_channel_pool(&mut self) {
        let lull = self.channel_pool.wanted_at + LULL;
        if lull > self.now {
            return self.control.timers.arm(Timer::ChannelPool, lull);
        }
        self.channel_pool.target = 1;
        while self.channel_pool.ready.len() > 1
            && let Some(spare) = self.channel_pool.ready.pop_back()
        {
            if let Err(failure) = self.filter.remove_channel(spare.channel) {
                error!(%failure, "cannot remove a channel");
            }
            self.leaving_taps.delete(spare.tap, None);
        }
    }

    /// More than one are ready, or to be.
    fn note_pool_size(&mut self) {
        if self.channel_pool.target > 1 || self.channel_pool.ready.len() > 1 {
            let lull = self.channel_pool.wanted_at + LULL;
            self.control.timers.arm_once(Timer::ChannelPool, lull);
        }
    }
}
