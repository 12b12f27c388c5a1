//! Admission: a process can use its own sessions, within its limits, and nothing else.

use portolan_tcp::isn::Secret;
use portolan_types::Protocol;

use super::*;

const PLENTY: Limit = Limit {
    total: 100,
    per_user: 100,
    reserve: 0,
};

fn registry() -> Registry {
    Registry::new(Limits {
        processes: Limit {
            total: 3,
            per_user: 2,
            reserve: 0,
        },
        sessions: Limit {
            total: 6,
            per_user: 3,
            reserve: 1,
        },
        bindings: PLENTY,
        sessions_per_process: 2,
    })
}

fn opening(protocol: Protocol, life: Life) -> Opening {
    Opening {
        life,
        ..Opening::new(protocol, "10.0.0.1:80".parse().unwrap(), 1000)
    }
}

fn numbers() -> impl FnMut() -> u64 {
    let mut next = 0;
    move || {
        next += 7;
        next
    }
}

fn process(registry: &mut Registry, uid: u32) -> ChannelId {
    let channel = registry.free_channels().next().unwrap();
    let charge = registry.admit_process(uid).unwrap();
    registry.register(channel, 1, "test".into(), charge);
    channel
}

#[test]
fn channels_are_numbered_from_one_and_reused() {
    let mut registry = registry();
    let first = process(&mut registry, 1);
    assert_eq!(first, ChannelId(1));
    assert_eq!(process(&mut registry, 2), ChannelId(2));
    registry.unregister(first);
    assert_eq!(process(&mut registry, 3), ChannelId(1));
}

#[test]
fn processes_are_bounded_per_user_and_in_all() {
    let mut registry = registry();
    process(&mut registry, 1);
    process(&mut registry, 1);
    assert_eq!(registry.admit_process(1).unwrap_err(), Exhausted::User);
    process(&mut registry, 2);
    assert_eq!(registry.free_channels().next(), None);
    assert_eq!(registry.admit_process(3).unwrap_err(), Exhausted::Total);
}

#[test]
fn sessions_are_bounded_per_user_and_leave_root_some() {
    let mut registry = registry();
    let mut numbers = numbers();
    let mut open = |uid| {
        let opening = Opening {
            uid,
            ..opening(
                Protocol::Tcp,
                Life::Handshake {
                    deferred_until: None,
                },
            )
        };
        registry.open(None, opening, &mut numbers)
    };
    let opened: Vec<_> = [1, 1, 1, 2, 2].map(|uid| open(uid).unwrap()).into();
    assert_eq!(open(1), Err(Errno::NOBUFS));
    assert_eq!(open(2), Err(Errno::NOBUFS));
    open(0).unwrap();
    assert_eq!(registry.refusals(), [0, 2, 0]);
    registry.remove(opened[0]);
    registry.remove(opened[3]);
    let opening = opening(
        Protocol::Tcp,
        Life::Handshake {
            deferred_until: None,
        },
    );
    registry.open(None, opening, &mut numbers).unwrap();
}

#[test]
fn sessions_are_bounded_per_process() {
    let mut registry = registry();
    let channel = process(&mut registry, 1);
    let mut numbers = numbers();
    let mut open = |registry: &mut Registry| {
        let bound = opening(Protocol::Tcp, Life::Bound);
        registry.open(Some(channel), bound, &mut numbers)
    };
    let first = open(&mut registry).unwrap();
    open(&mut registry).unwrap();
    assert_eq!(open(&mut registry), Err(Errno::NOBUFS));
    registry.remove(first);
    open(&mut registry).unwrap();
}

#[test]
fn a_process_cannot_name_the_cached_session_of_another() {
    let mut registry = registry();
    let mine = process(&mut registry, 1);
    let other = process(&mut registry, 2);
    let connected = opening(Protocol::Tcp, Life::Connected);
    let id = registry.open(Some(mine), connected, numbers()).unwrap();
    registry.steer(id, Holder::Process(mine, Slot(0)));
    assert!(registry.admit(mine, Command::Flush, id).is_ok());
    assert_eq!(
        registry.admit(other, Command::Flush, id).err(),
        Some(Errno::BADF)
    );
}

#[test]
fn an_offered_session_goes_to_whoever_learnt_its_number() {
    let mut registry = registry();
    let worker = process(&mut registry, 1);
    let offered = opening(Protocol::Tcp, Life::Offered);
    let id = registry.open(None, offered, numbers()).unwrap();
    assert!(registry.admit(worker, Command::Cache, id).is_ok());
    assert_eq!(
        registry.admit(worker, Command::Cache, SessionId(1)).err(),
        Some(Errno::BADF)
    );
}

#[test]
fn every_steer_has_a_fresh_generation() {
    let mut registry = registry();
    let id = registry
        .open(None, opening(Protocol::Tcp, Life::Offered), numbers())
        .unwrap();
    let first = registry.steer(id, Holder::Server(Slot(1)));
    let second = registry.steer(id, Holder::Server(Slot(1)));
    assert_ne!(first, second);
    assert_eq!(registry.session(id).unwrap().generation, second);
}

#[test]
fn a_dead_process_leaves_the_sessions_it_held() {
    let mut registry = registry();
    let channel = process(&mut registry, 1);
    let mut numbers = numbers();
    let connected = opening(Protocol::Tcp, Life::Connected);
    let held = registry
        .open(Some(channel), connected, &mut numbers)
        .unwrap();
    registry.steer(held, Holder::Process(channel, Slot(0)));
    let bound = opening(Protocol::Tcp, Life::Bound);
    registry.open(Some(channel), bound, &mut numbers).unwrap();
    assert_eq!(registry.held_by(channel), [held]);
    registry.unregister(channel);
    assert!(registry.session(held).unwrap().owner().is_none());
}

#[test]
fn a_session_has_as_many_users_as_showed_its_descriptor() {
    let mut registry = registry();
    let parent = process(&mut registry, 1);
    let child = process(&mut registry, 1);
    let listening = opening(
        Protocol::Tcp,
        Life::Listening(Box::new(Listener::new(1, Secret([7; 16])))),
    );
    let id = registry.open(Some(parent), listening, numbers()).unwrap();
    assert!(!registry.session(id).unwrap().is_user(child));
    registry.entitle(id, child);
    for user in [parent, child] {
        assert!(registry.session(id).unwrap().is_user(user));
    }
}

#[test]
fn a_cookie_finds_its_session_until_it_is_replaced() {
    let mut registry = registry();
    let with_cookie = Opening {
        cookie: 9,
        ..opening(Protocol::Tcp, Life::Bound)
    };
    let id = registry.open(None, with_cookie, numbers()).unwrap();
    assert_eq!(registry.by_cookie(9).unwrap().id, id);
    registry.replace_cookie(id, 10);
    assert!(registry.by_cookie(9).is_none());
    registry.remove(id);
    assert!(registry.by_cookie(10).is_none());
}
