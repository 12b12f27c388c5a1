//! One thread's reservation in the kernel: `SCHED_DEADLINE`, or the nearest weaker form, with the reason.

use std::time::Duration;

use portolan_proto::qos::CpuForm;
use portolan_sys::sched::{self, Attributes, Deadline, Share, ShareError, Usage};
use rustix::io::Errno;
use tracing::debug;

use crate::instance::LifeRecord;
use crate::qos::scope::Life;

/// The CPU parameters of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuParameters {
    pub rate_ppm: u32,
    pub period: Duration,
    pub slack: bool,
}

impl CpuParameters {
    fn deadline(&self) -> Deadline {
        Deadline {
            runtime: self.period * self.rate_ppm / 1_000_000,
            period: self.period,
            reclaims: self.slack,
        }
    }
}

/// A thread, its scheduling before, and its reservation.
#[derive(Debug)]
pub(super) struct ThreadReservation {
    /// Its process; the thread itself, if it has its own reservation.
    pub pid: u32,
    pub tid: u32,
    pub life: Life,
    before: Attributes,
    form: Form,
    /// The parameters last applied.
    terms: Option<CpuParameters>,
    /// Why they were not applied as `SCHED_DEADLINE`.
    refusal: Option<String>,
    /// What to try next after a refusal.
    intent: Option<Intent>,
    usage: Usage,
    /// CPU time used in the last second.
    used: Duration,
}

#[derive(Debug)]
enum Form {
    None,
    Deadline,
    Share(Share),
    Nice(i32),
}

/// A weaker form: recorded for the next server before anything is changed.
#[derive(Debug)]
struct Intent {
    terms: CpuParameters,
    /// None if the thread has one.
    share: Option<Result<Share, ShareError>>,
}

/// What was measured of a thread since the last check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub used: Duration,
    pub overruns: u32,
}

impl ThreadReservation {
    /// Returns none if the thread has ended.
    pub(super) fn of(pid: u32, tid: u32) -> Option<ThreadReservation> {
        Some(ThreadReservation {
            pid,
            tid,
            life: Life::of(tid)?,
            before: Attributes::of(tid).ok()?,
            form: Form::None,
            terms: None,
            refusal: None,
            intent: None,
            usage: Usage::of(tid)?,
            used: Duration::ZERO,
        })
    }

    pub(super) fn rate_ppm(&self) -> u32 {
        self.terms.map_or(0, |terms| terms.rate_ppm)
    }

    /// Returns the CPU time used in the last second, in microseconds.
    pub(super) fn used(&self) -> u64 {
        self.used.as_micros() as u64
    }

    /// Applies the parameters. If the kernel refuses, [`ThreadReservation::keep_weakly`] must follow.
    pub(super) fn keep(&mut self, terms: CpuParameters) {
        let is_kept = matches!(self.form, Form::Deadline) && self.has_deadline();
        if is_kept && self.terms == Some(terms) && self.refusal.is_none() {
            return;
        }
        match terms.deadline().apply(self.tid) {
            Ok(()) => {
                self.take_form(Form::Deadline);
                self.terms = Some(terms);
                self.refusal = None;
            }
            Err(Errno::SRCH) => {}
            Err(errno) => {
                self.refusal = Some(reason(errno, self.tid));
                if !is_kept {
                    self.intend(terms);
                }
            }
        }
    }

    fn intend(&mut self, terms: CpuParameters) {
        let share = match self.form {
            Form::Share(_) => None,
            _ => Some(Share::plan(self.tid)),
        };
        self.intent = Some(Intent { terms, share });
    }

    pub(super) fn wants_weaker(&self) -> bool {
        self.intent.is_some()
    }

    /// Returns what to restore if this server dies, as [`Left::recorded`] reads it.
    pub(super) fn note(&self) -> Option<(LifeRecord, String)> {
        let has_share = matches!(self.form, Form::Share(_));
        let is_weak = has_share || matches!(self.form, Form::Nice(_)) || self.wants_weaker();
        if self.before.is_plain() && !is_weak {
            return None;
        }
        let nices: Vec<String> = self.nices().map(|nice| nice.to_string()).collect();
        let share = self.share().map(Share::record);
        let text = format!(
            "{} {} {}",
            self.before.record(),
            nices.join(","),
            share.unwrap_or_default()
        );
        Some((self.life.record(), text))
    }

    /// Returns the nice values that it has, or is about to get.
    fn nices(&self) -> impl Iterator<Item = i32> {
        let now = match self.form {
            Form::Nice(nice) => Some(nice),
            _ => None,
        };
        let next = self.intent.as_ref().map(|intent| nice(intent.terms));
        now.into_iter().chain(next)
    }

    fn share(&self) -> Option<&Share> {
        match (&self.form, &self.intent) {
            (Form::Share(share), _) => Some(share),
            (_, Some(intent)) => intent.share.as_ref()?.as_ref().ok(),
            _ => None,
        }
    }

