//! Which protocol extensions of user nobody are admitted: others are refused with a reason, and affect nobody.

use std::net::SocketAddr;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{
    Code, Extension, ExtensionReply, ExtensionRequest, Guard, MapKind, Relocation,
};
use portolan_types::SessionId;

use crate::budgets::as_user;
use crate::common::{Client, Configuration, Library, control_path, start_server};
use crate::handlers::{
    CONSUME, Owner, PASS, PAYLOAD, REPLY, VIEW, always, answer, ask, assert_silent, call, code,
    exit, list, map, mov, op, peer, refusal, slow,
};
use crate::meter::{Meter, VICTIM};
use crate::{Victim, as_nobody, assert_serves_others, counter};

/// Names, code, and a part of the reason.
pub(crate) fn unsafe_code() -> Vec<(&'static str, Code, &'static str)> {
    let load = |source| [op(0x18, 1, source, 0, 1), 0];
    let with_map = |definition, instructions: Vec<u64>| Code {
        maps: vec![definition],
        relocations: vec![Relocation {
            instruction: 0,
            map: 0,
            offset: None,
        }],
        ..code(instructions)
    };
    let array = || map(MapKind::Array, 4, 8, 1);
    let own = |rest: &[u64]| [&load(0)[..], rest].concat();
    vec![
        ("nothing", code([]), "no instructions"),
        (
            "an endless loop",
            code([op(0x05, 0, 0, -1, 0), exit()]),
            "verifier",
        ),
        ("no end", code([mov(0, 0)]), "verifier"),
        (
            "a jump away",
            code([op(0x05, 0, 0, -9, 0), exit()]),
            "out of the code",
        ),
        (
            "a call into the stub",
            code([op(0x85, 0, 1, 0, -9), exit()]),
            "out of the code",
        ),
        (
            "past the view",
            code([op(0x61, 0, 1, VIEW, 0), exit()]),
            "verifier",
        ),
        (
            "before the view",
            code([op(0x61, 0, 1, -4, 0), exit()]),
            "verifier",
        ),
        (
            "a packet's bytes",
            code([op(0x20, 0, 0, 0, 0), exit()]),
            "opcode",
        ),
        (
            "the packet itself",
            code([op(0x61, 0, 6, 76, 0), exit()]),
            "verifier",
        ),
        (
            "a second argument",
            code([op(0x61, 0, 2, 0, 0), exit()]),
            "verifier",
        ),
        (
            "the stub's frame",
            code([op(0x7b, 10, 1, 8, 0), mov(0, 0), exit()]),
            "verifier",
        ),
        (
            "an address as verdict",
            code([op(0xbf, 0, 1, 0, 0), exit()]),
            "verifier",
        ),
        (
            "an address kept",
            code([op(0x7b, 1, 1, PAYLOAD, 0), mov(0, 0), exit()]),
            "verifier",
        ),
        (
            "redirect",
            code([mov(1, 1), mov(2, 0), call(23), exit()]),
            "helper 23",
        ),
        ("store bytes", code([call(9), exit()]), "helper 9"),
        ("kernel memory", code([call(113), exit()]), "helper 113"),
        ("a tail call", code([call(12), exit()]), "helper 12"),
        ("a trace", code([call(6), exit()]), "helper 6"),
        (
            "a kernel function",
            code([op(0x85, 0, 2, 0, 1), exit()]),
            "function of the kernel",
        ),
        (
            "a call by register",
            code([op(0x8d, 1, 0, 0, 0), exit()]),
            "opcode",
        ),
        (
            "a foreign map",
            code([load(1)[0], 0, mov(0, 0), exit()]),
            "by a number",
        ),
        (
            "a foreign value",
            code([load(2)[0], 0, mov(0, 0), exit()]),
            "by a number",
        ),
        (
            "a map by index",
            code([load(5)[0], 0, mov(0, 0), exit()]),
            "by a number",
        ),
        ("half a load", code([op(0x18, 1, 0, 0, 1)]), "opcode"),
        (
            "a relocation astray",
            with_map(array(), vec![mov(0, 0), exit()]),
            "relocation 0",
        ),
        (
            "an unlocked atomic",
            code([op(0xdb, 1, 1, PAYLOAD, 0x100), mov(0, 0), exit()]),
            "opcode",
        ),
        (
            "past a map's value",
            with_map(
                array(),
                own(&[
                    op(0x62, 10, 0, -4, 0),
                    op(0xbf, 2, 10, 0, 0),
                    op(0x07, 2, 0, 0, -4),
                    call(1),
                    op(0x15, 0, 0, 1, 0),
                    op(0x79, 0, 0, 8, 0),
                    mov(0, 0),
                    exit(),
                ]),
            ),
            "verifier",
        ),
        (
            "a huge map",
            with_map(
                map(MapKind::Hash, 4, 4096, 65_536),
                own(&[mov(0, 0), exit()]),
            ),
            "bytes",
        ),
        (
            "too many entries",
            with_map(
                map(MapKind::Hash, 4, 4, u32::MAX),
                own(&[mov(0, 0), exit()]),
            ),
            "entries",
        ),
        (
            "a ring of odd size",
            with_map(map(MapKind::Ring, 0, 0, 5000), own(&[mov(0, 0), exit()])),
            "power of two",
        ),
        (
            "too many maps",
            Code {
                maps: vec![array(); 9],
                ..always(PASS)
            },
            "maps are too many",
        ),
        (
            "too long",
            code(std::iter::repeat_n(mov(0, 0), 5000)),
            "too many",
        ),
        (
            "no such entry",
            Code {
                handler: 7,
                ..always(PASS)
            },
            "within the code",
        ),
    ]
}

