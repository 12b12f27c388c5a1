//! Links that change: another rate, a device that disappears or returns. Promises stay. On a link that has become too
//! slow, each promise is kept in proportion; on one that has disappeared, none is until it returns.

mod serve;

use portolan_control::qos::transmit::{ClassId, ClassRates};
use portolan_proto::qos::RateKept;

use super::links::Link;

/// A class, its parent, and what is to be kept of its promise.
#[derive(Clone, Copy, Debug)]
struct Change {
    id: ClassId,
    parent: u16,
    before: ClassRates,
    after: ClassRates,
}

/// Returns how a report describes a promise.
pub(in crate::qos) fn kept(
    link: Option<&Link>,
    promised: &ClassRates,
    kept: &ClassRates,
) -> RateKept {
    match link {
        Some(link) if link.scheduler.is_none() => RateKept::Suspended,
        _ if kept.rate < promised.rate => RateKept::Scaled { bits: kept.rate },
        _ => RateKept::Full,
    }
}
