//! Requests for CPU time.

use keep::Left;
use portolan_control::Timer;
use portolan_proto::qos::{Cpu, QosReport, Scope};

use super::super::scope::Life;
use super::keep;
use crate::instance::Instance;
use crate::qos::request::{Outcome, Requester, refuse};
use crate::server::Server;

impl Server {
    pub(crate) fn reserve_cpu(&mut self, requester: Requester, scope: Scope, spec: Cpu) -> Outcome {
        self.may_decide(requester, &scope)?;
        self.qos.cpu.may_change(requester, &scope)?;
        let (now, uid) = (self.now, requester.credentials.uid);
        let registry = &self.control.registry;
        self.qos.cpu.reserve((now, registry), uid, scope, spec)?;
        let timers = &mut self.control.timers;
        timers.arm_once(Timer::Cpu, self.qos.cpu.look_at);
        Ok(())
    }

    pub(crate) fn end_cpu(&mut self, requester: Requester, scope: &Scope) -> Outcome {
        self.may_decide(requester, scope)?;
        let cpu = &mut self.qos.cpu;
        cpu.may_change(requester, scope)?;
        let Some(id) = cpu.of_scope(scope) else {
            return refuse(libc::ENOENT, format!("{scope} has no CPU reservation"));
        };
        cpu.end(id);
        cpu.settle(&self.control.registry);
        Ok(())
    }

    pub(crate) fn report_cpu(&mut self, report: &mut QosReport) {
        let cpu = &self.qos.cpu;
        report.cpu_elsewhere_ppm = cpu.classes.others().promised_ppm;
        report.cpu_classes = cpu.classes.reports().collect();
        report.cpu = cpu.all.keys().map(|id| cpu.report(*id)).collect();
    }

    /// Checks the threads if due.
    pub(crate) fn look_at_cpu(&mut self) {
        let next = self.qos.cpu.look(self.now, &self.control.registry);
        if let Some(next) = next {
            self.control.timers.arm(Timer::Cpu, next);
        }
    }

    /// Reverts what a dead server has left to threads.
    pub(crate) fn start_cpu(&mut self, instance: &Instance) {
        let threads = instance.leftover_threads().iter();
        let left: Vec<Left> = threads
            .filter_map(|(life, had)| Left::recorded(*life, had))
            .collect();
        left.iter().for_each(Left::take_back);
        for &life in instance.leftover_cpu() {
            let life = Life::recorded(life);
            if life.lasts() {
                life.threads().into_iter().for_each(keep::take_back);
            }
        }
        self.qos.cpu.journal = Some(instance.journal());
    }

    /// Restores the scheduling of all threads.
    pub(crate) fn end_all_cpu(&mut self) {
        self.qos.cpu.end_all();
    }
}
