//! The formulas of MS §V, and that no numbers break them.

use super::*;

const TWO_CPUS: Capacity = Capacity {
    cpus: 2,
    of_one_ppm: 900_000,
};

fn class(name: &str, share_ppm: u32, overbooking: Overbooking) -> ClassTerms {
    ClassTerms {
        name: name.to_owned(),
        share_ppm,
        overbooking,
        each_user_ppm: 1_000_000,
    }
}

fn claim(nominal_ppm: u32) -> CpuClaim {
    CpuClaim {
        uid: 0,
        nominal_ppm,
        usable_ppm: TWO_CPUS.of_one_ppm.into(),
    }
}

fn one_class(overbooking: Overbooking) -> Classes {
    Classes::new(TWO_CPUS, [class("only", 500_000, overbooking)])
}

#[test]
fn a_class_admits_as_much_as_its_rate_and_its_overbooking_say() {
    let mut hard = one_class(Overbooking::UpTo(0));
    hard.admit(MemberId(1), None, claim(500_000)).unwrap();
    let denied = hard.admit(MemberId(2), None, claim(400_001)).unwrap_err();
    assert_eq!(
        denied.to_string(),
        "class only: 0.400001 of a CPU and the 0.5 reserved already exceed R(1+b) = 0.9; 0.4 would fit"
    );
    hard.admit(MemberId(2), None, claim(400_000)).unwrap();

    let mut statistical = one_class(Overbooking::UpTo(500_000));
    for id in 1..=3 {
        statistical
            .admit(MemberId(id), None, claim(450_000))
            .unwrap();
    }
    assert!(statistical.admit(MemberId(4), None, claim(1)).is_err());

    let mut flexible = one_class(Overbooking::Unbounded);
    for id in 0..1000 {
        flexible.admit(MemberId(id), None, claim(900_000)).unwrap();
    }
    assert_eq!(flexible.effective(MemberId(0)), 900, "nonzero progress");
}

#[test]
fn effective_rates_share_the_class_as_the_nominal_ones_do() {
    let mut classes = one_class(Overbooking::UpTo(1_000_000));
    classes.admit(MemberId(1), None, claim(300_000)).unwrap();
    // A single thread gets the whole class: 0.9 of a CPU.
    assert_eq!(classes.effective(MemberId(1)), 900_000);
    classes.admit(MemberId(2), None, claim(600_000)).unwrap();
    assert_eq!(classes.effective(MemberId(1)), 300_000);
    assert_eq!(classes.effective(MemberId(2)), 600_000);
    classes.admit(MemberId(3), None, claim(900_000)).unwrap();
    assert_eq!(classes.effective(MemberId(1)), 150_000);
    assert_eq!(classes.effective(MemberId(3)), 450_000);
    classes.remove(MemberId(2));
    assert_eq!(classes.effective(MemberId(1)), 225_000);
    assert_eq!(classes.effective(MemberId(2)), 0);
}

#[test]
fn what_one_class_admits_changes_nothing_in_another() {
    let terms = [
        class("hard", 250_000, Overbooking::UpTo(0)),
        class("soft", 250_000, Overbooking::Unbounded),
    ];
    let mut classes = Classes::new(TWO_CPUS, terms);
    classes
        .admit(MemberId(0), Some("hard"), claim(300_000))
        .unwrap();
    for id in 1..100 {
        classes
            .admit(MemberId(id), Some("soft"), claim(900_000))
            .unwrap();
    }
    assert_eq!(classes.effective(MemberId(0)), 450_000);
    let denied = classes
        .admit(MemberId(0), Some("medium"), claim(1))
        .unwrap_err();
    assert_eq!(
        denied.to_string(),
        "there is no CPU class \"medium\"; there are hard, soft"
    );
    assert_eq!(
        classes.effective(MemberId(0)),
        450_000,
        "it stays as it was"
    );
}

#[test]
fn a_thread_has_at_most_one_cpu_and_a_process_more() {
    let mut classes = Classes::new(TWO_CPUS, [class("all", 1_000_000, Overbooking::UpTo(0))]);
    classes.admit(MemberId(1), None, claim(100_000)).unwrap();
    assert_eq!(classes.effective(MemberId(1)), 900_000);
    let process = CpuClaim {
        usable_ppm: 1_800_000,
        ..claim(1_500_000)
    };
    classes.admit(MemberId(1), None, process).unwrap();
    assert_eq!(classes.effective(MemberId(1)), 1_800_000);
    let denied = classes
        .admit(MemberId(1), None, claim(900_001))
        .unwrap_err();
    assert!(matches!(denied, Denied::BeyondUsable { .. }), "{denied}");
    assert_eq!(
        classes.admit(MemberId(2), None, claim(0)),
        Err(Denied::NoRate)
    );
}

