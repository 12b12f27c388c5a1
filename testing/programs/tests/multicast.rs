//! Groups on a link of three hosts, as multicast DNS uses them: two of the hosts with Portolan, and
//! on each host several programs that share a port.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_netns::{Daemon, Ready};
use portolan_programs::{PYTHON, eventually};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/members.py");
const PORT: &str = "5353";

/// More time than a datagram to every program takes.
const LIMIT: Duration = Duration::from_secs(30);

/// A duplicate of one round is detected in the next.
const ROUNDS: u32 = 3;

/// A program and its group.
struct Member {
    name: &'static str,
    group: &'static str,
    program: Daemon,
}

impl Member {
    /// Returns how often it has received what `sender` sent in a round.
    fn heard(&self, sender: &str, round: u32) -> usize {
        let line = format!("heard {sender}:{round}");
        let output = self.program.output();
        output.lines().filter(|other| *other == line).count()
    }
}

#[test]
fn every_member_of_a_group_hears_every_sender_once_and_nobody_else_does() {
    let bed = Bed::switched().unwrap_or_else(|error| panic!("no bed: {error}"));
    for groups in [["224.0.0.251", "239.77.0.1"], ["ff02::fb", "ff05::77:1"]] {
        exchange(&bed, groups);
    }
}

fn exchange(bed: &Bed, [group, other]: [&'static str; 2]) {
    let meet = bed.file(&group.replace(':', "-"));
    fs::create_dir_all(&meet).expect("the bed's directory is writable");
    let guest = bed.guest(if group.contains(':') { 4 } else { 3 });
    let on = |side| bed.command(side, Stack::Portolan, PYTHON);
    let kernel = || guest.exec(PYTHON);
    let member = |name, group, command| join(name, group, command, &meet);
    let members = [
        member("one", group, on(Side::Client)),
        member("two", group, on(Side::Client)),
        member("three", group, on(Side::Server)),
        member("four", group, kernel()),
        member("five", group, kernel()),
        member("six", other, on(Side::Client)),
        member("seven", other, on(Side::Server)),
        member("eight", other, kernel()),
    ];
    take_rounds(&members, &meet);
}

fn take_rounds(members: &[Member], meet: &Path) {
    for round in 1..=ROUNDS {
        fs::write(meet.join(format!("round-{round}")), "").expect("the same");
        let complete = eventually(LIMIT, || account(members, round, usize::min).is_empty());
        assert!(complete, "{:#?}", account(members, round, usize::min));
    }
    for round in 1..ROUNDS {
        let exact = account(members, round, |times, _| times);
        assert!(exact.is_empty(), "{exact:#?}");
    }
}

fn join(name: &'static str, group: &'static str, command: Command, meet: &Path) -> Member {
    join_by(INTERFACE, (name, group), command, meet)
}

fn join_by(
    device: &str,
    (name, group): (&'static str, &'static str),
    mut command: Command,
    meet: &Path,
) -> Member {
    command.args([SCRIPT, name, group, PORT, device]).arg(meet);
    Member {
        name,
        group,
        program: Daemon::start(command, Ready::Line("ready".to_owned())),
    }
}

/// Returns which members received a sender more or less often than expected. `count` is given the actual
/// and the expected number.
fn account(members: &[Member], round: u32, count: impl Fn(usize, usize) -> usize) -> Vec<String> {
    let pairs = members
        .iter()
        .flat_map(|member| members.iter().map(move |sender| (member, sender)));
    let told = pairs.filter_map(|(member, sender)| {
        let expected = usize::from(member.group == sender.group);
        let times = member.heard(sender.name, round);
        (count(times, expected) != expected).then(|| {
            let (member, sender) = (member.name, sender.name);
            format!("{member} heard {sender} {times} times in round {round}, not {expected}")
        })
    });
    told.collect()
}

/// On such a device, the kernel delivers the group's datagrams to each member's own socket.
#[test]
fn members_on_a_device_that_is_not_managed_hear_every_sender_once() {
    let bed = Bed::new().unwrap_or_else(|error| panic!("no bed: {error}"));
    let host = bed.namespace(Side::Client);
    host.ip("link add plain type veth peer name other");
    host.ip("addr add 10.88.0.1/24 dev plain");
    host.ip("addr add fd88::1/64 dev plain nodad");
    host.ip("link set other up");
    host.ip("link set plain up");
    for group in ["239.77.0.2", "ff05::77:2"] {
        let meet = bed.file(&group.replace(':', "-"));
        fs::create_dir_all(&meet).expect("the bed's directory is writable");
        let member = |name, stack| {
            let command = bed.command(Side::Client, stack, PYTHON);
            join_by("plain", (name, group), command, &meet)
        };
        let members = [
            member("one", Stack::Portolan),
            member("two", Stack::Portolan),
            member("three", Stack::Portolan),
            member("four", Stack::Kernel),
        ];
        take_rounds(&members, &meet);
    }
}

/// RFC 3376 §4.2, RFC 3810 §5.2: routers and switches are notified of members.
#[test]
fn joining_and_leaving_is_reported_on_the_link() {
    let bed = Bed::new().unwrap_or_else(|error| panic!("no bed: {error}"));
    // MLD follows a hop-by-hop header.
    let filter = "igmp or ip6[6] = 0";
    let mut tcpdump = bed.command(Side::Server, Stack::Kernel, "tcpdump");
    tcpdump.args(["-l", "-n", "-v", "-i", INTERFACE, filter]);
    let capture = Daemon::start(tcpdump, Ready::Line("listening on".to_owned()));
    let meet = bed.file("nobody-meets");
    for (group, joined, left) in [
        (
            "239.77.0.1",
            "[gaddr 239.77.0.1 to_ex",
            "[gaddr 239.77.0.1 to_in",
        ),
        (
            "ff05::77:1",
            "[gaddr ff05::77:1 to_ex",
            "[gaddr ff05::77:1 to_in",
        ),
    ] {
        let member = bed.command(Side::Client, Stack::Portolan, PYTHON);
        let member = join("one", group, member, &meet);
        let is_seen = |report: &str| eventually(LIMIT, || capture.output().contains(report));
        assert!(is_seen(joined), "{}", capture.output());
        drop(member);
        assert!(is_seen(left), "{}", capture.output());
    }
}
