//! Transmit reservations and groups: admitted ones appear in the kernel's scheduler, others are refused with
//! numbers, and each ends with its holder, its maker or the server.

mod common;

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::cgroup::Cgroup;
use common::{Client, Library, Near, await_some, control_path, start_server_with};
use portolan_netns::{Bed, Daemon, Namespace};
use portolan_proto::control::{AfterFlush, Reader, ReplyBody, RequestBody, TxQueue, TxQueueState};
use portolan_proto::qos::{
    Algorithm, Cpu, GroupAction, GroupOptions, Kind, QosReply, QosReport, QosRequest, Rate,
    RateKept, Refusal, Scope, Slack, Transmit,
};
use portolan_types::{Protocol, SessionId, Slot};
use rustix::process::{Signal, Uid};

const MBIT: u64 = 1_000_000;
const NOBODY: u32 = 65534;

/// Host `a` with a server whose link has 100 Mbit/s.
struct Host {
    bed: Bed,
    server: Daemon,
    config: PathBuf,
}

impl Host {
    fn start(name: &str, link: &str) -> Host {
        Host::on(Bed::veth(), name, link)
    }

    fn on(bed: Bed, name: &str, link: &str) -> Host {
        let config = std::env::temp_dir().join(format!(
            "portoland-transmit-{}-{name}.toml",
            std::process::id()
        ));
        let text = format!("[[qos.link]]\ndevice = \"eth0\"\nrate = \"100mbit\"\n{link}\n");
        std::fs::write(&config, text).unwrap();
        let server = start_server_with(&bed.a, &["--config", config.to_str().unwrap()]);
        Host {
            bed,
            server,
            config,
        }
    }

    /// Returns a process with one connection, and its peer on the other host.
    fn connect(&self) -> (Library, (SessionId, Near, Slot), std::net::TcpStream) {
        let at = (Bed::B4, 9000);
        let listener = self
            .bed
            .b
            .enter(|| std::net::TcpListener::bind(at).unwrap());
        let mut library = Library::start(&control_path(&self.bed.a));
        let session = library.open(at.into());
        let (peer, _) = listener.accept().unwrap();
        (library, session, peer)
    }

    fn restart(&mut self) {
        self.server = start_server_with(&self.bed.a, &["--config", self.config.to_str().unwrap()]);
    }

    fn client(&self) -> Client {
        Client::connect(&control_path(&self.bed.a))
    }

    /// Returns a client of a process of user nobody.
    fn client_of_nobody(&self) -> Client {
        let path = control_path(&self.bed.a);
        as_nobody(move || Client::connect(&path))
    }

    fn classes(&self) -> String {
        tc(&self.bed.a, "class show dev eth0")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.config);
    }
}

fn as_nobody<T: Send + 'static>(action: impl FnOnce() -> T + Send + 'static) -> T {
    let deprived = std::thread::spawn(|| {
        let nobody = Some(Uid::from_raw(NOBODY));
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
        action()
    });
    deprived.join().unwrap()
}