#[test]
fn a_user_has_his_part_of_a_class_and_root_all_of_it() {
    let terms = ClassTerms {
        each_user_ppm: 500_000,
        ..class("only", 500_000, Overbooking::UpTo(0))
    };
    let mut classes = Classes::new(TWO_CPUS, [terms]);
    let of = |uid, nominal_ppm| CpuClaim {
        uid,
        ..claim(nominal_ppm)
    };
    classes.admit(MemberId(1), None, of(7, 300_000)).unwrap();
    let denied = classes
        .admit(MemberId(2), None, of(7, 200_000))
        .unwrap_err();
    assert_eq!(
        denied.to_string(),
        "class only: a user may have 0.45 of a CPU, and has 0.3 already; 0.15 would fit"
    );
    assert_eq!(classes.room_of(MemberId(1)), 450_000);
    classes.admit(MemberId(2), None, of(8, 200_000)).unwrap();
    classes.admit(MemberId(3), None, of(0, 400_000)).unwrap();
}

/// A step of a client that tries to break the sums.
#[derive(Clone, Debug, bolero::TypeGenerator)]
enum Step {
    Admit {
        id: u8,
        class: bool,
        uid: u8,
        nominal_ppm: u32,
        usable_ppm: u64,
    },
    Remove(u8),
}

#[test]
fn no_steps_give_away_more_than_a_class_has() {
    portolan_fuzz::check!(2000)
        .with_type::<(Vec<Step>, u32, u32, Option<u32>)>()
        .for_each(|(steps, cpus, share_ppm, overbooking)| {
            let capacity = Capacity {
                cpus: *cpus,
                of_one_ppm: 950_000,
            };
            let overbooking = overbooking.map_or(Overbooking::Unbounded, Overbooking::UpTo);
            let share = share_ppm % 1_000_001;
            let terms = [
                class("a", share, Overbooking::UpTo(0)),
                class("b", 1_000_000 - share, overbooking),
            ];
            let mut classes = Classes::new(capacity, terms);
            for step in steps {
                take(&mut classes, step);
                check(&classes, capacity);
            }
        });
}

fn take(classes: &mut Classes, step: &Step) {
    match step {
        Step::Admit {
            id,
            class,
            uid,
            nominal_ppm,
            usable_ppm,
        } => {
            let claim = CpuClaim {
                uid: (*uid).into(),
                nominal_ppm: *nominal_ppm,
                usable_ppm: *usable_ppm,
            };
            let name = if *class { "a" } else { "b" };
            let _ = classes.admit(MemberId((*id).into()), Some(name), claim);
        }
        Step::Remove(id) => classes.remove(MemberId((*id).into())),
    }
}

fn check(classes: &Classes, capacity: Capacity) {
    let total: u64 = classes.places.keys().map(|id| classes.effective(*id)).sum();
    assert!(total <= capacity.ppm());
    for class in &classes.classes {
        let effective = |id: &MemberId| classes.effective(*id);
        assert!(class.members.keys().map(effective).sum::<u64>() <= class.rate_ppm);
        let nominal = class.members.values();
        let nominal: u64 = nominal.map(|claim| u64::from(claim.nominal_ppm)).sum();
        assert_eq!(class.nominal_ppm, nominal);
        assert!(nominal <= class.bound());
        if class.terms.overbooking == Overbooking::UpTo(0) {
            // A hard guarantee, except for the rounding of a millionth.
            let is_kept = |(id, claim): (&MemberId, &CpuClaim)| {
                effective(id) + 1 >= u64::from(claim.nominal_ppm).min(claim.usable_ppm)
            };
            assert!(class.members.iter().all(is_kept));
        }
        // A member that requested more does not get less.
        for (one, more) in class.members.values().zip(class.members.values().skip(1)) {
            let (mine, other) = (class.share_of(one), class.share_of(more));
            assert!((one.nominal_ppm <= more.nominal_ppm) == (mine <= other) || mine == other);
        }
    }
}

