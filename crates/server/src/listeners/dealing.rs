//! Listeners whose handshakes several processes perform, each for the flows that it is dealt (ADR 39).

use std::collections::HashSet;

use portolan_bpf::TableError;
use portolan_control::{Command, Effects, Errno};
use portolan_proto::control::{PartOffer, ReplyBody};
use portolan_proto::filter::{BindingKey, FlowRow, SHARE_BUCKETS, SenderKey, ShareKey};
use portolan_types::{ChannelId, Protocol, SessionId, Slot};
use tracing::{debug, warn};

use crate::adoption::Buckets;
use crate::handles::DealtRows;
use crate::requests::Answer;
use crate::server::Server;

impl Server {
    /// `TakePart`: a process that has the listener, as others do, offers to perform a part of its handshakes.
    pub(crate) fn take_part(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        offer: PartOffer,
    ) -> Result<Answer, Errno> {
        let session = self.control.registry.admit(channel, Command::Serve, id)?;
        let local = session.local;
        self.sysctls.look(self.now);
        let rules = match offer {
            PartOffer::Anew(slot) => self.choose_performer(id, (channel, slot)),
            PartOffer::AsBefore(slot) => {
                let secret = self.control.confirm_part(id, (channel, slot));
                secret.map(|secret| self.admit_performer(id, channel, secret))
            }
        };
        debug!(
            session = id.0,
            channel = channel.0,
            ?offer,
            takes_part = rules.is_some(),
            "handshakes offered"
        );
        let body = ReplyBody::Listening {
            session: id,
            local,
            rules,
        };
        Ok(body.into())
    }

    fn choose_performer(
        &mut self,
        id: SessionId,
        (channel, slot): (ChannelId, Slot),
    ) -> Option<Vec<u8>> {
        if !self.config.delegation.allow || !self.has_room_for_deal(id) {
            self.leave_part(channel, id);
            return None;
        }
        let mut effects = Effects::new();
        let secret = self
            .control
            .offer_part(id, (channel, slot), self.now, &mut effects);
        self.carry_out(effects);
        if !self.control.has_performers(id) {
            self.end_deal(id);
        }
        secret.map(|secret| self.admit_performer(id, channel, secret))
    }

    fn admit_performer(&mut self, id: SessionId, channel: ChannelId, secret: [u8; 16]) -> Vec<u8> {
        self.control.registry.entitle(id, channel);
        self.rules(secret)
    }

    /// The processes that performed handshakes under the previous server go on, if they come.
    pub(crate) fn continue_deal(&mut self, id: SessionId, buckets: &Buckets) {
        if self.config.delegation.allow
            && self.has_room_for_deal(id)
            && !self.control.continue_parts(id, buckets)
        {
            self.end_deal(id);
        }
    }

    /// Processes that have not come perform no handshakes any more.
    pub(crate) fn end_parts_of_absent(&mut self) {
        for (id, channel) in self.control.inherited_parts() {
            self.leave_part(channel, id);
        }
    }

    /// Charges the listener's user for the buckets, once.
    fn has_room_for_deal(&mut self, id: SessionId) -> bool {
        if self.handles.of(id).dealt.is_some() {
            return true;
        }
        let Some(session) = self.control.registry.session(id) else {
            return false;
        };
        let keys: Vec<BindingKey> =
            BindingKey::of(Protocol::Tcp, session.local, session.v6_only).collect();
        let charge = self.sharing.charge_deals_of(session.uid, keys.len() as u64);
        let Ok(charge) = charge else {
            return false;
        };
        self.handles.of(id).dealt = Some(DealtRows {
            keys,
            senders: HashSet::new(),
            charge,
        });
        true
    }

    /// The process performs none of the listener's handshakes any more.
    pub(crate) fn leave_part(&mut self, channel: ChannelId, id: SessionId) {
        let performs = self.control.performs(id, channel);
        if performs {
            self.probe_unregistered(channel, |_, port| port == id);
            self.keep_cookies_of(id, channel);
        }
        let mut effects = Effects::new();
        self.control.leave_part(id, channel, &mut effects);
        self.carry_out(effects);
    }

    /// Writes the rows of a listener that has performers: everything that a row refers to is written before the row.
    pub(crate) fn steer_to_performers(&mut self, id: SessionId) {
        if let Err(error) = self.write_deal(id) {
            warn!(%error, session = id.0, "cannot deal the flows of a port");
        }
    }

    fn write_deal(&mut self, id: SessionId) -> Result<(), TableError> {
        let (Some(session), Some(listener)) = (
            self.control.registry.session(id),
            self.control.registry.listener(id),
        ) else {
            return Ok(());
        };
        let row = |place, flags| self.row_of_listener(session, place, flags);
        let row_of = |owner: Option<(ChannelId, Slot)>| match owner {
            Some(performer) => row(performer, FlowRow::DELEGATED | FlowRow::SHARED),
            None => row(Server::PLACE, 0),
        };
        let performers = &listener.performers;
        let buckets: Vec<(u32, FlowRow)> = performers
            .buckets()
            .map(|(bucket, owner)| (bucket, row_of(owner.map(|it| (it.channel, it.slot)))))
            .collect();
        let Some(first) = performers.members().first() else {
            return Ok(());
        };
        let flags = FlowRow::DELEGATED | FlowRow::SHARED | FlowRow::DEALT;
        let whole = row((first.channel, first.slot), flags);
        let class = self.class_in_row(session);
        let senders: HashSet<ChannelId> =
            performers.members().iter().map(|it| it.channel).collect();
        let Some(dealt) = &mut self.handles.of(id).dealt else {
            return Ok(());
        };
        let left: Vec<ChannelId> = dealt.senders.difference(&senders).copied().collect();
        for binding in &dealt.keys {
            for channel in &senders {
                self.filter
                    .allow_sender(&sender(binding, *channel), class)?;
            }
            for &(bucket, row) in &buckets {
                let share = ShareKey {
                    binding: *binding,
                    bucket,
                };
                self.filter.deal(&share, row)?;
            }
            if !buckets.is_empty() {
                self.filter.bind(binding, whole)?;
            }
            for channel in &left {
                self.filter.forbid_sender(&sender(binding, *channel))?;
            }
        }
        dealt.senders = senders;
        Ok(())
    }

    /// Removes what refers to the buckets of a listener that has no performers any more, after its row.
    pub(crate) fn end_deal(&mut self, id: SessionId) {
        let Some(dealt) = self.handles.of(id).dealt.take() else {
            return;
        };
        for binding in &dealt.keys {
            for channel in &dealt.senders {
                self.warn_of(self.filter.forbid_sender(&sender(binding, *channel)));
            }
            for bucket in 0..SHARE_BUCKETS {
                let share = ShareKey {
                    binding: *binding,
                    bucket,
                };
                self.warn_of(self.filter.undeal(&share));
            }
        }
    }

    fn warn_of(&self, done: Result<(), TableError>) {
        if let Err(error) = done {
            warn!(%error, "cannot end the deal of a port's flows");
        }
    }
}

fn sender(binding: &BindingKey, channel: ChannelId) -> SenderKey {
    SenderKey {
        binding: *binding,
        channel: channel.0,
    }
}
