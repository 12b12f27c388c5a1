//! Requests for receive budgets.

use std::time::Duration;

use portolan_control::{SessionEntry, Timer};
use portolan_proto::filter::BUDGETS;
use portolan_proto::qos::{QosReport, Receive, ReceiveReport, Scope};
use portolan_sys::clock;
use portolan_types::{ChannelId, SessionId};
use tracing::warn;

use super::super::scope::covers;
use super::{BudgetEntry, PER_USER, check, terms};
use crate::qos::request::{Outcome, Requester, refuse};
use crate::server::Server;

/// Time per turn for rewriting rows.
const PER_TURN: Duration = Duration::from_millis(2);

impl Server {
    pub(crate) fn set_budget(
        &mut self,
        requester: Requester,
        scope: Scope,
        spec: Receive,
    ) -> Outcome {
        check(&scope, &spec)?;
        self.may_decide(requester, &scope)?;
        let uid = requester.credentials.uid;
        match self.qos.receive.find(&scope) {
            Some(at) => self.renegotiate(at, uid, spec),
            None => self.add_budget(uid, scope, spec),
        }
    }

    fn renegotiate(&mut self, at: usize, uid: u32, spec: Receive) -> Outcome {
        let held = &mut self.qos.receive.0[at];
        may_change(held, uid)?;
        if let Err(error) = self.filter.set_budget(held.index, &terms(&spec)) {
            return refuse(
                libc::EIO,
                format!("the packet filter does not take it: {error}"),
            );
        }
        held.spec = spec;
        Ok(())
    }

    fn add_budget(&mut self, uid: u32, scope: Scope, spec: Receive) -> Outcome {
        if let Scope::Process { pid } = scope
            && !self
                .control
                .registry
                .processes()
                .any(|process| process.pid == pid)
        {
            return refuse(libc::ESRCH, format!("{scope} has no sockets on Portolan"));
        }
        let budgets = &mut self.qos.receive;
        if !budgets.has_room_for(uid) {
            return refuse(
                libc::EDQUOT,
                format!("you have {PER_USER} receive budgets, the most of a user"),
            );
        }
        let Some(index) = budgets.free_index(&self.qos.renewals.freed) else {
            return refuse(
                libc::ENOSPC,
                format!("all {} receive budgets are taken", BUDGETS - 1),
            );
        };
        if let Err(error) = self.filter.set_budget(index, &terms(&spec)) {
            return refuse(
                libc::EIO,
                format!("the packet filter does not take it: {error}"),
            );
        }
        budgets.0.push(BudgetEntry {
            index,
            scope: scope.clone(),
            uid,
            spec,
        });
        budgets.0.sort_by_key(BudgetEntry::order);
        self.renew_rows_of(&scope, uid);
        Ok(())
    }

    pub(crate) fn end_budget(&mut self, requester: Requester, scope: &Scope) -> Outcome {
        let Some(at) = self.qos.receive.find(scope) else {
            return refuse(libc::ENOENT, format!("{scope} has no receive budget"));
        };
        may_change(&self.qos.receive.0[at], requester.credentials.uid)?;
        self.remove_budget(at);
        Ok(())
    }

    /// Removes a budget. Its number is freed when no row names it any more.
    fn remove_budget(&mut self, at: usize) {
        let held = self.qos.receive.0.remove(at);
        self.qos.renewals.freed.push(held.index);
        self.renew_rows_of(&held.scope, held.uid);
    }

    pub(crate) fn report_budgets(&mut self, report: &mut QosReport) {
        let reported = self.qos.receive.0.iter().map(|held| {
            let counted = self.filter.budget(held.index);
            ReceiveReport {
                scope: held.scope.clone(),
                uid: held.uid,
                spec: held.spec.clone(),
                passed: counted.passed,
                dropped: counted.dropped,
                early: counted.early,
            }
        });
        report.receive = reported.collect();
    }

    /// Returns the budget in the session's rows.
    pub(crate) fn budget_of(&self, session: &SessionEntry) -> u16 {
        if self.qos.receive.0.is_empty() {
            return 0;
        }
        // Until it is accepted, a connection is charged to its listener's process.
        let listener = session
            .listener
            .and_then(|id| self.control.registry.session(id));
        let owner = session.owner().or_else(|| listener?.owner());
        let process = owner.and_then(|channel| self.control.registry.process(channel));
        self.qos
            .receive
            .index_of(|held| held.is_for(session, process))
    }

    /// Returns the budget of what a process has besides its sessions.
    pub(crate) fn budget_of_channel(&self, channel: ChannelId) -> u16 {
        let Some(process) = self.control.registry.process(channel) else {
            return 0;
        };
        self.qos
            .receive
            .index_of(|held| held.is_for_all_of(process))
    }

    pub(crate) fn end_budget_of(&mut self, flow: &Scope) {
        if let Some(at) = self.qos.receive.find(flow) {
            self.remove_budget(at);
        }
    }

    /// Ends the budgets of processes that have exited.
    pub(crate) fn end_budgets_of_gone(&mut self) {
        while let Some(at) = self
            .qos
            .receive
            .0
            .iter()
            .position(|held| self.has_gone(held))
        {
            self.remove_budget(at);
        }
    }

    fn has_gone(&self, held: &BudgetEntry) -> bool {
        match held.scope {
            Scope::Process { pid } => !self
                .control
                .registry
                .processes()
                .any(|process| process.pid == pid),
            _ => false,
        }
    }

    /// Schedules all sessions that the scope may cover for another look-up of their budgets. A budget of `uid` applies
    /// to that user's sessions.
    fn renew_rows_of(&mut self, scope: &Scope, uid: u32) {
        self.scope_has_changed(scope);
        let is_own = matches!(scope, Scope::Flow(_) | Scope::Port { .. });
        let may_be = |session: &&SessionEntry| {
            (uid == 0 || uid == session.uid) && (!is_own || covers(scope, session))
        };
        let sessions = self.control.registry.sessions().filter(may_be);
        let ids: Vec<SessionId> = sessions.map(|session| session.id).collect();
        self.renew_in_parts(ids);
        if !is_own {
            self.renew_raw_rows();
        }
    }

    /// Writes the rows of sessions anew: those for which there is time now, and the others soon.
    pub(crate) fn renew_in_parts(&mut self, ids: impl IntoIterator<Item = SessionId>) {
        self.qos.renewals.sessions.extend(ids);
        self.go_on_renewing();
    }

    /// Writes rows anew for a part of the turn.
    pub(crate) fn go_on_renewing(&mut self) {
        let until = clock::now() + PER_TURN;
        while let Some(id) = self.qos.renewals.sessions.pop_first() {
            self.renew_rows(id);
            if clock::now() >= until {
                break;
            }
        }
        if !self.qos.renewals.sessions.is_empty() {
            return self.control.timers.defer(Timer::Budgets);
        }
        for index in std::mem::take(&mut self.qos.renewals.freed) {
            if let Err(error) = self.filter.clear_budget(index) {
                warn!(%error, "cannot clear a receive budget");
            }
        }
    }
}

/// Checks that the user may change the budget: root's only root may.
fn may_change(held: &BudgetEntry, uid: u32) -> Outcome {
    if uid == 0 || uid == held.uid {
        Ok(())
    } else {
        refuse(
            libc::EPERM,
            format!("the receive budget of {} is not yours", held.scope),
        )
    }
}
