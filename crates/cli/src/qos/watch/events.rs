//! Changes of links since the previous report, and of the guarantees on them.

use std::fmt;

use portolan_proto::qos::text::show_rate;
use portolan_proto::qos::{LinkReport, QosReport, RateKept};
use schemars::JsonSchema;
use serde::Serialize;

use crate::qos::show::scope;
use crate::table::printable;

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub(super) struct Event {
    whom: String,
    device: String,
    #[serde(flatten)]
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "what", content = "rate", rename_all = "kebab-case")]
enum What {
    Gone,
    Back,
    /// None: not known.
    Rate(Option<u64>),
    Suspended,
    KeptAt(u64),
    KeptInFull,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Event { whom, device, what } = self;
        match what {
            What::Gone => write!(f, "{whom} {device} has gone"),
            What::Back => write!(f, "{whom} {device} is back"),
            What::Rate(Some(bits)) => write!(f, "{whom} {device} has {} now", show_rate(*bits)),
            What::Rate(None) => write!(f, "{whom} {device} has no known rate now"),
            What::Suspended => write!(f, "{whom} on {device} is suspended"),
            What::KeptAt(bits) => write!(f, "{whom} on {device} is kept at {}", show_rate(*bits)),
            What::KeptInFull => write!(f, "{whom} on {device} is kept in full again"),
        }
    }
}

/// Links come first, because changes of guarantees follow from theirs.
pub(super) fn between(before: &QosReport, now: &QosReport) -> Vec<Event> {
    let links = now.links.iter().filter_map(|link| {
        let earlier = before.links.iter().find(|e| e.device == link.device)?;
        Some(Event {
            whom: "link".to_owned(),
            device: printable(&link.device),
            what: of_link(earlier, link)?,
        })
    });
    let groups = now.groups.iter().filter_map(|group| {
        let earlier = before.groups.iter().find(|e| e.key == group.key)?;
        Some(Event {
            whom: format!("group {}", group.key),
            device: printable(&group.device),
            what: of_promise(earlier.kept, group.kept)?,
        })
    });
    let reserved = now.transmit.iter().filter_map(|entry| {
        let earlier = before.transmit.iter().find(|e| e.scope == entry.scope)?;
        Some(Event {
            whom: scope(&entry.scope),
            device: printable(&entry.device),
            what: of_promise(earlier.kept, entry.kept)?,
        })
    });
    links.chain(groups).chain(reserved).collect()
}

fn of_link(before: &LinkReport, now: &LinkReport) -> Option<What> {
    match (before.gone, now.gone) {
        (false, true) => Some(What::Gone),
        (true, false) => Some(What::Back),
        (false, false) if before.rate != now.rate => Some(What::Rate(now.rate)),
        _ => None,
    }
}

fn of_promise(before: RateKept, now: RateKept) -> Option<What> {
    (before != now).then_some(match now {
        RateKept::Full => What::KeptInFull,
        RateKept::Scaled { bits } => What::KeptAt(bits),
        RateKept::Suspended => What::Suspended,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::show::tests::report;

    fn told(before: &QosReport, now: &QosReport) -> Vec<String> {
        let events = between(before, now);
        events.iter().map(Event::to_string).collect()
    }

    #[test]
    fn a_link_that_goes_and_comes_back_is_told_with_what_it_means() {
        let mut before = report();
        before.transmit[0].kept = RateKept::Full;
        let mut gone = report();
        gone.links[0].gone = true;
        gone.transmit[0].kept = RateKept::Suspended;
        assert_eq!(
            told(&before, &gone),
            ["link eth0 has gone", "pid 123 on eth0 is suspended"]
        );
        assert_eq!(
            told(&gone, &before),
            ["link eth0 is back", "pid 123 on eth0 is kept in full again"]
        );
    }

    #[test]
    fn a_link_of_another_speed_is_told_with_what_is_kept() {
        let before = report();
        let mut slower = report();
        slower.links[0].rate = Some(10_000_000);
        slower.transmit[0].kept = RateKept::Scaled { bits: 2_000_000 };
        assert_eq!(
            told(&before, &slower),
            [
                "link eth0 has 10mbit now",
                "pid 123 on eth0 is kept at 2mbit"
            ]
        );
    }

    #[test]
    fn of_what_is_new_or_unchanged_nothing_is_told() {
        assert_eq!(between(&report(), &report()), []);
        assert_eq!(between(&QosReport::default(), &report()), []);
    }
}
