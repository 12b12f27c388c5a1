//! Guarantees by the configuration: users and ports have them from the start, programs when they register, and a
//! guarantee that cannot be given keeps the server from starting.

mod common;

use common::{Client, Configuration, Library, await_some, control_path};
use portolan_netns::{Bed, Daemon, Namespace, Ready};
use portolan_proto::qos::{QosReport, Scope};
use portolan_types::Protocol;

/// Starts a server that prints `word` and fails; returns its status.
fn fail(file: &Configuration, host: &Namespace, word: &str) -> Option<i32> {
    let mut command = host.exec(env!("CARGO_BIN_EXE_portoland"));
    command.args(["--interface", Bed::DEVICE, "--config"]);
    command.arg(file.path()).env_remove("PORTOLAN_SOCKET");
    let mut server = Daemon::start(command, Ready::Line(word.into()));
    await_some("end", || server.await_end()).code()
}

fn guarantees(host: &Namespace) -> QosReport {
    Client::connect(&control_path(host)).guarantees()
}

#[test]
fn users_and_ports_have_theirs_from_the_start() {
    let bed = Bed::veth();
    let file = Configuration::new(
        &bed.a,
        "[[qos.policy]]
         user = 'nobody'
         receive = { packets = 5000, burst = '20ms' }
         [[qos.policy]]
         port = 'udp:53'
         receive.priority = 2",
    );
    let _server = file.start(&bed.a);
    let budgets = guarantees(&bed.a).receive;
    let user = budgets
        .iter()
        .find(|budget| budget.scope == Scope::User { uid: 65534 })
        .expect("nobody has a budget");
    assert_eq!(user.uid, 0);
    assert_eq!((user.spec.packets, user.spec.burst_ms), (Some(5_000), 20));
    let dns = Scope::Port {
        protocol: Protocol::Udp,
        port: 53,
    };
    assert!(
        budgets
            .iter()
            .any(|budget| budget.scope == dns && budget.spec.priority == Some(2))
    );
}

#[test]
fn each_process_of_a_program_has_its_own_for_as_long_as_it_lives() {
    let bed = Bed::veth();
    let program = std::env::current_exe().unwrap();
    let file = Configuration::new(
        &bed.a,
        &format!(
            "[[qos.policy]]
             program = '{}'
             receive.packets = 5000
             [[qos.policy]]
             program = '/bin/true'
             receive.packets = 7
             [[qos.policy]]
             program = '{}'
             user = 'nobody'
             receive.packets = 8",
            program.display(),
            program.display(),
        ),
    );
    let _server = file.start(&bed.a);
    assert!(guarantees(&bed.a).receive.is_empty());
    let library = Library::start(&control_path(&bed.a));
    let budgets = guarantees(&bed.a).receive;
    let own = Scope::Process {
        pid: std::process::id(),
    };
    assert_eq!(budgets.len(), 1, "{budgets:?}");
    assert_eq!(budgets[0].scope, own);
    assert_eq!(budgets[0].spec.packets, Some(5_000));
    drop(library);
    await_some("end of the budget", || {
        guarantees(&bed.a).receive.is_empty().then_some(())
    });
}

#[test]
fn what_cannot_be_given_keeps_the_server_from_starting() {
    let bed = Bed::veth();
    let told = |text: &str, word: &str| fail(&Configuration::new(&bed.a, text), &bed.a, word);
    let wrong = "[[qos.policy]]\nuser = 'nobody'\ntransmit.rate = '20mbps'";
    assert_eq!(told(wrong, "transmit.rate = '20mbps'"), Some(2));
    // The server itself refuses, as it would a request.
    let impossible = "[[qos.policy]]\nuser = 'nobody'\nreceive.priority = 2";
    let word = "`qos.policy`: `receive` of user 65534 is refused: ";
    assert_eq!(told(impossible, word), Some(1));
    // It leaves nothing behind.
    let _server = Configuration::new(&bed.a, "").start(&bed.a);
}