#[test]
fn whatever_a_domain_lacks_is_refused_with_a_reason() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut owner = Owner::start(&path);
    let before = counter(&path, "server", "extensions_refused");
    let bad = unsafe_code();
    let count = bad.len() as u64;
    for (what, code, why) in bad {
        let refusal = owner.refused(code);
        assert!(refusal.reason.contains(why), "{what}: {}", refusal.reason);
    }
    assert_eq!(
        counter(&path, "server", "extensions_refused"),
        before + count
    );
    assert_eq!(list(&mut owner.library.client), []);
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

#[test]
fn nobody_has_handlers_on_what_is_anothers() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let other = Owner::of(Library::start(&path), SocketAddr::new(Bed::A4, 0));
    let mut hostile = Owner::start(&path);
    for session in [other.session, victim.id, SessionId(0), SessionId(u64::MAX)] {
        let spec = Extension {
            guards: vec![Guard::Session(session)],
            ..hostile.spec(always(CONSUME))
        };
        let refusal = refusal(hostile.ask(ExtensionRequest::Install(spec)));
        assert_eq!(
            refusal.errno,
            libc::EPERM,
            "{session:?}: {}",
            refusal.reason
        );
    }
    // Others' extensions are neither listed nor removed.
    let mut other = other;
    let number = other.install(always(REPLY));
    assert_eq!(list(&mut hostile.library.client), []);
    let refusal = refusal(hostile.ask(ExtensionRequest::Remove { number }));
    assert_eq!(refusal.errno, libc::ENOENT);
    // A command without sockets cannot install anything.
    let mut command = crate::as_nobody(|| Client::connect(&path));
    let spec = hostile.spec(always(CONSUME));
    let denied = ask(&mut command, ExtensionRequest::Install(spec));
    assert!(matches!(denied, ExtensionReply::Refused(_)), "{denied:?}");
    assert_eq!(answer(&peer(&bed, other.port), b"mine"), b"mine");
    victim.assert_unharmed();
}

