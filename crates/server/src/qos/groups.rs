//! Multiplex groups.

use portolan_proto::qos::{GroupAction, QosReply, QosReport};

use super::{Asker, Outcome, refuse};
use crate::server::Server;

#[derive(Debug, Default)]
pub struct Groups {}

impl Server {
    pub(super) fn change_multiplex_group(
        &mut self,
        _asker: Asker,
        _key: u32,
        _action: GroupAction,
    ) -> Outcome<QosReply> {
        refuse(libc::EOPNOTSUPP, "not built yet")
    }

    pub(super) fn report_groups(&mut self, _report: &mut QosReport) {}
}
