//! Processes that perform the handshakes of a listener together, because each of them has it: workers that a master has
//! forked. Flows are dealt among them by the hash of the peer (ADR 39).
//!
//! Only the performer of a bucket knows the connections of the bucket's flows until they are registered. So a bucket goes
//! from one performer to another only while the first is *quiet*: it has registered all that it knew, and gets nothing new.

use std::collections::BTreeMap;

use portolan_proto::control::AcceptQueue;
use portolan_types::{ChannelId, Slot};

use crate::sharing::Deal;

#[cfg(test)]
mod tests;

/// More processes than that leave the handshakes to the server.
const MOST: usize = 64;

#[derive(Debug, Default)]
pub struct Performers {
    members: Vec<Performer>,
    /// Processes that have been asked whether they take part.
    invited: Vec<ChannelId>,
    deal: Deal<ChannelId>,
    /// Buckets are to be dealt anew.
    is_due: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Performer {
    pub channel: ChannelId,
    /// The slot there that its part of the port's segments go to.
    pub slot: Slot,
    /// As last reported by the process.
    pub queue: AcceptQueue,
    /// Of the previous server: the process has not come yet.
    is_inherited: bool,
    standing: Standing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Active,
    /// Active, and asked to become quiet.
    Asked,
    Quiet,
}

impl Performer {
    fn is_quiet(&self) -> bool {
        self.standing == Standing::Quiet
    }
}

impl Performers {
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub fn has(&self, channel: ChannelId) -> bool {
        self.member(channel).is_some()
    }

    pub fn members(&self) -> &[Performer] {
        &self.members
    }

    fn member(&self, channel: ChannelId) -> Option<&Performer> {
        self.members.iter().find(|it| it.channel == channel)
    }

    pub(crate) fn member_mut(&mut self, channel: ChannelId) -> Option<&mut Performer> {
        self.members.iter_mut().find(|it| it.channel == channel)
    }

    /// Returns the performer of each bucket; the server's buckets have none.
    pub fn buckets(&self) -> impl Iterator<Item = (u32, Option<&Performer>)> + '_ {
        let buckets = self.deal.buckets();
        buckets.map(|(bucket, owner)| (bucket, self.member(owner)))
    }

    /// A process offers to take part, and is quiet. Returns false if there is no room for another one.
    pub(crate) fn offer(&mut self, channel: ChannelId, slot: Slot) -> bool {
        self.invited.retain(|invited| *invited != channel);
        let offered = Performer {
            channel,
            slot,
            queue: AcceptQueue::HasRoom,
            is_inherited: false,
            standing: Standing::Quiet,
        };
        if let Some(known) = self.member_mut(channel) {
            *known = offered;
            self.deal.give(channel, ChannelId::SERVER);
        } else if self.members.len() < MOST {
            self.members.push(offered);
        } else {
            return false;
        }
        self.is_due = true;
        true
    }

    /// The performers of buckets under the previous server go on.
    pub(crate) fn continue_with(&mut self, buckets: &BTreeMap<u32, (ChannelId, Slot)>) {
        for &(channel, slot) in buckets.values() {
            if !self.has(channel) && self.members.len() < MOST {
                self.members.push(Performer {
                    channel,
                    slot,
                    queue: AcceptQueue::HasRoom,
                    is_inherited: true,
                    standing: Standing::Active,
                });
            }
        }
        let owner = |bucket| buckets.get(&bucket).map_or(ChannelId::SERVER, |it| it.0);
        self.deal = Deal::of(owner);
    }

    /// The process of the performer has come, and goes on at that slot.
    pub(crate) fn confirm(&mut self, channel: ChannelId, slot: Slot) -> bool {
        let known = self.member_mut(channel).filter(|it| it.slot == slot);
        let Some(known) = known else { return false };
        known.is_inherited = false;
        true
    }

    /// Performers whose processes have not come.
    pub(crate) fn inherited(&self) -> impl Iterator<Item = ChannelId> + '_ {
        let inherited = self.members.iter().filter(|it| it.is_inherited);
        inherited.map(|it| it.channel)
    }

    /// Returns whom to ask so that buckets can be dealt: those that are active, and those of `others` that might take
    /// part, too.
    pub(crate) fn call_together(
        &mut self,
        others: impl IntoIterator<Item = ChannelId>,
    ) -> Vec<ChannelId> {
        let mut asked = Vec::new();
        for other in others {
            if !self.has(other) && !self.invited.contains(&other) {
                self.invited.push(other);
                asked.push(other);
            }
        }
        for member in &mut self.members {
            if member.standing == Standing::Active {
                member.standing = Standing::Asked;
                asked.push(member.channel);
            }
        }
        asked
    }

    /// Has everybody answered whom a new deal concerns?
    pub(crate) fn are_together(&self) -> bool {
        self.is_due && self.invited.is_empty() && self.members.iter().all(Performer::is_quiet)
    }

    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Deals the buckets among those that are quiet. The others keep theirs.
    pub(crate) fn deal(&mut self) {
        let (quiet, active): (Vec<&Performer>, Vec<&Performer>) =
            self.members.iter().partition(|it| it.is_quiet());
        let channels = |them: Vec<&Performer>| them.iter().map(|it| it.channel).collect::<Vec<_>>();
        self.deal.share_out(&channels(quiet), &channels(active));
        self.invited.clear();
        self.is_due = false;
        for member in &mut self.members {
            member.standing = Standing::Active;
        }
    }

    /// A process takes part no longer. The others get its buckets, unless they are about to be dealt anew.
    pub(crate) fn leave(&mut self, channel: ChannelId) -> Option<Performer> {
        self.invited.retain(|invited| *invited != channel);
        let place = self.members.iter().position(|it| it.channel == channel)?;
        let left = self.members.remove(place);
        self.deal.give(channel, ChannelId::SERVER);
        if !self.is_due {
            let others: Vec<ChannelId> = self.members.iter().map(|it| it.channel).collect();
            self.deal.among(&others);
        }
        Some(left)
    }
}
