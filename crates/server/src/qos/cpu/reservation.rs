//! One CPU reservation: its subject, its threads, and what each of them gets.

use std::time::Duration;

use portolan_control::qos::cpu::{Adaptation, Capacity, Measured, divide};
use portolan_proto::qos::{Adapt, Cpu, CpuForm, Scope};
use tracing::info;

use super::keep::ThreadReservation;
use super::process_threads::ProcessThreads;
use super::{LOOK_EVERY, MOST_THREADS, MOST_THREADS_OF_MANY};
use crate::qos::request::{Outcome, refuse};
use crate::qos::scope::Life;

#[derive(Debug)]
pub(super) struct CpuReservation {
    pub scope: Scope,
    pub subject: Subject,
    pub uid: u32,
    pub spec: Cpu,
    /// Sorted by process.
    pub threads: Vec<ThreadReservation>,
    /// If set, the number of its threads that are covered; the others are not.
    pub leaves_out: Option<usize>,
    adaptation: Adaptation,
    pub used_ppm: u32,
    pub overruns: u32,
    pub proposed_ppm: Option<u32>,
}

/// The subject of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Thread {
        tid: u32,
        life: Life,
    },
    Process {
        pid: u32,
        life: Life,
    },
    /// All processes of a user or cgroup that run with Portolan, as they start and end.
    Many,
}

impl Subject {
    pub(super) fn of(scope: &Scope) -> Outcome<Subject> {
        let subject = match *scope {
            Scope::Thread { tid } => Life::of(tid).map(|life| Subject::Thread { tid, life }),
            Scope::Process { pid } => Life::of(pid).map(|life| Subject::Process { pid, life }),
            Scope::User { .. } | Scope::Cgroup(_) => Some(Subject::Many),
            Scope::Flow(_) | Scope::Port { .. } => {
                let reason = "CPU time is reserved for threads, processes, users and cgroups";
                return refuse(libc::EOPNOTSUPP, reason);
            }
        };
        match subject {
            Some(subject) => Ok(subject),
            None => refuse(libc::ESRCH, format!("there is no {scope}")),
        }
    }

    /// Returns whether the subject still exists; users and cgroups last until the reservation is deleted.
    pub(super) fn lasts(&self) -> bool {
        match self {
            Subject::Thread { life, .. } | Subject::Process { life, .. } => life.lasts(),
            Subject::Many => true,
        }
    }

    /// Returns how many CPUs it can use at once.
    pub(super) fn cpus(&self, capacity: Capacity) -> u32 {
        match self {
            Subject::Thread { .. } => 1,
            Subject::Process { .. } | Subject::Many => capacity.cpus,
        }
    }
}

impl CpuReservation {
    /// Makes a reservation with the threads of its predecessor.
    pub(super) fn new(
        (scope, subject): (Scope, Subject),
        uid: u32,
        spec: Cpu,
        threads: Vec<ThreadReservation>,
    ) -> Self {
        CpuReservation {
            scope,
            subject,
            uid,
            spec,
            threads,
            leaves_out: None,
            adaptation: Adaptation::default(),
            used_ppm: 0,
            overruns: 0,
            proposed_ppm: None,
        }
    }

    /// Returns the thread of a thread's reservation, which no other reservation covers.
    pub(super) fn own_thread(&self) -> Option<u32> {
        match self.subject {
            Subject::Thread { tid, .. } => Some(tid),
            Subject::Process { .. } | Subject::Many => None,
        }
    }

    /// Restores the scheduling of threads that it no longer covers, so that other reservations can take them.
    pub(super) fn release(&mut self, process_threads: &ProcessThreads) {
        let (stay, mut go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.threads)
            .into_iter()
            .partition(|kept| process_threads.has(kept.pid, kept.tid) && kept.life.lasts());
        go.iter_mut().for_each(ThreadReservation::release);
        self.threads = stay;
    }