fn tc(host: &Namespace, arguments: &str) -> String {
    let output = host.exec("tc").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "tc {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A process that does nothing, killed at the end.
struct Idle(Child);

impl Idle {
    fn start() -> Idle {
        Idle(Command::new("sleep").arg("100").spawn().unwrap())
    }

    fn scope(&self) -> Scope {
        Scope::Process { pid: self.0.id() }
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ask(client: &mut Client, request: QosRequest) -> QosReply {
    match client.ask(RequestBody::Qos(request)) {
        ReplyBody::Qos(reply) => reply,
        reply => panic!("{reply:?}"),
    }
}

fn refused(client: &mut Client, request: QosRequest) -> Refusal {
    match ask(client, request) {
        QosReply::Refused(refusal) => refusal,
        reply => panic!("{reply:?}"),
    }
}

fn done(client: &mut Client, request: QosRequest) {
    assert_eq!(ask(client, request), QosReply::Done);
}

fn show(client: &mut Client) -> QosReport {
    client.guarantees()
}

fn transmit(scope: &Scope, rate: Rate) -> QosRequest {
    let spec = Transmit {
        device: None,
        rate,
        burst: None,
        slack: Slack::None,
    };
    QosRequest::Transmit {
        scope: scope.clone(),
        spec,
    }
}

fn bits(scope: &Scope, mbit: u64) -> QosRequest {
    transmit(scope, Rate::Bits(mbit * MBIT))
}

fn delete(scope: &Scope) -> QosRequest {
    QosRequest::Delete {
        scope: scope.clone(),
        kind: Kind::Transmit,
    }
}

fn group(key: u32, action: GroupAction) -> QosRequest {
    QosRequest::Group { key, action }
}

fn create(mbit: u64, mode: u16, options: GroupOptions) -> GroupAction {
    GroupAction::Create {
        device: None,
        bits: mbit * MBIT,
        mode,
        options,
        algorithm: Algorithm::RateControlled,
    }
}

fn join(scope: &Scope, mbit: u64) -> GroupAction {
    GroupAction::Join {
        scope: scope.clone(),
        bits: mbit * MBIT,
    }
}

#[test]
fn a_reservation_is_a_class_until_it_is_deleted() {
    let mut host = Host::start("class", "");
    let mut client = host.client();
    let idle = Idle::start();
    let slice = Rate::Slice {
        slice_us: 4_000,
        period_us: 100_000,
    };
    done(&mut client, transmit(&idle.scope(), slice));
    let classes = host.classes();
    assert!(classes.contains("706f:10 parent 706f:1"), "{classes}");
    assert!(
        classes.contains("rate 4Mbit ceil 4Mbit burst 50000b"),
        "{classes}"
    );
    assert!(
        classes.contains("rate 96Mbit ceil 100Mbit"),
        "best effort has the rest: {classes}"
    );
    done(&mut client, bits(&idle.scope(), 20));
    let report = show(&mut client);
    assert_eq!(report.links[0].rate, Some(100 * MBIT));
    assert_eq!(
        (report.links[0].reservable, report.links[0].reserved),
        (90 * MBIT, 20 * MBIT)
    );
    let [reservation] = &report.transmit[..] else {
        panic!("{report:?}");
    };
    assert_eq!(
        (&reservation.scope, reservation.rate),
        (&idle.scope(), 20 * MBIT)
    );
    done(&mut client, delete(&idle.scope()));
    assert!(!host.classes().contains("706f:10"));
    assert_eq!(
        refused(&mut client, delete(&idle.scope())).errno,
        libc_enoent()
    );
    host.server.signal(Signal::TERM);
    assert!(host.server.await_end().is_some());
    let left = tc(&host.bed.a, "qdisc show dev eth0");
    assert!(left.contains("noqueue 0:"), "{left}");
}

fn libc_enoent() -> i32 {
    rustix::io::Errno::NOENT.raw_os_error()
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let host = Host::start("fit", "");
    let mut client = host.client();
    let (one, other) = (Idle::start(), Idle::start());
    done(&mut client, bits(&one.scope(), 60));
    let before = host.classes();
    let refusal = refused(&mut client, bits(&other.scope(), 40));
    assert!(refusal.reason.contains("of 90mbit"), "{refusal:?}");
    assert!(refusal.reason.contains("30mbit are left"), "{refusal:?}");
    refused(&mut client, bits(&one.scope(), 91));
    assert_eq!(host.classes(), before);
}

#[test]
fn a_killed_holder_has_nothing_a_second_later() {
    let host = Host::start("killed", "");
    let mut client = host.client();
    let mut idle = Idle::start();
    done(&mut client, bits(&idle.scope(), 90));
    idle.kill();
    let start = Instant::now();
    await_some("its class to go", || {
        (!host.classes().contains("706f:10")).then_some(())
    });
    assert!(start.elapsed() < Duration::from_secs(1));
    let orphaned = client.counter("server", "transmit_reservations_orphaned");
    assert_eq!(orphaned, 1);
    let next = Idle::start();
    done(&mut client, bits(&next.scope(), 90));
}

#[test]
fn a_users_discipline_is_not_touched_or_comes_back() {
    let bed = Bed::veth();
    tc(&bed.a, "qdisc add dev eth0 root handle 7: pfifo limit 77");
    let mut host = Host::on(bed, "keep", "");
    let idle = Idle::start();
    let refusal = refused(&mut host.client(), bits(&idle.scope(), 1));
    assert!(refusal.reason.contains("pfifo 7:"), "{refusal:?}");
    assert!(refusal.reason.contains("replace = true"), "{refusal:?}");
    let shown = |host: &Host| tc(&host.bed.a, "qdisc show dev eth0");
    assert!(shown(&host).contains("pfifo 7: root"));

    std::fs::write(
        &host.config,
        "[[qos.link]]\ndevice = \"eth0\"\nrate = \"100mbit\"\nreplace = true\n",
    )
    .unwrap();
    for signal in [Signal::TERM, Signal::KILL] {
        host.server.signal(Signal::TERM);
        host.server.await_end();
        host.restart();
        done(&mut host.client(), bits(&idle.scope(), 1));
        assert!(shown(&host).contains("htb 706f: root"));
        assert_eq!(
            show(&mut host.client()).links[0].replaced.as_deref(),
            Some("pfifo 7:")
        );
        host.server.signal(signal);
        host.server.await_end();
    }
    // The killed server left its scheduler; the next one removes it, and restores the user's.
    assert!(shown(&host).contains("htb 706f: root"));
    host.restart();
    host.server.signal(Signal::TERM);
    host.server.await_end();
    let shown = shown(&host);
    assert!(
        shown.contains("pfifo 7: root") && shown.contains("limit 77p"),
        "{shown}"
    );
}

#[test]
fn users_reserve_nothing_where_the_configuration_does_not_say_so() {
    let mut host = Host::start("unnamed", "");
    std::fs::write(&host.config, "").unwrap();
    host.server.signal(Signal::TERM);
    host.server.await_end();
    host.restart();
    let shown = |host: &Host| tc(&host.bed.a, "qdisc show dev eth0");
    let before = shown(&host);
    assert!(before.contains("noqueue 0: root"), "{before}");

    let mut nobody = host.client_of_nobody();
    let own = Scope::User { uid: NOBODY };
    let refusal = refused(&mut nobody, bits(&own, 1));
    assert_eq!(refusal.errno, rustix::io::Errno::PERM.raw_os_error());
    assert!(refusal.reason.contains("[[qos.link]]"), "{refusal:?}");
    let refusal = refused(
        &mut nobody,
        group(7, create(1, 0o700, GroupOptions::default())),
    );
    assert_eq!(refusal.errno, rustix::io::Errno::PERM.raw_os_error());
    let cpu = QosRequest::Cpu {
        scope: own,
        spec: Cpu {
            class: None,
            rate_ppm: 1000,
            period_us: Cpu::PERIOD_US,
            slack: false,
            adapt: Default::default(),
        },
    };
    let refusal = refused(&mut nobody, cpu);
    assert_eq!(refusal.errno, rustix::io::Errno::PERM.raw_os_error());
    assert!(refusal.reason.contains("[[qos.cpu_class]]"), "{refusal:?}");
    assert_eq!(shown(&host), before);
}

#[test]
fn with_the_last_class_a_link_gets_its_former_discipline_back() {
    let mut host = Host::start("former", "");
    std::fs::write(
        &host.config,
        "[[qos.link]]\ndevice = \"eth0\"\nreplace = true\n",
    )
    .unwrap();
    host.server.signal(Signal::TERM);
    host.server.await_end();
    tc(
        &host.bed.a,
        "qdisc add dev eth0 root handle 7: pfifo limit 77",
    );
    host.restart();
    let mut client = host.client();
    let shown = |host: &Host| tc(&host.bed.a, "qdisc show dev eth0");
    let await_former = |host: &Host| {
        await_some("the former discipline", || {
            let shown = shown(host);
            (shown.contains("pfifo 7: root") && shown.contains("limit 77p")).then_some(())
        });
    };
    let (one, mut other) = (Idle::start(), Idle::start());
    for _ in 0..2 {
        done(&mut client, bits(&one.scope(), 20));
        done(&mut client, bits(&other.scope(), 20));
        done(&mut client, delete(&one.scope()));
        std::thread::sleep(Duration::from_millis(700));
        assert!(shown(&host).contains("htb 706f: root"), "one is left");
        done(&mut client, delete(&other.scope()));
        await_former(&host);
    }
    done(
        &mut client,
        group(7, create(10, 0o700, GroupOptions::default())),
    );
    done(&mut client, bits(&other.scope(), 20));
    other.kill();
    std::thread::sleep(Duration::from_millis(700));
    assert!(shown(&host).contains("htb 706f: root"), "a group is left");
    done(&mut client, group(7, GroupAction::Delete));
    await_former(&host);
}

#[test]
fn hostile_specs_are_refused_with_reasons() {
    let host = Host::start("hostile", "");
    let mut client = host.client_of_nobody();
    let foreign = Idle::start();
    let mut check = |request: QosRequest, errno: rustix::io::Errno| {
        let text = format!("{request:?}");
        let refusal = refused(&mut client, request);
        assert_eq!(refusal.errno, errno.raw_os_error(), "{text}: {refusal:?}");
        assert!(!refusal.reason.is_empty());
    };
    use rustix::io::Errno;
    check(bits(&foreign.scope(), 1), Errno::PERM);
    check(bits(&Scope::Process { pid: u32::MAX }, 1), Errno::SRCH);
    check(bits(&Scope::User { uid: 0 }, 1), Errno::PERM);
    check(bits(&Scope::Cgroup("/../../etc".into()), 1), Errno::INVAL);
    check(
        bits(
            &Scope::Port {
                protocol: Protocol::Tcp,
                port: 22,
            },
            1,
        ),
        Errno::PERM,
    );
    check(bits(&Scope::Thread { tid: 1 }, 1), Errno::INVAL);
    let own = Scope::User { uid: NOBODY };
    for rate in [
        Rate::Bits(0),
        Rate::Slice {
            slice_us: 0,
            period_us: 0,
        },
        Rate::Slice {
            slice_us: u32::MAX,
            period_us: 1,
        },
        Rate::Slice {
            slice_us: 2_000,
            period_us: 1_000,
        },
        Rate::Slice {
            slice_us: 1,
            period_us: u32::MAX,
        },
    ] {
        check(transmit(&own, rate), Errno::INVAL);
    }
    check(transmit(&own, Rate::Bits(u64::MAX)), Errno::BUSY);
    check(bits(&own, 46), Errno::DQUOT);
    check(delete(&own), Errno::NOENT);
    let elsewhere = Transmit {
        device: Some("lo".into()),
        rate: Rate::Bits(MBIT),
        burst: None,
        slack: Slack::All,
    };
    let request = QosRequest::Transmit {
        scope: own.clone(),
        spec: elsewhere,
    };
    check(request, Errno::NODEV);
    assert_eq!(show(&mut host.client()).transmit, []);
    done(&mut client, bits(&own, 45));
    // Only root can take back what root gives.
    done(&mut host.client(), bits(&own, 50));
    let refusal = refused(&mut client, delete(&own));
    assert_eq!(refusal.errno, Errno::PERM.raw_os_error());
}

#[test]
fn a_group_is_shared_by_those_whom_its_mode_lets_in() {
    let host = Host::start("group", "");
    let (mut root, mut nobody) = (host.client(), host.client_of_nobody());
    let own = GroupOptions::default();
    done(&mut root, group(7, create(50, 0o700, own)));
    assert_eq!(
        refused(&mut root, group(7, create(1, 0o700, own))).errno,
        17
    );
    assert_eq!(refused(&mut nobody, group(7, GroupAction::Open)).errno, 13);
    assert_eq!(show(&mut nobody).groups, []);
    done(&mut root, group(8, create(30, 0o711, own)));
    done(&mut nobody, group(8, GroupAction::Open));
    assert_eq!(
        refused(&mut nobody, group(8, GroupAction::Delete)).errno,
        13
    );
    assert_eq!(refused(&mut nobody, group(9, GroupAction::Open)).errno, 2);

    let (mut one, other) = (Idle::start(), Idle::start());
    let QosReply::Joined { member } = ask(&mut root, group(8, join(&one.scope(), 20))) else {
        panic!("it fits");
    };
    let refusal = refused(&mut root, group(8, join(&other.scope(), 11)));
    assert!(refusal.reason.contains("10mbit are left"), "{refusal:?}");
    assert!(matches!(
        ask(&mut root, group(8, join(&other.scope(), 10))),
        QosReply::Joined { .. }
    ));
    assert_eq!(
        refused(&mut root, group(8, join(&other.scope(), 0))).errno,
        16
    );
    let report = show(&mut root);
    let shown = report.groups.iter().find(|group| group.key == 8).unwrap();
    assert_eq!((shown.rate, shown.reserved), (30 * MBIT, 30 * MBIT));
    assert_eq!(report.links[0].reserved, 80 * MBIT);
    let classes = host.classes();
    let parent = format!("parent 706f:{:x}", shown.class);
    assert_eq!(classes.matches(&parent).count(), 2, "{classes}");

    // Flows within it may use the group's rate.
    let options = GroupOptions { share: true, ..own };
    done(&mut root, group(8, GroupAction::SetOptions(options)));
    assert!(
        host.classes().contains("rate 20Mbit ceil 30Mbit"),
        "{}",
        host.classes()
    );
    one.kill();
    await_some("the member to go", || {
        let member = show(&mut root)
            .transmit
            .iter()
            .any(|t| u32::from(t.class) == member);
        (!member).then_some(())
    });
    done(&mut root, group(8, GroupAction::Delete));
    assert!(!host.classes().contains(&parent));
    assert_eq!(show(&mut root).links[0].reserved, 50 * MBIT);
}

#[test]
fn a_groups_rate_changes_as_it_was_admitted() {
    let host = Host::start("regroup", "");
    let (mut root, mut nobody) = (host.client(), host.client_of_nobody());
    let own = GroupOptions {
        share: true,
        ..GroupOptions::default()
    };
    let set = |mbit: u64| group(7, GroupAction::SetRate { bits: mbit * MBIT });
    done(&mut root, group(7, create(30, 0o711, own)));
    let idle = Idle::start();
    let joined = ask(&mut root, group(7, join(&idle.scope(), 20)));
    assert!(matches!(joined, QosReply::Joined { .. }));
    done(&mut root, set(60));
    let shown = &show(&mut root).groups[0];
    assert_eq!((shown.rate, shown.reserved), (60 * MBIT, 20 * MBIT));
    let classes = host.classes();
    assert!(classes.contains("rate 60Mbit ceil 60Mbit"), "{classes}");
    assert!(
        classes.contains("rate 20Mbit ceil 60Mbit"),
        "its flow may use it: {classes}"
    );
    assert!(
        classes.contains("rate 40Mbit ceil 100Mbit"),
        "best effort: {classes}"
    );
    let refusal = refused(&mut root, set(91));
    assert!(refusal.reason.contains("90mbit are left"), "{refusal:?}");
    let refusal = refused(&mut root, set(19));
    assert!(refusal.reason.contains("20mbit reserved"), "{refusal:?}");
    assert_eq!(refused(&mut nobody, set(50)).errno, 13);
    assert_eq!(
        refused(&mut root, group(8, GroupAction::SetRate { bits: MBIT })).errno,
        2
    );
    assert_eq!(host.classes(), classes, "nothing has changed");
    done(&mut root, set(20));
    assert_eq!(show(&mut root).links[0].reserved, 20 * MBIT);
}

fn link(mbit: Option<u64>) -> QosRequest {
    QosRequest::Link {
        device: "eth0".into(),
        bits: mbit.map(|mbit| mbit * MBIT),
    }
}

#[test]
fn a_link_that_becomes_slower_keeps_its_promises_in_proportion() {
    let host = Host::start("slower", "");
    let mut client = host.client();
    let (plain, member) = (Idle::start(), Idle::start());
    done(&mut client, bits(&plain.scope(), 30));
    done(
        &mut client,
        group(7, create(60, 0o700, GroupOptions::default())),
    );
    ask(&mut client, group(7, join(&member.scope(), 40)));
    let kept = |report: &QosReport, scope: &Scope| {
        let mut all = report.transmit.iter();
        all.find(|entry| entry.scope == *scope)
            .map(|entry| entry.kept)
    };
    done(&mut client, link(Some(50)));
    let report = show(&mut client);
    assert_eq!(
        kept(&report, &plain.scope()),
        Some(RateKept::Scaled { bits: 15 * MBIT })
    );
    assert_eq!(
        kept(&report, &member.scope()),
        Some(RateKept::Scaled { bits: 20 * MBIT })
    );
    assert_eq!(report.groups[0].kept, RateKept::Scaled { bits: 30 * MBIT });
    assert_eq!(
        (report.links[0].reservable, report.links[0].reserved),
        (45 * MBIT, 90 * MBIT)
    );
    let classes = host.classes();
    for rate in [
        "15Mbit ceil 30",
        "30Mbit ceil 50",
        "20Mbit ceil 40",
        "5Mbit ceil 50",
        "50Mbit ceil 50",
    ] {
        assert!(
            classes.contains(&format!("rate {rate}")),
            "{rate}: {classes}"
        );
    }
    assert_eq!(client.counter("server", "guarantees_scaled"), 3);
    let other = Idle::start();
    let refusal = refused(&mut client, bits(&other.scope(), 1));
    assert!(refusal.reason.contains("of 45mbit"), "{refusal:?}");
    // A leaving flow returns its part to the others.
    done(&mut client, group(7, GroupAction::Delete));
    let report = show(&mut client);
    assert_eq!(kept(&report, &plain.scope()), Some(RateKept::Full));
    assert!(host.classes().contains("rate 30Mbit ceil 30Mbit"));
    done(&mut client, link(Some(100)));
    assert_eq!(client.counter("server", "guarantees_restored"), 1);
    assert!(
        host.classes().contains("rate 70Mbit ceil 100Mbit"),
        "{}",
        host.classes()
    );
    // The rate that the device reports.
    done(&mut client, link(None));
    assert_eq!(show(&mut client).links[0].rate, Some(10_000 * MBIT));
    use rustix::io::Errno;
    assert_eq!(
        refused(&mut client, link(Some(0))).errno,
        Errno::INVAL.raw_os_error()
    );
    let nobody = &mut host.client_of_nobody();
    assert_eq!(
        refused(nobody, link(Some(1))).errno,
        Errno::PERM.raw_os_error()
    );
}

#[test]
fn a_device_that_goes_suspends_its_guarantees_until_it_is_back() {
    let host = Host::start("gone", "");
    let mut client = host.client();
    let (plain, member, other) = (Idle::start(), Idle::start(), Idle::start());
    done(&mut client, bits(&plain.scope(), 30));
    done(
        &mut client,
        group(7, create(20, 0o700, GroupOptions::default())),
    );
    ask(&mut client, group(7, join(&member.scope(), 10)));
    done(&mut client, bits(&other.scope(), 5));
    let ip = |arguments: &str| {
        let status = host.bed.a.exec("ip").args(arguments.split(' ')).status();
        assert!(status.unwrap().success(), "ip {arguments}");
    };
    let kept = |client: &mut Client, wanted: RateKept| {
        let report = show(client);
        let transmit = report.transmit.iter().map(|entry| entry.kept);
        let mut all = transmit.chain(report.groups.iter().map(|entry| entry.kept));
        all.all(|kept| kept == wanted).then_some(())
    };
    let index = |host: &Host| tc(&host.bed.a, "qdisc show").contains("dev eth0");
    ip("link del eth0");
    await_some("its guarantees to be suspended", || {
        kept(&mut client, RateKept::Suspended)
    });
    assert!(show(&mut client).links[0].gone && !index(&host));
    assert_eq!(client.counter("server", "links_lost"), 1);
    assert_eq!(client.counter("server", "guarantees_suspended"), 4);
    let refusal = refused(&mut client, bits(&plain.scope(), 31));
    assert!(refusal.reason.contains("gone"), "{refusal:?}");
    done(&mut client, delete(&other.scope()));

    // Another interface index, as if another device had taken the former one.
    ip("link add spare type veth peer name beyond");
    ip("link add eth0 type veth peer name far");
    ip("link set eth0 up");
    await_some("its guarantees to be kept", || {
        kept(&mut client, RateKept::Full)
    });
    let classes = host.classes();
    for rate in [
        "30Mbit ceil 30",
        "20Mbit ceil 20",
        "10Mbit ceil 10",
        "50Mbit ceil 100",
    ] {
        assert!(
            classes.contains(&format!("rate {rate}")),
            "{rate}: {classes}"
        );
    }
    assert!(!classes.contains("rate 5Mbit"), "{classes}");
    let filter = tc(&host.bed.a, "filter show dev eth0 ingress");
    assert!(filter.contains("bpf"), "it is managed: {filter}");
    assert_eq!(client.counter("server", "guarantees_restored"), 3);
    done(&mut client, delete(&plain.scope()));
    assert!(!host.classes().contains("rate 30Mbit"));
}

#[test]
fn a_group_ends_with_its_maker_and_members_unless_kept() {
    let host = Host::start("ends", "");
    let keys = |host: &Host| -> Vec<u32> {
        show(&mut host.client())
            .groups
            .iter()
            .map(|g| g.key)
            .collect()
    };
    // A separate process that makes both and ends.
    let program = std::env::current_exe().unwrap();
    let made = Command::new(program)
        .args(["--exact", "makes_groups_and_ends", "--nocapture"])
        .env("MAKE_GROUPS_AT", control_path(&host.bed.a))
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    await_some("the one that is not kept to end", || {
        (keys(&host) == [2]).then_some(())
    });
}

/// Not a test by itself: the maker in the test above.
#[test]
fn makes_groups_and_ends() {
    let Some(path) = std::env::var_os("MAKE_GROUPS_AT") else {
        return;
    };
    let mut client = Client::connect(&PathBuf::from(path));
    let keep = GroupOptions {
        keep: true,
        ..GroupOptions::default()
    };
    done(
        &mut client,
        group(1, create(10, 0o777, GroupOptions::default())),
    );
    done(&mut client, group(2, create(10, 0o777, keep)));
}

#[test]
fn a_flow_has_its_class_until_it_ends() {
    let host = Host::start("flow", "");
    let (mut library, (_, near, slot), mut peer) = host.connect();
    let flow = library.stack.tcp(slot).unwrap().flow;
    let scope = Scope::Flow(flow);
    done(&mut library.client, bits(&scope, 10));
    // The process does not report that it uses its transmit queue.
    await_some("the end of patience", || {
        (library.client.counter("server", "tx_queues_late") == 1).then_some(())
    });
    pass(&mut library, slot, &mut peer);
    let report = show(&mut library.client);
    assert!(report.transmit[0].traffic.bytes > 20_000, "{report:?}");
    assert_eq!(report.transmit[0].traffic.drops, 0);
    let mut absent = flow;
    absent.remote.set_port(1);
    let refusal = refused(&mut library.client, bits(&Scope::Flow(absent), 1));
    assert_eq!(refusal.errno, rustix::io::Errno::SRCH.raw_os_error());
    drop((near, library, peer));
    let mut client = host.client();
    await_some("the flow's class to go", || {
        show(&mut client).transmit.is_empty().then_some(())
    });
}

/// Sends 20,000 bytes, which arrive.
fn pass(library: &mut Library, slot: Slot, peer: &mut std::net::TcpStream) {
    let mut bytes = [0; 20_000];
    library.write(slot, &bytes);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| std::io::Read::read_exact(peer, &mut bytes).unwrap());
        while !reader.is_finished() {
            library.turn();
        }
    });
}

