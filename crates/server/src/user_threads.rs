//! Threads for operations whose duration others control: closes, and calls on objects shared with programs. Each user has
//! a few threads for each kind of operation, so that one that never ends affects neither other users nor the number of
//! threads.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::error;

/// Threads of each user for each kind.
const THREADS: usize = 4;

/// How long a thread without a job waits for another one: programs that fork for each connection end one after the other.
const LINGER: Duration = Duration::from_secs(1);

/// One thread: the server's own changes of the network configuration keep their order.
const OF_NETWORK: usize = 1;

/// What a job may block on. Jobs of different kinds do not delay each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WaitsFor {
    /// The end of a file or a socket.
    Close,
    /// The lock of a socket shared with programs.
    Socket,
    /// rtnl, which the kernel takes for group memberships and devices.
    Network,
    /// The lock of control groups.
    ControlGroups,
}

/// `None`: the server itself.
type Whose = (Option<u32>, WaitsFor);

pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug, Default)]
pub(crate) struct UserThreads {
    queues: Mutex<HashMap<Whose, Queue>>,
    /// Jobs of all users, those in progress included.
    count: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// When a job was begun last, or came while none waited.
    proceeded: Option<Instant>,
    threads: usize,
    /// Threads that wait for a job.
    idle: usize,
    arrival: Arc<Condvar>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} waiting, {} threads",
            self.jobs.len(),
            self.threads
        )
    }
}

