//! `portolan qos`: requests guarantees from the server, and shows them. The server decides; the reason of a refusal is
//! printed as the server gave it.

mod arguments;
mod report;
pub(crate) mod show;
mod watch;

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::{GroupAction, QosReply, QosRequest};
use schemars::JsonSchema;
use serde::Serialize;

pub(crate) use self::report::QosView;
pub(crate) use self::watch::Rates as RatesView;

use self::arguments::{Deletion, Group, GroupCommand, LinkArguments, Setting};
use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json_line;
use crate::server::unexpected;
use crate::table::printable;

/// A flow that has joined a group.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct JoinedView {
    /// The number that `qos group leave` takes.
    pub member: u32,
}

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Print JSON.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Show links, transmit reservations, groups, receive budgets and CPU reservations.
    ///
    /// The column `Kept` shows how much of a rate is kept: `yes` for all of it; a lower rate on a link that has become
    /// too slow for all its reservations; `no` while the link is down.
    Show,
    /// Make or change a guarantee.
    #[command(after_long_help = arguments::SCOPES)]
    Set(Setting),
    /// End a guarantee.
    #[command(after_long_help = arguments::SCOPES)]
    Del(Deletion),
    /// Show the classes of links with their traffic, and the service classes of CPUs.
    ///
    /// A packet that the device segments counts with all its bytes, but as one packet: the kernel does not count
    /// segments.
    Classes,
    /// Tell the server the current rate of a link. Needs root.
    ///
    /// If it is lower than the sum of the reservations, all of them are reduced in proportion. Holds until
    /// the server is stopped for good.
    Link(LinkArguments),
    /// Share a reserved rate between several flows or processes.
    Group(Group),
    /// Show traffic and CPU time beside the guarantees, every SECONDS seconds.
    ///
    /// Also reports when a link goes down, comes up or changes its rate, and when guarantees are suspended, reduced,
    /// or kept in full again (`events` in JSON).
    Watch {
        /// The interval.
        #[arg(default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let request = match &arguments.command {
        Command::Show => return show::everything(arguments),
        Command::Classes => return show::classes(arguments),
        Command::Watch { seconds } => return watch::run(arguments, *seconds),
        Command::Group(Group {
            command: GroupCommand::List,
        }) => return show::groups(arguments),
        Command::Set(setting) => setting.request(),
        Command::Del(deletion) => deletion.request(),
        Command::Link(link) => Ok(link.request()),
        Command::Group(group) => group.request(),
    };
    arguments.spec(request.map_err(|error| Failure::Usage(error.into()))?)
}

impl Arguments {
    /// Sends a request that the server grants or refuses.
    fn spec(&self, request: QosRequest) -> Result<(), Failure> {
        let joins = matches!(
            request,
            QosRequest::Group {
                action: GroupAction::Join { .. },
                ..
            }
        );
        let reply = self.server.ask(RequestBody::Qos(request))?;
        match reply {
            ReplyBody::Qos(QosReply::Done) if !joins => Ok(()),
            ReplyBody::Qos(QosReply::Joined { member }) if joins && self.json => {
                print_json_line(&JoinedView { member })
            }
            ReplyBody::Qos(QosReply::Joined { member }) if joins => print(member),
            ReplyBody::Qos(QosReply::Refused(refusal)) => {
                Err(Failure::Refused(printable(&refusal.reason)))
            }
            _ => Err(unexpected()),
        }
    }
}