#[test]
fn there_are_only_so_many() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    for _ in 0..8 {
        owner.install(always(PASS));
    }
    assert!(owner.refused(always(PASS)).reason.contains("8 handlers"));
    // Numbers and memory of removed extensions are reused, repeatedly.
    for _ in 0..300 {
        let reports = list(&mut owner.library.client);
        let number = reports[0].number;
        owner.ask(ExtensionRequest::Remove { number });
        owner.install(always(PASS));
    }
    let peer = peer(&bed, owner.port);
    assert_silent(&peer, b"to the owner");
    assert_eq!(owner.frames(), 1);
    assert_serves_others(&bed, &path);
    meter.finish();
}

#[test]
fn who_takes_maps_again_and_again_runs_out() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let large = || Code {
        maps: vec![map(MapKind::Array, 4, 4096, 2000)],
        relocations: vec![Relocation {
            instruction: 0,
            map: 0,
            offset: None,
        }],
        ..code([op(0x18, 1, 0, 0, 0), 0, mov(0, 0), exit()])
    };
    for _ in 0..4 {
        let number = owner.install(large());
        owner.ask(ExtensionRequest::Remove { number });
    }
    let refusal = owner.refused(large());
    assert_eq!(refusal.errno, libc::EDQUOT, "{}", refusal.reason);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

/// Loops whose end the verifier cannot prove: it also follows speculative execution.
fn looping() -> Code {
    let mut instructions = vec![mov(0, 0), mov(1, 0)];
    instructions.extend((0..200).map(|_| op(0x07, 1, 0, 0, 1)));
    instructions.extend([op(0x07, 0, 0, 0, 1), op(0xa5, 0, 0, -202, 4000)]);
    instructions.extend([mov(0, REPLY), exit()]);
    code(instructions)
}

#[test]
fn nobody_waits_while_anothers_extension_is_verified() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let spec = owner.spec(looping());
    let asked = owner
        .library
        .client
        .send(RequestBody::Extension(ExtensionRequest::Install(spec)), &[]);
    assert_serves_others(&bed, &path);
    assert_eq!(
        counter(&path, "server", "extensions_refused"),
        0,
        "it was judged already"
    );
    let (reply, _) = owner.library.client.receive().expect("a reply");
    assert_eq!(reply.id, asked);
    let ReplyBody::Extension(reply) = reply.body else {
        panic!("{reply:?}");
    };
    assert!(refusal(reply).reason.contains("verifier"));
    meter.finish();
}

#[test]
fn an_administrator_bounds_what_a_handler_may_need() {
    let bed = Bed::veth();
    let configuration = Configuration::new(&bed.a, "[extension]\ninstructions = 1000");
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let refusal = owner.refused(slow());
    assert!(
        refusal.reason.ends_with("a handler may need 1000"),
        "{}",
        refusal.reason
    );
    owner.install(always(REPLY));
    meter.finish_but_for_starts();
}

/// The kernel verifies one after the other.
#[test]
fn programs_of_one_user_that_wait_to_be_verified_keep_nobody_elses_out() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let check = || RequestBody::Extension(ExtensionRequest::Check(slow()));
    let mut hostile = as_nobody(|| Client::connect(&path));
    let mut honest = as_user(VICTIM, || Client::connect(&path));
    for _ in 0..60 {
        hostile.send(check(), &[]);
    }
    let reply = honest.ask(check());
    let is_checked =
        |body: &ReplyBody| matches!(body, ReplyBody::Extension(ExtensionReply::Checked(_)));
    assert!(is_checked(&reply), "{reply:?}");
    let mut refused = 0;
    for _ in 0..60 {
        let (reply, _) = hostile.receive().unwrap();
        match reply.body {
            body if is_checked(&body) => {}
            ReplyBody::Extension(reply) => {
                assert_eq!(refusal(reply).errno, libc::EAGAIN);
                refused += 1;
            }
            body => panic!("{body:?}"),
        }
    }
    assert!(refused > 20, "{refused}");
    meter.finish();
}
