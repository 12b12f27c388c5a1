use std::fs;
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;

use landlock::AccessFs;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket};

use super::*;

fn refused_by_then() -> u64 {
    refused_calls::so_far().0
}

#[test]
fn who_is_confined_runs_no_program_and_is_no_other_user() {
    thread::spawn(|| {
        Command::new("true").status().expect("it may at first");
        Capability::renounce_others().unwrap();
        filter_calls().unwrap();
        let before = refused_by_then();
        assert!(Command::new("true").status().is_err());
        let user = Some(rustix::process::Uid::from_raw(65_534));
        let changed = rustix::thread::set_thread_res_uid(user, user, user);
        assert_eq!(changed, Err(Errno::PERM));
        // The same applies to threads that it starts.
        let started = thread::spawn(|| Command::new("true").status().is_err());
        assert!(started.join().unwrap());
        // It cannot become another program either.
        assert_eq!(
            Command::new("true").exec().raw_os_error(),
            Some(libc::EPERM)
        );
        assert!(refused_by_then() >= before + 2, "they are counted");
    })
    .join()
    .unwrap();
}

#[test]
fn who_is_confined_has_no_sockets_of_other_families() {
    thread::spawn(|| {
        filter_calls().unwrap();
        let before = refused_by_then();
        let cipher = socket(AddressFamily::from_raw(38), SocketType::SEQPACKET, None);
        assert_eq!(cipher.err(), Some(Errno::PERM));
        assert!(UdpSocket::bind("127.0.0.1:0").is_ok());
        assert!(refused_by_then() > before);
    })
    .join()
    .unwrap();
}

#[test]
fn who_is_confined_opens_only_what_it_is_to() {
    let folder = std::env::temp_dir().join(format!("portoland-{}-confined", std::process::id()));
    fs::create_dir_all(folder.join("own")).unwrap();
    fs::write(folder.join("own/file"), "own").unwrap();
    fs::write(folder.join("file"), "another's").unwrap();
    let within = folder.clone();
    thread::spawn(move || {
        let access = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::MakeReg;
        let own = files::rule(within.join("own"), access | AccessFs::Truncate);
        let status = files::restrict(&[own]).unwrap();
        assert_ne!(status, landlock::RulesetStatus::NotEnforced);
        assert_eq!(fs::read_to_string(within.join("own/file")).unwrap(), "own");
        fs::write(within.join("own/new"), "new").unwrap();
        assert!(fs::read_to_string(within.join("file")).is_err());
        assert!(fs::write(within.join("new"), "new").is_err());
        assert!(fs::read_to_string("/etc/shadow").is_err());
    })
    .join()
    .unwrap();
    // An unconfined thread may.
    assert!(fs::read_to_string(folder.join("file")).is_ok());
    fs::remove_dir_all(folder).unwrap();
}
