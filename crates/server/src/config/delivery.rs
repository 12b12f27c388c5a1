//! How packets reach the sessions of processes.

use portolan_proto::control::Delivery;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeliveryConfig {
    /// Of sessions that choose nothing.
    pub form: Delivery,
}