    /// Adds new threads. [`CpuReservation::release`] of all reservations must come first.
    pub(super) fn add(&mut self, process_threads: &ProcessThreads) {
        self.leaves_out = process_threads.leaves_out;
        for (pid, tid) in process_threads.threads() {
            if !self.threads.iter().any(|kept| kept.tid == tid) {
                self.threads.extend(ThreadReservation::of(pid, tid));
            }
        }
        self.threads.sort_by_key(|kept| kept.pid);
    }

    /// Returns what each thread gets of an effective rate: it is divided among processes by their use, and among
    /// the threads of each likewise.
    pub(super) fn rates(&self, effective_ppm: u64, capacity: Capacity) -> Vec<u32> {
        let processes = || self.threads.chunk_by(|one, next| one.pid == next.pid);
        let used: Vec<u64> = processes()
            .map(|threads| threads.iter().map(ThreadReservation::used).sum())
            .collect();
        let parts = divide(effective_ppm, &used, capacity.ppm());
        let rates = processes().zip(parts).flat_map(|(threads, part)| {
            let used: Vec<u64> = threads.iter().map(ThreadReservation::used).collect();
            divide(part, &used, capacity.of_one_ppm.into())
        });
        // None exceeds the capacity of one CPU.
        rates.map(|rate| rate as u32).collect()
    }

    /// Returns why the kernel keeps it in no form. A user's or cgroup's reservation waits for suitable processes.
    pub(super) fn failure(&self) -> Option<String> {
        match self.subject {
            Subject::Many => None,
            _ => self.threads.iter().find_map(ThreadReservation::failure),
        }
    }

    pub(super) fn measure(&mut self, passed: Duration) {
        let (mut used, mut overruns) = (Duration::ZERO, 0);
        for thread in &mut self.threads {
            let seen = thread.measure(passed);
            used += seen.used;
            overruns += seen.overruns;
        }
        let used = used.as_secs_f64() / passed.as_secs_f64().max(1e-3);
        // The conversion from float saturates.
        self.used_ppm = (used * 1e6) as u32;
        self.overruns = overruns;
    }

    fn periods_of(&self, passed: Duration) -> u32 {
        (passed.as_micros() / u128::from(self.spec.period_us.max(1))) as u32
    }

    /// Returns a rate to apply at once; one that is only to be shown is stored.
    pub(super) fn propose(&mut self, effective_ppm: u64) -> Option<u32> {
        self.proposed_ppm = None;
        if self.spec.adapt == Adapt::Off {
            return None;
        }
        let measured = Measured {
            used_ppm: self.used_ppm,
            overruns: self.overruns,
            periods: self.periods_of(LOOK_EVERY),
        };
        self.proposed_ppm = self.adaptation.propose(&self.spec, effective_ppm, measured);
        self.proposed_ppm
            .filter(|_| matches!(self.spec.adapt, Adapt::Auto { .. }))
    }

    pub(super) fn take_up(&mut self, spec: Cpu) {
        info!(
            scope = %self.scope,
            rate_ppm = spec.rate_ppm,
            "CPU rate adapted"
        );
        self.spec = spec;
        self.proposed_ppm = None;
        self.adaptation.start_over();
    }

    /// Returns the weakest form of its threads.
    pub(super) fn form(&self) -> CpuForm {
        if let Some(weaker) = self.threads.iter().find_map(ThreadReservation::weaker) {
            return weaker;
        }
        let (form, reason) = match (self.leaves_out, self.subject) {
            (Some(most), _) => (
                format!("SCHED_DEADLINE for {most} of its threads"),
                format!(
                    "a rate is divided among {MOST_THREADS} threads of a process, and {MOST_THREADS_OF_MANY} in all"
                ),
            ),
            (None, Subject::Many) if self.threads.is_empty() => (
                "none yet".to_owned(),
                format!("no process of {} runs with Portolan", self.scope),
            ),
            (None, _) => return CpuForm::Deadline,
        };
        CpuForm::Weaker { form, reason }
    }
}
