//! Frames that arrive while their owner falls asleep, sleeps and wakes up are returned in the order in
//! which the filter saw them, and none is waited for without limit.

use std::os::fd::OwnedFd;

use portolan_proto::filter::Doorbell as Page;
use rustix::io::write;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::mem::offset_of;
use std::sync::atomic::Ordering::SeqCst;
use zerocopy::IntoBytes;

use super::*;
use crate::mapping::{Mapping, page_size};
use crate::ring::testing::Producer;
use crate::testing::memory;

/// The filter's side of a receive path. Frames are identified by their slot.
struct Filter {
    ring: Producer,
    page: Mapping,
    wire: OwnedFd,
}

impl Filter {
    fn by_ring(&mut self, slot: u32) {
        let header = RecordHeader {
            slot,
            ..RecordHeader::default()
        };
        self.ring.put(0, header.as_bytes());
    }

    fn count_on_tap(&self) {
        self.page
            .u32_at(offset_of!(Page, by_tap))
            .fetch_add(1, SeqCst);
    }

    fn put_on_tap(&self, slot: u32) {
        let stamp = TapStamp {
            slot,
            ..TapStamp::default()
        };
        let mut frame = vec![0; VNET_HEADER];
        frame.extend_from_slice(stamp.as_bytes());
        write(&self.wire, &frame).unwrap();
    }

    fn by_tap(&self, slot: u32) {
        self.count_on_tap();
        self.put_on_tap(slot);
    }
}

fn rx_path() -> (Filter, RxPath, TapIo<OwnedFd>) {
    let (producer, ring) = crate::ring::testing::ring();
    let page = memory(page_size());
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (tap, wire) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let filter = Filter {
        ring: producer,
        page: Mapping::read_write(page.as_fd(), 0, page_size()).unwrap(),
        wire,
    };
    let rx_path = RxPath::new(ring, Doorbell::map(&page).unwrap());
    (filter, rx_path, TapIo::new(tap))
}

fn at(micros: u64) -> Instant {
    Instant::from_nanos(micros * 1000)
}

fn taken(rx_path: &mut RxPath, tap: &TapIo<OwnedFd>, now: Instant) -> Vec<u32> {
    std::iter::from_fn(|| rx_path.next(tap, now).map(|record| record.header.slot)).collect()
}

#[test]
fn what_met_the_owner_awake_comes_before_what_met_it_asleep() {
    let (mut filter, mut rx_path, tap) = rx_path();
    assert!(rx_path.fall_asleep());
    // The filter saw the owner awake, and finishes only now.
    filter.by_ring(1);
    filter.by_tap(2);
    filter.by_tap(3);
    rx_path.wake_up(at(10));
    filter.by_ring(4);
    assert_eq!(taken(&mut rx_path, &tap, at(10)), [1, 2, 3, 4]);
}

#[test]
fn nobody_falls_asleep_over_a_frame() {
    let (mut filter, mut rx_path, tap) = rx_path();
    filter.by_ring(1);
    assert!(!rx_path.fall_asleep());
    rx_path.wake_up(at(10));
    assert_eq!(taken(&mut rx_path, &tap, at(10)), [1]);
    assert!(rx_path.fall_asleep());
}

#[test]
fn the_ring_waits_for_a_frame_that_is_on_its_way_to_the_tap() {
    let (mut filter, mut rx_path, tap) = rx_path();
    assert!(rx_path.fall_asleep());
    filter.count_on_tap();
    rx_path.wake_up(at(10));
    filter.by_ring(2);
    assert_eq!(taken(&mut rx_path, &tap, at(11)), [0; 0]);
    assert!(!rx_path.fall_asleep());
    filter.put_on_tap(1);
    assert_eq!(taken(&mut rx_path, &tap, at(12)), [1, 2]);
}

#[test]
fn a_frame_that_is_counted_late_is_found() {
    let (mut filter, mut rx_path, tap) = rx_path();
    assert!(rx_path.fall_asleep());
    rx_path.wake_up(at(10));
    assert_eq!(taken(&mut rx_path, &tap, at(10)), [0; 0]);
    filter.by_tap(1);
    filter.by_ring(2);
    assert_eq!(taken(&mut rx_path, &tap, at(11)), [1, 2]);
    assert_eq!(taken(&mut rx_path, &tap, at(12)), [0; 0]);
    assert!(!rx_path.is_settling());
}

#[test]
fn a_lost_frame_is_given_up_and_harms_no_later_one() {
    let (mut filter, mut rx_path, tap) = rx_path();
    assert!(rx_path.fall_asleep());
    filter.count_on_tap();
    rx_path.wake_up(at(10));
    filter.by_ring(2);
    assert_eq!(taken(&mut rx_path, &tap, at(900)), [0; 0]);
    assert_eq!(taken(&mut rx_path, &tap, at(1_100)), [2]);
    // It arrives after all, long given up, while the owner sleeps again.
    assert!(rx_path.fall_asleep());
    filter.put_on_tap(1);
    filter.by_tap(3);
    rx_path.wake_up(at(2_000));
    assert_eq!(taken(&mut rx_path, &tap, at(2_000)), [1, 3]);
    assert!(rx_path.fall_asleep());
}

#[test]
fn who_is_awake_finds_what_always_comes_by_the_tap() {
    let (mut filter, mut rx_path, tap) = rx_path();
    filter.by_tap(1);
    filter.by_ring(2);
    assert!(rx_path.has_received());
    assert_eq!(taken(&mut rx_path, &tap, at(10)), [1, 2]);
    // Counted but still in transit: the owner does not sleep, and it is not given up.
    filter.count_on_tap();
    assert!(!rx_path.fall_asleep());
    assert_eq!(taken(&mut rx_path, &tap, at(20)), [0; 0]);
    filter.put_on_tap(3);
    assert_eq!(taken(&mut rx_path, &tap, at(21)), [3]);
    assert_eq!(taken(&mut rx_path, &tap, at(22)), [0; 0]);
    assert!(rx_path.fall_asleep());
}
