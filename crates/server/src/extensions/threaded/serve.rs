//! Requests for threaded handlers.

use portolan_control::ClientId;
use portolan_proto::extension::{Event, Extension, ExtensionReply, ExtensionReport, Guard};

use super::super::{Outcome, refuse};
use super::{PER_PROCESS, Threaded};
use crate::server::Server;

impl Server {
    pub(in crate::extensions) fn report_threaded(
        &self,
        number: u16,
        one: &Threaded,
    ) -> ExtensionReport {
        let ends = self.channels.get(&one.owner);
        one.report(
            number,
            ends.and_then(|ends| ends.statistics.threaded(one.row)),
        )
    }

    pub(crate) fn announce_handler(
        &mut self,
        client: ClientId,
        (name, priority): (String, u8),
        guard: Guard,
        event: Event,
    ) -> Outcome<ExtensionReply> {
        if name.len() > Extension::NAME_MAX || name.is_empty() {
            let most = Extension::NAME_MAX;
            return refuse(libc::EINVAL, format!("a name has 1 to {most} bytes"));
        }
        let requester = self.clients.get(&client);
        let Some((owner, credentials)) = requester.and_then(|a| Some((a.channel?, a.credentials)))
        else {
            return refuse(
                libc::EPERM,
                "only a process with sockets on Portolan has handlers",
            );
        };
        let Some(&key) = self.admit_guards(owner, &[guard], event)?.first() else {
            return refuse(libc::EINVAL, "a handler has a guard");
        };
        let Some(row) = self.extensions.threaded.free_row(owner) else {
            return refuse(
                libc::EDQUOT,
                format!("the process has {PER_PROCESS} handlers in threads, the most it may have"),
            );
        };
        let one = Threaded {
            owner,
            uid: credentials.uid,
            pid: credentials.pid,
            name,
            event,
            guard,
            key,
            priority,
            row,
        };
        match self.extensions.threaded.enter(one) {
            Some(number) => Ok(ExtensionReply::Announced { number, row }),
            None => refuse(libc::EDQUOT, "there are too many handlers in threads"),
        }
    }
}
