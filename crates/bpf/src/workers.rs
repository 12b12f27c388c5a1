//! Threads for writes to maps of maps. The kernel does such a write at once and then waits tens of milliseconds until
//! no program uses the former entry; the waits of several threads overlap.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long an idle thread lives.
const LINGER: Duration = Duration::from_secs(2);

type Job = Box<dyn FnOnce() + Send>;

/// A bounded number of threads; further jobs are queued.
pub(crate) struct Workers {
    most: usize,
    state: Mutex<State>,
    job_queued: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Number of threads that wait for a job.
    idle: usize,
}

impl Workers {
    pub(crate) fn up_to(most: usize) -> Arc<Workers> {
        Arc::new(Workers {
            most,
            state: Mutex::default(),
            job_queued: Condvar::new(),
        })
    }

    /// Queues a job; never blocks. If no thread can be started, it stays queued until one is, or [`Workers::work_off`]
    /// runs.
    pub(crate) fn begin(self: &Arc<Workers>, job: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.jobs.push_back(Box::new(job));
        if state.jobs.len() <= state.idle {
            self.job_queued.notify_one();
        } else if state.threads < self.most {
            let theirs = Arc::clone(self);
            let started = thread::Builder::new().spawn(move || theirs.work());
            state.threads += usize::from(started.is_ok());
        }
    }

    /// Runs queued jobs in this thread if there are no workers.
    pub(crate) fn work_off(&self) {
        loop {
            let mut state = self.state();
            if state.threads > 0 {
                return;
            }
            let Some(job) = state.jobs.pop_front() else {
                return;
            };
            drop(state);
            job();
        }
    }

    fn work(&self) {
        while let Some(job) = self.next_job() {
            job();
        }
    }

    /// Returns the next job; none if the thread should end.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.state();
        if state.jobs.is_empty() {
            state.idle += 1;
            let waited = self
                .job_queued
                .wait_timeout_while(state, LINGER, |state| state.jobs.is_empty());
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
        let job = state.jobs.pop_front();
        state.threads -= usize::from(job.is_none());
        job
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::mpsc;

    #[test]
    fn jobs_run_side_by_side_up_to_the_bound_and_none_is_forgotten() {
        const MOST: usize = 4;
        let workers = Workers::up_to(MOST);
        let all_at_once = Arc::new(Barrier::new(MOST));
        let (done, ends) = mpsc::channel();
        for number in 0..MOST * 50 {
            let (done, barrier) = (done.clone(), Arc::clone(&all_at_once));
            workers.begin(move || {
                barrier.wait();
                done.send(number).expect("the test takes it");
            });
            assert!(workers.state().threads <= MOST);
        }
        let mut ended: Vec<usize> = ends.iter().take(MOST * 50).collect();
        ended.sort_unstable();
        assert!(ended.into_iter().eq(0..MOST * 50));
    }

    #[test]
    fn without_threads_whoever_waits_does_the_work() {
        let workers = Workers::up_to(0);
        let (done, ends) = mpsc::channel();
        workers.begin(move || done.send(()).expect("the test takes it"));
        assert!(ends.try_recv().is_err());
        workers.work_off();
        assert!(ends.try_recv().is_ok());
    }
}
