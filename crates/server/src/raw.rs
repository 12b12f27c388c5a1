//! Raw flows: which program has which protocol of its own, and who may have one. The filters see to the rest
//! (ADR 17).

mod serve;

use std::collections::BTreeMap;

use portolan_control::ClaimId;
use portolan_proto::raw::Guard;
use portolan_types::{ChannelId, Slot};

use crate::reservation::PortReservation;

#[derive(Debug, Default)]
pub struct RawFlows(BTreeMap<Guard, Owner>);

/// Whose a protocol is.
#[derive(Debug)]
struct Owner {
    channel: ChannelId,
    slot: Slot,
    /// If it is at a port.
    port: Option<Port>,
}

/// A port that nobody else has, nor the kernel.
#[derive(Debug)]
struct Port {
    claim: ClaimId,
    /// Never read from: what the kernel hears there ends there.
    _reservation: PortReservation,
}

impl RawFlows {
    fn of(&self, channel: ChannelId) -> Vec<Guard> {
        let owned = self.0.iter().filter(|(_, owner)| owner.channel == channel);
        owned.map(|(guard, _)| *guard).collect()
    }
}
