//! Abuse of the parts of a channel: its memory, shared with the packet filter, and its tap.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use portolan_netns::Bed;
use rustix::ioctl::{IntegerSetter, Opcode, ioctl};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::common::{await_some, control_path, start_server};
use crate::meter::Meter;
use crate::{Victim, as_nobody, assert_serves_others, hostile_library, open_to_b};

const PAGE: usize = 4096;

/// One page of shared memory, writable.
pub(crate) struct Page(NonNull<u64>);

impl Page {
    pub(crate) fn map(fd: &OwnedFd) -> Page {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                PAGE,
                access,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )
        };
        Page(NonNull::new(mapped.unwrap().cast()).unwrap())
    }

    pub(crate) fn fill(&self, value: u64) {
        for index in 0..PAGE / size_of::<u64>() {
            // SAFETY: inside the page, which is mapped while `self` lives; aligned.
            unsafe { self.0.add(index).write_volatile(value) };
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing refers to it any more.
        unsafe { munmap(self.0.as_ptr().cast(), PAGE) }.unwrap();
    }
}

#[test]
fn garbage_in_the_doorbell_and_the_ring_harms_only_its_writer() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (_, _near, _, mut peer) = open_to_b(&bed, &mut hostile);
    let (notifier, consumer) = as_nobody(|| {
        let notifier = Page::map(&hostile.maps.doorbell);
        let consumer = Page::map(&hostile.maps.ring);
        // The producer's page and the data must not be writable.
        let data = mmap_writable_at(&hostile.maps.ring, PAGE as u64);
        assert!(data.is_err(), "the ring's data");
        (SendPage(notifier), SendPage(consumer))
    });
    for value in [
        0,
        1,
        2,
        3,
        u64::MAX,
        0x8000_0000_8000_0000,
        0x0000_0002_0000_0002,
    ] {
        for _ in 0..20 {
            notifier.0.fill(value);
            consumer.0.fill(value);
            peer.write_all(b"into the rubbish").unwrap();
        }
        victim.assert_unharmed();
    }
    assert_serves_others(&bed, &path);
    meter.finish();
}

/// `TUNSETPERSIST`, which the kernel permits to every holder of a tap.
fn make_persistent(tap: impl AsFd) {
    // `_IOW('T', 203, int)`.
    const SET_PERSIST: Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 203);
    // SAFETY: the ioctl takes an integer.
    let call = unsafe { IntegerSetter::<SET_PERSIST>::new_usize(1) };
    // SAFETY: as above.
    unsafe { ioctl(tap, call) }.unwrap();
}

#[test]
fn a_tap_that_was_made_to_persist_goes_all_the_same() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let taps = || {
        let shown = bed.a.exec("ip").args(["-o", "link"]).output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        shown.matches(": ptl").count()
    };
    let before = taps();
    let hostile = hostile_library(&path);
    as_nobody(|| make_persistent(&hostile.tap.0));
    drop(hostile);
    await_some("removal", || (taps() == before).then_some(()));
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

/// A mapping that another thread may use: the memory is shared with the kernel anyway.
struct SendPage(Page);

// SAFETY: the page is accessed by volatile writes only, and unmapped once.
unsafe impl Send for SendPage {}

fn mmap_writable_at(fd: &OwnedFd, offset: u64) -> rustix::io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let mapped = unsafe {
        mmap(
            std::ptr::null_mut(),
            PAGE,
            access,
            MapFlags::SHARED,
            fd.as_fd(),
            offset,
        )
    }?;
    // SAFETY: mapped above, and nothing refers to it.
    unsafe { munmap(mapped, PAGE) }
}