/// Returns the transmit queues of a process, as it fetches them.
fn tx_queues(library: &mut Library) -> Vec<TxQueue> {
    match library.client.ask_with(RequestBody::TxQueues, &[]) {
        (ReplyBody::TxQueues(tx_queues), _) => tx_queues.others,
        (reply, _) => panic!("{reply:?}"),
    }
}

#[test]
fn what_is_under_way_comes_into_its_class_when_its_process_says_that_it_has_its_tx_queue() {
    let host = Host::start("enters", "");
    let (mut library, (_, _near, slot), mut peer) = host.connect();
    let scope = Scope::Flow(library.stack.tcp(slot).unwrap().flow);
    done(&mut library.client, bits(&scope, 10));
    pass(&mut library, slot, &mut peer);
    let before = show(&mut library.client).transmit[0].traffic.bytes;
    let is_late = library.client.counter("server", "tx_queues_late") > 0;
    assert!(before < 20_000 || is_late, "{before}");

    let new = await_some("the transmit queue", || {
        let list = tx_queues(&mut library);
        list.into_iter().find(|one| one.state == TxQueueState::New)
    });
    assert_eq!(new.scope, scope);
    let number = new.number;
    library
        .client
        .send(RequestBody::TxQueueEntered { number }, &[]);
    assert_eq!(tx_queues(&mut library)[0].state, TxQueueState::Open);
    pass(&mut library, slot, &mut peer);
    let after = show(&mut library.client).transmit[0].traffic.bytes;
    assert!(after >= before + 20_000, "{after}");
}

