//! CPU reservations (MS §V): who has one, what of it each thread gets, and what is seen of its use each second.

mod keep;

use std::collections::BTreeMap;
use std::time::Duration;

use portolan_control::qos::cpu::{
    Adaptation, Capacity, Claim, Classes, Denied, Measured, MemberId,
};
use portolan_control::qos::cpu::{ClassTerms, divide};
use portolan_proto::qos::{Adapt, Cpu, CpuForm, CpuReport, QosReport, Scope};
use portolan_sys::sched;
use portolan_types::Instant;
use tracing::{info, warn};

use super::scope::Life;
use super::{Asker, Outcome, refuse};
use crate::instance::{Instance, Journal};
use crate::server::Server;
use keep::{Kept, Terms};

/// How often threads are looked at: whether they live, and what they have used.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What the kernel keeps of each CPU for ordinary threads: the fair server's 50 ms of each second (Linux 6.12).
const KEPT_FOR_OTHERS_PPM: u32 = 50_000;

/// Each thread is looked at each second: so many reservations there are, and of a user other than root.
const MOST: usize = 256;
const MOST_OF_USER: usize = 16;

/// Threads of one process that share its rate; further ones have none of it.
const MOST_THREADS: usize = 128;

/// All CPU reservations of this server.
#[derive(Debug)]
pub struct Reservations {
    capacity: Capacity,
    classes: Classes,
    all: BTreeMap<MemberId, Reservation>,
    next: u64,
    look_at: Instant,
    looked_at: Instant,
    journal: Option<Journal>,
}

#[derive(Debug)]
struct Reservation {
    scope: Scope,
    subject: Subject,
    uid: u32,
    wish: Cpu,
    threads: Vec<Kept>,
    /// There are more of them than [`MOST_THREADS`].
    leaves_some_out: bool,
    adaptation: Adaptation,
    used_ppm: u32,
    overruns: u32,
    proposed_ppm: Option<u32>,
}

/// Whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Thread { tid: u32, life: Life },
    Process { pid: u32, life: Life },
}

impl Subject {
    fn of(scope: &Scope) -> Outcome<Subject> {
        let subject = match *scope {
            Scope::Thread { tid } => Life::of(tid).map(|life| Subject::Thread { tid, life }),
            Scope::Process { pid } => Life::of(pid).map(|life| Subject::Process { pid, life }),
            _ => {
                let reason = "CPU time is reserved for threads and processes";
                return refuse(libc::EOPNOTSUPP, reason);
            }
        };
        match subject {
            Some(subject) => Ok(subject),
            None => refuse(libc::ESRCH, format!("there is no {scope}")),
        }
    }

    fn life(&self) -> Life {
        match *self {
            Subject::Thread { life, .. } | Subject::Process { life, .. } => life,
        }
    }
}

impl Server {
    pub(super) fn reserve_cpu(&mut self, asker: Asker, scope: Scope, wish: Cpu) -> Outcome {
        self.may_decide(asker, &scope)?;
        self.qos.cpu.may_change(asker, &scope)?;
        let (now, uid) = (self.now, asker.credentials.uid);
        self.qos.cpu.reserve(now, uid, scope, wish)
    }

    pub(super) fn end_cpu(&mut self, asker: Asker, scope: &Scope) -> Outcome {
        self.may_decide(asker, scope)?;
        let cpu = &mut self.qos.cpu;
        cpu.may_change(asker, scope)?;
        let Some(id) = cpu.of_scope(scope) else {
            return refuse(libc::ENOENT, format!("{scope} has no CPU reservation"));
        };
        cpu.end(id);
        cpu.settle();
        Ok(())
    }

    pub(super) fn report_cpu(&mut self, report: &mut QosReport) {
        let cpu = &self.qos.cpu;
        report.cpu_classes = cpu.classes.reports().collect();
        report.cpu = cpu.all.keys().map(|id| cpu.report(*id)).collect();
    }

    /// Looks at the threads when it is time. Returns when to come back.
    pub fn drive_cpu(&mut self) -> Option<Instant> {
        self.qos.cpu.drive(self.now)
    }

    /// Takes back what a server that died has left to threads.
    pub fn start_cpu(&mut self, instance: &Instance) {
        for &life in instance.leftover_cpu() {
            let life = Life::recorded(life);
            if life.lasts() {
                life.threads().into_iter().for_each(keep::take_back);
            }
        }
        self.qos.cpu.journal = Some(instance.journal());
    }

    /// Everybody is scheduled as before.
    pub fn end_all_cpu(&mut self) {
        self.qos.cpu.end_all();
    }
}

impl Reservations {
    pub fn new(classes: impl IntoIterator<Item = ClassTerms>) -> Reservations {
        let capacity = Capacity {
            cpus: sched::cpus(),
            of_one_ppm: sched::limit_ppm().saturating_sub(KEPT_FOR_OTHERS_PPM),
        };
        Reservations {
            capacity,
            classes: Classes::new(capacity, classes),
            all: BTreeMap::new(),
            next: 0,
            look_at: Instant::ZERO,
            looked_at: Instant::ZERO,
            journal: None,
        }
    }

