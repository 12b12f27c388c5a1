//! From the device to a packet's receiver: what finding him costs.

mod delivery;
mod direct;
pub(crate) mod endpoints;
pub(crate) mod expected;
mod layers;

use std::time::Duration;

use super::Case;
use crate::Effort;

/// After so long a program that echoes datagrams does so, and the figures of programs are fresh.
const SETTLE: Duration = Duration::from_millis(700);

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = delivery::cases(effort);
    cases.extend(endpoints::cases(effort));
    cases.extend(expected::cases(effort));
    cases.extend(direct::cases(effort));
    cases.extend(layers::cases(effort));
    cases
}
