//! Attempts to read what belongs to others.

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use libbpf_rs::MapHandle;
use portolan_netns::Bed;
use portolan_types::SessionId;

use crate::common::{Client, control_path, start_server};
use crate::frames::{MARK, is_marked};
use crate::meter::Meter;
use crate::{Victim, as_nobody, hostile_library};

/// Returns all bytes of a memfd.
fn contents(fd: &OwnedFd) -> Vec<u8> {
    let length = rustix::fs::fstat(fd).unwrap().st_size as usize;
    let mut bytes = vec![0; length];
    let read = rustix::io::pread(fd, &mut bytes[..], 0).unwrap();
    assert_eq!(read, length);
    bytes
}

#[test]
fn a_channel_shows_nothing_of_other_peoples_sessions() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut hostile = hostile_library(&path);
    let mut victim = Victim::start(&bed, &path);
    for _ in 0..50 {
        victim.library.write(victim.slot, MARK);
        victim.peer.write_all(MARK).unwrap();
        assert_eq!(victim.library.read(victim.slot, MARK.len()), MARK);
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(hostile.ring.next().is_none(), "the ring");
    let mut frame = vec![0; 1 << 17];
    while let Some(length) = hostile.tap.0.read(&mut frame) {
        assert!(!is_marked(&frame[..length]), "the tap");
    }
    assert!(!is_marked(&contents(&hostile.maps.metastate)), "metastate");
    let statistics = contents(&hostile.maps.statistics);
    assert!(statistics.iter().all(|&byte| byte == 0), "statistics");
}

#[test]
fn other_peoples_shared_memory_cannot_be_opened() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let _victim = Victim::start(&bed, &path);
    let ids: Vec<u32> = libbpf_rs::query::MapInfoIter::default()
        .map(|map| map.id)
        .collect();
    assert!(!ids.is_empty());
    as_nobody(|| {
        for id in ids {
            assert!(MapHandle::from_map_id(id).is_err(), "map {id}");
        }
        let descriptors = format!("/proc/{}/fd", server.pid());
        assert!(fs::read_dir(descriptors).is_err());
    });
}

#[test]
fn metastate_cannot_be_written() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let hostile = hostile_library(&control_path(&bed.a));
    let fd = hostile.maps.metastate.as_fd();
    as_nobody(|| {
        assert!(rustix::io::pwrite(fd, &[1; 8], 0).is_err());
        assert!(rustix::fs::ftruncate(fd, 0).is_err());
    });
    meter.finish_but_for_starts();
}

#[test]
fn numbers_of_sessions_are_shown_to_their_owner_only() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let victim = Victim::start(&bed, &path);
    let shown = as_nobody(|| Client::connect(&path)).sessions();
    assert!(shown.iter().all(|report| report.session == SessionId(0)));
    let shown = Client::connect(&path).sessions();
    assert!(shown.iter().any(|report| report.session == victim.id));
}

/// Who could open the lock's file could wait for the lock, and would have it when the server ends.
#[test]
fn the_servers_files_are_its_own() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut seen = Vec::new();
    for entry in fs::read_dir(path.parent().unwrap()).unwrap() {
        let file = entry.unwrap().path();
        seen.push(file.clone());
        // Of a socket it would be refused to root, too.
        if file != path {
            let opened = as_nobody(|| fs::File::open(&file));
            let error = opened.expect_err(&file.display().to_string());
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        }
    }
    assert!(seen.len() >= 3, "the socket, the lock, names: {seen:?}");
    meter.finish_but_for_starts();
}
