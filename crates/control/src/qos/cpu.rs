//! Service classes and effective rates (ARC-H, MS §V). Rates are in millionths of one CPU.
//!
//! The paper's host has one CPU, whose capacity is 1. Here the capacity is that of all CPUs, as far as the kernel
//! allows it to be reserved, and a thread gets at most one CPU's part of it; the rest of its effective rate is unused.

use std::collections::BTreeMap;

use portolan_proto::qos::text::show_share;
use portolan_proto::qos::{Adapt, Cpu, CpuClassReport};

mod machine;
#[cfg(test)]
mod tests;

pub use machine::CpuLoad;

const WHOLE: u64 = 1_000_000;

/// How far a class may be overbooked (`b_k`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overbooking {
    /// In millionths. 0: each admitted member gets at least its nominal rate.
    UpTo(u32),
    /// Every claim is admitted, and gets a part.
    Unbounded,
}

/// A service class as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassTerms {
    pub name: String,
    /// `R_k`, in millionths of the capacity.
    pub share_ppm: u32,
    pub overbooking: Overbooking,
    /// What each user but root may have of the admissible rate, in millionths; with 0 only root may reserve.
    pub each_user_ppm: u32,
}

/// The capacity of the CPUs that may be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    pub cpus: u32,
    /// Of each CPU.
    pub of_one_ppm: u32,
}

impl Capacity {
    /// Of all CPUs.
    pub fn ppm(self) -> u64 {
        u64::from(self.cpus) * u64::from(self.of_one_ppm)
    }
}

/// Identifies a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// The claim of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuClaim {
    pub uid: u32,
    /// `r̂_j`.
    pub nominal_ppm: u32,
    /// The most that the member can use: for a thread the capacity of one CPU.
    pub usable_ppm: u64,
}

/// Why a reservation was not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error("there is no CPU class {name:?}; there are {there_are}")]
    NoSuchClass { name: String, there_are: String },
    #[error("a rate of nothing is no reservation")]
    NoRate,
    #[error("{} of a CPU is more than the {} that it can have", show_share(*.wanted), show_share(*.usable))]
    BeyondUsable { wanted: u64, usable: u64 },
    #[error(
        "class {class}: {} of a CPU and the {} reserved already exceed R(1+b) = {}; {} would fit",
        show_share(*.wanted), show_share(*.reserved), show_share(*.bound), show_share(*.fits)
    )]
    ClassFull {
        class: String,
        wanted: u64,
        reserved: u64,
        bound: u64,
        fits: u64,
    },
    #[error(
        "class {0}: only root may reserve: the server's configuration gives users no part of it (`each_user` of a \
         `[[qos.cpu_class]]`)"
    )]
    RootOnly(String),
    #[error(
        "class {class}: a user may have {} of a CPU, and has {} already; {} would fit",
        show_share(*.most), show_share(*.has), show_share(*.fits)
    )]
    UserFull {
        class: String,
        most: u64,
        has: u64,
        fits: u64,
    },
    #[error(
        "{} of a CPU and the {} that are promised on this machine, by other servers too, exceed the {} that there are; \
         {} would fit",
        show_share(*.wanted), show_share(*.promised), show_share(*.capacity), show_share(*.fits)
    )]
    MachineFull {
        wanted: u64,
        promised: u64,
        capacity: u64,
        fits: u64,
    },
}

/// All service classes and their members.
#[derive(Clone, Debug)]
pub struct Classes {
    capacity_ppm: u64,
    classes: Vec<Class>,
    /// The class of each member.
    places: BTreeMap<MemberId, usize>,
    /// Load of the other servers on this machine.
    others: CpuLoad,
}

#[derive(Clone, Debug)]
struct Class {
    terms: ClassTerms,
    /// `R_k`.
    rate_ppm: u64,
    members: BTreeMap<MemberId, CpuClaim>,
    /// Sum of the members' nominal rates.
    nominal_ppm: u64,
}

