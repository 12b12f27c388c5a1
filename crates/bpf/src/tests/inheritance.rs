//! The tables that a dead server leaves with its filter on a device.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::AsFd;

use portolan_proto::filter::{BindingKey, FilterKey, FilterSettings, FlowRow, SenderKey, ShareKey};
use portolan_types::{ChannelId, Protocol};

use super::attach::in_fresh_namespace;
use super::bed::{Bed, CHANNEL, IFINDEX, LIMITS, flows, row};
use crate::{Filter, InheritError, Inheritance, Limits, Predecessor, map_id};

const UID: u32 = 1000;
const SETTINGS: FilterSettings = FilterSettings {
    algorithm: FilterSettings::HASH,
    marker: 0,
    format: 7,
};

/// A dead server's ring, by its number, after it had given the channel to a user's process.
fn die(steer: impl FnOnce(&Filter)) -> Option<u32> {
    let mut dead = Bed::with(SETTINGS);
    dead.filter.attach_interface(IFINDEX).unwrap();
    dead.filter.set_owner(CHANNEL, UID).unwrap();
    steer(&dead.filter);
    map_id(dead.maps.ring.as_fd())
}

fn find(limits: &Limits, settings: &FilterSettings) -> Result<Option<Predecessor>, InheritError> {
    Predecessor::find([IFINDEX], &[], (limits, settings))
}

fn take_over() -> (Filter, Inheritance) {
    let predecessor = find(&LIMITS, &SETTINGS).unwrap().expect("it is there");
    let mut filter = Filter::load_beside(&predecessor, (&LIMITS, &SETTINGS)).unwrap();
    let left = filter.take_over(&HashSet::new()).unwrap();
    (filter, left)
}

#[test]
fn connections_of_processes_stay_with_their_channels() {
    in_fresh_namespace(|| {
        let flow = flows(Protocol::Tcp)[0];
        let granted = FlowRow {
            class: 20,
            budget: 3,
            ring: 5,
            ..row(CHANNEL)
        };
        let ring = die(|filter| filter.steer(&flow, granted).unwrap());
        let (mut filter, left) = take_over();
        let channel = &left.channels[&CHANNEL];
        assert_eq!((channel.uid, Some(channel.ring)), (UID, ring));
        assert_eq!(channel.taps, [IFINDEX]);
        let key = FilterKey::new(&flow);
        assert_eq!(left.flows[&key], row(CHANNEL));
        assert_eq!(filter.flows.read(&key), Some(row(CHANNEL)));
        filter.attach_interface(IFINDEX).unwrap();
        // And once more.
        drop(filter);
        let (_, left) = take_over();
        assert_eq!(left.flows.len(), 1);
    });
}

#[test]
fn devices_that_are_gone_are_not_kept() {
    const GONE: u32 = 987;
    in_fresh_namespace(|| {
        die(|filter| filter.set_tap(CHANNEL, GONE, 0).unwrap());
        let (filter, left) = take_over();
        assert_eq!(left.channels[&CHANNEL].taps, [IFINDEX]);
        assert!(filter.taps.keys() == [IFINDEX]);
    });
}

#[test]
fn flows_that_the_next_server_holds_have_a_row_at_every_moment() {
    in_fresh_namespace(|| {
        let flows = flows(Protocol::Tcp);
        die(|filter| {
            for flow in &flows {
                filter.steer(flow, row(ChannelId::SERVER)).unwrap();
            }
        });
        let predecessor = find(&LIMITS, &SETTINGS).unwrap().expect("it is there");
        let mut filter = Filter::load_beside(&predecessor, (&LIMITS, &SETTINGS)).unwrap();
        let held = FilterKey::new(&flows[0]);
        let left = filter.take_over(&HashSet::from([held])).unwrap();
        assert!(left.flows.is_empty(), "they are no process's");
        assert!(filter.flows.keys() == [held]);
    });
}

#[test]
fn descriptors_that_somebody_has_kept_are_enough() {
    in_fresh_namespace(|| {
        let mut kept = Vec::new();
        die(|filter| {
            let shown = filter.heritage().map(|fd| fd.try_clone_to_owned().unwrap());
            kept.extend(shown);
        });
        // Of another server nothing is taken.
        let other = Bed::with(SETTINGS);
        let others = other.filter.heritage();
        kept.extend(others.map(|fd| fd.try_clone_to_owned().unwrap()));
        let found = Predecessor::find([IFINDEX], &kept, (&LIMITS, &SETTINGS));
        let predecessor = found.unwrap().expect("it is there");
        let mut filter = Filter::load_beside(&predecessor, (&LIMITS, &SETTINGS)).unwrap();
        assert_eq!(filter.take_over(&HashSet::new()).unwrap().channels.len(), 1);
        kept.retain(|fd| map_id(fd.as_fd()).is_none());
        kept.truncate(1);
        let found = Predecessor::find([IFINDEX], &kept, (&LIMITS, &SETTINGS));
        assert!(
            matches!(found, Err(InheritError::Format)),
            "only the program"
        );
    });
}

