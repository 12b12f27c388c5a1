//! Lent frames do not change, whatever the filter does, and block the ring for a limited time only.

use portolan_proto::filter::RecordHeader;
use zerocopy::IntoBytes;

use crate::ring::testing::{Producer, SIZE};
use crate::ring::{Loan, Ring};
use crate::testing::{forking, memory};
use std::os::fd::{AsFd, OwnedFd};

use crate::mapping::{Mapping, page_size};

struct Bed {
    fd: OwnedFd,
    producer: Producer,
    ring: Ring,
    /// Number of frames put into the ring.
    count: u8,
}

impl Bed {
    fn new() -> Bed {
        let fd: OwnedFd = memory(2 * page_size() + 2 * SIZE);
        let all = Mapping::read_write(fd.as_fd(), 0, 2 * page_size() + 2 * SIZE).unwrap();
        Bed {
            producer: Producer {
                memory: all,
                position: 0,
            },
            ring: Ring::map(&fd, SIZE).unwrap(),
            fd,
            count: 0,
        }
    }

    /// A frame of `length` bytes, each with the frame's number, arrives and is read.
    fn frame(&mut self, length: usize) -> u8 {
        self.count += 1;
        let header = RecordHeader {
            length: length as u32,
            ..RecordHeader::default()
        };
        let mut data = header.as_bytes().to_vec();
        data.resize(data.len() + length, self.count);
        self.producer.put(0, &data);
        assert_eq!(self.ring.next().unwrap().frame, vec![self.count; length]);
        self.count
    }

    fn lend(&mut self, length: usize) -> (u8, Loan) {
        let number = self.frame(length);
        let loan = self.ring.lend(&self.fd, 10..length);
        assert!(loan.is_in_place());
        assert_eq!(loan.len(), length - 10);
        (number, loan)
    }

    /// Space that the filter may not reuse.
    fn held(&self) -> u64 {
        self.producer.position - self.producer.consumed()
    }
}

fn assert_is(loan: &Loan, number: u8) {
    assert!(
        loan.iter().all(|byte| *byte == number),
        "{number}: {loan:?}"
    );
}

#[test]
fn the_ring_gets_the_space_of_a_loan_only_when_it_is_given_back() {
    let mut bed = Bed::new();
    let (number, loan) = bed.lend(200);
    bed.frame(100);
    bed.ring.release();
    assert_eq!(bed.producer.consumed(), 0);
    assert_is(&loan, number);
    drop(loan);
    bed.ring.release();
    assert_eq!(bed.held(), 0);
}

#[test]
fn loans_are_given_back_in_any_order() {
    let mut bed = Bed::new();
    let (_, first) = bed.lend(100);
    let (_, second) = bed.lend(100);
    let (third_number, third) = bed.lend(100);
    drop(second);
    bed.ring.release();
    assert_eq!(bed.producer.consumed(), 0);
    drop(first);
    bed.ring.release();
    // The second has been returned with the first.
    let third_at = bed.producer.position / 3 * 2;
    assert_eq!(bed.producer.consumed(), third_at);
    assert_is(&third, third_number);
}

#[test]
fn no_more_than_a_quarter_is_lent() {
    let mut bed = Bed::new();
    let mut loans = Vec::new();
    while bed.ring.may_lend() {
        loans.push(bed.lend(200));
    }
    assert!(bed.producer.position >= SIZE as u64 / 4);
    assert!(bed.producer.position < SIZE as u64 / 4 + 300);
    loans.clear();
    assert!(bed.ring.may_lend());
}

#[test]
fn what_is_kept_for_long_is_copied_under_its_readers_eyes() {
    let mut bed = Bed::new();
    let kept: Vec<_> = (0..3).map(|_| bed.lend(300)).collect();
    let places: Vec<_> = kept.iter().map(|(_, loan)| loan.as_ptr()).collect();
    // Fills the ring three times.
    for _ in 0..100 {
        bed.frame(250);
        bed.ring.release();
        assert!(bed.held() <= SIZE as u64 / 2 + 300, "{}", bed.held());
        for (number, loan) in &kept {
            assert_is(loan, *number);
        }
    }
    assert_eq!(bed.held(), 0);
    let after: Vec<_> = kept.iter().map(|(_, loan)| loan.as_ptr()).collect();
    assert_eq!(places, after);
    // What is lent now is in the ring again.
    let (number, loan) = bed.lend(100);
    assert_is(&loan, number);
    bed.ring.release();
    assert!(bed.held() > 0);
}

#[test]
fn a_loan_outlives_its_ring() {
    let mut bed = Bed::new();
    let (number, loan) = bed.lend(500);
    drop(bed);
    assert_is(&loan, number);
}

#[test]
fn a_child_of_fork_has_what_was_detached() {
    let mut bed = Bed::new();
    let (number, loan) = bed.lend(700);
    bed.ring.detach_loans();
    let _fork = forking();
    // SAFETY: the child calls nothing but `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_same = loan.iter().all(|byte| *byte == number);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!is_same)) };
    }
    let mut status = -1;
    // SAFETY: `status` is valid; the child belongs to this test.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has read something else, or nothing");
}

#[test]
#[should_panic(expected = "no frame that was read")]
fn what_was_released_is_not_lent() {
    let mut bed = Bed::new();
    bed.frame(100);
    bed.ring.release();
    bed.ring.lend(&bed.fd, 0..10);
}