    /// Leaves word of all who have something.
    fn note(&self) {
        let lives = self.all.values().map(|held| held.subject.life().record());
        let noted = self
            .journal
            .as_ref()
            .map(|journal| journal.record_cpu(lives.collect()));
        if let Some(Err(error)) = noted {
            warn!(%error, "reserved CPU time would stay if this server died");
        }
    }

    /// What root has reserved only root changes.
    fn may_change(&self, asker: Asker, scope: &Scope) -> Outcome {
        let uid = asker.credentials.uid;
        match self.of_scope(scope).and_then(|id| self.all.get(&id)) {
            Some(held) if uid != 0 && uid != held.uid => refuse(
                libc::EPERM,
                format!("{scope} was given its CPU time by another user"),
            ),
            _ => Ok(()),
        }
    }

    fn of_scope(&self, scope: &Scope) -> Option<MemberId> {
        let found = self
            .all
            .iter()
            .find(|(_, reservation)| reservation.scope == *scope);
        found.map(|(id, _)| *id)
    }

    fn reserve(&mut self, now: Instant, uid: u32, scope: Scope, wish: Cpu) -> Outcome {
        check_wish(&wish)?;
        let subject = Subject::of(&scope)?;
        // Who has ended since the last look does not stand in the way.
        self.forget_ended();
        let former = self.of_scope(&scope);
        if former.is_none() {
            self.has_room(uid)?;
        }
        let id = former.unwrap_or(MemberId(self.next));
        self.admit(id, uid, subject, &wish)?;
        self.next += 1;
        if self.all.is_empty() {
            (self.looked_at, self.look_at) = (now, now + LOOK_EVERY);
        }
        let threads = self
            .all
            .remove(&id)
            .map_or(Vec::new(), |former| former.threads);
        let reservation = Reservation {
            scope,
            subject,
            uid,
            wish,
            threads,
            leaves_some_out: false,
            adaptation: Adaptation::default(),
            used_ppm: 0,
            overruns: 0,
            proposed_ppm: None,
        };
        self.all.insert(id, reservation);
        // Said before it is done.
        self.note();
        self.settle();
        self.confirm(id)
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

    fn admit(&mut self, id: MemberId, uid: u32, subject: Subject, wish: &Cpu) -> Outcome {
        let cpus = match subject {
            Subject::Thread { .. } => 1,
            Subject::Process { .. } => self.capacity.cpus,
        };
        let claim = Claim {
            uid,
            nominal_ppm: wish.rate_ppm,
            usable_ppm: u64::from(cpus) * u64::from(self.capacity.of_one_ppm),
        };
        let class = wish.class.as_deref();
        self.classes.admit(id, class, claim).or_else(|denied| {
            let errno = match denied {
                Denied::ClassFull { .. } | Denied::UserFull { .. } => libc::EBUSY,
                _ => libc::EINVAL,
            };
            refuse(errno, denied.to_string())
        })
    }

    /// A reservation that the kernel keeps in no form is none.
    fn confirm(&mut self, id: MemberId) -> Outcome {
        let reservation = &self.all[&id];
        let failure = reservation.threads.iter().find_map(Kept::failure);
        match failure {
            None => {
                let form = reservation.form();
                info!(scope = %reservation.scope, ?form, "CPU reserved");
                Ok(())
            }
            Some(reason) => {
                self.end(id);
                self.settle();
                refuse(libc::EPERM, reason)
            }
        }
    }

    fn drive(&mut self, now: Instant) -> Option<Instant> {
        if self.all.is_empty() {
            return None;
        }
        if self.look_at <= now {
            self.forget_ended();
            self.measure(now.since(self.looked_at));
            self.adapt();
            self.settle();
            (self.looked_at, self.look_at) = (now, now + LOOK_EVERY);
        }
        Some(self.look_at)
    }

    fn forget_ended(&mut self) {
        let ended = self
            .all
            .iter()
            .filter(|(_, reservation)| !reservation.subject.life().lasts());
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

    /// Rates follow their use where that is wished, as far as there is room.
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
            let wish = Cpu {
                rate_ppm: better,
                ..reservation.wish.clone()
            };
            let (uid, subject) = (reservation.uid, reservation.subject);
            if better != reservation.wish.rate_ppm && self.admit(id, uid, subject, &wish).is_ok() {
                self.all
                    .entry(id)
                    .and_modify(|reservation| reservation.take_up(wish));
            }
        }
    }

