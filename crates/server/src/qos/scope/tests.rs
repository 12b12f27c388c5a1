//! The meaning and coverage of scopes.

use portolan_sys::unix::Credentials;
use portolan_types::{FlowKey, Protocol};

use super::serve::{owner_in, owner_of_task};
use super::*;

const ASKER: Requester = Requester {
    credentials: Credentials {
        pid: 7,
        uid: 1000,
        gid: 1000,
    },
    basis: Basis::Request,
};

fn flow(local: &str, remote: &str) -> Scope {
    Scope::Flow(FlowKey {
        protocol: Protocol::Tcp,
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
    })
}

#[test]
fn both_forms_of_an_address_mean_the_same() {
    let mapped = flow("[::ffff:10.0.0.1]:80", "[::ffff:10.0.0.2]:4000");
    let plain = flow("10.0.0.1:80", "10.0.0.2:4000");
    assert_eq!(ASKER.canonicalize(mapped), Ok(plain));
}

#[test]
fn process_0_is_the_requesters_own() {
    let own = ASKER.canonicalize(Scope::Process { pid: 0 });
    assert_eq!(own, Ok(Scope::Process { pid: 7 }));
    let nobodys = Requester {
        credentials: Credentials {
            pid: 0,
            ..ASKER.credentials
        },
        ..ASKER
    };
    let refused = nobodys.canonicalize(Scope::Process { pid: 0 }).unwrap_err();
    assert_eq!(refused.errno, libc::ESRCH);
}

#[test]
fn a_path_that_leads_elsewhere_is_refused() {
    for path in ["", "a", "/a/../../etc", "/..", "/\u{1b}[2J", "/\0"] {
        let refused = ASKER.canonicalize(Scope::Cgroup(path.into())).unwrap_err();
        assert_eq!(refused.errno, libc::EINVAL, "{path:?}");
    }
    let long = Scope::Cgroup(format!("/{}", "a".repeat(PATH_MAX)));
    assert!(ASKER.canonicalize(long).is_err());
    let slash = ASKER.canonicalize(Scope::Cgroup("/a/".into()));
    assert_eq!(slash, Ok(Scope::Cgroup("/a".into())));
}

#[test]
fn a_program_with_anothers_rights_is_not_its_users() {
    let of = |users: &str| owner_in(&format!("Name:\ta\nUid:\t{users}\nGid:\t5 5 5 5\n"));
    assert_eq!(of("1000\t1000\t1000\t1000"), Some(1000));
    assert_eq!(of("1000\t0\t0\t0"), Some(0));
    assert_eq!(of("1000\t1000\t0\t1000"), Some(0));
    assert_eq!(of("33\t1000\t1000\t1000"), Some(0));
    assert_eq!(of(""), None);
    assert_eq!(
        owner_of_task(std::process::id()),
        Some(rustix::process::getuid().as_raw())
    );
}

#[test]
fn a_life_ends_though_its_number_is_another_s_later() {
    let own = Life::of(std::process::id()).unwrap();
    assert!(own.lasts());
    let earlier = Life {
        started: own.started - 1,
        ..own
    };
    assert!(!earlier.lasts());

    let mut child = std::process::Command::new("true").spawn().unwrap();
    let (pid, life) = (child.id(), Life::of(child.id()));
    child.wait().unwrap();
    assert!(life.is_none_or(|life| !life.lasts()));
    assert_eq!(Life::of(pid), None);
}

#[test]
fn the_name_of_a_program_does_not_mislead() {
    let stat = "5 (a) S) b) R 1 5 5 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1";
    assert_eq!(started(stat), Some(4242));
    assert_eq!(started(&stat.replace(" R ", " Z ")), None);
    assert_eq!(started("5 (a"), None);
}

#[test]
fn a_thread_is_not_a_process() {
    let looked = std::thread::spawn(|| {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        let tid = u32::try_from(tid).unwrap();
        (leader_of(tid), is_leader(tid))
    });
    let pid = std::process::id();
    assert_eq!(looked.join().unwrap(), (Some(pid), false));
    assert!(is_leader(pid));
}
