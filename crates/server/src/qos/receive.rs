//! Receive budgets.

use portolan_proto::qos::{QosReport, Receive, Scope};

use super::{Asker, Outcome, refuse};
use crate::server::Server;

#[derive(Debug, Default)]
pub struct Budgets {}

impl Server {
    pub(super) fn set_budget(&mut self, asker: Asker, scope: Scope, _wish: Receive) -> Outcome {
        self.may_decide(asker, &scope)?;
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn end_budget(&mut self, asker: Asker, scope: &Scope) -> Outcome {
        self.may_decide(asker, scope)?;
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn report_budgets(&mut self, _report: &mut QosReport) {}
}
