//! `portolan nstat`: counters since the last call, in the style of nstat(8), and by the kernel's names where the kernel
//! has the same counter.

mod history;

use std::collections::BTreeMap;

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::report::CounterReport;
use schemars::JsonSchema;
use serde::Serialize;

use self::history::History;
use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json;
use crate::server::unexpected;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Show counters since the server's start instead of since the last call.
    #[arg(short, long)]
    absolute: bool,
    /// Include counters that are zero.
    #[arg(short, long)]
    zeros: bool,
    /// Forget the last call first.
    #[arg(short, long)]
    reset: bool,
    /// Do not remember this call.
    #[arg(short = 's', long)]
    noupdate: bool,
    /// Print JSON.
    #[arg(short, long)]
    pub json: bool,
    /// Show counters with these names only; `*` stands for anything.
    #[arg(value_name = "PATTERN")]
    patterns: Vec<String>,
}

/// Counters by name.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct NstatView {
    pub portolan: BTreeMap<String, u64>,
}

/// The kernel's name of a counter, and those of Portolan's counters whose sum it is.
const KERNELS: [(&str, &[&str]); 25] = [
    ("TcpActiveOpens", &["server.active_opens"]),
    ("TcpPassiveOpens", &["server.passive_opens"]),
    ("TcpAttemptFails", &["server.failed_opens"]),
    ("TcpOutRsts", &["server.resets_sent", "tcp.resets_sent"]),
    ("TcpExtTCPTimeouts", &["tcp.timeouts"]),
    ("TcpExtTCPLossProbes", &["tcp.tail_probes"]),
    ("TcpExtTCPLossProbeRecovery", &["tcp.tail_probe_recoveries"]),
    ("TcpExtTCPKeepAlive", &["tcp.keepalive_probes"]),
    ("TcpExtTCPOFOQueue", &["tcp.out_of_order"]),
    ("TcpExtPAWSEstab", &["tcp.drop_paws"]),
    ("TcpExtTCPChallengeACK", &["tcp.challenge_acks"]),
    ("TcpExtTCPDSACKRecv", &["tcp.dsacks_received"]),
    ("TcpExtTCPDSACKOldSent", &["tcp.dsacks_sent"]),
    ("TcpExtTCPSpuriousRTOs", &["tcp.undone_by_f_rto"]),
    ("TcpExtTCPAbortOnTimeout", &["tcp.given_up"]),
    (
        "TcpExtSyncookiesSent",
        &[
            "server.syn_cookies_sent",
            "stack.syn_cookies_sent",
            "receive.answered_syn",
        ],
    ),
    (
        "TcpExtSyncookiesRecv",
        &["server.syn_cookies_accepted", "stack.syn_cookies_accepted"],
    ),
    (
        "TcpExtSyncookiesFailed",
        &["server.syn_cookies_refused", "stack.syn_cookies_refused"],
    ),
    (
        "TcpExtListenOverflows",
        &[
            "server.accept_queue_overflows",
            "stack.accept_queue_overflows",
        ],
    ),
    (
        "TcpExtListenDrops",
        &[
            "server.syns_dropped_queue_full",
            "stack.syns_dropped_queue_full",
            "receive.drop_syn",
        ],
    ),
    ("TcpExtTCPFastOpenPassive", &["server.fast_opens_accepted"]),
    (
        "TcpExtTCPMinTTLDrop",
        &["server.segments_dropped_min_ttl", "stack.drop_min_ttl"],
    ),
    ("IpReasmOKs", &["server.datagrams_reassembled"]),
    ("IpReasmTimeout", &["server.reassembly_timeouts"]),
    ("UdpRcvbufErrors", &["stack.drop_receive_buffer"]),
];

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let ReplyBody::Status(status) = arguments.server.ask(RequestBody::ReadStatus)? else {
        return Err(unexpected());
    };
    let now = named(&arguments.server.counters()?);
    let server = format!("{} {}", arguments.server.path()?.display(), status.pid);
    let history = if arguments.reset {
        History::default()
    } else {
        History::read(&server)
    };
    let seconds = history.age();
    let shown = if arguments.absolute {
        now.clone()
    } else {
        history.since(&now)
    };
    if !arguments.noupdate {
        History::of(server, now).write()?;
    }
    show(arguments, shown, seconds)
}