#[test]
fn what_was_the_dead_servers_own_is_gone() {
    in_fresh_namespace(|| {
        let [tcp, tcp_v6] = flows(Protocol::Tcp);
        let udp = flows(Protocol::Udp)[0];
        let listener = BindingKey::new(Protocol::Tcp, tcp.local);
        die(|filter| {
            filter.steer(&tcp, row(ChannelId::SERVER)).unwrap();
            filter.steer(&udp, row(CHANNEL)).unwrap();
            filter.steer(&tcp_v6, row(ChannelId(6))).unwrap();
            filter.bind(&listener, row(ChannelId::SERVER)).unwrap();
        });
        let (filter, left) = take_over();
        assert!(left.flows.is_empty());
        assert!(filter.flows.keys().is_empty());
        assert!(filter.bindings.keys().is_empty());
    });
}

#[test]
fn a_channel_whose_taps_are_forgotten_sends_nothing() {
    in_fresh_namespace(|| {
        die(|_| ());
        let (filter, left) = take_over();
        filter.forget_taps(&left.channels[&CHANNEL].taps).unwrap();
        filter.drop_inherited(CHANNEL).unwrap();
        assert!(filter.taps.keys().is_empty());
        filter.map_builder().await_removal(CHANNEL);
        assert_eq!(filter.map_builder().ring_id(CHANNEL), None);
    });
}

#[test]
fn tables_of_another_format_or_size_are_refused() {
    in_fresh_namespace(|| {
        assert!(find(&LIMITS, &SETTINGS).unwrap().is_none(), "nothing there");
        die(|_| ());
        let other = FilterSettings {
            format: 8,
            ..SETTINGS
        };
        let refused = find(&LIMITS, &other);
        assert!(matches!(refused, Err(InheritError::Format)));
        let larger = Limits {
            flows: LIMITS.flows * 2,
            ..LIMITS
        };
        let refused = find(&larger, &SETTINGS);
        assert!(matches!(refused, Err(InheritError::Sizes)));
        let linear = FilterSettings {
            algorithm: FilterSettings::LINEAR,
            ..SETTINGS
        };
        let refused = find(&LIMITS, &linear);
        assert!(matches!(refused, Err(InheritError::Settings)));
    });
}

#[test]
fn only_a_ring_is_known_by_its_number() {
    let bed = Bed::new();
    assert!(map_id(bed.maps.ring.as_fd()).is_some());
    assert_eq!(map_id(bed.maps.doorbell.as_fd()), None);
    assert_eq!(map_id(std::io::stderr().as_fd()), None);
}

#[test]
fn a_port_whose_flows_are_dealt_keeps_the_buckets_of_processes() {
    in_fresh_namespace(|| {
        let [tcp, _] = flows(Protocol::Tcp);
        let binding = BindingKey::new(Protocol::Tcp, tcp.local);
        let other = BindingKey::new(Protocol::Udp, tcp.local);
        let share = |binding, bucket| ShareKey { binding, bucket };
        let sender = |binding| SenderKey {
            binding,
            channel: CHANNEL.0,
        };
        let flags = FlowRow::DELEGATED | FlowRow::SHARED;
        let performers = FlowRow {
            flags,
            class: 7,
            ..row(CHANNEL)
        };
        die(|filter| {
            let whole = FlowRow {
                flags: flags | FlowRow::DEALT,
                ..performers
            };
            filter.bind(&binding, whole).unwrap();
            filter.deal(&share(binding, 3), performers).unwrap();
            let servers = row(ChannelId::SERVER);
            filter.deal(&share(binding, 4), servers).unwrap();
            filter.deal(&share(other, 5), row(CHANNEL)).unwrap();
            filter.allow_sender(&sender(binding), 0).unwrap();
            filter.allow_sender(&sender(other), 0).unwrap();
        });
        let (filter, left) = take_over();
        let kept = FlowRow {
            class: 0,
            ..performers
        };
        assert_eq!(left.buckets[&binding], BTreeMap::from([(3, kept)]));
        filter.forget_endpoints(&left.ports).unwrap();
        assert_eq!(filter.shares.keys(), [share(binding, 3)]);
        assert_eq!(filter.senders.keys(), [sender(binding)]);
        filter.forget_port(&binding, &left.ports[&binding]).unwrap();
        assert!(filter.shares.keys().is_empty() && filter.senders.keys().is_empty());
    });
}
