//! Several servers on one machine, one per network namespace: their promises together do not exceed the capacity.
//!
//! Each server tells the others what it has promised, and what it would give if it were alone. The capacity not
//! promised is divided in proportion to what is wanted beyond the promises. All servers divide in the same way, so that
//! their parts add up to the capacity.

/// The load that one server announces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuLoad {
    /// The part of `wanted_ppm` that is never taken back: requested rates, in millionths of one CPU.
    pub promised_ppm: u64,
    /// What its classes would give with nothing else on the machine.
    pub wanted_ppm: u64,
}

impl CpuLoad {
    fn beyond(self) -> u64 {
        self.wanted_ppm.saturating_sub(self.promised_ppm)
    }

    /// Returns the sum of several loads.
    pub fn sum(all: impl IntoIterator<Item = CpuLoad>) -> CpuLoad {
        let add = |sum: CpuLoad, one: CpuLoad| CpuLoad {
            promised_ppm: sum.promised_ppm.saturating_add(one.promised_ppm),
            wanted_ppm: sum
                .wanted_ppm
                .saturating_add(one.promised_ppm)
                .saturating_add(one.beyond()),
        };
        all.into_iter().fold(CpuLoad::default(), add)
    }

    /// Returns what a server with this load gives of the machine's capacity, beside others.
    pub fn allowance(self, others: CpuLoad, capacity_ppm: u64) -> u64 {
        let promised = self.promised_ppm.saturating_add(others.promised_ppm);
        let free = u128::from(capacity_ppm.saturating_sub(promised));
        let beyond = u128::from(self.beyond());
        let all = beyond + u128::from(others.beyond());
        // The quotient is at most what is wanted beyond the promises, since that exceeds what is free.
        let part = if all <= free {
            beyond
        } else {
            free * beyond / all
        };
        self.promised_ppm.saturating_add(part as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 1_800_000;

    fn standing(promised_ppm: u64, wanted_ppm: u64) -> CpuLoad {
        CpuLoad {
            promised_ppm,
            wanted_ppm,
        }
    }

    #[test]
    fn who_is_alone_gives_what_its_classes_give() {
        let own = standing(100_000, 900_000);
        assert_eq!(own.allowance(CpuLoad::default(), CAPACITY), 900_000);
    }

    #[test]
    fn what_nobody_is_promised_is_divided_by_what_is_wanted() {
        let (one, two) = (standing(100_000, 900_000), standing(500_000, 1_700_000));
        assert_eq!(one.allowance(two, CAPACITY), 100_000 + 1_200_000 * 8 / 20);
        assert_eq!(two.allowance(one, CAPACITY), 500_000 + 1_200_000 * 12 / 20);
    }

    #[test]
    fn servers_give_no_more_than_there_is_and_never_less_than_they_promised() {
        portolan_fuzz::check!(1000)
            .with_type::<Vec<(u32, u32)>>()
            .for_each(|all| {
                let mut left = CAPACITY;
                let mut all: Vec<_> = all
                    .iter()
                    .map(|(promised, wanted)| {
                        let promised = u64::from(*promised) % (left + 1);
                        left -= promised;
                        standing(promised, promised + u64::from(*wanted))
                    })
                    .collect();
                let mut given = 0;
                for _ in 0..all.len() {
                    let own = all.remove(0);
                    let allowance = own.allowance(CpuLoad::sum(all.iter().copied()), CAPACITY);
                    assert!((own.promised_ppm..=own.wanted_ppm).contains(&allowance));
                    given += allowance;
                    all.push(own);
                }
                assert!(given <= CAPACITY, "{given}");
            });
    }

    #[test]
    fn no_number_of_another_server_makes_it_panic() {
        portolan_fuzz::check!(1000)
            .with_type::<([u64; 4], u64)>()
            .for_each(|([a, b, c, d], capacity)| {
                let others = CpuLoad::sum([standing(*a, *b), standing(*c, *d)]);
                standing(*a, *d).allowance(others, *capacity);
            });
    }
}
