//! Standing guarantees: those that were granted on request, as requests to repeat. A server records them in a file beside
//! its control socket; the next one grants them again (ADR 41). Policies are not among them: each server reads them from
//! its own configuration.

mod record;
mod serve;

use std::collections::{HashSet, VecDeque};
use std::path::Path;

use portolan_control::qos::transmit::ClassId;
use portolan_proto::qos::{GroupAction, Kind, QosRequest, Scope};
use portolan_sys::namespace;
use portolan_sys::unix::Credentials;
use portolan_types::Instant;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::scope::Life;
use crate::instance::LifeRecord;
use record::RecordFile;

/// A request that was granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Granted {
    /// The sender's process, user and group.
    pid: u32,
    uid: u32,
    gid: u32,
    /// The process or thread with which it ends, or that made the group.
    life: Option<LifeRecord>,
    /// Programs know a group's member by the number of its class.
    class: Option<ClassNumber>,
    request: QosRequest,
}

/// Minor number of a class.
type ClassNumber = u16;

/// What a request decides on: a later one replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject<'a> {
    Link(&'a str),
    Group(u32),
    Guarantee(Kind, &'a Scope),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InForce,
    /// Its connection, or process, has not come back yet.
    Awaited,
}

#[derive(Debug)]
struct Entry {
    granted: Granted,
    state: State,
}

/// All standing guarantees, in the order in which the next server is to grant them.
#[derive(Debug, Default)]
pub(super) struct Standing {
    entries: Vec<Entry>,
    /// Scopes of those that are awaited.
    awaited: HashSet<Scope>,
    /// To be granted again: there are many, or another program had the lock of the network's configuration.
    late: VecDeque<Granted>,
    /// None while they are not recorded.
    file: Option<RecordFile>,
    /// Earliest time of the next record.
    next_record: Instant,
}

impl Granted {
    /// Returns nothing for requests that only end or show something.
    fn new(who: Credentials, request: QosRequest, class: Option<ClassId>) -> Option<Granted> {
        let subject = subject(&request)?;
        let number = match subject {
            Subject::Group(_) => Some(who.pid),
            Subject::Guarantee(_, Scope::Process { pid }) => Some(*pid),
            Subject::Guarantee(_, Scope::Thread { tid }) => Some(*tid),
            _ => None,
        };
        Some(Granted {
            pid: who.pid,
            uid: who.uid,
            gid: who.gid,
            life: number.and_then(Life::of).map(Life::record),
            class: class.map(|class| class.0),
            request,
        })
    }

    fn scope(&self) -> Option<&Scope> {
        match subject(&self.request)? {
            Subject::Guarantee(_, scope) => Some(scope),
            Subject::Link(_) | Subject::Group(_) => None,
        }
    }

    fn is_alive(&self) -> bool {
        self.life.is_none_or(|life| Life::recorded(life).lasts())
    }

    /// Has the process or thread ended with which it ends?
    fn has_ended(&self) -> bool {
        self.scope().is_some() && !self.is_alive()
    }

    /// The sender; no process if the one that made the group has ended.
    fn sender(&self) -> Credentials {
        let pid = if self.is_alive() { self.pid } else { 0 };
        Credentials {
            pid,
            uid: self.uid,
            gid: self.gid,
        }
    }
}

/// Returns what a request for a guarantee decides on.
fn subject(request: &QosRequest) -> Option<Subject<'_>> {
    Some(match request {
        QosRequest::Link { device, .. } => Subject::Link(device),
        QosRequest::Transmit { scope, .. }
        | QosRequest::Group {
            action: GroupAction::Join { scope, .. },
            ..
        } => Subject::Guarantee(Kind::Transmit, scope),
        QosRequest::Receive { scope, .. } => Subject::Guarantee(Kind::Receive, scope),
        QosRequest::Cpu { scope, .. } => Subject::Guarantee(Kind::Cpu, scope),
        QosRequest::Group {
            key,
            action: GroupAction::Create { .. },
        } => Subject::Group(*key),
        QosRequest::Group { .. } | QosRequest::Show | QosRequest::Delete { .. } => return None,
    })
}

impl Standing {
    /// Reads what the previous server has recorded, and records here from now on.
    pub(super) fn load(&mut self, socket: &Path) {
        let file = match namespace::identity() {
            Ok(namespace) => RecordFile::beside(socket, &namespace),
            Err(error) => return warn!(%error, "guarantees end with this server"),
        };
        match file.read() {
            Ok(recorded) => {
                let scopes = recorded.iter().filter_map(Granted::scope);
                self.awaited = scopes.cloned().collect();
                let entry = |granted| Entry {
                    granted,
                    state: State::Awaited,
                };
                self.entries = recorded.into_iter().map(entry).collect();
            }
            Err(error) => warn!(%error, "guarantees of the previous server are lost"),
        }
        self.file = Some(file);
    }

    /// Adds one that was granted, in place of an earlier one.
    fn note(&mut self, granted: Granted, state: State) {
        let replaced = subject(&granted.request);
        self.entries
            .retain(|entry| subject(&entry.granted.request) != replaced);
        self.late
            .retain(|granted| subject(&granted.request) != replaced);
        if state == State::Awaited
            && let Some(scope) = granted.scope()
        {
            self.awaited.insert(scope.clone());
        }
        // Nothing can be reserved on links without a rate.
        let at = match replaced {
            Some(Subject::Link(_)) => 0,
            _ => self.entries.len(),
        };
        self.entries.insert(at, Entry { granted, state });
    }

    /// Changes the request that made a group.
    fn change_group(&mut self, key: u32, change: impl FnOnce(&mut GroupAction)) {
        let mut entries = self.entries.iter_mut().map(|entry| &mut entry.granted);
        let made = entries.find(|it| subject(&it.request) == Some(Subject::Group(key)));
        if let Some(QosRequest::Group { action, .. }) = made.map(|made| &mut made.request) {
            change(action);
        }
    }

    /// Removes those that are not in force any more.
    fn prune(&mut self, is_in_force: impl Fn(Subject<'_>) -> bool) {
        self.entries.retain(|Entry { granted, state }| {
            *state != State::InForce || subject(&granted.request).is_some_and(&is_in_force)
        });
    }

    /// Takes those out that await what has this scope.
    fn take_awaited(&mut self, scope: &Scope) -> Vec<Granted> {
        if !self.awaited.remove(scope) {
            return Vec::new();
        }
        self.take(|entry| entry.state == State::Awaited && entry.granted.scope() == Some(scope))
    }

    fn take(&mut self, is_meant: impl Fn(&Entry) -> bool) -> Vec<Granted> {
        let taken = self.entries.extract_if(.., |entry| is_meant(entry));
        taken.map(|entry| entry.granted).collect()
    }

    fn len(&self) -> usize {
        self.entries.len() + self.late.len()
    }

    fn record(&self) {
        let Some(file) = &self.file else { return };
        let entries = self.entries.iter().map(|entry| &entry.granted);
        let recorded = entries.chain(&self.late);
        if let Err(error) = file.write(recorded) {
            warn!(%error, "the next server would not know of guarantees");
        }
    }

    /// Leaves the next server none.
    pub(super) fn forget(&mut self) {
        self.entries.clear();
        self.late.clear();
        self.record();
        self.file = None;
    }
}

#[cfg(test)]
mod tests;
