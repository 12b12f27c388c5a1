//! Managed devices as links: their rates, their schedulers, and their former queueing disciplines.

mod serve;

use std::collections::HashMap;

use portolan_control::qos::transmit::{ClassRates, Link as Ledger};
use portolan_proto::qos::{ClassTraffic, LinkReport};
use portolan_sys::traffic::{Before, Counts, Traffic, TrafficError};
use portolan_sys::{device, traffic};
use tracing::warn;

use super::{RESERVED_FIRST, Reservations, class};
use crate::config::LinkConfig;

/// A managed device.
#[derive(Debug)]
pub(in crate::qos) struct Link {
    pub(super) config: LinkConfig,
    /// None while its rate is unknown.
    pub(super) ledger: Option<Ledger>,
    /// The former queueing discipline, if our scheduler is installed.
    pub(super) scheduler: Option<Before>,
    pub(super) presence: Presence,
}

/// Whether a device with the link's name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    There,
    /// Its interface index may be another device's by now.
    Gone,
}

pub(super) fn whole_of(ledger: &Ledger) -> traffic::Class {
    class(traffic::WHOLE, 0, &ledger.whole(), RESERVED_FIRST)
}

/// What the classes of each link have sent.
#[derive(Debug, Default)]
pub(in crate::qos) struct LinkCounts(HashMap<(u32, u16), Counts>);

/// Returns the class of everything without a reservation.
pub(super) fn rest_of(ledger: &Ledger) -> traffic::Class {
    class(
        traffic::BEST_EFFORT,
        traffic::WHOLE,
        &ledger.best_effort(),
        BEST_EFFORT_LAST,
    )
}

/// Priority of best effort, after reservations.
const BEST_EFFORT_LAST: u32 = 1;

/// What the kernel is asked about links. It answers when nobody else changes the network's configuration: a thread asks.
pub(in crate::qos) struct Question {
    /// Links whose rate is not known, and their devices.
    rates: Vec<(u32, String)>,
    /// Links whose classes are to be counted.
    counts: Vec<u32>,
}

/// What the kernel says.
pub(in crate::qos) struct LinkAnswer {
    pub(in crate::qos) rates: Vec<(u32, u64)>,
    pub(in crate::qos) counts: LinkCounts,
}

impl Question {
    pub(in crate::qos) fn ask(self) -> LinkAnswer {
        let rate_of =
            |(ifindex, name): (u32, String)| device::rate(&name).map(|rate| (ifindex, rate));
        LinkAnswer {
            rates: self.rates.into_iter().filter_map(rate_of).collect(),
            counts: LinkCounts::of_links(&self.counts).unwrap_or_else(|error| {
                warn!(%error, "cannot count what classes have sent");
                LinkCounts::default()
            }),
        }
    }
}

impl LinkCounts {
    /// Each asked once.
    fn of_links(ifindices: &[u32]) -> Result<LinkCounts, TrafficError> {
        let mut all = LinkCounts::default();
        if ifindices.is_empty() {
            return Ok(all);
        }
        let mut traffic = Traffic::open()?;
        for &ifindex in ifindices {
            let counts = traffic.counts(ifindex)?;
            let of_class = |(minor, counts)| ((ifindex, minor), counts);
            all.0.extend(counts.into_iter().map(of_class));
        }
        Ok(all)
    }

    pub(in crate::qos) fn of(&self, ifindex: u32, minor: u16) -> ClassTraffic {
        let counts = self.0.get(&(ifindex, minor));
        counts.map_or_else(ClassTraffic::default, |counts| ClassTraffic {
            bytes: counts.bytes,
            packets: counts.packets,
            drops: u64::from(counts.drops),
            backlog: counts.backlog,
        })
    }
}

impl Reservations {
    pub(super) fn ledger_mut(&mut self, ifindex: u32) -> Option<&mut Ledger> {
        self.links.get_mut(&ifindex)?.ledger.as_mut()
    }