impl Classes {
    /// Members that name no class are put into the first one. There is at least one.
    pub fn new(capacity: Capacity, terms: impl IntoIterator<Item = ClassTerms>) -> Classes {
        let class = |terms: ClassTerms| Class {
            rate_ppm: part(capacity.ppm(), terms.share_ppm.into()),
            terms,
            members: BTreeMap::new(),
            nominal_ppm: 0,
        };
        Classes {
            capacity_ppm: capacity.ppm(),
            classes: terms.into_iter().map(class).collect(),
            places: BTreeMap::new(),
            others: CpuLoad::default(),
        }
    }

    /// Sets the load of the other servers on this machine.
    pub fn set_others(&mut self, others: CpuLoad) {
        self.others = others;
    }

    pub fn others(&self) -> CpuLoad {
        self.others
    }

    /// Returns the load that the other servers are told.
    pub fn standing(&self) -> CpuLoad {
        let ids = self.places.keys();
        CpuLoad::sum(ids.map(|id| self.standing_of(*id)))
    }

    /// Returns what a member is promised, and what its class gives it.
    fn standing_of(&self, id: MemberId) -> CpuLoad {
        let place = self.places.get(&id);
        place.map_or_else(CpuLoad::default, |place| {
            self.classes[*place].standing_of(id)
        })
    }

    /// Admits a member if `Σ r̂_i + r̂_j ≤ R_k (1 + b_k)`. An existing member changes its claim or its class, or keeps
    /// both if that is denied.
    pub fn admit(
        &mut self,
        id: MemberId,
        name: Option<&str>,
        claim: CpuClaim,
    ) -> Result<(), Denied> {
        let place = self.place(name)?;
        self.classes[place].test(id, &claim)?;
        let mut changed = self.clone();
        changed.remove(id);
        changed.classes[place].insert(id, claim);
        changed.places.insert(id, place);
        changed.test_machine(id)?;
        *self = changed;
        Ok(())
    }

    /// Checks that the promises of all servers do not exceed the capacity.
    fn test_machine(&self, id: MemberId) -> Result<(), Denied> {
        let (own, all) = (self.standing_of(id), self.standing());
        let promised = all.promised_ppm.saturating_add(self.others.promised_ppm);
        if promised <= self.capacity_ppm {
            return Ok(());
        }
        let promised = promised - own.promised_ppm;
        Err(Denied::MachineFull {
            wanted: own.promised_ppm,
            promised,
            capacity: self.capacity_ppm,
            fits: self.capacity_ppm.saturating_sub(promised),
        })
    }

    pub fn remove(&mut self, id: MemberId) {
        if let Some(place) = self.places.remove(&id) {
            self.classes[place].remove(id);
        }
    }

    /// Returns `r_j = R_k (r̂_j / Σ r̂_i)`, as far as the member can use it and other servers leave it; 0 for an
    /// unknown member.
    pub fn effective(&self, id: MemberId) -> u64 {
        let (own, all) = (self.standing_of(id), self.standing());
        let beyond = u128::from(own.wanted_ppm - own.promised_ppm);
        let allowed = all.allowance(self.others, self.capacity_ppm) - all.promised_ppm;
        let all_beyond = u128::from(all.wanted_ppm - all.promised_ppm).max(1);
        // At most what the member wants beyond its promise.
        own.promised_ppm + (u128::from(allowed) * beyond / all_beyond) as u64
    }

    /// Returns the largest nominal rate that the member could be given.
    pub fn room_of(&self, id: MemberId) -> u64 {
        let member = |place: &usize| {
            let class = &self.classes[*place];
            let claim = class.members.get(&id)?;
            let room = class.room(id).min(class.user_room(id, claim.uid));
            Some(room.min(claim.usable_ppm))
        };
        self.places.get(&id).and_then(member).unwrap_or(0)
    }

    pub fn reports(&self) -> impl Iterator<Item = CpuClassReport> {
        self.classes.iter().map(Class::report)
    }

