//! Channels made in advance, and transmit queues. The kernel takes tens of milliseconds for one, and a server that
//! forks for each connection needs one each time. A thread makes them, several at a time; the number kept ready
//! follows the demand of the last seconds.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use portolan_bpf::{AttachError, ChannelError, ChannelMaps, MapBuilder};
use portolan_control::{Charge, ClientId};
use portolan_sys::tap::{self, CreateError, Tap};
use portolan_sys::wait::EventNotifier;
use portolan_types::{ChannelId, Instant};

use crate::channels::device_turns::DeviceTurns;

/// Bytes of frames queued in a library's tap before it is full.
pub(crate) const TAP_SEND_BUFFER: u32 = 4 << 20;

/// Rings are memory that nobody else can use.
pub(super) const MOST: usize = 16;

/// Enough for a server with two workers, and for its successor.
pub(super) const FEWEST: usize = 2;

/// In addition, one in so many, but at least one, is reserved for users of whom few programs have just ended.
const PER_RESERVED: usize = 2;

/// Number of channels made together: the kernel need not wait for what it has made some milliseconds before.
const AT_ONCE: usize = 8;

/// A channel without a process.
#[derive(Debug)]
pub(crate) struct Spare {
    pub channel: ChannelId,
    pub tap: Tap,
    pub maps: ChannelMaps,
}

