//! The arguments of `portolan qos set`, `del` and `group`, and the requests that they form.

use clap::ValueEnum;
use portolan_proto::qos::text::{self, Unreadable};
use portolan_proto::qos::{
    Adapt, Algorithm, Cpu, GroupAction, GroupOptions, Kind, QosRequest, Rate, Receive, Scope,
    Slack, Transmit,
};
use portolan_sys::accounts;

/// The last part of the help of `qos set`, `qos del` and `qos group join`.
pub(super) const SCOPES: &str = "Scopes:
    pid 123  a process, until it ends
    tid 5  a thread, until it ends; cpu only
    user www  all processes of a user, by name or number
    cgroup /video.slice  all processes of a cgroup and its descendants; the path below /sys/fs/cgroup
    port udp:53  a local port
    flow tcp:10.0.0.1:80-10.0.0.2:4000  a connection, the local end first; udp:[fd00::1]:53-[fd00::2]:4000

Units:
    RATE  20mbit: bit, kbit, mbit or gbit per second
    TIME  100ms: us, ms or s
    SIZE  64k: bytes, or k for 1024 and m for 1048576 of them
    SHARE  0.3 or 30%: of one CPU";

/// The scope of a guarantee.
#[derive(clap::Args)]
pub(super) struct Whom {
    /// The kind of scope.
    #[arg(value_enum, value_name = "WHAT")]
    what: What,
    /// Its name or number.
    #[arg(value_name = "WHICH")]
    which: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    Pid,
    Tid,
    User,
    Cgroup,
    Port,
    Flow,
}

impl Whom {
    fn scope(&self) -> Result<Scope, Unreadable> {
        let which = self.which.as_str();
        match self.what {
            What::Pid => text::process(which).map(|pid| Scope::Process { pid }),
            What::Tid => text::process(which).map(|tid| Scope::Thread { tid }),
            What::User => text::user(which, accounts::uid_of),
            What::Cgroup => text::cgroup(which),
            What::Port => text::port(which),
            What::Flow => text::flow(which),
        }
    }
}

#[derive(clap::Args)]
pub(super) struct Setting {
    #[command(flatten)]
    whom: Whom,
    #[command(subcommand)]
    spec: ReserveKind,
}

#[derive(clap::Subcommand)]
enum ReserveKind {
    /// Reserve a transmit rate.
    Tx(TransmitArguments),
    /// Set a receive budget; the excess is dropped.
    Rx(ReceiveArguments),
    /// Reserve time on a CPU.
    Cpu(CpuArguments),
}

impl Setting {
    pub(super) fn request(&self) -> Result<QosRequest, Unreadable> {
        let scope = self.whom.scope()?;
        Ok(match &self.spec {
            ReserveKind::Tx(arguments) => QosRequest::Transmit {
                scope,
                spec: arguments.spec(),
            },
            ReserveKind::Rx(arguments) => QosRequest::Receive {
                scope,
                spec: arguments.spec(),
            },
            ReserveKind::Cpu(arguments) => QosRequest::Cpu {
                scope,
                spec: arguments.spec(),
            },
        })
    }
}

#[derive(clap::Args)]
struct TransmitArguments {
    /// Bits per second, Ethernet headers included: 20mbit.
    #[arg(long, value_parser = text::rate, required_unless_present = "slice", conflicts_with = "slice")]
    rate: Option<u64>,
    /// A slice of the link's time in each period, instead of a rate: 4ms.
    #[arg(long, value_name = "TIME", value_parser = text::duration, requires = "period")]
    slice: Option<u32>,
    /// The period of the slice: 100ms.
    #[arg(long, value_name = "TIME", value_parser = text::duration, requires = "slice")]
    period: Option<u32>,
    /// Bytes that may be sent at once after a pause: 64k [default: what the rate sends in a slice].
    #[arg(long, value_name = "SIZE", value_parser = text::bytes)]
    burst: Option<u32>,
    /// Allow sending beyond the rate, up to this one, while the link has spare capacity.
    #[arg(long, value_name = "RATE", value_parser = text::rate, conflicts_with = "slack")]
    ceil: Option<u64>,
    /// Allow sending beyond the rate, up to the link's, while the link has spare capacity.
    #[arg(long)]
    slack: bool,
    /// The link; may be left out if only one has a rate.
    #[arg(long, value_name = "DEVICE")]
    dev: Option<String>,
}

