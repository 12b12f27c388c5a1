//! Raw flows: which program has which protocol of its own, and which users may have one. The filters do the
//! rest (ADR 17).

mod serve;

use std::collections::BTreeMap;

use portolan_control::ClaimId;
use portolan_proto::raw::Guard;
use portolan_types::{ChannelId, Slot};

use crate::reservation::PortReservation;

#[derive(Debug, Default)]
pub(crate) struct RawFlows(BTreeMap<Guard, Owner>);

/// The owner of a protocol.
#[derive(Debug)]
struct Owner {
    channel: ChannelId,
    slot: Slot,
    /// Set if the guard is a port.
    port: Option<Port>,
}

/// A port reserved in the port table and in the kernel.
#[derive(Debug)]
struct Port {
    claim: ClaimId,
    /// Never read: what the kernel delivers there is discarded.
    _reservation: PortReservation,
}

impl RawFlows {
    fn of(&self, channel: ChannelId) -> Vec<Guard> {
        let owned = self.0.iter().filter(|(_, owner)| owner.channel == channel);
        owned.map(|(guard, _)| *guard).collect()
    }
}
