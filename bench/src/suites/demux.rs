//! The cost of finding a packet's receiver.

mod delivery;
mod direct;
pub(crate) mod endpoints;
pub(crate) mod expected;
mod layers;

use std::time::Duration;

use super::Case;
use crate::Effort;

/// Time until a program that echoes datagrams is ready, and until the statistics of programs are up to date.
const SETTLE: Duration = Duration::from_millis(700);

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = delivery::cases(effort);
    cases.extend(endpoints::cases(effort));
    cases.extend(expected::cases(effort));
    cases.extend(direct::cases(effort));
    cases.extend(layers::cases(effort));
    cases
}
