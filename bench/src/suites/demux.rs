//! From the device to a packet's receiver: what finding him costs.

mod delivery;
mod direct;
mod endpoints;
mod expected;

use super::Case;
use crate::Effort;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = delivery::cases(effort);
    cases.extend(endpoints::cases(effort));
    cases.extend(expected::cases(effort));
    cases.extend(direct::cases(effort));
    cases
}