fn show(
    arguments: &Arguments,
    mut counters: BTreeMap<String, u64>,
    seconds: Option<f64>,
) -> Result<(), Failure> {
    counters.retain(|name, value| (*value != 0 || arguments.zeros) && arguments.wants(name));
    if arguments.json {
        return print_json(&NstatView { portolan: counters });
    }
    print("#portolan")?;
    for (name, value) in counters {
        let rate = seconds.filter(|_| !arguments.absolute);
        let rate = rate.map_or(0.0, |seconds| value as f64 / seconds.max(1.0));
        print(format!("{name:<32}{value:<16} {rate:.1}"))?;
    }
    Ok(())
}

impl Arguments {
    fn wants(&self, name: &str) -> bool {
        self.patterns.is_empty() || self.patterns.iter().any(|pattern| matches(pattern, name))
    }
}

/// Matches a name against a pattern, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or("");
    for part in parts {
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(last)
}

/// Returns the sums over all holders, by the kernel's names where it has the counter, else as `Portolan…`.
fn named(counters: &[CounterReport]) -> BTreeMap<String, u64> {
    let sums: BTreeMap<String, u64> = counters
        .iter()
        .filter(|counter| counter.holder.is_none())
        .map(|counter| (format!("{}.{}", counter.group, counter.name), counter.value))
        .collect();
    let is_kernels = |name: &String| {
        KERNELS
            .iter()
            .any(|(_, parts)| parts.contains(&name.as_str()))
    };
    let own = sums
        .iter()
        .filter(|(name, _)| !is_kernels(name))
        .map(|(name, value)| (own_name(name), *value));
    let kernels = KERNELS.iter().map(|(name, parts)| {
        let values = parts.iter().filter_map(|part| sums.get(*part));
        (
            (*name).to_owned(),
            values.fold(0, |sum: u64, value| sum.wrapping_add(*value)),
        )
    });
    own.chain(kernels).collect()
}

/// Turns `receive.drop_ring_full` into `PortolanReceiveDropRingFull`.
fn own_name(name: &str) -> String {
    let words = name.split(['.', '_', '-']);
    let capital = |word: &str| {
        let mut letters = word.chars();
        let first = letters.next().map(|c| c.to_ascii_uppercase());
        first.into_iter().chain(letters).collect::<String>()
    };
    std::iter::once("Portolan".to_owned())
        .chain(words.map(capital))
        .collect()
}

#[cfg(test)]
mod tests {
    use portolan_tcp::EVENTS;

    use super::*;

    fn counter(group: &str, name: &str, value: u64) -> CounterReport {
        CounterReport {
            group: group.into(),
            name: name.into(),
            value,
            holder: None,
        }
    }

    #[test]
    fn what_the_kernel_counts_too_has_its_name() {
        let counters = [
            counter("tcp", "timeouts", 3),
            counter("server", "resets_sent", 1),
            counter("tcp", "resets_sent", 2),
            counter("receive", "drop_ring_full", 9),
        ];
        let named = named(&counters);
        assert_eq!(named["TcpExtTCPTimeouts"], 3);
        assert_eq!(named["TcpOutRsts"], 3);
        assert_eq!(named["PortolanReceiveDropRingFull"], 9);
        assert!(!named.contains_key("PortolanTcpTimeouts"));
    }

    #[test]
    fn counters_of_connections_that_have_a_kernels_name_exist() {
        for (name, parts) in KERNELS {
            for part in parts.iter().filter_map(|part| part.strip_prefix("tcp.")) {
                assert!(
                    EVENTS.iter().any(|(event, _)| *event == part),
                    "{name}: {part}"
                );
            }
        }
    }

    #[test]
    fn patterns_have_stars() {
        for (pattern, name, is_meant) in [
            ("Tcp*", "TcpOutRsts", true),
            ("*Rsts", "TcpOutRsts", true),
            ("*Out*", "TcpOutRsts", true),
            ("T*O*s", "TcpOutRsts", true),
            ("TcpOutRsts", "TcpOutRsts", true),
            ("Udp*", "TcpOutRsts", false),
            ("TcpOut", "TcpOutRsts", false),
            ("*x*", "TcpOutRsts", false),
        ] {
            assert_eq!(matches(pattern, name), is_meant, "{pattern}");
        }
    }
}