    fn has_deadline(&self) -> bool {
        Attributes::of(self.tid).is_ok_and(|attributes| attributes.is_deadline())
    }

    pub(super) fn keep_weakly(&mut self) {
        let Some(Intent { terms, share }) = self.intent.take() else {
            return;
        };
        if let Err(error) = self.give_share(share, terms) {
            // The report has both: what the kernel refuses, and why the next weaker form is not available either.
            let refusal = self.refusal.take().unwrap_or_default();
            self.refusal = Some(format!("{refusal}; no share of a cgroup: {error}"));
            let favoured = self.favour(terms).map_or_else(
                |errno| {
                    debug!(tid = self.tid, %errno, "no nice value");
                    Form::None
                },
                Form::Nice,
            );
            self.take_form(favoured);
        }
        self.terms = Some(terms);
    }

    fn give_share(
        &mut self,
        planned: Option<Result<Share, ShareError>>,
        terms: CpuParameters,
    ) -> Result<(), ShareError> {
        if let Some(share) = planned.transpose()? {
            share.begin()?;
            self.take_form(Form::Share(share));
        }
        let Form::Share(share) = &self.form else {
            return Ok(());
        };
        share.set_rate(terms.rate_ppm, terms.period.as_micros() as u32)?;
        if terms.slack {
            share.lift_limit()?;
        }
        Ok(())
    }

    /// Applies the weakest form, a nice value, which is relative to other threads only.
    fn favour(&self, terms: CpuParameters) -> Result<i32, Errno> {
        if !self.before.is_ordinary() {
            return Err(Errno::INVAL);
        }
        let nice = nice(terms);
        self.before.with_nice(nice).apply(self.tid)?;
        Ok(nice)
    }

    /// Changes the form, and reverts the former one.
    fn take_form(&mut self, form: Form) {
        match std::mem::replace(&mut self.form, form) {
            Form::Share(share) => share.end(),
            Form::Nice(nice) if !matches!(self.form, Form::Nice(_)) => {
                let _ = self.before.replace_nice(nice, self.tid);
            }
            _ => {}
        }
    }

    /// Returns why the thread has no form, if so.
    pub(super) fn failure(&self) -> Option<String> {
        match (&self.form, &self.refusal) {
            (Form::None, Some(reason)) => Some(reason.clone()),
            _ => None,
        }
    }

    pub(super) fn weaker(&self) -> Option<CpuForm> {
        let reason = self.refusal.clone()?;
        let form = match &self.form {
            Form::None => "none".to_owned(),
            Form::Deadline => format!("SCHED_DEADLINE at {} ppm", self.rate_ppm()),
            Form::Share(share) => share.form().to_owned(),
            Form::Nice(nice) => format!("nice {nice}"),
        };
        Some(CpuForm::Weaker { form, reason })
    }

    pub(super) fn measure(&mut self, passed: Duration) -> Seen {
        let Some(usage) = Usage::of(self.tid) else {
            let used = Duration::ZERO;
            return Seen { used, overruns: 0 };
        };
        let used = usage.running.saturating_sub(self.usage.running);
        let waited = usage.waiting.saturating_sub(self.usage.waiting);
        (self.usage, self.used) = (usage, used);
        let overruns = match (&self.form, self.terms) {
            (Form::Deadline, Some(terms)) => overruns(&terms.deadline(), used, waited, passed),
            _ => 0,
        };
        Seen { used, overruns }
    }

    /// Restores the thread's former scheduling.
    pub(super) fn release(&mut self) {
        if !self.life.lasts() {
            if let Form::Share(share) = &self.form {
                share.end();
            }
            return;
        }
        let released = match &self.form {
            Form::None => Ok(()),
            Form::Deadline => Deadline::revoke(self.tid, &self.before),
            Form::Share(share) => {
                share.end();
                Ok(())
            }
            Form::Nice(nice) => self.before.replace_nice(*nice, self.tid),
        };
        if let Err(errno) = released {
            debug!(tid = self.tid, %errno, "scheduled as it was reserved");
        }
        self.form = Form::None;
    }
}

/// Returns the nice value in proportion to a rate in millionths of a CPU.
fn nice(terms: CpuParameters) -> i32 {
    -((20 * terms.rate_ppm.min(1_000_000)).div_ceil(1_000_000) as i32)
}

/// A thread as left by a dead server.
#[derive(Debug)]
pub(super) struct Left {
    tid: u32,
    life: Life,
    before: Attributes,
    /// Nice values, one of which it may have.
    nices: Vec<i32>,
    share: Option<Share>,
}