    /// Each thread gets its part of what is now its reservation's effective rate: who loses goes first, so that the
    /// kernel has at no time more to give than there is.
    fn settle(&mut self) {
        let own: Vec<u32> = self
            .all
            .values()
            .filter_map(Reservation::own_thread)
            .collect();
        let mut changes = Vec::new();
        for (id, reservation) in &mut self.all {
            reservation.refresh(&own);
            let used: Vec<u64> = reservation.threads.iter().map(Kept::used).collect();
            let rates = divide(self.classes.effective(*id), &used, self.capacity.of_one_ppm);
            for (index, rate_ppm) in rates.into_iter().enumerate() {
                let gain = i64::from(rate_ppm) - i64::from(reservation.threads[index].rate_ppm());
                changes.push((gain, *id, index, rate_ppm));
            }
        }
        changes.sort_unstable();
        for (_, id, index, rate_ppm) in changes {
            if let Some(reservation) = self.all.get_mut(&id) {
                let terms = Terms {
                    rate_ppm,
                    period: Duration::from_micros(reservation.wish.period_us.into()),
                    slack: reservation.wish.slack,
                };
                reservation.threads[index].keep(terms);
            }
        }
    }

    fn report(&self, id: MemberId) -> CpuReport {
        let reservation = &self.all[&id];
        let effective = self.classes.effective(id);
        CpuReport {
            scope: reservation.scope.clone(),
            uid: reservation.uid,
            wish: reservation.wish.clone(),
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
            reservation.threads.iter_mut().for_each(Kept::release);
            self.note();
        }
    }

    fn end_all(&mut self) {
        while let Some(id) = self.all.keys().next().copied() {
            self.end(id);
        }
    }
}

fn check_wish(wish: &Cpu) -> Outcome {
    let periods = sched::PERIODS_US;
    if !periods.contains(&wish.period_us) {
        let (least, most) = (periods.start(), periods.end());
        return refuse(libc::EINVAL, format!("a period is {least} to {most} µs"));
    }
    match wish.adapt {
        Adapt::Auto {
            least_ppm,
            most_ppm,
        } if least_ppm == 0 || least_ppm > most_ppm => {
            refuse(libc::EINVAL, "the limits of adaptation are none")
        }
        _ => Ok(()),
    }
}

impl Reservation {
    /// The one that no process's reservation covers.
    fn own_thread(&self) -> Option<u32> {
        match self.subject {
            Subject::Thread { tid, .. } => Some(tid),
            Subject::Process { .. } => None,
        }
    }

    /// Looks which threads there are; `own` have reservations of their own.
    fn refresh(&mut self, own: &[u32]) {
        let tids = match self.subject {
            Subject::Thread { tid, .. } => vec![tid],
            Subject::Process { pid, .. } => {
                let mut tids = sched::threads_of(pid, MOST_THREADS + 1);
                self.leaves_some_out = tids.len() > MOST_THREADS;
                tids.truncate(MOST_THREADS);
                tids.retain(|tid| !own.contains(tid));
                tids
            }
        };
        let (stay, mut go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.threads)
            .into_iter()
            .partition(|kept| tids.contains(&kept.tid) && kept.life.lasts());
        go.iter_mut().for_each(Kept::release);
        self.threads = stay;
        for tid in tids {
            if !self.threads.iter().any(|kept| kept.tid == tid) {
                self.threads.extend(Kept::of(tid));
            }
        }
    }

    fn measure(&mut self, passed: Duration) {
        let (mut used, mut overruns) = (Duration::ZERO, 0);
        for thread in &mut self.threads {
            let seen = thread.measure(passed);
            used += seen.used;
            overruns += seen.overruns;
        }
        let used = used.as_secs_f64() / passed.as_secs_f64().max(1e-3);
        // A float becomes the nearest that there is.
        self.used_ppm = (used * 1e6) as u32;
        self.overruns = overruns;
    }

    fn periods_of(&self, passed: Duration) -> u32 {
        (passed.as_micros() / u128::from(self.wish.period_us.max(1))) as u32
    }

    /// A rate to be taken up at once; one that is only to be shown is kept.
    fn propose(&mut self, effective_ppm: u64) -> Option<u32> {
        self.proposed_ppm = None;
        if self.wish.adapt == Adapt::Off {
            return None;
        }
        let measured = Measured {
            used_ppm: self.used_ppm,
            overruns: self.overruns,
            periods: self.periods_of(LOOK_EVERY),
        };
        self.proposed_ppm = self.adaptation.propose(&self.wish, effective_ppm, measured);
        self.proposed_ppm
            .filter(|_| matches!(self.wish.adapt, Adapt::Auto { .. }))
    }

    fn take_up(&mut self, wish: Cpu) {
        info!(
            scope = %self.scope,
            rate_ppm = wish.rate_ppm,
            "CPU rate adapted"
        );
        self.wish = wish;
        self.proposed_ppm = None;
        self.adaptation.start_over();
    }

    /// The weakest of its threads'.
    fn form(&self) -> CpuForm {
        let weaker = self.threads.iter().find_map(Kept::weaker);
        weaker.unwrap_or_else(|| match self.leaves_some_out {
            false => CpuForm::Deadline,
            true => CpuForm::Weaker {
                form: format!("SCHED_DEADLINE for {MOST_THREADS} of its threads"),
                reason: "the rate of a process is divided among so many at most".to_owned(),
            },
        })
    }
}
