//! Multiplex groups (MS Table I): one reserved rate that flows of several processes share, each with a rate of its
//! own. A group is a class of the link with its flows' classes below it.

mod serve;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use portolan_control::qos::transmit::{ClassId, ClassRates, Link as Ledger};
use portolan_proto::qos::GroupOptions;
use portolan_sys::unix::Credentials;

use super::transmit::refusal;
use crate::poll::Token;
use crate::qos::request::Outcome;

/// All groups by their keys.
#[derive(Debug, Default)]
pub struct Groups {
    by_key: BTreeMap<u32, Group>,
}

#[derive(Debug)]
struct Group {
    class: ClassId,
    ifindex: u32,
    owner: Credentials,
    mode: u16,
    /// What was promised, and what of it the link lets be kept.
    terms: ClassRates,
    kept: ClassRates,
    options: GroupOptions,
    /// Gone when it has ended.
    maker: Option<(OwnedFd, Token)>,
}

/// What is asked of a group, as the bits of a file's mode say it.
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

    /// Of a flow's class within it.
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
    /// Those of a link: their classes, what they were promised and what is kept of it.
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

    /// A device has come back by another number.
    pub(super) fn follow(&mut self, before: u32, ifindex: u32) {
        let groups = self.by_key.values_mut();
        groups
            .filter(|group| group.ifindex == before)
            .for_each(|group| group.ifindex = ifindex);
    }

    pub(super) fn has_class(&self, class: ClassId) -> bool {
        self.by_key.values().any(|group| group.class == class)
    }

    pub(super) fn count(&self) -> usize {
        self.by_key.len()
    }

    /// Those that a user has made.
    pub(super) fn count_of(&self, uid: u32) -> usize {
        let groups = self.by_key.values();
        groups.filter(|group| group.owner.uid == uid).count()
    }
}
