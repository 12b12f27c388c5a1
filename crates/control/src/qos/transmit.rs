//! Admission to a link: reservations, groups, and the rest for best effort. Rates in bits per second, bursts in
//! bytes. Values come from programs: none can make a sum overflow.

use std::collections::BTreeMap;

use portolan_proto::qos::text::show_rate;
use portolan_proto::qos::{Rate, Slack, Transmit};

use crate::errno::Errno;

#[cfg(test)]
mod tests;

/// At a lower rate a segment of 64 KiB would wait for more than eight seconds.
pub const LEAST_RATE: u64 = 64_000;
/// A full-sized Ethernet frame.
pub const LEAST_BURST: u32 = 1_514;
pub const MOST_BURST: u32 = 64 << 20;
pub const LEAST_PERIOD_US: u32 = 1_000;
pub const MOST_PERIOD_US: u32 = 10_000_000;

/// How long a writer with data to send may sleep without losing any of its rate.
const DEFAULT_BURST_MS: u64 = 20;
const DEFAULT_BURST: std::ops::RangeInclusive<u64> = 16 << 10..=4 << 20;
/// Burst at the ceiling, sized for fewer wake-ups.
const CEILING_BURST_MS: u64 = 2;
/// The largest frame (GSO).
const LARGEST_FRAME: u64 = 64 << 10;
/// How much a tap may queue in a class: more than is sent until its writer runs again.
const WAITING_MS: u64 = 40;
/// The same for the rate above the guarantee, which another class may soon need.
const WAITING_CEILING_MS: u64 = 20;
const WAITING: std::ops::RangeInclusive<u64> = 32 << 10..=16 << 20;

/// A class of the link's scheduler, by its minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClassId(pub u16);

/// Guarantee and limit of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassRates {
    pub rate: u64,
    pub ceiling: u64,
    pub burst: u32,
}

impl ClassRates {
    /// Returns the burst at the ceiling's rate, at least `burst`.
    pub fn ceiling_burst(&self) -> u32 {
        let bytes = bytes_in(self.ceiling, CEILING_BURST_MS);
        clamped(bytes, 0..=u64::from(MOST_BURST)).max(self.burst)
    }

    /// Returns the quantum for sharing excess bandwidth: by rate, at least a frame.
    pub fn quantum(&self) -> u32 {
        clamped(
            bytes_in(self.rate, 1),
            u64::from(LEAST_BURST)..=LARGEST_FRAME * 4,
        )
    }

    /// Returns how many bytes a tap may queue in the class.
    pub fn send_buffer(&self) -> u32 {
        let sure = bytes_in(self.rate, WAITING_MS);
        let maybe = bytes_in(self.ceiling, WAITING_CEILING_MS);
        clamped(sure.max(maybe), WAITING).max(self.burst.min(1 << 20))
    }
}

/// Portions of a link's rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portions {
    /// Of the link, for all reservations.
    pub reservable_percent: u8,
    /// Of that, for one user other than root; with 0 only root may reserve.
    pub user_percent: u8,
}

/// The admission test that a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("a rate of {} is below the least that can be reserved, {}", show_rate(*.0), show_rate(LEAST_RATE))]
    Slow(u64),
    #[error("a period of {0} µs is not between {LEAST_PERIOD_US} and {MOST_PERIOD_US}")]
    Period(u32),
    #[error("a slice of {slice_us} µs is not between 1 and its period of {period_us} µs")]
    Slice { slice_us: u32, period_us: u32 },
    #[error("a burst of {0} bytes is not between {LEAST_BURST} and {MOST_BURST}")]
    Burst(u32),
    #[error("a ceiling of {} is below the rate, {}", show_rate(*.ceiling), show_rate(*.rate))]
    Ceiling { ceiling: u64, rate: u64 },
    #[error("{} do not fit the link: of {} that can be reserved, {} are left", show_rate(*.wanted), show_rate(*.of), show_rate(*.left))]
    Link { wanted: u64, of: u64, left: u64 },
    #[error("{} are beyond your share of the link: of {}, {} are left", show_rate(*.wanted), show_rate(*.of), show_rate(*.left))]
    User { wanted: u64, of: u64, left: u64 },
    #[error(
        "only root may reserve of this link: the server's configuration gives users no share of it (`[[qos.link]]`)"
    )]
    RootOnly,
    #[error("{} do not fit the group: of its {}, {} are left", show_rate(*.wanted), show_rate(*.of), show_rate(*.left))]
    Group { wanted: u64, of: u64, left: u64 },
    #[error("a group with {} for {} reserved by its flows is too slow", show_rate(*.wanted), show_rate(*.members))]
    Shrunk { wanted: u64, members: u64 },
}

