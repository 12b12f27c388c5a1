//! Channels whose maps are being removed from the tables.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use portolan_types::ChannelId;

use crate::workers::Workers;

/// The kernel's waits of all threads overlap.
const THREADS: usize = 16;

/// Removes a channel's maps.
type Remove = Box<dyn Fn(ChannelId) + Send + Sync>;

pub(crate) struct Removals {
    remove: Remove,
    workers: Arc<Workers>,
    leaving: Mutex<HashSet<ChannelId>>,
    removed: Condvar,
}

impl Removals {
    pub(crate) fn by(remove: impl Fn(ChannelId) + Send + Sync + 'static) -> Arc<Removals> {
        Arc::new(Removals {
            remove: Box::new(remove),
            workers: Workers::up_to(THREADS),
            leaving: Mutex::default(),
            removed: Condvar::new(),
        })
    }

    pub(crate) fn begin(self: &Arc<Removals>, channel: ChannelId) {
        self.leaving().insert(channel);
        let theirs = Arc::clone(self);
        self.workers.begin(move || theirs.finish(channel));
    }

    pub(crate) fn has(&self, channel: ChannelId) -> bool {
        self.leaving().contains(&channel)
    }

    /// Waits until nothing of the channel is left in the tables.
    pub(crate) fn wait(&self, channel: ChannelId) {
        self.workers.work_off();
        let leaving = self.leaving();
        let is_leaving = |leaving: &mut HashSet<ChannelId>| leaving.contains(&channel);
        drop(self.removed.wait_while(leaving, is_leaving));
    }

    fn finish(&self, channel: ChannelId) {
        (self.remove)(channel);
        self.leaving().remove(&channel);
        self.removed.notify_all();
    }

    fn leaving(&self) -> MutexGuard<'_, HashSet<ChannelId>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn many_leave_and_each_is_awaited() {
        let removals = Removals::by(|_| thread::sleep(Duration::from_millis(5)));
        for number in 0..200 {
            removals.begin(ChannelId(number));
        }
        assert!(removals.has(ChannelId(199)));
        for number in (0..200).rev() {
            removals.wait(ChannelId(number));
            assert!(!removals.has(ChannelId(number)));
        }
    }
}