impl Left {
    /// Parses a record. All records are read before the first is reverted.
    pub(super) fn recorded(life: LifeRecord, text: &str) -> Option<Left> {
        let (before, rest) = text.split_once(' ')?;
        let (nices, share) = rest.split_once(' ')?;
        let (tid, _) = life;
        Some(Left {
            tid,
            life: Life::recorded(life),
            before: Attributes::recorded(before)?,
            nices: nices
                .split(',')
                .filter_map(|nice| nice.parse().ok())
                .collect(),
            share: Share::adopt(tid, share),
        })
    }

    /// Restores the scheduling that the thread had before that server.
    pub(super) fn take_back(&self) {
        // Its group is removed even if the thread has ended.
        if let Some(share) = &self.share {
            share.end();
        }
        if !self.life.lasts() {
            return;
        }
        let nices = self.nices.iter();
        let steps = nices.map(|nice| self.before.replace_nice(*nice, self.tid));
        for taken in steps.chain([Deadline::revoke(self.tid, &self.before)]) {
            if let Err(errno) = taken {
                debug!(tid = self.tid, %errno, "scheduled as it was reserved");
            }
        }
    }
}

/// Reverts what another server has given a thread, of which it recorded no former scheduling: it was ordinary.
pub(super) fn take_back(tid: u32) {
    if let Err(errno) = Deadline::revoke(tid, &Attributes::default()) {
        debug!(tid, %errno, "reserved CPU time stays");
    }
}

/// Returns the number of periods in which a thread used up its runtime and needed more. The kernel does not count
/// them, but a thread that has used up its runtime counts as waiting for the rest of the period.
fn overruns(deadline: &Deadline, used: Duration, waited: Duration, passed: Duration) -> u32 {
    let rest = deadline.period.saturating_sub(deadline.runtime);
    let times = |whole: Duration, part: Duration| {
        (whole.as_nanos() + part.as_nanos() / 2) / part.as_nanos().max(1)
    };
    let exhausted = times(used, deadline.runtime.max(sched::LEAST_RUNTIME));
    let waits = times(waited, rest);
    exhausted.min(waits).min(times(passed, deadline.period)) as u32
}

fn reason(errno: Errno, tid: u32) -> String {
    match errno {
        Errno::PERM if sched::is_bound(tid) => {
            "the kernel gives SCHED_DEADLINE only to threads that may run on all CPUs (EPERM): this one is bound to some, by \
             its affinity mask or a cpuset"
                .to_owned()
        }
        Errno::PERM => "the server may not give SCHED_DEADLINE (EPERM): it needs CAP_SYS_NICE, in a container the host's"
            .to_owned(),
        Errno::BUSY => "the kernel has no SCHED_DEADLINE bandwidth left (EBUSY): others beside Portolan's have it"
            .to_owned(),
        errno => format!("the kernel refuses SCHED_DEADLINE: {errno}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    fn third() -> Deadline {
        CpuParameters {
            rate_ppm: 300_000,
            period: 10 * MS,
            slack: false,
        }
        .deadline()
    }

    #[test]
    fn where_nothing_else_is_to_be_had_a_thread_is_favoured_by_its_nice_value() {
        let mut program = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let mut kept = ThreadReservation::of(program.id(), program.id()).unwrap();
        let terms = |rate_ppm| CpuParameters {
            rate_ppm,
            period: 10 * MS,
            slack: false,
        };
        for (rate_ppm, nice) in [(1, -1), (300_000, -6), (900_000, -18), (u32::MAX, -20)] {
            assert_eq!(kept.favour(terms(rate_ppm)), Ok(nice));
        }
        assert_ne!(Attributes::of(kept.tid), Ok(kept.before));
        kept.form = Form::Nice(-20);
        kept.release();
        assert_eq!(Attributes::of(kept.tid), Ok(kept.before));
        program.kill().unwrap();
        program.wait().unwrap();
    }

    #[test]
    fn a_thread_that_always_wants_more_overruns_each_period() {
        assert_eq!(third().runtime, 3 * MS);
        assert_eq!(overruns(&third(), 300 * MS, 700 * MS, SECOND), 100);
    }

    #[test]
    fn who_waits_without_using_his_runtime_overruns_nothing() {
        assert_eq!(overruns(&third(), Duration::ZERO, 700 * MS, SECOND), 0);
        assert_eq!(overruns(&third(), 300 * MS, 3 * MS, SECOND), 0);
        assert_eq!(overruns(&third(), 30 * MS, 70 * MS, SECOND), 10);
    }

    #[test]
    fn no_measure_breaks_the_count() {
        let most = Duration::from_secs(1 << 40);
        let least = Deadline {
            runtime: Duration::ZERO,
            period: Duration::from_micros(100),
            reclaims: false,
        };
        overruns(&least, most, most, most);
        let whole = Deadline {
            runtime: least.period,
            ..least
        };
        assert_eq!(overruns(&whole, SECOND, SECOND, SECOND), 10_000);
    }
}