impl Refused {
    pub fn errno(&self) -> Errno {
        match self {
            Refused::Slow(_)
            | Refused::Period(_)
            | Refused::Slice { .. }
            | Refused::Burst(_)
            | Refused::Ceiling { .. } => Errno::INVAL,
            Refused::Link { .. } | Refused::Group { .. } | Refused::Shrunk { .. } => Errno::BUSY,
            Refused::User { .. } => Errno::DQUOT,
            Refused::RootOnly => Errno::PERM,
        }
    }
}

/// One link and its promises. A change is made completely or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    rate: u64,
    portions: Portions,
    claims: BTreeMap<ClassId, ClassClaim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClassClaim {
    uid: u32,
    rate: u64,
    /// The group within which the class was admitted.
    group: Option<ClassId>,
}

impl Link {
    pub fn new(rate: u64, portions: Portions) -> Link {
        Link {
            rate,
            portions,
            claims: BTreeMap::new(),
        }
    }

    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Changes the link's rate. Promises stay; [`Link::kept`] returns what can be kept of them.
    pub fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
    }

    /// Returns what is kept of a promise: all of it or, on a link that has become too slow for all promises, a
    /// proportional part.
    pub fn kept(&self, promised: ClassRates) -> ClassRates {
        let rate = self.part_kept(promised.rate);
        ClassRates {
            rate,
            ceiling: promised.ceiling.min(self.rate).max(rate),
            burst: promised.burst,
        }
    }

    fn part_kept(&self, rate: u64) -> u64 {
        let (reserved, reservable) = (self.reserved(), self.reservable());
        if reserved <= reservable {
            return rate;
        }
        let part = u128::from(rate) * u128::from(reservable) / u128::from(reserved);
        // Less than `rate`.
        (part as u64).max(LEAST_RATE.min(rate))
    }

    pub fn reservable(&self) -> u64 {
        percent(self.rate, self.portions.reservable_percent)
    }

    pub fn has(&self, class: ClassId) -> bool {
        self.claims.contains_key(&class)
    }

    pub fn reserved(&self) -> u64 {
        self.sum(|claim| claim.group.is_none())
    }

    /// Returns what a group's flows have reserved within it.
    pub fn reserved_in(&self, group: ClassId) -> u64 {
        self.sum(|claim| claim.group == Some(group))
    }

    /// Returns the rates left to the kernel and all without a reservation.
    pub fn best_effort(&self) -> ClassRates {
        let reserved = self.reserved().min(self.reservable());
        let rate = self.rate.saturating_sub(reserved).max(LEAST_RATE);
        ClassRates {
            rate,
            ceiling: self.rate,
            burst: clamped(
                bytes_in(rate, CEILING_BURST_MS),
                LARGEST_FRAME..=u64::from(MOST_BURST),
            ),
        }
    }

    /// Returns the rates of the whole link.
    pub fn whole(&self) -> ClassRates {
        ClassRates {
            rate: self.rate,
            ceiling: self.rate,
            burst: clamped(
                bytes_in(self.rate, CEILING_BURST_MS),
                LARGEST_FRAME..=u64::from(MOST_BURST),
            ),
        }
    }

    /// Translates a request into rates on this link (NE §4.4), if it is valid.
    pub fn terms(&self, spec: &Transmit) -> Result<ClassRates, Refused> {
        let (rate, slice) = match spec.rate {
            Rate::Bits(rate) => (rate, None),
            Rate::Slice {
                slice_us,
                period_us,
            } => {
                let rate = self.rate_of_slice(slice_us, period_us)?;
                (rate, Some(micros_of(self.rate, slice_us)))
            }
        };
        if rate < LEAST_RATE {
            return Err(Refused::Slow(rate));
        }
        let usual = || clamped(bytes_in(rate, DEFAULT_BURST_MS), DEFAULT_BURST);
        let burst = match (spec.burst, slice) {
            (Some(burst), _) if !(LEAST_BURST..=MOST_BURST).contains(&burst) => {
                return Err(Refused::Burst(burst));
            }
            (Some(burst), _) => burst,
            (None, Some(slice)) => clamped(slice, u64::from(LEAST_BURST)..=u64::from(MOST_BURST)),
            (None, None) => usual(),
        };
        let ceiling = match spec.slack {
            Slack::None => rate,
            Slack::UpTo(ceiling) if ceiling < rate => {
                return Err(Refused::Ceiling { ceiling, rate });
            }
            Slack::UpTo(ceiling) => ceiling.min(self.rate).max(rate),
            Slack::All => self.rate.max(rate),
        };
        Ok(ClassRates {
            rate,
            ceiling,
            burst,
        })
    }

    /// Returns the rates of a class with the given rate, which may go up to `ceiling`.
    pub fn plain_terms(&self, rate: u64, ceiling: u64) -> Result<ClassRates, Refused> {
        self.terms(&Transmit {
            device: None,
            rate: Rate::Bits(rate),
            burst: None,
            slack: Slack::UpTo(ceiling),
        })
    }

    fn rate_of_slice(&self, slice_us: u32, period_us: u32) -> Result<u64, Refused> {
        if !(LEAST_PERIOD_US..=MOST_PERIOD_US).contains(&period_us) {
            return Err(Refused::Period(period_us));
        }
        if slice_us == 0 || slice_us > period_us {
            return Err(Refused::Slice {
                slice_us,
                period_us,
            });
        }
        let rate = u128::from(self.rate) * u128::from(slice_us) / u128::from(period_us);
        // At most the link's own rate.
        Ok(u64::try_from(rate).unwrap_or(self.rate))
    }

    /// Promises `rate` of the link to `class`, or changes its promise.
    pub fn reserve(&mut self, class: ClassId, uid: u32, rate: u64) -> Result<(), Refused> {
        self.test(class, uid, rate)?;
        self.reserve_again(class, uid, rate);
        Ok(())
    }

    /// As [`Link::reserve`], for what was admitted before: if the link has become slower since, all promises are kept in
    /// proportion.
    pub fn reserve_again(&mut self, class: ClassId, uid: u32, rate: u64) {
        let group = None;
        self.claims.insert(class, ClassClaim { uid, rate, group });
    }

    fn test(&self, class: ClassId, uid: u32, rate: u64) -> Result<(), Refused> {
        let others = |claim: &ClassClaim| claim.group.is_none();
        let reservable = self.reservable();
        let left = reservable.saturating_sub(self.sum_without(class, others));
        if rate > left {
            return Err(Refused::Link {
                wanted: rate,
                of: reservable,
                left,
            });
        }
        if uid != 0 {
            if self.portions.user_percent == 0 {
                return Err(Refused::RootOnly);
            }
            let share = percent(reservable, self.portions.user_percent);
            let used = self.sum_without(class, |claim| others(claim) && claim.uid == uid);
            let left = share.saturating_sub(used);
            if rate > left {
                return Err(Refused::User {
                    wanted: rate,
                    of: share,
                    left,
                });
            }
        }
        let members = self.reserved_in(class);
        if rate < members {
            return Err(Refused::Shrunk {
                wanted: rate,
                members,
            });
        }
        Ok(())
    }

    /// Promises `rate` of a group's rate to `class`.
    pub fn join(
        &mut self,
        group: ClassId,
        class: ClassId,
        uid: u32,
        rate: u64,
    ) -> Result<(), Refused> {
        // Groups do not nest, and no group is in itself.
        let is_plain = group != class && self.reserved_in(class) == 0;
        let found = self.claims.get(&group);
        let of = found
            .filter(|claim| claim.group.is_none() && is_plain)
            .map_or(0, |claim| claim.rate);
        let used = self.sum_without(class, |claim| claim.group == Some(group));
        let left = of.saturating_sub(used);
        if rate > left {
            return Err(Refused::Group {
                wanted: rate,
                of,
                left,
            });
        }
        let group = Some(group);
        self.claims.insert(class, ClassClaim { uid, rate, group });
        Ok(())
    }

    /// Releases the promises to `class` and to its members.
    pub fn release(&mut self, class: ClassId) {
        self.claims.remove(&class);
        self.claims.retain(|_, claim| claim.group != Some(class));
    }

    fn sum(&self, counts: impl Fn(&ClassClaim) -> bool) -> u64 {
        let rates = self.claims.values().filter(|claim| counts(claim));
        rates.fold(0, |sum, claim| sum.saturating_add(claim.rate))
    }

    fn sum_without(&self, class: ClassId, counts: impl Fn(&ClassClaim) -> bool) -> u64 {
        let others = self
            .claims
            .iter()
            .filter(|(id, claim)| **id != class && counts(claim));
        others.fold(0, |sum, (_, claim)| sum.saturating_add(claim.rate))
    }
}

fn percent(of: u64, percent: u8) -> u64 {
    // A percentage of a value does not exceed it.
    (u128::from(of) * u128::from(percent.min(100)) / 100) as u64
}

/// Returns how many bytes `rate` bits per second are in `milliseconds`.
fn bytes_in(rate: u64, milliseconds: u64) -> u64 {
    (rate / 8_000).saturating_mul(milliseconds)
}

fn micros_of(rate: u64, microseconds: u32) -> u64 {
    let bytes = u128::from(rate) * u128::from(microseconds) / 8_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn clamped(bytes: u64, to: std::ops::RangeInclusive<u64>) -> u32 {
    u32::try_from(bytes.clamp(*to.start(), *to.end())).unwrap_or(u32::MAX)
}
