//! Which threads each reservation covers: its thread, the threads of its process, or of all Portolan processes of its
//! user or cgroup. A thread belongs to the narrowest reservation that covers it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use portolan_control::Process;
use portolan_control::qos::cpu::MemberId;
use portolan_proto::qos::Scope;
use portolan_sys::sched;

use super::reservation::{CpuReservation, Subject};
use super::{MOST_THREADS, MOST_THREADS_OF_MANY};
use crate::qos::scope::{breadth, covers_process};

/// The threads of one reservation, by process.
#[derive(Debug, Default)]
pub(super) struct ProcessThreads {
    processes: BTreeMap<u32, Vec<u32>>,
    /// If set, the number of its threads that are covered; the others are not.
    pub leaves_out: Option<usize>,
}

impl ProcessThreads {
    pub(super) fn threads(&self) -> impl Iterator<Item = (u32, u32)> {
        let threads = |(pid, tids): (&u32, &Vec<u32>)| {
            let pid = *pid;
            tids.clone().into_iter().map(move |tid| (pid, tid))
        };
        self.processes.iter().flat_map(threads)
    }

    pub(super) fn has(&self, pid: u32, tid: u32) -> bool {
        let tids = self.processes.get(&pid);
        tids.is_some_and(|tids| tids.contains(&tid))
    }

    fn count(&self) -> usize {
        self.processes.values().map(Vec::len).sum()
    }

    /// Adds a process with its threads; `own` are threads with reservations of their own.
    fn add(&mut self, pid: u32, own: &BTreeSet<u32>) {
        let most = MOST_THREADS.min(MOST_THREADS_OF_MANY - self.count());
        let mut tids = sched::threads_of(pid, MOST_THREADS + 1);
        tids.retain(|tid| !own.contains(tid));
        if tids.len() > most {
            tids.truncate(most);
            self.leaves_out = Some(self.count() + most);
        }
        self.processes.insert(pid, tids);
    }
}

/// Returns the threads of each reservation; `served` are the processes that run with Portolan.
pub(super) fn crews<'a>(
    all: &BTreeMap<MemberId, CpuReservation>,
    served: impl Iterator<Item = &'a Process>,
) -> BTreeMap<MemberId, ProcessThreads> {
    let own: BTreeSet<u32> = all
        .values()
        .filter_map(CpuReservation::own_thread)
        .collect();
    let mut crews: BTreeMap<MemberId, ProcessThreads> = BTreeMap::new();
    let mut processes = BTreeSet::new();
    for (id, reservation) in all {
        let process_threads = crews.entry(*id).or_default();
        match reservation.subject {
            // Which process it belongs to does not matter.
            Subject::Thread { tid, .. } => drop(process_threads.processes.insert(tid, vec![tid])),
            Subject::Process { pid, .. } => {
                process_threads.add(pid, &own);
                processes.insert(pid);
            }
            Subject::Many => {}
        }
    }
    let has_many = all.values().any(|one| one.subject == Subject::Many);
    for process in served.filter(|process| has_many && !processes.contains(&process.pid)) {
        if let Some(process_threads) = narrowest(all, process).and_then(|id| crews.get_mut(&id)) {
            process_threads.add(process.pid, &own);
        }
    }
    crews
}

/// The reservation of a cgroup takes precedence over its user's, and that of an inner cgroup over an outer one's.
fn narrowest(all: &BTreeMap<MemberId, CpuReservation>, process: &Process) -> Option<MemberId> {
    let many = all.iter().filter(|(_, one)| one.subject == Subject::Many);
    let covering = many.filter(|(_, one)| covers_process(&one.scope, process));
    covering
        .min_by_key(|(_, one)| (breadth(&one.scope), Reverse(depth(&one.scope))))
        .map(|(id, _)| *id)
}

fn depth(scope: &Scope) -> usize {
    match scope {
        Scope::Cgroup(path) => path.len(),
        _ => 0,
    }
}
