//! Multiplex groups (MS Table I): one reserved rate that flows of several processes share, each with a rate of its
//! own. A group is a class of the link with its flows' classes below it.

mod serve;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use portolan_control::qos::transmit::{ClassId, ClassRates, Link as Ledger};
use portolan_proto::qos::GroupOptions;
use portolan_sys::unix::Credentials;

use crate::poll::Token;
use crate::qos::request::{Outcome, refusal};

/// All groups by key.
#[derive(Debug, Default)]
pub(super) struct Groups {
    by_key: BTreeMap<u32, Group>,
}

#[derive(Debug)]
struct Group {
    class: ClassId,
    ifindex: u32,
    owner: Credentials,
    mode: u16,
    /// The promised rates, and what the link allows to be kept of them.
    terms: ClassRates,
    kept: ClassRates,
    options: GroupOptions,
    /// Pidfd of the process that made the group; none when it has ended.
    maker: Option<(OwnedFd, Token)>,
}

/// An access right to a group, as a bit of its file mode.
#[derive(Clone, Copy, Debug)]
enum Right {
    Look = 4,
    Change = 2,
    Join = 1,
}

impl Group {
    fn allows(&self, who: Credentials, right: Right) -> bool {
        let shift = match () {
            () if who.uid == self.owner.uid => 6,
            () if who.gid == self.owner.gid => 3,
            () => 0,
        };
        who.uid == 0 || self.mode >> shift & right as u16 != 0
    }

    /// Returns the rates of a flow's class within the group.
    fn member_terms(&self, link: &Ledger, bits: u64) -> Outcome<ClassRates> {
        let ceiling = match self.options {
            GroupOptions {
                share: false,
                slack: false,
                ..
            } => bits,
            _ => self.terms.ceiling,
        };
        link.plain_terms(bits, ceiling.max(bits)).map_err(refusal)
    }
}

impl Groups {
    /// Returns the groups of a link: their classes, promised rates and kept rates.
    pub(super) fn on(
        &self,
        ifindex: u32,
    ) -> impl Iterator<Item = (ClassId, ClassRates, ClassRates)> {
        let groups = self.by_key.values();
        groups
            .filter(move |group| group.ifindex == ifindex)
            .map(|group| (group.class, group.terms, group.kept))
    }

    pub(super) fn set_kept(&mut self, class: ClassId, kept: ClassRates) {
        let mut groups = self.by_key.values_mut();
        if let Some(group) = groups.find(|group| group.class == class) {
            group.kept = kept;
        }
    }

    /// Follows a device that has returned under another interface index.
    pub(super) fn follow(&mut self, before: u32, ifindex: u32) {
        let groups = self.by_key.values_mut();
        groups
            .filter(|group| group.ifindex == before)
            .for_each(|group| group.ifindex = ifindex);
    }

    pub(super) fn has_class(&self, class: ClassId) -> bool {
        self.by_key.values().any(|group| group.class == class)
    }

    pub(super) fn class_of_key(&self, key: u32) -> Option<ClassId> {
        self.by_key.get(&key).map(|group| group.class)
    }

    pub(super) fn keys(&self) -> Vec<u32> {
        self.by_key.keys().copied().collect()
    }

    pub(super) fn count(&self) -> usize {
        self.by_key.len()
    }

    /// Returns how many groups a user has made.
    pub(super) fn count_of(&self, uid: u32) -> usize {
        let groups = self.by_key.values();
        groups.filter(|group| group.owner.uid == uid).count()
    }
}