    /// What is to be asked of the kernel before a request is answered; none where all is known.
    pub(in crate::qos) fn question(&self, is_report: bool) -> Option<Question> {
        let of = |wanted: fn(&Link) -> bool| {
            let links = self.links.iter().filter(move |(_, link)| wanted(link));
            links.map(|(ifindex, link)| (*ifindex, link.config.device.clone()))
        };
        let scheduled = of(|link| link.scheduler.is_some()).filter(|_| is_report);
        let question = Question {
            rates: of(|link| link.ledger.is_none()).collect(),
            counts: scheduled.map(|(ifindex, _)| ifindex).collect(),
        };
        (!question.rates.is_empty() || !question.counts.is_empty()).then_some(question)
    }

    pub(in crate::qos) fn note_rates(&mut self, rates: &[(u32, u64)]) {
        for (ifindex, rate) in rates {
            if let Some(link) = self.links.get_mut(ifindex)
                && link.ledger.is_none()
            {
                link.ledger = Some(Ledger::new(*rate, link.config.portions()));
            }
        }
    }

    pub(in crate::qos) fn report_links(&self, counts: &LinkCounts) -> Vec<LinkReport> {
        let links = self.links.iter().map(|(ifindex, link)| {
            let ledger = link.ledger.as_ref();
            LinkReport {
                device: link.config.device.clone(),
                gone: link.presence == Presence::Gone,
                rate: ledger.map(Ledger::rate),
                reservable: ledger.map_or(0, Ledger::reservable),
                reserved: ledger.map_or(0, Ledger::reserved),
                best_effort: counts.of(*ifindex, traffic::BEST_EFFORT),
                replaced: link.scheduler.as_ref().and_then(Before::name),
            }
        });
        links.collect()
    }

    fn note(&self, device: &str, before: &Before) {
        let noted = self
            .journal
            .as_ref()
            .map(|journal| journal.record_link(device, &before.record()));
        if let Some(Err(error)) = noted {
            warn!(%error, "a scheduler would stay if this server died");
        }
    }

    /// Returns the narrowest best effort of all links with a scheduler; none without such links.
    pub(super) fn best_effort(&self) -> Option<ClassRates> {
        let scheduled = self.links.values().filter(|link| link.scheduler.is_some());
        let terms = scheduled.filter_map(|link| link.ledger.as_ref().map(Ledger::best_effort));
        terms.min_by_key(|terms| terms.rate)
    }

    /// Returns the managed devices that do not exist at the moment.
    pub(in crate::qos) fn gone(&self) -> impl Iterator<Item = &str> {
        let gone = |link: &&Link| link.presence == Presence::Gone;
        let links = self.links.values().filter(gone);
        links.map(|link| link.config.device.as_str())
    }

    pub(in crate::qos) fn device(&self, ifindex: u32) -> String {
        let link = self.links.get(&ifindex);
        link.map(|link| link.config.device.clone())
            .unwrap_or_default()
    }

    pub(super) fn is_scheduled(&self, ifindex: u32) -> bool {
        let link = self.links.get(&ifindex);
        link.is_some_and(|link| link.scheduler.is_some())
    }

    pub(in crate::qos) fn link(&self, ifindex: u32) -> Option<&Link> {
        self.links.get(&ifindex)
    }

    /// None if the kernel does not say now.
    pub(super) fn counts(&mut self, ifindex: u32) -> Option<HashMap<u16, Counts>> {
        if !self.is_scheduled(ifindex) {
            return Some(HashMap::new());
        }
        match self.traffic.ask(move |traffic| traffic.counts(ifindex)) {
            Ok(counts) => Some(counts.into_iter().collect()),
            Err(TrafficError::Held) => None,
            Err(error) => {
                warn!(%error, "cannot count what classes have sent");
                Some(HashMap::new())
            }
        }
    }

    /// Returns the rate that the device reports.
    pub(super) fn rate_of(&mut self, device: &str) -> Result<Option<u64>, TrafficError> {
        let name = device.to_owned();
        self.traffic.ask(move |_| Ok(device::rate(&name)))
    }
}

impl Link {
    /// Returns whether there is a scheduler without a reservation, which no configured rate requires.
    pub(super) fn is_unused(&self) -> bool {
        let is_idle = self
            .ledger
            .as_ref()
            .is_some_and(|ledger| ledger.reserved() == 0);
        is_idle && self.scheduler.is_some() && self.config.rate.is_none()
    }
}
