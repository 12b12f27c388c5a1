//! From the device to a packet's receiver: what finding him costs.

mod delivery;
mod endpoints;

use super::Case;
use crate::Effort;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = delivery::cases(effort);
    cases.extend(endpoints::cases(effort));
    cases
}