    fn place(&self, name: Option<&str>) -> Result<usize, Denied> {
        let Some(name) = name else {
            return Ok(0);
        };
        let place = self
            .classes
            .iter()
            .position(|class| class.terms.name == name);
        place.ok_or_else(|| {
            let names: Vec<&str> = self
                .classes
                .iter()
                .map(|class| &*class.terms.name)
                .collect();
            // The name comes from a program and may be long.
            let name = name.chars().take(64).collect();
            let there_are = names.join(", ");
            Denied::NoSuchClass { name, there_are }
        })
    }
}

impl Class {
    fn test(&self, id: MemberId, claim: &CpuClaim) -> Result<(), Denied> {
        let wanted = u64::from(claim.nominal_ppm);
        if wanted == 0 {
            return Err(Denied::NoRate);
        }
        if wanted > claim.usable_ppm {
            let usable = claim.usable_ppm;
            return Err(Denied::BeyondUsable { wanted, usable });
        }
        let (fits, class) = (self.room(id), self.terms.name.clone());
        if wanted > fits {
            let (reserved, bound) = (self.nominal_without(id), self.bound());
            return Err(Denied::ClassFull {
                class,
                wanted,
                reserved,
                bound,
                fits,
            });
        }
        if claim.uid != 0 && self.terms.each_user_ppm == 0 {
            return Err(Denied::RootOnly(class));
        }
        let fits = self.user_room(id, claim.uid);
        if wanted > fits {
            let (most, has) = (self.most_of_user(), self.has_user(id, claim.uid));
            return Err(Denied::UserFull {
                class,
                most,
                has,
                fits,
            });
        }
        Ok(())
    }

    /// `R_k (1 + b_k)`.
    fn bound(&self) -> u64 {
        match self.terms.overbooking {
            Overbooking::UpTo(b) => part(self.rate_ppm, WHOLE + u64::from(b)),
            Overbooking::Unbounded => u64::MAX,
        }
    }

    fn most_of_user(&self) -> u64 {
        part(self.bound(), self.terms.each_user_ppm.into())
    }

    /// Returns the sum of the nominal rates of all other members.
    fn nominal_without(&self, id: MemberId) -> u64 {
        let own = self.members.get(&id);
        self.nominal_ppm - own.map_or(0, |claim| u64::from(claim.nominal_ppm))
    }

    /// Returns the nominal rates of a user's other members.
    fn has_user(&self, id: MemberId, uid: u32) -> u64 {
        let others = self.members.iter().filter(|(other, _)| **other != id);
        let his = others.filter(|(_, claim)| claim.uid == uid);
        his.map(|(_, claim)| u64::from(claim.nominal_ppm)).sum()
    }

    fn room(&self, id: MemberId) -> u64 {
        self.bound().saturating_sub(self.nominal_without(id))
    }

    fn user_room(&self, id: MemberId, uid: u32) -> u64 {
        match uid {
            0 => u64::MAX,
            uid => self.most_of_user().saturating_sub(self.has_user(id, uid)),
        }
    }

    fn insert(&mut self, id: MemberId, claim: CpuClaim) {
        self.remove(id);
        self.nominal_ppm += u64::from(claim.nominal_ppm);
        self.members.insert(id, claim);
    }

    fn remove(&mut self, id: MemberId) {
        if let Some(claim) = self.members.remove(&id) {
            self.nominal_ppm -= u64::from(claim.nominal_ppm);
        }
    }

    /// Returns a member's load. Its promise is its nominal rate, or less in an overbooked class.
    fn standing_of(&self, id: MemberId) -> CpuLoad {
        let Some(claim) = self.members.get(&id) else {
            return CpuLoad::default();
        };
        let wanted_ppm = self.share_of(claim).min(claim.usable_ppm);
        CpuLoad {
            promised_ppm: wanted_ppm.min(claim.nominal_ppm.into()),
            wanted_ppm,
        }
    }