impl TransmitArguments {
    fn spec(&self) -> Transmit {
        let rate = match (self.slice, self.period) {
            (Some(slice_us), Some(period_us)) => Rate::Slice {
                slice_us,
                period_us,
            },
            _ => Rate::Bits(self.rate.unwrap_or_default()),
        };
        let slack = match (self.ceil, self.slack) {
            (Some(bits), _) => Slack::UpTo(bits),
            (None, true) => Slack::All,
            (None, false) => Slack::None,
        };
        Transmit {
            device: self.dev.clone(),
            rate,
            burst: self.burst,
            slack,
        }
    }
}

#[derive(clap::Args)]
#[group(required = true, multiple = true, args = ["packets", "bits", "prio"])]
struct ReceiveArguments {
    /// Packets per second: 10000.
    #[arg(long)]
    packets: Option<u32>,
    /// Bits per second, Ethernet headers included: 100mbit.
    #[arg(long, value_name = "RATE", value_parser = text::rate)]
    bits: Option<u64>,
    /// The time for which an unused budget accumulates.
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = text::milliseconds)]
    burst: u32,
    /// Priority, from 0 (dropped first when a ring fills) to 7; for flows and ports.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=7))]
    prio: Option<u8>,
}

impl ReceiveArguments {
    fn spec(&self) -> Receive {
        Receive {
            packets: self.packets,
            bits: self.bits,
            burst_ms: self.burst,
            priority: self.prio,
        }
    }
}

#[derive(clap::Args)]
struct CpuArguments {
    /// Share of one CPU: 0.3 or 30%.
    #[arg(long, value_name = "SHARE", value_parser = text::share)]
    rate: u32,
    /// The period in which the share is granted.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = text::duration)]
    period: u32,
    /// Service class [default: the configuration's default one].
    #[arg(long)]
    class: Option<String>,
    /// Allow running beyond the rate while CPUs are idle.
    #[arg(long)]
    slack: bool,
    /// Reaction when the measured use differs: off, propose, or limits between which the rate follows: 0.1-0.5.
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = text::adapt)]
    adapt: Adapt,
}

impl CpuArguments {
    fn spec(&self) -> Cpu {
        Cpu {
            class: self.class.clone(),
            rate_ppm: self.rate,
            period_us: self.period,
            slack: self.slack,
            adapt: self.adapt,
        }
    }
}

#[derive(clap::Args)]
pub(super) struct Deletion {
    #[command(flatten)]
    whom: Whom,
    /// The kind of guarantee.
    #[arg(value_enum)]
    kind: KindWord,
}

#[derive(Clone, Copy, ValueEnum)]
enum KindWord {
    Tx,
    Rx,
    Cpu,
}

impl Deletion {
    pub(super) fn request(&self) -> Result<QosRequest, Unreadable> {
        Ok(QosRequest::Delete {
            scope: self.whom.scope()?,
            kind: match self.kind {
                KindWord::Tx => Kind::Transmit,
                KindWord::Rx => Kind::Receive,
                KindWord::Cpu => Kind::Cpu,
            },
        })
    }
}

#[derive(clap::Args)]
pub(super) struct Group {
    #[command(subcommand)]
    pub command: GroupCommand,
}

