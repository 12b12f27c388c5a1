//! Links that change: another rate, a device that goes, one that comes back. What was promised stays promised. On a link
//! that has become too slow for all of it, each promise is kept in proportion; on one that has gone, none is until it is
//! there again.

mod serve;

use portolan_control::qos::transmit::{ClassId, ClassRates};
use portolan_proto::qos::RateKept;

use super::links::Link;

/// A class, within which it is, and what of its promise is to be kept.
#[derive(Clone, Copy, Debug)]
struct Change {
    id: ClassId,
    parent: u16,
    before: ClassRates,
    after: ClassRates,
}

/// What a report says of a promise.
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