#[test]
fn a_process_hears_of_a_tx_queue_before_it_has_the_session_that_is_to_wait_for_it() {
    let host = Host::start("arrives", "");
    let mut library = Library::start(&control_path(&host.bed.a));
    let scope = Scope::Port {
        protocol: Protocol::Udp,
        port: 7001,
    };
    done(&mut host.client(), bits(&scope, 5));
    let is_rung = |library: &Library| {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut recall_event = [PollFd::new(&library.recall_event, PollFlags::IN)];
        poll(&mut recall_event, Some(&Timespec::default())).unwrap() > 0
    };
    assert!(!is_rung(&library));
    library.bind(Protocol::Udp, (Bed::A4, 7001).into(), Slot(0));
    assert!(is_rung(&library));
    let list = tx_queues(&mut library);
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].scope, scope);
    assert_ne!(list[0].state, TxQueueState::Open);
}

#[test]
fn a_process_that_moves_into_a_cgroup_sends_in_its_class_soon() {
    let host = Host::start("cgroup", "");
    let (mut library, (_, _near, slot), mut peer) = host.connect();
    let cgroup = Cgroup::new("class");
    let scope = Scope::Cgroup(cgroup.path.clone());
    done(&mut library.client, bits(&scope, 20));
    pass(&mut library, slot, &mut peer);
    let sent = |library: &mut Library| show(&mut library.client).transmit[0].traffic.bytes;
    assert_eq!(sent(&mut library), 0, "it is elsewhere");
    cgroup.take_in_this_process();
    await_some("what it sends, in the class", || {
        pass(&mut library, slot, &mut peer);
        (sent(&mut library) > 0).then_some(())
    });
    drop(cgroup);
    await_some("what it sends, elsewhere again", || {
        let before = sent(&mut library);
        pass(&mut library, slot, &mut peer);
        (sent(&mut library) == before).then_some(())
    });
}

