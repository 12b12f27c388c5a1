//! Transmit reservations.

use portolan_proto::qos::{QosReport, Scope, Transmit};

use super::{Asker, Outcome, refuse};
use crate::server::Server;

#[derive(Debug, Default)]
pub struct Reservations {}

impl Server {
    pub(super) fn reserve_transmit(
        &mut self,
        asker: Asker,
        scope: Scope,
        _wish: Transmit,
    ) -> Outcome {
        self.may_decide(asker, &scope)?;
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn end_transmit(&mut self, asker: Asker, scope: &Scope) -> Outcome {
        self.may_decide(asker, scope)?;
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn report_transmit(&mut self, _report: &mut QosReport) {}
}
