//! CPU reservations (MS §V): who has one, how its rate is divided among threads, and its measured use each second.

mod keep;
mod ledger;
mod process_threads;
mod reservation;
mod serve;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use keep::{CpuParameters, ThreadReservation};
use ledger::Ledger;
use portolan_control::Registry;
use portolan_control::qos::cpu::{Capacity, Classes, CpuClaim, Denied, MemberId};
use portolan_proto::qos::{Adapt, Cpu, CpuReport, Scope};
use portolan_sys::sched;
use portolan_types::Instant;
use process_threads::crews;
use reservation::{CpuReservation, Subject};
use tracing::{info, warn};

use super::scope::Life;
use crate::config::Config;
use crate::instance::{Journal, LifeRecord, ThreadRecord};
use crate::qos::request::{Outcome, Requester, refuse};

/// How often threads are checked: whether they still run, and what they have used.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What the kernel reserves of each CPU for ordinary threads: the fair server's 50 ms of each second (Linux 6.12).
const KEPT_FOR_OTHERS_PPM: u32 = 50_000;

/// Limits of reservations, in total and for a user other than root: each thread is checked each second.
const MOST: usize = 256;
const MOST_OF_USER: usize = 16;

/// Threads of one process that share its rate; further ones get none of it.
const MOST_THREADS: usize = 128;
/// The same for all processes of a user or cgroup.
const MOST_THREADS_OF_MANY: usize = 512;

/// All CPU reservations of this server.
#[derive(Debug)]
pub(super) struct Reservations {
    capacity: Capacity,
    classes: Classes,
    /// None if this server knows of no other.
    ledger: Option<Ledger>,
    all: BTreeMap<MemberId, CpuReservation>,
    next: u64,
    look_at: Instant,
    looked_at: Instant,
    journal: Option<Journal>,
    /// Contents of the journal.
    noted: (Vec<LifeRecord>, Vec<ThreadRecord>),
}

impl Reservations {
    pub(super) fn new(config: &Config) -> Reservations {
        let capacity = Capacity {
            cpus: sched::cpus(),
            of_one_ppm: sched::limit_ppm().saturating_sub(KEPT_FOR_OTHERS_PPM),
        };
        Reservations {
            capacity,
            classes: Classes::new(capacity, config.cpu_classes()),
            ledger: open_ledger(&config.qos.cpu_ledger),
            all: BTreeMap::new(),
            next: 0,
            look_at: Instant::ZERO,
            looked_at: Instant::ZERO,
            journal: None,
            noted: (Vec::new(), Vec::new()),
        }
    }

    /// Records all processes and threads that are given CPU time, before they get it, and what some had before.
    fn note(&mut self) {
        let threads = self.all.values().flat_map(|held| &held.threads);
        let mut numbers: Vec<u32> = threads.map(|kept| kept.pid).collect();
        numbers.dedup();
        let lives = numbers.into_iter().filter_map(Life::of);
        let lives: Vec<LifeRecord> = lives.map(Life::record).collect();
        let threads = self.all.values().flat_map(|held| &held.threads);
        let threads: Vec<ThreadRecord> = threads.filter_map(ThreadReservation::note).collect();
        let notes = (lives, threads);
        if notes == self.noted {
            return;
        }
        self.noted.clone_from(&notes);
        let noted = self
            .journal
            .as_ref()
            .map(|journal| journal.record_cpu(notes.0, notes.1));
        if let Some(Err(error)) = noted {
            warn!(%error, "reserved CPU time would stay if this server died");
        }
    }

