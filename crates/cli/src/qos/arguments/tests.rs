//! A command line yields exactly the request that it states, or an error that names the invalid word.

use clap::{Parser, Subcommand};
use portolan_types::Protocol;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Set(Setting),
    Del(Deletion),
    Link(LinkArguments),
    Group(Group),
}

fn request(line: &str) -> Result<QosRequest, String> {
    let words = ["qos"].into_iter().chain(line.split_ascii_whitespace());
    let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
    match line.command {
        Command::Set(setting) => setting.request(),
        Command::Del(deletion) => deletion.request(),
        Command::Link(link) => Ok(link.request()),
        Command::Group(group) => group.request(),
    }
    .map_err(|error| error.to_string())
}

#[test]
fn a_rate_is_asked_for_with_all_its_terms() {
    let spec = Transmit {
        device: Some("eth0".into()),
        rate: Rate::Bits(20_000_000),
        burst: Some(65_536),
        slack: Slack::UpTo(50_000_000),
    };
    assert_eq!(
        request("set pid 123 tx --rate 20mbit --burst 64k --ceil 50mbit --dev eth0"),
        Ok(QosRequest::Transmit {
            scope: Scope::Process { pid: 123 },
            spec
        })
    );
}

#[test]
fn a_slice_of_each_period_is_asked_for() {
    let rate = Rate::Slice {
        slice_us: 4_000,
        period_us: 100_000,
    };
    let Ok(QosRequest::Transmit { scope, spec }) =
        request("set port udp:53 tx --slice 4ms --period 100ms --slack")
    else {
        panic!("refused");
    };
    let port = Scope::Port {
        protocol: Protocol::Udp,
        port: 53,
    };
    assert_eq!((scope, spec.rate, spec.slack), (port, rate, Slack::All));
}

#[test]
fn budgets_and_processors_are_asked_for() {
    assert_eq!(
        request("set user root rx --packets 10000 --bits 100mbit --prio 3"),
        Ok(QosRequest::Receive {
            scope: Scope::User { uid: 0 },
            spec: Receive {
                packets: Some(10_000),
                bits: Some(100_000_000),
                burst_ms: Receive::BURST_MS,
                priority: Some(3),
            },
        })
    );
    assert_eq!(
        request("set tid 5 cpu --rate 30% --class video --adapt 0.1-0.5"),
        Ok(QosRequest::Cpu {
            scope: Scope::Thread { tid: 5 },
            spec: Cpu {
                class: Some("video".into()),
                rate_ppm: 300_000,
                period_us: Cpu::PERIOD_US,
                slack: false,
                adapt: Adapt::Auto {
                    least_ppm: 100_000,
                    most_ppm: 500_000
                },
            },
        })
    );
}

#[test]
fn guarantees_end_by_scope_and_kind() {
    assert_eq!(
        request("del cgroup /video.slice rx"),
        Ok(QosRequest::Delete {
            scope: Scope::Cgroup("/video.slice".into()),
            kind: Kind::Receive
        })
    );
}

#[test]
fn a_links_rate_is_said_or_left_to_the_device() {
    let link = |bits| {
        let device = "eth0".into();
        Ok(QosRequest::Link { device, bits })
    };
    assert_eq!(request("link eth0 --rate 50mbit"), link(Some(50_000_000)));
    assert_eq!(request("link eth0 --rate auto"), link(None));
}

#[test]
fn groups_have_the_calls_of_their_table() {
    let group = |action| Ok(QosRequest::Group { key: 7, action });
    let options = GroupOptions {
        share: true,
        ..GroupOptions::default()
    };
    assert_eq!(
        request("group create 7 --rate 50mbit --mode 0710 --share"),
        group(GroupAction::Create {
            device: None,
            bits: 50_000_000,
            mode: 0o710,
            options: GroupOptions {
                keep: true,
                ..options
            },
            algorithm: Algorithm::RateControlled,
        })
    );
    assert_eq!(
        request("group set 7 --rate 20mbit"),
        group(GroupAction::SetRate { bits: 20_000_000 })
    );
    assert_eq!(request("group open 7"), group(GroupAction::Open));
    assert_eq!(
        request("group options 7 --share"),
        group(GroupAction::SetOptions(options))
    );
    assert_eq!(
        request("group join 7 pid 5 --rate 1mbit"),
        group(GroupAction::Join {
            scope: Scope::Process { pid: 5 },
            bits: 1_000_000
        })
    );
    assert_eq!(
        request("group leave 7 2"),
        group(GroupAction::Leave { member: 2 })
    );
    assert_eq!(request("group del 7"), group(GroupAction::Delete));
}

#[test]
fn a_wrong_line_is_refused_by_its_word() {
    for (line, named) in [
        ("set pid x tx --rate 1mbit", "\"x\""),
        ("set job 5 tx --rate 1mbit", "'job'"),
        ("set pid 5 tx --rate 1mbps", "1mbps"),
        ("set pid 5 tx --rate -1mbit", "'-1'"),
        ("set pid 5 tx", "--rate"),
        ("group create 7 --rate 1mbit --alg fifo", "fifo"),
        ("link eth0 --rate fast", "fast"),
        (
            "set pid 5 tx --rate 1mbit --slice 1ms --period 2ms",
            "--slice",
        ),
        ("set pid 5 tx --slice 1ms", "--period"),
        ("set pid 5 tx --rate 1mbit --ceil 2mbit --slack", "--slack"),
        ("set pid 5 rx", "--packets"),
        ("set pid 5 rx --prio 8", "8"),
        ("set pid 5 rx --packets 4294967296", "4294967296"),
        ("set pid 5 cpu", "--rate"),
        ("set user nosuchuser rx --packets 1", "nosuchuser"),
        ("set flow tcp:10.0.0.1:1 rx --packets 1", "10.0.0.1:1"),
        ("del pid 5 net", "net"),
        ("group create 7 --rate 1mbit --mode 1777", "1777"),
        ("group create -7 --rate 1mbit", "-7"),
    ] {
        let refused = request(line).unwrap_err();
        assert!(refused.contains(named), "{line}: {refused}");
    }
}

/// Any specification survives the conversion to a command line and back.
#[test]
fn any_spec_can_be_said() {
    portolan_fuzz::check!(500)
        .with_type::<(u64, u32, u64, u32, u32)>()
        .for_each(|&(rate, burst, ceil, slice, period)| {
            let [shown_rate, shown_ceil] = [rate, ceil].map(text::show_rate);
            let [shown_slice, shown_period] = [slice, period].map(text::show_duration);
            let shown_burst = text::show_bytes(burst);
            let spec = |terms: String| match request(&format!("set pid 1 tx {terms}")) {
                Ok(QosRequest::Transmit { spec, .. }) => spec,
                other => panic!("{other:?}"),
            };
            let by_rate = spec(format!(
                "--rate {shown_rate} --burst {shown_burst} --ceil {shown_ceil}"
            ));
            assert_eq!(by_rate.rate, Rate::Bits(rate));
            assert_eq!(by_rate.burst, Some(burst));
            assert_eq!(by_rate.slack, Slack::UpTo(ceil));
            let by_slice = spec(format!("--slice {shown_slice} --period {shown_period}"));
            let asked = Rate::Slice {
                slice_us: slice,
                period_us: period,
            };
            assert_eq!(by_slice.rate, asked);
        });
}