    /// Returns a member's share of the class's rate.
    fn share_of(&self, claim: &CpuClaim) -> u64 {
        let share = u128::from(self.rate_ppm) * u128::from(claim.nominal_ppm);
        // Members have rates, so the sum is not 0; the quotient is at most `R_k`.
        (share / u128::from(self.nominal_ppm)) as u64
    }

    fn report(&self) -> CpuClassReport {
        CpuClassReport {
            name: self.terms.name.clone(),
            rate_ppm: self.rate_ppm,
            overbooking_ppm: match self.terms.overbooking {
                Overbooking::UpTo(b) => Some(b.into()),
                Overbooking::Unbounded => None,
            },
            nominal_ppm: self.nominal_ppm,
            members: self.members.len() as u32,
        }
    }
}

/// Returns so many `millionths` of `whole`, saturating.
fn part(whole: u64, millionths: u64) -> u64 {
    let part = u128::from(whole) * u128::from(millionths) / u128::from(WHOLE);
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// Divides a rate among several threads: in proportion to what each used, with a minimum for each, so that one that
/// wakes up after a pause can show that it needs more. None gets more than `most`.
pub fn divide(rate_ppm: u64, used: &[u64], most: u64) -> Vec<u64> {
    let total: u128 = used.iter().map(|used| u128::from(*used)).sum();
    let count = used.len() as u128;
    // A quarter is divided equally, the rest by use; all equally if nobody ran.
    let (alike, by_use) = match total {
        0 => (u128::from(rate_ppm), 0),
        _ => (
            u128::from(rate_ppm / 4),
            u128::from(rate_ppm - rate_ppm / 4),
        ),
    };
    let share = |used: &u64| alike / count + by_use * u128::from(*used) / total.max(1);
    let shares = used.iter().map(|used| share(used).min(most.into()) as u64);
    shares.collect()
}

/// Derives a better rate from a reservation's use (MS §V), reviewed each second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adaptation {
    /// Use in the last seconds, newest first.
    used_ppm: [u32; SECONDS],
    seconds: usize,
}

/// Number of seconds that must agree before a rate is lowered.
const SECONDS: usize = 4;

/// Measurements of one second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    pub used_ppm: u32,
    /// Periods with unmet demand, out of `periods`.
    pub overruns: u32,
    pub periods: u32,
}

impl Adaptation {
    /// Returns the nominal rate that would suffice, if it differs from the present one by a tenth or more.
    pub fn propose(&mut self, spec: &Cpu, effective_ppm: u64, measured: Measured) -> Option<u32> {
        self.used_ppm.rotate_right(1);
        self.used_ppm[0] = measured.used_ppm;
        self.seconds = (self.seconds + 1).min(SECONDS);
        let nominal = u64::from(spec.rate_ppm);
        let used = |ppm: u32| u64::from(ppm) * 5 / 4;
        let is_short = measured.overruns > measured.periods / 20;
        let better = if is_short {
            // The demand exceeded the rate; by how much is not known.
            (nominal.max(effective_ppm).saturating_mul(3) / 2).max(used(measured.used_ppm))
        } else if self.seconds == SECONDS {
            used(*self.used_ppm.iter().max()?)
        } else {
            return None;
        };
        let (least, most) = match spec.adapt {
            Adapt::Auto {
                least_ppm,
                most_ppm,
            } => (least_ppm.max(1), most_ppm.max(1)),
            Adapt::Off | Adapt::Propose => (LEAST_PROPOSED, u32::MAX),
        };
        let better = u32::try_from(better).unwrap_or(u32::MAX);
        let better = better.max(least).min(most);
        (u64::from(better).abs_diff(nominal) * 10 >= nominal).then_some(better)
    }

    /// Discards the measurements when the rate has changed.
    pub fn start_over(&mut self) {
        *self = Adaptation::default();
    }
}

/// Threads that slept for seconds will run again.
const LEAST_PROPOSED: u32 = 1_000;
