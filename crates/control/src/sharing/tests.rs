//! Which of several sockets receives what is sent to their endpoint.

use super::*;

fn sharer(session: u64, port: bool, uid: u32) -> Sharer {
    Sharer {
        session: SessionId(session),
        reuse: Reuse {
            address: true,
            port,
        },
        uid,
    }
}

fn ids(numbers: impl IntoIterator<Item = u64>) -> Vec<SessionId> {
    numbers.into_iter().map(SessionId).collect()
}

fn counts(deal: &Deal<SessionId>, members: &[SessionId]) -> Vec<usize> {
    let count = |member: &SessionId| deal.buckets().filter(|(_, owner)| owner == member).count();
    members.iter().map(count).collect()
}

#[test]
fn the_last_socket_bound_gets_what_comes() {
    let sharers = [sharer(1, false, 0), sharer(2, false, 0)];
    assert_eq!(receivers(&sharers), ids([2]));
    assert_eq!(receivers(&sharers[..1]), ids([1]));
    assert_eq!(receivers(&[]), ids([]));
}

#[test]
fn a_reuseport_group_is_of_one_user() {
    let sharers = [
        sharer(1, true, 7),
        sharer(2, true, 8),
        sharer(3, false, 7),
        sharer(4, true, 7),
    ];
    assert_eq!(receivers(&sharers), ids([1, 4]));
}

#[test]
fn buckets_are_dealt_evenly_to_any_number() {
    for number in 1..=SHARE_BUCKETS as u64 + 3 {
        let members = ids(0..number);
        let mut deal = Deal::default();
        deal.among(&members);
        let counts = counts(&deal, &members);
        assert_eq!(counts.iter().sum::<usize>(), SHARE_BUCKETS as usize);
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{number}: {counts:?}");
    }
}

#[test]
fn who_leaves_moves_only_his_own_flows() {
    for number in 2..20 {
        let members = ids(0..number);
        let mut deal = Deal::default();
        deal.among(&members);
        let before: Vec<_> = deal.buckets().collect();
        deal.among(&members[1..]);
        for (before, after) in before.into_iter().zip(deal.buckets()) {
            assert!(before == after || before.1 == members[0], "{number}");
        }
        assert!(counts(&deal, &members)[0] == 0);
    }
}

#[test]
fn keepers_keep_theirs_and_the_others_share_the_rest() {
    let members = ids(0..4);
    let mut deal = Deal::default();
    deal.among(&members[..2]);
    deal.share_out(&members[1..], &members[..1]);
    let half = SHARE_BUCKETS as usize / 2;
    let counts = counts(&deal, &members);
    assert_eq!(counts[0], half);
    assert_eq!(counts[1..].iter().sum::<usize>(), half);
    assert!(
        counts[1..]
            .iter()
            .all(|count| count.abs_diff(half / 3) <= 1)
    );
}

#[test]
fn who_joins_takes_no_more_than_his_share() {
    let members = ids(0..9);
    let mut deal = Deal::default();
    for joined in 1..members.len() {
        deal.among(&members[..joined]);
        let before: Vec<_> = deal.buckets().collect();
        deal.among(&members[..=joined]);
        let moved = before.into_iter().zip(deal.buckets());
        let moved = moved.filter(|(before, after)| before != after).count();
        assert!(moved <= SHARE_BUCKETS as usize / (joined + 1) + 1);
    }
}
