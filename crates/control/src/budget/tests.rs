//! A user gets no more than its part, all users together leave the reserve to root, and dropped charges are returned.

use super::*;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;

fn budget() -> Budget {
    Budget::new(Limit {
        total: 10,
        per_user: 6,
        reserve: 2,
    })
}

#[test]
fn a_user_has_no_more_than_its_part() {
    let budget = budget();
    let _most = budget.charge(ALICE, 6).unwrap();
    assert_eq!(budget.charge(ALICE, 1).unwrap_err(), Exhausted::User);
    assert_eq!(budget.used_by(ALICE), 6);
    assert_eq!(budget.refused(), 1);
}

#[test]
fn users_leave_root_its_reserve() {
    let budget = budget();
    let _first = budget.charge(ALICE, 6).unwrap();
    let _second = budget.charge(BOB, 2).unwrap();
    assert_eq!(budget.charge(BOB, 1).unwrap_err(), Exhausted::Total);
    let _reserve = budget.charge(0, 2).unwrap();
    assert_eq!(budget.charge(0, 1).unwrap_err(), Exhausted::Total);
}

#[test]
fn any_number_of_users_leave_root_its_reserve() {
    let budget = budget();
    let all: Vec<_> = (1..100)
        .filter_map(|uid| budget.charge(uid, 1).ok())
        .collect();
    assert_eq!(all.len(), 8);
    budget.charge(0, 2).unwrap();
}

#[test]
fn root_has_no_limit_but_the_total() {
    budget().charge(0, 10).unwrap();
}

#[test]
fn what_is_dropped_is_given_back() {
    let budget = budget();
    drop(budget.charge(ALICE, 6).unwrap());
    assert_eq!((budget.used(), budget.used_by(ALICE)), (0, 0));
    budget.charge(ALICE, 6).unwrap();
}

#[test]
fn a_charge_shrinks_and_never_grows() {
    let budget = budget();
    let mut charge = budget.charge(ALICE, 6).unwrap();
    charge.shrink_to(2);
    assert_eq!(budget.used_by(ALICE), 2);
    charge.shrink_to(5);
    assert_eq!(budget.used_by(ALICE), 2);
    drop(charge);
    assert_eq!(budget.used(), 0);
}

#[test]
fn an_amount_that_no_number_holds_is_refused() {
    let budget = budget();
    let _one = budget.charge(0, 1).unwrap();
    assert_eq!(budget.charge(0, u64::MAX).unwrap_err(), Exhausted::Total);
    assert_eq!(budget.charge(ALICE, u64::MAX).unwrap_err(), Exhausted::User);
}

#[test]
fn a_reserve_leaves_something_for_others() {
    assert_eq!(Limit::with_reserve(1, 1, 10).reserve, 0);
    assert_eq!(Limit::with_reserve(4, 4, 10).reserve, 1);
    assert_eq!(Limit::with_reserve(200, 4, 10).reserve, 20);
    assert_eq!(Limit::with_reserve(200, 4, 0).reserve, 0);
    assert_eq!(Limit::with_reserve(2, 2, 100).reserve, 1);
}

#[test]
fn a_slice_ends_with_the_turn() {
    let mut slices = Slices::new(Duration::from_millis(2));
    slices.spend(ALICE, Duration::from_millis(2));
    assert!(slices.is_spent(ALICE));
    assert!(!slices.is_spent(BOB));
    slices.spend(0, Duration::from_millis(2));
    assert!(!slices.is_spent(0));
    slices.begin_turn();
    assert!(!slices.is_spent(ALICE));
}

#[test]
fn what_is_there_already_is_charged_and_leaves_no_room() {
    let budget = budget();
    let mut charge = budget.open(ALICE);
    charge.set(4);
    assert_eq!(budget.room(ALICE), 2);
    charge.set(50);
    assert_eq!(budget.used_by(ALICE), 50);
    assert_eq!(budget.room(ALICE), 0);
    charge.set(5);
    assert_eq!(budget.room(ALICE), 1);
    drop(charge);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_share_of_time_is_paid_back_as_time_goes() {
    let start = Instant::from_nanos(1_000_000_000);
    let mut shares = Shares::new(50);
    shares.spend(ALICE, BURST, start);
    let again = shares.served_again(ALICE, start).unwrap();
    assert!(again > start && again < start + BURST / 4);
    assert_eq!(shares.served_again(ALICE, again), None);
    assert_eq!(shares.served_again(BOB, start), None);
    // Over ten seconds, a user that takes all that it is given gets its half.
    let (mut now, mut taken) = (start, Duration::ZERO);
    let one = Duration::from_millis(1);
    while now < start + Duration::from_secs(10) {
        match shares.served_again(ALICE, now) {
            Some(later) => now = later,
            None => {
                shares.spend(ALICE, one, now);
                taken += one;
                now += one;
            }
        }
    }
    assert!((4900..5300).contains(&taken.as_millis()), "{taken:?}");
}

#[test]
fn roots_time_is_not_counted_and_balanced_accounts_go() {
    let start = Instant::from_nanos(1_000_000_000);
    let mut shares = Shares::new(50);
    shares.spend(0, 4 * BURST, start);
    assert_eq!(shares.served_again(0, start), None);
    let later = start + Duration::from_secs(10);
    for uid in 1..2000 {
        shares.spend(uid, Duration::from_millis(1), start);
    }
    shares.spend(ALICE, BURST, later);
    assert!(shares.accounts.len() <= 1 + ACCOUNTS);
    assert!(shares.served_again(ALICE, later).is_some());
}

#[test]
fn many_users_have_shorter_slices_and_the_turn_stays_short() {
    let mut slices = Slices::new(Duration::from_millis(2));
    for uid in 1..=40 {
        slices.spend(uid, Duration::from_millis(2));
    }
    slices.begin_turn();
    slices.spend(ALICE, TURN / 40);
    assert!(slices.is_spent(ALICE));
    slices.begin_turn();
    slices.spend(ALICE, TURN / 40);
    assert!(!slices.is_spent(ALICE));
}