impl UserThreads {
    /// Queues a job for a thread of the user.
    pub(crate) fn add(self: &Arc<UserThreads>, uid: Option<u32>, waits_for: WaitsFor, job: Job) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let whose = (uid, waits_for);
        let mut queues = self.queues();
        let queue = queues.entry(whose).or_default();
        if queue.jobs.is_empty() {
            queue.proceeded = Some(Instant::now());
        }
        queue.jobs.push_back(job);
        if queue.jobs.len() <= queue.idle {
            queue.arrival.notify_one();
        } else {
            self.start_thread(whose, queue);
        }
    }

    /// Retries to start threads where the kernel refused one.
    pub(crate) fn try_again(self: &Arc<UserThreads>) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        for (whose, queue) in self.queues().iter_mut() {
            if queue.threads == 0 {
                self.start_thread(*whose, queue);
            }
        }
    }

    fn start_thread(self: &Arc<UserThreads>, whose: Whose, queue: &mut Queue) {
        let most = match whose {
            (None, WaitsFor::Network) => OF_NETWORK,
            _ => THREADS,
        };
        if queue.threads >= most {
            return;
        }
        let theirs = Arc::clone(self);
        let started = thread::Builder::new().spawn(move || while theirs.do_next(whose) {});
        queue.threads += usize::from(started.is_ok());
    }

    /// Runs the next job. Returns false if there was none for a while: then the thread ends.
    fn do_next(&self, whose: Whose) -> bool {
        let Some(job) = self.await_job(whose) else {
            return false;
        };
        // The panic itself is in the log; the objects of a job are its own.
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            error!(?whose, "a job has not ended well");
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
        true
    }

    fn await_job(&self, whose: Whose) -> Option<Job> {
        let mut queues = self.queues();
        let mut has_waited = false;
        loop {
            let queue = queues.get_mut(&whose)?;
            if let Some(job) = queue.jobs.pop_front() {
                queue.proceeded = Some(Instant::now());
                return Some(job);
            }
            if has_waited {
                queue.threads -= 1;
                if queue.threads == 0 {
                    queues.remove(&whose);
                }
                return None;
            }
            queue.idle += 1;
            let arrival = Arc::clone(&queue.arrival);
            let waited = arrival.wait_timeout(queues, LINGER);
            let (locked, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
            queues = locked;
            has_waited = outcome.timed_out();
            queues.get_mut(&whose)?.idle -= 1;
        }
    }

    /// Returns the number of queued jobs of the user.
    pub(crate) fn waiting(&self, uid: Option<u32>, waits_for: WaitsFor) -> usize {
        if self.count.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let queues = self.queues();
        queues
            .get(&(uid, waits_for))
            .map_or(0, |queue| queue.jobs.len())
    }

    /// Returns for how long no job of the user has been begun, although some are queued.
    pub(crate) fn stands_still_for(&self, uid: Option<u32>, waits_for: WaitsFor) -> Duration {
        let queues = self.queues();
        let queue = queues.get(&(uid, waits_for));
        let waits = queue.filter(|queue| !queue.jobs.is_empty());
        let since = waits.and_then(|queue| queue.proceeded);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// No thread panics while it holds the lock.
    fn queues(&self) -> MutexGuard<'_, HashMap<Whose, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PROMPTLY: Duration = Duration::from_secs(10);

    fn await_waiting(threads: &UserThreads, count: usize) {
        let start = Instant::now();
        while threads.waiting(Some(1), WaitsFor::Close) != count {
            assert!(start.elapsed() < PROMPTLY, "{threads:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_waits_keeps_only_its_users_like_waiting() {
        let threads = Arc::new(UserThreads::default());
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for _ in 0..10 {
            let released = Arc::clone(&released);
            let wait = move || {
                // Ends when all that could be sent is gone.
                let _ = released.lock().map(|released| released.recv());
            };
            threads.add(Some(1), WaitsFor::Close, Box::new(wait));
        }
        await_waiting(&threads, 10 - THREADS);
        let (done, is_done) = mpsc::channel();
        for (uid, waits_for) in [
            (Some(1), WaitsFor::Socket),
            (Some(2), WaitsFor::Close),
            (None, WaitsFor::Close),
        ] {
            let done = done.clone();
            threads.add(uid, waits_for, Box::new(move || done.send(uid).unwrap()));
        }
        let mut all: Vec<_> = (0..3)
            .map(|_| is_done.recv_timeout(PROMPTLY).unwrap())
            .collect();
        all.sort_unstable();
        assert_eq!(all, [None, Some(1), Some(2)]);
        thread::sleep(Duration::from_millis(10));
        let stands_still = || threads.stands_still_for(Some(1), WaitsFor::Close);
        assert!(stands_still() >= Duration::from_millis(10));
        drop(release);
        await_waiting(&threads, 0);
        assert_eq!(stands_still(), Duration::ZERO);
    }

    #[test]
    fn a_job_that_panics_takes_no_thread_with_it() {
        let threads = Arc::new(UserThreads::default());
        for _ in 0..2 * THREADS {
            threads.add(
                Some(1),
                WaitsFor::Close,
                Box::new(|| panic!("as it should")),
            );
        }
        let (done, is_done) = mpsc::channel();
        let job = move || done.send(()).unwrap();
        threads.add(Some(1), WaitsFor::Close, Box::new(job));
        is_done.recv_timeout(PROMPTLY).unwrap();
        let start = Instant::now();
        while threads.count.load(Ordering::Relaxed) > 0 {
            assert!(start.elapsed() < PROMPTLY, "{threads:?}");
            thread::yield_now();
        }
    }

    #[test]
    fn jobs_one_after_the_other_share_a_thread_which_ends_later() {
        let threads = Arc::new(UserThreads::default());
        let (done, is_done) = mpsc::channel();
        let mut names = Vec::new();
        for _ in 0..10 {
            let done = done.clone();
            let job = move || done.send(thread::current().id()).unwrap();
            threads.add(Some(1), WaitsFor::Close, Box::new(job));
            names.push(is_done.recv_timeout(PROMPTLY).unwrap());
            let start = Instant::now();
            while threads.queues()[&(Some(1), WaitsFor::Close)].idle != 1 {
                assert!(start.elapsed() < PROMPTLY, "{threads:?}");
                thread::yield_now();
            }
        }
        names.dedup();
        assert_eq!(names.len(), 1);
        let start = Instant::now();
        while !threads.queues().is_empty() {
            assert!(start.elapsed() < PROMPTLY, "{threads:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn the_server_changes_the_network_in_order() {
        let threads = Arc::new(UserThreads::default());
        let (done, is_done) = mpsc::channel();
        for number in 0..100 {
            let done = done.clone();
            let job = move || done.send(number).unwrap();
            threads.add(None, WaitsFor::Network, Box::new(job));
        }
        let all: Vec<i32> = (0..100)
            .map(|_| is_done.recv_timeout(PROMPTLY).unwrap())
            .collect();
        assert!(all.is_sorted(), "{all:?}");
    }
}
