//! Who gets which buckets, and when.

use std::collections::HashMap;

use super::*;

const SLOT: Slot = Slot(7);

fn channels(numbers: impl IntoIterator<Item = u32>) -> Vec<ChannelId> {
    numbers.into_iter().map(ChannelId).collect()
}

fn counts(performers: &Performers) -> HashMap<Option<u32>, usize> {
    let mut counts = HashMap::new();
    for (_, owner) in performers.buckets() {
        *counts.entry(owner.map(|it| it.channel.0)).or_default() += 1;
    }
    counts
}

/// All of these take part.
fn together(numbers: &[u32]) -> Performers {
    let mut performers = Performers::default();
    for &number in numbers {
        assert!(performers.offer(ChannelId(number), SLOT));
    }
    assert!(performers.are_together());
    performers.deal();
    performers
}

#[test]
fn a_single_process_gets_all_buckets() {
    assert_eq!(counts(&together(&[1])), HashMap::from([(Some(1), 128)]));
}

#[test]
fn those_that_accept_are_invited_once_and_waited_for() {
    let mut performers = Performers::default();
    performers.offer(ChannelId(1), SLOT);
    assert_eq!(performers.call_together(channels([2, 3])), channels([2, 3]));
    assert_eq!(performers.call_together(channels([2])), []);
    assert!(!performers.are_together());
    performers.offer(ChannelId(2), SLOT);
    performers.leave(ChannelId(3));
    assert!(performers.are_together());
    performers.deal();
    let both = HashMap::from([(Some(1), 64), (Some(2), 64)]);
    assert_eq!(counts(&performers), both);
}

#[test]
fn no_bucket_leaves_a_performer_that_is_not_quiet() {
    let mut performers = together(&[1, 2]);
    performers.offer(ChannelId(3), SLOT);
    assert_eq!(performers.call_together([]), channels([1, 2]));
    assert_eq!(counts(&performers)[&Some(1)], 64);
    performers.offer(ChannelId(1), SLOT);
    let halfway = HashMap::from([(None, 64), (Some(2), 64)]);
    assert_eq!(counts(&performers), halfway, "its buckets are the server's");
    // The second has not answered in time.
    performers.deal();
    let dealt = HashMap::from([(Some(1), 32), (Some(2), 64), (Some(3), 32)]);
    assert_eq!(counts(&performers), dealt);
    // Now it has.
    performers.offer(ChannelId(2), SLOT);
    assert_eq!(performers.call_together([]), channels([1, 3]));
    performers.offer(ChannelId(1), SLOT);
    performers.offer(ChannelId(3), SLOT);
    assert!(performers.are_together());
    performers.deal();
    let most = counts(&performers).into_values().max();
    assert_eq!(most, Some(43));
}

#[test]
fn the_others_get_what_one_leaves() {
    let mut performers = together(&[1, 2, 3]);
    assert!(performers.leave(ChannelId(2)).is_some());
    let rest = HashMap::from([(Some(1), 64), (Some(3), 64)]);
    assert_eq!(counts(&performers), rest);
    assert!(performers.leave(ChannelId(2)).is_none());
    performers.leave(ChannelId(1));
    performers.leave(ChannelId(3));
    assert!(performers.is_empty());
    assert_eq!(performers.buckets().count(), 0);
}

#[test]
fn there_is_a_limit() {
    let mut performers = Performers::default();
    for number in 0..MOST as u32 {
        assert!(performers.offer(ChannelId(number + 1), SLOT));
    }
    assert!(!performers.offer(ChannelId(1000), SLOT));
}
