//! The channel pool: ordering, handing out, waiting.

use std::time::Duration;

use portolan_control::{Errno, Timer};
use portolan_types::ChannelId;
use tracing::error;

use crate::channels::pool::{FEWEST, MOST, Made, MakeError, Order, PendingHello, Spare};
use crate::server::Server;

/// After this time without a new program the pool shrinks again.
const LULL: Duration = Duration::from_secs(3);

impl Server {
    /// Orders channels if fewer are ready than wanted. The numbers of channels that were just freed
    /// are reused last.
    pub(crate) fn order_channel_pool(&mut self) {
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
        // The thread ends only with the server.
        let _ = self.channel_pool.orders.send(Order::Make(channels));
    }

    /// Returns whether there is no channel for a new program, nor one being made.
    pub(crate) fn is_out_of_channels(&self) -> bool {
        self.channel_pool.ready.is_empty()
            && self.channel_pool.ordered.len() <= self.channel_pool.charged()
    }

    /// Queues a new program until there is a channel for it.
    pub(crate) fn await_spare(&mut self, pending_hello: PendingHello) {
        self.channel_pool.waiting.push_back(pending_hello);
        self.order_channel_pool();
    }

    /// Handles channels that were made, or could not be.
    pub(crate) fn on_channel_pool(&mut self) {
        self.channel_pool.notifier.drain();
        while let Ok(made) = self.channel_pool.made.try_recv() {
            self.enter_made(made);
        }
        self.welcome_waiting();
    }

    /// Waits for the first channel, so that the first process need not.
    pub(crate) fn await_first_spare(&mut self) {
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
                let tap =
                    tap.inspect_err(|failure| error!(%failure, "cannot make a transmit queue"));
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

    /// Charges queued programs whose charge was deferred; refuses those for which none will become free.
    pub(crate) fn admit_waiting(&mut self) {
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

    pub(crate) fn welcome_waiting(&mut self) {
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
        // Channels that could not be made are not retried endlessly.
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

    /// Puts back a channel that was not needed after all.
    pub(crate) fn return_spare(&mut self, spare: Spare) {
        self.channel_pool.ready.push_front(spare);
        self.note_pool_size();
    }

    /// Handles the deletion of taps: programs that waited for their charges are admitted.
    pub(crate) fn on_left_taps(&mut self) {
        self.leaving_taps.give_back();
        self.admit_waiting();
        self.welcome_waiting();
        self.order_channel_pool();
    }

    /// Shrinks the pool after a lull.
    pub(crate) fn shrink_channel_pool(&mut self) {
        let lull = self.channel_pool.wanted_at + LULL;
        if lull > self.now {
            return self.control.timers.arm(Timer::ChannelPool, lull);
        }
        self.channel_pool.target = FEWEST;
        while self.channel_pool.is_raised()
            && let Some(spare) = self.channel_pool.ready.pop_back()
        {
            if let Err(failure) = self.filter.remove_channel(spare.channel) {
                error!(%failure, "cannot remove a channel");
            }
            self.leaving_taps.delete(spare.tap, None);
        }
    }

    fn note_pool_size(&mut self) {
        if self.channel_pool.is_raised() {
            let lull = self.channel_pool.wanted_at + LULL;
            self.control.timers.arm_once(Timer::ChannelPool, lull);
        }
    }
}
