//! Promises of a link never add up to more than its rate, whatever is requested in whatever order.

use super::*;

const MBIT: u64 = 1_000_000;
const USUAL: Portions = Portions {
    reservable_percent: 90,
    user_percent: 50,
};

fn link() -> Link {
    Link::new(100 * MBIT, USUAL)
}

fn spec(rate: Rate) -> Transmit {
    Transmit {
        device: None,
        rate,
        burst: None,
        slack: Slack::None,
    }
}

fn slice(slice_us: u32, period_us: u32) -> Rate {
    Rate::Slice {
        slice_us,
        period_us,
    }
}

#[test]
fn a_slice_is_a_rate_and_a_burst() {
    let terms = link().terms(&spec(slice(4_000, 100_000))).unwrap();
    let expected = ClassRates {
        rate: 4 * MBIT,
        ceiling: 4 * MBIT,
        burst: 50_000,
    };
    assert_eq!(terms, expected);
    // Otherwise the ceiling's bucket, which is as fast, would be the smaller one.
    assert_eq!(terms.ceiling_burst(), 50_000);
}

#[test]
fn slack_is_a_higher_ceiling() {
    let with = |slack| Transmit {
        slack,
        ..spec(Rate::Bits(10 * MBIT))
    };
    let ceiling = |slack| link().terms(&with(slack)).map(|terms| terms.ceiling);
    assert_eq!(ceiling(Slack::All), Ok(100 * MBIT));
    assert_eq!(ceiling(Slack::UpTo(20 * MBIT)), Ok(20 * MBIT));
    assert_eq!(ceiling(Slack::UpTo(u64::MAX)), Ok(100 * MBIT));
    let below = Refused::Ceiling {
        ceiling: MBIT,
        rate: 10 * MBIT,
    };
    assert_eq!(ceiling(Slack::UpTo(MBIT)), Err(below));
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let refused = |rate| link().terms(&spec(rate)).unwrap_err();
    assert_eq!(refused(Rate::Bits(0)), Refused::Slow(0));
    assert_eq!(refused(slice(1, 999)), Refused::Period(999));
    assert_eq!(refused(slice(1, 0)), Refused::Period(0));
    assert_eq!(refused(slice(1, u32::MAX)), Refused::Period(u32::MAX));
    for (slice_us, period_us) in [(0, 1_000), (1_001, 1_000), (u32::MAX, 10_000_000)] {
        let expected = Refused::Slice {
            slice_us,
            period_us,
        };
        assert_eq!(refused(slice(slice_us, period_us)), expected);
    }
    assert_eq!(refused(slice(1, 10_000_000)), Refused::Slow(10));
    for burst in [0, LEAST_BURST - 1, MOST_BURST + 1, u32::MAX] {
        let with = Transmit {
            burst: Some(burst),
            ..spec(Rate::Bits(MBIT))
        };
        assert_eq!(link().terms(&with), Err(Refused::Burst(burst)));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let mut link = link();
    link.reserve(ClassId(16), 0, 60 * MBIT).unwrap();
    let refused = link.reserve(ClassId(17), 0, 40 * MBIT).unwrap_err();
    let text = refused.to_string();
    assert_eq!(
        text,
        "40mbit do not fit the link: of 90mbit that can be reserved, 30mbit are left"
    );
    link.reserve(ClassId(17), 0, 30 * MBIT).unwrap();
    assert_eq!(link.best_effort().rate, 10 * MBIT);
    let refused = link.reserve(ClassId(18), 0, u64::MAX).unwrap_err();
    assert!(matches!(refused, Refused::Link { left: 0, .. }));
}

#[test]
fn a_user_has_a_share_and_root_has_all() {
    let mut link = link();
    link.reserve(ClassId(16), 1000, 40 * MBIT).unwrap();
    let refused = link.reserve(ClassId(17), 1000, 10 * MBIT).unwrap_err();
    let expected = Refused::User {
        wanted: 10 * MBIT,
        of: 45 * MBIT,
        left: 5 * MBIT,
    };
    assert_eq!(refused, expected);
    link.reserve(ClassId(17), 1001, 10 * MBIT).unwrap();
    link.reserve(ClassId(18), 0, 40 * MBIT).unwrap();
}

#[test]
fn a_change_that_does_not_fit_leaves_all_as_it_was() {
    let mut link = link();
    link.reserve(ClassId(16), 0, 60 * MBIT).unwrap();
    link.reserve(ClassId(16), 0, 80 * MBIT).unwrap();
    let before = link.clone();
    link.reserve(ClassId(16), 0, 91 * MBIT).unwrap_err();
    assert_eq!(link, before);
    assert_eq!(link.reserved(), 80 * MBIT);
}

#[test]
fn a_group_is_reserved_whole_and_its_flows_within_it() {
    let mut link = link();
    let group = ClassId(16);
    link.reserve(group, 0, 50 * MBIT).unwrap();
    link.join(group, ClassId(17), 1000, 30 * MBIT).unwrap();
    link.join(group, ClassId(18), 1001, 20 * MBIT).unwrap();
    assert_eq!(
        (link.reserved(), link.reserved_in(group)),
        (50 * MBIT, 50 * MBIT)
    );
    let refused = link.join(group, ClassId(19), 0, MBIT).unwrap_err();
    assert!(matches!(refused, Refused::Group { left: 0, .. }));
    let shrunk = link.reserve(group, 0, 49 * MBIT).unwrap_err();
    assert!(matches!(shrunk, Refused::Shrunk { .. }));
    link.release(ClassId(17));
    link.reserve(group, 0, 20 * MBIT).unwrap();
    link.release(group);
    assert_eq!((link.reserved(), link.reserved_in(group)), (0, 0));
}

#[test]
fn nobody_joins_a_group_that_is_not_there() {
    assert!(link().join(ClassId(9), ClassId(17), 0, LEAST_RATE).is_err());
}

#[test]
fn no_numbers_break_the_sums() {
    type Step = (u8, u16, u32, u64, u32, u32, u64);
    portolan_fuzz::check!(2000)
        .with_type::<(u64, u8, u8, Vec<Step>)>()
        .for_each(|(rate, reservable_percent, user_percent, steps)| {
            let portions = Portions {
                reservable_percent: *reservable_percent,
                user_percent: *user_percent,
            };
            let mut link = Link::new(*rate, portions);
            for &(what, class, uid, bits, slice_us, period_us, ceiling) in steps {
                let class = ClassId(16 + class % 8);
                let rate = match what % 2 {
                    0 => Rate::Bits(bits),
                    _ => slice(slice_us, period_us),
                };
                let spec = Transmit {
                    burst: (what & 2 != 0).then_some(slice_us),
                    slack: Slack::UpTo(ceiling),
                    ..spec(rate)
                };
                let Ok(terms) = link.terms(&spec) else {
                    continue;
                };
                assert!(terms.ceiling >= terms.rate && terms.ceiling_burst() >= terms.burst);
                assert!(terms.quantum() > 0 && terms.send_buffer() > 0);
                let _ = match what >> 2 & 3 {
                    0 => link.join(ClassId(16), class, uid % 3, terms.rate).is_ok(),
                    1 => {
                        link.release(class);
                        true
                    }
                    _ => link.reserve(class, uid % 3, terms.rate).is_ok(),
                };
                assert!(link.reserved() <= link.reservable());
                assert!(link.reserved_in(ClassId(16)) <= link.reserved());
                assert!(link.best_effort().rate > 0);
            }
        });
}

#[test]
fn a_slower_link_keeps_each_promise_in_proportion_and_all_when_it_is_fast_again() {
    let mut link = link();
    let terms = |rate, ceiling| ClassRates {
        rate,
        ceiling,
        burst: 20_000,
    };
    link.reserve(ClassId(16), 0, 60 * MBIT).unwrap();
    link.reserve(ClassId(17), 0, 30 * MBIT).unwrap();
    link.set_rate(10 * MBIT);
    let kept = link.kept(terms(60 * MBIT, 100 * MBIT));
    assert_eq!(kept, terms(6 * MBIT, 10 * MBIT));
    assert_eq!(link.kept(terms(30 * MBIT, 30 * MBIT)).rate, 3 * MBIT);
    assert_eq!(link.best_effort().rate, MBIT);
    assert!(link.reserve(ClassId(18), 0, MBIT).is_err());
    // A class without any rate would be useless.
    link.set_rate(LEAST_RATE);
    assert_eq!(link.kept(terms(30 * MBIT, 30 * MBIT)).rate, LEAST_RATE);
    link.set_rate(1_000 * MBIT);
    let all = terms(60 * MBIT, 100 * MBIT);
    assert_eq!(link.kept(all), all);
}
