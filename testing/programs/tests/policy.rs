//! The host's own policy: what netfilter, policy rules and programs of control groups refuse to the kernel's sockets,
//! they refuse to Portolan's. Each rule is played on both stacks, over both IP versions.

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use libbpf_rs::{Object, ObjectBuilder};
use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::run;
use portolan_netns::Bed as Wire;
use portolan_programs::{PYTHON, Steps, bed, counter, eventually, file};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/policy.py");

/// Services on the host with the policy, of the kernel's stack and of Portolan's, and on its peer.
const OF_KERNEL: u16 = 7001;
const OF_PORTOLAN: u16 = 7002;
const OF_PEER: u16 = 7003;

const PROMPTLY: Duration = Duration::from_secs(10);

/// Who asks whom. Between two programs of the host, both are of one stack.
#[derive(Clone, Copy, Debug)]
enum Way {
    Out,
    In,
    Within,
}

use Way::{In, Out, Within};

/// Way, protocol (and user), rules, and the outcome on both stacks.
type Row = (Way, &'static str, &'static str, &'static str);

/// Of nftables: `[type] hook: rule; rule`. A rule with an address stands for one of each IP version.
const NFTABLES: &[Row] = &[
    // What is admitted.
    (Out, "tcp", "output: tcp dport 7003 accept", "served"),
    (Out, "udp", "output: udp dport 7003 accept", "served"),
    (In, "tcp", "input: tcp dport $ports accept", "served"),
    (In, "udp", "input: udp dport $ports accept", "served"),
    (Within, "tcp", "output: oif lo accept", "served"),
    (Within, "udp", "output: oif lo accept", "served"),
    // What is refused to others.
    (Out, "tcp", "output: tcp dport 7004 drop", "served"),
    (Out, "tcp", "output: udp dport 7003 drop", "served"),
    (In, "udp", "input: tcp dport $ports drop", "served"),
    (In, "tcp", "input: saddr $own drop", "served"),
    // What is dropped.
    (Out, "tcp", "output: tcp dport 7003 drop", "timeout"),
    (Out, "udp", "output: udp dport 7003 drop", "EPERM"),
    (Out, "tcp", "output: daddr $peer drop", "timeout"),
    (Out, "udp", "output: oifname eth0 drop", "EPERM"),
    (Out, "tcp", "postrouting: tcp dport 7003 drop", "timeout"),
    (Out, "tcp", "input: tcp sport 7003 drop", "timeout"),
    (Out, "udp", "input: udp sport 7003 drop", "timeout"),
    (In, "tcp", "input: tcp dport $ports drop", "timeout"),
    (In, "udp", "input: udp dport $ports drop", "timeout"),
    (In, "tcp", "prerouting: tcp dport $ports drop", "timeout"),
    (In, "udp", "input: saddr $peer drop", "timeout"),
    (In, "tcp", "input: iifname eth0 drop", "timeout"),
    (In, "tcp", "output: tcp sport $ports drop", "timeout"),
    (In, "udp", "output: udp sport $ports drop", "timeout"),
    (Within, "tcp", "input: tcp dport $ports drop", "timeout"),
    (Within, "udp", "input: udp dport $ports drop", "timeout"),
    // What is refused by an answer.
    (
        Out,
        "tcp",
        "output: tcp dport 7003 reject with tcp reset",
        "ECONNREFUSED",
    ),
    (Out, "tcp", "output: tcp dport 7003 reject", "ECONNREFUSED"),
    (Out, "udp", "output: udp dport 7003 reject", "EPERM"),
    (
        In,
        "tcp",
        "input: tcp dport $ports reject with tcp reset",
        "ECONNREFUSED",
    ),
    (
        In,
        "tcp",
        "input: tcp dport $ports reject with icmpx host-unreachable",
        "EHOSTUNREACH",
    ),
    (
        Within,
        "tcp",
        "output: tcp dport $ports reject with tcp reset",
        "ECONNREFUSED",
    ),
    // By the state of a connection, as on most hosts.
    (
        Out,
        "tcp",
        "input: ct state established,related accept; meta l4proto { tcp, udp } drop",
        "served",
    ),
    (
        Out,
        "udp",
        "input: ct state established,related accept; meta l4proto { tcp, udp } drop",
        "served",
    ),
    (
        In,
        "tcp",
        "input: ct state established,related accept; meta l4proto { tcp, udp } drop",
        "timeout",
    ),
    (
        In,
        "udp",
        "input: ct state established,related accept; meta l4proto { tcp, udp } drop",
        "timeout",
    ),
    (
        In,
        "tcp",
        "input: ct state new tcp dport $ports accept; tcp dport $ports drop",
        "timeout",
    ),
    (In, "tcp", "input: ct state invalid drop", "served"),
    (Out, "tcp", "output: ct state invalid drop", "served"),
    (
        Out,
        "tcp",
        "output: ct state new tcp dport 7003 drop",
        "timeout",
    ),
    (
        In,
        "tcp",
        "output: ct state established accept; tcp sport $ports drop",
        "served",
    ),
    // By the user of a socket, and by a rate.
    (
        Out,
        "tcp 65534",
        "output: meta skuid 65534 tcp dport 7003 reject with tcp reset",
        "ECONNREFUSED",
    ),
    (
        Out,
        "tcp 0",
        "output: meta skuid 65534 tcp dport 7003 reject with tcp reset",
        "served",
    ),
    (
        Out,
        "udp 65534",
        "output: meta skuid 65534 udp dport 7003 drop",
        "EPERM",
    ),
    (
        Out,
        "udp 0",
        "output: meta skuid 65534 udp dport 7003 drop",
        "served",
    ),
    (
        In,
        "tcp",
        "input: tcp dport $ports limit rate over 10000/second drop",
        "served",
    ),
    // Other addresses and ports.
    (
        Out,
        "tcp",
        "nat output: tcp dport 7003 redirect to :9",
        "ECONNREFUSED",
    ),
    (
        Out,
        "tcp",
        "nat output: tcp dport 7003 redirect to :7001",
        "served",
    ),
    (
        Out,
        "udp",
        "nat output: udp dport 7003 redirect to :7001",
        "served",
    ),
    (
        Out,
        "tcp",
        "nat postrouting: meta l4proto { tcp, udp } masquerade to :30000-31000",
        "served",
    ),
    (
        Out,
        "udp",
        "nat postrouting: meta l4proto { tcp, udp } masquerade to :30000-31000",
        "served",
    ),
    (
        In,
        "tcp",
        "nat prerouting: tcp dport $ports redirect to :9",
        "ECONNREFUSED",
    ),
    (
        In,
        "udp",
        "nat prerouting: udp dport $ports redirect to :7001",
        "served",
    ),
];

/// Of the routing policy: `ip rule add` or `ip route add` each; for a mark, after nftables has set it.
const ROUTING: &[Row] = &[
    (Out, "tcp", "rule to $peer prohibit", "EACCES"),
    (Out, "udp", "rule to $peer prohibit", "EACCES"),
    (Out, "tcp", "rule to $peer unreachable", "ENETUNREACH"),
    (
        Out,
        "tcp",
        "rule to $peer table 77; route $peer dev eth0 table 77",
        "served",
    ),
    (
        Out,
        "udp",
        "rule to $peer table 77; route $peer dev eth0 table 77",
        "served",
    ),
    (
        Out,
        "tcp",
        "rule to $peer table 77; route prohibit $peer table 77",
        "EACCES",
    ),
    (Out, "tcp", "rule fwmark 7 prohibit", "served"),
    (
        Out,
        "tcp 65534",
        "rule uidrange 65534-65534 prohibit",
        "EACCES",
    ),
    (Out, "tcp 0", "rule uidrange 65534-65534 prohibit", "served"),
    (Out, "tcp", "rule ipproto tcp dport 7003 prohibit", "EACCES"),
    (Out, "udp", "rule ipproto tcp dport 7003 prohibit", "served"),
    (In, "tcp", "rule from $own to $peer prohibit", "timeout"),
];

/// Of iptables: rules to append.
const IPTABLES: &[Row] = &[
    (Out, "tcp", "OUTPUT -p tcp --dport 7003 -j ACCEPT", "served"),
    (Out, "tcp", "OUTPUT -p tcp --dport 7003 -j DROP", "timeout"),
    (Out, "udp", "OUTPUT -p udp --dport 7003 -j DROP", "EPERM"),
    (
        Out,
        "tcp",
        "OUTPUT -p tcp --dport 7003 -j REJECT",
        "ECONNREFUSED",
    ),
    (
        Out,
        "tcp 65534",
        "OUTPUT -m owner --uid-owner 65534 -j DROP",
        "timeout",
    ),
    (
        Out,
        "tcp 0",
        "OUTPUT -m owner --uid-owner 65534 -j DROP",
        "served",
    ),
    (
        In,
        "tcp",
        "INPUT -p tcp -m multiport --dports 7001,7002 -j DROP",
        "timeout",
    ),
    (
        In,
        "udp",
        "INPUT -p udp -m multiport --dports 7001,7002 -j DROP",
        "timeout",
    ),
    (
        In,
        "tcp",
        "INPUT -p tcp --syn -j REJECT --reject-with tcp-reset",
        "ECONNREFUSED",
    ),
];

/// The host with the policy is the bed's server; its peer has none.
struct Hosts {
    _services: Vec<Steps>,
    /// One for each of [`SOCKETS`].
    own: Vec<Steps>,
    peers: Vec<Steps>,
    /// Last: the programs end before their servers.
    bed: Bed,
}

#[derive(Clone, Copy, Debug)]
enum Version {
    V4,
    V6,
}

/// The sockets that each rule is played on.
const SOCKETS: [(Stack, Version); 4] = [
    (Stack::Kernel, Version::V4),
    (Stack::Portolan, Version::V4),
    (Stack::Kernel, Version::V6),
    (Stack::Portolan, Version::V6),
];

impl Hosts {
    fn new() -> Hosts {
        let bed = bed();
        let start = |side, stack, arguments: &[&str]| {
            let mut command = bed.command(side, stack, PYTHON);
            Steps::start(command.arg(SCRIPT).args(arguments))
        };
        let serve = |side, stack, port: u16| {
            let mut service = start(side, stack, &["serve", "::", &port.to_string()]);
            service.await_line("ready");
            service
        };
        let services = vec![
            serve(Side::Server, Stack::Kernel, OF_KERNEL),
            serve(Side::Server, Stack::Portolan, OF_PORTOLAN),
            serve(Side::Client, Stack::Kernel, OF_PEER),
        ];
        let own = SOCKETS.map(|(stack, _)| start(Side::Server, stack, &["ask"]));
        let peers = SOCKETS.map(|_| start(Side::Client, Stack::Kernel, &["ask"]));
        Hosts {
            _services: services,
            own: own.into(),
            peers: peers.into(),
            bed,
        }
    }

    fn addresses(version: Version) -> (String, String) {
        let (own, peer) = match version {
            Version::V4 => (Wire::B4, Wire::A4),
            Version::V6 => (Wire::B6, Wire::A6),
        };
        (own.to_string(), peer.to_string())
    }

    /// Replaces `$own`, `$peer` and `$ports`.
    fn filled(version: Version, text: &str) -> String {
        let (own, peer) = Hosts::addresses(version);
        text.replace("$own", &own)
            .replace("$peer", &peer)
            .replace("$ports", "{ 7001, 7002 }")
    }

    /// Has all sockets ask at the same time. Those that are to be served are waited for.
    fn outcomes(&mut self, (way, protocol): (Way, &str), expected: &str) -> Vec<String> {
        let patience = if expected == "timeout" { 0.4 } else { 10.0 };
        let (protocol, user) = protocol.split_once(' ').unwrap_or((protocol, ""));
        let questions = SOCKETS.map(|(stack, version)| {
            let (own, peer) = Hosts::addresses(version);
            let service = match stack {
                Stack::Kernel => OF_KERNEL,
                Stack::Portolan => OF_PORTOLAN,
            };
            let (address, port) = match way {
                Out => (peer, OF_PEER),
                In | Within => (own, service),
            };
            format!("{protocol} {patience} {address} {port} {user}")
        });
        let askers = match way {
            In => &mut self.peers,
            Out | Within => &mut self.own,
        };
        for (asker, question) in askers.iter_mut().zip(&questions) {
            asker.say(question);
        }
        askers.iter_mut().map(Steps::line).collect()
    }

    /// Plays a row. Returns what differs from its outcome.
    fn play(&mut self, row: &Row) -> Option<String> {
        let (way, protocol, rules, expected) = *row;
        let outcomes = self.outcomes((way, protocol), expected);
        let are_expected = outcomes.iter().all(|outcome| outcome == expected);
        (!are_expected)
            .then(|| format!("{way:?} {protocol}, {rules}: {outcomes:?}, not {expected}"))
    }

    fn host(&self, words: &str) {
        let mut words = words.split_whitespace();
        let program = words.next().expect("a program");
        let mut command = self.bed.namespace(Side::Server).exec(program);
        run(command.args(words)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Adds or deletes rules and routes of both IP versions.
    fn route(&self, action: &str, commands: &str) {
        for (version, family) in [(Version::V4, "-4"), (Version::V6, "-6")] {
            for command in commands.split("; ") {
                let (object, rest) = command.split_once(' ').expect("an object");
                let command = format!("ip {family} {object} {action} {rest}");
                self.host(&Hosts::filled(version, &command));
            }
        }
    }

    /// Replaces the ruleset of nftables.
    fn set_ruleset(&self, chains: &str) {
        let mut command = self.bed.namespace(Side::Server).exec("nft");
        let mut nft = command
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("nft is installed");
        let ruleset = format!("flush ruleset\ntable inet t {{\n{chains}\n}}\n");
        let mut input = nft.stdin.take().expect("is piped");
        input.write_all(ruleset.as_bytes()).expect("it reads");
        drop(input);
        assert!(nft.wait().is_ok_and(|status| status.success()), "{ruleset}");
    }

    /// Has the host have a policy, whatever the rows add, and waits until its server knows it.
    fn have_policy(&self) {
        self.set_ruleset(ALWAYS);
        self.await_policy("obeys");
    }

    fn await_policy(&self, wanted: &str) {
        let is_known = || {
            let status = self.bed.portolan(Side::Server, &["status"]);
            let is_there = status.is_ok_and(|status| status.contains("policy "));
            is_there == (wanted == "obeys")
        };
        assert!(eventually(PROMPTLY, is_known), "{wanted}");
    }

    fn fallbacks(&self) -> u64 {
        counter(&self.bed, Side::Server, "server", "use_kernel_policy")
    }
}

/// A chain that refuses nothing.
const ALWAYS: &str = "chain always { type filter hook input priority 10; tcp dport 1 accept; }";

fn assert_none(differences: Vec<String>) {
    assert!(differences.is_empty(), "\n{}", differences.join("\n"));
}

/// The chain of a row: `[type] hook: rules`.
fn chain(rules: &str) -> String {
    let (head, rules) = rules.split_once(": ").expect("a hook");
    let (kind, hook) = head.split_once(' ').unwrap_or(("filter", head));
    let of_versions = |rule: &str| {
        if !rule.contains("addr $") {
            return Hosts::filled(Version::V4, rule);
        }
        [(Version::V4, "ip"), (Version::V6, "ip6")]
            .map(|(version, name)| format!("{name} {}", Hosts::filled(version, rule)))
            .join("; ")
    };
    let rules: Vec<String> = rules.split("; ").map(of_versions).collect();
    format!(
        "{ALWAYS}\nchain row {{ type {kind} hook {hook} priority 0; {}; }}",
        rules.join("; ")
    )
}

#[test]
fn rules_of_nftables_hold_for_both_stacks() {
    let mut hosts = Hosts::new();
    hosts.have_policy();
    let mut differences = Vec::new();
    for row in NFTABLES {
        hosts.set_ruleset(&chain(row.2));
        differences.extend(hosts.play(row));
    }
    assert_none(differences);
    assert!(hosts.fallbacks() > 0);
}

#[test]
fn rules_of_iptables_and_of_routing_hold_for_both_stacks() {
    let mut hosts = Hosts::new();
    hosts.have_policy();
    let mut differences = Vec::new();
    for row in ROUTING {
        hosts.route("add", row.2);
        differences.extend(hosts.play(row));
        hosts.route("del", row.2);
    }
    for row in IPTABLES {
        for program in ["iptables", "ip6tables"] {
            hosts.host(&format!("{program} -A {}", row.2));
        }
        differences.extend(hosts.play(row));
        for program in ["iptables", "ip6tables"] {
            hosts.host(&format!("{program} -F"));
        }
    }
    assert_none(differences);
}

#[test]
fn a_policy_is_obeyed_as_soon_as_there_is_one_and_costs_nothing_where_there_is_none() {
    let mut hosts = Hosts::new();
    let rows = [
        ("ip rule add fwmark 7 prohibit", "ip rule del fwmark 7"),
        (
            "ip -6 rule add fwmark 7 prohibit",
            "ip -6 rule del fwmark 7",
        ),
        ("iptables -A INPUT -p tcp --dport 1", "iptables -F"),
        ("iptables -P INPUT DROP", "iptables -P INPUT ACCEPT"),
        ("nft -f /dev/stdin", "nft flush ruleset"),
    ];
    for (begin, end) in rows {
        if begin.starts_with("nft") {
            hosts.set_ruleset(ALWAYS);
        } else {
            hosts.host(begin);
        }
        hosts.await_policy("obeys");
        let before = hosts.fallbacks();
        if !begin.contains("-P") {
            let outcomes = hosts.outcomes((Out, "tcp"), "served");
            assert_eq!(outcomes, ["served"; 4], "{begin}");
            assert_eq!(hosts.fallbacks(), before + 2, "{begin}");
        }
        hosts.host(end);
        hosts.await_policy("has none");
        let before = hosts.fallbacks();
        for way in [Out, In, Within] {
            assert_eq!(
                hosts.outcomes((way, "tcp"), "served"),
                ["served"; 4],
                "{end}"
            );
            assert_eq!(
                hosts.outcomes((way, "udp"), "served"),
                ["served"; 4],
                "{end}"
            );
        }
        assert_eq!(hosts.fallbacks(), before, "{end}");
    }
}

/// Programs of a control group, each of which refuses something, by their names in [`REFUSING`].
const OF_GROUPS: &[(&str, &str, &str)] = &[
    ("connect4 connect6", "tcp", "EPERM"),
    ("sendmsg4 sendmsg6", "udp", "EPERM"),
    ("egress", "udp", "EPERM"),
    ("ingress", "tcp", "timeout"),
    ("post_bind4", "tcp", "served"),
];

/// What a program of a control group returns is whether it lets the packet or the call pass.
const REFUSING: &str = r#"
#define REFUSE(hook, name) \
    __attribute__((section(hook), used)) int name(void *context) { return 0; }
REFUSE("cgroup/connect4", connect4)
REFUSE("cgroup/connect6", connect6)
REFUSE("cgroup/sendmsg4", sendmsg4)
REFUSE("cgroup/sendmsg6", sendmsg6)
REFUSE("cgroup_skb/egress", egress)
REFUSE("cgroup_skb/ingress", ingress)
REFUSE("cgroup/post_bind4", post_bind4)
char terms[] __attribute__((section("license"), used)) = "Dual BSD/GPL";
"#;

/// A control group of version 2, which is removed with this.
struct Group {
    path: PathBuf,
}

impl Group {
    fn new(name: &str) -> Group {
        let mounts = fs::read_to_string("/proc/mounts").expect("a list of mounts");
        let of_version_2 = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .find(|fields| fields.get(2) == Some(&"cgroup2"))
            .expect("control groups of version 2");
        let path = PathBuf::from(of_version_2[1])
            .join(format!("portolan-policy-{}-{name}", std::process::id()));
        fs::create_dir(&path).expect("root may");
        Group { path }
    }

    fn take(&self, program: &Steps) {
        let members = self.path.join("cgroup.procs");
        fs::write(members, program.id().to_string()).expect("root may");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its programs have ended, or it stays.
        let _ = fs::remove_dir(&self.path);
    }
}

fn refusing(bed: &Bed) -> Object {
    let source = file(bed, "refusing.c", REFUSING);
    let object = bed.file("refusing.o");
    let mut clang = Command::new("clang");
    clang.args(["-O2", "-target", "bpf", "-c", &source, "-o"]);
    run(clang.arg(&object)).unwrap_or_else(|error| panic!("{error}"));
    let opened = ObjectBuilder::default().open_file(object);
    opened
        .and_then(|object| object.load())
        .expect("the kernel takes it")
}

#[test]
fn programs_of_a_control_group_hold_for_its_processes_on_both_stacks() {
    let mut hosts = Hosts::new();
    let object = refusing(&hosts.bed);
    let mut differences = Vec::new();
    for (names, protocol, expected) in OF_GROUPS {
        let group = Group::new(names.split(' ').next().expect("a name"));
        let directory = fs::File::open(&group.path).expect("it exists");
        let links: Vec<_> = object
            .progs_mut()
            .filter(|program| names.split(' ').any(|name| program.name() == name))
            .map(|program| program.attach_cgroup(directory.as_raw_fd()))
            .collect::<Result<_, _>>()
            .expect("it can be attached");
        assert!(!links.is_empty(), "{names}");
        hosts.own = SOCKETS
            .map(|(stack, _)| {
                let mut command = hosts.bed.command(Side::Server, stack, PYTHON);
                let asker = Steps::start(command.args([SCRIPT, "ask"]));
                group.take(&asker);
                asker
            })
            .into();
        let before = hosts.fallbacks();
        differences.extend(hosts.play(&(Out, protocol, names, expected)));
        assert!(hosts.fallbacks() > before, "{names}");
        hosts.own.clear();
    }
    assert_none(differences);
}