    /// Checks that the requester may change the reservation: root's only root may.
    fn may_change(&self, requester: Requester, scope: &Scope) -> Outcome {
        let uid = requester.credentials.uid;
        match self.of_scope(scope).and_then(|id| self.all.get(&id)) {
            Some(held) if uid != 0 && uid != held.uid => refuse(
                libc::EPERM,
                format!("{scope} was given its CPU time by another user"),
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn has(&self, scope: &Scope) -> bool {
        self.of_scope(scope).is_some()
    }

    fn of_scope(&self, scope: &Scope) -> Option<MemberId> {
        let found = self
            .all
            .iter()
            .find(|(_, reservation)| reservation.scope == *scope);
        found.map(|(id, _)| *id)
    }

    fn reserve(
        &mut self,
        (now, registry): (Instant, &Registry),
        uid: u32,
        scope: Scope,
        spec: Cpu,
    ) -> Outcome {
        check_spec(&spec)?;
        let subject = Subject::of(&scope)?;
        // Ended processes and threads do not stand in the way.
        self.forget_ended();
        let former = self.of_scope(&scope);
        if former.is_none() {
            self.has_room(uid)?;
        }
        let id = former.unwrap_or(MemberId(self.next));
        self.admit(id, uid, subject, &spec)?;
        self.next += 1;
        if self.all.is_empty() {
            (self.looked_at, self.look_at) = (now, now + LOOK_EVERY);
        }
        let former = self.all.remove(&id);
        let threads = former.map_or(Vec::new(), |former| former.threads);
        let reservation = CpuReservation::new((scope, subject), uid, spec, threads);
        self.all.insert(id, reservation);
        self.settle(registry);
        self.confirm(id, registry)
    }

    fn has_room(&self, uid: u32) -> Outcome {
        let his = self
            .all
            .values()
            .filter(|reservation| reservation.uid == uid);
        if self.all.len() >= MOST || uid != 0 && his.count() >= MOST_OF_USER {
            let most = if uid == 0 { MOST } else { MOST_OF_USER };
            return refuse(
                libc::ENOSPC,
                format!("there are {most} CPU reservations already"),
            );
        }
        Ok(())
    }

    fn admit(&mut self, id: MemberId, uid: u32, subject: Subject, spec: &Cpu) -> Outcome {
        let claim = CpuClaim {
            uid,
            nominal_ppm: spec.rate_ppm,
            usable_ppm: u64::from(subject.cpus(self.capacity))
                * u64::from(self.capacity.of_one_ppm),
        };
        let class = spec.class.as_deref();
        let admitted = self.beside_others(|classes| classes.admit(id, class, claim));
        match admitted {
            Ok(Ok(())) => Ok(()),
            Ok(Err(denied)) => refuse(errno_of(&denied), denied.to_string()),
            Err(error) => refuse(
                libc::EAGAIN,
                format!("what other servers of this machine have promised is not known: {error}"),
            ),
        }
    }

    /// Changes what this server promises, under the ledger's lock, and tells the other servers.
    fn beside_others<T>(&mut self, change: impl FnOnce(&mut Classes) -> T) -> io::Result<T> {
        let classes = &mut self.classes;
        let Some(ledger) = &mut self.ledger else {
            return Ok(change(classes));
        };
        ledger.exchange(|others| {
            classes.set_others(others);
            (change(classes), classes.standing())
        })
    }

    /// Reads what other servers promise, which changes what this server gives.
    fn hear_others(&mut self) {
        if let Err(error) = self.beside_others(|_| ()) {
            warn!(%error, "what other servers of this machine have promised is not known");
        }
    }

    /// Ends a reservation that the kernel keeps in no form.
    fn confirm(&mut self, id: MemberId, registry: &Registry) -> Outcome {
        let reservation = &self.all[&id];
        match reservation.failure() {
            None => {
                let form = reservation.form();
                info!(scope = %reservation.scope, ?form, "CPU reserved");
                Ok(())
            }
            Some(reason) => {
                self.end(id);
                self.settle(registry);
                refuse(libc::EPERM, reason)
            }
        }
    }

    /// Checks the threads if due. Returns when to check again.
    fn look(&mut self, now: Instant, registry: &Registry) -> Option<Instant> {
        if self.all.is_empty() {
            return None;
        }
        if self.look_at <= now {
            self.forget_ended();
            self.measure(now.since(self.looked_at));
            self.adapt();
            self.settle(registry);
            (self.looked_at, self.look_at) = (now, now + LOOK_EVERY);
        }
        Some(self.look_at)
    }

    fn forget_ended(&mut self) {
        let ended = self
            .all
            .iter()
            .filter(|(_, reservation)| !reservation.subject.lasts());
        let ended: Vec<MemberId> = ended.map(|(id, _)| *id).collect();
        for id in ended {
            self.end(id);
        }
    }

    fn measure(&mut self, passed: Duration) {
        for reservation in self.all.values_mut() {
            reservation.measure(passed);
        }
    }

    /// Adapts rates to their use where requested, as far as there is room.
    fn adapt(&mut self) {
        let ids: Vec<MemberId> = self.all.keys().copied().collect();
        for id in ids {
            let effective = self.classes.effective(id);
            let room = self.classes.room_of(id);
            let Some(reservation) = self.all.get_mut(&id) else {
                continue;
            };
            let Some(better) = reservation.propose(effective) else {
                continue;
            };
            let better = better.min(u32::try_from(room).unwrap_or(u32::MAX));
            let spec = Cpu {
                rate_ppm: better,
                ..reservation.spec.clone()
            };
            let (uid, subject) = (reservation.uid, reservation.subject);
            if better != reservation.spec.rate_ppm && self.admit(id, uid, subject, &spec).is_ok() {
                self.all
                    .entry(id)
                    .and_modify(|reservation| reservation.take_up(spec));
            }
        }
    }

    /// Gives each thread its part of its reservation's effective rate. Reductions are applied first, so that the
    /// kernel never has to give more than there is.
    fn settle(&mut self, registry: &Registry) {
        self.hear_others();
        let crews = crews(&self.all, registry.processes());
        for (id, reservation) in &mut self.all {
            reservation.release(&crews[id]);
        }
        for (id, reservation) in &mut self.all {
            reservation.add(&crews[id]);
        }
        self.note();
        let mut changes = Vec::new();
        for (id, reservation) in &self.all {
            let rates = reservation.rates(self.classes.effective(*id), self.capacity);
            for (index, rate_ppm) in rates.into_iter().enumerate() {
                let gain = i64::from(rate_ppm) - i64::from(reservation.threads[index].rate_ppm());
                changes.push((gain, *id, index, rate_ppm));
            }
        }
        changes.sort_unstable();
        for (_, id, index, rate_ppm) in changes {
            if let Some(reservation) = self.all.get_mut(&id) {
                let terms = CpuParameters {
                    rate_ppm,
                    period: Duration::from_micros(reservation.spec.period_us.into()),
                    slack: reservation.spec.slack,
                };
                reservation.threads[index].keep(terms);
            }
        }
        self.settle_weakly();
    }

    /// Applies weaker forms to threads whose reservation the kernel refuses.
    fn settle_weakly(&mut self) {
        let mut threads = self.all.values().flat_map(|held| &held.threads);
        if !threads.any(ThreadReservation::wants_weaker) {
            return;
        }
        self.note();
        let threads = self.all.values_mut().flat_map(|held| &mut held.threads);
        threads.for_each(ThreadReservation::keep_weakly);
    }

    fn report(&self, id: MemberId) -> CpuReport {
        let reservation = &self.all[&id];
        let effective = self.classes.effective(id);
        CpuReport {
            scope: reservation.scope.clone(),
            uid: reservation.uid,
            spec: reservation.spec.clone(),
            effective_ppm: u32::try_from(effective).unwrap_or(u32::MAX),
            used_ppm: reservation.used_ppm,
            overruns: reservation.overruns,
            proposed_ppm: reservation.proposed_ppm,
            form: reservation.form(),
        }
    }

    fn end(&mut self, id: MemberId) {
        self.classes.remove(id);
        if let Some(mut reservation) = self.all.remove(&id) {
            info!(scope = %reservation.scope, "CPU reservation ended");
            reservation
                .threads
                .iter_mut()
                .for_each(ThreadReservation::release);
            self.note();
        }
    }

    fn end_all(&mut self) {
        while let Some(id) = self.all.keys().next().copied() {
            self.end(id);
        }
    }
}

fn open_ledger(folder: &Path) -> Option<Ledger> {
    let opened = Ledger::open(folder);
    if let Err(error) = &opened {
        let folder = folder.display();
        warn!(%error, %folder, "other servers of this machine may promise the same CPU time");
    }
    opened.ok()
}

fn errno_of(denied: &Denied) -> i32 {
    match denied {
        Denied::ClassFull { .. } | Denied::UserFull { .. } | Denied::MachineFull { .. } => {
            libc::EBUSY
        }
        Denied::RootOnly(_) => libc::EPERM,
        _ => libc::EINVAL,
    }
}

fn check_spec(spec: &Cpu) -> Outcome {
    let periods = sched::PERIODS_US;
    if !periods.contains(&spec.period_us) {
        let (least, most) = (periods.start(), periods.end());
        return refuse(libc::EINVAL, format!("a period is {least} to {most} µs"));
    }
    match spec.adapt {
        Adapt::Auto {
            least_ppm,
            most_ppm,
        } if least_ppm == 0 || least_ppm > most_ppm => {
            refuse(libc::EINVAL, "the limits of adaptation are none")
        }
        _ => Ok(()),
    }
}
