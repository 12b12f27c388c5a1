//! Two programs of one host over loopback: the round trips of `rtt` over TCP and the transfers of
//! `bulk`.

use super::{Case, bulk, rtt};
use crate::Effort;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = rtt::local_cases(effort);
    cases.extend(bulk::local_cases(effort));
    cases
}