#[test]
fn a_relayed_session_keeps_its_class_and_goes_no_faster() {
    const BYTES: usize = 2_000_000;
    let host = Host::start("relayed", "");
    let (mut library, (id, near, slot), mut peer) = host.connect();
    let flow = library.stack.tcp(slot).unwrap().flow;
    done(&mut library.client, bits(&Scope::Flow(flow), 8));
    library.flush(id, slot, AfterFlush::Relay(Reader::Sender));
    let start = Instant::now();
    let mut descriptor = std::os::unix::net::UnixStream::from(near.0.try_clone().unwrap());
    let writer = std::thread::spawn(move || {
        std::io::Write::write_all(&mut descriptor, &vec![7; BYTES]).unwrap();
    });
    std::io::Read::read_exact(&mut peer, &mut vec![0; BYTES]).unwrap();
    writer.join().unwrap();
    // Two seconds' worth, less the burst.
    let took = start.elapsed();
    assert!(took > Duration::from_millis(1_800), "{took:?}");
    let report = show(&mut library.client);
    let traffic = report.transmit[0].traffic;
    assert!(
        traffic.bytes > BYTES as u64 && traffic.drops == 0,
        "{traffic:?}"
    );
    // The engine holds it back, not the queue shared by all.
    assert!(traffic.backlog < 100_000, "{traffic:?}");
}

#[test]
fn a_kernel_socket_sends_in_its_sessions_class() {
    let host = Host::start("ksock", "");
    let mut library = Library::start(&control_path(&host.bed.a));
    let (reply, _near) = library.bind(Protocol::Udp, (Bed::A4, 7000).into(), Slot(0));
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    let (_, mut fds) = library.client.ask_with(
        RequestBody::KernelSocket {
            session,
            is_v6: false,
        },
        &[],
    );
    let kernel_socket = std::net::UdpSocket::from(fds.remove(0));
    let scope = Scope::Port {
        protocol: Protocol::Udp,
        port: 7000,
    };
    done(&mut library.client, bits(&scope, 5));
    kernel_socket.send_to(&[7; 1_000], (Bed::B4, 7000)).unwrap();
    await_some("what the kernel socket sent, in the class", || {
        (show(&mut library.client).transmit[0].traffic.bytes > 1_000).then_some(())
    });
}