/// A process whose `Hello` waits for a channel.
#[derive(Debug)]
pub(crate) struct PendingHello {
    pub client: ClientId,
    pub request: u32,
    pub uid: u32,
    pub program: String,
    /// None until taps of exited processes are deleted.
    pub charge: Option<Charge>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum MakeError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Tap(#[from] CreateError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("cannot bound a tap: {0}")]
    Bound(#[from] rustix::io::Errno),
}

pub(super) enum Made {
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

/// Work for the thread.
pub(super) enum Order {
    Make(Vec<ChannelId>),
    /// Another tap for a channel.
    MakeTxQueue(ChannelId, u8),
    /// A ring of the given size, in bytes, for one session.
    MakeRing(ChannelId, u32),
}

/// Which of the ready channels a new program may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SpareClaim {
    Any,
    /// All but the last ones, which are for users of whom few programs have just ended.
    NotReserve,
}

pub(crate) struct ChannelPool {
    pub(super) ready: VecDeque<Spare>,
    pub(super) ordered: BTreeSet<ChannelId>,
    /// Users of whom fewer programs have just ended go first, then users take turns; the requests of each are in order.
    pub(super) waiting: VecDeque<PendingHello>,
    /// Number of channels to keep ready, besides the reserve.
    pub(super) target: usize,
    pub(super) wanted_at: Instant,
    pub(super) map_builder: Arc<MapBuilder>,
    pub(super) orders: Sender<Order>,
    pub(super) made: Receiver<Made>,
    pub notifier: Arc<EventNotifier>,
}

impl ChannelPool {
    /// Starts the thread that makes them.
    pub(crate) fn new(
        map_builder: Arc<MapBuilder>,
        turns: Arc<DeviceTurns>,
        ring_size: u32,
        now: Instant,
    ) -> Result<ChannelPool, rustix::io::Errno> {
        let notifier = Arc::new(EventNotifier::new()?);
        let (orders, to_do) = mpsc::channel();
        let (done, made) = mpsc::channel();
        let (theirs, ring) = (Arc::clone(&map_builder), Arc::clone(&notifier));
        std::thread::spawn(move || {
            let deliver = |made| {
                // Fails only when the server ends, and this thread with it.
                let _ = done.send(made);
                ring.notify();
            };
            work(&to_do, |wanted| match wanted {
                Wanted::Channels(channels) => {
                    for channels in channels.chunks(AT_ONCE) {
                        turns.make(|| make(&theirs, channels, ring_size, deliver));
                    }
                }
                Wanted::TxQueue(channel, number) => deliver(Made::TxQueue {
                    channel,
                    number,
                    tap: turns.make(|| start_tap(&theirs).and_then(|tap| finish_tap(&theirs, tap))),
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
            target: FEWEST,
            wanted_at: now,
            map_builder,
            orders,
            made,
            notifier,
        })
    }

    pub(super) fn has(&self, channel: ChannelId) -> bool {
        self.ordered.contains(&channel) || self.ready.iter().any(|spare| spare.channel == channel)
    }

    /// Returns a channel for a new program. If there is none, more will be ready next time.
    pub(crate) fn take(&mut self, now: Instant, claim: SpareClaim) -> Option<Spare> {
        self.wanted_at = now;
        let spare = if self.has_for(claim) {
            self.ready.pop_front()
        } else {
            None
        };
        if spare.is_none() {
            self.target = (self.target * 2).min(MOST);
        }
        spare
    }

    fn has_for(&self, claim: SpareClaim) -> bool {
        match claim {
            SpareClaim::Any => !self.ready.is_empty(),
            SpareClaim::NotReserve => self.ready.len() > self.reserve(),
        }
    }

    fn reserve(&self) -> usize {
        (self.target / PER_RESERVED).max(1)
    }

    /// Returns whether the pool is larger than it stays after a lull.
    pub(super) fn is_raised(&self) -> bool {
        self.target > FEWEST || self.ready.len() > FEWEST + self.reserve()
    }

    /// Removes the next program to serve, and moves other users ahead of this one's other programs. `claim` is that of a
    /// user.
    pub(super) fn next_pending_hello(
        &mut self,
        claim: impl Fn(u32) -> SpareClaim,
    ) -> Option<PendingHello> {
        let claims = self.waiting.iter().map(|pending_hello| {
            let claim = claim(pending_hello.uid);
            (pending_hello.charge.is_some() && self.has_for(claim)).then_some(claim)
        });
        let (at, _) = claims
            .enumerate()
            .filter_map(|(at, claim)| claim.map(|claim| (at, claim)))
            .min_by_key(|(_, claim)| *claim)?;
        let next = self.waiting.remove(at)?;
        let waiting = std::mem::take(&mut self.waiting);
        let (its, others): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|n| n.uid == next.uid);
        self.waiting = others.into_iter().chain(its).collect();
        Some(next)
    }

    /// Returns the number of waiting programs that channels are made for.
    pub(super) fn charged(&self) -> usize {
        let is_charged = |pending_hello: &&PendingHello| pending_hello.charge.is_some();
        self.waiting.iter().filter(is_charged).count()
    }

    /// Forgets a client that has disconnected.
    pub(crate) fn forget_pending_hello(&mut self, client: ClientId) {
        self.waiting
            .retain(|pending_hello| pending_hello.client != client);
    }

    /// Orders a transmit queue for a channel.
    pub(crate) fn order_tx_queue(&self, channel: ChannelId, number: u8) {
        // The thread ends only with the server.
        let _ = self.orders.send(Order::MakeTxQueue(channel, number));
    }

    /// Orders a ring and its doorbell.
    pub(crate) fn order_ring(&self, ring: ChannelId, size: u32) {
        // The thread ends only with the server.
        let _ = self.orders.send(Order::MakeRing(ring, size));
    }

    /// Returns how many channels to order now.
    pub(super) fn missing(&self) -> usize {
        let wanted = self.target + self.reserve() + self.charged();
        wanted.saturating_sub(self.ready.len() + self.ordered.len())
    }
}

/// Items made in one go.
enum Wanted<'a> {
    Channels(&'a [ChannelId]),
    TxQueue(ChannelId, u8),
    Ring(ChannelId, u32),
}

fn work(to_do: &Receiver<Order>, mut make: impl FnMut(Wanted<'_>)) {
    while let Ok(first) = to_do.recv() {
        // Orders that arrived in the meantime are processed together: the kernel's wait is the same.
        let mut ordered = Vec::new();
        for order in std::iter::once(first).chain(to_do.try_iter()) {
            match order {
                Order::Make(channels) => ordered.extend(channels),
                Order::MakeTxQueue(channel, number) => make(Wanted::TxQueue(channel, number)),
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
    let taps: Vec<_> = channels.iter().map(|_| start_tap(map_builder)).collect();
    for ((&channel, maps), tap) in channels.iter().zip(maps).zip(taps) {
        let tap = tap.and_then(|tap| finish_tap(map_builder, tap));
        deliver(Made::Channels {
            ordered: vec![channel],
            spare: tap.map(|tap| Spare { channel, tap, maps }),
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

fn start_tap(map_builder: &MapBuilder) -> Result<Tap, MakeError> {
    let tap = Tap::create(tap::PREFIX)?;
    tap.set_send_buffer(TAP_SEND_BUFFER)?;
    map_builder.prepare_tap(tap.ifindex)?;
    Ok(tap)
}

fn finish_tap(map_builder: &MapBuilder, tap: Tap) -> Result<Tap, MakeError> {
    map_builder.attach_tap(tap.ifindex)?;
    tap.bring_up()?;
    Ok(tap)
}