#[derive(clap::Subcommand)]
pub(super) enum GroupCommand {
    /// Make a group with a reserved rate, which exists until it is deleted.
    Create {
        /// The number of the group on this host.
        key: u32,
        /// The rate of all its members together, in bits per second.
        #[arg(long, value_parser = text::rate)]
        rate: u64,
        /// The link; may be left out if only one has a rate.
        #[arg(long, value_name = "DEVICE")]
        dev: Option<String>,
        /// Permissions to join (x), read (r) and change it (w), in octal as for chmod(1).
        #[arg(long, default_value = "0700", value_parser = mode)]
        mode: u16,
        /// How members share the rate.
        #[arg(long, value_enum, default_value = "rate")]
        alg: AlgorithmWord,
        /// Let members use what other members leave of the group's rate.
        #[arg(long)]
        share: bool,
        /// Let the group send beyond its rate while the link has spare capacity.
        #[arg(long)]
        slack: bool,
    },
    /// Check whether the caller may join a group.
    Open {
        /// The number of the group.
        key: u32,
    },
    /// Set all options of a group; options that are not given are off.
    Options {
        /// The number of the group.
        key: u32,
        #[command(flatten)]
        options: OptionArguments,
    },
    /// Change the rate of a group.
    Set {
        /// The number of the group.
        key: u32,
        /// The rate of all its members together, in bits per second.
        #[arg(long, value_parser = text::rate)]
        rate: u64,
    },
    /// Add a flow or a process, and print the number of the member.
    #[command(after_long_help = SCOPES)]
    Join {
        /// The number of the group.
        key: u32,
        #[command(flatten)]
        whom: Whom,
        /// The rate of this member, in bits per second.
        #[arg(long, value_parser = text::rate)]
        rate: u64,
    },
    /// Remove a member.
    Leave {
        /// The number of the group.
        key: u32,
        /// The number that `join` printed.
        member: u32,
    },
    /// Delete a group.
    Del {
        /// The number of the group.
        key: u32,
    },
    /// Show all groups.
    List,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum AlgorithmWord {
    /// Each member has its rate at any time (KT_RC).
    Rate,
}

#[derive(clap::Args)]
pub(super) struct LinkArguments {
    /// A managed device.
    device: String,
    /// Its rate, such as 50mbit; or auto, for the rate that the device reports.
    #[arg(long, value_parser = link_rate)]
    rate: LinkRate,
}

/// A link's rate; None stands for `auto`.
#[derive(Clone, Copy)]
struct LinkRate(Option<u64>);

impl LinkArguments {
    pub(super) fn request(&self) -> QosRequest {
        QosRequest::Link {
            device: self.device.clone(),
            bits: self.rate.0,
        }
    }
}

fn link_rate(word: &str) -> Result<LinkRate, Unreadable> {
    match word {
        "auto" => Ok(LinkRate(None)),
        word => text::rate(word).map(|bits| LinkRate(Some(bits))),
    }
}

#[derive(clap::Args)]
pub(super) struct OptionArguments {
    /// Let members use what other members leave of the group's rate.
    #[arg(long)]
    share: bool,
    /// Let the group send beyond its rate while the link has spare capacity.
    #[arg(long)]
    slack: bool,
    /// Keep the group when its creator and its members have ended.
    #[arg(long)]
    keep: bool,
}

impl OptionArguments {
    fn options(&self) -> GroupOptions {
        GroupOptions {
            share: self.share,
            slack: self.slack,
            keep: self.keep,
        }
    }
}

impl Group {
    /// Returns the request. `list` has none of this kind: nothing of it is granted or refused.
    pub(super) fn request(&self) -> Result<QosRequest, Unreadable> {
        let (key, action) = match &self.command {
            GroupCommand::Create {
                key,
                rate,
                dev,
                mode,
                alg: AlgorithmWord::Rate,
                share,
                slack,
            } => {
                let options = GroupOptions {
                    share: *share,
                    slack: *slack,
                    // The creator is this command, which ends at once.
                    keep: true,
                };
                let action = GroupAction::Create {
                    device: dev.clone(),
                    bits: *rate,
                    mode: *mode,
                    options,
                    algorithm: Algorithm::RateControlled,
                };
                (key, action)
            }
            GroupCommand::Set { key, rate } => (key, GroupAction::SetRate { bits: *rate }),
            GroupCommand::Open { key } => (key, GroupAction::Open),
            GroupCommand::Options { key, options } => {
                (key, GroupAction::SetOptions(options.options()))
            }
            GroupCommand::Join { key, whom, rate } => {
                let action = GroupAction::Join {
                    scope: whom.scope()?,
                    bits: *rate,
                };
                (key, action)
            }
            GroupCommand::Leave { key, member } => (key, GroupAction::Leave { member: *member }),
            GroupCommand::Del { key } => (key, GroupAction::Delete),
            GroupCommand::List => return Ok(QosRequest::Show),
        };
        Ok(QosRequest::Group { key: *key, action })
    }
}

/// Permission bits in octal.
fn mode(word: &str) -> Result<u16, String> {
    u16::from_str_radix(word, 8)
        .ok()
        .filter(|mode| mode & !0o777 == 0 && !word.starts_with('+'))
        .ok_or_else(|| format!("{word:?} is not a mode, such as 0710"))
}

#[cfg(test)]
mod tests;
