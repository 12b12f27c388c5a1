//! Transmit reservations: links with their schedulers, and the classes of each with their owners and lifetimes.

mod changes;
mod leaving;
mod links;
mod serve;
mod sessions;
mod traffic_thread;

use crate::instance::Journal;
use crate::poll::Token;
use crate::qos::request::{Outcome, refuse};

pub(super) use changes::kept;
use leaving::Idle;
use leaving::Leaving;
use links::Link;
pub(in crate::qos) use links::{LinkAnswer, LinkCounts};
use portolan_control::qos::transmit::ClassId;
use portolan_control::qos::transmit::ClassRates;
use portolan_proto::qos::{QosRequest, Rate, Scope};
use portolan_sys::traffic;
use rustix::process::Pid;
use rustix::process::PidfdFlags;
use rustix::process::pidfd_open;
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use traffic_thread::TrafficThread;

#[derive(Debug, Default)]
pub(super) struct Reservations {
    links: BTreeMap<u32, Link>,
    held: BTreeMap<ClassId, ClassEntry>,
    by_scope: HashMap<Scope, ClassId>,
    pub(super) traffic: TrafficThread,
    /// Classes, and classes' queues, that could not be set while somebody had the lock of the network's configuration.
    late_classes: BTreeSet<ClassId>,
    late_queues: BTreeSet<ClassId>,
    journal: Option<Journal>,
    leaving: Vec<Leaving>,
    idle: Vec<Idle>,
}

/// One reservation.
#[derive(Debug)]
pub(super) struct ClassEntry {
    pub scope: Scope,
    pub ifindex: u32,
    pub uid: u32,
    /// The promised rates.
    pub terms: ClassRates,
    /// The rates that the link allows to be kept at present.
    pub kept: ClassRates,
    /// The group within which it is reserved: its key and class.
    pub group: Option<(u32, ClassId)>,
    /// Pidfd of the process with which it ends.
    pub life: Option<(OwnedFd, Token)>,
}

/// The class of a session that has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    pub minor: ClassId,
    pub terms: ClassRates,
}

/// Priority of reservations over best effort.
const RESERVED_FIRST: u32 = 0;

impl Reservations {
    pub(super) fn scopes(&self) -> impl Iterator<Item = &Scope> {
        self.by_scope.keys()
    }

    pub(super) fn has(&self, scope: &Scope) -> bool {
        self.by_scope.contains_key(scope)
    }

    /// Replaces a part of the link's time by the rate that was reserved for it.
    pub(super) fn fix_rate(&self, request: &mut QosRequest) {
        if let QosRequest::Transmit { scope, spec } = request
            && let Rate::Slice { .. } = spec.rate
            && let Some(held) = self.class_of_scope(scope).and_then(|id| self.held.get(&id))
        {
            (spec.rate, spec.burst) = (Rate::Bits(held.terms.rate), Some(held.terms.burst));
        }
    }

    pub(super) fn class_of_scope(&self, scope: &Scope) -> Option<ClassId> {
        self.by_scope.get(scope).copied()
    }

    /// Returns the members of a group and their rates.
    pub(super) fn members(&self, key: u32) -> Vec<(ClassId, u64)> {
        let in_group = |held: &ClassEntry| held.group.is_some_and(|(other, _)| other == key);
        let members = self.held.iter().filter(|(_, held)| in_group(held));
        members.map(|(id, held)| (*id, held.terms.rate)).collect()
    }

    /// Returns who brought a member into the group; none if it is not in the group.
    pub(super) fn member_of(&self, id: ClassId, key: u32) -> Option<u32> {
        let held = self.held.get(&id)?;
        held.group
            .filter(|(other, _)| *other == key)
            .map(|_| held.uid)
    }

    pub(super) fn set_terms(&mut self, id: ClassId, terms: ClassRates) {
        if let Some(held) = self.held.get_mut(&id) {
            held.terms = terms;
        }
    }

    fn set_kept(&mut self, id: ClassId, kept: ClassRates) {
        if let Some(held) = self.held.get_mut(&id) {
            held.kept = kept;
        }
    }
}

impl ClassEntry {
    /// Makes an entry that is in no group, and ends with no process.
    pub(super) fn new(scope: Scope, ifindex: u32, uid: u32, terms: ClassRates) -> ClassEntry {
        ClassEntry {
            scope,
            ifindex,
            uid,
            terms,
            kept: terms,
            group: None,
            life: None,
        }
    }

    fn class(&self, minor: ClassId) -> Class {
        Class {
            minor,
            terms: self.kept,
        }
    }
}

/// Opens a pidfd, which cannot come to mean another process, before the owner is checked.
pub(super) fn open_life(scope: &Scope) -> Outcome<Option<OwnedFd>> {
    match scope {
        Scope::Process { pid } => {
            let pid = i32::try_from(*pid).ok().and_then(Pid::from_raw);
            match pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
                Some(Ok(fd)) => Ok(Some(fd)),
                _ => refuse(libc::ESRCH, format!("there is no {scope}")),
            }
        }
        Scope::Thread { .. } => refuse(
            libc::EINVAL,
            "a thread sends nothing of its own: name its process",
        ),
        _ => Ok(None),
    }
}

fn class(minor: u16, parent: u16, terms: &ClassRates, priority: u32) -> traffic::Class {
    traffic::Class {
        minor,
        parent,
        rate: terms.rate,
        ceiling: terms.ceiling,
        burst: terms.burst,
        ceiling_burst: terms.ceiling_burst(),
        quantum: terms.quantum(),
        priority,
    }
}