#[test]
fn a_process_is_divided_by_what_its_threads_used() {
    assert_eq!(divide(400_000, &[0, 0], 900_000), [200_000, 200_000]);
    assert_eq!(divide(400_000, &[3, 0], 900_000), [350_000, 50_000]);
    assert_eq!(divide(1_800_000, &[1], 900_000), [900_000]);
    assert_eq!(divide(1_800_000, &[], 900_000), Vec::<u64>::new());
    portolan_fuzz::check!(1000)
        .with_type::<(u64, Vec<u64>, u64)>()
        .for_each(|(rate, used, most)| {
            let shares = divide(*rate, used, *most);
            assert_eq!(shares.len(), used.len());
            assert!(
                shares.iter().map(|share| u128::from(*share)).sum::<u128>() <= u128::from(*rate)
            );
            assert!(shares.iter().all(|share| share <= most));
        });
}

fn spec(rate_ppm: u32, adapt: Adapt) -> Cpu {
    Cpu {
        class: None,
        rate_ppm,
        period_us: 10_000,
        slack: false,
        adapt,
    }
}

fn measured(used_ppm: u32, overruns: u32) -> Measured {
    Measured {
        used_ppm,
        overruns,
        periods: 100,
    }
}

#[test]
fn a_thread_that_runs_short_is_proposed_more_at_once() {
    let mut adaptation = Adaptation::default();
    let spec = spec(200_000, Adapt::Propose);
    let proposed = adaptation.propose(&spec, 200_000, measured(200_000, 100));
    assert_eq!(proposed, Some(300_000));
}

#[test]
fn a_thread_that_uses_little_is_proposed_less_after_some_seconds() {
    let mut adaptation = Adaptation::default();
    let spec = spec(500_000, Adapt::Propose);
    for used in [100_000, 40_000, 200_000] {
        assert_eq!(adaptation.propose(&spec, 500_000, measured(used, 0)), None);
    }
    let proposed = adaptation.propose(&spec, 500_000, measured(80_000, 0));
    assert_eq!(proposed, Some(250_000), "a quarter above the most it used");
    adaptation.start_over();
    assert_eq!(adaptation.propose(&spec, 500_000, measured(0, 0)), None);
}

#[test]
fn a_rate_is_changed_within_its_limits_only_and_not_for_little() {
    let limits = Adapt::Auto {
        least_ppm: 300_000,
        most_ppm: 350_000,
    };
    let mut adaptation = Adaptation::default();
    let short = adaptation.propose(&spec(310_000, limits), 310_000, measured(310_000, 100));
    assert_eq!(short, Some(350_000));
    let mut adaptation = Adaptation::default();
    let none = (0..SECONDS)
        .map(|_| adaptation.propose(&spec(310_000, limits), 310_000, measured(0, 0)))
        .collect::<Vec<_>>();
    assert_eq!(none, [None; SECONDS], "the least that is allowed is close");
    portolan_fuzz::check!(1000)
        .with_type::<(u32, u32, u32, u64, [u32; 3])>()
        .for_each(
            |(rate, least, most, effective, [used, overruns, periods])| {
                let adapt = Adapt::Auto {
                    least_ppm: *least,
                    most_ppm: *most,
                };
                let measured = Measured {
                    used_ppm: *used,
                    overruns: *overruns,
                    periods: *periods,
                };
                let spec = spec(*rate, adapt);
                let proposed = Adaptation::default().propose(&spec, *effective, measured);
                assert!(proposed.is_none_or(|ppm| ppm <= (*most).max(1)));
            },
        );
}

#[test]
fn what_other_servers_are_promised_is_not_promised_again() {
    let mut classes = Classes::new(TWO_CPUS, [class("all", 1_000_000, Overbooking::UpTo(0))]);
    let claim = |nominal_ppm| CpuClaim {
        uid: 0,
        nominal_ppm,
        usable_ppm: TWO_CPUS.ppm(),
    };
    classes.set_others(CpuLoad {
        promised_ppm: 1_000_000,
        wanted_ppm: 1_000_000,
    });
    let room = TWO_CPUS.ppm() - 1_000_000;
    let denied = classes
        .admit(MemberId(1), None, claim(900_000))
        .unwrap_err();
    assert!(denied.to_string().contains("0.8 would fit"), "{denied}");
    assert_eq!(
        classes.standing(),
        CpuLoad::default(),
        "nothing has changed"
    );
    classes.admit(MemberId(1), None, claim(100_000)).unwrap();
    assert_eq!(classes.effective(MemberId(1)), room);
    // They are promised no more than is left; a member that was promised less before keeps it.
    classes.set_others(CpuLoad {
        promised_ppm: 1_700_000,
        wanted_ppm: 1_800_000,
    });
    assert_eq!(classes.effective(MemberId(1)), 100_000);
    classes.set_others(CpuLoad::default());
    assert_eq!(classes.effective(MemberId(1)), TWO_CPUS.ppm());
}
