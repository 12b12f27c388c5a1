//! From the device to a packet's receiver: what finding him costs.

mod endpoints;

use super::Case;
use crate::Effort;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    endpoints::cases(effort)
}
