//! Traffic control by a thread. The kernel takes the lock of the network's configuration (rtnl) for it, which others may
//! hold for as long as they like: the main thread waits for a moment, and goes on without an answer.

use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use portolan_sys::traffic::{Traffic, TrafficError};

use crate::user_threads::{UserThreads, WaitsFor};

/// The kernel takes less than a millisecond, unless somebody has the lock.
const TIMEOUT: Duration = Duration::from_millis(20);

/// When nobody is served yet, or any more.
const OUTSIDE_SERVICE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(in crate::qos) struct TrafficThread {
    /// It has one thread for changes of the network.
    threads: Arc<UserThreads>,
    /// Opened by the first job.
    traffic: Arc<Mutex<Option<Traffic>>>,
    patience: Duration,
    /// Hears when the thread has done what the main thread did not wait for.
    is_free: Option<Receiver<()>>,
    /// Something was left out or has failed meanwhile.
    is_behind: bool,
}

impl Default for TrafficThread {
    fn default() -> TrafficThread {
        TrafficThread {
            threads: Arc::default(),
            traffic: Arc::default(),
            patience: OUTSIDE_SERVICE,
            is_free: None,
            is_behind: false,
        }
    }
}

impl TrafficThread {
    pub(super) fn begin_service(&mut self) {
        self.patience = TIMEOUT;
    }

    pub(super) fn end_service(&mut self) {
        self.patience = OUTSIDE_SERVICE;
    }

    /// Is the thread still at something that the main thread did not wait for?
    pub(in crate::qos) fn is_late(&mut self) -> bool {
        let Some(is_free) = &self.is_free else {
            return false;
        };
        self.threads.try_again();
        if is_free.try_recv() == Err(TryRecvError::Empty) {
            return true;
        }
        self.is_free = None;
        false
    }

    /// Has anything been left out that was not made up for?
    pub(in crate::qos) fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Has anything been left out since the last call? Not known before the thread has caught up.
    pub(super) fn was_behind(&mut self) -> Option<bool> {
        if self.is_late() {
            return None;
        }
        Some(std::mem::take(&mut self.is_behind))
    }

    /// Hears when all that was begun is done.
    pub(in crate::qos) fn when_done(&self) -> Receiver<()> {
        let (tell, told) = mpsc::channel();
        let job = move || {
            // Whoever is to be told may be gone.
            let _ = tell.send(());
        };
        self.threads.add(None, WaitsFor::Network, Box::new(job));
        told
    }

    /// Returns what the kernel answers.
    ///
    /// # Errors
    /// [`TrafficError::Held`]: nothing was asked, or the answer comes too late for anybody.
    pub(super) fn ask<T: Send + 'static>(
        &mut self,
        question: impl FnOnce(&mut Traffic) -> Result<T, TrafficError> + Send + 'static,
    ) -> Result<T, TrafficError> {
        if self.is_late() {
            self.is_behind = true;
            return Err(TrafficError::Held);
        }
        self.ensure(question)
    }

    /// Likewise for what is done in any case, if later: what undoes something.
    pub(super) fn ensure<T: Send + 'static>(
        &mut self,
        change: impl FnOnce(&mut Traffic) -> Result<T, TrafficError> + Send + 'static,
    ) -> Result<T, TrafficError> {
        let patience = if self.is_late() {
            Duration::ZERO
        } else {
            self.patience
        };
        let traffic = Arc::clone(&self.traffic);
        let (tell, told) = mpsc::channel();
        let job = move || {
            let mut traffic = traffic.lock().unwrap_or_else(PoisonError::into_inner);
            let result = opened(&mut traffic).and_then(change);
            // The main thread may have stopped waiting.
            let _ = tell.send(result);
        };
        self.threads.add(None, WaitsFor::Network, Box::new(job));
        told.recv_timeout(patience).unwrap_or_else(|_| {
            self.is_free = Some(self.when_done());
            self.is_behind = true;
            Err(TrafficError::Held)
        })
    }
}

fn opened(traffic: &mut Option<Traffic>) -> Result<&mut Traffic, TrafficError> {
    match traffic {
        Some(traffic) => Ok(traffic),
        none => Ok(none.insert(Traffic::open()?)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// The thread waits for the sender's end, as for a lock.
    fn held(traffic: &mut TrafficThread) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let result = traffic.ask(move |_| {
            let _ = released.recv();
            Ok(())
        });
        assert!(matches!(result, Err(TrafficError::Held)));
        release
    }

    #[test]
    fn who_waits_for_the_thread_waits_for_a_moment() {
        let mut traffic = TrafficThread::default();
        traffic.begin_service();
        assert_eq!(traffic.ask(|_| Ok(1)).unwrap(), 1);
        assert_eq!(traffic.was_behind(), Some(false));
        let start = Instant::now();
        let release = held(&mut traffic);
        let (tell, told) = mpsc::channel();
        for number in 0..100 {
            let tell = tell.clone();
            let left_out = traffic.ask(move |_| -> Result<(), TrafficError> {
                panic!("{number}: nothing is begun that has no answer")
            });
            assert!(matches!(left_out, Err(TrafficError::Held)));
            let begun = traffic.ensure(move |_| {
                tell.send(number).unwrap();
                Ok(())
            });
            assert!(matches!(begun, Err(TrafficError::Held)));
        }
        assert!(start.elapsed() < Duration::from_secs(1));
        assert_eq!(traffic.was_behind(), None);
        let done = traffic.when_done();
        drop(release);
        done.recv().unwrap();
        let all: Vec<i32> = told.try_iter().collect();
        assert_eq!(all, (0..100).collect::<Vec<_>>(), "in their order");
        assert_eq!(traffic.was_behind(), Some(true));
        assert_eq!(traffic.was_behind(), Some(false));
        assert_eq!(traffic.ask(|_| Ok(2)).unwrap(), 2);
    }
}
