//! CPU reservations.

use portolan_proto::qos::{Cpu, QosReport, Scope};

use super::{Asker, Outcome, refuse};
use crate::server::Server;

#[derive(Debug, Default)]
pub struct Reservations {}

impl Server {
    pub(super) fn reserve_cpu(&mut self, asker: Asker, scope: Scope, _wish: Cpu) -> Outcome {
        self.may_decide(asker, &scope)?;
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn end_cpu(&mut self, asker: Asker, scope: &Scope) -> Outcome {
        self.may_decide(asker, scope)?;
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn report_cpu(&mut self, _report: &mut QosReport) {}
}
