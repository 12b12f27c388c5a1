//! Guarantees: who may request what, and what each kind does with a request.

mod cpu;
mod groups;
mod moves;
mod policy;
mod receive;
mod request;
mod scope;
mod serve;
mod standing;
mod transmit;
pub(crate) mod tx_queues;

use crate::config::{Config, Policy};

pub(crate) use policy::PolicyError;
pub(crate) use scope::cgroup_of;

/// All guarantees of this server.
#[derive(Debug)]
pub(crate) struct Qos {
    transmit: transmit::Reservations,
    groups: groups::Groups,
    receive: receive::Budgets,
    renewals: receive::Renewals,
    cpu: cpu::Reservations,
    whereabouts: moves::Whereabouts,
    standing: standing::Standing,
    /// From the configuration.
    policies: Vec<Policy>,
}

impl Qos {
    pub(crate) fn new(config: &Config) -> Qos {
        Qos {
            transmit: transmit::Reservations::default(),
            groups: groups::Groups::default(),
            receive: receive::Budgets::default(),
            renewals: receive::Renewals::default(),
            cpu: cpu::Reservations::new(config),
            whereabouts: moves::Whereabouts::default(),
            standing: standing::Standing::default(),
            policies: config.qos.policy.clone(),
        }
    }

    /// Returns the managed devices that do not exist at the moment.
    pub(crate) fn gone_devices(&self) -> impl Iterator<Item = &str> {
        self.transmit.gone()
    }

    /// Returns the name of a managed device.
    pub(crate) fn device(&self, ifindex: u32) -> String {
        self.transmit.device(ifindex)
    }
}
